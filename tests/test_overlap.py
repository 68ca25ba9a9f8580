"""Averaging overlapped with the backward equals averaging after it."""

import pytest
import tiny
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import hf_taco_scape.sync.overlap as overlap
from hf_taco_scape.collectives.meter import ByteMeter
from hf_taco_scape.sync.dense import average_gradients


def _gradients(model, average, backwards=1, buckets=2**20):
    group, parameters = dist.group.WORLD, list(model.parameters())
    meter = ByteMeter()
    sync = overlap.OverlappedAverage(parameters, group, meter, buckets) if average == "overlapped" else None
    for step in range(2):  # buffers are used again
        model.zero_grad()
        for index in range(backwards):
            if sync is not None and index == backwards - 1:
                sync.arm()
            model(**tiny.batch(2, 10 * step + dist.get_rank() + 5 * index)).loss.backward()
        if sync is not None:
            sync.finish()
            sync.finish()  # nothing twice
        else:
            average_gradients(parameters, group, meter)
    return [p.grad.clone() for p in parameters], meter.snapshot(), sync and len(sync._buckets)


def _both(backwards, buckets):
    expected, dense, _ = _gradients(tiny.build("qwen3"), "after", backwards)
    got, sent, count = _gradients(tiny.build("qwen3"), "overlapped", backwards, buckets)
    assert all(torch.allclose(a, b, atol=1e-7, rtol=1e-6) for a, b in zip(expected, got, strict=True))
    assert abs(sent["sent_bytes"] - dense["sent_bytes"]) <= 4 * count
    return got, count


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("backwards", [1, 3])
def test_equals_averaging_afterwards(pool, world, backwards):
    results = pool.run(world, _both, backwards, 2**15)
    assert results[0][1] > 3, "one bucket shows no order"
    for got, _ in results:
        assert all(torch.equal(a, b) for a, b in zip(got, results[0][0], strict=True)), "ranks disagree"


def _sent_before_the_end():
    model = tiny.build("qwen3")
    sync = overlap.OverlappedAverage(list(model.parameters()), dist.group.WORLD, bucket_bytes=2**12)
    seen = []
    last = model.model.layers[0].input_layernorm.weight
    last.register_post_accumulate_grad_hook(lambda p: seen.append(sync._next))
    sync.arm()
    model(**tiny.batch(2, dist.get_rank())).loss.backward()
    sync.finish()
    return seen[0], len(sync._buckets)


def test_buckets_leave_during_the_backward(pool):
    for sent, buckets in pool.run(2, _sent_before_the_end):
        assert sent > buckets // 2


class _Odd(torch.nn.Module):
    """used: on all ranks; sometimes: on rank 0 only; never; shared: twice, through reentrant checkpointing."""

    def __init__(self):
        super().__init__()
        self.used, self.sometimes, self.never, self.shared = (torch.nn.Parameter(torch.ones(4)) for _ in range(4))

    def forward(self, x):
        y = checkpoint(lambda t: t * self.shared, x * self.used, use_reentrant=True)
        y = checkpoint(lambda t: t * self.shared.sin(), y, use_reentrant=True)
        return (y * (self.sometimes if dist.get_rank() == 0 else 1)).sum()


def _odd(average):
    model = _Odd()
    parameters = list(model.parameters())
    x = torch.arange(4.0, requires_grad=True) + dist.get_rank()
    if average == "overlapped":
        sync = overlap.OverlappedAverage(parameters, dist.group.WORLD, bucket_bytes=1)  # a bucket a parameter
        sync.arm()
        model(x).backward()
        late = max(sync._arrivals)
        sync.finish()
        assert late > 1, "the case of a late gradient did not arise"
    else:
        model(x).backward()
        average_gradients(parameters, dist.group.WORLD)
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


def test_unused_and_late_gradients(pool):
    expected = pool.run(2, _odd, "after")
    got = pool.run(2, _odd, "overlapped")
    assert got == expected and got[0] == got[1]
    assert got[0][2] is None and got[0][1] is not None


def _two_rounds():
    """A loop that backpropagates two losses before its step and announces both: averages of averages are right."""
    model = tiny.build("gpt2")
    parameters = list(model.parameters())
    sync = overlap.OverlappedAverage(parameters, dist.group.WORLD)
    for seed in range(2):
        sync.arm()
        model(**tiny.batch(2, seed + 7 * dist.get_rank())).loss.backward()
    sync.finish()
    got = [p.grad.clone() for p in parameters]
    model.zero_grad()
    for seed in range(2):
        model(**tiny.batch(2, seed + 7 * dist.get_rank())).loss.backward()
    average_gradients(parameters, dist.group.WORLD)
    assert all(torch.allclose(a, p.grad, atol=1e-6) for a, p in zip(got, parameters, strict=True))


def test_two_announced_backwards(pool):
    pool.run(2, _two_rounds)
