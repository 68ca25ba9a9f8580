"""Tripwire: tensor-parallel peers compute one model together, so they must be fed the same batches.

Peers with different batches or random states would train on garbage without an error; peers with different shapes
would hang. The first forwards, and then one in `_EVERY`, compare digests over the group before anything is computed.
"""

import torch
from torch.utils._pytree import tree_leaves

from .replicas import differ, digest

_FIRST, _EVERY = 3, 64


class PeerCheck:
    """Forward pre-hook of a split model; `group` is the tensor-parallel group."""

    def __init__(self, group, device: torch.device) -> None:
        self._group, self._device = group, device
        self._seen = {True: 0, False: 0}  # by model.training

    def __deepcopy__(self, memo):
        return self

    def __call__(self, model, args, kwargs) -> None:
        if torch.compiler.is_compiling():
            return
        count = self._seen[model.training]
        self._seen[model.training] += 1
        if count < _FIRST or count % _EVERY == 0:
            self.compare(tree_leaves((args, kwargs)), random_state=model.training)

    def compare(self, leaves: list, random_state: bool) -> None:
        """Raise ValueError on every rank where `leaves` (tensors and plain values) differ over the group."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        shapes = sum(
            (i + 1) * (3 * t.numel() + sum(d * 31**k for k, d in enumerate(t.shape))) for i, t in enumerate(tensors)
        )
        content = sum(
            ((i + 1) * digest(t).to(self._device) for i, t in enumerate(tensors)),
            torch.zeros((), dtype=torch.int64, device=self._device),
        )
        states = digest(torch.get_rng_state()).to(self._device) if random_state else torch.zeros_like(content)
        facts = torch.stack([torch.tensor(shapes, device=self._device), content, states])
        wrong = differ(facts, self._group)
        if 0 in wrong or 1 in wrong:
            raise ValueError(
                "the processes of one tensor-parallel group got different batches. They must all read the same data "
                "in the same order: give every process the same dataset and seed, don't shuffle by rank, and let "
                "the prepared dataloader do the sharding (it shards over data-parallel ranks only)"
            )
        if 2 in wrong:
            raise ValueError(
                "the processes of one tensor-parallel group have different random states, so that dropout on "
                "replicated activations would differ: call set_seed(seed) with one seed on all of them"
            )


def share_random_state(group, device: torch.device) -> None:
    """Give every rank of the group the random state of its first rank (CPU, and this CUDA device); collective."""
    import torch.distributed as dist

    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    for place, state in enumerate(states):
        message = state.to(device)
        dist.broadcast(message, group=group, group_src=0)
        (torch.set_rng_state if place == 0 else torch.cuda.set_rng_state)(message.cpu())
