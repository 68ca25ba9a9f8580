"""What symm_kernels.py is told of a codec, of the ranks' pieces and of a call; plain data, no Triton needed."""

from dataclasses import dataclass
from functools import cached_property

GROUP = 128
TAIL_BYTES = 256
SCALE_BYTES = {0: 0, 1: 2, 2: 8}  # of a group, by the number of scales


@dataclass(frozen=True)
class Format:
    """A codec as the kernels see it: largest code (0: values as they are), bits of one, transform, scales a group;
    and its tiles: pieces that a group is split into, warps of a program."""

    qmax: int
    bits: int
    hadamard: bool
    scales: int
    pieces: int = 4
    warps: int = 4

    @cached_property
    def rows(self) -> int:
        """Groups of a tile: a thread has eight neighbours of each piece."""
        return 2 * self.pieces * self.warps

    @cached_property
    def tile_bytes(self) -> int:
        return self.rows * (GROUP * self.bits // 8 + SCALE_BYTES[self.scales])

    def tiles(self, numel: int) -> int:
        return max(-(-numel // (self.rows * GROUP)), 1)

    def sent_bytes(self, numel: int) -> int:
        """Bytes that travel as the message of `numel` elements: whole tiles, and taco's short last group."""
        if self.scales == 2 and numel % GROUP:
            return self.tiles(numel - numel % GROUP) * self.tile_bytes + TAIL_BYTES
        return self.tiles(numel) * self.tile_bytes

    def message_bytes(self, numel: int) -> int:
        """Bytes of an inbox for a message of up to `numel` elements, a multiple of 256."""
        tail = TAIL_BYTES if self.scales == 2 else 0  # a shorter message may have a short group where this has none
        return -(-self.tiles(numel) * self.tile_bytes // 256) * 256 + tail

    def constants(self) -> dict:
        """The kernels' constants; a thread's codes fill WORDS words of 32 bits."""
        return {
            "QMAX": self.qmax,
            "BITS": self.bits,
            "HADAMARD": self.hadamard,
            "SCALES": self.scales,
            "WORDS": self.pieces * self.bits // 4,
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
