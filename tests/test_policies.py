"""minicb/policies.py: the order that each policy states, what it guarantees, and in which bounds.

No model is needed: made-up tokens on schedules by the thousand, and a clock that says how long a step took.
"""

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from statistics import mean

import pytest
from conftest import take_events
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import InterruptEverywhere
from test_scheduler import (
    Arrival,
    Settings,
    ToyModel,
    alone,
    assert_nothing_is_held,
    checked_step,
    lengths,
    make_scheduler,
    run,
    settings_strategy,
    step,
    traffic,
    until,
)

from minicb import SamplingParams
from minicb.core import EngineCore
from minicb.memory import PREEMPTION_MODES
from minicb.plan import StepPlan
from minicb.policies import FCFS, POLICIES, SJF, Adaptive, Fair, Limits, Policy, Priority
from minicb.request import Request, RequestState
from minicb.scheduler import Scheduler

NAMES = sorted(POLICIES)
MANY = settings(max_examples=5 * settings.default.max_examples)


def make_request(request_id: str, num_prompt_tokens: int = 4, max_tokens: int | None = 100, **kwargs) -> Request:
    return Request(request_id, range(num_prompt_tokens), SamplingParams(max_tokens=max_tokens), **kwargs)


def add(scheduler: Scheduler, request_id: str, num_prompt_tokens: int = 4, max_tokens: int | None = 100, **kwargs):
    request = make_request(request_id, num_prompt_tokens, max_tokens, **kwargs)
    request.arrival_time = scheduler.now
    scheduler.add(request)
    return request


def ids(requests) -> str:
    return "".join(request.request_id for request in requests)


class History:
    """Runs arrivals to their end, and remembers the order of starts and who waited meanwhile."""

    def __init__(self, scheduler: Scheduler, arrivals: list[Arrival], max_steps: int = 20_000):
        self.scheduler, self.plans, self.started = scheduler, list[StepPlan](), list[Request]()
        self.requests = [arrival.request(number) for number, arrival in enumerate(arrivals)]
        self.works: dict[Request, float] = {}
        due = defaultdict(list)
        time = 0
        for arrival, request in zip(arrivals, self.requests, strict=True):
            time += arrival.wait
            due[time].append((scheduler.add, request))
            if arrival.abort_after is not None:
                due[time + arrival.abort_after].append((lambda r: scheduler.abort(r.request_id), request))
        for now in range(max_steps):
            for action, request in due[now]:
                action(request)
                if isinstance(scheduler.policy, SJF) and request not in self.works:
                    self.works[request] = scheduler.policy.work(request)
            if now >= time and not scheduler.requests:
                return
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps")

    def step(self) -> None:
        plan = self.scheduler.schedule(self.scheduler.now + 0.001)
        self.plans.append(plan)
        self.started += [event.request for event in take_events(self.scheduler) if event.kind == "started"]
        self.scheduler.update(plan, [7 * len(self.plans) % 300 for chunk in plan.chunks if chunk.needs_sampling])
        self.scheduler.check_invariants()

    @property
    def chunks(self) -> list[list[tuple[str, int, int]]]:
        return [[(c.request.request_id, c.start, c.length) for c in plan.chunks] for plan in self.plans]


def without_long(chosen: Settings, make_policy: Callable[[], Policy]) -> Settings:
    return replace(chosen, make_policy=make_policy, long_prefill_token_threshold=0)


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


# ---------------------------------------------------------------------------- what all policies share


def test_policies_are_chosen_by_name_and_need_no_arguments():
    assert {name: type(POLICIES[name]()) for name in POLICIES} == {
        "fcfs": FCFS,
        "sjf": SJF,
        "priority": Priority,
        "fair": Fair,
        "adaptive": Adaptive,
    }


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
    fcfs = History(without_long(chosen, FCFS).make_scheduler(), arrivals)
    other = History(without_long(chosen, SAME_AS_FCFS[kind]).make_scheduler(), arrivals)
    assert other.chunks == fcfs.chunks
    assert [r.num_preemptions for r in other.requests] == [r.num_preemptions for r in fcfs.requests]


# ---------------------------------------------------------------------------- first come, first served


@given(st.permutations(range(12)), st.lists(st.integers(1, 40), min_size=12, max_size=12))
def test_fcfs_is_the_order_of_arrival_whatever_the_lengths(order, lengths):
    requests = [make_request(str(arrival), lengths[arrival]) for arrival in order]
    for arrival, request in zip(order, requests, strict=True):
        request.arrival = arrival
    assert [r.arrival for r in sorted(requests, key=FCFS().key)] == list(range(12))


def test_the_key_of_fcfs_stays_while_a_request_moves():
    request, later = make_request("a"), make_request("b")
    request.arrival, later.arrival = 5, 6
    key = FCFS().key(request)
    request.token_ids += [1, 2, 3]
    request.num_computed_tokens = 5
    request.num_preemptions = 2
    assert FCFS().key(request) == key < FCFS().key(later)


@pytest.mark.parametrize("make_policy", [FCFS, SJF, Fair, Adaptive])
def test_a_preempted_request_keeps_its_place(make_policy):
    """It came second and was thrown out; what came later must not go first, though one free block would do
    for it, and though its client was served less."""
    scheduler = make_scheduler(num_blocks=1 + 3, block_size=2, policy=make_policy())
    first, second = add(scheduler, "first", 1), add(scheduler, "second", 1)
    for _ in until(lambda: second.num_preemptions, max_steps=10):
        step(scheduler)
    add(scheduler, "newer", 1, 1, client="new", expected_output_len=1)
    for _ in until(lambda: first.state is RequestState.FINISHED):
        assert "newer" not in lengths(step(scheduler))
    assert list(lengths(step(scheduler))) == ["second", "newer"]


def test_fcfs_serves_the_oldest_in_every_step_whatever_comes_later():
    """The guarantee in its docstring: 100 steps, a newcomer in each, too few blocks and tokens for all."""
    scheduler = make_scheduler(num_blocks=30, block_size=2, max_num_seqs=4, max_num_batched_tokens=6, max_model_len=64)
    for number in range(100):
        add(scheduler, str(number), 1 + number % 17, 1 + number % 23)
        oldest = min(scheduler.requests.values(), key=lambda request: request.arrival)
        assert oldest.request_id in lengths(step(scheduler))


# ---------------------------------------------------------------------------- shortest job first


def test_sjf_orders_by_the_work_that_is_left():
    """Of the prompt, and of the output that the caller expects; else of what the client's came to; else of what it may have."""
    policy = SJF()

    def work(num_prompt_tokens, max_tokens, **kwargs):
        request = make_request("a", num_prompt_tokens, max_tokens, **kwargs)
        request.max_num_tokens = (
            60 if max_tokens is None else num_prompt_tokens + max_tokens
        )  # as the scheduler sets it
        return policy.work(request)

    assert work(10, 20) == 30
    assert work(10, 20, expected_output_len=5) == 15
    assert work(10, 20, expected_output_len=10**30) == 30  # no more than it may have
    assert work(10, None, expected_output_len=7) == 17
    assert work(10, None) == 60
    for number, (num_output_tokens, reason) in enumerate(
        [(4, "stop"), (7, "length"), (1000, "abort"), (1000, "error")]
    ):
        ended = make_request(str(number), client="known")
        ended.token_ids += [0] * num_output_tokens
        ended.finish_reason = reason
        policy.finished(ended)
    assert work(10, 20, client="known") == 15.5
    assert work(10, 3, client="known") == 13
    assert work(10, 20, client="known", expected_output_len=9) == 19
    assert work(10, 20, client="other") == 30

    request = make_request("a", 10, 20)
    request.max_num_tokens = 30
    request.num_computed_tokens = 6
    assert policy.work(request) == 24
    request.num_computed_tokens = 10
    request.token_ids += [0] * 5
    assert policy.work(request) == 20
    request.token_ids += [0] * 100
    request.num_computed_tokens = request.num_tokens - 1
    assert policy.work(request) == 2  # longer than was expected: it may end any time


def test_sjf_starts_the_shortest_and_preempts_the_longest():
    scheduler = make_scheduler(num_blocks=1 + 9, max_num_seqs=3, max_num_batched_tokens=64, policy=SJF())
    for name, max_tokens in (("long", 28), ("short", 9), ("middle", 12), ("last", 20)):
        add(scheduler, name, 8, max_tokens)
    assert list(lengths(step(scheduler))) == ["short", "middle", "last"]
    for _ in range(4):  # in the first they take the last three blocks
        assert not step(scheduler).preempted
    assert [request.request_id for request in step(scheduler).preempted] == ["last"]


def test_sjf_has_the_smaller_mean_latency():
    """Twelve at once, one after the other: the example for which the rule was found."""
    latencies = {}
    for policy in (FCFS(), SJF(ageing=0.01)):
        scheduler = make_scheduler(max_num_seqs=1, policy=policy)
        requests = [add(scheduler, str(n), 4, 1 + 7 * n % 12) for n in range(12)]
        ended: dict[Request, int] = {}
        for now in range(100):
            step(scheduler)
            ended |= {request: now + 1 for request in requests if request.finish_reason and request not in ended}
        latencies[type(policy)] = mean(ended[request] for request in requests)
    assert latencies[SJF] == mean((n + 1) * (n + 2) / 2 for n in range(12))  # 1 step, 1 + 2, 1 + 2 + 3 …
    assert latencies[SJF] < 0.85 * latencies[FCFS]


@given(busy_traffic(), st.sampled_from([0.5, 1, 4, 20]))
@MANY
def test_by_sjf_few_pass_a_request_that_was_there_before(chosen_and_arrivals, ageing):
    """The guarantee in its docstring; work as it was when the request came."""
    chosen, arrivals = chosen_and_arrivals
    history = History(without_long(chosen, lambda: SJF(ageing)).make_scheduler(), arrivals)
    places = {request: place for place, request in enumerate(history.started)}
    for request in history.started:
        passed = sum(places[later] < places[request] for later in history.started if later.arrival > request.arrival)
        assert passed <= history.works[request] / ageing


def test_by_sjf_a_long_job_runs_though_short_ones_keep_arriving():
    scheduler = make_scheduler(max_num_seqs=1, policy=SJF(ageing=2))
    add(scheduler, "running", 1, 2)
    step(scheduler)
    long, later = add(scheduler, "long", 4, 46), 0  # 50 tokens of work
    for number in until(lambda: long.has_started, max_steps=60):
        later += bool(number)
        add(scheduler, str(number), 1, 1)
        step(scheduler)
    assert 20 <= later <= 25  # it waits for short ones, but for no more than that


# ---------------------------------------------------------------------------- priority


def test_priority_starts_the_most_urgent():
    scheduler = make_scheduler(max_num_seqs=1, policy=Priority())
    for name, priority in (("a", 1), ("b", 0), ("c", 2), ("d", -7), ("e", 0), ("f", 1)):
        add(scheduler, name, 1, 1, priority=priority)
    order = []
    for _ in until(lambda: not scheduler.requests):
        order += lengths(step(scheduler))
    assert order == list("dbeafc")


def test_an_urgent_request_takes_the_place_of_the_least_urgent():
    """And gives it back: what was displaced goes on with the tokens it had."""
    scheduler, model = make_scheduler(max_num_seqs=2, policy=Priority()), ToyModel(4)
    last, first = add(scheduler, "last", 6, 9, priority=5), add(scheduler, "first", 6, 9, priority=3)
    checked_step(scheduler, model)
    checked_step(scheduler, model)
    equal = add(scheduler, "equal", 6, 3, priority=5)  # displaces nobody
    assert not checked_step(scheduler, model).preempted
    urgent = add(scheduler, "urgent", 6, 3, priority=4)
    assert checked_step(scheduler, model).preempted == [last]
    assert list(lengths(checked_step(scheduler, model))) == ["first", "urgent"]
    for _ in until(lambda: last.state is RequestState.RUNNING):
        assert not equal.has_started
        checked_step(scheduler, model)
    for _ in until(lambda: not scheduler.requests):
        checked_step(scheduler, model)
    for request in (last, first, equal, urgent):
        assert request.output_token_ids == alone(request, 1000)[0]
    assert [r.num_preemptions for r in (last, first, equal, urgent)] == [1, 0, 0, 0]


def test_an_urgent_request_displaces_as_many_as_it_needs_blocks():
    scheduler = make_scheduler(num_blocks=1 + 9, max_num_batched_tokens=64, policy=Priority())
    victims = [add(scheduler, f"victim {number}", 6, 20, priority=1 + number) for number in range(4)]
    step(scheduler)
    add(scheduler, "urgent", 17, 3)  # 5 blocks, one is free
    plan = step(scheduler)
    assert plan.preempted == victims[:1:-1]
    assert lengths(step(scheduler))["urgent"] == 17
    run(scheduler)


def test_an_urgent_request_displaces_nobody_where_that_would_not_help():
    """The one before it needs all that there is, blocks or tokens."""
    scheduler = make_scheduler(num_blocks=1 + 9, max_num_batched_tokens=64, policy=Priority())
    add(scheduler, "first", 20, 8)
    victim = add(scheduler, "victim", 3, 6, priority=2)
    step(scheduler)
    urgent = add(scheduler, "urgent", 20, 3, priority=1)
    for _ in until(lambda: urgent.has_started):
        step(scheduler)
    assert (victim.num_output_tokens, victim.num_preemptions) == (6, 0)

    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=8, policy=Priority())
    victim = add(scheduler, "victim", 4, 1000, priority=2)
    step(scheduler)
    first = add(scheduler, "first", 80, 5)
    step(scheduler)
    urgent = add(scheduler, "urgent", 20, 3, priority=1)
    for _ in until(lambda: first.num_pending <= 8):
        assert not step(scheduler).preempted
    assert step(scheduler).preempted == [victim]


def test_what_a_long_prefill_ahead_may_not_take_is_there_for_an_urgent_request():
    """The prompt ahead is longer than a step, but gets 4 tokens of it only."""
    scheduler = make_scheduler(
        num_blocks=500, max_num_seqs=2, policy=Priority(), long_prefill_token_threshold=4, max_num_batched_tokens=16
    )
    add(scheduler, "ahead", 400, 2)
    victim = add(scheduler, "victim", 4, 500, priority=9)
    step(scheduler)
    add(scheduler, "urgent", 4, 2, priority=1)
    assert step(scheduler).preempted == [victim]
    assert lengths(step(scheduler)) == {"ahead": 12, "urgent": 4}


def test_blocks_that_are_shared_count_once_when_an_urgent_request_wants_room():
    """With a request ahead it shares its beginning, so it needs one block, which the one behind has."""
    scheduler = make_scheduler(
        num_blocks=1 + 12, max_num_batched_tokens=64, policy=Priority(), enable_prefix_caching=True
    )
    beginning = list(range(24))
    scheduler.add(Request("ahead", [*beginning, 100], SamplingParams(max_tokens=4)))
    step(scheduler)
    behind = Request("behind", range(200, 217), SamplingParams(max_tokens=4), priority=9)
    scheduler.add(behind)
    step(scheduler)
    urgent = Request("urgent", [*beginning, 101, 102, 103, 104], SamplingParams(max_tokens=1), priority=1)
    scheduler.add(urgent)
    assert step(scheduler).preempted == [behind]
    assert lengths(step(scheduler)) == {"ahead": 1, "urgent": 4}

    # Two behind share theirs, so that neither alone would free it.
    scheduler = make_scheduler(
        num_blocks=1 + 12, max_num_batched_tokens=64, policy=Priority(), enable_prefix_caching=True
    )
    add(scheduler, "ahead", 1, 60)
    step(scheduler)
    behind = []
    for last in (100, 101):
        behind.append(Request(str(last), [*beginning, last], SamplingParams(max_tokens=30), priority=9))
        scheduler.add(behind[-1])
        step(scheduler)
    scheduler.add(Request("urgent", range(400, 436), SamplingParams(max_tokens=3), priority=1))
    assert step(scheduler).preempted == behind[::-1]
    assert lengths(step(scheduler)) == {"ahead": 1, "urgent": 36}


def test_an_urgent_request_gets_the_tokens_that_a_less_urgent_long_prompt_would_take():
    """It starts in the very next step; the long one gets what is left."""
    scheduler = make_scheduler(max_num_batched_tokens=16, policy=Priority())
    add(scheduler, "long", 300, 1, priority=1)
    assert lengths(step(scheduler)) == {"long": 16}
    add(scheduler, "urgent", 10, 2)
    assert lengths(step(scheduler)) == {"urgent": 10, "long": 6}
    assert lengths(step(scheduler)) == {"urgent": 1, "long": 15}
    add(scheduler, "equal", 10, 2, priority=1)
    assert lengths(step(scheduler)) == {"long": 16}


def test_an_urgent_long_prefill_does_not_wait_for_a_less_urgent_one():
    """Which short ones of a priority in between keep from getting ahead."""
    scheduler = make_scheduler(
        num_blocks=500, max_num_batched_tokens=16, policy=Priority(), long_prefill_token_threshold=4
    )
    add(scheduler, "last", 400, 2, priority=1000)
    step(scheduler)
    first = add(scheduler, "first", 400, 2, priority=0)
    for number in until(lambda: first.num_output_tokens, max_steps=400 // 4 + 1):
        for name in "abcd":
            add(scheduler, f"{name}{number}", 4, 1, priority=1)
        step(scheduler)


@given(busy_traffic(), st.sampled_from([1, 2, 5, 100]))
@MANY
def test_by_priority_a_request_is_passed_only_as_far_as_the_priorities_differ(chosen_and_arrivals, ageing):
    """The guarantee in its docstring, also of those that are displaced: of two that run, the one before stays."""
    chosen, arrivals = chosen_and_arrivals
    history = History(without_long(chosen, lambda: Priority(ageing)).make_scheduler(), arrivals)
    places = {request: place for place, request in enumerate(history.started)}
    for request in history.started:
        for later in history.started:
            between = later.arrival - request.arrival
            if between > 0 and places[later] < places[request]:
                assert (request.priority - later.priority) * ageing > between


@pytest.mark.parametrize("limit", [{"max_num_seqs": 2}, {"num_blocks": 1 + 4}, {"max_num_batched_tokens": 2}])
def test_by_priority_the_least_urgent_runs_though_urgent_ones_keep_arriving(limit):
    """Two in every step, which is more than can be served. 40 of them pass it or displace it, no more."""
    scheduler = make_scheduler(policy=Priority(ageing=4), **limit)
    last = add(scheduler, "last", 4, 9, priority=10)
    num_later = 0
    for number in until(lambda: last.finish_reason, max_steps=200):
        for name in "ab":
            add(scheduler, f"{name}{number}", 4, 3)
            num_later += last.num_output_tokens < 9
        assert not step(scheduler).preempted or last.num_preemptions <= 40
    assert last.num_output_tokens == 9
    # By then the 40 have been served, the last two of them at least.
    assert num_later > 40


def test_a_static_batch_is_not_displaced():
    scheduler = make_scheduler(max_num_seqs=2, policy=Priority(), batching="static")
    running = [add(scheduler, name, 20, 8, priority=9) for name in "ab"]
    step(scheduler)
    add(scheduler, "urgent", 4, 2)
    for _ in until(lambda: all(r.finish_reason for r in running)):
        assert not step(scheduler).preempted
    assert list(lengths(step(scheduler))) == ["urgent"]


@pytest.mark.parametrize("mode", PREEMPTION_MODES)
@pytest.mark.parametrize("caching", [False, True])
def test_nobody_is_displaced_and_brought_back_in_turn(mode, caching):
    """Three of a kind in a pool for two, and urgent ones of which each displaces one, once."""
    scheduler = make_scheduler(
        num_blocks=1 + 12, policy=Priority(), num_cpu_blocks=8, preemption_mode=mode, enable_prefix_caching=caching
    )
    model = ToyModel(4)
    requests = [
        Request(str(number), [number] * 16, SamplingParams(max_tokens=6, ignore_eos=True), priority=9 - number)
        for number in range(10)
    ]
    for request in requests:
        scheduler.add(request)
        checked_step(scheduler, model)
        checked_step(scheduler, model)
    for _ in until(lambda: not scheduler.requests, max_steps=200):
        checked_step(scheduler, model)
    assert all(request.output_token_ids == alone(request, 100)[0] for request in requests)
    assert max(request.num_preemptions for request in requests) <= 2
    assert_nothing_is_held(scheduler)


def test_decodes_are_displaced_too_where_they_take_the_last_tokens():
    """Four tokens a step, of which a more urgent long prefill takes three, and a less urgent decode the fourth."""
    scheduler = make_scheduler(
        num_blocks=400, max_num_seqs=4, max_num_batched_tokens=4, policy=Priority(), long_prefill_token_threshold=3
    )
    add(scheduler, "decode", 1, 500, priority=2)
    step(scheduler)
    add(scheduler, "long", 600, 1, priority=0)
    step(scheduler)
    urgent = add(scheduler, "urgent", 2, 1, priority=1)
    assert [request.request_id for request in step(scheduler).preempted] == ["decode"]
    for _ in until(lambda: urgent.finish_reason, max_steps=4):
        step(scheduler)


def test_whether_to_displace_costs_the_same_whatever_runs_and_however_long_what_waits():
    """One with a smaller key and one with a larger run, and it doesn't fit beside the first: nothing that grows with
    tables or prompts is looked at again in every step."""

    class WatchedTable(array):
        def __iter__(self):
            visits.append(len(self))
            return super().__iter__()

    visits = []
    scheduler = make_scheduler(
        num_blocks=300, max_num_seqs=4, max_num_batched_tokens=10_000, policy=Priority(), enable_prefix_caching=True
    )
    running = [add(scheduler, "first", 800, 900, priority=0), add(scheduler, "last", 10, 900, priority=5)]
    step(scheduler)
    for request in running:
        request.block_table = WatchedTable("i", request.block_table)
    waiting = Request("waiting", [7] * 700, SamplingParams(max_tokens=9), priority=3)
    scheduler.add(waiting)
    step(scheduler)
    visits.clear()
    num_lookups = scheduler.memory.num_lookups
    for _ in range(5):
        plan = scheduler.schedule()
        assert not visits
        scheduler.update(plan, [0 for chunk in plan.chunks if chunk.needs_sampling])
    assert scheduler.memory.num_lookups == num_lookups
    assert waiting.state is RequestState.WAITING


# ---------------------------------------------------------------------------- fair


class FairHistory(History):
    """Also keeps, after each step, each client's service, and who had requests waiting all through it."""

    def __init__(self, scheduler, arrivals):
        self.service, self.services, self.backlogged = Counter(), [], []
        self.alive: list[list[Request]] = []  # those that had started and not ended, in each step
        super().__init__(scheduler, arrivals)

    def step(self):
        policy, scheduler = self.scheduler.policy, self.scheduler
        weights = policy.client_weights
        plan = scheduler.schedule()
        for event in take_events(scheduler):
            if event.kind == "started":
                new = event.details["num_prompt_tokens"] - event.details["num_cached_tokens"]
                self.service[event.request.client] += policy.input_weight * new / weights.get(event.request.client, 1)
        waiting = {r.client for r in scheduler.requests.values() if r.state is not RequestState.RUNNING}
        self.plans.append(plan)
        moved = scheduler.update(plan, [7 * len(self.plans) % 300 for chunk in plan.chunks if chunk.needs_sampling])
        for request in moved:
            self.service[request.client] += policy.output_weight / weights.get(request.client, 1)
        self.alive.append([request for request in {*scheduler.requests.values(), *moved} if request.has_started])
        self.services.append(dict(self.service))
        self.backlogged.append(waiting)
        scheduler.check_invariants()

    @property
    def most_tokens(self) -> int:
        """What those that had started and not ended at one time came to in the end."""
        return max(sum(request.num_tokens for request in alive) for alive in self.alive)

    def largest_gap(self, one, other):
        largest, low, high = 0.0, math.inf, -math.inf
        for service, backlogged in zip(self.services, self.backlogged, strict=True):
            if {one, other} <= backlogged:
                difference = service.get(one, 0) - service.get(other, 0)
                low, high = min(low, difference), max(high, difference)
                largest = max(largest, high - low)
            else:
                low, high = math.inf, -math.inf
        return largest


@given(
    busy_traffic(), st.sampled_from([(1, 2), (1, 1), (0.5, 3)]), st.sampled_from([{}, {"a": 3.0}, {"b": 0.25, "c": 2}])
)
@MANY
def test_clients_that_wait_are_served_alike(chosen_and_arrivals, token_weights, client_weights):
    """The guarantee in its docstring, between any two moments between which two clients had requests waiting
    all the time; with weights, of service by weight."""
    chosen, arrivals = chosen_and_arrivals
    history = FairHistory(without_long(chosen, lambda: Fair(*token_weights, client_weights)).make_scheduler(), arrivals)
    longest = max(request.num_prompt_tokens for request in history.requests)
    unit = max(token_weights[0] * longest, token_weights[1] * history.most_tokens)
    for one, other in ("ab", "ac", "bc"):
        smallest = min(client_weights.get(one, 1), client_weights.get(other, 1))
        assert history.largest_gap(one, other) <= 2 * unit / smallest + 1e-6


@given(busy_traffic())
def test_within_a_client_fair_starts_in_the_order_of_arrival(chosen_and_arrivals):
    chosen, arrivals = chosen_and_arrivals
    history = History(without_long(chosen, Fair).make_scheduler(), arrivals)
    for client in "abc":
        order = [request.arrival for request in history.started if request.client == client]
        assert order == sorted(order)


def shares(scheduler: Scheduler, num_steps: int) -> dict[str, int]:
    """Computed tokens of each client in so many steps."""
    counts = Counter()
    for _ in range(num_steps):
        plan = scheduler.schedule()
        for chunk in plan.chunks:
            counts[chunk.request.client] += chunk.length
        scheduler.update(plan, [0 for chunk in plan.chunks if chunk.needs_sampling])
    scheduler.check_invariants()
    return counts


def test_fair_gives_a_client_of_few_requests_as_much_as_one_of_many():
    scheduler = make_scheduler(max_num_seqs=4, policy=Fair())
    for number in range(300):
        add(scheduler, f"many {number}", 8, 8, client="many")
    for number in range(60):
        add(scheduler, f"few {number}", 8, 8, client="few")
    counts = shares(scheduler, 200)
    assert 0.9 < counts["few"] / counts["many"] < 1.1


def test_weights_of_clients_are_shares():
    scheduler = make_scheduler(max_num_seqs=4, policy=Fair(client_weights={"gold": 3}))
    for number in range(300):
        for client in ("gold", "iron"):
            add(scheduler, f"{client} {number}", 8, 8, client=client)
    counts = shares(scheduler, 300)
    assert 2.7 < counts["gold"] / counts["iron"] < 3.3


def test_a_client_that_comes_back_cannot_claim_what_it_did_not_use():
    """It ran once, was away for long, and comes back with many: from then on both get the same."""
    policy = Fair()
    scheduler = make_scheduler(max_num_seqs=4, policy=policy)
    add(scheduler, "first", 8, 8, client="away")
    for number in range(400):
        add(scheduler, f"busy {number}", 8, 8, client="busy")
    shares(scheduler, 200)
    assert policy.counters["away"] == 8 + 2 * 8
    assert policy.counters["busy"] > 1000
    for number in range(100):
        add(scheduler, f"back {number}", 8, 8, client="away")
    counts = shares(scheduler, 100)
    assert 0.8 < counts["away"] / counts["busy"] < 1.25


def test_fair_preempts_the_last_request_of_the_client_that_was_served_most():
    """Though that one came before another's."""
    scheduler = make_scheduler(num_blocks=1 + 12, block_size=2, policy=Fair())
    for name, num_prompt_tokens in (("a1", 4), ("a2", 4), ("b1", 6)):
        add(scheduler, name, num_prompt_tokens, 30, client=name[0])
    for _ in range(20):
        plan = step(scheduler)
        if plan.preempted:
            break
    assert ids(plan.preempted) == "a2"
    assert list(lengths(plan)) == ["b1", "a1"]


def test_what_was_found_in_the_cache_is_not_charged():
    policy = Fair()
    scheduler = make_scheduler(policy=policy, enable_prefix_caching=True)
    add(scheduler, "1", 9, 1, client="a")
    step(scheduler)
    assert policy.counters == {"a": 9 + 2}
    add(scheduler, "2", 9, 1, client="a")
    step(scheduler)
    assert policy.counters == {"a": 9 + 2 + 1 + 2}


def test_fair_serves_a_client_again_though_ever_new_ones_come():
    """They have had nothing yet, but the level at which they begin rises with what is served."""
    scheduler = make_scheduler(num_blocks=2000, max_num_seqs=4, max_num_batched_tokens=64, policy=Fair())
    add(scheduler, "first", 8, 4, client="a")
    second = add(scheduler, "second", 8, 4, client="a")
    for number in until(lambda: second.has_started, max_steps=200):
        while scheduler.num_waiting < 9:
            add(scheduler, f"{number} {scheduler.num_waiting}", 8, 4, client=f"{number} {scheduler.num_waiting}")
        step(scheduler)


def test_fair_lets_a_preempted_long_prompt_end_though_ever_new_clients_come():
    """Recomputed a token at a time, while others decode into its blocks."""
    scheduler = make_scheduler(
        num_blocks=41,
        block_size=1,
        max_num_seqs=8,
        max_num_batched_tokens=8,
        policy=Fair(),
        long_prefill_token_threshold=1,
    )
    long = make_request("long", 30, 5, client="a")
    for number in until(lambda: long.finish_reason, max_steps=3000):
        while scheduler.num_waiting < 3:
            name = f"{number} {scheduler.num_waiting}"
            add(scheduler, name, 1, 6, client=name)
        if number == 100:
            scheduler.add(long)
        step(scheduler)
    assert long.num_preemptions < 20


def test_fair_knows_after_an_interruption_who_is_there():
    """Of a request that was never accepted nothing is left; one that is back has its client and its counter."""
    policy = Fair()
    scheduler = make_scheduler(policy=policy)
    stays, lost = add(scheduler, "stays", 3, client="a"), make_request("lost", 3, client="b")
    policy.added(lost)  # and then somebody pressed Ctrl-C
    policy.finished(stays)  # of an abort that came no further
    policy.counters.clear()
    scheduler.recover()
    assert policy._requests == {"a": {stays}}
    run(scheduler)


def test_fair_forgets_clients_that_are_gone():
    policy = Fair()
    scheduler = make_scheduler(policy=policy)
    for number in range(5000):
        add(scheduler, str(number), 1, 1, client=str(number))
        step(scheduler)
    assert len(policy.counters) < 1100
    assert not policy._requests


# ---------------------------------------------------------------------------- adaptive


MAXIMUM = Limits(256, 2048)


def end(policy: Policy, num_output_tokens: int) -> None:
    request = make_request("a")
    for _ in range(num_output_tokens):
        policy.generated(request)
    policy.finished(request)


def learnt(policy: Adaptive, *, rate=None, num_output_tokens=None, step_seconds=None) -> Adaptive:
    """Tell it of arrivals at that rate, the last at 100 seconds, of a request that ended, and of steps."""
    for number in range(32 if rate else 0):
        request = make_request("a")
        request.arrival_time = 100 - (31 - number) / rate
        policy.added(request)
    if num_output_tokens:
        end(policy, num_output_tokens)
    for number in range(20 if step_seconds else 0):
        num_tokens = 10 + 30 * number % 400
        policy.stepped(num_tokens, step_seconds(num_tokens))
    return policy


def test_adaptive_has_as_many_slots_as_requests_would_run():
    """32 arrivals in 31 / 2 seconds, 100 tokens each, 0.05 seconds a token: 10 and a quarter more."""
    fast = {"step_seconds": lambda n: 1e-9 * n}
    policy = learnt(Adaptive(), rate=2, num_output_tokens=100, **fast)
    assert policy.limits(MAXIMUM, 0, 100.0) == (int(1.25 * 32 / 15.5 * 100 * 0.05), 2048)
    assert policy.limits(MAXIMUM, 0, 1000.0)[0] == 4  # nothing has come for long
    policy = learnt(Adaptive(), rate=0.1, num_output_tokens=100, **fast)
    assert policy.limits(MAXIMUM, 0, 100.0)[0] == 4
    policy = learnt(Adaptive(), rate=1e6, num_output_tokens=100, **fast)
    assert policy.limits(MAXIMUM, 0, 100.0)[0] == 256


def test_adaptive_has_as_many_tokens_as_take_the_objective():
    """0.02 seconds and 0.0001 a token."""
    policy = learnt(Adaptive(), step_seconds=lambda n: 0.02 + 0.0001 * n)
    assert policy.limits(MAXIMUM, 0, 0.0)[1] in (299, 300)
    policy = learnt(Adaptive(tpot_objective=0.03), step_seconds=lambda n: 0.02 + 0.0001 * n)
    assert policy.limits(MAXIMUM, 0, 0.0)[1] in (99, 100)
    policy = learnt(Adaptive(tpot_objective=0.01), step_seconds=lambda n: 0.02 + 0.0001 * n)
    assert policy.limits(MAXIMUM, 0, 0.0)[1] == 64
    policy = learnt(Adaptive(tpot_objective=10), step_seconds=lambda n: 0.02 + 0.0001 * n)
    assert policy.limits(MAXIMUM, 0, 0.0)[1] == 2048


def test_adaptive_learns_anew_when_the_device_changes():
    policy = learnt(Adaptive(), step_seconds=lambda n: 0.02 + 0.0001 * n)
    for _ in range(20):
        learnt(policy, step_seconds=lambda n: 0.01 + 0.0002 * n)
    assert policy.limits(MAXIMUM, 0, 0.0)[1] in range(195, 202)


def test_adaptive_takes_few_tokens_while_it_knows_no_speed_and_as_many_slots_while_it_knows_no_length():
    policy = Adaptive()
    assert policy.limits(MAXIMUM, 0, 0.0) == (64, 64)
    for _ in range(100):
        policy.stepped(7, 0.001)  # all of one size
    assert policy.limits(MAXIMUM, 0, 0.0) == (64, 64)
    end(policy, 10)
    assert policy.limits(MAXIMUM, 0, 0.0) == (4, 64)


def test_adaptive_tries_twice_as_many_tokens_where_steps_of_one_size_were_fast_enough():
    """Else a queue that always fills the minimum would keep it there for ever."""
    policy = Adaptive()
    for _ in range(3):
        policy.stepped(64, 0.05)
    assert policy.limits(MAXIMUM, 0, 0.0)[1] == 128
    policy = Adaptive(min_num_batched_tokens=16)
    policy.stepped(64, 0.051)
    assert policy.limits(MAXIMUM, 0, 0.0)[1] == 16


def test_adaptive_takes_the_tokens_of_all_requests_for_those_of_the_ended():
    """Those that end first are short: of two requests one has ended with 1 token, the other goes on with 199."""
    policy = learnt(Adaptive(), rate=2, num_output_tokens=1, step_seconds=lambda n: 1e-9 * n)
    for _ in range(199):
        policy.generated(make_request("b"))
    assert policy.limits(MAXIMUM, 0, 100.0)[0] == int(1.25 * 32 / 15.5 * 200 * 0.05)


def test_adaptive_never_has_more_slots_than_tokens():
    policy = learnt(
        Adaptive(min_num_batched_tokens=5), rate=1e6, num_output_tokens=100, step_seconds=lambda n: 1 + 0.1 * n
    )
    assert policy.limits(MAXIMUM, 0, 100.0) == (5, 5)


def test_adaptive_takes_the_maximum_when_more_wait_than_there_are_slots():
    policy = learnt(Adaptive(), num_output_tokens=1)
    assert policy.limits(MAXIMUM, 4, 0.0) == (4, 64)
    assert policy.limits(MAXIMUM, 5, 0.0) == MAXIMUM


finite = st.floats(0, 1e9)


@given(
    maximum=st.builds(Limits, st.integers(1, 300), st.integers(1, 3000)),
    arguments=st.tuples(st.floats(1e-6, 1e6), st.integers(1, 500), st.integers(1, 500)),
    arrival_times=st.lists(finite, max_size=40),
    outputs=st.lists(st.integers(0, 1000), max_size=5),
    steps=st.lists(st.tuples(st.integers(0, 3000), st.floats(0, 1e3)), max_size=60),
    num_waiting=st.integers(0, 1000),
    now=finite,
)
@MANY
def test_limits_of_adaptive_are_in_range_whatever_happened(
    maximum, arguments, arrival_times, outputs, steps, num_waiting, now
):
    """Whatever was measured; the configured maximum wins over the policy's minimum."""
    maximum = Limits(min(maximum), maximum.max_num_batched_tokens)  # as the scheduler has it
    policy = Adaptive(*arguments)
    for arrival_time in arrival_times:
        request = make_request("a")
        request.arrival_time = arrival_time
        policy.added(request)
    for number in outputs:
        end(policy, number)
    for step_taken in steps:
        policy.stepped(*step_taken)
    limits = policy.limits(maximum, num_waiting, now)
    assert all(type(limit) is int for limit in limits)
    assert limits.max_num_seqs <= limits.max_num_batched_tokens
    for limit, highest, lowest in zip(limits, maximum, arguments[1:], strict=True):
        assert min(lowest, highest) <= limit <= highest or limit == limits.max_num_batched_tokens


class ToyDevice:
    """A runner and its clock: a step takes 5 ms, and 0.1 ms for each token."""

    def __init__(self):
        self.now = 0.0
        self.durations: list[float] = []

    def clock(self) -> float:
        return self.now

    def execute(self, plan: StepPlan) -> list[int | None]:
        self.durations.append(0.005 + 0.0001 * sum(chunk.length for chunk in plan.chunks))
        self.now += self.durations[-1]
        return [0 for chunk in plan.chunks if chunk.needs_sampling]


def serve(policy: Policy, gap: float, count: int = 150) -> tuple[ToyDevice, list[int]]:
    """Prompts of 300 to 1,100 tokens, one in `gap` seconds. Also returns, for each step, how many waited before it."""
    device = ToyDevice()
    scheduler = make_scheduler(
        num_blocks=20_000, max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=4000, policy=policy
    )
    core, waited = EngineCore(scheduler, device, device.clock), []
    for number in range(count):
        for _ in until(lambda number=number: device.now >= number * gap):
            if not core.has_unfinished_requests():
                device.now = number * gap
                break
            waited.append(scheduler.num_waiting)
            core.step()
        core.add(make_request(str(number), 300 + 100 * number % 900, 40), number * gap)
    for _ in until(lambda: not core.has_unfinished_requests(), max_steps=20_000):
        waited.append(scheduler.num_waiting)
        core.step()
    return device, waited


def test_adaptive_holds_the_objective_while_requests_come_slowly():
    """A step takes no longer, so no token does, once it knows how long steps take. First come, first served
    puts whole prompts between the tokens of others."""
    device, waited = serve(Adaptive(tpot_objective=0.03), gap=0.5)
    assert max(waited) <= 4
    assert max(device.durations[20:]) <= 0.03 + 1e-9
    device, _ = serve(FCFS(), gap=0.5)
    assert max(device.durations) > 0.08


def test_adaptive_has_large_steps_when_requests_come_fast():
    """As many tokens in the same time as with the configured limits, within a few percent."""
    ended = {}
    for make_policy in (FCFS, Adaptive):
        device, waited = serve(make_policy(), gap=0.001)
        ended[make_policy] = device.now
        assert max(waited) > 64
        assert max(device.durations) > 0.2
    assert ended[Adaptive] < 1.1 * ended[FCFS]


# ---------------------------------------------------------------------------- long prompts


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("extra", [{}, {"enable_prefix_caching": True, "num_blocks": 1 + 6300, "num_cpu_blocks": 100}])
def test_short_requests_do_not_wait_for_a_prompt_of_100_000_tokens(name, extra):
    """One short request in every step: each starts in the next, and the long one gets its 64 tokens in every
    step, and the rest where nobody else wants it. With more blocks than it needs and hardly any more."""
    arguments = {"num_blocks": 8000, "num_cpu_blocks": 0} | extra
    policy = Adaptive(min_num_batched_tokens=256) if name == "adaptive" else POLICIES[name]()
    scheduler = make_scheduler(
        **arguments,
        block_size=16,
        max_num_batched_tokens=256,
        max_model_len=110_000,
        policy=policy,
        long_prefill_token_threshold=64,
    )
    long = make_request("long", 100_000, 1, priority=1)
    scheduler.add(long)
    taken = 0
    for number in until(lambda: long.finish_reason, max_steps=100_000 // 64 + 2):
        short = add(scheduler, str(number), 1 + number % 30, 3, client="short")
        plan = scheduler.schedule()
        scheduler.update(plan, [0 for chunk in plan.chunks if chunk.needs_sampling])
        assert short.has_started
        assert short.num_output_tokens == 1
        taken = sum(chunk.length for chunk in plan.chunks)
        assert taken == 256 or long.finish_reason
    assert number < 100_000 // (256 - 30 - 7)  # all that the others leave


def test_a_long_prompt_alone_gets_all_tokens():
    """No request wants what is beyond the threshold, so it isn't wasted."""
    scheduler = make_scheduler(num_blocks=500, max_num_batched_tokens=32, long_prefill_token_threshold=4)
    add(scheduler, "long", 320, 1)
    assert run(scheduler) == 10


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("most", [1, 2])
def test_of_two_long_prompts_the_second_waits_and_short_ones_pass(name, most):
    scheduler = make_scheduler(
        num_blocks=500,
        max_num_batched_tokens=64,
        policy=POLICIES[name](),
        long_prefill_token_threshold=8,
        max_long_partial_prefills=most,
    )
    first, second = add(scheduler, "first", 600, 2), add(scheduler, "second", 600, 2)
    short = add(scheduler, "short", 8, 2)
    plan = step(scheduler)
    assert lengths(plan).keys() == {"first", "short"} | ({"second"} if most == 2 else set())
    assert not second.has_started or most == 2
    for _ in until(lambda: first.num_output_tokens, max_steps=20):
        step(scheduler)
    step(scheduler)
    assert second.has_started
    run(scheduler, max_steps=20)
    assert {r.finish_reason for r in (first, second, short)} == {"length"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", PREEMPTION_MODES)
@pytest.mark.parametrize("caching", [False, True])
def test_many_long_prompts_end_though_short_ones_pass_them(name, mode, caching):
    """Too few blocks for all, and short requests in every step until the last long one has started."""
    scheduler = make_scheduler(
        num_blocks=1 + 30,
        max_num_seqs=6,
        policy=POLICIES[name](),
        num_cpu_blocks=20,
        preemption_mode=mode,
        enable_prefix_caching=caching,
        long_prefill_token_threshold=4,
    )
    model = ToyModel(4)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    long = [Request(f"long {n}", [n + 1] * 40, params, priority=n, client=f"{n % 2}") for n in range(6)]
    for request in long:
        scheduler.add(request)
    shorts = []
    for number in until(lambda: all(r.finish_reason for r in long), max_steps=1500):
        shorts.append(Request(str(number), [100 + number] * (1 + number % 4), params, priority=3, client="short"))
        scheduler.add(shorts[-1])
        checked_step(scheduler, model)
    for _ in until(lambda: not scheduler.requests, max_steps=5000):
        checked_step(scheduler, model)
    assert all(request.output_token_ids == alone(request, 1000)[0] for request in [*long, *shorts])


# ---------------------------------------------------------------------------- under every policy


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", [2, 5, 16])
def test_decodes_get_a_token_in_every_step_while_prompts_keep_arriving(name, budget):
    """One prompt per step, of ever new clients and priorities; blocks for all, so that nobody has to stop, except
    for a more urgent one."""
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=budget, policy=POLICIES[name]())
    for number in range(200):
        add(scheduler, str(number), 1 + number % 19, 1 + number % 7, priority=number % 3, client=f"{number % 5}")
        decodes = {r.request_id for r in scheduler.running if r.num_pending == 1}
        plan = step(scheduler)
        assert decodes - {r.request_id for r in plan.preempted} <= lengths(plan).keys()
        assert sum(lengths(plan).values()) <= budget
        assert not plan.preempted or name == "priority"
    run(scheduler, max_steps=3000)


@pytest.mark.parametrize("name", NAMES)
def test_a_large_request_starts_though_small_ones_keep_arriving_and_they_go_on_after_it(name):
    """It needs nearly all blocks, and small ones always hold some. Neither waits for ever: nobody new starts when
    its turn has come, and after it the small ones run."""
    policy = {"sjf": SJF(ageing=8), "priority": Priority(ageing=8)}.get(name) or POLICIES[name]()
    scheduler = make_scheduler(num_blocks=1 + 20, max_num_seqs=4, max_num_batched_tokens=64, policy=policy)
    for number in range(4):
        add(scheduler, f"before {number}", 4, 2 + number, client="small")
        step(scheduler)
    large = add(scheduler, "large", 72, 6, priority=2, client="large")
    for number in until(lambda: large.has_started, max_steps=60 if name == "priority" else 30):
        add(scheduler, str(number), 4, 8, client="small")
        step(scheduler)
    small = add(scheduler, "small", 4, 8, client="small")
    for number in until(lambda: small.finish_reason and large.finish_reason, max_steps=160):
        add(scheduler, f"after {number}", 4, 8, client="small")
        step(scheduler)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", [3, 4, 7, 30])
def test_a_chunk_larger_than_what_is_left_does_not_wedge_its_request(name, budget):
    """6 blocks of 4, a prompt of 20 half prefilled, two decodes growing."""
    scheduler = make_scheduler(num_blocks=1 + 6, max_num_batched_tokens=budget, policy=POLICIES[name]())
    long = add(scheduler, "long", 20, 2, priority=1, client="long")
    step(scheduler)
    decodes = [add(scheduler, name, 3, 8) for name in ("x", "y")]
    run(scheduler, max_steps=60)
    assert (long.num_output_tokens, [r.num_output_tokens for r in decodes]) == (2, [8, 8])


@pytest.mark.parametrize("name", NAMES)
def test_all_end_whatever_priorities_clients_and_expectations(name):
    """Numbers of 64 bits, clients of any name, one policy for two schedulers."""
    policy = POLICIES[name]()
    schedulers = [make_scheduler(num_blocks=1 + 6, max_num_seqs=3, policy=policy) for _ in range(2)]
    clients = ["", "a", "A", "\0", "\ud800", "client" * 1000, "None", "ä", "🙂", "default"]
    numbers = [-(2**63), 2**63 - 1, 2**63 - 2, 0, -1]
    for scheduler in schedulers:
        for number, client in enumerate(clients):
            priority = numbers[number % 5]
            expected = [None, 1, 2**63 - 1][number % 3]
            add(scheduler, client, 5, 9, priority=priority, client=client, expected_output_len=expected)
    for _ in until(lambda: not any(scheduler.requests for scheduler in schedulers)):
        for scheduler in schedulers:
            if scheduler.requests:
                step(scheduler)


def test_priorities_of_64_bits_are_told_apart():
    scheduler = make_scheduler(max_num_seqs=1, policy=Priority())
    for name, priority in (("a", 2**63 - 1), ("b", 2**63 - 2), ("c", -(2**63)), ("d", -(2**63) + 1)):
        add(scheduler, name, 1, 1, priority=priority)
    order = []
    for _ in until(lambda: not scheduler.requests):
        order += lengths(step(scheduler))
    assert order == list("cdba")


WRONG = [
    (SJF, "ageing", [0, -1, math.nan, math.inf, "4", None, True, 10**400]),
    (Priority, "ageing", [0, -1, 1.5, math.nan, math.inf, "4", None, True]),
    (Fair, "input_weight", [0, -1, math.nan, math.inf, "1", None]),
    (Fair, "output_weight", [0, -1, math.nan, math.inf, "1", None]),
    (Adaptive, "tpot_objective", [0, -1, math.nan, math.inf, "1", None]),
    (Adaptive, "min_num_seqs", [0, -1, 1.5, math.nan, "1", None]),
    (Adaptive, "min_num_batched_tokens", [0, -1, 1.5, math.nan, "1", None]),
]


@pytest.mark.parametrize(("kind", "field", "value"), [(kind, field, v) for kind, field, vs in WRONG for v in vs])
def test_a_wrong_argument_is_named(kind, field, value):
    with pytest.raises(ValueError, match=f"^{field} must be "):
        kind(**{field: value})


@pytest.mark.parametrize("weight", [0, -1, math.nan, math.inf, "1", None])
def test_a_wrong_weight_of_a_client_is_named(weight):
    with pytest.raises(ValueError, match=r"^client_weights\['b'\] must be in \[0.001, 1000\], not "):
        Fair(client_weights={"a": 1, "b": weight})


# ---------------------------------------------------------------------------- interruptions


def mixed_requests() -> list[Request]:
    return [
        Request(
            str(number),
            [number + 1] * (1 + 5 * number % 13),
            SamplingParams(max_tokens=7, ignore_eos=True),
            priority=number % 3,
            client="abc"[number % 3],
            expected_output_len=[None, 3][number % 2],
        )
        for number in range(7)
    ]


class ToyRunner(ToyModel):
    """For an `EngineCore`, of whose steps some break off."""

    def execute(self, plan):
        self.sampled.clear()
        return super().execute(plan)


@pytest.mark.parametrize("name", NAMES)
@given(
    lines=st.lists(st.integers(1, 60) | st.integers(1, 900), min_size=1, max_size=8),
    num_blocks=st.sampled_from([9, 40]),
    mode=st.sampled_from(PREEMPTION_MODES),
    caching=st.booleans(),
    threshold=st.sampled_from([0, 3]),
    aborted=st.integers(0, 6),
    abort_after=st.integers(0, 12),
)
@MANY
def test_ctrl_c_loses_nothing_under_any_policy(name, lines, num_blocks, mode, caching, threshold, aborted, abort_after):
    """While requests are submitted, planned, taken in or aborted, and while that is made up for: those that were
    accepted end with their tokens, the pools are full again, and a new client is served."""
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        max_num_seqs=4,
        max_num_batched_tokens=12,
        num_cpu_blocks=6,
        preemption_mode=mode,
        enable_prefix_caching=caching,
        policy=POLICIES[name](),
        long_prefill_token_threshold=threshold,
    )
    core = EngineCore(scheduler, ToyRunner(4), lambda: scheduler.now + 0.001)
    interrupt = InterruptEverywhere(lines)
    accepted: dict[str, Request] = {}
    for request in mixed_requests():
        interrupt.during(lambda request=request: core.add(request))
        accepted |= scheduler.requests
    for now in until(lambda: not core.has_unfinished_requests(), max_steps=300):
        if now == abort_after:
            interrupt.during(lambda: core.abort(str(aborted)))
        interrupt.during(core.step)
    core.runner.forget_free_blocks(scheduler)
    new = make_request("new", 3, 2, client="new")
    core.add(new)
    for _ in until(lambda: not core.has_unfinished_requests(), max_steps=10):
        core.step()
        scheduler.check_invariants()
    assert new.num_output_tokens == 2
    for request in accepted.values():
        expected, reason = alone(request, 1000)
        assert request.finish_reason in (reason, "abort")
        assert request.output_token_ids == expected[: request.num_output_tokens]
        assert request.finish_reason == "abort" or request.num_output_tokens == len(expected)
    assert_nothing_is_held(scheduler)


@pytest.mark.parametrize("name", NAMES)
def test_recovery_keeps_the_order(name):
    """Those that had run come back before anybody starts (under "priority", unless that one is more urgent), and
    nothing is counted twice."""
    policy = POLICIES[name]()
    scheduler = make_scheduler(max_num_seqs=3, max_num_batched_tokens=64, policy=policy)
    requests = [add(scheduler, f"{n}", 5, 9, client="abc"[n % 3]) for n in range(6)]
    for _ in range(3):
        step(scheduler)
    counters = dict(policy.counters) if name == "fair" else None
    running = set(scheduler.running)
    scheduler.recover()
    scheduler.check_invariants()
    step(scheduler)
    assert set(scheduler.running) == running
    if counters:
        assert policy.counters == {client: counter + 2 * (client in "abc") for client, counter in counters.items()}
    run(scheduler)
    assert all(request.num_output_tokens == 9 for request in requests)
