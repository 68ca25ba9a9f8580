"""What symm_kernels.py is told of a codec, of the ranks' pieces and of a call; plain data, no Triton needed."""

from dataclasses import dataclass

GROUP = 128
TAIL_BYTES = 256

# (scales of a group, bits) -> pieces that a group is split into and warps of a program
TUNED: dict[tuple[int, int], tuple[int, int]] = {(0, 16): (2, 4), (0, 32): (1, 4)}
DEFAULT = (4, 4)


@dataclass(frozen=True)
class Format:
    """A codec as the kernels see it: largest code (0: values as they are), bits of one, transform, scales a group."""

    qmax: int
    bits: int
    hadamard: bool
    scales: int

    @property
    def pieces(self) -> int:
        return TUNED.get((self.scales, self.bits), DEFAULT)[0]

    @property
    def warps(self) -> int:
        return TUNED.get((self.scales, self.bits), DEFAULT)[1]

    @property
    def rows(self) -> int:
        """Groups of a tile: a thread has eight neighbours of each piece."""
        return 2 * self.pieces * self.warps

    @property
    def words(self) -> int:
        """32-bit words of a thread's codes."""
        return self.pieces * self.bits // 4

    def tiles(self, numel: int) -> int:
        return max(-(-numel // (self.rows * GROUP)), 1)

    def sent_bytes(self, numel: int) -> int:
        """Bytes that travel as the message of `numel` elements: whole tiles, and taco's short last group."""
        scale_bytes = {0: 0, 1: 2, 2: 8}[self.scales]
        tail = self.scales == 2 and numel % GROUP > 0
        tiles = self.tiles(numel - numel % GROUP * tail)
        return tiles * self.rows * (GROUP * self.bits // 8 + scale_bytes) + TAIL_BYTES * tail

    def message_bytes(self, numel: int) -> int:
        """Bytes of an inbox for a message of up to `numel` elements, a multiple of 256."""
        tail = TAIL_BYTES * (self.scales == 2)  # a shorter message may have a short group where this one has none
        return -(-self.sent_bytes(-(-numel // GROUP) * GROUP) // 256) * 256 + tail

    def constants(self) -> dict:
        return {
            "QMAX": self.qmax,
            "BITS": self.bits,
            "HADAMARD": self.hadamard,
            "SCALES": self.scales,
            "WORDS": self.words,
            "ROWS": self.rows,
            "PIECES": self.pieces,
        }


@dataclass(frozen=True)
class Pieces:
    """How `total` elements lie on the ranks: `base` each and `extra` more on the first `longer`, or by a `table` of
    their starts (address of int64[ranks + 1] on the device). `unit` divides every start."""

    total: int
    base: int
    longer: int
    extra: int
    longest: int
    unit: int
    short: bool  # some piece is no multiple of 128
    table: int = 0


@dataclass(frozen=True)
class Inbox:
    """Addresses on this rank of what a call needs.

    peers: the ranks' memory, two inboxes of `room` bytes each; peers_table: the same as int64[ranks] on the device.
    counters: int32[2] of calls and of programs. scratch: 256 bytes. gave_up: a word, readable by the host, that is set
    after `patience_ns` of waiting.
    """

    rank: int
    peers: tuple[int, ...]
    peers_table: int
    room: int
    counters: int
    scratch: int
    gave_up: int
    patience_ns: int
