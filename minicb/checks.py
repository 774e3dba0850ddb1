"""Checks of callers' values. Each raises a ValueError that names the field and the values it may have."""

from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any


def check(fits: object, name: str, wanted: str, value: object) -> None:
    """Raise a ValueError that says what was wanted unless the value fits."""
    if not fits:
        raise ValueError(f"{name} must be {wanted}, not {show(value)}")


def check_choice(name: str, value: object, choices: Iterable[Any]) -> None:
    """Raise a ValueError unless the value is one of the choices."""
    if value not in list(choices):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {show(value)}")


def check_real(name: str, value: object, in_range: Callable[[float], bool], wanted: str) -> float:
    """The value as a float. ValueError unless it is a number in the range, which `wanted` describes."""
    try:
        if isinstance(value, Real) and not isinstance(value, bool) and in_range(float(value)):
            return float(value)
    except OverflowError:  # an int such as 10**400 is too large for a float
        pass
    raise ValueError(f"{name} must be {wanted}, not {show(value)}")


def check_int(name: str, value: object, minimum: int | None = None, below: int | None = None) -> int:
    """The value as an int. ValueError unless it is an integer in [minimum, below).

    Python's int doesn't overflow, as a NumPy integer may.
    """
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
    """A short repr for an error message. Python refuses to print integers of thousands of digits."""
    try:
        shown = repr(value)
    except ValueError:
        return "an integer of thousands of digits"
    return shown if len(shown) <= 100 else shown[:100] + "…"
