"""A request: one prompt, how its tokens are sampled, and what has been generated for it so far."""

import enum
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from minicb.params import SamplingParams, SchedulingParams


@dataclass
class Logprob:
    """A token's log probability, its rank among all tokens (from 1), and the text that it adds to the output, or its
    name if it is no text: a special token, or what ended the request."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None
    is_text: bool = True


class ScoredToken(NamedTuple):
    """A sampled token with its report: token id -> Logprob, the sampled token first, then the most likely ones."""

    token: int
    logprobs: dict[int, Logprob]


Sampled = int | ScoredToken | None  # None: the logits were not finite, so there is no token


class RequestState(enum.Enum):
    """WAITING -> RUNNING -> FINISHED. A preempted request is SWAPPED if its KV was copied to host memory, else WAITING."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED = enum.auto()


class Request:
    """One prompt and its output. Scheduler and Memory change it; the runner only reads it.

    token_ids holds prompt and output in one list, because the model sees no difference: a preempted request
    prefills its own output again like a prompt. Two numbers describe all progress: num_tokens, the known tokens,
    and num_computed_tokens, those with K and V in the KV cache, or in host memory while the request is swapped out.
    A running request with one known token more than computed ones decodes; with more, it prefills.

    samples: the requests of all samples of the prompt (SamplingParams.n). Each is scheduled by itself; the prefix
    cache lets them share the prompt's blocks.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        scheduling: SchedulingParams | None = None,
        *,
        prompt: str | None = None,
        eos_token_ids: Iterable[int] = (),
        seed: int = 0,
        index: int = 0,
    ):
        self.request_id = request_id
        self.prompt, self.prompt_token_ids = prompt, prompt_token_ids
        self.params, self.scheduling = params, scheduling or SchedulingParams()
        self.index, self.samples = index, [self]  # which sample of its prompt it is, and all of them
        self.seed = seed if params.seed is None else int(params.seed) + index
        self.eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self.stop_token_ids = frozenset(map(int, params.stop_token_ids or ()))
        self.stop_strings = tuple(params.stop_strings)
        self.logit_bias = {int(token): float(bias) for token, bias in (params.logit_bias or {}).items()}
        self.penalizes = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0, 0, 1)
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.block_table = array("i")  # logical -> physical block; an array, which the batch copies by memcpy
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
        # What upper layers keep with a request: StreamedText, TokenCounts, RequestMetrics.
        self.text: Any = None
        self.named: tuple[int, list[int], int] = 0, [], 0  # see `name_tokens`
        self.token_counts: Any = None
        self.metrics: Any = None

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

    @property
    def all_ended(self) -> bool:
        """All samples of the prompt have ended."""
        return all(sample.state is RequestState.FINISHED for sample in self.samples)

    def append(self, token: int | ScoredToken) -> None:
        """Take in a sampled token."""
        if isinstance(token, ScoredToken):
            self.logprobs.append(token.logprobs)
            self.cumulative_logprob += token.logprobs[token.token].logprob
            token = token.token
        self.token_ids.append(token)

    def ending(self) -> tuple[str, int | str | None] | None:
        """finish_reason and stop_reason, if the last output token ends the request; else None."""
        token, may_stop = self.token_ids[-1], self.num_output_tokens > self.params.min_tokens
        if may_stop and token in self.eos_token_ids:
            return "stop", None
        if may_stop and token in self.stop_token_ids:
            return "stop", token
        if self.stop_strings and self.text is not None and (stop := self.text.find_stop(may_stop)) is not None:
            return "stop", stop
        return ("length", self.length_reason) if len(self.token_ids) >= self.max_num_tokens else None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.state.name}, {self.num_prompt_tokens} prompt + "
            f"{self.num_output_tokens} output tokens, {self.num_computed_tokens} computed)"
        )
