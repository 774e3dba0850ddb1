"""minicb/core.py: the loop, with a toy for a runner and a clock that the test sets."""

import gc
import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from test_scheduler import FAILURES, ToyModel, next_token

from minicb.blocks import BlockPool
from minicb.core import EngineCore
from minicb.memory import Memory, PreemptionCosts
from minicb.params import SamplingParams, SchedulingParams
from minicb.plan import Event, Observer, Step, StepPlan
from minicb.policies import POLICIES
from minicb.request import Request, RequestState
from minicb.scheduler import Scheduler


class Broken(Exception):
    """Raised by the toys below where a test tells them to."""


class Clock:
    """Stands still unless a test sets it forward."""

    def __init__(self, now: float = 0.0):
        self.now, self.num_calls = now, 0

    def __call__(self) -> float:
        self.num_calls += 1
        return self.now


class ToyRunner:
    """A model that notices mistakes with KV (`ToyModel`). Samples of a prompt differ.

    A step takes the next of `durations` (then 1 s) on the clock. Requests in `broken` get None. While `break_off` is
    not empty, a step takes its first value in seconds, does what `fail` does of it, and raises.
    """

    def __init__(self, clock: Clock, durations: Sequence[float] = (), block_size: int = 2):
        self.clock, self.durations, self.model = clock, list(durations), ToyModel(block_size)
        self.broken = set[str]()
        self.break_off = list[float]()
        self.fail = FAILURES[0]

    def execute(self, plan: StepPlan) -> list[int | None]:
        if self.break_off:
            self.clock.now += self.break_off.pop(0)
            self.fail(self.model, plan)
            raise Broken
        tokens = self.model.execute(plan)
        self.clock.now += self.durations.pop(0) if self.durations else 1.0
        requests = [chunk.request for chunk in plan.chunks if chunk.needs_sampling]
        return [
            None if request.request_id in self.broken else token + request.index
            for request, token in zip(requests, tokens, strict=True)
        ]


def expected_tokens(request: Request, count: int) -> list[int]:
    """The first `count` output tokens of the request, from its prompt alone."""
    tokens = list(request.prompt_token_ids)
    for _ in range(count):
        tokens.append(next_token(tokens) + request.index)
    return tokens[len(request.prompt_token_ids) :]


class Diary(Observer):
    """Writes down what it is told, and fails where a test tells it to: {"on_plan": 2} in its second plan."""

    def __init__(self, break_off: dict[str, int] | None = None):
        self.entries: list[Event | tuple[str, Step]] = []
        self.break_off = dict(break_off or {})

    def on_event(self, event: Event) -> None:
        self._write("on_event", event)

    def on_plan(self, step: Step) -> None:
        self._write("on_plan", ("plan", step))

    def on_step(self, step: Step) -> None:
        self._write("on_step", ("step", step))

    def _write(self, method: str, entry: Event | tuple[str, Step]) -> None:
        self.entries.append(entry)
        if method in self.break_off:
            self.break_off[method] -= 1
            if self.break_off[method] == 0:
                raise Broken(method)

    @property
    def events(self) -> list[Event]:
        return [entry for entry in self.entries if isinstance(entry, Event)]

    @property
    def plans(self) -> list[Step]:
        return [entry[1] for entry in self.entries if entry[0] == "plan"]

    @property
    def steps(self) -> list[Step]:
        return [entry[1] for entry in self.entries if entry[0] == "step"]

    def short(self) -> list[tuple]:
        """(time, kind, request_id) of events, (number, begin, end) of plans and steps."""
        return [
            (entry.time, entry.kind, entry.request.request_id)
            if isinstance(entry, Event)
            else (entry[0], entry[1].number, entry[1].begin, entry[1].end)
            for entry in self.entries
        ]


def make_core(
    *,
    num_usable: int = 20,
    block_size: int = 2,
    num_host_blocks: int = 0,
    mode: str = "recompute",
    caching: bool = False,
    policy: str = "fcfs",
    max_num_seqs: int = 4,
    budget: int = 16,
    batching: str = "continuous",
    now: float = 0.0,
    durations: Sequence[float] = (),
    observers: Sequence[Observer] = (),
) -> EngineCore:
    clock = Clock(now)
    memory = Memory(
        BlockPool(1 + num_usable, block_size, caching),
        BlockPool(1 + num_host_blocks, block_size),
        mode,
        PreemptionCosts(1.0, 1.0),
    )
    scheduler = Scheduler(
        memory,
        POLICIES[policy](),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=1000,
        batching=batching,
    )
    return EngineCore(scheduler, ToyRunner(clock, durations, block_size), clock, observers)


def make_request(
    request_id: str,
    prompt: int | Sequence[int] = 1,
    max_tokens: int = 2,
    client: str = "default",
    *,
    n: int = 1,
    priority: int = 0,
) -> Request:
    """The first sample of a prompt: token ids, or a number of tokens that no other prompt has."""
    if isinstance(prompt, int):
        prompt = [1000 * (1 + sum(map(ord, request_id))) + position for position in range(prompt)]
    params = SamplingParams(max_tokens=max_tokens, n=n)
    scheduling = SchedulingParams(client=client, priority=priority)
    samples = [
        Request(f"{request_id}/{index}" if index else request_id, list(prompt), params, scheduling, index=index)
        for index in range(n)
    ]
    for sample in samples:
        sample.samples = samples
    return samples[0]


def run_to_end(core: EngineCore, max_steps: int = 2000) -> None:
    """Go on after steps that fail."""
    for _ in range(max_steps):
        if not core.has_unfinished_requests():
            return
        try_to(core.step)
    raise AssertionError(f"not finished after {max_steps} steps")


def try_to(call: Callable[[], object]) -> object:
    with suppress(Broken):
        return call()
    return None


def fail_once(target: object, method: str) -> Callable[[], None]:
    """The next call of the method raises Broken. Returns a function that calls this off."""
    original = getattr(target, method)

    def fail(*args: object) -> None:
        setattr(target, method, original)
        raise Broken(method)

    setattr(target, method, fail)
    return lambda: setattr(target, method, original)


def two_clients(observers: Sequence[Observer] = ()) -> EngineCore:
    """The run that the tests of core, metrics and trace work out by hand, at its end.

    5 usable blocks of 2 tokens, 2 slots, 8 tokens a step, swap, prefix caching, first come, first served.

    step  time        chunks (start, length)   free  wait
    0     10   12     a 0,5   b 0,3            0     0     a due at 9.5, b at 10. Both get a token.
    1     12   13     a 5,1   b 3,1            0     1     c, due at 11, finds no block.
    2     13   14     a 6,1                    1     2     a needs a block, so b is swapped out, and a takes one of its
                                                           2 blocks. a ends: 3 tokens.
    3     15   18     b 4,1   c 0,2            1     0     1 s later, b finds one of its blocks, and has the other copied
                                                           back. It needs a third.
    4     18   18.5   b 5,1   c 2,1            0     1     d, due at 18, waits for a slot. b ends: 4 tokens.
          18.5                                             c is aborted, with 2 tokens.
    5     18.5 19     d 2,1                    3     0     d begins with a block of b's; its logits are not finite.
    """
    core = make_core(
        num_usable=5,
        num_host_blocks=10,
        mode="swap",
        caching=True,
        max_num_seqs=2,
        budget=8,
        now=10.0,
        durations=[2, 1, 1, 3, 0.5, 0.5],
        observers=observers,
    )
    core.add(make_request("a", [1, 2, 3, 4, 5], 3, "alice"), arrival_time=9.5)
    core.add(make_request("b", [6, 7, 8], 4, "bob"))
    core.step()
    core.add(make_request("c", [10, 11], 5, "alice"), arrival_time=11.0)
    core.step()
    core.step()
    core.clock.now += 1  # type: ignore[attr-defined]
    core.step()
    core.add(make_request("d", [6, 7, 9], 5, "bob"))
    core.runner.broken.add("d")  # type: ignore[attr-defined]
    core.step()
    core.abort("c")
    core.step()
    assert not core.has_unfinished_requests()
    return core


@dataclass
class RandomRun:
    """Requests come and are aborted, logits are not finite, steps fail, in a pool that is mostly too small."""

    settings: dict[str, Any]
    # Steps since the request before, prompt and output tokens, client, seconds since it was due, steps until it is
    # aborted, whether its logits are not finite.
    requests: list[tuple[int, int, int, str, float, int | None, bool]]
    durations: list[float]
    break_offs: dict[int, tuple[str, float]]  # step -> where it fails, after how many seconds

    def run(self, observers: Sequence[Observer]) -> EngineCore:
        """To its end."""
        core = make_core(**self.settings, now=100.0, durations=self.durations, observers=observers)
        breaker = Diary()
        core.observers.append(breaker)
        arrivals: dict[int, list[tuple[Request, float]]] = {}
        aborts: dict[int, list[str]] = {}
        time = 0
        for number, (wait, prompt, max_tokens, client, age, abort_after, broken) in enumerate(self.requests):
            time += wait
            name = str(number)
            tokens = [*range(min(prompt, 3)), *range(1000 * (number + 1), 1000 * (number + 1) + prompt - 3)]
            request = make_request(name, tokens, max_tokens, client, priority=number % 3)
            arrivals.setdefault(time, []).append((request, age))
            if abort_after is not None:
                aborts.setdefault(time + abort_after, []).append(name)
            if broken:
                core.runner.broken.add(name)  # type: ignore[attr-defined]
        for now in range(3000):
            core.clock.now += 0.25 * (now % 3)  # type: ignore[attr-defined]
            for request, age in arrivals.get(now, []):
                core.add(request, core.clock() - age if age else None)
            for name in aborts.get(now, []):
                core.abort(name)
            if now > time and not core.has_unfinished_requests():
                return core
            where, seconds = self.break_offs.get(now, ("", 0.0))
            if where == "execute":
                core.runner.break_off = [seconds]  # type: ignore[attr-defined]
            elif where == "update":
                call_off = fail_once(core.scheduler.policy, "generated")
            elif where:
                breaker.break_off = {where: 1}
            try_to(core.step)
            breaker.break_off = {}
            if where == "update":
                call_off()
            core.scheduler.check_invariants()
        raise AssertionError("no end in sight")


@st.composite
def random_run(draw) -> RandomRun:
    block_size = draw(st.integers(1, 4))
    num_usable = draw(st.integers(-(-10 // block_size), -(-20 // block_size)))
    seconds = st.integers(0, 8).map(lambda quarters: quarters / 4)
    request = st.tuples(
        st.sampled_from([0, 0, 1, 3]),
        st.integers(1, 10),
        st.integers(1, 12),
        st.sampled_from(["alice", "bob", "eve"]),
        st.sampled_from([0.0, 0.0, 0.5, 7.0]),
        st.none() | st.none() | st.integers(0, 12),
        st.sampled_from([False] * 7 + [True]),
    )
    return RandomRun(
        settings={
            "num_usable": num_usable,
            "block_size": block_size,
            "num_host_blocks": draw(st.sampled_from([30, 30, 3, 0])),
            "mode": draw(st.sampled_from(["swap", "swap", "recompute", "auto"])),
            "caching": draw(st.booleans()),
            "policy": draw(st.sampled_from(list(POLICIES))),
            "max_num_seqs": draw(st.sampled_from([5, 4, 3, 2, 1])),
            "budget": draw(st.integers(1, 12) | st.integers(8, 40)),
            "batching": draw(st.sampled_from(["continuous"] * 3 + ["static"])),
        },
        requests=draw(st.lists(request, min_size=1, max_size=8)),
        durations=draw(st.lists(seconds, max_size=20)),
        break_offs=draw(
            st.dictionaries(
                st.integers(0, 25),
                st.tuples(st.sampled_from(["execute", "update", "on_plan", "on_step"]), seconds),
                max_size=4,
            )
        ),
    )


# ---------------------------------------------------------------------------- what observers are told


def test_events_plans_and_steps_come_in_order_each_with_its_time():
    """What a plan decides has the time at which its step begins; what comes of it, the time at which it ends."""
    diary = Diary()
    two_clients([diary])
    assert diary.short() == [
        (9.5, "queued", "a"),
        (10.0, "queued", "b"),
        (10.0, "started", "a"),
        (10.0, "started", "b"),
        ("plan", 0, 10.0, pytest.approx(math.nan, nan_ok=True)),
        (12.0, "first_token", "a"),
        (12.0, "first_token", "b"),
        ("step", 0, 10.0, 12.0),
        (11.0, "queued", "c"),
        ("plan", 1, 12.0, pytest.approx(math.nan, nan_ok=True)),
        ("step", 1, 12.0, 13.0),
        (13.0, "preempted", "b"),
        ("plan", 2, 13.0, pytest.approx(math.nan, nan_ok=True)),
        (14.0, "finished", "a"),
        ("step", 2, 13.0, 14.0),
        (15.0, "returned", "b"),
        (15.0, "started", "c"),
        ("plan", 3, 15.0, pytest.approx(math.nan, nan_ok=True)),
        (18.0, "first_token", "c"),
        ("step", 3, 15.0, 18.0),
        (18.0, "queued", "d"),
        ("plan", 4, 18.0, pytest.approx(math.nan, nan_ok=True)),
        (18.5, "finished", "b"),
        ("step", 4, 18.0, 18.5),
        (18.5, "finished", "c"),
        (18.5, "started", "d"),
        ("plan", 5, 18.5, pytest.approx(math.nan, nan_ok=True)),
        (19.0, "finished", "d"),
        ("step", 5, 18.5, 19.0),
    ]
    details = [(event.kind, event.details) for event in diary.events if event.request.request_id == "b"]
    assert details == [
        ("queued", {}),
        ("started", {"num_prompt_tokens": 3, "num_cached_tokens": 0}),
        ("first_token", {}),
        ("preempted", {"mode": "swap", "swap_seconds": 2.0, "recompute_seconds": 4.0}),
        ("returned", {"num_swapped_in_blocks": 1, "num_computed_tokens": 4}),
        ("finished", {"finish_reason": "length"}),
    ]
    ends = {e.request.request_id: e.details["finish_reason"] for e in diary.events if e.kind == "finished"}
    assert ends == {"a": "length", "b": "length", "c": "abort", "d": "error"}


def test_a_step_says_what_is_in_it():
    diary = Diary()
    two_clients([diary])
    figures = [
        (step.num_running, step.num_waiting, step.num_free_blocks, [tuple(chunk[:3]) for chunk in step.plan.chunks])
        for step in diary.plans
    ]
    a, b, c, d = dict.fromkeys(event.request for event in diary.events)
    assert figures == [
        (2, 0, 0, [(a, 0, 5), (b, 0, 3)]),
        (2, 1, 0, [(a, 5, 1), (b, 3, 1)]),
        (1, 2, 1, [(a, 6, 1)]),
        (2, 0, 1, [(b, 4, 1), (c, 0, 2)]),
        (2, 1, 0, [(b, 5, 1), (c, 2, 1)]),
        (1, 0, 3, [(d, 2, 1)]),
    ]
    assert [(step.plan.preempted, step.plan.admitted) for step in diary.steps[2:4]] == [([b], []), ([], [b, c])]
    assert [step.progressed for step in diary.steps] == [[a, b], [a, b], [a], [b, c], [b, c], [d]]
    assert all(step.progressed == [] for step in diary.plans)
    # Apart from end and progressed, on_step is told what on_plan was.
    assert [step._replace(end=0.0, progressed=[]) for step in diary.plans] == [
        step._replace(end=0.0, progressed=[]) for step in diary.steps
    ]
    assert {(step.num_blocks, step.max_num_seqs, step.max_num_batched_tokens) for step in diary.steps} == {(5, 2, 8)}


class Blocks(Observer):
    """Checks what plan.py says of blocks."""

    def on_plan(self, step: Step) -> None:
        for request, start, length, *_ in step.plan.chunks:
            assert len(request.block_table) == -(-(start + length) // 2)
        for request in step.plan.preempted:
            assert len(request.block_table) == 0

    def on_step(self, step: Step) -> None:
        for request in step.progressed:
            assert (len(request.block_table) == 0) == (request.finish_reason is not None)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_requests_hold_the_blocks_of_the_plan_and_none_when_they_have_ended(mode):
    core = make_core(num_usable=6, num_host_blocks=6, mode=mode, budget=5, observers=[Blocks(), diary := Diary()])
    for name in "abc":
        core.add(make_request(name, 4, 5))
    run_to_end(core)
    assert any(event.kind == "preempted" for event in diary.events)


def test_the_clock_is_read_when_something_happens_and_only_then():
    core = make_core()
    clock = core.clock
    for call, num_calls in (
        (lambda: core.add(make_request("a", 1, 2)), 1),
        (lambda: core.add(make_request("b", 1, 2), arrival_time=-3.0), 0),
        (core.step, 2),
        (core.has_unfinished_requests, 0),
        (lambda: core.abort("a"), 1),
        (lambda: core.abort("unknown"), 0),
        (core.collect, 0),
        (core.step, 2),
        (core.abort_all, 0),
    ):
        before = clock.num_calls
        call()
        assert clock.num_calls - before == num_calls


@pytest.mark.parametrize(("arrival_time", "expected"), [(None, 5.0), (0.0, 0.0), (4.5, 4.5), (7.0, 7.0)])
def test_a_request_was_due_when_its_caller_says_or_now(arrival_time, expected):
    """Also in the future, and at 0."""
    core = make_core(now=5.0, observers=[diary := Diary()])
    core.add(request := make_request("a"), arrival_time)
    assert request.arrival_time == expected
    assert diary.events == [Event(expected, "queued", request, {})]


def test_a_request_that_is_refused_leaves_no_event():
    core = make_core(observers=[diary := Diary()])
    core.add(make_request("a"))
    for wrong in (make_request("a"), make_request("b", []), make_request("c", 1000)):
        with pytest.raises(ValueError):
            core.add(wrong)
    assert len(diary.entries) == 1
    assert list(core.scheduler.requests) == ["a"]


def test_a_step_with_nothing_to_do_is_a_step():
    core = make_core(observers=[diary := Diary()])
    assert not core.has_unfinished_requests()
    assert core.step() == []
    assert diary.short() == [("plan", 0, 0.0, pytest.approx(math.nan, nan_ok=True)), ("step", 0, 0.0, 1.0)]
    assert diary.steps[0].num_free_blocks == diary.steps[0].num_blocks == 20


def test_an_observer_may_come_later():
    first, second = Diary(), Diary()
    core = make_core(observers=[first])
    core.add(make_request("a", 1, 3))
    core.step()
    core.observers.append(second)
    run_to_end(core)
    assert second.short() == first.short()[-len(second.entries) :]
    assert [entry[0] for entry in second.short()] == ["plan", "step", "plan", 3.0, "step"]


# ---------------------------------------------------------------------------- what callers get


def test_a_step_returns_the_requests_that_got_a_token_or_ended():
    core = make_core(budget=4)
    a, b = make_request("a", 3, 2), make_request("b", 2, 1)
    core.add(a)
    core.add(b)
    assert core.step() == [a]  # b has 1 of its 2 tokens
    assert core.step() == [a, b]
    assert not core.has_unfinished_requests()
    assert core.collect() == []


def test_what_a_step_left_is_collected_later():
    core = make_core()
    core.add(a := make_request("a", 1, 2))
    core.advance()
    core.advance()
    assert a.finish_reason == "length"
    assert core.has_unfinished_requests()  # its end has not been returned
    assert core.step() == [a]  # once, though it got two tokens
    assert not core.has_unfinished_requests()


@pytest.mark.parametrize("when", ["waiting", "prefilling", "running", "swapped"])
def test_abort_in_any_state(when):
    """The event has the time of the abort. No step returns the request, and a second abort has no effect."""
    num_usable = 4 if when == "swapped" else 20
    budget = 2 if when == "prefilling" else 16
    max_num_seqs = 1 if when == "waiting" else 4
    core = make_core(num_usable=num_usable, num_host_blocks=9, mode="swap", budget=budget, max_num_seqs=max_num_seqs)
    core.observers.append(diary := Diary())
    core.add(make_request("first", 3 if when == "swapped" else 1, 6))
    core.add(request := make_request("a", 3, 6))
    for _ in range({"waiting": 1, "prefilling": 1, "running": 2, "swapped": 3}[when]):
        core.step()
    assert len(request.host_blocks) == (2 if when == "swapped" else 0)
    assert request.num_computed_tokens == {"waiting": 0, "prefilling": 1, "running": 4, "swapped": 4}[when]
    core.clock.now = 50.0
    assert core.abort("a") is request
    assert diary.events[-1] == Event(50.0, "finished", request, {"finish_reason": "abort"})
    assert core.abort("a") is None
    assert core.abort("unknown") is None
    num_events = len(diary.entries)
    run_to_end(core)
    core.scheduler.check_invariants()
    assert all(request not in step.progressed for step in diary.steps[-4:])
    assert all(entry.request is not request for entry in diary.entries[num_events:] if isinstance(entry, Event))


def test_an_aborted_request_is_in_no_later_step_even_if_its_token_was_not_collected():
    core = make_core()
    core.add(make_request("a", 1, 5))
    core.add(b := make_request("b", 1, 5))
    core.advance()
    core.abort("a")
    assert core.step() == [b]


def test_abort_all_ends_every_request_with_an_event():
    core = make_core(num_usable=4, max_num_seqs=2, observers=[diary := Diary()])
    requests = [make_request(name, 3, 6) for name in "abc"]
    for request in requests:
        core.add(request)
    core.step()
    core.advance()
    core.abort_all()
    assert [event.request for event in diary.events[-3:]] == requests
    assert {(event.time, event.kind, event.details["finish_reason"]) for event in diary.events[-3:]} == {
        (2.0, "finished", "abort")
    }
    assert not core.has_unfinished_requests()
    assert core.step() == []
    assert core.scheduler.pool.num_free == 4


def test_the_loop_holds_no_request_that_has_ended():
    core = make_core()
    core.add(make_request("a"))
    request = weakref.ref(core.scheduler.requests["a"])
    run_to_end(core)
    gc.collect()
    assert request() is None


# ---------------------------------------------------------------------------- times and ids


@pytest.mark.parametrize("time", [math.nan, math.inf, -math.inf, "1"])
def test_an_arrival_time_that_is_not_finite_is_refused(time):
    core = make_core()
    with pytest.raises(ValueError, match="^arrival_time must be a finite number, not "):
        core.add(make_request("a"), arrival_time=time)
    assert not core.has_unfinished_requests()


def test_a_request_that_is_submitted_again_keeps_its_time():
    core = make_core()
    core.add(request := make_request("a"), arrival_time=1.0)
    with pytest.raises(ValueError, match="already in use"):
        core.add(request, arrival_time=2.0)
    assert request.arrival_time == 1.0
    run_to_end(core)
    with pytest.raises(ValueError, match="was submitted before: it is FINISHED"):
        core.add(request)
    assert not core.is_used("a")


@pytest.mark.parametrize("taken", ["a", "a/1", "a/2"])
def test_all_samples_of_a_prompt_are_accepted_or_none(taken):
    core = make_core(observers=[diary := Diary()])
    core.add(make_request(taken))
    with pytest.raises(ValueError, match=f"request_id '{taken}' is already in use"):
        core.add(make_request("a", n=3))
    assert list(core.scheduler.requests) == list(core._samples) == [taken]
    run_to_end(core)
    core.add(make_request("a", n=3))
    assert [core.is_used(name) for name in ("a", "a/1", "a/2", "a/3", "b")] == [True, True, True, False, False]
    assert [event.request.request_id for event in diary.events if event.kind == "queued"] == [taken, "a", "a/1", "a/2"]


def test_an_id_is_in_use_until_all_samples_have_ended():
    core = make_core()
    core.add(first := make_request("a", n=3))
    _, second, third = first.samples
    assert core.abort("a", 3) is None
    assert core.abort("a/1") is None  # samples have indices; their ids are for metrics and traces
    assert core.abort("a", 0) is first
    assert core.abort("a", 0) is None
    assert core.is_used("a")
    with pytest.raises(ValueError, match="'a' is already in use"):
        core.add(make_request("a"))
    assert core.abort("a") is second
    assert third.finish_reason == "abort"
    assert not core.is_used("a")
    core.add(make_request("a"))
    assert core.is_used("a")


@pytest.mark.parametrize("how", ["abort", "step"])
def test_the_end_of_many_samples_takes_linear_time(monkeypatch, how):
    """`all_ended` looks at all samples, so it is asked once for all that end at the same time."""
    calls = []
    original = Request.all_ended.fget
    monkeypatch.setattr(Request, "all_ended", property(lambda request: calls.append(request) or original(request)))
    for n in (4, 40):
        calls.clear()
        core = make_core(num_usable=100, max_num_seqs=40, budget=100)
        core.add(make_request("a", 1, 1, n=n))
        core.abort("a") if how == "abort" else core.step()
        assert core._samples == {}
        assert len(calls) <= 2


# ---------------------------------------------------------------------------- what fails


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("where", [*FAILURES, "on_plan", "on_event", "on_step"])
def test_a_step_that_fails_loses_no_token(mode, where):
    """Each step of a run in turn. The pool is too small for the five requests, so they swap, share and return.

    Each event is told once, except to observers after one that failed. Steps are numbered without gaps, and those
    that fail have no on_step. A failure in on_step comes after the step."""
    for number in range(1, 16):
        diary, breaker, returned = Diary(), Diary({where: number}), Counter[Request]()
        core = make_core(num_usable=9, num_host_blocks=5, mode=mode, caching=True, budget=6, observers=[diary, breaker])
        requests = [make_request(name, [0] * (1 + 2 * place), 7 - place) for place, name in enumerate("abcde")]
        for request in requests:
            with suppress(Broken):  # an observer's; the request is accepted
                core.add(request)
        failed = False
        for step_number in count(1):
            if callable(where) and step_number == number:
                core.runner.fail, core.runner.break_off = where, [0.0]
            try:
                progressed = core.step()
                returned.update(request for request in progressed if request.state is RequestState.FINISHED)
            except Broken:
                failed = True
            core.scheduler.check_invariants()
            if not core.has_unfinished_requests():
                break
        assert returned == Counter(requests)
        for request in requests:
            assert request.output_token_ids == expected_tokens(request, request.params.max_tokens)
        assert core._samples == {}
        assert core.scheduler.pool.num_free == 9
        if where != "on_event":
            once = [event for event in diary.events if event.kind in ("queued", "started", "first_token", "finished")]
            assert len(once) == len({(event.kind, event.request) for event in once}) == 20
            assert [step.number for step in diary.steps] == list(range(core.num_steps))
            assert all(step.end <= after.begin for step, after in pairwise(diary.steps))
            assert len(diary.plans) == len(diary.steps) + (failed and where != "on_step")
        assert failed == (number <= len(diary.plans)) or where == "on_event"
    assert number > len(diary.plans) > 10


@pytest.mark.parametrize("caching", [False, True])
def test_blocks_that_a_failed_step_was_to_copy_in_are_not_found(caching):
    """b was swapped out, and all its blocks on the device have other content. The step that copies them back fails
    before it has copied anything. So b computes everything again."""
    core = make_core(num_usable=5, num_host_blocks=5, mode="swap", caching=caching)
    core.add(a := make_request("a", 4, 6))
    core.add(b := make_request("b", 3, 6))
    while b.state is not RequestState.SWAPPED:
        core.step()
    assert b.num_computed_tokens == 4
    core.abort("a")
    pool = core.scheduler.pool
    pool.free(pool.allocate(5))
    core.runner.break_off = [0.0]
    with pytest.raises(Broken):
        core.step()
    assert (b.state, b.num_computed_tokens) == (RequestState.WAITING, 0)
    assert core.scheduler.memory.find_prefix(b) == []
    run_to_end(core)
    assert b.output_token_ids == expected_tokens(b, 6)
    assert a.finish_reason == "abort"


class CoreHistory(RuleBasedStateMachine):
    """Random histories of a core: prompts with several samples come, are aborted, whole or in part, logits are not
    finite, steps fail anywhere, and so do the methods of the policy."""

    @initialize(
        block_size=st.integers(1, 3),
        num_host_blocks=st.sampled_from([12, 3, 0]),
        mode=st.sampled_from(["swap", "swap", "recompute", "auto"]),
        caching=st.sampled_from([True, True, False]),
        policy=st.sampled_from(list(POLICIES)),
        max_num_seqs=st.sampled_from([5, 3, 2, 1]),
        budget=st.integers(1, 12),
        batching=st.sampled_from(["continuous", "continuous", "static"]),
    )
    def start(self, block_size, **options):
        self.size, self.diary, self.breaker = block_size, Diary(), Diary()
        self.core = make_core(
            num_usable=-(-13 // block_size), block_size=block_size, observers=[self.diary, self.breaker], **options
        )
        self.prompts: list[Request] = []  # first samples
        self.returned = Counter[Request]()  # ended ones, by steps or aborts
        self.all_events_told = True

    @property
    def samples(self) -> list[Request]:
        return [sample for first in self.prompts for sample in first.samples]

    def live(self) -> list[Request]:
        return [sample for sample in self.samples if sample.state is not RequestState.FINISHED]

    def take(self, progressed: list[Request]) -> None:
        assert len(set(progressed)) == len(progressed)
        self.returned.update(request for request in progressed if request.state is RequestState.FINISHED)

    names = st.sampled_from(["a", "b", "a/1", "c"])
    # A common beginning, so that prompts share blocks.
    shapes = st.tuples(st.integers(0, 5), st.integers(1, 4), st.sampled_from([1, 1, 2, 3]), st.integers(1, 8))

    def make(self, name, shape, priority) -> Request:
        common, own, n, max_tokens = shape
        prompt = [0] * common + [1 + len(self.prompts)] * own
        return make_request(name, prompt, max_tokens, name, n=n, priority=priority)

    @rule(name=names, shape=shapes, priority=st.integers(-2, 2))
    def add(self, name, shape, priority):
        first = self.make(name, shape, priority)
        used = {sample.request_id for sample in self.live()} | {f.request_id for f in self.prompts if not f.all_ended}
        if used.isdisjoint(sample.request_id for sample in first.samples):
            self.prompts.append(first)
            self.core.add(first)
        else:
            with pytest.raises(ValueError, match="already in use"):
                self.core.add(first)

    @rule(name=names, shape=shapes, method=st.sampled_from(["added", "key"]))
    def add_fails(self, name, shape, method):
        """In the policy. No sample is accepted."""
        call_off = fail_once(self.core.scheduler.policy, method)
        with pytest.raises((Broken, ValueError)):
            self.core.add(self.make(name, shape, 0))
        call_off()

    @rule()
    def step(self):
        self.take(self.core.step())

    @rule(where=st.sampled_from([*FAILURES, "on_plan", "on_event", "on_step"]))
    def step_fails(self, where):
        """The next step returns what progressed."""
        before = {request: request.num_output_tokens for request in self.live()}
        if callable(where):
            self.core.runner.break_off, self.core.runner.fail = [0.0], where
        else:
            self.breaker.break_off = {where: 1}
        try:
            self.core.advance()
        except Broken:
            self.all_events_told &= where != "on_event"
            if where not in ("on_event", "on_step"):
                assert {request: request.num_output_tokens for request in self.live()} == before
        self.breaker.break_off = {}
        self.core.runner.break_off = []

    @rule(method=st.sampled_from(["key", "limits", "started", "generated", "finished", "stepped"]))
    def policy_fails(self, method):
        """In a step. Every request ends."""
        live = self.live()
        call_off = fail_once(self.core.scheduler.policy, method)
        try:
            self.core.advance()
        except Broken:
            progressed = self.core.collect()
            assert set(live) <= set(progressed)
            for request in live:
                assert request.state is RequestState.FINISHED
                if request.finish_reason == "error" and request.request_id not in self.core.runner.broken:
                    assert request.stop_reason == f"the scheduler failed: Broken({method!r})"
            self.take(progressed)
        call_off()

    @rule(method=st.sampled_from(["key", "finished"]))
    def runner_and_policy_fail(self, method):
        """In one step. The failure of the policy comes last."""
        execute, policy = self.core.runner.execute, self.core.scheduler.policy
        call_off = None

        def fail(plan):
            nonlocal call_off
            call_off = fail_once(policy, method)
            raise Broken("execute")

        self.core.runner.execute = fail
        with pytest.raises(Broken):
            self.core.advance()
        self.core.runner.execute = execute
        call_off()

    @rule(name=names, index=st.sampled_from([None, None, 0, 1, 2]), fails=st.sampled_from([False, False, True]))
    def abort(self, name, index, fails):
        """Or the policy fails when it is told of the first sample: then the others go on."""
        live = [
            sample
            for first in self.prompts
            if first.request_id == name
            for sample in first.samples
            if sample.state is not RequestState.FINISHED and index in (None, sample.index)
        ]
        if not live or not fails:
            assert self.core.abort(name, index) is (live[0] if live else None)
            # A prompt that has ended now is returned with all samples, and by no step.
            ended = live[0].samples if live and live[0].all_ended else live
            self.returned.update(sample for sample in ended if not self.returned[sample])
        else:
            fail_once(self.core.scheduler.policy, "finished")
            with pytest.raises(Broken):
                self.core.abort(name, index)
            del live[1:]
            self.returned.update(sample for sample in live if sample not in self.core.progressed)
        assert {sample.finish_reason for sample in live} <= {"abort"}

    @rule(sure=st.integers(0, 3))
    def abort_all(self, sure):
        if sure == 3:
            self.core.abort_all()
            assert not self.live()
            assert not self.core.has_unfinished_requests()
            self.returned = Counter(self.samples)

    @rule(name=names)
    def logits_are_not_finite(self, name):
        self.core.runner.broken.add(name)

    @rule(name=names)
    def logits_are_finite_again(self, name):
        self.core.runner.broken.discard(name)

    @invariant()
    def all_agree(self):
        scheduler = self.core.scheduler
        scheduler.check_invariants()
        assert scheduler.requests == {sample.request_id: sample for sample in self.live()}
        assert self.core._samples == {f.request_id: f.samples for f in self.prompts if not f.all_ended}
        for name in ("a", "b", "a/1", "a/2", "c/1"):
            assert self.core.is_used(name) == (name in scheduler.requests or name in self.core._samples)
        for sample in self.samples:
            assert sample.output_token_ids == expected_tokens(sample, sample.num_output_tokens)
            if sample.state is RequestState.FINISHED:
                assert (list(sample.block_table), list(sample.host_blocks)) == ([], [])
                # The last token needs no block.
                longest = min(
                    sample.num_prompt_tokens + sample.params.max_tokens, scheduler.pool.num_usable * self.size + 1
                )
                assert sample.finish_reason != "length" or sample.num_tokens == longest
        assert max(self.returned.values(), default=1) == 1

    def teardown(self):
        if not hasattr(self, "core"):
            return
        for _ in range(1000):
            if not self.core.has_unfinished_requests():
                break
            self.take(self.core.step())
            self.all_agree()
        assert self.returned == Counter(self.samples)
        assert self.core.scheduler.pool.num_free == self.core.scheduler.pool.num_usable
        if self.all_events_told:
            told = Counter((event.kind, event.request) for event in self.diary.events)
            for sample in self.samples:
                assert (told["queued", sample], told["finished", sample]) == (1, 1)
                assert told["started", sample] == sample.has_started
                assert told["first_token", sample] == (sample.num_output_tokens > 0)


TestCoreHistory = CoreHistory.TestCase
TestCoreHistory.settings = settings(
    max_examples=3 * settings.default.max_examples, stateful_step_count=40, report_multiple_bugs=False
)
