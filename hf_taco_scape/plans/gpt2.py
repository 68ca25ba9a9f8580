"""GPT-2: Conv1D layers (weights stored input x output) and one fused Q|K|V projection."""

from .plan import COLWISE, ROWWISE, TASK_HEADS, Block, Plan, Rule, Stack, register_plan

GPT2 = register_plan(
    Plan(
        ("gpt2",),
        {
            "h.*.attn": Block(
                {"c_attn": Rule(COLWISE, "heads", packed=3), "c_proj": Rule(ROWWISE, "heads")},
                {"num_heads": "heads", "split_size": "query_width"},
                dropout="attn_dropout.p",
            ),
            "h.*.mlp": Block({"c_fc": Rule(COLWISE, "width"), "c_proj": Rule(ROWWISE, "width")}),
        },
        ("wte", "wpe", "h.*.ln_1", "h.*.ln_2", "ln_f", *TASK_HEADS),
        stack=Stack("h.*", "attn", "ln_f", dropout="attn.resid_dropout.p"),
    )
)
