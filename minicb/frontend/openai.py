"""OpenAI's forms: what the body of a completion or chat completion asks for, and the body that answers it."""

import time
import uuid
from collections.abc import Mapping
from typing import Any

from minicb.checks import check_int, show
from minicb.frontend.json_lines import Task, make_params
from minicb.request import CompletionOutput, Logprob, RequestOutput

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
IGNORED = {"model", "metadata", "store", "service_tier", "stream_options"}  # nothing here depends on them
ONLY_DEFAULT = {"stream": False, "echo": False, "best_of": 1}  # other values are not supported


def read_batch_entry(entry: Mapping[str, Any], defaults: Mapping[str, Any]) -> Task:
    """What a line of a batch file asks for. ValueError names what is wrong with it."""
    if not isinstance(entry.get("custom_id"), str):
        raise ValueError(f"custom_id must be a string, not {show(entry.get('custom_id'))}")
    if entry.get("method", "POST") != "POST":
        raise ValueError(f"method must be POST, not {show(entry['method'])}")
    return read_body(entry.get("url"), entry.get("body"), defaults)


def batch_answer(number: int, custom_id: str | None, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """The line that answers line `number` of a batch file. An error stands in the response, as an endpoint would give
    it, and beside it, where batch files have theirs; vLLM does the same."""
    name = f"batch_req_{number}"
    response = {"status_code": status, "request_id": name, "body": body}
    return {"id": name, "custom_id": custom_id, "response": response, "error": body.get("error")}


def read_body(url: Any, body: Any, defaults: Mapping[str, Any]) -> Task:
    """What a body asks for. ValueError names the field that is wrong.

    defaults: sampling parameters of requests that don't name them. A chat has no limit to its answer unless it is
    given; null is as good as absent. "user" is the client; beside OpenAI's parameters those of SamplingParams and
    priority are taken, as vLLM does.
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
    if url == CHAT:
        prompt, messages = "", given.pop("messages", None)
        if not isinstance(messages, list):
            raise ValueError(f"messages must be a list, not {show(messages)}")
        given = {"max_tokens": None, **defaults, **_read_chat_params(given)}
    else:
        prompt, messages = given.pop("prompt", None), None
        if not isinstance(prompt, (str, list)) or isinstance(prompt, list) and not all(type(i) is int for i in prompt):
            raise ValueError(f"prompt must be a text or a list of token ids, not {show(prompt)}")
        given = {**defaults, **given}
    return Task(prompt, make_params(given), priority, client, messages=messages)


def _read_chat_params(given: dict[str, Any]) -> dict[str, Any]:
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


def answer_body(task: Task, output: RequestOutput, model: str) -> dict[str, Any]:
    """The answer to a body that `read_body` read."""
    is_chat = task.messages is not None
    choice = _chat_choice if is_chat else _choice
    num_prompt_tokens = len(output.prompt_token_ids)
    num_output_tokens = sum(len(sample.token_ids) for sample in output.outputs)
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice(sample, task.params.logprobs) for sample in output.outputs],
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
    content = None
    if sample.logprobs is not None:
        content = []
        for token_id, entry in zip(sample.token_ids, sample.logprobs, strict=True):
            ranked = [_token(logprob) for logprob in _ranked(entry, number)]
            content.append({**_token(entry[token_id]), "top_logprobs": ranked})
    return {
        "index": sample.index,
        "message": {"role": "assistant", "content": sample.text},
        "logprobs": None if content is None else {"content": content},
        "finish_reason": sample.finish_reason,
    }


def _choice(sample: CompletionOutput, number: int | None) -> dict[str, Any]:
    logprobs: dict[str, list[Any]] | None = None
    if sample.logprobs is not None:
        logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        offset = 0
        for token_id, entry in zip(sample.token_ids, sample.logprobs, strict=True):
            text = entry[token_id].decoded_token or ""
            logprobs["tokens"].append(text)
            logprobs["token_logprobs"].append(entry[token_id].logprob)
            top: dict[str, float] = {}
            for p in _ranked(entry, number):
                top.setdefault(p.decoded_token or "", p.logprob)  # of tokens with the same text the most likely
            logprobs["top_logprobs"].append(top)
            logprobs["text_offset"].append(offset)
            offset += len(text)
    return {"index": sample.index, "text": sample.text, "logprobs": logprobs, "finish_reason": sample.finish_reason}


def _ranked(entry: Mapping[int, Logprob], number: int | None) -> list[Logprob]:
    """The first `number` of them, -1 for all: without the sampled one, if it is none of those."""
    ranked = sorted(entry.values(), key=lambda logprob: logprob.rank or 0)
    return ranked if number == -1 else ranked[:number]


def _token(logprob: Logprob) -> dict[str, Any]:
    text = logprob.decoded_token or ""
    return {"token": text, "logprob": logprob.logprob, "bytes": list(text.encode())}
