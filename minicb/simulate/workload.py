"""Workloads: which requests arrive when, and the loop that serves them on an engine, real or simulated.

`make_workload` draws a workload at random, with the option names of `vllm bench serve`, or reads it from a dataset;
`serve` runs it. Requests arrive when they are due, however slow the engine is (an open loop), and latencies count from
then. So an engine can't look better by accepting requests late ("coordinated omission", Tene, 2015).
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

MAX_START = 86400  # seconds; a later first arrival is taken for a date
HASH_BLOCK = 512  # tokens per hash id in Mooncake's traces
DATASET_FIELDS = (
    *("time", "timestamp", "prompt", "input_length", "hash_ids", "output_length"),
    *("expected_output_length", "client", "priority"),
)


class Arrival(NamedTuple):
    """A request of a workload."""

    time: float  # seconds since the start of the run
    prompt: list[int]  # token ids
    output_len: int  # tokens
    client: str = "default"
    priority: int = 0  # lower is served first by the policy "priority"
    expected_output_len: int | None = None  # tokens, a guess for the policy "sjf"


def _option(parse: Callable[[str], Any], default: Any, text: str) -> Any:
    return field(default=default, metadata={"type": parse, "help": text})


@dataclass(frozen=True, kw_only=True)
class WorkloadArgs:
    """Describes a random workload, or names a dataset. Each field is an option of the command line: num_prompts is
    `--num-prompts`.

    Intervals between arrivals are gamma distributed with shape `burstiness`, so their standard deviation is
    1 / sqrt(burstiness) of their mean. They are scaled so that the last request arrives at num_prompts / request_rate.
    With a dataset, only num_prompts counts: the dataset has times, prompts, lengths and clients of its own.
    ValueError names a field that is out of range.
    """

    num_prompts: int | None = _option(int, None, "requests; the default is 1000, or the whole dataset")
    request_rate: float = _option(float, math.inf, "requests per second on average; inf: all at once")
    burstiness: float = _option(float, 1.0, "1: a Poisson process; below 1: bursts; inf: equal intervals")
    random_input_len: int = _option(int, 1024, "prompt tokens on average, without the prefix")
    random_output_len: int = _option(int, 128, "output tokens on average, before max_output_len")
    random_range_ratio: float = _option(
        float, 0.0, "lengths are uniform in [mean * (1 - ratio), mean * (1 + ratio)], rounded down and up"
    )
    random_prefix_len: int = _option(int, 0, "tokens at the beginning of all prompts, the same for all")
    output_distribution: str = _option(str, "uniform", "distribution of output lengths: uniform or exponential")
    max_output_len: int | None = _option(int, None, "longer outputs are cut to this many tokens")
    num_clients: int = _option(int, 1, "clients; each request belongs to one at random")
    seed: int = _option(int, 0, "seed of all random numbers")
    dataset_path: str | None = _option(str, None, "read the workload from this file of JSON lines instead")

    def __post_init__(self) -> None:
        for name in ("num_prompts", "random_input_len", "random_output_len", "max_output_len", "num_clients"):
            if getattr(self, name) is not None or name not in ("num_prompts", "max_output_len"):
                check_int(name, getattr(self, name), minimum=1, below=2**31)
        check_int("random_prefix_len", self.random_prefix_len, minimum=0, below=2**31)
        check_int("seed", self.seed)
        check_real("request_rate", self.request_rate, lambda value: value >= 1e-6, "a number >= 0.000001, or inf")
        # Larger values are as good as inf, and random.gammavariate never returns for the largest floats.
        check_real("burstiness", self.burstiness, lambda v: 0 < v <= 1e6 or v == math.inf, "in (0, 1000000], or inf")
        check_real("random_range_ratio", self.random_range_ratio, lambda value: 0 <= value < 1, "in [0, 1)")
        check_choice("output_distribution", self.output_distribution, ("uniform", "exponential"))
        if self.random_prefix_len + self.length_range(self.random_input_len)[0] < 1:
            raise ValueError(
                f"random_input_len is {self.random_input_len}, which allows empty prompts with a random_range_ratio of "
                f"{self.random_range_ratio:g} and no prefix"
            )
        if not isinstance(self.dataset_path, (str, Path, NoneType)):
            raise ValueError(f"dataset_path must be a path, not {show(self.dataset_path)}")
        if self.dataset_path is not None and self.request_rate != math.inf:
            raise ValueError(f"request_rate must be inf with dataset_path, not {self.request_rate:g}")

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
        """The smallest and the largest length."""
        return math.floor(mean * (1 - self.random_range_ratio)), math.ceil(mean * (1 + self.random_range_ratio))


def make_workload(args: WorkloadArgs, vocab_size: int) -> list[Arrival]:
    """The arrivals, sorted by time. The same arguments always give the same workload.

    Times, prompts, output lengths and clients are drawn independently, so changing the options of one leaves the others
    as they are.
    """
    check_int("vocab_size", vocab_size, minimum=1, below=2**31)
    if args.dataset_path is not None:
        return read_dataset(args.dataset_path, vocab_size, args.num_prompts)
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
    """Capped exponential lengths follow "How continuous batching enables 23x throughput" (Anyscale, 2023)."""
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
    scale = count / args.request_rate / (times[-1] or 1.0)  # in extreme bursts all intervals may be 0
    return [time * scale for time in times]


# ------------------------------------------------------------------ datasets


def read_dataset(path: str | Path, vocab_size: int, num_prompts: int | None = None) -> list[Arrival]:
    """The arrivals in a file of JSON lines, or in its first num_prompts lines, sorted by time.

    A line is {"time": seconds, "prompt": [token ids], "output_length": tokens} and may have "client", "priority" and
    "expected_output_length". Instead of "prompt" it may have "input_length", the number of tokens to make up, and
    "hash_ids", one for every 512 of these tokens: equal ids stand for equal tokens. Instead of "time" it may have
    "timestamp", in milliseconds; with it, this is the format of Mooncake's traces (FAST 2025).
    ValueError names file, line and field. Unknown fields are refused.
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
            f"run, so it must be at most {MAX_START}"
        )
    return arrivals


def _read_line(line: Any, number: int, vocab_size: int) -> Arrival:
    if not isinstance(line, dict):
        raise ValueError(f"it must be an object with fields, not {show(line)}")
    if unknown := sorted(line.keys() - {*DATASET_FIELDS}):
        raise ValueError(f"there is no field {show(unknown[0])}, only {', '.join(DATASET_FIELDS)}")
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
    """Greedy decoding of exactly output_len tokens."""
    return SamplingParams(temperature=0, max_tokens=arrival.output_len, ignore_eos=True)


def make_request(arrival: Arrival, request_id: str) -> Request:
    scheduling = SchedulingParams(
        priority=arrival.priority, client=arrival.client, expected_output_len=arrival.expected_output_len
    )
    return Request(request_id, arrival.prompt, sampling_params(arrival), scheduling)


MAX_IDLE = 1000  # rounds of `serve` without progress before it looks closer


def serve(
    core: EngineCore,
    arrivals: Iterable[Arrival],
    *,
    wait: Callable[[float], object],
    follow_up: Callable[[Request, float], Arrival | None] | None = None,
    make_request: Callable[[Arrival, str], Request] = make_request,
) -> list[Request]:
    """Serve the arrivals on an engine that has no other requests, until all have ended.

    A request is added before the first step that begins when it is due or later. Its latencies count from when it was
    due.

    wait: called with the seconds until the next arrival when there is nothing else to do: time.sleep, or
        VirtualClock.advance.
    follow_up: called with each request that ends in a step, and the seconds since the start. It may return one more
        arrival, also in seconds since the start. This makes closed loops.
    make_request: makes the request from an arrival and an id, "0", "1", …. Engine.make_request, for one, checks the
        model's limits.

    Returns the requests in the order in which they were due; of those due at the same time, in the given order.
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
            progressed = core.step()
            progress = bool(progressed)
            for request in progressed:
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
    """Raise RuntimeError if there were more idle rounds than tokens to compute: each step computes at least one."""
    unfinished = core.scheduler.requests.values()
    if num_idle > sum(request.num_tokens for request in unfinished):
        raise RuntimeError(f"no progress in {num_idle} steps or waits; {len(unfinished)} requests have not ended")
