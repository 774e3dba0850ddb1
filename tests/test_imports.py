"""The package reads from top to bottom: each file imports only from files above it, and all are short."""

import ast
import sys
from pathlib import Path

import pytest

import minicb

PACKAGE = Path(minicb.__file__).parent
READING_ORDER = [
    "checks",
    "interrupts",
    "params",
    "request",
    "blocks",
    "memory",
    "plan",
    "policies",
    "waiting",
    "lifecycle",
    "scheduler",
    "core",
    "metrics",
    "trace",
    "timeline",
    "simulator",
    "workload",
    "scenarios",
    "batch",
    "attention",
    "model",
    "device",
    "loader",
    "penalties",
    "sampler",
    "packing",
    "swap",
    "runner",
    "text",
    "args",
    "engine",
    "llm",
    "tasks",
    "openai",
    "bulk",
    "terminal",
    "measure",
    "tables",
    "peers",
    "server",
    "__main__",
]
# Who follows a request from submission to its tokens needn't look into these.
SIDE_ROOMS = {
    *("checks", "interrupts", "params", "args", "device", "loader", "packing", "penalties", "swap", "text"),
    *("metrics", "trace", "timeline", "simulator", "workload", "scenarios"),
}
# Schedules can be explored by the thousand without a tensor, so these must not need PyTorch.
WITHOUT_TORCH = READING_ORDER[: READING_ORDER.index("batch")]

FILES = {path.stem: path for path in sorted(PACKAGE.glob("*.py"))}
IN_ORDER = [name for name in READING_ORDER if name in FILES]


def imported_modules(source: str) -> set[str]:
    """Full names of all modules that a file of the package imports, at the top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, ["minicb" if node.level else "", node.module]))
            names.add(module)
            if module == "minicb":  # `from minicb import scheduler`, unless it is a name from __init__.py
                names |= {f"minicb.{alias.name}" for alias in node.names if alias.name in FILES}
    return names


def imported_files(name: str) -> set[str]:
    """Stems of the files of the package that a file imports; the package itself is `__init__`."""
    modules = imported_modules(FILES[name].read_text())
    inside = [module.split(".") for module in modules if module.split(".")[0] == "minicb"]
    return {parts[1] if len(parts) > 1 else "__init__" for parts in inside}


def num_lines(name: str) -> int:
    return len(FILES[name].read_text().splitlines())


def test_no_way_of_importing_is_overlooked():
    source = """
import os.path, minicb.batch
from minicb.model import Model
from minicb import scheduler, LLM
from . import blocks
from .request import Request
def late():
    import torch
"""
    assert imported_modules(source) == {
        *("os.path", "torch", "minicb", "minicb.batch", "minicb.model"),
        *("minicb.scheduler", "minicb.blocks", "minicb.request"),
    }


def test_every_file_has_its_place_in_the_reading_order():
    assert set(FILES) - {"__init__"} <= set(READING_ORDER)
    assert len(IN_ORDER) >= 13


@pytest.mark.parametrize("name", IN_ORDER)
def test_a_file_imports_only_from_files_above_it(name):
    above = set(IN_ORDER[: IN_ORDER.index(name)])
    if "llm" in above:
        above.add("__init__")  # which imports no file below llm.py
    assert imported_files(name) <= above


def test_the_package_itself_imports_nothing_below_llm():
    assert imported_files("__init__") <= set(READING_ORDER[: READING_ORDER.index("llm") + 1])


@pytest.mark.parametrize("name", [name for name in WITHOUT_TORCH if name in FILES])
def test_the_first_files_import_only_the_standard_library(name):
    modules = {module.split(".")[0] for module in imported_modules(FILES[name].read_text())}
    assert modules <= {"minicb"} | sys.stdlib_module_names
    assert imported_files(name) <= set(WITHOUT_TORCH)


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_short_enough_to_be_read_at_once(name):
    assert num_lines(name) < 320


def test_the_readers_path_stays_short():
    """An afternoon's reading. Every line that is added here has to earn its place."""
    path = READING_ORDER[: READING_ORDER.index("llm") + 1]
    assert sum(num_lines(name) for name in path if name in FILES and name not in SIDE_ROOMS) < 3150
