"""Two large workloads on simulated devices: an agent hub, and synthetic data.

The seconds are those of the roofline in cost_model.py: perfect kernels, and a scheduler that takes no time. So they
compare policies and batching under the same load. They don't predict what H100s would measure.
"""

import math
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

from minicb.blocks import BlockPool
from minicb.checks import check_choice, check_int, check_real
from minicb.core import EngineCore
from minicb.memory import Memory
from minicb.observe.metrics import Metrics, summary
from minicb.plan import Observer, Step
from minicb.policies import POLICIES, Policy
from minicb.request import Request
from minicb.scheduler import Scheduler
from minicb.simulate.cost_model import DEVICES, CostModel, ModelShape, SimulatedRunner, VirtualClock
from minicb.simulate.workload import Arrival, WorkloadArgs, make_workload, random_tokens, serve

LLAMA_8B = ModelShape(  # Llama 3.1 8B, from its config.json
    num_layers=32, hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128,
    vocab_size=128256, tied=False, itemsize=2,
)  # fmt: skip
LLAMA_70B = LLAMA_8B._replace(num_layers=80, hidden_size=8192, intermediate_size=28672, num_heads=64)  # Llama 3.3 70B
BLOCK_SIZE = 32


def simulate(
    cost_model: CostModel,
    *,
    policy: str | Policy = "fcfs",
    num_blocks: int | None = None,
    enable_prefix_caching: bool = True,
    preemption_mode: str = "auto",
    **limits: Any,
) -> tuple[EngineCore, VirtualClock]:
    """An engine on a simulated device, and its clock.

    num_blocks: size of the pool, block 0 included. None: as many as fit into the device's memory. Host memory has room
        for as many again. limits: the other arguments of `Scheduler`.
    """
    if not isinstance(policy, Policy):
        check_choice("policy", policy, POLICIES)
        policy = POLICIES[policy]()
    num_blocks = num_blocks or cost_model.num_blocks(BLOCK_SIZE)
    memory = Memory(
        BlockPool(num_blocks, BLOCK_SIZE, enable_prefix_caching),
        BlockPool(num_blocks, BLOCK_SIZE),
        preemption_mode,
        cost_model.costs(BLOCK_SIZE),
    )
    clock = VirtualClock()
    return EngineCore(Scheduler(memory, policy, **limits), SimulatedRunner(cost_model, BLOCK_SIZE, clock), clock), clock


class OutputRate(Observer):
    """Counts the output tokens of each interval of the clock. interval: its length in seconds."""

    def __init__(self, interval: float):
        self.interval = interval
        self.num_tokens: list[int] = []

    def on_step(self, step: Step) -> None:
        index = int(step.end / self.interval)
        self.num_tokens += [0] * (index + 1 - len(self.num_tokens))
        self.num_tokens[index] += len(step.progressed)

    def rates(self, begin: float, end: float) -> list[float]:
        """Tokens per second in each whole interval between two times."""
        first, last = math.ceil(begin / self.interval), math.floor(end / self.interval)
        known = self.num_tokens + [0] * (last - len(self.num_tokens))
        return [count / self.interval for count in known[first:last]]


# ------------------------------------------------------------------ agent hub


class UserKind(NamedTuple):
    """A kind of users. Lengths are lognormal: most are short, and a few are very long."""

    share: float  # of all users
    think: float  # mean seconds from an answer to the next message, exponential
    opening: float  # median tokens of the first message of a conversation
    message: float  # median tokens of a later message
    answer: float  # median tokens
    priority: int


USER_KINDS = {
    "ordinary": UserKind(0.85, think=75, opening=900, message=250, answer=240, priority=0),
    "heavy": UserKind(0.05, think=3, opening=4000, message=500, answer=240, priority=0),  # scripts
    "urgent": UserKind(0.10, think=75, opening=900, message=250, answer=240, priority=-1),
}
SIGMA = 0.8  # of the lengths' logarithms. The mean is 1.4 medians, the 99th percentile 6.4 medians.
MAX_MESSAGE, MAX_ANSWER, MAX_CONVERSATION = 8000, 1000, 8000  # tokens
LAST_MESSAGE = 0.25  # probability that a message ends its conversation
SYSTEM_PROMPT = 500  # tokens at the beginning of all conversations


class User:
    """Sends a message, waits for the answer, thinks, and sends the next message with the conversation so far."""

    def __init__(self, name: str, kind: UserKind, system_prompt: list[int], seed: int):
        self.name, self.kind, self.system_prompt = name, kind, system_prompt
        self.rng = random.Random(f"{seed} {name}")  # its own, so that its messages are the same under every policy

    def first(self) -> Arrival:
        """A message from the middle of a conversation, as if the hub had run for long. Nothing of it is cached."""
        history = self._opening()
        while self.rng.random() >= LAST_MESSAGE:
            history = history + self._tokens(self.kind.answer) + self._tokens(self.kind.message)
        return self.next(0.0, history)

    def next(self, now: float, history: list[int]) -> Arrival:
        time = now + self.rng.expovariate(1 / self.kind.think)
        answer_len = min(self._length(self.kind.answer), MAX_ANSWER)
        is_new = self.rng.random() < LAST_MESSAGE or len(history) > MAX_CONVERSATION
        prompt = self._opening() if is_new else history + self._tokens(self.kind.message)
        return Arrival(time, prompt, answer_len, self.name, self.kind.priority)

    def _opening(self) -> list[int]:
        return self.system_prompt + self._tokens(self.kind.opening)

    def _tokens(self, median: float) -> list[int]:
        return random_tokens(self.rng, min(self._length(median), MAX_MESSAGE), LLAMA_70B.vocab_size)

    def _length(self, median: float) -> int:
        return max(1, round(self.rng.lognormvariate(math.log(median), SIGMA)))


class HubRun(NamedTuple):
    """Results of the hub.

    metrics: of the whole run. rates: output tokens/s in each interval from the end of the warm-up to the last message.
    requests: those that were due in that time.
    """

    metrics: Metrics
    rates: list[float]
    requests: list[Request]

    def latency(self, name: str, kind: str | None = None) -> dict[str, float]:
        """mean, median, p90 and p99 of "ttft", "tpot", "e2el" or "queue_time", in seconds, for one kind of users or all."""
        requests = [r for r in self.requests if kind is None or r.scheduling.client.startswith(kind + "-")]
        return summary(getattr(request.metrics, name) for request in requests)


def agent_hub(
    policy: str | Policy = "fcfs",
    *,
    num_users: int = 500,
    seconds: float = 600.0,
    warm_up: float = 60.0,
    interval: float = 60.0,
    kinds: Mapping[str, UserKind] = USER_KINDS,
    seed: int = 0,
) -> HubRun:
    """Users in a closed loop with think time, on Llama 3.3 70B on four H100s with tensor parallelism.

    500 users get more than 1500 output tokens/s in every minute, and bring the hub close to its limit. Answers are short
    and prompts long, and few prompts are still cached when the next message comes, so most of the work is prefills.
    They come at random and some are long, so requests queue, and policies differ in the order of the queue.

    Users send messages until `seconds`; requests that are under way then run to their end. Users say the same under
    every policy. No request carries an expected output length, so "sjf" predicts it from the user's earlier answers.
    """
    check_int("num_users", num_users, minimum=1)
    if not kinds:
        raise ValueError("kinds is empty: there must be at least 1 kind of users")
    check_real("interval", interval, lambda value: 0 < value < math.inf, "a finite number > 0")
    check_real("warm_up", warm_up, lambda value: 0 <= value < math.inf, "a finite number >= 0")
    check_real("seconds", seconds, lambda value: warm_up < value < math.inf, f"a finite number > {warm_up:g} (warm_up)")
    cost_model = CostModel(LLAMA_70B, DEVICES["H100"], tensor_parallel=4)
    max_model_len = MAX_CONVERSATION + MAX_MESSAGE + MAX_ANSWER
    core, clock = simulate(
        cost_model, policy=policy, max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=max_model_len
    )
    metrics, rate = Metrics(), OutputRate(interval)
    core.observers += [metrics, rate]
    system_prompt = random_tokens(random.Random(seed), SYSTEM_PROMPT, LLAMA_70B.vocab_size)
    users = dict[str, User]()
    for number in range(num_users):
        kind = kind_of_user((number + 0.5) / num_users, kinds)
        name = f"{kind}-{number}"
        users[name] = User(name, kinds[kind], system_prompt, seed)

    def follow_up(request: Request, now: float) -> Arrival | None:
        arrival = users[request.scheduling.client].next(now, request.token_ids)
        return arrival if arrival.time < seconds else None

    arrivals = [arrival for user in users.values() if (arrival := user.first()).time < seconds]
    requests = serve(core, arrivals, wait=clock.advance, follow_up=follow_up)
    return HubRun(metrics, rate.rates(warm_up, seconds), [r for r in requests if r.arrival_time >= warm_up])


def kind_of_user(rank: float, kinds: Mapping[str, UserKind]) -> str:
    """The kind of the user at this rank, in [0, 1), if users are sorted by kind."""
    for name, kind in kinds.items():
        rank -= kind.share
        if rank < 0:
            break
    return name


# ------------------------------------------------------------------ synthetic data


def synthetic_data(
    num_prompts: int = 10_000,
    *,
    policy: str | Policy = "fcfs",
    batching: str = "continuous",
    max_num_seqs: int = 256,
    seed: int = 0,
) -> Metrics:
    """All prompts at once to Llama 3.1 8B on an H100, where only throughput counts.

    The figure to look at is steps_with_queue.occupancy, the share of the slots in use while requests wait. Inputs have
    128 to 384 tokens. Outputs are exponential with mean 128, up to 1024: some take one step, others a thousand.
    """
    args = WorkloadArgs(
        num_prompts=num_prompts,
        random_input_len=256,
        random_range_ratio=0.5,
        random_output_len=128,
        output_distribution="exponential",
        max_output_len=1024,
        seed=seed,
    )
    core, clock = simulate(
        CostModel(LLAMA_8B, DEVICES["H100"]),
        policy=policy,
        batching=batching,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
        max_model_len=2048,
    )
    metrics = Metrics()
    core.observers.append(metrics)
    serve(core, make_workload(args, LLAMA_8B.vocab_size), wait=clock.advance)
    return metrics
