"""A user's subclass of a shipped codec runs its own code everywhere, not what the parent's fast paths know."""

import sys
import types

import pytest
import torch
import torch.distributed as dist

from hf_taco_scape.codecs import codec as codec_module
from hf_taco_scape.codecs import device as codec_device
from hf_taco_scape.codecs import get_codec, list_codecs
from hf_taco_scape.codecs.fp8 import Fp8Codec
from hf_taco_scape.codecs.identity import IdentityCodec
from hf_taco_scape.codecs.integer import IntegerCodec
from hf_taco_scape.codecs.taco import TacoCodec
from hf_taco_scape.collectives import all_gather, all_reduce, reduce_scatter, symm_mem

SHIPPED = (IdentityCodec, TacoCodec, Fp8Codec, IntegerCodec)
PARENTS = {"none": IdentityCodec, "taco": TacoCodec, "fp8": Fp8Codec, "int8": IntegerCodec}


def make(cls):
    return cls(8, False) if issubclass(cls, IntegerCodec) else cls()


def halves(parent):
    """Decodes to half of what its parent does."""

    class Halves(parent):
        def decode_rows(self, wire, numel, dtype):
            return 0.5 * super().decode_rows(wire, numel, dtype)

    return Halves


def flips(parent):
    """Encodes the negative."""

    class Flips(parent):
        def encode_rows(self, x, wire):
            super().encode_rows(-x, wire)

    return Flips


class Truncating(IntegerCodec):
    """Rounds towards zero: a change below encode_rows."""

    def quantise(self, scaled):
        return super().quantise(scaled.trunc_())


class Renamed(Fp8Codec):
    """Nothing that decides on bytes is another's."""

    name = "fp8-renamed"


class Vouched(Truncating):
    """A subclass that has kernels for what it overrides."""

    def make_kernels(self):
        return "its own"


class FakeKernels:
    """Counts calls; would leave the outputs as they are."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, operation):
        return lambda *args: self.calls.append(operation)


@pytest.fixture
def fake_gpu(monkeypatch):
    """Codecs take CPU tensors for those of a GPU that has every kernel: FakeKernels."""
    kernels, real = FakeKernels(), codec_device.kernels_for
    launch = types.SimpleNamespace(supports=lambda device: True)
    monkeypatch.setitem(sys.modules, "hf_taco_scape.kernels.launch", launch)
    monkeypatch.setattr(codec_device.importlib.util, "find_spec", lambda name: launch)
    for cls in SHIPPED:
        monkeypatch.setattr(cls, "make_kernels", lambda self: kernels)
    for module in (codec_device, codec_module):
        monkeypatch.setattr(module, "kernels_for", lambda codec, device: real(codec, torch.device("cuda", 0)))
    codec_device._kernels_on_cuda.cache_clear()
    yield kernels
    codec_device._kernels_on_cuda.cache_clear()


def operations(codec, x):
    """What each way through a codec gives of x [2, numel]."""
    numel, size = x.shape[1], codec.wire_bytes(x.shape[1], x.dtype)
    wire, again = torch.zeros(2, size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    codec.encode_rows(x, wire)
    out = torch.zeros_like(x)
    codec.decode_into(wire, out, x.dtype)
    total = codec.decode_sum(wire, numel, x.dtype)
    codec.decode_sum_encode(wire, numel, x.dtype, again)
    return wire, out, codec.decode_rows(wire, numel, x.dtype), total, again


@pytest.mark.parametrize("name", list_codecs()[:7])
def test_shipped_codecs_and_renamed_ones_take_kernels(fake_gpu, name):
    for codec in (get_codec(name), Renamed()):
        operations(codec, torch.ones(2, 200))
        assert fake_gpu.calls == ["encode", "decode", "decode_sum", "decode_sum_encode", "decode"]
        fake_gpu.calls.clear()


@pytest.mark.parametrize("change", [halves, flips])
@pytest.mark.parametrize("name", PARENTS)
def test_an_overriding_subclass_runs_its_own_code_on_a_gpu(fake_gpu, name, change):
    codec, x = make(change(PARENTS[name])), torch.randn(2, 200, generator=torch.Generator().manual_seed(1))
    on_gpu = operations(codec, x)
    assert fake_gpu.calls == []
    with codec_device.torch_twins():
        expected = operations(codec, x)
    assert all(torch.equal(a, b) for a, b in zip(on_gpu, expected, strict=True))
    factor = 0.5 if change is halves else -1
    assert float((on_gpu[1] - factor * x).norm() / x.norm()) < 0.05


def test_overrides_below_the_rows_count_and_own_kernels_too(fake_gpu):
    operations(Truncating(8, False), torch.ones(2, 200))
    assert fake_gpu.calls == []
    assert codec_device.kernels_for(Vouched(8, False), torch.device("cpu")) == "its own"


class _Alone:
    """Stands for a workspace of symmetric memory."""

    device, rank, ranks = torch.device("cpu"), 0, 2
    check = staticmethod(lambda: None)


@pytest.mark.parametrize("cls", [Truncating, Vouched, *(halves(parent) for parent in SHIPPED)])
def test_symmetric_memory_has_no_kernels_for_overriding_subclasses(cls):
    with pytest.raises(ValueError, match="has no kernels over symmetric memory: set tp_backend to c10d"):
        symm_mem.all_reduce(torch.ones(4), _Alone, make(cls))
    symm_mem.inbox_bytes(4, 2, Renamed())


def _through_a_subclass_of_none():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    codec, x = halves(IdentityCodec)(), torch.arange(1.0, 1 + 6 * 5).view(6, 5)
    total, once = x * sum(range(1, ranks + 1)), 0.5 * x * (rank + 1)
    shots = 1 if ranks == 2 else 2
    assert torch.equal(all_reduce(x * (rank + 1), None, codec), total * 0.5**shots)
    piece = reduce_scatter(x * (rank + 1), None, codec)
    assert torch.equal(piece, (0.5 * total).tensor_split(ranks)[rank])
    joined = all_gather(x * (rank + 1), None, codec)
    assert torch.equal(joined.view(ranks, 6, 5)[rank], once)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_subclass_of_none_is_not_sent_as_none(pool, ranks):
    pool.run(ranks, _through_a_subclass_of_none)
