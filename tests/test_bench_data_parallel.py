"""recipes/bench_data_parallel.py, step_parts.py: wrong averages are refused, spans are read right, rows come."""

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

import bench_data_parallel as bench
import results
from hf_taco_scape.sync.grad_sync import GradSync
from hf_taco_scape.sync.overlap import OverlappedAverage
from step_parts import Span, serial_parts, spans_of_trace, summary, traced_spans

ROOT = Path(__file__).parent.parent
TOKENS = torch.randint(0, 512, (4096,), generator=torch.Generator().manual_seed(0))


def _ranks() -> SimpleNamespace:
    return SimpleNamespace(
        device=torch.device("cpu"), rank=dist.get_rank(), ranks=dist.get_world_size(), dtype=torch.float32
    )


def _check(mutant: str | None) -> str:
    finish, mean_of = OverlappedAverage.finish, GradSync.mean_of

    def undivided(self):
        armed = self._armed
        finish(self)
        if armed:
            for p in self.parameters:
                p.grad.mul_(self.ranks)

    if mutant == "dense":
        OverlappedAverage.finish = undivided
    if mutant == "scape":
        GradSync.mean_of = lambda self, slot: mean_of(self, slot) * (1 + 1e-3)
    try:
        bench.assert_right(_ranks(), TOKENS, count=3)
    except AssertionError as error:
        return str(error)
    finally:
        OverlappedAverage.finish, GradSync.mean_of = finish, mean_of
    return "right"


def test_wrong_averages_are_refused_before_they_are_timed(pool):
    assert pool.run(2, _check, None) == ["right"] * 2
    assert all(answer.startswith("dense: loss") for answer in pool.run(2, _check, "dense"))
    assert all(answer.startswith("scape-99-paper: ") for answer in pool.run(2, _check, "scape"))


def _parts_and_spans() -> tuple[dict, dict, set]:
    loop = bench.make_loop(_ranks(), "scape-99", "gpt2-tiny")
    feed = bench.e2e.Batches(TOKENS, SimpleNamespace(sequence=32, batch=2), torch.device("cpu"), dist.get_rank(), 2)
    before = vars(GradSync)["_pack_sparse"]
    loop.step(feed.take(1))

    def steps():
        for _ in range(3):
            loop.step(feed.take(1))

    with serial_parts(torch.device("cpu")) as seconds:
        assert vars(GradSync)["_pack_sparse"] is not before
        steps()
    spans = traced_spans(torch.device("cpu"), steps)
    assert vars(GradSync)["_pack_sparse"] is before, "the product is left as it was"
    return dict(seconds), summary(spans, seconds["mask exchange"]), {s.what for s in spans}


def test_parts_of_a_real_step(pool):
    for seconds, hidden, names in pool.run(2, _parts_and_spans):
        assert set(seconds) == {"pack", "select", "wire", "mask exchange", "update"}
        assert all(value > 0 for value in seconds.values())
        assert {"wire start", "wire finish", "mask exchange init", "mask exchange wait", "update update"} <= names
        assert hidden["select_beside"] == 1, "the selection has a thread of its own"
        assert 0 <= hidden["select_hidden"] <= 1 and 0 <= hidden["mask_hidden"] <= 1


def _spans(select_lane: int = 20, wait: float = 5) -> list[Span]:
    """Two steps of 1,000 us: message 100-200, selection 120-180, mask waited for at the start."""
    spans = []
    for start in (0, 1000):
        spans += [Span("kernel", 7, start + 10, start + 100), Span("kernel", 7, start + 200, start + 300)]
        spans += [Span("wire start", 1, start + 100, start + 101), Span("wire finish", 1, start + 150, start + 200)]
        spans += [Span("select kernel", select_lane, start + 120, start + 220)]
        spans += [Span("mask exchange wait", 1, start + 10, start + 10 + (wait if start else 0))]
    return spans


def test_summary_tells_hidden_from_exposed():
    good = summary(_spans(), 100e-6)
    assert good["select_beside"] == 1 and good["mask_hidden"] == pytest.approx(0.95)
    assert good["select_hidden"] == pytest.approx(0.8) and good["wire_us"] == 100 and good["select_us"] == 100
    assert summary(_spans(select_lane=7), 100e-6)["select_beside"] == 0
    assert summary(_spans(wait=300), 100e-6)["mask_hidden"] == 0


def test_a_gather_on_an_idle_stream_is_exposed():
    # over NCCL the host does not wait: half of the gather runs beside the step's kernels
    gather = Span("nccl kernel", 30, 1012, 1014)
    late = Span("nccl kernel", 30, 1004, 1012)
    assert summary([*_spans(), gather], 100e-6)["mask_wait_us"] == 5
    assert summary([*_spans(), gather, late], 100e-6)["mask_wait_us"] == 5, "it is not waited for there"
    idle = [span for span in _spans() if not (span.what == "kernel" and 1000 < span.begin < 1100)]
    assert summary([*idle, gather], 100e-6)["mask_wait_us"] == 7


def test_trace_events_become_spans():
    def event(cat, name, ts, dur, **args):
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": args}

    events = [
        event("user_annotation", "scape step: select choose", 10, 20),
        event("user_annotation", "something else", 0, 100),
        event("cuda_runtime", "cudaLaunchKernel", 15, 1, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 40, 1, correlation=2),
        event("kernel", "radix", 50, 5, correlation=1, stream=20),
        event("kernel", "gemm", 55, 5, correlation=2, stream=7),
        event("kernel", "ncclDevKernel_AllReduce", 55, 5, correlation=3, stream=9),
        {"ph": "M", "name": "process_name"},
    ]
    assert {(s.what, s.lane) for s in spans_of_trace(events)} == {
        ("select choose", 1), ("select kernel", 20), ("kernel", 7), ("nccl kernel", 9),
    }  # fmt: skip


def test_a_run_appends_rows(tmp_path):
    table = tmp_path / "results.csv"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port"]
    command += [str(free_port()), str(ROOT / "recipes/bench_data_parallel.py"), "--results", str(table)]
    command += ["--device", "cpu", "--model", "gpt2-tiny", "--sequence", "32", "--batch", "2", "--tokens", "64", "128"]
    command += ["--rounds", "2", "--steps", "2", "--trace_steps", "2", "--link", "loopback", "--providers"]
    providers = ["no-sync", "ddp-adamw", "ddp-adams", "dense", "scape-90", "scape-99-paper"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command + providers, capture_output=True, text=True, env=env, timeout=240)
    assert run.returncode == 0, run.stderr
    assert "x ddp-adams" in run.stdout and "mask_hidden" in run.stdout
    with table.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == results.COLUMNS
    for x in ("64", "128"):
        timed = [r["provider"] for r in rows if (r["case"], r["metric"], r["x"]) == ("step", "time", x)]
        assert timed == providers
    sent = {r["provider"]: float(r["p50"]) for r in rows if r["metric"] == "sent"}
    assert sent["no-sync"] == 0 and sent["ddp-adams"] == 1 and sent["dense"] == pytest.approx(1, abs=1e-3)
    assert 0.1 < sent["scape-90"] < 0.16 and 0.01 < sent["scape-99-paper"] < 0.05
    assert {json.loads(r["config"])["model"] for r in rows} == {"gpt2-tiny"}
    assert not any(r["case"] == "memory" for r in rows), "there is no GPU to read it from"


def test_tokens_have_to_fill_micro_batches(capsys):
    with pytest.raises(SystemExit):
        bench.parse_arguments(["--tokens", "100", "--sequence", "32", "--batch", "2"])
    assert "no multiple of 2 rows of 32 tokens" in capsys.readouterr().err
