"""minicb/params.py and minicb/request.py: what a caller may ask for, a request's progress and end, and its output."""

import copy
import pickle
from fractions import Fraction
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicb.checks import check_int
from minicb.outputs import CompletionOutput, LazyOutput
from minicb.params import SamplingParams, SchedulingParams
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
    # list("ab") and list({1: 2}) would work, and mean something else.
    "stop_token_ids": [5, "5", "", {5: 1}, [-1], [1.0], [True], ["5"], [None], [[5]]],
    "n": [*NOT_INTEGERS, None, 0, -1, 16385, 10**400],
    "logprobs": [*NOT_INTEGERS, -2],
    "presence_penalty": NOT_WITHIN_TWO,
    "frequency_penalty": NOT_WITHIN_TWO,
    "repetition_penalty": [*NOT_NUMBERS, 0, -0.0, -1, -1e-300, NAN, INF, -INF],
    # An empty string would end a request at once. A set has no order, but the stop string that is found first counts.
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
    # For logit_bias also the key, or the token with the wrong bias.
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
    """Greedy samples are all the same, so n > 1 is a mistake, as in vLLM."""
    SamplingParams(n=1, temperature=0)
    SamplingParams(n=2, temperature=1e-300)
    for n in (2, 16384):
        with pytest.raises(ValueError, match=rf"^n must be 1 where temperature is 0, .*not {n}$"):
            SamplingParams(n=n, temperature=0)


def test_numpy_integers_become_python_integers():
    """NumPy's wrap around: 100 + np.int8(100) is -56."""
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
    for params, name in ((SamplingParams(), "max_tokens"), (SchedulingParams(), "priority")):
        with pytest.raises(AttributeError):
            setattr(params, name, 5)


BAD_SCHEDULING = {
    "priority": [*NOT_INTEGERS, None, 2**63, -(2**63) - 1],
    "client": [None, 5, b"a", ["a"]],
    "expected_output_len": [*NOT_INTEGERS, 0, -1, 2**63],
}
GOOD_SCHEDULING = {
    "priority": [0, -1, 2**63 - 1, -(2**63), np.int64(3)],
    "client": ["", "a", "\0"],
    "expected_output_len": [None, 1, 2**63 - 1, np.int8(100)],
}


@pytest.mark.parametrize(("name", "value"), [(n, value) for n, values in BAD_SCHEDULING.items() for value in values])
def test_a_scheduling_value_out_of_range_is_an_error_that_names_the_field(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be "):
        SchedulingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), [(n, value) for n, values in GOOD_SCHEDULING.items() for value in values])
def test_a_scheduling_value_in_range_is_accepted(name, value):
    accepted = getattr(SchedulingParams(**{name: value}), name)
    assert accepted == value
    assert type(accepted) in (int, str, type(None))


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


# ---------------------------------------------------------------------------- a request


def make_request(prompt=(1,), **params) -> Request:
    return Request("a", list(prompt), SamplingParams(**params))


def test_prompt_and_output_are_one_list_of_tokens():
    request = make_request([7, 8, 9])
    for output in ([], [1], [1, 2]):
        if output:
            request.append(output[-1])
        assert request.token_ids == [7, 8, 9, *output]
        assert (request.num_prompt_tokens, request.num_tokens) == (3, 3 + len(output))
        assert (request.num_output_tokens, request.output_token_ids) == (len(output), output)
    request.num_computed_tokens = 4
    assert request.num_uncomputed == 1
    assert (request.index, request.seed, request.samples) == (0, 0, [request])
    assert repr(request) == "Request('a', WAITING, 3 prompt + 2 output tokens, 4 computed)"


def test_a_request_keeps_its_own_copies():
    """A caller may change his lists and dicts while the request runs."""
    prompt, stops, strings, bias = [1, 2], [5], ["a"], {7: 1.5}
    request = Request("a", prompt, SamplingParams(stop_token_ids=stops, stop=strings, logit_bias=bias))
    prompt.append(3)
    stops.append(6)
    strings[0] = ""
    bias[7] = NAN
    request.output_token_ids.append(4)
    assert (request.token_ids, request.stop_token_ids) == ([1, 2], {5})
    assert (list(request.stop_strings), request.logit_bias) == (["a"], {7: 1.5})


@pytest.mark.parametrize(
    ("stop", "strings"), [(None, []), ([], []), ("ab", ["ab"]), (["ab"], ["ab"]), (("b", "ab"), ["b", "ab"])]
)
def test_one_stop_string_is_a_list_of_one_and_not_its_letters(stop, strings):
    assert list(make_request(stop=stop).stop_strings) == strings


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_a_request_knows_whether_it_penalizes(name):
    """Only then are its tokens counted."""
    neutral = float(name == "repetition_penalty")
    assert not make_request(logit_bias={1: 1.0}, logprobs=1).penalizes
    for value in (neutral, int(neutral), np.float32(neutral)):
        assert not make_request(**{name: value}).penalizes
    for value in (0.5, -0.5 if neutral == 0 else 1.5):
        assert make_request(**{name: value}).penalizes


def test_log_probabilities_of_sampled_tokens_add_up():
    """Other tokens of a report, and the prompt's, don't count."""
    request = make_request([7, 8, 9], logprobs=1)
    assert (request.cumulative_logprob, request.logprobs) == (0, [])
    reports = [{4: Logprob(-0.5, 2), 3: Logprob(-0.25, 1)}, {3: Logprob(-1.0, 1)}, {7: Logprob(-2.0, 5)}]
    for number, (report, total) in enumerate(zip(reports, [-0.5, -1.5, -3.5], strict=True), 1):
        request.append(ScoredToken(next(iter(report)), report))
        assert (request.cumulative_logprob, request.logprobs) == (total, reports[:number])
    assert request.token_ids == [7, 8, 9, 4, 3, 7]


def test_a_sample_has_the_seed_of_the_params_or_the_one_it_was_given():
    for index in (0, 1, 3):
        assert Request("a", [1], SamplingParams(seed=0), seed=7, index=index).seed == index
        assert Request("a", [1], SamplingParams(seed=np.int8(5)), seed=7, index=index).seed == 5 + index
        assert Request("a", [1], SamplingParams(), seed=7, index=index).seed == 7


def test_all_ended_is_about_all_samples():
    first, second = make_request(), make_request()
    assert (first.samples, first.all_ended) == ([first], False)
    first.samples = second.samples = [first, second]
    for ended in (first, second):
        assert not first.all_ended and not second.all_ended
        ended.state = RequestState.FINISHED
    assert first.all_ended and second.all_ended


# ---------------------------------------------------------------------------- how it ends


class Text:
    """Finds a stop string in every text."""

    def find_stop(self, may_stop: bool) -> str | None:
        return "abc" if may_stop else None


@settings(max_examples=10 * settings.default.max_examples)
@given(
    token=st.sampled_from([2, 3, 5, 9]),
    ignore_eos=st.booleans(),
    num_output=st.integers(1, 5),
    min_tokens=st.integers(0, 5),
    max_num_tokens=st.integers(4, 9),
    stop=st.sampled_from([None, "abc"]),
    text=st.sampled_from([None, Text()]),
)
def test_a_token_ends_its_request_as_eos_then_stop_token_then_stop_string_then_by_length(
    token, ignore_eos, num_output, min_tokens, max_num_tokens, stop, text
):
    """5 is EOS and a stop token. No stop counts within min_tokens output tokens, and no stop string without text (the
    simulator has none)."""
    params = SamplingParams(
        stop_token_ids=[3, 5], ignore_eos=ignore_eos, min_tokens=min_tokens, max_tokens=None, stop=stop
    )
    request = Request("a", [2, 3, 5], params, eos_token_ids=[2, 5])
    request.max_num_tokens, request.length_reason, request.text = max_num_tokens, "the cache is full", text
    for _ in range(num_output):
        request.append(token)
    ending = None
    if 3 + num_output >= max_num_tokens:
        ending = ("length", "the cache is full")
    if num_output > min_tokens:
        if stop and text:
            ending = ("stop", "abc")
        if token in (3, 5):
            ending = ("stop", token)
        if token in (2, 5) and not ignore_eos:
            ending = ("stop", None)
    assert request.ending() == ending


# ---------------------------------------------------------------------------- its output


@given(st.none() | st.just(1), st.integers(0, 3), st.integers(0, 3), st.sampled_from([None, "length"]))
def test_an_output_read_later_equals_one_read_at_once(logprobs, num_before, num_after, finish_reason):
    """In what it is, in its repr, as a copy and pickled. The request goes on, and nothing in the output changes."""
    request = Request("a", [7, 8], SamplingParams(logprobs=logprobs), index=2)
    request.finish_reason, request.stop_reason = finish_reason, finish_reason and "a sentence"

    def append(token: int) -> None:
        request.append(token if logprobs is None else ScoredToken(token, {token: Logprob(-1.0, token)}))

    for token in range(num_before):
        append(token)
    expected = CompletionOutput(
        index=2,
        text="text",
        token_ids=list(range(num_before)),
        finish_reason=finish_reason,
        stop_reason=finish_reason and "a sentence",
        logprobs=None if logprobs is None else [{token: Logprob(-1.0, token)} for token in range(num_before)],
        cumulative_logprob=None if logprobs is None else sum([-1.0] * num_before, 0.0),
    )
    early, late = LazyOutput(request, "text"), LazyOutput(request, "text")
    assert (early.token_ids, early.logprobs) == (expected.token_ids, expected.logprobs)
    for token in range(num_before, num_before + num_after):
        append(token)
    for output in (copy.copy(late), copy.deepcopy(early), pickle.loads(pickle.dumps(late))):
        assert output == expected
    assert late == early
    assert late != LazyOutput(request, "other")


def test_what_a_caller_does_to_an_output_reaches_neither_the_request_nor_another_output():
    request = make_request([7], logprobs=0)
    for num_tokens in range(2):
        first, second = LazyOutput(request, ""), LazyOutput(request, "")
        for output in (first, second):
            assert (len(output.token_ids), len(output.logprobs)) == (num_tokens, num_tokens)
            output.token_ids.append(99)
            output.logprobs.append({})
        assert (request.num_output_tokens, len(request.logprobs)) == (num_tokens, num_tokens)
        request.append(ScoredToken(3, {3: Logprob(-1.0)}))
