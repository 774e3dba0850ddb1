"""minicb/blocks.py: blocks are handed out, shared and taken back, and none is ever lost or in two hands."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minicb.blocks import RESERVED_BLOCK, BlockPool


def test_a_pool_hands_out_all_its_blocks_but_the_reserved_one():
    pool = BlockPool(num_blocks=5, block_size=4)
    assert pool.num_usable == pool.num_free == 4
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_a_shared_block_is_free_when_its_last_holder_lets_go():
    pool = BlockPool(num_blocks=5, block_size=4)
    prefix = pool.allocate(2)
    pool.share(prefix)
    pool.free(prefix)
    assert pool.num_free == 2
    pool.free(prefix)
    assert pool.num_free == 4


def test_the_block_that_has_been_free_longest_is_reused_first():
    """What a free block holds stays readable for as long as possible."""
    pool = BlockPool(num_blocks=5, block_size=4)
    pool.free(pool.allocate(4)[::-1])
    assert pool.allocate(2) == [4, 3]
    pool.free([3])
    assert pool.allocate(3) == [2, 1, 3]


def test_allocating_too_much_raises_and_takes_nothing():
    pool = BlockPool(num_blocks=5, block_size=4)
    held = pool.allocate(1)
    with pytest.raises(RuntimeError, match="4 blocks wanted, 3 free"):
        pool.allocate(4)
    pool.check_invariants([held])
    assert pool.allocate(0) == []
    assert pool.num_free == 3


@pytest.mark.parametrize("block", [0, 1, 4, 5, 99, -1, -4])
def test_only_a_held_block_can_be_freed_or_shared(block):
    """Block 2 alone is held. A negative index must not reach it from behind, which Python would allow."""
    pool = BlockPool(num_blocks=5, block_size=4)
    first, second = pool.allocate(2)
    pool.free([first])
    assert second == 2
    for change in (pool.free, pool.share):
        with pytest.raises(ValueError, match=f"block {block} is not held"):
            change([block])
    pool.check_invariants([[2]])


def test_a_pool_needs_a_block_to_use_and_a_size():
    with pytest.raises(ValueError, match="num_blocks must be at least 2"):
        BlockPool(num_blocks=1, block_size=4)
    with pytest.raises(ValueError, match="block_size must be at least 1"):
        BlockPool(num_blocks=5, block_size=0)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16])
def test_blocks_for_at_the_boundaries(block_size):
    """The last token of a block needs no new block, the one after it does."""
    blocks_for = BlockPool(2, block_size).blocks_for
    assert blocks_for(0) == 0
    assert blocks_for(1) == 1
    assert blocks_for(block_size) == 1
    assert blocks_for(block_size + 1) == 2
    if block_size > 1:
        assert blocks_for(block_size - 1) == 1
    assert blocks_for(2 * block_size) == 2
    assert blocks_for(2 * block_size + 1) == 3


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_blocks_for_is_the_least_number_that_holds_the_tokens(num_tokens, block_size):
    count = BlockPool(2, block_size).blocks_for(num_tokens)
    assert count * block_size >= num_tokens
    assert (count - 1) * block_size < num_tokens or count == 0


# ---------------------------------------------------------------------------- check_invariants


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        ([[1, 2]], "reference counts are off"),  # block 3 is held by nobody and not free: lost
        ([[1, 2, 3], [3]], "reference counts are off"),  # shared without share()
        ([[1, 2, 3, 3]], "a block twice in one table"),
        ([[1, 2, 3, 4]], "reference counts are off"),  # block 4 is free
        ([[0, 1, 2, 3]], "block 0 is reserved"),
        ([[1, 2, 3, 99]], "a block is lost"),  # no block of this pool
        ([[1, 2, 3, -1]], "a block is lost"),
    ],
)
def test_check_invariants_catches_a_wrong_block_table(tables, complaint):
    pool = BlockPool(num_blocks=6, block_size=4)
    pool.allocate(3)
    pool.check_invariants([[1, 2, 3]])
    pool.check_invariants([[3], [], [2, 1]])
    with pytest.raises(AssertionError, match=complaint):
        pool.check_invariants(tables)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda pool: pool._free.append(4), "a block is free twice"),
        (lambda pool: pool._free.append(1), "a held block is free"),
        (lambda pool: pool._free.append(0), "a block is lost"),  # as the sum no longer adds up
        (lambda pool: pool._free.pop(), "a block is lost"),
    ],
)
def test_check_invariants_catches_a_wrong_free_list(damage, complaint):
    pool = BlockPool(num_blocks=6, block_size=4)
    pool.allocate(3)
    damage(pool)
    with pytest.raises(AssertionError, match=complaint):
        pool.check_invariants([[1, 2, 3]])


# ---------------------------------------------------------------------------- any history


class PoolHistory(RuleBasedStateMachine):
    """Random histories of a pool against the plainest model: a dict block -> number of holders."""

    @initialize(num_blocks=st.integers(2, 8))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks, block_size=4)
        self.holders = {}
        self.num_usable = num_blocks - 1

    @rule(count=st.integers(0, 10))
    def allocate(self, count):
        if count > self.num_usable - len(self.holders):
            with pytest.raises(RuntimeError, match="blocks wanted"):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not set(blocks) & self.holders.keys()
        assert RESERVED_BLOCK not in blocks
        self.holders |= dict.fromkeys(blocks, 1)

    @rule(block=st.integers(-8, 8))
    def share(self, block):
        if block not in self.holders:
            with pytest.raises(ValueError, match="not held"):
                self.pool.share([block])
            return
        self.pool.share([block])
        self.holders[block] += 1

    @rule(block=st.integers(-8, 8))
    def free(self, block):
        if block not in self.holders:
            with pytest.raises(ValueError, match="not held"):
                self.pool.free([block])
            return
        self.pool.free([block])
        self.holders[block] -= 1
        if not self.holders[block]:
            del self.holders[block]

    @rule()
    def free_one_reference_of_each(self):
        self.pool.free(list(self.holders))
        self.holders = {block: count - 1 for block, count in self.holders.items() if count > 1}

    @invariant()
    def pool_and_model_agree(self):
        assert self.pool.num_free == self.num_usable - len(self.holders)
        # A block with n holders is in n tables.
        tables = [[block for block, count in self.holders.items() if count > n] for n in range(8)]
        deepest = max(self.holders.values(), default=0)
        tables += [[block for block, count in self.holders.items() if count > n] for n in range(8, deepest)]
        self.pool.check_invariants(tables)


TestPoolHistory = PoolHistory.TestCase
