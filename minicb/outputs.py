"""What callers get back."""

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from minicb.request import Logprob, Request


@dataclass
class CompletionOutput:
    """The output of one sample of a prompt so far.

    text: the text of all tokens, without special ones unless params ask for them. Until the request ends, text that
        may still change (an incomplete character) or may begin a stop string is held back. The stop string, stop token
        or EOS that ends the request is cut off, unless params include it. Its tokens stay in token_ids.
    finish_reason: None while it runs; then "stop" (EOS, stop token, stop string), "length", "abort" or "error" (the
        logits were not finite, or the scheduler failed).
    stop_reason: the stop token or stop string; a sentence after "error", or if the KV cache was full; else None.
    logprobs: if asked for, a dict from token ids to `Logprob` for each output token, the sampled token first.
    cumulative_logprob: the sum of the sampled tokens' log probabilities.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


class LazyOutput(CompletionOutput):
    """Copies its lists when they are first read: a request's lists only grow. Pickled, it is a CompletionOutput."""

    def __init__(self, request: Request, text: str):
        self.index, self.text = request.index, text
        self.finish_reason, self.stop_reason = request.finish_reason, request.stop_reason
        self._tokens, self._begin, self._end = request.token_ids, request.num_prompt_tokens, request.num_tokens
        self._logprobs = None if request.params.logprobs is None else request.logprobs
        self.cumulative_logprob = None if request.params.logprobs is None else request.cumulative_logprob

    @cached_property
    def token_ids(self) -> list[int]:  # type: ignore[override]
        return self._tokens[self._begin : self._end]

    @cached_property
    def logprobs(self) -> list[dict[int, Logprob]] | None:  # type: ignore[override]
        return None if self._logprobs is None else self._logprobs[: self._end - self._begin]

    def __reduce__(self) -> tuple:
        return CompletionOutput, tuple(getattr(self, field.name) for field in fields(CompletionOutput))


@dataclass
class RequestOutput:
    """A request as its caller sees it after a step. Nothing in it changes later, except metrics.

    prompt_token_ids: one list for all outputs of the request, not to be changed.
    outputs: one for each of the params.n samples.
    num_cached_tokens, metrics (RequestMetrics): those of the first sample.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: Any = field(default=None, compare=False, repr=False)
