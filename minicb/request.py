"""A request: one prompt, how it wants to be sampled, and what has been generated for it so far."""

import enum
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from types import NoneType


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
        _check_real("temperature", self.temperature, 0 <= _float(self.temperature) < math.inf, "a finite number >= 0")
        _check_real("top_p", self.top_p, 0 < _float(self.top_p) <= 1, "in (0, 1]")
        _check_real("min_p", self.min_p, 0 <= _float(self.min_p) <= 1, "in [0, 1]")
        check_int("top_k", self.top_k, minimum=-1)
        check_int("min_tokens", self.min_tokens, minimum=0)
        if self.seed is not None:
            check_int("seed", self.seed)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, minimum=1)
            if self.min_tokens > self.max_tokens:
                raise ValueError(f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}")
        if self.ignore_eos is not True and self.ignore_eos is not False:
            raise ValueError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")
        if not isinstance(self.stop_token_ids, (list, tuple, set, frozenset, NoneType)):
            raise ValueError(f"stop_token_ids must be a list of token ids or None, not {self.stop_token_ids!r}")
        for token_id in self.stop_token_ids or ():
            check_int("stop_token_ids", token_id, minimum=0)
        # NumPy's small integers would wrap around when added to a prompt's length.
        for name in ("top_k", "min_tokens", "max_tokens", "seed"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, int(value))


def _float(value: object) -> float:
    try:
        return float(value) if isinstance(value, Real) else math.nan
    except OverflowError:  # 10**400 is an int, but no float
        return math.inf


def _check_real(name: str, value: object, in_range: bool, wanted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not in_range:
        raise ValueError(f"{name} must be {wanted}, not {value!r}")


def check_int(name: str, value: object, minimum: int | None = None, below: int | None = None) -> None:
    """Raise a ValueError that names the field unless value is an integer in [minimum, below)."""
    limits = [f">= {minimum}"] * (minimum is not None) + [f"< {below}"] * (below is not None)
    wanted = " ".join(["an integer", " and ".join(limits)]).strip()
    if (
        isinstance(value, bool)
        or not isinstance(value, Integral)
        or (minimum is not None and int(value) < minimum)
        or (below is not None and int(value) >= below)
    ):
        raise ValueError(f"{name} must be {wanted}, not {value!r}")


class RequestState(enum.Enum):
    """WAITING -> RUNNING -> FINISHED, and RUNNING -> WAITING when preempted by recompute."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Request:
    """One prompt and all that happens to it. The scheduler moves it, the runner only reads it.

    token_ids holds prompt and output in one list, because to the model there is no difference: a
    preempted request prefills its own output again exactly like a prompt. Two numbers say all about
    its progress: num_tokens, how many tokens are known, and num_computed_tokens, for how many of
    them K and V lie in the cache. A running request that has one more known than computed decodes.
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
    ):
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.seed = seed if params.seed is None else int(params.seed)
        self.eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        # Logical block -> physical block. An array, not a list: the batch copies it every step, and
        # an array is copied by memcpy.
        self.block_table = array("i")
        self.state = RequestState.WAITING
        self.arrival = 0  # the scheduler numbers requests as they come
        self.max_num_tokens = 0  # prompt and output together; the scheduler knows the limits
        self.num_preemptions = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.state.name}, {self.num_prompt_tokens} prompt + "
            f"{self.num_output_tokens} output tokens, {self.num_computed_tokens} computed)"
        )


@dataclass
class CompletionOutput:
    """What was generated: text and token_ids so far, and once it has ended, why.

    finish_reason: None while running, then "stop" (EOS or a stop token), "length", "abort", or
    "error" (the model's logits for this request were not finite).
    stop_reason: the stop token, or a sentence when memory and not the caller set the length.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """A request as its caller sees it after a step. Lists are copies; nothing changes later."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
