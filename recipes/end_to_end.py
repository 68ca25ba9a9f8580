"""What the end-to-end speed benchmarks share: models from shapes, real tokens, timing in turns, rows and a table."""

import argparse
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, Qwen3Config, set_seed
from transformers.utils import logging

from bench_collectives import Bench, percentiles
from hf_taco_scape import TacoScapeAccelerator
from hf_taco_scape.collectives.meter import ring_all_reduce_bytes
from hf_taco_scape.parallel.model import group_device
from hf_taco_scape.parallel.replicas import differing_tensors
from hf_taco_scape.training_args import TacoScapeOptions
from results import RESULTS, device_name

ROOT = Path(__file__).parent.parent
BYTES = "bytes"  # --tokenizer: every byte of the text is a token


def _gpt2(**sizes) -> GPT2Config:
    # a shape has no special tokens
    return GPT2Config(
        **sizes, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False
    )


def _qwen3(**sizes) -> Qwen3Config:
    return Qwen3Config(**sizes, tie_word_embeddings=True, use_cache=False)


MODELS = {
    "gpt2-tiny": lambda: _gpt2(vocab_size=512, n_embd=64, n_layer=2, n_head=4, n_positions=128),
    "gpt2-mini": lambda: _gpt2(vocab_size=512, n_embd=256, n_layer=4, n_head=4, n_positions=128),
    "gpt2-medium": lambda: _gpt2(vocab_size=50257, n_embd=1024, n_layer=24, n_head=16, n_positions=1024),
    "gpt2-500m": lambda: _gpt2(vocab_size=50257, n_embd=1280, n_layer=22, n_head=20, n_positions=1024),
    "qwen3-tiny": lambda: _qwen3(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
    ),
    "qwen3-0.6b": lambda: _qwen3(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=2048,
    ),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of both benchmarks; `Bench` reads device, backend and dtype."""
    parser.add_argument("--sequence", type=int, default=1024, help="tokens a row")
    parser.add_argument("--batch", type=int, default=8, help="rows a micro-batch")
    parser.add_argument("--text", type=Path, default=ROOT / "README.md", help="the text that the models train on")
    parser.add_argument("--tokenizer", default=BYTES, help="a folder or hub name; default: a token a byte")
    parser.add_argument("--rounds", type=int, default=2, help="times that every provider gets its turn")
    parser.add_argument("--steps", type=int, default=3, help="timed steps a turn, after one that is not")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", choices=["gloo", "nccl"], help="default: nccl if each rank has a GPU of its own")
    parser.add_argument("--link", help="name of the link for the table")
    parser.add_argument("--results", type=Path, default=RESULTS, help="CSV file that the rows are appended to")


def build(name: str, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0):
    """A model of that shape in training mode, its random weights the same on every rank."""
    logging.set_verbosity_error()  # about a class that was asked for no kind of loss
    set_seed(seed)
    with device:
        model = AutoModelForCausalLM.from_config(MODELS[name](), attn_implementation="sdpa", dtype=dtype)
    return model.train()


def read_tokens(args: argparse.Namespace) -> torch.Tensor:
    """int64 [n]: the tokens of `--text`. ValueError where they do not fill one micro-batch."""
    text = args.text.read_bytes()[: 2**20]
    if args.tokenizer == BYTES:
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    else:
        tokens = torch.tensor(AutoTokenizer.from_pretrained(args.tokenizer)(text.decode(errors="ignore")).input_ids)
    if len(tokens) < args.sequence:
        raise ValueError(f"{args.text} has {len(tokens)} tokens, fewer than one row of --sequence {args.sequence}")
    return tokens


class Batches:
    """Micro-batches of consecutive rows of `tokens`, starting anew at the end; `reader` of `readers` gets its own."""

    def __init__(self, tokens, args: argparse.Namespace, device: torch.device, reader: int = 0, readers: int = 1):
        rows = tokens[: len(tokens) // args.sequence * args.sequence].view(-1, args.sequence).to(device)
        self._rows, self._size, self._place, self._stride = rows, args.batch, reader * args.batch, readers * args.batch

    def take(self, count: int) -> list[dict[str, torch.Tensor]]:
        """The next `count` micro-batches, each a dict of input_ids and labels [batch, sequence]."""
        batches = []
        for _ in range(count):
            places = torch.arange(self._place, self._place + self._size, device=self._rows.device) % len(self._rows)
            ids = self._rows[places]
            batches.append({"input_ids": ids, "labels": ids})
            self._place += self._stride
        return batches


MAX_NORM = 1.0


class PlainLoop:
    """A loop in plain torch: forward, backward, clip, step. Under DDP, or with no synchronisation at all.

    autocast: the type to compute in, fp32 for none. clip=False leaves gradients as they are.
    """

    def __init__(self, model, optimizer, autocast: torch.dtype, ddp: bool, clip: bool = True) -> None:
        self.model, self.optimizer, self.autocast, self.ddp, self.clip = model, optimizer, autocast, ddp, clip
        if ddp:
            device = next(model.parameters()).device
            self.model = DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device.index])

    def step(self, batches: list[dict]) -> torch.Tensor:
        """Train on the micro-batches and return the last one's loss."""
        for batch in batches:
            unsynced = self.ddp and batch is not batches[-1]
            with self.model.no_sync() if unsynced else contextlib.nullcontext():
                loss = _loss(self.model, batch, self.autocast)
                (loss / len(batches)).backward()
        if self.clip:
            self.norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def sent_of_dense(self) -> tuple[int, int]:
        """Bytes that one step sends a rank, and that a dense ring of the gradients would."""
        dense = ring_all_reduce_bytes(sum(p.nbytes for p in self.model.parameters()), dist.get_world_size())
        return dense if self.ddp else 0, dense


class ProductLoop:
    """The same loop with TacoScapeAccelerator, as recipes/accelerate_loop.py writes it; `toggles` are its own."""

    def __init__(self, model, optimizer, autocast: torch.dtype, **toggles) -> None:
        self.autocast = autocast
        # several accelerators live here at once; one watch over the ranks each would be too many
        self.accelerator = TacoScapeAccelerator(TacoScapeOptions(heartbeat_timeout=0, **toggles))
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def step(self, batches: list[dict]) -> torch.Tensor:
        """Train on the micro-batches and return the last one's loss."""
        accelerator = self.accelerator
        # shared by all accelerators of a process, and counted on from step to step
        accelerator.gradient_accumulation_steps, accelerator.step = len(batches), 0
        self._before = accelerator.gradients.meter.snapshot()
        for batch in batches:
            with accelerator.accumulate(self.model):
                loss = _loss(self.model, batch, self.autocast)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    self.norm = accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return loss.detach()

    def sent_of_dense(self) -> tuple[int, int]:
        """Data-parallel bytes that the last step sent from this rank, and that a dense ring would have."""
        now = self.accelerator.gradients.meter.snapshot()
        return tuple(now[name] - self._before[name] for name in ("sent_bytes", "dense_bytes"))


def _loss(model, batch: dict, dtype: torch.dtype) -> torch.Tensor:
    with torch.autocast(batch["input_ids"].device.type, dtype, enabled=dtype != torch.float32):
        return model(**batch).loss


class Clock:
    """Marks between steps: events on CUDA, so that the host need not wait for a step before it queues the next."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list = []

    def mark(self) -> None:
        if not self._cuda:
            return self._marks.append(time.perf_counter())
        self._marks.append(torch.cuda.Event(enable_timing=True))
        self._marks[-1].record()

    def seconds(self) -> list[float]:
        """Times between consecutive marks."""
        if self._cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in zip(self._marks, self._marks[1:], strict=False)]
        return [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_in_turns(bench: Bench, steps: dict[str, Callable[[], object]], rounds: int, count: int) -> dict:
    """name -> float64 [rounds, count]: seconds a step, the slowest rank's; providers take turns, in changing order.

    The first step of a turn is not timed: what the step before it left under way has arrived by then.
    """
    found: dict[str, list] = {name: [] for name in steps}
    for turn in range(rounds):
        for name in list(steps) if turn % 2 == 0 else reversed(steps):
            synchronise(bench.device)
            dist.barrier()
            clock = Clock(bench.device)
            for _ in range(count + 1):
                steps[name]()
                clock.mark()
            samples = torch.tensor(clock.seconds(), dtype=torch.float64, device=bench.device)
            dist.all_reduce(samples, dist.ReduceOp.MAX)
            found[name].append(samples.cpu())
    return {name: torch.stack(turns) for name, turns in found.items()}


def assert_replicas_equal(name: str, model: torch.nn.Module) -> None:
    """AssertionError that names a parameter of `model` whose bits are not the same on all ranks; collective."""
    wrong = differing_tensors(list(model.named_parameters()), dist.group.WORLD, group_device(dist.group.WORLD))
    assert not wrong, f"{name}: {wrong[0]} ({len(wrong)} tensors) differs between ranks"


class Rows:
    """Collects rows for results.csv that share bench, ranks, link, device and most of the configuration."""

    def __init__(self, bench: Bench, name: str, **config) -> None:
        self._common = {
            "bench": name,
            "ranks": bench.ranks,
            "link": bench.args.link or f"{bench.backend}, unnamed link",
            "device": device_name(bench.device),
        }
        self._config = {"backend": bench.backend, "load": round(os.getloadavg()[0], 1), **config}
        self.rows: list[dict] = []

    def add(self, case: str, provider: str, metric: str, unit: str, x: int, values, **config) -> None:
        """`values`: a number, or a tensor of samples, of which the percentiles are kept."""
        if isinstance(values, torch.Tensor):
            found = percentiles(values.flatten().double().sort().values)
        else:
            found = dict.fromkeys(("p50", "p20", "p80"), float(values))
        found = {key: float(f"{value:.5g}") for key, value in found.items()}
        named = {"case": case, "provider": provider, "metric": metric, "unit": unit, "x": x}
        self.rows.append(self._common | named | found | {"config": self._config | config})

    def value(self, case: str, provider: str, metric: str, x: int | None = None) -> float | None:
        """The p50 of a row, None where there is no such row."""
        for row in self.rows:
            same = (row["case"], row["provider"], row["metric"]) == (case, provider, metric)
            if same and x in (None, row["x"]):
                return row["p50"]
        return None


def show(title: str, columns: list[str], lines: list[list[str]]) -> None:
    table = Table(title=title)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    for line in lines:
        table.add_row(*line)
    console = Console()
    (console if console.is_terminal else Console(width=150)).print(table)
