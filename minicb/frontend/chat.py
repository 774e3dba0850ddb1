"""Text printed as it is generated: the answer to a prompt, and a conversation."""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from minicb.engine import Engine
from minicb.interrupts import hold_ctrl_c
from minicb.messages import encode_chat
from minicb.outputs import RequestOutput
from minicb.params import SamplingParams
from minicb.request import Request


def stream(engine: Engine, request: Request) -> Iterator[RequestOutput]:
    """Submit a request and yield its outputs, each with all of its text so far. A stream that is closed early aborts
    the request."""
    accepted = False
    try:
        with hold_ctrl_c():
            engine.submit(request)
            accepted = True
        while not request.all_ended:
            yield from (output for output in engine.step() if output.request_id == request.request_id)
    finally:
        if accepted and not request.all_ended:
            engine.abort_request(request.request_id)


def print_stream(engine: Engine, request: Request) -> RequestOutput | None:
    """Print a request's text as it is generated, and return the last output. Ctrl-C ends the request."""
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
    """Answer questions until the input ends (Ctrl-D). Ctrl-C ends an answer; what was printed of it is kept.

    Each turn sends the whole conversation. The prefix cache has the KV of all but what is new. "/reset" for a question
    begins a new conversation, with the same system message.
    """
    beginning: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    # A template without system messages, or no template, is an error before the first question, not after each.
    encode_chat(engine.tokenizer, [*beginning, {"role": "user", "content": "."}])
    messages = list(beginning)
    while True:
        try:
            question = read("> ")
        except EOFError:
            return
        if not question.strip():
            continue
        if question.strip() == "/reset":
            messages = list(beginning)
            continue
        messages.append({"role": "user", "content": question})
        advice = ""
        try:
            token_ids = encode_chat(engine.tokenizer, messages)
            advice = "; ask a shorter question, or begin anew by /reset"  # most likely the conversation is too long
            request = engine.make_request(token_ids, params)
        except ValueError as error:
            print(f"minicb: {error}{advice}", file=sys.stderr)
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
