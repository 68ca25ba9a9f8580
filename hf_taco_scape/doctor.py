"""`python -m hf_taco_scape.doctor`: devices, links, versions, what works here and what `auto` would choose.

One process looks at what it sees. Links need ranks: it starts one a GPU by itself where there are two or more,
`--ranks 2` does so on the CPU (gloo), and under `accelerate launch` or torchrun it uses the launcher's. Ends with exit
code 1 where something needed is broken; each problem comes with its fix.
"""

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from .codecs import list_codecs
from .collectives.dispatch import BACKENDS
from .collectives.presets import codec_choices, codec_pair
from .collectives.routes import size
from .diagnosis import (
    Finding,
    check_cache,
    check_devices,
    check_hooks,
    check_versions,
    devices,
    examine_links,
    links,
    versions,
)

TIMEOUT_S = 240
MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[red]problem[/]"}


def main(argv: list[str] | None = None) -> int:
    """Look, print (rank 0), and return the exit code, the same on every rank."""
    args = _parse(argv)
    codecs = codec_pair(args.tp_codec, args.tp_codec_backward)
    found = versions()
    report = {"versions": found, "devices": devices(), "links": links()}
    findings = [
        *check_versions(found), check_hooks(), *check_devices(report["devices"], report["links"], codecs),
        check_cache(),
    ]  # fmt: skip
    rank = int(os.environ.get("RANK", 0))
    ranks, launched = _ranks(args, len(report["devices"]))
    if ranks > 1:
        collective, more = _examine_as_rank(args) if launched else _start_ranks(args, ranks)
        report |= collective
        findings += more
    else:
        findings.append(
            Finding("note", "links", "one process: nothing is measured", "--ranks 2, or accelerate launch -m ...")
        )
    report["findings"] = [asdict(one) for one in findings]
    if rank == 0:
        if args.json:
            print(json.dumps(report, indent=1))
        else:
            _print(report, findings)
    return int(any(one.level == "problem" for one in findings))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hf_taco_scape.doctor", description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, help="ranks to start; default: the number of GPUs, if two or more")
    parser.add_argument("--tp_size", type=int, help="ranks of a tensor-parallel group; default: all")
    parser.add_argument("--tp_codec", default="taco", choices=codec_choices())
    parser.add_argument("--tp_codec_backward", choices=list_codecs())
    parser.add_argument("--tp_backend", default="auto", choices=BACKENDS)
    parser.add_argument("--sequence_parallel", action="store_true", help="measure its halves of an all-reduce too")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    return parser.parse_args(argv)


def _ranks(args: argparse.Namespace, gpus: int) -> tuple[int, bool]:
    """How many ranks look, and whether a launcher has started them."""
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched > 1:
        return launched, True
    return args.ranks or (gpus if gpus > 1 else 1), False


def _examine_as_rank(args: argparse.Namespace) -> tuple[dict, list[Finding]]:
    """This process is one rank: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set."""
    local, gpus = int(os.environ.get("LOCAL_RANK", os.environ["RANK"])), torch.cuda.device_count()
    if 0 < gpus <= local:
        fix = f"at most {gpus} ranks here, or CUDA_VISIBLE_DEVICES= to look at the CPU"
        return {}, [Finding("problem", "ranks", f"rank {local} of this node has no GPU: there are {gpus}", fix)]
    device = torch.device("cuda", local) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    backend = "nccl" if gpus else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S / 2), device_id=device if gpus else None)
    try:
        options = {"codec": args.tp_codec, "codec_backward": args.tp_codec_backward, "backend": args.tp_backend}
        return examine_links(device, args.tp_size or dist.get_world_size(), options, args.sequence_parallel)
    finally:
        dist.destroy_process_group()


def _start_ranks(args: argparse.Namespace, ranks: int) -> tuple[dict, list[Finding]]:
    """Start `ranks` processes on this node and take rank 0's answer; what they die of, or hang in, is a problem."""
    gpus = torch.cuda.device_count()
    if 0 < gpus < ranks:
        fix = f"--ranks {gpus}, or CUDA_VISIBLE_DEVICES= to look at the CPU"
        return {}, [Finding("problem", "ranks", f"{ranks} ranks need {ranks} GPUs, there are {gpus}", fix)]
    fix = "run it again with NCCL_DEBUG=INFO" if gpus else "see the traceback above"
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        context = mp.spawn(_rank, (ranks, _free_port(), args, answer), nprocs=ranks, join=False)
        deadline = time.monotonic() + TIMEOUT_S
        try:
            while not context.join(timeout=1):
                if time.monotonic() > deadline:
                    for process in context.processes:
                        process.kill()
                    return {}, [Finding("problem", "ranks", f"no answer within {TIMEOUT_S} s: they hang", fix)]
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            print(error, file=sys.stderr)
            last = str(error).strip().splitlines()[-1]
            return {}, [Finding("problem", "ranks", last, fix)]
        report, findings = json.loads(answer.read_text())
    return report, [Finding(**one) for one in findings]


def _rank(rank: int, ranks: int, port: int, args: argparse.Namespace, answer: Path) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    report, findings = _examine_as_rank(args)
    if rank == 0:
        answer.write_text(json.dumps([report, [asdict(one) for one in findings]]))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _print(report: dict, findings: list[Finding]) -> None:
    console = Console()
    found = report["versions"].items()
    console.print("versions:", ", ".join(f"{name} {version}" for name, version in found if version), highlight=False)
    if report["devices"]:
        table = Table(
            "", "GPU", "", "GiB", *(f"to {i}" for i in range(len(report["devices"]))), title="GPUs and links"
        )
        for i, (one, row) in enumerate(zip(report["devices"], report["links"], strict=True)):
            table.add_row(str(i), one["name"], one["capability"], f"{one['memory_gib']:g}", *row)
        console.print(table)
    if "auto" in report:
        title = f"auto, tp {report['tp_size']} of {report['ranks']} ranks ({report['backend']}), us a call"
        table = Table("message", "operation", "auto takes", "us", "best dense", "times faster", title=title)
        for one, ways in _merged(report["auto"]):
            gain = one["best_dense_us"] / one["us"]
            table.add_row(
                size(one["bytes"]), f"{one['operation']} {ways}", one["route"], f"{one['us']:.1f}",
                f"{one['best_dense_us']:.1f}", f"{gain:.2f}",
            )  # fmt: skip
        console.print(table)
    if "symm_mem" in report:
        reason = report["symm_mem"]["reason"]
        console.print(f"symm_mem: {'cannot start: ' + reason if reason else 'available'}", highlight=False)
    table = Table("", "what", "found", "fix", title="checks")
    for one in sorted(findings, key=lambda one: list(MARKS).index(one.level)):
        table.add_row(MARKS[one.level], one.what, one.detail, one.fix)
    console.print(table)


def _merged(rows: list[dict]) -> list[tuple[dict, str]]:
    """Directions that take the same route at a size share a line."""
    merged: dict[tuple, tuple[dict, list[str]]] = {}
    for one in rows:
        key = (one["operation"], one["bytes"], one["route"])
        merged.setdefault(key, (one, []))[1].append(one["direction"])
    return [(one, "" if len(ways) == 2 else ways[0]) for one, ways in merged.values()]


if __name__ == "__main__":
    sys.exit(main())
