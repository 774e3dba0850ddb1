"""Offline use: a list of prompts in, a list of outputs out."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from tqdm import tqdm

from minicb.checks import show
from minicb.engine import Engine, Prompt
from minicb.outputs import RequestOutput
from minicb.params import SamplingParams, SchedulingParams
from minicb.request import Request, RequestState
from minicb.text import encode_chat


class LLM:
    """An engine and the loop around it. The arguments are those of `Engine`."""

    def __init__(self, model: Any, **engine_args: Any):
        self.engine = Engine(model, **engine_args)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
        client: str | Sequence[str] = "default",
        expected_output_len: int | Sequence[int | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts. Outputs are in the order of the prompts.

        prompts: a text, a list of texts, a list of token ids, or a list of those.
        sampling_params, priority, client, expected_output_len: one for all, or one for each prompt.
        ValueError for a prompt that can't be served, before any runs. After Ctrl-C or an error all requests are aborted,
        and the engine stays usable.
        """
        prompt_list = _as_list(prompts)
        if self.engine.has_unfinished_requests():
            raise RuntimeError("the engine has unfinished requests of add_request; step until they have ended")
        count, requests = len(prompt_list), []
        params = _one_for_each("sampling_params", sampling_params, count)
        names = {"priority": priority, "client": client, "expected_output_len": expected_output_len}
        columns = {name: _one_for_each(name, values, count) for name, values in names.items()}
        for index, prompt in enumerate(prompt_list):
            try:
                scheduling = SchedulingParams(**{name: column[index] for name, column in columns.items()})
                requests.append(self.engine.make_request(prompt, params[index], None, scheduling))
            except ValueError as error:
                raise ValueError(f"prompts[{index}]: {error}") from error
        try:
            for request in requests:
                self.engine.submit(request)
            self._run(sum(len(request.samples) for request in requests), use_tqdm)
        except BaseException:
            self.engine.abort_all()
            raise
        return [self.engine.output(request) for request in requests]

    def _run(self, num_requests: int, use_tqdm: bool) -> None:
        num_tokens = 0
        with tqdm(total=num_requests, unit="request", disable=not use_tqdm, dynamic_ncols=True) as bar:
            while self.engine.has_unfinished_requests():
                progressed: list[Request] = self.engine.core.step()
                num_tokens += len(progressed)
                bar.update(sum(request.state is RequestState.FINISHED for request in progressed))
                if elapsed := bar.format_dict["elapsed"]:
                    bar.set_postfix_str(f"{num_tokens / elapsed:.0f} tok/s", refresh=False)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **for_each: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, [{"role": "user", "content": "…"}, …], or a list of them, by the chat template.

        for_each: priority, client and expected_output_len, as in `generate`.
        """
        if not isinstance(messages, (list, tuple)) or not messages:
            raise ValueError(f"messages must be a list with at least 1 message, not {show(messages)}")
        conversations = [messages] if isinstance(messages[0], dict) else messages
        prompts: list[Any] = []
        for index, conversation in enumerate(conversations):
            try:
                prompts.append(encode_chat(self.engine.tokenizer, conversation))
            except ValueError as error:
                raise ValueError(f"conversation {index}: {error}") from error
        return self.generate(prompts, sampling_params, use_tqdm, **for_each)


def _as_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise ValueError(f"prompts must be text, token ids, or a list of those, not {show(prompts)}")
    return [prompts] if prompts and isinstance(prompts[0], Integral) else list(prompts)


def _one_for_each(name: str, values: Any, count: int) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        return [values] * count
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} prompts")
    return list(values)
