"""Which way a message of a given size goes, as data: made from measured times or from one threshold; no tensors."""

import bisect
from dataclasses import dataclass

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
DIRECTIONS = ("forward", "backward")
NEVER = 2**62  # a threshold that no message reaches: everything travels uncompressed

# a compressed route has to be faster by both, so that the noise of a measurement does not choose a slower one
_GAIN, _GAIN_S = 0.05, 1e-6


@dataclass(frozen=True, order=True)
class Route:
    """One way to make a collective.

    codec: its name, `none` for uncompressed. backend: c10d or symm_mem. shots: 1 or 2 for an all-reduce that c10d
    makes of compressed messages, 0 where there is nothing to choose.
    """

    codec: str
    backend: str = "c10d"
    shots: int = 0

    @property
    def dense(self) -> bool:
        return self.codec == "none"

    def __str__(self) -> str:
        shots = {0: "", 1: ", one shot", 2: ", two shots"}[self.shots]
        return f"{'dense' if self.dense else self.codec}{shots}, {self.backend}"


def candidates(operation: str, codec: str, backends: tuple[str, ...], ranks: int) -> list[Route]:
    """Every route of `operation` for messages of `codec`; the dense ones first."""
    routes = [Route("none", backend) for backend in backends]
    if codec == "none":
        return routes
    for backend in backends:
        if backend == "c10d" and operation == "all_reduce":
            # two ranks: one shot sends the same bytes and quantises once
            routes += [Route(codec, backend, shots) for shots in ((1,) if ranks == 2 else (1, 2))]
        else:
            routes.append(Route(codec, backend))
    return routes


@dataclass(frozen=True)
class RouteTable:
    """Rules by operation and direction: each a list of (size from which it holds, route), the first from 0 bytes.

    Sizes are bytes of the whole message: the tensor of an all-reduce or reduce-scatter, the result of an all-gather.
    """

    rules: dict[tuple[str, str], list[tuple[int, Route]]]

    def route(self, operation: str, direction: str, nbytes: int) -> Route:
        """Halves of an all-reduce follow its rules where they have none of their own."""
        rules = self.rules.get((operation, direction))
        if rules is None:
            route = self.route("all_reduce", direction, nbytes)
            return Route(route.codec, route.backend)
        return rules[bisect.bisect_right(rules, nbytes, key=lambda rule: rule[0]) - 1][1]

    def backends(self) -> set[str]:
        return {route.backend for rules in self.rules.values() for _, route in rules}

    def to_json(self) -> dict:
        return {
            f"{operation}/{direction}": [[start, route.codec, route.backend, route.shots] for start, route in rules]
            for (operation, direction), rules in self.rules.items()
        }

    @classmethod
    def from_json(cls, data: dict) -> "RouteTable":
        """ValueError where `data` is not what `to_json` makes."""
        rules = {}
        for key, steps in data.items():
            operation, _, direction = key.partition("/")
            if operation not in OPERATIONS or direction not in DIRECTIONS or not steps or steps[0][0] != 0:
                raise ValueError(f"not a table of routes: {key!r}: {steps!r}")
            rules[operation, direction] = [(int(start), Route(*route)) for start, *route in steps]
        return cls(rules)

    def describe(self) -> str:
        """One line an operation and direction; directions with equal rules share theirs."""
        lines = {}
        for (operation, direction), rules in self.rules.items():
            ends = [f"below {size(start)}" for start, _ in rules[1:]] + ["above" if len(rules) > 1 else "any size"]
            text = "; ".join(f"{end}: {route}" for end, (_, route) in zip(ends, rules, strict=True))
            lines.setdefault((operation, text), []).append(direction)
        return "\n".join(f"  {name} {' and '.join(ways)}: {text}" for (name, text), ways in lines.items())


def fixed_table(codecs: tuple[str, str], min_bytes: int, backend: str, ranks: int) -> RouteTable:
    """Everything by `backend`, messages of `min_bytes` or more through their direction's codec."""
    rules = {}
    for direction, codec in zip(DIRECTIONS, codecs, strict=True):
        for operation in OPERATIONS:
            dense, *_, packed = [Route("none", backend), *candidates(operation, codec, (backend,), ranks)]
            rules[operation, direction] = _merged([(0, dense), (min_bytes, packed)])
    return RouteTable(rules)


def choose(sizes: list[int], seconds: dict[Route, list[float]]) -> tuple[list[tuple[int, Route]], list[int]]:
    """Rules out of measured times, and the sizes between which they leave time lying about.

    sizes: ascending, at least one. seconds: for each route its time at each size, inf where it was not measured.
    Between two sizes one route holds: the one that is nearest to the best at both, and compressed only if it beats
    every dense route clearly at both. Below the first size the best dense route holds, above the last what is best
    there. Second result: indices i where some other route is over 2 % faster at sizes[i] or sizes[i + 1] than the
    one that holds from sizes[i] on: measure between them.
    """
    dense = {route: times for route, times in seconds.items() if route.dense}
    # per size: the best dense time, and what a compressed route has to reach there
    best_dense = [min(times[i] for times in dense.values()) for i in range(len(sizes))]
    reach = [min(t * (1 - _GAIN), t - _GAIN_S) for t in best_dense]
    usable = {
        route: [t if route.dense or t <= reach[i] else float("inf") for i, t in enumerate(times)]
        for route, times in seconds.items()
    }
    best = [min(times[i] for times in usable.values()) for i in range(len(sizes))]

    def loss(route: Route, places: list[int]) -> float:
        return max(usable[route][i] / best[i] for i in places)

    first = min(dense, key=lambda route: dense[route][0])
    rules, coarse = [(0, first)], []
    for i, start in enumerate(sizes):
        places = [i, i + 1] if i + 1 < len(sizes) else [i]
        route = min(usable, key=lambda route, places=places: loss(route, places))
        rules.append((start, route))
        if len(places) == 2 and loss(route, places) > 1.02:
            coarse.append(i)
    return _merged(rules), coarse


def _merged(rules: list[tuple[int, Route]]) -> list[tuple[int, Route]]:
    """Without rules that repeat the one before, or hold for no size."""
    last = dict(rules)  # of rules from the same size the later one holds
    out: list[tuple[int, Route]] = []
    for start, route in sorted(last.items(), key=lambda rule: rule[0]):
        if not out or out[-1][1] != route:
            out.append((start, route))
    return out


def size(nbytes: int) -> str:
    """1536 -> 1.5 KiB."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.4g} {units[0]}"
