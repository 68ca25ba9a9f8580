"""Which entries of a flat parameter vector a study's step sends: SCAPE's masks and two more, as bool vectors."""

import math
import re

import torch

from hf_taco_scape.sync.density import DensitySchedule
from hf_taco_scape.sync.mask import _hash32, assign_owners, magnitude_bits, mask_seed

SEED_BLOCK = 256


class FlushedSchedule:
    def __init__(self, schedule: DensitySchedule, last: int, density: float) -> None:
        self.schedule, self.last, self.density, self.target = schedule, last, density, schedule.target

    def kept(self, step: int, numel: int) -> int:
        least = min(numel, math.ceil(self.density * numel)) if step > self.last else 1
        return max(least, self.schedule.kept(step, numel))


def select_rows(x: torch.Tensor, k: int) -> torch.Tensor:
    """bool like x, [rows, n]: each row's k largest |x|, equal values by lowest index; nothing waits for the host."""
    if k == x.shape[1]:
        return torch.ones_like(x, dtype=torch.bool)
    bits = magnitude_bits(x)
    threshold = torch.topk(bits, k, dim=1, sorted=False).values.amin(1, keepdim=True)
    chosen, tied = bits > threshold, bits == threshold
    # one scan over all rows: a scan a row leaves most of a GPU idle
    place = tied.view(-1).cumsum(0, dtype=torch.int32).view_as(x)
    before = torch.cat([place.new_zeros(1), place[:-1, -1]])[:, None]
    return chosen.logical_or_(tied.logical_and_(place - before <= k - chosen.sum(1, keepdim=True)))


class Masks:
    """The bool vector over all sparse entries for each step; `judge` is told what this step had to send."""

    def __init__(self, kinds, world: int, schedule, mask: str, seed: int, device, dense: str = "") -> None:
        self.kinds, self.schedule, self.kind, self.seed, self.device = kinds, schedule, mask, seed, device
        self.whole = [bool(dense and re.search(dense, kind.name)) for kind in kinds]
        self.owners = assign_owners([kind.numel for kind in kinds for _ in range(kind.layers)], world)
        self.size = kinds[-1].span.stop
        self.current = torch.ones(self.size, dtype=torch.bool, device=device)
        self.swept = [0] * len(kinds)
        self.seeds, self.seeds_from = None, 0

    def counts(self, step: int) -> list[int]:
        """Entries that each kind's tensors send; kinds whose name matches `dense` send all."""
        pairs = zip(self.kinds, self.whole, strict=True)
        return [kind.numel if whole else self.schedule.kept(step, kind.numel) for kind, whole in pairs]

    def owned(self, c: torch.Tensor) -> torch.Tensor:
        """Every tensor's entries of its owner's row; c: [ranks, size]."""
        parts, tensor = [], 0
        for kind in self.kinds:
            for layer in range(kind.layers):
                first = kind.first + layer * kind.numel
                parts.append(c[self.owners[tensor], first : first + kind.numel])
                tensor += 1
        return torch.cat(parts)

    def begin(self, step: int) -> torch.Tensor:
        """The mask of `step`."""
        counts = self.counts(step)
        if self.kind == "random":
            self._draw(step, counts)
        elif self.kind == "cyclic":
            self.current.zero_()
            for i, (kind, k) in enumerate(zip(self.kinds, counts, strict=True)):
                self._sweep(self.current, i, kind, k)
        return self.current

    def judge(self, step: int, c: torch.Tensor, scale: torch.Tensor | None) -> None:
        """Choose the next step's mask by |c|, over `scale` where given; c: [ranks, size]."""
        if self.kind in ("random", "cyclic"):
            return
        counts = self.counts(step + 1)
        judged = c.mean(0) if self.kind == "topk_mean" else self.owned(c)
        if scale is not None:
            judged = judged / scale
        following = torch.empty_like(self.current)
        for i, (kind, k) in enumerate(zip(self.kinds, counts, strict=True)):
            best = (k + 1) // 2 if self.kind == "half" and k < kind.numel else k
            following[kind.span] = select_rows(judged[kind.span].view(kind.layers, -1), best).view(-1)
            if best < k:
                self._sweep(following, i, kind, k // 2)
        self.current = following

    def _sweep(self, mask, i: int, kind, k: int) -> None:
        rows, start = mask[kind.span].view(kind.layers, -1), self.swept[i]
        rows[:, start : start + k] = True
        rows[:, : max(0, start + k - kind.numel)] = True
        self.swept[i] = (start + k) % kind.numel if k < kind.numel else start

    def _draw(self, step: int, counts) -> None:
        """RandomMask's arithmetic for all layers of a kind at once."""
        if self.seeds is None or not 0 <= step - self.seeds_from < SEED_BLOCK:
            tensors = range(len(self.owners))
            table = [[mask_seed(self.seed, step + i, j) for j in tensors] for i in range(SEED_BLOCK)]
            self.seeds, self.seeds_from = torch.tensor(table, device=self.device), step
        self.current.zero_()
        tensor = 0
        for kind, k in zip(self.kinds, counts, strict=True):
            seeds = self.seeds[step - self.seeds_from, tensor : tensor + kind.layers, None]
            tensor += kind.layers
            if k == kind.numel:
                self.current[kind.span] = True
                continue
            stratum = torch.arange(k, device=self.device)
            first = stratum * kind.numel // k
            width = (stratum + 1) * kind.numel // k - first
            place = first + _hash32((stratum * 0x9E3779B9 + seeds) & 0xFFFFFFFF) % width
            place = (place + _hash32(seeds)) % kind.numel
            self.current[kind.span].view(kind.layers, -1).scatter_(1, place, True)
