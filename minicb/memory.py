"""What requests hold: blocks of the KV cache while they run, blocks of host memory while they are swapped out."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from minicb.blocks import BlockPool
from minicb.request import Request, RequestState

BlockPair = tuple[int, int]  # source, destination
PREEMPTION_MODES = ("auto", "swap", "recompute")


class Costs(NamedTuple):
    """What it takes to get a preempted request's KV back, in seconds; the runner measures it."""

    swap_block: float = 0.0  # to copy a block to host memory and back
    recompute_token: float = math.inf  # to prefill a token


class Preemption(NamedTuple):
    """How a request was preempted, and what the two ways would have cost."""

    mode: str  # "swap" or "recompute"
    swap_seconds: float  # infinite where host memory has no room
    recompute_seconds: float
    swap_out: list[BlockPair]  # device block -> host block


class Memory:
    """Moves requests in and out of a pool of device blocks and one of host blocks.

    preemption_mode: what becomes of the KV of a request that is preempted. "swap" copies it to host
        memory, "recompute" drops it; "auto" takes the cheaper one for each request (PagedAttention,
        2023, section 4.5 has both). Where host memory is full, it is recomputed in any case.

    The copies themselves are the runner's. It does those of a plan before the plan's forward pass.
    """

    def __init__(
        self,
        pool: BlockPool,
        host_pool: BlockPool | None = None,
        preemption_mode: str = "recompute",
        costs: Costs | None = None,
    ):
        self.pool = pool
        self.host_pool = host_pool or BlockPool(1, pool.block_size)
        self.preemption_mode = preemption_mode
        self.costs = costs or Costs()

    def grow(self, request: Request, num_tokens: int) -> None:
        """See to it that the request holds blocks for its first num_tokens tokens."""
        missing = self.pool.blocks_for(num_tokens) - len(request.block_table)
        if missing > 0:
            request.block_table.extend(self.pool.allocate(missing))

    def shrink(self, request: Request, num_tokens: int) -> None:
        """Take back the blocks beyond those."""
        count = self.pool.blocks_for(num_tokens)
        self.pool.free(request.block_table[count:])
        del request.block_table[count:]

    def release(self, request: Request) -> None:
        """Take everything back, wherever it is."""
        self.pool.free(request.block_table)
        self.host_pool.free(request.host_blocks)
        self.forget(request)

    def reset(self) -> None:
        """Take everything back from everybody; `forget` does the rest for each request."""
        self.pool.reset()
        self.host_pool.reset()

    def forget(self, request: Request) -> None:
        """Empty the request's tables, whatever the pools think of them."""
        del request.block_table[:], request.host_blocks[:]
        request.num_registered_blocks = 0

    def find_prefix(self, request: Request) -> list[int]:
        """Cached blocks with which the request can begin. Its last token is always left to compute,
        because its logits are wanted."""
        return self.pool.find_prefix(request.token_ids, request.num_tokens - 1)

    def num_missing(self, request: Request, prefix: Sequence[int]) -> int:
        """How many free blocks it takes until all known tokens of the request have one.

        A block of the prefix that somebody holds costs nothing; one that is free does, because it
        counts among the free ones until then.
        """
        return self.pool.blocks_for(request.num_tokens) - self.pool.num_held(prefix)

    def place(self, request: Request, prefix: Sequence[int]) -> list[BlockPair]:
        """Give a request that starts or comes back what is already computed of it.

        Its prefix is shared, the rest of what was swapped out is to be copied into new blocks: returns
        host block -> device block.
        """
        self.pool.share(prefix)  # before anything is allocated, which might reuse it
        request.block_table.extend(prefix)
        request.num_registered_blocks = len(prefix)
        request.num_computed_tokens = max(request.num_computed_tokens, len(prefix) * self.pool.block_size)
        self.grow(request, request.num_computed_tokens)
        known = len(prefix)
        swap_in = list(zip(request.host_blocks[known:], request.block_table[known:], strict=True))
        self.host_pool.free(request.host_blocks)
        del request.host_blocks[:]
        return swap_in

    def preempt(self, request: Request) -> Preemption:
        """Take all device blocks of a running request back."""
        preemption = self._choose(request)
        if preemption.mode == "swap":
            hosts = self.host_pool.allocate(len(request.block_table))
            preemption.swap_out.extend(zip(request.block_table, hosts, strict=True))
            self.release(request)
            request.host_blocks.extend(hosts)
            request.state = RequestState.SWAPPED
        else:
            self.release(request)
            request.num_computed_tokens = 0
            request.state = RequestState.WAITING
        return preemption

    def _choose(self, request: Request) -> Preemption:
        """Compare the time of the copies, both ways, with that of a prefill of the tokens that are lost.

        A block that others hold is copied as well, as they may let go of it. But it needn't come back or
        be computed again as long as they don't: it is found in the prefix cache.
        """
        table, swap = request.block_table, math.inf
        num_lost = self.pool.num_unshared(table)
        num_tokens = request.num_computed_tokens - (len(table) - num_lost) * self.pool.block_size
        recompute = num_tokens * self.costs.recompute_token if num_tokens else 0.0
        if len(table) <= self.host_pool.num_free:
            swap = (len(table) + num_lost) / 2 * self.costs.swap_block
        if swap == math.inf or not table or self.preemption_mode == "recompute":
            mode = "recompute"
        elif self.preemption_mode == "swap":
            mode = "swap"
        else:
            mode = "swap" if swap < recompute else "recompute"
        return Preemption(mode, swap, recompute, [])

    def register(self, request: Request) -> None:
        """Let others find the request's full blocks."""
        full = request.num_computed_tokens // self.pool.block_size
        if full > request.num_registered_blocks:
            self.pool.register(request.block_table, request.token_ids, request.num_registered_blocks, full)
            request.num_registered_blocks = full

    def check_invariants(self, requests: Sequence[Request]) -> None:
        """Raise AssertionError unless each request holds exactly the blocks of its computed tokens."""
        self.pool.check_invariants(request.block_table for request in requests)
        self.host_pool.check_invariants(request.host_blocks for request in requests)
        for request in requests:
            count = self.pool.blocks_for(request.num_computed_tokens)
            swapped = request.state is RequestState.SWAPPED
            held = (len(request.block_table), len(request.host_blocks))
            assert held == ((0, count) if swapped else (count, 0)), f"{request} holds {held} blocks"
