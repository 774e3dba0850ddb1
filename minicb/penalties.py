"""Changes to logits before a token is chosen: allowed and banned tokens, logit_bias, penalties."""

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minicb.device import upload
from minicb.interrupts import hold_ctrl_c
from minicb.request import Request

LARGEST = 1e38  # changed logits are clamped to it, because infinity minus infinity is NaN


def adjust(logits: Tensor, requests: Sequence[Request]) -> None:
    """Add logit_bias; apply the penalties; ban all but allowed_token_ids, and EOS and stop tokens before min_tokens
    output tokens.

    logits: [len(requests), vocab_size] float32 or float64, changed in place and only where a request asks for it.
    The order is vLLM's, except that the bans come last, so nothing overcomes them.
    """
    biased, penalized, banned = list[tuple[int, int, float]](), list[int](), list[tuple[int, int]]()
    for row, request in enumerate(requests):
        if request.logit_bias:
            biased += [(row, token, bias) for token, bias in request.logit_bias.items()]
        if request.penalizes:
            penalized.append(row)
        if request.num_output_tokens < request.params.min_tokens:
            banned += [(row, token) for token in sorted(request.eos_token_ids | request.stop_token_ids)]
    if biased:
        rows, tokens, biases = zip(*biased, strict=True)
        place = upload(rows, logits.device), upload(tokens, logits.device)
        logits[place] = (logits[place] + upload(biases, logits.device, logits.dtype)).clamp_(-LARGEST, LARGEST)
    if penalized:
        _penalize(logits, penalized, [requests[row] for row in penalized])
    for row, request in enumerate(requests):
        if request.params.allowed_token_ids is not None:
            allowed = upload(sorted(request.params.allowed_token_ids), logits.device)
            kept = logits[row, allowed]
            logits[row].fill_(-torch.inf)[allowed] = kept
    if banned:
        rows, tokens = zip(*banned, strict=True)
        place = upload(rows, logits.device), upload(tokens, logits.device)
        logits[place] = logits.new_full((), -torch.inf)  # a number of the host would be copied, and waited for


def _penalize(logits: Tensor, rows: Sequence[int], requests: Sequence[Request]) -> None:
    """Repetition penalty on the tokens of prompt and output, frequency and presence penalty on those of the output."""
    with hold_ctrl_c():  # counts must not stop between two tokens
        seen = [_count_tokens(request) for request in requests]
    lengths = [len(counts.tokens) for counts in seen]
    rows_and_tokens = np.stack((np.repeat(rows, lengths), np.concatenate([counts.tokens for counts in seen])))
    place = tuple(upload(rows_and_tokens, logits.device))
    counts = upload(np.concatenate([counts.counts for counts in seen]), logits.device, logits.dtype)

    def of_each(values: Sequence[float]) -> Tensor:
        return upload(np.repeat(values, lengths), logits.device, logits.dtype)

    values = logits[place]
    # The limits of float32: 0 times infinity is NaN.
    repetition = of_each([min(max(float(request.params.repetition_penalty), 1e-30), 1e30) for request in requests])
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= of_each([float(request.params.frequency_penalty) for request in requests]) * counts
    values -= of_each([float(request.params.presence_penalty) for request in requests]) * (counts > 0)
    logits[place] = values.clamp_(-LARGEST, LARGEST)


class TokenCounts:
    """The distinct tokens that a request's penalties concern, and how often each is in its output so far."""

    def __init__(self, num_counted: int) -> None:
        self.tokens, self.counts = array("q"), array("f")
        self.places: dict[int, int] = {}  # token -> its index in the two arrays
        self.num_counted = num_counted  # tokens of the request, from its first on

    def add(self, token: int, is_output: bool) -> None:
        place = self.places.setdefault(token, len(self.tokens))
        if place == len(self.tokens):
            self.tokens.append(token)
            self.counts.append(0)
        self.counts[place] += is_output


def _count_tokens(request: Request) -> TokenCounts:
    """The request's counts up to its last token. The request keeps them, so a step counts only new tokens."""
    if request.token_counts is None:  # only the repetition penalty concerns the prompt
        first = request.num_prompt_tokens if request.params.repetition_penalty == 1 else 0
        request.token_counts = TokenCounts(first)
    counts = request.token_counts
    for position in range(counts.num_counted, request.num_tokens):
        counts.add(request.token_ids[position], position >= request.num_prompt_tokens)
    counts.num_counted = request.num_tokens
    return counts
