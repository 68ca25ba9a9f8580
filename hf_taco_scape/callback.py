"""ScapeCallback: SCAPE on a stock transformers.Trainer, data parallel only.

    Trainer(..., callbacks=[ScapeCallback()], optimizer_cls_and_kwargs=scape_optimizer(lr=..., max_grad_norm=1.0))

with plain TrainingArguments (max_grad_norm=0: the Trainer would clip gradients that are not averaged yet). The
callback takes the matrices out of DistributedDataParallel, which goes on averaging norms and biases; ScapeAdamS does
the rest in its step.
"""

import logging
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .parallel import ParallelDims
from .parallel.optimizer_state import load_optimizer_states, save_optimizer_states
from .scape import ScapeAdamSBesideDDP, merge_for_other_dp_size, scape_figures
from .sync import ScapeAdamS
from .sync.layout import module_layout
from .training_args import TacoScapeArguments

logger = logging.getLogger(__name__)


class ScapeCallback(TrainerCallback):
    """Prepares a stock Trainer for ScapeAdamS and keeps each rank's residuals in its checkpoints.

    resume_from: the checkpoint that `train(resume_from_checkpoint=...)` was given, where it is not
        output_dir/checkpoint-N (the Trainer does not tell callbacks).

    The `grad_norm` that a stock Trainer logs is this rank's own; `on_log` puts the synchronised one, and SCAPE's
    figures and bytes since the last log, into the logs that callbacks after this one see.
    """

    def __init__(self, resume_from: str | None = None) -> None:
        self._resume_from = resume_from
        self._optimizer: ScapeAdamS | None = None
        self._logged_bytes: dict[str, int] = {}
        self._ddp_seen = False  # in this train(): norms and biases had one gradient on all ranks

    def on_init_end(self, args, state, control, model=None, **kwargs):
        if isinstance(args, TacoScapeArguments):
            raise ValueError("TacoScapeTrainer needs no ScapeCallback: set dp_sync scape")
        if args.max_grad_norm:
            raise ValueError(
                f"max_grad_norm {args.max_grad_norm}: the Trainer would clip gradients before they are averaged. Set "
                "TrainingArguments(max_grad_norm=0) and give the norm to scape_optimizer(max_grad_norm=...)"
            )
        if args.fsdp or args.deepspeed:
            raise ValueError("ScapeCallback works with plain data parallelism only, not with fsdp or deepspeed")
        matrices = [name for name, p in model.named_parameters(remove_duplicate=False) if p.ndim >= 2]
        rest = [p for p in model.parameters() if p.ndim < 2 and p.requires_grad]
        if not rest:
            raise ValueError(
                "DistributedDataParallel needs a trainable norm or bias; use TacoScapeTrainer with dp_sync scape"
            )
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, matrices)

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self._optimizer = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(self._optimizer, ScapeAdamS):
            raise ValueError(
                "ScapeCallback without ScapeAdamS would leave the matrices unsynchronised: build the Trainer with "
                f"optimizer_cls_and_kwargs=scape_optimizer(...), not {type(self._optimizer).__name__}"
            )
        rate = self._optimizer.defaults["lr"]
        if isinstance(self._optimizer, ScapeAdamSBesideDDP) and rate != args.learning_rate:
            warnings.warn(
                f"lr {rate} of scape_optimizer trains, not learning_rate {args.learning_rate} of TrainingArguments: "
                "the Trainer does not pass it on. Write scape_optimizer(lr=args.learning_rate, ...)",
                stacklevel=2,
            )
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        if any(p.ndim >= 2 and name not in ignored for name, p in model.named_parameters()):
            raise ValueError(
                "DistributedDataParallel still averages the matrices: the model was built after the Trainer "
                "(model_init). Pass model=... to the Trainer"
            )
        self._ddp_seen = False
        self._optimizer.bind(None, layout=module_layout(model))
        if dist.is_initialized():
            with torch.no_grad():  # DDP broadcasts only what it averages
                for parameter in model.parameters():
                    dist.broadcast(parameter, src=0)
        if state.global_step:
            folder = Path(self._resume_from or Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            (own,) = load_optimizer_states(folder, self._dims(), merge_for_other_dp_size)
            self._optimizer.load_state_dict(own)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if self._ddp_seen or not dist.is_initialized():
            return
        reduced = [p for group in self._optimizer.param_groups if group["already_reduced"] for p in group["params"]]
        if not reduced:
            return
        norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in reduced if p.grad is not None]
        total = torch.stack(norms).sum() if norms else torch.zeros((), dtype=torch.float64, device=reduced[0].device)
        ends = torch.stack([total, -total]).nan_to_num()  # an overflow is DDP's to spread and GradScaler's to see
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        largest, least = ends[0].item(), -ends[1].item()
        if largest - least > 1e-5 * largest:
            raise ValueError(
                "gradients of norms and biases are not averaged: DistributedDataParallel does not wrap the model. A "
                "Trainer leaves it out after evaluate() or predict() before train(): train first, or evaluate with a "
                "Trainer of its own"
            )
        self._ddp_seen = True

    def on_save(self, args, state, control, **kwargs):
        # the Trainer has written rank 0's optimizer state for everybody; residuals are each rank's own
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if not args.save_only_model:
            save_optimizer_states(folder, [self._optimizer.state_dict()], self._dims(), per_dp_rank=True)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self._optimizer is not None and "loss" in (logs or {}):
            norm = self._optimizer.last_norm
            logs.update(scape_figures(self._optimizer), **({} if norm is None else {"grad_norm": float(norm)}))
            # what DDP averages is not in it
            total = self._optimizer.meter.snapshot()
            for way in ("dense", "sent"):
                logs[f"dp_bytes_{way}"] = total[f"{way}_bytes"] - self._logged_bytes.get(f"{way}_bytes", 0)
            self._logged_bytes = total

    @staticmethod
    def _dims() -> ParallelDims:
        if not dist.is_initialized():
            return ParallelDims()
        return ParallelDims(dp_size=dist.get_world_size(), dp_rank=dist.get_rank())
