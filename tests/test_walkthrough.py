"""The chapters: each runs and shows what it prints, quotes what the source says, and names what there is."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "walkthrough"
CHAPTERS = sorted(path.name for path in FOLDER.glob("[0-9][0-9]_*.md"))
PAGES = ["README.md", "benchmarks.md", "map.md"]
POLICIES = (FOLDER.parent / "minicb" / "policies.py").read_text(encoding="utf-8")
LINE = 1 + POLICIES[: POLICIES.index("def key", POLICIES.index("class FCFS"))].count("\n")


def run(script: Path, *args: str) -> subprocess.CompletedProcess:
    """In a process of its own, as chapters leave things behind."""
    return subprocess.run([sys.executable, str(script), *args], check=False, capture_output=True, encoding="utf-8")


def test_chapters_are_as_they_run():
    """All of them; `python walkthrough/run.py --write` puts what they print now into them."""
    done = run(FOLDER / "run.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"{name}: fine\n" for name in [*CHAPTERS, *PAGES])


def test_figures_are_as_they_would_be_drawn():
    """`python walkthrough/figures.py` draws them."""
    done = run(FOLDER / "figures.py", "--check")
    assert done.returncode == 0, done.stderr
    drawn = {f"figures/{path.name}" for path in (FOLDER / "figures").iterdir()}
    text = "".join((FOLDER / name).read_text(encoding="utf-8") for name in CHAPTERS)
    assert drawn == set(re.findall(r"figures/\w+\.\w+", text))


def test_every_page_is_in_the_contents():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [name for name in [*CHAPTERS, *PAGES[1:]] if f"]({name})" not in readme] == []


NOWHERE = "lock" + "_of_fcfs"  # in two pieces, as the words of tests count as code
GOOD = f"""Some `FCFS.key` of `policies.py`, and [a file](run.py).

```python
a = 6
print(a * 7)
```

```text
42
```

[policies.py: FCFS.key](../minicb/policies.py#L{LINE})
```python
…
    return (request.arrival,)
```
"""


@pytest.fixture
def chapter(tmp_path) -> Path:
    """A folder with one chapter and all that runs it."""
    folder = tmp_path / "walkthrough"
    folder.mkdir()
    (folder / "run.py").write_text((FOLDER / "run.py").read_text(encoding="utf-8"))
    for name in ("minicb", "tests"):
        (tmp_path / name).symlink_to(FOLDER.parent / name)
    (folder / "01_this.md").write_text(GOOD, encoding="utf-8")
    return folder / "01_this.md"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("42", "43", "-43\n+42"),
        ("print(a * 7)", "pass", "-42"),
        ("(request.arrival,)", "(request.priority,)", "FCFS.key has no such lines"),
        ("    return (", "return (", "FCFS.key has no such lines"),
        ("#L", "#L9", f"FCFS.key is at ../minicb/policies.py#L{LINE} now"),
        ("run.py)", "ran.py)", "no file ran.py"),
        ("`policies.py`", "`politics.py`", "no file politics.py"),
        ("`FCFS.key`", "`FCFS.lock`", "nothing in minicb is called FCFS.lock"),
        ("`FCFS.key`", f"`{NOWHERE}`", f"{NOWHERE} isn't in the code"),
        ("`FCFS.key`", f"`request.{NOWHERE}()`", f"{NOWHERE} isn't in the code"),
        ("`policies.py`", "`tests/test_politics.py`", "no file tests/test_politics.py"),
        ("(run.py)", "(/etc/passwd)", "no file /etc/passwd"),
        ("FCFS.key]", "FCFS.lock]", "no source of FCFS.lock"),
        ("…\n", "", "what is left out needs a line …"),
        ("    return (request.arrival,)\n", "", "something must be left"),
        ("(request.arrival,)\n```\n", "(request.arrival,)\n```\n\n```text\n7\n```\n", "an excerpt isn't run"),
        ("42\n```\n", "42\n```\n\n```text\n7\n```\n", "neither run nor an output nor an excerpt: ```text"),
        ("```python\na", "~~~python\na", "neither run nor an output nor an excerpt: ~~~python"),
    ],
)
def test_a_drift_is_told(chapter, before, after, message):
    spec = importlib.util.spec_from_file_location("run", FOLDER / "run.py")
    runner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runner)
    runner.check_chapter(chapter)
    assert before in GOOD
    chapter.write_text(GOOD.replace(before, after), encoding="utf-8")
    with pytest.raises(runner.Drift, match=re.escape(message)):
        runner.check_chapter(chapter)


def test_with_a_drift_the_script_fails(chapter):
    assert run(chapter.parent / "run.py").stdout == "01_this.md: fine\n"
    chapter.write_text(GOOD.replace("42", "43"), encoding="utf-8")
    done = run(chapter.parent / "run.py")
    assert done.returncode == 1
    assert "-43\n+42" in done.stderr


def test_what_is_printed_is_written_on_demand(chapter):
    chapter.write_text(GOOD.replace("42", "43").replace("#L", "#L9"), encoding="utf-8")
    assert run(chapter.parent / "run.py", "--write").returncode == 0
    assert chapter.read_text(encoding="utf-8") == GOOD
    chapter.write_text(GOOD.replace("```text\n42\n```\n\n", ""), encoding="utf-8")
    assert run(chapter.parent / "run.py", "01", "--write").returncode == 0
    assert chapter.read_text(encoding="utf-8") == GOOD
