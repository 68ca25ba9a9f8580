"""Exact top-k of |x| over many tensors: one pass over x, the rest over the few entries that may be chosen.

bracket   a sample of each tensor gives two values that its k-th largest |x| lies between, nearly always
scan      reads x once and lists the entries from the lower one up: bits of |x| and place in the tile
narrow    radix select on the listed bits, from the bracket's width down; a bracket that missed, or a list that
          overflowed (many equal values), reads x itself instead
count     entries above and at the threshold, a tile
emit      the mask in the form it travels in, ties by lowest index

Bits of a non-negative float are ordered as its values, NaN above all. Integers only, so nothing depends on the order
in which programs run but where in the list a tile's entries lie, which no result shows.
"""

import triton
import triton.language as tl

from .scape_tile import kernel, scatter

# entries of a tile; columns of the table
TILE = tl.constexpr(4096)
BLOCK = tl.constexpr(256)
NUMEL = tl.constexpr(0)
FIRST_TILE = tl.constexpr(1)
DATA = tl.constexpr(2)  # address of x
K = tl.constexpr(3)
ROOM = tl.constexpr(4)  # entries that this tensor's part of the list has room for
LIST = tl.constexpr(5)  # where that part begins
RANK_HIGH = tl.constexpr(6)  # ranks in the sample of the bracket's ends, from 1 for the largest; 0 for none
RANK_LOW = tl.constexpr(7)
FORM = tl.constexpr(8)
OUT = tl.constexpr(9)  # address of the mask to write
FIELDS = tl.constexpr(10)

# forms of a mask
BITMASK = tl.constexpr(0)
BLOCK256 = tl.constexpr(1)
INT32 = tl.constexpr(2)
BOOL = tl.constexpr(3)

# columns of the state, int32[tensors, STATES]
LOW = tl.constexpr(0)  # the range being narrowed: [LOW, LOW + (USED << SHIFT))
SHIFT = tl.constexpr(1)
NEED = tl.constexpr(2)  # rank of the threshold among the entries of the range; at the end: ties to take
DONE = tl.constexpr(3)  # 1: LOW is the threshold
WHOLE = tl.constexpr(4)  # 1: the list will not do
LISTED = tl.constexpr(5)  # entries from the bracket's lower end up, listed or not
ABOVE = tl.constexpr(6)  # entries above the first range
USED = tl.constexpr(7)  # bins of the range
STATES = tl.constexpr(8)

SAMPLES = tl.constexpr(16384)
BINS = tl.constexpr(2048)
LARGEST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _magnitude(bits):
    return bits & LARGEST


@triton.jit
def _shift_for(width):
    """The smallest shift at which BINS bins hold 0 to `width`."""
    shift = 0
    while (width >> shift) >= BINS:
        shift += 1
    return shift


@triton.jit
def _ranked(sample, rank):
    """The rank-th largest of the sample, bit by bit."""
    value = 0
    for i in range(31):
        trial = value | (1 << (30 - i))
        value = tl.where(tl.sum((sample >= trial).to(tl.int32), 0) >= rank, trial, value)
    return value


@kernel
def bracket_kernel(table, state):
    """Start the state of program_id(0)'s tensor: its range runs from one rank of a sample to another."""
    tensor = tl.program_id(0).to(tl.int64)
    row = table + tensor * FIELDS
    numel, k = tl.load(row + NUMEL), tl.load(row + K)
    x = tl.load(row + DATA).to(tl.pointer_type(tl.int32))
    i = tl.arange(0, SAMPLES).to(tl.int64)
    if numel <= SAMPLES:
        sample = tl.where(i < numel, _magnitude(tl.load(x + i, mask=i < numel, other=0)), -1)
    else:
        # one entry of each of SAMPLES equal strata, at a hashed offset: weights have periods of their own
        first, width = i * numel // SAMPLES, numel // SAMPLES
        mixed = (i * 0x9E3779B1) & 0xFFFFFFFF
        mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
        sample = _magnitude(tl.load(x + first + (mixed ^ (mixed >> 12)) % width))
    rank_low, rank_high = tl.load(row + RANK_LOW).to(tl.int32), tl.load(row + RANK_HIGH).to(tl.int32)
    low = tl.where(rank_low > 0, _ranked(sample, rank_low), 0)
    high = tl.where(rank_high > 0, _ranked(sample, rank_high), LARGEST)
    mine = state + tensor * STATES
    tl.store(mine + LOW, low)
    tl.store(mine + SHIFT, _shift_for(high - low))
    tl.store(mine + USED, BINS)
    tl.store(mine + NEED, k.to(tl.int32))
    tl.store(mine + DONE, 0)
    tl.store(mine + WHOLE, 0)
    tl.store(mine + LISTED, 0)
    tl.store(mine + ABOVE, 0)


@triton.jit
def _locate(table, tile_tensor):
    tile = tl.program_id(0)
    tensor = tl.load(tile_tensor + tile).to(tl.int64)
    row = table + tensor * FIELDS
    start = (tile - tl.load(row + FIRST_TILE)) * TILE
    left = tl.minimum(tl.load(row + NUMEL) - start, TILE).to(tl.int32)
    return tensor, row, start, left


@triton.jit
def _scan(row, mine, start, left, list_bits, list_place, tile_list, ALIGN: tl.constexpr, ASSEMBLY: tl.constexpr,
          TAIL: tl.constexpr):  # fmt: skip
    e = tl.arange(0, TILE // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    x = tl.multiple_of(tl.load(row + DATA).to(tl.pointer_type(tl.int32)), ALIGN) + start
    if TAIL:
        bits = tl.where(e < left, _magnitude(tl.load(x + e, mask=e < left, other=0)), -1)
    else:
        bits = _magnitude(tl.load(x + e))
    candidate = (bits >= tl.load(mine + LOW)).to(tl.int32)
    # of four neighbours in one thread, then of all fours
    fours = tl.sum(candidate, 1)
    place = (tl.cumsum(fours, 0) - fours)[:, None] + (tl.cumsum(candidate, 1) - candidate)
    found = tl.sum(fours, 0)
    before = tl.atomic_add(mine + LISTED, found, sem="relaxed")
    tile = tl.program_id(0).to(tl.int64)
    tl.store(tile_list + 2 * tile, before)
    tl.store(tile_list + 2 * tile + 1, found)
    if before + found <= tl.load(row + ROOM):
        at = tl.load(row + LIST) + before + place
        scatter(list_bits + at, bits, candidate != 0, ASSEMBLY)
        scatter(list_place + at, e.to(tl.int16), candidate != 0, ASSEMBLY)


@kernel
def scan_kernel(table, tile_tensor, state, list_bits, list_place, tile_list, ALIGN: tl.constexpr,
                ASSEMBLY: tl.constexpr):  # fmt: skip
    """List the entries from LOW up. tile_list int32[tiles, 2]: where a tile's lie in the tensor's list, how many."""
    tensor, row, start, left = _locate(table, tile_tensor)
    mine = state + tensor * STATES
    if left == TILE:
        _scan(row, mine, start, left, list_bits, list_place, tile_list, ALIGN, ASSEMBLY, False)
    else:
        _scan(row, mine, start, left, list_bits, list_place, tile_list, ALIGN, ASSEMBLY, True)


@triton.jit
def _reads_whole(row, mine):
    """Whether the tensor's list is of no use."""
    return (tl.load(mine + WHOLE) != 0) | (tl.load(mine + LISTED) > tl.load(row + ROOM))


@kernel
def histogram_kernel(table, state, list_bits, histogram, FIRST: tl.constexpr, LANES: tl.constexpr):
    """Count the range's bins of tensor program_id(1) into histogram int32[tensors, BINS], zeros before."""
    tensor = tl.program_id(1).to(tl.int64)
    row, mine = table + tensor * FIELDS, state + tensor * STATES
    if tl.load(mine + DONE) == 0:
        low, shift, used = tl.load(mine + LOW), tl.load(mine + SHIFT), tl.load(mine + USED)
        source, count = list_bits + tl.load(row + LIST), tl.load(mine + LISTED).to(tl.int64)
        if _reads_whole(row, mine):
            source = tl.load(row + DATA).to(tl.pointer_type(tl.int32))
            count = tl.load(row + NUMEL)
        above = tl.zeros([LANES], tl.int32)
        for i in range(tl.program_id(0) * LANES, count, tl.num_programs(0) * LANES):
            at = i + tl.arange(0, LANES)
            inside = at < count
            bits = _magnitude(tl.load(source + at, mask=inside, other=0))
            bin = (bits - low) >> shift
            inside = inside & (bits >= low)
            above += (inside & (bin >= used)).to(tl.int32)
            one = tl.full([LANES], 1, tl.int32)
            tl.atomic_add(histogram + tensor * BINS + bin, one, mask=inside & (bin < used), sem="relaxed")
        if FIRST:
            tl.atomic_add(mine + ABOVE, tl.sum(above, 0), sem="relaxed")


@kernel
def narrow_kernel(table, state, histogram, FIRST: tl.constexpr):
    """The next range of program_id(0)'s tensor: one bin of the last, or all that is left if the bracket missed."""
    tensor = tl.program_id(0).to(tl.int64)
    mine = state + tensor * STATES
    if tl.load(mine + DONE) == 0:
        low, shift, need = tl.load(mine + LOW), tl.load(mine + SHIFT), tl.load(mine + NEED)
        bins = tl.arange(0, BINS)
        count = tl.load(histogram + tensor * BINS + bins)
        tl.store(histogram + tensor * BINS + bins, tl.zeros([BINS], tl.int32))
        total = tl.sum(count, 0)
        above = 0
        if FIRST:
            above = tl.load(mine + ABOVE)
        if need <= above:
            low += BINS << shift
            tl.store(mine + LOW, low)
            tl.store(mine + SHIFT, _shift_for(LARGEST - low))
        elif need > above + total:
            tl.store(mine + LOW, 0)
            tl.store(mine + SHIFT, _shift_for(LARGEST))
            tl.store(mine + WHOLE, 1)
        else:
            need -= above
            from_top = total - tl.cumsum(count, 0) + count
            bin = tl.sum((from_top >= need).to(tl.int32), 0) - 1
            tl.store(mine + LOW, low + (bin << shift))
            tl.store(mine + NEED, need - tl.sum(tl.where(bins > bin, count, 0), 0))
            finer = tl.maximum(shift - 11, 0)
            tl.store(mine + SHIFT, finer)
            tl.store(mine + USED, 1 << (shift - finer))
            tl.store(mine + DONE, (shift == 0).to(tl.int32))


@triton.jit
def _tile_source(row, mine, start, left, list_bits, tile_list):
    """Where the bits of the tile's candidates, or of all its entries, begin, and how many there are."""
    tile = tl.program_id(0).to(tl.int64)
    source = list_bits + tl.load(row + LIST) + tl.load(tile_list + 2 * tile)
    count, whole = tl.load(tile_list + 2 * tile + 1), _reads_whole(row, mine)
    if whole:
        source = tl.load(row + DATA).to(tl.pointer_type(tl.int32)) + start
        count = left
    return source, count, whole


@kernel
def count_kernel(table, tile_tensor, state, list_bits, tile_list, counts, tiles: tl.int64, LANES: tl.constexpr):
    """counts int32[2, tiles]: entries above the threshold, and at it."""
    tensor, row, start, left = _locate(table, tile_tensor)
    mine = state + tensor * STATES
    threshold = tl.load(mine + LOW)
    source, count, whole = _tile_source(row, mine, start, left, list_bits, tile_list)
    above, tied = tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.int32)
    for i in range(0, count, LANES):
        at = i + tl.arange(0, LANES)
        bits = tl.where(at < count, _magnitude(tl.load(source + at, mask=at < count, other=0)), -1)
        above += (bits > threshold).to(tl.int32)
        tied += (bits == threshold).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(above, 0))
    tl.store(counts + tiles + tl.program_id(0), tl.sum(tied, 0))


@triton.jit
def _before(sums, row, start):
    """How many entries of a tensor precede the tile, of exclusive sums over all tiles."""
    tile = tl.program_id(0).to(tl.int64)
    return (tl.load(sums + tile) - tl.load(sums + tile - start // TILE)).to(tl.int32)


@kernel
def emit_list_kernel(table, tile_tensor, state, list_bits, list_place, tile_list, sums, tiles: tl.int64,
                     LANES: tl.constexpr):  # fmt: skip
    """Write masks of the forms INT32 and BLOCK256. sums int64[2, tiles]: counts of the tiles before each."""
    tensor, row, start, left = _locate(table, tile_tensor)
    form = tl.load(row + FORM)
    if (form == INT32) | (form == BLOCK256):
        mine = state + tensor * STATES
        threshold, room = tl.load(mine + LOW), tl.load(mine + NEED)
        source, count, whole = _tile_source(row, mine, start, left, list_bits, tile_list)
        listed = list_place + tl.load(row + LIST) + tl.load(tile_list + 2 * tl.program_id(0).to(tl.int64))
        ties = _before(sums + tiles, row, start)
        chosen = _before(sums, row, start) + tl.minimum(ties, room)
        blocks = (tl.load(row + NUMEL) + BLOCK - 1) // BLOCK
        out = tl.load(row + OUT).to(tl.pointer_type(tl.uint8))
        wide = tl.load(row + OUT).to(tl.pointer_type(tl.int32))
        per_block = tl.zeros([32], tl.int32)  # of which a tile has 16
        for i in range(0, count, LANES):
            at = i + tl.arange(0, LANES)
            inside = at < count
            bits = tl.where(inside, _magnitude(tl.load(source + at, mask=inside, other=0)), -1)
            place = at
            if whole == 0:
                place = tl.load(listed + at, mask=inside, other=0).to(tl.int32)
            tied = (bits == threshold).to(tl.int32)
            rank = ties + tl.cumsum(tied, 0)
            take = (bits > threshold) | ((tied != 0) & (rank <= room))
            to = chosen + tl.cumsum(take.to(tl.int32), 0) - 1
            if form == INT32:
                tl.store(wide + to, (start + place).to(tl.int32), mask=take)
            else:
                tl.store(out + 2 * blocks + to, (place & 255).to(tl.uint8), mask=take)
                per_block += tl.histogram(place // BLOCK, 32, mask=take)
            ties += tl.sum(tied, 0)
            chosen += tl.sum(take.to(tl.int32), 0)
        if form == BLOCK256:
            b = tl.arange(0, 32)
            there = (b < TILE // BLOCK) & (start // BLOCK + b < blocks)
            halves = tl.load(row + OUT).to(tl.pointer_type(tl.int16)) + start // BLOCK
            tl.store(halves + b, per_block.to(tl.int16), mask=there)


@kernel
def emit_dense_kernel(table, tile_tensor, state, sums, tiles: tl.int64, ALIGN: tl.constexpr):
    """Write masks of the forms BITMASK and BOOL, from x itself."""
    tensor, row, start, left = _locate(table, tile_tensor)
    form = tl.load(row + FORM)
    if (form == BITMASK) | (form == BOOL):
        mine = state + tensor * STATES
        threshold, room = tl.load(mine + LOW), tl.load(mine + NEED)
        e = tl.arange(0, TILE)
        x = tl.multiple_of(tl.load(row + DATA).to(tl.pointer_type(tl.int32)), ALIGN) + start
        bits = tl.where(e < left, _magnitude(tl.load(x + e, mask=e < left, other=0)), -1)
        tied = (bits == threshold).to(tl.int32)
        rank = _before(sums + tiles, row, start) + tl.cumsum(tied, 0)
        take = ((bits > threshold) | ((tied != 0) & (rank <= room))).to(tl.int32)
        out = tl.load(row + OUT).to(tl.pointer_type(tl.uint8))
        if form == BOOL:
            tl.store(out + start + e, take.to(tl.uint8), mask=e < left)
        else:
            bit = tl.arange(0, 8)[None, :]
            packed = tl.sum(tl.reshape(take, [TILE // 8, 8]) << bit, 1)
            b = tl.arange(0, TILE // 8)
            tl.store(out + start // 8 + b, packed.to(tl.uint8), mask=8 * b < left)
