"""Launchers of symm_kernels.py: builds, and launches that cost a few microseconds."""

import math

import torch
import triton

from . import symm_kernels
from .symm_format import GROUP, Format, Inbox, Pieces

INTERPRETED = triton.knobs.runtime.interpret
REGISTERS, THREADS, BLOCKS = 65536, 2048, 32  # of a multiprocessor, sm89 and newer

# kernel -> its constants behind those of the format
ONE_SHOT, EXCHANGE = "one_shot_kernel", "exchange_kernel"
FLAGS = {
    ONE_SHOT: ("X_ALIGN", "OUT_ALIGN", "TAIL"),
    EXCHANGE: ("X_ALIGN", "OUT_ALIGN", "SCATTER", "GATHER", "HALF", "EXACT", "TABLE", "TAIL"),
}
LARGEST = {dtype: torch.finfo(dtype).max for dtype in (torch.float16, torch.bfloat16, torch.float32)}

_built: dict = {}


def one_shot(x: torch.Tensor, out: torch.Tensor, inbox: Inbox, fmt: Format) -> None:
    """Write the sum of x and of the other rank's x to out, both [numel > 0] and contiguous."""
    numel = x.numel()
    flags = (_alignment(x), _alignment(out), fmt.scales == 2 and numel % GROUP > 0)
    mine, peer = inbox.peers[inbox.rank], inbox.peers[1 - inbox.rank]
    numbers = (
        mine, peer, inbox.counters, inbox.scratch, inbox.gave_up, inbox.patience_ns, inbox.room, numel,
        LARGEST[x.dtype],
    )  # fmt: skip
    _launch(ONE_SHOT, fmt, fmt.tiles(numel), x, out, numbers, flags)


def exchange(
    x: torch.Tensor, out: torch.Tensor, inbox: Inbox, fmt: Format, pieces: Pieces, scatter: bool, gather: bool
) -> None:
    """Sum pieces on their owners (scatter), bring owners' pieces to all ranks (gather), or one after the other."""
    flags = (
        _alignment(x, pieces.unit if scatter else 0),
        _alignment(out, pieces.unit if gather else 0),
        scatter,
        gather,
        scatter and gather and x.dtype == torch.float16,
        x.dtype == torch.float32,  # 16 bits come out right without the last step of an exact division
        pieces.table != 0,
        fmt.scales == 2 and pieces.short,
    )
    numbers = (
        inbox.peers[inbox.rank], inbox.peers_table, inbox.counters, inbox.scratch, inbox.gave_up, inbox.patience_ns,
        inbox.room, fmt.message_bytes(pieces.longest), inbox.rank, len(inbox.peers), pieces.total, pieces.table,
        pieces.base, pieces.longer, pieces.extra, pieces.longest, LARGEST[x.dtype],
    )  # fmt: skip
    _launch(EXCHANGE, fmt, fmt.tiles(pieces.longest), x, out, numbers, flags)


def _alignment(x: torch.Tensor, unit: int = 0) -> int:
    """16 if every piece of x starts at a multiple of 16 bytes, else one element: two cases, two builds."""
    itemsize = x.itemsize
    return itemsize if math.gcd(x.data_ptr(), unit * itemsize) % 16 else 16


def build(name: str, fmt: Format, x, out, numbers: tuple, flags: tuple):
    """Return the kernel built for x's type and device, and the values of its constants."""
    constants = fmt.constants() | dict(zip(FLAGS[name], flags, strict=True))
    # no fused multiply-add but where a kernel says so: the bits are those of the torch twin
    options = {"num_warps": fmt.warps, "enable_fp_fusion": False}
    built = getattr(symm_kernels, name).warmup(x, out, *numbers, **constants, **options, grid=(1,))
    return built, tuple(constants.values())


def _launch(name: str, fmt: Format, tiles: int, x, out, numbers: tuple, flags: tuple) -> None:
    """Start the kernel on the current stream, a program a tile or as many as fit."""
    if INTERPRETED:
        constants = fmt.constants() | dict(zip(FLAGS[name], flags, strict=True))
        getattr(symm_kernels, name)[(min(tiles, 2),)](x, out, *numbers, **constants)
        return
    index = x.device.index
    if index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return _launch(name, fmt, tiles, x, out, numbers, flags)
    key = (name, fmt, x.dtype, index, flags)
    found = _built.get(key)
    if found is None:
        built, values = build(name, fmt, x, out, numbers, flags)
        built._init_handles()
        found = _built[key] = built, _resident_programs(built, x.device, fmt.warps), values
    built, resident, values = found
    # around Triton's dispatch, which takes longer than a small message; nothing is specialised, so the key is all
    built.run(
        min(tiles, resident), 1, 1, torch._C._cuda_getCurrentRawStream(index), built.function, built.packed_metadata,
        None, None, None, x.data_ptr(), out.data_ptr(), *numbers, *values,
    )  # fmt: skip


def _resident_programs(built, device: torch.device, warps: int) -> int:
    """Programs of that kernel that the device holds at once."""
    properties = torch.cuda.get_device_properties(device)
    registers = -(-built.n_regs // 8) * 8 * 32 * warps
    shared = properties.shared_memory_per_multiprocessor // (built.metadata.shared + 1024)
    each = max(min(REGISTERS // registers, THREADS // (32 * warps), BLOCKS, shared), 1)
    return each * properties.multi_processor_count
