"""SCAPE's Triton kernels against their torch twins on the same device: selection, masks, the step, AdamS.

On a GPU with `make test-gpu`; without one test_kernels_on_cpu.py runs this file in Triton's interpreter.
"""

import importlib
import importlib.util
import os
from concurrent.futures import Future

import pytest
import torch

from hf_taco_scape.codecs import device as codec_device
from hf_taco_scape.optim import AdamS
from hf_taco_scape.sync import ScapeAdamS, TensorLayout, device
from hf_taco_scape.sync.device import torch_twins
from hf_taco_scape.sync.mask import CyclicMask, EncodedMask, FullMask, RandomMask, mask_seed, select_topk
from hf_taco_scape.sync.side_lane import SideLane
from hf_taco_scape.sync.slot import Slot
from hf_taco_scape.sync.step_ops import decoded_grad, form_, keep_unsent_, pack_, row_square_sums, sparse_update_

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
if INTERPRETED:
    import triton_on_cpu  # noqa: F401

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
NAN, INF = float("nan"), float("inf")
SIZES = [1, 2, 7, 255, 2049, 4096, 9001] if INTERPRETED else [1, 2, 31, 255, 4095, 4096, 4097, 16384, 16385, 1 << 20]
BIG = [20_001] if INTERPRETED else [20_001, 300_007, 5_000_003]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_TRITON, reason="needs Triton"),
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
    # density on one rank is what these tests want
    pytest.mark.filterwarnings("ignore:ScapeAdamS runs on one"),
]


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch):
    """In the interpreter the CPU takes the kernels, and the side lane no thread: the interpreter knows only one."""
    if INTERPRETED:
        monkeypatch.setattr(device, "_on_kernels", lambda device_: not codec_device._twins_only)
        monkeypatch.setattr(SideLane, "start", run_at_once)
        monkeypatch.setattr(importlib.import_module("hf_taco_scape.kernels.scape_select_launch"), "SLICES", 2)


def run_at_once(lane, work):
    lane._pending = Future()
    lane._pending.set_result(work())


def normal(n, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(n, generator=g) * torch.exp(torch.randn(n, generator=g))).to(dtype).to(DEVICE)


def same(a, b):
    """Equal values; NaN equals NaN."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def close(a, b, size):
    """Within a few roundings at the scale of `size`; NaN and inf where the other has them."""
    finite = b.isfinite()
    gap = (a.float() - b.float())[finite].abs()
    return same(a[~finite], b[~finite]) and bool((gap <= size).all())


# -- selection ---------------------------------------------------------------------------------------------------


def shares(n):
    return sorted({k for k in (1, 2, n // 500, n // 100, n // 10, n // 2, n - 1, n) if 1 <= k <= n})


def inputs(n):
    """name -> x: plain, with ties, with most entries zero, tiny, concentrated, constant, with NaN and infinity."""
    x = normal(n, n)
    rare = torch.zeros_like(x)
    rare[:: max(n // 20, 1)] = x[:: max(n // 20, 1)]
    corner = torch.zeros_like(x)
    corner[: max(n // 50, 1)] = x[: max(n // 50, 1)] * 1e3
    odd = x.clone()
    odd[n // 2 :: 97] = NAN
    odd[n // 3 :: 89] = -INF
    ties = (x * 2).round() / 2
    return {"x": x, "ties": ties, "rare": rare, "tiny": x * 1e-42, "corner": corner, "ones": x * 0 - 1, "odd": odd}


def selected_both(x, k):
    with torch_twins():
        expected = select_topk(x, k)
    return select_topk(x, k), expected


@pytest.mark.parametrize("n", SIZES + BIG)
def test_selection_and_its_wire_form_equal_the_twin(n):
    for name, x in inputs(n).items():
        for k in shares(n):
            got, expected = selected_both(x, k)
            assert int(got.sum()) == k and torch.equal(got, expected), (name, k)
            if k < n:
                with torch_twins():
                    payload = EncodedMask.from_bool(expected, k).payload
                assert torch.equal(device.select_encoded([(x, k)])[0], payload), (name, k)


def test_many_tensors_at_once():
    sizes = [5, 4096, 2, 20_000, 300, 8193]
    tensors = [(normal(n, n), max(1, n // d)) for n in sizes for d in (2, 20, 700)]
    for (x, k), payload in zip(tensors, device.select_encoded(tensors), strict=True):
        _, expected = selected_both(x, k)
        assert torch.equal(EncodedMask(x.numel(), k, payload).indices(DEVICE), expected.nonzero().view(-1))


def test_a_bracket_that_misses_is_recovered(monkeypatch):
    """Both ways, and past the list's room: the ranks of the bracket are set to what a bad sample would give."""
    from hf_taco_scape.kernels.scape_select_launch import Choice

    x = normal(30_011, 3)
    for ranks in ((1, 2), (0, 3), (9000, 12_000), (16_000, 0)):
        monkeypatch.setattr(Choice, "ranks", lambda self, ranks=ranks: ranks)
        for room in (50, 30_011):
            monkeypatch.setattr(Choice, "room", lambda self, room=room: room)
            for values in (x, (x * 4).round()):
                for k in (1, 300, 3000, 29_000):
                    got, expected = selected_both(values, k)
                    assert torch.equal(got, expected), (ranks, room, k)


def test_a_misaligned_tensor():
    x = normal(10_001)
    got, expected = selected_both(x[1:], 200)
    assert torch.equal(got, expected)


def test_highest_index_first_would_be_seen():
    x = (normal(3000) * 2).round() / 2
    got, _ = selected_both(x, 100)
    reversed_, _ = selected_both(x.flip(0), 100)
    assert not torch.equal(got, reversed_.flip(0))


# -- one step ----------------------------------------------------------------------------------------------------

HYPER = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = [(61, 67), (1, 1), (5, 7), (2048, 2), (130, 33)]


def masks_of(numel, k, seed):
    encoded = EncodedMask.from_bool(selected_both(normal(numel, seed), k)[1], k)
    every = [encoded, CyclicMask(numel, k, numel - k // 2 - 1), CyclicMask(numel, k, 0)]
    return [*every, RandomMask(numel, k, mask_seed(1, 2, seed)), FullMask(numel)]


class OneStep:
    """Slots with random state, a mask each, and what the twin and the kernels make of a step."""

    def __init__(self, which, density, dtype=torch.float32, special=False, offset=0, row_dims=(0,), by_row=False):
        self.slots, self.masks = [], {}
        for i, shape in enumerate(SHAPES):
            n = shape[0] * shape[1]
            param = torch.nn.Parameter(normal(n + offset, 10 + i, dtype)[offset:].view(shape))
            param.grad = None if i == 2 else normal(n + offset, 20 + i, dtype)[offset:].view(shape)
            if special and i == 0:
                param.grad.view(-1)[5::400] = NAN
                param.grad.view(-1)[7::300] = INF
            state = {"momentum": normal(n, 30 + i).view(shape), "residual": normal(n, 40 + i).view(shape)}
            if by_row:
                state["second_moment"] = normal(shape[row_dims[0]], 50 + i).square()
            group = HYPER | {"step": 6}
            self.slots.append(Slot(i, param, group, state, TensorLayout(row_dims=row_dims), True))
            k = min(n, max(1, int(density * n)))
            self.masks[i] = masks_of(n, k, i)[(which + i) % 5]
        self.k = [self.masks[i].k for i in range(len(SHAPES))]

    def values(self, dtype):
        return torch.full((sum(self.k),), NAN, dtype=dtype, device=DEVICE)

    def order(self, i):
        """Places of a slot's values, as the twin orders them, among those in index order."""
        places = self.masks[i].resolve(DEVICE).places(self.slots[i].momentum)
        return torch.arange(self.k[i], device=DEVICE) if places is None else places.argsort().argsort()


def run_twin(case, values_dtype, scale, keep, clip, mean):
    out = {}
    for i, slot in enumerate(case.slots):
        selection = case.masks[i].resolve(DEVICE)
        c = slot.state["residual"].clone().view(-1)
        form_(c, slot.momentum, slot.grad, 0.9, scale)
        packed = torch.empty(case.k[i], dtype=values_dtype, device=DEVICE)
        pack_(packed, c, selection)
        whole = c.clone()
        keep_unsent_(c, selection, values_dtype)
        own_mean = mean.split(case.k)[i][case.order(i)].float()
        ghat = decoded_grad(own_mean, slot.momentum, selection, 0.9)
        p, m = slot.param.detach().clone(), slot.momentum.clone()
        second = slot.state.get("second_moment")
        dims = slot.layout.row_dims
        sparse_update_(p, m, own_mean, selection, **slot.group, clip=clip, second_moment=second, row_dims=dims)
        out[i] = (packed, whole if i in keep else c, c, ghat.norm(), p.view(-1), m)
    return out


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("variant", ["plain", "bf16 values", "bf16", "fp16 by row", "special", "misaligned", "Conv1D"])
def test_every_part_of_a_step(which, variant):
    density = (0.001, 0.01, 0.1, 0.4, 0.07)[which]
    dtype = {"bf16": torch.bfloat16, "fp16 by row": torch.float16}.get(variant, torch.float32)
    dims = (1,) if variant == "Conv1D" else (0,)
    by_row = variant in ("fp16 by row", "Conv1D")
    case = OneStep(which, density, dtype, variant == "special", int(variant == "misaligned"), dims, by_row)
    values_dtype = torch.bfloat16 if variant == "bf16 values" else torch.float32
    scale = torch.tensor(0.37, device=DEVICE) if which % 2 else None
    clip = torch.tensor([0.25, 1.0][which % 2], device=DEVICE) if variant != "plain" else None
    keep, mean = {0, 3}, normal(sum(case.k), 7).to(values_dtype)
    expected = run_twin(case, values_dtype, scale, keep, clip, mean)
    values = case.values(values_dtype)
    step = device.fused_step(case.slots, None, 7, case.masks)
    step.form(values, keep, scale)
    for i, (slot, packed) in enumerate(zip(case.slots, values.split(case.k), strict=True)):
        want, kept, *_ = expected[i]
        # the kernel fuses b1*m into the sum, as torch does but in short tails
        bound = 2.0**-21 * slot.state["residual"].abs().max() if values_dtype == torch.float32 else INF
        assert close(packed[case.order(i)], want, bound) or variant == "special"
        assert close(slot.state["residual"].view(-1), kept, 1e-5) or values_dtype == torch.bfloat16, i
    step._launch.keep_unsent(values)
    for i, slot in enumerate(case.slots):
        rest, packed = slot.state["residual"].view(-1), values.split(case.k)[i]
        on = torch.zeros_like(rest, dtype=torch.bool)
        case.masks[i].resolve(DEVICE).put_(on, True)
        assert values_dtype == torch.bfloat16 or not rest[on].any()
        assert close(rest[~on], expected[i][2][~on], 1e-5) and packed.numel() == int(on.sum())
    values.copy_(mean)
    if values_dtype == torch.float32:
        for i, norm in enumerate(step.norms()):
            assert torch.isclose(norm, expected[i][3], rtol=1e-6)
    step.update(clip, {})  # with the groups' step as it is, as the twin's above
    for i, slot in enumerate(case.slots):
        *_, p, m = expected[i]
        rounding = {torch.float32: 2e-7, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
        assert close(slot.param.detach().view(-1), p, rounding * p.float().abs().clamp(min=1).max())
        assert close(slot.momentum, m, 1e-6 * m.abs().max().clamp(min=1))
        assert int((slot.momentum != 0).sum()) <= case.k[i]


def test_a_wrong_place_would_be_seen():
    """A mutant: values one place off."""
    case = OneStep(0, 0.1)
    values = case.values(torch.float32)
    device.fused_step(case.slots, None, 7, case.masks).form(values, set(), None)
    case = OneStep(0, 0.1)
    packed = run_twin(case, torch.float32, None, set(), None, torch.zeros(sum(case.k), device=DEVICE))[0][0]
    got = values.split(case.k)[0][case.order(0)]
    assert close(got, packed, 1e-5) and not close(got.roll(1), packed, 1e-5)


def test_rounding_of_the_mean_is_owed_to_the_right_entries():
    case = OneStep(0, 0.1)
    step = device.fused_step(case.slots, None, 7, case.masks)
    values = case.values(torch.float32)
    step.form(values, set(), None)
    before = [slot.state["residual"].clone() for slot in case.slots]
    first, error = case.k[0] - 3, normal(case.k[1] + 9, 5)
    step.owe(error, first, 4)
    all_owed = torch.zeros(sum(case.k), device=DEVICE)
    all_owed[first : first + error.numel()] = 4 * error
    for i, (slot, owed) in enumerate(zip(case.slots, all_owed.split(case.k), strict=True)):
        case.masks[i].resolve(DEVICE).put_(dense := torch.zeros_like(slot.momentum), owed[case.order(i)])
        assert torch.equal(slot.state["residual"].view(-1), before[i].view(-1) + dense)


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_row_sums_equal_the_twin(dims, dtype):
    slots = []
    for i, shape in enumerate([(61, 67), (1, 1), (5, 700), (129, 2)]):
        p = torch.nn.Parameter(normal(shape[0] * shape[1], i, dtype).view(shape))
        p.grad = None if i == 1 else normal(p.numel(), 9 + i, dtype).view(shape)
        state = {"momentum": torch.zeros(shape, device=DEVICE), "residual": torch.zeros(shape, device=DEVICE)}
        slots.append(Slot(i, p, HYPER | {"step": 1}, state, TensorLayout(row_dims=dims), True))
    for scale in (None, torch.tensor(0.3, device=DEVICE)):
        for slot, sums in zip(slots, device.square_sums(slots, [dims] * len(slots), scale), strict=True):
            expected = row_square_sums(slot.param.grad, slot.state["momentum"], dims, scale)
            assert sums.shape == expected.shape and torch.allclose(sums, expected, rtol=2e-6, atol=0)


# -- whole runs --------------------------------------------------------------------------------------------------

OPTIONS = {
    "paper": {"density": 0.05, "warmup_steps": 6, "max_grad_norm": 90.0},
    "held, row, local": {
        "density": 0.02,
        "warmup_steps": 5,
        "hold_steps": 2,
        "second_moment": "row",
        "clip": "local",
        "max_grad_norm": 90.0,
    },
    "bf16 values": {"density": 0.05, "values": "bf16"},
    "factored": {"density": 0.05, "second_moment": "factored", "clip": "local", "max_grad_norm": 90.0},
    "factored, random": {"density": 0.07, "mask": "random", "second_moment": "factored"},
    "cyclic": {"density": 0.07, "mask": "cyclic"},
    "random": {"density": 0.07, "mask": "random", "second_moment": "row"},
}


def train(options, steps, dtype, twins):
    shapes = [(40, 61), (1, 3), (129, 17), (11,), (300, 8)]
    params = [torch.nn.Parameter(normal(torch.Size(s).numel(), i, dtype).view(s)) for i, s in enumerate(shapes)]
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 2e-3, "weight_decay": 0.0}]
    optimizer = ScapeAdamS(groups, lr=1e-3, **options)
    for t in range(steps):
        for i, p in enumerate(params):
            p.grad = None if (i, t % 5) == (2, 3) else normal(p.numel(), 100 * t + i, dtype).view(p.shape)
        if twins:
            with torch_twins():
                optimizer.step()
        else:
            optimizer.step()
            assert optimizer._engine._kernels is not None
    return params, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_twenty_steps_equal_the_twins(name, dtype):
    params, optimizer = train(OPTIONS[name], 20, dtype, twins=False)
    expected, reference = train(OPTIONS[name], 20, dtype, twins=True)
    size = 2e-6 if dtype == torch.float32 else 2**-7
    for p, q in zip(params, expected, strict=True):
        assert (p - q).norm() <= size * q.norm()
        state, wanted = optimizer.state[p], reference.state[q]
        for key in ("momentum", "residual"):
            if key in state:
                assert (state[key] - wanted[key]).norm() <= 2e-6 * wanted[key].norm(), key
        if "mask" in state:
            assert torch.equal(state["mask"], wanted["mask"]) and state["mask_k"] == wanted["mask_k"]


def test_autograd_sees_the_update():
    """A graph that was built before the step must not run backward through the weights after it."""
    params, optimizer = train({"density": 0.05}, 1, torch.float32, twins=False)
    p = params[0]
    loss = (p * p).sum()
    for q in params:
        q.grad = torch.ones_like(q)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_fp64_takes_the_twins():
    params = [torch.nn.Parameter(torch.ones(30, 30, device=DEVICE, dtype=d)) for d in (torch.float32, torch.float64)]
    optimizer = ScapeAdamS(params, density=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer._engine._kernels is None and (params[0] < 1).all()


def test_kernels_and_twins_take_turns():
    """What a kernel leaves out off the mask of the step before must not survive a step of the twins."""
    options = {"density": 0.05}
    params, optimizer = train(options, 3, torch.float32, twins=False)
    expected, reference = train(options, 3, torch.float32, twins=True)
    for t in range(3, 9):
        for optimizer_, tensors, turn in ((optimizer, params, t % 3 == 0), (reference, expected, True)):
            for i, p in enumerate(tensors):
                p.grad = normal(p.numel(), 100 * t + i).view(p.shape)
            if turn:
                with torch_twins():
                    optimizer_.step()
            else:
                optimizer_.step()
    for p, q in zip(params, expected, strict=True):
        assert (p - q).norm() <= 2e-6 * q.norm()
        assert (optimizer.state[p]["momentum"] - reference.state[q]["momentum"]).norm() <= 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dense_adams_equals_the_twin(dtype):
    def run(twins):
        params = [torch.nn.Parameter(normal(n, n, dtype)) for n in (1, 7, 2048, 2049, 5000)]
        optimizer = AdamS(params, lr=1e-3)
        for t in range(5):
            for p in params:
                p.grad = normal(p.numel(), t + p.numel(), dtype)
            if twins:
                with torch_twins():
                    optimizer.step()
            else:
                optimizer.step()
        return params, [optimizer.state[p]["momentum"] for p in params]

    (params, momenta), (expected, wanted) = run(False), run(True)
    size = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    for p, q, m, w in zip(params, expected, momenta, wanted, strict=True):
        assert (p - q).norm() <= size * q.norm() and (m - w).norm() <= 1e-6 * w.norm()
        assert close(m, w, 1e-6 * float(w.abs().max()))
