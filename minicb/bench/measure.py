"""Measurements for the tables of bench.py: a workload is run on this machine or on a simulated device and compared with
what the hardware allows."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from minicb.batch import BatchBuilder
from minicb.blocks import BlockPool
from minicb.core import EngineCore
from minicb.engine import Engine
from minicb.memory import Memory
from minicb.observe.metrics import Metrics
from minicb.params import SamplingParams
from minicb.plan import Chunk, Observer, Step, StepPlan
from minicb.policies import POLICIES
from minicb.request import Request
from minicb.scheduler import Scheduler
from minicb.simulate.cost_model import CostModel, DeviceSpec
from minicb.simulate.scenarios import simulate
from minicb.simulate.workload import Arrival, WorkloadArgs, make_request, make_workload, serve
from minicb.swap import seconds_of


class BenchSizes(NamedTuple):
    """Sizes of the workloads on a kind of device. On a GPU the variance table has the workload of "How continuous
    batching enables 23x throughput" (Anyscale, 2023): prompts of 512 tokens, outputs exponential with mean 128. On a
    CPU prompts are an eighth of that, and outputs a quarter."""

    slots: int
    num_prompts: int
    prompt_len: int
    mean_output: int
    caps: tuple[int, ...]
    contexts: tuple[int, ...]  # of the table pressure
    num_shared: int  # requests of the table prefix
    num_online: int  # requests per run of the table online
    num_bulk: int  # requests of the table bulk on this machine
    objectives: dict[str, float]  # of goodput, in seconds


CPU_OBJECTIVES, GPU_OBJECTIVES = {"ttft": 1.0, "tpot": 0.1}, {"ttft": 0.5, "tpot": 0.05}
SIZES = {
    "cpu": BenchSizes(16, 64, 64, 32, (8, 32, 128, 384), (16, 128, 1024), 12, 64, 96, CPU_OBJECTIVES),
    "cuda": BenchSizes(
        128, 1000, 512, 128, (32, 128, 512, 1536), (16, 64, 256, 1024, 3584), 100, 500, 10_000, GPU_OBJECTIVES
    ),
}
QUICK = {
    "cpu": SIZES["cpu"]._replace(num_prompts=40, caps=(8, 32, 128), contexts=(16, 512), num_online=48, num_bulk=64),
    "cuda": SIZES["cuda"]._replace(num_prompts=250, num_shared=40, num_online=300, num_bulk=1000),
}


class Bench(NamedTuple):
    """Where tables are measured, and how large they are."""

    name: str
    sizes: BenchSizes
    engine: Engine | None  # None: a simulated device
    cost_model: CostModel  # of the simulated device, or of this machine
    vocab_size: int
    max_model_len: int
    options: dict[str, Any]  # fields of WorkloadArgs from the command line
    quick: bool

    def workload(self, **defaults: Any) -> list[Arrival]:
        """A workload with the options of the command line, and these defaults for the others."""
        return make_workload(WorkloadArgs(**(defaults | self.options)), self.vocab_size)


class BenchRun(NamedTuple):
    """One run of a workload."""

    bench: Bench
    metrics: Metrics
    roofline_seconds: float  # time of all steps on the roofline
    bytes_read: float  # weights and KV cache
    busy_seconds: float  # measured time of all steps

    @property
    def tokens_per_s(self) -> float:
        return self.metrics.num_output_tokens / self.metrics.seconds

    @property
    def roofline_figures(self) -> dict[str, float]:
        """How close the run came to the hardware's limit. Empty on a simulated device, which is its roofline."""
        if self.bench.engine is None:
            return {}
        return {
            "GB/s": self.bytes_read / self.busy_seconds / 1e9,
            "% of roofline": 100 * self.roofline_seconds / self.busy_seconds,
        }


class Roofline(Observer):
    """Adds up the roofline time of a run's steps, the bytes they read, and the time they took."""

    def __init__(self, cost_model: CostModel, block_size: int):
        self.cost_model, self.block_size = cost_model, block_size
        self.seconds = self.bytes_read = self.busy_seconds = 0.0

    def on_plan(self, step: Step) -> None:
        parts = self.cost_model.breakdown(step.plan, self.block_size)
        self.seconds += parts.linear + parts.attention
        if step.plan.chunks:
            shape = self.cost_model.shape
            positions = sum(chunk.start + chunk.length for chunk in step.plan.chunks)
            parameters = shape.num_layers * shape.layer_parameters
            if any(chunk.needs_sampling for chunk in step.plan.chunks):
                parameters += shape.head_parameters
            self.bytes_read += parameters * shape.itemsize + positions * shape.kv_bytes

    def on_step(self, step: Step) -> None:
        self.busy_seconds += step.end - step.begin


def make_core(
    bench: Bench, num_blocks: int | None = None, **changes: Any
) -> tuple[EngineCore, Callable[[float], object]]:
    """An engine with an empty pool, and a function that waits on its clock.

    changes: arguments of an engine. Without them prefix caching is off, so no run finds the prompts of an earlier one.
    """
    changes = {
        "max_num_seqs": bench.sizes.slots,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
    } | changes
    if bench.engine is not None:
        return EngineCore(bench.engine.make_scheduler(num_blocks, **changes), bench.engine.runner), time.sleep
    policy = changes.pop("scheduling_policy", "fcfs")
    core, clock = simulate(
        bench.cost_model, policy=policy, num_blocks=num_blocks, max_model_len=bench.max_model_len, **changes
    )
    return core, clock.advance


def describe_workload(workload: Sequence[Arrival]) -> str:
    """The number of prompts and their lengths, in words."""
    prompts, outputs = [len(arrival.prompt) for arrival in workload], [arrival.output_len for arrival in workload]
    spans = [f"{min(lens)}-{max(lens)}" if min(lens) < max(lens) else f"{lens[0]}" for lens in (prompts, outputs)]
    return f"{len(workload)} prompts of {spans[0]} tokens, outputs of {spans[1]} (mean {statistics.mean(outputs):.0f})"


def run_workload(bench: Bench, workload: Sequence[Arrival], num_blocks: int | None = None, **changes: Any) -> BenchRun:
    """Serve the workload to its end."""
    core, wait = make_core(bench, num_blocks, **changes)
    metrics, roofline = Metrics(), Roofline(bench.cost_model, core.scheduler.pool.block_size)
    core.observers += [metrics, roofline]
    if "dataset_path" in bench.options:  # refuse prompts that are too long before the run begins
        for number, arrival in enumerate(workload):
            try:
                core.scheduler.check(make_request(arrival, str(number)))
            except ValueError as error:
                raise ValueError(f"{bench.options['dataset_path']}, request {number}: {error}") from error
    serve(core, workload, wait=wait)
    return BenchRun(bench, metrics, roofline.seconds, roofline.bytes_read, roofline.busy_seconds)


def measure_device(engine: Engine) -> DeviceSpec:
    """The memory bandwidth of this device, from matrix-vector products, and its FLOP/s, from square matrix products."""
    runner = engine.runner
    rows = 16384 if runner.device.type == "cuda" else 8192
    matrix = torch.ones(rows, rows, dtype=next(runner.model.parameters()).dtype, device=runner.device)
    square = matrix[: rows // 4, : rows // 4].contiguous()

    def best(work: Callable[[], object]) -> float:
        return min(seconds_of(lambda: [work() for _ in range(4)], runner.device) for _ in range(3)) / 4

    bandwidth = matrix.nbytes / best(lambda: torch.mv(matrix, matrix[0]))
    flops = 2 * len(square) ** 3 / best(lambda: square @ square)
    return DeviceSpec("this machine", 0.0, bandwidth, flops, math.inf, math.inf)


def format_percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1%}"


def prefill_plans(core: EngineCore, prompt: list[int]) -> list[StepPlan]:
    """The plans of the steps that prefill one request alone."""
    request = Request("prefill", prompt, SamplingParams(temperature=0))
    request.block_table.extend(range(1, 1 + core.scheduler.pool.blocks_for(len(prompt))))
    size = core.scheduler.maximum.max_num_batched_tokens
    return [StepPlan([Chunk.of(request, s, min(size, len(prompt) - s))]) for s in range(0, len(prompt), size)]


def execution_seconds(bench: Bench, core: EngineCore, plans: list[StepPlan]) -> float:
    if bench.engine is None:
        return sum(bench.cost_model.step_seconds(plan, core.scheduler.pool.block_size) for plan in plans)
    return seconds_of(lambda: [core.runner.execute(plan) for plan in plans], bench.engine.runner.device)


def scheduler_microseconds(running: int, waiting: int, blocks: int) -> dict[str, float]:
    """CPU time of a decode step outside the model, by part, with this many running and waiting requests. blocks: size
    of the pool. The batch is built on the CPU and not copied to a device."""
    size, budget = 16, 2048
    limits: dict[str, Any] = {"max_num_seqs": running, "max_num_batched_tokens": budget, "max_model_len": 2048}
    scheduler = Scheduler(Memory(BlockPool(blocks, size)), POLICIES["fcfs"](), **limits)
    builder = BatchBuilder(
        num_blocks=blocks, block_size=size, tile_size=32, windows=[None], device=torch.device("cpu"), **limits
    )
    params, prompt = SamplingParams(max_tokens=1000), [0] * 500
    for number in range(running + waiting):
        scheduler.add(Request(str(number), prompt, params))
    times: list[tuple[float, ...]] = []
    while len(times) < 100:
        began = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        batch = builder.build(plan.chunks)
        built = time.perf_counter()
        scheduler.update(plan, [0] * batch.num_sampled)
        if batch.tile_lists is None:  # decodes only
            times.append((scheduled - began, built - scheduled, time.perf_counter() - built))
        scheduler.events.clear()
    names = ("schedule", "batch", "update")
    return {name: 1e6 * statistics.median(column) for name, column in zip(names, zip(*times, strict=True), strict=True)}
