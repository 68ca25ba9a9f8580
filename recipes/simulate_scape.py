"""Training study of SCAPE and its rivals: W virtual data-parallel ranks on one GPU or CPU, many configurations a run.

    python recipes/simulate_scape.py --text corpus.txt --preset screen --out runs/screen.jsonl --seconds 300
    python recipes/simulate_scape.py --summary runs/screen.jsonl

Each configuration trains a small GPT-2 or Qwen3 on a text's bytes and appends one JSON line with its validation
losses; finished ones in --out are skipped, so a study can be spread over several calls, and one that would not end
before the time limit is not begun. `--set steps=20 context=32` changes every configuration. A trained start is a dense
AdamW run on `start_text`; the text's two parts, `prose` and `manuals`, are told apart by markup.
"""

import argparse
import json
import math
import pathlib
import re
import time
import zlib
from dataclasses import dataclass, field

import torch

from hf_taco_scape.sync import DensitySchedule
from results import append_rows
from scape_flat import FlatAdam, FlatNaive, FlatScape
from scape_lowrank import low_ranks
from scape_masks import FlushedSchedule
from scape_models import RankGradients, flatten, reference_model
from scape_presets import BASE, PRESETS
from scape_summary import rows_of, summarise

VOCABULARY = 256
BLOCK = 8192
# reStructuredText has 40 to 200 of these in a block of BLOCK bytes, prose none or a few
MARKUP = re.compile(rb"``|:`|::|^\.\. |^   ", re.MULTILINE)
MANUAL = 25


def name_of(config: dict) -> str:
    """A readable name, and a digest of every field, so that another setting is another line."""
    digest = zlib.crc32(json.dumps(config, sort_keys=True).encode())
    start = "trained" if config["start"] else "random"
    fields = (config["model"], config["size"], start, config["label"], f"d{config['density']}", f"lr{config['lr']}")
    return "/".join((*fields, f"s{config['seed']}", f"{digest:08x}"))


# -- data --------------------------------------------------------------------------------------------------------


def load_texts(path: str) -> dict[str, torch.Tensor]:
    """uint8 tensors: the whole text, and its blocks of prose and of manuals."""
    data = pathlib.Path(path).read_bytes()
    parts = {"all": [data], "prose": [], "manuals": []}
    for first in range(0, len(data), BLOCK):
        block = data[first : first + BLOCK]
        parts["manuals" if len(MARKUP.findall(block)) * BLOCK > MANUAL * len(block) else "prose"].append(block)
    return {
        name: torch.frombuffer(bytearray(b"".join(blocks) or b" "), dtype=torch.uint8)
        for name, blocks in parts.items()
    }


class Windows:
    """Training windows drawn by (seed, step), the same for every method, and evenly spaced validation windows."""

    def __init__(self, tokens: torch.Tensor, config: dict) -> None:
        ranks, batch, self.context = config["ranks"], config["batch"], config["context"]
        held_out = tokens.numel() // 20
        self.train, self.held_out = tokens[:-held_out], tokens[-held_out:]
        self.span = torch.arange(self.context + 1, device=tokens.device)
        # all of them at once: a copy from the host each step would wait for the device
        generator = torch.Generator().manual_seed(config["seed"] + (10_000 if config["label"] == "start" else 0))
        shape = (config["steps"], ranks, batch)
        starts = torch.randint(self.train.numel() - self.context - 1, shape, generator=generator)
        self.starts = starts.to(tokens.device)
        groups = max(1, config["eval_windows"] // (ranks * batch))
        starts = torch.linspace(0, self.held_out.numel() - self.context - 2, groups * ranks * batch).long()
        self.eval_starts = starts.view(groups, ranks, batch).to(tokens.device)

    def training(self, step: int) -> torch.Tensor:
        """int64 [ranks, batch, context + 1]; steps count from 1."""
        return self.train[self.starts[step - 1][..., None] + self.span].long()

    def validation(self):
        """The same shape, some times."""
        for starts in self.eval_starts:
            yield self.held_out[starts[..., None] + self.span].long()


# -- what is built once a model shape ------------------------------------------------------------------------------


@dataclass
class Workshop:
    """One flat vector and one captured pass for each model shape, and the weights of trained starts."""

    device: torch.device
    compiled: bool
    passes: dict = field(default_factory=dict)
    starts: dict = field(default_factory=dict)

    def gradients(self, config: dict) -> RankGradients:
        """The pass for this shape; its flat vector holds the model of the configuration's seed."""
        model = reference_model(config["model"], config["size"], VOCABULARY, config["context"], config["seed"])
        kinds, values = flatten(model)
        key = tuple(config[name] for name in ("model", "size", "ranks", "batch", "context"))
        if key not in self.passes:
            on_gpu, began = self.device.type == "cuda", time.monotonic()
            flat = values.to(self.device)
            shape = (kinds, flat, config["ranks"], config["batch"], config["context"])
            dtype = torch.bfloat16 if on_gpu else torch.float32
            made = RankGradients(config["model"], *shape, dtype, graph=on_gpu)
            if self.compiled:
                made = self._compiled(made, config["model"], shape, dtype)
            self.passes[key] = made
            print(f"{key}: {flat.numel():,} parameters, ready in {time.monotonic() - began:.1f} s", flush=True)
        self.passes[key].flat.copy_(values)
        return self.passes[key]

    def _compiled(self, eager: RankGradients, family: str, shape: tuple, dtype) -> RankGradients:
        """The pass with its layers compiled, if that works here and is faster."""
        try:
            fused = RankGradients(family, *shape, dtype, compiled=True, graph=self.device.type == "cuda")
            ms = [_pass_ms(each, self.device) for each in (eager, fused)]
        except Exception as error:
            print(f"not compiled: {type(error).__name__}: {str(error)[:300]}", flush=True)
            return eager
        print(f"a pass takes {ms[0]:.2f} ms, compiled {ms[1]:.2f} ms", flush=True)
        return fused if ms[1] < ms[0] else eager


def _pass_ms(gradients: RankGradients, device: torch.device, repeats: int = 20) -> float:
    gradients(gradients.windows)
    watch = Stopwatch(device, 0, 1)
    watch.mark(0)
    for _ in range(repeats):
        gradients(gradients.windows)
    watch.mark(0)
    watch.mark(0)
    return watch.means()["pass_ms"] / repeats


class Stopwatch:
    """Milliseconds of the pass and of the optimizer, from a few steps in the middle of a run, without waiting."""

    def __init__(self, device: torch.device, first: int, last: int) -> None:
        self.on_gpu, self.first, self.last = device.type == "cuda", first, last
        self.marks = []

    def mark(self, step: int) -> None:
        if self.first <= step < self.last:
            event = torch.cuda.Event(enable_timing=True) if self.on_gpu else time.monotonic()
            if self.on_gpu:
                event.record()
            self.marks.append(event)

    def means(self) -> dict[str, float]:
        """Three marks a step: before the pass, after it, after the optimizer."""
        steps = len(self.marks) // 3
        if not steps:
            return {}
        if self.on_gpu:
            torch.cuda.synchronize()

        def ms(a, b):
            return a.elapsed_time(b) if self.on_gpu else (b - a) * 1e3

        marks = [self.marks[3 * i : 3 * i + 3] for i in range(steps)]
        return {
            "pass_ms": sum(ms(a, b) for a, b, _ in marks) / steps,
            "update_ms": sum(ms(b, c) for _, b, c in marks) / steps,
        }


# -- training ----------------------------------------------------------------------------------------------------


def schedule_of(config: dict, elsewhere: float = 0.0) -> DensitySchedule:
    """Of the sparse part; `elsewhere` is the density that another part of the message takes."""
    hold, fall = (round(config[name] * config["steps"]) for name in ("hold", "fall"))
    return DensitySchedule(max(config["density"] - elsewhere, config["density"] / 10), fall, hold)


def build_optimizer(kinds, flat, config: dict):
    """What takes the ranks' gradients: SCAPE or a rival."""
    common = {name: config[name] for name in ("weight_decay", "betas")}
    common |= {"max_grad_norm": config["max_norm"] or None}
    ranks, directions, elsewhere = config["ranks"], None, 0.0
    if config["low_rank"]:
        matrices = [kind for kind in kinds if kind.is_matrix]
        directions, elsewhere = low_ranks(matrices, config["density"], config["low_rank"])
    schedule = schedule_of(config, elsewhere)
    if config["method"] in ("adamw", "adams"):
        return FlatAdam(kinds, flat, ranks, second_moment=config["method"], **common)
    if config["flush"]:
        last = math.ceil(config["steps"] * (1 - config["flush"]))
        schedule = FlushedSchedule(schedule, last, config["flush_density"])
    if config["method"] == "naive":
        return FlatNaive(kinds, flat, ranks, schedule=schedule, **common)
    options = ("second_moment", "mask", "clip", "momentum", "score", "share", "bound", "local_beta", "dense", "seed")
    options = {name: config[name] for name in options}
    return FlatScape(kinds, flat, ranks, schedule=schedule, ranks=directions, **options, **common)


def learning_rate(config: dict, step: int) -> float:
    """Linear rise, then a cosine to lr_floor of the peak, times the density to the power lr_power."""
    lr = config["lr"] * schedule_of(config)(step) ** config["lr_power"]
    rise = max(1, round(config["lr_warmup"] * config["steps"]))
    if step <= rise:
        return lr * step / rise
    progress = (step - rise) / max(1, config["steps"] - rise)
    floor = config["lr_floor"]
    return lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


@torch.no_grad()
def validate(gradients: RankGradients, windows: Windows) -> float:
    """Mean loss of the validation windows: the training pass, whose gradients nobody reads."""
    losses = []
    for part in windows.validation():
        with torch.enable_grad():
            gradients(part)
        losses.append(gradients.losses.clone())
    return float(torch.cat(losses).mean())


def train(config: dict, tokens: torch.Tensor, workshop: Workshop, deadline: float, start=None) -> dict:
    """One configuration, to its end or the deadline; returns its record."""
    windows, gradients = Windows(tokens, config), workshop.gradients(config)
    flat = gradients.flat
    if start is not None:
        flat.copy_(start)
    optimizer = build_optimizer(gradients.kinds, flat, config)
    steps, evals = config["steps"], config["evals"]
    marks = {round(i * steps / evals) for i in range(1, evals + 1)}
    watch = Stopwatch(flat.device, steps // 2, steps // 2 + 20)
    record = {"val": [[0, validate(gradients, windows)]], "parameters": flat.numel()}
    started, step = time.monotonic(), 0
    for step in range(1, steps + 1):
        watch.mark(step)
        grads = gradients(windows.training(step))
        watch.mark(step)
        optimizer.step(grads, learning_rate(config, step))
        watch.mark(step)
        out_of_time = time.monotonic() > deadline
        if step in marks or out_of_time:
            record["val"].append([step, validate(gradients, windows)])
            if not math.isfinite(record["val"][-1][1]) or out_of_time:
                break
    # a run that diverged has ended
    finished = step == steps or not math.isfinite(record["val"][-1][1])
    return record | {
        "final": record["val"][-1][1],
        "steps_done": step,
        "finished": finished,
        "seconds": time.monotonic() - started,
        **watch.means(),
        "figures": optimizer.figures(),
        "weights": flat,
    }


def start_config(config: dict) -> dict | None:
    """The dense AdamW run that a configuration starts from, or None."""
    if not config["start"]:
        return None
    kept = ("model", "size", "seed", "ranks", "batch", "context", "max_norm", "weight_decay", "eval_windows")
    run = {"label": "start", "method": "adamw", "steps": config["start"], "lr": config["start_lr"]}
    return BASE | {name: config[name] for name in kept} | run | {"text": config["start_text"], "evals": 1}


def run(configs: list[dict], texts: dict, workshop: Workshop, out: pathlib.Path, deadline: float) -> None:
    """Every configuration in order, each if it fits the time that is left."""
    pace: dict[tuple, float] = {}
    for config in configs:
        first = start_config(config)
        todo = [config] if first is None or name_of(first) in workshop.starts else [first, config]
        # seconds a step of this method and shape, or of any that is known
        key = (config["model"], config["size"], config["method"])
        expected = pace.get(key, max(pace.values(), default=0.0)) * sum(c["steps"] for c in todo)
        if time.monotonic() + expected > deadline:
            print(f"{name_of(config)}: not begun, it would take {expected:.0f} s", flush=True)
            continue
        for each in todo:
            start = None if first is None or each is first else workshop.starts.get(name_of(first))
            if each is config and first is not None and start is None:
                continue
            try:
                record = train(each, texts[each["text"]], workshop, deadline, start)
            except RuntimeError as error:
                # one method that fails must not take the others' device time with it
                print(f"{name_of(each)}: failed: {error}", flush=True)
                break
            weights = record.pop("weights")
            if each is first and record["finished"]:
                workshop.starts[name_of(first)] = weights.clone()
            pace[each["model"], each["size"], each["method"]] = record["seconds"] / max(1, record["steps_done"])
            line = {"name": name_of(each), "config": each, **record, "device": _device_name(workshop.device)}
            with out.open("a") as file:
                file.write(json.dumps(line | {"torch": torch.__version__}) + "\n")
            parts = " ".join(f"{name} {record[name]:.2f}" for name in ("pass_ms", "update_ms") if name in record)
            step_ms = record["seconds"] / max(1, record["steps_done"]) * 1e3
            print(
                f"{line['name']}: {record['final']:.4f}, {record['steps_done']} steps of {step_ms:.1f} ms {parts}",
                flush=True,
            )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


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
    parser.add_argument("--text", help="training and validation text (the last 5 %% of each part are held out)")
    parser.add_argument("--preset", choices=sorted(PRESETS))
    parser.add_argument("--configs", help="a JSON file: a list of objects that override the defaults")
    parser.add_argument("--only", default="", help="regular expression on configuration names")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", help="JSON lines, appended")
    parser.add_argument(
        "--summary", nargs="+", metavar="JSONL", help="print the table of these files, and nothing else"
    )
    parser.add_argument("--results", type=pathlib.Path, help="with --summary: the CSV file to append the runs to")
    parser.add_argument("--seconds", type=float, default=math.inf, help="wall-clock limit")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="let inductor fuse a layer, if that is faster")
    args = parser.parse_args(argv)
    deadline = time.monotonic() + args.seconds
    if args.summary:
        lines = [json.loads(line) for path in args.summary for line in open(path)]
        print(summarise(lines))
        if args.results:
            append_rows(rows_of(lines), args.results)
        return
    if not args.text or not args.out or (args.preset is None) == (args.configs is None):
        parser.error("give --text, --out and one of --preset and --configs, or --summary")
    chosen = PRESETS[args.preset] if args.preset else json.loads(pathlib.Path(args.configs).read_text())
    configs = [with_overrides(config, args.set) for config in chosen]
    configs = [config for config in configs if re.search(args.only, name_of(config))]
    if not configs:
        parser.error(f"--only {args.only} matches no configuration")
    out = pathlib.Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {line["name"] for line in lines if line["finished"]}
    todo = [config for config in configs if name_of(config) not in done]
    device = torch.device(args.device)
    texts = {name: tokens.to(device) for name, tokens in load_texts(args.text).items()}
    run(todo, texts, Workshop(device, args.compile), out, deadline)
    print(f"{len(configs)} configurations, {len(todo)} were to do", flush=True)


if __name__ == "__main__":
    main()
