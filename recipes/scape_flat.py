"""SCAPE's step, its variants and its rivals on W virtual ranks, as whole-model operations on flat vectors.

The step of SimulatedScape (tests/test_simulate_scape.py: the same numbers), which equals the distributed one bit for
bit, without its loops: a mask is a bool vector, no value waits for the host, and a step of 7M parameters on 4 ranks
is some hundred kernels. `kinds` say where which tensors lie (scape_models.py); matrices come first and are sparse.

momentum: what carries a gradient from rank to rank.
    sparse   SCAPE: c = b1*m + (1-b1)*g + r; m is the average on the mask, 0 elsewhere
    kept     c = (1-b1)*g + r; m = b1*m + average on the mask. m is dense, the same on all ranks, and moves every
             parameter every step at no cost on the wire. W*m' + R' = b1*W*m + R + (1-b1)*sum of g, as in SCAPE
    predict  kept, with a shared guess h of the gradient: c = (1-b1)*(g - h) + r, m = b1*m + (1-b1)*h + average; h
             learns (1-b1^age)/age of what arrives. Conserves as kept does, with h counted
    track    EF21 with momentum (Fatkhullin et al., 2023): u = b*u + (1-b)*g per rank; what is sent is u minus what the
             others know of it, and the sum of that knowledge is the momentum. Does not conserve
second_moment: adams (SCAPE); row, factored (row means times column means), full (each entry's: no message carries it),
    EMAs of the ranks' mean of g_local^2; arrived, AdamW's own of the averaged gradient as it arrived, 0 off the mask.
bound: an entry moves by at most bound / sqrt(density) learning rates a step; what it exceeds them by is dropped. An
    entry waits 1/density steps, and the sum of so many steps' noise is sqrt(1/density) times one step's.
"""

import torch

from hf_taco_scape.sync.mask import mask_bytes
from hf_taco_scape.sync.norms import clip_coefficient
from scape_lowrank import LowRank
from scape_masks import Masks, select_rows


class LocalSecondMoment:
    """v of every sparse entry from the ranks' mean of g_local^2: `row`, `factored` or `full`."""

    def __init__(self, kinds, kind: str, flat: torch.Tensor) -> None:
        self.kinds, self.kind = kinds, kind
        self.v = flat.new_zeros(kinds[-1].span.stop)
        self.parts = [None] * len(kinds)

    def update(self, grads: torch.Tensor, b2: float) -> None:
        square = grads.square().mean(0)
        if self.kind == "full":
            self.v.mul_(b2).add_(square, alpha=1 - b2)
            return
        for i, kind in enumerate(self.kinds):
            shape = (kind.layers, *kind.shape)
            fresh = square[kind.span].view(shape)
            over = [d for d in range(1, len(shape)) if d != kind.row_dim + 1]
            sums = [fresh.mean(over, keepdim=True)]
            if self.kind == "factored":
                sums.append(fresh.mean(kind.row_dim + 1, keepdim=True))
            if self.parts[i] is None:
                self.parts[i] = [torch.zeros_like(s) for s in sums]
            for part, s in zip(self.parts[i], sums, strict=True):
                part.mul_(b2).add_(s, alpha=1 - b2)
            v = self.parts[i][0]
            if self.kind == "factored":
                # a tensor without any gradient yet has a mean of 0
                v = v * self.parts[i][1] / v.mean(kind.row_dim + 1, keepdim=True).clamp_min(1e-30)
            self.v[kind.span].view(shape).copy_(v)

    def numbers(self) -> int:
        """Numbers a message carries for it."""
        per_tensor = {
            "row": lambda k: k.shape[k.row_dim],
            "factored": lambda k: sum(k.shape),
            "full": lambda k: k.numel,
        }
        return sum(per_tensor[self.kind](kind) * kind.layers for kind in self.kinds)


class ArrivedSecondMoment:
    """v of every sparse entry from the averaged gradient as it arrived."""

    kind = "arrived"

    def __init__(self, size: int, flat: torch.Tensor) -> None:
        self.v = flat.new_zeros(size)

    def update(self, ghat: torch.Tensor, b2: float) -> None:
        self.v.mul_(b2).addcmul_(ghat, ghat, value=1 - b2)

    def numbers(self) -> int:
        return 0


class FlatScape:
    """SCAPE on `world` ranks at once; `step(grads, lr)` takes [world, N] and uses it up.

    flat: [N] parameters, changed in place. share: the part of c that is sent where the mask is set; the rest stays.
    ranks: the directions of each kind's matrices in a low-rank part of the message (scape_lowrank.py), or None.
    dense: a regular expression; matrices whose name it matches are sent whole.
    """

    def __init__(
        self,
        kinds,
        flat: torch.Tensor,
        world: int,
        *,
        schedule,
        max_grad_norm: float | None = None,
        second_moment: str = "adams",
        mask: str = "topk",
        clip: str = "ghat",
        momentum: str = "sparse",
        score: str = "c",
        share: float = 1.0,
        bound: float = 0.0,
        local_beta: float = 0.9,
        ranks: list[int] | None = None,
        dense: str = "",
        seed: int = 0,
        betas=(0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        self.kinds, self.flat, self.world = [k for k in kinds if k.is_matrix], flat, world
        self.size = self.kinds[-1].span.stop
        self.schedule, self.max_grad_norm, self.clip = schedule, max_grad_norm, clip
        self.momentum_kind, self.score, self.share, self.local_beta = momentum, score, share, local_beta
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.masks = Masks(self.kinds, world, schedule, mask, seed, flat.device, dense)
        self.bound = bound
        if second_moment == "adams":
            self.second = None
        elif second_moment == "arrived":
            self.second = ArrivedSecondMoment(self.size, flat)
        else:
            self.second = LocalSecondMoment(self.kinds, second_moment, flat)
        self.momentum = torch.zeros_like(flat)
        self.residual = flat.new_zeros(world, self.size)
        self.vector_v = torch.zeros_like(flat[self.size :])
        self.low_rank = LowRank(self.kinds, ranks, flat, seed) if ranks else None
        if momentum == "predict":
            self.guess, self.age = torch.zeros_like(flat[: self.size]), torch.zeros_like(flat[: self.size])
        if momentum == "track":
            self.local, self.known = torch.zeros_like(self.residual), torch.zeros_like(self.residual)
        self.count, self.sent, self.clipped = 0, 0, flat.new_zeros(())

    @torch.no_grad()
    def step(self, grads: torch.Tensor, lr: float) -> None:
        self.count += 1
        t, b2 = self.count, self.betas[1]
        if self.clip == "local" and self.max_grad_norm:
            scale = clip_coefficient(torch.linalg.vector_norm(grads, dim=1), self.max_grad_norm)
            self.clipped += (scale < 1).to(scale.dtype).mean()
            grads.mul_(scale[:, None])
        own, vectors = grads[:, : self.size], grads[:, self.size :].mean(0)
        arrived = isinstance(self.second, ArrivedSecondMoment)
        if self.second is not None and not arrived:
            self.second.update(own, b2)
        mask = self.masks.begin(t)
        previous = self.momentum[: self.size]
        momentum = self._exchange(own, mask, previous)
        if self.second is None or arrived or self.clip == "ghat":
            momentum, ghat, vectors = self._decode(momentum, mask, previous, vectors)
        if arrived:
            self.second.update(ghat, b2)
        v = self.second.v if self.second is not None else previous.square().mul_(b2).addcmul_(ghat, ghat, value=1 - b2)
        self._update(lr, momentum, v, vectors)
        counts = self.masks.counts(t)
        self.sent += sum(k * kind.layers for k, kind in zip(counts, self.kinds, strict=True))
        if self.low_rank:
            self.sent += self.low_rank.numbers()

    def _exchange(self, own, mask, previous) -> torch.Tensor:
        """The new momentum of the sparse entries; residuals and the next mask follow."""
        b1 = self.betas[0]
        if self.momentum_kind == "track":
            self.local.mul_(self.local_beta).add_(own, alpha=1 - self.local_beta)
            difference = self.local - self.known
            self._judge(difference)
            difference.mul_(mask)
            self.known.add_(difference)
            return previous + difference.mean(0)
        if self.momentum_kind == "sparse":
            self.residual.add_(own.mul_(1 - b1).add_(previous, alpha=b1))
        elif self.momentum_kind == "kept":
            self.residual.add_(own, alpha=1 - b1)
        else:
            self.residual.add_(own.sub_(self.guess), alpha=1 - b1)
        low = self.low_rank.exchange(self.residual, self._scale()) if self.low_rank else None
        self._judge(self.residual)
        arrived = self.residual.mean(0).mul_(mask)
        if self.share == 1:
            self.residual.masked_fill_(mask, 0.0)
        else:
            arrived.mul_(self.share)
            self.residual.mul_(1 - mask.to(arrived.dtype) * self.share)
        if low is not None:
            arrived.add_(low)
        if self.momentum_kind == "sparse":
            return arrived
        if self.momentum_kind == "kept":
            return arrived.add_(previous, alpha=b1)
        momentum = (previous * b1).add_(self.guess, alpha=1 - b1).add_(arrived)
        self.age.add_(1)
        self.guess.addcmul_(arrived / (1 - b1), (1 - self.local_beta**self.age) / self.age)
        self.age.masked_fill_(mask, 0.0)
        return momentum

    def _scale(self) -> torch.Tensor | None:
        """What an update divides by, where entries are to be judged by what they move."""
        return self.second.v.sqrt().add_(self.eps) if self.score == "update" else None

    def _judge(self, c) -> None:
        self.masks.judge(self.count, c, self._scale())

    def _decode(self, momentum, mask, previous, vectors):
        """(momentum, ghat, vectors) with ghat, the averaged gradient that arrived, and the vectors' clipped."""
        b1 = self.betas[0]
        ghat = momentum.sub(previous, alpha=b1).div_(1 - b1)
        if self.momentum_kind == "sparse":
            ghat.mul_(mask)
        if self.clip != "ghat" or not self.max_grad_norm:
            return momentum, ghat, vectors
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x) for x in (ghat, vectors)]))
        coefficient = clip_coefficient(norm, self.max_grad_norm)
        self.clipped += (coefficient < 1).to(norm.dtype)
        ghat.mul_(coefficient)
        clipped = (previous * b1).add_(ghat, alpha=1 - b1)
        if self.momentum_kind == "sparse":
            clipped.mul_(mask)
        return torch.where(coefficient < 1, clipped, momentum), ghat, vectors * coefficient

    def _update(self, lr, momentum, v, vectors) -> None:
        t, (b1, b2) = self.count, self.betas
        m = self.momentum[self.size :]
        if self.second is None or self.second.kind in ("row", "factored"):
            vector_v = m.square().mul_(b2).addcmul_(vectors, vectors, value=1 - b2)
        else:
            vector_v = self.vector_v.mul_(b2).addcmul_(vectors, vectors, value=1 - b2)
        m.mul_(b1).add_(vectors, alpha=1 - b1)
        self.momentum[: self.size] = momentum
        denominator = torch.cat([v, vector_v]).sqrt_().div_((1 - b2**t) ** 0.5).add_(self.eps)
        self.flat[: self.size].mul_(1 - lr * self.weight_decay)
        update = (self.momentum / denominator).div_(1 - b1**t)
        if self.bound:
            limit = self.bound / (self.schedule.kept(t, self.size) / self.size) ** 0.5
            update[: self.size].clamp_(-limit, limit)
        self.flat.sub_(update, alpha=lr)

    def figures(self) -> dict[str, float]:
        """Of one rank: mean density sent, residual over momentum (norms, mean over ranks), share of clipped steps, and
        bytes of a step at the last density over those of a dense fp32 one (values in fp32, mask, second moments)."""
        residual, momentum = self.residual.square().sum() / self.world, self.momentum[: self.size].square().sum()
        counts = self.masks.counts(self.count)
        pairs = [(k, kind) for k, kind in zip(counts, self.kinds, strict=True)]
        encoded = sum(mask_bytes(kind.numel, k) * kind.layers for k, kind in pairs)
        encoded = encoded if self.masks.kind not in ("cyclic", "random") else 0
        numbers = sum(k * kind.layers for k, kind in pairs) + (self.second.numbers() if self.second else 0)
        numbers += self.low_rank.numbers() if self.low_rank else 0
        return {
            "density_mean": self.sent / max(1, self.count) / self.size,
            "density_last": sum(k * kind.layers for k, kind in pairs) / self.size,
            "bytes_last": (8 * numbers + encoded) / (8 * self.size),
            "residual_over_momentum": float((residual / momentum).sqrt()),
            "clipped_share": float(self.clipped) / max(1, self.count),
        }


class FlatAdam:
    """Dense AdamW (`adamw`) or AdamS (`adams`) on the averaged gradient, clipped by its norm."""

    def __init__(self, kinds, flat, world, *, second_moment="adamw", max_grad_norm=None, betas=(0.9, 0.95), eps=1e-8,
                 weight_decay=0.1) -> None:  # fmt: skip
        self.flat, self.kind, self.max_grad_norm = flat, second_moment, max_grad_norm
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.size = [kind for kind in kinds if kind.is_matrix][-1].span.stop
        self.momentum, self.v, self.count = torch.zeros_like(flat), torch.zeros_like(flat), 0

    @torch.no_grad()
    def step(self, grads: torch.Tensor, lr: float) -> None:
        self.count += 1
        self._apply(grads.mean(0), lr)

    def _apply(self, grad, lr: float) -> None:
        t, (b1, b2) = self.count, self.betas
        if self.max_grad_norm:
            grad = grad * clip_coefficient(torch.linalg.vector_norm(grad), self.max_grad_norm)
        kept = self.v if self.kind == "adamw" else self.momentum.square()
        v = kept.mul_(b2).addcmul_(grad, grad, value=1 - b2)
        self.momentum.mul_(b1).add_(grad, alpha=1 - b1)
        denominator = v.sqrt().div_((1 - b2**t) ** 0.5).add_(self.eps)
        self.flat[: self.size].mul_(1 - lr * self.weight_decay)
        self.flat.addcdiv_(self.momentum, denominator, value=-lr / (1 - b1**t))

    def figures(self) -> dict[str, float]:
        return {}


class FlatNaive(FlatAdam):
    """Each rank's own top-k of its gradient plus its error so far, under AdamW on the mean of what the ranks sent."""

    def __init__(self, kinds, flat, world, *, schedule, **options) -> None:
        super().__init__(kinds, flat, world, **options)
        self.kinds, self.schedule = [kind for kind in kinds if kind.is_matrix], schedule
        self.errors, self.sent = flat.new_zeros(world, self.size), 0

    @torch.no_grad()
    def step(self, grads: torch.Tensor, lr: float) -> None:
        self.count += 1
        self.errors.add_(grads[:, : self.size])
        for kind in self.kinds:
            k = self.schedule.kept(self.count, kind.numel)
            rows = self.errors[:, kind.span].reshape(-1, kind.numel)
            chosen = select_rows(rows, k).view(len(grads), -1)
            grads[:, kind.span] = self.errors[:, kind.span] * chosen
            self.errors[:, kind.span].masked_fill_(chosen, 0.0)
            self.sent += k * kind.layers
        self._apply(grads.mean(0), lr)

    def figures(self) -> dict[str, float]:
        last = sum(self.schedule.kept(self.count, kind.numel) * kind.layers for kind in self.kinds)
        # every rank's own entries travel to every other
        return {"density_mean": self.sent / max(1, self.count) / self.size, "density_last": last / self.size}
