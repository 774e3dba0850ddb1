"""The scheduler: at every step, which requests get how many tokens, and who must give blocks back.

Iteration-level scheduling (Orca, 2022) with chunked prefill (Sarathi-Serve, 2024) and preemption
(PagedAttention, 2023). It decides and keeps count; it never touches a tensor.
"""

import heapq
from bisect import insort

from minicb.interrupts import changes_state
from minicb.memory import Memory
from minicb.plan import Chunk, Event, StepPlan
from minicb.policies import Policy
from minicb.request import Request, RequestState


class Scheduler:
    """Requests go in by `add`, then `schedule` and `update` alternate until they have ended.

    max_num_seqs: at most so many requests run at a time.
    max_num_batched_tokens: at most so many tokens in a step.
    max_model_len: prompt and output of a request are together at most so many tokens.
    batching: "continuous", or "static", which admits requests only when none is running.
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
    ):
        self.memory, self.pool = memory, memory.pool
        self.policy = policy
        # Never more requests than tokens, so that each decode gets its token in every step.
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.static = batching == "static"
        self.requests: dict[str, Request] = {}  # all that have not ended
        self.running: list[Request] = []  # in the policy's order
        # A heap of all that wait or are swapped out; aborted requests leave when they surface.
        self._waiting: list[tuple[bool, tuple, Request]] = []
        self._num_arrived = 0
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

    def add(self, request: Request) -> None:
        """Accept a request. From here on it is never lost: it will end, for a reason."""
        self.check(request)
        if request.request_id in self.requests:
            raise ValueError(f"request_id {request.request_id!r} is already in use")
        if request.state is not RequestState.WAITING:
            raise ValueError(f"request {request.request_id!r} has been submitted before: it is {request.state.name}")
        self._accept(request)

    @changes_state
    def _accept(self, request: Request) -> None:
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
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self.requests[request.request_id] = request
        heapq.heappush(self._waiting, self._entry(request))

    def _entry(self, request: Request) -> tuple[bool, tuple, Request]:
        """Requests that had to stop come first, whatever the policy: new ones could keep them out for ever."""
        return (not request.has_started, self.policy.key(request), request)

    @changes_state
    def abort(self, request_id: str) -> Request | None:
        """End a request in whatever state it is. Unknown or already ended: no effect, None."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        self._finish(request, "abort")
        if len(self._waiting) > 2 * self.num_waiting + 64:  # mostly aborted ones: sweep
            self._waiting = [entry for entry in self._waiting if entry[-1].state is not RequestState.FINISHED]
            heapq.heapify(self._waiting)
        return request

    def abort_all(self) -> None:
        """End every request, whatever state things are in."""
        self.broken = True
        requests, self.requests = self.requests, {}  # at once, so that it is all or nothing
        for request in requests.values():
            self.memory.forget(request)
            request.finish_reason, request.state = "abort", RequestState.FINISHED
        self.recover()

    @changes_state
    def cancel(self, plan: StepPlan) -> None:
        """Take back a plan that was not executed to its end: its chunks will be planned again."""
        if plan.swap_out or plan.swap_in:
            self.recover()  # nobody knows which of the copies were made
            return
        for request, start, _ in plan.chunks:
            self.memory.shrink(request, start)

    def recover(self) -> None:
        """Begin again after any of the other methods broke off anywhere (Ctrl-C), or a plan with copies did.

        Then nothing is certain but the tokens that requests have. So all blocks are taken back, those
        with cached prefixes too, and every request that has not ended waits again.
        """
        self.broken = True
        self.running = []
        self.memory.reset()
        for request in list(self.requests.values()):
            self.memory.forget(request)
            request.num_computed_tokens = 0
            if request.state is RequestState.FINISHED:
                del self.requests[request.request_id]
            else:
                request.state, request.finish_reason, request.stop_reason = RequestState.WAITING, None, None
                self._end_if_done(request)
        self._waiting = [self._entry(request) for request in self.requests.values()]
        heapq.heapify(self._waiting)
        self.broken = False

    # ------------------------------------------------------------------ one step

    @changes_state
    def schedule(self) -> StepPlan:
        """Plan the next step. Blocks for all of its tokens are allocated when this returns."""
        plan = StepPlan()
        budget = self._schedule_running(plan)
        if not plan.preempted:  # or one that had to go might come back at once, out and in within one plan
            self._admit(plan, budget)
        return plan

    def _schedule_running(self, plan: StepPlan) -> int:
        """Give each decode its one token and unfinished prefills what that leaves; return the rest."""
        num_decodes = sum(request.num_pending == 1 for request in self.running)
        budget = self.max_num_batched_tokens - num_decodes
        for request in list(self.running):
            if request.state is not RequestState.RUNNING:
                break  # preempted, and so are all after it
            pending = request.num_pending
            length = self._make_room(request, 1 if pending == 1 else min(pending, budget), plan)
            if length == 0:
                continue
            plan.chunks.append(Chunk(request, request.num_computed_tokens, length))
            if pending > 1:
                budget -= length
        return budget

    def _make_room(self, request: Request, length: int, plan: StepPlan) -> int:
        """Get blocks for the request's next `length` tokens; return for how many there are.

        A prefill takes what is free. If nothing is, running requests are preempted, the policy's last
        first, until a block is free or the request itself was the last. The policy's
        first is never preempted by another and alone always fits (`add` saw to that), so every step
        computes something, and under a policy that passes nobody over for ever, every request ends.
        """
        while length > 0:
            end = request.num_computed_tokens + length
            room = (len(request.block_table) + self.pool.num_free) * self.pool.block_size
            if room > request.num_computed_tokens:
                end = min(end, room)
                self.memory.grow(request, end)
                return end - request.num_computed_tokens
            victim = self.running[-1]  # it comes after this one, so it isn't in the plan yet
            self._preempt(victim, plan)
            if victim is request:
                return 0
        return 0

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        """Take the request's blocks; `Memory` says what becomes of its KV."""
        self.running.remove(request)
        choice = self.memory.choose(request)
        plan.swap_out += self.memory.preempt(request, choice.mode)
        plan.preempted.append(request)
        plan.events.append(Event("preempted", request, choice._asdict()))
        request.num_preemptions += 1
        heapq.heappush(self._waiting, self._entry(request))

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Start or bring back waiting requests, preempted ones first, while tokens, places and blocks last.

        A request starts only when there are blocks for all of its known tokens, so that, unless they
        take several steps, it gets to its next token before it may have to give them back. The first
        that doesn't fit ends the admission: smaller ones behind it would hold it up for ever. So a
        preempted request is back, at the latest, when the others that had started have ended.
        """
        if self.static and self.running:
            return  # the rule that makes static batching
        # Blocks that requests admitted in this step have yet to take. Requests admitted earlier hold
        # all of theirs, or they would have used up the budget.
        promised = 0
        # A static batch takes all its requests at once, so some may have to wait for tokens.
        while len(self.running) < self.max_num_seqs and (budget > 0 or self.static):
            request = self._next_waiting()
            if request is None:
                return
            cached_blocks = self.memory.find_room(request, self.pool.num_free - promised)
            if cached_blocks is None:
                return
            heapq.heappop(self._waiting)
            self._start(request, cached_blocks, plan)
            length = min(request.num_pending, budget)
            self.memory.grow(request, request.num_computed_tokens + length)
            promised += self.pool.blocks_for(request.num_tokens) - len(request.block_table)
            budget -= length
            if length:
                plan.chunks.append(Chunk(request, request.num_computed_tokens, length))

    def _start(self, request: Request, cached_blocks: list[int], plan: StepPlan) -> None:
        swap_in = self.memory.place(request, cached_blocks)
        plan.swap_in += swap_in
        request.state = RequestState.RUNNING
        insort(self.running, request, key=self.policy.key)
        num_computed = request.num_computed_tokens
        if request.has_started:
            plan.returned.append(request)
            details = {"num_swapped_in_blocks": len(swap_in), "num_computed_tokens": num_computed}
            plan.events.append(Event("returned", request, details))
        else:
            request.num_cached_tokens = num_computed
            details = {"num_prompt_tokens": request.num_prompt_tokens, "num_cached_tokens": num_computed}
            plan.events.append(Event("started", request, details))
            request.has_started = True

    def _next_waiting(self) -> Request | None:
        while self._waiting and self._waiting[0][-1].state is RequestState.FINISHED:
            heapq.heappop(self._waiting)
        return self._waiting[0][-1] if self._waiting else None

    @changes_state
    def update(self, plan: StepPlan, tokens: list[int | None], moved: list[Request] | None = None) -> list[Request]:
        """Take in what the step yielded: one token for each chunk that samples, in order.

        None in place of a token means that the model gave no finite logits; that request ends with
        "error" and nobody else notices. Returns the requests that got a token or ended, added to
        `moved` one by one, so that its owner knows of them even if this is interrupted.
        """
        moved = [] if moved is None else moved
        sampled = iter(tokens)
        for chunk in plan.chunks:
            request = chunk.request
            samples = chunk.samples
            request.num_computed_tokens = chunk.start + chunk.length
            if samples:
                moved.append(request)
                self._append(request, next(sampled))
        if any(request.state is RequestState.FINISHED for request in moved):
            self.running = [request for request in self.running if request.state is RequestState.RUNNING]
        return moved

    def _append(self, request: Request, token: int | None) -> None:
        if token is None:
            self._finish(request, "error", "the model's logits were not finite")
            return
        # Only now, as its finite logits say that the KV behind them is sound.
        self.memory.register(request)
        request.token_ids.append(token)
        self._end_if_done(request)

    def _end_if_done(self, request: Request) -> None:
        ending = request.ending()
        if ending is not None:
            self._finish(request, *ending)

    def _finish(self, request: Request, finish_reason: str, stop_reason: int | str | None = None) -> None:
        self.memory.release(request)
        request.finish_reason, request.stop_reason = finish_reason, stop_reason
        request.state = RequestState.FINISHED
        del self.requests[request.request_id]

    def check_invariants(self) -> None:
        """Raise AssertionError unless requests, blocks and states agree, between two steps."""
        self.memory.check_invariants(list(self.requests.values()))
        for request in self.requests.values():
            running = request.state is RequestState.RUNNING
            assert running == (request in self.running), f"{request} is in the wrong list"
            in_queue = sum(entry[-1] is request for entry in self._waiting)
            assert in_queue == (not running), f"{request} is {in_queue} times in the queue"
