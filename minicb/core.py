"""The loop: plan a step, execute it, take in its tokens, and tell the observers.

It knows neither text nor tensors, so the same loop serves a model and the simulator.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from minicb.checks import check_real
from minicb.interrupts import hold_ctrl_c
from minicb.plan import Observer, Step, StepPlan
from minicb.request import Request, RequestState, Sampled
from minicb.scheduler import Scheduler


class Runner(Protocol):
    def execute(self, plan: StepPlan) -> Sequence[Sampled]:
        """A token for each chunk that needs sampling, in the plan's order; None where the logits were not finite."""
        ...


class EngineCore:
    """Takes requests by `add`; `step` returns them as they get tokens. All times are the clock's, in seconds."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Callable[[], float] = time.perf_counter,
        observers: Sequence[Observer] = (),
    ):
        self.scheduler, self.runner, self.clock = scheduler, runner, clock
        self.observers = list(observers)
        self.num_steps = 0
        self.progressed: list[Request] = []  # got a token or ended, and `collect` has not returned them yet
        self._samples: dict[str, list[Request]] = {}  # caller's request_id -> samples, until all have ended

    def is_used(self, request_id: str) -> bool:
        """A request with this id has not ended."""
        return request_id in self._samples or request_id in self.scheduler.requests

    def add(self, request: Request, arrival_time: float | None = None) -> None:
        """Accept a request with all samples of its prompt. Its latencies count from arrival_time, or else from now."""
        due = self.clock() if arrival_time is None else arrival_time
        check_real("arrival_time", due, math.isfinite, "a finite number")
        for sample in request.samples:
            if self.is_used(sample.request_id):
                raise ValueError(f"request_id {sample.request_id!r} is already in use")
        with hold_ctrl_c():
            for sample in request.samples:
                self.scheduler.add(sample, due)
            self._samples[request.request_id] = request.samples
            self._tell_events()

    def abort(self, request_id: str, index: int | None = None) -> Request | None:
        """End a request in any state, or only its sample `index`. Returns the first sample that ended now; None, and no
        effect, if the id is unknown or ended. No step reports it."""
        with hold_ctrl_c():
            samples = [s for s in self._samples.get(request_id, ()) if index is None or s.index == index]
            try:
                aborted = [self.scheduler.abort(sample.request_id, self.clock()) for sample in samples]
            finally:  # the policy may fail
                self._forget_ended(samples)
                self._tell_events()
            # A failed step may have left some of them to report.
            reported = samples[0].samples if samples and samples[0].all_ended else aborted
            self.progressed = [other for other in self.progressed if other not in reported]
        return next((request for request in aborted if request is not None), None)

    def abort_all(self) -> None:
        """End every request."""
        with hold_ctrl_c():
            for request_id in list(self._samples):
                self.abort(request_id)
            self.progressed = []

    def has_unfinished_requests(self) -> bool:
        return bool(self.scheduler.requests or self.progressed)

    def step(self) -> list[Request]:
        """Run one step. Returns the requests that got a token or ended in it."""
        self.advance()
        return self.collect()

    def collect(self) -> list[Request]:
        """What progressed since the last call, each request once."""
        progressed, self.progressed = list(dict.fromkeys(self.progressed)), []
        return progressed

    def advance(self) -> None:
        """Run one step, and keep the requests that progressed for `collect`.

        If the runner fails or Ctrl-C interrupts it, no token is lost: the next step does the same work. If the
        scheduler itself fails, every request ends with "error", and the next `collect` returns them.
        """
        with hold_ctrl_c() as let_through:
            begin = self.clock()
            with self._end_all_on_error(StepPlan()):
                plan = self.scheduler.schedule(begin)
            step = self._describe(begin, plan)
            try:
                self._tell_events()
                for observer in self.observers:
                    observer.on_plan(step)
                with let_through():
                    tokens = self.runner.execute(plan)
            except BaseException:
                with self._end_all_on_error(plan):
                    self.scheduler.cancel(plan)
                self._tell_events()
                raise
            with self._end_all_on_error(plan):
                progressed = self.scheduler.update(plan, tokens, self.clock())
            self._note_progress(progressed)
            self.num_steps += 1
            step = step._replace(end=self.scheduler.now, progressed=progressed)
            for observer in self.observers:
                observer.on_step(step)

    @contextmanager
    def _end_all_on_error(self, plan: StepPlan) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            failed = self.scheduler.fail_all(f"the scheduler failed: {error!r}")
            # Some requests of the plan may have ended before the error.
            self._note_progress([*failed, *(chunk.request for chunk in plan.chunks)])
            raise

    def _note_progress(self, requests: Sequence[Request]) -> None:
        self.progressed += requests
        self._forget_ended(requests)
        self._tell_events()

    def _forget_ended(self, requests: Sequence[Request]) -> None:
        for first in {request.samples[0] for request in requests if request.state is RequestState.FINISHED}:
            if first.all_ended:
                self._samples.pop(first.request_id, None)

    def _describe(self, begin: float, plan: StepPlan) -> Step:
        it = self.scheduler
        counts = (len(it.running), it.num_waiting, it.pool.num_free, it.pool.num_usable)
        return Step(self.num_steps, begin, math.nan, plan, [], *counts, *it.limits)

    def _tell_events(self) -> None:
        events, self.scheduler.events = self.scheduler.events, []
        for event in events:
            for observer in self.observers:
                observer.on_event(event)
