"""What SCAPE's kernels share: many tensors in one launch, cut into tiles, and a mask as bits.

`table` is int64[tensors, FIELDS], a row a tensor; a program works on one of all tensors' tiles, counted in order, and
`tile_tensor[i]` says whose tile i is. A mask is one bit an entry, lowest first, in int32 words: tile i's are words
i * WORDS and on, whatever the tensors' lengths. `tile_start[i]` counts the bits of all tiles before i, word_before[j]
those of the tile before word j: with the bits before it in its word, an entry's place among all sent values.

A tile is held as QUADS rows of four neighbours, 16 bytes of fp32: what is the same for four entries is worked out
once, and a mask that is the same for four leaves an access 16 bytes wide.
"""

import inspect

import triton
import triton.language as tl


def kernel(function):
    """`triton.jit` without specialisation: a build serves arrays of any address and length, so launchers keep it."""
    arguments = inspect.signature(function).parameters.values()
    plain = [a.name for a in arguments if a.annotation not in (tl.constexpr, "tl.constexpr")]
    return triton.jit(function, do_not_specialize=plain)


TILE = tl.constexpr(2048)
WORDS = tl.constexpr(64)
QUADS = tl.constexpr(512)

# columns of the table; those of arrays are addresses, 0 for none
NUMEL = tl.constexpr(0)
FIRST_TILE = tl.constexpr(1)
PARAM = tl.constexpr(2)
MOMENTUM = tl.constexpr(3)
RESIDUAL = tl.constexpr(4)
GRAD = tl.constexpr(5)
KEEP = tl.constexpr(6)  # 1: c stays whole, somebody selects from it
MASK_KIND = tl.constexpr(7)
MASK_DATA = tl.constexpr(8)  # address of the mask's payload or indices; first entry of a range
MASK_K = tl.constexpr(9)
ROWS = tl.constexpr(10)  # second moments of the output rows: row of entry i = i // ROW_STRIDE % ROW_COUNT
ROW_STRIDE = tl.constexpr(11)
ROW_COUNT = tl.constexpr(12)
GROUP = tl.constexpr(13)  # tensors of other dtypes are the business of another launch
FIELDS = tl.constexpr(14)

# columns of `numbers`, fp32[tensors, NUMBERS]
BETA1 = tl.constexpr(0)
REST1 = tl.constexpr(1)  # 1 - beta1
BETA2 = tl.constexpr(2)
REST2 = tl.constexpr(3)
BIAS2 = tl.constexpr(4)  # sqrt(1 - beta2^t)
EPS = tl.constexpr(5)
STEP_SIZE = tl.constexpr(6)  # lr / (1 - beta1^t)
DECAY = tl.constexpr(7)  # 1 - lr * weight_decay
INVERSE_REST1 = tl.constexpr(8)
INVERSE_BIAS2 = tl.constexpr(9)
NUMBERS = tl.constexpr(10)


@triton.jit
def locate(table, tile_tensor, tile):
    """The tile's tensor, its row of the table, the tile's first entry and how many entries it has."""
    tensor = tl.load(tile_tensor + tile).to(tl.int64)
    row = table + tensor * FIELDS
    start = (tile - tl.load(row + FIRST_TILE)) * TILE
    left = tl.minimum(tl.load(row + NUMEL) - start, TILE).to(tl.int32)
    return tensor, row, start, left


@triton.jit
def array(row, FIELD: tl.constexpr, TYPE: tl.constexpr, ALIGN: tl.constexpr):
    """The array that a column of the table points to, ALIGN bytes known to divide its address."""
    return tl.multiple_of(tl.load(row + FIELD).to(tl.pointer_type(TYPE)), ALIGN)


@triton.jit
def load_tile(x, e, left, TAIL: tl.constexpr):
    """x[e], zeros behind the tile's end. TAIL: the tile may be short; a mask would make every access narrow."""
    if TAIL:
        return tl.load(x + e, mask=e < left, other=0)
    else:
        return tl.load(x + e)


@triton.jit
def store_tile(x, values, e, left, TAIL: tl.constexpr):
    """x[e] <- values, nothing behind the tile's end."""
    if TAIL:
        tl.store(x + e, values, mask=e < left)
    else:
        tl.store(x + e, values)


@triton.jit
def entries():
    """int32[QUADS, 4]: the tile's entries."""
    return tl.arange(0, QUADS)[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def words_of(x, tile):
    """[QUADS, 1]: the word of each four entries, of an array with WORDS of them a tile."""
    return tl.load(x + tile * WORDS + (tl.arange(0, QUADS)[:, None] >> 3))


@triton.jit
def on_mask(words, e):
    """bool[QUADS, 4]: whether the entry's bit is set."""
    return ((words >> (e & 31)) & 1) != 0


@triton.jit
def near_mask(words, e):
    """bool[QUADS, 4]: whether a bit is set in the entry's sector, 32 bytes of fp32; the same for each four."""
    sector = (words >> (tl.arange(0, QUADS)[:, None] * 4 & 24)) & 255
    return tl.broadcast_to(sector != 0, e.shape)


@triton.jit
def population(word):
    """Set bits of each word; compilers know this for one instruction."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return ((((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24) & 63


@triton.jit
def places(tile_start, word_before, words, e, tile):
    """int64[QUADS, 4]: the place among all sent values of each entry whose bit is set."""
    below = population(words & ((1 << (e & 31)) - 1))
    return tl.load(tile_start + tile) + (words_of(word_before, tile).to(tl.int32) + below)


@triton.jit
def scatter(target, values, on, ASSEMBLY: tl.constexpr):
    """target[...] <- values of 32 or 16 bits where `on`. ASSEMBLY, outside the interpreter: as the values lie.

    A plain store to scattered places is first brought, through shared memory, to a layout that suits it no better.
    """
    if not ASSEMBLY:
        tl.store(target, values, mask=on)
    elif values.dtype.primitive_bitwidth == 32:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b32 [$1], $2; mov.u32 $0, 0; }", "=r,l,r,r",
            [target.to(tl.int64), values.to(tl.int32, bitcast=True), on.to(tl.int32)], tl.int32, False, 1)  # fmt: skip
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b16 [$1], $2; mov.u32 $0, 0; }", "=r,l,h,r",
            [target.to(tl.int64), values.to(tl.int16, bitcast=True), on.to(tl.int32)], tl.int32, False, 1)  # fmt: skip
