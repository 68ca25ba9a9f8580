"""Codec `none`: the message in its own dtype."""

import torch

from .codec import Codec, canonicalise_nan_
from .device import with_kernels


@with_kernels
class IdentityCodec(Codec):
    """fp16, bf16 or fp32 as they are, NaN in its canonical bits; `dtype` of decode has to be that of encode."""

    name = "none"
    bits_per_element = 16.0  # of bf16, as everywhere where no dtype is given

    def wire_bytes(self, numel: int, dtype: torch.dtype = torch.bfloat16) -> int:
        return numel * dtype.itemsize

    def make_kernels(self):
        from ..kernels.launch import IdentityKernels

        return IdentityKernels()

    def encode_rows(self, x: torch.Tensor, wire: torch.Tensor) -> None:
        copy = x.clone(memory_format=torch.contiguous_format)
        canonicalise_nan_(copy)
        wire.copy_(copy.view(torch.uint8))

    def decode_rows(self, wire: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return wire.clone(memory_format=torch.contiguous_format).view(dtype).float()

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype
