"""recipes/bench_collectives.py: its checks refuse wrong codecs, and a tiny run appends complete rows."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import free_port

import bench_collectives
import results
from hf_taco_scape.codecs.integer import IntegerCodec

ROOT = Path(__file__).parent.parent


class Drifting(IntegerCodec):
    """Decodes a little differently on each rank."""

    def decode_rows(self, wire, numel, dtype):
        return super().decode_rows(wire, numel, dtype) * (1 + 1e-6 * dist.get_rank())


class Coarse(IntegerCodec):
    """Claims to be hadamard-int8 with the error of four bits."""

    def quantise(self, scaled):
        return super().quantise((scaled / 16).round_() * 16)


def _check(kind):
    codec = kind(bits=8, hadamard=True)
    x = torch.randn(4096, generator=torch.Generator().manual_seed(dist.get_rank()))
    return bench_collectives.assert_right(SimpleNamespace(ranks=dist.get_world_size()), codec, x)


@pytest.mark.parametrize("ranks", [2, 3])
def test_wrong_codecs_are_refused_before_they_are_timed(pool, ranks):
    assert all(0.5 < error < 1.1 for error in pool.run(ranks, _check, IntegerCodec))
    with pytest.raises(AssertionError, match="hadamard-int8: the sum of 4096 elements differs between ranks"):
        pool.run(ranks, _check, Drifting)
    with pytest.raises(AssertionError, match="hadamard-int8: error .* over the bound"):
        pool.run(ranks, _check, Coarse)


class _Symmetric:
    """In the place of symm_bench.SymmBench: the process group, and a clock that always shows the same."""

    def all_reduce(self, codec, meter=None):
        return lambda x: bench_collectives.all_reduce(x, None, codec, meter)

    def torch_two_shot(self, xs):
        copies = [x.clone() for x in xs]

        def restore():
            for copy, x in zip(copies, xs, strict=True):
                copy.copy_(x)

        def call(i):
            dist.all_reduce(copies[i % len(copies)])
            return copies[i % len(copies)]

        return call, restore

    def graph_microseconds(self, call, calls, repeats, restore=None):
        call(0)
        return torch.tensor([2.0] * repeats, dtype=torch.float64)


def _rows_over_symmetric_memory():
    arguments = SimpleNamespace(
        codecs=["fp8"], repeats=2, warmup=1, graph_calls=4, link="here", link_gbs=1.0, memory_gbs=None
    )
    bench = SimpleNamespace(
        symm=_Symmetric(), args=arguments, backend="gloo", ranks=2, dtype=torch.float32, device=torch.device("cpu")
    )
    bench.microseconds = lambda call: (call(0), torch.tensor([4.0, 4.0], dtype=torch.float64))[1]
    xs = [torch.randn(4096, generator=torch.Generator().manual_seed(10 * dist.get_rank() + i)) for i in range(2)]
    found = [{"case": "all_reduce", "provider": "dense", "samples": torch.tensor([8.0, 8.0]).double()}]
    found[0] |= {"sent": 1, "error": 0.0}
    found += bench_collectives.measure_symmetric_memory(bench, xs)
    return bench_collectives.to_rows(bench, [call | {"x": xs[0].nbytes} for call in found])


def test_rows_over_symmetric_memory(pool):
    rows, _ = pool.run(2, _rows_over_symmetric_memory)
    seen = {(row["case"], row["provider"], row["metric"]): row for row in rows}
    providers = ["torch two_shot", "symm none", "symm fp8"]
    for provider in providers:
        assert seen["all_reduce", provider, "speedup"]["p50"] == 2.0
        assert seen["all_reduce graph", provider, "time"]["p50"] == 2.0
        assert ("all_reduce graph", provider, "speedup") not in seen  # gloo has no graph to compare with
        assert seen["all_reduce graph", provider, "share of limit"]["unit"] == "of 1 GB/s"
    assert {row["provider"] for row in rows} == {"dense", *providers}
    assert seen["all_reduce", "symm fp8", "time"]["config"]["sent_bytes"] == 4096 + 64


def test_sizes():
    assert [bench_collectives.parse_size(s) for s in ("100", "2K", "1.5M", "1G")] == [100, 2048, 1572864, 2**30]


def test_a_run_appends_rows(tmp_path):
    table = tmp_path / "results.csv"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        str(free_port()),
    ]
    command += [str(ROOT / "recipes/bench_collectives.py"), "--results", str(table), "--repeats", "3", "--warmup", "1"]
    command += ["--sizes", "1K", "5000", "--codecs", "taco", "hadamard-int4", "--device", "cpu", "--link-gbs", "2"]
    run = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=240
    )
    assert run.returncode == 0, run.stderr
    assert "hadamard-int4" in run.stdout
    with table.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == results.COLUMNS and len(rows) == 2 * (4 + 2 * (4 + 2 * 2))
    for row in rows:
        assert float(row["p20"]) <= float(row["p50"]) <= float(row["p80"]) and row["ranks"] == "2"
        assert row["x"] in ("1024", "5000") and json.loads(row["config"])["dtype"] == "float32"
    sent = {json.loads(r["config"])["sent_bytes"] for r in rows if r["case"] == "all_reduce" and r["x"] == "5000"}
    assert sent == {5000, 1250 + 80, 10 * 66}


def test_rows_are_checked_and_appended(tmp_path):
    row = dict.fromkeys(set(results.COLUMNS) - {"torch", "date", "commit"}, 1) | {"config": {"a": 1}}
    path = tmp_path / "r.csv"
    for _ in range(2):
        results.append_rows([row], path)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 3 and lines[0].startswith("bench,case,provider") and torch.__version__ in lines[2]
    with pytest.raises(ValueError, match="ranks"):
        results.append_rows([{k: v for k, v in row.items() if k != "ranks"}], path)
