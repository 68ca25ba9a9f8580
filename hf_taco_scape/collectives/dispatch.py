"""Chooses how a tensor-parallel message travels, from shape, dtype and start-up facts only: all ranks agree."""

import itertools
import logging
import statistics
import time
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..codecs import get_codec
from .compressed import all_gather, all_reduce, reduce_scatter
from .meter import ByteMeter

logger = logging.getLogger(__name__)

NEVER = 2**62  # a min_bytes that no message reaches: everything travels uncompressed

_PROBE_BYTES = [2**e for e in (24, 22, 20, 18, 16, 14)]
_PROBE_REPEATS = 5

_COMMUNICATORS: weakref.WeakValueDictionary[int, "Communicator"] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


class Communicator:
    """One tensor-parallel group with its codecs, threshold and byte counters.

    group: the tensor-parallel process group. codec / codec_backward: names of the wire formats of activations and of
    gradients (default: the same). min_bytes: smaller messages travel uncompressed. Messages with codec `none` are
    plain `dist.all_reduce`.
    """

    def __init__(self, group, codec: str = "taco", codec_backward: str | None = None, min_bytes: int = 0) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.codec = get_codec(codec)
        self.codec_backward = get_codec(codec_backward or codec)
        self.min_bytes = min_bytes
        self.meter = ByteMeter()
        self._dense = get_codec("none")
        self._sampler = _ErrorSampler()
        self._number = next(_NUMBERS)
        _COMMUNICATORS[self._number] = self

    def __deepcopy__(self, memo):
        return self  # process groups cannot be copied, and a copied model talks to the same peers

    def all_reduce(self, x: torch.Tensor, backward: bool = False) -> torch.Tensor:
        """Sum `x` (any shape) over the group into a new tensor, the same bits on every rank."""
        if torch.compiler.is_compiling():
            return _opaque_all_reduce(x, self._number, backward)
        return all_reduce(x, self.group, self._codec_for(x, x.nbytes, backward), meter=self.meter)

    def reduce_scatter(self, x: torch.Tensor, dim: int, backward: bool = False) -> torch.Tensor:
        """Sum `x` over the group and return, contiguous, this rank's piece along `dim`: `piece_sizes` has its length.

        Plain torch.distributed: all_reduce, then `x.tensor_split(size, dim)[rank]`. `x` has one shape on all ranks.
        """
        if torch.compiler.is_compiling():
            return _opaque_reduce_scatter(x, self._number, dim, backward)
        codec = self._codec_for(x, x.nbytes, backward)
        return _along(dim, lambda rows: reduce_scatter(rows, self.group, codec, meter=self.meter), x)

    def all_gather(
        self, x: torch.Tensor, dim: int, sizes: list[int] | None = None, backward: bool = False
    ) -> torch.Tensor:
        """Join the ranks' pieces along `dim` in rank order, contiguous, the same bits on every rank.

        sizes: every rank's `x.shape[dim]`, needed where they differ (`piece_sizes(length)` after a reduce_scatter).
        Plain torch.distributed: all_gather, then `torch.cat(pieces, dim)`.
        """
        if torch.compiler.is_compiling():
            return _opaque_all_gather(x, self._number, dim, sizes, backward)
        whole = x.shape[dim] * self.size if sizes is None else sum(sizes)
        codec = self._codec_for(x, x.nbytes // max(x.shape[dim], 1) * whole, backward)
        return _along(dim, lambda rows: all_gather(rows, self.group, codec, sizes, meter=self.meter), x)

    def piece_sizes(self, length: int) -> list[int]:
        """What `reduce_scatter` leaves of a dim of `length` on each rank: pieces that differ by one at most."""
        return [_piece_size(length, self.size, rank) for rank in range(self.size)]

    def _codec_for(self, x: torch.Tensor, nbytes: int, backward: bool):
        """The codec of a message of `nbytes` (all ranks' pieces together); may take a sample of its error on `x`."""
        codec = self.codec_backward if backward else self.codec
        if nbytes < self.min_bytes:
            return self._dense
        if codec.name != "none":
            self._sampler.see(x, codec, backward)
        return codec

    def request_error_sample(self) -> None:
        """Measure the codecs' relative error on one of the next messages of each direction."""
        self._sampler.arm()

    def error_samples(self) -> dict[str, float]:
        """Relative L2 error of the last sampled messages by direction; synchronises with the device."""
        return {name: float(error) for name, error in self._sampler.errors.items()}


@torch.library.custom_op("hf_taco_scape::tp_all_reduce", mutates_args=())
def _opaque_all_reduce(x: torch.Tensor, communicator: int, backward: bool) -> torch.Tensor:
    """What torch.compile sees of `Communicator.all_reduce`: one operator that it neither traces nor splits at."""
    return _COMMUNICATORS[communicator].all_reduce(x, backward)


@_opaque_all_reduce.register_fake
def _(x: torch.Tensor, communicator: int, backward: bool) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("hf_taco_scape::tp_reduce_scatter", mutates_args=())
def _opaque_reduce_scatter(x: torch.Tensor, communicator: int, dim: int, backward: bool) -> torch.Tensor:
    return _COMMUNICATORS[communicator].reduce_scatter(x, dim, backward)


@_opaque_reduce_scatter.register_fake
def _(x: torch.Tensor, communicator: int, dim: int, backward: bool) -> torch.Tensor:
    comm, shape = _COMMUNICATORS[communicator], list(x.shape)
    shape[dim] = _piece_size(shape[dim], comm.size, comm.rank)
    return x.new_empty(shape)


@torch.library.custom_op("hf_taco_scape::tp_all_gather", mutates_args=())
def _opaque_all_gather(
    x: torch.Tensor, communicator: int, dim: int, sizes: Sequence[int] | None, backward: bool
) -> torch.Tensor:
    sizes = None if sizes is None else list(sizes)
    return _COMMUNICATORS[communicator].all_gather(x, dim, sizes, backward)


@_opaque_all_gather.register_fake
def _(x: torch.Tensor, communicator: int, dim: int, sizes: Sequence[int] | None, backward: bool) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = shape[dim] * _COMMUNICATORS[communicator].size if sizes is None else sum(sizes)
    return x.new_empty(shape)


def _piece_size(length, ranks: int, rank: int):
    """Length of piece `rank` of torch.tensor_split, without a branch: lengths are symbols under torch.compile."""
    return (length - rank + ranks - 1) // ranks


def _along(dim: int, collective, x: torch.Tensor) -> torch.Tensor:
    """`collective`, which works along dim 0, along `dim` instead."""
    return collective(x.movedim(dim, 0)).movedim(0, dim).contiguous()


class _ErrorSampler:
    """Encodes one message per direction a second time and keeps its error; which layer's rotates."""

    _STRIDE = 7  # coprime to usual layer counts, so that samples visit all layers

    def __init__(self) -> None:
        self.errors: dict[str, torch.Tensor] = {}
        self._arms = 0
        self._calls = {"forward": 0, "backward": 0}
        self._due = {"forward": None, "backward": None}

    def arm(self) -> None:
        for direction, calls in self._calls.items():
            self._due[direction] = (self._arms * self._STRIDE) % calls if calls else 0
        self._calls = dict.fromkeys(self._calls, 0)
        self._arms += 1

    @torch.no_grad()
    def see(self, x: torch.Tensor, codec, backward: bool) -> None:
        direction = "backward" if backward else "forward"
        if self._due[direction] == self._calls[direction] and x.numel():
            flat = x.detach().reshape(-1)
            decoded = codec.decode(codec.encode(flat), flat.numel(), torch.float32)
            exact = flat.float()
            # an all-zero message (a padded batch, a fresh head) has no relative error
            self.errors[direction] = (decoded - exact).norm() / exact.norm().clamp_min(torch.finfo(torch.float32).tiny)
            self._due[direction] = None
        self._calls[direction] += 1


def measure_min_bytes(comm: Communicator, device: torch.device) -> int:
    """Time dense against compressed all-reduces and return the size in bytes from which compression wins.

    Collective over the group, about a second; every rank returns the same number, `NEVER` where the largest probed
    message is not faster compressed. Messages are bf16 on accelerators and fp32 on CPU.
    """
    codecs = [c for c in (comm.codec, comm.codec_backward) if c.name != "none"]
    if not codecs:
        return 0
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    smallest_win = NEVER
    for nbytes in _PROBE_BYTES:
        x = torch.randn(nbytes // dtype.itemsize, device=device).to(dtype)
        dense = _time(lambda x=x: all_reduce(x, comm.group, comm._dense), device)
        packed = max(_time(lambda x=x, c=c: all_reduce(x, comm.group, c), device) for c in codecs)
        slower = torch.tensor([float(packed >= dense)], device=device)
        dist.all_reduce(slower, op=dist.ReduceOp.MAX, group=comm.group)
        if slower.item():
            break
        smallest_win = nbytes
    return smallest_win


def agree_on_largest(value: int, groups, device: torch.device) -> int:
    """The largest `value` over `groups` (None entries are skipped); collective over each."""
    tensor = torch.tensor([value], dtype=torch.int64, device=device)
    for group in groups:
        if group is not None:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return int(tensor.item())


def _time(call, device: torch.device) -> float:
    times = []
    for _ in range(_PROBE_REPEATS):
        start = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
