"""Batch files: each line of the input is answered by one line of JSON in the output.

An answer is written whole, as soon as its request ends. A killed run therefore leaves whole answers and at most one
part of an answer, and the output alone says which lines are still unanswered. Memory doesn't grow with the files: few
lines are in work at a time. Only answers that are printed in order may have to wait in memory for an earlier one.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, tee
from typing import Any, BinaryIO, NamedTuple

from minicb.engine import Engine
from minicb.frontend.json_lines import ParsedRequest, format_object, read_object
from minicb.frontend.openai import answer_body, batch_answer, error_body, read_batch_entry
from minicb.outputs import RequestOutput
from minicb.request import Request

BEGINNINGS = (b'{"line": ', b'{"id": "batch_req_')  # of an answer in minicb's form and in OpenAI's; a number follows

RawLine = tuple[int, bytes]  # number, from 1, and text without the line break


class ParsedLine(NamedTuple):
    """A line of the input: the request that it asks for, or the error in it."""

    number: int
    request: ParsedRequest | None = None
    error: str | None = None
    is_batch: bool = False  # is it in the form of OpenAI's batch files?
    custom_id: str | None = None  # only such lines have one

    def answer(self, output: RequestOutput | None, model: str) -> dict[str, Any]:
        """The answer, in the form of the line. output: None if the line is wrong."""
        if not self.is_batch:
            if self.request is None or output is None:
                return {"line": self.number, "error": self.error}
            return format_object(self.number, self.request, output)
        if self.request is None or output is None:
            status, body = 400, error_body(str(self.error))
        elif failed := [sample for sample in output.outputs if sample.finish_reason == "error"]:
            status, body = 500, error_body(str(failed[0].stop_reason), "server_error")
        else:
            status, body = 200, answer_body(self.request, output, model)
        return batch_answer(self.number, self.custom_id, status, body)


ParseLine = Callable[[int, bytes], ParsedLine]


def parse_line(number: int, text: bytes, defaults: Mapping[str, Any], is_json: bool) -> ParsedLine:
    """Parse a line: JSON in minicb's form or in that of OpenAI's batch files, or else a prompt as it is.

    defaults: sampling parameters of lines that don't name them.
    """
    line = ParsedLine(number)
    try:
        decoded = text.decode("utf-8-sig")  # the first line may begin with a byte order mark
        entry = json.loads(decoded) if is_json else {"prompt": decoded}
        if not isinstance(entry, dict) or "custom_id" not in entry and "body" not in entry:
            return line._replace(request=read_object(entry, defaults))
        custom_id = entry.get("custom_id")
        line = line._replace(is_batch=True, custom_id=custom_id if isinstance(custom_id, str) else None)
        return line._replace(request=read_batch_entry(entry, defaults))
    except json.JSONDecodeError as error:
        return line._replace(error=f"line {number}: not JSON: {error.msg}, at character {error.pos + 1}")
    except (ValueError, RecursionError) as error:
        return line._replace(error=f"line {number}: {error}")


def number_lines(file: Iterable[bytes]) -> Iterator[RawLine]:
    """The lines of a file with their numbers, without blank ones."""
    return ((number, line.rstrip(b"\r\n")) for number, line in enumerate(file, 1) if line.strip())


def serve_lines(
    engine: Engine, lines: Iterable[RawLine], parse: ParseLine, max_in_work: int
) -> Iterator[tuple[ParsedLine, RequestOutput | None]]:
    """Serve lines, at most max_in_work at a time, and yield each when it ends, with its output or with None if it is
    wrong. `Engine.step` would make an output for every token, so this calls `EngineCore.step`."""
    lines, in_work = iter(lines), dict[Request, ParsedLine]()
    while True:
        while len(in_work) < max_in_work and (next_line := next(lines, None)) is not None:
            line = parse(*next_line)
            try:
                request = None if line.request is None else line.request.make_request(engine)
            except ValueError as error:
                request, line = None, line._replace(request=None, error=f"line {line.number}: {error}")
            if request is None:
                yield line, None
            else:
                engine.submit(request)
                in_work[request] = line
        if not in_work:
            return
        for request in dict.fromkeys(sample.samples[0] for sample in engine.core.step()):
            if request.all_ended:
                yield in_work.pop(request), engine.output(request)


def serve_in_order(
    engine: Engine, lines: Iterable[RawLine], parse: ParseLine, max_in_work: int
) -> Iterator[tuple[ParsedLine, RequestOutput | None]]:
    """The same in the order of the lines. What ends early waits in memory."""
    lines, ordered = tee(lines)
    served = serve_lines(engine, lines, parse, max_in_work)
    ended = dict[int, tuple[ParsedLine, RequestOutput | None]]()
    for number, _ in ordered:
        while number not in ended:
            line, output = next(served)
            ended[line.number] = line, output
        yield ended.pop(number)


# ---------------------------------------------------------------------- the output file


def to_json(answer: Any) -> bytes:
    """JSON in UTF-8. A lone surrogate, which UTF-8 can't encode, is escaped as in JSON."""
    return json.dumps(answer, ensure_ascii=False).encode("utf-8", "backslashreplace")


def write_answer(file: BinaryIO, answer: Mapping[str, Any]) -> None:
    file.write(to_json(answer) + b"\n")
    file.flush()


class Progress(NamedTuple):
    """How much of the input an output file answers."""

    num_answers: int
    num_wrong: int  # answers that report an error
    unanswered: Iterator[RawLine]  # in the order of the input


def find_unanswered(file: BinaryIO, lines: Iterator[RawLine], parse: ParseLine) -> Progress:
    """Compare an output file with its input. A part of an answer at the end, left by a killed run, is cut off.

    ValueError if the file holds anything else than one answer each to some of the lines.
    """
    num_answers, num_wrong, last, end, unanswered = 0, 0, 0, 0, dict[int, bytes]()
    file.seek(0)
    for raw in file:
        if not raw.endswith(b"\n") and any(raw[: len(begin)] == begin[: len(raw)] for begin in BEGINNINGS):
            file.truncate(end)
            break
        end += len(raw)
        num_answers += 1
        answer, number = _read_answer(raw)
        # Answers are in the order in which they ended: those to earlier lines may come later, or be missing.
        while last < number and (line := next(lines, None)) is not None:
            last, unanswered[line[0]] = line
        text = unanswered.pop(number, None)
        if text is None or not _is_answer(answer, parse(number, text)):
            raise ValueError(f"{file.name}, line {num_answers}, answers no line of this input: take another output")
        num_wrong += bool(answer.get("error"))
    return Progress(num_answers, num_wrong, chain(unanswered.items(), lines))


def _read_answer(raw: bytes) -> tuple[dict[str, Any], int]:
    """An answer and the number of the line that it answers; 0 if it isn't an answer."""
    begin = re.match(b"(?:%s|%s)([0-9]+)" % BEGINNINGS, raw)
    try:
        return (json.loads(raw), int(begin[1])) if begin else ({}, 0)
    except (ValueError, RecursionError):
        return {}, 0


def _is_answer(answer: Mapping[str, Any], line: ParsedLine) -> bool:
    """Does it repeat what it should of the line?"""
    if line.is_batch or "custom_id" in answer:
        return line.is_batch and "custom_id" in answer and answer["custom_id"] == line.custom_id
    if line.request is None or "error" in answer:
        return "error" in answer
    return line.request.asked.items() <= answer.items()
