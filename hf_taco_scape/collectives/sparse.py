"""The two collectives of a sparse data-parallel step: one packed mean, and an uneven all-gather of mask encodings."""

import torch
import torch.distributed as dist

from hf_taco_scape.collectives.transport import gather


def group_size(group: dist.ProcessGroup | None) -> int:
    """Ranks of `group` (None: the default group); 1 when torch.distributed is not in use."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This process's rank within `group` (None: the default group); 0 when torch.distributed is not in use."""
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


class PackedMessage:
    """Two flat buffers whose mean over the ranks travels as one message a step.

    `values` [n_values] may be bf16; `exact` [n_exact] keeps the state's dtype. Fill both, `start()`, do other work,
    `finish()`: both then hold the mean, bit-identical on all ranks. The same as

        dist.all_reduce(values); values /= world; dist.all_reduce(exact); exact /= world

    with one dtype that is what runs, once, over one buffer. A bf16 payload, or `ordered=True`, goes in two shots
    instead (all-to-all, sum in rank order in the exact dtype, all-gather: the same bytes), because a bf16 ring rounds
    at every hop, and because a ring's order of summation depends on where an entry lies in the message: groups that
    hold replicas inside messages of other lengths (tensor parallelism) would disagree in the last bit.

    `rounding`, after `finish()`: what this rank dropped when it rounded its row of the mean to bf16, as (first index
    in `values`, mean - sent in the exact dtype); None where nothing was rounded.
    """

    def __init__(
        self,
        n_values: int,
        n_exact: int,
        *,
        values_dtype: torch.dtype,
        exact_dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        ordered: bool = False,
    ) -> None:
        self.group, self.world = group, group_size(group)
        one_dtype = values_dtype == exact_dtype
        self._two_shot = self.world > 1 and (ordered or not one_dtype)
        self._exact_dtype = exact_dtype
        self._work: dist.Work | None = None
        self.rounding: tuple[int, torch.Tensor] | None = None
        # each rank sums one row; rows of whole eight bytes let the two dtypes share a wire
        pad = self.world if self._two_shot else 1
        if one_dtype:
            total = n_values + n_exact
            self._flat = [torch.zeros(-(-total // pad) * pad, dtype=exact_dtype, device=device)]
            self.values, self.exact = self._flat[0][:n_values], self._flat[0][n_values:total]
        else:
            self._flat = [
                torch.zeros(-(-n_values // (4 * pad)) * 4 * pad, dtype=values_dtype, device=device),
                torch.zeros(-(-n_exact // pad) * pad, dtype=exact_dtype, device=device),
            ]
            self.values, self.exact = self._flat[0][:n_values], self._flat[1][:n_exact]

    @property
    def nbytes(self) -> int:
        """Bytes of the message, its padding included."""
        return sum(flat.numel() * flat.element_size() for flat in self._flat)

    def start(self) -> None:
        """Send; returns at once."""
        if self.world == 1:
            return
        if not self._two_shot:
            self._work = dist.all_reduce(self._flat[0], group=self.group, async_op=True)
            return
        rows = [flat.view(self.world, -1).view(torch.uint8) for flat in self._flat]
        self._wire = rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
        self._received = torch.empty_like(self._wire)
        self._work = dist.all_to_all_single(self._received, self._wire, group=self.group, async_op=True)

    def finish(self) -> None:
        """Wait; afterwards `values` and `exact` hold the mean."""
        if self.world == 1:
            return
        self._work.wait()
        if not self._two_shot:
            self._flat[0].div_(self.world)
            return
        row = torch.cat(
            [self._mean_of_row(flat, part).view(torch.uint8) for flat, part in self._parts(self._received)]
        )
        self._wire[group_rank(self.group)] = row
        self._wire = gather(self._wire, self.group)
        for flat, part in self._parts(self._wire):
            flat.view(self.world, -1).copy_(part.view(flat.dtype))
        del self._wire, self._received

    def _parts(self, wire: torch.Tensor):
        widths = [flat.numel() * flat.element_size() // self.world for flat in self._flat]
        return zip(self._flat, wire.split(widths, dim=1), strict=True)

    def _mean_of_row(self, flat: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        rows = received.view(flat.dtype)
        total = rows[0].to(self._exact_dtype, copy=True)
        for row in rows[1:]:
            total.add_(row)
        total.div_(self.world)
        mean = total.to(flat.dtype)
        if flat.dtype != self._exact_dtype:
            first = group_rank(self.group) * mean.numel()
            length = min(mean.numel(), self.values.numel() - first)
            self.rounding = (first, (total - mean)[:length]) if length > 0 else None
        return mean


class PendingGather:
    """An all-gather of byte strings of different lengths, under way.

    payload: uint8 [sizes[rank]] of this rank; `wait()` returns one uint8 tensor a rank, in rank order. The same as

        dist.all_gather([torch.empty(n, dtype=torch.uint8) for n in sizes], payload)

    which gloo refuses when sizes differ. `sizes` must be the same list on every rank.
    """

    def __init__(self, payload: torch.Tensor, sizes: list[int], group: dist.ProcessGroup | None = None) -> None:
        world = group_size(group)
        self._sizes = sizes
        self._work: dist.Work | None = None
        if world == 1:
            self._gathered = payload
            return
        own = payload.numel()
        self._sent = payload.repeat(world)
        self._gathered = torch.empty(sum(sizes), dtype=torch.uint8, device=payload.device)
        self._work = dist.all_to_all_single(
            self._gathered, self._sent, sizes, [own] * world, group=group, async_op=True
        )

    def wait(self) -> list[torch.Tensor]:
        """One uint8 tensor a rank: views of one buffer."""
        if self._work is not None:
            self._work.wait()
            self._work = self._sent = None
        return list(self._gathered.split(self._sizes))
