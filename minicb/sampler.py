"""From logits to tokens, for all rows of a batch at once."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from minicb.device import upload
from minicb.penalties import adjust
from minicb.request import Logprob, Request, Sampled, ScoredToken


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

    logits: [len(requests), vocab_size] float32 or float64, changed in place by `adjust`.
    Greedy rows take the largest logit, of equal ones the lowest id. A row's result depends on
    nothing but its own logits and request.
    """
    finite = logits.isfinite().all(-1)
    scored = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
    if scored:
        scored_rows = upload(scored, logits.device)
        scored_logits = logits[scored_rows]  # a copy, before they change
    adjust(logits, requests)
    tokens = logits.argmax(-1)
    # Rows that truncate are sampled in order of probability, the others, cheaper, in order of id.
    plain, truncated = list[int](), list[int]()
    for row, request in enumerate(requests):
        params = request.params
        if params.temperature > 0:
            truncates = params.top_p < 1 or 0 < params.top_k < logits.shape[-1] or params.min_p > 0
            (truncated if truncates else plain).append(row)
    for rows, choose in ((plain, _choose), (truncated, _choose_truncated)):
        if rows:
            index = upload(rows, logits.device)
            tokens[index] = choose(logits[index], [requests[row] for row in rows])
    finite_and_tokens = torch.stack(
        (finite.to(tokens.dtype), tokens)
    ).tolist()  # without logprobs, the step's only wait for the device
    sampled: list[Sampled] = [token if ok else None for ok, token in zip(*finite_and_tokens, strict=True)]
    if scored:
        reports = _report(scored_logits, tokens[scored_rows], [requests[row].params.logprobs or 0 for row in scored])
        for row, report in zip(scored, reports, strict=True):
            token = sampled[row]
            sampled[row] = ScoredToken(token, report) if isinstance(token, int) else None
    return sampled


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return upload(values, like.device, like.dtype)[:, None]


# ---------------------------------------------------------------------- choosing


def _probabilities(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    # Subtracting the maximum first keeps a tiny temperature from overflowing; the floor keeps it from
    # becoming zero in float32, the ceiling a huge one from becoming infinite.
    temperatures = _column([min(max(request.params.temperature, 1e-30), 1e30) for request in requests], logits)
    return ((logits - logits.amax(-1, keepdim=True)) / temperatures).softmax(-1)


def _draw(probabilities: Tensor, requests: Sequence[Request]) -> Tensor:
    """Column where the running sum of each row (any total) passes its random number: [rows]."""
    uniforms = _column([uniform(request.seed, request.num_output_tokens) for request in requests], probabilities)
    sums = _running_sums(probabilities)
    column = torch.searchsorted(sums, uniforms * sums[:, -1:], right=True)
    return column.clamp_(max=probabilities.shape[-1] - 1)[:, 0]  # a row of NaN runs off the end


def _running_sums(rows: Tensor) -> Tensor:
    """A row's are the same to the last bit in any company: on CUDA one alone would be summed by another kernel."""
    return torch.cat((rows, rows)).cumsum(-1)[:1] if len(rows) == 1 else rows.cumsum(-1)


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
    top_p = _column([request.params.top_p for request in requests], logits)
    sums = _running_sums(probabilities)
    # The most likely token stays, although a tiny top_p becomes zero in float32; and a row with
    # top_p = 1 keeps all, although the sum before one may round to that of all.
    is_in = (sums - probabilities < top_p * sums[:, -1:]) | (rank == 0) | (top_p == 1)
    probabilities = probabilities.where(is_in, 0)
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
