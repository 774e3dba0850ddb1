"""Traces: the files against the trace-event format, and one run event by event."""

import gc
import json
import math
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_core import (
    Clock,
    Diary,
    RandomRun,
    make_core,
    make_request,
    random_run,
    run_to_end,
    try_to,
    two_clients,
)

from minicb.core import EngineCore
from minicb.observe.metrics import Metrics
from minicb.observe.trace import Trace, write_trace
from minicb.request import Request

# ---------------------------------------------------------------------------- the format

# What "Trace Event Format" asks of each kind of event that occurs here, by phase.
REQUIRED = {
    "M": {"ph", "pid", "name", "args"},
    "X": {"ph", "pid", "tid", "name", "cat", "ts", "dur"},
    "i": {"ph", "pid", "tid", "name", "cat", "ts", "s"},
    "C": {"ph", "pid", "name", "ts", "args"},
    "s": {"ph", "pid", "tid", "name", "cat", "ts", "id"},
    "f": {"ph", "pid", "tid", "name", "cat", "ts", "id", "bp"},
}
OPTIONAL = {"M": {"tid"}, "X": {"args"}}
METADATA = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def check_event(event: dict[str, Any]) -> None:
    phase = event["ph"]
    assert REQUIRED[phase] <= set(event) <= REQUIRED[phase] | OPTIONAL.get(phase, set()), event
    for key in ("pid", "tid", "ts", "dur", "id"):
        assert type(event.get(key, 0)) is int, event  # whole microseconds, so that no reader rounds
        assert event.get(key, 0) >= 0, event
    assert all(isinstance(event.get(key, ""), str) for key in ("name", "cat", "s", "bp")), event
    assert event["name"]
    assert isinstance(event.get("args", {}), dict)
    if phase == "M":
        key, kind = METADATA[event["name"]]
        assert list(event["args"]) == [key]
        assert isinstance(event["args"][key], kind)
        assert ("tid" in event) == event["name"].startswith("thread")
    elif phase == "C":
        assert event["args"]
        assert all(type(value) is int and value >= 0 for value in event["args"].values())
    elif phase == "i":
        assert event["s"] in ("g", "p", "t")
    elif phase == "f":
        assert event["bp"] == "e"


def enclosing(slices: list[dict[str, Any]], arrow: dict[str, Any]) -> dict[str, Any]:
    """The slice that a reader gives an end of an arrow to: of those of its track around it the last to begin, in the
    order of the file."""
    around = [
        event
        for event in slices
        if (event["pid"], event["tid"]) == (arrow["pid"], arrow["tid"])
        and event["ts"] <= arrow["ts"] <= event["ts"] + event["dur"]
    ]
    assert around, f"{arrow} is in no slice"
    return around[-1]


def check_file(path: Path) -> list[dict[str, Any]]:
    """All that the format asks for, and what Perfetto does besides; returns the events."""

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs), pairs
        return dict(pairs)

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    data = json.loads(path.read_text(), object_pairs_hook=no_duplicates, parse_constant=no_constant)
    assert set(data) == {"traceEvents", "displayTimeUnit"}
    assert data["displayTimeUnit"] in ("ms", "ns")
    events = data["traceEvents"]
    for event in events:
        check_event(event)

    # Each track has one name and place, belongs to one process, and its number is no process's.
    pids = {event["pid"] for event in events}
    tids = {(event["tid"], event["pid"]) for event in events if "tid" in event}
    assert len({tid for tid, _ in tids}) == len(tids)
    assert not {tid for tid, _ in tids} & pids
    assert 0 not in pids | {tid for tid, _ in tids}
    names = Counter((event["pid"], event.get("tid"), event["name"]) for event in events if event["ph"] == "M")
    assert set(names.values()) <= {1}
    assert {(tid, pid) for pid, tid, name in names if name == "thread_name"} == tids
    assert {pid for pid, _, name in names if name == "process_name"} == pids

    # Events of a process are sorted by time. A counter has the same series in all of its events.
    for pid in pids:
        times = [event["ts"] for event in events if event["pid"] == pid and event["ph"] != "M"]
        assert times == sorted(times)
        assert not times or times[0] == 0
    series = {(event["pid"], event["name"], *event["args"]) for event in events if event["ph"] == "C"}
    assert len({key[:2] for key in series}) == len(series)

    # Slices of a track nest, or, as here, follow one another.
    slices = [event for event in events if event["ph"] == "X"]
    ends: dict[int, int] = {}
    for event in slices:
        assert event["ts"] >= ends.get(event["tid"], 0), f"{event} begins before {ends[event['tid']]}"
        ends[event["tid"]] = event["ts"] + event["dur"]

    # Each arrow begins and ends once, in this order, in two slices.
    arrows: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], []).append(event)
    for begin, end in arrows.values():
        assert (begin["ph"], end["ph"]) == ("s", "f")
        assert (begin["name"], begin["cat"], begin["tid"]) == (end["name"], end["cat"], end["tid"])
        source, target = enclosing(slices, begin), enclosing(slices, end)
        assert source is not target
        assert target["ts"] == end["ts"]
        assert target["name"] in ("prefill", "decode")
    return events


def tracks(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The events of each track, by its name; a run has each name once here."""
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    assert len(found) == len(names)
    for event in events:
        if event["ph"] in "Xisf":
            found[names[event["tid"]]].append(event)
    return found


def written(path: Path, *traces: Trace) -> list[dict[str, Any]]:
    write_trace(path, traces)
    return check_file(path)


def short(events: list[dict[str, Any]]) -> list[tuple]:
    """(name, begin, end) in seconds of slices, (name, time) of instants."""
    return [
        (event["name"], event["ts"] / 1e6, *([(event["ts"] + event["dur"]) / 1e6] if event["ph"] == "X" else []))
        for event in events
        if event["ph"] in "Xi"
    ]


# ---------------------------------------------------------------------------- one run, event by event


def traced(*requests: Request) -> tuple[Trace, EngineCore]:
    """A trace of a core that has these requests."""
    trace = Trace("toy")
    core = make_core(observers=[trace])
    for request in requests:
        core.add(request)
    return trace, core


def test_a_run_event_by_event(tmp_path):
    """test_core.two_clients, to be read beside this. a was due at 9.5, which is 0 here; 18.5 is 9 s."""
    trace = Trace("toy")
    two_clients([trace])
    events = written(tmp_path / "trace.json", trace)
    a, b, c, d = 2, 3, 4, 5  # after the process, which is 1

    def meta(name: str, value: str | int, tid: int | None = None) -> dict[str, Any]:
        key = "name" if name.endswith("_name") else "sort_index"
        return {"ph": "M", "pid": 1, "name": name, "args": {key: value}} | ({} if tid is None else {"tid": tid})

    def event(phase: str, seconds: float, tid: int, name: str, **more: Any) -> dict[str, Any]:
        return {"ph": phase, "pid": 1, "tid": tid, "ts": round(seconds * 1e6), "name": name, "cat": "request"} | more

    def piece(begin: float, end: float, tid: int, name: str, **args: int) -> dict[str, Any]:
        return event("X", begin, tid, name, dur=round((end - begin) * 1e6), args=args)

    def queued(begin: float, end: float, tid: int, num_prompt_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
        counts = {"prompt tokens": num_prompt_tokens, "cached tokens": num_cached_tokens}
        return event("X", begin, tid, "queued", dur=round((end - begin) * 1e6), args=counts)

    def counter(seconds: float, name: str, **series: int) -> dict[str, Any]:
        return {"ph": "C", "pid": 1, "ts": round(seconds * 1e6), "name": name, "args": series}

    expected = [
        *(meta("process_name", "toy"), meta("process_sort_index", 1)),
        *(meta("thread_name", "a", a), meta("thread_sort_index", 0, a)),
        *(meta("thread_name", "b", b), meta("thread_sort_index", 1, b)),
        *(meta("thread_name", "c", c), meta("thread_sort_index", 2, c)),
        *(meta("thread_name", "d", d), meta("thread_sort_index", 3, d)),
        # Step 0
        queued(0, 0.5, a, 5, 0),
        queued(0.5, 0.5, b, 3, 0),
        counter(0.5, "running", requests=2),
        counter(0.5, "waiting", requests=0),
        counter(0.5, "free", blocks=0),
        counter(0.5, "batched tokens", prefill=8, decode=0),
        piece(0.5, 2.5, a, "prefill", tokens=5, start=0),
        piece(0.5, 2.5, b, "prefill", tokens=3, start=0),
        queued(1.5, 5.5, c, 2, 0),
        # Step 1
        counter(2.5, "waiting", requests=1),
        counter(2.5, "batched tokens", prefill=0, decode=2),
        piece(2.5, 3.5, b, "decode", tokens=1),
        piece(2.5, 4.5, a, "decode", tokens=2),
        # Step 2, which preempts b. The arrow begins inside b's last slice, because that one's end is the next slice's begin.
        event("s", 3.499999, b, "preemption", id=1),
        counter(3.5, "running", requests=1),
        counter(3.5, "waiting", requests=2),
        counter(3.5, "free", blocks=1),
        counter(3.5, "batched tokens", prefill=0, decode=1),
        piece(3.5, 5.5, b, "swapped out"),
        event("i", 4.5, a, "finished: length", s="t"),
        # Step 3
        counter(5.5, "running", requests=2),
        counter(5.5, "waiting", requests=0),
        counter(5.5, "batched tokens", prefill=2, decode=1),
        piece(5.5, 8.5, c, "prefill", tokens=2, start=0),
        piece(5.5, 9, b, "decode", tokens=2),
        event("f", 5.5, b, "preemption", id=1, bp="e"),
        # Step 4
        counter(8.5, "waiting", requests=1),
        counter(8.5, "free", blocks=0),
        counter(8.5, "batched tokens", prefill=0, decode=2),
        piece(8.5, 9, c, "decode", tokens=1),
        queued(8.5, 9, d, 3, 2),
        event("i", 9, b, "finished: length", s="t"),
        event("i", 9, c, "finished: abort", s="t"),
        # Step 5
        counter(9, "running", requests=1),
        counter(9, "waiting", requests=0),
        counter(9, "free", blocks=3),
        counter(9, "batched tokens", prefill=1, decode=0),
        piece(9, 9.5, d, "prefill", tokens=1, start=2),
        event("i", 9.5, d, "finished: error", s="t"),
        # Nothing is left.
        counter(9.5, "running", requests=0),
        counter(9.5, "free", blocks=5),
        counter(9.5, "batched tokens", prefill=0, decode=0),
    ]

    def by_time(events: list[dict[str, Any]]) -> list[tuple]:
        """What happens at one time may come in any order; check_file sees to the rest."""
        return sorted((event.get("ts", -1), json.dumps(event, sort_keys=True)) for event in events)

    assert by_time(events) == by_time(expected)


def test_several_runs_are_several_processes_each_from_its_beginning(tmp_path):
    traces = [Trace(name) for name in ("swap", "nothing", "swap")]
    for trace, seconds in zip(traces[::2], (100.0, 5.0), strict=True):
        core = make_core(num_usable=4, num_host_blocks=9, mode="swap", now=seconds, observers=[trace])
        for name in "ab":
            core.add(make_request(name, 3, 4))
        run_to_end(core)
    events = written(tmp_path / "trace.json", *traces)
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["swap", "nothing", "swap"]

    def of(pid: int) -> list[tuple]:
        return [(e["ph"], e["name"], e.get("ts"), e.get("dur"), e.get("args")) for e in events if e["pid"] == pid]

    assert of(1)[2:] == of(3)[2:]  # all but names and places
    assert [phase for phase, *_ in of(2)] == ["M", "M"]
    assert {event["ph"] for event in events} == set("MXCisf")
    assert len({event["id"] for event in events if event["ph"] == "s"}) == 2


def test_a_file_without_runs_is_a_file(tmp_path):
    assert written(tmp_path / "trace.json") == []


def test_names_may_be_anything(tmp_path):
    name = 'quote " newline \n <tag> \\ \ud800 é 漢'
    trace = Trace(name)
    core = make_core(observers=[trace])
    core.add(make_request("x"))
    core.add(make_request(name))
    run_to_end(core)
    events = written(tmp_path / "trace.json", trace)
    assert [e["args"]["name"] for e in events if e["name"].endswith("_name")] == [name, "x", name]


def test_an_id_that_is_used_again_is_another_track(tmp_path):
    trace = Trace("toy")
    core = make_core(observers=[trace])
    for _ in range(2):
        core.add(make_request("a", 1, 1))
        run_to_end(core)
    events = written(tmp_path / "trace.json", trace)
    assert [(e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"] == [(2, "a"), (3, "a")]
    assert [(e["tid"], e["ts"]) for e in events if e["name"] == "prefill"] == [(2, 0), (3, 1_000_000)]


# ---------------------------------------------------------------------------- what a track shows


def test_a_prefill_in_chunks_and_then_its_decode_in_one(tmp_path):
    trace = Trace("toy")
    core = make_core(budget=4, observers=[trace])
    core.add(make_request("a", 9, 4))
    run_to_end(core)
    track = tracks(written(tmp_path / "trace.json", trace))["a"]
    assert [(e["name"], e.get("args")) for e in track] == [
        ("queued", {"prompt tokens": 9, "cached tokens": 0}),
        ("prefill", {"tokens": 4, "start": 0}),
        ("prefill", {"tokens": 4, "start": 4}),
        ("prefill", {"tokens": 1, "start": 8}),  # one token, but of the prompt
        ("decode", {"tokens": 3}),
        ("finished: length", None),
    ]
    assert short(track)[-2:] == [("decode", 3.0, 6.0), ("finished: length", 6.0)]


def test_recompute(tmp_path):
    """Blocks of 2, 6 of them: both have 6 tokens, 3 blocks, when a needs a fourth: b is dropped, and back when a has
    ended, which is after 5 tokens. Then it prefills its 4 + 3 tokens again, 5 and 2 in two steps."""
    trace = Trace("toy")
    core = make_core(num_usable=6, budget=8, observers=[trace])
    core.add(make_request("a", 4, 5))
    core.add(make_request("b", 4, 5))
    core.step()
    core.scheduler.maximum = core.scheduler.maximum._replace(max_num_batched_tokens=5)
    run_to_end(core)
    track = tracks(written(tmp_path / "trace.json", trace))["b"]
    assert short(track) == [
        ("queued", 0, 0),
        ("prefill", 0, 1),
        ("decode", 1, 3),
        ("preempted, to be recomputed", 3, 5),
        ("prefill", 5, 6),
        ("prefill", 6, 7),
        ("decode", 7, 8),
        ("finished: length", 8),
    ]
    assert [e["args"] for e in track if e["name"] == "prefill"][1:] == [
        {"tokens": 5, "start": 0},
        {"tokens": 2, "start": 5},
    ]
    assert [(e["ph"], e["ts"]) for e in track if e["ph"] in "sf"] == [("s", 2_999_999), ("f", 5_000_000)]


def test_a_prefill_of_a_dropped_output_is_a_prefill_whatever_its_length(tmp_path):
    """As before, but with one token per step: 6 chunks of one token are prefills, and the 7th counts as a decode."""
    trace = Trace("toy")
    core = make_core(num_usable=6, budget=8, observers=[trace])
    core.add(make_request("a", 4, 5))
    core.add(make_request("b", 4, 5))
    core.step()
    while not core.scheduler.requests["b"].num_preemptions:
        core.step()
    core.scheduler.maximum = core.scheduler.maximum._replace(max_num_batched_tokens=1)
    run_to_end(core)
    track = tracks(written(tmp_path / "trace.json", trace))["b"]
    again = [(event["name"], event["args"]) for event in track if event["ph"] == "X"][4:]
    assert again == [("prefill", {"tokens": 1, "start": start}) for start in range(6)] + [("decode", {"tokens": 2})]


def test_no_arrow_where_there_is_no_return(tmp_path):
    """b is aborted while it is swapped out, or the file written; c comes back, and the file is written then."""
    trace = Trace("toy")
    core = make_core(num_usable=4, num_host_blocks=9, mode="swap", observers=[trace])
    for name in "ab":
        core.add(make_request(name, 3, 6))
    while not core.scheduler.requests["b"].host_blocks:
        core.step()
    before = tracks(written(tmp_path / "trace.json", trace))["b"]
    assert short(before)[-2:] == [("decode", 1, 2), ("swapped out", 2, 3)]  # until now
    while core.scheduler.requests["b"].host_blocks:
        core.step()
    after = tracks(written(tmp_path / "trace.json", trace))
    assert [e["ph"] for e in after["b"] if e["ph"] in "sf"] == ["s", "f"]
    assert short(after["b"])[-2][0] == "swapped out"
    assert short(after["b"])[-1][0] == "decode"
    assert "sf" not in "".join(e["ph"] for e in before)

    trace = Trace("toy")
    core = make_core(num_usable=4, num_host_blocks=9, mode="swap", observers=[trace])
    for name in "ab":
        core.add(make_request(name, 3, 6))
    while not core.scheduler.requests["b"].host_blocks:
        core.step()
    core.abort("b")
    run_to_end(core)
    events = written(tmp_path / "trace.json", trace)
    assert short(tracks(events)["b"])[-2:] == [("swapped out", 2, 3), ("finished: abort", 3)]
    assert not [event for event in events if event["ph"] in "sf"]


@pytest.mark.parametrize(("mode", "away"), [("swap", "swapped out"), ("recompute", "preempted, to be recomputed")])
def test_writing_before_the_end_changes_nothing(tmp_path, mode, away):
    """What hasn't ended does so now in that file, and goes on in the next."""
    trace, other = Trace("toy"), Trace("toy")
    core = make_core(num_usable=6, num_host_blocks=9, mode=mode, max_num_seqs=2, budget=3, observers=[trace, other])
    for name in "abc":
        core.add(make_request(name, 4, 5))
    last_slices = set()
    while core.has_unfinished_requests():
        core.step()
        events = written(tmp_path / "trace.json", trace)
        assert max(event["ts"] + event.get("dur", 0) for event in events if event["ph"] != "M") == core.clock.now * 1e6
        for track in tracks(events).values():
            slices = [event for event in track if event["ph"] == "X"]
            last_slices.add(slices[-1]["name"])
    assert last_slices == {"queued", "prefill", "decode", away}
    assert written(tmp_path / "trace.json", trace) == written(tmp_path / "other.json", other)


def test_a_run_that_has_not_begun(tmp_path):
    """Times are large, as those of a real clock may be."""
    trace = Trace("toy")
    core = make_core(now=1e6, observers=[trace])
    core.add(make_request("a"), 1e6 - 2)
    core.add(make_request("b"), 1e6)
    found = tracks(written(tmp_path / "trace.json", trace))
    assert [short(found[name]) for name in "ab"] == [[("queued", 0, 2)], [("queued", 2, 2)]]


def test_now_is_the_latest_time_whatever_the_clock_began_with(tmp_path):
    """Less than 0 here. b was due before a, and comes after it."""
    trace = Trace("toy")
    core = make_core(now=-100.0, observers=[trace])
    core.add(make_request("a"), -103.0)
    core.add(make_request("c"), -100.0)
    core.add(make_request("b"), -105.0)
    found = tracks(written(tmp_path / "trace.json", trace))
    assert [short(found[name]) for name in "abc"] == [[("queued", 2, 5)], [("queued", 0, 5)], [("queued", 5, 5)]]


def test_a_request_that_comes_before_it_is_due(tmp_path):
    trace = Trace("toy")
    core = make_core(observers=[trace])
    core.add(make_request("a", 1, 2), arrival_time=7.0)
    run_to_end(core)
    track = tracks(written(tmp_path / "trace.json", trace))["a"]
    assert short(track) == [("queued", 0, 0), ("prefill", 0, 1), ("decode", 1, 2), ("finished: length", 2)]


def test_a_trace_that_comes_late_shows_what_it_sees(tmp_path):
    """a decodes, b is swapped out, c waits."""
    trace = Trace("toy")
    core = make_core(num_usable=4, num_host_blocks=9, mode="swap", max_num_seqs=2)
    for name in "abc":
        core.add(make_request(name, 3, 6))
    while not core.scheduler.requests["b"].host_blocks:
        core.step()
    core.observers.append(trace)
    run_to_end(core)
    events = written(tmp_path / "trace.json", trace)
    found = tracks(events)
    assert list(found) == ["a", "b", "c"]  # as they were seen, which is as they came
    assert short(found["a"]) == [("decode", 3, 6), ("finished: length", 6)]
    assert short(found["b"])[0][:2] == ("decode", 6)  # of what was before nothing is known
    assert short(found["c"])[0] == ("queued", 0, 10)
    assert [e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"] == [0, 1, 2]


# ---------------------------------------------------------------------------- steps that fail


def test_a_step_that_fails_computes_nothing(tmp_path):
    """a's first decode fails after 0.5 s, and is done by the next step."""
    trace, core = traced(make_request("a", 1, 3))
    core.step()
    core.runner.break_off = [0.5]
    run_to_end(core)
    track = tracks(written(tmp_path / "trace.json", trace))["a"]
    assert short(track) == [("queued", 0, 0), ("prefill", 0, 1), ("decode", 1.5, 3.5), ("finished: length", 3.5)]
    assert track[-2]["args"] == {"tokens": 2}


def test_a_swap_that_fails_is_a_preemption_all_the_same(tmp_path):
    """b is swapped out by step 2, which fails, so its KV is computed again once it returns."""
    trace = Trace("toy")
    core = make_core(num_usable=4, num_host_blocks=9, mode="swap", observers=[trace])
    for name in "ab":
        core.add(make_request(name, 3, 4))
    core.step()
    core.step()
    core.runner.break_off = [0.5]
    run_to_end(core)
    track = tracks(written(tmp_path / "trace.json", trace))["b"]
    assert [name for name, *_ in short(track)] == [
        *("queued", "prefill", "decode", "swapped out", "prefill", "decode", "finished: length")
    ]
    assert [event["ph"] for event in track if event["ph"] in "sf"] == ["s", "f"]


def test_an_abort_after_a_step_that_failed_ends_what_was_there_before_it(tmp_path):
    """The chunk of that step was never computed."""
    trace, core = traced(make_request("a", 1, 3), make_request("b", 1, 3))
    core.step()
    core.runner.break_off = [0.5]
    try_to(core.step)
    core.abort("a")
    run_to_end(core)
    found = tracks(written(tmp_path / "trace.json", trace))
    assert short(found["a"]) == [("queued", 0, 0), ("prefill", 0, 1), ("finished: abort", 1.5)]
    assert short(found["b"])[-2:] == [("decode", 1.5, 3.5), ("finished: length", 3.5)]


def test_without_a_step_there_are_no_counters(tmp_path):
    trace, core = traced(make_request("a"))
    core.clock.now = 1.0
    core.abort("a")
    events = written(tmp_path / "trace.json", trace)
    assert short(tracks(events)["a"]) == [("queued", 0, 1), ("finished: abort", 1)]
    assert "C" not in {event["ph"] for event in events}


# ---------------------------------------------------------------------------- memory and size


def test_requests_that_have_ended_are_not_held():
    """They end by length, or by abort before they start, while they run, and after a step that failed."""
    trace = Trace("toy")
    core = make_core(num_usable=6, observers=[trace])
    refs = {}
    for name in "abcd":
        core.add(request := make_request(name, 2, 3))
        refs[name] = weakref.ref(request)
    del request
    core.abort("d")
    core.step()
    core.abort("c")
    core.runner.break_off = [1.0]
    try_to(core.step)
    core.abort("b")
    gc.collect()
    assert [name for name, ref in refs.items() if ref() is not None] == ["a"]
    run_to_end(core)
    gc.collect()
    assert refs["a"]() is None
    assert [name for name, _ in trace.tracks] == ["a", "b", "c", "d"]


def test_a_file_grows_with_requests_and_steps_and_not_with_tokens(tmp_path):
    """What the docstring promises of its size."""
    sizes = []
    for num_requests, max_tokens in ((100, 20), (200, 20), (100, 40)):
        trace = Trace("toy")
        core = make_core(num_usable=4000, budget=512, max_num_seqs=16, observers=[trace])
        for number in range(num_requests):
            core.add(make_request(str(number), 8, max_tokens))
        run_to_end(core)
        write_trace(tmp_path / "trace.json", [trace])
        sizes.append(((tmp_path / "trace.json").stat().st_size, num_requests, core.num_steps))
    for size, num_requests, num_steps in sizes:
        assert size < 900 * num_requests + 300 * num_steps
    assert sizes[1][0] > 1.9 * sizes[0][0]


# ---------------------------------------------------------------------------- whatever happens


def check_run(drawn: RandomRun, path: Path) -> None:
    trace, diary, metrics = Trace("random"), Diary(), Metrics()
    drawn.run([trace, diary, metrics])
    events = written(path, trace)
    found = tracks(events)
    first = min(event["ts"] for event in events if event["ph"] != "M")
    zero = min([event.time for event in diary.events] + [step.begin for step in diary.plans])
    assert first == 0

    def seconds(event: dict[str, Any]) -> float:
        return zero + event["ts"] / 1e6

    requests = list(dict.fromkeys(event.request for event in diary.events))
    assert list(found) == [request.request_id for request in requests]
    records = {record.request_id: record for record in metrics.finished}
    for request in requests:
        track, record = found[request.request_id], records[request.request_id]
        slices = [event for event in track if event["ph"] == "X"]
        # It is queued from its arrival to its start, or to its end if it never starts, and ends once.
        assert slices[0]["name"] == "queued"
        assert seconds(slices[0]) == pytest.approx(record.arrival_time, abs=1e-5)
        until = record.first_scheduled_time if request.has_started else record.finished_time
        assert seconds(slices[0]) + slices[0]["dur"] / 1e6 == pytest.approx(until)
        ends = [event for event in track if event["ph"] == "i"]
        assert [event["name"] for event in ends] == [f"finished: {request.finish_reason}"]
        assert seconds(ends[0]) == pytest.approx(record.finished_time)
        assert all(event["ts"] + event.get("dur", 0) <= ends[0]["ts"] for event in track)
        # Away as often as it was preempted.
        away = [event["name"] for event in slices if event["name"] in ("swapped out", "preempted, to be recomputed")]
        assert len(away) == request.num_preemptions
        if not drawn.break_offs:
            # With its first token a prefill ends, and every later one a decode computes or, after its output was
            # dropped, a prefill.
            num_tokens = sum(event["args"]["tokens"] for event in slices if event["name"] in ("prefill", "decode"))
            chunks = [c.length for step in diary.steps for c in step.plan.chunks if c.request is request]
            assert num_tokens == sum(chunks)
            returns = sum(event.kind == "returned" and event.request is request for event in diary.events)
            arrows = [event["ph"] for event in track if event["ph"] in "sf"]
            assert arrows == ["s", "f"] * (len(arrows) // 2)
            assert len(arrows) // 2 <= returns <= request.num_preemptions
            if request.finish_reason != "abort" and drawn.settings["batching"] != "static":
                assert len(arrows) // 2 == returns
    # Counters: between its begin and the next change each shows what the step had.
    for name, series, value in (
        ("running", "requests", lambda step: step.num_running),
        ("waiting", "requests", lambda step: step.num_waiting),
        ("free", "blocks", lambda step: step.num_free_blocks),
    ):
        counters = [
            (seconds(event), event["args"][series]) for event in events if event["ph"] == "C" and event["name"] == name
        ]
        for step in diary.plans:
            at = [number for time, number in counters if time <= step.begin + 1e-7]
            same = [value(other) for other in diary.plans if abs(other.begin - step.begin) < 1e-7]
            assert at[-1] in (*same, 0 if name != "free" else step.num_blocks)
    batched = [sum(event["args"].values()) for event in events if event["name"] == "batched tokens"]
    assert max(batched, default=0) == max((sum(c.length for c in s.plan.chunks) for s in diary.plans), default=0)


@given(random_run())
@settings(max_examples=10 * settings.default.max_examples)
def test_whatever_happens_the_file_is_right(tmp_path_factory, drawn):
    check_run(drawn, tmp_path_factory.getbasetemp() / "random.json")


@given(random_run(), st.integers(0, 40))
@settings(max_examples=3 * settings.default.max_examples)
def test_whenever_it_is_written_the_file_is_right(tmp_path_factory, drawn, when):
    """Also by a trace that comes then."""
    path = tmp_path_factory.getbasetemp() / "random.json"
    early, late = Trace("early"), Trace("late")

    class Writer(Diary):
        def _write(self, method, entry):
            super()._write(method, entry)
            if len(self.entries) == when:
                written(path, early, late)

    class Late(Diary):
        def _write(self, method, entry):
            super()._write(method, entry)
            if len(self.entries) >= when:
                getattr(late, method)(entry[1] if type(entry) is tuple else entry)

    drawn.run([early, Late(), Writer()])
    written(path, early, late)


def test_time_that_does_not_pass_and_time_that_is_not_a_whole_number(tmp_path):
    """Steps of 0 s and of fractions of a microsecond: slices still follow one another."""
    trace = Trace("toy")
    durations = [0.0, 1e-7, 3e-7, 1 / 3 * 1e-6, 0.0, 2.5e-6, math.pi * 1e-6] * 4
    core = make_core(
        num_usable=5, num_host_blocks=9, mode="swap", now=1234.5678, durations=durations, observers=[trace]
    )
    assert isinstance(core.clock, Clock)
    for name in "abc":
        core.add(make_request(name, 3, 7))
    run_to_end(core)
    events = written(tmp_path / "trace.json", trace)
    assert {event["ph"] for event in events} == set("MXCisf")
