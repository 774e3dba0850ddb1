"""What requests hold: blocks of the KV cache while they run, blocks of host memory while they are swapped out."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from minicb.blocks import NO_PREFIX, BlockPair, BlockPool
from minicb.request import Request, RequestState

PREEMPTION_MODES = ("auto", "swap", "recompute")


class Costs(NamedTuple):
    """What a preemption costs, in seconds; infinite where nothing was measured.

    Measured by HostCache.measure and ModelRunner._measure_prefill. That a token of a long prefill takes
    longer than one of a short prefill is left out.
    """

    swap_block: float = math.inf  # to copy a block to host memory and back
    recompute_token: float = math.inf  # to prefill a token


class Choice(NamedTuple):
    """How to preempt a request, and the estimates behind it."""

    mode: str  # "swap" or "recompute"
    swap_seconds: float  # infinite where host memory has no room
    recompute_seconds: float


class Memory:
    """Moves requests in and out of a pool of device blocks and one of host blocks.

    preemption_mode: what becomes of the KV of a request that is preempted. "swap" copies it to host
        memory while there is room, else drops it, as "recompute" always does; "auto" takes the cheaper
        way for each request (PagedAttention, 2023, section 4.5 has both).

    The runner makes the copies, before the plan's forward pass, so blocks are free at once and may be
    handed on within the same plan. swap.py sees to it that nothing is overwritten before it is copied.
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
        self._too_large: tuple[Request | None, int] = (None, 0)  # whom find_room refused last, and why

    def grow(self, request: Request, num_tokens: int) -> None:
        """Make sure that the request holds blocks for its first num_tokens tokens; RuntimeError if too few are free."""
        missing = self.pool.blocks_for(num_tokens) - len(request.block_table)
        if missing > 0:
            request.block_table.extend(self.pool.allocate(missing))

    def shrink(self, request: Request, num_tokens: int) -> None:
        """Take back the blocks beyond its first num_tokens tokens."""
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
        """Empty the request's tables without touching the pools."""
        del request.block_table[:], request.host_blocks[:]
        request.num_registered_blocks = 0

    def find_room(self, request: Request, num_free: int) -> list[int] | None:
        """The cached blocks that the request can begin with, if num_free more are enough for the rest; else None.

        To be called for the same request until it fits. Meanwhile no block gains a holder, so the number
        that is missing falls only when running requests register blocks, by one for each. The prefix is
        looked up again only when that may have been enough: prompts are long, and this is every step's.
        """
        num_registered = self.pool.num_registered
        if request is self._too_large[0] and self._too_large[1] - num_registered > num_free:
            return None
        cached_blocks = self.find_prefix(request)
        missing = self.num_missing(request, cached_blocks)
        self._too_large = (request, missing + num_registered) if missing > num_free else (None, 0)
        return cached_blocks if missing <= num_free else None

    def find_prefix(self, request: Request) -> list[int]:
        """Cached blocks with which the request can begin. Its last token is always left to compute,
        because its logits are wanted."""
        return self.pool.find_prefix(request.token_ids, request.num_tokens - 1, self._root(request))

    def _root(self, request: Request) -> int:
        """Whose blocks does the request find, and who finds its? Without prefix caching those of the other samples of
        its prompt, which have a root of their own."""
        if request.group is None or self.pool.enable_prefix_caching:
            return NO_PREFIX
        return NO_PREFIX - 1 - request.group.samples[0].arrival

    def num_missing(self, request: Request, cached_blocks: Sequence[int]) -> int:
        """How many free blocks it takes until all known tokens of the request have one.

        A cached block that somebody holds costs nothing; one that is free does, because it counts
        among the free ones until then.
        """
        return self.pool.blocks_for(request.num_tokens) - self.pool.num_held(cached_blocks)

    def place(self, request: Request, cached_blocks: Sequence[int]) -> list[BlockPair]:
        """Give a request that starts or comes back what is already computed of it.

        What find_prefix found is shared, the rest of what was swapped out is to be copied into new
        blocks: returns host block -> device block.
        """
        self.pool.share(cached_blocks)  # before anything is allocated, which might reuse them
        request.block_table.extend(cached_blocks)
        request.num_registered_blocks = known = len(cached_blocks)
        request.num_computed_tokens = max(request.num_computed_tokens, known * self.pool.block_size)
        self.grow(request, request.num_computed_tokens)
        swap_in = list(zip(request.host_blocks[known:], request.block_table[known:], strict=True))
        self.host_pool.free(request.host_blocks)
        del request.host_blocks[:]
        return swap_in

    def preempt(self, request: Request, mode: str) -> list[BlockPair]:
        """Take all device blocks of a running request back; returns device block -> host block."""
        swap_out = list[BlockPair]()
        if mode == "swap":
            hosts = self.host_pool.allocate(len(request.block_table))
            swap_out = list(zip(request.block_table, hosts, strict=True))
            self.release(request)
            request.host_blocks.extend(hosts)
            request.state = RequestState.SWAPPED
        else:
            self.release(request)
            request.num_computed_tokens = 0
            request.state = RequestState.WAITING
        return swap_out

    def choose(self, request: Request) -> Choice:
        """Compare the copies there and back with a prefill of the tokens that are lost.

        Blocks that others hold are copied out as well, as the others may free them. But a block that is
        still cached when the request returns is neither copied back nor computed again. (Some of its own
        may be, too; that isn't counted on.)
        """
        num_blocks, size = len(request.block_table), self.pool.block_size
        if num_blocks == 0:  # in a static batch a request may run and hold nothing yet
            return Choice("recompute", 0.0, 0.0)
        num_lost = self.pool.num_unshared(request.block_table)
        num_lost_tokens = request.num_computed_tokens - (num_blocks - num_lost) * size
        recompute = num_lost_tokens * self.costs.recompute_token if num_lost_tokens else 0.0  # 0 * inf is NaN
        if num_blocks > self.host_pool.num_free:
            return Choice("recompute", math.inf, recompute)
        swap = (num_blocks + num_lost) / 2 * self.costs.swap_block  # all go out, the lost come back
        if self.preemption_mode == "auto":
            return Choice("swap" if swap < recompute else "recompute", swap, recompute)
        return Choice(self.preemption_mode, swap, recompute)

    def register(self, request: Request) -> None:
        """Let others find the request's full blocks. To be called when a token was sampled from them."""
        full = request.num_computed_tokens // self.pool.block_size
        if full > request.num_registered_blocks:
            first, root = request.num_registered_blocks, self._root(request)
            self.pool.register(request.block_table, request.token_ids, first, full, root)
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
