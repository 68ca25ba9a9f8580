"""Where the time of one ScapeAdamS step goes: its parts one after the other, and what really runs beside what.

`serial_parts` waits after every part, so that each shows its whole cost; a step measured that way is slower than one
in use. `traced_spans` changes nothing but names the parts, and `summary` tells from them what is hidden: the
selection behind the values on the wire, and the masks' exchange behind the next forward.
"""

import contextlib
import functools
import json
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from hf_taco_scape.collectives.sparse import PackedMessage, PendingGather
from hf_taco_scape.sync import ScapeAdamS
from hf_taco_scape.sync.grad_sync import GradSync
from hf_taco_scape.sync.side_lane import SideLane

# part of the step -> what the product calls for it
CALLS = {
    "pack": ((GradSync, "_pack_sparse"), (GradSync, "_pack_exact")),
    "select": ((SideLane, "start"), (GradSync, "_choose")),
    "wire": ((PackedMessage, "start"), (PackedMessage, "finish")),
    "mask exchange": ((PendingGather, "__init__"), (PendingGather, "wait")),
    "update": ((ScapeAdamS, "_update"),),
}
_PREFIX = "scape step: "


@contextlib.contextmanager
def _wrapped(wrap: Callable):
    """Each call of CALLS goes through wrap(part, name, function) while the context lasts."""
    originals = [(part, owner, name, vars(owner)[name]) for part, calls in CALLS.items() for owner, name in calls]
    for part, owner, name, function in originals:
        setattr(owner, name, functools.wraps(function)(wrap(part, name, function)))
    try:
        yield
    finally:
        for _, owner, name, function in originals:
            setattr(owner, name, function)


@contextlib.contextmanager
def serial_parts(device: torch.device):
    """Yield a dict, part -> seconds, that fills while steps are taken; a part inside another only counts as itself."""
    seconds: dict[str, float] = defaultdict(float)
    inner: list[float] = []  # for each open call, the seconds of the parts inside it
    caller = threading.get_ident()

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def wrap(part: str, name: str, function: Callable) -> Callable:
        def timed(self, *args, **kwargs):
            if threading.get_ident() != caller:  # the side lane's thread: whoever waits for it counts it
                return function(self, *args, **kwargs)
            begin = entered = now()
            if part in ("wire", "mask exchange") and name in ("start", "__init__"):
                dist.barrier()  # a rank that is late is no part of the exchange
                begin = now()
            inner.append(0.0)
            result = function(self, *args, **kwargs)
            if name in ("start", "__init__"):
                _wait_for(self)
            took = now() - begin
            seconds[part] += took - inner.pop()
            if inner:
                inner[-1] += took + begin - entered
            return result

        return timed

    with _wrapped(wrap):
        yield seconds


def _wait_for(started) -> None:
    """Wait here and now for what was started, not where the step comes to need it."""
    if getattr(started, "_work", None) is not None:
        started._work.wait()
    if isinstance(getattr(started, "_pending", None), Future):
        started._pending.result()


@dataclass(frozen=True)
class Span:
    """One interval in microseconds. lane: the CUDA stream it ran on, or the thread on CPU."""

    what: str  # a part and its call ("wire start"), or "kernel"
    lane: int
    begin: float
    end: float


def traced_spans(device: torch.device, steps: Callable[[], None]) -> list[Span]:
    """Run `steps` with its parts named and return their spans; on CUDA also every kernel, "select kernel" if it
    selects. From torch.profiler on CUDA, from the host's clock on CPU, where work and its call are one."""
    if device.type == "cuda":
        return _traced_on_cuda(steps)
    spans: list[Span] = []

    def wrap(part: str, name: str, function: Callable) -> Callable:
        def noted(self, *args, **kwargs):
            begin = time.perf_counter()
            try:
                return function(self, *args, **kwargs)
            finally:
                times = (1e6 * begin, 1e6 * time.perf_counter())
                spans.append(Span(f"{part} {name.strip('_')}", threading.get_ident(), *times))

        return noted

    with _wrapped(wrap):
        steps()
    return spans


def _traced_on_cuda(steps: Callable[[], None]) -> list[Span]:
    def wrap(part: str, name: str, function: Callable) -> Callable:
        def named(self, *args, **kwargs):
            with torch.profiler.record_function(f"{_PREFIX}{part} {name.strip('_')}"):
                return function(self, *args, **kwargs)

        return named

    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with _wrapped(wrap), torch.profiler.profile(activities=kinds) as profile:
        steps()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return spans_of_trace(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def spans_of_trace(events: list[dict]) -> list[Span]:
    """Spans of a torch.profiler trace: the named calls, and the kernels by stream, with what launched them."""
    timed = [e for e in events if e.get("ph") == "X"]
    calls = [
        Span(e["name"].removeprefix(_PREFIX), e["tid"], e["ts"], e["ts"] + e["dur"])
        for e in timed
        if e.get("cat") == "user_annotation" and e["name"].startswith(_PREFIX)
    ]
    selecting = [c for c in calls if c.what.startswith("select")]
    launches = {
        e["args"]["correlation"]: e["ts"]
        for e in timed
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    kernels = []
    for e in timed:
        if e.get("cat") == "kernel":
            launched = launches.get(e["args"].get("correlation"), float("nan"))
            selects = any(c.begin <= launched <= c.end for c in selecting)
            what = "select kernel" if selects else "nccl kernel" if "nccl" in e["name"].lower() else "kernel"
            kernels.append(Span(what, e["args"]["stream"], e["ts"], e["ts"] + e["dur"]))
    return calls + kernels


def summary(spans: list[Span], mask_exchange_s: float) -> dict[str, float]:
    """What the spans of whole steps show of hidden work, as shares of 1 (nan where there is nothing to hide).

    select_beside: of the selection's time, on a lane other than the step's own (1 if all of it).
    select_hidden: of the selection's time, while values were on the wire.
    mask_hidden: of a mask exchange (`mask_exchange_s` seconds if the step waits for it), not waited for at its use:
    on the host, or, over NCCL, by the stream, in gather kernels beside which no other kernel ran.
    mask_wait_us: that wait, a step.
    """
    calls = _by_name(spans)
    cuda = "kernel" in calls
    own = Counter(s.lane for s in calls["kernel" if cuda else "pack pack_exact"]).most_common(1)[0][0]
    selection = calls["select kernel" if cuda else "select choose"]
    starts, ends = (sorted(calls[name], key=lambda s: s.begin) for name in ("wire start", "wire finish"))
    wire = [(a.begin, b.end) for a, b in zip(starts, ends, strict=True)]
    # the first mask had arrived before the trace began
    waits = sorted((s.begin, s.end) for s in calls["mask exchange wait"])[1:]
    waited = sum(b - a for a, b in waits)
    busy = _merged([(s.begin, s.end) for s in calls["kernel"] if s.lane == own])
    gathers = [s for s in calls["nccl kernel"] if any(a <= s.begin <= b for a, b in waits)]
    waited += sum(s.end - s.begin - _covered((s.begin, s.end), busy) for s in gathers)
    steps = max(len(waits), 1)
    total = sum(s.end - s.begin for s in selection)
    return {
        "select_beside": _share(sum(s.end - s.begin for s in selection if s.lane != own), total),
        "select_hidden": _share(sum(_covered((s.begin, s.end), wire) for s in selection), total),
        "mask_hidden": 1 - min(1.0, _share(waited / steps, 1e6 * mask_exchange_s)),
        "mask_wait_us": waited / steps,
        "wire_us": _share(sum(b - a for a, b in wire), len(wire)),
        "select_us": _share(total, len(wire)),
    }


def _by_name(spans: list[Span]) -> dict[str, list[Span]]:
    named = defaultdict(list)
    for span in spans:
        named[span.what].append(span)
    return named


def _share(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def _merged(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _covered(interval: tuple[float, float], others: list[tuple[float, float]]) -> float:
    """How much of `interval` lies inside `others`, which do not overlap each other."""
    return sum(max(0.0, min(interval[1], end) - max(interval[0], begin)) for begin, end in others)
