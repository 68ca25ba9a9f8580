"""Autograd around tensor-parallel communication; lives here only.

A block's input is replicated and its output is a sum over ranks. Megatron's f and g:

    copy_to_split     forward  y = x                     backward  dx = sum over ranks of dy
    reduce_from_split forward  y = sum over ranks of x   backward  dx = dy

With sequence parallelism, activations between blocks are split along the sequence (dim 1) into pieces, rank r's being
piece r of `torch.tensor_split`, and each all-reduce falls into its halves:

    gather_to_split    forward  all-gather of the pieces   backward  reduce-scatter of dy
    scatter_from_split forward  reduce-scatter of x        backward  all-gather of dy
    take_piece         forward  this rank's piece          backward  all-gather of dy
    join_pieces        forward  all-gather of the pieces   backward  this rank's piece of dy
"""

import torch

SEQUENCE = 1  # dim of activations (batch, sequence, features)


class _CopyToSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.comm.all_reduce(grad, backward=True), None


class _ReduceFromSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        return comm.all_reduce(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _GatherToSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, length, comm):
        ctx.comm = comm
        return comm.all_gather(x, SEQUENCE, comm.piece_sizes(length))

    @staticmethod
    def backward(ctx, grad):
        return ctx.comm.reduce_scatter(grad, SEQUENCE, backward=True), None, None


class _ScatterFromSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm, ctx.length = comm, x.shape[SEQUENCE]
        return comm.reduce_scatter(x, SEQUENCE)

    @staticmethod
    def backward(ctx, grad):
        return ctx.comm.all_gather(grad, SEQUENCE, ctx.comm.piece_sizes(ctx.length), backward=True), None


class _TakePiece(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm, ctx.length = comm, x.shape[SEQUENCE]
        return _own_piece(x, comm)

    @staticmethod
    def backward(ctx, grad):
        return ctx.comm.all_gather(grad, SEQUENCE, ctx.comm.piece_sizes(ctx.length), backward=True), None


class _JoinPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, length, comm):
        ctx.comm = comm
        return comm.all_gather(x, SEQUENCE, comm.piece_sizes(length), exact=True)

    @staticmethod
    def backward(ctx, grad):
        return _own_piece(grad, ctx.comm), None, None


def _own_piece(x: torch.Tensor, comm) -> torch.Tensor:
    # narrow, not tensor_split: that one would compile once for each remainder of the length
    sizes = comm.piece_sizes(x.shape[SEQUENCE])
    return x.narrow(SEQUENCE, sum(sizes[: comm.rank]), sizes[comm.rank]).contiguous()


def copy_to_split(x: torch.Tensor, comm) -> torch.Tensor:
    """Enter the split part of a block with a replicated activation of any shape.

    Its gradient is a partial sum on each rank; the backward adds them up through `comm` (a Communicator), once for
    all the layers that read `x`. Plain torch.distributed: identity; backward `dist.all_reduce(grad, group=group)`.
    """
    return _CopyToSplit.apply(x, comm)


def reduce_from_split(x: torch.Tensor, comm) -> torch.Tensor:
    """Leave the split part: sum the ranks' partial results, of any shape; every rank gets the same bits.

    Plain torch.distributed: `dist.all_reduce(x, group=group)`; backward: identity.
    """
    return _ReduceFromSplit.apply(x, comm)


def gather_to_split(x: torch.Tensor, length: int, comm) -> torch.Tensor:
    """Enter a block from pieces: x (batch, piece, features) on each rank gives (batch, length, features) on all.

    Under autocast it travels in autocast's dtype, which is what the linear layers that read it would cast it to.
    Plain torch.distributed: all_gather; backward: reduce_scatter (Korthikanti et al. 2022, arXiv:2205.05198).
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return _GatherToSplit.apply(x, length, comm)


def scatter_from_split(x: torch.Tensor, comm) -> torch.Tensor:
    """Leave a block into pieces: partial sums (batch, length, features) give this rank's piece of their sum.

    Plain torch.distributed: reduce_scatter; backward: all_gather.
    """
    return _ScatterFromSplit.apply(x, comm)


def take_piece(x: torch.Tensor, comm) -> torch.Tensor:
    """Split a replicated activation (batch, length, features) into pieces.

    Every rank gets the whole gradient back, so what is before it (embeddings) has the gradient of one process.
    Plain torch.distributed: `x.tensor_split(size, 1)[rank]`; backward: all_gather.
    """
    return _TakePiece.apply(x, comm)


def join_pieces(x: torch.Tensor, length: int, comm) -> torch.Tensor:
    """Join pieces into a replicated activation whose gradient is the same on all ranks (the head is not split).

    Not through the codec: it is the residual stream itself, and its error would go straight into the logits.
    Plain torch.distributed: all_gather; backward: `grad.tensor_split(size, 1)[rank]`.
    """
    return _JoinPieces.apply(x, length, comm)
