import copy
import os

import pytest
import tiny
import torch
import torch.distributed as dist
import transformers as tf
from torch import nn

from hf_taco_scape.parallel import gather_state_dict, parallelize, save_pretrained
from hf_taco_scape.parallel.loading import from_pretrained
from hf_taco_scape.parallel.model import parameter_splits, split_state
from hf_taco_scape.parallel.parallelize import plan_surgery
from hf_taco_scape.parallel.state_dict import gather_tensor
from hf_taco_scape.plans import COUNTS, Block, Plan, get_plan, list_plans, register_plan
from hf_taco_scape.sync.dense import sum_partial_gradients

CASES = [
    ("qwen2", {}, 2),
    ("qwen3", {}, 2),
    ("llama", {}, 4),  # 2 KV heads on 4 ranks: each held twice
    ("llama", {"num_key_value_heads": 1}, 2),
    ("qwen2", {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}, 2),  # 6/2 and 3/1 heads
    ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 97}, 3),
    ("llama", {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3}, 4),  # KV copies 2, 2, 1, 1
    ("gpt2", {"n_head": 5, "n_embd": 40, "n_inner": 70}, 2),
    ("gpt2", {}, 4),
    ("gpt_neox", {}, 2),
]


def _ids(case):
    family, changes, ranks = case
    return f"{family}-tp{ranks}" + "".join(f"-{k[:9]}{v}" for k, v in changes.items())


def _gathered_gradients(model) -> dict[str, torch.Tensor]:
    """Whole gradients by name, after the sums that the accelerator makes before a step."""
    state, splits = split_state(model), parameter_splits(model)
    rank = state.comm.rank
    entries = [(p, s.shard, rank) for p, s in splits.items() if s.partial]
    sum_partial_gradients(entries, state.comm.group)
    whole = {}
    for name, parameter in model.named_parameters():
        shard = splits[parameter].shard if parameter in splits else None
        gradient = parameter.grad
        whole[name] = gradient if shard is None else gather_tensor(gradient, shard, state.comm.group, state.device)
    return whole


def _forward_backward(case, codec="none", min_bytes=0):
    family, changes, _ = case
    batch = tiny.batch(3, 1)
    reference = tiny.build(family, **changes)
    expected = reference(**batch)
    expected.loss.backward()
    model = parallelize(tiny.build(family, **changes), dist.group.WORLD, codec, min_bytes=min_bytes)
    got = model(**batch)
    got.loss.backward()
    gradients = _gathered_gradients(model)
    assert gradients.keys() == dict(reference.named_parameters()).keys()
    errors = {
        name: ((gradients[name] - p.grad).norm() / p.grad.norm().clamp_min(1e-12)).item()
        for name, p in reference.named_parameters()
    }
    bytes_here = sum(p.numel() for p in model.parameters())
    assert bytes_here < sum(p.numel() for p in reference.parameters()), "nothing was split"
    return (got.logits - expected.logits).abs().max().item(), errors, state_bits(model)


def state_bits(model):
    """Bits of everything that must be the same on all ranks: replicated gradients."""
    splits = parameter_splits(model)
    return {n: p.grad.clone() for n, p in model.named_parameters() if p not in splits or splits[p].shard is None}


@pytest.mark.parametrize("case", CASES, ids=_ids)
def test_forward_and_gradients_equal_one_process(pool, case):
    results = pool.run(case[2], _forward_backward, case)
    for logits_error, gradient_errors, _ in results:
        assert logits_error < 2e-5
        worst = max(gradient_errors, key=gradient_errors.get)
        assert gradient_errors[worst] < 2e-5, worst
    for name, bits in results[0][2].items():
        assert all(torch.equal(bits, other[2][name]) for other in results), f"{name} differs between ranks"


@pytest.mark.parametrize("codec,limit", [("taco", 0.08), ("hadamard-int8", 0.03)])
def test_compressed_gradients_stay_close_and_replicas_equal(pool, codec, limit):
    results = pool.run(3, _forward_backward, ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3}, 3), codec)
    for logits_error, gradient_errors, _ in results:
        assert 0 < logits_error < 0.2, "the codec did not run"
        assert sum(gradient_errors.values()) / len(gradient_errors) < limit
    for name, bits in results[0][2].items():
        assert all(torch.equal(bits, other[2][name]) for other in results), f"{name} differs between ranks"


def _count_messages(family):
    model = parallelize(tiny.build(family), dist.group.WORLD, "none")
    meter = split_state(model).comm.meter
    loss = model(**tiny.batch(2, 1)).loss
    forward = meter.calls
    loss.backward()
    return forward, meter.calls - forward


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_one_all_reduce_a_block_in_each_direction(pool, family):
    # 2 layers x (attention, MLP): q, k, v share one backward all-reduce, gate and up another
    assert pool.run(2, _count_messages, family) == [(4, 4)] * 2


# ---- tied embeddings, state dicts, loading


def _train_and_save(family, folder):
    model = parallelize(tiny.build(family), dist.group.WORLD, "none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    splits = parameter_splits(model)
    for step in range(3):
        model(**tiny.batch(2, step)).loss.backward()
        entries = [(p, s.shard, dist.get_rank()) for p, s in splits.items() if s.partial]
        sum_partial_gradients(entries, dist.group.WORLD)
        optimizer.step()
        optimizer.zero_grad()
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert head is embedding, "the tie was cut"
    save_pretrained(model, folder)
    model.eval()
    with torch.no_grad():
        return model(**tiny.batch(2, 9)).logits


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_tied_weights_stay_tied_through_training_saving_and_loading(pool, tmp_path, family):
    """huggingface/transformers #47503: one parameter, one split, still tied after training, saving and loading."""
    folder = str(tmp_path / family)
    logits = pool.run(2, _train_and_save, family, folder)[0]
    reference = tiny.build(family)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        reference(**tiny.batch(2, step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    loaded = tf.AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    for (name, a), b in zip(loaded.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(loaded(**tiny.batch(2, 9)).logits, logits, atol=1e-5, rtol=1e-5)


def _load_slices(folder, family, changes):
    group = dist.group.WORLD
    whole = parallelize(tf.AutoModelForCausalLM.from_pretrained(folder), group, "none")
    sliced = from_pretrained(folder, group, codec="none")
    assert not any(t.is_meta for t in [*sliced.parameters(), *sliced.buffers()])
    for (name, a), b in zip(sliced.state_dict().items(), whole.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    batch = tiny.batch(2, 3)
    with torch.no_grad():
        assert torch.equal(whole(**batch).logits, sliced(**batch).logits)
    assert sliced.training is False and sliced.generation_config is not None
    # whole tensors load into slices, slices too
    again = parallelize(tiny.build(family, seed=1, **changes), group, "none")
    again.load_state_dict(gather_state_dict(whole))
    again.load_state_dict(whole.state_dict())
    assert all(
        torch.equal(a, b) for a, b in zip(again.state_dict().values(), whole.state_dict().values(), strict=True)
    )
    return [n for n, _ in sliced.named_parameters()]


@pytest.mark.parametrize("case", [CASES[3], CASES[4], CASES[7]], ids=_ids)
def test_from_pretrained_reads_this_ranks_slices(pool, tmp_path, case):
    family, changes, ranks = case
    folder = str(tmp_path / "whole")
    tiny.build(family, **changes).save_pretrained(folder, max_shard_size="30KB")  # several files and an index
    assert os.path.exists(f"{folder}/model.safetensors.index.json")
    pool.run(ranks, _load_slices, folder, family, changes)


def _load_incomplete(folder):
    with pytest.raises(ValueError, match="lacks score.weight"):
        from_pretrained(folder, dist.group.WORLD, model_class=tf.AutoModelForSequenceClassification)
    with pytest.raises(ValueError, match="no model.safetensors"):
        from_pretrained(os.path.dirname(folder), dist.group.WORLD, config=tf.AutoConfig.from_pretrained(folder))


def test_missing_tensors_and_files_are_named(pool, tmp_path):
    folder = str(tmp_path / "whole")
    tiny.build("llama").save_pretrained(folder)
    pool.run(2, _load_incomplete, folder)


# ---- what changes and what does not


def _identity():
    model = tiny.build("qwen3")
    before = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    same = parallelize(model, dist.group.WORLD, "none")
    assert same is model and isinstance(model, tf.Qwen3ForCausalLM) and type(model).__name__ == "Qwen3ForCausalLM"
    after = dict(model.named_parameters())
    assert list(before) == list(after) and all(before[n] is after[n] for n in before)
    model(**tiny.batch(2, 1)).loss.backward()
    optimizer.step()  # an optimizer from before the split steps the slices
    copied = copy.deepcopy(model)
    batch = tiny.batch(2, 2)
    assert torch.equal(model(**batch).logits, copied(**batch).logits)
    with pytest.raises(ValueError, match="split already"):
        parallelize(model, dist.group.WORLD)
    with pytest.raises(ValueError, match="hf_taco_scape.save_pretrained"):
        model.save_pretrained("nowhere")
    assert "rowwise" in repr(model) and "colwise" in repr(model)


def test_parameters_class_and_names_survive(pool):
    pool.run(2, _identity)


def test_a_group_of_one_changes_nothing():
    model = tiny.build("gpt2")
    assert parallelize(model, None) is model and split_state(model) is None
    assert gather_state_dict(model).keys() == model.state_dict().keys()


def _differently_seeded():
    model = tiny.build("qwen2", seed=dist.get_rank())
    parallelize(model, dist.group.WORLD, "none")
    return {k: v.clone() for k, v in gather_state_dict(model).items()}


def test_ranks_that_drew_other_weights_take_the_first_ranks(pool):
    """NVIDIA-NeMo/Automodel #3822, the start: construct with different seeds per rank."""
    whole = pool.run(2, _differently_seeded)
    reference = tiny.build("qwen2", seed=0).state_dict()
    assert all(torch.equal(w[name], reference[name]) for w in whole for name in reference)


def _generate(seeds):
    model = parallelize(tiny.build("qwen3"), dist.group.WORLD, "none").eval() if dist.is_initialized() else None
    model = tiny.build("qwen3").eval() if model is None else model
    prompt = tiny.batch(2, 5)["input_ids"]
    ways = {
        "greedy": dict(do_sample=False),
        "sampled": dict(do_sample=True, temperature=1.3),
        "beams": dict(num_beams=3, do_sample=False),
        "early end": dict(do_sample=True, eos_token_id=list(range(40)), pad_token_id=0),  # rows end at other steps
    }
    out = {}
    for name, way in ways.items():
        torch.manual_seed(seeds[dist.get_rank() if dist.is_initialized() else 0])
        out[name] = model.generate(prompt, max_new_tokens=12, **way)
    return out


def test_generate_gives_one_processs_tokens_whatever_the_ranks_seeds(pool):
    """huggingface/transformers #36634: sampling must not pick another token on each rank."""
    (reference,) = pool.run(1, _generate, [11])
    for tokens in pool.run(2, _generate, [11, 99]):
        for name, expected in reference.items():
            assert torch.equal(tokens[name], expected), name


# ---- refusals


def _surgery(model, plan=None, tp_size=2):
    return plan_surgery(model, plan or get_plan(model.config.model_type), tp_size)


def test_unknown_model_type_lists_the_known():
    with pytest.raises(ValueError, match="no tensor-parallel plan for model type 'opt'.*gpt2.*qwen3"):
        get_plan("opt")
    assert {"llama", "qwen2", "qwen3", "gpt2", "gpt_neox"} <= set(list_plans())


def test_layers_that_no_rule_names_are_refused_by_name():
    model = tiny.build("gpt2", add_cross_attention=True)
    with pytest.raises(ValueError, match="transformer.h.0.crossattention.c_attn"):
        _surgery(model)


def test_unused_rules_are_refused_by_name():
    plan = get_plan("qwen3")
    wrong = Plan(("qwen3",), {**plan.blocks, "layers.*.experts": plan.blocks["layers.*.mlp"]}, plan.replicated)
    with pytest.raises(ValueError, match="fit no module of Qwen3ForCausalLM: layers.\\*.experts"):
        _surgery(tiny.build("qwen3"), wrong)


def test_missing_child_and_foreign_layers_are_refused_by_name():
    plan = get_plan("qwen3")
    with pytest.raises(ValueError, match="layers.0.self_attn.q_norm, which Qwen2Attention does not have"):
        _surgery(tiny.build("qwen2"), plan)

    class Quantised(nn.Linear): ...

    model = tiny.build("qwen2")
    model.model.layers[1].mlp.up_proj = Quantised(64, 100, bias=False)
    before = {n: id(m) for n, m in model.named_modules()}
    with pytest.raises(ValueError, match="layers.1.mlp.up_proj is a Quantised"):
        _surgery(model)
    assert before == {n: id(m) for n, m in model.named_modules()}, "something was changed before the refusal"


def test_heads_that_cannot_be_dealt_out_are_refused():
    with pytest.raises(ValueError, match="tp_size 8 .*4 attention heads and 2 key/value heads"):
        _surgery(tiny.build("qwen3"), tp_size=8)


def test_plans_cannot_be_registered_twice_or_with_unknown_counts():
    with pytest.raises(ValueError, match="'gpt2' has a plan already"):
        register_plan(get_plan("gpt2"))
    with pytest.raises(ValueError, match="unknown head count 'legs'"):
        register_plan(Plan(("spider",), {"a": Block({}, {"n": "legs"})}, ()))
    assert COUNTS["query_width"](3, 1, 8) == 24


def _refuse_adapters_and_codecs():
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(tiny.build("qwen2"), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="merge_and_unload"):
        parallelize(adapted, dist.group.WORLD)
    with pytest.raises(ValueError, match="morse"):
        parallelize(tiny.build("qwen2"), dist.group.WORLD, "morse")
    with pytest.raises(ValueError, match="opt"):
        sizes = dict(hidden_size=16, num_hidden_layers=1, ffn_dim=16, num_attention_heads=2, word_embed_proj_dim=16)
        parallelize(tf.OPTForCausalLM(tf.OPTConfig(vocab_size=20, **sizes)), dist.group.WORLD)
    return True


def test_adapters_unknown_codecs_and_models_are_refused_on_all_ranks(pool):
    assert all(pool.run(2, _refuse_adapters_and_codecs))


def _other_models():
    layers = 2 + dist.get_rank()
    with pytest.raises(ValueError, match="built different models"):
        parallelize(tiny.build("qwen2", num_hidden_layers=layers), dist.group.WORLD)


def test_ranks_with_different_models_are_refused(pool):
    pool.run(2, _other_models)


def _other_batches(what):
    model = parallelize(tiny.build("gpt2", resid_pdrop=0.1), dist.group.WORLD, "none")
    rank = dist.get_rank()
    batch = tiny.batch(2, 1)
    torch.manual_seed(0)
    if what == "content":
        batch = tiny.batch(2, rank)
    elif what == "shape":
        batch = tiny.batch(2 + rank, 1)
    elif what == "random":
        torch.manual_seed(rank)
    expected = "different random states" if what == "random" else "different batches"
    with pytest.raises(ValueError, match=expected):
        model.train()(**batch)


@pytest.mark.parametrize("what", ["content", "shape", "random"])
def test_mismatched_batches_between_peers_are_refused_before_the_first_step(pool, what):
    pool.run(2, _other_batches, what)
