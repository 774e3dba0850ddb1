"""The device and dtype that a model runs in, and the memory that its KV cache may take."""

from typing import Any

import torch
from torch import Tensor

from minicb.checks import check_choice, show
from minicb.model import ModelConfig

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
CPU_CACHE_BYTES = 1 << 30  # size of the KV cache on a CPU, unless num_blocks sets it


def choose_device(device: str | torch.device | None) -> torch.device:
    """None takes CUDA where it is available. ValueError if the device is neither CPU nor CUDA, or not available."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be 'cpu' or 'cuda', not {show(device)}") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda', not {show(device)}")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {str(device)!r}, but torch finds no CUDA device")
    return chosen


def read_dtype(dtype: str | torch.dtype, checkpoint: Any) -> torch.dtype:
    """ "auto" is the checkpoint's dtype, float32 if it names none. ValueError for a dtype that isn't in DTYPES."""
    if dtype == "auto":
        dtype = checkpoint or "float32"
    name = str(dtype).removeprefix("torch.")
    check_choice("dtype", name, DTYPES)
    return DTYPES[name]


def num_cache_blocks(budget_bytes: int, block_bytes: int, useful_blocks: int) -> int:
    """Blocks that fit into the budget, at most the useful ones and the null block.

    ValueError with the numbers if no usable block fits.
    """
    blocks = min(budget_bytes // block_bytes, useful_blocks + 1)
    if blocks < 2:
        raise ValueError(
            f"no room for a KV cache: {budget_bytes / 2**20:.1f} MiB left for it, and it needs two blocks of "
            f"{block_bytes / 2**20:.2f} MiB; raise gpu_memory_utilization (on a GPU), or lower block_size, "
            "max_num_batched_tokens or max_num_seqs"
        )
    return blocks


def cache_budget(device: torch.device, utilization: float, step_bytes: int) -> int:
    """Bytes that the KV cache may take: on a GPU `utilization` of its memory, less what is in use and what a
    step needs."""
    if device.type != "cuda":
        return CPU_CACHE_BYTES
    free, total = torch.cuda.mem_get_info(device)
    return int(total * utilization) - (total - free) - step_bytes


def step_bytes(config: ModelConfig, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """Bytes that a step needs beside weights and cache, a generous estimate: a layer's activations for each
    token, and for each request its logits, their sorted copy and what lies between."""
    widest = 4 * config.hidden_size + 3 * config.num_heads * config.head_dim + 4 * config.intermediate_size
    return 4 * max_num_batched_tokens * widest + 32 * max_num_seqs * config.vocab_size


def upload(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """The values as a tensor on the device."""
    tensor = torch.tensor(values, dtype=dtype)
    if device.type == "cuda":  # a copy from pageable memory waits for all work queued on the device
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
