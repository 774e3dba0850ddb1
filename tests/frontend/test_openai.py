"""OpenAI's forms of a request and its answer, checked by hand where their client would parse them."""

import json
import math

import pytest
from conftest import eager, greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from test_json_lines import BIAS, CHAT_OPTIONS, GOOD, JSON, MESSAGES, some

from minicb import LLM, CompletionOutput, Engine, Logprob, RequestOutput, SamplingParams
from minicb.frontend.json_lines import ParsedRequest
from minicb.frontend.openai import CHAT, COMPLETIONS, answer_body, error_body, read_body
from minicb.params import SchedulingParams

# What both forms call by the same name and mean the same by; a chat's logprobs have tests of their own.
PARAMS = {name: values for name, values in GOOD.items() if name != "logprobs"}
ONLY_DEFAULT = {"stream": False, "echo": False, "best_of": 1}
IGNORED = ["model", "metadata", "store", "service_tier", "stream_options"]
UNSUPPORTED = [
    "chat_template",
    "tool_choice",
    "functions",
    "response_format",
    "suffix",
    "audio",
    "modalities",
    "prediction",
]


@pytest.fixture(scope="module")
def llm(byte_model) -> LLM:
    return LLM(byte_model, device="cpu", dtype="float64", enforce_eager=True, block_size=4, num_blocks=65)


@pytest.fixture(scope="module")
def engine(llm) -> Engine:
    return llm.engine


def read_chat(defaults=None, **fields) -> ParsedRequest:
    return read_body(CHAT, {"messages": MESSAGES, **fields}, defaults or {})


@given(
    params=some(PARAMS),
    logprobs=some({"logprobs": st.integers(-1, 3)}),
    defaults=some(PARAMS),
    beside=some({"priority": st.integers(-9, 9), "user": st.text(max_size=3)}),
    options=some(CHAT_OPTIONS),
    nothing=some({**{name: st.just(v) for name, v in ONLY_DEFAULT.items()}, **dict.fromkeys(IGNORED, JSON)}),
    nulls=st.sets(
        st.sampled_from([*PARAMS, *ONLY_DEFAULT, *IGNORED, "logprobs", "priority", "user", "tools", "max_tokens"])
    ),
    prompt=st.text(max_size=3) | st.lists(st.integers(0, 9), max_size=3),
)
@settings(max_examples=2 * settings.default.max_examples)
def test_every_field_of_a_body_gets_to_its_place_and_null_is_as_good_as_absent(
    params, logprobs, defaults, beside, options, nothing, nulls, prompt
):
    """Those that do nothing here change nothing, a default holds where nothing else was said."""
    given = {name: value for name, value in params.items() if value is not None}
    body = {**dict.fromkeys(nulls), **given, **beside, **nothing}
    scheduling = SchedulingParams(**{{"user": "client"}.get(name, name): value for name, value in beside.items()})
    expected = SamplingParams(**{"max_tokens": None, **defaults, **given})
    before = json.dumps({**body, **options, "messages": MESSAGES})
    chat = json.loads(before)
    assert read_body(CHAT, chat, defaults) == ParsedRequest("", expected, scheduling, MESSAGES, options)
    assert json.dumps(chat) == before  # the caller's
    expected = SamplingParams(**{**defaults, **given, **logprobs})
    body = {**body, **logprobs, "prompt": prompt}
    assert read_body(COMPLETIONS, body, defaults) == ParsedRequest(prompt, expected, scheduling)


@given(some({"max_tokens": st.integers(1, 9), "max_completion_tokens": st.integers(1, 9)}), some(PARAMS))
def test_a_chat_may_run_to_its_end_unless_it_or_a_default_has_a_limit(given, defaults):
    """max_completion_tokens is max_tokens' new name and goes before it; a completion doesn't know it."""
    expected = given.get("max_completion_tokens", given.get("max_tokens", defaults.get("max_tokens")))
    defaults = {name: value for name, value in defaults.items() if name != "min_tokens"}
    assert read_chat(defaults, **given).params.max_tokens == expected
    if "max_completion_tokens" in given:
        with pytest.raises(ValueError, match="unknown or not supported: max_completion_tokens"):
            read_body(COMPLETIONS, {"prompt": "a", **given}, defaults)


def test_a_completion_has_the_limit_of_sampling_params():
    assert read_body(COMPLETIONS, {"prompt": "a"}, {}).params.max_tokens == 16


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": None, "top_logprobs": None}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
    ],
)
def test_a_chat_asks_for_logprobs_by_two_fields(fields, logprobs):
    assert read_chat(**fields).params.logprobs == logprobs


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_logprobs": 0}, "top_logprobs needs logprobs to be true"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs needs logprobs to be true"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs must be an integer >= 0, not -1"),
        *(({"logprobs": True, "top_logprobs": v}, "top_logprobs must be") for v in (False, "", "2", [], {}, 0.0, 1.5)),
        *(({"logprobs": v}, "logprobs must be true or false in a chat") for v in (0, 1, "", "true", [])),
        *(({name: 1}, f"unknown or not supported: {name}") for name in UNSUPPORTED),
        ({"no": 1, "functions": []}, "unknown or not supported: functions, no"),
        ({"prompt": "a"}, "unknown or not supported: prompt"),
        ({"stream": True}, "stream must be False, not True"),
        ({"echo": True}, "echo must be False, not True"),
        ({"best_of": 2}, "best_of must be 1, not 2"),
        ({"logit_bias": {"x": 1}}, "logit_bias must have token ids as keys"),
        ({"n": 0}, "n must be an integer >= 1"),
        ({"messages": "hi"}, "messages must be a list, not 'hi'"),
        ({"messages": None}, "messages must be a list, not None"),
    ],
)
def test_what_a_chat_cannot_have_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        read_chat(**fields)


@pytest.mark.parametrize(
    ("url", "body", "message"),
    [
        ("/v1/embeddings", {}, "url must be /v1/chat/completions or /v1/completions, not '/v1/embeddings'"),
        (None, {"prompt": "a"}, "url must be"),
        ([CHAT], {"prompt": "a"}, "url must be"),
        (CHAT, {}, "messages must be a list, not None"),
        (CHAT, [MESSAGES], "body must be a JSON object"),
        (COMPLETIONS, None, "body must be a JSON object, not None"),
        (COMPLETIONS, {}, "prompt must be a text or a list of token ids, not None"),
        *((COMPLETIONS, {"prompt": v}, "prompt must be") for v in (5, {}, ["a"], [[1]], [True], [1.0], [1, None])),
        (COMPLETIONS, {"prompt": "a", "messages": MESSAGES}, "unknown or not supported: messages"),
        *((COMPLETIONS, {"prompt": "a", name: 1}, f"unknown or not supported: {name}") for name in CHAT_OPTIONS),
        (COMPLETIONS, {"prompt": "a", "top_logprobs": 1}, "unknown or not supported: top_logprobs"),
        *((COMPLETIONS, {"prompt": "a", "logprobs": v}, "logprobs must be an integer >= -1") for v in (True, "1", -2)),
    ],
)
def test_what_is_no_body_of_the_url_is_refused_by_name(url, body, message):
    with pytest.raises(ValueError, match=message):
        read_body(url, body, {})


FIELDS = [*GOOD, *ONLY_DEFAULT, *IGNORED, *UNSUPPORTED, "max_completion_tokens", "top_logprobs", "priority", "client"]
FIELDS += CHAT_OPTIONS


@given(
    url=st.sampled_from([CHAT, COMPLETIONS]),
    body=st.dictionaries(st.sampled_from([*FIELDS, "prompt", "messages"]), JSON, max_size=4),
    odd=st.none() | JSON,
)
@settings(max_examples=6 * settings.default.max_examples)
def test_whatever_json_a_body_has_it_is_a_request_or_a_valueerror(engine, url, body, odd):
    """With something wrong in any field beside a prompt that is right; a JSON value for a body or a url."""
    right = {"messages": MESSAGES} if url == CHAT else {"prompt": "a"}
    for a_url, a_body in ((url, body), (url, {**right, **body}), (odd, right), (url, odd)):
        try:
            request = read_body(a_url, a_body, {"max_tokens": 5}).make_request(engine)
        except ValueError:
            continue
        given = {name for name, value in a_body.items() if value is not None}
        assert not given & {*UNSUPPORTED, "client", *(CHAT_OPTIONS if a_url == COMPLETIONS else ())}
        assert all(type(token_id) is int for token_id in request.token_ids)
    assert not engine.has_unfinished_requests()


# ---------------------------------------------------------------------- answers


def check_types(answer: dict, shape: dict) -> None:
    """Exactly these keys, with values of these types; JSON gives back what went in."""
    assert answer.keys() == shape.keys()
    for name, types in shape.items():
        assert isinstance(answer[name], types), name
        assert not isinstance(answer[name], bool), name


def check_answer(answer: dict, is_chat: bool) -> None:
    """The documented shape, as far as it doesn't depend on what was asked."""
    assert json.loads(json.dumps(answer)) == answer
    shape = {"id": str, "object": str, "created": int, "model": str, "choices": list, "usage": dict}
    check_types(answer, shape)
    assert answer["object"] == ("chat.completion" if is_chat else "text_completion")
    assert answer["id"].startswith("chatcmpl-" if is_chat else "cmpl-")
    counts = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), int)
    check_types(answer["usage"], {**counts, "prompt_tokens_details": dict})
    check_types(answer["usage"]["prompt_tokens_details"], {"cached_tokens": int})
    for choice in answer["choices"]:
        content = {"message": dict} if is_chat else {"text": str}
        check_types(choice, {"index": int, **content, "logprobs": (dict, type(None)), "finish_reason": str})
        if is_chat:
            check_types(choice["message"], {"role": str, "content": str})
            assert choice["message"]["role"] == "assistant"
        if is_chat and choice["logprobs"] is not None:
            check_types(choice["logprobs"], {"content": list})
            for entry in choice["logprobs"]["content"]:
                check_types(entry, {"token": str, "logprob": float, "bytes": list, "top_logprobs": list})
                for token in (entry, *entry["top_logprobs"]):
                    assert bytes(token["bytes"]).decode() in (token["token"], "")
                for token in entry["top_logprobs"]:
                    check_types(token, {"token": str, "logprob": float, "bytes": list})
        elif choice["logprobs"] is not None:
            lists = dict.fromkeys(("tokens", "token_logprobs", "top_logprobs", "text_offset"), list)
            check_types(choice["logprobs"], lists)
            assert len({len(values) for values in choice["logprobs"].values()}) == 1


@given(
    is_chat=st.booleans(),
    n=st.integers(1, 3),
    number=st.sampled_from([None, 0, 1, 3, 300]),
    max_tokens=st.integers(1, 5),
    bias=st.none() | BIAS | st.just({257: 9.0}),  # the last is EOS, so that some end by themselves
    stop=st.none() | st.just(["\ufffd", "e"]),
)
def test_an_answer_has_the_documented_shape_and_says_what_the_engine_says(
    llm, is_chat, n, number, max_tokens, bias, stop
):
    """One choice for each sample, by index; the counts add up; of each token's logprobs what was asked for."""
    body = {"n": n, "max_tokens": max_tokens, "seed": 7, "stop": stop}
    body["logit_bias"] = None if bias is None else {str(token): value for token, value in bias.items()}
    if is_chat:
        body |= {"messages": MESSAGES} | ({} if number is None else {"logprobs": True, "top_logprobs": number})
    else:
        body |= {"prompt": "hi", "logprobs": number}
    parsed = read_body(CHAT if is_chat else COMPLETIONS, body, {})
    ask = llm.chat if is_chat else llm.generate
    [output] = ask(parsed.messages or parsed.prompt, parsed.params, use_tqdm=False)
    answer = answer_body(parsed, output, "some/model")
    check_answer(answer, is_chat)
    assert answer["model"] == "some/model"
    num_tokens = [len(sample.token_ids) for sample in output.outputs]
    assert answer["usage"] == {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": sum(num_tokens),
        "total_tokens": len(output.prompt_token_ids) + sum(num_tokens),
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
    }
    assert [choice["index"] for choice in answer["choices"]] == list(range(n))
    for choice, sample in zip(answer["choices"], output.outputs, strict=True):
        assert (choice["message"]["content"] if is_chat else choice["text"]) == sample.text
        assert choice["finish_reason"] == sample.finish_reason
        assert (choice["logprobs"] is None) == (number is None)
        if number is None:
            continue
        sampled = [entry[token] for token, entry in zip(sample.token_ids, sample.logprobs, strict=True)]
        best = [sorted(entry.values(), key=lambda p: p.rank)[:number] for entry in sample.logprobs]
        has_piece, by_string = sample.text.endswith("\ufffd"), sample.stop_reason is not None
        if is_chat:
            content = choice["logprobs"]["content"]
            assert [(t["token"], t["logprob"]) for t in content] == [(p.decoded_token, p.logprob) for p in sampled]
            assert [[(t["token"], t["logprob"]) for t in entry["top_logprobs"]] for entry in content] == [
                [(p.decoded_token, p.logprob) for p in entry] for entry in best
            ]
            text = bytes(byte for token in content for byte in token["bytes"]).decode()
            assert text == sample.text or has_piece or by_string
        else:
            assert choice["logprobs"]["tokens"] == [p.decoded_token for p in sampled]
            assert choice["logprobs"]["token_logprobs"] == [p.logprob for p in sampled]
            for token, entry, known in zip(
                sample.token_ids, choice["logprobs"]["top_logprobs"], sample.logprobs, strict=True
            ):
                assert list(entry.values()) == [p.logprob for p in known.values()], "none is lost"
                assert entry[known[token].decoded_token] == known[token].logprob
                assert set(entry) <= {p.decoded_token for p in known.values()} | {f"token_id:{i}" for i in known}
            ends = [*choice["logprobs"]["text_offset"][1:], len(sample.text)]
            for begin, end, p in zip(choice["logprobs"]["text_offset"], ends, sampled, strict=True):
                assert sample.text[begin:end] == p.decoded_token or not p.is_text or has_piece or by_string


ENTRIES = [
    {7: Logprob(-3.0, 9, "x"), 1: Logprob(-0.5, 1, "日"), 2: Logprob(-1.0, 2, "b")},
    {1: Logprob(-0.25, 1, "日"), 3: Logprob(-2.0, 2, "c")},
    {3: Logprob(-2.0, 2, "c"), 1: Logprob(-0.25, 1, "日")},
]
SCORED = RequestOutput("0", "a", [5], [CompletionOutput(0, "x日c", [7, 1, 3], "length", None, ENTRIES, -5.25)], True)


@pytest.mark.parametrize(
    ("number", "tops"),
    [(0, ["", "", ""]), (1, ["日", "日", "日"]), (2, ["日b", "日c", "日c"]), (-1, ["日bx", "日c", "日c"])],
)
def test_the_most_likely_tokens_of_a_chat_leave_out_the_sampled_one_unless_it_is_one_of_them(number, tops):
    """However many there are, the most likely first. A completion's have it beside them, in its own order."""
    params = SamplingParams(logprobs=number)
    [choice] = answer_body(ParsedRequest("", params, messages=MESSAGES), SCORED, "m")["choices"]
    content = choice["logprobs"]["content"]
    assert [(entry["token"], entry["logprob"], entry["bytes"]) for entry in content] == [
        ("x", -3.0, [120]),
        ("日", -0.25, [230, 151, 165]),
        ("c", -2.0, [99]),
    ]
    assert ["".join(token["token"] for token in entry["top_logprobs"]) for entry in content] == tops
    [choice] = answer_body(ParsedRequest("a", params), SCORED, "m")["choices"]
    assert choice["logprobs"]["top_logprobs"] == [
        {"x": -3.0, "日": -0.5, "b": -1.0},
        {"日": -0.25, "c": -2.0},
        {"c": -2.0, "日": -0.25},
    ]
    assert choice["logprobs"]["tokens"] == ["x", "日", "c"]
    assert choice["logprobs"]["token_logprobs"] == [-3.0, -0.25, -2.0]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


def test_offsets_count_characters_of_tokens_of_any_length_but_no_names():
    """Those of special tokens, which are no text and have no bytes."""
    texts = ["ab", "", "日本", "<|sep|>", "c", "<|end|>"]
    entries = [{i: Logprob(-1.0, 1, text, is_text=text[:1] != "<")} for i, text in enumerate(texts)]
    sample = CompletionOutput(0, "ab日本c", [0, 1, 2, 3, 4, 5], "stop", None, entries)
    output = RequestOutput("0", "a", [5], [sample], True)
    [choice] = answer_body(ParsedRequest("a", SamplingParams(logprobs=0)), output, "m")["choices"]
    assert choice["logprobs"]["tokens"] == texts
    assert choice["logprobs"]["text_offset"] == [0, 2, 2, 4, 4, 5]
    [choice] = answer_body(ParsedRequest("", SamplingParams(logprobs=0), messages=MESSAGES), output, "m")["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == texts
    assert [len(entry["bytes"]) for entry in choice["logprobs"]["content"]] == [2, 0, 6, 0, 1, 0]


def test_without_a_tokenizer_texts_are_empty(tiny):
    """Of token ids a model without one can be asked all the same."""
    engine = eager(tiny)
    parsed = read_body(COMPLETIONS, {"prompt": [1, 2], "logprobs": 1, "max_tokens": 2, "temperature": 0}, {})
    request = parsed.make_request(engine)
    engine.submit(request)
    while engine.has_unfinished_requests():
        engine.step()
    answer = answer_body(parsed, engine.output(request), "m")
    check_answer(answer, is_chat=False)
    assert answer["choices"][0]["logprobs"]["tokens"] == ["", ""]


def test_of_tokens_with_the_same_text_none_is_lost():
    """The sampled one has the text; the others are told apart by their ids, as pieces of characters have no text."""
    entry = {200: Logprob(-0.5, 2, ""), 201: Logprob(-0.25, 1, ""), 7: Logprob(-4.0, 3, "a"), 9: Logprob(-5.0, 4, "")}
    output = RequestOutput("0", "a", [5], [CompletionOutput(0, "\ufffd", [200], "stop", None, [entry], -0.5)], True)
    [choice] = answer_body(ParsedRequest("a", SamplingParams(logprobs=4)), output, "m")["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"": -0.5, "token_id:201": -0.25, "a": -4.0, "token_id:9": -5.0}]


def test_ids_are_never_the_same():
    output = RequestOutput("0", "a", [5], [CompletionOutput(0, "b", [6], "stop")], True)
    assert len({answer_body(ParsedRequest("a", greedy()), output, "m")["id"] for _ in range(50)}) == 50


def test_an_error_has_the_documented_shape():
    assert error_body("n must be 1") == {
        "error": {"message": "n must be 1", "type": "invalid_request_error", "param": None, "code": None}
    }
    assert error_body("logits", "server_error")["error"]["type"] == "server_error"


def test_logprobs_are_finite_numbers(llm):
    """JSON has no others."""
    parsed = read_body(COMPLETIONS, {"prompt": "hi", "logprobs": -1, "logit_bias": {"5": -1e300}, "max_tokens": 2}, {})
    [output] = llm.generate("hi", parsed.params, use_tqdm=False)
    [choice] = answer_body(parsed, output, "m")["choices"]
    assert all(math.isfinite(p) for entry in choice["logprobs"]["top_logprobs"] for p in entry.values())


def test_what_a_chat_says_of_logprobs_goes_before_the_default():
    assert read_chat({"logprobs": 2}, logprobs=False).params.logprobs is None
    assert read_chat({"logprobs": 2}, logprobs=True).params.logprobs == 0
    assert read_chat({"logprobs": 2}).params.logprobs == 2
