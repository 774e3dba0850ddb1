"""Figures about a whole run, made from the events of its steps."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from minicb.plan import Event


@dataclass
class Metrics:
    """Counts since the engine was made. Feed it every step's events.

    What a request finds in the cache counts once, when it first starts.
    """

    num_started: int = 0
    num_prompt_tokens: int = 0  # of requests that started
    num_cached_tokens: int = 0  # of those, found in the prefix cache
    preemptions_by_mode: Counter[str] = field(default_factory=Counter)  # "swap", "recompute"
    num_swapped_in_blocks: int = 0  # copied back from host memory

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of the prompt tokens that needn't be computed; 0 before anything has started."""
        return self.num_cached_tokens / max(self.num_prompt_tokens, 1)

    def observe(self, events: Iterable[Event]) -> None:
        for kind, _, details in events:
            if kind == "started":
                self.num_started += 1
                self.num_prompt_tokens += details["num_prompt_tokens"]
                self.num_cached_tokens += details["num_cached_tokens"]
            elif kind == "preempted":
                self.preemptions_by_mode[details["mode"]] += 1
            elif kind == "returned":
                self.num_swapped_in_blocks += details["num_swapped_in_blocks"]
