"""Prefix caching: requests that begin alike compute their beginning once, and their tokens don't show it.

The judge is the request by itself in an engine that caches no prefixes; transformers judges some too.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import eager, greedy, run_to_end, transformers_greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import make_prompt, poison_free_blocks

import minicb.blocks
from minicb import Engine
from minicb.blocks import BlockPool
from minicb.memory import Memory, PreemptionCosts
from minicb.params import SamplingParams, SchedulingParams
from minicb.plan import StepPlan
from minicb.policies import FCFS
from minicb.request import Request, RequestState
from minicb.scheduler import Scheduler

Alone = Callable[[Path, Sequence[int], int], list[int]]
PREFIX = make_prompt(8)  # two blocks of 4


def make_engine(folder: Path, **kwargs) -> Engine:
    return eager(folder, **({"num_blocks": 60, "num_cpu_blocks": 60} | kwargs))


@pytest.fixture(scope="module")
def alone() -> Alone:
    """alone(folder, prompt, n): n greedy tokens of a request by itself, without prefix caching."""
    engines: dict[Path, Engine] = {}
    known: dict[tuple, list[int]] = {}

    def judge(folder: Path, prompt: Sequence[int], max_tokens: int) -> list[int]:
        key = (folder, *prompt)
        if len(known.get(key, ())) < max_tokens:
            if folder not in engines:
                engines[folder] = make_engine(folder, enable_prefix_caching=False)
            known[key] = complete(engines[folder], prompt, max(max_tokens, 12)).outputs[0].token_ids
        return known[key][:max_tokens]

    return judge


def complete(engine: Engine, prompt: Sequence[int], max_tokens: int = 6):
    """The output of one request after which the engine is empty again."""
    request_id = engine.add_request(list(prompt), greedy(max_tokens))
    return run_to_end(engine)[request_id]


def submit(engine: Engine, prompt: Sequence[int], max_tokens: int = 9, priority: int = 0) -> Request:
    scheduling = SchedulingParams(priority=priority)
    request = engine.make_request(list(prompt), greedy(max_tokens), scheduling=scheduling)
    engine.submit(request)
    return request


def watch(engine: Engine) -> list[StepPlan]:
    """The plans that the engine's runner executes from now on."""
    plans, execute = [], engine.runner.execute

    def watched(plan: StepPlan):
        plans.append(plan)
        return execute(plan)

    engine.runner.execute = watched
    return plans


def preempt(engine: Engine, request: Request) -> StepPlan:
    """As if another request needed its blocks."""
    plan = StepPlan()
    engine.scheduler._preempt(request, plan)
    engine.runner.execute(plan)
    return plan


def run_poisoned(engine: Engine) -> None:
    while engine.has_unfinished_requests():
        poison_free_blocks(engine)
        engine.step()
        engine.scheduler.check_invariants()


def fill_with_garbage(engine: Engine) -> None:
    engine.runner.k_cache.fill_(torch.nan)
    engine.runner.v_cache.fill_(1e30)


# ---------------------------------------------------------------------------- what is found


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_a_prompt_of_any_length_twice(tiny, alone, block_size):
    """Around the end of a block. The second time all full blocks are found, except the one that holds the last
    token. The last token is always computed: the next one is sampled from its logits."""
    engine = make_engine(tiny, block_size=block_size)
    plans = watch(engine)
    found = {}
    for length in range(1, 2 * block_size + 2):
        prompt = [length, *make_prompt(length)[1:]]  # begins like no other
        first = complete(engine, prompt)
        del plans[:]
        second = complete(engine, prompt)
        found[length] = (first.num_cached_tokens, second.num_cached_tokens)
        [chunk] = plans[0].chunks
        assert (chunk.start, chunk.length) == (second.num_cached_tokens, length - second.num_cached_tokens)
        expected = transformers_greedy(tiny, prompt, 6, dtype=torch.float64)
        assert first.outputs[0].token_ids == second.outputs[0].token_ids == expected == alone(tiny, prompt, 6)
    assert (
        found
        == {
            1: {1: (0, 0), 2: (0, 1), 3: (0, 2)},
            2: {1: (0, 0), 2: (0, 0), 3: (0, 2), 4: (0, 2), 5: (0, 4)},
            4: {1: (0, 0), 2: (0, 0), 3: (0, 0), 4: (0, 0), 5: (0, 4), 6: (0, 4), 7: (0, 4), 8: (0, 4), 9: (0, 8)},
        }[block_size]
    )


def test_without_prefix_caching_nothing_is_found(tiny):
    engine = make_engine(tiny, enable_prefix_caching=False)
    assert [complete(engine, PREFIX + [1]).num_cached_tokens for _ in range(2)] == [0, 0]


@st.composite
def conversations(draw) -> list[tuple[int, int, list[int]]]:
    """Prompts that begin like what was said before: (which earlier one, how much of it, what is new)."""
    tail = st.lists(st.integers(0, 1), max_size=6)
    turn = st.tuples(st.integers(0, 9), st.integers(0, 12) | st.just(99), tail)
    return draw(st.lists(turn, min_size=2, max_size=7))


@given(turns=conversations(), block_size=st.integers(1, 5), budget=st.sampled_from([3, 64]))
def test_with_room_for_everything_exactly_the_longest_common_beginning_is_found(tiny, alone, turns, block_size, budget):
    """In whole blocks; of prompts and of outputs. An output's last token isn't computed, so it isn't found."""
    engine = make_engine(tiny, block_size=block_size, num_blocks=400, max_num_batched_tokens=budget)
    said: list[list[int]] = []
    for which, length, tail in turns:
        prompt = ((said[which % len(said)][:length] if said else []) + tail)[:60] or [1]
        common = [
            sum(itertools.takewhile(bool, (a == b for a, b in zip(earlier[:-1], prompt[:-1], strict=False))))
            for earlier in said
        ]
        output = complete(engine, prompt)
        assert output.num_cached_tokens == max(common, default=0) // block_size * block_size
        assert output.outputs[0].token_ids == alone(tiny, prompt, 6)
        said.append(prompt + output.outputs[0].token_ids)


@pytest.mark.parametrize(("length", "found"), [(4, 8), (5, 8), (6, 8), (7, 12)])
def test_an_answer_is_found_when_the_chat_goes_on(tiny, alone, length, found):
    """6 tokens are generated and 5 of them computed: of a prompt of 7 the third block is full then."""
    engine = make_engine(tiny)
    prompt = make_prompt(24)[:length]
    answer = complete(engine, prompt).outputs[0].token_ids
    question = prompt + answer + [1, 2, 3, 4]
    output = complete(engine, question)
    assert output.num_cached_tokens == found
    assert output.outputs[0].token_ids == alone(tiny, question, 6)


# ---------------------------------------------------------------------------- what must not be found


@pytest.mark.parametrize("budget", [1, 5, 8, 9, 12, 100])
def test_equal_prompts_together_are_computed_once_and_read_nothing_that_was_not(tiny, alone, budget):
    """Four prompts of 9 come at once and the cache is full of NaN. The first computes two blocks, the others find
    them, in the same step if the budget allows it."""
    engine = make_engine(tiny, max_num_batched_tokens=budget)
    fill_with_garbage(engine)
    prompt = PREFIX + [1]
    requests = [submit(engine, prompt) for _ in range(4)]
    run_poisoned(engine)
    assert [request.num_cached_tokens for request in requests] == [0, 8, 8, 8]
    for request in requests:
        assert request.output_token_ids == alone(tiny, prompt, 9)


@pytest.mark.parametrize("together", [False, True])
def test_a_block_that_is_not_full_is_never_shared(tiny, alone, together):
    """5 tokens in common are one block of 4, though the second block of each begins with the same token. Then they
    differ: by their prompts, or only by what is sampled."""
    engine = make_engine(tiny)
    common = make_prompt(5)
    first = submit(engine, common, 7)
    engine.step()
    if not together:
        run_to_end(engine)
    others = [submit(engine, common + [token], 7) for token in (1, 2)]
    sampled = engine.make_request(common, SamplingParams(temperature=5.0, seed=1, max_tokens=7))
    engine.submit(sampled)
    engine.step()
    tables = [list(request.block_table) for request in (*others, sampled)]
    assert {table[0] for table in tables} == {tables[0][0]}
    assert len({table[1] for table in tables}) == 3
    run_poisoned(engine)
    assert [request.num_cached_tokens for request in (first, *others, sampled)] == [0, 4, 4, 4]
    assert first.output_token_ids == alone(tiny, common, 7)
    for token, request in zip((1, 2), others, strict=True):
        assert request.output_token_ids == alone(tiny, common + [token], 7)
    by_itself = make_engine(tiny, enable_prefix_caching=False)
    rid = by_itself.add_request(common, SamplingParams(temperature=5.0, seed=1, max_tokens=7))
    assert run_to_end(by_itself)[rid].outputs[0].token_ids == sampled.output_token_ids != first.output_token_ids


class Colliding(tuple):
    """Token ids that all hash alike. Real ones do so too rarely to be found by trying."""

    def __hash__(self) -> int:
        return 0


def test_equal_hashes_are_not_taken_for_equal_tokens(tiny, alone, monkeypatch):
    monkeypatch.setattr(minicb.blocks, "tuple", Colliding, raising=False)
    monkeypatch.setattr(minicb.blocks, "hash", lambda _: 0, raising=False)
    engine = make_engine(tiny, block_size=2, num_blocks=200)
    prompts = [[a, b, c, d, 5] for a, b, c, d in itertools.product((1, 2), repeat=4)]
    for prompt, cached in zip(prompts, itertools.cycle((0, 2, 2, 2)), strict=False):
        output = complete(engine, prompt)
        assert output.outputs[0].token_ids == alone(tiny, prompt, 6)
        assert output.num_cached_tokens == cached
    outputs = [complete(engine, prompt) for prompt in prompts]
    assert [output.num_cached_tokens for output in outputs] == [4] * 16
    assert [output.outputs[0].token_ids for output in outputs] == [alone(tiny, prompt, 6) for prompt in prompts]


def test_the_same_tokens_elsewhere_are_not_the_same_beginning(tiny, alone):
    """A block is found by all that comes before it, too: KV depends on that and on the position."""
    engine = make_engine(tiny)
    complete(engine, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    for prompt, cached in (
        ([5, 6, 7, 8, 9], 0),
        ([4, 3, 2, 1, 5, 6, 7, 8, 9], 0),
        ([1, 2, 3, 4, 1, 2, 3, 4, 5, 6, 7, 8, 9], 4),
        ([1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8, 9], 8),
        ([2, 3, 4, 5, 6, 7, 8, 9], 0),
    ):
        output = complete(engine, prompt)
        assert output.num_cached_tokens == cached
        assert output.outputs[0].token_ids == alone(tiny, prompt, 6)


@pytest.mark.parametrize("budget", [3, 4, 64])
def test_what_a_request_of_nan_computed_is_never_found(tiny, alone, budget):
    """Not even what it shares with others, which keep it and end as they should. Token 31 is poison."""
    engine = make_engine(tiny, max_num_batched_tokens=budget)
    with torch.no_grad():
        weight = engine.runner.model.embed_tokens.weight
        engine.runner.model.embed_tokens.weight = torch.nn.Parameter(weight.clone())
        engine.runner.model.embed_tokens.weight[31] = torch.nan
    prompt = [3, 4, 5, 6, 7, 8, 9, 10, 11]
    expected, poisoned = alone(tiny, prompt, 9), [*prompt[:4], 31, 1, 1, 1, 1]
    assert 31 not in expected
    for tokens, cached in ((poisoned, 0), (poisoned, 0), (prompt, 0), (prompt, 8), (poisoned, 4), (poisoned, 0)):
        output = complete(engine, tokens)
        assert output.num_cached_tokens == cached
        assert output.outputs[0].finish_reason == ("error" if tokens is poisoned else "length")
        assert output.outputs[0].token_ids == ([] if tokens is poisoned else expected[:6])
    holder = submit(engine, prompt)
    engine.step()
    assert complete(engine, poisoned).outputs[0].finish_reason == "error"
    assert holder.output_token_ids == expected


def test_after_an_error_in_the_scheduler_nothing_is_found(tiny, alone):
    """States and blocks may not agree then, so the cache may hold anything; here it is NaN."""
    engine = make_engine(tiny)
    complete(engine, PREFIX + [1])
    unlucky = submit(engine, PREFIX + [2])
    engine.step()
    engine.scheduler.fail_all("why")
    fill_with_garbage(engine)
    output = complete(engine, PREFIX + [1])
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids == alone(tiny, PREFIX + [1], 6)
    assert (unlucky.finish_reason, unlucky.output_token_ids) == ("error", alone(tiny, PREFIX + [2], 1))


# ---------------------------------------------------------------------------- holders come and go


@pytest.mark.parametrize("how", ["swap", "recompute", "abort"])
@pytest.mark.parametrize("who", [0, 1])
def test_shared_blocks_survive_what_happens_to_one_holder(tiny, alone, how, who):
    """At any step: to the one that computed them, and to the one that found them. A third finds them afterwards, and
    all blocks that are neither held nor cached are full of NaN."""
    tails, mode = ([1], [2, 3], [4, 5, 6]), "recompute" if how == "recompute" else "swap"
    for moment in range(1, 8):
        engine = make_engine(tiny, max_num_batched_tokens=5, preemption_mode=mode)
        requests = [submit(engine, PREFIX + tails[0])]
        while not requests[0].num_output_tokens:
            engine.step()
        requests.append(submit(engine, PREFIX + tails[1]))
        for _ in range(moment):
            engine.step()
        shared = list(requests[1 - who].block_table[:2])
        assert list(requests[who].block_table[:2]) == shared
        if how == "abort":
            assert engine.abort_request(requests[who].request_id) is not None
        else:
            assert bool(preempt(engine, requests[who]).swap_out) == (how == "swap")
        engine.scheduler.check_invariants()
        requests.append(submit(engine, PREFIX + tails[2]))
        poison_free_blocks(engine)
        engine.step()
        assert all(list(r.block_table[:2]) == shared for r in requests if r.state is RequestState.RUNNING)
        run_poisoned(engine)
        assert requests[1].num_cached_tokens == requests[2].num_cached_tokens == 8
        for request, tail in zip(requests, tails, strict=True):
            expected = alone(tiny, PREFIX + tail, 9)
            ended_early = how == "abort" and request is requests[who]
            assert request.output_token_ids == (expected[: request.num_output_tokens] if ended_early else expected)
        assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable
        host_pool = engine.scheduler.memory.host_pool
        assert host_pool.num_free == host_pool.num_usable


@pytest.mark.parametrize(
    ("meanwhile", "num_copied"), [("held", 1), ("free", 1), ("half is evicted", 2), ("evicted", 3)]
)
def test_a_swapped_request_comes_back_to_what_is_left_of_its_beginning(tiny, alone, meanwhile, num_copied):
    """3 blocks went to host memory, two of them a prefix that the other request has too. Only blocks that aren't
    cached any more are copied back."""
    engine = make_engine(tiny, preemption_mode="swap")
    pool, host_pool = engine.scheduler.pool, engine.scheduler.memory.host_pool
    other = submit(engine, PREFIX + [1])
    engine.step()
    request = submit(engine, PREFIX + [2, 3])
    engine.step()
    assert list(request.block_table[:2]) == list(other.block_table[:2])
    swap_out = preempt(engine, request).swap_out
    assert (request.state, len(swap_out), host_pool.num_free) == (RequestState.SWAPPED, 3, 57)
    if meanwhile != "held":
        engine.abort_request(other.request_id)
    if "evicted" in meanwhile:  # LRU, and of a prefix the last block first
        keep = 1 if meanwhile == "half is evicted" else 0
        pool.free(pool.allocate(pool.num_free - keep))
    poison_free_blocks(engine)
    plans = watch(engine)
    engine.step()
    hosts = [host for _, host in swap_out]
    assert plans[0].admitted == [request]
    assert plans[0].swap_in == list(zip(hosts[-num_copied:], request.block_table[3 - num_copied : 3], strict=True))
    assert host_pool.num_free == 60
    if meanwhile == "held":
        assert list(request.block_table[:2]) == list(other.block_table[:2])
    run_poisoned(engine)
    assert request.output_token_ids == alone(tiny, PREFIX + [2, 3], 9)
    assert request.num_cached_tokens == 8  # of its start; what it found when it returned doesn't count


def test_a_swapped_request_may_find_more_than_it_had(tiny, alone):
    """It was displaced after 3 tokens of its prompt, by an urgent request with the same prompt."""
    engine = make_engine(tiny, preemption_mode="swap", max_num_batched_tokens=3, scheduling_policy="priority")
    prompt = make_prompt(17)
    request = submit(engine, prompt, priority=1)
    engine.step()
    urgent = submit(engine, prompt)
    plans = watch(engine)
    engine.step()
    assert (plans[0].preempted, len(plans[0].swap_out), request.num_computed_tokens) == ([request], 1, 3)
    while request.state is not RequestState.RUNNING:
        poison_free_blocks(engine)
        engine.step()
    assert (plans[-1].admitted, plans[-1].swap_in) == ([request], [])
    assert plans[-1].chunks[-1][:3] == (request, 16, 1)
    assert list(request.block_table[:4]) == list(urgent.block_table[:4])
    run_poisoned(engine)
    assert request.output_token_ids == urgent.output_token_ids == alone(tiny, prompt, 9)
    assert engine.scheduler.memory.host_pool.num_free == 60


def test_blocks_that_others_hold_take_no_room(tiny, alone):
    """5 of 6 blocks are held. A request that needs 5 starts all the same, as it shares 4; the next needs a block."""
    engine = make_engine(tiny, num_blocks=1 + 6)
    prefix = make_prompt(16)
    other = submit(engine, prefix + [1], 3)
    engine.step()
    long, short = submit(engine, prefix + [2], 2), submit(engine, PREFIX + [3], 2)
    engine.step()
    assert engine.scheduler.running == [other, long]
    assert (long.num_cached_tokens, engine.scheduler.pool.num_free) == (16, 0)
    run_poisoned(engine)
    for request in (other, long, short):
        prompt = request.token_ids[: request.num_prompt_tokens]
        assert request.output_token_ids == alone(tiny, prompt, request.params.max_tokens)
    assert [request.num_preemptions for request in (other, long, short)] == [0, 0, 0]


def test_eviction_is_lru_and_takes_a_prefix_from_its_end(tiny):
    """8 usable blocks; each request computes two that are cached and one that isn't, which is the first to be
    allocated again. The next is the second of the two that were used least recently."""
    engine = make_engine(tiny, num_blocks=1 + 8)
    prompts = {name: [number] * 9 for number, name in enumerate("abcd")}
    finds = [("a", 0), ("b", 0), ("c", 0), ("a", 8), ("b", 8), ("c", 8)]  # 6 are cached, 2 empty
    finds += [("d", 0), ("b", 8), ("c", 8), ("a", 4), ("a", 8), ("d", 4), ("c", 8), ("b", 4)]
    assert [(name, complete(engine, prompts[name], 1).num_cached_tokens) for name, _ in finds] == finds


# ---------------------------------------------------------------------------- any traffic

PREFIXES = [make_prompt(n) for n in (13, 16, 17)]


@dataclass
class Arrival:
    prefix: int
    length: int  # of it
    tail: list[int]
    max_tokens: int
    arrives: int  # in this step
    aborted: int | None

    @property
    def prompt(self) -> list[int]:
        return PREFIXES[self.prefix][: self.length] + self.tail


arrivals_strategy = st.lists(
    st.builds(
        Arrival,
        prefix=st.sampled_from([0, 0, 0, 1, 2]),
        length=st.sampled_from([4, 5, 8, 12, 13]),
        tail=st.lists(st.integers(0, 1), max_size=2),
        max_tokens=st.integers(1, 12),
        arrives=st.integers(0, 16),
        aborted=st.none() | st.none() | st.integers(0, 24),
    ),
    min_size=2,
    max_size=10,
)


def serve(engine: Engine, arrivals: list[Arrival], judged: Callable, fails: frozenset[int] = frozenset()) -> None:
    requests: dict[int, Request] = {}
    execute = engine.runner.execute
    for now in itertools.count():
        assert now < 1000, "not finished"
        for index, arrival in enumerate(arrivals):
            if arrival.arrives == now:
                requests[index] = submit(engine, arrival.prompt, arrival.max_tokens)
            if arrival.aborted == now and index in requests:
                engine.abort_request(requests[index].request_id)
        if len(requests) == len(arrivals) and not engine.has_unfinished_requests():
            break
        poison_free_blocks(engine)
        if now in fails:

            def fail(plan: StepPlan, now=now):
                if now % 2:
                    execute(plan)
                raise KeyboardInterrupt

            engine.runner.execute = fail
            with pytest.raises(KeyboardInterrupt):
                engine.step()
            engine.runner.execute = execute
        else:
            engine.step()
        engine.scheduler.check_invariants()
    for index, arrival in enumerate(arrivals):
        request = requests[index]
        expected = judged(arrival.prompt, arrival.max_tokens)
        if request.finish_reason == "abort":
            expected = expected[: request.num_output_tokens]
        assert request.output_token_ids == expected
        assert request.num_cached_tokens % engine.scheduler.pool.block_size == 0
    for pool in (engine.scheduler.pool, engine.scheduler.memory.host_pool):
        assert pool.num_free == pool.num_usable


@given(
    arrivals=arrivals_strategy,
    block_size=st.integers(1, 5),
    spare_tokens=st.integers(0, 30),
    num_cpu_blocks=st.sampled_from([0, 3, 60]),
    mode=st.sampled_from(["auto", "swap", "recompute"]),
    swap_block=st.floats(0, 4),
    budget=st.sampled_from([2, 5, 9, 64]),
    fails=st.frozensets(st.integers(0, 30), max_size=3),
)
@settings(max_examples=2 * settings.default.max_examples)
def test_any_traffic_of_few_beginnings_in_a_small_pool(
    tiny, alone, arrivals, block_size, spare_tokens, num_cpu_blocks, mode, swap_block, budget, fails
):
    """Beginnings are found, evicted, and computed again; holders are preempted and aborted, steps fail before or
    after they ran. Each request's tokens are its own."""
    longest = max(len(arrival.prompt) + arrival.max_tokens for arrival in arrivals)
    engine = make_engine(
        tiny,
        block_size=block_size,
        num_blocks=2 + (longest + spare_tokens) // block_size,
        num_cpu_blocks=num_cpu_blocks,
        preemption_mode=mode,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
    )
    engine.scheduler.memory.costs = PreemptionCosts(swap_block, 1.0)
    serve(engine, arrivals, lambda prompt, count: alone(tiny, prompt, count), fails)


# ---------------------------------------------------------------------------- other models, compiled


@pytest.mark.parametrize("window", [2, 4, 5])
@pytest.mark.parametrize("budget", [3, 64])
def test_a_window_smaller_than_the_common_beginning(make_model, alone, window, budget):
    """Blocks out of sight of the first token that is computed are found all the same, and not read."""
    folder = make_model("mistral", sliding_window=window)
    engine = make_engine(folder, max_num_batched_tokens=budget)
    prefix = make_prompt(16)
    for tail, cached in (([1], 0), ([2, 3], 16), ([4, 5, 6, 7, 8], 16)):
        prompt = prefix + tail
        output = complete(engine, prompt, 6)
        assert output.num_cached_tokens == cached
        expected = transformers_greedy(folder, prompt, 6, dtype=torch.float64)
        assert output.outputs[0].token_ids == expected == alone(folder, prompt, 6)


@pytest.fixture(scope="module")
def judged(tiny) -> dict[tuple[int, ...], list[int]]:
    """transformers' tokens for prompts with beginnings in common."""
    tails = ([], [0], [1], [1, 1])
    prompts = [PREFIXES[p][:length] + tail for p in (0, 1) for length in (8, 12) for tail in tails]
    return {tuple(prompt): transformers_greedy(tiny, prompt, 12, dtype=torch.float64) for prompt in prompts}


@given(
    arrivals=st.lists(
        st.builds(
            Arrival,
            prefix=st.integers(0, 1),
            length=st.sampled_from([8, 12]),
            tail=st.sampled_from([[], [0], [1], [1, 1]]),
            max_tokens=st.integers(1, 12),
            arrives=st.integers(0, 10),
            aborted=st.none() | st.none() | st.integers(0, 16),
        ),
        min_size=2,
        max_size=10,
    ),
    num_blocks=st.integers(8, 40),
    mode=st.sampled_from(["swap", "recompute"]),
)
def test_any_traffic_of_few_beginnings_compiled(compiled_engine, judged, arrivals, num_blocks, mode):
    """transformers' tokens also from FlexAttention: a shared block has one logical index for all its holders, in
    mixed steps and in steps of decodes. And nothing is compiled again."""
    engine, own_scheduler = compiled_engine, compiled_engine.scheduler
    memory = Memory(
        BlockPool(num_blocks, 4, enable_prefix_caching=True), BlockPool(20, 4), mode, PreemptionCosts(1.0, 1.0)
    )
    engine.core.scheduler = Scheduler(memory, FCFS(), max_num_seqs=8, max_num_batched_tokens=24, max_model_len=256)
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            serve(engine, arrivals, lambda prompt, count: judged[tuple(prompt)][:count])
    finally:
        engine.abort_all()
        engine.core.scheduler = own_scheduler
