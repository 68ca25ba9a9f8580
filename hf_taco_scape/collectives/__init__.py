"""Raw collectives (no autograd) whose messages travel through a codec, and the counts of what they send."""

from .compressed import all_gather, all_reduce, reduce_scatter
from .meter import ByteMeter

__all__ = ["ByteMeter", "all_gather", "all_reduce", "reduce_scatter"]
