"""Integers under one bf16 scale: `int8`, and `hadamard-int8`, `-int6`, `-int4` behind a Walsh-Hadamard transform.

Codes are stored as q + qmax, which leaves the code of all ones unused at every width.
"""

import torch

from .codec import GROUP
from .groups import ScaledGroupCodec


class IntegerCodec(ScaledGroupCodec):
    """`bits`-bit integers (8, 6 or 4) with or without the transform; see ScaledGroupCodec."""

    def __init__(self, bits: int, hadamard: bool) -> None:
        self.bits, self.hadamard = bits, hadamard
        self.qmax = 2 ** (bits - 1) - 1
        self.name = f"{'hadamard-' if hadamard else ''}int{bits}"
        self._pack, self._unpack = _PACKING[bits]

    def make_kernels(self):
        return self.scaled_kernels()

    def quantise(self, scaled: torch.Tensor) -> torch.Tensor:
        # by way of int8, which is eight times as fast on a CPU as fp32 -> uint8; 127 + 127 wraps as it should
        return scaled.round_().to(torch.int8).add_(self.qmax)

    def pack(self, codes: torch.Tensor, payload: torch.Tensor) -> None:
        self._pack(codes, payload)

    def unpack(self, payload: torch.Tensor) -> torch.Tensor:
        rows, groups, _ = payload.shape
        values = torch.empty(rows, groups, GROUP, dtype=torch.float32, device=payload.device)
        self._unpack(payload, values)
        return values.sub_(self.qmax).view(-1, GROUP)


def _pack8(codes: torch.Tensor, payload: torch.Tensor) -> None:
    payload.copy_(codes)


def _unpack8(payload: torch.Tensor, values: torch.Tensor) -> None:
    values.copy_(payload)


def _pack6(codes: torch.Tensor, payload: torch.Tensor) -> None:
    """Four codes, little-endian, in three bytes: 00000011 11112222 22333333 read from the lowest bit."""
    a, b, c, d = (codes[..., i::4] for i in range(4))
    payload[..., 0::3] = a | b << 6
    payload[..., 1::3] = b >> 2 | c << 4
    payload[..., 2::3] = c >> 4 | d << 2


def _unpack6(payload: torch.Tensor, values: torch.Tensor) -> None:
    # one strided pass to planes of bytes, then everything but the last copy runs along contiguous memory
    x, y, z = payload.unflatten(-1, (-1, 3)).movedim(-1, 0).contiguous()
    values[..., 0::4] = x & 63
    values[..., 1::4] = x >> 6 | (y & 15) << 2
    values[..., 2::4] = y >> 4 | (z & 3) << 4
    values[..., 3::4] = z >> 2


def _pack4(codes: torch.Tensor, payload: torch.Tensor) -> None:
    payload.copy_(codes[..., 0::2] | codes[..., 1::2] << 4)


def _unpack4(payload: torch.Tensor, values: torch.Tensor) -> None:
    values[..., 0::2] = payload & 15
    values[..., 1::2] = payload >> 4


_PACKING = {8: (_pack8, _unpack8), 6: (_pack6, _unpack6), 4: (_pack4, _unpack4)}
