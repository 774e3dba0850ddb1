"""The pool of KV cache blocks: who holds which, and which are free. Numbers only, no tensors."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence

RESERVED_BLOCK = 0  # padded rows of a batch write here, and nobody reads it


class BlockPool:
    """Physical blocks 1 .. num_blocks - 1, handed out whole and counted by reference.

    A block is `block_size` consecutive token positions. Requests see them in order through their
    block table while they lie anywhere in the pool, so a request wastes less than one block, and no
    free block is ever too small or in the wrong place (PagedAttention, 2023).

    Every operation is O(1) per block. Free blocks are reused oldest first.
    """

    def __init__(self, num_blocks: int, block_size: int):
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}")
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is reserved), not {num_blocks}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.reset()

    def reset(self) -> None:
        """Take all blocks back from everybody."""
        self._free = deque(range(1, self.num_blocks))
        self._ref_counts = [0] * self.num_blocks

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
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for each of these blocks."""
        for block in blocks:
            self._check_held(block)
            self._ref_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One holder less for each of these blocks; without holders a block is free."""
        for block in blocks:
            self._check_held(block)
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free.append(block)

    def _check_held(self, block: int) -> None:
        if not (RESERVED_BLOCK < block < self.num_blocks and self._ref_counts[block] > 0):
            raise ValueError(f"block {block} is not held by anyone")

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
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & holders.keys(), "a held block is free"
        assert len(free) + len(holders) == self.num_usable, "a block is lost"
