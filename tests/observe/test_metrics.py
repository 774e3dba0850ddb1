"""Metrics and the events of a step: small runs with numbers worked out by hand."""

import gc
import math
import weakref
from collections import Counter

import numpy as np
import pytest
from conftest import eager, greedy, take_events
from conftest import run_to_end as run_engine_to_end
from hypothesis import given, settings
from hypothesis import strategies as st
from test_core import (
    Diary,
    make_core,
    make_request,
    random_run,
    run_to_end,
    try_to,
    two_clients,
)

from minicb import SamplingParams
from minicb.blocks import BlockPool
from minicb.memory import Memory, PreemptionCosts
from minicb.observe.metrics import LATENCIES, Metrics, RequestCounts, Utilization, percentile, summary
from minicb.plan import Chunk, Step, StepPlan
from minicb.policies import FCFS
from minicb.request import Request
from minicb.scheduler import Scheduler


def make_scheduler(
    *, num_host_blocks=10, mode="auto", costs: PreemptionCosts | None = None, budget=32, batching="continuous"
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
    scheduler.update(plan, [0 for chunk in plan.chunks if chunk.needs_sampling])
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
    scheduler = make_scheduler(num_host_blocks=num_host_blocks, mode=mode, costs=PreemptionCosts(swap_block, 1.0))
    for name, first in (("a", 10), ("b", 20), ("c", 30)):
        add(scheduler, name, list(range(first, first + 4)), max_tokens=2)
    assert step_events(scheduler) == [started(name, 4, 0) for name in "abc"]
    assert step_events(scheduler) == [preempted("c", chosen, swap_seconds, 4.0)]
    # a and b have ended and each took one of c's blocks.
    num_swapped_in_blocks, num_computed_tokens = (2, 4) if chosen == "swap" else (0, 0)
    assert step_events(scheduler) == [returned("c", num_swapped_in_blocks, num_computed_tokens)]
    assert step_events(scheduler) == []


def test_a_block_that_is_not_full_costs_a_whole_copy_but_only_its_tokens():
    scheduler = make_scheduler(costs=PreemptionCosts(1.25, 1.0))
    for name, length in (("a", 4), ("b", 4), ("c", 3)):
        add(scheduler, name, [ord(name)] * length)
    step(scheduler)
    assert step_events(scheduler) == [preempted("c", "swap", 2.5, 3.0)]


@pytest.mark.parametrize(("swap_block", "chosen"), [(1.25, "swap"), (1.5, "recompute")])
def test_tokens_that_others_hold_are_not_lost(swap_block, chosen):
    """b shares 2 of its 4 blocks of 2 with a: 4 tokens would have to be computed again, or 4 blocks copied
    out and 2 back. Of b's own blocks a takes the last, and then ends. All but that one are found, so it
    is the only one that comes back from the host; or 6 tokens needn't be computed."""
    scheduler = make_scheduler(costs=PreemptionCosts(swap_block, 1.0))
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
    scheduler = make_scheduler(mode="swap", budget=6, batching="static", costs=PreemptionCosts(0.0, math.inf))
    for name in "abc":
        add(scheduler, name, [ord(name)] * 4)
    assert step_events(scheduler) == [started(name, 4, 0) for name in "abc"]
    scheduler.pool.allocate(scheduler.pool.num_free)  # the rest of the pool is taken
    take_events(scheduler)
    scheduler.schedule()
    assert events(scheduler) == [
        preempted("c", "recompute", 0.0, 0.0),
        preempted("b", "swap", 0.0, math.inf),
    ]


# ---------------------------------------------------------------------------- a run worked out by hand

# test_core.two_clients, to be read beside this. Requests, and when their tokens came:
#   a  alice  due 9.5  started 10    12 13 14        ended 14    length
#   b  bob    due 10   started 10    12 13 18 18.5   ended 18.5  length, was swapped out
#   c  alice  due 11   started 15    18 18.5         ended 18.5  abort
#   d  bob    due 18   started 18.5                  ended 19    error
# a and b completed. From the first arrival to the end of the last step it is 9.5 s.


def approx_figures(mean: float, median: float, p90: float, p99: float) -> object:
    return pytest.approx({"mean": mean, "median": median, "p90": p90, "p99": p99}, rel=1e-12)


def same(value: float) -> object:
    return approx_figures(value, value, value, value)


@pytest.fixture
def by_hand() -> Metrics:
    metrics = Metrics()
    two_clients([metrics])
    return metrics


def test_the_times_of_a_request(by_hand):
    a, b, c, d = by_hand.finished
    assert [record.request_id for record in (a, b, c, d)] == ["a", "b", "c", "d"]
    assert (a.ttft, a.tpot, a.itl, a.e2el, a.queue_time) == (2.5, 1.0, [1, 1], 4.5, 0.5)
    assert (b.ttft, b.tpot, b.itl, b.e2el, b.queue_time) == (2.0, 6.5 / 3, [1, 5, 0.5], 8.5, 0.0)
    assert (c.ttft, c.tpot, c.itl, c.e2el, c.queue_time) == (7.0, 0.5, [0.5], 7.5, 4.0)
    assert (d.e2el, d.queue_time, d.itl) == (1.0, 0.5, [])
    assert math.isnan(d.ttft)
    assert math.isnan(d.tpot)
    assert [record.client for record in (a, b, c, d)] == ["alice", "bob", "alice", "bob"]
    assert [record.finish_reason for record in (a, b, c, d)] == ["length", "length", "abort", "error"]
    assert [record.num_preemptions for record in (a, b, c, d)] == [0, 1, 0, 0]
    assert [(record.num_prompt_tokens, record.num_cached_tokens) for record in (a, b, c, d)] == [
        *((5, 0), (3, 0), (2, 0), (3, 2))
    ]
    for record in (a, b, c):  # the definition, where vLLM has it
        assert record.tpot == (record.token_times[-1] - record.arrival_time - record.ttft) / (
            len(record.token_times) - 1
        )


def test_latencies_are_those_of_the_requests_that_completed(by_hand):
    """Of two values x < y, p90 is x + 0.9 (y - x). The gaps are 1 1 and 1 5 0.5; of five, p90 lies 0.6 of the way from
    the fourth to the fifth, p99 0.96."""
    assert by_hand.latencies() == {
        "ttft": approx_figures(2.25, 2.25, 2.45, 2.495),
        "tpot": approx_figures(19 / 12, 19 / 12, 2.05, 2.155),
        "itl": approx_figures(1.7, 1.0, 3.4, 4.84),
        "e2el": approx_figures(6.5, 6.5, 8.1, 8.46),
        "queue_time": approx_figures(0.25, 0.25, 0.45, 0.495),
    }
    assert list(by_hand.latencies()) == list(LATENCIES)
    assert by_hand.latencies("alice") == {
        "ttft": same(2.5),
        "tpot": same(1.0),
        "itl": same(1.0),
        "e2el": same(4.5),
        "queue_time": same(0.5),
    }
    assert by_hand.latencies("bob")["itl"] == approx_figures(6.5 / 3, 1.0, 4.2, 4.92)


def test_goodput_is_of_those_that_met_every_objective(by_hand):
    """To the second: an objective is met by what takes exactly as long."""
    assert by_hand.goodput({}) == 2 / 9.5
    assert by_hand.goodput({"ttft": 2.5}) == 2 / 9.5
    assert by_hand.goodput({"ttft": 2.49}) == 1 / 9.5
    assert by_hand.goodput({"ttft": 2.5, "tpot": 1.0}) == 1 / 9.5  # a
    assert by_hand.goodput({"ttft": 2.49, "tpot": 2.0}) == 0.0
    assert by_hand.goodput({"e2el": 8.5, "queue_time": 0.0}) == 1 / 9.5  # b
    assert by_hand.goodput({"ttft": 2.5}, "alice") == 1 / 9.5
    assert by_hand.goodput({"tpot": 1.0}, "bob") == 0.0
    for wrong in ("itl", "TTFT", "seconds"):
        with pytest.raises(ValueError, match="objectives must be one of 'ttft', 'tpot', 'e2el', 'queue_time'"):
            by_hand.goodput({"ttft": 1.0, wrong: 1.0})


def test_throughput_counts_what_completed(by_hand):
    assert by_hand.seconds == 9.5
    assert by_hand.throughput() == {"requests": 2 / 9.5, "output_tokens": 7 / 9.5, "total_tokens": 15 / 9.5}
    assert by_hand.throughput("alice") == {"requests": 1 / 9.5, "output_tokens": 3 / 9.5, "total_tokens": 8 / 9.5}
    assert by_hand.throughput("bob") == {"requests": 1 / 9.5, "output_tokens": 4 / 9.5, "total_tokens": 7 / 9.5}


def test_counts_are_of_all_requests_and_by_client(by_hand):
    alice = RequestCounts(2, 7, 0, 5, 0, Counter(), Counter(length=1, abort=1), 5, 3)
    bob = RequestCounts(2, 6, 2, 4, 1, Counter(swap=1), Counter(length=1, error=1), 3, 4)
    assert by_hand.clients() == ["alice", "bob"]
    assert by_hand.by_client == {"alice": alice, "bob": bob}
    assert (by_hand.counts("alice"), by_hand.counts("bob")) == (alice, bob)
    both = (by_hand.num_started, by_hand.num_prompt_tokens, by_hand.num_cached_tokens, by_hand.num_output_tokens)
    assert both == (4, 13, 2, 9)
    assert by_hand.num_swapped_in_blocks == 1
    assert by_hand.preemptions_by_mode == Counter(swap=1)
    assert by_hand.num_finished == Counter(length=2, abort=1, error=1)
    assert (by_hand.num_completed, alice.num_completed, bob.num_completed) == (2, 1, 1)
    assert by_hand.prefix_cache_hit_rate == 2 / 13
    assert (alice.prefix_cache_hit_rate, bob.prefix_cache_hit_rate) == (0, 2 / 6)


def test_utilization_is_of_time_and_of_tokens(by_hand):
    """Steps of 2, 1, 1, 3, 0.5 and 0.5 s; in steps 1, 2 and 4 a request waited."""
    every, full = by_hand.all_steps, by_hand.steps_with_queue
    assert by_hand.num_steps == 6
    assert (every.seconds, full.seconds) == (8.0, 2.5)
    assert every.occupancy == (2 * 2 + 2 * 1 + 1 * 1 + 2 * 3 + 2 * 0.5 + 1 * 0.5) / (2 * 8)
    assert full.occupancy == (2 * 1 + 1 * 1 + 2 * 0.5) / (2 * 2.5)
    assert every.budget_use == (8 + 2 + 1 + 3 + 2 + 1) / (6 * 8)
    assert full.budget_use == (2 + 1 + 2) / (3 * 8)
    assert every.block_use == (5 * 2 + 5 * 1 + 4 * 1 + 4 * 3 + 5 * 0.5 + 2 * 0.5) / (5 * 8)
    assert full.block_use == (5 * 1 + 4 * 1 + 5 * 0.5) / (5 * 2.5)


def test_an_unknown_client_has_nothing(by_hand):
    assert all(math.isnan(value) for figures in by_hand.latencies("eve").values() for value in figures.values())
    assert by_hand.goodput({"ttft": 9.0}, "eve") == 0.0
    assert by_hand.throughput("eve") == {"requests": 0.0, "output_tokens": 0.0, "total_tokens": 0.0}
    assert by_hand.counts("eve") == RequestCounts()
    assert by_hand.clients() == ["alice", "bob"]


# ---------------------------------------------------------------------------- percentiles


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.sampled_from([0, 1, 50, 90, 99, 100]))
def test_percentiles_are_those_of_numpy(values, percent):
    expected = float(np.percentile(values, percent))
    assert percentile(sorted(values), percent) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(st.lists(st.floats(0, 1e6) | st.just(math.nan), max_size=30))
def test_summaries_leave_out_nan(values):
    known = [value for value in values if not math.isnan(value)]
    figures = summary(values)
    if not known:
        assert all(math.isnan(value) for value in figures.values())
        return
    expected = {"mean": np.mean(known), "median": np.median(known)}
    expected |= {"p90": np.percentile(known, 90), "p99": np.percentile(known, 99)}
    assert figures == pytest.approx(expected, rel=1e-9, abs=1e-9)


# ---------------------------------------------------------------------------- edges


def test_where_nothing_has_happened_there_are_no_figures():
    """NaN, not an error; rates and counts of nothing in no time are NaN as well."""
    metrics = Metrics()
    core = make_core(observers=[metrics])
    for _ in range(2):
        assert all(math.isnan(value) for figures in metrics.latencies().values() for value in figures.values())
        assert math.isnan(metrics.goodput({"ttft": 1.0}))
        assert all(math.isnan(value) for value in metrics.throughput().values())
        assert math.isnan(metrics.all_steps.occupancy)
        assert math.isnan(metrics.all_steps.block_use)
        assert math.isnan(metrics.all_steps.budget_use)
        assert math.isnan(metrics.seconds)
        assert metrics.prefix_cache_hit_rate == 0
        core.add(make_request("a"))  # it waits
        core.abort("a")  # and there has been no step
    assert metrics.num_finished == Counter(abort=2)


def test_steps_that_take_no_time_have_no_rates():
    metrics = Metrics()
    core = make_core(durations=[0, 0], observers=[metrics])
    core.add(make_request("a", 1, 2))
    run_to_end(core)
    assert metrics.seconds == 0.0
    assert math.isnan(metrics.goodput({"ttft": 1.0}))
    assert math.isnan(metrics.throughput()["output_tokens"])
    assert math.isnan(metrics.all_steps.occupancy)
    assert metrics.all_steps.budget_use == 2 / 32
    assert metrics.latencies()["e2el"]["p99"] == 0.0


def test_time_counts_from_the_first_arrival_in_whatever_order_they_are_accepted():
    metrics = Metrics()
    core = make_core(observers=[metrics])
    core.add(make_request("a", 1, 1), arrival_time=-1.0)
    core.add(make_request("b", 1, 1), arrival_time=-3.0)
    core.add(make_request("c", 1, 1), arrival_time=-2.0)
    core.step()
    assert (metrics.begin, metrics.end, metrics.seconds) == (-3.0, 1.0, 4.0)
    assert metrics.throughput()["requests"] == 3 / 4


def test_a_single_token_has_no_tpot_and_is_not_late_by_it():
    metrics = Metrics()
    core = make_core(observers=[metrics])
    core.add(make_request("a", 1, 1))
    run_to_end(core)
    (record,) = metrics.finished
    assert (record.ttft, record.e2el, record.itl) == (1.0, 1.0, [])
    assert math.isnan(record.tpot)
    assert math.isnan(metrics.latencies()["tpot"]["mean"])
    assert metrics.goodput({"tpot": 0.0, "ttft": 1.0}) == 1.0
    assert metrics.goodput({"tpot": 0.0, "ttft": 0.5}) == 0.0


def test_what_has_not_happened_yet_is_nan():
    metrics = Metrics()
    core = make_core(observers=[metrics])
    core.add(request := make_request("a", 1, 5))
    record = request.metrics
    assert record is metrics.live[request]
    assert [math.isnan(value) for value in (record.ttft, record.tpot, record.e2el, record.queue_time)] == [True] * 4
    core.step()
    assert (record.ttft, record.queue_time) == (1.0, 0.0)
    assert math.isnan(record.e2el)
    assert metrics.latencies()["ttft"]["mean"] != 1.0  # it may yet be aborted


def test_metrics_made_while_requests_run_know_only_what_they_saw():
    """a has 2 tokens when the second comes, and b waits. Both see b as it is; of a the second lacks what was before."""
    first, second = Metrics(), Metrics()
    core = make_core(max_num_seqs=1, observers=[first])
    core.add(make_request("a", 1, 4))
    core.step()
    core.add(make_request("b", 1, 2))  # due at 1
    core.step()
    core.observers.append(second)
    run_to_end(core)  # a's tokens come at 1, 2, 3 and 4, b's at 5 and 6
    a, b = second.finished
    assert [str(time) for time in a.token_times] == ["nan", "nan", "3.0", "4.0"]
    assert all(math.isnan(value) for value in (a.ttft, a.tpot, a.queue_time))
    assert (a.e2el, a.itl[-1]) == (4.0, 1.0)
    assert (b.ttft, b.tpot, b.e2el, b.queue_time) == (4.0, 1.0, 5.0, 3.0)
    assert (second.begin, second.end, second.num_steps) == (2.0, 6.0, 4)
    assert (second.num_started, second.num_output_tokens) == (1, 4)
    assert second.throughput() == {"requests": 2 / 4, "output_tokens": 4 / 4, "total_tokens": 6 / 4}
    assert second.latencies()["ttft"] == same(4.0)
    assert second.latencies()["itl"] == same(1.0)
    assert second.goodput({"ttft": 4.0}) == 2 / 4  # what isn't known isn't late
    assert (first.begin, first.num_output_tokens, first.num_started) == (0.0, 6, 2)
    assert first.latencies()["ttft"] == approx_figures(2.5, 2.5, 3.7, 3.97)


def test_two_metrics_on_one_core_are_independent():
    first, second = Metrics(), Metrics(keep=1)
    core = make_core(observers=[first, second])
    requests = [make_request(name, 2, 3) for name in "ab"]
    for request in requests:
        core.add(request)
    run_to_end(core)
    assert [record.request_id for record in second.finished] == ["b"]
    assert list(first.finished)[1] == second.finished[0]
    assert [request.metrics for request in requests] == list(first.finished)  # theirs is the first's
    assert requests[0].metrics is first.finished[0]
    assert (vars(first.all_steps), first.throughput()) == (vars(second.all_steps), second.throughput())


def test_keep_bounds_memory_and_not_the_counts():
    """100 requests, one after another; of the latest 10 the last 5 were fast."""
    metrics = Metrics(keep=10)
    core = make_core(durations=[2.0] * 95 + [1.0] * 5, observers=[metrics])
    refs = []
    for number in range(100):
        request = make_request(str(number), 3, 1, client=f"client {number}")
        refs.append(weakref.ref(request))
        core.add(request)
        core.step()
    del request
    gc.collect()
    assert all(ref() is None for ref in refs)
    assert [record.request_id for record in metrics.finished] == [str(number) for number in range(90, 100)]
    assert not metrics.live
    assert list(metrics.by_client) == [f"client {number}" for number in range(90, 100)]
    assert metrics.seconds == 195
    assert metrics.throughput() == {"requests": 100 / 195, "output_tokens": 100 / 195, "total_tokens": 400 / 195}
    assert metrics.latencies()["ttft"]["mean"] == 1.5
    assert metrics.goodput({"ttft": 2.0}) == 100 / 195
    assert metrics.goodput({"ttft": 1.0}) == 50 / 195  # half of those that are known, so half of all


def test_keep_bounds_the_clients_too():
    """The clients seen last stay: b has a request under way, and d came after c. RequestCounts of all requests lose nothing."""
    metrics = Metrics(keep=2)
    core = make_core(observers=[metrics])
    core.add(make_request("b", 1, 9, "b"))
    for client in "acd":
        core.add(make_request(client, 1, 1, client))
        core.step()
    assert metrics.clients() == ["b", "d"]
    assert metrics.counts("a") == RequestCounts()
    assert metrics.counts("b").num_output_tokens == 3
    run_to_end(core)
    assert metrics.num_output_tokens == 12
    core.add(make_request("a again", 1, 1, "a"))
    core.step()
    assert metrics.clients() == ["a", "b"]
    assert metrics.counts("a").num_started == 1  # from 0 again


def test_slots_above_a_limit_that_has_fallen_are_slots_all_the_same():
    """A policy may lower the limits while more requests run, and each of them has its token."""
    shares = Utilization()
    plan = StepPlan(chunks=[Chunk.of(make_request(str(number)), 0, 1) for number in range(5)])
    shares.add(Step(0, 0.0, 2.0, plan, [], 5, 0, 2, 8, max_num_seqs=2, max_num_batched_tokens=4))
    assert (shares.occupancy, shares.budget_use, shares.block_use) == (1.0, 1.0, 0.75)


# ---------------------------------------------------------------------------- steps that fail


def test_a_step_that_fails_costs_time_and_nothing_else():
    """It has no `on_step`. The next step has the same number, and takes from 1.5 to 2.5."""
    metrics = Metrics()
    core = make_core(observers=[metrics])
    core.add(make_request("a", 1, 3))
    core.step()
    core.runner.break_off.append(0.5)
    run_to_end(core)
    (record,) = metrics.finished
    assert list(record.token_times) == [1.0, 2.5, 3.5]
    assert (metrics.num_started, metrics.num_output_tokens, metrics.num_steps) == (1, 3, 3)
    assert (metrics.all_steps.seconds, metrics.seconds) == (3.0, 3.5)
    assert metrics.all_steps.num_batched_tokens == 3


def test_an_abort_after_a_step_that_failed_keeps_the_tokens_from_before():
    metrics = Metrics()
    core = make_core(observers=[metrics])
    core.add(make_request("a", 1, 3))
    core.step()
    core.runner.break_off.append(0.5)
    try_to(core.step)
    core.abort("a")
    (record,) = metrics.finished
    assert (list(record.token_times), record.e2el, record.finish_reason) == ([1.0], 1.5, "abort")
    assert not metrics.live


# ---------------------------------------------------------------------------- whatever happens


@given(random_run())
@settings(max_examples=5 * settings.default.max_examples)
def test_whatever_happens_the_figures_agree(drawn):
    metrics, diary = Metrics(), Diary()
    core = drawn.run([metrics, diary])
    requests = list(dict.fromkeys(event.request for event in diary.events if event.kind == "queued"))
    assert not metrics.live
    records = {record.request_id: record for record in metrics.finished}
    assert len(records) == len(metrics.finished) == len(requests)
    for request in requests:
        record = records[request.request_id]
        assert request.metrics is record
        assert len(record.token_times) == request.num_output_tokens
        assert (record.finish_reason, record.client) == (request.finish_reason, request.scheduling.client)
        assert record.num_preemptions == request.num_preemptions
        assert record.arrival_time <= record.finished_time
        assert list(record.token_times) == sorted(record.token_times)
        if request.has_started:
            assert record.queue_time >= 0
        if record.token_times:
            assert record.queue_time <= record.ttft <= record.e2el
            assert record.ttft + sum(record.itl) == pytest.approx(record.token_times[-1] - record.arrival_time)
        if len(record.token_times) > 1:
            assert min(record.itl) <= record.tpot * (1 + 1e-9)
            assert record.tpot <= max(record.itl) * (1 + 1e-9)
    assert metrics.num_output_tokens == sum(request.num_output_tokens for request in requests)
    assert metrics.preemptions_by_mode.total() == sum(request.num_preemptions for request in requests)
    assert metrics.num_finished == Counter(request.finish_reason for request in requests)
    assert metrics.num_started == sum(request.has_started for request in requests)
    assert metrics.num_steps == core.num_steps == len(diary.steps)
    assert metrics.all_steps.num_batched_tokens == sum(c.length for step in diary.steps for c in step.plan.chunks)
    for shares in (metrics.all_steps, metrics.steps_with_queue):
        for share in (shares.occupancy, shares.budget_use, shares.block_use):
            assert math.isnan(share) or 0 <= share <= 1 + 1e-12
    # Those of the clients add up to those of all.
    clients = [metrics.counts(client) for client in metrics.clients()]
    for name, value in vars(RequestCounts()).items():
        total = sum((getattr(counts, name) for counts in clients), type(value)())
        assert total == getattr(metrics, name), name
    for name, rate in metrics.throughput().items():
        if not math.isnan(rate):
            assert rate == pytest.approx(sum(metrics.throughput(client)[name] for client in metrics.clients()))
    objectives = {"ttft": 3.0, "e2el": 9.0}
    goodput = metrics.goodput(objectives)
    if not math.isnan(goodput):
        assert 0 <= goodput <= metrics.throughput()["requests"]
        assert goodput == pytest.approx(sum(metrics.goodput(objectives, client) for client in metrics.clients()))


# ---------------------------------------------------------------------------- in an engine


def test_an_engine_keeps_the_figures_of_its_runs(tiny):
    """As where b shares two blocks with a, but through an engine, and twice; an abort before the start
    is no start. The second time a finds all of its prompt but the block of its last token, b all but
    its last token. (5 + 4 tokens and 6 each, and the time is the clock's.)"""
    seconds = iter(range(1000))
    engine = eager(
        tiny,
        block_size=2,
        num_blocks=1 + 6,
        num_cpu_blocks=4,
        preemption_mode="swap",
        clock=lambda: float(next(seconds)),
    )
    metrics = engine.metrics
    assert (metrics.num_started, metrics.num_steps, metrics.prefix_cache_hit_rate) == (0, 0, 0)
    for time in (1, 2):
        engine.add_request([1, 2, 3, 4], greedy(6), client="first")
        engine.step()
        engine.add_request([1, 2, 3, 4, 9], greedy(6), client="second")
        engine.abort_request(engine.add_request([1, 2, 3, 4], greedy(6)))
        outputs = run_engine_to_end(engine)
        assert (metrics.num_started, metrics.num_prompt_tokens) == (2 * time, 9 * time)
        assert metrics.num_cached_tokens == (0, 4, 10)[time]
        assert (metrics.preemptions_by_mode, metrics.num_swapped_in_blocks) == (Counter(swap=time), time)
        assert metrics.num_finished == Counter(length=2 * time, abort=time)
        assert metrics.num_output_tokens == 12 * time
        assert [output.metrics for output in outputs.values()] == [metrics.finished[-2], metrics.finished[-1]]
        assert all(output.metrics.ttft > 0 for output in outputs.values())
    assert metrics.prefix_cache_hit_rate == 10 / 18
    assert metrics.clients() == ["default", "first", "second"]
    assert metrics.counts("second").preemptions_by_mode == Counter(swap=2)
    assert not metrics.live


def test_a_start_counts_once_though_its_step_fails(tiny):
    engine = eager(tiny, block_size=2, num_blocks=9)
    engine.add_request([1, 2, 3], greedy(2))
    execute = engine.runner.execute

    def fail(plan: StepPlan):
        engine.runner.execute = execute
        raise RuntimeError("the device is gone")

    engine.runner.execute = fail
    with pytest.raises(RuntimeError, match="gone"):
        engine.step()
    run_engine_to_end(engine)
    assert (engine.metrics.num_started, engine.metrics.num_prompt_tokens, engine.metrics.num_steps) == (1, 3, 2)
