"""Accelerate's data-parallel view of a tp x dp world, and the one place that synchronises gradients; no maths here.

accelerate is shown the data-parallel world only: `num_processes` and `process_index` are the dp size and rank, so
dataloaders shard over dp ranks, and gathers run over the dp group. DistributedDataParallel is never used: gradients
are synchronised once per optimizer step (gradients.py): announced by the backward, done by the time of clipping or of
the step. Everything that concerns files and printing (`is_main_process`, `state`) keeps the real world.
"""

import atexit
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DataLoaderConfiguration, recursively_apply
from torch import nn

from . import hooks as _hooks  # noqa: F401  checks the hooks below at import
from .gradients import StepGradients
from .parallel import ParallelDims, gather_state_dict, parallelize, split_state
from .parallel.heartbeat import Heartbeat
from .parallel.optimizer_state import load_optimizer_states, save_optimizer_states
from .resume import repeat_options, save_options
from .scape import merge_for_other_dp_size
from .sync import ScapeAdamS
from .sync.amp import unscale_and_share
from .training_args import WHOLE_MATRIX_OPTIMIZERS, TacoScapeOptions, check_launch


class TacoScapeAccelerator(Accelerator):
    """accelerate.Accelerator for own training loops with tensor and data parallelism.

    Takes TacoScapeOptions (or its fields as keywords: tp_size, tp_codec, ...) besides Accelerator's own arguments.
    `prepare` splits the model over its tensor-parallel group; the optimizer may be built before or after.
    """

    dims: ParallelDims | None = None

    def __init__(self, options: TacoScapeOptions | None = None, **kwargs) -> None:
        toggles = {name: kwargs.pop(name) for name in TacoScapeOptions.names() if name in kwargs}
        if options is not None and toggles:
            raise ValueError(f"give the toggles in options or as keywords, not both: {', '.join(toggles)}")
        options = TacoScapeOptions(**toggles) if options is None else options
        options.validate()
        if not torch.accelerator.is_available():
            kwargs.setdefault("cpu", True)
        if options.tp_size > 1:
            config = kwargs.setdefault("dataloader_config", DataLoaderConfiguration(use_seedable_sampler=True))
            if not config.use_seedable_sampler:
                raise ValueError(
                    "tp_size > 1 needs DataLoaderConfiguration(use_seedable_sampler=True): peers must agree"
                )
        super().__init__(**kwargs)
        check_launch(self.state.num_processes)
        self._attach(ParallelDims.build(options.tp_size, options.settings_to_agree()), options)

    @classmethod
    def adopt(cls, accelerator: Accelerator, dims: ParallelDims, options: TacoScapeOptions) -> "TacoScapeAccelerator":
        """Turn the Accelerator that a Trainer has built into this class (there is no public way to hand it one)."""
        accelerator.__class__ = cls
        accelerator._attach(dims, options)
        return accelerator

    def _attach(self, dims: ParallelDims, options: TacoScapeOptions) -> None:
        self.dims, self.options = dims, options
        self.gradients = StepGradients(dims)
        self._communicators = []  # of the split models, in the order of prepare
        self._steps = 0
        self._heartbeat: Heartbeat | None = None

    # ---- the data-parallel view
    @property
    def num_processes(self) -> int:
        return self.state.num_processes if self.dims is None else self.dims.dp_size

    @property
    def process_index(self) -> int:
        return self.state.process_index if self.dims is None else self.dims.dp_rank

    @property
    def dispatch_batches(self) -> bool | None:
        wanted = super().dispatch_batches
        if self.dims is None or self.dims.tp_size == 1:
            return wanted
        if wanted:
            raise ValueError(
                "dispatch_batches=True does not work with tp_size > 1: its dispatcher knows the world only"
            )
        return False

    def gather(self, tensor):
        """Concatenate over data-parallel ranks along dim 0, as accelerate's gather does over the world."""

        def one(t):
            t = (t.reshape(1) if t.ndim == 0 else t).contiguous()
            if self.dims.dp_size == 1:
                return t
            parts = [torch.empty_like(t) for _ in range(self.dims.dp_size)]
            dist.all_gather(parts, t, group=self.dims.dp_group)
            return torch.cat(parts)

        return recursively_apply(one, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data, use_gather_object: bool = False):
        if self.dims.tp_size == 1 or not (use_gather_object or _has_objects(input_data)):
            return super().gather_for_metrics(input_data, use_gather_object)
        parts = [input_data]
        if self.dims.dp_size > 1:
            parts = [None] * self.dims.dp_size
            dist.all_gather_object(parts, input_data, group=self.dims.dp_group)
        gathered = [item for part in parts for item in part]
        surplus = self.gradient_state.end_of_dataloader and self.gradient_state.remainder > 0
        return gathered[: self.gradient_state.remainder] if surplus else gathered

    def reduce(self, tensor, reduction: str = "sum", scale: float = 1.0):
        if self.dims.tp_size == 1:
            return super().reduce(tensor, reduction, scale)

        def one(t):
            t = t.clone()
            if reduction == "none":
                return t
            op = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
            if self.dims.dp_size > 1:
                dist.all_reduce(t, op=op, group=self.dims.dp_group)
            return t / self.dims.dp_size if reduction == "mean" else t

        return recursively_apply(one, tensor, error_on_other_type=True)

    def check_trigger(self) -> bool:
        # over the world: a trigger that one tensor-parallel peer has set must stop them all
        flag = torch.zeros(1, device=self.device) if self.flag_tensor is None else self.flag_tensor.view(1).float()
        if self.state.num_processes > 1:
            dist.all_reduce(flag)
        self.flag_tensor = None
        return bool(flag.item() >= 1)

    def split_between_processes(self, inputs, apply_padding: bool = False):
        if self.dims.tp_size > 1:
            raise ValueError(
                "split_between_processes would give tensor-parallel peers different inputs; use a prepared "
                "dataloader, or split by accelerator.process_index of accelerator.num_processes (data-parallel both)"
            )
        return super().split_between_processes(inputs, apply_padding)

    # ---- models, optimizers, schedulers
    def prepare(self, *args, device_placement=None):
        models = [a for a in args if isinstance(a, nn.Module) and split_state(a) is None]
        optimizers = [a for a in args if isinstance(a, torch.optim.Optimizer)]
        if models and self.dims.tp_size > 1 and any(o.state for o in optimizers):
            raise ValueError(
                "the optimizer has state of the unsplit model already: prepare both before the first step"
            )
        return super().prepare(*args, device_placement=device_placement)

    def split(self, model: nn.Module) -> nn.Module:
        """Parallelize `model` over this process's tensor-parallel group as the options say; a no-op at tp_size 1."""
        if self.dims.tp_size > 1 and split_state(model) is None:
            options = self.options
            parallelize(
                model, self.dims.tp_group, options.tp_codec,
                codec_backward=options.tp_codec_backward, min_bytes=options.tp_min_bytes,
                backend=options.tp_backend, sequence_parallel=options.sequence_parallel,
                agree_over=self.dims.wide_groups(),
            )  # fmt: skip
        return model

    def prepare_model(self, model, device_placement=None, evaluation_mode=False):
        if hasattr(model, "peft_config") and self.dims.tp_size > 1:
            raise ValueError(
                "tp_size > 1 does not work with adapters yet: merge_and_unload() the adapter, or use tp_size 1"
            )
        state = split_state(self.split(model))
        if state is not None and state.comm not in self._communicators:
            self._communicators.append(state.comm)
        # evaluation_mode: place, autocast and compile, but no DistributedDataParallel
        prepared = super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        self.gradients.add_model(model)
        if not evaluation_mode:
            self.gradients.share_weights(model)
        return prepared

    def prepare_optimizer(self, optimizer, device_placement=None):
        raw = _unwrap(optimizer)
        if self.dims.tp_size > 1 and type(raw).__name__ in WHOLE_MATRIX_OPTIMIZERS:
            raise ValueError(f"tp_size > 1 does not work with {type(raw).__name__}: its update needs whole matrices")
        if isinstance(raw, ScapeAdamS):
            self.gradients.use_scape(raw)
        elif self.options.dp_sync == "scape":
            raise ValueError(
                f"dp_sync scape needs the optimizer ScapeAdamS, which does the exchange; got {type(raw).__name__}"
            )
        prepared = super().prepare_optimizer(optimizer, device_placement)
        prepared.__class__, prepared.accelerator = _SyncedOptimizer, self
        return prepared

    def prepare_scheduler(self, scheduler):
        prepared = super().prepare_scheduler(scheduler)
        prepared.__class__, prepared.num_processes = _DataParallelScheduler, self.num_processes
        return prepared

    # ---- gradients
    def backward(self, loss, **kwargs) -> None:
        """accelerate's backward; after the last one of a step `.grad` is synchronised, as under DDP."""
        last = self.sync_gradients
        self.start_heartbeat()
        self.gradients.before_backward(last)
        super().backward(loss, **kwargs)
        self.gradients.after_backward(last)

    def start_heartbeat(self) -> Heartbeat | None:
        """Watch the other ranks from now on, so that one that dies is named (parallel/heartbeat.py); once.

        The first `backward` does it. It ends with `end_training`, or with the process.
        """
        if self._heartbeat is None and self.options.heartbeat_timeout and self.state.num_processes > 1:
            self._heartbeat = Heartbeat(self.options.heartbeat_timeout)
            self._heartbeat.explain_uncaught()
            atexit.register(self._heartbeat.stop)
        return self._heartbeat

    def stop_heartbeat(self, finished: bool = True) -> None:
        """Tell the other ranks that this one has finished (or fall silent); `start_heartbeat` starts anew."""
        if self._heartbeat is not None:
            self._heartbeat.stop(finished)
            atexit.unregister(self._heartbeat.stop)
            self._heartbeat = None

    def end_training(self) -> None:
        self.stop_heartbeat()
        super().end_training()

    def clip_grad_norm_(self, parameters, max_norm, norm_type=2):
        """Synchronise, then clip by the norm of the whole model's gradient; returns that norm, equal on all ranks."""
        parameters, scape = list(parameters), self.gradients.scape is not None
        if norm_type != 2 and (self.dims.tp_size > 1 or scape):
            raise ValueError(f"tp_size > 1 and dp_sync scape clip by the L2 norm only, got norm_type {norm_type}")
        if scape:
            if not self.sync_gradients:
                raise ValueError(
                    "dp_sync scape clips once a step: call clip_grad_norm_ only if accelerator.sync_gradients"
                )
            return self.gradients.exchange(max_norm, self.scaler)
        self.unscale_gradients()
        return self.gradients.clip(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters, clip_value) -> None:
        if self.gradients.scape is not None:
            raise ValueError("dp_sync scape clips by norm only: gradients are never averaged on their own")
        super().clip_grad_value_(parameters, clip_value)

    def unscale_gradients(self, optimizer=None) -> None:
        """fp16: unscale each optimizer's gradients once, and let an overflow on any rank be one on all of them."""
        if (
            self.scaler is None or self.gradients.scape is not None
        ):  # ScapeAdamS unscales by itself, before it exchanges
            return
        optimizers = self._optimizers if optimizer is None else optimizer
        for wrapped in optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]:
            unscale_and_share(self.scaler, _unwrap(wrapped), self.device, self.dims.wide_groups())

    def before_step(self, optimizer: AcceleratedOptimizer) -> None:
        """fp16 overflow, SCAPE's exchange; RuntimeError where gradients came without `accelerator.backward`."""
        has_gradients = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        if has_gradients and not self.gradients.began and self.state.num_processes > 1:
            raise RuntimeError(
                "the gradients of this step were never synchronised: call accelerator.backward(loss) in the place of "
                "loss.backward()"
            )
        self.unscale_gradients()
        # also on a rank without a gradient: the others wait for its part of the message
        if self.gradients.scape is optimizer.optimizer:
            self.gradients.exchange(None, self.scaler)

    def after_step(self) -> None:
        """Count an optimizer step and compare replicas where the options ask for it."""
        self._steps += 1
        every = self.options.check_replicas
        if every and self._steps % every == 0:
            self.gradients.compare_replicas(self._steps)

    # ---- checkpoints of own loops
    def get_state_dict(self, model, unwrap: bool = True):
        if split_state(model) is None:
            return super().get_state_dict(model, unwrap)
        return gather_state_dict(self.unwrap_model(model) if unwrap else model, keep=self.is_local_main_process)

    def free_memory(self, *objects):
        self.gradients.forget()
        self._communicators = []
        return super().free_memory(*objects)

    def save_state(self, output_dir=None, safe_serialization: bool = True, **kwargs):
        """accelerate's save_state with whole weights in one file and optimizer state for each rank with its own."""
        if self.dims.tp_size == 1 and self.gradients.scape is None:
            return super().save_state(output_dir, safe_serialization, **kwargs)
        optimizers, self._optimizers = self._optimizers, []
        try:
            location = super().save_state(output_dir, safe_serialization, **kwargs)
        finally:
            self._optimizers = optimizers
        states = [optimizer.state_dict() for optimizer in optimizers]
        save_optimizer_states(Path(location), states, self.dims, per_dp_rank=self.gradients.scape is not None)
        if self.is_main_process:
            save_options(Path(location), self.options, self.dims, self._communicators)
        self.wait_for_everyone()
        return location

    def load_state(self, input_dir=None, load_kwargs=None, **kwargs):
        if self.dims.tp_size == 1 and self.gradients.scape is None:
            return super().load_state(input_dir, load_kwargs, **kwargs)
        if input_dir is None:
            raise ValueError("load_state needs the folder's name with tp_size > 1 or ScapeAdamS")
        states = load_optimizer_states(Path(input_dir).expanduser(), self.dims, merge_for_other_dp_size)
        optimizers, self._optimizers = self._optimizers, []
        try:
            super().load_state(input_dir, load_kwargs, **kwargs)
        finally:
            self._optimizers = optimizers
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        repeat_options(Path(input_dir).expanduser(), self.dims, self._communicators)


class _SyncedOptimizer(AcceleratedOptimizer):
    """The step of loops that never clip: what clipping would have done first."""

    def step(self, closure=None):
        if not self.gradient_state.sync_gradients:
            return super().step(closure)
        accelerator = self.accelerator
        if closure is None:
            accelerator.before_step(self)
        super().step(closure)
        if isinstance(
            self.optimizer, ScapeAdamS
        ):  # GradScaler leaves the decision to it, and accelerate cannot see it
            self._is_overflow = self.optimizer.last_step_skipped
        self.accelerator.after_step()


class _DataParallelScheduler(AcceleratedScheduler):
    """accelerate steps a scheduler once per process of the world; here that means data-parallel ranks."""

    def step(self, *args, **kwargs):
        skipped = any(opt.step_was_skipped for opt in self.optimizers)
        if not self.step_with_optimizer or self.split_batches or not self.gradient_state.sync_gradients or skipped:
            return super().step(*args, **kwargs)
        for _ in range(self.num_processes):
            # OneCycle refuses steps past its end
            if self.scheduler._step_count <= getattr(self.scheduler, "total_steps", self.scheduler._step_count):
                self.scheduler.step(*args, **kwargs)


def _unwrap(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _has_objects(data) -> bool:
    try:
        recursively_apply(lambda t: t, data, error_on_other_type=True)
    except TypeError:
        return True
    return False
