"""Loading: what a checkpoint must hold, the names in errors, dummy weights, dtypes."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from conftest import CONFIGS, TINY, MakeModel, greedy, run_to_end
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from minicb import Engine
from minicb.attention import gather_attention
from minicb.loader import FAMILIES, checkpoint_views, find_folder, load_model, read_config
from minicb.model import Model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
Edit = Callable[..., Path]


@pytest.fixture
def edit(tmp_path: Path) -> Edit:
    """edit(folder, config={…}, drop=[…], add={…}) -> a copy of the folder, changed.

    config: keys to set in config.json; drop: names of tensors to remove; add: tensors by name.
    """

    def change(folder: Path, config: dict | None = None, drop: tuple = (), add: dict | None = None) -> Path:
        copy = tmp_path / f"copy-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(folder, copy)
        settings = json.loads((copy / "config.json").read_text()) | (config or {})
        (copy / "config.json").write_text(json.dumps(settings))
        tensors = load_file(copy / "model.safetensors") | (add or {})
        for name in drop:
            del tensors[name]
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
        return copy

    return change


@pytest.fixture
def fresh_memory_is_nan() -> Iterator[None]:
    """torch fills new tensors with NaN, so a parameter that isn't loaded is noticed."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def load(folder: Path, **kwargs) -> Model:
    config, hf = read_config(folder)
    arguments = {"attention": gather_attention, "dtype": torch.float32, "device": torch.device("cpu")}
    return load_model(folder, config, hf, **(arguments | kwargs))


def make_engine(folder: Path, **kwargs) -> Engine:
    arguments = {"device": "cpu", "block_size": 4, "num_blocks": 40, "max_num_seqs": 8, "enforce_eager": True}
    return Engine(folder, **(arguments | kwargs))


def greedy_tokens(engine: Engine) -> list[int]:
    engine.add_request(PROMPT, greedy(8))
    (output,) = run_to_end(engine).values()
    return output.outputs[0].token_ids


def last_logits(folder: Path) -> Tensor:
    """Of our model, for PROMPT: [vocab]."""
    engine, logits = make_engine(folder), []
    engine.runner.model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output[-1]))
    engine.add_request(PROMPT, greedy(1))
    run_to_end(engine)
    return logits[0]


def assert_equals_transformers(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.tensor([PROMPT])).logits[0, -1]
    torch.testing.assert_close(last_logits(folder), theirs, atol=1e-4, rtol=0)


# ------------------------------------------------------------------ names and files


@pytest.mark.parametrize("family", CONFIGS)
def test_every_tensor_of_the_checkpoint_arrives(make_model: MakeModel, family: str, fresh_memory_is_nan) -> None:
    folder = make_model(family)
    model = load(folder)
    views, tensors = checkpoint_views(model), load_file(folder / "model.safetensors")
    assert views.keys() == tensors.keys()
    assert all(torch.equal(views[name], tensor) for name, tensor in tensors.items())
    assert all(parameter.isfinite().all() for parameter in model.parameters())  # the views cover all of them


def test_head_absent_though_tied_is_the_embedding(make_model: MakeModel) -> None:
    folder = make_model("llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    model = load(folder)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert_equals_transformers(folder)


def test_head_present_though_tied_is_used(make_model: MakeModel, edit: Edit) -> None:
    """As in transformers 5, the file wins over config.json."""
    folder = make_model("llama", tie_word_embeddings=True)
    own_head = torch.randn(32, 64)
    with_head = edit(folder, add={"lm_head.weight": own_head})
    assert torch.equal(load(with_head).lm_head.weight, own_head)
    assert_equals_transformers(with_head)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    with_copy = edit(folder, add={"lm_head.weight": embedding.clone()})  # older checkpoints hold it twice
    assert torch.equal(last_logits(with_copy), last_logits(folder))


def test_head_absent_though_untied_is_refused(tiny: Path, edit: Edit) -> None:
    with pytest.raises(ValueError, match=r"lacks 1 tensors: lm_head\.weight"):
        load(edit(tiny, drop=("lm_head.weight",)))


@given(data=st.data())
def test_any_missing_tensor_is_named(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory, data) -> None:
    folder, without = make_model("qwen2"), tmp_path_factory.mktemp("without")
    tensors = load_file(folder / "model.safetensors")
    name = data.draw(st.sampled_from(sorted(tensors)))
    del tensors[name]
    shutil.copy(folder / "config.json", without)
    save_file(tensors, without / "model.safetensors")
    with pytest.raises(ValueError, match="lacks 1 tensors") as error:
        load(without)
    assert name in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",  # a bias that config.json doesn't switch on
        "model.layers.2.mlp.up_proj.weight",  # of a layer that isn't there
        "model.layers.0.self_attn.q_norm.weight",
        "score.weight",
    ],
)
def test_tensor_that_nothing_uses_is_named(tiny: Path, edit: Edit, name: str) -> None:
    with pytest.raises(ValueError, match="doesn't use") as error:
        load(edit(tiny, add={name: torch.zeros(4)}))
    assert name in str(error.value)


@pytest.mark.parametrize(
    ("family", "switch", "name"),
    [
        ("llama", "attention_bias", "model.layers.0.self_attn.o_proj.bias"),
        ("llama", "mlp_bias", "model.layers.0.mlp.down_proj.bias"),
        ("qwen3", "attention_bias", "model.layers.0.self_attn.o_proj.bias"),
    ],
)
def test_biases_are_there_exactly_when_the_config_says_so(
    make_model: MakeModel, edit: Edit, family: str, switch: str, name: str
) -> None:
    with pytest.raises(ValueError, match=f"doesn't use: .*{name}"):
        load(edit(make_model(family, **{switch: True}), config={switch: False}))
    with pytest.raises(ValueError, match=f"lacks .* tensors: .*{name}"):
        load(edit(make_model(family), config={switch: True}))


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("model.layers.0.self_attn.k_proj.weight", [16, 64], [32, 64]),  # one KV head instead of two
        ("model.layers.1.mlp.down_proj.weight", [64, 95], [64, 96]),
        ("model.embed_tokens.weight", [33, 64], [32, 64]),
        ("model.norm.weight", [1], [64]),  # a shape that would broadcast
        ("model.layers.1.input_layernorm.weight", [], [64]),
    ],
)
def test_wrong_shape_is_named_with_both_shapes(tiny: Path, edit: Edit, name: str, shape: list, wanted: list) -> None:
    with pytest.raises(ValueError) as error:
        load(edit(tiny, add={name: torch.zeros(shape)}))
    assert all(str(part) in str(error.value) for part in (name, shape, wanted))


def test_stored_rope_frequencies_are_ignored(tiny: Path, edit: Edit) -> None:
    nonsense = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.full((8,), 7.0) for layer in range(2)}
    assert torch.equal(last_logits(edit(tiny, add=nonsense)), last_logits(tiny))


@pytest.fixture
def sharded(make_model: MakeModel, tmp_path: Path) -> Path:
    folder = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(make_model("qwen3")).save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 5
    return folder


def test_sharded_checkpoint_equals_the_single_file(sharded: Path, make_model: MakeModel) -> None:
    ours, whole = load(sharded).state_dict(), load(make_model("qwen3")).state_dict()
    assert ours.keys() == whole.keys()
    assert all(torch.equal(ours[name], whole[name]) for name in whole)


def test_shards_without_an_index_are_found(sharded: Path, make_model: MakeModel) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    assert torch.equal(last_logits(sharded), last_logits(make_model("qwen3")))


def test_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[3]
    shard.unlink()
    with pytest.raises(ValueError, match=shard.name):
        load(sharded)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"])
def test_file_that_is_no_safetensors_is_named(tiny: Path, edit: Edit, content: bytes) -> None:
    folder = edit(tiny)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"can't read .*model\.safetensors"):
        load(folder)


def test_other_safetensors_beside_the_model_are_not_read(tiny: Path, edit: Edit) -> None:
    """Mistral's folders hold all weights a second time, under other names."""
    folder = edit(tiny)
    save_file({"layers.0.attention.wq.weight": torch.zeros(4)}, folder / "consolidated.safetensors")
    assert torch.equal(last_logits(folder), last_logits(tiny))


def test_folder_without_weights_is_refused(tiny: Path, tmp_path: Path) -> None:
    shutil.copy(tiny / "config.json", tmp_path)
    with pytest.raises(ValueError, match=r"no \*\.safetensors .*load_format='dummy'"):
        make_engine(tmp_path)


# ------------------------------------------------------------------ what can't be run


def test_unsupported_architecture_is_refused_before_any_weight_is_read(tmp_path: Path) -> None:
    GPT2Config(architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"reading this would be another error")
    with pytest.raises(ValueError, match="architecture GPT2LMHeadModel is not supported") as error:
        make_engine(tmp_path)
    assert all(name in str(error.value) for name in FAMILIES)


def test_architecture_that_transformers_does_not_know_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NewForCausalLM"], "model_type": "new"}))
    with pytest.raises(ValueError, match="architecture NewForCausalLM is not supported"):
        read_config(tmp_path)


@pytest.mark.parametrize("architectures", [None, []])
def test_config_without_architectures_is_refused(tiny: Path, edit: Edit, architectures: list | None) -> None:
    with pytest.raises(ValueError, match="none named, model_type 'llama'"):
        read_config(edit(tiny, config={"architectures": architectures}))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    ],
)
def test_setting_that_is_not_supported_is_named(tiny: Path, edit: Edit, config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(edit(tiny, config=config))


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        make_engine(tmp_path)


@pytest.mark.parametrize("name", ["no-such-model", "no-such/model", "./no/such/folder"])
def test_model_that_is_nowhere_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="neither a local folder nor found on the hub") as error:
        find_folder(name)
    assert repr(name) in str(error.value)


# ------------------------------------------------------------------ what config.json says


def test_llama_has_no_window_even_if_its_config_names_one(tiny: Path, edit: Edit) -> None:
    folder = edit(tiny, config={"sliding_window": 4})
    assert read_config(folder)[0].windows == (None, None)
    assert_equals_transformers(folder)


def test_mistral_with_layer_types_has_windows_in_some_layers(make_model: MakeModel, edit: Edit) -> None:
    layer_types = ["full_attention", "sliding_attention"]
    folder = edit(make_model("mistral"), config={"sliding_window": 4, "layer_types": layer_types})
    assert read_config(folder)[0].windows == (None, 4)
    assert_equals_transformers(folder)


@pytest.mark.parametrize(
    ("rope", "max_model_len"),
    [
        ({"rope_type": "default"}, 256),
        ({"rope_type": "linear", "factor": 4.0}, 1024),
        # Llama 3.1 writes the stretched length into max_position_embeddings; yarn's is found either way.
        (
            {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            256,
        ),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 2.5}, 640),
    ],
)
def test_stretched_rope_allows_longer_requests(tiny: Path, edit: Edit, rope: dict, max_model_len: int) -> None:
    folder = edit(tiny, config={"rope_parameters": {"rope_theta": 10000.0} | rope})
    assert read_config(folder)[0].max_model_len == max_model_len
    make_engine(folder, max_model_len=max_model_len)
    with pytest.raises(ValueError, match=f"max_model_len is .* allows {max_model_len}"):
        make_engine(folder, max_model_len=max_model_len + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtype_auto_is_that_of_the_checkpoint(tiny: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    AutoModelForCausalLM.from_pretrained(tiny, dtype=dtype).save_pretrained(tmp_path)
    assert make_engine(tmp_path).runner.model.lm_head.weight.dtype == dtype
    assert make_engine(tmp_path, dtype="float32").runner.model.lm_head.weight.dtype == torch.float32
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["torch_dtype"] = settings.pop("dtype")  # as transformers 4 called it
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert make_engine(tmp_path).runner.model.lm_head.weight.dtype == dtype


@pytest.mark.parametrize("dtype", ["float8", "int8", "half", "", None, torch.int32, 16])
def test_bad_dtype_is_named(tiny: Path, dtype: object) -> None:
    with pytest.raises(ValueError, match="dtype must be one of") as error:
        make_engine(tiny, dtype=dtype)
    assert str(dtype).removeprefix("torch.") in str(error.value)


# ------------------------------------------------------------------ dummy weights


@pytest.fixture
def config_alone(tmp_path: Path) -> Callable[..., Path]:
    """config_alone(family, …) -> a folder that holds nothing but config.json."""

    def write(family: str, **overrides) -> Path:
        architecture = next(name for name in FAMILIES if name.lower().startswith(family))
        CONFIGS[family](**(TINY | overrides), architectures=[architecture]).save_pretrained(tmp_path)
        return tmp_path

    return write


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("tied", [False, True])
def test_dummy_weights_need_only_the_config(config_alone, family: str, tied: bool, fresh_memory_is_nan) -> None:
    folder = config_alone(family, tie_word_embeddings=tied)
    assert [file.name for file in folder.iterdir()] == ["config.json"]
    engine = make_engine(folder, load_format="dummy")
    model = engine.runner.model
    assert (model.lm_head.weight is model.embed_tokens.weight) == tied
    assert len(greedy_tokens(engine)) == 8
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            assert parameter.std().item() == pytest.approx(TINY["initializer_range"], rel=0.1), name
        else:
            assert (parameter == (0 if name.endswith("bias") else 1)).all(), name


def test_dummy_weights_follow_the_seed(config_alone) -> None:
    folder = config_alone("llama")
    first, again, other = (
        make_engine(folder, load_format="dummy", seed=seed).runner.model.state_dict() for seed in (1, 1, 2)
    )
    matrices = [name for name, tensor in first.items() if tensor.dim() == 2]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in matrices)


def test_dummy_weights_do_not_read_what_is_there(tiny: Path, edit: Edit) -> None:
    folder = edit(tiny)
    (folder / "model.safetensors").write_bytes(b"reading this would be an error")
    assert len(greedy_tokens(make_engine(folder, load_format="dummy"))) == 8


@pytest.mark.parametrize("load_format", ["safetensors", "", None])
def test_bad_load_format_is_named(tiny: Path, load_format: object) -> None:
    with pytest.raises(ValueError, match="load_format must be one of 'auto', 'dummy'"):
        make_engine(tiny, load_format=load_format)
