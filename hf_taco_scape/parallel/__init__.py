"""Splitting a model over ranks, gathering it back, and loading slices."""

from .loading import from_pretrained
from .model import ParameterSplit, parameter_splits, split_state
from .parallel_dims import ParallelDims
from .parallelize import parallelize
from .state_dict import gather_state_dict, save_pretrained

__all__ = [
    "ParallelDims", "ParameterSplit", "from_pretrained", "gather_state_dict", "parallelize", "parameter_splits",
    "save_pretrained", "split_state",
]  # fmt: skip
