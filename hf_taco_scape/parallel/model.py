"""What a split model carries: its communicator, and overrides of the two methods that tensor parallelism changes."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ..collectives.dispatch import Communicator
from .peers import PeerCheck, share_random_state
from .sharding import Shard


@dataclass
class SplitState:
    """Attached to a split model as `model.taco_scape`."""

    comm: Communicator
    device: torch.device  # of the group's messages
    peers: PeerCheck


@dataclass(frozen=True)
class ParameterSplit:
    """How one parameter lies on the tensor-parallel ranks.

    shard: its split, None where it is replicated. partial: its gradient is this rank's part of a sum over ranks (norms
    that see this rank's heads or positions only, KV heads that several ranks hold), the same answer on every rank.
    copies: how many ranks hold this rank's slice.
    """

    shard: Shard | None = None
    partial: bool = False
    copies: int = 1


def group_device(group) -> torch.device:
    """Where messages of `group` must lie: this process's accelerator for NCCL, the CPU for gloo."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    )


def split_state(model: nn.Module) -> SplitState | None:
    """The `SplitState` of a split model (also behind torch.compile's wrapper), None for any other."""
    return getattr(getattr(model, "_orig_mod", model), "taco_scape", None)


def parameter_splits(model: nn.Module) -> dict[nn.Parameter, ParameterSplit]:
    """How each parameter of a split model lies on the ranks; parameters that are simply replicated are not listed."""
    splits = {}
    for module in model.modules():
        for name, shard in getattr(module, "tp_shards", {}).items():
            copies = [shard.copies(rank) for rank in range(len(shard.ranges))]
            splits[getattr(module, name)] = ParameterSplit(shard, max(copies) > 1, copies[module.tp_rank])
        for name in getattr(module, "tp_partial", ()):
            splits[getattr(module, name)] = ParameterSplit(partial=True)
    return splits


class _SplitMethods:
    """Mixed into the class of a split model."""

    def generate(self, *args, **kwargs):
        # sampling draws from the global generators: peers must draw the same token
        share_random_state(self.taco_scape.comm.group, self.taco_scape.device)
        return super().generate(*args, **kwargs)

    def save_pretrained(self, save_directory, is_main_process=True, state_dict=None, **kwargs):
        if state_dict is None:
            raise ValueError(
                "this rank holds slices only. Call hf_taco_scape.save_pretrained(model, directory) on all ranks: it "
                "gathers the weights and writes one plain checkpoint"
            )
        return super().save_pretrained(
            save_directory, is_main_process=is_main_process, state_dict=state_dict, **kwargs
        )


def as_split_model(model: nn.Module, comm: Communicator, device: torch.device) -> None:
    """Attach the state, the peers' tripwire and the overrides; the class keeps its name, bases and module."""
    peers = PeerCheck(comm.group, device)
    model.taco_scape = SplitState(comm, device, peers)
    model.register_forward_pre_hook(peers, with_kwargs=True)
    cls = type(model)
    # transformers looks classes up by name (architectures, label names, loss kinds)
    model.__class__ = type(
        cls.__name__, (_SplitMethods, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    )
