"""minicb/metrics.py and the events of a step: small runs whose numbers are worked out by hand."""

import math
from collections import Counter

import pytest
from conftest import eager, greedy, run_to_end, take_events
from hypothesis import given
from hypothesis import strategies as st

from minicb import SamplingParams
from minicb.blocks import BlockPool
from minicb.memory import Costs, Memory
from minicb.metrics import Metrics
from minicb.plan import Event, StepPlan
from minicb.policies import FCFS
from minicb.request import Request
from minicb.scheduler import Scheduler


def make_scheduler(
    *, num_host_blocks=10, mode="auto", costs: Costs | None = None, budget=32, batching="continuous"
) -> Scheduler:
    """6 usable blocks of 2 tokens, with prefix caching."""
    memory = Memory(BlockPool(1 + 6, 2, enable_prefix_caching=True), BlockPool(1 + num_host_blocks, 2), mode, costs)
    return Scheduler(
        memory, FCFS(), max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=100, batching=batching
    )


def add(scheduler: Scheduler, request_id: str, prompt: list[int], max_tokens: int = 20) -> Request:
    request = Request(request_id, prompt, SamplingParams(max_tokens=max_tokens))
    scheduler.add(request)
    return request


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    scheduler.update(plan, [0 for chunk in plan.chunks if chunk.samples])
    scheduler.check_invariants()
    return plan


def events(scheduler: Scheduler) -> list[tuple]:
    """What plans decided since the last look."""
    decided = [event for event in take_events(scheduler) if event.kind in ("started", "preempted", "returned")]
    return [(event.kind, event.request.request_id, *event.details.items()) for event in decided]


def step_events(scheduler: Scheduler) -> list[tuple]:
    take_events(scheduler)
    step(scheduler)
    return events(scheduler)


def started(request_id: str, num_tokens: int, num_cached_tokens: int) -> tuple:
    return "started", request_id, ("num_prompt_tokens", num_tokens), ("num_cached_tokens", num_cached_tokens)


def preempted(request_id: str, mode: str, swap_seconds: float, recompute_seconds: float) -> tuple:
    estimates = ("swap_seconds", swap_seconds), ("recompute_seconds", recompute_seconds)
    return "preempted", request_id, ("mode", mode), *estimates


def returned(request_id: str, num_swapped_in_blocks: int, num_computed_tokens: int) -> tuple:
    figures = ("num_swapped_in_blocks", num_swapped_in_blocks), ("num_computed_tokens", num_computed_tokens)
    return "returned", request_id, *figures


# ---------------------------------------------------------------------------- events


def test_a_start_says_how_many_tokens_there_are_and_how_many_were_found():
    """In the step in which a request gets its place, and never again."""
    scheduler = make_scheduler()
    add(scheduler, "a", [1, 2, 3, 4, 5], max_tokens=2)
    assert step_events(scheduler) == [started("a", 5, 0)]
    add(scheduler, "b", [1, 2, 3, 4])  # its last token is to be computed, and with it all of its block
    add(scheduler, "c", [1, 2, 9])
    assert step_events(scheduler) == [started("b", 4, 2), started("c", 3, 2)]
    scheduler.abort("b")
    add(scheduler, "d", [1])
    scheduler.abort("d")
    add(scheduler, "e", [1, 2, 3, 4, 5, 0, 7], max_tokens=1)
    assert step_events(scheduler) == [started("e", 7, 6)]  # 4 of a's prompt, and 5 with a's first output
    assert step_events(scheduler) == []


@pytest.mark.parametrize(
    ("mode", "num_host_blocks", "swap_block", "chosen", "swap_seconds"),
    [
        ("auto", 2, 1.75, "swap", 3.5),
        ("auto", 2, 2.0, "recompute", 4.0),  # no cheaper
        ("auto", 2, 2.25, "recompute", 4.5),
        ("auto", 1, 1.75, "recompute", math.inf),
        ("swap", 2, 100.0, "swap", 200.0),
        ("swap", 1, 1.75, "recompute", math.inf),
        ("recompute", 2, 1.75, "recompute", 3.5),
    ],
)
def test_a_preemption_says_how_and_what_either_way_would_have_cost(
    mode, num_host_blocks, swap_block, chosen, swap_seconds
):
    """c has 2 blocks, 4 tokens computed, a second a token. Without room on the host, a swap is out of reach."""
    scheduler = make_scheduler(num_host_blocks=num_host_blocks, mode=mode, costs=Costs(swap_block, 1.0))
    for name, first in (("a", 10), ("b", 20), ("c", 30)):
        add(scheduler, name, list(range(first, first + 4)), max_tokens=2)
    assert step_events(scheduler) == [started(name, 4, 0) for name in "abc"]
    assert step_events(scheduler) == [preempted("c", chosen, swap_seconds, 4.0)]
    # a and b have ended and each took one of c's blocks.
    num_swapped_in_blocks, num_computed_tokens = (2, 4) if chosen == "swap" else (0, 0)
    assert step_events(scheduler) == [returned("c", num_swapped_in_blocks, num_computed_tokens)]
    assert step_events(scheduler) == []


def test_a_block_that_is_not_full_costs_a_whole_copy_but_only_its_tokens():
    scheduler = make_scheduler(costs=Costs(1.25, 1.0))
    for name, length in (("a", 4), ("b", 4), ("c", 3)):
        add(scheduler, name, [ord(name)] * length)
    step(scheduler)
    assert step_events(scheduler) == [preempted("c", "swap", 2.5, 3.0)]


@pytest.mark.parametrize(("swap_block", "chosen"), [(1.25, "swap"), (1.5, "recompute")])
def test_tokens_that_others_hold_are_not_lost(swap_block, chosen):
    """b shares 2 of its 4 blocks of 2 with a: 4 tokens would have to be computed again, or 4 blocks copied
    out and 2 back. Of b's own blocks a takes the last, and then ends. All but that one are found, so it
    is the only one that comes back from the host; or 6 tokens needn't be computed."""
    scheduler = make_scheduler(costs=Costs(swap_block, 1.0))
    add(scheduler, "a", [1, 2, 3, 4], max_tokens=6)
    step(scheduler)
    add(scheduler, "b", [1, 2, 3, 4, 9])
    assert step_events(scheduler) == [started("b", 5, 4)]
    assert [step_events(scheduler) for _ in range(3)] == [[], [], []]  # now both have filled 4 blocks
    take_events(scheduler)
    plan = step(scheduler)
    assert events(scheduler) == [preempted("b", chosen, 3 * swap_block, 4.0)]
    assert len(plan.swap_out) == (4 if chosen == "swap" else 0)
    take_events(scheduler)
    plan = step(scheduler)
    assert events(scheduler) == [returned("b", *((1, 8) if chosen == "swap" else (0, 6)))]
    assert len(plan.swap_in) == (1 if chosen == "swap" else 0)


def test_a_request_without_blocks_loses_nothing():
    """In a static batch some get no tokens in the first steps. Whatever a token costs, none is lost."""
    scheduler = make_scheduler(mode="swap", budget=6, batching="static", costs=Costs(0.0, math.inf))
    for name in "abc":
        add(scheduler, name, [ord(name)] * 4)
    assert step_events(scheduler) == [started(name, 4, 0) for name in "abc"]
    scheduler.pool.allocate(scheduler.pool.num_free)  # somebody else has the rest
    take_events(scheduler)
    scheduler.schedule()
    assert events(scheduler) == [
        preempted("c", "recompute", 0.0, 0.0),
        preempted("b", "swap", 0.0, math.inf),
    ]


# ---------------------------------------------------------------------------- metrics


def test_the_figures_of_a_run_are_sums_of_its_events():
    request, metrics = Request("a", [1], SamplingParams()), Metrics()
    assert (metrics, metrics.prefix_cache_hit_rate) == (Metrics(0, 0, 0, Counter(), 0), 0)
    preempted = {"swap_seconds": 1.0, "recompute_seconds": 2.0}
    first = [
        Event("started", request, {"num_prompt_tokens": 10, "num_cached_tokens": 0}),
        Event("started", request, {"num_prompt_tokens": 6, "num_cached_tokens": 4}),
        Event("preempted", request, preempted | {"mode": "swap"}),
        Event("heard of later", request, {}),
    ]
    metrics.observe(first)
    metrics.observe([])
    assert metrics == Metrics(2, 16, 4, Counter(swap=1), 0)
    assert metrics.prefix_cache_hit_rate == 0.25
    second = [
        Event("preempted", request, preempted | {"mode": "recompute"}),
        Event("preempted", request, preempted | {"mode": "swap"}),
        Event("returned", request, {"num_swapped_in_blocks": 3, "num_computed_tokens": 11}),
        Event("returned", request, {"num_swapped_in_blocks": 0, "num_computed_tokens": 0}),
        Event("started", request, {"num_prompt_tokens": 4, "num_cached_tokens": 1}),
    ]
    metrics.observe(second)
    assert metrics == Metrics(3, 20, 5, Counter(swap=2, recompute=1), 3)
    assert metrics.prefix_cache_hit_rate == 0.25


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 49)), max_size=8))
def test_the_hit_rate_is_a_share(starts):
    """Between 0 and 1, and of tokens, not of requests; 0 where nothing has started."""
    metrics, request = Metrics(), Request("a", [1], SamplingParams())
    starts = [(num_tokens, min(num_cached, num_tokens - 1)) for num_tokens, num_cached in starts]
    for num_tokens, num_cached in starts:
        metrics.observe([Event("started", request, {"num_prompt_tokens": num_tokens, "num_cached_tokens": num_cached})])
    assert 0 <= metrics.prefix_cache_hit_rate < 1
    if starts:
        found, all_of_them = sum(c for _, c in starts), sum(n for n, _ in starts)
        assert metrics.prefix_cache_hit_rate == pytest.approx(found / all_of_them)


def test_an_engine_keeps_the_figures_of_its_runs(tiny):
    """As where b shares two blocks with a, but through an engine, and twice; an abort before the start
    is no start. The second time a finds all of its prompt but the block of its last token, b all but
    its last token."""
    engine = eager(tiny, block_size=2, num_blocks=1 + 6, num_cpu_blocks=4, preemption_mode="swap")
    assert engine.metrics == Metrics()
    for time in (1, 2):
        engine.add_request([1, 2, 3, 4], greedy(6))
        engine.step()
        engine.add_request([1, 2, 3, 4, 9], greedy(6))
        engine.abort_request(engine.add_request([1, 2, 3, 4], greedy(6)))
        run_to_end(engine)
        assert engine.metrics == Metrics(2 * time, 9 * time, (0, 4, 10)[time], Counter(swap=time), time)
    assert engine.metrics.prefix_cache_hit_rate == 10 / 18


def test_a_start_counts_once_though_its_step_breaks_off(tiny):
    """The request keeps the place that the plan gave it, so no later plan says that it starts."""
    engine = eager(tiny, block_size=2, num_blocks=9)
    engine.add_request([1, 2, 3], greedy(2))
    execute = engine.runner.execute

    def fail(plan: StepPlan):
        engine.runner.execute = execute
        raise KeyboardInterrupt

    engine.runner.execute = fail
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    run_to_end(engine)
    assert engine.metrics == Metrics(num_started=1, num_prompt_tokens=3)
