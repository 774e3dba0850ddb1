"""The model runner: executes a step's plan on the device. It compiles, captures CUDA graphs and sizes the cache."""

import logging
import time
from array import array
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from minicb.batch import Batch, BatchBuilder
from minicb.blocks import NULL_BLOCK
from minicb.checks import check_int
from minicb.device import cache_budget, most_cache_blocks, num_cache_blocks, step_bytes
from minicb.memory import PreemptionCosts
from minicb.model import DecoderLayer, Model
from minicb.packed_linear import pack_linears
from minicb.params import SamplingParams
from minicb.plan import Chunk, StepPlan
from minicb.request import Request, Sampled
from minicb.sampler import sample
from minicb.swap import HostCache, seconds_of, staging_bytes

logger = logging.getLogger("minicb")


def mark_symbolic(batch: Batch, decodes_vary: bool, *tensors: Tensor) -> None:
    """Have torch.compile take the first dimension of a layer's inputs as a symbol where it varies from step to step.
    It raises an error if it can't."""
    varying = [*tensors, batch.positions, batch.kv_rows, batch.tile_tokens, batch.tile_positions, batch.out_rows]
    for lists in [*(batch.decode_lists.values() if decodes_vary else ()), *(batch.tile_lists or {}).values()]:
        varying += lists
    for tensor in varying:
        if tensor is not None:
            torch._dynamo.mark_dynamic(tensor, 0)


class ModelRunner:
    """Owns the model, the KV cache and the batch buffers. `execute` turns a plan into tokens.

    num_blocks: size of the KV cache. None takes what `cache_budget` allows, and no more than max_num_seqs
        requests of max_model_len can fill.
    swap_space: GiB of host memory for swapped requests. num_cpu_blocks is the same in blocks and overrides it.
    enforce_eager: compile nothing. The model must have been built with `gather_attention`.
    """

    def __init__(
        self,
        model: Model,
        *,
        device: torch.device,
        dtype: torch.dtype,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_blocks: int | None = None,
        gpu_memory_utilization: float = 0.9,
        swap_space: float = 0.0,
        num_cpu_blocks: int | None = None,
        enforce_eager: bool = False,
    ):
        self.model, self.device, self.block_size = model, device, block_size
        self.run_layer: Callable[..., Tensor] = nn.Module.__call__  # the warm-up replaces it by a compiled one
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = min(max_num_batched_tokens, self.max_num_seqs * max_model_len)
        config, began = model.config, time.perf_counter()
        # FlexAttention's CPU kernel is faster in float32, and repacks the whole cache in lower precision.
        cache_dtype = torch.promote_types(dtype, torch.float32) if device.type == "cpu" else dtype
        block_numel = block_size * config.num_kv_heads * config.head_dim  # of K, a layer
        block_bytes = 2 * config.num_layers * block_numel * cache_dtype.itemsize
        most = most_cache_blocks(device, block_numel)
        if num_blocks is None:
            useful = min(self.max_num_seqs * -(-max_model_len // block_size), most - 1)
            staging = staging_bytes(block_bytes) if (swap_space if num_cpu_blocks is None else num_cpu_blocks) else 0
            needed = step_bytes(config, self.max_num_batched_tokens, self.max_num_seqs) + staging
            num_blocks = num_cache_blocks(cache_budget(device, gpu_memory_utilization, needed), block_bytes, useful)
        self.num_blocks = check_int("num_blocks", num_blocks, below=most + 1)
        self.max_num_seqs = min(self.max_num_seqs, num_blocks - 1)  # a running request holds a block
        self.longest_request = min(max_model_len, (num_blocks - 1) * block_size)
        if num_cpu_blocks is None:  # host memory has a null block too
            useful = self.max_num_seqs * -(-self.longest_request // block_size)
            num_cpu_blocks = max(0, min(int(swap_space * 2**30) // block_bytes - 1, useful))
        self.num_cpu_blocks = num_cpu_blocks
        # K and V of all layers are two tensors, so that a block is swapped in two copies.
        shape = (config.num_layers, num_blocks * block_size, config.num_kv_heads, config.head_dim)
        try:
            self.k_cache, self.v_cache = (torch.zeros(shape, dtype=cache_dtype, device=device) for _ in "kv")
        except RuntimeError as error:
            size = f"{num_blocks * block_bytes / 2**30:.1f} GiB"
            raise ValueError(f"num_blocks is {num_blocks}, and there is no memory for {size}: {error}") from error
        self.caches = list(zip(self.k_cache, self.v_cache, strict=True))
        caches = (self.k_cache, self.v_cache)
        self.host_cache = HostCache(caches, num_cpu_blocks + 1, block_size) if num_cpu_blocks else None
        self.frequencies = config.frequencies.to(device)
        # On CUDA kernels and graphs have a fixed number of decode rows: 2, 4, 8 … max_num_seqs.
        self.buckets = [2] if device.type == "cuda" and not enforce_eager else []
        while self.buckets and self.buckets[-1] < self.max_num_seqs:
            self.buckets.append(min(2 * self.buckets[-1], self.max_num_seqs))
        self.builder = BatchBuilder(
            num_blocks=num_blocks,
            block_size=block_size,
            tile_size=128 if device.type == "cuda" else 32,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=max_model_len,
            windows=sorted(set(config.windows), key=lambda window: window or 0),
            device=device,
            buckets=self.buckets,
        )
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        size = f"{num_blocks * block_bytes / 2**30:.2f} GiB of {str(cache_dtype).removeprefix('torch.')}"
        what = f"{num_blocks - 1} blocks of {block_size} tokens, {size}, and {num_cpu_blocks} blocks of host memory"
        logger.info("KV cache: %s, in %.1f s", what, time.perf_counter() - began)
        if not enforce_eager:
            self._warm_up()
        self.costs = PreemptionCosts()
        if self.host_cache is not None:
            self.costs = PreemptionCosts(self.host_cache.measure(), self._measure_prefill())
            logger.info("swap: %.1e s a block, there and back; recompute: %.1e s a token", *self.costs)

    @torch.no_grad()
    def execute(self, plan: StepPlan) -> list[Sampled]:
        """Run one step. Returns a token for each chunk that needs sampling, in the plan's order; None where
        the logits are not finite."""
        if self.host_cache is not None:
            self.host_cache.swap_out(plan.swap_out)
            self.host_cache.swap_in(plan.swap_in)
        for request in plan.admitted:
            self.builder.note_blocks(request)
        if not plan.chunks:
            return []
        batch = self.builder.build(plan.chunks)
        requests = [chunk.request for chunk in batch.chunks if chunk.needs_sampling]
        logits = self._forward(batch)[: batch.num_sampled]
        if not requests:
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()  # the next step overwrites the batch's buffers
            return []
        tokens = dict(zip(requests, sample(logits, requests), strict=True))
        return [tokens[chunk.request] for chunk in plan.chunks if chunk.needs_sampling]

    def _forward(self, batch: Batch) -> Tensor:
        if batch.tile_lists is None and (size := len(batch.token_ids)) in self.graphs:
            graph, logits = self.graphs[size]
            graph.replay()
            return logits
        return self.model(batch, self.caches, self.frequencies, self.run_layer)

    @torch.no_grad()
    def _measure_prefill(self) -> float:
        """Seconds per token of a prefill that is long enough to keep the device busy."""
        enough = 256 if self.device.type == "cpu" else 1024
        length = max(1, min(self.max_num_batched_tokens // 2, self.longest_request, enough))
        return seconds_of(lambda: self._forward(self._dummy_batch(0, length)), self.device) / (2 * length)

    @torch.no_grad()
    def _warm_up(self) -> None:
        """Compile all forms of a step before the first request comes.

        One compiled layer serves all layers. It has two forms: for a step of decodes alone and for a mixed
        step. On a CPU sizes are symbols. On CUDA FlexAttention's decode kernel needs a constant number of
        decode rows, so there is a form for each bucket, and its whole forward pass becomes a CUDA graph.
        """
        began = time.perf_counter()
        if self.device.type == "cpu":
            pack_linears(self.model)
        # Each bucket and kind of step is a compilation, and past the limit torch.compile raises.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
        torch._dynamo.config.accumulated_recompile_limit = max(torch._dynamo.config.accumulated_recompile_limit, 1024)
        # FlexAttention's CPU kernel can't have the cast that follows it fused into it as an epilogue.
        options: dict[str, Any] = {"epilogue_fusion": False}
        compiled = torch.compile(DecoderLayer.forward, fullgraph=True, dynamic=False, options=options)

        def run_layer_with_symbols(layer, x, cos, sin, k_cache, v_cache, batch: Batch):
            mark_symbolic(batch, not self.buckets, x, cos, sin)
            return compiled(layer, x, cos, sin, k_cache, v_cache, batch)

        self.run_layer = run_layer_with_symbols
        # Typical sizes: inductor decides by them which loops are worth two threads.
        num_decodes = min(self.max_num_seqs, 16)
        prefill_length = max(2, min((self.max_num_batched_tokens - num_decodes) // 2, self.longest_request, 256))
        self._forward(self._dummy_batch(num_decodes, prefill_length))
        if not self.buckets:
            self._forward(self._dummy_batch(num_decodes))
        self.run_layer = compiled
        for size in reversed(self.buckets):  # the largest first: the smaller ones fit into its memory
            self._capture(size)
        what = f"compiled {max(len(self.buckets), 1)} forms of decode and a mixed step, {len(self.graphs)} CUDA graphs"
        logger.info("warm-up: %s, in %.1f s", what, time.perf_counter() - began)

    def _dummy_batch(self, num_decodes: int, prefill_length: int = 0) -> Batch:
        """Made-up requests in the null block."""
        lengths = [1] * num_decodes + [prefill_length] * (2 if prefill_length else 0)
        chunks = []
        for index, length in enumerate(lengths):
            request = Request(f"warm-up {index}", [0] * length, SamplingParams())
            request.block_table = array("i", [NULL_BLOCK] * -(-length // self.block_size))
            chunks.append(Chunk.of(request, 0, length))
        return self.builder.build(chunks)

    def _capture(self, size: int) -> None:
        """Record the forward pass of `size` decodes as a CUDA graph: one launch instead of hundreds."""
        batch = self._dummy_batch(size)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # the first compiles, the second makes lazy allocations
                self._forward(batch)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.graphs.values()))[0].pool() if self.graphs else None
        with torch.cuda.graph(graph, pool=pool, stream=stream):  # its own default belongs to the first device used
            logits = self.model(batch, self.caches, self.frequencies, self.run_layer)
        self.graphs[size] = (graph, logits)
