"""Tables that tell tensor parallelism what a family of models looks like: no tensors, no groups.

A *block* is a module that takes a replicated activation and returns a sum over ranks (attention, MLP): one all-reduce
forward, one backward. Everything else with parameters is named in `replicated`. Module names are relative to the base
model (`model.` or `transformer.` is stripped), `*` stands for one segment of a name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

COLWISE, ROWWISE = "colwise", "rowwise"
STYLES = (COLWISE, ROWWISE)
UNITS = ("heads", "kv_heads", "width")

# Task heads a variant of a model may have or lack; split over nothing.
TASK_HEADS = ("lm_head", "score", "classifier", "qa_outputs", "multiple_choice_head.summary")


@dataclass(frozen=True)
class Rule:
    """How one linear layer of a block is split.

    style: `colwise` splits the output features, `rowwise` the input features.
    unit: what is dealt out to ranks: whole `heads`, whole `kv_heads`, or columns of the MLP's `width`.
    packed: how many projections lie one after the other in the output features (3 for a fused Q|K|V).
    """

    style: str
    unit: str
    packed: int = 1

    def __post_init__(self) -> None:
        if self.style not in STYLES or self.unit not in UNITS or self.packed < 1:
            raise ValueError(f"{self} is not a rule: style is one of {STYLES}, unit one of {UNITS}, packed at least 1")


@dataclass(frozen=True)
class Block:
    """A module whose linear layers `rules` splits, by the child's name.

    counts: attributes that hold a number of heads, rewritten to this rank's share: attribute -> an expression of
        `heads`, `kv_heads`, `head_dim` (a key of `COUNTS`).
    partial: children that are replicated but see only this rank's heads (Qwen3's q/k norms): their gradients are
        summed over the tensor-parallel ranks.
    dropout: attribute path of the dropout probability *inside* the split part, where each rank needs its own stream.
    """

    rules: Mapping[str, Rule]
    counts: Mapping[str, str] = field(default_factory=dict)
    partial: tuple[str, ...] = ()
    dropout: str | None = None


COUNTS = {
    "heads": lambda heads, kv_heads, head_dim: heads,
    "queries_per_kv_head": lambda heads, kv_heads, head_dim: heads // kv_heads,
    "query_width": lambda heads, kv_heads, head_dim: heads * head_dim,
}


@dataclass(frozen=True)
class Stack:
    """The part of a model that sequence parallelism runs on pieces of the sequence: what lies before `norm`.

    layers: pattern of the layers, first to last. lead: the child of a layer that runs first of its blocks and is given
    the layer's keyword arguments (attention). norm: the module that the last layer's output goes to.
    dropout: attribute path, from a layer, of the dropout probability *outside* the split parts of its blocks.
    """

    layers: str
    lead: str
    norm: str
    dropout: str | None = None


@dataclass(frozen=True)
class Plan:
    """The plan of one family: `blocks` and `replicated` must together name every module that owns parameters.

    optional: patterns that a variant of the model may lack; any other pattern that matches nothing is an error.
    stack: where sequence parallelism cuts; without it the family is refused for that.
    """

    model_types: tuple[str, ...]
    blocks: Mapping[str, Block]
    replicated: tuple[str, ...]
    optional: tuple[str, ...] = TASK_HEADS
    stack: Stack | None = None


def matches(pattern: str, name: str) -> bool:
    """True where `name` has as many dotted segments as `pattern` and each one fits (`*` stays inside its segment)."""
    wanted, found = pattern.split("."), name.split(".")
    return len(wanted) == len(found) and all(fnmatchcase(f, w) for f, w in zip(found, wanted, strict=True))


_PLANS: dict[str, Plan] = {}


def register_plan(plan: Plan) -> Plan:
    """Make `plan` the one for its `model_types`; a model type that already has a plan is a ValueError."""
    for model_type in plan.model_types:
        if model_type in _PLANS:
            raise ValueError(f"model type {model_type!r} has a plan already; pass plan=... to parallelize instead")
    for block in plan.blocks.values():
        for expression in block.counts.values():
            if expression not in COUNTS:
                raise ValueError(f"unknown head count {expression!r}, known are {sorted(COUNTS)}")
    _PLANS.update(dict.fromkeys(plan.model_types, plan))
    return plan


def list_plans() -> list[str]:
    """Model types (`config.model_type`) that can be split."""
    return sorted(_PLANS)


def get_plan(model_type: str) -> Plan:
    """The plan of a `config.model_type`; an unknown one is a ValueError that lists the known."""
    if model_type not in _PLANS:
        raise ValueError(
            f"no tensor-parallel plan for model type {model_type!r}; known are {', '.join(list_plans())}. "
            "Write a Plan and pass it as parallelize(..., plan=...) or to hf_taco_scape.plans.register_plan, "
            "or train with tp_size 1."
        )
    return _PLANS[model_type]
