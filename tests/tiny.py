"""Tiny random models and data of the tests; every family with the features that break tensor parallelism."""

import torch
import transformers as tf

VOCAB, LENGTH = 97, 16  # a vocabulary that neither 2 nor 4 divides

_SIZE = dict(
    vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64
)  # fmt: skip


def _llama_like(config_class, model_class, **extra):
    config = {"intermediate_size": 100, "num_key_value_heads": 2, "tie_word_embeddings": True, **_SIZE, **extra}
    return lambda **changes: model_class(config_class(**{**config, **changes}))


def _gpt2(**changes):
    config = dict(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return tf.GPT2LMHeadModel(tf.GPT2Config(**{**config, **changes}))


def _gpt_neox(**changes):
    config = {"intermediate_size": 128, "tie_word_embeddings": True, "hidden_dropout": 0.0, **_SIZE, **changes}
    return tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**config))


FAMILIES = {
    "qwen2": _llama_like(tf.Qwen2Config, tf.Qwen2ForCausalLM),
    "qwen3": _llama_like(tf.Qwen3Config, tf.Qwen3ForCausalLM, head_dim=16),
    "llama": _llama_like(tf.LlamaConfig, tf.LlamaForCausalLM, attention_bias=True, mlp_bias=True),
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}


def build(family: str, seed: int = 7, **changes) -> tf.PreTrainedModel:
    """A tiny random model; biases and norms are made non-trivial so that a lost one shows."""
    tf.set_seed(seed)
    model = FAMILIES[family](**changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def rows(count: int, seed: int, length: int = LENGTH) -> list[dict]:
    """Random token rows whose labels are masked to unequal numbers of tokens."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(count):
        ids = torch.randint(0, VOCAB, (length,), generator=generator)
        labels = ids.clone()
        labels[: int(torch.randint(0, length - 2, (), generator=generator))] = -100
        out.append({"input_ids": ids, "labels": labels})
    return out


def batch(count: int, seed: int, length: int = LENGTH) -> dict:
    items = rows(count, seed, length)
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}
