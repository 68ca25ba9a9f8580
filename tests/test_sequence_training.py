"""Sequence parallelism in a Trainer: one process's curves and weights, SCAPE, checkpoints."""

import functools

import pytest
import tiny
import torch
import torch.distributed as dist
import training
from accelerate import Accelerator
from accelerate.utils import set_seed
from test_checkpoint import DROPOUT, _train
from test_parallelize import _gathered_gradients
from test_trainer import _run_mutant, _with_doubled_partial_sum, _without_partial_sum

from hf_taco_scape import TacoScapeAccelerator
from hf_taco_scape.parallel import gather_state_dict
from hf_taco_scape.parallel.loading import from_pretrained
from hf_taco_scape.training_args import TacoScapeOptions

SEQUENCE = dict(sequence_parallel=True)
THREE_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3}
WORLDS = [
    ("qwen3", 2, 2, None, {}),
    ("qwen3", 3, 3, THREE_HEADS, {"gradient_accumulation_steps": 2}),
    ("qwen2", 4, 4, None, {}),
    ("llama", 2, 2, None, {"gradient_checkpointing": True}),
    ("gpt2", 2, 4, None, {"gradient_accumulation_steps": 2}),
    ("gpt_neox", 2, 2, None, {}),
]


@pytest.fixture(scope="module")
def reference(pool):
    @functools.cache
    def run(family, changes=(), model_changes=()):
        return pool.run(1, training.run, family, 1, model_changes=dict(model_changes), **dict(changes))[0]

    return run


@pytest.mark.parametrize(
    "family,tp,world,model_changes,changes", WORLDS, ids=[f"{w[0]}-tp{w[1]}of{w[2]}" for w in WORLDS]
)
def test_training_equals_one_process(pool, reference, family, tp, world, model_changes, changes):
    options = dict(model_changes=model_changes, check_replicas=1, **SEQUENCE, **changes)
    results = pool.run(world, training.run, family, tp, **options)
    expected = reference(family, tuple(changes.items()), tuple((model_changes or {}).items()))
    for got in results:
        training.assert_equal_runs(expected, got)
        assert min(got["grad_norm"]) > 0.5, "clipping was not active"
        assert torch.equal(got["weights"], results[0]["weights"])


@pytest.mark.parametrize("mutate", [_without_partial_sum, _with_doubled_partial_sum])
def test_mutants_are_caught_in_training(pool, reference, mutate):
    """gpt2 has no other partial gradients than those of sequence parallelism."""
    got = pool.run(2, _run_mutant, mutate, "gpt2", 2, **SEQUENCE)[0]
    with pytest.raises(AssertionError, match="gradient norm|loss"):
        training.assert_equal_runs(reference("gpt2"), got)


def test_scape_at_density_one_equals_dense_adams(pool):
    expected = pool.run(2, training.run, "gpt2", 1, use_adams=True, weight_decay=0.1)[0]
    scape = dict(
        dp_sync="scape", scape_density=1.0, scape_warmup_steps=0, scape_hold_steps=0, weight_decay=0.1,
        scape_second_moment="adams", scape_mask="topk", scape_clip="ghat", check_replicas=1,
    )  # fmt: skip
    for got in pool.run(4, training.run, "gpt2", 2, **scape, **SEQUENCE):
        training.assert_equal_runs(expected, got)


def test_bf16_with_recomputation_and_compression_stays_close(pool, reference):
    changes = dict(bf16=True, gradient_checkpointing=True)
    results = pool.run(2, training.run, "qwen3", 2, check_replicas=1, tp_codec="hadamard-int8", **SEQUENCE, **changes)
    for got in results:
        training.assert_equal_runs(reference("qwen3", tuple(changes.items())), got, 5e-3, 5e-2, 5e-2)
        assert torch.equal(got["weights"], results[0]["weights"])


def _own_loop(stock):
    """Two steps of two micro-batches, the second of them shorter than the number of ranks."""
    set_seed(3)
    common = dict(gradient_accumulation_steps=2)
    options = TacoScapeOptions(tp_size=3, tp_codec="none", tp_min_bytes=0, check_replicas=1, **SEQUENCE)
    accelerator = Accelerator(cpu=True, **common) if stock else TacoScapeAccelerator(options, **common)
    model = tiny.build("qwen3", **THREE_HEADS)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    norms = []
    for step, length in enumerate((11, 2, 16, 2)):
        ids = tiny.batch(2, step, max(length, 4))["input_ids"][:, :length]
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=ids, labels=ids).loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.1).item())
            optimizer.step()
            optimizer.zero_grad()
    return norms, [w.clone() for w in gather_state_dict(model).values()]


def test_own_loop_equals_stock_accelerate(pool):
    ((norms, weights),) = pool.run(1, _own_loop, True)
    for got_norms, got_weights in pool.run(3, _own_loop, False):
        assert got_norms == pytest.approx(norms, rel=1e-5)
        for ours, theirs in zip(got_weights, weights, strict=True):
            torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=0)


# ---- checkpoints


def _train_half(folder, resume=None, stop_after=None):
    return _train(folder, resume=resume, model_changes=DROPOUT, stop_after=stop_after, tp_codec="taco", **SEQUENCE)


def test_resume_equals_the_unbroken_run_bit_for_bit(pool, tmp_path):
    unbroken = pool.run(2, _train_half, str(tmp_path / "a"))
    pool.run(2, _train_half, str(tmp_path / "b"), stop_after=4)
    resumed = pool.run(2, _train_half, str(tmp_path / "b"), resume=str(tmp_path / "b/checkpoint-3"))
    for (losses, bits, _), (more, others, _) in zip(unbroken, resumed, strict=True):
        assert losses[3:] == more
        assert all(torch.equal(bits[name], others[name]) for name in bits)


def _load(folder):
    model = from_pretrained(folder, dist.group.WORLD, codec="none", sequence_parallel=True).train()
    reference = tiny.build("llama")
    losses = [m(**tiny.batch(3, 1, 9)).loss for m in (model, reference)]
    for loss in losses:
        loss.backward()
    for name, gradient in _gathered_gradients(model).items():
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad, atol=1e-5, rtol=1e-3, msg=name)


def test_from_pretrained_splits_the_sequence_too(pool, tmp_path):
    tiny.build("llama").save_pretrained(tmp_path)
    pool.run(2, _load, str(tmp_path))
