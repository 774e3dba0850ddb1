"""What requests hold: blocks of the KV cache while they run, blocks of host memory while they are swapped out."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from minicb.blocks import BlockPair, BlockPool
from minicb.request import Request, RequestState

PREEMPTION_MODES = ("auto", "swap", "recompute")


class PreemptionCosts(NamedTuple):
    """What a preemption costs, in seconds, as measured by the runner; infinite where it measured nothing."""

    swap_block: float = math.inf  # to copy a block to host memory and back
    recompute_token: float = math.inf  # to prefill a token, however long its prompt is


class PreemptionChoice(NamedTuple):
    """How to preempt a request, with the estimates behind it."""

    mode: str  # "swap" or "recompute"
    swap_seconds: float  # infinite where host memory has no room
    recompute_seconds: float


CANCELLED = PreemptionChoice("recompute", math.inf, math.inf)  # no choice: the step that admitted it failed


class Memory:
    """The KV cache manager: moves requests in and out of a pool of device blocks and a pool of host blocks.

    preemption_mode: "swap" copies the KV of a preempted request to host memory, and drops it if there is no room.
        "recompute" always drops it. "auto" takes the cheaper way for each request. (PagedAttention, 2023, section 4.5.)

    Blocks are free as soon as their copy is planned, because the runner makes a plan's copies before its forward pass,
    and swap_out before swap_in.
    """

    def __init__(
        self,
        pool: BlockPool,
        host_pool: BlockPool | None = None,
        preemption_mode: str = "recompute",
        costs: PreemptionCosts | None = None,
    ):
        self.pool = pool
        self.host_pool = host_pool or BlockPool(1, pool.block_size)
        self.preemption_mode = preemption_mode
        self.costs = costs or PreemptionCosts()

    # ------------------------------------------------------------------ blocks of a running request

    def grow(self, request: Request, num_tokens: int) -> None:
        """Allocate the blocks that its first num_tokens tokens lack. RuntimeError if too few are free."""
        missing = self.pool.blocks_for(num_tokens) - len(request.block_table)
        if missing > 0:
            request.block_table.extend(self.pool.allocate(missing))

    def register(self, request: Request, num_tokens: int) -> None:
        """Let others find the full blocks of the request's first num_tokens tokens, computed by now or in this step.

        Every layer writes K and V of all tokens of a step before it attends, so requests of one step can share them.
        """
        full = num_tokens // self.pool.block_size
        if full > request.num_registered_blocks:
            self.pool.register(request.block_table, request.token_ids, request.num_registered_blocks, full)
            request.num_registered_blocks = full

    def rewind(self, request: Request, num_tokens: int) -> None:
        """Take back all blocks, and all registered ones, beyond the request's first num_tokens tokens."""
        full, count = num_tokens // self.pool.block_size, self.pool.blocks_for(num_tokens)
        self.pool.unregister(request.block_table[full:])
        request.num_registered_blocks = min(request.num_registered_blocks, full)
        self.pool.free(request.block_table[count:])
        del request.block_table[count:]

    def release(self, request: Request) -> None:
        """Free all blocks of the request, on the device and in host memory."""
        self.pool.free(request.block_table)
        self.host_pool.free(request.host_blocks)
        del request.block_table[:], request.host_blocks[:]
        request.num_registered_blocks = 0

    def reset(self, requests: Sequence[Request]) -> None:
        """Empty both pools and the block tables of all requests, whether they agree or not."""
        self.pool.reset()
        self.host_pool.reset()
        for request in requests:
            del request.block_table[:], request.host_blocks[:]

    # ------------------------------------------------------------------ a request starts or returns

    def find_prefix(self, request: Request) -> list[int]:
        """The cached blocks that the request can begin with. Its last token is left: its logits are needed."""
        return self.pool.find_prefix(request.token_ids, request.num_tokens - 1)

    def num_missing(self, request: Request, cached_blocks: Sequence[int]) -> int:
        """Free blocks that all known tokens of the request take. A cached block that is free takes one: itself."""
        return self.pool.blocks_for(request.num_tokens) - self.pool.num_held(cached_blocks)

    def restore(self, request: Request, cached_blocks: Sequence[int]) -> list[BlockPair]:
        """Give a request that starts or returns its computed part: the cached blocks, and new ones for the rest of
        what was swapped out. Returns the copies that fill these, (host block, device block)."""
        self.pool.share(cached_blocks)  # before `grow`, which might evict them
        request.block_table.extend(cached_blocks)
        request.num_registered_blocks = known = len(cached_blocks)
        request.num_computed_tokens = max(request.num_computed_tokens, known * self.pool.block_size)
        self.grow(request, request.num_computed_tokens)
        swap_in = list(zip(request.host_blocks[known:], request.block_table[known:], strict=True))
        self.host_pool.free(request.host_blocks)
        del request.host_blocks[:]
        return swap_in

    # ------------------------------------------------------------------ preemption

    def choose(self, request: Request) -> PreemptionChoice:
        """Compare the copies to host memory and back with a prefill of the lost tokens.

        Swapping copies all blocks out, because other holders of a shared block may free it. Shared blocks are not lost:
        they are likely to be cached when the request returns. Its own blocks may be, too; the estimate ignores that.
        """
        num_blocks, size = len(request.block_table), self.pool.block_size
        if num_blocks == 0:  # in a static batch a request may run before it holds a block
            return PreemptionChoice("recompute", 0.0, 0.0)
        num_lost = self.pool.num_unshared(request.block_table)
        num_lost_tokens = request.num_computed_tokens - (num_blocks - num_lost) * size
        recompute = num_lost_tokens * self.costs.recompute_token if num_lost_tokens else 0.0  # 0 * inf is NaN
        if num_blocks > self.host_pool.num_free:
            return PreemptionChoice("recompute", math.inf, recompute)
        swap = (num_blocks + num_lost) / 2 * self.costs.swap_block  # all go out, the lost ones come back
        if self.preemption_mode == "auto":
            return PreemptionChoice("swap" if swap < recompute else "recompute", swap, recompute)
        return PreemptionChoice(self.preemption_mode, swap, recompute)

    def preempt(self, request: Request, mode: str) -> list[BlockPair]:
        """Free all blocks of the request. Returns the copies to make before, (device block, host block)."""
        if mode == "swap":
            host_blocks = self.host_pool.allocate(len(request.block_table))
            swap_out = list(zip(request.block_table, host_blocks, strict=True))
            self.release(request)
            request.host_blocks.extend(host_blocks)
            request.state = RequestState.SWAPPED
            return swap_out
        self.release(request)
        request.num_computed_tokens = 0
        request.state = RequestState.WAITING
        return []

    def check_invariants(self, requests: Sequence[Request]) -> None:
        """Raise AssertionError unless each request holds exactly the blocks of its computed tokens."""
        self.pool.check_invariants(request.block_table for request in requests)
        self.host_pool.check_invariants(request.host_blocks for request in requests)
        for request in requests:
            count = self.pool.blocks_for(request.num_computed_tokens)
            swapped = request.state is RequestState.SWAPPED
            held = (len(request.block_table), len(request.host_blocks))
            assert held == ((0, count) if swapped else (count, 0)), f"{request} holds {held} blocks"
