"""What only a CUDA device can show; `make test-gpu`. Skipped without one."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import training

from hf_taco_scape.codecs import get_codec, list_codecs

HERE = pathlib.Path(__file__).parent
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def launch(processes: int, folder: pathlib.Path, **options) -> list[dict]:
    """Run `training.run(**options)` under torchrun and return the ranks' results."""
    folder.mkdir()
    command = [sys.executable, str(HERE / "launched.py"), json.dumps(options), str(folder)]
    if processes > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(processes)))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=HERE, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(processes)]


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", list_codecs())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_device_and_host_twins_agree(name, dtype):
    """The decoder must give the same bits everywhere; encoders may differ by one step where a sum rounds otherwise."""
    codec = get_codec(name)
    x = (torch.randn(128 * 64 + 37, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    wire, device_wire = codec.encode(x), codec.encode(x.cuda())
    assert (device_wire.cpu() != wire).float().mean() < 1e-3
    decoded = codec.decode(device_wire, x.numel(), dtype)
    assert torch.equal(decoded.cpu(), codec.decode(device_wire.cpu(), x.numel(), dtype))


@needs_two
@pytest.mark.multi_gpu
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize("tp", [1, 2])
def test_two_gpus_equal_one(tmp_path, family, tp):
    options = dict(family=family, gradient_accumulation_steps=2)
    (reference,) = launch(1, tmp_path / "one", tp_size=1, **options)
    results = launch(2, tmp_path / "two", tp_size=tp, **options)
    for got in results:
        training.assert_equal_runs(reference, got)
    assert torch.equal(results[0]["weights"], results[1]["weights"])


@needs_two
@pytest.mark.multi_gpu
@pytest.mark.parametrize("codec", ["taco", "hadamard-int6"])
def test_compressed_training_on_two_gpus(tmp_path, codec):
    options = dict(family="qwen3", bf16=True, gradient_checkpointing=True)
    (reference,) = launch(1, tmp_path / "one", tp_size=1, **options)
    results = launch(2, tmp_path / "two", tp_size=2, tp_codec=codec, check_replicas=1, **options)
    assert torch.equal(results[0]["weights"], results[1]["weights"])
    for got in results:
        training.assert_equal_runs(reference, got, loss=0.02, grad_norm=0.2, weights=0.05)
