"""Second moments of sparse tensors that come from local gradients: `row` and `factored` (none under `adams`).

row       R_i  = EMA (b2) over steps of the ranks' mean of the mean of (scale*g)^2 over row i;      v_ij = R_i
factored  C_j  likewise over column j;   v_ij = R_i * C_j / M, M the mean of all (Shazeer and Stern, 2018, section 3)

Neither needs more of a message than rows (and columns) numbers a tensor. A row is an output feature.
"""

from collections import defaultdict

import torch
import torch.distributed as dist

from hf_taco_scape.collectives.sparse import group_size
from hf_taco_scape.sync import device as devices
from hf_taco_scape.sync.slot import Slot
from hf_taco_scape.sync.step_ops import row_square_sums

TINY = 1e-30  # its root is far below eps, so a tensor whose mean is smaller moves as if its moments were 0


class SecondMoments:
    """The moments of `slots`, all sparse, in their state: second_moment [rows] and, if factored, column_moment.

    Under tensor parallelism (`tp_group`) every rank holds the whole model's moment of each row and column it has a
    part of.
    """

    def __init__(self, slots: list[Slot], kind: str, state_dtype: torch.dtype, tp_group) -> None:
        self.slots = slots if kind in ("row", "factored") else []
        self.factored = kind == "factored"
        self._state_dtype, self._tp_group = state_dtype, tp_group
        self.column_factors: dict[int, torch.Tensor] = {}
        if not self.slots:
            return
        tp = group_size(tp_group) if tp_group is not None else 1
        self._row_shares = [float(s.layout.row_split and tp > 1) for s in self.slots]
        # columns of a tensor that tp ranks split by rows; ranks with the same rows count once between them
        split = [not s.layout.row_split and s.layout.copies < tp for s in self.slots]
        self._column_shares = [s / slot.layout.copies for s, slot in zip(split, self.slots, strict=True)]
        self._row_lengths = self._full_lengths([s.columns for s in self.slots], self._row_shares)
        self._column_lengths = self._full_lengths([s.rows for s in self.slots], self._column_shares)
        counts = torch.tensor([s.columns for s in self.slots])
        whole = [s.rows if s.layout.row_split else s.columns for s in self.slots]
        self._whole_lengths = torch.tensor(whole, dtype=state_dtype, device=slots[0].param.device)
        self._slot_of_column = torch.arange(len(self.slots)).repeat_interleave(counts).to(slots[0].param.device)

    def _full_lengths(self, lengths: list[int], shares: list[float]) -> list[int]:
        summed = self._over_tp([torch.tensor([n], dtype=torch.float64) for n in lengths], shares)
        return [round(n.item()) for n in summed]

    def _over_tp(self, sums: list[torch.Tensor], shares: list[float]) -> list[torch.Tensor]:
        """The sums of tensors with a share, summed over tp each times its share; the others as they are."""
        split = [i for i, share in enumerate(shares) if share]
        if not split or self._tp_group is None:
            return sums
        joined = torch.cat([sums[i] * shares[i] for i in split]).to(self.slots[0].param.device)
        dist.all_reduce(joined, group=self._tp_group)
        sums = list(sums)
        for i, part in zip(split, joined.split([sums[i].numel() for i in split]), strict=True):
            sums[i] = part
        return sums

    def numels(self) -> list[int]:
        """Lengths of the parts of `local_means`."""
        return [s.rows for s in self.slots] + [s.columns for s in self.slots if self.factored]

    def local_means(self, scale: torch.Tensor | None) -> list[torch.Tensor]:
        """This rank's means of (scale*g)^2, for the message: of each row, tensor by tensor, then of each column."""
        if not self.slots:
            return []
        rows = [s.layout.row_dims for s in self.slots]
        means = self._means(rows, self._row_shares, self._row_lengths, scale)
        if self.factored:
            columns = [s.column_dims for s in self.slots]
            means += self._means(columns, self._column_shares, self._column_lengths, scale)
        return means

    def _means(self, dims: list[tuple], shares, lengths, scale) -> list[torch.Tensor]:
        sums = devices.square_sums(self.slots, dims, scale) or [
            row_square_sums(s.param.grad, s.state["momentum"], d, scale) for s, d in zip(self.slots, dims, strict=True)
        ]
        sums = self._over_tp([total.to(self._state_dtype) for total in sums], shares)
        return [total / length for total, length in zip(sums, lengths, strict=True)]

    def learn(self, means: list[torch.Tensor]) -> None:
        """Take the ranks' averages of `local_means` into the moments."""
        names = ["second_moment", "column_moment"][: 1 + self.factored]
        by_b2: dict[float, list] = defaultdict(list)
        owners = [(slot, name) for name in names for slot in self.slots]
        for (slot, name), mean in zip(owners, means, strict=True):
            by_b2[slot.group["betas"][1]].append((slot.state[name], mean))
        for b2, pairs in by_b2.items():
            moments, fresh = map(list, zip(*pairs, strict=True))
            torch._foreach_mul_(moments, b2)
            torch._foreach_add_(moments, fresh, alpha=1 - b2)
        if self.factored and self.slots:
            self._factor()

    def _factor(self) -> None:
        """column_factors <- C / M, of which v = R_i * factor_j."""
        columns = [s.state["column_moment"] for s in self.slots]
        # M is the mean of the rows' moments and that of the columns': of those that this rank holds all of
        rows = [s.state["second_moment"] for s in self.slots]
        whole = [r if s.layout.row_split else c for s, r, c in zip(self.slots, rows, columns, strict=True)]
        means = torch.stack(torch._foreach_norm(whole, 1)) / self._whole_lengths
        factors = torch.cat(columns) / means.clamp_min(TINY)[self._slot_of_column]
        parts = factors.split([c.numel() for c in columns])
        self.column_factors = {slot.index: part for slot, part in zip(self.slots, parts, strict=True)}
