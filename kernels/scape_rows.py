"""Sums of squares over output rows, of many tensors in one launch: what `row` second moments are made of.

`table` is int64[tensors, FIELDS]; program i sums slice i of all tensors' slices in order, and `slice_tensor[i]` says
whose it is. Each sum is added in one order, whatever the launch.
"""

import triton
import triton.language as tl

from .scape_tile import kernel

GRAD = tl.constexpr(0)  # address of the gradient, 0 for none
FIRST_SLICE = tl.constexpr(1)
ROWS = tl.constexpr(2)
LENGTH = tl.constexpr(3)  # entries of a row
OUT = tl.constexpr(4)  # place of the tensor's sums among all
FIELDS = tl.constexpr(5)

COLUMNS = tl.constexpr(64)  # rows of a slice, where rows are columns


@triton.jit
def _locate(table, slice_tensor):
    row = table + tl.load(slice_tensor + tl.program_id(0)).to(tl.int64) * FIELDS
    return row, tl.program_id(0) - tl.load(row + FIRST_SLICE), tl.load(row + LENGTH), tl.load(row + GRAD)


@triton.jit
def _square(g, scale, SCALED: tl.constexpr):
    g = g.to(tl.float32)
    if SCALED:
        g = g * tl.load(scale)
    return g * g


@kernel
def contiguous_kernel(table, slice_tensor, sums, scale, TYPE: tl.constexpr, SCALED: tl.constexpr,
                      LANES: tl.constexpr):  # fmt: skip
    """sums <- of (scale*g)^2 over rows of LENGTH neighbours; a slice is a row."""
    row, index, length, grad = _locate(table, slice_tensor)
    g = grad.to(tl.pointer_type(TYPE)) + index * length
    total = tl.zeros([LANES], tl.float32)
    for i in range(0, length, LANES):
        at = i + tl.arange(0, LANES)
        total += _square(tl.load(g + at, mask=(at < length) & (grad != 0), other=0.0), scale, SCALED)
    tl.store(sums + tl.load(row + OUT) + index, tl.sum(total, 0))


@kernel
def strided_kernel(table, slice_tensor, sums, scale, TYPE: tl.constexpr, SCALED: tl.constexpr,
                   LANES: tl.constexpr):  # fmt: skip
    """sums <- of (scale*g)^2 over rows whose LENGTH entries lie ROWS apart; a slice is COLUMNS rows."""
    row, index, length, grad = _locate(table, slice_tensor)
    rows = tl.load(row + ROWS)
    column = index * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    g = grad.to(tl.pointer_type(TYPE)) + column
    total = tl.zeros([LANES, COLUMNS], tl.float32)
    for i in range(0, length, LANES):
        at = i + tl.arange(0, LANES)[:, None]
        inside = (at < length) & (column < rows) & (grad != 0)
        total += _square(tl.load(g + at * rows, mask=inside, other=0.0), scale, SCALED)
    column = index * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(sums + tl.load(row + OUT) + column, tl.sum(total, 0), mask=column < rows)
