"""The command line: python -m minicb generate --model M "prompt" …, and chat --model M."""

import argparse
import inspect
import json
import logging
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from itertools import chain
from typing import Any, BinaryIO, get_args

from tqdm import tqdm

from minicb.args import CHOICES, EngineArgs
from minicb.device import DTYPES
from minicb.engine import Engine
from minicb.frontend.batch_files import (
    ParsedLine,
    ParseLine,
    Progress,
    RawLine,
    find_unanswered,
    number_lines,
    parse_line,
    serve_in_order,
    serve_lines,
    to_json,
    write_answer,
)
from minicb.frontend.chat import chat, print_stream
from minicb.frontend.json_lines import SAMPLING_FIELDS, format_text, make_params
from minicb.llm import LLM
from minicb.observe.timeline import Timeline, write_timeline
from minicb.observe.trace import Trace, write_trace
from minicb.params import SamplingParams

ENGINE_FIELDS = {field.name for field in fields(EngineArgs)} - {"clock", "seed"}  # --seed is that of SamplingParams

# ---------------------------------------------------------------------- options


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line. engine_args and sampling_args hold the options that were given."""
    parser = argparse.ArgumentParser(prog="python -m minicb", description="Continuous batching of language models.")
    commands = parser.add_subparsers(dest="command", required=True)
    generate = commands.add_parser(
        "generate",
        help="complete prompts",
        usage="%(prog)s --model MODEL [options] [prompts ...]",
        description="Complete prompts. A single prompt is printed as it is generated.",
        epilog="The exit status is 1 after an error, even of a single line, and 130 after Ctrl-C.",
    )
    chat = commands.add_parser(
        "chat",
        help="talk with a chat model",
        usage="%(prog)s --model MODEL [options]",
        description="Talk with a chat model. Ctrl-C ends an answer, /reset begins a new conversation, Ctrl-D ends the program.",
    )
    files = generate.add_argument_group("input and output")
    files.add_argument("prompts", nargs="*", help="prompts (default: the lines of --input, else of stdin)")
    files.add_argument("--input", metavar="FILE", help="read prompts from FILE, one a line; - is stdin")
    files.add_argument(
        "--jsonl",
        action="store_true",
        help='read lines of JSON, the default if FILE ends in .jsonl: {"prompt": text or token ids} or {"messages": '
        "[...]}, with any sampling parameters, priority, client and expected_output_len; or OpenAI's batch format",
    )
    files.add_argument(
        "--output",
        metavar="FILE",
        help="write each answer to FILE when it is complete, as a line of JSON, and skip the lines that FILE already "
        "answers (default: print the answers in the order of the prompts)",
    )
    files.add_argument("--json", action="store_true", help="print answers as lines of JSON, not as text")
    files.add_argument("--trace", metavar="FILE", help="write a trace of all steps, for https://ui.perfetto.dev")
    files.add_argument("--timeline", metavar="FILE", help="write a web page that plays all steps")
    chat.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    for command, changes in ((generate, {}), (chat, {"max_tokens": None})):
        command.add_argument("--quiet", action="store_true", help="print only answers and errors")
        engine = command.add_argument_group("engine")
        engine.add_argument("--model", required=True, help="folder or Hugging Face id of the model")
        add_options(engine, EngineArgs, ENGINE_FIELDS)
        add_options(command.add_argument_group("sampling"), SamplingParams, SAMPLING_FIELDS, **changes)
    args = parser.parse_args(argv)
    args.engine_args = _given(args, ENGINE_FIELDS)
    args.sampling_args = _given(args, SAMPLING_FIELDS)
    return args


def json_object(text: str) -> Any:
    return json.loads(text)


ALL_CHOICES = {**CHOICES, "dtype": ("auto", *DTYPES)}
OPTION_OF_TYPE: dict[Any, dict[str, Any]] = {  # a field of several types gets the first option here
    bool: {"action": argparse.BooleanOptionalAction},
    Sequence[int]: {"type": int, "action": "append", "metavar": "ID", "help": "May be given several times."},
    Sequence[str]: {"action": "append", "metavar": "TEXT", "help": "May be given several times."},
    Mapping[int, float]: {"type": json_object, "metavar": "JSON", "help": 'For example {"5": -100}.'},
    int: {"type": int, "metavar": "INT"},
    float: {"type": float, "metavar": "FLOAT"},
    str: {"metavar": "TEXT"},
}


def add_options(group: Any, cls: Any, names: Collection[str], **changes: Any) -> None:
    """Add an option for each named field of a dataclass. One that isn't given on the command line is None.

    The help is the field's item, "name: text", in the docstring of the class. changes: defaults that aren't the field's.
    """
    texts = dict(re.findall(r"^(\w+): (.+(?:\n +.+)*)", inspect.getdoc(cls) or "", re.MULTILINE))
    for field in fields(cls):
        if field.name not in names:
            continue
        types = get_args(field.type) or (field.type,)
        option = next(option for kind, option in OPTION_OF_TYPE.items() if kind in types)
        if field.name in ALL_CHOICES:
            option = {"choices": list(ALL_CHOICES[field.name])}
        default = str(changes.get(field.name, field.default)).lower()
        text = f"{texts[field.name]} {option.get('help', '')} (default: {default})"
        text = " ".join(text.replace("%", "%%").split())
        group.add_argument(f"--{field.name.replace('_', '-')}", **{**option, "help": text})


def _given(args: argparse.Namespace, names: Collection[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(args, name)) is not None}


# ---------------------------------------------------------------------- generate


def run_generate(args: argparse.Namespace) -> int:
    """Returns the exit status: 1 if a line was wrong."""
    # Wrong parameters and paths are reported before the model is loaded.
    params = make_params(args.sampling_args)
    recorders: list[tuple[Any, Any, str]] = [
        (Trace("generate"), write_trace, args.trace),
        (Timeline("generate"), write_timeline, args.timeline),
    ]
    recorders = [recorder for recorder in recorders if recorder[-1]]
    with ExitStack() as stack:
        check_paths_differ([args.input, args.output, args.trace, args.timeline])
        lines, parse, num_lines = open_input(args, stack)
        results, progress = None, Progress(0, 0, lines)
        if args.output:
            results = stack.enter_context(open(args.output, "ab+"))
            progress = find_unanswered(results, lines, parse)
        first = next(progress.unanswered, None)
        if first is None:
            if progress.num_answers == 0:
                raise ValueError("no prompts: give them as arguments, by --input, or on stdin")
            print(f"minicb: {args.output} has all {progress.num_answers} answers", file=sys.stderr)
            return report_wrong(progress.num_wrong)
        for *_, path in recorders:
            open(path, "a").close()
        engine = LLM(args.model, **args.engine_args).engine
        engine.core.observers += [observer for observer, *_ in recorders]
        try:
            if len(args.prompts) == 1 and params.n == 1 and not (args.json or args.output):
                return print_prompt(engine, parse(*first))
            bar = tqdm(
                initial=progress.num_answers, total=num_lines, unit="request", disable=args.quiet, dynamic_ncols=True
            )
            lines = chain([first], progress.unanswered)
            num_wrong = write_answers(args, engine, lines, parse, results, stack.enter_context(bar))
            return report_wrong(progress.num_wrong + num_wrong)
        finally:  # after Ctrl-C too: the steps so far may be what the caller wants to see
            for observer, write_recording, path in recorders:
                write_recording(path, [observer])


def check_paths_differ(paths: Sequence[str | None]) -> None:
    given = [os.path.realpath(path) for path in paths if path]
    if len(set(given)) < len(given):
        raise ValueError("--input, --output, --trace and --timeline must be different files")


def open_input(args: argparse.Namespace, stack: ExitStack) -> tuple[Iterator[RawLine], ParseLine, int | None]:
    """The lines of the input, how to parse one, and how many they are, None if that can't be known."""
    is_json = not args.prompts and (args.jsonl or (args.input or "").endswith(".jsonl"))
    parse = partial(parse_line, defaults=args.sampling_args, is_json=is_json)
    if args.prompts:
        if args.input:
            raise ValueError("give prompts or --input, not both")
        return enumerate(map(os.fsencode, args.prompts), 1), parse, len(args.prompts)
    if args.input in (None, "-"):
        return number_lines(sys.stdin.buffer), parse, None
    num_lines = None
    if os.path.isfile(args.input):  # a pipe can be read only once
        with open(args.input, "rb") as file:
            num_lines = sum(not line.isspace() for line in file)
    return number_lines(stack.enter_context(open(args.input, "rb"))), parse, num_lines


def write_answers(
    args: argparse.Namespace,
    engine: Engine,
    lines: Iterator[RawLine],
    parse: ParseLine,
    results: BinaryIO | None,
    bar: tqdm,
) -> int:
    """Serve the lines, and write or print their answers. Returns how many lines were wrong."""
    num_wrong = num_tokens = 0
    serve = serve_lines if results else serve_in_order
    for line, output in serve(engine, lines, parse, max_in_work=2 * engine.args.max_num_seqs):
        if output is None:
            num_wrong += 1
            bar.write(f"minicb: {line.error}", file=sys.stderr)
        else:
            num_tokens += sum(len(sample.token_ids) for sample in output.outputs)
        if results:
            write_answer(results, line.answer(output, args.model))
        elif args.json:
            bar.write(to_json(line.answer(output, args.model)).decode())
        elif line.request is not None and output is not None:
            bar.write(format_text(line.request, output))
        bar.update()
        if elapsed := bar.format_dict["elapsed"]:
            bar.set_postfix_str(f"{num_tokens / elapsed:.0f} tok/s", refresh=False)
    return num_wrong


def report_wrong(num_wrong: int) -> int:
    """Returns the exit status."""
    if num_wrong:
        advice = "to have a line done again, correct it and delete its answer"
        print(f"minicb: wrong lines: {num_wrong}; {advice}", file=sys.stderr)
    return int(num_wrong > 0)


def print_prompt(engine: Engine, line: ParsedLine) -> int:
    if line.request is None:
        raise ValueError(line.error)
    output = print_stream(engine, line.request.make_request(engine))
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
    """Run a command. Returns its exit status."""
    args = parse_args(argv)
    if args.quiet:
        logging.getLogger("minicb").addHandler(logging.NullHandler())  # or the engine would log its start
    try:
        return run_chat(args) if args.command == "chat" else run_generate(args)
    except (ValueError, OSError) as error:
        print(f"minicb: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("minicb: interrupted", file=sys.stderr)
        return 130
