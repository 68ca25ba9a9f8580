"""The density schedule, step by step against its formula."""

import math

import pytest

from hf_taco_scape.sync import DensitySchedule


def test_falls_geometrically_after_the_hold():
    d = DensitySchedule(0.01, warmup_steps=4, hold_steps=2)
    assert [d(t) for t in (1, 2, 3)] == [1.0, 1.0, 1.0]
    assert [d(t) for t in (4, 5, 6)] == pytest.approx([0.01**0.25, 0.1, 0.01**0.75], rel=1e-15)
    assert [d(t) for t in (7, 8, 10_000)] == [0.01] * 3
    ratios = [d(t + 1) / d(t) for t in range(3, 7)]
    assert ratios == pytest.approx([ratios[0]] * 4, rel=1e-12)


def test_without_warmup_it_drops_at_once():
    assert [DensitySchedule(0.1)(t) for t in (1, 2, 3)] == [1.0, 0.1, 0.1]
    assert [DensitySchedule(0.1, hold_steps=2)(t) for t in (1, 2, 3, 4)] == [1.0, 1.0, 1.0, 0.1]


def test_the_paper_has_no_hold():
    d = DensitySchedule(0.01, warmup_steps=10_000)
    assert d(1) == 1.0
    assert d(5_001) == pytest.approx(0.1, rel=1e-12)
    assert d(10_001) == 0.01


def test_kept_counts_round_up_and_never_reach_zero():
    d = DensitySchedule(0.01)
    assert d.kept(1, 1001) == 1001
    assert [d.kept(2, n) for n in (1, 7, 100, 101, 1001)] == [1, 1, 1, 2, 11]
    assert [DensitySchedule(1.0).kept(t, 5) for t in (1, 2)] == [5, 5]
    falling = DensitySchedule(0.003, warmup_steps=9)
    assert [falling.kept(t, 977) for t in range(1, 12)] == [
        max(1, math.ceil(0.003 ** (min(t - 1, 9) / 9) * 977)) for t in range(1, 12)
    ]


@pytest.mark.parametrize("density", [0.0, -0.1, 1.01, float("nan")])
def test_density_outside_its_range_is_refused(density):
    with pytest.raises(ValueError, match=r"density must lie in \(0, 1\]"):
        DensitySchedule(density)


@pytest.mark.parametrize("field", ["warmup_steps", "hold_steps"])
@pytest.mark.parametrize("value", [-1, 0.5])
def test_steps_are_whole_numbers(field, value):
    with pytest.raises(ValueError, match=f"{field} must be a whole number"):
        DensitySchedule(0.1, **{field: value})
