"""Splits a Hugging Face model over a tensor-parallel group in place: checks everything first, then swaps modules."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from ..collectives.dispatch import Communicator, open_communicator
from ..collectives.routes import OPERATIONS
from ..layers import (
    COLWISE_LAYERS,
    OUT_DIM,
    ROWWISE_LAYERS,
    Boundary,
    LayerEntry,
    LeadEntry,
    SplitRng,
    StackEntry,
    StackExit,
    linear_kind,
)  # fmt: skip
from ..plans import COUNTS, Block, Plan, Stack, get_plan, matches
from .model import as_split_model, group_device, split_state
from .parallel_dims import agree
from .replicas import differing_tensors
from .sharding import HeadLayout, Shard, deal_heads, shard_units, shard_width

logger = logging.getLogger(__name__)


def parallelize(
    model: nn.Module,
    tp_group,
    codec: str = "taco",
    plan: Plan | None = None,
    *,
    codec_backward: str | None = None,
    min_bytes: int | str = 0,
    backend: str = "auto",
    sequence_parallel: bool = False,
    agree_over: Sequence[dist.ProcessGroup] = (),
) -> nn.Module:
    """Swap `model`'s attention and MLP layers for split ones, in place, and return it; collective over `tp_group`.

    Every rank passes the same whole model (parameters that differ are taken from the group's first rank, with a line
    in the log) and is left with its slices: whole attention heads with their KV heads, and a part of each MLP's width.
    Parameters keep their identity, so an optimizer built before stays valid as long as it has no state. Embeddings,
    norms and the head are replicated.

    codec, codec_backward: wire formats of activations and gradients (`hf_taco_scape.list_codecs()`), or a preset.
    plan: overrides the table of `config.model_type`. min_bytes: smaller messages travel uncompressed; "auto" measures
    what is fastest at which size. backend: c10d, symm_mem or auto. sequence_parallel: between blocks each rank keeps a
    piece of the sequence while gradients are computed (docs/how_it_works.md). agree_over: data-parallel groups, whose
    members must choose alike (then it is collective over them too). A group of one (or None) returns the model
    unchanged.

    Raises ValueError, before anything is changed, for unknown model types and codecs, layers that no rule names, rules
    that name nothing, layers that are not plain linear ones (quantised, adapted), heads that cannot be dealt out, and
    sequence_parallel with a plan that has no `stack`.
    """
    if split_state(model) is not None:
        raise ValueError("this model is split already; parallelize a freshly loaded one")
    if hasattr(model, "peft_config") and hasattr(model, "base_model"):
        raise ValueError("adapters on split layers are not supported yet: merge_and_unload() the adapter first")
    if tp_group is None or dist.get_world_size(tp_group) == 1:
        return model
    settings = {
        "codec": codec, "codec_backward": codec_backward, "min_bytes": min_bytes, "backend": backend,
        "sequence_parallel": sequence_parallel,
    }  # fmt: skip
    agree(settings, tp_group)
    plan = plan or get_plan(model.config.model_type)
    surgery = plan_surgery(model, plan, dist.get_world_size(tp_group), sequence_parallel)
    device = group_device(tp_group)
    comm = open_communicator(
        tp_group, codec, codec_backward,
        min_bytes=min_bytes, backend=backend, device=device,
        operations=OPERATIONS if sequence_parallel else OPERATIONS[:1], agree_over=agree_over,
    )  # fmt: skip
    _equalize(model, tp_group, device)
    surgery.apply(comm)
    as_split_model(model, comm, device)
    logger.info(surgery.summary(comm))
    return model


@dataclass
class _LayerSplit:
    block: nn.Module
    child: str
    layer: nn.Module
    style: str
    shards: dict[str, Shard]
    rng_key: str | None = None


@dataclass
class StackSplit:
    """What sequence parallelism adds: `partial` are the layers' norms, which see this rank's positions only."""

    base: nn.Module
    rules: Stack
    layers: list[nn.Module]
    norm: nn.Module
    partial: list[nn.Module]

    def apply(self, boundary: Boundary) -> None:
        comm = boundary.comm
        self.base.register_forward_pre_hook(StackEntry(), with_kwargs=True)
        for layer in self.layers:
            rng = SplitRng(comm.rank, self.rules.dropout) if self.rules.dropout else None
            first = layer is self.layers[0]
            if first or rng is not None:
                entry = LayerEntry(comm, first, rng)
                layer.register_forward_pre_hook(entry, with_kwargs=True)
                layer.register_forward_hook(entry.leave)
            getattr(layer, self.rules.lead).register_forward_pre_hook(LeadEntry(boundary), with_kwargs=True)
        self.norm.register_forward_pre_hook(StackExit(boundary))
        for module in self.partial:
            module.tp_partial = tuple(name for name, _ in module.named_parameters(recurse=False))


@dataclass
class Surgery:
    """What will be done to a model, all checked: nothing here can fail once `apply` begins."""

    layers: list[_LayerSplit] = field(default_factory=list)
    blocks: list[tuple[nn.Module, Block]] = field(default_factory=list)
    replicated: list[str] = field(default_factory=list)
    heads: HeadLayout | None = None
    stack: StackSplit | None = None

    def apply(self, comm: Communicator) -> None:
        rngs, boundary = {}, Boundary(comm)
        if self.stack is not None:
            self.stack.apply(boundary)
        for block, rules in self.blocks:
            rng = SplitRng(comm.rank, rules.dropout) if rules.dropout else None
            rngs[id(block)] = rng
            for attribute, expression in rules.counts.items():
                setattr(block, attribute, COUNTS[expression](**self.heads.local(comm.rank)))
            for child in rules.partial:
                module = getattr(block, child)
                module.tp_partial = tuple(name for name, _ in module.named_parameters(recurse=False))
            block.register_forward_pre_hook(BlockEntry(boundary, rng), with_kwargs=True)
        for split in self.layers:
            kind = type(split.layer)
            if split.style == "colwise":
                new = COLWISE_LAYERS[kind](split.layer, split.shards, comm.rank)
            else:
                new = ROWWISE_LAYERS[kind](split.layer, split.shards, comm.rank, boundary, rngs[id(split.block)])
                if self.stack is not None and new.bias is not None:
                    new.tp_partial = ("bias",)  # added to this rank's positions
            setattr(split.block, split.child, new)

    def summary(self, comm: Communicator) -> str:
        local = self.heads.local(comm.rank)
        return (
            f"tensor parallel over {comm.size} ranks: {len(self.layers)} layers split in {len(self.blocks)} blocks "
            f"(this rank: {local['heads']} of {self.heads.total_heads} heads, {local['kv_heads']} of "
            f"{self.heads.total_kv_heads} KV heads), {len(self.replicated)} modules replicated"
            f"{', activations between blocks split along the sequence' if self.stack else ''}; "
            f"codec {comm.codec.name} forward, {comm.codec_backward.name} backward"
        )


class BlockEntry:
    """Forward pre-hook of a block: its input enters the split part, and so do the random numbers."""

    def __init__(self, boundary: Boundary, rng: SplitRng | None) -> None:
        self.boundary, self.rng = boundary, rng

    def __call__(self, block, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        if self.rng is not None:
            self.rng.enter(block, hidden.device)
        hidden = self.boundary.enter(hidden)
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


def plan_surgery(model: nn.Module, plan: Plan, tp_size: int, sequence_parallel: bool = False) -> Surgery:
    """Match every module that owns parameters against `plan`; ValueError names what does not fit. Changes nothing."""
    surgery = Surgery(heads=_deal_heads(model.config, tp_size))
    base = model.base_model_prefix + "." if getattr(model, "base_model_prefix", "") else ""
    unused = {*plan.blocks, *plan.replicated} - set(plan.optional)
    unknown, owned = [], {}
    for name, module in model.named_modules():
        short = name.removeprefix(base)
        pattern = next((p for p in plan.blocks if matches(p, short)), None)
        if pattern is not None:
            unused.discard(pattern)
            owned |= _plan_block(surgery, name, module, plan.blocks[pattern], tp_size)
    for name, module in model.named_modules():
        if name in owned or not any(True for _ in module.parameters(recurse=False)):
            continue
        pattern = next((p for p in plan.replicated if matches(p, name.removeprefix(base))), None)
        if pattern is None:
            unknown.append(f"{name} ({type(module).__name__})")
        else:
            unused.discard(pattern)
            surgery.replicated.append(name)
    if unknown:
        raise ValueError(
            f"no rule of the plan for {'/'.join(plan.model_types)} names: {', '.join(unknown[:8])}"
            f"{' ...' if len(unknown) > 8 else ''}. Name them in a Plan (a block's rules, or `replicated`) and "
            "pass it as parallelize(..., plan=...)"
        )
    if unused:
        raise ValueError(
            f"rules of the plan that fit no module of {type(model).__name__}: {', '.join(sorted(unused))}"
        )
    if sequence_parallel:
        surgery.stack = _plan_stack(model, plan, surgery.replicated, base)
    return surgery


def _plan_stack(model: nn.Module, plan: Plan, replicated: list[str], base: str) -> StackSplit:
    rules = plan.stack
    if rules is None:
        raise ValueError(
            f"the plan for {'/'.join(plan.model_types)} has no stack: sequence_parallel does not know where to cut. "
            "Give it a plans.Stack, or leave sequence_parallel false"
        )
    modules = {name.removeprefix(base): module for name, module in model.named_modules()}
    layers = {name: module for name, module in modules.items() if matches(rules.layers, name)}
    missing = [what for what, found in ((rules.layers, layers), (rules.norm, rules.norm in modules)) if not found]
    missing += [f"{name}.{rules.lead}" for name in layers if f"{name}.{rules.lead}" not in modules]
    if missing:
        raise ValueError(f"the plan's stack names {missing[0]}, which {type(model).__name__} does not have")
    shorts = [name.removeprefix(base) for name in replicated]
    partial = [modules[name] for name in shorts if any(name.startswith(f"{layer}.") for layer in layers)]
    return StackSplit(model.base_model, rules, list(layers.values()), modules[rules.norm], partial)


def _plan_block(surgery: Surgery, name: str, block: nn.Module, rules: Block, tp_size: int) -> dict[str, None]:
    children = dict(block.named_children())
    missing = [child for child in (*rules.rules, *rules.partial) if child not in children]
    if missing:
        raise ValueError(f"the plan splits {name}.{missing[0]}, which {type(block).__name__} does not have")
    for child, rule in rules.rules.items():
        layer = children[child]
        kind = linear_kind(layer)
        if kind is None:
            raise ValueError(
                f"{name}.{child} is a {type(layer).__name__}; only plain nn.Linear and Conv1D layers can be split "
                "(load the model without quantisation, merge adapters first)"
            )
        dim = OUT_DIM[kind] if rule.style == "colwise" else 1 - OUT_DIM[kind]
        size = layer.weight.shape[dim]

        def shard(dim, rule=rule, size=size):
            if rule.unit == "width":
                return shard_width(dim, size, tp_size)
            heads = surgery.heads
            units, total = (
                (heads.heads, heads.total_heads) if rule.unit == "heads" else (heads.kv_heads, heads.total_kv_heads)
            )
            return shard_units(dim, size, units, total, rule.packed)

        shards = {"weight": shard(dim)}
        if layer.bias is not None and rule.style == "colwise":
            shards["bias"] = shard(0)
        surgery.layers.append(_LayerSplit(block, child, layer, rule.style, shards))
    surgery.blocks.append((block, rules))
    return dict.fromkeys(f"{name}.{child}" for child in rules.rules) | dict.fromkeys(
        f"{name}.{child}" for child in rules.partial
    )


def _deal_heads(config, tp_size: int) -> HeadLayout:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return deal_heads(heads, kv_heads, head_dim, tp_size)


@torch.no_grad()
def _equalize(model: nn.Module, group, device: torch.device) -> None:
    """Ranks may have drawn their weights from different seeds: take the first rank's where bits differ."""
    named = [(n, t) for n, t in [*model.named_parameters(), *model.named_buffers()] if not t.is_meta]
    wrong = differing_tensors(named, group, device)
    tensors = dict(named)
    for name in wrong:
        message = tensors[name].to(device)
        dist.broadcast(message, group=group, group_src=0)
        tensors[name].copy_(message)
    if wrong:
        logger.warning(
            "%d tensors (%s, ...) differed between tensor-parallel ranks; all took the first rank's",
            len(wrong),
            wrong[0],
        )
