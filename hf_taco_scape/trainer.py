"""TacoScapeTrainer: thin overrides of transformers.Trainer; no maths here.

The Trainer's loop, logs, callbacks and files stay; the model is split before placement, accelerate is shown the
data-parallel world (accelerator.py), and checkpoints are gathered into plain ones.
"""

import contextlib
import logging
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from .accelerator import TacoScapeAccelerator
from .parallel import ParallelDims, gather_state_dict, split_state
from .parallel.heartbeat import wait_for_all
from .parallel.optimizer_state import load_optimizer_states, save_optimizer_states, saved_tp_size
from .resume import repeat_options, save_options
from .scape import merge_for_other_dp_size, optimizer_class_and_arguments, scape_figures
from .training_args import TacoScapeArguments

SAVE_TIMEOUT_S = 120.0


class TacoScapeTrainer(Trainer):
    """transformers.Trainer with tensor and data parallelism; same arguments, with TacoScapeArguments as args.

    Every process passes the same whole model (or model_init); with tp_size > 1 it is split in place. Saving and
    evaluation are collective: call them on all processes.
    """

    def __init__(self, model=None, args: TacoScapeArguments | None = None, **kwargs) -> None:
        if not isinstance(args, TacoScapeArguments):
            raise ValueError(
                f"args must be TacoScapeArguments (TrainingArguments and the toggles), got {type(args).__name__}"
            )
        if args.log_level != "passive":
            logging.getLogger("hf_taco_scape").setLevel(args.get_process_log_level())
        self._seen_bytes: dict[str, int] = {}
        self._whole_state_dict = None
        super().__init__(model=model, args=args, **kwargs)

    # ---- set-up
    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator = TacoScapeAccelerator.adopt(
            self.accelerator, ParallelDims.build(self.args.tp_size, self.args.settings_to_agree()), self.args
        )
        # the parent bound this to the accelerator's old class; rebinding keeps the flag that it passes
        self.gather_function = self._bind_gather()
        if self.model is not None:
            self._split(self.model)

    def call_model_init(self, trial=None):
        return self._split(super().call_model_init(trial))

    def _split(self, model):
        model = self.accelerator.split(model)
        state = split_state(model)
        if state is not None:
            state.comm.request_error_sample()
        return model

    def _bind_gather(self):
        use_object = self.args.eval_use_gather_object
        return lambda data: self.accelerator.gather_for_metrics(data, use_gather_object=use_object)

    def evaluation_loop(self, *args, **kwargs):
        output = super().evaluation_loop(*args, **kwargs)
        self.gather_function = self._bind_gather()  # the loop resets it to a bound method without the flag
        return output

    def get_total_train_batch_size(self, args) -> int:
        return self._train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            chosen = optimizer_class_and_arguments(self.args, self.state.max_steps)
            if chosen is not None:
                if self.optimizer_cls_and_kwargs is not None:
                    raise ValueError(
                        "dp_sync scape and use_adams bring their own optimizer: drop optimizer_cls_and_kwargs"
                    )
                self.optimizer_cls_and_kwargs = chosen
                try:
                    return super().create_optimizer(model)
                finally:
                    self.optimizer_cls_and_kwargs = None
        return super().create_optimizer(model)

    # ---- training
    def train(self, resume_from_checkpoint=None, **kwargs):
        heartbeat = self.accelerator.start_heartbeat()
        finished = False
        try:
            with heartbeat.explain() if heartbeat else contextlib.nullcontext():
                output = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
            finished = True
            return output
        finally:
            self.accelerator.stop_heartbeat(finished)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs.update(self._communication_figures())
        super().log(logs, start_time)

    def _communication_figures(self) -> dict[str, float]:
        """Bytes this rank sent since the last log, dense and as sent, and the codecs' sampled relative error."""
        figures = {}
        state = split_state(self.model)
        meters = {"tp": state.comm.meter if state else None, "dp": self.accelerator.gradients.meter}
        for axis, meter in meters.items():
            if meter is None or not meter.calls:
                continue
            dense = meter.dense_bytes - self._seen_bytes.get(f"{axis}_dense", 0)
            sent = meter.sent_bytes - self._seen_bytes.get(f"{axis}_sent", 0)
            self._seen_bytes |= {f"{axis}_dense": meter.dense_bytes, f"{axis}_sent": meter.sent_bytes}
            figures |= {f"{axis}_bytes_dense": dense, f"{axis}_bytes_sent": sent}
            if sent:
                figures[f"{axis}_compression"] = dense / sent
        figures |= scape_figures(self.optimizer)
        if state is not None:
            figures |= {f"tp_codec_error_{way}": error for way, error in state.comm.error_samples().items()}
            state.comm.request_error_sample()
        return figures

    # ---- checkpoints: weights are gathered on every rank and written once, optimizer state per tp rank
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write one plain checkpoint; with tp_size > 1 collective: every process has to call it."""
        if self.args.tp_size > 1:
            wait_for_all("trainer.save_model", SAVE_TIMEOUT_S)
        self._whole_state_dict = gather_state_dict(self.model, keep=self.args.should_save)
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._whole_state_dict = None
        if dist.is_initialized() and (_internal_call or self.args.tp_size > 1):
            dist.barrier()  # whoever reads the folder next must find it complete

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, self._whole_state_dict if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        if self.args.should_save:
            save_options(folder, self.args, self.accelerator.dims, self._communicators)
        if self.args.tp_size == 1 and not self._scape:
            return super()._save_optimizer_and_scheduler(output_dir)
        save_optimizer_states(folder, [self.optimizer.state_dict()], self.accelerator.dims, per_dp_rank=self._scape)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        repeat_options(folder, self.accelerator.dims, self._communicators)
        saved = saved_tp_size(folder)
        if saved is None and not (folder / SCHEDULER_NAME).is_file():
            return  # written with save_only_model: weights are all there is, as in the parent
        if self.args.tp_size == 1 and not self._scape and (folder / OPTIMIZER_NAME).is_file():
            # not the parent's: transformers 5.17 asks torch for a device "cpu:0" here, which it does not know
            state = torch.load(folder / OPTIMIZER_NAME, map_location="cpu", weights_only=True)
        else:
            (state,) = load_optimizer_states(folder, self.accelerator.dims, merge_for_other_dp_size)
        self.optimizer.load_state_dict(state)
        self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, map_location="cpu", weights_only=True))

    @property
    def _scape(self) -> bool:
        return self.args.dp_sync == "scape"

    @property
    def _communicators(self) -> list:
        state = split_state(self.model)
        return [state.comm] if state else []
