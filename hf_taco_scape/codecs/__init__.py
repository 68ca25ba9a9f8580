"""Wire formats of tensor-parallel messages: `get_codec(name)` with `encode` and `decode`, on CPU and CUDA tensors."""

from functools import partial

from .codec import GROUP, Codec, WireLayout, get_codec, list_codecs, register_codec
from .fp8 import Fp8Codec
from .identity import IdentityCodec
from .integer import IntegerCodec
from .taco import TacoCodec

__all__ = ["GROUP", "Codec", "WireLayout", "get_codec", "list_codecs", "register_codec"]

register_codec("none", IdentityCodec)
register_codec("taco", TacoCodec)
register_codec("fp8", Fp8Codec)
register_codec("int8", partial(IntegerCodec, bits=8, hadamard=False))
for _bits in (8, 6, 4):
    register_codec(f"hadamard-int{_bits}", partial(IntegerCodec, bits=_bits, hadamard=True))
