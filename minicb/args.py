"""The arguments of an engine, checked."""

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch

from minicb.checks import check_choice, check_int, check_real, show
from minicb.memory import PREEMPTION_MODES
from minicb.policies import POLICIES, Policy


@dataclass(kw_only=True)
class EngineArgs:
    """Names and meaning follow vLLM's.

    tokenizer: folder or id of the tokenizer, where it isn't the model's. A model without one takes
        prompts of token ids only, and its outputs have no text.
    dtype: "auto" (the checkpoint's), "float32", "float16", "bfloat16"; "float64" with enforce_eager.
    device: "cuda", "cpu" or a torch.device; None takes CUDA where there is one.
    seed: of the requests that name none, and of dummy weights.
    load_format: "auto", or "dummy" for random weights from config.json alone.
    max_model_len: prompt and output together, in tokens; None takes the model's.
    max_num_seqs: requests that run at a time. max_num_batched_tokens: tokens of one step.
    block_size: tokens of a KV cache block; None takes 128 on CUDA and 32 on a CPU.
    num_blocks: size of the pool, the reserved block 0 included; None sizes it from free memory on
        CUDA, and takes up to 1 GiB on a CPU.
    gpu_memory_utilization: the part of a GPU's memory that weights, KV cache and the work of a step
        may take together with what others use of it, in (0, 1].
    swap_space: at most so many GiB of host memory (pinned on CUDA) for the KV of preempted requests, and
        no more than max_num_seqs requests can fill. num_cpu_blocks: the same in blocks, none of them
        reserved; it overrides swap_space.
    preemption_mode: what becomes of a request's KV when its blocks are needed for others: "swap" copies
        it to host memory, or drops it where there is no room; "recompute" drops it and prefills again (and
        takes no host memory); "auto" does what takes less time by the speeds measured at the start.
    enable_prefix_caching: a request reuses the full blocks of its beginning that another has computed,
        from that one's first token on.
    scheduling_policy: who goes next and who is preempted: "fcfs", "sjf", "priority", "fair" or "adaptive", or
        a Policy with arguments of its own, of which it takes a copy; policies.py says what each promises.
    batching: "continuous", or "static": the next batch starts when the last has ended.
    clock: gives the time in seconds, of which all metrics and events are made.
    enforce_eager: compile nothing: starts at once, runs in any dtype, slow. Attention is then the
        obvious `gather_attention` instead of `paged_attention`.

    ValueError names an argument that is out of range.
    """

    tokenizer: str | Path | None = None
    dtype: str | torch.dtype = "auto"
    device: str | torch.device | None = None
    seed: int = 0
    load_format: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int | None = None
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    swap_space: float = 4.0
    num_cpu_blocks: int | None = None
    preemption_mode: str = "auto"
    scheduling_policy: str | Policy = "fcfs"
    batching: str = "continuous"
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        check_choice("batching", self.batching, ("continuous", "static"))
        check_choice("load_format", self.load_format, ("auto", "dummy"))
        check_choice("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        check_choice("enable_prefix_caching", self.enable_prefix_caching, (True, False))
        check_choice("enforce_eager", self.enforce_eager, (True, False))
        self._check_int("seed", minimum=0, below=2**63)
        self._check_int("max_model_len", minimum=2)
        self._check_int("max_num_seqs", minimum=1)
        self._check_int("max_num_batched_tokens", minimum=1)
        self._check_int("block_size", minimum=1, below=2**31)
        self._check_int("num_blocks", minimum=2, below=2**31)
        self._check_int("num_cpu_blocks", minimum=0, below=2**31)
        self.gpu_memory_utilization = check_real(
            "gpu_memory_utilization", self.gpu_memory_utilization, lambda value: 0 < value <= 1, "in (0, 1]"
        )
        self.swap_space = check_real(
            "swap_space", self.swap_space, lambda value: 0 <= value < 2**31, "in [0, 2**31), in GiB"
        )
        if self.preemption_mode == "recompute":
            self.num_cpu_blocks = 0
        if not callable(self.clock):
            raise ValueError(f"clock must be a function that gives the time in seconds, not {show(self.clock)}")
        if not isinstance(self.scheduling_policy, Policy):
            check_choice("scheduling_policy", self.scheduling_policy, POLICIES)

    def _check_int(self, name: str, minimum: int, below: int | None = None) -> None:
        """None stays None where it is the default: somebody else chooses."""
        value = getattr(self, name)
        if value is not None or getattr(EngineArgs, name) is not None:
            setattr(self, name, check_int(name, value, minimum, below))

    def make_policy(self) -> Policy:
        """A new one for each scheduler: what was served by one is nothing to another."""
        policy = self.scheduling_policy
        return deepcopy(policy) if isinstance(policy, Policy) else POLICIES[policy]()
