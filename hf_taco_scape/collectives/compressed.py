"""All-reduce, reduce-scatter and all-gather whose messages travel through a codec; raw, no autograd.

Every rank decodes the same bytes, its own too, and sums in rank order in fp32, so replicas stay bit-identical; an
owner that kept its own stripe in full precision would drift from the others. A group of elements that holds a NaN or
inf arrives as NaN on every rank; a sum that overflows the dtype arrives as inf or NaN. All ranks pass the same shape
(but see `sizes`), dtype and codec.
"""

import math

import torch
import torch.nn.functional as F

from ..codecs import Codec, get_codec
from ..codecs.codec import check_dtype
from ..codecs.device import kernel_class
from ..codecs.identity import IdentityCodec
from . import dense
from .meter import ByteMeter, ring_all_reduce_bytes, ring_half_bytes
from .transport import exchange, gather, group_ranks


@torch.no_grad()
def all_reduce(
    x: torch.Tensor,
    group=None,
    codec: str | Codec = "taco",
    meter: ByteMeter | None = None,
    shots: int = 0,
) -> torch.Tensor:
    """Return the sum of `x` over the ranks of `group`, a new contiguous tensor of x's shape and dtype on every rank.

    Plain torch.distributed: `out = x.clone(); dist.all_reduce(out, group=group)`. shots: 1 or 2; by default (or 0) two
    ranks take one (same bytes, one quantisation instead of two), more take two (docs/wire_formats.md). `x` may be
    empty or have any strides. Raises ValueError for an unknown codec, a dtype it does not send, and a process outside
    the group.
    """
    codec, _, ranks = _check(x, group, codec)
    if ranks == 1 or x.numel() == 0:
        return nothing_sent(x.clone(memory_format=torch.contiguous_format), meter)
    if _sends_as_it_is(codec):
        return dense.all_reduce(x, group, meter)
    shots = shots or (1 if ranks == 2 else 2)
    return (one_shot_all_reduce if shots == 1 else two_shot_all_reduce)(x, group, codec, meter)


@torch.no_grad()
def one_shot_all_reduce(x: torch.Tensor, group, codec: Codec, meter: ByteMeter | None = None) -> torch.Tensor:
    """all_reduce by sending the whole message to every rank: each sums all of them. x.numel() > 0."""
    rank, ranks = group_ranks(group)
    wires = _wires(codec, ranks, x.numel(), x)
    codec.encode_rows(x.reshape(1, -1), wires[rank : rank + 1])
    if meter:
        meter.add(ring_all_reduce_bytes(x.nbytes, ranks), (ranks - 1) * wires.shape[1])
    return codec.decode_sum(gather(wires, group), x.numel(), x.dtype, out=_new(x, x.shape))


@torch.no_grad()
def two_shot_all_reduce(x: torch.Tensor, group, codec: Codec, meter: ByteMeter | None = None) -> torch.Tensor:
    """all_reduce by reduce-scatter and all-gather of x padded to `ranks` chunks, multiples of 128. x.numel() > 0."""
    rank, ranks = group_ranks(group)
    numel = x.numel()
    chunk = -(-numel // (ranks * codec.group)) * codec.group
    pad = ranks * chunk - numel
    chunks = (F.pad(x.reshape(-1), (0, pad)) if pad else x.reshape(-1)).view(ranks, chunk)
    wires = _wires(codec, ranks, chunk, x)
    size = wires.shape[1]
    codec.encode_rows(chunks, wires)
    received = exchange(wires.view(-1), [size] * ranks, [size] * ranks, group).view(ranks, size)
    codec.decode_sum_encode(received, chunk, x.dtype, wires[rank])
    out = _new(x, (ranks, chunk))
    codec.decode_into(gather(wires, group), out, x.dtype)
    if meter:
        meter.add(ring_all_reduce_bytes(x.nbytes, ranks), 2 * (ranks - 1) * size)
    return out.view(-1)[:numel].view(x.shape)


@torch.no_grad()
def reduce_scatter(
    x: torch.Tensor, group=None, codec: str | Codec = "taco", meter: ByteMeter | None = None
) -> torch.Tensor:
    """Return this rank's piece of the sum of `x`: piece r of `torch.tensor_split(sum, ranks)` along dim 0 on rank r.

    Plain torch.distributed: `dist.reduce_scatter(out, list(x.tensor_split(ranks)), group=group)`. Errors as
    all_reduce, and ValueError for a 0-dimensional x.
    """
    codec, rank, ranks = _check(x, group, codec, split=True)
    if ranks == 1 or x.numel() == 0:
        return nothing_sent(x.tensor_split(ranks)[rank].clone(memory_format=torch.contiguous_format), meter)
    rows, longer = divmod(len(x), ranks)
    sizes = [rows + 1] * longer + [rows] * (ranks - longer)
    if _sends_as_it_is(codec):
        return dense.reduce_scatter(x, sizes, group, meter)
    width = math.prod(x.shape[1:])
    send = [codec.wire_bytes(size * width, x.dtype) for size in sizes]
    wires = torch.empty(sum(send), dtype=torch.uint8, device=x.device)
    flat, element, byte = x.reshape(-1), 0, 0
    for count, size in (longer, rows + 1), (ranks - longer, rows):  # each run of equal pieces is encoded at once
        numel, nbytes = size * width, codec.wire_bytes(size * width, x.dtype)
        if count * numel:
            messages = wires[byte : byte + count * nbytes].view(count, nbytes)
            codec.encode_rows(flat[element : element + count * numel].view(count, numel), messages)
        element, byte = element + count * numel, byte + count * nbytes
    received = exchange(wires, send, [send[rank]] * ranks, group)
    if meter:
        meter.add(ring_half_bytes(x.nbytes, ranks), sum(send) - send[rank])
    out = _new(x, (sizes[rank], *x.shape[1:]))
    return codec.decode_sum(received.view(ranks, -1), out.numel(), x.dtype, out=out) if send[rank] else out


@torch.no_grad()
def all_gather(
    x: torch.Tensor,
    group=None,
    codec: str | Codec = "taco",
    sizes: list[int] | None = None,
    meter: ByteMeter | None = None,
) -> torch.Tensor:
    """Return the ranks' `x` joined along dim 0 in rank order, each as decoded from its message, on every rank.

    Plain torch.distributed: `dist.all_gather(parts, x, group=group); torch.cat(parts)`. `sizes`: every rank's
    `len(x)`, needed where they differ; the other dims are equal. Errors as all_reduce, and ValueError for a
    0-dimensional x or `sizes` that do not fit.
    """
    codec, rank, ranks = _check(x, group, codec, split=True)
    sizes = gathered_sizes(x, sizes, rank, ranks)
    width = math.prod(x.shape[1:])
    if ranks == 1 or sum(sizes) * width == 0:
        empty = x.new_empty(sum(sizes), *x.shape[1:])
        return nothing_sent(x.clone(memory_format=torch.contiguous_format) if ranks == 1 else empty, meter)
    if _sends_as_it_is(codec):
        return dense.all_gather(x, sizes, group, meter)
    receive = [codec.wire_bytes(size * width, x.dtype) for size in sizes]
    if meter:
        meter.add(ring_half_bytes(sum(sizes) * width * x.itemsize, ranks), (ranks - 1) * receive[rank])
    if len(set(sizes)) == 1:
        wires = _wires(codec, ranks, x.numel(), x)
        codec.encode_rows(x.reshape(1, -1), wires[rank : rank + 1])
        out = _new(x, (ranks, x.numel()))
        codec.decode_into(gather(wires, group), out, x.dtype)
        return out.view(sum(sizes), *x.shape[1:])
    wires = exchange(codec.encode(x).repeat(ranks), [receive[rank]] * ranks, receive, group)
    out = x.new_empty(sum(sizes), *x.shape[1:])
    for wire, part in zip(wires.split(receive), out.split(sizes), strict=True):
        codec.decode(wire, part.numel(), x.dtype, out=part.view(-1))
    return out


def _check(x: torch.Tensor, group, codec: str | Codec, split: bool = False) -> tuple[Codec, int, int]:
    """Return the codec, this rank and the number of ranks; ValueError for what the collectives do not take."""
    codec = get_codec(codec)
    if not (_sends_as_it_is(codec) and x.is_floating_point()):
        check_dtype(codec.name, x)
    if split and x.dim() == 0:
        raise ValueError("a 0-dimensional tensor has no dim 0 to split or join: reshape it first, e.g. x.view(1)")
    return codec, *group_ranks(group)


def _sends_as_it_is(codec: Codec) -> bool:
    """Whether plain torch.distributed does the same: codec `none`, and no subclass with code of its own."""
    return kernel_class(type(codec)) is IdentityCodec


def _wires(codec: Codec, ranks: int, numel: int, x: torch.Tensor) -> torch.Tensor:
    """Room for `ranks` messages of `numel` elements, uint8[ranks, bytes]."""
    return torch.empty(ranks, codec.wire_bytes(numel, x.dtype), dtype=torch.uint8, device=x.device)


def _new(x: torch.Tensor, shape) -> torch.Tensor:
    """A contiguous tensor of that shape, x's dtype and device."""
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def gathered_sizes(x: torch.Tensor, sizes: list[int] | None, rank: int, ranks: int) -> list[int]:
    """Every rank's `len(x)` in an all-gather; ValueError for `sizes` that do not fit this rank's."""
    sizes = [len(x)] * ranks if sizes is None else list(sizes)
    if len(sizes) != ranks or sizes[rank] != len(x):
        raise ValueError(
            f"sizes {sizes} do not fit: rank {rank} of {ranks} gathers {len(x)} rows; give len(x) of each rank"
        )
    return sizes


def nothing_sent(out: torch.Tensor, meter: ByteMeter | None) -> torch.Tensor:
    """Count a call that had nothing to send, and return its result."""
    if meter:
        meter.add(0, 0)
    return out
