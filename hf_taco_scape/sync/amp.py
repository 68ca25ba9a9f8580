"""fp16 loss scaling: an overflow on any rank is an overflow on all, known before anything is exchanged."""

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from hf_taco_scape.collectives.sparse import group_size


def share_found_inf(found_inf, device: torch.device, groups: list[dist.ProcessGroup | None]) -> torch.Tensor:
    """The largest `found_inf` (0-dim or a number) over every group in turn: > 0 on all ranks if it was on one."""
    shared = torch.as_tensor(found_inf, dtype=torch.float32).to(device, copy=True).view(1)
    for group in groups:
        if group_size(group) > 1:
            dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    return shared.view(())


def unscale_and_share(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    groups: list[dist.ProcessGroup | None],
) -> bool:
    """Unscale the gradients unless that was done, and write the shared overflow back into `scaler`.

    Returns whether any rank overflowed. All ranks then skip the step together and keep one loss scale.
    """
    if not scaler.is_enabled():
        return False
    # GradScaler has no public view of its per-optimizer state; these names are unchanged from torch 2.0 to 2.13
    state = scaler._per_optimizer_states[id(optimizer)]
    if state["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
    found = state["found_inf_per_device"]
    shared = share_found_inf(sum(t.to(device) for t in found.values()), device, groups)
    for t in found.values():
        t.copy_(shared)
    # a rank on which no parameter had a gradient recorded nothing, which scaler.step would refuse
    found.setdefault(device, shared)
    return bool(shared > 0)
