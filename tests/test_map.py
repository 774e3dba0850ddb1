"""walkthrough/map.md says which files a reader opens to follow one decode. Here a decode is followed."""

import re
import sys
from pathlib import Path

from conftest import eager, greedy

import minicb

PACKAGE = Path(minicb.__file__).parent
MAP = PACKAGE.parent / "walkthrough" / "map.md"
# Where a decode arrives on its way. The last two are data that others act on: their own files needn't be opened.
ACTIONS = {("scheduler", "schedule"), ("batch", "build"), ("attention", "gather_attention"), ("sampler", "sample")}
DATA = {("plan", "of"), ("request", "append")}


def files_of_a_decode(engine) -> set[str]:
    """The files with a function on the way from EngineCore.advance to one of these places, in the next step."""
    files, reached = set(), set()

    def trace(frame, event, _):
        place = (Path(frame.f_code.co_filename).stem, frame.f_code.co_name)
        if event == "call" and place in ACTIONS | DATA:
            reached.add(place)
            if place in DATA:
                frame = frame.f_back
            while frame.f_code is not engine.core.advance.__func__.__code__:
                files.add(Path(frame.f_code.co_filename))
                frame = frame.f_back
            files.add(Path(frame.f_code.co_filename))

    sys.setprofile(trace)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    assert reached == ACTIONS | DATA
    return {path.stem for path in files if path.is_relative_to(PACKAGE)}


def test_a_decode_is_followed_through_the_seven_files_that_the_map_lists(tiny):
    engine = eager(tiny)
    engine.add_request([1, 2, 3], greedy(4))
    engine.step()  # the prefill
    section = MAP.read_text(encoding="utf-8").split("## One decode")[1].split("\n## ")[0]
    listed = re.findall(r"^\| \[`(\w+)\.py`\]", section, re.MULTILINE)
    assert len(listed) <= 7
    assert files_of_a_decode(engine) == set(listed)
