"""What a wire format is: the base class, the byte map of a message and the registry of names."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .device import kernels_for

GROUP = 128
MESSAGE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# A NaN has many bit patterns; one of them (all ones) is the kernels' "not arrived yet", so only these travel.
CANONICAL_NAN = {torch.float16: 0x7E00, torch.bfloat16: 0x7FC0, torch.float32: 0x7FC00000}
_BITS_DTYPE = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class WireLayout:
    """Byte map of one message: the payload, then `scale_arrays` arrays of one scale a group.

    Args:
        numel: elements of the message.
        payload_bytes: bytes of all codes.
        scale_bytes: bytes of one scale.
        scale_arrays: how many arrays of scales follow the payload.
    """

    numel: int
    payload_bytes: int
    scale_bytes: int
    scale_arrays: int = 1

    @property
    def groups(self) -> int:
        return -(-self.numel // GROUP)

    @property
    def total_bytes(self) -> int:
        return self.payload_bytes + self.scale_arrays * self.groups * self.scale_bytes

    def split(self, wire: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of uint8[rows, total_bytes]: the payload [rows, payload_bytes], then each array of scales as bytes."""
        return wire.split([self.payload_bytes] + [self.groups * self.scale_bytes] * self.scale_arrays, dim=1)


class Codec(ABC):
    """A wire format for floating-point messages; stateless, so one instance serves every tensor and thread.

    A subclass sets `name` and `bits_per_element` (payload and scales, for whole groups) and writes `wire_bytes`,
    `encode_rows` and `decode_rows`; the rest follows. Decoding must depend on the bytes alone: all ranks decode the
    same bytes and have to get the same bits. A codec with Triton kernels also has `make_kernels`; a subclass that
    overrides functions of such a codec runs in torch, as written, unless it has its own (see device.py).
    """

    name: str
    group: int = GROUP
    bits_per_element: float
    needs_e4m3: bool = False

    @abstractmethod
    def wire_bytes(self, numel: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes of the message that carries `numel` elements (`dtype` only matters for codec `none`)."""

    @abstractmethod
    def encode_rows(self, x: torch.Tensor, wire: torch.Tensor) -> None:
        """Write each row of contiguous x [rows, numel > 0] (fp16, bf16, fp32) as a message into uint8[rows, bytes]."""

    @abstractmethod
    def decode_rows(self, wire: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return fp32[rows, numel > 0], any strides, of uint8[rows, bytes]; finite values stay in `dtype`'s range."""

    @torch.no_grad()
    def encode(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the message uint8[wire_bytes(x.numel(), x.dtype)] of `x` (any shape and strides), written to `out`.

        Raises ValueError for a dtype other than fp16, bf16 or fp32 and for an `out` of another size, dtype or device.
        """
        check_dtype(self.name, x)
        size = self.wire_bytes(x.numel(), x.dtype)
        out = _buffer(out, size, torch.uint8, x.device, f"codec {self.name!r}: out")
        if x.numel():
            self.encode_rows(x.reshape(1, -1), out.view(1, -1))
        return out

    @torch.no_grad()
    def decode(
        self, wire: torch.Tensor, numel: int, dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return dtype[numel] from the message `wire`.

        A group of a lossy codec that held NaN or inf is all NaN, every other is finite.
        Raises ValueError if `wire` is not uint8[wire_bytes(numel, dtype)] or `out` has another size, dtype or device.
        """
        if dtype not in MESSAGE_DTYPES:
            raise ValueError(f"codec {self.name!r} decodes to {_names(MESSAGE_DTYPES)}, not {_names([dtype])}")
        _buffer(wire, self.wire_bytes(numel, dtype), torch.uint8, wire.device, f"codec {self.name!r}: wire")
        out = _buffer(out, numel, dtype, wire.device, f"codec {self.name!r}: out")
        if numel:
            self.decode_into(wire.view(1, -1), out.view(1, -1), dtype)
        return out

    def decode_into(self, wire: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
        """Write decode_rows(wire, numel, dtype) to out [rows, numel > 0] of any float dtype."""
        kernels = kernels_for(self, wire.device)
        if kernels is None:
            cast(self.decode_rows(wire, out.shape[1], dtype), out)
        else:
            kernels.decode(wire, out, dtype)

    def decode_sum(
        self, wire: torch.Tensor, numel: int, dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sum over the messages uint8[rows, bytes], added in fp32 in row order.

        fp32[numel], or `out`, contiguous and of any float dtype, which the sum is rounded to.
        """
        kernels = kernels_for(self, wire.device)
        if kernels is not None:
            out = torch.empty(numel, dtype=torch.float32, device=wire.device) if out is None else out
            kernels.decode_sum(wire, out.view(-1), dtype)
            return out
        rows = self.decode_rows(wire, numel, dtype)
        total = rows[0] if len(rows) == 1 else rows[0] + rows[1]
        for row in rows[2:]:
            total += row
        return total if out is None else cast(total.view(out.shape), out)

    def decode_sum_encode(self, wire: torch.Tensor, numel: int, dtype: torch.dtype, out: torch.Tensor) -> None:
        """Write the message of decode_sum(wire, numel > 0, dtype) to out uint8[bytes]: the middle of a two-shot.

        Of fp16 the sum is rounded to fp16 first: past 65504 it has to become inf, as in a dense all-reduce.
        """
        kernels = kernels_for(self, wire.device)
        if kernels is not None:
            kernels.decode_sum_encode(wire, out, numel, dtype)
            return
        total = self.decode_sum(wire, numel, dtype).to(self.sum_dtype(dtype))
        self.encode_rows(total.reshape(1, -1), out.view(1, -1))

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type of a sum of messages that were encoded from `dtype` when it is encoded again."""
        return torch.float16 if dtype == torch.float16 else torch.float32

    def make_kernels(self):
        """Return this codec's launchers (hf_taco_scape.kernels.launch.Kernels), None if it has none; called once."""
        return None


def check_dtype(name: str, x: torch.Tensor) -> None:
    """Raise ValueError that names the dtype of `x` unless codec `name` can send it."""
    if x.dtype not in MESSAGE_DTYPES:
        raise ValueError(
            f"codec {name!r} sends {_names(MESSAGE_DTYPES)}, not {_names([x.dtype])}: cast the tensor first"
        )


def cast(values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Copy fp32 `values` into `out` (any float dtype), NaN in its canonical bits; return `out`."""
    out.copy_(values)
    # On CPU the vector and the scalar path of fp32 -> 16 bit write different NaNs, and which runs depends on the
    # thread count. NaN and inf always show in the sum; asking a GPU would stall it, and there all NaNs come out alike.
    if out.is_cpu and out.dtype in (torch.float16, torch.bfloat16) and not torch.isfinite(values.sum()):
        canonicalise_nan_(out)
    return out


def canonicalise_nan_(x: torch.Tensor) -> None:
    """Give each NaN of `x` (fp16, bf16, fp32) the canonical bits, in place."""
    x.view(_BITS_DTYPE[x.element_size()]).masked_fill_(x.isnan(), CANONICAL_NAN[x.dtype])


def may_have(mask: torch.Tensor) -> bool:
    """False if no element is set; on a GPU always True, because looking would stall the stream."""
    return not mask.is_cpu or bool(mask.any())


def _buffer(out, size: int, dtype: torch.dtype, device: torch.device, what: str) -> torch.Tensor:
    if out is None:
        return torch.empty(size, dtype=dtype, device=device)
    if out.shape != (size,) or out.dtype != dtype or out.device != device or not out.is_contiguous():
        raise ValueError(
            f"{what} has to be a contiguous {_names([dtype])}[{size}] on {device}, "
            f"not {_names([out.dtype])}{list(out.shape)} on {out.device}"
        )
    return out


def _names(dtypes) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


_FACTORIES: dict[str, Callable[[], Codec]] = {}
_INSTANCES: dict[str, Codec] = {}


def register_codec(name: str, factory: Callable[[], Codec]) -> None:
    """Make `get_codec(name)` return `factory()`, built on first use; every rank has to register the same.

    Raises ValueError if the name is taken.
    """
    if name in _FACTORIES:
        raise ValueError(f"codec {name!r} is already registered: choose another name than {', '.join(list_codecs())}")
    _FACTORIES[name] = factory


def get_codec(name: str | Codec) -> Codec:
    """Return the codec of that name (a Codec is returned as it is); ValueError lists the known names."""
    if isinstance(name, Codec):
        return name
    if name not in _FACTORIES:
        raise ValueError(
            f"unknown codec {name!r}: choose from {', '.join(list_codecs())}, or add your own with register_codec"
        )
    if name not in _INSTANCES:
        codec = _FACTORIES[name]()
        if not isinstance(codec, Codec):
            raise ValueError(f"the factory of codec {name!r} returned {type(codec).__name__}: it has to be a Codec")
        _INSTANCES[name] = codec
    return _INSTANCES[name]


def list_codecs() -> list[str]:
    """Names that get_codec knows, in the order of registration."""
    return list(_FACTORIES)
