"""The command line, in this process and, where it matters, in one of its own."""

import io
import json
import os
import signal
import subprocess
import sys

import pytest

from minicb.__main__ import main, parse_args, read_tasks
from minicb.request import SamplingParams

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
    main([*options, "--json", "--input", str(tmp_path / "prompts.txt"), "first"])
    assert [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()] == ["first", "one", "two  "]
    monkeypatch.setattr(sys, "stdin", io.StringIO("from\r\nstdin\n"))
    main([*options, "--json"])
    assert [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()] == ["from", "stdin"]


def test_json_lines_in_and_out(options, tmp_path):
    """Token ids as prompts, and parameters of a line over those of the command."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "max_tokens": 2}\n{"prompt": [1, 2]}\n')
    assert (
        main([*options, "--json", "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]) == 0
    )
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(r["prompt"], len(r["token_ids"])) for r in results] == [("a", 2), ([1, 2], 4)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: "),
        ("[1]", 'line 2: a line must be a JSON object with a "prompt"'),
        ('{"prompt": "a", "max_token": 1}', "line 2: unknown fields: max_token"),
        ('{"prompt": "a", "max_tokens": 0}', "line 2: max_tokens must be an integer >= 1"),
    ],
)
def test_a_wrong_line_is_named(options, tmp_path, capsys, line, message):
    (tmp_path / "in.jsonl").write_text('{"prompt": "fine"}\n' + line + "\n")
    assert main([*options, "--input", str(tmp_path / "in.jsonl")]) == 1
    assert message in capsys.readouterr().err


def test_errors_are_one_line(options, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
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
    assert read_tasks(args, SamplingParams())[0].prompt == "x"


def test_ctrl_c_ends_cleanly(options):
    """Exit status 130, one line, no traceback, while it is generating."""
    argv = [*options, "--max-tokens", "200", "--ignore-eos", "--max-num-seqs", "1"]
    argv.remove("--quiet")
    argv += ["endless"] * 200
    process = subprocess.Popen(
        [sys.executable, "-m", "minicb", *argv], stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ)
    )
    seen = b""
    while b"tok/s" not in seen:  # the progress bar moves: it is in the loop
        seen += process.stderr.read1()
        assert process.poll() is None, seen
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"minicb: interrupted" in rest
    assert b"Traceback" not in seen + rest
