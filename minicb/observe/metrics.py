"""Metrics of a run, made from its events and steps, under the names of `vllm bench`.

TTFT, time to first token: from arrival, which is when the request was due, to its first token.
E2EL, end-to-end latency: from arrival to end.
TPOT, time per output token: (E2EL - TTFT) / (output tokens - 1).
ITL, inter-token latency: the time between two consecutive tokens.
Queue time: from arrival to the start of the request's first step.
Goodput: requests per second that meet all objectives (DistServe, 2024).

All times are in seconds. As in `vllm bench`, latencies and rates cover requests that completed: those that ended with
"stop" or "length", not with "abort" or "error".
"""

import math
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from minicb.checks import check_choice
from minicb.plan import Event, Observer, Step
from minicb.request import Request

LATENCIES = ("ttft", "tpot", "itl", "e2el", "queue_time")
COMPLETED = ("stop", "length")


@dataclass
class RequestMetrics:
    """The times of one request, in seconds on the engine's clock. NaN: not happened yet, not seen, or
    undefined, like the TPOT of a single token."""

    request_id: str
    client: str
    num_prompt_tokens: int
    arrival_time: float
    first_scheduled_time: float = math.nan
    finished_time: float = math.nan
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    token_times: array = field(default_factory=lambda: array("d"))  # one for each output token

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
    """A percentile of sorted values, interpolated linearly between the two nearest. NaN if there are no values."""
    if not values:
        return math.nan
    position = (len(values) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (position - low)


def summary(values: Iterable[float]) -> dict[str, float]:
    """mean, median, p90 and p99 of the values that are not NaN."""
    known = sorted(value for value in values if not math.isnan(value))
    figures = {"mean": math.fsum(known) / len(known) if known else math.nan, "median": percentile(known, 50)}
    return figures | {"p90": percentile(known, 90), "p99": percentile(known, 99)}


@dataclass
class Utilization:
    """How much of the slots, the blocks and the token budget the steps used. Slots and blocks count by the duration of
    the step. Shares are NaN before the first step."""

    seconds: float = 0.0
    slot_seconds: float = 0.0  # slots * seconds, over all steps
    running_seconds: float = 0.0  # slots with a request
    block_seconds: float = 0.0
    held_block_seconds: float = 0.0  # blocks that requests hold; cached blocks are free
    budget: int = 0  # tokens that the steps had room for
    num_batched_tokens: int = 0  # tokens that they computed

    def add(self, step: Step) -> None:
        seconds = step.end - step.begin
        self.seconds += seconds
        self.slot_seconds += seconds * max(step.max_num_seqs, step.num_running)  # more run if the limit was lowered
        self.running_seconds += seconds * step.num_running
        self.block_seconds += seconds * step.num_blocks
        self.held_block_seconds += seconds * (step.num_blocks - step.num_free_blocks)
        num_tokens = sum(chunk.length for chunk in step.plan.chunks)
        self.budget += max(step.max_num_batched_tokens, num_tokens)  # more if it was lowered
        self.num_batched_tokens += num_tokens

    @property
    def occupancy(self) -> float:
        """Share of the slots that had a request."""
        return self.running_seconds / self.slot_seconds if self.slot_seconds else math.nan

    @property
    def block_use(self) -> float:
        """Share of the blocks that requests held."""
        return self.held_block_seconds / self.block_seconds if self.block_seconds else math.nan

    @property
    def budget_use(self) -> float:
        """Share of the token budget that the steps used."""
        return self.num_batched_tokens / self.budget if self.budget else math.nan


@dataclass
class RequestCounts:
    """Counts of requests and of their tokens, blocks and preemptions."""

    num_started: int = 0
    num_prompt_tokens: int = 0  # of requests that started
    num_cached_tokens: int = 0  # of those, found in the prefix cache at the first start
    num_output_tokens: int = 0
    num_swapped_in_blocks: int = 0  # copied back from host memory
    preemptions_by_mode: Counter[str] = field(default_factory=Counter)  # "swap", "recompute"
    num_finished: Counter[str] = field(default_factory=Counter)  # by finish_reason
    num_completed_prompt_tokens: int = 0  # of requests that completed
    num_completed_output_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of the prompt tokens that the prefix cache had. 0 before the first start."""
        return self.num_cached_tokens / max(self.num_prompt_tokens, 1)

    @property
    def num_completed(self) -> int:
        return sum(self.num_finished[reason] for reason in COMPLETED)


class Metrics(RequestCounts, Observer):
    """Counts over all requests and by client, and the times of each request.

    keep: the number of ended requests whose times are kept, and of clients whose counts are kept. The requests that
        ended first and the clients seen least recently are dropped. Latencies cover the requests that are kept; counts
        over all requests cover all. None keeps everything.

    Metrics that are made while requests run have NaN for the times of the tokens that came before.
    """

    def __init__(self, keep: int | None = None):
        super().__init__()
        self.keep = keep
        self.by_client: OrderedDict[str, RequestCounts] = OrderedDict()  # least recently seen first
        self.live: dict[Request, RequestMetrics] = {}
        self.finished: deque[RequestMetrics] = deque(maxlen=keep)
        self.num_steps = 0
        self.all_steps, self.steps_with_queue = Utilization(), Utilization()  # the latter: steps with waiting requests
        self.begin, self.end = math.nan, math.nan  # of the first request or step, and of the latest step

    @property
    def seconds(self) -> float:
        """From the first arrival that was seen, or else the first step, to the end of the latest step."""
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
            self._add_tokens(request, record, time)  # on_step no longer finds the request in `live`
            self._end(record, time, details["finish_reason"])
            del self.live[request]

    def on_plan(self, step: Step) -> None:
        for chunk in step.plan.chunks:  # a request not seen before has no token of this step yet
            self._record(chunk.request, step.begin)

    def on_step(self, step: Step) -> None:
        self.num_steps += 1
        self.end = step.end
        for request in step.progressed:
            if request in self.live:  # else its last token was counted when it ended
                self._add_tokens(request, self.live[request], step.end)
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

    def _counts(self, record: RequestMetrics) -> tuple[RequestCounts, RequestCounts]:
        """The counts that the request belongs to: those of all, and those of its client."""
        counts = self.by_client.get(record.client)
        if counts is not None:
            self.by_client.move_to_end(record.client)
            return self, counts
        counts = self.by_client[record.client] = RequestCounts()
        if self.keep is not None and len(self.by_client) > self.keep:
            self.by_client.popitem(last=False)
        return self, counts

    def _add_tokens(self, request: Request, record: RequestMetrics, time: float) -> None:
        """Count the tokens that came since the last call. After an error there are none."""
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
        """The clients with counts, in alphabetical order."""
        return sorted(self.by_client)

    def counts(self, client: str | None = None) -> RequestCounts:
        """The counts of one client, or of all. All are 0 for a client that was never seen or that was dropped."""
        return self if client is None else self.by_client.get(client, RequestCounts())

    def latencies(self, client: str | None = None) -> dict[str, dict[str, float]]:
        """ "ttft", "tpot", "itl", "e2el" and "queue_time", each as "mean", "median", "p90" and "p99", in seconds, of the
        completed requests that are kept, of one client or all. NaN where there are no values."""
        records = self._completed(client)
        gaps = summary(gap for record in records for gap in record.itl)
        return {
            name: gaps if name == "itl" else summary(getattr(record, name) for record in records) for name in LATENCIES
        }

    def goodput(self, objectives: Mapping[str, float], client: str | None = None) -> float:
        """Requests per second that completed with no latency above its objective, of one client or all.

        objectives: seconds by the name of the latency, as in {"ttft": 0.5, "tpot": 0.05}. A request of one token
            meets every TPOT. ValueError: a name other than "ttft", "tpot", "e2el" or "queue_time".

        If some requests were dropped, it is the rate of all completed requests times the share of good ones among
        those that are kept.
        """
        for name in objectives:
            check_choice("objectives", name, [name for name in LATENCIES if name != "itl"])
        records = self._completed(client)
        num_good = sum(not any(getattr(r, name) > limit for name, limit in objectives.items()) for r in records)
        num_completed = self.counts(client).num_completed
        return self._per_second(num_good * num_completed / max(len(records), 1))

    def throughput(self, client: str | None = None) -> dict[str, float]:
        """ "requests", "output_tokens" and "total_tokens", prompts included, per second, of requests that completed."""
        counts = self.counts(client)
        output = counts.num_completed_output_tokens
        figures = {
            "requests": counts.num_completed,
            "output_tokens": output,
            "total_tokens": output + counts.num_completed_prompt_tokens,
        }
        return {name: self._per_second(count) for name, count in figures.items()}

    def _per_second(self, count: float) -> float:
        """NaN if no time has passed."""
        return count / self.seconds if self.seconds else math.nan

    def _completed(self, client: str | None) -> list[RequestMetrics]:
        completed = [record for record in self.finished if record.finish_reason in COMPLETED]
        return completed if client is None else [record for record in completed if record.client == client]
