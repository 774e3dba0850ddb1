"""The simulator: what a step costs, figure by figure, and that schedules are those of the real engine."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import CONFIGS, TINY, eager, greedy
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from minicb.attention import gather_attention
from minicb.blocks import BlockPool
from minicb.core import EngineCore
from minicb.loader import read_config
from minicb.memory import PREEMPTION_MODES, Memory, PreemptionCosts
from minicb.model import Model
from minicb.params import SamplingParams, SchedulingParams
from minicb.plan import Chunk, Observer, Step, StepPlan
from minicb.policies import FCFS, POLICIES
from minicb.request import Request
from minicb.runner import ModelRunner
from minicb.scheduler import Scheduler
from minicb.simulate.cost_model import DEVICES, CostModel, DeviceSpec, ModelShape, SimulatedRunner, VirtualClock

# Round numbers. A layer has 8 * 2 * (4 + 2 + 2 + 4) = 192 parameters of attention and 3 * 8 * 16 = 384 of the MLP,
# the LM head 100 * 8 = 800. A position's K and V are 2 * 2 layers * 2 heads * 2 = 16 numbers, 32 bytes.
SHAPE = ModelShape(
    num_layers=2,
    hidden_size=8,
    intermediate_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    vocab_size=100,
    tied=False,
    itemsize=2,
)
DEVICE = DeviceSpec(
    "slide rule", memory_bytes=10_000, bandwidth=1000, flops=10_000, link_bandwidth=100, host_bandwidth=50
)
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}


def model(tensor_parallel: int = 1, shape: ModelShape = SHAPE, device: DeviceSpec = DEVICE, **kwargs) -> CostModel:
    return CostModel(shape, device, tensor_parallel, **({"launch_seconds": 0.5, "all_reduce_latency": 0.25} | kwargs))


def plan_of(*chunks: tuple[int, int], rest: int = 0, swap_out: int = 0, swap_in: int = 0) -> StepPlan:
    """Chunks (start, length), after which each request has `rest` tokens more; numbers of blocks to be copied."""
    made = [
        Chunk.of(Request("", [0] * (start + length + rest), SamplingParams()), start, length)
        for start, length in chunks
    ]
    pairs = [(block, block) for block in range(1, swap_out + swap_in + 1)]
    return StepPlan(made, swap_out=pairs[:swap_out], swap_in=pairs[swap_out:])


def llama(device: str = "H100", tensor_parallel: int = 1, config: dict = LLAMA_8B) -> CostModel:
    return CostModel(ModelShape.of(config), DEVICES[device], tensor_parallel, launch_seconds=0.0)


# ------------------------------------------------------------------ by hand


def test_a_decode_reads_all_weights_and_its_kv():
    """Layers: 2 * 576 parameters of 2 bytes at 1000 bytes/s. Head: 800 of 2 bytes. KV: 10 positions read, 1 written."""
    parts = model().breakdown(plan_of((9, 1)), block_size=4)
    assert parts.linear == pytest.approx(2.304 + 1.6)
    assert parts.attention == pytest.approx(11 * 0.032)
    assert (parts.all_reduce, parts.launch, parts.swap) == (0, 0.5, 0)
    assert parts.total == pytest.approx(2.304 + 1.6 + 0.352 + 0.5)
    assert model().step_seconds(plan_of((9, 1)), block_size=4) == parts.total


def test_a_long_chunk_computes():
    """20 tokens: 2 * 1152 FLOPs each at 10,000 FLOP/s; 1 + 2 + ... + 20 = 210 pairs of 4 * 2 layers * 4 heads * 2."""
    parts = model().breakdown(plan_of((0, 20), rest=1), block_size=4)
    assert parts.linear == pytest.approx(20 * 0.2304)
    assert parts.attention == pytest.approx(210 * 0.0064)
    assert model().breakdown(plan_of((20, 20), rest=1), block_size=4).attention == pytest.approx(610 * 0.0064)


def test_the_lm_head_is_for_those_that_sample():
    part, last = model().breakdown(plan_of((0, 5), rest=1), 4), model().breakdown(plan_of((0, 5)), 4)
    assert last.linear - part.linear == pytest.approx(1.6), "800 parameters of 2 bytes"
    assert last._replace(linear=0) == part._replace(linear=0)
    many = model().breakdown(plan_of(*[(0, 1)] * 20), 4)
    assert many.linear == pytest.approx(20 * 0.2304 + 20 * 0.16), "2 * 800 FLOPs each"


def test_tensor_parallelism_shares_the_work_and_sends_hidden_states():
    """A token's hidden state has 16 bytes. In a ring of 2 each device sends 2 * 1/2 of it at 100 bytes/s, four times;
    in a ring of 4 with 4 KV heads 2 * 3/4."""
    alone, two = model().breakdown(plan_of((9, 1)), 4), model(2).breakdown(plan_of((9, 1)), 4)
    assert two.linear == pytest.approx(alone.linear / 2)
    assert two.attention == pytest.approx(alone.attention / 2)
    assert two.all_reduce == pytest.approx(4 * (0.16 + 0.25))
    assert two.launch == alone.launch
    four = model(4, SHAPE._replace(num_kv_heads=4)).breakdown(plan_of((0, 3)), 4)
    assert four.all_reduce == pytest.approx(4 * (3 * 0.24 + 0.25))


def test_swapped_blocks_go_over_the_bus():
    """A block of 4 positions has 128 bytes, at 50 bytes/s."""
    parts = model().breakdown(plan_of((9, 1), swap_out=3), 4)
    assert parts.swap == pytest.approx(3 * 2.56)
    assert model().breakdown(plan_of((9, 1), swap_in=3), 4) == parts
    assert model(2).breakdown(plan_of((9, 1), swap_in=3), 4).swap == pytest.approx(3 * 1.28), "each device its half"
    assert model().step_seconds(plan_of(swap_out=2), 4) == pytest.approx(5.12), "copies alone: nothing is launched"
    assert model().step_seconds(plan_of(), 4) == 0


def test_efficiencies_stretch_what_they_are_of():
    decode, prefill = plan_of((9, 1)), plan_of((0, 50), rest=1)
    half = model(bandwidth_efficiency=0.5).breakdown(decode, 4)
    assert half[:2] == pytest.approx([2 * part for part in model().breakdown(decode, 4)[:2]])
    assert half[2:] == model().breakdown(decode, 4)[2:]
    half = model(flops_efficiency=0.5).breakdown(prefill, 4)
    assert half[:2] == pytest.approx([2 * part for part in model().breakdown(prefill, 4)[:2]])


def test_costs_of_a_preemption():
    """Two prompts of 1024: their 2 * 1024 * 1025 / 2 query-key pairs, and one reading of the head for 2048 tokens."""
    swap_block, recompute_token = model().costs(block_size=4)
    assert swap_block == pytest.approx(2 * 2.56), "there and back"
    assert recompute_token == pytest.approx(0.2304 + 512.5 * 0.0064 + (1.6 + 0.5) / 2048)


def test_size_of_the_pool():
    """Weights: 2 * 576 + 2 * 800 parameters of 2 bytes are 5504 bytes; a block has 128."""
    assert model().num_blocks(4, utilization=1) == (10_000 - 5504) // 128 == 35
    assert model().num_blocks(4) == (9000 - 5504) // 128 == 27
    assert model(2).num_blocks(4) == (18_000 - 5504) // 128 == 97
    tied = SHAPE._replace(tied=True)
    assert model(shape=tied).num_blocks(4) == (9000 - 3904) // 128 == 39
    least = DEVICE._replace(memory_bytes=5504 + 256)
    assert model(device=least).num_blocks(4, utilization=1) == 2
    with pytest.raises(ValueError, match=r"1 x slide rule has .* 1 of it may be used; the weights take .* two blocks"):
        model(device=least._replace(memory_bytes=5504 + 255)).num_blocks(4, utilization=1)


def test_70b_needs_more_than_one_h100():
    with pytest.raises(ValueError, match=r"1 x H100 has 80\.0 GiB.* weights take 131\.4 GiB"):
        llama(config=LLAMA_70B).num_blocks(16)
    assert llama(config=LLAMA_70B, tensor_parallel=4).num_blocks(16) > 30_000


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"tensor_parallel": 4}, "tensor_parallel is 4.* 4 heads and 2 KV heads"),
        ({"bandwidth_efficiency": 0}, "bandwidth_efficiency must be in"),
        ({"flops_efficiency": 1.5}, "flops_efficiency must be in"),
        ({"launch_seconds": -1}, "launch_seconds must be a finite number"),
        ({"all_reduce_latency": math.nan}, "all_reduce_latency must be a finite number"),
    ],
)
def test_arguments_out_of_range(kwargs, message):
    with pytest.raises(ValueError, match=message):
        model(**kwargs)


def test_the_named_devices():
    """A 16-bit 8B model at a batch of 1 is as fast as its weights are read."""
    rates = {name: 1 / llama(name).step_seconds(plan_of((0, 1)), 16) for name in DEVICES}
    assert {name: round(rate) for name, rate in rates.items()} == {
        "H100": 223,
        "H200": 320,
        "A100": 136,
        "RTX 4090": 67,
    }
    assert all(device.name == name for name, device in DEVICES.items())


# ------------------------------------------------------------------ shapes


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_transformers(family, tied):
    config = CONFIGS[family](**TINY, tie_word_embeddings=tied)
    parameters = AutoModelForCausalLM.from_config(config).parameters()  # shared ones come once
    matrices = sum(parameter.numel() for parameter in parameters if parameter.dim() == 2)  # no norms, no biases
    assert ModelShape.of(config).num_parameters == matrices
    as_json = json.loads(config.to_json_string(use_diff=False))
    assert ModelShape.of(as_json) == ModelShape.of(config)


def test_parameters_are_those_of_minicb(make_model):
    config, hf = read_config(make_model("qwen3"))
    matrices = sum(
        parameter.numel() for parameter in Model(config, gather_attention).parameters() if parameter.dim() == 2
    )
    assert ModelShape.of(config).num_parameters == matrices
    assert ModelShape.of(config) == ModelShape.of(hf)._replace(itemsize=2)
    assert ModelShape.of(hf).itemsize == 4


def test_parameters_are_those_that_models_are_named_for():
    assert ModelShape.of(LLAMA_8B).num_parameters == pytest.approx(8.03e9, rel=1e-3)
    assert ModelShape.of(LLAMA_70B).num_parameters == pytest.approx(70.6e9, rel=1e-3)


def test_what_a_config_may_leave_out():
    least = {key: 8 for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")}
    shape = ModelShape.of(least | {"vocab_size": 8, "num_attention_heads": 4})
    assert (shape.num_kv_heads, shape.head_dim, shape.tied, shape.itemsize) == (4, 2, False, 2)
    assert ModelShape.of(LLAMA_8B | {"torch_dtype": "float32"}).itemsize == 4
    full = LLAMA_8B | {"num_key_value_heads": 1, "head_dim": 5, "tie_word_embeddings": True, "dtype": "float32"}
    shape = ModelShape.of(full)
    assert (shape.num_kv_heads, shape.head_dim, shape.tied, shape.itemsize) == (1, 5, True, 4)


@pytest.mark.parametrize(
    "name", ["hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"]
)
def test_what_a_config_must_have(name):
    with pytest.raises(ValueError, match=f"no {name}"):
        ModelShape.of({key: value for key, value in LLAMA_8B.items() if key != name})
    with pytest.raises(ValueError, match=name):
        ModelShape.of(LLAMA_8B | {name: 0})


@pytest.mark.parametrize("extra", [{"num_local_experts": 8}, {"quantization_config": {"bits": 4}}, {"dtype": "int3"}])
def test_models_of_another_kind_are_refused(extra):
    with pytest.raises(ValueError, match=next(iter(extra))):
        ModelShape.of(LLAMA_8B | extra)
    ModelShape.of(LLAMA_8B | dict.fromkeys(extra, 0))  # named, but none


# ------------------------------------------------------------------ whatever the step

CHUNK = st.tuples(st.integers(0, 5000), st.integers(1, 5000))
CHUNKS = st.lists(CHUNK, min_size=1, max_size=6)
DEVICE_NAMES = st.sampled_from(sorted(DEVICES))


@given(CHUNKS, st.sampled_from([1, 2]))
def test_query_key_pairs_add_up_position_by_position(chunks, tensor_parallel):
    bandwidth = DEVICE._replace(bandwidth=1e30)  # FLOPs alone count
    parts = model(tensor_parallel, device=bandwidth).breakdown(plan_of(*chunks), 4)
    num_pairs = sum(sum(range(start + 1, start + length + 1)) for start, length in chunks)
    assert parts.attention == pytest.approx(num_pairs * 0.0064 / tensor_parallel)


@given(CHUNKS, CHUNK, DEVICE_NAMES, st.integers(0, 9), st.integers(0, 9))
def test_more_is_never_cheaper(chunks, chunk, device, few, more):
    def seconds(*chunks, blocks: int = few, rest: int = 0) -> float:
        return llama(device, 2).step_seconds(plan_of(*chunks, swap_in=blocks, rest=rest), 16)

    start, length = chunk
    base = seconds(*chunks, chunk)
    assert base >= seconds(*chunks), "a chunk more"
    assert seconds(*chunks, (start, length + 1)) >= base, "a token more"
    assert seconds(*chunks, (start + 1, length)) >= base, "a token further on"
    assert base >= seconds(*chunks, chunk, rest=1), "they sample"
    assert seconds(*chunks, chunk, blocks=few + more) >= base, "blocks more"


@given(CHUNKS, DEVICE_NAMES, st.integers(0, 9))
def test_two_devices_halve_all_but_what_they_tell_each_other(chunks, device, blocks):
    plan = plan_of(*chunks, swap_out=blocks)
    one, two = (llama(device, tensor_parallel).breakdown(plan, 16) for tensor_parallel in (1, 2))
    for part in ("linear", "attention", "swap"):
        assert getattr(two, part) == pytest.approx(getattr(one, part) / 2)
    assert two.all_reduce > one.all_reduce == 0


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=100), DEVICE_NAMES)
def test_decodes_are_bound_by_bandwidth(positions, device):
    """Up to a hundred of them: weights without the embedding and KV over bandwidth, and FLOPs don't matter."""
    costs = llama(device)
    weights = (costs.shape.num_parameters - costs.shape.head_parameters) * 2
    kv = (sum(positions) + 2 * len(positions)) * costs.shape.kv_bytes
    plan = plan_of(*((position, 1) for position in positions))
    assert costs.step_seconds(plan, 16) == pytest.approx((weights + kv) / DEVICES[device].bandwidth)


@given(st.integers(4096, 200_000), DEVICE_NAMES)
def test_a_long_prefill_is_bound_by_flops(length, device):
    costs = llama(device)
    flops = 2 * costs.shape.num_layers * costs.shape.layer_parameters * length
    flops += 4 * costs.shape.num_layers * 32 * 128 * length * (length + 1) / 2
    seconds = costs.step_seconds(plan_of((0, length), rest=1), 16)
    assert seconds == pytest.approx(flops / DEVICES[device].flops)


# ------------------------------------------------------------------ clock and tokens


def test_the_clock_stands_until_it_is_told():
    clock = VirtualClock(3.0)
    assert clock() == clock() == clock.now == 3.0
    clock.advance(0.5)
    assert clock() == 3.5
    for wrong in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="seconds"):
            clock.advance(wrong)


def test_tokens_tell_requests_and_positions_apart():
    runner = SimulatedRunner(model(shape=SHAPE._replace(vocab_size=50_000)), 4, VirtualClock())
    outputs = []
    for arrival in range(100):
        request = Request(str(arrival), [0], SamplingParams())
        request.arrival = arrival
        for position in range(50):
            request.token_ids += runner.execute(StepPlan([Chunk.of(request, position, 1)]))
        outputs.append(request.output_token_ids)
    assert all(0 <= token < 50_000 for tokens in outputs for token in tokens)
    assert len({tuple(tokens[:2]) for tokens in outputs}) == 100, "no two requests begin alike"
    assert all(len(set(tokens)) > 45 for tokens in outputs), "a request doesn't repeat itself"


def test_a_chunk_that_does_not_sample_gets_no_token():
    clock = VirtualClock()
    runner = SimulatedRunner(model(), 4, clock)
    plan = plan_of((0, 5), (3, 1))
    plan.chunks.append(plan_of((0, 7), rest=2).chunks[0])
    assert len(runner.execute(plan)) == 2
    assert clock() == runner.seconds.total == model().step_seconds(plan, 4) > 0
    assert runner.execute(plan_of()) == []


# ------------------------------------------------------------------ whole runs


class Recorder(Observer):
    """The schedule, step by step, and the times of all steps and events."""

    def __init__(self) -> None:
        self.schedule: list[tuple] = []
        self.steps: list[Step] = []
        self.events: list[tuple[float, str, str, dict]] = []

    def on_event(self, event):
        self.events.append((event.time, event.kind, event.request.request_id, event.details))

    def on_plan(self, step):
        chunks = [(request.request_id, start, length) for request, start, length, *_ in step.plan.chunks]
        preempted = [request.request_id for request in step.plan.preempted]
        self.schedule.append((chunks, preempted, step.plan.swap_out, step.plan.swap_in, step.num_free_blocks))

    def on_step(self, step):
        self.steps.append(step)


def run(core: EngineCore, arrivals: Sequence[tuple[int, Request]]) -> Recorder:
    """Add each request before the step that is named beside it, and step until all have ended."""
    core.observers.append(recorder := Recorder())
    coming = list(arrivals)[::-1]
    for number in range(10_000):
        while coming and (coming[-1][0] <= number or not core.has_unfinished_requests()):
            core.add(coming.pop()[1])
        if not core.has_unfinished_requests():
            return recorder
        core.step()
        core.scheduler.check_invariants()
    raise AssertionError("not finished")


def test_two_hundred_requests_on_an_h100():
    """Twice the same, step by step and second by second; and nothing takes time but steps."""

    def simulate() -> tuple[Recorder, VirtualClock, list[Request]]:
        costs, clock, rng = llama(), VirtualClock(), random.Random(0)
        memory = Memory(BlockPool(600, 16, True), BlockPool(200, 16), "auto", costs.costs(16))
        scheduler = Scheduler(memory, FCFS(), max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=4096)
        core = EngineCore(scheduler, SimulatedRunner(costs, 16, clock), clock)
        requests = [
            Request(str(n), [rng.randrange(1000) for _ in range(rng.randint(1, 500))], greedy(rng.randint(1, 100)))
            for n in range(200)
        ]
        return run(core, [(n // 2, request) for n, request in enumerate(requests)]), clock, requests

    recorder, clock, requests = simulate()
    again, clock_again, _ = simulate()
    assert recorder.schedule == again.schedule
    assert recorder.events == again.events
    assert clock() == clock_again() > 0
    assert [step.begin for step in recorder.steps] == [step.begin for step in again.steps]
    assert all(request.num_output_tokens == request.params.max_tokens for request in requests)
    assert {request.finish_reason for request in requests} == {"length"}
    assert any(request.num_preemptions for request in requests), "memory runs out in this one"
    assert clock() == pytest.approx(sum(step.end - step.begin for step in recorder.steps))
    assert all(before.end == after.begin for before, after in zip(recorder.steps, recorder.steps[1:], strict=False))


def test_a_step_takes_what_the_cost_model_says():
    costs, clock = llama(), VirtualClock(100.0)
    scheduler = Scheduler(
        Memory(BlockPool(100, 16)), FCFS(), max_num_seqs=4, max_num_batched_tokens=64, max_model_len=500
    )
    core = EngineCore(scheduler, runner := SimulatedRunner(costs, 16, clock), clock)
    told = []

    class Asker(Observer):
        def on_plan(self, step):
            told.append(costs.breakdown(step.plan, 16))

        def on_step(self, step):
            assert runner.seconds == told[-1]
            assert step.end - step.begin == pytest.approx(told[-1].total, abs=1e-9)

    core.observers.append(Asker())
    run(core, [(0, Request(str(n), [1] * 50, greedy(5))) for n in range(6)])
    assert clock() == pytest.approx(100 + sum(parts.total for parts in told))


SHARED = [5, 2, 7, 1, 0, 3, 6, 4, 4, 1, 7, 7, 2, 0, 5, 3]


@st.composite
def workloads(draw) -> list[tuple[int, dict]]:
    """(step before which it comes, arguments of Request). Prompts share beginnings, and no prompt is the beginning
    of another: what a model then says can be found in the cache, and what the simulator makes up can't."""
    workload = []
    for index in range(draw(st.integers(1, 10))):
        beginning = SHARED[: draw(st.integers(0, len(SHARED)))]
        prompt = [*beginning, 8 + index, *draw(st.lists(st.integers(0, 31), max_size=6))]
        arguments = {
            "request_id": str(index),
            "prompt_token_ids": prompt,
            "params": greedy(draw(st.integers(1, 12)), ignore_eos=True),
            "scheduling": SchedulingParams(
                priority=draw(st.integers(0, 2)),
                client=draw(st.sampled_from("ab")),
                expected_output_len=draw(st.none() | st.integers(1, 12)),
            ),
        }
        workload.append((draw(st.integers(0, 12)), arguments))
    return sorted(workload, key=lambda arrival: arrival[0])


class Timed:
    """A real runner whose steps take the time of simulated ones."""

    def __init__(self, real: ModelRunner, simulated: SimulatedRunner):
        self.real, self.simulated = real, simulated

    def execute(self, plan: StepPlan) -> list[int | None]:
        self.simulated.execute(plan)
        return self.real.execute(plan)


def compare(folder: Path, workload: list[tuple[int, dict]], costs: PreemptionCosts, **kwargs) -> Recorder:
    """Assert that a real engine and the simulator do the same, and return it. kwargs: arguments of Engine.

    Time decides nothing but under "adaptive", for which steps of both take the simulator's.
    """
    engine = eager(folder, **kwargs)
    engine.scheduler.memory.costs = costs
    if kwargs["scheduling_policy"] == "adaptive":
        engine.core.clock = clock = VirtualClock()
        engine.core.runner = Timed(engine.runner, SimulatedRunner(llama(), 4, clock))
    real = run(engine.core, [(step, Request(**arguments)) for step, arguments in workload])

    device_pool = BlockPool(kwargs["num_blocks"], 4, kwargs.pop("enable_prefix_caching"))
    host_blocks = 0 if kwargs["preemption_mode"] == "recompute" else kwargs["num_cpu_blocks"]
    memory = Memory(device_pool, BlockPool(host_blocks + 1, 4), kwargs.pop("preemption_mode"), costs)
    del kwargs["num_blocks"], kwargs["num_cpu_blocks"]
    policy = POLICIES[kwargs.pop("scheduling_policy")]()
    clock = VirtualClock()
    core = EngineCore(Scheduler(memory, policy, max_model_len=256, **kwargs), SimulatedRunner(llama(), 4, clock), clock)
    simulated = run(core, [(step, Request(**arguments)) for step, arguments in workload])

    assert simulated.schedule == real.schedule
    assert [event[1:] for event in simulated.events] == [event[1:] for event in real.events]
    return simulated


@given(
    workload=workloads(),
    costs=st.sampled_from([PreemptionCosts(1.0, 1.0), PreemptionCosts(3.0, 1.0), PreemptionCosts(20.0, 1.0)]),
    scheduling_policy=st.sampled_from(sorted(POLICIES)),
    preemption_mode=st.sampled_from(PREEMPTION_MODES),
    batching=st.sampled_from(["continuous", "continuous", "static"]),
    num_blocks=st.integers(8, 20),
    num_cpu_blocks=st.integers(0, 12),
    max_num_seqs=st.integers(1, 8),
    max_num_batched_tokens=st.integers(2, 40),
    enable_prefix_caching=st.booleans(),
)
def test_the_schedule_is_that_of_a_real_engine(tiny, workload, costs, **kwargs):
    compare(tiny, workload, costs, **kwargs)


@pytest.mark.parametrize("mode", PREEMPTION_MODES)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_schedule_is_that_of_a_real_engine_also_when_much_happens(tiny, policy, mode):
    """Prefixes are found, requests are preempted and return: in this run, that is no matter of luck."""
    rng = random.Random(policy + mode)
    workload = []
    for index in range(20):
        prompt = (
            SHARED[: rng.choice([0, 4, 8, 13])] + [8 + index] + [rng.randrange(32) for _ in range(rng.randrange(5))]
        )
        arguments = {"request_id": str(index), "prompt_token_ids": prompt, "params": greedy(rng.randint(2, 20))}
        arguments["scheduling"] = SchedulingParams(priority=rng.randrange(3), client=rng.choice("ab"))
        workload.append((index // 2, arguments))
    simulated = compare(
        tiny,
        workload,
        PreemptionCosts(3.0, 1.0),
        scheduling_policy=policy,
        preemption_mode=mode,
        batching="continuous",
        num_blocks=14,
        num_cpu_blocks=6,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        enable_prefix_caching=True,
    )
    modes = {details["mode"] for _, kind, _, details in simulated.events if kind == "preempted"}
    assert modes == ({mode} if mode == "recompute" else {"swap", "recompute"}), "also under swap: the host fills up"
    assert any(details["num_cached_tokens"] for _, kind, _, details in simulated.events if kind == "started")
