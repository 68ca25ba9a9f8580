"""Times SCAPE's kernels against their torch twins and torch's fused AdamW, part by part, on one GPU.

    python recipes/bench_scape_kernels.py                       GPT-2 (124M) and Qwen3-1.7B, density 0.1 and 0.01
    python recipes/bench_scape_kernels.py --sweep               warps a program of the largest kernels, for WARPS

Everything is fp32 and on one rank, which owns every mask: on W ranks each selects about a W-th of that ("select, 1 of
8"). A time is between CUDA events, with the launches queued beforehand; "host" is the time to launch. Share of the
bound: the bytes a part has to move, in whole 32-byte sectors, over its time, of a large copy's rate. Share of a step:
the selection over 6 * parameters * tokens / the rate of a bf16 product of the model's largest layer, which no real
step reaches, so the true share is smaller.
"""

import argparse
import time
from collections import defaultdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench_collectives import percentiles
from gpu_timing import copy_gbs, event_microseconds
from hf_taco_scape.optim.adams import adams_update_
from hf_taco_scape.sync.device import FusedStep, fused_step, select_encoded, torch_twins
from hf_taco_scape.sync.layout import TensorLayout
from hf_taco_scape.sync.mask import EncodedMask, FullMask, assign_owners, select_topk
from hf_taco_scape.sync.slot import Slot
from hf_taco_scape.sync.step_ops import form_, keep_unsent_, pack_, sparse_update_
from results import RESULTS, append_rows, device_name

BYTES = 4  # of an fp32 entry
SECTOR = 8  # entries of 32 bytes
RANKS = 8


def gpt2() -> list[tuple[int, int]]:
    return [(50257, 768), (1024, 768)] + 12 * [(768, 2304), (768, 768), (768, 3072), (3072, 768)]


def qwen() -> list[tuple[int, int]]:
    attention, mlp = (
        [(2048, 2048), (1024, 2048), (1024, 2048), (2048, 2048)],
        [(6144, 2048), (6144, 2048), (2048, 6144)],
    )
    return [(151936, 2048)] + 28 * (attention + mlp)


MODELS = {"gpt2-124M": gpt2, "qwen3-1.7B": qwen}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--densities", nargs="+", type=float, default=[0.1, 0.01])
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a step on a GPU, for the share of a step")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="print every kernel's time in a step")
    parser.add_argument("--sweep", action="store_true", help="print times by warps, write no rows")
    parser.add_argument("--results", type=Path, default=RESULTS, help="CSV file that the rows are appended to")
    return parser.parse_args()


def make_slots(shapes: list[tuple[int, int]]) -> list[Slot]:
    """Parameters with gradients and an empty optimizer state, on the GPU."""
    g, slots = torch.Generator("cuda").manual_seed(0), []
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 0}
    for i, shape in enumerate(shapes):
        p = torch.nn.Parameter(torch.randn(shape, device="cuda", generator=g).mul_(0.02))
        p.grad = torch.randn(shape, device="cuda", generator=g).mul_(1e-3)
        state = {"momentum": torch.zeros_like(p), "residual": torch.zeros_like(p)}
        slots.append(Slot(i, p, group, {k: v.detach() for k, v in state.items()}, TensorLayout(), True))
    return slots


class Timeline:
    """Times of named parts: on the device between events, and on the host."""

    def __init__(self) -> None:
        self.marks, self.host = defaultdict(list), defaultdict(list)

    def measure(self, name: str, work):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin = time.perf_counter()
        start.record()
        result = work()
        end.record()
        self.host[name].append(time.perf_counter() - begin)
        self.marks[name].append((start, end))
        return result

    def milliseconds(self, skip: int) -> dict[str, torch.Tensor]:
        torch.cuda.synchronize()
        times = {name: [a.elapsed_time(b) for a, b in marks[skip:]] for name, marks in self.marks.items()}
        return {name: torch.tensor(values, dtype=torch.float64) for name, values in times.items()}


class Steps:
    """SCAPE's steps on one rank: kernels or twins, timed part by part."""

    def __init__(self, slots: list[Slot], density: float) -> None:
        self.slots = slots
        self.k = [max(1, int(density * s.numel)) for s in slots]
        self.masks = {s.index: FullMask(s.numel) for s in slots}
        self.kernels: FusedStep | None = None
        self.step = 0
        owners = assign_owners([s.numel for s in slots], RANKS)
        self.owned = [(s, k) for s, k, owner in zip(slots, self.k, owners, strict=True) if owner == 0]
        self.own = {s.index for s, _ in self.owned}

    def chosen(self) -> list[tuple[torch.Tensor, int]]:
        return [(s.state["residual"].view(-1), k) for s, k in zip(self.slots, self.k, strict=True)]

    def run(self, line: Timeline) -> None:
        """One step of a rank that owns its share of the masks; "select" chooses all, for the time of it."""
        self.step += 1
        values = torch.empty(sum(m.k for m in self.masks.values()), device="cuda")
        torch.cuda._sleep(20_000_000)  # about 10 ms, in which the host gets ahead
        kernels = line.measure("prepare", lambda: fused_step(self.slots, self.kernels, self.step, self.masks))
        line.measure("form+pack", lambda: kernels.form(values, self.own, None))
        payloads = line.measure("select", lambda: select_encoded(self.chosen()))
        line.measure(f"select, 1 of {RANKS}", lambda: kernels.choose(self.owned))
        self.slots[0].group["step"] += 1
        line.measure("update", lambda: kernels.update(None, {}))
        kernels.finish()
        self.kernels = kernels
        self.masks = {
            s.index: EncodedMask(s.numel, k, p) for s, k, p in zip(self.slots, self.k, payloads, strict=True)
        }

    def run_twins(self, line: Timeline) -> None:
        """The same with the twins, tensor by tensor."""
        self.step += 1
        selections = {s.index: self.masks[s.index].resolve(s.param.device) for s in self.slots}
        packed = {s.index: torch.empty(self.masks[s.index].k, device="cuda") for s in self.slots}

        def form():
            for s in self.slots:
                c = form_(s.state["residual"].view(-1), s.momentum, s.grad, 0.9, None)
                pack_(packed[s.index], c, selections[s.index])
                if s.index not in self.own:
                    keep_unsent_(c, selections[s.index], torch.float32)

        def update():
            for s in self.slots:
                sparse_update_(s.param.detach(), s.momentum, packed[s.index], selections[s.index], **s.group)

        line.measure("form+pack", form)
        masks = line.measure("select", lambda: [EncodedMask.from_bool(select_topk(c, k), k) for c, k in self.chosen()])
        for s, _ in self.owned:
            keep_unsent_(s.state["residual"].view(-1), selections[s.index], torch.float32)
        self.slots[0].group["step"] += 1
        line.measure("update", update)
        self.masks, self.kernels = {s.index: m for s, m in zip(self.slots, masks, strict=True)}, None

    def traffic(self, part: str) -> float:
        """Bytes that a part has to move: every array once, of scattered entries the expected sectors."""
        n, k = sum(s.numel for s in self.slots), sum(self.k)
        payload = sum(m.payload.numel() for m in self.masks.values())
        bits, on = n / 8, self.sectors(k / n)
        if part == "form+pack":  # r, g in, r out; m where it is not 0; sent values out
            return 3 * BYTES * n + on + bits * 2 + BYTES * k + payload
        if part == "select":
            return BYTES * n + payload
        if part == f"select, 1 of {RANKS}":
            return (BYTES * n + payload) * sum(s.numel for s, _ in self.owned) / n
        # p in and out; m in where it was sent before and is now, out where either; mean in
        return 2 * BYTES * n + on + self.sectors(2 * k / n) + bits * 2 + BYTES * k

    def sectors(self, density: float) -> float:
        return BYTES * sum(s.numel for s in self.slots) * (1 - (1 - min(density, 1.0)) ** SECTOR)


def assert_right(slots: list[Slot], density: float) -> None:
    """Two steps of kernels and of twins from one state, on a few tensors: equal masks, and equal but for rounding."""
    few = [max(slots, key=lambda s: s.numel), slots[1], slots[-1]]
    outcomes = []
    for twins in (False, True):
        copies = make_slots([tuple(s.param.shape) for s in few])
        steps = Steps(copies, density)
        for _ in range(3):
            if twins:
                with torch_twins():
                    steps.run_twins(Timeline())
            else:
                steps.run(Timeline())
        outcomes.append((copies, steps.masks))
    for got, want in zip(outcomes[0][0], outcomes[1][0], strict=True):
        mask, expected = outcomes[0][1][got.index].payload, outcomes[1][1][got.index].payload
        assert torch.equal(mask, expected), f"the masks of {tuple(got.param.shape)} differ"
        for name, a, b in [("param", got.param, want.param), *((k, got.state[k], want.state[k]) for k in got.state)]:
            assert (a - b).norm() <= 1e-6 * b.norm(), f"{name} of {tuple(got.param.shape)} differs"


def matmul_flops(shapes: list[tuple[int, int]], tokens: int) -> float:
    """FLOP/s of a bf16 product of `tokens` rows with the largest layer that is not the embedding."""
    rows, columns = max(shapes[1:], key=lambda s: s[0] * s[1])
    x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    event_microseconds(lambda i: x @ weight.T, 5)
    return 2e6 * tokens * rows * columns / float(event_microseconds(lambda i: x @ weight.T, 10).median())


def print_profile(steps: Steps, title: str) -> None:
    """Milliseconds a step of every kernel on the device."""
    count = 3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(count):
            steps.run(Timeline())
        torch.cuda.synchronize()
    print(f"-- kernels of a step, ms: {title}")
    for event in sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)[:24]:
        ms = event.self_device_time_total / 1e3 / count
        if ms > 0.002 and "spin" not in event.key:
            print(f"{ms:9.3f} {event.count / count:7.1f} calls  {event.key[:90]}")


def sweep(name: str, args: argparse.Namespace) -> None:
    """Print the times of the parts by the warps of their kernels."""
    from hf_taco_scape.kernels import scape_launch, scape_select, scape_select_launch, scape_step

    kernels = [
        ("form+pack", scape_launch.WARPS, scape_step.form_kernel),
        ("update", scape_launch.WARPS, scape_step.update_kernel),
        ("select", scape_select_launch.WARPS, scape_select.scan_kernel),
    ]
    slots = make_slots(MODELS[name]())
    for density in args.densities:
        for part, table, kernel in kernels:
            before, found = table.get(kernel, 4), []
            for warps in (2, 4, 8, 16):
                table[kernel] = warps
                steps, line = Steps(slots, density), Timeline()
                for _ in range(6):
                    steps.run(line)
                found.append(f"{warps}: {float(line.milliseconds(3)[part].median()):.3f}")
            table[kernel] = before
            print(f"{name}, density {density}, {part}, ms by warps  {'  '.join(found)}", flush=True)


def rivals(slots: list[Slot], repeats: int) -> dict[tuple[str, str], torch.Tensor]:
    """(part, provider) -> ms of dense steps on the same parameters and gradients."""
    params = [s.param for s in slots]
    found, hyper = {}, {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    grads, momenta = [p.grad for p in params], [s.state["momentum"] for s in slots]

    def dense(i):
        adams_update_([p.detach() for p in params], grads, momenta, step=5, **hyper)

    for provider in ("triton", "torch twin"):
        with torch_twins() if provider == "torch twin" else torch.no_grad():
            event_microseconds(dense, 3)
            found["dense AdamS", provider] = event_microseconds(dense, repeats) / 1e3
    adamw = torch.optim.AdamW(params, fused=True, **hyper)
    event_microseconds(lambda i: adamw.step(), 3)
    found["dense AdamW", "torch fused"] = event_microseconds(lambda i: adamw.step(), repeats) / 1e3
    return found


def measure(name: str, args: argparse.Namespace, copy: float) -> list[dict]:
    """Rows of one model."""
    shapes = MODELS[name]()
    slots = make_slots(shapes)
    numel = sum(s.numel for s in slots)
    flops = matmul_flops(shapes, args.tokens)
    step_ms = 6e3 * numel * args.tokens / flops
    rows: list[dict] = []

    def add(case: str, provider: str, samples: torch.Tensor, traffic: float, config: dict) -> None:
        times = percentiles(samples)
        share = {p: traffic / times[q] / 1e6 / copy for p, q in (("p50", "p50"), ("p20", "p80"), ("p80", "p20"))}
        facts = {"model": name, "tensors": len(slots), "dtype": "float32", "bytes": round(traffic)} | config
        row = {"bench": "scape_kernels", "case": case, "provider": provider, "x": numel, "ranks": 1, "link": "none"}
        row |= {"device": device_name(torch.device("cuda")), "config": facts}
        metrics = [("time", "ms", times), ("share of bound", f"of {copy:.0f} GB/s", share)]
        if case.startswith("select"):
            facts |= {"tokens": args.tokens, "tflops": round(flops / 1e12), "step_ms": round(step_ms, 1)}
            metrics.append(("share of step", f"of {step_ms:.0f} ms", {p: t / step_ms for p, t in times.items()}))
        for metric, unit, values in metrics:
            values = {p: float(f"{v:.5g}") for p, v in values.items()}
            rows.append(row | {"metric": metric, "unit": unit} | values)

    for density in args.densities:
        assert_right(slots, density)
        steps, line = Steps(slots, density), Timeline()
        for _ in range(args.repeats + 3):
            steps.run(line)
        host = {part: float(torch.tensor(times[3:]).median()) * 1e3 for part, times in line.host.items()}
        times = line.milliseconds(3)
        for part in ("form+pack", "select", f"select, 1 of {RANKS}", "update"):
            facts = {"density": density, "host_ms": round(host[part], 3)}
            add(part, "triton", times[part], steps.traffic(part), facts)
        whole = times["form+pack"] + times[f"select, 1 of {RANKS}"] + times["update"]
        traffic = sum(steps.traffic(part) for part in ("form+pack", f"select, 1 of {RANKS}", "update"))
        add(f"step, 1 of {RANKS}", "triton", whole, traffic, {"density": density})
        if args.profile:
            print_profile(steps, f"{name}, density {density}")
        twin = Timeline()
        with torch_twins():
            for _ in range(3):
                steps.run_twins(twin)
        for part, samples in twin.milliseconds(1).items():
            add(part, "torch twin", samples, steps.traffic(part), {"density": density})
    del steps
    for (part, provider), samples in rivals(slots, args.repeats).items():
        arrays = 7 if part == "dense AdamW" else 5
        add(part, provider, samples, arrays * BYTES * numel, {})
    return rows


def show(rows: list[dict]) -> None:
    table = Table(title=f"SCAPE's kernels, {rows[0]['device']}")
    for column in ("model", "density", "part", "provider", "ms p50", "p20", "p80", "of bound", "of step", "host ms"):
        table.add_column(column, justify="left" if column in ("model", "part", "provider") else "right")
    parts: dict = {}
    for row in rows:
        config = row["config"]
        key = (config["model"], config.get("density", ""), row["case"], row["provider"], config.get("host_ms", ""))
        parts.setdefault(key, {})[row["metric"]] = row
    for (model, density, case, provider, host), metrics in parts.items():
        times = [f"{metrics['time'][p]:.3f}" for p in ("p50", "p20", "p80")]
        shares = [f"{metrics[m]['p50']:.1%}" if m in metrics else "" for m in ("share of bound", "share of step")]
        table.add_row(model, str(density), case, provider, *times, *shares, str(host))
    Console(width=130).print(table)


def main() -> None:
    args = parse_arguments()
    copy = copy_gbs()
    for name in args.models:
        if args.sweep:
            sweep(name, args)
            continue
        rows = measure(name, args, copy)
        show(rows)
        append_rows(rows, args.results)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.no_grad():
        main()
