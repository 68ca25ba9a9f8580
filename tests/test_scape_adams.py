"""ScapeAdamS as an optimizer: one sync a step, checkpoints, fp16, tensor parallelism, and what it refuses."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from scape_reference import SHAPES, gradient
from test_grad_sync import VARIANTS, build, distance, masks_now, rank_of, set_gradients, snapshot, train

from hf_taco_scape.collectives.meter import ByteMeter
from hf_taco_scape.sync import ScapeAdamS, TensorLayout, merge_residuals, module_layout


def one_matrix(dtype=torch.float32, shape=(9, 7), **options):
    """An optimizer of one parameter, silent about a lonely rank."""
    p = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return p, ScapeAdamS([p], **options)


# -- one sync a step ---------------------------------------------------------------------------------------------


def accumulate(micro_batches, accumulation, batch):
    """Train a linear model; `accumulation` micro-batches add up to a step, fewer to the last one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 9), torch.nn.Linear(9, 3)).double()
    optimizer = ScapeAdamS(model.parameters(), density=0.2, max_grad_norm=1.0)
    data = torch.Generator().manual_seed(7 + rank_of())
    x = torch.randn(micro_batches * batch, 12, generator=data, dtype=torch.float64)
    y = torch.randn(micro_batches * batch, 3, generator=data, dtype=torch.float64)
    calls = []
    for i in range(micro_batches):
        span = slice(i * batch, (i + 1) * batch)
        size = min(accumulation, micro_batches - i // accumulation * accumulation)
        (torch.nn.functional.mse_loss(model(x[span]), y[span]) / size).backward()
        calls.append(optimizer.meter.calls)
        if (i + 1) % accumulation == 0 or i + 1 == micro_batches:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], calls, optimizer.meter.snapshot()


def test_accumulation_syncs_once_a_step(pool):
    """10 micro-batches, 4 a step: 3 steps; the same weights and bytes as 8 micro-batches in 2 steps of a 4x batch."""
    for _, calls, meter in pool.run(2, accumulate, 10, 4, 3):
        assert calls == [0] * 4 + [2] * 4 + [4] * 2 and meter["calls"] == 6
    small, large = pool.run(2, accumulate, 8, 4, 3), pool.run(2, accumulate, 2, 1, 12)
    for (weights, _, meter), (expected, _, one_batch) in zip(small, large, strict=True):
        assert meter == one_batch
        assert all((a - b).abs().max() < 1e-14 for a, b in zip(weights, expected, strict=True))


def early_sync():
    options = VARIANTS["paper"]
    params, optimizer = build(torch.float64, options)
    others, late = build(torch.float64, {**options, "max_grad_norm": None})
    for t in range(1, 7):
        set_gradients(params, t, torch.float64)
        set_gradients(others, t, torch.float64)
        optimizer.step()
        norm = late.sync(options["max_grad_norm"])
        assert torch.equal(norm, optimizer.last_norm) and torch.equal(norm, late.sync(options["max_grad_norm"]))
        calls = late.meter.calls
        late.step()
        assert late.meter.calls - calls in (0, 1)  # the masks' all-gather, no second message
        assert late.meter == optimizer.meter
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
    return float(norm)


def test_an_early_sync_returns_the_norm_and_changes_nothing_else(pool):
    norms = pool.run(3, early_sync)
    assert norms[0] == norms[1] == norms[2] > 0


def test_gradients_must_rest_between_sync_and_step():
    p, optimizer = one_matrix()
    p.grad = torch.ones(9, 7)
    optimizer.sync(1.0)
    p.grad.add_(1)  # a late micro-batch
    with pytest.raises(RuntimeError, match="after the last micro-batch"):
        optimizer.step()
    p, optimizer = one_matrix()
    p.grad = torch.ones(9, 7)
    optimizer.sync(1.0)
    with pytest.raises(ValueError, match="sync once a step"):
        optimizer.sync(2.0)
    with pytest.raises(RuntimeError, match="between sync"):
        optimizer.state_dict()
    with pytest.raises(RuntimeError, match="between sync"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})


def test_one_owner_of_clipping():
    p, optimizer = one_matrix(max_grad_norm=1.0)
    p.grad = torch.ones(9, 7)
    with pytest.raises(ValueError, match="keep one"):
        optimizer.sync(0.5)
    assert float(optimizer.sync(1.0)) == pytest.approx(63**0.5)
    p, optimizer = one_matrix()
    with pytest.raises(ValueError, match="must be > 0"):
        optimizer.sync(0.0)
    p.grad = torch.ones(9, 7)
    assert float(optimizer.sync(math.inf)) == pytest.approx(63**0.5)  # the Trainer's way to ask for the norm alone
    optimizer.step()
    assert optimizer.stats()["clipped_share"] == 0


# -- checkpoints -------------------------------------------------------------------------------------------------

RESUMED = ["paper", "row_local", "cyclic", "random"]


def resume(folder, variant, dtype, values):
    options = VARIANTS[variant] | {"values": values}
    params, optimizer = build(dtype, options)
    for t in range(1, 6):
        set_gradients(params, t, dtype)
        optimizer.step()
    path = f"{folder}/{variant}-{rank_of()}.pt"
    torch.save({"optimizer": optimizer.state_dict(), "params": [p.detach().clone() for p in params]}, path)
    saved = torch.load(path)
    resumed, other = build(dtype, options, saved["params"])
    other.load_state_dict(saved["optimizer"])
    for (p, state), (_, loaded) in zip(optimizer.state.items(), other.state.items(), strict=True):
        assert state.keys() == loaded.keys()
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == loaded[key].dtype and torch.equal(value, loaded[key])
        expected = torch.float64 if p.dtype == torch.float64 else torch.float32
        assert all(v.dtype == expected for k, v in loaded.items() if torch.is_tensor(v) and k != "mask")
    for t in range(6, 11):
        set_gradients(params, t, dtype)
        set_gradients(resumed, t, dtype)
        optimizer.step()
        other.step()
    for key in ("momentum", "residual"):
        pairs = zip(snapshot(params, optimizer, key), snapshot(resumed, other, key), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs if a is not None)
    return all(torch.equal(p, q) for p, q in zip(params, resumed, strict=True))


def resume_all(folder, dtype, values):
    return [resume(folder, variant, dtype, values) for variant in RESUMED]


@pytest.mark.parametrize("dtype,values", [(torch.float32, "fp32"), (torch.bfloat16, "bf16")], ids=["fp32", "bf16"])
def test_resume_is_bit_for_bit(pool, tmp_path, dtype, values):
    assert pool.run(2, resume_all, str(tmp_path), dtype, values) == [[True] * 4] * 2


def test_a_fresh_state_loads_into_itself():
    """What accelerate does when it prepares an optimizer."""
    p, optimizer = one_matrix()
    optimizer.load_state_dict(optimizer.state_dict())
    p.grad = torch.ones(9, 7)
    optimizer.step()
    assert optimizer.step_count == 1 and optimizer.state[p]["momentum"].any()


def keep(steps):
    params, optimizer = build(torch.float32, VARIANTS["paper"])
    for t in range(1, steps + 1):
        set_gradients(params, t, torch.float32)
        optimizer.step()
    return optimizer.state_dict(), [p.detach().clone() for p in params]


def go_on(state_dict, weights, mean_gradients):
    """A step of the resumed group in which every rank has the same gradient."""
    params, optimizer = build(torch.float32, VARIANTS["paper"], weights)
    optimizer.load_state_dict(state_dict)
    for p, g in zip(params, mean_gradients, strict=True):
        p.grad = g.clone()
    optimizer.step()
    return [p.detach() for p in params], snapshot(params, optimizer, "momentum")


def test_another_data_parallel_size_keeps_the_mean_of_the_residuals(pool):
    old = pool.run(4, keep, 6)
    merged = merge_residuals(state_dict for state_dict, _ in old)
    for i, state in merged["state"].items():
        if "residual" in state:
            mean = sum(s["state"][i]["residual"].double() for s, _ in old) / 4
            assert (state["residual"].double() - mean).abs().max() <= 1e-7 * mean.abs().max()
        assert torch.equal(state["momentum"], old[0][0]["state"][i]["momentum"])
    grads = [torch.randn(s, generator=torch.Generator().manual_seed(i)) for i, s in enumerate(SHAPES)]
    # the step sees residuals through their mean alone: any size goes on alike
    results = {world: pool.run(world, go_on, merged, old[0][1], grads) for world in (2, 3)}
    assert distance(results[2][0][0], results[3][0][0]) < 1e-6
    assert distance(results[2][0][1], results[3][0][1]) < 1e-6
    with pytest.raises(ValueError, match="no state dict"):
        merge_residuals([])


def test_a_checkpoint_of_other_options_is_refused():
    p, optimizer = one_matrix()
    p.grad = torch.ones(9, 7)
    optimizer.step()
    _, other = one_matrix(second_moment="row")
    other.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="lacks second_moment"):
        other.step()


# -- fp16 --------------------------------------------------------------------------------------------------------


def state_of(params, optimizer):
    optimizer.state_dict()  # brings in the masks under way
    tensors = [p.detach().clone() for p in params]
    return tensors + [v.clone() for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]


def scaled_training(route, overflow_on, variant="paper"):
    """Six fp16 steps; at the fourth, rank `overflow_on`'s gradient is infinite."""
    options = {**VARIANTS[variant], "max_grad_norm": 180.0 if route == "step" else None}
    params, optimizer = build(torch.float32, options)
    plain, reference = build(torch.float32, options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    position = 0
    for t in range(1, 7):
        for p, q, i in zip(params, plain, range(len(params)), strict=True):
            g = gradient(rank_of(), position + 1, i, torch.float32)
            q.grad = g
            p.grad = None if g is None else g * scaler.get_scale()
        overflow = t == 4 and overflow_on is not None
        scaler.scale(torch.zeros(()))  # starts the scaler, as the loss would
        if overflow and rank_of() == overflow_on:
            params[0].grad[1, 1] = float("inf")
        before, calls = state_of(params, optimizer), optimizer.meter.snapshot()
        if route == "sync":
            norm = optimizer.sync(180.0, scaler=scaler)
            assert math.isinf(float(norm)) == overflow
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.last_step_skipped == overflow
        if overflow:
            assert all(torch.equal(a, b) for a, b in zip(before, state_of(params, optimizer), strict=True))
            assert optimizer.step_count == t - 1 and optimizer.meter.snapshot() == calls
        else:
            position += 1
            if route == "sync":
                reference.sync(180.0)
            reference.step()
        assert all(torch.equal(p, q) for p, q in zip(params, plain, strict=True))
        if route == "step" and optimizer.state_dict()["state"]:
            assert float(optimizer.last_norm) == float(reference.last_norm) or overflow
    return scaler.get_scale()


@pytest.mark.parametrize("overflow_on", [None, 0, 1])
def test_fp16_overflow_on_one_rank_skips_the_step_on_all(pool, overflow_on):
    scales = pool.run(2, scaled_training, "sync", overflow_on)
    assert scales == [2.0**10 if overflow_on is None else 2.0**9] * 2  # one loss scale, halved once
    pool.run(2, scaled_training, "step", overflow_on)
    # a rank's own norm is that of the unscaled gradient
    pool.run(2, scaled_training, "step", overflow_on, "row_local")


def overflow_after_unannounced_sync():
    p, optimizer = one_matrix()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    p.grad = torch.full((9, 7), float("inf"))
    scaler.unscale_(optimizer)
    optimizer.sync(1.0)
    scaler.step(optimizer)


def test_a_sync_that_was_not_told_of_the_scaler_is_refused():
    with pytest.raises(RuntimeError, match="scaler=scaler"):
        overflow_after_unannounced_sync()


# -- tensor parallelism ------------------------------------------------------------------------------------------
#
# A rowwise matrix (dim 1 split, rows shared), a colwise one (dim 0 split), a replicated matrix and a replicated bias,
# one of them split unevenly; ranks 0 1 | 2 3 are the model copies.

FULL = {"rowwise": (6, 11), "colwise": (8, 5), "replicated": (4, 9), "bias": (6,)}


def tp_part(name, full, tp_rank):
    if name == "rowwise":
        return full[:, :7].contiguous() if tp_rank == 0 else full[:, 7:].contiguous()
    if name == "colwise":
        return full.chunk(2)[tp_rank].contiguous()
    return full.clone()


TP_LAYOUTS = {
    "rowwise": TensorLayout(row_split=True),
    "colwise": TensorLayout(),
    "replicated": TensorLayout(copies=2),
    "bias": TensorLayout(copies=2),
}


def full_gradient(dp_rank, t, name):
    g = torch.Generator().manual_seed(1000 * t + 10 * dp_rank + len(name))
    return torch.randn(FULL[name], generator=g, dtype=torch.float64)


def train_whole(options):
    params = {name: torch.nn.Parameter(torch.ones(shape, dtype=torch.float64)) for name, shape in FULL.items()}
    optimizer, norms = ScapeAdamS(params.values(), **options), []
    for t in range(1, 7):
        for name, p in params.items():
            p.grad = full_gradient(dist.get_rank(), t, name)
        norms.append(float(optimizer.sync(1.0)))
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}, norms


def train_split(options):
    tp_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dp_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    dp_rank, tp_rank = divmod(rank, 2)
    params = {
        name: torch.nn.Parameter(tp_part(name, torch.ones(shape, dtype=torch.float64), tp_rank))
        for name, shape in FULL.items()
    }
    layouts = {params[name]: TP_LAYOUTS[name] for name in FULL}
    optimizer = ScapeAdamS(
        params.values(),
        process_group=dp_groups[tp_rank],
        tp_group=tp_groups[dp_rank],
        layout=lambda p: layouts[p],
        **options,
    )
    norms = []
    for t in range(1, 7):
        for name, p in params.items():
            p.grad = tp_part(name, full_gradient(dp_rank, t, name), tp_rank)
        norms.append(float(optimizer.sync(1.0)))
        optimizer.step()
    masks = {list(params)[i]: m for i, m in masks_now(list(params.values()), optimizer).items()}
    return {name: p.detach() for name, p in params.items()}, norms, masks


TP_OPTIONS = [
    {"density": 1.0},
    {"density": 1.0, "second_moment": "row", "clip": "local"},
    {"density": 1.0, "second_moment": "row"},
    {"density": 1.0, "second_moment": "factored", "clip": "local"},
]


@pytest.mark.parametrize("options", TP_OPTIONS, ids=["adams", "row_local", "row_ghat", "factored"])
def test_tp_2_x_dp_2_equals_dp_2(pool, options):
    """At density 1 masks do not differ by shard, so split and whole training agree: norms, rows and weights."""
    whole, norms = pool.run(2, train_whole, options)[0]
    for rank, (parts, split_norms, _) in enumerate(pool.run(4, train_split, options)):
        assert split_norms == pytest.approx(norms, rel=1e-12)
        for name, part in parts.items():
            assert (part - tp_part(name, whole[name], rank % 2)).abs().max() <= 1e-13


@pytest.mark.parametrize(
    "options",
    [{}, {"second_moment": "row", "clip": "local"}, {"second_moment": "factored", "clip": "local"}],
    ids=["adams", "row_local", "factored"],
)
def test_replicas_stay_identical_over_tp_and_dp(pool, options):
    ranks = pool.run(4, train_split, {"density": 0.1, "warmup_steps": 2, **options})
    for parts, norms, masks in ranks[1:]:
        assert norms == ranks[0][1]
        assert torch.equal(parts["replicated"], ranks[0][0]["replicated"])
        assert torch.equal(parts["bias"], ranks[0][0]["bias"])
        assert torch.equal(masks["replicated"], ranks[0][2]["replicated"])
    for name in ("rowwise", "colwise"):
        for tp_rank in (0, 1):
            assert torch.equal(ranks[tp_rank][0][name], ranks[2 + tp_rank][0][name])


def test_a_norm_that_counts_replicas_twice_is_caught(pool, monkeypatch):
    _, norms = pool.run(2, train_whole, {"density": 1.0})[0]
    monkeypatch.setitem(TP_LAYOUTS, "replicated", TensorLayout(copies=1))
    wrong = pool.run(4, train_split_with, {**TP_LAYOUTS}, {"density": 1.0})[0][1]
    assert wrong[0] > norms[0] * 1.01


def train_split_with(layouts, options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "TP_LAYOUTS", layouts)
        return train_split(options)


def test_tp_needs_layouts():
    with pytest.raises(ValueError, match="needs layout"):
        ScapeAdamS([torch.nn.Parameter(torch.ones(2, 2))], tp_group=object())


def test_rows_of_conv1d_are_its_second_dimension():
    from transformers.pytorch_utils import Conv1D

    model = torch.nn.ModuleList([Conv1D(5, 3), torch.nn.Linear(3, 5), torch.nn.Embedding(4, 3)])
    layout = module_layout(model)
    assert layout(model[0].weight).row_dims == (1,)
    assert layout(model[1].weight).row_dims == layout(model[2].weight).row_dims == (0,)


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("density", [1.0, 0.3])
def test_row_second_moment_of_any_dimensions(dims, density):
    p, optimizer = one_matrix(
        torch.float64, (3, 4, 5), density=density, mask="random", second_moment="row", layout=lambda p: layout_of(dims)
    )
    optimizer.param_groups[0]["weight_decay"] = 0.0
    p.grad = torch.randn(3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    optimizer.step()  # step 1 sends everything, whatever the density
    others = [d for d in range(3) if d not in dims]
    mean = p.grad.square().mean(others, keepdim=True) if others else p.grad.square()
    assert (1 - p.detach() - 1e-3 * p.grad / (mean.sqrt() + 1e-8)).abs().max() < 1e-15
    before = p.detach().clone()
    m, v, r = 0.1 * p.grad, 0.05 * mean, torch.zeros_like(p)
    p.grad = torch.randn(3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    v = 0.95 * v + 0.05 * (p.grad.square().mean(others, keepdim=True) if others else p.grad.square())
    mt = torch.where(masks_now([p], optimizer)[0], 0.9 * m + 0.1 * p.grad + r, 0.0)
    expected = before - 1e-3 / (1 - 0.9**2) * mt / (v.sqrt() / math.sqrt(1 - 0.95**2) + 1e-8)
    assert (p - expected).abs().max() < 1e-15


def layout_of(dims):
    return TensorLayout(row_dims=dims)


# -- memory ------------------------------------------------------------------------------------------------------


def offloaded(values):
    """The host path, forced on a machine without a device: every residual passes through a staging copy."""
    from hf_taco_scape.sync import grad_sync

    options = {**VARIANTS["paper"], "values": values}
    straight = train(torch.float32, options)

    original = grad_sync.GradSync._is_offloaded
    grad_sync.GradSync._is_offloaded = lambda self, residual: True
    try:
        staged = train(torch.float32, options)
    finally:
        grad_sync.GradSync._is_offloaded = original
    for key in ("params", "momentum", "residual"):
        assert all(torch.equal(a, b) for a, b in zip(straight[key], staged[key], strict=True) if a is not None)
    return staged["bytes"] == straight["bytes"]


@pytest.mark.parametrize("values", ["fp32", "bf16"])
def test_offloaded_residuals_change_nothing(pool, values):
    assert pool.run(2, offloaded, values) == [True, True]


@pytest.mark.gpu
@pytest.mark.parametrize("residual_device", [None, "cpu"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_cuda_equals_cpu(variant, residual_device):
    """One rank on each device: the same masks, and weights to rounding."""
    options = VARIANTS[variant] | {"residual_device": residual_device}
    params, optimizer = build(torch.float32, options)
    on_device = [p.detach().cuda() for p in params]
    twins, other = build(torch.float32, options, on_device)
    for t in range(1, 9):
        set_gradients(params, t, torch.float32)
        for p, q in zip(params, twins, strict=True):
            q.grad = None if p.grad is None else p.grad.cuda()
        optimizer.step()
        other.step()
        ours, theirs = masks_now(params, optimizer), other._engine.masks.masks
        for slot in other._engine.sparse:
            i = next(i for i, q in enumerate(twins) if q is slot.param)
            mask = torch.zeros(slot.numel, dtype=torch.bool, device="cuda")
            theirs[slot.index].resolve(mask.device).put_(mask, True)
            assert torch.equal(mask.view(SHAPES[i]).cpu(), ours[i])
    assert distance([q.detach().cpu() for q in twins], [p.detach() for p in params]) <= 3e-6
    residuals = [state["residual"] for state in other.state.values() if "residual" in state]
    assert {r.device.type for r in residuals} == {residual_device or "cuda"}


# -- parameters of every kind ------------------------------------------------------------------------------------


def late_group():
    params, optimizer = build(torch.float64, {"density": 0.1, "max_grad_norm": 1.0})
    added = torch.nn.Parameter(torch.ones(10, 10, dtype=torch.float64))
    kept = []
    for t in range(1, 7):
        if t == 4:
            optimizer.add_param_group({"params": [added], "lr": 0.5})
        set_gradients(params, t, torch.float64)
        added.grad = torch.randn(10, 10, generator=torch.Generator().manual_seed(10 * t + rank_of())).double()
        optimizer.step()
        if t >= 4:
            slot = next(s for s in optimizer._engine.sparse if s.param is added)
            kept.append(optimizer._engine.masks.masks[slot.index].k)
    assert optimizer.param_groups[-1]["step"] == 3 and optimizer.step_count == 6
    return kept, added.detach(), [p.detach() for p in params]


def test_a_group_added_later_starts_with_everything(pool):
    """All of it in its first step, as in step 1, with its own bias correction; the others go on undisturbed."""
    ranks = pool.run(2, late_group)
    assert ranks[0][0] == [100, 10, 10]
    assert torch.equal(ranks[0][1], ranks[1][1])
    assert all(torch.equal(a, b) for a, b in zip(ranks[0][2], ranks[1][2], strict=True))


def already_reduced():
    """A bias that DDP averages: left out of the message, stepped with the gradient it has."""
    w, b = torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Parameter(torch.ones(4))
    optimizer = ScapeAdamS([{"params": [w]}, {"params": [b], "already_reduced": True}], weight_decay=0.0)
    w.grad, b.grad = torch.full((4, 4), float(1 + rank_of())), torch.ones(4)
    norm = float(optimizer.sync())
    optimizer.step()
    return optimizer.meter.snapshot(), b.tolist(), norm


def test_dense_gradients_that_somebody_else_averages(pool):
    for meter, b, norm in pool.run(2, already_reduced):
        assert meter["dense_bytes"] == 16 * 4 and b == pytest.approx([1 - 1e-3] * 4)
        assert norm == pytest.approx((16 * 1.5**2 + 4) ** 0.5)


@pytest.mark.parametrize("clip", ["ghat", "local"])
def test_gradients_that_somebody_else_averages_are_unscaled_and_clipped_too(clip):
    """On one rank they make the step of those averaged here, under a GradScaler too."""

    def run(scale, already_reduced):
        w, b = torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Parameter(torch.ones(4))
        groups = [{"params": [w]}, {"params": [b], "already_reduced": already_reduced}]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = ScapeAdamS(groups, lr=0.1, clip=clip, max_grad_norm=0.5, eps=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1)
        for t in range(3):
            data = torch.Generator().manual_seed(t)
            scaler.scale(torch.zeros(()))
            w.grad, b.grad = (torch.randn(p.shape, generator=data) * scale for p in (w, b))
            scaler.step(optimizer)
            scaler.update()
        return torch.cat([w.detach().view(-1), b.detach()]), float(optimizer.last_norm)

    expected, norm = run(1.0, False)
    for scale, already_reduced in [(1.0, True), (1024.0, True), (1024.0, False)]:
        got, other = run(scale, already_reduced)
        assert (got - expected).abs().max() < 1e-6 and other == pytest.approx(norm)


def low_precision():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(40, 30).bfloat16())
    optimizer = ScapeAdamS([p], density=0.1, lr=0.05)
    for t in range(4):
        p.grad = torch.randn(40, 30, generator=torch.Generator().manual_seed(t + 9 * rank_of())).bfloat16()
        optimizer.step()
    assert {s.dtype for k, s in optimizer.state[p].items() if torch.is_tensor(s) and k != "mask"} == {torch.float32}
    return p.detach().float()


def test_bf16_parameters_with_fp32_state(pool):
    a, b = pool.run(2, low_precision)
    assert torch.equal(a, b) and torch.isfinite(a).all()


def test_figures():
    p, optimizer = one_matrix(shape=(100, 10), density=0.1)
    with pytest.raises(RuntimeError, match="no step"):
        optimizer.stats()
    for t in range(3):
        p.grad = torch.arange(1000.0).view(100, 10)
        optimizer.step()
        figures = optimizer.stats()
        assert figures["step"] == t + 1 and figures["density"] == (1.0 if t == 0 else 0.1)
    assert figures["mask_overlap"] == 1.0 and figures["residual_over_momentum"] > 0
    expected = optimizer.state[p]["residual"].norm() / optimizer.state[p]["momentum"].norm()
    assert figures["residual_over_momentum"] == pytest.approx(float(expected))
    meter = ByteMeter()
    assert one_matrix(meter=meter)[1].meter is meter


# -- what is refused ---------------------------------------------------------------------------------------------


def test_one_rank_runs_and_says_so():
    p = torch.nn.Parameter(torch.ones(10, 10))
    with pytest.warns(UserWarning, match="one data-parallel rank"):
        optimizer = ScapeAdamS([p], density=0.1)
    for _ in range(2):
        p.grad = torch.randn(10, 10)
        optimizer.step()
    assert optimizer.meter.sent_bytes == 0 and int((optimizer.state[p]["residual"] != 0).sum()) == 90


@pytest.mark.parametrize(
    "bad,message",
    [
        ({"density": 0.0}, "density must lie"),
        ({"density": 1.5}, "density must lie"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"values": "fp8"}, "values must be one of fp32, bf16"),
        ({"second_moment": "adam"}, "second_moment must be one of adams, row, factored"),
        ({"mask": "top-k"}, "mask must be one of topk, cyclic, random"),
        ({"clip": "norm"}, "clip must be one of ghat, local"),
        ({"max_grad_norm": 0.0}, "must be > 0"),
        ({"betas": (0.9, 1.0)}, "betas"),
    ],
)
def test_bad_options_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        one_matrix(**bad)


def test_b2_of_adamw_gets_a_warning():
    with pytest.warns(UserWarning, match="3.16 lr at once"):
        ScapeAdamS([torch.nn.Parameter(torch.ones(2, 2))], betas=(0.9, 0.999))


def test_bad_parameters_are_refused():
    matrix = torch.nn.Parameter(torch.ones(3, 4))
    with pytest.raises(ValueError, match="one device"):
        one_matrix()[1].add_param_group({"params": [torch.nn.Parameter(torch.ones(2, device="meta"))]})
    with pytest.raises(ValueError, match="materialise"):
        ScapeAdamS([torch.nn.Parameter(torch.ones(2, 2, device="meta"))])
    with pytest.raises(ValueError, match="contiguous"):
        ScapeAdamS([torch.nn.Parameter(torch.ones(3, 4).t())])
    with pytest.raises(ValueError, match="drop sparse=True or already_reduced"):
        ScapeAdamS([{"params": [matrix], "sparse": True, "already_reduced": True}])
    frozen = ScapeAdamS([torch.nn.Parameter(torch.ones(3, 4), requires_grad=False)])
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        frozen.step()


def test_a_refused_group_leaves_the_optimizer_usable():
    p, optimizer = one_matrix()
    with pytest.raises(ValueError, match="one device"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, device="meta"))]})
    p.grad = torch.ones(9, 7)
    optimizer.step()
    assert len(optimizer.param_groups) == 1 and not torch.equal(p, torch.ones(9, 7))


def test_sparse_gradients_are_refused():
    table = torch.nn.Embedding(5, 3, sparse=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = ScapeAdamS(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        optimizer.step()


def test_frozen_parameters_stay_and_later_changes_are_refused():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = ScapeAdamS(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert torch.equal(model[0].weight, before) and model[0].weight not in optimizer.state
    model[0].requires_grad_(True)
    with pytest.raises(ValueError, match="rebuild the optimizer"):
        optimizer.step()


def test_closures_and_schedulers():
    p, optimizer = one_matrix(lr=1.0, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure():
        optimizer.zero_grad()
        loss = (p * 2).sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 126.0
    scheduler.step()
    assert torch.allclose(p, torch.zeros(9, 7), atol=1e-6) and optimizer.param_groups[0]["lr"] == 0.5
