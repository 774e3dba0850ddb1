"""From a Hugging Face folder (config.json, *.safetensors) to a model.

transformers reads the config and safetensors the files. This file maps their names to our fused
parameters, and refuses a checkpoint that doesn't fit the model exactly.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minicb.attention import Attention
from minicb.model import DecoderLayer, Model, ModelConfig

# The supported families differ in biases, in norms on Q and K, and in what sliding_window means (`_read_windows`).
FAMILIES: dict[str, Callable[[Any], dict[str, bool]]] = {
    "LlamaForCausalLM": lambda c: {
        "qkv_bias": c.attention_bias,
        "output_bias": c.attention_bias,
        "mlp_bias": c.mlp_bias,
    },
    "MistralForCausalLM": lambda c: {},
    "Qwen2ForCausalLM": lambda c: {"qkv_bias": True},
    "Qwen3ForCausalLM": lambda c: {"qkv_bias": c.attention_bias, "output_bias": c.attention_bias, "qk_norm": True},
}


def find_folder(model: str | Path) -> Path:
    """A local folder as it is; for a Hugging Face id its folder in the hub's cache, downloaded if missing."""
    if str(model) and Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download  # here: a local folder needs no hub

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
    try:
        # Mistral's repositories hold all weights a second time as consolidated*.
        return Path(snapshot_download(str(model), allow_patterns=patterns, ignore_patterns=["consolidated*"]))
    except Exception as error:
        raise ValueError(f"model {str(model)!r} is neither a local folder nor found on the hub: {error}") from error


def read_config(folder: Path) -> tuple[ModelConfig, PreTrainedConfig]:
    """Our config, and the transformers config that it was made from. ValueError for an unsupported model."""
    if not (folder / "config.json").exists():
        raise ValueError(f"no config.json in {folder}")
    raw, _ = PreTrainedConfig.get_config_dict(folder)
    architecture = (raw.get("architectures") or [f"(none named, model_type {raw.get('model_type')!r})"])[0]
    if architecture not in FAMILIES:
        raise ValueError(f"architecture {architecture} is not supported; supported: {', '.join(FAMILIES)}")
    if raw.get("quantization_config"):
        raise ValueError("quantization_config in config.json: quantized checkpoints are not supported")
    hf: Any = AutoConfig.from_pretrained(folder)
    if hf.hidden_act != "silu":
        raise ValueError(f"hidden_act {hf.hidden_act!r} is not supported; supported: silu")
    if hf.num_attention_heads % hf.num_key_value_heads:
        heads, kv_heads = hf.num_attention_heads, hf.num_key_value_heads
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd: RoPE rotates dimensions in pairs")
    frequencies, rope_scale, max_model_len = _read_rope(hf, head_dim)
    config = ModelConfig(
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        windows=_read_windows(architecture, hf),
        max_model_len=max_model_len,
        rms_norm_eps=hf.rms_norm_eps,
        frequencies=frequencies,
        rope_scale=rope_scale,
        **FAMILIES[architecture](hf),
    )
    return config, hf


def _read_windows(architecture: str, hf: Any) -> tuple[int | None, ...]:
    """Llama has no window, even if its config names one. Mistral's holds in all layers, Qwen's in the
    layers that layer_types names."""
    window = None if architecture == "LlamaForCausalLM" else hf.sliding_window
    kinds = getattr(hf, "layer_types", None) or ["sliding_attention"] * hf.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _read_rope(hf: Any, head_dim: int) -> tuple[Tensor, float, int]:
    """RoPE's frequencies, the scale of cos and sin, and the context length in tokens that they allow."""
    settings = hf.rope_parameters  # transformers converts older forms (rope_scaling, "type") to this one
    kind = settings.get("rope_type", "default")
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ValueError(f"rope_type {kind!r} is not supported; supported: default, linear, llama3, yarn")
    if settings.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor {settings['partial_rotary_factor']} is not supported, only 1.0")
    max_position = hf.max_position_embeddings
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return settings["rope_theta"] ** -exponents, 1.0, max_position
    original = settings.get("original_max_position_embeddings") or max_position
    factor = settings.get("factor") or max_position / original
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
    # Llama 3.1's config has the stretched length, the others often the length before stretching.
    stretched = original * factor if kind == "yarn" else max_position * factor if kind == "linear" else 0
    return frequencies, scale, max(max_position, int(stretched))


def load_model(
    folder: Path,
    config: ModelConfig,
    hf: Any,
    *,
    attention: Attention,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
) -> Model:
    """The model on the device, its weights cast to dtype.

    load_format: "dummy" makes random weights, normal with the config's initializer_range.
    ValueError names a tensor that is missing, unused or of the wrong shape.
    """
    with torch.device("meta"):
        model = Model(config, attention)
    model = model.to(dtype).to_empty(device=device).requires_grad_(False)
    names_to_files = {} if load_format == "dummy" else _list_tensors(folder)
    # As in transformers 5, a head in the files overrides a config that ties it to the embedding.
    if hf.tie_word_embeddings and "lm_head.weight" not in names_to_files:
        model.lm_head.weight = model.embed_tokens.weight
    if load_format == "dummy":
        _fill_randomly(model, getattr(hf, "initializer_range", 0.02), seed)
    else:
        _fill_from_files(checkpoint_views(model), names_to_files)
    return model


def _fill_randomly(model: Model, scale: float, seed: int) -> None:
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            parameter.normal_(0, scale, generator=generator)
        else:
            parameter.fill_(0 if name.endswith("bias") else 1)  # 1: norms


def _list_tensors(folder: Path) -> dict[str, Path]:
    """Name of each tensor in the checkpoint -> its file."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        files = sorted({folder / file for file in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"no *.safetensors in {folder}; load_format='dummy' runs without weights")
    names = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                names.update(dict.fromkeys(opened.keys(), file))
        except (FileNotFoundError, SafetensorError) as error:  # a shard is missing, or downloaded in part
            raise ValueError(f"can't read {file}: {error}") from error
    return names


def checkpoint_views(model: Model) -> dict[str, Tensor]:
    """Name of each tensor in a Hugging Face checkpoint -> the part of our parameters that it fills."""
    views = {"model.embed_tokens.weight": model.embed_tokens.weight, "model.norm.weight": model.norm.weight}
    if model.lm_head.weight is not model.embed_tokens.weight:
        views["lm_head.weight"] = model.lm_head.weight
    renamed = {
        "input_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "o_proj": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "down_proj": "mlp.down_proj",
    }
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        inner = layer.gate_up_proj.out_features // 2
        fused = {
            "qkv_proj": (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], list(layer.qkv_sizes)),
            "gate_up_proj": (["mlp.gate_proj", "mlp.up_proj"], [inner, inner]),
        }
        for ours, parameter in layer.named_parameters():
            module, kind = ours.rsplit(".", 1)
            theirs, sizes = fused.get(module) or ([renamed[module]], [len(parameter)])
            for name, part in zip(theirs, parameter.split(sizes), strict=True):
                views[f"model.layers.{index}.{name}.{kind}"] = part
    return views


def _fill_from_files(views: dict[str, Tensor], names_to_files: dict[str, Path]) -> None:
    # Older Llama checkpoints hold the rope frequencies, which follow from the config.
    names = {name for name in names_to_files if not name.endswith("rotary_emb.inv_freq")}
    if unused := sorted(names - views.keys()):
        raise ValueError(
            f"the checkpoint has {len(unused)} tensors that the model doesn't use: {', '.join(unused[:5])}"
        )
    if missing := sorted(views.keys() - names):
        raise ValueError(f"the checkpoint lacks {len(missing)} tensors: {', '.join(missing[:5])}")
    for file in sorted({names_to_files[name] for name in names}):
        with safe_open(file, framework="pt") as opened:
            for name in sorted(name for name in names if names_to_files[name] == file):
                tensor, view = opened.get_tensor(name), views[name]
                if tensor.shape != view.shape:
                    raise ValueError(f"{name} has shape {list(tensor.shape)}, the config wants {list(view.shape)}")
                view.copy_(tensor)
