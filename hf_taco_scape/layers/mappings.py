"""Autograd around tensor-parallel communication; lives here only.

A block's input is replicated and its output is a sum over ranks. Megatron's f and g:

    copy_to_split    forward  y = x                  backward  dx = sum over ranks of dy
    reduce_from_split forward  y = sum over ranks of x  backward  dx = dy
"""

import torch


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
