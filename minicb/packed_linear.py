"""Linear layers for CPUs, their weights laid out in advance as oneDNN's bfloat16 kernels want them.

Otherwise oneDNN rearranges them at every call, which for the few rows of a decode costs more than the
product itself: 16 rows through SmolLM2-135M's matrices took 16.7 ms so, and 10.4 ms packed (2 cores,
AVX-512 bf16, PyTorch 2.13). The operators are those that torch.compile's `freezing` uses; that option
itself would make constants of the weights and compile every layer anew.
"""

import torch
from torch import Tensor, nn

_library = torch.library.Library("minicb", "DEF")
_library.define("packed_linear(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor")


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")


def _packed_linear_shape(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return x.new_empty(x.shape[0], out_features)


# An operator of our own, because torch.compile takes oneDNN's only with weights that are constants.
_library.impl("packed_linear", _packed_linear, "CompositeExplicitAutograd")
torch.library.register_fake("minicb::packed_linear", _packed_linear_shape, lib=_library)


class PackedLinear(nn.Module):
    """What an nn.Linear computes, x [T, in_features] -> [T, out_features], bfloat16 on a CPU."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.out_features = linear.out_features
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.minicb.packed_linear(x, self.packed, self.bias, self.out_features)


def pack_linears(model: nn.Module) -> None:
    """Replace the linear layers of a model on a CPU by packed ones, if that is what its CPU is good at."""
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child.weight.dtype is torch.bfloat16:
                setattr(module, name, PackedLinear(child))
