"""Times every route of a group's collectives at start, in seconds, and makes the table of what is fastest when.

All ranks see the same times (each the largest over the ranks), so all make the same table and measure the same sizes.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .routes import DIRECTIONS, Route, RouteTable, candidates, choose

SIZES = tuple(4**e for e in range(6, 14))  # 4 KiB to 64 MiB
SMALLEST_COMPRESSED = 2**16  # messages of single tokens stay dense: there is latency to lose and no time to win
LARGEST_ONE_SHOT = 2**20  # more than two ranks: every byte travels to everybody
_REPEATS = 7
_MOST_CALLS, _ROUND_S = 20, 0.01  # calls in a row: as many as take this long together
_REFINEMENTS = 4
_BUDGET_S = 2.0  # for one operation: sizes that would take longer are left out


@dataclass
class Measured:
    """Agreed times of one operation: seconds[route][i] at sizes[i] bytes, inf where a route is not for that size."""

    sizes: list[int]
    seconds: dict[Route, list[float]]


def measure(
    run: Callable[[str, Route, torch.Tensor], torch.Tensor],
    operations: Sequence[str],
    codecs: tuple[str, str],
    backends: tuple[str, ...],
    ranks: int,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
) -> tuple[RouteTable, dict[str, Measured]]:
    """Measure on all ranks of `groups` at once (as they will communicate) and return the table and the times.

    run(operation, route, message): makes the collective over this rank's tensor-parallel group of `ranks`; message is
    the whole one, 1-dimensional (an all-gather takes its piece of it). codecs: forward, backward. Messages are bf16
    on accelerators and fp32 on the CPU. Collective over `groups`: the tensor-parallel group, and others whose members
    have to choose alike.
    """
    rules, measured = {}, {}
    for operation in operations:
        routes = dict.fromkeys(r for codec in codecs for r in candidates(operation, codec, backends, ranks))
        times = _Times(run, operation, list(routes), ranks, groups, device)
        for nbytes in SIZES:
            times.add_if_affordable(nbytes)
        for _ in range(_REFINEMENTS):
            coarse = {i for codec in codecs for i in times.choose(candidates(operation, codec, backends, ranks))[1]}
            for nbytes in filter(None, [times.between(i) for i in sorted(coarse)]):
                times.add_if_affordable(nbytes)
        for direction, codec in zip(DIRECTIONS, codecs, strict=True):
            rules[operation, direction] = times.choose(candidates(operation, codec, backends, ranks))[0]
        measured[operation] = Measured(times.sizes, times.table())
    return RouteTable(rules), measured


class _Times:
    """The times of one operation by size; every method gives the same on all ranks."""

    def __init__(self, run, operation, routes: list[Route], ranks: int, groups, device: torch.device) -> None:
        self._run, self._operation, self._routes, self._ranks = run, operation, routes, ranks
        self._groups, self._device = groups, device
        self._by_size: dict[int, list[float]] = {}
        self._spent = 0.0

    @property
    def sizes(self) -> list[int]:
        return sorted(self._by_size)

    def table(self) -> dict[Route, list[float]]:
        rows = [self._by_size[nbytes] for nbytes in self.sizes]
        return {route: [row[i] for row in rows] for i, route in enumerate(self._routes)}

    def choose(self, routes: list[Route]):
        return choose(self.sizes, {route: times for route, times in self.table().items() if route in routes})

    def add_if_affordable(self, nbytes: int) -> None:
        """Measure a size, unless the time is used up or would be, as far as smaller sizes tell."""
        if nbytes in self._by_size:
            return
        if not self._by_size:
            self._add(nbytes, 1)  # to know how long a call takes; measured again below
        smaller = [known for known in self.sizes if known <= nbytes]
        expected, slope = self._a_round(smaller[-1]), 0.0
        if len(smaller) > 1:
            slope = (expected - self._a_round(smaller[-2])) / (smaller[-1] - smaller[-2])
        expected += max(slope, 0.0) * (nbytes - smaller[-1])
        calls = max(1, min(_MOST_CALLS, int(_ROUND_S / expected)))
        if self._spent + expected * calls * (_REPEATS + 1) <= _BUDGET_S:
            self._add(nbytes, calls)
            self._spent += self._a_round(nbytes) * calls * (_REPEATS + 1)

    def _a_round(self, nbytes: int) -> float:
        """Seconds of one call of every route."""
        return sum(t for t in self._by_size[nbytes] if t < float("inf"))

    def between(self, i: int) -> int | None:
        """A size in the middle of sizes[i] and sizes[i + 1], None where they are close; whole KiB."""
        low, high = self.sizes[i : i + 2]
        middle = round((low * high) ** 0.5 / 1024) * 1024
        return middle if low * 1.05 < middle < high / 1.05 else None

    def _add(self, nbytes: int, calls: int) -> None:
        dtype = torch.float32 if self._device.type == "cpu" else torch.bfloat16
        step = 128 * self._ranks  # so that it splits evenly
        numel = max(nbytes // dtype.itemsize // step, 1) * step
        # a generator of its own: a run draws the same numbers whether its table was measured or kept
        generator = torch.Generator(self._device).manual_seed(0)
        x = torch.randn(numel, device=self._device, generator=generator).to(dtype)
        samples: dict[Route, list[float]] = {route: [] for route in self._routes if _suits(route, nbytes, self._ranks)}
        for repeat in range(_REPEATS + 1):
            # in turn, so that a slow moment of the machine meets all of them
            for route, times in samples.items():
                seconds = seconds_a_call(self._run, self._operation, route, x, calls)
                if repeat:  # the first one compiles kernels and connects ranks
                    times.append(seconds)
        medians = [statistics.median(samples[r]) if r in samples else float("inf") for r in self._routes]
        agreed = torch.tensor(medians, dtype=torch.float64, device=self._device)
        for group in self._groups:
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
        self._by_size[nbytes] = agreed.tolist()


def _suits(route: Route, nbytes: int, ranks: int) -> bool:
    if route.dense:
        return True
    return nbytes >= SMALLEST_COMPRESSED and not (route.shots == 1 and ranks > 2 and nbytes > LARGEST_ONE_SHOT)


def seconds_a_call(run, operation: str, route: Route, x: torch.Tensor, calls: int) -> float:
    """Of `calls` calls in a row: on an accelerator what takes longer, launching them or running them."""
    start = time.perf_counter()
    for _ in range(calls):
        run(operation, route, x)
    if x.device.type != "cpu":
        torch.accelerator.synchronize()
    return (time.perf_counter() - start) / calls
