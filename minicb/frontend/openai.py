"""OpenAI's forms: the body of a completion or chat completion, and the body that answers it."""

import time
import uuid
from collections.abc import Mapping
from typing import Any

from minicb.checks import check_int, show
from minicb.frontend.json_lines import ParsedRequest, make_params, pop_chat_options
from minicb.outputs import CompletionOutput, RequestOutput
from minicb.params import SchedulingParams
from minicb.request import Logprob

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
IGNORED = {"model", "metadata", "store", "service_tier", "stream_options"}  # they change nothing here
ONLY_DEFAULT = {"stream": False, "echo": False, "best_of": 1}  # other values are not supported


def read_batch_entry(entry: Mapping[str, Any], defaults: Mapping[str, Any]) -> ParsedRequest:
    """Read a line of a batch file. ValueError names what is wrong."""
    if not isinstance(entry.get("custom_id"), str):
        raise ValueError(f"custom_id must be a string, not {show(entry.get('custom_id'))}")
    if entry.get("method", "POST") != "POST":
        raise ValueError(f"method must be POST, not {show(entry['method'])}")
    return read_body(entry.get("url"), entry.get("body"), defaults)


def batch_answer(number: int, custom_id: str | None, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to line `number` of a batch file. An error stands in the body, as an endpoint gives it, and in "error",
    as batch files have it. vLLM does the same."""
    name = f"batch_req_{number}"
    response = {"status_code": status, "request_id": name, "body": body}
    return {"id": name, "custom_id": custom_id, "response": response, "error": body.get("error")}


def read_body(url: Any, body: Any, defaults: Mapping[str, Any]) -> ParsedRequest:
    """Read the body of a request. ValueError names the field that is wrong.

    defaults: sampling parameters of bodies that don't name them. The default of max_tokens in a chat is None.
    null means that a field is absent. "user" is the client. As in vLLM, a body may also have the fields of
    SamplingParams and "priority", a chat's also BODY_OPTIONS.
    """
    if url not in (CHAT, COMPLETIONS):
        raise ValueError(f"url must be {CHAT} or {COMPLETIONS}, not {show(url)}")
    if not isinstance(body, dict):
        raise ValueError(f"body must be a JSON object, not {show(body)}")
    given = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    for name, value in ONLY_DEFAULT.items():
        if given.pop(name, value) != value:
            raise ValueError(f"{name} must be {show(value)}, not {show(body[name])}")
    priority, client = given.pop("priority", 0), given.pop("user", "default")
    if not isinstance(client, str):
        raise ValueError(f"user must be a string, not {show(client)}")
    scheduling = SchedulingParams(priority=priority, client=client)
    if url == CHAT:
        messages = given.pop("messages", None)
        if not isinstance(messages, list):
            raise ValueError(f"messages must be a list, not {show(messages)}")
        options = pop_chat_options(given)
        params = make_params({"max_tokens": None, **defaults, **_read_chat_params(given)})
        return ParsedRequest("", params, scheduling, messages, options)
    prompt = given.pop("prompt", None)
    if not isinstance(prompt, (str, list)) or isinstance(prompt, list) and not all(type(i) is int for i in prompt):
        raise ValueError(f"prompt must be a text or a list of token ids, not {show(prompt)}")
    return ParsedRequest(prompt, make_params({**defaults, **given}), scheduling)


def _read_chat_params(given: dict[str, Any]) -> dict[str, Any]:
    """Rename the sampling parameters that chats call by other names."""
    if "max_completion_tokens" in given:
        given["max_tokens"] = given.pop("max_completion_tokens")
    if "logprobs" not in given and "top_logprobs" not in given:
        return given
    wanted, number = given.pop("logprobs", False), given.pop("top_logprobs", None)
    if not isinstance(wanted, bool):
        raise ValueError(f"logprobs must be true or false in a chat, not {show(wanted)}")
    if not wanted:
        if number is not None:
            raise ValueError("top_logprobs needs logprobs to be true")
        return {**given, "logprobs": None}
    return {**given, "logprobs": 0 if number is None else check_int("top_logprobs", number, minimum=0)}


def answer_body(request: ParsedRequest, output: RequestOutput, model: str) -> dict[str, Any]:
    """The answer to a body that `read_body` read."""
    is_chat = request.messages is not None
    num_prompt_tokens = len(output.prompt_token_ids)
    num_output_tokens = sum(len(sample.token_ids) for sample in output.outputs)
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_chat_choice(s, request.params.logprobs) if is_chat else _choice(s) for s in output.outputs],
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
        },
    }


def error_body(message: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _chat_choice(sample: CompletionOutput, number: int | None) -> dict[str, Any]:
    logprobs = None
    if sample.logprobs is not None:
        content = []
        for token_id, entry in zip(sample.token_ids, sample.logprobs, strict=True):
            top = [_token(p) for p in _most_likely(entry, number)]
            content.append({**_token(entry[token_id]), "top_logprobs": top})
        logprobs = {"content": content}
    message = {"role": "assistant", "content": sample.text}
    return {"index": sample.index, "message": message, "logprobs": logprobs, "finish_reason": sample.finish_reason}


def _choice(sample: CompletionOutput) -> dict[str, Any]:
    logprobs: dict[str, list[Any]] | None = None
    if sample.logprobs is not None:
        logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        offset = 0
        for token_id, entry in zip(sample.token_ids, sample.logprobs, strict=True):
            text = entry[token_id].decoded_token or ""
            logprobs["tokens"].append(text)
            logprobs["token_logprobs"].append(entry[token_id].logprob)
            top: dict[str, float] = {}
            for other, p in entry.items():  # the sampled token, and the most likely ones
                name = p.decoded_token or ""
                top[f"token_id:{other}" if name in top else name] = p.logprob  # other tokens may have the same text
            logprobs["top_logprobs"].append(top)
            logprobs["text_offset"].append(offset)
            offset += len(text) if entry[token_id].is_text else 0
    return {"index": sample.index, "text": sample.text, "logprobs": logprobs, "finish_reason": sample.finish_reason}


def _most_likely(entry: Mapping[int, Logprob], number: int | None) -> list[Logprob]:
    """The `number` most likely tokens, or all if it is -1. The sampled token is left out unless it is one of them."""
    ranked = sorted(entry.values(), key=lambda logprob: logprob.rank or 0)
    return ranked if number == -1 else ranked[:number]


def _token(logprob: Logprob) -> dict[str, Any]:
    text = logprob.decoded_token or ""
    return {"token": text, "logprob": logprob.logprob, "bytes": list(text.encode()) if logprob.is_text else []}
