"""The pool of KV cache blocks: who holds which, which are free, what is in them. Numbers only, no tensors."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

RESERVED_BLOCK = 0  # padded rows of a batch write here, and nobody reads it
NO_PREFIX = 0  # the id of what comes before a request's first block; it may have another, below 0 (its root)

Content = tuple[int, tuple[int, ...]]  # id of the prefix before a block, and the block's own token ids
BlockPair = tuple[int, int]  # source and destination of a copy


class BlockPool:
    """Physical blocks 1 .. num_blocks - 1, handed out whole and counted by reference.

    A block is `block_size` consecutive token positions. Requests see them in order through their
    block table while they lie anywhere in the pool, so a request wastes less than one block, and no
    free block is ever too small or in the wrong place (PagedAttention, 2023).

    With prefix caching a full block can be found by what is in it: its tokens and all before them.
    It stays findable when it is free, until it or a block before it is reused, so requests that begin
    alike compute their beginning once. Free blocks with nothing to find are reused first, then the one unused for longest.

    Every operation is O(1) per block.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = False):
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}")
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1 (block 0 is reserved), not {num_blocks}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_registered = 0  # ever; also the last prefix id given, none of which is used twice
        self.reset()

    def reset(self) -> None:
        """Take all blocks back from everybody and forget what is in them."""
        self._free = OrderedDict.fromkeys(range(1, self.num_blocks))  # a set in the order of reuse
        self._ref_counts = [0] * self.num_blocks
        self._contents: list[Content | None] = [None] * self.num_blocks  # of registered blocks
        self._prefix_ids = [NO_PREFIX] * self.num_blocks  # of all tokens up to a registered block's end
        self._cached: dict[Content, int] = {}

    @property
    def num_usable(self) -> int:
        """Blocks that a single request could hold."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """ceil(num_tokens / block_size): 4 tokens fill one block of 4, the fifth needs another."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one reference. Callers look at num_free first."""
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks wanted, {len(self._free)} free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
            content, self._contents[block] = self._contents[block], None
            if content is not None and self._cached.get(content) == block:
                del self._cached[content]
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for each of these blocks, which are held or cached."""
        for block in blocks:
            if not self._is_held(block) and not self._is_cached(block):
                raise ValueError(f"block {block} is neither held by anyone nor cached")
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One holder less for each block of a table; without holders a block is free.

        Freed from the end, so that the later blocks of a prefix are reused before the earlier ones,
        without which nobody could find them.
        """
        for block in reversed(blocks):
            if not self._is_held(block):
                raise ValueError(f"block {block} is not held by anyone")
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if not self._is_cached(block):
                    self._free.move_to_end(block, last=False)

    def num_unshared(self, blocks: Sequence[int]) -> int:
        """How many of these have one holder only, and so would be free without it."""
        return sum(self._ref_counts[block] == 1 for block in blocks)

    def num_held(self, blocks: Sequence[int]) -> int:
        """How many of these are not free."""
        return sum(self._ref_counts[block] > 0 for block in blocks)

    # ------------------------------------------------------------------ prefix caching

    def find_prefix(self, token_ids: Sequence[int], num_tokens: int, root: int = NO_PREFIX) -> list[int]:
        """The blocks that hold the beginning of token_ids, as far as it is cached under this root, up to num_tokens.

        They are nobody's until they are shared: call `share` before `allocate` reuses them.
        """
        size, prefix_id, blocks = self.block_size, root, list[int]()
        for end in range(size, num_tokens + 1, size):
            block = self._cached.get((prefix_id, tuple(token_ids[end - size : end])))
            if block is None:
                break
            blocks.append(block)
            prefix_id = self._prefix_ids[block]
        return blocks

    def register(
        self, block_table: Sequence[int], token_ids: Sequence[int], first: int, end: int, root: int = NO_PREFIX
    ) -> None:
        """Make logical blocks first .. end - 1 findable: full, computed, those before them registered. A request
        with a root of its own is only found by those with the same, and that without prefix caching too.

        The key of a block is the id of the prefix before it and its own tokens, so a dict hashes along
        the chain and compares the tokens themselves: equal hashes are never taken for equal text. Of
        blocks that were computed side by side with the same content only the first is ever found, and
        when that is reused, what the others hold isn't found in its place.
        """
        if root == NO_PREFIX and not self.enable_prefix_caching:
            return
        size = self.block_size
        for index in range(first, end):
            prefix_id = self._prefix_ids[block_table[index - 1]] if index else root
            block = block_table[index]
            content = (prefix_id, tuple(token_ids[index * size : (index + 1) * size]))
            self._contents[block] = content
            cached = self._cached.setdefault(content, block)
            if cached == block:
                self.num_registered += 1
                self._prefix_ids[block] = self.num_registered
            else:
                self._prefix_ids[block] = self._prefix_ids[cached]

    def _is_held(self, block: int) -> bool:
        return RESERVED_BLOCK < block < self.num_blocks and self._ref_counts[block] > 0

    def _is_cached(self, block: int) -> bool:
        content = self._contents[block] if RESERVED_BLOCK < block < self.num_blocks else None
        return content is not None and self._cached.get(content) == block

    def check_invariants(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the pool agrees with the block tables of all requests.

        O(num_blocks): for tests, not for every step.
        """
        holders: Counter[int] = Counter()
        for table in block_tables:
            assert len(set(table)) == len(table), f"a block twice in one table: {list(table)}"
            holders.update(table)
        assert RESERVED_BLOCK not in holders, "block 0 is reserved but in a block table"
        assert self._ref_counts == [holders[block] for block in range(self.num_blocks)], "reference counts are off"
        free = self._free.keys()
        assert not free & holders.keys(), "a held block is free"
        assert len(free) + len(holders) == self.num_usable, "a block is lost"
        assert free <= set(range(1, self.num_blocks)), "a block is free that nobody may have"
        for content, block in self._cached.items():
            assert self._contents[block] == content, f"block {block} is found for what isn't in it"
        shared = [block for block, count in holders.items() if count > 1]
        assert all(self._contents[block] is not None for block in shared), "a shared block isn't a full, computed one"
