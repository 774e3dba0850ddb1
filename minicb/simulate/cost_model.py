"""A device that isn't there: the same plans, a virtual clock, and seconds from a cost model in place of a GPU.

The cost model is a roofline (Williams, Waterman, Patterson, 2009): a piece of work takes as long as the slower of
its two roads, its bytes over the memory bandwidth or its FLOPs over the peak. What a step takes is the sum of:

- linear: the layers' matrices are read once and multiplied with every token, max(bytes / bandwidth,
  2 * parameters * tokens / flops); so is the LM head, with the sampled tokens only, where there are any.
- attention: K and V are read and the new ones written, 2 * kv_heads * head_dim numbers a layer and position; a query
  meets all positions up to its own, 4 * heads * head_dim FLOPs a layer each, which a chunk start .. end - 1 adds up to
  (start + 1) + ... + end = length * (start + 1 + end) / 2 of them. Max of the two, over all chunks.
- all_reduce: with tensor parallelism two a layer, of the hidden states of all tokens. In a ring every device sends
  2 * (tp - 1) / tp of them over its link (Patarasuk and Yuan, 2009). And a latency each.
- launch: the same for every step.
- swap: blocks over the bus to the host and back, before the pass and not beside it.

Tensor parallelism divides parameters, KV and FLOPs by the number of devices (Megatron-LM, 2019).

Left out: embedding lookup, norms, activations, sampling, the scheduler's own time, sliding windows (all positions
are read). A chunk reads its positions once in all, not once for each row of mask tiles, as if the cache on the chip
kept them from one row to the next. So these are the times of perfect kernels. Real ones take longer: give
efficiencies below 1 where you have measured them.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from minicb.checks import check_choice, check_int, check_real
from minicb.memory import PreemptionCosts
from minicb.plan import StepPlan

ITEMSIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}  # bytes
# A config that has one of these describes a model that the formulas here don't.
NOT_MODELLED = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank", "quantization_config")
PREFILL_LENGTH = 1024  # of the prompts by which ModelRunner too judges what a token costs to recompute


class Device(NamedTuple):
    """What counts of a device. Bandwidths are of one direction."""

    name: str
    memory_bytes: float
    bandwidth: float  # of its memory, bytes/s
    flops: float  # FLOP/s of dense matrix products in 16 bit that add up in 32
    link_bandwidth: float  # to the other devices of a tensor parallel group, bytes/s
    host_bandwidth: float  # to host memory, bytes/s


# From NVIDIA's data sheets. Those give links and buses with both directions together, and where they name FLOP/s
# "with sparsity", a dense product has half of them. Memory chips come in GiB, whatever a data sheet calls it.
DEVICES = {
    device.name: device
    for device in (
        # "NVIDIA H100 Tensor Core GPU", SXM: 80 GB, 3.35 TB/s, 1,979 TFLOPS sparse, NVLink 900 GB/s, PCIe 128 GB/s
        Device("H100", 80 * 2**30, 3.35e12, 989e12, 450e9, 64e9),
        # "NVIDIA H200 Tensor Core GPU", SXM: 141 GB, 4.8 TB/s, the rest as the H100
        Device("H200", 141 * 2**30, 4.8e12, 989e12, 450e9, 64e9),
        # "NVIDIA A100 Tensor Core GPU", 80 GB SXM: 2,039 GB/s, 312 TFLOPS, NVLink 600 GB/s, PCIe 64 GB/s
        Device("A100", 80 * 2**30, 2.039e12, 312e12, 300e9, 32e9),
        # "NVIDIA Ada GPU Architecture": 24 GB, 1,008 GB/s, 165.2 TFLOPS with FP32 accumulate, PCIe 4.0 and no NVLink
        Device("RTX 4090", 24 * 2**30, 1.008e12, 165.2e12, 32e9, 32e9),
    )
}


class ModelShape(NamedTuple):
    """What counts of a decoder-only transformer whose MLP has a gate (Llama, Mistral, Qwen2, Qwen3)."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool  # is the embedding matrix also the LM head?
    itemsize: int  # bytes of a parameter, and of a number in the KV cache

    @classmethod
    def of(cls, config: Any) -> "ModelShape":
        """From a ModelConfig, a config of transformers, or config.json as a dict.

        What a config may leave out: num_key_value_heads (each head has its own), head_dim (hidden_size /
        num_attention_heads), tie_word_embeddings (no), dtype (16 bit, for which devices' FLOP/s are given).
        ValueError names a field that is missing, or one that says that the model is of another kind.
        """
        get: Callable[[str], Any]
        get = config.get if isinstance(config, Mapping) else lambda name: getattr(config, name, None)
        for name in NOT_MODELLED:
            if get(name):
                raise ValueError(f"{name} in the config: such a model isn't modelled")

        def read(*names: str, default: int | None = None) -> int:
            found = next((name for name in names if get(name) is not None), None)
            if found is not None:
                return check_int(found, get(found), minimum=1)
            if default is None:
                raise ValueError(f"the config has no {names[0]}")
            return default

        hidden_size, num_heads = read("hidden_size"), read("num_attention_heads", "num_heads")
        older = get("torch_dtype") if isinstance(config, Mapping) else None  # transformers warns who asks it for that
        dtype = str(get("dtype") or older or "bfloat16").removeprefix("torch.")
        check_choice("dtype", dtype, ITEMSIZES)
        return cls(
            num_layers=read("num_hidden_layers", "num_layers"),
            hidden_size=hidden_size,
            intermediate_size=read("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=read("num_key_value_heads", "num_kv_heads", default=num_heads),
            head_dim=check_int("head_dim", read("head_dim", default=hidden_size // num_heads), minimum=1),
            vocab_size=read("vocab_size"),
            tied=bool(get("tie_word_embeddings")),
            itemsize=ITEMSIZES[dtype],
        )

    @property
    def layer_parameters(self) -> int:
        """Of one layer: Q and output, K and V, and the three matrices of the MLP. No norms, no biases."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def head_parameters(self) -> int:
        """Of the LM head, and of the embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        return self.num_layers * self.layer_parameters + (1 if self.tied else 2) * self.head_parameters

    @property
    def kv_bytes(self) -> int:
        """K and V of one token position, in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.itemsize


class StepSeconds(NamedTuple):
    """What a step takes, in seconds, by part."""

    linear: float
    attention: float
    all_reduce: float
    launch: float
    swap: float

    @property
    def total(self) -> float:
        return sum(self)


class CostModel:
    """The seconds that a model's steps take on a device, or on `tensor_parallel` of them.

    bandwidth_efficiency, flops_efficiency: the part of memory bandwidth and of FLOP/s that kernels get, in (0, 1].
        1 is the roofline itself, which no engine beats; what is right below it depends on the kernels.
    launch_seconds: what a step takes however little it has to do. The default is about one launch; a runner
        that launches each kernel by itself, or an engine that plans while the device waits, takes far more.
    all_reduce_latency: seconds for each all-reduce. The default is where NCCL's own cost model begins
        (src/graph/tuning.cc: a ring with its protocol for low latency).

    ValueError names an argument that is out of range.
    """

    def __init__(
        self,
        shape: ModelShape,
        device: Device,
        tensor_parallel: int = 1,
        *,
        bandwidth_efficiency: float = 1.0,
        flops_efficiency: float = 1.0,
        launch_seconds: float = 5e-6,
        all_reduce_latency: float = 6.6e-6,
    ):
        tp = check_int("tensor_parallel", tensor_parallel, minimum=1)
        if shape.num_kv_heads % tp or shape.num_heads % tp:
            raise ValueError(
                f"tensor_parallel is {tp}, which divides {shape.num_heads} heads and {shape.num_kv_heads} KV heads unevenly"
            )
        for name, value in (("bandwidth_efficiency", bandwidth_efficiency), ("flops_efficiency", flops_efficiency)):
            check_real(name, value, lambda value: 0 < value <= 1, "in (0, 1]")
        for name, value in (("launch_seconds", launch_seconds), ("all_reduce_latency", all_reduce_latency)):
            check_real(name, value, lambda value: 0 <= value < float("inf"), "a finite number >= 0")
        self.shape, self.device, self.tensor_parallel = shape, device, tp
        # All that doesn't depend on the plan, once: seconds for each unit of what `_seconds` is told.
        bandwidth = tp * device.bandwidth * bandwidth_efficiency
        flops = tp * device.flops * flops_efficiency
        layers, head = shape.num_layers * shape.layer_parameters, shape.head_parameters
        self._read_layers, self._layers_token = layers * shape.itemsize / bandwidth, 2 * layers / flops
        self._read_head, self._head_token = head * shape.itemsize / bandwidth, 2 * head / flops
        self._kv_position = shape.kv_bytes / bandwidth
        self._attend = 4 * shape.num_layers * shape.num_heads * shape.head_dim / flops
        sent = 2 * (tp - 1) / tp * shape.hidden_size * shape.itemsize  # bytes for each token
        self._reduce_token = 2 * shape.num_layers * sent / device.link_bandwidth
        self._reduce_latency = 2 * shape.num_layers * all_reduce_latency if tp > 1 else 0.0
        self._launch = float(launch_seconds)
        self._swap_position = shape.kv_bytes / (tp * device.host_bandwidth)

    def breakdown(self, plan: StepPlan, block_size: int) -> StepSeconds:
        """What the plan takes."""
        # This is every step's, and there may be hundreds of chunks: one pass.
        tokens = sampled = positions = doubled = 0
        for _, start, length, needs_sampling, _ in plan.chunks:
            end = start + length
            tokens += length
            positions += end
            doubled += length * (start + 1 + end)
            sampled += needs_sampling
        return self._seconds(tokens, sampled, positions, doubled / 2, self._swap_seconds(plan, block_size))

    def step_seconds(self, plan: StepPlan, block_size: int) -> float:
        return self.breakdown(plan, block_size).total

    def _swap_seconds(self, plan: StepPlan, block_size: int) -> float:
        return (len(plan.swap_out) + len(plan.swap_in)) * block_size * self._swap_position

    def _seconds(self, tokens: int, sampled: int, positions: int, meetings: float, swap: float) -> StepSeconds:
        """positions: how many are read, all chunks together; meetings: of a query with a position."""
        if not tokens:
            return StepSeconds(0.0, 0.0, 0.0, 0.0, swap)  # ModelRunner, too, runs no pass then
        linear = max(self._read_layers, self._layers_token * tokens)
        if sampled:
            linear += max(self._read_head, self._head_token * sampled)
        attention = max(self._kv_position * (positions + tokens), self._attend * meetings)
        all_reduce = self._reduce_latency + self._reduce_token * tokens
        return StepSeconds(linear, attention, all_reduce, self._launch, swap)

    def costs(self, block_size: int) -> PreemptionCosts:
        """What a preemption costs, for `Memory`: the same two things that ModelRunner measures when it starts."""
        swap_block = 2 * block_size * self._swap_position  # there and back
        tokens, meetings = 2 * PREFILL_LENGTH, PREFILL_LENGTH * (PREFILL_LENGTH + 1)  # two prompts
        return PreemptionCosts(swap_block, self._seconds(tokens, 2, tokens, meetings, 0.0).total / tokens)

    def num_blocks(self, block_size: int, utilization: float = 0.9) -> int:
        """Size of the pool that `utilization` of the devices' memory leaves beside the weights, block 0 included.

        ValueError with the numbers if not even one usable block fits.
        """
        check_int("block_size", block_size, minimum=1)
        utilization = check_real("utilization", utilization, lambda value: 0 < value <= 1, "in (0, 1]")
        shape, total = self.shape, self.tensor_parallel * self.device.memory_bytes
        weights, block = shape.num_parameters * shape.itemsize, shape.kv_bytes * block_size
        count = int((total * utilization - weights) // block)
        if count < 2:
            raise ValueError(
                f"no room for a KV cache: {self.tensor_parallel} x {self.device.name} has {total / 2**30:.1f} GiB, of which "
                f"{utilization:g} may be used; the weights take {weights / 2**30:.1f} GiB, and the least is two "
                f"blocks of {block / 2**20:.2f} MiB"
            )
        return count


class VirtualClock:
    """Time that passes only when it is told to. Call it for the time, in seconds."""

    def __init__(self, now: float = 0.0):
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += check_real("seconds", seconds, lambda value: 0 <= value < float("inf"), "a finite number >= 0")


class SimulatedRunner:
    """Stands where ModelRunner stands: a plan takes the cost model's time on the clock, and yields tokens.

    The tokens are made up from the request's arrival number and their position, so requests with the same prompt
    get different ones (a greedy model gives them the same), and the prefix cache finds what prompts share and
    nothing else. They mean nothing: have requests end by max_tokens, with no EOS or stop tokens.
    """

    def __init__(self, cost_model: CostModel, block_size: int, clock: VirtualClock):
        self.cost_model, self.block_size, self.clock = cost_model, block_size, clock
        self.seconds = StepSeconds(0.0, 0.0, 0.0, 0.0, 0.0)  # what the last step took

    def execute(self, plan: StepPlan) -> list[int | None]:
        """A token for each chunk of the plan that samples, in the plan's order."""
        self.seconds = self.cost_model.breakdown(plan, self.block_size)
        self.clock.advance(self.seconds.total)
        vocab_size = self.cost_model.shape.vocab_size
        return [
            hash((request.arrival, start + length)) % vocab_size  # Python hashes integers the same in every run
            for request, start, length, needs_sampling, _ in plan.chunks
            if needs_sampling
        ]
