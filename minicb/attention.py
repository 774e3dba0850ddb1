"""Attention over a paged KV cache, twice: an obvious version, the oracle, and a fast one by FlexAttention.

A layer's cache is two tensors, K and V, [num_blocks * block_size, kv_heads, head_dim]. It is token-major, so
a block is contiguous. Position p of a request lies in row
block_table[p // block_size] * block_size + p % block_size.

Queries are [T, kv_heads, group, head_dim]. A group is the query heads that share a KV head (GQA, 2023).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from minicb.batch import Batch, BlockLists

# (q, k_cache, v_cache, batch, window, scale) -> [T, kv_heads * group * head_dim] in the cache's dtype. With a window,
# a query sees the last `window` positions, its own included.
Attention = Callable[[Tensor, Tensor, Tensor, Batch, int | None, float], Tensor]


def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, batch: Batch) -> None:
    """Store k and v, [T, kv_heads, head_dim], in the cache rows of the batch.

    V in the cache is always finite: attention multiplies a masked V by 0, and 0 * NaN is NaN. Where v is not finite
    it becomes 0, and k NaN. So NaN reaches the queries that see its token, and no others.
    """
    finite = v.isfinite()
    k_cache[batch.kv_rows] = k.where(finite, torch.nan).to(k_cache.dtype)
    v_cache[batch.kv_rows] = v.where(finite, 0).to(v_cache.dtype)


def gather_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, window: int | None, scale: float
) -> Tensor:
    """The oracle: for each chunk, gather the request's K and V and attend. It runs with enforce_eager=True.

    It says who sees what on its own, so that a mistake in `paged_attention` shows when the two are compared.
    """
    q = q.flatten(1, 2).to(k_cache.dtype)
    out = torch.zeros_like(q)
    first = 0
    for request, start, length, *_ in batch.chunks:
        end = start + length
        table = torch.tensor(request.block_table, device=q.device)
        position = torch.arange(end, device=q.device)
        rows = table[position // batch.block_size] * batch.block_size + position % batch.block_size
        distance = position[start:, None] - position  # [length, end] how far back a position lies from a query
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        queries = q[first : first + length].transpose(0, 1)[None]
        keys, values = k_cache[rows].transpose(0, 1)[None], v_cache[rows].transpose(0, 1)[None]
        # SDPA adds -inf to a masked score, and NaN + -inf is NaN. So NaN moves from the keys into the mask.
        mask = (0 * keys).sum((0, 1, 3)).where(visible, -torch.inf)
        keys = keys.nan_to_num(0, 0, 0)
        attended = F.scaled_dot_product_attention(queries, keys, values, mask, scale=scale, enable_gqa=True)
        out[first : first + length] = attended[0].transpose(0, 1)
        first += length
    return out.flatten(1)


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, window: int | None, scale: float
) -> Tensor:
    """FlexAttention (2024) on the cache in place. It must be compiled: uncompiled FlexAttention ignores the block
    lists and looks at the mask alone, so it would see every request's blocks.

    Decodes are a batch of B rows, with the heads of a group folded into the query dimension, so the block lists
    of a row are its request's block table. Longer chunks are one row of queries, cut into query tiles.
    """
    _, kv_heads, group, head_dim = q.shape
    q = q.to(k_cache.dtype)  # on a CPU the cache is float32 beside bfloat16 weights
    positions, tile_positions = batch.positions, batch.tile_positions
    lists = BlockLists(*[t if t is None else t[:, None, None] for t in batch.decode_lists[window]])  # type: ignore[arg-type]
    num_rows = lists.num_partial.shape[0]
    decode_q = q if batch.tile_lists is None else q[:num_rows]
    tile_size = 128  # any multiple of the kernel's own tile: a row has only `group` queries
    decode_out = _flex(
        decode_q, k_cache, v_cache, lists, batch, window, scale, tile_size, lambda row, query: positions[row]
    ).reshape(num_rows, kv_heads * group * head_dim)
    if batch.tile_lists is None:
        return decode_out

    assert batch.tile_tokens is not None and tile_positions is not None and batch.out_rows is not None
    num_queries = batch.tile_tokens.shape[0]
    tile_q = q.new_empty(1, kv_heads * group, num_queries, head_dim)
    tile_q.copy_(q.flatten(1, 2)[batch.tile_tokens].transpose(0, 1)[None])
    lists = BlockLists(*[tensor[None, None] for tensor in batch.tile_lists[window] if tensor is not None])
    tile_out = _flex(
        tile_q, k_cache, v_cache, lists, batch, window, scale, batch.tile_size, lambda row, query: tile_positions[query]
    )
    tile_out = tile_out[0].transpose(0, 1).reshape(num_queries, kv_heads * group * head_dim)
    return torch.cat([decode_out, tile_out])[batch.out_rows]


def _flex(
    q: Tensor,  # [rows, heads, queries, head_dim]
    k_cache: Tensor,
    v_cache: Tensor,
    lists: BlockLists,  # counts [rows, 1, tiles], lists [rows, 1, tiles, width]
    batch: Batch,
    window: int | None,
    scale: float,
    tile_size: int,
    query_position,  # (row, query) -> its position in the request
) -> Tensor:
    block_size, logical_blocks = batch.block_size, batch.logical_blocks

    def mask_mod(row, head, query, cache_row):
        """Causal and inside the window; asked in partial blocks only. The lists settle whose block it is.

        A block that requests share has the same logical index in all of them, so one vector over the pool
        serves every request.
        """
        position = logical_blocks[cache_row // block_size] * block_size + cache_row % block_size
        distance = query_position(row, query) - position
        visible = distance >= 0
        if window is not None:
            visible = visible & (distance < window)
        return visible

    block_mask = BlockMask.from_kv_blocks(
        *lists,
        BLOCK_SIZE=(tile_size, block_size),
        mask_mod=mask_mod,
        seq_lengths=(q.shape[2], k_cache.shape[0]),
        compute_q_blocks=False,
    )
    keys, values = k_cache.transpose(0, 1)[None], v_cache.transpose(0, 1)[None]
    options: Any = {"BLOCK_N": min(block_size, 64)} if q.device.type == "cuda" and block_size < 128 else None
    gqa = q.shape[1] != k_cache.shape[1]
    out = flex_attention(q, keys, values, None, block_mask, scale, enable_gqa=gqa, kernel_options=options)
    assert isinstance(out, Tensor)
    return out
