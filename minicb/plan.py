"""What a step is: all that the scheduler tells the runner, and what it tells observers."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minicb.blocks import BlockPair
from minicb.request import Request


class Chunk(NamedTuple):
    """What one request contributes to a step: its tokens start .. start + length - 1."""

    request: Request
    start: int
    length: int

    @property
    def samples(self) -> bool:
        """Does it reach the last known token, so that the step yields the next one?"""
        return self.start + self.length == self.request.num_tokens


class Event(NamedTuple):
    """Something that happened to a request in a step: metrics are made from events, nothing is decided by them.

    "started": num_prompt_tokens, of which num_cached_tokens were found in the prefix cache.
    "preempted": mode, "swap" or "recompute"; swap_seconds and recompute_seconds, the estimates behind it
        (inf where host memory has no room, or where there is none and so nothing was measured).
    "returned": num_swapped_in_blocks came from host memory, num_computed_tokens needn't be computed again.
    """

    kind: str
    request: Request
    details: dict[str, Any]


@dataclass
class StepPlan:
    """What happens in one step. Its copies all go in one direction, because nothing is admitted in a step
    that preempted. They are made before the chunks, which overwrite what swap_out reads and read what
    swap_in writes."""

    chunks: list[Chunk] = field(default_factory=list)
    swap_out: list[BlockPair] = field(default_factory=list)  # device block -> host block
    swap_in: list[BlockPair] = field(default_factory=list)  # host block -> device block
    preempted: list[Request] = field(default_factory=list)
    returned: list[Request] = field(default_factory=list)  # have run before, and run again
    events: list[Event] = field(default_factory=list)
