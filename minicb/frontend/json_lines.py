"""What the lines of an input file ask for, and the lines that answer them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from minicb.checks import show
from minicb.engine import Engine, Prompt
from minicb.params import SamplingParams, SchedulingParams
from minicb.request import CompletionOutput, Request, RequestOutput
from minicb.text import encode_chat

PARAMS = {field.name for field in fields(SamplingParams)}


class Task(NamedTuple):
    prompt: Prompt
    params: SamplingParams
    priority: int = 0
    client: str = "default"
    expected_output_len: int | None = None
    messages: Sequence[Any] | None = None  # a conversation, in place of the prompt

    def make_request(self, engine: Engine) -> Request:
        """ValueError names what is wrong with it for this engine."""
        prompt = self.prompt if self.messages is None else encode_chat(engine.tokenizer, self.messages)
        scheduling = SchedulingParams(
            priority=self.priority, client=self.client, expected_output_len=self.expected_output_len
        )
        return engine.make_request(prompt, self.params, None, scheduling)


def read_object(entry: Any, defaults: Mapping[str, Any]) -> Task:
    """A line of minicb's own form: {"prompt": text or token ids} or {"messages": [...]}, and beside that any sampling
    parameter, priority, client and expected_output_len. defaults: sampling parameters that it doesn't name; without
    max_tokens an answer in a conversation has no limit."""
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise ValueError(f'a line must be a JSON object with either "prompt" or "messages", not {show(entry)}')
    given = dict(entry)
    prompt, messages = given.pop("prompt", ""), given.pop("messages", None)
    if not isinstance(prompt, (str, list)):
        raise ValueError(f"prompt must be text or a list of token ids, not {show(prompt)}")
    if "messages" in entry and not isinstance(messages, list):
        raise ValueError(f"messages must be a list, not {show(messages)}")
    own = {name: given.pop(name) for name in ("priority", "client", "expected_output_len") if name in given}
    no_limit = {} if messages is None else {"max_tokens": None}
    return Task(prompt, make_params({**no_limit, **defaults, **given}), **own, messages=messages)


def make_params(given: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams from JSON, where the keys of logit_bias are strings. ValueError names what is wrong."""
    unknown = given.keys() - PARAMS
    if unknown:
        raise ValueError(f"unknown or not supported: {', '.join(sorted(unknown))}")
    bias = given.get("logit_bias")
    if isinstance(bias, dict):
        if not all(re.fullmatch("0|[1-9][0-9]{0,17}", str(token)) for token in bias):
            raise ValueError(f"logit_bias must have token ids as keys, not {show(list(bias))}")
        given = {**given, "logit_bias": {int(token): value for token, value in bias.items()}}
    return SamplingParams(**given)


def format_text(task: Task, output: RequestOutput) -> str:
    """What is printed for people: the texts, or token ids where the prompt was token ids."""
    has_text = isinstance(task.prompt, str)
    return "\n".join(s.text if has_text else " ".join(map(str, s.token_ids)) for s in output.outputs)


def format_object(number: int, task: Task, output: RequestOutput) -> dict[str, Any]:
    """The answer in minicb's own form: with several samples they are a list, "samples"."""
    asked = {"prompt": task.prompt} if task.messages is None else {"messages": task.messages}
    samples = [_format_sample(sample) for sample in output.outputs]
    return {"line": number, **asked, **(samples[0] if len(samples) == 1 else {"samples": samples})}


def _format_sample(sample: CompletionOutput) -> dict[str, Any]:
    result: dict[str, Any] = {
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }
    if sample.logprobs is not None:
        result["cumulative_logprob"] = sample.cumulative_logprob
        result["logprobs"] = [
            [
                {"token_id": token_id, "token": p.decoded_token, "logprob": p.logprob, "rank": p.rank}
                for token_id, p in entry.items()
            ]
            for entry in sample.logprobs
        ]
    return result
