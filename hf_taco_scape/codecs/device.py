"""Where codecs run as Triton kernels: the one place that chooses between a kernel and its torch twin.

The choice follows from facts of the start (device, Triton there or not), never from a message, so ranks with the same
hardware agree. The twin stays the reference: `with torch_twins():` runs it on any device.
"""

import contextlib
import functools
import importlib.util
import itertools
import types
from collections.abc import Iterator

import torch

_twins_only = False


@contextlib.contextmanager
def torch_twins() -> Iterator[None]:
    """Inside, codecs, SCAPE's step and AdamS run as plain torch, on every thread; enter it on all ranks or on none."""
    global _twins_only
    before, _twins_only = _twins_only, True
    try:
        yield
    finally:
        _twins_only = before


def wants_kernels(device: torch.device) -> bool:
    """Whether Triton kernels, of codecs or of SCAPE's step, may run on `device`."""
    # some kernels hold PTX, which AMD's devices, also named cuda, do not run
    return device.type == "cuda" and torch.version.hip is None and not _twins_only


def kernels_for(codec, device: torch.device):
    """Return the launchers of `codec`'s kernels on `device`; None where its torch twin runs.

    Raises ValueError for a codec of E4M3 codes on a GPU that cannot convert to them, below sm89.
    """
    return _kernels_on_cuda(codec, device) if wants_kernels(device) else None


@functools.cache
def _kernels_on_cuda(codec, device: torch.device):
    if importlib.util.find_spec("triton") is None:
        return None
    from ..kernels.launch import supports

    if supports(device):
        return codec.make_kernels() if kernel_class(type(codec)) else None
    if codec.needs_e4m3:
        name, major_minor = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        raise ValueError(
            f"codec {codec.name!r} needs a GPU that converts to E4M3, sm89 or newer; {name} is sm{major_minor[0]}"
            f"{major_minor[1]}: choose hadamard-int8, hadamard-int6 or int8"
        )
    return None


@functools.cache
def kernel_class(cls: type) -> type | None:
    """The class whose code the kernels of codecs of class `cls` repeat: the one that wrote `make_kernels`.

    None where a subclass of it has functions of its own in place of inherited ones: no kernel knows them, so its torch
    code runs. A subclass that has kernels for what it changes writes `make_kernels` too.
    """
    below = list(itertools.takewhile(lambda base: "make_kernels" not in vars(base), cls.__mro__))
    owner = cls.__mro__[len(below)]
    for base in below:
        for name, value in vars(base).items():
            code = isinstance(value, types.FunctionType | property | classmethod | staticmethod)
            if code and not name.startswith("__") and hasattr(owner, name):
                return None
    return owner


def with_kernels(cls):
    """Class decorator: `encode_rows` and `decode_rows` of a Codec as kernels where there are some, else as written."""
    encode_twin, decode_twin = cls.encode_rows, cls.decode_rows

    @functools.wraps(encode_twin)
    def encode_rows(self, x: torch.Tensor, wire: torch.Tensor) -> None:
        kernels = kernels_for(self, x.device)
        if kernels is None:
            encode_twin(self, x, wire)
        else:
            kernels.encode(x, wire)

    @functools.wraps(decode_twin)
    def decode_rows(self, wire: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        kernels = kernels_for(self, wire.device)
        if kernels is None:
            return decode_twin(self, wire, numel, dtype)
        out = torch.empty(len(wire), numel, dtype=torch.float32, device=wire.device)
        kernels.decode(wire, out, dtype)
        return out

    cls.encode_rows, cls.decode_rows = encode_rows, decode_rows
    return cls
