"""recipes/bench_dispatch.py: the promise is checked against the best dense route, and every route is timed."""

import pytest
import torch
import torch.distributed as dist

import bench_dispatch
from hf_taco_scape.collectives.dispatch import Communicator
from hf_taco_scape.collectives.routes import Route


@pytest.mark.parametrize(
    "auto,dense,over",
    [(100.0, [100.0, 120.0], 0.0), (103.0, [100.0, 120.0], 1.5), (50.0, [100.0], -25.0), (10.4, [10.0], 0.8)],
)
def test_excess(auto, dense, over):
    found = {f"dense {i}": (None, torch.tensor([us])) for i, us in enumerate(dense)}
    found |= {"auto forward": (None, torch.tensor([auto - 1])), "auto backward": (None, torch.tensor([auto]))}
    assert bench_dispatch.excess(found) == pytest.approx(over, abs=1e-3)


def _compared():
    comm = Communicator(dist.group.WORLD, "fp8", "none", min_bytes=4096)
    cpu = torch.device("cpu")
    return [bench_dispatch.compare(comm, n, torch.float32, cpu, repeats=3) for n in (1024, 8192)]


def test_every_route_is_timed_on_the_slowest_rank(pool):
    first, second = pool.run(2, _compared)
    for a, b in zip(first, second, strict=True):
        assert a.keys() == b.keys() == {"auto forward", "auto backward", "dense c10d"}
        assert all(torch.equal(a[name][1], b[name][1]) and (a[name][1] > 0).all() for name in a)
    dense, packed = Route("none"), Route("fp8", "c10d", 1)
    assert [run["auto forward"][0] for run in first] == [dense, packed]
    assert all(run["auto backward"][0] == run["dense c10d"][0] == dense for run in first)
