"""A low-rank part of the message, beside the sparse one: each step the projection on a subspace that all ranks know.

Every matrix C (what a rank has to send) is projected on r directions, in turns on the left (U^T C) and on the right
(C V). The projections' average travels with the sparse values; what it decodes to is taken off every rank's C, so
nothing is lost whatever the directions are. The next step's directions are those of the averaged projection, so they
follow the largest singular vectors of C by one half of a power iteration a step (PowerSGD's, Vogels et al. 2019, with
one message instead of two, and delayed by a step as SCAPE's mask is).
"""

import torch


def orthonormal(x: torch.Tensor) -> torch.Tensor:
    """[layers, n, r] with orthonormal columns of the same span, by Cholesky; nothing waits for the host."""
    x = x / torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp_min(1e-30)
    gram = x.transpose(1, 2) @ x
    # directions that coincide come out short instead of wild
    gram.diagonal(dim1=1, dim2=2).add_(1e-5)
    factor, _ = torch.linalg.cholesky_ex(gram)
    return torch.linalg.solve_triangular(factor, x.transpose(1, 2), upper=False).transpose(1, 2)


def low_ranks(kinds, density: float, share: float) -> tuple[list[int], float]:
    """(directions of each kind's matrices, density they cost on average): together about `share` of `density`."""
    ranks = [max(1, round(share * density * 2 / (1 / kind.shape[0] + 1 / kind.shape[1]))) for kind in kinds]
    numbers = sum(kind.layers * rank * sum(kind.shape) / 2 for kind, rank in zip(kinds, ranks, strict=True))
    return ranks, numbers / sum(kind.layers * kind.numel for kind in kinds)


class LowRank:
    """The subspaces of all matrices; ranks: the directions of each kind's."""

    def __init__(self, kinds, ranks: list[int], like: torch.Tensor, seed: int) -> None:
        self.kinds, self.ranks = kinds, ranks
        generator = torch.Generator().manual_seed(seed)
        self.bases = []
        for kind, rank in zip(kinds, self.ranks, strict=True):
            start = torch.randn(kind.layers, kind.shape[1], rank, generator=generator, dtype=torch.float64)
            self.bases.append(orthonormal(start.to(like)))
        self.right = True

    def numbers(self) -> int:
        """Numbers in the next message."""
        side = 0 if self.right else 1
        return sum(kind.shape[side] * rank * kind.layers for kind, rank in zip(self.kinds, self.ranks, strict=True))

    def exchange(self, c: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """The decoded average, [size]; it is taken off c, [world, size], in place. Directions are found in c/scale."""
        arrived = torch.empty_like(c[0])
        for i, kind in enumerate(self.kinds):
            shape = (kind.layers, *kind.shape)
            own = c[:, kind.span].view(len(c), *shape)
            weigh = None if scale is None else scale[kind.span].view(shape)
            judged = own if weigh is None else own / weigh
            basis = self.bases[i]
            if self.right:
                projections = judged @ basis
                decoded = projections @ basis.transpose(1, 2)
                mean = projections.mean(0)
            else:
                projections = basis.transpose(1, 2) @ judged
                decoded = basis @ projections
                mean = projections.mean(0).transpose(1, 2)
            decoded = decoded if weigh is None else decoded * weigh
            own.sub_(decoded)
            arrived[kind.span] = decoded.mean(0).view(-1)
            self.bases[i] = orthonormal(mean)
        self.right = not self.right
        return arrived
