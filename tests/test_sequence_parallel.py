"""Sequence parallelism: pieces of the sequence between blocks, and the gradients of one process."""

import copy
import dataclasses

import pytest
import tiny
import torch
import torch._dynamo
import torch.distributed as dist
from test_dropout import DROPOUT
from test_parallelize import _gathered_gradients, state_bits

from hf_taco_scape.collectives.meter import ring_half_bytes
from hf_taco_scape.parallel import parallelize
from hf_taco_scape.parallel.model import parameter_splits, split_state
from hf_taco_scape.parallel.parallelize import plan_surgery
from hf_taco_scape.plans import Stack, get_plan

CASES = [
    ("qwen3", {}, 2, 16),
    ("qwen2", {"tie_word_embeddings": False}, 2, 17),
    ("llama", {}, 4, 15),
    ("gpt2", {}, 2, 5),
    ("gpt2", {"n_head": 6, "n_embd": 48}, 3, 16),
    ("gpt_neox", {}, 2, 13),
    ("gpt_neox", {"use_parallel_residual": False}, 2, 16),
    ("llama", {}, 4, 3),  # a rank without positions
    ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3}, 3, 2),
    ("gpt2", {}, 4, 2),
]


def _ids(case):
    family, changes, ranks, length = case
    return f"{family}-tp{ranks}-length{length}" + "".join(f"-{k[:9]}{v}" for k, v in changes.items())


def _batch(length):
    """Three rows, all with labels, the first one padded on the left."""
    ids = tiny.batch(3, 1, max(length, 4))["input_ids"][:, :length].clone()
    mask = torch.ones_like(ids)
    mask[0, : length // 2] = 0
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}


def _split(family, changes=None, codec="none", **arguments):
    model = tiny.build(family, **(changes or {}))
    return parallelize(model, dist.group.WORLD, codec, sequence_parallel=True, **arguments)


def _unchanged(splits):
    pass


def _forward_backward(case, codec="none", mutate=_unchanged):
    family, changes, _, length = case
    batch = _batch(length)
    reference = tiny.build(family, **changes)
    expected = reference(**batch)
    expected.loss.backward()
    model = _split(family, changes, codec)
    got = model(**batch)
    got.loss.backward()
    mutate(model)
    gradients = _gathered_gradients(model)
    errors = {
        name: ((gradients[name] - p.grad).norm() / p.grad.norm().clamp_min(1e-9)).item()
        for name, p in reference.named_parameters()
    }
    return (got.logits - expected.logits).abs().max().item(), errors, state_bits(model)


def _assert_gradients(results, limit=2e-5):
    for logits_error, gradient_errors, _ in results:
        assert logits_error < limit
        worst = max(gradient_errors, key=gradient_errors.get)
        assert gradient_errors[worst] < limit, f"gradient of {worst}: {gradient_errors[worst]:.1e}"


def _assert_same_bits(results):
    for name, bits in results[0][2].items():
        assert all(torch.equal(bits, other[2][name]) for other in results), f"{name} differs between ranks"


@pytest.mark.parametrize("case", CASES, ids=_ids)
def test_forward_and_gradients_equal_one_process(pool, case):
    results = pool.run(case[2], _forward_backward, case)
    _assert_gradients(results)
    _assert_same_bits(results)


@pytest.mark.parametrize("case", [CASES[4], CASES[7]], ids=_ids)
def test_compressed_gradients_stay_close_and_replicas_equal(pool, case):
    results = pool.run(case[2], _forward_backward, case, "taco")
    for logits_error, gradient_errors, _ in results:
        assert 0 < logits_error < 0.3, "the codec did not run"
        assert sum(gradient_errors.values()) / len(gradient_errors) < 0.1
    _assert_same_bits(results)


def _task_head():
    import transformers as tf

    config = tiny.build("qwen2").config
    config.num_labels, config.pad_token_id = 3, 0
    labels, ids = torch.tensor([0, 2]), tiny.batch(2, 4, 11)["input_ids"].clamp_min(1)
    losses, gradients = [], []
    for split in False, True:
        tf.set_seed(7)
        model = tf.AutoModelForSequenceClassification.from_config(config)
        if split:
            model = copy.deepcopy(parallelize(model, dist.group.WORLD, "none", sequence_parallel=True))
        losses.append(model(input_ids=ids, labels=labels).loss)
        losses[-1].backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()} if not split else _gathered_gradients(model))
    torch.testing.assert_close(*losses, atol=1e-6, rtol=1e-6)
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, atol=1e-6, rtol=1e-3, msg=name)


def test_other_heads_and_copies_of_a_split_model(pool):
    pool.run(2, _task_head)


def _saved_bytes(family, changes):
    """Bytes that a training pass keeps for its backward, parameters apart, as plain tensor parallelism and split."""
    sizes = []
    for sequence_parallel in False, True:
        model = tiny.build(family, **changes).train()
        parallelize(model, dist.group.WORLD, "none", sequence_parallel=sequence_parallel)
        parameters, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

        def keep(tensor, parameters=parameters, kept=kept):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.base_model(tiny.batch(4, 1, 32)["input_ids"])
        sizes.append(sum(storage.nbytes() for storage in kept.values()))
    return sizes


@pytest.mark.parametrize("family,changes", [("qwen3", {}), ("gpt2", {"resid_pdrop": 0.1})])
def test_a_training_pass_keeps_less_for_its_backward(pool, family, changes):
    """Of each norm, residual sum and mask a rank keeps its positions; the blocks' inputs are whole."""
    for whole, pieces in pool.run(4, _saved_bytes, family, changes):
        assert pieces < 0.85 * whole, (pieces, whole)


# ---- mutants: gradients that are parts of sums over ranks


def _forget_sum(name):
    def mutate(model):
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        module.tp_partial = tuple(n for n in module.tp_partial if n != attribute)

    return mutate


def _sum_twice(name):
    def mutate(model):
        gradient = model.get_parameter(name).grad
        dist.all_reduce(gradient)

    return mutate


def _mutant(case, kind, name):
    return _forward_backward(case, mutate={"forgotten": _forget_sum, "doubled": _sum_twice}[kind](name))


@pytest.mark.parametrize("kind", ["forgotten", "doubled"])
@pytest.mark.parametrize(
    "case,name",
    [
        (CASES[0], "model.layers.1.input_layernorm.weight"),
        (CASES[2], "model.layers.0.self_attn.o_proj.bias"),
        (CASES[3], "transformer.h.0.ln_2.bias"),
    ],
    ids=["norm", "rowwise-bias", "norm-bias"],
)
def test_a_sum_over_ranks_that_is_missing_or_made_twice_is_caught(pool, case, name, kind):
    results = pool.run(case[2], _mutant, case, kind, name)
    with pytest.raises(AssertionError, match=f"gradient of {name}"):
        _assert_gradients(results)


def _partial_names(family, sequence_parallel):
    model = parallelize(tiny.build(family), dist.group.WORLD, "none", sequence_parallel=sequence_parallel)
    splits = parameter_splits(model)
    return {n for n, p in model.named_parameters() if p in splits and splits[p].shard is None and splits[p].partial}


def test_exactly_what_lies_between_the_blocks_is_summed_over_ranks(pool):
    names = pool.run(2, _partial_names, "gpt2", True)[0]
    parts = ["ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias", "attn.c_proj.bias", "mlp.c_proj.bias"]
    assert names == {f"transformer.h.{layer}.{part}" for layer in range(2) for part in parts}
    assert pool.run(2, _partial_names, "gpt2", False)[0] == set()


# ---- messages


def _messages(family, length, codec, autocast=False):
    model = _split(family, codec=codec)
    meter, batch = split_state(model).comm.meter, _batch(length)
    marks = []
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**batch).loss
    marks.append(meter.snapshot())
    loss.backward()
    marks.append(meter.snapshot())
    with torch.no_grad():
        model(**batch)
    marks.append(meter.snapshot())
    steps = [{k: b[k] - a[k] for k in a} for a, b in zip(marks, marks[1:], strict=False)]
    return [marks[0], *steps]


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize("ranks,length", [(2, 16), (4, 15)])
def test_every_all_reduce_becomes_two_halves(pool, family, ranks, length):
    """2 layers x (attention, MLP) x two halves in each direction, and one half at each end of the stack."""
    half = ring_half_bytes(3 * length * 64 * 4, ranks)
    results = pool.run(ranks, _messages, family, length, "none")
    for forward, backward, evaluation in results:
        assert forward["calls"] == backward["calls"] == 9
        assert forward["dense_bytes"] == backward["dense_bytes"] == 9 * half
        # without gradients: plain tensor parallelism
        assert evaluation["calls"] == 4
        assert abs(evaluation["dense_bytes"] - 8 * half) <= 4
    for kind in range(2):
        sent = sum(result[kind]["sent_bytes"] for result in results) / ranks
        assert abs(sent - 9 * half) <= 9, "an uncompressed message has another size than a ring's"


def test_both_halves_are_compressed_and_the_joint_at_the_end_is_not(pool):
    half = ring_half_bytes(3 * 16 * 64 * 4, 2)
    for forward, backward, _ in pool.run(2, _messages, "qwen3", 16, "hadamard-int8"):
        assert forward["sent_bytes"] == pytest.approx((8 * 8.125 / 32 + 1) * half, rel=0.01)
        assert backward["sent_bytes"] == pytest.approx(9 * 8.125 / 32 * half, rel=0.01)


def _threshold(min_bytes):
    model = _split("llama", codec="hadamard-int8", min_bytes=min_bytes)
    meter, batch = split_state(model).comm.meter, _batch(3)
    model(**batch).loss.backward()
    return meter.snapshot()


def test_ranks_choose_alike_where_one_has_no_positions(pool):
    """A message is as long as the whole sequence says: 2304 bytes here, and pieces of 768 or 0."""
    compressed, dense = (pool.run(4, _threshold, min_bytes) for min_bytes in (2304, 2305))
    assert sum(r["sent_bytes"] for r in compressed) < 0.4 * sum(r["dense_bytes"] for r in compressed)
    assert sum(r["sent_bytes"] for r in dense) == pytest.approx(sum(r["dense_bytes"] for r in dense), rel=0.01)


def test_under_autocast_blocks_gather_16_bits(pool):
    """LayerNorm gives 32 bits there, which the linear layers would round after the gather."""
    half = ring_half_bytes(3 * 16 * 64 * 2, 2)
    for forward, backward, _ in pool.run(2, _messages, "gpt2", 16, "none", autocast=True):
        # the ends of the stack, residual streams, stay in 32 bits
        assert forward["dense_bytes"] == (8 + 2) * half
        assert backward["dense_bytes"] == (8 + 2) * half


# ---- passes without gradients, and what cannot be split


def _without_gradients(family):
    reference, model, batch = tiny.build(family).eval(), _split(family).eval(), _batch(11)
    prompt = batch["input_ids"]
    with torch.no_grad():
        ours, theirs = (m(**batch, output_hidden_states=True) for m in (model, reference))
    for a, b in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
    for way in dict(do_sample=False), dict(do_sample=True, num_beams=2):
        torch.manual_seed(3)
        tokens = model.generate(prompt, max_new_tokens=6, **way)
        torch.manual_seed(3)
        assert torch.equal(tokens, reference.generate(prompt, max_new_tokens=6, **way))
    # in the order of training: with gradients, without, with
    model.train()
    for _ in range(2):
        loss = model(**batch).loss
        with torch.no_grad():
            model(**batch)
        loss.backward()
    expected = reference.train()(**batch).loss
    expected.backward()
    gradients = _gathered_gradients(model)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name] / 2, parameter.grad, atol=1e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gpt_neox"])
def test_passes_without_gradients_give_what_stock_gives(pool, family):
    pool.run(2, _without_gradients, family)


def _embeddings_as_input():
    reference, model = tiny.build("qwen2"), _split("qwen2")
    ids = tiny.batch(2, 3, 7)["input_ids"]
    results = []
    for m in reference, model:
        embeds = m.get_input_embeddings()(ids).detach().requires_grad_()
        m(inputs_embeds=embeds, labels=ids).loss.backward()
        results.append(embeds.grad)
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-4)


def test_embeddings_as_input_get_the_whole_gradient(pool):
    pool.run(2, _embeddings_as_input)


def _refusals():
    model, batch = _split("gpt2"), _batch(8)
    with pytest.raises(ValueError, match="under torch.no_grad.., or train with sequence_parallel false"):
        model(**batch, output_hidden_states=True)
    hidden = torch.randn(2, 8, 64)
    with pytest.raises(ValueError, match="Call the whole model, not its layers"):
        model.transformer.h[0](hidden)
    with torch.no_grad():
        model.transformer.h[0](hidden)
    model(**batch).loss.backward()  # and nothing is left behind


def test_hidden_states_and_single_layers_are_refused_in_training(pool):
    pool.run(2, _refusals)


def test_plans_without_a_stack_or_with_a_wrong_one_are_refused():
    model, plan = tiny.build("qwen3"), get_plan("qwen3")
    wrong = {
        None: "no stack.*leave sequence_parallel false",
        Stack("blocks.*", "self_attn", "norm"): "names blocks.\\*, which Qwen3ForCausalLM does not have",
        Stack("layers.*", "attention", "norm"): "names layers.0.attention",
        Stack("layers.*", "self_attn", "ln_f"): "names ln_f",
    }
    for stack, message in wrong.items():
        with pytest.raises(ValueError, match=message):
            plan_surgery(model, dataclasses.replace(plan, stack=stack), 2, sequence_parallel=True)


# ---- dropout, recomputation


def _masks(family):
    """What each dropout set to zero, by the shape it acted on, and the random state afterwards."""
    model = _split(family, dict(attn_implementation="eager", **DROPOUT[family])).train()
    seen, original = [], torch.nn.functional.dropout

    def spy(x, p=0.5, training=True, inplace=False):
        y = original(x, p, training, inplace)
        if p > 0 and training:
            seen.append((tuple(x.shape), (y == 0) & (x != 0)))
        return y

    torch.nn.functional.dropout = spy
    try:
        torch.manual_seed(3)
        model(**tiny.batch(2, 1)).loss.backward()
    finally:
        torch.nn.functional.dropout = original
    return seen, torch.get_rng_state()


@pytest.mark.parametrize("family", DROPOUT)
def test_masks_of_pieces_differ_between_ranks(pool, family):
    (first, state), (second, other_state) = pool.run(2, _masks, family)
    assert torch.equal(state, other_state), "the outer random state went apart"
    assert len(first) == len(second) > 0
    pieces = []
    for (shape, a), (other_shape, b) in zip(first, second, strict=True):
        assert shape == other_shape
        whole = shape == (2, tiny.LENGTH, 64)  # the embeddings', on replicated activations
        causal = torch.ones_like(a).tril() if len(shape) == 4 else torch.ones_like(a)
        agree = ((a == b) & causal).sum() / causal.sum()
        assert agree == 1.0 if whole else 0.3 < agree < 0.7, (shape, float(agree))
        pieces += [a] if shape == (2, tiny.LENGTH // 2, 64) else []
    # two a layer: behind attention and behind the MLP
    assert len(pieces) == (0 if family == "llama" else 4)
    assert all(not torch.equal(a, b) for i, a in enumerate(pieces) for b in pieces[:i]), "a mask came twice"


def _recomputed(family, reentrant):
    model = _split(family, DROPOUT[family]).train()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
    torch.manual_seed(5)
    loss = model(**tiny.batch(2, 1, 13)).loss
    with torch.no_grad():
        model(**tiny.batch(2, 2, 9))  # another pass before this one is recomputed
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters()], torch.get_rng_state()


@pytest.mark.parametrize("family", DROPOUT)
def test_recomputation_repeats_pieces_and_masks(pool, family):
    """meta-pytorch/torchtune #2451"""
    plain = pool.run(2, _recomputed, family, None)
    for reentrant in False, True:
        for expected, got in zip(plain, pool.run(2, _recomputed, family, reentrant), strict=True):
            assert expected[0] == got[0]
            assert all(torch.equal(a, b) for a, b in zip(expected[1], got[1], strict=True))
            assert torch.equal(expected[2], got[2])


# ---- torch.compile


def _compiled():
    """A whole model, eager and as one graph, at several lengths."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, compiles = _split("qwen3"), []
    meter = split_state(model).comm.meter

    def backend(graph, inputs):
        compiles.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    fast, worst = torch.compile(model, backend=backend), 0.0
    for length in (17, 31, 18, 40):
        results = []
        for run in (model, fast):
            model.zero_grad()
            calls = meter.calls
            loss = run(**_batch(length)).loss
            loss.backward()
            assert meter.calls == calls + 18, "other messages than without torch.compile"
            results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(*results, strict=True)))
    return worst, len(compiles), dict(torch._dynamo.utils.counters["graph_break"])


def test_a_compiled_model_is_one_graph_at_any_length(pool):
    for worst, compiles, breaks in pool.run(2, _compiled):
        assert worst < 1e-5
        assert not breaks
        assert compiles <= 2, "a compilation a length"
