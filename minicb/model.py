"""One decoder-only transformer, configured for Llama, Mistral, Qwen2 and Qwen3.

Shapes: T packed tokens of all requests, hidden size H, head_dim D.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minicb.attention import Attention, write_kv
from minicb.batch import Batch

KVCaches = Sequence[tuple[Tensor, Tensor]]  # of each layer K and V, [num_blocks * block_size, kv_heads, D]


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]  # for each layer, its sliding window or None
    max_model_len: int
    frequencies: Tensor  # [head_dim / 2] float32, radians per position for each pair of dimensions (RoFormer, 2021)
    rope_scale: float = 1.0  # of cos and sin (YaRN, 2023)
    rms_norm_eps: float = 1e-6
    qkv_bias: bool = False
    output_bias: bool = False  # o_proj
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm of each head's query and key (Qwen3)

    @property
    def num_layers(self) -> int:
        return len(self.windows)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate dimensions i and i + D/2 as a pair. x [T, ..., D]; cos, sin broadcast to [T, ..., D/2] float32."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class RMSNorm(nn.Module):
    """Root mean square norm (2019), computed in float32 or wider."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class DecoderLayer(nn.Module):
    """Attention and MLP. Q, K and V come from one matrix product, gate and up from another: few, large kernels."""

    def __init__(self, config: ModelConfig, window: int | None, attention: Attention):
        super().__init__()
        self.window, self.attention = window, attention
        self.num_kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        self.group = config.num_heads // config.num_kv_heads
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv_sizes = (q_size, kv_size, kv_size)
        hidden, inner = config.hidden_size, config.intermediate_size
        self.input_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.qkv_proj = nn.Linear(hidden, q_size + 2 * kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, hidden, bias=config.output_bias)
        self.post_attention_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.gate_up_proj = nn.Linear(hidden, 2 * inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, hidden, bias=config.mlp_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch) -> Tensor:
        """x [T, H] -> [T, H]; cos, sin [T, D/2]. Writes the layer's cache in place."""
        q, k, v = self.qkv_proj(self.input_norm(x)).split(self.qkv_sizes, dim=-1)
        k = k.unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = v.unflatten(-1, (self.num_kv_heads, self.head_dim))
        q = q.unflatten(-1, (self.num_kv_heads, self.group, self.head_dim))
        k = apply_rope(self.k_norm(k), cos[:, None], sin[:, None])
        q = apply_rope(self.q_norm(q), cos[:, None, None], sin[:, None, None])
        write_kv(k_cache, v_cache, k, v, batch)
        attended = self.attention(q, k_cache, v_cache, batch, self.window, self.head_dim**-0.5)
        x = x + self.o_proj(attended.to(x.dtype))
        gate, up = self.gate_up_proj(self.post_attention_norm(x)).chunk(2, dim=-1)
        return x + self.down_proj(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, config: ModelConfig, attention: Attention):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, window, attention) for window in config.windows)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self, batch: Batch, caches: KVCaches, frequencies: Tensor, run_layer: Callable[..., Tensor] = nn.Module.__call__
    ) -> Tensor:
        """One forward pass over all chunks of a step.

        frequencies: ModelConfig's, on the device. Not a buffer, because `.to(dtype)` would round it.
        run_layer: calls a layer. One compiled function serves all layers.
        Returns logits, float32 or wider: [num_sampled, vocab_size], or in a step of decodes alone
        [T, vocab_size] with the wanted rows first.
        """
        x = self.embed_tokens(batch.token_ids)
        angles = batch.positions[:, None] * frequencies
        cos, sin = angles.cos() * self.config.rope_scale, angles.sin() * self.config.rope_scale
        for layer, (k_cache, v_cache) in zip(self.layers, caches, strict=True):
            x = run_layer(layer, x, cos, sin, k_cache, v_cache, batch)
        if batch.logits_rows is not None:
            x = x[batch.logits_rows]
        logits = self.lm_head(self.norm(x))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
