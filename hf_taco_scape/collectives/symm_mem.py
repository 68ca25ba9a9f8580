"""The collectives of compressed.py in one kernel launch each, over memory that all ranks of a node can write.

Results are those of compressed.py, to the bit: one shot for two ranks, two shots for more. Messages go straight into
the peers' inboxes (kernels/symm_memory.py); nothing waits on the host. Ask `why_not` at start-up, reserve ahead.
"""

import functools
import math

import torch

from ..codecs import Codec, get_codec
from ..codecs.codec import check_dtype
from ..codecs.device import kernel_class
from ..codecs.fp8 import Fp8Codec
from ..codecs.identity import IdentityCodec
from ..codecs.integer import IntegerCodec
from ..codecs.taco import TacoCodec
from ..kernels.symm_format import Format, Pieces
from .compressed import gathered_sizes, nothing_sent
from .meter import ByteMeter, ring_all_reduce_bytes, ring_half_bytes
from .symm_workspace import SymmetricWorkspace, why_not

__all__ = ["SymmetricWorkspace", "all_gather", "all_reduce", "inbox_bytes", "reduce_scatter", "why_not"]


def all_reduce(
    x: torch.Tensor, workspace: SymmetricWorkspace, codec: str | Codec = "taco", meter: ByteMeter | None = None
) -> torch.Tensor:
    """Return the sum of `x` over the ranks of the workspace, a new contiguous tensor, the same bits on every rank.

    Equivalent: `compressed.all_reduce(x, group, codec)`; codec `none` too is summed in fp32 and rank order. Every rank
    passes the same shape, dtype and codec. ValueError for what has no kernel; RuntimeError for a message that would
    grow the workspace under CUDA-graph capture, and where a peer did not come.
    """
    x, fmt = _check(x, workspace, codec)
    ranks, numel = workspace.ranks, x.numel()
    if ranks == 1 or numel == 0:
        return nothing_sent(x.clone(memory_format=torch.contiguous_format), meter)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if ranks == 2:
        sent = fmt.sent_bytes(numel)
        inbox = workspace.inbox(fmt.message_bytes(numel))
        _launchers().one_shot(x.reshape(-1), out, inbox, fmt)
    else:
        chunk = _chunk(numel, ranks)
        pieces = Pieces(numel, chunk, 0, 0, chunk, chunk, False)
        sent = 2 * (ranks - 1) * fmt.sent_bytes(chunk)
        inbox = workspace.inbox(2 * ranks * fmt.message_bytes(chunk))
        _launchers().exchange(x.reshape(-1), out, inbox, fmt, pieces, scatter=True, gather=True)
    if meter:
        meter.add(ring_all_reduce_bytes(x.nbytes, ranks), sent)
    return out


def reduce_scatter(
    x: torch.Tensor, workspace: SymmetricWorkspace, codec: str | Codec = "taco", meter: ByteMeter | None = None
) -> torch.Tensor:
    """Return this rank's piece of the sum of `x`: piece r of `torch.tensor_split(sum, ranks)` along dim 0 on rank r.

    Equivalent: `compressed.reduce_scatter(x, group, codec)`. Errors as all_reduce, and ValueError for a 0-dimensional
    x.
    """
    x, fmt = _check(x, workspace, codec, split=True)
    rank, ranks = workspace.rank, workspace.ranks
    if ranks == 1 or x.numel() == 0:
        return nothing_sent(x.tensor_split(ranks)[rank].clone(memory_format=torch.contiguous_format), meter)
    sizes, width = _split_sizes(len(x), ranks), math.prod(x.shape[1:])
    pieces = _pieces(sizes, width, workspace)
    out = torch.empty(sizes[rank], *x.shape[1:], dtype=x.dtype, device=x.device)
    inbox = workspace.inbox(ranks * fmt.message_bytes(pieces.longest))
    _launchers().exchange(x.reshape(-1), out, inbox, fmt, pieces, scatter=True, gather=False)
    if meter:
        sent = sum(fmt.sent_bytes(size * width) for r, size in enumerate(sizes) if r != rank)
        meter.add(ring_half_bytes(x.nbytes, ranks), sent)
    return out


def all_gather(
    x: torch.Tensor,
    workspace: SymmetricWorkspace,
    codec: str | Codec = "taco",
    sizes: list[int] | None = None,
    meter: ByteMeter | None = None,
) -> torch.Tensor:
    """Return the ranks' `x` joined along dim 0 in rank order, each as decoded from its message, on every rank.

    Equivalent: `compressed.all_gather(x, group, codec, sizes)`. `sizes`: every rank's `len(x)`, needed where they
    differ. Errors as all_reduce, and ValueError for a 0-dimensional x or `sizes` that do not fit.
    """
    x, fmt = _check(x, workspace, codec, split=True)
    rank, ranks = workspace.rank, workspace.ranks
    sizes = gathered_sizes(x, sizes, rank, ranks)
    width = math.prod(x.shape[1:])
    if ranks == 1 or sum(sizes) * width == 0:
        empty = x.new_empty(sum(sizes), *x.shape[1:])
        return nothing_sent(x.clone(memory_format=torch.contiguous_format) if ranks == 1 else empty, meter)
    pieces = _pieces(sizes, width, workspace)
    out = torch.empty(sum(sizes), *x.shape[1:], dtype=x.dtype, device=x.device)
    inbox = workspace.inbox(ranks * fmt.message_bytes(pieces.longest))
    _launchers().exchange(x.reshape(-1), out, inbox, fmt, pieces, scatter=False, gather=True)
    if meter:
        meter.add(ring_half_bytes(out.nbytes, ranks), (ranks - 1) * fmt.sent_bytes(x.numel()))
    return out


def inbox_bytes(numel: int, ranks: int, codec: str | Codec = "none", dtype: torch.dtype = torch.float32) -> int:
    """Bytes for `SymmetricWorkspace.reserve` that serve every collective of tensors of up to `numel` elements.

    `numel` counts the whole tensor: the input of all_reduce and reduce_scatter, the output of all_gather, its pieces
    of equal sizes. The defaults have the longest messages but for the padding of small ones.
    """
    fmt = _format(get_codec(codec), dtype)
    if ranks == 2:
        return max(fmt.message_bytes(numel), 2 * fmt.message_bytes(-(-numel // 2)))
    return 2 * ranks * fmt.message_bytes(_chunk(numel, ranks))


@functools.cache
def _launchers():
    from ..kernels import symm_launch  # not before it is needed: Triton may be missing

    return symm_launch


def _chunk(numel: int, ranks: int) -> int:
    """Elements of a chunk of a two-shot: `ranks` equal ones, multiples of 128."""
    return -(-numel // (ranks * 128)) * 128


@functools.cache
def _format(codec: Codec, dtype: torch.dtype):
    """The codec as the kernels see it; ValueError for one that they do not have."""
    repeated = kernel_class(type(codec))
    if repeated is IdentityCodec:
        return Format(0, 8 * dtype.itemsize, False, 0, pieces=4 // dtype.itemsize)
    if repeated is TacoCodec:
        return Format(448, 8, True, 2)
    if repeated in (Fp8Codec, IntegerCodec):
        return Format(codec.qmax, codec.bits, codec.hadamard, 1)
    raise ValueError(f"codec {codec.name!r} has no kernels over symmetric memory: set tp_backend to c10d")


def _check(x: torch.Tensor, workspace: SymmetricWorkspace, codec: str | Codec, split: bool = False):
    """Return x without its graph and the codec's format; ValueError for what cannot be sent."""
    workspace.check()
    codec = get_codec(codec)
    check_dtype(codec.name, x)
    if x.device != workspace.device:
        raise ValueError(
            f"the tensor is on {x.device}, the workspace on {workspace.device}: use the workspace's device"
        )
    if split and x.dim() == 0:
        raise ValueError("a 0-dimensional tensor has no dim 0 to split or join: reshape it first, e.g. x.view(1)")
    return x.detach(), _format(codec, x.dtype)


def _split_sizes(rows: int, ranks: int) -> list[int]:
    """Sizes of the pieces of torch.tensor_split."""
    base, longer = divmod(rows, ranks)
    return [base + 1] * longer + [base] * (ranks - longer)


def _pieces(sizes: list[int], width: int, workspace: SymmetricWorkspace):
    """Pieces of these many rows of `width` elements; sizes unlike tensor_split's take a table on the device."""
    total, longest = sum(sizes) * width, max(sizes) * width
    short = any(size * width % 128 for size in sizes)
    base, longer = divmod(sum(sizes), len(sizes))
    if sizes == _split_sizes(sum(sizes), len(sizes)):
        unit = width if longer else base * width
        return Pieces(total, base * width, longer, width, longest, unit, short)
    starts = [sum(sizes[:r]) * width for r in range(len(sizes) + 1)]
    return Pieces(total, 0, 0, 0, longest, width, short, workspace.table(tuple(starts)))
