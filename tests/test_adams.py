"""AdamS against an independent recursion in fp64, and the habits of a torch optimizer."""

import copy
import math
import subprocess
import sys
import warnings

import pytest
import torch

from hf_taco_scape.optim import AdamS, adams

SHAPES = [(7, 5), (11,), (3, 2, 4), ()]


def gradients(step: int, dtype=torch.float64) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    return [(torch.randn(s, generator=g, dtype=torch.float64) * 10 ** (i - 2)).to(dtype) for i, s in enumerate(SHAPES)]


def start(dtype) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(99)
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in SHAPES]


def recursion(p, grads, lr, betas, eps, wd):
    """One parameter element by element, from the equations, in Python floats."""
    values, (b1, b2) = [], betas
    for j, x in enumerate(p.double().flatten().tolist()):
        m = 0.0
        for t, grad in enumerate(grads, start=1):
            g = float(grad.flatten()[j])
            mt = b1 * m + (1 - b1) * g
            v = b2 * m * m + (1 - b2) * g * g
            x -= lr * wd * x
            x -= lr / (1 - b1**t) * mt / (math.sqrt(v) / math.sqrt(1 - b2**t) + eps)
            m = mt
        values.append(x)
    return torch.tensor(values, dtype=torch.float64).view(p.shape)


def train(params, steps, optimizer, dtype=None):
    for t in range(1, steps + 1):
        for p, g in zip(params, gradients(t, dtype or params[0].dtype), strict=True):
            p.grad = g
        optimizer.step()


HYPER = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.mark.parametrize("hyper", [HYPER, {"lr": 0.1, "betas": (0.5, 0.7), "eps": 1e-3, "weight_decay": 0.0}])
def test_fp64_equals_the_recursion(hyper):
    params = [torch.nn.Parameter(p) for p in start(torch.float64)]
    train(params, 60, AdamS(params, **hyper))
    for i, p in enumerate(params):
        grads = [gradients(t)[i] for t in range(1, 61)]
        names = ("lr", "betas", "eps", "weight_decay")
        expected = recursion(start(torch.float64)[i], grads, *(hyper[name] for name in names))
        assert (p - expected).abs().max() <= 1e-14 * max(1, expected.abs().max())


def test_fp32_updates_are_within_5e_7_of_the_recursion():
    params = [torch.nn.Parameter(torch.zeros(s)) for s in SHAPES]
    optimizer = AdamS(params, lr=1e-3, weight_decay=0.0)
    momenta = [torch.zeros(s, dtype=torch.float64) for s in SHAPES]
    for t in range(1, 61):
        for p, g in zip(params, gradients(t, torch.float32), strict=True):
            p.grad = g
            p.data.zero_()  # what is left is this step's update, unrounded by the size of the parameter
        optimizer.step()
        error, size = 0.0, 0.0
        for i, p in enumerate(params):
            g, m = p.grad.double(), momenta[i]
            momenta[i] = 0.9 * m + 0.1 * g
            v = 0.95 * m**2 + 0.05 * g**2
            expected = -1e-3 / (1 - 0.9**t) * momenta[i] / (v.sqrt() / math.sqrt(1 - 0.95**t) + 1e-8)
            error += float((p.detach().double() - expected).square().sum())
            size += float(expected.square().sum())
        assert error**0.5 <= 5e-7 * size**0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_parameters_keep_fp32_state(dtype):
    params = [torch.nn.Parameter(p) for p in start(dtype)]
    optimizer = AdamS(params, **HYPER)
    train(params, 5, optimizer)
    for i, p in enumerate(params):
        m = torch.zeros(SHAPES[i], dtype=torch.float64)
        for t in range(1, 6):
            m = 0.9 * m + 0.1 * gradients(t, dtype)[i].double()
        assert optimizer.state[p]["momentum"].dtype == torch.float32
        assert (optimizer.state[p]["momentum"].double() - m).norm() <= 2e-7 * m.norm()  # bf16 alone costs 2e-3
    # one step from fp32 state, rounded once
    q = torch.nn.Parameter(torch.full((4,), 1.0, dtype=dtype))
    q.grad = torch.full_like(q, 0.5)
    AdamS([q], lr=0.25, weight_decay=0.0).step()
    assert q.tolist() == [0.75] * 4


def test_chunks_change_nothing(monkeypatch):
    whole = [torch.nn.Parameter(p) for p in start(torch.float32)]
    train(whole, 5, AdamS(whole, **HYPER))
    monkeypatch.setattr(adams, "CHUNK_NUMEL", 12)
    assert [[t.numel() for t in c] for c in adams.chunks(whole)] == [[35], [11], [24], [1]]
    parts = [torch.nn.Parameter(p) for p in start(torch.float32)]
    train(parts, 5, AdamS(parts, **HYPER))
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_groups_schedulers_and_closures():
    decayed, kept = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = AdamS([{"params": [decayed]}, {"params": [kept], "weight_decay": 0.0, "lr": 0.5}], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure():
        optimizer.zero_grad()
        assert torch.is_grad_enabled()
        loss = (decayed * 0).sum() + (kept * 0).sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) == 0.0
    scheduler.step()
    assert decayed.tolist() == pytest.approx([0.9] * 3) and kept.tolist() == [1.0] * 3
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.25]


def test_a_parameter_without_a_gradient_is_left_alone():
    used, unused = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = AdamS([used, unused])
    used.grad = torch.ones(3)
    optimizer.step()
    assert unused.tolist() == [1.0] * 3 and unused not in optimizer.state
    # its own bias correction starts with its own first gradient
    unused.grad = torch.full((3,), 5.0)
    optimizer.step()
    assert optimizer.state[used]["step"] == 2 and optimizer.state[unused]["step"] == 1
    assert unused.tolist() == pytest.approx([(1 - 1e-4) - 1e-3] * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resume_is_bit_for_bit(dtype, tmp_path):
    straight = [torch.nn.Parameter(p) for p in start(dtype)]
    optimizer = AdamS(straight, **HYPER)
    train(straight, 5, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    resumed = [torch.nn.Parameter(p.detach().clone()) for p in straight]
    other = AdamS(resumed, lr=0.5)
    other.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    for p, q in zip(straight, resumed, strict=True):
        a, b = optimizer.state[p]["momentum"], other.state[q]["momentum"]
        assert a.dtype == b.dtype == torch.float32 and torch.equal(a, b) and a.data_ptr() != b.data_ptr()
    train(straight, 5, optimizer)
    train(resumed, 5, other)
    assert all(torch.equal(p, q) for p, q in zip(straight, resumed, strict=True))


def test_state_that_stays_is_not_brought_to_the_parameter():
    """A tensor on another device (meta stands for it) is cloned there; all others come to the parameter."""
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamS([p])
    away = {"kept": torch.ones(3, device="meta"), "momentum": torch.full((3,), 2.0)}
    adams.load_state_uncast(optimizer, {**optimizer.state_dict(), "state": {0: away}}, stay=("kept",))
    assert optimizer.state[p]["kept"].device.type == "meta"
    assert torch.equal(optimizer.state[p]["momentum"], away["momentum"])


def test_torchs_own_load_would_be_caught(tmp_path):
    """The reason for the override: Optimizer.load_state_dict rounds the momentum to bf16."""
    p = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = AdamS([p])
    p.grad = torch.randn(64).bfloat16() / 3
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    torch.optim.Optimizer.load_state_dict(optimizer, saved)
    assert not torch.equal(optimizer.state[p]["momentum"].float(), saved["state"][0]["momentum"])


def test_warns_of_outsize_first_moves():
    p = [torch.nn.Parameter(torch.ones(2))]
    with pytest.warns(UserWarning, match="3.16 lr at once"):
        AdamS(p, betas=(0.9, 0.999))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AdamS(p)


def test_the_move_that_the_warning_states():
    """|m/sqrt(v)| of a coordinate that arrives with m = 0, long after the first step."""
    for b2, move in ((0.95, 0.4472), (0.999, 3.1623)):
        p = torch.nn.Parameter(torch.zeros(1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = AdamS([p], lr=1.0, betas=(0.9, b2), weight_decay=0.0)
        for t in range(20_000):
            p.grad = torch.zeros(1) if t < 19_999 else torch.full((1,), 7.0)
            optimizer.step()
        assert abs(float(p)) == pytest.approx(move, rel=1e-3)


@pytest.mark.parametrize(
    "bad", [{"lr": -1}, {"betas": (1.0, 0.95)}, {"betas": (0.9, -0.1)}, {"eps": -1e-8}, {"weight_decay": -0.1}]
)
def test_bad_values_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        AdamS([torch.nn.Parameter(torch.ones(2))], **bad)


def test_sparse_gradients_are_refused():
    table = torch.nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        AdamS(table.parameters()).step()


def test_the_packages_name_brings_the_kernels_without_transformers():
    code = (
        "import sys\nfrom hf_taco_scape import AdamS\nfrom hf_taco_scape.optim import adams\n"
        "assert AdamS is adams.AdamS\n"
        "print(adams._kernels is not None, sorted({'transformers', 'accelerate', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split(maxsplit=1) == ["True", "[]\n"]


def test_it_imports_no_torch_distributed():
    import inspect

    assert "distributed" not in inspect.getsource(adams)
