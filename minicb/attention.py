"""Attention over a paged KV cache, twice: an obvious version, and a fast one by FlexAttention.

The cache of a layer is two tensors, K and V, of shape [num_blocks * block_size, kv_heads, head_dim].
Token-major, so that a block is one contiguous stretch. Position p of a request lies in row
block_table[p // block_size] * block_size + p % block_size.

Queries come as [T, kv_heads, group, head_dim]: the query heads that share a KV head stand together.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from minicb.batch import Batch, BlockLists


class Attention(Protocol):
    """q [T, kv_heads, group, head_dim], k_cache and v_cache [rows, kv_heads, head_dim]
    -> [T, kv_heads * group * head_dim]. With a window, a query sees the last `window` positions."""

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, window: int | None, scale: float
    ) -> Tensor: ...


def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, batch: Batch) -> None:
    """Store k and v, [T, kv_heads, head_dim], in the cache rows that the batch names.

    Where v is not finite, it becomes 0, and k NaN. FlexAttention replaces a masked score, whatever k is, but it
    multiplies a masked v by 0, and 0 * NaN is NaN. So NaN reaches the queries that see its token. It doesn't reach
    earlier tokens of the chunk, which other requests may share.
    """
    finite = v.isfinite()
    k_cache[batch.kv_rows] = k.where(finite, torch.nan).to(k_cache.dtype)
    v_cache[batch.kv_rows] = v.where(finite, 0).to(v_cache.dtype)


def gather_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, window: int | None, scale: float
) -> Tensor:
    """The obvious version: for each chunk, gather the request's K and V and attend.

    It is the oracle that the fast version is tested against, and what runs with enforce_eager=True.
    """
    num_tokens = q.shape[0]
    q = q.flatten(1, 2).to(k_cache.dtype)
    out = torch.zeros_like(q)
    first = 0
    for request, start, length, *_ in batch.chunks:
        end = start + length
        table = torch.tensor(request.block_table, device=q.device)
        position = torch.arange(end, device=q.device)
        rows = table[position // batch.block_size] * batch.block_size + position % batch.block_size
        distance = position[start:, None] - position  # how far back each position lies from each query
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        keys, mask = k_cache[rows], visible
        if length > 1:  # SDPA adds -inf to a masked score, and NaN + -inf is NaN: put the NaN into the mask instead
            mask = (0 * keys).sum((1, 2)).where(visible, -torch.inf)
            keys = keys.nan_to_num(0, 0, 0)
        out[first : first + length] = F.scaled_dot_product_attention(
            q[first : first + length].transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            v_cache[rows].transpose(0, 1)[None],
            attn_mask=mask,
            scale=scale,
            enable_gqa=True,
        )[0].transpose(0, 1)
        first += length
    return out.reshape(num_tokens, -1)


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, window: int | None, scale: float
) -> Tensor:
    """FlexAttention (2024) over the cache where it lies. To be compiled: uncompiled FlexAttention
    looks at the mask alone and not at the block lists, and would see every request's blocks.

    Decodes are a batch of B queries, with the heads of a group folded into the query dimension: the
    block lists of row b are then simply request b's block table. Longer chunks are one long query,
    cut in tiles, and each tile has block lists of its own.
    """
    _, kv_heads, group, head_dim = q.shape
    q = q.to(k_cache.dtype)  # on a CPU the cache is float32 beside bfloat16 weights
    decodes = batch.decode_lists[window]
    num_rows = decodes.num_full.shape[0]
    positions = batch.positions
    decode_out = _flex(
        q if batch.tile_lists is None else q[:num_rows],
        k_cache,
        v_cache,
        BlockLists(
            decodes.num_full[:, None, None],
            decodes.full[:, None, None],
            decodes.num_partial[:, None, None],
            decodes.partial[:, None, None],
        ),
        batch,
        window,
        scale,
        tile_size=128,  # any multiple of the kernel's own tile; there are only `group` queries
        query_position=lambda row, _: positions[row],
    ).reshape(num_rows, kv_heads * group * head_dim)
    if batch.tile_lists is None:
        return decode_out
    tile_positions, out_rows = batch.tile_positions, batch.out_rows
    assert batch.tile_tokens is not None and tile_positions is not None and out_rows is not None

    num_queries = batch.tile_tokens.shape[0]
    tiles = batch.tile_lists[window]
    tile_queries = q.new_empty(1, kv_heads * group, num_queries, head_dim)
    tile_queries.copy_(q.flatten(1, 2)[batch.tile_tokens].transpose(0, 1)[None])
    tile_out = _flex(
        tile_queries,
        k_cache,
        v_cache,
        BlockLists(
            tiles.num_full[None, None], tiles.full[None, None], tiles.num_partial[None, None], tiles.partial[None, None]
        ),
        batch,
        window,
        scale,
        tile_size=batch.tile_size,
        query_position=lambda _, row: tile_positions[row],
    )
    tile_out = tile_out[0].transpose(0, 1).reshape(num_queries, kv_heads * group * head_dim)
    return torch.cat([decode_out, tile_out])[out_rows]


def _flex(
    q: Tensor,  # [rows, heads, queries, head_dim]
    k_cache: Tensor,
    v_cache: Tensor,
    lists: BlockLists,  # counts [rows, 1, tiles], lists [rows, 1, tiles, width]
    batch: Batch,
    window: int | None,
    scale: float,
    tile_size: int,
    query_position,
) -> Tensor:
    block_size, logical_blocks = batch.block_size, batch.logical_blocks

    def mask_mod(row, head, query, cache_row):
        """In a partial block: causal, and inside the window. Ownership is settled by the lists.

        A block that requests share sits at the same logical index in all of them, so one vector
        over the pool tells every request where a block belongs.
        """
        position = logical_blocks[cache_row // block_size] * block_size + cache_row % block_size
        distance = query_position(row, query) - position
        visible = distance >= 0
        if window is not None:
            visible = visible & (distance < window)
        return visible

    block_mask = BlockMask.from_kv_blocks(
        lists.num_partial,
        lists.partial,
        lists.num_full,
        lists.full,
        BLOCK_SIZE=(tile_size, block_size),
        mask_mod=mask_mod,
        seq_lengths=(q.shape[2], k_cache.shape[0]),
        compute_q_blocks=False,
    )
    out = flex_attention(
        q,
        k_cache.transpose(0, 1)[None],
        v_cache.transpose(0, 1)[None],
        block_mask=block_mask,
        scale=scale,
        enable_gqa=q.shape[1] != k_cache.shape[1],
    )
    assert isinstance(out, Tensor)
    return out
