"""Tiles of groups to words in registers and back, for every codec: what symm_kernels.py pushes to peers.

The codes and scales of the codec's message in another order: a thread's words lie side by side, without gaps. QMAX,
BITS and HADAMARD as in scaled.py. SCALES a group: 0 of codec none, 1 of the codecs in scaled.py, 2 of taco.
"""

import triton
import triton.language as tl

from . import scaled, taco
from .groups import canonical_nan

encode_taco, decode_taco = taco.encode_tile, taco.decode_tile
encode_scaled, decode_scaled = scaled.encode_tile, scaled.decode_tile


@triton.jit
def _close(four, BITS: tl.constexpr):
    """Words without gaps from words of four codes in their lowest 4 * BITS bits."""
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
def _open(words, BITS: tl.constexpr):
    """The inverse of _close, but for bits above the lowest 4 * BITS."""
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
def encode(x, like, QMAX: tl.constexpr, BITS: tl.constexpr, HADAMARD: tl.constexpr, SCALES: tl.constexpr):
    """Words of a tile of fp32, and the bits of its groups' first and second scale, int32[ROWS]."""
    first = tl.zeros([x[0][0].shape[0]], tl.int32)
    second = first
    if SCALES == 0:
        words = _plain_words(x, like)
    elif SCALES == 2:
        words, s, alpha = encode_taco(x)
        first, second = s.to(tl.int32, bitcast=True), alpha.to(tl.int32, bitcast=True)
    else:
        four, first = encode_scaled(x, QMAX, BITS, HADAMARD)
        words = _close(four, BITS)
    return words, first, second


@triton.jit
def decode(words, first, second, limit, like, QMAX: tl.constexpr, BITS: tl.constexpr, HADAMARD: tl.constexpr,
           SCALES: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """The inverse: a tile of fp32 within +-limit, or NaN. Scales: int32, [ROWS, 1] or [ROWS, LANES].

    EXACT: taco's values are divided exactly; without, they are right once rounded to 16 bits.
    """
    if SCALES == 0:
        tile = _plain_values(words, like)
    elif SCALES == 2:
        s, alpha = first.to(tl.float32, bitcast=True), second.to(tl.float32, bitcast=True)
        tile = decode_taco(words, s, alpha, limit, EXACT)
    else:
        tile = decode_scaled(_open(words, BITS), first, limit, QMAX, BITS, HADAMARD)
    return tile
