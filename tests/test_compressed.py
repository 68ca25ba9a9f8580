"""Compressed collectives on 1-4 gloo ranks: error, bit identity, special values, bytes, uneven sizes; mutants."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hf_taco_scape.codecs import codec as registry
from hf_taco_scape.codecs import get_codec, register_codec
from hf_taco_scape.codecs.fp8 import Fp8Codec
from hf_taco_scape.collectives import ByteMeter, all_gather, all_reduce, compressed, reduce_scatter
from hf_taco_scape.collectives.compressed import one_shot_all_reduce, two_shot_all_reduce
from hf_taco_scape.collectives.transport import reduce_scatter_single

LOSSY = ["taco", "fp8", "int8", "hadamard-int8", "hadamard-int6", "hadamard-int4"]
ALL = ["none", *LOSSY]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
ODD_SIZES = [1, 2, 127, 129, 255, 641, 1283, 4099]

# relative error in % of the sum of independent Gaussian partials
ONE_SHOT = {"taco": 2.57, "fp8": 2.56, "hadamard-int8": 0.65, "hadamard-int6": 2.65, "hadamard-int4": 11.7}
TWO_SHOT = {"taco": 3.63, "fp8": 3.63, "hadamard-int8": 0.91, "hadamard-int6": 3.74, "hadamard-int4": 16.5}
# bytes sent / bytes of the bf16 message, payload and scales (docs/wire_formats.md)
BYTES_PER_BF16 = dict(zip(LOSSY, (8.5, 8.125, 8.125, 8.125, 6.125, 4.125), strict=True))


def partial(rank, *shape, dtype=torch.float32):
    """This rank's input; every rank can make every other's."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + rank)).to(dtype)


def exact_sum(make, ranks):
    return sum(make(rank).double() for rank in range(ranks))


def relative_error(y, x):
    return float((y.double() - x.double()).norm() / x.double().norm())


def raw(x):
    """The bits of a tensor, comparable and picklable."""
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def assert_same_on_ranks(results):
    for rank, result in enumerate(results):
        assert result == results[0], f"rank {rank} has other bits than rank 0"


# error and bytes of the all-reduce


def _error_and_bytes(codec, algorithm):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = partial(rank, 2**18)
    meter = ByteMeter()
    y = algorithm(x, None, get_codec(codec), meter)
    return relative_error(y, exact_sum(lambda r: partial(r, 2**18), ranks)), meter.snapshot()


@pytest.mark.parametrize(
    ("ranks", "algorithm", "table"),
    [
        (2, one_shot_all_reduce, ONE_SHOT),
        (2, two_shot_all_reduce, TWO_SHOT),
        (4, two_shot_all_reduce, TWO_SHOT),
    ],
)
@pytest.mark.parametrize("codec", ONE_SHOT)
def test_error_and_bytes_of_the_table(pool, codec, ranks, algorithm, table):
    for error, count in pool.run(ranks, _error_and_bytes, codec, algorithm):
        assert 100 * error == pytest.approx(table[codec], rel=0.1)
        assert count["calls"] == 1
        assert count["dense_bytes"] == 2 * (ranks - 1) * 4 * 2**18 // ranks
        share = (1 if algorithm is one_shot_all_reduce else 2 / ranks) * (ranks - 1)
        assert count["sent_bytes"] == share * BYTES_PER_BF16[codec] / 8 * 2**18


# equality with the algorithm written out on one process


def _one_shot_reference(codec, xs):
    flat = [x.reshape(-1) for x in xs]
    total = torch.zeros(flat[0].numel())
    for x in flat:
        total += codec.decode(codec.encode(x), x.numel(), torch.float32)
    return total.to(xs[0].dtype).view(xs[0].shape)


def _two_shot_reference(codec, xs):
    ranks, numel, dtype = len(xs), xs[0].numel(), xs[0].dtype
    chunk = math.ceil(numel / (128 * ranks)) * 128
    padded = torch.zeros(ranks, ranks * chunk, dtype=dtype)
    for row, x in zip(padded, xs, strict=True):
        row[:numel] = x.reshape(-1)
    out = []
    for owner in range(ranks):
        total = _one_shot_reference(codec, list(padded[:, owner * chunk : (owner + 1) * chunk].float()))
        if dtype == torch.float16:
            total = total.half()
        out.append(codec.decode(codec.encode(total), chunk, dtype))
    return torch.cat(out)[:numel].view(xs[0].shape)


def _all_reduce_of_odd_sizes(codec):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    reference = _one_shot_reference if ranks == 2 else _two_shot_reference
    results = []
    for dtype in DTYPES:
        for n in ODD_SIZES:
            x = partial(rank, n, dtype=dtype)
            y = all_reduce(x, None, codec)
            expected = reference(get_codec(codec), [partial(r, n, dtype=dtype) for r in range(ranks)])
            assert y.dtype == dtype and torch.equal(y, expected), (dtype, n)
            results.append(raw(y))
    return results


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("codec", LOSSY)
def test_all_reduce_is_the_written_algorithm_with_the_same_bits_everywhere(pool, codec, ranks):
    assert_same_on_ranks(pool.run(ranks, _all_reduce_of_odd_sizes, codec))


# mutants: what the bit-identity check has to catch


def _owner_keeps_its_stripe(x, codec):
    """Published kernels: the owner's own stripe stays in full precision, the others decode it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    codec, chunk = get_codec(codec), x.numel() // ranks
    out = two_shot_all_reduce(x, None, codec)
    mine = codec.decode_sum(_wires_of_stripe(codec, rank, x.numel(), ranks), chunk, x.dtype)
    out.view(ranks, chunk)[rank] = mine
    return out


def _wires_of_stripe(codec, stripe, numel, ranks):
    return torch.stack([codec.encode(partial(r, numel).view(ranks, -1)[stripe]) for r in range(ranks)])


def _own_message_first(x, codec):
    """Sums in an order of its own: right to rounding, different on each rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    codec = get_codec(codec)
    order = [rank, *(r for r in range(ranks) if r != rank)]
    wires = torch.stack([codec.encode(partial(r, x.numel())) for r in order])
    return codec.decode_sum(wires, x.numel(), x.dtype)


def _own_message_in_full(x, codec):
    """Adds its own values uncompressed to the decoded ones of the others."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    codec, numel = get_codec(codec), x.numel()
    parts = [x if r == rank else codec.decode(codec.encode(partial(r, numel)), numel, x.dtype) for r in range(ranks)]
    return sum(parts[1:], parts[0])


def _run_mutant(mutant, codec):
    ranks = dist.get_world_size()
    n = 128 * 4 * ranks
    y = mutant(partial(dist.get_rank(), n), codec)
    assert relative_error(y, exact_sum(lambda r: partial(r, n), ranks)) < 0.05  # no error bound sees the mutant
    return raw(y)


@pytest.mark.parametrize("mutant", [_owner_keeps_its_stripe, _own_message_first, _own_message_in_full])
def test_mutants_are_caught_by_bit_identity(pool, mutant):
    # three ranks and taco: the order of a sum of two does not show, nor that of the integer codecs' 22-bit products
    with pytest.raises(AssertionError, match="other bits"):
        assert_same_on_ranks(pool.run(3, _run_mutant, mutant, "taco"))


# repetition and special values (public reports: vllm-project/vllm #51290 and #55345)


def _repeat(codec, times):
    outputs = []
    for numel, dtype in ((128, torch.float32), (1283, torch.bfloat16), (9000, torch.float16)):
        x, first = partial(dist.get_rank(), numel, dtype=dtype), None
        for call in range(times):
            y = raw(all_reduce(x, None, codec))
            first = first or y
            assert y == first, f"call {call} of {numel} elements"
        outputs.append(first)
    return outputs


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("codec", ALL)
def test_200_calls_a_size_have_the_same_bits(pool, codec, ranks):
    assert_same_on_ranks(pool.run(ranks, _repeat, codec, 200))


def _special_values(codec, dtype):
    """Nine groups of 128, each with its trouble on rank 1 only; returns the bits and checks every group."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    large = 6e4 if dtype == torch.float16 else 1e30
    x = torch.ones(9, 128, dtype=dtype)
    clean = all_reduce(x, None, codec)
    assert relative_error(clean, x * ranks) < 0.2
    x[8] = torch.finfo(dtype).smallest_normal / 4  # subnormal on all ranks
    x[7] = 0
    if rank == 1:
        x[1, 5] = large
        x[2, 77] = math.nan
        x[3, 0] = math.inf
        x[4, 127] = -math.inf
        x[5] = 0
    y = all_reduce(x, None, codec)
    assert torch.equal(y[[0, 6]], clean[[0, 6]])  # others unharmed
    assert float(y[1, 5]) == pytest.approx(large, rel=0.2) and y[1].isfinite().all()
    assert y[2].isnan().all() and y[3].isnan().all() and y[4].isnan().all()
    assert relative_error(y[5], torch.full((128,), ranks - 1.0)) < 0.2
    assert (y[7] == 0).all()
    assert y[8].isfinite().all() and (y[8].abs() <= 2 * ranks * x[8, 0]).all()
    return raw(y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("codec", LOSSY)
def test_special_values_stay_in_their_group_and_visible(pool, codec, ranks, dtype):
    assert_same_on_ranks(pool.run(ranks, _special_values, codec, dtype))


def _special_values_dense(dtype):
    """Without a codec every element stands for itself: trouble on rank 1 shows in its own place on every rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.ones(9, dtype=dtype)
    large = 6e4 if dtype == torch.float16 else 1e30
    x[6], x[7] = 0, torch.finfo(dtype).smallest_normal / 4
    if rank == 1:
        x[1:5] = torch.tensor([large, math.nan, math.inf, -math.inf])
    y = all_reduce(x, None, "none")
    assert (y[[0, 5, 8]] == ranks).all() and y[6] == 0 and 0 <= y[7] <= 2 * ranks * x[7]
    assert float(y[1]) == pytest.approx(large, rel=1e-2)
    assert y[2].isnan() and y[3] == math.inf and y[4] == -math.inf
    return raw(y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_special_values_without_a_codec(pool, ranks, dtype):
    assert_same_on_ranks(pool.run(ranks, _special_values_dense, dtype))


def _overflow(codec, dtype):
    x = torch.ones(256, dtype=dtype)
    x[200] = torch.finfo(dtype).max
    y = all_reduce(x, None, codec)
    return bool(y[:128].isfinite().all()), bool(y[200].isfinite()), raw(y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("codec", ALL)
def test_a_sum_that_overflows_is_visible_as_in_a_dense_all_reduce(pool, codec, ranks, dtype):
    results = pool.run(ranks, _overflow, codec, dtype)
    assert_same_on_ranks(results)
    assert results[0][:2] == (True, False)


# reduce-scatter and all-gather

SHAPES = [(1,), (2, 3), (5, 7, 3), (129,), (11, 40), (24, 64)]


def _halves(codec, dtype):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gathered = []
    for shape in SHAPES:
        c = get_codec(codec)
        pieces = [partial(r, *shape, dtype=dtype).tensor_split(ranks) for r in range(ranks)]
        x = partial(rank, *shape, dtype=dtype)
        piece = reduce_scatter(x, None, codec)
        mine = [p[rank] for p in pieces]
        assert piece.shape == mine[0].shape and piece.dtype == dtype and piece.is_contiguous()
        if codec == "none":
            torch.testing.assert_close(piece, sum(p.float() for p in mine).to(dtype), rtol=2e-2, atol=2e-2)
        elif piece.numel():
            assert torch.equal(piece, _one_shot_reference(c, mine))

        sizes = [len(p) for p in pieces[0]]
        whole = all_gather(piece, None, codec, sizes=sizes)
        assert whole.shape == shape and whole.dtype == dtype
        part = whole.split(sizes)[rank]
        if piece.numel():
            assert torch.equal(part, c.decode(c.encode(piece), piece.numel(), dtype).view_as(piece))
        if len(set(sizes)) == 1:
            assert torch.equal(all_gather(piece, None, codec), whole)
        gathered.append(raw(whole))
    return gathered


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("codec", ALL)
def test_reduce_scatter_and_all_gather(pool, codec, ranks, dtype):
    assert_same_on_ranks(pool.run(ranks, _halves, codec, dtype))


def _wrong_sizes():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for sizes in ([2] * (ranks - 1), [3] * ranks):
        with pytest.raises(ValueError, match=rf"rank {rank} of {ranks} gathers 2 rows"):
            all_gather(torch.ones(2, 3), sizes=sizes)
    for collective in (reduce_scatter, all_gather):
        with pytest.raises(ValueError, match="0-dimensional"):
            collective(torch.tensor(1.0))


def test_sizes_that_do_not_fit_are_refused(pool):
    pool.run(2, _wrong_sizes)


# inputs


def _inputs(codec):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = partial(rank, 6, 10, 5).requires_grad_()
    before = x.detach().clone()
    view = x.transpose(0, 2)[:, 1:8]
    for collective in (all_reduce, reduce_scatter, all_gather):
        y = collective(view, None, codec)
        assert not y.requires_grad and y.is_contiguous()
        assert torch.equal(y, collective(view.detach().contiguous(), None, codec))
    assert torch.equal(x, before)

    scalar = all_reduce(torch.tensor(2.0), None, codec)
    assert scalar.shape == () and float(scalar) == pytest.approx(2 * ranks, rel=0.2)
    for shape in ((0,), (3, 0), (0, 3)):
        empty = torch.empty(shape, dtype=torch.bfloat16)
        for collective, rows in (all_reduce, 1), (all_gather, ranks):
            y = collective(empty, None, codec)
            assert y.shape == (shape[0] * rows, *shape[1:]) and y.dtype == torch.bfloat16
        assert reduce_scatter(empty, None, codec).shape == empty.tensor_split(ranks)[rank].shape
    for collective in (all_reduce, reduce_scatter, all_gather):
        for dtype in (torch.int32, torch.float64):
            if codec != "none" or not dtype.is_floating_point:
                with pytest.raises(ValueError, match=f"{codec}.*{str(dtype).removeprefix('torch.')}"):
                    collective(torch.zeros(4, dtype=dtype), None, codec)
        with pytest.raises(ValueError, match="fp9.*hadamard-int4"):
            collective(x, None, "fp9")


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("codec", ALL)
def test_inputs(pool, codec, ranks):
    pool.run(ranks, _inputs, codec)


def _subgroup(codec):
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1]), dist.new_group([3])]
    mine, members = {0: (groups[0], 2), 2: (groups[0], 2), 1: (groups[1], 1), 3: (groups[2], 1)}[rank]
    x, meter = torch.full((3, 50), float(rank + 1)), ByteMeter()
    outs = [c(x, mine, codec, meter=meter) for c in (all_reduce, reduce_scatter, all_gather)]
    if members == 1:
        assert all(torch.equal(y, x) and y.data_ptr() != x.data_ptr() for y in outs)
        assert meter == ByteMeter(0, 0, calls=3)
    else:
        assert torch.allclose(outs[0], torch.full((3, 50), 4.0), rtol=0.02)
        assert len(outs[1]) == (2 if rank == 0 else 1) and len(outs[2]) == 6
    with pytest.raises(ValueError, match=f"rank {rank} is not in the group"):
        all_reduce(x, groups[1] if rank != 1 else groups[0], codec)
    dist.barrier()  # rank 0 serves the store that the others leave their groups by


@pytest.mark.parametrize("codec", ["none", "hadamard-int8"])
def test_groups_of_some_ranks_and_of_one(pool, codec):
    pool.run(4, _subgroup, codec)


def _none_is_torch_distributed():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for dtype in (*DTYPES, torch.float64):
        x = partial(rank, 4 * ranks, 33).to(dtype)
        expected = x.clone()
        dist.all_reduce(expected)
        assert torch.equal(all_reduce(x, None, "none"), expected)
        piece = torch.empty(4, 33, dtype=dtype)
        reduce_scatter_single(piece, x)
        assert torch.equal(reduce_scatter(x, None, "none"), piece)
        parts = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(parts, x)
        assert torch.equal(all_gather(x, None, "none"), torch.cat(parts))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_none_is_torch_distributed(pool, ranks):
    pool.run(ranks, _none_is_torch_distributed)


# byte counts


def _count(codec, dtype):
    """What travels, counted where the bytes are handed to torch.distributed, against the meter."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    handed, original = [], dist.all_to_all_single

    def spy(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
        assert input.dtype == torch.uint8
        handed.append(sum(input_split_sizes) - input_split_sizes[rank])
        return original(output, input, output_split_sizes, input_split_sizes, group=group, async_op=async_op)

    dist.all_to_all_single = spy
    try:
        for collective in (all_reduce, reduce_scatter, all_gather):
            for shape in ((1,), (5, 77), (12, 128), (7, 33)):
                handed.clear()
                meter = ByteMeter()
                collective(partial(rank, *shape, dtype=dtype), None, codec, meter=meter)
                nbytes = math.prod(shape) * dtype.itemsize
                dense = {all_reduce: 2 * nbytes, reduce_scatter: nbytes, all_gather: nbytes * ranks}[collective]
                assert meter.dense_bytes == math.ceil(dense * (ranks - 1) / ranks) and meter.calls == 1
                assert meter.sent_bytes == (meter.dense_bytes if codec == "none" else sum(handed)), (collective, shape)
    finally:
        dist.all_to_all_single = original


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("codec", ALL)
def test_meter_counts_what_is_sent(pool, codec, ranks):
    for dtype in (torch.bfloat16, torch.float32):
        pool.run(ranks, _count, codec, dtype)


def _uneven_gather_bytes():
    rank, sizes, meter = dist.get_rank(), [3, 0, 130], ByteMeter()
    all_gather(torch.ones(sizes[rank], 2), None, "int8", sizes=sizes, meter=meter)
    return meter.sent_bytes, meter.dense_bytes


def test_meter_of_an_uneven_gather(pool):
    dense = math.ceil(133 * 2 * 4 * 2 / 3)
    assert pool.run(3, _uneven_gather_bytes) == [(2 * 130, dense), (0, dense), (2 * 390, dense)]


# the registry


class Fp8Mirrored(Fp8Codec):
    name = "test-own-codec"

    def pack(self, codes, payload):
        payload.copy_(codes.flip(-1))

    def unpack(self, payload):
        return super().unpack(payload.flip(-1))


def _own_codec():
    x = partial(dist.get_rank(), 1000)
    expected = all_reduce(x, None, "fp8")
    with pytest.MonkeyPatch.context() as patch:  # a worker serves other tests too
        patch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))
        register_codec("test-own-codec", Fp8Mirrored)
        assert torch.equal(all_reduce(x, None, "test-own-codec"), expected)
    assert torch.equal(all_reduce(x, None, Fp8Mirrored()), expected)
    return raw(expected)


@pytest.mark.parametrize("ranks", [2, 3])
def test_own_codec_in_a_collective(pool, ranks):
    assert_same_on_ranks(pool.run(ranks, _own_codec))


def test_one_shot_is_for_two_ranks_only(pool):
    """The table's reason: the same bytes at n = 2, one quantisation less; more bytes above."""
    for ranks in (2, 3):
        errors = [e for e, _ in pool.run(ranks, _error_and_bytes, "hadamard-int8", compressed.all_reduce)]
        assert np.allclose(100 * np.array(errors), (ONE_SHOT if ranks == 2 else TWO_SHOT)["hadamard-int8"], rtol=0.1)
