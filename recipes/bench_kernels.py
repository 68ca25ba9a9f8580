"""Times the Triton kernels of every codec against their torch twins and, for fp8, compiled torch; on one GPU.

    python recipes/bench_kernels.py --sizes 8M 64M 256M        rows for results.csv, bytes asserted equal first
    python recipes/bench_kernels.py --sweep sweep.csv          every split of a tile at 64 MB, for launch.TUNED

x is the bytes of the message in `--dtype`. A sample is a replay of a CUDA graph of calls over rotated buffers, divided
by the calls. Share of copy: (bytes read + bytes written) / time / the rate of a large device-to-device copy.
"""

import argparse
import csv
import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from hf_taco_scape.kernels import launch
from rich.console import Console
from rich.table import Table

from bench_collectives import DTYPES, parse_size, percentiles
from hf_taco_scape.codecs import get_codec, list_codecs
from hf_taco_scape.codecs.device import kernels_for, torch_twins
from results import RESULTS, append_rows, device_name

ROTATED_BYTES = 256 * 2**20  # so that no input is in the L2
MESSAGES = 2  # that decode_sum and decode_sum_encode add
OPERATIONS = ("encode", "decode", "decode_sum", "decode_sum_encode")
SPLITS = list(itertools.product((1, 2, 4, 8), (2, 4, 8)))  # pieces of a group, warps


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=[2**21, 2**23, 2**26, 2**28])
    parser.add_argument("--codecs", nargs="+", default=list_codecs())
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--no-rivals", action="store_true", help="time the kernels only")
    parser.add_argument("--results", type=Path, default=RESULTS, help="CSV file that the rows are appended to")
    parser.add_argument("--sweep", type=Path, metavar="CSV", help="time all splits at 64 MB and write them there")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="processes that build")
    parser.add_argument("--build", help=argparse.SUPPRESS)
    return parser.parse_args()


@dataclass
class Message:
    """Buffers of one codec at one size, several of each."""

    x: list[torch.Tensor]
    wire: list[torch.Tensor]  # MESSAGES rows each
    out: list[torch.Tensor]
    again: list[torch.Tensor]

    def calls(self, codec) -> dict[str, Callable[[int], object]]:
        """operation -> call(i) through the codec, as a collective would."""
        numel, dtype = self.x[0].numel(), self.x[0].dtype

        def buffers(i):
            i %= len(self.x)
            return self.x[i].view(1, -1), self.wire[i], self.out[i], self.again[i]

        def encode(i):
            x, wire, _, _ = buffers(i)
            codec.encode_rows(x, wire[:1])

        def decode(i):
            _, wire, out, _ = buffers(i)
            codec.decode_into(wire[:1], out.view(1, -1), dtype)

        def decode_sum(i):
            _, wire, out, _ = buffers(i)
            codec.decode_sum(wire, numel, dtype, out=out)

        def decode_sum_encode(i):
            _, wire, _, again = buffers(i)
            codec.decode_sum_encode(wire, numel, dtype, again)

        return dict(zip(OPERATIONS, (encode, decode, decode_sum, decode_sum_encode), strict=True))

    def traffic(self, operation: str) -> int:
        """Bytes that a call reads and writes at least."""
        x, wire = self.x[0].nbytes, self.wire[0].shape[1]
        return {
            "encode": x + wire,
            "decode": wire + x,
            "decode_sum": MESSAGES * wire + x,
            "decode_sum_encode": (MESSAGES + 1) * wire,
        }[operation]


def make_message(codec, size: int, dtype: torch.dtype, rotated: int = ROTATED_BYTES) -> Message:
    numel = size // dtype.itemsize
    count = min(max(math.ceil(rotated / size), 2), 32)
    g = torch.Generator("cuda").manual_seed(0)
    x = [torch.randn(numel, device="cuda", generator=g).to(dtype) for _ in range(count)]
    size = codec.wire_bytes(numel, dtype)
    wires = [torch.empty(MESSAGES, size, dtype=torch.uint8, device="cuda") for _ in range(count)]
    message = Message(x, wires, [torch.empty_like(t) for t in x], [torch.empty_like(w[0]) for w in wires])
    for i, wire in enumerate(wires):
        for row in range(MESSAGES):
            codec.encode_rows(x[(i + row) % count].view(1, -1), wire[row : row + 1])
    return message


def assert_right(codec, message: Message) -> None:
    """Raise AssertionError unless the kernels write what the twins do, into buffers that hold something else."""
    x, wire = message.x[0], message.wire[0]
    calls = message.calls(codec)
    results = []
    for twins in (False, True):
        wire[0].fill_(0xFF), message.again[0].fill_(0xFF)
        outs = []
        with torch_twins() if twins else torch.no_grad():
            calls["encode"](0)
            outs.append(wire[0].clone())
            for operation in ("decode", "decode_sum"):
                message.out[0].fill_(float("nan"))
                calls[operation](0)
                outs.append(message.out[0].view(torch.uint8).clone())
            calls["decode_sum_encode"](0)
            outs.append(message.again[0].clone())
        results.append(outs)
    for operation, got, expected in zip(OPERATIONS, *results, strict=True):
        wrong = int((got != expected).sum())
        assert wrong <= x.numel() * 2**-24, f"{codec.name}: {operation} of {x.numel()} elements, {wrong} bytes differ"


def graph_microseconds(call: Callable[[int], object], inner: int, repeats: int) -> torch.Tensor:
    """Sorted times of a call inside a CUDA graph of `inner` calls."""
    for i in range(3):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(inner):
            call(i)
    graph.replay()
    return event_microseconds(lambda i: graph.replay(), repeats) / inner


def event_microseconds(call: Callable[[int], object], repeats: int) -> torch.Tensor:
    """Sorted times between two events around each call."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    for i, (start, end) in enumerate(marks):
        start.record()
        call(i)
        end.record()
    torch.cuda.synchronize()
    return torch.tensor([1000 * a.elapsed_time(b) for a, b in marks], dtype=torch.float64).sort().values


def host_microseconds(call: Callable[[int], object], repeats: int = 200) -> torch.Tensor:
    """Sorted host times of a call that only starts work."""
    samples = []
    for i in range(repeats):
        start = time.perf_counter()
        call(i)
        samples.append(1e6 * (time.perf_counter() - start))
        if i % 50 == 49:
            torch.cuda.synchronize()
    return torch.tensor(samples[10:], dtype=torch.float64).sort().values


def copy_gbs() -> float:
    """GB/s, read plus write, of a device-to-device copy of 1 GB: not in a graph, where torch's is slower."""
    a = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    for _ in range(3):
        b.copy_(a)
    return 2 * a.numel() / float(event_microseconds(lambda i: b.copy_(a), 20).median()) / 1e3


def rival_fp8() -> dict[str, Callable]:
    """fp8's arithmetic in plain torch as a user would compile it: codes and scales in tensors of their own."""

    def encode(x):
        groups = x.view(-1, 128).float()
        bits = (groups.abs().amax(1, keepdim=True) / 448).view(torch.int32) + 0xFFFF >> 16
        scale = (bits << 16).view(torch.float32)
        return (groups / scale).to(torch.float8_e4m3fn), scale.bfloat16()

    def decode(codes, scale):
        return (codes.float() * scale.float()).bfloat16().view(-1)

    return {"encode": torch.compile(encode, dynamic=False), "decode": torch.compile(decode, dynamic=False)}


def rival_calls(message: Message) -> dict[str, Callable[[int], object]]:
    """The rival's calls on the message's inputs, after a check that its codes are fp8's but for rounding."""
    compiled = rival_fp8()
    numel, payload = message.x[0].numel(), message.wire[0][0, : message.x[0].numel()]
    encoded = [compiled["encode"](x) for x in message.x]
    assert (encoded[0][0].view(torch.uint8).view(-1) != payload).float().mean() < 1e-3
    assert (compiled["decode"](*encoded[0]).float() - message.x[0].float()).norm() < 0.03 * numel**0.5
    return {
        "encode": lambda i: compiled["encode"](message.x[i % len(message.x)]),
        "decode": lambda i: compiled["decode"](*encoded[i % len(encoded)]),
    }


def measure(codec, size: int, args: argparse.Namespace, copy: float) -> list[dict]:
    """Rows for results.csv of one codec at one size."""
    dtype = DTYPES[args.dtype]
    message = make_message(codec, size, dtype)
    assert_right(codec, message)
    inner = max(4, min(32, 2**28 // size))
    found = []
    for operation, call in message.calls(codec).items():
        found.append((operation, "triton", "graph", graph_microseconds(call, inner, args.repeats)))
        found.append((operation, "triton, host", "eager", host_microseconds(call)))
    if not args.no_rivals:
        with torch_twins():
            for operation, call in message.calls(codec).items():
                call(0)
                found.append((operation, "torch twin", "eager", event_microseconds(call, 8)))
        if codec.name == "fp8":
            for operation, call in rival_calls(message).items():
                found.append((operation, "torch.compile", "graph", graph_microseconds(call, inner, args.repeats)))
    rows = []
    for operation, provider, mode, samples in found:
        times, traffic = percentiles(samples), message.traffic(operation)
        pieces, warps = launch.TUNED.get((codec.name, operation), launch.DEFAULT)
        config = {"codec": codec.name, "dtype": args.dtype, "mode": mode, "copy_gbs": round(copy), "bytes": traffic}
        config |= {"messages": MESSAGES} if "sum" in operation else {}
        config |= {"pieces": pieces, "warps": warps} if provider == "triton" else {}
        row = {"bench": "kernels", "case": operation, "provider": f"{codec.name}, {provider}", "x": size, "ranks": 1}
        row |= {"link": "none", "device": device_name(torch.device("cuda")), "config": config}
        metrics = {"time": ("us", times)}
        if provider != "triton, host":
            rate = {k: traffic / times[other] / 1e3 for k, other in (("p50", "p50"), ("p20", "p80"), ("p80", "p20"))}
            metrics["rate"] = ("GB/s", rate)
            metrics["share of copy"] = (f"of {copy:.0f} GB/s", {k: v / copy for k, v in rate.items()})
        for metric, (unit, values) in metrics.items():
            rows.append(row | {"metric": metric, "unit": unit} | {k: float(f"{v:.5g}") for k, v in values.items()})
    return rows


def show(rows: list[dict]) -> None:
    table = Table(title=f"kernels, {rows[0]['device']}")
    for column in ("bytes", "call", "provider", "us p50", "p20", "p80", "GB/s", "of copy"):
        table.add_column(column, justify="left" if column in ("call", "provider") else "right")
    calls: dict = {}
    for row in rows:
        calls.setdefault((row["x"], row["case"], row["provider"]), {})[row["metric"]] = row
    for (x, case, provider), metrics in calls.items():
        times = [f"{metrics['time'][p]:.1f}" for p in ("p50", "p20", "p80")]
        rate = f"{metrics['rate']['p50']:.0f}" if "rate" in metrics else ""
        share = f"{metrics['share of copy']['p50']:.0%}" if "rate" in metrics else ""
        table.add_row(str(x), case, provider, *times, rate, share)
    Console(width=120).print(table)


def sweep_jobs(codecs: list[str]) -> list[tuple[str, str, int, int]]:
    return [(n, o, *split) for n in codecs if n != "none" for o in OPERATIONS for split in SPLITS]


def build(shard: str, args: argparse.Namespace) -> None:
    """Build every split's kernel of shard i/n: Triton keeps them on disk."""
    index, count = map(int, shard.split("/"))
    for name, operation, pieces, warps in sweep_jobs(args.codecs)[index::count]:
        codec = get_codec(name)
        launch.TUNED[name, operation] = (pieces, warps)
        message = make_message(codec, 2**16, DTYPES[args.dtype], rotated=0)
        message.calls(codec)[operation](0)


def sweep(args: argparse.Namespace) -> None:
    """Time every split at 64 MB; one line each, best first."""
    command = [sys.executable, __file__, "--dtype", args.dtype, "--codecs", *args.codecs, "--build"]
    builders = [subprocess.Popen([*command, f"{i}/{args.jobs}"]) for i in range(args.jobs)]
    if any([builder.wait() for builder in builders]):
        raise SystemExit("a process that built kernels failed: see above")
    copy, found = copy_gbs(), []
    for name in args.codecs:
        if name == "none":
            continue
        codec = get_codec(name)
        message = make_message(codec, 2**26, DTYPES[args.dtype])
        for operation, (pieces, warps) in itertools.product(OPERATIONS, SPLITS):
            launch.TUNED[name, operation] = (pieces, warps)
            microseconds = float(graph_microseconds(message.calls(codec)[operation], 8, 12).median())
            share = message.traffic(operation) / microseconds / 1e3 / copy
            found.append([name, operation, pieces, warps, round(microseconds, 2), round(share, 4)])
    with args.sweep.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["codec", "operation", "pieces", "warps", "us", f"share of {copy:.0f} GB/s"])
        writer.writerows(found)
    for key, group in itertools.groupby(found, key=lambda row: row[:2]):
        best = sorted(group, key=lambda row: row[4])
        print(*key, " ".join(f"({p},{w}) {us} {share:.0%}" for _, _, p, w, us, share in best[:4]), flush=True)


def main() -> None:
    args = parse_arguments()
    if kernels_for(get_codec("int8"), torch.device("cuda", torch.cuda.current_device())) is None:
        raise SystemExit("no kernels here: Triton is not installed or the GPU is older than sm89")
    if args.build:
        build(args.build, args)
    elif args.sweep:
        sweep(args)
    else:
        copy, rows = copy_gbs(), []
        for name, size in itertools.product(args.codecs, args.sizes):
            rows += measure(get_codec(name), size, args, copy)
        show(rows)
        append_rows(rows, args.results)


if __name__ == "__main__":
    main()
