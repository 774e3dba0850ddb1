"""minicb/request.py: what a request may ask for, and the few numbers that say how far it is."""

import sys
from fractions import Fraction
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicb import SamplingParams
from minicb.checks import check_int
from minicb.request import Logprob, Request, RequestState, ScoredToken

NAN, INF = float("nan"), float("inf")
NOT_NUMBERS = ["1", None, [], {}, 1j, True, False]
NOT_INTEGERS = ["1", [], 1.0, 1.5, NAN, INF, 1j, True, False, np.float64(1), np.bool_(True)]
# What OpenAI's API allows.
NOT_WITHIN_TWO = [*NOT_NUMBERS, -2.0001, 2.0001, 100, NAN, INF, -INF]
WITHIN_TWO = [-2, 2, 0, -0.0, 0.5, Fraction(-1, 3), np.float32(2), np.int64(-2)]

BAD = {
    "temperature": [*NOT_NUMBERS, -1, -1e-9, NAN, INF, -INF, np.float64("nan")],
    "top_p": [*NOT_NUMBERS, 0, -0.1, 1.0001, 2, NAN, INF],
    "min_p": [*NOT_NUMBERS, -0.1, 1.0001, 2, NAN, INF],
    "top_k": [*NOT_INTEGERS, None, -2],
    "min_tokens": [*NOT_INTEGERS, None, -1],
    "max_tokens": [*NOT_INTEGERS, 0, -1],
    "seed": NOT_INTEGERS,
    "ignore_eos": [None, 0, 1, "yes"],
    # A string would be taken apart into letters, and a dict into its keys.
    "stop_token_ids": [5, "5", "", {5: 1}, [-1], [1.0], [True], ["5"], [None], [[5]]],
    "n": [*NOT_INTEGERS, None, 0, -1, 16385, 10**400],
    "logprobs": [*NOT_INTEGERS, -2],
    "presence_penalty": NOT_WITHIN_TWO,
    "frequency_penalty": NOT_WITHIN_TWO,
    "repetition_penalty": [*NOT_NUMBERS, 0, -0.0, -1, -1e-300, NAN, INF, -INF],
    # An empty string would end a request at once; a set has no order, so what would be found first?
    "stop": ["", [""], ["a", ""], ("",), 5, b"a", [b"a"], [5], [None], [["a"]], {"a"}, {"a": 1}, True],
    "logit_bias": [
        *([], [5], [(5, 1.0)], "5", 5, True, {5}),
        *({key: 1.0} for key in (-1, 1.0, True, "5", None, (5,), np.float64(5))),
        *({5: bias} for bias in (*NOT_NUMBERS, NAN, INF, -INF, np.float32("inf"), 10**400)),
        {4: 1.0, 5: NAN},
    ],
}
GOOD = {
    "temperature": [0, 1e-45, 1, 1e4, 1e300, Fraction(1, 3), np.float32(0.5), np.int64(2)],
    "top_p": [1e-300, 0.5, 1, np.float64(0.5)],
    "min_p": [0, 0.5, 1, np.float16(0.5)],
    "top_k": [-1, 0, 1, 10**9, np.int64(3), np.uint8(3)],
    "min_tokens": [0, 16, np.int32(2)],
    "max_tokens": [1, 10**9, None, np.int64(7)],
    "seed": [None, 0, -1, 2**63 - 1, -(2**63), np.uint64(2**63 - 1)],
    "ignore_eos": [True, False],
    "stop_token_ids": [None, [], [0], (1, 2), {3}, frozenset({4}), [np.int64(5)]],
    "n": [1, 2, 16384, np.int64(3)],
    "logprobs": [None, -1, 0, 1, 10**9, np.int64(3)],
    "presence_penalty": WITHIN_TWO,
    "frequency_penalty": WITHIN_TWO,
    "repetition_penalty": [1e-300, 0.5, 1, 1e300, Fraction(4, 3), np.float32(1.5), np.int64(2)],
    "stop": [None, [], (), "a", "ab", " ", "\n", ["a", "b"], ("a", "a"), ["ab", "a"], "\0", "é", "\U0001f600"],
    "logit_bias": [
        *(None, {}, {0: 1}, {10**9: -1.5}, {np.int64(5): np.float32(2), 6: Fraction(1, 3)}),
        *({5: bias} for bias in (0, -0.0, -100, 1e300, -1e300, 5e-324)),
        MappingProxyType({5: 1.0}),
    ],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_value_out_of_range_is_an_error_that_names_the_field(name, value):
    # Of a dict also which part, and for a token's bias, which token.
    with pytest.raises(ValueError, match=rf"^{name}(: token id| of token 5)? must be "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_a_value_in_range_is_accepted(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize("max_tokens", [0, -1, True, 1.5])
def test_the_error_says_what_was_given_and_what_is_wanted(max_tokens):
    with pytest.raises(ValueError, match=rf"^max_tokens must be an integer >= 1, not {max_tokens}$"):
        SamplingParams(max_tokens=max_tokens)


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
def test_an_integer_too_large_for_a_float_is_a_value_error_too(name):
    with pytest.raises(ValueError, match=f"^{name} must be "):  # not an OverflowError
        SamplingParams(**{name: 10**400})


def test_an_unknown_parameter_is_an_error():
    with pytest.raises(TypeError, match="top_q"):
        SamplingParams(top_q=0.5)


def test_min_tokens_above_max_tokens_is_an_error():
    SamplingParams(min_tokens=4, max_tokens=4)
    SamplingParams(min_tokens=4, max_tokens=None)
    with pytest.raises(ValueError, match="min_tokens is 5, more than max_tokens, which is 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_several_samples_need_a_temperature():
    """All would be the same without, so it is a mistake; as in vLLM."""
    SamplingParams(n=1, temperature=0)
    SamplingParams(n=2, temperature=1e-300)
    for n in (2, 16384):
        with pytest.raises(ValueError, match=rf"^n must be 1 where temperature is 0, .*not {n}$"):
            SamplingParams(n=n, temperature=0)


def test_integers_of_numpy_become_those_of_python():
    """NumPy's wrap around: a prompt of 100 tokens and np.int8(100) more would be -56 together."""
    params = SamplingParams(
        max_tokens=np.int8(100),
        min_tokens=np.uint8(1),
        top_k=np.int16(5),
        seed=np.uint64(2**63 - 1),
        n=np.uint8(255),
        logprobs=np.int8(127),
    )
    names = ("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs")
    assert [type(getattr(params, name)) for name in names] == [int] * 6
    assert 100 + params.max_tokens == 200
    assert params.seed == 2**63 - 1


def test_params_can_be_shared_because_they_cannot_be_changed():
    params = SamplingParams()
    with pytest.raises(AttributeError):
        params.max_tokens = 5
    assert params == SamplingParams(
        n=1,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        max_tokens=16,
        stop=None,
        logprobs=None,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logit_bias=None,
    )


@given(st.integers() | st.booleans() | st.floats() | st.text(), st.none() | st.integers(), st.none() | st.integers())
def test_check_int_accepts_exactly_the_integers_in_range(value, minimum, below):
    in_range = type(value) is int and (minimum is None or value >= minimum) and (below is None or value < below)
    if in_range:
        check_int("field", value, minimum, below)
    else:
        with pytest.raises(ValueError, match="^field must be an integer"):
            check_int("field", value, minimum, below)


def test_check_int_names_both_limits():
    with pytest.raises(ValueError, match=r"^prompt token id must be an integer >= 0 and < 32, not 32$"):
        check_int("prompt token id", 32, minimum=0, below=32)


# ---------------------------------------------------------------------------- Request


def test_prompt_and_output_are_one_list_of_tokens():
    request = Request("a", [7, 8, 9], SamplingParams())
    assert request.state is RequestState.WAITING
    assert (request.num_prompt_tokens, request.num_tokens, request.num_output_tokens) == (3, 3, 0)
    assert request.output_token_ids == []
    request.token_ids += [1, 2]
    assert (request.num_prompt_tokens, request.num_tokens, request.num_output_tokens) == (3, 5, 2)
    assert request.output_token_ids == [1, 2]
    # Progress is told by counts, so they are what a log has to show.
    assert repr(request) == "Request('a', WAITING, 3 prompt + 2 output tokens, 0 computed)"


def test_a_request_keeps_its_own_copies():
    """What the caller does with his lists and dicts later must not reach a running request."""
    prompt, stops, strings, bias = [1, 2], [5], ["a"], {7: 1.5}
    request = Request("a", prompt, SamplingParams(stop_token_ids=stops, stop=strings, logit_bias=bias))
    prompt.append(3)
    stops.append(6)
    strings[0] = ""
    strings.append("b")
    bias[7] = NAN
    bias[10**9] = 2.0
    request.output_token_ids.append(4)
    assert request.token_ids == [1, 2]
    assert request.stop_token_ids == {5}
    assert list(request.stop_strings) == ["a"]
    assert request.logit_bias == {7: 1.5}


@pytest.mark.parametrize(
    ("stop", "strings"), [(None, []), ([], []), ("ab", ["ab"]), (["ab"], ["ab"]), (("b", "ab"), ["b", "ab"])]
)
def test_one_stop_string_is_a_list_of_one_and_not_its_letters(stop, strings):
    assert list(Request("a", [1], SamplingParams(stop=stop)).stop_strings) == strings


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_a_request_knows_whether_it_penalizes(name):
    """Only then are its tokens counted."""
    neutral = float(name == "repetition_penalty")
    assert not Request("a", [1], SamplingParams(logit_bias={1: 1.0}, logprobs=1)).penalizes
    for value in (neutral, int(neutral), np.float32(neutral)):
        assert not Request("a", [1], SamplingParams(**{name: value})).penalizes
    for value in (0.5, -0.5 if neutral == 0 else 1.5):
        assert Request("a", [1], SamplingParams(**{name: value})).penalizes


def test_log_probabilities_of_sampled_tokens_add_up():
    """Whatever else is reported of a position; a prompt of several tokens doesn't count."""
    request = Request("a", [7, 8, 9], SamplingParams(logprobs=1))
    assert (request.cumulative_logprob, request.logprobs) == (0, [])
    reports = [{4: Logprob(-0.5, 2), 3: Logprob(-0.25, 1)}, {3: Logprob(-1.0, 1)}, {7: Logprob(-2.0, 5)}]
    for number, (report, total) in enumerate(zip(reports, [-0.5, -1.5, -3.5], strict=True), 1):
        request.append(ScoredToken(next(iter(report)), report))
        assert (request.cumulative_logprob, request.logprobs) == (total, reports[:number])
    assert request.token_ids == [7, 8, 9, 4, 3, 7]


@pytest.mark.parametrize("line", range(1, 8))
def test_a_token_that_was_not_taken_in_whole_is_taken_in_again_once(line):
    """An interruption between any two lines: the token is there with its report, or will be when it comes again."""
    request = Request("a", [1], SamplingParams(logprobs=0))
    reports = [{4: Logprob(-0.5, 2)}, {3: Logprob(-1.0, 1)}, {4: Logprob(-2.0, 1)}]
    request.append(ScoredToken(4, reports[0]))
    lines = [None] * line

    def trace(frame, event, arg):
        if event == "line" and frame.f_code.co_name == "append":
            lines.pop()
            if not lines:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        request.append(ScoredToken(3, reports[1]))
    except KeyboardInterrupt:
        sys.settrace(before)
        assert request.output_token_ids == [4]
        request.append(ScoredToken(3, reports[1]))
    finally:
        sys.settrace(before)
    request.append(ScoredToken(4, reports[2]))
    assert (request.token_ids, request.logprobs, request.cumulative_logprob) == ([1, 4, 3, 4], reports, -3.5)


def test_the_seed_of_the_params_goes_before_the_one_drawn_for_the_request():
    assert Request("a", [1], SamplingParams(seed=0), seed=7).seed == 0
    assert Request("a", [1], SamplingParams(), seed=7).seed == 7


def test_ignore_eos_takes_away_eos_but_not_the_stop_tokens():
    """Where it is decided: everybody else looks only at these two sets."""
    request = Request("a", [1], SamplingParams(stop_token_ids=[5]), eos_token_ids=[2, 3])
    assert (request.eos_token_ids, request.stop_token_ids) == ({2, 3}, {5})
    request = Request("a", [1], SamplingParams(stop_token_ids=[5], ignore_eos=True), eos_token_ids=[2, 3])
    assert (request.eos_token_ids, request.stop_token_ids) == (set(), {5})
