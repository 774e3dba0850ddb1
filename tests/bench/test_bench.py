"""bench.py and its measurements: on a simulated device, where figures are exact, and on a tiny model."""

import functools
import importlib.util
import itertools
import json
import math
import re
import statistics
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import eager

from minicb import Engine
from minicb.bench import measure, peers, tables
from minicb.bench.measure import (
    QUICK,
    SIZES,
    Bench,
    BenchRun,
    BenchSizes,
    Roofline,
    describe_workload,
    execution_seconds,
    make_core,
    prefill_plans,
    run_workload,
    scheduler_microseconds,
)
from minicb.bench.tables import TABLES, crossing
from minicb.observe.metrics import Metrics
from minicb.params import SamplingParams
from minicb.plan import Chunk, Step, StepPlan
from minicb.policies import POLICIES
from minicb.request import Request
from minicb.simulate.cost_model import DEVICES, CostModel, DeviceSpec, ModelShape, VirtualClock
from minicb.simulate.scenarios import BLOCK_SIZE, LLAMA_8B, USER_KINDS, agent_hub, synthetic_data
from minicb.simulate.workload import Arrival, serve

TINY_SIZES = BenchSizes(
    slots=8, num_prompts=20, prompt_len=32, mean_output=16, caps=(4, 16, 64), contexts=(16, 512), num_shared=6,
    num_online=20, num_bulk=20, objectives={"ttft": 0.5, "tpot": 0.05},
)  # fmt: skip
LAUNCH = 1e-3  # seconds, enough to be seen
COST_MODEL = CostModel(LLAMA_8B, DEVICES["H100"], launch_seconds=LAUNCH)
SIMULATED = Bench("simulated H100", TINY_SIZES, None, COST_MODEL, LLAMA_8B.vocab_size, 8192, {}, True)
MAY_BE_UNKNOWN = {"bulk": {"GB/s", "% of roofline"}, "online": {"TTFT of urgent"}}  # columns of tables


@pytest.fixture(scope="module")
def engine(make_model) -> Engine:
    """Large enough for prompts of 1500 tokens."""
    folder = make_model("llama", max_position_embeddings=4096)
    return eager(folder, dtype="float32", block_size=16, num_blocks=700, max_num_seqs=16, max_num_batched_tokens=2048)


@pytest.fixture(scope="module")
def here(engine) -> Bench:
    """On this machine; the roofline is that of some other."""
    shape = ModelShape.of(engine.runner.model.config)._replace(itemsize=4)
    sizes = TINY_SIZES._replace(slots=4, num_prompts=8, mean_output=8, caps=(4, 16), contexts=(16, 64), num_shared=4)
    sizes = sizes._replace(num_online=8, num_bulk=8)
    cost_model = CostModel(shape, DEVICES["H100"], launch_seconds=0.0)
    return Bench("this machine", sizes, engine, cost_model, engine.vocab_size, engine.max_model_len, {}, True)


@pytest.fixture(scope="module")
def hub_run():
    return agent_hub(num_users=40, seconds=120.0, warm_up=30.0, interval=10.0)


@pytest.fixture
def calls(monkeypatch, hub_run) -> dict[str, list]:
    """What doesn't depend on the bench, made small; how it was called."""
    calls = {"hub": [], "bulk": [], "scale": []}

    def small_hub(policy: str, **options: Any):
        calls["hub"].append((policy, options))
        return hub_run

    def small_synthetic_data(num_prompts: int, batching: str) -> Metrics:
        calls["bulk"].append((num_prompts, batching))
        return synthetic_data(40, batching=batching, max_num_seqs=8)

    def small_microseconds(**setting: int) -> dict[str, float]:
        calls["scale"].append(setting)
        return {"schedule": 1.0, "batch": 2.0, "update": 4.0}

    monkeypatch.setattr(tables, "agent_hub", small_hub)
    monkeypatch.setattr(tables, "synthetic_data", small_synthetic_data)
    monkeypatch.setattr(tables, "scheduler_microseconds", small_microseconds)
    monkeypatch.setattr(tables, "LONG_PROMPT_LEN", 1500)
    monkeypatch.setattr(tables, "NUM_DECODES", 4)
    return calls


class Runs(list):
    """A table's runs in order: (changes, arrivals, what came of it)."""

    def __call__(
        self, bench: Bench, workload: list[Arrival], num_blocks: int | None = None, **changes: Any
    ) -> BenchRun:
        result = run_workload(bench, workload, num_blocks, **changes)
        self.append(SimpleNamespace(num_blocks=num_blocks, changes=changes, workload=workload, result=result))
        return result

    def with_changes(self, **changes: Any) -> list[SimpleNamespace]:
        return [one for one in self if one.changes == changes]


@pytest.fixture
def runs(monkeypatch) -> Runs:
    runs = Runs()
    monkeypatch.setattr(tables, "run_workload", runs)
    return runs


def columns(table: dict[str, Any], *names: str) -> list[list[Any]]:
    return [[row[name] for row in table["rows"]] for name in names]


# ------------------------------------------------------------------ what tables are made with


def test_the_roofline_adds_up_steps_worked_by_hand():
    """Two layers of 8 * 8 * 3 * 2 = 192 parameters in attention's matrices and 3 * 8 * 10 = 240 in the MLP's, a head of
    16 * 8; 4 bytes each. A position has 2 * 2 * 1 * 4 numbers. 1000 bytes and 10,000 FLOPs a second."""
    shape = ModelShape(2, 8, 10, 2, 1, 4, 16, True, 4)
    layer, head, position = 2 * 8 * 4 * 3 + 240, 16 * 8, 2 * 2 * 1 * 4 * 4
    roofline = Roofline(CostModel(shape, DeviceSpec("d", 1e9, 1e3, 1e4, 1e3, 1e3), launch_seconds=9.0), 4)
    requests = [Request("a", [1] * 6, SamplingParams()), Request("b", [1] * 9, SamplingParams())]

    def step(begin: float, end: float, *chunks: Chunk, **swaps: Any) -> None:
        before = Step(0, begin, math.nan, StepPlan(list(chunks), **swaps), [], 0, 0, 0, 0, 0, 0)
        roofline.on_plan(before)
        roofline.on_step(before._replace(end=end))

    step(0.0, 5.0, Chunk.of(requests[0], 0, 4))  # half a prompt: the head has nothing to do
    bytes_read = 4 * 2 * layer + 4 * position
    attention = max((4 + 4) * position / 1e3, 4 * 2 * 2 * 4 * (1 + 2 + 3 + 4) / 1e4)
    seconds = max(4 * 2 * layer / 1e3, 2 * 2 * layer * 4 / 1e4) + attention
    assert (roofline.bytes_read, roofline.busy_seconds) == (bytes_read, 5.0)
    assert roofline.seconds == pytest.approx(seconds)
    step(6.0, 8.0, Chunk.of(requests[0], 4, 2), Chunk.of(requests[1], 8, 1), swap_out=[(1, 1)])
    bytes_read += 4 * (2 * layer + head) + (6 + 9) * position
    seconds += max(4 * 2 * layer / 1e3, 2 * 2 * layer * 3 / 1e4) + max(4 * head / 1e3, 2 * head * 2 / 1e4)
    seconds += max((6 + 9 + 3) * position / 1e3, 4 * 2 * 2 * 4 * (5 + 6 + 9) / 1e4)  # and not what the swap takes
    assert (roofline.bytes_read, roofline.busy_seconds) == (bytes_read, 7.0)
    assert roofline.seconds == pytest.approx(seconds)
    step(8.0, 9.0, swap_in=[(1, 1)])  # no forward pass, and the time counts all the same
    assert (roofline.bytes_read, roofline.busy_seconds) == (bytes_read, 8.0)
    assert roofline.seconds == pytest.approx(seconds)


def test_a_simulated_run_is_at_its_roofline_but_for_the_launches():
    """And its figures are those of the metrics and of all that was read."""
    workload = SIMULATED.workload(num_prompts=10, random_input_len=20, random_output_len=9)
    result = run_workload(SIMULATED, workload, max_num_batched_tokens=64)
    launches = LAUNCH * result.metrics.num_steps
    assert result.roofline_seconds == pytest.approx(result.busy_seconds - launches)
    assert result.roofline_figures == {}, "it is at its roofline by definition"
    assert result.busy_seconds == pytest.approx(result.metrics.seconds), "all requests were there from the start"
    assert result.tokens_per_s == pytest.approx(90 / result.metrics.seconds)
    assert 0 < result.bytes_read / result.busy_seconds < DEVICES["H100"].bandwidth


def test_how_near_a_run_came_to_its_roofline(here):
    result = run_workload(here, here.workload(num_prompts=4, random_input_len=20, random_output_len=9))
    assert result.metrics.num_output_tokens == 36
    assert 0 < result.roofline_seconds < result.busy_seconds <= result.metrics.seconds
    assert result.roofline_figures == {
        "GB/s": result.bytes_read / result.busy_seconds / 1e9,
        "% of roofline": 100 * result.roofline_seconds / result.busy_seconds,
    }


def test_a_workload_is_described_as_it_is():
    """Whatever it was drawn or read from."""
    arrivals = [Arrival(0.0, [1] * length, output_len) for length, output_len in ((3, 7), (5, 8), (4, 12))]
    assert describe_workload(arrivals) == "3 prompts of 3-5 tokens, outputs of 7-12 (mean 9)"
    assert describe_workload(arrivals[:1]) == "1 prompts of 3 tokens, outputs of 7 (mean 7)"


@pytest.mark.parametrize("where", ["simulated", "here"])
def test_a_core_has_an_empty_pool_of_its_own_and_the_changes_asked_for(where, here):
    bench = here if where == "here" else SIMULATED
    core, wait = make_core(bench)
    scheduler = core.scheduler
    assert scheduler.maximum == (bench.sizes.slots, 2048)
    assert not scheduler.static
    assert not scheduler.pool.enable_prefix_caching
    assert scheduler.pool.num_free == scheduler.pool.num_usable > 100
    changes = {"batching": "static", "scheduling_policy": "sjf", "preemption_mode": "swap", "max_num_seqs": 3}
    other, _ = make_core(bench, 20, enable_prefix_caching=True, max_num_batched_tokens=99, **changes)
    assert other.scheduler.maximum == (3, 99)
    assert other.scheduler.static
    assert isinstance(other.scheduler.policy, POLICIES["sjf"])
    assert other.scheduler.memory.preemption_mode == "swap"
    assert (other.scheduler.pool.num_blocks, other.scheduler.pool.enable_prefix_caching) == (20, True)
    assert other.scheduler is not scheduler
    if where == "here":
        assert other.runner is here.engine.runner
        assert here.engine.scheduler not in (scheduler, other.scheduler)
    before = core.clock()
    wait(0.01)
    assert core.clock() - before >= 0.01
    with pytest.raises(TypeError, match="max_num_seq"):
        make_core(bench, max_num_seq=3)


def test_options_of_the_command_line_come_before_the_defaults_of_a_table():
    bench = SIMULATED._replace(options={"random_input_len": 5, "seed": 3})
    workload = bench.workload(num_prompts=4, random_input_len=100, random_output_len=7)
    assert [(len(arrival.prompt), arrival.output_len) for arrival in workload] == [(5, 7)] * 4
    assert workload != SIMULATED.workload(num_prompts=4, random_input_len=5, random_output_len=7), "the seed"


def test_plans_that_prefill_one_prompt():
    core, _ = make_core(SIMULATED, max_num_batched_tokens=10)
    plans = prefill_plans(core, [7] * 25)
    chunks = [chunk for plan in plans for chunk in plan.chunks]
    assert [(chunk.start, chunk.length) for chunk in chunks] == [(0, 10), (10, 10), (20, 5)]
    assert [chunk.needs_sampling for chunk in chunks] == [False, False, True]
    assert list(chunks[0].request.block_table) == [1]
    assert list(prefill_plans(core, [7] * 33)[0].chunks[0].request.block_table) == [1, 2]
    seconds = sum(COST_MODEL.step_seconds(plan, BLOCK_SIZE) for plan in plans)
    assert execution_seconds(SIMULATED, core, plans) == pytest.approx(seconds)


def test_plans_run_on_this_machine(here):
    core, _ = make_core(here, max_num_batched_tokens=10)
    assert 0 < execution_seconds(here, core, prefill_plans(core, [7] * 25)) < 10


def test_this_machine_has_a_speed(engine):
    device = measure.measure_device(engine)
    assert 1e8 < device.bandwidth < 1e14
    assert 1e8 < device.flops < 1e16


def test_the_scheduler_takes_some_time():
    microseconds = scheduler_microseconds(running=4, waiting=8, blocks=300)
    assert list(microseconds) == ["schedule", "batch", "update"]
    assert all(0 < value < 1e5 for value in microseconds.values())


# ------------------------------------------------------------------ the tables


@pytest.mark.parametrize("where", ["simulated", "here"])
@pytest.mark.parametrize("name", TABLES)
def test_tables_are_complete(name, where, here, calls, bench_py):
    if where == "here" and name in ("scale", "hub"):
        pytest.skip("the same everywhere")
    table = TABLES[name](here if where == "here" else SIMULATED)
    rows, may_be_unknown = table["rows"], MAY_BE_UNKNOWN.get(name, ())
    assert rows
    assert all(list(row) == list(rows[0]) for row in rows)
    for row in rows:
        for column, value in row.items():
            assert isinstance(value, (int, float, str))
            if not isinstance(value, str) and not (math.isnan(value) and column in may_be_unknown):
                assert math.isfinite(value), (column, value)
                assert value >= 0
    if "plot" in table:
        x, plotted = table["plot"]
        assert {*x, *plotted} <= rows[0].keys()
    lines = list(bench_py.format_table(table))
    assert lines[0] == table["title"]
    assert len({len(line) for line in lines[1 : 2 + len(rows)]}) == 1, "columns are aligned"
    assert len(lines) == 2 + len(rows) + ("note" in table)


VARIANCE = {
    "num_prompts": 20, "random_input_len": 32, "random_output_len": 16, "output_distribution": "exponential",
}  # fmt: skip


def test_variance(runs):
    """On a simulated device static batching never wins, and loses more the more lengths differ."""
    table = TABLES["variance"](SIMULATED)
    static, continuous = runs.with_changes(batching="static"), runs.with_changes()[1:]
    assert len(static) == len(continuous) == len(table["rows"]) == 3
    for row, cap, a, b in zip(table["rows"], TINY_SIZES.caps, static, continuous, strict=True):
        assert a.workload == b.workload
        assert len(a.workload) == 20
        assert {len(arrival.prompt) for arrival in a.workload} == {32}
        assert row["outputs up to"] == cap
        lens = [arrival.output_len for arrival in SIMULATED.workload(**VARIANCE, max_output_len=10**9)]
        assert [arrival.output_len for arrival in a.workload] == [min(cap, length) for length in lens]
        for one, name in ((a, "static tok/s"), (b, "continuous tok/s")):
            metrics = one.result.metrics
            assert row[name] == metrics.num_output_tokens / metrics.seconds
            assert metrics.num_output_tokens == sum(arrival.output_len for arrival in a.workload)
        assert row["static slots in use"] == a.result.metrics.all_steps.occupancy
        assert row["continuous slots in use"] == b.result.metrics.all_steps.occupancy
        assert row["ratio"] == row["continuous tok/s"] / row["static tok/s"]
    [ratios] = columns(table, "ratio")
    assert all(ratio >= 1 for ratio in ratios)
    assert ratios == sorted(ratios)
    assert describe_workload(static[-1].workload) in table["title"]


def test_variance_with_a_cap_of_ones_own(here, runs):
    """One cap, one row; and how near it came to what the hardware allows, where that is known."""
    table = TABLES["variance"](here._replace(options={"max_output_len": 6, "random_input_len": 5}))
    [row] = table["rows"]
    [continuous] = runs.with_changes()[1:]
    assert row["outputs up to"] == 6 == max(arrival.output_len for arrival in continuous.workload)
    assert "8 prompts of 5 tokens, outputs of 1-6" in table["title"]
    assert {name: row[name] for name in ("GB/s", "% of roofline")} == continuous.result.roofline_figures


def test_mixed():
    """The smaller the chunks, the shorter the longest gap and the later the long prompt's first token."""
    table = TABLES["mixed"](SIMULATED)
    prefilled, longest, median, ttft = columns(
        table, "prefilled", "longest gap ms", "median gap ms", "TTFT of the long prompt s"
    )
    assert prefilled == ["whole", "in steps of 1024", "in steps of 256"]
    assert longest[0] > longest[1] > longest[2] > min(median)
    assert ttft[0] < ttft[1] < ttft[2]
    assert longest[0] == pytest.approx(1000 * ttft[0]), "it came just before a step, which is the gap"
    assert longest[0] == pytest.approx(mixed_step_ms(4000)), "all of it"
    assert longest[1] == pytest.approx(mixed_step_ms(1024 - 32)), "the last chunk of that length"


def mixed_step_ms(length: int) -> float:
    """A step with 32 decodes and the last whole chunk of this length of a prompt of 4000. When it came they had 8 output
    tokens, and since then they got one in each step."""
    num_before = 4000 // length - 1
    decodes = [Chunk.of(Request("d", [1] * (24 + num_before), SamplingParams()), 23 + num_before, 1) for _ in range(32)]
    long = Chunk.of(Request("long", [1] * 4000, SamplingParams()), num_before * length, length)
    return 1000 * COST_MODEL.step_seconds(StepPlan([*decodes, long]), BLOCK_SIZE)


def test_online(runs, monkeypatch):
    """Each row says what the metrics say, and every policy has the same requests at the same times."""
    served = record_served(monkeypatch)
    table = TABLES["online"](SIMULATED._replace(quick=False, sizes=TINY_SIZES._replace(num_online=60)))
    everything, *policies = runs[1:]
    capacity = 60 / everything.result.metrics.seconds / everything.result.metrics.all_steps.occupancy
    assert len(policies) == len(table["rows"]) == 6 * len(POLICIES)
    expected = [
        (pytest.approx(load * capacity), burstiness, policy)
        for load, burstiness, policy in itertools.product((0.6, 0.9, 1.2), (1.0, 0.25), POLICIES)
    ]
    assert list(zip(*columns(table, "req/s", "burstiness", "policy"), strict=True)) == expected
    for row, one in zip(table["rows"], policies, strict=True):
        metrics, latencies = one.result.metrics, one.result.metrics.latencies()
        assert one.changes == {"scheduling_policy": row["policy"]}
        assert (row["TTFT s"], row["TTFT p99"]) == (latencies["ttft"]["mean"], latencies["ttft"]["p99"])
        assert row["TPOT ms"] == 1000 * latencies["tpot"]["mean"]
        assert row["TPOT p99"] == 1000 * latencies["tpot"]["p99"]
        assert row["E2EL s"] == latencies["e2el"]["mean"]
        assert row["goodput req/s"] == metrics.goodput(TINY_SIZES.objectives)
        assert max(arrival.time for arrival in one.workload) == pytest.approx(60 / row["req/s"])
        assert metrics.num_completed == 60
    for requests, row in zip(served[2:], table["rows"], strict=True):
        urgent = [request.metrics.ttft for request in requests if request.scheduling.priority == 0]
        assert row["TTFT of urgent"] == pytest.approx(statistics.mean(urgent))
    for first in range(0, len(policies), len(POLICIES)):
        pattern = served[2 + first : 2 + first + len(POLICIES)]
        assert all(described(requests) == described(pattern[0]) for requests in pattern)
    assert table["note"].startswith("One of 5 clients sends three quarters of the requests; an eighth are urgent.")
    clients = [request.scheduling.client for request in served[2]]
    assert len(set(clients)) == 5
    assert clients.count("busy") == pytest.approx(45, abs=10)


def record_served(monkeypatch) -> list[list[Request]]:
    """The requests of each run to come."""
    served = []

    def record(*args: Any, **kwargs: Any) -> list[Request]:
        served.append(serve(*args, **kwargs))
        return served[-1]

    monkeypatch.setattr(measure, "serve", record)
    return served


def described(requests: list[Request]) -> list[tuple]:
    """What they ask for, and when: times count from the first."""
    return [
        (
            pytest.approx(request.arrival_time - requests[0].arrival_time, abs=1e-9),
            request.token_ids[: request.num_prompt_tokens],
            request.params,
            request.scheduling.client,
            request.scheduling.priority,
            request.scheduling.expected_output_len,
        )
        for request in requests
    ]


def test_policies_do_online_what_they_are_for(runs):
    """More than can be served, in bursts: sjf has the shortest mean wait, and priority lets urgent ones pass."""
    table = TABLES["online"](SIMULATED._replace(sizes=TINY_SIZES._replace(num_online=300)))
    assert len(table["rows"]) == len(POLICIES), "one pattern, as it is quick"
    rows = {row["policy"]: row for row in table["rows"]}
    assert rows["sjf"]["TTFT s"] == min(row["TTFT s"] for row in rows.values())
    assert rows["priority"]["TTFT of urgent"] == min(row["TTFT of urgent"] for row in rows.values())
    assert rows["priority"]["TTFT of urgent"] < rows["fcfs"]["TTFT of urgent"] / 2


def test_online_at_a_rate_of_ones_own(runs):
    table = TABLES["online"](SIMULATED._replace(options={"request_rate": 30.0, "burstiness": 2.0}))
    assert columns(table, "req/s", "burstiness") == [[30.0] * len(POLICIES), [2.0] * len(POLICIES)]
    assert len(runs) == 1 + len(POLICIES), "nothing has to be found out"
    assert max(arrival.time for arrival in runs[-1].workload) == pytest.approx(20 / 30)
    table = TABLES["online"](SIMULATED._replace(options={"burstiness": 2.0}))
    assert columns(table, "burstiness") == [[2.0] * len(POLICIES)], "at the rates that the table has for itself"


@pytest.mark.parametrize("host_bandwidth", [64e9, 1e6])
def test_pressure(runs, host_bandwidth):
    device = DEVICES["H100"]._replace(host_bandwidth=host_bandwidth)
    cost_model = CostModel(LLAMA_8B, device, launch_seconds=LAUNCH)
    table = TABLES["pressure"](SIMULATED._replace(cost_model=cost_model))
    mode = "swap" if host_bandwidth == 64e9 else "recompute"
    for row, context in zip(table["rows"], TINY_SIZES.contexts, strict=True):
        assert row["context"] == context
        num_blocks = math.ceil(context / BLOCK_SIZE)
        assert row["swap ms"] == pytest.approx(1000 * 2 * num_blocks * BLOCK_SIZE * LLAMA_8B.kv_bytes / host_bandwidth)
        prefill = StepPlan([Chunk.of(Request("r", [1] * context, SamplingParams()), 0, context)])
        assert row["recompute ms"] == pytest.approx(1000 * cost_model.step_seconds(prefill, BLOCK_SIZE))
        rounds = [one for one in runs if one.workload and len(one.workload[0].prompt) == context][1:]
        assert [one.changes["preemption_mode"] for one in rounds] == ["swap", "recompute", "auto"] * 2
        assert all(one.num_blocks == 1 + 4 * (num_blocks + 1) for one in rounds)
        for one in rounds:
            preemptions = one.result.metrics.preemptions_by_mode
            assert preemptions.total() >= 1, "there is pressure"
            assert set(preemptions) <= {one.changes["preemption_mode"], mode}
        by_mode = {one.changes["preemption_mode"]: one.result for one in rounds}
        assert all(row[f"{name} tok/s"] == result.tokens_per_s for name, result in by_mode.items())
        assert row["auto tok/s"] == row[f"{mode} tok/s"], "it knows what is faster there"
        total = by_mode["auto"].metrics.preemptions_by_mode.total()
        assert row["auto swapped"] == f"{total if mode == 'swap' else 0} of {total}"
    assert table["note"] == f"{mode.capitalize()} is faster at every length measured"


def test_pressure_counts_the_better_of_two_rounds(here, runs):
    """Which is which is up to this machine."""
    [row] = TABLES["pressure"](here._replace(sizes=here.sizes._replace(contexts=(16,))))["rows"]
    for mode in ("swap", "recompute", "auto"):
        rounds = [one.result for one in runs.with_changes(preemption_mode=mode)]
        better = max(rounds, key=lambda result: result.tokens_per_s)
        assert row[f"{mode} tok/s"] == better.tokens_per_s
        assert len(rounds) == 2
    assert {name: row[name] for name in better.roofline_figures} == better.roofline_figures, "of auto"


def test_where_swap_and_recompute_cross():
    def rows(*pairs: tuple[float, float]) -> list[dict[str, float]]:
        return [
            {"context": 10 * number, "swap ms": swap, "recompute ms": recompute}
            for number, (swap, recompute) in enumerate(pairs, 1)
        ]

    assert crossing(rows((1, 2), (3, 4))) == "Swap is faster at every length measured"
    assert crossing(rows((2, 1), (5, 5))) == "Recompute is faster at every length measured"
    assert crossing(rows((2, 1))) == "Recompute is faster at every length measured"
    once = crossing(rows((2, 1), (3, 2), (4, 5), (5, 6)))
    assert once == "Swap and recompute cross between contexts of 20 and 30 tokens; at the longest swap is faster"
    twice = crossing(rows((1, 2), (3, 2), (4, 5), (7, 6)))
    assert twice == (
        "Swap and recompute cross between contexts of 10 and 20, 20 and 30, 30 and 40 tokens; "
        "at the longest recompute is faster"
    )


def test_prefix(runs):
    """Nothing is gained where nothing is shared, and in a simulation nothing is lost."""
    table = TABLES["prefix"](SIMULATED)
    shared, own = table["rows"]
    off, on = runs.with_changes(enable_prefix_caching=False), runs.with_changes(enable_prefix_caching=True)
    for row, without, with_caching in zip(table["rows"], off, on, strict=True):
        assert without.workload == with_caching.workload
        assert all(1020 <= len(arrival.prompt) <= 1060 for arrival in without.workload)
        assert without.result.metrics.num_cached_tokens == 0
        assert row["hit rate"] == with_caching.result.metrics.prefix_cache_hit_rate
        assert row["mean TTFT s, caching off"] == without.result.metrics.latencies()["ttft"]["mean"]
        assert row["TTFT s, on"] == with_caching.result.metrics.latencies()["ttft"]["mean"]
        assert row["off / on"] == row["mean TTFT s, caching off"] / row["TTFT s, on"]
        assert row["tok/s, off"] == without.result.tokens_per_s
        assert row["tok/s, on"] == with_caching.result.tokens_per_s
    assert (own["hit rate"], own["off / on"], own["tok/s, off"]) == (0.0, 1.0, own["tok/s, on"])
    # All but the first of six prompts find 31 blocks of 32 tokens, the whole blocks in 1000 tokens.
    num_tokens = sum(len(arrival.prompt) for arrival in on[0].workload)
    assert shared["hit rate"] * num_tokens == pytest.approx(5 * 31 * 32)
    assert shared["off / on"] > 1.5
    assert shared["tok/s, on"] > shared["tok/s, off"]


@pytest.mark.parametrize("quick", [True, False])
def test_bulk(runs, calls, quick):
    table = TABLES["bulk"](SIMULATED._replace(quick=quick))
    assert calls["bulk"] == [(2000 if quick else 10_000, batching) for batching in ("static", "continuous")]
    static, continuous = (runs.with_changes(batching=name)[0].result for name in ("static", "continuous"))
    assert runs[0].workload == runs[1].workload
    assert len(runs[0].workload) == 20
    rows = {(row["device"] == "simulated H100, 20 prompts", row["batching"]): row for row in table["rows"]}
    for batching, result in (("static", static), ("continuous", continuous)):
        row = rows[True, batching]
        assert row["tok/s"] == pytest.approx(result.tokens_per_s)
        assert row["slots in use while any wait"] == f"{result.metrics.steps_with_queue.occupancy:.1%}"
        assert row["in all"] == f"{result.metrics.all_steps.occupancy:.1%}"
        simulated, metrics = rows[False, batching], synthetic_data(40, batching=batching, max_num_seqs=8)
        assert simulated["tok/s"] == metrics.throughput()["output_tokens"]
        assert simulated["slots in use while any wait"] == f"{metrics.steps_with_queue.occupancy:.1%}"
        assert simulated["device"] == f"simulated H100, 8B, {2000 if quick else 10_000} prompts"
    assert continuous.metrics.steps_with_queue.occupancy > static.metrics.steps_with_queue.occupancy
    assert continuous.tokens_per_s > static.tokens_per_s


def test_bulk_on_this_machine(here, runs, calls):
    rows = TABLES["bulk"](here)["rows"]
    for batching in ("static", "continuous"):
        simulated, own = (row for row in sorted(rows, key=lambda row: row["device"]) if row["batching"] == batching)
        [one] = runs.with_changes(batching=batching)
        assert {name: own[name] for name in one.result.roofline_figures} == one.result.roofline_figures
        assert all(math.isnan(simulated[name]) for name in one.result.roofline_figures), (
            "there is nothing to be near to"
        )


def test_scale(calls):
    """One thing changes at a time."""
    table = TABLES["scale"](SIMULATED)
    settings = [list(setting.values()) for setting in calls["scale"]]
    assert settings == [
        [16, 0, 20_000], [64, 0, 20_000], [256, 0, 20_000], [64, 1000, 20_000], [64, 100_000, 20_000], [64, 0, 100_000],
    ]  # fmt: skip
    for row, setting in zip(table["rows"], calls["scale"], strict=True):
        assert row == setting | {"schedule": 1.0, "batch": 2.0, "update": 4.0, "together": 7.0}


def test_hub(calls, hub_run):
    table = TABLES["hub"](SIMULATED)
    TABLES["hub"](SIMULATED._replace(quick=False))
    assert calls["hub"] == [(policy, {"seconds": seconds}) for seconds in (180.0, 600.0) for policy in POLICIES]
    for row, policy in zip(table["rows"], POLICIES, strict=True):
        ttft = hub_run.latency("ttft")
        assert row["policy"] == policy
        assert row["tok/s"] == statistics.mean(hub_run.rates)
        assert row["in the worst minute"] == min(hub_run.rates)
        assert (row["TTFT s"], row["TTFT p99"]) == (ttft["mean"], ttft["p99"])
        assert all(row[f"TTFT of {kind}"] == hub_run.latency("ttft", kind)["mean"] for kind in USER_KINDS)
        assert row["TPOT ms"] == 1000 * hub_run.latency("tpot")["mean"]


# ------------------------------------------------------------------ peers

COMPARE_OPTIONS = {"num_prompts": 6, "random_input_len": 20, "random_output_len": 4, "max_output_len": 8}


def test_static_batches_of_transformers(here, make_model, monkeypatch):
    """As many at a time as there are slots, each batch as long as its longest output, prompts padded on the left."""
    model = peers.load_transformers(make_model("llama", max_position_embeddings=4096), "cpu")
    batches, generate = [], model.generate

    def record(ids: torch.Tensor, attention_mask: torch.Tensor, generation_config: Any) -> torch.Tensor:
        tokens = generate(ids, attention_mask=attention_mask, generation_config=generation_config)
        batches.append((ids, attention_mask, tokens.shape[1] - ids.shape[1]))
        return tokens

    monkeypatch.setattr(model, "generate", record)
    workload = [Arrival(0.0, list(range(1, 1 + length)), length) for length in (3, 7, 2, 5, 4)]
    assert peers.transformers_static(model, workload, slots=2) > 0
    assert [num_new for *_, num_new in batches] == [7, 5, 4]
    prompts = [row[mask == 1].tolist() for ids, masks, _ in batches for row, mask in zip(ids, masks, strict=True)]
    assert prompts == [arrival.prompt for arrival in workload]
    assert batches[0][1].tolist() == [[0, 0, 0, 0, 1, 1, 1], [1] * 7]
    assert peers.num_output_tokens(workload) == 21


def test_compare(here, monkeypatch):
    """All have the same workload, one after another, and the better of two rounds counts."""
    calls = []

    def peer(name: str, speeds: list[float]):
        def run(model: Any, workload: list[Arrival], slots: int) -> float:
            calls.append((name, workload, slots))
            return speeds.pop(0)

        return run

    monkeypatch.setattr(peers, "transformers_continuous", peer("continuous", [9e9, 20.0, 10.0]))
    monkeypatch.setattr(peers, "transformers_static", peer("static", [9e9, 5.0, 8.0]))
    speeds = iter([9e9, 30.0, 40.0, 1.0])
    monkeypatch.setattr(
        peers, "run_workload", lambda bench, work: calls.append(("minicb", work, 4)) or Fake(next(speeds))
    )
    bench = here._replace(options=COMPARE_OPTIONS)
    table = peers.compare_table(bench, SimpleNamespace(dtype=torch.float32))
    names = ["minicb", "continuous", "static"]
    assert [name for name, *_ in calls] == names * 3 + ["minicb"]
    small, workload = calls[0][1], calls[3][1]
    assert max(arrival.output_len for arrival in small) <= 4
    assert all(work == small for _, work, _ in calls[:3])
    assert all(work == workload for _, work, _ in calls[3:])
    assert len(workload) == 6
    assert {len(arrival.prompt) for arrival in workload} <= set(range(3, 38))
    assert {slots for *_, slots in calls} == {4}
    engines, best, faster, roofline = columns(table, "engine", "tok/s", "minicb is faster by", "% of roofline")
    assert best == [40.0, 20.0, 8.0]
    assert faster == [1.0, 2.0, 5.0]
    tokens = peers.num_output_tokens(workload)
    assert roofline == [pytest.approx(100 * speed / (tokens / 0.5)) for speed in best]
    assert [engine.partition(",")[0] for engine in engines] == ["minicb", "transformers", "transformers"]


class Fake(SimpleNamespace):
    """A run of a speed."""

    def __init__(self, speed: float):
        super().__init__(tokens_per_s=speed, roofline_seconds=0.5)


@pytest.mark.real
def test_compare_with_transformers(here, make_model):
    """transformers' continuous batching takes half a minute on a CPU."""
    model = peers.load_transformers(make_model("llama", max_position_embeddings=4096), "cpu")
    table = peers.compare_table(here._replace(options=COMPARE_OPTIONS), model)
    assert [row["tok/s"] > 0 for row in table["rows"]] == [True] * 3


# ------------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def bench_py() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench", Path(__file__).parents[2] / "bench.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def command(bench_py, monkeypatch):
    """command("variance", "--quick", …) runs bench.py in this process."""

    def run(*argv: object) -> None:
        monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, argv)])
        bench_py.main()

    return run


@pytest.fixture
def asked(bench_py, monkeypatch) -> list[tuple[str, Bench]]:
    """The tables do nothing but write down what they are asked for, and no engine is loaded."""
    asked = []

    def table(name: str):
        @functools.wraps(TABLES[name])
        def make(bench: Bench) -> dict[str, Any]:
            asked.append((name, bench))
            return {"title": name, "rows": [{"a": 1}]}

        return make

    tiny_engine = SimpleNamespace(vocab_size=32, max_model_len=99, runner=SimpleNamespace(model=torch.nn.Linear(1, 1)))
    tiny_engine.runner.model.config = LLAMA_8B._asdict() | {"num_attention_heads": 32, "num_hidden_layers": 2}
    monkeypatch.setattr(bench_py, "TABLES", {name: table(name) for name in TABLES})
    monkeypatch.setattr(bench_py, "load_engine", lambda args, sizes: tiny_engine)
    monkeypatch.setattr(bench_py, "measure_device", lambda engine: DeviceSpec("this machine", 0.0, 2e9, 3e9, 1.0, 1.0))
    return asked


SIMULATE = ("--simulate", "H100")


def test_without_arguments_a_selection_in_small_sizes(bench_py, command, asked, capsys):
    """On a CPU `online` is simulated: what is open there is the policies' order, not this machine's speed."""
    command("--device", "cpu")
    assert [name for name, _ in asked] == list(bench_py.SELECTION)
    benches = dict(asked)
    assert (benches["online"].name, benches["online"].engine) == ("simulated H100", None)
    assert benches["online"].sizes == QUICK["cuda"]
    others = [bench for name, bench in asked if name != "online"]
    assert all(bench is others[0] for bench in others)
    assert (others[0].sizes, others[0].quick, others[0].name) == (QUICK["cpu"], True, "this machine")
    assert others[0].cost_model.shape.itemsize == 4, "that of the parameters, whatever the config says"
    assert "this machine: 2.0 GB/s, 3 GFLOP/s, measured" in capsys.readouterr().out


def test_progress_is_told_on_stderr_and_tables_on_stdout(command, asked, capsys, bench_py):
    command("bulk", "mixed", "--device", "cpu")
    out, err = capsys.readouterr()
    assert re.fullmatch(r"\[1/2\] bulk\n\[2/2\] mixed, about 5 s left\n", err)
    assert [line for line in out.splitlines() if line] == [
        *("this machine: 2.0 GB/s, 3 GFLOP/s, measured", "bulk", "  a", "  1", "mixed", "  a", "  1")
    ]
    command("--device", "cpu")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        f"[{number}/6] {name}" for number, name in enumerate(bench_py.SELECTION, 1)
    ]


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        # (cost, seconds). The cost that is left takes as long per unit as the cost that is done.
        ([(10, 20), (20, 20), (30, 99)], ["", ", about 100 s left", ", about 40 s left"]),
        ([(10, 30), (60, 140), (1, 9)], ["", ", about 3 min left", ", about 5 s left"]),
        ([(1, 20), (30, 60), (30, 0)], ["", "", ", about 75 s left"]),  # the first is too short to judge by
        ([(10, 20), (20, 20), (math.nan, 99)], ["", "", ""]),
        ([(10, 20)], [""]),
        ([], []),
    ],
)
def test_how_long_is_left_is_judged_by_the_tables_before(bench_py, monkeypatch, capsys, tables, expected):
    clock, lines = VirtualClock(50.0), []
    monkeypatch.setattr(bench_py, "monotonic", clock)
    costs = [(f"table {number}", cost) for number, (cost, _) in enumerate(tables, 1)]
    for name, (_, seconds) in zip(bench_py.announce(costs), tables, strict=True):
        lines += capsys.readouterr().err.splitlines()
        assert name in lines[-1], "before the table, not after it"
        clock.advance(seconds)
    assert lines == [f"[{n}/{len(tables)}] table {n}{text}" for n, text in enumerate(expected, 1)]


def test_every_table_has_a_cost_where_its_sizes_are_known(bench_py):
    assert bench_py.COSTS.keys() == TABLES.keys()
    simulated = SIMULATED._replace(quick=False)
    assert bench_py.cost("hub", simulated, True) > bench_py.cost("hub", SIMULATED, True) > 0
    assert math.isnan(bench_py.cost("hub", simulated._replace(options={"num_prompts": 3}), True))
    assert math.isnan(bench_py.cost("compare", SIMULATED, False))


def test_sizes(command, asked):
    command("bulk", "--device", "cpu")
    command("bulk", "--device", "cpu", "--quick")
    command("bulk", *SIMULATE)
    command("bulk", "--quick", *SIMULATE)
    assert [(bench.sizes, bench.quick) for _, bench in asked] == [
        (SIZES["cpu"], False), (QUICK["cpu"], True), (SIZES["cuda"], False), (QUICK["cuda"], True),
    ]  # fmt: skip
    command("bulk", "mixed", "--num-prompts", 7, *SIMULATE)
    assert [name for name, _ in asked[-2:]] == ["bulk", "mixed"]
    sizes = asked[-1][1].sizes
    assert sizes.num_prompts == sizes.num_shared == sizes.num_online == sizes.num_bulk == 7


def test_the_prefix_table_has_a_use_for_the_number_of_prompts_only(command, asked):
    command("prefix", *SIMULATE, "--num-prompts", 3)
    assert asked[-1][1].sizes.num_shared == 3


def test_options_reach_the_tables(command, asked, tmp_path):
    command("online", *SIMULATE)
    assert asked[-1][1].options == {}, "what isn't given is the table's affair"
    command("online", *SIMULATE, "--num-prompts", 9, "--request-rate", 3, "--burstiness", 0.5, "--random-input-len", 6)
    bench = asked[-1][1]
    assert bench.options == {"num_prompts": 9, "request_rate": 3.0, "burstiness": 0.5, "random_input_len": 6}
    arrivals = bench.workload(num_prompts=1, random_input_len=1, random_output_len=5)
    assert [(len(arrival.prompt), arrival.output_len) for arrival in arrivals] == [(6, 5)] * 9
    assert arrivals[-1].time == pytest.approx(9 / 3)
    dataset = tmp_path / "dataset.jsonl"
    dataset.write_text('{"time": 0.5, "prompt": [4, 5], "output_length": 3, "client": "c"}\n')
    command("online", *SIMULATE, "--dataset-path", dataset)
    assert asked[-1][1].workload(num_prompts=None) == [Arrival(0.5, [4, 5], 3, "c")]


def test_what_is_simulated(command, asked, make_model):
    command("bulk", "--simulate", "A100")
    assert (asked[-1][1].cost_model.device, asked[-1][1].cost_model.shape) == (DEVICES["A100"], LLAMA_8B)
    command("bulk", "--simulate", "RTX 4090", "--model", make_model("qwen3"))
    bench = asked[-1][1]
    assert (bench.name, bench.cost_model.shape.hidden_size, bench.vocab_size) == ("simulated RTX 4090", 64, 32)


def parse(path: Path) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} isn't JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_json(command, tmp_path, capsys):
    """Every figure of every table; null is what isn't known, here the TTFT of urgent requests, as there were none."""
    path = tmp_path / "run.json"
    command("variance", "online", *SIMULATE, "--num-prompts", 2, "--quick", "--json", path)
    results = parse(path)
    assert list(results) == ["environment", "tables"]
    assert results["environment"]["roofline"] == {"name": "H100", "bandwidth": 3.35e12, "flops": 989e12}
    assert list(results["tables"]) == ["variance", "online"]
    [urgent] = columns(results["tables"]["online"], "TTFT of urgent")
    assert urgent == [None] * len(POLICIES)
    printed = capsys.readouterr().out
    assert printed.startswith("simulated H100, 8.0e9 parameters")
    assert printed.count("2 prompts of 512 tokens") == 2
    for row in results["tables"]["variance"]["rows"]:
        assert f"{row['continuous tok/s']:.0f}" in printed
        assert all(math.isfinite(value) for value in row.values())


def test_a_dataset(command, tmp_path, runs):
    """Times, clients and priorities are its own."""
    dataset, path = tmp_path / "dataset.jsonl", tmp_path / "run.json"
    lines = [
        {"timestamp": 100 * n, "input_length": 30 + n, "output_length": 5, "client": f"c{n % 2}"} for n in range(9)
    ]
    dataset.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command("online", *SIMULATE, "--dataset-path", dataset, "--json", path)
    table = parse(path)["tables"]["online"]
    assert table["title"].startswith("9 prompts of 30-38 tokens, outputs of 5 (mean 5), over time")
    assert columns(table, "req/s", "policy") == [[None] * len(POLICIES), list(POLICIES)]
    for one in runs[1:]:
        assert [arrival.time for arrival in one.workload] == [pytest.approx(n / 10) for n in range(9)]
        assert [arrival.client for arrival in one.workload] == [f"c{n % 2}" for n in range(9)]
        assert {arrival.priority for arrival in one.workload} == {0}
    assert "clients" not in table["note"]


def test_plot(command, tmp_path, bench_py):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "new" / "plots"
    command("variance", "pressure", "scale", *SIMULATE, "--num-prompts", 5, "--plot", folder)
    assert sorted(path.name for path in folder.iterdir()) == ["pressure.svg", "variance.svg"]
    assert "</svg>" in (folder / "variance.svg").read_text()


def test_trace_and_timeline(command, tmp_path, bench_py, monkeypatch):
    """A small workload with too few blocks, the same twice: static, then continuous."""
    served, metrics = [], []

    def record(core, workload, *, wait):
        metrics.append(Metrics())
        core.observers.append(metrics[-1])
        assert core.scheduler.static == (len(served) == 0)
        served.append(serve(core, workload, wait=wait))

    monkeypatch.setattr(bench_py, "serve", record)
    trace, timeline = tmp_path / "run.json", tmp_path / "run.html"
    command(*SIMULATE, "--trace", trace, "--timeline", timeline)
    assert described(served[0]) == described(served[1])
    assert len(served[0]) == 16
    assert metrics[1].preemptions_by_mode.total() > 0, "that is to be seen"
    names: dict[str, list[str]] = {}
    for event in parse(trace)["traceEvents"]:
        if event["ph"] == "M" and "name" in event["args"]:
            names.setdefault(event["name"], []).append(event["args"]["name"])
    assert names["process_name"] == ["static", "continuous"]
    assert len(names["thread_name"]) == 2 * 16
    assert [run["name"] for run in page_data(timeline)["runs"]] == ["static", "continuous"]
    assert [len(run["requests"]) for run in page_data(timeline)["runs"]] == [16, 16]


def page_data(path: Path) -> Any:
    [text] = re.findall(r">(\{\"runs\":.*?)</script>", path.read_text(encoding="utf-8"), re.DOTALL)
    return json.loads(text)


def test_only_what_was_asked_for_is_written(command, tmp_path, asked):
    trace, timeline = tmp_path / "run.json", tmp_path / "run.html"
    command("bulk", *SIMULATE, "--num-prompts", 3, "--trace", trace)
    assert list(tmp_path.iterdir()) == [trace]
    assert len(parse(trace)["traceEvents"]) > 2 * 3
    trace.unlink()
    command(*SIMULATE, "--num-prompts", 3, "--timeline", timeline)
    assert list(tmp_path.iterdir()) == [timeline]
    assert [name for name, _ in asked] == ["bulk"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nope", "variance"], "no table nope: there are variance, mixed"),
        (["--compare", "transformers"], "--compare needs --model"),
        (["--compare", "vllm", "--model", "m"], "argument --compare: invalid choice: 'vllm'"),
        (["--compare", "transformers", "--model", "m", *SIMULATE], "--compare needs --model, and no --simulate"),
        (["--simulate", "H99"], "argument --simulate: invalid choice: 'H99'"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--num-prompts", "0"], "num_prompts must be an integer >= "),
        (["--num-prompts", "many"], "argument --num-prompts: invalid int value: 'many'"),
        (["--request-rate", "nan"], "request_rate must be a number"),
        (["--burstiness", "0"], "burstiness must be in"),
        (["--random-input-len", "0"], "random_input_len must be an integer >= 1"),
        (["--output-distribution", "normal"], "output_distribution must be one of 'uniform', 'exponential'"),
        (["--dataset-path", "file", "--request-rate", "3"], "request_rate must be inf with dataset_path"),
        (["--dataset-path", "nowhere/file"], "--dataset-path: [Errno 2]"),
        (["--dataset-path", "."], "--dataset-path: [Errno 21]"),
        (["--json", "nowhere/run.json"], "--json: [Errno 2]"),
        (["--trace", "nowhere/run.json"], "--trace: [Errno 2]"),
        (["--timeline", "."], "--timeline: [Errno 21]"),
        (["--plot", "file"], "--plot: [Errno 17]"),
        (["mixed", "--random-input-len", "5"], "--random-input-len: nothing that is to run uses it"),
        (["prefix", "mixed", "--seed", "5"], "--seed: nothing that is to run uses it"),
        (["hub", "--num-prompts", "5"], "--num-prompts: nothing that is to run uses it"),
    ],
)
def test_what_is_wrong_is_named_before_any_work(command, asked, argv, message, tmp_path, monkeypatch, capsys, bench_py):
    def work(*args: Any) -> None:
        raise AssertionError("no work was to be done")

    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_py, "make_bench", work)
    monkeypatch.setattr(bench_py, "load_transformers", work)
    monkeypatch.setattr(bench_py, "import_pyplot", lambda: None)
    with pytest.raises(SystemExit) as caught:
        command(*argv)
    code = caught.value.code
    assert code == 2 or (isinstance(code, str) and code), "a string is printed, and the status is 1"
    assert message in (code if isinstance(code, str) else capsys.readouterr().err.splitlines()[-1])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--random-input-len", "5000"],
            "request 0 of the workload: prompt has 5000 tokens, but max_model_len is 4608",
        ),
        (["--tensor-parallel-size", "3"], "tensor_parallel is 3, which doesn't divide 32 heads"),
        (["--tensor-parallel-size", "0"], "tensor_parallel must be an integer >= 1"),
    ],
)
def test_what_only_a_run_can_tell_is_one_line_too(command, argv, message):
    with pytest.raises(SystemExit, match=f"^bench.py: {message}"):
        command("variance", *SIMULATE, "--quick", *argv)


def test_several_devices(command, asked):
    command("bulk", *SIMULATE, "--tensor-parallel-size", 4)
    assert (asked[-1][1].name, asked[-1][1].cost_model.tensor_parallel) == ("simulated 4 x H100", 4)
    assert asked[-1][1].max_model_len == 4608
    command("bulk", *SIMULATE, "--max-model-len", 700)
    assert asked[-1][1].max_model_len == 700


def test_without_matplotlib_no_plot(command, asked, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="--plot needs matplotlib"):
        command("bulk", *SIMULATE, "--plot", tmp_path / "plots")
    assert not asked


def test_the_peer_is_loaded_first(command, asked, bench_py, monkeypatch):
    """What a load leaves behind in memory must not disturb a measurement."""
    order = []
    load_engine = bench_py.load_engine
    monkeypatch.setattr(bench_py, "load_transformers", lambda model, device: order.append("transformers") or "model")
    monkeypatch.setattr(bench_py, "load_engine", lambda *args: order.append("minicb") or load_engine(*args))
    monkeypatch.setattr(
        bench_py, "compare_table", lambda bench, model: order.append(model) or {"title": "t", "rows": [{"a": math.nan}]}
    )
    command("--model", "m", "--device", "cpu", "--compare", "transformers")
    assert order == ["transformers", "minicb", "model"]
    assert asked == [], "only what was asked for"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_random_model(bench_py, monkeypatch, device):
    """On CUDA as large as Qwen3-0.6B; its engine has room for all that tables want."""
    loaded = {}

    def make_engine(folder: str, **options: Any) -> None:
        loaded.update(options, config=json.loads((Path(folder) / "config.json").read_text()))

    monkeypatch.setattr(bench_py, "Engine", make_engine)
    args = SimpleNamespace(model=None, device=device, max_model_len=4608)
    bench_py.load_engine(args, QUICK[device])
    config = loaded["config"]
    shape = ModelShape.of(config)
    assert shape.num_parameters == pytest.approx(0.6e9 if device == "cuda" else 28e6, rel=0.1)
    assert (loaded["load_format"], loaded["device"], loaded["max_model_len"]) == ("dummy", device, 4608)
    assert config["max_position_embeddings"] >= 4608
    assert loaded["max_num_seqs"] >= max(QUICK[device].slots, 33)
    assert loaded["max_num_batched_tokens"] == 4000 + 32
    args.model = "folder"
    monkeypatch.setattr(bench_py, "Engine", lambda folder, **options: loaded.update(options, folder=folder))
    bench_py.load_engine(args, QUICK[device])
    assert (loaded["folder"], loaded["load_format"]) == ("folder", "auto")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, "-"), (math.inf, "inf"), (0.1234, "0.12"), (9.994, "9.99"), (12.6, "13"), (-3.5, "-3.50"),
        (1234, "1234"), ("97.0%", "97.0%"),
    ],
)  # fmt: skip
def test_figures_as_they_are_printed(bench_py, value, text):
    lines = list(bench_py.format_table({"title": "t", "rows": [{"x": value}], "note": "n"}))
    assert [line.strip() for line in lines] == ["t", "x", text, "n"]
