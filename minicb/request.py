"""A request: one prompt, how its tokens are sampled, and what has been generated for it so far."""

import enum
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from minicb.params import SamplingParams, SchedulingParams

DEFAULT_SCHEDULING = SchedulingParams()


@dataclass
class Logprob:
    """A token's log probability, its rank among all tokens (from 1), and its text by itself."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class ScoredToken(NamedTuple):
    """A sampled token with its report: token id -> Logprob, the sampled token first, then the most likely ones."""

    token: int
    logprobs: dict[int, Logprob]


Sampled = int | ScoredToken | None  # None: the logits were not finite, so there is no token


class RequestState(enum.Enum):
    """WAITING -> RUNNING -> FINISHED. Preemption takes a RUNNING request back: to SWAPPED if its KV was copied to
    host memory, to WAITING if its KV was dropped."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED = enum.auto()


class Request:
    """One prompt and its output. Scheduler and Memory change it; the runner only reads it.

    token_ids holds prompt and output in one list, because the model sees no difference: a preempted request
    prefills its own output again like a prompt. Two numbers describe all progress. num_tokens counts the known
    tokens, num_computed_tokens those with K and V in the cache (in host memory while the request is swapped out).
    A running request with one known token more than computed ones decodes; with more, it prefills.

    samples: the requests for all samples of the prompt (SamplingParams.n). Apart from the prompt they have nothing in
    common; each is scheduled by itself, and the prefix cache lets them share the prompt's blocks.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        scheduling: SchedulingParams = DEFAULT_SCHEDULING,
        *,
        prompt: str | None = None,
        eos_token_ids: Iterable[int] = (),
        seed: int = 0,
        index: int = 0,
    ):
        self.request_id = request_id
        self.prompt, self.prompt_token_ids = prompt, prompt_token_ids
        self.params, self.scheduling = params, scheduling
        self.index = index  # which sample of its prompt it is
        self.samples = [self]
        self.seed = seed if params.seed is None else int(params.seed) + index
        self.eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self.stop_token_ids = frozenset(map(int, params.stop_token_ids or ()))
        self.stop_strings = tuple(params.stop_strings)
        self.logit_bias = {int(token): float(bias) for token, bias in (params.logit_bias or {}).items()}
        self.penalizes = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0, 0, 1)

        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        # Logical block -> physical block. Arrays, because the batch copies them every step, and memcpy is fast.
        self.block_table = array("i")
        self.host_blocks = array("i")  # the same in host memory, while it is swapped out
        self.num_registered_blocks = 0  # its first blocks, which the prefix cache knows
        self.num_cached_tokens = 0  # prompt tokens that the prefix cache had when it came, then when it started

        self.state = RequestState.WAITING
        self.has_started = False  # it has run before
        self.arrival = 0  # requests are numbered as they are accepted
        self.arrival_time = 0.0  # when it was due, in seconds on the engine's clock
        self.max_num_tokens = 0  # prompt and output together; set by the scheduler
        self.length_reason: str | None = None  # a sentence, if the KV cache sets that limit
        self.num_preemptions = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.logprobs: list[dict[int, Logprob]] = []  # one for each output token, if params ask for them
        self.cumulative_logprob = 0.0
        # What upper layers keep with a request; nothing below them reads it, except the text for stop strings.
        self.token_counts: Any = None  # penalties.TokenCounts
        self.text: Any = None  # text.StreamedText
        self.metrics: Any = None  # observe.metrics.RequestMetrics

    @property
    def all_ended(self) -> bool:
        """All samples of its prompt have ended."""
        return all(sample.state is RequestState.FINISHED for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Known tokens without K and V: 1 when decoding, more when prefilling."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def append(self, token: int | ScoredToken) -> None:
        """Take in a sampled token."""
        if isinstance(token, ScoredToken):
            self.logprobs.append(token.logprobs)
            self.cumulative_logprob += token.logprobs[token.token].logprob
            token = token.token
        self.token_ids.append(token)

    def ending(self) -> tuple[str, int | str | None] | None:
        """finish_reason and stop_reason, if the last output token ends the request; else None."""
        num_tokens = len(self.token_ids)  # every token asks, so no property is used
        num_output_tokens = num_tokens - self.num_prompt_tokens
        token, may_stop = self.token_ids[-1], num_output_tokens > self.params.min_tokens
        if may_stop:
            if token in self.eos_token_ids:
                return "stop", None
            if token in self.stop_token_ids:
                return "stop", token
        if self.stop_strings and self.text is not None:
            stop = self.text.find_stop(may_stop)
            if stop is not None:
                return "stop", stop
        return ("length", self.length_reason) if num_tokens >= self.max_num_tokens else None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.state.name}, {self.num_prompt_tokens} prompt + "
            f"{self.num_output_tokens} output tokens, {self.num_computed_tokens} computed)"
        )


@dataclass
class CompletionOutput:
    """One sample's output: text and token_ids so far and, once it has ended, the reason.

    index: which sample of the prompt it is.
    text: the text of all tokens, special ones left out. Until the request ends, text that may still change (an
        incomplete character) or may begin a stop string is held back. The stop string itself is cut off; its
        tokens stay in token_ids.
    finish_reason: None while it runs; then "stop" (EOS, a stop token or a stop string), "length", "abort" or "error"
        (the logits were not finite, or the scheduler failed).
    stop_reason: the stop token or stop string; a sentence after "error", and after "length" where the KV cache was
        full; else None.
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
    """A CompletionOutput that copies its lists when they are first read. A request's lists only grow, so a copy made
    later is the same, and a step whose output nobody reads copies nothing."""

    _tokens: list[int]
    _begin: int
    _end: int
    _logprobs: list[dict[int, Logprob]] | None

    @classmethod
    def of(cls, request: Request, text: str) -> CompletionOutput:
        output = cls(request.index, text, [], request.finish_reason, request.stop_reason)
        output._tokens, output._begin, output._end = request.token_ids, request.num_prompt_tokens, request.num_tokens
        output._logprobs = None
        if request.params.logprobs is not None:
            output._logprobs, output.cumulative_logprob = request.logprobs, request.cumulative_logprob
        del output.token_ids, output.logprobs  # the properties below make them
        return output

    @cached_property
    def token_ids(self) -> list[int]:  # type: ignore[override]
        return self._tokens[self._begin : self._end]

    @cached_property
    def logprobs(self) -> list[dict[int, Logprob]] | None:  # type: ignore[override]
        return None if self._logprobs is None else self._logprobs[: self._end - self._begin]


@dataclass
class RequestOutput:
    """A request as its caller sees it after a step. Nothing in it changes later, except metrics.

    prompt_token_ids: the same list in all outputs of the request, not to be changed.
    outputs: one for each of the params.n samples.
    num_cached_tokens: prompt tokens that the prefix cache had when the first sample started.
    metrics: the first sample's RequestMetrics (observe/metrics.py), which goes on with the request.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: Any = field(default=None, compare=False, repr=False)
