"""The scheduler: in every step, which requests get how many tokens, and which must give their blocks back.

Iteration-level scheduling (Orca, 2022) with chunked prefill (Sarathi-Serve, 2024) and preemption (PagedAttention,
2023). It decides and keeps count; it never touches a tensor.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from minicb.memory import CANCELLED, Memory, PreemptionChoice
from minicb.plan import Chunk, Event, StepPlan
from minicb.policies import Policy, StepLimits
from minicb.request import Request, RequestState, Sampled
from minicb.waiting import WaitingQueue


class Scheduler:
    """Takes requests by `add`; then `schedule` and `update` alternate until all have ended.

    max_num_seqs requests run at a time, at most; a step has max_num_batched_tokens tokens, at most, and a request
    max_model_len, prompt and output together. batching: "continuous", or "static": admit only while none is running.
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
        self.memory, self.pool, self.policy = memory, memory.pool, policy
        # Never more requests than tokens, so that each decode gets its token in every step.
        self.maximum = StepLimits(min(max_num_seqs, max_num_batched_tokens), max_num_batched_tokens)
        self.limits = self.maximum  # of the latest step
        self.max_model_len = max_model_len
        self.static = batching == "static"
        self.requests: dict[str, Request] = {}  # by request_id, all that have not ended
        self.running: list[Request] = []  # in the policy's order
        self.waiting = WaitingQueue(policy)  # swapped requests included
        self.events: list[Event] = []  # until the caller takes them
        self.now = 0.0  # the latest time that the caller told, in seconds
        self._num_arrived = 0

    @property
    def num_waiting(self) -> int:
        return len(self.requests) - len(self.running)

    # ------------------------------------------------------------------ a request comes

    def check(self, request: Request) -> None:
        """Raise ValueError if the request could never be served, however empty the pool is."""
        length, usable = request.num_prompt_tokens, self.pool.num_usable * self.pool.block_size
        if length == 0:
            raise ValueError("prompt is empty: it must have at least 1 token")
        if length >= self.max_model_len:
            raise ValueError(
                f"prompt has {length} tokens, but max_model_len is {self.max_model_len}, output included: "
                f"a prompt can have at most {self.max_model_len - 1}"
            )
        if length > usable:
            held = f"{usable} ({self.pool.num_usable} blocks of {self.pool.block_size})"
            raise ValueError(f"prompt has {length} tokens, but the KV cache holds only {held}; raise num_blocks")

    def add(self, request: Request, arrival_time: float = 0.0) -> None:
        """Accept a request that was due at arrival_time. From here on it is never lost: it ends, for a reason."""
        self.check(request)
        if request.request_id in self.requests:
            raise ValueError(f"request_id {request.request_id!r} is already in use")
        if request.state is not RequestState.WAITING:
            raise ValueError(f"request {request.request_id!r} was submitted before: it is {request.state.name}")
        wanted = self.max_model_len
        if request.params.max_tokens is not None:
            wanted = min(wanted, request.num_prompt_tokens + request.params.max_tokens)
        # The last token is sampled but never fed back, so its KV needs no place.
        room = self.pool.num_usable * self.pool.block_size + 1
        request.max_num_tokens = min(wanted, room)
        if room < wanted:
            request.length_reason = f"the request has filled the whole KV cache, {room - 1} tokens"
        request.arrival_time, request.arrival = arrival_time, self._num_arrived
        # As of now, for policies that judge by the work left. It is set again when the request starts.
        request.num_cached_tokens = len(self.memory.find_prefix(request)) * self.pool.block_size
        self.policy.added(request)
        self._num_arrived += 1
        self.waiting.push(request)
        self.requests[request.request_id] = request
        self.events.append(Event(arrival_time, "queued", request, {}))

    # ------------------------------------------------------------------ a step is planned

    def schedule(self, now: float = 0.0) -> StepPlan:
        """Plan the step that begins now, and allocate the blocks for all of its tokens."""
        self.now = now
        self.limits = StepLimits(*map(min, self.maximum, self.policy.limits(self.maximum, self.num_waiting, now)))
        self.running.sort(key=self.policy.key)
        plan = StepPlan()
        if self.policy.preemptive and not self.static:
            self._displace(plan)
        num_displaced = len(plan.preempted)
        budget = self._schedule_running(plan)
        if len(plan.preempted) == num_displaced:  # else admitted requests would take what the preempted ones lack
            self._admit(plan, budget)
        return plan

    def _displace(self, plan: StepPlan) -> None:
        """Preempt the last running requests, if they have larger keys than the next waiting one and it can then start
        in this step: the fewest that make it fit."""
        request, key = self.waiting.head(), self.policy.key
        behind = [other for other in self.running if request is not None and key(other) > key(request)]
        if request is None or not behind:
            return
        cached_blocks = self.memory.find_prefix(request)
        slots = self.limits.max_num_seqs - len(self.running)
        tokens = self.limits.max_num_batched_tokens - sum(other.num_uncomputed for other in self.running)
        blocks = self.pool.num_free - self._num_promised(self.running) - self.memory.num_missing(request, cached_blocks)
        # How many holders each block loses. The request will hold its cached blocks, so these are never freed.
        victims, lost = list[Request](), Counter(dict.fromkeys(cached_blocks, -1))
        while behind and (slots < 1 or tokens < 1 or blocks < 0):
            victims.append(victim := behind.pop())
            lost.update(victim.block_table)
            slots, tokens = slots + 1, tokens + victim.num_uncomputed
            blocks += self.pool.num_freed(victim.block_table, lost) + self._num_promised([victim])
        if slots >= 1 and tokens >= 1 and blocks >= 0:
            for victim in victims:
                self._preempt(victim, plan)

    def _schedule_running(self, plan: StepPlan) -> int:
        """Give each decode its token, and prefills what that leaves. Returns the rest of the token budget."""
        budget = self.limits.max_num_batched_tokens - sum(request.num_uncomputed == 1 for request in self.running)
        for request in list(self.running):
            if request.state is not RequestState.RUNNING:
                break  # preempted, and so are all after it
            is_decode = request.num_uncomputed == 1
            length = self._get_blocks(request, 1 if is_decode else max(0, min(request.num_uncomputed, budget)), plan)
            budget -= 0 if is_decode else length
            if length:
                self._add_chunk(plan, request, length)
        return budget

    def _get_blocks(self, request: Request, length: int, plan: StepPlan) -> int:
        """Allocate blocks for the request's next `length` tokens. Returns how many of these tokens have one.

        If no block is free, the last running request is preempted, until a block is free or the request itself was
        the last. The first running request is never preempted here, and alone it fits: `add` checks that. So every
        step computes something.
        """
        start, size = request.num_computed_tokens, self.pool.block_size
        if start + length <= len(request.block_table) * size:
            return length  # nearly every decode in nearly every step
        while len(request.block_table) * size <= start and self.pool.num_free == 0:
            victim = self.running[-1]  # this request or a later one, so it has no chunk in the plan
            self._preempt(victim, plan)
            if victim is request:
                return 0
        end = min(start + length, (len(request.block_table) + self.pool.num_free) * size)
        self.memory.grow(request, end)
        return end - start

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Start waiting requests, or let them return, in the policy's order, while slots, tokens and blocks last.

        A request needs blocks for all of its known tokens, so that it gets its next token before it can be preempted.
        If the next one doesn't fit, no other is admitted: smaller ones would keep it out for ever.
        """
        if self.static and self.running:
            return  # the rule that makes static batching
        if not self.waiting.num_entries or len(self.running) >= self.limits.max_num_seqs:
            return  # as in most steps
        promised = self._num_promised(self.running)
        # A static batch takes all of its requests at once, so some may have to wait for tokens.
        while len(self.running) < self.limits.max_num_seqs and (budget > 0 or self.static):
            request = self.waiting.head()
            if request is None:
                return
            cached_blocks = self.memory.find_prefix(request)
            if self.memory.num_missing(request, cached_blocks) > self.pool.num_free - promised:
                return
            self._start(self.waiting.pop(), cached_blocks, plan)
            length = min(request.num_uncomputed, budget)
            if length:
                self.memory.grow(request, request.num_computed_tokens + length)
                self._add_chunk(plan, request, length)
            promised += self._num_promised([request])
            budget -= length
            if plan.preempted:
                return  # this is the request that displaced others; none of them may return in the same plan

    def _num_promised(self, requests: Sequence[Request]) -> int:
        """Blocks that running requests have yet to take for their known tokens."""
        return sum(self.pool.blocks_for(request.num_tokens) - len(request.block_table) for request in requests)

    def _start(self, request: Request, cached_blocks: list[int], plan: StepPlan) -> None:
        swap_in = self.memory.restore(request, cached_blocks)
        plan.swap_in += swap_in
        plan.admitted.append(request)
        request.state = RequestState.RUNNING
        self.running.append(request)
        num_computed, num_prompt = request.num_computed_tokens, request.num_prompt_tokens
        if request.has_started:
            self._emit("returned", request, num_swapped_in_blocks=len(swap_in), num_computed_tokens=num_computed)
        else:
            request.has_started, request.num_cached_tokens = True, num_computed
            self._emit("started", request, num_prompt_tokens=num_prompt, num_cached_tokens=num_computed)
            self.policy.started(request)

    def _add_chunk(self, plan: StepPlan, request: Request, length: int) -> None:
        plan.chunks.append(Chunk.of(request, request.num_computed_tokens, length))
        self.memory.register(request, request.num_computed_tokens + length)

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        """Take the blocks of a running request; `Memory.choose` says what becomes of its KV."""
        choice = self.memory.choose(request)
        plan.swap_out += self.memory.preempt(request, choice.mode)
        plan.preempted.append(request)
        self._wait_again(request, choice)

    def _wait_again(self, request: Request, choice: PreemptionChoice) -> None:
        self.running.remove(request)
        request.num_preemptions += 1
        self._emit("preempted", request, **choice._asdict())
        self.waiting.push(request)

    # ------------------------------------------------------------------ a step was executed

    def update(self, plan: StepPlan, tokens: Sequence[Sampled], now: float | None = None) -> list[Request]:
        """Take in what the step yielded by now: one token for each chunk that needs sampling, in order.

        None in place of a token means that the logits were not finite. That request ends with "error", and its
        blocks leave the prefix cache. Returns the requests that got a token or ended.
        """
        began, self.now = self.now, self.now if now is None else now
        self.policy.stepped(sum(chunk.length for chunk in plan.chunks), self.now - began)
        progressed, sampled = list[Request](), iter(tokens)
        for request, start, length, needs_sampling, _ in plan.chunks:
            request.num_computed_tokens = start + length
            if needs_sampling:
                progressed.append(request)
                self._append(request, next(sampled))
        if any(request.state is RequestState.FINISHED for request in progressed):
            self.running = [request for request in self.running if request.state is RequestState.RUNNING]
        return progressed

    def _append(self, request: Request, token: Sampled) -> None:
        if token is None:
            self.pool.unregister(request.block_table)
            self._finish(request, "error", "the model's logits were not finite")
            return
        if request.num_output_tokens == 0:
            self._emit("first_token", request)
        request.append(token)
        self.policy.generated(request)
        ending = request.ending()
        if ending is not None:
            self._finish(request, *ending)

    def cancel(self, plan: StepPlan) -> None:
        """Take back a plan whose execution failed; the same tokens are planned again."""
        self.pool.unregister([block for _, block in plan.swap_in])  # perhaps never filled
        for chunk in plan.chunks:
            self.memory.rewind(chunk.request, chunk.start)
        for request in plan.preempted:  # its copies to host memory may not have been made
            self.memory.preempt(request, "recompute")
        for request in plan.admitted:  # it may wait for copies, or share blocks that another was to compute
            self.memory.preempt(request, "recompute")
            self._wait_again(request, CANCELLED)

    # ------------------------------------------------------------------ a request ends

    def abort(self, request_id: str, now: float | None = None) -> Request | None:
        """End a request in any state, and return it. Unknown or ended: no effect, None."""
        request = self.requests.get(request_id)
        if request is not None:
            self.now = self.now if now is None else now
            if request.state is RequestState.RUNNING:
                self.running.remove(request)
            self._finish(request, "abort")
            self.waiting.sweep(self.num_waiting)
        return request

    def fail_all(self, message: str) -> list[Request]:
        """End every request with "error" after an exception in here, when states and blocks may not agree."""
        failed = list(self.requests.values())
        self.running, self.waiting = [], WaitingQueue(self.policy)
        self.memory.reset(failed)
        for request in failed:
            with suppress(Exception):  # the policy may be what failed; it is told last
                self._finish(request, "error", message)
        return failed

    def _finish(self, request: Request, finish_reason: str, stop_reason: int | str | None = None) -> None:
        self.memory.release(request)
        del self.requests[request.request_id]
        request.state = RequestState.FINISHED
        request.finish_reason, request.stop_reason = finish_reason, stop_reason
        self._emit("finished", request, finish_reason=finish_reason)
        self.policy.finished(request)

    def _emit(self, kind: str, request: Request, **details: Any) -> None:
        self.events.append(Event(self.now, kind, request, details))

    def check_invariants(self) -> None:
        """Raise AssertionError unless requests, blocks and states agree. To be called between two steps."""
        self.memory.check_invariants(list(self.requests.values()))
        waiting = list(self.waiting)
        for request in self.requests.values():
            running = request.state is RequestState.RUNNING
            assert self.running.count(request) == running, f"{request} is in the wrong list"
            assert waiting.count(request) == (not running), f"{request} is {waiting.count(request)} times in the queue"
