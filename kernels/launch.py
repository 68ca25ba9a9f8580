"""Launchers: torch tensors in, kernels started on the tensors' device; the same methods for every codec.

`wire` is uint8[rows, bytes], a message a row; `x` and `out` are [rows, numel > 0]; rows are contiguous in themselves.
`dtype` is the type that was encoded: values stay within its range. Nothing here waits for the device.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from . import identity, scaled, taco, taco_tail

GROUP = 128
MAX_GRID_ROWS = 65535
CANONICAL_NAN = {torch.float16: 0x7E00, torch.bfloat16: 0x7FC0, torch.float32: 0x7FC00000}

# (codec, operation) -> pieces that a group is split into and warps of a program, as recipes/bench_kernels.py --sweep
# found them on an H200. More pieces: fewer steps between lanes and fewer scales a thread, but more registers.
TUNED: dict[tuple[str, str], tuple[int, int]] = {}
DEFAULT = (4, 4)

_built: dict = {}


def supports(device: torch.device) -> bool:
    """Whether the kernels run there: CUDA with E4M3 conversions, sm89 or newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _launch(
    kernel: Callable, grid: tuple[int, int], tensors: list, numbers: list, constants: dict, warps: int
) -> None:
    """Start kernel(*tensors, *numbers, *constants), whose order is the kernel's."""
    if not all(grid):
        return
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _launch(kernel, grid, tensors, numbers, constants, warps)
    key = (kernel, warps, device, *(t.dtype for t in tensors), *constants.values())
    built = _built.get(key)
    if built is not None:
        # around Triton's dispatch, which takes longer than a small message; nothing is specialised, so the key is all
        built[(*grid, 1)](*tensors, *numbers, *constants.values())
        return
    # no fused multiply-add but where a kernel says so: the bits are those of the torch twin
    built = kernel[grid](*tensors, *numbers, **constants, num_warps=warps, enable_fp_fusion=False)
    if built is not None:  # Triton's interpreter has nothing to keep
        _built[key] = built


def _alignment(rows: torch.Tensor, largest: int = 8) -> int:
    """The largest power of two, up to `largest`, that divides the address of every row in bytes."""
    stride = rows.stride(0) * rows.element_size() if len(rows) > 1 else 0
    return math.gcd(rows.data_ptr(), stride, largest)


def _value_alignment(rows: torch.Tensor) -> int:
    """16, or the size of a value if a row lies elsewhere: two cases, two builds."""
    return 16 if _alignment(rows, 16) == 16 else rows.element_size()


def _at_least(alignment: int, wire: torch.Tensor) -> torch.Tensor:
    """`wire`, or a copy of it if its rows lie at odd addresses."""
    return wire if _alignment(wire) >= alignment else _empty_unless_aligned(alignment, wire).copy_(wire)


def _by_grid(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The tensors' rows, as many at a time as a grid has."""
    if len(tensors[0]) <= MAX_GRID_ROWS:
        yield tensors
    else:
        yield from zip(*(t.split(MAX_GRID_ROWS) for t in tensors), strict=True)


class Kernels:
    """What a codec's launchers have in common: one kernel decodes messages, each into its row, or sums them."""

    name: str
    unit = 1  # bytes that have to divide the addresses of messages; others go through an aligned copy

    def encode(self, x: torch.Tensor, wire: torch.Tensor) -> None:
        """Write each row of x as a message."""
        target = _empty_unless_aligned(self._unit(x.dtype), wire)
        for source, rows in _by_grid(x, target):
            self._encode(source, rows)
        if target is not wire:
            wire.copy_(target)

    def decode(self, wire: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
        """Write each message into a row of out (any float dtype)."""
        wire = _at_least(self._unit(dtype), wire)
        for source, rows in _by_grid(wire, out):
            self._decode_sum(source, rows, dtype, 1, "decode")

    def decode_sum(self, wire: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
        """Write the sum of all messages, added in fp32 in their order, to out [numel] (any float dtype)."""
        self._decode_sum(_at_least(self._unit(dtype), wire), out.view(1, -1), dtype, len(wire), "decode_sum")

    def decode_sum_encode(self, wire: torch.Tensor, out: torch.Tensor, numel: int, dtype: torch.dtype) -> None:
        """Write the message of that sum to out uint8[bytes]; of fp16 the sum is rounded to fp16 first."""
        unit = self._unit(dtype)
        target = _empty_unless_aligned(unit, out.view(1, -1))
        self._decode_sum_encode(_at_least(unit, wire), target, numel, dtype)
        if target.data_ptr() != out.data_ptr():
            out.copy_(target.view(-1))

    def _unit(self, dtype: torch.dtype) -> int:
        return self.unit

    def _tiles(self, operation: str, groups: int) -> tuple[dict, int, int]:
        """Constants, warps and tiles of the grid."""
        pieces, warps = TUNED.get((self.name, operation), DEFAULT)
        rows = 2 * pieces * warps  # gives a thread eight neighbours of each piece
        return {"ROWS": rows, "PIECES": pieces}, warps, -(-groups // rows)


def _empty_unless_aligned(alignment: int, wire: torch.Tensor) -> torch.Tensor:
    """`wire`, or room for as many messages at even addresses."""
    if _alignment(wire) >= alignment:
        return wire
    rows, size = wire.shape
    return wire.new_empty(rows, -(-size // 16) * 16)[:, :size]


@dataclass(frozen=True)
class ScaledKernels(Kernels):
    """Codecs with one bf16 scale a group: qmax is 448 for E4M3, else the largest integer of `bits` bits."""

    name: str
    qmax: int
    bits: int
    hadamard: bool
    unit = 2

    def _constants(self, tile: dict, **more) -> dict:
        return {"QMAX": self.qmax, "BITS": self.bits, "HADAMARD": self.hadamard} | tile | more

    def _encode(self, x: torch.Tensor, wire: torch.Tensor) -> None:
        numel, groups = x.shape[1], -(-x.shape[1] // GROUP)
        tile, warps, tiles = self._tiles("encode", groups)
        constants = self._constants(tile, X_ALIGN=_value_alignment(x), ALIGN=_alignment(wire), TAIL=numel % GROUP > 0)
        numbers = [x.stride(0), wire.stride(0), groups, numel]
        _launch(scaled.encode_kernel, (tiles, len(x)), [x, wire], numbers, constants, warps)

    def _decode_sum(self, wire, out, dtype: torch.dtype, messages: int, operation: str) -> None:
        numel, groups = out.shape[1], -(-out.shape[1] // GROUP)
        tile, warps, tiles = self._tiles(operation, groups)
        constants = self._constants(
            tile, OUT_ALIGN=_value_alignment(out), ALIGN=_alignment(wire), TAIL=numel % GROUP > 0, ONE=messages == 1
        )
        stride = wire.stride(0)
        numbers = [stride, stride, messages, out.stride(0), groups, numel, torch.finfo(dtype).max]
        _launch(scaled.decode_sum_kernel, (tiles, len(out)), [wire, out], numbers, constants, warps)

    def _decode_sum_encode(self, wire, out, numel: int, dtype: torch.dtype) -> None:
        groups = -(-numel // GROUP)
        tile, warps, tiles = self._tiles("decode_sum_encode", groups)
        align, tail, half = min(_alignment(wire), _alignment(out)), numel % GROUP > 0, dtype == torch.float16
        constants = self._constants(tile, ALIGN=align, TAIL=tail, HALF=half)
        numbers = [wire.stride(0), len(wire), groups, numel, torch.finfo(dtype).max]
        _launch(scaled.decode_sum_encode_kernel, (tiles, 1), [wire, out], numbers, constants, warps)


@dataclass(frozen=True)
class TacoKernels(Kernels):
    """Codec taco: one kernel for whole groups, one for a short last group."""

    name: str = "taco"
    unit = 2

    def _encode(self, x: torch.Tensor, wire: torch.Tensor) -> None:
        numel = x.shape[1]
        whole, groups, scale_align = numel // GROUP, -(-numel // GROUP), _scale_alignment(wire, numel)
        tile, warps, tiles = self._tiles("encode", whole)
        constants = tile | {"X_ALIGN": _value_alignment(x), "ALIGN": _alignment(wire), "SCALE_ALIGN": scale_align}
        tensors, numbers = [x, wire], [x.stride(0), wire.stride(0), whole]
        _launch(taco.encode_kernel, (tiles, len(x)), tensors, [*numbers, groups, numel], constants, warps)
        constants = {"SCALE_ALIGN": scale_align}
        tails = len(x) * (groups - whole)
        _launch(taco_tail.encode_tail_kernel, (tails, 1), tensors, [*numbers, numel], constants, 1)

    def _decode_sum(self, wire, out, dtype: torch.dtype, messages: int, operation: str) -> None:
        numel, limit = out.shape[1], torch.finfo(dtype).max
        whole, groups, scale_align = numel // GROUP, -(-numel // GROUP), _scale_alignment(wire, numel)
        tile, warps, tiles = self._tiles(operation, whole)
        constants = tile | {"OUT_ALIGN": _value_alignment(out), "ALIGN": _alignment(wire), "SCALE_ALIGN": scale_align}
        # what is rounded to 16 bits at once comes out right without the last step of an exact division
        constants |= {"EXACT": messages > 1 or out.dtype == torch.float32, "ONE": messages == 1}
        tensors, numbers = [wire, out], [wire.stride(0), wire.stride(0), messages, out.stride(0), whole]
        grid = (tiles, len(out))
        _launch(taco.decode_sum_kernel, grid, tensors, [*numbers, groups, numel, limit], constants, warps)
        constants = {"SCALE_ALIGN": scale_align}
        tails = len(out) * (groups - whole)
        _launch(taco_tail.decode_sum_tail_kernel, (tails, 1), tensors, [*numbers, numel, limit], constants, 1)

    def _decode_sum_encode(self, wire, out, numel: int, dtype: torch.dtype) -> None:
        whole, groups, limit = numel // GROUP, -(-numel // GROUP), torch.finfo(dtype).max
        scale_align = min(_scale_alignment(wire, numel), _scale_alignment(out, numel))
        tile, warps, tiles = self._tiles("decode_sum_encode", whole)
        align, half = min(_alignment(wire), _alignment(out)), dtype == torch.float16
        constants = tile | {"ALIGN": align, "SCALE_ALIGN": scale_align, "HALF": half}
        tensors, numbers = [wire, out], [wire.stride(0), len(wire), whole]
        numbers_whole = [*numbers, groups, numel, limit]
        _launch(taco.decode_sum_encode_kernel, (tiles, 1), tensors, numbers_whole, constants, warps)
        constants = {"SCALE_ALIGN": scale_align, "HALF": half}
        grid = (groups - whole, 1)
        _launch(taco_tail.decode_sum_encode_tail_kernel, grid, tensors, [*numbers, numel, limit], constants, 1)


def _scale_alignment(wire: torch.Tensor, numel: int) -> int:
    """4 if the scales behind `numel` codes are aligned in every row, else 1: two cases, two builds."""
    return 4 if math.gcd(_alignment(wire, 4), numel) % 4 == 0 else 1


@dataclass(frozen=True)
class IdentityKernels(Kernels):
    """Codec none: messages are arrays of `dtype`."""

    name: str = "none"

    def _unit(self, dtype: torch.dtype) -> int:
        return dtype.itemsize

    def _encode(self, x: torch.Tensor, wire: torch.Tensor) -> None:
        self._sum(x, wire.view(x.dtype), 1, False)

    def _decode_sum(self, wire, out, dtype: torch.dtype, messages: int, operation: str) -> None:
        self._sum(wire.view(dtype), out, messages, False)

    def _decode_sum_encode(self, wire, out, numel: int, dtype: torch.dtype) -> None:
        self._sum(wire.view(dtype), out.view(dtype), len(wire), dtype == torch.float16)

    def _sum(self, wire, out, messages: int, half: bool) -> None:
        numel, warps = out.shape[1], 4
        block = 32 * warps * 16 // wire.element_size()
        constants = {"NAN": CANONICAL_NAN[out.dtype], "HALF": half, "BLOCK": block}
        constants |= {"ALIGN": _value_alignment(wire), "OUT_ALIGN": _value_alignment(out)}
        numbers = [wire.stride(0), wire.stride(0), messages, out.stride(0), numel]
        _launch(identity.sum_kernel, (-(-numel // block), len(out)), [wire, out], numbers, constants, warps)
