"""Optimizer state files: one for each rank that holds state of its own, named by the layout it was written for.

Under dense data parallelism the replicas of a slice hold the same state, so one file a tensor-parallel rank is
written. SCAPE's residuals differ between data-parallel ranks: then each rank writes its own.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from .parallel_dims import ParallelDims

_PATTERN = re.compile(r"optimizer_tp(\d+)of(\d+)(?:_dp(\d+)of(\d+))?\.pt")


def _name(tp_rank: int, tp_size: int, dp: tuple[int, int] | None) -> str:
    return f"optimizer_tp{tp_rank}of{tp_size}" + (f"_dp{dp[0]}of{dp[1]}" if dp else "") + ".pt"


def save_optimizer_states(folder: Path, states: list[dict], dims: ParallelDims, per_dp_rank: bool = False) -> None:
    """Write this rank's optimizer states; without `per_dp_rank` only data-parallel rank 0 does."""
    if per_dp_rank or dims.dp_rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        dp = (dims.dp_rank, dims.dp_size) if per_dp_rank else None
        torch.save(states, folder / _name(dims.tp_rank, dims.tp_size, dp))


def load_optimizer_states(
    folder: Path, dims: ParallelDims, merge: Callable[[Iterable[dict]], dict] | None = None
) -> list[dict]:
    """Read this rank's optimizer states back, on the CPU.

    merge: makes one state dict from those of all data-parallel ranks; used where the checkpoint has one file a
    data-parallel rank and was written at another dp_size. ValueError, naming both sizes, where it was written at
    another tp_size.
    """
    dp_sizes = {}
    for path in folder.glob("optimizer_tp*.pt"):
        match = _PATTERN.fullmatch(path.name)
        if match and int(match[2]) == dims.tp_size:
            dp_sizes[int(match[4]) if match[4] else None] = True
    if not dp_sizes:
        saved = saved_tp_size(folder)
        if saved == dims.tp_size:
            raise ValueError(
                f"{folder} holds the optimizer state of a dense run: dp_sync was not scape when it was saved. Resume "
                "with the dp_sync it was saved with, or start a new run from its weights (for ScapeCallback, "
                "resume_from names the checkpoint)"
            )
        raise ValueError(
            f"{folder} has no optimizer state for tp_size {dims.tp_size}"
            + (f": it was saved with tp_size {saved}" if saved else "")
            + ". Resume with the size it was saved with, or start a new run from its weights (model_name_or_path)"
        )
    if None in dp_sizes:
        return _load(folder / _name(dims.tp_rank, dims.tp_size, None))
    if dims.dp_size in dp_sizes:
        return _load(folder / _name(dims.tp_rank, dims.tp_size, (dims.dp_rank, dims.dp_size)))
    (saved_dp, *others) = dp_sizes
    if others or merge is None:
        raise ValueError(f"{folder} was saved with dp_size {sorted(dp_sizes)}, this run has dp_size {dims.dp_size}")
    files = [folder / _name(dims.tp_rank, dims.tp_size, (d, saved_dp)) for d in range(saved_dp)]
    count = len(_load(files[0]))
    return [merge(_load(file)[i] for file in files) for i in range(count)]


def saved_tp_size(folder: Path) -> int | None:
    """The tp_size that a checkpoint's optimizer state was written for; None where there is no such state."""
    matches = [_PATTERN.fullmatch(path.name) for path in folder.glob("optimizer_tp*.pt")]
    sizes = {int(match[2]) for match in matches if match}
    if sizes:
        return max(sizes)
    return 1 if any((folder / name).is_file() for name in ("optimizer.pt", "optimizer.bin")) else None


def _load(file: Path) -> list[dict]:
    return torch.load(file, map_location="cpu", weights_only=True)
