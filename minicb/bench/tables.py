"""The tables of bench.py. Each is a function from a Bench to a Table, and its docstring is in the help text."""

import math
import random
import statistics
from collections.abc import Callable
from typing import Any

from minicb.bench.measure import (
    Bench,
    describe_workload,
    execution_seconds,
    format_percent,
    make_core,
    prefill_plans,
    run_workload,
    scheduler_microseconds,
)
from minicb.observe.metrics import Metrics
from minicb.params import SamplingParams
from minicb.plan import StepPlan
from minicb.policies import POLICIES
from minicb.request import Request
from minicb.simulate.scenarios import USER_KINDS, agent_hub, synthetic_data
from minicb.simulate.workload import Arrival, random_tokens

Table = dict[str, Any]  # title, rows (a dict each), and maybe note and plot
SYSTEM_PROMPT_LEN, NUM_BULK = 1000, 10_000
LONG_PROMPT_LEN, NUM_DECODES = 4000, 32  # of the table mixed


def variance_table(bench: Bench) -> Table:
    """Static against continuous batching, as output lengths vary more and more."""
    sizes = bench.sizes
    lens: dict[str, Any] = {
        "num_prompts": sizes.num_prompts,
        "random_input_len": sizes.prompt_len,
        "random_output_len": sizes.mean_output,
    }
    caps = sizes.caps
    if "max_output_len" in bench.options or "dataset_path" in bench.options:  # one cap only
        caps = (max(arrival.output_len for arrival in bench.workload(**lens)),)
    workloads = [
        bench.workload(**({"output_distribution": "exponential", "max_output_len": cap} | lens)) for cap in caps
    ]
    run_workload(bench, workloads[0])  # a warm-up: the first run touches the memory
    rows = []
    for cap, workload in zip(caps, workloads, strict=True):
        static, continuous = run_workload(bench, workload, batching="static"), run_workload(bench, workload)
        rows.append(
            {
                "outputs up to": cap,
                "static tok/s": static.tokens_per_s,
                "static slots in use": static.metrics.all_steps.occupancy,
                "continuous tok/s": continuous.tokens_per_s,
                "continuous slots in use": continuous.metrics.all_steps.occupancy,
                "ratio": continuous.tokens_per_s / static.tokens_per_s,
                **continuous.roofline_figures,
            }
        )
    title = f"Static against continuous batching in {sizes.slots} slots, as outputs get longer: {describe_workload(workloads[-1])}"
    return {"title": title, "rows": rows, "plot": (("outputs up to",), ["static tok/s", "continuous tok/s"])}


def mixed_table(bench: Bench) -> Table:
    """What a long prompt does to requests that are decoding when it arrives (compare Sarathi-Serve, 2024)."""
    rng, rows = random.Random(0), []
    prompts = [random_tokens(rng, 16, bench.vocab_size) for _ in range(NUM_DECODES)]
    long_prompt = random_tokens(rng, LONG_PROMPT_LEN, bench.vocab_size)
    for budget in (LONG_PROMPT_LEN + NUM_DECODES, 1024, 256):
        core, _ = make_core(bench, max_num_seqs=NUM_DECODES + 1, max_num_batched_tokens=budget)
        metrics = Metrics()
        core.observers.append(metrics)
        params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
        decodes = [Request(str(number), prompt, params) for number, prompt in enumerate(prompts)]
        long = Request("long", long_prompt, params)
        for request in decodes:
            core.add(request)
        while decodes[-1].num_output_tokens < 8:
            core.step()
        core.add(long)
        while long.num_output_tokens < 8:
            core.step()
        gaps = [gap for request in decodes for gap in request.metrics.itl[1:]]
        core.abort_all()
        rows.append(
            {
                "prefilled": "whole" if budget > LONG_PROMPT_LEN else f"in steps of {budget}",
                "longest gap ms": 1000 * max(gaps),
                "median gap ms": 1000 * statistics.median(gaps),
                "TTFT of the long prompt s": long.metrics.ttft,
            }
        )
    title = f"A prompt of {LONG_PROMPT_LEN} tokens arrives among {NUM_DECODES} decodes: the gaps between their tokens"
    return {"title": title, "rows": rows, "plot": (("prefilled",), ["longest gap ms"])}


def online_table(bench: Bench) -> Table:
    """Each policy with requests that arrive over time, at rates below and above the capacity."""
    sizes, rows = bench.sizes, []
    defaults: dict[str, Any] = {
        "num_prompts": sizes.num_online, "random_input_len": sizes.prompt_len, "random_output_len": sizes.mean_output,
        "output_distribution": "exponential", "max_output_len": 4 * sizes.mean_output, "num_clients": 4,
    }  # fmt: skip
    run_workload(bench, bench.workload(**defaults)[:4])  # a warm-up: the first run touches the memory
    for rate, burstiness in arrival_patterns(bench, defaults):
        arrivals = bench.workload(**(defaults | {"request_rate": rate, "burstiness": burstiness}))
        if "dataset_path" not in bench.options:
            arrivals = mix_clients(arrivals)
        for policy in POLICIES:
            metrics = run_workload(bench, arrivals, scheduling_policy=policy).metrics
            rows.append(
                {"req/s": rate, "burstiness": burstiness, "policy": policy} | online_figures(bench, arrivals, metrics)
            )
    title = f"{describe_workload(arrivals)}, over time, in {sizes.slots} slots"
    objectives = " and ".join(f"{name.upper()} up to {1000 * limit:.0f} ms" for name, limit in sizes.objectives.items())
    note = f"Latencies without p99 are means. Goodput counts requests with {objectives}."
    if "dataset_path" not in bench.options:
        num_clients = len({arrival.client for arrival in arrivals})
        note = f"One of {num_clients} clients sends three quarters of the requests; an eighth are urgent. {note}"
    plot = (("policy", "req/s", "burstiness"), ["TTFT s", "goodput req/s"])
    return {"title": title, "rows": rows, "note": note, "plot": plot}


def arrival_patterns(bench: Bench, defaults: dict[str, Any]) -> list[tuple[float, float]]:
    """Request rates and burstinesses, from the command line or as shares of the capacity."""
    options = bench.options
    if "request_rate" in options or "dataset_path" in options:
        return [(options.get("request_rate", math.inf), options.get("burstiness", 1.0))]
    everything = bench.workload(**defaults)
    metrics = run_workload(bench, everything).metrics
    # The rate at which it would serve them if all slots were in use to the end.
    capacity = len(everything) / metrics.seconds / metrics.all_steps.occupancy
    pairs = [(1.2, 0.25)] if bench.quick else [(load, shape) for load in (0.6, 0.9, 1.2) for shape in (1.0, 0.25)]
    return [(load * capacity, options.get("burstiness", burstiness)) for load, burstiness in pairs]


def mix_clients(arrivals: list[Arrival]) -> list[Arrival]:
    """One client sends three quarters of the requests, the others share the rest. An eighth are urgent."""
    rng = random.Random(0)
    return [
        arrival._replace(
            client="busy" if rng.random() < 0.75 else arrival.client, priority=0 if rng.random() < 0.125 else 1
        )
        for arrival in arrivals
    ]


def online_figures(bench: Bench, arrivals: list[Arrival], metrics: Metrics) -> dict[str, Any]:
    latencies = metrics.latencies()
    records = sorted(metrics.finished, key=lambda record: int(record.request_id))  # in the order of the arrivals
    urgent = [record.ttft for record, arrival in zip(records, arrivals, strict=True) if arrival.priority == 0]
    return {
        "TTFT s": latencies["ttft"]["mean"],
        "TTFT p99": latencies["ttft"]["p99"],
        "TTFT of urgent": statistics.mean(urgent) if urgent else math.nan,
        "TPOT ms": 1000 * latencies["tpot"]["mean"],
        "TPOT p99": 1000 * latencies["tpot"]["p99"],
        "E2EL s": latencies["e2el"]["mean"],
        "goodput req/s": metrics.goodput(bench.sizes.objectives),
    }


def pressure_table(bench: Bench) -> Table:
    """Swap against recompute, as contexts get longer (compare PagedAttention, 2023, section 7.3)."""
    slots, modes, rows = 4, ("swap", "recompute", "auto"), []
    for context in bench.sizes.contexts:
        core, _ = make_core(bench)
        size, blocks = core.scheduler.pool.block_size, core.scheduler.pool.blocks_for(context)
        pairs = [(block, block) for block in range(1, blocks + 1)]
        prompts = [random_tokens(random.Random(slot), context, bench.vocab_size) for slot in range(slots)]
        swap = execution_seconds(bench, core, [StepPlan(swap_out=pairs), StepPlan(swap_in=pairs)])
        recompute = execution_seconds(bench, core, prefill_plans(core, prompts[0]))
        # Room for one more block per request, where each needs two.
        num_blocks = 1 + slots * (blocks + 1)
        workload = [Arrival(0.0, prompt, 2 * size) for prompt in prompts]
        run_workload(bench, workload, num_blocks)  # a warm-up: the first run touches the memory
        rounds = [
            {mode: run_workload(bench, workload, num_blocks, preemption_mode=mode) for mode in modes} for _ in range(2)
        ]
        preemptions = rounds[0]["auto"].metrics.preemptions_by_mode
        rows.append(
            {
                "context": context,
                "swap ms": 1000 * swap,
                "recompute ms": 1000 * recompute,
                "auto swapped": f"{preemptions['swap']} of {preemptions.total()}",
                **{f"{mode} tok/s": max(results[mode].tokens_per_s for results in rounds) for mode in modes},
                **max((results["auto"] for results in rounds), key=lambda result: result.tokens_per_s).roofline_figures,
            }
        )
    title = (
        f"One request's KV is copied out and back, in whole blocks of {size} tokens, or recomputed. Then {slots} requests "
        f"run with room for their contexts but not for all of their {2 * size} output tokens, the better of two rounds"
    )
    plot = (("context",), ["swap ms", "recompute ms"])
    return {"title": title, "rows": rows, "note": crossing(rows), "plot": plot}


def crossing(rows: list[dict[str, Any]]) -> str:
    """A sentence that says which is faster, and between which contexts that changes."""
    swap_wins = [row["swap ms"] < row["recompute ms"] for row in rows]
    if len(set(swap_wins)) == 1:
        return f"{'Swap' if swap_wins[0] else 'Recompute'} is faster at every length measured"
    turns = [
        f"{before['context']} and {after['context']}"
        for before, after, *wins in zip(rows, rows[1:], swap_wins, swap_wins[1:], strict=False)
        if wins[0] != wins[1]
    ]
    fastest = "swap" if swap_wins[-1] else "recompute"
    return f"Swap and recompute cross between contexts of {', '.join(turns)} tokens; at the longest {fastest} is faster"


def prefix_table(bench: Bench) -> Table:
    """Prefix caching with a system prompt that all requests share, and its cost if they share nothing."""
    rng, count = random.Random(0), bench.sizes.num_shared
    users = [random_tokens(rng, rng.randint(20, 60), bench.vocab_size) for _ in range(count)]
    own = [random_tokens(rng, SYSTEM_PROMPT_LEN, bench.vocab_size) for _ in range(count)]
    run_workload(bench, [Arrival(0.0, prompt, 2) for prompt in own[:4]])  # a warm-up: the first run touches the memory
    rows = []
    for name, systems in (("the same for all", own[:1] * count), ("each its own", own)):
        workload = [Arrival(0.0, system + user, 16) for system, user in zip(systems, users, strict=True)]
        off, on = (run_workload(bench, workload, enable_prefix_caching=caching) for caching in (False, True))
        ttft_off, ttft_on = (result.metrics.latencies()["ttft"]["mean"] for result in (off, on))
        rows.append(
            {
                "system prompt": name,
                "hit rate": on.metrics.prefix_cache_hit_rate,
                "mean TTFT s, caching off": ttft_off,
                "TTFT s, on": ttft_on,
                "off / on": ttft_off / ttft_on,
                "tok/s, off": off.tokens_per_s,
                "tok/s, on": on.tokens_per_s,
                **on.roofline_figures,
            }
        )
    title = (
        f"Prefix caching: {count} requests at once in {bench.sizes.slots} slots, a system prompt of "
        f"{SYSTEM_PROMPT_LEN} tokens and 20-60 tokens of their own, 16 output tokens"
    )
    return {"title": title, "rows": rows, "plot": (("system prompt",), ["mean TTFT s, caching off", "TTFT s, on"])}


def scale_table(bench: Bench) -> Table:
    """CPU time of a step outside the model, with more running or waiting requests and a larger pool."""
    base, rows = {"running": 64, "waiting": 0, "blocks": 20_000}, []
    for name, values in (("running", (16, 64, 256)), ("waiting", (1000, 100_000)), ("blocks", (100_000,))):
        for value in values:
            setting = base | {name: value}
            microseconds = scheduler_microseconds(**setting)
            rows.append(setting | microseconds | {"together": sum(microseconds.values())})
    title = "CPU time of a decode step outside the model, in microseconds (median of 100 steps), contexts of about 500 tokens"
    return {"title": title, "rows": rows}


def bulk_table(bench: Bench) -> Table:
    """Synthetic data: all prompts at once. Are all slots in use until the queue is empty?"""
    count, mean = bench.sizes.num_bulk, bench.sizes.mean_output
    here = bench.workload(
        num_prompts=count, random_input_len=bench.sizes.prompt_len // 2, random_range_ratio=0.5, random_output_len=mean,
        output_distribution="exponential", max_output_len=8 * mean,
    )  # fmt: skip
    count_simulated = 2000 if bench.quick else NUM_BULK
    rows = []
    for batching in ("static", "continuous"):
        own, simulated = (
            run_workload(bench, here, batching=batching),
            synthetic_data(count_simulated, batching=batching),
        )
        for name, metrics, roofline_figures in (
            (f"{bench.name}, {len(here)} prompts", own.metrics, own.roofline_figures),
            (f"simulated H100, 8B, {count_simulated} prompts", simulated, {}),
        ):
            rows.append(
                {
                    "device": name,
                    "batching": batching,
                    "tok/s": metrics.throughput()["output_tokens"],
                    "slots in use while any wait": format_percent(metrics.steps_with_queue.occupancy),
                    "in all": format_percent(metrics.all_steps.occupancy),
                    **(roofline_figures or dict.fromkeys(own.roofline_figures, math.nan)),
                }
            )
    rows.sort(key=lambda row: row["device"], reverse=True)
    title = (
        f"Synthetic data: all prompts at once, output lengths exponential (mean {mean} in {bench.sizes.slots} slots; "
        "simulated: mean 128 in 256 slots)"
    )
    return {"title": title, "rows": rows}


def hub_table(bench: Bench) -> Table:
    """500 users in a closed loop on four simulated H100s that serve a 70B model."""
    rows = []
    for policy in POLICIES:
        hub = agent_hub(policy, seconds=180.0 if bench.quick else 600.0)
        ttft = {kind: hub.latency("ttft", kind) for kind in (None, *USER_KINDS)}
        rows.append(
            {
                "policy": policy,
                "tok/s": statistics.mean(hub.rates),
                "in the worst minute": min(hub.rates),
                "TTFT s": ttft[None]["mean"],
                "TTFT p99": ttft[None]["p99"],
                **{f"TTFT of {kind}": ttft[kind]["mean"] for kind in USER_KINDS},
                "TPOT ms": 1000 * hub.latency("tpot")["mean"],
            }
        )
    title = "Agent hub: 500 users in a closed loop, Llama 70B on four simulated H100s; TTFT by policy"
    return {"title": title, "rows": rows, "plot": (("policy",), ["TTFT s", "TTFT p99", "in the worst minute"])}


TABLES: dict[str, Callable[[Bench], Table]] = {
    "variance": variance_table,
    "mixed": mixed_table,
    "online": online_table,
    "pressure": pressure_table,
    "prefix": prefix_table,
    "bulk": bulk_table,
    "scale": scale_table,
    "hub": hub_table,
}
