"""GPT-NeoX: the fused projection holds each head's q, k and v together, so that whole heads are contiguous rows."""

from .plan import COLWISE, ROWWISE, TASK_HEADS, Block, Plan, Rule, Stack, register_plan

_OPTIONAL = (*TASK_HEADS, "embed_out")

GPT_NEOX = register_plan(
    Plan(
        ("gpt_neox",),
        {
            "layers.*.attention": Block(
                {"query_key_value": Rule(COLWISE, "heads"), "dense": Rule(ROWWISE, "heads")},
                dropout="attention_dropout",
            ),
            "layers.*.mlp": Block({"dense_h_to_4h": Rule(COLWISE, "width"), "dense_4h_to_h": Rule(ROWWISE, "width")}),
        },
        (
            "embed_in",
            "layers.*.input_layernorm",
            "layers.*.post_attention_layernorm",
            "final_layer_norm",
            *_OPTIONAL,
        ),
        optional=_OPTIONAL,
        stack=Stack("layers.*", "attention", "final_layer_norm", dropout="post_attention_dropout.p"),
    )
)
