"""Signatures of machines: what belongs to them, what does not, and where tables are kept."""

from pathlib import Path

import pytest
import torch

from hf_taco_scape.collectives import machine
from hf_taco_scape.collectives.machine import cache_file, cache_folder, differences, facts, nvlinks, signature

CPU = torch.device("cpu")
JOB = {"codecs": ["taco"]}


def test_only_variables_that_change_links_belong_to_a_signature(monkeypatch):
    before = signature(CPU, JOB, [])
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_COMM_ID", "MASTER_PORT", "RANK"):
        monkeypatch.setenv(name, "1234")
    assert signature(CPU, JOB, []) == before
    monkeypatch.setenv("NCCL_SHM_DISABLE", "1")
    after = signature(CPU, JOB, [])
    assert differences(before, after) == ["hardware.variables"]
    assert cache_file(before) != cache_file(after)


def test_hosts_are_numbered_not_named(monkeypatch):
    before = signature(CPU, JOB, [])
    monkeypatch.setattr(machine.socket, "gethostname", lambda: "another-node-of-the-same-kind")
    assert signature(CPU, JOB, []) == before


def test_other_sources_are_another_signature(monkeypatch):
    before = facts(CPU)
    monkeypatch.setattr(machine, "_sources_digest", lambda: "edited")
    assert {k for k in before["software"] if facts(CPU)["software"][k] != before["software"][k]} == {"sources"}


def test_differences_are_named():
    one = {"hardware": [{"device": "a"}, {"device": "a"}], "software": [{"torch": "1"}], "job": {"codecs": 1}}
    assert differences(one, one) == []
    other = {"hardware": [{"device": "a"}], "software": [{"torch": "2"}], "job": {"codecs": 1, "ranks": 2}}
    assert differences(one, other) == ["hardware (number of ranks)", "software.torch", "job.ranks"]


@pytest.mark.parametrize(
    "variables,folder",
    [
        ({"HF_HOME": "/data/hf"}, "/data/hf/hf_taco_scape"),
        ({"HF_HOME": "~/hf"}, "{home}/hf/hf_taco_scape"),
        ({"XDG_CACHE_HOME": "/scratch"}, "/scratch/huggingface/hf_taco_scape"),
        ({}, "{home}/.cache/huggingface/hf_taco_scape"),
    ],
)
def test_the_cache_lies_in_hugging_faces_folder(monkeypatch, variables, folder):
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder.format(home=Path.home()))


def test_nvlinks_are_unknown_where_torch_does_not_tell(monkeypatch):
    def no_nvml(device_type, kind):
        raise RuntimeError("NVML cannot be loaded")

    class Connectivity:
        matrix = [[0, 18], [18, 0]]

    places = torch._C._distributed_c10d
    monkeypatch.setattr(places, "_detect_dma_connectivity", no_nvml, raising=False)
    assert nvlinks(1) is None
    monkeypatch.setattr(places, "_detect_dma_connectivity", lambda *a: Connectivity, raising=False)
    assert nvlinks(1) == [18, 0]
    monkeypatch.delattr(places, "_detect_dma_connectivity")
    assert nvlinks(1) is None
