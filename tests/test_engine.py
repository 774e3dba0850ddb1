"""The engine's promises: whatever is scheduled beside it, a request gets the tokens it gets alone."""

import functools
import itertools
import json
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import LateHostCache, eager, greedy, run_to_end, transformers_greedy
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from minicb import Engine, RequestOutput, SamplingParams
from minicb.blocks import BlockPool
from minicb.memory import PreemptionCosts
from minicb.params import SchedulingParams
from minicb.policies import POLICIES
from minicb.request import Request

PROMPT_LENS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 24)
LONGEST_OUTPUT = 20


def make_prompt(length: int, vocab_size: int = 32) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


Judge = Callable[[tuple[int, ...]], list[int]]


@pytest.fixture(scope="module")
def judge(tiny) -> Judge:
    """transformers' greedy continuation of a prompt, in float64 where ties don't happen; each prompt judged once."""
    return functools.cache(lambda prompt: transformers_greedy(tiny, list(prompt), LONGEST_OUTPUT, dtype=torch.float64))


@pytest.fixture(scope="module")
def judged(judge) -> dict[int, list[int]]:
    """The same for a prompt of each length."""
    return {n: judge(tuple(make_prompt(n))) for n in PROMPT_LENS}


@dataclass
class Plan:
    """One request of a drawn schedule."""

    prompt: tuple[int, ...]
    max_tokens: int
    arrives: int  # in this step
    aborted: int | None  # after so many steps of the whole run


# Few, so that they are judged once, and so that many begin alike: with none, a part or all of a block.
prompts = st.builds(
    lambda beginning, shared, tail: (*make_prompt(beginning)[:shared], *make_prompt(tail)),
    beginning=st.sampled_from([24, 17]),
    shared=st.sampled_from([0, 4, 8, 9, 16]),
    tail=st.sampled_from([1, 3, 4, 8]),
)
requests = st.builds(
    Plan,
    prompt=prompts,
    max_tokens=st.sampled_from([LONGEST_OUTPUT, 12, 17, 6, 1]),
    arrives=st.sampled_from([0, 0, 1, 2, 5, 12]),
    aborted=st.sampled_from([None, None, None, 0, 3, 9, 20]),
)
schedules = st.lists(requests, min_size=1, max_size=8) | st.lists(requests, min_size=4, max_size=8)


VICTIMS = {"first": slice(0, 1), "last": slice(-1, None), "all": slice(None, None, -1)}


class Forced:
    """Preempts these running requests in the steps with these numbers. Counts what the steps compute."""

    def __init__(self, engine: Engine, steps: Collection[int], victims: str = "last"):
        self.scheduler, self.steps, self.victims = engine.scheduler, steps, victims
        self.step = self.num_computed = self.num_lost = 0
        self.schedule_running, self.execute = engine.scheduler._schedule_running, engine.runner.execute
        engine.scheduler._schedule_running, engine.runner.execute = self.preempt_first, self.count

    def preempt_first(self, plan):
        if self.step in self.steps:
            for request in self.scheduler.running[VICTIMS[self.victims]]:
                before = request.num_computed_tokens
                self.scheduler._preempt(request, plan)
                self.num_lost += before - request.num_computed_tokens
        self.step += 1
        return self.schedule_running(plan)

    def count(self, plan) -> list[int | None]:
        self.num_computed += sum(chunk.length for chunk in plan.chunks)
        return self.execute(plan)


@dataclass
class Space:
    """Where the KV of a drawn schedule's requests may go."""

    preemption_mode: str
    num_cpu_blocks: int
    enable_prefix_caching: bool
    costs: PreemptionCosts
    late: bool  # are copies done at the last moment?
    preempt_at: Collection[int] = ()  # steps that preempt without need
    victims: str = "last"  # those of the running requests

    @property
    def arguments(self) -> dict:
        """Those of the engine."""
        names = ("num_cpu_blocks", "preemption_mode", "enable_prefix_caching")
        return {name: getattr(self, name) for name in names}

    def install(self, engine: Engine) -> None:
        Forced(engine, self.preempt_at, self.victims)
        runner = engine.runner
        engine.scheduler.memory.costs = self.costs
        if self.late and runner.host_cache is not None:
            caches = (runner.k_cache, runner.v_cache)
            runner.host_cache = LateHostCache(caches, runner.num_cpu_blocks + 1, runner.block_size)


spaces = st.builds(
    Space,
    preemption_mode=st.sampled_from(["swap", "auto", "recompute"]),
    num_cpu_blocks=st.sampled_from([300, 300, 8, 4, 1, 0]),
    enable_prefix_caching=st.booleans(),
    costs=st.builds(PreemptionCosts, swap_block=st.integers(0, 10), recompute_token=st.just(1.0)),
    late=st.booleans(),
    preempt_at=st.frozensets(st.integers(0, 30), max_size=10),
    victims=st.sampled_from(["last", "last", "first", "all"]),
)


@pytest.fixture(scope="module")
def eos_model(tiny, tmp_path_factory) -> Path:
    """The tiny rig with a tokenizer and a different EOS in every place that can name one."""
    folder = tmp_path_factory.mktemp("eos")
    shutil.copytree(tiny, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 8}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    vocabulary = {f"t{index}": index for index in range(32)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t9").save_pretrained(folder)
    return folder


def poison_free_blocks(engine: Engine) -> None:
    """Free blocks that are not cached get K that is NaN, which shows whoever attends to it, and a large V: V in the
    cache is finite (`write_kv`)."""
    pool = engine.scheduler.pool
    size, poisoned = pool.block_size, [0, *(block for block in pool._free if not pool._is_cached(block))]
    for cache, poison in ((engine.runner.k_cache, torch.nan), (engine.runner.v_cache, 1e30)):
        by_block = cache[:, : cache.shape[1] // size * size].unflatten(1, (-1, size))
        by_block[:, poisoned] = poison
    if engine.runner.host_cache is not None:
        for blocks in engine.runner.host_cache.host_kv:
            blocks[[0, *engine.scheduler.memory.host_pool._free]] = torch.nan


def assert_nothing_is_held(engine: Engine) -> None:
    for pool in (engine.scheduler.pool, engine.scheduler.memory.host_pool):
        assert pool.num_free == pool.num_usable


@contextmanager
def rescheduled(engine: Engine, space: Space, num_blocks: int, **changes) -> Iterator[None]:
    """The engine with an empty pool of so many blocks and a new scheduler. Afterwards it is as it was."""
    runner = engine.runner
    own = engine.core.scheduler, runner.host_cache
    engine.core.scheduler = engine.make_scheduler(
        num_blocks,
        preemption_mode=space.preemption_mode,
        enable_prefix_caching=space.enable_prefix_caching,
        **changes,
    )
    assert runner.num_cpu_blocks >= space.num_cpu_blocks
    engine.scheduler.memory.host_pool = BlockPool(1 + space.num_cpu_blocks, runner.block_size)
    space.install(engine)
    try:
        yield
    finally:
        engine.abort_all()
        engine.core.scheduler, runner.host_cache = own
        del runner.execute  # the one that `install` put before the class's


class Failing:
    """Raises in the steps with these numbers, or every other time that blocks come back from host memory. By then the
    step has done nothing, or all of its work, or nonsense: whatever it was to write is NaN, in host memory too."""

    def __init__(self, engine: Engine, steps: Collection[int] | None, done: str):
        self.runner, self.steps, self.done = engine.runner, steps, done
        self.numbers, self.returns = itertools.count(), itertools.count()
        self.execute, engine.runner.execute = engine.runner.execute, self

    def __call__(self, plan):
        number = next(self.numbers)
        fails = plan.swap_in and next(self.returns) % 2 == 0 if self.steps is None else number in self.steps
        if fails and self.done == "nonsense":
            self.spoil(plan)
        tokens = self.execute(plan) if not fails or self.done == "all" else []
        if fails:
            raise ConnectionError
        return tokens

    def spoil(self, plan) -> None:
        runner, size = self.runner, self.runner.block_size
        rows = [block * size + offset for _, block in plan.swap_in for offset in range(size)]
        for request, start, length, *_ in plan.chunks:
            rows += [request.block_table[p // size] * size + p % size for p in range(start, start + length)]
        runner.k_cache[:, rows], runner.v_cache[:, rows] = torch.nan, 1e30
        for host_kv in runner.host_cache.host_kv if plan.swap_out else ():
            host_kv[[block for _, block in plan.swap_out]] = torch.nan


def serve(engine: Engine, plans: list[Plan], judge: Judge) -> list[Request]:
    """Run the drawn schedule; check every step's invariants, every output and every request's tokens."""
    requests, seen, ended = list[Request](), dict[str, list[int]](), Counter[str]()
    for index, plan in enumerate(plans):
        scheduling = SchedulingParams(priority=index % 3, client="ab"[index % 2])
        requests.append(engine.make_request(list(plan.prompt), greedy(plan.max_tokens), str(index), scheduling))
        seen[str(index)] = []
    poison_free_blocks(engine)
    for step in itertools.count():
        for plan, request in zip(plans, requests, strict=True):
            if plan.arrives == step:
                engine.submit(request)
            if plan.aborted == step and (output := engine.abort_request(request.request_id)) is not None:
                assert output.outputs[0].token_ids == seen[request.request_id]
                assert request.has_started or output.num_cached_tokens == 0
                ended[request.request_id] += 1
        if step > 12 and not engine.has_unfinished_requests():
            break
        assert step < 50 + sum(len(plan.prompt) + 30 * plan.max_tokens for plan in plans), "no end in sight"
        with suppress(ConnectionError):
            for output in engine.step():
                tokens = output.outputs[0].token_ids
                assert tokens[:-1] == seen[output.request_id], "one more token in each output"
                seen[output.request_id] = tokens
                ended[output.request_id] += output.finished
        engine.scheduler.check_invariants()
        poison_free_blocks(engine)
    assert ended == dict.fromkeys(seen, 1)
    for plan, request in zip(plans, requests, strict=True):
        tokens = request.output_token_ids
        assert tokens == seen[request.request_id] == judge(plan.prompt)[: len(tokens)]
        if plan.aborted is None or request.finish_reason != "abort":
            assert (request.finish_reason, len(tokens)) == ("length", plan.max_tokens)
    assert_nothing_is_held(engine)
    return requests


def check_counts(engine: Engine, requests: list[Request], space: Space, fails: bool) -> None:
    """The figures of the whole run agree with those of its requests."""
    metrics, started = engine.metrics, [request for request in requests if request.has_started]
    num_cached, num_prompt = (
        sum(request.num_cached_tokens for request in started),
        sum(request.num_prompt_tokens for request in started),
    )
    assert all(request.num_cached_tokens % engine.runner.block_size == 0 for request in started)
    assert all(request.num_cached_tokens < request.num_prompt_tokens for request in started)
    assert num_cached == 0 or space.enable_prefix_caching
    assert (metrics.num_started, metrics.num_cached_tokens) == (len(started), num_cached)
    assert metrics.prefix_cache_hit_rate == num_cached / max(num_prompt, 1)
    assert metrics.preemptions_by_mode.total() == sum(request.num_preemptions for request in requests)
    if space.preemption_mode == "recompute" or space.num_cpu_blocks == 0:
        assert metrics.preemptions_by_mode["swap"] == metrics.num_swapped_in_blocks == 0
    elif space.preemption_mode == "swap" and space.num_cpu_blocks == 300 and not engine.scheduler.static and not fails:
        assert metrics.preemptions_by_mode["recompute"] == 0


some_steps = st.sampled_from([frozenset(), None, None]) | st.frozensets(st.integers(0, 40))
done = st.sampled_from(["nothing", "all", "nonsense"])  # of a step that fails


@given(
    plans=schedules,
    space=spaces,
    block_size=st.integers(1, 16),
    spare_blocks=st.sampled_from([0, 1, 2, 4, 8]),
    budget=st.integers(1, 48) | st.just(48),
    slots=st.sampled_from([8, 6, 4, 3, 2, 1]),
    batching=st.sampled_from(["continuous", "continuous", "static"]),
    policy=st.sampled_from(sorted(POLICIES)),
    fails=some_steps,
    done=done,
)
@settings(max_examples=4 * settings.default.max_examples)
def test_any_schedule_gives_each_request_its_own_tokens(
    tiny, judge, plans, space, block_size, spare_blocks, budget, slots, batching, policy, fails, done
):
    """Arrivals, lengths, blocks, pools that overflow, into host memory or not, prompts that begin alike, budgets,
    slots, aborts and steps that fail change neither tokens nor invariants. Free blocks are full of NaN all the time.
    No one knows what a failed step has done, so nothing of it is relied upon."""
    engine = eager(
        tiny,
        block_size=block_size,
        num_blocks=1 + longest(plans, block_size) + spare_blocks,
        **space.arguments,
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        batching=batching,
        scheduling_policy=policy,
    )
    space.install(engine)
    Failing(engine, fails, done)
    check_counts(engine, serve(engine, plans, judge), space, fails != frozenset())


@given(
    plans=schedules,
    space=spaces,
    spare_blocks=st.sampled_from([0, 1, 2, 4, 8]),
    budget=st.integers(1, 24) | st.just(24),
    slots=st.sampled_from([8, 6, 4, 3, 2, 1]),
    fails=some_steps,
    done=done,
)
# Half-filled blocks come back to places that had another logical index before.
@example(
    plans=[Plan(tuple(make_prompt(tail)), 20, arrives, None) for tail, arrives in ((3, 0), (8, 1), (4, 2), (1, 3))],
    space=Space("swap", 300, False, PreemptionCosts(), late=False, preempt_at=range(2, 60, 3)),
    spare_blocks=8,
    budget=24,
    slots=4,
    fails=(),
    done="all",
)
def test_any_schedule_compiled(compiled_engine, judge, plans, space, spare_blocks, budget, slots, fails, done):
    """The same promise held by FlexAttention, and nothing is compiled once the engine is warm."""
    num_blocks = 1 + longest(plans, block_size=4) + spare_blocks
    with (
        rescheduled(compiled_engine, space, num_blocks, max_num_seqs=slots, max_num_batched_tokens=budget),
        torch.compiler.set_stance("fail_on_recompile"),
    ):
        Failing(compiled_engine, fails, done)
        serve(compiled_engine, plans, judge)


def longest(plans: list[Plan], block_size: int) -> int:
    """Blocks that the longest request fills, its last token left out."""
    return max(-(-(len(plan.prompt) + plan.max_tokens - 1) // block_size) for plan in plans)


def complete(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
    """The output of a request, when it and all others have ended."""
    rid = engine.add_request(list(prompt), params)
    return run_to_end(engine)[rid]


def test_transformers_and_alone_agree(tiny, judged):
    """The two judges are one: each prompt alone through the engine, against transformers."""
    engine = Engine(tiny, device="cpu", dtype="float64", enforce_eager=True, num_blocks=8)
    for length, tokens in judged.items():
        output = complete(engine, make_prompt(length), greedy(LONGEST_OUTPUT))
        assert output.outputs[0].token_ids == tokens
    assert len({tuple(tokens) for tokens in judged.values()}) == len(judged), "if all continue alike, none is judged"
    assert all(len(set(tokens)) > 3 for tokens in judged.values())


# ------------------------------------------------------------------ one by one


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_block_boundaries(tiny, block_size):
    """Prompts of 1 … 2B+1 tokens. Wrong by one at a boundary is the classic mistake here."""
    engine = eager(tiny, block_size=block_size)
    for length in range(1, 2 * block_size + 2):
        engine.add_request(make_prompt(length), greedy(2 * block_size), request_id=str(length))
    for request_id, output in run_to_end(engine).items():
        expected = transformers_greedy(tiny, make_prompt(int(request_id)), 2 * block_size, dtype=torch.float64)
        assert output.outputs[0].token_ids == expected


MODES = ["swap", "recompute", "auto"]
# Swapping a block costs as much as 3.5 tokens: full blocks of 4 are better swapped, others not.
CLOSE = PreemptionCosts(swap_block=3.5, recompute_token=1.0)


@pytest.mark.parametrize("mode", MODES)
def test_preempting_everybody_at_every_step_changes_nothing_but_what_is_computed_again(tiny, mode):
    """Outputs are equal to those of a run without preemption, each of them, in order, whole. What was
    swapped isn't computed again, and what was dropped is computed once more, not a token beyond."""

    def run(*steps: int):
        engine = eager(tiny, max_num_batched_tokens=9, preemption_mode=mode, enable_prefix_caching=False)
        forced, outputs = Forced(engine, steps, "all"), {}
        engine.scheduler.memory.costs = CLOSE
        for length in (5, 9, 16):
            engine.add_request(make_prompt(length), greedy(7), request_id=str(length))
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs.setdefault(output.request_id, []).append(output)
            engine.scheduler.check_invariants()
            poison_free_blocks(engine)
        return outputs, forced, engine.metrics

    expected, undisturbed, metrics = run()
    assert not metrics.preemptions_by_mode
    modes, num_lost = set(), 0
    for step in range(1, undisturbed.step):
        outputs, forced, metrics = run(step)
        assert outputs == expected
        assert forced.num_computed == undisturbed.num_computed + forced.num_lost
        assert metrics.preemptions_by_mode.total() >= 1
        modes |= set(metrics.preemptions_by_mode)
        num_lost += forced.num_lost
    assert modes == ({"swap", "recompute"} if mode == "auto" else {mode})
    assert (num_lost == 0) == (mode == "swap")


@pytest.mark.parametrize(("enable_prefix_caching", "num_copied"), [(True, 1), (False, 3)])
def test_blocks_that_are_still_cached_are_not_copied_back(tiny, judged, enable_prefix_caching, num_copied):
    """Swapped out are three blocks, for 9 computed tokens. Only a full one can be found again."""
    engine = eager(tiny, preemption_mode="swap", enable_prefix_caching=enable_prefix_caching)
    Forced(engine, [1])
    output = complete(engine, make_prompt(9), greedy(8))
    assert output.outputs[0].token_ids == judged[9][:8]
    assert (engine.metrics.num_swapped_in_blocks, output.num_cached_tokens) == (num_copied, 0)


def test_a_conversation_that_goes_on_finds_what_was_generated_too(tiny, judged):
    """9 tokens of prompt and 8 of output: all computed but the last, of which no KV was needed."""
    engine = eager(tiny)
    complete(engine, make_prompt(9), greedy(8))
    output = complete(engine, [*make_prompt(9), *judged[9][:8]], greedy(12))
    assert (output.num_cached_tokens, output.outputs[0].token_ids) == (16, judged[9][8:20])


@pytest.mark.parametrize("case", ["alone", "chunked", "cached", "crowd", "swap", "recompute"])
def test_seeds_hold_whatever_runs_beside_and_whatever_happens(tiny, case):
    """Seed 42 alone, in chunks, begun from the cache, in a crowd, swapped out, recomputed: the same tokens."""
    params = SamplingParams(top_p=0.9, seed=42, max_tokens=12)
    arguments = {"num_blocks": 8, "preemption_mode": case} if case in ("swap", "recompute") else {}
    engine = eager(tiny, max_num_batched_tokens=2 if case == "chunked" else 100, **arguments)
    if case == "cached":
        complete(engine, make_prompt(9), greedy(1))
    if case in ("crowd", "swap", "recompute"):
        for index in range(3):
            engine.add_request(make_prompt(5), SamplingParams(seed=index, max_tokens=20))
    request = engine.make_request(make_prompt(9), params)
    engine.submit(request)
    run_to_end(engine)
    assert request.output_token_ids == complete(eager(tiny), make_prompt(9), params).outputs[0].token_ids
    assert request.num_cached_tokens == (8 if case == "cached" else 0)
    assert set(engine.metrics.preemptions_by_mode) == ({case} if arguments else set())
    assert (request.num_preemptions > 0) == bool(arguments)


def test_without_seeds_requests_and_calls_differ_but_runs_repeat(tiny):
    def two_calls(seed):
        engine = eager(tiny, seed=seed)
        return [complete(engine, make_prompt(5), SamplingParams(max_tokens=12)).outputs[0].token_ids for _ in "12"]

    first, second = two_calls(seed=0)
    assert first != second
    assert two_calls(seed=0) == [first, second]
    assert two_calls(seed=1) != [first, second]


def poison_token(engine: Engine, token: int = 31) -> None:
    engine.runner.model.embed_tokens.weight.data[token] = torch.nan


def test_a_request_of_nan_ends_alone(tiny, judged):
    """Logits that are not finite end their request with "error" and nobody else's."""
    engine = eager(tiny)
    poison_token(engine)
    clean = next(n for n in PROMPT_LENS if 31 not in make_prompt(n) + judged[n])
    bad = engine.add_request([3, 31, 4], greedy(8))
    good = engine.add_request(make_prompt(clean), greedy(8))
    outputs = run_to_end(engine)
    assert outputs[bad].outputs[0].finish_reason == "error"
    assert outputs[good].outputs[0].token_ids == judged[clean][:8]
    # And whoever gets the blocks next doesn't notice either.
    assert complete(engine, make_prompt(clean), greedy(8)).outputs[0].token_ids == judged[clean][:8]


@pytest.mark.parametrize("budget", [2048, 5, 4])
@pytest.mark.parametrize("place", [2, 6, 11])
def test_blocks_of_a_request_of_nan_are_never_found(tiny, place, budget):
    """None of them, not even those before the NaN."""
    engine = eager(tiny, max_num_batched_tokens=budget)
    poison_token(engine)
    prompt = [*range(1, place + 1), 31, *range(place + 1, 14)]
    for _ in range(2):
        output = complete(engine, prompt, greedy(4))
        assert (output.outputs[0].finish_reason, output.num_cached_tokens) == ("error", 0)


@pytest.mark.parametrize("eos", [5, 7, 8, 9])
def test_every_eos_stops(eos_model, eos):
    """The generation config says [5, 7], config 8, the tokenizer 9; each of them stops."""
    engine = eager(eos_model)
    with torch.no_grad():  # a head that likes one token only
        engine.runner.model.lm_head.weight.zero_()
        engine.runner.model.norm.weight.zero_()
        engine.runner.model.lm_head.bias = torch.nn.Parameter(torch.zeros(32, dtype=torch.float64))
        engine.runner.model.lm_head.bias[eos] = 1
    output = complete(engine, [1, 2, 3], greedy(5))
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([eos], "stop")


def test_no_eos_at_all(tiny):
    assert eager(tiny).eos_token_ids == frozenset()


# ------------------------------------------------------------------ admission


@pytest.mark.parametrize("max_tokens", [None, 1, 2])
@pytest.mark.parametrize("length", [14, 15, 16, 17])
def test_the_end_of_the_model(tiny, length, max_tokens):
    """A max_model_len of 16 holds prompt and output, so a prompt of 16 leaves no room."""
    engine = eager(tiny, max_model_len=16)
    if length > 15:
        with pytest.raises(ValueError, match=f"prompt has {length} tokens.*max_model_len is 16"):
            engine.add_request([1] * length, greedy(max_tokens))
        assert not engine.has_unfinished_requests()
        return
    output = complete(engine, [1] * length, greedy(max_tokens))
    assert len(output.outputs[0].token_ids) == min(16 - length, max_tokens or 16)
    assert output.outputs[0].finish_reason == "length"


def test_the_end_of_the_pool(tiny):
    """4 usable blocks of 4. Too long is refused at once; too long a wish ends with a
    reason when the pool is full, the last token's KV not needed; and the next request is served."""
    engine = eager(tiny, num_blocks=5)
    with pytest.raises(ValueError, match="prompt has 20 tokens.*holds only 16"):
        engine.add_request([1] * 20)
    outgrown, small = engine.add_request([1] * 3, greedy(40)), engine.add_request([2] * 3, greedy(4))
    outputs = run_to_end(engine, max_steps=100)
    completion = outputs[outgrown].outputs[0]
    assert len(completion.token_ids) == 16 + 1 - 3
    assert completion.finish_reason == "length"
    assert "KV cache" in completion.stop_reason
    assert len(outputs[small].outputs[0].token_ids) == 4


@pytest.mark.parametrize("wrong", [-1, 32, 10**12, True, 1.5, "1", None])
def test_ids_outside_the_vocabulary(tiny, wrong):
    """Refused by name, and nobody else's step is harmed."""
    engine = eager(tiny)
    other = engine.add_request(make_prompt(5), greedy(3))
    with pytest.raises(ValueError, match="prompt token id must be an integer"):
        engine.add_request([1, wrong, 2])
    with pytest.raises(ValueError, match="stop_token_ids must be an integer"):
        engine.add_request([1], SamplingParams(stop_token_ids=[wrong]))
    assert list(run_to_end(engine)) == [other]


def test_wrong_requests_are_named(tiny):
    engine = eager(tiny)
    for arguments, message in (
        (([],), "prompt is empty"),
        (("",), "no tokenizer"),
        ((5,), "prompt must be"),
        (([1], {"temperature": 0}), "sampling_params must be SamplingParams"),
        (([1], None, 7), "request_id must be a string"),
        (([1], SamplingParams(min_tokens=1, stop_token_ids=list(range(32)))), "min_tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.add_request(*arguments)
    assert not engine.has_unfinished_requests()


def test_a_request_is_submitted_once(tiny):
    engine = eager(tiny)
    request = engine.make_request([1, 2], greedy(1))
    engine.submit(request)
    run_to_end(engine)
    with pytest.raises(ValueError, match="submitted before: it is FINISHED"):
        engine.submit(request)
    assert not engine.has_unfinished_requests()


def test_numpy_integers_are_integers(tiny):
    """Small ones would wrap around when added to."""
    engine = eager(tiny, block_size=np.int8(16), num_blocks=np.int8(100), max_num_batched_tokens=np.int8(100))
    output = complete(engine, [np.int8(1)] * 100, greedy(np.int8(100)))
    assert len(output.outputs[0].token_ids) == 100
    assert json.dumps(output.prompt_token_ids)


def test_an_id_in_use(tiny):
    """Twice while alive is an error. After the end or an abort it is free again."""
    engine = eager(tiny)
    engine.add_request([1, 2], greedy(2), request_id="0")
    with pytest.raises(ValueError, match="'0' is already in use"):
        engine.add_request([1, 2], request_id="0")
    assert engine.add_request([3], greedy(1)) != "0", "ids that are made up keep clear of it"
    run_to_end(engine)
    for _ in range(2):
        engine.add_request([1, 2], request_id="0")
        assert engine.abort_request("0").finished


def test_abort_in_every_state(tiny):
    """Waiting, running, twice, unknown."""
    engine = eager(tiny, max_num_seqs=1)
    running, waiting = (engine.add_request(make_prompt(5), greedy(4)) for _ in range(2))
    engine.step()
    for request_id, num_tokens in ((waiting, 0), (running, 1)):
        output = engine.abort_request(request_id)
        assert (output.finished, output.outputs[0].finish_reason) == (True, "abort")
        assert len(output.outputs[0].token_ids) == num_tokens
    for request_id in (running, waiting, "unknown"):
        assert engine.abort_request(request_id) is None
    assert not engine.has_unfinished_requests()
    assert_nothing_is_held(engine)


def test_abort_while_the_outputs_of_a_step_are_read(tiny):
    """Of a request that runs, and of one that ended in that step."""
    engine = eager(tiny)
    ids = [engine.add_request(make_prompt(n), greedy(n)) for n in (1, 4, 5)]
    outputs = engine.step()
    assert [output.request_id for output in outputs] == ids
    assert engine.abort_request(ids[0]) is None
    assert engine.abort_request(ids[2]).finished
    assert set(run_to_end(engine)) == {ids[1]}
    assert_nothing_is_held(engine)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("max_model_len", 257),
        ("dtype", "int8"),
        ("device", "gpu"),
        ("device", "meta"),
        ("tokenizer", "."),
        *((name, value) for name in ("num_blocks", "num_cpu_blocks") for value in (10**9, 10**30)),
    ],
)
def test_wrong_engine_arguments_are_named(tiny, field, value, tmp_path, monkeypatch):
    """Those that depend on the model or the machine; tests/test_args.py has the others."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"^{field} (must be|is|'.' has no)"):
        eager(tiny, **{field: value})


def test_host_memory_is_taken_for_swapping_only_and_no_more_than_could_be_of_use(tiny):
    """num_cpu_blocks says how much, else swap_space, block 0 included; a block here is 4 KiB, and 2 requests
    that fill the whole cache fill 78."""

    def num_blocks(**kwargs) -> int:
        engine = eager(tiny, max_num_seqs=2, **kwargs)
        host_cache, usable = engine.runner.host_cache, engine.scheduler.memory.host_pool.num_usable
        assert usable == (0 if host_cache is None else len(host_cache.host_kv[0]) - 1)
        return usable

    assert num_blocks(preemption_mode="recompute", num_cpu_blocks=5) == 0
    assert num_blocks(num_cpu_blocks=0) == num_blocks(swap_space=0) == num_blocks(swap_space=4096 / 2**30) == 0
    assert num_blocks(swap_space=10 * 4096 / 2**30) == 9
    assert num_blocks(swap_space=0, num_cpu_blocks=np.int8(100)) == 100
    assert num_blocks() == num_blocks(swap_space=1e6) == num_blocks(swap_space=np.float16(4)) == 78


# ------------------------------------------------------------------ Ctrl-C


@contextmanager
def ctrl_c_raises() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where it was ignored, as in a script's background job."""
    own = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, own)


class InterruptAt:
    """Sends SIGINT at the n-th line of these files that a call executes, and again so many lines later."""

    def __init__(self, lines: Sequence[int], files: tuple[str, ...]):
        self.lines, self.files = list(lines), files

    def __call__(self, frame, event, arg):
        code = frame.f_code
        # The last line of these follows the one that hands the outputs over. Python delivers no signal between the two.
        if not self.lines or not code.co_filename.endswith(self.files) or code.co_name in ("step", "collect"):
            return None
        if event == "line":
            self.lines[0] -= 1
            if self.lines[0] == 0:
                del self.lines[0]
                signal.raise_signal(signal.SIGINT)
        return self

    def during(self, call: Callable[[], list[RequestOutput]]) -> list[RequestOutput]:
        """What the call returns, nothing if it was interrupted."""
        with ctrl_c_raises():
            sys.settrace(self)
            try:
                return call()
            except KeyboardInterrupt:
                return []
            finally:
                sys.settrace(None)


@pytest.mark.parametrize("where", ["update", "output"])
def test_what_was_aborted_after_an_interrupted_step_is_not_reported(tiny, where):
    """Ctrl-C while tokens are taken in or outputs are made: that is done first, and the next step reports it all."""
    engine = eager(tiny)
    aborted, other = (engine.add_request([1, 2, 3], greedy(4)) for _ in "ab")
    owner = engine if where == "output" else engine.scheduler
    call, num_done = getattr(owner, where), itertools.count()

    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        result = call(*args)
        next(num_done)
        return result

    with ctrl_c_raises(), mock.patch.object(owner, where, interrupted), pytest.raises(KeyboardInterrupt):
        engine.step()
    assert next(num_done) == (2 if where == "output" else 1)
    output = engine.abort_request(aborted)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (1, "abort")
    assert [(output.request_id, len(output.outputs[0].token_ids)) for output in engine.step()] == [(other, 2)]


# ------------------------------------------------------------------ outputs


class Watched(list):
    """A list that notes the lengths of the copies that are made of it."""

    copied: ClassVar[list[int]] = []

    def __getitem__(self, index):
        result = super().__getitem__(index)
        if isinstance(index, slice):
            self.copied.append(len(result))
        return result

    def __iter__(self):
        self.copied.append(len(self))
        return super().__iter__()

    def copy(self):
        return self[:]


def test_a_step_copies_nothing_that_grows(tiny):
    """Neither the prompt nor the output: a request of n tokens would cost n² / 2. No copy is longer than a block."""
    engine = eager(tiny, num_blocks=100)
    requests = [engine.make_request(make_prompt(n) * 4, greedy(50, logprobs=1)) for n in (9, 16)]
    for request in requests:
        engine.submit(request)
    outputs = [engine.step()]
    for request in requests:
        request.token_ids, request.logprobs = Watched(request.token_ids), Watched(request.logprobs)
        request.prompt_token_ids = Watched(request.prompt_token_ids)
    Watched.copied.clear()
    while engine.has_unfinished_requests():
        outputs.append(engine.step())
    assert Watched.copied
    assert max(Watched.copied) <= engine.runner.block_size
    for number, request in enumerate(requests):
        assert len({id(step[number].prompt_token_ids) for step in outputs[1:]}) == 1
        for count, step in enumerate(outputs, start=1):
            assert step[number].outputs[0].token_ids == request.output_token_ids[:count]
            assert step[number].outputs[0].token_ids is step[number].outputs[0].token_ids, "copied once"


@pytest.mark.parametrize("n", [1, 3])
def test_what_is_read_later_is_what_would_have_been_read_at_once(byte_model, n):
    """Of each output: text, tokens, log probabilities, reasons. Two of three samples wait when the first output is
    made. One is aborted."""

    def run(read: Callable[[RequestOutput], object]) -> tuple[list, list[RequestOutput]]:
        engine = eager(byte_model, max_num_seqs=1 + n // 2)
        params = SamplingParams(n=n, seed=0, max_tokens=9, logprobs=2, stop=["zz"])
        engine.add_request("Hello", params, "a")
        engine.add_request("Hello", replace(params, logprobs=None), "b")
        read_at_once, outputs = [], []
        while engine.has_unfinished_requests():
            outputs += engine.step()
            if len(outputs) == 5:
                outputs.append(engine.abort_request("a", 0))
            read_at_once += [read(output) for output in outputs[len(read_at_once) :]]
        return read_at_once, outputs

    shown, outputs = run(repr)
    assert [repr(output) for output in outputs] == shown, "nothing changes later"
    _, unread = run(id)
    assert unread == outputs
    assert [repr(output) for output in unread] == shown
