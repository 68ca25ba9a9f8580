"""Kernels that turn every kind of mask into bits (see scape_tile.py), TILES tiles a program."""

import triton
import triton.language as tl

from .scape_tile import FIELDS, FIRST_TILE, MASK_DATA, MASK_K, MASK_KIND, NUMEL, TILE, WORDS, kernel, population

FULL = tl.constexpr(0)
RANGE = tl.constexpr(1)  # MASK_K entries from MASK_DATA on, wrapping around
BITMASK = tl.constexpr(2)
BLOCK256 = tl.constexpr(3)
LIST = tl.constexpr(4)
BLOCK = tl.constexpr(256)
TILE_BLOCKS = tl.constexpr(8)


@triton.jit
def _locate(table, tile_tensor, tiles, TILES: tl.constexpr):
    """Of TILES tiles: their numbers, rows of the table, first entries, and which of them there are."""
    tile = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)
    there = tile < tiles
    row = table + tl.load(tile_tensor + tile, mask=there, other=0).to(tl.int64) * FIELDS
    start = (tile - tl.load(row + FIRST_TILE, mask=there, other=0)) * TILE
    return tile, row, start, there


@triton.jit
def _lowest(count):
    """Words with the lowest `count` bits set, none below 0, all from 32 on."""
    some = (1 << tl.maximum(tl.minimum(count, 31), 0).to(tl.int32)) - 1
    return tl.where(count >= 32, -1, some)


@triton.jit
def _payload(row, there):
    return tl.load(row + MASK_DATA, mask=there, other=0).to(tl.pointer_type(tl.uint8))


@triton.jit
def _block_counts(payload, start, numel, there):
    """int32[TILES, TILE_BLOCKS]: how many entries of each of the tiles' blocks a block256 payload holds."""
    block = (start // BLOCK)[:, None] + tl.arange(0, TILE_BLOCKS)[None, :]
    inside = there[:, None] & (block * BLOCK < numel[:, None])
    # the payload may start anywhere in a longer message, so 16 bits come as two bytes
    low = tl.load(payload[:, None] + 2 * block, mask=inside, other=0).to(tl.int32)
    return low + (tl.load(payload[:, None] + 2 * block + 1, mask=inside, other=0).to(tl.int32) << 8)


@kernel
def fill_kernel(table, tile_tensor, bits, counts, tiles: tl.int64, TILES: tl.constexpr):
    """bits and counts (int32[tiles], set bits a tile) of full, range and bitmask; of block256 counts; zeros else."""
    tile, row, start, there = _locate(table, tile_tensor, tiles, TILES)
    kind, numel = tl.load(row + MASK_KIND, mask=there, other=0), tl.load(row + NUMEL, mask=there, other=0)
    first, k = tl.load(row + MASK_DATA, mask=there, other=0), tl.load(row + MASK_K, mask=there, other=0)
    place = start[:, None] + tl.arange(0, WORDS)[None, :] * 32  # of each word's first entry
    inside = _lowest(numel[:, None] - place)
    after, wrapped = first[:, None] - place, (first + k - numel)[:, None] - place
    between = _lowest(after + k[:, None]) & ~_lowest(after) | _lowest(wrapped)
    packed = tl.zeros([TILES, WORDS], tl.int32)
    payload, size = _payload(row, there)[:, None], (numel + 7)[:, None] // 8
    for byte in tl.static_range(4):
        at = place // 8 + byte
        mask = (kind == BITMASK)[:, None] & there[:, None] & (at < size)
        packed |= tl.load(payload + at, mask=mask, other=0).to(tl.int32) << (8 * byte)
    word = tl.where((kind == FULL)[:, None], inside, tl.where((kind == RANGE)[:, None], between & inside, packed))
    total = tl.sum(population(word), 1)
    is_blocks = kind == BLOCK256
    total += tl.sum(_block_counts(_payload(row, there), start, numel, there & is_blocks), 1)
    tl.store(bits + tile[:, None] * WORDS + tl.arange(0, WORDS)[None, :], word, mask=there[:, None])
    tl.store(counts + tile, total, mask=there)


@kernel
def scatter_blocks_kernel(table, tile_tensor, bits, tile_start, tiles: tl.int64, TILES: tl.constexpr,
                          LANES: tl.constexpr):  # fmt: skip
    """The bits of block256 payloads, over zeros."""
    tile, row, start, there = _locate(table, tile_tensor, tiles, TILES)
    there = there & (tl.load(row + MASK_KIND, mask=there, other=0) == BLOCK256)
    numel, payload = tl.load(row + NUMEL, mask=there, other=0), _payload(row, there)
    count = _block_counts(payload, start, numel, there)
    ends, total = tl.cumsum(count, 1), tl.sum(count, 1)
    before = tl.load(tile_start + tile, mask=there, other=0)
    before -= tl.load(tile_start + tile - start // TILE, mask=there, other=0)
    offsets = payload + 2 * ((numel + BLOCK - 1) // BLOCK) + before
    one = tl.full([TILES, LANES], 1, tl.int32)
    for i in range(0, tl.max(total, 0), LANES):
        entry = i + tl.arange(0, LANES)[None, :]
        inside = entry < total[:, None]
        at = tl.load(offsets[:, None] + entry, mask=inside, other=0).to(tl.int32)
        block = tl.sum((entry[:, :, None] >= ends[:, None, :]).to(tl.int32), 2)
        word = tile[:, None] * WORDS + block * (BLOCK // 32) + (at >> 5)
        tl.atomic_or(bits + word, one << (at & 31), mask=inside, sem="relaxed")


@kernel
def scatter_list_kernel(indices, bits, first_tile: tl.int64, k: tl.int64, LANES: tl.constexpr):
    """The bits of one tensor's k indices, int64[k] or uint8[4 * k] (int32, little-endian), over zeros."""
    i = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    there = i < k
    if indices.dtype.element_ty == tl.int64:
        at = tl.load(indices + i, mask=there, other=0)
    else:
        at = tl.zeros([LANES], tl.int64)
        for byte in tl.static_range(4):  # the payload may start anywhere in a longer message
            at += tl.load(indices + 4 * i + byte, mask=there, other=0).to(tl.int64) << (8 * byte)
    one = tl.full([LANES], 1, tl.int32)
    tl.atomic_or(bits + first_tile * WORDS + (at >> 5), one << (at & 31).to(tl.int32), mask=there, sem="relaxed")


@kernel
def rank_kernel(table, tile_tensor, bits, counts, word_before, tiles: tl.int64, TILES: tl.constexpr):
    """word_before int16[tiles * WORDS]: set bits of the tile before each word; counts of all but block256."""
    tile, row, start, there = _locate(table, tile_tensor, tiles, TILES)
    at = tile[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    count = population(tl.load(bits + at, mask=there[:, None], other=0))
    tl.store(word_before + at, (tl.cumsum(count, 1) - count).to(tl.int16), mask=there[:, None])
    known = tl.load(row + MASK_KIND, mask=there, other=0) == BLOCK256
    tl.store(counts + tile, tl.sum(count, 1), mask=there & (known == 0))
