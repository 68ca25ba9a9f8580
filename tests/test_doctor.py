"""The doctor finds what is broken, names the fix, and says so with its exit code."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator

from hf_taco_scape import diagnosis, doctor
from hf_taco_scape.codecs import codec, register_codec
from hf_taco_scape.codecs.fp8 import Fp8Codec
from hf_taco_scape.collectives import crossover
from hf_taco_scape.diagnosis import Finding, check_devices, check_hooks, check_versions, examine_links, versions

CPU = torch.device("cpu")
NEW = {"name": "H100", "capability": "sm90", "memory_gib": 80.0, "e4m3": True}
OLD = {"name": "A100", "capability": "sm80", "memory_gib": 80.0, "e4m3": False}


def problems(findings):
    return {one.what: f"{one.detail} | {one.fix}" for one in findings if one.level == "problem"}


def _run(*arguments, launcher=(), folder):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD", "LOCAL", "MASTER"))}
    command = [sys.executable, "-m", *launcher, *(["-m"] if launcher else []), "hf_taco_scape.doctor", *arguments]
    environment |= {"HF_HOME": str(folder), "COLUMNS": "160", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)


def test_two_ranks_are_started_and_measured(tmp_path):
    done = _run("--ranks", "2", "--json", "--tp_codec", "int6-int4", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ranks"] == report["tp_size"] == 2
    assert report["versions"]["torch"] == torch.__version__
    assert {one["level"] for one in report["findings"]} <= {"ok", "note"}
    (right,) = (one for one in report["findings"] if one["what"] == "all-reduce")
    assert right["detail"].endswith("none, taco, fp8, int8, hadamard-int8, hadamard-int6, hadamard-int4")
    for one in report["auto"]:
        assert one["us"] <= one["best_dense_us"] * 1.02 + 0.5
        assert one["bytes"] >= crossover.SMALLEST_COMPRESSED or one["route"].startswith("dense")
    if not torch.cuda.is_available():
        assert "CUDA devices" in report["symm_mem"]["reason"]
    assert len(list((tmp_path / "hf_taco_scape").iterdir())) == 1, "a training start would measure again"


@pytest.mark.slow
def test_under_accelerate_launch_one_rank_prints(tmp_path):
    launcher = ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2")
    done = _run(launcher=launcher, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("private hooks") == 1 and "auto, tp 2 of 2 ranks" in done.stdout


def _broken(monkeypatch, capsys, finding, *arguments):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(doctor, "_start_ranks", lambda args, ranks: ({}, [finding]))
    code = doctor.main(["--ranks", "2", *arguments])
    return code, capsys.readouterr().out


def test_a_problem_is_the_exit_code(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    problem = Finding("problem", "codec fp8", "sums are wrong by 40.0%", "choose another")
    code, out = _broken(monkeypatch, capsys, problem)
    assert code == 1 and "sums are wrong by 40.0%" in out and "choose another" in out
    code, out = _broken(monkeypatch, capsys, problem, "--json")
    assert code == 1 and vars(problem) in json.loads(out)["findings"]
    assert _broken(monkeypatch, capsys, Finding("note", "links", "slow"))[0] == 0


def test_one_process_measures_nothing_and_says_how_to(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert doctor.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (links,) = (one for one in report["findings"] if one["what"] == "links")
    assert "--ranks 2" in links["fix"] and "auto" not in report


def test_too_many_ranks_for_the_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    _, found = doctor._start_ranks(doctor._parse(["--ranks", "2"]), 2)
    assert "2 ranks need 2 GPUs, there are 1 | --ranks 1" in problems(found)["ranks"]
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "3")
    _, found = doctor._examine_as_rank(doctor._parse([]))
    assert "rank 3 of this node has no GPU: there are 1" in problems(found)["ranks"]


def test_ranks_that_die_are_a_problem(monkeypatch, capfd):
    """MASTER_ADDR of the children is fixed; a port that cannot be is what goes wrong here."""
    monkeypatch.setattr(doctor, "_free_port", lambda: 99999)
    report, found = doctor._start_ranks(doctor._parse(["--ranks", "2"]), 2)
    assert report == {} and problems(found).keys() == {"ranks"}
    assert "99999" in capfd.readouterr().err


def test_versions_that_are_too_old_or_missing():
    have = versions()
    assert [one.level for one in check_versions(have)] == ["ok"]
    wrong = problems(check_versions({**have, "python": "3.10.1", "transformers": "5.9.0", "accelerate": None}))
    assert wrong == {
        "python": "3.10.1 is not supported | use 3.11 to below 3.14",
        "transformers": "5.9.0 is older than 5.17 | pip install 'transformers>=5.17'",
        "accelerate": "is not installed | pip install 'accelerate>=1.15'",
    }


def test_a_moved_hook_is_a_problem(monkeypatch):
    assert check_hooks().level == "ok"
    monkeypatch.delattr(Accelerator, "gather")
    found = check_hooks()
    assert found.level == "problem" and "Accelerator.gather" in found.detail


def test_gpus_without_e4m3():
    """triton-lang/triton #4319: a problem for codecs that need it, else worth a note; other codecs are named."""
    both = [["", "host"], ["host", ""]]
    assert [one.level for one in check_devices([NEW, NEW], [["", "NV18"], ["NV18", ""]], ("taco", "taco"))] == ["ok"]
    for codecs in (("taco", "taco"), ("hadamard-int8", "fp8")):
        wrong = problems(check_devices([NEW, OLD], both, codecs))
        assert "A100 (sm80) cannot convert" in wrong["E4M3"] and "hadamard-int8" in wrong["E4M3"]
    found = check_devices([OLD, OLD], both, ("hadamard-int6", "hadamard-int4"))
    assert [(one.what, one.level) for one in found] == [("E4M3", "note"), ("links", "note")]


class Drifting(Fp8Codec):
    """Decodes the same messages to other bits on each rank."""

    name = "drifting"

    def decode_rows(self, wire, numel, dtype):
        return super().decode_rows(wire, numel, dtype) + 1e-3 * dist.get_rank()


class Lossy(Fp8Codec):
    name = "lossy"

    def decode_rows(self, wire, numel, dtype):
        return 0.5 * super().decode_rows(wire, numel, dtype)


def _try_codecs():
    return [diagnosis._try_codec(codec, dist.group.WORLD, CPU) for codec in (Fp8Codec(), Drifting(), Lossy())]


def test_codecs_that_are_wrong_here_are_found(pool):
    for right, drifting, lossy in pool.run(2, _try_codecs):
        assert right.level == "ok"
        assert drifting.level == lossy.level == "problem"
        assert "different bits" in drifting.detail and "wrong by 50" in lossy.detail


def _examined(tp_size, folder, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(folder))
        patch.setattr(crossover, "SIZES", crossover.SIZES[:4])
        return examine_links(
            CPU, tp_size, {"codec": "fp8", "codec_backward": None, "backend": "auto", **options}, True
        )


def test_what_cannot_start_is_a_problem(pool, tmp_path):
    for report, found in pool.run(2, _examined, 2, tmp_path, backend="symm_mem"):
        assert "tp_backend symm_mem cannot start" in problems(found)["routes"] and "auto" not in report
    for report, found in pool.run(2, _examined, 3, tmp_path):
        assert "tp_size 3 does not divide the 2 process(es)" in problems(found)["ranks"] and report == {}


def test_without_a_codec_there_is_nothing_to_choose(pool, tmp_path):
    for report, found in pool.run(2, _examined, 2, tmp_path, codec="none"):
        assert problems(found) == {} and report["auto"] == []


def _examined_with_a_codec_of_rank_1(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "_FACTORIES", dict(codec._FACTORIES))
        if dist.get_rank() == 1:
            register_codec("of rank 1", Fp8Codec)
        return _examined(2, folder)


def test_a_codec_of_some_ranks_is_a_problem_and_no_hang(pool, tmp_path):
    for _, found in pool.run(2, _examined_with_a_codec_of_rank_1, tmp_path):
        assert problems(found)["codec of rank 1"].startswith("not known to rank 0 | call register_codec")


def test_groups_within_the_world_are_examined_alike(pool, tmp_path):
    results = pool.run(4, _examined, 2, tmp_path)
    (report, found), *others = results
    assert problems(found) == {} and all(one[0]["routes"] == report["routes"] for one in others)
    assert {one["operation"] for one in report["auto"]} == {"all_reduce", "reduce_scatter", "all_gather"}
