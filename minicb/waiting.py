"""The requests that wait, in the policy's order."""

import heapq
from collections.abc import Iterator

from minicb.policies import Policy
from minicb.request import Request, RequestState

Entry = tuple[tuple, int, Request]  # key when it began to wait, arrival (no two are equal), request


class WaitingQueue:
    """Preempted requests first, the oldest first; then new ones from the policy's queue of the least service. ("fair"
    has a queue for each client, the others have one.) Under a preemptive policy preempted requests wait among new ones.

    Service only grows, so the heap of queues is corrected lazily, when an outdated entry comes to its top. Ended
    requests leave when they come to the top of their heap. Push, head and pop take logarithmic time.
    """

    def __init__(self, policy: Policy):
        self._policy = policy
        self._preempted: list[Entry] = []  # a heap
        self._queues: dict[str, list[Entry]] = {}  # heaps
        self._order: list[tuple[float, int, str]] = []  # a heap: service, arrival of the first request, queue
        self.num_entries = 0  # ended requests included

    def __iter__(self) -> Iterator[Request]:
        return (request for heap in self._heaps() for *_, request in heap if request.state is not RequestState.FINISHED)

    def push(self, request: Request) -> None:
        self.num_entries += 1
        if request.has_started and not self._policy.preemptive:
            heapq.heappush(self._preempted, ((), request.arrival, request))
            return
        name = self._policy.queue(request)
        if name not in self._queues:
            self._queues[name] = []
            heapq.heappush(self._order, (self._policy.service(name), request.arrival, name))
        heapq.heappush(self._queues[name], (self._policy.key(request), request.arrival, request))

    def head(self) -> Request | None:
        """The next request."""
        self._drop_ended(self._preempted)
        if self._preempted:
            return self._preempted[0][-1]
        while self._order:
            name = self._order[0][-1]
            queue = self._queues[name]
            self._drop_ended(queue)
            if not queue:
                heapq.heappop(self._order)
                del self._queues[name]
                continue
            current = (self._policy.service(name), queue[0][1], name)
            if current == self._order[0]:
                return queue[0][-1]
            heapq.heapreplace(self._order, current)
        return None

    def pop(self) -> Request:
        """Remove and return the request that `head` just returned."""
        self.num_entries -= 1
        return heapq.heappop(self._preempted or self._queues[self._order[0][-1]])[-1]

    def sweep(self, num_waiting: int) -> None:
        """Remove ended requests, if they are most of the entries. num_waiting: those that have not ended."""
        if self.num_entries > 2 * num_waiting + 64:
            for heap in self._heaps():
                heap[:] = [entry for entry in heap if entry[-1].state is not RequestState.FINISHED]
                heapq.heapify(heap)
            self._queues = {name: queue for name, queue in self._queues.items() if queue}
            self._order = [entry for entry in self._order if entry[-1] in self._queues]
            heapq.heapify(self._order)
            self.num_entries = sum(map(len, self._heaps()))

    def _heaps(self) -> list[list[Entry]]:
        return [self._preempted, *self._queues.values()]

    def _drop_ended(self, heap: list[Entry]) -> None:
        while heap and heap[0][-1].state is RequestState.FINISHED:
            heapq.heappop(heap)
            self.num_entries -= 1
