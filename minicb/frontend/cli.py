"""The command line: python -m minicb generate --model M "prompt" …, and chat --model M."""

import argparse
import io
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any, BinaryIO

from tqdm import tqdm

from minicb.engine import Engine
from minicb.frontend.batch_files import (
    Done,
    Line,
    Numbered,
    ReadLine,
    find_unanswered,
    numbered,
    open_results,
    read_json,
    read_plain,
    serve_in_order,
    serve_lines,
    to_json,
    write_answer,
)
from minicb.frontend.chat import chat, print_stream
from minicb.frontend.json_lines import format_text, make_params
from minicb.llm import LLM
from minicb.observe.timeline import Timeline, write_timeline
from minicb.observe.trace import Trace, write_trace


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m minicb", description="Continuous batching of language models.")
    commands = parser.add_subparsers(dest="command", required=True)
    where = "Engine options are those of EngineArgs in args.py, sampling options those of SamplingParams in params.py."
    status = "The exit status is 1 after an error, also of a single line, and 130 after Ctrl-C."
    generate = commands.add_parser("generate", help="complete prompts", epilog=f"{where} {status}")
    generate.add_argument("prompts", nargs="*", help="prompts; without any and without --input, lines of stdin")
    generate.add_argument("--input", metavar="FILE", help="prompts, one a line; - is stdin; *.jsonl implies --jsonl")
    generate.add_argument(
        "--jsonl",
        action="store_true",
        help='input lines are JSON: {"prompt": text or token ids, "max_tokens": 5, "priority": 0, "client": "a", …}, '
        'with "messages" in place of the prompt a chat, or OpenAI\'s batch format',
    )
    generate.add_argument("--json", action="store_true", help="print results as JSON lines")
    generate.add_argument(
        "--output",
        metavar="FILE",
        help="write results to FILE as JSON lines, each as soon as it is there; FILE may have some already, of a run "
        "that was broken off: then the others follow",
    )
    generate.add_argument("--trace", metavar="FILE", help="what happened when, as JSON for https://ui.perfetto.dev")
    generate.add_argument("--timeline", metavar="FILE", help="what happened when, as a web page that plays it")
    chat = commands.add_parser("chat", help="talk with a chat model; Ctrl-D ends it, Ctrl-C an answer", epilog=where)
    chat.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    groups = {"generate": _add_options(generate), "chat": _add_options(chat)}
    args = parser.parse_args(argv)
    engine, sampling = groups[args.command]
    args.engine_args = _given(args, engine)
    args.sampling_args = _given(args, sampling)
    return args


def _add_options(command: argparse.ArgumentParser) -> tuple[Any, Any]:
    """Those of every command. Returns the groups of the engine's arguments and of the sampling parameters."""
    command.add_argument("--quiet", action="store_true", help="no progress bar, no figures")
    command.add_argument("--model", required=True, help="folder or Hugging Face id")
    engine = command.add_argument_group("engine")
    for name in ("tokenizer", "dtype", "device", "load-format", "preemption-mode", "scheduling-policy", "batching"):
        engine.add_argument(f"--{name}")
    sizes = ("max-model-len", "max-num-seqs", "max-num-batched-tokens", "block-size", "num-blocks", "num-cpu-blocks")
    for name in (*sizes, "long-prefill-token-threshold", "max-long-partial-prefills"):
        engine.add_argument(f"--{name}", type=int)
    for name in ("gpu-memory-utilization", "swap-space"):
        engine.add_argument(f"--{name}", type=float)
    engine.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
    engine.add_argument("--enforce-eager", action="store_true", default=None, help="compile nothing: starts at once")

    sampling = command.add_argument_group("sampling")
    for name in ("temperature", "top-p", "min-p", "presence-penalty", "frequency-penalty", "repetition-penalty"):
        sampling.add_argument(f"--{name}", type=float)
    for name in ("n", "top-k", "seed", "max-tokens", "min-tokens", "logprobs"):
        sampling.add_argument(f"--{name}", type=int)
    several = "may be given several times"
    sampling.add_argument("--stop", action="append", metavar="TEXT", help=several)
    sampling.add_argument("--stop-token-ids", type=int, action="append", metavar="ID", help=several)
    sampling.add_argument("--logit-bias", type=json_object, metavar="JSON", help='such as {"5": -100}')
    sampling.add_argument("--ignore-eos", action="store_true", default=None)
    return engine, sampling


def json_object(text: str) -> Any:
    return json.loads(text)


def _given(args: argparse.Namespace, group: Any) -> dict[str, Any]:
    """The options of a group that were given; the others keep the defaults of the API."""
    names = [action.dest for action in group._group_actions]
    return {name: value for name in names if (value := getattr(args, name)) is not None}


# ---------------------------------------------------------------------- generate


def run_generate(args: argparse.Namespace) -> int:
    """Exit status: 1 if a line was wrong."""
    params = make_params(args.sampling_args)  # what is wrong with them or with a path is told before the work is done
    recorders: list[tuple[Any, Any, str]] = [
        (Trace("generate"), write_trace, args.trace),
        (Timeline("generate"), write_timeline, args.timeline),
    ]
    recorders = [recorder for recorder in recorders if recorder[-1]]
    with ExitStack() as stack:
        lines, read_line, num_lines = open_input(args, stack)
        check_differ([args.input, args.output, args.trace, args.timeline])
        results, done = None, Done(0, 0, lines)
        if args.output:
            results = stack.enter_context(open_results(args.output))
            done = find_unanswered(results, lines, read_line)
        first = next(done.unanswered, None)
        if first is None:
            if done.num_answers == 0:
                raise ValueError("no prompts: give them as arguments, by --input, or on stdin")
            print(f"minicb: {args.output} has all {done.num_answers} answers", file=sys.stderr)
            return report_wrong(done.num_wrong)
        for *_, path in recorders:
            open(path, "a").close()  # a place that can't be written to is known before the work is done
        engine = LLM(args.model, **args.engine_args).engine
        engine.core.observers += [observer for observer, *_ in recorders]
        try:
            if len(args.prompts) == 1 and params.n == 1 and not (args.json or args.output):
                return print_prompt(engine, read_line(*first))
            bar = tqdm(
                initial=done.num_answers, total=num_lines, unit="request", disable=args.quiet, dynamic_ncols=True
            )
            lines = chain([first], done.unanswered)
            num_wrong = write_answers(args, engine, lines, read_line, results, stack.enter_context(bar))
            return report_wrong(done.num_wrong + num_wrong)
        finally:  # interrupted as well: what has happened so far may be just what was asked for
            for observer, write_recording, path in recorders:
                write_recording(path, [observer])


def check_differ(paths: Sequence[str | None]) -> None:
    given = [path for path in paths if path]
    files = {os.stat(path)[1:3] if os.path.exists(path) else os.path.realpath(path) for path in given}  # links or not
    if len(files) < len(given):
        raise ValueError("--input, --output, --trace and --timeline must be different files")


def open_input(args: argparse.Namespace, stack: ExitStack) -> tuple[Iterator[Numbered], ReadLine, int | None]:
    """Numbered lines, how to read one, and how many there are, if that can be known."""
    if args.prompts:
        if args.input:
            raise ValueError("give prompts or --input, not both")
        return iter(enumerate(args.prompts, 1)), partial(read_plain, args.sampling_args), len(args.prompts)
    is_json = args.jsonl or (args.input or "").endswith(".jsonl")
    read_line = partial(read_json if is_json else read_plain, args.sampling_args)
    # A byte order mark is no text, and bytes that aren't UTF-8 are a fault of their line, found when it is read.
    # (A carriage return by itself ends no line: JSON may have one as a space.)
    how: dict[str, Any] = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": "\n"}
    if args.input in (None, "-"):
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(**how)
        return numbered(sys.stdin), read_line, None
    num_lines = None
    if os.path.isfile(args.input):  # a pipe can be read only once
        with open(args.input, "rb") as raw:
            num_lines = sum(not line.isspace() for line in raw)
    return numbered(stack.enter_context(open(args.input, **how))), read_line, num_lines


def write_answers(
    args: argparse.Namespace,
    engine: Engine,
    lines: Iterator[Numbered],
    read_line: ReadLine,
    results: BinaryIO | None,
    bar: tqdm,
) -> int:
    """Serve the lines. Answers go into the output as they end, or are printed in the order of the lines. Returns how
    many lines were wrong."""
    num_wrong = num_tokens = 0
    serve = serve_lines if results else serve_in_order
    for line, output in serve(engine, lines, read_line, max_in_work=2 * engine.args.max_num_seqs):
        if output is None:
            num_wrong += 1
            bar.write(f"minicb: {line.error}", file=sys.stderr)
        else:
            num_tokens += sum(len(sample.token_ids) for sample in output.outputs)
        if results:
            write_answer(results, line.answer(output, args.model))
        elif args.json:
            bar.write(to_json(line.answer(output, args.model)))
        elif line.task is not None and output is not None:
            bar.write(format_text(line.task, output))
        bar.update()
        if elapsed := bar.format_dict["elapsed"]:
            bar.set_postfix_str(f"{num_tokens / elapsed:.0f} tok/s", refresh=False)
    return num_wrong


def report_wrong(num_wrong: int) -> int:
    """The exit status."""
    if num_wrong:
        print(
            f"minicb: {num_wrong} lines were wrong; to have one done again, correct it and delete its answer",
            file=sys.stderr,
        )
    return int(num_wrong > 0)


def print_prompt(engine: Engine, line: Line) -> int:
    assert line.task is not None
    output = print_stream(engine, line.task.make_request(engine))
    if output is None or not output.finished:
        raise KeyboardInterrupt
    if output.outputs[0].finish_reason == "error":
        raise ValueError(output.outputs[0].stop_reason)
    return 0


# ---------------------------------------------------------------------- chat


def run_chat(args: argparse.Namespace) -> int:
    params = make_params({"max_tokens": None, **args.sampling_args})
    if params.n > 1:
        raise ValueError(f"n must be 1 in a chat, not {params.n}")
    chat(LLM(args.model, **args.engine_args).engine, params, args.system, args.quiet)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.quiet:
        logging.getLogger("minicb").addHandler(logging.NullHandler())  # or the engine would tell of its start
    try:
        return run_chat(args) if args.command == "chat" else run_generate(args)
    except (ValueError, OSError) as error:
        print(f"minicb: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("minicb: interrupted", file=sys.stderr)
        return 130
