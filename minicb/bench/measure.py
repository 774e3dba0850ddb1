"""What the tables of bench.py are made with: runs of a workload on this machine or on a simulated device, and how far
they are from what the hardware allows."""

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


class Sizes(NamedTuple):
    """What suits a device. The variance sweep on a GPU is that of Anyscale's "How continuous batching
    enables 23x throughput" (2023): prompts of 512, outputs exponential with mean 128; on a CPU a quarter."""

    slots: int
    num_prompts: int
    prompt_len: int
    mean_output: int
    caps: tuple[int, ...]
    contexts: tuple[int, ...]  # of the pressure table
    num_shared: int  # requests that share a system prompt
    num_online: int  # requests of each run of the online table
    num_bulk: int  # requests of the bulk table on this machine
    objectives: dict[str, float]  # of goodput, in seconds


CPU_OBJECTIVES, GPU_OBJECTIVES = {"ttft": 1.0, "tpot": 0.1}, {"ttft": 0.5, "tpot": 0.05}
SIZES = {
    "cpu": Sizes(16, 64, 64, 32, (8, 32, 128, 384), (16, 128, 1024), 12, 64, 96, CPU_OBJECTIVES),
    "cuda": Sizes(
        128, 1000, 512, 128, (32, 128, 512, 1536), (16, 64, 256, 1024, 3584), 100, 500, 10_000, GPU_OBJECTIVES
    ),
}
QUICK = {
    "cpu": SIZES["cpu"]._replace(num_prompts=40, caps=(8, 32, 128), contexts=(16, 512), num_online=48, num_bulk=64),
    "cuda": SIZES["cuda"]._replace(num_prompts=250, num_shared=40, num_online=300, num_bulk=1000),
}


class Bench(NamedTuple):
    """What tables are made with."""

    name: str
    sizes: Sizes
    engine: Engine | None  # None: a simulated device
    cost_model: CostModel  # of the simulated device, or the roofline of this one
    vocab_size: int
    max_model_len: int
    options: dict[str, Any]  # fields of WorkloadArgs that were given on the command line
    quick: bool

    def workload(self, **defaults: Any) -> list[Arrival]:
        return make_workload(WorkloadArgs(**(defaults | self.options)), self.vocab_size)


class Run(NamedTuple):
    bench: Bench
    metrics: Metrics
    roofline_seconds: float  # that the steps would take if nothing but bandwidth and FLOP/s counted
    bytes_read: float  # of weights and KV cache
    busy_seconds: float  # that the steps took

    @property
    def tokens_per_s(self) -> float:
        return self.metrics.num_output_tokens / self.metrics.seconds

    @property
    def limits(self) -> dict[str, float]:
        """How near it came to what the hardware allows; of a simulated one it allows just that."""
        if self.bench.engine is None:
            return {}
        return {
            "GB/s": self.bytes_read / self.busy_seconds / 1e9,
            "% of roofline": 100 * self.roofline_seconds / self.busy_seconds,
        }


class Roofline(Observer):
    """Adds up what the steps of a run would take, and what they read."""

    def __init__(self, cost_model: CostModel, block_size: int):
        self.cost_model, self.block_size = cost_model, block_size
        self.seconds = self.bytes_read = self.busy_seconds = 0.0

    def on_plan(self, step: Step) -> None:
        parts = self.cost_model.breakdown(step.plan, self.block_size)
        self.seconds += parts.linear + parts.attention
        if step.plan.chunks:
            shape = self.cost_model.shape
            positions = sum(chunk.start + chunk.length for chunk in step.plan.chunks)
            samples = any(chunk.needs_sampling for chunk in step.plan.chunks)  # else nobody reads the LM head
            parameters = shape.num_layers * shape.layer_parameters + samples * shape.head_parameters
            self.bytes_read += parameters * shape.itemsize + positions * shape.kv_bytes

    def on_step(self, step: Step) -> None:
        self.busy_seconds += step.end - step.begin


def make_core(
    bench: Bench, num_blocks: int | None = None, **changes: Any
) -> tuple[EngineCore, Callable[[float], object]]:
    """Something to run a workload on, with an empty pool, and how to wait on its clock. Prefix caching is off
    unless changes, arguments of an engine, say otherwise: random prompts have nothing to share."""
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


def describe(workload: Sequence[Arrival]) -> str:
    """How many there are, and of what lengths."""
    prompts, outputs = [len(arrival.prompt) for arrival in workload], [arrival.output_len for arrival in workload]
    spans = [f"{min(lens)}-{max(lens)}" if min(lens) < max(lens) else f"{lens[0]}" for lens in (prompts, outputs)]
    return f"{len(workload)} prompts of {spans[0]} tokens, outputs of {spans[1]} (mean {statistics.mean(outputs):.0f})"


def run(bench: Bench, workload: Sequence[Arrival], num_blocks: int | None = None, **changes: Any) -> Run:
    """Serve the workload to its end."""
    core, wait = make_core(bench, num_blocks, **changes)
    metrics, roofline = Metrics(), Roofline(bench.cost_model, core.scheduler.pool.block_size)
    core.observers += [metrics, roofline]
    if "dataset_path" in bench.options:  # somebody else's: is there a place for all of it?
        for number, arrival in enumerate(workload):
            try:
                core.scheduler.check(make_request(arrival, str(number)))
            except ValueError as error:
                raise ValueError(f"{bench.options['dataset_path']}, request {number}: {error}") from error
    serve(core, workload, wait=wait)
    return Run(bench, metrics, roofline.seconds, roofline.bytes_read, roofline.busy_seconds)


def measure(engine: Engine) -> DeviceSpec:
    """What this device does at its best: the bandwidth of matrix-vector products, the FLOP/s of square ones."""
    runner = engine.runner
    rows = 16384 if runner.device.type == "cuda" else 8192
    matrix = torch.ones(rows, rows, dtype=next(runner.model.parameters()).dtype, device=runner.device)
    square = matrix[: rows // 4, : rows // 4].contiguous()

    def best(work: Callable[[], object]) -> float:
        return min(seconds_of(lambda: [work() for _ in range(4)], runner.device) for _ in range(3)) / 4

    bandwidth = matrix.nbytes / best(lambda: torch.mv(matrix, matrix[0]))
    flops = 2 * len(square) ** 3 / best(lambda: square @ square)
    return DeviceSpec("this machine", 0.0, bandwidth, flops, math.inf, math.inf)


def percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1%}"


def prefill_plans(core: EngineCore, prompt: list[int]) -> list[StepPlan]:
    """The steps that prefill one request with nothing beside it."""
    request = Request("prefill", prompt, SamplingParams(temperature=0))
    request.block_table.extend(range(1, 1 + core.scheduler.pool.blocks_for(len(prompt))))
    size = core.scheduler.maximum.max_num_batched_tokens
    return [StepPlan([Chunk.of(request, s, min(size, len(prompt) - s))]) for s in range(0, len(prompt), size)]


def execution_seconds(bench: Bench, core: EngineCore, plans: list[StepPlan]) -> float:
    if bench.engine is None:
        return sum(bench.cost_model.step_seconds(plan, core.scheduler.pool.block_size) for plan in plans)
    return seconds_of(lambda: [core.runner.execute(plan) for plan in plans], bench.engine.runner.device)


def scheduler_microseconds(running: int, waiting: int, blocks: int) -> dict[str, float]:
    """blocks: of the pool. The batch is built on the CPU, without its copy to a device."""
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
