"""Long random runs of everything at once: afterwards every token was right and every block is back."""

import random
import zlib
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from conftest import eager, greedy, take_events, transformers_greedy
from hypothesis import settings
from test_engine import make_prompt, poison_free_blocks

from minicb import SamplingParams
from minicb.blocks import BlockPool
from minicb.memory import Costs, Memory
from minicb.observe.metrics import Metrics
from minicb.plan import StepPlan
from minicb.policies import FCFS
from minicb.request import Request, RequestState
from minicb.scheduler import Scheduler

EOS = frozenset([7, 8, 9])
STATES = ("waiting", "half prefilled", "decoding", "swapped", "waits for recompute", "finished", "unknown")
Execute = Callable[[StepPlan], list[int | None]]
SCALE = max(1, settings.default.max_examples // 30)


def state_of(request: Request) -> str:
    if request.state is RequestState.WAITING:
        return "waits for recompute" if request.num_preemptions else "waiting"
    if request.state is RequestState.RUNNING:
        return "decoding" if request.num_pending == 1 else "half prefilled"
    return request.state.name.lower()


class Toy:
    """A model whose "KV" of a position is a checksum of the token and of all KV before it, kept where
    the block tables say, on the device and on the host. The next token is a checksum of all KV."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.device: dict[int, list[int]] = {}
        self.host: dict[int, list[int]] = {}

    def execute(self, plan: StepPlan) -> list[int | None]:
        for source, destination in plan.swap_out:
            self.host[destination] = list(self.device[source])
        for source, destination in plan.swap_in:
            self.device[destination] = self.host.pop(source)
        size = self.block_size
        # As in a forward pass: nobody sees what another computes in the same step.
        before = {block: list(kv) for block, kv in self.device.items()} if len(plan.chunks) > 1 else self.device
        tokens = list[int | None]()
        for chunk in plan.chunks:
            request, start, length = chunk
            table, end = request.block_table, start + length
            kv = [before[table[p // size]][p % size] for p in range(start)]
            for position in range(start, end):
                kv.append(checksum(kv[-1:], request.token_ids[position]))
                self.device.setdefault(table[position // size], [0] * size)[position % size] = kv[-1]
            if chunk.needs_sampling:
                tokens.append(next_token(kv))
        return tokens


def checksum(before: list[int], token: int) -> int:
    return zlib.crc32(b"%d %d" % (before[0] if before else 1, token))


def next_token(kv: list[int]) -> int:
    return zlib.crc32(repr(kv).encode()) % 200


def alone(request: Request, limit: int) -> tuple[list[int], str]:
    """What the request must yield, from its prompt and parameters only; `limit` for prompt and output."""
    kv, params = list[int](), request.params
    for token in request.token_ids[: request.num_prompt_tokens]:
        kv.append(checksum(kv[-1:], token))
    output = list[int]()
    while True:
        output.append(next_token(kv))
        if output[-1] in EOS:
            return output, "stop"
        if len(output) == params.max_tokens or request.num_prompt_tokens + len(output) == limit:
            return output, "length"
        kv.append(checksum(kv[-1:], output[-1]))


class Traffic:
    """Random requests through a scheduler and a runner, until `count` have come and all have ended.

    One step in fifty breaks off, before or after it was executed, or so that nothing is certain. Aborts are aimed at each state in turn.
    """

    def __init__(self, scheduler: Scheduler, rng: random.Random, count: int):
        self.scheduler, self.rng, self.count = scheduler, rng, count
        self.requests: dict[str, Request] = {}
        self.ended: Counter[str] = Counter()
        self.aborts: Counter[str] = Counter()
        self.metrics = Metrics()

    def run(
        self, new_request: Callable[[str], Request], execute: Execute, before_step: Callable[[], None] = list
    ) -> None:
        rng, scheduler = self.rng, self.scheduler
        for _ in range(100 * self.count):
            if len(self.requests) == self.count and not scheduler.requests:
                break
            while len(self.requests) < self.count and len(scheduler.requests) < 20 and rng.random() < 0.4:
                request = new_request(str(len(self.requests)))
                self.requests[request.request_id] = request
                scheduler.add(request)
            if rng.random() < 0.15:
                self.abort(rng.choice(STATES))
            before_step()
            self.step(execute, breaks=rng.random() < 0.02)
            scheduler.check_invariants()
        assert len(self.requests) == self.count, "not finished"
        assert not scheduler.requests, "not finished"

    def abort(self, state: str) -> None:
        known = [request for request in self.requests.values() if state_of(request) == state]
        if state == "unknown":
            assert self.scheduler.abort("unknown") is None
        elif not known:
            return
        else:
            request = self.rng.choice(known)
            aborted = self.scheduler.abort(request.request_id)
            assert aborted is (None if state == "finished" else request)
            if aborted is not None:
                self.ended[request.request_id] += 1
        self.aborts[state] += 1

    def step(self, execute: Execute, breaks: bool) -> None:
        scheduler = self.scheduler
        plan = scheduler.schedule()
        assert sum(chunk.length for chunk in plan.chunks) <= scheduler.maximum.max_num_batched_tokens
        assert len(scheduler.running) <= scheduler.maximum.max_num_seqs
        assert not scheduler.requests or plan.chunks, "a step that computes nothing"
        if breaks:
            if self.rng.random() < 0.5:
                execute(plan)
            if self.rng.random() < 0.7:
                scheduler.cancel(plan)
            else:
                scheduler.recover()
            return
        for request in scheduler.update(plan, execute(plan)):
            if request.state is RequestState.FINISHED:
                self.ended[request.request_id] += 1
        for event in take_events(scheduler):
            self.metrics.on_event(event)

    def check(self, expected: Callable[[Request], tuple[list[int], str]]) -> None:
        memory = self.scheduler.memory
        for pool in (memory.pool, memory.host_pool):
            assert pool.num_free == pool.num_usable
        assert self.ended == dict.fromkeys(self.requests, 1), "ended twice or never"
        for request in self.requests.values():
            tokens, reason = expected(request)
            if request.finish_reason == "abort":
                tokens, reason = tokens[: request.num_output_tokens], "abort"
            assert (request.output_token_ids, request.finish_reason) == (tokens, reason)
            assert not request.block_table and not request.host_blocks

    def check_that_everything_happened(self, more_than: int) -> None:
        preemptions = self.metrics.preemptions_by_mode
        assert min(preemptions["swap"], preemptions["recompute"], self.metrics.num_swapped_in_blocks) > more_than


@pytest.mark.parametrize(
    ("seed", "block_size", "num_tokens", "num_host_blocks", "max_num_seqs", "budget", "batching"),
    [
        (1, 4, 96, 12, 8, 16, "continuous"),
        (2, 1, 60, 20, 6, 9, "continuous"),
        (3, 3, 66, 6, 12, 18, "continuous"),
        (4, 4, 80, 10, 8, 12, "static"),
    ],
)
def test_thousands_of_requests_leave_no_block_behind(
    seed, block_size, num_tokens, num_host_blocks, max_num_seqs, budget, batching
):
    """Prefixes in common, a pool that overflows, little host memory, preemption by whatever is cheaper
    at costs that change, aborts in every state, steps that break off."""
    rng = random.Random(seed)
    memory = Memory(
        BlockPool(1 + num_tokens // block_size, block_size, enable_prefix_caching=True),
        BlockPool(1 + num_host_blocks, block_size),
        "auto",
    )
    scheduler = Scheduler(
        memory,
        FCFS(),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=64,
        batching=batching,
    )
    prefixes = [[rng.randrange(200) for _ in range(24)] for _ in range(4)]

    def new_request(request_id: str) -> Request:
        memory.costs = Costs(rng.uniform(0, block_size), 1.0)
        prompt = rng.choice(prefixes)[: rng.randint(0, 24)] + [rng.randrange(3) for _ in range(rng.randint(1, 4))]
        params = SamplingParams(max_tokens=rng.choice([None, 1, 4, 12, 20]))
        return Request(request_id, prompt, params, eos_token_ids=EOS)

    traffic = Traffic(scheduler, rng, 2000 * SCALE)
    traffic.run(new_request, Toy(block_size).execute)
    traffic.check(lambda request: alone(request, limit=min(64, memory.pool.num_usable * block_size + 1)))
    assert all(traffic.aborts[state] for state in STATES), traffic.aborts
    traffic.check_that_everything_happened(more_than=10)
    assert 0.1 < traffic.metrics.prefix_cache_hit_rate < 0.9


def test_a_thousand_requests_through_an_engine(tiny):
    """The same with a real model. What nobody holds and nobody can find is NaN all the time."""
    rng = random.Random(5)
    engine = eager(tiny, num_blocks=1 + 16, num_cpu_blocks=8, max_num_seqs=6, max_num_batched_tokens=7)
    prefixes = [make_prompt(16), make_prompt(17)]
    prompts = [prefix[:length] + tail for prefix in prefixes for length in (5, 8, 13) for tail in ([], [1], [2, 3])]
    judged = {tuple(prompt): transformers_greedy(tiny, prompt, 12, dtype=torch.float64) for prompt in prompts}

    def new_request(request_id: str) -> Request:
        engine.scheduler.memory.costs = Costs(rng.uniform(0, 4), 1.0)
        return engine.make_request(rng.choice(prompts), greedy(rng.randint(1, 12)), request_id)

    def expected(request: Request) -> tuple[list[int], str]:
        prompt = request.token_ids[: request.num_prompt_tokens]
        return judged[tuple(prompt)][: request.params.max_tokens], "length"

    traffic = Traffic(engine.scheduler, rng, 1200 * SCALE)
    traffic.run(new_request, engine.runner.execute, before_step=lambda: poison_free_blocks(engine))
    traffic.check(expected)
    assert len(traffic.aborts) >= len(STATES) - 1, traffic.aborts  # the rarest may be missing here
    traffic.check_that_everything_happened(more_than=5)
    assert traffic.metrics.prefix_cache_hit_rate > 0.1
