"""ScapeAdamS: AdamS that synchronises its data-parallel gradients itself, sparsely. One step t on W ranks, a tensor:

    c_w   = b1*m + (1-b1)*g_w + r_w                 each rank's gradient g_w and residual r_w
    next  = top-k of |c_owner|                      used in step t+1: the mask is one step late
    mt    = mean over ranks of c_w on the mask, 0 elsewhere;      r_w = c_w off the mask
    ghat  = (mt - b1*m)/(1-b1) on the mask, 0 elsewhere;          clipped by its norm over all tensors
    v     = b2*m^2 + (1-b2)*ghat^2
    p    -= lr*wd*p;    p -= lr/(1-b1^t) * mt/(sqrt(v)/sqrt(1-b2^t) + eps);    m = mt

Dense tensors (norms, biases) take an ordinary AdamS step on their averaged gradient, sent in the same message.
"""

import warnings
from collections import defaultdict

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from hf_taco_scape.collectives.meter import ByteMeter
from hf_taco_scape.collectives.sparse import group_size
from hf_taco_scape.optim.adams import adams_update_, check_hyperparameters, load_state_uncast, state_dtype
from hf_taco_scape.sync.amp import share_found_inf, unscale_and_share
from hf_taco_scape.sync.density import DensitySchedule
from hf_taco_scape.sync.grad_sync import GradSync
from hf_taco_scape.sync.layout import LayoutOf, plain_layout
from hf_taco_scape.sync.param_state import check_group, complete_state, is_sparse, place_residual
from hf_taco_scape.sync.slot import Slot

CHOICES = {
    "values": ("fp32", "bf16"),
    "second_moment": ("adams", "row", "factored"),
    "mask": ("topk", "cyclic", "random"),
    "clip": ("ghat", "local"),
}
ONE_RANK_WARNING = (
    "ScapeAdamS runs on one data-parallel rank: nothing is sent, yet the density thins every update; "
    "use AdamS for dense training on one rank"
)


class ScapeAdamS(Optimizer):
    """AdamS with SCAPE's sparse synchronisation (equations at the top of this file).

    Every rank builds it from the same parameters in the same order, leaves `.grad` unsynchronised (no DDP), and calls
    `step()` once after the last micro-batch. A parameter is sparse if it has two or more dimensions, unless its group
    says `sparse=True` or `sparse=False`; a group with `already_reduced=True` holds dense parameters whose gradients
    somebody else averages. A parameter without a gradient on this rank contributes zero.

    Args:
        params, lr, betas, eps, weight_decay: as for AdamS.
        density: share of each sparse tensor that is sent, in (0, 1]; 0.01 is 99 % sparse.
        hold_steps, warmup_steps: density stays 1 for `hold_steps` more steps after the first, then falls geometrically
            over `warmup_steps`.
        process_group: the data-parallel group (None: the default group).
        max_grad_norm: clip in `step()`. Leave None when `sync(max_norm)` is called instead: one owner of clipping.
        values: payload of the sparse values: "fp32" (the state's dtype), or "bf16" with its rounding fed back.
        second_moment: "adams" (the previous momentum); "row" (one number an output row, from local gradients) or
            "factored" (one an output row and one a column; sync/second_moment.py).
        mask: "topk" (each tensor's owner chooses), or "cyclic" or "random", which every rank works out itself.
        clip: "ghat" (the averaged gradient), or "local" (each rank's gradient, by its own norm, before it enters c).
        residual_device: "cpu" keeps the residuals in host memory and brings them in tensor by tensor.
        tp_group, layout: under tensor parallelism, the group that holds this model copy, and a callable that gives
            each parameter's `TensorLayout`. `layout` alone only says where the output rows are (see `module_layout`).
        ordered: sum in rank order, whatever the backend's algorithm (None: where tp replicas depend on it).
        seed: of the random masks, the same on all ranks.
        meter: a ByteMeter to count in; `self.meter` otherwise.

    State of a sparse parameter: momentum, residual (this rank's own), mask and mask_k or mask_start, second_moment,
    column_moment.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas=(0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        density: float = 0.01,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        max_grad_norm: float | None = None,
        values: str = "fp32",
        second_moment: str = "adams",
        mask: str = "topk",
        clip: str = "ghat",
        hold_steps: int = 0,
        *,
        residual_device: str | torch.device | None = None,
        tp_group: dist.ProcessGroup | None = None,
        layout: LayoutOf | None = None,
        ordered: bool | None = None,
        seed: int = 0,
        meter: ByteMeter | None = None,
    ) -> None:
        check_hyperparameters(lr, betas, eps, weight_decay)
        self.options = {"values": values, "second_moment": second_moment, "mask": mask, "clip": clip}
        for name, value in self.options.items():
            if value not in CHOICES[name]:
                raise ValueError(f"{name} must be one of {', '.join(CHOICES[name])}; got {value!r}")
        if tp_group is not None and layout is None:
            raise ValueError("tp_group needs layout=: a callable that gives the TensorLayout of each parameter")
        self.schedule = DensitySchedule(density, warmup_steps, hold_steps)
        self.max_grad_norm = _checked_norm(max_grad_norm)
        self.process_group, self.tp_group = process_group, tp_group
        self.layout = layout or plain_layout
        self.world = group_size(process_group)
        self._ordered = ordered
        self.seed = seed
        self.meter = ByteMeter() if meter is None else meter
        self.residual_device = None if residual_device is None else torch.device(residual_device)
        self.last_step_skipped = False
        self.last_norm: torch.Tensor | None = None  # of the last sync(), None where it measured none
        self._engine: GradSync | None = None
        self._synced: tuple | None = None
        self._steps_clipped, self._steps_measured = 0.0, 0
        if self.world == 1:
            warnings.warn(ONE_RANK_WARNING, stacklevel=2)
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"sparse": None, "already_reduced": False, "step": 0})

    # -- set-up ------------------------------------------------------------------------------------------------

    def bind(
        self,
        process_group: dist.ProcessGroup | None,
        tp_group: dist.ProcessGroup | None = None,
        layout: LayoutOf | None = None,
        meter: ByteMeter | None = None,
    ) -> None:
        """Set, between steps, what the constructor may not know yet: the groups, the layouts and the meter."""
        self._drop_engine()
        if tp_group is not None and layout is None:
            raise ValueError("tp_group needs layout=: a callable that gives the TensorLayout of each parameter")
        before, self.world = self.world, group_size(process_group)
        self.process_group, self.tp_group = process_group, tp_group
        self.layout = layout or self.layout
        self.meter = meter or self.meter
        if self.world == 1 < before:
            warnings.warn(ONE_RANK_WARNING, stacklevel=2)

    def add_param_group(self, param_group: dict) -> None:
        """Add a group, at any time and on every rank alike. Under `topk`, a tensor's first step sends all of it."""
        if self._synced is not None:
            raise RuntimeError("a group was added between sync() and step(): take the step first")
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1], self._device)
        except ValueError:
            self.param_groups.pop()
            raise
        self._drop_engine()

    def _drop_engine(self) -> None:
        if self._engine is not None:
            self._engine.masks.collect()
        self._engine = None

    def _build_engine(self) -> GradSync:
        slots = []
        for group in self.param_groups:
            for p in group["params"]:
                if not p.requires_grad:
                    continue
                slot = Slot(len(slots), p, group, self.state[p], self.layout(p), is_sparse(p, group))
                complete_state(slot, self.options, self.residual_device)
                slots.append(slot)
        if not slots:
            raise ValueError("no parameter requires a gradient")
        dtype = torch.float64 if any(state_dtype(s.param) == torch.float64 for s in slots) else torch.float32
        self._requires_grad = self._flags()
        return GradSync(
            slots,
            self.schedule,
            values_dtype=torch.bfloat16 if self.options["values"] == "bf16" else dtype,
            state_dtype=dtype,
            second_moment=self.options["second_moment"],
            mask=self.options["mask"],
            clip=self.options["clip"],
            group=self.process_group,
            tp_group=self.tp_group,
            ordered=self.world > 2 and self.tp_group is not None if self._ordered is None else self._ordered,
            seed=self.seed,
            meter=self.meter,
        )

    def _flags(self) -> list[bool]:
        return [p.requires_grad for group in self.param_groups for p in group["params"]]

    def _check_gradients(self) -> None:
        if self._flags() != self._requires_grad:
            raise ValueError("requires_grad changed after the first step: rebuild the optimizer after (un)freezing")
        for slot in self._engine.slots:
            grad = slot.param.grad
            if grad is not None and grad.is_sparse:
                raise ValueError(
                    f"ScapeAdamS needs dense gradients, but that of shape {tuple(slot.param.shape)} is sparse: "
                    f"build its layer with sparse=False"
                )

    # -- the step ----------------------------------------------------------------------------------------------

    @property
    def step_count(self) -> int:
        """Steps taken; the schedule's position."""
        return self.param_groups[0]["step"]

    @torch.no_grad()
    def sync(self, max_norm: float | None = None, scaler: torch.amp.GradScaler | None = None) -> torch.Tensor:
        """Synchronise now, once, after the last micro-batch; `step()` then only updates.

        Returns the norm (0-dim, the same on all ranks of the data-parallel group and of tp): of the averaged gradient
        before clipping, for clip="local" the ranks' mean of their own. Collective. max_norm: clip to it (None: the
        constructor's max_grad_norm). scaler: under fp16, unscale first and skip the step on all ranks if one
        overflowed; the norm is then inf.
        """
        if max_norm is not None and self.max_grad_norm not in (None, max_norm):
            raise ValueError(
                f"max_norm={max_norm} here and max_grad_norm={self.max_grad_norm} at construction: keep one"
            )
        limit = self.max_grad_norm if max_norm is None else _checked_norm(max_norm)
        if self._synced is not None:
            self._check_untouched()
            if limit != self._synced_limit:
                raise ValueError(f"already synchronised with max_norm={self._synced_limit}: sync once a step")
            return self.last_norm
        overflow = False
        if scaler is not None:
            overflow = unscale_and_share(scaler, self, self._device, [self.process_group, *self._tp])
        self._run_sync(limit, True, None, overflow)
        return self.last_norm

    def _run_sync(self, limit, need_norm: bool, inverse_scale, overflow: bool) -> None:
        if self._engine is None:
            self._engine = self._build_engine()
        self._check_gradients()
        self.last_step_skipped = overflow
        if overflow:
            self.last_norm = torch.tensor(float("inf"), device=self._device)
        else:
            self._engine.sync(self.step_count + 1, limit, need_norm, inverse_scale)
            self.last_norm = self._engine.norm
            if limit is not None:
                self._steps_clipped = self._steps_clipped + self._engine.clipped
                self._steps_measured += 1
        self._synced, self._synced_limit = self._gradient_versions(), limit

    def _gradient_versions(self) -> tuple:
        return tuple(None if s.param.grad is None else s.param.grad._version for s in self._engine.slots)

    def _check_untouched(self) -> None:
        if self._gradient_versions() != self._synced:
            raise RuntimeError("gradients changed between sync() and step(): sync once, after the last micro-batch")

    @property
    def _device(self) -> torch.device:
        # a Trainer's first group is empty where only norms and biases are trained
        return next((p.device for group in self.param_groups for p in group["params"]), torch.device("cpu"))

    @property
    def _tp(self) -> list[dist.ProcessGroup]:
        return [] if self.tp_group is None else [self.tp_group]

    @torch.no_grad()
    def step(self, closure=None):
        """Synchronise unless `sync()` did, and update. Collective. Returns the closure's value, if one was given.

        Under a GradScaler (`scaler.step(optimizer)`) an overflow on any rank skips the step on all: nothing changes,
        and `last_step_skipped` is True.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._synced is None:
            overflow, inverse_scale = self._scaler_report()
            self._run_sync(self.max_grad_norm, self.max_grad_norm is not None, inverse_scale, overflow)
        else:
            self._check_untouched()
            if not self.last_step_skipped and float(getattr(self, "found_inf", 0)) > 0:
                raise RuntimeError("gradients overflowed after sync(): pass the scaler, sync(max_norm, scaler=scaler)")
        self._synced = None
        if not self.last_step_skipped:
            self._update()
        return loss

    def _scaler_report(self) -> tuple[bool, torch.Tensor | None]:
        """What GradScaler.step left on this optimizer: whether to skip, and what to multiply gradients by."""
        if not hasattr(self, "found_inf"):
            return False, None
        shared = share_found_inf(self.found_inf, self._device, [self.process_group, *self._tp])
        scale = self.grad_scale
        return bool(shared > 0), None if scale is None else scale.to(self._device).double().reciprocal().float()

    def _update(self) -> None:
        engine = self._engine
        for group in self.param_groups:
            group["step"] += 1
        engine.update_sparse()
        alike: dict[tuple, list[Slot]] = defaultdict(list)
        for slot in engine.dense:
            alike[id(slot.group), slot.param.dtype].append(slot)
        for slots in alike.values():
            momenta = [s.state["momentum"] for s in slots]
            grads = [engine.dense_mean(s).view(s.param.shape).to(m.dtype) for s, m in zip(slots, momenta, strict=True)]
            if engine.coefficient is not None:
                grads = list(torch._foreach_mul(grads, engine.coefficient.to(momenta[0].dtype)))
            adams_update_([s.param for s in slots], grads, momenta, **_hyperparameters(slots[0].group))
        engine.finish()

    # -- checkpoints and figures -------------------------------------------------------------------------------

    def state_dict(self) -> dict:
        """This rank's state, the next step's masks included (waits for them; sends nothing).

        Residuals differ between the ranks of a data-parallel group: save one file a rank. All else is shared.
        """
        if self._synced is not None:
            raise RuntimeError("state_dict() between sync() and step(): take the step first")
        if self._engine is not None:
            self._engine.masks.collect()
            if self.residual_device is not None and self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore a rank's own `state_dict()`, bit for bit. At another data-parallel size see `merge_residuals`."""
        self._drop_engine()
        self._synced = None
        # residuals that live on the host may have no room on the device all at once
        load_state_uncast(self, state_dict, stay=("residual",))
        for p, state in self.state.items():
            if "residual" in state:
                state["residual"] = place_residual(state["residual"], self.residual_device, p.device)

    def stats(self) -> dict[str, float]:
        """Figures of the last step on this rank; reads every residual, so call it as often as you log.

        density: share of the sparse tensors that was sent. bytes_dense, bytes_sent: totals so far, by a dense
        all-reduce and as sent. residual_over_momentum: ratio of norms. clipped_share: share of steps so far
        that were clipped. mask_overlap: share of the mask that was in the step before's.
        """
        engine = self._engine
        if engine is None or not self.step_count:
            raise RuntimeError("no step has been taken yet")
        if not engine.sparse:
            raise RuntimeError("no parameter is sparse: there is nothing to report")
        residual = torch.stack([torch.linalg.vector_norm(s.state["residual"]).cpu() for s in engine.sparse]).norm()
        momentum = torch.stack([torch.linalg.vector_norm(s.momentum).cpu() for s in engine.sparse]).norm()
        kept, numel = engine.masks.kept()
        bytes_now = self.meter.snapshot()
        return {
            "step": self.step_count,
            "density": kept / numel,
            "bytes_dense": bytes_now["dense_bytes"],
            "bytes_sent": bytes_now["sent_bytes"],
            "residual_over_momentum": float(residual / momentum),
            "clipped_share": float(self._steps_clipped) / max(1, self._steps_measured),
            "mask_overlap": engine.masks.overlap(),
        }


def _hyperparameters(group: dict) -> dict:
    names = ("step", "betas", "eps", "weight_decay")
    return {name: group[name] for name in names} | {"lr": float(group["lr"])}


def _checked_norm(max_norm: float | None) -> float | None:
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"the norm to clip to must be > 0, got {max_norm}; leave it out for no clipping")
    return max_norm
