"""A dead or stuck rank ends the others with an error naming it."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from hf_taco_scape.parallel.heartbeat import Heartbeat

SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from hf_taco_scape.parallel.heartbeat import Heartbeat
dist.init_process_group("gloo")
rank, how = dist.get_rank(), sys.argv[1]
heartbeat = Heartbeat(3.0)
with heartbeat.explain():
    for step in range(1000):
        if rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGSTOP if how == "stuck" else signal.SIGKILL)
        dist.all_reduce(torch.ones(3))
        time.sleep(0.05)
"""


@pytest.mark.parametrize("how", ["stuck", "dead"])
def test_the_others_end_and_name_the_rank(tmp_path, how):
    from conftest import free_port

    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    start = time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), how],
            env={**environment, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        for rank in (0, 2):
            _, errors = ranks[rank].communicate(timeout=90)
            assert ranks[rank].returncode != 0
            assert "rank 1 (" in errors and f"process {ranks[1].pid})" in errors and "no sign of life" in errors, (
                errors
            )
    finally:
        for process in ranks:
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert time.monotonic() - start < 80


def _finish_early():
    dead = []
    heartbeat = Heartbeat(1.0, on_dead=dead.append)
    if dist.get_rank() == 0:
        heartbeat.stop()
        time.sleep(3)
    else:
        time.sleep(3)  # rank 0 said goodbye: no alarm
        heartbeat.stop()
    with pytest.raises(RuntimeError, match="own fault"), heartbeat.explain():
        raise RuntimeError("own fault")
    again = Heartbeat(1.0, on_dead=dead.append)  # a second run in one process
    time.sleep(2)
    again.stop()
    dist.all_reduce(torch.ones(1))
    return dead


def _fail():
    dead = []
    heartbeat = Heartbeat(1.0, on_dead=dead.append)
    if dist.get_rank() == 0:
        heartbeat.stop(finished=False)  # as after an error of its own
    time.sleep(4)
    heartbeat.stop()
    return dead


def test_a_failed_rank_that_fell_silent_is_named(pool):
    failed, other = pool.run(2, _fail)
    assert failed == [] and "rank 0 (" in other[0]


def test_a_finished_rank_is_not_a_dead_one(pool):
    assert pool.run(2, _finish_early) == [[], []]


LOOP = """
import os, signal, sys
import tiny, torch
from hf_taco_scape import TacoScapeAccelerator
accelerator = TacoScapeAccelerator(tp_size=2, tp_codec="fp8", tp_min_bytes=0, heartbeat_timeout=3.0)
model = tiny.build("gpt2")
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for step in range(1000):
    if accelerator.state.process_index == 1 and step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator.backward(model(**tiny.batch(2, step)).loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_an_own_loop_names_the_dead_rank(tmp_path):
    from conftest import free_port

    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    here = os.path.dirname(os.path.abspath(__file__))
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    environment |= {"PYTHONPATH": here, "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)], env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        _, errors = ranks[0].communicate(timeout=120)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert ranks[0].returncode != 0 and "rank 1 (" in errors and "no sign of life" in errors, errors[-3000:]
