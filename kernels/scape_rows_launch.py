"""Launcher of the sums of squares over output rows (scape_rows.py)."""

from dataclasses import dataclass

import torch

from . import scape_rows
from .launch import _launch
from .scape_launch import TYPES, table_row, tiles_of, to_device


@dataclass
class Rows:
    """A tensor of `rows` * `length` entries: entry i belongs to row i // length, or i % rows if `strided`."""

    grad: torch.Tensor | None  # flat, contiguous
    rows: int
    length: int
    strided: bool


def square_sums(tensors: list[Rows], scale: torch.Tensor | None, dtype: torch.dtype, device) -> torch.Tensor:
    """fp32 [all rows]: the sum of (scale*g)^2 over each row, zeros without a gradient; gradients of one dtype."""
    sums = torch.empty(sum(t.rows for t in tensors), dtype=torch.float32, device=device)
    place, slots = 0, ([], [])
    for tensor in tensors:
        slots[tensor.strided].append((tensor, place))
        place += tensor.rows
    kernels = (scape_rows.contiguous_kernel, 1, 512), (scape_rows.strided_kernel, scape_rows.COLUMNS.value, 32)
    for (kernel, size, lanes), some in zip(kernels, slots, strict=True):
        if not some:
            continue
        slices = tiles_of(tuple(t.rows for t, _ in some), size, device)
        rows = []
        for (tensor, out), first in zip(some, slices.first, strict=True):
            columns = {"GRAD": tensor.grad, "FIRST_SLICE": first, "ROWS": tensor.rows, "LENGTH": tensor.length}
            rows.append(table_row(scape_rows, columns | {"OUT": out}))
        arrays = [to_device(rows, torch.int64, device), slices.tensor, sums, sums if scale is None else scale]
        constants = {"TYPE": TYPES[dtype], "SCALED": scale is not None, "LANES": lanes}
        _launch(kernel, (slices.count, 1), arrays, [], constants, 4)
    return sums
