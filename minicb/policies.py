"""Policies: the order of requests. What each gets in a step is the scheduler's business."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from minicb.checks import check_int, check_real
from minicb.request import Request


def check_positive(name: str, value: object) -> float:
    return check_real(name, value, lambda number: 0 < number < math.inf, "a finite number > 0")


def check_weight(name: str, value: object) -> float:
    """Counters of weights further apart would drown in rounding."""
    return check_real(name, value, lambda number: 0.001 <= number <= 1000, "in [0.001, 1000]")


class Limits(NamedTuple):
    """How many requests may run, and how many tokens a step may have."""

    max_num_seqs: int
    max_num_batched_tokens: int


class Policy:
    """An order of requests. Subclasses say it by `key`, and learn what they need to know from the methods below.

    Running requests get prompt tokens and blocks from the smallest key up, by their keys of that moment,
    and the one with the largest is the victim of a preemption. No decode waits for a prefill, whatever
    their keys. That every request ends is up to the key: let those that wait come forward (ageing), or a stream
    of others can keep them waiting for ever. What a policy guarantees, it guarantees to those that are in the queue: a
    sample that waits for the first of its prompt isn't yet.
    """

    urgent = False  # may a request that waits displace a running one with a larger key?

    def key(self, request: Request) -> tuple:
        raise NotImplementedError

    def order(self, request: Request) -> tuple:
        """The order of waiting requests, fixed when they begin to wait. Those that had to stop come first:
        new ones could keep them out for ever."""
        return (not request.has_started, *self.key(request))

    def line(self, request: Request) -> str:
        """Requests of one line wait in the order above; `rank` says which line is next."""
        return ""

    def rank(self, request: Request) -> tuple:
        """Of the first request of a line; the smallest is next. Unlike the order it may grow while they wait."""
        return ()

    def limits(self, maximum: Limits, num_waiting: int, now: float) -> Limits:
        """The limits of the next step, none above those that were configured; now is in seconds."""
        return maximum

    # What happens. Requests that return after a preemption don't start again.
    def added(self, request: Request) -> None: ...

    def started(self, request: Request) -> None: ...

    def generated(self, request: Request) -> None: ...  # one more output token

    def finished(self, request: Request) -> None: ...

    def stepped(self, num_tokens: int, seconds: float) -> None: ...

    def recovered(self, requests: Iterable[Request]) -> None: ...  # after an interruption: all that have not ended


class FCFS(Policy):
    """First come, first served. A preempted request keeps its place.

    Guarantee: whatever comes later, the oldest request is in every step's plan (unless it waits for
    max_long_partial_prefills).
    """

    def key(self, request: Request) -> tuple:
        return (request.arrival,)


class SJF(Policy):
    """Shortest job first: the least work left, in tokens, which makes the mean latency least (Smith, 1956).

    Work is what is left of the prompt and of the expected output: the caller's `expected_output_len`, else
    the mean of what that client's requests came to so far, else as many tokens as it may have.

    Guarantee: each later arrival counts as `ageing` tokens of work, so of those that come after a request
    with w tokens of work, at most w / ageing start before it (but for those that pass it while it waits for
    max_long_partial_prefills). Among requests that come together, too, a place in their order weighs `ageing` tokens.
    The victim of a preemption is the running request with the most work left, ageing included.
    """

    def __init__(self, ageing: float = 1.0):
        self.ageing = check_positive("ageing", ageing)
        self._outputs: dict[str, tuple[int, int]] = {}  # client -> requests that ended, their output tokens

    def key(self, request: Request) -> tuple:
        return (self.work(request) + self.ageing * request.arrival, request.arrival)

    def work(self, request: Request) -> float:
        return request.num_pending + max(self.expected_output(request) - request.num_output_tokens, 1)

    def expected_output(self, request: Request) -> float:
        most = request.max_num_tokens - request.num_prompt_tokens
        if request.expected_output_len is not None:
            return min(most, request.expected_output_len)
        if request.client in self._outputs:
            num_requests, num_tokens = self._outputs[request.client]
            return min(most, num_tokens / num_requests)
        return most

    def finished(self, request: Request) -> None:
        if request.finish_reason in ("stop", "length"):  # an aborted one says nothing about how long they get
            num_requests, num_tokens = self._outputs.get(request.client, (0, 0))
            self._outputs[request.client] = (num_requests + 1, num_tokens + request.num_output_tokens)


class Priority(Policy):
    """The lowest `priority` first; among equals first come, first served. A request that waits displaces running
    ones that are less urgent, if that lets it start, as vLLM does for blocks.

    Guarantee: every `ageing` later arrivals count as one level, so a request is passed by those that come
    after it only while the difference of their priorities times `ageing` exceeds the number of arrivals
    in between: a bounded number of later requests pass or displace it (and those that pass it while it waits for
    max_long_partial_prefills).
    """

    urgent = True

    def __init__(self, ageing: int = 100):
        self.ageing = check_int("ageing", ageing, minimum=1)  # exact, whatever the priorities

    def key(self, request: Request) -> tuple:
        return (request.priority * self.ageing + request.arrival, request.arrival)

    def order(self, request: Request) -> tuple:
        return self.key(request)


class Fair(Policy):
    """Virtual Token Counter (Sheng et al., 2024): the client that was served least is next, within a client first
    come, first served. The victim of a preemption is the last request of the client that was served most.

    Service is input_weight for each prompt token that has to be computed, counted when a request starts,
    and output_weight for each output token, divided by the client's weight (1 unless client_weights says
    otherwise; weights are in [0.001, 1000]). A client that comes back is lifted to the level, so it can't claim
    what it didn't use while it was away. The level is the virtual time of fair queueing (Demers et al., 1989): all
    service, each bit of it divided by the number of clients at that time, and never below the counter of the client
    whose request started last. So it rises, and clients that never came before can't keep others out for ever.

    Guarantee: between any two moments the services of two clients that had requests waiting all the time,
    and weights of 1, differ by at most 2 U, with U = max(input_weight L, output_weight M): L is the longest prompt,
    M the most tokens, prompts and outputs to their end, of requests that have started and not ended. Because: a
    client's counter is the least of those that wait when a request of its starts, and what has started adds at most
    U to it before the next; so the counters of clients that wait stay within U of one another, and their difference
    changes by at most 2 U. (A prompt's tokens are at most U if input_weight is at most output_weight. Requests
    that wait for max_long_partial_prefills are passed by others.)
    """

    def __init__(
        self,
        input_weight: float = 1.0,
        output_weight: float = 2.0,
        client_weights: Mapping[str, float] | None = None,
    ):
        self.input_weight = check_weight("input_weight", input_weight)
        self.output_weight = check_weight("output_weight", output_weight)
        weights = dict(client_weights or {}).items()
        self.client_weights = {client: check_weight(f"client_weights[{client!r}]", w) for client, w in weights}
        self.counters: dict[str, float] = {}  # client -> service so far
        self._level = 0.0
        self._requests: dict[str, set[Request]] = {}  # client -> those that have not ended

    def key(self, request: Request) -> tuple:
        return (self.counters[request.client], request.arrival)

    def line(self, request: Request) -> str:
        return request.client

    def order(self, request: Request) -> tuple:
        # Not by the key: of two that had to stop, the older may have done so later, when more had been served.
        return (not request.has_started, request.arrival)

    def rank(self, request: Request) -> tuple:
        return (not request.has_started, 0.0 if request.has_started else self.counters[request.client])

    def added(self, request: Request) -> None:
        requests = self._requests.setdefault(request.client, set())
        if all(other.has_started for other in requests):  # nobody of its waits: it comes back to the queue
            self.counters[request.client] = max(self.counters.get(request.client, 0.0), self._level)
        requests.add(request)

    def started(self, request: Request) -> None:
        self._level = max(self._level, self.counters[request.client])
        self._charge(request, self.input_weight * (request.num_prompt_tokens - request.num_cached_tokens))

    def generated(self, request: Request) -> None:
        self._charge(request, self.output_weight)

    def finished(self, request: Request) -> None:
        requests = self._requests.get(request.client, set())
        requests.discard(request)
        if not requests:
            self._requests.pop(request.client, None)
            if len(self.counters) > 2 * len(self._requests) + 1000:  # forget whom the level has passed
                keep = {c: n for c, n in self.counters.items() if n > self._level or c in self._requests}
                self.counters = keep

    def recovered(self, requests: Iterable[Request]) -> None:
        self._requests = {}
        for request in requests:
            self._requests.setdefault(request.client, set()).add(request)
            self.counters.setdefault(request.client, self._level)

    def _charge(self, request: Request, service: float) -> None:
        service /= self.client_weights.get(request.client, 1.0)
        self.counters[request.client] += service
        self._level += service / max(len(self._requests), 1)


class Adaptive(FCFS):
    """First come, first served, in small batches while requests come slowly, so that each is fast, and in large
    ones when they come fast, for throughput. The rule:

    1. The arrival rate is that of the last 32 arrivals; the mean output is all tokens over the requests that have
       ended; a step of n tokens takes a + b n seconds, by least squares over recent steps.
    2. If every token took tpot_objective seconds, rate x mean output x tpot_objective requests would be
       running (Little, 1961): so many slots and a quarter more, from min_num_seqs up.
    3. A step has as many tokens as take tpot_objective seconds, from min_num_batched_tokens up.
    4. There are never more slots than tokens.
    5. When more requests wait than there are slots, both limits are the configured ones.

    Guarantee: that of FCFS; only, when the limits fall below the number of decodes that run already, prompts get no
    tokens until some of these have ended.
    """

    def __init__(self, tpot_objective: float = 0.05, min_num_seqs: int = 4, min_num_batched_tokens: int = 64):
        self.tpot_objective = check_positive("tpot_objective", tpot_objective)
        self.minimum = Limits(
            check_int("min_num_seqs", min_num_seqs, minimum=1),
            check_int("min_num_batched_tokens", min_num_batched_tokens, minimum=1),
        )
        self._arrivals: deque[float] = deque(maxlen=32)
        # Tokens of unfinished requests count too: those that end first are the short ones.
        self._num_output_tokens = self._num_finished = 0
        self._sums = [0.0] * 5  # over recent steps: 1, n, n^2, seconds, n * seconds

    def added(self, request: Request) -> None:
        self._arrivals.append(request.arrival_time)

    def generated(self, request: Request) -> None:
        self._num_output_tokens += 1

    def finished(self, request: Request) -> None:
        self._num_finished += 1

    def stepped(self, num_tokens: int, seconds: float) -> None:
        new = (1.0, num_tokens, num_tokens**2, seconds, num_tokens * seconds)
        self._sums = [0.98 * old + value for old, value in zip(self._sums, new, strict=True)]

    def limits(self, maximum: Limits, num_waiting: int, now: float) -> Limits:
        tokens = max(self.minimum.max_num_batched_tokens, self._tokens_in(self.tpot_objective))
        tokens = min(maximum.max_num_batched_tokens, tokens)
        slots = max(self.minimum.max_num_seqs, 1.25 * self._concurrency(now))
        slots = min(maximum.max_num_seqs, tokens, slots)
        return maximum if num_waiting > slots else Limits(int(slots), int(tokens))

    def _concurrency(self, now: float) -> float:
        """Requests, if every token took tpot_objective seconds; unlimited until one has ended."""
        if self._num_finished == 0:
            return math.inf
        return self._rate(now) * self._num_output_tokens / self._num_finished * self.tpot_objective

    def _rate(self, now: float) -> float:
        """Arrivals per second; it falls while nothing comes."""
        if len(self._arrivals) < 2:
            return 0.0
        elapsed = now - self._arrivals[0]
        return len(self._arrivals) / elapsed if elapsed > 0 else math.inf

    def _tokens_in(self, seconds: float) -> float:
        """Tokens of a step that takes so long. As long as all steps had one size: twice that, if they were fast
        enough, so that there is a second size to learn from."""
        weight, tokens, squares, total, products = self._sums
        spread = weight * squares - tokens**2
        if spread <= 1e-6 * squares:
            return 2 * tokens / weight if weight and total / weight <= seconds else 0.0
        slope = (weight * products - tokens * total) / spread
        if slope <= 0:
            return math.inf
        return (seconds - (total - slope * tokens) / weight) / slope


POLICIES: dict[str, type[Policy]] = {
    "fcfs": FCFS,
    "sjf": SJF,
    "priority": Priority,
    "fair": Fair,
    "adaptive": Adaptive,
}
