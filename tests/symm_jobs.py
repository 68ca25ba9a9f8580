"""What a rank does in test_symm_mem.py: on a GPU that all ranks share, or in Triton's interpreter on shared files."""

import os
import random
import sys
import time
from unittest import mock

import torch
import torch.distributed as dist

from hf_taco_scape.codecs import get_codec
from hf_taco_scape.codecs.codec import CANONICAL_NAN
from hf_taco_scape.codecs.device import torch_twins
from hf_taco_scape.collectives import ByteMeter, compressed, symm_workspace
from hf_taco_scape.collectives import symm_mem as symm
from hf_taco_scape.collectives.symm_workspace import SymmetricWorkspace

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    import triton.language as tl
    import triton_on_cpu  # noqa: F401
    from hf_taco_scape.kernels import symm_memory

    def wait_politely(at):
        """As in symm_memory.py, but the ranks share a few cores: a polling one gives its own away."""
        word = tl.load(at)
        while bool(tl.max((word == -1).to(tl.int32)) > 0):
            time.sleep(0.001)
            word = tl.load(at)
        return word

    symm_memory._interpreted_wait = wait_politely
# a GPU for each rank as far as they go
INDEX = int(os.environ.get("RANK", 0)) % max(torch.cuda.device_count(), 1)
DEVICE = torch.device("cpu") if INTERPRETED else torch.device("cuda", INDEX)
CODECS = ["none", "taco", "fp8", "int8", "hadamard-int8", "hadamard-int6", "hadamard-int4"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PATIENCE_S = 60.0  # ranks on one GPU take turns of milliseconds, eight of them wait for whole rounds


def one_shot_cases(name, dtype):
    """(operation, codec, dtype, shape or list of shapes by rank) for `against_twin`."""
    shapes = [(1,), (130,), (33, 127), (4096 + 128,)]
    shapes += [] if INTERPRETED else [(3, 5, 1001), (1 << 20,), (0,), ((1 << 21) + 77,)]
    return [("all_reduce", name, dtype, shape) for shape in shapes]


def two_shot_cases(name, world):
    shapes = [(1,), (33, 127)] + ([] if INTERPRETED else [(130,), (1 << 20,), ((1 << 20) + 77,)])
    cases = [("all_reduce", name, torch.bfloat16, shape) for shape in shapes]
    return [*cases, ("all_reduce", name, torch.float16 if world == 3 else torch.float32, shapes[1])]


def halves_cases(name, world):
    big = 64 if INTERPRETED else 1000
    cases = [("reduce_scatter", name, torch.bfloat16, shape) for shape in [(big, 128), (7, 33), (1, 300), (5,)]]
    cases += [("all_gather", name, torch.bfloat16, shape) for shape in [(5, 33), (big // 4, 128)]]
    for dtype, rows in ((torch.bfloat16, [5, 0, 9, 2]), (torch.float32, [3, 2, 2, 2]), (torch.float16, [1, 2, 3, 1])):
        cases.append(("all_gather", name, dtype, [(r, 40) for r in rows[:world]]))
    return cases


def mixed_cases(world):
    operations, widths = ["all_reduce", "reduce_scatter", "all_gather"], [1, 33, 128]
    return [
        (operations[i % 3], CODECS[i % 7], torch.bfloat16, (1 + 37 * i % 300, widths[i % 3]))
        for i in range(6 if INTERPRETED else 42)
    ]


class SharedFiles(SymmetricWorkspace):
    """A workspace of CPU tensors over files that the ranks map: what symmetric memory is on a GPU."""

    def _allocate(self, nbytes):
        everybody = [None] * self.ranks
        dist.all_gather_object(everybody, f"inbox-{id(self)}-{len(self._memory)}-{self.rank}", group=self.group)
        mine = torch.from_file(everybody[self.rank], shared=True, size=nbytes, dtype=torch.uint8).fill_(0xFF)
        dist.barrier(self.group)
        maps = [
            mine if rank == self.rank else torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8)
            for rank, name in enumerate(everybody)
        ]
        return [m.data_ptr() for m in maps], maps


def fresh_group():
    """All ranks, under a name that no earlier job had: symmetric memory remembers a name's ranks for good."""
    world = dist.distributed_c10d._world
    world.group_count = max(world.group_count, 10 * int(os.environ["MASTER_PORT"]))
    return dist.new_group()


def workspace(group=None, max_bytes=0, patience_s=PATIENCE_S):
    # both are facts of this test, not of the library: ranks share a GPU, and multicast stays off
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    if not INTERPRETED:
        torch.cuda.set_device(DEVICE)
    return (SharedFiles if INTERPRETED else SymmetricWorkspace)(group or fresh_group(), DEVICE, max_bytes, patience_s)


def data(shape, dtype, seed):
    """Groups of very different size; one that overflows a sum, one with a NaN, one of zeros where there is room."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g)
    flat = x.view(-1)
    n = flat.numel() // 128 * 128
    flat[:n].view(-1, 128).mul_(torch.exp(3 * torch.randn(n // 128, 1, generator=g)))
    x = x.clamp(-6e4, 6e4).to(dtype)
    flat = x.view(-1)
    if flat.numel() > 128 * 8:
        flat[128 * 3 + 5] = torch.finfo(dtype).max
        flat[128 * 5 : 128 * 6] = 0
        if seed % 3 == 0:
            flat[128 * 7 + 1] = float("nan")
    return x.to(DEVICE)


def bits(x):
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def assert_same(got, expected, what):
    """Equal bits; of NaNs the twin's are not canonical on a GPU, ours are."""
    assert got.shape == expected.shape and got.dtype == expected.dtype and got.is_contiguous(), what
    nan = got.isnan() & expected.isnan()
    wrong = (~nan & (bits(got) != bits(expected))).sum()
    strange = (nan & (bits(got) != CANONICAL_NAN[got.dtype])).sum()
    wrong, strange = torch.stack([wrong, strange]).tolist()  # once: ranks on one GPU wait for their turns
    assert wrong == 0, f"{what}: {wrong} of {got.numel()} elements differ"
    assert strange == 0, f"{what}: {strange} NaN are not canonical"


def twin(op, x, codec, sizes=None):
    """compressed.py in plain torch; codec none as its two algorithms sum, not as the process group does."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if op == "all_reduce" and x.numel() == 0:
        return x.clone()
    if codec.name == "none" and (op != "all_reduce" or ranks > 2):
        parts = [None] * ranks
        dist.all_gather_object(parts, x.cpu())
        if op == "all_gather":
            return torch.cat(parts).to(x.device)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        total = total.to(x.dtype).to(x.device)
        return total if op == "all_reduce" else total.tensor_split(ranks)[rank].contiguous()
    with torch_twins():
        if op == "all_reduce":
            return (compressed.one_shot_all_reduce if ranks == 2 else compressed.two_shot_all_reduce)(x, None, codec)
        more = {"sizes": sizes} if op == "all_gather" else {}
        return getattr(compressed, op)(x, None, codec, **more)


def run(op, space, x, codec, sizes=None, meter=None):
    more = {"sizes": sizes} if op == "all_gather" else {}
    poison = torch.full_like(x, float("nan"))
    del poison  # the allocator hands it out again: what is not written shows
    return getattr(symm, op)(x, space, codec, meter=meter, **more)


def against_twin(cases, delays=False):
    """Each case on one workspace, one after the other."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    space, times = workspace(), []
    for i, (op, name, dtype, shape) in enumerate(cases):
        codec, sizes = get_codec(name), None
        if op == "all_gather" and isinstance(shape, list):
            sizes, shape = [s[0] for s in shape], shape[rank]
        x = data(shape, dtype, 100 * i + rank)
        meter = ByteMeter()
        if delays:
            time.sleep(random.Random(i * 8 + rank).random() * 0.02)
        start = time.perf_counter()
        got = run(op, space, x, codec, sizes, meter)
        if not INTERPRETED:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        assert_same(got, twin(op, x, codec, sizes), f"rank {rank} of {ranks}: {cases[i]}")
        if x.numel():
            assert meter.calls == 1 and meter.sent_bytes > 0
    return times


def empty_inboxes(space):
    """Whether no word is left in an inbox: every message was taken and cleared."""
    memory = space._memory[-1][0]
    mine = memory[space.rank] if INTERPRETED else memory[0]
    return bool((mine == 0xFF).all())


def back_to_back(name, numels, calls, seed=0):
    """Calls without a pause, sizes in turn, ranks delayed at random; all results right, the inboxes clear after."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    space, codec, rng = workspace(), get_codec(name), random.Random(seed * 100 + rank)
    sets = [(n, s, data((n,), torch.bfloat16, 10 * s + rank)) for n in numels for s in range(3)]
    expected = [twin("all_reduce", x, codec) for _, _, x in sets]
    space.reserve(symm.inbox_bytes(max(numels), ranks))
    kept, start = [], time.perf_counter()
    for i in range(calls):
        if rng.random() < 0.05:
            if not INTERPRETED:
                torch.cuda._sleep(int(2e6 * rng.random()))
            time.sleep(0.003 * rng.random())
        kept.append((i % len(sets), symm.all_reduce(sets[i % len(sets)][2], space, codec)))
        if len(kept) == 50 or i == calls - 1:
            for which, got in kept:
                assert_same(got, expected[which], f"rank {rank}: call {i}")
            kept.clear()
    assert empty_inboxes(space)
    return (time.perf_counter() - start) / calls


def without_clears():
    """A mutant, in the interpreter only: nobody puts the sentinel back."""
    from hf_taco_scape.kernels import symm_kernels

    with mock.patch.object(symm_kernels, "clear", lambda *arguments: None):
        back_to_back("fp8", [600, 700], 8)


def counter_near_overflow(name):
    rank = dist.get_rank()
    space, codec = workspace(max_bytes=1 << 20), get_codec(name)
    space._memory[-1][2][0] = 2**31 - 3
    for i in range(8):
        x = data((5000,), torch.bfloat16, 10 * i + rank)
        assert_same(symm.all_reduce(x, space, codec), twin("all_reduce", x, codec), f"call {i}")
    return int(space._memory[-1][2][0])


def growth():
    """Small, then larger messages: the workspace grows between calls, the old inbox is kept."""
    with mock.patch.object(symm_workspace, "MEBIBYTE", 4096):
        rank, space = dist.get_rank(), workspace()
        for numel in (500, 9000, 2000):
            x = data((numel,), torch.float32, rank + numel)
            codec = get_codec("none")
            assert_same(run("all_reduce", space, x, codec), twin("all_reduce", x, codec), str(numel))
        return len(space._memory)


def why_not_on_cpu():
    return symm.why_not(None, torch.device("cpu"))


def why_not_after_another_group():
    names = {dist.group.WORLD.group_name: (0, 1, 2)} if dist.get_rank() == 0 else {}
    with (
        mock.patch.object(symm_workspace, "_alone", lambda device: None),
        mock.patch.object(symm_workspace, "_MEMBERS", names),
    ):
        return symm.why_not(None, torch.device("cpu"))


def why_not_here():
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(DEVICE)
    return symm.why_not(fresh_group(), DEVICE)


def why_not_with_one_odd_rank():
    """Rank 1 lacks something: both answer the same."""
    reason = "no symmetric memory in this torch" if dist.get_rank() == 1 else None
    with (
        mock.patch.object(symm_workspace, "_alone", lambda device: reason),
        mock.patch.object(symm_workspace, "_MEMBERS", {}),
    ):
        return symm.why_not(None, torch.device("cpu"))


def graph_replays(name, replays):
    """Three sizes in one graph, replayed with new data, a rank delayed at random, eager calls in between."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    codec, rng = get_codec(name), random.Random(rank)
    numels = [3000, 200_001, 50_000]
    space = workspace(max_bytes=symm.inbox_bytes(max(numels), ranks))
    xs = [torch.zeros(n, dtype=torch.bfloat16, device=DEVICE) for n in numels]
    for x in xs:
        symm.all_reduce(x, space, codec)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outs = [symm.all_reduce(x, space, codec) for x in xs]
    sets = [[data((n,), torch.bfloat16, 10 * s + rank + n) for n in numels] for s in range(3)]
    expected = [[twin("all_reduce", x, codec) for x in each] for each in sets]
    for i in range(replays):
        for x, out, new in zip(xs, outs, sets[i % 3], strict=True):
            x.copy_(new)
            out.fill_(float("nan"))
        if rng.random() < 0.3:
            time.sleep(0.005 * rng.random())
        graph.replay()
        for out, right in zip(outs, expected[i % 3], strict=True):
            assert_same(out, right, f"replay {i}")
        if i % 4 == 0:
            eager = symm.all_reduce(sets[i % 3][0], space, codec)
            assert_same(eager, expected[i % 3][0], f"after replay {i}")
    assert empty_inboxes(space)


def growth_under_capture():
    space = workspace(max_bytes=1 << 20)
    small = torch.ones(1000, dtype=torch.bfloat16, device=DEVICE)
    large = torch.ones(1 << 24, dtype=torch.bfloat16, device=DEVICE)
    symm.all_reduce(small, space, "none")
    torch.cuda.synchronize()
    text = "no error"
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        symm.all_reduce(small, space, "none")
        try:
            symm.all_reduce(large, space, "none")
        except RuntimeError as error:
            text = str(error)
    space.reserve(symm.inbox_bytes(1 << 24, space.ranks))
    assert bool((symm.all_reduce(large, space, "none") == 2).all())
    return text


def two_groups_on_two_streams(calls):
    rank, codec = dist.get_rank(), get_codec("hadamard-int8")
    spaces = [workspace(fresh_group(), max_bytes=1 << 20) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    xs = [data((100_000,), torch.bfloat16, 10 * i + rank) for i in range(2)]
    expected = [twin("all_reduce", x, codec) for x in xs]
    torch.cuda.synchronize()
    got = [[], []]
    for _ in range(calls):
        for i in (0, 1) if rank == 0 else (1, 0):  # two groups have no order between them
            with torch.cuda.stream(streams[i]):
                got[i].append(symm.all_reduce(xs[i], spaces[i], codec))
    torch.cuda.synchronize()
    for i in range(2):
        for out in got[i]:
            assert_same(out, expected[i], f"group {i}")


def one_group_on_two_streams(calls):
    rank, codec, space = dist.get_rank(), get_codec("hadamard-int8"), workspace(max_bytes=1 << 20)
    streams = [torch.cuda.Stream() for _ in range(2)]
    xs = [data((100_000,), torch.bfloat16, 10 * i + rank) for i in range(3)]
    expected = [twin("all_reduce", x, codec) for x in xs]
    torch.cuda.synchronize()
    got = []
    for i in range(calls):
        with torch.cuda.stream(streams[i // 3 % 2]):
            got.append(symm.all_reduce(xs[i % 3], space, codec))
    torch.cuda.synchronize()
    for i, out in enumerate(got):
        assert_same(out, expected[i % 3], f"call {i}")


_KEPT = []


def a_peer_stays_away():
    space = workspace(max_bytes=1 << 20, patience_s=0.5)
    _KEPT.append(space)  # freeing it would fail
    x = torch.ones(10_000, dtype=torch.bfloat16, device=DEVICE)
    symm.all_reduce(x, space, "fp8")
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        time.sleep(6)
        return ""
    symm.all_reduce(x, space, "fp8")
    try:
        torch.cuda.synchronize()
    except RuntimeError:  # torch.AcceleratorError: what the kernel's end looks like
        pass
    try:
        symm.all_reduce(x, space, "fp8")
    except RuntimeError as error:
        return str(error)
    return "no error"


def builds_by_size():
    from hf_taco_scape.kernels import symm_launch

    space = workspace(max_bytes=1 << 22)
    for numel in (128, 1 << 20):
        symm.all_reduce(torch.ones(numel, dtype=torch.bfloat16, device=DEVICE), space, "fp8")
    before = len(symm_launch._built)
    for numel in (256, 4096, 5000, 100_001, 1 << 21):
        symm.all_reduce(torch.ones(numel, dtype=torch.bfloat16, device=DEVICE), space, "fp8")
    return len(symm_launch._built) - before


def huge(name, numel):
    """64-bit offsets: the ends and the middle of a sum are those of short messages of the same groups."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    codec, block = get_codec(name), 2**20
    blocks = [data((block,), torch.bfloat16, 3 * r + 1) for r in range(ranks)]

    def part(r, start, stop):
        """Elements of rank r's x; start is a multiple of a block."""
        pieces = [blocks[r].roll(128 * (s // block)) for s in range(start, stop, block)]
        return torch.cat(pieces)[: stop - start]

    x = torch.empty(numel, dtype=torch.bfloat16, device=DEVICE)
    for start in range(0, numel, block):
        x[start : start + block] = part(rank, start, min(start + block, numel))
    space = workspace(max_bytes=symm.inbox_bytes(numel, ranks, codec, torch.bfloat16))
    got = symm.all_reduce(x, space, codec)
    torch.cuda.synchronize()
    for start in (0, 2**30, 2**31 - block):
        stop = min(start + block + 8, numel)
        assert_same(got[start:stop].clone(), twin("all_reduce", part(rank, start, stop), codec), f"from {start}")


class _Nowhere:
    """A workspace of kernels that are only built."""

    device, rank = DEVICE, 0
    check = staticmethod(lambda: None)

    def __init__(self, ranks):
        self.ranks = ranks

    def inbox(self, nbytes):
        from hf_taco_scape.kernels.symm_format import Inbox

        return Inbox(0, (0,) * self.ranks, 0, 0, 0, 0, 0, 0)

    def table(self, starts):
        return 1


def _build(cases, ranks):
    """Build the kernels of the cases as a rank of them would, start nothing."""
    from hf_taco_scape.kernels import symm_launch

    def build(name, fmt, tiles, x, out, numbers, flags):
        symm_launch.build(name, fmt, x, out, numbers, flags)

    symm_launch._launch = build
    for operation, name, dtype, shape in cases:
        sizes = [s[0] for s in shape] if isinstance(shape, list) else None
        shape = shape[0] if isinstance(shape, list) else shape
        run(operation, _Nowhere(ranks), torch.zeros(shape, dtype=dtype, device=DEVICE), get_codec(name), sizes)


def build_all(everything):
    """Build what the tests run, many at once: Triton keeps the results, and the ranks find them."""
    import multiprocessing as mp
    from itertools import groupby

    work = []
    for name in CODECS:
        work += [(one_shot_cases(name, dtype), 2) for dtype in (DTYPES if everything else DTYPES[:1])]
        cases = [(two_shot_cases(name, world), world) for world in ((3, 8) if everything else (3,))]
        if everything or name in ("none", "taco"):
            cases += [(halves_cases(name, world), world) for world in ((2, 3) if everything else (2,))]
        for some, world in cases:
            work += [(list(group), world) for _, group in groupby(some, lambda case: (case[0], str(case[2])))]
    if everything:
        work += [([case], world) for world in (2, 4) for case in mixed_cases(world)]
    start = time.perf_counter()
    with mp.get_context("spawn").Pool(max(os.cpu_count() - 2, 1)) as pool:
        pool.starmap(_build, work, chunksize=1)
    print(f"built the kernels of {len(work)} groups of cases in {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    build_all("--all" in sys.argv)
