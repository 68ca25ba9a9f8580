"""Tiles of groups to words in registers and back, for every codec: what symm_kernels.py pushes to peers.

The same codes and scales as the codec's message has, in another order: a thread's words lie side by side. QMAX, BITS
and HADAMARD as in scaled.py. SCALES a group: 0 of codec none, 1 of the codecs in scaled.py, 2 of taco.
"""

import triton
import triton.language as tl

from .groups import (
    GROUP,
    SMALLEST_AMAX,
    canonical_nan,
    clamp,
    divide_by,
    divide_exactly,
    group_amax,
    hadamard,
    inverse,
    multiply,
)
from .scaled import (
    _EXPONENT_23,
    _ROUND,
    E4M3,
    _bits_to_scale,
    _pack_four,
    _scale_up,
    _subtract_first,
)
from .symm_memory import INTERPRETED
from .taco import (
    _bring_into_range,
    _divide_root,
    _sum_squares,
    _zeros_unless,
    adaptive_scale,
    decode_scales,
    second_scale,
    wire_scales,
)

_TO_E4M3 = tl.constexpr(
    "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3;"
    " mov.b32 $0, {l, h}; }"
)
_FROM_E4M3 = tl.constexpr(
    "{ .reg .b16 l, h, x, y; .reg .b32 v; mov.b32 {l, h}, $4;"
    " cvt.rn.f16x2.e4m3x2 v, l; mov.b32 {x, y}, v; cvt.f32.f16 $0, x; cvt.f32.f16 $1, y;"
    " cvt.rn.f16x2.e4m3x2 v, h; mov.b32 {x, y}, v; cvt.f32.f16 $2, x; cvt.f32.f16 $3, y; }"
)


@triton.jit
def _pack_e4m3(a, b, c, d):
    """int32 of four E4M3 codes, that of a lowest."""
    if INTERPRETED:
        word = a.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
        word |= b.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32) << 8
        word |= c.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32) << 16
        word |= d.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32) << 24
    else:
        word = tl.inline_asm_elementwise(_TO_E4M3, "=r,f,f,f,f", [a, b, c, d], tl.int32, is_pure=True, pack=1)
    return word


@triton.jit
def _byte_of_e4m3(word, i: tl.constexpr):
    return ((word >> (8 * i)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _unpack_e4m3(word):
    """The inverse: four fp32."""
    if INTERPRETED:
        a, b = _byte_of_e4m3(word, 0), _byte_of_e4m3(word, 1)
        c, d = _byte_of_e4m3(word, 2), _byte_of_e4m3(word, 3)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _FROM_E4M3, "=&f,=&f,=&f,=&f,r", [word], (tl.float32,) * 4, is_pure=True, pack=1
        )
    return a, b, c, d


@triton.jit
def _e4m3_words(q):
    words = ()
    for p in tl.static_range(len(q)):
        words = words + (_pack_e4m3(q[p][0], q[p][1], q[p][2], q[p][3]),)
        words = words + (_pack_e4m3(q[p][4], q[p][5], q[p][6], q[p][7]),)
    return words


@triton.jit
def _e4m3_values(words):
    tile = ()
    for p in tl.static_range(len(words) // 2):
        a, b, c, d = _unpack_e4m3(words[2 * p])
        e, f, g, h = _unpack_e4m3(words[2 * p + 1])
        tile = tile + ((a, b, c, d, e, f, g, h),)
    return tile


@triton.jit
def _quarters(q, usable, BITS: tl.constexpr, QMAX: tl.constexpr):
    """Two int32 of four codes a piece, lowest bits first; codes of zero where a group is not usable."""
    zeros: tl.constexpr = QMAX * (1 + 2**BITS + 4**BITS + 8**BITS)
    out = ()
    for p in tl.static_range(len(q)):
        rounded = ()
        for j in tl.static_range(8):
            rounded = rounded + (q[p][j] + _ROUND,)
        out = out + (tl.where(usable, _pack_four(rounded, 0, BITS, QMAX), zeros),)
        out = out + (tl.where(usable, _pack_four(rounded, 4, BITS, QMAX), zeros),)
    return out


@triton.jit
def _integer_words(q, usable, BITS: tl.constexpr, QMAX: tl.constexpr):
    four = _quarters(q, usable, BITS, QMAX)
    words = ()
    if BITS == 8:
        words = four
    elif BITS == 4:
        for i in tl.static_range(0, len(four), 2):
            words = words + (four[i] | four[i + 1] << 16,)
    else:  # four times 24 bits in three words
        for i in tl.static_range(0, len(four), 4):
            words = words + (four[i] | four[i + 1] << 24,)
            words = words + (four[i + 1] >> 8 | four[i + 2] << 16,)
            words = words + (four[i + 2] >> 16 | four[i + 3] << 8,)
    return words


@triton.jit
def _integer_quarters(words, BITS: tl.constexpr):
    """The inverse of what _integer_words does to _quarters, but for bits above the lowest 4 * BITS."""
    four = ()
    if BITS == 8:
        four = words
    elif BITS == 4:
        for i in tl.static_range(len(words)):
            four = four + (words[i], words[i] >> 16)
    else:
        for i in tl.static_range(0, len(words), 3):
            four = four + (words[i], (words[i] >> 24) & 0xFF | words[i + 1] << 8)
            four = four + ((words[i + 1] >> 16) & 0xFFFF | words[i + 2] << 16, words[i + 2] >> 8)
    return four


@triton.jit
def _integer_values(words, BITS: tl.constexpr, OFFSET: tl.constexpr):
    """Codes as fp32, less OFFSET."""
    four = _integer_quarters(words, BITS)
    tile = ()
    for p in tl.static_range(len(four) // 2):
        piece = ()
        for j in tl.static_range(8):
            code = (four[2 * p + j // 4] >> (j % 4 * BITS)) & (2**BITS - 1)
            # code and exponent of 2^23 side by side, minus 2^23: a conversion that is not a conversion
            piece = piece + ((code | _EXPONENT_23).to(tl.float32, bitcast=True) - (8388608.0 + OFFSET),)
        tile = tile + (piece,)
    return tile


@triton.jit
def canonical_bits(values, like):
    """fp32 values rounded to the type `like` points to, as integers of its size; NaN in its canonical bits."""
    nan = canonical_nan(like)
    bits = values.to(like.dtype.element_ty).to(nan.dtype, bitcast=True)
    return tl.where(values == values, bits, tl.broadcast_to(nan, values.shape))


@triton.jit
def _plain_words(tile, like):
    words = ()
    for p in tl.static_range(len(tile)):
        for j in tl.static_range(0, 8, 2):
            low, high = canonical_bits(tile[p][j], like), canonical_bits(tile[p][j + 1], like)
            if like.dtype.element_ty == tl.float32:
                words = words + (low, high)
            else:
                words = words + (low.to(tl.int32) & 0xFFFF | high.to(tl.int32) << 16,)
    return words


@triton.jit
def _plain_value(bits, like):
    return bits.to(tl.int16).to(like.dtype.element_ty, bitcast=True).to(tl.float32)


@triton.jit
def _plain_values(words, like):
    flat = ()
    for i in tl.static_range(len(words)):
        if like.dtype.element_ty == tl.float32:
            flat = flat + (words[i].to(tl.float32, bitcast=True),)
        else:
            flat = flat + (_plain_value(words[i], like), _plain_value(words[i] >> 16, like))
    tile = ()
    for i in tl.static_range(0, len(flat), 8):
        tile = tile + (
            (flat[i], flat[i + 1], flat[i + 2], flat[i + 3], flat[i + 4], flat[i + 5], flat[i + 6], flat[i + 7]),
        )
    return tile


@triton.jit
def _taco_values(x):
    """Quotients, s and alpha as taco.py writes them."""
    squares = _sum_squares(x)
    ordinary = tl.min(((squares > 2.0**-52) & (squares < 2.0**59)).to(tl.int32), 0) == 1
    amax = squares
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
    if not ordinary:
        q = _zeros_unless((amax >= SMALLEST_AMAX) & (amax < float("inf")), q)
        s, alpha = wire_scales(s, alpha, amax, factor)
    return q, s, alpha


@triton.jit
def encode(x, like, QMAX: tl.constexpr, BITS: tl.constexpr, HADAMARD: tl.constexpr, SCALES: tl.constexpr):
    """Words of a tile of fp32, and the bits of its groups' first and second scale, int32[ROWS]."""
    ROWS: tl.constexpr = x[0][0].shape[0]
    first = tl.zeros([ROWS], tl.int32)
    second = first
    if SCALES == 0:
        words = _plain_words(x, like)
    elif SCALES == 2:
        q, s, alpha = _taco_values(x)
        first, second = s.to(tl.int32, bitcast=True), alpha.to(tl.int32, bitcast=True)
        words = _e4m3_words(q)
    else:
        if HADAMARD:
            x = hadamard(multiply(x, 1.0 / GROUP))
        first = _scale_up(group_amax(x), QMAX)
        usable = (first > 0) & (first < 0x7F80)
        high, low = inverse(_bits_to_scale(tl.where(usable, first, 0x3F80))[:, None])
        q = divide_by(x, high, low)
        if QMAX == E4M3:
            words = _e4m3_words(_zeros_unless(usable, q))
        else:
            words = _integer_words(q, usable[:, None], BITS, QMAX)
    return words, first, second


@triton.jit
def decode(words, first, second, limit, like, QMAX: tl.constexpr, BITS: tl.constexpr, HADAMARD: tl.constexpr,
           SCALES: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """The inverse: a tile of fp32 within +-limit, or NaN. Scales: int32, [ROWS, 1] or [ROWS, LANES].

    EXACT: taco's values are divided exactly; without, they are right once rounded to 16 bits.
    """
    if SCALES == 0:
        out = _plain_values(words, like)
    elif SCALES == 2:
        s, alpha = first.to(tl.float32, bitcast=True), second.to(tl.float32, bitcast=True)
        s, alpha = decode_scales(s, alpha)
        tile = _divide_root(hadamard(multiply(_e4m3_values(words), s)))
        high, low = inverse(alpha)
        if EXACT:
            tile = divide_exactly(tile, alpha, high, low, limit)
        else:
            tile = divide_by(tile, high, low)
        out = _clamp_tile(tile, limit)
    else:
        if QMAX == E4M3:
            tile = _e4m3_values(words)
        else:
            tile = _integer_values(words, BITS, 0 if HADAMARD else QMAX)
        if HADAMARD:
            tile = hadamard(tile)
            # the codes' offset is a constant over the group: all of its transform is in element 0
            lanes = tl.arange(0, tile[0][0].shape[1])[None, :]
            tile = _subtract_first(tile, tl.where(lanes == 0, QMAX * 128.0, 0.0))
        out = _clamp_tile(multiply(tile, _bits_to_scale(first)), limit)
    return out


@triton.jit
def _clamp_tile(tile, limit):
    out = ()
    for p in tl.static_range(len(tile)):
        piece = ()
        for j in tl.static_range(8):
            piece = piece + (clamp(tile[p][j], limit),)
        out = out + (piece,)
    return out
