"""Optimizer state of a split model: one file per tensor-parallel rank, with the layout it was written for."""

import re
from pathlib import Path

import torch

from .parallel_dims import ParallelDims

_NAME = "optimizer_tp{rank}of{size}.pt"
_PATTERN = re.compile(r"optimizer_tp(\d+)of(\d+)\.pt")


def save_optimizer_states(folder: Path, states: list[dict], dims: ParallelDims) -> None:
    """Write this rank's optimizer states; data-parallel replicas hold the same, so dp rank 0 writes."""
    if dims.dp_rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(
            {"states": states, "dp_size": dims.dp_size}, folder / _NAME.format(rank=dims.tp_rank, size=dims.tp_size)
        )


def load_optimizer_states(folder: Path, dims: ParallelDims) -> list[dict]:
    """Read this rank's optimizer states back, on the CPU.

    ValueError, naming both sizes, where the checkpoint was written at another tp_size.
    """
    file = folder / _NAME.format(rank=dims.tp_rank, size=dims.tp_size)
    if not file.is_file():
        saved = saved_tp_size(folder)
        raise ValueError(
            f"{folder} has no optimizer state for tp_size {dims.tp_size}"
            + (f": it was saved with tp_size {saved}" if saved else "")
            + ". Resume with the size it was saved with, or start a new run from its weights (model_name_or_path)"
        )
    return torch.load(file, map_location="cpu", weights_only=True)["states"]


def saved_tp_size(folder: Path) -> int | None:
    """The tp_size that a checkpoint's optimizer state was written for; None where there is no such state."""
    found = [_PATTERN.fullmatch(path.name) for path in folder.glob("optimizer_tp*of*.pt")]
    sizes = {int(match.group(2)) for match in found if match}
    if sizes:
        return max(sizes)
    return 1 if any((folder / name).is_file() for name in ("optimizer.pt", "optimizer.bin")) else None
