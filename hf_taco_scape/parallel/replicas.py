"""Comparing what several ranks hold without sending it: exact 64-bit digests of tensors."""

import torch
import torch.distributed as dist

_CHUNK = 2**22  # elements turned into 64-bit integers at a time
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def digest(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit integer of the tensor's bits, as an int64 scalar on its device.

    Each element's bits times an odd number that depends on its place, added modulo 2^64: any change of one element
    changes the digest, whatever the order of summation.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    flat = flat.view(_INTEGER_OF_SIZE[flat.element_size()]) if flat.dtype != torch.bool else flat.to(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start, start + part.numel(), dtype=torch.int64, device=flat.device)
        total += (part * (2 * places + 1)).sum()
    return total


def differ(digests: torch.Tensor, group) -> list[int]:
    """Places where int64 `digests` (same length on all ranks) are not equal over the group; collective."""
    # max(h) and max(~h) = ~min(h) in one message
    both = torch.cat([digests, ~digests])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = both[: digests.numel()], ~both[digests.numel() :]
    return (largest != smallest).nonzero().flatten().tolist()


def differing_tensors(named: list[tuple[str, torch.Tensor]], group, device: torch.device) -> list[str]:
    """Names of the tensors whose bits differ over the group; collective. Every rank returns the same list.

    Raises ValueError where the ranks do not even hold the same number and sizes of tensors.
    """
    shape_digest = torch.tensor([len(named), sum((i + 1) * t.numel() for i, (_, t) in enumerate(named))])
    if differ(shape_digest.to(device), group):
        raise ValueError("the ranks built different models: names or shapes of parameters are not the same everywhere")
    if not named:
        return []
    digests = torch.stack([digest(tensor).to(device) for _, tensor in named])
    return [named[i][0] for i in differ(digests, group)]
