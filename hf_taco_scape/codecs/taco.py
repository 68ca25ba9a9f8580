"""Codec `taco`: the paper's operator (adaptive scale, Hadamard transform, second scale, E4M3), its range widened.

docs/wire_formats.md, section 1. The published operator clips its scales, which loses groups around 1e-20 and 1e12 and
turns a NaN into zeros; here such groups are brought into range by a power of two, folded into alpha, and a NaN stays.
"""

import math
from collections.abc import Iterator

import torch

from .codec import GROUP, Codec, WireLayout, may_have
from .device import with_kernels
from .fp8 import E4M3_MAX, E4M3_STEP, pack_e4m3, unpack_e4m3
from .groups import SMALLEST_AMAX, blocks, butterfly, clamp_to_range_, divide, largest_magnitude, to_lanes

SOUND_AMAX = (2.0**-30, 2.0**30)
_EXPONENT_BITS = 0x7F800000


@with_kernels
class TacoCodec(Codec):
    """The paper's codec. Wire: q uint8[numel] | s fp32[groups] | alpha fp32[groups]; the last group may be short."""

    name = "taco"
    bits_per_element = 8 + 64 / GROUP
    needs_e4m3 = True

    def layout(self, numel: int) -> WireLayout:
        return WireLayout(numel, payload_bytes=numel, scale_bytes=4, scale_arrays=2)

    def wire_bytes(self, numel: int, dtype: torch.dtype = torch.bfloat16) -> int:
        return self.layout(numel).total_bytes

    def make_kernels(self):
        from ..kernels.launch import TacoKernels

        return TacoKernels()

    def encode_rows(self, x: torch.Tensor, wire: torch.Tensor) -> None:
        rows, numel = x.shape
        layout = self.layout(numel)
        payload, *scale_bytes = layout.split(wire)
        scales = torch.empty(2, rows, layout.groups, dtype=torch.float32, device=x.device)
        for r, g, columns, length in _pieces(rows, numel, x.device):
            q, s, alpha = _encode_groups(x[r, columns].reshape(-1, length))
            target = payload[r, columns].unflatten(1, (-1, length))
            target.copy_(q.unflatten(0, target.shape[:2]))
            scales[0, r, g], scales[1, r, g] = s.view(target.shape[:2]), alpha.view(target.shape[:2])
        for target, array in zip(scale_bytes, scales, strict=True):
            target.copy_(array.view(torch.uint8))

    def decode_rows(self, wire: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        payload, *scale_bytes = self.layout(numel).split(wire)
        # clone: behind an odd number of codes the scales start at an odd address
        s, alpha = (b.clone(memory_format=torch.contiguous_format).view(torch.float32) for b in scale_bytes)
        out = torch.empty(len(wire), numel, dtype=torch.float32, device=wire.device)
        for r, g, columns, length in _pieces(len(wire), numel, wire.device):
            codes = payload[r, columns].reshape(-1, length)
            target = out[r, columns].unflatten(1, (-1, length))
            target.copy_(_decode_groups(codes, s[r, g].flatten(), alpha[r, g].flatten()).view_as(target))
        return clamp_to_range_(out, s * (E4M3_MAX * math.sqrt(GROUP)) / alpha, dtype)


def _pieces(rows: int, numel: int, device: torch.device) -> Iterator[tuple[slice, slice, slice, int]]:
    """Slices of rows, groups and elements, and the groups' length: whole groups, then the short last ones."""
    whole = numel // GROUP
    if whole:
        for r, g in blocks(rows, whole, device):
            yield r, g, slice(g.start * GROUP, g.stop * GROUP), GROUP
    if numel % GROUP:
        yield slice(0, rows), slice(whole, whole + 1), slice(whole * GROUP, numel), numel % GROUP


def _mean_square(lanes: torch.Tensor) -> torch.Tensor:
    """Mean of squares of fp32[length, groups] over dim 0, summed by halves so that every device rounds alike."""
    total = lanes * lanes
    while len(total) > 1:
        half = len(total) // 2
        folded = total[:half] + total[half : 2 * half]
        total = torch.cat([folded, total[2 * half :]]) if len(total) % 2 else folded
    return divide(total[0], len(lanes))


def _transform(lanes: torch.Tensor) -> torch.Tensor:
    """H / sqrt(size) on the largest power of two of lanes that fits; the lanes behind stay; overwrites `lanes`."""
    size = 1 << len(lanes).bit_length() - 1
    head = butterfly(lanes[:size])
    head.div_(head.new_full((), math.sqrt(size)))
    return head if size == len(lanes) else torch.cat([head, lanes[size:]])


def _encode_groups(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes uint8[groups, length], s and alpha fp32[groups] of [groups, length]."""
    x = to_lanes(groups)
    amax = largest_magnitude(x, 0)
    tiny, bad = amax < SMALLEST_AMAX, ~amax.isfinite()
    outside = (amax < SOUND_AMAX[0]) | (amax > SOUND_AMAX[1])
    power = None
    if may_have(outside | bad):
        # 2^floor(log2(amax)): dividing by it is exact and, unlike multiplying by its inverse, has no subnormal operand
        power = (amax.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
        power = torch.where(outside & ~tiny & ~bad, power, 1.0)
        x.masked_fill_(tiny | bad, 0).div_(power)
    # by way of fp64, whose root rounds to fp32's: torch's fp32 root on CPU is off by one bit now and then
    rms = (_mean_square(x) + 1e-6).double().sqrt_().float()
    alpha = torch.div(rms.new_full((), E4M3_MAX), rms).clamp_(1e-3, 1e3)
    y = _transform(x.mul_(alpha))
    s = divide(largest_magnitude(y, 0), E4M3_MAX).clamp_(1e-12, 1e6)
    # |y / s| passes 448 by fp32's rounding at most, which E4M3 rounds back
    q = pack_e4m3(y.div_(s))
    if power is not None:
        alpha = (alpha / power).masked_fill_(bad, math.nan)
        s.masked_fill_(bad, math.nan)
    return q.t(), s, alpha


def _decode_groups(codes: torch.Tensor, s: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """Return fp32[groups, length], lanes in memory, of codes uint8[groups, length]."""
    return _transform(unpack_e4m3(codes.t().contiguous()).mul_(s * E4M3_STEP)).div_(alpha).t()
