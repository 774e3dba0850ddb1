"""FlexAttention over paged blocks, compared with the oracle."""

import random
from array import array
from collections.abc import Sequence
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from minicb.attention import gather_attention, paged_attention
from minicb.batch import Batch, BatchBuilder
from minicb.params import SamplingParams
from minicb.plan import Chunk
from minicb.request import Request
from minicb.runner import mark_symbolic

NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, GROUP, HEAD_DIM = 64, 4, 2, 2, 16
SCALE = HEAD_DIM**-0.5


@cache
def compiled(window: int | None):
    """paged_attention as the runner compiles it, with symbols for all sizes that vary."""
    # Two windows, decodes alone or a mixed step, with full lists or without, another dtype: more forms than the default 8.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 16)
    function = torch.compile(paged_attention, fullgraph=True, dynamic=False, options={"epilogue_fusion": False})

    def run(q, k, v, batch):
        mark_symbolic(batch, True, q)
        return function(q, k, v, batch, window, SCALE)

    return run


def build(chunks: list[Chunk], window: int | None = None, buckets: Sequence[int] = ()) -> Batch:
    """The chunks' batch, as if the tokens before them had been computed by earlier steps."""
    builder = BatchBuilder(
        num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, tile_size=8, max_num_seqs=8, max_num_batched_tokens=128,
        max_model_len=128, windows=[window], device=torch.device("cpu"), buckets=buckets,
    )  # fmt: skip
    for request, start, *_ in chunks:
        builder.build([Chunk.of(request, 0, start)] if start else [])
    return builder.build(chunks)


def make_chunks(spans: list[tuple[int, int]], seed: int = 0) -> list[Chunk]:
    """A request for each (start, length), with blocks anywhere in the pool except the last and the null block."""
    free = list(range(1, NUM_BLOCKS - 1))
    random.Random(seed).shuffle(free)
    chunks = []
    for index, (start, length) in enumerate(spans):
        request = Request(str(index), [0] * (start + length), SamplingParams())
        request.block_table = array("i", [free.pop() for _ in range(-(-(start + length) // BLOCK_SIZE))])
        chunks.append(Chunk.of(request, start, length))
    return chunks


def fill_cache(chunks: list[Chunk], garbage: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache full of garbage (V is finite) in which each request's own positions have values of their own."""
    shape = (NUM_BLOCKS * BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    k, v = torch.full(shape, garbage), torch.full(shape, 1e30)
    for chunk in chunks:
        generator = torch.Generator().manual_seed(int(chunk.request.request_id))
        for position in range(chunk.start + chunk.length):
            row = chunk.request.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            k[row] = torch.randn(shape[1:], generator=generator)
            v[row] = torch.randn(shape[1:], generator=generator)
    return k, v


def make_queries(batch, chunks: list[Chunk]) -> torch.Tensor:
    """Queries that depend on request and position, not on the place in the batch."""
    q = torch.zeros(len(batch.token_ids), KV_HEADS, GROUP, HEAD_DIM)
    row = 0
    for request, start, length, *_ in batch.chunks:
        for position in range(start, start + length):
            generator = torch.Generator().manual_seed(1000 * int(request.request_id) + position)
            q[row] = torch.randn(q.shape[1:], generator=generator)
            row += 1
    return q


@settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking compiles again and again
@given(
    spans=st.lists(st.tuples(st.integers(0, 15), st.integers(1, 14)), min_size=1, max_size=7),
    window=st.sampled_from([None, 5]),
    seed=st.integers(0, 3),
    buckets=st.sampled_from([(), (8,)]),
)
def test_paged_equals_gather(spans, window, seed, buckets):
    """Any mixture of decodes and chunks, at any block boundary, between blocks of garbage. With buckets the blocks of
    decodes are listed as on CUDA."""
    chunks = make_chunks(spans, seed)
    batch = build(chunks, window, buckets)
    k, v = fill_cache(chunks, garbage=torch.nan)
    q = make_queries(batch, chunks)
    num_tokens = sum(length for _, length in spans)
    paged = compiled(window)(q, k, v, batch)[:num_tokens]
    assert paged.isfinite().all()
    torch.testing.assert_close(
        paged, gather_attention(q, k, v, batch, window, SCALE)[:num_tokens], atol=2e-5, rtol=1e-4
    )


def test_gather_is_attention():
    """The oracle itself, on one request with its blocks in order: plain causal attention."""
    chunks = make_chunks([(0, 8)])
    chunks[0].request.block_table = array("i", [1, 2])
    k, v = fill_cache(chunks, garbage=0.0)
    batch = build(chunks)
    q = make_queries(batch, chunks)
    plain = F.scaled_dot_product_attention(
        q.flatten(1, 2).transpose(0, 1), *(x[4:12].repeat_interleave(GROUP, 1).transpose(0, 1) for x in (k, v)),
        is_causal=True,
    )  # fmt: skip
    torch.testing.assert_close(gather_attention(q, k, v, batch, None, SCALE), plain.transpose(0, 1).flatten(1))


def test_it_does_not_matter_where_blocks_lie():
    """The same requests under two permutations of the pool, and a subset of them."""
    spans = [(6, 1), (9, 1), (3, 7), (0, 13), (15, 1)]
    results = []
    for seed in (1, 2):
        chunks = make_chunks(spans, seed)
        batch = build(chunks)
        k, v = fill_cache(chunks, garbage=1e4)
        results.append(compiled(None)(make_queries(batch, chunks), k, v, batch))
    torch.testing.assert_close(*results, atol=2e-6, rtol=1e-5)
    subset = [chunks[2], chunks[4], chunks[1]]
    batch = build(subset)
    some = compiled(None)(make_queries(batch, subset), k, v, batch)
    # Packed order: decodes 0, 1, 4 and then chunks 2 and 3 before; decodes 4, 1 and then chunk 2 now.
    torch.testing.assert_close(some[:9], results[1][[2, 1, *range(3, 10)]], atol=2e-6, rtol=1e-5)


def test_padding_writes_to_the_null_block_only():
    """Index -1 would be the last block, and another index a request's."""
    chunks = make_chunks([(5, 1)])
    batch = build(chunks)
    assert len(batch.token_ids) == 2, "one row is padding"
    k, v = (torch.full((NUM_BLOCKS * BLOCK_SIZE, KV_HEADS, HEAD_DIM), 7.0) for _ in range(2))
    k[batch.kv_rows] = v[batch.kv_rows] = torch.ones(2, KV_HEADS, HEAD_DIM)  # as a layer does
    own = chunks[0].request.block_table[1] * BLOCK_SIZE + 1
    for cache_tensor in (k, v):
        changed = (cache_tensor != 7).any(-1).any(-1).nonzero().flatten().tolist()
        assert changed == sorted([0, own])


def test_a_future_token_changes_nothing():
    """V and K of later positions may be anything."""
    chunks = make_chunks([(0, 12)])
    k, v = fill_cache(chunks, garbage=0.0)
    batch = build(chunks)
    q = make_queries(batch, chunks)
    before = compiled(None)(q, k, v, batch).clone()
    table = chunks[0].request.block_table
    for position in range(7, 12):
        row = table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        k[row] += 100
        v[row] -= 100
    after = compiled(None)(q, k, v, batch)
    torch.testing.assert_close(after[:7], before[:7])
    assert not torch.allclose(after[7:12], before[7:12])


@pytest.mark.parametrize("cache_dtype", [torch.float32])
def test_the_cache_may_be_wider_than_the_model(cache_dtype):
    """On a CPU, bfloat16 weights go with a float32 cache: queries are cast, the output stays wide."""
    chunks = make_chunks([(2, 1), (0, 6)])
    k, v = fill_cache(chunks, garbage=0.0)
    batch = build(chunks)
    q = make_queries(batch, chunks).bfloat16()
    paged = compiled(None)(q, k, v, batch)
    assert paged.dtype == cache_dtype
    torch.testing.assert_close(paged, gather_attention(q, k, v, batch, None, SCALE), atol=2e-5, rtol=1e-4)
