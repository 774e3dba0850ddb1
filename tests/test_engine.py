"""The engine's promises: whatever is scheduled beside it, a request gets the tokens it gets alone."""

import itertools
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import greedy, run_to_end, transformers_greedy
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from minicb import Engine, SamplingParams
from minicb.blocks import BlockPool
from minicb.memory import Memory
from minicb.policies import FCFS
from minicb.scheduler import Scheduler

PROMPT_LENS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 24)
LONGEST_OUTPUT = 20


def make_prompt(length: int, vocab_size: int = 32) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def judged(tiny) -> dict[int, list[int]]:
    """transformers' greedy continuation of a prompt of each length, in float64 where ties don't happen."""
    return {n: transformers_greedy(tiny, make_prompt(n), LONGEST_OUTPUT, dtype=torch.float64) for n in PROMPT_LENS}


@dataclass
class Plan:
    """One request of a drawn schedule."""

    prompt_len: int
    max_tokens: int
    arrives: int  # in this step
    aborted: int | None  # after so many steps of the whole run


requests = st.builds(
    Plan,
    prompt_len=st.sampled_from(PROMPT_LENS),
    max_tokens=st.integers(1, LONGEST_OUTPUT),
    arrives=st.integers(0, 12),
    aborted=st.none() | st.integers(0, 30),
)


@pytest.fixture(scope="module")
def eos_model(tiny, tmp_path_factory) -> Path:
    """The tiny rig with a tokenizer and a different EOS in every place that can name one."""
    folder = tmp_path_factory.mktemp("eos")
    shutil.copytree(tiny, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 8}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    vocabulary = {f"t{index}": index for index in range(32)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t9").save_pretrained(folder)
    return folder


def poison_free_blocks(engine: Engine) -> None:
    """What nobody holds and nobody can find may be anything, NaN too: whoever reads it will show it."""
    pool = engine.scheduler.pool
    size, poisoned = pool.block_size, [0, *(block for block in pool._free if not pool._is_cached(block))]
    for cache in (engine.runner.k_cache, engine.runner.v_cache):
        by_block = cache[:, : cache.shape[1] // size * size].unflatten(1, (-1, size))
        by_block[:, poisoned] = torch.nan


def serve(engine: Engine, plans: list[Plan], judged: dict[int, list[int]]) -> None:
    """Run the drawn schedule; check every step's invariants and every request's tokens."""
    seen: dict[str, list[int]] = {}
    ended: dict[str, str] = {}
    poison_free_blocks(engine)
    for step in itertools.count():
        for index, plan in enumerate(plans):
            if plan.arrives == step:
                engine.add_request(make_prompt(plan.prompt_len), greedy(plan.max_tokens), request_id=str(index))
                seen[str(index)] = []
            if plan.aborted == step and engine.abort_request(str(index)) is not None:
                ended[str(index)] = "abort"
        if step > 12 and not engine.has_unfinished_requests():
            break
        assert step < 13 + sum(plan.prompt_len + 30 * plan.max_tokens for plan in plans), "no end in sight"
        for output in engine.step():
            completion = output.outputs[0]
            assert completion.token_ids[:-1] == seen[output.request_id], "one more token in each output"
            seen[output.request_id] = completion.token_ids
            if output.finished:
                ended[output.request_id] = completion.finish_reason
        engine.scheduler.check_invariants()
        poison_free_blocks(engine)
    for index, plan in enumerate(plans):
        tokens = seen[str(index)]
        assert tokens == judged[plan.prompt_len][: len(tokens)]
        if ended[str(index)] != "abort":
            assert (ended[str(index)], len(tokens)) == ("length", plan.max_tokens)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable


@given(
    plans=st.lists(requests, min_size=1, max_size=8),
    block_size=st.integers(1, 16),
    spare_blocks=st.integers(0, 8),
    budget=st.integers(1, 48),
    slots=st.integers(1, 8),
    batching=st.sampled_from(["continuous", "continuous", "static"]),
)
def test_any_schedule_gives_each_request_its_own_tokens(
    tiny, judged, plans, block_size, spare_blocks, budget, slots, batching
):
    """Arrivals, lengths, blocks, pools that overflow, budgets,
    slots and aborts change neither tokens nor invariants. Free blocks are full of NaN all the time."""
    engine = Engine(
        tiny,
        device="cpu",
        dtype="float64",
        enforce_eager=True,
        block_size=block_size,
        num_blocks=1 + longest(plans, block_size) + spare_blocks,
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        batching=batching,
    )
    serve(engine, plans, judged)


@given(
    plans=st.lists(requests, min_size=1, max_size=8),
    spare_blocks=st.integers(0, 8),
    budget=st.integers(1, 24),
    slots=st.integers(1, 8),
)
def test_any_schedule_compiled(compiled_engine, judged, plans, spare_blocks, budget, slots):
    """The same promise held by FlexAttention, and nothing is compiled once the engine is warm."""
    engine, own_scheduler = compiled_engine, compiled_engine.scheduler
    engine.scheduler = Scheduler(
        Memory(BlockPool(1 + longest(plans, block_size=4) + spare_blocks, block_size=4)),
        FCFS(),
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        max_model_len=256,
    )
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            serve(engine, plans, judged)
    finally:
        engine.abort_all()
        engine.scheduler = own_scheduler


def longest(plans: list[Plan], block_size: int) -> int:
    """Blocks that the longest request fills, its last token left out."""
    return max(-(-(plan.prompt_len + plan.max_tokens - 1) // block_size) for plan in plans)


def test_transformers_and_alone_agree(tiny, judged):
    """The two judges are one: each prompt alone through the engine, against transformers."""
    engine = Engine(tiny, device="cpu", dtype="float64", enforce_eager=True, num_blocks=8)
    for length, tokens in judged.items():
        engine.add_request(make_prompt(length), greedy(LONGEST_OUTPUT))
        [output] = run_to_end(engine).values()
        assert output.outputs[0].token_ids == tokens
    assert len({tuple(tokens) for tokens in judged.values()}) == len(judged), (
        "prompts that all continue alike judge nothing"
    )
    assert all(len(set(tokens)) > 3 for tokens in judged.values())


# ------------------------------------------------------------------ one by one


def eager(tiny, **kwargs) -> Engine:
    defaults = {"device": "cpu", "dtype": "float64", "enforce_eager": True, "block_size": 4, "num_blocks": 40}
    return Engine(tiny, **(defaults | kwargs))


@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize("chunk", range(1, 18))
def test_chunked_prefill_is_prefill(tiny, judged, block_size, chunk):
    """A prompt of 17 in chunks of any size, in a cache that starts as NaN."""
    engine = eager(tiny, block_size=block_size, max_num_batched_tokens=chunk)
    engine.runner.k_cache.fill_(torch.nan)
    engine.runner.v_cache.fill_(torch.nan)
    engine.add_request(make_prompt(17), greedy(5))
    [output] = run_to_end(engine).values()
    assert output.outputs[0].token_ids == judged[17][:5]


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_block_boundaries(tiny, block_size):
    """Prompts of 1 … 2B+1 tokens. Wrong by one at a boundary is the classic mistake here."""
    engine = eager(tiny, block_size=block_size)
    for length in range(1, 2 * block_size + 2):
        engine.add_request(make_prompt(length), greedy(2 * block_size), request_id=str(length))
    for request_id, output in run_to_end(engine).items():
        expected = transformers_greedy(tiny, make_prompt(int(request_id)), 2 * block_size, dtype=torch.float64)
        assert output.outputs[0].token_ids == expected


@given(preempt_at=st.lists(st.integers(0, 40), max_size=6, unique=True))
def test_preemption_at_any_step_loses_and_doubles_nothing(tiny, judged, preempt_at):
    """The tokens are those of a pool that never runs out, one new one in each output."""
    engine = eager(tiny, max_num_batched_tokens=7)
    seen = {}
    for length in (5, 9, 16):
        seen[engine.add_request(make_prompt(length), greedy(12), request_id=str(length))] = []
    for step in range(60):
        scheduler = engine.scheduler
        if step in preempt_at and scheduler.running:
            scheduler._preempt(scheduler.running.pop())
        for output in engine.step():
            assert output.outputs[0].token_ids[:-1] == seen[output.request_id]
            seen[output.request_id] = output.outputs[0].token_ids
            assert output.prompt_token_ids == make_prompt(int(output.request_id))
        scheduler.check_invariants()
    assert seen == {str(length): judged[length][:12] for length in (5, 9, 16)}


def test_seeds_hold_whatever_runs_beside(tiny):
    """Seed 42 alone, in a crowd, in chunks, preempted: the same tokens."""
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=42, max_tokens=12)
    runs = {"alone": eager(tiny), "chunked": eager(tiny, max_num_batched_tokens=2)}
    runs |= {"crowd": eager(tiny), "preempted": eager(tiny, num_blocks=8)}
    tokens = {}
    for name, engine in runs.items():
        if name in ("crowd", "preempted"):
            for index in range(3):
                engine.add_request(make_prompt(5), SamplingParams(seed=index, max_tokens=20))
        rid = engine.add_request(make_prompt(9), params, request_id="seeded")
        requests = list(engine.scheduler.requests.values())
        tokens[name] = run_to_end(engine)[rid].outputs[0].token_ids
        if name == "preempted":
            assert requests[-1].num_preemptions > 0, "the pool was meant to run out"
    assert len({tuple(t) for t in tokens.values()}) == 1


def test_without_seeds_requests_and_calls_differ_but_runs_repeat(tiny):
    def two_calls(seed):
        engine = eager(tiny, seed=seed)
        outputs = []
        for _ in range(2):
            engine.add_request(make_prompt(5), SamplingParams(max_tokens=12))
            outputs += [tuple(output.outputs[0].token_ids) for output in run_to_end(engine).values()]
        return outputs

    first, second = two_calls(seed=0)
    assert first != second
    assert two_calls(seed=0) == [first, second]
    assert two_calls(seed=1) != [first, second]


def test_a_request_of_nan_ends_alone(tiny, judged):
    """Logits that are not finite end their request with "error" and nobody else's."""
    engine = eager(tiny)
    with torch.no_grad():
        poisoned = 31
        engine.runner.model.embed_tokens.weight = torch.nn.Parameter(engine.runner.model.embed_tokens.weight.clone())
        engine.runner.model.embed_tokens.weight[poisoned] = torch.nan
    clean = next(n for n in PROMPT_LENS if poisoned not in make_prompt(n) + judged[n])
    bad = engine.add_request([3, poisoned, 4], greedy(8))
    good = engine.add_request(make_prompt(clean), greedy(8))
    outputs = run_to_end(engine)
    assert outputs[bad].outputs[0].finish_reason == "error"
    assert outputs[good].outputs[0].token_ids == judged[clean][:8]
    # And whoever gets the blocks next doesn't notice either.
    later = engine.add_request(make_prompt(clean), greedy(8))
    assert run_to_end(engine)[later].outputs[0].token_ids == judged[clean][:8]


@pytest.mark.parametrize("eos", [5, 7, 8, 9])
def test_every_eos_stops(eos_model, eos):
    """The generation config says [5, 7], config 8, the tokenizer 9; each of them stops."""
    engine = eager(eos_model)
    with torch.no_grad():  # a head that likes one token only
        engine.runner.model.lm_head.weight.zero_()
        engine.runner.model.norm.weight.zero_()
        engine.runner.model.lm_head.bias = torch.nn.Parameter(torch.zeros(32, dtype=torch.float64))
        engine.runner.model.lm_head.bias[eos] = 1
    engine.add_request([1, 2, 3], greedy(5))
    [output] = run_to_end(engine).values()
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([eos], "stop")


def test_no_eos_at_all(tiny):
    assert eager(tiny).eos_token_ids == frozenset()


def test_stopping(tiny, judged):
    """EOS, ignore_eos, stop_token_ids, min_tokens."""
    tokens = judged[9]
    eos = tokens[3]
    first = tokens.index(eos)
    engine = eager(tiny)
    engine.eos_token_ids = frozenset([eos])

    def complete(**kwargs):
        engine.add_request(make_prompt(9), greedy(10, **kwargs))
        [output] = run_to_end(engine).values()
        return output.outputs[0]

    stopped = complete()
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == (tokens[: first + 1], "stop", None)
    assert complete(ignore_eos=True).token_ids == tokens[:10]
    by_id = complete(ignore_eos=True, stop_token_ids=[eos])
    assert (by_id.token_ids, by_id.finish_reason, by_id.stop_reason) == (tokens[: first + 1], "stop", eos)
    late = complete(min_tokens=7)
    assert eos not in late.token_ids[:7]
    assert late.token_ids[:first] == tokens[:first]


# ------------------------------------------------------------------ admission


@pytest.mark.parametrize("max_tokens", [None, 1, 2])
@pytest.mark.parametrize("length", [14, 15, 16, 17])
def test_the_end_of_the_model(tiny, length, max_tokens):
    """A max_model_len of 16 holds prompt and output, so a prompt of 16 leaves no room."""
    engine = eager(tiny, max_model_len=16)
    if length > 15:
        with pytest.raises(ValueError, match=f"prompt has {length} tokens.*max_model_len is 16"):
            engine.add_request([1] * length, greedy(max_tokens))
        assert not engine.has_unfinished_requests()
        return
    engine.add_request([1] * length, greedy(max_tokens))
    [output] = run_to_end(engine, max_steps=5).values()
    assert len(output.outputs[0].token_ids) == min(16 - length, max_tokens or 16)
    assert output.outputs[0].finish_reason == "length"


def test_the_end_of_the_pool(tiny):
    """4 usable blocks of 4. Too long is refused at once; too long a wish ends with a
    reason when the pool is full, the last token's KV not needed; and the next request is served."""
    engine = eager(tiny, num_blocks=5)
    with pytest.raises(ValueError, match="prompt has 20 tokens.*holds only 16"):
        engine.add_request([1] * 20)
    outgrown, small = engine.add_request([1] * 3, greedy(40)), engine.add_request([2] * 3, greedy(4))
    outputs = run_to_end(engine, max_steps=100)
    completion = outputs[outgrown].outputs[0]
    assert len(completion.token_ids) == 16 + 1 - 3
    assert completion.finish_reason == "length"
    assert "KV cache" in completion.stop_reason
    assert len(outputs[small].outputs[0].token_ids) == 4


@pytest.mark.parametrize("wrong", [-1, 32, 10**12, True, 1.5, "1", None])
def test_ids_outside_the_vocabulary(tiny, wrong):
    """Refused by name, and nobody else's step is harmed."""
    engine = eager(tiny)
    other = engine.add_request(make_prompt(5), greedy(3))
    with pytest.raises(ValueError, match="prompt token id must be an integer"):
        engine.add_request([1, wrong, 2])
    with pytest.raises(ValueError, match="stop_token_ids must be an integer"):
        engine.add_request([1], SamplingParams(stop_token_ids=[wrong]))
    assert list(run_to_end(engine)) == [other]


def test_wrong_requests_are_named(tiny):
    engine = eager(tiny)
    for prompt, message in (([], "prompt is empty"), ("", "no tokenizer"), (5, "prompt must be")):
        with pytest.raises(ValueError, match=message):
            engine.add_request(prompt)
    with pytest.raises(ValueError, match="sampling_params must be SamplingParams"):
        engine.add_request([1], {"temperature": 0})
    with pytest.raises(ValueError, match="request_id must be a string"):
        engine.add_request([1], request_id=7)
    with pytest.raises(ValueError, match="min_tokens"):
        engine.add_request([1], SamplingParams(min_tokens=1, stop_token_ids=list(range(32))))


def test_a_request_is_submitted_once(tiny):
    engine = eager(tiny)
    request = engine.make_request([1, 2], greedy(1))
    engine.submit(request)
    run_to_end(engine)
    with pytest.raises(ValueError, match="submitted before: it is FINISHED"):
        engine.submit(request)
    assert not engine.has_unfinished_requests()


def test_numpy_integers_are_integers(tiny):
    """Small ones would wrap around when added to."""
    engine = eager(tiny, block_size=np.int8(16), num_blocks=np.int8(100), max_num_batched_tokens=np.int8(100))
    engine.add_request([np.int8(1)] * 100, greedy(np.int8(100)))
    [output] = run_to_end(engine).values()
    assert len(output.outputs[0].token_ids) == 100
    assert json.dumps(output.prompt_token_ids)


def test_an_id_in_use(tiny):
    """Twice while alive is an error, after finish or abort it is free again."""
    engine = eager(tiny)
    engine.add_request([1, 2], greedy(2), request_id="0")
    with pytest.raises(ValueError, match="'0' is already in use"):
        engine.add_request([1, 2], request_id="0")
    assert engine.add_request([3], greedy(1)) != "0", "ids that are made up keep clear of it"
    run_to_end(engine)
    engine.add_request([1, 2], request_id="0")
    engine.abort_request("0")
    engine.add_request([1, 2], greedy(1), request_id="0")
    assert "0" in run_to_end(engine)


def test_abort_in_every_state(tiny):
    """Waiting, running, twice, unknown, finished, between the outputs of one step."""
    engine = eager(tiny, max_num_seqs=1)
    running, waiting = (engine.add_request(make_prompt(5), greedy(4)) for _ in range(2))
    engine.step()
    aborted = engine.abort_request(waiting)
    assert (aborted.finished, aborted.outputs[0].finish_reason) == (True, "abort")
    partial = engine.abort_request(running).outputs[0]
    assert (len(partial.token_ids), partial.finish_reason) == (1, "abort")
    for request_id in (running, waiting, "unknown"):
        assert engine.abort_request(request_id) is None
    assert not engine.has_unfinished_requests()
    engine.scheduler.check_invariants()
    engine = eager(tiny)
    ids = [engine.add_request(make_prompt(n), greedy(3)) for n in (3, 4, 5)]
    outputs = [output.request_id for output in engine.step() if engine.abort_request(ids[-1]) or True]
    assert outputs == ids
    assert set(run_to_end(engine)) == set(ids[:2])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("block_size", 0),
        ("num_blocks", 1),
        ("gpu_memory_utilization", 1.5),
        ("scheduling_policy", "random"),
        ("batching", "dynamic"),
        ("load_format", "gguf"),
        ("max_model_len", 257),
        ("dtype", "int8"),
        ("num_blocks", True),
        ("num_blocks", 10**12),
        ("max_num_seqs", "8"),
        ("gpu_memory_utilization", "0.9"),
        ("enforce_eager", "no"),
        ("seed", -1),
        ("seed", 1.5),
        ("device", "gpu"),
        ("device", "meta"),
        ("scheduling_policy", []),
        ("tokenizer", "."),
    ],
)
def test_wrong_engine_arguments_are_named(tiny, field, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=field):
        eager(tiny, **{field: value})


def test_a_step_that_fails_is_done_again(tiny, judged):
    """Ctrl-C or no memory on the device, in every other step: invariants hold, and no token is lost."""
    engine = eager(tiny, max_num_batched_tokens=4)
    rid = engine.add_request(make_prompt(9), greedy(6))
    execute, calls = engine.runner.execute, itertools.count()

    def sometimes(plan):
        if next(calls) % 2 == 0:
            raise KeyboardInterrupt
        return execute(plan)

    engine.runner.execute = sometimes
    last = None
    for _ in range(10):
        if not engine.has_unfinished_requests():
            break
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        engine.scheduler.check_invariants()
        for output in engine.step():
            last = output
        engine.scheduler.check_invariants()
    assert (last.request_id, last.outputs[0].token_ids) == (rid, judged[9][:6])


class InterruptAt:
    """Raises KeyboardInterrupt at the n-th line of the scheduler or the pool that a step executes."""

    def __init__(self, line: int):
        self.left = line

    def __call__(self, frame, event, arg):
        if not frame.f_code.co_filename.endswith(("scheduler.py", "blocks.py")):
            return None
        if event == "line" and frame.f_code.co_name not in ("recover", "reset", "_end_if_done", "cancel"):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


@given(line=st.integers(1, 900), num_blocks=st.sampled_from([8, 40]))
def test_an_interruption_anywhere_in_the_scheduler_loses_nothing(tiny, judged, line, num_blocks):
    """Wherever schedule or update breaks off, the next step goes on: same tokens, all blocks, all outputs."""
    engine = eager(tiny, num_blocks=num_blocks, max_num_batched_tokens=12)
    lengths = (5, 9, 13)
    for length in lengths:
        engine.add_request(make_prompt(length), greedy(8), request_id=str(length))
    tokens, interrupt = {}, InterruptAt(line)
    for _ in range(200):
        if not engine.has_unfinished_requests():
            break
        sys.settrace(interrupt)
        try:
            outputs = engine.step()
        except KeyboardInterrupt:
            outputs = []
        finally:
            sys.settrace(None)
        engine.scheduler.check_invariants()
        tokens |= {output.request_id: output.outputs[0].token_ids for output in outputs if output.finished}
    assert tokens == {str(length): judged[length][:8] for length in lengths}
    assert engine.scheduler.pool.num_free == num_blocks - 1
