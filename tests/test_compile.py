"""torch.compile sees the collectives as operators: no graph break, no recompilation a length, the same numbers."""

import pytest
import tiny
import torch
import torch._dynamo
import torch.distributed as dist
import training

from hf_taco_scape.parallel import parallelize, split_state


def _train(**changes):
    return training.run("qwen3", 2, max_steps=3, tp_codec="fp8", **changes)["loss"]


def test_compiled_training_equals_eager(pool):
    eager = pool.run(2, _train)
    compiled = pool.run(2, _train, torch_compile=True, torch_compile_backend="aot_eager")
    assert compiled[0] == compiled[1]
    assert compiled[0] == pytest.approx(eager[0], rel=1e-6)


def _mlp(codec):
    """One split block as a full graph, forward and backward, at several lengths."""
    torch._dynamo.reset()
    model = parallelize(tiny.build("qwen3"), dist.group.WORLD, codec)
    block, meter = model.model.layers[0].mlp, split_state(model).comm.meter
    compiles = []

    def backend(graph, inputs):
        compiles.append([str(n.target) for n in graph.graph.nodes if "all_reduce" in str(n.target)])
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    fast = torch.compile(lambda x: block(x), backend=backend, fullgraph=True)  # its hooks belong to the graph too
    worst = 0.0
    for length in (17, 64, 33, 64):
        x = torch.randn(2, length, 64, generator=torch.Generator().manual_seed(length))
        results = []
        for run in (block, fast):
            inputs = x.clone().requires_grad_()
            calls = meter.calls
            y = run(inputs)
            y.square().sum().backward()
            assert meter.calls == calls + 2, "one all-reduce forward and one backward"
            results.append((y.detach(), inputs.grad))
        worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(*results, strict=True)))
    return worst, len(compiles)


@pytest.mark.parametrize("codec", ["none", "taco"])
def test_a_block_is_one_graph_at_any_length(pool, codec):
    """pytorch/torchtitan #1081, on the CPU."""
    for worst, compiles in pool.run(2, _mlp, codec):
        assert worst < 1e-5
        assert compiles <= 2, "a compilation a length"
