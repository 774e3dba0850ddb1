"""From a step's chunks to the tensors that the model reads.

The tokens of all chunks are packed into one dimension: first the decodes, then the longer chunks, then
padding. Linear layers don't see where one request ends and the next begins. Only attention does (Orca's
selective batching, 2022). Here every chunk of one token is a decode, also the last token of a prompt.
"""

from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minicb.blocks import NULL_BLOCK
from minicb.plan import Chunk
from minicb.request import Request


class BlockLists(NamedTuple):
    """The blocks that the attention kernel visits for each query tile; int32, in BlockMask.from_kv_blocks' order.

    A query tile is some queries of one request. FlexAttention cuts the matrix of all queries by all cached
    keys into mask tiles, here of a query tile by a block. In `partial` blocks the mask decides position by
    position. In `full` blocks every query sees every position, so they skip the mask. No other block is visited.
    Entries beyond the counts are leftovers of earlier steps. On CUDA all blocks of a decode are partial: the kernel
    divides only these among programs (split-KV; FlashDecoding, 2023).
    """

    num_partial: Tensor  # [tiles]
    partial: Tensor  # [tiles, width]
    num_full: Tensor | None  # [tiles]
    full: Tensor | None  # [tiles, width]


class Batch(NamedTuple):
    """One step as the model sees it: T tokens, the first of them B decode rows; index tensors are int32.

    In a step of decodes alone T == B, and the fields from tile_lists on are None. Otherwise the longer chunks
    are cut into query tiles of `tile_size`. A decode is a query tile by itself. Block lists are by window,
    because some models mix layers with and without a sliding window.
    """

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    kv_rows: Tensor  # [T] the cache row for the token's K and V: block * block_size + offset (vLLM: slot_mapping)
    logical_blocks: Tensor  # [num_blocks] physical -> logical block
    decode_lists: dict[int | None, BlockLists]  # of B tiles
    num_sampled: int
    chunks: Sequence[Chunk]  # in packed order
    block_size: int
    tile_size: int
    tile_lists: dict[int | None, BlockLists] | None = None
    tile_tokens: Tensor | None = None  # [tiles * tile_size] each query's token, of the T
    tile_positions: Tensor | None = None  # [tiles * tile_size] each query's position
    out_rows: Tensor | None = None  # [T] each token's attention output, in B decodes and then the queries of the tiles
    logits_rows: Tensor | None = None  # [num_sampled] the tokens, of the T, whose logits are wanted; None: the first


class _Buffer:
    """An int32 tensor at a fixed address, written on the host and read on the device. On a CPU they are one."""

    def __init__(self, shape: tuple[int, ...], device: torch.device):
        self.on_cuda = device.type == "cuda"
        self.host = torch.zeros(shape, dtype=torch.int32, pin_memory=self.on_cuda)
        self.array = self.host.numpy()  # numpy writes small slices faster than torch
        self.device = torch.zeros_like(self.host, device=device) if self.on_cuda else self.host

    def upload(self, count: int) -> Tensor:
        """The first `count` numbers on the device. They may be written again when the device has run the step."""
        if self.device is not self.host:
            self.device[:count].copy_(self.host[:count], non_blocking=True)
        return self.device[:count]

    def write(self, values: list[int], size: int, padding: int = 0) -> Tensor:
        """The values, then padding up to `size`."""
        self.array[:size] = values + [padding] * (size - len(values))
        return self.upload(size)

    def scatter(self, values: dict[int, int]) -> None:
        """Write each value at its index. Only these are uploaded."""
        places, numbers = list(values), list(values.values())
        self.array[places] = numbers
        if self.device is not self.host:  # torch keeps this pinned memory until the device has read it
            pair = torch.tensor([places, numbers], dtype=torch.int32, pin_memory=self.on_cuda)
            pair = pair.to(self.device.device, non_blocking=True)
            self.device[pair[0]] = pair[1]


class _ListBuffer:
    """Lists of blocks, [rows, width] at a fixed address. Only as wide as the longest list of a step is uploaded."""

    def __init__(self, rows: int, width: int, device: torch.device):
        self.counts, self.flat = _Buffer((rows,), device), _Buffer((rows * width,), device)
        self.shared = self.flat.device is self.flat.host
        self.lists = self.flat.device.view(rows, width)
        if not self.shared:  # flat holds rows of the width that a step needs, which the device copies here
            self.lists = torch.zeros_like(self.lists)
        # An array goes into a memoryview by memcpy, several times faster than into a slice of numpy's.
        self.view = memoryview(self.flat.array)  # type: ignore[arg-type]

    def write(self, lists: Sequence[array], size: int) -> tuple[Tensor, Tensor]:
        """Counts [size] and lists [size, width]; those beyond len(lists) are empty."""
        lengths = [len(blocks) for blocks in lists]
        width = self.lists.shape[1] if self.shared else max(lengths, default=0)
        for row, blocks in enumerate(lists):
            self.view[row * width : row * width + lengths[row]] = blocks
        if not self.shared:
            self.lists[: len(lists), :width] = self.flat.upload(len(lists) * width).view(len(lists), width)
        return self.counts.write(lengths, size), self.lists[:size]


_ListBuffers = Mapping[int | None, tuple[_ListBuffer | None, _ListBuffer]]  # by window: full, if any, and partial
QueryTile = tuple[array, int, int]  # block table of a request, position of the first and the last query


def visible_blocks(tile: QueryTile, window: int | None, block_size: int) -> tuple[array, array]:
    """The full and the partial blocks of a query tile.

    The boundaries, with blocks of 4: a query at position 3 sees all of logical block 0. At position 4 it
    also sees one token of block 1, so block 1 is partial. At position 7 it sees all of block 1.
    """
    table, first, last = tile
    full_end, end = (first + 1) // block_size, last // block_size + 1
    if window is None:
        return table[:full_end], table[full_end:end]
    begin = max(0, first - window + 1) // block_size
    full_begin = -(-max(0, last - window + 1) // block_size)
    full_end = max(full_begin, full_end)
    return table[full_begin:full_end], table[begin:full_begin] + table[full_end:end]


class BatchBuilder:
    """Builds batches in buffers that stay where they are, so only the last batch built is valid.

    Its work and its uploads grow with the chunks of a step and with the blocks that they see, not with the
    pool, the queue or max_model_len. Shapes are rounded up to few sizes, each at least 2 because
    torch.compile treats 0 and 1 as constants. `buckets` lists the numbers of decode rows: on CUDA each has
    its own kernels and graph. With buckets decodes have no full lists; without, any number is fine (CPU).
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        tile_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        windows: Sequence[int | None],
        device: torch.device,
        buckets: Sequence[int] = (),
    ):
        self.block_size, self.tile_size, self.buckets = block_size, tile_size, sorted(buckets)
        max_rows = self._bucket(max_num_seqs)
        max_tokens = max(max_num_batched_tokens, 4) + max_rows  # 4: the prefills of the warm-up
        max_tiles = max_num_seqs + -(-max_num_batched_tokens // tile_size)
        # FlexAttention's CPU kernel wants room for every block of the pool in a list.
        width = min(num_blocks, -(-max_model_len // block_size)) if device.type == "cuda" else num_blocks
        self._token_ids, self._positions, self._kv_rows, self._out_rows, self._logits_rows = (
            _Buffer((max_tokens,), device) for _ in range(5)
        )
        self._tile_tokens, self._tile_positions = (_Buffer((max_tiles * tile_size,), device) for _ in range(2))
        self._logical_blocks = _Buffer((num_blocks,), device)
        self._new_blocks = dict[int, int]()  # physical -> logical, not yet in _logical_blocks

        def make(rows: int) -> _ListBuffer:
            return _ListBuffer(rows, width, device)

        self._decode_buffers = {w: (None if self.buckets else make(max_rows), make(max_rows)) for w in windows}
        self._tile_buffers = {w: (make(max_tiles), make(max_tiles)) for w in windows}

    def _bucket(self, count: int) -> int:
        return next((bucket for bucket in self.buckets if bucket >= count), max(count, 2))

    def note_blocks(self, request: Request, first: int = 0) -> None:
        """Record the logical index of a request's blocks from the first on.

        `build` does so for the blocks that chunks begin. Call this before `build` for blocks that swap_in
        fills. Blocks from the prefix cache have their index: it is the same in every request that shares them.
        """
        table = request.block_table
        self._new_blocks.update(zip(table[first:], range(first, len(table)), strict=True))

    def build(self, chunks: Sequence[Chunk]) -> Batch:
        # First the decodes that need sampling: without prefills, the first rows are those whose logits are wanted.
        decodes = sorted((c for c in chunks if c.length == 1), key=lambda chunk: not chunk.needs_sampling)
        prefills = [chunk for chunk in chunks if chunk.length > 1]
        packed = decodes + prefills
        num_rows = self.buckets[-1] if prefills and self.buckets else self._bucket(len(decodes))
        size = max(num_rows, sum(chunk.length for chunk in packed))
        self._begin_blocks(packed)
        token_ids, positions, kv_rows = self._pack(decodes, prefills)
        tiles = [(chunk.request.block_table, chunk.start, chunk.start) for chunk in decodes]
        return Batch(
            token_ids=self._token_ids.write(token_ids, size),
            positions=self._positions.write(positions, size),
            kv_rows=self._kv_rows.write(kv_rows, size, padding=NULL_BLOCK * self.block_size),
            logical_blocks=self._logical_blocks.device,
            decode_lists=self._write_lists(self._decode_buffers, tiles, num_rows),
            num_sampled=sum(chunk.needs_sampling for chunk in packed),
            chunks=packed,
            block_size=self.block_size,
            tile_size=self.tile_size,
            **(self._tile(packed, len(decodes), num_rows, positions, size) if prefills else {}),
        )

    def _begin_blocks(self, chunks: Sequence[Chunk]) -> None:
        """Record the logical index of the blocks that the chunks begin."""
        for request, start, *_ in chunks:
            first = -(-start // self.block_size)  # of the blocks that begin in this chunk
            if first < len(request.block_table):
                self.note_blocks(request, first)
        if self._new_blocks:
            self._logical_blocks.scatter(self._new_blocks)
            self._new_blocks.clear()

    def _pack(self, decodes: Sequence[Chunk], prefills: Sequence[Chunk]) -> tuple[list[int], list[int], list[int]]:
        """Token ids, positions and cache rows of all tokens, in packed order."""
        size = self.block_size
        positions = [chunk.start for chunk in decodes]
        token_ids = [chunk.request.token_ids[chunk.start] for chunk in decodes]
        kv_rows = [chunk.request.block_table[chunk.start // size] * size + chunk.start % size for chunk in decodes]
        for request, start, length, *_ in prefills:
            token_ids += request.token_ids[start : start + length]
            positions += range(start, start + length)
            table = request.block_table
            kv_rows += [table[position // size] * size + position % size for position in range(start, start + length)]
        return token_ids, positions, kv_rows

    def _tile(
        self, packed: Sequence[Chunk], num_decodes: int, num_rows: int, positions: Sequence[int], size: int
    ) -> dict[str, Any]:
        """The fields of the batch about query tiles, from tile_lists on.

        A chunk's last tile is filled up by repeating the last token. Nothing reads those queries.
        """
        tile_size, tiles, tile_tokens = self.tile_size, list[QueryTile](), list[int]()
        out_rows, token = list(range(num_decodes)), num_decodes
        for request, start, length, *_ in packed[num_decodes:]:
            end = start + length
            for first in range(start, end, tile_size):
                tiles.append((request.block_table, first, min(first + tile_size, end) - 1))
            out_rows += range(num_rows + len(tile_tokens), num_rows + len(tile_tokens) + length)
            tile_tokens += range(token, token + length)
            tile_tokens += [token + length - 1] * (-length % tile_size)
            token += length
        ends = accumulate(chunk.length for chunk in packed)
        logits_rows = [end - 1 for chunk, end in zip(packed, ends, strict=True) if chunk.needs_sampling]
        num_tiles = max(len(tiles), 2)
        return {
            "tile_lists": self._write_lists(self._tile_buffers, tiles, num_tiles),
            "tile_tokens": self._tile_tokens.write(tile_tokens, num_tiles * tile_size),
            "tile_positions": self._tile_positions.write([positions[t] for t in tile_tokens], num_tiles * tile_size),
            "out_rows": self._out_rows.write(out_rows, size),
            "logits_rows": self._logits_rows.write(logits_rows, len(logits_rows)),
        }

    def _write_lists(
        self, buffers: _ListBuffers, tiles: Sequence[QueryTile], num_tiles: int
    ) -> dict[int | None, BlockLists]:
        """The block lists of the tiles, then of padding up to num_tiles, which sees nothing."""
        lists = {}
        for window, (full, partial) in buffers.items():
            visible = [visible_blocks(tile, window, self.block_size) for tile in tiles]
            fulls, partials = [blocks for blocks, _ in visible], [blocks for _, blocks in visible]
            full_lists = full.write(fulls, num_tiles) if full else (None, None)
            partial_lists = partial.write(partials if full else list(map(add, fulls, partials)), num_tiles)
            lists[window] = BlockLists(*partial_lists, *full_lists)
        return lists
