"""Choosing and placing SCAPE's optimizer: from toggles to constructor arguments, from a model to tensor layouts."""

import logging

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from .collectives.meter import ByteMeter
from .optim.adams import AdamS
from .parallel import ParallelDims, parameter_splits
from .sync import ScapeAdamS, TensorLayout, merge_residuals

logger = logging.getLogger(__name__)

HF_DEFAULT_BETA2 = 0.999  # TrainingArguments' default, too slow for a second moment made of the last momentum
ADAMS_BETA2 = 0.95


def tensor_layouts(models: list[nn.Module], tp_size: int) -> dict[nn.Parameter, TensorLayout]:
    """For each parameter: on how many tp ranks its entries lie, and which dimension indexes output rows."""
    layouts = {}
    for model in models:
        splits = parameter_splits(model)
        out_dims = {m.weight: 1 for m in model.modules() if isinstance(m, Conv1D)}
        for parameter in model.parameters():
            split = splits.get(parameter)
            whole = split is None or split.shard is None
            row_dim = out_dims.get(parameter, 0)
            layouts[parameter] = TensorLayout(
                copies=tp_size if whole else split.copies,
                row_dims=(row_dim,),
                row_split=not whole and split.shard.dim != row_dim,
            )
    return layouts


def bind_optimizer(optimizer: ScapeAdamS, dims: ParallelDims, models: list[nn.Module], meter: ByteMeter) -> None:
    """Give an optimizer, before its first step, the groups of this tp x dp world and the layout of the split model."""
    layouts = tensor_layouts(models, dims.tp_size)
    unknown = [p for group in optimizer.param_groups for p in group["params"] if p not in layouts]
    if unknown:
        raise ValueError(
            f"{len(unknown)} parameters of the optimizer belong to no prepared model: prepare the model before it, or "
            "in one call: accelerator.prepare(model, optimizer, ...)"
        )
    tp_group = dims.tp_group if dims.tp_size > 1 else None
    optimizer.bind(process_group=dims.dp_group, tp_group=tp_group, layout=layouts.__getitem__, meter=meter)


def adams_betas(args) -> tuple[float, float]:
    """TrainingArguments' betas, with 0.95 in place of its default of 0.999 for the second."""
    if args.adam_beta2 == HF_DEFAULT_BETA2:
        logger.info(
            "AdamS: adam_beta2 %s (the default of TrainingArguments) is taken as %s", HF_DEFAULT_BETA2, ADAMS_BETA2
        )
        return args.adam_beta1, ADAMS_BETA2
    return args.adam_beta1, args.adam_beta2


def optimizer_class_and_arguments(args, max_steps: int) -> tuple[type[torch.optim.Optimizer], dict] | None:
    """What `dp_sync scape` or `use_adams` ask a Trainer to build; None where its own choice stands."""
    common = {"lr": args.learning_rate, "betas": adams_betas(args), "eps": args.adam_epsilon}
    if args.dp_sync == "scape":
        return ScapeAdamS, common | {
            "density": args.scape_density,
            "hold_steps": steps_of(args.scape_hold_steps, max_steps),
            "warmup_steps": steps_of(args.scape_warmup_steps, max_steps),
            "values": args.scape_values,
            "second_moment": args.scape_second_moment,
            "mask": args.scape_mask,
            "clip": args.scape_clip,
            "residual_device": "cpu" if args.scape_residual_device == "cpu" else None,
            "seed": args.seed,
        }
    return (AdamS, common) if args.use_adams else None


def merge_for_other_dp_size(states) -> dict:
    """State for a run with another number of data-parallel ranks: momentum is kept, residuals are averaged."""
    logger.info("resuming at another dp_size: momentum is kept, every rank gets the mean of the residuals")
    return merge_residuals(states)


def scape_figures(optimizer) -> dict[str, float]:
    """What a Trainer logs of the last step of ScapeAdamS (behind accelerate's wrapper or not); {} for any other."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(optimizer, ScapeAdamS) or not optimizer.step_count:
        return {}
    if not any("residual" in state for state in optimizer.state.values()):
        return {}  # only norms and biases are trained
    stats = optimizer.stats()
    names = ("density", "residual_over_momentum", "clipped_share", "mask_overlap")
    return {f"scape_{name}": stats[name] for name in names if stats[name] == stats[name]}


def steps_of(value: float, max_steps: int) -> int:
    """A number of steps from a number (1 or more, or 0), or from a share of `max_steps` (below 1)."""
    if 0 < value < 1:
        if max_steps <= 0:
            raise ValueError(f"{value} is a share of max_steps, which is not known: give a number of steps")
        return round(value * max_steps)
    return int(value)


def scape_optimizer(**kwargs) -> tuple:
    """`optimizer_cls_and_kwargs` for a stock transformers.Trainer under DistributedDataParallel; see ScapeCallback.

    Takes ScapeAdamS's arguments, lr too: the Trainer hands none of TrainingArguments' on. Matrices are synchronised by
    the optimizer; norms and biases, which DDP averages, only take its dense step. Clipping is the optimizer's: pass
    max_grad_norm here and max_grad_norm=0 to TrainingArguments. With clip="local" a rank's own norm counts those
    averaged tensors as DDP left them, which TacoScapeTrainer does not have to (about 1 % of the norm), and they are
    clipped by the ranks' mean coefficient.
    """
    return ScapeAdamSBesideDDP, kwargs


class ScapeAdamSBesideDDP(ScapeAdamS):
    """ScapeAdamS whose groups are split by dimensions: matrices are its own, the rest DDP has averaged already."""

    def __init__(self, params, **kwargs) -> None:
        params = list(params)
        groups = []
        for group in params if isinstance(params[0], dict) else [{"params": params}]:
            matrices = [p for p in group["params"] if p.ndim >= 2]
            rest = [p for p in group["params"] if p.ndim < 2]
            groups += [{**group, "params": matrices}] if matrices else []
            groups += [{**group, "params": rest, "already_reduced": True}] if rest else []
        super().__init__(groups, **kwargs)
