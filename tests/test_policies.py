"""minicb/policies.py: a policy is nothing but an order of requests, told by a key."""

from hypothesis import given
from hypothesis import strategies as st

from minicb import SamplingParams
from minicb.blocks import BlockPool
from minicb.memory import Memory
from minicb.policies import FCFS, POLICIES
from minicb.request import Request
from minicb.scheduler import Scheduler


def arrived(arrival: int, num_prompt_tokens: int = 3) -> Request:
    request = Request(str(arrival), range(num_prompt_tokens), SamplingParams())
    request.arrival = arrival
    return request


def test_policies_are_chosen_by_name():
    assert isinstance(POLICIES["fcfs"](), FCFS)


@given(st.permutations(range(12)), st.lists(st.integers(1, 40), min_size=12, max_size=12))
def test_fcfs_is_the_order_of_arrival_whatever_the_lengths(order, lengths):
    requests = [arrived(arrival, lengths[arrival]) for arrival in order]
    assert [r.arrival for r in sorted(requests, key=FCFS().key)] == list(range(12))


def test_the_key_stays_while_a_request_moves():
    """The heap and the running list are ordered once, when a request enters them."""
    request = arrived(5)
    key = FCFS().key(request)
    request.token_ids += [1, 2, 3]
    request.num_computed_tokens = 5
    request.num_preemptions = 2
    assert FCFS().key(request) == key
    assert FCFS().key(arrived(6)) > key


def test_fcfs_lets_a_preempted_request_keep_its_place():
    """It came second and was thrown out; what came later must not go first."""
    scheduler = Scheduler(
        Memory(BlockPool(num_blocks=4, block_size=2)),
        FCFS(),
        max_num_seqs=8,
        max_num_batched_tokens=16,
        max_model_len=64,
    )
    first, second = Request("first", [1], SamplingParams()), Request("second", [1], SamplingParams())
    scheduler.add(first)
    scheduler.add(second)
    for _ in range(10):
        plan = scheduler.schedule()
        if plan.preempted:
            break
        scheduler.update(plan, [0 for chunk in plan.chunks if chunk.samples])
    assert plan.preempted == [second]
    scheduler.update(plan, [0 for chunk in plan.chunks if chunk.samples])
    scheduler.add(Request("newer", [1], SamplingParams()))  # one free block would do for it, at once
    scheduler.abort("first")
    assert [chunk.request.request_id for chunk in scheduler.schedule().chunks] == ["second", "newer"]


def test_fcfs_serves_the_oldest_in_every_step_whatever_comes_later():
    """The guarantee in its docstring: 100 steps, a newcomer in each, too few blocks and tokens for all."""
    scheduler = Scheduler(
        Memory(BlockPool(num_blocks=30, block_size=2)),
        FCFS(),
        max_num_seqs=4,
        max_num_batched_tokens=6,
        max_model_len=64,
    )
    for number in range(100):
        scheduler.add(Request(str(number), range(1 + number % 17), SamplingParams(max_tokens=1 + number % 23)))
        oldest = min(scheduler.requests.values(), key=lambda request: request.arrival)
        plan = scheduler.schedule()
        assert oldest in [chunk.request for chunk in plan.chunks]
        scheduler.update(plan, [0 for chunk in plan.chunks if chunk.samples])
        scheduler.check_invariants()
