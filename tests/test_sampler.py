"""minicb/sampler.py: from logits to tokens, where no row of a batch may notice the others.

What is random is checked exactly: with the random numbers replaced by an even grid over [0, 1),
each token must come out in proportion to its probability, to within one grid point.
"""

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.logits_process import MinPLogitsWarper

import minicb.sampler
from minicb import SamplingParams
from minicb.request import Request
from minicb.sampler import sample, uniform

V = 32
GRID = 2000


def request_of(params: SamplingParams, *, num_output_tokens=0, eos=()) -> Request:
    request = Request("a", [1, 2, 3], params, eos_token_ids=eos)
    request.token_ids += [0] * num_output_tokens
    return request


def random_logits(rows: int, seed=0, scale=3.0) -> torch.Tensor:
    return scale * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))


def sample_rows(rows: list[list[float]] | torch.Tensor, requests: list[Request]) -> list[int | None]:
    return sample(torch.as_tensor(rows, dtype=torch.float32).clone(), requests)  # `sample` writes into it


def counts_on_a_grid(logits: list[float], params: SamplingParams, **kwargs) -> Counter:
    """How often each token comes, of GRID draws whose random numbers divide [0, 1) evenly."""
    grid = [(k + 0.5) / GRID for k in range(GRID)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minicb.sampler, "uniform", lambda seed, index: grid.pop())
        return Counter(sample_rows([logits] * GRID, [request_of(params, **kwargs)] * GRID))


def assert_proportional(counts: Counter, probabilities: dict[int, float]) -> None:
    """A token's part of [0, 1) is an interval, so the grid has as many points in it, give or take one."""
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
    """Not at the parameters of sampling, nor at chance where tokens are equal."""
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
    """Somebody's seed of today must give the same text with the next version."""
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
    """Not so the same index with another seed, or the same seed at another index."""
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

params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 1e-300, 1e-45, 1e-8, 1e-4, 0.7, 1, 1.5, 1e4, 1e39]),
    top_k=st.sampled_from([-1, 0, 1, 2, 31, V, V + 1, 10**9]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    seed=st.integers(0, 5),
    min_tokens=st.integers(0, 3),
    stop_token_ids=st.none() | st.lists(st.integers(0, V - 1), max_size=3),
)
logit = st.integers(-40, 40).map(lambda x: x / 8)  # few values, so that there are ties
bad_logit = st.sampled_from([math.nan, math.inf, -math.inf])


@st.composite
def row_and_request(draw):
    row = draw(st.lists(logit, min_size=V, max_size=V))
    if draw(st.integers(0, 4)) == 0:
        row[draw(st.integers(0, V - 1))] = draw(bad_logit)
    return row, request_of(draw(params_strategy), num_output_tokens=draw(st.integers(0, 4)), eos=[V - 1])


@given(st.lists(row_and_request(), min_size=2, max_size=8))
def test_a_mixture_of_everything_gives_each_row_what_it_has_alone(rows_and_requests):
    """Nothing that one row asks for reaches another."""
    rows, requests = (list(column) for column in zip(*rows_and_requests, strict=True))
    together = sample_rows(rows, requests)
    assert together == [sample_rows([row], [request])[0] for row, request in rows_and_requests]
    assert together[::-1] == sample_rows(rows[::-1], requests[::-1])
    for row, request, token in zip(rows, requests, together, strict=True):
        assert (token is None) == (not all(map(math.isfinite, row)))
        assert token is None or 0 <= token < V
        if token is not None and request.num_output_tokens < request.params.min_tokens:
            assert token not in {V - 1, *(request.params.stop_token_ids or ())}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.5}], ids=str)
def test_a_row_that_is_not_finite_gives_none_and_leaves_its_neighbours_alone(bad, params):
    rows = random_logits(5)
    requests = [request_of(SamplingParams(**params, seed=seed)) for seed in range(5)]
    expected = sample_rows(rows, requests)
    assert None not in expected
    rows[1, 7] = bad
    rows[3] = bad
    assert sample_rows(rows, requests) == [expected[0], None, expected[2], None, expected[4]]


def test_a_ban_does_not_hide_a_bad_logit():
    """min_tokens overwrites logits, and must not overwrite the evidence."""
    rows = random_logits(1)
    rows[0, 5] = math.nan
    request = request_of(SamplingParams(temperature=0, min_tokens=1, stop_token_ids=[5]))
    assert sample_rows(rows, [request]) == [None]


def test_top_k_of_any_size_in_one_batch():
    """V = 32: -1, 0, 32, 33, 10**9 and what is no float keep all tokens, 1 only the best."""
    rows = random_logits(1).expand(7, V)
    requests = [request_of(SamplingParams(top_k=k, seed=4)) for k in (-1, 0, 1, 32, 33, 10**9, 10**400)]
    tokens = sample_rows(rows, requests)
    assert tokens[2] == int(rows[0].argmax())
    assert tokens == [sample_rows(rows[:1], [request])[0] for request in requests]
    for k in (-1, 0, 32, 33, 10**9):
        counts = counts_on_a_grid([0.0] * V, SamplingParams(top_k=k))
        assert_proportional(counts, dict.fromkeys(range(V), 1 / V))
    assert counts_on_a_grid([0.0] * V, SamplingParams(top_k=1)) == {0: GRID}


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


# ---------------------------------------------------------------------------- distributions


def slow_probabilities(logits: list[float], params: SamplingParams) -> tuple[dict[int, float], float]:
    """The definition, in plain Python: what each token's probability is, and how close the call was.

    Temperature first; then tokens less likely than min_p times the best go; then all but the top_k
    best; of what is left, renormalised, those go whose better ones add up to top_p already.
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
    st.lists(logit, min_size=V, max_size=V),
    st.sampled_from([0.3, 1.0, 2.5]),
    st.sampled_from([0, 1, 2, 5, V, V + 1]),
    st.sampled_from([1.0, 1e-300, 1e-9, 0.1, 0.5, 0.9, 0.999]),
    st.sampled_from([0.0, 0.01, 0.2, 0.95]),
)
def test_samples_follow_the_definition(logits, temperature, top_k, top_p, min_p):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probabilities, margin = slow_probabilities(logits, params)
    assume(margin > 1e-5)  # else float32 may rightly decide otherwise
    assert_proportional(counts_on_a_grid(logits, params), probabilities)


@pytest.mark.parametrize("top_p", [1e-9, 1e-45, 1e-46, 1e-300])
def test_the_smallest_top_p_keeps_the_best_token(top_p):
    """1e-46 is above zero, as it has to be, but not in float32."""
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
    """At either end of the running sum lie tokens of probability 0, which must not come."""
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
    """The whole way, random numbers included: 4000 requests that differ in their seed only."""
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
