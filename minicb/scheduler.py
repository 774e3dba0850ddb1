"""The scheduler: at every step, which requests get how many tokens, and who must give blocks back.

Iteration-level scheduling (Orca, 2022) with chunked prefill (Sarathi-Serve, 2024) and preemption
by recompute (PagedAttention, 2023). It decides and keeps count; it never touches a tensor.
"""

import heapq
from bisect import insort
from dataclasses import dataclass, field
from typing import NamedTuple

from minicb.blocks import BlockPool
from minicb.policies import Policy
from minicb.request import Request, RequestState


class Chunk(NamedTuple):
    """What one request contributes to a step: its tokens start .. start + length - 1."""

    request: Request
    start: int
    length: int

    @property
    def samples(self) -> bool:
        """Does it reach the last known token, so that the step yields the next one?"""
        return self.start + self.length == self.request.num_tokens


@dataclass
class StepPlan:
    """What happens in one step. The runner executes the chunks; preempted requests have only lost their blocks."""

    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)


class Scheduler:
    """Requests go in by `add`, then `schedule` and `update` alternate until they have ended.

    max_num_seqs: at most so many requests run at a time.
    max_num_batched_tokens: at most so many tokens in a step.
    max_model_len: prompt and output of a request are together at most so many tokens.
    batching: "continuous", or "static", which admits requests only when none is running.
    """

    def __init__(
        self,
        pool: BlockPool,
        policy: Policy,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        batching: str = "continuous",
    ):
        self.pool = pool
        self.policy = policy
        # Never more requests than tokens, so that each decode gets its token in every step.
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.static = batching == "static"
        self.requests: dict[str, Request] = {}  # all that have not ended
        self.running: list[Request] = []  # in the policy's order
        self._waiting: list[tuple[tuple, Request]] = []  # a heap; aborted requests leave when they surface
        self._num_arrived = 0

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
        wanted = self.max_model_len
        if request.params.max_tokens is not None:
            wanted = min(wanted, request.num_prompt_tokens + request.params.max_tokens)
        # The last token is sampled but never fed back, so its KV needs no place.
        request.max_num_tokens = min(wanted, self.pool.num_usable * self.pool.block_size + 1)
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self.requests[request.request_id] = request
        heapq.heappush(self._waiting, (self.policy.key(request), request))

    def abort(self, request_id: str) -> Request | None:
        """End a request in whatever state it is. Unknown or already ended: no effect, None."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        self._finish(request, "abort")
        if len(self._waiting) > 2 * self.num_waiting + 64:  # mostly aborted ones: sweep
            self._waiting = [entry for entry in self._waiting if entry[1].state is RequestState.WAITING]
            heapq.heapify(self._waiting)
        return request

    def abort_all(self) -> None:
        """End every request, whatever state things are in."""
        for request in self.requests.values():
            del request.block_table[:]
            request.state, request.finish_reason = RequestState.FINISHED, "abort"
        self.requests, self.running, self._waiting = {}, [], []
        self.pool.reset()

    def cancel(self, plan: StepPlan) -> None:
        """Take back a plan that was not executed: its chunks will be planned again."""
        for request, start, _ in plan.chunks:
            unused = request.block_table[self.pool.blocks_for(start) :]
            del request.block_table[self.pool.blocks_for(start) :]
            self.pool.free(unused)

    def recover(self) -> None:
        """Begin again after `schedule` or `update` broke off anywhere (Ctrl-C).

        Of such a step nothing is certain but the tokens that requests have. So all blocks are taken
        back, and every request that has not ended waits again, as if preempted.
        """
        self.running = []
        self.pool.reset()
        for request in list(self.requests.values()):
            del request.block_table[:]
            request.num_computed_tokens = 0
            if request.state is RequestState.FINISHED:
                del self.requests[request.request_id]
            else:
                request.state = RequestState.WAITING
                self._end_if_done(request)
        self._waiting = [(self.policy.key(request), request) for request in self.requests.values()]
        heapq.heapify(self._waiting)

    # ------------------------------------------------------------------ one step

    def schedule(self) -> StepPlan:
        """Plan the next step. Blocks for all of its tokens are allocated when this returns."""
        plan = StepPlan()
        budget = self._schedule_running(plan)
        if not plan.preempted:  # whoever had to go comes back before anybody new takes its blocks
            self._admit(plan, budget)
        return plan

    def _schedule_running(self, plan: StepPlan) -> int:
        """Give each decode its one token and unfinished prefills what that leaves; return the rest."""
        num_decodes = sum(request.num_pending == 1 for request in self.running)
        budget = self.max_num_batched_tokens - num_decodes
        index = 0
        while index < len(self.running):
            request = self.running[index]
            index += 1
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

        A prefill takes what is free, if that is anything. Where there is nothing, the policy's last
        running request is preempted, until there is, or until the last is this one. The policy's
        first is never preempted by another and alone always fits (`add` saw to that), so every step
        computes something, and under a policy that passes nobody over for ever, every request ends.
        """
        while length > 0:
            end = request.num_computed_tokens + length
            room = (len(request.block_table) + self.pool.num_free) * self.pool.block_size
            if room > request.num_computed_tokens:
                end = min(end, room)
                self._grow(request, end)
                return end - request.num_computed_tokens
            victim = self.running.pop()
            self._preempt(victim)
            plan.preempted.append(victim)
            if victim is request:
                return 0
        return 0

    def _grow(self, request: Request, num_tokens: int) -> None:
        missing = self.pool.blocks_for(num_tokens) - len(request.block_table)
        if missing > 0:
            request.block_table.extend(self.pool.allocate(missing))

    def _preempt(self, request: Request) -> None:
        """Take all blocks back. Prompt and output so far are prefilled again later, as one prompt."""
        self._release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.state = RequestState.WAITING
        heapq.heappush(self._waiting, (self.policy.key(request), request))

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Start waiting requests, in the policy's order, while tokens, places and blocks last.

        A request starts only when there are blocks for all of its known tokens, so that it gets to its
        next token before it may have to give them back. The first that doesn't fit ends the admission:
        smaller ones behind it would hold it up for ever.
        """
        if self.static and self.running:
            return  # the rule that makes static batching
        promised = 0  # blocks that requests admitted in this step have yet to take
        # A static batch takes all its requests at once, so some may have to wait for tokens.
        while len(self.running) < self.max_num_seqs and (budget > 0 or self.static):
            request = self._next_waiting()
            if request is None:
                return
            needed = self.pool.blocks_for(request.num_tokens)
            if needed > self.pool.num_free - promised:
                return
            heapq.heappop(self._waiting)
            length = min(request.num_tokens, budget)
            self._grow(request, length)
            promised += needed - len(request.block_table)
            budget -= length
            request.state = RequestState.RUNNING
            insort(self.running, request, key=self.policy.key)
            if length:
                plan.chunks.append(Chunk(request, 0, length))

    def _next_waiting(self) -> Request | None:
        while self._waiting and self._waiting[0][1].state is not RequestState.WAITING:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

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
        request.token_ids.append(token)
        self._end_if_done(request)

    def _end_if_done(self, request: Request) -> None:
        if request.num_output_tokens == 0:
            return
        token = request.token_ids[-1]
        if request.num_output_tokens > request.params.min_tokens and token in request.eos_token_ids:
            self._finish(request, "stop")
        elif request.num_output_tokens > request.params.min_tokens and token in request.stop_token_ids:
            self._finish(request, "stop", token)
        elif request.num_tokens >= request.max_num_tokens:
            self._finish(request, "length", self._length_reason(request))

    def _length_reason(self, request: Request) -> str | None:
        """None where caller or model set the length, a sentence where the pool did."""
        wanted = request.params.max_tokens
        if request.num_tokens == self.max_model_len or request.num_output_tokens == wanted:
            return None
        return f"the request has filled the whole KV cache, {self.pool.num_usable} blocks of {self.pool.block_size}"

    def _finish(self, request: Request, finish_reason: str, stop_reason: int | str | None = None) -> None:
        self._release(request)
        request.state = RequestState.FINISHED
        request.finish_reason, request.stop_reason = finish_reason, stop_reason
        del self.requests[request.request_id]

    def _release(self, request: Request) -> None:
        self.pool.free(request.block_table)
        del request.block_table[:]

    def check_invariants(self) -> None:
        """Raise AssertionError unless requests, blocks and states agree, between two steps."""
        self.pool.check_invariants(r.block_table for r in self.requests.values())
        for request in self.requests.values():
            running = request.state is RequestState.RUNNING
            assert running == (request in self.running), f"{request} is in the wrong list"
            assert len(request.block_table) == self.pool.blocks_for(request.num_computed_tokens), (
                f"{request} holds {len(request.block_table)} blocks"
            )
