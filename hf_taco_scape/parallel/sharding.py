"""Which part of a tensor a rank holds: pure slicing, no communication.

A `Shard` lists, for each tensor-parallel rank, the ranges it takes along one dimension. That one form serves even and
uneven splits, a fused Q|K|V (three ranges a rank) and KV heads that several ranks hold (overlapping ranges).
"""

import math
from dataclasses import dataclass

import torch

Range = tuple[int, int]


@dataclass(frozen=True)
class Shard:
    """Ranks' parts of a tensor whose size along `dim` is `full_size`; `ranges[rank]` are half-open, in local order."""

    dim: int
    full_size: int
    ranges: tuple[tuple[Range, ...], ...]

    def size(self, rank: int) -> int:
        """Elements along `dim` that `rank` holds."""
        return sum(stop - start for start, stop in self.ranges[rank])

    def take(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """This rank's part of the whole tensor, as a new contiguous tensor that keeps no hold on `full`."""
        parts = [full.narrow(self.dim, start, stop - start) for start, stop in self.ranges[rank]]
        return torch.cat(parts, self.dim).contiguous() if len(parts) > 1 else parts[0].clone().contiguous()

    def put(self, full: torch.Tensor, part: torch.Tensor, rank: int) -> None:
        """Write `rank`'s part to its place in `full`, in place."""
        offset = 0
        for start, stop in self.ranges[rank]:
            full.narrow(self.dim, start, stop - start).copy_(part.narrow(self.dim, offset, stop - start))
            offset += stop - start

    def full_shape(self, part: torch.Tensor) -> list[int]:
        shape = list(part.shape)
        shape[self.dim] = self.full_size
        return shape

    def copies(self, rank: int) -> int:
        """How many ranks hold each element of `rank`'s part (1 unless KV heads are replicated)."""
        # ranges of two ranks are equal or disjoint, so one element of each range tells
        found = {
            sum(any(a <= start < b for a, b in ranges) for ranges in self.ranges) for start, _ in self.ranges[rank]
        }
        assert len(found) == 1, f"a rank's part is held by different numbers of ranks: {self}"
        return found.pop()


def spread(count: int, ranks: int) -> list[Range]:
    """Deal `count` things out to `ranks` in order, the first ranks taking one more where it does not divide."""
    bounds = [rank * (count // ranks) + min(rank, count % ranks) for rank in range(ranks + 1)]
    return list(zip(bounds, bounds[1:], strict=False))


@dataclass(frozen=True)
class HeadLayout:
    """Each rank's half-open ranges of query heads and of KV heads; a KV head's queries never leave its ranks."""

    heads: tuple[Range, ...]
    kv_heads: tuple[Range, ...]
    total_heads: int
    total_kv_heads: int
    head_dim: int

    def local(self, rank: int) -> dict[str, int]:
        (q0, q1), (k0, k1) = self.heads[rank], self.kv_heads[rank]
        return {"heads": q1 - q0, "kv_heads": k1 - k0, "head_dim": self.head_dim}


def deal_heads(heads: int, kv_heads: int, head_dim: int, ranks: int) -> HeadLayout:
    """Deal attention heads out to ranks, whole KV groups a rank.

    With fewer KV heads than ranks each KV head is held by several ranks that share its query heads.
    Raises ValueError, naming both numbers, where a rank would get no query head.
    """
    if heads % kv_heads:
        raise ValueError(f"{heads} attention heads are not a multiple of {kv_heads} key/value heads")
    per_kv = heads // kv_heads
    if kv_heads >= ranks:
        kv = spread(kv_heads, ranks)
        return HeadLayout(tuple((a * per_kv, b * per_kv) for a, b in kv), tuple(kv), heads, kv_heads, head_dim)
    q: list[Range] = []
    kv = []
    for head, (first, last) in enumerate(spread(ranks, kv_heads)):
        sharers = last - first
        if per_kv < sharers:
            raise ValueError(
                f"tp_size {ranks} is too large for {heads} attention heads and {kv_heads} key/value heads: "
                f"{sharers} ranks would share the {per_kv} query heads of one key/value head; "
                f"use tp_size {heads} or less"
            )
        q += [(head * per_kv + a, head * per_kv + b) for a, b in spread(per_kv, sharers)]
        kv += [(head, head + 1)] * sharers
    return HeadLayout(tuple(q), tuple(kv), heads, kv_heads, head_dim)


def shard_units(dim: int, size: int, units: tuple[Range, ...], total: int, packed: int = 1) -> Shard:
    """Split `size` features that hold `packed` projections of `total` equal units each, by each rank's unit range."""
    width, rest = divmod(size, packed * total)
    if rest:
        raise ValueError(f"{size} features do not divide into {packed} x {total} equal heads")
    part = size // packed
    ranges = tuple(tuple((p * part + a * width, p * part + b * width) for p in range(packed)) for a, b in units)
    return Shard(dim, size, ranges)


def shard_width(dim: int, size: int, ranks: int) -> Shard:
    """Split an MLP's width; one that `ranks` does not divide is dealt out in steps of 8, 4, 2 or 1."""
    # matrix units want multiples of 8 elements: keep them where the model's own width has them
    step = math.gcd(size, 8) if size % ranks else 1
    if size // step < ranks:
        step = 1
    if size < ranks:
        raise ValueError(f"an MLP of width {size} cannot be split over {ranks} ranks")
    ranges = tuple(((a * step, b * step),) for a, b in spread(size // step, ranks))
    return Shard(dim, size, ranges)
