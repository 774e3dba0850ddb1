"""Several samples of a prompt (`SamplingParams.n`): each is what it would be alone, and the prompt is there once.

First the scheduler with a toy for a model, then the engine.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from unittest import mock

import pytest
from conftest import check_invariants, eager, greedy, run_to_end, take_events
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import (
    CLOSE,
    LONGEST_OUTPUT,
    MIXED,
    MODES,
    InterruptEverywhere,
    Space,
    poison_free_blocks,
    prompts,
    spaces,
)
from test_engine import make_prompt as engine_prompt
from test_scheduler import (
    EOS,
    Settings,
    ToyModel,
    assert_nothing_is_held,
    checked_step,
    lengths,
    make_prompt,
    next_token,
    settings_strategy,
    step,
    until,
)
from test_scheduler import make_scheduler as make_checked_scheduler

from minicb import LLM, Engine, SamplingParams
from minicb.memory import Memory
from minicb.plan import StepPlan
from minicb.policies import FCFS
from minicb.request import Group, Request, RequestState
from minicb.scheduler import Scheduler


def make_samples(name: str, prompt: list[int], params: SamplingParams, **kwargs) -> list[Request]:
    samples = [Request(name, prompt, params, index=index, **kwargs) for index in range(params.n)]
    if params.n > 1:
        group = Group(samples)
        for sample in samples:
            sample.group = group
    return samples


def add(scheduler: Scheduler, name: str, num_prompt_tokens: int, n: int, max_tokens: int = 100) -> list[Request]:
    params = SamplingParams(n=n, seed=0, max_tokens=max_tokens)
    samples = make_samples(name, list(range(num_prompt_tokens)), params)
    scheduler.add(samples[0])
    return samples


class CheckedMemory(Memory):
    """Says what it would say if it looked a prefix up every time."""

    def find_room(self, request, num_free):
        blocks, cached = super().find_room(request, num_free), self.find_prefix(request)
        assert blocks == (cached if self.num_missing(request, cached) <= num_free else None)
        return blocks


def make_scheduler(**kwargs) -> Scheduler:
    scheduler = make_checked_scheduler(**kwargs)
    old = scheduler.memory
    scheduler.memory = CheckedMemory(old.pool, old.host_pool, old.preemption_mode, old.costs)
    return scheduler


def shared_blocks(request: Request, block_size: int) -> int:
    """Of a prompt, so many blocks needn't be computed twice: the last token always is, because its logits are wanted."""
    return (request.num_prompt_tokens - 1) // block_size


class InOrder(FCFS):
    """First come, first served; but the oldest of all may be a sample that waits for another, and so not run."""


class SampleModel(ToyModel):
    """A toy whose tokens depend on the seed too, and which looks at each plan for what samples promise.

    errors: sample -> number of its output token for which there are no finite logits.
    """

    def __init__(self, scheduler: Scheduler, errors: dict[Request, int] | None = None):
        super().__init__(scheduler.pool.block_size)
        self.scheduler, self.errors = scheduler, errors or {}
        self.parted: set[Group] = set()  # two of its samples compute the prompt, as nobody has it any more

    def execute(self, plan: StepPlan) -> list[int | None]:
        self.check_order()
        self.check_sharing()
        tokens = []
        sampling = [chunk.request for chunk in plan.chunks if chunk.needs_sampling]
        for request, token in zip(sampling, super().execute(plan), strict=True):
            said = self.sampled[request]
            said[-1] = next_token([token, request.seed])
            tokens.append(said[-1])
            if self.errors.get(request) == request.num_output_tokens:
                said.pop()
                tokens[-1] = None
        return tokens

    def check_order(self) -> None:
        """Samples that waited for another have their old place: nobody who came later starts before them."""
        scheduler = self.scheduler
        started = [event.request.arrival for event in take_events(scheduler) if event.kind == "started"]
        if started and type(scheduler.policy) is InOrder and not scheduler.long_prefill_token_threshold:
            queued = [r.arrival for r in scheduler.waiting if r.key in scheduler.requests and not r.has_started]
            assert not queued or max(started) < min(queued)

    def check_sharing(self) -> None:
        """Whoever starts or returns finds the prompt's blocks if a sample holds them. Without prefix caching nobody
        else does."""
        pool, running = self.scheduler.pool, self.scheduler.running
        owners: dict[int, object] = {}
        for request in running:
            for block in request.block_table:
                assert owners.setdefault(block, request.group or request) is (request.group or request) or (
                    pool.enable_prefix_caching
                )
        for group in {request.group for request in running} - {None}:
            count = shared_blocks(group.samples[0], pool.block_size)
            samples = [request for request in running if request.group is group]
            tables = {tuple(request.block_table[:count]) for request in samples}
            have = {tuple(r.block_table[:count]) for r in samples if r.num_registered_blocks >= count}
            if len(tables) > 1 and len(have) != 1:
                self.parted.add(group)
            if have and group not in self.parted and group.samples[0].token_ids[0] != 0:  # nobody else begins so
                assert len(tables) == 1


def alone(sample: Request, longest: int) -> tuple[list[int], str]:
    """Tokens and end of a request with n = 1 and the sample's seed, with nobody beside it."""
    params = replace(sample.params, n=1, seed=sample.seed)
    prompt = sample.token_ids[: sample.num_prompt_tokens]
    request = Request("alone", prompt, params, eos_token_ids=EOS)
    scheduler = make_checked_scheduler(max_model_len=longest, max_num_batched_tokens=100)
    model = SampleModel(scheduler)
    scheduler.add(request)
    for _ in until(lambda: not scheduler.requests):
        plan = scheduler.schedule()
        scheduler.update(plan, model.execute(plan))
    return request.output_token_ids, request.finish_reason


@dataclass
class Prompted:
    """One prompt of a drawn schedule."""

    wait: int  # steps since the one before
    num_prompt_tokens: int
    num_shared_tokens: int  # so many of them are those of everybody else
    params: SamplingParams
    priority: int
    client: str
    aborts: list[tuple[int, int]]  # after so many steps this sample
    errors: dict[int, int]  # of this sample at this output token

    def samples(self, number: int) -> list[Request]:
        prompt = make_prompt(number, self.num_prompt_tokens, self.num_shared_tokens)
        if not self.num_shared_tokens:
            prompt[0] += 1000 * (number + 1)  # not 0, as all others' are
        kwargs = {"priority": self.priority, "client": self.client}
        return make_samples(f"{number}/", prompt, self.params, eos_token_ids=EOS, **kwargs)


@st.composite
def crowds(draw) -> tuple[Settings, list[Prompted]]:
    chosen = draw(settings_strategy())
    if chosen.make_policy is FCFS:
        chosen = replace(chosen, make_policy=InOrder)
    some = st.tuples(st.integers(0, 12), st.integers(0, 4))
    at_once = st.builds(
        lambda after, order: [(after, index) for index in order], st.integers(0, 12), st.permutations(range(5))
    )
    prompted = st.builds(
        Prompted,
        wait=st.sampled_from([0, 0, 1, 3]),
        num_prompt_tokens=st.integers(1, min(24, chosen.longest - 1)),
        num_shared_tokens=st.sampled_from([0, 0, 5, 100]),
        params=st.builds(
            SamplingParams,
            n=st.sampled_from([1, 2, 3, 3, 5]),
            seed=st.integers(-2, 2),
            max_tokens=st.sampled_from([1, 2, 9, 14]),
            min_tokens=st.integers(0, 1),
            stop_token_ids=st.none() | st.just(list(range(0, 300, 5))),
        ),
        priority=st.integers(0, 3),
        client=st.sampled_from("abc"),
        aborts=st.just([]) | st.lists(some, max_size=3) | at_once,
        errors=st.just({}) | st.dictionaries(st.integers(0, 4), st.integers(0, 3), max_size=3) | st.just({0: 0}),
    )
    return chosen, draw(st.lists(prompted, min_size=1, max_size=5))


@given(crowds())
@settings(max_examples=8 * settings.default.max_examples)
def test_under_any_traffic_each_sample_is_a_request_of_its_own(chosen_and_prompts):
    """Its tokens are those it has alone; blocks add up in every step, prompts are shared, nobody waits for ever."""
    chosen, drawn = chosen_and_prompts
    arguments = dict(vars(chosen))
    scheduler = make_scheduler(policy=arguments.pop("make_policy")(), **arguments)
    calls: dict[int, list[Callable[[], object]]] = {}
    time, everybody, errors = 0, list[Request](), dict[Request, int]()
    for number, prompted in enumerate(drawn):
        time += prompted.wait
        samples = prompted.samples(number)
        everybody += samples
        calls.setdefault(time, []).append(functools.partial(scheduler.add, samples[0]))
        errors |= {samples[index]: place for index, place in prompted.errors.items() if index < len(samples)}
        for after, index in prompted.aborts:
            if index < len(samples):
                abort = functools.partial(scheduler.abort, samples[index].request_id, index=index)
                calls.setdefault(time + after, []).append(abort)
    model = SampleModel(scheduler, errors)
    for now in itertools.count():
        for call in calls.get(now, []):
            call()
            scheduler.check_invariants()
        if now >= time and not scheduler.requests:
            break
        assert now < 2000, "no end in sight"
        checked_step(scheduler, model)
    assert_nothing_is_held(scheduler)
    for sample in everybody:
        expected, reason = alone(sample, chosen.longest)
        assert sample.state is RequestState.FINISHED
        assert sample.output_token_ids == expected[: sample.num_output_tokens]
        if sample.finish_reason == "error":
            assert sample.num_output_tokens == errors[sample]
        elif sample.finish_reason != "abort":
            assert (sample.num_output_tokens, sample.finish_reason) == (len(expected), reason)
    [last] = make_samples("last", [1], SamplingParams(max_tokens=1))
    scheduler.add(last)
    step(scheduler)
    assert last.finish_reason == "length"


# ---------------------------------------------------------------------------- one by one


@given(
    n=st.integers(2, 6),
    num_prompt_tokens=st.integers(1, 30),
    block_size=st.integers(1, 9),
    budget=st.integers(6, 40),
    caching=st.booleans(),
    strangers=st.integers(1, 2),
)
def test_the_prompt_is_computed_once_and_its_blocks_are_there_once(
    n, num_prompt_tokens, block_size, budget, caching, strangers
):
    """The others compute what lies behind the last full block that doesn't hold the last token. Without prefix
    caching a stranger with the same prompt, of one sample or several, finds nothing, even if it comes last."""
    scheduler = make_scheduler(block_size=block_size, max_num_batched_tokens=budget, enable_prefix_caching=caching)
    model, samples = SampleModel(scheduler), add(scheduler, "a", num_prompt_tokens, n)
    shared = shared_blocks(samples[0], block_size)
    prefilled = dict.fromkeys(samples, 0)
    for _ in until(lambda: all(sample.num_output_tokens > 1 for sample in samples)):
        plan = checked_step(scheduler, model)
        for request, start, length, *_ in plan.chunks:
            prefilled[request] += length if start < num_prompt_tokens else 0
    assert prefilled[samples[0]] == num_prompt_tokens
    assert {prefilled[sample] for sample in samples[1:]} == {num_prompt_tokens - shared * block_size}
    assert samples[0].num_cached_tokens == 0
    assert {sample.num_cached_tokens for sample in samples[1:]} == {shared * block_size}
    tables = {tuple(sample.block_table[:shared]) for sample in samples}
    assert len(tables) == 1
    stranger = add(scheduler, "b", num_prompt_tokens, strangers)[0]
    for _ in until(lambda: stranger.num_output_tokens):
        checked_step(scheduler, model)
    assert stranger.num_cached_tokens == (shared * block_size if caching else 0)
    assert (tuple(stranger.block_table[:shared]) in tables) == (caching or not shared)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("caching", [False, True])
def test_a_sample_that_was_preempted_shares_the_prompt_again(mode, caching):
    """Also when the one that computed it has been aborted: whoever is left holds it."""
    scheduler = make_scheduler(
        num_blocks=1 + 10, num_cpu_blocks=100, preemption_mode=mode, enable_prefix_caching=caching
    )
    model, samples = SampleModel(scheduler), add(scheduler, "a", 10, 3, max_tokens=18)
    for _ in until(lambda: samples[2].num_preemptions):
        checked_step(scheduler, model)
    prompt = list(samples[0].block_table[:2])
    assert prompt == list(samples[1].block_table[:2])
    assert not samples[2].block_table
    scheduler.abort("a", index=0)
    for _ in until(lambda: samples[2].state is RequestState.RUNNING):
        checked_step(scheduler, model)
    assert list(samples[1].block_table[:2]) == list(samples[2].block_table[:2]) == prompt


def test_after_an_interruption_the_prompt_is_computed_once_again():
    """All blocks are gone, and all samples have tokens; the first computes it for the others as it did at first."""
    scheduler = make_scheduler(max_num_batched_tokens=100)
    model, samples = SampleModel(scheduler), add(scheduler, "a", 10, 3)
    for _ in range(3):
        checked_step(scheduler, model)
    scheduler.recover()
    assert lengths(checked_step(scheduler, model)) == {"a/0": 13}
    assert lengths(checked_step(scheduler, model)) == {"a/0": 1, "a/1": 4, "a/2": 4}
    assert len({tuple(sample.block_table[:2]) for sample in samples}) == 1


def test_those_that_wait_for_the_prompt_are_in_nobodys_way_and_keep_their_place():
    """While a0 computes a long prompt, b and c go on; when it is there, a1 and a2 start before d, which came later."""
    scheduler = make_scheduler(max_num_batched_tokens=8, max_num_seqs=5)
    add(scheduler, "a", 20, 3)
    add(scheduler, "b", 1, 2)
    assert lengths(step(scheduler)) == {"a/0": 8}
    assert lengths(step(scheduler)) == {"a/0": 8}
    assert lengths(step(scheduler)) == {"a/0": 4, "b/0": 1}
    add(scheduler, "c", 1, 1)
    add(scheduler, "d", 1, 1)
    assert lengths(step(scheduler)) == {"a/0": 1, "b/0": 1, "a/1": 4, "a/2": 2}
    assert lengths(step(scheduler)) == {"a/0": 1, "b/0": 1, "a/1": 1, "a/2": 2, "b/1": 1}
    assert [request.name for request in scheduler.waiting] == ["c", "d"]


ENDS = {
    "aborted while it waits": lambda scheduler, sample: scheduler.abort(sample.request_id, index=sample.index),
    "aborted half-way": lambda scheduler, sample: (
        step(scheduler),
        scheduler.abort(sample.request_id, index=sample.index),
    ),
    "aborted after its first token": lambda scheduler, sample: (run_first(scheduler), scheduler.abort("a", index=0)),
    "no finite logits": lambda scheduler, sample: run_first(scheduler, None),
    "its first token ends it": lambda scheduler, sample: run_first(scheduler, 8),
}


def run_first(scheduler: Scheduler, token: int | None = 0) -> None:
    for _ in until(lambda: scheduler.requests["a", 0].num_pending <= 8):
        step(scheduler)
    step(scheduler, token)


def test_a_static_batch_takes_all_samples_at_once():
    """Nobody could join it later, so each computes the prompt, as where a prompt is copied into several rows."""
    scheduler = make_scheduler(batching="static", max_num_batched_tokens=64)
    add(scheduler, "a", 6, 3, max_tokens=2)
    add(scheduler, "b", 6, 2, max_tokens=2)
    assert lengths(step(scheduler)) == {"a/0": 6, "a/1": 6, "a/2": 6, "b/0": 6, "b/1": 6}
    step(scheduler)
    assert not scheduler.requests
    add(scheduler, "c", 6, 2)
    scheduler.recover()
    assert lengths(step(scheduler)) == {"c/0": 6, "c/1": 6}


@pytest.mark.parametrize("preempted", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_whatever_becomes_of_the_first_the_others_run(end, preempted):
    """The next in line computes the prompt if nobody has."""
    scheduler = make_scheduler(max_num_batched_tokens=8, num_cpu_blocks=20)
    params = SamplingParams(n=3, max_tokens=4)
    samples = make_samples("a", list(range(20)), params, eos_token_ids=EOS)
    scheduler.add(samples[0])
    if preempted:  # before its first token
        step(scheduler)
        others = scheduler.pool.allocate(scheduler.pool.num_free)
        scheduler.schedule()
        assert samples[0].state is RequestState.SWAPPED
        scheduler.pool.free(others)
    ENDS[end](scheduler, samples[0])
    assert samples[0].state is RequestState.FINISHED
    ahead = lengths(step(scheduler))
    assert "a/2" not in ahead or samples[0].num_output_tokens, "two compute one prompt"
    for _ in until(lambda: not scheduler.requests, max_steps=20):
        step(scheduler)
    assert [sample.finish_reason for sample in samples[1:]] == ["length"] * 2
    assert samples[1].num_cached_tokens == (16 if samples[0].num_output_tokens else 0)
    assert samples[2].num_cached_tokens == 16
    assert_nothing_is_held(scheduler)


def test_if_no_sample_has_finite_logits_each_ends_with_an_error():
    scheduler = make_scheduler()
    samples = add(scheduler, "a", 6, 3)
    for _ in range(3):
        step(scheduler, None)
    assert [sample.finish_reason for sample in samples] == ["error"] * 3
    assert_nothing_is_held(scheduler)


def test_samples_are_accepted_together_or_not_at_all():
    """One of the three has been submitted before, or another request has their id: none is accepted."""
    scheduler = make_scheduler()
    scheduler.add(Request("a", [1], SamplingParams()))
    with pytest.raises(ValueError, match="'a' is already in use"):
        add(scheduler, "a", 3, 3)
    samples = make_samples("b", [1, 2, 3], SamplingParams(n=3))
    samples[2].state = RequestState.FINISHED
    with pytest.raises(ValueError, match="'b/2' has been submitted before"):
        scheduler.add(samples[0])
    assert list(scheduler.requests) == ["a"]
    assert lengths(step(scheduler)) == {"a": 1}
    add(scheduler, "b", 3, 3)
    with pytest.raises(ValueError, match="'b' is already in use"):
        scheduler.add(Request("b", [1], SamplingParams()))
    scheduler.abort("b", index=0)
    with pytest.raises(ValueError, match="'b' is already in use"):
        scheduler.add(Request("b", [1], SamplingParams()))


# ---------------------------------------------------------------------------- the engine

Solo = Callable[[tuple[int, ...], int], object]


@pytest.fixture(scope="module")
def solo(tiny) -> Solo:
    """The output of a request with n = 1 that is alone in an engine, for each prompt and seed."""
    engine = eager(tiny)

    @functools.cache
    def run(prompt: tuple[int, ...], seed: int):
        params = SamplingParams(seed=seed, max_tokens=LONGEST_OUTPUT, logprobs=2)
        engine.add_request(list(prompt), params)
        [output] = run_to_end(engine).values()
        return output.outputs[0]

    return run


STOPS = [3, 11, 19]


def expected_end(tokens: list[int], params: SamplingParams) -> tuple[int, str, int | None]:
    """How many of the tokens there are if nothing interferes, and why it ends there."""
    for count, token in enumerate(tokens[: params.max_tokens], start=1):
        if token in (params.stop_token_ids or ()):
            return count, "stop", token
    return params.max_tokens, "length", None


def check_sample(completion, prompt: tuple[int, ...], params: SamplingParams, solo: Solo) -> None:
    """A sample, ended or not, is a beginning of what it is alone, log probabilities included."""
    whole, count = solo(prompt, params.seed + completion.index), len(completion.token_ids)
    assert completion.token_ids == whole.token_ids[:count]
    assert [list(entry) for entry in completion.logprobs] == [list(entry) for entry in whole.logprobs[:count]]
    sums = [entry[token].logprob for entry, token in zip(whole.logprobs, completion.token_ids, strict=False)]
    assert completion.cumulative_logprob == pytest.approx(math.fsum(sums), rel=1e-4)  # logits are float32
    num_tokens, *why = expected_end(whole.token_ids, params)
    if completion.finish_reason in ("stop", "length"):
        assert (count, completion.finish_reason, completion.stop_reason) == (num_tokens, *why)
    else:
        assert count < num_tokens


@dataclass
class Plan:
    """One prompt of a drawn schedule."""

    prompt: tuple[int, ...]
    params: SamplingParams
    arrives: int  # in this step
    aborts: dict[int, int | None]  # in this step this sample, or all


plans = st.builds(
    Plan,
    prompt=prompts,
    params=st.builds(
        SamplingParams,
        n=st.sampled_from([3, 2, 4, 1]),
        seed=st.integers(0, 1),
        max_tokens=st.sampled_from([LONGEST_OUTPUT, 9, 5, 1]),
        stop_token_ids=st.sampled_from([None, STOPS]),
        logprobs=st.just(2),
    ),
    arrives=st.sampled_from([0, 0, 1, 2, 5]),
    aborts=st.dictionaries(st.integers(0, 15), st.sampled_from([0, 0, None, 1, 2, 3]), max_size=3),
)


@given(
    drawn=st.lists(plans, min_size=1, max_size=4),
    space=spaces,
    block_size=st.integers(1, 16),
    spare_blocks=st.sampled_from([0, 1, 4, 8]),
    budget=st.integers(1, 48) | st.just(48),
    slots=st.sampled_from([8, 4, 3, 2, 1]),
    batching=st.sampled_from(["continuous", "continuous", "static"]),
    policy=st.sampled_from(["fcfs", "sjf", "priority", "fair", "adaptive"]),
)
def test_any_schedule_gives_each_sample_the_tokens_of_its_seed(
    tiny, solo, drawn, space, block_size, spare_blocks, budget, slots, batching, policy
):
    """Every step's output has all samples in order, each at least as long as before, and says that it is finished
    when all are, and never again. Free blocks are full of NaN all the time."""
    longest = max(-(-(len(plan.prompt) + plan.params.max_tokens) // block_size) for plan in drawn)
    engine = eager(
        tiny,
        block_size=block_size,
        num_blocks=1 + longest + spare_blocks,
        **space.arguments,
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        batching=batching,
        scheduling_policy=policy,
    )
    space.install(engine)
    poison_free_blocks(engine)
    last: dict[str, object] = {}

    def take(output) -> None:
        key = output.request_id
        plan, before = drawn[int(key)], last.get(key)
        assert before is None or not before.finished
        assert output.prompt_token_ids == list(plan.prompt)
        assert output.num_cached_tokens == 0 or space.enable_prefix_caching, "what samples share is no cache"
        assert [completion.index for completion in output.outputs] == list(range(plan.params.n))
        assert output.finished == all(completion.finish_reason is not None for completion in output.outputs)
        for now, then in zip(output.outputs, before.outputs if before else output.outputs, strict=True):
            assert now.token_ids[: len(then.token_ids)] == then.token_ids
            assert then.finish_reason is None or now == then, "what has ended stays as it is"
        last[key] = output

    for number in itertools.count():
        for index, plan in enumerate(drawn):
            if plan.arrives == number:
                engine.add_request(list(plan.prompt), plan.params, str(index), index % 2, "ab"[index % 2])
            if number in plan.aborts:
                sample, before = plan.aborts[number], last.get(str(index))
                output = engine.abort_request(str(index), sample)
                engine.scheduler.check_invariants()
                if output is not None:
                    take(output)
                elif plan.arrives <= number and (sample is None or sample < plan.params.n):
                    ended = before.outputs if sample is None else [before.outputs[sample]]
                    assert all(completion.finish_reason is not None for completion in ended)
        if number > 5 and not engine.has_unfinished_requests():
            break
        assert number < 3000, "no end in sight"
        outputs = engine.step()
        assert len({output.request_id for output in outputs}) == len(outputs), "one output for each request"
        for output in outputs:
            take(output)
        engine.scheduler.check_invariants()
        poison_free_blocks(engine)
    assert len(last) == len(drawn)
    for key, output in last.items():
        assert output.finished
        for completion in output.outputs:
            assert completion.finish_reason in ("stop", "length") + ("abort",) * bool(drawn[int(key)].aborts)
            check_sample(completion, drawn[int(key)].prompt, drawn[int(key)].params, solo)
    assert_nothing_is_held(engine.scheduler)


# With 6 tokens a step the first's prompt takes two steps, and the other samples start in the third.
PROMPTS = [MIXED[2], MIXED[0], MIXED[1]]
SAMPLED = [SamplingParams(n=n, seed=1, max_tokens=5, logprobs=2) for n in (3, 1, 2)]
CALLS = {
    "add_request": lambda engine: engine.add_request(list(PROMPTS[2]), SAMPLED[2], "2"),
    "abort_request": lambda engine: engine.abort_request("0"),
    "abort the first sample": lambda engine: engine.abort_request("0", 0),
    "step": lambda engine: engine.step(),
}


def finish(engine: Engine, solo: Solo, may_abort: str = "") -> dict[str, object]:
    """Run to the end; each sample that isn't aborted ends with its tokens, and all blocks are free."""
    requests = {key: request for key, request in engine.scheduler.requests.items()}
    outputs = run_to_end(engine, max_steps=400)
    for key, output in outputs.items():
        for completion in output.outputs:
            assert completion.finish_reason in ("length", "abort" if key == may_abort else "length")
            check_sample(completion, PROMPTS[int(key)], SAMPLED[int(key)], solo)
    assert all(request.state is RequestState.FINISHED for request in requests.values())
    assert_nothing_is_held(engine.scheduler)
    return outputs


@pytest.mark.parametrize(
    ("call", "num_steps", "stride"),
    [
        ("add_request", 1, 1),
        ("abort the first sample", 1, 1),
        ("abort the first sample", 3, 3),
        ("abort_request", 1, 3),
        *(("step", num_steps, 11) for num_steps in range(3)),
    ],
)
def test_ctrl_c_at_each_line_of_a_call_leaves_no_sample_behind(tiny, solo, call, num_steps, stride):
    """Before, while and after the first sample computes the prompt (of the longer calls not every line). A request
    that wasn't accepted can be submitted again, under its id."""
    for line in itertools.count(1, stride):
        engine = eager(tiny, num_blocks=11, max_num_batched_tokens=6)
        for index in range(2):
            engine.add_request(list(PROMPTS[index]), SAMPLED[index], str(index))
        for _ in range(num_steps):
            engine.step()
        interrupt = InterruptEverywhere([line])
        interrupt.during(functools.partial(CALLS[call], engine))
        if call == "add_request":
            was_accepted = any(request.request_id == "2" for request in engine.scheduler.requests.values())
            with pytest.raises(ValueError, match="already in use") if was_accepted else contextlib.nullcontext():
                engine.add_request(list(PROMPTS[2]), SAMPLED[2], "2")
        outputs = finish(engine, solo, may_abort="0")
        assert set(outputs) >= {"0", "1"} - ({"0"} if call == "abort_request" else set())
        assert ("2" in outputs) == (call == "add_request")
        if interrupt.lines:  # the call is shorter than that
            assert line > 5
            return


def test_all_samples_are_aborted_also_after_ctrl_c_at_any_line_of_their_submission(tiny):
    for line in itertools.count(1):
        engine = eager(tiny, num_blocks=11)
        interrupt = InterruptEverywhere([line])
        interrupt.during(functools.partial(CALLS["add_request"], engine))
        engine.abort_all()
        assert not engine.has_unfinished_requests()
        assert_nothing_is_held(engine.scheduler)
        if interrupt.lines:
            return


@given(
    lines=st.lists(st.integers(1, 60) | st.integers(1, 1500), min_size=1, max_size=8),
    num_blocks=st.sampled_from([9, 12, 40]),
    mode=st.sampled_from(MODES),
    caching=st.booleans(),
    aborted=st.none() | st.integers(0, 2),
    abort_after=st.integers(0, 12),
    fails=st.frozensets(st.integers(0, 20), max_size=4),
)
@settings(max_examples=2 * settings.default.max_examples)
def test_ctrl_c_again_and_again_loses_no_sample(
    tiny, solo, lines, num_blocks, mode, caching, aborted, abort_after, fails
):
    """In the scheduler, in the forward pass, and while that is made up for: those that were accepted end with their
    tokens, and the engine serves the next."""
    engine = eager(
        tiny, num_blocks=num_blocks, max_num_batched_tokens=12, preemption_mode=mode, enable_prefix_caching=caching
    )
    Space(mode, 100, caching, CLOSE, late=False).install(engine)
    interrupt, execute, calls = InterruptEverywhere(lines), engine.runner.execute, itertools.count()

    def sometimes(plan):
        if next(calls) in fails:
            raise KeyboardInterrupt
        return execute(plan)

    engine.runner.execute = sometimes
    accepted: dict[str, Request] = {}
    for index, params in enumerate(SAMPLED):
        interrupt.during(
            lambda index=index, params=params: engine.add_request(list(PROMPTS[index]), params, str(index))
        )
        accepted |= engine.scheduler.requests
    for number in range(400):
        if not engine.has_unfinished_requests():
            break
        if number == abort_after:
            interrupt.during(lambda: engine.abort_request("0", aborted))
        interrupt.during(engine.step)
        check_invariants(engine)
    assert not engine.has_unfinished_requests(), "no end in sight"
    engine.runner.execute = execute
    for request in accepted.values():
        name = request.request_id
        completion = engine.output(request).outputs[request.index]
        is_aborted = name == "0" and aborted in (None, request.index)
        assert completion.finish_reason in (("length", "abort") if is_aborted else ("length",))
        check_sample(completion, PROMPTS[int(name)], SAMPLED[int(name)], solo)
    engine.add_request(list(PROMPTS[0]), SAMPLED[0], "new")
    [output] = run_to_end(engine).values()
    assert [completion.finish_reason for completion in output.outputs] == ["length"] * 3
    assert_nothing_is_held(engine.scheduler)


PROMPT = tuple(engine_prompt(9))


@pytest.mark.parametrize(
    "arguments",
    [{"max_num_seqs": 1}, {"max_num_seqs": 2, "batching": "static"}, {"max_num_batched_tokens": 1}, {"num_blocks": 6}],
)
def test_more_samples_than_can_run_at_a_time_take_turns(tiny, solo, arguments):
    engine = eager(tiny, **arguments)
    params = SamplingParams(n=5, seed=0, max_tokens=8, logprobs=2)
    engine.add_request(list(PROMPT), params)
    [output] = run_to_end(engine).values()
    assert output.finished
    for completion in output.outputs:
        assert completion.finish_reason == "length"
        check_sample(completion, PROMPT, params, solo)


@pytest.mark.parametrize("index", range(3))
def test_a_sample_without_finite_logits_ends_with_an_error_and_harms_no_other(tiny, solo, index):
    """Not even the first, at whose tokens the others begin."""
    engine = eager(tiny)
    params = SamplingParams(n=3, seed=0, max_tokens=4, logprobs=2)
    engine.add_request(list(PROMPT), params, "a")
    execute = engine.runner.execute

    def spoil(plan):
        sampled = [chunk.request for chunk in plan.chunks if chunk.needs_sampling]
        tokens = zip(sampled, execute(plan), strict=True)
        return [None if request.index == index else token for request, token in tokens]

    engine.runner.execute = spoil
    [output] = run_to_end(engine).values()
    for completion in output.outputs:
        if completion.index == index:
            assert (completion.finish_reason, completion.token_ids) == ("error", [])
        else:
            assert completion.finish_reason == "length"
            check_sample(completion, PROMPT, params, solo)


def test_an_id_is_in_use_until_the_last_sample_has_ended(tiny):
    engine = eager(tiny)
    engine.add_request([1, 2, 3], SamplingParams(n=3, max_tokens=3), "a")
    for index in range(3):
        for params in (SamplingParams(), SamplingParams(n=2)):
            with pytest.raises(ValueError, match="'a' is already in use"):
                engine.add_request([1], params, "a")
        if index == 1:
            engine.step()
        assert engine.abort_request("a", index).outputs[index].finish_reason == "abort"
    assert not engine.has_unfinished_requests()

    engine.add_request([4, 5], greedy(5), "a")
    assert [len(output.outputs) for output in engine.step()] == [1]
    output = engine.abort_request("a")
    assert (output.finished, output.prompt_token_ids, len(output.outputs)) == (True, [4, 5], 1)
    assert not engine.has_unfinished_requests()
    engine.add_request([6], SamplingParams(n=2, max_tokens=1), "a")
    assert [completion.finish_reason for completion in run_to_end(engine)["a"].outputs] == ["length"] * 2


def test_what_cannot_be_aborted_is_none_and_changes_nothing(tiny):
    """An unknown id or index, a sample or a request that has ended."""
    engine = eager(tiny)
    engine.add_request([1, 2, 3], SamplingParams(n=3, max_tokens=3, seed=0), "a")
    engine.step()
    assert engine.abort_request("b") is engine.abort_request("b", 0) is None
    assert engine.abort_request("a", 3) is engine.abort_request("a", -1) is None
    output = engine.abort_request("a", 1)
    assert [completion.finish_reason for completion in output.outputs] == [None, "abort", None]
    assert not output.finished
    assert engine.abort_request("a", 1) is None
    assert [c.finish_reason for c in engine.abort_request("a").outputs] == ["abort"] * 3
    assert engine.abort_request("a") is None
    assert not engine.has_unfinished_requests()
    assert engine.step() == []


def test_an_index_that_a_request_of_one_sample_lacks_ends_nothing(tiny):
    engine = eager(tiny)
    engine.add_request([1, 2, 3], greedy(3), "a")
    assert engine.abort_request("a", 1) is None
    assert engine.abort_request("a", 0).finished
    assert not engine.has_unfinished_requests()


def test_ids_of_other_requests_that_look_like_those_of_samples_are_others(tiny):
    """Samples have ids of their own inside of the engine, which callers neither know nor must avoid."""
    engine = eager(tiny)
    several = SamplingParams(n=2, max_tokens=3, seed=0)
    engine.add_request([1, 2, 3], several, "a")
    assert engine.abort_request("a/0") is None
    engine.add_request([4], greedy(3), "a/1")
    engine.add_request([5], greedy(3), "0/0")
    made_up = engine.add_request([6], several)
    assert engine.abort_request("a").finished
    assert set(run_to_end(engine)) == {"a/1", "0/0", made_up}


def test_a_request_that_was_refused_leaves_nothing_under_its_id(tiny):
    """Neither is its id in use, nor does to abort it end somebody else's."""
    engine = eager(tiny)
    engine.add_request([1, 2, 3], greedy(3), "a/0")
    try:
        engine.add_request([1], SamplingParams(n=2, max_tokens=3), "a")
    except ValueError:
        assert engine.abort_request("a") is None
        engine.add_request([4], greedy(3), "a")
    assert set(run_to_end(engine)) == {"a/0", "a"}


def test_what_ended_in_an_interrupted_step_is_not_reported_after_the_abort_of_the_rest(tiny):
    """The abort's output had it, finished; there is no second end."""
    engine = eager(tiny)
    engine.add_request([1, 2, 3], SamplingParams(n=2, max_tokens=3, seed=0), "a")
    update = engine.scheduler.update

    def interrupted(*args):
        if update(*args)[0].state is RequestState.FINISHED:
            raise KeyboardInterrupt

    with mock.patch.object(engine.scheduler, "update", interrupted), pytest.raises(KeyboardInterrupt):
        for _ in range(4):
            engine.step()
    output = engine.abort_request("a")
    assert output.finished
    assert [completion.finish_reason for completion in output.outputs] == ["length", "abort"]
    assert engine.step() == []


def test_each_sample_has_its_own_text_and_ends_for_its_own_reason(byte_model):
    """The same as with n = 1 and its seed: text, stop string or stop token, log probabilities and their texts."""
    llm = LLM(byte_model, device="cpu", dtype="float64", enforce_eager=True, block_size=4, num_blocks=40)
    engine = llm.engine
    params = SamplingParams(n=8, seed=3, max_tokens=12, stop=["jj", "oe"], stop_token_ids=[70, 75], logprobs=1)
    params = replace(params, logit_bias=dict.fromkeys(range(60, 80), 6.0))  # mostly letters
    engine.add_request("Hello", params, "a")
    seen = [""] * 8
    for _ in until(lambda: not engine.has_unfinished_requests()):
        for output in engine.step():
            assert all(c.text.startswith(text) for c, text in zip(output.outputs, seen, strict=True))
            seen = [completion.text for completion in output.outputs]
    [generated] = llm.generate("Hello", params, use_tqdm=False)  # where nobody looks at the text until the end
    assert [(c.text, c.token_ids) for c in generated.outputs] == [(c.text, c.token_ids) for c in output.outputs]
    for completion in output.outputs:
        engine.add_request("Hello", replace(params, n=1, seed=3 + completion.index))
        [single] = run_to_end(engine).values()
        [single] = single.outputs
        assert [e[t].decoded_token for e, t in zip(completion.logprobs, completion.token_ids, strict=True)] == [
            e[t].decoded_token for e, t in zip(single.logprobs, single.token_ids, strict=True)
        ]
        assert completion.cumulative_logprob == pytest.approx(single.cumulative_logprob, rel=1e-4)
        parts = [(c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in (completion, single)]
        assert parts[0] == parts[1]
    reasons = {(completion.finish_reason, type(completion.stop_reason)) for completion in output.outputs}
    assert reasons == {("stop", str), ("stop", int), ("length", type(None))}
    assert len(set(seen)) == 8


def test_generate_returns_all_samples_of_each_prompt_in_order(tiny, solo):
    llm = LLM(tiny, device="cpu", dtype="float64", enforce_eager=True, block_size=4, num_blocks=20, max_num_seqs=3)
    params = [replace(SAMPLED[0], n=n, max_tokens=tokens) for n, tokens in ((3, 4), (1, 9), (5, 1), (2, 6))]
    for prompt, wanted, output in zip(
        MIXED, params, llm.generate([list(p) for p in MIXED], params, use_tqdm=False), strict=True
    ):
        assert output.prompt_token_ids == list(prompt)
        assert output.finished
        assert [completion.index for completion in output.outputs] == list(range(wanted.n))
        for completion in output.outputs:
            check_sample(completion, prompt, wanted, solo)


def test_samples_without_a_seed_differ_and_so_do_two_calls(tiny):
    """But an engine with the same seed gives the same again."""
    params = SamplingParams(n=4, max_tokens=12)
    calls = []
    for _ in range(2):
        engine = eager(tiny, seed=5)
        for _ in range(2):
            engine.add_request(list(PROMPT), params)
        calls.append([c.token_ids for output in run_to_end(engine).values() for c in output.outputs])
    assert calls[0] == calls[1]
    assert len({tuple(tokens) for tokens in calls[0]}) == 8
