"""The simulator against the distributed step, bit for bit, and the study script on a few lines of text."""

import pathlib
import sys

import pytest
import torch
from scape_reference import BETAS, EPS, GROUPS, SHAPES, gradient, initial
from test_grad_sync import VARIANTS, build, rank_of, snapshot

RECIPES = pathlib.Path(__file__).parent.parent / "recipes"
STEPS = 9
SIMULATED = {
    **VARIANTS,
    "bf16": {**VARIANTS["paper"], "values": "bf16"},
    "bf16_row_local": {**VARIANTS["row_local"], "values": "bf16"},
    "bf16_cyclic": {**VARIANTS["cyclic"], "values": "bf16"},
}


def distributed(dtype, options):
    params, optimizer = build(dtype, {**options, "ordered": True})
    for t in range(1, STEPS + 1):
        for i, p in enumerate(params):
            p.grad = gradient(rank_of(), t, i, dtype)
        optimizer.step()
    return (
        [p.detach() for p in params],
        snapshot(params, optimizer, "momentum"),
        snapshot(params, optimizer, "residual"),
    )


def distributed_all(dtype):
    return {name: distributed(dtype, options) for name, options in SIMULATED.items()}


@pytest.fixture(scope="module")
def simulator():
    sys.path.insert(0, str(RECIPES))
    import scape_simulator

    yield scape_simulator
    sys.path.remove(str(RECIPES))


def simulated(simulator, world, dtype, options):
    params = [torch.nn.Parameter(p) for p in initial(dtype)]
    groups = [{**group, "params": [params[i] for i in group["params"]]} for group in GROUPS]
    scape = simulator.SimulatedScape(groups, world, betas=BETAS, eps=EPS, **options)
    for t in range(1, STEPS + 1):
        stacks = []
        for i in (i for group in GROUPS for i in group["params"]):
            grads = [gradient(w, t, i, dtype) for w in range(world)]
            stacks.append(torch.stack([torch.zeros(SHAPES[i], dtype=dtype) if g is None else g for g in grads]))
        scape.step(stacks)
    states = {id(s.param): s.state for s in scape.slots}
    return params, [states[id(p)] for p in params]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equals_the_distributed_step_bit_for_bit(pool, simulator, world, dtype):
    ranks = pool.run(world, distributed_all, dtype)
    for name, options in SIMULATED.items():
        if dtype == torch.float64 and "values" in options:
            continue
        params, states = simulated(simulator, world, dtype, options)
        for rank in range(world):
            weights, momenta, residuals = ranks[rank][name]
            for i, p in enumerate(params):
                assert torch.equal(weights[i], p), (name, rank, i)
                assert torch.equal(momenta[i], states[i]["momentum"]), (name, rank, i)
                if residuals[i] is not None:
                    assert torch.equal(residuals[i].view(-1), states[i]["residual"][rank]), (name, rank, i)
