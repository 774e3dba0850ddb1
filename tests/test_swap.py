"""minicb/swap.py: blocks that are copied out and back are the same, and nothing else changes."""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from conftest import LateHostCache
from hypothesis import given, settings
from hypothesis import strategies as st

from minicb import Engine, runner, swap
from minicb.memory import PreemptionCosts
from minicb.swap import HostCache, _runs, staging_bytes

NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS = 9, 12


@dataclass
class Shape:
    """The shape of a KV cache, and the number of blocks that the staging buffer holds."""

    num_layers: int
    block_size: int
    num_heads: int
    num_staged: int
    dtype: torch.dtype

    def caches(self, num_blocks: int = NUM_DEVICE_BLOCKS) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, with distinct numbers."""
        shape = (self.num_layers, num_blocks * self.block_size, self.num_heads, 2)
        numbers = torch.arange(2 * math.prod(shape), dtype=self.dtype)
        k, v = numbers.reshape(2, *shape)
        return k, v

    @property
    def block_bytes(self) -> int:
        return 2 * self.num_layers * self.block_size * self.num_heads * 2 * self.dtype.itemsize


shapes = st.builds(
    Shape,
    num_layers=st.integers(1, 3),
    block_size=st.integers(1, 3),
    num_heads=st.integers(1, 2),
    num_staged=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)


@st.composite
def copies(draw) -> tuple[str, list[tuple[int, int]]]:
    """In or out, and pairs of any blocks except the null blocks. Neighbours are more frequent than by chance."""
    what = draw(st.sampled_from(["out", "in"]))
    ordered = draw(st.booleans())
    device = draw(st.permutations(range(1, NUM_DEVICE_BLOCKS)))
    host = range(1, NUM_HOST_BLOCKS) if ordered else draw(st.permutations(range(1, NUM_HOST_BLOCKS)))
    pairs = list(zip(device, host[draw(st.integers(0, 3)) :], strict=False))[: draw(st.integers(0, len(device)))]
    return what, pairs if what == "out" else [(source, destination) for destination, source in pairs]


def make_host_cache(kind: type[HostCache], shape: Shape, caches, num_blocks: int = NUM_HOST_BLOCKS) -> HostCache:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swap, "STAGING_BYTES", shape.num_staged * shape.block_bytes)
        return kind(caches, num_blocks, shape.block_size)


def by_block(caches, block_size: int) -> list[torch.Tensor]:
    """[num_blocks, layers, block_size, heads, 2]; views."""
    return [cache.unflatten(1, (-1, block_size)).transpose(0, 1) for cache in caches]


@given(shape=shapes, history=st.lists(copies(), max_size=5), kind=st.sampled_from([HostCache, LateHostCache]))
@settings(max_examples=10 * settings.default.max_examples)
def test_after_any_history_of_copies_each_block_holds_what_was_copied_there_last(shape, history, kind):
    """Other blocks keep what they hold. Blocks that are swapped out become NaN at once, as the next step may
    overwrite them. The staging buffer becomes NaN when no copy needs it any more."""
    caches = shape.caches()
    cache = make_host_cache(kind, shape, caches)
    device = by_block(caches, shape.block_size)
    for host, numbers in zip(cache.host_kv, by_block(shape.caches(NUM_HOST_BLOCKS), shape.block_size), strict=True):
        host.copy_(-1 - numbers)
    expected_device, expected_host = [b.clone() for b in device], [b.clone() for b in cache.host_kv]
    # All that a history has left in host memory comes back in the end, to be looked at.
    histories = [*history, ("in", [(block, block) for block in range(1, NUM_DEVICE_BLOCKS)])]
    for what, pairs in histories:
        if what == "out":
            cache.swap_out(pairs)
        else:
            cache.swap_in(pairs)
        for blocks, expected, host in zip(device, expected_device, expected_host, strict=True):
            for source, destination in pairs:
                if what == "out":
                    host[destination] = expected[source]
                    expected[source] = blocks[source] = torch.nan
                else:
                    expected[destination] = host[source]
            torch.testing.assert_close(blocks, expected, rtol=0, atol=0, equal_nan=True)
        if what == "in" and pairs or kind is HostCache:  # nothing is on its way
            for staging in cache.staging:
                staging.fill_(torch.nan)
            for blocks, expected in zip(cache.host_kv, expected_host, strict=True):
                torch.testing.assert_close(blocks, expected, rtol=0, atol=0, equal_nan=True)


@given(blocks=st.lists(st.integers(0, 12), max_size=12) | st.lists(st.integers(0, 12), unique=True).map(sorted))
def test_runs_cover_all_blocks_in_order_and_are_as_long_as_can_be(blocks):
    runs = list(_runs(blocks))
    assert [block for _, begin, end in runs for block in range(begin, end)] == blocks
    assert [first for first, _, _ in runs] == [0, *itertools.accumulate(end - begin for _, begin, end in runs)][:-1]
    assert all(end > begin for _, begin, end in runs)
    assert all(end != begin for (_, _, end), (_, begin, _) in itertools.pairwise(runs))


@pytest.mark.parametrize("what", ["swap_out", "swap_in"])
def test_neighbours_in_host_memory_travel_in_one_copy(what):
    """One for K and one for V, for all layers. Two more follow a gap between the host blocks, and a full
    staging buffer."""
    shape = Shape(num_layers=3, block_size=2, num_heads=1, num_staged=4, dtype=torch.float32)
    cache = make_host_cache(HostCache, shape, shape.caches())
    sizes, copy = [], cache._copy

    def measured(destination, source):
        sizes.append(len(source))
        copy(destination, source)

    cache._copy = measured
    pairs = list(zip([8, 1, 3, 2, 6, 5], [2, 3, 4, 6, 7, 8], strict=True))
    getattr(cache, what)(pairs if what == "swap_out" else [(host, device) for device, host in pairs])
    assert sizes == [3, 3, 1, 1, 2, 2]


@given(shape=shapes, num_blocks=st.integers(1, 8), excess=st.integers(0, 40))
def test_the_staging_buffer_is_as_large_as_promised_or_as_of_use(shape, num_blocks, excess):
    """The sizing of the cache relies on `staging_bytes`. A block larger than STAGING_BYTES fits too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swap, "STAGING_BYTES", shape.num_staged * shape.block_bytes - min(excess, shape.block_bytes))
        promised = staging_bytes(shape.block_bytes)
        cache = HostCache(shape.caches(), num_blocks, shape.block_size)
        taken = sum(staging.nbytes for staging in cache.staging)
        assert max(swap.STAGING_BYTES, shape.block_bytes) == promised
    assert taken % shape.block_bytes == 0
    assert taken == num_blocks * shape.block_bytes or promised - shape.block_bytes < taken <= promised
    assert taken <= num_blocks * shape.block_bytes
    assert sum(host.nbytes for host in cache.host_kv) == num_blocks * shape.block_bytes


@pytest.mark.parametrize("kind", [HostCache, LateHostCache])
@pytest.mark.parametrize("num_host_blocks", [1, 2, NUM_DEVICE_BLOCKS + 3])
def test_measuring_leaves_the_device_as_it_is(kind, num_host_blocks):
    shape = Shape(num_layers=2, block_size=2, num_heads=1, num_staged=4, dtype=torch.float32)
    caches = shape.caches()
    make_host_cache(kind, shape, caches, num_host_blocks).measure()
    for cache, expected in zip(caches, shape.caches(), strict=True):
        assert torch.equal(cache, expected)


def test_host_memory_that_cannot_be_had_is_an_error_with_its_size():
    """It names both arguments, because the caller may have written either."""
    shape = Shape(num_layers=2, block_size=4, num_heads=2, num_staged=1, dtype=torch.float32)
    num_blocks = 10**12
    with pytest.raises(
        ValueError, match=rf"num_cpu_blocks is {num_blocks - 1} .*swap_space.* {num_blocks * 256 / 2**30:.1f} GiB"
    ):
        HostCache(shape.caches(), num_blocks, shape.block_size)


def test_a_block_costs_its_share_of_both_ways(monkeypatch):
    """Say that the way out and the way back take 12 seconds each, for the 4 blocks that the staging buffer holds."""
    monkeypatch.setattr(swap, "seconds_of", lambda work, device: work() or 12.0)
    shape = Shape(num_layers=2, block_size=2, num_heads=1, num_staged=4, dtype=torch.float32)
    assert make_host_cache(HostCache, shape, shape.caches(), 9).measure() == 24 / 4


def test_what_preemption_costs_is_measured_and_reaches_the_choice(tiny, monkeypatch):
    """A prefill of 2 prompts of 16 tokens takes 12 seconds here. Without host memory nothing is measured."""
    arguments = {
        "device": "cpu",
        "enforce_eager": True,
        "block_size": 4,
        "num_blocks": 40,
        "max_num_batched_tokens": 32,
    }
    real = Engine(tiny, **arguments)
    assert real.scheduler.memory.costs is real.runner.costs
    assert all(0 < cost < 10 for cost in real.runner.costs)
    monkeypatch.setattr(runner, "seconds_of", lambda work, device: 12.0)
    assert real.runner._measure_prefill() == 12 / 32
    for none in ({"preemption_mode": "recompute"}, {"swap_space": 0}, {"num_cpu_blocks": 0}):
        assert Engine(tiny, **arguments, **none).scheduler.memory.costs == PreemptionCosts(math.inf, math.inf)
