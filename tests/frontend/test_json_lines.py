"""What a line of an input file may ask for, and how it is answered: JSON in, JSON out."""

import json
from dataclasses import fields

import pytest
from conftest import eager, greedy
from hypothesis import given, settings
from hypothesis import strategies as st

from minicb import CompletionOutput, Engine, Logprob, RequestOutput, SamplingParams
from minicb.frontend.json_lines import ParsedRequest, format_object, format_text, make_params, read_object
from minicb.params import SchedulingParams

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, 2**63, 10**400, 0.0, 1.0, float("nan"), float("inf"), "", "1", "\ud800"])
    | st.floats()
    | st.text(st.characters(), max_size=4),  # lone surrogates too
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3),
    max_leaves=4,
)
BIAS = st.dictionaries(st.integers(0, 9), st.floats(-5, 5), max_size=3)
GOOD = {  # values of every sampling parameter that go with any of the others
    "n": st.integers(1, 4),
    "temperature": st.floats(0.1, 2),
    "top_p": st.floats(0.1, 1),
    "top_k": st.integers(-1, 9),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "max_tokens": st.none() | st.integers(3, 9),
    "min_tokens": st.integers(0, 3),
    "stop": st.none() | st.text(min_size=1, max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=2),
    "stop_token_ids": st.none() | st.lists(st.integers(0, 9), max_size=3),
    "ignore_eos": st.booleans(),
    "logprobs": st.none() | st.integers(-1, 3),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.1, 2),
    "logit_bias": st.none() | BIAS,
    "allowed_token_ids": st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=3),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
}
BESIDE = {"priority": st.integers(-9, 9), "client": st.text(max_size=3), "expected_output_len": st.integers(1, 9)}
MESSAGES = [{"role": "user", "content": "hi"}]
CHAT_OPTIONS = {  # of a conversation in JSON
    "tools": st.lists(st.just({"type": "function"}), max_size=2),
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.booleans(),
    "chat_template_kwargs": st.just({"enable_thinking": False}),
}


@pytest.fixture(scope="module")
def engine(byte_model) -> Engine:
    return eager(byte_model, num_blocks=8)


def some(values: dict[str, st.SearchStrategy]) -> st.SearchStrategy:
    return st.fixed_dictionaries({}, optional=values)


def test_every_sampling_parameter_is_tried_here():
    """So that what is said of every field below is said of those that come later, too."""
    assert set(GOOD) == {field.name for field in fields(SamplingParams)}


@given(
    asked=st.fixed_dictionaries({"prompt": st.text(max_size=3) | st.lists(st.integers(0, 9), max_size=3)})
    | st.fixed_dictionaries({"messages": st.just(MESSAGES)}, optional=CHAT_OPTIONS),
    params=some(GOOD),
    beside=some(BESIDE),
    defaults=some(GOOD),
)
def test_every_field_of_a_line_gets_to_its_place_and_goes_before_the_defaults(asked, params, beside, defaults):
    """An answer in a conversation has no limit but one that is given."""
    entry = json.loads(json.dumps({**asked, **params, **beside}))
    before = json.dumps(entry)
    no_limit = {"max_tokens": None} if "messages" in asked else {}
    expected = SamplingParams(**{**no_limit, **defaults, **params})
    options = {name: value for name, value in asked.items() if name in CHAT_OPTIONS}
    parsed = read_object(entry, defaults)
    assert parsed == ParsedRequest(
        asked.get("prompt", ""), expected, SchedulingParams(**beside), asked.get("messages"), options
    )
    assert parsed.asked.items() <= asked.items()
    assert json.dumps(entry) == before  # the caller's


@given(
    st.dictionaries(st.sampled_from(["prompt", "messages", "chat_template", *CHAT_OPTIONS, *GOOD, *BESIDE]), JSON)
    | JSON
)
@settings(max_examples=6 * settings.default.max_examples)
def test_whatever_json_a_line_is_it_is_a_request_or_a_valueerror(engine, entry):
    """With something wrong in any field, and a prompt that is right to begin with."""
    for right in ({}, {"prompt": "a"}, {"prompt": [1]}, {"messages": MESSAGES}):
        if right and (not isinstance(entry, dict) or {"prompt", "messages"} & entry.keys()):
            continue
        try:
            request = read_object({**right, **entry} if right else entry, {"max_tokens": 5}).make_request(engine)
        except ValueError:
            continue
        assert set({**right, **entry}) <= {"prompt", *GOOD, *BESIDE} or set({**right, **entry}) <= {
            *("messages", *CHAT_OPTIONS, *GOOD, *BESIDE)
        }
        assert all(type(token_id) is int for token_id in request.token_ids)
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ([1], 'a line must be a JSON object with either "prompt" or "messages"'),
        ({}, 'with either "prompt" or "messages"'),
        ({"prompt": "a", "messages": MESSAGES}, 'with either "prompt" or "messages"'),
        ({"prompt": "a", "messages": None}, 'with either "prompt" or "messages"'),
        ({"prompt": None}, "prompt must be text or a list of token ids, not None"),
        ({"messages": None}, "messages must be a list, not None"),
        ({"messages": "hi"}, "messages must be a list, not 'hi'"),
        ({"prompt": "a", "max_token": 1, "Temperature": 1}, "unknown or not supported: Temperature, max_token"),
        *(({"prompt": "a", name: 5}, f"unknown or not supported: {name}") for name in CHAT_OPTIONS),
        ({"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "unknown or not supported: chat_template"),
        ({"prompt": "a", "temperature": None}, "temperature must be a finite number >= 0, not None"),
        ({"prompt": "a", "logit_bias": {"a": 1}}, r"logit_bias must have token ids as keys, not \['a'\]"),
        ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias must have token ids as keys"),
        ({"prompt": "a", "logit_bias": {"5": 1, "05": 2}}, "logit_bias must have token ids as keys"),
        ({"prompt": "a", "logit_bias": [1]}, "logit_bias must be a dict"),
    ],
)
def test_what_is_wrong_with_a_line_is_named(entry, message):
    with pytest.raises(ValueError, match=message):
        read_object(entry, {})


def test_the_keys_of_logit_bias_are_strings_in_json_and_may_be_token_ids():
    bias = {"0": 1, "12": -100.0}
    asked = {"logit_bias": bias}
    params = make_params(asked)
    assert params.logit_bias == {0: 1, 12: -100.0}
    assert make_params({"logit_bias": {0: 1, 12: -100.0}}) == params
    assert asked == {"logit_bias": {"0": 1, "12": -100.0}}  # the caller's


def test_what_a_line_asks_for_reaches_the_request(engine):
    scheduling = SchedulingParams(priority=5, client="me", expected_output_len=7)
    request = ParsedRequest("abc", greedy(3), scheduling).make_request(engine)
    assert (request.prompt, request.params, request.scheduling) == ("abc", greedy(3), scheduling)
    request = ParsedRequest("", greedy(3), messages=MESSAGES).make_request(engine)
    assert engine.tokenizer.decode(request.token_ids) == "<s><user>hi<assistant>"
    parts = [{"role": "assistant", "content": [{"type": "text", "text": letter} for letter in "ab"]}]
    given = {"messages": parts, "continue_final_message": True, "add_generation_prompt": False, "tools": []}
    parsed = read_object(given, {})
    assert engine.tokenizer.decode(parsed.make_request(engine).token_ids) == "<s><assistant>a\nb"
    assert parsed.asked == {"messages": parts}  # as it was given
    with pytest.raises(ValueError, match="tools must be a list, not 5"):
        ParsedRequest("", greedy(3), messages=MESSAGES, chat_options={"tools": 5}).make_request(engine)
    with pytest.raises(ValueError, match="messages must be a list with at least 1 message"):
        ParsedRequest("abc", greedy(3), messages=[]).make_request(engine)


def output_of(*samples: CompletionOutput, prompt: str | None = None) -> RequestOutput:
    return RequestOutput("0", prompt, [1], list(samples), finished=True)


def test_a_line_is_answered_with_what_it_asked_for_and_all_that_came_of_it():
    sample = CompletionOutput(0, "bc", [5, 6], "stop", 6)
    came = {"text": "bc", "token_ids": [5, 6], "finish_reason": "stop", "stop_reason": 6}
    assert format_object(3, ParsedRequest("a", greedy()), output_of(sample)) == {"line": 3, "prompt": "a", **came}
    assert format_object(4, ParsedRequest([1], greedy()), output_of(sample)) == {"line": 4, "prompt": [1], **came}
    conversation = ParsedRequest("", greedy(), messages=MESSAGES)
    assert format_object(1, conversation, output_of(sample)) == {"line": 1, "messages": MESSAGES, **came}
    other = {"text": "", "token_ids": [7], "finish_reason": "length", "stop_reason": None}
    output = output_of(sample, CompletionOutput(1, "", [7], "length"))
    assert format_object(1, ParsedRequest("a", greedy()), output) == {
        "line": 1,
        "prompt": "a",
        "samples": [came, other],
    }


def test_logprobs_are_answered_in_the_order_in_which_they_are_reported():
    """The sampled token first; for every token of every entry its id, text and rank."""
    entries = [{5: Logprob(-2.0, 3, "f"), 9: Logprob(-0.5, 1, "j")}, {6: Logprob(-0.1, 1, "g")}]
    sample = CompletionOutput(0, "fg", [5, 6], "length", None, entries, -2.1)
    answer = format_object(1, ParsedRequest("a", greedy()), output_of(sample))
    assert answer["cumulative_logprob"] == -2.1
    assert answer["logprobs"] == [
        [
            {"token_id": 5, "token": "f", "logprob": -2.0, "rank": 3},
            {"token_id": 9, "token": "j", "logprob": -0.5, "rank": 1},
        ],
        [{"token_id": 6, "token": "g", "logprob": -0.1, "rank": 1}],
    ]
    assert json.loads(json.dumps(answer)) == answer
    nothing = format_object(
        1, ParsedRequest("a", greedy()), output_of(CompletionOutput(0, "", [], "error", "why", [], 0.0))
    )
    assert (nothing["logprobs"], nothing["cumulative_logprob"]) == ([], 0.0)  # asked for, though there is no token


@pytest.mark.parametrize(
    ("parsed", "printed"),
    [
        (ParsedRequest("a", greedy()), "bc\n"),
        (ParsedRequest("", greedy(), messages=MESSAGES), "bc\n"),
        (ParsedRequest([1], greedy()), "5 6\n7"),
    ],
)
def test_people_see_the_texts_or_token_ids_where_they_gave_some(parsed, printed):
    """One sample a line; an empty text is a text."""
    prompt = parsed.prompt if isinstance(parsed.prompt, str) and not parsed.messages else None
    output = output_of(CompletionOutput(0, "bc", [5, 6], "stop"), CompletionOutput(1, "", [7]), prompt=prompt)
    assert format_text(parsed, output) == printed
