"""The table of a SCAPE study's JSON lines: every method at its own best learning rate against dense AdamW's best."""

import statistics
from collections import defaultdict


def _setting(config: dict) -> tuple:
    start = f"trained on {config['start_text']}, then {config['text']}" if config["start"] else "random weights"
    return config["model"], config["size"], start, config["steps"]


def summarise(lines: list[dict]) -> str:
    """A markdown table a setting (model, start, steps). Losses are means over the seeds that finished; the gap is to
    dense AdamW at its own best learning rate over the same seeds; a best learning rate at the grid's end says so."""
    runs: dict = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    unfinished = 0
    for line in lines:
        config = line["config"]
        if config["label"] == "start":
            continue
        if not line["finished"]:
            unfinished += 1
            continue
        runs[_setting(config)][config["label"], config["density"]][config["lr"]][config["seed"]] = line
    out = []
    for setting, methods in sorted(runs.items()):
        out += [f"## {' '.join(map(str, setting[:2]))}, {setting[2]}, {setting[3]} steps", ""]
        out += [
            "| method | density | sent on average | best lr | loss | gap to adamw | seeds (spread) | other lrs | ms |"
        ]
        out += ["|---|---|---|---|---|---|---|---|---|"]
        for (label, density), by_lr in sorted(methods.items(), key=lambda item: (-item[0][1], item[0][0])):
            out.append(_row(label, density, by_lr, methods.get(("adamw", 1.0))))
        out.append("")
    return "\n".join([*out, f"{len(lines)} lines, {unfinished} of runs that were cut"])


def rows_of(lines: list[dict]) -> list[dict]:
    """Rows of results.csv, one a run: x is the steps taken, p50 the last validation loss."""
    rows = []
    for line in lines:
        config = line["config"]
        start = "trained" if config["start"] else "random"
        kept = {name: value for name, value in config.items() if name not in ("model", "size", "label")}
        figures = {name: line[name] for name in ("val", "finished", "parameters", "seconds", "figures")}
        rows.append(
            {
                "bench": "scape_study",
                "case": f"{config['model']}-{config['size']} {start}",
                "provider": f"{config['label']} density {config['density']:g}",
                "metric": "validation_loss",
                "unit": "nats",
                "x": line["steps_done"],
                **dict.fromkeys(("p50", "p20", "p80"), round(line["final"], 5)),
                "ranks": config["ranks"],
                "link": "none (simulated ranks)",
                "device": line["device"],
                "config": kept | figures,
            }
        )
    return rows


def _loss(line: dict) -> float:
    return line["final"] if line["final"] == line["final"] else float("inf")


def _best(by_lr: dict) -> float:
    """The learning rate of the lowest mean loss, among those with the most seeds."""
    most = max(map(len, by_lr.values()))
    full = [lr for lr, seeds in by_lr.items() if len(seeds) == most]
    return min(full, key=lambda lr: statistics.mean(_loss(line) for line in by_lr[lr].values()))


def _row(label: str, density: float, by_lr: dict, dense: dict | None) -> str:
    best = _best(by_lr)
    losses = {seed: _loss(line) for seed, line in by_lr[best].items()}
    edge = " (end of grid)" if len(by_lr) == 1 or best in (min(by_lr), max(by_lr)) else ""
    gap = ""
    if dense:
        reference = {seed: _loss(line) for seed, line in dense[_best(dense)].items()}
        both = losses.keys() & reference.keys()
        if both:
            ratio = statistics.mean(losses[s] for s in both) / statistics.mean(reference[s] for s in both)
            gap = f"{100 * (ratio - 1):+.2f} %"
    others = ", ".join(
        f"{lr:g}: {statistics.mean(map(_loss, seeds.values())):.4f}"
        for lr, seeds in sorted(by_lr.items())
        if lr != best
    )
    spread = f"{len(losses)} ({max(losses.values()) - min(losses.values()):.4f})"
    line = next(iter(by_lr[best].values()))
    mean = line["figures"].get("density_mean", 1.0)
    ms = line["seconds"] / line["steps_done"] * 1e3
    loss = statistics.mean(losses.values())
    cells = (label, f"{density:g}", f"{mean:.3f}", f"{best:g}{edge}", f"{loss:.4f}", gap, spread, others, f"{ms:.1f}")
    return f"| {' | '.join(cells)} |"
