"""recipes/bench_tensor_parallel.py: wrong messages are refused, times become gains and bounds, a run appends rows."""

import csv
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import free_port

import bench_tensor_parallel as bench
import results
from hf_taco_scape.codecs import get_codec
from hf_taco_scape.collectives.dispatch import Communicator

ROOT = Path(__file__).parent.parent
TOKENS = torch.randint(0, 512, (4096,), generator=torch.Generator().manual_seed(0))


def _ranks() -> SimpleNamespace:
    return SimpleNamespace(
        device=torch.device("cpu"), rank=dist.get_rank(), ranks=dist.get_world_size(), dtype=torch.float32
    )


def _first(provider: str, factor: float = 1.0, drift: float = 0.0) -> tuple[float, float] | str:
    """Loss and norm of a first step whose backward messages are `factor` too large and drift apart, or the refusal."""
    send = Communicator.all_reduce

    def changed(self, x, backward=False):
        return send(self, x, backward) * (factor if backward else 1.0) * (1 + drift * dist.get_rank())

    Communicator.all_reduce = changed
    try:
        loop = bench.make_loop(_ranks(), provider, "gpt2-tiny")
        feed = bench.e2e.Batches(TOKENS, SimpleNamespace(sequence=32, batch=2), torch.device("cpu"))
        found = bench.first_step(_ranks(), provider, loop, feed)
        bench.assert_messages_right(_ranks(), provider, loop)
        return found
    except AssertionError as error:  # on every rank: nobody waits for the others
        return str(error)
    finally:
        Communicator.all_reduce = send


@pytest.mark.parametrize("ranks", [2, 3])
def test_wrong_messages_are_refused_before_they_are_timed(pool, ranks):
    dense = pool.run(ranks, _first, "none")
    found = pool.run(ranks, _first, "int6-int4")
    assert len(set(dense)) == 1 and len(set(found)) == 1
    bench.assert_near("int6-int4", found[0], dense[0])
    with pytest.raises(AssertionError, match="gradient norm .* off dense's"):
        bench.assert_near("int6-int4", (found[0][0], 2 * found[0][1]), dense[0])
    assert all(" % of taco is over the bound" in answer for answer in pool.run(ranks, _first, "taco", 1.1))
    drifted = pool.run(ranks, _first, "taco", 1.0, 1e-3)
    assert all("taco: loss and norm differ between ranks" in answer for answer in drifted)


def _messages() -> Counter:
    loop = bench.make_loop(_ranks(), "none", "gpt2-tiny")
    feed = bench.e2e.Batches(TOKENS, SimpleNamespace(sequence=32, batch=2), torch.device("cpu"))
    return bench.messages_of(loop, feed), bench.messages_of(loop, feed)


def test_the_messages_of_a_step(pool):
    numel, layers = 2 * 32 * 64, 2
    kinds = {(numel, torch.float32, backward): 2 * layers for backward in (False, True)}
    assert pool.run(2, _messages) == [(kinds, kinds)] * 2


def test_bytes_of_one_and_two_shots():
    codec, dense, fp32 = get_codec("fp8"), get_codec("none"), torch.float32
    assert bench._sent(dense, 1000, fp32, 2) == 4000 and bench._sent(dense, 1000, fp32, 4) == 6000
    assert bench._sent(codec, 1000, fp32, 2) == codec.wire_bytes(1000, fp32)
    assert bench._sent(codec, 1000, fp32, 4) == 6 * codec.wire_bytes(256, fp32)


def _run(tmp_path, *arguments) -> tuple[list[dict], str]:
    table = tmp_path / "results.csv"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port"]
    command += [str(free_port()), str(ROOT / "recipes/bench_tensor_parallel.py"), "--results", str(table)]
    command += ["--device", "cpu", "--sequence", "32", "--batch", "2", "--rounds", "2", "--steps", "1", *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)
    assert run.returncode == 0, run.stderr
    with table.open(encoding="utf-8") as file:
        return list(csv.DictReader(file)), run.stdout


def test_a_run_appends_rows(tmp_path):
    providers = ["none", "taco", "int6-int4", "transformers"]
    rows, printed = _run(tmp_path, "--models", "qwen3-tiny", "--providers", *providers)
    assert "8 all-reduces are" in printed and "of bound" in printed
    assert list(rows[0]) == results.COLUMNS and {r["x"] for r in rows} == {"64"}
    values = {(r["provider"], r["metric"]): float(r["p50"]) for r in rows}
    for name in providers:
        assert values[name, "rate"] > 0 and values[name, "time"] > 0
    assert values["none", "speedup"] == 1 and values["none", "bound"] == pytest.approx(1, rel=1e-4)
    assert (
        values["taco", "sent"] == pytest.approx(8.5 / 32, rel=1e-4)
        and values["int6-int4", "sent"] < values["taco", "sent"]
    )
    assert values["taco", "share of bound"] > 0 and ("transformers", "bound") not in values


def test_the_dense_step_is_needed(capsys):
    with pytest.raises(SystemExit):
        bench.parse_arguments(["--providers", "taco"])
    assert "--providers has to begin with none" in capsys.readouterr().err
