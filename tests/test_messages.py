"""Conversations in OpenAI's form, and what chat templates make of them."""

import copy
import json

import pytest
from conftest import TEMPLATE
from hypothesis import given, settings
from hypothesis import strategies as st
from test_text import byte_level_tokenizer
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from minicb.messages import CHAT_OPTIONS, encode_chat

# As Llama 3's: it writes the content, whatever that is.
LLAMA = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# As Qwen 3's: tools, calls of tools and an answer without thinking.
QWEN = (
    "{% if tools is not none %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls is defined %}<calls>{% endif %}"
    "{% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ m['role'] + ':' + m['content'] }}{% endfor %}"
)
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def chat_tokenizer(template: str | dict | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """As in Llama: it puts a BOS before any text, and so does its template."""
    fast = byte_level_tokenizer()
    bos = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast.backend_tokenizer.post_processor = bos
    fast.chat_template = template
    return fast


TOKENIZERS = {"llama": chat_tokenizer(LLAMA), "qwen": chat_tokenizer(QWEN)}


def prompt_of(name: str, messages, **options) -> str:
    """The text that the model gets. Whatever the caller gave is as it was."""
    before = copy.deepcopy((messages, options))
    token_ids = encode_chat(TOKENIZERS[name], messages, **options)
    assert (messages, options) == before
    return TOKENIZERS[name].decode(token_ids)


def call(arguments, **more) -> dict:
    return {"type": "function", "function": {"name": "weather", "arguments": arguments}, **more}


def test_a_chat_begins_with_one_bos():
    tokenizer = chat_tokenizer()
    assert tokenizer.encode("x")[0] == 0
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<s>é"}]
    token_ids = encode_chat(tokenizer, messages)
    assert type(token_ids) is list
    assert tokenizer.decode(token_ids) == "<s><user>hi<assistant><s>é<assistant>"
    assert encode_chat(tokenizer, tuple(messages)) == token_ids
    without = chat_tokenizer(TEMPLATE.replace("{{ bos_token }}", ""))
    assert encode_chat(without, messages) == token_ids[1:], "nor one that the template doesn't want"


@pytest.mark.parametrize("tokenizer", [None, chat_tokenizer(None), chat_tokenizer("")], ids=["none", "no", "empty"])
def test_a_chat_needs_a_template(tokenizer):
    with pytest.raises(ValueError, match="chat needs a tokenizer with a chat template"):
        encode_chat(tokenizer, HI)


# ---------------------------------------------------------------------- messages

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), st.lists(TEXTS)), min_size=1, max_size=3))
def test_parts_of_a_text_are_lines_of_it(conversation):
    as_parts = [
        {"role": role, "content": [{"type": "text", "text": text} for text in texts]} for role, texts in conversation
    ]
    as_text = [{"role": role, "content": "\n".join(texts)} for role, texts in conversation]
    for name in TOKENIZERS:
        assert prompt_of(name, as_parts) == prompt_of(name, as_text)


@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_no_content_is_no_text(role):
    """Beside calls of tools it may be absent."""
    empty = prompt_of("qwen", [{"role": role, "content": ""}])
    assert empty == f"<{role}><end><assistant>"
    assert prompt_of("qwen", [{"role": role, "content": None}]) == empty
    assert "<assistant><calls>" in prompt_of("qwen", [{"role": "assistant", "tool_calls": [call({})]}])


@given(st.dictionaries(st.text("ab", max_size=2), st.integers() | st.none() | st.lists(st.booleans()), max_size=2))
def test_arguments_of_a_tool_call_are_written_once(arguments):
    """OpenAI has them as JSON, templates expect the object."""
    answer = {"role": "tool", "content": "sunny", "tool_call_id": "1"}
    prompts = {
        prompt_of("qwen", [*HI, {"role": "assistant", "content": None, "tool_calls": [call(a, id="1")] * 2}, answer])
        for a in (arguments, json.dumps(arguments), json.dumps(arguments, indent=1))
    }
    calls = 2 * f"weather {json.dumps(arguments)}"
    assert prompts == {f"<user>hi<end><assistant><calls>{calls}<end><tool>sunny<end><assistant>"}


@pytest.mark.parametrize("nothing", ["", None, {}])
def test_a_call_may_have_no_arguments(nothing):
    assert "weather {}<end>" in prompt_of("qwen", [{"role": "assistant", "tool_calls": [call(nothing)]}])


@pytest.mark.parametrize("nothing", [[], None])
def test_no_tool_calls_are_as_good_as_absent(nothing):
    prompt = prompt_of("qwen", [{"role": "assistant", "content": "a", "tool_calls": nothing}])
    assert prompt == "<assistant>a<end><assistant>"


def user(*parts) -> list:
    return [*HI, {"role": "user", "content": list(parts)}]


def assistant(**fields) -> list:
    return [*HI, {"role": "assistant", "content": "a", **fields}]


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        *(
            (wrong, "messages must be a list with at least 1 message")
            for wrong in ([], (), None, "hi", {"role": "user"})
        ),
        ([{"role": "system", "content": "x"}], "messages don't fit the chat template: no system"),
        *(
            ([*HI, wrong], r'messages\[1\] must be a dict with "role" and "content", not ')
            for wrong in ("hi", None, 5, HI, {}, {"content": "x"}, {"role": 5, "content": "x"}, {"role": "assistant"})
        ),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content must be text or a list of text parts, not 5"),
        *(
            (user({"type": "text", "text": "a"}, wrong), rf"messages\[1\]\.content\[1\] must be .*, not .*{name}")
            for wrong, name in [
                ({"image_url": {"url": "data:" + 100 * "x"}, "type": "image_url"}, "image_url"),
                ({"type": "refusal", "refusal": "no"}, "refusal"),
                ({"type": "text"}, "text"),
                ({"type": "text", "text": 5}, "5"),
                ({"text": "a"}, "a"),
                ("a", "'a'"),
                (None, "None"),
            ]
        ),
        *(
            (assistant(tool_calls=wrong), r"messages\[1\]\.tool_calls must be a list, not")
            for wrong in ({}, "", "x", 0, call({}))
        ),
        *(
            (assistant(tool_calls=[call({}), wrong]), r"messages\[1\]\.tool_calls\[1\] must be a function with a name")
            for wrong in (None, "x", {}, {"function": "x"}, {"function": {}}, {"function": {"name": None}})
        ),
        *(
            (
                assistant(tool_calls=[call(wrong)]),
                r"messages\[1\]\.tool_calls\[0\]\.function\.arguments must be a JSON object, not",
            )
            for wrong in ("x", "[1]", "5", "null", '"{}"', "{'a': 1}", " ", [], [1], 5, 0, False, "[" * 100_000)
        ),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_messages_that_do_not_fit_are_named(messages, what):
    """Even by a template that would take them: in one, "hi"['role'] is undefined, not an error."""
    for template in [STRICT] if "no system" in what else [STRICT, TEMPLATE, QWEN]:
        with pytest.raises(ValueError, match=what):
            encode_chat(chat_tokenizer(template), messages)


# ---------------------------------------------------------------------- options


def test_tools_and_variables_reach_the_template():
    assert prompt_of("qwen", HI, tools=[TOOL, TOOL]) == f"<tools>{2 * json.dumps(TOOL)}<user>hi<end><assistant>"
    for thinking, end in ((False, "<think></think>"), (True, ""), (None, "")):
        prompt = prompt_of("qwen", HI, chat_template_kwargs={"enable_thinking": thinking})
        assert prompt == f"<user>hi<end><assistant>{end}"
    variables = {"truncation": True, "max_length": 1, "return_tensors": "pt"}  # of templates, not for the tokenizer
    assert prompt_of("qwen", HI, chat_template_kwargs=variables) == prompt_of("qwen", HI)


@pytest.mark.parametrize("name", CHAT_OPTIONS)
def test_none_is_as_good_as_absent(name):
    plain = prompt_of("qwen", HI)
    assert prompt_of("qwen", HI, **{name: None}) == plain
    assert prompt_of("qwen", HI, tools=[], chat_template="", chat_template_kwargs={}) == plain


def test_a_template_of_ones_own():
    """It goes before the tokenizer's, and does without."""
    given = "{% for m in messages %}{{ m.content }};{% endfor %}"
    assert prompt_of("qwen", HI, chat_template=given) == "hi;"
    assert encode_chat(chat_tokenizer(None), HI, chat_template=given) == encode_chat(
        TOKENIZERS["qwen"], HI, chat_template=given
    )


def test_a_tokenizer_may_have_a_template_of_its_own_for_tools():
    tokenizer = chat_tokenizer({"default": "plain", "tool_use": "tools"})
    decoded = {
        name: tokenizer.decode(encode_chat(tokenizer, HI, tools=tools)) for name, tools in (("a", []), ("b", [TOOL]))
    }
    assert decoded == {"a": "plain", "b": "tools"}


def test_where_the_answer_begins():
    begun = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "It "}]}]
    for name, prompt in (("llama", "<s>[user]hi[assistant]It"), ("qwen", "<user>hi<end><assistant>It ")):
        assert prompt_of(name, begun, continue_final_message=True, add_generation_prompt=False) == prompt
    assert prompt_of("qwen", begun, add_generation_prompt=False) == "<user>hi<end><assistant>It <end>"
    assert prompt_of("qwen", begun) == "<user>hi<end><assistant>It <end><assistant>"


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"chat_template": 5}, "chat_template must be a str, not 5"),
        ({"chat_template": "chatml.jinja"}, "chat_template must be Jinja text, not 'chatml.jinja'"),
        ({"chat_template": "{% if %}"}, "messages don't fit the chat template"),
        ({"tools": TOOL}, "tools must be a list, not"),
        *(
            ({"tools": [tool, TOOL]}, "tools must be a list of dicts, not")
            for tool in (None, "weather", test_where_the_answer_begins)
        ),
        *(
            ({name: value}, f"{name} must be a bool, not")
            for name in ("add_generation_prompt", "continue_final_message")
            for value in (0, 1, "content", [])
        ),
        *(
            (
                {"continue_final_message": True, **more},
                "continue_final_message needs add_generation_prompt false and an assistant's message last",
            )
            for more in ({}, {"add_generation_prompt": False}, {"add_generation_prompt": True})
        ),
        *(({"chat_template_kwargs": value}, "chat_template_kwargs must be a dict, not") for value in ("x", [], True)),
        *(
            (
                {"chat_template_kwargs": {"a": 1, name: value}},
                f"chat_template_kwargs must be variables of the template, not .*{name}",
            )
            for name, value in [
                ("chat_template", "{{ 1 }}"),
                ("tools", []),
                ("tokenize", True),
                ("continue_final_message", True),
            ]
        ),
        ({"chat_template_kwargs": {"messages": []}}, "messages don't fit the chat template: .*'messages'"),
        ({"chat_template_kwargs": {5: 1}}, "messages don't fit the chat template"),
    ],
)
def test_options_that_are_wrong_are_named(options, what):
    with pytest.raises(ValueError, match=what):
        encode_chat(TOKENIZERS["qwen"], HI, **options)


JSON = st.recursive(
    st.none() | st.booleans() | st.sampled_from([0, 1.5, "", "x", "\ud800", "{}", "text", "assistant"]),
    lambda values: (
        st.lists(values, max_size=2)
        | st.dictionaries(
            st.sampled_from(["role", "content", "tool_calls", "function", "name", "arguments", "type", "text"]),
            values,
            max_size=4,
        )
    ),
    max_leaves=9,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"])}, optional={"content": JSON, "tool_calls": JSON}
)


@given(
    messages=st.lists(MESSAGE | JSON, min_size=1, max_size=2),
    options=st.fixed_dictionaries({}, optional=dict.fromkeys(CHAT_OPTIONS, JSON)),
)
@settings(max_examples=3 * settings.default.max_examples)
def test_whatever_json_a_conversation_is_it_is_tokens_or_a_valueerror(messages, options):
    """And what was given is as it was."""
    for name in TOKENIZERS:
        try:
            prompt_of(name, messages, **options)
        except ValueError:
            continue
