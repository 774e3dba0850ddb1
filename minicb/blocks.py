"""The pool of KV cache blocks: which are held, which are free, what the prefix cache finds. No tensors."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence

NULL_BLOCK = 0  # padded rows of a batch write here, and nothing reads it
EMPTY_PREFIX = 0  # the prefix id before a request's first block

Content = tuple[int, tuple[int, ...]]  # the id of the prefix before a block, and the block's own token ids
BlockPair = tuple[int, int]  # source and destination of a copy


class BlockPool:
    """Physical blocks 1 .. num_blocks - 1, handed out whole and counted by reference.

    A request sees its blocks in order through its block table, while they lie anywhere in the pool. So it wastes less
    than one block, and no free block is ever too small or in the wrong place (PagedAttention, 2023).

    With prefix caching a full block can be found by its content: its tokens and all tokens before them. So requests
    that begin alike compute their beginning once. A free block stays findable until it, or a block before it, is
    evicted. Eviction is LRU: `allocate` takes blocks without content first, then the least recently used.

    Every operation is O(1) per block.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = False):
        if block_size < 1 or num_blocks < 1:
            raise ValueError(f"block_size and num_blocks must be at least 1, not {block_size} and {num_blocks}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._last_prefix_id = EMPTY_PREFIX  # no id is used twice
        self.reset()

    def reset(self) -> None:
        """Free all blocks and forget their content."""
        self._free = OrderedDict.fromkeys(range(1, self.num_blocks))  # a set in the order of eviction
        self._ref_counts = [0] * self.num_blocks
        self._contents: list[Content | None] = [None] * self.num_blocks  # of registered blocks
        self._prefix_ids = [EMPTY_PREFIX] * self.num_blocks  # the prefix that ends with a registered block
        self._cached: dict[Content, int] = {}

    @property
    def num_usable(self) -> int:
        """The most blocks that a single request can hold."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """ceil(num_tokens / block_size): 4 tokens fill one block of 4, the fifth needs another."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take free blocks, each with one reference, and evict their content. RuntimeError if too few are free."""
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks wanted, {len(self._free)} free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        self.unregister(blocks)
        for block in blocks:
            self._ref_counts[block], self._contents[block] = 1, None
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add a holder to each of these blocks, which are held or cached."""
        for block in blocks:
            assert self._is_held(block) or self._is_cached(block), f"block {block} is neither held nor cached"
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Remove a holder from each block of a table. A block without holders is free.

        The last block is freed first and so evicted first: without the beginning of a prefix, its end can't be found.
        """
        for block in reversed(blocks):
            assert self._is_held(block), f"block {block} is not held"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if not self._is_cached(block):
                    self._free.move_to_end(block, last=False)

    def num_unshared(self, blocks: Sequence[int]) -> int:
        """How many of these blocks have one holder, and so would be free without it."""
        return sum(self._ref_counts[block] == 1 for block in blocks)

    def num_freed(self, blocks: Sequence[int], lost: Mapping[int, int]) -> int:
        """How many of these blocks are free when each block has lost lost[block] holders."""
        return sum(self._ref_counts[block] == lost[block] for block in blocks)

    def num_held(self, blocks: Sequence[int]) -> int:
        """How many of these blocks are not free."""
        return sum(self._ref_counts[block] > 0 for block in blocks)

    # ------------------------------------------------------------------ prefix caching

    def find_prefix(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The cached blocks with the beginning of token_ids, up to num_tokens. `allocate` may evict them: `share` first."""
        size, prefix_id, blocks = self.block_size, EMPTY_PREFIX, list[int]()
        for end in range(size, num_tokens + 1, size):
            block = self._cached.get((prefix_id, tuple(token_ids[end - size : end])))
            if block is None:
                break
            blocks.append(block)
            prefix_id = self._prefix_ids[block]
        return blocks

    def register(self, block_table: Sequence[int], token_ids: Sequence[int], first: int, end: int) -> None:
        """Make the full logical blocks first .. end - 1 findable; those before them are registered.

        A block's key is the id of the prefix before it and its own tokens. So the dict compares the tokens themselves,
        not only their hashes. Of several blocks with the same content it finds the first.
        """
        if not self.enable_prefix_caching:
            return
        size = self.block_size
        for index in range(first, end):
            prefix_id = self._prefix_ids[block_table[index - 1]] if index else EMPTY_PREFIX
            block = block_table[index]
            content = (prefix_id, tuple(token_ids[index * size : (index + 1) * size]))
            self._contents[block] = content
            cached = self._cached.setdefault(content, block)
            if cached == block:
                self._last_prefix_id += 1
                self._prefix_ids[block] = self._last_prefix_id
            else:
                self._prefix_ids[block] = self._prefix_ids[cached]

    def unregister(self, blocks: Sequence[int]) -> None:
        """No request finds these blocks any more. Those that hold them keep them."""
        for block in blocks:
            if self._is_cached(block):
                del self._cached[self._contents[block]]  # type: ignore[arg-type]

    def _is_held(self, block: int) -> bool:
        return NULL_BLOCK < block < self.num_blocks and self._ref_counts[block] > 0

    def _is_cached(self, block: int) -> bool:
        content = self._contents[block] if NULL_BLOCK < block < self.num_blocks else None
        return content is not None and self._cached.get(content) == block

    def check_invariants(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the pool agrees with the block tables of all requests. O(num_blocks): for tests."""
        holders: Counter[int] = Counter()
        for table in block_tables:
            assert len(set(table)) == len(table), f"a block twice in one table: {list(table)}"
            holders.update(table)
        assert NULL_BLOCK not in holders, "the null block is in a block table"
        assert self._ref_counts == [holders[block] for block in range(self.num_blocks)], "reference counts are off"
        free = self._free.keys()
        assert not free & holders.keys(), "a held block is free"
        assert len(free) + len(holders) == self.num_usable, "a block is lost"
        assert free <= set(range(1, self.num_blocks)), "the null block, or a block outside the pool, is free"
        for content, block in self._cached.items():
            assert self._contents[block] == content, f"block {block} is cached under other tokens than it holds"
        shared = [block for block, count in holders.items() if count > 1]
        assert all(self._contents[block] is not None for block in shared), "a shared block was never registered"
