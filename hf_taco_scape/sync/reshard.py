"""Resuming at another data-parallel size: what the ranks share is kept, and so is the mean of what they do not."""

from collections.abc import Iterable

import torch


def merge_residuals(state_dicts: Iterable[dict]) -> dict:
    """One state dict for every rank of a new data-parallel group, from those of all ranks of the old one.

    Every new rank gets the mean of the old residuals: a step averages c over the ranks, so it sees them only
    through their mean, which is kept whatever the two sizes. Momentum, masks and schedule position are the first's.
    `state_dicts` may be a generator that loads one file at a time; residuals are summed in fp64.
    """
    merged, totals, count = None, {}, 0
    for state_dict in state_dicts:
        count += 1
        if merged is None:
            merged = {**state_dict, "state": {i: dict(state) for i, state in state_dict["state"].items()}}
        for i, state in state_dict["state"].items():
            if "residual" not in state:
                continue
            residual = state["residual"].to("cpu", torch.float64)
            totals[i] = totals[i].add_(residual) if i in totals else residual.clone()
    if merged is None:
        raise ValueError("no state dict given: pass those of all ranks of the old data-parallel group")
    for i, total in totals.items():
        old = merged["state"][i]["residual"]
        merged["state"][i]["residual"] = total.div_(count).to(old.device, old.dtype)
    return merged
