"""Times whole training steps of a model split over tensor-parallel ranks, its messages dense or through codecs.

    torchrun --nproc_per_node 2 recipes/bench_tensor_parallel.py --models qwen3-0.6b gpt2-medium \\
        --text corpus.txt --tokenizer data/gpt2-tokenizer

`accelerate launch --multi_gpu --num_processes N` works too; NCCL with a GPU a rank, else gloo. A step is forward,
backward, clip and AdamW on `--batch` rows, the same on all ranks; weights and messages are `--dtype`. x is the tokens
a step. Asserts first that a codec's loss is dense's within its error, afterwards that replicas hold the same bits.
The bound of a gain (Amdahl) is dense's step with its all-reduces replaced by the codec's bytes on the same link, no
time for coding. Provider `transformers` is its own tensor parallelism, tp_plan="auto". Appends to results.csv.
"""

import argparse
import contextlib
import gc
import os
import shutil
import tempfile
from collections import Counter
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import end_to_end as e2e
from bench_collectives import DTYPES, ERRORS, Bench
from hf_taco_scape.codecs import Codec, get_codec
from hf_taco_scape.collectives.meter import ring_all_reduce_bytes
from hf_taco_scape.collectives.transport import exchange, gather
from hf_taco_scape.parallel import split_state
from results import append_rows

DENSE, STOCK = "none", "transformers"
# provider -> codec of activations, codec of gradients
CODECS = {
    DENSE: ("none", "none"),
    "taco": ("taco", "taco"),
    "fp8": ("fp8", "fp8"),
    "hadamard-int6": ("hadamard-int6", "hadamard-int6"),
    "int6-int4": ("hadamard-int6", "hadamard-int4"),
}
LR = 3e-4
CALLS = 6  # of one kind of message, to time it


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    e2e.add_arguments(parser)
    parser.add_argument("--models", nargs="+", choices=e2e.MODELS, default=["qwen3-0.6b", "gpt2-medium"])
    parser.add_argument("--providers", nargs="+", choices=[*CODECS, STOCK], default=list(CODECS))
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and messages; default: bfloat16 on CUDA")
    args = parser.parse_args(argv)
    if args.providers[0] != DENSE:
        parser.error(f"--providers has to begin with {DENSE}: the others are compared with it")
    return args


def make_loop(bench: Bench, provider: str, shape: str):
    """The loop of a provider around a new model of that shape."""
    if provider == STOCK:
        return _stock_loop(bench, shape)
    model = e2e.build(shape, bench.device, bench.dtype)
    forward, backward = CODECS[provider]
    toggles = {"tp_size": bench.ranks, "tp_codec": forward, "tp_codec_backward": backward}
    # the codecs are what is measured: no message may take another way
    toggles |= {"tp_backend": "c10d", "tp_min_bytes": 0}
    return e2e.ProductLoop(model, _adamw(model.parameters()), torch.float32, **toggles)


def _adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.1, fused=True)


def _stock_loop(bench: Bench, shape: str):
    """transformers splits a model while it loads a checkpoint, so one is written for it."""
    folder = [tempfile.mkdtemp() if bench.rank == 0 else None]
    dist.broadcast_object_list(folder, 0)
    if bench.rank == 0:
        e2e.build(shape, bench.device, bench.dtype).save_pretrained(folder[0])
    dist.barrier()
    with _local_rank(bench.device.index or 0):
        model = AutoModelForCausalLM.from_pretrained(
            folder[0],
            dtype=bench.dtype,
            distributed_config=DistributedConfig(tp_plan="auto", tp_size=bench.ranks),
        )
    dist.barrier()
    if bench.rank == 0:
        shutil.rmtree(folder[0])
    model.to(bench.device).train()
    parameters = list(model.parameters())
    # neither a fused step nor a norm takes split and whole parameters together
    groups = [{"params": [p for p in parameters if isinstance(p, DTensor) == split]} for split in (True, False)]
    return e2e.PlainLoop(model, _adamw(groups), torch.float32, ddp=False, clip=False)


@contextlib.contextmanager
def _local_rank(device: int):
    """transformers takes LOCAL_RANK for the number of a GPU, also where several ranks share one."""
    before = os.environ["LOCAL_RANK"]
    os.environ["LOCAL_RANK"] = str(device)
    try:
        yield
    finally:
        os.environ["LOCAL_RANK"] = before


def first_step(bench: Bench, name: str, loop, feed: e2e.Batches) -> tuple[float, float]:
    """Loss and gradient norm of a step; AssertionError unless all ranks got the same bits."""
    loss = loop.step(feed.take(1)).double().reshape(1)
    norm = torch.as_tensor(getattr(loop, "norm", 0.0), dtype=torch.float64, device=loss.device).reshape(1)
    both = torch.cat([loss, norm])
    first = both.clone()
    dist.broadcast(first, 0)
    differ = (both != first).double().sum().reshape(1)
    dist.all_reduce(differ)  # every rank has to stop, or the others would wait
    assert not differ.item(), f"{name}: loss and norm differ between ranks: {both.tolist()}, {first.tolist()}"
    return tuple(both.tolist())


def assert_near(name: str, found: tuple[float, float], dense: tuple[float, float]) -> None:
    """AssertionError unless loss and gradient norm are dense's within the codec's error; a coarse check."""
    if name == STOCK:
        errors = (1e-2, float("inf"))  # bf16 sums in another order; this loop takes no norm
    else:
        # noise of one layer's message adds to that of the others
        errors = tuple(3 * max(ERRORS.get(codec, 0) for codec in CODECS[name]) / 100 + 1e-3 for _ in range(2))
    for what, value, reference, error in zip(("loss", "gradient norm"), found, dense, errors, strict=True):
        off = abs(value / reference - 1)
        assert off <= error, f"{name}: {what} {value:.6g} is {off:.2%} off dense's {reference:.6g}, over {error:.2%}"


def assert_messages_right(bench: Bench, name: str, loop, numel: int = 2**16 + 5) -> None:
    """AssertionError unless the sums that the loop's layers get are within their codecs' errors, both directions."""
    comm = split_state(loop.model).comm
    x = torch.randn(numel, device=bench.device, generator=torch.Generator(bench.device).manual_seed(bench.rank))
    x = x.to(bench.dtype)
    exact = x.double()
    dist.all_reduce(exact)
    for codec, backward in zip(CODECS[name], (False, True), strict=True):
        error = 100 * float((comm.all_reduce(x, backward).double() - exact).norm() / exact.norm())
        # two quantisations where more than two ranks take two shots; the rounding of the sum itself
        bound = 1.15 * ERRORS.get(codec, 0) * (1 if bench.ranks == 2 else 2**0.5) + 0.3
        assert error <= bound, f"{name}: error {error:.2f} % of {codec} is over the bound of {bound:.2f} %"


def messages_of(loop, feed: e2e.Batches) -> Counter:
    """(elements, dtype, whether of the backward) -> how many all-reduces of that kind one step makes."""
    comm, seen = split_state(loop.model).comm, Counter()
    original = comm.all_reduce

    def counted(x, backward=False):
        seen[x.numel(), x.dtype, backward] += 1
        return original(x, backward)

    comm.all_reduce = counted
    try:
        loop.step(feed.take(1))
    finally:
        del comm.all_reduce
    return seen


class Messages:
    """Times of one step's all-reduces, alone on the link: dense, through codecs, and the codecs' bytes only."""

    def __init__(self, bench: Bench, kinds: Counter) -> None:
        self.bench, self.kinds = bench, kinds
        self._link: dict[tuple, float] = {}

    def dense_s(self) -> float:
        return sum(n * self._time(partial(dist.all_reduce, self._like(k))) for k, n in self.kinds.items())

    def coded_s(self, loop) -> float:
        """As the product sends them."""
        comm = split_state(loop.model).comm
        return sum(n * self._time(partial(comm.all_reduce, self._like(k), k[2])) for k, n in self.kinds.items())

    def link_s(self, provider: str) -> float:
        """Of the bytes alone, sent as compressed.py sends them."""
        total = 0.0
        for (numel, dtype, backward), count in self.kinds.items():
            codec = get_codec(CODECS[provider][backward])
            key = (codec.name, numel, dtype)
            if key not in self._link:
                self._link[key] = self._time(self._bytes_only(codec, numel, dtype))
            total += count * self._link[key]
        return total

    def _like(self, kind: tuple) -> torch.Tensor:
        return torch.randn(kind[0], device=self.bench.device).to(kind[1])

    def _bytes_only(self, codec: Codec, numel: int, dtype: torch.dtype):
        ranks = self.bench.ranks
        piece = numel if ranks == 2 else -(-numel // (ranks * codec.group)) * codec.group
        size = codec.wire_bytes(piece, dtype)
        wires = torch.zeros(ranks, size, dtype=torch.uint8, device=self.bench.device).random_()

        def call():
            if ranks > 2:
                exchange(wires.view(-1), [size] * ranks, [size] * ranks, None)
            gather(wires, None)

        return call

    def _time(self, call) -> float:
        """Seconds a call, the median of CALLS."""
        call()
        clock = e2e.Clock(self.bench.device)
        dist.barrier()
        clock.mark()
        for _ in range(CALLS):
            call()
            clock.mark()
        seconds = torch.tensor(clock.seconds(), dtype=torch.float64, device=self.bench.device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.median().item()


def measure(bench: Bench, shape: str, tokens: torch.Tensor, rows: e2e.Rows) -> None:
    """Rows of one model: correctness, then steps in turns, then the parts and the bounds."""
    args = bench.args
    loops, feeds, first = {}, {}, {}
    for name in args.providers:
        loops[name] = make_loop(bench, name, shape)
        feeds[name] = e2e.Batches(tokens, args, bench.device)
        first[name] = first_step(bench, name, loops[name], feeds[name])
        assert_near(name, first[name], first[args.providers[0]])
        if name in CODECS:
            assert_messages_right(bench, name, loops[name])
    turns = {name: partial(_step, loop, feeds[name]) for name, loop in loops.items()}
    times = e2e.time_in_turns(bench, turns, args.rounds, args.steps)
    coded = [name for name in loops if name in CODECS]
    for name in coded:
        loops[name].accelerator.gradients.compare_replicas(1 + args.rounds * (1 + args.steps))

    x = args.sequence * args.batch
    median = {name: samples.median(dim=1).values for name, samples in times.items()}
    step_s = {name: float(values.median()) for name, values in median.items()}
    messages = Messages(bench, messages_of(loops[DENSE], feeds[DENSE]))
    dense_s = messages.dense_s()
    count, nbytes = sum(messages.kinds.values()), sum(k[0] * k[1].itemsize * n for k, n in messages.kinds.items())
    rows.add(shape, DENSE, "messages", "a step", x, count, message_bytes=nbytes)
    rows.add(shape, DENSE, "communication", "share of the step", x, dense_s / step_s[DENSE])
    for name in loops:
        loss, norm = first[name]
        rows.add(shape, name, "time", "ms", x, 1e3 * times[name], loss=round(loss, 6), norm=round(norm, 6))
        rows.add(shape, name, "rate", "tokens/s", x, x / times[name])
        rows.add(shape, name, "speedup", f"x {DENSE}", x, median[DENSE] / median[name])
    for name in coded:
        whole, link = messages.coded_s(loops[name]), messages.link_s(name) if name != DENSE else dense_s
        sent = sum(
            n * _sent(get_codec(CODECS[name][back]), numel, dtype, bench.ranks)
            for (numel, dtype, back), n in messages.kinds.items()
        ) / ring_all_reduce_bytes(nbytes, bench.ranks)
        rest = step_s[DENSE] - dense_s
        bound = step_s[DENSE] / (rest + link)
        rows.add(shape, name, "messages alone", "ms", x, 1e3 * whole)
        rows.add(shape, name, "bytes alone", "ms", x, 1e3 * link)
        rows.add(shape, name, "sent", "share of dense bytes", x, sent)
        rows.add(shape, name, "bound", f"x {DENSE}", x, bound)
        rows.add(shape, name, "bound by bytes", f"x {DENSE}", x, step_s[DENSE] / (rest + sent * dense_s))
        rows.add(shape, name, "share of bound", "gain / bound", x, step_s[DENSE] / step_s[name] / bound)


def _step(loop, feed: e2e.Batches) -> None:
    loop.step(feed.take(1))


def _sent(codec: Codec, numel: int, dtype: torch.dtype, ranks: int) -> int:
    """Bytes a rank sends for one all-reduce: one shot between two ranks, two among more; codec none: dense."""
    if codec.name == "none":
        return ring_all_reduce_bytes(numel * dtype.itemsize, ranks)
    if ranks == 2:
        return codec.wire_bytes(numel, dtype)
    return 2 * (ranks - 1) * codec.wire_bytes(-(-numel // (ranks * codec.group)) * codec.group, dtype)


def show(bench: Bench, shape: str, rows: e2e.Rows) -> None:
    def cell(name: str, metric: str, form: str) -> str:
        value = rows.value(shape, name, metric)
        return "" if value is None else form.format(value)

    columns = {
        "ms p50": ("time", "{:.1f}"),
        "tokens/s": ("rate", "{:.0f}"),
        f"x {DENSE}": ("speedup", "{:.2f}"),
        "bound": ("bound", "{:.2f}"),
        "of bound": ("share of bound", "{:.0%}"),
        "bound by bytes": ("bound by bytes", "{:.2f}"),
        "messages ms": ("messages alone", "{:.1f}"),
        "bytes ms": ("bytes alone", "{:.1f}"),
        "sent": ("sent", "{:.3f}"),
    }
    lines = [[name, *(cell(name, *key) for key in columns.values())] for name in bench.args.providers]
    share, count = cell(DENSE, "communication", "{:.0%}"), cell(DENSE, "messages", "{:.0f}")
    link = rows.rows[0]["link"]
    title = f"{shape}, tp {bench.ranks}, {link}: {count} all-reduces are {share} of a dense step"
    e2e.show(title, ["codec", *columns], lines)


def main() -> None:
    args = parse_arguments()
    bench = Bench(args)
    tokens = e2e.read_tokens(args)
    gpus = torch.cuda.device_count() if bench.device.type == "cuda" else 0
    sizes = {"sequence": args.sequence, "batch": args.batch, "steps": args.steps, "rounds": args.rounds}
    precision = str(bench.dtype).removeprefix("torch.")
    for shape in args.models:
        rows = e2e.Rows(bench, "tensor_parallel", dtype=precision, gpus=gpus, **sizes)
        measure(bench, shape, tokens, rows)
        if bench.rank == 0:
            show(bench, shape, rows)
            append_rows(rows.rows, args.results)
        gc.collect()
        if gpus:
            torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
