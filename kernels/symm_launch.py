"""Launchers of symm_kernels.py: builds, and launches that cost a few microseconds."""

import math

import torch
import triton

from . import symm_kernels
from .symm_format import GROUP, Format, Inbox, Pieces

INTERPRETED = triton.knobs.runtime.interpret
REGISTERS, THREADS, BLOCKS = 65536, 2048, 32  # of a multiprocessor, sm89 and newer

_built: dict = {}


def one_shot(x: torch.Tensor, out: torch.Tensor, inbox: Inbox, fmt: Format) -> None:
    """Write the sum of x and of the other rank's x to out, both [numel > 0] and contiguous."""
    numel = x.numel()
    tail = fmt.scales == 2 and numel % GROUP > 0
    constants = fmt.constants() | {"X_ALIGN": _alignment(x), "OUT_ALIGN": _alignment(out), "TAIL": tail}
    mine, peer = inbox.peers[inbox.rank], inbox.peers[1 - inbox.rank]
    numbers = [mine, peer, inbox.counters, inbox.scratch, inbox.gave_up, inbox.patience_ns, inbox.room, numel]
    numbers.append(torch.finfo(x.dtype).max)
    _launch(symm_kernels.one_shot_kernel, fmt.tiles(numel), x, out, numbers, constants, fmt.warps)


def exchange(
    x: torch.Tensor, out: torch.Tensor, inbox: Inbox, fmt: Format, pieces: Pieces, scatter: bool, gather: bool
) -> None:
    """Sum pieces on their owners (scatter), bring owners' pieces to all ranks (gather), or one after the other."""
    constants = fmt.constants() | {
        "X_ALIGN": _alignment(x, pieces.unit if scatter else 0),
        "OUT_ALIGN": _alignment(out, pieces.unit if gather else 0),
        "SCATTER": scatter,
        "GATHER": gather,
        "HALF": scatter and gather and x.dtype == torch.float16,
        # what is rounded to 16 bits at once comes out right without the last step of an exact division
        "EXACT": x.dtype == torch.float32,
        "TABLE": pieces.table != 0,
        "TAIL": fmt.scales == 2 and pieces.short,
    }
    mine, slot = inbox.peers[inbox.rank], fmt.message_bytes(pieces.longest)
    numbers = [mine, inbox.peers_table, inbox.counters, inbox.scratch, inbox.gave_up, inbox.patience_ns, inbox.room]
    numbers += [slot, inbox.rank, len(inbox.peers), pieces.total, pieces.table, pieces.base, pieces.longer]
    numbers += [pieces.extra, pieces.longest, torch.finfo(x.dtype).max]
    _launch(symm_kernels.exchange_kernel, fmt.tiles(pieces.longest), x, out, numbers, constants, fmt.warps)


def _alignment(x: torch.Tensor, unit: int = 0) -> int:
    """16 if every piece of x starts at a multiple of 16 bytes, else one element: two cases, two builds."""
    itemsize = x.element_size()
    return 16 if math.gcd(x.data_ptr(), unit * itemsize, 16) == 16 else itemsize


def _launch(kernel, tiles: int, x, out, numbers: list, constants: dict, warps: int) -> None:
    """Start kernel(x, out, *numbers, *constants), whose order is the kernel's, on x's device and current stream."""
    options = {"num_warps": warps, "enable_fp_fusion": False}  # no fused multiply-add but where a kernel says so
    if INTERPRETED:
        kernel[(min(tiles, 2),)](x, out, *numbers, **constants, **options)
        return
    index = x.device.index
    if index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return _launch(kernel, tiles, x, out, numbers, constants, warps)
    key = (kernel, index, x.dtype, warps, *constants.values())
    if key not in _built:
        built = kernel.warmup(x, out, *numbers, **constants, **options, grid=(1,))
        built._init_handles()
        _built[key] = built, _resident_programs(built, x.device, warps), tuple(constants.values())
    built, resident, values = _built[key]
    # around Triton's dispatch, which takes longer than a small message; nothing is specialised, so the key is all
    stream = torch._C._cuda_getCurrentRawStream(index)
    built.run(
        min(tiles, resident), 1, 1, stream, built.function, built.packed_metadata, None, None, None,
        x.data_ptr(), out.data_ptr(), *numbers, *values,
    )  # fmt: skip


def _resident_programs(built, device: torch.device, warps: int) -> int:
    """Programs of that kernel that the device holds at once."""
    properties = torch.cuda.get_device_properties(device)
    registers = -(-built.n_regs // 8) * 8 * 32 * warps
    shared = properties.shared_memory_per_multiprocessor // max(built.metadata.shared + 1024, 1)
    each = max(min(REGISTERS // registers, THREADS // (32 * warps), BLOCKS, shared), 1)
    return each * properties.multi_processor_count
