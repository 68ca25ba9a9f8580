"""One parameter under synchronisation."""

from dataclasses import dataclass

import torch

from hf_taco_scape.sync.layout import TensorLayout, row_shape


@dataclass
class Slot:
    """A parameter, its place in the optimizer, and the rank that chooses its masks.

    index counts the slots of one optimizer in order, the same on all ranks; `state` is the optimizer's own dict.
    """

    index: int
    param: torch.nn.Parameter
    group: dict
    state: dict
    layout: TensorLayout
    sparse: bool
    owner: int = 0

    @property
    def numel(self) -> int:
        return self.param.numel()

    @property
    def momentum(self) -> torch.Tensor:
        """Flat view of the momentum."""
        return self.state["momentum"].view(-1)

    @property
    def grad(self) -> torch.Tensor | None:
        """This rank's gradient, flat, or None."""
        return None if self.param.grad is None else self.param.grad.reshape(-1)

    @property
    def rows(self) -> int:
        """Output rows, each with one second moment under `row`."""
        return torch.Size(row_shape(self.param.shape, self.layout.row_dims)).numel()
