"""Workloads: who asks for what, and when; and the loop that lets them arrive at an engine, real or simulated.

`make_workload` draws one at random, with the names and the meaning of `vllm bench serve`'s options, or reads it from
a trace; `serve` runs it. Requests arrive when they are due, however slow the engine is (an open loop), and a latency
counts from then: an engine can't look better by letting requests come late ("coordinated omission", Tene, 2015).
"""

import argparse
import heapq
import itertools
import json
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from minicb.checks import check_choice, check_int, check_real, show
from minicb.core import EngineCore
from minicb.params import SamplingParams, SchedulingParams
from minicb.request import Request, RequestState

MAX_START = 86400  # seconds; a first arrival beyond is a date
HASH_BLOCK = 512  # tokens that one of the hash_ids of Mooncake's traces stands for
FIELDS = ["time", "timestamp", "prompt", "input_length", "hash_ids", "output_length"]  # of a line of a trace
OTHER_FIELDS = ["expected_output_length", "client", "priority"]


class Arrival(NamedTuple):
    """A request that is to come."""

    time: float  # seconds after the start
    prompt: list[int]  # token ids
    output_len: int  # tokens
    client: str = "default"
    priority: int = 0  # lower is served first, by the policy "priority"
    expected_output_len: int | None = None  # tokens; a guess, for the policy "sjf"


def _option(kind: Callable[[str], Any], default: Any, text: str) -> Any:
    return field(default=default, metadata={"type": kind, "help": text})


@dataclass(frozen=True, kw_only=True)
class WorkloadArgs:
    """What a random workload is like. Each field is an option of the command line: num_prompts is `--num-prompts`.

    Intervals between arrivals are gamma distributed with the shape `burstiness`, so their standard deviation is
    1 / sqrt(burstiness) of their mean, and scaled so that the last request arrives at num_prompts / request_rate.
    A trace has times, prompts, lengths and clients of its own: of these fields only num_prompts counts for it.
    ValueError names a field that is out of range.
    """

    num_prompts: int | None = _option(int, None, "requests; without it 1000, or all of the trace")
    request_rate: float = _option(float, math.inf, "requests per second on average; inf: all at once")
    burstiness: float = _option(float, 1.0, "1: a Poisson process; below, requests come in bursts; inf: regularly")
    random_input_len: int = _option(int, 1024, "prompt tokens on average, without the prefix")
    random_output_len: int = _option(int, 128, "output tokens on average, before they are capped")
    random_range_ratio: float = _option(
        float, 0.0, "lengths are uniform in [mean * (1 - ratio), mean * (1 + ratio)], rounded down and up"
    )
    random_prefix_len: int = _option(int, 0, "tokens with which all prompts begin, the same for all")
    output_distribution: str = _option(str, "uniform", "of output lengths: uniform or exponential")
    max_output_len: int | None = _option(int, None, "longer outputs are cut to so many tokens")
    num_clients: int = _option(int, 1, "clients, of whom each request has one at random")
    seed: int = _option(int, 0, "of all that is random")
    dataset_path: str | None = _option(str, None, "a trace in JSON lines, to be read in place of all this")

    def __post_init__(self) -> None:
        for name in ("num_prompts", "random_input_len", "random_output_len", "max_output_len", "num_clients"):
            if getattr(self, name) is not None or name not in ("num_prompts", "max_output_len"):
                check_int(name, getattr(self, name), minimum=1, below=2**31)
        check_int("random_prefix_len", self.random_prefix_len, minimum=0, below=2**31)
        check_int("seed", self.seed)
        check_real("request_rate", self.request_rate, lambda value: value >= 1e-6, "a number >= 0.000001, or inf")
        # What is larger is regular for all purposes, and random.gammavariate never ends on the largest floats.
        check_real("burstiness", self.burstiness, lambda v: 0 < v <= 1e6 or v == math.inf, "in (0, 1000000], or inf")
        check_real("random_range_ratio", self.random_range_ratio, lambda value: 0 <= value < 1, "in [0, 1)")
        check_choice("output_distribution", self.output_distribution, ("uniform", "exponential"))
        if self.random_prefix_len + self.length_range(self.random_input_len)[0] < 1:
            raise ValueError(
                f"random_input_len is {self.random_input_len}, which with a random_range_ratio of "
                f"{self.random_range_ratio:g} and no prefix allows empty prompts"
            )
        if not isinstance(self.dataset_path, (str, Path, NoneType)):
            raise ValueError(f"dataset_path must be a path, not {show(self.dataset_path)}")
        if self.dataset_path is not None and self.request_rate != math.inf:
            raise ValueError(f"request_rate must be inf with a trace (dataset_path), not {self.request_rate:g}")

    @classmethod
    def add_arguments(cls, parser: "argparse._ActionsContainer") -> None:  # a parser, or a group of one
        for item in fields(cls):
            option, default = "--" + item.name.replace("_", "-"), item.default
            text = item.metadata["help"] + ("" if default is None else f" (default: {default})")
            parser.add_argument(option, type=item.metadata["type"], default=default, help=text)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "WorkloadArgs":
        return cls(**{item.name: getattr(args, item.name) for item in fields(cls)})

    def length_range(self, mean: int) -> tuple[int, int]:
        """The least and the greatest length, both included."""
        return math.floor(mean * (1 - self.random_range_ratio)), math.ceil(mean * (1 + self.random_range_ratio))


def make_workload(args: WorkloadArgs, vocab_size: int) -> list[Arrival]:
    """Arrivals in the order of their times. The same arguments always give the same.

    Times, prompts, output lengths and clients are drawn independently: none of them changes with what another depends on.
    """
    check_int("vocab_size", vocab_size, minimum=1, below=2**31)
    if args.dataset_path is not None:
        return read_trace(args.dataset_path, vocab_size, args.num_prompts)
    count = 1000 if args.num_prompts is None else args.num_prompts
    prompts, outputs, clients = (random.Random(f"{args.seed} {name}") for name in ("prompts", "outputs", "clients"))
    prefix = random_tokens(prompts, args.random_prefix_len, vocab_size)
    lens = args.length_range(args.random_input_len)
    arrivals = list[Arrival]()
    for time in _times(args, count):
        prompt = prefix + random_tokens(prompts, prompts.randint(*lens), vocab_size)
        client = f"client-{clients.randrange(args.num_clients)}" if args.num_clients > 1 else "default"
        arrivals.append(Arrival(time, prompt, _output_len(args, outputs), client))
    return arrivals


def random_tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return rng.choices(range(vocab_size), k=count)


def _output_len(args: WorkloadArgs, rng: random.Random) -> int:
    """Exponential with a cap: how Anyscale varied the variance ("How continuous batching enables 23x throughput", 2023)."""
    if args.output_distribution == "exponential":
        length = max(1, round(rng.expovariate(1 / args.random_output_len)))
    else:
        low, high = args.length_range(args.random_output_len)
        length = rng.randint(max(1, low), high)
    return length if args.max_output_len is None else min(length, args.max_output_len)


def _times(args: WorkloadArgs, count: int) -> list[float]:
    if args.request_rate == math.inf:
        return [0.0] * count
    rng = random.Random(f"{args.seed} times")
    regular = args.burstiness == math.inf
    times = list(itertools.accumulate(1.0 if regular else rng.gammavariate(args.burstiness, 1) for _ in range(count)))
    scale = count / args.request_rate / (times[-1] or 1.0)  # in extreme bursts no interval may be above 0
    return [time * scale for time in times]


# ------------------------------------------------------------------ traces


def read_trace(path: str | Path, vocab_size: int, num_prompts: int | None = None) -> list[Arrival]:
    """The arrivals of a file of JSON lines, of its first num_prompts lines if that is given, sorted by time.

    A line is {"time": seconds, "prompt": [token ids], "output_length": tokens} and may have "client", "priority" and
    "expected_output_length". In place of a prompt "input_length" says how many tokens are made up, and "hash_ids",
    one for every 512 of them, which blocks of tokens these are: equal ids, equal blocks. With "timestamp",
    milliseconds, in place of "time" that is the format of Mooncake's traces (FAST 2025). Neither name ever means the
    other unit, and unknown names are refused, so that no trace is read by the wrong clock.
    ValueError names file, line and field.
    """
    arrivals = list[Arrival]()
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if len(arrivals) == num_prompts:
                break
            if not line.strip():
                continue
            try:
                arrivals.append(_read_line(json.loads(line), number, vocab_size))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not arrivals:
        raise ValueError(f"{path}: there is no request in it")
    arrivals.sort(key=lambda arrival: arrival.time)
    if arrivals[0].time > MAX_START:
        raise ValueError(
            f"{path}: the first request is due after {arrivals[0].time:g} seconds, but times count from the start of the "
            f"run: it must be at most {MAX_START}"
        )
    return arrivals


def _read_line(line: Any, number: int, vocab_size: int) -> Arrival:
    if not isinstance(line, dict):
        raise ValueError(f"it must be an object with fields, not {show(line)}")
    if unknown := sorted(line.keys() - {*FIELDS, *OTHER_FIELDS}):
        raise ValueError(f"there is no field {show(unknown[0])}, only {', '.join(FIELDS + OTHER_FIELDS)}")
    name = _only_one_of(line, "time", "timestamp")
    time = check_real(name, line[name], lambda value: 0 <= value < math.inf, "a finite number >= 0")
    output_len = check_int("output_length", line.get("output_length"), minimum=1)
    expected = line.get("expected_output_length")
    if expected is not None:
        expected = check_int("expected_output_length", expected, minimum=1)
    client = line.get("client", "default")
    if not isinstance(client, str):
        raise ValueError(f"client must be a string, not {show(client)}")
    priority = check_int("priority", line.get("priority", 0), minimum=-(2**63), below=2**63)
    seconds = time / 1000 if name == "timestamp" else time
    return Arrival(seconds, _read_prompt(line, number, vocab_size), output_len, client, priority, expected)


def _read_prompt(line: dict[str, Any], number: int, vocab_size: int) -> list[int]:
    if _only_one_of(line, "prompt", "input_length") == "prompt":
        if "hash_ids" in line:
            raise ValueError("hash_ids go with input_length, not with prompt")
        if not isinstance(line["prompt"], list) or not line["prompt"]:
            raise ValueError(f"prompt must be a list of at least 1 token id, not {show(line['prompt'])}")
        return [check_int("prompt token id", token, minimum=0, below=vocab_size) for token in line["prompt"]]
    length = check_int("input_length", line["input_length"], minimum=1)
    if "hash_ids" not in line:
        return random_tokens(random.Random(f"line {number}"), length, vocab_size)
    ids, num_blocks = line["hash_ids"], -(-length // HASH_BLOCK)
    if not isinstance(ids, list) or len(ids) != num_blocks:
        raise ValueError(f"hash_ids must be a list of {num_blocks}, one for every {HASH_BLOCK} tokens, not {show(ids)}")
    ids = [check_int("hash_ids", block, minimum=0) for block in ids]
    tokens = (random_tokens(random.Random(f"block {block}"), HASH_BLOCK, vocab_size) for block in ids)
    return list(itertools.chain.from_iterable(tokens))[:length]


def _only_one_of(line: dict[str, Any], one: str, other: str) -> str:
    if (one in line) == (other in line):
        raise ValueError(f"there must be either {one} or {other}, not {'both' if one in line else 'neither'}")
    return one if one in line else other


# ------------------------------------------------------------------ the loop


def sampling_params(arrival: Arrival) -> SamplingParams:
    """Greedy, and exactly output_len tokens."""
    return SamplingParams(temperature=0, max_tokens=arrival.output_len, ignore_eos=True)


def make_request(arrival: Arrival, request_id: str) -> Request:
    scheduling = SchedulingParams(
        priority=arrival.priority, client=arrival.client, expected_output_len=arrival.expected_output_len
    )
    return Request(request_id, arrival.prompt, sampling_params(arrival), scheduling)


MAX_IDLE = 1000  # rounds of `serve` that may bring nothing, at least


def serve(
    core: EngineCore,
    arrivals: Iterable[Arrival],
    *,
    wait: Callable[[float], object],
    follow_up: Callable[[Request, float], Arrival | None] | None = None,
    make_request: Callable[[Arrival, str], Request] = make_request,
) -> list[Request]:
    """Let the arrivals come to an engine that has nothing else to do, and run it until all have ended.

    A request is added at the first step that begins when it is due, and its latencies count from when it was due.
    wait: called with the seconds until the next arrival when there is nothing to do; time.sleep, or the advance
        of a VirtualClock.
    follow_up: called with each request that ends in a step, and the seconds since the start; what it returns is one
        more arrival, due after seconds since the start, too. So closed loops are made.
    make_request: from an arrival and an id, "0", "1", …; where a model's limits are to be checked, by Engine.make_request.

    Returns the requests in the order in which they were due (of those due at the same time, in the given order).
    RuntimeError: the engine makes no progress, or `wait` doesn't wait.
    """
    numbers = itertools.count()
    due = list[tuple[float, int, Arrival]]()  # a heap

    def expect(arrival: Arrival) -> None:
        time = check_real("arrival time", arrival.time, math.isfinite, "a finite number")
        heapq.heappush(due, (time, next(numbers), arrival))

    for arrival in arrivals:
        expect(arrival)
    requests, start, num_idle = list[Request](), core.clock(), 0
    while due or core.has_unfinished_requests():
        now = core.clock()
        while due and start + due[0][0] <= now:
            time, _, arrival = heapq.heappop(due)
            try:
                request = make_request(arrival, str(len(requests)))
                core.add(request, arrival_time=start + time)
            except ValueError as error:
                raise ValueError(f"request {len(requests)} of the workload: {error}") from error
            requests.append(request)
        if core.has_unfinished_requests():
            moved = core.step()
            progress = bool(moved)
            for request in moved:
                if follow_up is not None and request.state is RequestState.FINISHED:
                    following = follow_up(request, core.clock() - start)
                    if following is not None:
                        expect(following)
        elif due:
            wait(start + due[0][0] - now)
            progress = core.clock() > now
        num_idle = 0 if progress else num_idle + 1
        if num_idle > MAX_IDLE:
            _check_progress(core, num_idle)
    return requests


def _check_progress(core: EngineCore, num_idle: int) -> None:
    """Each step computes a token of the policy's first request at least, so that so many steps yield a new one."""
    unfinished = core.scheduler.requests.values()
    if num_idle > sum(request.num_tokens for request in unfinished):
        raise RuntimeError(f"no progress in {num_idle} steps or waits; {len(unfinished)} requests have not ended")
