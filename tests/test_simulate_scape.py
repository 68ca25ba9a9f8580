"""The simulator against the distributed step, bit for bit, and the study script on a few lines of text."""

import json

import pytest
import torch
import torch.distributed as dist
from scape_reference import BETAS, EPS, GROUPS, SHAPES, gradient, initial
from test_grad_sync import VARIANTS, build, rank_of, snapshot

import scape_simulator
import simulate_scape

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


# -- the study script --------------------------------------------------------------------------------------------


@pytest.fixture
def study(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog, and again. " * 400)

    def run(*flags, out="lines.jsonl"):
        simulate_scape.main(["--text", str(text), "--out", str(tmp_path / out), "--device", "cpu", *flags])
        written = (tmp_path / out).read_text() if (tmp_path / out).exists() else ""
        return [json.loads(line) for line in written.splitlines()]

    run.folder = tmp_path
    return run


def test_rehearsal_trains_records_and_resumes(study):
    only = "(adamw|naive|paper|row-half|row-topk)/d(1.0|0.1)/"
    lines = study("--preset", "rehearsal", "--only", only, "--set", "steps=4")
    assert [line["config"]["label"] for line in lines] == [
        "start",
        "adamw",
        "naive",
        "paper",
        "row-topk",
        "row-half",
    ] + [
        "adamw",
        "row-topk",
    ]
    for line in lines:
        assert line["finished"] and line["steps_done"] == (6 if line["config"]["label"] == "start" else 4)
        assert line["val"][-1][1] == line["final"] < line["val"][0][1]
        assert not line["overlap"] or 0 < line["overlap"][-1][1] < 1
    trained = [line for line in lines if line["config"]["start"]]
    assert all(line["val"][0][1] == pytest.approx(lines[0]["final"], abs=1e-6) for line in trained)
    assert len(study("--preset", "rehearsal", "--only", only, "--set", "steps=4")) == len(lines)


def test_density_one_learns_as_dense_adams(study):
    """Two implementations of one optimizer: the study's dense AdamS, and SCAPE at density 1."""
    configs = [{"method": method, "density": 1.0, **simulate_scape.TINY} for method in ("adams", "scape")]
    (study.folder / "configs.json").write_text(json.dumps(configs))
    dense, scape = study("--configs", str(study.folder / "configs.json"))
    assert scape["final"] == pytest.approx(dense["final"], abs=1e-5) and dense["final"] < dense["val"][0][1] - 0.1


def test_the_time_limit_leaves_a_record(study):
    lines = study("--preset", "rehearsal", "--only", "random/adamw", "--seconds", "0", out="late.jsonl")
    assert lines == []
    config = simulate_scape.with_overrides(simulate_scape.PRESETS["rehearsal"][0], [])
    tokens = torch.randint(0, 256, (20_000,), dtype=torch.uint8)
    record = simulate_scape.train(config, tokens, 256, torch.device("cpu"), 0.0, None, False)
    assert record["steps_done"] == 1 and not record["finished"] and len(record["val"]) == 2


def test_unknown_fields_are_refused(study):
    with pytest.raises(ValueError, match="unknown field; known: model"):
        study("--preset", "rehearsal", "--set", "stepps=4")
    with pytest.raises(ValueError, match="densitty"):
        simulate_scape.with_overrides({"densitty": 0.1}, [])


def test_every_preset_names_its_configurations_apart():
    for preset, configs in simulate_scape.PRESETS.items():
        names = [simulate_scape.name_of(simulate_scape.with_overrides(config, [])) for config in configs]
        assert len(set(names)) == len(names), preset
