"""Optimizers that know nothing of other ranks."""

from hf_taco_scape.optim.adams import AdamS

__all__ = ["AdamS"]
