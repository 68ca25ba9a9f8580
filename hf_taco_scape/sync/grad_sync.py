"""SCAPE's exchange, once an optimizer step: masked momentum and dense gradients in one message, next masks beside it.

sync      c = b1*m + (1-b1)*g + r in place of r; pack c on the mask; one packed mean over the ranks
meanwhile each owner selects the next step's masks from its own c (side stream, or thread on CPU)
(update)  the optimizer reads `mean_of`, `dense_mean` and `coefficient`
finish    the masks are sent; they arrive during the next forward and are used in the next step
"""

import torch
import torch.distributed as dist

from hf_taco_scape.collectives.meter import ByteMeter, ring_all_reduce_bytes
from hf_taco_scape.collectives.sparse import PackedMessage, group_rank, group_size
from hf_taco_scape.sync import device as devices
from hf_taco_scape.sync.density import DensitySchedule
from hf_taco_scape.sync.mask import EncodedMask, assign_owners, select_topk
from hf_taco_scape.sync.mask_exchange import MaskExchange
from hf_taco_scape.sync.norms import clip_coefficient, model_norm, norm_weights
from hf_taco_scape.sync.second_moment import SecondMoments
from hf_taco_scape.sync.side_lane import SideLane
from hf_taco_scape.sync.slot import Slot
from hf_taco_scape.sync.step_ops import decoded_grad, form_, keep_unsent_, pack_, sparse_update_


class GradSync:
    """The exchange over one data-parallel group; every rank builds it from the same parameters in the same order.

    `group` is the data-parallel group; `tp_group`, if given, joins the ranks that hold the other parts of this model
    copy. values_dtype: payload of the sparse values; state_dtype: of everything else in the message.
    """

    def __init__(
        self,
        slots: list[Slot],
        schedule: DensitySchedule,
        *,
        values_dtype: torch.dtype,
        state_dtype: torch.dtype,
        second_moment: str,
        mask: str,
        clip: str,
        group: dist.ProcessGroup | None,
        tp_group: dist.ProcessGroup | None,
        ordered: bool,
        seed: int,
        meter: ByteMeter,
    ) -> None:
        self.slots = slots
        self.sparse = [s for s in slots if s.sparse]
        self.dense = [s for s in slots if not s.sparse]
        self._averaged_here = [s for s in self.dense if not s.group["already_reduced"]]
        self._any_reduced = len(self._averaged_here) < len(self.dense)
        self.clip, self.ordered, self.meter = clip, ordered, meter
        self.values_dtype, self.state_dtype = values_dtype, state_dtype
        self.group, self.tp_group = group, tp_group
        self.world, self.rank = group_size(group), group_rank(group)
        self.device = slots[0].param.device
        self.masks = MaskExchange(self.sparse, schedule, kind=mask, seed=seed, group=group, meter=meter)
        self._norm_weights = norm_weights(slots, self.device)
        self._lane = SideLane(self.device)
        self._kernels: devices.FusedStep | None = None  # of this step; None where the twins run
        self._moments = SecondMoments(self.sparse, second_moment, state_dtype, tp_group)
        self._assign_owners()

    def _assign_owners(self) -> None:
        """The same on every tp rank, whatever the size of its parts."""
        sizes = torch.tensor([s.numel for s in self.sparse], dtype=torch.int64, device=self.device)
        if self.tp_group is not None:
            # replicas must be thinned by one and the same data-parallel rank's choice
            dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=self.tp_group)
        for slot, owner in zip(self.sparse, assign_owners(sizes.tolist(), self.world), strict=True):
            slot.owner = owner

    @torch.no_grad()
    def sync(self, step: int, max_norm: float | None, need_norm: bool, inverse_scale: torch.Tensor | None) -> None:
        """Exchange this step's gradients; `mean_of`, `dense_mean` and the three attributes below are then this step's.

        norm: of the averaged gradient (clip "ghat"), or the ranks' mean of their own ("local"); None unless max_norm
        or need_norm asks for it. coefficient: for ghat and dense gradients, or None. clipped: 1 if the step was
        clipped (local: the share of ranks). inverse_scale multiplies every gradient first (1 / GradScaler's scale).
        """
        self.norm = self.coefficient = None
        self.clipped = torch.zeros((), device=self.device)
        self.masks.begin(step)
        scale, local = inverse_scale, []
        if self.clip == "local" and (max_norm is not None or need_norm):
            norm, coefficient = self._local_norm(max_norm, inverse_scale)
            local = [norm, (coefficient < 1).to(norm.dtype)]
            if self._any_reduced:
                local.append(coefficient)
            scale = coefficient if inverse_scale is None else coefficient * inverse_scale
        self._chosen = self.masks.to_choose(step)
        self._own_k = {slot.index: k for slot, k in self._chosen if slot.owner == self.rank}
        self._new_message(len(local))
        self._jobs, self._payloads = [], {}
        masks = self.masks.masks
        self._kernels = devices.fused_step(self.sparse, self._kernels, step, masks, self.state_dtype)
        self._pack_sparse(scale)
        self._pack_exact(scale, local)
        self._message.start()
        if self._jobs:
            self._lane.start(lambda jobs=self._jobs: self._choose(jobs))
        self._message.finish()
        self.meter.add(
            *(ring_all_reduce_bytes(nbytes, self.world) for nbytes in (self._dense_bytes, self._message.nbytes))
        )
        self._reduced_scale = inverse_scale
        self._read_exact(len(local))
        if self.clip == "ghat" and (max_norm is not None or need_norm):
            self._averaged_norm(max_norm)

    # -- the message -------------------------------------------------------------------------------------------

    @property
    def _dense_bytes(self) -> int:
        return sum(s.numel * s.param.element_size() for s in self.sparse + self._averaged_here)

    def _new_message(self, n_local: int) -> None:
        """[c on the masks, tensor by tensor | dense gradients | second moments | own norm, clipped or not, by what]"""
        self._spans, first = {}, 0
        for slot in self.sparse:
            self._spans[slot.index] = (first, first + self.masks.masks[slot.index].k)
            first = self._spans[slot.index][1]
        self._message = PackedMessage(
            first,
            sum(s.numel for s in self._averaged_here) + sum(self._moments.numels()) + n_local,
            values_dtype=self.values_dtype,
            exact_dtype=self.state_dtype,
            device=self.device,
            group=self.group,
            ordered=self.ordered,
        )

    def _is_offloaded(self, residual: torch.Tensor) -> bool:
        return residual.device != self.device

    def _pack_sparse(self, scale: torch.Tensor | None) -> None:
        """Form every c and pack it; c becomes the residual now, or beside the message if this rank selects from it."""
        if self._kernels is not None:
            self._kernels.form(self._message.values, set(self._own_k), scale)
            self._jobs = [(slot, self._own_k[slot.index]) for slot in self.sparse if slot.index in self._own_k]
            return
        for slot in self.sparse:
            self._pack_slot(slot, scale)

    def _pack_slot(self, slot: Slot, scale: torch.Tensor | None) -> None:
        residual = slot.state["residual"]
        offloaded = self._is_offloaded(residual)
        c = residual.to(self.device, non_blocking=True, copy=offloaded).view(-1)
        form_(c, slot.momentum, slot.grad, slot.group["betas"][0], scale)
        selection = self.masks.selection_of(slot)
        pack_(self._values(slot), c, selection)
        k = self._own_k.get(slot.index)
        if k is not None and not offloaded:
            self._jobs.append((slot, k))
            return
        if k is not None:
            # an offloaded residual passes through the device once, so its tensor is selected on the way
            self._payloads[slot.index] = EncodedMask.from_bool(select_topk(c, k), k).payload
        keep_unsent_(c, selection, self.values_dtype)
        if offloaded:
            residual.view(-1).copy_(c, non_blocking=True)

    @torch.no_grad()
    def _choose(self, jobs: list[tuple[Slot, int]]) -> list[torch.Tensor]:
        """The encoded masks of the next step; each c, no longer needed whole, becomes the residual."""
        if self._kernels is not None:
            return self._kernels.choose(jobs)
        payloads = []
        for slot, k in jobs:
            c = slot.state["residual"].view(-1)
            payloads.append(EncodedMask.from_bool(select_topk(c, k), k).payload)
            keep_unsent_(c, self.masks.selection_of(slot), self.values_dtype)
        return payloads

    def _pack_exact(self, scale: torch.Tensor | None, local: list[torch.Tensor]) -> None:
        grads = [(slot, slot.grad) for slot in self._averaged_here]
        parts = [torch.zeros_like(slot.momentum) if grad is None else grad for slot, grad in grads]
        if scale is not None and parts:
            parts = list(torch._foreach_mul([part.to(self.state_dtype) for part in parts], scale))
        parts += self._moments.local_means(scale)
        parts += [value.view(1) for value in local]
        if parts:
            torch._foreach_copy_(list(self._message.exact.split([p.numel() for p in parts])), parts)

    def _read_exact(self, n_local: int) -> None:
        sizes = [s.numel for s in self._averaged_here] + self._moments.numels()
        *parts, local = self._message.exact.split([*sizes, n_local])
        self._dense_means = {s.index: part for s, part in zip(self._averaged_here, parts, strict=False)}
        self._moments.learn(parts[len(self._averaged_here) :])
        if n_local:
            self.norm, self.clipped, *coefficient = local.clone()
            for mean in coefficient:
                # averaged before this rank's own norm was known: the ranks' mean coefficient stands for each one's
                self._reduced_scale = mean if self._reduced_scale is None else mean * self._reduced_scale

    # -- norms -------------------------------------------------------------------------------------------------

    def _norm_of(self, grad: torch.Tensor | None) -> torch.Tensor:
        if grad is None:
            return torch.zeros((), dtype=self.state_dtype, device=self.device)
        return torch.linalg.vector_norm(grad, dtype=self.state_dtype)

    def _local_norm(self, max_norm, inverse_scale) -> tuple[torch.Tensor, torch.Tensor]:
        norm = model_norm([self._norm_of(s.grad) for s in self.slots], self.tp_group, self._norm_weights)
        if inverse_scale is not None:
            norm = norm * inverse_scale.to(norm.dtype)
        return norm, torch.ones_like(norm) if max_norm is None else clip_coefficient(norm, max_norm)

    def _averaged_norm(self, max_norm: float | None) -> None:
        sparse = iter([self._decoded_norm(s) for s in self.sparse] if self._kernels is None else self._kernels.norms())
        norms = [next(sparse) if s.sparse else self._norm_of(self.dense_mean(s)) for s in self.slots]
        self.norm = model_norm(norms, self.tp_group, self._norm_weights)
        if max_norm is not None:
            self.coefficient = clip_coefficient(self.norm, max_norm)
            self.clipped = (self.coefficient < 1).to(torch.float32)

    def _decoded_norm(self, slot: Slot) -> torch.Tensor:
        selection, b1 = self.masks.selection_of(slot), slot.group["betas"][0]
        return self._norm_of(decoded_grad(self.mean_of(slot), slot.momentum, selection, b1))

    # -- what the optimizer reads ------------------------------------------------------------------------------

    def _values(self, slot: Slot) -> torch.Tensor:
        first, last = self._spans[slot.index]
        return self._message.values[first:last]

    def mean_of(self, slot: Slot) -> torch.Tensor:
        """mt of a sparse tensor on its mask, [k] in the state's dtype, before clipping."""
        return self._values(slot).to(slot.momentum.dtype)

    def dense_mean(self, slot: Slot) -> torch.Tensor:
        """The averaged gradient of a dense tensor, flat, before clipping to its own norm (after clip "local")."""
        if slot.index in self._dense_means:
            return self._dense_means[slot.index]
        if slot.grad is None:
            return torch.zeros_like(slot.momentum)
        return slot.grad if self._reduced_scale is None else slot.grad.to(self.state_dtype) * self._reduced_scale

    @torch.no_grad()
    def update_sparse(self) -> None:
        """SCAPE's update of the sparse tensors, by their groups' hyperparameters and step."""
        if self._kernels is not None:
            self._kernels.update(self.coefficient, self._moments.column_factors)
            return
        for slot in self.sparse:
            hyperparameters = {name: slot.group[name] for name in ("step", "betas", "eps", "weight_decay")}
            sparse_update_(
                slot.param,
                slot.momentum,
                self.mean_of(slot),
                self.masks.selection_of(slot),
                lr=float(slot.group["lr"]),
                **hyperparameters,
                clip=self.coefficient,
                second_moment=slot.state.get("second_moment"),
                column_factors=self._moments.column_factors.get(slot.index),
                row_dims=slot.layout.row_dims,
            )

    @torch.no_grad()
    def finish(self) -> None:
        """After the update: complete the residuals and send the next masks."""
        for (slot, _), payload in zip(self._jobs, self._lane.join(), strict=True):
            self._payloads[slot.index] = payload
        self._return_rounding()
        self.masks.end(self._chosen, self._payloads)
        if self._kernels is not None:
            self._kernels.finish()
        del self._message, self._jobs, self._payloads, self._dense_means

    def _return_rounding(self) -> None:
        """The rank that rounded a row of the mean owes every rank that error; its own residual takes all of it."""
        rounding = self._message.rounding
        if rounding is None:
            return
        first, error = rounding
        if self._kernels is not None:
            self._kernels.owe(error, first, self.world)
            return
        for slot in self.sparse:
            begin, end = self._spans[slot.index]
            low, high = max(begin, first), min(end, first + error.numel())
            if low >= high:
                continue
            residual = slot.state["residual"].view(-1)
            places = self.masks.selection_of(slot).places(slot.momentum)
            owed = (error[low - first : high - first] * self.world).to(residual.dtype).to(residual.device)
            if places is None:
                residual[low - begin : high - begin].add_(owed)
            else:
                residual.index_add_(0, places[low - begin : high - begin].to(residual.device), owed)
