"""Batches: packing, padding, and which blocks each query may see."""

import random
from array import array
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

import minicb.batch
from minicb.batch import Batch, BatchBuilder, BlockLists
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
    assert batch.logits_rows.tolist() == [0, 6]
    assert batch.logical_blocks[[3, 7]].tolist() == [0, 1]
    # Two decode rows (one is padding), then two tiles of eight (the second is padding).
    assert batch.out_rows.tolist() == [0, 2, 3, 4, 5, 6, 7]
    assert batch.tile_tokens.tolist() == [1, 2, 3, 4, 5, 6, 6, 6] + [0] * 8
    decodes, tiles = batch.decode_lists[None], batch.tile_lists[None]
    assert (decodes.num_full.tolist(), decodes.num_partial.tolist()) == ([1, 0], [1, 0])
    assert (decodes.full[0, 0], decodes.partial[0, 0]) == (4, 9)
    assert (tiles.num_full.tolist(), tiles.num_partial.tolist()) == ([0, 0], [2, 0])


def test_a_piece_of_a_prompt_may_be_one_token_long():
    """Decodes that need sampling come first, so the logits of a step of decodes are rows 0 .. n-1."""
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
        for tensor in (batch.token_ids, batch.kv_rows, batch.decode_lists[None].num_partial):
            assert len(tensor) == size
            assert not tensor[padding].any()


def test_buffers_keep_their_addresses():
    """CUDA graphs replay addresses, not tensors."""
    builder = make_builder(buckets=[2, 4, 8])
    chunks = [make_chunk([9] * 8, [i + 1, i + 9], 7, 1) for i in range(3)]
    first, second = builder.build(chunks[:2]), builder.build(chunks[1:])
    for before, after in (
        (first.token_ids, second.token_ids),
        (first.decode_lists[None].partial, second.decode_lists[None].partial),
    ):
        assert before.data_ptr() == after.data_ptr()


@example(block_size=1, start=0, length=10, tile_size=16, window=5)  # the first query has all blocks in its window
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


@pytest.mark.parametrize("start", range(10))
@pytest.mark.parametrize("length", range(1, 10))
def test_blocks_that_begin_in_a_step_get_their_index(start, length):
    """Blocks of 4: tokens 3 .. 5 begin block 1."""
    end = start + length
    table = [11, 7, 9, 5, 3][: -(-end // 4)]
    batch = make_builder().build([make_chunk([0] * end, table, start, length)])
    begun = [index for index in range(len(table)) if start <= 4 * index < end]
    assert batch.logical_blocks[[table[index] for index in begun]].tolist() == begun


def test_all_blocks_of_a_returned_request_get_their_index():
    """Its first block was another request's second, and its second block another's first."""
    builder = make_builder()
    builder.build([make_chunk([0] * 8, [5, 6], 0, 8)])
    returned = make_chunk([0] * 8, [6, 5], 7, 1)
    builder.note_blocks(returned.request)
    assert builder.build([returned]).logical_blocks[[6, 5]].tolist() == [0, 1]


@pytest.mark.parametrize("max_num_batched_tokens", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 4])
def test_the_largest_batches_fit(max_num_seqs, max_num_batched_tokens):
    """The warm-up's too: it has two chunks of 2 beside the decodes, even where a step has fewer tokens.
    A step of many short chunks has the most tiles."""
    options = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens, "tile_size": 2}
    builder = make_builder(**options)
    count = min(max_num_seqs, max_num_batched_tokens)
    decodes = [make_chunk([1], [1], 0, 1) for _ in range(count)]
    batch = builder.build([*decodes, *(make_chunk([1] * 2, [1], 0, 2) for _ in range(2))])
    assert batch.positions.tolist() == [0] * count + [0, 1] * 2
    lengths = [max_num_batched_tokens // count] * count
    lengths[0] += max_num_batched_tokens % count
    batch = builder.build([make_chunk([1] * length, [1, 2, 3], 0, length) for length in lengths])
    assert sorted(batch.positions.tolist()[:max_num_batched_tokens]) == sorted(p for n in lengths for p in range(n))


@pytest.mark.parametrize("window", [None, 6])
def test_with_buckets_all_blocks_of_a_decode_are_partial(window):
    """Tiles keep their full lists."""
    chunks = [
        make_chunk([0] * 23, [*range(1, 7)], 22, 1),
        make_chunk([0] * 3, [7], 2, 1),
        make_chunk([0] * 40, [*range(8, 18)], 3, 30),
    ]
    plain = make_builder(windows=[window]).build(chunks)
    bucketed = make_builder(windows=[window], buckets=[2, 4]).build(chunks)
    assert bucketed.decode_lists[window].num_full is bucketed.decode_lists[window].full is None
    for row in range(2):
        expected = [
            *blocks_of(plain.decode_lists[window], row, "full"),
            *blocks_of(plain.decode_lists[window], row, "partial"),
        ]
        assert blocks_of(bucketed.decode_lists[window], row, "partial") == expected
    assert bucketed.decode_lists[window].num_partial[2:].tolist() == [0, 0], "padding sees nothing"
    assert_equal_lists(bucketed.tile_lists[window], plain.tile_lists[window])


def blocks_of(lists: BlockLists, row: int, kind: str) -> list[int]:
    return getattr(lists, kind)[row, : getattr(lists, f"num_{kind}")[row]].tolist()


@pytest.mark.parametrize("num_blocks", [50, 5000])
def test_nothing_but_the_used_part_is_written(num_blocks):
    """A step's work doesn't grow with the pool: beyond the counts, the lists keep what they had."""
    builder = make_builder(num_blocks=num_blocks)
    builder._decode_buffers[None][0].lists.fill_(-7)
    batch = builder.build([make_chunk([0] * 9, [1, 2, 3], 8, 1)])
    assert batch.decode_lists[None].full[0].tolist() == [1, 2] + [-7] * (num_blocks - 2)


# ------------------------------------------------------------------ uploads, without CUDA


class Device(minicb.batch._Buffer):
    """A buffer with a device tensor of its own, as on CUDA, full of nonsense."""

    def __init__(self, shape, device):
        super().__init__(shape, device)
        self.device = torch.full_like(self.host, -(10**9))


class Uploads(TorchFunctionMode):
    """Counts the elements that go to the device. Every upload is non_blocking, or it would wait for the device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if (kwargs or {}).get("non_blocking"):
            source = args[1] if func is torch.Tensor.copy_ else args[0]
            assert source.is_contiguous(), "a strided copy to CUDA waits for the device"
            self.count += source.numel()
        return func(*args, **(kwargs or {}))


def device_builder(monkeypatch, **kwargs) -> BatchBuilder:
    with monkeypatch.context() as patch:
        patch.setattr(minicb.batch, "_Buffer", Device)
        return make_builder(**kwargs)


def num_uploaded(builder: BatchBuilder, chunks: Sequence[Chunk]) -> int:
    with Uploads() as uploads:
        builder.build(chunks)
    return uploads.count


@pytest.mark.parametrize("windows", [[None], [None, 6]])
def test_an_upload_does_not_grow_with_the_pool(monkeypatch, windows):
    """Nor with max_model_len, which also bounds the length of a block list. The step has chunks of all kinds, and
    they begin blocks."""
    chunks = [
        make_chunk([0] * 5, [1, 2], 4, 1),
        make_chunk([0] * 40, [*range(3, 13)], 3, 30),
        make_chunk([0] * 3, [20], 0, 1),
    ]
    counts = set()
    for num_blocks in (50, 500, 50_000):
        builder = device_builder(monkeypatch, num_blocks=num_blocks, max_model_len=4 * num_blocks, windows=windows)
        counts.add((num_uploaded(builder, chunks), num_uploaded(builder, chunks[:1])))
    [(mixed, decode)] = counts
    assert mixed < 500
    # 2 rows: token, position, kv_row and 2 counts for each window. Block 2 with its index.
    # For each window a full and a partial block.
    assert decode == 2 * 3 + 2 * 2 * len(windows) + 2 + 2 * len(windows)


def test_the_longest_list_of_a_step_sets_the_width_of_its_upload(monkeypatch):
    """11 full blocks beside 1: rows of 11 are uploaded, in the next step rows of 1."""
    builder = device_builder(monkeypatch, num_blocks=5000)
    long, short = make_chunk([0] * 47, [*range(1, 13)], 46, 1), make_chunk([0] * 6, [20, 21], 5, 1)
    builder.build([long, short])
    one, two = num_uploaded(builder, [short, short]), num_uploaded(builder, [long, short])
    assert two - one == 2 * (11 - 1)


def assert_equal_batches(batch: Batch, expected: Batch) -> None:
    """All fields. Leftovers in block lists and unused entries of logical_blocks may differ."""
    for name, value, wanted in zip(Batch._fields, batch, expected, strict=True):
        if isinstance(wanted, dict):
            for window in wanted:
                assert_equal_lists(value[window], wanted[window])
        elif isinstance(wanted, torch.Tensor) and name != "logical_blocks":
            assert value.tolist() == wanted.tolist(), name
        elif name != "logical_blocks":
            assert value == wanted, name
    for chunk in batch.chunks:
        table = chunk.request.block_table[: -(-(chunk.start + chunk.length) // batch.block_size)]
        assert batch.logical_blocks[list(table)].tolist() == [*range(len(table))]


def assert_equal_lists(lists: BlockLists, expected: BlockLists) -> None:
    for counts, blocks, expected_counts, expected_blocks in (
        (lists.num_full, lists.full, expected.num_full, expected.full),
        (lists.num_partial, lists.partial, expected.num_partial, expected.partial),
    ):
        if expected_counts is None:
            assert counts is blocks is None
            continue
        assert counts.tolist() == expected_counts.tolist()
        assert blocks.shape == expected_blocks.shape
        for row, count in enumerate(counts.tolist()):
            assert blocks[row, :count].tolist() == expected_blocks[row, :count].tolist()


def assert_layout(batch: Batch) -> None:
    """Each token, in packed order, has its attention output at the row of a decode or of its own query."""
    tokens = [(request, p) for request, start, length, *_ in batch.chunks for p in range(start, start + length)]
    assert batch.positions.tolist()[: len(tokens)] == [position for _, position in tokens]
    assert batch.token_ids.tolist()[: len(tokens)] == [request.token_ids[position] for request, position in tokens]
    if batch.tile_lists is None:
        return
    num_rows = len(batch.decode_lists[None].num_partial)
    for token, row in enumerate(batch.out_rows.tolist()[: len(tokens)]):
        assert (
            row == token if tokens[token][0] in [c.request for c in batch.chunks if c.length == 1] else row >= num_rows
        )
        if row >= num_rows:
            assert batch.tile_tokens[row - num_rows] == token
            assert batch.tile_positions[row - num_rows] == tokens[token][1]
    ends = [index for index, (request, position) in enumerate(tokens) if position == request.num_tokens - 1]
    assert batch.logits_rows.tolist() == ends


@pytest.mark.parametrize("seed", range(20))
def test_the_device_has_what_the_host_wrote_after_any_steps(monkeypatch, seed):
    """Requests come and go in a small pool, so blocks change their logical index; some return from the host."""
    rng = random.Random(seed)
    options = {"num_blocks": 40, "tile_size": 4, "windows": [None, 5], "buckets": rng.choice([[], [2, 4, 8]])}
    on_device, plain = device_builder(monkeypatch, **options), make_builder(**options)
    addresses = {on_device.build([make_chunk([0], [1], 0, 1)]).decode_lists[None].partial.data_ptr()}
    running, free = list[Request](), list(range(1, 40))
    for step in range(60):
        while len(running) < 8 and len(free) > 12:
            running.append(Request(f"{step} {len(running)}", [step % 7] * rng.randrange(1, 40), SamplingParams()))
        chunks = list[Chunk]()
        for request in rng.sample(running, rng.randrange(1, len(running) + 1)):
            start = request.num_computed_tokens
            length = min(request.num_tokens - start, rng.choice([1, 1, 3, 9]))
            missing = -(-(start + length) // 4) - len(request.block_table)
            if missing <= len(free):
                request.block_table.extend(free.pop(rng.randrange(len(free))) for _ in range(missing))
                chunks.append(Chunk.of(request, start, length))
        batch = on_device.build(chunks)
        assert_equal_batches(batch, plain.build(chunks))
        assert_layout(batch)
        addresses.add(batch.decode_lists[None].partial.data_ptr())
        for request, start, length, *_ in chunks:
            request.num_computed_tokens = start + length
            if start + length == request.num_tokens:
                request.token_ids.append(step % 7)
        for request in rng.sample(running, len(running) // 4):
            free += request.block_table
            request.block_table = array("i")
            if rng.random() < 0.5:
                running.remove(request)
            else:  # it comes back with all its tokens, in other blocks
                count = -(-request.num_computed_tokens // 4)
                request.block_table = array("i", [free.pop(rng.randrange(len(free))) for _ in range(count)])
                for builder in (on_device, plain):
                    builder.note_blocks(request)
    assert len(addresses) == 1, "a CUDA graph reads fixed addresses"
