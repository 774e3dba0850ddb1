"""The model against transformers on the same weights: families, RoPE, windows, head sizes, dtypes."""

import json
import shutil
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import MakeModel, greedy, run_to_end, transformers_greedy
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from minicb import Engine
from minicb.attention import gather_attention, paged_attention
from minicb.batch import BatchBuilder
from minicb.loader import read_config
from minicb.model import RMSNorm
from minicb.params import SamplingParams
from minicb.plan import Chunk
from minicb.request import Request

BLOCK_SIZE = 4

QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": 5}
VARIANTS = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_attention_bias": ("llama", {"attention_bias": True}),
    "llama_mlp_bias": ("llama", {"mlp_bias": True}),
    "llama_one_kv_head": ("llama", {"num_key_value_heads": 1}),
    "llama_no_groups": ("llama", {"num_key_value_heads": 4}),
    "llama_head_dim_48": ("llama", {"head_dim": 48}),  # 4 heads of 48 beside a hidden size of 64
    "llama_6_heads_of_24": (
        "llama",
        {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24},
    ),
    "qwen3_9_heads_of_96": (
        "qwen3",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 96},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_window": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_window_from_layer_1": ("qwen2", QWEN_WINDOWS | {"max_window_layers": 1}),
    "qwen2_window_by_layer_types": (
        "qwen2",
        QWEN_WINDOWS | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3_attention_bias": ("qwen3", {"attention_bias": True}),
    "qwen3_window_from_layer_1": ("qwen3", QWEN_WINDOWS | {"max_window_layers": 1}),
    "qwen3_window_by_layer_types": (
        "qwen3",
        QWEN_WINDOWS | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
}
variants = pytest.mark.parametrize("variant", VARIANTS)


def make_engine(folder: Path, **kwargs) -> Engine:
    arguments = {"device": "cpu", "block_size": BLOCK_SIZE, "num_blocks": 40, "max_num_seqs": 8}
    return Engine(folder, **(arguments | {"max_num_batched_tokens": 64, "enforce_eager": True} | kwargs))


def random_prompt(length: int, seed: int = 0, vocab_size: int = 32) -> list[int]:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def logits_by_chunks(engine: Engine, tokens: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Logits of every position, [len(tokens), vocab], prefilled in chunks of these lengths.

    The runner computes logits of sampled rows only; here all rows are declared sampled.
    """
    runner = engine.runner
    request = Request("judged", tokens, SamplingParams())
    logits = []
    for length in lengths:
        start = request.num_computed_tokens
        end = start + length
        # Physical blocks go down while logical ones go up: nothing may depend on their order.
        request.block_table = array("i", range(runner.num_blocks - 1, -1, -1)[: -(-end // BLOCK_SIZE)])
        batch = runner.builder.build([Chunk.of(request, start, length)])
        batch = batch._replace(logits_rows=torch.arange(length, dtype=torch.int32))
        logits.append(runner.model(batch, runner.caches, runner.frequencies))
        request.num_computed_tokens = end
    assert request.num_computed_tokens == len(tokens)
    return torch.cat(logits)


@torch.no_grad()
def transformers_logits(folder: Path, tokens: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits of every position by transformers, [len(tokens), vocab]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)


# ------------------------------------------------------------------ families


@variants
def test_logits_of_every_position_equal_transformers(make_model: MakeModel, variant: str) -> None:
    family, overrides = VARIANTS[variant]
    folder, tokens = make_model(family, **overrides), random_prompt(23)
    engine, theirs = make_engine(folder), transformers_logits(folder, tokens)
    assert_close(logits_by_chunks(engine, tokens, [23]), theirs)
    assert_close(logits_by_chunks(engine, tokens, [5, 1, 6, 11]), theirs)
    assert_close(logits_by_chunks(engine, tokens, [1] * 23), theirs)  # as decodes would compute it


@variants
def test_greedy_tokens_equal_transformers(make_model: MakeModel, variant: str) -> None:
    family, overrides = VARIANTS[variant]
    folder = make_model(family, **overrides)
    engine = make_engine(folder, max_num_batched_tokens=7)  # so that long prompts come in chunks beside decodes
    prompts = {f"{length} tokens": random_prompt(length, seed=length) for length in (1, 4, 5, 18)}
    for request_id, prompt in prompts.items():
        engine.add_request(prompt, greedy(6), request_id=request_id)
    outputs = run_to_end(engine)
    ours = {request_id: output.outputs[0].token_ids for request_id, output in outputs.items()}
    assert ours == {request_id: transformers_greedy(folder, prompt, 6) for request_id, prompt in prompts.items()}


@pytest.mark.parametrize("variant", ["llama", "mistral_window"])
def test_any_chunking_gives_the_same_logits(make_model: MakeModel, variant: str) -> None:
    family, overrides = VARIANTS[variant]
    folder, tokens = make_model(family, **overrides), random_prompt(17)
    engine, theirs = make_engine(folder), transformers_logits(folder, tokens)

    @given(st.sets(st.integers(1, 16)))
    def check(ends: set[int]) -> None:
        bounds = [0, *sorted(ends), 17]
        lengths = [end - start for start, end in pairwise(bounds)]
        assert_close(logits_by_chunks(engine, tokens, lengths), theirs)

    check()


def test_a_later_token_never_changes_an_earlier_logit(make_model: MakeModel) -> None:
    engine = make_engine(make_model("llama"))

    @given(st.lists(st.integers(0, 31), min_size=9, max_size=9), st.integers(1, 9), st.integers(1, 31))
    def check(tokens: list[int], kept: int, shift: int) -> None:
        changed = tokens[:kept] + [(token + shift) % 32 for token in tokens[kept:]]
        before, after = (logits_by_chunks(engine, prompt, [9]) for prompt in (tokens, changed))
        assert torch.equal(before[:kept], after[:kept])
        assert not torch.equal(before[kept:], after[kept:]) or kept == 9

    check()


# ------------------------------------------------------------------ sliding windows


@pytest.mark.parametrize("length", range(3, 10))
def test_window_of_4_equals_transformers(make_model: MakeModel, length: int) -> None:
    folder, tokens = make_model("mistral", sliding_window=4), random_prompt(length)
    engine, theirs = make_engine(folder), transformers_logits(folder, tokens)
    assert_close(logits_by_chunks(engine, tokens, [length]), theirs)
    assert_close(logits_by_chunks(engine, tokens, [1] * length), theirs)


def test_window_of_4_hides_exactly_the_fifth_last_token(make_model: MakeModel) -> None:
    # One layer, because each further layer lets a token see another 3 positions back.
    engine = make_engine(make_model("mistral", sliding_window=4, num_hidden_layers=1))
    tokens = random_prompt(9)
    for position in range(8):
        changed = tokens[:position] + [(tokens[position] + 1) % 32] + tokens[position + 1 :]
        before, after = (logits_by_chunks(engine, prompt, [9]) for prompt in (tokens, changed))
        moved = (before != after).any(dim=1).nonzero().flatten().tolist()
        assert moved == list(range(position, min(position + 4, 9)))


# ------------------------------------------------------------------ RoPE

ORIGINAL = 16  # the context length before stretching; the prompts go beyond it
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL}
YARN = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}
ROPES = {
    "default": ("default", {}),
    "default_theta": ("default", {"rope_theta": 500.0}),
    "linear": ("linear", {"factor": 4.0}),
    "llama3": ("llama3", LLAMA3),
    "llama3_theta": ("llama3", LLAMA3 | {"rope_theta": 300.0, "low_freq_factor": 0.5, "high_freq_factor": 2.0}),
    "yarn": ("yarn", YARN),
    "yarn_theta": ("yarn", YARN | {"rope_theta": 100.0}),
    "yarn_attention_factor": ("yarn", YARN | {"attention_factor": 0.7}),
    "yarn_mscale": ("yarn", YARN | {"mscale": 0.707, "mscale_all_dim": 1.3}),
    "yarn_mscale_alone": ("yarn", YARN | {"mscale": 0.707}),  # without its partner it has no effect
    "yarn_not_truncated": ("yarn", YARN | {"rope_theta": 100.0, "truncate": False}),
    "yarn_betas": ("yarn", YARN | {"rope_theta": 100.0, "beta_fast": 1.0, "beta_slow": 0.1, "truncate": False}),
}
ropes = pytest.mark.parametrize("rope", ROPES)
WriteRope = Callable[..., Path]


@pytest.fixture
def write_rope(make_model: MakeModel, tmp_path: Path) -> WriteRope:
    """write_rope(rope, key, kind_key) -> a checkpoint with that rope in its config.json."""

    def write(rope: str, key: str = "rope_parameters", kind_key: str = "rope_type") -> Path:
        kind, settings = ROPES[rope]
        folder = tmp_path / f"{rope}-{key}-{kind_key}"
        shutil.copytree(make_model("llama"), folder)
        config = json.loads((folder / "config.json").read_text())
        config["max_position_embeddings"] = ORIGINAL if kind == "linear" else 4 * ORIGINAL
        del config["rope_parameters"]
        config[key] = {kind_key: kind, "rope_theta": 10000.0} | settings
        if key == "rope_scaling":  # the older form had theta beside it
            config["rope_theta"] = config[key].pop("rope_theta")
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


@ropes
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind_key", ["rope_type", "type"])
def test_rope_frequencies_equal_transformers(write_rope: WriteRope, rope: str, key: str, kind_key: str) -> None:
    config, hf = read_config(write_rope(rope, key, kind_key))
    theirs = LlamaRotaryEmbedding(hf)
    torch.testing.assert_close(config.frequencies, theirs.inv_freq, rtol=1e-6, atol=0)
    assert config.rope_scale == pytest.approx(theirs.attention_scaling)


@ropes
def test_rope_beyond_the_original_length_equals_transformers(write_rope: WriteRope, rope: str) -> None:
    folder, tokens = write_rope(rope), random_prompt(3 * ORIGINAL)
    theirs = transformers_logits(folder, tokens)
    assert_close(logits_by_chunks(make_engine(folder), tokens, [ORIGINAL + 1, 2 * ORIGINAL - 1]), theirs)


def test_rope_kinds_differ_in_logits(write_rope: WriteRope) -> None:
    """No two settings give the same model, so the comparisons above mean something."""
    tokens, same = random_prompt(3 * ORIGINAL), {"yarn_mscale_alone"}
    logits = [logits_by_chunks(make_engine(write_rope(rope)), tokens, [3 * ORIGINAL]) for rope in ROPES.keys() - same]
    for index, one in enumerate(logits):
        assert all((one - other).abs().max() > 1e-2 for other in logits[:index])


# ------------------------------------------------------------------ head sizes in the compiled kernels


@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(2, 3, 24), (3, 3, 96)])
@torch.no_grad()
def test_compiled_attention_takes_odd_groups_and_head_sizes(kv_heads: int, group: int, head_dim: int) -> None:
    """Query lengths 1 and 5 in one batch take the two paths of paged_attention."""
    num_blocks = 12
    builder = BatchBuilder(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        tile_size=8,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=32,
        windows=[None],
        device=torch.device("cpu"),
    )

    def chunk(block_table: list[int], start: int, length: int) -> Chunk:
        request = Request("", random_prompt(start + length), SamplingParams())
        request.block_table = array("i", block_table)
        # The builder learns of a block in the step that begins it, so let it see the earlier steps.
        if start:
            builder.build([Chunk.of(request, 0, start)])
        return Chunk.of(request, start, length)

    chunks = [chunk([7, 3], 6, 1), chunk([11, 1, 5], 8, 1), chunk([2, 9], 3, 5)]
    batch = builder.build(chunks)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(len(batch.token_ids), kv_heads, group, head_dim, generator=generator)
    k_cache, v_cache = torch.randn(2, num_blocks * BLOCK_SIZE, kv_heads, head_dim, generator=generator)
    compiled = torch.compile(paged_attention, dynamic=False, fullgraph=True, options={"epilogue_fusion": False})
    scale = head_dim**-0.5
    ours = compiled(q, k_cache, v_cache, batch, None, scale)
    obvious = gather_attention(q, k_cache, v_cache, batch, None, scale)
    assert_close(ours[:7], obvious[:7], tolerance=1e-5)


# ------------------------------------------------------------------ dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_half_precision_is_as_near_to_float32_as_that_of_transformers(
    make_model: MakeModel, family: str, dtype: torch.dtype
) -> None:
    folder, tokens = make_model(family), random_prompt(23)
    engine = make_engine(folder, dtype=str(dtype).removeprefix("torch."))
    assert {parameter.dtype for parameter in engine.runner.model.parameters()} == {dtype}
    ours = logits_by_chunks(engine, tokens, [11, 12])
    exact = transformers_logits(folder, tokens)
    theirs = transformers_logits(folder, tokens, dtype).float()
    assert ours.dtype == torch.float32
    assert ours.isfinite().all()
    assert (ours - exact).abs().mean() < 1.5 * (theirs - exact).abs().mean()
    engine.add_request(tokens, greedy(4))
    (output,) = run_to_end(engine).values()
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_norm_equals_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    """In half precision the mean of the squares must be taken in float32."""
    x = 3 * torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    ours, theirs = RMSNorm(64, 1e-6), LlamaRMSNorm(64, 1e-6)
    ours.weight.data = theirs.weight.data = torch.linspace(0.5, 1.5, 64).to(dtype)
    assert torch.equal(ours(x.to(dtype)), theirs(x.to(dtype)))


def test_norm_of_float64_is_not_rounded_to_float32() -> None:
    x = torch.randn(50, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = x / (x.square().mean(dim=1, keepdim=True) + 1e-6).sqrt()
    assert_close(RMSNorm(64, 1e-6).double()(x), wanted, tolerance=1e-14)


def test_float64_runs(make_model: MakeModel) -> None:
    """As near as float32: transformers' norms are float32 even then."""
    folder, tokens = make_model("llama"), random_prompt(23)
    ours = logits_by_chunks(make_engine(folder, dtype="float64"), tokens, [23])
    theirs = transformers_logits(folder, tokens, torch.float64)
    assert ours.dtype == torch.float64
    assert_close(ours, theirs, tolerance=1e-5)


# ------------------------------------------------------------------ what isn't computed


def test_only_sampled_rows_reach_the_head(tiny: Path) -> None:
    """The head is the largest matrix of a small model; a prompt of 30 tokens needs it once, not 30 times."""
    engine = make_engine(tiny, max_num_batched_tokens=8)
    rows = list[int]()
    engine.runner.model.lm_head.register_forward_hook(lambda module, inputs, output: rows.append(len(inputs[0])))
    for length in (30, 3, 9):
        engine.add_request(random_prompt(length), greedy(4))
    wanted, kinds = list[int](), set[str]()
    while engine.has_unfinished_requests():
        plan = engine.scheduler.schedule()
        if max(chunk.length for chunk in plan.chunks) > 1:
            wanted.append(sum(chunk.needs_sampling for chunk in plan.chunks))
            kinds.add("some sampled" if wanted[-1] else "none sampled")
        else:
            wanted.append(max(len(plan.chunks), 2))  # decodes alone: all rows, and a lone one is padded
            kinds.add("decodes")
        engine.scheduler.update(plan, engine.runner.execute(plan))
    assert rows == wanted
    assert kinds == {"none sampled", "some sampled", "decodes"}
