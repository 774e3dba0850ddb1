"""The device and dtype that a model runs in, and the memory that its KV cache may take."""

from typing import Any

import torch
from torch import Tensor

from minicb.checks import check_choice, show
from minicb.model import ModelConfig

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
CPU_CACHE_BYTES = 1 << 30  # size of the KV cache on a CPU, unless num_blocks sets it


def choose_device(device: str | torch.device | None) -> torch.device:
    """None takes CUDA where it is available. ValueError if the device is neither CPU nor CUDA, or not available.

    A CUDA device becomes the current one, as in vLLM: Triton, pinned memory and CUDA graphs go by that.
    """
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
    if chosen.index is not None and chosen.type == "cuda":
        if chosen.index >= torch.cuda.device_count():
            raise ValueError(
                f"device is {str(device)!r}, but torch finds only {torch.cuda.device_count()} CUDA devices"
            )
        torch.cuda.set_device(chosen)
    return chosen


def choose_block_size(block_size: int | None, device: torch.device, enforce_eager: bool) -> int:
    """None takes 128 on CUDA and 32 on a CPU. ValueError for a size that FlexAttention's CUDA kernels don't have."""
    if device.type == "cuda" and not enforce_eager and block_size not in (None, 16, 32, 64) and block_size % 128:
        raise ValueError(f"block_size must be 16, 32, 64 or a multiple of 128 on CUDA, not {block_size}")
    return block_size or (128 if device.type == "cuda" else 32)


def most_cache_blocks(device: torch.device, block_numel: int) -> int:
    """The most blocks of a cache, whose K has block_numel numbers a block and layer. Before torch 2.14, FlexAttention on
    CUDA counts a layer's numbers in int32 (pytorch#185264)."""
    return (2**31 - 1) // block_numel if device.type == "cuda" and torch.__version__ < "2.14" else 2**31


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
    """Bytes that a step needs beside weights and cache, a generous estimate: a layer's activations for each token; for
    each request its logits, their sorted copy and what lies between (48 bytes a number), and the graphs' logits (8)."""
    widest = 4 * config.hidden_size + 3 * config.num_heads * config.head_dim + 4 * config.intermediate_size
    return 4 * max_num_batched_tokens * widest + 56 * max_num_seqs * config.vocab_size


def upload(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """The values as a tensor on the device."""
    tensor = torch.tensor(values, dtype=dtype)
    if device.type == "cuda":  # a copy from pageable memory waits for all work queued on the device
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
