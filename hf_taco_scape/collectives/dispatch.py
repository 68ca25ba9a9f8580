"""A tensor-parallel group with its codecs and the choice of how each message travels: all ranks choose alike.

The choice follows from shape, dtype and start-up facts only. `open_communicator` measures them, `Communicator` uses
them; the table of what goes which way is data (routes.py).
"""

import contextlib
import itertools
import logging
import math
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..codecs import get_codec
from ..codecs.codec import MESSAGE_DTYPES
from ..codecs.device import kernels_for
from . import compressed, symm_mem
from .crossover import SIZES, Measured, measure
from .error_sample import ErrorSampler
from .machine import cache_file, differences, first_says, read_cache, signature, write_cache
from .meter import ByteMeter
from .presets import codec_pair
from .routes import Route, RouteTable, fixed_table

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "c10d", "symm_mem")
# what auto chooses from; symm_mem joins it when all of tests/test_symm_mem.py has passed on GPUs
AUTO_BACKENDS = ("c10d",)

_COMMUNICATORS: weakref.WeakValueDictionary[int, "Communicator"] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


class Communicator:
    """One tensor-parallel group with its codecs, table of routes and byte counters.

    group: the tensor-parallel process group. codec / codec_backward: names of the wire formats of activations and of
    gradients (default: the same), or a preset. min_bytes: smaller messages travel uncompressed, by the process group's
    own collectives. This is the plain communicator; `open_communicator` has backends and measures.
    """

    def __init__(self, group, codec: str = "taco", codec_backward: str | None = None, min_bytes: int = 0) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.codec_names = codec_pair(codec, codec_backward)
        self._codecs = {name: get_codec(name) for name in {*self.codec_names, "none"}}
        self.codec, self.codec_backward = (self._codecs[name] for name in self.codec_names)
        self.table = fixed_table(self.codec_names, min_bytes, "c10d", self.size)
        self.signature: dict | None = None  # of what the table was measured on
        self.measured: dict[str, Measured] | None = None  # this start's times, by operation; None from the cache
        self.workspace = None  # symmetric memory
        self.meter = ByteMeter()
        self._sampler = ErrorSampler()
        self._number = next(_NUMBERS)
        _COMMUNICATORS[self._number] = self

    def __deepcopy__(self, memo):
        return self  # process groups cannot be copied, and a copied model talks to the same peers

    def all_reduce(self, x: torch.Tensor, backward: bool = False) -> torch.Tensor:
        """Sum `x` (any shape) over the group into a new tensor, the same bits on every rank."""
        if torch.compiler.is_compiling():
            return _opaque_all_reduce(x, self._number, backward)
        return self.send("all_reduce", self._route("all_reduce", x, x.nbytes, backward), x, meter=self.meter)

    def reduce_scatter(self, x: torch.Tensor, dim: int, backward: bool = False) -> torch.Tensor:
        """Sum `x` over the group and return, contiguous, this rank's piece along `dim`: `piece_sizes` has its length.

        Plain torch.distributed: all_reduce, then `x.tensor_split(size, dim)[rank]`. `x` has one shape on all ranks.
        """
        if torch.compiler.is_compiling():
            return _opaque_reduce_scatter(x, self._number, dim, backward)
        route = self._route("reduce_scatter", x, x.nbytes, backward)
        return self.send("reduce_scatter", route, x.movedim(dim, 0), meter=self.meter).movedim(0, dim).contiguous()

    def all_gather(
        self, x: torch.Tensor, dim: int, sizes: list[int] | None = None, backward: bool = False, exact: bool = False
    ) -> torch.Tensor:
        """Join the ranks' pieces along `dim` in rank order, contiguous, the same bits on every rank.

        sizes: every rank's `x.shape[dim]`, needed where they differ (`piece_sizes(length)` after a reduce_scatter).
        exact: never through a codec. Plain torch.distributed: all_gather, then `torch.cat(pieces, dim)`.
        """
        if torch.compiler.is_compiling():
            return _opaque_all_gather(x, self._number, dim, sizes, backward, exact)
        rows = x.movedim(dim, 0)
        # every rank counts the whole message: pieces may differ, and one may be empty
        whole = len(rows) * self.size if sizes is None else sum(sizes)
        nbytes = whole * math.prod(rows.shape[1:]) * x.element_size()
        route = Route("none") if exact else self._route("all_gather", x, nbytes, backward)
        return self.send("all_gather", route, rows, sizes, self.meter).movedim(0, dim).contiguous()

    def piece_sizes(self, length: int) -> list[int]:
        """What `reduce_scatter` leaves of a dim of `length` on each rank: pieces that differ by one at most."""
        return [_piece_size(length, self.size, rank) for rank in range(self.size)]

    def send(
        self, operation: str, route: Route, x: torch.Tensor, sizes: list[int] | None = None,
        meter: ByteMeter | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Make one collective, along dim 0, by `route`; dtypes that no kernel knows take the process group's own."""
        codec = self._codecs[route.codec]
        extra = {"sizes": sizes} if operation == "all_gather" else {}
        if route.backend == "symm_mem" and x.dtype in MESSAGE_DTYPES:
            return getattr(symm_mem, operation)(x, self.workspace, codec, meter=meter, **extra)
        if operation == "all_reduce":
            extra["shots"] = route.shots
        return getattr(compressed, operation)(x, self.group, codec, meter=meter, **extra)

    @contextlib.contextmanager
    def uncompressed(self):
        """Inside, messages travel as they are: what a model gives without the codec's noise."""
        table, self.table = self.table, fixed_table(("none", "none"), 0, "c10d", self.size)
        try:
            yield
        finally:
            self.table = table

    def request_error_sample(self) -> None:
        """Measure the codecs' relative error on one of the next messages of each direction."""
        self._sampler.arm()

    def error_samples(self) -> dict[str, float]:
        """Relative L2 error of the last sampled messages by direction; synchronises with the device."""
        return {name: float(error) for name, error in self._sampler.errors.items()}

    # ---- what a resume repeats
    def choice_to_repeat(self) -> dict | None:
        """JSON for a checkpoint: the measured table and what it was measured on; None for an explicit threshold."""
        return self.signature and {"signature": self.signature, "table": self.table.to_json()}

    def repeat_choice(self, saved: dict | None, groups: Sequence[dist.ProcessGroup]) -> None:
        """Send as the checkpoint's run did, so that a resumed run has the same bits; collective over `groups`.

        The first rank's `saved` counts. Keeps this start's table, with a line in the log, where the hardware, the
        codecs or the ranks are others now; other versions of software alone are no reason to.
        """
        if self.signature is None:
            return
        saved, first = first_says(saved, groups), self._is_first(groups)
        if saved is None:
            if first:
                logger.info("the checkpoint keeps no choice of routes: messages travel as measured at this start")
            return
        changed = [d for d in differences(saved["signature"], self.signature) if not d.startswith("software")]
        if changed:
            if first:
                logger.warning(
                    "messages travel as measured at this start, not as in the checkpoint's run (%s differ): the "
                    "resumed run will not repeat the bits of an unbroken one",
                    ", ".join(changed),
                )
            return
        table = RouteTable.from_json(saved["table"])
        if table != self.table and first:
            logger.info("messages travel as in the checkpoint's run, not as measured now:\n%s", table.describe())
        self.table = table

    def _route(self, operation: str, x: torch.Tensor, nbytes: int, backward: bool) -> Route:
        direction = "backward" if backward else "forward"
        route = self.table.route(operation, direction, nbytes)
        if not route.dense:
            self._sampler.see(x, self._codecs[route.codec], direction)
        return route

    def _is_first(self, groups: Sequence[dist.ProcessGroup]) -> bool:
        return all(dist.get_rank(group) == 0 for group in (self.group, *groups))


def open_communicator(
    group,
    codec: str = "taco",
    codec_backward: str | None = None,
    *,
    min_bytes: int | str = "auto",
    backend: str = "auto",
    device: torch.device,
    operations: Sequence[str] = ("all_reduce",),
    agree_over: Sequence[dist.ProcessGroup] = (),
    use_cache: bool = True,
) -> Communicator:
    """A communicator that is ready to send messages that lie on `device`; collective over `group` and `agree_over`.

    min_bytes: "auto" measures which route is fastest at which size (seconds, kept on disk by machine and version), or
    a number: smaller messages travel uncompressed. backend: c10d (the process group's collectives), symm_mem (fused
    kernels), or auto: what AUTO_BACKENDS names, measured. operations: what will be sent. agree_over: groups whose
    members must choose alike too (data-parallel ones).

    Raises ValueError for unknown names, for codecs that this GPU cannot run, and, naming why, where symm_mem was asked
    for and cannot start.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not known; choose one of: {', '.join(BACKENDS)}")
    threshold = 0 if min_bytes == "auto" else min_bytes
    comm = Communicator(group, codec, codec_backward, threshold)
    groups = [group, *(other for other in agree_over if other is not group)]
    refusal = _first_of(_codec_refusal(comm, device), groups)
    if refusal:
        raise ValueError(refusal)
    backends = _start_backends(comm, backend, device, groups)
    if min_bytes != "auto" or (set(comm.codec_names) == {"none"} and len(backends) == 1):
        # nothing to measure, or nothing to choose; the kernels, wherever they run
        comm.table = fixed_table(comm.codec_names, threshold, backends[-1], comm.size)
        return comm
    job = {
        "ranks": comm.size, "backends": list(backends), "operations": list(operations),
        "codecs": [[name, comm._codecs[name].bits_per_element] for name in comm.codec_names],
    }  # fmt: skip
    comm.signature = signature(device, job, groups)
    first = comm._is_first(groups)
    # one rank reads: folders differ between nodes, and all have to have the same table
    found = first_says(read_cache(comm.signature) if first and use_cache else None, groups)
    source = f"kept in {cache_file(comm.signature)}; python -m hf_taco_scape.doctor measures again"
    if found is None:
        source = "measured now"

        def run(operation, route, x):
            return comm.send(operation, route, x.view(comm.size, -1)[comm.rank] if operation == "all_gather" else x)

        found, comm.measured = measure(run, operations, comm.codec_names, backends, comm.size, groups, device)
        if first:
            write_cache(comm.signature, found)
    comm.table = found
    if first:
        logger.info("tensor-parallel messages over %d ranks (%s):\n%s", comm.size, source, found.describe())
    return comm


def _codec_refusal(comm: Communicator, device: torch.device) -> str | None:
    try:
        for codec in (comm.codec, comm.codec_backward):
            kernels_for(codec, device)
    except ValueError as error:
        return str(error)
    return None


def _start_backends(comm: Communicator, backend: str, device: torch.device, groups) -> tuple[str, ...]:
    """The backends to choose from; opens the workspace of symmetric memory where it is among them."""
    if "symm_mem" not in (AUTO_BACKENDS if backend == "auto" else (backend,)):
        return ("c10d",)
    reason = _first_of(_why_no_symm_mem(comm, device), groups)
    if reason is None:
        numel = SIZES[-1] // torch.bfloat16.itemsize
        inboxes = [symm_mem.inbox_bytes(numel, comm.size, codec, torch.bfloat16) for codec in comm._codecs.values()]
        comm.workspace = symm_mem.SymmetricWorkspace(comm.group, device, max(inboxes))
        return ("symm_mem",) if backend == "symm_mem" else AUTO_BACKENDS
    if backend == "symm_mem":
        raise ValueError(f"tp_backend symm_mem cannot start: {reason}. Choose auto or c10d")
    if comm._is_first(groups):
        # nobody expects it without a GPU
        level = logging.INFO if device.type == "cpu" else logging.WARNING
        logger.log(level, "tp_backend auto: c10d only, symm_mem cannot start: %s", reason)
    return ("c10d",)


def _first_of(text: str | None, groups: Sequence[dist.ProcessGroup]) -> str | None:
    """The first rank's `text` that is not None, on every rank; collective over `groups`."""
    for group in groups:
        texts = [None] * dist.get_world_size(group)
        dist.all_gather_object(texts, text, group=group)
        text = next((t for t in texts if t is not None), None)
    return text


def _why_no_symm_mem(comm: Communicator, device: torch.device) -> str | None:
    reason = symm_mem.why_not(comm.group, device)
    if reason is None:
        try:
            for codec in comm._codecs.values():
                symm_mem.inbox_bytes(1, comm.size, codec)
        except ValueError as error:  # a registered codec without kernels
            return str(error)
    return reason


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
    x: torch.Tensor, communicator: int, dim: int, sizes: Sequence[int] | None, backward: bool, exact: bool
) -> torch.Tensor:
    sizes = None if sizes is None else list(sizes)
    return _COMMUNICATORS[communicator].all_gather(x, dim, sizes, backward, exact)


@_opaque_all_gather.register_fake
def _(
    x: torch.Tensor, communicator: int, dim: int, sizes: Sequence[int] | None, backward: bool, exact: bool
) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = shape[dim] * _COMMUNICATORS[communicator].size if sizes is None else sum(sizes)
    return x.new_empty(shape)


def _piece_size(length, ranks: int, rank: int):
    """Length of piece `rank` of torch.tensor_split, without a branch: lengths are symbols under torch.compile."""
    return (length - rank + ranks - 1) // ranks
