"""Saving and resuming: plain checkpoints, unbroken curves, refusals that name what was saved."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import tiny
import torch
import torch.distributed as dist
import training
import transformers as tf

from hf_taco_scape.parallel.model import split_state

DROPOUT = dict(attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1)


def _train(folder, family="gpt2", tp_size=2, resume=None, model_changes=None, stop_after=None, **changes):
    settings = dict(max_steps=6, save_strategy="steps", save_steps=3, gradient_accumulation_steps=2, **changes)
    args = training.arguments(tp_size, folder, **settings)
    built, recorder = training.trainer(family, args, model_changes)
    if stop_after:
        built.add_callback(_StopAt(stop_after))
    built.train(resume_from_checkpoint=resume)
    bits = {name: p.detach().clone() for name, p in built.model.named_parameters()}
    return recorder.column("loss"), bits, split_state(built.model).comm.table.to_json() if tp_size > 1 else None


class _StopAt(tf.TrainerCallback):
    """Stands for a kill: training ends after this step, and nothing else is written."""

    def __init__(self, step) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step
        return control


@pytest.mark.parametrize("tp,world", [(2, 2), (2, 4), (1, 2)], ids=["tp2", "tp2xdp2", "dp2"])
def test_resume_equals_the_unbroken_run_bit_for_bit(pool, tmp_path, tp, world):
    """With dropout and codec `taco`: 6 steps against 3, a new process group and model, and 3 more.

    huggingface/transformers #48569,
    """
    options = dict(tp_size=tp, model_changes=DROPOUT, tp_codec="taco", save_total_limit=2)
    unbroken = pool.run(world, _train, str(tmp_path / "a"), **options)
    pool.run(world, _train, str(tmp_path / "b"), stop_after=4, **options)
    checkpoint = str(tmp_path / "b/checkpoint-3")
    resumed = pool.run(world, _train, str(tmp_path / "b"), resume=checkpoint, **options)
    for (losses, bits, _), (more, others, _) in zip(unbroken, resumed, strict=True):
        assert losses[3:] == more
        assert all(torch.equal(bits[name], others[name]) for name in bits)


def _launch(folder, name, kill_at=0, resume=""):
    here = pathlib.Path(__file__).parent
    settings = json.dumps({"tp_codec": "taco", "gradient_accumulation_steps": 2})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(here / "killed.py"), settings, str(folder), name, str(kill_at), resume]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=here, env=environment)


def test_a_killed_run_resumes_bit_for_bit(tmp_path):
    """SIGKILL of one rank at step 5 of 6; the launcher ends the others; new processes go on from checkpoint 4."""
    whole = _launch(tmp_path, "whole")
    assert whole.returncode == 0, whole.stderr[-4000:]
    killed = _launch(tmp_path, "killed", kill_at=5)
    assert killed.returncode != 0 and not (tmp_path / "killed-rank0.pt").exists()
    resumed = _launch(tmp_path, "killed", resume=str(tmp_path / "killed/checkpoint-4"))
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    for rank in range(2):
        losses, bits = torch.load(tmp_path / f"whole-rank{rank}.pt")
        more, others = torch.load(tmp_path / f"killed-rank{rank}.pt")
        assert losses[4:] == more and len(more) == 2
        assert all(torch.equal(bits[name], others[name]) for name in bits)


def _best(folder, evaluations):
    args = training.arguments(
        2, folder, max_steps=6, learning_rate=0.05, eval_strategy="steps", eval_steps=2, save_strategy="steps",
        save_steps=2, save_total_limit=1, load_best_model_at_end=True, tp_codec="fp8",
    )  # fmt: skip
    built, recorder = training.trainer("qwen3", args)
    built.train()
    best = min(entry["eval_loss"] for entry in built.state.log_history if "eval_loss" in entry)
    assert abs(built.evaluate()["eval_loss"] - best) < 1e-6, "the best model was not loaded back"
    built.save_model(folder + "/final")
    with torch.no_grad():
        built.model.eval()
        batch = tiny.batch(4, 3)
        return built.model(**batch).logits, built.state.best_model_checkpoint


def test_best_model_is_loaded_and_the_checkpoint_is_plain(pool, tmp_path):
    """Save_total_limit=1, load_best_model_at_end, then plain from_pretrained gives the trained logits.

    huggingface/transformers #48569
    """
    folder = str(tmp_path / "run")
    (logits, best), _ = pool.run(2, _best, folder, 3)
    (plain,) = pool.run(1, _plain_logits, folder + "/final")
    # the trained model sums ranks' parts through fp8 in evaluation too; without a codec the logits are the same
    (uncompressed, _) = pool.run(2, _split_logits, folder + "/final")
    torch.testing.assert_close(plain, uncompressed, atol=1e-5, rtol=1e-5)
    assert (plain - logits).abs().max() < 0.1
    assert best.endswith(tuple(f"checkpoint-{n}" for n in (2, 4, 6)))


def _plain_logits(folder):
    model = tf.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return model(**tiny.batch(4, 3)).logits


def _split_logits(folder):
    from hf_taco_scape import parallelize

    model = parallelize(tf.AutoModelForCausalLM.from_pretrained(folder), dist.group.WORLD, "none").eval()
    with torch.no_grad():
        return model(**tiny.batch(4, 3)).logits


def _trained_logits(family, folder):
    args = training.arguments(2, folder, max_steps=4)
    built, _ = training.trainer(family, args)
    built.train()
    built.save_model(folder)
    built.model.eval()
    with torch.no_grad():
        return built.model(**tiny.batch(4, 3)).logits


PLAIN = """
import sys, torch, transformers
folder = sys.argv[1]
model = transformers.AutoModelForCausalLM.from_pretrained(folder)
with torch.no_grad():
    torch.save(model(**torch.load(folder + "/batch.pt")).logits, folder + "/logits.pt")
assert "hf_taco_scape" not in sys.modules
print(type(model).__name__)
"""


@pytest.mark.parametrize("family,name", [("gpt2", "GPT2LMHeadModel"), ("qwen3", "Qwen3ForCausalLM")])
def test_plain_transformers_gives_the_trained_models_logits(pool, tmp_path, family, name):
    """A process that never imports this package loads the checkpoint (tied weights too)."""
    folder = str(tmp_path / "saved")
    logits = pool.run(2, _trained_logits, family, folder)[0]
    torch.save(tiny.batch(4, 3), folder + "/batch.pt")
    done = subprocess.run([sys.executable, "-c", PLAIN, folder], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == name, done.stderr
    torch.testing.assert_close(torch.load(folder + "/logits.pt"), logits, atol=1e-5, rtol=1e-5)
    config = json.loads((tmp_path / "saved/config.json").read_text())
    assert config["architectures"] == [name]


def _resume_refused(folder, tp_size, pattern):
    with pytest.raises(ValueError, match=pattern):
        _train(folder + "-other", tp_size=tp_size, resume=folder + "/checkpoint-3")


@pytest.mark.parametrize(
    "tp,world,pattern",
    [(1, 1, "tp_size 1: it was saved with tp_size 2"), (4, 4, "tp_size 4: it was saved with tp_size 2")],
)
def test_resume_at_another_tp_size_names_both(pool, tmp_path, tp, world, pattern):
    """huggingface/nanotron #106: weights would load, the optimizer's slices would not."""
    folder = str(tmp_path / "a")
    pool.run(2, _train, folder, stop_after=3)
    pool.run(world, _resume_refused, folder, tp, pattern)


def test_a_tp1_checkpoint_is_refused_at_tp2(pool, tmp_path):
    pool.run(1, _train, str(tmp_path / "a"), tp_size=1, stop_after=3)
    pool.run(2, _resume_refused, str(tmp_path / "a"), 2, "tp_size 2: it was saved with tp_size 1")


@pytest.mark.parametrize("tp,before,after", [(1, 4, 2), (2, 4, 2)], ids=["dp4-to-dp2", "tp2xdp2-to-tp2"])
def test_dense_state_does_not_depend_on_the_number_of_data_parallel_copies(pool, tmp_path, tp, before, after):
    """The same global batch on fewer ranks goes on with the unbroken run's losses and weights.

    huggingface/nanotron #106
    """
    folder = str(tmp_path / "b")
    unbroken = pool.run(before, _train, str(tmp_path / "a"), tp_size=tp)[0]
    pool.run(before, _train, folder, tp_size=tp, stop_after=3)
    losses, bits, _ = pool.run(after, _train, folder, tp_size=tp, resume=folder + "/checkpoint-3")[0]
    assert losses == pytest.approx(unbroken[0][3:], rel=1e-5) and len(losses) == 3
    for name, value in bits.items():
        torch.testing.assert_close(value, unbroken[1][name], atol=2e-4, rtol=0)


def _weights_elsewhere(folder):
    from hf_taco_scape import parallelize

    model = parallelize(tf.AutoModelForCausalLM.from_pretrained(folder), dist.group.WORLD, "none").eval()
    with torch.no_grad():
        return model(**tiny.batch(4, 3)).logits


def test_weights_load_at_any_tp_size(pool, tmp_path):
    """huggingface/nanotron #106: only optimizer state is bound to the size it was saved with."""
    pool.run(2, _train, str(tmp_path / "a"), stop_after=3)
    checkpoint = str(tmp_path / "a/checkpoint-3")
    (plain,) = pool.run(1, _plain_logits, checkpoint)
    for world in (2, 4):
        torch.testing.assert_close(pool.run(world, _weights_elsewhere, checkpoint)[0], plain, atol=1e-5, rtol=1e-5)


def test_measured_routes_are_kept_by_a_resume(pool, tmp_path):
    folder = str(tmp_path / "a")
    measured = pool.run(2, _train, folder, stop_after=3, tp_codec="taco", tp_min_bytes="auto")
    assert measured[0][2] == measured[1][2]
    file = tmp_path / "a/checkpoint-3/hf_taco_scape.json"
    saved = json.loads(file.read_text())
    (routes,) = saved["routes"]
    assert routes["table"] == measured[0][2]
    other = {key: [[0, "none", "c10d", 0], [12345, "taco", "c10d", 1]] for key in routes["table"]}
    file.write_text(json.dumps({**saved, "routes": [{**routes, "table": other}]}))
    resumed = pool.run(2, _train, folder, resume=folder + "/checkpoint-3", tp_codec="taco", tp_min_bytes="auto")
    assert [r[2] for r in resumed] == [other, other]


def test_resume_from_weights_only_starts_the_optimizer_anew(pool, tmp_path):
    folder = str(tmp_path / "a")
    pool.run(2, _train, folder, stop_after=3, save_only_model=True)
    for file in (tmp_path / "a/checkpoint-3").glob("optimizer*"):
        raise AssertionError(f"{file} was written with save_only_model")
    losses = pool.run(2, _train, folder, resume=folder + "/checkpoint-3", save_only_model=True)[0][0]
    assert len(losses) == 3
    shutil.rmtree(folder)


def _replicas(codec, steps, family="qwen3", other_seeds=False):
    args = training.arguments(
        dist.get_world_size(), "out", max_steps=steps, tp_codec=codec, check_replicas=5,
        per_device_train_batch_size=2, max_grad_norm=1.0,
    )  # fmt: skip
    seed = dist.get_rank() if other_seeds else 7
    built, recorder = training.trainer(family, args, {"seed": seed})
    built.train()
    error = recorder.column("tp_codec_error_forward")
    assert codec == "none" or error[-1] > 0, "the codec did not run"
    split = {id(p) for p, s in built.accelerator.gradients.splits.items() if s.shard is not None}
    return {n: p.detach().clone() for n, p in built.model.named_parameters() if id(p) not in split}


CODECS = ["taco", "fp8", "int8", "hadamard-int8", "hadamard-int6", "hadamard-int4", "none"]


@pytest.mark.parametrize("codec", CODECS)
def test_replicas_stay_bit_identical_over_fifty_steps(pool, codec):
    """NVIDIA-NeMo/Automodel #3822."""
    first, second = pool.run(2, _replicas, codec, 50)
    assert first.keys() == second.keys() and len(first) > 5
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_replicas_stay_identical_in_two_shots_from_other_seeds(pool, family):
    """Ranks that drew other weights, biases after the sums, and the owners of a two-shot all-reduce.

    NVIDIA-NeMo/Automodel #3822
    """
    ranks = pool.run(4, _replicas, "taco", 50, family, True)
    assert any(name.endswith("bias") for name in ranks[0])
    for other in ranks[1:]:
        assert all(torch.equal(ranks[0][name], other[name]) for name in ranks[0])


def _drift():
    args = training.arguments(2, "out", max_steps=2, check_replicas=1, learning_rate=0.0)
    built, _ = training.trainer("qwen3", args)
    if dist.get_rank() == 1:
        with torch.no_grad():
            built.model.model.norm.weight[3] += 1e-6
    with pytest.raises(
        RuntimeError, match="drifted apart after 1 steps: model.norm.weight .1 tensors. .* all tp ranks"
    ):
        built.train()


def test_check_replicas_names_the_parameter_that_drifted(pool):
    pool.run(2, _drift)


def _save_on_rank_zero(tp, folder):
    import hf_taco_scape.trainer as trainer_module

    args = training.arguments(tp, folder, max_steps=1)
    built, _ = training.trainer("gpt2", args)
    built.train()
    kept, trainer_module.SAVE_TIMEOUT_S = trainer_module.SAVE_TIMEOUT_S, 2.0
    try:
        if built.is_world_process_zero():
            if tp == 1:
                built.save_model(folder)
            else:
                with pytest.raises(RuntimeError, match="only 1 called it: call it on every process"):
                    built.save_model(folder)
    finally:
        trainer_module.SAVE_TIMEOUT_S = kept
    dist.barrier()


def test_saving_on_one_rank_works_without_tp_and_is_refused_with_it(pool, tmp_path):
    pool.run(2, _save_on_rank_zero, 1, str(tmp_path / "dp"))
    assert (tmp_path / "dp/model.safetensors").is_file()
    pool.run(2, _save_on_rank_zero, 2, str(tmp_path / "tp"))


def _load_slices_as_text():
    from hf_taco_scape.parallel.loading import from_pretrained

    tiny.build("llama").save_pretrained("whole")
    dist.barrier()
    model = from_pretrained("whole", dist.group.WORLD, codec="none", dtype="bfloat16")
    return {p.dtype for p in model.parameters()}


def test_from_pretrained_takes_a_dtypes_name(pool):
    assert pool.run(2, _load_slices_as_text) == [{torch.bfloat16}] * 2
