"""Pictures of runs: an observer that records a run, and a page that plays recordings side by side.

    timelines = [Timeline("static"), Timeline("continuous")]  # each observes one run
    write_timeline("timeline.html", timelines)                # after the runs

The page (timeline.html) needs no network and no server. It animates what the papers draw: which request uses which slot
in each step (Orca, 2022), and which request holds which block (PagedAttention, 2023).

A recording grows with changes, not with tokens: decodes in a row are one span, and a block is recorded when its owners
change. A page with 64 requests of 300 tokens has about 100 kB, one with 1,000 of 2,000 tokens some MB, which still
plays. For larger runs, record a part.
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

WAITING, RUNNING, SWAPPED, DROPPED, FINISHED = range(5)  # DROPPED: preempted, to be recomputed
NO_SLOT = -1
# One number per step: seconds on the engine's clock (2), requests (2), limits (2), tokens (3).
COLUMNS = ("begin", "end", "running", "waiting", "slots", "budget", "decode", "prefill", "sampled")
TEMPLATE = Path(__file__).with_name("timeline.html")


class RecordedRequest:
    """The history of a request, in numbers, so that the request itself need not be held.

    states: [frame, state, slot, computed tokens, blocks in host memory], one for each change of state.
    spans: [step, count, start, length]: `count` steps in a row, from `step` on, each computed a chunk of `length`
        tokens. The first chunk begins at token `start`, each other where the one before ends.
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
    """Records a run of one engine. The page shows it as `name`; `data` returns the recording at any time.

    Frame n shows step n while it runs, as `on_plan` describes it. The results of a step are seen in the next frame, so
    there is one frame more than steps. The engine has no numbered slots, so they are assigned here: a request that
    starts or returns takes the lowest free one.
    """

    def __init__(self, name: str):
        self.name = name
        self._records: list[RecordedRequest] = []
        self._columns: dict[str, list] = {name: [] for name in COLUMNS}
        self._blocks: list[list[tuple[int, list[int]]]] = []  # of block 1, 2, …: (frame, owners from then on)
        self._frame = 0  # the frame that shows what happens now
        self._live: dict[Request, RecordedRequest] = {}  # requests that have not ended
        self._placed: dict[int, tuple[Request, RecordedRequest]] = {}  # by number: requests that run or are swapped out
        self._chunks: list[tuple[RecordedRequest, int, int, bool]] = []  # of this step: start, length, is_decode
        self._free_slots: list[int] = []  # a heap
        self._num_slots = 0
        self._num_sampled = 0  # in this step

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
            if record.number not in self._placed:  # it started before the timeline was added
                self._change(chunk.request, record, RUNNING, chunk.start)
            self._chunks.append((record, chunk.start, chunk.length, chunk.is_decode))
        for request, record in list(self._placed.values()):
            if request.state is RequestState.WAITING:  # the step that swapped it out failed
                self._change(request, record, DROPPED, 0)
            elif request.state is RequestState.RUNNING:
                self._hold(record, request.block_table)
        # End and tokens are set by on_step. A step that fails has no on_step: it computes nothing and takes no time.
        limits = (step.max_num_seqs, step.max_num_batched_tokens)
        row = (step.begin, step.begin, step.num_running, step.num_waiting, *limits, 0, 0, 0)
        for name, value in zip(COLUMNS, row, strict=True):
            self._columns[name].append(value)
        self._frame = len(self._columns["begin"])

    def on_step(self, step: Step) -> None:
        columns = self._columns
        for record, start, length, is_decode in self._chunks:
            record.add_chunk(self._frame - 1, start, length)
            columns["decode" if is_decode else "prefill"][-1] += length
        for request in step.progressed:
            if request in self._live:  # else its last token was counted when it ended
                self._count_tokens(request, self._live[request])
        columns["sampled"][-1], self._num_sampled = self._num_sampled, 0
        columns["end"][-1] = step.end

    def data(self) -> dict[str, Any]:
        """The recording so far, ready for JSON. Times are seconds since the first arrival or step."""
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

    # ------------------------------------------------------------------ states and owners of blocks

    def _record(self, request: Request) -> RecordedRequest:
        record = self._live.get(request)
        if record is None:
            record = self._live[request] = RecordedRequest(request, len(self._records))
            self._records.append(record)
            self._change(request, record, WAITING, 0)
        return record

    def _change(self, request: Request, record: RecordedRequest, state: int, num_computed_tokens: int) -> None:
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
            record.states.pop()  # no frame shows it
        record.states.append([self._frame, state, record.slot, num_computed_tokens, num_host_blocks])

    def _hold(self, record: RecordedRequest, block_table: array) -> None:
        """Note that from this frame on the request holds exactly these blocks."""
        old = record.block_table
        if old == block_table:
            return
        same = 0  # length of the common beginning, nearly always all of the old table
        while same < min(len(old), len(block_table)) and old[same] == block_table[same]:
            same += 1
        for block in old[same:]:
            self._set_owners(block, [owner for owner in self._owners(block) if owner != record.number])
        for block in block_table[same:]:
            self._set_owners(block, sorted([*self._owners(block), record.number]))
        record.block_table = block_table[:]

    def _owners(self, block: int) -> list[int]:
        history = self._blocks[block - 1]  # block 0 is the null block
        return history[-1][1] if history else []

    def _set_owners(self, block: int, owners: list[int]) -> None:
        history = self._blocks[block - 1]
        if history and history[-1][0] == self._frame:
            history.pop()
        if owners != self._owners(block):
            history.append((self._frame, owners))

    def _count_tokens(self, request: Request, record: RecordedRequest) -> None:
        self._num_sampled += request.num_output_tokens - record.num_output_tokens
        record.num_output_tokens = request.num_output_tokens


def write_timeline(path: str | PathLike, runs: Sequence[Timeline]) -> None:
    """Write a page with these runs, which should have had the same workload. ValueError if there are none."""
    if not runs:
        raise ValueError("runs is empty: a page shows at least 1 run")
    text = json.dumps({"runs": [run.data() for run in runs]}, separators=(",", ":"), allow_nan=False)
    # The data is inside a script element, which only a "<" could end, so it is escaped. json.dumps escapes non-ASCII.
    page = TEMPLATE.read_text(encoding="utf-8").replace(">DATA<", ">" + text.replace("<", "\\u003c") + "<")
    Path(path).write_text(page, encoding="utf-8")
