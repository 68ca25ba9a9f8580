"""Split layers and the autograd functions around their communication."""

from .dropout import SplitRng
from .linear import COLWISE_LAYERS, OUT_DIM, ROWWISE_LAYERS, SplitLayer, linear_kind
from .sequence import Boundary, LayerEntry, LeadEntry, StackEntry, StackExit

__all__ = [
    "COLWISE_LAYERS", "OUT_DIM", "ROWWISE_LAYERS", "Boundary", "LayerEntry", "LeadEntry", "SplitLayer", "SplitRng",
    "StackEntry", "StackExit", "linear_kind",
]  # fmt: skip
