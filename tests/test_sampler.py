"""minicb/sampler.py and penalties.py: from logits to tokens. No row of a batch may change another.

Chance is checked exactly: an even grid over [0, 1) replaces the random numbers, and each token must come out in
proportion to its probability, to within one grid point.
"""

import math
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.logits_process import MinPLogitsWarper

import minicb.sampler
from minicb import SamplingParams
from minicb.request import Logprob, Request, Sampled, ScoredToken
from minicb.sampler import sample, uniform

V = 32
GRID = 2000


def request_of(params: SamplingParams, *, prompt=(1, 2, 3), output=(), num_output_tokens=0, eos=()) -> Request:
    request = Request("a", prompt, params, eos_token_ids=eos)
    request.token_ids += output or [0] * num_output_tokens
    return request


def random_logits(rows: int, seed=0, scale=3.0) -> torch.Tensor:
    return scale * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))


def sample_rows(rows: list[list[float]] | torch.Tensor, requests: list[Request]) -> list[Sampled]:
    return sample(torch.as_tensor(rows, dtype=torch.float32).clone(), requests)  # `sample` writes into it


def changed_logits(rows: list[list[float]] | torch.Tensor, requests: list[Request]) -> torch.Tensor:
    """The logits as `sample` has changed them when it chooses."""
    logits = torch.as_tensor(rows, dtype=torch.float32).clone()
    sample(logits, requests)
    return logits


def counts_on_a_grid(logits: list[float], params: SamplingParams, **kwargs) -> Counter:
    """How often each token comes in GRID draws with random numbers that divide [0, 1) evenly."""
    grid = [(k + 0.5) / GRID for k in range(GRID)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minicb.sampler, "uniform", lambda seed, index: grid.pop())
        return Counter(sample_rows([logits] * GRID, [request_of(params, **kwargs)] * GRID))


def assert_proportional(counts: Counter, probabilities: dict[int, float]) -> None:
    """A token has an interval of [0, 1), which holds its share of the grid's points to within one."""
    assert set(counts) <= set(probabilities), "a token that was ruled out"
    for token, probability in probabilities.items():
        assert abs(counts[token] - GRID * probability) <= 1.1, f"token {token}"


# ---------------------------------------------------------------------------- greedy


def test_greedy_takes_the_lowest_id_on_exact_ties_in_every_row():
    rows = torch.zeros(9, V)
    for row in range(8):
        rows[row, [3 + row, 20, V - 1]] = 5.0
    greedy = request_of(SamplingParams(temperature=0))
    assert sample_rows(rows, [greedy] * 9) == [3, 4, 5, 6, 7, 8, 9, 10, 0]  # all equal in the last


def test_greedy_looks_at_nothing_but_the_logits():
    """It ignores the parameters of sampling, and takes no chance where tokens are equal."""
    rows = random_logits(12).round()
    rows[:, 20:] = rows[:, :12]  # so that there are ties, and often for the best
    params = [
        SamplingParams(temperature=0, top_k=5, top_p=0.99, min_p=0.01, seed=seed)  # would matter if it sampled
        for seed in range(12)
    ]
    assert sample_rows(rows, [request_of(p) for p in params]) == rows.argmax(-1).tolist()


# ---------------------------------------------------------------------------- the random numbers


def test_uniform_is_a_function_of_seed_and_index():
    numbers = {(seed, index): uniform(seed, index) for seed in range(-2, 30) for index in range(30)}
    assert len(set(numbers.values())) == len(numbers)  # of 2**24; (1, 23) must not be (12, 3)
    for (seed, index), number in reversed(numbers.items()):
        assert uniform(seed, index) == number
    assert uniform(2**64 + 1, 0) != uniform(1, 0)


def test_uniform_is_fixed_for_ever():
    """A seed must give the same text with the next version."""
    assert [uniform(42, 0), uniform(42, 1), uniform(43, 0)] == [
        0.5618119835853577,
        0.05954486131668091,
        0.6501114964485168,
    ]


@pytest.mark.parametrize(
    "numbers",
    [[uniform(0, index) for index in range(6400)], [uniform(seed, 0) for seed in range(6400)]],
    ids=["one seed", "one index"],
)
def test_uniform_is_uniform(numbers):
    """Along the output of one request as well as across requests; neighbours don't know each other."""
    assert all(0 <= number < 1 for number in numbers)
    for values in (numbers, [(b - a) % 1 for a, b in pairwise(numbers)]):
        bins = Counter(int(64 * value) for value in values)
        chi_square = sum((bins[b] - 100) ** 2 / 100 for b in range(64))
        assert chi_square < 63 + 4 * math.sqrt(2 * 63)  # mean + 4 standard deviations


def test_the_same_seed_gives_the_same_token_wherever_the_row_lies():
    """Another seed or another index gives other tokens."""
    logits = torch.zeros(V)  # all equal, so that the token tells the random number
    fixed = request_of(SamplingParams(seed=42), num_output_tokens=3)
    others = [request_of(SamplingParams(seed=seed, top_k=seed % 2 * V)) for seed in range(7)]
    [expected] = sample_rows(logits[None], [fixed])
    for row in range(8):
        batch = others[:row] + [fixed] + others[row:]
        assert sample_rows(logits.expand(8, V), batch)[row] == expected
    assert expected == int(V * uniform(42, 3))
    tokens = sample_rows(
        logits.expand(40, V), [request_of(SamplingParams(seed=42), num_output_tokens=n) for n in range(40)]
    )
    assert tokens == [int(V * uniform(42, n)) for n in range(40)]


# ---------------------------------------------------------------------------- every row by itself

# The first and the last are where an index goes wrong; a few tokens, so that they meet in prompt, output and bias.
token_id = st.sampled_from([0, 1, 2, 3, 15, V - 2, V - 1])
token_ids = st.lists(token_id, max_size=6)

params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 1e-300, 1e-45, 1e-8, 1e-4, 0.7, 1, 1.5, 1e4, 1e39]),
    top_k=st.sampled_from([-1, 0, 1, 2, 31, V, V + 1, 10**9]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    seed=st.integers(0, 5),
    min_tokens=st.integers(0, 3),
    stop_token_ids=st.none() | st.lists(st.integers(0, V - 1), max_size=3),
    logprobs=st.sampled_from([None, None, -1, 0, 1, 2, 31, V, V + 1, 10**9]),
    presence_penalty=st.sampled_from([0, 0, -2, 0.3, 2]),
    frequency_penalty=st.sampled_from([0, 0, -2, 0.3, 2]),
    repetition_penalty=st.sampled_from([1, 1, 1e-300, 0.7, 1.3, 1e300]),
    logit_bias=st.none() | st.dictionaries(token_id, st.sampled_from([-1e300, -100, -0.3, 3, 100, 1e300]), max_size=4),
)
logit = st.integers(-40, 40).map(lambda x: x / 8)  # few values, so that there are ties
logits_strategy = st.lists(logit, min_size=V, max_size=V)
bad_logit = st.sampled_from([math.nan, math.inf, -math.inf])


@st.composite
def row_and_request(draw):
    """A row of logits, and what makes its request, because a request keeps counts from one sampling to the next."""
    row = draw(logits_strategy)
    if draw(st.integers(0, 4)) == 0:
        row[draw(st.integers(0, V - 1))] = draw(bad_logit)
    params, prompt, output = draw(params_strategy), draw(token_ids.filter(bool)), draw(token_ids)
    return row, lambda: request_of(params, prompt=prompt, output=output, eos=[V - 1])


def in_order(sampled: Sequence[Sampled]) -> list[object]:
    """With the order of each report, which == ignores."""
    return [(s.token, list(s.logprobs.items())) if isinstance(s, ScoredToken) else s for s in sampled]


@given(st.lists(row_and_request(), min_size=2, max_size=8))
def test_a_mixture_of_everything_gives_each_row_what_it_has_alone(rows_and_requests):
    """Nothing that one row asks for reaches another."""
    rows, makers = (list(column) for column in zip(*rows_and_requests, strict=True))
    requests = [make() for make in makers]
    together = in_order(sample_rows(rows, requests))
    assert together == [in_order(sample_rows([row], [make()]))[0] for row, make in rows_and_requests]
    assert together[::-1] == in_order(sample_rows(rows[::-1], [make() for make in makers[::-1]]))
    for row, request, sampled in zip(rows, requests, together, strict=True):
        assert (sampled is None) == (not all(map(math.isfinite, row)))
        if sampled is None:
            continue
        assert isinstance(sampled, tuple) == (request.params.logprobs is not None)
        token = sampled[0] if isinstance(sampled, tuple) else sampled
        assert 0 <= token < V
        if request.num_output_tokens < request.params.min_tokens:
            assert token not in {V - 1, *(request.params.stop_token_ids or ())}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {},
        {"top_k": 5},
        {"top_p": 0.5},
        {"logprobs": 3},
        {"logprobs": -1, "presence_penalty": 2, "repetition_penalty": 1.5, "logit_bias": {7: 1e300, 8: -1e300}},
    ],
    ids=str,
)
def test_a_row_that_is_not_finite_gives_none_and_leaves_its_neighbours_alone(bad, params):
    rows = random_logits(5)
    requests = [request_of(SamplingParams(**params, seed=seed), output=[7, 7, 9]) for seed in range(5)]
    expected = sample_rows(rows, requests)
    assert None not in expected
    rows[1, 7] = bad
    rows[3] = bad
    assert sample_rows(rows, requests) == [expected[0], None, expected[2], None, expected[4]]


@pytest.mark.parametrize(
    "params",
    [
        {"min_tokens": 1, "stop_token_ids": [5]},
        {"logit_bias": {5: 1e300}},
        {"logit_bias": {5: -1e300}},
        {"prompt": [5], "repetition_penalty": 1e-300},
    ],
    ids=str,
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_changes_a_logit_does_not_hide_a_bad_one(bad, params):
    """A ban overwrites logits and a clamp makes infinite ones finite, but a bad logit is still reported."""
    rows = random_logits(1)
    rows[0, 5] = bad
    prompt = params.get("prompt", [1])
    request = request_of(
        SamplingParams(temperature=0, **{k: v for k, v in params.items() if k != "prompt"}), prompt=prompt
    )
    assert sample_rows(rows, [request]) == [None]


def test_top_k_of_any_size_in_one_batch():
    """V = 32: -1, 0, 32, 33, 10**9 and an int too large for a float keep all tokens, 1 only the best."""
    rows = random_logits(1).expand(7, V)
    requests = [request_of(SamplingParams(top_k=k, seed=4)) for k in (-1, 0, 1, 32, 33, 10**9, 10**400)]
    tokens = sample_rows(rows, requests)
    assert tokens[2] == int(rows[0].argmax())
    assert tokens == [sample_rows(rows[:1], [request])[0] for request in requests]
    for k in (-1, 0, 32, 33, 10**9):
        counts = counts_on_a_grid([0.0] * V, SamplingParams(top_k=k))
        assert_proportional(counts, dict.fromkeys(range(V), 1 / V))
    assert counts_on_a_grid([0.0] * V, SamplingParams(top_k=1)) == {0: GRID}


@pytest.mark.parametrize("k", [V, V + 1, 10**9])
def test_a_top_k_that_keeps_every_token_is_no_filter(k):
    """The same seed gives the token that it gives without top_k, alone and beside a row that is filtered."""
    rows = random_logits(1, seed=3).expand(40, V)
    plain = [request_of(SamplingParams(seed=seed)) for seed in range(40)]
    wide = [request_of(SamplingParams(seed=seed, top_k=k)) for seed in range(40)]
    expected = sample_rows(rows, plain)
    assert sample_rows(rows, wide) == expected
    narrow = request_of(SamplingParams(seed=1, top_k=V - 1))
    assert sample_rows(rows, [narrow, *wide[1:]])[1:] == expected[1:]
    assert sample_rows(rows, [narrow] * 40)[0] != expected[1], "a filtered row is sampled in order of probability"


def test_temperatures_from_nothing_to_huge_in_one_batch():
    row = random_logits(1)[0]
    best = int(row.argmax())
    for truncated in ({}, {"top_p": 0.99}):
        tiny = [SamplingParams(temperature=t, **truncated) for t in (0, 1e-300, 1e-45, 1e-8, 1e-4)]
        requests = [request_of(p) for p in [*tiny, SamplingParams(temperature=1e4, **truncated)]]
        for scale in (1, 1e4, 1e30):  # large logits as well
            tokens = sample_rows((scale * row).expand(6, V), requests)
            assert tokens[:5] == [best] * 5
            assert tokens[5] is not None
    hot = counts_on_a_grid(row.tolist(), SamplingParams(temperature=1e4))
    assert all(abs(hot[token] - GRID / V) <= 2 for token in range(V))


def test_equal_best_logits_share_what_a_tiny_temperature_leaves():
    """Only temperature 0 is greedy; near it, exact ties are still a matter of chance."""
    logits = [0.0] * V
    logits[3] = logits[9] = 5.0
    for temperature in (1e-300, 1e-30, 1e-4):
        assert_proportional(counts_on_a_grid(logits, SamplingParams(temperature=temperature)), {3: 0.5, 9: 0.5})
    logits[9] -= 2**-13  # almost equal, and exact in float32
    params = SamplingParams(temperature=1e-4)
    assert_proportional(counts_on_a_grid(logits, params), slow_probabilities(logits, params)[0])


# ---------------------------------------------------------------------------- bias and penalties

# Values that float32 adds, multiplies and divides exactly, so that plain Python must get the same to the last bit.
PENALTIES = {
    "presence_penalty": st.sampled_from([0, 0, -2, -0.125, 0.5, 2]),
    "frequency_penalty": st.sampled_from([0, 0, -2, -0.125, 0.5, 2]),
    "repetition_penalty": st.sampled_from([1, 1, 0.25, 2, 8]),
    "logit_bias": st.none() | st.dictionaries(token_id, st.sampled_from([-100, -1.5, -0.125, 0, 3, 100]), max_size=4),
}


def slow_logits(logits: Sequence[float], params: SamplingParams, prompt, output, eos=()) -> list[float]:
    """The definition, in plain Python.

    The bias; then the repetition penalty (CTRL, 2019) on tokens of prompt and output; then OpenAI's two penalties on
    tokens of the output. Before min_tokens no token that ends the request.
    """
    changed = []
    for token, value in enumerate(logits):
        if len(output) < params.min_tokens and token in {*eos, *(params.stop_token_ids or ())}:
            value = -math.inf
        value += (params.logit_bias or {}).get(token, 0)
        if token in prompt or token in output:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * output.count(token)
        value -= params.presence_penalty * (token in output)
        changed.append(value)
    return changed


@given(
    st.lists(
        st.tuples(
            logits_strategy,
            st.builds(
                SamplingParams,
                temperature=st.sampled_from([0, 0, 1]),
                min_tokens=st.integers(0, 3),
                stop_token_ids=st.none() | st.lists(token_id, max_size=3),
                **PENALTIES,
            ),
            token_ids.filter(bool),
            token_ids,
        ),
        min_size=1,
        max_size=6,
    )
)
def test_bias_and_penalties_follow_the_definition(examples):
    """To the last bit, in every row of a batch; greedy takes the best of what comes out."""
    expected = [slow_logits(*example, [V - 1]) for example in examples]
    requests = [request_of(params, prompt=p, output=o, eos=[V - 1]) for _, params, p, o in examples]
    logits = torch.tensor([example[0] for example in examples])
    tokens = sample(logits, requests)
    assert logits.tolist() == expected
    for values, token, request in zip(expected, tokens, requests, strict=True):
        assert request.params.temperature > 0 or token == values.index(max(values))


def test_bias_and_penalties_by_hand():
    """Prompt 1 2 0, output 2 2 31: the changes to each token, one after another."""
    row = [0.0] * V
    row[:6] = [4.0, -4.0, 4.0, 4.0, -4.0, 0.0]
    row[V - 1] = -4.0

    def change(**params) -> dict[int, float]:
        request = request_of(SamplingParams(temperature=0, **params), prompt=[1, 2, 0], output=[2, 2, V - 1])
        [after] = changed_logits([row], [request]).tolist()
        return {token: value for token, value in enumerate(after) if value != row[token]}

    assert change(presence_penalty=1) == {2: 3, V - 1: -5}
    assert change(frequency_penalty=1) == {2: 2, V - 1: -5}
    assert change(frequency_penalty=-1, presence_penalty=-1) == {2: 7, V - 1: -2}
    assert change(repetition_penalty=2) == {0: 2, 1: -8, 2: 2, V - 1: -8}
    assert change(logit_bias={4: 5, V - 1: -1, 0: 1}) == {0: 5, 4: 1, V - 1: -5}
    # The bias decides which side of 0 the repetition penalty finds; the others come after it.
    assert change(logit_bias={1: 5, 2: -5}, repetition_penalty=2) == {0: 2, 1: 0.5, 2: -2, V - 1: -8}
    assert change(repetition_penalty=2, frequency_penalty=1, presence_penalty=0.5) == {
        0: 2,
        1: -8,
        2: -0.5,
        V - 1: -9.5,
    }


@given(
    st.integers(0, 1000), st.sampled_from([0.3, 0.9, 1.1, 1.7]), token_ids.filter(bool), token_ids, st.integers(0, 4)
)
def test_transformers_agrees_on_repetition_bias_and_min_tokens(seed, penalty, prompt, output, min_tokens):
    """transformers has no presence or frequency penalty. The rest is the same in the same order."""
    bias = {0: 0.7, 3: -1.3, V - 1: 2.1}
    processors = LogitsProcessorList(
        [
            MinNewTokensLengthLogitsProcessor(len(prompt), min_tokens, [2, V - 1], device="cpu"),
            SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()}),
            RepetitionPenaltyLogitsProcessor(penalty),
        ]
    )
    logits = random_logits(1, seed)
    params = SamplingParams(
        repetition_penalty=penalty, logit_bias=bias, min_tokens=min_tokens, max_tokens=None, stop_token_ids=[2]
    )
    ours = changed_logits(logits, [request_of(params, prompt=prompt, output=output, eos=[V - 1])])
    torch.testing.assert_close(ours, processors(torch.tensor([prompt + output]), logits.clone()), rtol=1e-6, atol=0)


def test_a_request_that_asks_for_none_of_it_keeps_its_logits_bit_for_bit():
    """Beside any row, also where its own logits are NaN, and with values that do nothing."""
    rows = random_logits(8)
    rows[1, :3] = torch.tensor([math.nan, -0.0, math.inf])
    rows[3, 0] = -0.0
    rows[5] = 3e38  # more than what the others' are held below
    nothing = {"repetition_penalty": 1.0, "presence_penalty": -0.0, "frequency_penalty": 0, "logit_bias": {}}
    everything = {
        "repetition_penalty": 1e300,
        "presence_penalty": 2,
        "frequency_penalty": 2,
        "logit_bias": {0: 1e300, 1: 5, V - 1: -1e300},
    }
    plain = [{}, {"temperature": 0, **nothing}, {"top_p": 0.5, "logprobs": -1}, {"stop": ["a"], "stop_token_ids": [0]}]
    requests = [
        request_of(SamplingParams(**params), prompt=[0, 1, V - 1], output=[0, V - 1, 0], eos=[0])
        for own in plain
        for params in (everything | {"min_tokens": 4}, own)
    ]
    before, after = (tensor.view(torch.int32) for tensor in (rows, changed_logits(rows, requests)))
    assert torch.equal(before[1::2], after[1::2])
    # And of the others, the tokens that are not concerned.
    assert torch.equal(before[::2, 2 : V - 1], after[::2, 2 : V - 1])
    assert not (before[::2, [0, 1, V - 1]] == after[::2, [0, 1, V - 1]]).any()


# ---------------------------------------------------------------------------- extremes of them


@pytest.mark.parametrize("other", [{}, {"temperature": 0}, {"temperature": 1e4}, {"top_p": 0.9}], ids=str)
def test_the_largest_bias_is_always_taken_and_the_smallest_never(other):
    """Up to the largest float, beyond float32: no infinity becomes NaN, and no NaN is chosen."""
    row = random_logits(1)[0].tolist()
    for sure in ({0}, {V - 1}, {3, 9}):
        others = {token: -1e300 for token in (1, 5, 12)}
        counts = counts_on_a_grid(row, SamplingParams(**other, logit_bias=dict.fromkeys(sure, 1e300) | others))
        assert set(counts) <= sure
    for never in ({0}, {V - 1}, set(range(V)) - {7}, set(range(V)) - {0, V - 1}):
        forbidding = {**other, "logit_bias": dict.fromkeys(never, -1e300)}
        sampled = sample_rows([row] * 40, [request_of(SamplingParams(**forbidding, seed=seed)) for seed in range(40)])
        assert never.isdisjoint(sampled)


@pytest.mark.parametrize("other", [{}, {"temperature": 0}, {"top_p": 0.9}], ids=str)
@pytest.mark.parametrize("bias", [3.5e38, 1e300, 10**300], ids=["3.5e38", "1e300", "int"])
def test_no_bias_overcomes_a_ban(bias, other):
    """A stop token waits for min_tokens whatever its bias."""
    row = [0.0] * V
    for banned in (5, 0, V - 1):
        params = {**other, "min_tokens": 1, "stop_token_ids": [banned]}
        biased = counts_on_a_grid(row, SamplingParams(**params, logit_bias={banned: bias}))
        assert banned not in biased
        assert biased == counts_on_a_grid(row, SamplingParams(**params))
        for everything_else in (dict.fromkeys(set(range(V)) - {banned}, -bias), dict.fromkeys(range(V), bias)):
            requests = [
                request_of(SamplingParams(**params, logit_bias=everything_else, seed=seed)) for seed in range(40)
            ]
            assert banned not in sample_rows([row] * 40, requests)


@pytest.mark.parametrize("other", [{}, {"temperature": 0}, {"top_k": 3}], ids=str)
def test_extreme_repetition_penalties_decide_and_stay_numbers(other):
    """1e300 forbids a seen token, however likely. 1e-300 demands it, if its logit is positive at all."""

    def sampled(row: list[float], penalty: float) -> set[int]:
        params = SamplingParams(**other, repetition_penalty=penalty)
        return set(counts_on_a_grid(row, params, prompt=[0, V - 1], output=[3, 4]))

    row = [100.0] * V
    row[0], row[3], row[V - 1] = -1.0, 1e20, 300.0
    assert sampled(row, 1e300).isdisjoint({0, 3, 4, V - 1})
    row[3], row[4], row[V - 1] = 1e-20, -1e-20, -1.0
    assert sampled(row, 1e-300) == {3}
    for largest in (1e10, 3e38):  # beyond float32 then
        row[3] = row[V - 1] = largest
        assert sampled(row, 5e-324) <= {3, V - 1}


@pytest.mark.parametrize("other", [{}, {"temperature": 0}, {"top_k": 3}], ids=str)
def test_no_penalty_overcomes_a_ban(other):
    """A penalty of 1e300 makes a token unlikely, but a banned token stays below it."""
    for banned in (0, V - 1):
        params = SamplingParams(**other, repetition_penalty=1e300, min_tokens=9, stop_token_ids=[banned])
        assert banned not in counts_on_a_grid([-1e10] * V, params, prompt=range(V), output=[3, 4])


@pytest.mark.parametrize("other", [{"temperature": 0}, {}, {"top_p": 0.5}], ids=str)
@pytest.mark.parametrize("bias", [-1e300, 1e300])
def test_what_forbids_or_demands_every_token_harms_no_neighbour(bias, other):
    """The logits are finite, so a token comes out, with the model's log probabilities."""
    rows = random_logits(3)
    everything = {"logit_bias": dict.fromkeys(range(V), bias), "repetition_penalty": 2, "presence_penalty": 2}
    params = [SamplingParams(seed=seed, logprobs=2, **other, **(everything if seed == 1 else {})) for seed in range(3)]
    sampled = sample_rows(rows, [request_of(p, output=[1, V - 1]) for p in params])
    assert 0 <= sampled[1].token < V
    assert in_order(sampled) == [slow_scored(row.tolist(), s.token, 2) for row, s in zip(rows, sampled, strict=True)]
    alone = [sample_rows(rows[row : row + 1], [request_of(params[row], output=[1, V - 1])])[0] for row in (0, 2)]
    assert in_order([sampled[0], sampled[2]]) == in_order(alone)


# ---------------------------------------------------------------------------- counts that are kept


@given(
    st.lists(
        st.tuples(
            st.builds(SamplingParams, min_tokens=st.integers(0, 3), **PENALTIES),
            token_ids.filter(bool),
            st.lists(token_id, min_size=6, max_size=6),
            st.sets(st.integers(0, 6)),
        ),
        min_size=1,
        max_size=3,
    ),
    logits_strategy,
)
def test_step_by_step_after_a_gap_and_afresh_a_request_is_treated_the_same(examples, logits):
    """Counts are kept from step to step, and a request may miss any step."""
    requests = [request_of(params, prompt=prompt) for params, prompt, _, _ in examples]
    for step in range(7):
        there = [index for index, (_, _, _, steps) in enumerate(examples) if step in steps]
        if there:
            rows = changed_logits([logits] * len(there), [requests[index] for index in there]).tolist()
            for row, index in zip(rows, there, strict=True):
                params, prompt, output, _ = examples[index]
                assert row == slow_logits(logits, params, prompt, output[:step])
        for request, (_, _, output, _) in zip(requests, examples, strict=True):
            if step < 6:
                request.append(output[step])


def count_lines(rows: list[list[float]], requests: list[Request], interrupted_at: int = 0) -> int:
    """Sample; how many lines of sampler.py and penalties.py that took, up to where Ctrl-C took effect.

    interrupted_at: the line at which Ctrl-C is pressed.
    """
    number = 0

    def trace(frame, event, arg):
        nonlocal number
        if not frame.f_code.co_filename.endswith(("minicb/sampler.py", "minicb/penalties.py")):
            return None
        if event == "line":
            number += 1
            if number == interrupted_at:
                signal.raise_signal(signal.SIGINT)
        return trace

    before, handler = sys.gettrace(), signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.settrace(trace)
    try:
        sample_rows(rows, requests)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
        signal.signal(signal.SIGINT, handler)
    return number


def test_an_interruption_at_any_line_changes_no_count():
    """Also while new tokens are counted: the next step gives the same logits."""
    row = random_logits(1)[0].mul(8).round().div(8).tolist()
    examples = [
        (SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), [0, 1]),
        (SamplingParams(repetition_penalty=2, frequency_penalty=-0.5, logprobs=2), [3, V - 1, 3]),
        (SamplingParams(repetition_penalty=0.5, logit_bias={3: 1.5}), [7]),
    ]
    output = [3, 0, 3, 3, V - 1, 5]
    expected = [slow_logits(row, params, prompt, output) for params, prompt in examples]
    line, reached = 0, math.inf
    while reached >= line:
        line += 1
        requests = [request_of(params, prompt=prompt, output=output[:2]) for params, prompt in examples]
        sample_rows([row] * 3, requests)
        for request in requests:
            request.token_ids += output[2:]
        reached = count_lines([row] * 3, requests, interrupted_at=line)
        assert changed_logits([row] * 3, requests).tolist() == expected
    assert line > 100, "hardly anything was interrupted"


def test_a_step_counts_only_what_is_new():
    """Its work doesn't grow with the output or the prompt."""
    lines = set()
    for num_tokens in (3, 300):
        params = SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=1)
        request = request_of(params, prompt=[0, 1, 2] * num_tokens, output=[1] * num_tokens)
        first = count_lines([[0.0] * V], [request])
        request.append(2)
        lines.add(count_lines([[0.0] * V], [request]))
    assert len(lines) == 1
    assert first > 300


# ---------------------------------------------------------------------------- log probabilities


def slow_scored(logits: list[float], token: int, wanted: int) -> tuple[int, list[tuple[int, Logprob]]]:
    """The definition: a full log_softmax, sorted in full, of equal ones the lowest id first.

    The sampled token comes first, then the most likely ones by rank. If it is none of them, its rank is the number
    of tokens that are at least as likely, as in vLLM.
    """
    logprobs = torch.tensor(logits).log_softmax(-1).tolist()
    order = sorted(range(len(logits)), key=lambda token: (-logprobs[token], token))
    best = order[: len(logits) if wanted < 0 else wanted]
    rank = best.index(token) + 1 if token in best else sum(other >= logprobs[token] for other in logprobs)
    report = {token: Logprob(logprobs[token], rank)}
    report |= {other: Logprob(logprobs[other], place) for place, other in enumerate(best, 1)}
    return token, list(report.items())


WANTED = [0, 1, V - 1, V, V + 1, 10**9, -1, None]


@given(
    st.lists(
        logits_strategy | st.lists(st.sampled_from([0.0, 0.0, 1.0]), min_size=V, max_size=V), min_size=8, max_size=8
    ),
    st.permutations(WANTED),
    st.lists(params_strategy, min_size=8, max_size=8),
    st.lists(token_ids, min_size=8, max_size=8),
)
def test_logprobs_are_those_of_the_model(rows, wanted, params, outputs):
    """Bans, biases, penalties, temperatures and other rows don't change them."""
    params = [replace(p, logprobs=number) for p, number in zip(params, wanted, strict=True)]
    sampled = sample_rows(rows, [request_of(p, output=o, eos=[0]) for p, o in zip(params, outputs, strict=True)])
    for row, number, result in zip(rows, wanted, sampled, strict=True):
        if number is None:
            assert type(result) is int
            continue
        assert in_order([result]) == [slow_scored(row, result.token, number)]
        best = max(row)
        total = best + math.log(sum(math.exp(x - best) for x in row))
        for token, logprob in result.logprobs.items():
            assert logprob.logprob == pytest.approx(row[token] - total, abs=1e-5)


def test_logprobs_by_hand():
    """Probabilities 1/2, 1/4 and two of 1/8: which tokens, in which order, with which ranks."""
    row = [-1e9] * V
    row[9], row[4], row[2], row[7] = 2.0, 1.0, 0.0, 0.0
    row = [x * math.log(2) for x in row]

    def report(token: int, wanted: int) -> list[tuple[int, int]]:
        params = SamplingParams(temperature=0, logprobs=wanted, logit_bias={token: 1e300})
        [(sampled, logprobs)] = sample_rows([row], [request_of(params)])
        assert sampled == token
        for reported, logprob in logprobs.items():
            assert math.exp(logprob.logprob) == pytest.approx({9: 1 / 2, 4: 1 / 4, 2: 1 / 8, 7: 1 / 8}.get(reported, 0))
        return [(reported, logprob.rank) for reported, logprob in logprobs.items()]

    assert report(9, 0) == [(9, 1)]
    assert report(2, 0) == [(2, 4)]  # behind its equal
    assert report(9, 2) == [(9, 1), (4, 2)]
    assert report(4, 3) == [(4, 2), (9, 1), (2, 3)]
    assert report(7, 3) == [(7, 4), (9, 1), (4, 2), (2, 3)]
    assert report(7, 4) == [(7, 4), (9, 1), (4, 2), (2, 3)]
    assert report(2, 4) == [(2, 3), (9, 1), (4, 2), (7, 4)]
    assert report(0, 2) == [(0, V), (9, 1), (4, 2)]
    assert report(V - 1, -1)[:6] == [(V - 1, V), (9, 1), (4, 2), (2, 3), (7, 4), (0, 5)]


@pytest.mark.parametrize("vocab_size", [V, 1000])
def test_equals_at_the_edge_are_the_same_whatever_others_want(vocab_size):
    """topk may take any of them, and others for another k. The lowest ids are right, as for a greedy token."""
    rows = torch.zeros(5, vocab_size)
    rows[1, [3, vocab_size - 1]] = 1.0
    rows[2, ::2] = 1.0
    rows[3, : vocab_size // 2] = -1.0
    rows[4] = torch.arange(vocab_size) // 7
    for wanted in range(12):
        params = SamplingParams(temperature=0, logprobs=wanted)
        requests = [request_of(params)] * 5 + [request_of(SamplingParams(logprobs=wanted + 9))]
        with_more = sample_rows(torch.cat([rows, torch.randn(1, vocab_size)]), requests)[:5]
        expected = [slow_scored(row.tolist(), int(row.argmax()), wanted) for row in rows]
        assert in_order(with_more) == expected
        assert [in_order(sample_rows(row[None], [request_of(params)]))[0] for row in rows] == expected


# ---------------------------------------------------------------------------- distributions


def slow_probabilities(logits: list[float], params: SamplingParams) -> tuple[dict[int, float], float]:
    """The definition, in plain Python: what each token's probability is, and how close the call was.

    Temperature comes first. Then tokens less likely than min_p times the best are dropped, then all but the top_k
    best. The rest is renormalised, and a token is dropped if better ones add up to top_p.
    """
    best = max(logits)
    weights = [math.exp((x - best) / params.temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    margin = min(abs(w - params.min_p) for w in weights) if params.min_p > 0 else 1.0
    order = [token for token in order if weights[token] >= params.min_p]
    if params.top_k > 0:
        order = order[: params.top_k]
    kept, total, before = [], sum(weights[token] for token in order), 0.0
    for token in order:
        if params.top_p < 1:
            if kept:
                margin = min(margin, abs(before - params.top_p))
            if before >= params.top_p:
                break
        kept.append(token)
        before += weights[token] / total
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}, margin


@given(
    logits_strategy,
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.3, 1.0, 2.5]),
        top_k=st.sampled_from([0, 1, 2, 5, V, V + 1]),
        top_p=st.sampled_from([1.0, 1e-300, 1e-9, 0.1, 0.5, 0.9, 0.999]),
        min_p=st.sampled_from([0.0, 0.01, 0.2, 0.95]),
        min_tokens=st.integers(0, 3),
        **PENALTIES,
    ),
    token_ids.filter(bool),
    token_ids,
)
def test_samples_follow_the_definition(logits, params, prompt, output):
    """Bias and penalties before temperature, temperature before what truncates."""
    probabilities, margin = slow_probabilities(slow_logits(logits, params, prompt, output, [V - 1]), params)
    assume(margin > 1e-5)  # else float32 may rightly decide otherwise
    counts = counts_on_a_grid(logits, params, prompt=prompt, output=output, eos=[V - 1])
    assert_proportional(counts, probabilities)


@pytest.mark.parametrize("top_p", [1e-9, 1e-45, 1e-46, 1e-300])
def test_the_smallest_top_p_keeps_the_best_token(top_p):
    """1e-46 is above zero, but zero in float32."""
    rows = random_logits(4)
    tokens = sample_rows(rows, [request_of(SamplingParams(top_p=top_p, seed=seed)) for seed in range(4)])
    assert tokens == rows.argmax(-1).tolist()


def test_top_p_stops_where_the_sum_is_reached_exactly():
    """Four tokens of a quarter each, which float32 holds exactly: two of them are a half, not three."""
    logits = [0.0] * 4 + [-1e9] * (V - 4)
    assert_proportional(counts_on_a_grid(logits, SamplingParams(top_p=0.5)), {0: 0.5, 1: 0.5})
    assert_proportional(counts_on_a_grid(logits, SamplingParams(top_p=0.51)), {0: 1 / 3, 1: 1 / 3, 2: 1 / 3})


def test_min_p_of_one_keeps_the_best_and_its_equals():
    logits = [0.0] * V
    logits[3] = logits[9] = 5.0
    assert_proportional(counts_on_a_grid(logits, SamplingParams(min_p=1.0)), {3: 0.5, 9: 0.5})


def test_the_least_and_the_largest_random_number_give_a_token_that_is_possible():
    """Tokens of probability 0 at either end of the running sum must not come."""
    logits = [-1e9] * 3 + [0.0] * 4 + [-1e9] * (V - 7)
    for params in (SamplingParams(), SamplingParams(top_p=0.9999), SamplingParams(top_k=4)):
        for number, expected in ((0.0, 3), (0.25, 4), (0.75, 6), (1 - 2**-24, 6)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(minicb.sampler, "uniform", lambda seed, index, number=number: number)
                assert sample_rows([logits], [request_of(params)]) == [expected]


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.6}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9, "min_p": 0.02}],
    ids=str,
)
def test_frequencies_with_real_seeds(params):
    """With the real random numbers: 4000 requests that differ only in their seed."""
    logits = random_logits(1, scale=1.5)[0].tolist()
    requests = [request_of(SamplingParams(**params, seed=seed)) for seed in range(4000)]
    counts = Counter(sample_rows([logits] * 4000, requests))
    probabilities, _ = slow_probabilities(logits, requests[0].params)
    assert set(counts) <= set(probabilities)
    chi_square = sum((counts[token] - 4000 * p) ** 2 / (4000 * p) for token, p in probabilities.items())
    freedom = len(probabilities) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


WARPERS = {
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 2.0, "top_k": 20},
        {"top_p": 0.3},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"temperature": 1.3, "top_k": 12, "top_p": 0.8},
    ],
    ids=str,
)
def test_transformers_agrees(params):
    """Which tokens are allowed, and how likely each is."""
    warp = LogitsProcessorList(WARPERS[name](value) for name, value in params.items())
    for logits in random_logits(5, seed=1, scale=1.5):
        warped = warp(torch.zeros(1, 0, dtype=torch.long), logits[None].clone())[0]
        expected = warped.softmax(-1)
        probabilities = {token: p for token, p in enumerate(expected.tolist()) if warped[token] > -math.inf}
        assert_proportional(counts_on_a_grid(logits.tolist(), SamplingParams(**params)), probabilities)
        assert slow_probabilities(logits.tolist(), SamplingParams(**params))[0].keys() == probabilities.keys()


# ---------------------------------------------------------------------------- min_tokens


def test_min_tokens_bans_every_eos_and_stop_token_until_then():
    """The best four tokens all end the request; the last of the vocabulary and token 0 are among them."""
    row = torch.zeros(V)
    row[[V - 1, 0, 5, 6]] = torch.tensor([9.0, 8.0, 7.0, 6.0])
    row[11] = 1.0
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[5, 6])
    for num_output_tokens, expected in ((0, 11), (1, 11), (2, V - 1), (3, V - 1)):
        request = request_of(params, num_output_tokens=num_output_tokens, eos=[0, V - 1])
        assert sample_rows(row[None], [request]) == [expected]
    # Nobody else's row is touched, nor token V - 1 where nothing stops.
    plain = request_of(SamplingParams(temperature=0))
    unstoppable = request_of(SamplingParams(temperature=0, min_tokens=5))
    banned = request_of(params, eos=[0, V - 1])
    assert sample_rows(row.expand(4, V), [plain, banned, unstoppable, banned]) == [V - 1, 11, V - 1, 11]


def test_a_banned_token_is_never_drawn_and_the_others_share_its_part():
    logits = random_logits(1)[0].tolist()
    banned = {0, 5, V - 1}
    params = SamplingParams(min_tokens=1, stop_token_ids=[5])
    weights = {token: math.exp(x) for token, x in enumerate(logits) if token not in banned}
    expected = {token: weight / sum(weights.values()) for token, weight in weights.items()}
    assert_proportional(counts_on_a_grid(logits, params, eos=[0, V - 1]), expected)


def test_ignore_eos_leaves_eos_to_be_sampled_before_min_tokens():
    """It is a token like any other then; the caller's own stop tokens still wait."""
    row = torch.zeros(1, V)
    row[0, 3], row[0, 4] = 8.0, 9.0
    params = SamplingParams(temperature=0, min_tokens=2, ignore_eos=True, stop_token_ids=[4])
    assert sample_rows(row, [request_of(params, eos=[3])]) == [3]
