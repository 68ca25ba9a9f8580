"""Times whole data-parallel training steps: DDP, dense averaging and SCAPE, the same model on the same tokens.

    torchrun --nproc_per_node 2 recipes/bench_data_parallel.py --model gpt2-medium --tokens 8192 32768 \\
        --text corpus.txt --tokenizer data/gpt2-tokenizer

`accelerate launch --multi_gpu --num_processes N` works too; NCCL with a GPU a rank, else gloo. x is the tokens a rank
and step. Weights are fp32, on CUDA under bf16 autocast; every step clips to norm 1. Asserts first that dense averaging
trains as DDP does and that density 1 is dense, afterwards that replicas hold the same bits. Appends to results.csv.
"""

import argparse
import gc
from collections.abc import Callable
from dataclasses import fields
from functools import partial

import torch
import torch.distributed as dist

import end_to_end as e2e
from bench_collectives import DTYPES, Bench
from hf_taco_scape import AdamS, ScapeAdamS, TacoScapeArguments
from results import append_rows
from step_parts import serial_parts, summary, traced_spans

SHIPPED = {f.name.removeprefix("scape_"): f.default for f in fields(TacoScapeArguments) if f.name.startswith("scape_")}
SHIPPED = {name: SHIPPED[name] for name in ("second_moment", "mask", "clip", "values")}
PAPER = {"second_moment": "adams", "mask": "topk", "clip": "ghat", "values": "fp32"}
# provider -> ScapeAdamS's arguments; the rest of PROVIDERS is dense
SCAPE = {
    "scape-90": SHIPPED | {"density": 0.1},
    "scape-99": SHIPPED | {"density": 0.01},
    "scape-99-host": SHIPPED | {"density": 0.01, "residual_device": "cpu"},
    "scape-99-bf16": SHIPPED | {"density": 0.01, "values": "bf16"},
    "scape-99-random": SHIPPED | {"density": 0.01, "mask": "random"},
    "scape-99-paper": PAPER | {"density": 0.01},
}
RIVAL = "ddp-adams"
PROVIDERS = ("no-sync", "ddp-adamw", RIVAL, "dense", *SCAPE)
DEFAULT = ("no-sync", "ddp-adamw", RIVAL, "dense", "scape-90", "scape-99", "scape-99-host")
LR = 3e-4
BUCKET_BYTES = 25 * 2**20  # DDP's own
WALL_CLOCK = 1 - 0.433  # the paper's: a run to the same loss in so much of dense AdamS' time
PAPER_GAIN = 3.26  # a step of dense AdamS over one of SCAPE; so its all-reduces took at least 2.26 times the rest
MOST_WAITED = 0.1  # of a mask's exchange, at its use


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    e2e.add_arguments(parser)
    parser.add_argument("--model", choices=e2e.MODELS, default="gpt2-medium")
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192], help="a rank and step, in micro-batches")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=DEFAULT)
    parser.add_argument("--dtype", choices=DTYPES, help="autocast to it; default: bfloat16 on CUDA, none on CPU")
    parser.add_argument("--trace_steps", type=int, default=3)
    args = parser.parse_args(argv)
    for tokens in args.tokens:
        if tokens % (args.sequence * args.batch):
            parser.error(f"--tokens {tokens} is no multiple of {args.batch} rows of {args.sequence} tokens")
    return args


def make_loop(bench: Bench, provider: str, shape: str, **scape):
    """The loop of a provider around a new model of that shape; `scape` changes ScapeAdamS's arguments."""
    model = e2e.build(shape, bench.device)
    if provider in SCAPE:
        optimizer = ScapeAdamS(model.parameters(), lr=LR, **(SCAPE[provider] | scape))
        return e2e.ProductLoop(model, optimizer, bench.dtype, dp_sync="scape")
    if provider == "dense":
        return e2e.ProductLoop(model, AdamS(model.parameters(), lr=LR), bench.dtype)
    if provider == "ddp-adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, fused=True)
    else:
        optimizer = AdamS(model.parameters(), lr=LR)
    return e2e.PlainLoop(model, optimizer, bench.dtype, ddp=provider != "no-sync")


def assert_right(bench: Bench, tokens: torch.Tensor, count: int = 4) -> None:
    """AssertionError unless, in fp32, dense averaging trains as DDP does and SCAPE at density 1 as dense averaging."""
    args = argparse.Namespace(sequence=64, batch=4)
    found = {}
    precision, bench.dtype = bench.dtype, torch.float32
    for name, extra in ((RIVAL, {}), ("dense", {}), ("scape-99-paper", {"density": 1.0})):
        loop = make_loop(bench, name, "gpt2-tiny", **extra)
        batches = e2e.Batches(tokens % 512, args, bench.device, bench.rank, bench.ranks)
        # the norm besides: AdamS hides a wrong scale of the gradients
        steps = [torch.stack([loop.step(batches.take(2)), loop.norm]) for _ in range(count)]
        found[name] = torch.stack(steps), torch.cat([p.detach().flatten() for p in loop.model.parameters()])
    bench.dtype = precision
    for name, reference in (("dense", RIVAL), ("scape-99-paper", "dense")):
        (steps, weights), (expected, where) = found[name], found[reference]
        loss, norm = ((steps - expected) / expected).abs().amax(0).tolist()
        assert loss <= 1e-6 and norm <= 1e-5, f"{name}: loss {loss:.1e}, norm {norm:.1e} off {reference}'s"
        moved = (weights - where).abs().max().item() / (LR * count)
        assert moved <= 1e-2, f"{name}: a weight differs from {reference}'s by {moved:.1e} of the distance moved"


class Peak:
    """Peak of allocated GPU memory of what is built from now on; 0 on CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        self._base = self._read(torch.cuda.memory_allocated)
        self.restart()

    def _read(self, figure: Callable) -> int:
        if self._device.type != "cuda":
            return 0
        torch.cuda.synchronize(self._device)
        return figure(self._device)

    def restart(self) -> None:
        self._read(torch.cuda.reset_peak_memory_stats)

    def gib(self) -> float:
        return (self._read(torch.cuda.max_memory_allocated) - self._base) / 2**30


def build_all(bench: Bench, tokens: torch.Tensor, rows: e2e.Rows) -> tuple[dict, dict]:
    """Loops by provider, three steps old, and their batches; rows for the memory that each took."""
    args, loops, feeds, first = bench.args, {}, {}, {}
    count = args.tokens[0] // (args.sequence * args.batch)
    for name in args.providers:
        peak = Peak(bench.device)
        loop = loops[name] = make_loop(bench, name, args.model)
        feeds[name] = e2e.Batches(tokens, args, bench.device, bench.rank, bench.ranks)
        first[name] = loop.step(feeds[name].take(count)).item()
        loop.step(feeds[name].take(count))
        whole = peak.gib()
        peak.restart()
        loop.step(feeds[name].take(count))
        if bench.device.type == "cuda":
            rows.add("memory", name, "peak, from the first step", "GiB", args.tokens[0], max(whole, peak.gib()))
            rows.add("memory", name, "peak of a later step", "GiB", args.tokens[0], peak.gib())
        expected, allowed = first[args.providers[0]], 1e-6 if bench.dtype == torch.float32 else 1e-4
        assert abs(first[name] / expected - 1) <= allowed, f"{name}: first loss {first[name]}, not {expected}"
    return loops, feeds


def time_wire(bench: Bench, nbytes: int) -> float:
    """Seconds that all-reduces of that many bytes of fp32 gradients take in DDP's buckets, nothing beside them."""
    bucket = torch.zeros(min(BUCKET_BYTES, nbytes) // 4, device=bench.device).normal_()
    clock = e2e.Clock(bench.device)
    for _ in range(3):
        dist.barrier()
        e2e.synchronise(bench.device)
        clock.mark()
        for _ in range(2):
            dist.all_reduce(bucket)
    e2e.synchronise(bench.device)
    clock.mark()
    return clock.seconds()[-1] / 2 * nbytes / bucket.nbytes


def _step(loop, feed: e2e.Batches, count: int) -> None:
    loop.step(feed.take(count))


def time_all(bench: Bench, loops: dict, feeds: dict, rows: e2e.Rows) -> None:
    """Rows for the time, gain, bytes and share of the bound of every provider, at every number of tokens a step."""
    args = bench.args
    params = sum(p.numel() for p in next(iter(loops.values())).model.parameters())
    wire = time_wire(bench, 4 * params)
    for tokens in args.tokens:
        count = tokens // (args.sequence * args.batch)
        steps = {name: partial(_step, loop, feeds[name], count) for name, loop in loops.items()}
        times = e2e.time_in_turns(bench, steps, args.rounds, args.steps)
        medians = {name: t.median(dim=1).values for name, t in times.items()}
        rows.add("wire", "all-reduce", "time", "ms", tokens, 1e3 * wire, bytes=4 * params)
        for name, samples in times.items():
            rows.add("step", name, "time", "ms", tokens, 1e3 * samples)
            sent, dense = loops[name].sent_of_dense()
            rows.add("step", name, "sent", "share of dense bytes", tokens, sent / dense, sent_bytes=sent)
            if RIVAL in medians:
                speedup = medians[RIVAL] / medians[name]
                rows.add("step", name, "speedup", f"x {RIVAL}", tokens, speedup)
                unit = f"x {RIVAL}'s, in {WALL_CLOCK:.1%} of its time"
                rows.add("step", name, "steps", unit, tokens, WALL_CLOCK * speedup)
            if "no-sync" in medians:
                share = medians["no-sync"] / medians[name]
                rows.add("step", name, "share of bound", "no-sync time / time", tokens, share)
        if "no-sync" in medians:
            ratio = wire / medians["no-sync"]
            rows.add("wire", "all-reduce", "regime", "time of the all-reduce / of a no-sync step", tokens, ratio)
    for name, loop in loops.items():
        if name != "no-sync":
            e2e.assert_replicas_equal(name, getattr(loop.model, "module", loop.model))


def take_apart(bench: Bench, loops: dict, feeds: dict, rows: e2e.Rows) -> list[str]:
    """Rows for the parts of a SCAPE step and for what it hides; returns what is not hidden as it should be."""
    args, wrong = bench.args, []
    tokens = args.tokens[0]
    count = tokens // (args.sequence * args.batch)
    for name in (n for n in loops if n in SCAPE):
        loop, feed = loops[name], feeds[name]

        def steps(loop=loop, feed=feed):
            for _ in range(args.trace_steps):
                _step(loop, feed, count)

        with serial_parts(bench.device) as parts:
            clock = e2e.Clock(bench.device)
            clock.mark()
            steps()
            clock.mark()
            whole = clock.seconds()[0]
        parts = {part: seconds / args.trace_steps for part, seconds in parts.items()}
        parts["forward, backward, rest"] = whole / args.trace_steps - sum(parts.values())
        for part, seconds in parts.items():
            rows.add("part", name, part, "ms", tokens, 1e3 * seconds)
        if SCAPE[name]["mask"] != "topk":
            continue
        hidden = mean_over_ranks(bench, summary(traced_spans(bench.device, steps), parts["mask exchange"]))
        for metric, value in hidden.items():
            rows.add("trace", name, metric, "us" if metric.endswith("_us") else "share", tokens, value)
        if bench.device.type != "cuda":  # ranks that share cores wait for each other, not for messages
            continue
        if "residual_device" not in SCAPE[name] and hidden["select_beside"] < 1:
            wrong.append(f"{name}: {1 - hidden['select_beside']:.0%} of the selection runs in the step's own stream")
        if hidden["mask_hidden"] < 1 - MOST_WAITED:
            wrong.append(f"{name}: the step waits {1 - hidden['mask_hidden']:.0%} of the masks' exchange")
    return wrong


def mean_over_ranks(bench: Bench, figures: dict[str, float]) -> dict[str, float]:
    values = torch.tensor(list(figures.values()), dtype=torch.float64, device=bench.device)
    dist.all_reduce(values)
    return dict(zip(figures, (values / bench.ranks).tolist(), strict=True))


def show(bench: Bench, rows: e2e.Rows) -> None:
    def cell(*key, form: str = "{:.2f}", x: int | None = None) -> str:
        value = rows.value(*key, x=x)
        return "" if value is None else form.format(value)

    args, lines = bench.args, []
    for tokens in args.tokens:
        for name in args.providers:
            row = next(r for r in rows.rows if (r["provider"], r["metric"], r["x"]) == (name, "time", tokens))
            lines.append(
                [f"{tokens} tokens, {name}", *(f"{row[p]:.1f}" for p in ("p50", "p20", "p80"))]
                + [cell("step", name, "speedup", x=tokens), cell("step", name, "share of bound", x=tokens)]
                + [cell("step", name, "sent", form="{:.4f}", x=tokens)]
                + [cell("memory", name, f"peak{which}") for which in (", from the first step", " of a later step")]
            )
    columns = ["a rank and step", "ms p50", "p20", "p80", f"x {RIVAL}", "of no-sync", "sent", "peak GiB", "later"]
    ratios = ", ".join(f"{t}: {cell('wire', 'all-reduce', 'regime', x=t)}" for t in args.tokens)
    wire = rows.value("wire", "all-reduce", "time")
    link = f"{bench.ranks} ranks, {rows.rows[0]['link']}; the gradients' all-reduce alone takes {wire:.1f} ms"
    link += f"; that over a no-sync step, by tokens: {ratios} (the paper's: over {PAPER_GAIN - 1:.2f})"
    e2e.show(f"{args.model}, {link}", columns, lines)
    parts = list(dict.fromkeys(r["metric"] for r in rows.rows if r["case"] == "part"))
    traced = list(dict.fromkeys(r["metric"] for r in rows.rows if r["case"] == "trace"))
    names = [n for n in args.providers if n in SCAPE]
    tables = (("part", "parts one after the other, ms a step", parts), ("trace", "what is hidden", traced))
    for case, title, found in tables:
        if found:
            e2e.show(title, ["provider", *found], [[n, *(cell(case, n, metric) for metric in found)] for n in names])


def main() -> None:
    args = parse_arguments()
    bench = Bench(args)
    tokens = e2e.read_tokens(args)
    assert_right(bench, tokens)
    precision = str(bench.dtype).removeprefix("torch.")
    sizes = {"sequence": args.sequence, "batch": args.batch, "steps": args.steps, "rounds": args.rounds}
    gpus = torch.cuda.device_count() if bench.device.type == "cuda" else 0
    rows = e2e.Rows(bench, "data_parallel", model=args.model, autocast=precision, gpus=gpus, **sizes)
    loops, feeds = build_all(bench, tokens, rows)
    time_all(bench, loops, feeds, rows)
    wrong = take_apart(bench, loops, feeds, rows)
    if bench.rank == 0:
        show(bench, rows)
        append_rows(rows.rows, args.results)
    dist.barrier()
    dist.destroy_process_group()
    assert not wrong, "; ".join(wrong)


if __name__ == "__main__":
    main()
