"""minicb/policies.py: the order that each policy states, and the bounds that it guarantees.

No model is needed. Tokens are made up, and a clock that tests set says how long a step took.
"""

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from statistics import mean

import pytest
from conftest import take_events
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import (
    Arrival,
    Settings,
    lengths,
    make_scheduler,
    run,
    settings_strategy,
    step,
    traffic,
    until,
)

from minicb import policies
from minicb.blocks import BlockPool
from minicb.core import EngineCore
from minicb.memory import PREEMPTION_MODES, Memory
from minicb.params import SamplingParams, SchedulingParams
from minicb.plan import StepPlan
from minicb.policies import FCFS, MAX_CLIENTS, POLICIES, SJF, Adaptive, Fair, Policy, Priority, StepLimits
from minicb.request import Request, RequestState
from minicb.scheduler import Scheduler

NAMES = sorted(POLICIES)
MANY = settings(max_examples=3 * settings.default.max_examples)


def make_request(
    request_id: str = "a", num_prompt_tokens: int = 4, max_tokens: int | None = 100, *, arrival: int = 0, **scheduling
) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    request = Request(request_id, list(range(num_prompt_tokens)), params, SchedulingParams(**scheduling))
    request.arrival = arrival
    request.max_num_tokens = num_prompt_tokens + (1000 if max_tokens is None else max_tokens)  # as the scheduler does
    return request


def add(scheduler: Scheduler, *args, **kwargs) -> Request:
    request = make_request(*args, **kwargs)
    scheduler.add(request, scheduler.now)
    return request


class History:
    """Runs arrivals to their end. Keeps the plans, and the requests in the order of their starts."""

    def __init__(self, scheduler: Scheduler, arrivals: list[Arrival], max_steps: int = 20_000):
        self.scheduler, self.plans, self.started = scheduler, list[StepPlan](), list[Request]()
        self.requests = [arrival.request(number) for number, arrival in enumerate(arrivals)]
        due = defaultdict[int, list[Callable[[], object]]](list)
        time = 0
        for arrival, request in zip(arrivals, self.requests, strict=True):
            time += arrival.wait
            due[time].append(lambda request=request: self.add(request))
            if arrival.abort_after is not None:
                due[time + arrival.abort_after].append(lambda request=request: scheduler.abort(request.request_id))
        for now in range(max_steps):
            for action in due[now]:
                action()
            if now >= time and not scheduler.requests:
                return
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps")

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def step(self) -> None:
        plan = self.scheduler.schedule(self.scheduler.now + 0.001)
        self.plans.append(plan)
        self.started += [event.request for event in take_events(self.scheduler) if event.kind == "started"]
        self.planned(plan)
        tokens = [7 * len(self.plans) % 300 for chunk in plan.chunks if chunk.needs_sampling]
        seconds = 0.001 * sum(chunk.length for chunk in plan.chunks)
        self.updated(self.scheduler.update(plan, tokens, self.scheduler.now + seconds))
        self.scheduler.check_invariants()

    def planned(self, plan: StepPlan) -> None: ...
    def updated(self, progressed: list[Request]) -> None: ...

    @property
    def chunks(self) -> list[list[tuple[str, int, int]]]:
        return [[(c.request.request_id, c.start, c.length) for c in plan.chunks] for plan in self.plans]

    def overtakings(self) -> list[tuple[Request, Request]]:
        """All pairs of a request and a later one that started before it."""
        return [
            (late, early) for early, late in itertools.combinations(self.started, 2) if late.arrival < early.arrival
        ]


@st.composite
def busy_traffic(draw) -> tuple[Settings, list[Arrival]]:
    """More than can run at a time."""
    chosen = draw(settings_strategy())
    arrival = st.builds(
        Arrival,
        wait=st.sampled_from([0, 0, 0, 1]),
        num_prompt_tokens=st.integers(1, min(24, chosen.longest - 1)),
        num_shared_tokens=st.sampled_from([0, 5, 100]),
        params=st.builds(SamplingParams, max_tokens=st.integers(1, 20)),
        abort_after=st.none(),
        priority=st.integers(0, 3),
        client=st.sampled_from("aabc"),
        expected_output_len=st.none() | st.integers(1, 20),
    )
    return chosen, draw(st.lists(arrival, min_size=10, max_size=40))


# ---------------------------------------------------------------------------- all policies


def test_policies_are_chosen_by_name_and_need_no_arguments():
    kinds = {name: type(POLICIES[name]()) for name in POLICIES}
    assert kinds == {"fcfs": FCFS, "sjf": SJF, "priority": Priority, "fair": Fair, "adaptive": Adaptive}


SAME_AS_FCFS = {
    "sjf, where age is all": lambda: SJF(ageing=1e6),
    "priority, all equal": Priority,
    "fair, one client": Fair,
    "adaptive, large minimum": lambda: Adaptive(min_num_seqs=10**6, min_num_batched_tokens=10**6),
}


@pytest.mark.parametrize("kind", SAME_AS_FCFS)
@given(traffic())
def test_a_policy_that_sees_no_difference_is_first_come_first_served(kind, chosen_and_arrivals):
    """Chunk by chunk the same plans."""
    chosen, arrivals = chosen_and_arrivals
    arrivals = [replace(arrival, client="a", priority=1) for arrival in arrivals]
    fcfs = History(replace(chosen, make_policy=FCFS).make_scheduler(), arrivals)
    other = History(replace(chosen, make_policy=SAME_AS_FCFS[kind]).make_scheduler(), arrivals)
    assert other.chunks == fcfs.chunks
    assert [r.num_preemptions for r in other.requests] == [r.num_preemptions for r in fcfs.requests]


@pytest.mark.parametrize("make_policy", [FCFS, SJF, Fair, Adaptive])
def test_a_preempted_request_returns_before_a_new_one_starts(make_policy):
    """The new one is shorter, of a client with less service, and one free block would do for it."""
    scheduler = make_scheduler(num_blocks=1 + 3, block_size=2, policy=make_policy())
    first, second = add(scheduler, "first", 1), add(scheduler, "second", 1)
    for _ in until(lambda: second.num_preemptions, max_steps=10):
        step(scheduler)
    add(scheduler, "new", 1, 1, client="new", expected_output_len=1)
    for _ in until(lambda: first.state is RequestState.FINISHED):
        assert "new" not in lengths(step(scheduler))
    assert list(lengths(step(scheduler))) == ["second", "new"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", [2, 5, 16])
def test_decodes_get_a_token_in_every_step_while_prompts_keep_arriving(name, budget):
    """One prompt per step. There are blocks for all, so only a more urgent request stops a decode."""
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=budget, policy=POLICIES[name]())
    for number in range(200):
        add(scheduler, str(number), 1 + number % 19, 1 + number % 7, priority=number % 3, client=f"{number % 5}")
        decodes = {r.request_id for r in scheduler.running if r.num_uncomputed == 1}
        plan = step(scheduler)
        assert decodes - {r.request_id for r in plan.preempted} <= lengths(plan).keys()
        assert sum(lengths(plan).values()) <= budget
        assert not plan.preempted or name == "priority"
    run(scheduler, max_steps=3000)


@pytest.mark.parametrize("limit", [{"max_num_seqs": 2}, {"num_blocks": 1 + 8}, {"max_num_batched_tokens": 6}])
@pytest.mark.parametrize("mode", PREEMPTION_MODES)
@pytest.mark.parametrize("name", NAMES)
def test_no_policy_starves_a_request_though_better_ones_keep_arriving(name, mode, limit):
    """It is the longest, the least urgent, and its client got the most. Nine others always wait, all of new clients.
    They too end once no more arrive."""
    policy = {"sjf": SJF(ageing=0.5), "priority": Priority(ageing=8)}.get(name) or POLICIES[name]()
    scheduler = make_scheduler(policy=policy, num_cpu_blocks=6, preemption_mode=mode, **limit)
    add(scheduler, "before", 12, 15, client="old")
    old = add(scheduler, "old", 20, 8, priority=10, client="old")
    numbers = itertools.count()
    for _ in until(lambda: old.finish_reason, max_steps=300):
        while scheduler.num_waiting < 10:
            add(scheduler, f"new {(number := next(numbers))}", 1 + number % 5, 4, client=str(number))
        step(scheduler)
    assert old.num_output_tokens == 8
    if not isinstance(policy, FCFS):
        assert next(numbers) > 20  # most of them started before it
    run(scheduler)


@pytest.mark.parametrize("name", NAMES)
def test_all_end_whatever_priorities_clients_and_expectations(name):
    """Numbers of 64 bits, clients of any name, one policy for two schedulers."""
    policy = POLICIES[name]()
    schedulers = [make_scheduler(num_blocks=1 + 6, max_num_seqs=3, policy=policy) for _ in range(2)]
    numbers = itertools.cycle([-(2**63), 2**63 - 1, 2**63 - 2, 0, -1])
    expected = itertools.cycle([None, 1, 2**63 - 1])
    for client in ["", "a", "A", "\0", "\ud800", "client" * 1000, "None", "ä", "🙂", "default"]:
        scheduling = {"priority": next(numbers), "client": client, "expected_output_len": next(expected)}
        for scheduler in schedulers:
            add(scheduler, client, 5, 9, **scheduling)
    for _ in until(lambda: not any(scheduler.requests for scheduler in schedulers)):
        for scheduler in schedulers:
            if scheduler.requests:
                step(scheduler)


WRONG = [
    (SJF, "ageing", [0, -1, math.nan, math.inf, "4", None, True, 10**400]),
    (Priority, "ageing", [0, -1, 1.5, math.nan, math.inf, "4", None, True]),
    (Fair, "input_weight", [0, 0.0009, 1000.1, -1, math.nan, math.inf, "1", None]),
    (Fair, "output_weight", [0, 0.0009, 1000.1, -1, math.nan, math.inf, "1", None]),
    (Adaptive, "tpot_objective", [0, -1, math.nan, math.inf, "1", None]),
    (Adaptive, "min_num_seqs", [0, -1, 1.5, math.nan, "1", None]),
    (Adaptive, "min_num_batched_tokens", [0, -1, 1.5, math.nan, "1", None]),
]


@pytest.mark.parametrize(("kind", "field", "value"), [(kind, field, v) for kind, field, vs in WRONG for v in vs])
def test_a_wrong_argument_is_named(kind, field, value):
    with pytest.raises(ValueError, match=f"^{field} must be "):
        kind(**{field: value})


@pytest.mark.parametrize("weight", [0, 0.0009, 1000.1, -1, math.nan, math.inf, "1", None])
def test_a_wrong_weight_of_a_client_is_named(weight):
    with pytest.raises(ValueError, match=r"^client_weights\['b'\] must be in \[0.001, 1000\], not "):
        Fair(client_weights={"a": 1, "b": weight})


def test_the_smallest_and_the_largest_arguments_are_valid():
    assert Fair(0.001, 1000, {"a": 0.001, "b": 1000}).client_weights == {"a": 0.001, "b": 1000}
    assert (SJF(1e-300).ageing, Priority(1).ageing) == (1e-300, 1)
    assert Adaptive(1e-300, 1, 1).limits(MAXIMUM, 0, 0.0) == (1, 1)


# ---------------------------------------------------------------------------- first come, first served


@given(st.permutations(range(12)), st.lists(st.integers(1, 40), min_size=12, max_size=12))
def test_fcfs_is_the_order_of_arrival_whatever_the_lengths(order, sizes):
    requests = [make_request(str(arrival), sizes[arrival], arrival=arrival) for arrival in order]
    assert [r.arrival for r in sorted(requests, key=FCFS().key)] == list(range(12))


class OldestFirst(History):
    """Asserts the guarantee of FCFS in every step."""

    def planned(self, plan):
        oldest = min(self.scheduler.requests.values(), key=lambda request: request.arrival, default=None)
        num_decodes = sum(chunk.is_decode for chunk in plan.chunks)
        starved = isinstance(self.scheduler.policy, Adaptive) and (
            num_decodes >= self.scheduler.limits.max_num_batched_tokens
        )
        assert oldest is None or starved or any(chunk.request is oldest for chunk in plan.chunks)


@pytest.mark.parametrize("make_policy", [FCFS, lambda: Adaptive(0.004, 1, 1)])
@given(st.one_of(traffic(), busy_traffic()))
@MANY
def test_the_oldest_request_is_in_every_plan(make_policy, chosen_and_arrivals):
    """With "adaptive", unless decodes take all tokens of the step."""
    chosen, arrivals = chosen_and_arrivals
    OldestFirst(replace(chosen, make_policy=make_policy).make_scheduler(), arrivals)


# ---------------------------------------------------------------------------- shortest job first


def ended(policy: Policy, num_output_tokens: int, reason: str = "length", client: str = "default") -> None:
    """Tell the policy of a request that is over."""
    request = make_request(client=client)
    policy.added(request)
    policy.started(request)
    for _ in range(num_output_tokens):
        request.append(0)
        policy.generated(request)
    request.has_started, request.finish_reason = True, reason
    policy.finished(request)


@pytest.mark.parametrize(
    ("max_tokens", "scheduling", "work"),
    [
        (20, {}, 30),  # the most that it may have
        (None, {}, 1010),
        (20, {"expected_output_len": 5}, 15),
        (20, {"expected_output_len": 2**63 - 1}, 30),
        (None, {"expected_output_len": 7}, 17),
        (20, {"client": "known"}, 15.5),  # the mean of what ended by itself
        (3, {"client": "known"}, 13),
        (20, {"client": "known", "expected_output_len": 9}, 19),
    ],
)
def test_work_is_the_prompt_and_the_expected_output(max_tokens, scheduling, work):
    policy = SJF()
    for num_output_tokens, reason in [(4, "stop"), (7, "length"), (1000, "abort"), (1000, "error")]:
        ended(policy, num_output_tokens, reason, client="known")
    assert policy.work(make_request("a", 10, max_tokens, **scheduling)) == work


def test_work_gets_less_as_it_is_done():
    policy, request = SJF(), make_request("a", 10, 20)
    request.num_cached_tokens = 8
    assert policy.work(request) == 2 + 20
    request.has_started, request.num_computed_tokens = True, 8
    assert policy.work(request) == 2 + 20
    request.num_computed_tokens = 10
    for num_output_tokens, work in [(1, 1 + 19), (18, 1 + 2), (19, 1 + 1), (20, 1 + 1), (100, 1 + 1)]:
        while request.num_output_tokens < num_output_tokens:
            request.append(0)
        request.num_computed_tokens = request.num_tokens - 1
        assert policy.work(request) == work  # one that is longer than expected may end any time
    request.num_computed_tokens = 0  # preempted: nothing says that its blocks are still cached
    assert policy.work(request) == 110 + 1


def test_sjf_starts_the_shortest_and_preempts_the_longest():
    scheduler = make_scheduler(num_blocks=1 + 9, max_num_seqs=3, max_num_batched_tokens=64, policy=SJF())
    for name, max_tokens in (("long", 28), ("short", 9), ("middle", 12), ("last", 20)):
        add(scheduler, name, 8, max_tokens)
    assert list(lengths(step(scheduler))) == ["short", "middle", "last"]
    for _ in range(4):  # in the first they take the last three blocks
        assert not step(scheduler).preempted
    assert [request.request_id for request in step(scheduler).preempted] == ["last"]


def mean_wait(policy: Policy, requests: list[Request]) -> float:
    """All at once, one after the other: the mean of the work before each."""
    works = [request.max_num_tokens for request in sorted(requests, key=policy.key)]
    return sum(itertools.accumulate(works[:-1], initial=0)) / len(works)


def test_sjf_has_the_least_mean_waiting_time():
    """In the example for which the rule was found; and in a queue of 5,000 with exponential outputs, where fast ageing
    would lose nearly all that it gains."""
    requests = [make_request("a", 1, work - 1, arrival=n) for n, work in enumerate([5, 9, 2, 7])]
    assert mean_wait(SJF(), requests) == mean([0, 2, 2 + 5, 2 + 5 + 7])
    rng = random.Random(0)
    requests = [make_request("a", 64, 1 + round(rng.expovariate(1 / 128)), arrival=n) for n in range(5000)]
    first_come = mean_wait(FCFS(), requests)
    assert mean_wait(SJF(), requests) < 1.02 * mean_wait(SJF(1e-9), requests) < 0.7 * first_come
    assert mean_wait(SJF(1.0), requests) > 0.95 * first_come


class SJFHistory(History):
    """Keeps the work that requests had when they came."""

    def __init__(self, *args):
        self.works: dict[Request, float] = {}
        super().__init__(*args)

    def add(self, request):
        super().add(request)
        self.works[request] = self.scheduler.policy.work(request)


@given(busy_traffic(), st.sampled_from([0.5, 1, 4, 20]))
@MANY
def test_by_sjf_few_later_requests_start_before_one(chosen_and_arrivals, ageing):
    """Fewer than w / ageing."""
    chosen, arrivals = chosen_and_arrivals
    history = SJFHistory(replace(chosen, make_policy=lambda: SJF(ageing)).make_scheduler(), arrivals)
    for request, count in Counter(request for request, _ in history.overtakings()).items():
        assert count < history.works[request] / ageing


@pytest.mark.parametrize(("policy", "num_passed"), [(SJF(), 800), (SJF(1.0), 8), (SJF(4.0), 2), (SJF(3.0), 3)])
def test_the_bound_of_sjf_at_its_boundary(policy, num_passed):
    """10 tokens of work against the least, 2. The last request to pass it comes less than 8 / ageing later."""
    request = make_request("a", 4, 6, arrival=7)
    passes = [policy.key(make_request("b", 1, 1, arrival=8 + n)) < policy.key(request) for n in range(2 * num_passed)]
    assert passes == [True] * (num_passed - 1) + [False] * (num_passed + 1)
    assert num_passed - 1 < policy.work(request) / policy.ageing


def test_sjf_forgets_the_client_that_ended_nothing_for_longest():
    policy = SJF()
    for number in range(2 * MAX_CLIENTS):
        ended(policy, 5, client=str(number))
        ended(policy, 5, client="busy")
        assert len(policy._outputs) <= MAX_CLIENTS
    assert list(policy._outputs) == [*map(str, range(MAX_CLIENTS + 1, 2 * MAX_CLIENTS)), "busy"]
    assert policy._outputs["busy"] == (2 * MAX_CLIENTS, 10 * MAX_CLIENTS)


# ---------------------------------------------------------------------------- priority


def test_priority_starts_the_most_urgent():
    """Priorities of 64 bits are told apart, too."""
    scheduler = make_scheduler(max_num_seqs=1, policy=Priority())
    big = 2**63
    for name, priority in zip("abcdefghij", (1, 0, 2, -7, 0, 1, big - 1, big - 2, -big, -big + 1), strict=True):
        add(scheduler, name, 1, 1, priority=priority)
    order = []
    for _ in until(lambda: not scheduler.requests):
        order += lengths(step(scheduler))
    assert order == list("ijdbeafchg")


def test_an_urgent_request_takes_the_place_of_the_least_urgent():
    """And gives it back before an equal one starts: what was displaced goes on with the tokens that it had."""
    scheduler = make_scheduler(max_num_seqs=2, policy=Priority())
    last, first = add(scheduler, "last", 6, 9, priority=5), add(scheduler, "first", 6, 9, priority=3)
    step(scheduler)
    equal = add(scheduler, "equal", 6, 3, priority=5)
    assert not step(scheduler).preempted
    urgent = add(scheduler, "urgent", 6, 3, priority=4)
    plan = step(scheduler)
    assert plan.preempted == [last]
    assert lengths(plan) == {"first": 1, "urgent": 6}
    for _ in until(lambda: last.state is RequestState.RUNNING):
        assert (last.num_output_tokens, equal.has_started) == (2, False)
        step(scheduler)
    run(scheduler)
    assert [r.num_preemptions for r in (last, first, equal, urgent)] == [1, 0, 0, 0]


def test_an_urgent_prompt_gets_its_tokens_before_a_less_urgent_one():
    scheduler = make_scheduler(max_num_batched_tokens=16, policy=Priority())
    add(scheduler, "long", 300, 1, priority=1)
    assert lengths(step(scheduler)) == {"long": 16}
    add(scheduler, "urgent", 10, 2)
    assert step(scheduler).preempted  # else the long one would take all tokens
    step(scheduler)
    add(scheduler, "equal", 10, 2, priority=1)
    assert "equal" not in lengths(step(scheduler))


@given(busy_traffic(), st.sampled_from([1, 2, 5, 100]))
@MANY
def test_by_priority_a_request_overtakes_only_as_far_as_it_is_more_urgent(chosen_and_arrivals, ageing):
    """By more than n / ageing levels, if it came n arrivals later."""
    chosen, arrivals = chosen_and_arrivals
    history = History(replace(chosen, make_policy=lambda: Priority(ageing)).make_scheduler(), arrivals)
    for request, later in history.overtakings():
        levels = request.scheduling.priority - later.scheduling.priority
        assert levels > (later.arrival - request.arrival) / ageing


@pytest.mark.parametrize(("levels", "num_arrivals"), [(1, 100), (3, 300), (2**40, 100 * 2**40)])
def test_the_bound_of_priority_at_its_boundary(levels, num_arrivals):
    policy, request = Priority(), make_request(priority=levels, arrival=5)
    assert policy.key(make_request(arrival=5 + num_arrivals - 1)) < policy.key(request)
    assert policy.key(request) < policy.key(make_request(arrival=5 + num_arrivals))


# ---------------------------------------------------------------------------- fair


class FairHistory(History):
    """Keeps each client's service, and how far two clients' services drift apart while both wait to start."""

    def __init__(self, *args):
        self.service = Counter[str]()
        self.ran: list[list[Request]] = []  # the requests that ran in each step
        self.gaps = defaultdict[tuple[str, str], list[list[float]]](list)  # of each time when both waited
        self.new_starters = defaultdict[tuple[str, str], set[str]](set)
        self.num_seen = 0
        super().__init__(*args)

    def charge(self, request: Request, service: float) -> None:
        client = request.scheduling.client
        self.service[client] += service / self.scheduler.policy.client_weights.get(client, 1)

    def planned(self, plan):
        self.ran.append(list(self.scheduler.running))
        self.starters = set()
        for request in self.started[self.num_seen :]:
            num_tokens = request.num_prompt_tokens - request.num_cached_tokens
            self.charge(request, self.scheduler.policy.input_weight * num_tokens)
            self.starters.add(request.scheduling.client)
        self.num_seen = len(self.started)
        self.waiting = {r.scheduling.client for r in self.scheduler.requests.values() if not r.has_started}

    def updated(self, progressed):
        for request in progressed:
            self.charge(request, self.scheduler.policy.output_weight)
        for pair in itertools.combinations("abc", 2):
            if not self.waiting.issuperset(pair):
                self.new_starters.pop(pair, None)
                continue
            if pair not in self.new_starters:
                self.gaps[pair].append([])
            self.new_starters[pair] |= self.starters
            if self.new_starters[pair].issuperset(pair):
                self.gaps[pair][-1].append(self.service[pair[0]] - self.service[pair[1]])

    @property
    def most_tokens(self) -> int:
        return max(sum(request.num_tokens for request in requests) for requests in self.ran)

    def largest_gap(self, pair: tuple[str, str]) -> float:
        return max((max(gaps) - min(gaps) for gaps in self.gaps[pair] if gaps), default=0.0)


@given(
    busy_traffic(),
    st.sampled_from([(1, 2), (1, 1), (0.5, 3), (5, 1)]),
    st.sampled_from([{}, {"a": 3.0}, {"b": 0.25, "c": 2}]),
)
@MANY
def test_clients_that_wait_get_the_same_service(chosen_and_arrivals, token_weights, client_weights):
    """Within 2 U; with weights, U of each by its weight."""
    chosen, arrivals = chosen_and_arrivals
    make_policy = lambda: Fair(*token_weights, client_weights)
    history = FairHistory(replace(chosen, make_policy=make_policy).make_scheduler(), arrivals)
    unit = max(token_weights) * history.most_tokens
    for pair in itertools.combinations("abc", 2):
        assert history.largest_gap(pair) <= sum(unit / client_weights.get(client, 1) for client in pair) + 1e-6


@given(busy_traffic())
def test_within_a_client_fair_starts_in_the_order_of_arrival(chosen_and_arrivals):
    chosen, arrivals = chosen_and_arrivals
    history = History(replace(chosen, make_policy=Fair).make_scheduler(), arrivals)
    assert all(one.scheduling.client != other.scheduling.client for one, other in history.overtakings())


def shares(scheduler: Scheduler, num_steps: int) -> Counter[str]:
    """Computed tokens of each client in this many steps."""
    counts = Counter[str]()
    for _ in range(num_steps):
        for chunk in step(scheduler).chunks:
            counts[chunk.request.scheduling.client] += chunk.length
    return counts


def test_fair_gives_a_client_of_few_requests_as_much_as_one_of_many():
    scheduler = make_scheduler(max_num_seqs=4, policy=Fair())
    for number in range(100):
        add(scheduler, f"many {number}", 8, 8, client="many")
    for number in range(40):
        add(scheduler, f"few {number}", 8, 8, client="few")
    counts = shares(scheduler, 100)
    assert 0.9 < counts["few"] / counts["many"] < 1.1


def test_weights_of_clients_are_shares():
    scheduler = make_scheduler(max_num_seqs=4, policy=Fair(client_weights={"gold": 3}))
    for number in range(120):
        for client in ("gold", "iron"):
            add(scheduler, f"{client} {number}", 8, 8, client=client)
    counts = shares(scheduler, 150)
    assert 2.7 < counts["gold"] / counts["iron"] < 3.3


@pytest.mark.parametrize("stays", [False, True])
def test_a_client_that_comes_back_cannot_claim_what_it_did_not_use(stays):
    """It was away, or one request of it ran while none waited. From when it is back both get the same."""
    policy = Fair()
    scheduler = make_scheduler(max_num_seqs=4, policy=policy)
    add(scheduler, "first", 8, 200 if stays else 8, client="away")
    for number in range(150):
        add(scheduler, f"busy {number}", 8, 8, client="busy")
    shares(scheduler, 100)
    assert policy.counters["away"] == 8 + 2 * (100 if stays else 8)
    assert policy.counters["busy"] > 500
    for number in range(60):
        add(scheduler, f"back {number}", 8, 8, client="away")
    counts = shares(scheduler, 50)
    assert 0.8 < counts["away"] / counts["busy"] < 1.25


def start(policy: Fair, client: str, num_prompt_tokens: int) -> Request:
    request = make_request("a", num_prompt_tokens, client=client)
    policy.added(request)
    policy.started(request)
    request.has_started = True
    return request


def test_the_level_rises_with_all_service_and_to_the_counter_of_each_start():
    policy = Fair(client_weights={"b": 2})
    start(policy, "a", 12)  # the level is 12
    slow = start(policy, "b", 8)  # begins at 12, and gets 8 / 2; the level is 12 + 4 / 2
    policy.generated(slow)  # 1 more each, the level 14.5
    assert policy.counters == {"a": 12, "b": 12 + 4 + 1}
    start(policy, "c", 30)  # begins at the level, and raises it by a third of 30
    assert policy.counters["c"] == 14.5 + 30
    waiting = [make_request(client=client) for client in "da"]
    policy.added(waiting[0])  # the level is 24.5
    start(policy, "c", 4)  # the level is the counter of c, 44.5, and a fourth of 4
    policy.added(waiting[1])
    assert (policy.counters["d"], policy.counters["a"]) == (24.5, 45.5)
    policy.started(waiting[0])  # one that is behind: the level doesn't fall
    policy.added(make_request(client="e"))
    assert policy.counters["e"] == 45.5 + 1


def test_a_client_that_leaves_no_longer_counts():
    policy = Fair()
    requests = [start(policy, client, 1) for client in "aab"]
    for request in requests:
        policy.finished(request)
    waiting = make_request(client="c")
    policy.added(waiting)
    policy.finished(waiting)  # aborted before it started
    level = policy._level
    start(policy, "d", 10)
    assert policy._level == level + 10


def test_fair_preempts_the_last_request_of_the_client_with_the_most_service():
    """Though that one came before another client's."""
    scheduler = make_scheduler(num_blocks=1 + 12, block_size=2, policy=Fair())
    for name, num_prompt_tokens in (("a1", 4), ("a2", 4), ("b1", 6)):
        add(scheduler, name, num_prompt_tokens, 30, client=name[0])
    plan = StepPlan()
    for _ in until(lambda: plan.preempted, max_steps=20):  # noqa: B023
        plan = step(scheduler)
    assert [request.request_id for request in plan.preempted] == ["a2"]
    assert list(lengths(plan)) == ["b1", "a1"]


def test_fair_charges_what_is_computed_and_once():
    """Not what the prefix cache had, and not again after a step that failed."""
    policy = Fair()
    scheduler = make_scheduler(policy=policy, enable_prefix_caching=True)
    add(scheduler, "1", 9, 1, client="a")
    scheduler.cancel(scheduler.schedule())
    step(scheduler)
    assert policy.counters == {"a": 9 + 2}
    add(scheduler, "2", 9, 1, client="a")
    step(scheduler)
    assert policy.counters == {"a": 9 + 2 + 1 + 2}


@given(traffic())
@MANY
def test_what_fair_forgets_makes_no_difference(chosen_and_arrivals):
    """It forgets clients at once, or none."""
    chosen, arrivals = chosen_and_arrivals
    arrivals = [replace(arrival, client=arrival.client + str(number % 3)) for number, arrival in enumerate(arrivals)]
    histories = []
    for most in (MAX_CLIENTS, -1000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(policies, "MAX_CLIENTS", most)
            histories.append(History(replace(chosen, make_policy=Fair).make_scheduler(), arrivals))
    assert histories[0].chunks == histories[1].chunks


def test_fair_forgets_clients_that_are_gone_but_none_that_is_there(monkeypatch):
    monkeypatch.setattr(policies, "MAX_CLIENTS", 50)
    policy = Fair()
    scheduler = make_scheduler(num_blocks=1000, policy=policy)
    stays = [add(scheduler, f"stays {number}", 1, 900, client="stays") for number in range(9)]  # 8 run
    for number in range(300):
        add(scheduler, str(number), 1, 1, client=str(number))
        step(scheduler)
        assert len(policy.counters) <= 50 + 2 * len(scheduler.requests) + 2
    assert stays[0].num_output_tokens == 300
    for request in stays:
        scheduler.abort(request.request_id)
    run(scheduler)
    assert not policy._num_live
    assert not policy._num_new


# ---------------------------------------------------------------------------- adaptive


MAXIMUM = StepLimits(256, 2048)


def learnt(policy: Adaptive, *, rate=None, num_output_tokens=None, budget=None) -> Adaptive:
    """Tell it of arrivals at that rate, the last at 100 seconds, of a request that ended, and of fast steps."""
    for number in range(40 if rate else 0):
        request = make_request()
        request.arrival_time = 100 - (39 - number) / rate
        policy.added(request)
    if num_output_tokens:
        for _ in range(num_output_tokens):
            policy.generated(make_request())
        policy.finished(make_request())
    while budget and policy.limits(MAXIMUM, 0, 0.0).max_num_batched_tokens < budget:
        policy.stepped(2048, 0.0)
    return policy


def test_adaptive_has_as_many_slots_as_requests_would_run():
    """32 arrivals in 31 / 2 seconds, 100 tokens each, 0.05 seconds a token: 10 and a quarter more."""
    policy = learnt(Adaptive(), rate=2, num_output_tokens=100, budget=2048)
    assert policy.limits(MAXIMUM, 0, 100.0) == (int(1.25 * 32 / 15.5 * 100 * 0.05), 2048)
    assert policy.limits(MAXIMUM, 0, 120.0)[0] == int(1.25 * 32 / 35.5 * 100 * 0.05)  # nothing came meanwhile
    assert policy.limits(MAXIMUM, 0, 1000.0)[0] == 4
    for rate, slots in ((0.1, 4), (1e6, 256)):
        assert learnt(Adaptive(), rate=rate, num_output_tokens=100, budget=2048).limits(MAXIMUM, 0, 100.0)[0] == slots


def test_adaptive_counts_tokens_of_all_requests_for_those_that_ended():
    """Those that end first are short: of two requests one has ended with 1 token, the other goes on with 199."""
    policy = learnt(Adaptive(), rate=2, num_output_tokens=1, budget=2048)
    for _ in range(199):
        policy.generated(make_request("b"))
    assert policy.limits(MAXIMUM, 0, 100.0)[0] == int(1.25 * 32 / 15.5 * 200 * 0.05)


def test_adaptive_has_all_slots_until_a_request_has_ended():
    policy = learnt(Adaptive(), rate=0.01)
    assert policy.limits(MAXIMUM, 0, 100.0) == (64, 64)
    ended(policy, 10)
    assert policy.limits(MAXIMUM, 0, 100.0) == (4, 64)


def test_the_token_budget_of_adaptive():
    """Up by the minimum where a full step took no longer than the objective, down by an eighth where a step did."""
    policy = Adaptive(tpot_objective=0.05, min_num_seqs=1, min_num_batched_tokens=30)
    budgets = []
    for num_tokens, seconds in [
        (29, 0.01), (30, 0.05), (60, 0.01), (200, 0.01), (120, 0.0501), (104, 0.06), (105, 0.01), (1, 0.06), *[(1, 9.0)] * 9,
    ]:  # fmt: skip
        policy.stepped(num_tokens, seconds)
        budgets.append(policy.limits(MAXIMUM, 0, 0.0).max_num_batched_tokens)
    assert budgets == [30, 60, 90, 120, 105, 91, 121, 105, 91, 79, 69, 60, 52, 45, 39, 34, 30]
    assert learnt(policy, budget=2048).limits(MAXIMUM, 0, 0.0)[1] == 2048


def test_adaptive_never_has_more_slots_than_tokens():
    policy = learnt(Adaptive(min_num_batched_tokens=5), rate=1e6, num_output_tokens=100)
    assert policy.limits(MAXIMUM, 0, 100.0) == (5, 5)


def test_adaptive_takes_the_maximum_when_more_wait_than_there_are_slots():
    policy = learnt(Adaptive(), rate=0.01, num_output_tokens=1)
    assert policy.limits(MAXIMUM, 4, 100.0) == (4, 64)
    assert policy.limits(MAXIMUM, 5, 100.0) == MAXIMUM


finite = st.floats(0, 1e9)


@given(
    maximum=st.builds(StepLimits, st.integers(1, 300), st.integers(1, 3000)),
    arguments=st.tuples(st.floats(1e-6, 1e6), st.integers(1, 500), st.integers(1, 500)),
    arrival_times=st.lists(finite, min_size=1, max_size=40),
    outputs=st.lists(st.integers(0, 1000), max_size=5),
    steps=st.lists(st.tuples(st.integers(0, 3000), st.floats(0, 1e3)), max_size=60),
    num_waiting=st.integers(0, 1000),
    now=finite,
)
@MANY
def test_limits_of_adaptive_are_in_range_whatever_happened(
    maximum, arguments, arrival_times, outputs, steps, num_waiting, now
):
    """The configured maximum wins over the policy's minimum."""
    maximum = StepLimits(min(maximum), maximum.max_num_batched_tokens)  # as the scheduler has it
    policy = Adaptive(*arguments)
    for arrival_time in arrival_times:
        request = make_request()
        request.arrival_time = arrival_time
        policy.added(request)
    for number in outputs:
        ended(policy, number)
    for step_taken in steps:
        policy.stepped(*step_taken)
    limits = policy.limits(maximum, num_waiting, now)
    assert all(type(limit) is int for limit in limits)
    assert limits.max_num_seqs <= limits.max_num_batched_tokens
    for limit, highest, lowest in zip(limits, maximum, arguments[1:], strict=True):
        assert min(lowest, highest) <= limit <= highest or limit == limits.max_num_batched_tokens


class ToyDevice:
    """A runner and its clock: a step takes 5 ms, and 0.1 ms for each token."""

    def __init__(self) -> None:
        self.now = 0.0
        self.durations: list[float] = []

    def clock(self) -> float:
        return self.now

    def execute(self, plan: StepPlan) -> list[int | None]:
        self.durations.append(0.005 + 0.0001 * sum(chunk.length for chunk in plan.chunks))
        self.now += self.durations[-1]
        return [0 for chunk in plan.chunks if chunk.needs_sampling]


def serve(policy: Policy, gap: float, count: int = 150) -> tuple[ToyDevice, list[int], list[int]]:
    """Prompts of 300 to 1,100 tokens, one every `gap` seconds. Returns also how many waited before each step, and
    how many ran in it."""
    device = ToyDevice()
    scheduler = make_scheduler(
        num_blocks=20_000, max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=4000, policy=policy
    )
    core, waited, ran = EngineCore(scheduler, device, device.clock), list[int](), list[int]()
    due = [(number * gap, make_request(str(number), 300 + 100 * number % 900, 40)) for number in range(count)]
    for _ in until(lambda: not due and not core.has_unfinished_requests(), max_steps=20_000):
        while due and due[0][0] <= device.now:
            time, request = due.pop(0)
            core.add(request, time)
        if core.has_unfinished_requests():
            waited.append(scheduler.num_waiting)
            core.step()
            ran.append(len(scheduler.running))
        else:
            device.now = due[0][0]
    return device, waited, ran


def test_adaptive_stays_near_the_objective_while_requests_come_slowly():
    """A step takes longer than the objective by one increase of the budget at most. FCFS puts whole prompts between
    the tokens of others."""
    device, waited, ran = serve(Adaptive(tpot_objective=0.03), gap=0.5)
    full = [seconds for seconds in device.durations[20:] if seconds > 0.015]  # with a chunk of a prompt
    assert max(waited) <= 4
    assert max(ran) <= 4
    assert max(full) <= 0.03 + 64 * 0.0001
    assert 0.9 * 0.03 < mean(full) < 1.1 * 0.03
    device, _, _ = serve(FCFS(), gap=0.5)
    assert max(device.durations) > 0.08


def test_adaptive_has_large_steps_when_requests_come_fast():
    """As many tokens in the same time as with the configured limits, within a few percent."""
    ended_at = {}
    for make_policy in (FCFS, Adaptive):
        device, waited, ran = serve(make_policy(), gap=0.001)
        ended_at[make_policy] = device.now
        assert max(waited) > 64
        assert max(ran) == 64
        assert max(device.durations) > 0.2
    assert ended_at[Adaptive] < 1.1 * ended_at[FCFS]


def test_a_policy_cannot_raise_the_limits():
    class Greedy(FCFS):
        def limits(self, maximum, num_waiting, now):
            return StepLimits(1000, 3)

    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 16}
    scheduler = Scheduler(Memory(BlockPool(9, 4)), Greedy(), **sizes)
    scheduler.schedule()
    assert scheduler.limits == StepLimits(2, 3)
