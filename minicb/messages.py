"""Messages of a conversation: from OpenAI's form, through the chat template, to token ids."""

import inspect
import json
from types import NoneType
from typing import Any

from minicb.checks import check

# Named as in vLLM. A chat template is a program, so it is no option of a body, which may come from anywhere.
BODY_OPTIONS = {
    "tools": list,
    "add_generation_prompt": bool,
    "continue_final_message": bool,
    "chat_template_kwargs": dict,
}
CHAT_OPTIONS = {**BODY_OPTIONS, "chat_template": str}


def encode_chat(tokenizer: Any, messages: Any, **options: Any) -> list[int]:
    """Token ids of a conversation, [{"role": "user", "content": "…"}, …], up to where the answer begins.

    options: any of CHAT_OPTIONS; None is the same as absent. The template, not the tokenizer, writes BOS where the
    model wants one. ValueError names what is wrong.
    """
    if tokenizer is None or not (options.get("chat_template") or tokenizer.chat_template):
        raise ValueError("chat needs a tokenizer with a chat template, and this model has none")
    check(messages and isinstance(messages, (list, tuple)), "messages", "a list with at least 1 message", messages)
    messages = [_read_message(f"messages[{index}]", message) for index, message in enumerate(messages)]
    given = {"add_generation_prompt": True} | {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        check(isinstance(value, CHAT_OPTIONS[name]), name, f"a {CHAT_OPTIONS[name].__name__}", value)
    tools, variables = given.pop("tools", []), given.pop("chat_template_kwargs", {})
    for index, tool in enumerate(tools):
        check(isinstance(tool, dict), f"tools[{index}]", "a dict", tool)
    taken = inspect.signature(tokenizer.apply_chat_template).parameters.keys() & variables.keys() - {"documents"}
    check(not taken, "chat_template_kwargs", "variables of the template", sorted(taken))
    check("{" in given.get("chat_template", "{"), "chat_template", "Jinja text", options.get("chat_template"))
    if given.get("continue_final_message"):
        check(not given["add_generation_prompt"], "add_generation_prompt", "False with continue_final_message", True)
        role = messages[-1]["role"]
        check(role == "assistant", "the last message's role", "assistant with continue_final_message", role)
    try:
        return list(tokenizer.apply_chat_template(messages, tools or None, return_dict=False, **given, **variables))
    except Exception as error:  # a template is a program and may raise anything
        raise ValueError(f"messages don't fit the chat template: {error}") from error


def _read_message(name: str, given: Any) -> dict[str, Any]:
    """A message as templates expect it: its content is one text, and the arguments of its tool calls are dicts."""
    fits = isinstance(given, dict) and isinstance(given.get("role"), str) and {"content", "tool_calls"} & given.keys()
    check(fits, name, 'a dict with "role" and "content"', given)
    parts, calls = given.get("content"), given.get("tool_calls")
    if isinstance(parts, (str, NoneType)):
        parts = [{"type": "text", "text": parts or ""}]
    check(isinstance(parts, (list, tuple)), f"{name}.content", "text or a list of text parts", parts)
    for index, part in enumerate(parts):
        shown = {"type": None} | part if isinstance(part, dict) else part  # long parts too begin with what they are
        is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        check(is_text, f"{name}.content[{index}]", '{"type": "text", "text": "…"}', shown)
    message = {**given, "content": "\n".join(part["text"] for part in parts)}
    check(isinstance(calls, (list, NoneType)), f"{name}.tool_calls", "a list", calls)
    if message.pop("tool_calls", None):
        message["tool_calls"] = [_read_call(f"{name}.tool_calls[{index}]", call) for index, call in enumerate(calls)]
    return message


def _read_call(name: str, call: Any) -> dict[str, Any]:
    function: Any = call.get("function") if isinstance(call, dict) else None
    fits = isinstance(function, dict) and isinstance(function.get("name"), str)
    check(fits, name, 'a dict with "function", which has a "name"', call)
    given = arguments = function.get("arguments")
    try:
        arguments = json.loads(given or "{}") if isinstance(given, (str, NoneType)) else given
    except (ValueError, RecursionError):
        pass  # text that is no JSON is no object either
    check(isinstance(arguments, dict), f"{name}.function.arguments", "a JSON object", given)
    return {**call, "function": {**function, "arguments": arguments}}
