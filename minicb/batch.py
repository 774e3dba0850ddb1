"""From a step's chunks to the tensors that the model reads.

The tokens of all chunks are packed into one dimension: first the decodes (chunks of length 1), then
the longer chunks, then padding. Linear layers never see where one request ends and the next begins;
only attention does (Orca's selective batching, 2022).
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minicb.plan import Chunk
from minicb.request import Request


class BlockLists(NamedTuple):
    """Which physical blocks the attention kernel has to visit, and how; all int32.

    FlexAttention cuts the matrix of all queries by all cached keys into mask tiles, here of some
    queries of one request by one block. For each row of tiles, `full` lists the blocks of which all
    its queries see every position, and `partial` those where the mask decides position by position.
    All other blocks of the pool are not even looked at. Entries beyond the counts are leftovers.
    """

    num_full: Tensor  # [rows]
    full: Tensor  # [rows, width]
    num_partial: Tensor  # [rows]
    partial: Tensor  # [rows, width]


class Batch(NamedTuple):
    """One step as the model sees it: T tokens, the first of them B decode rows; index tensors are int32.

    A decode is a row of tiles by itself. In a pure decode step T == B and the fields about tiles are
    None. Otherwise the longer chunks are cut into rows of `tile_size` queries, none with queries of
    two requests. Block lists are by window, because some models have layers with a sliding window
    beside others.
    """

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    kv_rows: Tensor  # [T] row of the cache that takes the token's K and V: block * block_size + offset
    logical_blocks: Tensor  # [num_blocks] physical -> logical block
    decode_lists: dict[int | None, BlockLists]  # B rows, one for each decode
    tile_lists: dict[int | None, BlockLists] | None  # the rows of the longer chunks
    tile_tokens: Tensor | None  # [tile rows * tile_size] the token that each of their queries is
    tile_positions: Tensor | None  # [tile rows * tile_size] and its position
    out_rows: Tensor | None  # [T] where its attention output lies: after B decodes, the queries of the tile rows
    sampled: Tensor | None  # [num_sampled] the tokens (of the T) whose logits are wanted; None: the first ones
    num_sampled: int
    unfilled_blocks: Tensor  # [n] blocks that this step begins and doesn't fill with tokens
    chunks: Sequence[Chunk]  # in packed order
    block_size: int
    tile_size: int


class _Buffer:
    """An int32 tensor with a fixed address, written on the host and read on the device."""

    def __init__(self, shape: tuple[int, ...], device: torch.device):
        on_cuda = device.type == "cuda"
        self.host = torch.zeros(shape, dtype=torch.int32, pin_memory=on_cuda)
        self.array = self.host.numpy()  # numpy writes small slices faster than torch
        self.device = torch.zeros_like(self.host, device=device) if on_cuda else self.host

    def upload(self, count: int) -> Tensor:
        if self.device is not self.host:
            self.device[:count].copy_(self.host[:count], non_blocking=True)
        return self.device[:count]

    def write(self, values: Sequence[int], size: int) -> Tensor:
        """The values, then zeros up to `size`: a padded token is token 0, written to the reserved block 0."""
        self.array[: len(values)] = values
        self.array[len(values) : size] = 0
        return self.upload(size)


class _BlockListBuffers:
    def __init__(self, rows: int, width: int, window: int | None, block_size: int, device: torch.device):
        self.window, self.block_size = window, block_size
        self.num_full, self.num_partial = _Buffer((rows,), device), _Buffer((rows,), device)
        self.full, self.partial = _Buffer((rows, width), device), _Buffer((rows, width), device)
        # An array goes into a memoryview by memcpy, several times faster than into a row of numpy's.
        self.full_rows = [memoryview(row) for row in self.full.array]
        self.partial_rows = [memoryview(row) for row in self.partial.array]

    def write_row(self, row: int, table: array, first: int, last: int) -> None:
        """Queries at positions first .. last of one request: which of its blocks do they see?

        Logical blocks begin .. end - 1 hold what any of them sees: all up to their own position.
        Those that all of them see whole are full_begin .. full_end - 1.
        The boundaries, with blocks of 4: a query at position 3 sees all of logical block 0; at position
        4 it sees one token of block 1, so block 1 is partial; at position 7 it sees block 1 whole.
        """
        size = self.block_size
        begin = full_begin = 0
        if self.window is not None:
            begin = max(0, first - self.window + 1) // size
            full_begin = -(-max(0, last - self.window + 1) // size)
        full_end = max(full_begin, (first + 1) // size)
        end = last // size + 1
        self.num_full.array[row] = full_end - full_begin
        self.full_rows[row][: full_end - full_begin] = table[full_begin:full_end]
        partial = table[begin:full_begin] + table[full_end:end]
        self.num_partial.array[row] = len(partial)
        self.partial_rows[row][: len(partial)] = partial

    def finish(self, used: int, rows: int) -> BlockLists:
        """Rows used .. rows - 1 are padding and see nothing."""
        self.num_full.array[used:rows] = 0
        self.num_partial.array[used:rows] = 0
        buffers = (self.num_full, self.full, self.num_partial, self.partial)
        return BlockLists(*(buffer.upload(rows) for buffer in buffers))


class BatchBuilder:
    """Builds batches in buffers that stay where they are, so the last batch built is the valid one.

    Nothing that it does grows with the pool or the queue. Shapes are rounded up to few sizes, each
    at least 2 because torch.compile treats 0 and 1 as constants: `buckets` lists those for decodes
    (CUDA: each has its own kernels and graph); without buckets any number is fine (CPU).
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
        self.windows = windows
        self.block_size, self.tile_size, self.buckets = block_size, tile_size, sorted(buckets)
        max_rows = self._bucket(max_num_seqs)
        max_tokens = max(max_num_batched_tokens, 4) + max_rows
        max_tiles = max_num_seqs + -(-max_num_batched_tokens // tile_size) + 1
        # FlexAttention's CPU kernel wants room for every block of the pool in a row of the lists.
        width = num_blocks
        if device.type == "cuda":
            width = min(num_blocks, -(-max_model_len // block_size))
        self._token_ids, self._positions, self._kv_rows, self._out_rows, self._sampled, self._unfilled = (
            _Buffer((max_tokens,), device) for _ in range(6)
        )
        self._logical_blocks = _Buffer((num_blocks,), device)
        self._blocks_changed = False
        self._tile_tokens, self._tile_positions = (_Buffer((max_tiles * tile_size,), device) for _ in range(2))

        def block_lists(rows: int) -> dict[int | None, _BlockListBuffers]:
            return {window: _BlockListBuffers(rows, width, window, block_size, device) for window in windows}

        self._decodes, self._tiles = block_lists(max_rows), block_lists(max_tiles)

    def _bucket(self, count: int) -> int:
        return next((bucket for bucket in self.buckets if bucket >= count), max(count, 2))

    def note_blocks(self, request: Request, first: int = 0) -> None:
        """Record the logical index of a request's blocks from the first on. `build` does so for the blocks
        that chunks begin; for those that swap_in fills, it is to be called before. (Cached blocks have theirs:
        they are only ever found at the place in a prompt where they were written.)"""
        table = request.block_table
        self._logical_blocks.array[table[first:]] = range(first, len(table))
        self._blocks_changed = True

    def build(self, chunks: Sequence[Chunk]) -> Batch:
        decodes = [chunk for chunk in chunks if chunk.length == 1]
        decodes.sort(key=lambda chunk: not chunk.needs_sampling)  # a chunk of one token may also be a piece of a prompt
        prefills = [chunk for chunk in chunks if chunk.length > 1]
        packed = decodes + prefills
        unfilled_blocks = self._note_new_blocks(packed)
        num_tokens = sum(chunk.length for chunk in packed)
        if prefills:
            num_rows = self.buckets[-1] if self.buckets else self._bucket(len(decodes))
            size = max(num_tokens, num_rows)
        else:
            num_rows = size = self._bucket(len(decodes))
        token_ids, positions, kv_rows = self._pack(decodes, prefills)
        tiles, tile_tokens, out_rows = self._tile(prefills, len(decodes), num_rows)
        tile_positions = [positions[token] for token in tile_tokens]
        tile_rows = len(tiles[self.windows[0]].num_full) * self.tile_size if tiles else 0
        return Batch(
            token_ids=self._token_ids.write(token_ids, size),
            positions=self._positions.write(positions, size),
            kv_rows=self._kv_rows.write(kv_rows, size),
            logical_blocks=self._logical_blocks.device,
            decode_lists=self._decode_lists(decodes, num_rows),
            tile_lists=tiles,
            tile_tokens=self._tile_tokens.write(tile_tokens, tile_rows) if tiles else None,
            tile_positions=self._tile_positions.write(tile_positions, tile_rows) if tiles else None,
            out_rows=self._out_rows.write(out_rows, size) if tiles else None,
            sampled=self._sampled_tokens(packed) if prefills else None,
            num_sampled=sum(chunk.needs_sampling for chunk in packed),
            unfilled_blocks=unfilled_blocks,
            chunks=packed,
            block_size=self.block_size,
            tile_size=self.tile_size,
        )

    def _note_new_blocks(self, chunks: Sequence[Chunk]) -> Tensor:
        """Record the logical index of the blocks that the chunks begin; return those not filled."""
        unfilled = []
        for request, start, length, *_ in chunks:
            first_new = -(-start // self.block_size)  # of the blocks that begin in this chunk
            table = request.block_table
            if first_new < len(table):
                self.note_blocks(request, first_new)
                if (start + length) % self.block_size:
                    unfilled.append(table[-1])
        if self._blocks_changed:
            self._logical_blocks.upload(len(self._logical_blocks.array))
            self._blocks_changed = False
        return self._unfilled.write(unfilled, len(unfilled))

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

    def _decode_lists(self, decodes: Sequence[Chunk], num_rows: int) -> dict[int | None, BlockLists]:
        for buffers in self._decodes.values():
            for row, (request, position, *_) in enumerate(decodes):
                buffers.write_row(row, request.block_table, position, position)
        return {window: buffers.finish(len(decodes), num_rows) for window, buffers in self._decodes.items()}

    def _tile(
        self, prefills: Sequence[Chunk], num_decodes: int, num_rows: int
    ) -> tuple[dict[int | None, BlockLists] | None, list[int], list[int]]:
        """Lay the prefill chunks out in tiles; returns tiles, tile_tokens and out_rows of the batch.

        The last tile of a chunk is filled up by repeating its last token; nobody reads those rows.
        """
        if not prefills:
            return None, [], []
        tile_size, tile_tokens, token = self.tile_size, list[int](), num_decodes
        out_rows = list(range(num_decodes))
        num_tiles = 0
        for request, start, length, *_ in prefills:
            end = start + length
            out_rows += range(num_rows + len(tile_tokens), num_rows + len(tile_tokens) + length)
            for first in range(start, end, tile_size):
                for buffers in self._tiles.values():
                    buffers.write_row(num_tiles, request.block_table, first, min(first + tile_size, end) - 1)
                num_tiles += 1
            tile_tokens += range(token, token + length)
            tile_tokens += [token + length - 1] * (-length % tile_size)
            token += length
        rows = max(num_tiles, 2)
        lists = {window: buffers.finish(num_tiles, rows) for window, buffers in self._tiles.items()}
        return lists, tile_tokens, out_rows

    def _sampled_tokens(self, packed: Sequence[Chunk]) -> Tensor:
        sampled, end = list[int](), 0
        for chunk in packed:
            end += chunk.length
            if chunk.needs_sampling:
                sampled.append(end - 1)
        return self._sampled.write(sampled, len(sampled))
