"""The gradients of one optimizer step in a tp x dp world: when and how they are synchronised, measured and clipped.

Order of a step: sums over tp of gradients that are parts (norms and KV heads that see some heads only), then dp: dense
averages that overlap with the backward, or SCAPE's exchange inside its optimizer; then the norm, counted once over tp.
"""

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
        self._norm: torch.Tensor | None = None  # SCAPE's, of the last synchronisation
        self._dirty = False
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
        if self._average is not None:
            self._average.remove()
            self._average = None

    # ---- one step
    def before_backward(self, last: bool) -> None:
        """Announce a backward; `last` of its step, so that dense averages may leave while it runs."""
        # cleared by the sync, not by the optimizer's step: a step skipped for fp16 overflow keeps nothing
        self._dirty = True
        if last and self.dims.dp_size > 1 and self.scape is None:
            self._overlapped().arm()

    def sync(self, max_norm: float | None, scaler, unscale) -> torch.Tensor | None:
        """Synchronise the step's gradients, unless that is done already; collective.

        Under SCAPE the exchange clips to `max_norm` where given, and its norm is returned (by later calls too). Dense
        gradients are averaged, then `unscale()` is called (fp16), and None is returned.
        """
        if self._dirty:
            self._dirty = False
            self._sum_partial()
            if self.scape is not None:
                self._norm = self.scape.sync(max_norm, scaler=scaler)
            else:
                self._average_over_dp()
                unscale()
        return self._norm if self.scape is not None else None

    def clip(self, parameters: list[nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip synchronised gradients by the norm of the whole model's gradient; returns it, equal on all ranks."""
        if self.dims.tp_size == 1:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        weights = {p: 1 / s.copies for p, s in self.splits.items() if s.shard is not None}
        norm = gradient_norm(parameters, weights, self.dims.tp_group)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def _trainable(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(p for model in self.models for p in model.parameters() if p.requires_grad))

    def _is_partial(self, parameter: nn.Parameter) -> bool:
        return parameter in self.splits and self.splits[parameter].partial

    def _sum_partial(self) -> None:
        partial = [p for p in self._trainable() if self._is_partial(p)]
        if partial:
            entries = [(p, self.splits[p].shard, self.dims.tp_rank) for p in partial]
            sum_partial_gradients(entries, self.dims.tp_group)

    def _average_over_dp(self) -> None:
        if self.dims.dp_size == 1:
            return
        partial = [p for p in self._trainable() if self._is_partial(p)]
        if partial:
            average_gradients(partial, self.dims.dp_group, self.meter)
        overlapped = self._overlapped()
        overlapped.arm_if_needed()
        overlapped.finish()

    def _overlapped(self) -> OverlappedAverage:
        """Averages everything but partial gradients, whose sum over tp comes first."""
        parameters = [p for p in self._trainable() if not self._is_partial(p)]
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
