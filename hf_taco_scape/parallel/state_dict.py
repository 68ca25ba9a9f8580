"""Whole tensors out of slices: a split model is saved as a plain Hugging Face checkpoint."""

from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn

from .model import split_state
from .sharding import Shard


@torch.no_grad()
def gather_state_dict(
    model: nn.Module, keep: bool = True, device: str | torch.device = "cpu"
) -> dict[str, torch.Tensor]:
    """The state dict of the whole model, names and shapes as before the split; collective over the tp group.

    Ranks with keep=False take part but get an empty dict (one rank in memory at a time is enough to write a file).
    Tied names share one tensor. A model that is not split returns its own state dict.
    """
    state = split_state(model)
    own = model.state_dict()
    if state is None:
        return own if keep else {}
    shards = _shards_by_name(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    whole: OrderedDict[str, torch.Tensor] = OrderedDict()  # the type by which accelerate knows a state dict
    by_parameter: dict[int, torch.Tensor] = {}
    for name, tensor in own.items():
        key = id(parameters.get(name, name))
        if key not in by_parameter:
            full = gather_tensor(tensor, shards[name], state.comm.group, state.device) if name in shards else tensor
            by_parameter[key] = full.to(device) if keep else None
        if keep:
            whole[name] = by_parameter[key]
    return whole


def gather_tensor(part: torch.Tensor, shard: Shard, group, device: torch.device) -> torch.Tensor:
    """The whole tensor of which each rank holds `part`, on `device`; collective over the group.

    Ranks' parts may differ in size: they travel padded to the largest. dist equivalent: all_gather, then placing.
    """
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    unit = part.numel() // shard.size(me)
    message = torch.zeros(unit * max(shard.size(r) for r in range(ranks)), dtype=part.dtype, device=device)
    message[: part.numel()] = part.reshape(-1)
    parts = [torch.empty_like(message) for _ in range(ranks)]
    dist.all_gather(parts, message, group=group)
    full = torch.empty(shard.full_shape(part), dtype=part.dtype, device=device)
    shape = list(part.shape)
    for rank, flat in enumerate(parts):
        shape[shard.dim] = shard.size(rank)
        shard.put(full, flat[: unit * shard.size(rank)].view(shape), rank)
    return full


def save_pretrained(model: nn.Module, save_directory, **kwargs) -> None:
    """Write one plain Hugging Face checkpoint that `from_pretrained` loads anywhere; collective over all ranks.

    The world's rank 0 writes (each node's first rank with save_on_each_node=True); all ranks return after it is there.
    Further arguments go to the model's own save_pretrained.
    """
    import os

    started = dist.is_available() and dist.is_initialized()
    on_each_node = kwargs.pop("save_on_each_node", False)
    rank = int(os.environ.get("LOCAL_RANK", 0)) if on_each_node else (dist.get_rank() if started else 0)
    state_dict = gather_state_dict(model, keep=rank == 0)
    if rank == 0:
        model.save_pretrained(save_directory, state_dict=state_dict, **kwargs)
    if started:
        dist.barrier()


def _shards_by_name(model: nn.Module) -> dict[str, Shard]:
    return {
        f"{module_name}.{name}": shard
        for module_name, module in model.named_modules()
        for name, shard in getattr(module, "tp_shards", {}).items()
    }
