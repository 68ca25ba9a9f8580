"""The table of routes: what is chosen from times, at every size, and what survives as JSON."""

import itertools
import json
import random

import pytest

from hf_taco_scape.collectives.routes import (
    DIRECTIONS,
    NEVER,
    OPERATIONS,
    Route,
    RouteTable,
    candidates,
    choose,
    fixed_table,
    size,
)

DENSE, FUSED = Route("none"), Route("none", "symm_mem")
PACKED, OTHER = Route("fp8", "c10d", 1), Route("fp8", "symm_mem")


@pytest.mark.parametrize("ranks,shots", [(2, [1]), (3, [1, 2]), (8, [1, 2])])
def test_candidates(ranks, shots):
    assert candidates("all_reduce", "fp8", ("c10d",), ranks) == [DENSE, *(Route("fp8", "c10d", s) for s in shots)]
    assert candidates("all_gather", "fp8", ("c10d", "symm_mem"), ranks) == [DENSE, FUSED, Route("fp8"), OTHER]
    assert candidates("all_reduce", "none", ("symm_mem",), ranks) == [FUSED]


def _held(rules, nbytes):
    return RouteTable({("all_reduce", "forward"): rules}).route("all_reduce", "forward", nbytes)


def test_one_route_that_is_always_best():
    rules, coarse = choose([4, 16], {DENSE: [9e-3, 9e-3], FUSED: [1e-3, 1e-3], PACKED: [9e-3, 9e-3]})
    assert rules == [(0, FUSED)] and coarse == []


def test_compressed_only_where_it_wins_at_both_ends():
    times = {DENSE: [1e-3, 2e-3, 4e-3, 8e-3], PACKED: [2e-3, 3e-3, 2e-3, 3e-3]}
    rules, coarse = choose([10, 20, 40, 80], times)
    assert rules == [(0, DENSE), (40, PACKED)]
    assert coarse == [1], "somewhere between 20 and 40 they cross"


@pytest.mark.parametrize("seconds,wins", [(0.94e-3, True), (0.96e-3, False), (1e-3, False)])
def test_a_gain_has_to_be_clear(seconds, wins):
    assert choose([10], {DENSE: [1e-3], PACKED: [seconds]})[0] == [(0, DENSE)] + [(10, PACKED)] * wins
    # of small messages in microseconds too: 10 % of 5 us may be noise
    assert choose([10], {DENSE: [5e-6], PACKED: [4.5e-6]})[0] == [(0, DENSE)]


def test_never_slower_than_dense_by_more_than_what_is_left_to_refine():
    """Random times: at each measured size, and so between any two of which none is to be refined."""
    draw = random.Random(0)
    for _ in range(300):
        sizes = sorted(draw.sample(range(1, 1000), draw.randint(1, 6)))
        times = {
            route: [draw.uniform(1e-5, 1e-3) if route.dense or draw.random() < 0.8 else float("inf") for _ in sizes]
            for route in (DENSE, FUSED, PACKED, OTHER)
        }
        rules, coarse = choose(sizes, times)
        dense = [min(times[DENSE][i], times[FUSED][i]) for i in range(len(sizes))]
        for i, (start, end) in enumerate(itertools.pairwise([*sizes, 10**6])):
            if i in coarse:
                continue
            route = _held(rules, start)
            assert route == _held(rules, end - 1)
            for place in {i, min(i + 1, len(sizes) - 1)}:
                assert times[route][place] <= 1.02 * dense[place]
                assert route.dense or times[route][place] <= 0.95 * dense[place]
        assert _held(rules, 0).dense


@pytest.mark.parametrize("ranks", [2, 4])
def test_fixed_table(ranks):
    table = fixed_table(("fp8", "none"), 4096, "c10d", ranks)
    for operation in OPERATIONS:
        shots = 0 if operation != "all_reduce" else 1 if ranks == 2 else 2
        assert table.route(operation, "forward", 4095) == DENSE
        assert table.route(operation, "forward", 4096) == Route("fp8", "c10d", shots)
        assert table.route(operation, "backward", 2**40) == DENSE
    assert fixed_table(("fp8", "fp8"), 0, "symm_mem", ranks).route("all_gather", "backward", 0) == OTHER
    assert fixed_table(("fp8", "fp8"), NEVER, "c10d", ranks).route("all_reduce", "forward", 2**50).dense


def test_halves_follow_the_all_reduce_where_they_were_not_measured():
    table = RouteTable({("all_reduce", "forward"): [(0, DENSE), (100, PACKED)]})
    assert table.route("reduce_scatter", "forward", 99) == DENSE
    assert table.route("all_gather", "forward", 100) == Route("fp8", "c10d", 0)


def test_json_keeps_the_table_and_refuses_what_is_none():
    table = fixed_table(("hadamard-int6", "none"), 12345, "c10d", 4)
    assert RouteTable.from_json(json.loads(json.dumps(table.to_json()))) == table
    for wrong in (
        {"all_reduce/sideways": [[0, "none", "c10d", 0]]},
        {"all_to_all/forward": [[0, "none", "c10d", 0]]},
        {"all_reduce/forward": []},
        {"all_reduce/forward": [[5, "none", "c10d", 0]]},
    ):
        with pytest.raises(ValueError, match="not a table of routes"):
            RouteTable.from_json(wrong)


def test_the_log_says_what_goes_which_way():
    rules = [(0, DENSE), (2**16, FUSED), (3 * 2**19, PACKED)]
    table = RouteTable({("all_reduce", way): rules for way in DIRECTIONS})
    assert table.describe() == (
        "  all_reduce forward and backward: below 64 KiB: dense, c10d; below 1.5 MiB: dense, symm_mem; "
        "above: fp8, one shot, c10d"
    )
    assert fixed_table(("fp8", "none"), 0, "symm_mem", 2).describe().splitlines()[:2] == [
        "  all_reduce forward: any size: fp8, symm_mem",
        "  reduce_scatter forward: any size: fp8, symm_mem",
    ]
    assert [size(n) for n in (5, 1024, 3 * 2**19, 2**40)] == ["5 B", "1 KiB", "1.5 MiB", "1024 GiB"]
