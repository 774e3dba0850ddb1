"""The scheduler: at every step, which requests get how many tokens, and who must give blocks back.

Iteration-level scheduling (Orca, 2022) with chunked prefill (Sarathi-Serve, 2024) and preemption
(PagedAttention, 2023). It decides and keeps count; it never touches a tensor.
"""

from collections.abc import Sequence

from minicb.interrupts import changes_state
from minicb.lifecycle import Lifecycle
from minicb.plan import Chunk, StepPlan
from minicb.request import Request, RequestState, Sampled
from minicb.waiting import WaitingQueue


class Scheduler(Lifecycle):
    """Requests go in by `add`, then `schedule` and `update` alternate until they have ended.

    The arguments, and what happens to a request between steps, are in lifecycle.py.
    """

    @changes_state
    def schedule(self, now: float = 0.0) -> StepPlan:
        """Plan the next step, which begins now. Blocks for all of its tokens are allocated when this returns."""
        self.now = now
        self.limits = self.policy.limits(self.maximum, self.num_waiting, now)
        self.running.sort(key=self.policy.key)  # keys may have changed, most haven't
        plan = StepPlan()
        if self._displaces:
            self._displace(plan)
        budget, partial = self._schedule_running(plan)
        if not plan.preempted:  # or one that had to go might come back at once, out and in within one plan
            budget = self._admit(plan, budget, partial)
        self._give_rest(plan, budget, partial)
        return plan

    @property
    def _displaces(self) -> bool:
        """Do more urgent requests go before those that run? Not in a static batch, which nobody joins."""
        return self.policy.urgent and not self.static

    def _displace(self, plan: StepPlan) -> None:
        """Preempt running requests that are less urgent than the next that waits, if that lets it start. It does
        so in the next step, as nothing is admitted in a step that preempts."""
        request = self._next_waiting()
        if request is None:
            return
        key = self.policy.key(request)
        ahead = [other for other in self.running if self.policy.key(other) < key]
        behind = self.running[len(ahead) :]
        tokens = sum(self._length(other, other.num_pending) for other in ahead)

        def can_start() -> bool:
            num_decodes = sum(other.num_pending == 1 for other in behind)  # prefills behind it give way by themselves
            return tokens + num_decodes < self.limits.max_num_batched_tokens and self._has_place(request)

        if tokens >= self.limits.max_num_batched_tokens or can_start() or not self._fits_beside(request, ahead, behind):
            return
        while behind and not can_start():
            self._preempt(behind.pop(), plan)

    def _has_place(self, request: Request) -> bool:
        """Could a request that waits start as things are, slots and blocks considered?"""
        if len(self.running) >= self.limits.max_num_seqs:
            return False
        return self.memory.find_room(request, self.pool.num_free - self._promised(self.running)) is not None

    def _fits_beside(self, request: Request, ahead: list[Request], behind: list[Request]) -> bool:
        """Would there be blocks for it if those behind it were gone?"""
        room = self.pool.num_free - self._promised(ahead)
        # At first as if all that those behind hold were theirs alone: it is quickly said if even that is too little.
        most = sum(len(other.block_table) for other in behind)
        cached_blocks = self.memory.find_room(request, room + most)
        if cached_blocks is None:
            return False
        held = {block for other in ahead for block in other.block_table}
        freed = {block for other in behind for block in other.block_table} - held
        missing = self.pool.blocks_for(request.num_tokens) - sum(block in held for block in cached_blocks)
        return missing <= room + len(freed)

    def _promised(self, requests: list[Request]) -> int:
        """How many blocks those of them that prefill have yet to take."""
        prefills = [request for request in requests if request.num_pending > 1]
        return sum(self.pool.blocks_for(request.num_tokens) - len(request.block_table) for request in prefills)

    def _schedule_running(self, plan: StepPlan) -> tuple[int, list[Request]]:
        """Give each decode its one token and unfinished prefills what that leaves. Returns what is left of
        the budget, and the prefills that have yet to take more."""
        num_decodes = sum(request.num_pending == 1 for request in self.running)
        budget = self.limits.max_num_batched_tokens - num_decodes
        partial = list[Request]()
        for request in list(self.running):
            if request.state is not RequestState.RUNNING:
                break  # preempted, and so are all after it
            pending = request.num_pending
            length = self._get_blocks(request, 1 if pending == 1 else self._length(request, budget), plan)
            if request.state is RequestState.RUNNING and length < pending:
                partial.append(request)
            if length == 0:
                continue
            plan.chunks.append(Chunk.of(request, request.num_computed_tokens, length))
            if pending > 1:
                budget -= length
        return budget, [request for request in partial if request.state is RequestState.RUNNING]

    def _length(self, request: Request, budget: int) -> int:
        """How many of its tokens a prefill gets at first. One that waits and is more urgent comes before it."""
        if self._is_long(request):
            budget = min(budget, self.long_prefill_token_threshold)
        if self._displaces:
            first = self._next_waiting()
            if first is not None and self.policy.key(first) < self.policy.key(request):
                return 0
        return max(0, min(request.num_pending, budget))

    def _give_rest(self, plan: StepPlan, budget: int, partial: list[Request]) -> None:
        """Tokens that nobody else wants go to the prefills that could take more, as far as blocks are free."""
        if budget <= 0 or not partial:
            return
        places = {chunk.request: place for place, chunk in enumerate(plan.chunks)}
        for request in partial:
            start = request.num_computed_tokens
            place = places.get(request)
            taken = 0 if place is None else plan.chunks[place].length
            room = (len(request.block_table) + self.pool.num_free) * self.pool.block_size - start
            length = min(request.num_pending, taken + budget, room)
            if length > taken:
                self.memory.grow(request, start + length)
                budget -= length - taken
                if place is None:
                    plan.chunks.append(Chunk.of(request, start, length))
                else:
                    plan.chunks[place] = Chunk.of(request, start, length)

    def _get_blocks(self, request: Request, length: int, plan: StepPlan) -> int:
        """Get blocks for the request's next `length` tokens; return for how many there are.

        A prefill takes what is free. If nothing is, running requests are preempted, the policy's last
        first, until a block is free or the request itself was the last. The policy's first is never preempted
        here and alone always fits (`add` saw to that), so every step that displaced nobody computes
        something, and under a policy that passes nobody over for ever, every request ends.
        """
        start, size = request.num_computed_tokens, self.pool.block_size
        if start + length <= len(request.block_table) * size:
            return length  # what nearly every decode in nearly every step comes to
        while len(request.block_table) * size <= start and self.pool.num_free == 0:
            victim = self.running[-1]  # this one or one after it: not in the plan yet
            self._preempt(victim, plan)
            if victim is request:
                return 0
        end = min(start + length, (len(request.block_table) + self.pool.num_free) * size)
        self.memory.grow(request, end)
        return end - start

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        """Take the request's blocks; `Memory` says what becomes of its KV."""
        self.running.remove(request)
        choice = self.memory.choose(request)
        plan.swap_out += self.memory.preempt(request, choice.mode)
        plan.preempted.append(request)
        request.num_preemptions += 1
        self._emit("preempted", request, **choice._asdict())
        self._wait(request)

    def _admit(self, plan: StepPlan, budget: int, partial: list[Request]) -> int:
        """Start or bring back waiting requests in the policy's order while tokens, places and blocks last.
        Returns what is left of the budget, and adds those with tokens yet to take to `partial`.

        A request starts only when there are blocks for all of its known tokens, so that, unless they
        take several steps, it gets to its next token before it may have to give them back. The first
        that doesn't fit ends the admission: smaller ones behind it would hold it up for ever. So a
        preempted request is back, at the latest, when the others that had started have ended.
        """
        if self.static and self.running:
            return budget  # the rule that makes static batching
        promised = self._promised(partial)  # blocks that requests which run already have yet to take
        # A static batch takes all its requests at once, so some may have to wait for tokens.
        while len(self.running) < self.limits.max_num_seqs and (budget > 0 or self.static):
            queue, request = self._next_queue()
            if request is None:
                break
            cached_blocks = self.memory.find_room(request, self.pool.num_free - promised)
            if cached_blocks is None:
                break
            queue.pop()
            self._start(request, cached_blocks, plan)
            length = self._length(request, budget)
            self.memory.grow(request, request.num_computed_tokens + length)
            promised += self._promised([request])
            budget -= length
            if length:
                plan.chunks.append(Chunk.of(request, request.num_computed_tokens, length))
            if length < request.num_pending:
                partial.append(request)
        return budget

    def _start(self, request: Request, cached_blocks: list[int], plan: StepPlan) -> None:
        swap_in = self.memory.place(request, cached_blocks)
        plan.swap_in += swap_in
        request.state = RequestState.RUNNING
        self.running.append(request)
        num_computed = request.num_computed_tokens
        if request.has_started:
            plan.returned.append(request)
            self._emit("returned", request, num_swapped_in_blocks=len(swap_in), num_computed_tokens=num_computed)
            return
        request.num_cached_tokens = num_computed
        num_prompt_tokens = request.num_prompt_tokens
        self._emit("started", request, num_prompt_tokens=num_prompt_tokens, num_cached_tokens=num_computed)
        self.policy.started(request)
        request.has_started = True

    def _next_queue(self) -> tuple[WaitingQueue, Request | None]:
        """The next request, and the queue whose head it is. Long ones are passed over while enough of them prefill
        (but an urgent one waits for no less urgent ones, which others may keep from getting ahead)."""
        short, long = self.waiting.head(), self.waiting_long.head()
        if long is not None:
            partial = [request for request in self.running if self._is_long(request)]
            if self.policy.urgent:
                key = self.policy.key(long[1])
                partial = [request for request in partial if self.policy.key(request) < key]
            if len(partial) >= self.max_long_partial_prefills:
                long = None
        if long is not None and (short is None or long < short):
            return self.waiting_long, long[1]
        return self.waiting, short and short[1]

    def _next_waiting(self) -> Request | None:
        return self._next_queue()[1]

    @changes_state
    def update(
        self,
        plan: StepPlan,
        tokens: Sequence[Sampled],
        moved: list[Request] | None = None,
        now: float | None = None,
    ) -> list[Request]:
        """Take in what the step yielded by now: one token for each chunk that samples, in order.

        None in place of a token means that the model gave no finite logits; that request ends with
        "error" and nobody else notices. Returns the requests that got a token or ended, added to
        `moved` one by one, so that its owner knows of them even if this is interrupted.
        """
        began, self.now = self.now, self.now if now is None else now
        self.policy.stepped(sum(chunk.length for chunk in plan.chunks), self.now - began)
        moved = [] if moved is None else moved
        sampled = iter(tokens)
        for chunk in plan.chunks:
            request = chunk.request
            samples = chunk.needs_sampling
            request.num_computed_tokens = chunk.start + chunk.length
            if samples:
                moved.append(request)
                self._append(request, next(sampled))
        if any(request.state is RequestState.FINISHED for request in moved):
            self.running = [request for request in self.running if request.state is RequestState.RUNNING]
        return moved

    def _append(self, request: Request, token: Sampled) -> None:
        if token is None:
            self._finish(request, "error", "the model's logits were not finite")
            return
        # Only now, as its finite logits say that the KV behind them is sound.
        self.memory.register(request)
        if request.num_output_tokens == 0:
            self._emit("first_token", request)
        request.append(token)
        if request.group is not None:
            self._let_follow(request)
        self.policy.generated(request)
        self._end_if_done(request)
