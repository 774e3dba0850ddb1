"""The requests that wait, in the policy's order."""

import heapq
from collections.abc import Iterator

from minicb.policies import Policy
from minicb.request import Request, RequestState

Entry = tuple[tuple, Request]  # its order when it began to wait, and its arrival


class WaitingQueue:
    """The policy's first request is at the head. Requests wait in lines (one, but for the policy "fair": there
    one for each client), each line a heap, and of the lines' first requests the one of the smallest rank is next.

    A rank may grow while its line waits, so the heap of lines may be out of date; what comes to its top is
    looked at again. Aborted requests leave when they come to the head of their line. Nothing here takes
    time that grows with the number of those that wait, but for a logarithm.
    """

    def __init__(self, policy: Policy):
        self._policy = policy
        self.clear()

    def clear(self) -> None:
        self._lines: dict[str, list[Entry]] = {}
        self._tops: list[tuple[tuple, str]] = []  # a heap of (rank and order of a line's first request, line)
        self._latest: dict[str, tuple] = {}  # of a line; entries of _tops that aren't this very tuple are dropped
        self.num_entries = 0  # aborted ones included

    def __iter__(self) -> Iterator[Request]:
        return (request for line in self._lines.values() for _, request in line)

    def push(self, request: Request) -> None:
        name = self._policy.line(request)
        line = self._lines.setdefault(name, [])
        heapq.heappush(line, ((self._policy.order(request), request.arrival), request))  # equals by arrival
        self.num_entries += 1
        if line[0][1] is request:
            self._note_top(name)

    def head(self) -> tuple[tuple, Request] | None:
        """The next request, and a key by which the heads of several queues compare."""
        while self._tops:
            top, name = self._tops[0]
            if self._latest.get(name) is not top:
                heapq.heappop(self._tops)
                continue
            line = self._lines[name]
            while line and line[0][1].state is RequestState.FINISHED:
                self._pop_from(line)
            if line and self._top(name) == top:
                return top, line[0][1]
            heapq.heappop(self._tops)
            if line:
                self._note_top(name)
            else:
                del self._lines[name], self._latest[name]
        return None

    def pop(self) -> None:
        """Take out what `head` returned last."""
        self._pop_from(self._lines[self._tops[0][1]])

    def sweep(self) -> None:
        """Take out all that have ended."""
        live = [entry for line in self._lines.values() for entry in line if entry[1].state is not RequestState.FINISHED]
        self.clear()
        for order, request in live:
            self._lines.setdefault(self._policy.line(request), []).append((order, request))
        self.num_entries = len(live)
        for name, line in self._lines.items():
            heapq.heapify(line)
            self._note_top(name)

    def _top(self, name: str) -> tuple:
        order, request = self._lines[name][0]
        return (self._policy.rank(request), order)

    def _note_top(self, name: str) -> None:
        self._latest[name] = top = self._top(name)
        heapq.heappush(self._tops, (top, name))
        if len(self._tops) > 2 * len(self._lines) + 64:  # mostly out of date
            self._tops = [(top, name) for name, top in self._latest.items()]
            heapq.heapify(self._tops)

    def _pop_from(self, line: list[Entry]) -> None:
        heapq.heappop(line)
        self.num_entries -= 1
