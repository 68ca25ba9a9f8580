"""Llama and the families that share its block layout: Qwen2 (biases on q/k/v) and Qwen3 (norms on q and k)."""

from .plan import COLWISE, ROWWISE, TASK_HEADS, Block, Plan, Rule, Stack, register_plan

_ATTENTION = {
    "q_proj": Rule(COLWISE, "heads"),
    "k_proj": Rule(COLWISE, "kv_heads"),
    "v_proj": Rule(COLWISE, "kv_heads"),
    "o_proj": Rule(ROWWISE, "heads"),
}
_MLP = Block(
    {"gate_proj": Rule(COLWISE, "width"), "up_proj": Rule(COLWISE, "width"), "down_proj": Rule(ROWWISE, "width")}
)
_REPLICATED = ("embed_tokens", "layers.*.input_layernorm", "layers.*.post_attention_layernorm", "norm", *TASK_HEADS)


def _plan(model_types: tuple[str, ...], partial: tuple[str, ...] = ()) -> Plan:
    attention = Block(
        _ATTENTION, {"num_key_value_groups": "queries_per_kv_head"}, partial=partial, dropout="attention_dropout"
    )
    blocks = {"layers.*.self_attn": attention, "layers.*.mlp": _MLP}
    return register_plan(Plan(model_types, blocks, _REPLICATED, stack=Stack("layers.*", "self_attn", "norm")))


LLAMA = _plan(("llama", "qwen2"))
QWEN3 = _plan(("qwen3",), partial=("q_norm", "k_norm"))
