"""Training study of SCAPE and its rivals: W virtual data-parallel ranks on one GPU or CPU, many configurations a run.

    python recipes/simulate_scape.py --text corpus.txt --preset screen --out runs/screen.jsonl --seconds 560

Each configuration trains a small GPT-2 or Qwen3 on a text's bytes (or a tokenizer's tokens) and appends one JSON line
with its validation losses; finished ones in --out are skipped, so a study can be spread over several calls. One that
the time limit stops is recorded with the steps it took. `--workers 4` shares a device whose kernels are short between
processes; `--set steps=20 context=32` changes every configuration.
"""

import argparse
import itertools
import json
import math
import pathlib
import re
import time
import zlib

import torch
import torch.multiprocessing as mp
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from hf_taco_scape.optim import AdamS
from hf_taco_scape.sync import DensitySchedule, module_layout
from scape_simulator import DenseRival, NaiveTopK, SimulatedScape, overlap

# width, layers; 64 a head
SIZES = {"tiny": (64, 2), "5M": (256, 6), "10M": (384, 6), "25M": (512, 8)}
BASE = {
    "model": "gpt2",
    "size": "10M",
    "method": "scape",  # adamw, adams, naive, scape
    "lr": 1e-3,
    "seed": 0,
    "steps": 1200,
    "ranks": 4,
    "batch": 32,  # sequences a rank
    "context": 256,
    "density": 1.0,
    "hold": 0.1,  # shares of all steps
    "fall": 0.4,
    "second_moment": "adams",
    "mask": "topk",
    "clip": "ghat",
    "values": "fp32",
    "residual_decay": 1.0,
    "max_norm": 1.0,
    "weight_decay": 0.1,
    "betas": [0.9, 0.95],
    "lr_warmup": 0.05,
    "lr_floor": 0.1,
    "evals": 6,
    "eval_windows": 1024,
    "start": 0,  # steps of dense AdamW before the study's first step
    "start_lr": 1e-3,
}
PAPER = {"method": "scape", "hold": 0.0, "fall": 0.25}
ROW = {"method": "scape", "second_moment": "row", "clip": "local"}
METHODS = {
    "adamw": {"method": "adamw"},
    "adams": {"method": "adams"},
    "row": {**ROW, "density": 1.0},
    "naive": {"method": "naive"},
    "paper": PAPER,
    "adams-local": {"method": "scape", "clip": "local"},
    "row-topk": ROW,
    "row-topk-mean": {**ROW, "mask": "topk_mean"},
    "row-random": {**ROW, "mask": "random"},
    "row-cyclic": {**ROW, "mask": "cyclic"},
    "row-half": {**ROW, "mask": "half"},
    "row-topk-bf16": {**ROW, "values": "bf16"},
}
DENSE = ("adamw", "adams", "row")
COMPARED = ("naive", "paper", "adams-local", "row-topk", "row-random", "row-cyclic", "row-half")


def grid(methods, lrs, densities=(0.1, 0.01), seeds=(0,), **common) -> list[dict]:
    """Every combination; dense methods once a learning rate."""
    configs = []
    for seed, name, lr in itertools.product(seeds, methods, lrs):
        for density in (1.0,) if name in DENSE else densities:
            configs.append({**METHODS[name], "label": name, "density": density, "lr": lr, "seed": seed, **common})
    return configs


LRS = (5e-4, 1e-3, 2e-3)
# from a trained start the densities are reached at once: fine-tuning is short
TRAINED = {"start": 1200, "steps": 600, "hold": 0.0, "fall": 0.1}
TINY = {"size": "tiny", "steps": 12, "batch": 2, "context": 32, "evals": 2, "eval_windows": 64}
FINALISTS = (*DENSE, "paper", "row-topk", "row-random", "row-half")
PRESETS = {
    "rehearsal": grid(METHODS, (1e-3,), ranks=2, **TINY)
    + grid(("adamw", "row-topk"), (1e-3,), (0.1,), model="qwen", start=6, **TINY),
    "dense": grid(DENSE, LRS),
    "screen": grid(COMPARED, LRS),
    "screen-qwen": grid((*DENSE, *COMPARED), LRS, model="qwen"),
    "screen-trained": grid((*DENSE, *COMPARED), (1e-4, 3e-4, 1e-3), **TRAINED),
    "schedules": grid(("row-topk", "row-random"), (2e-3,), (0.01,), hold=0.1, fall=0.2)
    + grid(("row-topk", "row-random"), (2e-3,), (0.01,), hold=0.2, fall=0.4)
    + grid(("row-topk", "row-random"), (2e-3,), (0.01,), hold=0.1, fall=0.7),
    "seeds": grid(FINALISTS, (1e-3,), seeds=(1, 2)),
    "longer": grid(FINALISTS, (1e-3,), steps=4800),
}


def name_of(config: dict) -> str:
    """A readable name, and a digest of every field, so that another setting is another line."""
    digest = zlib.crc32(json.dumps(config, sort_keys=True).encode())
    start = "trained" if config["start"] else "random"
    fields = (config["model"], config["size"], start, config["label"], f"d{config['density']}", f"lr{config['lr']}")
    return "/".join((*fields, f"s{config['seed']}", f"{digest:08x}"))


# -- data and model ----------------------------------------------------------------------------------------------


def load_tokens(path: str, tokenizer: str | None) -> tuple[torch.Tensor, int]:
    """(token ids, vocabulary size) of a text: its bytes, or what a tokenizer.json makes of it."""
    data = pathlib.Path(path).read_bytes()
    if tokenizer is None:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8), 256
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(tokenizer)
    ids = encoder.encode(data.decode("utf8", errors="replace"), add_special_tokens=False).ids
    return torch.tensor(ids, dtype=torch.int32), encoder.get_vocab_size()


class Windows:
    """Training windows drawn by (seed, step), the same for every method, and evenly spaced validation windows."""

    def __init__(self, tokens: torch.Tensor, config: dict, device: torch.device) -> None:
        self.context, self.config = config["context"], config
        held_out = tokens.numel() // 20
        self.train, self.held_out = tokens[:-held_out].to(device), tokens[-held_out:].to(device)
        self.span = torch.arange(self.context + 1, device=device)

    def _cut(self, tokens: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return tokens[starts.to(tokens.device)[..., None] + self.span].long()

    def training(self, step: int, salt: int) -> torch.Tensor:
        """int64 [ranks, batch, context + 1]"""
        g = torch.Generator().manual_seed(self.config["seed"] * 1_000_003 + step * 17 + salt)
        shape = (self.config["ranks"], self.config["batch"])
        return self._cut(self.train, torch.randint(self.train.numel() - self.context - 1, shape, generator=g))

    def validation(self) -> torch.Tensor:
        """int64 [eval_windows, context + 1]"""
        count = self.config["eval_windows"]
        return self._cut(self.held_out, torch.linspace(0, self.held_out.numel() - self.context - 2, count).long())


def build_model(config: dict, vocabulary: int) -> torch.nn.Module:
    """A GPT-2, or a Qwen3 with three query heads a KV head, of the named size."""
    width, layers = SIZES[config["size"]]
    heads = max(1, width // 64)
    torch.manual_seed(config["seed"])
    if config["model"] == "gpt2":
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        settings = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": config["context"]}
        return GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, **settings, **dropout))
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=width * 8 // 3,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 3 if heads % 3 == 0 else 1,
            head_dim=64,
            max_position_embeddings=config["context"],
            tie_word_embeddings=True,
        )
    )


def loss_of(model, windows: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def autocast(device: torch.device):
    # no cache: a graph must not hold on to casts made outside it
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)


class RankGradients:
    """[ranks, *shape] gradients of every parameter; on CUDA all ranks' passes are one captured graph."""

    def __init__(self, model, params, config: dict, device: torch.device, graph: bool) -> None:
        self.model, self.params, self.device = model, params, device
        self.stacks = [p.new_zeros(config["ranks"], *p.shape) for p in params]
        self.losses = torch.zeros(config["ranks"], device=device)
        self.windows = torch.zeros(
            config["ranks"], config["batch"], config["context"] + 1, dtype=torch.int64, device=device
        )
        self.graph = self._capture() if graph and device.type == "cuda" else None

    def _passes(self) -> None:
        for rank, windows in enumerate(self.windows):
            with autocast(self.device):
                loss = loss_of(self.model, windows)
            grads = torch.autograd.grad(loss, self.params)
            torch._foreach_copy_([stack[rank] for stack in self.stacks], list(grads))
            self.losses[rank] = loss.detach()

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._passes()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._passes()
        except RuntimeError as error:
            print(f"no CUDA graph, running eagerly: {str(error).splitlines()[0]}", flush=True)
            torch.cuda.synchronize()
            return None
        return graph

    def __call__(self, windows: torch.Tensor) -> list[torch.Tensor]:
        self.windows.copy_(windows)
        if self.graph is None:
            self._passes()
        else:
            self.graph.replay()
        return self.stacks


@torch.no_grad()
def validate(model, windows: torch.Tensor, device: torch.device) -> float:
    losses = []
    for part in windows.split(64):
        with autocast(device):
            losses.append(loss_of(model, part))
    return float(torch.stack(losses).mean())


# -- training ----------------------------------------------------------------------------------------------------


def build_optimizer(model, params, config: dict):
    """What takes the ranks' gradients: SCAPE or a rival."""
    steps, limit = config["steps"], config["max_norm"]
    hyper = {"lr": config["lr"], "betas": tuple(config["betas"])}
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": config["weight_decay"]},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    hold, fall = round(config["hold"] * steps), round(config["fall"] * steps)
    if config["method"] == "adams":
        return DenseRival(AdamS(groups, **hyper), limit)
    if config["method"] == "adamw":
        return DenseRival(torch.optim.AdamW(groups, **hyper), limit)
    if config["method"] == "naive":
        schedule = DensitySchedule(config["density"], fall, hold)
        return NaiveTopK(torch.optim.AdamW(groups, **hyper), config["ranks"], schedule, limit)
    options = ("values", "second_moment", "mask", "clip", "seed", "residual_decay", "density")
    return SimulatedScape(
        groups,
        config["ranks"],
        warmup_steps=fall,
        hold_steps=hold,
        max_grad_norm=limit,
        layout=module_layout(model),
        **{name: config[name] for name in options},
        **hyper,
    )


def learning_rate(config: dict, step: int) -> float:
    """Linear rise, then a cosine to lr_floor of the peak."""
    rise = max(1, round(config["lr_warmup"] * config["steps"]))
    if step <= rise:
        return config["lr"] * step / rise
    progress = (step - rise) / max(1, config["steps"] - rise)
    floor = config["lr_floor"]
    return config["lr"] * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def persistence(optimizer, before, density: float) -> tuple[float | None, object]:
    """Overlap of the last step's largest entries with the step before's: of SCAPE's mask, or of a rival's momentum."""
    if isinstance(optimizer, SimulatedScape):
        now, flat = list(optimizer.selections.values()), [s.momentum for s in optimizer.sparse]
    else:
        now, flat = optimizer.largest_momenta(density)
    return (overlap(before, now, flat) if before else None), now


def train(config: dict, tokens, vocabulary: int, device: torch.device, deadline: float, start, graph: bool) -> dict:
    """One configuration, to its end or the deadline; returns its record."""
    windows = Windows(tokens, config, device)
    model = build_model(config, vocabulary).to(device)
    if start is not None:
        model.load_state_dict(start)
    params = list(model.parameters())
    # the rivals' order of parameters is the groups': matrices first
    params = [p for p in params if p.dim() >= 2] + [p for p in params if p.dim() < 2]
    optimizer = build_optimizer(model, params, config)
    gradients = RankGradients(model, params, config, device, graph)
    held_out, marks = windows.validation(), {}
    for i in range(1, config["evals"] + 1):
        marks[round(i * config["steps"] / config["evals"])] = None
    record = {
        "val": [[0, validate(model, held_out, device)]],
        "overlap": [],
        "parameters": sum(p.numel() for p in params),
    }
    density = config["density"] if config["density"] < 1 else 0.01
    before, started, step = None, time.monotonic(), 0
    for step in range(1, config["steps"] + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        optimizer.step(gradients(windows.training(step, salt=0 if start is None else 5)))
        out_of_time = time.monotonic() > deadline
        if step in marks or out_of_time:
            if before is not None:
                record["overlap"].append([step, persistence(optimizer, before, density)[0]])
                before = None
            record["val"].append([step, validate(model, held_out, device)])
            if not math.isfinite(record["val"][-1][1]) or out_of_time:
                break
        if step + 1 in marks:
            _, before = persistence(optimizer, None, density)
    finished = step == config["steps"]
    return record | {
        "final": record["val"][-1][1],
        "best": min((loss for _, loss in record["val"] if loss == loss), default=None),
        "train_loss": float(gradients.losses.mean()),
        "steps_done": step,
        "finished": finished,
        "seconds": time.monotonic() - started,
        "graph": gradients.graph is not None,
        "figures": optimizer.figures(),
        "state": model.state_dict() if finished else None,
    }


def start_config(config: dict) -> dict | None:
    """The dense AdamW run that a configuration starts from, or None."""
    if not config["start"]:
        return None
    kept = ("model", "size", "seed", "ranks", "batch", "context", "max_norm", "weight_decay", "eval_windows")
    return (
        BASE
        | {name: config[name] for name in kept}
        | {
            "method": "adamw",
            "label": "start",
            "steps": config["start"],
            "lr": config["start_lr"],
        }
    )


def work(worker: int, args, configs: list[dict], counter, deadline: float) -> None:
    """Take configurations in order until none is left or time is up."""
    device = torch.device(args.device)
    torch.backends.cuda.matmul.allow_tf32 = True
    texts = {False: args.text, True: args.start_text or args.text}
    tokens = {starting: load_tokens(path, args.tokenizer) for starting, path in texts.items()}
    out = pathlib.Path(args.out)
    while time.monotonic() < deadline:
        with counter.get_lock():
            index, counter.value = counter.value, counter.value + 1
        if index >= len(configs):
            return
        config, starting = configs[index], configs[index]["label"] == "start"
        first, start = start_config(config), None
        if first is not None:
            weights = out.parent / f"{out.stem}-{name_of(first).replace('/', '_')}.pt"
            if not weights.exists():
                print(f"{name_of(config)}: its start was stopped, skipped", flush=True)
                continue
            start = torch.load(weights, map_location=device)
        ids, vocabulary = tokens[starting]
        record = train(config, ids, vocabulary, device, deadline, start, args.graph)
        state = record.pop("state")
        if starting and state is not None:
            torch.save(state, out.parent / f"{out.stem}-{name_of(config).replace('/', '_')}.pt")
        line = {"name": name_of(config), "config": config, **record}
        line |= {"device": _device_name(device), "torch": torch.__version__, "text_bytes": tokens[starting][0].numel()}
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        each = record["seconds"] / max(1, record["steps_done"]) * 1e3
        print(
            f"{line['name']}: {record['final']:.4f} after {record['steps_done']} steps, {each:.1f} ms each", flush=True
        )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def run(args, configs: list[dict], deadline: float) -> None:
    counter = mp.get_context("spawn").Value("i", 0)
    if args.workers == 1:
        work(0, args, configs, counter, deadline)
    else:
        mp.spawn(work, (args, configs, counter, deadline), nprocs=args.workers)


def with_overrides(config: dict, settings: list[str]) -> dict:
    """BASE, the configuration, then `key=value` settings; ValueError for unknown keys."""
    config = BASE | config
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in BASE:
            raise ValueError(f"--set {setting}: unknown field; known: {', '.join(BASE)}")
        config[key] = type(BASE[key])(json.loads(value)) if not isinstance(BASE[key], str) else value
    unknown = config.keys() - BASE.keys() - {"label"}
    if unknown:
        raise ValueError(f"unknown fields {sorted(unknown)}; known: {', '.join(BASE)}")
    return config | {"label": config.get("label", config["method"])}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="training and validation text (the last 5 % are held out)")
    parser.add_argument("--start_text", help="text of the dense runs that trained starts come from (default: --text)")
    parser.add_argument("--tokenizer", help="a tokenizer.json; without it, bytes")
    parser.add_argument("--preset", choices=sorted(PRESETS))
    parser.add_argument("--configs", help="a JSON file: a list of objects that override the defaults")
    parser.add_argument("--only", default="", help="regular expression on configuration names")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", required=True, help="JSON lines, appended")
    parser.add_argument("--seconds", type=float, default=math.inf, help="wall-clock limit")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the device")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--graph", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args(argv)
    deadline = time.monotonic() + args.seconds
    if (args.preset is None) == (args.configs is None):
        parser.error("give one of --preset and --configs")
    chosen = PRESETS[args.preset] if args.preset else json.loads(pathlib.Path(args.configs).read_text())
    configs = [with_overrides(config, args.set) for config in chosen]
    configs = [config for config in configs if re.search(args.only, name_of(config))]
    if not configs:
        parser.error(f"--only {args.only} matches no configuration")
    out = pathlib.Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {line["name"] for line in lines if line["finished"]}
    starts = {name_of(first): first for first in map(start_config, configs) if first is not None}
    run(args, [config for name, config in starts.items() if name not in done], deadline)
    todo = [config for config in configs if name_of(config) not in done]
    run(args, todo, deadline)
    print(f"{len(configs)} configurations, {len(todo)} were to do", flush=True)


if __name__ == "__main__":
    main()
