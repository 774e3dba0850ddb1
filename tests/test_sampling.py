"""All that SamplingParams can ask for, through the whole engine: in any mixture each request gets what it gets alone,
and what transformers makes of the same model."""

import functools
import itertools
import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import eager, greedy, run_to_end
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_engine import (
    InterruptAt,
    Plan,
    Space,
    assert_nothing_is_held,
    longest,
    make_prompt,
    poison_free_blocks,
    prompts,
    spaces,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LogitsProcessor, PreTrainedTokenizerFast

from minicb import Engine, SamplingParams
from minicb.outputs import CompletionOutput, RequestOutput
from minicb.params import SchedulingParams
from minicb.policies import POLICIES
from minicb.request import Logprob
from minicb.sampler import uniform

V = 32
EOS = V - 1
MAX_MODEL_LEN = 40  # a request without max_tokens ends there
TOLERANCE = 1e-9  # of log probabilities: float64 all the way, only sums are done in another order


@functools.cache
def lettered_tokenizer() -> PreTrainedTokenizerFast:
    """32 tokens: letters and pieces of words, a space, a line break, and characters in two and four pieces."""
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    characters = [letter for character in "é😀" for letter in spell(character)[0][0]]
    words = [
        spell(word)[0][0] for word in (*"abcdefghij", "ab", "bc", "abc", "ca", "aa", " ", " a", "\n", "d\n", "ab ")
    ]
    pieces = [*words, *characters]
    pieces += [letter * 3 for letter in "klmnopqrst"][: EOS - len(pieces)]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    assert (len(fast), fast.eos_token_id) == (V, EOS)
    return fast


def lettered(folder: Path, **kwargs) -> Engine:
    """An eager engine with that tokenizer."""
    engine = eager(folder, **{"max_model_len": MAX_MODEL_LEN, **kwargs})
    engine.tokenizer, engine.eos_token_ids = lettered_tokenizer(), frozenset([EOS])
    return engine


def flat(folder: Path, **kwargs) -> Engine:
    """Such an engine whose logits are all 0, so that params alone say what comes."""
    engine = lettered(folder, **kwargs)
    with torch.no_grad():
        engine.runner.model.norm.weight.zero_()
    return engine


Alone = Callable[[tuple[int, ...], SamplingParams], CompletionOutput]


@pytest.fixture(scope="module")
def alone(tiny) -> Alone:
    """What a request with one sample gets when nothing runs beside it or has left anything behind."""
    engine = lettered(tiny, block_size=16, enable_prefix_caching=False)
    known: dict[str, CompletionOutput] = {}

    def judge(prompt: tuple[int, ...], params: SamplingParams) -> CompletionOutput:
        key = repr((prompt, params))
        if key not in known:
            engine.add_request(list(prompt), params)
            [output] = run_to_end(engine).values()
            known[key] = output.outputs[0]
        return known[key]

    return judge


def assert_same_logprobs(logprobs: list[dict[int, Logprob]] | None, expected: list[dict[int, Logprob]] | None):
    assert (logprobs is None) == (expected is None)
    for entry, wanted in zip(logprobs or (), expected or (), strict=True):
        assert list(entry) == list(wanted)
        for one, other in zip(entry.values(), wanted.values(), strict=True):
            assert replace(one, logprob=0) == replace(other, logprob=0)
            assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)


def assert_same(completion: CompletionOutput, expected: CompletionOutput) -> None:
    assert replace(copy(completion), logprobs=None, cumulative_logprob=None, index=0) == replace(
        copy(expected), logprobs=None, cumulative_logprob=None
    )
    assert_same_logprobs(completion.logprobs, expected.logprobs)
    assert completion.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=MAX_MODEL_LEN * TOLERANCE)


# ------------------------------------------------------------------ any mixture


@dataclass
class Wish(Plan):
    """A request with anything in its params."""

    params: SamplingParams
    only: int | None  # of its samples this one is aborted, None: all


TEXT = ("minicb/request.py", "minicb/sampler.py", "minicb/penalties.py", "minicb/text.py")
REST = ("engine", "core", "scheduler", "memory", "blocks", "waiting", "policies", "runner", "batch", "swap", "model")
STRINGS = ["a", "b", "ab", "bc", "abca", "ba", " a", "\n", "d\n", "é", "😀", "aé", "ga", "kkk", "zzz"]


@st.composite
def any_params(draw) -> SamplingParams:
    def one_of(*values):
        return draw(st.sampled_from(values))

    temperature, max_tokens = one_of(0, 0, 0.7, 1.0, 2.0), one_of(12, 17, 8, 5, 1, None)
    return SamplingParams(
        n=one_of(1, 1, 2, 3) if temperature else 1,
        temperature=temperature,
        top_p=one_of(1.0, 1.0, 0.9, 0.3),
        top_k=one_of(0, 0, -1, 1, 5, V),
        min_p=one_of(0.0, 0.0, 0.05),
        seed=one_of(None, 0, 1, -(2**63), 2**63 - 3),  # with the samples' indices it is still one
        max_tokens=max_tokens,
        min_tokens=min(one_of(0, 0, 3, 6), max_tokens or 99),
        stop=draw(st.none() | st.sampled_from(STRINGS) | st.lists(st.sampled_from(STRINGS), max_size=4)),
        stop_token_ids=draw(st.none() | st.lists(st.integers(0, V - 1), max_size=3)),
        ignore_eos=one_of(False, True),
        logprobs=one_of(None, 0, 1, 3, V, V + 1, -1),
        presence_penalty=one_of(0.0, 0.0, -2.0, 0.5, 2.0),
        frequency_penalty=one_of(0.0, 0.0, -2.0, 0.5, 2.0),
        repetition_penalty=one_of(1.0, 1.0, 0.5, 1.3, 1e300),
        logit_bias=draw(
            st.none() | st.dictionaries(st.integers(0, V - 1), st.sampled_from([-100, -2, 1.5, 100]), max_size=5)
        ),
        allowed_token_ids=one_of(None, None, list(range(8, V))),
        skip_special_tokens=one_of(True, False),
        include_stop_str_in_output=one_of(False, True),
    )


@st.composite
def wishes(draw) -> Wish:
    prompt, params = draw(prompts), draw(any_params())
    return Wish(
        prompt=prompt,
        max_tokens=min(params.max_tokens or 99, MAX_MODEL_LEN - len(prompt)),
        arrives=draw(st.sampled_from([0, 0, 1, 2, 5, 12])),
        aborted=draw(st.sampled_from([None, None, None, 1, 3, 9, 20])),
        params=params,
        only=draw(st.none() | st.integers(0, params.n - 1)),
    )


def check_growth(output: RequestOutput, before: RequestOutput | None, every_token: bool) -> None:
    """What is handed out goes on from what was handed out before, and agrees with itself."""
    assert output.finished == all(completion.finish_reason for completion in output.outputs)
    for index, completion in enumerate(output.outputs):
        assert completion.index == index
        if completion.logprobs is None:
            assert completion.cumulative_logprob is None
        else:
            chosen = [
                entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)
            ]
            assert completion.cumulative_logprob == pytest.approx(sum(chosen))
        if before is not None:
            earlier = before.outputs[index]
            assert completion == earlier or earlier.finish_reason is None
            assert completion.token_ids[: len(earlier.token_ids)] == earlier.token_ids
            assert len(completion.token_ids) - len(earlier.token_ids) <= 1 or not every_token
            assert completion.text.startswith(earlier.text)
            assert (completion.logprobs or [])[: len(earlier.logprobs or [])] == (earlier.logprobs or [])


def check_end(completion: CompletionOutput, wish: Wish) -> None:
    """What can be said of an output without knowing any other."""
    params, tokens, reason = wish.params, completion.token_ids, completion.stop_reason
    by_token = completion.finish_reason == "stop" and not isinstance(reason, str)
    seen = tokens[:-1] if by_token and not params.include_stop_str_in_output else tokens
    text = lettered_tokenizer().decode(seen, skip_special_tokens=params.skip_special_tokens)
    if completion.finish_reason == "stop" and isinstance(reason, str):
        assert reason in params.stop_strings
        until = completion.text + ("" if params.include_stop_str_in_output else reason)
        assert until.endswith(reason)
        assert text.startswith(until)
        assert params.min_tokens or not any(stop in until[:-1] for stop in params.stop_strings), "complete before"
    else:
        assert completion.text == text
        texts = [entry[i] for i, entry in zip(tokens, completion.logprobs or (), strict=False)]
        named = "".join(logprob.decoded_token for logprob in texts if logprob.is_text)
        assert completion.logprobs is None or text.rstrip("\ufffd") == named.rstrip("\ufffd")
    if completion.finish_reason == "length":
        assert len(tokens) == wish.max_tokens
        assert params.min_tokens or not any(stop in text for stop in params.stop_strings)
    ending = {*([] if params.ignore_eos else [EOS]), *(params.stop_token_ids or ())}
    if completion.finish_reason == "stop" and reason is None:
        assert (tokens[-1], params.ignore_eos) == (EOS, False)
    elif completion.finish_reason == "stop" and isinstance(reason, int):
        assert tokens[-1] == reason
        assert reason in params.stop_token_ids
    assert not ending & set(tokens[:-1])
    assert not ending & set(tokens[: params.min_tokens])
    assert completion.finish_reason != "stop" or len(tokens) > params.min_tokens


def serve(engine: Engine, plans: list[Wish], space: Space, alone: Alone, interrupt: InterruptAt | None = None) -> None:
    """Run the drawn mixture; check every step's invariants and outputs, and what each request got in the end."""
    space.install(engine)
    poison_free_blocks(engine)
    last: dict[str, RequestOutput] = {}
    handed_out: list[tuple[RequestOutput, str]] = []
    seeds: dict[str, list[int]] = {}

    def take(output: RequestOutput) -> None:
        check_growth(output, last.get(output.request_id), every_token=interrupt is None)
        last[output.request_id] = output
        handed_out.append((output, repr(output)))

    for step in itertools.count():
        for index, plan in enumerate(plans):
            if plan.arrives == step:
                client = SchedulingParams(client=str(index % 2))
                request = engine.make_request(list(plan.prompt), plan.params, str(index), client)
                engine.submit(request)
                seeds[str(index)] = [sample.seed for sample in request.samples]
            if plan.aborted == step and (output := engine.abort_request(str(index), plan.only)) is not None:
                take(output)
        if step > 12 and not engine.has_unfinished_requests():
            break
        assert step < 25 + sum(len(p.prompt) + 30 * p.params.n * p.max_tokens for p in plans), "no end in sight"
        outputs = engine.step() if interrupt is None else interrupt.during(engine.step)
        assert len({output.request_id for output in outputs}) == len(outputs)
        for output in outputs:
            take(output)
        engine.scheduler.check_invariants()
        poison_free_blocks(engine)

    assert all(repr(output) == shown for output, shown in handed_out), "what a caller has doesn't change later"
    for index, plan in enumerate(plans):
        output, params = last[str(index)], plan.params
        assert output.finished
        assert output.prompt_token_ids == list(plan.prompt)
        assert len(output.outputs) == params.n
        assert space.enable_prefix_caching or output.num_cached_tokens == 0
        for sample, (completion, drawn) in enumerate(zip(output.outputs, seeds[str(index)], strict=True)):
            seed = drawn if params.seed is None else params.seed + sample
            check_end(completion, plan)
            expected = alone(plan.prompt, replace(params, n=1, seed=seed))
            if completion.finish_reason != "abort":
                assert_same(completion, expected)
                continue
            num_tokens = len(completion.token_ids)
            assert plan.aborted is not None
            assert completion.token_ids == expected.token_ids[:num_tokens]
            assert_same_logprobs(completion.logprobs, expected.logprobs and expected.logprobs[:num_tokens])
    assert_nothing_is_held(engine)


@given(
    plans=st.lists(wishes(), min_size=1, max_size=6) | st.lists(wishes(), min_size=4, max_size=6),
    space=spaces,
    block_size=st.integers(1, 8) | st.just(16),
    spare_blocks=st.sampled_from([0, 1, 2, 4, 8]),
    budget=st.integers(1, 48) | st.just(48),
    slots=st.sampled_from([8, 6, 4, 3, 2, 1]),
    batching=st.sampled_from(["continuous", "continuous", "static"]),
    policy=st.sampled_from(sorted(POLICIES)),
)
@settings(max_examples=3 * settings.default.max_examples // 2)
def test_in_any_mixture_each_request_gets_what_it_gets_alone(
    tiny, alone, plans, space, block_size, spare_blocks, budget, slots, batching, policy
):
    """Text, tokens, log probabilities and why it ended: of each sample, whatever runs beside it, is found in the
    cache, is preempted or is aborted. And what was handed out once only goes on."""
    engine = lettered(
        tiny,
        block_size=block_size,
        num_blocks=1 + longest(plans, block_size) + spare_blocks,
        **space.arguments,
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        batching=batching,
        scheduling_policy=policy,
    )
    serve(engine, plans, space, alone)


@given(
    plans=st.lists(wishes(), min_size=2, max_size=4),
    lines=st.lists(st.integers(1, 4000) | st.integers(1, 300), min_size=1, max_size=5),
    space=spaces,
    spare_blocks=st.sampled_from([0, 2, 8]),
)
def test_an_interruption_while_tokens_are_sampled_or_texts_are_made_changes_nothing(
    tiny, alone, plans, lines, space, spare_blocks
):
    """Ctrl-C at any line of a step: counts, sums, what has been searched for stop strings and what has been shown are
    all as if nothing had been."""
    engine = lettered(
        tiny,
        num_blocks=1 + longest(plans, block_size=4) + spare_blocks,
        **space.arguments,
        max_num_batched_tokens=12,
    )
    serve(engine, plans, space, alone, InterruptAt(lines, (*TEXT, *(f"minicb/{name}.py" for name in REST))))


# ------------------------------------------------------------------ one by one

# One thing at a time, beside what all share.
TABLE = {
    "nothing": {},
    "top_p": {"top_p": 0.4},
    "top_k": {"top_k": 2},
    "min_p": {"min_p": 0.3},
    "temperature": {"temperature": 0.3},
    "greedy": {"temperature": 0},
    "seed": {"seed": 4},
    "max_tokens": {"max_tokens": 5},
    "stop": {"stop": ["zzz", "a"]},
    "stop_token_ids": {"stop_token_ids": list(range(1, 20))},
    "ignore_eos": {"ignore_eos": False, "logit_bias": {EOS: 100}},
    "min_tokens": {"ignore_eos": False, "logit_bias": {EOS: 100}, "min_tokens": 3},
    "presence_penalty": {"presence_penalty": 2},
    "frequency_penalty": {"frequency_penalty": -2},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "logit_bias": {"logit_bias": {3: 3, 4: -5}},
    "allowed_token_ids": {"allowed_token_ids": [3, 5, 8]},
    "skip_special_tokens": {"skip_special_tokens": False, "logit_bias": {EOS: 100}},
    "include_stop_str_in_output": {"include_stop_str_in_output": True, "stop_token_ids": list(range(1, 20))},
}


def from_table(name: str, **kwargs) -> SamplingParams:
    return SamplingParams(**({"seed": 3, "max_tokens": 12, "ignore_eos": True} | TABLE[name] | kwargs))


@pytest.mark.parametrize("name", TABLE)
def test_each_parameter_does_something_and_harms_nobody_beside_it(tiny, alone, name):
    """A request that has it between two that don't, in one batch: it changes its own output only."""
    engine = lettered(tiny)
    prompt = make_prompt(9)
    plain, own = alone(tuple(prompt), from_table("nothing")), alone(tuple(prompt), from_table(name))
    assert name == "nothing" or own != plain
    ids = [engine.add_request(prompt, from_table(which)) for which in ("nothing", name, "nothing")]
    outputs = run_to_end(engine)
    for rid, expected in zip(ids, (plain, own, plain), strict=True):
        assert_same(outputs[rid].outputs[0], expected)


def test_a_compiled_engine_holds_it_too(compiled_engine, tiny, alone, monkeypatch):
    """All of them in one batch, with several samples and log probabilities, more than run at a time, and nothing is
    compiled once the engine is warm."""
    monkeypatch.setattr(compiled_engine, "tokenizer", lettered_tokenizer())
    monkeypatch.setattr(compiled_engine, "eos_token_ids", frozenset([EOS]))
    made = {name: from_table(name, logprobs=-1) for name in TABLE}
    made["samples"] = replace(made["nothing"], n=3)
    for name, params in made.items():
        compiled_engine.add_request(make_prompt(9), params, name)
    with torch.compiler.set_stance("fail_on_recompile"):
        outputs = run_to_end(compiled_engine)
    for name, params in made.items():
        for completion in outputs[name].outputs:
            expected = alone(tuple(make_prompt(9)), replace(params, n=1, seed=params.seed + completion.index))
            assert (completion.token_ids, completion.text) == (expected.token_ids, expected.text)
            assert completion.finish_reason == expected.finish_reason
            assert completion.stop_reason == expected.stop_reason
            for entry, wanted in zip(completion.logprobs, expected.logprobs, strict=True):
                values = {token: logprob.logprob for token, logprob in wanted.items()}
                # The order of tokens that are nearly equal is float32's.
                assert {token: logprob.logprob for token, logprob in entry.items()} == pytest.approx(values, abs=1e-3)


def test_logprobs_change_nothing_and_say_as_much_as_they_are_asked_for(tiny):
    """The sampled token comes first, then the most likely ones, by rank; all of it in one batch."""
    engine = lettered(tiny)
    params = SamplingParams(seed=7, temperature=1.5, max_tokens=12, ignore_eos=True)
    wanted = (None, 0, 1, 5, V, 10**9, -1)
    for number in wanted:
        engine.add_request(make_prompt(7), replace(params, logprobs=number), str(number))
    outputs = {rid: output.outputs[0] for rid, output in run_to_end(engine).items()}
    tokens, everything = outputs["None"].token_ids, outputs["-1"].logprobs
    assert outputs["None"].logprobs is outputs["None"].cumulative_logprob is None
    assert any(entry[token].rank > 5 for token, entry in zip(tokens, everything, strict=True)), "all are likely"
    for number in wanted[1:]:
        completion = outputs[str(number)]
        assert completion.token_ids == tokens
        for token, entry, full in zip(tokens, completion.logprobs, everything, strict=True):
            ranked = sorted(full, key=lambda other, full=full: full[other].rank)
            best = ranked[: V if number == -1 else number]
            assert list(entry) == list(dict.fromkeys([token, *best]))
            assert [entry[other].rank for other in best] == list(range(1, len(best) + 1))
            assert_same_logprobs([entry], [{other: full[other] for other in entry}])


# ------------------------------------------------------------------ exactly


ALL_BUT = {token: -100 for token in range(V)}
LADDER = {5: 3, 6: 2.5, 7: 1}


@pytest.mark.parametrize(
    ("params", "tokens"),
    [
        ({}, [0] * 7),
        ({"logit_bias": LADDER}, [5] * 7),
        ({"logit_bias": {EOS: 1}}, [EOS]),
        ({"logit_bias": {EOS: 1}, "ignore_eos": True}, [EOS] * 7),
        ({"logit_bias": {EOS: 1, 0: 0.5}, "min_tokens": 2}, [0, 0, EOS]),
        ({"logit_bias": {EOS: 10**300, 0: 0.5}, "min_tokens": 2}, [0, 0, EOS]),
        ({"logit_bias": LADDER, "stop_token_ids": [5], "min_tokens": 3}, [6, 6, 6, 5]),
        ({"logit_bias": LADDER, "presence_penalty": 1}, [5, 6, 5, 5, 5, 5, 5]),
        ({"logit_bias": LADDER, "frequency_penalty": 1}, [5, 6, 5, 6, 5, 7, 6]),
        ({"logit_bias": LADDER, "frequency_penalty": -0.5, "presence_penalty": 2}, [5, 6, 5, 5, 5, 5, 5]),
        ({"logit_bias": {5: 0.25}, "presence_penalty": -2, "frequency_penalty": 0.5}, [5, 5, 5, 5, 5, 0, 0]),
        ({"logit_bias": LADDER, "repetition_penalty": 2}, [5, 6, 5, 5, 5, 5, 5]),
        ({"logit_bias": LADDER, "repetition_penalty": 0.5}, [5] * 7),
        # Of the prompt's tokens only the repetition penalty takes notice.
        ({"logit_bias": {1: 3, 6: 2.5}, "repetition_penalty": 2}, [6, 1, 1, 1, 1, 1, 1]),
        ({"logit_bias": {1: 3, 6: 2.5}, "presence_penalty": 2, "min_tokens": 7}, [1, 6, 1, 1, 1, 1, 1]),
        # The bias comes before the repetition penalty, which makes the negative smaller still …
        ({"logit_bias": {**ALL_BUT, 1: -2, 6: -3}, "repetition_penalty": 2}, [6, 1, 1, 1, 1, 1, 1]),
        # … and that before the other two: 5 is 2 / 2 - 1, not (2 - 1) / 2.
        ({"logit_bias": {5: 2, 7: 0.25}, "repetition_penalty": 2, "frequency_penalty": 1}, [5, 7, 0, 1, 2, 3, 4]),
        ({"logit_bias": LADDER, "allowed_token_ids": [6, 7]}, [6] * 7),
        ({"logit_bias": {4: -(10**300), 5: 10**300}, "allowed_token_ids": [4]}, [4] * 7),
        ({"logit_bias": {EOS: 1}, "allowed_token_ids": (9, EOS), "min_tokens": 2}, [9, 9, EOS]),
    ],
    ids=str,
)
def test_on_a_model_without_preferences_params_alone_say_what_comes(tiny, params, tokens):
    """Each by hand. Beside it runs one that asks for nothing, which takes token 0 each time. Log probabilities are the
    model's, whatever the params prefer: all tokens are equal."""
    engine = flat(tiny)
    other = engine.add_request([1, 2, 1], greedy(9))
    rid = engine.add_request([1, 2, 1], greedy(7, logprobs=1, **params))
    outputs = run_to_end(engine)
    assert outputs[rid].outputs[0].token_ids == tokens
    assert outputs[other].outputs[0].token_ids == [0] * 9
    for token, entry in zip(tokens, outputs[rid].outputs[0].logprobs, strict=True):
        assert list(entry) == list(dict.fromkeys([token, 0]))
        assert all(logprob.logprob == pytest.approx(-math.log(V)) for logprob in entry.values())
        assert entry[0].rank == 1


@pytest.mark.parametrize("num_blocks", [5, 40])
@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty"])
def test_a_penalty_that_outweighs_all_biases_lets_no_token_come_again_before_all_have_come(tiny, penalty, num_blocks):
    """Also after preemptions, when what is penalised has been the prompt of a prefill."""
    engine = flat(tiny, num_blocks=num_blocks, block_size=8, max_num_batched_tokens=7, max_model_len=256)
    params = greedy(24, ignore_eos=True, logit_bias={i: 1 - i / 20 for i in range(V)}, **{penalty: 2.0})
    requests = [engine.make_request([3, 2, 1], params) for _ in range(3)]
    for request in requests:
        engine.submit(request)
    run_to_end(engine)
    assert (sum(request.num_preemptions for request in requests) > 0) == (num_blocks == 5)
    assert all(request.output_token_ids == list(range(24)) for request in requests)


@pytest.mark.parametrize(("stop", "text", "reason"), [(["abc", "b"], "a", "b"), (["bc", "abc"], "a", "bc")])
def test_of_strings_in_one_token_the_one_that_is_complete_first_ends_it(tiny, stop, text, reason):
    """Of those complete at the same place, the first of the list; the token stays, the text is cut."""
    engine = flat(tiny)
    [token] = [token for token in range(V) if engine.tokenizer.decode([token]) == "abc"]
    rid = engine.add_request([1], greedy(4, stop=stop, logit_bias={token: 1}))
    completion = run_to_end(engine)[rid].outputs[0]
    assert (completion.token_ids, completion.text, completion.stop_reason) == ([token], text, reason)


def test_a_seed_says_where_among_equal_tokens(tiny):
    """The random number of a seed and a place in the output, whatever the prompt; of each sample its own."""
    engine = flat(tiny)
    params = SamplingParams(n=3, seed=42, max_tokens=9, ignore_eos=True)
    for length in (1, 5):
        rid = engine.add_request(make_prompt(length), params)
        for completion in run_to_end(engine)[rid].outputs:
            assert completion.token_ids == [int(V * uniform(42 + completion.index, place)) for place in range(9)]


def test_an_interruption_at_each_line_of_sampling_counts_nothing_twice(tiny):
    """In the third step, when there is something to be counted, summed up and found again."""
    engine = flat(tiny)
    by_id = {"ignore_eos": True, "logprobs": 0, "logit_bias": LADDER}
    wanted = {
        "frequency": (greedy(5, frequency_penalty=1, **by_id), [5, 6, 5, 6, 5]),
        "presence": (greedy(4, repetition_penalty=0.5, presence_penalty=0.5, **by_id), [5, 5, 5, 5]),
        "stop": (greedy(7, stop=["gg", "fff", "ffg"], frequency_penalty=0.4, **by_id), [5, 5, 6]),
    }
    for line in itertools.count(1):
        for name, (params, _) in wanted.items():
            engine.add_request([1, 2], params, name)
        outputs = {output.request_id: output for _ in "12" for output in engine.step()}
        interrupt = InterruptAt([line], TEXT)
        outputs |= {output.request_id: output for output in interrupt.during(engine.step)}
        outputs |= run_to_end(engine)
        for name, (_, tokens) in wanted.items():
            completion = outputs[name].outputs[0]
            assert completion.token_ids == tokens
            assert len(completion.logprobs) == len(tokens)
            assert completion.cumulative_logprob == pytest.approx(-len(tokens) * math.log(V))
            assert (completion.text, completion.stop_reason) == (
                ("", "ffg") if name == "stop" else (engine.tokenizer.decode(tokens), None)
            )
        if interrupt.lines:  # there are no more lines
            assert line > 100
            return


# ------------------------------------------------------------------ transformers


class OutputPenalties(LogitsProcessor):
    """Frequency and presence penalty as OpenAI defines them, which transformers doesn't have."""

    def __init__(self, start: int, params: SamplingParams):
        self.start, self.params = start, params

    def __call__(self, input_ids, scores):
        for token in set(output := input_ids[0, self.start :].tolist()):
            scores[0, token] -= self.params.presence_penalty + output.count(token) * self.params.frequency_penalty
        return scores


@pytest.fixture(scope="module")
def load(make_model):
    """load(family) -> its folder and transformers' model in float64, once."""

    @functools.cache
    def loaded(family: str):
        folder = make_model(family, **({"sliding_window": 9} if family == "mistral" else {}))
        return folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)

    return loaded


ROUGH = 1e-4  # transformers norms in float32, whatever the dtype of the model


def generate(model, prompt: tuple[int, ...], params: SamplingParams) -> tuple[list[int], float]:
    """transformers' greedy output under the same params, of those that say which token comes and which is the last,
    and by how much the closest call was decided."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        do_sample=False,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens,
        repetition_penalty=params.repetition_penalty,
        sequence_bias={(token,): float(bias) for token, bias in (params.logit_bias or {}).items()} or None,
        prefix_allowed_tokens_fn=lambda *_: list(params.allowed_token_ids or range(V)),
        logits_processor=[OutputPenalties(len(prompt), params)],
        eos_token_id=[*([] if params.ignore_eos else [EOS]), *(params.stop_token_ids or ())] or None,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(output.scores).topk(2).values
    return output.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).min().item()


greedy_params = st.builds(
    SamplingParams,
    temperature=st.just(0),
    max_tokens=st.sampled_from([12, 7]),
    min_tokens=st.sampled_from([0, 4]),
    stop_token_ids=st.lists(st.integers(0, V - 1), max_size=4),
    ignore_eos=st.booleans(),
    repetition_penalty=st.sampled_from([1.0, 1.2, 2.0, 0.8]),
    presence_penalty=st.sampled_from([0.0, 1.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 1.5, -0.5]),
    logit_bias=st.dictionaries(st.integers(0, V - 1), st.sampled_from([-20, -1.5, 2.5, 6]), max_size=4),
    logprobs=st.sampled_from([0, 3, -1]),
    allowed_token_ids=st.sampled_from([None, range(8, V)]).map(lambda ids: ids and list(ids)),
)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@given(
    wanted=st.lists(st.tuples(prompts, greedy_params), min_size=2, max_size=4),
    budget=st.sampled_from([48, 7, 4]),
    space=st.sampled_from(["swap", "recompute"]),
    spare_blocks=st.sampled_from([0, 30]),
)
@settings(max_examples=max(1, settings.default.max_examples // 3))
def test_transformers_generates_the_same_and_gives_it_the_same_probabilities(
    load, family, wanted, budget, space, spare_blocks
):
    """Greedy with bias and penalties, token by token, in chunks, with prefixes from the cache and in a pool that
    overflows; log probabilities against its logits of the whole sequence, before bias and penalties."""
    folder, model = load(family)
    plans = [Plan(prompt, params.max_tokens, 0, None) for prompt, params in wanted]
    num_blocks = 1 + longest(plans, 4) + spare_blocks
    engine = eager(folder, num_blocks=num_blocks, max_num_batched_tokens=budget, preemption_mode=space)
    engine.eos_token_ids = frozenset([EOS])
    expected, margins = zip(*(generate(model, prompt, params) for prompt, params in wanted), strict=True)
    assume(min(margins) > ROUGH)
    for attempt in (1, 2):
        for index, (prompt, params) in enumerate(wanted):
            engine.add_request(list(prompt), params, str(index))
        outputs = run_to_end(engine)
        for index, ((prompt, params), tokens) in enumerate(zip(wanted, expected, strict=True)):
            completion = outputs[str(index)].outputs[0]
            assert completion.token_ids == tokens
            ending = {*([] if params.ignore_eos else [EOS]), *params.stop_token_ids}
            assert completion.finish_reason == ("stop" if tokens[-1] in ending else "length")
            assert_logprobs_of(model, prompt, completion, params.logprobs)
            if attempt == 2 and spare_blocks:
                assert outputs[str(index)].num_cached_tokens == (len(prompt) - 1) // 4 * 4


def assert_logprobs_of(model, prompt: tuple[int, ...], completion: CompletionOutput, number: int) -> None:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion.token_ids]]), use_cache=False).logits[0]
    by_token = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    for token, entry, values in zip(completion.token_ids, completion.logprobs, by_token, strict=True):
        ranked = values.sort(descending=True).values.tolist()
        ranks = [entry[token].rank, *range(1, 1 + (V if number < 0 else number))]
        assert next(iter(entry)) == token
        assert [logprob.rank for logprob in entry.values()] == list(dict.fromkeys(ranks))
        for other, logprob in entry.items():
            assert logprob.logprob == pytest.approx(values[other].item(), abs=ROUGH)
            assert logprob.logprob == pytest.approx(ranked[logprob.rank - 1], abs=ROUGH)


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *(({"logit_bias": {1: 2, i: 1.0}}, rf"^logit_bias must be an integer >= 0 and < {V}, not {i}$") for i in (V, 10**12)),
        ({"logit_bias": {-1: 1.0}}, "^logit_bias: token id must be an integer >= 0, not -1$"),
        ({"logit_bias": {1: math.inf}}, "^logit_bias of token 1 must be a finite number, not inf$"),
        ({"logit_bias": [1]}, "^logit_bias must be a dict"),
        *(({"stop_token_ids": [1, i]}, f"^stop_token_ids must be an integer >= 0 and < {V}, not {i}$") for i in (V, 10**12)),
        ({"stop_token_ids": [-1]}, "^stop_token_ids must be an integer >= 0, not -1$"),
        ({"stop_token_ids": list(range(V)), "min_tokens": 1}, "^min_tokens is 1, but stop_token_ids leaves no token"),
        ({"stop_token_ids": [5], "allowed_token_ids": [5, EOS], "min_tokens": 1}, "^min_tokens is 1, but stop_token_ids"),
        ({"allowed_token_ids": []}, "^allowed_token_ids must have at least 1 token id$"),
        ({"allowed_token_ids": [V]}, f"^allowed_token_ids must be an integer >= 0 and < {V}, not {V}$"),
        ({"allowed_token_ids": "5"}, "^allowed_token_ids must be a list of token ids or None, not '5'$"),
        ({"skip_special_tokens": 1}, "^skip_special_tokens must be True or False, not 1$"),
        ({"min_tokens": 3, "max_tokens": 2}, "^min_tokens is 3, more than max_tokens, which is 2$"),
        ({"n": 2, "temperature": 0}, "^n must be 1 where temperature is 0.* not 2$"),
        ({"n": 0}, "^n must be an integer >= 1"),
        ({"n": 16385}, "^n must be an integer >= 1 and < 16385, not 16385$"),
        ({"logprobs": -2}, "^logprobs must be an integer >= -1, not -2$"),
        ({"stop": ["a", ""]}, "^stop must be made of strings with at least 1 character, not ''$"),
        ({"presence_penalty": 2.1}, r"^presence_penalty must be in \[-2, 2\], not 2.1$"),
        ({"frequency_penalty": math.nan}, r"^frequency_penalty must be in \[-2, 2\], not nan$"),
        ({"repetition_penalty": 0}, "^repetition_penalty must be a finite number > 0, not 0$"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_params_are_refused_by_name_and_harm_nobody(tiny, alone, wrong, message):
    """Before anything of the request is in the engine: its id is free, and who runs goes on."""
    engine = lettered(tiny)
    other = engine.add_request(make_prompt(5), from_table("nothing"))
    engine.step()
    with pytest.raises(ValueError, match=message):
        engine.add_request([1, 2], SamplingParams(**wrong), "refused")
    assert list(engine.scheduler.requests) == [other]
    engine.add_request(make_prompt(5), replace(from_table("nothing"), n=2), "refused")
    outputs = run_to_end(engine)
    for rid in (other, "refused"):
        assert_same(outputs[rid].outputs[0], alone(tuple(make_prompt(5)), from_table("nothing")))


def test_stop_strings_need_a_tokenizer(tiny):
    """Nobody could find them; an empty list of them needs none."""
    engine = eager(tiny)
    with pytest.raises(ValueError, match="^stop has strings, but the model has no tokenizer"):
        engine.add_request([1, 2], SamplingParams(stop="a"))
    assert not engine.has_unfinished_requests()
    rid = engine.add_request([1, 2], greedy(2, stop=[], logprobs=1))
    completion = run_to_end(engine)[rid].outputs[0]
    assert completion.text == ""
    assert all(logprob.decoded_token is None for entry in completion.logprobs for logprob in entry.values())


@pytest.mark.parametrize("integer", [np.int8, np.uint8, np.int16, np.int64])
def test_numpy_token_ids_are_token_ids(tiny, integer):
    """Of any width. Tensors would be indexed differently by narrow ones, as by a mask for some."""
    engine = flat(tiny)
    biased = greedy(3, logit_bias={integer(5): np.float16(2)})
    stopped = greedy(4, stop_token_ids=[integer(0)], min_tokens=2)
    for params, tokens, stop_reason in ((biased, [5, 5, 5], None), (stopped, [1, 1, 0], 0)):
        rid = engine.add_request([integer(1)], params)
        completion = run_to_end(engine, max_steps=9)[rid].outputs[0]
        assert (completion.token_ids, completion.stop_reason) == (tokens, stop_reason)
        assert all(type(token) is int for token in completion.token_ids)
