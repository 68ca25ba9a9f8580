"""What the synchronisation must know of a tensor beyond its shape: its output rows, and how tp cut it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorLayout:
    """How one parameter lies on this rank.

    copies: tensor-parallel ranks that hold the same entries: 1 where the parameter is split, the tp size where it is
        replicated, in between for KV heads held by several ranks. A norm over tp weighs the parameter by 1/copies.
    row_dims: the dimensions that index output features, over which `row` and `factored` keep one second moment each:
        (0,) for nn.Linear and nn.Embedding, (1,) for Conv1D. The other dimensions index columns.
    row_split: a row's entries are spread over the tp ranks (a rowwise layer), so its mean is summed over tp; of any
        other split tensor the columns are.
    """

    copies: int = 1
    row_dims: tuple[int, ...] = (0,)
    row_split: bool = False


LayoutOf = Callable[[torch.nn.Parameter], TensorLayout]


def plain_layout(param: torch.nn.Parameter) -> TensorLayout:
    """A whole parameter whose dimension 0 indexes output features."""
    return TensorLayout()


def module_layout(model: torch.nn.Module) -> LayoutOf:
    """Layouts of an unsplit Hugging Face model: rows are dim 1 in its Conv1D modules (GPT-2), dim 0 elsewhere."""
    # by class name: this room does not import transformers
    transposed = {id(m.weight) for m in model.modules() if any(c.__name__ == "Conv1D" for c in type(m).__mro__)}
    return lambda param: TensorLayout(row_dims=(1,) if id(param) in transposed else (0,))


def column_dims(ndim: int, row_dims: tuple[int, ...]) -> tuple[int, ...]:
    """The dimensions that index columns: those that do not index rows."""
    return tuple(d for d in range(ndim) if d not in row_dims)


def row_shape(shape: torch.Size, dims: tuple[int, ...]) -> list[int]:
    """`shape` with every dimension that does not index rows reduced to 1."""
    return [n if d in dims else 1 for d, n in enumerate(shape)]


def rows_of(places: torch.Tensor, shape: torch.Size, dims: tuple[int, ...]) -> torch.Tensor:
    """The row of each flat index. places: int64 [k]; returns int64 [k], counting rows in the order of `dims`."""
    row = torch.zeros_like(places)
    for d in sorted(dims):
        stride = shape[d + 1 :].numel()
        row = row * shape[d] + places // stride % shape[d]
    return row
