"""Kernels of the codecs with one bf16 scale a group: fp8, int8, hadamard-int8, -int6 and -int4.

Wire: codes of whole groups, then bf16 scales; TACO.md section 2. QMAX is 448 for E4M3, else the largest integer.
`*_align` are powers of two that divide the addresses of all rows in bytes, at least 2 on the wire.
"""

import triton
import triton.language as tl

from .groups import (
    GROUP,
    NAN_BITS,
    SMALLEST_AMAX,
    add_tiles,
    clamp,
    divide,
    divide_by,
    element_offsets,
    group_amax,
    hadamard,
    inverse,
    join8,
    load_tile,
    multiply,
    split8,
    store_tile,
    through_half,
    tile_groups,
)

E4M3 = tl.constexpr(448)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves a small number's nearest integer in the lowest bits
_ROUND_BITS = tl.constexpr(0x4B400000)
_EXPONENT_23 = tl.constexpr(0x4B000000)  # bits of 2^23, whose lowest bit counts 1


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
def _flat(x):
    """[ROWS, LANES, 2] -> [ROWS, LANES * 2]"""
    return tl.reshape(x, [x.shape[0], x.shape[1] * x.shape[2]])


@triton.jit
def _unflat(x):
    """[ROWS, LANES * 2] -> its even and its odd columns."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def _row_offsets(group, p: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr):
    """int64[ROWS, WIDTH]: where piece p of each group is when a piece is WIDTH items wide."""
    return group[:, None] * (WIDTH * PIECES) + p * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _store_words(payload, words, group, p: tl.constexpr, PIECES: tl.constexpr, ALIGN: tl.constexpr):
    """Write piece p: int32[ROWS, words of a piece]."""
    if ALIGN >= 4:
        payload = payload.to(tl.pointer_type(tl.int32))
    else:
        payload = payload.to(tl.pointer_type(tl.int16))
        words = _flat(tl.join(words.to(tl.int16), (words >> 16).to(tl.int16)))
    tl.store(payload + _row_offsets(group, p, words.shape[1], PIECES), words)


@triton.jit
def _load_words(payload, group, p: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, ALIGN: tl.constexpr):
    """The inverse of _store_words: int32[ROWS, WIDTH]."""
    if ALIGN >= 4:
        return tl.load(payload.to(tl.pointer_type(tl.int32)) + _row_offsets(group, p, WIDTH, PIECES))
    halves = tl.load(payload.to(tl.pointer_type(tl.uint16)) + _row_offsets(group, p, WIDTH * 2, PIECES))
    low, high = _unflat(halves.to(tl.int32))
    return low | high << 16


@triton.jit
def _triples(payload, group, p: tl.constexpr, PIECES: tl.constexpr):
    """Pointers [LANES, ROWS] to the first of the three halfwords that hold a lane's eight 6-bit codes.

    Lanes first: where nothing is contiguous, Triton numbers threads along dim 0, and so the lanes stay where they are.
    """
    lane = tl.arange(0, 16 // PIECES)[:, None] + p * (16 // PIECES)
    return payload.to(tl.pointer_type(tl.uint16)) + (group[None, :] * 16 + lane) * 3


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
def _store_integers(payload, group, p: tl.constexpr, q, usable, BITS: tl.constexpr, QMAX: tl.constexpr,
                    PIECES: tl.constexpr, ALIGN: tl.constexpr):  # fmt: skip
    """Round and pack piece p; where a group is not usable, zeros."""
    rounded = ()
    for j in tl.static_range(8):
        rounded = rounded + (q[j] + _ROUND,)
    zeros: tl.constexpr = QMAX * (1 + 2**BITS + 4**BITS + 8**BITS)
    low = tl.where(usable, _pack_four(rounded, 0, BITS, QMAX), zeros)
    high = tl.where(usable, _pack_four(rounded, 4, BITS, QMAX), zeros)
    if BITS == 8:
        _store_words(payload, _flat(tl.join(low, high)), group, p, PIECES, ALIGN)
    elif BITS == 4:
        _store_words(payload, low | high << 16, group, p, PIECES, ALIGN)
    else:
        # 48 bits a lane and 96 bytes a group: nothing wider than a halfword is aligned everywhere
        at = _triples(payload, group, p, PIECES)
        tl.store(at, tl.trans(low).to(tl.uint16))
        tl.store(at + 1, tl.trans(low >> 16 | high << 8).to(tl.uint16))
        tl.store(at + 2, tl.trans(high >> 8).to(tl.uint16))


@triton.jit
def _load_integers(payload, group, p: tl.constexpr, BITS: tl.constexpr, PIECES: tl.constexpr, ALIGN: tl.constexpr):
    """Eight int32[ROWS, LANES] of codes, 0 and up, of piece p."""
    LANES: tl.constexpr = 16 // PIECES
    if BITS == 8:
        low, high = _unflat(_load_words(payload, group, p, LANES * 2, PIECES, ALIGN))
    elif BITS == 4:
        low = _load_words(payload, group, p, LANES, PIECES, ALIGN)
        high = low >> 16
    else:
        at = _triples(payload, group, p, PIECES)
        a, b, c = tl.load(at).to(tl.int32), tl.load(at + 1).to(tl.int32), tl.load(at + 2).to(tl.int32)
        low, high = tl.trans(a | b << 16), tl.trans(b >> 8 | c << 8)
    out = ()
    for j in tl.static_range(4):
        out = out + ((low >> (j * BITS)) & (2**BITS - 1),)
    for j in tl.static_range(4):
        out = out + ((high >> (j * BITS)) & (2**BITS - 1),)
    return out


@triton.jit
def _encode_tile(x, payload, scales, group, QMAX: tl.constexpr, BITS: tl.constexpr, HADAMARD: tl.constexpr,
                 PIECES: tl.constexpr, ALIGN: tl.constexpr):  # fmt: skip
    """Write codes and scales of the groups in tile x."""
    if HADAMARD:
        x = hadamard(multiply(x, 1.0 / GROUP))
    bits = _scale_up(group_amax(x), QMAX)
    tl.store(scales + group, bits.to(tl.int16))
    usable = (bits > 0) & (bits < 0x7F80)
    high, low = inverse(_bits_to_scale(tl.where(usable, bits, 0x3F80))[:, None])
    q = divide_by(x, high, low)
    usable = usable[:, None]
    for p in tl.static_range(PIECES):
        if QMAX == E4M3:
            codes = tl.where(usable, join8(q[p]), 0.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
            tl.store(payload + element_offsets(group, p, PIECES), codes)
        else:
            _store_integers(payload, group, p, q[p], usable, BITS, QMAX, PIECES, ALIGN)


@triton.jit
def _decode_piece(payload, group, p: tl.constexpr, QMAX: tl.constexpr, BITS: tl.constexpr, HADAMARD: tl.constexpr,
                  PIECES: tl.constexpr, ALIGN: tl.constexpr):  # fmt: skip
    """Codes of piece p as fp32; of a transformed integer QMAX too large, which `_decode_tile` takes off."""
    if QMAX == E4M3:
        codes = tl.load(payload + element_offsets(group, p, PIECES))
        return split8(codes.to(tl.float8e4nv, bitcast=True).to(tl.float32))
    codes = _load_integers(payload, group, p, BITS, PIECES, ALIGN)
    out = ()
    for j in tl.static_range(8):
        # code and exponent of 2^23 side by side, minus 2^23: a conversion that is not a conversion
        value = (codes[j] | _EXPONENT_23).to(tl.float32, bitcast=True)
        out = out + (value - (8388608.0 if HADAMARD else 8388608.0 + QMAX),)
    return out


@triton.jit
def _decode_tile(payload, scales, group, limit, QMAX: tl.constexpr, BITS: tl.constexpr, HADAMARD: tl.constexpr,
                 PIECES: tl.constexpr, ALIGN: tl.constexpr):  # fmt: skip
    """Pieces of decoded fp32 within +-limit, or NaN; and the groups that are NaN, int1[ROWS]."""
    bits = tl.load(scales + group).to(tl.int32)
    scale = _bits_to_scale(bits)[:, None]
    tile = ()
    for p in tl.static_range(PIECES):
        tile = tile + (_decode_piece(payload, group, p, QMAX, BITS, HADAMARD, PIECES, ALIGN),)
    if HADAMARD:
        tile = hadamard(tile)
        # the codes' offset is a constant over the group: its transform is 128 times as large in element 0, else zero
        first = tl.where(tl.arange(0, 16 // PIECES)[None, :] == 0, QMAX * 128.0, 0.0)
        tile = _subtract_first(tile, first)
    out = ()
    for p in tl.static_range(PIECES):
        piece = ()
        for j in tl.static_range(8):
            piece = piece + (clamp(tile[p][j] * scale, limit),)
        out = out + (piece,)
    return out, bits > 0x7F80


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
def _decode_sum_tile(wire, message_stride, messages, groups, group, limit, QMAX: tl.constexpr, BITS: tl.constexpr,
                     HADAMARD: tl.constexpr, PIECES: tl.constexpr, ALIGN: tl.constexpr,
                     ONE: tl.constexpr):  # fmt: skip
    """Pieces of the sum over the messages, in their order, and the groups that are NaN. ONE: one message."""
    scales_at = groups * (GROUP * BITS // 8)
    scales = (wire + scales_at).to(tl.pointer_type(tl.uint16))
    total, bad = _decode_tile(wire, scales, group, limit, QMAX, BITS, HADAMARD, PIECES, ALIGN)
    if not ONE:
        for i in range(1, messages):
            message = tl.multiple_of(wire + i * message_stride, ALIGN)
            scales = (message + scales_at).to(tl.pointer_type(tl.uint16))
            tile, more = _decode_tile(message, scales, group, limit, QMAX, BITS, HADAMARD, PIECES, ALIGN)
            total, bad = add_tiles(total, tile), bad | more
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
    _encode_tile(tile, wire, scales, group, QMAX, BITS, HADAMARD, PIECES, ALIGN)


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
    total, bad = _decode_sum_tile(wire, message_stride, messages, groups, group, limit, QMAX, BITS, HADAMARD, PIECES,
                                  ALIGN, ONE)  # fmt: skip
    store_tile(out, total, bad, group, numel, ROWS, PIECES, TAIL)


@triton.jit(do_not_specialize=["wire", "out", "message_stride", "messages", "groups", "limit"])
def decode_sum_encode_kernel(wire, out, message_stride: tl.int64, messages: tl.int32, groups: tl.int64,
                             limit: tl.float32, QMAX: tl.constexpr, BITS: tl.constexpr, HADAMARD: tl.constexpr,
                             ROWS: tl.constexpr, PIECES: tl.constexpr, ALIGN: tl.constexpr,
                             HALF: tl.constexpr):  # fmt: skip
    """The message `out` of the sum of `messages` messages in wire. HALF: the sum passes through fp16."""
    row = tl.program_id(1).to(tl.int64)  # 0: what is known of an address needs an operation to hang on
    wire, out = tl.multiple_of(wire + row * groups, ALIGN), tl.multiple_of(out + row * groups, ALIGN)
    group = tile_groups(groups, ROWS)
    total, _ = _decode_sum_tile(wire, message_stride, messages, groups, group, limit, QMAX, BITS, HADAMARD, PIECES,
                                ALIGN, False)  # fmt: skip
    if HALF:
        total = through_half(total)
    scales = (out + groups * (GROUP * BITS // 8)).to(tl.pointer_type(tl.int16))
    _encode_tile(total, out, scales, group, QMAX, BITS, HADAMARD, PIECES, ALIGN)
