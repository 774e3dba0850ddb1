"""Checks of what callers pass: each raises a ValueError that names the field and what it may be."""

from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any


def check_choice(name: str, value: object, choices: Iterable[Any]) -> None:
    """Raise a ValueError that names the field unless value is one of the choices."""
    if value not in list(choices):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {show(value)}")


def check_real(name: str, value: object, in_range: Callable[[float], bool], wanted: str) -> float:
    """The value as a float; a ValueError that names the field unless it is a number in the range."""
    try:
        if isinstance(value, Real) and not isinstance(value, bool) and in_range(float(value)):
            return float(value)
    except OverflowError:  # 10**400 is an int, but no float
        pass
    raise ValueError(f"{name} must be {wanted}, not {show(value)}")


def check_int(name: str, value: object, minimum: int | None = None, below: int | None = None) -> int:
    """The value as an int (NumPy's small ones wrap around when added to); a ValueError that names the
    field unless it is an integer in [minimum, below)."""
    if (
        isinstance(value, Integral)
        and not isinstance(value, bool)
        and (minimum is None or int(value) >= minimum)
        and (below is None or int(value) < below)
    ):
        return int(value)
    limits = [f">= {minimum}"] * (minimum is not None) + [f"< {below}"] * (below is not None)
    wanted = " ".join(["an integer", " and ".join(limits)]).strip()
    raise ValueError(f"{name} must be {wanted}, not {show(value)}")


def show(value: object) -> str:
    """repr for an error message, short and safe: Python refuses to print integers of thousands of digits."""
    try:
        shown = repr(value)
    except ValueError:
        return "one of thousands of digits"
    return shown if len(shown) <= 100 else shown[:100] + "…"
