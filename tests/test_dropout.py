"""Dropout under tensor parallelism: other masks where the activation is split, equal ones where it is replicated."""

import pytest
import tiny
import torch
import torch.distributed as dist

from hf_taco_scape.parallel import parallelize
from hf_taco_scape.parallel.model import parameter_splits

DROPOUT = {
    "gpt2": dict(attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5),
    "llama": dict(attention_dropout=0.5),
    "gpt_neox": dict(attention_dropout=0.5, hidden_dropout=0.5),
}


def _masks(family):
    """Zero patterns of the attention weights (split) and of the block's output (replicated), per layer."""
    model = parallelize(tiny.build(family, attn_implementation="eager", **DROPOUT[family]), dist.group.WORLD, "none")
    seen = []
    original = torch.nn.functional.dropout

    def spy(x, p=0.5, training=True, inplace=False):
        y = original(x, p, training, inplace)
        if p > 0 and training:
            seen.append((tuple(x.shape), (y == 0) & (x != 0)))
        return y

    torch.nn.functional.dropout = spy
    try:
        torch.manual_seed(3)
        model.train()(**tiny.batch(2, 1))
    finally:
        torch.nn.functional.dropout = original
    return seen, torch.get_rng_state()


@pytest.mark.parametrize("family", DROPOUT)
def test_masks_differ_where_split_and_agree_where_replicated(pool, family):
    (first, state), (second, other_state) = pool.run(2, _masks, family)
    assert torch.equal(state, other_state), "the outer random state went apart"
    assert len(first) == len(second) > 0
    kinds = set()
    for (shape, a), (other_shape, b) in zip(first, second, strict=True):
        assert shape == other_shape
        split = len(shape) == 4  # (batch, heads, query, key)
        kinds.add(split)
        causal = torch.ones_like(a).tril() if split else torch.ones_like(a)
        agree = ((a == b) & causal).sum() / causal.sum()
        assert (0.3 < agree < 0.7) if split else agree == 1.0, (shape, float(agree))
    assert True in kinds
    layers = [mask for shape, mask in first if len(shape) == 4]
    assert not torch.equal(layers[0], layers[1]), "both layers drew the same mask"


def _gradients(checkpointing):
    model = parallelize(tiny.build("gpt2", **DROPOUT["gpt2"]), dist.group.WORLD, "none").train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        if checkpointing:
            model.enable_input_require_grads()
    torch.manual_seed(5)
    loss = model(**tiny.batch(2, 1)).loss
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters()], len(parameter_splits(model))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_draws_the_same_masks(pool, reentrant):
    """With dropout: gradient checkpointing on and off give the same loss and gradients.

    meta-pytorch/torchtune #2451
    """
    plain = pool.run(2, _gradients, None)
    recomputed = pool.run(2, _gradients, reentrant)
    for (loss, gradients, _), (other_loss, others, _) in zip(plain, recomputed, strict=True):
        assert loss == other_loss
        assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))


def _evaluation_draws_nothing():
    model = parallelize(tiny.build("gpt2", **DROPOUT["gpt2"]), dist.group.WORLD, "none").eval()
    before = torch.get_rng_state()
    model(**tiny.batch(2, 1))
    return torch.equal(before, torch.get_rng_state())


def test_evaluation_leaves_the_random_state_alone(pool):
    assert all(pool.run(2, _evaluation_draws_nothing))
