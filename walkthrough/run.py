"""Runs the chapters: every Python block in order, and what it prints must be what stands below it.

`python walkthrough/run.py` checks all pages of this folder, `python walkthrough/run.py 03` those whose name begins so; with
`--write` what differs is written into them instead. A chapter consists of Markdown and of

- Python blocks. Those of a chapter share their names. What one prints is the `text` block that follows it.
- Excerpts: a link `[scheduler.py: Scheduler._admit](../minicb/scheduler.py#L175)` to the line where that begins, and a
  Python block, which isn't run. It must be the source of that, without docstring; a line `…` stands for lines that
  were left out. `--write` writes the line.
- Links to files, which must be there, and code spans such as `Scheduler.schedule`, `batch.py` or `find_prefix`, which
  must name something.
"""

import contextlib
import difflib
import functools
import importlib
import inspect
import io
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
BLOCK = re.compile(
    r"(?P<excerpt>\[(?P<file>\w+)\.py: (?P<symbol>[\w.]+)\]\((?P<link>[^)\n]*)\)\n)?"
    r"```python\n(?P<code>.*?)^```\n"
    r"(?:\n```text\n(?P<output>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)
SHELL = re.compile(r"^```sh\n.*?^```\n", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https://)([^)]*)\)")
SPAN = re.compile(r"`([^`\n]+)`")


class Drift(Exception):
    """Something in a chapter isn't so any more."""


def check_chapter(path: Path, write: bool = False) -> None:
    """Drift says what isn't so. write: put what the blocks print into the chapter."""
    text = path.read_text(encoding="utf-8")
    module = sys.modules["chapter"] = types.ModuleType("chapter")  # torch.compile looks for the module of a function
    names, codes = module.__dict__, list[str]()

    def run(match: re.Match[str]) -> str:
        if match["excerpt"]:
            link = check_excerpt(match["file"], match["symbol"], match["code"])
            if match["output"] is not None:
                raise Drift(f"{path.name}: an excerpt isn't run and prints nothing: {match['symbol']}")
            if match["link"] != link and not write:
                raise Drift(f"{path.name}: {match['symbol']} is at {link} now; --write puts that into the chapter")
            return match[0].replace(f"]({match['link']})", f"]({link})", 1)
        codes.append(match["code"])
        printed = run_block(match["code"], names, f"{path.name}, line {text[: match.start()].count(chr(10)) + 2}")
        shown = match["output"] or ""
        if printed != shown and not write:
            difference = difflib.unified_diff(shown.splitlines(), printed.splitlines(), "shown", "printed", lineterm="")
            raise Drift("\n".join([f"{path.name}: a block prints something else:", match["code"], *difference]))
        return f"```python\n{match['code']}```\n" + (f"\n```text\n{printed}```\n" if printed else "")

    written = BLOCK.sub(run, text)
    if written != text:
        path.write_text(written, encoding="utf-8")
    prose = SHELL.sub("", BLOCK.sub("", text))
    for fence in re.findall(r"^.*(?:```|~~~).*$", prose, re.MULTILINE):
        raise Drift(f"{path.name}: a block that is neither run nor an output nor an excerpt: {fence}")
    check_names(path, prose, words_of_sources() | set(re.findall(r"\w+", "".join(codes))))


def run_block(code: str, names: dict[str, Any], where: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, where, "exec"), names)  # noqa: S102
    printed = "\n".join(line.rstrip() for line in output.getvalue().splitlines())
    return printed + "\n" if printed else ""


def check_excerpt(file: str, symbol: str, code: str) -> str:
    """The pieces between lines `…` must be the symbol's source but for what these leave out. Returns the link to it."""
    try:
        path = next((path for path in sources() if path.stem == file), FOLDER.parent / "minicb" / f"{file}.py")
        value = find(importlib.import_module(module_of(path)), symbol)
        source = source_of(value)
    except (ImportError, AttributeError, TypeError) as error:
        raise Drift(f"{file}.py: no source of {symbol}: {error}") from error
    pieces, place = re.split(r"^ *…\n", code, flags=re.MULTILINE), 0
    for piece in pieces:
        found = source.find(piece, place)
        if found < 0 or found and source[found - 1] != "\n":
            raise Drift(f"{file}.py: {symbol} has no such lines:\n{piece}\nIts source:\n{source}")
        place = found + len(piece)
    if not "".join(pieces) or not source.startswith(pieces[0]) or not source.endswith(pieces[-1]):
        raise Drift(f"{file}.py: {symbol}: what is left out needs a line …, and something must be left:\n{code}")
    return f"../{path.relative_to(FOLDER.parent)}#L{inspect.getsourcelines(code_of(value))[1]}"


def source_of(value: Any) -> str:
    """Its source from the left margin on, without docstring."""
    source = textwrap.dedent(inspect.getsource(code_of(value)))
    return re.sub(r'\n *"""(?:.*?)"""\n', "\n", source, count=1, flags=re.DOTALL)


def code_of(value: Any) -> Any:
    return value.fget if isinstance(value, property) else value


def find(value: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        value = inspect.getattr_static(value, name)
    return value


@functools.cache
def words_of_sources() -> set[str]:
    places = ("minicb", "tests", "walkthrough")
    files = [path for place in places for path in (FOLDER.parent / place).rglob("*.py")]
    files += (FOLDER.parent).glob("*.py")
    return set(re.findall(r"\w+", "".join(path.read_text(encoding="utf-8") for path in files)))


def check_names(path: Path, prose: str, words: set[str]) -> None:
    for target in LINK.findall(prose):
        if target.startswith("/") or not (path.parent / target).exists():
            raise Drift(f"{path.name}: no file {target}")
    for span in SPAN.findall(prose):
        span = span.removesuffix("()")
        if re.fullmatch(r"[\w/]+\.py", span):
            places = [FOLDER.parent, FOLDER, *(path.parent for path in sources() if path.name == Path(span).name)]
            if not any((place / span).exists() for place in places):
                raise Drift(f"{path.name}: no file {span}")
        elif re.fullmatch(r"_?[A-Z]\w+\.\w+", span):
            if not any(has(module, span) for module in modules()):
                raise Drift(f"{path.name}: nothing in minicb is called {span}")
        elif re.fullmatch(r"(?:[a-z_]\w*\.)?\w+", span) and not words >= set(span.split(".")):
            raise Drift(f"{path.name}: {span} isn't in the code")


def has(module: Any, dotted: str) -> bool:
    try:
        find(module, dotted)
    except AttributeError:
        owner, name = dotted.split(".")
        cls = getattr(module, owner, None)
        return (
            inspect.isclass(cls)
            and re.search(rf"\bself\.{name}\b|^    {name}:", inspect.getsource(cls), re.MULTILINE) is not None
        )
    return True


def modules() -> Iterator[Any]:
    for file in sources():
        yield importlib.import_module(module_of(file))


def sources() -> list[Path]:
    """Files of the package, those of its rooms included."""
    return sorted((FOLDER.parent / "minicb").rglob("[a-z]*.py"))


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(FOLDER.parent).with_suffix("").parts)


def chapters(prefix: str = "") -> list[Path]:
    return [path for path in sorted(FOLDER.glob("*.md")) if path.name.startswith(prefix)]


def main(argv: list[str]) -> int:
    write = "--write" in argv
    status = 0
    for prefix in [arg for arg in argv if not arg.startswith("-")] or [""]:
        for path in chapters(prefix):
            try:
                check_chapter(path, write)
                print(f"{path.name}: fine")
            except Drift as drift:
                print(drift, file=sys.stderr)
                status = 1
    return status


if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER))
    sys.exit(main(sys.argv[1:]))
