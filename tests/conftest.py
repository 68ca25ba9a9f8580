"""A pool of gloo workers, started once a session: importing torch and transformers takes seconds, a group 50 ms."""

import multiprocessing as mp
import os
import pickle
import socket
import tempfile
import traceback

import pytest

WORKERS = 4
JOB_TIMEOUT_S = 300
PRELOAD = ["torch", "torch.distributed", "transformers", "accelerate", "datasets", "hf_taco_scape"]


def pytest_collection_modifyitems(items) -> None:
    """Tests marked `gpu` and `multi_gpu` are skipped without such devices; Triton's interpreter needs none."""
    import torch

    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    needed = {"gpu": 1, "multi_gpu": 2}
    found = torch.cuda.device_count()
    for item in items:
        for name in needed.keys() & {mark.name for mark in item.iter_markers()}:
            if found < needed[name]:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed[name]} CUDA device(s), found {found}"))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _reset_accelerate() -> None:
    """accelerate keeps the launch's facts in process-wide singletons; a new world needs them empty."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def _serve(rank: int, pipe) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        job = pipe.recv()
        if job is None:
            return
        world, port, workdir, payload = job
        env = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true",
        }  # fmt: skip
        os.environ.update({k: str(v) for k, v in env.items()})
        os.chdir(workdir)
        try:
            if world > 1:
                dist.init_process_group("gloo")
            function, args, kwargs = pickle.loads(payload)
            answer = (True, function(*args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            _reset_accelerate()
        try:
            pipe.send(answer)
        except Exception:
            pipe.send((False, traceback.format_exc()))


class WorkerPool:
    """`run(world, function, *args)` calls a module-level function on `world` ranks; results come in rank order."""

    def __init__(self, workers: int = WORKERS) -> None:
        self._size = workers
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._workers: list = []

    def _start(self) -> None:
        for rank in range(self._size):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def run(self, world: int, function, *args, timeout_s: float = JOB_TIMEOUT_S, **kwargs) -> list:
        if not self._workers:
            self._start()
        payload = pickle.dumps((function, args, kwargs))
        workdir, port = tempfile.mkdtemp(prefix="rank-"), free_port()
        for _, pipe in self._workers[:world]:
            pipe.send((world, port, workdir, payload))
        results, failures = [], []
        for rank, (_, pipe) in enumerate(self._workers[:world]):
            # once a rank has failed, the others may wait for it for ever
            try:
                ready = pipe.poll(10 if failures else timeout_s)
                ok, value = pipe.recv() if ready else (False, "no answer in time")
            except EOFError:
                ok, value = False, "the process died"
            results.append(value)
            if not ok:
                failures.append(f"--- rank {rank} of {world}\n{value}")
        if failures:
            self.stop()
            raise AssertionError("\n".join(failures))
        return results

    def stop(self) -> None:
        for process, _ in self._workers:
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers = []


@pytest.fixture(scope="session")
def pool():
    workers = WorkerPool()
    yield workers
    workers.stop()
