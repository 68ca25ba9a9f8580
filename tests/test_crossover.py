"""Measuring: which sizes are looked at, and what a slow link or a lost crossing does to that."""

import pytest
import torch

from hf_taco_scape.collectives import crossover
from hf_taco_scape.collectives.routes import Route

CPU = torch.device("cpu")


def _measure(monkeypatch, clock, codecs=("fp8", "fp8"), ranks=4):
    """In one process: no group to agree with. Returns the table, the times, and the calls of each (route, bytes)."""
    calls = {}

    def seconds_a_call(run, operation, route, x, count):
        calls[route, x.nbytes] = calls.get((route, x.nbytes), 0) + count
        return clock(route, x.nbytes)

    monkeypatch.setattr(crossover, "seconds_a_call", seconds_a_call)
    table, measured = crossover.measure(None, ["all_reduce"], codecs, ("c10d",), ranks, [], CPU)
    return table, measured["all_reduce"], calls


def test_a_crossing_is_narrowed_down(monkeypatch):
    """10 us + 1 ns a byte against 300 us + 0.2 ns: equal at 362,500 bytes, clearly better (5 %) at 388,000."""
    monkeypatch.setattr(crossover, "SIZES", crossover.SIZES[:6])

    def clock(route, nbytes):
        return 10e-6 + nbytes * 1e-9 if route.dense else 300e-6 + nbytes * (0.2e-9 if route.shots == 2 else 1e-9)

    table, measured, _ = _measure(monkeypatch, clock)
    (_, dense), (start, packed) = table.rules["all_reduce", "forward"]
    assert dense.dense and packed == Route("fp8", "c10d", 2)
    assert 388_000 <= start < 388_000 * 1.1
    assert len(measured.sizes) > 6 and measured.sizes == sorted(set(measured.sizes))


def test_one_shot_is_not_tried_where_everybody_gets_everything(monkeypatch):
    monkeypatch.setattr(crossover, "SIZES", crossover.SIZES[:6])
    _, measured, calls = _measure(monkeypatch, lambda route, nbytes: nbytes * 1e-9)
    one_shot = {nbytes for route, nbytes in calls if route.shots == 1}
    assert max(one_shot) == crossover.LARGEST_ONE_SHOT and min(one_shot) == crossover.SMALLEST_COMPRESSED
    assert max(nbytes for route, nbytes in calls if route.shots == 2) == max(crossover.SIZES)


@pytest.mark.parametrize(
    "seconds_a_byte,latency,all_sizes", [(1e-7, 0, False), (1e-9, 1e-3, True), (1e-5, 0.1, False)]
)
def test_a_slow_link_is_measured_in_seconds(monkeypatch, seconds_a_byte, latency, all_sizes):
    """The time that would pass, without the calls that warm up, stays near the budget; small sizes come first."""

    def clock(route, nbytes):
        return latency + nbytes * seconds_a_byte

    table, measured, calls = _measure(monkeypatch, clock)
    spent = sum(count * clock(*key) for key, count in calls.items())
    probing = (crossover._REPEATS + 1) * clock(None, crossover.SIZES[0])
    assert spent < 1.5 * crossover._BUDGET_S + probing
    assert measured.sizes[0] == crossover.SIZES[0]
    assert (max(measured.sizes) == max(crossover.SIZES)) == all_sizes
    assert table.route("all_reduce", "forward", 2**30).dense


def test_two_codecs_have_rules_of_their_own(monkeypatch):
    monkeypatch.setattr(crossover, "SIZES", crossover.SIZES[:6])
    rates = {"none": 1e-9, "hadamard-int6": 2e-9, "hadamard-int4": 0.5e-9}
    codecs = ("hadamard-int6", "hadamard-int4")
    table, measured, _ = _measure(monkeypatch, lambda route, n: n * rates[route.codec] + 5e-5, codecs, ranks=2)
    assert table.route("all_reduce", "forward", 2**22).dense
    assert table.route("all_reduce", "backward", 2**22) == Route("hadamard-int4", "c10d", 1)
    assert {route.codec for route in measured.seconds} == set(rates)


def test_without_a_codec_there_is_nothing_but_dense(monkeypatch):
    monkeypatch.setattr(crossover, "SIZES", crossover.SIZES[:3])
    table, _, _ = _measure(monkeypatch, lambda route, n: n * 1e-9, ("none", "none"))
    assert {tuple(rules) for rules in table.rules.values()} == {((0, Route("none")),)}
