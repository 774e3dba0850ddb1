"""Lines of JSON in minicb's own form: what a line of the input asks for, and the line that answers it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from minicb.checks import show
from minicb.engine import Engine, Prompt
from minicb.messages import BODY_OPTIONS, encode_chat
from minicb.outputs import CompletionOutput, RequestOutput
from minicb.params import SamplingParams, SchedulingParams
from minicb.request import Request

SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)}
SCHEDULING_FIELDS = {field.name for field in fields(SchedulingParams)}


class ParsedRequest(NamedTuple):
    """A request read from JSON, in minicb's form or OpenAI's."""

    prompt: Prompt
    params: SamplingParams
    scheduling: SchedulingParams = SchedulingParams()
    messages: Sequence[Any] | None = None  # a conversation, in place of the prompt
    chat_options: Mapping[str, Any] = {}

    @property
    def asked(self) -> dict[str, Any]:
        """What an answer repeats of it."""
        return {"prompt": self.prompt} if self.messages is None else {"messages": self.messages}

    def make_request(self, engine: Engine) -> Request:
        """A request for this engine. ValueError names what is wrong with it."""
        if self.messages is None:
            prompt = self.prompt
        else:
            prompt = encode_chat(engine.tokenizer, self.messages, **self.chat_options)
        return engine.make_request(prompt, self.params, scheduling=self.scheduling)


def read_object(entry: Any, defaults: Mapping[str, Any]) -> ParsedRequest:
    """Read {"prompt": text or token ids} or {"messages": [...]}, with any fields of SamplingParams and SchedulingParams.
    A conversation may also have BODY_OPTIONS.

    defaults: sampling parameters of entries that don't name them. The default of max_tokens in a conversation is None.
    ValueError names what is wrong.
    """
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise ValueError(f'a line must be a JSON object with either "prompt" or "messages", not {show(entry)}')
    given = dict(entry)
    prompt, messages = given.pop("prompt", ""), given.pop("messages", None)
    if not isinstance(prompt, (str, list)):
        raise ValueError(f"prompt must be text or a list of token ids, not {show(prompt)}")
    if "messages" in entry and not isinstance(messages, list):
        raise ValueError(f"messages must be a list, not {show(messages)}")
    scheduling = SchedulingParams(**{name: given.pop(name) for name in SCHEDULING_FIELDS & given.keys()})
    if messages is None:
        return ParsedRequest(prompt, make_params({**defaults, **given}), scheduling)
    options = pop_chat_options(given)
    return ParsedRequest("", make_params({"max_tokens": None, **defaults, **given}), scheduling, messages, options)


def pop_chat_options(given: dict[str, Any]) -> dict[str, Any]:
    """Take the fields that the chat template gets out of a conversation's."""
    return {name: given.pop(name) for name in BODY_OPTIONS.keys() & given.keys()}


def make_params(given: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams from JSON, where the keys of logit_bias are strings. ValueError names what is wrong."""
    unknown = given.keys() - SAMPLING_FIELDS
    if unknown:
        raise ValueError(f"unknown or not supported: {', '.join(sorted(unknown))}")
    bias = given.get("logit_bias")
    if isinstance(bias, dict):
        if not all(re.fullmatch("0|[1-9][0-9]{0,17}", str(token)) for token in bias):
            raise ValueError(f"logit_bias must have token ids as keys, not {show(list(bias))}")
        given = {**given, "logit_bias": {int(token): value for token, value in bias.items()}}
    return SamplingParams(**given)


def format_text(request: ParsedRequest, output: RequestOutput) -> str:
    """The texts of an output, one a line; its token ids if the prompt was token ids."""
    has_text = isinstance(request.prompt, str)
    return "\n".join(s.text if has_text else " ".join(map(str, s.token_ids)) for s in output.outputs)


def format_object(number: int, request: ParsedRequest, output: RequestOutput) -> dict[str, Any]:
    """The answer to line `number`. Several samples are a list, "samples"."""
    samples = [_format_sample(sample) for sample in output.outputs]
    return {"line": number, **request.asked, **(samples[0] if len(samples) == 1 else {"samples": samples})}


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
