"""Codecs on one process: error, exact bytes, special values, tails, registry. Reference: codec_reference.py."""

import math

import codec_reference as reference
import numpy as np
import pytest
import torch

from hf_taco_scape.codecs import Codec, get_codec, list_codecs, register_codec
from hf_taco_scape.codecs import codec as codec_module
from hf_taco_scape.codecs.fp8 import unpack_e4m3
from hf_taco_scape.codecs.identity import IdentityCodec

LOSSY = ["taco", "fp8", "int8", "hadamard-int8", "hadamard-int6", "hadamard-int4"]
ALL = ["none", *LOSSY]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
N = 2**18

# docs/wire_formats.md: relative L2 error in % by distribution, zeros kept in % of the last one
ERRORS = {
    "taco": (2.57, 2.58, 2.59, 2.62, 2.46),
    "fp8": (2.57, 2.48, 2.24, 1.29, 1.91),
    "int8": (0.65, 0.89, 1.36, 2.23, 0.38),
    "hadamard-int8": (0.65, 0.64, 0.61, 0.41, 0.48),
    "hadamard-int6": (2.65, 2.62, 2.48, 1.71, 1.99),
    "hadamard-int4": (11.7, 11.6, 11.0, 7.5, 8.8),
}
ZEROS_KEPT = dict(zip(LOSSY, (64.5, 100, 100, 73.8, 74.3, 74.0), strict=True))
# same section, "ordinary elements beside outliers"; int4 is not given
ORDINARY = {"taco": 8.4, "fp8": 2.6, "int8": 7.3, "hadamard-int8": 1.3, "hadamard-int6": 5.1}
BITS = dict(zip(ALL, (16, 8.5, 8.125, 8.125, 8.125, 6.125, 4.125), strict=True))


def normal(n, g):
    return torch.randn(n, generator=g)


def laplace(n, g):
    u = torch.rand(n, generator=g, dtype=torch.float64) - 0.5
    return (-u.sign() * torch.log1p(-2 * u.abs())).float()


def student(n, g):
    return torch.randn(n, generator=g) / (torch.randn(3, n, generator=g).square().mean(0)).sqrt()


def outliers(n, g):
    return torch.randn(n, generator=g) * torch.where(torch.rand(n, generator=g) < 0.001, 60.0, 1.0)


def sparse(n, g):
    return torch.randn(n, generator=g) * (torch.rand(n, generator=g) < 0.05)


DISTRIBUTIONS = {"normal": normal, "laplace": laplace, "t3": student, "outliers": outliers, "sparse": sparse}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def roundtrip(codec, x, dtype=None):
    dtype = dtype or x.dtype
    return codec.decode(codec.encode(x), x.numel(), dtype).view(x.shape)


def relative_error(y, x):
    return float((y.double() - x.double()).norm() / x.double().norm())


def as_bytes(wire):
    return wire.numpy().tobytes()


def bits_of(x):
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("name", LOSSY)
def test_error_is_that_of_the_table(name, distribution):
    expected = ERRORS[name][list(DISTRIBUTIONS).index(distribution)]
    codec, errors = get_codec(name), []
    for seed in range(6):
        x = DISTRIBUTIONS[distribution](N, seeded(seed))
        errors.append(100 * relative_error(roundtrip(codec, x), x))
    assert np.mean(errors) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("name", LOSSY)
def test_zeros_kept(name):
    x = sparse(N, seeded())
    y = roundtrip(get_codec(name), x)
    assert 100 * float((y == 0)[x == 0].float().mean()) == pytest.approx(ZEROS_KEPT[name], rel=0.03)


@pytest.mark.parametrize("name", ORDINARY)
def test_error_of_ordinary_elements_beside_outliers(name):
    """6 of 1024 channels x40; the error of the other channels, relative to them."""
    errors = []
    for seed in range(12):
        channels = torch.randperm(1024, generator=seeded(seed))[:6]
        x = torch.randn(256, 1024, generator=seeded(seed))
        x[:, channels] *= 40
        y = roundtrip(get_codec(name), x)
        keep = torch.ones(1024, dtype=torch.bool)
        keep[channels] = False
        errors.append(100 * relative_error(y[:, keep], x[:, keep]))
    assert np.mean(errors) == pytest.approx(ORDINARY[name], rel=0.1)


@pytest.mark.parametrize("name", ALL)
def test_wire_bytes_are_exact(name):
    codec = get_codec(name)
    assert codec.group == 128 and codec.name == name
    assert codec.bits_per_element == BITS[name] == codec.wire_bytes(128 * 1000) * 8 / 128000
    for n in [0, 1, 5, 127, 128, 129, 1000, 4097]:
        groups = math.ceil(n / 128)
        expected = {"none": 2 * n, "taco": n + 8 * groups}.get(name, groups * 128 * int(BITS[name]) // 8 + 2 * groups)
        assert codec.wire_bytes(n) == expected == codec.encode(torch.randn(n).bfloat16()).numel()
    assert get_codec("none").wire_bytes(3, torch.float32) == 12


LENGTHS = [*range(1, 261), *(m + d for m in (512, 1024, 4096) for d in (-1, 0, 1))]


@pytest.mark.parametrize("name", LOSSY)
def test_bytes_equal_the_reference_at_every_length(name):
    codec = get_codec(name)
    for n in LENGTHS:
        x = student(n, seeded(n))
        wire = codec.encode(x)
        assert as_bytes(wire) == reference.encode(x, name), n
        y = codec.decode(wire, n, torch.float32)
        expected = torch.from_numpy(reference.decode(as_bytes(wire), n, name))
        if name == "taco":
            torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=float(x.abs().max()) * 1e-6)
        else:
            assert torch.equal(y.double(), expected), n


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LOSSY)
def test_bytes_equal_the_reference_in_every_dtype_and_distribution(name, dtype):
    codec = get_codec(name)
    for make in DISTRIBUTIONS.values():
        x = make(1333, seeded()).to(dtype)
        wire = codec.encode(x)
        assert as_bytes(wire) == reference.encode(x, name)
        y = codec.decode(wire, x.numel(), dtype)
        expected = codec.decode(wire, x.numel(), torch.float32).to(dtype)
        assert y.dtype == dtype and torch.equal(y, expected)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("scale", [1e-34, 1e-20, 1e-10, 1e12, 1e30, 3e37, "bf16 max"])
def test_extreme_scales_have_the_usual_error(name, scale):
    """The published operator returns zeros around 1e-20 and is 70 % wrong around 1e12."""
    x = torch.randn(8, 256, generator=seeded())
    if scale == "bf16 max":
        x = torch.where(x > 0, 1.0, -1.0) * torch.finfo(torch.bfloat16).max
        x[:, ::3] *= 0.25
    else:
        x = (x / x.abs().max()) * scale
    for block in (x, torch.cat([torch.randn(4, 256), x])):  # alone, and with ordinary groups beside
        y = roundtrip(get_codec(name), block.bfloat16())[-8:]
        assert y.isfinite().all()
        assert relative_error(y.double() / 1e30, x.bfloat16().double() / 1e30) < 1.3 * ERRORS[name][0] / 100


@pytest.mark.parametrize("scale", [1e-20, 1e12])
def test_mutant_published_range_is_caught(scale):
    """What test_extreme_scales sees when taco's range is not widened."""
    x = torch.randn(1024, generator=seeded()) * scale
    y = reference.decode_taco(reference.encode_taco(x, widened=False), 1024)
    assert relative_error(torch.from_numpy(y), x) > 0.5
    y = reference.decode_taco(reference.encode_taco(x), 1024)
    assert relative_error(torch.from_numpy(y), x) < 0.03


def special_groups(dtype):
    """One group of 128 each, by name."""
    info, one = torch.finfo(dtype), torch.ones(128, dtype=dtype)
    signs = torch.where(torch.randn(128, generator=seeded()) > 0, 1, -1).to(dtype)
    spike = one.clone()
    spike[17] = 1e30 if dtype != torch.float16 else 6e4
    return {
        "zeros": one * 0,
        "negative zeros": one * -0.0,
        "equal": one * 3,
        "largest": one * info.max,
        "largest, signs": signs * info.max,
        "spike": spike,
        "one element": torch.eye(128, dtype=dtype)[5],
        "subnormal": (signs * info.smallest_normal / 4).to(dtype),
        "smallest": one * info.smallest_normal,
        "limit 2^-118": (one * 2.0**-118).to(dtype),
        "under the limit": (one * 2.0**-119).to(dtype),
        "codes' ties": (torch.arange(128) - 64).to(dtype) / 2,
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LOSSY)
def test_special_groups_are_finite_and_equal_the_reference(name, dtype):
    codec = get_codec(name)
    for what, group in special_groups(dtype).items():
        wire = codec.encode(group)
        assert as_bytes(wire) == reference.encode(group, name), what
        y = codec.decode(wire, 128, dtype)
        assert y.isfinite().all(), what
        if group.abs().max() == 0 or "under" in what:
            assert (y == 0).all(), what
        elif what == "spike":
            assert float(y[17]) == pytest.approx(float(group[17]), rel=0.15)
        elif group.abs().max() >= 2.0**-100:
            assert relative_error(y, group) < 0.2, what


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LOSSY)
def test_non_finite_values_poison_their_own_group_only(name, dtype, value):
    codec = get_codec(name)
    clean = torch.randn(128 * 5 + 37, generator=seeded()).to(dtype)
    expected = roundtrip(codec, clean)
    for position in (0, 200, 511, 512, 640, 676):
        x = clean.clone()
        x[position] = value
        wire = codec.encode(x)
        assert as_bytes(wire) == reference.encode(x, name)
        y = codec.decode(wire, x.numel(), dtype)
        bad = torch.arange(x.numel()) // 128 == position // 128
        assert y[bad].isnan().all()
        assert (bits_of(y)[bad] == codec_module.CANONICAL_NAN[dtype]).all()
        assert torch.equal(y[~bad], expected[~bad])


@pytest.mark.parametrize("name", ALL)
def test_no_word_of_all_ones(name):
    """The kernels read 0xffffffff as "not arrived yet"."""
    codec, g = get_codec(name), seeded()
    for dtype in DTYPES:
        nan = bits_of(torch.empty(1024, dtype=dtype)).fill_(-1).view(dtype)
        top = torch.full((1024,), torch.finfo(dtype).max, dtype=dtype)
        rows = [nan, top, -top, torch.zeros(1024, dtype=dtype), torch.randn(1024, generator=g).to(dtype)]
        for row in [*rows, torch.cat(rows), torch.cat(rows)[:-3]]:
            wire = as_bytes(codec.encode(row))
            words = np.frombuffer(wire[: len(wire) // 4 * 4], np.uint32)
            assert not (words == 0xFFFFFFFF).any()


@pytest.mark.parametrize("name", ALL)
def test_strides_empty_tensors_and_buffers(name):
    codec = get_codec(name)
    x = torch.randn(6, 50, 7, generator=seeded())
    view = x.transpose(0, 2)[::2, 3:]
    before = x.clone()
    wire = codec.encode(view)
    assert torch.equal(wire, codec.encode(view.contiguous())) and torch.equal(x, before)

    dirty = torch.full_like(wire, 0xFF)
    assert codec.encode(view, out=dirty) is dirty and torch.equal(dirty, wire)
    out = torch.full((view.numel(),), math.nan)
    assert codec.decode(wire, view.numel(), torch.float32, out=out) is out
    assert torch.equal(out, codec.decode(wire, view.numel(), torch.float32))

    # a message may lie anywhere in a larger buffer, at odd addresses too
    shifted = torch.full((wire.numel() + 3,), 0xFF, dtype=torch.uint8)[3:]
    if name != "none":
        assert torch.equal(codec.decode(codec.encode(view, out=shifted), view.numel(), torch.float32), out)

    empty = codec.encode(torch.empty(0, 4))
    assert empty.shape == (0,) and codec.decode(empty, 0, torch.bfloat16).shape == (0,)


@pytest.mark.parametrize("name", ALL)
def test_wrong_input_is_refused_by_name(name):
    codec = get_codec(name)
    for dtype in (torch.float64, torch.int32):
        with pytest.raises(ValueError, match=f"{name}.*{str(dtype).removeprefix('torch.')}"):
            codec.encode(torch.zeros(4, dtype=dtype))
    with pytest.raises(ValueError, match="float64"):
        codec.decode(codec.encode(torch.zeros(4)), 4, torch.float64)
    wire = codec.encode(torch.zeros(300))
    for bad in (wire[:-1], wire.view(1, -1), wire.float()):
        with pytest.raises(ValueError, match=f"{name}.*wire"):
            codec.decode(bad, 300, torch.float32)
    with pytest.raises(ValueError, match=f"{name}.*out"):
        codec.decode(wire, 300, torch.float32, out=torch.zeros(299))
    with pytest.raises(ValueError, match=f"{name}.*out"):
        codec.encode(torch.zeros(300), out=torch.zeros(600, dtype=torch.uint8)[::2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_none_is_lossless(dtype):
    x = torch.randn(1001, generator=seeded()).to(dtype)
    x[[3, 500]] = torch.tensor([math.inf, -0.0], dtype=dtype)
    assert torch.equal(bits_of(roundtrip(get_codec("none"), x)), bits_of(x))


@pytest.mark.parametrize("name", LOSSY)
def test_long_messages_rows_and_threads_change_no_byte(name):
    """Long messages are worked off in blocks, several messages at once; neither may show."""
    codec, n = get_codec(name), 128 * 5000 + 77
    x = student(3 * n, seeded()).view(3, n)
    wires = torch.empty(3, codec.wire_bytes(n), dtype=torch.uint8)
    codec.encode_rows(x, wires)
    values = codec.decode_rows(wires, n, torch.float32)
    total = codec.decode_sum(wires, n, torch.float32)
    threads = torch.get_num_threads()
    try:
        for row in range(3):
            torch.set_num_threads(1 + row % 2)
            wire = codec.encode(x[row])
            assert torch.equal(wire, wires[row])
            assert torch.equal(codec.decode(wire, n, torch.float32), values[row])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(total, values[0] + values[1] + values[2])
    short, groups = 128 * 4999, 5000
    head = codec.encode(x[0, :short])
    payload = head.numel() - 4999 * (8 if name == "taco" else 2)
    assert torch.equal(head[:payload], wires[0][:payload]) and groups * 128 > short


def test_e4m3_cast_of_every_code():
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    assert torch.equal(bits_of(unpack_e4m3(codes) * 256), bits_of(codes.view(torch.float8_e4m3fn).float()))


def test_finite_in_finite_out_in_fp16():
    """Rounding must not push a value past 65504."""
    x = (torch.randn(4096, generator=seeded()) * 3e4).clamp(-65504, 65504).half()
    for name in LOSSY:
        y = roundtrip(get_codec(name), x)
        assert y.isfinite().all()
        assert not get_codec(name).decode(get_codec(name).encode(x), 4096, torch.float32).half().isfinite().all()


def test_unknown_codec_lists_the_known():
    assert list_codecs()[: len(ALL)] == ALL
    with pytest.raises(ValueError, match="fp9.*none, taco, fp8, int8, hadamard-int8.*register_codec"):
        get_codec("fp9")


def test_register_codec(monkeypatch):
    monkeypatch.setattr(codec_module, "_FACTORIES", dict(codec_module._FACTORIES))

    class Doubled(IdentityCodec):
        name = "test-registry"

    register_codec("test-registry", Doubled)
    assert "test-registry" in list_codecs()
    codec = get_codec("test-registry")
    assert isinstance(codec, Doubled) and get_codec("test-registry") is codec and get_codec(codec) is codec
    with pytest.raises(ValueError, match="test-registry.*already registered"):
        register_codec("test-registry", Doubled)
    with pytest.raises(ValueError, match="already registered"):
        register_codec("taco", Doubled)
    register_codec("test-no-codec", dict)
    with pytest.raises(ValueError, match="dict.*Codec"):
        get_codec("test-no-codec")
    with pytest.raises(TypeError):
        Codec()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
def test_cuda_and_cpu_have_the_same_bytes(name):
    codec = get_codec(name)
    x = torch.cat([student(10000, seeded()), *(v.float() for v in special_groups(torch.float32).values())])
    for n in (1, 77, 129, x.numel() - 5, x.numel()):
        wire = codec.encode(x[:n])
        assert torch.equal(codec.encode(x[:n].cuda()).cpu(), wire)
        for dtype in DTYPES if name != "none" else [torch.float32]:
            y = codec.decode(wire, n, dtype)
            assert torch.equal(bits_of(codec.decode(wire.cuda(), n, dtype).cpu()), bits_of(y))
