"""What continuous batching is worth on this machine.

python bench.py                                  # all tables, a random model of a size that suits the device
python bench.py pressure prefix                  # some of them
python bench.py --model FOLDER                   # a real one
python bench.py --model FOLDER --compare transformers

Every timing excludes loading and compiling, every ratio is of two timings of the same run.
"""

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, Qwen3Config

from minicb import Engine, SamplingParams
from minicb.blocks import BlockPool
from minicb.memory import Memory
from minicb.metrics import Metrics
from minicb.plan import Chunk, StepPlan
from minicb.scheduler import Scheduler
from minicb.swap import seconds_of


class Workload(NamedTuple):
    """Prompts that all arrive at once, and how many tokens each wants."""

    prompts: list[list[int]]
    output_lens: list[int]


class Result(NamedTuple):
    tokens_per_s: float  # output tokens, of all requests, over the whole run
    occupancy: float  # running requests over slots, averaged over steps
    ttft: list[float]  # seconds from the beginning to each request's first token
    metrics: Metrics


class Sizes(NamedTuple):
    """What suits a device. The variance sweep on a GPU is that of Anyscale's "How continuous batching
    enables 23x throughput" (2023): prompts of 512, outputs exponential with mean 128; on a CPU a quarter."""

    slots: int
    num_prompts: int
    prompt_len: int
    mean_output: int
    caps: tuple[int, ...]
    contexts: tuple[int, ...]  # of the pressure table
    num_shared: int  # requests that share a system prompt


SIZES = {
    "cpu": Sizes(16, 64, 64, 32, (8, 32, 128, 384), (16, 128, 1024), 12),
    "cuda": Sizes(128, 1000, 512, 128, (32, 128, 512, 1536), (16, 64, 256, 1024, 3584), 100),
}
SYSTEM_PROMPT_LEN = 1000


def make_workload(num_prompts: int, prompt_lens: tuple[int, int], mean: float, cap: int, vocab_size: int) -> Workload:
    """Random prompts, lengths uniform in prompt_lens, outputs exponential with the mean, capped, at least 1."""
    rng = random.Random(0)
    prompts = make_prompts(rng, num_prompts, prompt_lens, vocab_size)
    return Workload(prompts, [max(1, min(cap, round(rng.expovariate(1 / mean)))) for _ in range(num_prompts)])


def make_prompts(rng: random.Random, num_prompts: int, lens: tuple[int, int], vocab_size: int) -> list[list[int]]:
    return [[rng.randrange(vocab_size) for _ in range(rng.randint(*lens))] for _ in range(num_prompts)]


def run(
    engine: Engine,
    workload: Workload,
    batching: str = "continuous",
    num_blocks: int | None = None,
    preemption_mode: str = "auto",
    enable_prefix_caching: bool = False,
) -> Result:
    """Serve the workload to its end, from an empty pool of num_blocks."""
    runner, own = engine.runner, engine.scheduler
    pool = BlockPool(num_blocks or runner.num_blocks, runner.block_size, enable_prefix_caching)
    host_pool = BlockPool(runner.num_cpu_blocks + 1, runner.block_size)
    engine.scheduler = scheduler = Scheduler(
        Memory(pool, host_pool, preemption_mode, runner.costs),
        own.policy,
        max_num_seqs=own.max_num_seqs,
        max_num_batched_tokens=own.max_num_batched_tokens,
        max_model_len=own.max_model_len,
        batching=batching,
    )
    for prompt, output_len in zip(*workload, strict=True):
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True))
    num_steps = num_tokens = num_running = 0
    ttft, metrics = list[float](), Metrics()
    began = time.perf_counter()
    while engine.has_unfinished_requests():
        plan = scheduler.schedule()
        num_running += len(scheduler.running)
        num_steps += 1
        moved = scheduler.update(plan, runner.execute(plan))
        num_tokens += len(moved)
        metrics.observe(plan.events)
        ttft += [time.perf_counter() - began for request in moved if request.num_output_tokens == 1]
    seconds = time.perf_counter() - began
    engine.scheduler = own
    return Result(num_tokens / seconds, num_running / num_steps / own.max_num_seqs, ttft, metrics)


# ------------------------------------------------------------------ the tables


def variance_table(engine: Engine, sizes: Sizes) -> dict[str, Any]:
    """Static against continuous batching, as output lengths spread more and more."""
    prompt_lens, vocab_size = (sizes.prompt_len, sizes.prompt_len), engine.vocab_size
    workloads = [
        make_workload(sizes.num_prompts, prompt_lens, sizes.mean_output, cap, vocab_size) for cap in sizes.caps
    ]
    run(engine, workloads[0])  # the first run touches memory for the first time
    rows = []
    for cap, workload in zip(sizes.caps, workloads, strict=True):
        static, continuous = run(engine, workload, "static"), run(engine, workload)
        rows.append(
            {
                "outputs up to": cap,
                "static tok/s": static.tokens_per_s,
                "of its slots in use": static.occupancy,
                "continuous tok/s": continuous.tokens_per_s,
                "of them in use": continuous.occupancy,
                "ratio": continuous.tokens_per_s / static.tokens_per_s,
            }
        )
    title = (
        f"Static against continuous batching: {sizes.num_prompts} prompts of {sizes.prompt_len} tokens in "
        f"{sizes.slots} slots, output lengths exponential (mean {sizes.mean_output}) up to a cap"
    )
    return {"title": title, "rows": rows}


def pressure_table(engine: Engine, sizes: Sizes) -> dict[str, Any]:
    """Swap against recompute, as contexts get longer (compare PagedAttention, 2023, section 7.3)."""
    size, slots, modes, rows = engine.runner.block_size, 4, ("swap", "recompute", "auto"), []
    for context in sizes.contexts:
        blocks = -(-context // size)
        pairs = [(block, block) for block in range(1, blocks + 1)]
        swap = execution_seconds(engine, [StepPlan(swap_out=pairs), StepPlan(swap_in=pairs)])
        recompute = execution_seconds(engine, prefill_plans(engine, context))
        prompts = make_prompts(random.Random(0), slots, (context, context), engine.vocab_size)
        workload = Workload(prompts, [2 * size] * slots)
        # Room for one block more for each of them, where each comes to want two.
        num_blocks = 1 + slots * (blocks + 1)
        run(engine, workload, num_blocks=num_blocks)  # the first run touches memory for the first time
        rounds = [
            {mode: run(engine, workload, num_blocks=num_blocks, preemption_mode=mode) for mode in modes}
            for _ in range(2)
        ]
        preemptions = rounds[0]["auto"].metrics.preemptions_by_mode
        rows.append(
            {
                "context": context,
                "swap ms": 1000 * swap,
                "recompute ms": 1000 * recompute,
                "auto swapped": f"{preemptions['swap']} of {preemptions.total()}",
                **{f"{mode} tok/s": max(results[mode].tokens_per_s for results in rounds) for mode in modes},
            }
        )
    title = (
        f"One request's KV copied out and back (whole blocks of {size} tokens) or computed again; and {slots} requests "
        f"with room for all contexts, but not for all of their {2 * size} output tokens, the better of two rounds"
    )
    return {"title": title, "rows": rows, "note": crossing(rows)}


def crossing(rows: list[dict[str, Any]]) -> str:
    """Where the measured times of a swap and of a recompute cross."""
    swap_wins = [row["swap ms"] < row["recompute ms"] for row in rows]
    if len(set(swap_wins)) == 1:
        return f"{'Swap' if swap_wins[0] else 'Recompute'} is faster at every length measured"
    turns = [
        f"{before['context']} and {after['context']}"
        for before, after, *wins in zip(rows, rows[1:], swap_wins, swap_wins[1:], strict=False)
        if wins[0] != wins[1]
    ]
    return f"They cross between contexts of {', '.join(turns)} tokens; at the longest {'swap' if swap_wins[-1] else 'recompute'} is faster"


def prefill_plans(engine: Engine, num_tokens: int) -> list[StepPlan]:
    """The steps that prefill one request with nothing beside it."""
    request = engine.make_request(range(num_tokens), SamplingParams(temperature=0))
    request.block_table.extend(range(1, 1 + engine.scheduler.pool.blocks_for(num_tokens)))
    size = engine.scheduler.max_num_batched_tokens
    return [StepPlan([Chunk(request, s, min(size, num_tokens - s))]) for s in range(0, num_tokens, size)]


def execution_seconds(engine: Engine, plans: list[StepPlan]) -> float:
    return seconds_of(lambda: [engine.runner.execute(plan) for plan in plans], engine.runner.device)


def prefix_table(engine: Engine, sizes: Sizes) -> dict[str, Any]:
    """A system prompt that all share, and what caching costs where nothing is shared."""
    rng, count = random.Random(0), sizes.num_shared
    users = make_prompts(rng, count, (20, 60), engine.vocab_size)
    own = make_prompts(rng, count, (SYSTEM_PROMPT_LEN, SYSTEM_PROMPT_LEN), engine.vocab_size)
    run(engine, Workload(own[:4], [2] * 4))  # the first run touches memory for the first time
    rows = []
    for name, systems in (("the same for all", own[:1] * count), ("each its own", own)):
        prompts = [system + user for system, user in zip(systems, users, strict=True)]
        workload = Workload(prompts, [16] * count)
        off, on = (run(engine, workload, enable_prefix_caching=caching) for caching in (False, True))
        rows.append(
            {
                "system prompt": name,
                "hit rate": on.metrics.prefix_cache_hit_rate,
                "mean TTFT s, caching off": statistics.mean(off.ttft),
                "TTFT s, on": statistics.mean(on.ttft),
                "off / on": statistics.mean(off.ttft) / statistics.mean(on.ttft),
                "tok/s, off": off.tokens_per_s,
                "tok/s, on": on.tokens_per_s,
            }
        )
    title = (
        f"Prefix caching: {count} requests at once in {sizes.slots} slots, a system prompt of {SYSTEM_PROMPT_LEN} tokens and "
        "20-60 of their own, 16 output tokens"
    )
    return {"title": title, "rows": rows}


TABLES: dict[str, Callable[[Engine, Sizes], dict[str, Any]]] = {
    "variance": variance_table,
    "pressure": pressure_table,
    "prefix": prefix_table,
}


# ------------------------------------------------------------------ peers


def transformers_continuous(model: Any, workload: Workload, slots: int) -> float:
    """Output tokens/s of what `generate_batch` runs, with a length for each request."""
    from transformers.generation import ContinuousBatchingConfig  # not in the oldest transformers 5

    config = GenerationConfig(do_sample=False, max_new_tokens=max(workload.output_lens), eos_token_id=-1)
    batching = ContinuousBatchingConfig(max_requests_per_batch=slots, allow_block_sharing=False)
    with model.continuous_batching_context_manager(config, continuous_batching_config=batching) as manager:
        began = time.perf_counter()
        for prompt, output_len in zip(*workload, strict=True):
            manager.add_request(prompt, max_new_tokens=output_len, eos_token_id=-1)
        num_tokens = num_finished = 0
        while num_finished < len(workload.prompts):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                num_finished += 1
                num_tokens += len(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError("transformers' continuous batching stopped early")
        seconds = time.perf_counter() - began
    assert num_tokens == sum(workload.output_lens), (num_tokens, sum(workload.output_lens))
    return num_tokens / seconds


def transformers_static(model: Any, workload: Workload, slots: int) -> float:
    """Output tokens/s of `generate` on padded batches, each as long as its longest output."""
    began = time.perf_counter()
    for first in range(0, len(workload.prompts), slots):
        prompts, lens = workload.prompts[first : first + slots], workload.output_lens[first : first + slots]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
        config = GenerationConfig(
            do_sample=False, max_new_tokens=max(lens), min_new_tokens=max(lens), eos_token_id=None, pad_token_id=0
        )
        model.generate(ids, attention_mask=mask, generation_config=config)
    return sum(workload.output_lens) / (time.perf_counter() - began)


def load_transformers(folder: str, device: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device).eval()
    model.set_attn_implementation("sdpa")
    return model


def compare_table(engine: Engine, model: Any, slots: int) -> dict[str, Any]:
    """minicb and transformers on the same weights and workload, in turn."""
    workload = make_workload(3 * slots, (16, 200), 64, 256, engine.vocab_size)
    small = make_workload(slots, (16, 200), 4, 4, engine.vocab_size)
    peers: dict[str, Callable[[Workload], float]] = {
        "minicb": lambda work: run(engine, work).tokens_per_s,
        "transformers, continuous (generate_batch)": lambda work: transformers_continuous(model, work, slots),
        "transformers, static (generate)": lambda work: transformers_static(model, work, slots),
    }
    for peer in peers.values():
        peer(small)  # loads what is loaded lazily
    rounds = [{name: peer(workload) for name, peer in peers.items()} for _ in range(2)]
    best = {name: max(result[name] for result in rounds) for name in peers}
    rows = [
        {"engine": name, "tok/s": speed, "minicb is faster by": best["minicb"] / speed} for name, speed in best.items()
    ]
    title = (
        f"{3 * slots} prompts of 16-200 tokens in {slots} slots, output lengths exponential (mean 64) up to 256, "
        f"greedy, {str(model.dtype).removeprefix('torch.')}, the better of two rounds"
    )
    return {"title": title, "rows": rows}


# ------------------------------------------------------------------ the command


def write_dummy_config(folder: str, device: str) -> None:
    """On CUDA the shape of Qwen3-0.6B, on a CPU one that takes some milliseconds a step."""
    config: LlamaConfig | Qwen3Config
    if device == "cuda":
        config = Qwen3Config(
            vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, max_position_embeddings=4096, tie_word_embeddings=True,
            architectures=["Qwen3ForCausalLM"], dtype="bfloat16",
        )  # fmt: skip
    else:
        config = LlamaConfig(
            vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=True,
            architectures=["LlamaForCausalLM"], dtype="float32",
        )  # fmt: skip
    config.save_pretrained(folder)


def format_table(table: dict[str, Any]) -> Iterator[str]:
    rows = table["rows"]
    cells = [list(rows[0])] + [[_format(value) for value in row.values()] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    yield table["title"]
    for line in cells:
        yield "  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
    if "note" in table:
        yield table["note"]


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if value < 10 else f"{value:.0f}"
    return str(value)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}; without any, all of them")
    parser.add_argument("--model", help="folder or Hugging Face id; without it, a random model")
    parser.add_argument("--num-prompts", type=int, help="prompts of the tables variance and prefix")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--compare", choices=("transformers",), help="measure this library beside minicb; needs --model"
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE")
    args = parser.parse_args()
    if unknown := set(args.tables) - TABLES.keys():
        parser.error(f"no table {', '.join(sorted(unknown))}: there are {', '.join(TABLES)}")
    if args.compare and not args.model:
        parser.error("--compare needs --model: both libraries run its weights")
    if args.num_prompts is not None and args.num_prompts < 1:
        parser.error("--num-prompts must be at least 1")
    return args


def main() -> None:
    args = parse_args()
    sizes = SIZES[args.device]
    if args.num_prompts:
        sizes = sizes._replace(num_prompts=args.num_prompts, num_shared=args.num_prompts)
    # Loaded first: what a load leaves behind in memory must not fall into somebody's timing.
    peer = load_transformers(args.model, args.device) if args.compare else None
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            write_dummy_config(folder, args.device)
        engine = Engine(
            args.model or folder,
            device=args.device,
            load_format="auto" if args.model else "dummy",
            max_model_len=max(sizes.prompt_len + max(sizes.caps), max(sizes.contexts) + 256),
            max_num_seqs=sizes.slots,
        )
    tables = {}
    for name in args.tables or TABLES:
        tables[name] = TABLES[name](engine, sizes)
        print("", *format_table(tables[name]), sep="\n", flush=True)
    if peer is not None:
        tables["compare"] = compare_table(engine, peer, sizes.slots)
        print("", *format_table(tables["compare"]), sep="\n")
    if args.json:
        device = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
        environment = {"torch": torch.__version__, "device": device, "threads": torch.get_num_threads()}
        Path(args.json).write_text(json.dumps({"environment": environment, "tables": tables}, indent=2) + "\n")


if __name__ == "__main__":
    main()
