"""Kernels of SCAPE's step, each one pass over all tensors (equations: hf_taco_scape/sync/scape_adams.py).

Products and sums are fused where the torch twin's are, and nowhere else. With PREVIOUS, `previous` holds the bits of
the mask before, off which the momentum is zero: it is neither read nor written there.
"""

import triton
import triton.language as tl

from .scape_tile import (
    BETA1,
    BETA2,
    BIAS2,
    DECAY,
    EPS,
    FIELDS,
    FIRST_TILE,
    GRAD,
    GROUP,
    INVERSE_BIAS2,
    INVERSE_REST1,
    KEEP,
    MOMENTUM,
    NUMBERS,
    NUMEL,
    PARAM,
    RESIDUAL,
    REST1,
    REST2,
    ROW_COUNT,
    ROW_STRIDE,
    ROWS,
    STEP_SIZE,
    TILE,
    array,
    entries,
    kernel,
    load_tile,
    locate,
    near_mask,
    on_mask,
    places,
    scatter,
    store_tile,
    words_of,
)


@triton.jit
def _grad(row, start, e, left, GRAD_TYPE: tl.constexpr, ALIGN: tl.constexpr, TAIL: tl.constexpr):
    """The tile's gradient as fp32, zeros for a tensor that has none."""
    there = tl.load(row + GRAD) != 0
    g = array(row, GRAD, GRAD_TYPE, ALIGN) + start
    if TAIL:
        return tl.load(g + e, mask=there & (e < left), other=0).to(tl.float32)
    else:
        return tl.load(g + e, mask=there, other=0).to(tl.float32)


@triton.jit
def _form(row, number, tile, start, left, bits, tile_start, word_before, previous, values, scale,
          GRAD_TYPE: tl.constexpr, ALIGN: tl.constexpr, SCALED: tl.constexpr, PREVIOUS: tl.constexpr,
          ASSEMBLY: tl.constexpr, TAIL: tl.constexpr):  # fmt: skip
    e = entries()
    residual = array(row, RESIDUAL, tl.float32, ALIGN) + start
    momentum = array(row, MOMENTUM, tl.float32, ALIGN) + start
    fresh = _grad(row, start, e, left, GRAD_TYPE, ALIGN, TAIL)
    r = load_tile(residual, e, left, TAIL)
    if PREVIOUS:
        near = near_mask(words_of(previous, tile), e)
        m = tl.load(momentum + e, mask=near & (e < left) if TAIL else near, other=0.0)
    else:
        m = load_tile(momentum, e, left, TAIL)
    if SCALED:
        fresh = fresh * tl.load(scale)
    fresh = fresh * tl.load(number + REST1)
    c = r + tl.fma(m, tl.broadcast_to(tl.load(number + BETA1), m.shape), fresh)
    words = words_of(bits, tile)
    on = on_mask(words, e)
    sent = c.to(values.dtype.element_ty)
    scatter(values + places(tile_start, word_before, words, e, tile), sent, on, ASSEMBLY)
    unsent = tl.zeros_like(c)
    if values.dtype.element_ty != tl.float32:
        unsent = c - sent.to(tl.float32)
    whole = tl.load(row + KEEP) != 0
    store_tile(residual, tl.where(on & (whole == 0), unsent, c), e, left, TAIL)


@kernel
def form_kernel(table, tile_tensor, numbers, bits, tile_start, word_before, previous, values, scale, group: tl.int32,
                GRAD_TYPE: tl.constexpr, ALIGN: tl.constexpr, SCALED: tl.constexpr, PREVIOUS: tl.constexpr,
                ASSEMBLY: tl.constexpr):  # fmt: skip
    """c = b1*m + (1-b1)*scale*g + r; values <- c on the mask; residual <- what was not sent of c, or c if KEEP.

    Of the tensors in `group`, whose gradients have GRAD_TYPE.
    """
    tile = tl.program_id(0).to(tl.int64)
    tensor, row, start, left = locate(table, tile_tensor, tile)
    number = numbers + tensor * NUMBERS
    if tl.load(row + GROUP) == group:
        if left == TILE:
            _form(row, number, tile, start, left, bits, tile_start, word_before, previous, values, scale, GRAD_TYPE,
                  ALIGN, SCALED, PREVIOUS, ASSEMBLY, False)  # fmt: skip
        else:
            _form(row, number, tile, start, left, bits, tile_start, word_before, previous, values, scale, GRAD_TYPE,
                  ALIGN, SCALED, PREVIOUS, ASSEMBLY, True)  # fmt: skip


@kernel
def keep_unsent_kernel(table, tile_tensor, bits, values, first_tile: tl.int64):
    """From first_tile on, residual = c <- what rounding to `values`' type drops on the mask (zeros for fp32)."""
    tile = first_tile + tl.program_id(0)
    tensor, row, start, left = locate(table, tile_tensor, tile)
    e = entries()
    on = on_mask(words_of(bits, tile), e)
    residual = array(row, RESIDUAL, tl.float32, 4) + start
    unsent = tl.zeros(e.shape, tl.float32)
    if values.dtype.element_ty != tl.float32:
        c = tl.load(residual + e, mask=on, other=0.0)
        unsent = c - c.to(values.dtype.element_ty).to(tl.float32)
    tl.store(residual + e, unsent, mask=on)


@kernel
def owe_kernel(
    table, tile_tensor, bits, tile_start, word_before, error, first: tl.int64, last: tl.int64, world: tl.float32
):
    """residual += world * error[place - first] on the mask, for the places from `first` up to `last`."""
    tile = tl.program_id(0).to(tl.int64)
    tensor, row, start, left = locate(table, tile_tensor, tile)
    e = entries()
    words = words_of(bits, tile)
    place = places(tile_start, word_before, words, e, tile)
    on = on_mask(words, e) & (place >= first) & (place < last)
    residual = array(row, RESIDUAL, tl.float32, 4) + start
    owed = tl.load(error + (place - first), mask=on, other=0.0) * world
    tl.store(residual + e, tl.load(residual + e, mask=on, other=0.0) + owed, mask=on)


@triton.jit
def _decoded(mean, m, number):
    """ghat = (mt - b1*m) / (1-b1)"""
    return (mean - m * tl.load(number + BETA1)) * tl.load(number + INVERSE_REST1)


@kernel
def square_kernel(table, tile_tensor, numbers, bits, tile_start, word_before, values, squares):
    """squares[tile] <- sum of ghat^2 over the tile's entries on the mask."""
    tile = tl.program_id(0).to(tl.int64)
    tensor, row, start, left = locate(table, tile_tensor, tile)
    e = entries()
    words = words_of(bits, tile)
    on = on_mask(words, e)
    mean = tl.load(values + places(tile_start, word_before, words, e, tile), mask=on, other=0.0).to(tl.float32)
    m = tl.load(array(row, MOMENTUM, tl.float32, 4) + start + e, mask=on, other=0.0)
    ghat = _decoded(mean, m, numbers + tensor * NUMBERS)
    tl.store(squares + tile, tl.sum(tl.sum(ghat * ghat, 1), 0))


@kernel
def norm_kernel(table, squares, norms, LANES: tl.constexpr):
    """norms[tensor] <- square root of the sum of its tiles' squares, added in fp64 in one order."""
    tensor = tl.program_id(0).to(tl.int64)
    row = table + tensor * FIELDS
    first = tl.load(row + FIRST_TILE)
    tiles = (tl.load(row + NUMEL) + TILE - 1) // TILE
    total = tl.zeros([LANES], tl.float64)
    for i in range(0, tiles, LANES):
        lane = i + tl.arange(0, LANES)
        total += tl.load(squares + first + lane, mask=lane < tiles, other=0.0).to(tl.float64)
    tl.store(norms + tensor, tl.sqrt(tl.sum(total, 0)).to(tl.float32))


@triton.jit
def _row_moment(row, columns, start, e, on, FACTORED: tl.constexpr):
    """The second moment of each entry's output row, times its column's factor if FACTORED.

    Entry i belongs to row i // stride % count and to column i // (stride * count) * stride + i % stride.
    """
    stride, count = tl.load(row + ROW_STRIDE), tl.load(row + ROW_COUNT).to(tl.int32)
    # 64 bits for the tile's first entry, 32 for the distance from it; divisions only where rows are short
    rest = (start % stride).to(tl.int32)
    ahead = e
    if stride >= TILE:
        ahead = (rest + e >= stride).to(tl.int32)
    elif stride > 1:
        ahead = (rest + e) // stride.to(tl.int32)
    index = (start // stride % count).to(tl.int32) + ahead
    if (stride >= TILE) | (count >= TILE):
        round = (index >= count).to(tl.int32)
    else:
        round = index // count
    index -= round * count
    v = tl.load(array(row, ROWS, tl.float32, 4) + index, mask=on, other=0.0)
    if FACTORED:
        factors = tl.load(columns).to(tl.pointer_type(tl.float32))
        within = rest + e - ahead * stride.to(tl.int32)
        column = (start // (stride * count)).to(tl.int32) + round
        v = v * tl.load(factors + (column * stride.to(tl.int32) + within), mask=on, other=0.0)
    return v


@triton.jit
def _update(row, number, columns, tile, start, left, bits, tile_start, word_before, previous, values, clip,
            TYPE: tl.constexpr, ALIGN: tl.constexpr, CLIPPED: tl.constexpr, BY_ROW: tl.constexpr,
            FACTORED: tl.constexpr, PREVIOUS: tl.constexpr, TAIL: tl.constexpr):  # fmt: skip
    e = entries()
    param = array(row, PARAM, TYPE, ALIGN) + start
    momentum = array(row, MOMENTUM, tl.float32, ALIGN) + start
    p = load_tile(param, e, left, TAIL)
    words = words_of(bits, tile)
    on = on_mask(words, e)
    mean = tl.load(values + places(tile_start, word_before, words, e, tile), mask=on, other=0.0).to(tl.float32)
    near = near_mask(words, e)
    if PREVIOUS:
        before = words_of(previous, tile)
        near = near & near_mask(before, e)
    m = tl.load(momentum + e, mask=near & (e < left) if TAIL else near, other=0.0)
    ghat = _decoded(mean, m, number)
    beta1, rest1 = tl.load(number + BETA1), tl.load(number + REST1)
    if CLIPPED:
        coefficient = tl.load(clip)
        ghat = ghat * coefficient
        # where nothing is clipped mt must not change, not even by the rounding of its reconstruction
        mean = tl.where(coefficient < 1, m * beta1 + ghat * rest1, mean)
    if BY_ROW:
        v = _row_moment(row, columns, start, e, on, FACTORED)
    else:
        v = tl.fma(ghat * tl.load(number + REST2), ghat, m * m * tl.load(number + BETA2))
    # to two units in the last place, as what is subtracted from p needs no more: exact ones take longer than p's bytes
    denominator = tl.sqrt(v) * tl.load(number + INVERSE_BIAS2) + tl.load(number + EPS)
    update = mean / denominator * tl.load(number + STEP_SIZE)
    decayed = (p.to(tl.float32) * tl.load(number + DECAY)).to(TYPE)
    moved = (decayed.to(tl.float32) - update).to(TYPE)
    store_tile(param, tl.where(on, moved, decayed), e, left, TAIL)
    mean = tl.where(on, mean, 0.0)
    if PREVIOUS:
        # whole sectors: a part of one would have to be read first
        near = near_mask(words | before, e)
        tl.store(momentum + e, mean, mask=near & (e < left) if TAIL else near)
    else:
        store_tile(momentum, mean, e, left, TAIL)


@kernel
def update_kernel(table, tile_tensor, numbers, bits, tile_start, word_before, previous, values, clip, columns,
                  group: tl.int32, TYPE: tl.constexpr, ALIGN: tl.constexpr, CLIPPED: tl.constexpr,
                  BY_ROW: tl.constexpr, FACTORED: tl.constexpr, PREVIOUS: tl.constexpr):  # fmt: skip
    """SCAPE's update of parameters and momenta from mt in `values`; off the mask p only decays and m becomes 0.

    Of the tensors in `group`, whose parameters have TYPE. columns: with FACTORED, int64[tensors], the addresses of the
    factors of each tensor's columns.
    """
    tile = tl.program_id(0).to(tl.int64)
    tensor, row, start, left = locate(table, tile_tensor, tile)
    number, columns = numbers + tensor * NUMBERS, columns + tensor
    if tl.load(row + GROUP) == group:
        if left == TILE:
            _update(row, number, columns, tile, start, left, bits, tile_start, word_before, previous, values, clip,
                    TYPE, ALIGN, CLIPPED, BY_ROW, FACTORED, PREVIOUS, False)  # fmt: skip
        else:
            _update(row, number, columns, tile, start, left, bits, tile_start, word_before, previous, values, clip,
                    TYPE, ALIGN, CLIPPED, BY_ROW, FACTORED, PREVIOUS, True)  # fmt: skip


@triton.jit
def _adams(row, number, start, left, TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr, ALIGN: tl.constexpr,
           TAIL: tl.constexpr):  # fmt: skip
    e = entries()
    param = array(row, PARAM, TYPE, ALIGN) + start
    momentum = array(row, MOMENTUM, tl.float32, ALIGN) + start
    g = _grad(row, start, e, left, GRAD_TYPE, ALIGN, TAIL)
    p = load_tile(param, e, left, TAIL)
    m = load_tile(momentum, e, left, TAIL)
    v = tl.fma(g * tl.load(number + REST2), g, m * m * tl.load(number + BETA2))
    rest1 = tl.broadcast_to(tl.load(number + REST1), g.shape)
    m = tl.fma(g, rest1, m * tl.load(number + BETA1))
    bias2 = tl.broadcast_to(tl.load(number + BIAS2), v.shape)
    denominator = tl.div_rn(tl.sqrt_rn(v), bias2) + tl.load(number + EPS)
    step = tl.broadcast_to(-tl.load(number + STEP_SIZE), m.shape)
    decayed = (p.to(tl.float32) * tl.load(number + DECAY)).to(TYPE).to(tl.float32)
    decayed = tl.fma(step, tl.div_rn(m, denominator), decayed)
    store_tile(param, decayed.to(TYPE), e, left, TAIL)
    store_tile(momentum, m, e, left, TAIL)


@kernel
def adams_kernel(table, tile_tensor, numbers, TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr,
                 ALIGN: tl.constexpr):  # fmt: skip
    """A dense AdamS step (equations: hf_taco_scape/optim/adams.py)."""
    tile = tl.program_id(0).to(tl.int64)
    tensor, row, start, left = locate(table, tile_tensor, tile)
    number = numbers + tensor * NUMBERS
    if left == TILE:
        _adams(row, number, start, left, TYPE, GRAD_TYPE, ALIGN, False)
    else:
        _adams(row, number, start, left, TYPE, GRAD_TYPE, ALIGN, True)
