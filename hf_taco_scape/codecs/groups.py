"""Arithmetic that the codecs share: groups of 128, the Walsh-Hadamard transform, one bf16 scale a group.

Two memory layouts: a group's elements in a row, [groups, 128], and lanes, [128, groups], where every step of the
butterfly and every reduction over a group runs along contiguous memory (twice as fast on a CPU, same bits).
"""

import functools
from abc import abstractmethod
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from .codec import CANONICAL_NAN, GROUP, Codec, WireLayout, may_have
from .device import with_kernels

SMALLEST_AMAX = 2.0**-118  # groups below are sent as zeros: their scales would be subnormal
BLOCK_GROUPS = 2048
_MATMUL = 16  # part of the integer transform that is done by matmul


def blocks(rows: int, groups: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Slices of rows and groups that cover all and keep a CPU's temporaries in its cache; one piece on a GPU."""
    if device.type != "cpu" or rows * groups <= BLOCK_GROUPS:
        yield slice(0, rows), slice(0, groups)
        return
    for row in range(rows):
        for start in range(0, groups, BLOCK_GROUPS):
            yield slice(row, row + 1), slice(start, min(start + BLOCK_GROUPS, groups))


def largest_magnitude(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return max |x| over `dim`, NaN if there is one; no temporary of x's size."""
    return torch.maximum(x.amax(dim), x.amin(dim).neg_())


def divide(x: torch.Tensor, value: float) -> torch.Tensor:
    """Return x / value, correctly rounded: on CUDA torch multiplies by the inverse of a Python number."""
    return torch.div(x, x.new_full((), value))


def to_lanes(groups: torch.Tensor) -> torch.Tensor:
    """Return a new fp32[length, groups] from [groups, length]."""
    count, length = groups.shape
    return torch.empty(length, count, dtype=torch.float32, device=groups.device).copy_(groups.t())


def butterfly(lanes: torch.Tensor) -> torch.Tensor:
    """Return H @ lanes for fp32[length, groups], length a power of two; overwrites `lanes`.

    Natural order, strides 1, 2, 4, ...: the order fixes the rounding, hence the bits, whatever the device or thread
    count. A matmul would be faster on some machines, but its order of summation is its own affair.
    """
    length, count = lanes.shape
    source, target = lanes, torch.empty_like(lanes)
    stride = 1
    while stride < length:
        a, b = source.view(-1, 2, stride, count).unbind(1)
        total, difference = target.view(-1, 2, stride, count).unbind(1)
        torch.add(a, b, out=total)
        torch.sub(a, b, out=difference)
        source, target = target, source
        stride *= 2
    return source


@functools.lru_cache(maxsize=64)
def _hadamard_block(device: torch.device) -> torch.Tensor:
    h = torch.ones(1, 1)
    while len(h) < _MATMUL:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h.to(device)


def integer_hadamard(q: torch.Tensor) -> torch.Tensor:
    """Return q @ H for fp32[groups, 128] of integers up to 127: exact in any order of summation; overwrites `q`.

    The operands are exact in bf16 and TF32 too, so reduced matmul precision does no harm.
    """
    block = _hadamard_block(q.device)
    source, target = torch.mm(q.view(-1, _MATMUL), block).view_as(q), q
    stride = _MATMUL
    while stride < GROUP:
        a, b = source.view(-1, 2, stride).unbind(1)
        total, difference = target.view(-1, 2, stride).unbind(1)
        torch.add(a, b, out=total)
        torch.sub(a, b, out=difference)
        source, target = target, source
        stride *= 2
    return source


def bf16_scale_up(amax: torch.Tensor, qmax: int) -> torch.Tensor:
    """Return bf16 scales >= amax / qmax for fp32 `amax`: 0 where amax < 2^-118, NaN where it is not finite."""
    bits = (divide(amax, qmax).view(torch.int32) + 0xFFFF >> 16).to(torch.int16)
    bits.masked_fill_(amax < SMALLEST_AMAX, 0)
    bits.masked_fill_(~amax.isfinite(), CANONICAL_NAN[torch.bfloat16])
    return bits.view(torch.bfloat16)


def clamp_to_range_(values: torch.Tensor, bound: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Clamp finite and infinite `values` to the largest finite `dtype`, in place, if any group's `bound` needs it."""
    limit = torch.finfo(dtype).max
    if may_have(~(bound <= limit)):
        values.clamp_(-limit, limit)
    return values


@with_kernels
class ScaledGroupCodec(Codec):
    """Groups of 128 under one bf16 scale: `y = H(x / 128)` or x, `q = round(y / s)`, `x^ = s * H(q)` or s * q.

    Wire: codes of whole groups (the last one padded with zeros), then the scales. docs/wire_formats.md, section 2.
    """

    qmax: int
    bits: int
    hadamard: bool

    @abstractmethod
    def quantise(self, scaled: torch.Tensor) -> torch.Tensor:
        """Return the 8-bit codes of fp32[groups, 128] within +-qmax, in place or not."""

    @abstractmethod
    def pack(self, codes: torch.Tensor, payload: torch.Tensor) -> None:
        """Write uint8[rows, groups, 128] codes into uint8[rows, groups, bytes a group]."""

    @abstractmethod
    def unpack(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the values fp32[rows * groups, 128], contiguous, of uint8[rows, groups, bytes a group]."""

    @property
    def bits_per_element(self) -> float:
        return self.bits + 16 / GROUP

    def layout(self, numel: int) -> WireLayout:
        return WireLayout(numel, payload_bytes=-(-numel // GROUP) * GROUP * self.bits // 8, scale_bytes=2)

    def wire_bytes(self, numel: int, dtype: torch.dtype = torch.bfloat16) -> int:
        return self.layout(numel).total_bytes

    def scaled_kernels(self):
        """What `make_kernels` returns of a subclass whose quantise, pack and unpack the kernels repeat."""
        from ..kernels.launch import ScaledKernels

        return ScaledKernels(self.name, self.qmax, self.bits, self.hadamard)

    def encode_rows(self, x: torch.Tensor, wire: torch.Tensor) -> None:
        rows, numel = x.shape
        layout = self.layout(numel)
        payload, scale_bytes = layout.split(wire)
        payload = payload.view(rows, layout.groups, -1)
        pad = layout.groups * GROUP - numel
        x = (F.pad(x, (0, pad)) if pad else x).view(rows, layout.groups, GROUP)
        scales = torch.empty(rows, layout.groups, dtype=torch.bfloat16, device=x.device)
        for r, g in blocks(rows, layout.groups, x.device):
            codes, scale = self._encode_groups(x[r, g].reshape(-1, GROUP))
            target = payload[r, g]
            self.pack(codes.view(torch.uint8).unflatten(0, target.shape[:2]), target)
            scales[r, g] = scale.view(target.shape[:2])
        scale_bytes.copy_(scales.view(torch.uint8))

    def _encode_groups(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return 8-bit codes [groups, 128] and bf16 scales [groups]."""
        y = butterfly(to_lanes(x).mul_(1 / GROUP)).t() if self.hadamard else x.float()
        scale = bf16_scale_up(largest_magnitude(y, 1), self.qmax)
        # the scale is rounded up, so |y / scale| can pass qmax by fp32's own rounding only and rounds back to it
        scaled = y / scale.float().unsqueeze(1)
        unusable = ~(scale > 0)
        if may_have(unusable):
            scaled.masked_fill_(unusable.unsqueeze(1), 0)
        return self.quantise(scaled), scale

    def decode_rows(self, wire: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        rows, layout = len(wire), self.layout(numel)
        payload, scale_bytes = layout.split(wire)
        payload = payload.view(rows, layout.groups, -1)
        # clone: a slice may start at an odd address
        scales = scale_bytes.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()
        bound = scales * (self.qmax * (GROUP if self.hadamard else 1))
        out = torch.empty(rows, layout.groups, GROUP, dtype=torch.float32, device=wire.device)
        for r, g in blocks(rows, layout.groups, wire.device):
            values = self.unpack(payload[r, g])
            if self.hadamard:
                values = integer_hadamard(values)
            torch.mul(values.view_as(out[r, g]), scales[r, g].unsqueeze(2), out=out[r, g])
        return clamp_to_range_(out.view(rows, -1), bound, dtype)[:, :numel]
