"""The arguments of an engine, checked."""

import time
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch

from minicb.checks import check, check_choice, check_int, check_real
from minicb.memory import PREEMPTION_MODES
from minicb.policies import POLICIES, Policy

CHOICES: dict[str, Iterable[str]] = {
    "load_format": ("auto", "dummy"),
    "preemption_mode": PREEMPTION_MODES,
    "scheduling_policy": POLICIES,
    "batching": ("continuous", "static"),
}


@dataclass(kw_only=True)
class EngineArgs:
    """The arguments of an engine. Names and meaning follow vLLM's. The command line shows these texts as its help.

    tokenizer: folder or Hugging Face id of the tokenizer; None takes the model's. A model without a tokenizer takes
        prompts of token ids only, and its outputs have no text.
    dtype: "auto" takes the checkpoint's; "float64" needs enforce_eager.
    device: "cuda", "cpu" or a torch.device; None takes CUDA where there is a GPU.
    seed: seed of dummy weights and of the requests that name none.
    load_format: "auto" loads the checkpoint; "dummy" makes random weights from config.json alone.
    max_model_len: the most tokens of prompt and output together; None takes the model's limit.
    max_num_seqs: the most requests that run at a time.
    max_num_batched_tokens: the most tokens of one step.
    block_size: tokens of a KV cache block; None takes 128 on CUDA and 32 on a CPU.
    num_blocks: size of the block pool, the null block 0 included; None takes all of gpu_memory_utilization on CUDA,
        and up to 1 GiB on a CPU.
    gpu_memory_utilization: the fraction of a GPU's memory, in (0, 1], that may be in use, by other programs too.
    swap_space: GiB of host memory (pinned on CUDA) for swapped KV, or less if max_num_seqs requests need less.
    num_cpu_blocks: the same in blocks, all usable; overrides swap_space.
    preemption_mode: what happens to the KV of a preempted request. "swap" copies it to host memory, or drops it where
        there is no room; "recompute" drops it, prefills it again later and takes no host memory; "auto" chooses the
        faster of the two for each request, by speeds measured at the start.
    scheduling_policy: the order of requests; the last in it is preempted first. "fcfs": first come, first served;
        "sjf": shortest job first; "priority": lowest priority value first; "fair": least served client first;
        "adaptive": fcfs in batches that hold a time per token. In Python also a Policy, which is copied.
    batching: "continuous", or "static", where a batch starts when all requests of the last one have ended.
    enable_prefix_caching: requests share the full KV cache blocks of a common prefix.
    enforce_eager: compile nothing: starts at once, takes any dtype, is slow, uses the simple `gather_attention`.
    clock: a function that gives the time in seconds; all metrics and events are made of it.

    A value out of range is a ValueError that names the field.
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
        for name, choices in CHOICES.items():
            if not (name == "scheduling_policy" and isinstance(self.scheduling_policy, Policy)):
                check_choice(name, getattr(self, name), choices)
        for name in ("enable_prefix_caching", "enforce_eager"):
            check_choice(name, getattr(self, name), (True, False))
        self._check_int("seed", minimum=0, below=2**63)
        self._check_int("max_model_len", minimum=2)
        self._check_int("max_num_seqs", minimum=1)
        self._check_int("max_num_batched_tokens", minimum=1)
        self._check_int("block_size", minimum=1, below=2**31)
        self._check_int("num_blocks", minimum=2, below=2**31)
        self._check_int("num_cpu_blocks", minimum=0, below=2**31)
        part, space = self.gpu_memory_utilization, self.swap_space
        self.gpu_memory_utilization = check_real("gpu_memory_utilization", part, lambda v: 0 < v <= 1, "in (0, 1]")
        self.swap_space = check_real("swap_space", space, lambda v: 0 <= v < 2**31, "in [0, 2**31), in GiB")
        if self.preemption_mode == "recompute":
            self.num_cpu_blocks = 0
        check(callable(self.clock), "clock", "a function that gives the time in seconds", self.clock)

    def _check_int(self, name: str, minimum: int, below: int | None = None) -> None:
        """Check an integer. Where the default is None, None stays: the engine chooses."""
        value = getattr(self, name)
        if value is not None or getattr(EngineArgs, name) is not None:
            setattr(self, name, check_int(name, value, minimum, below))

    def make_policy(self) -> Policy:
        """A new policy. Each scheduler needs its own, because a policy counts what its scheduler served."""
        policy = self.scheduling_policy
        return deepcopy(policy) if isinstance(policy, Policy) else POLICIES[policy]()
