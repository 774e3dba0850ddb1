"""Figures made from events and steps, under the names of `vllm bench`.

TTFT, time to first token: from when a request was due to its first token. E2EL, end-to-end latency: to its end.
TPOT, time per output token: (E2EL - TTFT) / (output tokens - 1). ITL, inter-token latency: the gaps between the
tokens. Queue time: until it first starts. Goodput: requests per second that met all objectives (DistServe, 2024).
All in seconds.
"""

import math
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from minicb.checks import check_choice
from minicb.plan import Event, Observer, Step
from minicb.request import Request

LATENCIES = ("ttft", "tpot", "itl", "e2el", "queue_time")


@dataclass
class RequestMetrics:
    """When what happened to a request, in seconds on the engine's clock; NaN: not yet.

    Figures of something that hasn't happened, or never does (TPOT of a single token), are NaN.
    """

    request_id: str
    client: str
    num_prompt_tokens: int
    arrival_time: float
    first_scheduled_time: float = math.nan
    finished_time: float = math.nan
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    token_times: array = field(default_factory=lambda: array("d"))  # of each output token

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.arrival_time if self.token_times else math.nan

    @property
    def tpot(self) -> float:
        count = len(self.token_times)
        return (self.token_times[-1] - self.token_times[0]) / (count - 1) if count > 1 else math.nan

    @property
    def itl(self) -> list[float]:
        return [after - before for before, after in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def e2el(self) -> float:
        return self.finished_time - self.arrival_time

    @property
    def queue_time(self) -> float:
        return self.first_scheduled_time - self.arrival_time


def percentile(values: Sequence[float], percent: float) -> float:
    """Of sorted values, by linear interpolation between the two nearest; NaN of none."""
    if not values:
        return math.nan
    place = (len(values) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def spread(values: Iterable[float]) -> dict[str, float]:
    """mean, median, p90 and p99, NaN left out."""
    known = sorted(value for value in values if not math.isnan(value))
    figures = {"mean": math.fsum(known) / len(known) if known else math.nan, "median": percentile(known, 50)}
    return figures | {"p90": percentile(known, 90), "p99": percentile(known, 99)}


@dataclass
class Shares:
    """Sums over steps: how much of what was there was used. A step counts by its duration."""

    seconds: float = 0.0
    slot_seconds: float = 0.0  # of all slots
    running_seconds: float = 0.0  # of those that a request had
    block_seconds: float = 0.0
    held_block_seconds: float = 0.0
    budget: int = 0  # tokens that the steps could have had
    num_batched_tokens: int = 0  # that they had

    def add(self, step: Step) -> None:
        seconds = step.end - step.begin
        self.seconds += seconds
        self.slot_seconds += seconds * step.max_num_seqs
        self.running_seconds += seconds * step.num_running
        self.block_seconds += seconds * step.num_blocks
        self.held_block_seconds += seconds * (step.num_blocks - step.num_free_blocks)
        self.budget += step.max_num_batched_tokens
        self.num_batched_tokens += sum(chunk.length for chunk in step.plan.chunks)

    @property
    def occupancy(self) -> float:
        """Of the slots."""
        return self.running_seconds / self.slot_seconds if self.slot_seconds else math.nan

    @property
    def block_use(self) -> float:
        return self.held_block_seconds / self.block_seconds if self.block_seconds else math.nan

    @property
    def budget_use(self) -> float:
        return self.num_batched_tokens / self.budget if self.budget else math.nan


class Metrics(Observer):
    """Counts since it was made, and the times of requests.

    keep: of requests that have ended, the latest so many are kept, and the figures about latencies are
        about these; None keeps all. What a request finds in the prefix cache counts once, when it first starts.
    """

    def __init__(self, keep: int | None = None):
        self.live: dict[Request, RequestMetrics] = {}
        self.finished: deque[RequestMetrics] = deque(maxlen=keep)
        self.num_finished: Counter[str] = Counter()  # by finish_reason
        self.num_started = 0
        self.num_prompt_tokens = 0  # of requests that started
        self.num_cached_tokens = 0  # of those, found in the prefix cache
        self.num_output_tokens = 0
        self.preemptions_by_mode: Counter[str] = Counter()  # "swap", "recompute"
        self.num_swapped_in_blocks = 0  # copied back from host memory
        self.num_steps = 0
        self.all_steps, self.full_steps = Shares(), Shares()  # full: steps that left requests waiting
        self.begin, self.end = math.nan, math.nan  # of the first request and of the latest step

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of the prompt tokens that needn't be computed; 0 before anything has started."""
        return self.num_cached_tokens / max(self.num_prompt_tokens, 1)

    @property
    def seconds(self) -> float:
        """From the first arrival to the end of the latest step."""
        return self.end - self.begin

    def on_event(self, event: Event) -> None:
        time, kind, request, details = event
        record = self._record(request)
        if kind == "started":
            record.first_scheduled_time = time
            record.num_cached_tokens = details["num_cached_tokens"]
            self.num_started += 1
            self.num_prompt_tokens += details["num_prompt_tokens"]
            self.num_cached_tokens += details["num_cached_tokens"]
        elif kind == "preempted":
            record.num_preemptions += 1
            self.preemptions_by_mode[details["mode"]] += 1
        elif kind == "returned":
            self.num_swapped_in_blocks += details["num_swapped_in_blocks"]
        elif kind == "finished":
            record.finished_time, record.finish_reason = time, details["finish_reason"]
            self.num_finished[record.finish_reason] += 1
            if record.finish_reason == "abort":  # no step will tell of it
                self._close(request)

    def on_step(self, step: Step) -> None:
        self.num_steps += 1
        self.end = step.end
        for request in step.moved:
            record = self._record(request)
            if len(record.token_times) < request.num_output_tokens:  # not for a request that ended with an error
                record.token_times.append(step.end)
                self.num_output_tokens += 1
            if record.finish_reason is not None:
                self._close(request)
        self.all_steps.add(step)
        if step.num_waiting:
            self.full_steps.add(step)

    def _record(self, request: Request) -> RequestMetrics:
        if request not in self.live:
            time = request.arrival_time
            record = RequestMetrics(request.request_id, request.client, request.num_prompt_tokens, time)
            self.live[request] = record
            request.metrics = request.metrics or record
            self.begin = time if math.isnan(self.begin) else min(self.begin, time)
        return self.live[request]

    def _close(self, request: Request) -> None:
        self.finished.append(self.live.pop(request))

    def clients(self) -> list[str]:
        """Of the requests that are kept, in alphabetical order."""
        return sorted({record.client for record in self.finished})

    def latencies(self, client: str | None = None) -> dict[str, dict[str, float]]:
        """Of the requests that ended and are kept, of one client or all: "ttft", "tpot", "itl", "e2el" and
        "queue_time", each as "mean", "median", "p90" and "p99", in seconds."""
        records = self._of(client)
        figures = {name: spread(getattr(record, name) for record in records) for name in LATENCIES if name != "itl"}
        return figures | {"itl": spread(gap for record in records for gap in record.itl)}

    def goodput(self, objectives: Mapping[str, float], client: str | None = None) -> float:
        """Requests per second that completed with every latency at most as long as its objective, as in
        {"ttft": 0.5, "tpot": 0.05}: seconds. (What a single token has no TPOT can't be late.)"""
        for name in objectives:
            check_choice("objectives", name, [name for name in LATENCIES if name != "itl"])
        completed = [record for record in self._of(client) if record.finish_reason in ("stop", "length")]
        good = [r for r in completed if not any(getattr(r, name) > limit for name, limit in objectives.items())]
        return len(good) / self.seconds

    def throughput(self, client: str | None = None) -> dict[str, float]:
        """ "requests", "output_tokens" and "total_tokens" (prompts too) per second, of requests that ended and are kept."""
        records = self._of(client)
        output = sum(len(record.token_times) for record in records)
        total = output + sum(record.num_prompt_tokens for record in records)
        counts = {"requests": len(records), "output_tokens": output, "total_tokens": total}
        return {name: count / self.seconds for name, count in counts.items()}

    def _of(self, client: str | None) -> list[RequestMetrics]:
        return [record for record in self.finished if client is None or record.client == client]
