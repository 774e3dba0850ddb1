"""KV cache blocks of swapped requests, in host memory."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from minicb.blocks import BlockPair
from minicb.device import upload

STAGING_BYTES = 64 << 20  # large enough for the full bandwidth of PCIe


class HostCache:
    """Copies blocks between the KV cache on the device and host memory, which is pinned on CUDA.

    caches: K and V, [layers, num_blocks * block_size, kv_heads, head_dim] each.
    num_blocks: blocks of host memory, the null block included.

    In host memory the layers of a block are contiguous, so neighbouring blocks travel in one large copy of K
    and one of V. On the device they are not. swap_out gathers blocks into a contiguous staging buffer, and from
    then on their places may be overwritten. swap_in copies blocks into the buffer and scatters them. Blocks
    that exceed the buffer go in groups.

    The large copies run on their own stream, beside the forward pass, in the order in which they were queued.
    A copy waits for all work queued before it. Work that touches the staging buffer waits for all copies queued
    before it. So the buffer is never overwritten while a copy reads it, nor read before a copy has filled it.
    """

    def __init__(self, caches: Sequence[Tensor], num_blocks: int, block_size: int):
        # Views by block: [num_blocks, layers, block_size, kv_heads, head_dim]
        self.device_kv = [cache.unflatten(1, (-1, block_size)).transpose(0, 1) for cache in caches]
        self.device = caches[0].device
        on_cuda = self.device.type == "cuda"
        shape = self.device_kv[0].shape[1:]
        block_bytes = sum(blocks[0].numel() * blocks.element_size() for blocks in self.device_kv)
        self.num_staged = min(num_blocks, staging_bytes(block_bytes) // block_bytes)
        try:
            self.host_kv = [
                torch.empty((num_blocks, *shape), dtype=cache.dtype, pin_memory=on_cuda) for cache in caches
            ]
        except RuntimeError as error:
            what = f"num_cpu_blocks is {num_blocks - 1} (swap_space sets it if it isn't given)"
            size = f"{num_blocks * block_bytes / 2**30:.1f} GiB"
            raise ValueError(f"{what}, and there is no host memory for {size}: {error}") from error
        staged = (self.num_staged, *shape)
        self.staging = [torch.empty(staged, dtype=cache.dtype, device=self.device) for cache in caches]
        self.stream = torch.cuda.Stream(self.device) if on_cuda else None

    def swap_out(self, pairs: Sequence[BlockPair]) -> None:
        """Copy device blocks to host blocks. Work that is queued from now on may overwrite the device blocks."""
        for group in self._groups(pairs):
            sources, destinations = zip(*group, strict=True)
            rows = upload(sources, self.device)
            self._wait_for_copies()
            for blocks, staging in zip(self.device_kv, self.staging, strict=True):
                torch.index_select(blocks, 0, rows, out=staging[: len(rows)])
            for first, begin, end in _runs(destinations):
                for host, staging in zip(self.host_kv, self.staging, strict=True):
                    self._copy(host[begin:end], staging[first : first + end - begin])

    def swap_in(self, pairs: Sequence[BlockPair]) -> None:
        """Copy host blocks to device blocks. Work that is queued from now on reads them there."""
        for group in self._groups(pairs):
            sources, destinations = zip(*group, strict=True)
            for first, begin, end in _runs(sources):
                for host, staging in zip(self.host_kv, self.staging, strict=True):
                    self._copy(staging[first : first + end - begin], host[begin:end])
            rows = upload(destinations, self.device)
            self._wait_for_copies()
            for blocks, staging in zip(self.device_kv, self.staging, strict=True):
                blocks[rows] = staging[: len(rows)]

    def measure(self) -> float:
        """Seconds to copy a block to the host and back. The device's blocks stay as they are."""
        count = min(self.num_staged, len(self.device_kv[0]), len(self.host_kv[0]))
        pairs = [(block, block) for block in range(count)]
        out = seconds_of(lambda: self.swap_out(pairs), self.device)
        return (out + seconds_of(lambda: self.swap_in(pairs), self.device)) / count

    def _groups(self, pairs: Sequence[BlockPair]) -> Iterator[Sequence[BlockPair]]:
        """The pairs in pieces that fit into the staging buffer."""
        for first in range(0, len(pairs), self.num_staged):
            yield pairs[first : first + self.num_staged]

    def _copy(self, destination: Tensor, source: Tensor) -> None:
        """Queue a copy behind all work queued so far."""
        on_stream: Any = nullcontext()
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            on_stream = torch.cuda.stream(self.stream)
        with on_stream:
            destination.copy_(source, non_blocking=True)

    def _wait_for_copies(self) -> None:
        """Make work that is queued from now on wait for all copies queued so far."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds until the work is done on the device. The better of two runs: the first may have one-time costs."""
    seconds = list[float]()
    for _ in range(2):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def staging_bytes(block_bytes: int) -> int:
    """Device memory of a HostCache's staging buffer: room for at least one block."""
    return max(STAGING_BYTES, block_bytes)


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of consecutive numbers, as (index of the first in `blocks`, first number, last number + 1).

    >>> list(_runs([4, 5, 6, 2]))
    [(0, 4, 7), (3, 2, 3)]
    """
    first = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            yield first, blocks[first], blocks[index - 1] + 1
            first = index
