"""The package reads from top to bottom: each file imports only from what stands above it, and all are short."""

import ast
import sys
from pathlib import Path

import pytest

import minicb

PACKAGE = Path(minicb.__file__).parent
# Who reads the package in this order never meets a name before its definition. A room is a folder.
CORE = ["request", "blocks", "memory", "plan", "policies", "waiting", "scheduler", "core"]
PATH = [*CORE, "batch", "attention", "model", "loader", "sampler", "runner", "outputs", "engine", "llm"]
READING_ORDER = [
    *("checks", "interrupts", "params"),
    *CORE,
    "observe",
    "simulate",
    *("batch", "attention", "model", "device", "loader", "penalties", "sampler", "packed_linear", "swap", "runner"),
    *("outputs", "text", "messages", "args", "engine", "llm"),
    "frontend",
    "bench",
    "__main__",
]
ROOMS = {  # the order within each
    "observe": ["metrics", "trace", "timeline"],
    "simulate": ["cost_model", "workload", "scenarios"],
    "frontend": ["json_lines", "openai", "batch_files", "chat", "cli"],
    "bench": ["measure", "tables", "peers"],
}
# Schedules can be explored by the thousand without a tensor, so these must not need PyTorch.
WITHOUT_TORCH = READING_ORDER[: READING_ORDER.index("batch")]

FILES = {path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
FLAT = [name for name in FILES if "/" not in name]
ORDER = [f"{name}/{file}" if file else name for name in READING_ORDER for file in ROOMS.get(name, [""])]


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
    """Files of the package that a file imports, as "request" or "observe/metrics"; the package itself is `__init__`."""
    modules = imported_modules(FILES[name].read_text())
    return {module.partition(".")[2].replace(".", "/") or "__init__" for module in modules if is_ours(module)}


def is_ours(module: str) -> bool:
    return module.split(".")[0] == "minicb"


def num_lines(name: str) -> int:
    return len(FILES[name].read_text().splitlines())


def test_no_way_of_importing_is_overlooked():
    source = """
import os.path, minicb.batch
from minicb.model import Model
from minicb.observe.metrics import Metrics
from minicb import scheduler, LLM
from . import blocks
from .request import Request
def late():
    import torch
"""
    assert imported_modules(source) == {
        *("os.path", "torch", "minicb", "minicb.batch", "minicb.model", "minicb.observe.metrics"),
        *("minicb.scheduler", "minicb.blocks", "minicb.request"),
    }


def test_every_file_has_its_place_in_the_reading_order():
    assert {name for name in FILES if not name.endswith("__init__")} == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_a_file_imports_only_from_files_above_it(name):
    above = set(ORDER[: ORDER.index(name)])
    if "llm" in above:
        above.add("__init__")  # which imports no file below llm.py
    assert imported_files(name) <= above


def test_the_package_itself_imports_nothing_below_llm():
    assert imported_files("__init__") <= set(ORDER[: ORDER.index("llm") + 1])


@pytest.mark.parametrize("room", ROOMS)
def test_importing_a_room_loads_none_of_its_files(room):
    assert imported_modules(FILES[f"{room}/__init__"].read_text()) == set()


@pytest.mark.parametrize("name", [name for name in FLAT if name not in ("__main__", "__init__")])
def test_the_core_needs_no_room_but_metrics(name):
    assert {file for file in imported_files(name) if "/" in file} <= {"observe/metrics"}


@pytest.mark.parametrize("name", [name for name in ORDER if name.split("/")[0] in WITHOUT_TORCH])
def test_the_first_half_imports_only_the_standard_library(name):
    modules = {module.split(".")[0] for module in imported_modules(FILES[name].read_text())}
    assert modules <= {"minicb"} | sys.stdlib_module_names
    assert {file.split("/")[0] for file in imported_files(name)} <= set(WITHOUT_TORCH)


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_short_enough_to_be_read_at_once(name):
    assert num_lines(name) <= 350


BUDGETS = {
    "request … core": (CORE, 1350),
    "request … llm": (PATH, 2900),
    "all that lies flat in minicb/": (FLAT, 3900),
}


@pytest.mark.parametrize("what", BUDGETS)
def test_the_readers_path_stays_short(what, capsys):
    """Every line that is added here has to earn its place. Docstrings count, and the limits are not raised."""
    names, limit = BUDGETS[what]
    count = sum(num_lines(name) for name in names)
    with capsys.disabled():
        print(f"\n{what}: {count} of at most {limit} lines ", end="")
    assert count <= limit
