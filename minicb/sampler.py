"""From logits to tokens, for all rows of a batch at once."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from minicb.request import Request


def uniform(seed: int, index: int) -> float:
    """The random number in [0, 1) for a request's output token `index`: 24 bits of a hash of both.

    Not drawn from a generator's state but computed, so that a request gets the same numbers alone,
    in any batch, in any chunks and after a preemption.
    """
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=3).digest()
    return int.from_bytes(digest, "big") / 2**24


def sample(logits: Tensor, requests: Sequence[Request]) -> list[int | None]:
    """The next token of each request; None where its logits are not finite.

    logits: [len(requests), vocab_size] float32, changed in place where min_tokens bans a token.
    Greedy rows take the largest logit, of equal ones the lowest id. A row's result depends on
    nothing but its own logits and request.
    """
    finite = logits.isfinite().all(-1)
    _ban_stops(logits, requests)
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
            index = torch.tensor(rows, device=logits.device)
            tokens[index] = choose(logits[index], [requests[row] for row in rows])
    finite_and_tokens = torch.stack((finite.to(tokens.dtype), tokens)).tolist()  # the step's only wait for the device
    return [token if ok else None for ok, token in zip(*finite_and_tokens, strict=True)]


def _ban_stops(logits: Tensor, requests: Sequence[Request]) -> None:
    """No EOS and no stop token before min_tokens output tokens."""
    rows, banned = list[int](), list[int]()
    for row, request in enumerate(requests):
        if request.num_output_tokens < request.params.min_tokens:
            stops = sorted(request.eos_token_ids | request.stop_token_ids)
            rows += [row] * len(stops)
            banned += stops
    if rows:
        logits[torch.tensor(rows, device=logits.device), torch.tensor(banned, device=logits.device)] = -torch.inf


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


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
