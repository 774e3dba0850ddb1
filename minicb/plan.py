"""What a step is: the plan that the scheduler hands to the runner, and the events that both hand to observers."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minicb.blocks import BlockPair
from minicb.request import Request


class Chunk(NamedTuple):
    """What one request contributes to a step: its tokens start .. start + length - 1. `Chunk.of` makes one."""

    request: Request
    start: int
    length: int
    needs_sampling: bool  # it reaches the last known token, so the step yields the next one
    is_decode: bool  # it is the token sampled last and nothing else; a prefill, too, may have a chunk of one token

    @classmethod
    def of(cls, request: Request, start: int, length: int) -> "Chunk":
        num_tokens = request.num_tokens
        is_decode = length == 1 and request.num_prompt_tokens <= start == num_tokens - 1
        return cls(request, start, length, start + length == num_tokens, is_decode)


@dataclass
class StepPlan:
    """One step (vLLM: SchedulerOutput). The runner makes swap_out's copies, then swap_in's, then one forward pass
    over all chunks."""

    chunks: list[Chunk] = field(default_factory=list)
    swap_out: list[BlockPair] = field(default_factory=list)  # (device block, host block)
    swap_in: list[BlockPair] = field(default_factory=list)  # (host block, device block)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)  # start or return in this step


class Event(NamedTuple):
    """Something that happened to a request. Metrics, traces and pictures are made from events.

    "queued": it was accepted. The time is when it was due.
    "started": num_prompt_tokens; num_cached_tokens, the part of them that the prefix cache had.
    "preempted": the fields of PreemptionChoice.
    "returned": num_swapped_in_blocks, copied back from host memory; num_computed_tokens, not to be computed again.
    "first_token": of its output. "finished": finish_reason.
    What a plan decides has the time at which its step began; what comes of it, the time at which the step ended.
    """

    time: float  # seconds on the engine's clock
    kind: str
    request: Request
    details: dict[str, Any]


class Step(NamedTuple):
    """A step as observers see it. Times are in seconds on the engine's clock."""

    number: int
    begin: float  # before it was planned
    end: float  # when its tokens were there; NaN before
    plan: StepPlan
    progressed: list[Request]  # those that got a token or ended in it
    num_running: int
    num_waiting: int  # those with no part in the step, swapped out ones included
    num_free_blocks: int  # after planning, cached ones included
    num_blocks: int  # usable ones of the pool
    max_num_seqs: int  # the limits of this step
    max_num_batched_tokens: int


class Observer:
    """Base class of metrics, traces and pictures.

    In each step: `on_event` for what the plan decided, `on_plan` when requests hold their blocks for it, `on_event`
    for what came of it, `on_step` when it is over and ended requests hold nothing. A step that fails has no `on_step`.
    Observers must not add or abort requests.
    """

    def on_event(self, event: Event) -> None: ...

    def on_plan(self, step: Step) -> None: ...

    def on_step(self, step: Step) -> None: ...
