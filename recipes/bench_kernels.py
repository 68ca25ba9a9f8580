"""Times the Triton kernels of every codec against a copy of the same bytes, their torch twins and compiled torch.

    python recipes/bench_kernels.py --sizes 8M 64M 256M        rows for results.csv, bytes asserted equal first
    python recipes/bench_kernels.py --sweep sweep.csv          before that, SPLITS at 64 MB; its best are then timed

To tune: run with --sweep on the machine, read the lines `TUNED = ...` that it prints (best split of each codec and
operation whose kernel is right), put them into kernels/launch.py, run tests/test_kernels.py there, run again without
--sweep for the rows. A split is (PIECES, warps): more pieces, fewer steps between lanes and fewer scales a thread, but
more registers; with one warp no barrier, but at most 32 warps on a multiprocessor. A new split goes into SPLITS.

x is the bytes of the message in `--dtype`. A sample is a replay of a CUDA graph of calls over rotated buffers, divided
by the calls. Share of copy: (bytes read + bytes written) / time / the rate of copies that move as many bytes.
"""

import argparse
import contextlib
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
from gpu_timing import ROTATED_BYTES, copy_gbs, event_microseconds, graph_microseconds, host_microseconds
from hf_taco_scape.codecs import get_codec, list_codecs
from hf_taco_scape.codecs.device import kernels_for, torch_twins
from results import RESULTS, append_rows, device_name

MESSAGES = 2  # that decode_sum and decode_sum_encode add
OPERATIONS = ("encode", "decode", "decode_sum", "decode_sum_encode")
# pieces of a group and warps that a sweep tries: without, and with a transform
SPLITS = {False: [(1, 4), (2, 4), (4, 1), (4, 4)], True: [(2, 4), (4, 1), (4, 4), (8, 2)]}
SWEEP_BYTES = 2**26


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=[2**21, 2**23, 2**26, 2**28])
    parser.add_argument("--codecs", nargs="+", default=list_codecs())
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--no-rivals", action="store_true", help="time the kernels only")
    parser.add_argument("--results", type=Path, default=RESULTS, help="CSV file that the rows are appended to")
    parser.add_argument("--sweep", type=Path, metavar="CSV", help="time all splits at 64 MB first, into this file")
    parser.add_argument("--sweep-codecs", nargs="+", default=list_codecs(), help="that all splits are tried for")
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
    """Random inputs, and their messages as the twin writes them."""
    numel = size // dtype.itemsize
    count = min(max(math.ceil(rotated / size), 2), 32)
    g = torch.Generator("cuda").manual_seed(0)
    x = [torch.randn(numel, device="cuda", generator=g).to(dtype) for _ in range(count)]
    size = codec.wire_bytes(numel, dtype)
    wires = [torch.empty(MESSAGES, size, dtype=torch.uint8, device="cuda") for _ in range(count)]
    with torch_twins():
        for row in range(MESSAGES):
            for i, wire in enumerate(wires):
                if row == 0:
                    codec.encode_rows(x[i].view(1, -1), wire[:1])
                else:
                    wire[row].copy_(wires[(i + row) % count][0])
    return Message(x, wires, [torch.empty_like(t) for t in x], [torch.empty_like(w[0]) for w in wires])


def wrong_bytes(codec, message: Message, operation: str) -> int:
    """How many bytes differ between what the kernel and the twin write into buffers that hold something else."""
    wire, calls = message.wire[0], message.calls(codec)
    messages = wire.clone()
    target = {"encode": wire[0], "decode_sum_encode": message.again[0]}.get(operation, message.out[0])
    results = []
    for context in (torch_twins(), contextlib.nullcontext()):
        target.view(torch.uint8).fill_(0xFF)
        with context:
            calls[operation](0)
        results.append(target.view(torch.uint8).clone())
        wire.copy_(messages)
    return int((results[0] != results[1]).sum())


def right(codec, message: Message, operations=OPERATIONS) -> bool:
    """Whether the kernels write what the twins do; says what they do not."""
    found = {operation: wrong_bytes(codec, message, operation) for operation in operations}
    wrong = {k: v for k, v in found.items() if v > message.x[0].numel() * 2**-24}
    if wrong:
        splits = {k: launch.TUNED.get((codec.name, k), launch.DEFAULT) for k in wrong}
        print(f"WRONG {codec.name}, {message.x[0].nbytes} bytes: {wrong} bytes differ; splits {splits}", flush=True)
    return not wrong


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
    """Rows for results.csv of one codec at one size, none if its kernels are wrong."""
    dtype = DTYPES[args.dtype]
    message = make_message(codec, size, dtype)
    if not right(codec, message):
        return []
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
    same = {operation: copy_gbs(message.traffic(operation)) for operation in OPERATIONS}
    rows = []
    for operation, provider, mode, samples in found:
        times, traffic, like = percentiles(samples), message.traffic(operation), same[operation]
        pieces, warps = launch.TUNED.get((codec.name, operation), launch.DEFAULT)
        config = {"codec": codec.name, "dtype": args.dtype, "mode": mode, "bytes": traffic}
        config |= {"copy_2GB_gbs": round(copy), "copy_gbs": round(like)}
        config |= {"messages": MESSAGES} if "sum" in operation else {}
        config |= {"pieces": pieces, "warps": warps} if provider == "triton" else {}
        row = {"bench": "kernels", "case": operation, "provider": f"{codec.name}, {provider}", "x": size, "ranks": 1}
        row |= {"link": "none", "device": device_name(torch.device("cuda")), "config": config}
        metrics = {"time": ("us", times)}
        if provider != "triton, host":
            rate = {k: traffic / times[other] / 1e3 for k, other in (("p50", "p50"), ("p20", "p80"), ("p80", "p20"))}
            metrics["rate"] = ("GB/s", rate)
            metrics["share of copy"] = ("of a copy", {k: v / like for k, v in rate.items()})
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


def sweep_jobs(args: argparse.Namespace) -> list[tuple[str, str, int, int]]:
    """(codec, operation, pieces, warps): all splits of the codecs to sweep, of the others the one they have."""

    def splits(name, operation):
        if name in args.sweep_codecs and name != "none":
            return SPLITS[name == "taco" or name.startswith("hadamard")]
        return [launch.TUNED.get((name, operation), launch.DEFAULT)]

    return [(n, o, *split) for n in args.codecs for o in OPERATIONS for split in splits(n, o)]


def build(shard: str, args: argparse.Namespace) -> None:
    """Build every split's kernel of shard i/n: Triton keeps them on disk."""
    index, count = map(int, shard.split("/"))
    for name, operation, pieces, warps in sweep_jobs(args)[index::count]:
        codec = get_codec(name)
        launch.TUNED[name, operation] = (pieces, warps)
        make_message(codec, 2**16, DTYPES[args.dtype], rotated=0).calls(codec)[operation](0)


def sweep(args: argparse.Namespace) -> None:
    """Time every split at 64 MB, print a line each codec and operation, best first, and leave the best in TUNED."""
    command = [sys.executable, __file__, "--dtype", args.dtype, "--codecs", *args.codecs]
    command += ["--sweep-codecs", *args.sweep_codecs, "--build"]
    start = time.perf_counter()
    builders = [subprocess.Popen([*command, f"{i}/{args.jobs}"]) for i in range(args.jobs)]
    failed = sum(builder.wait() != 0 for builder in builders)
    print(f"built in {time.perf_counter() - start:.0f} s, {failed} of {args.jobs} processes failed", flush=True)
    found, messages = [], {}
    with args.sweep.open("w", newline="", buffering=1) as file:
        writer = csv.writer(file)
        writer.writerow(["codec", "operation", "pieces", "warps", "us", "GB/s"])
        for name, operation, *split in sweep_jobs(args):
            codec = get_codec(name)
            if name not in messages:
                messages = {name: make_message(codec, SWEEP_BYTES, DTYPES[args.dtype])}
            launch.TUNED[name, operation] = tuple(split)
            if right(codec, messages[name], [operation]):
                call, traffic = messages[name].calls(codec)[operation], messages[name].traffic(operation)
                us = float(graph_microseconds(call, 8, 15).median())
                found.append([name, operation, *split, round(us, 2), round(traffic / us / 1e3)])
                writer.writerow(found[-1])
            del launch.TUNED[name, operation]
    for (name, operation), group in itertools.groupby(found, key=lambda row: tuple(row[:2])):
        best = sorted(group, key=lambda row: row[4])
        launch.TUNED[name, operation] = tuple(best[0][2:4])
        print(name, operation, *(f"({p}, {w}) {us} us {rate} GB/s;" for _, _, p, w, us, rate in best), flush=True)
    print("TUNED =", launch.TUNED, flush=True)


def main() -> None:
    args = parse_arguments()
    if kernels_for(get_codec("int8"), torch.device("cuda", torch.cuda.current_device())) is None:
        raise SystemExit("no kernels here: Triton is not installed or the GPU is older than sm89")
    if args.build:
        build(args.build, args)
        return
    if args.sweep:
        sweep(args)
    copy, rows, wrong = copy_gbs(), [], False
    for size, name in itertools.product(args.sizes, args.codecs):
        found = measure(get_codec(name), size, args, copy)
        append_rows(found, args.results)
        rows, wrong = rows + found, wrong or not found
    if rows:
        show(rows)
    if wrong:
        raise SystemExit("some kernels write other bytes than their twins: see WRONG above")


if __name__ == "__main__":
    main()
