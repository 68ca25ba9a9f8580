"""The gradients of one optimizer step in a tp x dp world: when and how they are synchronised, measured and clipped.

Order of a step: sums over tp of gradients that are parts (norms and KV heads that see some heads only), then dp: dense
averages that overlap with the backward, or SCAPE's exchange inside its optimizer; then the norm, counted once over tp.
"""

import math

import torch
import torch.distributed as dist
from torch import nn

from .collectives.meter import ByteMeter
from .parallel import ParallelDims, ParameterSplit, parameter_splits
from .parallel.model import group_device
from .parallel.replicas import differing_tensors
from .scape import bind_optimizer
from .sync import ScapeAdamS
from .sync.dense import average_gradients, gradient_norm, sum_partial_gradients
from .sync.overlap import OverlappedAverage


class StepGradients:
    """Synchronises the gradients of `models` once an optimizer step.

    scape: the ScapeAdamS that does the data-parallel exchange; None for dense averages. meter: data-parallel bytes.
    """

    def __init__(self, dims: ParallelDims) -> None:
        self.dims, self.meter = dims, ByteMeter()
        self.models: list[nn.Module] = []
        self.splits: dict[nn.Parameter, ParameterSplit] = {}
        self.scape: ScapeAdamS | None = None
        self.began = False  # accelerator.backward has run, and with it this class
        self._norm: torch.Tensor | None = None  # SCAPE's, of the last synchronisation
        self._scape_due = False
        self._limit: float | None = None  # what it clipped to
        self._summed: dict[nn.Parameter, torch.Tensor] = {}  # partial gradients that are sums already
        self._aside: dict[nn.Parameter, torch.Tensor] = {}  # the same, while more of them is computed
        self._average: OverlappedAverage | None = None

    # ---- what there is to synchronise
    def add_model(self, model: nn.Module) -> None:
        if not any(model is known for known in self.models):
            self.models.append(model)
            self.splits |= parameter_splits(model)

    @torch.no_grad()
    def share_weights(self, model: nn.Module) -> None:
        """Give every data-parallel rank the first one's parameters and buffers; collective."""
        if self.dims.dp_size > 1:
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor, group=self.dims.dp_group, group_src=0)

    def use_scape(self, optimizer: ScapeAdamS) -> None:
        if self.scape not in (None, optimizer):
            raise ValueError("one ScapeAdamS an accelerator: put all parameters into its groups")
        bind_optimizer(optimizer, self.dims, self.models, self.meter)
        self.scape = optimizer

    def forget(self) -> None:
        """Let go of models and optimizer, and take the hooks off their parameters."""
        self.models, self.splits, self.scape = [], {}, None
        self._summed, self._aside = {}, {}
        if self._average is not None:
            self._average.remove()
            self._average = None

    # ---- one step
    def before_backward(self, last: bool) -> None:
        """Announce a backward; `last` of its step: dense averages may leave while it runs."""
        self.began = True
        # what an earlier backward of this step has summed over tp must not be summed again: set it aside
        for parameter, gradient in self._summed.items():
            if parameter.grad is gradient:
                self._aside[parameter], parameter.grad = gradient, None
        self._summed = {}
        if not last:
            return
        self._scape_due = True
        if self.dims.dp_size > 1 and self.scape is None:
            average = self._overlapped()
            if average is not None:
                average.arm()

    def after_backward(self, last: bool) -> None:
        """After the last backward of a step: `.grad` becomes what a user may read, change and clip; collective.

        Partial gradients are summed over tp; dense ones are averaged over dp. Under SCAPE they stay this rank's own.
        """
        if not last:
            return
        partial = [p for p, split in self.splits.items() if split.partial and p.requires_grad]
        if partial:
            entries = [(p, self.splits[p].shard, self.dims.tp_rank) for p in partial]
            sum_partial_gradients(entries, self.dims.tp_group)
        if self.dims.dp_size > 1 and self.scape is None:
            if partial:
                average_gradients(partial, self.dims.dp_group, self.meter)
            if self._average is not None:
                self._average.finish()
        for parameter, before in self._aside.items():
            parameter.grad = before if parameter.grad is None else parameter.grad.add_(before)
        self._aside = {}
        self._summed = {p: p.grad for p in partial if p.grad is not None}

    def exchange(self, max_norm: float | None, scaler) -> torch.Tensor | None:
        """SCAPE's exchange of a step, once; clips to `max_norm` where given and returns the norm. None if dense."""
        if self.scape is None:
            return None
        if self._scape_due:
            self._scape_due, self._limit = False, max_norm
            self._norm = self.scape.sync(max_norm, scaler=scaler)
        elif max_norm not in (None, math.inf, self._limit):
            raise ValueError(
                f"this step was synchronised with max_norm {self._limit}: clip once a step, not to {max_norm} now"
            )
        return self._norm

    def clip(self, parameters: list[nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip by the norm of the whole model's gradient; returns it, equal on all ranks of a model copy."""
        if self.dims.tp_size == 1:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        weights = {p: 1 / s.copies for p, s in self.splits.items() if s.shard is not None}
        # before the last micro-batch they are still parts of sums: count each rank's, so that all scale alike
        weights |= {p: 1.0 for p, s in self.splits.items() if s.partial and p not in self._summed}
        norm = gradient_norm(parameters, weights, self.dims.tp_group)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def _trainable(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(p for model in self.models for p in model.parameters() if p.requires_grad))

    def _is_partial(self, parameter: nn.Parameter) -> bool:
        return parameter in self.splits and self.splits[parameter].partial

    def _overlapped(self) -> OverlappedAverage | None:
        """Averages everything but partial gradients, whose sum over tp comes first; None if there is nothing else."""
        parameters = [p for p in self._trainable() if not self._is_partial(p)]
        if not parameters:
            return None
        if self._average is None or [id(p) for p in self._average.parameters] != [id(p) for p in parameters]:
            if self._average is not None:
                self._average.remove()
            self._average = OverlappedAverage(parameters, self.dims.dp_group, self.meter)
        return self._average

    # ---- replicas
    def compare_replicas(self, step: int) -> None:
        """RuntimeError that names parameters whose copies are not the same bits; collective over all ranks."""
        named = [item for model in self.models for item in model.named_parameters()]
        whole = [(n, p) for n, p in named if p not in self.splits or self.splits[p].shard is None]
        for axis, group, tensors in (("tp", self.dims.tp_group, whole), ("dp", self.dims.dp_group, named)):
            wrong = differing_tensors(tensors, group, group_device(group)) if group in self.dims.wide_groups() else []
            if wrong:
                raise RuntimeError(
                    f"replicas have drifted apart after {step} steps: {wrong[0]} ({len(wrong)} tensors) is not the "
                    f"same on all {axis} ranks"
                )
