"""Requests with the same prompt: samples (`SamplingParams.n`) and others. Each gets what it gets alone; with prefix
caching they share the full blocks of the prompt, which one of them computes, even in the same step."""

import contextlib
import functools
import itertools
import math
import signal
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from conftest import eager, greedy, run_to_end
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import (
    LONGEST_OUTPUT,
    Failing,
    assert_nothing_is_held,
    ctrl_c_raises,
    longest,
    make_prompt,
    poison_free_blocks,
    prompts,
    rescheduled,
    spaces,
)
from test_engine import Plan as AlonePlan

from minicb import LLM, Engine, SamplingParams
from minicb.outputs import CompletionOutput
from minicb.params import SchedulingParams
from minicb.policies import POLICIES
from minicb.request import Request, RequestState

Solo = Callable[[tuple[int, ...], int], CompletionOutput]


@pytest.fixture(scope="module")
def solo(tiny) -> Solo:
    """The output of a request with n = 1 that is alone in an engine, for each prompt and seed."""
    engine = eager(tiny)

    @functools.cache
    def run(prompt: tuple[int, ...], seed: int):
        params = SamplingParams(seed=seed, max_tokens=LONGEST_OUTPUT, logprobs=2)
        engine.add_request(list(prompt), params)
        [output] = run_to_end(engine).values()
        return output.outputs[0]

    return run


STOPS = [3, 11, 19]


def expected_end(tokens: list[int], params: SamplingParams) -> tuple[int, str, int | None]:
    """How many of the tokens there are if nothing interferes, and why it ends there."""
    for count, token in enumerate(tokens[: params.max_tokens], start=1):
        if token in (params.stop_token_ids or ()):
            return count, "stop", token
    return params.max_tokens, "length", None


def check_sample(completion, prompt: tuple[int, ...], params: SamplingParams, solo: Solo) -> None:
    """A sample, ended or not, is a beginning of what it is alone, log probabilities included."""
    whole, count = solo(prompt, params.seed + completion.index), len(completion.token_ids)
    assert completion.token_ids == whole.token_ids[:count]
    assert [list(entry) for entry in completion.logprobs] == [list(entry) for entry in whole.logprobs[:count]]
    sums = [entry[token].logprob for entry, token in zip(whole.logprobs, completion.token_ids, strict=False)]
    assert completion.cumulative_logprob == pytest.approx(math.fsum(sums), rel=1e-4)  # logits are float32
    num_tokens, *why = expected_end(whole.token_ids, params)
    if completion.finish_reason in ("stop", "length"):
        assert (count, completion.finish_reason, completion.stop_reason) == (num_tokens, *why)
    else:
        assert count < num_tokens


@dataclass
class Plan:
    """One prompt of a drawn schedule."""

    prompt: tuple[int, ...]
    params: SamplingParams
    arrives: int  # in this step
    aborts: dict[int, int | None]  # in this step this sample, or all


plans = st.builds(
    Plan,
    prompt=prompts,
    params=st.builds(
        SamplingParams,
        n=st.sampled_from([3, 2, 4, 1]),
        seed=st.integers(0, 1),
        max_tokens=st.sampled_from([LONGEST_OUTPUT, 9, 5, 1]),
        stop_token_ids=st.sampled_from([None, STOPS]),
        logprobs=st.just(2),
    ),
    arrives=st.sampled_from([0, 0, 1, 2, 5]),
    aborts=st.dictionaries(st.integers(0, 15), st.sampled_from([0, 0, None, 1, 2, 3]), max_size=3),
)


@given(
    drawn=st.lists(plans, min_size=1, max_size=4),
    space=spaces,
    block_size=st.integers(1, 16),
    spare_blocks=st.sampled_from([0, 1, 4, 8]),
    budget=st.integers(1, 48) | st.just(48),
    slots=st.sampled_from([8, 4, 3, 2, 1]),
    batching=st.sampled_from(["continuous", "continuous", "static"]),
    policy=st.sampled_from(sorted(POLICIES)),
)
def test_any_schedule_gives_each_sample_the_tokens_of_its_seed(
    tiny, solo, drawn, space, block_size, spare_blocks, budget, slots, batching, policy
):
    """Every step's output has all samples in order, each at least as long as before, and says that it is finished
    when all are, and never again. Free blocks are full of NaN all the time."""
    longest = max(-(-(len(plan.prompt) + plan.params.max_tokens) // block_size) for plan in drawn)
    engine = eager(
        tiny,
        block_size=block_size,
        num_blocks=1 + longest + spare_blocks,
        **space.arguments,
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        batching=batching,
        scheduling_policy=policy,
    )
    space.install(engine)
    poison_free_blocks(engine)
    last: dict[str, object] = {}

    def take(output) -> None:
        key = output.request_id
        plan, before = drawn[int(key)], last.get(key)
        assert before is None or not before.finished
        assert output.prompt_token_ids == list(plan.prompt)
        assert output.num_cached_tokens == 0 or space.enable_prefix_caching, "what samples share is no cache"
        assert [completion.index for completion in output.outputs] == list(range(plan.params.n))
        assert output.finished == all(completion.finish_reason is not None for completion in output.outputs)
        for now, then in zip(output.outputs, before.outputs if before else output.outputs, strict=True):
            assert now.token_ids[: len(then.token_ids)] == then.token_ids
            assert then.finish_reason is None or now == then, "what has ended stays as it is"
        last[key] = output

    for number in itertools.count():
        for index, plan in enumerate(drawn):
            if plan.arrives == number:
                engine.add_request(list(plan.prompt), plan.params, str(index), index % 2, "ab"[index % 2])
            if number in plan.aborts:
                sample, before = plan.aborts[number], last.get(str(index))
                output = engine.abort_request(str(index), sample)
                engine.scheduler.check_invariants()
                if output is not None:
                    take(output)
                elif plan.arrives <= number and (sample is None or sample < plan.params.n):
                    ended = before.outputs if sample is None else [before.outputs[sample]]
                    assert all(completion.finish_reason is not None for completion in ended)
        if number > 5 and not engine.has_unfinished_requests():
            break
        assert number < 3000, "no end in sight"
        outputs = engine.step()
        assert len({output.request_id for output in outputs}) == len(outputs), "one output for each request"
        for output in outputs:
            take(output)
        engine.scheduler.check_invariants()
        poison_free_blocks(engine)
    assert len(last) == len(drawn)
    for key, output in last.items():
        assert output.finished
        for completion in output.outputs:
            assert completion.finish_reason in ("stop", "length") + ("abort",) * bool(drawn[int(key)].aborts)
            check_sample(completion, drawn[int(key)].prompt, drawn[int(key)].params, solo)
    assert_nothing_is_held(engine)


PROMPT = tuple(make_prompt(9))


# ---------------------------------------------------------------------- sharing within a step


@given(
    n=st.integers(2, 5),
    length=st.integers(1, 30),
    block_size=st.integers(1, 9),
    budget=st.integers(8, 40),
    caching=st.booleans(),
)
def test_a_prompt_is_computed_once_for_all_samples(tiny, n, length, block_size, budget, caching):
    """The others compute what lies behind the last full block without the prompt's last token, whose logits all want.
    They share the blocks before. Without prefix caching each computes the prompt, and no block is shared."""
    engine = eager(
        tiny, block_size=block_size, num_blocks=150, max_num_batched_tokens=budget, enable_prefix_caching=caching
    )
    request = engine.make_request(make_prompt(length), SamplingParams(n=n, max_tokens=40))
    engine.submit(request)
    samples, execute, computed = request.samples, engine.runner.execute, dict.fromkeys(request.samples, 0)

    def count(plan):
        for sample, start, num_tokens, *_ in plan.chunks:
            computed[sample] += num_tokens if start < length else 0
        return execute(plan)

    engine.runner.execute = count
    for _ in range(100):
        if all(sample.num_output_tokens > 1 for sample in samples):
            break
        engine.step()
        engine.scheduler.check_invariants()
    shared = (length - 1) // block_size if caching else 0
    assert list(computed.values()) == [length] + [length - shared * block_size] * (n - 1)
    assert [sample.num_cached_tokens for sample in samples] == [0] + [shared * block_size] * (n - 1)
    assert engine.metrics.num_cached_tokens == shared * block_size * (n - 1)
    assert len({tuple(sample.block_table[:shared]) for sample in samples}) == 1
    blocks = [block for sample in samples for block in sample.block_table[shared:]]
    assert len(set(blocks)) == len(blocks)


def test_requests_of_one_step_share_what_one_of_them_computes_in_it(tiny):
    """All of it in the first step: the second request has the whole prompt in common, the third one block."""
    engine = eager(tiny)
    prompts = [PROMPT, PROMPT, (*PROMPT[:6], 1, 2, 3)]
    requests = [engine.make_request(list(prompt), greedy(4)) for prompt in prompts]
    for request in requests:
        engine.submit(request)
    assert len(engine.step()) == 3
    assert [request.num_cached_tokens for request in requests] == [0, 8, 4]
    first, second, third = (list(request.block_table) for request in requests)
    assert (first[:2], first[:1]) == (second[:2], third[:1])
    assert len({*first, *second, *third}) == 3 + 1 + 2


NAN = 31  # the token whose embedding is NaN
NO_NAN = {"logit_bias": {NAN: -100}}  # none is sampled
Alone = Callable[[tuple[int, ...], SamplingParams], CompletionOutput]


@pytest.fixture(scope="module", params=["gather", "gather, window", "paged", "paged, window"])
def engine_and_alone(request, tiny, make_model) -> Iterator[tuple[Engine, Alone]]:
    """An engine, and what a request gets alone in another, where no prefix is cached; in both a token is NaN."""
    attention, _, window = request.param.partition(", ")
    folder = make_model("mistral", sliding_window=6) if window else tiny
    arguments = {"block_size": 4, "num_blocks": 40, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    if attention == "gather":
        engine = eager(folder, num_cpu_blocks=300, **arguments)
    elif window:
        engine = Engine(folder, device="cpu", num_cpu_blocks=300, **arguments)
    else:
        engine = request.getfixturevalue("compiled_engine")
    judge, known = eager(folder, enable_prefix_caching=False), dict[str, CompletionOutput]()
    embeddings = [each.runner.model.embed_tokens.weight.data[NAN] for each in (engine, judge)]
    own = embeddings[0].clone()
    for embedding in embeddings:
        embedding.fill_(torch.nan)

    def alone(prompt: tuple[int, ...], params: SamplingParams) -> CompletionOutput:
        key = repr((prompt, params))
        if key not in known:
            judge.add_request(list(prompt), params)
            [output] = run_to_end(judge).values()
            known[key] = output.outputs[0]
        return known[key]

    yield engine, alone
    embeddings[0].copy_(own)


def test_nan_reaches_no_block_before_it(engine_and_alone):
    """In one step: the first request computes the block that the second shares, and its next token is NaN."""
    engine, alone = engine_and_alone
    prompts = (1, 2, 3, 4, NAN, 6), (1, 2, 3, 4, 6)
    ids = [engine.add_request(list(prompt), greedy(4, **NO_NAN)) for prompt in prompts]
    outputs = run_to_end(engine)
    assert outputs[ids[1]].num_cached_tokens == 4
    for request_id, prompt in zip(ids, prompts, strict=True):
        expected = alone(prompt, greedy(4, **NO_NAN))
        assert expected.finish_reason == ("error" if NAN in prompt else "length")
        assert outputs[request_id].outputs[0].token_ids == expected.token_ids


@dataclass
class Twin(AlonePlan):
    """One of some requests that begin alike."""

    only: int | None  # this sample is aborted, None: all
    n: int

    @property
    def params(self) -> SamplingParams:
        sampled = {"n": self.n, "seed": 1} if self.n > 1 else {"temperature": 0}
        return SamplingParams(max_tokens=self.max_tokens, **NO_NAN, **sampled)


@st.composite
def twins(draw) -> list[Twin]:
    beginning = tuple(token % NAN for token in make_prompt(draw(st.sampled_from([17, 16, 9, 8, 4, 3]))))
    twin = st.builds(
        Twin,
        prompt=st.sampled_from([(), (), (), (1,), (2, 3), (NAN,), (5, NAN, 5, 5, 5)]).map(beginning.__add__),
        max_tokens=st.sampled_from([9, 9, 5, 1]),
        arrives=st.sampled_from([0, 0, 0, 0, 1, 2]),
        aborted=st.sampled_from([None, None, None, 1, 2, 4]),
        only=st.sampled_from([None, 0]),
        n=st.sampled_from([1, 1, 2, 3]),
    )
    return draw(st.lists(twin, min_size=2, max_size=4))


def spoil(engine: Engine, steps: Collection[int]) -> set[Request]:
    """In these steps the logits of the first request that samples are not finite. Returns those, as they come."""
    execute, numbers, spoiled = engine.runner.execute, itertools.count(), set[Request]()

    def run(plan):
        tokens = execute(plan)
        if next(numbers) in steps and tokens:
            spoiled.add(next(chunk.request for chunk in plan.chunks if chunk.needs_sampling))
            tokens[0] = None
        return tokens

    engine.runner.execute = run
    return spoiled


some_steps = st.just(frozenset()) | st.frozensets(st.integers(0, 4), max_size=2)


@given(
    drawn=twins(),
    space=spaces.map(lambda space: replace(space, enable_prefix_caching=True)),
    spare_blocks=st.sampled_from([24, 8, 4, 1, 0]),
    budget=st.sampled_from([24, 24, 12, 7, 5]),
    slots=st.sampled_from([8, 8, 4, 2]),
    batching=st.sampled_from(["continuous", "continuous", "continuous", "static"]),
    policy=st.sampled_from(["fcfs", "priority"]),
    errors=some_steps,
    fails=some_steps,
)
@settings(max_examples=2 * settings.default.max_examples)
def test_requests_that_begin_alike_share_blocks_and_nothing_else(
    engine_and_alone, drawn, space, spare_blocks, budget, slots, batching, policy, errors, fails
):
    """Most are admitted in one step, where one computes the blocks that the others read in the same forward pass. Then
    some are preempted, are aborted, have NaN in their own part of the prompt or end with an error, or the step fails.
    Each of the others gets what it gets alone, and so does a request that comes when all is over."""
    engine, alone = engine_and_alone
    num_blocks = 1 + min(longest(drawn, 4) + spare_blocks, 39)
    changes = {"max_num_seqs": slots, "max_num_batched_tokens": budget, "batching": batching}
    with (
        rescheduled(engine, space, num_blocks, scheduling_policy=policy, **changes),
        torch.compiler.set_stance("fail_on_recompile"),
    ):
        spoiled = spoil(engine, errors)
        Failing(engine, fails, "nonsense")
        urgencies = [SchedulingParams(priority=-index) for index in range(len(drawn))]
        requests = [
            engine.make_request(list(twin.prompt), twin.params, None, urgency)
            for twin, urgency in zip(drawn, urgencies, strict=True)
        ]
        poison_free_blocks(engine)
        for number in range(400):
            for twin, request in zip(drawn, requests, strict=True):
                if twin.arrives == number:
                    engine.submit(request)
                if twin.aborted == number:
                    engine.abort_request(request.request_id, twin.only)
            if number > 7 and not engine.has_unfinished_requests():
                break
            with contextlib.suppress(ConnectionError):
                engine.step()
            engine.scheduler.check_invariants()
            poison_free_blocks(engine)
        for twin, request in zip(drawn, requests, strict=True):
            for sample, completion in zip(request.samples, engine.output(request).outputs, strict=True):
                seed = None if twin.n == 1 else 1 + sample.index
                expected = alone(twin.prompt, replace(twin.params, n=1, seed=seed))
                if completion.finish_reason == "abort" or sample in spoiled:
                    assert completion.finish_reason in ("abort", "error")
                    assert completion.token_ids == expected.token_ids[: len(completion.token_ids)]
                else:
                    assert completion.finish_reason == expected.finish_reason
                    assert completion.token_ids == expected.token_ids
        assert_nothing_is_held(engine)
        again = {engine.add_request(list(twin.prompt), replace(twin, n=1).params): twin for twin in drawn}
        for request_id, output in run_to_end(engine).items():
            twin = again[request_id]
            assert output.outputs[0].token_ids == alone(twin.prompt, replace(twin, n=1).params).token_ids


# ---------------------------------------------------------------------- one by one


@pytest.mark.parametrize(
    "arguments",
    [{"max_num_seqs": 1}, {"max_num_seqs": 2, "batching": "static"}, {"max_num_batched_tokens": 1}, {"num_blocks": 6}],
)
def test_more_samples_than_can_run_at_a_time_take_turns(tiny, solo, arguments):
    engine = eager(tiny, **arguments)
    params = SamplingParams(n=5, seed=0, max_tokens=8, logprobs=2)
    engine.add_request(list(PROMPT), params)
    [output] = run_to_end(engine).values()
    assert output.finished
    for completion in output.outputs:
        assert completion.finish_reason == "length"
        check_sample(completion, PROMPT, params, solo)


@pytest.mark.parametrize("index", range(3))
def test_a_sample_without_finite_logits_ends_with_an_error_and_harms_no_other(tiny, solo, index):
    """Not even the first, at whose tokens the others begin."""
    engine = eager(tiny)
    params = SamplingParams(n=3, seed=0, max_tokens=4, logprobs=2)
    engine.add_request(list(PROMPT), params, "a")
    execute = engine.runner.execute

    def spoil(plan):
        sampled = [chunk.request for chunk in plan.chunks if chunk.needs_sampling]
        tokens = zip(sampled, execute(plan), strict=True)
        return [None if request.index == index else token for request, token in tokens]

    engine.runner.execute = spoil
    [output] = run_to_end(engine).values()
    for completion in output.outputs:
        if completion.index == index:
            assert (completion.finish_reason, completion.token_ids) == ("error", [])
        else:
            assert completion.finish_reason == "length"
            check_sample(completion, PROMPT, params, solo)


def test_an_id_is_in_use_until_the_last_sample_has_ended(tiny):
    engine = eager(tiny)
    engine.add_request([1, 2, 3], SamplingParams(n=3, max_tokens=3), "a")
    for index in range(3):
        for params in (SamplingParams(), SamplingParams(n=2)):
            with pytest.raises(ValueError, match="'a' is already in use"):
                engine.add_request([1], params, "a")
        if index == 1:
            engine.step()
        assert engine.abort_request("a", index).outputs[index].finish_reason == "abort"
    assert not engine.has_unfinished_requests()

    engine.add_request([4, 5], greedy(5), "a")
    assert [len(output.outputs) for output in engine.step()] == [1]
    output = engine.abort_request("a")
    assert (output.finished, output.prompt_token_ids, len(output.outputs)) == (True, [4, 5], 1)
    assert not engine.has_unfinished_requests()
    engine.add_request([6], SamplingParams(n=2, max_tokens=1), "a")
    assert [completion.finish_reason for completion in run_to_end(engine)["a"].outputs] == ["length"] * 2


def test_what_cannot_be_aborted_is_none_and_changes_nothing(tiny):
    """An unknown id or index, a sample or a request that has ended."""
    engine = eager(tiny)
    engine.add_request([1, 2, 3], SamplingParams(n=3, max_tokens=3, seed=0), "a")
    engine.step()
    assert engine.abort_request("b") is engine.abort_request("b", 0) is None
    assert engine.abort_request("a", 3) is engine.abort_request("a", -1) is None
    output = engine.abort_request("a", 1)
    assert [completion.finish_reason for completion in output.outputs] == [None, "abort", None]
    assert not output.finished
    assert engine.abort_request("a", 1) is None
    assert [c.finish_reason for c in engine.abort_request("a").outputs] == ["abort"] * 3
    assert engine.abort_request("a") is None
    assert not engine.has_unfinished_requests()
    assert engine.step() == []


def test_an_index_that_a_request_of_one_sample_lacks_ends_nothing(tiny):
    engine = eager(tiny)
    engine.add_request([1, 2, 3], greedy(3), "a")
    assert engine.abort_request("a", 1) is None
    assert engine.abort_request("a", 0).finished
    assert not engine.has_unfinished_requests()


def test_ids_of_samples_are_ids_of_requests(tiny):
    """The second sample of "a" is "a/1". Ids that are made up keep clear of all others."""
    engine = eager(tiny)
    several = SamplingParams(n=2, max_tokens=3, seed=0)
    engine.add_request([1, 2, 3], several, "a")
    for params, request_id in ((greedy(3), "a/1"), (several, "a")):
        with pytest.raises(ValueError, match=f"'{request_id}' is already in use"):
            engine.add_request([4], params, request_id)
    engine.add_request([5], greedy(3), "b/1")
    with pytest.raises(ValueError, match="'b/1' is already in use"):
        engine.add_request([1], several, "b")
    assert engine.abort_request("b") is engine.abort_request("a/1") is None
    engine.add_request([4], greedy(3), "b")
    engine.add_request([5], greedy(3), "0/1")
    made_up = engine.add_request([6], several)
    assert engine.abort_request("a").finished
    assert set(run_to_end(engine)) == {"b/1", "b", "0/1", made_up}


def test_what_ended_in_an_interrupted_step_is_not_reported_after_the_abort_of_the_rest(tiny):
    """The abort's output had it, finished; there is no second end."""
    engine = eager(tiny, max_num_seqs=1)
    engine.add_request([1, 2, 3], SamplingParams(n=2, max_tokens=3, seed=0), "a")
    update = engine.scheduler.update

    def interrupted(*args):
        progressed = update(*args)
        if progressed[0].state is RequestState.FINISHED:
            signal.raise_signal(signal.SIGINT)
        return progressed

    patch = mock.patch.object(engine.scheduler, "update", interrupted)
    with ctrl_c_raises(), patch, pytest.raises(KeyboardInterrupt):
        for _ in range(4):
            engine.step()
    output = engine.abort_request("a")
    assert output.finished
    assert [completion.finish_reason for completion in output.outputs] == ["length", "abort"]
    assert engine.step() == []


def test_each_sample_has_its_own_text_and_ends_for_its_own_reason(byte_model):
    """The same as with n = 1 and its seed: text, stop string or stop token, log probabilities and their texts."""
    llm = LLM(byte_model, device="cpu", dtype="float64", enforce_eager=True, block_size=4, num_blocks=40)
    engine = llm.engine
    params = SamplingParams(n=8, seed=3, max_tokens=12, stop=["jj", "oe"], stop_token_ids=[70, 75], logprobs=1)
    params = replace(params, logit_bias=dict.fromkeys(range(60, 80), 6.0))  # mostly letters
    engine.add_request("Hello", params, "a")
    seen = [""] * 8
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert all(c.text.startswith(text) for c, text in zip(output.outputs, seen, strict=True))
            seen = [completion.text for completion in output.outputs]
    [generated] = llm.generate("Hello", params, use_tqdm=False)  # where nobody looks at the text until the end
    assert [(c.text, c.token_ids) for c in generated.outputs] == [(c.text, c.token_ids) for c in output.outputs]
    for completion in output.outputs:
        engine.add_request("Hello", replace(params, n=1, seed=3 + completion.index))
        [single] = run_to_end(engine).values()
        [single] = single.outputs
        assert [e[t].decoded_token for e, t in zip(completion.logprobs, completion.token_ids, strict=True)] == [
            e[t].decoded_token for e, t in zip(single.logprobs, single.token_ids, strict=True)
        ]
        assert completion.cumulative_logprob == pytest.approx(single.cumulative_logprob, rel=1e-4)
        parts = [(c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in (completion, single)]
        assert parts[0] == parts[1]
    reasons = {(completion.finish_reason, type(completion.stop_reason)) for completion in output.outputs}
    assert reasons == {("stop", str), ("stop", int), ("length", type(None))}
    assert len(set(seen)) == 8


def test_generate_returns_all_samples_of_each_prompt_in_order(tiny, solo):
    llm = LLM(tiny, device="cpu", dtype="float64", enforce_eager=True, block_size=4, num_blocks=20, max_num_seqs=3)
    prompts = [tuple(make_prompt(n)) for n in (4, 7, 9, 17)]
    numbers = ((3, 4), (1, 9), (5, 1), (2, 6))
    params = [SamplingParams(n=n, seed=1, max_tokens=tokens, logprobs=2) for n, tokens in numbers]
    outputs = llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
    for prompt, wanted, output in zip(prompts, params, outputs, strict=True):
        assert output.prompt_token_ids == list(prompt)
        assert output.finished
        assert [completion.index for completion in output.outputs] == list(range(wanted.n))
        for completion in output.outputs:
            check_sample(completion, prompt, wanted, solo)


def test_samples_without_a_seed_differ_and_so_do_two_calls(tiny):
    """But an engine with the same seed gives the same again."""
    params = SamplingParams(n=4, max_tokens=12)
    calls = []
    for _ in range(2):
        engine = eager(tiny, seed=5)
        for _ in range(2):
            engine.add_request(list(PROMPT), params)
        calls.append([c.token_ids for output in run_to_end(engine).values() for c in output.outputs])
    assert calls[0] == calls[1]
    assert len({tuple(tokens) for tokens in calls[0]}) == 8
