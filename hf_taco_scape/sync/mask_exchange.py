"""The masks of all sparse tensors: which one rules this step, and how the next ones reach every rank."""

import torch
import torch.distributed as dist

from hf_taco_scape.collectives.meter import ByteMeter, ring_half_bytes
from hf_taco_scape.collectives.sparse import PendingGather, group_rank, group_size
from hf_taco_scape.sync.density import DensitySchedule
from hf_taco_scape.sync.mask import CyclicMask, EncodedMask, FullMask, RandomMask, mask_bytes, mask_seed
from hf_taco_scape.sync.slot import Slot


class MaskExchange:
    """Masks of one data-parallel group, step by step.

    Under topk the owner of a tensor encodes its mask of step t+1 in step t; `end` starts an all-gather that crosses
    the wire during the next forward, and `begin` of step t+1 waits for it. Every rank works out cyclic and random
    masks by itself.
    """

    def __init__(
        self,
        sparse: list[Slot],
        schedule: DensitySchedule,
        *,
        kind: str,
        seed: int,
        group: dist.ProcessGroup | None,
        meter: ByteMeter,
    ) -> None:
        self.sparse, self.schedule, self.kind, self.seed = sparse, schedule, kind, seed
        self.group, self.meter = group, meter
        self.world, self.rank = group_size(group), group_rank(group)
        self.masks: dict[int, object] = {}
        self._masks_before: dict[int, object] = {}
        self._selections: dict[int, object] = {}
        self._gather: PendingGather | None = None
        self._under_way: list[tuple[Slot, int]] = []

    def collect(self) -> None:
        """Wait for the masks under way, if any, and put them into the state of their tensors."""
        if self._gather is None:
            return
        parts, place = self._gather.wait(), [0] * self.world
        for slot, k in self._under_way:
            first = place[slot.owner]
            place[slot.owner] = last = first + mask_bytes(slot.numel, k)
            slot.state["mask"], slot.state["mask_k"] = parts[slot.owner][first:last].clone(), k
        self._gather, self._under_way = None, []

    def begin(self, step: int) -> None:
        """Bring in the masks of `step`."""
        self.collect()
        self._masks_before, self.masks = self.masks, {s.index: self._mask_of(s, step) for s in self.sparse}

    def _mask_of(self, slot: Slot, step: int):
        if self.kind == "topk":
            # what the owner chose in the step before; everything, if it chose nothing
            k = slot.state.get("mask_k", slot.numel)
            return FullMask(slot.numel) if k == slot.numel else EncodedMask(slot.numel, k, slot.state["mask"])
        k = self.schedule.kept(step, slot.numel)
        if k == slot.numel:
            return FullMask(slot.numel)
        if self.kind == "cyclic":
            return CyclicMask(slot.numel, k, slot.state["mask_start"])
        return RandomMask(slot.numel, k, mask_seed(self.seed, step, slot.index))

    def selection_of(self, slot: Slot):
        """This step's mask, ready to read and write flat tensors; short index lists are kept until `end`."""
        if slot.index in self._selections:
            return self._selections[slot.index]
        mask = self.masks[slot.index]
        selection = mask.resolve(slot.param.device)
        if 8 * mask.k <= mask.numel:
            self._selections[slot.index] = selection
        return selection

    def to_choose(self, step: int) -> list[tuple[Slot, int]]:
        """(tensor, k) of every mask that owners have to choose in `step`, for the step after it."""
        if self.kind != "topk":
            return []
        chosen = [(s, self.schedule.kept(step + 1, s.numel)) for s in self.sparse]
        return [(slot, k) for slot, k in chosen if k < slot.numel]

    def end(self, chosen: list[tuple[Slot, int]], payloads: dict[int, torch.Tensor]) -> None:
        """Forget this step's masks and send the next: `payloads` holds, by slot index, those this rank owns."""
        self._selections.clear()
        for slot in self.sparse:
            slot.state.pop("mask", None)
            slot.state.pop("mask_k", None)
            if self.kind == "cyclic":
                slot.state["mask_start"] = (slot.state["mask_start"] + self.masks[slot.index].k) % slot.numel
        if not chosen:
            return
        sizes = [0] * self.world
        for slot, k in chosen:
            sizes[slot.owner] += mask_bytes(slot.numel, k)
        own = [payloads[slot.index] for slot, _ in chosen if slot.owner == self.rank]
        empty = torch.empty(0, dtype=torch.uint8, device=self.sparse[0].param.device)
        self._gather = PendingGather(torch.cat([empty, *own]), sizes, self.group)
        self._under_way = chosen
        self.meter.add(0, ring_half_bytes(sum(sizes), self.world))

    def kept(self) -> tuple[int, int]:
        """Entries that the last step's masks let through, and all entries of the sparse tensors."""
        return sum(mask.k for mask in self.masks.values()), sum(s.numel for s in self.sparse)

    def overlap(self) -> float:
        """Share of the last step's mask that was also in the mask of the step before; nan before the second step."""
        common, kept = 0, 0
        for slot in self.sparse:
            if slot.index not in self._masks_before:
                continue
            device = slot.param.device
            before = torch.zeros(slot.numel, dtype=torch.bool, device=device)
            self._masks_before[slot.index].resolve(device).put_(before, True)
            now = self.masks[slot.index]
            common += int(now.resolve(device).take(before).sum())
            kept += now.k
        return common / kept if kept else float("nan")
