"""minicb/device.py: the device, the dtype, and the memory that the cache takes."""

import pytest
import torch

from minicb.device import (
    CPU_CACHE_BYTES,
    cache_budget,
    choose_block_size,
    choose_device,
    most_cache_blocks,
    num_cache_blocks,
    read_dtype,
)


def test_the_cache_takes_what_fits_and_no_more_than_can_be_used():
    assert num_cache_blocks(budget_bytes=1000, block_bytes=10, useful_blocks=500) == 100
    assert num_cache_blocks(budget_bytes=1000, block_bytes=10, useful_blocks=7) == 8, "and the null block"


@pytest.mark.parametrize("budget", [-(10**9), 0, 19 * 2**20])
def test_no_room_for_a_cache_is_an_error_with_the_numbers(budget):
    """A tiny or negative amount of memory is left."""
    with pytest.raises(ValueError, match=rf"{budget / 2**20:.1f} MiB left.*two blocks of 10.00 MiB"):
        num_cache_blocks(budget, block_bytes=10 * 2**20, useful_blocks=100)


def test_a_gpu_is_filled_up_to_its_utilization(monkeypatch):
    """Of 1000 bytes 300 are in use, and a step needs 50: 90% leave 550. A CPU gets a fixed size."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
    assert cache_budget(torch.device("cuda"), utilization=0.9, step_bytes=50) == 550
    assert cache_budget(torch.device("cpu"), utilization=0.9, step_bytes=50) == CPU_CACHE_BYTES


def test_the_device_is_cuda_where_there_is_one(monkeypatch):
    for available, expected in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert choose_device(None).type == expected
        assert choose_device(torch.device("cpu")).type == "cpu"


@pytest.mark.parametrize("device", ["gpu", "meta", 5, "cuda", torch.device("cuda:1")])
def test_a_device_that_is_not_there_is_named(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="^device "):
        choose_device(device)


def test_the_chosen_cuda_device_is_the_current_one(monkeypatch):
    """Triton, pinned memory and graphs go by the current device. "cuda" is the current one already."""
    current = []
    for name, value in {"is_available": lambda: True, "device_count": lambda: 2, "set_device": current.append}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert choose_device("cuda:1") == torch.device("cuda:1")
    assert choose_device("cuda") == torch.device("cuda")
    assert choose_device("cpu") == torch.device("cpu")
    assert current == [torch.device("cuda:1")]
    with pytest.raises(ValueError, match="^device is 'cuda:2', but torch finds only 2 CUDA devices$"):
        choose_device("cuda:2")


def test_block_sizes_that_cuda_kernels_have():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert (choose_block_size(None, cpu, False), choose_block_size(None, cuda, False)) == (32, 128)
    assert choose_block_size(5, cpu, False) == choose_block_size(5, cuda, enforce_eager=True) == 5
    assert [choose_block_size(size, cuda, False) for size in (16, 32, 64, 128, 384)] == [16, 32, 64, 128, 384]
    for size in (1, 8, 48, 96, 192):
        with pytest.raises(
            ValueError, match=f"^block_size must be 16, 32, 64 or a multiple of 128 on CUDA, not {size}$"
        ):
            choose_block_size(size, cuda, False)


def test_a_cache_on_cuda_is_small_enough_for_int32(monkeypatch):
    """128 tokens, 8 heads of 128: 16,384 blocks are 2**31 numbers, one too many."""
    numel = 128 * 8 * 128
    for version, most in (("2.13.1+cu130", 16383), ("2.14.0", 2**31)):
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
        assert most_cache_blocks(torch.device("cuda"), numel) == most
        assert most_cache_blocks(torch.device("cpu"), numel) == 2**31


def test_auto_is_the_dtype_of_the_checkpoint():
    assert read_dtype("auto", torch.bfloat16) is torch.bfloat16
    assert read_dtype("auto", None) is torch.float32
    assert read_dtype(torch.float16, torch.bfloat16) is read_dtype("float16", None) is torch.float16
    with pytest.raises(ValueError, match="^dtype must be one of 'float16'"):
        read_dtype("int8", None)
