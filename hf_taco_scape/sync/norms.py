"""Norms over all tensors of a model copy, wherever tensor parallelism put their parts."""

import torch
import torch.distributed as dist

from hf_taco_scape.collectives.transport import all_gather_single
from hf_taco_scape.sync.slot import Slot

NORM_EPS = 1e-6


def norm_weights(slots: list[Slot], device: torch.device) -> torch.Tensor:
    """fp64 [slots]: the share of each slot's squared norm that this tp rank contributes, 1/copies."""
    return torch.tensor([1 / slot.layout.copies for slot in slots], dtype=torch.float64, device=device)


def model_norm(
    norms: list[torch.Tensor], tp_group: dist.ProcessGroup | None = None, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """The norm over all tensors from one norm (0-dim) each; over tp, `norm_weights` count what ranks share once."""
    stacked = torch.stack(norms)
    squares = stacked.double().square()
    square = squares.sum() if tp_group is None else (squares * weights).sum()
    if tp_group is not None:
        # added in rank order here: an all-reduce may add in another order in another group
        parts = square.new_empty(dist.get_world_size(tp_group))
        all_gather_single(parts, square.view(1), group=tp_group)
        square = parts.sum()
    return square.sqrt().to(stacked.dtype)


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """min(1, max_norm/(norm + 1e-6)), without asking the device for the norm."""
    return (max_norm / (norm + NORM_EPS)).clamp(max=1.0)
