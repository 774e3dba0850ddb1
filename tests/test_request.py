"""minicb/request.py: what a request may ask for, and the few numbers that say how far it is."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicb import SamplingParams
from minicb.checks import check_int
from minicb.request import Request, RequestState

NAN, INF = float("nan"), float("inf")
NOT_NUMBERS = ["1", None, [], {}, 1j, True, False]
NOT_INTEGERS = ["1", [], 1.0, 1.5, NAN, INF, 1j, True, False, np.float64(1), np.bool_(True)]

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
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_value_out_of_range_is_an_error_that_names_the_field(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_a_value_in_range_is_accepted(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize("max_tokens", [0, -1, True, 1.5])
def test_the_error_says_what_was_given_and_what_is_wanted(max_tokens):
    with pytest.raises(ValueError, match=rf"^max_tokens must be an integer >= 1, not {max_tokens}$"):
        SamplingParams(max_tokens=max_tokens)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
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


def test_integers_of_numpy_become_those_of_python():
    """NumPy's wrap around: a prompt of 100 tokens and np.int8(100) more would be -56 together."""
    params = SamplingParams(
        max_tokens=np.int8(100), min_tokens=np.uint8(1), top_k=np.int16(5), seed=np.uint64(2**63 - 1)
    )
    assert [type(x) for x in (params.max_tokens, params.min_tokens, params.top_k, params.seed)] == [int] * 4
    assert 100 + params.max_tokens == 200
    assert params.seed == 2**63 - 1


def test_params_can_be_shared_because_they_cannot_be_changed():
    params = SamplingParams()
    with pytest.raises(AttributeError):
        params.max_tokens = 5
    assert params == SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=16)


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
    """What the caller does with his lists later must not reach a running request."""
    prompt, stops = [1, 2], [5]
    request = Request("a", prompt, SamplingParams(stop_token_ids=stops))
    prompt.append(3)
    stops.append(6)
    request.output_token_ids.append(4)
    assert request.token_ids == [1, 2]
    assert request.stop_token_ids == {5}


def test_the_seed_of_the_params_goes_before_the_one_drawn_for_the_request():
    assert Request("a", [1], SamplingParams(seed=0), seed=7).seed == 0
    assert Request("a", [1], SamplingParams(), seed=7).seed == 7


def test_ignore_eos_takes_away_eos_but_not_the_stop_tokens():
    """Where it is decided: everybody else looks only at these two sets."""
    request = Request("a", [1], SamplingParams(stop_token_ids=[5]), eos_token_ids=[2, 3])
    assert (request.eos_token_ids, request.stop_token_ids) == ({2, 3}, {5})
    request = Request("a", [1], SamplingParams(stop_token_ids=[5], ignore_eos=True), eos_token_ids=[2, 3])
    assert (request.eos_token_ids, request.stop_token_ids) == (set(), {5})
