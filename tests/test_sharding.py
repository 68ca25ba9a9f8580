import pytest
import torch

from hf_taco_scape.parallel.sharding import Shard, deal_heads, shard_units, shard_width, spread


@pytest.mark.parametrize("count,ranks", [(7, 2), (3, 3), (10, 4), (1, 1), (2, 4)])
def test_spread_covers_once_and_evenly(count, ranks):
    parts = spread(count, ranks)
    assert [i for a, b in parts for i in range(a, b)] == list(range(count))
    sizes = [b - a for a, b in parts]
    assert max(sizes) - min(sizes) <= 1 and len(sizes) == ranks


@pytest.mark.parametrize(
    "heads,kv_heads,ranks,expected_heads,expected_kv",
    [
        (4, 2, 2, [2, 2], [1, 1]),
        (9, 3, 2, [6, 3], [2, 1]),  # SmolLM2
        (25, 25, 2, [13, 12], [13, 12]),  # GPT-2 XL
        (4, 1, 2, [2, 2], [1, 1]),  # one KV head on both ranks
        (6, 2, 4, [2, 1, 2, 1], [1, 1, 1, 1]),
        (12, 3, 4, [2, 2, 4, 4], [1, 1, 1, 1]),
    ],
)
def test_heads_keep_their_kv_group(heads, kv_heads, ranks, expected_heads, expected_kv):
    layout = deal_heads(heads, kv_heads, 8, ranks)
    assert [b - a for a, b in layout.heads] == expected_heads
    assert [b - a for a, b in layout.kv_heads] == expected_kv
    assert sorted(i for a, b in layout.heads for i in range(a, b)) == list(range(heads))
    per_kv = heads // kv_heads
    for (q0, q1), (k0, k1) in zip(layout.heads, layout.kv_heads, strict=True):
        assert k0 * per_kv <= q0 and q1 <= k1 * per_kv, "a query head lost its KV head"
        assert (q1 - q0) % (k1 - k0) == 0, "attention repeats KV heads evenly"


def test_too_many_ranks_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match="tp_size 4 .*2 attention heads and 1 key/value heads"):
        deal_heads(2, 1, 8, 4)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_take_and_put_are_inverse_for_packed_uneven_shards(dim, ranks):
    layout = deal_heads(5, 5, 2, ranks)
    shard = shard_units(dim, 30, layout.heads, 5, packed=3)
    full = torch.randn((30, 7) if dim == 0 else (7, 30))
    back = torch.full_like(full, float("nan"))
    for rank in range(ranks):
        part = shard.take(full, rank)
        assert part.shape[dim] == shard.size(rank) and part.is_contiguous()
        assert part.untyped_storage().nbytes() == part.numel() * 4, "the slice keeps the whole tensor alive"
        shard.put(back, part, rank)
        assert shard.copies(rank) == 1
    assert torch.equal(back, full)


def test_packed_shard_takes_each_projections_own_heads():
    # Q|K|V of 4 heads of width 1: rank 0 of 2 must hold q0 q1 k0 k1 v0 v1
    shard = shard_units(0, 12, deal_heads(4, 4, 1, 2).heads, 4, packed=3)
    assert shard.take(torch.arange(12), 0).tolist() == [0, 1, 4, 5, 8, 9]


def test_copies_counts_ranks_that_share_a_kv_head():
    layout = deal_heads(12, 3, 8, 4)
    shard = shard_units(0, 24, layout.kv_heads, 3)
    assert [shard.copies(rank) for rank in range(4)] == [2, 2, 1, 1]


@pytest.mark.parametrize(
    "size,ranks,sizes", [(100, 2, [50, 50]), (100, 3, [36, 32, 32]), (1536, 4, [384] * 4), (5, 4, [2, 1, 1, 1])]
)
def test_width_prefers_multiples_of_eight(size, ranks, sizes):
    shard = shard_width(0, size, ranks)
    assert [shard.size(rank) for rank in range(ranks)] == sizes


def test_features_that_are_no_whole_heads_are_refused():
    with pytest.raises(ValueError, match="30 features do not divide"):
        shard_units(0, 30, deal_heads(4, 4, 8, 2).heads, 4)
    with pytest.raises(ValueError, match="width 3 cannot be split over 4"):
        shard_width(0, 3, 4)


def test_shard_is_plain_data():
    assert Shard(0, 4, (((0, 2),), ((2, 4),))) == shard_width(0, 4, 2)
