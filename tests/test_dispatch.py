"""Thresholds and samples: decided alike on every rank, from facts that all ranks share."""

import inspect
import json
import logging
import re
import time

import pytest
import tiny
import torch
import torch.distributed as dist

import hf_taco_scape.collectives.dispatch as dispatch
from hf_taco_scape.codecs import get_codec
from hf_taco_scape.collectives import compressed, crossover, symm_mem
from hf_taco_scape.collectives.dispatch import Communicator, open_communicator
from hf_taco_scape.collectives.routes import OPERATIONS, Route, RouteTable
from hf_taco_scape.parallel import parallelize, split_state


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


CPU = torch.device("cpu")


def _wrong_names():
    for wrong, message in (
        ({"codec": "morse"}, "codec 'morse' is not known; choose one of: .*taco.*int6-int4"),
        ({"codec_backward": "int6-int4"}, "codec_backward 'int6-int4' is not known; choose one of: .*hadamard-int4"),
        ({"codec": "int6-int4", "codec_backward": "fp8"}, "is a preset of hadamard-int6 forward"),
        ({"backend": "mpi"}, "backend 'mpi' is not known; choose one of: auto, c10d, symm_mem"),
    ):
        with pytest.raises(ValueError, match=message):
            open_communicator(dist.group.WORLD, device=CPU, **wrong)


def test_unknown_names_are_refused(pool):
    pool.run(2, _wrong_names)


def _preset():
    comm = Communicator(dist.group.WORLD, "int6-int4")
    comm.request_error_sample()
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    comm.all_reduce(x), comm.all_reduce(x, backward=True)
    return comm.codec_names, comm.meter.sent_bytes, comm.error_samples()


def test_a_preset_is_a_forward_and_a_backward_codec(pool):
    for names, sent, errors in pool.run(2, _preset):
        assert names == ("hadamard-int6", "hadamard-int4")
        assert sent == sum(get_codec(name).wire_bytes(1024) for name in names)
        assert 3 * errors["forward"] < errors["backward"]


def _without_noise():
    comm = Communicator(dist.group.WORLD, "hadamard-int4")
    x = torch.randn(256)
    total = x.clone()
    dist.all_reduce(total)
    with comm.uncompressed():
        inside = comm.all_reduce(x)
    return torch.equal(inside, total), torch.equal(comm.all_reduce(x), total)


def test_messages_can_travel_uncompressed_for_a_while(pool):
    assert pool.run(2, _without_noise) == [(True, False)] * 2


FAST = {"none": 1.0, "hadamard-int8": 0.25}  # microseconds a KiB
LATENCY = {"none": 20.0, "hadamard-int8": 70.0}


def _opened(folder, rates=FAST, **options):
    """A communicator opened with a clock that follows `rates` (rank 1 is 3 % slow), and how often that was asked."""
    asked = []

    def clock(run, operation, route, x, calls):
        asked.append(route)
        microseconds = rates[route.codec] * x.nbytes / 1024 + LATENCY[route.codec]
        return microseconds * 1e-6 * (1 + 0.03 * dist.get_rank())

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(folder))
        patch.setattr(crossover, "seconds_a_call", clock)
        patch.setattr(crossover, "SIZES", crossover.SIZES[:6])  # to 4 MiB: drawing larger messages takes long
        comm = open_communicator(dist.group.WORLD, "hadamard-int8", device=CPU, **options)
    return comm, len(asked)


def _auto(folder):
    comm, asked = _opened(folder)
    assert asked
    for nbytes in (1, 100, 2**12, 2**15, 2**16 - 4, 2**16, 70_000, 2**17, 2**20, 3 * 2**20, 2**24, 2**27, 2**31):
        for direction in ("forward", "backward"):
            route = comm.table.route("all_reduce", direction, nbytes)
            takes, dense = (FAST[name] * nbytes / 1024 + LATENCY[name] for name in (route.codec, "none"))
            assert takes <= dense + max(0.02 * dense, 0.5), (nbytes, route)
            assert route.dense == (nbytes < 80_000), (nbytes, route)
    return comm.table.to_json()


def test_auto_is_never_slower_than_dense_and_compresses_where_it_pays(pool, tmp_path):
    tables = pool.run(2, _auto, tmp_path)
    assert tables[0] == tables[1]
    assert tables[0]["all_reduce/forward"][-1][1:] == ["hadamard-int8", "c10d", 1]


def _never_pays(folder):
    rates = {"none": 1.0, "hadamard-int8": 0.97}
    comm, _ = _opened(folder, rates, operations=("all_reduce", "all_gather"))
    return {route.dense for rules in comm.table.rules.values() for _, route in rules}, sorted(comm.table.rules)


def test_a_codec_that_is_not_clearly_faster_is_not_used(pool, tmp_path):
    operations = [(name, way) for name in ("all_gather", "all_reduce") for way in ("backward", "forward")]
    assert pool.run(2, _never_pays, tmp_path) == [({True}, operations)] * 2


def _nothing_to_choose(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(folder))
        patch.setattr(crossover, "seconds_a_call", None)
        comm = open_communicator(dist.group.WORLD, "none", device=CPU)
    x = torch.ones(2**16)
    return comm.choice_to_repeat(), torch.equal(comm.all_reduce(x), 2 * x), list(folder.iterdir())


def test_without_codecs_nothing_is_measured(pool, tmp_path):
    assert pool.run(2, _nothing_to_choose, tmp_path) == [(None, True, [])] * 2


def _cached(folders, spoil):
    """Opens three times, the file changed before the third; how often each asked the clock, and the log's words."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("hf_taco_scape").addHandler(handler)
    folder = folders[dist.get_rank()]
    (first, asked), (again, asked_again) = _opened(folder), _opened(folder)
    if dist.get_rank() == 0:
        (file,) = (folder / "hf_taco_scape").iterdir()
        file.write_text(SPOILT[spoil](file.read_text()))
    records.clear()
    third, asked_third = _opened(folder)
    logging.getLogger("hf_taco_scape").removeHandler(handler)
    assert first.table == again.table == third.table
    return [asked > 0, asked_again > 0, asked_third > 0], [r for r in records if "is ignored" in r]


SPOILT = {
    "untouched": lambda text: text,
    "cut off": lambda text: text[:100],
    "empty": lambda text: "",
    "no table": lambda text: "[1, 2]",
    "foreign": lambda text: text.replace('"cores"', '"kernels"'),
    "old format": lambda text: text.replace('"format": 1', '"format": 0'),
    "unknown operation": lambda text: text.replace("all_reduce/forward", "all_to_all/forward"),
}


@pytest.mark.parametrize("spoil", SPOILT)
def test_tables_are_kept_on_disk_and_spoilt_files_ignored(pool, tmp_path, spoil):
    """Ranks have folders of their own: the first rank's counts, so that nobody measures alone."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for rank, (asked, words) in enumerate(pool.run(2, _cached, folders, spoil)):
        assert asked == [True, False, spoil != "untouched"]
        assert len(words) == (spoil != "untouched" and rank == 0), words
    assert not folders[1].exists()
    assert [file.suffix for file in (folders[0] / "hf_taco_scape").iterdir()] == [".json"], "half a file was left"


def _unwritable(folder):
    comm, asked = _opened(folder)
    return asked > 0, comm.table.route("all_reduce", "forward", 2**20).dense


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(pool, tmp_path):
    (tmp_path / "file").write_text("")
    assert pool.run(2, _unwritable, tmp_path / "file") == [(True, False)] * 2


def _changed_machine(folder):
    """One rank of two sees another link: all of them measure again."""
    _opened(folder)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setenv("NCCL_P2P_DISABLE", "1")
        asked = _opened(folder)[1]
    return asked > 0, _opened(folder)[1] > 0, _opened(folder, use_cache=False)[1] > 0


def test_another_link_on_one_rank_is_measured_by_all(pool, tmp_path):
    assert pool.run(2, _changed_machine, tmp_path) == [(True, False, True)] * 2


def _data_parallel(folder):
    """tp 2 x dp 2: the last rank's clock is slow for compressed messages, and all four ranks take note."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    mine, other = groups[rank // 2], groups[2 + rank % 2]

    def clock(run, operation, route, x, calls):
        return x.nbytes * 1e-9 * (1.0 if route.dense else 2.0 if rank == 3 else 0.5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", f"{folder}/{rank}")
        patch.setattr(crossover, "seconds_a_call", clock)
        patch.setattr(crossover, "SIZES", crossover.SIZES[:6])
        alone = open_communicator(mine, "fp8", device=CPU, use_cache=False)
        together = open_communicator(mine, "fp8", device=CPU, agree_over=[mine, other])
    return [comm.table.route("all_reduce", "forward", 2**20).dense for comm in (alone, together)]


def test_data_parallel_ranks_choose_alike(pool, tmp_path):
    assert pool.run(4, _data_parallel, tmp_path) == [[False, True]] * 2 + [[True, True]] * 2


def _really_measured(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(folder))
        start, state = time.perf_counter(), torch.get_rng_state()
        comm = open_communicator(dist.group.WORLD, "fp8", "none", device=CPU, operations=OPERATIONS)
    seconds = time.perf_counter() - start
    assert torch.equal(torch.get_rng_state(), state), "a first run would draw other numbers than the next"
    for operation, times in comm.measured.items():
        for route, values in times.seconds.items():
            assert len(values) == len(times.sizes) and all(v > 0 for v in values)
            assert [v == float("inf") for v in values] == [
                not route.dense and nbytes < crossover.SMALLEST_COMPRESSED for nbytes in times.sizes
            ]
        assert all(route.dense for _, route in comm.table.rules[operation, "backward"])
    assert comm.meter.calls == 0, "a run's counters begin with the run"
    return comm.table.to_json(), sorted(comm.measured), seconds


def test_real_measurement_agrees_over_ranks_and_takes_seconds(pool, tmp_path):
    (first, operations, seconds), second = pool.run(2, _really_measured, tmp_path)
    assert first == second[0] and operations == sorted(OPERATIONS)
    assert seconds < 30


class _Fused:
    """In the place of collectives/symm_mem.py: the process group's collectives, counted, or a reason why not."""

    def __init__(self, reasons):
        self.calls, self._reasons = [], reasons

    def why_not(self, group, device):
        return self._reasons[dist.get_rank()]

    def inbox_bytes(self, numel, ranks, codec, dtype=torch.float32):
        if codec.name == "int8":
            raise ValueError("codec 'int8' has no kernels")
        return numel

    def SymmetricWorkspace(self, group, device, max_bytes):
        return ("workspace", group)

    def __getattr__(self, operation):
        def collective(*args, **kwargs):
            bound = inspect.signature(getattr(symm_mem, operation)).bind(*args, **kwargs).arguments
            name, group = bound.pop("workspace")
            assert name == "workspace"
            self.calls.append((operation, bound["codec"].name))
            return getattr(compressed, operation)(group=group, **bound)

        return collective


def _with_symm_mem(reasons, codec="fp8", dtype=torch.float32, **options):
    fused, records = _Fused(reasons), []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: records.append(record)
    logger = logging.getLogger("hf_taco_scape")
    logger.addHandler(handler), logger.setLevel(logging.INFO)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "symm_mem", fused)
        patch.setattr(dispatch, "AUTO_BACKENDS", ("c10d", "symm_mem"))
        try:
            comm = open_communicator(dist.group.WORLD, codec, device=CPU, **{"min_bytes": 2048, **options})
            for numel in (100, 1000):
                x = torch.full((numel, 2), 1.0, dtype=dtype)
                torch.testing.assert_close(comm.all_reduce(x), x * comm.size, rtol=0.05, atol=0)
                both = comm.all_gather(comm.reduce_scatter(x, 1), 1, comm.piece_sizes(2))
                torch.testing.assert_close(both, x * comm.size, rtol=0.05, atol=0)
        finally:
            logger.removeHandler(handler), logger.setLevel(logging.NOTSET)
    return fused.calls, [record.getMessage() for record in records if "symm_mem" in record.getMessage()]


def test_symm_mem_carries_every_message_where_it_starts(pool):
    for backend in ("auto", "symm_mem"):
        for calls, words in pool.run(2, _with_symm_mem, [None, None], backend=backend):
            three = ["all_reduce", "reduce_scatter", "all_gather"]
            assert calls == [(operation, codec) for codec in ("none", "fp8") for operation in three] and words == []
    assert pool.run(2, _with_symm_mem, [None, None], backend="c10d") == [([], [])] * 2


def test_what_no_kernel_knows_takes_the_process_group(pool):
    doubles = pool.run(2, _with_symm_mem, [None, None], codec="none", dtype=torch.float64)
    assert doubles == [([], [])] * 2
    (calls, words), (_, others) = pool.run(2, _with_symm_mem, [None, None], codec="int8")
    assert calls == [] and "symm_mem cannot start: codec 'int8' has no kernels" in words[0] and others == []


def test_auto_falls_back_everywhere_where_one_rank_cannot(pool):
    """flashinfer #4393: the reason on one rank only; one line, all choose alike, the result is right."""
    results = pool.run(3, _with_symm_mem, [None, "no peer access to GPU 1", None], backend="auto")
    assert [calls for calls, _ in results] == [[], [], []]
    (line,) = results[0][1]
    assert "c10d only, symm_mem cannot start: no peer access to GPU 1" in line
    assert results[1][1] == results[2][1] == []


def _symm_mem_refused():
    with pytest.raises(ValueError, match="tp_backend symm_mem cannot start: no peer access.*Choose auto or c10d"):
        _with_symm_mem([None, "no peer access"], backend="symm_mem")


def test_symm_mem_that_cannot_start_is_refused_on_every_rank_where_it_was_asked_for(pool):
    pool.run(2, _symm_mem_refused)


def _old_gpu(codec):
    """triton-lang/triton #4319: one rank's GPU is below sm89; nothing has been swapped when all refuse."""

    def kernels_for(codec, device):
        if codec.needs_e4m3 and dist.get_rank() == 1:
            raise ValueError(f"codec {codec.name!r} needs sm89 or newer; Tesla T4 is sm75: choose hadamard-int8")

    model = tiny.build("qwen3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "kernels_for", kernels_for)
        try:
            parallelize(model, dist.group.WORLD, codec)
        except ValueError as error:
            return str(error), split_state(model) is None and type(model.model.layers[0].mlp.up_proj).__name__
    return "", type(model.model.layers[0].mlp.up_proj).__name__


def test_gpus_that_cannot_run_a_codec_are_refused_before_the_model_is_touched(pool):
    for codec in ("taco", "fp8"):
        for message, layer in pool.run(2, _old_gpu, codec):
            assert "Tesla T4 is sm75: choose hadamard-int8" in message and layer == "Linear"
    assert pool.run(2, _old_gpu, "int6-int4") == [("", "ColwiseLinear")] * 2


def _resumed(folder, change):
    """The words in the log, and whether the table of the checkpoint is the one in use afterwards."""
    comm, _ = _opened(folder)
    saved = json.loads(json.dumps(comm.choice_to_repeat()))
    other = RouteTable(
        {key: [(0, Route("none")), (12345, Route("hadamard-int8", "c10d", 1))] for key in comm.table.rules}
    )
    saved["table"] = other.to_json()
    change = CHANGES[change]
    saved = change(saved) if dist.get_rank() == 0 else None  # the first rank's file counts
    records = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("hf_taco_scape")
    logger.addHandler(handler), logger.setLevel(logging.INFO)
    try:
        comm.repeat_choice(saved, [dist.group.WORLD])
    finally:
        logger.removeHandler(handler), logger.setLevel(logging.NOTSET)
    return comm.table == other, records


def _set(saved, part, name, value):
    rows = saved["signature"][part]
    for row in rows if isinstance(rows, list) else [rows]:
        row[name] = value
    return saved


def _fewer_ranks(saved):
    saved["signature"]["hardware"].pop()
    return saved


CHANGES = {
    "same machine": lambda saved: saved,
    "newer torch": lambda saved: _set(saved, "software", "torch", "2.99"),
    "another GPU": lambda saved: _set(saved, "hardware", "device", "NVIDIA A100"),
    "another backend": lambda saved: _set(saved, "job", "backends", ["c10d", "symm_mem"]),
    "other ranks": _fewer_ranks,
    "none kept": lambda saved: None,
}


@pytest.mark.parametrize(
    "change,kept,words",
    [
        ("same machine", True, "as in the checkpoint's run, not as measured now"),
        ("newer torch", True, "as in the checkpoint's run, not as measured now"),
        ("another GPU", False, r"not as in the checkpoint's run \(hardware.device differ\)"),
        ("another backend", False, r"\(job.backends differ\)"),
        ("other ranks", False, r"\(hardware \(number of ranks\) differ\)"),
        ("none kept", False, "keeps no choice of routes"),
    ],
)
def test_a_resume_repeats_the_checkpoints_routes_on_the_same_machine(pool, tmp_path, change, kept, words):
    first, second = pool.run(2, _resumed, tmp_path, change)
    assert first[0] == second[0] == kept
    assert len(first[1]) == 1 and re.search(words, first[1][0]) and second[1] == []


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


def _empty_piece():
    """Fewer rows than ranks, above a threshold: the rank that has none must take the others' way."""
    comm = Communicator(dist.group.WORLD, "hadamard-int8", min_bytes=1024)
    x = torch.ones(2, 256)
    return comm.all_gather(comm.reduce_scatter(x, 0), 0, comm.piece_sizes(2)).sum(1).tolist()


def test_a_rank_without_rows_chooses_as_the_others(pool):
    for sums in pool.run(3, _empty_piece):
        assert sums == pytest.approx([768, 768], rel=0.02)


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
