"""Second moments from local gradients: any shape and dtype, checkpoints, tp parts held by several ranks."""

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist

from hf_taco_scape.sync import ScapeAdamS, TensorLayout


def silent(params, **options):
    """An optimizer that does not warn of a lonely rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ScapeAdamS(params, **options)


# -- shapes and dtypes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6,), (5, 3), (3, 4, 5), (4, 3, 2, 3), (1, 7), (7, 1)])
@pytest.mark.parametrize("density", [1.0, 0.4])
def test_factored_equals_its_equation_in_any_number_of_dimensions(shape, density):
    """A bias that its group calls sparse, a matrix, convolutions: rows are dimension 0, columns all others."""
    p = torch.nn.Parameter(torch.ones(shape, dtype=torch.float64))
    groups = [{"params": [p], "sparse": True, "weight_decay": 0.0}]
    optimizer = silent(groups, density=density, mask="random", second_moment="factored")
    data = torch.Generator().manual_seed(3)
    rows = columns = 0.0
    for t in range(1, 5):
        before, momentum = p.detach().clone(), optimizer.state[p].get("momentum", torch.zeros(shape)).clone()
        residual = optimizer.state[p].get("residual", torch.zeros(shape)).clone()
        p.grad = torch.randn(shape, dtype=torch.float64, generator=data)
        optimizer.step()
        square = p.grad.square().reshape(shape[0], -1)
        rows = 0.95 * rows + 0.05 * square.mean(1, keepdim=True)
        columns = 0.95 * columns + 0.05 * square.mean(0, keepdim=True)
        v = (rows * columns / columns.mean()).view(shape) / (1 - 0.95**t)
        c = 0.9 * momentum + 0.1 * p.grad + residual
        mt = torch.where(optimizer.state[p]["residual"] == 0, c, 0.0)
        expected = before - 1e-3 / (1 - 0.9**t) * mt / (v.sqrt() + 1e-8)
        assert (p - expected).abs().max() < 1e-15


@pytest.mark.parametrize("kind", ["row", "factored"])
def test_dtypes_of_one_optimizer_do_not_touch_each_other(kind):
    """fp64, fp32 and bf16 parameters together step as each does alone."""
    dtypes = [torch.float64, torch.float32, torch.bfloat16]
    data = torch.Generator().manual_seed(5)
    start = torch.randn(9, 7, generator=data, dtype=torch.float64)
    together = [torch.nn.Parameter(start.to(dtype)) for dtype in dtypes]
    alone = [torch.nn.Parameter(start.to(dtype)) for dtype in dtypes]
    options = dict(density=0.3, second_moment=kind, mask="topk")
    optimizers = [silent(together, **options), *(silent([p], **options) for p in alone)]
    for _ in range(4):
        g = torch.randn(9, 7, generator=data, dtype=torch.float64)
        for p in [*together, *alone]:
            p.grad = g.to(p.dtype)
        for optimizer in optimizers:
            optimizer.step()
    for p, q, dtype in zip(together, alone, dtypes, strict=True):
        tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
        assert (p - q).abs().max() <= tolerance
        moment = optimizers[0].state[p]["second_moment"]
        assert moment.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_entries_without_any_gradient_stay():
    """A token that no batch holds, a frozen-out row, a tensor that never gets a gradient: no 0/0."""
    table, unused = torch.nn.Parameter(torch.ones(6, 4)), torch.nn.Parameter(torch.ones(3, 2))
    optimizer = silent([table, unused], density=0.5, second_moment="factored", weight_decay=0.0)
    for _ in range(3):
        table.grad = torch.zeros(6, 4)
        table.grad[2] = 1.0
        optimizer.step()
    assert torch.equal(unused, torch.ones(3, 2)) and torch.equal(table[3:], torch.ones(3, 4))
    assert (table[2] < 1).all()


# -- checkpoints -------------------------------------------------------------------------------------------------


def one_step(optimizer, p):
    p.grad = torch.arange(63.0).view(9, 7)
    optimizer.step()


@pytest.mark.parametrize("before,now", itertools.permutations(["adams", "row", "factored"], 2))
def test_a_checkpoint_of_another_second_moment_is_refused(before, now):
    """Also where nothing is missing: a moment that nobody keeps up must not be divided by."""
    p, q = torch.nn.Parameter(torch.ones(9, 7)), torch.nn.Parameter(torch.ones(9, 7))
    saved, other = silent([p], second_moment=before), silent([q], second_moment=now)
    one_step(saved, p)
    other.load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match="saved with other options"):
        one_step(other, q)


@pytest.mark.parametrize("before,now", [("topk", "random"), ("cyclic", "topk"), ("random", "topk")])
def test_another_mask_may_take_over(before, now):
    """Momentum, residual and moments are what they were; the first step of topk sends all that was kept back."""
    p, q = torch.nn.Parameter(torch.ones(9, 7)), torch.nn.Parameter(torch.ones(9, 7))
    options = dict(second_moment="factored", density=0.2)
    saved, other = silent([p], mask=before, **options), silent([q], mask=now, **options)
    for _ in range(3):
        one_step(saved, p)
    other.load_state_dict(saved.state_dict())
    one_step(other, q)
    assert other.step_count == 4 and torch.isfinite(q).all()
    if now == "topk" and before != "topk":
        assert other.stats()["density"] == 1.0


# -- tensor parallelism ------------------------------------------------------------------------------------------

WHOLE = {"kv": (6, 5), "rowwise": (4, 9), "packed": (9, 4), "bias": (7,)}


def parts_and_layouts(tp_rank, whole):
    """On three ranks: KV heads of which ranks 0 and 1 share the first; uneven columns; a Conv1D; a sparse bias."""
    columns = [slice(0, 2), slice(2, 7), slice(7, 9)][tp_rank]
    parts = {
        "kv": whole["kv"][:3] if tp_rank < 2 else whole["kv"][3:],
        "rowwise": whole["rowwise"][:, columns],
        "packed": whole["packed"][columns],
        "bias": whole["bias"],
    }
    layouts = {
        "kv": TensorLayout(copies=2 if tp_rank < 2 else 1),
        "rowwise": TensorLayout(row_split=True),
        "packed": TensorLayout(row_dims=(1,), row_split=True),
        "bias": TensorLayout(copies=3),
    }
    return {name: part.clone() for name, part in parts.items()}, layouts


def whole_gradients(step):
    data = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=data, dtype=torch.float64) for name, shape in WHOLE.items()}


def train_parts(kind):
    tp_rank = dist.get_rank()
    groups = [dist.new_group([rank]) for rank in range(3)]
    whole = {name: torch.ones(shape, dtype=torch.float64) for name, shape in WHOLE.items()}
    parts, layouts = parts_and_layouts(tp_rank, whole)
    split = {name: torch.nn.Parameter(part) for name, part in parts.items()}
    alone = {name: torch.nn.Parameter(tensor) for name, tensor in whole.items()}
    dims = {id(p): layouts[name].row_dims for name, p in alone.items()}
    by_id = {id(p): layouts[name] for name, p in split.items()}
    options = dict(density=1.0, second_moment=kind, clip="local", max_grad_norm=3.0, process_group=groups[tp_rank])
    optimizer = silent(
        [{"params": list(split.values()), "sparse": True}],
        tp_group=dist.group.WORLD, layout=lambda p: by_id[id(p)], **options,
    )  # fmt: skip
    reference = silent(
        [{"params": list(alone.values()), "sparse": True}],
        layout=lambda p: TensorLayout(row_dims=dims[id(p)]), **options,
    )  # fmt: skip
    for step in range(4):
        gradients = whole_gradients(step)
        for name, gradient in parts_and_layouts(tp_rank, gradients)[0].items():
            split[name].grad, alone[name].grad = gradient, gradients[name]
        optimizer.step()
        reference.step()
    expected = parts_and_layouts(tp_rank, {name: p.detach() for name, p in alone.items()})[0]
    return {name: float((p - expected[name]).abs().max()) for name, p in split.items()}


@pytest.mark.parametrize("kind", ["row", "factored"])
def test_parts_step_as_the_whole_does(pool, kind):
    for errors in pool.run(3, train_parts, kind):
        assert max(errors.values()) < 1e-14, errors
