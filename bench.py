"""Measures continuous batching, its policies and its memory, on this machine and on simulated devices.

python bench.py                                  # a selection: about two minutes on a laptop, with a random model
python bench.py pressure prefix                  # some tables
python bench.py online --simulate H100           # on a simulated device, with an 8B model
python bench.py --model FOLDER --compare transformers
python bench.py --trace run.json --timeline run.html   # record a small workload, static and continuous

On a CPU the selection simulates the table `online`, which would take minutes. Simulated tables say so. Their times are
those of perfect kernels: they compare policies, and don't predict what a device would measure.

Timings exclude loading and compiling, and each ratio compares two timings of the same run. "% of roofline" is the time
that the steps would take at the memory bandwidth and FLOP/s measured on this machine, divided by the time they took.
GB/s counts the bytes read from weights and KV cache.

Tables go to stdout, and the progress to stderr.
"""

import argparse
import json
import math
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from transformers import AutoConfig, LlamaConfig, Qwen3Config

from minicb import Engine
from minicb.bench.measure import QUICK, SIZES, Bench, BenchSizes, make_core, measure_device
from minicb.bench.peers import compare_table, load_transformers
from minicb.bench.tables import LONG_PROMPT_LEN, NUM_DECODES, TABLES, Table
from minicb.observe.timeline import Timeline, write_timeline
from minicb.observe.trace import Trace, write_trace
from minicb.simulate.cost_model import DEVICES, CostModel, ModelShape
from minicb.simulate.scenarios import LLAMA_8B
from minicb.simulate.workload import WorkloadArgs, serve

SELECTION = ("variance", "mixed", "online", "prefix", "scale", "hub")
MAX_MODEL_LEN = 4608
# About how long tables take in small sizes on 2 CPU cores, with the model that runs here and with a simulated one, and
# how many times as long in full sizes. Only the ratios count.
COSTS = {
    "variance": (16, 1.5, 3), "mixed": (11, 0.1, 1), "online": (30, 2, 8), "pressure": (24, 0.2, 2),
    "prefix": (20, 0.1, 1), "bulk": (18, 6, 3), "scale": (6, 6, 1), "hub": (21, 21, 3.5),
}  # fmt: skip


def write_dummy_config(folder: str, device: str) -> None:
    """On CUDA the shape of Qwen3-0.6B, on a CPU a shape whose steps take some milliseconds."""
    config: LlamaConfig | Qwen3Config
    if device == "cuda":
        config = Qwen3Config(
            vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, max_position_embeddings=8192, tie_word_embeddings=True,
            architectures=["Qwen3ForCausalLM"], dtype="bfloat16",
        )  # fmt: skip
    else:
        config = LlamaConfig(
            vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=8192, tie_word_embeddings=True,
            architectures=["LlamaForCausalLM"], dtype="float32",
        )  # fmt: skip
    config.save_pretrained(folder)


def load_engine(args: argparse.Namespace, sizes: BenchSizes) -> Engine:
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            write_dummy_config(folder, args.device)
        return Engine(
            args.model or folder,
            device=args.device,
            load_format="auto" if args.model else "dummy",
            max_model_len=args.max_model_len,
            max_num_seqs=max(sizes.slots, NUM_DECODES + 1),
            max_num_batched_tokens=LONG_PROMPT_LEN + NUM_DECODES,
            swap_space=4.0 if args.device == "cuda" else 0.5,
        )


def record(bench: Bench, trace: str | None, timeline: str | None) -> None:
    """Run a small workload in a small pool, static and then continuous, and write it as a trace and as a page."""
    defaults = {"num_prompts": 16, "random_input_len": 24, "random_range_ratio": 0.7, "random_output_len": 32}
    workload = bench.workload(output_distribution="exponential", max_output_len=96, **defaults)
    size = make_core(bench)[0].scheduler.pool.block_size
    longest = max(len(arrival.prompt) + arrival.output_len for arrival in workload)
    num_blocks = 1 + max(12, -(-longest // size))
    traces, timelines = [], []
    for batching in ("static", "continuous"):
        core, wait = make_core(bench, num_blocks, max_num_seqs=6, max_num_batched_tokens=64, batching=batching)
        traces.append(Trace(batching))
        timelines.append(Timeline(batching))
        core.observers += [traces[-1], timelines[-1]]
        serve(core, workload, wait=wait)
    if trace:
        write_trace(trace, traces)
        print(f"wrote {trace}: open it at https://ui.perfetto.dev")
    if timeline:
        write_timeline(timeline, timelines)
        print(f"wrote {timeline}: open it in a browser")


def format_table(table: Table) -> Iterator[str]:
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
        return "-" if math.isnan(value) else f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"
    return str(value)


def import_pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        sys.exit('--plot needs matplotlib: pip install -e ".[plot]"')
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_table(name: str, table: Table, folder: Path) -> None:
    pyplot = import_pyplot()
    x, columns = table["plot"]
    figure, axes = pyplot.subplots(1, len(columns), figsize=(5 * len(columns), 4), squeeze=False, layout="constrained")
    labels = [", ".join(_format(row[column]) for column in x) for row in table["rows"]]
    for axis, column in zip(axes[0], columns, strict=True):
        axis.bar(range(len(labels)), [row[column] for row in table["rows"]])
        axis.set_xticks(range(len(labels)), labels, rotation=90 if len(labels) > 6 else 0)
        axis.set_xlabel(", ".join(x))
        axis.set_ylabel(column)
    figure.suptitle(name)
    figure.savefig(folder / f"{name}.svg")
    pyplot.close(figure)


def parse_args() -> argparse.Namespace:
    lines = [f"  {name:10}{(table.__doc__ or name).splitlines()[0]}" for name, table in TABLES.items()]
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="\n".join(["tables:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tables = f"some of {', '.join(TABLES)}; by default {', '.join(SELECTION)} in small sizes"
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=tables)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--model", help="folder or Hugging Face id; without it, a random model")
    parser.add_argument("--max-model-len", type=int, default=MAX_MODEL_LEN, help="(default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--simulate", choices=DEVICES, metavar="DEVICE", help=f"simulate this device: {', '.join(DEVICES)}"
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="number of simulated devices")
    parser.add_argument("--compare", choices=("transformers",), help="also measure this library; needs --model")
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--plot", metavar="FOLDER", help="draw the tables into FOLDER; needs matplotlib")
    parser.add_argument("--trace", metavar="FILE", help="record a small workload, for https://ui.perfetto.dev")
    parser.add_argument("--timeline", metavar="FILE", help="record it as a web page that plays it")
    group = parser.add_argument_group(
        "workload", "replaces the defaults of variance, online, bulk, --compare, --trace and --timeline"
    )
    WorkloadArgs.add_arguments(group)
    names = [field.name for field in fields(WorkloadArgs)]
    parser.set_defaults(**dict.fromkeys(names))
    args = parser.parse_args()
    args.options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if unknown := set(args.tables) - TABLES.keys():
        parser.error(f"no table {', '.join(sorted(unknown))}: there are {', '.join(TABLES)}")
    if args.compare and (not args.model or args.simulate):
        parser.error("--compare needs --model, and no --simulate: both libraries run its weights")
    if useless := set(args.options) - used_options(args):
        parser.error(f"--{min(useless).replace('_', '-')}: nothing that is to run uses it")
    try:
        WorkloadArgs(**args.options)
    except ValueError as error:
        parser.error(str(error))
    return args


def used_options(args: argparse.Namespace) -> set[str]:
    """The fields of a workload that affect what is to run."""
    tables = set(SELECTION if runs_selection(args) else args.tables)
    if tables & {"variance", "online", "bulk"} or args.compare or args.trace or args.timeline:
        return {field.name for field in fields(WorkloadArgs)}
    return {"num_prompts"} if "prefix" in tables else set()


def runs_selection(args: argparse.Namespace) -> bool:
    return not (args.tables or args.compare or args.trace or args.timeline)


def check_places(args: argparse.Namespace) -> None:
    """Exit if a file can't be read or written, before the work is done."""
    if args.plot:
        import_pyplot()
    places: dict[str, Callable[[Path], object]] = {
        "dataset_path": lambda path: path.open().close(),
        "json": lambda path: path.open("a").close(),
        "trace": lambda path: path.open("a").close(),
        "timeline": lambda path: path.open("a").close(),
        "plot": lambda path: path.mkdir(parents=True, exist_ok=True),
    }
    paths = [getattr(args, name) for name in places if getattr(args, name)]
    if len({Path(path).resolve() for path in paths}) < len(paths):
        sys.exit("--" + ", --".join(name.replace("_", "-") for name in places) + " must be different places")
    for name, use in places.items():
        if path := getattr(args, name):
            try:
                use(Path(path))
            except OSError as error:
                sys.exit(f"--{name.replace('_', '-')}: {error}")


def cost(name: str, bench: Bench, simulated: bool) -> float:
    """About how long a table takes, in a unit that all tables share. NaN if that is unknown."""
    if name not in COSTS or bench.options:
        return math.nan
    here, simulation, full = COSTS[name]
    return (simulation if simulated or bench.engine is None else here) * (1 if bench.quick else full)


def announce(costs: Sequence[tuple[str, float]]) -> Iterator[str]:
    """Yield the name of each table, after a line on stderr that says which table comes and about how long is left.
    The estimate scales the costs that are left by the time of the tables that are done."""
    began, done, total = monotonic(), 0.0, sum(cost for _, cost in costs)
    for number, (name, cost) in enumerate(costs, 1):
        line = f"[{number}/{len(costs)}] {name}"
        if done > total / 20:  # less is too little to judge by; never true if a cost is NaN
            seconds = (monotonic() - began) * (total - done) / done
            left = f"{5 * max(1, round(seconds / 5))} s" if seconds < 120 else f"{seconds / 60:.0f} min"
            line += f", about {left} left"
        print(line, file=sys.stderr, flush=True)
        yield name
        done += cost


def make_bench(args: argparse.Namespace, simulate: str | None, quick: bool) -> Bench:
    sizes = (QUICK if quick else SIZES)["cuda" if simulate else args.device]
    if num_prompts := args.options.get("num_prompts"):
        names = ("num_prompts", "num_shared", "num_online", "num_bulk")
        sizes = sizes._replace(**dict.fromkeys(names, num_prompts))
    if simulate:
        shape = ModelShape.of(AutoConfig.from_pretrained(args.model)) if args.model else LLAMA_8B
        cost_model = CostModel(shape, DEVICES[simulate], args.tensor_parallel_size)
        name = (
            f"simulated {args.tensor_parallel_size} x {simulate}"
            if cost_model.tensor_parallel > 1
            else f"simulated {simulate}"
        )
        print(f"{name}, {shape.num_parameters / 1e9:.1f}e9 parameters: the roofline of perfect kernels")
        return Bench(name, sizes, None, cost_model, shape.vocab_size, args.max_model_len, args.options, quick)
    engine = load_engine(args, sizes)
    device = measure_device(engine)
    print(f"{device.name}: {device.bandwidth / 1e9:.1f} GB/s, {device.flops / 1e9:.0f} GFLOP/s, measured")
    shape = ModelShape.of(engine.runner.model.config)._replace(itemsize=next(engine.runner.model.parameters()).itemsize)
    cost_model = CostModel(shape, device, launch_seconds=0.0)
    length = engine.max_model_len
    return Bench(device.name, sizes, engine, cost_model, engine.vocab_size, length, args.options, quick)


def main() -> None:
    args = parse_args()
    check_places(args)
    try:
        run_all(args)
    except ValueError as error:  # such as a prompt of a dataset that is too long
        sys.exit(f"bench.py: {error}")


def run_all(args: argparse.Namespace) -> None:
    # Loaded first, so that what it leaves behind in memory doesn't disturb a measurement.
    peer = load_transformers(args.model, args.device) if args.compare else None
    selection = runs_selection(args)
    bench = make_bench(args, args.simulate, args.quick or selection)
    names = [*(SELECTION if selection else args.tables), *(["compare"] if args.compare else [])]
    simulated = ["online"] if selection and args.device == "cpu" and not args.simulate else []
    tables = {}
    for name in announce([(name, cost(name, bench, name in simulated)) for name in names]):
        print()
        if name == "compare":
            tables[name] = compare_table(bench, peer)
        else:
            tables[name] = TABLES[name](make_bench(args, "H100", quick=True) if name in simulated else bench)
        print(*format_table(tables[name]), sep="\n", flush=True)
    if args.trace or args.timeline:
        record(bench, args.trace, args.timeline)
    for name, table in tables.items():
        if args.plot and "plot" in table:
            plot_table(name, table, Path(args.plot))
    if args.json:
        write_json(args, bench, tables)


def write_json(args: argparse.Namespace, bench: Bench, tables: dict[str, Table]) -> None:
    device = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    environment = {"torch": torch.__version__, "device": device, "threads": torch.get_num_threads()}
    roofline = {name: getattr(bench.cost_model.device, name) for name in ("name", "bandwidth", "flops")}
    results = {"environment": environment | {"roofline": roofline}, "tables": tables}
    # JSON has no NaN, so unknown figures are null.
    text = json.dumps(json.loads(json.dumps(results), parse_constant=lambda name: None), indent=2)
    Path(args.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
