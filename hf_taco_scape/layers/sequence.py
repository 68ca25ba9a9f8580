"""Sequence parallelism: which activations are whole and which are pieces of the sequence, and the hooks that say so.

In a pass that computes gradients, the layers between the embeddings and the final norm work on pieces: norms, residual
additions and dropout see this rank's positions, blocks see all of them. A pass without gradients keeps no activations,
so there is nothing to save: it takes the all-reduces of plain tensor parallelism (generation, evaluation). The choice
depends on torch.is_grad_enabled() alone, which all ranks share, never on the length.

The whole length goes to the layers as a keyword argument, beside the mask and the positions: so it is there again when
activation checkpointing runs a layer a second time, whether transformers replays its hooks (5.17) or not (5.24).
"""

import torch

from .dropout import SplitRng
from .mappings import (
    copy_to_split,
    gather_to_split,
    join_pieces,
    reduce_from_split,
    scatter_from_split,
    take_piece,
)

LENGTH = "tp_sequence_length"


class Boundary:
    """How activations enter and leave the split parts of a model's blocks; one object a model.

    length: of the whole sequence while layers work on pieces, None while activations are replicated.
    """

    def __init__(self, comm) -> None:
        self.comm = comm
        self.length: int | None = None

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        if self.length is None:
            return copy_to_split(x, self.comm)
        return gather_to_split(x, self.length, self.comm)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        if self.length is None:
            return reduce_from_split(x, self.comm)
        return scatter_from_split(x, self.comm)


class StackEntry:
    """Forward pre-hook of the base model: tells the layers of a pass with gradients how long the sequence is.

    Raises ValueError where the hidden states of all layers are asked for: they would be pieces.
    """

    def __call__(self, base, args, kwargs):
        if not torch.is_grad_enabled():
            return args, kwargs
        wanted = kwargs.get("output_hidden_states")
        if wanted is None:
            wanted = getattr(base.config, "output_hidden_states", False)
        if wanted is not None and wanted is not False:
            raise ValueError(
                "sequence_parallel splits the hidden states of a training pass over ranks: ask for "
                "output_hidden_states under torch.no_grad(), or train with sequence_parallel false"
            )
        tokens = args[0] if args else kwargs.get("input_ids")
        length = kwargs["inputs_embeds"].shape[-2] if tokens is None else tokens.shape[-1]
        return args, {**kwargs, LENGTH: length}


class LayerEntry:
    """Forward pre-hook of a layer: the first one takes its piece; dropout on pieces draws from this rank's stream."""

    def __init__(self, comm, first: bool, rng: SplitRng | None) -> None:
        self.comm, self.first, self.rng = comm, first, rng

    def __call__(self, layer, args, kwargs):
        if kwargs.get(LENGTH) is None:
            return args, kwargs
        hidden = args[0] if args else kwargs["hidden_states"]
        if self.rng is not None:
            self.rng.enter(layer, hidden.device)
        if not self.first:
            return args, kwargs
        hidden = take_piece(hidden, self.comm)
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    def leave(self, layer, args, output) -> None:
        """Forward hook of the same layer."""
        if self.rng is not None:
            self.rng.leave()


class LeadEntry:
    """Forward pre-hook, before any other, of the block that runs first in a layer: sets the layer's boundary.

    A block and not the layer, because only a block is sure to be replayed by activation checkpointing.
    """

    def __init__(self, boundary: Boundary) -> None:
        self.boundary = boundary

    def __call__(self, block, args, kwargs):
        self.boundary.length = kwargs.get(LENGTH)
        if self.boundary.length is None and torch.is_grad_enabled():
            raise ValueError(
                "sequence_parallel: this layer was not told how long the sequence is. Call the whole model, not its "
                "layers (or call them under torch.no_grad())"
            )
        return args, {name: value for name, value in kwargs.items() if name != LENGTH}


class StackExit:
    """Forward pre-hook of the final norm: pieces become whole activations again."""

    def __init__(self, boundary: Boundary) -> None:
        self.boundary = boundary

    def __call__(self, norm, args):
        boundary = self.boundary
        if boundary.length is None:
            return args
        hidden = join_pieces(args[0], boundary.length, boundary.comm)
        boundary.length = None
        return (hidden, *args[1:])
