"""Messages between ranks: an all-to-all and a gather of bytes, over gloo and NCCL."""

import torch
import torch.distributed as dist

try:
    from torch.distributed import all_gather_single, reduce_scatter_single
except ImportError:  # torch < 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_single
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single

__all__ = ["all_gather_single", "exchange", "gather", "group_ranks", "reduce_scatter_single"]


def group_ranks(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this process's rank in `group` and the group's size; ValueError if it is not a member."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group it calls a collective on: pass its own group")
    return rank, ranks


def exchange(wires: torch.Tensor, send: list[int], receive: list[int], group) -> torch.Tensor:
    """Return the bytes for this rank, uint8[sum(receive)] in rank order; `wires` uint8[sum(send)] are those it sends.

    Plain torch.distributed: `all_to_all_single`.
    """
    received = torch.empty(sum(receive), dtype=torch.uint8, device=wires.device)
    dist.all_to_all_single(received, wires, receive, send, group=group)
    return received


def gather(wires: torch.Tensor, group, pieces: int = 1) -> torch.Tensor:
    """Return uint8[ranks, bytes] with row r from rank r; each rank filled its own row of `wires`, which may be reused.

    pieces: how many messages, under way at once, two gloo ranks send a row in. Plain torch.distributed:
    `all_gather_into_tensor`.
    """
    rank, ranks = group_ranks(group)
    if wires.is_cuda and "nccl" in dist.get_backend_config(group):
        all_gather_single(wires.view(-1), wires[rank], group=group)
        return wires
    # gloo's all-gather of bytes is up to eight times as slow as its all-to-all
    size = wires.shape[1]
    if ranks == 2:
        peer = 1 - rank
        works = []
        for theirs, mine in zip(wires[peer].chunk(pieces), wires[rank].chunk(pieces), strict=True):
            only_peer = [len(mine) * (r == peer) for r in range(2)]
            works.append(dist.all_to_all_single(theirs, mine, only_peer, only_peer, group=group, async_op=True))
        for work in works:
            work.wait()
        return wires
    return exchange(wires[rank].repeat(ranks), [size] * ranks, [size] * ranks, group).view(ranks, size)
