"""A request: one prompt, how it wants to be sampled, and what has been generated for it so far."""

import enum
from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minicb.params import SamplingParams


@dataclass
class Logprob:
    """A token's log probability, its rank among all tokens by that (from 1), and its text by itself."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class ScoredToken(NamedTuple):
    """A sampled token, and what is to be reported of it: the sampled token first, then the most likely ones."""

    token: int
    logprobs: dict[int, Logprob]


Sampled = int | ScoredToken | None  # None: there was no token to be had, because the logits were not finite


class RequestState(enum.Enum):
    """WAITING -> RUNNING -> FINISHED. A preempted request is SWAPPED if its KV was copied to host
    memory, WAITING if it was dropped, and RUNNING when it is back."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED = enum.auto()


class Request:
    """One prompt and all that happens to it. Scheduler and memory change it, the runner only reads it.

    token_ids holds prompt and output in one list, because to the model there is no difference: a
    preempted request prefills its own output again exactly like a prompt. Two numbers say all about
    its progress: num_tokens, how many tokens are known, and num_computed_tokens, for how many of
    them K and V are there, in the cache or, of a swapped request, in host memory. A running request
    that has one more known than computed decodes.

    A prompt of which the caller wants several samples is as many requests, one `Group`.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        eos_token_ids: Iterable[int] = (),
        seed: int = 0,
        index: int = 0,
        priority: int = 0,
        client: str = "default",
        expected_output_len: int | None = None,
    ):
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.seed = seed if params.seed is None else int(params.seed) + index
        self.priority = priority  # lower is served first, by the policy "priority"
        self.client = client  # for whom it is, for the policy "fair" and for figures
        self.expected_output_len = expected_output_len  # the caller's guess, for the policy "sjf"
        self.eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self.stop_token_ids = frozenset(map(int, params.stop_token_ids or ()))
        self.stop_strings = tuple(params.stop_strings)
        self.logit_bias = {int(token): float(bias) for token, bias in (params.logit_bias or {}).items()}
        self.group: Group | None = None  # where its prompt has several samples
        self.index = index  # of this one among them
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        # Logical block -> physical block. An array, not a list: the batch copies it every step, and
        # an array is copied by memcpy.
        self.block_table = array("i")
        self.host_blocks = array("i")  # the same in host memory, while it is swapped out
        self.num_registered_blocks = 0  # how many of its first blocks others can find
        self.num_cached_tokens = 0  # prompt tokens that were found in the cache when it started
        self.state = RequestState.WAITING
        self.arrival = 0  # the scheduler numbers requests as they come
        self.arrival_time = 0.0  # when it was due, in seconds on the engine's clock
        self.max_num_tokens = 0  # prompt and output together; the scheduler knows the limits
        self.length_reason: str | None = None  # a sentence, if that limit is neither the caller's nor the model's
        self.has_started = False  # has it ever run?
        self.num_preemptions = 0
        # One for each output token, if the params ask for them, and the sum of the sampled tokens' up to each.
        self.logprobs: list[dict[int, Logprob]] = []
        self._sums: list[float] = []
        self.penalizes = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0, 0, 1)
        self.token_counts: Any = None  # the sampler's, if so
        self.text: Any = None  # its StreamedText, once somebody asks for it, or the params have stop strings
        self.metrics: Any = None  # its RequestMetrics, where somebody keeps them
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    @property
    def samples(self) -> Sequence["Request"]:
        """All of its prompt, this one included. They have the same request_id."""
        return [self] if self.group is None else self.group.samples

    @property
    def all_ended(self) -> bool:
        """Has it ended, with all samples of its prompt?"""
        return all(sample.state is RequestState.FINISHED for sample in self.samples)

    @property
    def key(self) -> Hashable:
        """No two requests that have not ended share it."""
        return self.request_id if self.group is None else (self.request_id, self.index)

    @property
    def name(self) -> str:
        """For people."""
        return self.request_id if self.group is None else f"{self.request_id}/{self.index}"

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_pending(self) -> int:
        """Known tokens that are not computed yet: 1 when decoding, more when prefilling."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def cumulative_logprob(self) -> float:
        return self._sums[self.num_output_tokens - 1] if self.num_output_tokens else 0.0

    def append(self, token: int | ScoredToken) -> None:
        """Take in a sampled token."""
        if isinstance(token, ScoredToken):
            # Not appended: if this broke off before the token itself was, it is done again.
            place, sum_before = self.num_output_tokens, self.cumulative_logprob
            self.logprobs[place:] = [token.logprobs]
            self._sums[place:] = [sum_before + token.logprobs[token.token].logprob]
            token = token.token
        self.token_ids.append(token)

    def ending(self) -> tuple[str, int | str | None] | None:
        """finish_reason and stop_reason, if the last token of its output ends it."""
        num_tokens = len(self.token_ids)  # this is asked for every token, so no property is
        num_output_tokens = num_tokens - self.num_prompt_tokens
        if num_output_tokens == 0:
            return None
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
            f"Request({self.name!r}, {self.state.name}, {self.num_prompt_tokens} prompt + "
            f"{self.num_output_tokens} output tokens, {self.num_computed_tokens} computed)"
        )


@dataclass(eq=False)
class Group:
    """The samples of one prompt: requests that share the blocks of it. The first of them that has not ended computes
    the prompt, and the others wait until it has, when they find its blocks."""

    samples: list[Request]
    has_prompt: bool = False  # has it been computed, or does nobody wait for that?
    _num_ended: int = 0  # of the first ones, so that nobody looks at them again

    def first(self) -> Request | None:
        """The first that has not ended; None if all have."""
        while self._num_ended < len(self.samples):
            sample = self.samples[self._num_ended]
            if sample.state is not RequestState.FINISHED:
                return sample
            self._num_ended += 1
        return None


@dataclass
class CompletionOutput:
    """What was generated: text and token_ids so far, and once it has ended, why.

    index: which of the prompt's samples it is.
    text: that of all tokens, special ones left out. Until it has ended, what may still change (a character in pieces)
        and what may be the beginning of a stop string is held back. It is cut before the stop string that ended it,
        whose tokens stay in token_ids.
    finish_reason: None until it has ended, then "stop" (EOS, a stop token or a stop string), "length", "abort", or
        "error" (the model's logits for this request were not finite).
    stop_reason: the stop token of stop_token_ids, or the stop string; for "error", and where the KV cache and
        not the caller set the length, a sentence; else None.
    logprobs: if asked for, for each output token a dict from token ids to `Logprob`, the sampled token first.
    cumulative_logprob: the sum of the sampled tokens'.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclass
class RequestOutput:
    """A request as its caller sees it after a step. Lists are copies; nothing changes later.

    outputs: one for each of params.n samples.
    num_cached_tokens: tokens of the prompt that the prefix cache had when the request (its first sample) started.
    metrics: its first sample's times, a RequestMetrics (metrics.py); the one thing here that goes on while it does.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: Any = field(default=None, compare=False, repr=False)
