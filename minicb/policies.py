"""Policies: the order of requests. The scheduler decides how many tokens and blocks each gets."""

import math
from collections import Counter, deque
from collections.abc import Mapping
from typing import NamedTuple

from minicb.checks import check_int, check_real
from minicb.request import Request

MAX_CLIENTS = 1000  # that a policy remembers although they have no requests


def check_positive(name: str, value: object) -> float:
    return check_real(name, value, lambda number: 0 < number < math.inf, "a finite number > 0")


def check_weight(name: str, value: object) -> float:
    """Weights further apart would lose the smaller services to rounding."""
    return check_real(name, value, lambda number: 0.001 <= number <= 1000, "in [0.001, 1000]")


class StepLimits(NamedTuple):
    max_num_seqs: int  # requests that run
    max_num_batched_tokens: int  # tokens of a step


class Policy:
    """An order of requests. A subclass defines `key`; all else is optional.

    Running requests get prompt tokens and blocks in the order of their current keys, the smallest first. The last one
    is the victim of a preemption. Decodes get their tokens before prefills, whatever the keys.

    New requests start in the order of the keys that they had when they arrived. Preempted requests return before any
    new one starts, the oldest first. Under a preemptive policy both wait together, in the order of their keys.

    Keys must let old requests come forward (ageing). Otherwise a stream of new requests keeps an old one waiting
    for ever.
    """

    preemptive = False  # the next waiting request may displace running ones with larger keys

    def key(self, request: Request) -> tuple:
        raise NotImplementedError

    def queue(self, request: Request) -> str:
        """Requests of one queue wait in the order of their keys. The queue with the least `service` is next."""
        return ""

    def service(self, queue: str) -> float:
        """What the requests of a queue got so far. It never falls while one of them waits."""
        return 0.0

    def limits(self, maximum: StepLimits, num_waiting: int, now: float) -> StepLimits:
        """The limits of the next step, at most the configured maximum. now: seconds on the engine's clock."""
        return maximum

    # What happened. A request starts once: a return after a preemption isn't told.
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
    """Shortest job first: the least work left, in tokens. It minimizes the mean waiting time (Smith, 1956).

    Work is the prompt tokens left to compute and the output tokens left to expect. The expected output is
    `expected_output_len`, else the mean output of the client's ended requests, else the most that the request may have.

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
        most = request.max_num_tokens - request.num_prompt_tokens
        num_requests, num_tokens = self._outputs.get(request.scheduling.client, (1, most))
        output = min(most, request.scheduling.expected_output_len or num_tokens / num_requests)
        return prompt + max(output - request.num_output_tokens, 1)

    def finished(self, request: Request) -> None:
        if request.finish_reason in ("stop", "length"):  # others say nothing about the length of outputs
            num_requests, num_tokens = self._outputs.pop(request.scheduling.client, (0, 0))
            self._outputs[request.scheduling.client] = (num_requests + 1, num_tokens + request.num_output_tokens)
            if len(self._outputs) > MAX_CLIENTS:  # forget the client whose last request ended first
                del self._outputs[next(iter(self._outputs))]


class Priority(Policy):
    """The lowest `priority` first, equal ones first come, first served. The next waiting request displaces less urgent
    running ones if it can then start. (vLLM displaces for blocks only.)

    Guarantee: `ageing` later arrivals count as one level. So a request overtakes one that came n arrivals earlier only
    if it is more urgent by more than n / ageing levels.
    """

    preemptive = True

    def __init__(self, ageing: int = 100):
        self.ageing = check_int("ageing", ageing, minimum=1)  # an int: keys are exact, whatever the priorities

    def key(self, request: Request) -> tuple:
        return (request.scheduling.priority * self.ageing + request.arrival, request.arrival)


class Fair(Policy):
    """Virtual Token Counter (Sheng et al., 2024): the client with the least service is next; within a client, first
    come, first served. The victim of a preemption is the last request of the client with the most service.

    Service is input_weight for each prompt token to compute, charged when the request starts, and output_weight for
    each output token. It is divided by the client's weight: client_weights, or 1.

    A client can't save up service while none of its requests waits to start: the next one lifts its counter to the
    level. The level is the virtual time of fair queueing (Demers et al., 1989). It rises by each service divided by
    the number of clients at the time, and is never below the counter of the client that started a request last. So
    it passes every counter in the end, and a stream of new clients can't keep an old one out.

    Guarantee: let two clients of weight 1 have requests waiting to start. From the moment when each has started one,
    the services that they get differ by at most 2 U. U is the larger token weight times the most tokens, prompts and
    outputs, that requests running at one time come to. The reason: a client that starts a request has the least
    counter, and until its next start it gets at most U.
    """

    def __init__(self, input_weight: float = 1.0, output_weight: float = 2.0, client_weights: Mapping[str, float] = {}):
        self.input_weight = check_weight("input_weight", input_weight)
        self.output_weight = check_weight("output_weight", output_weight)
        self.client_weights = {c: check_weight(f"client_weights[{c!r}]", w) for c, w in client_weights.items()}
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
        if not self._num_new[client]:
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
                self.counters = {c: n for c, n in self.counters.items() if n > self._level or c in self._num_live}

    def _charge(self, client: str, service: float) -> None:
        service /= self.client_weights.get(client, 1.0)
        self.counters[client] += service
        self._level += service / len(self._num_live)


class Adaptive(FCFS):
    """First come, first served: in small batches while requests come slowly, so that each is fast, and in large
    batches while they come fast, for throughput.

    1. Slots follow Little's law (1961). If every token took tpot_objective seconds, arrival rate x mean output x
       tpot_objective requests would run. There are a quarter more slots than that, at least min_num_seqs. The rate is
       that of the last 32 arrivals. The mean output is all output tokens over the number of ended requests.
    2. The token budget follows the measured step time by TCP's rule, additive increase and multiplicative decrease
       (Jacobson, 1988). A step that takes longer than tpot_objective cuts the budget by an eighth, but not below
       min_num_batched_tokens. A faster step that uses the budget up adds min_num_batched_tokens to it.
    3. There are never more slots than tokens.
    4. While more requests wait than there are slots, both limits are the configured ones.

    Guarantee: that of FCFS. But while as many decodes run as the token budget has tokens, prompts get none.
    """

    def __init__(self, tpot_objective: float = 0.05, min_num_seqs: int = 4, min_num_batched_tokens: int = 64):
        self.tpot_objective = check_positive("tpot_objective", tpot_objective)
        self.min_num_seqs = check_int("min_num_seqs", min_num_seqs, minimum=1)
        self.min_num_batched_tokens = check_int("min_num_batched_tokens", min_num_batched_tokens, minimum=1)
        self._budget = self.min_num_batched_tokens
        self._arrivals: deque[float] = deque(maxlen=32)
        # Tokens of unfinished requests count too, because the requests that end first are the short ones.
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
        wanted = math.inf  # until a request has ended
        if self._num_finished and now > self._arrivals[0]:
            rate = len(self._arrivals) / (now - self._arrivals[0])  # falls while no request comes
            wanted = 1.25 * rate * self._num_output_tokens / self._num_finished * self.tpot_objective
        slots = int(min(maximum.max_num_seqs, tokens, max(wanted, self.min_num_seqs)))
        return maximum if num_waiting > slots else StepLimits(slots, tokens)


POLICIES: dict[str, type[Policy]] = {"fcfs": FCFS, "sjf": SJF, "priority": Priority, "fair": Fair, "adaptive": Adaptive}
