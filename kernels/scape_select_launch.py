"""Launchers of the selection (scape_select.py): flat fp32 tensors and their k in, masks as they travel out."""

import math
from dataclasses import dataclass

import torch

from . import scape_select
from .launch import _launch
from .scape_launch import alignment, table_row, tiles_of, to_device

FORMS = {name: getattr(scape_select, name.upper()).value for name in ("bitmask", "block256", "int32", "bool")}
SAMPLES, BINS = scape_select.SAMPLES.value, scape_select.BINS.value
LIST_ROOM = 1 << 26  # entries of 6 bytes that are listed at a time; a larger tensor goes alone
LARGEST_NUMEL = 2**31 - 1
PASSES = 4  # 11 bits each: the bracket's, and 31 bits if it missed
WARPS = {scape_select.scan_kernel: 8}  # of a program
SLICES = 128  # programs of a tensor that share its list


@dataclass
class Choice:
    """The k largest |x| of one tensor, to be written to `out` (uint8, 4-byte aligned) in a form of FORMS."""

    x: torch.Tensor
    k: int
    form: str
    out: torch.Tensor

    def ranks(self) -> tuple[int, int]:
        """Ranks in a sample that the k-th value lies between, six standard deviations away; 0: past its end."""
        if self.x.numel() <= SAMPLES:
            return self.k, self.k
        share = self.k / self.x.numel()
        expected, margin = SAMPLES * share, 6 * math.sqrt(SAMPLES * share * (1 - share)) + 6
        high, low = math.floor(expected - margin), math.ceil(expected + margin)
        return max(high, 0), low if low <= SAMPLES else 0

    def room(self) -> int:
        """Entries to list: what the lower rank lets expect and a quarter more."""
        numel, low = self.x.numel(), self.ranks()[1]
        if numel <= SAMPLES or not low:
            return numel
        return min(numel, 4096 + 5 * numel * low // (4 * SAMPLES))


def select(choices: list[Choice]) -> None:
    """Write every mask; exactly k entries each, equal values by lowest index."""
    batch, room = [], 0
    for choice in choices:
        if batch and room + choice.room() > LIST_ROOM:
            _select(batch)
            batch, room = [], 0
        batch.append(choice)
        room += choice.room()
    if batch:
        _select(batch)


def _select(choices: list[Choice]) -> None:
    device, count = choices[0].x.device, len(choices)
    tiles = tiles_of(tuple(c.x.numel() for c in choices), scape_select.TILE.value, device)
    rows, room = [], 0
    for choice, first in zip(choices, tiles.first, strict=True):
        high, low = choice.ranks()
        columns = {"NUMEL": choice.x.numel(), "FIRST_TILE": first, "DATA": choice.x, "K": choice.k, "LIST": room}
        columns |= {"ROOM": choice.room(), "RANK_HIGH": high, "RANK_LOW": low}
        rows.append(table_row(scape_select, columns | {"FORM": FORMS[choice.form], "OUT": choice.out}))
        room += choice.room()
    table = to_device(rows, torch.int64, device)
    state = torch.empty(count, scape_select.STATES.value, dtype=torch.int32, device=device)
    listed, place = (
        torch.empty(room, dtype=torch.int32, device=device),
        torch.empty(room, dtype=torch.int16, device=device),
    )
    tile_list, counts = torch.empty(2 * 2, tiles.count, dtype=torch.int32, device=device).split(2)
    histogram = torch.zeros(count, BINS, dtype=torch.int32, device=device)
    align, each, every = {"ALIGN": alignment([c.x for c in choices])}, (count, 1), (tiles.count, 1)
    _launch(scape_select.bracket_kernel, each, [table, state], [], {}, 16)
    tensors, warps = [table, tiles.tensor, state, listed, place, tile_list], WARPS[scape_select.scan_kernel]
    _launch(scape_select.scan_kernel, every, tensors, [], align | {"ASSEMBLY": device.type == "cuda"}, warps)
    for i in range(PASSES):
        first = {"FIRST": i == 0}
        tensors = [table, state, listed, histogram]
        _launch(scape_select.histogram_kernel, (SLICES, count), tensors, [], first | {"LANES": 1024}, 4)
        _launch(scape_select.narrow_kernel, each, [table, state, histogram], [], first, 8)
    listing = [table, tiles.tensor, state, listed]
    lanes = {"LANES": 256}
    _launch(scape_select.count_kernel, every, [*listing, tile_list, counts], [tiles.count], lanes, 2)
    sums = counts.cumsum(1, dtype=torch.int64).sub_(counts)
    forms = {choice.form for choice in choices}
    if forms & {"int32", "block256"}:
        tensors = [*listing, place, tile_list, sums]
        _launch(scape_select.emit_list_kernel, every, tensors, [tiles.count], lanes, 2)
    if forms & {"bitmask", "bool"}:
        _launch(scape_select.emit_dense_kernel, every, [*listing[:3], sums], [tiles.count], align, 8)
