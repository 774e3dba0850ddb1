"""minicb/waiting.py: the requests that wait, against a sorted list; and how little it looks at."""

from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minicb import SamplingParams
from minicb.policies import FCFS, POLICIES, SJF, Fair, Policy, Priority
from minicb.request import Request, RequestState
from minicb.waiting import WaitingQueue

PARAMS = SamplingParams(max_tokens=10)


def make_request(arrival: int, **kwargs) -> Request:
    request = Request(str(arrival), [0], PARAMS, **kwargs)
    request.arrival = arrival
    return request


class LastComeFirstServed(Policy):
    """The worst for a heap of what was at the head: everything new is."""

    def key(self, request: Request) -> tuple:
        return (-request.arrival,)


class Queue(RuleBasedStateMachine):
    """Calls in any order, as the scheduler makes them, against a list in which the first is looked for anew."""

    @initialize(kind=st.sampled_from([*POLICIES.values(), LastComeFirstServed]))
    def start(self, kind):
        self.policy = kind()
        self.queue = WaitingQueue(self.policy)
        self.model: list[tuple[tuple, Request]] = []  # the order when it began to wait, request
        self.running: list[Request] = []
        self.num_arrived = 0

    @rule(client=st.sampled_from("abcd"), priority=st.integers(-2, 2), expected=st.none() | st.integers(1, 9))
    def push_new(self, client, priority, expected):
        request = make_request(self.num_arrived, client=client, priority=priority, expected_output_len=expected)
        self.num_arrived += 1
        self.policy.added(request)
        self.push(request)

    def push(self, request):
        self.model.append((self.policy.order(request), request))
        self.queue.push(request)

    def first(self) -> Request | None:
        """The line of the smallest rank, ranks as they are now, and its first."""
        lines = defaultdict(list)
        for order, request in self.model:
            if request.state is not RequestState.FINISHED:
                lines[self.policy.line(request)].append((order, request))
        firsts = [min(line) for line in lines.values()]
        return min(((self.policy.rank(r), order, r) for order, r in firsts), default=(None,))[-1]

    @rule()
    def head(self):
        head = self.queue.head()
        assert (head and head[1]) is self.first()

    @precondition(lambda self: self.first() is not None)
    @rule()
    def pop(self):
        expected = self.first()
        assert self.queue.head()[1] is expected
        self.queue.pop()
        self.model = [entry for entry in self.model if entry[1] is not expected]
        self.running.append(expected)
        if not expected.has_started:
            expected.has_started = True
            self.policy.started(expected)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data):
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.push(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 30))
    def generate(self, data, count):
        """Ranks grow."""
        for _ in range(count):
            self.policy.generated(data.draw(st.sampled_from(self.running)))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def abort_one_that_waits(self, data):
        data.draw(st.sampled_from(self.model))[1].state = RequestState.FINISHED

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def one_that_runs_ends(self, data):
        request = data.draw(st.sampled_from(self.running))
        request.finish_reason = "stop"
        self.policy.finished(request)
        self.running.remove(request)

    @rule()
    def sweep(self):
        self.queue.sweep()
        self.model = [entry for entry in self.model if entry[1].state is not RequestState.FINISHED]
        assert self.queue.num_entries == len(self.model)
        assert list(self.queue) != [] or not self.model

    @rule()
    def begin_again(self):
        """After an interruption: whatever was there, all who have not ended are put in once more."""
        live = [r for _, r in self.model if r.state is not RequestState.FINISHED] + self.running
        self.queue.clear()
        assert (list(self.queue), self.queue.num_entries, self.queue.head()) == ([], 0, None)
        self.model, self.running = [], []
        for request in live:
            self.push(request)

    @invariant()
    def all_are_there(self):
        if not hasattr(self, "queue"):
            return
        assert self.queue.num_entries == len(list(self.queue)) <= len(self.model)
        waiting = [r for _, r in self.model if r.state is not RequestState.FINISHED]
        assert {id(r) for r in self.queue if r.state is not RequestState.FINISHED} == {id(r) for r in waiting}
        assert len(self.queue._tops) <= 2 * len(self.queue._lines) + 64

    def teardown(self):
        if hasattr(self, "queue"):
            while self.first() is not None:
                self.pop()
            assert self.queue.head() is None
            assert not self.queue._lines
            assert not self.queue._tops


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=4 * settings.default.max_examples)


class WatchedRequest(Request):
    """Counts how often anybody looks at any request."""

    num_looks = 0

    def __getattribute__(self, name):
        WatchedRequest.num_looks += 1
        return super().__getattribute__(name)


@pytest.mark.parametrize("make_policy", [FCFS, SJF, Priority, Fair])
@pytest.mark.parametrize("num_clients", [1, 10, 5_000])
def test_nobody_looks_at_those_whose_turn_has_not_come(make_policy, num_clients):
    """5,000 wait. Ranks grow between the looks, as those do whose clients are served."""
    policy = make_policy()
    queue = WaitingQueue(policy)
    for arrival in range(5_000):
        request = WatchedRequest(str(arrival), [0], PARAMS, client=str(arrival % num_clients), priority=arrival % 3)
        request.arrival = arrival
        policy.added(request)
        queue.push(request)
    WatchedRequest.num_looks = 0
    for _ in range(100):
        _, request = queue.head()
        queue.pop()
        request.has_started = True
        policy.started(request)
        policy.generated(request)
        assert queue.head() is not None
    assert WatchedRequest.num_looks < 100 * 40


def test_a_client_that_is_served_while_it_waits_goes_behind_the_others():
    """Its place was noted when it was served less."""
    policy = Fair()
    queue = WaitingQueue(policy)
    requests = [make_request(number, client="aab"[number]) for number in range(3)]
    for request in requests:
        policy.added(request)
        queue.push(request)
    assert queue.head()[1] is requests[0]
    queue.pop()
    policy.started(requests[0])
    assert queue.head()[1] is requests[2]
    policy.started(requests[2])
    policy.generated(requests[2])
    assert queue.head()[1] is requests[1]


def test_a_request_that_had_to_stop_goes_before_all_lines():
    policy = Fair()
    queue = WaitingQueue(policy)
    stopped, other = make_request(1, client="a"), make_request(0, client="b")
    for request in (stopped, other):
        policy.added(request)
    stopped.has_started = True
    policy.started(stopped)
    for _ in range(1000):
        policy.generated(stopped)
    queue.push(other)
    assert queue.head()[1] is other
    queue.push(stopped)
    assert queue.head()[1] is stopped
    queue.pop()
    assert queue.head()[1] is other


@pytest.mark.parametrize("kind", [LastComeFirstServed, Fair, Priority])
def test_what_is_out_of_date_does_not_pile_up(kind):
    """Under one that stays, 2,000 come to the head, one by one, and leave again at once."""
    policy = kind()
    queue = WaitingQueue(policy)
    stays = make_request(0, client="a", priority=1)
    policy.added(stays)
    queue.push(stays)
    for arrival in range(1, 2_000):
        request = make_request(arrival, client=str(arrival), priority=-arrival)
        policy.added(request)
        queue.push(request)
        assert queue.head()[1] in (stays, request)
        if queue.head()[1] is request:
            queue.pop()
        else:
            request.state = RequestState.FINISHED
            queue.sweep()
        assert len(queue._tops) <= 64 + 4
    assert queue.head()[1] is stays
    assert queue.num_entries == 1
    assert queue._lines.keys() == {policy.line(stays)}


def test_clients_that_have_nothing_waiting_are_forgotten():
    policy = Fair()
    queue = WaitingQueue(policy)
    for arrival in range(1000):
        request = make_request(arrival, client=str(arrival))
        policy.added(request)
        queue.push(request)
        queue.head()
        queue.pop()
        assert queue.head() is None
        assert not queue._lines
        assert not queue._latest
        assert not queue._tops
