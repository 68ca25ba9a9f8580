"""SCAPE's step by brute force, from its equations: tensor after tensor, rank after rank, whole tensors.

Shares no code with the library but the random masks' generator. `mutant` names one deliberate mistake.
"""

import math

import torch

from hf_taco_scape.sync.mask import RandomMask, mask_seed

# odd sizes, a scalar, a tensor of one entry, three dimensions, one tensor that outweighs the rest
SHAPES = [(37, 29), (61,), (13, 5, 3), (7,), (101, 2), (1, 1), ()]
GROUPS = [
    {"params": [0, 2, 5], "weight_decay": 0.1, "lr": 3e-3},
    {"params": [3, 6], "weight_decay": 0.0, "lr": 1e-2},
    {"params": [1], "weight_decay": 0.0, "lr": 1e-2, "sparse": True},
    {"params": [4], "weight_decay": 0.2, "lr": 3e-3, "sparse": False},
]
# parameter index in the optimizer's order -> index in SHAPES
ORDER = [i for group in GROUPS for i in group["params"]]
BETAS, EPS = (0.9, 0.95), 1e-8


def initial(dtype) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1234)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in SHAPES]


def gradient(rank: int, step: int, i: int, dtype) -> torch.Tensor | None:
    """A part that persists, a part that differs by rank and step; on some ranks and steps none at all."""
    if (i == 2 and rank == 1 and step in (3, 4)) or (i == 5 and rank == 0):
        return None
    lasting = torch.randn(SHAPES[i], generator=torch.Generator().manual_seed(i), dtype=torch.float64)
    fresh = torch.Generator().manual_seed(1 + 1000 * step + 10_007 * rank + 101 * i)
    noise = torch.randn(SHAPES[i], generator=fresh, dtype=torch.float64)
    size = 10.0 ** (i % 3 - 1) * (1.5 if step % 4 else 0.2)
    return (size * (0.5 * lasting + noise)).to(dtype)


def density_of(t: int, target: float, warmup: int, hold: int) -> float:
    if warmup == 0:
        return 1.0 if t <= 1 + hold else target
    return target ** (min(max(t - 1 - hold, 0), warmup) / warmup)


def kept_of(t: int, numel: int, options: dict) -> int:
    d = density_of(t, options["density"], options.get("warmup_steps", 0), options.get("hold_steps", 0))
    return max(1, math.ceil(d * numel))


def largest(c: torch.Tensor, k: int, mutant: str | None) -> torch.Tensor:
    flat = c.flatten().abs()
    if mutant == "ties_by_highest_index":
        order = flat.numel() - 1 - torch.sort(flat.flip(0), descending=True, stable=True).indices
    else:
        order = torch.sort(flat, descending=True, stable=True).indices
    mask = torch.zeros(flat.numel(), dtype=torch.bool)
    mask[order[:k]] = True
    return mask.view(c.shape)


class Reference:
    """W ranks in one process; `step(t, grads)` with grads[rank][i] in SHAPES order."""

    def __init__(
        self, world: int, dtype, options: dict, params: list[torch.Tensor], mutant: str | None = None
    ) -> None:
        self.world, self.options, self.mutant = world, options, mutant
        self.p = [p.clone() for p in params]
        self.m = [torch.zeros_like(p) for p in params]
        self.r = [[torch.zeros_like(p) for p in params] for _ in range(world)]
        self.v = [torch.zeros(p.shape[:1], dtype=dtype) for p in params]
        self.columns = {}
        self.next_mask = [torch.ones(p.shape, dtype=torch.bool) for p in params]
        self.cyclic_start = [0] * len(params)
        self.hyper, self.sparse = {}, {}
        for group in GROUPS:
            for i in group["params"]:
                self.hyper[i] = (group["lr"], group["weight_decay"])
                self.sparse[i] = group.get("sparse", params[i].dim() >= 2)
        self.owner = self.owners()
        self.masks, self.norms = [], []

    def owners(self) -> dict[int, int]:
        load, owner = [0] * self.world, {}
        place = {i: n for n, i in enumerate(ORDER)}
        for i in sorted((i for i in ORDER if self.sparse[i]), key=lambda i: (-self.p[i].numel(), place[i])):
            owner[i] = load.index(min(load))
            load[owner[i]] += self.p[i].numel()
        return owner

    def mask_of(self, t: int, i: int, c: list[torch.Tensor]) -> torch.Tensor:
        kind, n = self.options.get("mask", "topk"), self.p[i].numel()
        if kind == "topk":
            mask = self.next_mask[i]
            if self.mutant == "mask_not_delayed":
                mask = largest(c[self.owner[i]], kept_of(t, n, self.options), None)
            self.next_mask[i] = largest(c[self.owner[i]], kept_of(t + 1, n, self.options), self.mutant)
            return mask
        k, mask = kept_of(t, n, self.options), torch.zeros(n, dtype=torch.bool)
        if kind == "cyclic":
            mask[[(self.cyclic_start[i] + j) % n for j in range(k)]] = True
            self.cyclic_start[i] = (self.cyclic_start[i] + k) % n
        elif k == n:
            mask[:] = True
        else:
            mask[RandomMask(n, k, mask_seed(0, t, ORDER.index(i))).indices(torch.device("cpu"))] = True
        return mask.view(self.p[i].shape)

    def clip_locally(self, grads, max_norm):
        clipped, norms = [], []
        for own in grads:
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in own if g is not None))
            norms.append(norm)
            coefficient = min(1.0, max_norm / (norm + 1e-6))
            clipped.append([None if g is None else g * coefficient for g in own])
        self.norms.append(sum(norms) / self.world)
        return clipped

    def step(self, t: int, grads) -> None:
        b1, b2 = BETAS
        max_norm = self.options.get("max_grad_norm")
        local = self.options.get("clip", "ghat") == "local"
        kind = self.options.get("second_moment", "adams")
        rows, factored = kind in ("row", "factored"), kind == "factored"
        if max_norm and local:
            grads = self.clip_locally(grads, max_norm)
        mt, ghat, masks = {}, {}, {}
        for i in ORDER:
            own = [torch.zeros_like(self.p[i]) if g[i] is None else g[i] for g in grads]
            if not self.sparse[i]:
                ghat[i] = sum(own[1:], own[0]) / self.world
                mt[i] = b1 * self.m[i] + (1 - b1) * ghat[i]
                continue
            decay = 0.9 if self.mutant == "residual_decayed" else 1.0
            c = [(b1 * self.m[i] + (1 - b1) * own[w]) + decay * self.r[w][i] for w in range(self.world)]
            mask = masks[i] = self.mask_of(t, i, c)
            for w in range(self.world):
                self.r[w][i] = torch.where(mask, 0.0, c[w])
            sent = [torch.where(mask, x, 0.0) for x in c]
            mt[i] = sum(sent[1:], sent[0]) / self.world
            ghat[i] = torch.where(mask, (mt[i] - b1 * self.m[i]) / (1 - b1), 0.0)
            if rows:
                mean = sum(g.square().reshape(g.shape[0], -1).mean(1) for g in own) / self.world
                self.v[i] = b2 * self.v[i] + (1 - b2) * mean
            if factored:
                mean = sum(g.square().reshape(g.shape[0], -1).mean(0) for g in own) / self.world
                self.columns[i] = b2 * self.columns.get(i, 0.0) + (1 - b2) * mean
        self.masks.append(masks)
        if max_norm and not local:
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in ghat.values()))
            if self.mutant == "clip_by_one_ranks_norm":
                norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads[0] if g is not None))
            self.norms.append(norm)
            coefficient = min(1.0, max_norm / (norm + 1e-6))
            if coefficient < 1:
                for i in ORDER:
                    ghat[i] = ghat[i] * coefficient
                    mt[i] = b1 * self.m[i] + (1 - b1) * ghat[i]
                    if self.sparse[i]:
                        mt[i] = torch.where(masks[i], mt[i], 0.0)
        for i in ORDER:
            lr, decay = self.hyper[i]
            if rows and self.sparse[i]:
                v = self.v[i].view(-1, *[1] * (self.p[i].dim() - 1)).expand_as(self.p[i])
                if factored:
                    outer = self.v[i][:, None] * self.columns[i][None, :] / self.v[i].mean().clamp_min(1e-30)
                    v = outer.reshape(self.p[i].shape)
            else:
                v = b2 * self.m[i] ** 2 + (1 - b2) * ghat[i] ** 2
            self.p[i] = self.p[i] - lr * decay * self.p[i]
            self.p[i] = self.p[i] - (lr / (1 - b1**t)) * mt[i] / (v.sqrt() / math.sqrt(1 - b2**t) + EPS)
            self.m[i] = mt[i]
