"""Messages of a conversation: from OpenAI's form, through the chat template, to token ids."""

import json
from typing import Any

from minicb.checks import check

# vLLM's names. A chat template is a program, so it is no option of a body, which may come from anywhere.
BODY_OPTIONS = {"tools": [], "add_generation_prompt": True, "continue_final_message": False, "chat_template_kwargs": {}}
CHAT_OPTIONS = {**BODY_OPTIONS, "chat_template": ""}


def encode_chat(tokenizer: Any, messages: Any, **options: Any) -> list[int]:
    """Token ids of a conversation, [{"role": "user", "content": "…"}, …], up to where the answer begins.

    options: any of CHAT_OPTIONS; None is the same as absent. The template, not the tokenizer, writes BOS where the
    model wants one. ValueError names what is wrong.
    """
    if tokenizer is None or not (options.get("chat_template") or tokenizer.chat_template):
        raise ValueError("chat needs a tokenizer with a chat template, and this model has none")
    check(messages and isinstance(messages, (list, tuple)), "messages", "a list with at least 1 message", messages)
    messages = [_read_message(f"messages[{index}]", message) for index, message in enumerate(messages)]
    given: dict[str, Any] = CHAT_OPTIONS | {name: value for name, value in options.items() if value is not None}
    for name, default in CHAT_OPTIONS.items():
        check(isinstance(given[name], type(default)), name, f"a {type(default).__name__}", given[name])
    tools, template, variables = (given.pop(name) for name in ("tools", "chat_template", "chat_template_kwargs"))
    check(all(isinstance(tool, dict) for tool in tools), "tools", "a list of dicts", tools)
    check(not template or "{" in template, "chat_template", "Jinja text", template)
    if given["continue_final_message"] and (given["add_generation_prompt"] or messages[-1]["role"] != "assistant"):
        raise ValueError("continue_final_message needs add_generation_prompt false and an assistant's message last")
    given |= {"tools": tools or None, "chat_template": template or None, "tokenize": False}
    check(not given.keys() & variables.keys(), "chat_template_kwargs", "variables of the template", variables)
    try:
        text = tokenizer.apply_chat_template(messages, **given, **variables)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception as error:  # a template is a program and may raise anything
        raise ValueError(f"messages don't fit the chat template: {error}") from error


def _read_message(name: str, given: Any) -> dict[str, Any]:
    """A message as templates expect it: its content is one text, and the arguments of its tool calls are dicts."""
    is_message = isinstance(given, dict) and isinstance(given.get("role"), str)
    check(is_message and given.keys() & {"content", "tool_calls"}, name, 'a dict with "role" and "content"', given)
    parts, calls = given.get("content"), given.get("tool_calls")
    if parts is None or isinstance(parts, str):
        parts = [{"type": "text", "text": parts or ""}]
    check(isinstance(parts, (list, tuple)), f"{name}.content", "text or a list of text parts", parts)
    for index, part in enumerate(parts):
        is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        check(is_text, f"{name}.content[{index}]", '{"type": "text", "text": "…"}', part)
    message = {**given, "content": "\n".join(part["text"] for part in parts)}
    check(calls is None or isinstance(calls, list), f"{name}.tool_calls", "a list", calls)
    if message.pop("tool_calls", None):
        message["tool_calls"] = [_read_call(f"{name}.tool_calls[{index}]", call) for index, call in enumerate(calls)]
    return message


def _read_call(name: str, call: Any) -> dict[str, Any]:
    function: Any = call.get("function") if isinstance(call, dict) else None
    check(isinstance(function, dict) and isinstance(function.get("name"), str), name, "a function with a name", call)
    given = arguments = function.get("arguments")
    try:
        arguments = json.loads(given or "{}") if given is None or isinstance(given, str) else given
    except (ValueError, RecursionError):
        pass  # text that is no JSON is no object either
    check(isinstance(arguments, dict), f"{name}.function.arguments", "a JSON object", given)
    return {**call, "function": {**function, "arguments": arguments}}
