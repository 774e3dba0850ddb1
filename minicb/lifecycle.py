"""From submission to end: what becomes of a request, whatever the plans of the steps between."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from minicb.interrupts import changes_state
from minicb.memory import Memory
from minicb.plan import Event, StepPlan
from minicb.policies import Limits, Policy
from minicb.request import Group, Request, RequestState
from minicb.waiting import WaitingQueue


def has_happened(event: Event) -> bool:
    """Is it true of the request by now? Only of what happens once can that be told."""
    if event.kind == "started":
        return event.request.has_started
    if event.kind == "first_token":
        return event.request.num_output_tokens > 0
    return event.kind != "finished" or event.request.state is RequestState.FINISHED


def groups_of(requests: Iterable[Request]) -> dict[str, Group]:
    return {request.request_id: request.group for request in requests if request.group is not None}


class Lifecycle:
    """The requests that have not ended, where each of them is, and what it holds.

    max_num_seqs: at most so many requests run at a time.
    max_num_batched_tokens: at most so many tokens in a step.
    max_model_len: prompt and output of a request are together at most so many tokens.
    batching: "continuous", or "static", which admits requests only when none is running.
    long_prefill_token_threshold: of a request that has more tokens than this to prefill, at most so many are
        prefilled in a step while others want tokens; 0: no request is long.
    max_long_partial_prefills: at most so many long prefills at a time; shorter requests pass those that wait for
        it. (There may be more: a preempted request waits for nobody's prefill, and under the policy "priority" a
        request doesn't wait for those that are less urgent.)
    """

    def __init__(
        self,
        memory: Memory,
        policy: Policy,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        batching: str = "continuous",
        long_prefill_token_threshold: int = 0,
        max_long_partial_prefills: int = 1,
    ):
        self.memory, self.pool = memory, memory.pool
        self.policy = policy
        # Never more requests than tokens, so that each decode gets its token in every step.
        self.maximum = Limits(min(max_num_seqs, max_num_batched_tokens), max_num_batched_tokens)
        self.limits = self.maximum  # those of the latest step
        self.max_model_len = max_model_len
        self.static = batching == "static"
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.max_long_partial_prefills = max_long_partial_prefills
        self.requests: dict[Hashable, Request] = {}  # all that have not ended, by key
        self.groups: dict[str, Group] = {}  # all of which a sample has not ended, by request_id
        self.running: list[Request] = []  # in the policy's order
        # All that wait or are swapped out; those with a long prefill have a queue of their own.
        self.waiting, self.waiting_long = WaitingQueue(policy), WaitingQueue(policy)
        self.events: list[Event] = []  # until somebody collects them
        self.now = 0.0  # the latest time that was handed in, in seconds
        self._num_arrived = 0
        self._ending_all = False  # has somebody called abort_all?
        self.broken = False  # did a change break off half-way? See interrupts.py

    @property
    def num_waiting(self) -> int:
        return len(self.requests) - len(self.running)

    def check(self, request: Request) -> None:
        """Raise ValueError if no state of the pool could ever serve this request."""
        length, usable = request.num_prompt_tokens, self.pool.num_usable * self.pool.block_size
        if length == 0:
            raise ValueError("prompt is empty: it must have at least 1 token")
        if length >= self.max_model_len:
            raise ValueError(
                f"prompt has {length} tokens, but max_model_len is {self.max_model_len}, output included: "
                f"a prompt can have at most {self.max_model_len - 1}"
            )
        if length > usable:
            raise ValueError(
                f"prompt has {length} tokens, but the KV cache holds only {usable} "
                f"({self.pool.num_usable} blocks of {self.pool.block_size}); raise num_blocks"
            )

    def add(self, request: Request, arrival_time: float = 0.0) -> None:
        """Accept a request that was due at arrival_time, with the other samples of its prompt if it is in a group.
        From here on it is never lost: it will end, for a reason."""
        if self.broken:  # then nobody knows yet which ids are in use
            self.recover()
        self.check(request)
        if self.is_used(request.request_id):
            raise ValueError(f"request_id {request.request_id!r} is already in use")
        for sample in request.samples:
            if sample.state is not RequestState.WAITING:
                raise ValueError(f"request {sample.name!r} has been submitted before: it is {sample.state.name}")
        self._accept(request.samples, arrival_time)

    def is_used(self, request_id: str) -> bool:
        """Does a request have this id that has not ended?"""
        return request_id in self.requests or request_id in self.groups

    @changes_state
    def _accept(self, samples: Sequence[Request], arrival_time: float) -> None:
        for request in samples:
            self._expect_prompt(request)
            request.arrival_time = arrival_time
            self._set_limit(request)
            request.arrival = self._num_arrived
            self._num_arrived += 1
            self.policy.added(request)  # first: what is in `requests` must have a place in the policy's order
        self.requests.update({request.key: request for request in samples})  # all of them or none (Ctrl-C)
        self.groups.update(groups_of(samples))
        for request in samples:
            self._wait(request)
            self.events.append(Event(arrival_time, "queued", request, {}))

    def _set_limit(self, request: Request) -> None:
        wanted = self.max_model_len
        if request.params.max_tokens is not None:
            wanted = min(wanted, request.num_prompt_tokens + request.params.max_tokens)
        # The last token is sampled but never fed back, so its KV needs no place.
        room = self.pool.num_usable * self.pool.block_size + 1
        request.max_num_tokens = min(wanted, room)
        if room < wanted:
            request.length_reason = (
                f"the request has filled the whole KV cache, {self.pool.num_usable} blocks of {self.pool.block_size}"
            )

    def _is_long(self, request: Request) -> bool:
        return 0 < self.long_prefill_token_threshold < request.num_pending

    def _wait(self, request: Request) -> None:
        if self._follows(request):
            return
        # One that had to stop waits for no other long one: it is back before anything new starts.
        is_long = self._is_long(request) and not request.has_started
        (self.waiting_long if is_long else self.waiting).push(request)

    def _follows(self, request: Request) -> bool:
        """Does another sample compute the prompt for it? Then it isn't in the queue, but joins it, in its old place,
        when that has got a token (`_let_follow`) or ended without one (`_hand_on`)."""
        group = request.group
        return group is not None and not group.has_prompt and group.first() is not request

    def _expect_prompt(self, request: Request) -> None:
        if request.group is not None:  # whose samples begin together in a static batch, as nobody could join it later
            request.group.has_prompt = self.static

    def _let_follow(self, request: Request) -> None:
        """The request got a token, so all full blocks of its prompt can be found."""
        group = request.group
        if group is not None and not group.has_prompt:
            group.has_prompt = True
            for sample in group.samples:
                if sample is not request and sample.state is not RequestState.FINISHED:
                    self._wait(sample)

    def _hand_on(self, request: Request) -> None:
        """The request has ended. If it was to compute the prompt for others and had not, the next of them does, from
        its beginning."""
        group = request.group
        if group is not None and not group.has_prompt:
            heir = group.first()
            if heir is not None and heir.index > request.index:
                self._wait(heir)

    def _emit(self, kind: str, request: Request, **details: Any) -> None:
        """Said before it becomes true, so that an interruption loses no event; `recover` takes back what didn't."""
        self.events.append(Event(self.now, kind, request, details))

    @changes_state
    def abort(self, request_id: str, now: float | None = None, index: int | None = None) -> Request | None:
        """End a request in whatever state it is, with all samples of its prompt, or only the one of this index.

        Returns it, or of several the first. Unknown or already ended: no effect, None.
        """
        group = self.groups.get(request_id)
        samples = group.samples if group is not None else [self.requests.get(request_id)]
        live = [sample for sample in samples if sample is not None and sample.state is not RequestState.FINISHED]
        aborted = [sample for sample in live if index in (None, sample.index)]
        if aborted and now is not None:
            self.now = now
        for request in reversed(aborted):  # the one that computes the prompt for the others last
            if request.state is RequestState.RUNNING:
                self.running.remove(request)
            self._finish(request, "abort")
        if self.waiting.num_entries + self.waiting_long.num_entries > 2 * self.num_waiting + 64:  # mostly aborted ones
            self.waiting.sweep()
            self.waiting_long.sweep()
        return aborted[0] if aborted else None

    def abort_all(self) -> None:
        """End every request, whatever state things are in."""
        self._ending_all = True
        self.recover()

    @changes_state
    def cancel(self, plan: StepPlan) -> None:
        """Take back a plan that was not executed to its end: its chunks will be planned again."""
        if plan.swap_out or plan.swap_in:
            self.recover()  # nobody knows which of the copies were made
            return
        for request, start, *_ in plan.chunks:
            self.memory.shrink(request, start)

    def recover(self) -> None:
        """Begin again after any of the other methods broke off anywhere (Ctrl-C), or a plan with copies did.

        Then nothing is certain but the tokens that requests have. So all blocks are taken back, those
        with cached prefixes too, and every request that has not ended waits again.
        """
        self.broken = True
        self.running = []
        self.groups = groups_of(self.requests.values())
        self.memory.reset()
        self.events = [event for event in self.events if has_happened(event)]
        for request in list(self.requests.values()):
            self.memory.forget(request)
            request.num_computed_tokens = 0
            self._expect_prompt(request)
            if request.state is RequestState.FINISHED:
                del self.requests[request.key]
            else:
                request.state, request.finish_reason, request.stop_reason = RequestState.WAITING, None, None
                if self._ending_all:
                    self._finish(request, "abort")
                else:
                    self._end_if_done(request)
        self.policy.recovered(self.requests.values())
        self.waiting.clear()
        self.waiting_long.clear()
        for request in self.requests.values():
            self._wait(request)
        self.broken = self._ending_all = False

    def _end_if_done(self, request: Request) -> None:
        ending = request.ending()
        if ending is not None:
            self._finish(request, *ending)

    def _finish(self, request: Request, finish_reason: str, stop_reason: int | str | None = None) -> None:
        self.memory.release(request)
        request.finish_reason, request.stop_reason = finish_reason, stop_reason
        self._emit("finished", request, finish_reason=finish_reason)
        self.policy.finished(request)
        request.state = RequestState.FINISHED
        del self.requests[request.key]
        if request.group is not None and request.group.first() is None:
            del self.groups[request.request_id]
        self._hand_on(request)

    def check_invariants(self) -> None:
        """Raise AssertionError unless requests, blocks and states agree, between two steps."""
        self.memory.check_invariants(list(self.requests.values()))
        for request in self.requests.values():
            running = request.state is RequestState.RUNNING
            assert running == (request in self.running), f"{request} is in the wrong list"
            in_queue = sum(other is request for queue in (self.waiting, self.waiting_long) for other in queue)
            waits = not running and not self._follows(request)
            assert in_queue == waits, f"{request} is {in_queue} times in the queue"
