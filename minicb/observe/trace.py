"""Traces of runs, in Chrome's trace-event format: https://ui.perfetto.dev opens them, and so does chrome://tracing.

    traces = [Trace("fcfs"), Trace("sjf")]     # each the observer of one run
    write_trace("trace.json", traces)          # at any time

Each run is a process, each request a track: queued, its prefill chunks, decode for as long as nothing comes between,
swapped out. Arrows lead from a preemption to what the request does when it is back. Counters show the steps.

A file has about 900 bytes for each request and, of counters, 100 to 300 for each step. Perfetto opens some 100 MB; to
be looked at, 1,000 requests are plenty. The format: "Trace Event Format", Google, 2016.
"""

import copy
import json
import math
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any, NamedTuple

from minicb.plan import Event, Observer, Step
from minicb.request import Request

AWAY = {"swap": "swapped out", "recompute": "preempted, to be recomputed"}
INTERRUPTED = "interrupted, to be recomputed"  # a step broke off, and all blocks were taken back
ALL = -1  # in place of a track: what is about the whole run


class Mark(NamedTuple):
    """An event of the file before it is written."""

    phase: str  # X: slice, i: instant, C: counter, s and f: where an arrow begins and ends
    time: float  # seconds on the engine's clock
    track: int
    name: str
    end: float = 0.0  # X, and s and f: of the slice that the arrow is about
    args: dict[str, Any] | None = None
    arrow: int = 0  # s, f: which


class Track:
    """What is kept of a request: where its track has got to. Its slices follow one another and never overlap."""

    def __init__(self, request: Request, number: int):
        self.number, self.request_id, self.arrival = number, request.request_id, request.arrival
        self.waits: tuple[str, float, dict[str, Any]] | None = None  # for what, since when
        self.decode: tuple[float, float, int] | None = None  # begin, end so far, tokens
        self.last: tuple[float, float] | None = None  # begin and end of its last slice
        self.arrow: int | None = None  # one that has left, and arrives with the next chunk


class Trace(Observer):
    """Records a run of one engine, which the file will call `name`. It may be added at any time; requests that have
    ended are not held."""

    def __init__(self, name: str):
        self.name = name
        self.tracks: list[tuple[str, int]] = []  # request_id and arrival number of each
        self.num_arrows = 0
        self._marks: list[Mark] = []
        self._live: dict[Request, Track] = {}
        self._chunks: dict[Request, tuple[int, int, bool]] = {}  # of the step that runs: start, length, is it a decode
        self._begin = 0.0  # of that step
        self._now = -math.inf  # the latest time that was seen
        self._counters: dict[str, dict[str, int]] = {}  # as they are now
        self._num_blocks = 0
        self._arrived: set[int] = set()  # arrows

    # ------------------------------------------------------------------ what happens

    def on_event(self, event: Event) -> None:
        time, kind, request, details = event
        track = self._track(request)
        self._now = max(self._now, time)
        if kind == "queued":
            track.waits = ("queued", time, {"prompt tokens": request.num_prompt_tokens})
        elif kind == "started":
            args = {"prompt tokens": details["num_prompt_tokens"], "cached tokens": details["num_cached_tokens"]}
            track.waits = ("queued", request.arrival_time, args)
            self._end_wait(track, time)
        elif kind == "preempted":
            self._end_decode(track)
            self._end_wait(track, time)
            self._leave(track)
            track.waits = (AWAY[details["mode"]], time, {})
        elif kind == "returned":
            self._end_decode(track)
            if track.waits is None and track.last is not None:  # nobody said that it had to stop
                track.waits = (INTERRUPTED, track.last[1], {})
            self._end_wait(track, time)
        elif kind == "finished":
            self._finish(request, track, time, details["finish_reason"])

    def on_plan(self, step: Step) -> None:
        # What is left of an earlier step broke off, and never was.
        self._begin = self._now = step.begin
        self._chunks = {chunk.request: (chunk.start, chunk.length, chunk.is_decode) for chunk in step.plan.chunks}
        num_decodes = sum(decodes for _, _, decodes in self._chunks.values())
        num_tokens = sum(length for _, length, _ in self._chunks.values())
        self._num_blocks = step.num_blocks
        self._count(step.begin, step.num_running, step.num_waiting, step.num_free_blocks, num_decodes, num_tokens)

    def on_step(self, step: Step) -> None:
        self._now = step.end
        for request in list(self._chunks):  # of those that have not ended
            self._end_chunk(request, self._track(request), step.end)

    def _finish(self, request: Request, track: Track, time: float, reason: str) -> None:
        if reason != "abort" and request in self._chunks:
            self._end_chunk(request, track, time)
        self._chunks.pop(request, None)  # an abort comes between steps, so that one broke off
        self._end_decode(track)
        self._end_wait(track, time)
        self._marks.append(Mark("i", time, track.number, f"finished: {reason}"))
        del self._live[request]
        if not self._live and self._counters:
            self._count(time, 0, 0, self._num_blocks, 0, 0)

    # ------------------------------------------------------------------ slices, arrows, counters

    def _track(self, request: Request) -> Track:
        track = self._live.get(request)
        if track is None:
            track = self._live[request] = Track(request, len(self.tracks))
            self.tracks.append((track.request_id, track.arrival))
        return track

    def _end_chunk(self, request: Request, track: Track, end: float) -> None:
        start, length, decodes = self._chunks.pop(request)
        if not decodes:
            self._end_decode(track)
            self._add_slice(track, "prefill", self._begin, end, {"tokens": length, "start": start})
            self._arrive(track)
        elif track.decode is None:
            track.decode = (self._begin, end, length)
        else:
            begin, _, num_tokens = track.decode
            track.decode = (begin, end, num_tokens + length)

    def _end_decode(self, track: Track) -> None:
        if track.decode is not None:
            begin, end, num_tokens = track.decode
            track.decode = None
            self._add_slice(track, "decode", begin, end, {"tokens": num_tokens})
            self._arrive(track)

    def _end_wait(self, track: Track, time: float) -> None:
        if track.waits is not None:
            name, begin, args = track.waits
            track.waits = None
            self._add_slice(track, name, begin, time, args)

    def _add_slice(self, track: Track, name: str, begin: float, end: float, args: dict[str, Any]) -> None:
        begin = min(begin, end)  # a request may have been due later than it came
        if track.last is not None:
            begin = max(begin, track.last[1])
        end = max(begin, end)
        track.last = (begin, end)
        self._marks.append(Mark("X", begin, track.number, name, end, args))

    def _leave(self, track: Track) -> None:
        """An arrow begins with what the request did last, if anything was seen of that."""
        if track.last is not None and track.arrow is None:
            begin, end = track.last
            track.arrow = self.num_arrows
            self.num_arrows += 1
            self._marks.append(Mark("s", begin, track.number, "preemption", end, arrow=track.arrow))

    def _arrive(self, track: Track) -> None:
        """It ends with the first slice after the return, which may be long after it, or never come."""
        if track.arrow is not None and track.last is not None:
            begin, end = track.last
            self._marks.append(Mark("f", begin, track.number, "preemption", end, arrow=track.arrow))
            self._arrived.add(track.arrow)
            track.arrow = None

    def _count(
        self, time: float, num_running: int, num_waiting: int, num_free_blocks: int, num_decodes: int, num_tokens: int
    ) -> None:
        """Counters are written when they change, and hold until they do."""
        counters = {
            "running": {"requests": num_running},
            "waiting": {"requests": num_waiting},
            "free": {"blocks": num_free_blocks},
            "batched tokens": {"prefill": num_tokens - num_decodes, "decode": num_decodes},
        }
        for name, series in counters.items():
            if self._counters.get(name) != series:
                self._marks.append(Mark("C", time, ALL, name, args=series))
        self._counters = counters

    # ------------------------------------------------------------------ the file

    def marks(self) -> list[Mark]:
        """All of the file so far, each track in order. What hasn't ended does so where it is now, and of arrows
        there are only those that have arrived."""
        ended = copy.copy(self)
        ended._marks, ended._arrived = list(self._marks), set(self._arrived)
        for track in self._live.values():
            track = copy.copy(track)
            ended._end_decode(track)
            ended._end_wait(track, self._now)
        return [mark for mark in ended._marks if mark.phase != "s" or mark.arrow in ended._arrived]

    def events(self, pid: int, first_tid: int, first_id: int) -> list[dict[str, Any]]:
        """The events of the file, in order, in microseconds since the first. Whole ones: then slices that touch do
        so in every reader, however it rounds."""
        marks = self.marks()
        zero = min((mark.time for mark in marks), default=0.0)
        events: list[dict[str, Any]] = []
        for phase, time, track, name, end, args, arrow in marks:
            begin, end = round((time - zero) * 1e6), round((end - zero) * 1e6)
            event: dict[str, Any] = {"ph": phase, "pid": pid, "ts": begin, "name": name}
            if track != ALL:
                event |= {"tid": first_tid + track, "cat": "request"}
            if phase == "X":
                event["dur"] = end - begin
            elif phase == "i":
                event["s"] = "t"  # belongs to its track
            elif phase == "s":
                event |= {"id": first_id + arrow, "ts": max(begin, end - 1)}  # at the end, but within the slice
            elif phase == "f":
                event |= {"id": first_id + arrow, "bp": "e"}  # to the slice around it, not the next
            if args is not None:
                event["args"] = args
            events.append(event)
        return [*self._names(pid, first_tid), *sorted(events, key=lambda event: event["ts"])]

    def _names(self, pid: int, first_tid: int) -> Iterator[dict[str, Any]]:
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": self.name}}
        yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
        for tid, (request_id, arrival) in enumerate(self.tracks, start=first_tid):
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": request_id}}
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": arrival}}


def write_trace(path: str | PathLike, traces: Sequence[Trace]) -> None:
    """Write the runs into one file, each from its own beginning on."""
    # No number is 0, no two tracks of the file have the same, nor a track and a process: there readers differ.
    first_tid, first_id = len(traces) + 1, 1
    separator = "\n"
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        for pid, trace in enumerate(traces, start=1):
            for event in trace.events(pid, first_tid, first_id):
                file.write(separator + json.dumps(event, separators=(",", ":"), allow_nan=False))
                separator = ",\n"
            first_tid += len(trace.tracks)
            first_id += trace.num_arrows
        file.write("\n]}\n")
