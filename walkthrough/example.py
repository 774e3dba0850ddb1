"""The running example of all chapters: four requests, small enough to draw.

A wants one token. B wants many. C has a long prompt. D comes late.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from minicb.blocks import BlockPool
from minicb.core import EngineCore
from minicb.memory import Memory
from minicb.params import SamplingParams
from minicb.plan import Observer, Step, StepPlan
from minicb.policies import POLICIES
from minicb.request import Request
from minicb.scheduler import Scheduler


class Wish(NamedTuple):
    num_prompt_tokens: int
    num_output_tokens: int
    arrives: int = 0  # before this step


FOUR = {"A": Wish(3, 1), "B": Wish(4, 12), "C": Wish(14, 4), "D": Wish(3, 5, arrives=4)}


class NoModel:
    """Stands in for the model runner: the same token always, at once. To the scheduler it makes no difference."""

    def execute(self, plan: StepPlan) -> list[int]:
        return [7 for chunk in plan.chunks if chunk.needs_sampling]


class Recorder(Observer):
    """Notes how many tokens each request got in each step, who decoded, and who was preempted."""

    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []
        self.decodes: list[set[str]] = []
        self.preempted: list[list[str]] = []

    def on_plan(self, step: Step) -> None:
        self.steps.append({chunk.request.request_id: chunk.length for chunk in step.plan.chunks})
        self.decodes.append({chunk.request.request_id for chunk in step.plan.chunks if chunk.is_decode})
        self.preempted.append([request.request_id for request in step.plan.preempted])


def make_scheduler(
    num_blocks: int = 1 + 16, block_size: int = 4, policy: str = "fcfs", prefix_caching: bool = False, **limits: Any
) -> Scheduler:
    memory = Memory(BlockPool(num_blocks, block_size, prefix_caching))
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 32, "max_model_len": 64, **limits}
    return Scheduler(memory, POLICIES[policy](), **limits)


def make_request(name: str, wish: Wish) -> Request:
    params = SamplingParams(temperature=0, max_tokens=wish.num_output_tokens, ignore_eos=True)
    return Request(name, range(wish.num_prompt_tokens), params)


def run(scheduler: Scheduler, wishes: Mapping[str, Wish] = FOUR) -> Recorder:
    """Submit each request when it is due, and step until all have ended."""
    recorder = Recorder()
    submit_and_step(EngineCore(scheduler, NoModel(), clock=lambda: 0.0, observers=[recorder]), wishes)
    return recorder


def submit_and_step(core: EngineCore, wishes: Mapping[str, Wish]) -> None:
    coming = dict(wishes)
    while coming or core.has_unfinished_requests():
        for name in [name for name, wish in coming.items() if wish.arrives <= core.num_steps]:
            core.add(make_request(name, coming.pop(name)))
        core.step()


def row_of(recorder: Recorder, name: str, wish: Wish) -> list[str]:
    """A cell for each step: tokens prefilled, or ● for a token decoded, · for waiting, nothing before and after."""
    last = max(number for number, step in enumerate(recorder.steps) if name in step)
    cells = []
    for number, step in enumerate(recorder.steps):
        if name in step:
            cells.append("●" if name in recorder.decodes[number] else str(step[name]))
        else:
            cells.append("·" if wish.arrives <= number < last else "")
    return cells


def draw(recorder: Recorder, wishes: Mapping[str, Wish] = FOUR) -> None:
    """A row for each request, a column for each step."""
    print("step  " + "".join(f"{number:3}" for number in range(len(recorder.steps))))
    for name, wish in wishes.items():
        print(f"{name:6}" + "".join(f"{cell:>3}" for cell in row_of(recorder, name, wish)).rstrip())
