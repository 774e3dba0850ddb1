"""Files of prompts: every line gets its answer once, whatever the lines are and however often a run is killed."""

import io
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from conftest import greedy
from hypothesis import given, settings
from hypothesis import strategies as st

import minicb.frontend.cli
from minicb import LLM, CompletionOutput, RequestOutput, SamplingParams
from minicb.frontend.batch_files import (
    ParsedLine,
    find_unanswered,
    number_lines,
    parse_line,
    serve_in_order,
    serve_lines,
    write_answer,
)
from minicb.frontend.cli import main
from minicb.frontend.json_lines import ParsedRequest
from minicb.frontend.openai import CHAT, COMPLETIONS
from minicb.request import Request, RequestState

MAX_IN_WORK = 4  # twice as many as run at a time


@pytest.fixture(scope="module")
def llm(byte_model) -> LLM:
    """Two at a time, so that answers of a few lines come in many orders."""
    arguments = {"block_size": 4, "num_blocks": 30, "max_num_seqs": 2, "max_model_len": 60}
    return LLM(byte_model, device="cpu", dtype="float64", enforce_eager=True, **arguments)


class Run:
    """One run of the command. Of what it did: its exit status, what it said, which prompts it computed."""

    def __init__(self, llm: LLM, folder: Path | str, *more: str, stdin: bytes | None = None):
        self.submitted, self.num_loaded = [], 0
        submit = llm.engine.submit

        def load(*args, **kwargs):
            self.num_loaded += 1
            return llm

        def submit_and_note(request):
            self.submitted.append(request.prompt or request.token_ids[: request.num_prompt_tokens])
            return submit(request)

        files = ["--output", f"{folder}/out"] if stdin is None else []
        files += ["--input", f"{folder}/in.jsonl"] if stdin is None else []
        sys_in = io.TextIOWrapper(io.BytesIO(stdin or b""), encoding="utf-8")
        sys_out, sys_err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=e) for e in ("strict", "replace"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(minicb.frontend.cli, "LLM", load)
            patch.setattr(llm.engine, "submit", submit_and_note)
            for name, stream in (("stdin", sys_in), ("stdout", sys_out), ("stderr", sys_err)):
                patch.setattr(sys, name, stream)
            try:
                self.status = main(["generate", "--model", "m", "--max-tokens", "3", "--quiet", *files, *more])
            finally:
                llm.engine.abort_all()
                sys_out.flush(), sys_err.flush()
        self.out, self.err = (stream.buffer.getvalue().decode() for stream in (sys_out, sys_err))


# ---------------------------------------------------------------------- lines, and what each gets by itself

Case = tuple[bytes, dict | None, bool]  # a line, what it asks for or None if it is wrong, and if it is OpenAI's

CUSTOM_IDS = ["a", "b", "日", "\udcff", "\ud83d", "\\", '"']
WRONG = [
    *(b"{", b"[1]", b"5", b"null", b'"prompt"', b"\xff", b"\x00", b'{"prompt": "\xc3("}', b'{"prompt": "\\ud800"}'),
    *(b'{"prompt": "a", "max_token": 1}', b'{"prompt": "a", "max_tokens": 0}', b'{"prompt": ""}', b'{"prompt": []}'),
    *(b'{"prompt": [999]}', b'{"prompt": "a", "priority": null}', b'{"prompt": "a", "n": 2, "temperature": 0}'),
    *(b'{"prompt": "%s"}' % (b"long" * 20), b'{"messages": []}', b'{"messages": [1]}', b'{"prompt": "a"} x'),
    *(b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}" for depth in (400, 100_000)),
    b'{"messages": [{"role": "user", "content": "\xff"}]}',
    b'{"prompt": "a", "stop_token_ids": [258]}',
]
WRONG_BATCH = [
    {"body": {"prompt": "a"}, "url": COMPLETIONS},
    {"custom_id": 5, "body": {"prompt": "a"}, "url": COMPLETIONS},
    {"custom_id": "a", "body": {"prompt": "a"}},
    {"custom_id": "a", "body": {"prompt": "a"}, "url": "/v1/embeddings"},
    {"custom_id": "a", "method": "GET", "body": {"prompt": "a"}, "url": COMPLETIONS},
    {"custom_id": "a", "body": {"prompt": "a", "stream": True}, "url": COMPLETIONS},
    {"custom_id": "a", "body": {"prompt": "long" * 20}, "url": COMPLETIONS},
    {"custom_id": "a", "body": {"messages": []}, "url": CHAT},
    {"custom_id": "\udcff", "prompt": "a"},
]


def spell(entry: dict) -> bytes:
    """As UTF-8. A lone surrogate is escaped."""
    return json.dumps(entry, ensure_ascii=False).encode("utf-8", "backslashreplace")


PARAMS = st.fixed_dictionaries(
    {"temperature": st.just(0)} | {"max_tokens": st.integers(1, 5)},
    optional={"logprobs": st.integers(0, 2), "stop": st.just(["e", "\ufffd"]), "ignore_eos": st.booleans()},
) | st.fixed_dictionaries(
    {"seed": st.integers(0, 9), "max_tokens": st.integers(1, 4)},
    optional={"n": st.integers(1, 3), "logprobs": st.integers(-1, 2), "logit_bias": st.just({"257": 9})},
)
PROMPTS = st.fixed_dictionaries({"prompt": st.sampled_from(["a", "hi", " 日 ", "line\nbreak", [1, 2, 3]])})
CHATS = st.fixed_dictionaries({"messages": st.sampled_from([[{"role": "user", "content": c}] for c in "xy"])})


@st.composite
def cases(draw) -> Case:
    kind = draw(st.integers(0, 5))
    if kind == 0:
        return draw(st.sampled_from(WRONG)), None, False
    if kind == 1:
        return spell(draw(st.sampled_from(WRONG_BATCH))), None, True
    asked = {**draw(PROMPTS if kind % 2 else CHATS), **draw(PARAMS)}
    if kind < 4:
        return spell(asked), asked, False
    body = dict(asked)
    if "messages" in body and "logprobs" in body:  # as chats ask for them
        asked["logprobs"] = max(0, asked["logprobs"])
        body |= {"logprobs": True, "top_logprobs": asked["logprobs"]}
    url = CHAT if "messages" in asked else COMPLETIONS
    entry = {"custom_id": draw(st.sampled_from(CUSTOM_IDS)), "method": "POST", "url": url, "body": body}
    return spell(entry), asked, True


BLANK = st.sampled_from([b"", b"  ", b"\t", b"\x0c"])


@st.composite
def files(draw, max_lines: int = 8) -> tuple[bytes, dict[int, Case]]:
    """A file, and by their numbers the lines that want an answer."""
    lines = draw(st.lists(cases() | BLANK.map(lambda blank: (blank, None, None)), min_size=1, max_size=max_lines))
    lines.append(draw(cases()))
    ends = [draw(st.sampled_from([b"\n", b"\n", b"\r\n"])) for _ in lines]
    ends[-1] = draw(st.sampled_from([b"", ends[-1]]))
    mark = b"" if lines[0][2] is None else draw(st.sampled_from([b"", b"\xef\xbb\xbf"]))
    text = mark + b"".join(line[0] + end for line, end in zip(lines, ends, strict=True))
    return text, {number: case for number, case in enumerate(lines, 1) if case[2] is not None}


def by_itself(llm: LLM, asked: dict) -> RequestOutput:
    params = {name: value for name, value in asked.items() if name not in ("prompt", "messages")}
    if "logit_bias" in params:
        params["logit_bias"] = {int(token): value for token, value in params["logit_bias"].items()}
    ask = llm.chat if "messages" in asked else llm.generate
    [output] = ask(asked.get("messages") or asked["prompt"], SamplingParams(**params), use_tqdm=False)
    return output


def check_answer(llm: LLM, number: int, case: Case, answer: dict, known: dict[bytes, RequestOutput]) -> None:
    line, asked, is_batch = case
    if is_batch:
        assert answer.keys() == {"id", "custom_id", "response", "error"}
        assert answer["id"] == answer["response"]["request_id"] == f"batch_req_{number}"
        custom_id = json.loads(line).get("custom_id")
        assert answer["custom_id"] == (custom_id if isinstance(custom_id, str) else None)
        status, body = answer["response"]["status_code"], answer["response"]["body"]
        assert status == (400 if asked is None else 200)
        assert answer["error"] == body.get("error")
        if asked is None:
            assert body["error"]["message"].startswith(f"line {number}: ")
            return
    elif asked is None:
        assert answer.keys() == {"line", "error"}
        assert answer["line"] == number
        assert answer["error"].startswith(f"line {number}: ")
        return
    key = json.dumps(asked).encode()
    output = known[key] = known.get(key) or by_itself(llm, asked)
    if is_batch:
        assert body["model"] == "m"
        assert body["usage"]["completion_tokens"] == sum(len(sample.token_ids) for sample in output.outputs)
        for choice, sample in zip(body["choices"], output.outputs, strict=True):
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            assert (choice["index"], text, choice["finish_reason"]) == (sample.index, sample.text, sample.finish_reason)
            assert (choice["logprobs"] is None) == (asked.get("logprobs") is None)
        return
    assert answer["line"] == number
    for field in ("prompt", "messages"):
        assert (field in answer, answer.get(field)) == (field in asked, asked.get(field))
    samples = answer["samples"] if len(output.outputs) > 1 else [answer]
    for came, sample in zip(samples, output.outputs, strict=True):
        for field in ("text", "token_ids", "finish_reason", "stop_reason"):
            assert came[field] == getattr(sample, field)
        assert ("logprobs" in came) == (sample.logprobs is not None)
        for found, entry in zip(came.get("logprobs", ()), sample.logprobs or (), strict=True):
            assert [(p["token_id"], p["rank"]) for p in found] == [(i, p.rank) for i, p in entry.items()]
            assert [p["logprob"] for p in found] == pytest.approx([p.logprob for p in entry.values()])


def number_of(answer: dict) -> int:
    return answer["line"] if "line" in answer else int(answer["id"].removeprefix("batch_req_"))


def check_answers(llm: LLM, text: bytes, expected: dict[int, Case]) -> None:
    answers = [json.loads(line) for line in text.splitlines(keepends=True)]
    assert text.endswith(b"\n")
    assert sorted(map(number_of, answers)) == sorted(expected)
    known: dict[bytes, RequestOutput] = {}
    for answer in answers:
        number = number_of(answer)
        check_answer(llm, number, expected[number], answer, known)


@given(files())
@settings(max_examples=2 * settings.default.max_examples)
def test_every_line_has_one_answer_which_is_the_one_it_gets_alone(llm, file):
    """Right and wrong ones in any mixture: what is wrong is told with its number, and stops nothing."""
    text, expected = file
    num_wrong = sum(asked is None for _, asked, _ in expected.values())
    with TemporaryDirectory() as folder:
        Path(folder, "in.jsonl").write_bytes(text)
        run = Run(llm, folder)
        check_answers(llm, Path(folder, "out").read_bytes(), expected)
    assert len(run.submitted) == len(expected) - num_wrong
    assert run.status == (num_wrong > 0)
    told = [line for line in run.err.splitlines() if line.startswith("minicb: line ")]
    assert sorted(int(line.split()[2].rstrip(":")) for line in told) == sorted(
        number for number, (_, asked, _) in expected.items() if asked is None
    )


def test_what_is_printed_is_the_same_in_the_order_of_the_lines(llm, tmp_path):
    """The last ends first."""
    lines = [{"prompt": "a", "max_tokens": 5 - i, "temperature": 0, "ignore_eos": True} for i in range(5)]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(map(spell, lines)) + b"\n{\n")
    written = Run(llm, tmp_path)
    printed = Run(llm, tmp_path, "--json", "--jsonl", stdin=(tmp_path / "in.jsonl").read_bytes())
    answers = [json.loads(line) for line in printed.out.splitlines()]
    assert [answer["line"] for answer in answers] == [1, 2, 3, 4, 5, 6]
    written_answers = [json.loads(line) for line in (tmp_path / "out").read_bytes().splitlines()]
    assert sorted(written_answers, key=number_of) == answers
    assert written_answers != answers
    assert printed.status == written.status == 1


PLAIN = [b"{", b" a ", b"\xff", "\u65e5\u672c".encode(), b"5", b'"q"', b"\ttab\t"]


@given(st.lists(st.sampled_from(PLAIN) | BLANK, min_size=1, max_size=6), st.sampled_from([b"\n", b"\r\n"]))
def test_without_json_each_line_is_a_prompt_as_it_is(llm, lines, end):
    """Spaces included, the line's end not; also in a run that continues another."""
    with TemporaryDirectory() as folder:
        Path(folder, "in.txt").write_bytes(end.join([b"first", *lines]))
        Run(llm, folder, "--input", f"{folder}/in.txt")
        _, *others = Path(folder, "out").read_bytes().splitlines(keepends=True)
        Path(folder, "out").write_bytes(b"".join(others[-1:]))
        Run(llm, folder, "--input", f"{folder}/in.txt")
        answers = sorted(map(json.loads, Path(folder, "out").read_bytes().splitlines()), key=number_of)
    expected = {
        number: line for number, line in enumerate([b"first", *lines], 1) if line.decode(errors="replace").strip()
    }
    assert [answer["line"] for answer in answers] == list(expected)
    for answer in answers:
        line = expected[answer["line"]]
        assert answer.get("prompt") == (None if line == b"\xff" else line.decode())
        assert ("error" in answer) == (line == b"\xff")


def test_a_batch_line_whose_logits_are_not_finite_is_an_error_of_the_server():
    """In its own form, that is a finish_reason."""
    bad, good = CompletionOutput(0, "", [], "error", "logits"), CompletionOutput(1, "x", [5], "stop", None)
    for samples in ([bad], [bad, good]):
        output = RequestOutput("", "a", [1], samples, True)
        answer = ParsedLine(3, ParsedRequest("a", greedy()), is_batch=True, custom_id="c").answer(output, "m")
        assert answer["response"]["status_code"] == 500
        assert answer["error"] == answer["response"]["body"]["error"]
        assert (answer["error"]["message"], answer["error"]["type"]) == ("logits", "server_error")
    assert (
        ParsedLine(3, ParsedRequest("a", greedy())).answer(RequestOutput("", "a", [1], [bad], True), "m")[
            "finish_reason"
        ]
        == "error"
    )


def test_the_reason_is_that_of_the_sample_that_has_one():
    samples = [CompletionOutput(0, "x", [5], "stop"), CompletionOutput(1, "", [], "error", "logits")]
    line = ParsedLine(3, ParsedRequest("a", greedy()), is_batch=True, custom_id="c")
    assert line.answer(RequestOutput("", "a", [1], samples, True), "m")["error"]["message"] == "logits"


# ---------------------------------------------------------------------- killed and continued


def leave(rng: random.Random, text: bytes) -> tuple[bytes, list[bytes]]:
    """What a kill could have left: of the answers, in another order of their ends, the first few, and a part of the
    next. Also the whole ones of them."""
    whole = text.splitlines(keepends=True)
    # Only so many are in work at a time, so an answer comes before those that many lines further down.
    ends = {line: number_of(json.loads(line)) + rng.uniform(0, MAX_IN_WORK) for line in whole}
    whole.sort(key=ends.__getitem__)
    *kept, cut = whole[: rng.randint(1, len(whole))]
    return b"".join(kept) + cut[: rng.randrange(len(cut))], kept


@given(file=files(), rng=st.randoms(use_true_random=False), num_kills=st.integers(1, 3))
@settings(max_examples=2 * settings.default.max_examples)
def test_wherever_runs_are_killed_each_line_has_one_answer_in_the_end(llm, file, rng, num_kills):
    """What was there stays as it was, byte for byte; nothing that has an answer is computed again, and if everything
    has one, no model is loaded."""
    text, expected = file
    with TemporaryDirectory() as folder:
        out = Path(folder, "out")
        Path(folder, "in.jsonl").write_bytes(text)
        Run(llm, folder)
        for _ in range(num_kills):
            left, kept = leave(rng, out.read_bytes())
            out.write_bytes(left)
            run = Run(llm, folder)
            assert out.read_bytes().startswith(b"".join(kept))
            check_answers(llm, out.read_bytes(), expected)
            to_do = set(expected) - {number_of(json.loads(line)) for line in kept}
            assert len(run.submitted) == sum(expected[number][1] is not None for number in to_do)
            assert run.num_loaded == (len(to_do) > 0)
        before = out.read_bytes()
        assert (Run(llm, folder).num_loaded, out.read_bytes()) == (0, before)


PARSE = partial(parse_line, defaults={}, is_json=True)
LINES = [
    {"prompt": "a", "max_tokens": 1, "temperature": 0},
    {"custom_id": "\u65e5", "url": COMPLETIONS, "body": {"prompt": "a", "max_tokens": 1, "temperature": 0}},
    {"prompt": "a", "no": 1},
]


def test_the_output_may_end_at_any_byte(llm, tmp_path):
    """Each of an answer of the one form and the other, and of what is told of a wrong line."""
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(map(spell, LINES)))
    Run(llm, tmp_path)
    text = (tmp_path / "out").read_bytes()
    numbers = [number_of(json.loads(line)) for line in text.splitlines()]
    lines = list(map(spell, LINES))
    for length in range(len(text) + 1):
        (tmp_path / "out").write_bytes(text[:length])
        with (tmp_path / "out").open("ab+") as results:
            num_done, _, rest = find_unanswered(results, number_lines(lines), PARSE)
            results.write(b"more")
        num_whole = text[:length].count(b"\n")
        assert num_done == num_whole
        assert [number for number, _ in rest] == sorted(set(numbers) - set(numbers[:num_whole]))
        whole = b"".join(text.splitlines(keepends=True)[:num_whole])
        assert (tmp_path / "out").read_bytes() == whole + b"more"


def test_an_answer_is_in_the_file_as_soon_as_it_is_written(tmp_path):
    """What lies in a buffer dies with the process, and would be computed again."""
    with (tmp_path / "out").open("ab+") as file:
        for number in (1, 2):
            write_answer(file, {"line": number, "prompt": "\udcff"})
            lines = (tmp_path / "out").read_bytes().splitlines()
            assert [json.loads(line) for line in lines] == [
                {"line": n, "prompt": "\udcff"} for n in range(1, number + 1)
            ]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the model is loaded once and the process forked")
def test_runs_that_are_killed_while_they_write(llm, tmp_path):
    """For real, again and again until one gets to the end."""
    lines = [{"prompt": f"p{i}", "max_tokens": 1 + i % 7, "temperature": 0} for i in range(300)]
    lines[::50] = [{"prompt": ""}] * 6
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(map(spell, lines)))
    out, statuses, before = tmp_path / "out", [], b""
    while not statuses or statuses[-1] == -signal.SIGKILL:
        process = multiprocessing.get_context("fork").Process(target=run_and_exit, args=(llm, tmp_path))
        process.start()
        enough = len(before) + 3000 if len(statuses) < 3 else 10**9
        while process.is_alive() and (not out.exists() or out.stat().st_size < enough):
            time.sleep(0.001)
        if len(statuses) < 3:
            process.kill()
        process.join()
        statuses.append(process.exitcode)
        text = out.read_bytes()
        assert text.startswith(before)
        before = text[: text.rfind(b"\n") + 1]
    assert statuses == [-signal.SIGKILL] * 3 + [1]  # 1, because some lines are wrong
    answers = {number_of(answer): answer for answer in map(json.loads, before.splitlines())}
    assert text == before
    assert len(before.splitlines()) == len(answers) == 300
    for number in (1, 2, 7, 150, 299, 300):
        asked = lines[number - 1]
        check_answer(llm, number, (spell(asked), asked if asked["prompt"] else None, False), answers[number], {})


def run_and_exit(llm: LLM, folder: Path) -> None:
    os._exit(Run(llm, folder).status)


# ---------------------------------------------------------------------- what isn't this input's output

GOOD_LINES = [
    {"prompt": "a"},
    {"prompt": [1, 2]},
    {"messages": [{"role": "user", "content": "x"}]},
    {"custom_id": "c", "url": COMPLETIONS, "body": {"prompt": "b"}},
    {"custom_id": 7, "url": COMPLETIONS, "body": {"prompt": "b"}},
    {"prompt": "z", "no": 1},
    {"prompt": "last"},
]
OTHERS = {
    "another prompt": {"line": 7, "prompt": "other", "text": "x"},
    "a prompt of another kind": {"line": 2, "prompt": "12", "text": "x"},
    "no prompt": {"line": 7, "text": "x"},
    "other messages": {"line": 3, "messages": [{"role": "user", "content": "y"}]},
    "a prompt and not messages": {"line": 3, "prompt": ""},
    "another custom_id": {"id": "batch_req_4", "custom_id": "d", "response": {}},
    "no custom_id": {"id": "batch_req_4", "response": {}},
    "a custom_id where it was none": {"id": "batch_req_5", "custom_id": "7", "response": {}},
    "its own form for a batch line": {"line": 4, "prompt": "b", "text": "x"},
    "an error in its own form for a batch line": {"line": 4, "error": "line 4: wrong"},
    "the batch form for a line of its own": {"id": "batch_req_7", "custom_id": None, "response": {}},
    "the batch form for a wrong line of its own": {"id": "batch_req_6", "custom_id": None, "error": {}},
    "an answer where the line is wrong": {"line": 6, "prompt": "z", "text": "x"},
    "a number beyond the input": {"line": 8, "prompt": "last", "text": "x"},
    "a number far beyond": {"line": 10**18, "prompt": "last", "text": "x"},
    "number 0": {"line": 0, "prompt": "last", "text": "x"},
    "a number below": {"line": -1, "prompt": "last", "text": "x"},
    "no number": {"prompt": "last", "text": "x"},
    "null for a number": {"line": None, "prompt": "last", "text": "x"},
    "the ids of another server": {"id": "vllm-7", "custom_id": "c", "response": {}},
    "an id that is no string": {"id": 4, "custom_id": "c", "response": {}},
    "a list": [1],
    "a string": "line",
    "the input": {"prompt": "a"},
}
ALSO = {
    "prose": b"Dear diary,",
    "an empty line": b"",
    "no text": b"\xff\xfe",
    "nested too deep": b'{"line": 7, "prompt": ' + b"[" * 100_000,
    "half an answer": b'{"line": 7, "pro',
    "a huge number": b'{"line": 1' + b"0" * 5000 + b"}",
}
JUNK = {name: json.dumps(answer).encode() for name, answer in OTHERS.items()} | ALSO


@pytest.fixture(scope="module")
def answered(llm, tmp_path_factory) -> tuple[bytes, list[bytes]]:
    folder = tmp_path_factory.mktemp("answered")
    (folder / "in.jsonl").write_bytes(b"\n".join(map(spell, GOOD_LINES)))
    Run(llm, folder)
    return (folder / "in.jsonl").read_bytes(), (folder / "out").read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("name", JUNK)
@given(data=st.data())
@settings(max_examples=max(3, settings.default.max_examples // 10))
def test_a_file_with_anything_else_in_it_is_refused_and_left_as_it_was(llm, answered, name, data):
    """Wherever it stands among answers to other lines; no model is loaded for it."""
    lines, answers = answered
    touched = number_in(JUNK[name])
    others = [answer for answer in answers if number_of(json.loads(answer)) != touched]
    others = data.draw(st.permutations(others))[: data.draw(st.integers(0, len(others)))]
    others.insert(data.draw(st.integers(0, len(others))), JUNK[name] + b"\n")
    check_refused(llm, lines, b"".join(others) + data.draw(st.sampled_from([b"", b'{"line": 7'])))


def number_in(junk: bytes) -> int | None:
    try:
        return number_of(json.loads(junk))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def check_refused(llm: LLM, lines: bytes, text: bytes) -> None:
    with TemporaryDirectory() as folder:
        Path(folder, "in.jsonl").write_bytes(lines)
        Path(folder, "out").write_bytes(text)
        run = Run(llm, folder)
        assert Path(folder, "out").read_bytes() == text
        assert (run.status, run.num_loaded) == (1, 0)
        assert "answers no line of this input: take another output" in run.err
        [told] = run.err.splitlines()
        assert told.startswith(f"minicb: {folder}/out, line ")


@given(data=st.data())
def test_an_answer_that_is_there_twice_is_refused(llm, answered, data):
    lines, answers = answered
    kept = data.draw(st.permutations(answers))[: data.draw(st.integers(1, len(answers)))]
    kept.insert(data.draw(st.integers(0, len(kept))), data.draw(st.sampled_from(kept)))
    check_refused(llm, lines, b"".join(kept))


def test_the_line_that_is_refused_is_named(llm, answered, tmp_path):
    lines, answers = answered
    (tmp_path / "in.jsonl").write_bytes(lines)
    (tmp_path / "out").write_bytes(answers[0] + answers[1] + b"prose\n")
    assert f"{tmp_path}/out, line 3, answers no line" in Run(llm, tmp_path).err


@pytest.mark.parametrize("text", [b"Dear diary", b'{"model_type": "llama"}', b"\x00", b'{"prompt": "a"}'])
def test_what_is_no_beginning_of_an_answer_is_not_cut_off(llm, answered, text):
    """A file of one line without an end is somebody's file, not what a killed run left."""
    check_refused(llm, answered[0], text)


def test_a_number_that_no_integer_has_is_refused(llm, answered):
    check_refused(llm, answered[0], b'{"line": Infinity, "prompt": "a"}\n')


def test_lines_of_stdin_may_be_anything_too(llm, tmp_path):
    """With a signature at the beginning, and bytes that are no UTF-8."""
    lines = b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "\xff"}\n{"prompt": "b"}\n'
    run = Run(llm, tmp_path, "--json", "--jsonl", stdin=lines)
    answers = [json.loads(line) for line in run.out.splitlines()]
    assert [(answer["line"], "error" in answer) for answer in answers] == [(1, False), (2, True), (3, False)]


def test_a_lone_surrogate_can_be_printed(llm, tmp_path):
    """As JSON spells it, as it is written into files."""
    line = b'{"custom_id": "\\udcff", "url": "/v1/completions", "body": {"prompt": "a"}}\n'
    (tmp_path / "lines").write_bytes(line)
    run = Run(llm, tmp_path, "--json", "--jsonl", "--input", f"{tmp_path}/lines", stdin=b"")
    assert [json.loads(line)["custom_id"] for line in run.out.splitlines()] == ["\udcff"]


# ---------------------------------------------------------------------- what is held in memory


class StandIn:
    """An engine whose requests end one a step, whichever chance takes; each sample with one token."""

    def __init__(self, seed: int):
        self.random, self.in_work, self.most_in_work, self.tokenizer = random.Random(seed), [], 0, None
        self.core = SimpleNamespace(step=self.step)
        self.sizes: Counter[int] = Counter()  # in work at each step

    def make_request(self, prompt, params, scheduling) -> Request:
        if prompt == [0]:
            raise ValueError("prompt is unlucky")
        return Request("", prompt, params)

    def submit(self, request: Request) -> None:
        self.in_work.append(request)
        self.most_in_work = max(self.most_in_work, len(self.in_work))

    def step(self) -> list[Request]:
        self.sizes[len(self.in_work)] += 1
        moved = list(self.in_work)
        request = self.in_work.pop(self.random.randrange(len(self.in_work)))
        request.state, request.finish_reason = RequestState.FINISHED, "length"
        return moved  # the others got a token

    def output(self, request: Request) -> RequestOutput:
        assert request.state is RequestState.FINISHED
        return RequestOutput("", None, request.token_ids, [CompletionOutput(0, "", [1], "length")], True)


def parse_number(number: int, text: bytes) -> ParsedLine:
    """Some are wrong when they are read, some when the engine sees them."""
    if text == b"wrong":
        return ParsedLine(number, error=f"line {number}: wrong")
    return ParsedLine(number, ParsedRequest([0] if text == b"unlucky" else [number], greedy(1)))


TEXTS = st.lists(st.sampled_from([b"", b"a", b"a", b"a", b"wrong", b"unlucky"]), max_size=30)


@given(TEXTS, st.integers(1, 5), st.integers(0, 9))
def test_never_more_lines_are_in_work_than_may_be_and_none_is_read_before_there_is_room(texts, max_in_work, seed):
    """But as many as may be, as long as there are lines: an engine that waits for work is a waste."""
    engine, num_read, num_done = StandIn(seed), 0, 0

    def lines():
        nonlocal num_read
        for line in number_lines(texts):
            assert num_read - num_done < max_in_work
            num_read += 1
            yield line

    answers = []
    for line, output in serve_lines(engine, lines(), parse_number, max_in_work):
        num_done += 1
        answers.append(line.number)
        assert (output is None) == (texts[line.number - 1] != b"a") == (line.request is None)
        assert output is None or output.prompt_token_ids == [line.number]
        assert output is not None or line.error.startswith(f"line {line.number}: ")
    assert sorted(answers) == [number for number, text in enumerate(texts, 1) if text]
    num_right = texts.count(b"a")
    assert engine.most_in_work == min(max_in_work, num_right)
    assert engine.sizes[max_in_work] >= num_right - max_in_work + 1 if num_right else not engine.sizes


@given(TEXTS, st.integers(1, 5), st.integers(0, 9))
def test_answers_in_order_come_in_order_and_as_soon_as_they_may(texts, max_in_work, seed):
    """The same that come as they end."""
    engine, yielded = StandIn(seed), []
    unordered = {line.number: (line, output) for line, output in serve_lines(StandIn(seed), number_lines(texts), parse_number, max_in_work)}  # fmt: skip
    wanted = [number for number, text in enumerate(texts, 1) if text]
    step = engine.step

    def step_and_check():
        """Nobody waits whose predecessors have all been yielded."""
        waiting = {request.token_ids[0] for request in engine.in_work}
        assert not waiting or wanted[len(yielded)] in waiting
        return step()

    engine.core.step = step_and_check
    for line, output in serve_in_order(engine, number_lines(texts), parse_number, max_in_work):
        yielded.append(line.number)
        assert (line, output) == unordered[line.number]
    assert yielded == wanted
    assert engine.most_in_work <= max_in_work


class Text(bytes):
    """A text that is counted while it lives."""

    num_alive = most_alive = 0

    def __init__(self, text: bytes):
        Text.num_alive += 1
        Text.most_alive = max(Text.most_alive, Text.num_alive)

    def __del__(self):
        Text.num_alive -= 1


def test_the_memory_does_not_grow_with_the_files(tmp_path):
    """A hundred thousand lines, also when half of them have been answered."""
    window, count, num_read = 8, 100_000, 0
    request = ParsedRequest([1], greedy(1))

    def parse(number: int, text: bytes) -> ParsedLine:
        assert text == b"%d" % number
        return ParsedLine(number, request)

    def lines():
        nonlocal num_read
        Text.most_alive = Text.num_alive = num_read = 0
        for number in range(1, count + 1):
            num_read = number
            yield number, Text(b"%d" % number)

    order: list[int] = []
    for line, _ in serve_lines(StandIn(0), lines(), parse, window):
        order.append(line.number)
        assert num_read - len(order) < window
    assert sorted(order) == list(range(1, count + 1))
    assert Text.most_alive <= 2  # a line that was read is what it asks for
    with (tmp_path / "out").open("wb") as file:
        for number in order[: count // 2]:
            file.write(b'{"line": %d, "prompt": [1]}\n' % number)
    with (tmp_path / "out").open("ab+") as file:
        num_done, _, rest = find_unanswered(file, lines(), parse)
        assert num_done == count // 2
        assert num_read == max(order[: count // 2])
        assert Text.most_alive <= window + 2
        assert [number for number, _ in rest] == sorted(order[count // 2 :])
    assert Text.most_alive <= window + 2
