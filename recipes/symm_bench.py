"""Providers over symmetric memory for bench_collectives.py, and times in CUDA graphs with a start that ranks share."""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from hf_taco_scape.codecs import get_codec
from hf_taco_scape.collectives import all_reduce, symm_mem

ALIGN_CYCLES = 300_000  # about 0.15 ms, more than ranks lie apart when they start a replay
CHANNEL = 0


class SymmBench:
    """Symmetric memory of all ranks: ours and torch's own. Collective."""

    def __init__(self, device: torch.device, ranks: int, max_bytes: int, dtype: torch.dtype) -> None:
        import torch.distributed._symmetric_memory as torch_symm

        self.device, self.dtype = device, dtype
        numel = max_bytes // dtype.itemsize
        self.workspace = symm_mem.SymmetricWorkspace(None, device, symm_mem.inbox_bytes(numel, ranks, "none", dtype))
        # torch's operators reduce in place what lies in symmetric memory
        self.buffer = torch_symm.empty(2 * max_bytes // dtype.itemsize, dtype=dtype, device=device)
        self.handle = torch_symm.rendezvous(self.buffer, dist.group.WORLD)
        torch.cuda.synchronize()
        dist.barrier()

    def all_reduce(self, codec, meter=None) -> Callable[[torch.Tensor], torch.Tensor]:
        codec = get_codec(codec)
        return lambda x: symm_mem.all_reduce(x, self.workspace, codec, meter)

    def torch_two_shot(self, xs: list[torch.Tensor]) -> tuple[Callable[[int], object], Callable[[], None]]:
        """torch's two_shot_all_reduce_ on copies of xs, and what restores them: in place, sums would grow to inf."""
        numel = xs[0].numel()
        room = -(-numel * self.dtype.itemsize // 256) * 256 // self.dtype.itemsize
        places = [self.buffer[i * room : i * room + numel] for i in range(self.buffer.numel() // room)][: len(xs)]
        name = dist.group.WORLD.group_name

        def restore():
            for place, x in zip(places, xs, strict=False):
                place.copy_(x.view(-1))

        restore()
        return lambda i: torch.ops.symm_mem.two_shot_all_reduce_(places[i % len(places)], "sum", name), restore

    def graph_microseconds(
        self, call: Callable[[int], object], calls: int, repeats: int, restore: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """Sorted times of one of `calls` calls of `call(i)` in a graph; each the maximum over the ranks.

        Ranks start a replay some 75 us apart on the host: they sleep and meet on the device before the clock starts.
        """
        for i in range(3):
            call(i)
        torch.cuda.synchronize()
        dist.barrier()
        graph, results = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for i in range(calls):
                results.append(call(i))  # kept: the next call must not find its output in the cache
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats + 2)]
        for start, end in marks:
            if restore:
                restore()
            torch.cuda._sleep(ALIGN_CYCLES)
            self.handle.barrier(channel=CHANNEL)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            dist.barrier()
        samples = torch.tensor([1000 * a.elapsed_time(b) / calls for a, b in marks[2:]], dtype=torch.float64)
        samples = samples.to(self.device)
        dist.all_reduce(samples, dist.ReduceOp.MAX)
        return samples.sort().values.cpu()


def start(device: torch.device, ranks: int, max_bytes: int, dtype: torch.dtype) -> SymmBench | str:
    """Symmetric memory for messages of up to max_bytes, or why there is none; all ranks agree."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    reason = symm_mem.why_not(None, device)
    return reason or SymmBench(device, ranks, max_bytes, dtype)


def assert_as_over_the_process_group(symm: SymmBench, codec, x: torch.Tensor) -> None:
    """Raise AssertionError unless both backends give the same bits (codec none is summed in another order there)."""
    ours, theirs = symm.all_reduce(codec)(x), all_reduce(x, None, codec)
    differ = torch.tensor([float((ours != theirs).sum())], device=x.device)
    dist.all_reduce(differ)
    assert differ.item() == 0, f"{codec.name}: {differ.item():.0f} elements differ between symmetric memory and c10d"
