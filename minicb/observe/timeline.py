"""Pictures of runs: an observer that records a run in numbers, and one page that plays recordings side by side.

    timelines = [Timeline("static"), Timeline("continuous")]  # each the observer of one run
    write_timeline("timeline.html", timelines)                # once they are over

The page (timeline.html) needs no network and no server. It animates what the papers draw: who used which slot in which
step (Orca, 2022), and who holds which block (PagedAttention, 2023).

A recording grows with what changes, not with every token: decodes are one span for as long as they go on, and a
block is written down when its owners change. 64 requests of 300 tokens make a page of about 100 kB, 1,000 of
2,000 tokens one of some MB, which still plays. Beyond that there is nothing to see: record a part of the run.
"""

import heapq
import json
from array import array
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from minicb.plan import Event, Observer, Step
from minicb.request import Request, RequestState

WAITING, RUNNING, SWAPPED, DROPPED, FINISHED = range(5)  # DROPPED: preempted, waits to be computed again
NO_SLOT = -1
# A number for each step: seconds on the engine's clock; requests; limits; tokens.
COLUMNS = ("begin", "end", "running", "waiting", "slots", "budget", "decode", "prefill", "sampled")
TEMPLATE = Path(__file__).with_name("timeline.html")


class Record:
    """What is kept of a request: numbers, so that its tokens can go when it does.

    states: [frame, state, slot, computed tokens, blocks in host memory], one for each change of state.
    spans: [step, count, start, length]: `count` steps from `step` on had a chunk of `length` of its tokens each, the
        first from token `start` on, the others each from where the one before had ended.
    """

    def __init__(self, request: Request, number: int):
        self.number = number
        self.request_id, self.arrival_time = request.request_id, request.arrival_time
        self.num_prompt_tokens, self.num_output_tokens = request.num_prompt_tokens, request.num_output_tokens
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self.states: list[list[int]] = []
        self.spans: list[list[int]] = []
        self.slot = NO_SLOT
        self.block_table = array("i")  # while it runs

    def add_chunk(self, step: int, start: int, length: int) -> None:
        if self.spans:
            first, count, begin, each = self.spans[-1]
            if (step, start, length) == (first + count, begin + count * each, each):
                self.spans[-1][1] += 1
                return
        self.spans.append([step, 1, start, length])


class Timeline(Observer):
    """Records a run of one engine, which the page will call `name`; `data` gives the recording at any time.

    Frame n shows step n while it runs, and so what `on_plan` tells. What comes of a step is seen in the next frame:
    there is one frame more than steps. The engine knows no slots, they are made up here: a request that starts or
    comes back takes the lowest that is free.
    """

    def __init__(self, name: str):
        self.name = name
        self._records: list[Record] = []
        self._columns: dict[str, list] = {name: [] for name in COLUMNS}
        self._blocks: list[list[tuple[int, list[int]]]] = []  # (frame, owners from then on) of block 1, 2, …
        self._frame = 0  # the one in which what happens now is seen
        self._live: dict[Request, Record] = {}  # those that have not ended
        self._placed: dict[int, tuple[Request, Record]] = {}  # those that run or are swapped out, by number
        self._chunks: list[tuple[Record, int, int, bool]] = []  # of the step that runs: start, length, is it a decode
        self._free_slots: list[int] = []  # a heap
        self._num_slots = 0
        self._num_sampled = 0  # in the step that runs

    def on_event(self, event: Event) -> None:
        request, record, details = event.request, self._record(event.request), event.details
        if event.kind == "started":
            record.num_cached_tokens = details["num_cached_tokens"]
            self._change(request, record, RUNNING, record.num_cached_tokens)
        elif event.kind == "returned":
            self._change(request, record, RUNNING, details["num_computed_tokens"])
        elif event.kind == "preempted":
            state = SWAPPED if details["mode"] == "swap" else DROPPED
            self._change(request, record, state, request.num_computed_tokens)
        elif event.kind == "finished":
            self._count_tokens(request, record)
            record.finish_reason = details["finish_reason"]
            self._change(request, record, FINISHED, request.num_computed_tokens)
            del self._live[request]

    def on_plan(self, step: Step) -> None:
        self._blocks += [[] for _ in range(step.num_blocks - len(self._blocks))]
        self._chunks = []
        for chunk in step.plan.chunks:
            record = self._record(chunk.request)
            if record.number not in self._placed:  # it had started before anybody looked
                self._change(chunk.request, record, RUNNING, chunk.start)
            self._chunks.append((record, chunk.start, chunk.length, chunk.is_decode))
        for request, record in list(self._placed.values()):
            if request.state is RequestState.WAITING:  # an interruption has taken everything back, without an event
                self._change(request, record, DROPPED, 0)
            elif request.state is RequestState.RUNNING:
                self._hold(record, request.block_table)
        # Nothing is computed and no time taken until on_step, which a step that breaks off never sees.
        limits = (step.max_num_seqs, step.max_num_batched_tokens)
        row = (step.begin, step.begin, step.num_running, step.num_waiting, *limits, 0, 0, 0)
        for name, value in zip(COLUMNS, row, strict=True):
            self._columns[name].append(value)
        self._frame = len(self._columns["begin"])

    def on_step(self, step: Step) -> None:
        columns = self._columns
        for record, start, length, decodes in self._chunks:
            record.add_chunk(self._frame - 1, start, length)
            columns["decode" if decodes else "prefill"][-1] += length
        for request in step.progressed:
            if request in self._live:  # the others were counted when they ended
                self._count_tokens(request, self._live[request])
        columns["sampled"][-1], self._num_sampled = self._num_sampled, 0
        columns["end"][-1] = step.end

    def data(self) -> dict[str, Any]:
        """The recording so far, in lists, numbers and texts. Times are seconds since the first arrival or step."""
        times = [record.arrival_time for record in self._records] + self._columns["begin"][:1]
        zero = min(times, default=0.0)
        columns = {name: list(values) for name, values in self._columns.items()}
        for name in ("begin", "end"):
            columns[name] = [round(value - zero, 7) for value in columns[name]]
        requests = [
            {
                "id": record.request_id,
                "time": round(record.arrival_time - zero, 7),
                "prompt": record.num_prompt_tokens,
                "output": record.num_output_tokens,
                "cached": record.num_cached_tokens,
                "reason": record.finish_reason,
                "states": [list(change) for change in record.states],
                "spans": [list(span) for span in record.spans],
            }
            for record in self._records
        ]
        blocks = [[[frame, list(owners)] for frame, owners in history] for history in self._blocks]
        return {"name": self.name, **columns, "requests": requests, "blocks": blocks}

    # ------------------------------------------------------------------ who is where, and holds what

    def _record(self, request: Request) -> Record:
        record = self._live.get(request)
        if record is None:
            record = self._live[request] = Record(request, len(self._records))
            self._records.append(record)
            self._change(request, record, WAITING, 0)
        return record

    def _change(self, request: Request, record: Record, state: int, num_computed_tokens: int) -> None:
        self._hold(record, array("i"))
        if record.slot != NO_SLOT:
            heapq.heappush(self._free_slots, record.slot)
            record.slot = NO_SLOT
        self._placed.pop(record.number, None)
        if state == RUNNING:
            if not self._free_slots:
                self._free_slots.append(self._num_slots)
                self._num_slots += 1
            record.slot = heapq.heappop(self._free_slots)
        if state == RUNNING or state == SWAPPED:
            self._placed[record.number] = (request, record)
        num_host_blocks = len(request.host_blocks) if state == SWAPPED else 0
        if record.states and record.states[-1][0] == self._frame:
            record.states.pop()  # nobody ever saw it
        record.states.append([self._frame, state, record.slot, num_computed_tokens, num_host_blocks])

    def _hold(self, record: Record, block_table: array) -> None:
        """From this frame on the request holds these blocks, and no others."""
        old = record.block_table
        if old == block_table:
            return
        same = 0  # how many of the first are as they were: nearly always all
        while same < min(len(old), len(block_table)) and old[same] == block_table[same]:
            same += 1
        for block in old[same:]:
            self._set_owners(block, [owner for owner in self._owners(block) if owner != record.number])
        for block in block_table[same:]:
            self._set_owners(block, sorted([*self._owners(block), record.number]))
        record.block_table = block_table[:]

    def _owners(self, block: int) -> list[int]:
        history = self._blocks[block - 1]  # block 0 is nobody's
        return history[-1][1] if history else []

    def _set_owners(self, block: int, owners: list[int]) -> None:
        history = self._blocks[block - 1]
        if history and history[-1][0] == self._frame:
            history.pop()
        if owners != self._owners(block):
            history.append((self._frame, owners))

    def _count_tokens(self, request: Request, record: Record) -> None:
        self._num_sampled += request.num_output_tokens - record.num_output_tokens
        record.num_output_tokens = request.num_output_tokens


def write_timeline(path: str | PathLike, runs: Sequence[Timeline]) -> None:
    """Write the page with these runs; several should have had the same workload. ValueError if there is none."""
    if not runs:
        raise ValueError("runs is empty: a page shows at least 1 run")
    text = json.dumps({"runs": [run.data() for run in runs]}, separators=(",", ":"), allow_nan=False)
    # Only a "<" could end the script that the data is in; JSON may write it so. What isn't ASCII is escaped already.
    page = TEMPLATE.read_text(encoding="utf-8").replace(">DATA<", ">" + text.replace("<", "\\u003c") + "<")
    Path(path).write_text(page, encoding="utf-8")
