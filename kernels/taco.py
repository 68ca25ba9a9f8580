"""Kernels of codec taco: adaptive scale, Walsh-Hadamard transform, second scale, E4M3.

Wire: q uint8[numel] | s fp32[groups] | alpha fp32[groups] (docs/wire_formats.md, section 1). These kernels do whole
groups; the short one at the end has a shape of its own and is done by taco_tail.py.

encode_tile and decode_tile are the arithmetic alone, registers to registers, for any kernel: a tile as groups.py
describes it, words as words.py does.
"""

import triton
import triton.language as tl

from .groups import (
    GROUP,
    NAN_BITS,
    SMALLEST_AMAX,
    add,
    add_tiles,
    clamp_tile,
    divide,
    divide_by,
    divide_exactly,
    group_amax,
    hadamard,
    inverse,
    load_tile,
    minus_zeros,
    multiply,
    partner,
    store_tile,
    through_half,
    tile_groups,
)
from .words import e4m3_values, e4m3_words, load_words, store_words

E4M3_MAX = tl.constexpr(448.0)
ROOT = tl.constexpr(11.313708305358887)  # sqrt(128) in fp32


@triton.jit
def store_scale(pointer, values, ALIGN: tl.constexpr):
    """Write fp32 values to byte pointers; behind an odd number of codes they are not aligned."""
    if ALIGN >= 4:
        tl.store(pointer.to(tl.pointer_type(tl.float32)), values)
    else:
        bits = values.to(tl.int32, bitcast=True)
        for i in tl.static_range(4):
            tl.store(pointer + i, (bits >> (8 * i)).to(tl.uint8))


@triton.jit
def load_scale(pointer, there, ALIGN: tl.constexpr):
    """The inverse of store_scale; reads nothing unless `there`."""
    if ALIGN >= 4:
        return tl.load(pointer.to(tl.pointer_type(tl.float32)), mask=there)
    bits = tl.load(pointer, mask=there).to(tl.int32)
    for i in tl.static_range(1, 4):
        bits |= tl.load(pointer + i, mask=there).to(tl.int32) << (8 * i)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def range_factor(amax):
    """The power of two that brings a group outside of [2^-30, 2^30] to [1, 2); 0 for one that is sent as zeros."""
    bits = amax.to(tl.int32, bitcast=True) & 0x7F800000
    inverse_bits = tl.where(bits == 0x7F000000, 0x00400000, 0x7F000000 - bits)  # 2^-127 is subnormal
    factor = inverse_bits.to(tl.float32, bitcast=True)
    factor = tl.where((amax < 2.0**-30) | (amax > 2.0**30), factor, 1.0)
    factor = tl.where(amax < SMALLEST_AMAX, 0.0, factor)
    return tl.where(amax < float("inf"), factor, 1.0)


@triton.jit
def adaptive_scale(mean_square):
    """clip(448 / sqrt(mean(x^2) + 1e-6), 1e-3, 1e3)"""
    rms = tl.sqrt_rn(mean_square + 1e-6)
    alpha = tl.div_rn(tl.full(rms.shape, E4M3_MAX, tl.float32), rms)
    return tl.minimum(tl.maximum(alpha, 1e-3), 1e3)


@triton.jit
def second_scale(amax):
    """clip(max|y| / 448, 1e-12, 1e6)"""
    return tl.minimum(tl.maximum(divide(amax, E4M3_MAX), 1e-12), 1e6)


@triton.jit
def wire_scales(s, alpha, amax, factor):
    """What is sent of s and alpha: alpha takes the range factor in, a group with NaN or inf has NaN."""
    nan = tl.full(s.shape, NAN_BITS, tl.int32).to(tl.float32, bitcast=True)
    finite = amax < float("inf")
    alpha = tl.where(factor == 0.0, alpha, alpha * factor)
    return tl.where(finite, s, nan), tl.where(finite, alpha, nan)


@triton.jit
def _fold_lanes(x, STRIDE: tl.constexpr):
    out = ()
    for j in tl.static_range(8):
        out = out + (x[j] + partner(x[j], STRIDE),)
    return out


@triton.jit
def _fold_pieces(tile):
    """The upper half of the pieces added to the lower."""
    HALF: tl.constexpr = len(tile) // 2
    out = ()
    for p in tl.static_range(HALF):
        out = out + (add(tile[p], tile[p + HALF]),)
    return out


@triton.jit
def _sum_squares(tile):
    """fp32[ROWS]: sums of squares by halves, strides 64, 32, ..., 1 as the torch twin adds."""
    squares = ()
    for p in tl.static_range(len(tile)):
        piece = ()
        for j in tl.static_range(8):
            piece = piece + (tile[p][j] * tile[p][j],)
        squares = squares + (piece,)
    if len(tile) > 4:
        squares = _fold_pieces(squares)
    if len(tile) > 2:
        squares = _fold_pieces(squares)
    if len(tile) > 1:
        squares = _fold_pieces(squares)
    x = squares[0]
    LANES: tl.constexpr = tile[0][0].shape[1]
    if LANES > 8:
        x = _fold_lanes(x, 8)
    if LANES > 4:
        x = _fold_lanes(x, 4)
    if LANES > 2:
        x = _fold_lanes(x, 2)
    if LANES > 1:
        x = _fold_lanes(x, 1)
    total = ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]))
    return tl.max(total, 1)  # all lanes have the same


@triton.jit
def _divide_root(tile):
    out = ()
    for p in tl.static_range(len(tile)):
        piece = ()
        for j in tl.static_range(8):
            piece = piece + (divide(tile[p][j], ROOT),)
        out = out + (piece,)
    return out


@triton.jit
def _bring_into_range(x, amax):
    """The tile times each group's power of two, and that factor."""
    factor = range_factor(amax)
    return multiply(x, factor[:, None]), factor


@triton.jit
def _zeros_unless(condition, tile):
    """The tile, in groups without the condition zeros."""
    out = ()
    for p in tl.static_range(len(tile)):
        piece = ()
        for j in tl.static_range(8):
            piece = piece + (tl.where(condition[:, None], tile[p][j], 0.0),)
        out = out + (piece,)
    return out


@triton.jit
def encode_tile(x):
    """Words of a tile of fp32 and its groups' s and alpha, fp32[ROWS]."""
    squares = _sum_squares(x)
    # A sum of squares in this range has an amax in [2^-30, 2^30], whatever the group. Nearly all tiles have no other,
    # and these skip the search for amax and the factor; a NaN or an inf is in no range.
    ordinary = tl.min(((squares > 2.0**-52) & (squares < 2.0**59)).to(tl.int32), 0) == 1
    amax = squares  # stands for an ordinary one
    factor = tl.full(squares.shape, 1.0, tl.float32)
    if not ordinary:
        amax = group_amax(x)
        x, factor = _bring_into_range(x, amax)
        squares = _sum_squares(x)
    alpha = adaptive_scale(squares * (1.0 / GROUP))
    y = _divide_root(hadamard(multiply(x, alpha[:, None])))
    s = second_scale(group_amax(y))
    high, low = inverse(s[:, None])
    q = divide_by(y, high, low)
    usable = tl.full(s.shape, True, tl.int1)
    if not ordinary:
        usable = (amax >= SMALLEST_AMAX) & (amax < float("inf"))
        s, alpha = wire_scales(s, alpha, amax, factor)
    return e4m3_words(q, usable[:, None]), s, alpha


@triton.jit
def _store_message(x, wire, scales, group, groups, ALIGN: tl.constexpr, SCALE_ALIGN: tl.constexpr):
    """Encode the groups in tile x and write their codes and scales."""
    words, s, alpha = encode_tile(x)
    store_words(wire, words, group, 8, ALIGN)
    store_scale(scales + group * 4, s, SCALE_ALIGN)
    store_scale(scales + (groups + group) * 4, alpha, SCALE_ALIGN)


@triton.jit
def decode_scales(s, alpha):
    """s and alpha with a power of two taken off both where 1 / alpha would be subnormal."""
    down = tl.where(alpha > 2.0**60, 2.0**-64, 1.0)
    return s * down, alpha * down


@triton.jit
def decode_tile(words, s, alpha, limit, EXACT: tl.constexpr):
    """The inverse: a tile of fp32 within +-limit, NaN where the scales are; these fp32[ROWS, 1] or [ROWS, LANES].

    EXACT: the values stay fp32, so they are divided exactly; without, they are right once rounded to 16 bits.
    """
    s, alpha = decode_scales(s, alpha)
    tile = _divide_root(hadamard(multiply(e4m3_values(words), s)))
    high, low = inverse(alpha)
    if EXACT:
        tile = divide_exactly(tile, alpha, high, low, limit)
    else:
        tile = divide_by(tile, high, low)
    return clamp_tile(tile, limit)


@triton.jit
def _load_message(wire, numel, groups, there, group, PIECES: tl.constexpr, ALIGN: tl.constexpr,
                  SCALE_ALIGN: tl.constexpr):  # fmt: skip
    """Words, s and alpha of groups; reads nothing unless `there`."""
    s = load_scale(wire + numel + group * 4, there, SCALE_ALIGN)
    alpha = load_scale(wire + numel + (groups + group) * 4, there, SCALE_ALIGN)
    return load_words(wire, there, group, PIECES, 8, ALIGN), s, alpha


@triton.jit
def _load_sum(wire, message_stride, messages, numel, groups, group, limit, PIECES: tl.constexpr, ALIGN: tl.constexpr,
              SCALE_ALIGN: tl.constexpr, EXACT: tl.constexpr, ONE: tl.constexpr):  # fmt: skip
    """The sum over the messages, in their order, and the groups that are NaN. ONE: one message."""
    words, s, alpha = _load_message(wire, numel, groups, True, group, PIECES, ALIGN, SCALE_ALIGN)
    bad = s != s
    if ONE:
        total = decode_tile(words, s[:, None], alpha[:, None], limit, EXACT)
    else:
        total = minus_zeros(group, PIECES)
        for i in range(messages):
            # the next message is on its way while this one is decoded
            following = tl.multiple_of(wire + (i + 1) * message_stride, ALIGN)
            next_words, next_s, next_alpha = _load_message(following, numel, groups, i + 1 < messages, group, PIECES,
                                                           ALIGN, SCALE_ALIGN)  # fmt: skip
            total = add_tiles(total, decode_tile(words, s[:, None], alpha[:, None], limit, EXACT))
            bad = bad | (s != s)
            words, s, alpha = next_words, next_s, next_alpha
    return total, bad


@triton.jit(do_not_specialize=["x", "wire", "x_stride", "wire_stride", "groups", "whole", "numel"])
def encode_kernel(x, wire, x_stride: tl.int64, wire_stride: tl.int64, whole: tl.int64, groups: tl.int64,
                  numel: tl.int64, ROWS: tl.constexpr, PIECES: tl.constexpr, X_ALIGN: tl.constexpr,
                  ALIGN: tl.constexpr, SCALE_ALIGN: tl.constexpr):  # fmt: skip
    """The `whole` first of `groups` groups of row program_id(1) of x. Strides in elements and in bytes."""
    row = tl.program_id(1).to(tl.int64)
    x = tl.multiple_of(x + row * x_stride, X_ALIGN)
    wire = tl.multiple_of(wire + row * wire_stride, ALIGN)
    group = tile_groups(whole, ROWS)
    tile = load_tile(x, group, numel, ROWS, PIECES, False)
    _store_message(tile, wire, wire + numel, group, groups, ALIGN, SCALE_ALIGN)


@triton.jit(do_not_specialize=["wire", "out", "wire_stride", "message_stride", "messages", "out_stride", "whole",
                               "groups", "numel", "limit"])  # fmt: skip
def decode_sum_kernel(wire, out, wire_stride: tl.int64, message_stride: tl.int64, messages: tl.int32,
                      out_stride: tl.int64, whole: tl.int64, groups: tl.int64, numel: tl.int64, limit: tl.float32,
                      ROWS: tl.constexpr, PIECES: tl.constexpr, OUT_ALIGN: tl.constexpr, ALIGN: tl.constexpr,
                      SCALE_ALIGN: tl.constexpr, EXACT: tl.constexpr, ONE: tl.constexpr):  # fmt: skip
    """Row program_id(1) of out: the sum of `messages` messages, which start at that row of wire."""
    row = tl.program_id(1).to(tl.int64)
    out = tl.multiple_of(out + row * out_stride, OUT_ALIGN)
    wire = tl.multiple_of(wire + row * wire_stride, ALIGN)
    group = tile_groups(whole, ROWS)
    total, bad = _load_sum(wire, message_stride, messages, numel, groups, group, limit, PIECES, ALIGN, SCALE_ALIGN,
                           EXACT, ONE)  # fmt: skip
    store_tile(out, total, bad, group, numel, ROWS, PIECES, False)


@triton.jit(do_not_specialize=["wire", "out", "message_stride", "messages", "whole", "groups", "numel", "limit"])
def decode_sum_encode_kernel(wire, out, message_stride: tl.int64, messages: tl.int32, whole: tl.int64,
                             groups: tl.int64, numel: tl.int64, limit: tl.float32, ROWS: tl.constexpr,
                             PIECES: tl.constexpr, ALIGN: tl.constexpr, SCALE_ALIGN: tl.constexpr,
                             HALF: tl.constexpr):  # fmt: skip
    """The message `out` of the sum of `messages` messages in wire. HALF: the sum passes through fp16."""
    row = tl.program_id(1).to(tl.int64)  # 0: what is known of an address needs an operation to hang on
    wire, out = tl.multiple_of(wire + row * numel, ALIGN), tl.multiple_of(out + row * numel, ALIGN)
    group = tile_groups(whole, ROWS)
    total, _ = _load_sum(wire, message_stride, messages, numel, groups, group, limit, PIECES, ALIGN, SCALE_ALIGN,
                         True, False)  # fmt: skip
    if HALF:
        total = through_half(total)
    _store_message(total, out, out + numel, group, groups, ALIGN, SCALE_ALIGN)
