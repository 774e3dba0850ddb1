"""Ctrl-C, held back while something changes that must not be left half-changed."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any


@contextmanager
def hold_ctrl_c() -> Iterator[Callable[[], AbstractContextManager]]:
    """Deliver a SIGINT that comes inside the block at its end. Yields `let_through`: inside `with let_through():` it is
    delivered at once. Python handles signals in the main thread only, so there is nothing to hold in another."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield nullcontext
        return
    held, is_open = list[tuple[Any, ...]](), False

    def hold(*args: Any) -> None:
        nonlocal is_open
        if is_open:
            is_open = False  # stays so if the handler raises: what deals with that is not interrupted
            handler(*args)
            is_open = True
        else:
            held.append(args)

    @contextmanager
    def let_through() -> Iterator[None]:
        nonlocal is_open
        is_open = True
        try:
            if held:
                hold(*held.pop())
            yield
        finally:
            is_open = False

    signal.signal(signal.SIGINT, hold)
    try:
        yield let_through
    finally:
        if signal.getsignal(signal.SIGINT) is hold:  # else the handler has set another
            signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[-1])
