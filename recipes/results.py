"""The one long table of measurements, recipes/results.csv: every benchmark appends its rows here."""

import csv
import datetime
import json
import platform
import subprocess
from pathlib import Path

import torch

RESULTS = Path(__file__).with_name("results.csv")
COLUMNS = "bench,case,provider,metric,unit,x,p50,p20,p80,ranks,link,device,config,torch,date,commit".split(",")


def append_rows(rows: list[dict], path: Path = RESULTS) -> None:
    """Append rows (bench, case, provider, metric, unit, x, p50, p20, p80, ranks, link, device, config: dict).

    The torch version, date and commit are added. Raises ValueError for a row with other columns. Call on one rank.
    """
    stamp = {
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
    }
    known = set(COLUMNS) - set(stamp)
    for row in rows:
        if set(row) != known:
            raise ValueError(
                f"a row needs exactly the columns {sorted(known)}; these differ: {sorted(set(row) ^ known)}"
            )
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        for row in rows:
            writer.writerow(row | stamp | {"config": json.dumps(row["config"], sort_keys=True)})


def commit() -> str:
    """Short hash of the checkout; `-dirty` if the library differs from it; `unknown` outside a checkout."""
    root = RESULTS.parent.parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "hf_taco_scape", "kernels")
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        return next(line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
