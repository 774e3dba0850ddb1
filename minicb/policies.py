"""Policies: the order of requests. The scheduler decides how many tokens and blocks each gets."""

import math
from collections import Counter, deque
from collections.abc import Mapping
from typing import NamedTuple

from minicb.checks import check_int, check_real
from minicb.request import Request

MAX_CLIENTS = 1000  # what a policy remembers of clients without requests


def check_positive(name: str, value: object) -> float:
    return check_real(name, value, lambda number: 0 < number < math.inf, "a finite number > 0")


def check_weight(name: str, value: object) -> float:
    """Rounding would drown the service of weights further apart."""
    return check_real(name, value, lambda number: 0.001 <= number <= 1000, "in [0.001, 1000]")


class StepLimits(NamedTuple):
    max_num_seqs: int  # requests that run
    max_num_batched_tokens: int  # tokens of a step


class Policy:
    """An order of requests. A subclass defines `key`; all else is optional.

    Running requests get prompt tokens and blocks in the order of their current keys, smallest first. The last one is
    the victim of a preemption. A decode never waits for a prefill, whatever their keys.

    Waiting requests start in the order of the keys that they had when they began to wait. A preempted request
    returns before any new one starts, the oldest first, unless the policy is preemptive.

    Every request ends only if `key` lets old requests come forward (ageing). Otherwise a stream of new ones could
    keep them waiting for ever.
    """

    preemptive = False  # a waiting request may displace a running one with a larger key, and all wait by key

    def key(self, request: Request) -> tuple:
        raise NotImplementedError

    def queue(self, request: Request) -> str:
        """Requests of one queue wait in the order of their keys; the queue of the least `service` is next."""
        return ""

    def service(self, queue: str) -> float:
        """What the requests of a queue got so far. It never falls while one of them waits."""
        return 0.0

    def limits(self, maximum: StepLimits, num_waiting: int, now: float) -> StepLimits:
        """The limits of the next step, at most the configured maximum. now: seconds on the engine's clock."""
        return maximum

    # What happened. A request that returns after a preemption doesn't start again.
    def added(self, request: Request) -> None: ...

    def started(self, request: Request) -> None: ...

    def generated(self, request: Request) -> None: ...  # an output token

    def finished(self, request: Request) -> None: ...

    def stepped(self, num_tokens: int, seconds: float) -> None: ...


class FCFS(Policy):
    """First come, first served.

    Guarantee: the oldest request is in every step's plan.
    """

    def key(self, request: Request) -> tuple:
        return (request.arrival,)


class SJF(Policy):
    """Shortest job first: the least work left, in tokens. It minimizes the mean latency (Smith, 1956).

    Work is the rest of the prompt without its cached blocks, and the rest of the expected output: the caller's
    `expected_output_len`, else the mean output of the client's ended requests, else all that the request may have.

    Guarantee: each later arrival counts as `ageing` tokens of work. So fewer than w / ageing later requests start
    before a request that came with w tokens of work.

    Fast ageing turns a long queue into first come, first served. Mean queue time as a share of that under FCFS, all
    requests at once (simulated H100, 16 slots, prompts of 32-96 tokens, exponential outputs with a mean of 128):

        requests    ageing 1    ageing 0.01
             100        0.50           0.49
           1,000        0.77           0.50
           5,000        0.95           0.51
    """

    def __init__(self, ageing: float = 0.01):
        self.ageing = check_positive("ageing", ageing)
        self._outputs: dict[str, tuple[int, int]] = {}  # client -> its ended requests, and their output tokens

    def key(self, request: Request) -> tuple:
        return (self.work(request) + self.ageing * request.arrival, request.arrival)

    def work(self, request: Request) -> float:
        prompt = request.num_uncomputed - (0 if request.has_started else request.num_cached_tokens)
        return prompt + max(self.expected_output(request) - request.num_output_tokens, 1)

    def expected_output(self, request: Request) -> float:
        most = request.max_num_tokens - request.num_prompt_tokens
        num_requests, num_tokens = self._outputs.get(request.scheduling.client, (1, most))
        return min(most, request.scheduling.expected_output_len or num_tokens / num_requests)

    def finished(self, request: Request) -> None:
        if request.finish_reason not in ("stop", "length"):
            return  # an aborted request says nothing about the length of outputs
        client = request.scheduling.client
        num_requests, num_tokens = self._outputs.pop(client, (0, 0))
        self._outputs[client] = (num_requests + 1, num_tokens + request.num_output_tokens)
        if len(self._outputs) > MAX_CLIENTS:  # the one that has ended nothing for longest
            del self._outputs[next(iter(self._outputs))]


class Priority(Policy):
    """The lowest `priority` first; among equals first come, first served. A waiting request displaces running ones
    that are less urgent, if it can then start. (vLLM displaces for blocks only.)

    Guarantee: `ageing` later arrivals count as one level. So a request overtakes an older one only if it is more
    urgent by more than the number of arrivals between them / ageing.
    """

    preemptive = True

    def __init__(self, ageing: int = 100):
        self.ageing = check_int("ageing", ageing, minimum=1)  # an int: keys are exact, whatever the priorities

    def key(self, request: Request) -> tuple:
        return (request.scheduling.priority * self.ageing + request.arrival, request.arrival)


class Fair(Policy):
    """Virtual Token Counter (Sheng et al., 2024): the client with the least service is next; within a client, first
    come, first served. The victim of a preemption is the last request of the client with the most service.

    Service is input_weight for each prompt token that has to be computed, charged when the request starts, and
    output_weight for each output token. It is divided by the client's weight: client_weights, or 1.

    A client that returns is lifted to the level, so it can't claim what it didn't use while it was away. The level
    is the virtual time of fair queueing (Demers et al., 1989): all service, divided by the number of clients at the
    time. It is never below the counter of the client that started a request last. So it rises, and a stream of new
    clients can't keep an old one out.

    Guarantee: let two clients of weight 1 have requests waiting from one moment to another. The services that they
    get meanwhile differ by at most 2 U, where U = max(input_weight L, output_weight M), L is the longest prompt and
    M the most tokens of requests that run at a time. walkthrough/06_policies.md has the argument.
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
        self._num_live: Counter[str] = Counter()  # requests of each client that have not ended
        self._num_new: Counter[str] = Counter()  # those of them that have not started

    def key(self, request: Request) -> tuple:
        return (self.counters[request.scheduling.client], request.arrival)

    def queue(self, request: Request) -> str:
        return request.scheduling.client

    def service(self, queue: str) -> float:
        return self.counters[queue]

    def added(self, request: Request) -> None:
        client = request.scheduling.client
        if not self._num_new[client]:  # nothing of it waits: it returns to the queue
            self.counters[client] = max(self.counters.get(client, 0.0), self._level)
        self._num_live[client] += 1
        self._num_new[client] += 1

    def started(self, request: Request) -> None:
        client = request.scheduling.client
        self._num_new[client] -= 1
        self._level = max(self._level, self.counters[client])
        self._charge(client, self.input_weight * (request.num_prompt_tokens - request.num_cached_tokens))

    def generated(self, request: Request) -> None:
        self._charge(request.scheduling.client, self.output_weight)

    def finished(self, request: Request) -> None:
        client = request.scheduling.client
        self._num_live[client] -= 1
        self._num_new[client] -= not request.has_started
        if not self._num_live[client]:
            del self._num_live[client], self._num_new[client]
            if len(self.counters) > 2 * len(self._num_live) + MAX_CLIENTS:  # forget those that the level has passed
                keep = {c: n for c, n in self.counters.items() if n > self._level or c in self._num_live}
                self.counters = keep

    def _charge(self, client: str, service: float) -> None:
        service /= self.client_weights.get(client, 1.0)
        self.counters[client] += service
        self._level += service / max(len(self._num_live), 1)


class Adaptive(FCFS):
    """First come, first served, in small batches while requests come slowly, so that each is fast, and in large
    batches while they come fast, for throughput.

    1. Little's law (1961): if every token took tpot_objective seconds, arrival rate x mean output x tpot_objective
       requests would run. There are a quarter more slots than that, at least min_num_seqs. The arrival rate is that
       of the last 32 arrivals; the mean output is all output tokens over the number of ended requests.
    2. The token budget of a step follows the measured step time by TCP's rule, additive increase and multiplicative
       decrease (Jacobson, 1988). A step that takes longer than tpot_objective cuts it by an eighth. A step that uses it up in
       less time adds min_num_batched_tokens, its smallest value.
    3. There are never more slots than tokens.
    4. While more requests wait than there are slots, both limits are the configured ones.

    Guarantee: that of FCFS. But if the limits fall below the number of running decodes, prompts get no tokens until
    some of these have ended.
    """

    def __init__(self, tpot_objective: float = 0.05, min_num_seqs: int = 4, min_num_batched_tokens: int = 64):
        self.tpot_objective = check_positive("tpot_objective", tpot_objective)
        self.min_num_seqs = check_int("min_num_seqs", min_num_seqs, minimum=1)
        self.min_num_batched_tokens = check_int("min_num_batched_tokens", min_num_batched_tokens, minimum=1)
        self._budget = self.min_num_batched_tokens
        self._arrivals: deque[float] = deque(maxlen=32)
        # Tokens of unfinished requests count too: those that end first are the short ones.
        self._num_output_tokens = self._num_finished = 0

    def added(self, request: Request) -> None:
        self._arrivals.append(request.arrival_time)

    def generated(self, request: Request) -> None:
        self._num_output_tokens += 1

    def finished(self, request: Request) -> None:
        self._num_finished += 1

    def stepped(self, num_tokens: int, seconds: float) -> None:
        if seconds > self.tpot_objective:
            self._budget = max(self._budget * 7 // 8, self.min_num_batched_tokens)
        elif num_tokens >= self._budget:
            self._budget += self.min_num_batched_tokens

    def limits(self, maximum: StepLimits, num_waiting: int, now: float) -> StepLimits:
        tokens = min(maximum.max_num_batched_tokens, self._budget)
        slots = min(maximum.max_num_seqs, tokens, max(self.min_num_seqs, 1.25 * self._concurrency(now)))
        return maximum if num_waiting > slots else StepLimits(int(slots), tokens)

    def _concurrency(self, now: float) -> float:
        """Requests that would run if every token took tpot_objective seconds; unlimited until one has ended."""
        if self._num_finished == 0:
            return math.inf
        return self._rate(now) * self._num_output_tokens / self._num_finished * self.tpot_objective

    def _rate(self, now: float) -> float:
        """Arrivals per second. It falls while no request comes."""
        if len(self._arrivals) < 2:
            return 0.0
        elapsed = now - self._arrivals[0]
        return len(self._arrivals) / elapsed if elapsed > 0 else math.inf


POLICIES: dict[str, type[Policy]] = {
    "fcfs": FCFS,
    "sjf": SJF,
    "priority": Priority,
    "fair": Fair,
    "adaptive": Adaptive,
}
