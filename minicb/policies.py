"""Policies: the order of requests. What each gets in a step is the scheduler's business."""

from typing import Protocol

from minicb.request import Request


class Policy(Protocol):
    def key(self, request: Request) -> tuple:
        """Waiting requests are admitted from the smallest key up, running ones get prompt tokens and
        blocks from the smallest up, and are preempted from the largest down. A waiting request never
        displaces a running one, and no decode waits for a prefill, whatever their keys.

        A request's key must not change while it is in the scheduler, and no two may be equal (end
        the tuple with `request.arrival`), because the scheduler keeps requests sorted by it.
        """


class FCFS:
    """First come, first served. A preempted request keeps its place.

    Guarantee: whatever comes later, the oldest request is in every step's plan.
    """

    def key(self, request: Request) -> tuple:
        return (request.arrival,)


POLICIES: dict[str, type[Policy]] = {"fcfs": FCFS}
