"""SCAPE's step on 2, 3 and 4 gloo ranks against brute force, and what must hold of it whatever the options."""

import threading

import pytest
import torch
import torch.distributed as dist
from scape_reference import BETAS, EPS, GROUPS, SHAPES, Reference, gradient, initial, kept_of
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hf_taco_scape.optim import AdamS
from hf_taco_scape.sync import ScapeAdamS, grad_sync, mask_exchange

STEPS = 14
VARIANTS = {
    "paper": {"density": 0.05, "warmup_steps": 6, "max_grad_norm": 180.0},
    "unclipped": {"density": 0.1},
    "adams_local": {"density": 0.05, "hold_steps": 3, "clip": "local", "max_grad_norm": 180.0},
    "row_local": {
        "density": 0.05,
        "warmup_steps": 5,
        "hold_steps": 2,
        "second_moment": "row",
        "clip": "local",
        "max_grad_norm": 180.0,
    },
    "row_ghat": {"density": 0.2, "warmup_steps": 3, "second_moment": "row", "max_grad_norm": 180.0},
    "factored_local": {
        "density": 0.05,
        "hold_steps": 2,
        "warmup_steps": 4,
        "second_moment": "factored",
        "clip": "local",
    },
    "factored_ghat": {"density": 0.2, "mask": "random", "second_moment": "factored", "max_grad_norm": 180.0},
    "cyclic": {"density": 0.07, "warmup_steps": 4, "mask": "cyclic", "second_moment": "row"},
    "random": {"density": 0.07, "warmup_steps": 4, "mask": "random", "max_grad_norm": 180.0},
}
DTYPES = [torch.float64, torch.float32]


def build(dtype, options, params=None):
    params = [torch.nn.Parameter(p) for p in (initial(dtype) if params is None else params)]
    groups = [{**group, "params": [params[i] for i in group["params"]]} for group in GROUPS]
    return params, ScapeAdamS(groups, betas=BETAS, eps=EPS, **options)


def rank_of() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def set_gradients(params, step, dtype):
    for i, p in enumerate(params):
        p.grad = gradient(rank_of(), step, i, dtype)


def snapshot(params, optimizer, key):
    return [optimizer.state[p][key].clone() if key in optimizer.state[p] else None for p in params]


def masks_now(params, optimizer):
    """{index in SHAPES: bool mask of the last step}"""
    engine = optimizer._engine
    found = {}
    for slot in engine.sparse:
        mask = torch.zeros(slot.numel, dtype=torch.bool)
        engine.masks.masks[slot.index].resolve(mask.device).put_(mask, True)
        found[next(i for i, p in enumerate(params) if p is slot.param)] = mask.view(slot.param.shape)
    return found


def train(dtype, options, steps=STEPS):
    params, optimizer = build(dtype, options)
    masks, norms = [], []
    for t in range(1, steps + 1):
        set_gradients(params, t, dtype)
        optimizer.step()
        masks.append(masks_now(params, optimizer))
        norms.append(None if optimizer.last_norm is None else float(optimizer.last_norm))
    return {
        "params": [p.detach().clone() for p in params],
        "momentum": snapshot(params, optimizer, "momentum"),
        "residual": snapshot(params, optimizer, "residual"),
        "masks": masks,
        "norms": norms,
        "bytes": optimizer.meter.snapshot(),
        "stats": optimizer.stats(),
    }


def train_all():
    return {(name, dtype): train(dtype, options) for name, options in VARIANTS.items() for dtype in DTYPES}


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def runs(request, pool):
    """(world, [per rank: {(variant, dtype): what train() returned}])"""
    return request.param, pool.run(request.param, train_all)


def reference_of(world, dtype, options, mutant=None, steps=STEPS):
    reference = Reference(world, dtype, options, initial(dtype), mutant)
    for t in range(1, steps + 1):
        reference.step(t, [[gradient(w, t, i, dtype) for i in range(len(SHAPES))] for w in range(world)])
    return reference


def distance(tensors, others) -> float:
    """Largest difference, relative to the largest entry of each tensor."""
    pairs = [(a, b) for a, b in zip(tensors, others, strict=True) if a is not None]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)


# one rounding more or less a step, amplified by 1/(1-b1) in ghat, over the steps
TOLERANCE = {torch.float64: 2e-14, torch.float32: 1e-5}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_brute_force(runs, variant, dtype):
    world, ranks = runs
    reference = reference_of(world, dtype, VARIANTS[variant])
    for rank, results in enumerate(ranks):
        got = results[variant, dtype]
        for t in range(STEPS):
            assert got["masks"][t].keys() == reference.masks[t].keys()
            assert all(torch.equal(got["masks"][t][i], m) for i, m in reference.masks[t].items()), f"step {t + 1}"
        assert distance(got["params"], reference.p) <= TOLERANCE[dtype]
        assert distance(got["momentum"], reference.m) <= TOLERANCE[dtype]
        assert distance(got["residual"], reference.r[rank]) <= TOLERANCE[dtype]
        if "max_grad_norm" in VARIANTS[variant]:
            assert got["norms"] == pytest.approx(reference.norms, rel=1e-5)


@pytest.mark.parametrize(
    "mutant,variant",
    [
        ("mask_not_delayed", "paper"),
        ("residual_decayed", "unclipped"),
        ("clip_by_one_ranks_norm", "paper"),
    ],
)
def test_mutants_are_caught(runs, mutant, variant):
    world, ranks = runs
    wrong = reference_of(world, torch.float64, VARIANTS[variant], mutant)
    assert distance(ranks[0][variant, torch.float64]["params"], wrong.p) > 1e6 * TOLERANCE[torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_bit_identical_on_all_ranks(runs, variant, dtype):
    _, ranks = runs
    first = ranks[0][variant, dtype]
    for results in ranks[1:]:
        other = results[variant, dtype]
        assert all(torch.equal(a, b) for a, b in zip(first["params"], other["params"], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(first["momentum"], other["momentum"], strict=True))
        assert first["norms"] == other["norms"]
        assert any(
            not torch.equal(a, b) for a, b in zip(first["residual"], other["residual"], strict=True) if a is not None
        )


def test_these_runs_clip_some_steps_and_not_others(runs):
    _, ranks = runs
    for variant in ("paper", "row_local"):
        norms = ranks[0][variant, torch.float64]["norms"]
        assert min(norms) < VARIANTS[variant]["max_grad_norm"] < max(norms)
        assert 0 < ranks[0][variant, torch.float64]["stats"]["clipped_share"] < 1


# -- density 1 is dense AdamS ------------------------------------------------------------------------------------


def averaged(params) -> list[torch.Tensor]:
    """A dense all-reduce of this rank's gradients."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in params]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    parts = (flat / dist.get_world_size()).split([g.numel() for g in grads])
    return [part.view_as(g) for part, g in zip(parts, grads, strict=True)]


def dense_and_scape(dtype, max_norm, zeroed):
    """60 steps side by side: the largest |difference| ever, and that of one step relative to the step's update.

    zeroed: both start every step from 0, so that updates are not rounded by the size of the parameters.
    """
    params, scape = build(dtype, {"density": 1.0, "max_grad_norm": max_norm})
    dense = [torch.nn.Parameter(p) for p in initial(dtype)]
    names = ("lr", "weight_decay")
    groups = [{"params": [dense[i] for i in g["params"]]} | {name: g[name] for name in names} for g in GROUPS]
    adams = AdamS(groups, betas=BETAS, eps=EPS)
    furthest, relative = 0.0, 0.0
    for t in range(1, 61):
        set_gradients(params, t, dtype)
        for p, g in zip(dense, averaged(params), strict=True):
            p.grad = g
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(dense, max_norm)
        if zeroed:
            torch._foreach_zero_([p.data for p in params + dense])
        scape.step()
        adams.step()
        gap = torch.cat([(p - q).detach().flatten() for p, q in zip(params, dense, strict=True)])
        update = torch.cat([q.detach().flatten() for q in dense])
        furthest, relative = max(furthest, float(gap.abs().max())), max(relative, float(gap.norm() / update.norm()))
    return furthest, relative


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("max_norm", [None, 150.0])
def test_density_one_equals_dense_adams(pool, world, max_norm):
    for furthest, _ in pool.run(world, dense_and_scape, torch.float64, max_norm, False):
        assert furthest <= 2e-15
    for _, relative in pool.run(world, dense_and_scape, torch.float32, max_norm, True):
        assert relative <= 5e-7


# -- conservation ------------------------------------------------------------------------------------------------


def ledger(dtype, options, steps=10):
    """Every step's residuals, momenta and gradients of this rank, before and after."""
    params, optimizer = build(dtype, options)
    entries = []
    for t in range(1, steps + 1):
        set_gradients(params, t, dtype)
        states = [optimizer.state[p] for p in params]
        before = [(s["momentum"].clone(), s["residual"].clone()) if "residual" in s else None for s in states]
        optimizer.step()
        states = [optimizer.state[p] for p in params]
        after = [(s["momentum"].clone(), s["residual"].clone()) if "residual" in s else None for s in states]
        if t > 1:
            entries.append((before, after, [None if p.grad is None else p.grad.clone() for p in params]))
    return entries


def conservation_error(ranks, leak=0.0) -> float:
    """Largest ||W*m' + R' - (b1*W*m + R + (1-b1)*sum of g)|| of any step, as norms over all tensors, relative."""
    world, worst = len(ranks), 0.0
    for step in zip(*ranks, strict=True):
        gap, size = 0.0, 0.0
        for i in range(len(SHAPES)):
            if step[0][0][i] is None:
                continue
            m, new_m = step[0][0][i][0].double(), step[0][1][i][0].double()
            residuals = sum(rank[0][i][1].double() for rank in step)
            new_residuals = sum(rank[1][i][1].double() for rank in step) * (1 - leak)
            grads = sum(rank[2][i].double() for rank in step if rank[2][i] is not None)
            expected = 0.9 * world * m + residuals + 0.1 * grads
            gap += float((world * new_m + new_residuals - expected).square().sum())
            size += float(expected.square().sum())
        worst = max(worst, (gap / size) ** 0.5)
    return worst


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("mask", ["topk", "cyclic", "random"])
def test_nothing_is_lost(pool, world, mask):
    options = {"density": 0.05, "warmup_steps": 5, "mask": mask}
    doubles = pool.run(world, ledger, torch.float64, options)
    assert conservation_error(doubles) <= 4e-16
    assert conservation_error(doubles, leak=1e-9) > 1e-10  # a residual that decays would be seen
    assert conservation_error(pool.run(world, ledger, torch.float32, options)) <= 3e-7


@pytest.mark.parametrize("world", [2, 3, 4])
def test_bf16_rounding_is_fed_back(pool, world):
    """What is rounded off c, and off the mean, is in somebody's residual: fp32's conservation with a bf16 payload."""
    options = {"density": 0.05, "warmup_steps": 5, "values": "bf16"}
    assert conservation_error(pool.run(world, ledger, torch.float32, options)) <= 3e-7


def sent_and_kept(values):
    """c, what travelled of it, and the residual, of the second and later steps."""
    params, optimizer = build(torch.float32, {"density": 0.05, "warmup_steps": 5, "values": values})
    seen = []
    for t in range(1, 8):
        set_gradients(params, t, torch.float32)
        for p in params:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        sparse = {p: s for p, s in optimizer.state.items() if "residual" in s}
        before = {p: (s["momentum"].clone(), s["residual"].clone()) for p, s in sparse.items()}
        optimizer.step()
        masks = masks_now(params, optimizer)
        for i, mask in masks.items():
            if t > 1:
                m, r = before[params[i]]
                c = (params[i].grad * (1 - 0.9)).add_(m, alpha=0.9) + r
                seen.append((c, mask, optimizer.state[params[i]]["residual"].clone()))
    return seen


def test_c_is_what_was_sent_and_what_was_kept_bit_for_bit(pool):
    for seen in pool.run(2, sent_and_kept, "fp32"):
        for c, mask, residual in seen:
            assert torch.equal(residual[~mask], c[~mask]) and not residual[mask].any()


def test_bf16_keeps_the_rounding_of_c(pool):
    """Checked on one rank, which rounds no mean: what comes back of that is added on top."""
    for c, mask, residual in sent_and_kept("bf16"):
        assert torch.equal(residual[mask], (c - c.bfloat16().float())[mask])
        assert residual[mask].any() or int(mask.sum()) == 1
        assert torch.equal(residual[~mask], c[~mask])


# -- ties and the delay ------------------------------------------------------------------------------------------


def masks_of_coarse_gradients(steps):
    """b1 = 1/2 and gradients in halves: c, and so every tie, is exact."""
    p = torch.nn.Parameter(torch.zeros(20, 21, dtype=torch.float64))
    optimizer = ScapeAdamS([p], betas=(0.5, 0.95), density=0.1)
    masks = []
    for t in range(1, steps + 1):
        p.grad = coarse_gradient(rank_of(), t)
        optimizer.step()
        masks.append(masks_now([p], optimizer)[0])
    return masks


def coarse_gradient(rank, t):
    g = torch.Generator().manual_seed(17 * rank + t)
    return torch.randint(-3, 4, (20, 21), generator=g).double() / 2


@pytest.mark.parametrize("mutant", [None, "ties_by_highest_index", "mask_not_delayed"])
@pytest.mark.parametrize("world", [2, 4])
def test_ties_go_to_the_lowest_index(pool, world, mutant):
    from scape_reference import largest

    ranks = pool.run(world, masks_of_coarse_gradients, 5)
    m, r = torch.zeros(20, 21, dtype=torch.float64), [torch.zeros(20, 21, dtype=torch.float64)] * world
    mask, same = torch.ones(20, 21, dtype=torch.bool), []
    for t in range(1, 6):
        c = [0.5 * m + 0.5 * coarse_gradient(w, t) + r[w] for w in range(world)]
        chosen = largest(c[0], 42, mutant)
        if mutant == "mask_not_delayed" and t > 1:
            mask = chosen
        same += [torch.equal(masks[t - 1], mask) for masks in ranks]
        r = [torch.where(mask, 0.0, x) for x in c]
        m = torch.where(mask, sum(c) / world, 0.0)
        mask = chosen
    assert all(same) if mutant is None else not all(same)


# -- bytes -------------------------------------------------------------------------------------------------------


def bytes_sent(options, steps):
    _, optimizer = build(torch.float32, options)
    params = [p for g in optimizer.param_groups for p in g["params"]]
    per_step = []
    for _ in range(steps):
        before = optimizer.meter.snapshot()
        for p in params:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel() + rank_of()))
        optimizer.step()
        after = optimizer.meter.snapshot()
        per_step.append({key: after[key] - before[key] for key in after})
    return per_step


def formula(world, options, t):
    """(dense bytes, sent bytes, collectives) of step t by SCAPE's formula; the message and the masks rounded up."""
    sparse = [i for g in GROUPS for i in g["params"] if g.get("sparse", len(SHAPES[i]) >= 2)]
    numel = {i: torch.Size(s).numel() for i, s in enumerate(SHAPES)}
    rest = sum(n for i, n in numel.items() if i not in sparse)
    if options.get("second_moment") in ("row", "factored"):
        rest += sum(SHAPES[i][0] for i in sparse)
    if options.get("second_moment") == "factored":
        rest += sum(numel[i] // SHAPES[i][0] for i in sparse)
    kept = sum(kept_of(t, numel[i], options) for i in sparse)
    message, masks = 4 * kept + 4 * rest, 0
    if options.get("mask", "topk") == "topk":
        for i in sparse:
            n, k = numel[i], kept_of(t + 1, numel[i], options)
            if k < n:
                masks += min(-(-n // 8), k + 2 * -(-n // 256), 4 * k)
    sent = -(-2 * (world - 1) * message // world) + -(-(world - 1) * masks // world)
    dense = -(-2 * (world - 1) * 4 * sum(numel.values()) // world)
    return {"dense_bytes": dense, "sent_bytes": sent, "calls": 2 if masks else 1}


@pytest.mark.parametrize("world", [2, 3, 4])
def test_bytes_are_the_formulas_exactly(pool, world):
    for options in (
        {"density": 0.004, "warmup_steps": 6},
        {"density": 0.1, "second_moment": "row"},
        {"density": 0.02, "mask": "cyclic", "second_moment": "row"},
        {"density": 0.05, "second_moment": "factored"},
        {"density": 1.0},
    ):
        for per_step in pool.run(world, bytes_sent, options, 8):
            assert per_step == [formula(world, options, t) for t in range(1, 9)]


def bytes_at_size(density, values):
    p = torch.nn.Parameter(torch.zeros(512, 512))
    optimizer = ScapeAdamS([p], density=density, values=values)
    for t in range(2):
        optimizer.meter.reset()
        p.grad = torch.randn(512, 512, generator=torch.Generator().manual_seed(t))
        optimizer.step()
    return optimizer.meter.sent_bytes / (2 * 512 * 512)


# the best encoding's share of a dense bf16 all-reduce
@pytest.mark.parametrize(
    "density,values,share",
    [
        (0.10, "fp32", 0.2270),
        (0.05, "fp32", 0.1145),
        (0.01, "fp32", 0.0245),
        (0.001, "fp32", 0.0030),
        (0.10, "bf16", 0.1270),
        (0.05, "bf16", 0.0645),
        (0.01, "bf16", 0.0145),
        (0.001, "bf16", 0.0020),
    ],
)
def test_share_of_a_dense_bf16_all_reduce(pool, density, values, share):
    assert pool.run(2, bytes_at_size, density, values)[0] == pytest.approx(share, abs=5.1e-5)


# -- off the critical path, and in little memory -----------------------------------------------------------------


def order_of_events():
    """What happens in steps 2 and 3, in order, with the thread it happens in."""
    events = []

    def spy(owner, name, label):
        original = getattr(owner, name)

        def wrapped(*args, **kwargs):
            result = original(*args, **kwargs)
            events.append((label, threading.current_thread() is threading.main_thread()))
            return result

        patch.setattr(owner, name, wrapped)

    with pytest.MonkeyPatch.context() as patch:
        spy(grad_sync.PackedMessage, "start", "message sent")
        spy(grad_sync, "select_topk", "mask selected")
        spy(mask_exchange.PendingGather, "__init__", "masks sent")
        spy(mask_exchange.PendingGather, "wait", "masks arrived")
        p = torch.nn.Parameter(torch.zeros(60, 50))
        optimizer = ScapeAdamS([p], density=0.1)
        for _ in range(3):
            p.grad = torch.randn(60, 50)
            optimizer.step()
            events.append(("forward and backward", True))
    return events[events.index(("forward and backward", True)) + 1 :]


def test_masks_are_selected_beside_the_message_and_travel_during_the_forward(pool):
    owner, other = pool.run(2, order_of_events)
    one_step = ["masks arrived", "message sent", "masks sent", "forward and backward"]
    assert [event for event, _ in other] == one_step * 2
    assert [event for event, _ in owner if event != "mask selected"] == one_step * 2
    # the owner's selection starts once the message is under way, and in a thread of its own
    names = [event for event, _ in owner]
    for step in (names[:5], names[5:]):
        assert step.index("message sent") < step.index("mask selected") < step.index("masks sent")
    assert [main for event, main in owner if event == "mask selected"] == [False, False]
    assert all(main for event, main in owner + other if event != "mask selected")


def test_what_goes_wrong_beside_the_message_is_raised(monkeypatch):
    monkeypatch.setattr(grad_sync, "select_topk", lambda c, k: c[k:].no_such_attribute)
    params, optimizer = build(torch.float32, {"density": 0.1})
    set_gradients(params, 1, torch.float32)
    with pytest.raises(AttributeError, match="no_such_attribute"):
        optimizer.step()


class LargestAllocation(TorchDispatchMode):
    """Bytes of the largest storage that an operation returned and no earlier one had."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {t.untyped_storage().data_ptr() for t in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        result = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(result):
            if torch.is_tensor(t) and t.untyped_storage().data_ptr() not in known:
                self.nbytes = max(self.nbytes, t.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize(
    "options", [{}, {"second_moment": "row", "clip": "local", "mask": "random"}, {"mask": "cyclic"}], ids=str
)
def test_no_temporary_is_larger_than_one_tensor(options, monkeypatch):
    monkeypatch.setattr(grad_sync.SideLane, "start", lambda self, work: setattr(self, "_pending", work()))
    monkeypatch.setattr(grad_sync.SideLane, "join", lambda self: self.__dict__.pop("_pending", None) or [])
    params = [torch.nn.Parameter(torch.randn(100, 100)) for _ in range(12)]
    optimizer = ScapeAdamS(params, density=0.05, max_grad_norm=1.0, **options)
    for t in range(3):
        for p in params:
            p.grad = torch.randn(100, 100)
        with LargestAllocation() as largest:
            optimizer.step()
        # the first step sends everything, so its message is as large as the model
        assert t == 0 or 0 < largest.nbytes <= params[0].numel() * 4
