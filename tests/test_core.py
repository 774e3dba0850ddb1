"""minicb/core.py by itself: the loop with a toy for a runner and a clock that the test sets."""

import gc
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicb.blocks import BlockPool
from minicb.core import EngineCore
from minicb.memory import Costs, Memory
from minicb.params import SamplingParams
from minicb.plan import Event, Observer, Step, StepPlan
from minicb.policies import POLICIES
from minicb.request import Request
from minicb.scheduler import Scheduler


class Clock:
    """Stands still unless told to go on."""

    def __init__(self, now: float = 0.0):
        self.now, self.num_calls = now, 0

    def __call__(self) -> float:
        self.num_calls += 1
        return self.now


class ToyRunner:
    """A step takes the next of `durations` (then 1 s) on the clock. All tokens are 0, but None for a request that
    is in `broken`. While `break_off` is not empty, steps break off after so much of their time as its first says."""

    def __init__(self, clock: Clock, durations: Sequence[float] = ()):
        self.clock, self.durations = clock, list(durations)
        self.broken = set[str]()
        self.break_off = list[float]()

    def execute(self, plan: StepPlan) -> list[int | None]:
        if self.break_off:
            self.clock.now += self.break_off.pop(0)
            raise KeyboardInterrupt
        self.clock.now += self.durations.pop(0) if self.durations else 1.0
        return [None if chunk.request.request_id in self.broken else 0 for chunk in plan.chunks if chunk.needs_sampling]


class Diary(Observer):
    """Writes everything down, and breaks off where it is told to: {"on_plan": 2} in its second plan."""

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
                raise KeyboardInterrupt

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
        Costs(1.0, 1.0),
    )
    scheduler = Scheduler(
        memory,
        POLICIES[policy](),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=1000,
        batching=batching,
    )
    return EngineCore(scheduler, ToyRunner(clock, durations), clock, observers)


def make_request(
    request_id: str, prompt: int | Sequence[int] = 1, max_tokens: int = 2, client: str = "default", **kwargs
) -> Request:
    """prompt: token ids, or how many: then they are nobody else's."""
    if isinstance(prompt, int):
        prompt = [1000 * (1 + sum(map(ord, request_id))) + position for position in range(prompt)]
    return Request(request_id, prompt, SamplingParams(max_tokens=max_tokens), client=client, **kwargs)


def run_to_end(core: EngineCore, max_steps: int = 2000) -> None:
    """Steps break off; the test goes on."""
    for _ in range(max_steps):
        if not core.has_unfinished_requests():
            return
        try_to(core.step)
    raise AssertionError(f"not finished after {max_steps} steps")


def try_to(call: Callable[[], object]) -> object:
    try:
        return call()
    except KeyboardInterrupt:
        return None


def break_off_at_the_first_token(core: EngineCore) -> None:
    """A step whose first token is taken in, and no other."""
    append = core.scheduler._append

    def break_off(request: Request, token: int | None) -> None:
        append(request, token)
        raise KeyboardInterrupt

    core.scheduler._append = break_off
    with pytest.raises(KeyboardInterrupt):
        core.step()
    core.scheduler._append = append


def two_clients(observers: Sequence[Observer] = ()) -> EngineCore:
    """The run that the tests of core, metrics and trace work out by hand, at its end.

    5 usable blocks of 2 tokens, 2 slots, 8 tokens a step, swap, prefix caching, first come, first served.

    step  time        chunks (start, length)   free  wait
    0     10   12     a 0,5   b 0,3            0     0     a due at 9.5, b at 10. Both get a token.
    1     12   13     a 5,1   b 3,1            0     1     c, due at 11, finds no block.
    2     13   14     a 6,1                    1     2     a needs a block, so b goes, with 2 blocks, of which a takes
                                                           one. a ends: 3 tokens.
    3     15   18     b 4,1   c 0,2            1     0     1 s later, b finds a block that a left alone, and has one
                                                           copied back. It needs a third.
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
    """Requests come, are aborted and broken, steps and plans break off, in a pool that is mostly too small."""

    settings: dict[str, Any]
    # Steps since the one before, prompt and output tokens, client, for how many seconds it has been due, aborted after so
    # many steps, are its logits broken.
    requests: list[tuple[int, int, int, str, float, int | None, bool]]
    durations: list[float]
    break_offs: dict[int, tuple[str, float]]  # at which call of step, where, after how many seconds

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
            request = Request(name, tokens, SamplingParams(max_tokens=max_tokens), client=client, priority=number % 3)
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
                self._break_off_update(core, int(4 * seconds))
            elif where:
                breaker.break_off = {where: 1}
            try_to(core.step)
            breaker.break_off = {}
            core.scheduler.check_invariants()
        raise AssertionError("no end in sight")

    @staticmethod
    def _break_off_update(core: EngineCore, num_tokens: int) -> None:
        append, calls = core.scheduler._append, iter(range(1000))

        def break_off(request: Request, token: int | None) -> None:
            if next(calls) == num_tokens:
                del core.scheduler._append
                raise KeyboardInterrupt
            append(request, token)

        core.scheduler._append = break_off  # type: ignore[method-assign]


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
    """What a plan decides at the begin of its step, what comes of it at the end; queued and aborted in between."""
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
        (step.num_running, step.num_waiting, step.num_free_blocks, [tuple(chunk) for chunk in step.plan.chunks])
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
    assert [(step.plan.preempted, step.plan.returned) for step in diary.steps[2:4]] == [([b], []), ([], [b])]
    assert [step.moved for step in diary.steps] == [[a, b], [a, b], [a], [b, c], [b, c], [d]]
    assert all(step.moved == [] for step in diary.plans)
    # Apart from end and moved, on_step is told what on_plan was.
    assert [step._replace(end=0.0, moved=[]) for step in diary.plans] == [
        step._replace(end=0.0, moved=[]) for step in diary.steps
    ]
    assert {(step.num_blocks, step.max_num_seqs, step.max_num_batched_tokens) for step in diary.steps} == {(5, 2, 8)}


class Blocks(Observer):
    """Holds requests to what plan.py says of their blocks."""

    def on_plan(self, step: Step) -> None:
        for request, start, length, *_ in step.plan.chunks:
            assert len(request.block_table) == -(-(start + length) // 2)
        for request in step.plan.preempted:
            assert len(request.block_table) == 0

    def on_step(self, step: Step) -> None:
        for request in step.moved:
            assert (len(request.block_table) == 0) == (request.finish_reason is not None)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_requests_hold_the_blocks_of_the_plan_and_none_when_they_have_ended(mode):
    core = make_core(num_usable=6, num_host_blocks=6, mode=mode, budget=5, observers=[Blocks(), diary := Diary()])
    for name in "abc":
        core.add(make_request(name, 4, 5))
    run_to_end(core)
    assert any(event.kind == "preempted" for event in diary.events)


def test_the_clock_is_asked_when_something_happens_and_not_else():
    core = make_core()
    clock = core.clock
    for call, num_calls in (
        (lambda: core.add(make_request("a", 1, 2)), 1),
        (lambda: core.add(make_request("b", 1, 2), arrival_time=-3.0), 0),
        (core.step, 2),
        (core.has_unfinished_requests, 0),
        (lambda: core.abort("a"), 1),
        (lambda: core.abort("nobody"), 1),
        (core.collect, 0),
        (core.step, 2),
        (core.abort_all, 0),
    ):
        before = clock.num_calls
        call()
        assert clock.num_calls - before == num_calls


@pytest.mark.parametrize(("arrival_time", "expected"), [(None, 5.0), (0.0, 0.0), (4.5, 4.5), (7.0, 7.0)])
def test_a_request_was_due_when_its_caller_says_or_now(arrival_time, expected):
    """0 is a time like any other, and one that is yet to come is none of the loop's business."""
    core = make_core(now=5.0, observers=[diary := Diary()])
    core.add(request := make_request("a"), arrival_time)
    assert request.arrival_time == expected
    assert diary.events == [Event(expected, "queued", request, {})]


def test_a_request_that_is_refused_is_not_heard_of():
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


def test_observers_are_told_one_after_another_and_may_come_later():
    first, second = Diary(), Diary()
    core = make_core(observers=[first])
    core.add(make_request("a", 1, 3))
    core.step()
    core.observers.append(second)
    run_to_end(core)
    assert second.short() == first.short()[-len(second.entries) :]
    assert [entry[0] for entry in second.short()] == ["plan", "step", "plan", 3.0, "step"]


# ---------------------------------------------------------------------------- what callers get


def test_a_step_returns_who_moved():
    core = make_core(budget=4)
    a, b = make_request("a", 3, 2), make_request("b", 2, 1)
    core.add(a)
    core.add(b)
    assert core.step() == [a]  # b has 1 of its 2 tokens
    assert core.step() == [a, b]
    assert not core.has_unfinished_requests()
    assert core.collect() == []


def test_what_a_step_left_to_be_collected_is_not_forgotten():
    core = make_core()
    core.add(a := make_request("a", 1, 2))
    core.advance()
    core.advance()
    assert a.finish_reason == "length"
    assert core.has_unfinished_requests()  # somebody has yet to hear of it
    assert core.step() == [a]  # once, though it moved twice
    assert not core.has_unfinished_requests()


@pytest.mark.parametrize("when", ["waiting", "prefilling", "running", "swapped"])
def test_abort_in_any_state(when):
    """An event at the time of the abort; no step tells of it, and a second abort has no effect."""
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
    assert core.abort("nobody") is None
    num_events = len(diary.entries)
    run_to_end(core)
    core.scheduler.check_invariants()
    assert all(request not in step.moved for step in diary.steps[-4:])
    assert all(entry.request is not request for entry in diary.entries[num_events:] if isinstance(entry, Event))


def test_what_was_aborted_is_in_no_later_step_even_if_it_had_moved():
    core = make_core()
    core.add(make_request("a", 1, 5))
    core.add(b := make_request("b", 1, 5))
    core.advance()
    core.abort("a")
    assert core.step() == [b]


def test_abort_all_ends_everything_and_says_so():
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


# ---------------------------------------------------------------------------- steps that break off


OUTPUTS = {"a": 7, "b": 6, "c": 5, "d": 4, "e": 3}


def submit_five(core: EngineCore) -> dict[str, Request]:
    """More than the pool of `small` holds."""
    requests = {}
    for number, name in enumerate("abcde"):
        requests[name] = make_request(name, 1 + 2 * number, 7 - number)
        core.add(requests[name])
    return requests


def small(mode: str, observers: Sequence[Observer]) -> EngineCore:
    return make_core(num_usable=9, num_host_blocks=5, mode=mode, caching=True, budget=6, observers=observers)


def lives(diary: Diary, kinds: Sequence[str] = ("queued", "started", "first_token", "finished")) -> list[tuple]:
    """Which requests went through what happens to each of them once."""
    return sorted((event.request.request_id, event.kind) for event in diary.events if event.kind in kinds)


def assert_undisturbed(requests: dict[str, Request], diary: Diary, core: EngineCore) -> None:
    assert {name: request.num_output_tokens for name, request in requests.items()} == OUTPUTS
    assert {request.finish_reason for request in requests.values()} == {"length"}
    core.scheduler.check_invariants()
    assert core.scheduler.pool.num_free == core.scheduler.pool.num_usable
    undisturbed = Diary()
    other = small("recompute", [undisturbed])
    submit_five(other)
    run_to_end(other)
    assert lives(diary) == lives(undisturbed)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("method", ["execute", "on_plan", "on_step"])
@pytest.mark.parametrize("number", range(1, 12))
def test_a_step_that_breaks_off_loses_no_token_and_no_event(mode, method, number):
    """Each request is told to have started, got its first token and ended once, and its tokens are all there.
    Steps are numbered without gaps."""
    diary = Diary()
    core = small(mode, [diary] if method == "execute" else [diary, Diary({method: number})])
    requests = submit_five(core)
    execute, calls = core.runner.execute, iter(range(1, 1000))
    if method == "execute":

        def sometimes(plan: StepPlan) -> list[int | None]:
            if next(calls) == number:
                raise KeyboardInterrupt
            return execute(plan)

        core.runner.execute = sometimes  # type: ignore[method-assign]
    broke_off = 0
    seen = set[Request]()
    while core.has_unfinished_requests():
        try:
            seen |= set(core.step())
        except KeyboardInterrupt:
            broke_off += 1
    assert broke_off == 1
    assert seen == set(requests.values())
    assert_undisturbed(requests, diary, core)
    assert [step.number for step in diary.steps] == list(range(core.num_steps))
    assert all(begin.end <= after.begin for begin, after in pairwise(diary.steps))
    moved = [request for step in diary.steps for request in step.moved]
    if method != "on_step":  # else the next step tells it again
        assert len(moved) == sum(request.num_output_tokens for request in requests.values())


@pytest.mark.parametrize("order", [1, -1])
def test_an_observer_that_breaks_off_at_an_event_keeps_none_from_the_others(order):
    """Neither from those before it nor from those after it."""
    for number in range(1, 21):
        diary = Diary()
        core = small("swap", [diary, Diary({"on_event": number})][::order])
        requests = {}
        for position, name in enumerate("abcde"):
            requests[name] = make_request(name, 1 + 2 * position, 7 - position)
            try_to(lambda name=name, requests=requests, core=core: core.add(requests[name]))
        run_to_end(core)
        assert_undisturbed(requests, diary, core)


@pytest.mark.parametrize("number", range(1, 12))
def test_a_clock_that_fails_loses_nothing(number):
    """It is asked before anything is planned, and when the tokens are there but not yet taken in: they come again."""
    diary = Diary()
    core = small("swap", [diary])
    requests = submit_five(core)
    clock, calls = core.clock, iter(range(1, 1000))

    def sometimes() -> float:
        if next(calls) == number:
            raise KeyboardInterrupt
        return clock()

    core.clock = sometimes
    run_to_end(core)
    assert_undisturbed(requests, diary, core)


class InterruptAt:
    """Raises KeyboardInterrupt at the n-th line of the loop or its scheduler, and again so many lines later; but not
    where an interruption is made up for already."""

    FILES = ("core", "scheduler", "lifecycle", "waiting", "policies", "blocks", "memory")

    def __init__(self, lines: Sequence[int]):
        self.lines = list(lines)
        self.outer = sys.exc_info()[1]

    def __call__(self, frame, event, arg):
        if not self.lines or not frame.f_code.co_filename.endswith(tuple(f"minicb/{name}.py" for name in self.FILES)):
            return None
        if frame.f_code.co_name == "_tell_events":  # each event once at most, not once exactly
            return None
        if event == "line" and sys.exc_info()[1] is self.outer:
            self.lines[0] -= 1
            if self.lines[0] == 0:
                del self.lines[0]
                raise KeyboardInterrupt
        return self


def interrupted_run(
    lines: Sequence[int], mode: str, observers: Sequence[Observer] = ()
) -> tuple[dict[str, Request], EngineCore, bool]:
    """Also: did it get as far as all of these lines?"""
    core = small(mode, observers)
    requests = submit_five(core)
    interrupt = InterruptAt(lines)
    while core.has_unfinished_requests():
        sys.settrace(interrupt if interrupt.lines else None)
        try:
            core.step()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
    return requests, core, not interrupt.lines


@given(lines=st.lists(st.integers(1, 2500), min_size=1, max_size=3), mode=st.sampled_from(["swap", "recompute"]))
@settings(max_examples=5 * settings.default.max_examples)
def test_ctrl_c_anywhere_loses_no_token(lines, mode):
    requests, core, _ = interrupted_run(lines, mode)
    assert {name: request.num_output_tokens for name, request in requests.items()} == OUTPUTS
    assert {request.finish_reason for request in requests.values()} == {"length"}
    core.scheduler.check_invariants()


def test_ctrl_c_anywhere_loses_no_event():
    """At each line of a run, one after another."""
    line, reached = 0, True
    while reached:
        line += 1
        diary = Diary()
        requests, core, reached = interrupted_run([line], "swap", [diary])
        assert_undisturbed(requests, diary, core)


@pytest.mark.parametrize("time", [math.nan, math.inf, -math.inf, "1"])
def test_a_time_that_is_no_time_is_refused(time):
    core = make_core()
    with pytest.raises(ValueError, match="^arrival_time must be a finite number, not "):
        core.add(make_request("a"), arrival_time=time)
    assert not core.has_unfinished_requests()


def test_a_request_that_is_submitted_again_keeps_its_time():
    core = make_core()
    request = make_request("a")
    core.add(request, arrival_time=1.0)
    with pytest.raises(ValueError, match="already in use"):
        core.add(request, arrival_time=2.0)
    assert request.arrival_time == 1.0


def test_an_observer_that_breaks_off_and_is_taken_away_keeps_nothing_from_the_next():
    broken, diary = Diary({"on_event": 1}), Diary()
    core = make_core(observers=[broken, diary])
    try_to(lambda: core.add(make_request("a")))
    core.observers.remove(broken)
    run_to_end(core)
    assert [event.kind for event in diary.events] == ["queued", "started", "first_token", "finished"]
