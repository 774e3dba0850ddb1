"""minicb/scheduler.py: who runs, in how many tokens, and who gives blocks back.

No model is needed. Most tests drive it with made-up tokens; the property tests use a toy model whose
memory is addressed through the block tables, so that a lost, doubled or overwritten position of
KV cache changes the tokens that come out.
"""

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest
from conftest import take_events
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minicb import SamplingParams
from minicb.blocks import BlockPool
from minicb.memory import PREEMPTION_MODES, Costs, Memory
from minicb.plan import Chunk, Event, StepPlan
from minicb.policies import FCFS, SJF, Adaptive, Fair, Policy, Priority
from minicb.request import Request, RequestState
from minicb.scheduler import Scheduler


class CheckedMemory(Memory):
    """Says what it would say if it looked a prefix up every time; counts how often it does."""

    num_lookups = 0

    def find_prefix(self, request):
        self.num_lookups += 1
        return super().find_prefix(request)

    def find_room(self, request, num_free):
        blocks = super().find_room(request, num_free)
        cached = self.pool.find_prefix(request.token_ids, request.num_tokens - 1)
        assert blocks == (cached if self.num_missing(request, cached) <= num_free else None)
        return blocks


def make_scheduler(
    *,
    num_blocks=100,
    block_size=4,
    max_num_seqs=8,
    max_num_batched_tokens=16,
    max_model_len=1000,
    num_cpu_blocks=0,
    preemption_mode="swap",
    costs=None,
    enable_prefix_caching=False,
    policy=None,
    **kwargs,
) -> Scheduler:
    pool = BlockPool(num_blocks, block_size, enable_prefix_caching)
    host_pool = BlockPool(1 + num_cpu_blocks, block_size)
    return Scheduler(
        CheckedMemory(pool, host_pool, preemption_mode, costs),
        FCFS() if policy is None else policy,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        **kwargs,
    )


def make_request(request_id="a", num_prompt_tokens=4, *, eos=(), **params) -> Request:
    return Request(request_id, range(num_prompt_tokens), SamplingParams(**params), eos_token_ids=eos)


def add(scheduler: Scheduler, request_id: str, num_prompt_tokens: int, max_tokens: int | None = 100) -> Request:
    request = make_request(request_id, num_prompt_tokens, max_tokens=max_tokens)
    scheduler.add(request)
    return request


def step(scheduler: Scheduler, token: int | None = 0) -> StepPlan:
    """One step in which every sampled row yields the same token."""
    plan = scheduler.schedule()
    scheduler.update(plan, [token for chunk in plan.chunks if chunk.needs_sampling])
    scheduler.check_invariants()
    return plan


def until(condition: Callable[[], object], max_steps: int = 1000) -> Iterator[int]:
    """For loops that step until something holds: an engine that is stuck fails the test, not hangs it."""
    for count in range(max_steps):
        if condition():
            return
        yield count
    raise AssertionError(f"not reached in {max_steps} steps")


def run(scheduler: Scheduler, max_steps: int = 1000) -> int:
    """Step until nothing is left; returns how many steps it took."""
    count = 0
    for _ in until(lambda: not scheduler.requests, max_steps + 1):
        assert step(scheduler).chunks
        count += 1
    assert_nothing_is_held(scheduler)
    return count


def assert_nothing_is_held(scheduler: Scheduler) -> None:
    for pool in (scheduler.pool, scheduler.memory.host_pool):
        assert pool.num_free == pool.num_usable


def lengths(plan: StepPlan) -> dict[str, int]:
    return {chunk.request.name: chunk.length for chunk in plan.chunks}


# ---------------------------------------------------------------------------- the step, sentence by sentence


def test_a_request_from_beginning_to_end():
    """A prompt of 6, 4 tokens a step: two steps of prefill, the second yields the first token."""
    scheduler = make_scheduler(max_num_batched_tokens=4)
    request = add(scheduler, "a", 6, max_tokens=3)
    assert request.state is RequestState.WAITING

    plan = scheduler.schedule()
    assert plan.chunks == [Chunk.of(request, start=0, length=4)]
    assert not plan.chunks[0].samples
    assert len(request.block_table) == 1
    assert scheduler.update(plan, []) == []
    assert request.state is RequestState.RUNNING

    plan = scheduler.schedule()
    assert plan.chunks == [Chunk.of(request, start=4, length=2)]
    assert plan.chunks[0].samples
    assert len(request.block_table) == 2
    assert scheduler.update(plan, [70]) == [request]

    plan = scheduler.schedule()  # from here on it decodes: the token just sampled is the input
    assert plan.chunks == [Chunk.of(request, start=6, length=1)]
    scheduler.update(plan, [71])
    plan = scheduler.schedule()
    assert plan.chunks == [Chunk.of(request, start=7, length=1)]
    assert scheduler.update(plan, [72]) == [request]

    assert request.output_token_ids == [70, 71, 72]
    assert (request.state, request.finish_reason) == (RequestState.FINISHED, "length")
    assert list(request.block_table) == []
    assert scheduler.schedule() == StepPlan()  # nothing to do is no error


def test_running_requests_come_first():
    """The decode gets its token although an older prefill could use all of the budget, and both
    get theirs before the newcomer."""
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, "long", 30)
    assert lengths(step(scheduler)) == {"long": 8}
    add(scheduler, "short", 3)
    for _ in range(2):
        assert lengths(step(scheduler)) == {"long": 8}
    assert lengths(step(scheduler)) == {"long": 6, "short": 2}  # what the budget leaves
    assert lengths(step(scheduler)) == {"long": 1, "short": 1}
    add(scheduler, "newcomer", 30)
    assert lengths(step(scheduler)) == {"long": 1, "short": 1, "newcomer": 6}


def test_several_requests_prefill_in_one_step():
    scheduler = make_scheduler(max_num_batched_tokens=16)
    for name in "abc":
        add(scheduler, name, 5)
    assert lengths(step(scheduler)) == {"a": 5, "b": 5, "c": 5}


def test_several_requests_can_be_half_prefilled():
    """A prefill that found few blocks leaves budget for the next one, so neither waits for the other."""
    scheduler = make_scheduler(num_blocks=1 + 12, block_size=1, max_num_batched_tokens=6)
    a, b = add(scheduler, "a", 5, max_tokens=1), add(scheduler, "b", 5, max_tokens=1)
    assert lengths(step(scheduler)) == {"a": 5, "b": 1}
    c = add(scheduler, "c", 5, max_tokens=1)
    assert lengths(step(scheduler)) == {"b": 4, "c": 2}
    assert lengths(step(scheduler)) == {"c": 3}
    assert [r.finish_reason for r in (a, b, c)] == ["length"] * 3

    # A static batch starts together, whatever the budget: there all are half prefilled at once.
    scheduler = make_scheduler(max_num_batched_tokens=4, max_num_seqs=4, batching="static")
    for name in "abcd":
        add(scheduler, name, 3)
    assert lengths(step(scheduler)) == {"a": 3, "b": 1}
    assert [r.num_computed_tokens for r in scheduler.running] == [3, 1, 0, 0]
    assert lengths(step(scheduler)) == {"a": 1, "b": 2, "c": 1}


def test_prefill_and_decode_share_a_step():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, "a", 4)
    step(scheduler)
    add(scheduler, "b", 20)
    plan = step(scheduler)
    assert [(c.request.request_id, c.start, c.length) for c in plan.chunks] == [("a", 4, 1), ("b", 0, 7)]


@pytest.mark.parametrize("limit", [{"max_num_seqs": 2}, {"num_blocks": 1 + 4}])
def test_a_finished_request_is_replaced_in_the_very_next_step(limit):
    """Its place in the one case, its blocks in the other. That is continuous batching."""
    scheduler = make_scheduler(**limit)
    a, b, c = add(scheduler, "a", 6, max_tokens=2), add(scheduler, "b", 6, max_tokens=3), add(scheduler, "c", 6)
    assert lengths(step(scheduler)) == {"a": 6, "b": 6}
    blocks = set(a.block_table)
    assert lengths(step(scheduler)) == {"a": 1, "b": 1}
    assert a.state is RequestState.FINISHED
    assert lengths(step(scheduler)) == {"b": 1, "c": 6}
    assert b.state is RequestState.FINISHED
    if "num_blocks" in limit:
        assert set(c.block_table) == blocks


def test_static_batching_admits_only_when_nothing_runs():
    """The same requests take more steps, because places stand empty until the longest has ended."""
    steps_alone = {}
    for batching in ("continuous", "static"):
        scheduler = make_scheduler(max_num_seqs=2, batching=batching)
        for name, max_tokens in zip("abcd", (2, 8, 2, 2), strict=True):
            add(scheduler, name, 3, max_tokens)
        alone = 0
        for _ in until(lambda scheduler=scheduler: not scheduler.requests):
            running = list(scheduler.running)
            plan = step(scheduler)
            if batching == "static" and running:
                assert [c.request for c in plan.chunks] == running
            alone += len(plan.chunks) == 1
        steps_alone[batching] = alone
    assert steps_alone["static"] == 6  # steps 3 to 8, in which b runs alone
    assert steps_alone["continuous"] < 6


def test_a_static_batch_fills_all_places_though_the_first_steps_budget_does_not_go_round():
    """Otherwise the size of a static batch would depend on the budget, and the comparison be unfair."""
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=8, batching="static")
    requests = [add(scheduler, name, 7, max_tokens=2) for name in "abcdef"]
    assert lengths(step(scheduler)) == {"a": 7, "b": 1}
    assert scheduler.running == requests[:4]
    scheduler.abort("c")  # which has no blocks yet
    assert lengths(step(scheduler)) == {"a": 1, "b": 6, "d": 1}
    run(scheduler)
    assert all(r.num_output_tokens == 2 for r in requests if r.request_id != "c")


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_never_more_requests_than_tokens_in_a_step(batching):
    """Each decode needs a token in every step, so a sixth request would have to starve another."""
    scheduler = make_scheduler(max_num_seqs=100, max_num_batched_tokens=5, batching=batching)
    for number in range(10):
        add(scheduler, str(number), 1)
    for _ in range(5):
        assert lengths(step(scheduler)) == dict.fromkeys("01234", 1)


# ---------------------------------------------------------------------------- preemption


def test_the_last_is_preempted_when_a_running_request_needs_a_block():
    scheduler = make_scheduler(num_blocks=1 + 6, block_size=2)
    a, b, c = (add(scheduler, name, 4) for name in "abc")
    assert lengths(step(scheduler)) == {"a": 4, "b": 4, "c": 4}  # two blocks each: the pool is full
    plan = step(scheduler)
    assert plan.preempted == [c]
    assert lengths(plan) == {"a": 1, "b": 1}  # c's two blocks were enough for both
    assert scheduler.running == [a, b]
    assert (c.state, list(c.block_table), c.num_computed_tokens) == (RequestState.WAITING, [], 0)
    assert (c.num_preemptions, b.num_preemptions) == (1, 0)


def test_a_request_preempts_itself_if_it_is_the_last():
    scheduler = make_scheduler(num_blocks=1 + 5, block_size=2)
    add(scheduler, "a", 5)
    b = add(scheduler, "b", 4)
    step(scheduler)
    plan = step(scheduler)  # a still has place in its third block, b has none
    assert plan.preempted == [b]
    assert lengths(plan) == {"a": 1}


def test_several_are_preempted_if_one_is_not_enough():
    """In a static batch the last may not have a block yet, so that preempting it yields nothing."""
    scheduler = make_scheduler(num_blocks=1 + 6, max_num_seqs=3, block_size=2, max_num_batched_tokens=6)
    scheduler.static = True
    a, b, c = add(scheduler, "a", 4), add(scheduler, "b", 4), add(scheduler, "c", 4)
    assert lengths(step(scheduler)) == {"a": 4, "b": 2}
    scheduler.pool.allocate(scheduler.pool.num_free)  # somebody else has the rest
    plan = scheduler.schedule()
    assert plan.preempted == [c, b]
    assert lengths(plan) == {"a": 1}
    assert scheduler.running == [a]


class LastComeFirstServed(Policy):
    """The scheduler asks a policy for nothing but an order, so a test may bring its own."""

    def key(self, request: Request) -> tuple:
        return (-request.arrival,)


def test_whoever_was_preempted_returns_before_anything_new_is_admitted():
    """The policy has the newcomer first, it needs one block, and one is free all the time."""
    scheduler = make_scheduler(num_blocks=1 + 4, block_size=2, policy=LastComeFirstServed())
    b, a = add(scheduler, "b", 4), add(scheduler, "a", 4, max_tokens=3)
    step(scheduler)
    assert scheduler.running == [a, b]
    add(scheduler, "newcomer", 1)
    plan = step(scheduler)
    assert plan.preempted == [b]
    assert lengths(plan) == {"a": 1}
    assert scheduler.pool.num_free == 1
    assert lengths(step(scheduler)) == {"a": 1}  # its last
    assert lengths(step(scheduler)) == {"newcomer": 1, "b": 5}


def test_a_newcomer_does_not_overtake_a_preempted_request():
    """One free block would do for it, at once."""
    scheduler = make_scheduler(num_blocks=1 + 4, block_size=2)
    add(scheduler, "a", 4, max_tokens=3)
    b = add(scheduler, "b", 4, max_tokens=3)
    step(scheduler)
    add(scheduler, "newcomer", 1)
    assert step(scheduler).preempted == [b]
    assert scheduler.pool.num_free == 1
    assert lengths(step(scheduler)) == {"a": 1}
    assert lengths(step(scheduler)) == {"b": 5, "newcomer": 1}


def test_a_preempted_request_prefills_prompt_and_output_as_one_prompt():
    scheduler = make_scheduler(num_blocks=1 + 6, block_size=2, max_num_batched_tokens=8)
    add(scheduler, "a", 3, max_tokens=8)
    b = add(scheduler, "b", 3, max_tokens=20)
    for token in (10, 11, 12, 13):
        assert step(scheduler, token).preempted == []
    assert step(scheduler, 14).preempted == [b]
    assert b.output_token_ids == [10, 11, 12, 13]  # kept
    for _ in until(lambda: b.state is RequestState.RUNNING):
        plan = step(scheduler, 15)
    assert plan.chunks == [Chunk.of(b, start=0, length=7)]
    assert b.output_token_ids == [10, 11, 12, 13, 15]
    assert step(scheduler, 16).chunks == [Chunk.of(b, start=7, length=1)]  # as if nothing had happened
    run(scheduler)
    assert (b.num_output_tokens, b.num_preemptions) == (10, 1)  # as many as the pool holds


def test_a_prefill_takes_the_blocks_there_are_before_it_preempts():
    """Half a chunk now is better than throwing somebody out."""
    scheduler = make_scheduler(num_blocks=1 + 6, block_size=2, max_num_batched_tokens=4)
    a, b = add(scheduler, "a", 2), add(scheduler, "b", 8)
    assert lengths(step(scheduler)) == {"a": 2, "b": 2}
    assert lengths(step(scheduler)) == {"a": 1, "b": 3}
    held = scheduler.pool.allocate(1)  # b was promised this block
    plan = scheduler.schedule()
    assert lengths(plan) == {"a": 1, "b": 1}  # of the 3 left to b, one still fits into its last block
    assert plan.preempted == []
    scheduler.update(plan, [0])
    scheduler.pool.free(held)
    run(scheduler)
    assert (a.num_preemptions, b.finish_reason) == (0, "length")


def test_a_static_batch_leaves_room_for_all_that_its_requests_have_yet_to_take():
    """a and b will fill 8 of 10 blocks, though after the first step they hold one. c must wait, d too."""
    scheduler = make_scheduler(num_blocks=1 + 10, max_num_batched_tokens=4, batching="static")
    a, b = add(scheduler, "a", 16, max_tokens=1), add(scheduler, "b", 16, max_tokens=1)
    add(scheduler, "c", 12)
    add(scheduler, "d", 1)
    assert lengths(step(scheduler)) == {"a": 4}
    assert scheduler.running == [a, b]


def test_a_prefill_that_gets_no_tokens_preempts_nobody():
    """It needs a block for its next token, and none is free. But the budget has none left for it either."""
    scheduler = make_scheduler(block_size=2, max_num_batched_tokens=4, batching="static")
    a, b = add(scheduler, "a", 12), add(scheduler, "b", 4)
    step(scheduler)
    scheduler.pool.allocate(scheduler.pool.num_free - 2)  # somebody else's
    plan = scheduler.schedule()
    assert plan.preempted == []
    assert lengths(plan) == {"a": 4}
    assert scheduler.running == [a, b]


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_two_long_prompts_do_not_throw_each_other_out(batching):
    """b would fit beside what a holds so far, but not beside what a has yet to take. A static batch
    has to look ahead for that, as it starts requests that get no tokens yet."""
    scheduler = make_scheduler(num_blocks=1 + 10, max_num_batched_tokens=8, batching=batching)
    a, b = add(scheduler, "a", 28, max_tokens=2), add(scheduler, "b", 20, max_tokens=2)
    c = add(scheduler, "c", 4, max_tokens=2)
    run(scheduler)
    assert [r.num_preemptions for r in (a, b, c)] == [0, 0, 0]


def test_a_planned_step_that_never_ran_is_planned_again():
    """The forward pass raised, or somebody pressed Ctrl-C: the plan is lost, the requests are not."""
    scheduler = make_scheduler(num_blocks=1 + 6, block_size=2, max_num_batched_tokens=6)
    requests = [add(scheduler, name, 5, max_tokens=3) for name in "abc"]
    for _ in until(lambda: not scheduler.requests):
        lost = scheduler.schedule()
        plan = scheduler.schedule()
        if not lost.preempted:
            assert plan.chunks[: len(lost.chunks)] == lost.chunks
        scheduler.update(plan, [0 for chunk in plan.chunks if chunk.needs_sampling])
        scheduler.check_invariants()
    assert [r.num_output_tokens for r in requests] == [3, 3, 3]


# ---------------------------------------------------------------------------- swap


def test_a_swapped_request_goes_on_where_it_was():
    """Its blocks travel to the host and back, as pairs in the plans, and nothing is computed again."""
    scheduler = make_scheduler(num_blocks=1 + 6, block_size=2, num_cpu_blocks=10)
    a, b = add(scheduler, "a", 5, max_tokens=4), add(scheduler, "b", 5, max_tokens=4)
    step(scheduler)
    step(scheduler)
    table = list(b.block_table)
    plan = step(scheduler)  # both need a fourth block
    assert plan.preempted == [b]
    assert (b.state, b.num_computed_tokens, list(b.block_table)) == (RequestState.SWAPPED, 6, [])
    assert plan.swap_out == list(zip(table, b.host_blocks, strict=True))
    hosts = list(b.host_blocks)
    assert scheduler.num_waiting == 1
    details = {"mode": "swap", "swap_seconds": math.inf, "recompute_seconds": math.inf}  # nobody measured
    assert take_events(scheduler)[-1] == Event(0.0, "preempted", b, details)
    assert step(scheduler).chunks == [Chunk.of(a, 7, 1)]  # its last
    plan = step(scheduler)
    assert plan.returned == [b]
    details = {"num_swapped_in_blocks": 3, "num_computed_tokens": 6}
    assert [event for event in take_events(scheduler) if event.request is b] == [Event(0.0, "returned", b, details)]
    assert plan.chunks == [Chunk.of(b, 6, 1)]
    assert plan.swap_in == list(zip(hosts, b.block_table[:3], strict=True))
    assert (b.state, list(b.host_blocks)) == (RequestState.RUNNING, [])
    run(scheduler)
    assert (b.num_output_tokens, b.num_preemptions) == (4, 1)


def test_a_half_prefilled_request_is_swapped_as_well():
    scheduler = make_scheduler(num_blocks=1 + 6, block_size=2, max_num_batched_tokens=4, num_cpu_blocks=10)
    a, b = add(scheduler, "a", 2, max_tokens=4), add(scheduler, "b", 8, max_tokens=1)
    step(scheduler)
    assert (a.num_computed_tokens, b.num_computed_tokens) == (2, 2)
    held = scheduler.pool.allocate(scheduler.pool.num_free)  # somebody else's
    plan = scheduler.schedule()
    assert plan.preempted == [b]
    assert (b.state, b.num_computed_tokens, len(b.host_blocks)) == (RequestState.SWAPPED, 2, 1)
    scheduler.update(plan, [0])
    scheduler.pool.free(held)
    assert step(scheduler).chunks == [Chunk.of(a, 3, 1), Chunk.of(b, 2, 3)]
    run(scheduler)
    assert (b.num_output_tokens, b.finish_reason) == (1, "length")


@pytest.mark.parametrize("num_cpu_blocks", [0, 1, 2, 100])
@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_host_memory_of_any_size(num_cpu_blocks, mode):
    """Four requests that want more than there is; where the host has no room, they are recomputed."""
    scheduler = make_scheduler(
        num_blocks=1 + 5,
        max_num_seqs=4,
        num_cpu_blocks=num_cpu_blocks,
        preemption_mode=mode,
        costs=Costs(swap_block=0.0, recompute_token=1.0),
    )
    model, modes = ToyModel(4), Counter[str]()
    requests = [add(scheduler, name, 4, max_tokens=12) for name in "abcd"]
    for _ in until(lambda: not scheduler.requests, max_steps=60):
        checked_step(scheduler, model)
        modes.update(event.details["mode"] for event in take_events(scheduler) if event.kind == "preempted")
    assert [request.output_token_ids for request in requests] == [alone(r, 16)[0] for r in requests]
    assert modes.total() >= 3
    if mode == "recompute" or num_cpu_blocks == 0:
        assert set(modes) == {"recompute"}
    elif num_cpu_blocks == 100:
        assert set(modes) == {"swap"}
    else:
        assert modes["recompute"] > 0
    assert_nothing_is_held(scheduler)


@pytest.mark.parametrize("mode", PREEMPTION_MODES)
@pytest.mark.parametrize("caching", [False, True])
def test_two_requests_that_need_three_of_four_blocks_each(mode, caching):
    """Both fit at first and not in the end. One waits until the other is done, instead of each throwing
    the other out for ever."""
    scheduler = make_scheduler(
        num_blocks=1 + 4,
        num_cpu_blocks=4,
        preemption_mode=mode,
        costs=Costs(swap_block=1.0, recompute_token=1.0),
        enable_prefix_caching=caching,
    )
    requests = [Request(name, [n] * 4, SamplingParams(max_tokens=9)) for n, name in enumerate("ab")]
    for request in requests:
        scheduler.add(request)
    model = ToyModel(4)
    for _ in until(lambda: not scheduler.requests, max_steps=18):
        checked_step(scheduler, model)
    assert [request.num_preemptions for request in requests] == [0, 1]
    assert_nothing_is_held(scheduler)


@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_a_preempted_request_is_back_in_time_though_short_ones_keep_arriving(mode):
    """It waits for those that run, and for nobody else: its place is not given away."""
    scheduler = make_scheduler(
        num_blocks=1 + 8, max_num_seqs=4, num_cpu_blocks=8, preemption_mode=mode, costs=Costs(1.0, 1.0)
    )
    first, long = add(scheduler, "first", 12, max_tokens=10), add(scheduler, "long", 12, max_tokens=15)
    for number in until(lambda: long.num_preemptions, max_steps=10):
        add(scheduler, f"before {number}", 1, max_tokens=2)
        step(scheduler)
    for number in until(lambda: long.state is RequestState.RUNNING, max_steps=10):
        add(scheduler, f"meanwhile {number}", 1, max_tokens=2)
        take_events(scheduler)
        plan = step(scheduler)
        assert "started" not in [event.kind for event in take_events(scheduler)] or long in plan.returned
    for number in until(lambda: long.state is RequestState.FINISHED, max_steps=30):
        add(scheduler, f"later {number}", 1, max_tokens=2)
        step(scheduler)
    assert (long.num_output_tokens, long.num_preemptions, first.num_preemptions) == (15, 1, 0)


@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_preemption_stops_as_soon_as_there_is_room(mode):
    """The last two hold nothing but a block that the first holds too, so to preempt them frees nothing.
    The next in line is one that helps, and there it ends."""
    scheduler = make_scheduler(
        num_blocks=1 + 9,
        max_num_batched_tokens=24,
        num_cpu_blocks=10,
        preemption_mode=mode,
        costs=Costs(1.0, 1.0),
        enable_prefix_caching=True,
    )
    a = add(scheduler, "a", 8, max_tokens=20)
    step(scheduler)
    b, c, d, e = (Request(n, [*range(4), i, i], SamplingParams(max_tokens=20)) for i, n in enumerate("bcde"))
    scheduler.add(b)
    scheduler.add(c)
    step(scheduler)
    step(scheduler)
    step(scheduler)  # b and c have filled their two blocks, one of which is shared
    scheduler.add(d)
    scheduler.add(e)
    plan = scheduler.schedule()
    assert plan.chunks[-2:] == [Chunk.of(d, 4, 2), Chunk.of(e, 4, 2)]
    scheduler.cancel(plan)
    assert d.block_table == e.block_table == a.block_table[:1]
    scheduler.pool.allocate(scheduler.pool.num_free)  # somebody else has the rest
    plan = scheduler.schedule()
    assert plan.preempted == [e, d, c]
    assert plan.chunks == [Chunk.of(a, 11, 1), Chunk.of(b, 8, 1)]
    assert scheduler.running == [a, b]


def test_a_plan_with_copies_that_was_not_executed_is_begun_again():
    """Nobody knows which of the copies were made, so nobody's blocks are trusted. Tokens are kept."""
    scheduler = make_scheduler(num_blocks=1 + 6, block_size=2, num_cpu_blocks=10, enable_prefix_caching=True)
    model = ToyModel(2)
    requests = [Request(n, [i] * 5, SamplingParams(max_tokens=5, ignore_eos=True)) for i, n in enumerate("ab")]
    for request in requests:
        scheduler.add(request)
    canceled = Counter[str]()
    for _ in until(lambda: not scheduler.requests):
        plan = scheduler.schedule()
        kinds = ["swap_out"] * bool(plan.swap_out) + ["swap_in"] * bool(plan.swap_in)
        if any(canceled[kind] < 1 for kind in kinds):
            canceled.update(kinds)
            scheduler.cancel(plan)
            scheduler.check_invariants()
            assert not scheduler.running
            model.memory, model.host_memory = {}, {}
        else:
            scheduler.update(plan, model.execute(plan))
    assert canceled["swap_out"] == 1
    assert [request.output_token_ids for request in requests] == [alone(r, 10)[0] for r in requests]
    assert_nothing_is_held(scheduler)


def test_a_request_starts_once_even_if_all_begin_again():
    """After an interruption what ran before comes back before anything new, and is not counted as new:
    of b's prompt nothing was found when it started, though by now some of it can be found."""
    scheduler = make_scheduler(
        block_size=2,
        max_num_seqs=2,
        max_num_batched_tokens=5,
        enable_prefix_caching=True,
        policy=LastComeFirstServed(),
    )
    b, a = add(scheduler, "b", 5), add(scheduler, "a", 4)
    step(scheduler)
    add(scheduler, "newcomer", 4)
    scheduler.recover()
    assert not scheduler.running
    for _ in range(3):
        plan = step(scheduler)
    kinds = Counter((e.kind, e.request.request_id) for e in take_events(scheduler) if e.kind in ("started", "returned"))
    assert kinds == Counter({("started", "a"): 1, ("started", "b"): 1, ("returned", "a"): 1, ("returned", "b"): 1})
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 0)
    assert scheduler.running == [a, b]
    assert [chunk.start for chunk in plan.chunks] == [6, 5]


# ---------------------------------------------------------------------------- prefix caching


def test_a_request_starts_after_what_is_cached_of_it():
    """Two full blocks of its nine tokens; of an equal prompt of eight, the last is computed again."""
    scheduler = make_scheduler(enable_prefix_caching=True)
    first = add(scheduler, "first", 8, max_tokens=1)
    assert step(scheduler).chunks == [Chunk.of(first, 0, 8)]
    longer, equal = add(scheduler, "longer", 9, max_tokens=1), add(scheduler, "equal", 8, max_tokens=1)
    take_events(scheduler)
    plan = step(scheduler)
    assert plan.chunks == [Chunk.of(longer, 8, 1), Chunk.of(equal, 4, 4)]
    assert [event for event in take_events(scheduler) if event.kind == "started"] == [
        Event(0.0, "started", longer, {"num_prompt_tokens": 9, "num_cached_tokens": 8}),
        Event(0.0, "started", equal, {"num_prompt_tokens": 8, "num_cached_tokens": 4}),
    ]
    assert [r.num_cached_tokens for r in (first, longer, equal)] == [0, 8, 4]


def test_nothing_is_shared_before_it_is_computed():
    """Equal prompts that start in one step compute the same side by side; chunks are found only when
    a token has been sampled from them."""
    scheduler = make_scheduler(enable_prefix_caching=True, max_num_batched_tokens=24)
    equal = [add(scheduler, name, 10, max_tokens=2) for name in "abc"]
    assert [(c.start, c.length) for c in step(scheduler).chunks] == [(0, 10), (0, 10), (0, 4)]
    add(scheduler, "d", 10, max_tokens=2)
    assert [(c.start, c.length) for c in step(scheduler).chunks] == [(10, 1), (10, 1), (4, 6), (8, 2)]
    assert [r.num_cached_tokens for r in equal] == [0, 0, 0]


def test_a_cached_block_that_is_free_is_counted_once():
    """A pool of 4 blocks, all free, 2 of them with the request's beginning: it needs all 4, and not 2
    beside those. With one block held by somebody else it must wait."""
    scheduler = make_scheduler(num_blocks=1 + 4, enable_prefix_caching=True)
    add(scheduler, "first", 9, max_tokens=1)
    step(scheduler)
    assert scheduler.pool.num_free == 4
    held = scheduler.pool.allocate(1)
    request = add(scheduler, "request", 16, max_tokens=1)
    assert scheduler.schedule() == StepPlan()
    scheduler.pool.free(held)
    assert step(scheduler).chunks == [Chunk.of(request, 8, 8)]
    assert scheduler.pool.num_free == 4


def test_what_is_recomputed_is_found_if_it_is_still_there():
    """After its preemption nobody took its blocks but one, so most of it need not be computed again."""
    scheduler = make_scheduler(num_blocks=1 + 6, block_size=2, preemption_mode="recompute", enable_prefix_caching=True)
    a = Request("a", [7] * 5, SamplingParams(max_tokens=3))
    b = Request("b", [8] * 6, SamplingParams(max_tokens=4))
    scheduler.add(a)
    scheduler.add(b)
    step(scheduler)
    assert step(scheduler).preempted == [b]
    assert b.num_computed_tokens == 0
    step(scheduler)
    plan = step(scheduler)
    assert plan.returned == [b]
    assert plan.chunks == [Chunk.of(b, 4, 3)]
    assert b.num_cached_tokens == 0  # when it started


# ---------------------------------------------------------------------------- how requests end


def finish(tokens, num_prompt_tokens=4, num_blocks=100, max_model_len=1000, eos=(), **params) -> Request:
    """Run one request alone with these tokens."""
    scheduler = make_scheduler(num_blocks=num_blocks, max_model_len=max_model_len, max_num_batched_tokens=64)
    request = make_request("a", num_prompt_tokens, eos=eos, **params)
    scheduler.add(request)
    for token in tokens:
        step(scheduler, token)
    assert request.state is RequestState.FINISHED, "not finished by these tokens"
    assert scheduler.pool.num_free == scheduler.pool.num_usable
    return request


def test_every_eos_id_ends_a_request():
    for eos in (5, 7, 9):
        request = finish([1, eos], eos=[5, 7, 9])
        assert (request.finish_reason, request.stop_reason) == ("stop", None)
        assert request.output_token_ids == [1, eos]  # it stays in the output


def test_a_stop_token_ends_a_request_and_is_named():
    request = finish([1, 6], eos=[5], stop_token_ids=[3, 6])
    assert (request.finish_reason, request.stop_reason) == ("stop", 6)
    assert request.output_token_ids == [1, 6]


def test_ignore_eos_ignores_eos_but_no_stop_token():
    """An id that is both still counts as the caller's."""
    request = finish([5, 5, 6], eos=[5, 6], stop_token_ids=[6], ignore_eos=True)
    assert (request.output_token_ids, request.finish_reason, request.stop_reason) == ([5, 5, 6], "stop", 6)


def test_min_tokens_counts_the_output_only():
    """The sampler bans EOS before; where it comes nevertheless, it doesn't end the request."""
    request = finish([5, 6, 7, 5], num_prompt_tokens=50, eos=[5, 7], stop_token_ids=[6], min_tokens=3)
    assert (request.num_output_tokens, request.finish_reason) == (4, "stop")
    request = finish([5, 6, 7, 6], eos=[5, 7], stop_token_ids=[6], min_tokens=3)
    assert (request.num_output_tokens, request.stop_reason) == (4, 6)


def test_eos_as_the_very_last_token_is_a_stop_not_a_length():
    request = finish([1, 5], eos=[5], max_tokens=2)
    assert request.finish_reason == "stop"


def test_length_without_a_reason_where_caller_or_model_set_it():
    request = finish([1, 2, 3], max_tokens=3)
    assert (request.num_output_tokens, request.finish_reason, request.stop_reason) == (3, "length", None)
    request = finish([1] * 6, max_tokens=None, max_model_len=10)
    assert (request.num_output_tokens, request.finish_reason, request.stop_reason) == (6, "length", None)


def test_length_with_a_reason_where_the_pool_set_it():
    """8 positions; the last token sampled needs none."""
    request = finish([1] * 5, num_blocks=1 + 2, max_tokens=None)
    assert (request.num_output_tokens, request.finish_reason) == (5, "length")
    assert request.stop_reason == "the request has filled the whole KV cache, 2 blocks of 4"
    request = finish([1] * 5, num_blocks=1 + 2, max_tokens=5)  # exactly what was asked for
    assert request.stop_reason is None
    request = finish([1] * 5, num_blocks=1 + 2, max_tokens=None, max_model_len=9)
    assert request.stop_reason is None


def test_a_token_of_none_ends_that_request_only():
    """The model gave it no finite logits."""
    scheduler = make_scheduler()
    a, b = add(scheduler, "a", 3), add(scheduler, "b", 3)
    scheduler.update(scheduler.schedule(), [1, 1])
    assert scheduler.update(scheduler.schedule(), [None, 2]) == [a, b]
    scheduler.check_invariants()
    assert (a.state, a.finish_reason) == (RequestState.FINISHED, "error")
    assert a.stop_reason == "the model's logits were not finite"
    assert a.output_token_ids == [1]
    assert scheduler.running == [b]
    assert b.output_token_ids == [1, 2]


# ---------------------------------------------------------------------------- limits


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="^prompt is empty: it must have at least 1 token$"):
        add(make_scheduler(), "a", 0)


def test_a_request_is_submitted_once():
    """Its tokens, tables and places are its own: a second round would mix them up."""
    scheduler = make_scheduler()
    request = add(scheduler, "a", 3, max_tokens=1)
    step(scheduler)
    with pytest.raises(ValueError, match=r"^request 'a' has been submitted before: it is FINISHED$"):
        scheduler.add(request)
    assert not scheduler.requests


@pytest.mark.parametrize("max_tokens", [None, 1, 2])
@pytest.mark.parametrize("length", [14, 15, 16, 17])
def test_prompts_around_max_model_len(length, max_tokens):
    """A prompt that leaves no token to generate is refused, all others end."""
    scheduler = make_scheduler(max_model_len=16)
    if length >= 16:
        with pytest.raises(ValueError, match=f"prompt has {length} tokens, but max_model_len is 16.* at most 15"):
            add(scheduler, "a", length, max_tokens)
        assert not scheduler.requests
        return
    request = add(scheduler, "a", length, max_tokens)
    num_steps = run(scheduler)
    expected = min(16 - length, max_tokens or 16)
    assert (request.num_output_tokens, request.finish_reason) == (expected, "length")
    assert num_steps == expected


def test_what_can_never_fit_is_refused_and_what_outgrows_the_pool_ends():
    scheduler = make_scheduler(num_blocks=4)  # 3 usable blocks, 12 tokens
    with pytest.raises(ValueError, match=r"prompt has 20 tokens.*holds only 12 \(3 blocks of 4\); raise num_blocks"):
        add(scheduler, "large", 20)
    grows, small = add(scheduler, "grows", 3, max_tokens=40), add(scheduler, "small", 2, max_tokens=3)
    run(scheduler)
    assert (grows.num_output_tokens, grows.finish_reason) == (10, "length")
    assert "whole KV cache, 3 blocks of 4" in grows.stop_reason
    assert (small.num_output_tokens, small.finish_reason, small.stop_reason) == (3, "length", None)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_pool_of_two_blocks(length):
    """One usable block. The running request needs a second, there is none, and the next runs."""
    scheduler = make_scheduler(num_blocks=2)
    first, second = add(scheduler, "first", length), add(scheduler, "second", length)
    run(scheduler, max_steps=10)
    for request in (first, second):
        assert (request.num_output_tokens, request.finish_reason) == (5 - length, "length")
        assert request.stop_reason == "the request has filled the whole KV cache, 1 blocks of 4"
    with pytest.raises(ValueError, match="holds only 4"):
        add(scheduler, "third", 5)


@pytest.mark.parametrize("order", ["long first", "decodes first"])
@pytest.mark.parametrize("budget", [3, 4, 7, 30])
def test_a_chunk_larger_than_what_is_left_does_not_wedge_its_request(order, budget):
    """6 blocks of 4, a prompt of 20 half prefilled, two decodes growing."""
    scheduler = make_scheduler(num_blocks=1 + 6, max_num_batched_tokens=budget)
    if order == "long first":
        add(scheduler, "long", 20, max_tokens=2)
    decodes = [add(scheduler, name, 3, max_tokens=8) for name in ("x", "y")]
    if order == "decodes first":
        add(scheduler, "long", 20, max_tokens=2)
    long = scheduler.requests["long"]
    run(scheduler, max_steps=60)
    assert (long.num_output_tokens, [r.num_output_tokens for r in decodes]) == (2, [8, 8])


@pytest.mark.parametrize("budget", [2, 3, 5, 16])
def test_decodes_get_a_token_in_every_step_while_prompts_keep_arriving(budget):
    """One prompt per step, 200 steps. The gap between two tokens is one step, always."""
    scheduler = make_scheduler(num_blocks=2000, max_num_seqs=4, max_num_batched_tokens=budget)
    for number in range(200):
        add(scheduler, str(number), 1 + number % 19, max_tokens=1 + number % 7)
        decodes = {r.request_id for r in scheduler.running if r.num_output_tokens}
        assert decodes <= lengths(step(scheduler)).keys()
    run(scheduler, max_steps=3000)


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_block_boundaries(block_size):
    """A request holds ceil(computed / block_size) blocks, and the token that was just
    sampled is not computed: a prompt that fills its blocks needs the next one only when it decodes."""
    for length in range(1, 2 * block_size + 2):
        scheduler = make_scheduler(block_size=block_size)
        request = add(scheduler, "a", length)
        for step_number in range(2 * block_size + 1):
            step(scheduler)
            computed = length + step_number
            assert (request.num_computed_tokens, request.num_tokens) == (computed, computed + 1)
            assert len(request.block_table) == -(-computed // block_size)


# ---------------------------------------------------------------------------- ids and aborts


def test_an_id_can_be_used_again_only_when_its_request_has_ended():
    scheduler = make_scheduler()
    first = add(scheduler, "a", 3, max_tokens=2)
    for _ in range(2):  # while it waits, and while it runs
        with pytest.raises(ValueError, match="request_id 'a' is already in use"):
            add(scheduler, "a", 3)
        assert scheduler.requests["a"] is first
        step(scheduler)
    assert first.finish_reason == "length"
    second = add(scheduler, "a", 3)
    scheduler.abort("a")  # before it ran, so that the queue still knows it
    third = add(scheduler, "a", 3, max_tokens=2)
    run(scheduler)
    assert (second.finish_reason, second.num_output_tokens) == ("abort", 0)
    assert (third.finish_reason, third.num_output_tokens) == ("length", 2)


@pytest.mark.parametrize("when", ["waiting", "half prefilled", "decoding", "preempted", "swapped"])
def test_abort_in_any_state(when):
    """Its blocks are back at once, and a second abort has no effect."""
    num_cpu_blocks = 100 if when == "swapped" else 0
    scheduler = make_scheduler(num_blocks=1 + 6, block_size=2, max_num_batched_tokens=6, num_cpu_blocks=num_cpu_blocks)
    other = add(scheduler, "other", 2, max_tokens=9)
    request = add(scheduler, "a", 7)
    reached = {
        "waiting": lambda: True,
        "half prefilled": lambda: 0 < request.num_computed_tokens < 7,
        "decoding": lambda: request.num_output_tokens > 0,
        "preempted": lambda: request.num_preemptions > 0,
        "swapped": lambda: request.state is RequestState.SWAPPED,
    }[when]
    for _ in until(reached):
        step(scheduler)
    num_output_tokens = request.num_output_tokens
    held = len(request.block_table)
    free = scheduler.pool.num_free
    assert scheduler.abort("a") is request
    scheduler.check_invariants()
    assert scheduler.pool.num_free == free + held
    assert scheduler.memory.host_pool.num_free == num_cpu_blocks
    assert (request.state, request.finish_reason) == (RequestState.FINISHED, "abort")
    assert request.num_output_tokens == num_output_tokens  # what there is is kept
    assert scheduler.abort("a") is None
    run(scheduler)
    assert (other.num_output_tokens, other.num_preemptions) == (9, 0)
    assert request.num_output_tokens == num_output_tokens  # and nothing is added


def test_abort_of_unknown_and_of_finished_requests_has_no_effect():
    scheduler = make_scheduler()
    request = add(scheduler, "a", 3, max_tokens=1)
    step(scheduler)
    assert scheduler.abort("a") is None
    assert scheduler.abort("b") is None
    assert request.finish_reason == "length"


def test_abort_all_ends_every_request_and_leaves_a_scheduler_as_new():
    scheduler = make_scheduler(num_blocks=1 + 6, block_size=2, num_cpu_blocks=10, enable_prefix_caching=True)
    running, swapped = add(scheduler, "running", 5), add(scheduler, "swapped", 5)
    waiting = add(scheduler, "waiting", 5)
    for _ in until(lambda: swapped.state is RequestState.SWAPPED):
        step(scheduler)
    scheduler.abort_all()
    for request in (running, swapped, waiting):
        assert (request.state, request.finish_reason) == (RequestState.FINISHED, "abort")
        assert not request.block_table
        assert not request.host_blocks
    assert (scheduler.requests, scheduler.running, scheduler.num_waiting) == ({}, [], 0)
    assert_nothing_is_held(scheduler)
    again = add(scheduler, "waiting", 5, max_tokens=2)
    run(scheduler)
    assert (again.num_output_tokens, again.num_cached_tokens) == (2, 0)


def test_what_had_ended_when_an_update_broke_off_has_ended():
    """a had its last token and was not told so, b was told so and not yet taken off the list. Whoever has
    not ended goes on, with the tokens it has."""
    scheduler = make_scheduler()
    a, b, c = (make_request(name, 3, eos=[7], max_tokens=9) for name in "abc")
    for request in (a, b, c):
        scheduler.add(request)
    step(scheduler, 1)
    a.token_ids.append(7)
    b.finish_reason, b.state = "error", RequestState.FINISHED
    scheduler.recover()
    scheduler.check_invariants()
    assert (a.state, a.finish_reason) == (RequestState.FINISHED, "stop")
    assert (b.state, b.finish_reason) == (RequestState.FINISHED, "error")
    assert scheduler.requests == {"c": c}
    assert step(scheduler, 2).chunks == [Chunk.of(c, 0, 4)]
    assert c.output_token_ids == [1, 2]


def test_update_says_who_moved_as_they_move():
    """In the list that its owner gave, which so knows of them even if the update breaks off."""
    scheduler = make_scheduler()
    a, b = add(scheduler, "a", 3), add(scheduler, "b", 3)
    moved: list[Request] = []
    with pytest.raises(StopIteration):
        scheduler.update(scheduler.schedule(), [1], moved)  # b's token is missing
    assert moved == [a, b]


def test_check_invariants_looks_at_blocks_lists_and_queue():
    for damage, complaint in (
        (lambda s: s.pool.allocate(1), "reference counts are off"),
        (lambda s: s.running.clear(), "in the wrong list"),
        (lambda s: s.waiting.clear(), "0 times in the queue"),
        (lambda s: s.waiting.push(s.requests["b"]), "2 times in the queue"),
    ):
        scheduler = make_scheduler(max_num_seqs=1)
        add(scheduler, "a", 3)
        add(scheduler, "b", 3)
        step(scheduler)
        damage(scheduler)
        with pytest.raises(AssertionError, match=complaint):
            scheduler.check_invariants()


def test_a_request_that_finishes_on_its_first_token_leaves_nothing_behind():
    scheduler = make_scheduler(num_blocks=1 + 2)
    for number in range(10):
        add(scheduler, str(number), 8, max_tokens=1)
        step(scheduler)
        assert scheduler.pool.num_free == 2


# ---------------------------------------------------------------------------- cost


def test_a_long_prompt_that_has_to_wait_is_not_looked_up_in_every_step():
    """It begins as a running request does, and what it needs beside that isn't free until that one ends."""
    scheduler = make_scheduler(num_blocks=1 + 60, max_num_batched_tokens=200, enable_prefix_caching=True)
    running = add(scheduler, "running", 80, max_tokens=60)
    step(scheduler)
    waiting = add(scheduler, "waiting", 239, max_tokens=1)
    scheduler.memory.num_lookups = 0
    for num_steps in until(lambda: waiting.state is not RequestState.WAITING):
        step(scheduler)
    assert (running.num_output_tokens, num_steps) == (60, 59)
    assert scheduler.memory.num_lookups == 2


class WatchedRequest(Request):
    """Counts how often anybody looks at any request."""

    num_looks = 0

    def __getattribute__(self, name):
        WatchedRequest.num_looks += 1
        return super().__getattribute__(name)


class WatchedKey(tuple):
    """Counts how often two requests are compared."""

    num_comparisons = 0

    def __lt__(self, other):
        WatchedKey.num_comparisons += 1
        return super().__lt__(other)


class WatchedFCFS(FCFS):
    def key(self, request):
        return WatchedKey(super().key(request))

    def order(self, request):
        return WatchedKey(super().order(request))


def test_a_step_costs_the_same_however_many_requests_wait():
    """Counted, not timed: no request in the queue is looked at unless its turn has come. To find who
    is next takes a heap some comparisons, 17 times as many for 100,000 as for one."""
    looks, comparisons = [], []
    for num_waiting in (10, 100_000):
        scheduler = make_scheduler(num_blocks=40, policy=WatchedFCFS())
        params = SamplingParams(max_tokens=4)
        for number in range(8 + num_waiting):
            scheduler.add(WatchedRequest(str(number), [1, 2, 3], params))
        WatchedRequest.num_looks = WatchedKey.num_comparisons = 0
        for _ in range(6):
            plan = scheduler.schedule()
            scheduler.update(plan, [0 for chunk in plan.chunks if chunk.needs_sampling])
        scheduler.abort("7")  # which runs
        scheduler.abort("15")  # which waits
        looks.append(WatchedRequest.num_looks)
        comparisons.append(WatchedKey.num_comparisons)
    assert looks[0] == looks[1]
    assert comparisons[1] < 1000


def test_aborted_requests_do_not_pile_up_in_the_queue():
    """They leave the heap when they surface; a heap of little else is swept before."""
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, "first", 3)
    step(scheduler)
    add(scheduler, "stays", 3, max_tokens=1)
    for number in range(5000):  # clients that come and go while the engine is busy
        add(scheduler, str(number), 3)
        scheduler.abort(str(number))
        assert scheduler.waiting.num_entries <= 2 * scheduler.num_waiting + 64 + 1
    for number in range(5000):
        add(scheduler, str(number), 3)
    for number in range(5000):
        scheduler.abort(str(number))
        assert scheduler.waiting.num_entries <= 2 * scheduler.num_waiting + 64 + 1
    scheduler.abort("first")
    assert lengths(step(scheduler)) == {"stays": 3}
    step(scheduler)  # looks for the next and finds only aborted ones
    assert scheduler.waiting.num_entries == 0


def test_sweeping_the_queue_keeps_its_order():
    """Whatever the policy's order: of these the last come first, and two in three go."""
    scheduler = make_scheduler(max_num_seqs=1, policy=LastComeFirstServed())
    order = [7 * number % 300 for number in range(300)]
    requests = [make_request(str(number), 1, max_tokens=1) for number in range(300)]
    for arrival in order:
        scheduler.add(requests[arrival])
    for number in range(300):
        if number % 3:
            scheduler.abort(str(number))
    served = []
    for _ in until(lambda: not scheduler.requests):
        served += [chunk.request.arrival for chunk in step(scheduler).chunks]
    assert len(served) == 100
    assert served == sorted(served, reverse=True)


# ---------------------------------------------------------------------------- any traffic


EOS = {7, 8, 9}


def next_token(context: list[int]) -> int:
    """The toy model: any change anywhere in the context changes the token."""
    return zlib.crc32(repr(context).encode()) % 300  # few of them end a request


class ToyModel:
    """Keeps "KV", which here is the token itself, at the physical place that the block table names.

    Where nobody has written, or what nobody holds and nobody can find any more, a read is a KeyError.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.memory: dict[tuple[int, int], int] = {}
        self.host_memory: dict[tuple[int, int], int] = {}
        self.sampled: dict[Request, list[int]] = {}  # all that it ever said

    def place(self, request: Request, position: int) -> tuple[int, int]:
        return request.block_table[position // self.block_size], position % self.block_size

    def copy(self, source: dict, destination: dict, pairs: list[tuple[int, int]]) -> None:
        for origin, target in pairs:
            for offset in range(self.block_size):
                destination.pop((target, offset), None)
                if (origin, offset) in source:
                    destination[target, offset] = source[origin, offset]

    def forget_free_blocks(self, scheduler: Scheduler) -> None:
        pool, host_pool = scheduler.pool, scheduler.memory.host_pool
        free = {block for block in pool._free if not pool._is_cached(block)}
        self.memory = {place: token for place, token in self.memory.items() if place[0] not in free}
        self.host_memory = {p: token for p, token in self.host_memory.items() if p[0] not in host_pool._free}

    def execute(self, plan: StepPlan) -> list[int]:
        self.copy(self.memory, self.host_memory, plan.swap_out)
        self.copy(self.host_memory, self.memory, plan.swap_in)
        for request, start, length, *_ in plan.chunks:
            for position in range(start, start + length):
                self.memory[self.place(request, position)] = request.token_ids[position]
        tokens = []
        for chunk in plan.chunks:  # as in a forward pass, all are written before any is read
            if chunk.needs_sampling:
                end = chunk.start + chunk.length
                tokens.append(next_token([self.memory[self.place(chunk.request, p)] for p in range(end)]))
                self.sampled.setdefault(chunk.request, []).append(tokens[-1])
        return tokens


def alone(request: Request, limit: int) -> tuple[list[int], str]:
    """What the request must yield, from its prompt and parameters only; `limit` for prompt and output."""
    params = request.params
    context = request.token_ids[: request.num_prompt_tokens]
    output: list[int] = []
    while True:
        output.append(next_token(context + output))
        stops = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else EOS)
        if len(output) > params.min_tokens and output[-1] in stops:
            return output, "stop"
        if len(context) + len(output) == limit or len(output) == params.max_tokens:
            return output, "length"


params_strategy = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([None, 30, 20, 9, 4]),
    min_tokens=st.integers(0, 4),
    ignore_eos=st.booleans(),
    stop_token_ids=st.none() | st.just([1, 2, 3]),
)


@dataclass
class Arrival:
    wait: int  # steps since the arrival before
    num_prompt_tokens: int
    num_shared_tokens: int  # so many of them are those of everybody else
    params: SamplingParams
    abort_after: int | None  # steps
    priority: int
    client: str
    expected_output_len: int | None

    def request(self, number: int) -> Request:
        return Request(
            str(number),
            make_prompt(number, self.num_prompt_tokens, self.num_shared_tokens),
            self.params,
            eos_token_ids=EOS,
            priority=self.priority,
            client=self.client,
            expected_output_len=self.expected_output_len,
        )


def make_prompt(number: int, num_tokens: int, num_shared_tokens: int) -> list[int]:
    """A common beginning, and then tokens that nobody else has, so that a stray read is noticed."""
    return [1000 * (number + 1) * (position >= num_shared_tokens) + position for position in range(num_tokens)]


@dataclass
class Settings:
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    batching: str
    num_cpu_blocks: int
    preemption_mode: str
    costs: Costs
    enable_prefix_caching: bool
    long_prefill_token_threshold: int
    max_long_partial_prefills: int
    make_policy: Callable[[], Policy]

    @property
    def longest(self) -> int:
        """Prompt and output of a request together."""
        return min(self.max_model_len, (self.num_blocks - 1) * self.block_size + 1)

    def make_scheduler(self) -> Scheduler:
        arguments = dict(vars(self))
        return make_scheduler(policy=arguments.pop("make_policy")(), **arguments)


policy_makers = st.sampled_from([FCFS, SJF, Priority, Fair, Adaptive]) | st.sampled_from(
    [
        partial(SJF, ageing=0.5),
        partial(Priority, ageing=2),
        partial(Fair, client_weights={"a": 3.0}),
        partial(Adaptive, tpot_objective=0.01, min_num_seqs=1, min_num_batched_tokens=1),
    ]
)


@st.composite
def settings_strategy(draw) -> Settings:
    block_size = draw(st.integers(1, 16))
    # Small in tokens, not in blocks, so that every block size sees preemptions.
    num_usable = draw(st.integers(min(3, 48 // block_size), 48 // block_size))
    return Settings(
        block_size=block_size,
        num_blocks=1 + num_usable,
        max_num_seqs=draw(st.sampled_from([6, 4, 3, 2, 1])),
        max_num_batched_tokens=draw(st.integers(1, 12) | st.integers(1, 60)),
        max_model_len=draw(st.just(64) | st.integers(2, 64)),
        batching=draw(st.sampled_from(["continuous", "static"])),
        num_cpu_blocks=draw(st.integers(0, 3) | st.just(100)),
        preemption_mode=draw(st.sampled_from(PREEMPTION_MODES)),
        # By the block against by the token: in "auto" now the one and now the other is cheaper.
        costs=Costs(swap_block=draw(st.integers(0, 2 * block_size)), recompute_token=1),
        enable_prefix_caching=draw(st.booleans()),
        long_prefill_token_threshold=draw(st.just(0) | st.integers(1, 12)),
        max_long_partial_prefills=draw(st.integers(1, 2)),
        make_policy=draw(policy_makers),
    )


@st.composite
def traffic(draw) -> tuple[Settings, list[Arrival]]:
    chosen = draw(settings_strategy())
    arrival = st.builds(
        Arrival,
        wait=st.sampled_from([0, 0, 1, 3]),
        num_prompt_tokens=st.integers(1, min(6, chosen.longest - 1)) | st.integers(1, min(24, chosen.longest - 1)),
        num_shared_tokens=st.sampled_from([0, 5, 10, 100]),
        params=params_strategy,
        abort_after=st.none() | st.none() | st.integers(0, 12),
        priority=st.integers(0, 3),
        client=st.sampled_from("abc"),
        expected_output_len=st.none() | st.integers(1, 30),
    )
    return chosen, draw(st.lists(arrival, min_size=1, max_size=10))


def checked_step(scheduler: Scheduler, model: ToyModel) -> StepPlan:
    """One step, with all that must hold of every step under every policy."""
    policy, num_events = scheduler.policy, len(scheduler.events)
    before = sorted(scheduler.running, key=policy.key)
    oldest = min(scheduler.requests.values(), key=lambda r: r.arrival, default=None)
    plan = scheduler.schedule(scheduler.now + 0.001)
    chunks = {id(chunk.request): chunk for chunk in plan.chunks}

    assert len(chunks) == len(plan.chunks), "two chunks of one request"
    assert sum(chunk.length for chunk in plan.chunks) <= scheduler.maximum.max_num_batched_tokens
    assert len(scheduler.running) <= scheduler.maximum.max_num_seqs
    for chunk in plan.chunks:
        request = chunk.request
        assert chunk.length > 0
        assert chunk.start == request.num_computed_tokens
        assert chunk.start + chunk.length <= request.num_tokens
        assert len(request.block_table) == scheduler.pool.blocks_for(chunk.start + chunk.length)
    # No livelock, and stronger: the first that runs gets ahead in every step. It has to make way for a more
    # urgent one only, and waits for tokens only where the policy leaves fewer than there are decodes.
    assert plan.chunks or plan.preempted or oldest is None
    if before and not policy.urgent and not isinstance(policy, Adaptive):
        assert id(before[0]) in chunks
    # First come, first served, unless long prefills wait for each other: the oldest of all does.
    if type(policy) is FCFS and not scheduler.long_prefill_token_threshold:
        assert oldest is None or id(oldest) in chunks
    for request in plan.preempted:
        assert (request.state is RequestState.SWAPPED) == bool(request.host_blocks)
    assert len({host for _, host in plan.swap_out}) == len(plan.swap_out)
    assert len({block for _, block in plan.swap_in}) == len(plan.swap_in)
    assert not (plan.preempted and plan.returned)
    # Every running request that decodes gets its token in every step, unless it is preempted.
    for request in before:
        if request.num_tokens - request.num_computed_tokens == 1 and request not in plan.preempted:
            assert id(request) in chunks
    if plan.preempted:
        assert plan.preempted == before[: -len(plan.preempted) - 1 : -1], "the last go first"
        assert scheduler.running == before[: -len(plan.preempted)], "admitted in a step that preempted"
    # Whoever was preempted comes back before anybody starts, except that more urgent ones and, where long
    # prefills wait for each other, short ones pass.
    started = [event.request for event in scheduler.events[num_events:] if event.kind == "started"]
    if started and not policy.urgent and not scheduler.long_prefill_token_threshold:
        assert all(r.state is RequestState.RUNNING for r in scheduler.requests.values() if r.num_preemptions)
    # At most so many long prefills at a time, of those that were begun while there were as many; and an urgent one
    # waits for none that are less urgent.
    long = [r for r in scheduler.running if scheduler._is_long(r) and not r.num_preemptions]
    for request in [r for r in long if r not in before]:
        counted = [r for r in long if r is not request and (not policy.urgent or policy.key(r) < policy.key(request))]
        assert len(counted) < scheduler.max_long_partial_prefills
    if scheduler.static and before:
        assert set(map(id, scheduler.running)) <= set(map(id, before))

    tokens = model.execute(plan)
    seconds = 0.001 * (1 + sum(chunk.length for chunk in plan.chunks))
    moved = scheduler.update(plan, tokens, now=scheduler.now + seconds)
    assert len(moved) == len(tokens)
    # A client has been sent each token as it came, so none may be taken back or come twice.
    for request in {*before, *moved}:
        assert request.output_token_ids == model.sampled.get(request, [])
    scheduler.check_invariants()
    model.forget_free_blocks(scheduler)
    return plan


@given(traffic())
@settings(max_examples=10 * settings.default.max_examples)
def test_under_any_traffic_every_request_ends_with_the_tokens_it_has_alone(chosen_and_arrivals):
    """Each request's tokens are its own, blocks add up, all end: with a toy for a model."""
    chosen, arrivals = chosen_and_arrivals
    scheduler, model = chosen.make_scheduler(), ToyModel(chosen.block_size)
    schedule_of_arrivals: dict[int, list[Request]] = {}
    aborts: dict[int, list[str]] = {}
    requests: list[Request] = []
    time = 0
    for number, arrival in enumerate(arrivals):
        time += arrival.wait
        request = arrival.request(number)
        requests.append(request)
        schedule_of_arrivals.setdefault(time, []).append(request)
        if arrival.abort_after is not None:
            aborts.setdefault(time + arrival.abort_after, []).append(request.request_id)

    # Under FCFS the oldest request gets ahead in every step, and once the oldest it is never set back, so each
    # step after the last arrival takes one of the tokens that requests have in all. Under other policies
    # the first may change, and what was computed of the old one be lost.
    num_tokens = [min(chosen.longest, r.num_prompt_tokens + (r.params.max_tokens or 99)) for r in requests]
    max_steps = time + sum(num_tokens) * (1 if type(scheduler.policy) is FCFS else 3)
    for now in range(max_steps + 1):
        for request in schedule_of_arrivals.get(now, []):
            request.arrival_time = scheduler.now
            scheduler.add(request)
        for request_id in aborts.get(now, []):
            scheduler.abort(request_id)
            scheduler.check_invariants()
        if now >= time and not scheduler.requests:
            break
        checked_step(scheduler, model)
    else:
        raise AssertionError(f"not finished after {max_steps} steps")

    assert_nothing_is_held(scheduler)
    assert not scheduler.running
    assert scheduler.num_waiting == 0
    for request in requests:
        expected, reason = alone(request, chosen.longest)
        assert request.state is RequestState.FINISHED
        if request.finish_reason == "abort":
            assert request.output_token_ids == expected[: request.num_output_tokens]
        else:
            assert (request.output_token_ids, request.finish_reason) == (expected, reason)
        # Whoever was preempted fits again only when another has ended or has made one more of its blocks findable,
        # or has been displaced by an urgent one that came meanwhile.
        num_blocks = scheduler.pool.blocks_for(chosen.longest) if chosen.enable_prefix_caching else 0
        assert request.num_preemptions <= (1 + scheduler.policy.urgent) * len(requests) + num_blocks
        # FCFS starts a request when all older ones run. It is preempted only for one of those.
        if type(scheduler.policy) is FCFS and not chosen.long_prefill_token_threshold:
            assert request.num_preemptions < scheduler.maximum.max_num_seqs + num_blocks


@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("block_size", [1, 2, 3, 8])
@pytest.mark.parametrize("budget", [6, 60])
@pytest.mark.parametrize("mode", PREEMPTION_MODES)
@pytest.mark.parametrize("caching", [False, True])
def test_under_pressure_every_request_ends_with_the_tokens_it_has_alone(batching, block_size, budget, mode, caching):
    """As above, but where nearly everybody is preempted, some of them again and again."""
    scheduler = make_scheduler(
        num_blocks=1 + 36 // block_size,
        block_size=block_size,
        max_num_seqs=6,
        max_num_batched_tokens=budget,
        batching=batching,
        num_cpu_blocks=20 // block_size,  # not enough for all, so that even in "swap" some are recomputed
        preemption_mode=mode,
        costs=Costs(swap_block=1.1, recompute_token=1 / block_size),
        enable_prefix_caching=caching,
    )
    model, modes = ToyModel(block_size), Counter[str]()
    requests = [make_request(str(n), 1 + 7 * n % 12, max_tokens=20, ignore_eos=True) for n in range(24)]
    for request in requests:
        scheduler.add(request)
    for _ in until(lambda: not scheduler.requests):
        checked_step(scheduler, model)
        modes.update(event.details["mode"] for event in take_events(scheduler) if event.kind == "preempted")
    for request in requests:
        assert request.output_token_ids == alone(request, 37)[0]
        assert request.num_preemptions < 6 or caching
    assert modes.total() == sum(request.num_preemptions for request in requests) >= 10
    assert (modes["swap"] > 0) == (mode == "swap")  # in "auto" it is a little too expensive here
    assert_nothing_is_held(scheduler)


# ---------------------------------------------------------------------------- any history


class SchedulerHistory(RuleBasedStateMachine):
    """Calls in any order, against a plain record of which ids are live."""

    @initialize(chosen=settings_strategy())
    def start(self, chosen):
        self.chosen = chosen
        self.scheduler, self.model = chosen.make_scheduler(), ToyModel(chosen.block_size)
        self.requests: list[Request] = []  # all there ever were

    @property
    def live(self) -> dict[str, Request]:
        return {r.request_id: r for r in self.requests if r.finish_reason is None}

    def new_request(
        self, request_id: str, num_prompt_tokens: int, num_shared_tokens: int, params: SamplingParams
    ) -> Request:
        prompt = make_prompt(len(self.requests), num_prompt_tokens, num_shared_tokens)
        return Request(request_id, prompt, params, eos_token_ids=EOS)

    @rule(
        number=st.integers(0, 9),
        num_prompt_tokens=st.integers(1, 6) | st.integers(1, 24),
        num_shared_tokens=st.sampled_from([0, 5, 10, 100]),
        params=params_strategy,
    )
    def add(self, number, num_prompt_tokens, num_shared_tokens, params):
        """With a new id, with one that is in use, with one that was; fitting or not."""
        request = self.new_request(str(number), num_prompt_tokens, num_shared_tokens, params)
        if num_prompt_tokens >= self.chosen.longest:
            with pytest.raises(ValueError, match=f"prompt has {num_prompt_tokens} tokens"):
                self.scheduler.add(request)
        elif str(number) in self.live:
            with pytest.raises(ValueError, match="already in use"):
                self.scheduler.add(request)
        else:
            self.scheduler.add(request)
            self.requests.append(request)

    @rule(number=st.integers(0, 9))
    def abort(self, number):
        """Live, ended or never heard of; and once more."""
        request = self.live.get(str(number))
        assert self.scheduler.abort(str(number)) is request
        if request is not None:
            assert request.finish_reason == "abort"
        assert self.scheduler.abort(str(number)) is None

    @rule()
    def step(self):
        checked_step(self.scheduler, self.model)

    @rule()
    def plan_and_cancel(self):
        """The forward pass failed."""
        self.scheduler.cancel(self.scheduler.schedule())

    @rule()
    def recover(self):
        self.scheduler.recover()
        assert not self.scheduler.running
        assert_nothing_is_held(self.scheduler)

    @rule()
    def step_in_which_the_first_fails(self):
        """Its logits are not finite: it ends, and its neighbours get their tokens."""
        plan = self.scheduler.schedule()
        tokens: list[int | None] = [*self.model.execute(plan)]
        failed = [chunk.request for chunk in plan.chunks if chunk.needs_sampling][:1]
        for request in failed:
            tokens[0] = None
            self.model.sampled[request].pop()
        self.scheduler.update(plan, tokens)
        assert all(request.finish_reason == "error" for request in failed)

    @rule()
    def abort_all(self):
        live = self.live.values()
        self.scheduler.abort_all()
        assert all(request.finish_reason == "abort" for request in live)
        assert_nothing_is_held(self.scheduler)

    @precondition(lambda self: self.live)
    @rule()
    def step_until_one_ends(self):
        num_live = len(self.live)
        bound = sum(min(self.chosen.longest, r.max_num_tokens) for r in self.live.values())
        for _ in range(bound):
            if len(self.live) < num_live:
                return
            checked_step(self.scheduler, self.model)
        assert len(self.live) < num_live

    @invariant()
    def bookkeeping_agrees(self):
        self.scheduler.check_invariants()
        assert len(self.scheduler.running) <= self.scheduler.maximum.max_num_seqs
        live = self.live
        for request in live.values():
            assert request.num_registered_blocks * self.chosen.block_size <= request.num_computed_tokens
        assert self.scheduler.requests == live
        states = [r.state for r in live.values()]
        assert self.scheduler.num_waiting == len(states) - states.count(RequestState.RUNNING)
        assert len(self.scheduler.running) == states.count(RequestState.RUNNING)
        for request in self.requests:
            assert (request.state is RequestState.FINISHED) == (request.finish_reason is not None)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in until(lambda: not self.scheduler.requests):
            checked_step(self.scheduler, self.model)
        assert_nothing_is_held(self.scheduler)
        for request in self.requests:
            expected, _ = alone(request, self.chosen.longest)
            assert request.output_token_ids == expected[: request.num_output_tokens]
            if request.finish_reason not in ("abort", "error"):
                assert request.num_output_tokens == len(expected)


TestSchedulerHistory = SchedulerHistory.TestCase
