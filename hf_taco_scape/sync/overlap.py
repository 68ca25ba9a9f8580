"""Dense gradient averaging overlapped with the backward that makes the gradients, as DistributedDataParallel does it.

A bucket of gradients is sent as soon as its last one is there, in one order on all ranks, while the backward goes on.
Gradients are copied into the buckets and back, so a parameter that turns out to get more gradient after its bucket has
left (reentrant checkpointing of a shared weight) still has its local sum and is averaged again.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ..collectives.meter import ByteMeter, ring_all_reduce_bytes
from .dense import average_gradients

BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_SHARE = 1 / 25  # of the others' size, so that the wire starts early


@dataclass
class _Bucket:
    places: list[int]  # of its parameters
    flat: torch.Tensor
    views: list[torch.Tensor]
    missing: int = 0
    work: dist.Work | None = field(default=None, repr=False)


class OverlappedAverage:
    """Averages the gradients of `parameters` over `group`; `arm` before the last backward of a step, `finish` after.

    Every rank passes the same parameters in the same order. A parameter with a gradient on some ranks only counts as
    zero on the others; one that got none anywhere keeps None. The same as `average_gradients(parameters, group)`.
    `bucket_bytes` must be the same on all ranks.
    """

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        group,
        meter: ByteMeter | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.parameters, self.group, self.meter = parameters, group, meter
        self.ranks = dist.get_world_size(group)
        self._buckets = _fill_buckets(parameters, bucket_bytes)
        self._bucket_of = {place: (b, i) for b in self._buckets for i, place in enumerate(b.places)}
        self._armed = False
        self._handles = [
            p.register_post_accumulate_grad_hook(lambda p, place=place: self._ready(place))
            for place, p in enumerate(parameters)
        ]

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def arm(self) -> None:
        """The next backward is the step's last: send what it completes. Two in a row average what the first left."""
        if self._armed:
            self.finish()
        self._armed = True
        self._arrivals = [0] * len(self.parameters)
        self._next = 0
        for bucket in self._buckets:
            bucket.missing, bucket.work = len(bucket.places), None

    def arm_if_needed(self) -> None:
        """For a step whose last backward was not announced: everything is sent by `finish`."""
        if not self._armed:
            self.arm()

    @torch.no_grad()
    def _ready(self, place: int) -> None:
        if not self._armed:
            return
        self._arrivals[place] += 1
        if self._arrivals[place] == 1:
            bucket, index = self._bucket_of[place]
            # at once, while it is in the cache
            bucket.views[index].copy_(self.parameters[place].grad)
            bucket.missing -= 1
            while self._next < len(self._buckets) and not self._buckets[self._next].missing:
                self._send_next()

    @torch.no_grad()
    def _send_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        for view, place in zip(bucket.views, bucket.places, strict=True):
            if not self._arrivals[place]:  # none in this backward, but perhaps in an earlier one of the step
                gradient = self.parameters[place].grad
                view.zero_() if gradient is None else view.copy_(gradient)
        bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)

    @torch.no_grad()
    def finish(self) -> None:
        """Send what is left, wait, and put the averages into `.grad`; does nothing unless armed. Collective."""
        if not self._armed:
            return
        self._armed = False
        while self._next < len(self._buckets):
            self._send_next()
        # ranks must agree on which parameters have a gradient anywhere, and on which got more of it too late
        facts = bytearray([p.grad is not None for p in self.parameters] + [n > 1 for n in self._arrivals])
        facts = torch.frombuffer(facts, dtype=torch.uint8).to(self._buckets[0].flat.device)
        agreed = dist.all_reduce(facts, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        for work in [*(bucket.work for bucket in self._buckets), agreed]:
            work.wait()
        facts = facts.tolist()
        used, late = facts[: len(self.parameters)], facts[len(self.parameters) :]
        for bucket in self._buckets:
            for place, view in zip(bucket.places, bucket.views, strict=True):
                parameter = self.parameters[place]
                if late[place] or not used[place]:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                # divided on the way back: memory is passed over twice a step, as under DDP
                torch.div(view, self.ranks, out=parameter.grad)
        again = [p for p, is_late in zip(self.parameters, late, strict=True) if is_late]
        if again:
            average_gradients(again, self.group, self.meter)
        if self.meter is not None:
            sent = sum(ring_all_reduce_bytes(bucket.flat.nbytes, self.ranks) for bucket in self._buckets)
            self.meter.add(sent, sent)


def _fill_buckets(parameters: list[torch.nn.Parameter], bucket_bytes: int) -> list[_Bucket]:
    """Buckets in reverse order of the parameters, about the order in which a backward makes their gradients."""
    buckets: list[list[int]] = []
    size, limit, kind = 0, 0, None
    for place in reversed(range(len(parameters))):
        parameter = parameters[place]
        same_kind = (parameter.dtype, parameter.device) == kind
        if not buckets or size >= limit or not same_kind:
            limit = bucket_bytes if buckets else bucket_bytes * FIRST_BUCKET_SHARE
            buckets.append([])
            size, kind = 0, (parameter.dtype, parameter.device)
        buckets[-1].append(place)
        size += parameter.nbytes
    return [_make_bucket(places, [parameters[place] for place in places]) for places in buckets]


def _make_bucket(places: list[int], parameters: list[torch.nn.Parameter]) -> _Bucket:
    like = parameters[0]
    flat = torch.empty(sum(p.numel() for p in parameters), dtype=like.dtype, device=like.device)
    parts = flat.split([p.numel() for p in parameters])
    return _Bucket(places, flat, [part.view_as(p) for part, p in zip(parts, parameters, strict=True)])
