"""The scenarios: what they promise, in small."""

import itertools
import math
from collections import Counter, defaultdict

import pytest

from minicb.plan import Step, StepPlan
from minicb.request import Request
from minicb.simulate.scenarios import (
    LLAMA_8B,
    LLAMA_70B,
    MAX_ANSWER,
    MAX_CONVERSATION,
    MAX_MESSAGE,
    SYSTEM_PROMPT,
    USER_KINDS,
    HubRun,
    OutputRate,
    agent_hub,
    kind_of_user,
    synthetic_data,
)

SMALL = {"num_users": 40, "seconds": 120.0, "warm_up": 30.0, "interval": 10.0}


def user_requests(run: HubRun) -> dict[str, list[Request]]:
    """The requests of each user, in order."""
    requests = defaultdict(list)
    for request in run.requests:
        requests[request.scheduling.client].append(request)
    return requests


def test_the_models_are_of_the_sizes_that_their_names_say():
    assert LLAMA_8B.num_parameters == pytest.approx(8.03e9, rel=0.001)
    assert LLAMA_70B.num_parameters == pytest.approx(70.55e9, rel=0.001)


def test_the_output_rate_counts_each_token_in_its_interval():
    rate = OutputRate(2.0)
    for end, count in ((0.5, 3), (1.9, 1), (2.0, 4), (9.0, 5)):
        moved = [None] * count
        rate.on_step(Step(0, 0.0, end, StepPlan(), moved, 0, 0, 0, 0, 0, 0))
    assert rate.rates(0, 10) == [2.0, 2.0, 0.0, 0.0, 2.5]
    assert rate.rates(1, 9) == [2.0, 0.0, 0.0]  # whole ones only
    assert rate.rates(6, 14) == [0.0, 2.5, 0.0, 0.0]


def test_each_kind_has_its_share_of_the_users():
    assert sum(kind.share for kind in USER_KINDS.values()) == pytest.approx(1)
    for num_users in (1, 7, 500):
        counts = Counter(kind_of_user((number + 0.5) / num_users, USER_KINDS) for number in range(num_users))
        assert sum(counts.values()) == num_users
        assert all(abs(counts[name] - kind.share * num_users) < 1 for name, kind in USER_KINDS.items())


def test_a_hub_is_a_closed_loop_of_conversations():
    run = agent_hub(**SMALL | {"warm_up": 0.0, "seed": 1})
    assert len(run.rates) == 12
    assert max(request.num_output_tokens for request in run.requests) == MAX_ANSWER
    users = user_requests(run)
    assert 30 < len(users) <= 40  # some think for longer than this takes
    num_grown = num_begun = 0
    systems = set()
    for requests in users.values():
        for before, after in itertools.pairwise(requests):
            assert after.arrival_time > before.metrics.finished_time
            if after.token_ids[: before.num_tokens] == before.token_ids:
                num_grown += 1
                assert before.num_tokens <= MAX_CONVERSATION
            else:
                num_begun += 1
                systems.add(tuple(after.token_ids[:SYSTEM_PROMPT]))
                assert SYSTEM_PROMPT < after.num_prompt_tokens <= SYSTEM_PROMPT + MAX_MESSAGE
        for request in requests:
            assert request.finish_reason == "length"
            assert 1 <= request.num_output_tokens == request.params.max_tokens <= MAX_ANSWER
            assert request.scheduling.priority == (-1 if request.scheduling.client.startswith("urgent") else 0)
            assert request.arrival_time < 120
    assert len(systems) == 1
    assert num_grown > num_begun > 10
    assert run.metrics.prefix_cache_hit_rate > 0.3
    output = sum(request.num_output_tokens for request in run.requests)
    assert run.metrics.num_output_tokens == output
    assert 0.8 * output < sum(run.rates) * 10 <= output  # what came after the last message isn't in it


def test_users_say_the_same_under_every_policy_and_in_every_run():
    runs = [agent_hub("fcfs", **SMALL), agent_hub("fcfs", **SMALL), agent_hub("fair", **SMALL | {"num_users": 30})]
    assert runs[0].rates == runs[1].rates and runs[0].metrics.end == runs[1].metrics.end
    assert agent_hub("fcfs", **SMALL | {"seconds": 60.0}, seed=1).rates != runs[0].rates[:3]
    first, other = user_requests(runs[0]), user_requests(runs[2])
    for name in ("ordinary-0", "ordinary-1", "ordinary-2"):
        # Answers lie between their times, so only the lengths are the same, and the first arrival.
        lens = [[(r.num_prompt_tokens, r.params.max_tokens) for r in requests[name]] for requests in (first, other)]
        count = min(map(len, lens))
        assert count > 0
        assert lens[0][:count] == lens[1][:count]


def test_figures_leave_out_the_warm_up():
    run, all_of_it = agent_hub(**SMALL), agent_hub(**SMALL | {"warm_up": 0.0})
    assert run.rates == all_of_it.rates[3:]
    assert run.metrics.num_started == len(all_of_it.requests) > len(run.requests)
    assert min(request.arrival_time for request in run.requests) >= 30
    by_kind = [run.latency("ttft", kind) for kind in USER_KINDS]
    assert min(figures["mean"] for figures in by_kind) < run.latency("ttft")["mean"] < max(f["mean"] for f in by_kind)
    assert run.latency("e2el")["median"] > run.latency("ttft")["median"] > 0


def test_the_hub_holds_its_rate_and_policies_differ():
    """500 users. What each policy is for is seen in its figures; the order of the others is a matter of load."""
    runs = {policy: agent_hub(policy, seconds=120.0, warm_up=30.0) for policy in ("fcfs", "sjf", "priority")}
    for run in runs.values():
        assert len(run.rates) == 1 and min(run.rates) > 1500
    fcfs, sjf, priority = runs.values()
    assert sjf.latency("ttft")["mean"] < 0.8 * fcfs.latency("ttft")["mean"]
    urgent, ordinary = (priority.latency("ttft", kind)["p90"] for kind in ("urgent", "ordinary"))
    assert urgent < 0.5 * ordinary
    assert fcfs.latency("ttft", "urgent")["p90"] > 0.5 * fcfs.latency("ttft", "ordinary")["p90"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_users", 0),
        ("seconds", 60.0),
        ("seconds", math.inf),
        ("warm_up", -1.0),
        ("interval", 0.0),
        ("policy", "lifo"),
    ],
)
def test_an_argument_out_of_range_is_named(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be "):
        agent_hub(**{name: value})


def test_slots_are_in_use_while_anybody_waits():
    """With 64 slots, so that filling them at the start is as small a part of 2,000 prompts as it is with 256 of 10,000."""
    metrics = synthetic_data(2000, max_num_seqs=64)
    assert metrics.num_finished == {"length": 2000}
    assert metrics.steps_with_queue.occupancy > 0.99
    assert metrics.steps_with_queue.seconds > 0.8 * metrics.all_steps.seconds
    again, static = (synthetic_data(200, max_num_seqs=16, batching=batching) for batching in ("continuous", "static"))
    assert static.steps_with_queue.occupancy < 0.5 < again.steps_with_queue.occupancy
    assert static.seconds > 1.5 * again.seconds
