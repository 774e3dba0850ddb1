"""Packed linear layers compute what nn.Linear computes."""

import pytest
import torch
from torch import nn

from minicb import Engine
from minicb.packed_linear import PackedLinear, pack_linears

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="this CPU has no bfloat16 kernels of oneDNN",
)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 17])
def test_a_packed_layer_is_the_layer(bias, rows):
    """Odd numbers of features, and no rows, as when nothing is sampled."""
    torch.manual_seed(0)
    linear = nn.Linear(37, 23, bias=bias).bfloat16().requires_grad_(False)
    x = torch.randn(rows, 37).bfloat16()
    packed = PackedLinear(linear)(x)
    assert (packed.shape, packed.dtype) == ((rows, 23), torch.bfloat16)
    torch.testing.assert_close(packed, linear(x), atol=0.02, rtol=0.02)


def test_only_bfloat16_is_packed():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8).bfloat16()), nn.Embedding(4, 8).bfloat16())
    pack_linears(model)
    assert [type(module).__name__ for module in (model[0], model[1][0], model[2])] == [
        "Linear",
        "PackedLinear",
        "Embedding",
    ]


def test_a_compiled_bfloat16_engine_computes_what_an_eager_one_does(make_model):
    """Biases, untied head, whole and chunked prompts; as near to float32 as bfloat16 can be."""
    folder = make_model("qwen2", initializer_range=0.1)
    options = {"device": "cpu", "block_size": 4, "num_blocks": 40, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    exact = Engine(folder, dtype="float32", enforce_eager=True, **options)
    fast = Engine(folder, dtype="bfloat16", **options)
    assert {type(layer.qkv_proj).__name__ for layer in fast.runner.model.layers} == {"PackedLinear"}
    for length in (1, 2, 7, 16, 40):
        logits = []
        for engine in (exact, fast):
            engine.add_request([(3 * i) % 32 for i in range(length)], request_id="x")
            while True:
                plan = engine.scheduler.schedule()
                with torch.no_grad():
                    result = engine.runner._forward(engine.runner.builder.build(plan.chunks))
                if any(chunk.needs_sampling for chunk in plan.chunks):
                    break
                engine.scheduler.update(plan, [])
            logits.append(result[0])
            engine.abort_request("x")
        assert (logits[0] - logits[1]).abs().max() < 0.05 * logits[0].abs().max()
