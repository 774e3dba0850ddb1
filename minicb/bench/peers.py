"""Other libraries with the same weights and workload as minicb, measured one after another in one process."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from minicb.bench.measure import Bench, describe_workload, run_workload
from minicb.bench.tables import Table
from minicb.simulate.workload import Arrival, WorkloadArgs, make_workload


def transformers_continuous(model: Any, workload: Sequence[Arrival], slots: int) -> float:
    """Output tokens/s of continuous batching, as in `generate_batch`, but with an output length per request."""
    from transformers.generation import ContinuousBatchingConfig  # the first releases of transformers 5 lack it

    config = GenerationConfig(
        do_sample=False, max_new_tokens=max(arrival.output_len for arrival in workload), eos_token_id=-1
    )
    batching = ContinuousBatchingConfig(max_requests_per_batch=slots, allow_block_sharing=False)
    with model.continuous_batching_context_manager(config, continuous_batching_config=batching) as manager:
        began = time.perf_counter()
        for arrival in workload:
            manager.add_request(arrival.prompt, max_new_tokens=arrival.output_len, eos_token_id=-1)
        num_tokens = num_finished = 0
        while num_finished < len(workload):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                num_finished += 1
                num_tokens += len(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError("transformers' continuous batching stopped early")
        seconds = time.perf_counter() - began
    assert num_tokens == num_output_tokens(workload), (num_tokens, num_output_tokens(workload))
    return num_tokens / seconds


def transformers_static(model: Any, workload: Sequence[Arrival], slots: int) -> float:
    """Output tokens/s of `generate` on padded batches, each as long as its longest output."""
    began = time.perf_counter()
    for first in range(0, len(workload), slots):
        batch = workload[first : first + slots]
        prompts, lens = [arrival.prompt for arrival in batch], [arrival.output_len for arrival in batch]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
        config = GenerationConfig(
            do_sample=False, max_new_tokens=max(lens), min_new_tokens=max(lens), eos_token_id=None, pad_token_id=0
        )
        model.generate(ids, attention_mask=mask, generation_config=config)
    return num_output_tokens(workload) / (time.perf_counter() - began)


def load_transformers(folder: str, device: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model = model.to(device).eval()
    model.set_attn_implementation("sdpa")
    return model


def num_output_tokens(workload: Sequence[Arrival]) -> int:
    return sum(arrival.output_len for arrival in workload)


def compare_table(bench: Bench, model: Any) -> Table:
    """minicb and transformers with the same weights and workload, one after another, in two rounds.

    No round finds the prompts of an earlier one: every run has an empty KV cache, and prefix caching is off in both
    libraries.
    """
    slots = bench.sizes.slots
    defaults: dict[str, Any] = {
        "num_prompts": 3 * slots, "random_input_len": 108, "random_range_ratio": 0.85, "random_output_len": 64,
        "output_distribution": "exponential", "max_output_len": 256,
    }  # fmt: skip
    workload = bench.workload(**defaults)
    small = make_workload(WorkloadArgs(**(defaults | {"num_prompts": slots, "max_output_len": 4})), bench.vocab_size)
    peers: dict[str, Callable[[Sequence[Arrival]], float]] = {
        "minicb": lambda work: run_workload(bench, work).tokens_per_s,
        "transformers, continuous (generate_batch)": lambda work: transformers_continuous(model, work, slots),
        "transformers, static (generate)": lambda work: transformers_static(model, work, slots),
    }
    for peer in peers.values():
        peer(small)  # a warm-up
    rounds = [{name: peer(workload) for name, peer in peers.items()} for _ in range(2)]
    best = {name: max(result[name] for result in rounds) for name in peers}
    roofline = num_output_tokens(workload) / run_workload(bench, workload).roofline_seconds  # of continuous batching
    rows = [
        {
            "engine": name,
            "tok/s": speed,
            "% of roofline": 100 * speed / roofline,
            "minicb is faster by": best["minicb"] / speed,
        }
        for name, speed in best.items()
    ]
    title = (
        f"{describe_workload(workload)}, in {slots} slots, greedy, {str(model.dtype).removeprefix('torch.')}, "
        "the better of two rounds"
    )
    return {"title": title, "rows": rows}
