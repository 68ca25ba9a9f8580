"""Kernels of the codecs with one bf16 scale a group: fp8, int8, hadamard-int8, -int6 and -int4.

Wire: codes of whole groups, then bf16 scales (docs/wire_formats.md, section 2). QMAX is 448 for E4M3, else the largest
integer. `*_align` are powers of two that divide the addresses of all rows in bytes, at least 2 on the wire.

encode_tile and decode_tile are the arithmetic alone, registers to registers, for any kernel: a tile as groups.py
describes it, words as words.py does.
"""

import triton
import triton.language as tl

from .groups import (
    GROUP,
    NAN_BITS,
    SMALLEST_AMAX,
    _is_last,
    add_tiles,
    clamp_tile,
    divide,
    divide_by,
    group_amax,
    hadamard,
    inverse,
    load_tile,
    minus_zeros,
    multiply,
    store_tile,
    through_half,
    tile_groups,
)
from .words import e4m3_values, e4m3_words, load_words, store_words

E4M3 = tl.constexpr(448)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves a small number's nearest integer in the lowest bits
_ROUND_BITS = tl.constexpr(0x4B400000)
_EXPONENT_23 = tl.constexpr(0x4B000000)  # for symm_codec.py: bits of 2^23, whose lowest bit counts 1


@triton.jit
def _scale_up(amax, QMAX: tl.constexpr):
    """Bits of the smallest bf16 >= amax / QMAX; 0 below 2^-118, NaN for what is not finite. int32[ROWS]"""
    bits = (divide(amax, QMAX).to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    bits = tl.where(amax < SMALLEST_AMAX, 0, bits)
    return tl.where(amax < float("inf"), bits, NAN_BITS >> 16)


@triton.jit
def _bits_to_scale(bits):
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _pack_four(q, FIRST: tl.constexpr, BITS: tl.constexpr, QMAX: tl.constexpr):
    """int32 of four codes, number FIRST of q lowest, from values that _ROUND was added to.

    A sum, not an or: the float's upper bits and the offset QMAX are the same in every code, and one constant takes the
    former off and puts the latter on.
    """
    word = q[FIRST].to(tl.int32, bitcast=True)
    for j in tl.static_range(1, 4):
        word += q[FIRST + j].to(tl.int32, bitcast=True) << (j * BITS)
    ones: tl.constexpr = 1 + 2**BITS + 4**BITS + 8**BITS
    constant: tl.constexpr = ((QMAX - _ROUND_BITS) * ones + 2**31) % 2**32 - 2**31
    return word + constant


@triton.jit
def _integer_words(q, usable, BITS: tl.constexpr, QMAX: tl.constexpr):
    """Words of a tile of quotients, rounded; codes of zero where usable [ROWS, 1] is false."""
    zeros: tl.constexpr = QMAX * (1 + 2**BITS + 4**BITS + 8**BITS)
    words = ()
    for p in tl.static_range(len(q)):
        rounded = ()
        for j in tl.static_range(8):
            rounded = rounded + (q[p][j] + _ROUND,)
        for j in tl.static_range(0, 8, 4):
            words = words + (tl.where(usable, _pack_four(rounded, j, BITS, QMAX), zeros),)
    return words


@triton.jit
def _integer_value(word, i: tl.constexpr, BITS: tl.constexpr):
    """2^BITS plus code i of a word, exactly: the code is the mantissa's upper bits beside that exponent."""
    SHIFT: tl.constexpr = 23 - BITS * (1 + i)
    word = word << SHIFT if SHIFT >= 0 else word >> -SHIFT
    bits = word & ((2**BITS - 1) << (23 - BITS)) | ((127 + BITS) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _integer_values(words, BITS: tl.constexpr):
    """A tile of fp32, each 2^BITS too large, from words of integer codes."""
    tile = ()
    for p in tl.static_range(len(words) // 2):
        piece = ()
        for j in tl.static_range(8):
            piece = piece + (_integer_value(words[2 * p + j // 4], j % 4, BITS),)
        tile = tile + (piece,)
    return tile


@triton.jit
def encode_tile(x, QMAX: tl.constexpr, BITS: tl.constexpr, HADAMARD: tl.constexpr):
    """Words of a tile of fp32 and the bits of its groups' bf16 scales, int32[ROWS]."""
    if HADAMARD:
        x = hadamard(multiply(x, 1.0 / GROUP))
    bits = _scale_up(group_amax(x), QMAX)
    usable = (bits > 0) & (bits < 0x7F80)
    high, low = inverse(_bits_to_scale(tl.where(usable, bits, 0x3F80))[:, None])
    q = divide_by(x, high, low)
    if QMAX == E4M3:
        words = e4m3_words(q, usable[:, None])
    else:
        words = _integer_words(q, usable[:, None], BITS, QMAX)
    return words, bits


@triton.jit
def decode_tile(words, bits, limit, QMAX: tl.constexpr, BITS: tl.constexpr, HADAMARD: tl.constexpr):
    """The inverse: a tile of fp32 within +-limit, NaN where the scale is; bits int32[ROWS, 1] or [ROWS, LANES]."""
    if QMAX == E4M3:
        tile = e4m3_values(words)
    else:
        tile = _integer_values(words, BITS)
        offset: tl.constexpr = 2.0**BITS + QMAX
        if HADAMARD:
            tile = hadamard(tile)
            # of a constant over the group the transform is 128 times as large in element 0, else zero
            lanes = tl.arange(0, tile[0][0].shape[1])[None, :]
            tile = _subtract_first(tile, tl.where(lanes == 0, offset * 128, 0.0))
        else:
            tile = _subtract(tile, offset)
    return clamp_tile(multiply(tile, _bits_to_scale(bits)), limit)


@triton.jit
def _subtract(tile, value):
    out = ()
    for p in tl.static_range(len(tile)):
        piece = ()
        for j in tl.static_range(8):
            piece = piece + (tile[p][j] - value,)
        out = out + (piece,)
    return out


@triton.jit
def _subtract_first(tile, value):
    """tile with `value` taken off tensor 0 of piece 0."""
    out = ()
    for p in tl.static_range(len(tile)):
        piece = ()
        for j in tl.static_range(8):
            piece = piece + (tile[p][j] - value if p == 0 and j == 0 else tile[p][j],)
        out = out + (piece,)
    return out


@triton.jit
def _store_message(x, payload, scales, group, QMAX: tl.constexpr, BITS: tl.constexpr, HADAMARD: tl.constexpr,
                   ALIGN: tl.constexpr):  # fmt: skip
    """Encode the groups in tile x and write their codes and scales."""
    words, bits = encode_tile(x, QMAX, BITS, HADAMARD)
    tl.store(scales + group, bits.to(tl.int16))
    store_words(payload, words, group, BITS, ALIGN)


@triton.jit
def _load_message(wire, scales_at, there, group, PIECES: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr):
    """Words and scale bits int32[ROWS] of groups; reads nothing unless `there`."""
    bits = tl.load((wire + scales_at).to(tl.pointer_type(tl.uint16)) + group, mask=there).to(tl.int32)
    return load_words(wire, there, group, PIECES, BITS, ALIGN), bits


@triton.jit
def _load_sum(wire, message_stride, messages, groups, group, limit, QMAX: tl.constexpr, BITS: tl.constexpr,
              HADAMARD: tl.constexpr, PIECES: tl.constexpr, ALIGN: tl.constexpr, ONE: tl.constexpr):  # fmt: skip
    """The sum over the messages, in their order, and the groups that are NaN. ONE: one message."""
    scales_at = groups * (GROUP * BITS // 8)
    words, bits = _load_message(wire, scales_at, True, group, PIECES, BITS, ALIGN)
    bad = bits > 0x7F80
    if ONE:
        total = decode_tile(words, bits[:, None], limit, QMAX, BITS, HADAMARD)
    else:
        total = minus_zeros(group, PIECES)
        for i in range(messages):
            # the next message is on its way while this one is decoded
            following = tl.multiple_of(wire + (i + 1) * message_stride, ALIGN)
            next_words, next_bits = _load_message(following, scales_at, i + 1 < messages, group, PIECES, BITS, ALIGN)
            total = add_tiles(total, decode_tile(words, bits[:, None], limit, QMAX, BITS, HADAMARD))
            bad = bad | (bits > 0x7F80)
            words, bits = next_words, next_bits
    return total, bad


# Nothing is specialised: neither a size nor an offset nor a pointer's alignment leads to another build.
@triton.jit(do_not_specialize=["x", "wire", "x_stride", "wire_stride", "groups", "numel"])
def encode_kernel(x, wire, x_stride: tl.int64, wire_stride: tl.int64, groups: tl.int64, numel: tl.int64,
                  QMAX: tl.constexpr, BITS: tl.constexpr, HADAMARD: tl.constexpr, ROWS: tl.constexpr,
                  PIECES: tl.constexpr, X_ALIGN: tl.constexpr, ALIGN: tl.constexpr, TAIL: tl.constexpr):  # fmt: skip
    """Row program_id(1) of x as a message into row program_id(1) of wire. Strides in elements and in bytes."""
    row = tl.program_id(1).to(tl.int64)
    x = tl.multiple_of(x + row * x_stride, X_ALIGN)
    wire = tl.multiple_of(wire + row * wire_stride, ALIGN)
    group = tile_groups(groups, ROWS)
    scales = (wire + groups * (GROUP * BITS // 8)).to(tl.pointer_type(tl.int16))
    tile = load_tile(x, group, numel, ROWS, PIECES, TAIL)
    _store_message(tile, wire, scales, group, QMAX, BITS, HADAMARD, ALIGN)


@triton.jit(do_not_specialize=["wire", "out", "wire_stride", "message_stride", "messages", "out_stride", "groups",
                               "numel", "limit"])  # fmt: skip
def decode_sum_kernel(wire, out, wire_stride: tl.int64, message_stride: tl.int64, messages: tl.int32,
                      out_stride: tl.int64, groups: tl.int64, numel: tl.int64, limit: tl.float32,
                      QMAX: tl.constexpr, BITS: tl.constexpr, HADAMARD: tl.constexpr, ROWS: tl.constexpr,
                      PIECES: tl.constexpr, OUT_ALIGN: tl.constexpr, ALIGN: tl.constexpr, TAIL: tl.constexpr,
                      ONE: tl.constexpr):  # fmt: skip
    """Row program_id(1) of out: the sum of `messages` messages, which start at that row of wire."""
    row = tl.program_id(1).to(tl.int64)
    out = tl.multiple_of(out + row * out_stride, OUT_ALIGN)
    wire = tl.multiple_of(wire + row * wire_stride, ALIGN)
    group = tile_groups(groups, ROWS)
    total, bad = _load_sum(wire, message_stride, messages, groups, group, limit, QMAX, BITS, HADAMARD, PIECES, ALIGN,
                           ONE)  # fmt: skip
    store_tile(out, total, bad, group, numel, ROWS, PIECES, TAIL)


@triton.jit
def _zero_behind(tile, group, numel, ROWS: tl.constexpr, TAIL: tl.constexpr):
    """The tile with zeros behind `numel`, where decoded padding is noise."""
    if TAIL:
        if _is_last(numel, ROWS):
            tile = _zeros_from(tile, group, numel)
    return tile


@triton.jit
def _zeros_from(tile, group, numel):
    LANES: tl.constexpr = tile[0][0].shape[1]
    out = ()
    for p in tl.static_range(len(tile)):
        first = group[:, None] * GROUP + (p * LANES + tl.arange(0, LANES)[None, :]) * 8
        piece = ()
        for j in tl.static_range(8):
            piece = piece + (tl.where(first + j < numel, tile[p][j], 0.0),)
        out = out + (piece,)
    return out


@triton.jit(do_not_specialize=["wire", "out", "message_stride", "messages", "groups", "numel", "limit"])
def decode_sum_encode_kernel(wire, out, message_stride: tl.int64, messages: tl.int32, groups: tl.int64,
                             numel: tl.int64, limit: tl.float32, QMAX: tl.constexpr, BITS: tl.constexpr,
                             HADAMARD: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr, ALIGN: tl.constexpr,
                             TAIL: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """The message `out` of the sum of `messages` messages in wire. HALF: the sum passes through fp16."""
    row = tl.program_id(1).to(tl.int64)  # 0: what is known of an address needs an operation to hang on
    wire, out = tl.multiple_of(wire + row * groups, ALIGN), tl.multiple_of(out + row * groups, ALIGN)
    group = tile_groups(groups, ROWS)
    total, _ = _load_sum(wire, message_stride, messages, groups, group, limit, QMAX, BITS, HADAMARD, PIECES, ALIGN,
                         False)  # fmt: skip
    total = _zero_behind(total, group, numel, ROWS, TAIL)
    if HALF:
        total = through_half(total)
    scales = (out + groups * (GROUP * BITS // 8)).to(tl.pointer_type(tl.int16))
    _store_message(total, out, scales, group, QMAX, BITS, HADAMARD, ALIGN)
