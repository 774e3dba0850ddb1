"""The front page: it is short, its links and names exist, its commands parse, its example runs."""

import contextlib
import importlib.util
import io
import os
import re
import shlex
from pathlib import Path

import pytest

import minicb
from minicb import LLM
from minicb.frontend.cli import parse_args

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
BADGE = re.compile(r"\.\./\.\./actions/(workflows/\w+\.yml)(?:/badge\.svg)?")  # GitHub's pages of a workflow
FOLDER = os.environ.get("MINICB_REAL_MODEL")


def blocks(language: str) -> list[str]:
    return [code for name, code in FENCE.findall(TEXT) if name == language]


def run_example(monkeypatch: pytest.MonkeyPatch, folder: Path | str, **engine_args) -> str:
    """What the example prints with the model of this folder."""
    monkeypatch.setattr(minicb, "LLM", lambda model: LLM(folder, device="cpu", enforce_eager=True, **engine_args))
    [code] = blocks("python")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "README.md", "exec"), {})  # noqa: S102
    return output.getvalue()


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 150


def test_its_links_and_names_exist():
    """By the rules of the walkthrough."""
    spec = importlib.util.spec_from_file_location("run", ROOT / "walkthrough" / "run.py")
    runner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runner)
    prose = BADGE.sub(r".github/\1", FENCE.sub("", TEXT))
    runner.check_names(ROOT / "README.md", prose, runner.words_of_sources())


def test_its_commands_parse():
    commands = [shlex.split(line, comments=True) for line in "".join(blocks("sh")).splitlines()]
    for command in commands:
        assert command[:3] == ["python", "-m", "minicb"]
        parse_args(command[3:])
    assert commands


def test_its_example_runs(monkeypatch, byte_model):
    assert run_example(monkeypatch, byte_model, num_blocks=16).count("\n") >= 2


@pytest.mark.real
@pytest.mark.skipif(not FOLDER, reason="MINICB_REAL_MODEL is not set; tests/fetch_real_model.py fetches the model")
def test_its_example_prints_what_it_shows(monkeypatch):
    assert run_example(monkeypatch, FOLDER, dtype="float32") == blocks("text")[0]
