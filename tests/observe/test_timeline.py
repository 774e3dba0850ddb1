"""The timeline: the recording is what happened, and the page shows the recording.

A witness stands beside the recorder: it keeps, frame by frame, what the scheduler's requests say themselves.
Tests with a browser need the extra `browser` and Chromium: `pytest -m browser`.
"""

import gc
import json
import os
import re
import shutil
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicb import SamplingParams
from minicb.blocks import BlockPool
from minicb.core import EngineCore
from minicb.memory import PREEMPTION_MODES, Memory, PreemptionCosts
from minicb.observe.timeline import DROPPED, FINISHED, RUNNING, SWAPPED, TEMPLATE, WAITING, Timeline, write_timeline
from minicb.plan import Observer, StepPlan
from minicb.policies import POLICIES
from minicb.request import Request, RequestState
from minicb.scheduler import Scheduler

STATES = {RequestState.RUNNING: RUNNING, RequestState.SWAPPED: SWAPPED, RequestState.FINISHED: FINISHED}


class ToyRunner:
    """Token 0 for all. Each look at its clock takes a second, a step some more for each token."""

    def __init__(self):
        self.now = 99.0
        self.fails: Callable[[StepPlan], bool] = lambda plan: False

    def clock(self) -> float:
        self.now += 1
        return self.now

    def execute(self, plan: StepPlan) -> list[int | None]:
        if self.fails(plan):
            raise RuntimeError
        self.now += 0.25 * sum(chunk.length for chunk in plan.chunks)
        return [0 for chunk in plan.chunks if chunk.needs_sampling]


class Witness(Observer):
    """One dict a frame: what requests, block tables and the plan are at that moment."""

    def __init__(self, requests: list[Request]):
        self.requests = requests
        self.frames: list[dict] = []
        self.num_swapped_out: list[int] = []

    def on_plan(self, step):
        self.look(step.plan)
        self.num_swapped_out.append(len(step.plan.swap_out))

    def look(self, plan: StepPlan) -> None:
        chunks = {chunk.request: [chunk.start, chunk.length] for chunk in plan.chunks}
        owners: dict[int, list[int]] = {}
        for number, request in enumerate(self.requests):
            for block in request.block_table:
                owners.setdefault(block, []).append(number)
        requests = []
        for request in self.requests:
            state = STATES.get(request.state, DROPPED if request.has_started else WAITING)
            hosts = len(request.host_blocks) if state == SWAPPED else 0
            requests.append((state, request.num_computed_tokens, request.num_tokens, chunks.get(request), hosts))
        self.frames.append({"requests": requests, "owners": owners})


@dataclass
class Rig:
    """A scheduler without a model, recorded and witnessed."""

    name: str = "run"
    batching: str = "continuous"
    policy: str = "fcfs"
    num_blocks: int = 33
    block_size: int = 4
    max_num_seqs: int = 2
    max_num_batched_tokens: int = 8
    num_cpu_blocks: int = 0
    preemption_mode: str = "recompute"
    enable_prefix_caching: bool = False
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self):
        pools = (
            BlockPool(self.num_blocks, self.block_size, self.enable_prefix_caching),
            BlockPool(1 + self.num_cpu_blocks, self.block_size),
        )
        scheduler = Scheduler(
            Memory(*pools, self.preemption_mode, PreemptionCosts(1.0, 0.4)),
            POLICIES[self.policy](),
            batching=self.batching,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=1000,
        )
        self.runner, self.timeline, self.witness = ToyRunner(), Timeline(self.name), Witness(self.requests)
        self.core = EngineCore(scheduler, self.runner, self.runner.clock, [self.timeline, self.witness])

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        request = Request(request_id, prompt, SamplingParams(max_tokens=max_tokens))
        self.core.add(request)
        self.requests.append(request)

    def run(self) -> "Rig":
        for _ in range(2000):
            if not self.core.has_unfinished_requests():
                self.witness.look(StepPlan())  # the end
                return self
            self.core.step()
        raise AssertionError("not finished after 2000 steps")


def frame(data: dict, n: int) -> dict:
    """What a recording says of frame n, told slowly and plainly: every step replayed, every change applied."""
    requests = []
    for request in data["requests"]:
        seen = [change for change in request["states"] if change[0] <= n]
        if not seen:
            continue  # it comes later, and so do those after it
        since, state, _, computed, hosts = seen[-1]
        known, now = request["prompt"], None
        for first, count, start, length in request["spans"]:
            for step in range(first, first + count):
                chunk = [start + (step - first) * length, length]
                if step == n:
                    now = chunk
                elif step < n:
                    known += sum(chunk) == known and known < request["prompt"] + request["output"]
                    computed = sum(chunk) if step >= since else computed
        requests.append((state, computed, known, now, hosts))
    owners = {}
    for block, history in enumerate(data["blocks"], 1):
        seen = [numbers for since, numbers in history if since <= n]
        if seen and seen[-1]:
            owners[block] = seen[-1]
    return {"requests": requests, "owners": owners}


def assert_it_is_what_happened(rig: Rig) -> None:
    data = json.loads(json.dumps(rig.timeline.data()))
    count = len(data["begin"])
    assert len(rig.witness.frames) == count + 1
    for n, seen in enumerate(rig.witness.frames):
        assert frame(data, n) == seen, f"frame {n}"
        states = Counter(request[0] for request in seen["requests"])
        if n == count:
            break
        assert data["running"][n] == states[RUNNING]
        assert data["waiting"][n] == states[WAITING] + states[SWAPPED] + states[DROPPED]
        lengths = [request[3][1] for request in seen["requests"] if request[3]]
        if data["end"][n] > data["begin"][n]:
            assert data["decode"][n] + data["prefill"][n] == sum(lengths) <= data["budget"][n]
        else:  # it failed
            assert (data["decode"][n], data["prefill"][n], data["sampled"][n], lengths) == (0, 0, 0, [])
        hosts = sum(change[4] for request in data["requests"] for change in request["states"] if change[0] == n)
        assert hosts == rig.witness.num_swapped_out[n]
    assert sum(data["sampled"]) == sum(request["output"] for request in data["requests"])
    assert data["begin"] == sorted(data["begin"])
    for history in [*(request["states"] for request in data["requests"]), *data["blocks"]]:
        assert all(now[0] < later[0] for now, later in pairwise(history))
    assert_slots_are_places(data)


def assert_slots_are_places(data: dict) -> None:
    """Each running request has exactly one slot, and no slot has two requests."""
    taken = Counter()
    for request in data["requests"]:
        ends = [change[0] for change in request["states"][1:]] + [len(data["begin"])]
        for (first, state, slot, *_), end in zip(request["states"], ends, strict=True):
            assert (slot >= 0) == (state == RUNNING)
            if state == RUNNING:
                taken.update((step, slot) for step in range(first, end))
    assert all(count == 1 for count in taken.values())
    by_step = Counter(step for step, _ in taken)
    assert [by_step[step] for step in range(len(data["begin"]))] == data["running"]
    # A request keeps its slot when the policy lowers the limit.
    assert all(slot < max(data["slots"][: step + 1]) for step, slot in taken)


# ---------------------------------------------------------------------------- small runs, worked out by hand


def meta(name: str, time: float, prompt: int, output: int) -> dict:
    return {"id": name, "time": time, "prompt": prompt, "output": output, "cached": 0, "reason": "length"}


def test_a_recording_from_beginning_to_end():
    """4 tokens a step: a prompt of 6 takes two steps, and b gets what is left of the second. a's second token
    and b's only one end them both in step 2."""
    rig = Rig(num_blocks=5, max_num_batched_tokens=4)
    rig.add("a", list(range(6)), 2)
    rig.add("b", list(range(3)), 1)
    assert rig.run().timeline.data() == {
        "name": "run",
        "begin": [2, 5, 8],
        "end": [4, 7, 9.5],
        "running": [1, 2, 2],
        "waiting": [1, 0, 0],
        "slots": [2, 2, 2],
        "budget": [4, 4, 4],
        "decode": [0, 0, 1],
        "prefill": [4, 4, 1],
        "sampled": [0, 1, 2],
        "requests": [
            {
                **meta("a", 0, 6, 2),
                "states": [[0, RUNNING, 0, 0, 0], [3, FINISHED, -1, 7, 0]],
                "spans": [[0, 1, 0, 4], [1, 1, 4, 2], [2, 1, 6, 1]],
            },
            {
                **meta("b", 1, 3, 1),
                "states": [[0, WAITING, -1, 0, 0], [1, RUNNING, 1, 0, 0], [3, FINISHED, -1, 3, 0]],
                "spans": [[1, 1, 0, 2], [2, 1, 2, 1]],
            },
        ],
        "blocks": [[[0, [0]], [3, []]], [[1, [0]], [3, []]], [[1, [1]], [3, []]], []],
    }
    assert_it_is_what_happened(rig)


@pytest.mark.parametrize(
    ("batching", "running", "waiting"),
    [("static", [2, 1, 1, 1, 1], [1, 1, 1, 1, 0]), ("continuous", [2, 2, 1, 1], [1, 0, 0, 0])],
)
def test_slots_that_nobody_uses(batching, running, waiting):
    """Outputs of 1, 4 and 1 tokens in 2 slots: a static batch keeps the third waiting until the second has ended."""
    rig = Rig(batching=batching)
    for name, max_tokens in (("a", 1), ("b", 4), ("c", 1)):
        rig.add(name, [1], max_tokens)
    data = rig.run().timeline.data()
    assert (data["running"], data["waiting"], set(data["slots"])) == (running, waiting, {2})
    assert [request["states"][-2][2] for request in data["requests"]] == [0, 1, 0]  # the slots they ran in
    assert_it_is_what_happened(rig)


def shared_and_swapped(mode: str = "swap") -> Rig:
    """b finds a's two blocks of 2, and is preempted when both need a fifth block: they hold all 6, 4 + 2."""
    rig = Rig(name=mode, num_blocks=7, block_size=2, preemption_mode=mode, num_cpu_blocks=4, enable_prefix_caching=True)
    rig.add("a", [1, 2, 3, 4], 6)
    rig.core.step()
    rig.add("b", [1, 2, 3, 4, 9], 6)
    return rig.run()


def test_shared_blocks_have_several_owners():
    rig = shared_and_swapped()
    data = rig.timeline.data()
    assert [history[:2] for history in data["blocks"][:2]] == [[[0, [0]], [1, [0, 1]]]] * 2
    assert [request["cached"] for request in data["requests"]] == [0, 4]
    assert_it_is_what_happened(rig)


@pytest.mark.parametrize(("mode", "away"), [("swap", [5, SWAPPED, -1, 8, 4]), ("recompute", [5, DROPPED, -1, 0, 0])])
def test_a_preempted_request(mode, away):
    """It takes its KV along to host memory, or loses it."""
    rig = shared_and_swapped(mode)
    states = rig.timeline.data()["requests"][1]["states"]
    assert states[1] == away
    assert states[2][1:3] == [RUNNING, 0]  # in the slot that a has left
    assert_it_is_what_happened(rig)


def test_a_step_that_fails_computes_nothing():
    rig = Rig()
    rig.add("a", [1, 2, 3], 3)
    rig.core.step()
    rig.runner.fails = lambda plan: True
    with pytest.raises(RuntimeError):
        rig.core.step()
    rig.runner.fails = lambda plan: False
    data = rig.run().timeline.data()
    assert (data["decode"], data["prefill"], data["sampled"]) == ([0, 0, 1, 1], [3, 0, 0, 0], [1, 0, 1, 1])
    assert data["end"][1] == data["begin"][1]
    assert data["requests"][0]["spans"] == [[0, 1, 0, 3], [2, 2, 3, 1]]


def test_what_a_step_that_fails_swaps_out_is_dropped():
    """Its copies may not have been made. No event says so, but the next frame shows it."""
    rig = Rig(num_blocks=7, block_size=2, preemption_mode="swap", num_cpu_blocks=8)
    for name in "ab":
        rig.add(name, [1, 2, 3, 4], 6)
    rig.runner.fails = lambda plan: bool(plan.swap_out)
    with pytest.raises(RuntimeError):
        rig.run()
    rig.runner.fails = lambda plan: False
    failed = len(rig.witness.frames) - 1
    rig.run()
    assert rig.witness.frames[failed]["requests"][1][0] == SWAPPED
    assert rig.witness.frames[failed + 1]["requests"][1][0] == DROPPED
    data = rig.timeline.data()
    for n, seen in enumerate(rig.witness.frames):
        if n != failed:  # the recording has nothing of what that step planned to compute
            assert frame(data, n) == seen


def test_a_recorder_that_comes_late_and_an_abort():
    rig = Rig()
    rig.add("a", [1, 2, 3], 5)
    for _ in range(2):
        rig.core.step()
    late = Timeline("late")
    rig.core.observers.append(late)
    rig.core.step()
    rig.core.abort("a")
    data = late.data()
    assert data["begin"] == [6]  # seconds since a arrived
    (request,) = data["requests"]
    assert request["states"] == [[0, RUNNING, 0, 4, 0], [1, FINISHED, -1, 5, 0]]
    assert (request["spans"], request["output"], request["reason"]) == ([[0, 1, 4, 1]], 3, "abort")
    assert data["sampled"] == [1]
    assert data["blocks"][:3] == [[[0, [0]], [1, []]], [[0, [0]], [1, []]], []]


def test_an_id_may_come_again():
    rig = Rig()
    for _ in range(2):
        rig.add("a", [1], 1)
        rig.core.step()
    assert [request["states"] for request in rig.timeline.data()["requests"]] == [
        [[0, RUNNING, 0, 0, 0], [1, FINISHED, -1, 1, 0]],
        [[1, RUNNING, 0, 0, 0], [2, FINISHED, -1, 1, 0]],
    ]


def test_a_long_run_stays_small_and_keeps_no_request_alive():
    rig = Rig(num_blocks=200)
    rig.add("a", [1] * 40, 500)
    rig.run()
    (request,) = rig.timeline.data()["requests"]
    assert request["spans"] == [[0, 5, 0, 8], [5, 499, 40, 1]]
    assert sum(len(history) for history in rig.timeline.data()["blocks"]) == 2 * 135
    reference, timeline = weakref.ref(rig.requests[0]), rig.timeline
    del rig
    gc.collect()
    assert reference() is None
    assert timeline.data()["requests"] == [request]


# ---------------------------------------------------------------------------- any run


@st.composite
def rigs(draw) -> Rig:
    rig = Rig(
        batching=draw(st.sampled_from(["continuous", "static"])),
        policy=draw(st.sampled_from(sorted(POLICIES))),
        block_size=draw(st.integers(1, 3)),
        num_blocks=draw(st.integers(7, 14)),  # few, so that requests have to give way
        max_num_seqs=draw(st.sampled_from([5, 4, 3, 2, 1])),
        max_num_batched_tokens=draw(st.sampled_from([12, 8, 5, 3, 2, 1])),
        num_cpu_blocks=draw(st.integers(0, 16)),
        preemption_mode=draw(st.sampled_from(PREEMPTION_MODES)),
        enable_prefix_caching=draw(st.booleans()),
    )
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=6)
    for number in range(draw(st.integers(3, 8))):
        rig.add(str(number), draw(prompts), draw(st.integers(1, 20)))
        for _ in range(draw(st.integers(0, 2))):
            rig.core.step()
        if draw(st.integers(0, 7)) == 0:
            rig.core.abort(str(draw(st.integers(0, number))))
    return rig.run()


@given(rigs())
def test_any_recording_is_what_happened(rig):
    assert_it_is_what_happened(rig)


# ---------------------------------------------------------------------------- the page

HOSTILE = [
    "</script><script>pwned = 1</script>",
    "<!--<script>",
    "<img src=x onerror='pwned = 1'>",
    '"\\',
    "\u2028\ud800",
    ">DATA<",
]


def hostile() -> Rig:
    rig = Rig(name="</title><script>pwned = 1</script>")
    for name in HOSTILE:
        rig.add(name, [1, 2], 3)
    return rig.run()


def data_in(page: str) -> str:
    return re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL).group(1)


def test_the_page_is_self_contained(tmp_path):
    write_timeline(tmp_path / "page.html", [shared_and_swapped().timeline])
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|\bsrc\s*=|\bhref\s*=|@import|\burl\(|<link|<iframe|\bfetch\(|import\(", page)
    assert "default-src 'none'" in page  # a browser would not let it, either


def test_no_name_breaks_out_of_the_data(tmp_path):
    rig, path = hostile(), tmp_path / "page.html"
    write_timeline(path, [rig.timeline, rig.timeline])
    page = path.read_text(encoding="utf-8")
    assert json.loads(data_in(page)) == {"runs": [rig.timeline.data()] * 2}
    assert "<" not in data_in(page)
    before, after = TEMPLATE.read_text(encoding="utf-8").split(">DATA<")  # there is one such place
    assert page.startswith(before) and page.endswith(after)


def test_a_page_without_runs_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="runs is empty"):
        write_timeline(tmp_path / "page.html", [])


# ---------------------------------------------------------------------------- the page in a browser

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
FLAGS += ["--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="module")
def browser():
    """Chromium. If MINICB_CHROMIUM names it, it has to work; else tests are skipped where there is none."""
    named = os.environ.get("MINICB_CHROMIUM")
    if not named:
        pytest.importorskip("playwright", reason="playwright isn't installed: pip install -e '.[browser]'")
    from playwright.sync_api import sync_playwright

    found = named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium found; MINICB_CHROMIUM may name one")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def show(browser, tmp_path):
    """show(rigs, **options) -> the page in the browser. It may neither complain nor ask for anything but itself."""
    complaints, pages = [], []

    def show(*rigs: Rig, width=1400, height=900, **options):
        path: Path = tmp_path / f"{len(pages)}.html"
        write_timeline(path, [rig.timeline for rig in rigs])
        page = browser.new_page(viewport={"width": width, "height": height}, **options)
        pages.append(page)
        page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: request.url != path.as_uri() and complaints.append(request.url))
        page.goto(path.as_uri())
        return page

    yield show
    for page in pages:
        page.close()
    assert complaints == []


def batches(batching: str) -> Rig:
    """Outputs of 3 to 23 tokens in 3 slots; none is preempted."""
    rig = Rig(name=batching, batching=batching, max_num_seqs=3, num_blocks=60)
    for number, max_tokens in enumerate([3, 23, 5, 4, 17, 6, 3, 9, 11]):
        rig.add(f"request {number}", [number] * (2 + 3 * number), max_tokens)
    return rig.run()


def crowded(mode: str) -> Rig:
    """Four requests that share a prefix, and blocks for about two of them: all of it happens."""
    memory = {"num_blocks": 15, "num_cpu_blocks": 30, "preemption_mode": mode, "enable_prefix_caching": True}
    rig = Rig(name=mode, max_num_seqs=4, max_num_batched_tokens=5, **memory)
    rig.add("first", [1] * 9, 10)
    rig.core.step()
    rig.core.step()
    for number in range(5):
        rig.add(f"request {number}", [1] * 8 + [number] * 5, 14)
    return rig.run()


def counters(page, run: int = 0) -> dict[str, str]:
    boxes = page.locator(".run").nth(run).locator("dl > div").all()
    return {box.locator("dt").inner_text(): " ".join(box.locator("dd").inner_text().split()) for box in boxes}


def texts(page, run: int, selector: str) -> list[str]:
    return page.locator(".run").nth(run).locator(selector).all_inner_texts()


pixel = """([selector, run, x, y]) => {
  const canvas = document.querySelectorAll(".run")[run].querySelector(selector), scale = canvas.width / canvas.clientWidth;
  return "#" + [...canvas.getContext("2d").getImageData(Math.round(x * scale), Math.round(y * scale), 1, 1).data]
    .slice(0, 3).map(value => value.toString(16).padStart(2, "0")).join("");
}"""


def wait(page, condition: str) -> None:
    """Until it holds. (Playwright's own way to wait is eval, which the page's policy forbids.)"""
    for _ in range(200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"{condition} doesn't hold after 10 s")


@pytest.mark.browser
@pytest.mark.parametrize(
    "make", [lambda: [batches("static"), batches("continuous")], lambda: [crowded("swap"), crowded("recompute")]]
)
def test_the_page_knows_every_frame(show, make):
    """Each frame, looked up at random by the page, is what the witness saw."""
    rigs = make()
    page = show(*rigs)
    for run, rig in enumerate(rigs):
        for n in reversed(range(len(rig.witness.frames))):
            state = page.evaluate("([n, run]) => timeline.state(n, run)", [n, run])
            requests = [
                (now["state"], now["computed"], now["known"], now["chunk"], now["hostBlocks"])
                for now in state["requests"]
                if now
            ]
            owners = {block: numbers for block, numbers in enumerate(state["blocks"], 1) if numbers}
            assert {"requests": requests, "owners": owners} == rig.witness.frames[n], f"run {run}, frame {n}"


@pytest.mark.browser
def test_scrubbing_shows_what_was_recorded(show):
    rigs = [batches("static"), batches("continuous")]
    page = show(*rigs)
    for run, rig in enumerate(rigs):
        data, names = rig.timeline.data(), [request.request_id for request in rig.requests]
        count = len(data["begin"])
        for n in (0, 1, count // 2, count - 1, count):
            time = data["begin"][n] if n < count else data["end"][-1]
            page.locator("#scrub").fill(str(time))
            assert page.evaluate("timeline.steps")[run] == n
            states = [request[0] for request in rig.witness.frames[n]["requests"]]
            tokens, slots, used = (sum(data[name][:n]) for name in ("sampled", "slots", "running"))
            shown = counters(page, run)
            assert shown["step"] == f"{n if n < count else 'end'} of {count}"
            assert shown["output tokens"] == f"{tokens} so far"
            assert shown["tokens / s"].split()[0] in (
                f"{tokens / time if time else 0:.2f}",
                f"{tokens / (time or 1):.0f}",
            )
            assert shown["slots in use"] == (f"{100 * used / slots:.0f}% so far" if n else "– so far")
            assert shown["wasted cells"] == f"{slots - used} of {slots}"
            assert shown["running"] == f"{states.count(RUNNING)} of 3"
            assert shown["finished"] == f"{states.count(FINISHED)} of {len(names)}"
            assert texts(page, run, ".queue span") == [
                name for name, state in zip(names, states, strict=True) if state == WAITING
            ]
            while_waiting = sum(3 - data["running"][k] for k in range(n) if data["waiting"][k])
            wasted = f"{slots - used} wasted so far, {while_waiting} of them while requests waited"
            assert texts(page, run, ".wasted") == [wasted]
            decode, prefill = (data["decode"] + [0])[n], (data["prefill"] + [0])[n]
            unused = 8 - decode - prefill
            assert texts(page, run, ".tokens") == [
                f"decode {decode} (solid), prefill {prefill} (striped), unused {unused} of 8"
            ]
            widths = (
                page.locator(".run")
                .nth(run)
                .locator(".budget")
                .evaluate("bar => [...bar.children].map(part => part.style.width)")
            )
            assert [float(width.strip("%")) for width in widths] == [100 * decode / 8, 100 * prefill / 8]


@pytest.mark.browser
def test_play_pause_and_the_end(show):
    rig = batches("continuous")
    page = show(rig)
    last = len(rig.witness.frames) - 1
    assert (page.evaluate("timeline.step"), page.evaluate("timeline.playing")) == (0, False)
    page.locator("#speed").select_option("4")
    page.locator("#play").click()
    wait(page, "timeline.step >= 3")
    assert page.locator("#play").inner_text() == "⏸ Pause"
    page.locator("#play").click()
    stopped = page.evaluate("timeline.step")
    page.wait_for_timeout(400)
    assert (page.evaluate("timeline.step"), page.evaluate("timeline.playing")) == (stopped, False)
    page.locator("h1").click()
    page.keyboard.press("Space")
    wait(page, f"timeline.step > {stopped}")
    page.keyboard.press("Space")
    assert page.evaluate("timeline.playing") is False
    page.evaluate(f"timeline.seek({last - 1})")
    page.keyboard.press("Space")
    wait(page, "!timeline.playing")
    assert page.evaluate("timeline.step") == last
    page.keyboard.press("Space")  # again from the beginning
    wait(page, f"timeline.step < {last}")


@pytest.mark.browser
def test_keys_and_buttons_go_one_step(show):
    rig = batches("continuous")
    page = show(rig)
    last = len(rig.witness.frames) - 1
    seen = []
    for key in (
        "ArrowRight",
        "ArrowRight",
        "ArrowRight",
        "ArrowLeft",
        "End",
        "ArrowRight",
        "ArrowLeft",
        "Home",
        "ArrowLeft",
    ):
        page.keyboard.press(key)
        seen.append(page.evaluate("timeline.step"))
    assert seen == [1, 2, 3, 2, last, last, last - 1, 0, 0]
    page.get_by_role("button", name="One step forward").click()
    page.locator("#scrub").focus()  # here the arrows are steps, too
    page.keyboard.press("ArrowRight")
    assert page.evaluate("timeline.step") == 2
    page.get_by_role("button", name="One step back").click()
    assert page.evaluate("timeline.step") == 1
    page.keyboard.press("Space")  # presses that button
    assert (page.evaluate("timeline.step"), page.evaluate("timeline.playing")) == (0, False)
    page.get_by_role("button", name="Play").focus()
    page.keyboard.press("Space")  # presses the button, once
    assert page.evaluate("timeline.playing") is True


@pytest.mark.browser
def test_one_clock_for_both_runs(show):
    """In seconds the static run is the one that ends later; in steps both show the same step."""
    rigs = [batches("static"), batches("continuous")]
    page = show(*rigs)
    assert [page.locator("h2 .name").nth(run).inner_text() for run in (0, 1)] == ["static", "continuous"]
    begins = [rig.timeline.data()["begin"] for rig in rigs]
    counts = [len(begin) for begin in begins]
    for n in range(0, counts[1], 5):
        page.evaluate(f"timeline.seek({n}, 1)")
        assert page.evaluate("timeline.steps") == [sum(begin <= begins[1][n] for begin in begins[0]) - 1, n]
    page.evaluate(f"timeline.seek({counts[1]}, 1)")
    assert page.evaluate("timeline.steps")[0] < counts[0]
    assert texts(page, 1, ".status")[0].startswith("done after")
    assert not texts(page, 0, ".status")[0].startswith("done")
    page.evaluate("timeline.seek(0)")
    assert page.evaluate("timeline.clock.at") == begins[0][0]
    moments = sorted({*begins[0], *begins[1], *(rig.timeline.data()["end"][-1] for rig in rigs)})
    for moment in moments[1:6]:  # the arrows stop wherever a step of any run begins
        page.keyboard.press("ArrowRight")
        assert page.evaluate("timeline.clock.at") == moment
    page.locator("#unit").select_option("steps")
    assert page.evaluate("timeline.steps[0] === timeline.steps[1]")
    page.locator("#scrub").fill("7")
    assert page.evaluate("timeline.steps") == [7, 7]
    assert counters(page, 0)["step"] == f"7 of {counts[0]}"
    page.keyboard.press("End")
    assert page.evaluate("timeline.steps") == counts  # the shorter one has stayed at its end


@pytest.mark.browser
def test_runs_stand_side_by_side_where_there_is_room(show):
    rigs = [batches("static"), batches("continuous")]
    for width, together in ((1400, True), (420, False)):
        page = show(*rigs, width=width)
        first, second = (page.locator(".run").nth(run).bounding_box() for run in (0, 1))
        assert (first["y"] == second["y"]) is together
        assert (first["x"] == second["x"]) is not together
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.browser
@pytest.mark.parametrize(("color_scheme", "paper"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 21, 23)")])
def test_light_and_dark(show, color_scheme, paper):
    page = show(batches("continuous"), color_scheme=color_scheme)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == paper
    other = "light" if color_scheme == "dark" else "dark"
    ink = "timeline.views[0].root.querySelector('.requests').toDataURL()"
    before = page.evaluate(ink)
    page.emulate_media(color_scheme=other)
    wait(page, f"({ink}) !== {json.dumps(before)}")  # what is painted changes with it


@pytest.mark.browser
def test_what_is_painted(show):
    """Slots and blocks have their owner's colour, and an unused slot is hatched."""
    page = show(batches("static"))
    data = batches("static").timeline.data()
    n = len(data["begin"]) - 1
    page.evaluate(f"timeline.seek({n + 1})")
    colours = ["#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#0072b2", "#d55e00"]
    for number, request in enumerate(data["requests"]):
        (first, _, slot, *_), (end, *_) = request["states"][-2:]
        x = page.evaluate(f"(timeline.views[0].x({first}) + timeline.views[0].x({end}, true)) / 2")
        assert page.evaluate(pixel, [".slots", 0, x, 14 * slot + 2]) == colours[number % 7]
    # After request 0, of 3 tokens, slot 0 stays empty until request 1, of 23 tokens, has ended.
    end = data["requests"][0]["states"][-1][0]
    x = page.evaluate(f"timeline.views[0].x({end})")
    row = {page.evaluate(pixel, [".slots", 0, x + 3 + k, 7]) for k in range(12)}
    assert len(row) > 2 and not row & set(colours)
    page.evaluate("timeline.seek(4)")
    state, grid = page.evaluate("timeline.state(4)"), page.evaluate("timeline.views[0].grid")
    assert sum(len(owners) for owners in state["blocks"]) > 3
    for block, owners in enumerate(state["blocks"]):
        at = [(block % grid["perRow"]) * grid["size"] + 3, (block // grid["perRow"]) * grid["size"] + 3]
        assert page.evaluate(pixel, [".blocks", 0, *at]) == (colours[owners[0] % 7] if owners else "#000000")


@pytest.mark.browser
def test_a_preemption_is_to_be_seen(show):
    """A swapped request is striped, and its blocks lie in host memory; a dropped one is crossed out."""
    rigs = [crowded("swap"), crowded("recompute")]
    page = show(*rigs)
    for run, (rig, state, word) in enumerate(zip(rigs, (SWAPPED, DROPPED), ("swap", "recompute"), strict=True)):
        data = rig.timeline.data()
        n, number = min(
            (change[0], i) for i, r in enumerate(data["requests"]) for change in r["states"] if change[1] == state
        )
        page.evaluate(f"timeline.seek({n}, {run})")
        name = data["requests"][number]["id"]
        assert f"preempts {name} ({word})" in texts(page, run, ".events")[0]
        assert any(text.endswith(name) and text[0] in "⇄✕" for text in texts(page, run, ".queue span"))
        hosts = sum(request[4] for request in rig.witness.frames[n]["requests"])
        assert texts(page, run, ".swapped")[0].split(",")[0] == (str(hosts) if state == SWAPPED else "none")
        seen = {
            page.evaluate(pixel, [".requests", run, 97 + x, 15 * number + 1 + y])
            for x in range(3, 10)  # inside its first cell
            for y in range(1, 11)
        }
        assert ("#b3261e" in seen) is (state == DROPPED)
        assert ("#ffffff" in seen) is (state == SWAPPED)
        shared = any(len(owners) > 1 for owners in rig.witness.frames[n]["owners"].values())
        assert ("shared" in texts(page, run, ".held")[0]) is shared
        held = len(rig.witness.frames[n]["owners"])
        assert texts(page, run, ".held")[0].startswith(f"{held} of 14 held")
        assert counters(page, run)["preempted"].startswith("1 ")


@pytest.mark.browser
def test_names_are_only_text(show):
    page = show(hostile())
    assert texts(page, 0, ".queue span")[:2] == HOSTILE[2:4]
    assert page.locator("h2 .name").inner_text() == "</title><script>pwned = 1</script>"
    page.keyboard.press("End")
    page.locator(".requests").hover(position={"x": 150, "y": 20})
    assert HOSTILE[1] in page.locator(".requests").get_attribute("title")
    assert page.evaluate("typeof pwned") == "undefined"


@pytest.mark.browser
def test_only_rows_in_sight_are_painted(show):
    rig = Rig(max_num_seqs=64, max_num_batched_tokens=512, num_blocks=2000)
    for number in range(1000):
        rig.add(f"request {number}", [1, 2, 3], 2 + number % 7)
    page = show(rig.run())
    height = "timeline.views[0].root.querySelector('.requests').clientHeight"
    assert page.evaluate(height) < 900
    page.locator(".rows").evaluate("box => box.scrollTop = box.scrollHeight")
    page.keyboard.press("End")
    page.locator(".requests").hover(position={"x": 200, "y": page.evaluate(height) - 5})
    assert page.locator(".requests").get_attribute("title").startswith("999: request 999, finished")


@pytest.mark.browser
def test_a_run_without_a_step(show):
    page = show(Rig())
    assert counters(page)["step"] == "end of 0"
