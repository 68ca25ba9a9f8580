"""Codes of a tile as 32-bit words in registers, and words to and from a message's payload.

A tile's words are two int32[ROWS, LANES] a piece: four codes each, the first lowest, in the lowest 4 * BITS bits.
Triton's interpreter has no assembler: there, the same conversions in plain Triton.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

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
def _code(x, i: tl.constexpr):
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32) << (8 * i)


@triton.jit
def _value(word, i: tl.constexpr):
    return ((word >> (8 * i)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def pack_e4m3(a, b, c, d):
    """int32 of the E4M3 codes of four fp32, that of a lowest; round to nearest even, past 448 to 448."""
    if INTERPRETED:
        return _code(a, 0) | _code(b, 1) | _code(c, 2) | _code(d, 3)
    else:
        return tl.inline_asm_elementwise(_TO_E4M3, "=r,f,f,f,f", [a, b, c, d], tl.int32, is_pure=True, pack=1)


@triton.jit
def unpack_e4m3(word):
    """The inverse: four fp32."""
    if INTERPRETED:
        return _value(word, 0), _value(word, 1), _value(word, 2), _value(word, 3)
    else:
        return tl.inline_asm_elementwise(
            _FROM_E4M3, "=&f,=&f,=&f,=&f,r", [word], (tl.float32,) * 4, is_pure=True, pack=1
        )


@triton.jit
def e4m3_words(q, usable):
    """Words of a tile of quotients; code 0 where usable [ROWS, 1] is false."""
    words = ()
    for p in tl.static_range(len(q)):
        for j in tl.static_range(0, 8, 4):
            word = pack_e4m3(q[p][j], q[p][j + 1], q[p][j + 2], q[p][j + 3])
            words = words + (tl.where(usable, word, 0),)
    return words


@triton.jit
def e4m3_values(words):
    """A tile of fp32 from words of E4M3 codes."""
    tile = ()
    for p in tl.static_range(len(words) // 2):
        a, b, c, d = unpack_e4m3(words[2 * p])
        e, f, g, h = unpack_e4m3(words[2 * p + 1])
        tile = tile + ((a, b, c, d, e, f, g, h),)
    return tile


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
def _store(payload, words, group, p: tl.constexpr, PIECES: tl.constexpr, ALIGN: tl.constexpr):
    """Write piece p: int32[ROWS, words of a piece]."""
    if ALIGN >= 4:
        payload = payload.to(tl.pointer_type(tl.int32))
    else:
        payload = payload.to(tl.pointer_type(tl.int16))
        words = _flat(tl.join(words.to(tl.int16), (words >> 16).to(tl.int16)))
    tl.store(payload + _row_offsets(group, p, words.shape[1], PIECES), words)


@triton.jit
def _load(payload, there, group, p: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, ALIGN: tl.constexpr):
    """The inverse of _store: int32[ROWS, WIDTH]."""
    if ALIGN >= 4:
        return tl.load(payload.to(tl.pointer_type(tl.int32)) + _row_offsets(group, p, WIDTH, PIECES), mask=there)
    else:
        at = _row_offsets(group, p, WIDTH * 2, PIECES)
        halves = tl.load(payload.to(tl.pointer_type(tl.uint16)) + at, mask=there)
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
def store_words(payload, words, group, BITS: tl.constexpr, ALIGN: tl.constexpr):
    """Write a tile's words to the payload of the groups group[ROWS]; ALIGN, at least 2, divides its address."""
    PIECES: tl.constexpr = len(words) // 2
    for p in tl.static_range(PIECES):
        low, high = words[2 * p], words[2 * p + 1]
        if BITS == 8:
            _store(payload, _flat(tl.join(low, high)), group, p, PIECES, ALIGN)
        elif BITS == 4:
            _store(payload, low | high << 16, group, p, PIECES, ALIGN)
        else:
            # 48 bits a lane and 96 bytes a group: nothing wider than a halfword is aligned everywhere
            at = _triples(payload, group, p, PIECES)
            tl.store(at, tl.trans(low).to(tl.uint16))
            tl.store(at + 1, tl.trans(low >> 16 | high << 8).to(tl.uint16))
            tl.store(at + 2, tl.trans(high >> 8).to(tl.uint16))


@triton.jit
def load_words(payload, there, group, PIECES: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr):
    """The inverse of store_words, but for bits above the lowest 4 * BITS; reads nothing unless `there`."""
    LANES: tl.constexpr = 16 // PIECES
    words = ()
    for p in tl.static_range(PIECES):
        if BITS == 8:
            low, high = _unflat(_load(payload, there, group, p, LANES * 2, PIECES, ALIGN))
        elif BITS == 4:
            low = _load(payload, there, group, p, LANES, PIECES, ALIGN)
            high = low >> 16
        else:
            at = _triples(payload, group, p, PIECES)
            a, b = tl.load(at, mask=there).to(tl.int32), tl.load(at + 1, mask=there).to(tl.int32)
            c = tl.load(at + 2, mask=there).to(tl.int32)
            low, high = tl.trans(a | b << 16), tl.trans(b >> 8 | c << 8)
        words = words + (low, high)
    return words
