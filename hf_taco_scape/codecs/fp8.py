"""Codec `fp8`: E4M3 codes under one bf16 scale, no transform; also the E4M3 casts that `taco` shares."""

import torch

from .codec import GROUP
from .groups import ScaledGroupCodec

E4M3_MAX = 448
E4M3_STEP = 2.0**8  # unpack_e4m3 returns values divided by this


def pack_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Return the E4M3 codes, uint8, of fp32 values up to 448 (round to nearest even)."""
    return values.to(torch.float8_e4m3fn).view(torch.uint8)


def unpack_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Return fp32 values times 2^-8 of uint8 E4M3 codes, exactly.

    E4M3's fields are moved into those of fp16, whose exponent has a bias that is larger by 8: ten times as fast on a
    CPU as torch's own cast. Code 7f is never sent (a group with NaN has a NaN scale).
    """
    bits = codes.view(torch.int8).to(torch.int16)
    return bits.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16).float()


class Fp8Codec(ScaledGroupCodec):
    """E4M3 under one bf16 scale, the plain 8-bit baseline; see ScaledGroupCodec."""

    name = "fp8"
    bits, qmax, hadamard = 8, E4M3_MAX, False
    needs_e4m3 = True

    def make_kernels(self):
        return self.scaled_kernels()

    def quantise(self, scaled: torch.Tensor) -> torch.Tensor:
        return pack_e4m3(scaled)

    def pack(self, codes: torch.Tensor, payload: torch.Tensor) -> None:
        payload.copy_(codes)

    def unpack(self, payload: torch.Tensor) -> torch.Tensor:
        return unpack_e4m3(payload).mul_(E4M3_STEP).view(-1, GROUP)
