"""Split layers and the autograd functions around their communication."""

from .dropout import SplitRng
from .linear import COLWISE_LAYERS, OUT_DIM, ROWWISE_LAYERS, SplitLayer, linear_kind
from .mappings import copy_to_split, reduce_from_split

__all__ = [
    "COLWISE_LAYERS", "OUT_DIM", "ROWWISE_LAYERS", "SplitLayer", "SplitRng", "copy_to_split", "linear_kind",
    "reduce_from_split",
]  # fmt: skip
