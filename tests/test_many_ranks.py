"""Sixteen gloo ranks with small messages: every codec, odd sizes, calls in a row, ranks out of step."""

import hashlib
import math
import random
import time

import conftest
import pytest
import torch
import torch.distributed as dist

from hf_taco_scape.codecs import get_codec
from hf_taco_scape.collectives import all_gather, all_reduce, compressed, reduce_scatter

RANKS = 16
CODECS = ["none", "taco", "fp8", "int8", "hadamard-int8", "hadamard-int6", "hadamard-int4"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1,), (17, 3), (129,), (33, 67), (4099,)]  # less than a rank's chunk, uneven, tails
CALLS = 24


@pytest.fixture(scope="module")
def ranks():
    workers = conftest.WorkerPool(RANKS)
    yield workers
    workers.stop()


def inputs(call, shape, dtype):
    """Every rank's message of this call: each rank can make all of them."""
    everybody = torch.randn(RANKS, *shape, generator=torch.Generator().manual_seed(call))
    return everybody.to(dtype)


def decoded(codec, messages, dtype):
    """fp32[messages, numel]: each row as its receivers decode it."""
    wires = torch.stack([codec.encode(m) for m in messages])
    return codec.decode_rows(wires, messages.shape[1], dtype)


def summed(rows):
    """Added in rank order."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def expected_sum(codec, xs):
    """Two shots on one process: chunks summed by their owners, encoded again, decoded by all."""
    flat, dtype = xs.view(RANKS, -1), xs.dtype
    if codec.name == "none":
        return summed(flat.float()).to(dtype).view(xs.shape[1:])
    numel = flat.shape[1]
    chunk = math.ceil(numel / (128 * RANKS)) * 128
    padded = flat.new_zeros(RANKS, RANKS * chunk)
    padded[:, :numel] = flat
    between = torch.float16 if dtype == torch.float16 else torch.float32
    parts = []
    for messages in padded.split(chunk, 1):
        total = summed(decoded(codec, messages, dtype)).to(between)
        parts.append(codec.decode(codec.encode(total), chunk, dtype))
    return torch.cat(parts)[:numel].view(xs.shape[1:])


def expected_piece(codec, xs, rank):
    pieces = [x.tensor_split(RANKS)[rank] for x in xs]
    if pieces[0].numel() == 0:
        return pieces[0]
    return summed(decoded(codec, torch.stack([p.flatten() for p in pieces]), xs.dtype)).to(xs.dtype).view_as(pieces[0])


def expected_join(codec, xs):
    rows = decoded(codec, xs.flatten(1), xs.dtype).to(xs.dtype)
    return rows.reshape(-1, *xs.shape[2:])


def calls_in_a_row(name, skew_seed):
    """Calls without a pause between them, then the comparison: a late rank meets messages of later calls."""
    rank, codec, late = dist.get_rank(), get_codec(name), random.Random(skew_seed + dist.get_rank())
    jobs, results = [], []
    for call in range(CALLS):
        xs = inputs(call, SHAPES[call % len(SHAPES)], DTYPES[call % len(DTYPES)])
        jobs.append((call % 8, xs))
    for kind, xs in jobs:
        if late.random() < 0.2:
            time.sleep(late.random() * 0.01)
        collective = {0: reduce_scatter, 1: all_gather}.get(kind, all_reduce)
        results.append(collective(xs[rank], None, codec))
    for call, ((kind, xs), got) in enumerate(zip(jobs, results, strict=True)):
        if kind and call % RANKS != rank:
            continue  # one rank recomputes what all have: that they have the same is seen from the hashes
        if kind == 0:
            expected = expected_piece(codec, xs, rank)
        else:
            expected = expected_join(codec, xs) if kind == 1 else expected_sum(codec, xs)
        assert got.dtype == xs.dtype and got.shape == expected.shape, call
        if name == "none" and kind != 1:  # torch.distributed's own sum has an order and a rounding of its own
            tolerance = 2 * RANKS * torch.finfo(xs.dtype).eps * float(xs.float().abs().amax())
            torch.testing.assert_close(got, expected, rtol=0.0, atol=tolerance)
        else:
            assert torch.equal(got, expected), f"call {call}: {tuple(xs.shape[1:])}, {xs.dtype}"
    same = [y for (kind, _), y in zip(jobs, results, strict=True) if kind]
    return [hashlib.sha256(y.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest() for y in same]


@pytest.mark.slow
@pytest.mark.parametrize("name", CODECS)
def test_calls_in_a_row_of_sixteen_ranks(ranks, name):
    found = ranks.run(RANKS, calls_in_a_row, name, 7)
    for rank, hashes in enumerate(found):
        assert hashes == found[0], f"rank {rank} has other bits than rank 0"


def _owner_in_full(skew):
    """A mutant: the owner of a chunk keeps the sum that it did not send through the codec."""
    real, rank = compressed.two_shot_all_reduce, dist.get_rank()

    def mutant(x, group, codec, meter=None):
        out = real(x, group, codec, meter)
        numel, chunk = x.numel(), math.ceil(x.numel() / (128 * RANKS)) * 128
        mine = slice(rank * chunk, min((rank + 1) * chunk, numel))
        if mine.start < numel:
            call = next(c for c in range(CALLS) if torch.equal(inputs(c, x.shape, x.dtype)[rank], x))
            messages = inputs(call, x.shape, x.dtype).view(RANKS, -1)[:, mine]
            out.view(-1)[mine] = summed(decoded(codec, messages, x.dtype)).to(x.dtype)
        return out

    compressed.two_shot_all_reduce = mutant
    try:
        calls_in_a_row("fp8", skew)
    finally:
        compressed.two_shot_all_reduce = real


@pytest.mark.slow
def test_an_owner_that_keeps_full_precision_is_caught():
    workers = conftest.WorkerPool(RANKS)
    try:
        with pytest.raises(AssertionError, match="call [34]: "):
            workers.run(RANKS, _owner_in_full, 7)
    finally:
        workers.stop()
