"""The packed mean and the uneven gather, over 1-4 gloo ranks."""

import pytest
import torch
import torch.distributed as dist

from hf_taco_scape.collectives.sparse import PackedMessage, PendingGather, group_rank, group_size

SIZES = [(1001, 37), (5, 0), (0, 3), (1, 1), (2, 9)]


def parts(rank: int, n_values: int, n_exact: int, dtype=torch.float32):
    g = torch.Generator().manual_seed(100 + rank)
    return torch.randn(n_values, generator=g, dtype=dtype), torch.randn(n_exact, generator=g, dtype=dtype)


def exchange(n_values, n_exact, values_dtype, exact_dtype, ordered):
    rank, world = group_rank(None), group_size(None)
    message = PackedMessage(
        n_values,
        n_exact,
        values_dtype=values_dtype,
        exact_dtype=exact_dtype,
        device=torch.device("cpu"),
        ordered=ordered,
    )
    values, exact = parts(rank, n_values, n_exact, exact_dtype)
    message.values.copy_(values)
    message.exact.copy_(exact)
    message.start()
    message.finish()
    payload = n_values * values.to(values_dtype).element_size() + n_exact * exact.element_size()
    # padding: each rank sums a row of whole eight bytes
    assert payload <= message.nbytes < payload + 16 * world
    return message.values.clone(), message.exact.clone(), message.rounding


def exchange_all(*args):
    return [exchange(*sizes, *args) for sizes in SIZES]


def rank_order_mean(tensors: list[torch.Tensor]) -> torch.Tensor:
    total = tensors[0].clone()
    for t in tensors[1:]:
        total += t
    return total / len(tensors)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("ordered", [False, True], ids=["ring", "ordered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_mean_of_one_dtype(pool, world, ordered, dtype):
    by_rank = pool.run(world, exchange_all, dtype, dtype, ordered)
    for (n_values, n_exact), results in zip(SIZES, zip(*by_rank, strict=True), strict=True):
        inputs = [parts(r, n_values, n_exact, dtype) for r in range(world)]
        for i in (0, 1):
            mean = rank_order_mean([x[i] for x in inputs])
            for result in results:
                assert torch.equal(result[i], results[0][i])
                if ordered or world <= 2:
                    assert torch.equal(result[i], mean)
                else:
                    torch.testing.assert_close(result[i], mean, rtol=1e-5, atol=1e-6)
        assert results[0][2] is None


@pytest.mark.parametrize("world", [2, 3, 4])
def test_bf16_values_are_summed_in_fp32_and_rounded_once(pool, world):
    by_rank = pool.run(world, exchange_all, torch.bfloat16, torch.float32, False)
    for (n_values, n_exact), results in zip(SIZES, zip(*by_rank, strict=True), strict=True):
        inputs = [parts(r, n_values, n_exact) for r in range(world)]
        unrounded = rank_order_mean([x[0].bfloat16().float() for x in inputs])
        exact = rank_order_mean([x[1] for x in inputs])
        returned = torch.zeros(n_values)
        for values, dense, rounding in results:
            assert torch.equal(values, unrounded.bfloat16())
            assert torch.equal(dense, exact)
            if rounding is not None:
                first, error = rounding
                returned[first : first + error.numel()] += error
        # what was rounded away is known to exactly one rank
        assert torch.equal(results[0][0].float() + returned, unrounded)


def bf16_ring(n_values):
    values = parts(dist.get_rank(), n_values, 0)[0].bfloat16()
    dist.all_reduce(values)
    return values / dist.get_world_size()


def test_a_bf16_ring_would_be_caught(pool):
    mean = rank_order_mean([parts(r, 1001, 37)[0].bfloat16().float() for r in range(4)]).bfloat16()
    assert not torch.equal(pool.run(4, bf16_ring, 1001)[0], mean)


def test_mixed_messages_on_one_rank_stay_as_packed():
    values, exact, rounding = exchange(7, 3, torch.bfloat16, torch.float32, False)
    assert torch.equal(values, parts(0, 7, 3)[0].bfloat16()) and torch.equal(exact, parts(0, 7, 3)[1])
    assert rounding is None


def collectives_used(values_dtype, ordered):
    names = ("all_reduce", "all_to_all_single", "all_gather_into_tensor", "all_gather", "broadcast")
    with pytest.MonkeyPatch.context() as patch:
        calls = []
        for name in names:
            original = getattr(dist, name)
            patch.setattr(dist, name, lambda *a, _n=name, _f=original, **k: (calls.append(_n), _f(*a, **k))[1])
        exchange(100, 10, values_dtype, torch.float32, ordered)
    return calls


def collectives_of_each_kind():
    kinds = [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)]
    return [collectives_used(*kind) for kind in kinds]


def test_one_message_carries_everything(pool):
    one_dtype, ordered, bf16 = pool.run(2, collectives_of_each_kind)[0]
    assert one_dtype == ["all_reduce"]
    assert ordered == bf16 == ["all_to_all_single"] * 2


def gather(sizes: list[int]):
    rank = dist.get_rank() if len(sizes) > 1 else 0
    pending = PendingGather(torch.full((sizes[rank],), rank + 1, dtype=torch.uint8), sizes)
    return [part.clone() for part in pending.wait()]


@pytest.mark.parametrize("sizes", [[5], [3, 0], [0, 0, 4], [7, 1, 0, 300]])
def test_gather_of_uneven_byte_strings(pool, sizes):
    for parts_seen in pool.run(len(sizes), gather, sizes):
        assert [p.tolist() for p in parts_seen] == [[r + 1] * n for r, n in enumerate(sizes)]


def gather_beside_other_messages():
    rank, world = dist.get_rank(), dist.get_world_size()
    pending = PendingGather(torch.arange(rank + 1, dtype=torch.uint8), list(range(1, world + 1)))
    total = torch.ones(1000)
    for _ in range(5):
        dist.all_reduce(total)
    return [p.tolist() for p in pending.wait()], float(total[0])


def test_a_gather_under_way_lets_other_messages_pass(pool):
    for got, total in pool.run(3, gather_beside_other_messages):
        assert got == [[0], [0, 1], [0, 1, 2]] and total == 3.0**5
