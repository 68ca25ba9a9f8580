"""Tables at the end of a run, and the JSON files that later runs are compared with.

A run is {"name": str, "tasks": {task: scores of evaluate_downstream.evaluate_questions}}.
"""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

import metrics

SCORE_COLUMNS = ("run", "loss", "accuracy [95 %]", "macro F1", "paired difference [95 %]", "p", "changed")


def write_json(path: str | Path, content: dict) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _console() -> Console:
    # a log file is as wide as the table needs; a terminal has its own width
    console = Console()
    return console if console.is_terminal else Console(width=130)


def compare_tasks(scores: dict, baseline: dict) -> dict:
    """Paired comparison of one task's scores with an earlier run's; raises ValueError if the questions differ."""
    if scores["references"] != baseline["references"]:
        raise ValueError("the runs to compare answered different questions: give both the same data arguments")
    return metrics.compare(scores["predictions"], baseline["predictions"], scores["references"])


def print_scores(runs: list[dict]) -> None:
    """One row a run and task; differences are paired, against the row above."""
    for task in runs[-1]["tasks"]:
        rows = [run for run in runs if task in run["tasks"]]
        n = rows[-1]["tasks"][task]["n"]
        table = Table(
            title=f"{task}: {n} questions with right answers",
            caption="difference, p (exact McNemar) and number of changed answers: against the row above",
        )
        for heading in SCORE_COLUMNS:
            table.add_column(
                heading.replace("[", "\\["), justify="left" if heading == "run" else "right", no_wrap=True
            )
        for above, run in zip([None, *rows], rows, strict=False):
            scores = run["tasks"][task]
            interval = f"[{scores['accuracy_low']:.3f}, {scores['accuracy_high']:.3f}]"
            cells = [run["name"], f"{scores['loss']:.4f}", f"{scores['accuracy']:.3f} {interval}"]
            cells.append(f"{scores['macro_f1']:.3f}")
            if above:
                paired = compare_tasks(scores, above["tasks"][task])
                interval = f"[{paired['difference_low']:+.3f}, {paired['difference_high']:+.3f}]"
                cells += [f"{paired['difference']:+.3f} {interval}", f"{paired['p_value']:.2g}"]
                cells.append(str(paired["changed"]))
            table.add_row(*(cell.replace("[", "\\[") for cell in cells))
        _console().print(table)


def print_facts(title: str, facts: dict[str, str]) -> None:
    """Two columns: what, how much."""
    table = Table(title=title, show_header=False)
    for name, value in facts.items():
        table.add_row(name, value)
    _console().print(table)


def size(n: float) -> str:
    """Bytes in a unit that fits, decimal as links are sold."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 1000 or unit == "TB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1000
