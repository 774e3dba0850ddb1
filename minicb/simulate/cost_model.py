"""A simulated device: it executes the same plans, and a cost model and a virtual clock stand in for the GPU.

The cost model is a roofline (Williams, Waterman, Patterson, 2009): a piece of work takes max(bytes / memory bandwidth,
FLOPs / peak FLOP/s). The time of a step is the sum of these parts:

- linear: each layer's matrices are read once and multiplied with every token, max(bytes / bandwidth,
  2 * parameters * tokens / flops). The same holds for the LM head with the sampled tokens, if there are any.
- attention: bytes are the K and V that are read or written, 2 * kv_heads * head_dim numbers per layer and position.
  FLOPs are 4 * heads * head_dim per layer and query-key pair. A query attends to all positions up to its own, so a
  chunk start .. end - 1 has (start + 1) + ... + end = length * (start + 1 + end) / 2 pairs. Both are summed over all
  chunks before the max is taken.
- all_reduce: with tensor parallelism there are two per layer, of the hidden states of all tokens. In a ring each device
  sends 2 * (tp - 1) / tp of them over its link (Patarasuk and Yuan, 2009). Each all-reduce also has a latency.
- launch: a constant per step.
- swap: blocks are copied over the bus to the host and back, before the forward pass and not in parallel with it.

Tensor parallelism divides parameters, KV and FLOPs by the number of devices (Megatron-LM, 2019).

Not modelled: embedding lookup, norms, activations, sampling, the scheduler's own time, sliding windows (all positions
are read). A chunk reads each of its positions once, not once per row of mask tiles, as if the device's cache held them
between rows. So these are the times of perfect kernels. Real kernels take longer; pass efficiencies below 1 if you have
measured them.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from minicb.checks import check_choice, check_int, check_real
from minicb.memory import PreemptionCosts
from minicb.plan import StepPlan

ITEMSIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}  # bytes
# A config with one of these fields describes a model to which the formulas don't apply.
NOT_MODELLED = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank", "quantization_config")
PREFILL_LENGTH = 1024  # tokens of each prompt in the estimate of a recompute; ModelRunner measures the same


class DeviceSpec(NamedTuple):
    """What the cost model knows of a device. Bandwidths are for one direction."""

    name: str
    memory_bytes: float
    bandwidth: float  # memory bandwidth, bytes/s
    flops: float  # dense 16-bit matrix products with 32-bit accumulation, FLOP/s
    link_bandwidth: float  # to the other devices of a tensor-parallel group, bytes/s
    host_bandwidth: float  # to host memory, bytes/s


# From NVIDIA's data sheets. They add up both directions of links and buses, so half of it is here, and half of the
# FLOP/s "with sparsity", which are those of dense products. Memory comes in GiB, though the data sheets say GB.
DEVICES = {
    device.name: device
    for device in (
        # "NVIDIA H100 Tensor Core GPU", SXM: 80 GB, 3.35 TB/s, 1,979 TFLOPS sparse, NVLink 900 GB/s, PCIe 128 GB/s
        DeviceSpec("H100", 80 * 2**30, 3.35e12, 989e12, 450e9, 64e9),
        # "NVIDIA H200 Tensor Core GPU", SXM: 141 GB, 4.8 TB/s, the rest as the H100
        DeviceSpec("H200", 141 * 2**30, 4.8e12, 989e12, 450e9, 64e9),
        # "NVIDIA A100 Tensor Core GPU", 80 GB SXM: 2,039 GB/s, 312 TFLOPS, NVLink 600 GB/s, PCIe 64 GB/s
        DeviceSpec("A100", 80 * 2**30, 2.039e12, 312e12, 300e9, 32e9),
        # "NVIDIA Ada GPU Architecture": 24 GB, 1,008 GB/s, 165.2 TFLOPS with FP32 accumulate, PCIe 4.0 and no NVLink
        DeviceSpec("RTX 4090", 24 * 2**30, 1.008e12, 165.2e12, 32e9, 32e9),
    )
}


class ModelShape(NamedTuple):
    """The shape of a decoder-only transformer with a gated MLP (Llama, Mistral, Qwen2, Qwen3)."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool  # the embedding matrix is also the LM head
    itemsize: int  # bytes of a parameter, and of a number in the KV cache

    @classmethod
    def of(cls, config: Any) -> "ModelShape":
        """From a ModelConfig, a config of transformers, or config.json as a dict.

        A config may leave out num_key_value_heads (default: num_attention_heads), head_dim (hidden_size /
        num_attention_heads), tie_word_embeddings (False) and dtype (16 bit, as in the devices' FLOP/s).
        ValueError names a field that is missing, or that describes a model to which the formulas don't apply.
        """
        get: Callable[[str], Any]
        get = config.get if isinstance(config, Mapping) else lambda name: getattr(config, name, None)
        for name in NOT_MODELLED:
            if get(name):
                raise ValueError(f"{name} in the config: the cost model doesn't cover such a model")

        def read(*names: str, default: int | None = None) -> int:
            found = next((name for name in names if get(name) is not None), None)
            if found is not None:
                return check_int(found, get(found), minimum=1)
            if default is None:
                raise ValueError(f"the config has no {names[0]}")
            return default

        hidden_size, num_heads = read("hidden_size"), read("num_attention_heads", "num_heads")
        older = (
            get("torch_dtype") if isinstance(config, Mapping) else None
        )  # transformers warns if it is asked for this
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
        """Parameters of one layer: Q, K, V and output, and the three matrices of the MLP, without norms and biases."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def head_parameters(self) -> int:
        """Parameters of the LM head. The embedding has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        return self.num_layers * self.layer_parameters + (1 if self.tied else 2) * self.head_parameters

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one token position, in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.itemsize


class StepSeconds(NamedTuple):
    """The time of a step by part, in seconds."""

    linear: float
    attention: float
    all_reduce: float
    launch: float
    swap: float

    @property
    def total(self) -> float:
        return sum(self)


class CostModel:
    """How long a model's steps take on a device, or on `tensor_parallel` of them.

    bandwidth_efficiency, flops_efficiency: the part of memory bandwidth and of FLOP/s that kernels reach, in (0, 1].
        1 is the roofline, which no engine beats.
    launch_seconds: a constant per step. The default is about one kernel launch. A runner that launches kernels one by
        one, or an engine that plans while the device waits, takes far more.
    all_reduce_latency: seconds per all-reduce. The default is where NCCL's own cost model begins (src/graph/tuning.cc:
        a ring with the low-latency protocol).

    ValueError names an argument that is out of range.
    """

    def __init__(
        self,
        shape: ModelShape,
        device: DeviceSpec,
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
                f"tensor_parallel is {tp}, which doesn't divide {shape.num_heads} heads and {shape.num_kv_heads} KV heads"
            )
        for name, value in (("bandwidth_efficiency", bandwidth_efficiency), ("flops_efficiency", flops_efficiency)):
            check_real(name, value, lambda value: 0 < value <= 1, "in (0, 1]")
        for name, value in (("launch_seconds", launch_seconds), ("all_reduce_latency", all_reduce_latency)):
            check_real(name, value, lambda value: 0 <= value < float("inf"), "a finite number >= 0")
        self.shape, self.device, self.tensor_parallel = shape, device, tp
        # Everything that doesn't depend on the plan, in seconds per unit of the arguments of `_seconds`.
        bandwidth = tp * device.bandwidth * bandwidth_efficiency
        flops = tp * device.flops * flops_efficiency
        layers, head = shape.num_layers * shape.layer_parameters, shape.head_parameters
        self._read_layers, self._layers_token = layers * shape.itemsize / bandwidth, 2 * layers / flops
        self._read_head, self._head_token = head * shape.itemsize / bandwidth, 2 * head / flops
        self._kv_position = shape.kv_bytes / bandwidth
        self._attend = 4 * shape.num_layers * shape.num_heads * shape.head_dim / flops
        sent = 2 * (tp - 1) / tp * shape.hidden_size * shape.itemsize  # bytes per token
        self._reduce_token = 2 * shape.num_layers * sent / device.link_bandwidth
        self._reduce_latency = 2 * shape.num_layers * all_reduce_latency if tp > 1 else 0.0
        self._launch = float(launch_seconds)
        self._swap_position = shape.kv_bytes / (tp * device.host_bandwidth)

    def breakdown(self, plan: StepPlan, block_size: int) -> StepSeconds:
        """The time of the plan by part, in seconds."""
        # One pass: this runs in every step, and a step may have hundreds of chunks.
        tokens = sampled = positions = twice_pairs = 0
        for _, start, length, needs_sampling, _ in plan.chunks:
            end = start + length
            tokens += length
            positions += end
            twice_pairs += length * (start + 1 + end)
            sampled += needs_sampling
        return self._seconds(tokens, sampled, positions, twice_pairs / 2, self._swap_seconds(plan, block_size))

    def step_seconds(self, plan: StepPlan, block_size: int) -> float:
        return self.breakdown(plan, block_size).total

    def _swap_seconds(self, plan: StepPlan, block_size: int) -> float:
        return (len(plan.swap_out) + len(plan.swap_in)) * block_size * self._swap_position

    def _seconds(self, tokens: int, sampled: int, positions: int, pairs: float, swap: float) -> StepSeconds:
        """positions: KV positions that are read. pairs: query-key pairs. Both are sums over all chunks."""
        if not tokens:
            return StepSeconds(0.0, 0.0, 0.0, 0.0, swap)  # no forward pass, as in ModelRunner
        linear = max(self._read_layers, self._layers_token * tokens)
        if sampled:
            linear += max(self._read_head, self._head_token * sampled)
        attention = max(self._kv_position * (positions + tokens), self._attend * pairs)
        all_reduce = self._reduce_latency + self._reduce_token * tokens
        return StepSeconds(linear, attention, all_reduce, self._launch, swap)

    def costs(self, block_size: int) -> PreemptionCosts:
        """The costs of a preemption, for `Memory`: seconds per block swapped out and back, and per token recomputed."""
        swap_block = 2 * block_size * self._swap_position  # out and back
        tokens, pairs = 2 * PREFILL_LENGTH, PREFILL_LENGTH * (PREFILL_LENGTH + 1)  # two prompts
        return PreemptionCosts(swap_block, self._seconds(tokens, 2, tokens, pairs, 0.0).total / tokens)

    def num_blocks(self, block_size: int, utilization: float = 0.9) -> int:
        """Number of blocks, block 0 included, that fit beside the weights into `utilization` of the devices' memory.

        ValueError if not even one usable block fits.
        """
        check_int("block_size", block_size, minimum=1)
        utilization = check_real("utilization", utilization, lambda value: 0 < value <= 1, "in (0, 1]")
        shape, total = self.shape, self.tensor_parallel * self.device.memory_bytes
        weights, block = shape.num_parameters * shape.itemsize, shape.kv_bytes * block_size
        count = int((total * utilization - weights) // block)
        if count < 2:
            raise ValueError(
                f"no room for a KV cache: {self.tensor_parallel} x {self.device.name} has {total / 2**30:.1f} GiB, and "
                f"{utilization:g} of it may be used; the weights take {weights / 2**30:.1f} GiB, and the least is two "
                f"blocks of {block / 2**20:.2f} MiB"
            )
        return count


class VirtualClock:
    """A clock that moves only when `advance` is called. Call the object for the time in seconds."""

    def __init__(self, now: float = 0.0):
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += check_real("seconds", seconds, lambda value: 0 <= value < float("inf"), "a finite number >= 0")


class SimulatedRunner:
    """Takes the place of ModelRunner: a plan takes the cost model's time on the clock and yields made-up tokens.

    A token is made from the request's arrival number and the position. So requests with the same prompt get different
    tokens, where a greedy model would give them the same, and the prefix cache finds what prompts share and nothing
    else. The tokens mean nothing, so let requests end by max_tokens, without EOS or stop tokens.
    """

    def __init__(self, cost_model: CostModel, block_size: int, clock: VirtualClock):
        self.cost_model, self.block_size, self.clock = cost_model, block_size, clock
        self.seconds = StepSeconds(0.0, 0.0, 0.0, 0.0, 0.0)  # time of the latest step

    def execute(self, plan: StepPlan) -> list[int | None]:
        """Return one token for each chunk that needs sampling, in the plan's order."""
        self.seconds = self.cost_model.breakdown(plan, self.block_size)
        self.clock.advance(self.seconds.total)
        vocab_size = self.cost_model.shape.vocab_size
        return [
            hash((request.arrival, start + length)) % vocab_size  # Python hashes integers the same in every run
            for request, start, length, needs_sampling, _ in plan.chunks
            if needs_sampling
        ]
