"""Ctrl-C may come between any two lines, also while an earlier one is being dealt with."""

from collections.abc import Callable
from functools import wraps
from typing import Any


def changes_state(method: Callable[..., Any]) -> Callable[..., Any]:
    """For methods of a class with a flag `broken` and a method `recover` that clears it.

    `broken` is True while such a method runs. If one is interrupted, or the recovery from that, the next
    call sees the flag and recovers first.
    """

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.broken:
            self.recover()
        self.broken = True
        result = method(self, *args, **kwargs)
        self.broken = False
        return result

    return run
