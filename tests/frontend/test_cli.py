"""The command line, in this process and, where it matters, in one of its own."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields

import pytest

import minicb.frontend.cli
from minicb import LLM, SamplingParams
from minicb.args import EngineArgs
from minicb.frontend.cli import main, parse_args

OPTIONS = [
    "--device",
    "cpu",
    "--enforce-eager",
    "--num-blocks",
    "64",
    "--temperature",
    "0",
    "--max-tokens",
    "4",
    "--quiet",
]


@pytest.fixture
def options(byte_model):
    return ["generate", "--model", str(byte_model), *OPTIONS]


def test_prompts_from_arguments(options, capsys):
    assert main([*options, "--json", "hello", "world"]) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [result["prompt"] for result in results] == ["hello", "world"]
    assert all(len(result["token_ids"]) == 4 and result["finish_reason"] == "length" for result in results)


def test_prompts_from_a_file_and_stdin_one_a_line(options, tmp_path, capsys, monkeypatch):
    (tmp_path / "prompts.txt").write_text("one\n\ntwo  \n")
    main([*options, "--json", "--input", str(tmp_path / "prompts.txt")])
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(result["line"], result["prompt"]) for result in results] == [(1, "one"), (3, "two  ")]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from\r\nstdin\n")))
    main([*options, "--json"])
    assert [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()] == ["from", "stdin"]


def test_json_lines_in_and_out(options, tmp_path):
    """Token ids as prompts, and parameters of a line over those of the command."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "max_tokens": 2}\n{"prompt": [1, 2]}\n')
    assert main([*options, "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]) == 0
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(r["line"], r["prompt"], len(r["token_ids"])) for r in results] == [(1, "a", 2), (2, [1, 2], 4)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: "),
        ("[1]", 'line 2: a line must be a JSON object with either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', 'line 2: a line must be a JSON object with either "prompt" or "messages"'),
        (
            '{"messages": [{"role": "user", "content": "hi"}, 5]}',
            'line 2: messages[1] must be a dict with "role" and "content", not 5',
        ),
        ('{"prompt": "a", "max_token": 1}', "line 2: unknown or not supported: max_token"),
        ('{"prompt": "a", "max_tokens": 0}', "line 2: max_tokens must be an integer >= 1"),
        ('{"prompt": "a", "priority": "high"}', "line 2: priority must be an integer"),
        ('{"prompt": "a", "priority": 1.5}', "line 2: priority must be an integer"),
        ('{"prompt": "a", "priority": null}', "line 2: priority must be an integer"),
        ('{"prompt": "a", "priority": 9223372036854775808}', "line 2: priority must be an integer"),
        ('{"prompt": "a", "client": 7}', "line 2: client must be a string, not 7"),
        ('{"prompt": "a", "client": null}', "line 2: client must be a string, not None"),
        ('{"prompt": "a", "expected_output_len": 0}', "line 2: expected_output_len must be an integer >= 1"),
        ('{"prompt": "a", "expected_output_len": "3"}', "line 2: expected_output_len must be an integer >= 1"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "line 2: logit_bias must have token ids as keys"),
        ('{"prompt": "a", "logit_bias": {"999": 1}}', "line 2: logit_bias must be an integer >= 0 and < "),
    ],
)
def test_a_wrong_line_is_named_and_stops_nothing(options, tmp_path, capsys, line, message):
    (tmp_path / "in.jsonl").write_text('{"prompt": "fine"}\n' + line + '\n{"prompt": "as well"}\n')
    assert main([*options, "--input", str(tmp_path / "in.jsonl"), "--json"]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert "wrong lines: 1" in captured.err
    first, wrong, last = (json.loads(answer) for answer in captured.out.splitlines())
    assert wrong["error"].startswith(message)
    assert [(first["prompt"], len(first["token_ids"])), (last["prompt"], len(last["token_ids"]))] == [
        ("fine", 4),
        ("as well", 4),
    ]


def test_what_is_there_already_is_not_done_again(options, tmp_path, capsys, monkeypatch):
    """Not even the model is loaded; and prompts or a file, not both, as answers are told apart by number."""
    argv = [*options, "--output", str(tmp_path / "out.jsonl"), "one", "two"]
    assert main(argv) == 0
    answers = (tmp_path / "out.jsonl").read_bytes()
    monkeypatch.setattr(minicb.frontend.cli, "LLM", loads_nothing)
    assert main(argv) == 0
    assert "has all 2 answers" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes() == answers
    assert main([*argv, "--input", "in.jsonl"]) == 1
    assert "give prompts or --input, not both" in capsys.readouterr().err


def test_a_single_prompt_is_streamed(options, capsys, monkeypatch):
    """Piece by piece, and what is printed is its text."""
    pieces = []
    monkeypatch.setattr("builtins.print", lambda *args, end="\n", **kwargs: pieces.append("".join(args) + end))
    assert main([*options, "hello"]) == 0
    monkeypatch.undo()
    main([*options, "--json", "hello"])
    text = json.loads(capsys.readouterr().out)["text"]
    assert "".join(pieces) == text + "\n"
    assert len(pieces) > 2


def test_several_samples_are_printed_one_after_the_other(options, capsys):
    sampling = ["--temperature", "1", "--n", "3", "--seed", "4"]
    assert main([*options, *sampling, "--json", "hello"]) == 0
    result = json.loads(capsys.readouterr().out)
    texts = [sample["text"] for sample in result["samples"]]
    main([*options, *sampling, "hello"])
    assert capsys.readouterr().out == "\n".join(texts) + "\n"
    assert len(set(map(str, (sample["token_ids"] for sample in result["samples"])))) == 3


def test_errors_are_one_line(options, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    for argv, message in (
        ([*options, "--temperature", "-1", "x"], "temperature must be"),
        ([*options, "--num-blocks", "1", "x"], "num_blocks must be"),
        ([*options], "no prompts"),
        ([*options, "--input", str(tmp_path / "none.txt")], "none.txt"),
    ):
        assert main(argv) == 1
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("minicb: ")
        assert message in error


def test_options_that_are_not_given_keep_the_defaults():
    args = parse_args(["generate", "--model", "m", "x"])
    assert (args.engine_args, args.sampling_args) == ({}, {})
    args = parse_args(["generate", "--model", "m", "--top-p", "0.5", "--stop-token-ids", "1", "--stop-token-ids", "2", "--block-size", "8", "--ignore-eos", "--", "x"])  # fmt: skip
    assert args.engine_args == {"block_size": 8}
    memory = ["--swap-space", "0.5", "--num-cpu-blocks", "3", "--preemption-mode", "swap", "--no-enable-prefix-caching"]
    assert parse_args(["generate", "--model", "m", *memory]).engine_args == {
        "swap_space": 0.5,
        "num_cpu_blocks": 3,
        "preemption_mode": "swap",
        "enable_prefix_caching": False,
    }
    assert args.sampling_args == {"top_p": 0.5, "stop_token_ids": [1, 2], "ignore_eos": True}
    argv = ["--n", "2", "--stop", "a", "--stop", "b", "--logprobs", "3", "--logit-bias", '{"5": -1}', "--presence-penalty", "1", "--frequency-penalty", "2", "--repetition-penalty", "3"]  # fmt: skip
    assert parse_args(["chat", "--model", "m", *argv]).sampling_args == {
        "n": 2,
        "stop": ["a", "b"],
        "logprobs": 3,
        "logit_bias": {"5": -1},
        "presence_penalty": 1,
        "frequency_penalty": 2,
        "repetition_penalty": 3,
    }


CHOICES = {
    "dtype": ["auto", "float16", "bfloat16", "float32", "float64"],
    "load_format": ["auto", "dummy"],
    "preemption_mode": ["auto", "swap", "recompute"],
    "scheduling_policy": ["fcfs", "sjf", "priority", "fair", "adaptive"],
    "batching": ["continuous", "static"],
}


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_help_of_every_option_says_what_it_does_its_default_and_its_choices(command, capsys, monkeypatch):
    """Those of the engine and of sampling say it in the words of the dataclasses' docstrings."""
    monkeypatch.setenv("COLUMNS", "10000")  # one line for each text
    with pytest.raises(SystemExit):
        parse_args([command, "--help"])
    options = re.findall(r"^  --([a-z-]+)(.*?)(?:  +|\n +)(\S.*)$", capsys.readouterr().out, re.MULTILINE)
    helps = {name.replace("-", "_"): (values, text) for name, values, text in options}
    for cls, left_out in ((EngineArgs, {"clock", "seed"}), (SamplingParams, set())):
        doc = " ".join(cls.__doc__.split())
        for field in fields(cls):
            if field.name in left_out:
                continue
            values, text = helps.pop(field.name)
            default = None if (command, field.name) == ("chat", "max_tokens") else field.default
            text, _, shown = text.rpartition(" (default: ")
            assert shown == f"{default})".lower()
            assert f" {field.name}: {text[:20]}" in doc
            assert len(text.split()) > 3
            assert text.endswith("."), "all of it"
            if field.name in CHOICES:
                assert values == f" {{{','.join(CHOICES[field.name])}}}"
    others = {"input", "jsonl", "output", "json", "trace", "timeline"} if command == "generate" else {"system"}
    assert set(helps) == others | {"model", "quiet"}
    assert all(len(text.split()) > 3 for _, text in helps.values())


@pytest.mark.parametrize("name", CHOICES)
def test_other_values_than_the_choices_are_refused(name, capsys):
    for value in CHOICES[name]:
        argv = ["generate", "--model", "m", f"--{name.replace('_', '-')}", value]
        assert parse_args(argv).engine_args == {name: value}
    with pytest.raises(SystemExit):
        parse_args([*argv[:-1], "other"])
    assert "invalid choice: 'other'" in capsys.readouterr().err


def loads_nothing(*args, **kwargs):
    raise AssertionError("the model was loaded")


@pytest.fixture
def llms(monkeypatch) -> list[LLM]:
    """What the command loads."""
    llms = []

    def load(*args, **kwargs) -> LLM:
        llms.append(LLM(*args, **kwargs))
        return llms[-1]

    monkeypatch.setattr(minicb.frontend.cli, "LLM", load)
    return llms


@pytest.mark.parametrize("prompts", [["one"], ["one", "two", "three"]])
def test_trace_and_timeline(options, tmp_path, capsys, prompts):
    """Both show each request, and what is printed is the same."""
    main([*options, *prompts])
    printed = capsys.readouterr().out
    trace, timeline = tmp_path / "run.json", tmp_path / "run.html"
    assert main([*options, "--trace", str(trace), "--timeline", str(timeline), *prompts]) == 0
    assert capsys.readouterr().out == printed
    events = json.loads(trace.read_text())["traceEvents"]
    names = [(event["name"], event["args"]["name"]) for event in events if event["name"].endswith("_name")]
    assert [name for kind, name in names if kind == "process_name"] == ["generate"]
    assert len([name for kind, name in names if kind == "thread_name"]) == len(prompts)
    page = timeline.read_text(encoding="utf-8")
    [text] = re.findall(r">(\{\"runs\":.*?)</script>", page, re.DOTALL)
    [run] = json.loads(text)["runs"]
    assert (run["name"], len(run["requests"])) == ("generate", len(prompts))
    assert page.startswith("<!doctype html>")


def test_a_trace_without_a_timeline_and_the_other_way_round(options, tmp_path):
    main([*options, "--trace", str(tmp_path / "run.json"), "x"])
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    main([*options, "--timeline", str(tmp_path / "run.html"), "x"])
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("option", ["--trace", "--timeline", "--output"])
def test_a_place_that_cannot_be_written_to_is_told_before_the_model_is_loaded(
    options, tmp_path, capsys, monkeypatch, option
):
    monkeypatch.setattr(minicb.frontend.cli, "LLM", loads_nothing)
    for path in (tmp_path, tmp_path / "none" / "file"):
        assert main([*options, option, str(path), "x"]) == 1
        error = capsys.readouterr().err.strip()
        assert error.startswith("minicb: ")
        assert str(path) in error


def test_files_that_are_the_same_are_refused(options, tmp_path, capsys, monkeypatch):
    """An answer, a trace or a page would overwrite the other. Under another name, too."""
    monkeypatch.setattr(minicb.frontend.cli, "LLM", loads_nothing)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for names in (("--output", "--trace"), ("--trace", "--timeline"), ("--input", "--output")):
        paths = [names[0], str(tmp_path / "file"), names[1], str(tmp_path / "link")]
        assert main([*options, *paths]) == 1
        assert "must be different files" in capsys.readouterr().err
        assert (tmp_path / "file").read_text() == ""


def test_what_goes_with_a_line_reaches_the_engine(options, tmp_path, llms, capsys):
    """The most urgent first, of those that come from the file and of those that don't; results in the order given."""
    lines = [
        {"prompt": "a", "priority": 2, "client": "x"},
        {"prompt": "b", "priority": -1, "client": "y", "expected_output_len": 3, "max_tokens": 2},
        {"prompt": "c", "expected_output_len": None},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    priority = ["--scheduling-policy", "priority", "--max-num-seqs", "1"]
    assert main([*options, *priority, "--json", "--input", str(tmp_path / "in.jsonl")]) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(result["prompt"], len(result["token_ids"])) for result in results] == [
        ("a", 4),
        ("b", 2),
        ("c", 4),
    ]
    finished = [(record.request_id, record.client) for record in llms[0].engine.metrics.finished]
    assert finished == [("1", "y"), ("2", "default"), ("0", "x")]


def test_expected_lengths_reach_the_policy(options, tmp_path, llms):
    lines = [
        {"prompt": letter, "expected_output_len": length, "client": letter} for letter, length in (("a", 4), ("b", 1))
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    main([*options, "--scheduling-policy", "sjf", "--max-num-seqs", "1", "--input", str(tmp_path / "in.jsonl")])
    assert [record.client for record in llms[0].engine.metrics.finished] == ["b", "a"]


def test_ctrl_c_ends_cleanly(options):
    """Exit status 130, one line, no traceback, while it is generating."""
    argv = [*options, "--max-tokens", "200", "--ignore-eos", "--max-num-seqs", "1"]
    argv.remove("--quiet")
    argv += ["endless"] * 200
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it, and so would a child
    process = subprocess.Popen(
        [sys.executable, "-m", "minicb", *argv],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    signal.signal(signal.SIGINT, before)
    seen = b""
    while b"tok/s" not in seen:  # the progress bar moves: it is in the loop
        seen += process.stderr.read1()
        assert process.poll() is None, seen
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130, rest
    assert b"minicb: interrupted" in rest
    assert b"Traceback" not in seen + rest


def test_the_help_of_a_chat_says_how_to_begin_anew(capsys):
    with pytest.raises(SystemExit):
        parse_args(["chat", "--help"])
    assert "/reset" in capsys.readouterr().out


def test_a_chat_has_one_answer(options, capsys, monkeypatch):
    monkeypatch.setattr(minicb.frontend.cli, "LLM", loads_nothing)
    assert main(["chat", *options[1:], "--temperature", "1", "--n", "2"]) == 1
    assert "n must be 1 in a chat, not 2" in capsys.readouterr().err


def test_a_conversation_on_stdin(options, capsys, monkeypatch):
    """A question a line; nothing else than the answers is printed."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nhow?\n"))
    assert main(["chat", *options[1:], "--system", "Be brief."]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    main(["chat", *options[1:], "--system", "Be brief."])
    assert said.out.startswith(capsys.readouterr().out)


def test_wrong_lines_are_still_told_when_all_is_done(options, tmp_path, capsys):
    """Also by the exit status. To have a line done again, its answer is deleted."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": "b", "max_tokens": 0}\n')
    argv = [*options, "--input", str(source), "--output", str(out)]
    assert main(argv) == main(argv) == 1
    assert "has all 2 answers\nminicb: wrong lines: 1" in capsys.readouterr().err
    source.write_text('{"prompt": "a"}\n{"prompt": "b", "max_tokens": 1}\n')
    out.write_text("".join(line for line in out.read_text().splitlines(True) if "error" not in line))
    assert main(argv) == 0
    assert [len(json.loads(line)["token_ids"]) for line in out.read_text().splitlines()] == [4, 1]
