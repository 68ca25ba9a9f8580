"""SCAPE's step on W virtual ranks in one process: the distributed step's arithmetic, without its messages.

Equal to ScapeAdamS bit for bit (tests/test_simulate_scape.py) where that sums in rank order (`ordered=True`). Beside
the library's masks it knows two for study: `topk_mean` (top-k of the average c) and `half` (half of the entries by
top-k, half swept cyclically). Slow, and the measure of scape_flat.py, which is fast.
"""

import torch

from hf_taco_scape.optim.adams import adams_update_, state_dtype
from hf_taco_scape.sync.density import DensitySchedule
from hf_taco_scape.sync.layout import TensorLayout, plain_layout
from hf_taco_scape.sync.mask import (
    CyclicMask,
    FullMask,
    IndexSelection,
    RandomMask,
    assign_owners,
    mask_bytes,
    mask_seed,
    select_topk,
)
from hf_taco_scape.sync.norms import clip_coefficient, model_norm
from hf_taco_scape.sync.second_moment import TINY
from hf_taco_scape.sync.slot import Slot
from hf_taco_scape.sync.step_ops import decoded_grad, form_, keep_unsent_, row_square_sums, sparse_update_

DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "sparse": None, "step": 0}


def mean_in_rank_order(rows) -> torch.Tensor:
    """Mean over the first dimension, added from rank 0 up."""
    total = rows[0].clone()
    for row in rows[1:]:
        total.add_(row)
    return total.div_(len(rows))


class SimulatedScape:
    """ScapeAdamS for `world` ranks at once; `step(grads)` takes one [world, *shape] a parameter, in the groups' order.

    residual_decay multiplies the residuals every step (1 in SCAPE).
    """

    def __init__(
        self,
        groups,
        world: int,
        *,
        density: float = 0.01,
        warmup_steps: int = 0,
        hold_steps: int = 0,
        max_grad_norm: float | None = None,
        values: str = "fp32",
        second_moment: str = "adams",
        mask: str = "topk",
        clip: str = "ghat",
        residual_decay: float = 1.0,
        seed: int = 0,
        layout=plain_layout,
        **defaults,
    ) -> None:
        groups = list(groups)
        groups = groups if isinstance(groups[0], dict) else [{"params": groups}]
        self.param_groups = [DEFAULTS | defaults | group for group in groups]
        self.world, self.schedule = world, DensitySchedule(density, warmup_steps, hold_steps)
        self.max_grad_norm, self.seed, self.residual_decay = max_grad_norm, seed, residual_decay
        self.mask_kind, self.clip = mask, clip
        self.rows, self.factored = second_moment in ("row", "factored"), second_moment == "factored"
        self.slots = [self._slot(p, group, layout(p)) for group in self.param_groups for p in group["params"]]
        for i, slot in enumerate(self.slots):
            slot.index = i
        self.sparse = [s for s in self.slots if s.sparse]
        for slot, owner in zip(self.sparse, assign_owners([s.numel for s in self.sparse], world), strict=True):
            slot.owner = owner
        double = any(p.dtype == torch.float64 for s in self.slots for p in [s.param])
        self.dtype = torch.float64 if double else torch.float32
        self.values_dtype = torch.bfloat16 if values == "bf16" else self.dtype
        self.device = self.slots[0].param.device
        self.norm, self.clipped, self.bytes_sent = None, 0.0, 0
        self.selections: dict[int, object] = {}
        self._next: dict[int, object] = {}
        self._swept: dict[int, int] = {}

    def _slot(self, p, group, layout: TensorLayout) -> Slot:
        sparse = (p.dim() >= 2 if group["sparse"] is None else group["sparse"]) and p.numel() > 0
        slot = Slot(0, p, group, {}, layout, sparse)
        slot.state["momentum"] = torch.zeros_like(p, dtype=state_dtype(p))
        if sparse:
            residual = slot.momentum.new_zeros(self.world, p.numel())
            slot.state |= {"residual": residual, "second_moment": slot.momentum.new_zeros(slot.rows)}
            slot.state["column_moment"] = slot.momentum.new_zeros(slot.columns)
        return slot

    @property
    def step_count(self) -> int:
        return self.param_groups[0]["step"]

    # -- masks -------------------------------------------------------------------------------------------------

    def _mask_of(self, slot: Slot, step: int):
        """(selection, k) of this step."""
        if self.mask_kind in ("cyclic", "random"):
            k = self.schedule.kept(step, slot.numel)
            if k == slot.numel:
                mask = FullMask(slot.numel)
            elif self.mask_kind == "cyclic":
                mask = CyclicMask(slot.numel, k, self._swept.get(slot.index, 0))
                self._swept[slot.index] = (mask.start + k) % slot.numel
            else:
                mask = RandomMask(slot.numel, k, mask_seed(self.seed, step, slot.index))
            return mask.resolve(self.device), k
        return self._next.pop(slot.index, None) or (FullMask(slot.numel).resolve(self.device), slot.numel)

    def _choose(self, slot: Slot, c: torch.Tensor, step: int) -> None:
        """Keep the next step's selection, by the owner's c ([world, n]), or as a study's mask says."""
        k = self.schedule.kept(step + 1, slot.numel)
        if k == slot.numel or self.mask_kind in ("cyclic", "random"):
            return
        if self.mask_kind == "half":
            chosen = select_topk(c[slot.owner], (k + 1) // 2)
            start = self._swept.get(slot.index, 0)
            if k // 2:
                CyclicMask(slot.numel, k // 2, start).resolve(self.device).put_(chosen, True)
            self._swept[slot.index] = (start + k // 2) % slot.numel
            indices = chosen.nonzero().view(-1)
        else:
            judged = mean_in_rank_order(c) if self.mask_kind == "topk_mean" else c[slot.owner]
            indices = torch.nonzero_static(select_topk(judged, k), size=k).view(-1)
        self._next[slot.index] = (IndexSelection(indices), indices.numel())

    # -- the step ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, grads: list[torch.Tensor]) -> None:
        """One step of all ranks from their gradients."""
        step = self.step_count + 1
        scale = self._local_scale(grads) if self.clip == "local" and self.max_grad_norm else None
        means, sent_bytes = {}, 0
        self.selections, spans, rounding, first = {}, {}, {}, 0
        for slot in self.sparse:
            c, g = slot.state["residual"], grads[slot.index].reshape(self.world, -1)
            if self.residual_decay != 1.0:
                c.mul_(self.residual_decay)
            self._form(slot, c, g, scale)
            selection, k = self._mask_of(slot, step)
            self.selections[slot.index], spans[slot.index] = selection, (first, first + k)
            first += k
            sent = [selection.take(row).to(self.values_dtype).to(c.dtype) for row in c]
            means[slot.index] = mean_in_rank_order(sent)
            self._choose(slot, c, step)
            for row in c:
                keep_unsent_(row, selection, self.values_dtype)
            if self.values_dtype != self.dtype:
                mean = means[slot.index]
                means[slot.index] = mean.to(self.values_dtype).to(mean.dtype)
                rounding[slot.index] = (mean - means[slot.index]) * self.world
            sent_bytes += 2 * k * torch.finfo(self.values_dtype).bits // 8
            next_k = self.schedule.kept(step + 1, slot.numel)
            sent_bytes += mask_bytes(slot.numel, next_k) if self.mask_kind not in ("cyclic", "random") else 0
        self._return_rounding(rounding, spans, first)
        if self.rows:
            self._row_moments(grads, scale)
        for slot in self.slots:
            if not slot.sparse:
                rows = grads[slot.index].reshape(self.world, -1).to(self.dtype)
                rows = rows if scale is None else rows * scale[:, None]
                means[slot.index] = mean_in_rank_order(rows)
        clip = self._clip(means) if self.clip == "ghat" and self.max_grad_norm else None
        self.bytes_sent += sent_bytes * (self.world - 1) // self.world
        self._update(means, clip)

    def _form(self, slot: Slot, c, g, scale) -> None:
        b1 = slot.group["betas"][0]
        if slot.numel > 64:
            form_(c, slot.momentum, g, b1, None if scale is None else scale[:, None])
            return
        # a broadcast over few entries takes torch's scalar loop, whose product and sum do not fuse
        for rank in range(self.world):
            form_(c[rank], slot.momentum, g[rank], b1, None if scale is None else scale[rank])

    def _local_scale(self, grads) -> torch.Tensor:
        """[world] coefficients, each rank's from the norm of its own gradient."""
        scales, norms = [], []
        for rank in range(self.world):
            own = [torch.linalg.vector_norm(g[rank].reshape(-1), dtype=self.dtype) for g in grads]
            norms.append(model_norm(own))
            scales.append(clip_coefficient(norms[-1], self.max_grad_norm))
        scales = torch.stack(scales)
        self.norm = mean_in_rank_order(torch.stack(norms))
        self.clipped = self.clipped + (scales < 1).float().mean()
        return scales

    def _return_rounding(self, rounding, spans, total: int) -> None:
        """What rounding the mean dropped goes to the rank that would have summed that part of the message."""
        per_rank = -(-total // (4 * self.world)) * 4
        for slot in self.sparse:
            if slot.index not in rounding or self.world == 1:
                continue
            begin, end = spans[slot.index]
            for rank in range(self.world):
                low, high = max(begin, rank * per_rank), min(end, (rank + 1) * per_rank)
                if low >= high:
                    continue
                row, places = slot.state["residual"][rank], self.selections[slot.index].places(slot.momentum)
                owed = rounding[slot.index][low - begin : high - begin]
                if places is None:
                    row[low - begin : high - begin].add_(owed)
                else:
                    row.index_add_(0, places[low - begin : high - begin], owed)

    def _row_moments(self, grads, scale) -> None:
        for slot in self.sparse:
            kinds = [("second_moment", slot.layout.row_dims, slot.columns)]
            if self.factored:
                kinds.append(("column_moment", slot.column_dims, slot.rows))
            for name, dims, length in kinds:
                means = [
                    row_square_sums(g, slot.state["momentum"], dims, None if scale is None else scale[rank]) / length
                    for rank, g in enumerate(grads[slot.index])
                ]
                b2 = slot.group["betas"][1]
                slot.state[name].mul_(b2).add_(mean_in_rank_order(means), alpha=1 - b2)

    def _clip(self, means) -> torch.Tensor:
        norms = []
        for slot in self.slots:
            grad = means[slot.index]
            if slot.sparse:
                b1 = slot.group["betas"][0]
                grad = decoded_grad(grad, slot.momentum, self.selections[slot.index], b1)
            norms.append(torch.linalg.vector_norm(grad, dtype=self.dtype))
        self.norm = model_norm(norms)
        coefficient = clip_coefficient(self.norm, self.max_grad_norm)
        self.clipped = self.clipped + (coefficient < 1).float()
        return coefficient

    def _update(self, means, clip) -> None:
        for group in self.param_groups:
            group["step"] += 1
        for slot in self.slots:
            hyper = {name: slot.group[name] for name in ("step", "lr", "betas", "eps", "weight_decay")}
            mean = means[slot.index]
            if slot.sparse:
                sparse_update_(
                    slot.param,
                    slot.momentum,
                    mean,
                    self.selections[slot.index],
                    **hyper,
                    clip=clip,
                    second_moment=slot.state["second_moment"] if self.rows else None,
                    column_factors=self._column_factors(slot),
                    row_dims=slot.layout.row_dims,
                )
            else:
                grad = (mean if clip is None else mean * clip).view(slot.param.shape)
                adams_update_([slot.param], [grad], [slot.state["momentum"]], **hyper)

    def _column_factors(self, slot: Slot) -> torch.Tensor | None:
        if not self.factored:
            return None
        columns = slot.state["column_moment"]
        return columns / (torch.linalg.vector_norm(columns, 1) / slot.columns).clamp_min(TINY)

    def figures(self) -> dict[str, float]:
        """residual_over_momentum (mean over ranks), clipped_share, and bytes_sent by one rank so far."""
        residual = sum(s.state["residual"].square().sum() for s in self.sparse) / self.world
        momentum = sum(s.momentum.square().sum() for s in self.sparse)
        return {
            "residual_over_momentum": float((residual / momentum).sqrt()),
            "clipped_share": float(self.clipped) / max(1, self.step_count),
            "bytes_sent": self.bytes_sent,
        }
