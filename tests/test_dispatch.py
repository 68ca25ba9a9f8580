"""Thresholds and samples: decided alike on every rank, from facts that all ranks share."""

import pytest
import torch
import torch.distributed as dist

import hf_taco_scape.collectives.dispatch as dispatch
from hf_taco_scape.collectives.dispatch import NEVER, Communicator, agree_on_largest, measure_min_bytes


def _threshold():
    comm = Communicator(dist.group.WORLD, "hadamard-int4", min_bytes=4096)
    small, large = torch.randn(1023), torch.randn(1024)
    exact = [t.clone() for t in (small, large)]
    for t in exact:
        dist.all_reduce(t)
    got = comm.all_reduce(small), comm.all_reduce(large)
    return torch.equal(got[0], exact[0]), torch.equal(got[1], exact[1]), comm.meter.snapshot()


def test_smaller_messages_travel_uncompressed(pool):
    for small_exact, large_exact, meter in pool.run(2, _threshold):
        assert small_exact and not large_exact
        assert meter["sent_bytes"] == 1023 * 4 + 1024 * 4.125 / 8


def _backward_codec():
    comm = Communicator(dist.group.WORLD, "none", "hadamard-int4")
    x = torch.randn(512)
    exact = x.clone()
    dist.all_reduce(exact)
    comm.request_error_sample()
    same = torch.equal(comm.all_reduce(x), exact), torch.equal(comm.all_reduce(x, backward=True), exact)
    return same, comm.error_samples()


def test_backward_messages_have_their_own_codec(pool):
    for same, samples in pool.run(2, _backward_codec):
        assert same == (True, False)
        assert samples.keys() == {"backward"} and 0.08 < samples["backward"] < 0.16


def _sampling():
    comm = Communicator(dist.group.WORLD, "fp8")
    comm.all_reduce(torch.randn(256))
    before = comm.error_samples()
    sampled = []
    for _ in range(3):
        comm.request_error_sample()
        for scale in range(4):  # four layers; the first has an all-zero message
            comm.all_reduce(torch.randn(256) * scale)
        sampled.append(comm.error_samples()["forward"])
    return before, sampled


def test_error_is_sampled_on_request_from_changing_layers(pool):
    for before, sampled in pool.run(2, _sampling):
        assert before == {}
        assert len(set(sampled)) > 1 and all(0 <= s < 0.04 for s in sampled) and max(sampled) > 0.02


def _measured(dense_ms, packed_ms):
    comm = Communicator(dist.group.WORLD, "fp8")
    rank = dist.get_rank()

    def fake_time(call, device):
        # rank 1's clock disagrees: the decision must still be one
        codec, nbytes = call.__defaults__[-1], call.__defaults__[0].nbytes
        if isinstance(codec, torch.Tensor):
            return dense_ms * nbytes + rank * 1e-9
        return packed_ms * nbytes + 2**18 + rank * 1e5

    original, dispatch._time = dispatch._time, fake_time
    try:
        return measure_min_bytes(comm, torch.device("cpu"))
    finally:
        dispatch._time = original


def test_measured_threshold_is_where_compression_begins_to_win(pool):
    assert pool.run(2, _measured, 2.0, 1.0) == [2**20] * 2
    assert pool.run(2, _measured, 1.0, 1.0) == [NEVER] * 2


def _really_measured():
    comm = Communicator(dist.group.WORLD, "fp8", "none")
    none = Communicator(dist.group.WORLD, "none")
    return measure_min_bytes(comm, torch.device("cpu")), measure_min_bytes(none, torch.device("cpu"))


def test_real_measurement_agrees_over_ranks(pool):
    first, second = pool.run(2, _really_measured)
    assert first == second and first[0] > 0 and first[1] == 0


def _largest():
    return agree_on_largest(dist.get_rank() + 5, [None, dist.group.WORLD], torch.device("cpu"))


def test_ranks_agree_on_the_largest(pool):
    assert pool.run(3, _largest) == [7, 7, 7]


def test_unknown_codec_is_refused():
    with pytest.raises(ValueError, match="known"):
        from hf_taco_scape.codecs import get_codec

        get_codec("morse")


SHAPES = [((2, 5, 3), 1), ((2, 5, 3), -2), ((4, 256), 0), ((1, 7, 130), 1), ((3, 1, 64), 1), ((2, 3, 129), 2)]


def _pieces(codec, tolerance):
    """Halves of an all-reduce along any dim, against plain torch.distributed; sizes that the ranks do not divide."""
    comm = Communicator(dist.group.WORLD, codec)
    for shape, dim in SHAPES:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(comm.rank))
        total = x.clone()
        dist.all_reduce(total)
        pieces = total.tensor_split(comm.size, dim)
        got = comm.reduce_scatter(x, dim)
        assert got.shape == pieces[comm.rank].shape and got.is_contiguous()
        assert (got - pieces[comm.rank]).norm() <= tolerance * total.norm(), (shape, dim)
        sizes = comm.piece_sizes(shape[dim])
        assert sizes == [piece.shape[dim] for piece in pieces]
        whole = comm.all_gather(pieces[comm.rank], dim, sizes)
        assert whole.shape == total.shape and whole.is_contiguous()
        assert (whole - total).norm() <= tolerance * total.norm(), (shape, dim)
        equal = comm.all_gather(x.transpose(0, dim).contiguous().transpose(0, dim), dim)
        assert equal.shape[dim] == comm.size * shape[dim]
        assert (equal.narrow(dim, comm.rank * shape[dim], shape[dim]) - x).norm() <= tolerance * x.norm()
    with pytest.raises(ValueError, match="do not fit"):
        comm.all_gather(x, 0, [1] * (comm.size + 1))
    return comm.meter.calls


@pytest.mark.parametrize("codec,tolerance", [("none", 1e-6), ("hadamard-int8", 0.02)])
@pytest.mark.parametrize("world", [2, 3])
def test_reduce_scatter_and_all_gather_work_along_any_dim(pool, world, codec, tolerance):
    assert pool.run(world, _pieces, codec, tolerance) == [3 * len(SHAPES)] * world


def _halves_with_thresholds():
    """The threshold looks at the whole message, so that all ranks decide alike although their pieces differ."""
    comm = Communicator(dist.group.WORLD, "hadamard-int4", "none", min_bytes=3 * 256 * 4)
    exact = {}
    for length in (2, 3):  # whole messages below and at the threshold, pieces of 1 + 1 and 2 + 1 rows
        x = torch.randn(length, 256)
        total = x.clone()
        dist.all_reduce(total)
        mine = total.tensor_split(2)[comm.rank]
        exact[length] = (
            torch.equal(comm.reduce_scatter(x, 0), mine),
            torch.equal(comm.all_gather(mine, 0, comm.piece_sizes(length)), total),
            torch.equal(comm.reduce_scatter(x, 0, backward=True), mine),
        )
    return exact


def test_halves_have_the_threshold_and_codec_of_their_direction(pool):
    for exact in pool.run(2, _halves_with_thresholds):
        assert exact == {2: (True, True, True), 3: (False, False, True)}


def _compiled_halves():
    torch._dynamo.reset()
    comm = Communicator(dist.group.WORLD, "hadamard-int8")
    compiles = []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph.forward

    def halves(x):
        y = comm.reduce_scatter(x, 1) * 2
        return comm.all_gather(y, 1, comm.piece_sizes(x.shape[1])) + 1

    fast = torch.compile(halves, backend=backend, fullgraph=True)
    for length in (8, 17, 33, 64, 17):
        x = torch.randn(2, length, 32, generator=torch.Generator().manual_seed(length + comm.rank))
        a, b = halves(x), fast(x)
        assert a.stride() == b.stride() and torch.equal(a, b)
    return len(compiles)


def test_halves_are_opaque_to_torch_compile(pool):
    assert all(compiles <= 2 for compiles in pool.run(2, _compiled_halves))
