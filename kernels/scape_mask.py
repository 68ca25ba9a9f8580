"""Kernels that turn every kind of mask into bits (see scape_tile.py)."""

import triton
import triton.language as tl

from .scape_tile import MASK_DATA, MASK_K, MASK_KIND, NUMEL, TILE, WORDS, kernel, locate

FULL = tl.constexpr(0)
RANGE = tl.constexpr(1)  # MASK_K entries from MASK_DATA on, wrapping around
BITMASK = tl.constexpr(2)
BLOCK256 = tl.constexpr(3)
LIST = tl.constexpr(4)
BLOCK = tl.constexpr(256)
TILE_BLOCKS = tl.constexpr(8)


@triton.jit
def _payload(row):
    return tl.load(row + MASK_DATA).to(tl.pointer_type(tl.uint8))


@triton.jit
def _block_counts(payload, start, numel):
    """int32[TILE_BLOCKS]: how many entries of each of the tile's blocks a block256 payload holds."""
    block = start // BLOCK + tl.arange(0, TILE_BLOCKS)
    inside = block * BLOCK < numel
    # the payload may start anywhere in a longer message, so 16 bits come as two bytes
    low = tl.load(payload + 2 * block, mask=inside, other=0).to(tl.int32)
    return low + (tl.load(payload + 2 * block + 1, mask=inside, other=0).to(tl.int32) << 8)


@kernel
def fill_kernel(table, tile_tensor, bits, counts):
    """bits and counts (int32[tiles], set bits a tile) of full, range and bitmask; of block256 counts; zeros else."""
    tensor, row, start, left = locate(table, tile_tensor)
    kind, numel = tl.load(row + MASK_KIND), tl.load(row + NUMEL)
    e = tl.reshape(tl.arange(0, TILE), [WORDS, 32])
    chosen = tl.zeros([WORDS, 32], tl.int32)
    if kind == FULL:
        chosen = (e < left).to(tl.int32)
    elif kind == RANGE:
        after = start + e - tl.load(row + MASK_DATA)
        after = tl.where(after < 0, after + numel, after)
        chosen = ((e < left) & (after < tl.load(row + MASK_K))).to(tl.int32)
    elif kind == BITMASK:
        word = tl.load(_payload(row) + start // 8 + (e >> 3), mask=e < left, other=0).to(tl.int32)
        chosen = (word >> (e & 7)) & 1
    total = tl.sum(tl.sum(chosen, 1), 0)
    if kind == BLOCK256:
        total = tl.sum(_block_counts(_payload(row), start, numel), 0)
    tile = tl.program_id(0).to(tl.int64)
    tl.store(bits + tile * WORDS + tl.arange(0, WORDS), tl.sum(chosen << (e & 31), 1))
    tl.store(counts + tile, total)


@kernel
def scatter_blocks_kernel(table, tile_tensor, bits, tile_start):
    """The bits of block256 payloads, over zeros."""
    tensor, row, start, left = locate(table, tile_tensor)
    if tl.load(row + MASK_KIND) == BLOCK256:
        numel, payload = tl.load(row + NUMEL), _payload(row)
        count = _block_counts(payload, start, numel)
        tile = tl.program_id(0).to(tl.int64)
        before = tl.load(tile_start + tile) - tl.load(tile_start + tile - start // TILE)
        first = before + tl.cumsum(count, 0) - count
        lane = tl.arange(0, BLOCK)[None, :]
        there = lane < count[:, None]
        offsets = payload + 2 * ((numel + BLOCK - 1) // BLOCK)
        at = tl.load(offsets + first[:, None] + lane, mask=there, other=0).to(tl.int32)
        word = tl.arange(0, TILE_BLOCKS)[:, None] * (BLOCK // 32) + (at >> 5)
        one = tl.full([TILE_BLOCKS, BLOCK], 1, tl.int32)
        tl.atomic_or(bits + tile * WORDS + word, one << (at & 31), mask=there, sem="relaxed")


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
def count_kernel(table, tile_tensor, bits, counts):
    """counts of the tensors whose masks are lists, from their bits."""
    tensor, row, start, left = locate(table, tile_tensor)
    if tl.load(row + MASK_KIND) == LIST:
        tile = tl.program_id(0).to(tl.int64)
        words = tl.load(bits + tile * WORDS + tl.arange(0, WORDS))
        bit = (words[:, None] >> tl.arange(0, 32)[None, :]) & 1
        tl.store(counts + tile, tl.sum(tl.sum(bit, 1), 0))
