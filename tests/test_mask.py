"""Owners, exact selection, the masks that need no exchange, and the wire forms of a mask."""

import pytest
import torch

from hf_taco_scape.sync import mask_codec
from hf_taco_scape.sync.mask import (
    CyclicMask,
    EncodedMask,
    FullMask,
    RandomMask,
    _threshold_by_histogram,
    _threshold_by_topk,
    assign_owners,
    magnitude_bits,
    mask_bytes,
    mask_seed,
    select_topk,
)

CPU = torch.device("cpu")


def by_stable_sort(x: torch.Tensor, k: int) -> torch.Tensor:
    chosen = torch.zeros(x.numel(), dtype=torch.bool)
    chosen[torch.sort(x.abs(), descending=True, stable=True).indices[:k]] = True
    return chosen


def ties_by_highest_index(x: torch.Tensor, k: int) -> torch.Tensor:
    return by_stable_sort(x.flip(0), k).flip(0)


def test_owners_take_the_largest_tensors_first():
    assert assign_owners([5, 9, 4, 4, 1], 2) == [1, 0, 1, 0, 1]
    assert assign_owners([3, 3, 3, 3], 3) == [0, 1, 2, 0]
    assert assign_owners([7], 4) == [0]
    assert assign_owners([], 4) == []
    sizes = [int(s) for s in torch.randint(1, 1000, (50,), generator=torch.Generator().manual_seed(0))]
    load = [0] * 4
    for size, owner in zip(sizes, assign_owners(sizes, 4), strict=True):
        load[owner] += size
    assert max(load) - min(load) <= min(sizes) + 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("numel", [1, 2, 7, 255, 4097])
def test_selection_equals_a_stable_sort(dtype, numel):
    x = torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(numel))
    coarse = (x * 2).round() / 2  # many equal magnitudes of both signs, zeros included
    for values in (x, coarse, torch.zeros_like(x), x * 1e-42, x * 1e30):
        for k in sorted({1, max(1, numel // 100), max(1, numel // 3), max(1, numel - 1), numel}):
            chosen = select_topk(values, k)
            assert int(chosen.sum()) == k
            assert torch.equal(chosen, by_stable_sort(values, k))


def test_the_order_of_ties_is_seen_by_these_tests():
    x = torch.tensor([1.0, -2.0, 2.0, 2.0, 0.5])
    assert select_topk(x, 2).tolist() == [False, True, True, False, False]
    assert not torch.equal(select_topk(x, 2), ties_by_highest_index(x, 2))


def test_nan_counts_as_the_largest_and_infinity_next():
    x = torch.tensor([1.0, float("inf"), 3.0, float("nan"), -2.0])
    assert select_topk(x, 1).nonzero().tolist() == [[3]]
    assert select_topk(x, 2).nonzero().tolist() == [[1], [3]]


@pytest.mark.parametrize("k", [1, 50, 999, 1000])
def test_both_thresholds_agree(k):
    for dtype in (torch.float32, torch.float64):
        bits = magnitude_bits(torch.randn(1000, dtype=dtype, generator=torch.Generator().manual_seed(k)))
        assert _threshold_by_histogram(bits, k) == int(_threshold_by_topk(bits, k)) == int(bits.sort().values[-k])


@pytest.mark.parametrize("k", [0, 6])
def test_selecting_none_or_too_many_is_refused(k):
    with pytest.raises(ValueError, match="cannot keep"):
        select_topk(torch.ones(5), k)


# ceil(d*n) on both sides of every switch: bitmask above 0.117, block256 to about 1/384, int32 below
DENSITIES = [0.99, 0.5, 0.13, 0.118, 0.116, 0.1, 0.04, 0.01, 0.0027, 0.0025, 0.001, 0.0001]


@pytest.mark.parametrize("numel", [1, 8, 255, 256, 257, 1000, 25_613])
def test_encodings_round_trip_in_exactly_their_bytes(numel):
    g = torch.Generator().manual_seed(numel)
    for density in DENSITIES:
        k = min(numel, max(1, -int(-density * numel // 1)))
        chosen = torch.zeros(numel, dtype=torch.bool)
        chosen[torch.randperm(numel, generator=g)[:k]] = True
        sizes = {"bitmask": (numel + 7) // 8, "block256": k + 2 * ((numel + 255) // 256), "int32": 4 * k}
        for encoding, nbytes in sizes.items():
            payload = mask_codec.encode(chosen, k, encoding)
            assert payload.dtype == torch.uint8 and payload.numel() == nbytes
            assert mask_codec.encoded_bytes(numel, k, encoding) == nbytes
            # as it arrives: a slice at an odd offset
            arrived = torch.cat([torch.full((1,), 255, dtype=torch.uint8), payload])[1:]
            assert torch.equal(mask_codec.decode(arrived, numel, k, encoding), chosen.nonzero().view(-1))
        assert sizes[mask_codec.choose_encoding(numel, k)] == min(sizes.values())
        assert EncodedMask.from_bool(chosen, k).payload.numel() == min(sizes.values())
        assert mask_bytes(numel, k) == (0 if k == numel else min(sizes.values()))


def test_the_encoding_follows_the_density():
    n = 1 << 20
    chosen = {d: mask_codec.choose_encoding(n, int(d * n)) for d in DENSITIES}
    assert [chosen[d] for d in (0.5, 0.118)] == ["bitmask"] * 2
    assert [chosen[d] for d in (0.116, 0.1, 0.01, 0.0027)] == ["block256"] * 4
    assert [chosen[d] for d in (0.0025, 0.001)] == ["int32"] * 2


def test_int32_is_not_offered_where_an_index_would_not_fit():
    assert mask_codec.choose_encoding(2**31, 10) == "int32"
    assert mask_codec.choose_encoding(2**31 + 1, 10) == "block256"


def test_a_full_block_of_256_can_be_counted():
    chosen = torch.zeros(600, dtype=torch.bool)
    chosen[256:512] = True
    payload = mask_codec.encode(chosen, 256, "block256")
    assert torch.equal(mask_codec.decode(payload, 600, 256, "block256"), torch.arange(256, 512))


def masks_of(numel: int, k: int):
    chosen = by_stable_sort(torch.randn(numel, generator=torch.Generator().manual_seed(k)), k)
    yield EncodedMask.from_bool(chosen, k)
    yield CyclicMask(numel, k, start=numel - k // 2 - 1)
    yield CyclicMask(numel, k, start=0)
    yield RandomMask(numel, k, mask_seed(3, 5, 7))


@pytest.mark.parametrize("numel,k", [(11, 4), (1000, 10), (1000, 999), (5, 1)])
def test_every_mask_reads_and_writes_k_different_places(numel, k):
    for mask in masks_of(numel, k):
        flat = torch.randn(numel)
        before, selection = flat.clone(), mask.resolve(CPU)
        places = selection.places(flat)
        assert places.unique().numel() == k == mask.k
        values = selection.take(flat)
        assert torch.equal(values, flat[places])
        selection.put_(flat, values + 1)
        assert torch.equal(flat[places], values + 1)
        selection.put_(flat, 0.0)
        assert not flat[places].any()
        off = torch.ones(numel, dtype=torch.bool).index_fill_(0, places, False)
        assert torch.equal(flat[off], before[off])
        low_precision = flat.bfloat16()
        selection.put_(low_precision, values)
        assert torch.equal(low_precision[places], values.bfloat16())


def test_a_full_mask_reads_a_view():
    flat = torch.randn(9)
    selection = FullMask(9).resolve(CPU)
    assert selection.take(flat).data_ptr() == flat.data_ptr() and selection.places(flat) is None
    selection.put_(flat, 0.0)
    assert not flat.any()


def test_cyclic_masks_sweep_every_entry_once():
    numel, k, start, seen = 103, 10, 97, torch.zeros(103)
    for _ in range(103):
        mask = CyclicMask(numel, k, start)
        seen[mask.resolve(CPU).places(seen)] += 1
        start = (start + k) % numel
    assert torch.equal(seen, torch.full((103,), 10.0))


def test_random_masks_cover_evenly_and_change_with_every_seed():
    numel, k, rounds = 500, 5, 8000
    seen = torch.zeros(numel)
    for step in range(rounds):
        seen[RandomMask(numel, k, mask_seed(0, step, 2)).indices(CPU)] += 1
    expected = rounds * k / numel
    # a binomial count: 5 standard deviations
    assert (seen - expected).abs().max() < 5 * expected**0.5
    seeds = {mask_seed(s, t, i) for s in range(3) for t in range(100) for i in range(20)}
    assert len(seeds) > 5990
