"""Groups of 128 elements in registers: loads, stores, the Walsh-Hadamard transform, exact division.

A tile is ROWS groups. It is held as PIECES pieces of 128 / PIECES consecutive elements of every group; a piece is a
tuple of eight fp32[ROWS, LANES] tensors, LANES = 16 / PIECES, of which tensor j has element 8 * lane + j. So a thread
holds eight neighbours of each piece (one 16-byte load of a 16-bit type), most steps of the butterfly are between
registers, and only log2(LANES) of seven cross lanes.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(128)
SMALLEST_AMAX = tl.constexpr(2.0**-118)  # groups below are sent as zeros
LARGEST_FP32 = tl.constexpr(3.4028234663852886e38)
NAN_BITS = tl.constexpr(0x7FC00000)


@triton.jit
def nan_max(a, b):
    """The larger one, NaN if there is one: tl.max would drop it."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _xor(a, b):
    return a ^ b


@triton.jit
def clamp(x, limit):
    """x within +-limit, NaN stays."""
    x = tl.minimum(x, limit, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(x, -limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def split8(x):
    """[ROWS, LANES * 8] -> eight [ROWS, LANES], number j with the columns j, j + 8, ..."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 8, 2, 2, 2]))
    e0, e1 = tl.split(even)
    o0, o1 = tl.split(odd)
    x0, x4 = tl.split(e0)
    x2, x6 = tl.split(e1)
    x1, x5 = tl.split(o0)
    x3, x7 = tl.split(o1)
    return (x0, x1, x2, x3, x4, x5, x6, x7)


@triton.jit
def join8(x):
    """The inverse of split8."""
    even = tl.join(tl.join(x[0], x[4]), tl.join(x[2], x[6]))
    odd = tl.join(tl.join(x[1], x[5]), tl.join(x[3], x[7]))
    return tl.reshape(tl.join(even, odd), [x[0].shape[0], x[0].shape[1] * 8])


@triton.jit
def tile_groups(groups, ROWS: tl.constexpr):
    """int64[ROWS]: the groups of this program's tile; past the end the last one again, which then is written twice."""
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return tl.minimum(group, groups - 1)


@triton.jit
def element_offsets(group, p: tl.constexpr, PIECES: tl.constexpr):
    """int64[ROWS, 128 / PIECES]: offsets of piece p's elements."""
    return group[:, None] * GROUP + p * (GROUP // PIECES) + tl.arange(0, GROUP // PIECES)[None, :]


@triton.jit
def _load_pieces(x, group, numel, PIECES: tl.constexpr, MASKED: tl.constexpr):
    out = ()
    for p in tl.static_range(PIECES):
        at = element_offsets(group, p, PIECES)
        values = tl.load(x + at, mask=at < numel, other=0.0) if MASKED else tl.load(x + at)
        out = out + (split8(values.to(tl.float32)),)
    return out


@triton.jit
def _is_last(numel, ROWS: tl.constexpr):
    """Whether this program's tile reaches past `numel`."""
    return (tl.program_id(0).to(tl.int64) + 1) * (ROWS * GROUP) > numel


@triton.jit
def load_tile(x, group, numel, ROWS: tl.constexpr, PIECES: tl.constexpr, TAIL: tl.constexpr):
    """Pieces of a tile of x as fp32, zeros behind `numel`. TAIL: the last group may be short."""
    # an element-wise mask would make every load scalar: only the tile that ends in the short group has one
    if TAIL:
        if _is_last(numel, ROWS):
            tile = _load_pieces(x, group, numel, PIECES, True)
        else:
            tile = _load_pieces(x, group, numel, PIECES, False)
    else:
        tile = _load_pieces(x, group, numel, PIECES, False)
    return tile


@triton.jit
def canonical_nan(like):
    """The canonical NaN of a pointer's type as an integer of its size."""
    if like.dtype.element_ty == tl.bfloat16:
        return tl.full([1, 1], 0x7FC0, tl.int16)
    elif like.dtype.element_ty == tl.float16:
        return tl.full([1, 1], 0x7E00, tl.int16)
    else:
        return tl.full([1, 1], NAN_BITS, tl.int32)


@triton.jit
def store_tile(out, tile, bad, group, numel, ROWS: tl.constexpr, PIECES: tl.constexpr, TAIL: tl.constexpr):
    """Write pieces of fp32 as out's type, nothing behind `numel`; canonical NaN in the groups bad[ROWS]."""
    # hardware has a NaN of its own; a bad group is rare, and a store that no thread takes costs next to nothing
    nan = canonical_nan(out)
    bits = out.to(tl.pointer_type(nan.dtype))
    bad = bad[:, None]
    for p in tl.static_range(PIECES):
        at = element_offsets(group, p, PIECES)
        piece = join8(tile[p]).to(out.dtype.element_ty)
        nans = tl.broadcast_to(nan, piece.shape)
        if TAIL:
            if _is_last(numel, ROWS):
                tl.store(out + at, piece, mask=(at < numel) & (bad == 0))
                tl.store(bits + at, nans, mask=(at < numel) & bad)
            else:
                tl.store(out + at, piece, mask=bad == 0)
                tl.store(bits + at, nans, mask=bad)
        else:
            tl.store(out + at, piece, mask=bad == 0)
            tl.store(bits + at, nans, mask=bad)


@triton.jit
def partner(x, STRIDE: tl.constexpr):
    """Of x[ROWS, LANES] the value of lane ^ STRIDE.

    The exclusive or of the two lanes, and once more of one's own value: a reduction is the one exchange between lanes
    that Triton leaves in place whatever the layout, and the compiler cancels both.
    """
    bits = tl.reshape(x.to(tl.int32, bitcast=True), [x.shape[0], x.shape[1] // (2 * STRIDE), 2, STRIDE])
    other = bits ^ tl.reduce(bits, 2, _xor, keep_dims=True)
    return tl.reshape(other, x.shape).to(tl.float32, bitcast=True)


@triton.jit
def _lane_step(x, STRIDE: tl.constexpr):
    """One step of the butterfly between lanes, on eight tensors."""
    lane = tl.arange(0, x[0].shape[1])[None, :]
    sign = tl.where((lane & STRIDE) == 0, 1.0, -1.0)
    out = ()
    for j in tl.static_range(8):
        # times +-1 is exact, so this rounds as a + b and a - b do
        out = out + (tl.fma(x[j], tl.broadcast_to(sign, x[j].shape), partner(x[j], STRIDE)),)
    return out


@triton.jit
def add(a, b):
    """Sum of two pieces."""
    out = ()
    for j in tl.static_range(len(a)):
        out = out + (a[j] + b[j],)
    return out


@triton.jit
def _sub(a, b):
    out = ()
    for j in tl.static_range(len(a)):
        out = out + (a[j] - b[j],)
    return out


@triton.jit
def _butterfly8(x):
    """Strides 1, 2 and 4 on eight tensors."""
    a, b, c, d = x[0] + x[1], x[2] + x[3], x[4] + x[5], x[6] + x[7]
    e, f, g, h = x[0] - x[1], x[2] - x[3], x[4] - x[5], x[6] - x[7]
    ab, cd, ef, gh = a + b, c + d, e + f, g + h
    ba, dc, fe, hg = a - b, c - d, e - f, g - h
    return (ab + cd, ef + gh, ba + dc, fe + hg, ab - cd, ef - gh, ba - dc, fe - hg)


@triton.jit
def hadamard(tile):
    """H @ group, natural order, strides 1, 2, 4, ... as the torch twin adds: the order decides the bits."""
    LANES: tl.constexpr = tile[0][0].shape[1]
    out = ()
    for p in tl.static_range(len(tile)):
        x = _butterfly8(tile[p])
        if LANES > 1:
            x = _lane_step(x, 1)
        if LANES > 2:
            x = _lane_step(x, 2)
        if LANES > 4:
            x = _lane_step(x, 4)
        if LANES > 8:
            x = _lane_step(x, 8)
        out = out + (x,)
    if len(tile) > 1:
        out = _piece_step(out, 1)
    if len(tile) > 2:
        out = _piece_step(out, 2)
    if len(tile) > 4:
        out = _piece_step(out, 4)
    return out


@triton.jit
def _piece_step(tile, STRIDE: tl.constexpr):
    """One step of the butterfly between pieces."""
    out = ()
    for p in tl.static_range(len(tile)):
        if p & STRIDE:
            out = out + (_sub(tile[p - STRIDE], tile[p]),)
        else:
            out = out + (add(tile[p], tile[p + STRIDE]),)
    return out


@triton.jit
def group_amax(tile):
    """fp32[ROWS]: the largest magnitude of each group, NaN if it has one."""
    largest = tl.abs(tile[0][0])
    for p in tl.static_range(len(tile)):
        for j in tl.static_range(8):
            largest = nan_max(largest, tl.abs(tile[p][j]))
    return tl.reduce(largest, 1, nan_max)


@triton.jit
def multiply(tile, factor):
    """Each group of the tile times its factor [ROWS, 1] or a number."""
    out = ()
    for p in tl.static_range(len(tile)):
        piece = ()
        for j in tl.static_range(8):
            piece = piece + (tile[p][j] * factor,)
        out = out + (piece,)
    return out


@triton.jit
def inverse(x):
    """1 / x as an unevaluated sum of two fp32, to 46 bits: for divide_by. x between 2^-127 and 2^101."""
    high = 1.0 / x
    return high, tl.fma(-x, high, 1.0) * high


@triton.jit
def divide(x, value: tl.constexpr):
    """x / value, correctly rounded: shown for 7, 31, 127, 448 and sqrt(128) by trying every mantissa."""
    high, low = inverse(tl.full(x.shape, value, tl.float32))
    return tl.fma(x, high, x * low)


@triton.jit
def divide_by(tile, high, low):
    """tile / x for inverse(x) = (high, low): two instructions where the correctly rounded division takes ten.

    Differs from that one only where the quotient lies within 2^-46 of the middle of two fp32, never at a quotient
    that a few bits hold: what is rounded on to codes or to 16 bits comes out as after an exact division.
    """
    out = ()
    for p in tl.static_range(len(tile)):
        piece = ()
        for j in tl.static_range(8):
            x = tile[p][j]
            piece = piece + (tl.fma(x, tl.broadcast_to(high, x.shape), x * low),)
        out = out + (piece,)
    return out


@triton.jit
def add_tiles(a, b):
    """Sum of two tiles."""
    out = ()
    for p in tl.static_range(len(a)):
        out = out + (add(a[p], b[p]),)
    return out


@triton.jit
def minus_zeros(group, PIECES: tl.constexpr):
    """A tile of -0.0, to which a sum can be added without a trace (0.0 would lose the sign of -0.0)."""
    out = ()
    for _p in tl.static_range(PIECES):
        piece = ()
        for _j in tl.static_range(8):
            piece = piece + (tl.full([group.shape[0], 16 // PIECES], -0.0, tl.float32),)
        out = out + (piece,)
    return out


@triton.jit
def clamp_tile(tile, limit):
    """The tile within +-limit, NaN stays."""
    out = ()
    for p in tl.static_range(len(tile)):
        piece = ()
        for j in tl.static_range(8):
            piece = piece + (clamp(tile[p][j], limit),)
        out = out + (piece,)
    return out


@triton.jit
def through_half(tile):
    """tile rounded to fp16, past 65504 to inf."""
    out = ()
    for p in tl.static_range(len(tile)):
        piece = ()
        for j in tl.static_range(8):
            piece = piece + (tile[p][j].to(tl.float16).to(tl.float32),)
        out = out + (piece,)
    return out


@triton.jit
def divide_exactly(tile, value, high, low, limit):
    """tile / value, correctly rounded up to +-limit, for inverse(value) = (high, low): one more step on divide_by."""
    out = ()
    for p in tl.static_range(len(tile)):
        piece = ()
        for j in tl.static_range(8):
            x = tile[p][j]
            wide = tl.broadcast_to(high, x.shape)
            q = clamp(tl.fma(x, wide, x * low), limit)  # the step would make NaN of an inf
            piece = piece + (tl.fma(tl.fma(-q, tl.broadcast_to(value, x.shape), x), wide, q),)
        out = out + (piece,)
    return out
