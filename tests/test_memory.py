"""minicb/memory.py: what a request holds, where that goes when it is preempted, and that it is all there when the
request returns."""

import math
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minicb import SamplingParams
from minicb.blocks import BlockPair, BlockPool
from minicb.memory import PREEMPTION_MODES, Memory, PreemptionCosts
from minicb.request import Request, RequestState


def make_memory(
    num_usable=10, num_host=10, *, block_size=4, mode="swap", swap_block=1.0, recompute_token=1.0, caching=True
) -> Memory:
    return Memory(
        BlockPool(1 + num_usable, block_size, caching),
        BlockPool(1 + num_host, block_size),
        mode,
        PreemptionCosts(swap_block, recompute_token),
    )


def make_request(token_ids) -> Request:
    return Request("a", token_ids, SamplingParams())


class Preemption(NamedTuple):
    mode: str
    swap_seconds: float
    recompute_seconds: float
    swap_out: list[BlockPair]


def preempt(memory: Memory, request: Request) -> Preemption:
    """As the scheduler does it."""
    choice = memory.choose(request)
    return Preemption(*choice, memory.preempt(request, choice.mode))


def start(memory: Memory, token_ids, num_computed: int, register: bool = True) -> Request:
    """A running request with the first num_computed of its tokens computed."""
    request = make_request(token_ids)
    memory.restore(request, memory.find_prefix(request))
    request.state = RequestState.RUNNING
    compute(memory, request, num_computed, register)
    return request


def compute(memory: Memory, request: Request, num_computed: int, register: bool = True) -> None:
    memory.grow(request, num_computed)
    request.num_computed_tokens = max(num_computed, request.num_computed_tokens)
    if register:
        memory.register(request, request.num_computed_tokens)


def come_back(memory: Memory, request: Request, *others: Request) -> list[BlockPair]:
    """As the scheduler brings it back. num_missing is the number of blocks that it takes to hold all tokens."""
    prefix = memory.find_prefix(request)
    missing, free = memory.num_missing(request, prefix), memory.pool.num_free
    pairs = memory.restore(request, prefix)
    request.state = RequestState.RUNNING
    table = list(request.block_table)
    memory.grow(request, request.num_tokens)
    assert free - memory.pool.num_free == missing
    memory.rewind(request, request.num_computed_tokens)
    assert list(request.block_table) == table
    memory.check_invariants([request, *others])
    return pairs


# ---------------------------------------------------------------------------- a request on the device


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_a_request_grows_to_just_the_blocks_of_its_tokens_and_rewinds_to_them(block_size):
    """grow never takes a block back, and rewind never takes one more."""
    memory = make_memory(block_size=block_size)
    request = make_request(range(9))
    for count in range(2 * block_size + 2):
        memory.grow(request, count)
        assert len(request.block_table) == memory.pool.blocks_for(count)
        table = list(request.block_table)
        memory.grow(request, max(0, count - block_size))
        memory.rewind(request, count)
        memory.rewind(request, count + 1)
        assert list(request.block_table) == table
    for count in reversed(range(2 * block_size + 2)):
        memory.rewind(request, count)
        assert list(request.block_table) == table[: memory.pool.blocks_for(count)]
        memory.pool.check_invariants([request.block_table])


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_rewinding_takes_back_what_was_registered_beyond(block_size):
    """A block that a plan was to fill is not found, whether it is freed or keeps a part, and not by those either who
    share it since. Filled and registered again, it is."""
    text = range(3 * block_size + 1)
    for num_computed in range(3 * block_size + 1):
        memory = make_memory(block_size=block_size)
        request = start(memory, text, num_computed)
        memory.grow(request, 3 * block_size)
        memory.register(request, 3 * block_size)
        other = start(memory, text, 3 * block_size)
        assert other.block_table == request.block_table
        memory.rewind(request, num_computed)
        full = num_computed // block_size
        assert request.num_registered_blocks == full
        assert memory.find_prefix(make_request(text)) == list(request.block_table[:full])
        memory.check_invariants([request, other])
        memory.release(other)
        memory.check_invariants([request])
        compute(memory, request, 3 * block_size)
        assert memory.find_prefix(make_request(text)) == list(request.block_table)
        assert request.num_registered_blocks == 3


def test_growing_beyond_the_pool_raises_and_takes_nothing():
    memory = make_memory(num_usable=2)
    request = make_request(range(20))
    memory.grow(request, 4)
    with pytest.raises(RuntimeError, match="2 blocks wanted, 1 free"):
        memory.grow(request, 9)
    memory.pool.check_invariants([request.block_table])


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_the_last_token_is_always_left_to_compute(block_size):
    """The step needs its logits, so the last block of a prompt that is cached whole is computed again."""
    memory = make_memory(block_size=block_size)
    text = range(2 * block_size + 1)
    first = start(memory, text, len(text))
    for length in range(1, len(text) + 1):
        request = make_request(text[:length])
        prefix = memory.find_prefix(request)
        assert prefix == list(first.block_table[: (length - 1) // block_size])
        assert memory.restore(request, prefix) == []
        assert list(request.block_table) == prefix
        assert request.num_computed_tokens == len(prefix) * block_size
        assert request.num_registered_blocks == len(prefix)
        assert request.num_uncomputed >= 1
        memory.check_invariants([first, request])
        memory.release(request)


def test_a_cached_block_counts_as_missing_if_it_is_free():
    """It is one of the free blocks that are left for the request."""
    memory = make_memory(num_usable=4)
    first = start(memory, range(20), 10)
    again = make_request(range(12))
    prefix = memory.find_prefix(again)
    assert len(prefix) == 2
    assert memory.num_missing(again, prefix) == 1
    assert memory.num_missing(again, []) == 3
    memory.pool.free([first.block_table.pop(), first.block_table.pop()])
    assert memory.num_missing(again, prefix) == 2
    memory.release(first)
    assert memory.num_missing(again, prefix) == 3
    assert memory.num_missing(make_request([7]), []) == 1


def test_full_blocks_are_registered_each_once():
    """7 tokens fill one block of 4. Registering all of them at every token would take quadratic time."""
    memory = make_memory()
    calls = []
    register = memory.pool.register
    memory.pool.register = lambda *args: (calls.append(args[2:]), register(*args))
    request = start(memory, range(20), 3)
    assert (request.num_registered_blocks, calls) == (0, [])
    compute(memory, request, 7)
    compute(memory, request, 7)
    assert (request.num_registered_blocks, calls) == (1, [(0, 1)])
    compute(memory, request, 16)
    memory.register(request, 8)  # fewer than before: no effect
    assert (request.num_registered_blocks, calls) == (4, [(0, 1), (1, 4)])
    assert memory.find_prefix(make_request(range(20))) == list(request.block_table)
    other = start(memory, range(20), 20)
    assert (other.num_registered_blocks, calls[2:]) == (5, [(4, 5)])


def test_blocks_that_were_not_registered_are_not_found():
    memory = make_memory()
    start(memory, range(20), 16, register=False)
    assert memory.find_prefix(make_request(range(20))) == []


@pytest.mark.parametrize("where", ["running", "swapped", "nowhere"])
def test_release_frees_all_blocks_wherever_they_are(where):
    memory = make_memory()
    request = make_request(range(9)) if where == "nowhere" else start(memory, range(9), 9)
    if where == "swapped":
        preempt(memory, request)
        assert memory.host_pool.num_free == 7
    for _ in range(2):  # the second time it holds nothing
        memory.release(request)
        assert (memory.pool.num_free, memory.host_pool.num_free) == (10, 10)
        assert (list(request.block_table), list(request.host_blocks), request.num_registered_blocks) == ([], [], 0)
    memory.pool.check_invariants([])


def test_reset_empties_pools_and_tables_whether_they_agree_or_not():
    memory = make_memory()
    running, swapped = start(memory, range(9), 9), start(memory, range(9), 9)
    preempt(memory, swapped)
    running.block_table.append(running.block_table[0])
    memory.reset([running, swapped])
    for request in (running, swapped):
        assert (list(request.block_table), list(request.host_blocks)) == ([], [])
        memory.release(request)
    assert (memory.pool.num_free, memory.host_pool.num_free) == (10, 10)
    assert memory.find_prefix(running) == []
    memory.pool.check_invariants([])
    memory.host_pool.check_invariants([])


# ---------------------------------------------------------------------------- swap


def test_a_swapped_request_returns_with_all_it_had():
    memory = make_memory(caching=False)
    request = start(memory, range(12), 10)
    table = list(request.block_table)
    preemption = preempt(memory, request)
    hosts = list(request.host_blocks)
    assert (preemption.mode, preemption.swap_out) == ("swap", list(zip(table, hosts, strict=True)))
    assert (request.state, list(request.block_table), request.num_computed_tokens) == (RequestState.SWAPPED, [], 10)
    assert len(set(hosts)) == 3
    assert (memory.pool.num_free, memory.host_pool.num_free) == (10, 7)
    memory.check_invariants([request])

    other = make_request(range(4))  # so it gets other blocks when it returns
    memory.grow(other, 4)
    assert memory.num_missing(request, []) == 3
    pairs = memory.restore(request, [])
    assert pairs == list(zip(hosts, request.block_table, strict=True))
    assert (len(request.block_table), list(request.host_blocks), request.num_computed_tokens) == (3, [], 10)
    assert memory.host_pool.num_free == 10


def test_a_cached_block_is_not_evicted_for_the_rest_of_its_request():
    """The block with the beginning is the next to be evicted, and the request needs two more."""
    memory = make_memory(num_usable=3)
    request = start(memory, range(16), 11)
    preempt(memory, request)
    memory.release(start(memory, range(50, 58), 8))  # in the two others
    prefix, hosts = memory.find_prefix(request), list(request.host_blocks)
    assert len(prefix) == 1
    pairs = memory.restore(request, prefix)
    request.state = RequestState.RUNNING
    memory.check_invariants([request])
    assert list(request.block_table[:1]) == prefix
    assert pairs == list(zip(hosts[1:], request.block_table[1:], strict=True))


@pytest.mark.parametrize("num_computed, num_copied", [(3, 0), (4, 0), (7, 0), (8, 0), (9, 1), (12, 1), (13, 2)])
def test_a_request_may_return_with_more_than_it_had(num_computed, num_copied):
    """Another request has computed the same 8 tokens meanwhile. A cached block is never copied, even if it was
    computed in part before."""
    memory = make_memory()
    request = start(memory, range(20), num_computed, register=False)
    preempt(memory, request)
    hosts = list(request.host_blocks)
    other = start(memory, range(9), 9)
    pairs = come_back(memory, request, other)
    assert list(request.block_table[:2]) == list(other.block_table[:2])
    assert pairs == list(zip(hosts[2:], request.block_table[2:], strict=True))
    assert len(pairs) == num_copied
    assert request.num_computed_tokens == max(8, num_computed)
    assert (request.num_registered_blocks, memory.host_pool.num_free) == (2, 10)


@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_without_host_memory_requests_are_recomputed(mode):
    memory = Memory(BlockPool(10, 4), preemption_mode=mode)
    assert preempt(memory, start(memory, range(12), 9)) == Preemption("recompute", math.inf, math.inf, [])


# ---------------------------------------------------------------------------- recompute


def test_a_recomputed_request_begins_again_with_what_the_prefix_cache_still_has():
    """Of prompt and output."""
    memory = make_memory(num_usable=5, mode="recompute")
    request = start(memory, range(3), 3)
    request.token_ids += range(3, 13)
    compute(memory, request, 10)
    table = list(request.block_table)
    assert preempt(memory, request) == Preemption("recompute", 3.0, 10.0, [])
    assert (request.state, list(request.block_table), list(request.host_blocks)) == (RequestState.WAITING, [], [])
    assert (request.num_computed_tokens, request.num_registered_blocks) == (0, 0)
    assert (memory.pool.num_free, memory.host_pool.num_free) == (5, 10)
    memory.check_invariants([request])
    assert come_back(memory, request) == []
    assert (list(request.block_table), request.num_computed_tokens, request.num_registered_blocks) == (table[:2], 8, 2)

    preempt(memory, request)
    memory.pool.free(memory.pool.allocate(4))  # the end of the prefix is evicted first
    assert come_back(memory, request) == []
    assert (list(request.block_table), request.num_computed_tokens) == (table[:1], 4)


# ---------------------------------------------------------------------------- which of the two


@pytest.mark.parametrize(
    "num_computed, swap_block, recompute_token, mode",
    [
        (12, 4.0, 1.001, "swap"),
        (12, 4.0, 1.0, "recompute"),  # equally fast: then host memory is left to those who need it
        (12, 4.0, 0.999, "recompute"),
        (9, 2.99, 1.0, "swap"),  # 3 whole blocks are copied
        (9, 3.0, 1.0, "recompute"),  # but only 9 tokens are computed
        (1, 0.0, math.inf, "swap"),
        (8, math.inf, 1.0, "recompute"),
    ],
)
def test_auto_takes_the_faster_one(num_computed, swap_block, recompute_token, mode):
    memory = make_memory(mode="auto", swap_block=swap_block, recompute_token=recompute_token)
    request = start(memory, range(20), num_computed)
    num_blocks = len(request.block_table)
    preemption = preempt(memory, request)
    assert preemption[:3] == (mode, num_blocks * swap_block, num_computed * recompute_token)
    assert len(preemption.swap_out) == len(request.host_blocks) == (num_blocks if mode == "swap" else 0)
    assert request.state is (RequestState.SWAPPED if mode == "swap" else RequestState.WAITING)
    memory.check_invariants([request])


@pytest.mark.parametrize("mode", [{"preemption_mode": "auto"}, {}])
def test_without_measurements_and_by_default_a_request_is_recomputed(mode):
    memory = Memory(BlockPool(10, 4), BlockPool(10, 4), **mode)
    assert preempt(memory, start(memory, range(9), 5))[:3] == ("recompute", math.inf, math.inf)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_fixed_mode_is_taken_whatever_it_costs(mode):
    """Both estimates are reported."""
    for swap_block, recompute_token in ((1.0, 9.0), (9.0, 1.0)):
        memory = make_memory(mode=mode, swap_block=swap_block, recompute_token=recompute_token)
        preemption = preempt(memory, start(memory, range(9), 4))
        assert preemption[:3] == (mode, swap_block, 4 * recompute_token)


@pytest.mark.parametrize(
    "num_computed, num_shared, swap_block, mode",
    [
        (12, 0, 3.9, "swap"),
        (12, 1, 3.3, "recompute"),
        (12, 1, 3.1, "swap"),
        (12, 2, 2.0, "recompute"),
        (12, 2, 1.9, "swap"),
        (12, 3, 0.1, "recompute"),
        (12, 3, 0.0, "recompute"),
        (9, 2, 0.5, "recompute"),  # one token is lost, not a block
        (9, 2, 0.4, "swap"),
    ],
)
def test_blocks_that_others_hold_are_not_lost(num_computed, num_shared, swap_block, mode):
    """They are found when the request returns, so they need neither a prefill nor a copy back. They are copied out,
    because the others may free them."""
    memory = make_memory(mode="auto", swap_block=swap_block)
    request = start(memory, range(20), num_computed)
    other = start(memory, [*range(4 * num_shared), 99], 4 * num_shared + 1)
    table = list(request.block_table)
    preemption = preempt(memory, request)
    assert preemption[:3] == (mode, (3 + 3 - num_shared) / 2 * swap_block, num_computed - 4 * num_shared)
    assert len(preemption.swap_out) == (3 if mode == "swap" else 0)
    memory.check_invariants([request, other])
    come_back(memory, request, other)
    assert list(request.block_table[:num_shared]) == table[:num_shared]


def test_a_request_whose_blocks_all_are_shared_frees_nothing_and_loses_nothing():
    """Computing nothing is never slower than a copy. Where swapping is the mode, all blocks are copied out and none
    back."""
    for mode, num_copied in (("auto", 0), ("recompute", 0), ("swap", 2)):
        memory = make_memory(mode=mode, swap_block=0.0, recompute_token=math.inf)
        other = start(memory, range(9), 9)
        request = start(memory, range(20), 8)
        free = memory.pool.num_free
        preemption = preempt(memory, request)
        assert (preemption.recompute_seconds, len(preemption.swap_out)) == (0.0, num_copied)
        assert (memory.pool.num_free, memory.host_pool.num_free) == (free, 10 - num_copied)
        memory.check_invariants([request, other])
        assert come_back(memory, request, other) == []
        assert (request.num_computed_tokens, memory.host_pool.num_free) == (8, 10)


@pytest.mark.parametrize("mode", PREEMPTION_MODES)
@pytest.mark.parametrize("num_host", [0, 10])
def test_a_request_that_holds_nothing_waits_again(mode, num_host):
    """A request in a static batch may run before it holds a block."""
    memory = make_memory(num_host=num_host, mode=mode, recompute_token=math.inf)
    request = start(memory, range(5), 0)
    assert preempt(memory, request) == Preemption("recompute", 0.0, 0.0, [])
    assert (request.state, request.num_computed_tokens) == (RequestState.WAITING, 0)
    memory.check_invariants([request])


# ---------------------------------------------------------------------------- check_invariants


@pytest.mark.parametrize(
    "damage",
    [
        lambda memory, running, swapped: memory.grow(running, 9),
        lambda memory, running, swapped: memory.rewind(running, 4),
        lambda memory, running, swapped: memory.grow(swapped, 1),
        lambda memory, running, swapped: memory.host_pool.free([swapped.host_blocks.pop()]),
        lambda memory, running, swapped: running.host_blocks.extend(memory.host_pool.allocate(1)),
        lambda memory, running, swapped: memory.release(swapped),
        lambda memory, running, swapped: setattr(running, "state", RequestState.SWAPPED),
        lambda memory, running, swapped: setattr(swapped, "state", RequestState.WAITING),
    ],
)
def test_check_invariants_catches_a_request_that_holds_too_much_or_too_little(damage):
    """One runs with 2 blocks, and one has 3 in host memory."""
    memory = make_memory()
    requests = start(memory, range(9), 8), start(memory, range(9, 20), 9)
    preempt(memory, requests[1])
    memory.check_invariants(requests)
    damage(memory, *requests)
    with pytest.raises(AssertionError, match=r"Request.* holds \(\d, \d\) blocks"):
        memory.check_invariants(requests)


@pytest.mark.parametrize("pool", ["pool", "host_pool"])
def test_check_invariants_looks_at_both_pools(pool):
    memory = make_memory()
    getattr(memory, pool).allocate(1)
    with pytest.raises(AssertionError, match="reference counts are off"):
        memory.check_invariants([])


# ---------------------------------------------------------------------------- any history


# Two tokens and a common beginning, so that requests share much.
prompts = st.builds(
    lambda common, new: [1] * common + new, st.integers(0, 8), st.lists(st.sampled_from([1, 2]), min_size=1, max_size=6)
)
numbers = st.integers(0, 4)


class MemoryHistory(RuleBasedStateMachine):
    """Random histories of several requests, with a toy in place of KV: a position keeps all tokens up to it, since its
    K and V depend on all of them. Every request must find its own in its blocks."""

    @initialize(
        block_size=st.integers(1, 4),
        room=st.sampled_from([24, 36, 16, 8]),  # in tokens, so that the pool is full with every block size
        host_room=st.sampled_from([40, 16, 8, 0]),
        mode=st.sampled_from(("swap", *PREEMPTION_MODES)),
        swap_block=st.integers(1, 4),
        caching=st.sampled_from([True] * 4 + [False]),
        all_prompts=st.lists(prompts, min_size=2, max_size=5),
    )
    def start(self, block_size, room, host_room, mode, swap_block, caching, all_prompts):
        self.size, self.swap_block = block_size, swap_block
        self.num_usable, self.num_host = room // block_size, host_room // block_size
        self.memory = make_memory(
            self.num_usable, self.num_host, block_size=block_size, mode=mode, swap_block=swap_block, caching=caching
        )
        self.device: dict[int, dict[int, list[int]]] = {}  # block -> offset -> all tokens up to there
        self.host: dict[int, dict[int, list[int]]] = {}
        self.requests = [make_request(prompt) for prompt in all_prompts]
        for request in self.requests:
            self.restore_request(request, 99)

    def pick(self, number: int, *states: RequestState) -> Request | None:
        fitting = [request for request in self.requests if request.state in states]
        return fitting[number % len(fitting)] if fitting else None

    @rule(number=numbers, prompt=prompts, num_tokens=st.sampled_from([99, 0, 3]))
    def one_goes_and_another_comes(self, number, prompt, num_tokens):
        old, new = self.pick(number, *RequestState), make_request(prompt)
        self.memory.release(old)
        self.requests[self.requests.index(old)] = new
        self.restore_request(new, num_tokens)

    @rule(number=numbers, num_tokens=st.sampled_from([99, 0, 3]))
    def restore(self, number, num_tokens):
        request = self.pick(number, RequestState.WAITING, RequestState.SWAPPED)
        if request is not None:
            self.restore_request(request, num_tokens)

    def restore_request(self, request: Request, num_tokens: int):
        """As the scheduler does, if there are blocks for all known tokens; then compute some."""
        prefix = self.memory.find_prefix(request)
        missing, free = self.memory.num_missing(request, prefix), self.memory.pool.num_free
        if missing > free:
            return
        hosts, num_computed = list(request.host_blocks), request.num_computed_tokens
        pairs = self.memory.restore(request, prefix)
        request.state = RequestState.RUNNING
        known = len(prefix)
        assert request.block_table[:known].tolist() == prefix
        assert request.num_computed_tokens == max(num_computed, known * self.size) < request.num_tokens
        assert request.num_registered_blocks == known
        assert pairs == list(zip(hosts[known:], request.block_table[known:], strict=True))
        for source, destination in pairs:
            self.device[destination] = dict(self.host[source])
        self.memory.grow(request, request.num_tokens)
        assert free - self.memory.pool.num_free == missing
        self.memory.rewind(request, request.num_computed_tokens)
        self.compute_tokens(request, num_tokens, token=1)

    @rule(number=numbers, num_tokens=st.integers(1, 9), token=st.sampled_from([1, 2]))
    def compute(self, number, num_tokens, token):
        """A chunk. If it reaches the last known token, it yields a new one."""
        request = self.pick(number, RequestState.RUNNING)
        if request is not None:
            self.compute_tokens(request, num_tokens, token)

    @rule(number=numbers, num_tokens=st.integers(1, 9))
    def plan_and_take_back(self, number, num_tokens):
        """A chunk whose step fails. Its blocks are registered, shared by others, and taken back from all."""
        request = self.pick(number, RequestState.RUNNING)
        if request is not None:
            table, num_registered = list(request.block_table), request.num_registered_blocks
            self.plan_tokens(request, num_tokens)
            self.memory.rewind(request, request.num_computed_tokens)
            assert (request.block_table.tolist(), request.num_registered_blocks) == (table, num_registered)

    def plan_tokens(self, request: Request, num_tokens: int) -> int:
        """Returns where the chunk ends."""
        room = (len(request.block_table) + self.memory.pool.num_free) * self.size
        end = min(request.num_computed_tokens + num_tokens, request.num_tokens, room)
        self.memory.grow(request, end)
        self.memory.register(request, end)
        assert request.num_registered_blocks == end // self.size
        return end

    def compute_tokens(self, request: Request, num_tokens: int, token: int):
        end = self.plan_tokens(request, num_tokens)
        for position in range(request.num_computed_tokens, end):
            block = self.device.setdefault(request.block_table[position // self.size], {})
            block[position % self.size] = request.token_ids[: position + 1]
        request.num_computed_tokens = end
        if end == request.num_tokens:
            request.token_ids.append(token)

    @rule(number=numbers)
    def preempt(self, number):
        request = self.pick(number, RequestState.RUNNING)
        if request is None:
            return
        table, num_computed = list(request.block_table), request.num_computed_tokens
        num_free, num_free_host = self.memory.pool.num_free, self.memory.host_pool.num_free
        others = {block for other in self.requests if other is not request for block in other.block_table}
        num_shared = len(others.intersection(table))
        mode, swap_seconds, recompute_seconds, swap_out = preempt(self.memory, request)

        # All blocks are copied out, and those that are not shared back. A token takes a second.
        copies = (2 * len(table) - num_shared) / 2
        assert swap_seconds == (copies * self.swap_block if len(table) <= num_free_host else math.inf)
        lost = num_computed - num_shared * self.size
        assert recompute_seconds == lost
        expected = self.memory.preemption_mode
        if not table or swap_seconds == math.inf:
            expected = "recompute"
        elif expected == "auto":
            expected = "swap" if swap_seconds < recompute_seconds else "recompute"
        assert mode == expected
        assert self.memory.pool.num_free == num_free + len(table) - num_shared
        assert (request.block_table.tolist(), request.num_registered_blocks) == ([], 0)
        hosts = list(request.host_blocks)
        assert swap_out == (list(zip(table, hosts, strict=True)) if mode == "swap" else [])
        for source, destination in swap_out:
            self.host[destination] = dict(self.device[source])
        swapped = mode == "swap"
        assert request.state is (RequestState.SWAPPED if swapped else RequestState.WAITING)
        assert request.num_computed_tokens == (num_computed if swapped else 0)

    @rule(sure=st.integers(0, 3))
    def reset(self, sure):
        if sure == 3:
            self.memory.reset(self.requests)
            for request in self.requests:
                self.memory.release(request)
                request.state, request.num_computed_tokens = RequestState.WAITING, 0

    @invariant()
    def every_request_finds_its_own_tokens(self):
        self.memory.check_invariants(self.requests)
        num_swapped = 0
        for request in self.requests:
            swapped = request.state is RequestState.SWAPPED
            blocks, kept = (request.host_blocks, self.host) if swapped else (request.block_table, self.device)
            for position in range(request.num_computed_tokens):
                there = kept[blocks[position // self.size]][position % self.size]
                assert there == request.token_ids[: position + 1]
            num_swapped += len(blocks) * swapped
            assert request.num_registered_blocks * self.size <= request.num_computed_tokens
        assert self.memory.host_pool.num_free == self.num_host - num_swapped
        held = {block for request in self.requests for block in request.block_table}
        assert self.memory.pool.num_free == self.num_usable - len(held)


TestMemoryHistory = MemoryHistory.TestCase
TestMemoryHistory.settings = settings(max_examples=4 * settings.default.max_examples)
