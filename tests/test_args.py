"""The arguments of an engine: what each may be, and what an engine makes of those that concern its scheduler."""

import math

import numpy as np
import pytest
from conftest import eager, greedy, run_to_end

from minicb.args import EngineArgs
from minicb.core import EngineCore
from minicb.params import SchedulingParams
from minicb.policies import FCFS, POLICIES, SJF, Fair, Priority

# The least that is allowed, and the first that is too much.
INTEGERS = {
    "seed": (0, 2**63),
    "max_model_len": (2, None),
    "max_num_seqs": (1, None),
    "max_num_batched_tokens": (1, None),
    "block_size": (1, 2**31),
    "num_blocks": (2, 2**31),
    "num_cpu_blocks": (0, 2**31),
}
MAY_BE_NONE = ("max_model_len", "block_size", "num_blocks", "num_cpu_blocks")


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name):
    minimum, below = INTEGERS[name]
    for value in (minimum, (below or 2**70) - 1, np.int32(minimum)):
        made = getattr(EngineArgs(**{name: value}), name)
        assert (made, type(made)) == (value, int)
    wrong = [minimum - 1, -(10**5000), True, float(minimum), "8", [minimum], math.nan]
    for value in wrong + [below] * (below is not None) + [None] * (name not in MAY_BE_NONE):
        with pytest.raises(ValueError, match=f"^{name} must be an integer >= {minimum}"):
            EngineArgs(**{name: value})


def test_what_may_be_none_is_chosen_by_others():
    args = EngineArgs(**dict.fromkeys(MAY_BE_NONE))
    assert all(getattr(args, name) is None for name in MAY_BE_NONE)
    assert EngineArgs(tokenizer=None, device=None) == EngineArgs()


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("gpu_memory_utilization", [1, 1.0, 1e-9, np.float32(0.5)], [0, -0.1, 1.01, math.nan, "0.9", True, None]),
        ("swap_space", [0, 4, 2.5, 2**31 - 1], [-1, -1e-9, 2**31, 10**400, math.inf, math.nan, "4", True, None]),
    ],
)
def test_numbers(name, right, wrong):
    for value in right:
        made = getattr(EngineArgs(**{name: value}), name)
        assert (made, type(made)) == (value, float)
    for value in wrong:
        with pytest.raises(ValueError, match=f"^{name} must be in"):
            EngineArgs(**{name: value})


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("batching", ["continuous", "static"], ["dynamic", "Static", None, []]),
        ("load_format", ["auto", "dummy"], ["safetensors", None]),
        ("preemption_mode", ["auto", "swap", "recompute"], ["drop", None, ["swap"]]),
        ("enable_prefix_caching", [True, False], ["no", None, 2]),
        ("enforce_eager", [True, False], ["yes", None, 2]),
        ("scheduling_policy", list(POLICIES), ["random", "FCFS", None, [], FCFS, 3]),
    ],
)
def test_choices(name, right, wrong):
    for value in right:
        assert getattr(EngineArgs(**{name: value}), name) == value
    for value in wrong:
        with pytest.raises(ValueError, match=f"^{name} must be one of .*{right[-1]}"):
            EngineArgs(**{name: value})


def test_each_scheduler_has_a_policy_of_its_own():
    args = EngineArgs(scheduling_policy="sjf")
    assert isinstance(args.make_policy(), SJF)
    assert args.make_policy() is not args.make_policy()
    args = EngineArgs(scheduling_policy=Priority(ageing=7))
    one, other = args.make_policy(), args.make_policy()
    assert isinstance(one, Priority)
    assert one.ageing == 7
    assert one is not other
    assert one is not args.scheduling_policy


@pytest.mark.parametrize("clock", [5, None, "now"])
def test_a_clock_that_tells_no_time_is_refused(clock):
    with pytest.raises(ValueError, match="^clock must be a function"):
        EngineArgs(clock=clock)


@pytest.mark.parametrize("name", ["num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_a_scheduler_larger_than_its_runner_is_refused(tiny, name):
    sizes = {"num_blocks": 20, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64}
    engine = eager(tiny, **sizes)
    engine.make_scheduler(**sizes)
    with pytest.raises(ValueError, match=f"^{name} must be an integer .* < {sizes[name] + 1}, not {sizes[name] + 1}"):
        engine.make_scheduler(**(sizes | {name: sizes[name] + 1}))


def test_unknown_arguments_are_named(tiny):
    with pytest.raises(TypeError, match="max_num_seq"):
        EngineArgs(max_num_seq=3)
    with pytest.raises(TypeError, match="tensor_parallel_size"):
        eager(tiny, tensor_parallel_size=2)
    with pytest.raises(TypeError, match="positional"):
        EngineArgs(None)


def test_recompute_takes_no_host_memory():
    assert EngineArgs(preemption_mode="recompute", num_cpu_blocks=7).num_cpu_blocks == 0
    assert EngineArgs(preemption_mode="swap", num_cpu_blocks=7).num_cpu_blocks == 7


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("priority", [0, -(2**63), 2**63 - 1, np.int64(3)], [2**63, -(2**63) - 1, 1.0, "1", True, None]),
        ("client", ["default", "", "日"], [None, 7, b"a", ["a"]]),
        ("expected_output_len", [None, 1, 2**63 - 1, np.int8(5)], [0, -1, 2**63, 1.5, "1", True]),
    ],
)
def test_scheduling_params(name, right, wrong):
    for value in right:
        made = getattr(SchedulingParams(**{name: value}), name)
        assert made == value
        assert type(made) in (int, str, type(None))
    for value in wrong:
        with pytest.raises(ValueError, match=f"^{name} must be (an integer >= |a string)"):
            SchedulingParams(**{name: value})
    assert SchedulingParams() == SchedulingParams(priority=0, client="default", expected_output_len=None)


# ------------------------------------------------------------------ what an engine makes of them


def test_an_engine_takes_a_policy_with_arguments_of_its_own(tiny):
    """Here the two clients' weights decide: b is charged a tenth of what it gets."""
    policy = Fair(client_weights={"b": 10})
    engine = eager(tiny, scheduling_policy=policy, max_num_seqs=1)
    assert engine.scheduler.policy.client_weights == {"b": 10}
    for number in range(6):
        engine.add_request([1, 2, 3], greedy(4), client="ab"[number % 2])
    run_to_end(engine)
    assert [record.client for record in engine.metrics.finished] == list("abbbaa")


def test_arguments_reach_the_scheduler(tiny):
    arguments = {"max_num_seqs": 5, "max_num_batched_tokens": 40, "max_model_len": 100, "batching": "static"}
    arguments |= {"scheduling_policy": "adaptive", "preemption_mode": "swap"}
    scheduler = eager(tiny, **arguments, enable_prefix_caching=False).scheduler
    assert scheduler.maximum == (5, 40)
    assert (scheduler.max_model_len, scheduler.static) == (100, True)
    assert isinstance(scheduler.policy, POLICIES["adaptive"])
    assert scheduler.memory.preemption_mode == "swap"
    assert not scheduler.pool.enable_prefix_caching


def test_make_scheduler_makes_an_independent_one(tiny):
    engine = eager(tiny, num_blocks=40, max_num_seqs=6)
    engine.add_request([1, 2, 3], greedy(9), request_id="own")
    engine.step()
    before = vars(engine.args).copy()
    changes = {"max_num_seqs": 2, "batching": "static", "scheduling_policy": "sjf", "enable_prefix_caching": False}
    other = engine.make_scheduler(12, **changes, preemption_mode="recompute", max_num_batched_tokens=9)
    assert other.maximum == (2, 9)
    assert other.static
    assert isinstance(other.policy, SJF)
    assert (other.pool.num_blocks, other.pool.num_free, other.pool.enable_prefix_caching) == (12, 11, False)
    assert other.memory.preemption_mode == "recompute"
    assert other.requests == {}
    assert vars(engine.args) == before
    assert engine.scheduler.maximum == (6, 2048)
    assert not engine.scheduler.static
    same = engine.make_scheduler()
    assert (same.pool.num_blocks, same.maximum, same.max_model_len) == (40, (6, 2048), engine.max_model_len)
    assert same.pool is not engine.scheduler.pool
    assert same.memory.host_pool is not engine.scheduler.memory.host_pool
    assert same.policy is not engine.scheduler.policy
    assert engine.has_unfinished_requests()
    for wrong, error in (({"max_num_seqs": 0}, ValueError), ({"slots": 3}, TypeError)):
        with pytest.raises(error, match=next(iter(wrong))):
            engine.make_scheduler(**wrong)


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_a_scheduler_of_its_own_gives_the_same_tokens(tiny, batching):
    engine = eager(tiny)
    prompts = [[1, 2, 3], [4] * 9, [5, 6]]
    ids = [engine.add_request(prompt, greedy(6)) for prompt in prompts]
    outputs = run_to_end(engine)
    expected = [outputs[request_id].outputs[0].token_ids for request_id in ids]
    core = EngineCore(engine.make_scheduler(10, batching=batching, max_num_seqs=2), engine.runner)
    requests = [engine.make_request(prompt, greedy(6), request_id=str(n)) for n, prompt in enumerate(prompts)]
    for request in requests:
        core.add(request)
    while core.has_unfinished_requests():
        core.step()
        core.scheduler.check_invariants()
    assert [request.output_token_ids for request in requests] == expected
    assert engine.metrics.num_started == 3, "the engine's own requests"
