"""How the kernels' benchmarks take times on a GPU: graphs, events, the host's part, and copies to compare with."""

import time
from collections.abc import Callable

import torch

ROTATED_BYTES = 256 * 2**20  # so that no input is in the L2


def graph_microseconds(call: Callable[[int], object], inner: int, repeats: int) -> torch.Tensor:
    """Sorted times of a call inside a CUDA graph of `inner` calls."""
    for i in range(3):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(inner):
            call(i)
    graph.replay()
    return event_microseconds(lambda i: graph.replay(), repeats) / inner


def event_microseconds(call: Callable[[int], object], repeats: int) -> torch.Tensor:
    """Sorted times between two events around each call."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    for i, (start, end) in enumerate(marks):
        start.record()
        call(i)
        end.record()
    torch.cuda.synchronize()
    return torch.tensor([1000 * a.elapsed_time(b) for a, b in marks], dtype=torch.float64).sort().values


def host_microseconds(call: Callable[[int], object], repeats: int = 200) -> torch.Tensor:
    """Sorted host times of a call that only starts work."""
    samples = []
    for i in range(repeats):
        start = time.perf_counter()
        call(i)
        samples.append(1e6 * (time.perf_counter() - start))
        if i % 50 == 49:
            torch.cuda.synchronize()
    return torch.tensor(samples[10:], dtype=torch.float64).sort().values


def copy_gbs(moved: int = 2**31) -> float:
    """GB/s of device-to-device copies that read and write `moved` bytes: not in a graph, where torch's is slower."""
    size = moved // 2
    buffers = [torch.empty(size, dtype=torch.uint8, device="cuda").random_() for _ in range(2)]
    buffers += [torch.empty_like(buffers[0]) for _ in range(min(30, ROTATED_BYTES // size))]
    inner = max(1, 2**29 // size)

    def copies(_):
        for i in range(inner):
            buffers[i % len(buffers)].copy_(buffers[i - 1 - len(buffers) // 2])

    copies(0)
    return moved * inner / float(event_microseconds(copies, 15).median()) / 1e3
