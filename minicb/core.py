"""The loop: plan a step, have it executed, take in its tokens, and tell whoever wants to know.

It knows neither text nor tensors, so that the same loop serves a model and the simulator.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from minicb.checks import check_real
from minicb.plan import Event, Observer, Step, StepPlan
from minicb.request import Request, Sampled
from minicb.scheduler import Scheduler


class Runner(Protocol):
    def execute(self, plan: StepPlan) -> Sequence[Sampled]:
        """A token for each chunk of the plan that samples, in the plan's order; None where there is none to be had."""
        ...


class EngineCore:
    """Requests in by `add`, out of `step` as they get tokens.

    clock: gives the time in seconds; all times of events and steps are its.
    """

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
        self._event: Event | None = None  # that is being told, and to whom it has yet to be
        self._untold: list[Observer] = []
        self.moved: list[Request] = []  # what steps yielded and nobody has collected yet
        self._in_step = False

    def add(self, request: Request, arrival_time: float | None = None) -> None:
        """Accept a request. arrival_time: when it was due, where that isn't now; all its latencies count from then."""
        if arrival_time is not None:
            check_real("arrival_time", arrival_time, math.isfinite, "a finite number")
        self.scheduler.add(request, self.clock() if arrival_time is None else arrival_time)
        self._tell_events()

    def abort(self, request_id: str, index: int | None = None) -> Request | None:
        """End a request, whatever it is doing, or one sample of it; None, and no effect, if there is none to end."""
        request = self.scheduler.abort(request_id, self.clock(), index)
        if request is not None:
            # Its caller is told of it now. No step is to tell of it again, nor, if no sample of it is left, of those
            # that had ended before.
            group = request.group
            done = group is not None and group.first() is None
            self.moved = [m for m in self.moved if m.finish_reason != "abort" and not (done and m.group is group)]
        self._tell_events()
        return request

    def abort_all(self) -> None:
        """End every request; whatever had gone wrong, all is as new."""
        self.moved = []
        self.scheduler.abort_all()
        self._tell_events()

    @property
    def broken(self) -> bool:
        """Has something broken off (Ctrl-C) that the next step will make up for?"""
        return self._in_step or self.scheduler.broken

    def has_unfinished_requests(self) -> bool:
        if self.scheduler.broken:  # by an interruption; what was to be ended may not have been
            self.scheduler.recover()
        return bool(self.scheduler.requests or self.moved)

    def step(self) -> list[Request]:
        """Run one step. Returns the requests that got a token or ended in it.

        If it is interrupted, no token is lost: the next step does what this one should have done, and
        also returns what had ended before the interruption.
        """
        self.advance()
        return self.collect()

    def advance(self) -> None:
        """Run one step, and leave the requests that got a token or ended to `collect`."""
        if self._in_step:  # one broke off, and then what was to make up for that did
            self.scheduler.recover()
        self._in_step = True
        plan = tokens = None
        try:
            begin = self.clock()
            plan = self.scheduler.schedule(begin)
            step = self._describe(begin, plan)
            self._tell_events()
            for observer in self.observers:
                observer.on_plan(step)
            tokens = self.runner.execute(plan)
            self.scheduler.update(plan, tokens, self.moved, self.clock())
        except BaseException:
            if plan is not None and tokens is None:  # the scheduler itself is in order
                self.scheduler.cancel(plan)
            else:
                self.scheduler.recover()
            self._in_step = False
            raise
        self._in_step = False
        self.num_steps += 1
        self._tell_events()
        step = step._replace(end=self.scheduler.now, moved=list(self.moved))
        for observer in self.observers:
            observer.on_step(step)

    def collect(self) -> list[Request]:
        moved = list(dict.fromkeys(self.moved))
        self.moved = []
        return moved

    def _describe(self, begin: float, plan: StepPlan) -> Step:
        scheduler = self.scheduler
        return Step(
            number=self.num_steps,
            begin=begin,
            end=math.nan,
            plan=plan,
            moved=[],
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_free_blocks=scheduler.pool.num_free,
            num_blocks=scheduler.pool.num_usable,
            max_num_seqs=scheduler.limits.max_num_seqs,
            max_num_batched_tokens=scheduler.limits.max_num_batched_tokens,
        )

    def _tell_events(self) -> None:
        events = self.scheduler.events
        while events:
            if events[0] is not self._event:
                self._event, self._untold = events[0], list(self.observers)
            while self._untold:
                observer = self._untold.pop(0)  # before: if it breaks off, it isn't told again, but the others are
                observer.on_event(events[0])
            events.pop(0)
            self._event = None
