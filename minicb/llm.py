"""Offline inference: a list of prompts in, a list of outputs out."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from tqdm import tqdm

from minicb.checks import check
from minicb.engine import Engine, Prompt
from minicb.messages import CHAT_OPTIONS, encode_chat
from minicb.outputs import RequestOutput
from minicb.params import SamplingParams, SchedulingParams
from minicb.request import Request, RequestState
from minicb.text import read_list


class LLM:
    """An engine and the loop around it. The arguments are those of `Engine`."""

    def __init__(self, model: Any, **engine_args: Any):
        self.engine = Engine(model, **engine_args)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, of transformers; None if it has none."""
        return self.engine.tokenizer

    def reset_prefix_cache(self) -> None:
        """Let no request find what is cached now, as a fair measurement may want."""
        pool = self.engine.scheduler.pool
        pool.unregister(range(1, pool.num_blocks))

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
        client: str | Sequence[str] = "default",
        expected_output_len: int | Sequence[int | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts. The outputs are in the order of the prompts.

        prompts: one prompt or several, in a list, an array or a generator. A prompt is text, token ids, or a dict with
            "prompt" or "prompt_token_ids".
        sampling_params, priority, client, expected_output_len: one for all prompts, or a list with one for each. The
            last three are those of SchedulingParams.
        ValueError for a prompt that can't be served, before any has run. After an error or Ctrl-C the engine is empty.
        """
        if self.engine.has_unfinished_requests():
            raise RuntimeError("the engine has unfinished requests of add_request; step until they have ended")
        prompt_list = [prompts] if isinstance(prompts, (str, Mapping)) else read_list("prompts", prompts)
        if prompt_list and isinstance(prompt_list[0], Integral):
            prompt_list = [prompt_list]
        requests = list[Request]()
        params = _one_for_each("sampling_params", sampling_params, len(prompt_list))
        names = {"priority": priority, "client": client, "expected_output_len": expected_output_len}
        columns = {name: _one_for_each(name, values, len(prompt_list)) for name, values in names.items()}
        for index, prompt in enumerate(prompt_list):
            try:
                scheduling = SchedulingParams(**{name: column[index] for name, column in columns.items()})
                requests.append(self.engine.make_request(prompt, params[index], None, scheduling))
            except ValueError as error:
                raise ValueError(f"prompts[{index}]: {error}") from error
        try:
            self._run(requests, use_tqdm)
        except BaseException:
            self.engine.abort_all()
            raise
        return [self.engine.output(request) for request in requests]

    def _run(self, requests: Sequence[Request], use_tqdm: bool) -> None:
        for request in requests:
            self.engine.submit(request)
        num_tokens, total = 0, sum(request.params.n for request in requests)
        with tqdm(total=total, unit="request", disable=not use_tqdm, dynamic_ncols=True) as bar:
            while self.engine.has_unfinished_requests():
                progressed = self.engine.core.step()
                num_tokens += len(progressed)
                bar.update(sum(request.state is RequestState.FINISHED for request in progressed))
                bar.set_postfix_str(f"{num_tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tok/s", refresh=False)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, [{"role": "user", "content": "…"}, …], or a list of conversations.

        options: priority, client and expected_output_len, as in `generate`; and for all conversations, as in vLLM,
            chat_template, tools, add_generation_prompt, continue_final_message and chat_template_kwargs.
        """
        check(messages and isinstance(messages, (list, tuple)), "messages", "a list with at least 1 message", messages)
        chat_options = {name: options.pop(name) for name in CHAT_OPTIONS.keys() & options.keys()}
        prompts = list[Any]()
        for index, conversation in enumerate([messages] if isinstance(messages[0], dict) else messages):
            try:
                prompts.append(encode_chat(self.engine.tokenizer, conversation, **chat_options))
            except ValueError as error:
                raise ValueError(f"conversation {index}: {error}") from error
        return self.generate(prompts, sampling_params, use_tqdm, **options)


def _one_for_each(name: str, values: Any, count: int) -> Sequence[Any]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        return [values] * count
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} prompts")
    return values
