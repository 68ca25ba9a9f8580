"""SCAPE through its three ways in: TacoScapeTrainer, an own Accelerate loop, a callback on a stock Trainer."""

import functools
import logging
import math
import warnings

import pytest
import tiny
import torch
import torch.distributed as dist
import training
import transformers as tf
from accelerate.utils import set_seed

from hf_taco_scape import (
    AdamS,
    ScapeAdamS,
    ScapeCallback,
    TacoScapeAccelerator,
    TacoScapeArguments,
    TacoScapeTrainer,
    scape_optimizer,
)
from hf_taco_scape.parallel import gather_state_dict, parameter_splits

PAPER = dict(scape_second_moment="adams", scape_mask="topk", scape_clip="ghat", scape_hold_steps=0)
SPARSE = dict(dp_sync="scape", scape_density=0.1, scape_warmup_steps=2, **PAPER)
CLIP = 0.3
OURS = dict(dp_sync="scape", scape_density=0.1, scape_hold_steps=1, scape_warmup_steps=2)


@pytest.fixture(scope="module")
def dense_adams(pool):
    @functools.cache
    def run(family, dp):
        return pool.run(dp, training.run, family, 1, use_adams=True, weight_decay=0.1)

    return run


@pytest.mark.parametrize("tp,dp", [(1, 2), (2, 2), (1, 3)])
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_density_one_equals_dense_adams(pool, dense_adams, family, tp, dp):
    full = dict(dp_sync="scape", scape_density=1.0, scape_warmup_steps=0, weight_decay=0.1, **PAPER)
    results = pool.run(tp * dp, training.run, family, tp, **full)
    for got in results:
        training.assert_equal_runs(dense_adams(family, dp)[0], got)
        assert torch.equal(got["weights"], results[0]["weights"])


def _parameters_after(family, tp, **changes):
    args = training.arguments(tp, "out", **changes)
    built, recorder = training.trainer(family, args)
    built.train()
    splits = parameter_splits(built.model)
    whole = {n: p.detach().clone() for n, p in built.model.named_parameters() if splits.get(p, None) is None}
    here = {n: p.detach().clone() for n, p in built.model.named_parameters()}
    return here, whole, recorder.logs


_VARIANTS = {
    "paper": SPARSE,
    "ours": OURS,
    "cyclic": {**OURS, "scape_mask": "cyclic"},
    "bf16": {**SPARSE, "scape_values": "bf16"},
}


@pytest.mark.parametrize("options", _VARIANTS.values(), ids=_VARIANTS)
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_replicas_are_bit_identical_at_tp2_dp2(pool, family, options):
    """A small density, clipping active, accumulation: dp replicas and tp replicas hold the same bits."""
    ranks = pool.run(4, _parameters_after, family, 2, gradient_accumulation_steps=2, tp_codec="taco", **options)
    for tp_rank in range(2):
        here, other = ranks[tp_rank][0], ranks[tp_rank + 2][0]
        assert all(torch.equal(here[name], other[name]) for name in here), "dp replicas drifted"
    for name, bits in ranks[0][1].items():
        assert torch.equal(bits, ranks[1][1][name]), f"{name} drifted between tp ranks"


def _own_loop(options, accumulation, steps=6):
    """The Trainer's run (same rows, loss scaling and schedule) written as a loop."""
    set_seed(11)
    accelerator = TacoScapeAccelerator(gradient_accumulation_steps=accumulation)
    model = tiny.build("gpt2")
    decay = [p for n, p in model.named_parameters() if p.ndim >= 2]
    rest = [p for n, p in model.named_parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = ScapeAdamS(groups, lr=1e-3, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    model, optimizer = accelerator.prepare(model, optimizer)
    norms = []
    for batch in _batches(steps * accumulation, accelerator.num_processes, accelerator.process_index):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), CLIP).item())
            optimizer.step()
            if accelerator.sync_gradients:
                scheduler.step()
            optimizer.zero_grad()
    return model.state_dict(), norms


def _batches(count, ranks, rank):
    """Every row has as many labels (the first is never predicted), so that each route's loss is the plain mean."""
    rows = [
        {"input_ids": row["input_ids"], "labels": row["input_ids"].clone()} for row in tiny.rows(count * ranks * 2, 0)
    ]
    for row in rows:
        row["labels"][0] = -100
    for index in range(count):
        mine = rows[(index * ranks + rank) * 2 : (index * ranks + rank) * 2 + 2]
        yield {key: torch.stack([row[key] for row in mine]) for key in mine[0]}


class _InOrder(torch.utils.data.Dataset):
    def __init__(self, count, ranks):
        self.rows = [
            row for i in range(count) for r in range(ranks) for row in _unstack(list(_batches(count, ranks, r))[i])
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def _unstack(batch):
    return [{key: value[i] for key, value in batch.items()} for i in range(len(batch["labels"]))]


def _sequential(cls):
    class Ordered(cls):
        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    return Ordered


_COMMON = dict(
    per_device_train_batch_size=2, max_steps=6, learning_rate=1e-3, weight_decay=0.1, logging_steps=1, report_to=[],
    lr_scheduler_type="linear", disable_tqdm=True, save_strategy="no", remove_unused_columns=False, seed=11,
)  # fmt: skip


def _trainer_way(scape_options, accumulation):
    data = _InOrder(6 * accumulation, dist.get_world_size())
    args = TacoScapeArguments(
        "out", max_grad_norm=CLIP, dp_sync="scape", gradient_accumulation_steps=accumulation, adam_beta2=0.95,
        **{f"scape_{k}": v for k, v in scape_options.items()}, **_COMMON,
    )  # fmt: skip
    built = _sequential(TacoScapeTrainer)(model=tiny.build("gpt2"), args=args, train_dataset=data)
    built.train()
    norms = [entry["grad_norm"] for entry in built.state.log_history if "loss" in entry]
    return built.model.state_dict(), norms


def _callback_way(scape_options, accumulation):
    data = _InOrder(6 * accumulation, dist.get_world_size())
    args = tf.TrainingArguments(
        "out", max_grad_norm=0, use_cpu=True, gradient_accumulation_steps=accumulation, **_COMMON
    )
    options = {k: v for k, v in scape_options.items()} | {"lr": 1e-3, "betas": (0.9, 0.95), "max_grad_norm": CLIP}
    recorder = training.Recorder()
    built = _sequential(tf.Trainer)(
        model=tiny.build("gpt2"), args=args, train_dataset=data, callbacks=[ScapeCallback(), recorder],
        optimizer_cls_and_kwargs=scape_optimizer(**options),
    )  # fmt: skip
    built.train()
    sent = recorder.column("dp_bytes_sent")
    assert sum(sent) == built.optimizer.optimizer.meter.sent_bytes and 0 < sent[-1] < sent[0]
    assert type(built.model_wrapped).__name__ == "DistributedDataParallel"
    return built.model.state_dict(), recorder.column("grad_norm")


_WAYS = {
    "paper": dict(density=0.1, warmup_steps=2, second_moment="adams", mask="topk", clip="ghat", hold_steps=0),
    "row": dict(density=0.1, warmup_steps=2, second_moment="row", mask="cyclic", clip="ghat", hold_steps=1),
    "local": dict(density=0.1, warmup_steps=2, second_moment="factored", mask="topk", clip="local", hold_steps=1),
}


@pytest.mark.parametrize("name", _WAYS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_all_three_ways_in_give_the_same_weights(pool, name, accumulation):
    options = _WAYS[name]
    loops = pool.run(2, _own_loop, options, accumulation)
    trainers = pool.run(2, _trainer_way, options, accumulation)
    callbacks = pool.run(2, _callback_way, options, accumulation)
    expected, norms = loops[0]
    exact = [*loops, *trainers, *(callbacks if options["clip"] == "ghat" else [])]
    for weights, got in exact:
        assert got == pytest.approx(norms, rel=1e-4)
        for key, value in weights.items():
            torch.testing.assert_close(value, expected[key], atol=2e-5, rtol=0, msg=key)
    assert sum(norm > CLIP for norm in norms) >= 4, "clipping was hardly active"
    if options["clip"] == "local":
        # DDP has averaged norms and biases before this rank's own norm is known: as scape_optimizer documents
        for _, got in callbacks:
            assert got == pytest.approx(norms, rel=0.03) and got != pytest.approx(norms, rel=1e-4)


# ---- checkpoints


def _train(folder, tp, resume=None, stop_after=None, keep_log=False, **changes):
    from test_checkpoint import _StopAt

    settings = dict(max_steps=6, save_strategy="steps", save_steps=3, gradient_accumulation_steps=2)
    args = training.arguments(tp, folder, **settings, **{**OURS, "tp_codec": "taco", **changes})
    built, recorder = training.trainer("qwen3", args)
    if stop_after:
        built.add_callback(_StopAt(stop_after))
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("hf_taco_scape")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        built.train(resume_from_checkpoint=resume)
    finally:
        logger.removeHandler(handler)
    optimizer = built.optimizer.optimizer
    residuals = [s["residual"].clone() for s in optimizer.state.values() if "residual" in s]
    momenta = [s["momentum"].clone() for s in optimizer.state.values()]
    bits = {name: p.detach().clone() for name, p in built.model.named_parameters()}
    return recorder.column("loss"), bits, residuals, momenta, lines


@pytest.mark.parametrize("tp,world", [(1, 2), (2, 4)])
def test_resume_restores_each_ranks_residual_bit_for_bit(pool, tmp_path, tp, world):
    """pytorch/pytorch #75666."""
    unbroken = pool.run(world, _train, str(tmp_path / "a"), tp)
    pool.run(world, _train, str(tmp_path / "b"), tp, stop_after=4)
    resumed = pool.run(world, _train, str(tmp_path / "b"), tp, resume=str(tmp_path / "b/checkpoint-3"))
    for a, b in zip(unbroken, resumed, strict=True):
        assert a[0][3:] == b[0]
        assert all(torch.equal(a[1][name], b[1][name]) for name in a[1])
        assert all(torch.equal(x, y) for x, y in zip(a[2], b[2], strict=True))
    residuals = [r[2] for r in unbroken]
    assert not all(torch.equal(x, y) for x, y in zip(residuals[0], residuals[tp], strict=True)), (
        "residuals are per rank"
    )


def _resume_elsewhere(folder, tp):
    """Stops right after loading: what the new ranks start from."""
    args = training.arguments(tp, folder, max_steps=6, per_device_train_batch_size=2, **OURS)
    built, _ = training.trainer("qwen3", args)
    built.create_optimizer_and_scheduler(6)
    built.accelerator.prepare(built.model, built.optimizer)
    built._load_optimizer_and_scheduler(folder + "/checkpoint-3")
    optimizer = built.optimizer
    return (
        [s["residual"].clone() for s in optimizer.state.values() if "residual" in s],
        [s["momentum"].clone() for s in optimizer.state.values()],
        optimizer.step_count,
    )


def test_resume_at_another_dp_size_keeps_momentum_and_the_mean_residual(pool, tmp_path):
    folder = str(tmp_path / "a")
    old = pool.run(2, _train, folder, 1, stop_after=3)
    for world in (1, 3):
        for residuals, momenta, steps in pool.run(world, _resume_elsewhere, folder, 1):
            assert steps == 3
            for i, residual in enumerate(residuals):
                mean = (old[0][2][i].double() + old[1][2][i].double()) / 2
                torch.testing.assert_close(residual.double(), mean, atol=1e-9, rtol=1e-6)
            assert all(torch.equal(m, o) for m, o in zip(momenta, old[0][3], strict=True))
    lines = pool.run(4, _train, folder, 1, resume=folder + "/checkpoint-3")[0][4]
    assert any("mean of the residuals" in line for line in lines)


def _callback_run(folder, resume=None, stop_after=None):
    from test_checkpoint import _StopAt

    data = _InOrder(6, dist.get_world_size())
    common = {**_COMMON, "save_strategy": "steps", "save_steps": 3}
    args = tf.TrainingArguments(folder, max_grad_norm=0, use_cpu=True, **common)
    built = _sequential(tf.Trainer)(
        model=tiny.build("gpt2"), args=args, train_dataset=data,
        callbacks=[ScapeCallback(), *([_StopAt(stop_after)] if stop_after else [])],
        optimizer_cls_and_kwargs=scape_optimizer(lr=1e-3, density=0.1, warmup_steps=1, max_grad_norm=0.5),
    )  # fmt: skip
    built.train(resume_from_checkpoint=resume)
    return {n: p.clone() for n, p in built.model.state_dict().items()}


def test_callback_resumes_bit_for_bit(pool, tmp_path):
    unbroken = pool.run(2, _callback_run, str(tmp_path / "a"))
    pool.run(2, _callback_run, str(tmp_path / "b"), stop_after=4)
    resumed = pool.run(2, _callback_run, str(tmp_path / "b"), resume=str(tmp_path / "b/checkpoint-3"))
    for a, b in zip(unbroken, resumed, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


# ---- counts, logs, overflow, wrong use


def test_one_sync_an_optimizer_step_and_figures_in_the_logs(pool):
    """Accumulation 4 over 10 micro-batches an epoch sends as much as accumulation 1, per step.

    baidu-baige/LoongForge #163
    """
    streams = dict(max_steps=6, per_device_train_batch_size=1)
    accumulated = pool.run(2, _parameters_after, "gpt2", 1, gradient_accumulation_steps=4, **streams, **OURS)
    plain = pool.run(2, _parameters_after, "gpt2", 1, **streams, **OURS)
    for (_, _, logs), (_, _, others) in zip(accumulated, plain, strict=True):
        sent = [entry["dp_bytes_sent"] for entry in logs if "loss" in entry]
        assert sent == [entry["dp_bytes_sent"] for entry in others if "loss" in entry]
        assert sent[-1] < 0.2 * logs[0]["dp_bytes_dense"], "the density did not fall"
        last = [entry for entry in logs if "loss" in entry][-1]
        assert last["scape_density"] == pytest.approx(0.1, rel=0.02)
        assert last["scape_residual_over_momentum"] > 0 and 0 <= last["scape_mask_overlap"] <= 1
        assert 0 <= last["scape_clipped_share"] <= 1


def _overflow():
    accelerator = TacoScapeAccelerator()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = tiny.build("gpt2")
    optimizer = ScapeAdamS(model.parameters(), density=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    skips = []
    for step in range(4):
        before = [t.clone() for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        weights = [p.detach().clone() for p in model.parameters()]
        accelerator.backward(model(**tiny.batch(2, dist.get_rank())).loss)
        if step == 2 and dist.get_rank() == 1:
            next(iter(model.parameters())).grad[0] = float("nan")
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        after = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        same = all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
        kept = len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        skips.append((optimizer.step_was_skipped, same, kept if step == 2 else None, bool(torch.isinf(norm))))
        optimizer.zero_grad()
    return skips, accelerator.scaler.get_scale()


def test_fp16_overflow_on_one_rank_leaves_everything_untouched(pool):
    """deepspeedai/DeepSpeed #742."""
    for skips, scale in pool.run(2, _overflow):
        assert [s[0] for s in skips] == [False, False, True, False]
        assert [s[1] for s in skips] == [False, False, True, False], "weights moved at the wrong steps"
        assert skips[2][2] is True and skips[2][3] is True
        assert scale == 4.0


def _nothing_for_the_optimizer(clip):
    """Rank 1's loss reaches only a part of the model that the optimizer does not hold."""
    accelerator = TacoScapeAccelerator(dp_sync="scape")
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"trained": torch.nn.Linear(6, 5), "other": torch.nn.Linear(6, 5)})
    options = dict(density=0.2, clip=clip, second_moment="factored")
    model, optimizer = accelerator.prepare(model, ScapeAdamS(model["trained"].parameters(), **options))
    for _ in range(4):
        part = model["other" if dist.get_rank() == 1 else "trained"]
        accelerator.backward(part(torch.ones(3, 6)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return model["trained"].weight.detach().clone(), accelerator.gradients.meter.snapshot()


@pytest.mark.parametrize("clip", ["local", "ghat"])
def test_a_rank_without_any_gradient_takes_part(pool, clip):
    (weight, sent), (other, sent_by_other) = pool.run(2, _nothing_for_the_optimizer, clip, timeout_s=60)
    assert torch.equal(weight, other) and sent == sent_by_other


def _refused():
    accelerator = TacoScapeAccelerator(dp_sync="scape")
    model = tiny.build("gpt2")
    with pytest.raises(ValueError, match="dp_sync scape needs the optimizer ScapeAdamS.*got AdamW"):
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    fresh = TacoScapeAccelerator()
    with pytest.raises(ValueError, match="belong to no prepared model"):
        fresh.prepare(ScapeAdamS(model.parameters()))
    model, optimizer = fresh.prepare(model, ScapeAdamS(model.parameters()))
    with pytest.raises(ValueError, match="clips by norm only"):
        fresh.clip_grad_value_(model.parameters(), 1.0)
    with pytest.raises(ValueError, match="L2 norm only"):
        fresh.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)
    fresh.backward(model(**tiny.batch(2, dist.get_rank())).loss)
    norm = fresh.clip_grad_norm_(model.parameters(), math.inf)
    assert fresh.clip_grad_norm_(model.parameters(), math.inf) == norm
    with pytest.raises(ValueError, match="synchronised with max_norm inf.*clip once a step, not to 0.01"):
        fresh.clip_grad_norm_(model.parameters(), 0.01)
    with pytest.raises(ValueError, match="one ScapeAdamS an accelerator"):
        fresh.prepare(ScapeAdamS(model.parameters()))

    def stock(callbacks=(), optimizer=None, **changes):
        args = tf.TrainingArguments("out", use_cpu=True, report_to=[], **changes)
        data = tiny.rows(8, 0)
        extra = dict(callbacks=list(callbacks), optimizer_cls_and_kwargs=optimizer)
        return tf.Trainer(tiny.build("gpt2"), args, train_dataset=data, **extra)

    with pytest.raises(ValueError, match="max_grad_norm 1.0: .*max_grad_norm=0"):
        stock([ScapeCallback()], scape_optimizer())
    with pytest.raises(ValueError, match="leave the matrices unsynchronised.*not AdamW"):
        stock([ScapeCallback()], max_grad_norm=0, max_steps=1).train()
    with pytest.raises(ValueError, match="needs no ScapeCallback"):
        TacoScapeTrainer(tiny.build("gpt2"), training.arguments(1, "out"), callbacks=[ScapeCallback()])
    args = training.arguments(1, "out", **OURS)
    clash, _ = training.trainer("gpt2", args, optimizer_cls_and_kwargs=(AdamS, {}))
    with pytest.raises(ValueError, match="drop optimizer_cls_and_kwargs"):
        clash.train()


def test_wrong_use_is_refused(pool):
    pool.run(2, _refused)


def _one_data_parallel_rank(tp):
    with pytest.warns(UserWarning, match="one data-parallel rank"):
        result = training.run("qwen3", tp, **OURS)
    return len(result["loss"])


@pytest.mark.parametrize("tp", [1, 2])
def test_one_data_parallel_rank_runs_and_says_so(pool, tp):
    assert pool.run(tp, _one_data_parallel_rank, tp) == [8] * tp


def test_saved_model_is_plain(pool, tmp_path):
    pool.run(4, _train, str(tmp_path / "a"), 2)
    model = tf.AutoModelForCausalLM.from_pretrained(str(tmp_path / "a/checkpoint-6"))
    assert gather_state_dict(model).keys() == tiny.build("qwen3").state_dict().keys()


def _only_norms(tp):
    args = training.arguments(tp, "out", max_steps=3, per_device_train_batch_size=2, weight_decay=0.1, **OURS)
    built, recorder = training.trainer("qwen3", args)
    for parameter in built.model.parameters():
        parameter.requires_grad_(parameter.ndim == 1)
    built.train()
    return len(recorder.column("loss"))


def test_only_norms_trainable(pool):
    assert pool.run(2, _only_norms, 1) == [3, 3]


def _rates(given):
    args = tf.TrainingArguments(
        "out", use_cpu=True, report_to=[], max_grad_norm=0, max_steps=1, learning_rate=3e-4, save_strategy="no"
    )
    built = tf.Trainer(
        tiny.build("gpt2"), args, train_dataset=tiny.rows(8, 0), callbacks=[ScapeCallback()],
        optimizer_cls_and_kwargs=scape_optimizer(**given),
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        built.train()
    return [str(w.message) for w in caught if "learning_rate" in str(w.message)]


def test_callback_says_which_learning_rate_trains(pool):
    """The Trainer does not give its own to an optimizer of optimizer_cls_and_kwargs."""
    (said,), (also,) = pool.run(2, _rates, {})
    assert said == also and "learning_rate 0.0003" in said and "lr 0.001" in said and "scape_optimizer(lr=" in said
    assert pool.run(2, _rates, {"lr": 3e-4}) == [[], []]


def _train_after(what):
    args = tf.TrainingArguments(
        "out", use_cpu=True, report_to=[], max_grad_norm=0, max_steps=2, learning_rate=1e-3, save_strategy="no"
    )
    built = tf.Trainer(
        tiny.build("gpt2"), args, train_dataset=tiny.rows(64, 0), eval_dataset=tiny.rows(4, 1),
        callbacks=[ScapeCallback()], optimizer_cls_and_kwargs=scape_optimizer(lr=1e-3, second_moment="factored"),
    )  # fmt: skip
    if what == "evaluate":
        built.evaluate()
        with pytest.raises(ValueError, match="not averaged.*evaluate.*before train"):
            built.train()
        return None
    built.train()
    built.evaluate()
    built.train()
    return torch.cat([p.detach().flatten() for p in built.model.parameters()])


def test_callback_refuses_a_trainer_that_left_ddp_out(pool):
    """transformers' evaluate() before train() marks the model as prepared, and train() then wraps nothing."""
    pool.run(2, _train_after, "evaluate")
    assert torch.equal(*pool.run(2, _train_after, "train"))


def _model_init():
    args = tf.TrainingArguments("out", use_cpu=True, report_to=[], max_grad_norm=0, max_steps=1)
    built = tf.Trainer(
        model_init=lambda: tiny.build("gpt2"), args=args, train_dataset=tiny.rows(8, 0), callbacks=[ScapeCallback()],
        optimizer_cls_and_kwargs=scape_optimizer(),
    )  # fmt: skip
    with pytest.raises(ValueError, match="built after the Trainer .model_init"):
        built.train()


def test_callback_refuses_a_model_that_ddp_averages(pool):
    pool.run(2, _model_init)


def _dense_then_scape(folder, resume=None, **changes):
    args = training.arguments(1, folder, max_steps=4, save_strategy="steps", save_steps=2, **changes)
    built, _ = training.trainer("gpt2", args)
    if resume is None:
        built.train()
        return
    with pytest.raises(ValueError, match="holds the optimizer state of a dense run"):
        built.train(resume_from_checkpoint=resume)


def test_a_dense_checkpoint_is_refused_by_scape(pool, tmp_path):
    folder = str(tmp_path / "a")
    pool.run(2, _dense_then_scape, folder)
    pool.run(2, _dense_then_scape, folder, folder + "/checkpoint-2", **OURS)
