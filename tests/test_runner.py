"""The runner: what a step allocates, what is compiled and when, and the CUDA path."""

import resource
import traceback
from array import array
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from conftest import eager, greedy, run_to_end, transformers_greedy
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode

import minicb.runner
from minicb import Engine, SamplingParams
from minicb.attention import gather_attention
from minicb.batch import Batch, BatchBuilder, BlockLists
from minicb.loader import read_config
from minicb.model import Model
from minicb.plan import Chunk
from minicb.request import Request
from minicb.runner import ModelRunner
from minicb.sampler import sample


def test_sizing_says_what_it_did(tiny, caplog):
    with caplog.at_level("INFO", logger="minicb"):
        Engine(tiny, device="cpu", enforce_eager=True, max_num_seqs=2, max_model_len=64, block_size=16)
    assert "KV cache: 8 blocks of 16 tokens" in caplog.text, "2 requests of 64 tokens fill 8 blocks"


def test_exact_ties_go_to_the_lowest_id(make_model):
    """Two rows of the head are equal, and the first of them wins in every row of a batch."""
    engine = Engine(make_model("llama", seed=3), device="cpu", enforce_eager=True, num_blocks=40, block_size=4)
    head = engine.runner.model.lm_head.weight
    with torch.no_grad():
        for low, high in ((1, 30), (7, 8), (11, 31)):
            head[high] = head[low]
    for length in range(1, 9):
        engine.add_request([(5 * length + i) % 32 for i in range(length)], greedy(10))
    tokens = {t for output in run_to_end(engine).values() for t in output.outputs[0].token_ids}
    assert tokens & {1, 7, 11}, "the rows that tie are meant to win sometimes"
    assert not tokens & {30, 8, 31}


def test_bfloat16_matches_where_the_two_best_logits_differ_by_more_than_rounding(make_model):
    """8 prompts, each alone and all together."""
    folder = make_model("llama", seed=5)
    prompts = [[(7 * n + i) % 32 for i in range(n)] for n in range(1, 9)]
    together, alone = (Engine(folder, device="cpu", dtype="bfloat16", enforce_eager=True, num_blocks=40) for _ in "12")
    for index, prompt in enumerate(prompts):
        together.add_request(prompt, greedy(6), request_id=str(index))
    outputs = run_to_end(together)
    for index, prompt in enumerate(prompts):
        tokens = outputs[str(index)].outputs[0].token_ids
        for count in range(len(tokens)):
            logits = last_logits(alone, prompt + tokens[:count])
            best = logits.topk(2)
            if best.values[0] - best.values[1] > 0.1:
                assert tokens[count] == best.indices[0]


def last_logits(engine: Engine, prompt: list[int]) -> torch.Tensor:
    """Logits after the prompt, computed whole and alone."""
    engine.add_request(prompt, request_id="probe")
    plan = engine.scheduler.schedule()
    with torch.no_grad():
        logits = engine.runner._forward(engine.runner.builder.build(plan.chunks))[0]
    engine.abort_request("probe")
    return logits


def test_buckets_change_nothing(compiled_engine, tiny):
    """5 equal prompts padded to 8 rows, then a batch of 2 in the same buffers."""
    runner = compiled_engine.runner
    own = runner.builder
    runner.builder = BatchBuilder(
        num_blocks=40, block_size=4, tile_size=own.tile_size, max_num_seqs=8, max_num_batched_tokens=24,
        max_model_len=256, windows=[None], device=torch.device("cpu"), buckets=[2, 4, 8],
    )  # fmt: skip
    try:
        expected = transformers_greedy(tiny, [3, 1, 4], 8)
        for count in (5, 2):
            for _ in range(count):
                compiled_engine.add_request([3, 1, 4], greedy(8))
            outputs = run_to_end(compiled_engine)
            assert [output.outputs[0].token_ids for output in outputs.values()] == [expected] * count
    finally:
        runner.builder = own


def test_nothing_is_compiled_after_the_warm_up(compiled_engine):
    """Prompts of every length that fits, batches of every size, mixed steps of all kinds."""
    compiled_engine.add_request([1], greedy(1))
    run_to_end(compiled_engine)  # the sampler and others may trace on first use
    before = torch._dynamo.utils.counters["frames"]["total"]
    with torch.compiler.set_stance("fail_on_recompile"):
        for length in range(1, 150):
            compiled_engine.add_request([length % 32] * length, greedy(2))
            run_to_end(compiled_engine)
        for size in range(1, 10):
            for index in range(size):
                compiled_engine.add_request([index] * 5, SamplingParams(max_tokens=4, seed=1))
            run_to_end(compiled_engine)
    assert torch._dynamo.utils.counters["frames"]["total"] == before


@pytest.mark.parametrize(("slots", "budget", "num_blocks"), [(1, 1, 3), (1, 64, 40), (8, 3, 2), (3, 5, 40)])
def test_the_smallest_engines_warm_up_and_run(tiny, slots, budget, num_blocks):
    """One request, one token a step, one usable block: the made-up requests of the warm-up must fit too."""
    engine = Engine(
        tiny, device="cpu", block_size=16, num_blocks=num_blocks, max_num_seqs=slots, max_num_batched_tokens=budget
    )
    for length in (1, 5, 9):
        engine.add_request([length] * length, greedy(4), request_id=str(length))
    with torch.compiler.set_stance("fail_on_recompile"):
        outputs = run_to_end(engine)
    for length in (1, 5, 9):
        assert outputs[str(length)].outputs[0].token_ids == transformers_greedy(tiny, [length] * length, 4)


def test_a_step_does_not_copy_the_cache(make_model):
    """Memory that a decode step touches for the first time stays far below one layer's cache.

    Page faults show it: a copy of the cache touches new pages. (For lower precision than float32, FlexAttention's
    CPU kernel allocates buffers of that size, but never touches them.)
    """
    folder = make_model("llama", head_dim=64, num_key_value_heads=4)
    engine = Engine(folder, device="cpu", num_blocks=4096, block_size=32, max_num_seqs=8, max_model_len=256)
    layer_bytes = engine.runner.k_cache[0].nbytes
    assert layer_bytes > 100 * 2**20
    for _ in range(4):
        engine.add_request([1, 2, 3], greedy(40))
    for _ in range(4):
        engine.step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        engine.step()
    touched = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize()
    assert touched / 20 < layer_bytes / 20
    engine.runner.k_cache.clone()  # and such a copy would be seen
    copied = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() - touched
    assert copied > layer_bytes


def test_a_mixed_step_asks_for_the_logits_of_sampled_rows_only(tiny):
    """17 prompt tokens and a decode give two rows to the head, an unfinished prefill none."""
    engine = Engine(tiny, device="cpu", enforce_eager=True, num_blocks=40, block_size=4, max_num_batched_tokens=18)
    rows = []
    engine.runner.model.lm_head.register_forward_hook(lambda module, args, output: rows.append(len(args[0])))
    engine.add_request([1, 2], greedy(5))
    engine.step()
    engine.add_request([3] * 17, greedy(2))
    engine.step()
    engine.add_request([4] * 40, greedy(1))
    engine.step()
    assert rows == [1, 2, 2]
    run_to_end(engine)


# ------------------------------------------------------------------ the way to CUDA, without CUDA


class IndexByOperators(TorchFunctionMode):
    """Indexing by aten operators: Python's indexing of CUDA tensors needs a CUDA build.

    forbid_numbers: a number of the host in `x[tensor] = 0` and `where` is an error. It is copied to the device, and
    the copy waits for all work queued there.
    """

    def __init__(self, forbid_numbers: bool):
        super().__init__()
        self.forbid_numbers = forbid_numbers

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if self.forbid_numbers and func in (torch.where, torch.Tensor.where):
            assert all(isinstance(arg, torch.Tensor) for arg in args), (
                "where copies its number to the device, and waits"
            )
        if func is torch.Tensor.__getitem__:
            return self.get(*args)
        if func is torch.Tensor.__setitem__:
            tensor, index, value = args
            indices = index if isinstance(index, tuple) else (index,)
            if any(isinstance(item, torch.Tensor) for item in indices):
                if not isinstance(value, torch.Tensor):
                    assert not self.forbid_numbers, "the assigned number is copied to the device, which is a wait"
                    value = torch.full((), value, device=tensor.device)
                return torch.ops.aten.index_put_(tensor, indices, value)
            return torch.ops.aten.copy_(self.get(tensor, index), value)
        return func(*args, **(kwargs or {}))

    def get(self, tensor, index):
        dim = 0
        for item in index if isinstance(index, tuple) else (index,):
            if isinstance(item, torch.Tensor):
                tensor = torch.ops.aten.index(tensor, [*[None] * dim, item])
            elif item is None:
                tensor = tensor.unsqueeze(dim)
            elif isinstance(item, slice):
                tensor = torch.ops.aten.slice(tensor, dim, item.start, item.stop)
            else:
                tensor, dim = tensor.select(dim, item), dim - 1
            dim += 1
        return tensor


def fake_cuda(value):
    """The same structure with its tensors as fake CUDA tensors."""
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="cuda")
    if isinstance(value, dict):
        return {key: fake_cuda(item) for key, item in value.items()}
    return BlockLists(*map(fake_cuda, value)) if isinstance(value, BlockLists) else value


@pytest.mark.parametrize("spans", [[(5, 1), (9, 1)], [(5, 1), (0, 7), (3, 4)]])
@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 0.9, "min_tokens": 2, "allowed_token_ids": [1, 2, 3]},
        {"logit_bias": {3: 1.0}, "presence_penalty": 1.0, "repetition_penalty": 1.1, "logprobs": 2},
    ],
    ids=["truncated", "adjusted"],
)
def test_a_step_on_cuda_waits_once(tiny, spans, params, monkeypatch):
    """No operator mixes tensors of host and device, and nothing waits for a value before the tokens.

    Fake CUDA tensors compute nothing, but raise where a value is asked for (`.item()`, a branch) or
    devices are mixed. FlexAttention and CUDA graphs don't run on them; the gather version stands in.
    """
    config, _ = read_config(tiny)
    builder = BatchBuilder(
        num_blocks=40, block_size=4, tile_size=8, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64,
        windows=[None], device=torch.device("cpu"),
    )  # fmt: skip
    chunks = []
    for index, (start, length) in enumerate(spans):
        request = Request(str(index), [1] * (start + length), SamplingParams(**params), eos_token_ids=[3])
        request.block_table = array("i", range(1, 12))
        chunks.append(Chunk.of(request, start, length))
    batch, model = builder.build(chunks), Model(config, gather_attention)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # which asks for a CUDA build
    mode = IndexByOperators(forbid_numbers=False)  # the gather version may wait
    with FakeTensorMode(allow_non_fake_inputs=True), mode, torch.no_grad():
        on_cuda = Batch(*map(fake_cuda, batch))
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = torch.nn.Parameter(fake_cuda(parameter), requires_grad=False)
        caches = [tuple(torch.zeros(160, 2, 16, device="cuda") for _ in "kv") for _ in range(2)]
        model(on_cuda, caches, torch.empty(8, device="cuda"))
        mode.forbid_numbers = True
        logits = model(on_cuda, caches, torch.empty(8, device="cuda"), lambda layer, x, *_: x)[: batch.num_sampled]
        assert logits.device.type == "cuda"
        with pytest.raises(DataDependentOutputException) as caught:
            sample(logits, [chunk.request for chunk in batch.chunks if chunk.needs_sampling])
    ours = [frame for frame in traceback.extract_tb(caught.tb) if frame.filename.endswith("sampler.py")]
    assert ".tolist()" in ours[-1].line


def test_a_graph_is_captured_on_the_engines_device(monkeypatch):
    """torch.cuda.graph's own stream belongs to the device that was current when it was first used."""
    captured, device = [], torch.device("cuda:1")
    stream = SimpleNamespace(wait_stream=lambda other: None)
    cuda = {
        "Stream": lambda where: captured.append(where) or stream,
        "current_stream": lambda where: stream,
        "stream": lambda one: nullcontext(),
        "CUDAGraph": object,
        "graph": lambda graph, pool, stream: captured.append(stream) or nullcontext(),
    }
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    runner = SimpleNamespace(
        device=device, graphs={}, caches=[], frequencies=None, run_layer=None,
        _dummy_batch=lambda size: None, _forward=lambda batch: None, model=lambda *args: "logits",
    )  # fmt: skip
    ModelRunner._capture(runner, 4)
    assert captured == [device, stream]
    assert runner.graphs[4][1] == "logits"


def test_a_cache_that_the_kernels_cannot_address_is_not_made(tiny, monkeypatch):
    monkeypatch.setattr(minicb.runner, "most_cache_blocks", lambda device, block_numel: 9)
    assert eager(tiny, num_blocks=None).runner.num_blocks == 9
    with pytest.raises(ValueError, match="^num_blocks must be an integer < 10, not 10$"):
        eager(tiny, num_blocks=10)
