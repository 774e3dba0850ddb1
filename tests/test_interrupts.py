"""minicb/interrupts.py: what broke off half-way is put in order before anything else is done."""

import pytest

from minicb.interrupts import changes_state


class Diary:
    """Says what was called, and breaks off where it is told to."""

    def __init__(self):
        self.broken, self.entries = False, list[str]()
        self.break_off_at: list[str] = []

    def write(self, entry: str) -> None:
        self.entries.append(entry)
        if entry in self.break_off_at:
            self.break_off_at.remove(entry)
            raise KeyboardInterrupt

    def recover(self) -> None:
        self.broken = True
        self.write("recover")
        self.broken = False

    @changes_state
    def change(self, entry: str) -> str:
        """Say so."""
        self.write(entry)
        return entry.upper()


def test_a_change_that_ends_leaves_nothing_to_recover():
    diary = Diary()
    assert [diary.change("a"), diary.change("b")] == ["A", "B"]
    assert (diary.entries, diary.broken) == (["a", "b"], False)
    assert (diary.change.__name__, diary.change.__doc__) == ("change", "Say so.")


def test_after_a_change_that_broke_off_the_next_one_recovers_first():
    diary = Diary()
    diary.break_off_at = ["a"]
    with pytest.raises(KeyboardInterrupt):
        diary.change("a")
    assert diary.change("b") == "B"
    assert diary.change("c") == "C"
    assert diary.entries == ["a", "recover", "b", "c"]


def test_a_recovery_that_broke_off_is_made_again():
    diary = Diary()
    diary.break_off_at = ["a", "recover"]
    for entry in ("a", "b"):
        with pytest.raises(KeyboardInterrupt):
            diary.change(entry)
    assert diary.change("c") == "C"
    assert diary.entries == ["a", "recover", "recover", "c"]
