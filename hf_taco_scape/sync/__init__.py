"""Sparse data-parallel synchronisation (SCAPE): `ScapeAdamS` and what it is made of.

AdamS is passed on from optim: importing it here registers the Triton kernels that it runs as on CUDA (device.py).
"""

from hf_taco_scape.optim.adams import AdamS
from hf_taco_scape.sync.density import DensitySchedule
from hf_taco_scape.sync.layout import TensorLayout, module_layout
from hf_taco_scape.sync.reshard import merge_residuals
from hf_taco_scape.sync.scape_adams import ScapeAdamS

__all__ = ["AdamS", "DensitySchedule", "ScapeAdamS", "TensorLayout", "merge_residuals", "module_layout"]
