"""Traces of runs in Chrome's trace-event format, which https://ui.perfetto.dev and chrome://tracing open.

    traces = [Trace("fcfs"), Trace("sjf")]     # each observes one run
    write_trace("trace.json", traces)          # at any time

Each run is a process, and each request a track of slices: queued, each prefill chunk, decodes in a row, swapped out.
Arrows lead from a preemption to the first slice after the return. Counters show what is in each step.

A file has about 900 bytes per request, and 100 to 300 bytes of counters per step. Perfetto opens some 100 MB, but 1,000
requests are plenty to look at. The format: "Trace Event Format", Google, 2016.
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


class TraceEvent(NamedTuple):
    """An event of the file, before it is written."""

    phase: str  # X: slice; i: instant; C: counter; s, f: begin and end of an arrow
    time: float  # seconds on the engine's clock
    track: int | None  # None: it belongs to the run
    name: str
    end: float = 0.0  # X: of the slice; s, f: of the slice that the arrow is attached to
    args: dict[str, Any] | None = None
    arrow: int = 0  # s, f: number of the arrow


class Track:
    """The state of a request's track. Slices of a track follow one another and never overlap."""

    def __init__(self, request: Request, number: int):
        self.number, self.request_id, self.arrival = number, request.request_id, request.arrival
        self.waits: tuple[str, float, dict[str, Any]] | None = None  # name, begin and arguments of the slice
        self.decode: tuple[float, float, int] | None = None  # begin, end so far, tokens
        self.last: tuple[float, float] | None = None  # begin and end of the last slice
        self.arrow: int | None = None  # one that has left and not arrived


class Trace(Observer):
    """Records a run of one engine. The file shows it as `name`. A trace can be added to a running engine, and holds no
    request that has ended."""

    def __init__(self, name: str):
        self.name = name
        self.tracks: list[tuple[str, int]] = []  # request_id and arrival number
        self.num_arrows = 0
        self._events: list[TraceEvent] = []
        self._live: dict[Request, Track] = {}
        self._chunks: dict[Request, tuple[int, int, bool]] = {}  # of this step: start, length, is_decode
        self._begin = 0.0  # of this step
        self._now = -math.inf  # the latest time seen
        self._counters: dict[str, dict[str, int]] = {}  # the latest values
        self._num_blocks = 0
        self._arrived: set[int] = set()  # numbers of arrows

    # ------------------------------------------------------------------ recording

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
            self._end_wait(track, time)
        elif kind == "finished":
            self._finish(request, track, time, details["finish_reason"])

    def on_plan(self, step: Step) -> None:
        self._begin = self._now = step.begin
        # Chunks that are left from the step before were not computed: it failed.
        self._chunks = {chunk.request: (chunk.start, chunk.length, chunk.is_decode) for chunk in step.plan.chunks}
        num_decodes = sum(is_decode for _, _, is_decode in self._chunks.values())
        num_tokens = sum(length for _, length, _ in self._chunks.values())
        self._num_blocks = step.num_blocks
        self._count(step.begin, step.num_running, step.num_waiting, step.num_free_blocks, num_decodes, num_tokens)

    def on_step(self, step: Step) -> None:
        self._now = step.end
        for request in list(self._chunks):  # requests that ended in this step have none left
            self._end_chunk(request, self._track(request), step.end)

    def _finish(self, request: Request, track: Track, time: float, reason: str) -> None:
        if reason != "abort" and request in self._chunks:
            self._end_chunk(request, track, time)
        self._chunks.pop(request, None)  # an abort comes between steps, so a chunk is left only if the step failed
        self._end_decode(track)
        self._end_wait(track, time)
        self._events.append(TraceEvent("i", time, track.number, f"finished: {reason}"))
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
        start, length, is_decode = self._chunks.pop(request)
        if not is_decode:
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
        begin = min(begin, end)  # a request may be added before it is due
        if track.last is not None:
            begin = max(begin, track.last[1])
        end = max(begin, end)
        track.last = (begin, end)
        self._events.append(TraceEvent("X", begin, track.number, name, end, args))

    def _leave(self, track: Track) -> None:
        """Begin an arrow at the request's last slice, if there is one."""
        if track.last is not None and track.arrow is None:
            begin, end = track.last
            track.arrow = self.num_arrows
            self.num_arrows += 1
            self._events.append(TraceEvent("s", begin, track.number, "preemption", end, arrow=track.arrow))

    def _arrive(self, track: Track) -> None:
        """End the arrow at the slice that was just added: the first one after the return."""
        if track.arrow is not None and track.last is not None:
            begin, end = track.last
            self._events.append(TraceEvent("f", begin, track.number, "preemption", end, arrow=track.arrow))
            self._arrived.add(track.arrow)
            track.arrow = None

    def _count(
        self, time: float, num_running: int, num_waiting: int, num_free_blocks: int, num_decodes: int, num_tokens: int
    ) -> None:
        """Write the counters that changed. In the file they hold until the next change."""
        counters = {
            "running": {"requests": num_running},
            "waiting": {"requests": num_waiting},
            "free": {"blocks": num_free_blocks},
            "batched tokens": {"prefill": num_tokens - num_decodes, "decode": num_decodes},
        }
        for name, series in counters.items():
            if self._counters.get(name) != series:
                self._events.append(TraceEvent("C", time, None, name, args=series))
        self._counters = counters

    # ------------------------------------------------------------------ the file

    def all_events(self) -> list[TraceEvent]:
        """All events so far. Slices that are open end now, and arrows that have not arrived are left out."""
        ended = copy.copy(self)
        ended._events, ended._arrived = list(self._events), set(self._arrived)
        for track in self._live.values():
            track = copy.copy(track)
            ended._end_decode(track)
            ended._end_wait(track, self._now)
        return [event for event in ended._events if event.phase != "s" or event.arrow in ended._arrived]

    def to_json(self, pid: int, first_tid: int, first_id: int) -> list[dict[str, Any]]:
        """The events as the file has them, sorted by time. Times are whole microseconds since the first event, so
        that slices that touch also touch in readers that round.

        pid: number of the process. first_tid, first_id: numbers of the first track and the first arrow.
        """
        all_events = self.all_events()
        zero = min((event.time for event in all_events), default=0.0)
        events: list[dict[str, Any]] = []
        for phase, time, track, name, end, args, arrow in all_events:
            begin, end = round((time - zero) * 1e6), round((end - zero) * 1e6)
            event: dict[str, Any] = {"ph": phase, "pid": pid, "ts": begin, "name": name}
            if track is not None:
                event |= {"tid": first_tid + track, "cat": "request"}
            if phase == "X":
                event["dur"] = end - begin
            elif phase == "i":
                event["s"] = "t"  # belongs to its track
            elif phase == "s":
                event |= {"id": first_id + arrow, "ts": max(begin, end - 1)}  # just before the end, so inside the slice
            elif phase == "f":
                event |= {"id": first_id + arrow, "bp": "e"}  # attached to the slice around it, not to the next one
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
    """Write all runs into one file. The times of each run count from its own first event."""
    # Readers disagree on numbers that are 0 or shared between tracks and processes, so all are distinct and above 0.
    first_tid, first_id = len(traces) + 1, 1
    separator = "\n"
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        for pid, trace in enumerate(traces, start=1):
            for event in trace.to_json(pid, first_tid, first_id):
                file.write(separator + json.dumps(event, separators=(",", ":"), allow_nan=False))
                separator = ",\n"
            first_tid += len(trace.tracks)
            first_id += trace.num_arrows
        file.write("\n]}\n")
