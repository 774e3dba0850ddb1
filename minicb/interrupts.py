"""Ctrl-C, held back while something changes that must not be left half-changed."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


@contextmanager
def hold_ctrl_c() -> Iterator[Callable[[], AbstractContextManager]]:
    """Deliver a SIGINT that comes inside the block at its end. Yields `let_through`: inside `with let_through():` it is
    delivered at once. Python handles signals in the main thread only, so there is nothing to hold in another."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield nullcontext
        return
    held: list[tuple] = []

    def hold(*args: object) -> None:
        held.append(args)

    @contextmanager
    def let_through() -> Iterator[None]:
        signal.signal(signal.SIGINT, handler)
        try:
            if held:
                handler(*held.pop())
            yield
        finally:
            signal.signal(signal.SIGINT, hold)

    signal.signal(signal.SIGINT, hold)
    try:
        yield let_through
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[-1])
