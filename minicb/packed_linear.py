"""Linear layers for CPUs with prepacked weights, in the layout of oneDNN's bfloat16 kernels.

Without them oneDNN rearranges the weights at every call. For the few rows of a decode that takes over a third
of the time: 16 rows through SmolLM2-135M's matrices took 16.7 ms, and 10.4 ms with prepacked weights (2 cores,
AVX-512 bf16, PyTorch 2.13). torch.compile's `freezing` uses the same operators, but it turns weights into
constants, so every layer would be compiled by itself.
"""

import torch
from torch import Tensor, nn

_library = torch.library.Library("minicb", "DEF")
_library.define("packed_linear(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor")


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")


def _packed_linear_shape(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return x.new_empty(x.shape[0], out_features)


# A custom operator, because torch.compile takes oneDNN's only with constant weights.
_library.impl("packed_linear", _packed_linear, "CompositeExplicitAutograd")
torch.library.register_fake("minicb::packed_linear", _packed_linear_shape, lib=_library)


class PackedLinear(nn.Module):
    """An nn.Linear in bfloat16 on a CPU: x [T, in_features] -> [T, out_features]."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.out_features = linear.out_features
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.minicb.packed_linear(x, self.packed, self.bias, self.out_features)


def pack_linears(model: nn.Module) -> None:
    """Replace the bfloat16 linear layers of a model on a CPU by packed ones, if the CPU has kernels for them."""
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child.weight.dtype is torch.bfloat16:
                setattr(module, name, PackedLinear(child))
