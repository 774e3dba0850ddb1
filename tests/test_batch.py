"""Batches: packing, padding, and which blocks each query may see."""

from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minicb.batch import BatchBuilder
from minicb.params import SamplingParams
from minicb.plan import Chunk
from minicb.request import Request


def make_builder(**kwargs) -> BatchBuilder:
    defaults = {
        "num_blocks": 64, "block_size": 4, "tile_size": 8, "max_num_seqs": 8, "max_num_batched_tokens": 64,
        "max_model_len": 128, "windows": [None], "device": torch.device("cpu"),
    }  # fmt: skip
    return BatchBuilder(**(defaults | kwargs))


def make_chunk(tokens: list[int], table: list[int], start: int, length: int) -> Chunk:
    request = Request(f"{table}", tokens, SamplingParams())
    request.block_table = array("i", table)
    return Chunk.of(request, start, length)


def test_decodes_come_first_and_padding_is_zero():
    """A decode of position 5 (block 9, offset 1), beside a prompt of 6 in blocks 3 and 7."""
    prompt = make_chunk([10, 11, 12, 13, 14, 15], [3, 7], 0, 6)
    decode = make_chunk([20, 21, 22, 23, 24, 25], [4, 9], 5, 1)
    batch = make_builder().build([prompt, decode])
    assert batch.token_ids.tolist() == [25, 10, 11, 12, 13, 14, 15]
    assert batch.positions.tolist() == [5, 0, 1, 2, 3, 4, 5]
    assert batch.kv_rows.tolist() == [9 * 4 + 1, 12, 13, 14, 15, 28, 29]
    assert batch.sampled.tolist() == [0, 6]
    assert batch.unfilled_blocks.tolist() == [7], "block 9 was begun earlier, block 3 is filled"
    assert batch.logical_blocks[[3, 7]].tolist() == [0, 1]
    # Two decode rows (one is padding), then two tiles of eight (the second is padding).
    assert batch.out_rows.tolist() == [0, 2, 3, 4, 5, 6, 7]
    assert batch.tile_tokens.tolist() == [1, 2, 3, 4, 5, 6, 6, 6] + [0] * 8
    decodes, tiles = batch.decode_lists[None], batch.tile_lists[None]
    assert (decodes.num_full.tolist(), decodes.num_partial.tolist()) == ([1, 0], [1, 0])
    assert (decodes.full[0, 0], decodes.partial[0, 0]) == (4, 9)
    assert (tiles.num_full.tolist(), tiles.num_partial.tolist()) == ([0, 0], [2, 0])


def test_a_piece_of_a_prompt_may_be_one_token_long():
    """Decodes that sample stand first, so that the logits of a pure decode step are rows 0 .. n-1."""
    piece = make_chunk([1, 2, 3], [5], 0, 1)
    decode = make_chunk([7, 8], [6], 1, 1)
    batch = make_builder().build([piece, decode])
    assert batch.tile_lists is None
    assert batch.num_sampled == 1
    assert batch.token_ids.tolist() == [8, 1]


def test_a_small_batch_after_a_large_one_sees_no_leftovers():
    """With buckets as on CUDA: 5 rows are padded to 8, then 2 rows stay 2."""
    builder = make_builder(buckets=[2, 4, 8])
    chunks = [make_chunk([9] * 8, [2 * i + 1, 2 * i + 2], 7, 1) for i in range(8)]
    builder.build(chunks)
    for count, size in ((5, 8), (3, 4), (2, 2), (1, 2)):
        batch = builder.build(chunks[:count])
        padding = slice(count, size)
        assert len(batch.token_ids) == size
        for tensor in (batch.token_ids, batch.kv_rows, *(batch.decode_lists[None][i] for i in (0, 2))):
            assert len(tensor) == size
            assert not tensor[padding].any()


def test_buffers_keep_their_addresses():
    """CUDA graphs replay addresses, not tensors."""
    builder = make_builder(buckets=[2, 4, 8])
    chunks = [make_chunk([9] * 8, [i + 1, i + 9], 7, 1) for i in range(3)]
    first, second = builder.build(chunks[:2]), builder.build(chunks[1:])
    for before, after in ((first.token_ids, second.token_ids), (first.decode_lists[None].full, second.decode_lists[None].full)):
        assert before.data_ptr() == after.data_ptr()


@given(
    block_size=st.integers(1, 9),
    start=st.integers(0, 40),
    length=st.integers(1, 40),
    tile_size=st.integers(1, 16),
    window=st.none() | st.integers(1, 20),
)
def test_block_lists_and_mask_show_each_query_just_what_it_may_see(block_size, start, length, tile_size, window):
    """For all sizes: own position and before, inside the window, nothing else."""
    end = start + length
    num_blocks = -(-end // block_size)
    table = [3 + 7 * i % 101 for i in range(num_blocks)]  # distinct, in no order
    builder = make_builder(
        num_blocks=110, block_size=block_size, tile_size=tile_size, max_num_batched_tokens=64, windows=[window]
    )
    batch = builder.build([make_chunk([0] * end, table, start, length)])
    if batch.tile_lists is None:
        lists, tiles = batch.decode_lists[window], [[start]]
    else:
        lists, tiles = (
            batch.tile_lists[window],
            [range(a, min(a + tile_size, end)) for a in range(start, end, tile_size)],
        )
    logical = {block: index for index, block in enumerate(table)}
    for row, positions in enumerate(tiles):
        full = lists.full[row, : lists.num_full[row]].tolist()
        partial = lists.partial[row, : lists.num_partial[row]].tolist()
        assert len({*full, *partial}) == len(full) + len(partial)
        for query in positions:
            seen = {logical[b] * block_size + o for b in full for o in range(block_size)}
            masked = {logical[b] * block_size + o for b in partial for o in range(block_size)}
            seen |= {p for p in masked if p <= query and (window is None or query - p < window)}
            assert seen == set(range(0 if window is None else max(0, query - window + 1), query + 1))
        visible = {p // block_size for q in positions for p in range(max(0, q - (window or end) + 1), q + 1)}
        assert {logical[b] for b in full + partial} == visible, "blocks that no query sees are not visited"


@pytest.mark.parametrize("num_blocks", [50, 5000])
def test_nothing_but_the_used_part_is_written(num_blocks):
    """A step's work doesn't grow with the pool: beyond the counts, the lists keep what they had."""
    builder = make_builder(num_blocks=num_blocks)
    builder._decodes[None].full.host.fill_(-7)
    batch = builder.build([make_chunk([0] * 9, [1, 2, 3], 8, 1)])
    assert batch.decode_lists[None].full[0].tolist() == [1, 2] + [-7] * (num_blocks - 2)
