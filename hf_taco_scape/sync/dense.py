"""Dense gradient synchronisation: partial gradients are summed over tp first, then everything is averaged over dp."""

import torch
import torch.distributed as dist

from ..collectives.meter import ByteMeter

BUCKET_BYTES = 25 * 2**20


@torch.no_grad()
def sum_partial_gradients(entries, group) -> None:
    """Sum over the tensor-parallel group the gradients of which each rank computed a part, in place.

    entries: (parameter, shard or None, tp_rank) of replicated parameters that saw this rank's heads only (shard None),
    and of slices that several ranks hold (replicated KV heads): those are added at their place in the whole tensor.
    Every rank ends with the same bits. dist equivalent: all_reduce(grad, SUM) per parameter.
    """
    entries = [entry for entry in entries if entry[0].grad is not None]
    if not entries:
        return
    whole = []
    for parameter, shard, tp_rank in entries:
        if shard is None:
            whole.append(parameter.grad)
        else:
            full = parameter.grad.new_zeros(shard.full_shape(parameter.grad))
            shard.put(full, parameter.grad, tp_rank)
            whole.append(full)
    _reduce_in_buckets(whole, group, divide_by=1)
    for (parameter, shard, tp_rank), summed in zip(entries, whole, strict=True):
        parameter.grad.copy_(summed if shard is None else shard.take(summed, tp_rank))


@torch.no_grad()
def average_gradients(parameters, group, meter: ByteMeter | None = None) -> None:
    """Average `parameters`' gradients over the data-parallel group, in place, in buckets.

    A parameter that got a gradient on some ranks only counts as zero on the others; one that got none anywhere keeps
    None, as in DistributedDataParallel. Every rank passes the same parameters in the same order.
    """
    ranks = dist.get_world_size(group)
    device = parameters[0].device
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    gradients = []
    for parameter, anywhere in zip(parameters, used.tolist(), strict=True):
        if anywhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad.is_sparse:
                raise ValueError("sparse gradients are not supported: build the embedding with sparse=False")
            gradients.append(parameter.grad)
    _reduce_in_buckets(gradients, group, divide_by=ranks)
    if meter is not None:
        sent = sum(g.numel() * g.element_size() for g in gradients) * 2 * (ranks - 1) // ranks
        meter.add(sent, sent)


@torch.no_grad()
def gradient_norm(parameters, weights: dict, group) -> torch.Tensor:
    """L2 norm of the whole model's gradient, as an fp32 scalar that is the same on every rank.

    weights: parameter -> share of its squares that this rank contributes; parameters that are split over `group` are
    in it (1 / copies), replicated ones are not and count once. `group` None: nothing is split.
    """
    gradients = {p: p.grad for p in parameters if p.grad is not None}
    if not gradients:
        return torch.zeros(())
    device = next(iter(gradients.values())).device
    replicated, split = torch.zeros((), device=device), torch.zeros((), device=device)
    for parameter, gradient in gradients.items():
        wide = torch.promote_types(gradient.dtype, torch.float32)
        square = torch.linalg.vector_norm(gradient, dtype=wide).square().to(device, torch.float32)
        if parameter in weights:
            split += square * weights[parameter]
        else:
            replicated += square
    if group is not None:
        dist.all_reduce(split, group=group)
    return (replicated + split).sqrt()


def _reduce_in_buckets(gradients: list[torch.Tensor], group, divide_by: int) -> None:
    for bucket in _buckets(gradients):
        flat = torch.cat([g.reshape(-1) for g in bucket])
        dist.all_reduce(flat, group=group)
        if divide_by > 1:
            flat.div_(divide_by)
        for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(gradients: list[torch.Tensor]):
    """Groups of one dtype and device, of at least BUCKET_BYTES but for the last, in the given order."""
    by_kind: dict = {}
    for gradient in gradients:
        by_kind.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    for same in by_kind.values():
        bucket, size = [], 0
        for gradient in same:
            bucket.append(gradient)
            size += gradient.numel() * gradient.element_size()
            if size >= BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket
