"""The arithmetic of SCAPE's step on one tensor, in plain torch (equations: sync/scape_adams.py).

Flat tensors of the state's dtype unless said otherwise. The only temporaries are of the size of the tensor at hand.
"""

import torch

from hf_taco_scape.sync.layout import column_dims, row_shape, rows_of
from hf_taco_scape.sync.mask import FullSelection


def form_(
    residual: torch.Tensor, momentum: torch.Tensor, grad: torch.Tensor | None, b1: float, scale: torch.Tensor | None
) -> torch.Tensor:
    """residual <- c = b1*m + (1-b1)*scale*g + r, in place; no gradient counts as zero. Returns c."""
    if grad is None:
        return residual.add_(momentum * b1)
    fresh = grad.to(residual.dtype, copy=True)
    if scale is not None:
        fresh.mul_(scale)
    return residual.add_(fresh.mul_(1 - b1).add_(momentum, alpha=b1))


def row_square_sums(
    grad: torch.Tensor | None, like: torch.Tensor, dims: tuple[int, ...], scale: torch.Tensor | None
) -> torch.Tensor:
    """Sum of (scale*g)^2 over each row: the entries of one index along `dims`. [rows]

    `like` has the parameter's shape and the state's dtype.
    """
    if grad is None:
        return torch.zeros(row_shape(like.shape, dims), dtype=like.dtype, device=like.device).view(-1)
    square = grad.to(like.dtype, copy=True)
    if scale is not None:
        square.mul_(scale)
    others = [d for d in range(like.dim()) if d not in dims]
    square.square_()
    # sum over no dimension at all would mean over every one
    return (square.sum(others) if others else square).reshape(-1)


def pack_(values: torch.Tensor, c: torch.Tensor, selection) -> None:
    """values <- c on the mask, rounded to the payload's dtype."""
    values.copy_(selection.take(c))


def keep_unsent_(c: torch.Tensor, selection, values_dtype: torch.dtype) -> None:
    """c becomes the residual: on the mask what rounding to the payload dropped (0 for a full-precision payload)."""
    if values_dtype == c.dtype:
        selection.put_(c, 0.0)
    else:
        sent = selection.take(c)
        selection.put_(c, sent - sent.to(values_dtype))


def decoded_grad(mean: torch.Tensor, momentum: torch.Tensor, selection, b1: float) -> torch.Tensor:
    """ghat = (mt - b1*m)/(1-b1) on the mask: the averaged gradient, with what the residuals had saved. [k]"""
    return (mean - selection.take(momentum) * b1).div_(1 - b1)


def sparse_update_(
    param: torch.Tensor,
    momentum: torch.Tensor,
    mean: torch.Tensor,
    selection,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip: torch.Tensor | None = None,
    second_moment: torch.Tensor | None = None,
    column_factors: torch.Tensor | None = None,
    row_dims: tuple[int, ...] = (0,),
) -> None:
    """One SCAPE update, in place on `param` (its own shape and dtype) and `momentum` (flat).

    mean: [k] mt on the mask; clip: the coefficient for ghat (0-dim, at most 1); second_moment: [rows] for `row`
    and `factored`, before its bias correction, None for AdamS' own; column_factors: [columns] for `factored`, what a
    row's is multiplied with in each column; step counts from 1. Off the mask a parameter only decays, and m becomes 0.
    """
    b1, b2 = betas
    previous = selection.take(momentum)
    ghat = decoded_grad(mean, momentum, selection, b1)
    if clip is not None:
        ghat.mul_(clip)
        # where nothing is clipped mt must not change, not even by the rounding of its reconstruction
        mean = torch.where(clip < 1, previous * b1 + ghat * (1 - b1), mean)
    if second_moment is None:
        v = previous.square().mul_(b2).addcmul_(ghat, ghat, value=1 - b2)
    else:
        v = _spread(second_moment, param.shape, row_dims, selection, momentum)
        if column_factors is not None:
            v *= _spread(column_factors, param.shape, column_dims(param.dim(), row_dims), selection, momentum)
    denominator = v.sqrt_().div_((1 - b2**step) ** 0.5).add_(eps)
    update = (mean / denominator).mul_(lr / (1 - b1**step))
    if weight_decay:
        param.mul_(1 - lr * weight_decay)
    flat = param.view(-1)
    if isinstance(selection, FullSelection):
        flat.sub_(update)
    else:
        # in the state's precision, rounded once
        selection.put_(flat, selection.take(flat).to(update.dtype).sub_(update))
        momentum.zero_()
    selection.put_(momentum, mean)


def _spread(rows, shape, dims, selection, flat) -> torch.Tensor:
    """What `rows` holds for the row (an index along `dims`) of each entry of the selection."""
    places = selection.places(flat)
    if places is None:
        return flat.new_empty(shape).copy_(rows.view(row_shape(shape, dims))).view(-1)
    return rows.index_select(0, rows_of(places, shape, dims))
