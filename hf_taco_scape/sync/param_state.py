"""What ScapeAdamS accepts as a parameter, and the state it keeps for each."""

import torch

from hf_taco_scape.optim.adams import state_dtype
from hf_taco_scape.sync.slot import Slot


def check_group(group: dict, device: torch.device) -> None:
    """Raise ValueError unless every parameter of a group can be synchronised from `device`."""
    if group["sparse"] and group["already_reduced"]:
        raise ValueError("a sparse group is averaged here: drop sparse=True or already_reduced=True")
    if device.type == "meta":
        raise ValueError("parameters are on the meta device: materialise the model before building the optimizer")
    for p in group["params"]:
        if p.device != device:
            raise ValueError(
                f"all parameters must be on one device, got {device} and {p.device}: move the model before building "
                f"the optimizer, or build one optimizer a device"
            )
        if p.is_complex() or not p.is_contiguous():
            raise ValueError(
                f"ScapeAdamS needs real, contiguous parameters, got {p.dtype} of shape {tuple(p.shape)} with strides "
                f"{p.stride()}: assign param.data = param.data.contiguous() first"
            )


def is_sparse(param: torch.nn.Parameter, group: dict) -> bool:
    """Whether a parameter is thinned: two or more dimensions, unless its group says otherwise."""
    wanted = group["sparse"]
    if wanted is None:
        wanted = param.dim() >= 2 and not group["already_reduced"]
    return bool(wanted) and param.numel() > 0


def complete_state(slot: Slot, options: dict, residual_device: torch.device | None) -> None:
    """Fill an empty state; raise ValueError for one that was saved with other options."""
    p, state = slot.param, slot.state
    like = {"dtype": state_dtype(p), "device": p.device}
    fresh = {"momentum": lambda: torch.zeros(p.shape, **like)}
    if slot.sparse:
        fresh["residual"] = lambda: place_residual(torch.zeros(p.shape, **like), residual_device, p.device)
        if options["second_moment"] in ("row", "factored"):
            fresh["second_moment"] = lambda: torch.zeros(slot.rows, **like)
        if options["second_moment"] == "factored":
            fresh["column_moment"] = lambda: torch.zeros(slot.columns, **like)
        if options["mask"] == "cyclic":
            fresh["mask_start"] = int
    if options["mask"] != "cyclic":
        state.pop("mask_start", None)
    missing = sorted(fresh.keys() - state.keys())
    # nobody keeps these up now, yet the update would read them
    surplus = sorted(state.keys() - fresh.keys() - {"mask", "mask_k"})
    if state and missing or surplus:
        said = [f"{verb} {', '.join(keys)}" for verb, keys in (("lacks", missing), ("has", surplus)) if keys]
        raise ValueError(
            f"the loaded state of a parameter of shape {tuple(p.shape)} {' and '.join(said)}: it was saved with "
            f"other options; now {options}. Resume with those it was saved with, or start a new optimizer"
        )
    for key in missing:
        state[key] = fresh[key]()


def place_residual(residual: torch.Tensor, device: torch.device | None, home: torch.device) -> torch.Tensor:
    """The residual where it is kept: on `device`, or with its parameter at `home` (None).

    On the host of another home it is pinned, so that it comes and goes without stopping the host.
    """
    if device is None or device.type == home.type:
        return residual.to(home)
    return residual.to(device).pin_memory()
