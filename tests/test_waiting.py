"""minicb/waiting.py: the requests that wait, against a list that is searched anew; and how little it looks at."""

from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_scheduler import WatchedRequest

from minicb.params import SamplingParams, SchedulingParams
from minicb.policies import FCFS, POLICIES, SJF, Fair, Policy, Priority
from minicb.request import Request, RequestState
from minicb.waiting import WaitingQueue

PARAMS = SamplingParams(max_tokens=10)


def make_request(arrival: int, kind: type[Request] = Request, **scheduling) -> Request:
    request = kind(str(arrival), [0], PARAMS, SchedulingParams(**scheduling))
    request.arrival, request.max_num_tokens = arrival, 11
    return request


def push_new(queue: WaitingQueue, arrival: int, **kwargs) -> Request:
    request = make_request(arrival, **kwargs)
    queue._policy.added(request)
    queue.push(request)
    return request


def pop(queue: WaitingQueue) -> Request:
    """Start the next request."""
    head = queue.head()
    assert queue.pop() is head
    if not head.has_started:
        head.has_started = True
        queue._policy.started(head)
    return head


def end(policy: Policy, request: Request, reason: str) -> None:
    request.state, request.finish_reason = RequestState.FINISHED, reason
    policy.finished(request)


class LastComeFirstServed(Policy):
    """Each new request comes to the head."""

    def key(self, request: Request) -> tuple:
        return (-request.arrival,)


class Queue(RuleBasedStateMachine):
    """Calls in any order, as the scheduler makes them, against a list in which the first is looked for anew."""

    @initialize(kind=st.sampled_from([*POLICIES.values(), LastComeFirstServed]))
    def start(self, kind):
        self.policy = kind()
        self.queue = WaitingQueue(self.policy)
        self.model: list[tuple[tuple, Request]] = []  # the key when it began to wait, request
        self.running: list[Request] = []
        self.num_arrived = 0

    @property
    def waiting(self) -> list[Request]:
        return [request for _, request in self.model if request.state is not RequestState.FINISHED]

    @rule(client=st.sampled_from("abcd"), priority=st.integers(-2, 2), expected=st.none() | st.integers(1, 9))
    def push_new(self, client, priority, expected):
        request = push_new(self.queue, self.num_arrived, client=client, priority=priority, expected_output_len=expected)
        self.num_arrived += 1
        self.model.append((self.policy.key(request), request))

    def first(self) -> Request | None:
        """The oldest preempted one, else the first of the queue of the least service, as it is now."""
        queues = defaultdict(list)
        preempted = []
        for key, request in self.model:
            if request.state is RequestState.FINISHED:
                continue
            if request.has_started and not self.policy.preemptive:
                preempted.append((request.arrival, request))
            queues[self.policy.queue(request)].append((key, request.arrival, request))
        firsts = [(self.policy.service(name), *min(queue)[1:]) for name, queue in queues.items()]
        return min(preempted or firsts, default=(None,))[-1]

    @rule()
    def head(self):
        assert self.queue.head() is self.first()

    @precondition(lambda self: self.waiting)
    @rule()
    def pop(self):
        expected = self.first()
        assert pop(self.queue) is expected
        self.model = [entry for entry in self.model if entry[1] is not expected]
        self.running.append(expected)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data):
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.model.append((self.policy.key(request), request))
        self.queue.push(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 30))
    def generate(self, data, count):
        """Service grows."""
        for _ in range(count):
            self.policy.generated(data.draw(st.sampled_from(self.running)))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort_one_that_waits(self, data):
        end(self.policy, data.draw(st.sampled_from(self.waiting)), "abort")

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def one_that_runs_ends(self, data):
        request = data.draw(st.sampled_from(self.running))
        end(self.policy, request, "stop")
        self.running.remove(request)

    @rule(num_too_few=st.integers(0, 1))
    def sweep(self, num_too_few):
        """It does nothing until ended requests are most of the entries. Let it believe that they are, or just not."""
        before = self.queue.num_entries
        self.queue.sweep((before - 64) / 2 - num_too_few / 2)
        if num_too_few:
            self.model = [entry for entry in self.model if entry[1].state is not RequestState.FINISHED]
        assert self.queue.num_entries == (len(self.model) if num_too_few else before)

    @invariant()
    def all_are_there(self):
        if not hasattr(self, "queue"):
            return
        assert sorted(map(id, self.queue)) == sorted(map(id, self.waiting))
        assert len(self.waiting) <= self.queue.num_entries <= len(self.model)

    def teardown(self):
        if hasattr(self, "queue"):
            while self.waiting:
                self.pop()
            assert self.queue.head() is None
            assert self.queue.num_entries == len(self.queue._order) == len(self.queue._queues) == 0


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=4 * settings.default.max_examples)


@pytest.mark.parametrize("make_policy", [FCFS, SJF, Priority, Fair])
@pytest.mark.parametrize("num_clients", [1, 10, 5_000])
def test_a_request_is_looked_at_only_near_the_head(make_policy, num_clients):
    """5,000 wait. Service grows between the looks, as that of clients does that are served."""
    policy = make_policy()
    queue = WaitingQueue(policy)
    for arrival in range(5_000):
        push_new(queue, arrival, kind=WatchedRequest, client=str(arrival % num_clients), priority=arrival % 3)
    WatchedRequest.num_looks = 0
    for _ in range(100):
        policy.generated(pop(queue))
        assert queue.head() is not None
    assert WatchedRequest.num_looks < 100 * 40


def test_a_client_that_is_served_while_it_waits_goes_behind_the_others():
    """Its place in the heap is from when it was served less."""
    policy = Fair()
    queue = WaitingQueue(policy)
    requests = [push_new(queue, number, client="aab"[number]) for number in range(3)]
    assert pop(queue) is requests[0]
    assert pop(queue) is requests[2]
    policy.generated(requests[2])
    assert queue.head() is requests[1]


def test_a_preempted_request_goes_before_all_clients():
    """However much its own was served, and however late it came."""
    policy = Fair()
    queue = WaitingQueue(policy)
    preempted = push_new(queue, 1, client="a")
    pop(queue)
    for _ in range(1000):
        policy.generated(preempted)
    other = push_new(queue, 0, client="b")
    assert queue.head() is other
    queue.push(preempted)
    assert pop(queue) is preempted
    assert queue.head() is other


@pytest.mark.parametrize("kind", [LastComeFirstServed, Fair, Priority])
def test_ended_requests_and_their_clients_do_not_pile_up(kind):
    """2,000 clients come, one after the other, and leave while they wait. One request stays, at the head or not."""
    queue = WaitingQueue(kind())
    stays = push_new(queue, 0)
    for arrival in range(1, 2_000):
        request = push_new(queue, arrival, client=str(arrival))
        assert queue.head() is (request if kind is LastComeFirstServed else stays)
        end(queue._policy, request, "abort")
        queue.sweep(1)
        assert queue.num_entries <= 2 + 64
        assert len(queue._order) == len(queue._queues) <= 2 + 64
    assert queue.head() is stays
    assert list(queue) == [stays]


def test_clients_with_nothing_that_waits_are_forgotten():
    queue = WaitingQueue(Fair())
    for arrival in range(1000):
        push_new(queue, arrival, client=str(arrival))
        pop(queue)
        assert queue.head() is None
        assert not queue._queues
        assert not queue._order


def test_sweeping_keeps_the_order():
    """Two in three of 300 go."""
    queue = WaitingQueue(LastComeFirstServed())
    requests = [push_new(queue, 7 * number % 300) for number in range(300)]
    for request in requests:
        if request.arrival % 3:
            end(queue._policy, request, "abort")
    queue.sweep(100)
    assert queue.num_entries == 100
    assert [pop(queue).arrival for _ in range(100)] == [*range(297, -1, -3)]
