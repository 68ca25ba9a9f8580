"""Times codecs and compressed all-reduces against the dense one; asserts first that they are right.

    torchrun --nproc_per_node 2 recipes/bench_collectives.py --sizes 256K 1M

`accelerate launch --multi_gpu --num_processes N` works too; any number of ranks, NCCL with a GPU a rank, else gloo.
x is the bytes of the message in `--dtype`. A sample is the slowest rank's time of one call. Appends to results.csv.
Where symmetric memory starts, also our kernels over it (`symm <codec>`) and torch's two-shot (`torch two_shot`), and
everything but gloo in a CUDA graph (`all_reduce graph`: a sample is a replay's time by its calls).
"""

import argparse
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import symm_bench
from hf_taco_scape.codecs import Codec, get_codec, list_codecs
from hf_taco_scape.collectives import ByteMeter, all_reduce
from results import RESULTS, append_rows, device_name

# relative L2 error in % of one quantisation of Gaussian values, docs/wire_formats.md
ERRORS = {"taco": 2.57, "fp8": 2.57, "int8": 0.65, "hadamard-int8": 0.65, "hadamard-int6": 2.65, "hadamard-int4": 11.7}
ROTATED_BYTES = 256 * 2**20  # inputs are rotated so that none is in a cache, the H200's L2 included
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_size(text: str) -> int:
    factors = {"K": 2**10, "M": 2**20, "G": 2**30}
    number, factor = (text[:-1], factors[text[-1]]) if text[-1:] in factors else (text, 1)
    return int(float(number) * factor)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", nargs="+", type=parse_size, default=None, help="bytes, with K, M or G; 2 x 2^10 = 2K"
    )
    parser.add_argument("--codecs", nargs="+", default=[c for c in list_codecs() if c != "none"])
    parser.add_argument("--dtype", choices=DTYPES, default=None, help="default: bfloat16 on CUDA, float32 on CPU")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", choices=["gloo", "nccl"], help="default: nccl if each rank has a GPU of its own")
    parser.add_argument("--symm", choices=["auto", "off"], default="auto", help="symmetric memory where it starts")
    parser.add_argument("--graph-calls", type=int, default=16, help="calls in a CUDA graph")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--link", default=None, help="name of the link for the table, e.g. NVLink")
    parser.add_argument("--link-gbs", type=float, help="GB/s a rank can send over it in one direction")
    parser.add_argument("--memory-gbs", type=float, help="GB/s of the device's memory, read plus write")
    parser.add_argument("--results", type=Path, default=RESULTS, help="CSV file that the rows are appended to")
    return parser.parse_args()


class Bench:
    """What one run measures with: the device, the ranks, the clock."""

    def __init__(self, args: argparse.Namespace) -> None:
        if "RANK" not in os.environ:
            raise SystemExit("start this script with torchrun or accelerate launch: it needs at least two ranks")
        local, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        gpus = torch.cuda.device_count() if args.device == "cuda" else 0
        self.device = torch.device("cuda", local % gpus) if gpus else torch.device("cpu")
        if gpus:
            torch.cuda.set_device(self.device)
        self.backend = args.backend or ("nccl" if gpus >= local_ranks else "gloo")
        dist.init_process_group(self.backend)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.dtype = DTYPES[args.dtype or ("bfloat16" if gpus else "float32")]
        self.args = args
        self.symm: symm_bench.SymmBench | None = None

    def start_symmetric_memory(self, max_bytes: int) -> None:
        if self.args.symm == "off" or self.device.type != "cuda":
            return
        found = symm_bench.start(self.device, self.ranks, max_bytes, self.dtype)
        if isinstance(found, str):
            if self.rank == 0:
                print(f"no symmetric memory: {found}")
        else:
            self.symm = found

    def inputs(self, numel: int) -> list[torch.Tensor]:
        """Different Gaussian messages on every rank, enough of them to outgrow the caches."""
        nbytes = numel * self.dtype.itemsize
        count = min(max(math.ceil(ROTATED_BYTES / nbytes), 2), 32 if self.device.type == "cuda" else 4)
        g = torch.Generator(self.device).manual_seed(self.rank)
        return [torch.randn(numel, device=self.device, generator=g).to(self.dtype) for _ in range(count)]

    def microseconds(self, call: Callable[[int], object]) -> torch.Tensor:
        """Sorted times of `call(i)`, i = 0, 1, ...; each the maximum over the ranks."""
        for i in range(self.args.warmup):
            call(i)
        timed = self._time_cuda if self.device.type == "cuda" else self._time_cpu
        samples = torch.tensor(timed(call), dtype=torch.float64, device=self.device)
        dist.all_reduce(samples, dist.ReduceOp.MAX)
        return samples.sort().values.cpu()

    def _time_cuda(self, call) -> list[float]:
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.args.repeats)]
        torch.cuda.synchronize()
        dist.barrier()
        for i, (start, end) in enumerate(marks):
            start.record()
            call(i)
            end.record()
        torch.cuda.synchronize()
        return [1000 * start.elapsed_time(end) for start, end in marks]

    def _time_cpu(self, call) -> list[float]:
        samples = []
        for i in range(self.args.repeats):
            dist.barrier()
            start = time.perf_counter()
            call(i)
            samples.append(1e6 * (time.perf_counter() - start))
        return samples


def assert_right(bench: Bench, codec: Codec, x: torch.Tensor, reduce: Callable | None = None) -> float:
    """Raise AssertionError unless the sum is within the codec's error and has the same bits on all ranks.

    reduce: x -> its sum over the ranks, by default through the process group.
    """
    y = reduce(x) if reduce else all_reduce(x, None, codec)
    exact = x.double()
    dist.all_reduce(exact)
    error = 100 * float((y.double() - exact).norm() / exact.norm())
    once = 0.0 if codec.name == "none" else ERRORS.get(codec.name)
    if once is None:  # an own codec: what it does to one message is the measure
        once = 100 * float((codec.decode(codec.encode(x), x.numel(), x.dtype) - x).double().norm() / x.double().norm())
    # a second quantisation in a two-shot; the output's own rounding; a small message's scatter
    bound = 1.15 * once * (1 if bench.ranks == 2 else math.sqrt(2)) + 0.3
    bits = y.view(torch.int16 if y.element_size() == 2 else torch.int32).to(torch.int32)
    first = bits.clone()
    dist.broadcast(first, 0)
    wrong = torch.tensor([float(not torch.equal(bits, first)), float(error > bound)], device=x.device)
    dist.all_reduce(wrong)
    assert wrong[0] == 0, f"{codec.name}: the sum of {x.numel()} elements differs between ranks"
    assert wrong[1] == 0, f"{codec.name}: error {error:.2f} % over the bound of {bound:.2f} %"
    return error


def time_dense(bench: Bench, xs: list[torch.Tensor]) -> torch.Tensor:
    """torch.distributed's all-reduce as stock code calls it, in place."""
    return bench.microseconds(lambda i: dist.all_reduce(xs[i % len(xs)]))


def measure(bench: Bench, size: int) -> list[dict]:
    """One dict a call: case, provider, sorted samples in us, bytes sent and bytes of memory touched."""
    numel = max(size // bench.dtype.itemsize, 1)
    xs = bench.inputs(numel)
    nbytes = xs[0].nbytes
    meter = ByteMeter()
    all_reduce(xs[0], None, "none", meter)
    samples = time_dense(bench, [x.clone() for x in xs])
    found = [{"case": "all_reduce", "provider": "dense", "samples": samples, "sent": meter.sent_bytes, "error": 0.0}]
    for name in bench.args.codecs:
        codec = get_codec(name)
        error = assert_right(bench, codec, xs[0])
        meter.reset()
        all_reduce(xs[0], None, codec, meter)
        wires = [codec.encode(x) for x in xs]
        out, wire = torch.empty_like(xs[0]), torch.empty_like(wires[0])
        calls = {
            "encode": lambda i, codec=codec, wire=wire: codec.encode(xs[i % len(xs)], out=wire),
            "decode": lambda i, codec=codec, wires=wires, out=out: codec.decode(
                wires[i % len(wires)], numel, bench.dtype, out=out
            ),
            "all_reduce": lambda i, codec=codec: all_reduce(xs[i % len(xs)], None, codec),
        }
        for case, call in calls.items():
            traffic = {"sent": meter.sent_bytes} if case == "all_reduce" else {"memory": nbytes + wire.numel()}
            found.append(
                {"case": case, "provider": name, "samples": bench.microseconds(call), "error": error, **traffic}
            )
    if bench.symm:
        found += measure_symmetric_memory(bench, xs)
    return [row | {"x": nbytes} for row in found]


def measure_symmetric_memory(bench: Bench, xs: list[torch.Tensor]) -> list[dict]:
    """As `measure`: eager and in a CUDA graph, torch's own kernels and ours; asserts first that ours are right."""
    symm, args, found, meter = bench.symm, bench.args, [], ByteMeter()

    def graph(call, restore=None):
        return symm.graph_microseconds(call, args.graph_calls, args.repeats, restore)

    def add(case, provider, samples, sent, error=0.0):
        found.append({"case": case, "provider": provider, "samples": samples, "sent": sent, "error": error})

    all_reduce(xs[0], None, "none", meter)
    dense_bytes = meter.sent_bytes
    if bench.backend == "nccl":
        copies = [x.clone() for x in xs]
        add("all_reduce graph", "dense", graph(lambda i: dist.all_reduce(copies[i % len(copies)])), dense_bytes)
    if xs[0].nbytes % 16 == 0:  # what torch's kernel takes
        call, restore = symm.torch_two_shot(xs)
        assert_right(bench, get_codec("none"), xs[0], lambda x: call(0))
        restore()
        add("all_reduce", "torch two_shot", bench.microseconds(call), dense_bytes)
        add("all_reduce graph", "torch two_shot", graph(call, restore), dense_bytes)
    for name in ["none", *args.codecs]:
        codec = get_codec(name)
        error = assert_right(bench, codec, xs[0], symm.all_reduce(codec))
        if name != "none":
            symm_bench.assert_as_over_the_process_group(symm, codec, xs[0])
        meter.reset()
        symm.all_reduce(codec, meter)(xs[0])
        reduce = symm.all_reduce(codec)

        def call(i, reduce=reduce):
            return reduce(xs[i % len(xs)])

        add("all_reduce", f"symm {name}", bench.microseconds(call), meter.sent_bytes, error)
        add("all_reduce graph", f"symm {name}", graph(call), meter.sent_bytes, error)
    return found


def percentiles(samples: torch.Tensor) -> dict[str, float]:
    p20, p50, p80 = (float(p) for p in torch.quantile(samples, torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)))
    return {"p50": p50, "p20": p20, "p80": p80}


def to_rows(bench: Bench, found: list[dict]) -> list[dict]:
    """Rows for results.csv: the time of every call, its GB/s, its gain over dense and its share of the limit."""
    args, rows = bench.args, []
    dense = {call["case"]: percentiles(call["samples"])["p50"] for call in found if call["provider"] == "dense"}
    common = {
        "bench": "collectives",
        "ranks": bench.ranks,
        "link": args.link or f"{bench.backend}, unnamed link",
        "device": device_name(bench.device),
    }
    for call in found:
        times = percentiles(call["samples"])
        config = {
            "dtype": str(bench.dtype).removeprefix("torch."),
            "backend": bench.backend,
            "threads": torch.get_num_threads(),
            "repeats": args.repeats,
            "load": round(os.getloadavg()[0], 1),  # of the machine: a busy one times its neighbours too
            "error_percent": round(call["error"], 3),
        }
        metrics = {"time": ("us", times), "rate": ("GB/s of message", _inverse(times, call["x"] / 1e3))}
        if "sent" in call:
            config["sent_bytes"] = call["sent"]
            if call["case"] in dense:
                metrics["speedup"] = ("x dense", _inverse(times, dense[call["case"]]))
            limit, amount = args.link_gbs, call["sent"]
        else:
            limit, amount = args.memory_gbs, call["memory"]
        if limit:
            metrics["share of limit"] = (f"of {limit:g} GB/s", _inverse(times, amount / limit / 1e3))
        for metric, (unit, values) in metrics.items():
            values = {key: float(f"{value:.5g}") for key, value in values.items()}
            named = {
                "case": call["case"],
                "provider": call["provider"],
                "metric": metric,
                "unit": unit,
                "x": call["x"],
            }
            rows.append(common | named | values | {"config": config})
    return rows


def _inverse(times: dict[str, float], amount: float) -> dict[str, float]:
    """Percentiles of amount / time: the 20th is that of the 80th time."""
    return {"p50": amount / times["p50"], "p20": amount / times["p80"], "p80": amount / times["p20"]}


def show(bench: Bench, rows: list[dict]) -> None:
    table = Table(title=f"{bench.ranks} ranks, {rows[0]['link']}, {rows[0]['device']}, {rows[0]['config']['dtype']}")
    columns = (
        "bytes",
        "call",
        "codec",
        "us p50",
        "p20",
        "p80",
        "GB/s",
        "x dense",
        "of limit",
        "sent bytes",
        "error %",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("call", "codec") else "right")
    calls = {}
    for row in rows:
        calls.setdefault((row["x"], row["case"], row["provider"]), {})[row["metric"]] = row
    for (x, case, provider), metrics in calls.items():
        time_row, config = metrics["time"], metrics["time"]["config"]
        cells = [f"{time_row[p]:.1f}" for p in ("p50", "p20", "p80")] + [f"{metrics['rate']['p50']:.2f}"]
        cells.append(f"{metrics['speedup']['p50']:.2f}" if "speedup" in metrics else "")
        cells.append(f"{metrics['share of limit']['p50']:.0%}" if "share of limit" in metrics else "")
        table.add_row(
            str(x), case, provider, *cells, str(config.get("sent_bytes", "")), f"{config['error_percent']:.2f}"
        )
    console = Console()
    (console if console.is_terminal else Console(width=150)).print(table)


def main() -> None:
    args = parse_arguments()
    bench = Bench(args)
    sizes = args.sizes or [2**e for e in (range(20, 28, 2) if bench.device.type == "cuda" else range(14, 24, 2))]
    bench.start_symmetric_memory(max(sizes))
    rows = []
    for size in sizes:
        rows += to_rows(bench, measure(bench, size))
    if bench.rank == 0:
        show(bench, rows)
        append_rows(rows, args.results)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
