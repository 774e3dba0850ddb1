"""Policies: the order in which requests get tokens. The scheduler does everything else."""

from typing import Protocol

from minicb.request import Request


class Policy(Protocol):
    def key(self, request: Request) -> tuple:
        """Requests are served from the smallest key up and preempted from the largest down.

        A request's key must not change while it is in the scheduler, and no two may be equal.
        """


class FCFS:
    """First come, first served. A preempted request keeps its place.

    Guarantee: whatever comes later, the oldest request gets a token in every step.
    """

    def key(self, request: Request) -> tuple:
        return (request.arrival,)


POLICIES: dict[str, type[Policy]] = {"fcfs": FCFS}
