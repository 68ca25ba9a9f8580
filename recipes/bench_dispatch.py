"""Holds `tp_min_bytes auto` to its promise: never slower than the best dense all-reduce by more than 2 % or 0.5 us.

    torchrun --nproc_per_node 2 recipes/bench_dispatch.py --codec int6-int4 --link NVLink

`accelerate launch --multi_gpu --num_processes N` works too. Opens a communicator as a training start does (measuring
anew, then from the cache), and times what it chooses against every dense route at sizes between the measured ones, in
turn, in calls in a row. x is the bytes of the message; a sample is the slowest rank's. Appends to results.csv.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from bench_collectives import Bench, parse_size, percentiles
from hf_taco_scape.collectives.crossover import seconds_a_call
from hf_taco_scape.collectives.dispatch import Communicator, open_communicator
from hf_taco_scape.collectives.presets import codec_choices
from hf_taco_scape.collectives.routes import Route, size
from results import RESULTS, append_rows, device_name

SIZES = [3 * 2**e for e in range(10, 25, 2)]  # 3 KiB to 48 MiB: none of those that were measured
SLACK, SLACK_US = 0.02, 0.5
_TARGET_S = 0.02  # of calls in a row


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=SIZES, help="bytes, with K, M or G")
    parser.add_argument("--codec", choices=codec_choices(), default="taco")
    parser.add_argument("--tp_backend", default="auto")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--link", default=None, help="name of the link for the table, e.g. NVLink")
    parser.add_argument("--results", type=Path, default=RESULTS, help="CSV file that the rows are appended to")
    parser.set_defaults(backend=None, dtype=None)
    return parser.parse_args()


def compare(comm: Communicator, nbytes: int, dtype: torch.dtype, device: torch.device, repeats: int) -> dict:
    """Sorted microseconds of each route at this size: `auto` forward and backward, and the dense ones; collective."""
    x = torch.randn(nbytes // dtype.itemsize, device=device).to(dtype)
    routes = {f"auto {way}": comm.table.route("all_reduce", way, nbytes) for way in ("forward", "backward")}
    routes |= {f"dense {backend}": Route("none", backend) for backend in sorted(comm.table.backends() | {"c10d"})}
    samples: dict[Route, list[float]] = {route: [] for route in routes.values()}
    slowest = torch.zeros(1, dtype=torch.float64, device=device)
    for route in samples:  # warm up, and see how long they take
        comm.send("all_reduce", route, x)
        slowest = slowest.maximum(slowest.new_tensor(seconds_a_call(comm.send, "all_reduce", route, x, 3)))
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=comm.group)
    calls = max(1, min(200, int(_TARGET_S / slowest.item())))
    for _ in range(repeats):
        for route, times in samples.items():
            times.append(seconds_a_call(comm.send, "all_reduce", route, x, calls))
    agreed = torch.tensor(list(samples.values()), dtype=torch.float64, device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX, group=comm.group)
    by_route = dict(zip(samples, (agreed.cpu() * 1e6).sort(dim=1).values, strict=True))
    return {name: (route, by_route[route]) for name, route in routes.items()}


def excess(found: dict) -> float:
    """By how much of what is allowed the slower direction of `auto` is slower than the best dense route; 1 is all."""
    medians = {name: statistics.median(times.tolist()) for name, (_, times) in found.items()}
    dense = min(us for name, us in medians.items() if name.startswith("dense"))
    auto = max(us for name, us in medians.items() if name.startswith("auto"))
    return (auto - dense) / max(SLACK * dense, SLACK_US)


def main() -> None:
    args = parse_arguments()
    bench = Bench(args)
    seconds = []
    for use_cache in (False, True):
        start = time.perf_counter()
        comm = open_communicator(
            dist.group.WORLD, args.codec, backend=args.tp_backend, device=bench.device, use_cache=use_cache
        )
        seconds.append(time.perf_counter() - start)
    rows, worst = [], 0.0
    table = Table("bytes", "route", "us p50", "p20", "p80", "of what is allowed", title=f"auto, {args.codec}")
    common = {
        "bench": "dispatch", "ranks": bench.ranks, "link": args.link or f"{bench.backend}, unnamed link",
        "device": device_name(bench.device),
    }  # fmt: skip
    for nbytes in args.sizes:
        found = compare(comm, nbytes, bench.dtype, bench.device, args.repeats)
        over = excess(found)
        worst = max(worst, over)
        for name, (route, times) in found.items():
            p = {key: float(f"{value:.5g}") for key, value in percentiles(times).items()}
            config = {"codec": args.codec, "route": str(route), "dtype": str(bench.dtype).removeprefix("torch.")}
            named = {"case": "all_reduce", "provider": name, "metric": "time", "unit": "us", "x": nbytes}
            rows.append(common | named | p | {"config": config})
            last = f"{over:.2f}" if name == "auto backward" else ""
            table.add_row(size(nbytes), f"{name}: {route}", *(f"{p[key]:.1f}" for key in ("p50", "p20", "p80")), last)
    if bench.rank == 0:
        Console(width=150).print(table)
        print(comm.table.describe())
        print(
            f"opened in {seconds[0]:.2f} s, from the cache in {seconds[1]:.2f} s; worst {worst:.2f} of what is allowed"
        )
        append_rows(rows, args.results)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
