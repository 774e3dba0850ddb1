"""Text printed as it comes: the answer to a prompt, a conversation."""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from minicb.engine import Engine
from minicb.params import SamplingParams
from minicb.request import Request, RequestOutput
from minicb.text import encode_chat


def stream(engine: Engine, request: Request) -> Iterator[RequestOutput]:
    """Submit a request and yield its outputs, each with all of its text so far. Left early, the request is aborted."""
    try:
        engine.submit(request)
        while not request.all_ended:
            yield from (output for output in engine.step() if output.request_id == request.request_id)
    finally:
        if any(
            engine.scheduler.requests.get(sample.request_id) is sample for sample in request.samples
        ):  # not another's
            engine.abort_request(request.request_id)


def print_stream(engine: Engine, request: Request) -> RequestOutput | None:
    """Print a request's text as it comes. Returns its last output; Ctrl-C ends it, with what it had so far."""
    printed, output = 0, None
    try:
        for output in stream(engine, request):
            text = output.outputs[0].text
            print(text[printed:], end="", flush=True)
            printed = len(text)
    except KeyboardInterrupt:
        print(" …", end="")
    print(flush=True)
    return output


def ask(prompt: str) -> str:
    return input(prompt if sys.stdin.isatty() else "")


def chat(
    engine: Engine,
    params: SamplingParams,
    system: str | None = None,
    quiet: bool = False,
    read: Callable[[str], str] = ask,
) -> None:
    """Talk until the input ends (Ctrl-D). Ctrl-C ends an answer, of which what was printed is kept.

    Each turn sends the whole conversation; but for what is new, the prefix cache has computed it.
    """
    encode_chat(engine.tokenizer, [{"role": "user", "content": "."}])  # better an error now than after a question
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    while True:
        try:
            question = read("> ")
        except EOFError:
            return
        if not question.strip():
            continue
        messages.append({"role": "user", "content": question})
        try:
            request = engine.make_request(encode_chat(engine.tokenizer, messages), params)
        except ValueError as error:  # too long by now, most likely; a shorter question may still do
            print(f"minicb: {error}", file=sys.stderr)
            messages.pop()
            continue
        began = time.perf_counter()
        output = print_stream(engine, request)
        messages.append({"role": "assistant", "content": "" if output is None else output.outputs[0].text})
        if output is not None and not quiet:
            _print_figures(output, time.perf_counter() - began)
        if output is not None and output.outputs[0].finish_reason == "error":
            print(f"minicb: {output.outputs[0].stop_reason}", file=sys.stderr)


def _print_figures(output: RequestOutput, seconds: float) -> None:
    count, cached = len(output.outputs[0].token_ids), output.num_cached_tokens
    print(
        f"[{count} tokens, {count / seconds:.0f} tok/s; {cached} of {len(output.prompt_token_ids)} tokens of the "
        "conversation came from the prefix cache]",
        file=sys.stderr,
    )
