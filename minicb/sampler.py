"""From logits to tokens, for all rows of a batch at once."""

import hashlib
from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minicb.request import Logprob, Request, Sampled, ScoredToken

LARGEST = 1e38  # bias and penalties make no logit larger, or float32's sums would have no end


def uniform(seed: int, index: int) -> float:
    """The random number in [0, 1) for a request's output token `index`: 24 bits of a hash of both.

    Not drawn from a generator's state but computed, so that a request gets the same numbers alone,
    in any batch, in any chunks and after a preemption.
    """
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=3).digest()
    return int.from_bytes(digest, "big") / 2**24


def sample(logits: Tensor, requests: Sequence[Request]) -> list[Sampled]:
    """The next token of each request, with its log probabilities if the request wants them; None where its
    logits are not finite.

    logits: [len(requests), vocab_size] float32, changed in place by min_tokens, logit_bias and penalties.
    Greedy rows take the largest logit, of equal ones the lowest id. A row's result depends on
    nothing but its own logits and request.
    """
    finite = logits.isfinite().all(-1)
    scored = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
    if scored:
        scored_rows = _index(scored, logits)
        scored_logits = logits[scored_rows]  # a copy, before they change
    _adjust(logits, requests)
    tokens = logits.argmax(-1)
    # Rows that truncate are sampled in order of probability, the others, cheaper, in order of id.
    plain, truncated = list[int](), list[int]()
    for row, request in enumerate(requests):
        params = request.params
        if params.temperature > 0:
            truncates = params.top_p < 1 or params.top_k > 0 or params.min_p > 0
            (truncated if truncates else plain).append(row)
    for rows, choose in ((plain, _choose), (truncated, _choose_truncated)):
        if rows:
            index = _index(rows, logits)
            tokens[index] = choose(logits[index], [requests[row] for row in rows])
    finite_and_tokens = torch.stack((finite.to(tokens.dtype), tokens)).tolist()  # the step's only wait for the device
    sampled: list[Sampled] = [token if ok else None for ok, token in zip(*finite_and_tokens, strict=True)]
    if scored:
        reports = _report(scored_logits, tokens[scored_rows], [requests[row].params.logprobs or 0 for row in scored])
        for row, report in zip(scored, reports, strict=True):
            token = sampled[row]
            sampled[row] = ScoredToken(token, report) if isinstance(token, int) else None
    return sampled


def _index(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values, device=like.device)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


# ---------------------------------------------------------------------- what changes even the greedy token


def _adjust(logits: Tensor, requests: Sequence[Request]) -> None:
    """No EOS and no stop token before min_tokens output tokens; then logit_bias; then the penalties. Logits of other
    requests, and of tokens that are not concerned, aren't touched."""
    banned, biased, penalized = list[tuple[int, int]](), list[tuple[int, int, float]](), list[int]()
    for row, request in enumerate(requests):
        if request.num_output_tokens < request.params.min_tokens:
            banned += [(row, token) for token in sorted(request.eos_token_ids | request.stop_token_ids)]
        if request.logit_bias:
            biased += [(row, token, bias) for token, bias in request.logit_bias.items()]
        if request.penalizes:
            penalized.append(row)
    if banned:
        rows, tokens = zip(*banned, strict=True)
        logits[_index(rows, logits), _index(tokens, logits)] = -torch.inf
    if biased:
        rows, tokens, biases = zip(*biased, strict=True)
        place = _index(rows, logits), _index(tokens, logits)
        logits[place] = (logits[place] + _column(biases, logits)[:, 0]).clamp_(max=LARGEST)
    if penalized:
        _penalize(logits, penalized, [requests[row] for row in penalized])


def _penalize(logits: Tensor, rows: Sequence[int], requests: Sequence[Request]) -> None:
    """Repetition penalty on the tokens of prompt and output, frequency and presence penalty on those of the output."""
    seen = [_count_tokens(request) for request in requests]
    tokens = torch.from_numpy(np.concatenate([counts.tokens for counts in seen])).to(logits.device)
    counts = torch.from_numpy(np.concatenate([counts.counts for counts in seen])).to(logits.device)
    which = _index(range(len(rows)), logits).repeat_interleave(_index([len(c.tokens) for c in seen], logits))

    def of_each(values: Sequence[float]) -> Tensor:
        return _column(values, logits)[which, 0]

    place = _index(rows, logits)[which], tokens
    values = logits[place]
    # Within float32: 0 times infinity would be NaN.
    repetition = of_each([min(max(request.params.repetition_penalty, 1e-30), 1e30) for request in requests])
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= of_each([request.params.frequency_penalty for request in requests]) * counts
    values -= of_each([request.params.presence_penalty for request in requests]) * (counts > 0)
    logits[place] = values.clamp_(max=LARGEST)


class TokenCounts:
    """The tokens that a request's penalties concern, each once, and how often each is in its output so far."""

    def __init__(self, num_counted: int) -> None:
        self.tokens, self.counts = array("q"), array("f")
        self.places: dict[int, int] = {}  # token -> where it is in the two arrays
        self.num_counted = num_counted  # of the request's tokens, from its first on

    def add(self, token: int, is_output: bool) -> None:
        place = self.places.setdefault(token, len(self.tokens))
        if place == len(self.tokens):
            self.tokens.append(token)
            self.counts.append(0)
        self.counts[place] += is_output


def _count_tokens(request: Request) -> TokenCounts:
    """The request's counts up to its last token, kept with it, so that a step counts only what is new."""
    counts, request.token_counts = request.token_counts, None  # an interruption half-way begins again
    if counts is None:
        counts = TokenCounts(request.num_prompt_tokens if request.params.repetition_penalty == 1 else 0)
    for position in range(counts.num_counted, request.num_tokens):
        counts.add(request.token_ids[position], position >= request.num_prompt_tokens)
    counts.num_counted = request.num_tokens
    request.token_counts = counts
    return counts


# ---------------------------------------------------------------------- choosing


def _probabilities(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    # Subtracting the maximum first keeps a tiny temperature from overflowing; the floor keeps it from
    # becoming zero in float32, the ceiling a huge one from becoming infinite.
    temperatures = _column([min(max(request.params.temperature, 1e-30), 1e30) for request in requests], logits)
    return ((logits - logits.amax(-1, keepdim=True)) / temperatures).softmax(-1)


def _draw(probabilities: Tensor, requests: Sequence[Request]) -> Tensor:
    """Column where the running sum of each row (any total) passes its random number: [rows]."""
    uniforms = _column([uniform(request.seed, request.num_output_tokens) for request in requests], probabilities)
    sums = probabilities.cumsum(-1)
    column = torch.searchsorted(sums, uniforms * sums[:, -1:], right=True)
    return column.clamp_(max=probabilities.shape[-1] - 1)[:, 0]  # a row of NaN runs off the end


def _choose(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    return _draw(_probabilities(logits, requests), requests)


def _choose_truncated(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """min_p, then top_k, then top_p over what those left, the order that vLLM has."""
    probabilities, token_ids = _probabilities(logits, requests).sort(dim=-1, descending=True, stable=True)
    vocab_size = logits.shape[-1]
    min_p = _column([request.params.min_p for request in requests], logits)
    top_k = [min(k, vocab_size) if (k := request.params.top_k) > 0 else vocab_size for request in requests]
    rank = torch.arange(vocab_size, device=logits.device)
    keep = (probabilities >= min_p * probabilities[:, :1]) & (rank < _column(top_k, logits))
    probabilities = probabilities.where(keep, 0)
    probabilities /= probabilities.sum(-1, keepdim=True)
    top_p = _column([request.params.top_p for request in requests], logits)
    before = probabilities.cumsum(-1) - probabilities
    # The most likely token stays, although a tiny top_p becomes zero in float32; and a row with
    # top_p = 1 keeps all, although its running sum may round to more than 1.
    probabilities = probabilities.where((before < top_p) | (rank == 0) | (top_p == 1), 0)
    return token_ids.gather(-1, _draw(probabilities, requests)[:, None])[:, 0]


# ---------------------------------------------------------------------- log probabilities


def _report(logits: Tensor, tokens: Tensor, wanted: Sequence[int]) -> list[dict[int, Logprob]]:
    """Log probabilities of each row's sampled token and its `wanted` most likely ones, the order that vLLM has.

    A sampled token that is not among those is ranked behind its equals, again as in vLLM.
    """
    vocab_size = logits.shape[-1]
    numbers = [vocab_size if number < 0 else min(number, vocab_size) for number in wanted]
    logprobs = logits.log_softmax(-1)
    sampled = logprobs.gather(-1, tokens[:, None])
    ranks = (logprobs >= sampled).sum(-1)
    best, best_ids = _most_likely(logprobs, max(numbers))
    columns = (tensor.tolist() for tensor in (tokens, sampled[:, 0], ranks, best, best_ids))
    reports = []
    for number, token, logprob, rank, values, ids in zip(numbers, *columns, strict=True):
        report = {token: Logprob(logprob, rank)}
        for place in range(number):
            report[ids[place]] = Logprob(values[place], place + 1)
        reports.append(report)
    return reports


def _most_likely(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest of each row and their ids, [rows, count]; of equal ones the lowest id first.

    topk is much faster than sorting, but which of several equal values it takes depends on `count`, and so on what
    other rows want. Rows with equal values are sorted.
    """
    more = min(count + 1, logprobs.shape[-1])  # the value behind the last may be its equal
    values, ids = logprobs.topk(more)
    tied = (values[:, 1:] == values[:, :-1]).any(-1).nonzero()[:, 0]
    if len(tied):
        ordered = logprobs[tied].sort(dim=-1, descending=True, stable=True)
        values[tied], ids[tied] = ordered.values[:, :more], ordered.indices[:, :more]
    return values[:, :count], ids[:, :count]
