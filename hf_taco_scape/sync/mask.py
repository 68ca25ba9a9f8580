"""Which entries of each sparse tensor travel: owners, exact top-k selection, and the masks every rank can work out.

A mask describes k of a tensor's `numel` entries. `resolve(device)` gives a selection, which reads (`take`) and writes
(`put_`) those entries of the flattened tensor; the order of the k values is the selection's and the same on all ranks.
"""

from dataclasses import dataclass

import torch

from hf_taco_scape.sync.mask_codec import choose_encoding, decode, encode, encoded_bytes

RADIX_BITS = 11


def assign_owners(sizes: list[int], world: int) -> list[int]:
    """The rank that selects each tensor's mask: largest tensor first, each to the least loaded rank.

    Ties go to the lower index and the lower rank. `sizes` are elements; returns one rank of `world` a tensor.
    """
    owners, load = [0] * len(sizes), [0] * world
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[i] = min(range(world), key=lambda rank: (load[rank], rank))
        load[owners[i]] += sizes[i]
    return owners


def magnitude_bits(x: torch.Tensor) -> torch.Tensor:
    """|x| as integers of the same order: the bits of a non-negative float grow with its value. NaN sorts highest."""
    return x.abs().view(torch.int64 if x.dtype == torch.float64 else torch.int32)


def _threshold_by_histogram(bits: torch.Tensor, k: int) -> int:
    """Radix select: one histogram of the leading bits, then of the next bits of the entries in the deciding bin."""
    shift = torch.iinfo(bits.dtype).bits - 1
    threshold, candidates = 0, bits
    while shift > 0:
        width = min(RADIX_BITS, shift)
        shift -= width
        digits = (candidates >> shift) & ((1 << width) - 1)
        from_top = torch.bincount(digits, minlength=1 << width).flip(0).cumsum(0)
        place = int(torch.searchsorted(from_top, k))
        if place:
            k -= int(from_top[place - 1])
        digit = (1 << width) - 1 - place
        threshold |= digit << shift
        candidates = candidates[digits == digit]
    return threshold


def _threshold_by_topk(bits: torch.Tensor, k: int) -> torch.Tensor:
    """torch.topk is itself a radix select on CUDA, and needs no answer on the host."""
    return torch.topk(bits, k, sorted=False).values.min()


_THRESHOLD = {"cpu": _threshold_by_histogram, "cuda": _threshold_by_topk}


def select_topk(x: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest entries of |x|, exactly k, equal values by lowest index; no sort.

    x: [n] fp32 or fp64. Returns bool [n] with k entries set. The same bits give the same mask on every device.
    """
    if not 1 <= k <= x.numel():
        raise ValueError(f"cannot keep {k} of {x.numel()} entries")
    from hf_taco_scape.sync.device import select_bool  # which imports this module

    by_kernels = select_bool(x, k)
    if by_kernels is not None:
        return by_kernels
    bits = magnitude_bits(x)
    threshold = _THRESHOLD[x.device.type](bits, k)
    chosen = bits > threshold
    tied = bits == threshold
    room = k - chosen.sum()
    place = tied.cumsum(0, dtype=torch.int32 if x.numel() < 2**31 else torch.int64)
    return chosen.logical_or_(tied.logical_and_(place <= room))


class FullSelection:
    """All entries: reads and writes need no index."""

    def take(self, flat: torch.Tensor) -> torch.Tensor:
        """All entries, as a view."""
        return flat

    def put_(self, flat: torch.Tensor, values: torch.Tensor | float) -> None:
        if isinstance(values, torch.Tensor):
            flat.copy_(values)
        else:
            flat.fill_(values)

    def places(self, flat: torch.Tensor) -> None:
        """None stands for every index in order."""
        return None


@dataclass
class RangeSelection:
    """`k` entries from `start` on, wrapping around: contiguous copies."""

    start: int
    k: int

    def _split(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        head = min(self.k, flat.numel() - self.start)
        return flat[self.start : self.start + head], flat[: self.k - head]

    def take(self, flat: torch.Tensor) -> torch.Tensor:
        """[k] values, a copy."""
        return torch.cat(self._split(flat))

    def put_(self, flat: torch.Tensor, values: torch.Tensor | float) -> None:
        head, tail = self._split(flat)
        if isinstance(values, torch.Tensor):
            head.copy_(values[: head.numel()])
            tail.copy_(values[head.numel() :])
        else:
            head.fill_(values)
            tail.fill_(values)

    def places(self, flat: torch.Tensor) -> torch.Tensor:
        """int64 [k], the index of each value."""
        return (torch.arange(self.k, device=flat.device) + self.start) % flat.numel()


@dataclass
class IndexSelection:
    """The entries listed in `indices`, int64 [k]."""

    indices: torch.Tensor

    def take(self, flat: torch.Tensor) -> torch.Tensor:
        """[k] values, a copy."""
        return flat.index_select(0, self.indices)

    def put_(self, flat: torch.Tensor, values: torch.Tensor | float) -> None:
        if isinstance(values, torch.Tensor):
            flat.index_copy_(0, self.indices, values.to(flat.dtype))
        else:
            flat.index_fill_(0, self.indices, values)

    def places(self, flat: torch.Tensor) -> torch.Tensor:
        """int64 [k], the index of each value."""
        return self.indices


@dataclass
class FullMask:
    """Every entry travels: the mask of step 1, of the held steps, and of a tensor too small to thin out."""

    numel: int

    @property
    def k(self) -> int:
        return self.numel

    def resolve(self, device: torch.device) -> FullSelection:
        return FullSelection()


@dataclass
class CyclicMask:
    """`k` entries from `start` on, wrapping around; the next step's mask starts where this one ends."""

    numel: int
    k: int
    start: int

    def resolve(self, device: torch.device) -> RangeSelection:
        return RangeSelection(self.start, self.k)


_MASK32 = 0xFFFFFFFF


def _hash32(x):
    """A 32-bit integer mixer (public domain, github.com/skeeto/hash-prospector), for ints and int64 tensors alike."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def mask_seed(seed: int, step: int, tensor: int) -> int:
    """One 32-bit seed for a step and a tensor, the same on every rank."""
    return _hash32((_hash32((_hash32(seed & _MASK32) + step) & _MASK32) + tensor) & _MASK32)


@dataclass
class RandomMask:
    """One entry of each of k equal strata, turned by a random offset: even cover, indices in order, integers only.

    Integer arithmetic gives the same mask on every rank and device, so a shared seed is all that is exchanged.
    """

    numel: int
    k: int
    seed: int

    def indices(self, device: torch.device) -> torch.Tensor:
        """int64 [k], all different."""
        stratum = torch.arange(self.k, device=device)
        first = stratum * self.numel // self.k
        width = (stratum + 1) * self.numel // self.k - first
        place = first + _hash32((stratum * 0x9E3779B9 + self.seed) & _MASK32) % width
        return (place + _hash32(self.seed)) % self.numel

    def resolve(self, device: torch.device) -> IndexSelection:
        return IndexSelection(self.indices(device))


@dataclass
class EncodedMask:
    """A mask chosen by its owner, kept in the form it travelled in: at most numel/8 bytes at any density."""

    numel: int
    k: int
    payload: torch.Tensor  # uint8 [encoded_bytes(numel, k)]

    @classmethod
    def from_bool(cls, chosen: torch.Tensor, k: int) -> "EncodedMask":
        """Encode bool [numel] with k entries set, in the form with the fewest bytes."""
        return cls(chosen.numel(), k, encode(chosen, k, choose_encoding(chosen.numel(), k)))

    def indices(self, device: torch.device) -> torch.Tensor:
        """int64 [k], ascending."""
        return decode(self.payload.to(device), self.numel, self.k, choose_encoding(self.numel, self.k))

    def resolve(self, device: torch.device) -> IndexSelection:
        return IndexSelection(self.indices(device))


def mask_bytes(numel: int, k: int) -> int:
    """Bytes of a top-k mask on the wire: 0 for a full one, else those of the shortest encoding."""
    return 0 if k == numel else encoded_bytes(numel, k, choose_encoding(numel, k))
