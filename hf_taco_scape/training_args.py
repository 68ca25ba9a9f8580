"""Every toggle and its validation; no tensors, no groups."""

import os
from dataclasses import dataclass, field, fields

import torch
from transformers import TrainingArguments

from .codecs import list_codecs

TP_BACKENDS = ("auto", "c10d")
DP_SYNCS = ("dense",)
# named in the documentation, refused by name until they exist
NOT_YET = {"tp_backend": ("symm_mem",), "dp_sync": ("scape",)}

# optimizers whose update of an element depends on that element alone: right on slices of a matrix
ELEMENTWISE_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")


@dataclass
class TacoScapeOptions:
    """What both routes (Trainer and own loop) share; each field is a command-line flag of TacoScapeArguments."""

    tp_size: int = field(
        default=1,
        metadata={"help": "Ranks one copy of the model is split over; must divide the number of processes."},
    )
    tp_codec: str = field(
        default="taco",
        metadata={
            "help": "Wire format of tensor-parallel messages: taco, fp8, int8, hadamard-int8, hadamard-int6, "
            "hadamard-int4, none (uncompressed), or one that was registered."
        },
    )
    tp_codec_backward: str | None = field(
        default=None, metadata={"help": "Wire format of the backward messages; the same as tp_codec if not given."}
    )
    tp_backend: str = field(
        default="auto", metadata={"help": "auto or c10d: the process group's collectives (symm_mem is not built yet)."}
    )
    tp_min_bytes: str = field(
        default="auto",
        metadata={
            "help": "Messages of fewer bytes travel uncompressed; auto measures the crossover at start (all ranks "
            "agree on it and checkpoints keep it)."
        },
    )
    sequence_parallel: bool = field(default=False, metadata={"help": "Not built yet."})
    dp_sync: str = field(
        default="dense", metadata={"help": "How data-parallel gradients are averaged: dense (scape is not built yet)."}
    )
    check_replicas: int = field(
        default=0,
        metadata={"help": "Every N optimizer steps compare replicated parameters bit by bit over ranks; 0 never."},
    )
    heartbeat_timeout: float = field(
        default=120.0,
        metadata={"help": "Seconds without a sign of life after which a rank is declared dead by name; 0 never."},
    )

    def validate(self) -> None:
        """ValueError with the valid choices for the first toggle that is wrong; makes tp_min_bytes auto or an int."""
        for name, valid in (("tp_backend", TP_BACKENDS), ("dp_sync", DP_SYNCS)):
            self._check_choice(name, getattr(self, name), valid)
        self._check_choice("tp_codec", self.tp_codec, list_codecs())
        if self.tp_codec_backward is not None:
            self._check_choice("tp_codec_backward", self.tp_codec_backward, list_codecs())
        if self.sequence_parallel:
            raise ValueError("sequence_parallel is not built yet: leave it false")
        if self.tp_size < 1:
            raise ValueError(f"tp_size must be at least 1, got {self.tp_size}")
        if self.check_replicas < 0:
            raise ValueError(f"check_replicas must be 0 (never) or a number of steps, got {self.check_replicas}")
        if self.heartbeat_timeout < 0:
            raise ValueError(f"heartbeat_timeout must be 0 (never) or seconds, got {self.heartbeat_timeout}")
        if self.tp_min_bytes != "auto":
            try:
                self.tp_min_bytes = int(self.tp_min_bytes)
            except ValueError:
                raise ValueError(
                    f"tp_min_bytes must be auto or a number of bytes, got {self.tp_min_bytes!r}"
                ) from None
            if self.tp_min_bytes < 0:
                raise ValueError(f"tp_min_bytes must not be negative, got {self.tp_min_bytes}")

    @staticmethod
    def _check_choice(name: str, value: str, valid) -> None:
        if value in NOT_YET.get(name, ()):
            raise ValueError(f"{name} {value!r} is not built yet; choose one of: {', '.join(valid)}")
        if value not in valid:
            raise ValueError(f"{name} {value!r} is not known; choose one of: {', '.join(valid)}")

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in fields(TacoScapeOptions)]


def check_launch(world_size: int) -> None:
    """RuntimeError where a launcher started several processes that do not see each other.

    Without an accelerator, and without being told to use the CPU, Hugging Face's state starts no process group: each
    process would train alone on all of the data.
    """
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if world_size != launched:
        raise RuntimeError(
            f"the launcher started {launched} processes, but this one sees {world_size}: each would train alone. "
            "Launch with `accelerate launch --multi_gpu --num_processes N ...` (on CPU too), without `--cpu`"
        )


@dataclass
class TacoScapeArguments(TacoScapeOptions, TrainingArguments):
    """transformers.TrainingArguments and the toggles of this package, for the command line, JSON, YAML and Python."""

    def __post_init__(self) -> None:
        self.validate()
        if not torch.accelerator.is_available():
            self.use_cpu = True
        super().__post_init__()
        check_launch(self.world_size)
        if self.tp_size > 1:
            self._check_tensor_parallel()

    def _check_tensor_parallel(self) -> None:
        refused = {
            "train_sampling_strategy='batch_rebalance' (it shards over all processes)": getattr(
                self, "train_sampling_strategy", None
            )
            == "batch_rebalance",
            "auto_find_batch_size (one rank out of memory would leave the others waiting)": self.auto_find_batch_size,
            "accelerator_config.dispatch_batches=True (its dispatcher knows the world only)": bool(
                self.accelerator_config.dispatch_batches
            ),
            "accelerator_config.use_seedable_sampler=False (peers would shuffle differently)": (
                not self.accelerator_config.use_seedable_sampler
            ),
            "accelerator_config.split_batches=True": self.accelerator_config.split_batches,
            "fsdp": bool(self.fsdp),
            "deepspeed": bool(self.deepspeed),
            "parallelism_config (tp_size takes its place)": self.parallelism_config is not None,
            f"optim={self.optim.value!r} (its update needs whole matrices; elementwise ones are right on slices: "
            f"{', '.join(ELEMENTWISE_OPTIMIZERS)})": self.optim.value not in ELEMENTWISE_OPTIMIZERS,
        }
        for what, wrong in refused.items():
            if wrong:
                raise ValueError(f"tp_size {self.tp_size} does not work with {what}")
