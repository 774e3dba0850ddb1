"""Ctrl-C may come between any two lines, also while an earlier one is being dealt with."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def hold_ctrl_c() -> Iterator[None]:
    """Deliver Ctrl-C only when the block is through.

    Python delivers signals to the main thread, so other threads hold nothing. A handler that isn't Python's
    stays in place.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *args: held.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])
