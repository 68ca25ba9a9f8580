"""Sparse data-parallel synchronisation (SCAPE): `ScapeAdamS` and what it is made of."""

from hf_taco_scape.sync.density import DensitySchedule
from hf_taco_scape.sync.layout import TensorLayout, module_layout
from hf_taco_scape.sync.reshard import merge_residuals
from hf_taco_scape.sync.scape_adams import ScapeAdamS

__all__ = ["DensitySchedule", "ScapeAdamS", "TensorLayout", "merge_residuals", "module_layout"]
