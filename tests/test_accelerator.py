"""TacoScapeAccelerator in an own loop: the data-parallel view, gradients, schedulers, state, wrong use."""

import pytest
import tiny
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

from hf_taco_scape import TacoScapeAccelerator
from hf_taco_scape.parallel import gather_state_dict
from hf_taco_scape.training_args import TacoScapeOptions


def _loop(tp_size, clip, accumulation=1, steps=6, folder=None, resume=False, rows=48, stock=False):
    """The loop of Hugging Face's own examples; stock: accelerate's class, the reference."""
    set_seed(3)
    toggles = dict(tp_size=tp_size, tp_codec="none", tp_min_bytes=0)
    options = DataLoaderConfiguration(use_seedable_sampler=True)
    common = dict(gradient_accumulation_steps=accumulation, dataloader_config=options)
    accelerator = Accelerator(cpu=True, **common) if stock else TacoScapeAccelerator(**toggles, **common)
    model = tiny.build("qwen3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = torch.utils.data.DataLoader(
        tiny.rows(rows, 0), batch_size=4 // accelerator.num_processes, shuffle=True,
        collate_fn=lambda items: {k: torch.stack([i[k] for i in items]) for k in items[0]},
    )  # fmt: skip
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if resume:
        accelerator.load_state(folder)
    losses, norms, rates = [], [], []
    for index, batch in enumerate(loader):
        if resume and index < steps:
            continue
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), clip).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        rates.append(scheduler.get_last_lr()[0])
        if index + 1 == steps and not resume:
            if folder:
                accelerator.save_state(folder)
            else:
                break
    weights = accelerator.unwrap_model(model).state_dict() if stock else gather_state_dict(model)
    return losses, norms, rates, {k: v.clone() for k, v in weights.items()}


@pytest.mark.parametrize("clip", [0.1, None], ids=["clipped", "unclipped"])
@pytest.mark.parametrize("tp,dp", [(2, 1), (1, 2), (2, 2)])
def test_own_loop_equals_stock_accelerate(pool, clip, tp, dp):
    """The reference is accelerate's own class on as many data-parallel ranks (DistributedDataParallel above one)."""
    reference = pool.run(dp, _loop, 1, clip, accumulation=2, stock=True)
    results = pool.run(tp * dp, _loop, tp, clip, accumulation=2)
    for rank, (losses, norms, rates, weights) in enumerate(results):
        expected = reference[rank // tp]
        assert losses == pytest.approx(expected[0], rel=1e-6)
        assert norms == pytest.approx(expected[1], rel=1e-5)
        assert rates == expected[2], "the scheduler was stepped by the world, not by data-parallel ranks"
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[3][name], atol=2e-4, rtol=0)
            assert torch.equal(value, results[0][3][name]), f"{name} differs between ranks"


@pytest.mark.parametrize("tp,world", [(2, 2), (2, 4)])
def test_save_state_and_load_state_continue_the_run(pool, tmp_path, tp, world):
    folder = str(tmp_path / "state")
    unbroken = pool.run(world, _loop, tp, 0.5, steps=6, folder=folder)
    resumed = pool.run(world, _loop, tp, 0.5, steps=6, folder=folder, resume=True)
    for (losses, _, _, weights), (more, _, _, others) in zip(unbroken, resumed, strict=True):
        assert losses[6:] == more and len(more) > 2
        assert all(torch.equal(weights[name], others[name]) for name in weights)


def _load_elsewhere(folder):
    accelerator = TacoScapeAccelerator(tp_size=4, tp_codec="none")
    accelerator.prepare(tiny.build("qwen3"))
    with pytest.raises(ValueError, match="tp_size 4: it was saved with tp_size 2"):
        accelerator.load_state(folder)


def test_load_state_at_another_tp_size_names_both(pool, tmp_path):
    pool.run(2, _loop, 2, 0.5, folder=str(tmp_path / "state"))
    pool.run(4, _load_elsewhere, str(tmp_path / "state"))


def _view():
    accelerator = TacoScapeAccelerator(tp_size=2)
    rank = dist.get_rank()
    assert (accelerator.num_processes, accelerator.process_index) == (2, rank // 2)
    assert accelerator.state.num_processes == 4 and accelerator.is_main_process == (rank == 0)
    mine = torch.tensor([accelerator.process_index])
    assert accelerator.gather(mine).tolist() == [0, 1]
    assert accelerator.gather({"a": [mine.squeeze()]})["a"][0].tolist() == [0, 1]
    assert accelerator.reduce(torch.tensor(float(rank // 2)), "sum").item() == 1.0
    assert accelerator.reduce(torch.tensor(float(rank // 2)), "mean").item() == 0.5
    assert accelerator.gather_for_metrics([f"text {accelerator.process_index}"]) == ["text 0", "text 1"]
    with pytest.raises(ValueError, match="different inputs"):
        accelerator.split_between_processes([1, 2])
    # 10 rows, batches of 2, two data-parallel ranks: each row once, and the padded tail dropped
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(10), batch_size=2))
    seen = [accelerator.gather_for_metrics(batch) for batch in loader]
    assert torch.cat(seen).tolist() == list(range(10))
    objects = [x for batch in loader for x in accelerator.gather_for_metrics([f"row {i}" for i in batch.tolist()])]
    assert objects == [f"row {i}" for i in range(10)]


def test_data_parallel_view(pool):
    pool.run(4, _view)


class _Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([torch.full((length,), i) for i, length in enumerate([3, 5, 2, 7, 4, 6, 1])])


def _stream(dispatch):
    config = DataLoaderConfiguration(dispatch_batches=dispatch, use_seedable_sampler=True)
    accelerator = TacoScapeAccelerator(tp_size=2, dataloader_config=config)
    collate = lambda items: torch.nn.utils.rnn.pad_sequence(items, batch_first=True)  # noqa: E731
    loader = torch.utils.data.DataLoader(_Stream(), batch_size=2, collate_fn=collate)
    if dispatch:
        with pytest.raises(ValueError, match="dispatch_batches=True does not work with tp_size > 1"):
            accelerator.prepare(loader)
        return None
    return [batch.tolist() for batch in accelerator.prepare(loader)]


def test_ragged_streams_end_and_peers_agree(pool):
    """huggingface/transformers #26548: seven samples of random length, batch 2, tp 2 x dp 2."""
    first, peer, other, other_peer = pool.run(4, _stream, False)
    assert first == peer and other == other_peer and first != other
    assert len(first) == len(other)
    assert pool.run(4, _stream, True) == [None] * 4


def _wrong_use():
    with pytest.raises(ValueError, match="not both: tp_size"):
        TacoScapeAccelerator(TacoScapeOptions(), tp_size=2)
    with pytest.raises(ValueError, match="use_seedable_sampler=True"):
        TacoScapeAccelerator(tp_size=2, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=False))
    accelerator = TacoScapeAccelerator(tp_size=2, tp_codec="none")
    model = tiny.build("qwen3")
    optimizer = torch.optim.AdamW(model.parameters())
    model(**tiny.batch(2, 0)).loss.backward()
    optimizer.step()
    with pytest.raises(ValueError, match="optimizer has state of the unsplit model"):
        accelerator.prepare(model, optimizer)
    model = accelerator.prepare(tiny.build("qwen3"))
    accelerator.backward(model(**tiny.batch(2, 0)).loss)
    with pytest.raises(ValueError, match="L2 norm only, got norm_type 1"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(tiny.build("qwen2"), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="adapters"):
        accelerator.prepare(adapted)


def test_wrong_use_is_refused(pool):
    pool.run(2, _wrong_use)


def _accumulated(steps):
    accelerator = TacoScapeAccelerator(tp_size=2, tp_codec="none", gradient_accumulation_steps=steps)
    model, optimizer = tiny.build("qwen3"), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    for seed in range(steps):
        with accelerator.accumulate(model):
            accelerator.backward(model(**tiny.batch(2, seed)).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), float("inf"))
                accelerator.clip_grad_norm_(model.parameters(), float("inf"))  # a second call must not sum again
                optimizer.step()
                return {n: p.grad.clone() for n, p in model.named_parameters() if "norm" in n}


def test_partial_gradients_are_summed_once_over_four_micro_batches(pool):
    """inclusionAI/AReno #496: q/k-norm gradients after 4 micro-batches equal the reference (not 2x, not 8x)."""
    reference = tiny.build("qwen3")
    for seed in range(4):
        (reference(**tiny.batch(2, seed)).loss / 4).backward()
    expected = dict(reference.named_parameters())
    for gradients in pool.run(2, _accumulated, 4):
        assert any("q_norm" in name for name in gradients)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name].grad, atol=1e-7, rtol=2e-5)


def _one_rank_without_gradient():
    accelerator = TacoScapeAccelerator(tp_size=1)
    torch.manual_seed(0)
    used, sometimes, never = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
    model = torch.nn.ParameterList([used, sometimes, never])
    accelerator.prepare(model)
    rank = dist.get_rank()
    accelerator.backward((used * (rank + 1)).sum() + ((sometimes * 4).sum() if rank == 0 else 0))
    return used.grad.tolist(), sometimes.grad.tolist(), never.grad


def test_a_parameter_unused_on_one_rank_counts_as_zero_there(pool):
    for used, sometimes, never in pool.run(2, _one_rank_without_gradient):
        assert used == [1.5] * 3 and sometimes == [2.0] * 3 and never is None


def _overflow(tp_size):
    """fp16: rank 1 alone overflows; every rank must skip the step."""
    accelerator = TacoScapeAccelerator(tp_size=tp_size, tp_codec="none")
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)
    accelerator.native_amp = False
    model = tiny.build("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    loss = model(**tiny.batch(2, 0)).loss
    if dist.get_rank() == 1:
        # inf on its way back into one parameter of this rank only
        poison = next(iter(model.parameters())).register_hook(lambda grad: grad + float("inf"))
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    unchanged = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    skipped = optimizer.step_was_skipped
    optimizer.zero_grad()
    if dist.get_rank() == 1:
        poison.remove()
    accelerator.backward(model(**tiny.batch(2, 0)).loss)
    optimizer.step()  # a loop that does not clip
    moved = not torch.equal(before[0], next(iter(model.parameters())))
    return unchanged, skipped, moved, accelerator.scaler.get_scale()


@pytest.mark.parametrize("tp", [1, 2])
def test_fp16_overflow_on_one_rank_skips_the_step_on_all(pool, tp):
    results = pool.run(2, _overflow, tp)
    assert all(r[:3] == (True, True, True) for r in results)
    assert results[0][3] == results[1][3], "the loss scales went apart"


# ---- what a hostile but ordinary loop does


def _hostile(how, tp_size, stock=False):
    """One or two steps of an ordinary loop; returns the weights."""
    set_seed(3)
    steps = 2 if how == "clip every micro-batch" else 1
    common = dict(gradient_accumulation_steps=steps)
    options = dict(tp_size=tp_size, tp_codec="none", tp_min_bytes=0, dataloader_config=None)
    del options["dataloader_config"]
    accelerator = Accelerator(cpu=True, **common) if stock else TacoScapeAccelerator(**options, **common)
    model = tiny.build("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    inner = accelerator.unwrap_model(model)
    for step in range(4):
        batch = tiny.batch(2, 10 * step + accelerator.process_index)

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = model(**batch).loss
            accelerator.backward(loss)
            return loss

        if how == "closure":
            optimizer.step(closure)
            continue
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if how == "two losses":
                accelerator.backward(model(**tiny.batch(2, 99 + step)).loss)
            if how == "edited" and step % 2:
                inner.get_input_embeddings().weight.grad[:50] = 0
            if how == "clipped by torch":
                torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            if how == "clip every micro-batch":
                accelerator.clip_grad_norm_(model.parameters(), 1e9)
            if how == "skipped" and step == 1:
                optimizer.zero_grad(set_to_none=False)
                continue
            optimizer.step()
            optimizer.zero_grad()
    weights = inner.state_dict() if stock else gather_state_dict(inner)
    return {k: v.clone() for k, v in weights.items()}


HOSTILE = ["closure", "two losses", "edited", "clipped by torch", "clip every micro-batch", "skipped"]


@pytest.mark.parametrize("how", HOSTILE)
@pytest.mark.parametrize("tp,dp", [(1, 2), (2, 1), (2, 2)])
def test_ordinary_loops_equal_stock_accelerate(pool, how, tp, dp):
    """Gradients are final when backward returns, as under DDP: they may be read, changed, clipped and thrown away."""
    (expected, *_) = pool.run(dp, _hostile, how, 1, stock=True)
    for weights in pool.run(tp * dp, _hostile, how, tp):
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], atol=2e-6, rtol=2e-5, msg=f"{how}: {name}")


def _foreign_backward(tp_size):
    accelerator = TacoScapeAccelerator(tp_size=tp_size, tp_codec="none")
    model = tiny.build("qwen3")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(**tiny.batch(2, 0)).loss.backward()
    with pytest.raises(RuntimeError, match="call accelerator.backward"):
        optimizer.step()


@pytest.mark.parametrize("tp", [1, 2])
def test_loss_backward_is_refused(pool, tp):
    pool.run(2, _foreign_backward, tp)


def _trigger():
    accelerator = TacoScapeAccelerator(tp_size=2)
    if dist.get_rank() == 0:
        accelerator.set_trigger()
    return accelerator.check_trigger(), accelerator.check_trigger()


def test_a_trigger_reaches_every_rank(pool):
    assert pool.run(2, _trigger) == [(True, False)] * 2


def _unusual_models():
    accelerator = TacoScapeAccelerator(tp_size=2, tp_codec="none")
    with pytest.raises(ValueError, match="Adafactor: its update needs whole matrices"):
        model = tiny.build("qwen3")
        accelerator.prepare(model, torch.optim.Adafactor(model.parameters()))
    only_norms = tiny.build("qwen3")
    for name, parameter in only_norms.named_parameters():
        parameter.requires_grad_("q_norm" in name)
    accelerator = TacoScapeAccelerator(tp_size=2, tp_codec="none")
    trained = [p for p in only_norms.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(only_norms, torch.optim.SGD(trained, lr=0.1))
    accelerator.backward(model(**tiny.batch(2, dist.get_rank() // 2)).loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    wide = TacoScapeAccelerator(tp_size=2, tp_codec="none")
    model, optimizer = wide.prepare(tiny.build("qwen3").double(), None)
    wide.backward(model(**tiny.batch(2, 0)).loss)
    assert wide.clip_grad_norm_(model.parameters(), 1.0) > 0
    return norm.item()


def test_frozen_but_for_partial_parameters_and_float64(pool):
    norms = pool.run(4, _unusual_models)
    assert len(set(norms)) == 1 and norms[0] > 0
