"""Figures made from events and steps, under the names of `vllm bench`.

TTFT, time to first token: from when a request was due to its first token. E2EL, end-to-end latency: to its end.
TPOT, time per output token: (E2EL - TTFT) / (output tokens - 1). ITL, inter-token latency: the gaps between the
tokens. Queue time: until it first starts. Goodput: requests per second that met all objectives (DistServe, 2024).
All in seconds. As there, they are about requests that completed: with "stop" or "length", not "abort" or "error".
"""

import math
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from minicb.checks import check_choice
from minicb.plan import Event, Observer, Step
from minicb.request import Request

LATENCIES = ("ttft", "tpot", "itl", "e2el", "queue_time")
COMPLETED = ("stop", "length")


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
    token_times: array = field(default_factory=lambda: array("d"))  # of each output token; NaN: nobody saw it come

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


def summary(values: Iterable[float]) -> dict[str, float]:
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
    block_seconds: float = 0.0  # of all blocks
    held_block_seconds: float = 0.0  # of those that a request held; cached ones are free
    budget: int = 0  # tokens that the steps could have had
    num_batched_tokens: int = 0  # that they had

    def add(self, step: Step) -> None:
        seconds = step.end - step.begin
        self.seconds += seconds
        self.slot_seconds += seconds * max(step.max_num_seqs, step.num_running)  # more run where the limit has fallen
        self.running_seconds += seconds * step.num_running
        self.block_seconds += seconds * step.num_blocks
        self.held_block_seconds += seconds * (step.num_blocks - step.num_free_blocks)
        num_tokens = sum(chunk.length for chunk in step.plan.chunks)
        self.budget += max(step.max_num_batched_tokens, num_tokens)  # every decode has its token
        self.num_batched_tokens += num_tokens

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


@dataclass
class Counts:
    """What there was of everything, of one client's requests or all."""

    num_started: int = 0
    num_prompt_tokens: int = 0  # of requests that started
    num_cached_tokens: int = 0  # of those, found in the prefix cache when the request first started
    num_output_tokens: int = 0
    num_swapped_in_blocks: int = 0  # copied back from host memory
    preemptions_by_mode: Counter[str] = field(default_factory=Counter)  # "swap", "recompute"
    num_finished: Counter[str] = field(default_factory=Counter)  # by finish_reason
    num_completed_prompt_tokens: int = 0  # of requests that completed
    num_completed_output_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of the prompt tokens that needn't be computed; 0 before anything has started."""
        return self.num_cached_tokens / max(self.num_prompt_tokens, 1)

    @property
    def num_completed(self) -> int:
        return sum(self.num_finished[reason] for reason in COMPLETED)


class Metrics(Counts, Observer):
    """Counts since it was made, of all requests and of each client's, and the times of requests.

    keep: of the requests that have ended, the latest so many are kept, and the figures about latencies are
        about these; None keeps all.

    What it didn't see it doesn't know: made while requests run, it has NaN for the times of the tokens that they
    have already. A step that broke off is no step; what came of it all the same counts when it is told of.
    """

    def __init__(self, keep: int | None = None):
        super().__init__()
        self.by_client: defaultdict[str, Counts] = defaultdict(Counts)  # of requests that started or ended
        self.live: dict[Request, RequestMetrics] = {}
        self.finished: deque[RequestMetrics] = deque(maxlen=keep)
        self.num_steps = 0
        self.all_steps, self.steps_with_queue = Shares(), Shares()  # with queue: those that left requests waiting
        self.begin, self.end = math.nan, math.nan  # of the first request or step, and of the latest step

    @property
    def seconds(self) -> float:
        """From the first arrival (or, if that wasn't seen, from what was seen first) to the end of the latest step."""
        return self.end - self.begin

    def on_event(self, event: Event) -> None:
        time, kind, request, details = event
        record = self._record(request, time)
        if kind == "started":
            record.first_scheduled_time = time
            record.num_cached_tokens = details["num_cached_tokens"]
            for counts in self._counts(record):
                counts.num_started += 1
                counts.num_prompt_tokens += details["num_prompt_tokens"]
                counts.num_cached_tokens += details["num_cached_tokens"]
        elif kind == "preempted":
            record.num_preemptions += 1
            for counts in self._counts(record):
                counts.preemptions_by_mode[details["mode"]] += 1
        elif kind == "returned":
            for counts in self._counts(record):
                counts.num_swapped_in_blocks += details["num_swapped_in_blocks"]
        elif kind == "finished":
            self._add_tokens(request, record, time)  # before on_step, which doesn't know it any more
            self._end(record, time, details["finish_reason"])
            del self.live[request]

    def on_plan(self, step: Step) -> None:
        for chunk in step.plan.chunks:  # those that it doesn't know yet have no token of this step
            self._record(chunk.request, step.begin)

    def on_step(self, step: Step) -> None:
        self.num_steps += 1
        self.end = step.end
        for request in step.progressed:
            record = self.live.get(request)
            if record is not None:
                self._add_tokens(request, record, step.end)
        self.all_steps.add(step)
        if step.num_waiting:
            self.steps_with_queue.add(step)

    def _record(self, request: Request, time: float) -> RequestMetrics:
        record = self.live.get(request)
        if record is None:
            arrival = request.arrival_time
            record = RequestMetrics(request.request_id, request.scheduling.client, request.num_prompt_tokens, arrival)
            record.token_times.extend([math.nan] * request.num_output_tokens)
            self.live[request] = record
            request.metrics = request.metrics or record
            self.begin = time if math.isnan(self.begin) else min(self.begin, time)
        return record

    def _counts(self, record: RequestMetrics) -> tuple[Counts, Counts]:
        return self, self.by_client[record.client]

    def _add_tokens(self, request: Request, record: RequestMetrics, time: float) -> None:
        """Those that it has got since the last time: one, but none if it ended with an error, and perhaps two after
        a step that broke off."""
        num_new = request.num_output_tokens - len(record.token_times)
        if num_new > 0:
            record.token_times.extend([time] * num_new)
            for counts in self._counts(record):
                counts.num_output_tokens += num_new

    def _end(self, record: RequestMetrics, time: float, reason: str) -> None:
        record.finished_time, record.finish_reason = time, reason
        for counts in self._counts(record):
            counts.num_finished[reason] += 1
            if reason in COMPLETED:
                counts.num_completed_prompt_tokens += record.num_prompt_tokens
                counts.num_completed_output_tokens += sum(not math.isnan(moment) for moment in record.token_times)
        self.finished.append(record)

    def clients(self) -> list[str]:
        """Whose requests started or ended, in alphabetical order."""
        return sorted(self.by_client)

    def counts(self, client: str | None = None) -> Counts:
        """Of one client or all; a client that nobody has heard of has nothing."""
        return self if client is None else self.by_client.get(client, Counts())

    def latencies(self, client: str | None = None) -> dict[str, dict[str, float]]:
        """Of the completed requests that are kept, of one client or all: "ttft", "tpot", "itl", "e2el" and
        "queue_time", each as "mean", "median", "p90" and "p99", in seconds; NaN where there is nothing."""
        records = self._completed(client)
        gaps = summary(gap for record in records for gap in record.itl)
        return {
            name: gaps if name == "itl" else summary(getattr(record, name) for record in records) for name in LATENCIES
        }

    def goodput(self, objectives: Mapping[str, float], client: str | None = None) -> float:
        """Requests per second that completed with every latency at most as long as its objective, as in
        {"ttft": 0.5, "tpot": 0.05}: seconds. (What a single token has no TPOT can't be late.) If not all
        are kept: the rate at which they completed, times the share of good ones among those that are."""
        for name in objectives:
            check_choice("objectives", name, [name for name in LATENCIES if name != "itl"])
        records = self._completed(client)
        num_good = sum(not any(getattr(r, name) > limit for name, limit in objectives.items()) for r in records)
        num_completed = self.counts(client).num_completed
        return self._per_second(num_good * num_completed / max(len(records), 1))

    def throughput(self, client: str | None = None) -> dict[str, float]:
        """ "requests", "output_tokens" and "total_tokens" (prompts too) per second, of requests that completed."""
        counts = self.counts(client)
        output = counts.num_completed_output_tokens
        figures = {
            "requests": counts.num_completed,
            "output_tokens": output,
            "total_tokens": output + counts.num_completed_prompt_tokens,
        }
        return {name: self._per_second(count) for name, count in figures.items()}

    def _per_second(self, count: float) -> float:
        """NaN as long as no time has passed."""
        return count / self.seconds if self.seconds else math.nan

    def _completed(self, client: str | None) -> list[RequestMetrics]:
        completed = [record for record in self.finished if record.finish_reason in COMPLETED]
        return completed if client is None else [record for record in completed if record.client == client]
