"""A request: one prompt, how it wants to be sampled, and what has been generated for it so far."""

import enum
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from minicb.checks import check_int, check_real, show


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. Names, ranges and meaning follow vLLM.

    temperature: logits are divided by it; 0 takes the most likely token (greedy).
    top_p: keep the most likely tokens whose probabilities add up to it, in (0, 1].
    top_k: keep the k most likely tokens; 0 or -1 keeps all.
    min_p: drop tokens less likely than min_p times the most likely one, in [0, 1].
    seed: makes the request reproducible whatever runs beside it; None draws one from the engine's.
    max_tokens: at most so many output tokens; None runs to the end of the model.
    min_tokens: EOS and stop_token_ids are not sampled before so many output tokens.
    stop_token_ids: end the request as EOS does; the token stays in the output.
    ignore_eos: EOS is a token like any other (stop_token_ids still count).

    A value out of range is a ValueError that names the field.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check_real("temperature", self.temperature, lambda value: 0 <= value < math.inf, "a finite number >= 0")
        check_real("top_p", self.top_p, lambda value: 0 < value <= 1, "in (0, 1]")
        check_real("min_p", self.min_p, lambda value: 0 <= value <= 1, "in [0, 1]")
        self._set_int("top_k", minimum=-1)
        self._set_int("min_tokens", minimum=0)
        if self.seed is not None:
            self._set_int("seed", minimum=-(2**63), below=2**63)
        if self.max_tokens is not None:
            self._set_int("max_tokens", minimum=1)
            if self.min_tokens > self.max_tokens:
                raise ValueError(f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}")
        if self.ignore_eos is not True and self.ignore_eos is not False:
            raise ValueError(f"ignore_eos must be True or False, not {show(self.ignore_eos)}")
        if not isinstance(self.stop_token_ids, (list, tuple, set, frozenset, NoneType)):
            raise ValueError(f"stop_token_ids must be a list of token ids or None, not {show(self.stop_token_ids)}")
        for token_id in self.stop_token_ids or ():
            check_int("stop_token_ids", token_id, minimum=0)

    def _set_int(self, name: str, minimum: int, below: int | None = None) -> None:
        object.__setattr__(self, name, check_int(name, getattr(self, name), minimum, below))


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
        priority: int = 0,
        client: str = "default",
        expected_output_len: int | None = None,
    ):
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.seed = seed if params.seed is None else int(params.seed)
        self.priority = priority  # lower is served first, by the policy "priority"
        self.client = client  # for whom it is, for the policy "fair" and for figures
        self.expected_output_len = expected_output_len  # the caller's guess, for the policy "sjf"
        self.eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
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
        self.streamed_text: Any = None  # the engine's, once somebody asks for the text so far
        self.metrics: Any = None  # its RequestMetrics, where somebody keeps them
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

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

    def ending(self) -> tuple[str, int | str | None] | None:
        """finish_reason and stop_reason, if the last token of its output ends it."""
        num_tokens = len(self.token_ids)
        if num_tokens == self.num_prompt_tokens:
            return None
        token = self.token_ids[-1]
        if num_tokens - self.num_prompt_tokens > self.params.min_tokens:
            if token in self.eos_token_ids:
                return "stop", None
            if token in self.stop_token_ids:
                return "stop", token
        return ("length", self.length_reason) if num_tokens >= self.max_num_tokens else None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.state.name}, {self.num_prompt_tokens} prompt + "
            f"{self.num_output_tokens} output tokens, {self.num_computed_tokens} computed)"
        )


@dataclass
class CompletionOutput:
    """What was generated: text and token_ids so far, and once it has ended, why.

    finish_reason: None until it has ended, then "stop" (EOS or a stop token), "length", "abort", or
    "error" (the model's logits for this request were not finite).
    stop_reason: the stop token of stop_token_ids; for "error", and where the KV cache and not the
        caller set the length, a sentence; else None.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """A request as its caller sees it after a step. Lists are copies; nothing changes later.

    num_cached_tokens: tokens of the prompt that the prefix cache had when the request first started.
    metrics: its times, a RequestMetrics (metrics.py); the one thing here that goes on while the request does.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: Any = field(default=None, compare=False, repr=False)
