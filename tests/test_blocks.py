"""minicb/blocks.py: blocks are allocated, shared, found, evicted and freed, none is lost, and the prefix cache finds a
block only for the tokens that it holds."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minicb.blocks import NULL_BLOCK, BlockPool


def make_pool(num_usable: int, block_size: int = 4, enable_prefix_caching: bool = True) -> BlockPool:
    return BlockPool(1 + num_usable, block_size, enable_prefix_caching)


def fill(pool: BlockPool, token_ids) -> list[int]:
    """A new table for these tokens, its full blocks registered."""
    table = pool.allocate(pool.blocks_for(len(token_ids)))
    pool.register(table, token_ids, 0, len(token_ids) // pool.block_size)
    return table


def find(pool: BlockPool, token_ids) -> list[int]:
    return pool.find_prefix(token_ids, len(token_ids))


def test_a_pool_hands_out_all_blocks_except_the_null_block():
    pool = BlockPool(num_blocks=5, block_size=4)
    assert (pool.num_usable, pool.num_free, pool.enable_prefix_caching) == (4, 4, False)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_allocating_too_much_raises_and_takes_nothing():
    pool = BlockPool(num_blocks=5, block_size=4)
    held = pool.allocate(1)
    with pytest.raises(RuntimeError, match="4 blocks wanted, 3 free"):
        pool.allocate(4)
    pool.check_invariants([held])
    assert pool.allocate(0) == []
    assert pool.num_free == 3


@pytest.mark.parametrize("block", [0, 1, 4, 5, 99, -1, -3, -4])
def test_only_a_held_block_can_be_freed_or_shared(block):
    """Block 2 alone is held. Python would take index -3 for it."""
    pool = BlockPool(num_blocks=5, block_size=4)
    first, second = pool.allocate(2)
    pool.free([first])
    assert second == 2
    with pytest.raises(AssertionError, match=f"block {block} is not held"):
        pool.free([block])
    with pytest.raises(AssertionError, match=f"block {block} is neither held nor cached"):
        pool.share([block])
    pool.check_invariants([[2]])


def test_a_pool_needs_the_null_block_and_a_size():
    with pytest.raises(ValueError, match="num_blocks must be at least 1, not 4 and 0"):
        BlockPool(num_blocks=0, block_size=4)
    with pytest.raises(ValueError, match="block_size and num_blocks must be at least 1, not 0"):
        BlockPool(num_blocks=5, block_size=0)


def test_a_pool_of_the_null_block_alone_has_no_block_to_give():
    """It stands for host memory where there is none."""
    pool = BlockPool(num_blocks=1, block_size=4)
    assert (pool.num_usable, pool.num_free, pool.allocate(0)) == (0, 0, [])
    with pytest.raises(RuntimeError, match="1 blocks wanted, 0 free"):
        pool.allocate(1)
    pool.check_invariants([[]])


@given(st.integers(0, 10_000), st.integers(1, 64))
@example(0, 4)
@example(4, 4)
@example(5, 4)
def test_blocks_for_is_the_least_number_that_holds_the_tokens(num_tokens, block_size):
    count = BlockPool(2, block_size).blocks_for(num_tokens)
    assert count * block_size >= num_tokens
    assert (count - 1) * block_size < num_tokens or count == 0


# ---------------------------------------------------------------------------- what is found


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_only_full_blocks_are_found(block_size):
    """Those that were full when registered and are full in what is asked for, at every boundary."""
    lengths = range(2 * block_size + 2)
    text = list(lengths)
    for num_registered, num_wanted in itertools.product(lengths, lengths):
        pool = make_pool(3, block_size)
        table = fill(pool, text[:num_registered])
        expected = table[: min(num_registered, num_wanted) // block_size]
        assert pool.find_prefix(text, num_wanted) == expected
        assert find(pool, text[:num_wanted]) == expected
        # Tokens beyond num_wanted don't matter.
        assert pool.find_prefix(text[:num_wanted] + [99] * 9, num_wanted) == expected


def test_a_block_is_found_only_behind_all_that_came_before_it():
    """Equal tokens behind different prefixes have different KV."""
    pool = make_pool(9, block_size=2)
    a, b = fill(pool, [1, 2, 3, 4, 5, 6]), fill(pool, [7, 8, 3, 4, 5, 6])
    assert find(pool, [1, 2, 3, 4, 5, 6]) == a
    assert find(pool, [7, 8, 3, 4, 5, 6]) == b
    assert find(pool, [3, 4, 5, 6]) == []
    assert find(pool, [1, 2, 5, 6]) == a[:1]
    assert find(pool, [1, 2, 3, 9, 5, 6]) == a[:1]  # half of the next block is equal, too
    assert find(pool, [1, 2, 1, 2]) == a[:1]


def test_a_prefix_grows_as_its_request_does():
    """Blocks are registered one after another as they fill up, and two requests may continue one prefix."""
    pool = make_pool(9, block_size=2)
    a = pool.allocate(3)
    pool.register(a, [1, 2, 3, 4, 5], 0, 1)
    assert find(pool, [1, 2, 3, 4]) == a[:1]
    pool.register(a, [1, 2, 3, 4, 5], 1, 2)
    assert find(pool, [1, 2, 3, 4, 5]) == a[:2]
    b = [*a[:2], *pool.allocate(1)]
    pool.share(a[:2])
    pool.register(b, [1, 2, 3, 4, 6, 6], 2, 3)
    pool.register(a, [1, 2, 3, 4, 5, 5], 2, 3)
    assert find(pool, [1, 2, 3, 4, 6, 6]) == b
    assert find(pool, [1, 2, 3, 4, 5, 5]) == a


class Constant(int):
    """A token id with a useless hash."""

    def __hash__(self):
        return 0


@pytest.mark.parametrize("one, other", [(-1, -2), (5, 5 + 2**61 - 1), (Constant(5), Constant(6))])
@pytest.mark.parametrize("position", range(5))
def test_equal_hashes_are_not_taken_for_equal_text(one, other, position):
    """In the block itself and in one before it."""
    assert hash(one) == hash(other)
    pool = make_pool(6, block_size=2)
    text = [one] * 6
    similar = [*text[:position], other, *text[position + 1 :]]
    first = fill(pool, text)
    same = first[: position // 2]
    assert find(pool, similar) == same
    second = fill(pool, similar)
    assert find(pool, text) == first
    assert find(pool, similar) == same + second[position // 2 :]


def test_of_equal_blocks_the_first_registered_is_found():
    """Two requests computed the same tokens at the same time. The second holds its own copy, but what it adds is found
    behind the first one's block."""
    pool = make_pool(3, block_size=2)
    a, b = fill(pool, [1, 2]), pool.allocate(2)
    pool.register(b, [1, 2, 3, 4], 0, 1)
    pool.register(b, [1, 2, 3, 4], 1, 2)
    assert find(pool, [1, 2, 3, 4]) == [a[0], b[1]]
    # The copy is never found, so it is evicted first.
    pool.free(a)
    pool.free(b)
    assert pool.allocate(1) == b[:1]
    assert find(pool, [1, 2, 3, 4]) == [a[0], b[1]]


def test_without_prefix_caching_no_block_is_found_or_kept():
    pool = make_pool(2, block_size=2, enable_prefix_caching=False)
    table = fill(pool, [1, 2, 3, 4])
    assert find(pool, [1, 2, 3, 4]) == []
    pool.free(table)
    with pytest.raises(AssertionError, match="neither held nor cached"):
        pool.share(table)


def test_reset_frees_all_blocks_and_forgets_their_content():
    pool = make_pool(3, block_size=1)
    fill(pool, [1, 2])
    pool.free(fill(pool, [3]))
    pool.reset()
    pool.check_invariants([])
    assert (pool.num_free, find(pool, [1, 2]), find(pool, [3])) == (3, [], [])
    assert find(pool, [5, 6]) == []
    table = fill(pool, [5, 6])
    assert find(pool, [5, 6]) == table


class Counted(int):
    """A token id that counts how often it is hashed."""

    num_hashes = 0

    def __hash__(self):
        Counted.num_hashes += 1
        return int(self)


def test_each_token_is_hashed_a_fixed_number_of_times_however_long_the_prefix():
    """Or a long prompt would cost the square of its length."""
    costs = []
    for num_blocks in (10, 1000):
        Counted.num_hashes = 0
        pool, text = make_pool(num_blocks, block_size=2), [Counted(number) for number in range(2 * num_blocks)]
        table = fill(pool, text)
        assert find(pool, text) == table
        pool.free(table)
        pool.allocate(num_blocks)
        costs.append(Counted.num_hashes / num_blocks)
    assert costs[0] == costs[1]


# ---------------------------------------------------------------------------- free and cached


def test_a_cached_block_is_counted_as_free_until_it_is_shared():
    pool = make_pool(3, block_size=2)
    table = fill(pool, [1, 2, 3, 4])
    assert (pool.num_free, pool.num_held(table), pool.num_unshared(table)) == (1, 2, 2)
    pool.free(table)
    assert (pool.num_free, pool.num_held(table), pool.num_unshared(table)) == (3, 0, 0)
    prefix = find(pool, [1, 2, 3, 4])
    assert prefix == table
    assert pool.num_free == 3  # finding takes nothing
    for num_holders in (1, 2, 3):
        pool.share(prefix)
        assert (pool.num_free, pool.num_held(prefix)) == (1, 2)
        assert pool.num_unshared(prefix) == (2 if num_holders == 1 else 0)
        pool.check_invariants([prefix] * num_holders)
    pool.free(prefix[1:])
    assert pool.num_unshared(prefix) == 0
    pool.free(prefix[1:])
    assert pool.num_unshared(prefix) == 1
    pool.free(prefix[1:])
    assert (pool.num_free, pool.num_held(prefix), pool.num_unshared(prefix)) == (2, 1, 0)
    assert find(pool, [1, 2, 3, 4]) == table
    with pytest.raises(AssertionError, match=f"block {table[1]} is not held"):
        pool.free(table[1:])  # cached is not held


def test_blocks_without_content_are_evicted_first_then_the_least_recently_used():
    """The end of a table goes before its beginning, without which the rest cannot be found."""
    pool = make_pool(7, block_size=1)
    a, b, plain = fill(pool, [1, 2]), fill(pool, [3, 4]), pool.allocate(2)
    for table in (a, plain[:1], b, plain[1:]):
        pool.free(table)
    prefix = find(pool, [1])  # now the most recently used
    pool.share(prefix)
    pool.free(prefix)
    order = pool.allocate(7)
    assert sorted(order[:3]) == sorted([*plain, 7])
    assert order[3:] == [a[1], b[1], b[0], a[0]]


def test_a_block_is_not_found_any_more_once_it_is_evicted():
    """From its allocation on, before anything is written to it."""
    pool = make_pool(2, block_size=2)
    table = fill(pool, [1, 2, 3, 4])
    pool.free(table)
    assert pool.allocate(1) == table[1:]
    assert find(pool, [1, 2, 3, 4]) == table[:1]
    pool.free(table[1:])
    assert find(pool, [1, 2, 3, 4]) == table[:1]


def test_nothing_is_found_behind_an_evicted_block_until_it_is_registered_again():
    pool = make_pool(2, block_size=2)
    table = fill(pool, [1, 2, 3, 4])
    pool.free(table[:1])
    pool.free(table[1:])
    assert pool.allocate(1) == table[:1]
    assert find(pool, [1, 2, 3, 4]) == []
    pool.register(table[:1], [9, 9, 3, 4], 0, 1)
    assert find(pool, [9, 9, 3, 4]) == table[:1]  # the block behind it continued other tokens
    assert find(pool, [1, 2, 3, 4]) == []
    pool.free(table[:1])
    assert pool.allocate(2) == [table[1], table[0]]
    pool.register(table, [1, 2, 3, 4], 0, 2)
    assert find(pool, [1, 2, 3, 4]) == table


# ---------------------------------------------------------------------------- unregister


def test_an_unregistered_block_is_not_found_but_stays_with_its_holders():
    """Blocks behind it cannot be found either. Registered again, it is found again, and they are not."""
    pool, text = make_pool(4, block_size=2), [1, 2, 3, 4, 5, 6]
    table = fill(pool, text)
    pool.share(table)  # a second holder
    pool.unregister(table[1:2])
    assert find(pool, text) == table[:1]
    pool.check_invariants([table, table])
    pool.register(table, text, 1, 2)
    assert find(pool, text) == table[:2]
    pool.unregister(table)
    assert find(pool, text) == []
    pool.unregister(table)  # no effect
    pool.free(table)
    pool.free(table)
    pool.check_invariants([])
    with pytest.raises(AssertionError, match="neither held nor cached"):
        pool.share(table[1:2])


def test_a_copy_that_is_unregistered_leaves_the_block_that_is_found():
    pool = make_pool(4, block_size=2)
    found, copy = fill(pool, [1, 2]), fill(pool, [1, 2])
    pool.unregister(copy)
    assert find(pool, [1, 2]) == found
    pool.unregister(found)
    assert find(pool, [1, 2]) == []
    pool.register(copy, [1, 2], 0, 1)
    assert find(pool, [1, 2]) == copy


def test_a_free_block_that_is_unregistered_is_not_found():
    pool = make_pool(2, block_size=2)
    table = fill(pool, [1, 2, 3, 4])
    pool.free(table)
    pool.unregister(table[1:])
    assert find(pool, [1, 2, 3, 4]) == table[:1]
    pool.check_invariants([])
    assert sorted(pool.allocate(2)) == sorted(table)


def test_an_unregistered_block_is_evicted_before_cached_ones():
    pool = make_pool(3, block_size=2)
    old, wrong, new = fill(pool, [1, 2]), fill(pool, [3, 4]), fill(pool, [5, 6])
    pool.unregister(wrong)
    for table in (old, new, wrong):
        pool.free(table)
    assert pool.allocate(3) == [*wrong, *old, *new]


# ---------------------------------------------------------------------------- check_invariants


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        ([[1, 2]], "reference counts are off"),  # block 3 is neither held nor free
        ([[1, 2, 3], [3]], "reference counts are off"),  # shared without share()
        ([[1, 2, 3, 3]], "a block twice in one table"),
        ([[1, 2, 3, 4]], "reference counts are off"),  # block 4 is free
        ([[0, 1, 2, 3]], "the null block is in a block table"),
        ([[1, 2, 3, 99]], "a block is lost"),  # outside the pool
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


def free_the_null_block(pool: BlockPool) -> None:
    """In place of another, so that the number of free blocks is right."""
    pool._free.popitem()
    pool._free[NULL_BLOCK] = None


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda pool: pool._free.update({1: None}), "a held block is free"),
        (lambda pool: pool._free.update({0: None}), "a block is lost"),  # the number is wrong first
        (lambda pool: pool._free.popitem(), "a block is lost"),
        (free_the_null_block, "the null block, or a block outside the pool, is free"),
        (
            lambda pool: pool._free.update({99: pool._free.popitem()[1]}),
            "the null block, or a block outside the pool, is free",
        ),
        (lambda pool: pool._contents.__setitem__(1, None), "block 1 is cached under other tokens than it holds"),
        (lambda pool: pool._contents.__setitem__(4, None), "block 4 is cached under other tokens than it holds"),
        (
            lambda pool: pool._cached.update({pool._contents[1]: 3}),
            "block 3 is cached under other tokens than it holds",
        ),
        (lambda pool: pool._ref_counts.__setitem__(4, 1), "reference counts are off"),
    ],
)
def test_check_invariants_catches_a_pool_that_is_wrong_about_its_blocks(damage, complaint):
    """Blocks 1 and 2 are shared, 3 is not yet full, 4 is cached, 5 was never used."""
    pool = make_pool(5, block_size=1)
    tables = [fill(pool, [1, 2]), [1, 2, *pool.allocate(1)]]
    pool.share([1, 2])
    pool.free(fill(pool, [3]))
    pool.check_invariants(tables)
    damage(pool)
    with pytest.raises(AssertionError, match=complaint):
        pool.check_invariants(tables)


def test_check_invariants_catches_a_shared_block_that_was_never_registered():
    """Its holders would overwrite each other's KV."""
    pool = make_pool(3, block_size=2)
    pool.free(fill(pool, [1, 2, 3, 4, 5, 6]))
    table = fill(pool, [1, 2, 3])  # the last one was registered for another request
    pool.share(table)
    with pytest.raises(AssertionError, match="a shared block was never registered"):
        pool.check_invariants([table, table])


# ---------------------------------------------------------------------------- any history


class Text:
    """A node of the tree of findable blocks: a prefix, and its continuations by one block."""

    def __init__(self, above: "Text | None", tokens: tuple[int, ...], block: int):
        self.above, self.tokens, self.block = above, tokens, block
        self.below: dict[tuple[int, ...], Text] = {}


class Holder:
    def __init__(self, token_ids: list[int], table: list[int], texts: list[Text]):
        self.token_ids, self.table = token_ids, table
        self.texts = texts  # of the registered blocks


# Python hashes -1 and -2 alike. Two tokens and a common beginning, so that much is equal by chance.
texts_to_hold = st.builds(
    lambda common, new: [-1] * common + new, st.integers(0, 6), st.lists(st.sampled_from([-1, -2]), max_size=5)
)
numbers = st.integers(0, 5)


class PoolHistory(RuleBasedStateMachine):
    """Random histories of a pool, as requests make them, against a model: the holders with their blocks, the tree of
    findable blocks, and the free ones among them in LRU order."""

    @initialize(
        num_usable=st.integers(0, 9),
        block_size=st.integers(1, 3),
        caching=st.sampled_from([True] * 9 + [False]),
        texts=st.lists(texts_to_hold, min_size=1, max_size=3),
    )
    def start(self, num_usable, block_size, caching, texts):
        self.num_usable, self.size, self.caching = num_usable, block_size, caching
        self.pool = make_pool(num_usable, block_size, caching)
        self.wanted: list[list[int]] = []  # texts looked for lately
        self.forget_everything()
        for token_ids in texts:
            self.hold(token_ids, len(token_ids), 9)

    def forget_everything(self):
        self.holders: list[Holder] = []
        self.root = Text(None, (), 0)
        self.found: dict[int, Text] = {}  # block -> the text for which it is found
        self.written: dict[int, list[int]] = {}  # block -> all tokens up to its end, when registered
        self.unused: list[int] = []  # free blocks that can be found, the next to be evicted first

    @property
    def held(self) -> set[int]:
        return {block for holder in self.holders for block in holder.table}

    @property
    def num_free(self) -> int:
        return self.num_usable - len(self.held)

    def pick(self, number: int) -> Holder:
        return self.holders[number % len(self.holders)]

    def allocate(self, count: int) -> list[int]:
        num_plain = min(count, self.num_free - len(self.unused))
        blocks = self.pool.allocate(count)
        plain, reused = blocks[:num_plain], blocks[num_plain:]
        assert len(set(plain)) == num_plain
        assert not set(plain) & (self.held | set(self.unused) | {NULL_BLOCK})
        assert reused == self.unused[: len(reused)]
        del self.unused[: len(reused)]
        for block in reused:
            text = self.found.pop(block)
            del text.above.below[text.tokens]
        for block in blocks:
            self.written.pop(block, None)
        return blocks

    def find(self, token_ids: list[int], num_tokens: int) -> list[Text]:
        text, texts = self.root, []
        for end in range(self.size, num_tokens + 1, self.size):
            text = text.below.get(tuple(token_ids[end - self.size : end]))
            if text is None:
                break
            texts.append(text)
        prefix = self.pool.find_prefix(token_ids, num_tokens)
        # The promise: a found block holds these tokens, at this place, behind all tokens before them.
        for index, block in enumerate(prefix):
            assert self.written[block] == token_ids[: (index + 1) * self.size]
        assert len(prefix) * self.size <= num_tokens
        assert prefix == [text.block for text in texts]
        return texts

    @rule(token_ids=texts_to_hold, left_out=st.integers(0, 3), most=st.sampled_from([9, 9, 0]))
    def begin(self, token_ids, left_out, most):
        self.hold(token_ids, max(0, len(token_ids) - left_out), most)

    @rule(number=numbers, most=st.sampled_from([9, 9, 0]))
    def begin_again(self, number, most):
        token_ids = self.wanted[number % len(self.wanted)]
        self.hold(token_ids, len(token_ids), most)

    def hold(self, token_ids: list[int], num_tokens: int, most: int):
        """Share what is found of the first num_tokens, allocate the rest, and register `most` blocks of it at most.
        The oldest holders give up theirs if blocks lack."""
        self.wanted = [token_ids, *self.wanted[:5]]
        count = -(-len(token_ids) // self.size)
        if count > self.num_usable:
            return
        while True:
            texts = self.find(token_ids, num_tokens)
            prefix = [text.block for text in texts]
            assert self.pool.num_held(prefix) == len(self.held.intersection(prefix))
            if count - self.pool.num_held(prefix) <= self.pool.num_free:
                break
            self.give_up(self.holders[0], 0, 0)
        self.pool.share(prefix)
        self.unused = [block for block in self.unused if block not in prefix]
        holder = Holder(list(token_ids), prefix, texts)
        self.holders.append(holder)
        holder.table = prefix + self.allocate(count - len(prefix))
        self.register_blocks(holder, most)

    @precondition(lambda self: self.holders)
    @rule(number=numbers, new=st.lists(st.sampled_from([-1, -2]), max_size=4))
    def go_on(self, number, new):
        holder = self.pick(number)
        count = -(-(len(holder.token_ids) + len(new)) // self.size) - len(holder.table)
        if count > self.num_free:
            with pytest.raises(RuntimeError, match=f"{count} blocks wanted, {self.num_free} free"):
                self.pool.allocate(count)
            return
        holder.table += self.allocate(count)
        holder.token_ids += new
        self.wanted = [list(holder.token_ids), *self.wanted[:5]]

    @precondition(lambda self: self.holders)
    @rule(number=numbers, most=st.sampled_from([9, 2, 1]))
    def register(self, number, most):
        self.register_blocks(self.pick(number), most)

    def register_blocks(self, holder: Holder, most: int):
        first = len(holder.texts)
        end = min(len(holder.token_ids) // self.size, first + most)
        self.pool.register(holder.table, holder.token_ids, first, end)
        for index in range(first, end if self.caching else first):
            above, block = holder.texts[-1] if index else self.root, holder.table[index]
            tokens = tuple(holder.token_ids[index * self.size : (index + 1) * self.size])
            if tokens not in above.below:  # else another block is found for them
                above.below[tokens] = self.found[block] = Text(above, tokens, block)
            holder.texts.append(above.below[tokens])
            self.written[block] = holder.token_ids[: (index + 1) * self.size]

    @rule(count=st.integers(1, 9))
    def come_and_go(self, count):
        """Allocate blocks and free them without content."""
        self.pool.free(self.allocate(min(count, self.num_free)))

    @precondition(lambda self: self.holders)
    @rule(number=numbers, kept=st.just(0) | st.integers(0, 4), first=st.just(0) | st.integers(1, 3))
    def give_back(self, number, kept, first):
        """All of a table or its end, and a part of that first, so that blocks are evicted in any order."""
        self.give_up(self.pick(number), kept, first)

    def give_up(self, holder: Holder, kept: int, first: int):
        blocks, holder.table = holder.table[kept:], holder.table[:kept]
        del holder.texts[kept:], holder.token_ids[kept * self.size :]
        for part in (blocks[:first], blocks[first:]):
            self.pool.free(part)
            self.unused += [block for block in reversed(part) if block in self.found and block not in self.held]
        if not holder.table:
            self.holders.remove(holder)

    @precondition(lambda self: self.holders)
    @rule(number=numbers, kept=st.integers(0, 3), gives_up=st.booleans())
    def unregister(self, number, kept, gives_up):
        """Of blocks that it gives up, or of its own, which it may register again."""
        holder = self.pick(number)
        if not gives_up:
            kept = max(kept, len(holder.table) - self.pool.num_unshared(holder.table))
        self.pool.unregister(holder.table[kept:])
        for block in holder.table[kept:]:
            if block in self.found:
                text = self.found.pop(block)
                del text.above.below[text.tokens]
        del holder.texts[kept:]
        if gives_up:
            self.give_up(holder, kept, 0)

    @rule(sure=st.integers(0, 9))
    def reset(self, sure):
        if sure == 9:
            self.pool.reset()
            self.forget_everything()

    @invariant()
    def pool_and_model_agree(self):
        assert self.pool.num_free == self.num_free
        tables = [holder.table for holder in self.holders]
        self.pool.check_invariants(tables)
        for table in tables:
            others = [block for other in tables if other is not table for block in other]
            assert self.pool.num_unshared(table) == len(set(table).difference(others))
        assert self.pool.num_held(range(1 + self.num_usable)) == len(self.held)
        for block in set(range(-2, 4 + self.num_usable)) - self.held:
            with pytest.raises(AssertionError, match=f"block {block} is not held"):
                self.pool.free([block])
            if block not in self.unused:
                with pytest.raises(AssertionError, match=f"block {block} is neither held nor cached"):
                    self.pool.share([block])
        for token_ids in [*self.wanted, *(holder.token_ids for holder in self.holders)]:
            self.find(token_ids, len(token_ids))

    def teardown(self):
        if hasattr(self, "pool"):
            for holder in self.holders:
                self.pool.free(holder.table)
            assert self.pool.num_free == self.num_usable
            self.pool.check_invariants([])


TestPoolHistory = PoolHistory.TestCase
TestPoolHistory.settings = settings(max_examples=4 * settings.default.max_examples)
