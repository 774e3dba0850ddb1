"""Draws the figures of the chapters, from runs of the scheduler and the simulator: SVG that reads in light and dark, and
a page that plays runs.

`python walkthrough/figures.py` writes them into figures/, `--check` says which of those there are not what would be
written now.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from example import FOUR, Recorder, Wish, make_request, make_scheduler, row_of, run, submit_and_step
from torch import Tensor

from minicb.batch import BatchBuilder, BlockLists
from minicb.core import EngineCore
from minicb.observe.metrics import Metrics
from minicb.observe.timeline import Timeline, write_timeline
from minicb.params import SamplingParams
from minicb.plan import Chunk, StepPlan
from minicb.request import Request
from minicb.simulate.cost_model import DEVICES, CostModel, SimulatedRunner, VirtualClock
from minicb.simulate.scenarios import LLAMA_8B, simulate
from minicb.simulate.workload import WorkloadArgs, make_workload, serve

FOLDER = Path(__file__).parent / "figures"
CELL, MARGIN, SLOT = 26, 34, 20
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328 } .small { font-size: 10px; fill: #59636e }
.middle { text-anchor: middle } .end { text-anchor: end } .title { font-weight: 600 }
.prefill { fill: #54aeff } .decode { fill: #4ac26b } .wait { fill: none; stroke: #8c959f; stroke-dasharray: 2 2 }
.idle { fill: #8c959f; opacity: 0.15 } .axis { stroke: #8c959f; fill: none }
.a { stroke: #0969da; fill: none; stroke-width: 2 } .b { stroke: #bc4c00; fill: none; stroke-width: 2 }
.ta { fill: #0969da } .tb { fill: #bc4c00 } .in { fill: #1f2328 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .small { fill: #9198a1 } .in { fill: #1f2328 }
.a { stroke: #4493f8 } .b { stroke: #f0883e } .ta { fill: #4493f8 } .tb { fill: #f0883e } }
"""


def svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(label)}">\n'
        f"<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def text(x: float, y: float, words: object, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(str(words))}</text>'


def box(x: float, y: float, kind: str, width: float = CELL - 3, height: float = CELL - 3) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4" class="{kind}"/>'


# ---------------------------------------------------------------------- schedules, cell by cell


def schedule(recorder: Recorder, wishes: Mapping[str, Wish], title: str, num_steps: int, top: float = 0) -> list[str]:
    """A row for each request, a column for each step."""
    parts = [text(MARGIN, top + 14, title, "title")]
    for row, (name, wish) in enumerate(wishes.items()):
        y = top + 24 + row * CELL
        parts.append(text(MARGIN - 12, y + 16, name, "end"))
        for number, cell in enumerate(row_of(recorder, name, wish)):
            x = MARGIN + number * CELL
            if cell:
                parts.append(box(x, y, {"●": "decode", "·": "wait"}.get(cell, "prefill")))
            if cell.isdigit():
                parts.append(text(x + 11.5, y + 16, cell, "middle in"))
    y = top + 24 + len(wishes) * CELL + 10
    return parts + [text(MARGIN + n * CELL + 11.5, y, n, "middle small") for n in range(num_steps)]


STATES = {"prefill": "tokens of a prompt", "decode": "a token decoded", "wait": "waits"}


def legend(y: float, kinds: Mapping[str, str] = STATES, left: float = MARGIN, width: float = 150) -> list[str]:
    parts = []
    for place, (kind, words) in enumerate(kinds.items()):
        x = left + place * width
        parts += [box(x, y, kind, 14, 14), text(x + 20, y + 11, words, "small")]
    return parts


def preemption() -> str:
    recorder = run(make_scheduler(num_blocks=1 + 6))
    num_steps, height = len(recorder.steps), 24 + 4 * CELL + 24
    parts = schedule(recorder, FOUR, "six blocks: B and C don't fit together to their end", num_steps)
    return svg(MARGIN + num_steps * CELL + 8, height + 22, "preemption", [*parts, *legend(height)])


# ---------------------------------------------------------------------- slots, used and idle

OUTPUT_LENS = (3, 4, 1, 5, 10, 2, 3, 11, 2, 11, 10, 2)  # of twelve requests, all submitted at once
SLOT_STYLE = """<style>
text { font-size: 16px } .small { font-size: 13px }
.empty { fill: url(#hatch) } .empty, .hatch { stroke: #bc4c00 } .hatch { stroke-width: 2 }
@media (prefers-color-scheme: dark) { .empty, .hatch { stroke: #f0883e } }
</style>
<pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<path d="M1 0V7" class="hatch"/></pattern>"""


def static_against_continuous() -> str:
    wishes = {name: Wish(4, length) for name, length in zip("ABCDEFGHIJKL", OUTPUT_LENS, strict=True)}
    limits: dict[str, Any] = {"num_blocks": 1 + 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    runs = {name: run(make_scheduler(batching=name, **limits), wishes) for name in ("static", "continuous")}
    num_steps, height = max(len(recorder.steps) for recorder in runs.values()), 30 + 4 * CELL + 26
    parts = [SLOT_STYLE]
    for place, (name, recorder) in enumerate(runs.items()):
        parts += slots(recorder, f"{name} batching", 4, place * height)
    kinds = {"prefill": "prompt, first token", "decode": "a token a step", "empty": "idle"}
    parts += legend(2 * height, kinds, left=10, width=190)
    label = "twelve requests in four slots, by static and by continuous batching"
    return svg(10 + num_steps * SLOT + 8, 2 * height + 24, label, parts)


def slots(recorder: Recorder, name: str, num_slots: int, top: float) -> list[str]:
    """A row for each slot, a column for each step. A request takes the first free slot and is one bar."""
    rows: list[list[tuple[int, int, str]]] = [[] for _ in range(num_slots)]
    num_steps = len(recorder.steps)
    for request in dict.fromkeys(request for step in recorder.steps for request in step):
        numbers = [number for number, step in enumerate(recorder.steps) if request in step]
        row = next(row for row in rows if not row or row[-1][1] <= numbers[0])
        row.append((numbers[0], numbers[-1] + 1, request))
    used = sum(map(len, recorder.steps)) / (num_slots * num_steps)
    parts = [text(10, top + 18, f"{name}: {num_steps} steps, {1 - used:.0%} idle", "title")]
    for number, row in enumerate(rows):
        y, free_from = top + 30 + number * CELL, 0
        for begin, end, request in [*row, (num_steps, num_steps, "")]:
            x = 10 + begin * SLOT
            if begin > free_from:
                parts.append(box(10 + free_from * SLOT, y, "empty", (begin - free_from) * SLOT - 3))
            if request:
                parts += [box(x, y, "decode", (end - begin) * SLOT - 3), box(x, y, "prefill", SLOT - 3)]
                parts.append(text(x + 8.5, y + 17, request, "middle in"))
            free_from = end
    y = top + 30 + num_slots * CELL + 12
    return parts + [text(10 + n * SLOT + 8.5, y, n, "middle small") for n in range(0, num_steps, 2)]


# ---------------------------------------------------------------------- a block table


def block_table() -> str:
    """B with six tokens, blocks of four, in physical blocks 2 and 7 of eight."""
    table, num_tokens = [2, 7], 6
    parts = [text(MARGIN, 14, "the pool: eight blocks of four positions, and block 0, which is nobody's", "title")]
    for block in range(9):
        x = MARGIN + block * (4 * 15 + 12)
        parts.append(text(x + 30, 36, block, "middle small"))
        for offset in range(4):
            holds = block in table and 4 * table.index(block) + offset < num_tokens
            parts.append(box(x + offset * 15, 42, "decode" if holds else "idle", 13, 22))
            if holds:
                parts.append(text(x + offset * 15 + 6.5, 57, 4 * table.index(block) + offset, "middle small in"))
    parts.append(
        text(MARGIN, 92, "B's block table: logical block 0 is physical block 2, logical block 1 is physical block 7")
    )
    parts.append(
        text(MARGIN, 110, "The numbers are B's positions. Two places of its second block are still empty.", "small")
    )
    return svg(MARGIN + 9 * 72 + 8, 120, "a block table", parts)


# ---------------------------------------------------------------------- mask tiles


def mask_tiles() -> str:
    """Queries by cached positions in the third step of the four with 8 tokens a step, as `BatchBuilder` lists them."""
    size, num_blocks = 4, 1 + 8
    scheduler = make_scheduler(num_blocks, size, max_num_batched_tokens=8)
    builder = BatchBuilder(
        num_blocks=num_blocks, block_size=size, tile_size=size, max_num_seqs=3, max_num_batched_tokens=8,
        max_model_len=64, windows=[None], device=torch.device("cpu"),
    )  # fmt: skip
    for name in "ABC":
        scheduler.add(make_request(name, FOUR[name]))
    for _ in range(3):
        plan = scheduler.schedule()
        batch = builder.build(plan.chunks)
        scheduler.update(plan, [7 for chunk in plan.chunks if chunk.needs_sampling])
    assert batch.tile_lists is not None
    decode, prefill = batch.chunks
    queries = [(decode, decode.start, batch.decode_lists[None], 0)]
    for position in range(prefill.start, prefill.start + prefill.length):
        queries.append((prefill, position, batch.tile_lists[None], (position - prefill.start) // size))
    parts = [text(MARGIN, 14, "B decodes, C's prompt gets its last six tokens: who looks at what", "title")]
    parts += [text(MARGIN + 66 + 72 * block, 36, block, "middle small") for block in range(num_blocks)]
    y, last = 42.0, (decode, 0)
    for chunk, position, lists, row in queries:
        y += 0 if (chunk, row) == last else 8  # a new row of tiles
        last = (chunk, row)
        parts.append(text(MARGIN + 28, y + 10, f"{chunk.request.request_id} {position}", "end small"))
        for block in range(num_blocks):
            for offset in range(size):
                kind = tile_kind(lists, row, block, batch.logical_blocks[block] * size + offset <= position)
                parts.append(box(MARGIN + 36 + 72 * block + 15 * offset, y, kind, 13, 13))
        y += 15
    kinds = {
        "decode": "full: no mask needed",
        "prefill": "partial: it counts",
        "wait": "partial: masked",
        "idle": "not visited",
    }
    words = (
        "Rows: queries, by position. Columns: the rows of the cache, by physical block. Gaps part the rows of tiles."
    )
    parts += [text(MARGIN, y + 18, words, "small"), *legend(y + 28, kinds)]
    return svg(MARGIN + 36 + num_blocks * 72, y + 50, "mask tiles", parts)


def tile_kind(lists: BlockLists, row: int, block: int, visible: Tensor) -> str:
    if block in lists.full[row, : lists.num_full[row]]:
        return "decode"
    if block in lists.partial[row, : lists.num_partial[row]]:
        return "prefill" if visible else "wait"
    return "idle"


# ---------------------------------------------------------------------- curves


def curves(title: str, x_name: str, xs: Sequence[float], lines: Mapping[str, Sequence[float]]) -> str:
    """A panel for each line, over the same x; the values stand at the points."""
    width, panel, left = 560.0, 120.0, 40.0
    parts = [text(left, 16, title, "title")]
    places = [left + 24 + (width - left - 60) * place / (len(xs) - 1) for place in range(len(xs))]
    for number, (kind, (name, values)) in enumerate(zip("ab", lines.items(), strict=False)):
        bottom = 24 + (number + 1) * panel
        ys = [bottom - 8 - (panel - 56) * value / max(values) for value in values]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(places, ys, strict=True))
        parts.append(text(left, bottom - panel + 22, name, f"small t{kind}"))
        parts.append(
            f'<path d="M{left} {bottom}H{width - 10}" class="axis"/><polyline points="{points}" class="{kind}"/>'
        )
        parts += [
            text(x, y - 6, f"{v:.3g}", f"middle small t{kind}") for x, y, v in zip(places, ys, values, strict=True)
        ]
    bottom = 24 + len(lines) * panel
    parts += [text(x, bottom + 15, f"{value:g}", "middle small") for x, value in zip(places, xs, strict=True)]
    parts.append(text((left + width) / 2, bottom + 32, x_name, "middle small"))
    return svg(width, bottom + 42, title, parts)


def roofline() -> str:
    counts, cost_model = (1, 4, 16, 64, 128, 256, 512), CostModel(LLAMA_8B, DEVICES["H100"])
    times = []
    for count in counts:
        requests = [Request(str(n), [1] * 501, SamplingParams()) for n in range(count)]
        times.append(1000 * cost_model.step_seconds(StepPlan([Chunk.of(request, 500, 1) for request in requests]), 16))
    lines = {
        "milliseconds a step": times,
        "tokens per millisecond": [n / t for n, t in zip(counts, times, strict=True)],
    }
    return curves("8B on an H100 (roofline): decodes at position 500", "decodes in a step", counts, lines)


def goodput() -> str:
    rates, good, waits = (4, 8, 12, 16, 20, 24, 28, 32), [], []
    for rate in rates:
        core, clock = simulate(
            CostModel(LLAMA_8B, DEVICES["H100"]), max_num_seqs=64, max_num_batched_tokens=1024, max_model_len=4096
        )
        core.observers.append(metrics := Metrics())
        args = WorkloadArgs(num_prompts=400, request_rate=rate, random_input_len=1000, random_output_len=200, seed=0)
        serve(core, make_workload(args, LLAMA_8B.vocab_size), wait=clock.advance)
        good.append(metrics.goodput({"ttft": 0.5, "tpot": 0.02}))
        waits.append(1000 * metrics.latencies()["ttft"]["p99"])
    lines = {"goodput, requests per second": good, "TTFT p99, milliseconds": waits}
    return curves("8B on an H100 (simulated): 1,000 tokens in, 200 out", "requests per second that come", rates, lines)


# ---------------------------------------------------------------------- a page that plays runs


def timeline() -> str:
    """The running example in four ways, on a simulated H100, as the page that `bench.py --timeline` writes."""
    settings = {
        "static batching": make_scheduler(batching="static"),
        "continuous batching": make_scheduler(),
        "8 tokens a step": make_scheduler(max_num_batched_tokens=8),
        "six blocks": make_scheduler(num_blocks=1 + 6),
    }
    runs = []
    for name, scheduler in settings.items():
        clock = VirtualClock()
        runner = SimulatedRunner(CostModel(LLAMA_8B, DEVICES["H100"]), scheduler.pool.block_size, clock)
        runs.append(Timeline(name))
        submit_and_step(EngineCore(scheduler, runner, clock, [runs[-1]]), FOUR)
    with TemporaryDirectory() as folder:
        write_timeline(Path(folder) / "page.html", runs)
        return (Path(folder) / "page.html").read_text(encoding="utf-8")


FIGURES: dict[str, Callable[[], str]] = {
    "01_batching.svg": static_against_continuous,
    "01_timeline.html": timeline,
    "03_blocks.svg": block_table,
    "04_tiles.svg": mask_tiles,
    "05_roofline.svg": roofline,
    "07_preemption.svg": preemption,
    "11_goodput.svg": goodput,
}


def main(argv: Sequence[str]) -> int:
    drifted = []
    for name, draw in FIGURES.items():
        path, drawn = FOLDER / name, draw()
        if "--check" not in argv:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(drawn, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != drawn:
            drifted.append(path.name)
    if drifted:
        print(f"not as they would be drawn now: {', '.join(drifted)}", file=sys.stderr)
    return bool(drifted)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
