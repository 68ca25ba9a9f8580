"""Launchers of SCAPE's step: lists of flat tensors in, one launch for all. Nothing here waits for the device."""

import functools
import math
from dataclasses import dataclass, field

import torch
import triton.language as tl

from . import scape_mask, scape_step, scape_tile
from .launch import _launch

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
MASK_KINDS = {
    name: getattr(scape_mask, name.upper()).value for name in ("full", "range", "bitmask", "block256", "list")
}
# warps of a program, 4 of all others: recipes/bench_scape_kernels.py --sweep times them
WARPS = {scape_step.update_kernel: 8}


@dataclass(frozen=True)
class Tiles:
    """How tensors of these lengths are cut: each tensor's first tile, their number, and whose each tile is."""

    first: tuple[int, ...]
    count: int
    tensor: torch.Tensor  # int32 [count]


@functools.lru_cache(maxsize=64)
def tiles_of(numels: tuple[int, ...], tile: int, device: torch.device) -> Tiles:
    """Tiles of `tile` entries; cached, because a model's lengths are the same every step."""
    counts = [-(-n // tile) for n in numels]
    first = [sum_ - count for sum_, count in zip(_sums(counts), counts, strict=True)]
    index = torch.arange(len(counts), dtype=torch.int32)
    return Tiles(tuple(first), sum(counts), index.repeat_interleave(torch.tensor(counts)).to(device))


def _sums(counts: list[int]) -> list[int]:
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return sums[1:]


def to_device(rows: list[list], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The rows as a tensor there; through pinned memory, so that the host does not wait for the device."""
    table = torch.tensor(rows, dtype=dtype)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def alignment(tensors: list[torch.Tensor]) -> int:
    """16, or less if an address is not a multiple of 16 bytes."""
    return math.gcd(16, *(t.data_ptr() for t in tensors))


@dataclass
class Mask:
    """Bits of all tensors' masks, and the set bits before each tile and, in the tile, each word (scape_tile.py)."""

    bits: torch.Tensor  # int32 [tiles * WORDS]
    tile_start: torch.Tensor  # int64 [tiles]
    word_before: torch.Tensor  # int16 [tiles * WORDS]

    @property
    def all(self) -> list[torch.Tensor]:
        return [self.bits, self.tile_start, self.word_before]


@dataclass
class Entry:
    """One tensor of a step; all arrays flat and contiguous on one device, state fp32.

    mask: (kind of MASK_KINDS, its payload or indices or the first entry of a range, entries on it).
    rows: (second moments, stride, count): entry i belongs to row i // stride % count.
    """

    param: torch.Tensor
    momentum: torch.Tensor
    residual: torch.Tensor
    grad: torch.Tensor | None
    mask: tuple[str, torch.Tensor | int, int]
    keep: bool = False
    rows: tuple[torch.Tensor, int, int] | None = None


@dataclass
class ScapeLaunch:
    """The launches of one step over `entries`, in their order: bits, form, keep_unsent, norms, update."""

    entries: list[Entry]
    previous: Mask | None = None  # of the step before, if the momenta are known to be zero off it
    mask: Mask = field(init=False)

    def __post_init__(self) -> None:
        self.device = self.entries[0].momentum.device
        self.numels = tuple(e.momentum.numel() for e in self.entries)
        self.tiles = tiles_of(self.numels, scape_tile.TILE.value, self.device)
        alike = [(e.param.dtype, (e.param if e.grad is None else e.grad).dtype) for e in self.entries]
        self.groups = sorted(set(alike), key=str)
        rows = [
            self._row(e, first, self.groups.index(g))
            for e, first, g in zip(self.entries, self.tiles.first, alike, strict=True)
        ]
        self.table = to_device(rows, torch.int64, self.device)
        arrays = [t for e in self.entries for t in (e.param, e.momentum, e.residual, e.grad) if t is not None]
        self.align = alignment(arrays)
        self._everywhere = (self.tiles.count, 1)
        self._fill()

    def _row(self, entry: Entry, first: int, group: int) -> list[int]:
        kind, data, k = entry.mask
        rows, stride, count = entry.rows or (None, 1, 1)
        columns = {
            "NUMEL": entry.momentum.numel(),
            "FIRST_TILE": first,
            "PARAM": entry.param,
            "MOMENTUM": entry.momentum,
            "RESIDUAL": entry.residual,
            "GRAD": entry.grad,
            "KEEP": entry.keep,
            "MASK_KIND": MASK_KINDS[kind],
            "MASK_DATA": data,
            "MASK_K": k,
            "ROWS": rows,
            "ROW_STRIDE": stride,
            "ROW_COUNT": count,
            "GROUP": group,
        }
        return table_row(scape_tile, columns)

    def _start(self, kernel, tensors: list, numbers: list = (), **constants) -> None:
        tensors, warps = [self.table, self.tiles.tensor, *tensors], WARPS.get(kernel, 4)
        _launch(kernel, self._everywhere, tensors, list(numbers), constants, warps)

    def _fill(self) -> None:
        words = self.tiles.count * scape_tile.WORDS.value
        bits = torch.empty(words, dtype=torch.int32, device=self.device)
        word_before = torch.empty(words, dtype=torch.int16, device=self.device)
        counts = torch.empty(self.tiles.count, dtype=torch.int32, device=self.device)
        self._fill_tiles(scape_mask.fill_kernel, [bits, counts], TILES=8)
        for entry, first in zip(self.entries, self.tiles.first, strict=True):
            kind, data, k = entry.mask
            if kind == "list":
                grid, constants = (-(-k // 1024), 1), {"LANES": 1024}
                _launch(scape_mask.scatter_list_kernel, grid, [data, bits], [first, k], constants, 4)
        kinds = {entry.mask[0] for entry in self.entries}
        if "list" in kinds:
            self._fill_tiles(scape_mask.rank_kernel, [bits, counts, word_before], TILES=8)
        tile_start = counts.cumsum(0, dtype=torch.int64).sub_(counts)
        if "block256" in kinds:
            self._fill_tiles(scape_mask.scatter_blocks_kernel, [bits, tile_start], TILES=4, LANES=64)
        self._fill_tiles(scape_mask.rank_kernel, [bits, counts, word_before], TILES=8)
        self.mask = Mask(bits, tile_start, word_before)

    def _fill_tiles(self, kernel, tensors: list, **constants) -> None:
        grid, tensors = (-(-self.tiles.count // constants["TILES"]), 1), [self.table, self.tiles.tensor, *tensors]
        _launch(kernel, grid, tensors, [self.tiles.count], constants, 2)

    def _previous(self) -> Mask:
        return self.previous or self.mask

    def form(self, numbers: torch.Tensor, values: torch.Tensor, scale: torch.Tensor | None) -> None:
        """residual <- c, values <- c on the mask; residual <- what was not sent, unless `keep`."""
        tensors = [numbers, *self.mask.all, self._previous().bits, values]
        for group, (_, grad_dtype) in enumerate(self.groups):
            self._start(
                scape_step.form_kernel,
                [*tensors, numbers if scale is None else scale],
                [group],
                GRAD_TYPE=TYPES[grad_dtype],
                ALIGN=self.align,
                SCALED=scale is not None,
                PREVIOUS=self.previous is not None,
                ASSEMBLY=self.device.type == "cuda",
            )

    def keep_unsent(self, values: torch.Tensor) -> None:
        """residual of `keep` tensors <- what was not sent; of `values` only the dtype counts."""
        tensors = [self.table, self.tiles.tensor, self.mask.bits, values]
        ends = (*self.tiles.first[1:], self.tiles.count)
        kept = [(first, end) for e, first, end in zip(self.entries, self.tiles.first, ends, strict=True) if e.keep]
        while kept:
            first, end = kept.pop(0)
            while kept and kept[0][0] == end:  # neighbours in one launch
                end = kept.pop(0)[1]
            _launch(scape_step.keep_unsent_kernel, (end - first, 1), tensors, [first], {}, 4)

    def owe(self, error: torch.Tensor, first: int, world: int) -> None:
        """residual += world * error for the places from `first` on among all values."""
        tensors = [*self.mask.all, error]
        self._start(scape_step.owe_kernel, tensors, [first, first + error.numel(), float(world)])

    def norms(self, numbers: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """fp32 [entries]: the norm of each tensor's ghat."""
        squares = torch.empty(self.tiles.count, dtype=torch.float32, device=self.device)
        norms = torch.empty(len(self.entries), dtype=torch.float32, device=self.device)
        self._start(scape_step.square_kernel, [numbers, *self.mask.all, values, squares])
        _launch(scape_step.norm_kernel, (len(norms), 1), [self.table, squares, norms], [], {"LANES": 1024}, 4)
        return norms

    def update(
        self,
        numbers: torch.Tensor,
        values: torch.Tensor,
        clip: torch.Tensor | None,
        columns: list[torch.Tensor] | None = None,
    ) -> None:
        """Parameters and momenta from mt in `values`; with `rows` in the entries, by row.

        columns: fp32, what each column's second moment is its row's times of, if factored.
        """
        addresses = numbers
        if columns is not None:
            addresses = to_device([[c.data_ptr()] for c in columns], torch.int64, self.device)
        tensors = [numbers, *self.mask.all, self._previous().bits, values]
        for group, (dtype, _) in enumerate(self.groups):
            self._start(
                scape_step.update_kernel,
                [*tensors, numbers if clip is None else clip, addresses],
                [group],
                TYPE=TYPES[dtype],
                ALIGN=self.align,
                CLIPPED=clip is not None,
                BY_ROW=self.entries[0].rows is not None,
                FACTORED=columns is not None,
                PREVIOUS=self.previous is not None,
            )


def table_row(module, columns: dict) -> list[int]:
    """A row of a table: numbers, flags and the addresses of tensors, each in the column of its name in `module`."""
    row = [0] * module.FIELDS.value
    for name, value in columns.items():
        address = isinstance(value, torch.Tensor)
        row[getattr(module, name).value] = value.data_ptr() if address else int(value or 0)
    return row


def numbers_of(groups: list[dict], ahead: int, device: torch.device) -> torch.Tensor:
    """fp32 [tensors, NUMBERS] from each tensor's lr, betas, eps, weight_decay and step, which `ahead` is added to."""
    known: dict[int, list[float]] = {}
    for group in groups:
        if id(group) not in known:
            known[id(group)] = _numbers(group, ahead)
    return to_device([known[id(group)] for group in groups], torch.float32, device)


def _numbers(group: dict, ahead: int) -> list[float]:
    (b1, b2), lr, step = group["betas"], float(group["lr"]), group["step"] + ahead
    bias2, step_size = (1 - b2**step) ** 0.5, lr / (1 - b1**step)
    row = [b1, 1 - b1, b2, 1 - b2, bias2, group["eps"], step_size, 1 - lr * group["weight_decay"]]
    # torch divides by a number on CUDA by multiplying with its reciprocal, in fp32
    return [*row, *(float(torch.tensor(x, dtype=torch.float32).reciprocal()) for x in (1 - b1, bias2))]


def adams(params: list, grads: list, momenta: list, numbers: torch.Tensor) -> None:
    """A dense AdamS step in place: contiguous tensors, one dtype of parameters and one of gradients, fp32 momenta."""
    device = params[0].device
    tiles = tiles_of(tuple(p.numel() for p in params), scape_tile.TILE.value, device)
    columns = ("NUMEL", "FIRST_TILE", "PARAM", "MOMENTUM", "GRAD")
    rows = [
        table_row(scape_tile, dict(zip(columns, (p.numel(), first, p, m, g), strict=True)))
        for p, first, m, g in zip(params, tiles.first, momenta, grads, strict=True)
    ]
    constants = {"TYPE": TYPES[params[0].dtype], "GRAD_TYPE": TYPES[grads[0].dtype]}
    constants["ALIGN"] = alignment([*params, *momenta, *grads])
    tensors = [to_device(rows, torch.int64, device), tiles.tensor, numbers]
    _launch(scape_step.adams_kernel, (tiles.count, 1), tensors, [], constants, 4)
