"""Collectives over symmetric memory in one launch each: one_shot_kernel for two ranks, exchange_kernel for any number.

A program takes every num_programs-th tile of each message and waits only for what the same program of a peer sends, so
fewer programs resident than launched is no deadlock. A message in an inbox: words of all its tiles, first scales,
second scales, then 256 bytes for taco's short last group. Addresses are int64; gave_up, patience: symm_memory.py.
"""

import triton
import triton.language as tl

from .groups import GROUP, _load_pieces, add_tiles, element_offsets, join8, through_half
from .symm_codec import canonical_bits, decode, encode
from .symm_memory import EMPTY, clear, end_call, push, wait, wait_items
from .taco_tail import _decode as decode_tail
from .taco_tail import _encode as encode_tail

TAIL_BYTES = tl.constexpr(256)


@triton.jit
def _groups(tile, ROWS: tl.constexpr):
    return tile * ROWS + tl.arange(0, ROWS)


@triton.jit
def _load(x, tile, numel, ROWS: tl.constexpr, PIECES: tl.constexpr):
    """Tile number `tile` of x as fp32, zeros behind `numel`."""
    if (tile + 1) * (ROWS * GROUP) <= numel:  # an element-wise mask would make every load scalar
        pieces = _load_pieces(x, _groups(tile, ROWS), numel, PIECES, False)
    else:
        pieces = _load_pieces(x, _groups(tile, ROWS), numel, PIECES, True)
    return pieces


@triton.jit
def _store(out, pieces, tile, numel, ROWS: tl.constexpr, PIECES: tl.constexpr):
    """Round the pieces to out's type and write them, nothing behind `numel`."""
    group = _groups(tile, ROWS)
    for p in tl.static_range(PIECES):
        bits = canonical_bits(join8(pieces[p]), out)
        target = out.to(tl.pointer_type(bits.dtype)) + element_offsets(group, p, PIECES)
        if (tile + 1) * (ROWS * GROUP) <= numel:
            tl.store(target, bits)
        else:
            tl.store(target, bits, mask=element_offsets(group, p, PIECES) < numel)


@triton.jit
def _send(slot, tiles, tile, words, first, second, ROWS: tl.constexpr, PIECES: tl.constexpr, WORDS: tl.constexpr,
          SCALES: tl.constexpr):  # fmt: skip
    """Push a tile of the message at address `slot`, which has `tiles` tiles."""
    TILE: tl.constexpr = ROWS * (16 // PIECES) * WORDS * 4
    push(slot + tile * TILE, words)
    scales = slot + tiles * TILE
    if SCALES == 1:
        tl.store(scales.to(tl.pointer_type(tl.int16)) + _groups(tile, ROWS), first.to(tl.int16))
    elif SCALES == 2:
        tl.store(scales.to(tl.pointer_type(tl.int32)) + _groups(tile, ROWS), first)
        tl.store(scales.to(tl.pointer_type(tl.int32)) + _groups(tiles + tile, ROWS), second)


@triton.jit
def _receive(slot, tiles, tile, gave_up, patience, ROWS: tl.constexpr, PIECES: tl.constexpr, WORDS: tl.constexpr,
             SCALES: tl.constexpr):  # fmt: skip
    """Wait for a tile, take it and clear its place: words, first and second scale int32[ROWS, LANES]."""
    LANES: tl.constexpr = 16 // PIECES
    TILE: tl.constexpr = ROWS * LANES * WORDS * 4
    scales = slot + tiles * TILE
    # every lane polls its group's scale: no trip through shared memory
    group = _groups(tile, ROWS)[:, None] + tl.zeros([1, LANES], tl.int64)
    first = tl.zeros([ROWS, LANES], tl.int32)
    second = first
    words = wait(slot + tile * TILE, gave_up, patience, ROWS, LANES, WORDS)
    if SCALES == 1:
        first = wait_items(scales + group * 2, gave_up, patience, 2)
    elif SCALES == 2:
        first = wait_items(scales + group * 4, gave_up, patience, 4)
        second = wait_items(scales + (tiles * ROWS + group) * 4, gave_up, patience, 4)
    tl.debug_barrier()  # all threads have read, those that share a scale too
    clear(slot + tile * TILE, ROWS, LANES, WORDS)
    if SCALES == 1:
        tl.store(scales.to(tl.pointer_type(tl.int16)) + _groups(tile, ROWS), EMPTY)
    elif SCALES == 2:
        tl.store(scales.to(tl.pointer_type(tl.int32)) + _groups(tile, ROWS), EMPTY)
        tl.store(scales.to(tl.pointer_type(tl.int32)) + _groups(tiles + tile, ROWS), EMPTY)
    return words, first, second


@triton.jit
def _load_tail(x, length):
    """The first `length` of x as fp32[1, 128], zeros behind."""
    i = tl.arange(0, GROUP)[None, :]
    return tl.load(x + i, mask=i < length, other=0.0).to(tl.float32)


@triton.jit
def _store_tail(out, values, length):
    i = tl.arange(0, GROUP)[None, :]
    bits = canonical_bits(values, out)
    tl.store(out.to(tl.pointer_type(bits.dtype)) + i, bits, mask=i < length)


@triton.jit
def _tail_words():
    return tl.arange(0, 64)[None, :].to(tl.int64)


@triton.jit
def _tail_message(x, length, scratch):
    """The 64 words of taco's message of the `length` first of x alone, by way of 256 bytes of own memory."""
    words = scratch.to(tl.pointer_type(tl.int32)) + _tail_words()
    tl.debug_barrier()
    tl.store(words, tl.zeros([1, 64], tl.int32))
    tl.debug_barrier()
    encode_tail(_load_tail(x, length), scratch.to(tl.pointer_type(tl.uint8)), length, 0, length, 1)
    tl.debug_barrier()
    return tl.load(words)


@triton.jit
def _tail_values(words, length, limit, scratch):
    """fp32[1, 128] of such a message."""
    tl.debug_barrier()
    tl.store(scratch.to(tl.pointer_type(tl.int32)) + _tail_words(), words)
    tl.debug_barrier()
    return decode_tail(scratch.to(tl.pointer_type(tl.uint8)), length, 0, length, limit, 1)


@triton.jit
def _tail_place(slot, tiles, ROWS: tl.constexpr, PIECES: tl.constexpr, WORDS: tl.constexpr):
    return slot + tiles * (ROWS * (16 // PIECES) * WORDS * 4 + ROWS * 8)


@triton.jit
def _send_tail(place, words):
    tl.store(place.to(tl.pointer_type(tl.int32)) + _tail_words(), words)


@triton.jit
def _receive_tail(place, gave_up, patience):
    words = wait_items(place + _tail_words() * 4, gave_up, patience, 4)
    tl.debug_barrier()
    tl.store(place.to(tl.pointer_type(tl.int32)) + _tail_words(), EMPTY)
    return words


@triton.jit(do_not_specialize=["x", "out", "mine", "peer", "counters", "scratch", "gave_up", "patience", "room",
                               "numel", "limit"])  # fmt: skip
def one_shot_kernel(x, out, mine: tl.int64, peer: tl.int64, counters: tl.int64, scratch: tl.int64, gave_up: tl.int64,
                    patience: tl.int64, room: tl.int64, numel: tl.int64, limit: tl.float32, QMAX: tl.constexpr,
                    BITS: tl.constexpr, HADAMARD: tl.constexpr, SCALES: tl.constexpr, WORDS: tl.constexpr,
                    ROWS: tl.constexpr, PIECES: tl.constexpr, X_ALIGN: tl.constexpr, OUT_ALIGN: tl.constexpr,
                    TAIL: tl.constexpr):  # fmt: skip
    """out[numel]: x plus the peer's x, each as its message decodes.

    mine, peer: two inboxes of `room` bytes each. The sum of two rounds alike in either order. TAIL: taco's last group
    is short.
    """
    counters = counters.to(tl.pointer_type(tl.int32))
    turn = (tl.load(counters) & 1).to(tl.int64) * room
    mine, peer = mine + turn, peer + turn
    pid, zero = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # what is known of an address needs an operation to hang on
    x, out = tl.multiple_of(x + zero, X_ALIGN), tl.multiple_of(out + zero, OUT_ALIGN)
    whole = numel // GROUP * GROUP if TAIL else numel
    tiles = tl.maximum((whole + ROWS * GROUP - 1) // (ROWS * GROUP), 1)
    for tile in tl.range(pid, tiles, tl.num_programs(0), num_stages=1):
        values = _load(x, tile, whole, ROWS, PIECES)
        words, first, second = encode(values, x, QMAX, BITS, HADAMARD, SCALES)
        _send(peer, tiles, tile, words, first, second, ROWS, PIECES, WORDS, SCALES)
        a = decode(words, first[:, None], second[:, None], limit, x, QMAX, BITS, HADAMARD, SCALES, True)
        words, first, second = _receive(mine, tiles, tile, gave_up, patience, ROWS, PIECES, WORDS, SCALES)
        b = decode(words, first, second, limit, x, QMAX, BITS, HADAMARD, SCALES, True)
        _store(out, add_tiles(a, b), tile, whole, ROWS, PIECES)
    if TAIL:
        if pid == tl.num_programs(0) - 1:
            length = (numel - whole).to(tl.int32)
            words = _tail_message(x + whole, length, scratch)
            _send_tail(_tail_place(peer, tiles, ROWS, PIECES, WORDS), words)
            a = _tail_values(words, length, limit, scratch)
            words = _receive_tail(_tail_place(mine, tiles, ROWS, PIECES, WORDS), gave_up, patience)
            _store_tail(out + whole, a + _tail_values(words, length, limit, scratch), length)
    end_call(counters)


@triton.jit
def _piece(rank, table, base, longer, extra, TABLE: tl.constexpr):
    """Start and length of that rank's piece: from a table of starts, or the first `longer` ones have `extra` more."""
    if TABLE:
        starts = table.to(tl.pointer_type(tl.int64)) + rank
        start, length = tl.load(starts), tl.load(starts + 1) - tl.load(starts)
    else:
        start = rank * base + tl.minimum(rank, longer) * extra
        length = base + (rank < longer).to(tl.int64) * extra
    return start, length


@triton.jit
def _whole(length, TAIL: tl.constexpr):
    return length // GROUP * GROUP if TAIL else length


@triton.jit
def _tiles(length, ROWS: tl.constexpr):
    """Tiles of a message; at least one: who receives nothing would not know that its peers have started the call."""
    return tl.maximum((length + ROWS * GROUP - 1) // (ROWS * GROUP), 1)


@triton.jit
def _sum_of_messages(inbox, slot, ranks, tiles, tile, gave_up, patience, limit, x, QMAX: tl.constexpr,
                     BITS: tl.constexpr, HADAMARD: tl.constexpr, SCALES: tl.constexpr, WORDS: tl.constexpr,
                     ROWS: tl.constexpr, PIECES: tl.constexpr):  # fmt: skip
    """A tile of the messages from all ranks, decoded and added in rank order."""
    words, first, second = _receive(inbox, tiles, tile, gave_up, patience, ROWS, PIECES, WORDS, SCALES)
    total = decode(words, first, second, limit, x, QMAX, BITS, HADAMARD, SCALES, True)
    for r in tl.range(1, ranks, num_stages=1):
        words, first, second = _receive(inbox + r * slot, tiles, tile, gave_up, patience, ROWS, PIECES, WORDS, SCALES)
        total = add_tiles(total, decode(words, first, second, limit, x, QMAX, BITS, HADAMARD, SCALES, True))
    return total


@triton.jit(do_not_specialize=["x", "out", "mine", "peers", "counters", "scratch", "gave_up", "patience", "room",
                               "slot", "rank", "ranks", "numel", "table", "base", "longer", "extra", "longest",
                               "limit"])  # fmt: skip
def exchange_kernel(x, out, mine: tl.int64, peers: tl.int64, counters: tl.int64, scratch: tl.int64, gave_up: tl.int64,
                    patience: tl.int64, room: tl.int64, slot: tl.int64, rank: tl.int64, ranks: tl.int64,
                    numel: tl.int64, table: tl.int64, base: tl.int64, longer: tl.int64, extra: tl.int64,
                    longest: tl.int64, limit: tl.float32, QMAX: tl.constexpr, BITS: tl.constexpr,
                    HADAMARD: tl.constexpr, SCALES: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr,
                    PIECES: tl.constexpr, X_ALIGN: tl.constexpr, OUT_ALIGN: tl.constexpr, SCATTER: tl.constexpr,
                    GATHER: tl.constexpr, HALF: tl.constexpr, EXACT: tl.constexpr, TABLE: tl.constexpr,
                    TAIL: tl.constexpr):  # fmt: skip
    """SCATTER: every rank's pieces of x to their owners, who sum; GATHER: the owners' pieces to every rank.

    Both: x and out are [numel], all pieces multiples of 128, the last may reach past numel; else out (SCATTER) or x
    (GATHER) is this rank's piece. `_piece` says where pieces lie, `longest` is the largest. mine, peers: address of
    this rank's two inboxes of `room` bytes each, and table of all ranks'; a message has `slot` bytes of one.
    HALF: a sum is rounded to fp16 before it is encoded again. EXACT: out keeps more than 16 bits.
    """
    counters = counters.to(tl.pointer_type(tl.int32))
    turn = (tl.load(counters) & 1).to(tl.int64) * room
    mine += turn
    peers = peers.to(tl.pointer_type(tl.int64))
    pid, zero = tl.program_id(0).to(tl.int64), tl.program_id(1)  # as in one_shot_kernel
    own_start, own_length = _piece(rank, table, base, longer, extra, TABLE)
    most = _tiles(_whole(longest, TAIL), ROWS)
    gathered = ranks * slot if SCATTER else slot * 0
    for tile in tl.range(pid, most, tl.num_programs(0), num_stages=1):
        if SCATTER:
            for i in tl.range(1, ranks + 1, num_stages=1):
                to = (rank + i) % ranks
                start, length = _piece(to, table, base, longer, extra, TABLE)
                if tile < _tiles(_whole(length, TAIL), ROWS):
                    length = tl.maximum(tl.minimum(length, numel - start), 0)
                    values = _load(tl.multiple_of(x + start, X_ALIGN), tile, _whole(length, TAIL), ROWS, PIECES)
                    words, first, second = encode(values, x, QMAX, BITS, HADAMARD, SCALES)
                    place = tl.load(peers + to) + turn + rank * slot
                    _send(place, most, tile, words, first, second, ROWS, PIECES, WORDS, SCALES)
        if tile < _tiles(_whole(own_length, TAIL), ROWS):
            if SCATTER:
                values = _sum_of_messages(
                    mine, slot, ranks, most, tile, gave_up, patience, limit, x, QMAX, BITS, HADAMARD, SCALES, WORDS,
                    ROWS, PIECES,
                )  # fmt: skip
                if HALF:
                    values = through_half(values)
            else:
                values = _load(tl.multiple_of(x + zero, X_ALIGN), tile, _whole(own_length, TAIL), ROWS, PIECES)
            if GATHER:
                words, first, second = encode(values, x, QMAX, BITS, HADAMARD, SCALES)
                for i in tl.range(1, ranks + 1, num_stages=1):
                    place = tl.load(peers + (rank + i) % ranks) + turn + gathered + rank * slot
                    _send(place, most, tile, words, first, second, ROWS, PIECES, WORDS, SCALES)
            else:
                target = tl.multiple_of(out + zero, OUT_ALIGN)
                _store(target, values, tile, _whole(own_length, TAIL), ROWS, PIECES)
        if GATHER:
            for i in tl.range(0, ranks, num_stages=1):
                source = (rank + i) % ranks
                start, length = _piece(source, table, base, longer, extra, TABLE)
                if tile < _tiles(_whole(length, TAIL), ROWS):
                    place = mine + gathered + source * slot
                    words, first, second = _receive(place, most, tile, gave_up, patience, ROWS, PIECES, WORDS, SCALES)
                    values = decode(words, first, second, limit, x, QMAX, BITS, HADAMARD, SCALES, EXACT)
                    length = tl.maximum(tl.minimum(length, numel - start), 0)
                    target = tl.multiple_of(out + start, OUT_ALIGN)
                    _store(target, values, tile, _whole(length, TAIL), ROWS, PIECES)
    if TAIL:
        if pid == tl.num_programs(0) - 1:
            _exchange_tails(
                x, out, mine, peers, turn, scratch, gave_up, patience, slot, rank, ranks, table, base, longer, extra,
                most, limit, WORDS, ROWS, PIECES, SCATTER, TABLE,
            )  # fmt: skip
    end_call(counters)


@triton.jit
def _exchange_tails(x, out, mine, peers, turn, scratch, gave_up, patience, slot, rank, ranks, table, base, longer,
                    extra, most, limit, WORDS: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr,
                    SCATTER: tl.constexpr, TABLE: tl.constexpr):  # fmt: skip
    """The short last groups of taco's pieces; a two-shot has none."""
    _, own = _piece(rank, table, base, longer, extra, TABLE)
    own_whole, own_short = own // GROUP * GROUP, (own % GROUP).to(tl.int32)
    for i in tl.range(1, ranks + 1, num_stages=1):
        to = (rank + i) % ranks
        start, length = _piece(to, table, base, longer, extra, TABLE)
        if not SCATTER:
            start, length = own * 0, own
        short = (length % GROUP).to(tl.int32)
        if short > 0:
            words = _tail_message(x + start + length // GROUP * GROUP, short, scratch)
            _send_tail(_tail_place(tl.load(peers + to) + turn + rank * slot, most, ROWS, PIECES, WORDS), words)
    total = tl.zeros([1, GROUP], tl.float32)
    for source in tl.range(0, ranks, num_stages=1):
        start, length = _piece(source, table, base, longer, extra, TABLE)
        if SCATTER:
            length = own
        short = (length % GROUP).to(tl.int32)
        if short > 0:
            place = _tail_place(mine + source * slot, most, ROWS, PIECES, WORDS)
            values = _tail_values(_receive_tail(place, gave_up, patience), short, limit, scratch)
            if SCATTER:
                # -0 + x keeps the sign of a first zero: 0 + -0 would not
                total = tl.where(source == 0, values, total + values)
            else:
                _store_tail(out + start + length // GROUP * GROUP, values, short)
    if SCATTER:
        if own_short > 0:
            _store_tail(out + own_whole, total, own_short)
