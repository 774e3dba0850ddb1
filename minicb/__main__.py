"""The command line: python -m minicb generate --model M "prompt" …"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any, NamedTuple

from minicb.checks import check_int, show
from minicb.engine import Prompt
from minicb.llm import LLM
from minicb.request import RequestOutput, SamplingParams
from minicb.timeline import Timeline, write_timeline
from minicb.trace import Trace, write_trace


class Task(NamedTuple):
    prompt: Prompt
    params: SamplingParams
    priority: int = 0
    client: str = "default"
    expected_output_len: int | None = None


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m minicb", description="Continuous batching of language models.")
    commands = parser.add_subparsers(dest="command", required=True)
    generate = commands.add_parser("generate", help="complete prompts")
    generate.add_argument("prompts", nargs="*", help="prompts; without any and without --input, lines of stdin")
    generate.add_argument("--input", metavar="FILE", help="prompts, one a line; - is stdin; *.jsonl implies --jsonl")
    generate.add_argument(
        "--jsonl",
        action="store_true",
        help='input lines are JSON: {"prompt": text or token ids, "max_tokens": 5, "priority": 0, "client": "a", …}',
    )
    generate.add_argument("--json", action="store_true", help="write results as JSON lines")
    generate.add_argument("--output", metavar="FILE", help="write results to FILE instead of stdout")
    generate.add_argument("--quiet", action="store_true", help="no progress bar")
    generate.add_argument("--trace", metavar="FILE", help="what happened when, as JSON for https://ui.perfetto.dev")
    generate.add_argument("--timeline", metavar="FILE", help="what happened when, as a web page that plays it")

    engine = generate.add_argument_group("engine")
    engine.add_argument("--model", required=True, help="folder or Hugging Face id")
    for name in ("tokenizer", "dtype", "device", "load-format", "preemption-mode", "scheduling-policy", "batching"):
        engine.add_argument(f"--{name}")
    sizes = ("max-model-len", "max-num-seqs", "max-num-batched-tokens", "block-size", "num-blocks", "num-cpu-blocks")
    for name in (*sizes, "long-prefill-token-threshold", "max-long-partial-prefills"):
        engine.add_argument(f"--{name}", type=int)
    for name in ("gpu-memory-utilization", "swap-space"):
        engine.add_argument(f"--{name}", type=float)
    engine.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
    engine.add_argument("--enforce-eager", action="store_true", default=None, help="compile nothing: starts at once")

    sampling = generate.add_argument_group("sampling")
    for name in ("temperature", "top-p", "min-p"):
        sampling.add_argument(f"--{name}", type=float)
    for name in ("top-k", "seed", "max-tokens", "min-tokens"):
        sampling.add_argument(f"--{name}", type=int)
    sampling.add_argument(
        "--stop-token-ids", type=int, action="append", metavar="ID", help="may be given several times"
    )
    sampling.add_argument("--ignore-eos", action="store_true", default=None)
    args = parser.parse_args(argv)
    args.engine_args = _given(args, engine, leave_out={"model"})
    args.sampling_args = _given(args, sampling)
    return args


def _given(args: argparse.Namespace, group: Any, leave_out: Iterable[str] = ()) -> dict[str, Any]:
    """The options of a group that were given; the others keep the defaults of the API."""
    names = [action.dest for action in group._group_actions]
    return {name: value for name in names if name not in leave_out and (value := getattr(args, name)) is not None}


def read_tasks(args: argparse.Namespace, params: SamplingParams) -> list[Task]:
    """Prompts of the command line, then those of the input. ValueError names the line that is wrong."""
    tasks = [Task(prompt, params) for prompt in args.prompts]
    if args.input is None and args.prompts:
        return tasks
    if args.input in (None, "-"):
        return tasks + list(_read_lines(sys.stdin, "stdin", args.jsonl, params))
    with open(args.input, encoding="utf-8-sig") as file:
        is_jsonl = args.jsonl or args.input.endswith(".jsonl")
        return tasks + list(_read_lines(file, args.input, is_jsonl, params))


def _read_lines(lines: Iterable[str], name: str, is_jsonl: bool, params: SamplingParams) -> Iterator[Task]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield _read_json(line, params) if is_jsonl else Task(line.rstrip("\r\n"), params)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{name}, line {number}: {error}") from error


def _read_json(line: str, params: SamplingParams) -> Task:
    entry = json.loads(line)
    if not isinstance(entry, dict) or "prompt" not in entry:
        raise ValueError('a line must be a JSON object with a "prompt"')
    prompt = entry.pop("prompt")
    if not isinstance(prompt, (str, list)):
        raise ValueError(f"prompt must be text or a list of token ids, not {show(prompt)}")
    if isinstance(prompt, list):
        prompt = [check_int("prompt token id", token, minimum=0) for token in prompt]
    own = {name: entry.pop(name) for name in Task._fields[2:] if name in entry}
    unknown = entry.keys() - {field.name for field in fields(SamplingParams)}
    if unknown:
        raise ValueError(f"unknown fields: {', '.join(sorted(unknown))}")
    # The engine checks these too, but knows no lines.
    if "priority" in own:
        check_int("priority", own["priority"], minimum=-(2**63), below=2**63)
    if own.get("expected_output_len") is not None:
        check_int("expected_output_len", own["expected_output_len"], minimum=1, below=2**63)
    if not isinstance(own.get("client", ""), str):
        raise ValueError(f"client must be a string, not {show(own['client'])}")
    return Task(prompt, replace(params, **entry), **own)


def format_result(output: RequestOutput, as_json: bool) -> str:
    completion = output.outputs[0]
    if not as_json:
        return completion.text if output.prompt is not None else " ".join(map(str, completion.token_ids))
    result = {
        "prompt": output.prompt_token_ids if output.prompt is None else output.prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    return json.dumps(result, ensure_ascii=False)


def generate(args: argparse.Namespace) -> None:
    tasks = read_tasks(args, SamplingParams(**args.sampling_args))
    if not tasks:
        raise ValueError("no prompts: give them as arguments, by --input, or on stdin")
    recorders: list[tuple[Any, Any, str]] = [
        (Trace("generate"), write_trace, args.trace),
        (Timeline("generate"), write_timeline, args.timeline),
    ]
    recorders = [recorder for recorder in recorders if recorder[-1]]
    paths = [path for path in (args.input, args.output, args.trace, args.timeline) if path]
    if len(set(map(os.path.realpath, paths))) < len(paths):
        raise ValueError("--input, --output, --trace and --timeline must be different files")
    for path in paths[bool(args.input) :]:
        open(path, "a").close()  # a place that can't be written to is known before the work is done
    llm = LLM(args.model, **args.engine_args)
    llm.engine.core.observers += [observer for observer, *_ in recorders]
    prompts, params, *columns = zip(*tasks, strict=True)
    for_each = dict(zip(Task._fields[2:], columns, strict=True))
    try:
        outputs = llm.generate(prompts, params, not args.quiet, **for_each)
    except KeyboardInterrupt:  # what has happened so far may be just what was asked for
        write_recordings(recorders)
        raise
    with open(args.output, "w", encoding="utf-8") if args.output else nullcontext(sys.stdout) as file:
        for output in outputs:
            file.write(format_result(output, args.json) + "\n")
    write_recordings(recorders)


def write_recordings(recorders: Sequence[tuple[Any, Any, str]]) -> None:
    for observer, write, path in recorders:
        write(path, [observer])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        generate(args)
    except (ValueError, OSError) as error:
        print(f"minicb: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("minicb: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
