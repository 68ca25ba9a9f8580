"""The simulator against the distributed step, bit for bit, and the study's flat one against the simulator.

Then each variant's invariants, the models against transformers', and the study script on a few lines of text.
"""

import json
import math

import pytest
import torch
import torch.distributed as dist
from scape_reference import BETAS, EPS, GROUPS, SHAPES, gradient, initial
from test_grad_sync import VARIANTS, build, rank_of, snapshot
from torch.nn import functional

import scape_flat
import scape_lowrank
import scape_masks
import scape_models
import scape_simulator
import scape_summary
import simulate_scape
from hf_taco_scape.sync import DensitySchedule, TensorLayout
from hf_taco_scape.sync.mask import select_topk

STEPS = 9
SIMULATED = {
    **VARIANTS,
    "bf16": {**VARIANTS["paper"], "values": "bf16"},
    "bf16_row_local": {**VARIANTS["row_local"], "values": "bf16"},
    "bf16_cyclic": {**VARIANTS["cyclic"], "values": "bf16"},
}


def distributed(dtype, options):
    params, optimizer = build(dtype, {**options, "ordered": dist.is_initialized() and dist.get_world_size() > 2})
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


def simulated(world, dtype, options):
    params = [torch.nn.Parameter(p) for p in initial(dtype)]
    groups = [{**group, "params": [params[i] for i in group["params"]]} for group in GROUPS]
    scape = scape_simulator.SimulatedScape(groups, world, betas=BETAS, eps=EPS, **options)
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
def test_equals_the_distributed_step_bit_for_bit(pool, world, dtype):
    ranks = pool.run(world, distributed_all, dtype)
    for name, options in SIMULATED.items():
        if dtype == torch.float64 and "values" in options:
            continue
        params, states = simulated(world, dtype, options)
        for rank in range(world):
            weights, momenta, residuals = ranks[rank][name]
            for i, p in enumerate(params):
                assert torch.equal(weights[i], p), (name, rank, i)
                assert torch.equal(momenta[i], states[i]["momentum"]), (name, rank, i)
                if residuals[i] is not None:
                    assert torch.equal(residuals[i].view(-1), states[i]["residual"][rank]), (name, rank, i)


# -- the study's step on flat vectors ----------------------------------------------------------------------------

KINDS = [
    scape_models.Kind("columns", 0, 2, (13, 7), 1),
    scape_models.Kind("rows", 182, 1, (31, 11), 0),
    scape_models.Kind("norms", 523, 2, (9,), 0),
]
SIZE, MATRICES = KINDS[-1].span.stop, KINDS[1].span.stop
SCHEDULE = {"density": 0.05, "warmup_steps": 5, "hold_steps": 2}
FLAT = {
    "paper": {"max_grad_norm": 3.0},
    "unclipped": {},
    "adams_local": {"clip": "local", "max_grad_norm": 3.0},
    "row_local": {"second_moment": "row", "clip": "local", "max_grad_norm": 3.0},
    "factored_local": {"second_moment": "factored", "clip": "local", "max_grad_norm": 3.0},
    "factored_random": {"second_moment": "factored", "mask": "random"},
    "row_random": {"second_moment": "row", "mask": "random"},
    "row_cyclic": {"second_moment": "row", "mask": "cyclic"},
    "half": {"mask": "half"},
    "topk_mean": {"mask": "topk_mean"},
}


def gradients_of(world, steps, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lasting = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    for t in range(steps):
        noise = torch.randn(world, SIZE, generator=generator, dtype=torch.float64)
        yield ((1 + t % 3) * (0.3 * lasting + noise)).to(dtype)


def tensors_of(flat):
    return [
        part for kind in KINDS for part in flat[..., kind.span].reshape(*flat.shape[:-1], kind.layers, -1).unbind(-2)
    ]


def run_flat(dtype, world=4, steps=20, **options):
    torch.manual_seed(3)
    flat = torch.randn(SIZE, dtype=dtype)
    schedule = DensitySchedule(*SCHEDULE.values())
    scape = scape_flat.FlatScape(KINDS, flat, world, schedule=schedule, **options)
    for grads in gradients_of(world, steps, dtype):
        scape.step(grads, 3e-3)
    return flat, scape


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 1e-6)], ids=str)
def test_flat_step_equals_the_simulator(name, dtype, tolerance):
    options = FLAT[name]
    flat, scape = run_flat(dtype, **options)
    torch.manual_seed(3)
    initial_flat, row_dims = torch.randn(SIZE, dtype=dtype), {}
    params = []
    for kind in KINDS:
        for part in initial_flat[kind.span].view(kind.layers, *kind.shape):
            params.append(torch.nn.Parameter(part.clone()))
            row_dims[id(params[-1])] = kind.row_dim
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    simulated = scape_simulator.SimulatedScape(
        groups,
        4,
        lr=3e-3,
        layout=lambda p: TensorLayout(row_dims=(row_dims[id(p)],)),
        **SCHEDULE,
        **options,
    )
    for grads in gradients_of(4, 20, dtype):
        simulated.step([g.view(4, *p.shape) for g, p in zip(tensors_of(grads), params, strict=True)])
    weights = torch.cat([p.detach().view(-1) for p in params])
    residual = torch.cat([slot.state["residual"] for slot in simulated.sparse], 1)
    assert (flat - weights).abs().max() <= tolerance
    assert (scape.residual - residual).abs().max() <= 10 * tolerance
    assert float(scape.clipped) == pytest.approx(float(simulated.clipped), abs=1e-6)


@pytest.mark.parametrize("mask", ["topk", "random", "half"])
@pytest.mark.parametrize("ranks", [None, [2, 1]])
@pytest.mark.parametrize("momentum, share", [("sparse", 1.0), ("kept", 1.0), ("kept", 0.5), ("predict", 1.0)])
def test_nothing_is_lost_between_ranks(momentum, share, mask, ranks):
    """W*m' + R' = b1*W*m + R + (1-b1)*sum of g, each step; the guess that predict adds on every rank is taken off."""
    world, b1 = 3, BETAS[0]
    options = {
        "second_moment": "row",
        "clip": "local",
        "momentum": momentum,
        "share": share,
        "mask": mask,
        "ranks": ranks,
    }
    schedule = DensitySchedule(*SCHEDULE.values())
    scape = scape_flat.FlatScape(KINDS, torch.zeros(SIZE, dtype=torch.float64), world, schedule=schedule, **options)
    for grads in gradients_of(world, 14, torch.float64):
        before = b1 * world * scape.momentum[:MATRICES] + scape.residual.sum(0)
        expected = before + (1 - b1) * grads[:, :MATRICES].sum(0)
        scape.step(grads.clone(), 1e-3)
        after = world * scape.momentum[:MATRICES] + scape.residual.sum(0)
        torch.testing.assert_close(after, expected, rtol=0, atol=1e-13)
    assert scape.residual.abs().max() > 0.1


def test_tracked_momentum_is_what_the_ranks_know():
    _, scape = run_flat(torch.float64, second_moment="row", clip="local", momentum="track")
    torch.testing.assert_close(scape.momentum[:MATRICES], scape.known.mean(0), rtol=0, atol=1e-13)
    assert (scape.local - scape.known).abs().max() > 0.1


def test_low_rank_part_finds_what_has_low_rank():
    """C = U V^T of rank 2 and a little noise, two directions: after some steps nearly all of it travels each step."""
    generator = torch.Generator().manual_seed(0)
    kind = scape_models.Kind("matrix", 0, 2, (20, 30), 0)
    u, v = (torch.randn(2, n, 2, generator=generator, dtype=torch.float64) for n in kind.shape)
    c = (u @ v.transpose(1, 2)).reshape(1, -1).repeat(3, 1)
    c += 0.01 * torch.randn(c.shape, generator=generator, dtype=torch.float64)
    low = scape_lowrank.LowRank([kind], [2], c, seed=0)
    for _ in range(6):
        rest = c.clone()
        arrived = low.exchange(rest)
        torch.testing.assert_close(rest.mean(0) + arrived, c.mean(0), rtol=0, atol=1e-12)
    assert rest.norm() < 0.02 * c.norm() and low.numbers() in (2 * 2 * 20, 2 * 2 * 30)


def test_matrices_named_dense_are_sent_whole():
    _, scape = run_flat(torch.float64, second_moment="row", clip="local", dense="rows")
    assert scape.residual[:, KINDS[1].span].abs().max() == 0 < scape.residual[:, KINDS[0].span].abs().max()


@pytest.mark.parametrize("momentum", ["sparse", "kept", "predict"])
def test_density_one_is_dense_adams_whatever_carries_the_momentum(momentum):
    dense, flat = torch.ones(SIZE, dtype=torch.float64), torch.ones(SIZE, dtype=torch.float64)
    rival = scape_flat.FlatAdam(KINDS, dense, 4, second_moment="adams")
    scape = scape_flat.FlatScape(KINDS, flat, 4, schedule=DensitySchedule(1.0), momentum=momentum)
    for grads in gradients_of(4, 12, torch.float64):
        rival.step(grads.clone(), 3e-3)
        scape.step(grads.clone(), 3e-3)
    assert (dense - flat).abs().max() < 1e-12 < (dense - 1).abs().max()


def test_factored_second_moment_is_exact_where_it_factors():
    """g^2 = row times column: v is its EMA, entry by entry; `row` has the row's mean."""
    flat = torch.zeros(SIZE, dtype=torch.float64)
    grads = torch.zeros(2, SIZE, dtype=torch.float64)
    expected = []
    for kind in KINDS[:2]:
        row = torch.rand(kind.layers, kind.shape[0], 1, dtype=torch.float64) + 0.1
        column = torch.rand(kind.layers, 1, kind.shape[1], dtype=torch.float64) + 0.1
        grads[:, kind.span] = (row * column).sqrt().reshape(-1)
        expected.append((row * column).reshape(-1))
    own = grads[:, :MATRICES]
    for name, exact in {"factored": True, "full": True, "row": False}.items():
        second = scape_flat.LocalSecondMoment(KINDS[:2], name, flat)
        for _ in range(3):
            second.update(own, 0.9)
        error = (second.v / (1 - 0.9**3) / torch.cat(expected) - 1).abs().max()
        assert (error < 1e-12) == exact, name


def test_dense_rival_is_torch_adamw():
    params = [torch.nn.Parameter(torch.ones(n, dtype=torch.float64)) for n in (MATRICES, SIZE - MATRICES)]
    groups = [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=3e-3, betas=BETAS, weight_decay=0.1)
    flat = torch.ones(SIZE, dtype=torch.float64)
    rival = scape_flat.FlatAdam(KINDS, flat, 4, max_grad_norm=3.0)
    for grads in gradients_of(4, 12, torch.float64):
        for p, g in zip(params, grads.mean(0).split([MATRICES, SIZE - MATRICES]), strict=True):
            p.grad = g.clone()
        torch.nn.utils.clip_grad_norm_(params, 3.0)
        reference.step()
        rival.step(grads, 3e-3)
    assert (flat - torch.cat([p.detach() for p in params])).abs().max() < 1e-14


def test_naive_rival_sends_each_ranks_own_largest():
    flat = torch.zeros(SIZE, dtype=torch.float64)
    naive = scape_flat.FlatNaive(KINDS, flat, 3, schedule=DensitySchedule(0.05))
    dense = scape_flat.FlatAdam(KINDS, flat.clone(), 3)
    errors = torch.zeros(3, MATRICES, dtype=torch.float64)
    for t, grads in enumerate(gradients_of(3, 5, torch.float64), 1):
        errors += grads[:, :MATRICES]
        sent = grads.clone()
        for rank in range(3):
            tensors = tensors_of(torch.cat([errors[rank], grads[rank, MATRICES:]]))
            chosen = [select_topk(c, naive.schedule.kept(t, c.numel())) for c in tensors]
            mask = torch.cat(chosen)[:MATRICES]
            sent[rank, :MATRICES] = errors[rank] * mask
            errors[rank, mask] = 0
        naive.step(grads, 3e-3)
        dense.step(sent, 3e-3)
    assert torch.equal(naive.errors, errors) and (naive.flat - dense.flat).abs().max() < 1e-15


@pytest.mark.parametrize("k", [1, 4, 9, 10])
def test_rows_are_selected_exactly_ties_by_lowest_index(k):
    x = torch.tensor([[0.0, -3, 3, 1, 0, 3, 0, -1, 2, 0], [0.0] * 10, [5.0] * 10])
    chosen = scape_masks.select_rows(x, k)
    assert torch.equal(chosen, torch.stack([select_topk(row, k) for row in x]))


def test_flush_raises_the_density_at_the_end():
    schedule = scape_masks.FlushedSchedule(DensitySchedule(0.01), 90, 0.2)
    assert [schedule.kept(t, 1000) for t in (1, 90, 91)] == [1000, 10, 200]


# -- the models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "qwen"])
def test_pass_equals_transformers_rank_by_rank(family):
    model = scape_models.reference_model(family, "tiny", 256, 24, seed=0)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    kinds, flat = scape_models.flatten(model)
    gradients = scape_models.RankGradients(family, kinds, flat, ranks=3, batch=2, context=24)
    windows = torch.randint(0, 256, (3, 2, 25))
    gradients(windows)
    for rank in range(3):
        model.zero_grad()
        logits = model(input_ids=windows[rank, :, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), windows[rank, :, 1:].flatten())
        loss.backward()
        assert float(gradients.losses[rank]) == pytest.approx(float(loss.detach()), rel=1e-6)
        for kind in kinds:
            named = [p.grad.flatten() for n, p in model.named_parameters() if scape_models.kind_of(n) == kind.name]
            expected = torch.cat(named)
            assert (gradients.grads[rank, kind.span] - expected).norm() / expected.norm() < 5e-6, kind.name


@pytest.mark.parametrize("family", ["gpt2", "qwen"])
def test_study_models_have_five_million_parameters(family):
    _, flat = scape_models.flatten(scape_models.reference_model(family, "7M", 256, 256, seed=0))
    assert 5_000_000 <= flat.numel() <= 8_000_000


# -- the study script ----------------------------------------------------------------------------------------------


@pytest.fixture
def study(tmp_path):
    text = tmp_path / "text.txt"
    prose = "the quick brown fox jumps over the lazy dog, and again. " * 400
    text.write_text(prose + ".. code::\n\n   ``print``\n" * 900)

    def run(*flags, out="lines.jsonl"):
        simulate_scape.main(["--text", str(text), "--out", str(tmp_path / out), "--device", "cpu", *flags])
        written = (tmp_path / out).read_text() if (tmp_path / out).exists() else ""
        return [json.loads(line) for line in written.splitlines()]

    run.folder, run.text = tmp_path, text
    return run


def test_rehearsal_trains_records_and_resumes(study):
    flags = ("--preset", "rehearsal", "--only", "/(adamw|naive|paper|row-half|row-topk|kept-topk)/d(1.0|0.1)/")
    lines = study(*flags, "--set", "steps=4")
    random = ["adamw", "naive", "paper", "row-topk", "row-half", "kept-topk"]
    assert [line["config"]["label"] for line in lines] == [*random, "start", "adamw", "row-topk"]
    for line in lines:
        assert line["finished"] and line["steps_done"] == (6 if line["config"]["label"] == "start" else 4)
        assert line["val"][-1][1] == line["final"] < line["val"][0][1]
    trained = [line for line in lines if line["config"]["start"]]
    assert len({line["val"][0][1] for line in trained}) == 1
    assert trained[0]["val"][0][1] == pytest.approx(lines[-3]["final"], abs=1e-6)
    assert len(study(*flags, "--set", "steps=4")) == len(lines)


def test_a_configuration_gives_the_same_numbers_in_any_company(study):
    """Models are reset in place: what ran before must not show."""
    flags = ("--preset", "rehearsal", "--set", "steps=4", "--only")
    together = study(*flags, "gpt2.*/(adamw/d1.0|kept-topk/d0.1)/")
    alone = study(*flags, "gpt2.*/kept-topk/d0.1/", out="alone.jsonl")
    assert together[-1]["val"] == alone[0]["val"]


def test_what_cannot_end_in_time_is_not_begun(study):
    lines = study("--preset", "rehearsal", "--seconds", "0", out="late.jsonl")
    assert lines == []
    config = simulate_scape.with_overrides(simulate_scape.PRESETS["rehearsal"][0], [])
    tokens = torch.randint(0, 256, (20_000,), dtype=torch.uint8)
    workshop = simulate_scape.Workshop(torch.device("cpu"), compiled=False)
    record = simulate_scape.train(config, tokens, workshop, deadline=0.0)
    assert record["steps_done"] == 1 and not record["finished"] and len(record["val"]) == 2


def test_text_is_parted_by_markup(study):
    texts = simulate_scape.load_texts(str(study.text))
    assert bytes(texts["prose"][:9].tolist()) == b"the quick" and b"fox" not in bytes(texts["manuals"][8192:].tolist())
    assert len(texts["prose"]) + len(texts["manuals"]) == len(texts["all"]) == study.text.stat().st_size


def test_learning_rate_rises_falls_and_follows_the_density():
    config = simulate_scape.with_overrides({"steps": 100, "density": 0.01, "hold": 0.1, "fall": 0.2}, [])
    plain = [simulate_scape.learning_rate(config, step) for step in (1, 5, 100)]
    assert plain == pytest.approx([config["lr"] / 5, config["lr"], config["lr"] / 10])
    slowed = simulate_scape.learning_rate(config | {"lr_power": 0.5}, 100)
    assert slowed == pytest.approx(plain[-1] / 10)


def test_summary_compares_best_with_best():
    def line(label, lr, loss, density=1.0, seed=0, finished=True):
        config = simulate_scape.BASE | {"label": label, "lr": lr, "density": density, "seed": seed}
        return {
            "config": config,
            "final": loss,
            "finished": finished,
            "figures": {},
            "seconds": 12,
            "steps_done": 1200,
        }

    lines = [line("adamw", lr, loss) for lr, loss in ((1e-3, 2.1), (2e-3, 2.0), (4e-3, 2.2))]
    lines += [line("kept", lr, loss, 0.1) for lr, loss in ((1e-3, 2.06), (2e-3, math.nan))]
    lines += [line("kept", 4e-3, 1.0, 0.1, finished=False)]
    table = scape_summary.summarise(lines)
    assert (
        "| adamw | 1 | 1.000 | 0.002 | 2.0000 | +0.00 % | 1 (0.0000) | 0.001: 2.1000, 0.004: 2.2000 | 10.0 |" in table
    )
    assert "| kept | 0.1 | 1.000 | 0.001 (end of grid) | 2.0600 | +3.00 % |" in table and "0.002: inf" in table


def test_unknown_fields_are_refused(study):
    with pytest.raises(ValueError, match="unknown field; known: model"):
        study("--preset", "rehearsal", "--set", "stepps=4")
    with pytest.raises(ValueError, match="densitty"):
        simulate_scape.with_overrides({"densitty": 0.1}, [])


def test_every_preset_names_its_configurations_apart():
    for preset, configs in simulate_scape.PRESETS.items():
        names = [simulate_scape.name_of(simulate_scape.with_overrides(config, [])) for config in configs]
        assert len(set(names)) == len(names), preset
