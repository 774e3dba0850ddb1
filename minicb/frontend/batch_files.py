"""Files of prompts: read as there is room, answered as they finish, continued where a run was killed.

The output has one line of JSON for each line of the input that isn't blank: its answer, or what is wrong with it. An
answer is written at once and whole, so the output itself says what has been done, and nothing else is kept. Not more
lines are in work at a time than keep the engine busy, so those that a killed run had read and not answered are few, and
the memory that all this takes doesn't grow with the files. (What is printed in order is another matter.)
"""

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, BinaryIO, NamedTuple

from minicb.engine import Engine
from minicb.frontend.json_lines import Task, format_object, read_object
from minicb.frontend.openai import answer_body, batch_answer, error_body, read_batch_entry
from minicb.request import Request, RequestOutput

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]


BEGINNINGS = (b'{"line": ', b'{"id": "batch_req_')  # of the answers in either form


class Line(NamedTuple):
    """A line of the input and what it asks for, or what is wrong with it."""

    number: int  # from 1
    task: Task | None = None
    error: str | None = None
    is_batch: bool = False  # is it in the form of OpenAI's batch files?
    custom_id: str | None = None  # then it has one

    def answer(self, output: RequestOutput | None, model: str) -> dict[str, Any]:
        """What is written of it. Batch files are answered in OpenAI's form."""
        if not self.is_batch:
            if self.task is None or output is None:
                return {"line": self.number, "error": self.error}
            return format_object(self.number, self.task, output)
        if self.task is None or output is None:
            status, body = 400, error_body(str(self.error))
        elif failed := [sample for sample in output.outputs if sample.finish_reason == "error"]:
            status, body = 500, error_body(str(failed[0].stop_reason), "server_error")
        else:
            status, body = 200, answer_body(self.task, output, model)
        return batch_answer(self.number, self.custom_id, status, body)


Numbered = tuple[int, str]
ReadLine = Callable[[int, str], Line]


def read_plain(defaults: Mapping[str, Any], number: int, text: str) -> Line:
    """A line that is a prompt. defaults: sampling parameters."""
    return Line(number, read_object({"prompt": text}, defaults))


def read_json(defaults: Mapping[str, Any], number: int, text: str) -> Line:
    """A line of JSON, in minicb's form or in that of OpenAI's batch files."""
    line = Line(number)
    try:
        entry = json.loads(text)
        if not isinstance(entry, dict) or "custom_id" not in entry and "body" not in entry:
            return line._replace(task=read_object(entry, defaults))
        custom_id = entry.get("custom_id")
        line = line._replace(is_batch=True, custom_id=custom_id if isinstance(custom_id, str) else None)
        return line._replace(task=read_batch_entry(entry, defaults))
    except json.JSONDecodeError as error:
        return line._replace(error=f"line {number}: not JSON: {error.msg}, at character {error.pos + 1}")
    except (ValueError, RecursionError) as error:
        return line._replace(error=f"line {number}: {error}")


def numbered(file: Iterable[str]) -> Iterator[Numbered]:
    """A file's lines that aren't blank, with their numbers."""
    return ((number, line.rstrip("\r\n")) for number, line in enumerate(file, 1) if line.strip())


def serve_lines(
    engine: Engine, lines: Iterable[Numbered], read_line: ReadLine, max_in_work: int
) -> Iterator[tuple[Line, RequestOutput | None]]:
    """Serve lines, at most so many at a time, and yield each with its output when it has ended, with None if it is
    wrong. Of the outputs before that nobody takes note, so none are made (`Engine.step` would)."""
    lines, in_work = iter(lines), dict[Request, Line]()
    while True:
        while len(in_work) < max_in_work and (next_line := next(lines, None)) is not None:
            line = read_line(*next_line)
            try:
                request = None if line.task is None else line.task.make_request(engine)
            except ValueError as error:
                request, line = None, line._replace(task=None, error=f"line {line.number}: {error}")
            if request is None:
                yield line, None
            else:
                engine.submit(request)
                in_work[request] = line
        if not in_work:
            return
        for request in dict.fromkeys(moved.samples[0] for moved in engine.core.step()):
            if request.all_ended:
                yield in_work.pop(request), engine.output(request)


def serve_in_order(
    engine: Engine, lines: Iterable[Numbered], read_line: ReadLine, max_in_work: int
) -> Iterator[tuple[Line, RequestOutput | None]]:
    """The same, but what has ended waits for those before it, so this is for as much as memory holds."""
    order, ended = deque[int](), dict[int, tuple[Line, RequestOutput | None]]()

    def noted() -> Iterator[Numbered]:
        for line in lines:
            order.append(line[0])
            yield line

    for line, output in serve_lines(engine, noted(), read_line, max_in_work):
        ended[line.number] = line, output
        while order and order[0] in ended:
            yield ended.pop(order.popleft())


# ---------------------------------------------------------------------- the output file


def open_results(path: str) -> BinaryIO:
    """Open the output for more answers. ValueError if another run has it open."""
    file = open(path, "ab+")  # noqa: SIM115
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ValueError(f"another run is writing to {path}") from None
        except OSError:  # a file system without locks
            pass
    return file


def to_json(answer: Any) -> str:
    """Valid UTF-8, too: lone surrogates, which JSON can spell and UTF-8 can't, stay as JSON spells them."""
    return json.dumps(answer, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


def write_answer(file: BinaryIO, answer: Mapping[str, Any]) -> None:
    file.write(to_json(answer).encode() + b"\n")
    file.flush()


class Done(NamedTuple):
    """What an output file has already."""

    num_answers: int
    num_wrong: int  # of them; those that say what is wrong with their lines
    unanswered: Iterator[Numbered]  # the lines that have no answer, in their order


def find_unanswered(file: BinaryIO, lines: Iterator[Numbered], read_line: ReadLine) -> Done:
    """What is done, and which lines are left to do.

    The end of the file is cut off if a killed run wrote only a part of an answer there. ValueError if the file has
    anything but one answer to each of some of these lines.
    """
    num_answers, num_wrong, last, end, unanswered = 0, 0, 0, 0, dict[int, str]()
    file.seek(0)
    for raw in file:
        if _is_part(raw):
            file.truncate(end)
            break
        end += len(raw)
        num_answers += 1
        answer, number = _read_answer(raw)
        # Answers come in the order of their ends: earlier lines may have theirs further down, or nowhere.
        while last < number and (line := next(lines, None)) is not None:
            last, unanswered[line[0]] = line[0], line[1]
        text = unanswered.pop(number, None)
        if text is None or not _answers(answer, read_line(number, text)):
            raise ValueError(f"{file.name}, line {num_answers}, answers no line of this input: take another output")
        num_wrong += bool(answer.get("error"))
    return Done(num_answers, num_wrong, chain(unanswered.items(), lines))


def _is_part(raw: bytes) -> bool:
    """The beginning of an answer, without its end?"""
    return not raw.endswith(b"\n") and any(raw[: len(begin)] == begin[: len(raw)] for begin in BEGINNINGS)


def _read_answer(raw: bytes) -> tuple[dict[str, Any], int]:
    """An answer, and the number of the line that it answers, 0 if it is none."""
    try:
        answer = json.loads(raw) if raw.startswith(BEGINNINGS) and raw.endswith(b"\n") else {}
    except (ValueError, RecursionError):
        answer = {}
    if type(answer.get("line")) is int:
        return answer, answer["line"]
    match = re.fullmatch("batch_req_([0-9]{1,18})", str(answer.get("id")))
    return answer, int(match[1]) if match else 0


def _answers(answer: Mapping[str, Any], line: Line) -> bool:
    if line.is_batch or "custom_id" in answer:
        return line.is_batch and "custom_id" in answer and answer["custom_id"] == _as_written(line.custom_id)
    if line.task is None or "error" in answer:
        return "error" in answer
    if line.task.messages is not None:
        return bool(answer.get("messages") == _as_written(line.task.messages))
    return bool(answer.get("prompt") == _as_written(line.task.prompt))


def _as_written(value: Any) -> Any:
    """As it is read from an answer: two lone surrogates in a row may have become one character."""
    return json.loads(to_json(value))
