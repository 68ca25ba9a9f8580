"""One parameter under synchronisation."""

from dataclasses import dataclass

import torch

from hf_taco_scape.sync.layout import TensorLayout, column_dims, row_shape


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
        """Output rows, each with one second moment under `row` and `factored`."""
        return torch.Size(row_shape(self.param.shape, self.layout.row_dims)).numel()

    @property
    def columns(self) -> int:
        """Entries of a row; each column has one second moment under `factored`."""
        return self.numel // self.rows

    @property
    def column_dims(self) -> tuple[int, ...]:
        """The dimensions that index columns."""
        return column_dims(self.param.dim(), self.layout.row_dims)
