"""minicb/interrupts.py, and Ctrl-C at any line: nothing is left half-changed, whatever line it hits."""

import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from linecache import getline

import pytest
from conftest import check_invariants, eager, greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from test_core import Diary, expected_tokens, make_core, make_request

from minicb import RequestOutput, SamplingParams
from minicb.core import EngineCore
from minicb.interrupts import hold_ctrl_c
from minicb.request import Request, RequestState


@pytest.fixture(autouse=True)
def ctrl_c_raises():
    """Also where SIGINT is ignored, as in a script's background job. A test must leave the handler as it was."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    after = signal.signal(signal.SIGINT, before)
    assert after is signal.default_int_handler


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


class Handler:
    """A caller's handler that counts. Raises nothing."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, number: int, frame: object) -> None:
        assert number == signal.SIGINT
        self.num_calls += 1


# ---------------------------------------------------------------------------- hold_ctrl_c


def test_a_signal_in_the_block_is_delivered_at_its_end():
    lines = []
    with pytest.raises(KeyboardInterrupt), hold_ctrl_c():
        lines.append(1)
        ctrl_c()
        lines.append(2)
        ctrl_c()  # two are delivered as one
        lines.append(3)
    assert lines == [1, 2, 3]
    with pytest.raises(KeyboardInterrupt):  # and now at once again
        ctrl_c()


def test_without_a_signal_nothing_happens():
    with hold_ctrl_c() as let_through:
        with let_through():
            pass
        with let_through():
            pass


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_let_through_delivers_at_once_what_was_held_and_what_comes(num_before):
    lines = []
    with pytest.raises(KeyboardInterrupt), hold_ctrl_c() as let_through:
        for _ in range(num_before):
            ctrl_c()
        lines.append("held")
        try:
            with let_through():
                lines.append("inside")
                ctrl_c()
                lines.append("not reached")
        except KeyboardInterrupt:
            lines.append("delivered")
            ctrl_c()
            lines.append("held again")
    assert lines == ["held", *(["inside"] if num_before == 0 else []), "delivered", "held again"]


@pytest.mark.parametrize("inner_lets_through", [False, True])
def test_of_nested_blocks_the_outer_one_delivers(inner_lets_through):
    lines = []
    with pytest.raises(KeyboardInterrupt), hold_ctrl_c():
        with hold_ctrl_c() as let_through:
            if inner_lets_through:
                with let_through():
                    ctrl_c()
            else:
                ctrl_c()
            lines.append("inner")
        lines.append("outer")
    assert lines == ["inner", "outer"]


def test_the_outer_block_may_let_through_what_an_inner_one_held():
    with hold_ctrl_c() as let_through, pytest.raises(KeyboardInterrupt), let_through(), hold_ctrl_c():
        ctrl_c()


def test_an_exception_and_a_signal_come_out_together():
    with pytest.raises(KeyboardInterrupt) as caught, hold_ctrl_c():
        ctrl_c()
        raise OSError("disk")
    assert isinstance(caught.value.__context__, OSError)
    with pytest.raises(OSError), hold_ctrl_c():
        raise OSError


def test_a_handler_of_the_callers_is_called_once_and_decides():
    signal.signal(signal.SIGINT, handler := Handler())
    with hold_ctrl_c() as let_through:
        ctrl_c()
        ctrl_c()
        assert handler.num_calls == 0
    assert handler.num_calls == 1
    with hold_ctrl_c() as let_through:
        ctrl_c()
        with let_through():
            assert handler.num_calls == 2
            ctrl_c()
            assert handler.num_calls == 3
            ctrl_c()
        assert handler.num_calls == 4
    assert handler.num_calls == 4
    with pytest.raises(OSError), hold_ctrl_c():
        ctrl_c()
        raise OSError
    assert handler.num_calls == 5
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is handler


@pytest.mark.parametrize("where", ["held", "let through"])
def test_a_handler_that_the_callers_handler_sets_stays(where):
    """The first Ctrl-C asks to stop, and the second kills: a common pattern."""

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, stop)
    with hold_ctrl_c() as let_through:
        if where == "held":
            ctrl_c()
        with let_through():
            if where == "let through":
                ctrl_c()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL, None])
def test_what_is_no_handler_of_pythons_is_left_alone(monkeypatch, handler):
    """An ignored signal stays ignored, and the default action is the operating system's. None: set by C code."""
    if handler is None:
        monkeypatch.setattr(signal, "getsignal", lambda number: None)
    else:
        signal.signal(signal.SIGINT, handler)
    calls = []
    real = signal.signal
    monkeypatch.setattr(signal, "signal", lambda *args: calls.append(args))
    with hold_ctrl_c() as let_through:
        if handler is signal.SIG_IGN:
            ctrl_c()
        with let_through():
            pass
    assert calls == []
    real(signal.SIGINT, signal.default_int_handler)


def test_off_the_main_thread_there_is_nothing_to_hold():
    results = []

    def work() -> None:
        with hold_ctrl_c() as let_through, let_through():
            results.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [signal.default_int_handler]


# ---------------------------------------------------------------------------- Ctrl-C at any line


class CtrlC:
    """Raises SIGINT before the n-th line that a traced call executes in minicb, and again `lines[1]` lines later.

    Python delivers signals after calls and jumps only. NOT_AT names lines before which it delivers none.
    """

    NOT_AT = ("return progressed", "return outputs")

    def __init__(self, *lines: int, files: Sequence[str] = ("/minicb/", "contextlib")):
        self.lines, self.files = list(lines), files

    def __call__(self, frame, event, arg):
        code = frame.f_code
        if code.co_name != "execute" and not any(part in code.co_filename for part in self.files):
            return None
        if event == "line" and self.lines:
            self.lines[0] -= 1
            if self.lines[0] <= 0 and getline(code.co_filename, frame.f_lineno).strip() not in self.NOT_AT:
                del self.lines[0]
                ctrl_c()
        return self

    def trace(self, call: Callable[[], object]) -> object:
        sys.settrace(self if self.lines else None)
        try:
            return call()
        finally:
            sys.settrace(None)


def test_after_one_signal_the_next_is_held_wherever_the_first_came():
    """The first at any line of interrupts.py. Code that deals with it is not interrupted."""
    line, interrupt = 0, CtrlC()
    while not interrupt.lines:
        line += 1
        interrupt, cleaned_up = CtrlC(line, files=["interrupts.py", "contextlib"]), []

        def block(cleaned_up=cleaned_up) -> None:
            with hold_ctrl_c() as let_through:
                try:
                    with let_through():
                        pass
                except KeyboardInterrupt:
                    sys.settrace(None)
                    cleaned_up.append(False)
                    ctrl_c()
                    cleaned_up[0] = True
                    raise

        try:
            interrupt.trace(block)
            assert interrupt.lines
        except KeyboardInterrupt:
            assert all(cleaned_up)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert line > 30


def make_small(mode: str, diary: Diary) -> tuple[EngineCore, list[Request]]:
    """A run in which requests share, swap and return. One prompt has two samples."""
    core = make_core(num_usable=4, num_host_blocks=4, mode=mode, caching=True, budget=6, observers=[diary])
    firsts = [make_request("a", [0, 0, 0], 3, n=2), make_request("b", [0, 0, 1, 1], 2)]
    return core, firsts


def check_all(core: EngineCore, firsts: Sequence[Request], returned: Counter[Request], diary: Diary) -> None:
    """All requests have ended undisturbed, and nothing is held."""
    requests = [sample for first in firsts for sample in first.samples]
    for request in requests:
        assert request.output_token_ids == expected_tokens(request, request.params.max_tokens)
        assert request.finish_reason == "length"
    assert returned == Counter(requests)
    assert core._samples == core.scheduler.requests == {}
    core.scheduler.check_invariants()
    assert core.scheduler.pool.num_free == core.scheduler.pool.num_usable
    told = Counter((event.kind, event.request) for event in diary.events)
    for request in requests:
        assert all(told[kind, request] == 1 for kind in ("queued", "started", "first_token", "finished"))


def run_small(mode: str, *lines: int) -> tuple[int, bool]:
    """A run with signals at these lines of its steps. Returns how often Ctrl-C came out, and if all were reached."""
    core, firsts = make_small(mode, diary := Diary())
    for first in firsts:
        core.add(first)
    interrupt, returned, num_raised = CtrlC(*lines), Counter[Request](), 0
    cancel = core.scheduler.cancel

    def trace_again(plan):  # an exception in a trace function ends the tracing
        if interrupt.lines:
            sys.settrace(interrupt)
        cancel(plan)

    core.scheduler.cancel = trace_again
    while core.has_unfinished_requests():
        try:
            progressed = interrupt.trace(core.step)
            returned.update(request for request in progressed if request.state is RequestState.FINISHED)
        except KeyboardInterrupt:
            num_raised += 1
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        core.scheduler.check_invariants()
    check_all(core, firsts, returned, diary)
    return num_raised, not interrupt.lines


@pytest.mark.parametrize(("mode", "stride"), [("swap", 1), ("recompute", 7)])
def test_ctrl_c_at_any_line_of_a_step_loses_nothing(mode, stride):
    """At each line of a run in turn. It comes out once, and no token is lost or doubled."""
    line, reached = 1, True
    while reached:
        num_raised, reached = run_small(mode, line)
        assert num_raised == reached
        line += stride
    assert line > 1000


@given(st.lists(st.integers(1, 40) | st.integers(1, 1500), min_size=2, max_size=4))
@settings(max_examples=5 * settings.default.max_examples)
def test_ctrl_c_again_and_again_loses_nothing(lines):
    """Also while the first one is being dealt with. Those that come within one step may come out as one."""
    num_raised, reached = run_small("swap", *lines)
    assert not reached or 1 <= num_raised <= len(lines)


def sets_of(core: EngineCore) -> tuple[set[str], set[str]]:
    return set(core.scheduler.requests), set(core._samples)


def test_ctrl_c_at_any_line_of_add_accepts_all_samples_or_none():
    line, outcomes, interrupt = 0, set(), CtrlC()
    while not interrupt.lines:
        line += 1
        core, firsts = make_small("swap", diary := Diary())
        interrupt = CtrlC(line)
        try:
            interrupt.trace(lambda core=core, firsts=firsts: core.add(firsts[0]))
            assert interrupt.lines
        except KeyboardInterrupt:
            outcome = sets_of(core)
            assert outcome in ((set(), set()), ({"a", "a/1"}, {"a"}))
            outcomes.add(len(outcome[0]))
        for first in firsts:
            if not core.is_used(first.request_id):
                core.add(first)
        check_all(core, firsts, Counter(ended(core)), diary)
    assert outcomes == {0, 2}
    assert line > 50


def ended(core: EngineCore) -> list[Request]:
    """Run to the end. Returns what steps return of requests that have ended."""
    found = []
    while core.has_unfinished_requests():
        found += [request for request in core.step() if request.state is RequestState.FINISHED]
    return found


@pytest.mark.parametrize("what", ["a", "a/0", "b", "all"])
def test_ctrl_c_at_any_line_of_an_abort_ends_all_that_it_was_to_end_or_none(what):
    """One sample runs, the others are swapped out or wait."""
    line, outcomes, interrupt = 0, set(), CtrlC()
    while not interrupt.lines:
        line += 1
        core, firsts = make_small("swap", diary := Diary())
        for first in firsts:
            core.add(first)
        core.step()
        core.step()
        before = sets_of(core)
        calls = {
            "a": lambda core=core: core.abort("a"),
            "a/0": lambda core=core: core.abort("a", 0),
            "b": lambda core=core: core.abort("b"),
            "all": core.abort_all,
        }
        after = {
            "a": ({"b"}, {"b"}),
            "a/0": ({"a/1", "b"}, {"a", "b"}),
            "b": ({"a", "a/1"}, {"a"}),
            "all": (set(), set()),
        }
        interrupt = CtrlC(line)
        try:
            interrupt.trace(calls[what])
            assert interrupt.lines
        except KeyboardInterrupt:
            outcomes.add(sets_of(core) == before)
        assert sets_of(core) in (before, after[what])
        core.scheduler.check_invariants()
        ended(core)
        assert core.scheduler.pool.num_free == core.scheduler.pool.num_usable
        assert Counter(event.request for event in diary.events if event.kind == "finished") == Counter(
            sample for first in firsts for sample in first.samples
        )
    assert outcomes == {True, False}


@pytest.mark.parametrize("handler", ["ignored", "counts"])
def test_a_signal_that_raises_nothing_disturbs_nothing(handler):
    """Ignored, or for a handler of the caller's, which is called once for each signal."""
    counting = Handler()
    core, firsts = make_small("swap", diary := Diary())
    for first in firsts:
        core.add(first)
    signal.signal(signal.SIGINT, signal.SIG_IGN if handler == "ignored" else counting)
    returned, num_signals = Counter[Request](), 0
    while core.has_unfinished_requests():
        interrupt = CtrlC(*[100] * 2)
        returned.update(r for r in interrupt.trace(core.step) if r.state is RequestState.FINISHED)
        num_signals += 2 - len(interrupt.lines)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    check_all(core, firsts, returned, diary)
    assert num_signals > 4
    assert handler == "ignored" or num_signals / 2 <= counting.num_calls <= num_signals
    assert len(diary.steps) == len(diary.plans)


def test_an_engine_in_another_thread_is_not_disturbed():
    """Ctrl-C comes out in the main thread while the other one executes a step."""
    core, firsts = make_small("swap", diary := Diary())
    for first in firsts:
        core.add(first)
    execute, started, may_go_on = core.runner.execute, threading.Event(), threading.Event()

    def wait_and_execute(plan):
        started.set()
        may_go_on.wait()
        return execute(plan)

    core.runner.execute = wait_and_execute
    returned = []
    thread = threading.Thread(target=lambda: returned.extend(ended(core)))
    thread.start()
    started.wait()
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()
    may_go_on.set()
    thread.join()
    check_all(core, firsts, Counter(returned), diary)


def test_ctrl_c_at_any_line_of_an_engines_step_loses_no_output(byte_model):
    """What a step was to return, the next one returns. Texts, log probabilities and ends are those of an undisturbed
    run."""
    engine = eager(byte_model, num_blocks=12, max_num_batched_tokens=8)
    params = greedy(4, logprobs=1, stop=["zz"]), SamplingParams(n=2, seed=1, max_tokens=3, stop=["yy"])

    def run(*lines: int) -> tuple[dict[str, RequestOutput], bool]:
        engine.add_request("abcd", params[0], "a")
        engine.add_request("abcdefgh", params[1], "b")
        interrupt, last = CtrlC(*lines, files=["engine.py", "core.py", "text.py", "interrupts.py", "contextlib"]), {}
        while engine.has_unfinished_requests():
            try:
                for output in interrupt.trace(engine.step):
                    assert output.request_id not in last or not last[output.request_id].finished
                    last[output.request_id] = output
            except KeyboardInterrupt:
                pass
            check_invariants(engine)
        return {name: replace(output, num_cached_tokens=0) for name, output in last.items()}, not interrupt.lines

    undisturbed, _ = run()
    assert all(output.finished for output in undisturbed.values())
    line, reached = 1, True
    while reached:
        outputs, reached = run(line)
        assert outputs == undisturbed
        line += 7
    assert line > 300
