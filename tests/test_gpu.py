"""What only a GPU can show. Run with `pytest -m gpu`; without a CUDA device all of it is skipped."""

import math

import pytest
import torch
from conftest import greedy, run_to_end, transformers_greedy

from minicb import Engine, SamplingParams, swap
from minicb.swap import HostCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def engine(make_model) -> Engine:
    """float32 with 8/2 heads of 64, compiled, with CUDA graphs for 2, 4 and 8 decodes."""
    folder = make_model("llama", head_dim=64, num_attention_heads=8)
    torch.backends.cuda.matmul.allow_tf32 = False
    # No prefix caching: a test fills the whole cache with NaN.
    return Engine(
        folder, device="cuda", num_blocks=40, max_num_seqs=8, max_num_batched_tokens=64, enable_prefix_caching=False
    )


def test_tokens_are_those_of_transformers(engine, make_model):
    """Mixed steps, decode graphs of several sizes, more requests than slots."""
    folder = make_model("llama", head_dim=64, num_attention_heads=8)
    prompts = [[(5 * n + i) % 32 for i in range(n)] for n in (1, 2, 7, 30, 64, 100, 3, 5, 128, 129)]
    ids = [engine.add_request(prompt, greedy(12)) for prompt in prompts]
    with torch.compiler.set_stance("fail_on_recompile"):
        outputs = run_to_end(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert outputs[request_id].outputs[0].token_ids == transformers_greedy(folder, prompt, 12)


def test_pure_decode_steps_replay_graphs(engine, monkeypatch):
    replayed = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: (replayed.append(self), replay(self)))
    for _ in range(5):
        engine.add_request([1, 2, 3], greedy(6))
    run_to_end(engine)
    assert len(replayed) == 5, "one prefill, then five decode steps"
    assert set(replayed) == {engine.runner.graphs[8][0]}


def test_padded_rows_and_leftovers(engine):
    """5 rows in the graph for 8, then 2 rows. Unused cache rows are garbage."""
    engine.runner.k_cache.fill_(torch.nan)
    engine.runner.v_cache.fill_(1e30)
    runs = []
    for count in (5, 2, 1):
        for _ in range(count):
            engine.add_request([3, 1, 4], greedy(8))
        runs += [output.outputs[0].token_ids for output in run_to_end(engine).values()]
    assert all(tokens == runs[0] for tokens in runs)


def test_a_seed_holds_on_the_device(engine):
    params = SamplingParams(seed=42, top_p=0.9, max_tokens=10)
    alone = engine.add_request([1, 2, 3], params)
    expected = run_to_end(engine)[alone].outputs[0].token_ids
    for index in range(6):
        engine.add_request([index], SamplingParams(max_tokens=20))
    crowd = engine.add_request([1, 2, 3], params)
    assert run_to_end(engine)[crowd].outputs[0].token_ids == expected


def test_the_cache_is_sized_from_free_memory(make_model):
    free, total = torch.cuda.mem_get_info()
    with pytest.raises(ValueError, match="no room for a KV cache"):
        Engine(
            make_model("llama"), device="cuda", enforce_eager=True, gpu_memory_utilization=(total - free) / total / 2
        )


def test_bfloat16_runs(make_model):
    engine = Engine(make_model("qwen3", head_dim=64), device="cuda", dtype="bfloat16", num_blocks=40, max_num_seqs=2)
    engine.add_request([1] * 200, greedy(20))
    [output] = run_to_end(engine).values()
    assert len(output.outputs[0].token_ids) == 20


@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
@pytest.mark.parametrize("caching", [False, True])
def test_requests_that_do_not_fit_together(make_model, mode, caching):
    """8 blocks for 6 requests that need 2 each in the end; 3 requests begin alike. Copies to pinned memory and
    back run beside the forward passes, and tokens are those of transformers."""
    folder = make_model("llama", head_dim=64, num_attention_heads=8)
    engine = Engine(
        folder, device="cuda", block_size=128, num_blocks=9, max_num_seqs=8, max_num_batched_tokens=512,
        preemption_mode=mode, enable_prefix_caching=caching,
    )  # fmt: skip
    common = [(5 * i + 1) % 32 for i in range(128)]
    prompts = [(common if n % 2 else []) + [(3 * n + i) % 32 for i in range(120 - 100 * (n % 2))] for n in range(6)]
    ids = [engine.add_request(prompt, greedy(60)) for prompt in prompts]
    outputs = run_to_end(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert outputs[request_id].outputs[0].token_ids == transformers_greedy(folder, prompt, 60)
    assert all(0 < cost < math.inf for cost in engine.runner.costs) or mode == "recompute"
    modes = engine.metrics.preemptions_by_mode
    assert modes.total() > 0
    assert mode == "auto" or set(modes) == {mode}
    assert (engine.metrics.num_swapped_in_blocks > 0) or mode != "swap"
    assert (engine.metrics.num_cached_tokens > 0) == caching


@pytest.mark.parametrize("late", ["copies", "compute"])
def test_copies_and_compute_wait_for_each_other(monkeypatch, late):
    """Two requests' blocks are swapped out in groups through a small staging buffer and overwritten at once. They
    are swapped in in another order and read at once, while either stream is delayed."""
    num_blocks, size = 64, 16
    block_bytes = 2 * 4 * size * 2 * 64 * 4
    monkeypatch.setattr(swap, "STAGING_BYTES", 4 * block_bytes)
    caches = [torch.randn(4, num_blocks * size, 2, 64, device="cuda") for _ in "kv"]
    by_block = [cache.unflatten(1, (num_blocks, size)) for cache in caches]
    host = HostCache(caches, num_blocks + 1, size)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        device = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
        hosts = (torch.randperm(num_blocks, generator=generator) + 1).tolist()
        back = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
        expected = [blocks[:, device].clone() for blocks in by_block]
        if late == "compute":
            torch.cuda._sleep(20_000_000)
        for first in (0, 30):
            if late == "copies":
                with torch.cuda.stream(host.stream):
                    torch.cuda._sleep(20_000_000)
            host.swap_out(list(zip(device, hosts, strict=False))[first : first + 30])
        for cache in caches:
            cache.fill_(torch.nan)
        order = torch.randperm(60, generator=generator).tolist()
        host.swap_in([(hosts[index], back[index]) for index in order])
        for blocks, wanted in zip(by_block, expected, strict=True):
            assert torch.equal(blocks[:, back[:60]], wanted[:, :60])
        for cache in caches:
            cache.copy_(torch.randn(cache.shape, device="cuda"))
