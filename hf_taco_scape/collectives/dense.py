"""Codec `none`: torch.distributed's own collectives behind the signatures of compressed.py, uneven sizes included."""

import torch
import torch.distributed as dist

from .meter import ByteMeter, ring_all_reduce_bytes, ring_half_bytes
from .transport import all_gather_single, group_ranks, reduce_scatter_single


def all_reduce(x: torch.Tensor, group, meter: ByteMeter | None) -> torch.Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    if meter:
        count = ring_all_reduce_bytes(x.nbytes, dist.get_world_size(group))
        meter.add(count, count)
    return out


def reduce_scatter(x: torch.Tensor, sizes: list[int], group, meter: ByteMeter | None) -> torch.Tensor:
    rank, ranks = group_ranks(group)
    x = _padded_pieces(x, sizes)
    out = x.new_empty(x.shape[1:])
    reduce_scatter_single(out, x.flatten(0, 1), group=group)
    if meter:
        count = ring_half_bytes(x[0].nbytes // max(sizes[0], 1) * sum(sizes), ranks)
        meter.add(count, count)
    return out[: sizes[rank]]


def all_gather(x: torch.Tensor, sizes: list[int], group, meter: ByteMeter | None) -> torch.Tensor:
    ranks, rows = len(sizes), max(sizes)
    mine = x.new_zeros(rows, *x.shape[1:])
    mine[: len(x)] = x
    out = x.new_empty(ranks * rows, *x.shape[1:])
    all_gather_single(out, mine, group=group)
    if meter:
        count = ring_half_bytes(mine.nbytes // max(rows, 1) * sum(sizes), ranks)
        meter.add(count, count)
    if min(sizes) == rows:
        return out
    return torch.cat([piece[:size] for piece, size in zip(out.split(rows), sizes, strict=True)])


def _padded_pieces(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Return [ranks, max(sizes), ...]: the pieces of x along dim 0, shorter ones padded (gloo takes equal ones)."""
    if min(sizes) == max(sizes):
        return x.contiguous().view(len(sizes), sizes[0], *x.shape[1:])
    out = x.new_zeros(len(sizes), max(sizes), *x.shape[1:])
    for target, piece in zip(out, x.split(sizes), strict=True):
        target[: len(piece)] = piece
    return out
