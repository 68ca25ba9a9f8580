"""One table a model family; import order below is registration order."""

from .plan import COUNTS, Block, Plan, Rule, Stack, get_plan, list_plans, matches, register_plan  # noqa: I001
from . import gpt2, gpt_neox, llama

__all__ = [
    "COUNTS", "Block", "Plan", "Rule", "Stack", "get_plan", "gpt2", "gpt_neox", "list_plans", "llama", "matches",
    "register_plan",
]  # fmt: skip
