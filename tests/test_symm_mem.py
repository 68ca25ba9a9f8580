"""Collectives over symmetric memory against their torch twins, to the bit, and the protocol under load.

On a GPU (`make test-gpu`) the ranks share it; without one this file runs itself once in Triton's interpreter, where
ranks are processes over shared files. Argument checks need neither.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys

import conftest
import pytest
import symm_jobs as jobs
import torch

from hf_taco_scape.codecs import Codec, get_codec
from hf_taco_scape.collectives import symm_mem

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
PATIENT = 280 if INTERPRETED else 45  # seconds for a job
HERE = pathlib.Path(__file__).parent

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
needs_gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
on_device = [
    pytest.mark.gpu,
    needs_triton,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def marked(test):
    for mark in on_device:
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def ranks():
    """Up to eight ranks."""
    workers = conftest.WorkerPool(4 if INTERPRETED else 8)
    yield workers
    workers.stop()


@marked
def test_two_ranks_fp8(ranks):
    """The shortest end-to-end check: one codec, one shot."""
    ranks.run(2, jobs.against_twin, jobs.one_shot_cases("fp8", torch.bfloat16), timeout_s=PATIENT)


@marked
@pytest.mark.parametrize("dtype", jobs.DTYPES, ids=str)
@pytest.mark.parametrize("name", jobs.CODECS)
def test_one_shot(ranks, name, dtype):
    ranks.run(2, jobs.against_twin, jobs.one_shot_cases(name, dtype), timeout_s=PATIENT)


@marked
@pytest.mark.parametrize("world", [3, 4] if INTERPRETED else [3, 8])
@pytest.mark.parametrize("name", jobs.CODECS)
def test_two_shot(ranks, name, world):
    ranks.run(world, jobs.against_twin, jobs.two_shot_cases(name, world), timeout_s=PATIENT)


@marked
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", jobs.CODECS)
def test_halves(ranks, name, world):
    """Even and uneven pieces, pieces of nothing, sizes that tensor_split would not give."""
    ranks.run(world, jobs.against_twin, jobs.halves_cases(name, world), timeout_s=PATIENT)


@marked
@pytest.mark.parametrize("world", [2, 4])
def test_delayed_ranks_and_all_collectives_in_turn(ranks, world):
    ranks.run(world, jobs.against_twin, jobs.mixed_cases(world), True, timeout_s=2 * PATIENT)


@marked
@pytest.mark.parametrize(("world", "calls"), [(2, 20), (3, 10)] if INTERPRETED else [(2, 1000), (3, 300), (8, 200)])
def test_back_to_back_calls(ranks, world, calls):
    name, numels = ("fp8", [600, 5000, 4096]) if INTERPRETED else ("hadamard-int6", [1000, 200_000, 4096, 70_001])
    seconds = ranks.run(world, jobs.back_to_back, name, numels, calls, timeout_s=2 * PATIENT)
    print(f"{world} ranks: {1e3 * max(seconds):.2f} ms a call")


@needs_gpu
@pytest.mark.gpu
@pytest.mark.slow
def test_a_thousand_calls_of_eight_ranks(ranks):
    ranks.run(8, jobs.back_to_back, "fp8", [1000, 200_000, 4096, 70_001], 1000, 1, timeout_s=400)


@marked
@pytest.mark.skipif(not INTERPRETED, reason="a mutant of the interpreted kernel")
def test_an_inbox_that_is_not_cleared_is_caught(ranks):
    with pytest.raises(AssertionError, match="elements differ|assert empty_inboxes"):
        ranks.run(2, jobs.without_clears, timeout_s=PATIENT)


@marked
def test_the_number_of_calls_may_overflow(ranks):
    assert set(ranks.run(2, jobs.counter_near_overflow, "fp8", timeout_s=PATIENT)) == {-(2**31) + 5}


@marked
def test_a_larger_message_grows_the_workspace(ranks):
    assert ranks.run(2, jobs.growth, timeout_s=PATIENT) == [2, 2]


@needs_gpu
@pytest.mark.gpu
def test_why_not_finds_no_reason(ranks):
    assert ranks.run(2, jobs.why_not_here, timeout_s=PATIENT) == [None, None]


def test_why_not_on_cpu(pool):
    assert pool.run(2, jobs.why_not_on_cpu) == ["rank 0: symmetric memory needs CUDA devices, not cpu"] * 2


def test_why_not_is_agreed(pool):
    assert pool.run(2, jobs.why_not_with_one_odd_rank) == ["rank 1: no symmetric memory in this torch"] * 2


def test_a_group_whose_name_had_other_ranks_is_refused(pool):
    reason = "rank 0: this process had a group of the same name with ranks [0, 1, 2], not [0, 1]: start a new process"
    assert pool.run(2, jobs.why_not_after_another_group) == [reason] * 2


class _Alone:
    """Stands for a workspace where nothing is sent."""

    device, rank, ranks = torch.device("cpu"), 0, 2
    check = staticmethod(lambda: None)


class _Own(get_codec("fp8").__class__.__mro__[2]):
    """A user's codec, which no kernel knows."""

    name, bits_per_element = "own", 8.0
    wire_bytes = encode_rows = decode_rows = lambda self, *args: None


def test_what_cannot_be_sent_is_refused():
    assert issubclass(_Own, Codec) and not isinstance(_Own(), type(get_codec("fp8")))
    x = torch.ones(4)
    with pytest.raises(ValueError, match="codec 'own' has no kernels over symmetric memory: set tp_backend to c10d"):
        symm_mem.all_reduce(x, _Alone, _Own())
    with pytest.raises(ValueError, match="'fp8' sends .*, not float64: cast the tensor first"):
        symm_mem.all_reduce(x.double(), _Alone, "fp8")
    with pytest.raises(ValueError, match="the tensor is on meta, the workspace on cpu"):
        symm_mem.all_reduce(x.to("meta"), _Alone, "fp8")
    for collective in (symm_mem.reduce_scatter, symm_mem.all_gather):
        with pytest.raises(ValueError, match="0-dimensional"):
            collective(x.sum(), _Alone, "fp8")
    with pytest.raises(ValueError, match="sizes .3, 4. do not fit: rank 0 of 2 gathers 4 rows"):
        symm_mem.all_gather(x, _Alone, "fp8", sizes=[3, 4])


def test_nothing_is_sent_for_nothing():
    for collective in (symm_mem.all_reduce, symm_mem.reduce_scatter, symm_mem.all_gather):
        assert collective(torch.ones(0, 3), _Alone, "taco").shape == (0, 3)


@pytest.mark.parametrize("name", jobs.CODECS)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_room_for_every_collective(name, ranks):
    """inbox_bytes covers what each collective asks for, whole and uneven; the defaults cover every codec."""
    asked = []

    class Space:
        device, rank = torch.device("cpu"), 0
        check = staticmethod(lambda: None)

        def inbox(self, nbytes):
            asked.append(nbytes)
            raise InterruptedError

    Space.ranks = ranks
    for numel in (1, 127, 129, 4096, 4097, 100_000):
        enough = symm_mem.inbox_bytes(numel, ranks, name, torch.bfloat16)
        x = torch.ones(numel, dtype=torch.bfloat16)
        calls = [(symm_mem.all_reduce, x), (symm_mem.reduce_scatter, x)]
        for collective, tensor in calls + [(symm_mem.all_gather, x[: max(numel // ranks, 1)])] * (numel >= ranks):
            with pytest.raises(InterruptedError):
                collective(tensor, Space(), name)
        assert max(asked) <= enough
        assert numel < 100_000 or enough <= symm_mem.inbox_bytes(numel, ranks)
        asked.clear()


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 3])
def test_replays_of_a_cuda_graph_with_new_data(ranks, world):
    ranks.run(world, jobs.graph_replays, "fp8", 30, timeout_s=PATIENT)


@needs_gpu
@pytest.mark.gpu
def test_growth_while_a_graph_is_captured_raises(ranks):
    for text in ranks.run(2, jobs.growth_under_capture, timeout_s=PATIENT):
        assert "cannot grow while a CUDA graph is captured: call workspace.reserve(" in text


@needs_gpu
@pytest.mark.gpu
def test_two_groups_on_two_streams_and_two_streams_of_one_group(ranks):
    ranks.run(2, jobs.two_groups_on_two_streams, 20, timeout_s=PATIENT)
    ranks.run(2, jobs.one_group_on_two_streams, 40, timeout_s=PATIENT)


@needs_gpu
@pytest.mark.gpu
def test_a_rank_that_does_not_come_is_an_error_not_a_hang():
    workers = conftest.WorkerPool(2)  # of its own: the kernel's end takes the CUDA context along
    try:
        text, _ = workers.run(2, jobs.a_peer_stays_away, timeout_s=60)
        assert "rank 0 of 2 waited 0.5 s for a peer's message" in text
    finally:
        workers.stop()


@needs_gpu
@pytest.mark.gpu
def test_sizes_do_not_lead_to_builds(ranks):
    assert ranks.run(2, jobs.builds_by_size, timeout_s=PATIENT) == [0, 0]


@needs_gpu
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_more_than_two_to_the_31_elements(ranks, world):
    ranks.run(world, jobs.huge, "hadamard-int6", 2**31 + 8, timeout_s=200)


@pytest.mark.slow
@needs_triton
def test_kernels_in_the_interpreter():
    if INTERPRETED:
        pytest.skip("this is that run")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    # the interpreter takes seconds a message: codecs of every kind once, and what only the protocol can get wrong
    some = "(one_shot and bfloat16 and (none or taco or int6)) or (two_shot and 3 and (none or taco or int4))"
    some += " or (halves and 3 and (fp8 or taco)) or (back_to_back and 3) or overflow or grows or caught"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "gpu", "-k", some, __file__]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent, env=environment, timeout=590)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
