"""Ctrl-C may come between any two lines, also while an earlier one is being dealt with."""

from collections.abc import Callable
from functools import wraps
from typing import Any


def changes_state(method: Callable[..., Any]) -> Callable[..., Any]:
    """For methods of a class with a flag `broken` and a method `recover` that clears it.

    The flag is up while such a method runs. So whatever broke off anywhere, a recovery included, the
    next of them finds it up, and begins with `recover`.
    """

    @wraps(method)
    def run(self: Any, *args: Any) -> Any:
        if self.broken:
            self.recover()
        self.broken = True
        result = method(self, *args)
        self.broken = False
        return result

    return run
