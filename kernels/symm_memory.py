"""Words into a peer's inbox and out of one's own: no flags, no fences, the data say that they have arrived.

An inbox is filled with ff once. A message never has a 32-bit word of ff (of its scales, no item), so a reader polls
until what it reads is something else, and puts the ff back. Every access is as wide as what is polled or wider, hence
never seen half. Two inboxes take turns by call; a rank in call k + 2 has read something of call k + 1 from every peer,
so every peer has ended call k and its clears. Triton's interpreter has no assembler: there, the same in plain Triton.
"""

import triton
import triton.language as tl

from .words import INTERPRETED

EMPTY = tl.constexpr(-1)
GAVE_UP = tl.constexpr(1)

_PUSH16 = tl.constexpr("st.relaxed.sys.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;")
_PUSH8 = tl.constexpr("st.relaxed.sys.global.v2.b32 [$1], {$2, $3}; mov.b32 $0, 0;")
_CLEAR16 = tl.constexpr("st.global.v4.b32 [$1], {$2, $2, $2, $2}; mov.b32 $0, 0;")
_CLEAR8 = tl.constexpr("st.global.v2.b32 [$1], {$2, $2}; mov.b32 $0, 0;")


def _poll(load: str, words: int, empty: str) -> str:
    """Assembler that repeats `load`, which fills `words` outputs, while one of them is `empty`.

    Inputs behind the outputs: address, address of the word that says we gave up, nanoseconds until then.
    The clock is read every 4096 polls only; `trap` ends the kernel, where a loop without end would take the GPU along.
    """
    lines = ["{", ".reg .pred p;", ".reg .u32 n, t;", ".reg .u64 since, now;", "mov.u32 n, 0;", "mov.u64 since, 0;"]
    lines += ["POLL:", load, "mov.u32 t, $0;", *(f"max.u32 t, t, ${i};" for i in range(1, words))]
    lines += [f"setp.ne.u32 p, t, {empty};", "@p bra ARRIVED;"]
    lines += ["add.u32 n, n, 1;", "and.b32 t, n, 0xfff;", "setp.ne.u32 p, t, 0;", "@p bra POLL;"]
    lines += ["mov.u64 now, %globaltimer;", "setp.eq.u64 p, since, 0;", "@p mov.u64 since, now;"]
    lines += ["sub.u64 now, now, since;", f"setp.lt.u64 p, now, ${words + 2};", "@p bra POLL;"]
    lines += [f"st.relaxed.sys.global.u32 [${words + 1}], {GAVE_UP.value};", "fence.sc.sys;", "trap;"]
    return "\n".join([*lines, "ARRIVED:", "mov.u32 n, 0;", "}"])


_WAIT16 = tl.constexpr(_poll("ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4];", 4, "0xffffffff"))
_WAIT8 = tl.constexpr(_poll("ld.relaxed.sys.global.v2.b32 {$0, $1}, [$2];", 2, "0xffffffff"))
_WAIT4 = tl.constexpr(_poll("ld.relaxed.sys.global.b32 $0, [$1];", 1, "0xffffffff"))
_HALF = "{ .reg .b16 h; ld.relaxed.sys.global.b16 h, [$1]; cvt.u32.u16 $0, h; }"
_WAIT2 = tl.constexpr(_poll(_HALF, 1, "0xffff"))


@triton.jit
def _push16(at, a, b, c, d):
    if INTERPRETED:
        words = at.to(tl.pointer_type(tl.int32))
        tl.store(words, a)
        tl.store(words + 1, b)
        tl.store(words + 2, c)
        tl.store(words + 3, d)
    else:
        tl.inline_asm_elementwise(_PUSH16, "=r,l,r,r,r,r", [at, a, b, c, d], tl.int32, is_pure=False, pack=1)


@triton.jit
def _push8(at, a, b):
    if INTERPRETED:
        words = at.to(tl.pointer_type(tl.int32))
        tl.store(words, a)
        tl.store(words + 1, b)
    else:
        tl.inline_asm_elementwise(_PUSH8, "=r,l,r,r", [at, a, b], tl.int32, is_pure=False, pack=1)


@triton.jit
def _interpreted_wait(at):
    word = tl.load(at)
    while tl.max((word == EMPTY).to(tl.int32)) > 0:
        word = tl.load(at)
    return word


@triton.jit
def _wait16(at, gave_up, patience):
    if INTERPRETED:
        words = at.to(tl.pointer_type(tl.int32))
        a, b = _interpreted_wait(words), _interpreted_wait(words + 1)
        c, d = _interpreted_wait(words + 2), _interpreted_wait(words + 3)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _WAIT16, "=&r,=&r,=&r,=&r,l,l,l", [at, gave_up, patience], (tl.int32,) * 4, is_pure=False, pack=1
        )
    return a, b, c, d


@triton.jit
def _wait8(at, gave_up, patience):
    if INTERPRETED:
        words = at.to(tl.pointer_type(tl.int32))
        a, b = _interpreted_wait(words), _interpreted_wait(words + 1)
    else:
        a, b = tl.inline_asm_elementwise(
            _WAIT8, "=&r,=&r,l,l,l", [at, gave_up, patience], (tl.int32,) * 2, is_pure=False, pack=1
        )
    return a, b


@triton.jit
def wait_items(at, gave_up, patience, BYTES: tl.constexpr):
    """int32 of the items of 2 (zero-extended) or 4 bytes at addresses int64[...], once all are there."""
    if BYTES == 2:
        if INTERPRETED:
            items = _interpreted_wait(at.to(tl.pointer_type(tl.int16))).to(tl.int32) & 0xFFFF
        else:
            items = tl.inline_asm_elementwise(
                _WAIT2, "=&r,l,l,l", [at, gave_up, patience], tl.int32, is_pure=False, pack=1
            )
    else:
        if INTERPRETED:
            items = _interpreted_wait(at.to(tl.pointer_type(tl.int32)))
        else:
            items = tl.inline_asm_elementwise(
                _WAIT4, "=&r,l,l,l", [at, gave_up, patience], tl.int32, is_pure=False, pack=1
            )
    return items


@triton.jit
def _clear16(at):
    if INTERPRETED:
        words = at.to(tl.pointer_type(tl.int32))
        for i in tl.static_range(4):
            tl.store(words + i, EMPTY)
    else:
        empty = tl.full(at.shape, EMPTY, tl.int32)
        tl.inline_asm_elementwise(_CLEAR16, "=r,l,r", [at, empty], tl.int32, is_pure=False, pack=1)


@triton.jit
def _clear8(at):
    if INTERPRETED:
        words = at.to(tl.pointer_type(tl.int32))
        for i in tl.static_range(2):
            tl.store(words + i, EMPTY)
    else:
        empty = tl.full(at.shape, EMPTY, tl.int32)
        tl.inline_asm_elementwise(_CLEAR8, "=r,l,r", [at, empty], tl.int32, is_pure=False, pack=1)


@triton.jit
def push(at, words):
    """Write a tuple of int32[ROWS, LANES], an even number of them, to the tile at address `at`, 16 bytes a thread."""
    thread = _threads(words[0].shape[0], words[0].shape[1])
    PLANE: tl.constexpr = words[0].shape[0] * words[0].shape[1] * 16
    for k in tl.static_range(len(words) // 4):
        place = at + k * PLANE + thread * 16
        _push16(place, words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3])
    if len(words) % 4 == 2:
        _push8(at + (len(words) // 4) * PLANE + thread * 8, words[len(words) - 2], words[len(words) - 1])


@triton.jit
def wait(at, gave_up, patience, ROWS: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr):
    """The words that a peer pushed to `at`, once they are all there. gave_up, patience: see `_poll`."""
    thread = _threads(ROWS, LANES)
    PLANE: tl.constexpr = ROWS * LANES * 16
    words = ()
    for k in tl.static_range(WORDS // 4):
        a, b, c, d = _wait16(at + k * PLANE + thread * 16, gave_up, patience)
        words = words + (a, b, c, d)
    if WORDS % 4 == 2:
        a, b = _wait8(at + (WORDS // 4) * PLANE + thread * 8, gave_up, patience)
        words = words + (a, b)
    return words


@triton.jit
def clear(at, ROWS: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr):
    """Make room at `at` for the next message, after all threads have read this one."""
    thread = _threads(ROWS, LANES)
    PLANE: tl.constexpr = ROWS * LANES * 16
    for k in tl.static_range(WORDS // 4):
        _clear16(at + k * PLANE + thread * 16)
    if WORDS % 4 == 2:
        _clear8(at + (WORDS // 4) * PLANE + thread * 8)


@triton.jit
def _threads(ROWS: tl.constexpr, LANES: tl.constexpr):
    return (tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]).to(tl.int64)


@triton.jit
def end_call(counters):
    """Raise the number of calls, counters[0], when the last program has come here; counters[1] counts programs."""
    tl.debug_barrier()  # every warp reads the number of calls itself
    if tl.atomic_add(counters + 1, 1) == tl.num_programs(0) - 1:
        tl.store(counters + 1, 0)
        tl.store(counters, tl.load(counters) + 1)
