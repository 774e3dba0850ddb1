"""Workloads: what is drawn, what is read, and when it arrives."""

import argparse
import itertools
import json
import math
import statistics
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
from conftest import eager, greedy
from hypothesis import given
from hypothesis import strategies as st

from minicb.blocks import BlockPool
from minicb.core import EngineCore
from minicb.memory import Memory
from minicb.observe.metrics import Metrics
from minicb.params import SchedulingParams
from minicb.plan import Event, Observer, StepPlan
from minicb.policies import POLICIES
from minicb.request import Request
from minicb.scheduler import Scheduler
from minicb.simulate.cost_model import VirtualClock
from minicb.simulate.workload import HASH_BLOCK, MAX_IDLE, Arrival, WorkloadArgs, make_workload, read_dataset, serve

VOCAB = 1000


def gaps(arrivals: list[Arrival]) -> list[float]:
    times = [0.0] + [arrival.time for arrival in arrivals]
    return [after - before for before, after in itertools.pairwise(times)]


# ------------------------------------------------------------------ random ones


def test_the_same_arguments_give_the_same_workload():
    args = WorkloadArgs(num_prompts=50, request_rate=3.0, random_range_ratio=0.5, random_prefix_len=5, num_clients=4)
    assert make_workload(args, VOCAB) == make_workload(args, VOCAB)
    other = make_workload(replace(args, seed=1), VOCAB)
    assert other[0].prompt[:5] != make_workload(args, VOCAB)[0].prompt[:5]
    assert len({arrivals[0].time for arrivals in (make_workload(args, VOCAB), other)}) == 2


def test_what_is_drawn_does_not_depend_on_the_rest():
    """So that two runs differ only in what was meant to differ."""
    args = WorkloadArgs(num_prompts=50, request_rate=3.0, random_range_ratio=0.5, num_clients=4)
    base = make_workload(args, VOCAB)
    columns = {name: [getattr(arrival, name) for arrival in base] for name in Arrival._fields}
    for changes, changed in (
        ({"request_rate": math.inf}, {"time"}),
        ({"burstiness": 0.5}, {"time"}),
        ({"random_output_len": 77}, {"output_len"}),
        ({"num_clients": 5}, {"client"}),
        ({"random_input_len": 99}, {"prompt"}),
    ):
        other = make_workload(replace(args, **changes), VOCAB)
        assert {name for name in columns if [getattr(arrival, name) for arrival in other] != columns[name]} == changed
    alike = [
        make_workload(replace(args, num_prompts=1, random_input_len=128, seed=seed), VOCAB)[0] for seed in range(9)
    ]
    assert any(len(arrival.prompt) != arrival.output_len for arrival in alike)
    assert [arrival[1:] for arrival in make_workload(replace(args, num_prompts=20), VOCAB)] == [
        a[1:] for a in base[:20]
    ]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, 1e6])
def test_intervals_have_the_rate_and_the_variation_asked_for(burstiness):
    """Of a gamma distribution of shape k the standard deviation is 1 / sqrt(k) of the mean. A gap is below the
    mean with a probability that tells the shape as well: of an exponential one 1 - 1/e."""
    arrivals = make_workload(
        WorkloadArgs(num_prompts=4000, request_rate=8.0, burstiness=burstiness, random_input_len=1), VOCAB
    )
    assert arrivals[-1].time == pytest.approx(500)
    drawn = gaps(arrivals)
    assert min(drawn) >= 0
    assert statistics.pstdev(drawn) * 8 == pytest.approx(burstiness**-0.5, rel=0.1)
    below = {0.25: 0.733, 1.0: 0.632, 4.0: 0.567, 1e6: 0.5}[burstiness]
    assert sum(gap < 1 / 8 for gap in drawn) / 4000 == pytest.approx(below, abs=0.03)


def test_a_rate_of_inf_is_all_at_once_and_a_burstiness_of_inf_is_a_clock():
    assert {arrival.time for arrival in make_workload(WorkloadArgs(num_prompts=9), VOCAB)} == {0.0}
    arrivals = make_workload(WorkloadArgs(num_prompts=9, request_rate=4.0, burstiness=math.inf), VOCAB)
    assert [arrival.time for arrival in arrivals] == pytest.approx([0.25 * (i + 1) for i in range(9)])
    # So bursty that all intervals are below what a float can hold.
    arrivals = make_workload(WorkloadArgs(num_prompts=5, request_rate=4.0, burstiness=1e-9), VOCAB)
    assert all(0 <= arrival.time <= 5 / 4 for arrival in arrivals)


def test_lengths_are_uniform_in_the_range_that_vllm_means():
    """10 with a ratio of 0.25 is floor(7.5) to ceil(12.5); the prefix is not part of it. Nobody asks for no output:
    2 with a ratio of 0.9 is 1 to 4, not 0 to 4."""
    args = WorkloadArgs(num_prompts=3000, random_input_len=10, random_output_len=10, random_range_ratio=0.25)
    arrivals = make_workload(replace(args, random_prefix_len=3), VOCAB)
    for lens in ([len(arrival.prompt) - 3 for arrival in arrivals], [arrival.output_len for arrival in arrivals]):
        assert set(lens) == set(range(7, 14))
        assert all(3000 / 7 - 110 < lens.count(length) < 3000 / 7 + 110 for length in range(7, 14))  # 5.7 sigma
    assert {len(arrival.prompt) for arrival in make_workload(replace(args, random_range_ratio=0.0), VOCAB)} == {10}
    short = make_workload(replace(args, random_output_len=2, random_range_ratio=0.9, random_prefix_len=1), VOCAB)
    lens = [arrival.output_len for arrival in short]
    assert set(lens) == {1, 2, 3, 4}
    assert lens.count(1) < 880  # 750 and 5.5 sigma; 0 counted as 1 would make it 1200


def test_tokens_are_random_but_for_a_prefix_that_all_share():
    arrivals = make_workload(WorkloadArgs(num_prompts=200, random_input_len=64, random_prefix_len=16), 10)
    assert len({tuple(arrival.prompt[:16]) for arrival in arrivals}) == 1
    assert len({tuple(arrival.prompt[16:32]) for arrival in arrivals}) == 200
    assert {token for arrival in arrivals for token in arrival.prompt} == set(range(10))


def test_exponential_outputs_have_the_mean_and_the_cap():
    args = WorkloadArgs(num_prompts=5000, random_input_len=1, random_output_len=100, output_distribution="exponential")
    free = [arrival.output_len for arrival in make_workload(args, VOCAB)]
    assert statistics.mean(free) == pytest.approx(100, rel=0.08)
    assert statistics.pstdev(free) == pytest.approx(100, rel=0.1)
    assert min(free) == 1
    capped = [arrival.output_len for arrival in make_workload(replace(args, max_output_len=100), VOCAB)]
    assert capped == [min(100, length) for length in free]
    uniform = make_workload(WorkloadArgs(num_prompts=5, random_output_len=9, max_output_len=4), VOCAB)
    assert {arrival.output_len for arrival in uniform} == {4}


def test_each_request_has_a_client():
    clients = [arrival.client for arrival in make_workload(WorkloadArgs(num_prompts=400, num_clients=4), VOCAB)]
    assert all(60 < clients.count(f"client-{number}") < 140 for number in range(4))
    assert {arrival.client for arrival in make_workload(WorkloadArgs(num_prompts=2), VOCAB)} == {"default"}
    assert len(make_workload(WorkloadArgs(random_input_len=1), VOCAB)) == 1000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("num_prompts", value) for value in (0, -1, 1.5, True, "9")],
        *[("request_rate", value) for value in (0, -1.0, math.nan, "inf", None)],
        *[("burstiness", value) for value in (0, -1.0, math.nan, 1e7, 1e308)],
        *[("random_input_len", value) for value in (0, 0.5, None)],
        *[("random_output_len", value) for value in (0, None)],
        *[("random_range_ratio", value) for value in (1.0, -0.1, math.nan)],
        *[("random_prefix_len", value) for value in (-1, None)],
        *[("output_distribution", value) for value in ("normal", None)],
        *[("max_output_len", value) for value in (0, -3)],
        *[("num_clients", value) for value in (0, None)],
        *[("seed", value) for value in (None, 0.5)],
    ],
)
def test_an_argument_out_of_range_is_named(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be .*, not "):
        WorkloadArgs(**{name: value})


def test_arguments_that_do_not_go_together_are_named():
    with pytest.raises(ValueError, match="random_input_len is 1, .*allows empty prompts"):
        WorkloadArgs(random_input_len=1, random_range_ratio=0.5)
    WorkloadArgs(random_input_len=1, random_range_ratio=0.5, random_prefix_len=1)
    with pytest.raises(ValueError, match="request_rate must be inf with dataset_path"):
        WorkloadArgs(dataset_path="dataset.jsonl", request_rate=1.0)
    with pytest.raises(ValueError, match="vocab_size must be an integer >= 1"):
        make_workload(WorkloadArgs(), 0)


def test_the_command_line_has_an_option_for_each_field_under_vllms_name():
    parser = argparse.ArgumentParser()
    WorkloadArgs.add_arguments(parser)
    assert WorkloadArgs.from_args(parser.parse_args([])) == WorkloadArgs()
    line = (
        "--num-prompts 7 --request-rate 2.5 --burstiness 0.5 --random-input-len 11 --random-output-len 12 "
        "--random-range-ratio 0.1 --random-prefix-len 3 --output-distribution exponential --max-output-len 40 "
        "--num-clients 2 --seed 5"
    )
    args = WorkloadArgs.from_args(parser.parse_args(line.split()))
    assert args == WorkloadArgs(
        num_prompts=7,
        request_rate=2.5,
        burstiness=0.5,
        random_input_len=11,
        random_output_len=12,
        random_range_ratio=0.1,
        random_prefix_len=3,
        output_distribution="exponential",
        max_output_len=40,
        num_clients=2,
        seed=5,
    )
    assert WorkloadArgs.from_args(parser.parse_args(["--dataset-path", "a"])).dataset_path == "a"
    assert WorkloadArgs.from_args(parser.parse_args(["--request-rate", "inf"])).request_rate == math.inf
    assert all(f"--{item.name.replace('_', '-')}" in parser.format_help() for item in fields(WorkloadArgs))
    with pytest.raises(ValueError, match="num_prompts"):
        WorkloadArgs.from_args(parser.parse_args(["--num-prompts", "0"]))


# ------------------------------------------------------------------ datasets


def write(folder: Path, *lines: object) -> Path:
    path = folder / "dataset.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_dataset_is_read_and_sorted(tmp_path):
    path = write(
        tmp_path,
        {"time": 2.5, "prompt": [1, 2, 3], "output_length": 4, "client": "a", "priority": -1},
        "",
        {"time": 0, "prompt": [9], "output_length": 1, "expected_output_length": 3},
        {"time": 2.5, "input_length": 700, "output_length": 5},
    )
    first, second, third = read_dataset(path, VOCAB)
    assert first == Arrival(0.0, [9], 1, "default", 0, 3)
    assert second == Arrival(2.5, [1, 2, 3], 4, "a", -1, None)
    assert (len(third.prompt), third.output_len) == (700, 5)
    assert all(0 <= token < VOCAB for token in third.prompt) and len(set(third.prompt)) > 100
    assert read_dataset(path, VOCAB) == [first, second, third]
    assert read_dataset(path, VOCAB, num_prompts=2) == [first, second]
    args = WorkloadArgs(dataset_path=str(path), num_prompts=1)
    assert make_workload(args, VOCAB) == [second]
    assert len(make_workload(replace(args, num_prompts=None), VOCAB)) == 3


def test_lines_of_the_same_length_get_tokens_of_their_own(tmp_path):
    line = {"time": 0, "input_length": 40, "output_length": 1}
    first, second = read_dataset(write(tmp_path, line, line), VOCAB)
    assert first.prompt[:4] != second.prompt[:4]


def test_mooncakes_format(tmp_path):
    """The first lines of its conversation trace, with other times: milliseconds; ids of blocks of 512 tokens."""
    path = write(
        tmp_path,
        {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": list(range(14))},
        {"timestamp": 3052, "input_length": 7322, "output_length": 490, "hash_ids": [0, *range(14, 28)]},
        {"timestamp": 3052, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1]},
    )
    first, second, third = read_dataset(path, VOCAB)
    assert [arrival.time for arrival in (first, second, third)] == [0.0, 3.052, 3.052]
    assert [len(arrival.prompt) for arrival in (first, second, third)] == [6758, 7322, 1024]
    assert [arrival.output_len for arrival in (first, second, third)] == [500, 490, 1]
    assert first.prompt[:HASH_BLOCK] == second.prompt[:512]
    assert first.prompt[512:516] != second.prompt[512:516]
    assert first.prompt[:1024] == third.prompt
    assert third.prompt[:4] != third.prompt[512:516]


GOOD = {"time": 1, "prompt": [1], "output_length": 1}
LONG = {"time": 1, "input_length": 513, "output_length": 1}


def without(name: str) -> dict:
    return {key: value for key, value in GOOD.items() if key != name}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting property name"),
        ("7" * 5000, "Exceeds the limit|integer"),
        ("[" * 100_000, "recursion"),
        ("[1]", "it must be an object"),
        (GOOD | {"timestamp": 1}, "either time or timestamp, not both"),
        (without("time"), "either time or timestamp, not neither"),
        (GOOD | {"time": -1}, "time must be a finite number >= 0, not -1"),
        (GOOD | {"time": math.nan}, "time must be a finite number >= 0, not nan"),
        (GOOD | {"time": math.inf}, "time must be a finite number >= 0, not inf"),
        (GOOD | {"time": "1"}, "time must be a finite number >= 0, not '1'"),
        (without("time") | {"timestamp": None}, "timestamp must be"),
        (without("output_length"), "output_length must be an integer >= 1, not None"),
        (GOOD | {"output_length": 0}, "output_length must be an integer >= 1, not 0"),
        (GOOD | {"output_length": 1.0}, "output_length must be an integer >= 1, not 1.0"),
        (GOOD | {"expected_output_length": 0}, "expected_output_length must be an integer >= 1"),
        (GOOD | {"client": 3}, "client must be a string, not 3"),
        (GOOD | {"priority": 0.5}, "priority must be an integer"),
        (GOOD | {"priority": 2**63}, "priority must be an integer"),
        (GOOD | {"output_len": 1}, "there is no field 'output_len', only time, .*priority"),
        (GOOD | {"input_length": 1}, "either prompt or input_length, not both"),
        (without("prompt"), "either prompt or input_length, not neither"),
        (GOOD | {"prompt": []}, r"prompt must be a list of at least 1 token id, not \[\]"),
        (GOOD | {"prompt": "text"}, "prompt must be a list of at least 1 token id, not 'text'"),
        (GOOD | {"prompt": [1, VOCAB]}, "prompt token id must be an integer >= 0 and < 1000, not 1000"),
        (GOOD | {"prompt": [-1]}, "prompt token id must be"),
        (GOOD | {"hash_ids": [1]}, "hash_ids go with input_length"),
        (LONG | {"input_length": 0}, "input_length must be an integer >= 1, not 0"),
        (LONG | {"hash_ids": [1]}, r"hash_ids must be a list of 2, one for every 512 tokens, not \[1\]"),
        (LONG | {"hash_ids": [1, 2, 3]}, "hash_ids must be a list of 2"),
        (LONG | {"hash_ids": 3}, "hash_ids must be a list of 2"),
        (LONG | {"hash_ids": [1, -1]}, "hash_ids must be an integer >= 0, not -1"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    path = write(tmp_path, GOOD, "", line, GOOD)
    with pytest.raises(ValueError, match=rf"dataset\.jsonl, line 3: .*({message})"):
        read_dataset(path, VOCAB)
    assert len(read_dataset(path, VOCAB, num_prompts=1)) == 1


def test_a_dataset_that_is_no_text_or_holds_nothing_is_named(tmp_path):
    path = write(tmp_path, GOOD)
    path.write_bytes(path.read_bytes() + b'{"client": "\xff"}\n')
    with pytest.raises(ValueError, match=r"dataset\.jsonl, line 2: "):
        read_dataset(path, VOCAB)
    with pytest.raises(ValueError, match=r"dataset\.jsonl: there is no request in it"):
        read_dataset(write(tmp_path, "", " "), VOCAB)
    with pytest.raises(FileNotFoundError):
        read_dataset(tmp_path / "nowhere", VOCAB)


# ------------------------------------------------------------------ serve


class Ticking:
    """A runner whose steps take a second each, whatever is in them."""

    def __init__(self, clock: VirtualClock):
        self.clock = clock

    def execute(self, plan: StepPlan) -> list[int | None]:
        self.clock.advance(1.0)
        return [7 for chunk in plan.chunks if chunk.needs_sampling]


class Starts(Observer):
    """When requests started, and the most that were under way at a time."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}
        self.under_way = self.most = 0

    def on_event(self, event: Event) -> None:
        if event.kind == "started":
            self.times[event.request.request_id] = event.time
        self.under_way += {"queued": 1, "finished": -1}.get(event.kind, 0)
        self.most = max(self.most, self.under_way)


def make_core(
    now: float = 0.0,
    *,
    policy: str = "fcfs",
    slots: int = 8,
    budget: int = 64,
    num_blocks: int = 1 + 64,
    mode="recompute",
) -> EngineCore:
    memory = Memory(BlockPool(num_blocks, 4, enable_prefix_caching=True), BlockPool(1 + 16, 4), mode)
    limits = {"max_num_seqs": slots, "max_num_batched_tokens": budget, "max_model_len": 4096}
    clock = VirtualClock(now)
    return EngineCore(Scheduler(memory, POLICIES[policy](), **limits), Ticking(clock), clock, [Metrics(), Starts()])


def test_requests_arrive_when_they_are_due_and_latencies_count_from_then():
    """Steps take a second. One that is due at 0.5 is late because a step is under way, which counts as waiting;
    the one at 10.25 finds an engine that waited for it."""
    core, waits = make_core(now=100.0), []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        core.clock.advance(seconds)

    arrivals = [Arrival(10.25, [3], 1), Arrival(0.0, [1], 1), Arrival(0.5, [2], 2, "c", -3, 9)]
    requests = serve(core, arrivals, wait=wait)
    assert [request.request_id for request in requests] == ["0", "1", "2"]
    assert [request.token_ids[0] for request in requests] == [1, 2, 3]
    assert [request.arrival_time for request in requests] == [100.0, 100.5, 110.25]
    assert core.observers[1].times == {"0": 100.0, "1": 101.0, "2": 110.25}
    assert [request.metrics.ttft for request in requests] == [1.0, 1.5, 1.0]
    assert waits == [7.25]  # from 103, when the second had both its tokens
    late = requests[1]
    assert (late.scheduling, late.num_output_tokens) == (
        SchedulingParams(client="c", priority=-3, expected_output_len=9),
        2,
    )
    assert (late.params.temperature, late.params.max_tokens, late.params.ignore_eos) == (0, 2, True)


def test_one_step_serves_all_that_are_due_and_ties_keep_their_order():
    core = make_core(slots=1)
    arrivals = [Arrival(1.0, [token], 1) for token in range(5)] + [Arrival(0.5, [9], 1)]
    requests = serve(core, arrivals, wait=core.clock.advance)
    assert [request.token_ids[0] for request in requests] == [9, 0, 1, 2, 3, 4]
    assert core.clock() == 6.5
    assert serve(core, [], wait=core.clock.advance) == []


def test_a_closed_loop_has_no_more_under_way_than_it_has_users():
    """Three users. Each sends four requests and thinks for 2.5 seconds in between."""
    core, seen = make_core(), []

    def follow_up(request: Request, now: float) -> Arrival | None:
        seen.append((request.scheduling.client, now, request.num_output_tokens))
        done = sum(client == request.scheduling.client for client, *_ in seen)
        return Arrival(now + 2.5, request.token_ids, 2, request.scheduling.client) if done < 4 else None

    first = [Arrival(0.25 * number, [number], 2, f"user-{number}") for number in range(3)]
    requests = serve(core, first, wait=core.clock.advance, follow_up=follow_up)
    assert len(requests) == len(seen) == 12
    assert core.observers[1].most == 3
    assert all(num_tokens == 2 for *_, num_tokens in seen)
    for user in range(3):
        own = [request for request in requests if request.scheduling.client == f"user-{user}"]
        ends = [now for client, now, _ in seen if client == f"user-{user}"]
        assert [request.arrival_time for request in own] == [0.25 * user] + [end + 2.5 for end in ends[:-1]]
        assert [request.num_prompt_tokens for request in own] == [1, 3, 5, 7]
    assert all(request.num_tokens > 0 and request.finish_reason == "length" for request in requests)


def test_requests_may_be_made_by_the_caller():
    core = make_core()
    make = lambda arrival, request_id: Request(f"mine {request_id}", arrival.prompt, greedy(arrival.output_len + 1))
    requests = serve(core, [Arrival(0.0, [1], 1), Arrival(1.0, [2], 2)], wait=core.clock.advance, make_request=make)
    assert [(request.request_id, request.num_output_tokens) for request in requests] == [("mine 0", 2), ("mine 1", 3)]


def test_times_of_a_closed_loop_count_from_the_start():
    core, now_is = make_core(now=50.0), []
    serve(core, [Arrival(2.0, [1], 3)], wait=core.clock.advance, follow_up=lambda request, now: now_is.append(now))
    assert now_is == [5.0]


def test_an_engine_that_makes_no_progress_is_an_error():
    core = make_core()
    core.scheduler.schedule = lambda now: StepPlan()
    with pytest.raises(RuntimeError, match="no progress in 1001 steps or waits; 2 requests have not ended"):
        serve(core, [Arrival(0.0, [1], 1)] * 2, wait=core.clock.advance)


def test_a_wait_that_does_not_wait_is_an_error_and_one_that_is_short_is_none():
    with pytest.raises(RuntimeError, match="no progress"):
        serve(make_core(), [Arrival(1.0, [1], 1)], wait=lambda seconds: None)
    core = make_core()
    wait = lambda seconds: core.clock.advance(min(seconds, 0.001))
    (request,) = serve(core, [Arrival(2.0, [1], 1)], wait=wait)
    assert request.metrics.ttft == 1.0


def test_a_prefill_of_many_steps_is_progress():
    core = make_core(budget=1, num_blocks=1 + 500)
    (request,) = serve(core, [Arrival(0.0, list(range(MAX_IDLE + 500)), 2)], wait=core.clock.advance)
    assert core.num_steps == MAX_IDLE + 501
    assert request.num_output_tokens == 2


@pytest.mark.parametrize("wrong", [math.nan, math.inf, None])
def test_an_arrival_at_no_time_is_an_error(wrong):
    with pytest.raises(ValueError, match="arrival time must be a finite number"):
        serve(make_core(), [Arrival(wrong, [1], 1)], wait=lambda seconds: None)


def test_a_real_engine_checks_and_serves(tiny):
    """Its tokens are those of generate; its clock is real, so arrivals are late but never early."""
    engine = eager(tiny)
    starts = Starts()
    engine.core.observers.append(starts)

    def make(arrival: Arrival, request_id: str) -> Request:
        return engine.make_request(arrival.prompt, greedy(arrival.output_len, ignore_eos=True), request_id)

    arrivals = make_workload(
        WorkloadArgs(
            num_prompts=6, request_rate=200.0, random_input_len=9, random_output_len=5, random_range_ratio=0.5
        ),
        engine.vocab_size,
    )
    began = time.perf_counter()
    requests = serve(engine.core, arrivals, wait=time.sleep, make_request=make)
    assert [request.num_output_tokens for request in requests] == [arrival.output_len for arrival in arrivals]
    for request, arrival in zip(requests, arrivals, strict=True):
        assert request.arrival_time >= began + arrival.time
        assert starts.times[request.request_id] >= request.arrival_time
        alone = eager(tiny)
        alone.submit(same := alone.make_request(arrival.prompt, greedy(arrival.output_len, ignore_eos=True)))
        while alone.has_unfinished_requests():
            alone.step()
        assert request.output_token_ids == same.output_token_ids
    with pytest.raises(ValueError, match="max_model_len is 256"):
        serve(engine.core, [Arrival(0.0, [1] * 300, 1)], wait=time.sleep, make_request=make)


@given(
    arrivals=st.lists(
        st.builds(
            Arrival,
            time=st.sampled_from([0.0, 0.1, 1.0]) | st.floats(0, 30),
            prompt=st.lists(st.integers(0, 3), min_size=1, max_size=24),
            output_len=st.integers(1, 12),
            client=st.sampled_from("ab"),
            priority=st.integers(-1, 1),
            expected_output_len=st.none() | st.integers(1, 20),
        ),
        max_size=12,
    ),
    policy=st.sampled_from(sorted(POLICIES)),
    slots=st.integers(1, 4),
    budget=st.integers(1, 40),
    num_blocks=st.integers(10, 20),
    mode=st.sampled_from(["swap", "recompute"]),
    now=st.floats(0, 1e9),
    follow=st.booleans(),
)
def test_whatever_arrives_is_served_in_order_and_never_early(
    arrivals, policy, slots, budget, num_blocks, mode, now, follow
):
    core = make_core(now, policy=policy, slots=slots, budget=budget, num_blocks=num_blocks, mode=mode)
    made = list[Arrival]()

    def follow_up(request: Request, now: float) -> Arrival | None:
        if len(made) >= len(arrivals) // 2:
            return None
        made.append(Arrival(now + 0.5, request.token_ids[:9], 2, f"after {request.request_id}"))
        return made[-1]

    requests = serve(core, arrivals, wait=core.clock.advance, follow_up=follow_up if follow else None)
    assert len(requests) == len(arrivals) + len(made)
    expected = sorted(arrivals + made, key=lambda arrival: arrival.time)
    assert [request.arrival_time for request in requests] == [now + arrival.time for arrival in expected]
    if not follow:
        assert [request.token_ids[: request.num_prompt_tokens] for request in requests] == [a.prompt for a in expected]
        assert [request.num_output_tokens for request in requests] == [a.output_len for a in expected]
    starts = core.observers[1]
    for number, request in enumerate(requests):
        assert request.request_id == str(number)
        assert request.arrival == number
        assert request.finish_reason == "length"
        assert starts.times[request.request_id] >= request.arrival_time
    core.scheduler.check_invariants()


def test_dates_in_place_of_seconds_are_refused(tmp_path):
    """Else a run would sleep until then."""
    path = tmp_path / "dataset.jsonl"
    path.write_text('{"timestamp": 1690000000000, "input_length": 10, "output_length": 3}\n')
    with pytest.raises(ValueError, match=r"dataset.jsonl: the first request is due after 1.69e\+09 seconds"):
        read_dataset(path, 100)
    path.write_text('{"time": 86400, "input_length": 10, "output_length": 3}\n')
    assert read_dataset(path, 100)[0].time == 86400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, 2**31) for name in ("num_prompts", "random_input_len", "random_output_len", "max_output_len")),
        *(("num_clients", 2**31), ("random_prefix_len", 2**31), ("request_rate", 1e-7), ("dataset_path", 5)),
    ],
)
def test_numbers_that_nothing_can_be_made_of_are_named(field, value):
    with pytest.raises(ValueError, match=f"^{field} must be "):
        WorkloadArgs(**{field: value})


def test_a_request_that_has_no_place_is_named():
    core = make_core()
    longest = core.scheduler.max_model_len
    arrivals = [Arrival(0.0, [1], 1), Arrival(0.0, [1] * longest, 1)]
    with pytest.raises(ValueError, match="^request 1 of the workload: prompt has "):
        serve(core, arrivals, wait=lambda seconds: None)
