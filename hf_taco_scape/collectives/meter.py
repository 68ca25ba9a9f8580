"""Counts of the bytes that a rank puts on the wire, and what a dense ring would have sent."""

from dataclasses import asdict, dataclass


@dataclass
class ByteMeter:
    """Bytes sent by this rank: `sent_bytes` as they travelled, `dense_bytes` by a dense ring in the tensor's dtype."""

    dense_bytes: int = 0
    sent_bytes: int = 0
    calls: int = 0

    def add(self, dense: int, sent: int) -> None:
        """Count one collective."""
        self.dense_bytes += dense
        self.sent_bytes += sent
        self.calls += 1

    def reset(self) -> None:
        self.dense_bytes = self.sent_bytes = self.calls = 0

    def snapshot(self) -> dict[str, int]:
        return asdict(self)


def ring_half_bytes(nbytes: int, ranks: int) -> int:
    """Bytes a rank sends in a ring reduce-scatter or all-gather of `nbytes` (mean over ranks, rounded up)."""
    return -(-nbytes * (ranks - 1) // ranks)


def ring_all_reduce_bytes(nbytes: int, ranks: int) -> int:
    """Bytes a rank sends in a ring all-reduce of `nbytes` (mean over ranks, rounded up)."""
    return -(-2 * nbytes * (ranks - 1) // ranks)
