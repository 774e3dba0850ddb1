"""minicb/scheduler.py: which requests run, in how many tokens, and which must give their blocks back.

No model is needed. Examples feed made-up tokens. Property tests run a toy model that addresses its memory through
the block tables, so a lost, doubled or overwritten position of KV cache changes the tokens that come out.
"""

import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
from conftest import take_events
from hypothesis import given, settings
from hypothesis import strategies as st

from minicb.blocks import BlockPool
from minicb.memory import PREEMPTION_MODES, Memory, PreemptionCosts
from minicb.params import SamplingParams, SchedulingParams
from minicb.plan import Chunk, Event, StepPlan
from minicb.policies import FCFS, SJF, Adaptive, Fair, Policy, Priority
from minicb.request import Request, RequestState
from minicb.scheduler import Scheduler


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
    batching="continuous",
) -> Scheduler:
    pool = BlockPool(num_blocks, block_size, enable_prefix_caching)
    return Scheduler(
        Memory(pool, BlockPool(1 + num_cpu_blocks, block_size), preemption_mode, costs),
        policy or FCFS(),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        batching=batching,
    )


def make_request(
    request_id: str, prompt: int | Sequence[int] = 4, max_tokens: int | None = 100, *, eos=(), priority=0, **params
) -> Request:
    tokens = list(range(prompt) if isinstance(prompt, int) else prompt)
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return Request(request_id, tokens, sampling, SchedulingParams(priority=priority), eos_token_ids=eos)


def add(scheduler: Scheduler, request_id: str, *args, **kwargs) -> Request:
    request = make_request(request_id, *args, **kwargs)
    scheduler.add(request)
    return request


def step(scheduler: Scheduler, token: int | None = 0) -> StepPlan:
    """One step in which every sampled row yields the same token."""
    plan = scheduler.schedule()
    scheduler.update(plan, [token for chunk in plan.chunks if chunk.needs_sampling])
    scheduler.check_invariants()
    return plan


def until(condition: Callable[[], object], max_steps: int = 1000) -> Iterator[int]:
    """For loops that step until something holds: a scheduler that is stuck fails the test, it doesn't hang it."""
    for count in range(max_steps):
        if condition():
            return
        yield count
    raise AssertionError(f"not reached in {max_steps} steps")


def run(scheduler: Scheduler, max_steps: int = 1000) -> int:
    """Step until nothing is left; returns the number of steps."""
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
    return {chunk.request.request_id: chunk.length for chunk in plan.chunks}


def spans(plan: StepPlan) -> dict[str, tuple[int, int]]:
    return {chunk.request.request_id: (chunk.start, chunk.start + chunk.length) for chunk in plan.chunks}


# ---------------------------------------------------------------------------- a toy model


EOS = {7, 8, 9}


def kv_of(before: list[int | None], token: int) -> int | None:
    """The KV of a token depends on all tokens before it. That of a negative token is not finite."""
    return None if token < 0 or before[-1:] == [None] else zlib.crc32(repr((before[-1:], token)).encode())


def sample(kv: list[int | None]) -> int | None:
    """The next token. Any change anywhere in the KV changes it. Few tokens end a request."""
    return None if None in kv else zlib.crc32(repr(kv).encode()) % 300


def next_token(context: list[int]) -> int | None:
    kv: list[int | None] = []
    for token in context:
        kv.append(kv_of(kv, token))
    return sample(kv)


class ToyModel:
    """Keeps KV where the block table says. Reading what was never written, or was freed and isn't cached, fails."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.memory: dict[int, list[int | None]] = {}  # block -> KV of its positions
        self.host_memory: dict[int, list[int | None]] = {}
        self.sampled: dict[Request, list[int]] = {}  # all tokens that came out

    def write(self, request: Request, position: int, kv: int | None) -> None:
        block = self.memory.setdefault(request.block_table[position // self.block_size], [])
        block[position % self.block_size :] = [kv]
        assert len(block) == position % self.block_size + 1, "a position before it was never written"

    def read(self, request: Request, end: int) -> list[int | None]:
        size, kv = self.block_size, list[int | None]()
        for position in range(0, end, size):
            kv += self.memory[request.block_table[position // size]][: end - position]
        assert len(kv) == end
        return kv

    def forget_free_blocks(self, scheduler: Scheduler) -> None:
        pool, host_pool = scheduler.pool, scheduler.memory.host_pool
        for block in pool._free:
            if not pool._is_cached(block):
                self.memory.pop(block, None)
        for block in host_pool._free:
            self.host_memory.pop(block, None)

    def execute(self, plan: StepPlan) -> list[int | None]:
        for block, host in plan.swap_out:
            self.host_memory[host] = list(self.memory[block])
        for host, block in plan.swap_in:
            self.memory[block] = list(self.host_memory[host])
        tokens = []
        for request, start, length, needs_sampling, _ in plan.chunks:
            kv = self.read(request, start)
            for position in range(start, start + length):
                kv.append(kv_of(kv, request.token_ids[position]))
                self.write(request, position, kv[-1])
            if needs_sampling:
                tokens.append(sample(kv))
        return tokens

    def scramble(self, plan: StepPlan) -> None:
        """Write garbage wherever the plan writes."""
        for memory, pairs in ((self.host_memory, plan.swap_out), (self.memory, plan.swap_in)):
            memory.update((block, [None] * self.block_size) for _, block in pairs)
        for request, start, length, *_ in plan.chunks:
            for position in range(start, start + length):
                self.write(request, position, None)


# How a step fails: before anything was executed, in the middle, or when its tokens were there.
FAILURES = [lambda model, plan: None, ToyModel.scramble, ToyModel.execute]


def alone(request: Request, limit: int) -> tuple[list[int], str]:
    """What the request must yield, from its prompt and parameters only; `limit` for prompt and output."""
    params, kv = request.params, list[int | None]()
    for token in request.prompt_token_ids:
        kv.append(kv_of(kv, token))
    output: list[int] = []
    while True:
        token = sample(kv)
        if token is None:
            return output, "error"
        output.append(token)
        kv.append(kv_of(kv, token))
        stops = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else request.eos_token_ids)
        if len(output) > params.min_tokens and token in stops:
            return output, "stop"
        if len(kv) == limit or len(output) == params.max_tokens:
            return output, "length"


# ---------------------------------------------------------------------------- any traffic


params_strategy = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([None, 30, 20, 9, 4]),
    min_tokens=st.integers(0, 4),
    ignore_eos=st.booleans(),
    stop_token_ids=st.none() | st.just([1, 2, 3]),
)


def make_prompt(number: int, num_tokens: int, num_shared_tokens: int) -> list[int]:
    """A common beginning, and then tokens that no other request has, so that a stray read is noticed."""
    return [1000 * (number + 1) * (position >= num_shared_tokens) + position for position in range(num_tokens)]


@dataclass
class Arrival:
    wait: int  # steps since the arrival before
    num_prompt_tokens: int
    num_shared_tokens: int  # this many of them are common to all requests
    params: SamplingParams
    abort_after: int | None  # steps
    priority: int
    client: str
    expected_output_len: int | None

    def request(self, number: int, poisoned: bool = False) -> Request:
        """poisoned: the last token of its prompt makes its logits not finite."""
        prompt = make_prompt(number, self.num_prompt_tokens, self.num_shared_tokens)
        scheduling = SchedulingParams(
            priority=self.priority, client=self.client, expected_output_len=self.expected_output_len
        )
        prompt[-1:] = [-1 - number] if poisoned else prompt[-1:]
        return Request(str(number), prompt, self.params, scheduling, eos_token_ids=EOS)


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
    costs: PreemptionCosts
    enable_prefix_caching: bool
    make_policy: Callable[[], Policy]

    @property
    def longest(self) -> int:
        """Prompt and output of a request together."""
        return min(self.max_model_len, (self.num_blocks - 1) * self.block_size + 1)

    def make_scheduler(self) -> Scheduler:
        arguments = dict(vars(self))
        return make_scheduler(policy=arguments.pop("make_policy")(), **arguments)


policy_makers = st.sampled_from([FCFS, SJF, Priority, Fair, Adaptive, partial(Priority, ageing=2)]) | st.sampled_from(
    [
        partial(SJF, ageing=0.5),
        partial(Priority, ageing=1),
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
        batching=draw(st.sampled_from(["continuous", "continuous", "static"])),
        num_cpu_blocks=draw(st.integers(0, 3) | st.just(100)),
        preemption_mode=draw(st.sampled_from(PREEMPTION_MODES)),
        # By the block against by the token: in "auto" now the one and now the other is cheaper.
        costs=PreemptionCosts(swap_block=draw(st.integers(0, 2 * block_size)), recompute_token=1),
        enable_prefix_caching=draw(st.booleans()),
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


# ---------------------------------------------------------------------------- what holds of every step


def num_lacking(scheduler: Scheduler, requests: Sequence[Request]) -> int:
    """Blocks that running requests need beside those they hold, until their known tokens are computed."""
    return sum(scheduler.pool.blocks_for(r.num_tokens) - len(r.block_table) for r in requests)


def to_displace(scheduler: Scheduler) -> list[Request]:
    """The fewest of the last running requests, all behind the next waiting one, without which that one can start."""
    pool, key, limits = scheduler.pool, scheduler.policy.key, scheduler.maximum
    request, running = scheduler.waiting.head(), sorted(scheduler.running, key=key)
    if request is None or scheduler.static or not scheduler.policy.preemptive:
        return []
    for count in range(len(running) + 1):
        stay, victims = running[: len(running) - count], running[len(running) - count :]
        if victims and key(victims[0]) < key(request):
            break
        held = {block for other in stay for block in other.block_table}
        found = held.intersection(pool.find_prefix(request.token_ids, request.num_tokens - 1))
        needed = pool.blocks_for(request.num_tokens) - len(found) + num_lacking(scheduler, stay)
        num_tokens = sum(other.num_uncomputed for other in stay)
        fits = len(stay) < limits.max_num_seqs and num_tokens < limits.max_num_batched_tokens
        if fits and needed <= pool.num_usable - len(held):
            return victims[::-1]
    return []


def checked_step(scheduler: Scheduler, model: ToyModel, fail: Callable | None = None) -> StepPlan:
    """One step, with all that must hold of every step under every policy. fail(model, plan): what it does instead."""
    policy, pool, num_events = scheduler.policy, scheduler.pool, len(scheduler.events)
    before = sorted(scheduler.running, key=policy.key)
    computed = {request: request.num_computed_tokens for request in scheduler.requests.values()}
    prefills = [request for request in before if request.num_uncomputed > 1]
    displaced, urgent = to_displace(scheduler), scheduler.waiting.head()
    plan = scheduler.schedule(scheduler.now + 0.001)
    chunks = {chunk.request: chunk for chunk in plan.chunks}
    stay = [request for request in before if request not in plan.preempted]
    tokens_left = scheduler.limits.max_num_batched_tokens - sum(chunk.length for chunk in plan.chunks)

    assert len(chunks) == len(plan.chunks), "two chunks of one request"
    assert sum(chunk.length for chunk in plan.chunks) <= scheduler.maximum.max_num_batched_tokens
    assert len(scheduler.running) <= scheduler.maximum.max_num_seqs
    for request, start, length, *_ in plan.chunks:
        assert length > 0
        assert start == request.num_computed_tokens
        assert start + length <= request.num_tokens
        assert len(request.block_table) == pool.blocks_for(start + length)
        assert request.num_registered_blocks == (start + length) // pool.block_size
    # No livelock, and stronger: the first running request gets ahead in every step. Only a more urgent request takes
    # its place, and it waits for tokens only where the policy leaves fewer than there are decodes.
    assert plan.chunks or not scheduler.requests, "a step that computes nothing"
    if before and not policy.preemptive and not isinstance(policy, Adaptive):
        assert before[0] in chunks
    if type(policy) is FCFS and scheduler.requests:
        assert min(scheduler.requests.values(), key=lambda r: r.arrival) in chunks
    # Every decode that stays gets its token. Prefills get all tokens and blocks that are left.
    for request in stay:
        if request not in prefills:
            assert request in chunks
        elif tokens_left > 0 and not plan.preempted and not chunks[request].needs_sampling:
            assert pool.num_free == 0
            assert (chunks[request].start + chunks[request].length) % pool.block_size == 0

    # The last are preempted: the fewest that let an urgent request start at once, or those that lack a block.
    assert plan.preempted == before[len(stay) :][::-1]
    assert scheduler.running == stay + plan.admitted
    for request in plan.preempted:
        assert (request.state is RequestState.SWAPPED) == bool(request.host_blocks)
    if displaced:
        assert (plan.preempted, plan.admitted) == (displaced, [urgent])
    elif plan.preempted:
        assert not plan.admitted, "admitted in a step that preempted"
    # All that fit are admitted, and none that doesn't.
    lacking = num_lacking(scheduler, scheduler.running)
    assert not plan.admitted or lacking <= pool.num_free
    if scheduler.static and before:
        assert not plan.admitted
    elif not plan.preempted and (waiting := scheduler.waiting.head()):
        full = len(scheduler.running) >= scheduler.limits.max_num_seqs or (tokens_left <= 0 and not scheduler.static)
        missing = scheduler.memory.num_missing(waiting, scheduler.memory.find_prefix(waiting))
        assert full or missing + lacking > pool.num_free, "there was room for another"
    # Preempted requests return before any starts, except that more urgent ones go before them.
    started = [event.request for event in scheduler.events[num_events:] if event.kind == "started"]
    if started and not policy.preemptive:
        assert all(r.state is RequestState.RUNNING for r in scheduler.requests.values() if r.has_started)
    for pairs in (plan.swap_out, plan.swap_in):
        assert len({destination for _, destination in pairs}) == len(pairs)

    if fail:
        fail(model, plan)
        scheduler.cancel(plan)
        assert scheduler.running == stay
        assert all(request.num_computed_tokens == computed[request] for request in stay)
        for request in (*plan.admitted, *plan.preempted):
            assert (request.state, request.num_computed_tokens) == (RequestState.WAITING, 0)
    else:
        tokens = model.execute(plan)
        seconds = 0.001 * (1 + sum(chunk.length for chunk in plan.chunks))
        progressed = scheduler.update(plan, tokens, now=scheduler.now + seconds)
        assert progressed == [chunk.request for chunk in plan.chunks if chunk.needs_sampling]
        for request, token in zip(progressed, tokens, strict=True):
            model.sampled.setdefault(request, []).extend([] if token is None else [token])
    # Callers were sent each token as it came, so none may be taken back or come twice.
    for request in computed:
        assert request.output_token_ids == model.sampled.get(request, [])
    scheduler.check_invariants()
    model.forget_free_blocks(scheduler)
    return plan


@given(
    traffic(),
    st.dictionaries(st.integers(0, 40), st.sampled_from(FAILURES), max_size=4),
    st.frozensets(st.integers(0, 9), max_size=2),
)
@settings(max_examples=10 * settings.default.max_examples)
def test_under_any_traffic_every_request_ends_with_the_tokens_it_has_alone(chosen_and_arrivals, failures, poisoned):
    """Whatever fails, and whichever requests have logits that are not finite."""
    chosen, arrivals = chosen_and_arrivals
    scheduler, model = chosen.make_scheduler(), ToyModel(chosen.block_size)
    requests = [arrival.request(number, number in poisoned) for number, arrival in enumerate(arrivals)]
    due = defaultdict(list)
    time = 0
    for arrival, request in zip(arrivals, requests, strict=True):
        time += arrival.wait
        due[time].append(partial(scheduler.add, request))
        if arrival.abort_after is not None:
            due[time + arrival.abort_after].append(partial(scheduler.abort, request.request_id))

    # Under FCFS the oldest request gets ahead in every step, and once the oldest it is never set back, so each
    # step after the last arrival takes one of the tokens that requests have in all. Under other policies
    # the first may change, and what was computed of the old one be lost. What a failed step admitted begins again.
    num_tokens = sum(min(chosen.longest, r.num_prompt_tokens + (r.params.max_tokens or 99)) for r in requests)
    max_steps = time + num_tokens * ((1 if type(scheduler.policy) is FCFS else 3) + len(failures))
    for now in range(max_steps + 1):
        for action in due[now]:
            action()
            scheduler.check_invariants()
        if now >= time and not scheduler.requests:
            break
        checked_step(scheduler, model, failures.get(now))
    else:
        raise AssertionError(f"not finished after {max_steps} steps")

    assert_nothing_is_held(scheduler)
    for request in requests:
        expected, reason = alone(request, chosen.longest)
        assert request.state is RequestState.FINISHED
        if request.finish_reason == "abort":
            assert request.output_token_ids == expected[: request.num_output_tokens]
        else:
            assert (request.output_token_ids, request.finish_reason) == (expected, reason)
        # A preempted request fits again only when another has ended or has made one more of its blocks findable,
        # or has been displaced by an urgent one that came meanwhile. A failed step preempts what it admitted.
        more = len(failures) + (scheduler.pool.blocks_for(chosen.longest) if chosen.enable_prefix_caching else 0)
        assert request.num_preemptions <= (1 + scheduler.policy.preemptive) * len(requests) + more
        # FCFS starts a request when all older ones run. It is preempted only for one of those.
        if type(scheduler.policy) is FCFS:
            assert request.num_preemptions < scheduler.maximum.max_num_seqs + more


@pytest.mark.parametrize("policy", [FCFS, Priority])
@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("block_size", [1, 2, 3, 8])
@pytest.mark.parametrize("mode", PREEMPTION_MODES)
@pytest.mark.parametrize("caching", [False, True])
def test_under_pressure_every_request_ends_with_the_tokens_it_has_alone(policy, batching, block_size, mode, caching):
    """As above, but where nearly all are preempted, some of them again and again."""
    scheduler = make_scheduler(
        num_blocks=1 + 36 // block_size,
        block_size=block_size,
        max_num_seqs=6,
        max_num_batched_tokens=6 if block_size % 2 else 60,
        batching=batching,
        num_cpu_blocks=20 // block_size,  # not enough for all, so that even in "swap" some are recomputed
        preemption_mode=mode,
        costs=PreemptionCosts(swap_block=1.1, recompute_token=1 / block_size),
        enable_prefix_caching=caching,
        policy=policy(),
    )
    model, modes = ToyModel(block_size), Counter[str]()
    requests = [make_request(str(n), 1 + 7 * n % 12, 20, priority=n % 3) for n in range(24)]
    for number in until(lambda: requests[-1].arrival and not scheduler.requests):
        for request in requests[8 * number : 8 * number + 8]:  # 8 at a time, so that the last find others running
            scheduler.add(request)
        checked_step(scheduler, model)
        modes.update(event.details["mode"] for event in take_events(scheduler) if event.kind == "preempted")
    for request in requests:
        assert request.output_token_ids == alone(request, 37)[0]
        assert request.num_preemptions < 6 or caching
    assert modes.total() == sum(request.num_preemptions for request in requests) >= 10
    assert (modes["swap"] > 0) == (mode == "swap")  # in "auto" it is a little too expensive here
    assert_nothing_is_held(scheduler)


# ---------------------------------------------------------------------------- the step, sentence by sentence


def test_a_request_from_beginning_to_end():
    """A prompt of 6, 4 tokens a step: two steps of prefill, the second yields the first token."""
    scheduler = make_scheduler(max_num_batched_tokens=4)
    request = add(scheduler, "a", 6, 3)
    assert request.state is RequestState.WAITING

    plan = scheduler.schedule()
    assert plan == StepPlan(chunks=[Chunk.of(request, start=0, length=4)], admitted=[request])
    assert (plan.chunks[0].needs_sampling, len(request.block_table)) == (False, 1)
    assert scheduler.update(plan, []) == []
    assert request.state is RequestState.RUNNING

    plan = scheduler.schedule()
    assert plan == StepPlan(chunks=[Chunk.of(request, start=4, length=2)])
    assert (plan.chunks[0].needs_sampling, len(request.block_table)) == (True, 2)
    assert scheduler.update(plan, [70]) == [request]

    plan = scheduler.schedule()  # from here on it decodes: the token just sampled is the input
    assert plan == StepPlan(chunks=[Chunk.of(request, start=6, length=1)])
    scheduler.update(plan, [71])
    assert spans(step(scheduler, 72)) == {"a": (7, 8)}
    assert request.output_token_ids == [70, 71, 72]
    assert (request.state, request.finish_reason) == (RequestState.FINISHED, "length")
    assert list(request.block_table) == []
    assert scheduler.schedule() == StepPlan()  # nothing to do is no error


def test_running_requests_come_first():
    """Decodes get their token although an older prefill could use all of the budget; new requests get the rest."""
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, "long", 30)
    assert lengths(step(scheduler)) == {"long": 8}
    add(scheduler, "short", 3)
    for _ in range(2):
        assert lengths(step(scheduler)) == {"long": 8}
    assert lengths(step(scheduler)) == {"long": 6, "short": 2}  # what the budget leaves
    assert lengths(step(scheduler)) == {"long": 1, "short": 1}
    add(scheduler, "new", 30)
    assert spans(step(scheduler)) == {"long": (31, 32), "short": (3, 4), "new": (0, 6)}


@pytest.mark.parametrize("limit", [{"max_num_seqs": 2}, {"num_blocks": 1 + 4}])
def test_a_finished_request_is_replaced_in_the_very_next_step(limit):
    """Its slot in the one case, its blocks in the other. That is continuous batching."""
    scheduler = make_scheduler(**limit)
    a, b, c = add(scheduler, "a", 6, 2), add(scheduler, "b", 6, 3), add(scheduler, "c", 6)
    assert lengths(step(scheduler)) == {"a": 6, "b": 6}
    blocks = set(a.block_table)
    assert lengths(step(scheduler)) == {"a": 1, "b": 1}
    assert a.state is RequestState.FINISHED
    assert lengths(step(scheduler)) == {"b": 1, "c": 6}
    assert b.state is RequestState.FINISHED
    if "num_blocks" in limit:
        assert set(c.block_table) == blocks


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_block_boundaries(block_size):
    """A request holds ceil(computed / block_size) blocks, and the token that was just sampled is not computed: a
    prompt that fills its blocks needs the next one only when it decodes."""
    for length in range(1, 2 * block_size + 2):
        scheduler = make_scheduler(block_size=block_size)
        request = add(scheduler, "a", length)
        for step_number in range(2 * block_size + 1):
            step(scheduler)
            computed = length + step_number
            assert (request.num_computed_tokens, request.num_tokens) == (computed, computed + 1)
            assert len(request.block_table) == -(-computed // block_size)


def test_events_have_the_time_at_which_their_step_began_or_ended():
    """What a plan decides has its beginning, what comes of it its end. The policy is told how long the step took."""
    scheduler = make_scheduler(max_num_batched_tokens=4)
    told = []
    scheduler.policy.stepped = lambda *args: told.append(args)
    request = make_request("a", 5, 2)
    scheduler.add(request, 0.5)
    for begin, tokens in ((1, []), (3, [7]), (5, [8])):
        scheduler.update(scheduler.schedule(begin), tokens, begin + 1.25)
    events = [(event.time, event.kind) for event in take_events(scheduler)]
    assert events == [(0.5, "queued"), (1, "started"), (4.25, "first_token"), (6.25, "finished")]
    assert (request.arrival_time, told) == (0.5, [(4, 1.25), (1, 1.25), (1, 1.25)])
    add(scheduler, "b")
    scheduler.update(scheduler.schedule(8), [1])  # no time given: it took none
    assert (take_events(scheduler)[-1].time, told[-1]) == (8, (4, 0))


# ---------------------------------------------------------------------------- static batching


def test_static_batching_admits_only_when_nothing_runs():
    """The same requests take more steps, because slots stay empty until the longest has ended."""
    num_steps = {}
    for batching in ("continuous", "static"):
        scheduler = make_scheduler(max_num_seqs=2, batching=batching)
        for name, max_tokens in zip("abcd", (2, 8, 2, 2), strict=True):
            add(scheduler, name, 3, max_tokens)
        num_steps[batching] = run(scheduler)
    assert num_steps == {"continuous": 8, "static": 10}


def test_a_static_batch_fills_all_slots_even_if_the_budget_of_its_first_step_does_not_suffice():
    """Otherwise the size of a static batch would depend on the budget, and the comparison would be unfair."""
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=8, batching="static")
    requests = [add(scheduler, name, 7, 2) for name in "abcdef"]
    assert lengths(step(scheduler)) == {"a": 7, "b": 1}
    assert scheduler.running == requests[:4]
    assert [r.num_computed_tokens for r in scheduler.running] == [7, 1, 0, 0]
    scheduler.abort("c")  # which has no blocks yet
    assert lengths(step(scheduler)) == {"a": 1, "b": 6, "d": 1}
    run(scheduler)
    assert all(r.num_output_tokens == 2 for r in requests if r.request_id != "c")


@pytest.mark.parametrize(("num_usable", "size"), [(7, 1), (8, 2), (9, 3), (11, 3), (12, 4)])
def test_a_static_batch_leaves_room_for_all_that_its_requests_have_yet_to_take(num_usable, size):
    """a and b take 8 blocks in the end, though after the first step they hold one."""
    scheduler = make_scheduler(num_blocks=1 + num_usable, max_num_batched_tokens=4, batching="static")
    requests = [add(scheduler, name, length, 1) for name, length in zip("abcd", (16, 16, 3, 12), strict=True)]
    assert lengths(step(scheduler)) == {"a": 4}
    assert scheduler.running == requests[:size]


def test_a_prefill_that_gets_no_tokens_preempts_nothing():
    """b needs a block for its next token, and none is free. But the budget has no token for it either."""
    scheduler = make_scheduler(block_size=2, max_num_batched_tokens=4, batching="static")
    a, b = add(scheduler, "a", 12), add(scheduler, "b", 4)
    step(scheduler)
    scheduler.pool.allocate(scheduler.pool.num_free - 2)
    plan = scheduler.schedule()
    assert (lengths(plan), plan.preempted, scheduler.running) == ({"a": 4}, [], [a, b])


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
    plan = step(scheduler)  # a still has room in its third block, b has none
    assert (lengths(plan), plan.preempted) == ({"a": 1}, [b])


def test_a_prefill_takes_the_free_blocks_before_it_preempts():
    """Half a chunk now is better than a preemption."""
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


@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_preemption_stops_as_soon_as_there_is_room(mode):
    """d and e hold only a block that a holds too, and the first step has no tokens for them. To preempt them frees
    nothing. c is the next, and its block is enough for b."""
    scheduler = make_scheduler(
        max_num_batched_tokens=17,
        num_cpu_blocks=10,
        preemption_mode=mode,
        costs=PreemptionCosts(1.0, 1.0),
        enable_prefix_caching=True,
        batching="static",
    )
    a, b, c, d, e = (add(scheduler, n, [*range(4), *[i] * (5 if n == "a" else 4)]) for i, n in enumerate("abcde"))
    assert spans(step(scheduler)) == {"a": (0, 9), "b": (4, 8), "c": (4, 8)}
    assert d.block_table == e.block_table == a.block_table[:1]
    scheduler.pool.allocate(scheduler.pool.num_free)
    plan = scheduler.schedule()
    assert (spans(plan), plan.preempted) == ({"a": (9, 10), "b": (8, 9)}, [e, d, c])
    assert scheduler.running == [a, b]


def test_a_swapped_request_goes_on_where_it_was():
    """Its blocks travel to the host and back, as pairs in the plans, and nothing is computed again."""
    scheduler = make_scheduler(num_blocks=1 + 6, block_size=2, num_cpu_blocks=10)
    add(scheduler, "a", 5, 4)
    b = add(scheduler, "b", 5, 4)
    step(scheduler)
    step(scheduler)
    table = list(b.block_table)
    plan = step(scheduler)  # both need a fourth block
    assert plan.preempted == [b]
    assert (b.state, b.num_computed_tokens, list(b.block_table)) == (RequestState.SWAPPED, 6, [])
    assert plan.swap_out == list(zip(table, b.host_blocks, strict=True))
    hosts = list(b.host_blocks)
    assert scheduler.num_waiting == 1
    details = {"mode": "swap", "swap_seconds": math.inf, "recompute_seconds": math.inf}  # nothing was measured
    assert take_events(scheduler)[-1] == Event(0.0, "preempted", b, details)
    assert spans(step(scheduler)) == {"a": (7, 8)}  # its last
    plan = step(scheduler)
    assert (spans(plan), plan.admitted) == ({"b": (6, 7)}, [b])
    details = {"num_swapped_in_blocks": 3, "num_computed_tokens": 6}
    assert [event for event in take_events(scheduler) if event.request is b] == [Event(0.0, "returned", b, details)]
    assert plan.swap_in == list(zip(hosts, b.block_table[:3], strict=True))
    assert (b.state, list(b.host_blocks)) == (RequestState.RUNNING, [])
    run(scheduler)
    assert (b.num_output_tokens, b.num_preemptions) == (4, 1)


# ---------------------------------------------------------------------------- displacement


@dataclass
class Displacement:
    running: dict[str, tuple[Sequence[int], int]]  # prompt and priority; each has computed its prompt
    urgent: Sequence[int]  # the prompt of the request of priority 1 that comes then
    num_usable: int
    displaced: str  # with num_usable blocks
    with_one_block_less: str = ""


SHARED = range(100, 108)  # two blocks of 4
DISPLACEMENTS = {
    "exactly the blocks that become free": Displacement(
        {"a": (range(9), 0), "b": (range(10, 19), 2)}, range(20, 33), num_usable=7, displaced="b"
    ),
    "two of three": Displacement(
        {"a": (range(9), 0), "b": (range(3), 2), "c": (range(10, 15), 3)}, range(20, 33), num_usable=7, displaced="cb"
    ),
    "a decode needs its next block in this step": Displacement(
        {"a": (range(8), 0), "b": (range(10, 19), 2)}, range(20, 33), num_usable=7, displaced="b"
    ),
    # b alone holds the two blocks that the urgent request finds, so one of b's blocks becomes free, not three.
    "it shares with the displaced": Displacement(
        {"a": (range(3), 0), "b": ([*SHARED, 1], 2)}, [*SHARED, *range(9)], num_usable=6, displaced="b"
    ),
    "it shares with one that stays": Displacement(
        {"a": ([*SHARED, 1], 0), "b": (range(9), 2)}, [*SHARED, *range(13)], num_usable=7, displaced="b"
    ),
    # Only both together free the two blocks that they share.
    "the displaced share": Displacement(
        {"a": (range(3), 0), "b": ([*SHARED, 1], 2), "c": ([*SHARED, 2], 2)}, range(20, 37), 6, displaced="cb"
    ),
    "the fewest of those that share": Displacement(
        {"a": (range(7), 2), "b": ([*SHARED, 1], 3), "c": ([*SHARED, 2], 3)}, range(20, 37), 7, "cb", "cba"
    ),
}


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("slack", [0, -1])
@pytest.mark.parametrize("case", DISPLACEMENTS.values(), ids=DISPLACEMENTS)
def test_an_urgent_request_displaces_the_fewest_and_starts_in_the_same_step_or_displaces_none(case, slack, mode):
    scheduler = make_scheduler(
        num_blocks=1 + case.num_usable + slack,
        max_num_batched_tokens=100,
        policy=Priority(),
        enable_prefix_caching=True,
        num_cpu_blocks=100,
        preemption_mode=mode,
    )
    model = ToyModel(4)
    for name, (prompt, priority) in case.running.items():
        add(scheduler, name, prompt, 5, priority=priority)
    checked_step(scheduler, model)
    assert len(scheduler.running) == len(case.running)
    urgent = add(scheduler, "urgent", case.urgent, 2, priority=1)
    plan = checked_step(scheduler, model)
    displaced = "".join(request.request_id for request in plan.preempted)
    assert displaced == (case.displaced if slack == 0 else case.with_one_block_less)
    assert plan.admitted == [urgent] * bool(displaced)
    for _ in until(lambda: not scheduler.requests, max_steps=20):
        checked_step(scheduler, model)


def test_whether_to_displace_costs_nothing_where_no_running_request_is_less_urgent():
    """No prefix is looked up, however long the prompt of the next request is."""
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=64, policy=Priority())
    for name in "abc":
        add(scheduler, name, 30, 30)
    step(scheduler)
    scheduler.memory.find_prefix = None
    for _ in range(5):
        assert lengths(step(scheduler)) == {"a": 1, "b": 1}


# ---------------------------------------------------------------------------- a step that fails


@pytest.mark.parametrize("policy", [FCFS, Priority])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("fail", FAILURES, ids=["before", "within", "after"])
def test_any_step_may_fail(policy, mode, caching, fail):
    """Each step of a run in turn fails, and the one after it. Tokens are kept, and all come out as they should."""
    seen = Counter[str]()
    for number in range(100):
        scheduler = make_scheduler(
            num_blocks=1 + 9,
            max_num_batched_tokens=9,
            num_cpu_blocks=18,
            preemption_mode=mode,
            enable_prefix_caching=caching,
            policy=policy(),
        )
        model = ToyModel(4)
        requests = [make_request(n, [*SHARED, i, i], 11, priority=9 - i) for i, n in enumerate("abcd")]
        for now in until(lambda: requests[-1].arrival and not scheduler.requests, max_steps=150):  # noqa: B023
            for request in requests[now : now + 1]:
                scheduler.add(request)
            plan = checked_step(scheduler, model, fail if now in (number, number + 1) else None)
            if now == number:
                seen.update(field for field, value in vars(plan).items() if value)
        assert [r.output_token_ids for r in requests] == [alone(r, 37)[0] for r in requests]
        if now < number:
            break
    assert seen.keys() == {"chunks", "preempted", "admitted", "swap_out", "swap_in"} - (
        {"swap_out", "swap_in"} if mode == "recompute" else set()
    )


def test_after_a_failed_step_the_same_chunks_are_planned():
    """A running request goes on where it was. Admitted ones start again: b shared what a was to compute."""
    scheduler = make_scheduler(max_num_batched_tokens=12, enable_prefix_caching=True)
    running = add(scheduler, "running", range(20, 23))
    step(scheduler)
    a, b = add(scheduler, "a", 9), add(scheduler, "b", 9)
    take_events(scheduler)
    for _ in range(2):
        plan = scheduler.schedule()
        assert spans(plan) == {"running": (3, 4), "a": (0, 9), "b": (8, 9)}
        scheduler.cancel(plan)
        scheduler.check_invariants()
        assert scheduler.running == [running]
        assert scheduler.memory.find_prefix(a) == []
    assert spans(step(scheduler)) == {"running": (3, 4), "a": (0, 9), "b": (8, 9)}
    assert (a.num_cached_tokens, b.num_cached_tokens, b.num_preemptions) == (0, 8, 2)
    events = [(event.kind, event.details.get("mode")) for event in take_events(scheduler) if event.request is b]
    assert events == [("started", None), *[("preempted", "recompute"), ("returned", None)] * 2, ("first_token", None)]


def test_what_was_not_copied_in_is_not_found():
    """a returns from host memory, and its full blocks can be found. If the step fails, their content is unknown."""
    scheduler = make_scheduler(num_blocks=1 + 6, num_cpu_blocks=9, enable_prefix_caching=True)
    a = add(scheduler, "a", 9, 5)
    step(scheduler)
    scheduler._preempt(a, StepPlan())
    scheduler.pool.free(scheduler.pool.allocate(6))  # what the cache still has of it is evicted
    plan = scheduler.schedule()
    assert (len(plan.swap_in), spans(plan), len(scheduler.memory.find_prefix(a))) == (3, {"a": (9, 10)}, 2)
    scheduler.cancel(plan)
    assert scheduler.memory.find_prefix(a) == []
    assert spans(step(scheduler)) == {"a": (0, 10)}


class Failing(FCFS):
    """Fails when it is asked for a key, and when it is told that a request ended."""

    fails = False

    def key(self, request):
        return 1 / 0 if self.fails else super().key(request)

    def finished(self, request):
        return 1 / 0 if self.fails else None


def test_fail_all_ends_every_request_and_leaves_a_scheduler_as_new():
    """Running, swapped and waiting ones, even if the policy is what fails."""
    policy = Failing()
    scheduler = make_scheduler(
        num_blocks=1 + 6, block_size=2, num_cpu_blocks=10, enable_prefix_caching=True, policy=policy
    )
    requests = [add(scheduler, "running", 5), add(scheduler, "swapped", range(10, 15)), add(scheduler, "waiting", 5)]
    for _ in until(lambda: requests[1].state is RequestState.SWAPPED):
        step(scheduler)
    take_events(scheduler)
    policy.fails = True
    with pytest.raises(ZeroDivisionError):
        scheduler.schedule()
    assert scheduler.fail_all("why") == requests
    for request in requests:
        assert (request.state, request.finish_reason, request.stop_reason) == (RequestState.FINISHED, "error", "why")
        assert not request.block_table
        assert not request.host_blocks
    events = [(event.kind, event.request, event.details) for event in take_events(scheduler)]
    assert events == [("finished", request, {"finish_reason": "error"}) for request in requests]
    assert (scheduler.requests, scheduler.running, scheduler.num_waiting) == ({}, [], 0)
    policy.fails = False
    again = add(scheduler, "waiting", 5, 2)
    run(scheduler)
    assert (again.num_output_tokens, again.num_cached_tokens) == (2, 0)


# ---------------------------------------------------------------------------- prefix caching


def test_a_request_starts_after_what_is_cached_of_it():
    """Two full blocks of its nine tokens; of an equal prompt of eight, the last is computed again."""
    scheduler = make_scheduler(enable_prefix_caching=True)
    first = add(scheduler, "first", 8, 1)
    assert spans(step(scheduler)) == {"first": (0, 8)}
    longer, equal = add(scheduler, "longer", 9, 1), add(scheduler, "equal", 8, 1)
    take_events(scheduler)
    assert spans(step(scheduler)) == {"longer": (8, 9), "equal": (4, 8)}
    assert [event for event in take_events(scheduler) if event.kind == "started"] == [
        Event(0.0, "started", longer, {"num_prompt_tokens": 9, "num_cached_tokens": 8}),
        Event(0.0, "started", equal, {"num_prompt_tokens": 8, "num_cached_tokens": 4}),
    ]
    assert [r.num_cached_tokens for r in (first, longer, equal)] == [0, 8, 4]


def test_requests_of_one_step_share_the_full_blocks_of_their_prompts():
    """The first computes them. The others begin after them, each with a block of its own."""
    scheduler = make_scheduler(enable_prefix_caching=True)
    requests = [add(scheduler, name, 10, 2) for name in "abc"]
    assert spans(step(scheduler)) == {"a": (0, 10), "b": (8, 10), "c": (8, 10)}
    assert [r.num_cached_tokens for r in requests] == [0, 8, 8]
    tables = [list(r.block_table) for r in requests]
    assert {tuple(table[:2]) for table in tables} == {tuple(tables[0][:2])}
    assert len({table[2] for table in tables}) == 3
    run(scheduler)


@pytest.mark.parametrize(("budget", "found"), [(7, 4), (8, 8), (11, 8), (12, 12)])
def test_the_full_blocks_of_a_chunked_prefill_are_found_before_its_last_chunk(budget, found):
    """By an urgent request with the same beginning, and by itself when it returns."""
    scheduler = make_scheduler(max_num_batched_tokens=budget, enable_prefix_caching=True, policy=Priority())
    model = ToyModel(4)
    long = add(scheduler, "long", 40, 2, priority=1)
    checked_step(scheduler, model)
    urgent = add(scheduler, "urgent", 14, 2)
    plan = checked_step(scheduler, model)
    assert (plan.preempted, plan.admitted) == ([long], [urgent])
    assert urgent.num_cached_tokens == found
    for _ in until(lambda: long.state is RequestState.RUNNING, max_steps=4):
        plan = checked_step(scheduler, model)
    assert spans(plan)["long"][0] == 12
    for _ in until(lambda: not scheduler.requests, max_steps=20):
        checked_step(scheduler, model)
    assert [r.output_token_ids for r in (long, urgent)] == [alone(r, 99)[0] for r in (long, urgent)]


def test_a_cached_block_that_is_free_is_counted_once():
    """A pool of 4 blocks, all free, 2 of them with the request's beginning: it needs all 4, and not 2 beside those.
    While one is held it must wait."""
    scheduler = make_scheduler(num_blocks=1 + 4, enable_prefix_caching=True)
    add(scheduler, "first", 9, 1)
    step(scheduler)
    assert scheduler.pool.num_free == 4
    held = scheduler.pool.allocate(1)
    add(scheduler, "request", 16, 1)
    assert scheduler.schedule() == StepPlan()
    scheduler.pool.free(held)
    assert spans(step(scheduler)) == {"request": (8, 16)}
    assert scheduler.pool.num_free == 4


def test_a_long_prompt_that_is_mostly_cached_counts_as_short():
    """Of 41 tokens 40 are cached, so it is less work than a prompt of 3. The last has none of its tokens cached."""
    scheduler = make_scheduler(
        max_num_seqs=1, max_num_batched_tokens=64, enable_prefix_caching=True, policy=SJF(ageing=0.01)
    )
    add(scheduler, "first", 40, 1)
    step(scheduler)
    add(scheduler, "runs", [7], 2)
    step(scheduler)
    requests = [add(scheduler, *args, 5) for args in (("short", [8] * 3), ("long", 41), ("other", [9, *range(40)]))]
    assert [r.num_cached_tokens for r in requests] == [0, 40, 0]
    started = []
    for _ in until(lambda: not scheduler.requests):
        started += [request.request_id for request in step(scheduler).admitted]
    assert started == ["long", "short", "other"]


def test_what_a_request_without_finite_logits_computed_is_not_found():
    """Nor is its first block, which it shares with b. b keeps it, and what b adds to it isn't found either."""
    scheduler = make_scheduler(enable_prefix_caching=True, max_num_batched_tokens=64)
    a, b = add(scheduler, "a", [*range(4), 5, 5, 5, 5, 5]), add(scheduler, "b", [*range(4), 6, 6, 6])
    plan = scheduler.schedule()
    assert spans(plan) == {"a": (0, 9), "b": (4, 7)}
    assert scheduler.update(plan, [None, 1]) == [a, b]
    scheduler.check_invariants()
    assert (a.state, a.finish_reason) == (RequestState.FINISHED, "error")
    assert a.stop_reason == "the model's logits were not finite"
    assert a.output_token_ids == []
    assert scheduler.running == [b]
    c, d = add(scheduler, "c", a.prompt_token_ids, 1), add(scheduler, "d", [*b.token_ids, 0, 0], 1)
    assert spans(step(scheduler)) == {"b": (7, 8), "c": (0, 9), "d": (4, 10)}  # d finds what c computes
    assert (c.num_cached_tokens, d.num_cached_tokens, b.output_token_ids) == (0, 4, [1, 0])


# ---------------------------------------------------------------------------- how requests end


STOPS = {"eos": [5, 7, 9], "stop_token_ids": [3, 6]}
FULL = "the request has filled the whole KV cache, 8 tokens"


@pytest.mark.parametrize(
    ("tokens", "limits", "params", "reasons"),
    [
        # Every EOS id ends a request, and stays in the output; a stop token is named.
        ([1, 5], {}, STOPS, ("stop", None)),
        ([1, 7], {}, STOPS, ("stop", None)),
        ([1, 9], {}, STOPS, ("stop", None)),
        ([1, 6], {}, STOPS, ("stop", 6)),
        # ignore_eos ignores no stop token. An id that is both still counts as the caller's.
        ([5, 5, 6], {}, {"eos": [5, 6], "stop_token_ids": [6], "ignore_eos": True}, ("stop", 6)),
        # min_tokens counts the output only.
        ([5, 6, 7, 5], {}, {"prompt": 50, "min_tokens": 3} | STOPS, ("stop", None)),
        ([5, 6, 7, 6], {}, {"prompt": 50, "min_tokens": 3} | STOPS, ("stop", 6)),
        # The very last token is a stop, if it stops.
        ([1, 5], {}, {"max_tokens": 2} | STOPS, ("stop", None)),
        ([1, 1], {}, {"max_tokens": 2} | STOPS, ("length", None)),
        # Length has a reason only where the pool set it: 2 blocks of 4, and the last token sampled needs no KV.
        ([1] * 6, {"max_model_len": 10}, {"max_tokens": None}, ("length", None)),
        ([1] * 5, {"num_blocks": 1 + 2}, {"max_tokens": 5}, ("length", None)),
        ([1] * 5, {"num_blocks": 1 + 2, "max_model_len": 9}, {"max_tokens": None}, ("length", None)),
        ([1] * 5, {"num_blocks": 1 + 2}, {"max_tokens": None}, ("length", FULL)),
        ([1] * 5, {"num_blocks": 1 + 2}, {"max_tokens": 6}, ("length", FULL)),
    ],
)
def test_why_a_request_ends(tokens, limits, params, reasons):
    scheduler = make_scheduler(max_num_batched_tokens=64, **limits)
    request = add(scheduler, "a", **({"prompt": 4} | params))
    for token in tokens:
        assert request.state is not RequestState.FINISHED
        step(scheduler, token)
    assert request.state is RequestState.FINISHED
    assert request.output_token_ids == tokens
    assert (request.finish_reason, request.stop_reason) == reasons
    assert_nothing_is_held(scheduler)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_pool_of_two_blocks(length):
    """One usable block. The running request needs a second, there is none, and the next runs."""
    scheduler = make_scheduler(num_blocks=2)
    requests = [add(scheduler, name, length) for name in ("first", "second")]
    run(scheduler, max_steps=10)
    for request in requests:
        assert (request.num_output_tokens, request.finish_reason) == (5 - length, "length")
        assert request.stop_reason == "the request has filled the whole KV cache, 4 tokens"


# ---------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("length", "limits", "message"),
    [
        (0, {}, r"^prompt is empty: it must have at least 1 token$"),
        (16, {"max_model_len": 16}, r"^prompt has 16 tokens, but max_model_len is 16, .* can have at most 15$"),
        (13, {"num_blocks": 4}, r"^prompt has 13 tokens, .* holds only 12 \(3 blocks of 4\); raise num_blocks$"),
    ],
)
def test_a_prompt_that_can_never_be_served_is_refused_and_one_token_makes_the_difference(length, limits, message):
    scheduler = make_scheduler(**limits)
    with pytest.raises(ValueError, match=message):
        add(scheduler, "a", length)
    assert not scheduler.requests
    request = add(scheduler, "a", length - 1 if length else 1, None if limits else 1)
    run(scheduler)
    assert (request.num_output_tokens, request.finish_reason) == (1, "length")


def test_an_id_can_be_used_again_only_when_its_request_has_ended():
    """The request itself can't: a second round would mix up its tokens and tables."""
    scheduler = make_scheduler()
    first = add(scheduler, "a", 3, 2)
    for _ in range(2):  # while it waits, and while it runs
        with pytest.raises(ValueError, match="request_id 'a' is already in use"):
            add(scheduler, "a", 3)
        assert scheduler.requests["a"] is first
        step(scheduler)
    assert first.finish_reason == "length"
    with pytest.raises(ValueError, match=r"^request 'a' was submitted before: it is FINISHED$"):
        scheduler.add(first)
    second = add(scheduler, "a", 3)
    scheduler.abort("a")  # before it ran, so that the queue still knows it
    third = add(scheduler, "a", 3, 2)
    run(scheduler)
    assert (second.finish_reason, second.num_output_tokens) == ("abort", 0)
    assert (third.finish_reason, third.num_output_tokens) == ("length", 2)


# ---------------------------------------------------------------------------- abort


@pytest.mark.parametrize("when", ["waiting", "half prefilled", "decoding", "preempted", "swapped"])
def test_abort_in_any_state(when):
    """Its blocks are back at once. A second abort, and one of an unknown id, have no effect."""
    num_cpu_blocks = 100 if when == "swapped" else 0
    scheduler = make_scheduler(num_blocks=1 + 6, block_size=2, max_num_batched_tokens=6, num_cpu_blocks=num_cpu_blocks)
    other = add(scheduler, "other", 2, 9)
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
    output, held, free = request.output_token_ids, len(request.block_table), scheduler.pool.num_free
    assert scheduler.abort("unknown") is None
    take_events(scheduler)
    assert scheduler.abort("a", 3.0) is request
    assert take_events(scheduler) == [Event(3.0, "finished", request, {"finish_reason": "abort"})]
    scheduler.check_invariants()
    assert scheduler.pool.num_free == free + held
    assert scheduler.memory.host_pool.num_free == num_cpu_blocks
    assert (request.state, request.finish_reason) == (RequestState.FINISHED, "abort")
    assert scheduler.abort("a") is None
    run(scheduler)
    assert request.output_token_ids == output  # kept, and nothing is added
    assert (other.num_output_tokens, other.num_preemptions) == (9, 0)
    assert scheduler.abort("other") is None
    assert other.finish_reason == "length"


def test_aborted_requests_do_not_pile_up_in_the_queue():
    """They leave it when they come to its head; a queue of little else is swept before."""
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, "first", 3)
    step(scheduler)
    add(scheduler, "stays", 3, 1)
    for number in range(1000):  # clients that come and go while the engine is busy
        add(scheduler, str(number), 3)
        scheduler.abort(str(number))
        assert scheduler.waiting.num_entries <= 2 * scheduler.num_waiting + 64
    scheduler.abort("first")
    assert lengths(step(scheduler)) == {"stays": 3}
    assert scheduler.waiting.num_entries > 0
    step(scheduler)  # looks for the next and finds only aborted ones
    assert scheduler.waiting.num_entries == 0


def test_check_invariants_looks_at_blocks_lists_and_queue():
    for damage, complaint in (
        (lambda s: s.pool.allocate(1), "reference counts are off"),
        (lambda s: s.running.clear(), "in the wrong list"),
        (lambda s: s.running.append(s.requests["a"]), "in the wrong list"),
        (lambda s: s.waiting.pop(), "0 times in the queue"),
        (lambda s: s.waiting.push(s.requests["b"]), "2 times in the queue"),
        (lambda s: s.waiting.push(s.requests["a"]), "1 times in the queue"),
    ):
        scheduler = make_scheduler(max_num_seqs=1)
        add(scheduler, "a", 3)
        add(scheduler, "b", 3)
        step(scheduler)
        assert scheduler.waiting.head().request_id == "b"
        damage(scheduler)
        with pytest.raises(AssertionError, match=complaint):
            scheduler.check_invariants()


# ---------------------------------------------------------------------------- cost


class WatchedRequest(Request):
    """Counts all accesses to all requests."""

    num_looks = 0

    def __getattribute__(self, name):
        WatchedRequest.num_looks += 1
        return super().__getattribute__(name)


def test_a_step_costs_the_same_however_many_requests_wait():
    """Counted, not timed: a waiting request is looked at when it comes to the head, and not before."""
    looks = []
    for num_waiting in (10, 20_000):
        scheduler = make_scheduler(num_blocks=40)
        params = SamplingParams(max_tokens=4)
        for number in range(8 + num_waiting):
            scheduler.add(WatchedRequest(str(number), [1, 2, 3], params))
        WatchedRequest.num_looks = 0
        for _ in range(6):
            plan = scheduler.schedule()
            scheduler.update(plan, [0 for chunk in plan.chunks if chunk.needs_sampling])
        scheduler.abort("7")  # which runs
        scheduler.abort("15")  # which waits
        looks.append(WatchedRequest.num_looks)
    assert looks[0] == looks[1]
