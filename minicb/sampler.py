"""From logits to tokens, for all rows of a batch at once."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from minicb.device import upload
from minicb.penalties import adjust
from minicb.request import Logprob, Request, Sampled, ScoredToken


def uniform(seed: int, index: int) -> float:
    """The random number in [0, 1) for a request's output token `index`: 24 bits of a hash of seed and index.
    A hash has no state, so it is the same alone, in any batch, in any chunks and after a preemption."""
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=3).digest()
    return int.from_bytes(digest, "big") / 2**24


def sample(logits: Tensor, requests: Sequence[Request]) -> list[Sampled]:
    """The next token of each request, with log probabilities if it asks for them; None where logits are not finite.

    logits: [len(requests), vocab_size] float32 or float64, changed in place by `adjust`.
    Greedy rows take the largest logit, the lowest id among equals. A row's result depends only on its own
    logits and request.
    """
    finite = logits.isfinite().all(-1)
    scored = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
    if scored:
        scored_rows = upload(scored, logits.device)
        scored_logits = logits[scored_rows]  # a copy, before they change
    adjust(logits, requests)
    tokens = logits.argmax(-1)
    # Rows that truncate are sampled in order of probability. The others save the sort: in order of id.
    plain, truncated = list[int](), list[int]()
    for row, request in enumerate(requests):
        params = request.params
        if params.temperature > 0:
            truncates = params.top_p < 1 or 0 < params.top_k < logits.shape[-1] or params.min_p > 0
            (truncated if truncates else plain).append(row)
    for rows in (plain, truncated):
        if rows:
            index = upload(rows, logits.device)
            tokens[index] = _choose(logits[index], [requests[row] for row in rows], truncate=rows is truncated)
    # Without logprobs this is the only wait for the device in a step.
    finite_and_tokens = torch.stack((finite.to(tokens.dtype), tokens)).tolist()
    sampled: list[Sampled] = [token if ok else None for ok, token in zip(*finite_and_tokens, strict=True)]
    if scored:
        reports = _report(scored_logits, tokens[scored_rows], [requests[row].params.logprobs or 0 for row in scored])
        for row, report in zip(scored, reports, strict=True):
            token = sampled[row]
            sampled[row] = ScoredToken(token, report) if isinstance(token, int) else None
    return sampled


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """[rows, 1] on the device and in the dtype of the tensor."""
    return upload(values, like.device, like.dtype)[:, None]


def _choose(logits: Tensor, requests: Sequence[Request], truncate: bool) -> Tensor:
    """Draw a token for each row: [rows]. truncate: apply min_p, then top_k, then top_p to the rest, as vLLM does."""
    # Subtracting the maximum keeps a tiny temperature from overflowing. The floor keeps it from becoming zero
    # in float32, the ceiling a huge one from becoming infinite.
    temperatures = _column([min(max(request.params.temperature, 1e-30), 1e30) for request in requests], logits)
    probabilities = ((logits - logits.amax(-1, keepdim=True)) / temperatures).softmax(-1)
    if truncate:
        probabilities, token_ids = probabilities.sort(dim=-1, descending=True, stable=True)
        probabilities = _truncate(probabilities, requests)
    uniforms = _column([uniform(request.seed, request.num_output_tokens) for request in requests], logits)
    # The column where the running sum passes the random number. Truncated rows don't add up to 1.
    sums = _running_sums(probabilities)
    columns = torch.searchsorted(sums, uniforms * sums[:, -1:], right=True)
    columns = columns.clamp_(max=logits.shape[-1] - 1)  # a row of NaN runs off the end
    return (token_ids.gather(-1, columns) if truncate else columns)[:, 0]


def _truncate(probabilities: Tensor, requests: Sequence[Request]) -> Tensor:
    """Set to 0 what min_p, top_k and top_p drop. Rows are in descending order."""
    vocab_size = probabilities.shape[-1]
    min_p = _column([request.params.min_p for request in requests], probabilities)
    top_k = [min(k, vocab_size) if (k := request.params.top_k) > 0 else vocab_size for request in requests]
    rank = torch.arange(vocab_size, device=probabilities.device)
    keep = (probabilities >= min_p * probabilities[:, :1]) & (rank < _column(top_k, probabilities))
    probabilities = probabilities * keep  # `where(keep, 0)` would copy its 0 to the device, and wait
    top_p = _column([request.params.top_p for request in requests], probabilities)
    sums = _running_sums(probabilities)
    # The best token stays, although a tiny top_p becomes zero in float32. A row with top_p = 1 keeps all,
    # although the sum before a token may round to the sum of all.
    keep = (sums - probabilities < top_p * sums[:, -1:]) | (rank == 0) | (top_p == 1)
    return probabilities * keep


def _running_sums(rows: Tensor) -> Tensor:
    """cumsum along each row. CUDA sums a lone row by another kernel, with other rounding, so it is doubled. On CUDA
    more than 64 rows may still differ from fewer in the last bits."""
    return torch.cat((rows, rows)).cumsum(-1)[:1] if len(rows) == 1 else rows.cumsum(-1)


def _report(logits: Tensor, tokens: Tensor, wanted: Sequence[int]) -> list[dict[int, Logprob]]:
    """Log probabilities of each row's sampled token, then of its `wanted` most likely tokens, as vLLM orders them.

    A sampled token that is not among those ranks behind its equals, also as in vLLM.
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
    """The largest values of each row and their ids, [rows, count], the lowest id first among equals.

    topk is much faster than a sort. But which of several equal values it takes depends on `count`, and so on
    what other rows want. Rows with equal values are sorted.
    """
    more = min(count + 1, logprobs.shape[-1])  # the value behind the last may be its equal
    values, ids = logprobs.topk(more)
    tied = (values[:, 1:] == values[:, :-1]).any(-1).nonzero()[:, 0]
    if len(tied):
        ordered = logprobs[tied].sort(dim=-1, descending=True, stable=True)
        values[tied], ids[tied] = ordered.values[:, :more], ordered.indices[:, :more]
    return values[:, :count], ids[:, :count]
