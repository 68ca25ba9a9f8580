"""What `doctor` finds out: versions, devices, links, and what the collectives do here. No printing, no launching."""

import os
import sys
from dataclasses import dataclass
from importlib import metadata

import torch
import torch.distributed as dist
from packaging.version import Version

from .codecs import Codec, get_codec, list_codecs
from .collectives import all_reduce
from .collectives.dispatch import open_communicator
from .collectives.machine import cache_folder, nvlinks
from .collectives.routes import DIRECTIONS, OPERATIONS
from .collectives.symm_mem import why_not
from .parallel import ParallelDims
from .parallel.replicas import differ, digest

PYTHON = ("3.11", "3.14")  # from, below
OLDEST = {"torch": "2.11", "transformers": "5.17", "accelerate": "1.15"}
OTHERS = ("triton", "datasets", "evaluate", "safetensors", "peft")
SMALLEST_E4M3 = (8, 9)
_CHECK_NUMEL = 100_003  # no multiple of any group
_WORST_ERROR = 0.3  # of a sum, relative; four bits make half of it


@dataclass
class Finding:
    """level: ok, note (works, but say so) or problem (something needed is broken); fix: what to do about it."""

    level: str
    what: str
    detail: str
    fix: str = ""


def versions() -> dict[str, str | None]:
    """Of everything that matters; None for what is not installed."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in ("hf_taco_scape", *OLDEST, *OTHERS):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    found["torch"] = torch.__version__
    found["cuda"] = torch.version.cuda
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    return found


def check_versions(found: dict[str, str | None]) -> list[Finding]:
    """found: of `versions`."""
    findings = []
    if not Version(PYTHON[0]) <= Version(found["python"]) < Version(PYTHON[1]):
        findings.append(
            Finding(
                "problem", "python", f"{found['python']} is not supported", f"use {PYTHON[0]} to below {PYTHON[1]}"
            )
        )
    for package, oldest in OLDEST.items():
        have = found[package]
        if have is None or Version(have).release < Version(oldest).release:
            detail = "is not installed" if have is None else f"{have} is older than {oldest}"
            findings.append(Finding("problem", package, detail, f"pip install '{package}>={oldest}'"))
    if found["cuda"] and torch.cuda.is_available() and found["triton"] is None:
        findings.append(
            Finding("problem", "triton", "is not installed: codecs run as slow plain torch", "pip install triton")
        )
    return findings or [Finding("ok", "versions", "all supported")]


def check_hooks() -> Finding:
    """The private hooks of transformers and accelerate, which are checked when hooks.py is imported."""
    try:
        from . import hooks

        hooks.check_hooks()
    except ImportError as error:
        return Finding("problem", "private hooks", str(error), "install the versions that the text names")
    count = sum(len(methods) for methods in hooks.SIGNATURES.values()) + len(hooks.SOURCES)
    return Finding("ok", "private hooks", f"{count} of transformers, accelerate and torch are as expected")


def devices() -> list[dict]:
    """The CUDA devices that this process sees."""
    out = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        out.append(
            {
                "name": properties.name,
                "capability": f"sm{properties.major}{properties.minor}",
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "e4m3": (properties.major, properties.minor) >= SMALLEST_E4M3,
            }
        )
    return out


def links() -> list[list[str]]:
    """Between devices: NVn (n NVLink connections), P2P (peer access over PCIe), host (through host memory)."""
    count = torch.cuda.device_count()
    rows = []
    for index in range(count):
        nv = nvlinks(index) or [0] * count
        row = []
        for peer in range(count):
            access = peer != index and torch.cuda.can_device_access_peer(index, peer)
            row.append("" if peer == index else f"NV{nv[peer]}" if nv[peer] else "P2P" if access else "host")
        rows.append(row)
    return rows


def check_devices(found: list[dict], pairs: list[list[str]], codecs: tuple[str, str]) -> list[Finding]:
    """found, pairs: of `devices` and `links`. codecs: those of the run that is planned."""
    findings = []
    if not found and os.path.exists("/proc/driver/nvidia/version"):
        fix = (
            "install the CUDA build of torch" if torch.version.cuda is None else "see nvidia-smi, CUDA_VISIBLE_DEVICES"
        )
        findings.append(Finding("problem", "GPUs", "the driver is there, but torch sees no device", fix))
    elif not found:
        findings.append(Finding("note", "GPUs", "none: everything runs on the CPU over gloo"))
    old = [f"{one['name']} ({one['capability']})" for one in found if not one["e4m3"]]
    if old:
        wanted = any(get_codec(name).needs_e4m3 for name in codecs)
        findings.append(
            Finding(
                "problem" if wanted else "note", "E4M3", f"{old[0]} cannot convert to it: no codecs taco and fp8",
                "tp_codec hadamard-int8, hadamard-int6 or int8",
            )
        )  # fmt: skip
    if any("host" in row for row in pairs):
        findings.append(
            Finding("note", "links", "some GPUs have no peer access: messages go through host memory, compress them")
        )
    slow = [f"{name}={os.environ[name]}" for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") if name in os.environ]
    if slow:
        findings.append(Finding("note", "environment", f"{', '.join(slow)} makes links slower", "unset it"))
    return findings or [Finding("ok", "GPUs", f"{len(found)}, all with E4M3")]


def check_cache() -> Finding:
    """Whether measured routes can be kept."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return Finding(
            "note", "cache", f"{error}: links are measured at each start", "set HF_HOME to a writable folder"
        )
    if not os.access(folder, os.W_OK):
        return Finding("note", "cache", f"{folder} is read-only: links are measured at each start", "set HF_HOME")
    return Finding("ok", "cache", str(folder))


def examine_links(device: torch.device, tp_size: int, options: dict, halves: bool) -> tuple[dict, list[Finding]]:
    """Try every codec and measure the routes as a training start would; collective over the world.

    options: codec, codec_backward and backend of `open_communicator`. halves: measure what sequence parallelism sends
    too. Every rank returns the same.
    """
    try:
        dims = ParallelDims.build(tp_size)
    except ValueError as error:
        return {}, [Finding("problem", "ranks", str(error))]
    report = {"ranks": dist.get_world_size(), "tp_size": tp_size, "backend": dist.get_backend()}
    reason = why_not(dims.tp_group, device)
    report["symm_mem"] = {"available": reason is None, "reason": reason}
    everywhere, findings = _codecs_of_all_ranks()
    findings += [_try_codec(get_codec(name), dims.tp_group, device) for name in everywhere]
    good = [one.what.removeprefix("codec ") for one in findings if one.level == "ok"]
    if len(good) > 1:
        findings = [one for one in findings if one.level != "ok"]
        findings.append(Finding("ok", "all-reduce", f"right, replicas bit-identical: {', '.join(good)}"))
    operations = OPERATIONS if halves else OPERATIONS[:1]
    try:
        comm = open_communicator(
            dims.tp_group, **options, min_bytes="auto", device=device, operations=operations,
            agree_over=dims.wide_groups(), use_cache=False,
        )  # fmt: skip
    except ValueError as error:
        return report, [*findings, Finding("problem", "routes", str(error))]
    report["routes"] = comm.table.to_json()
    report["auto"] = _choices(comm)
    if reason and device.type == "cuda":
        findings.append(Finding("note", "symm_mem", f"cannot start: {reason}"))
    return report, findings


def _codecs_of_all_ranks() -> tuple[list[str], list[Finding]]:
    """The names that every rank knows, and a finding for each that only some do; collective over the world."""
    known = [None] * dist.get_world_size()
    dist.all_gather_object(known, list_codecs())
    some = sorted({name for names in known for name in names if not all(name in other for other in known)})
    fix = "call register_codec on every rank, before the model is split"
    strangers = [
        Finding("problem", f"codec {name}", f"not known to rank {[name in n for n in known].index(False)}", fix)
        for name in some
    ]
    return [name for name in known[0] if name not in some], strangers


def _try_codec(codec: Codec, group, device: torch.device) -> Finding:
    """All-reduce random numbers: near the exact sum, and the same bits on all ranks."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    parts = [
        torch.randn(_CHECK_NUMEL, generator=torch.Generator().manual_seed(seed)).to(device) for seed in range(ranks)
    ]
    exact = torch.stack(parts).double().sum(0)
    fix = "report it with this output; meanwhile choose another tp_codec"
    try:
        got = all_reduce(parts[rank], group, codec)
    except ValueError as error:  # an older GPU: the text has the choices
        return Finding("note", f"codec {codec.name}", str(error))
    error = float((got.double() - exact).norm() / exact.norm())
    facts = torch.stack([digest(got), torch.tensor(int(error < _WORST_ERROR), device=device)])
    wrong = differ(facts, group)
    if error >= _WORST_ERROR or 1 in wrong:
        return Finding("problem", f"codec {codec.name}", f"sums are wrong by {error:.1%}", fix)
    if wrong:
        return Finding("problem", f"codec {codec.name}", "ranks got different bits from the same sum", fix)
    return Finding("ok", f"codec {codec.name}", f"error of a sum {error:.2%}")


def _choices(comm) -> list[dict]:
    """At every measured size, what `auto` takes and what the best dense route takes; times in microseconds."""
    rows = []
    for operation, measured in (comm.measured or {}).items():  # None: nothing to choose
        for i, nbytes in enumerate(measured.sizes):
            dense = min(times[i] for route, times in measured.seconds.items() if route.dense)
            for direction in DIRECTIONS:
                route = comm.table.route(operation, direction, nbytes)
                rows.append(
                    {
                        "operation": operation,
                        "direction": direction,
                        "bytes": nbytes,
                        "route": str(route),
                        "us": measured.seconds[route][i] * 1e6,
                        "best_dense_us": dense * 1e6,
                    }
                )
    return rows
