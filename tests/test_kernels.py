"""Triton kernels against their torch twins, byte by byte, on the same device.

On a GPU with `make test-gpu`; without one test_kernels_on_cpu.py runs this file in Triton's interpreter.
"""

import importlib.util
import os

import pytest
import torch

from hf_taco_scape.codecs import device as codec_device
from hf_taco_scape.codecs import get_codec
from hf_taco_scape.codecs.codec import CANONICAL_NAN
from hf_taco_scape.codecs.device import torch_twins

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
if INTERPRETED:
    import triton_on_cpu  # noqa: F401

DEVICE = "cpu" if INTERPRETED else "cuda"
LOSSY = ["taco", "fp8", "int8", "hadamard-int8", "hadamard-int6", "hadamard-int4"]
ALL = ["none", *LOSSY]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# the interpreter is a thousand times slower: there, what differs in kind, on a GPU all of it
LENGTHS = [*range(1, 261), *(m + d for m in (512, 1024, 4096) for d in (-1, 0, 1))]
LENGTHS = [1, 63, 213] if INTERPRETED else LENGTHS
COUNTS = (3,) if INTERPRETED else (1, 2, 5)
PIECES = [1] if INTERPRETED else [1, 2, 4, 8]
OFFSETS = [2] if INTERPRETED else [1, 2, 4, 8]


def of_dtypes(interpreted):
    """Run a test in all dtypes on a GPU, in one in the interpreter."""
    return pytest.mark.parametrize("dtype", [interpreted] if INTERPRETED else DTYPES, ids=str)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_TRITON, reason="needs Triton"),
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def kernels_of(codec):
    return codec.make_kernels()


def normal(n, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(n, generator=g) * torch.exp(torch.randn(n, generator=g))).to(dtype).to(DEVICE)


def full(shape, byte):
    """uint8 of that shape, every byte `byte`: what nobody wrote shows."""
    return torch.full(shape, byte, dtype=torch.uint8, device=DEVICE)


def nans(*shape, dtype):
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def bits(x):
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def same(a, b):
    """Equal bits, but for the bits of a NaN, which the twin does not fix on a GPU."""
    both = a.isnan() & b.isnan()
    return bool((both | (bits(a) == bits(b))).all())


def encode_both(codec, rows):
    """Messages uint8[rows, bytes] of the kernel, into a buffer of ff, and of the twin."""
    size = codec.wire_bytes(rows.shape[1], rows.dtype)
    got, expected = full((len(rows), size), 0xFF), full((len(rows), size), 0)
    kernels_of(codec).encode(rows, got)
    with torch_twins():
        codec.encode_rows(rows, expected)
    return got, expected


def decode_twin(codec, wire, numel, dtype, out_dtype=None):
    with torch_twins():
        out = torch.empty(len(wire), numel, dtype=out_dtype or dtype, device=wire.device)
        codec.decode_into(wire, out, dtype)
    return out


def special_groups(dtype):
    """[kinds * 128 * 2]: groups that arithmetic is not made for, each followed by an ordinary one."""
    info, one = torch.finfo(dtype), torch.ones(128)
    signs = torch.where(normal(128).cpu() > 0, 1.0, -1.0)
    ramp, random = torch.arange(128) - 64.0, normal(128, 1).cpu()
    spike, dot = one.clone(), one * 0
    spike[17], dot[5] = info.max / 3, -1
    kinds = [one * 0, one * -0.0, one * 3, one * info.max, signs * info.max, spike, dot, ramp / 2, ramp * 0.7]
    kinds += [signs * info.smallest_normal, signs * info.smallest_normal / 4, one * info.smallest_normal]
    kinds += [random / random.abs().max() * scale for scale in (1e-36, 1e-30, 1e-20, 1e-10, 1e10, 1e20, 1e30, 3e38)]
    kinds += [random / random.abs().max() * 2.0**e for e in (-120, -119, -118, -117, -31, -30, -29, 29, 30, 31, 126)]
    for bad in (float("nan"), float("inf"), -float("inf")):
        for position in (0, 77, 127):
            group = random.clone()
            group[position] = bad
            kinds.append(group)
    kinds.append(one * float("nan"))
    ordinary = normal(128, 2).cpu()
    return torch.cat([torch.cat([kind, ordinary]) for kind in kinds]).to(dtype).to(DEVICE)


@of_dtypes(torch.bfloat16)
@pytest.mark.parametrize("name", ALL)
def test_every_length(name, dtype):
    codec = get_codec(name)
    for n in LENGTHS:
        got, expected = encode_both(codec, normal(n, n, dtype).view(1, -1))
        assert torch.equal(got, expected), n
        y = nans(1, n, dtype=dtype)
        kernels_of(codec).decode(got, y, dtype)
        assert same(y, decode_twin(codec, got, n, dtype)), n


@of_dtypes(torch.float32)
@pytest.mark.parametrize("name", ALL)
def test_special_groups(name, dtype):
    codec, x = get_codec(name), special_groups(dtype)
    for n in (x.numel() - 200,) if INTERPRETED else (x.numel(), x.numel() - 200):
        got, expected = encode_both(codec, x[:n].view(1, -1))
        assert torch.equal(got, expected)
        for out_dtype in {dtype, torch.float32}:
            y = nans(1, n, dtype=out_dtype)
            kernels_of(codec).decode(got, y, dtype)
            assert same(y, decode_twin(codec, got, n, dtype, out_dtype))
            assert y.isnan().any() and (bits(y)[y.isnan()] == CANONICAL_NAN[out_dtype]).all()


@pytest.mark.parametrize("name", ["taco", "hadamard-int6"])
def test_special_groups_as_the_short_last_one(name):
    codec, groups = get_codec(name), special_groups(torch.float32).view(-1, 128)
    for length in (37,) if INTERPRETED else (1, 37, 64, 127):
        rows = torch.cat([groups[1::2], groups[0::2]], 1)[:, : 128 + length].contiguous()
        got, expected = encode_both(codec, rows)
        assert torch.equal(got, expected)
        y = nans(*rows.shape, dtype=torch.float32)
        kernels_of(codec).decode(got, y, torch.float32)
        assert same(y, decode_twin(codec, got, rows.shape[1], torch.float32))


@of_dtypes(torch.float16)
@pytest.mark.parametrize("numel", [128 * 3 + 57] if INTERPRETED else [128 * 3, 128 * 3 + 57])
@pytest.mark.parametrize("name", ALL)
def test_sums_over_messages(name, numel, dtype):
    """decode_sum and decode_sum_encode of one to several messages, into 16 bits and into fp32."""
    codec = get_codec(name)
    for messages in COUNTS:
        rows = normal(messages * numel, messages, dtype).view(messages, -1)
        rows[0, 130] = float("nan")
        wire, _ = encode_both(codec, rows)
        with torch_twins():
            expected = codec.decode_sum(wire, numel, dtype)
            expected_wire = torch.empty_like(wire[0])
            codec.decode_sum_encode(wire, numel, dtype, expected_wire)
        total, rounded, again = nans(numel, dtype=torch.float32), nans(numel, dtype=dtype), full(wire[0].shape, 0xFF)
        kernels_of(codec).decode_sum(wire, total, dtype)
        kernels_of(codec).decode_sum(wire, rounded, dtype)
        kernels_of(codec).decode_sum_encode(wire, again, numel, dtype)
        assert same(total, expected) and same(rounded, expected.to(dtype))
        assert torch.equal(again, expected_wire)


def test_a_sum_past_the_range_of_fp16_is_inf_and_poisons_its_group():
    codec = get_codec("hadamard-int8")
    rows = torch.full((2, 256), 3.0, dtype=torch.float16, device=DEVICE)
    rows[:, :128] = 6e4
    wire, _ = encode_both(codec, rows)
    again, y = torch.empty_like(wire[0]), nans(1, 256, dtype=torch.float16)
    kernels_of(codec).decode_sum_encode(wire, again, 256, torch.float16)
    kernels_of(codec).decode(again.view(1, -1), y, torch.float16)
    assert y[0, :128].isnan().all() and y[0, 128:].isfinite().all()


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("name", ALL)
def test_addresses_of_any_alignment(name, offset):
    codec = get_codec(name)
    for numel in (300,) if INTERPRETED else (128 * 3, 300):
        x = normal(2 * numel + offset, dtype=torch.bfloat16)[offset:].view(2, numel)
        size = codec.wire_bytes(numel)
        room = full((2 * size + 2 * offset,), 0xAA)
        wire = room[offset : offset + 2 * size].view(2, size)
        kernels_of(codec).encode(x, wire)
        with torch_twins():
            expected = torch.stack([codec.encode(row) for row in x])
        assert torch.equal(wire, expected)
        assert (room[:offset] == 0xAA).all() and (room[-offset:] == 0xAA).all()
        out = nans(2 * numel + 2 * offset, dtype=torch.bfloat16)
        y = out[offset : offset + 2 * numel].view(2, numel)
        kernels_of(codec).decode(wire, y, torch.bfloat16)
        assert same(y, decode_twin(codec, expected, numel, torch.bfloat16))
        assert out[:offset].isnan().all() and out[-offset:].isnan().all()
        again = full((size + offset,), 0xAA)[offset:]
        kernels_of(codec).decode_sum_encode(wire, again, numel, torch.bfloat16)
        with torch_twins():
            codec.decode_sum_encode(expected, numel, torch.bfloat16, expected_sum := torch.empty_like(expected[0]))
        assert torch.equal(again, expected_sum)


@pytest.mark.parametrize("size", [145, 146])
def test_messages_at_odd_addresses_go_through_even_ones(size):
    """The interpreter would read a halfword anywhere; a GPU stops with `misaligned address`."""
    from hf_taco_scape.kernels import launch

    wire = full((3, size), 7)
    room = launch._at_least(2, wire)
    assert torch.equal(room, wire) and (room is wire) == (size == 146)
    assert all(row.data_ptr() % 2 == 0 for row in room)


@pytest.mark.parametrize("name", LOSSY)
def test_rows_are_independent_messages(name):
    codec = get_codec(name)
    for rows, numel in ((5, 131),) if INTERPRETED else ((3, 128 * 33), (5, 131), (3, 40)):
        x = normal(rows * numel, rows).view(rows, numel)
        got, expected = encode_both(codec, x)
        assert torch.equal(got, expected)
        y = nans(rows, numel, dtype=torch.float32)
        kernels_of(codec).decode(got, y, torch.float32)
        assert same(y, decode_twin(codec, got, numel, torch.float32))


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("name", LOSSY)
def test_every_split_of_a_group_gives_the_same_bytes(name, pieces, monkeypatch):
    from hf_taco_scape.kernels import launch

    codec, x = get_codec(name), normal(128 * (5 if INTERPRETED else 37), dtype=torch.bfloat16).view(1, -1)
    for operation in ("encode", "decode", "decode_sum_encode"):
        monkeypatch.setitem(launch.TUNED, (name, operation), (pieces, 2))
    got, expected = encode_both(codec, x)
    assert torch.equal(got, expected)
    y, again = nans(1, x.numel(), dtype=torch.bfloat16), torch.empty_like(got[0])
    kernels_of(codec).decode(got, y, torch.bfloat16)
    assert same(y, decode_twin(codec, got, x.numel(), torch.bfloat16))
    kernels_of(codec).decode_sum_encode(got, again, x.numel(), torch.bfloat16)
    with torch_twins():
        codec.decode_sum_encode(got, x.numel(), torch.bfloat16, expected_sum := torch.empty_like(got[0]))
    assert torch.equal(again, expected_sum)


def test_more_rows_than_a_grid_has(monkeypatch):
    from hf_taco_scape.kernels import launch

    monkeypatch.setattr(launch, "MAX_GRID_ROWS", 3)
    for name in ALL:
        codec, x = get_codec(name), normal(8 * 130).view(8, 130)
        got, expected = encode_both(codec, x)
        assert torch.equal(got, expected)
        y = nans(8, 130, dtype=torch.float32)
        kernels_of(codec).decode(got, y, torch.float32)
        assert same(y, decode_twin(codec, got, 130, torch.float32))


@pytest.mark.parametrize("name", LOSSY)
def test_mutants_are_caught(name):
    """The comparison sees one wrong bit of a code and of a scale, and a swapped order of messages."""
    codec, x = get_codec(name), normal(3 * 128 * 5).view(3, -1) * torch.tensor([[1.0], [1e4], [1.0]], device=DEVICE)
    got, expected = encode_both(codec, x)
    for position in (0, codec.wire_bytes(x.shape[1]) - 1):
        broken = got.clone()
        broken[0, position] ^= 1
        assert torch.equal(got, expected) and not torch.equal(broken, expected)
        a, b = nans(*x.shape, dtype=torch.float32), nans(*x.shape, dtype=torch.float32)
        kernels_of(codec).decode(got, a, torch.float32)
        kernels_of(codec).decode(broken, b, torch.float32)
        assert not same(a, b)
    total, other = nans(x.shape[1], dtype=torch.float32), nans(x.shape[1], dtype=torch.float32)
    kernels_of(codec).decode_sum(got, total, torch.float32)
    kernels_of(codec).decode_sum(got[[1, 0, 2]], other, torch.float32)
    assert same(total, other)  # two terms commute
    kernels_of(codec).decode_sum(got[[0, 2, 1]], other, torch.float32)
    assert not same(total, other)


def test_twins_are_chosen_where_there_is_no_kernel(monkeypatch):
    codec = get_codec("fp8")
    assert codec_device.kernels_for(codec, torch.device("cpu")) is None
    fake = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "an old GPU")
    codec_device._kernels_on_cuda.cache_clear()
    try:
        with pytest.raises(ValueError, match="'fp8'.*an old GPU is sm80: choose hadamard-int8"):
            codec_device.kernels_for(codec, fake)
        with torch_twins():
            assert codec_device.kernels_for(codec, fake) is None
        assert codec_device.kernels_for(get_codec("hadamard-int6"), fake) is None
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
        codec_device._kernels_on_cuda.cache_clear()
        assert codec_device.kernels_for(codec, fake).name == "fp8"
    finally:
        codec_device._kernels_on_cuda.cache_clear()


gpu_only = pytest.mark.skipif(INTERPRETED, reason="times, graphs and builds are the GPU's")


@gpu_only
@pytest.mark.parametrize("name", ALL)
def test_the_codec_itself_runs_the_kernels(name, monkeypatch):
    codec, x = get_codec(name), normal(4000, dtype=torch.bfloat16).view(50, 80).t()  # not contiguous
    with torch_twins():
        expected = codec.encode(x)
    calls = []
    kernels = codec_device.kernels_for(codec, x.device)
    for operation in ("encode", "decode", "decode_sum"):
        real = getattr(type(kernels), operation)
        monkeypatch.setattr(
            type(kernels), operation, lambda self, *a, r=real, o=operation: (calls.append(o), r(self, *a))[1]
        )
    wire = codec.encode(x)
    y = codec.decode(wire, x.numel(), x.dtype)
    rows = codec.decode_rows(wire.view(1, -1), x.numel(), x.dtype)
    total = codec.decode_sum(wire.view(1, -1), x.numel(), x.dtype)
    assert calls == ["encode", "decode", "decode", "decode_sum"]
    assert torch.equal(wire, expected) and torch.equal(y, rows[0].bfloat16()) and torch.equal(total, rows[0])
    assert codec.encode(x[:0]).numel() == 0 and codec.decode(wire[:0], 0, x.dtype).numel() == 0


@gpu_only
@pytest.mark.parametrize("name", ALL)
def test_sizes_do_not_lead_to_builds(name):
    from hf_taco_scape.kernels import launch

    codec = get_codec(name)

    def run(numel):
        x = normal(2 * numel, dtype=torch.bfloat16).view(2, numel)
        wire, _ = encode_both(codec, x)
        kernels_of(codec).decode(wire, torch.empty_like(x), x.dtype)
        kernels_of(codec).decode_sum(wire, torch.empty_like(x[0]), x.dtype)
        kernels_of(codec).decode_sum_encode(wire, torch.empty_like(wire[0]), numel, x.dtype)

    run(1024), run(1024 * 1024)
    before = len(launch._built)
    for groups in (8, 16, 24, 1000, 2048, 40000):
        run(groups * 128)
    assert len(launch._built) == before


@gpu_only
@pytest.mark.parametrize("name", LOSSY)
def test_replays_in_a_cuda_graph(name):
    codec, x = get_codec(name), normal(128 * 1000 + 5, dtype=torch.bfloat16)
    wire, y = codec.encode(x), torch.empty_like(x)
    codec.decode(wire, x.numel(), x.dtype, out=y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codec.encode(x, out=wire)
        codec.decode(wire, x.numel(), x.dtype, out=y)
    for seed in range(3):
        x.copy_(normal(x.numel(), seed, x.dtype))
        wire.fill_(0xFF), y.fill_(float("nan"))
        graph.replay()
        with torch_twins():
            assert torch.equal(wire, codec.encode(x)) and same(y, codec.decode(wire, x.numel(), x.dtype))


@gpu_only
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LOSSY)
def test_millions_of_elements(name, dtype):
    """The division is exact but for quotients within 2^-46 of a tie: one code in 2^24 may differ by a step."""
    codec, numel = get_codec(name), 2**24 + 128
    x = torch.randn(numel, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(5))
    x = (x * torch.exp(2 * torch.randn(numel // 128, 1, device=DEVICE)).expand(-1, 128).reshape(-1)).to(dtype)
    got, expected = encode_both(codec, x.view(1, -1))
    wrong = (got != expected).sum().item()
    print(f"{name} {dtype}: {wrong} bytes of {got.numel()} differ")
    assert wrong <= 1
    y = nans(1, numel, dtype=dtype)
    kernels_of(codec).decode(got, y, dtype)
    assert same(y, decode_twin(codec, got, numel, dtype))


@gpu_only
@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_more_than_two_to_the_31_elements(name):
    """64-bit offsets: the ends of the message hold what short messages of the same groups do."""
    codec, numel = get_codec(name), 2**31 + 8
    x = torch.empty(numel, dtype=torch.bfloat16, device=DEVICE)
    x.view(-1)[: 2**20].copy_(normal(2**20, dtype=torch.bfloat16))
    for start in range(2**20, numel, 2**20):
        piece = x[start : start + 2**20]
        piece.copy_(x[: piece.numel()].roll(start // 2**20))
    wire = codec.encode(x)
    y = torch.full_like(x, float("nan"))
    codec.decode(wire, numel, x.dtype, out=y)
    for start, stop in ((0, 2**15), (2**30, 2**30 + 2**15), (2**31 - 2**15, numel)):
        part = x[start:stop]
        short = codec.encode(part)
        assert same(y[start:stop], codec.decode(short, part.numel(), x.dtype))
        if name != "none":
            bits_an_element = 8 if name == "taco" else codec.bits
            payload = -(-part.numel() // 128) * 128 * bits_an_element // 8 if name != "taco" else part.numel()
            assert torch.equal(wire[start * bits_an_element // 8 :][:payload], short[:payload])
    assert not y.isnan().any()
