"""Every toggle and its validation; no tensors, no groups."""

import os
from dataclasses import dataclass, field, fields

import torch
from transformers import TrainingArguments

from .codecs import list_codecs
from .collectives.dispatch import BACKENDS
from .collectives.presets import codec_choices, codec_pair
from .sync.scape_adams import CHOICES as SCAPE_CHOICES

DP_SYNCS = ("dense", "scape")
RESIDUAL_DEVICES = ("cuda", "cpu")

NUMBERS = {"tp_size": int, "check_replicas": int, "heartbeat_timeout": float}
SCAPE_NUMBERS = {"scape_density": float, "scape_hold_steps": float, "scape_warmup_steps": float}
# fields of TrainingArguments that decide which collectives a step makes, or what the ranks' weights become
AGREED_ARGUMENTS = (
    "use_adams", "seed", "max_steps", "num_train_epochs", "gradient_accumulation_steps", "per_device_train_batch_size",
    "learning_rate", "weight_decay", "max_grad_norm", "bf16", "fp16", "gradient_checkpointing",
)  # fmt: skip
# optimizers whose update of an element depends on that element alone: right on slices of a matrix
# classes of torch and transformers whose update does not
WHOLE_MATRIX_OPTIMIZERS = ("Adafactor", "Muon", "LBFGS", "SparseAdam")
DEFAULT_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
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
            "hadamard-int4, none (uncompressed), one that was registered, or a preset of a forward and a backward "
            "one: int8-int4, int6-int4."
        },
    )
    tp_codec_backward: str | None = field(
        default=None,
        metadata={
            "help": "Wire format of the backward messages; if not given, what tp_codec says. Not with a preset."
        },
    )
    tp_backend: str = field(
        default="auto",
        metadata={
            "help": "c10d (the process group's collectives), symm_mem (fused kernels over symmetric memory), or auto: "
            "measured at start."
        },
    )
    tp_min_bytes: str = field(
        default="auto",
        metadata={
            "help": "Messages of fewer bytes travel uncompressed; auto measures at start what is fastest at which "
            "size (all ranks agree on it, checkpoints keep it)."
        },
    )
    sequence_parallel: bool = field(
        default=False,
        metadata={
            "help": "While gradients are computed, each tensor-parallel rank keeps a piece of the sequence between "
            "blocks: an all-reduce becomes a reduce-scatter and an all-gather, each compressed. Needs tp_size > 1."
        },
    )
    dp_sync: str = field(
        default="dense",
        metadata={"help": "How data-parallel ranks synchronise: dense gradients, or scape (sparse momentum, AdamS)."},
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
        """ValueError with the valid choices for the first toggle that is wrong; makes numbers of strings."""
        self._to_numbers(NUMBERS)
        choices = {"tp_backend": BACKENDS, "dp_sync": DP_SYNCS}
        for name, valid in choices.items():
            self._check_choice(name, getattr(self, name), valid)
        self._check_choice("tp_codec", self.tp_codec, codec_choices())
        if self.tp_codec_backward is not None:
            self._check_choice("tp_codec_backward", self.tp_codec_backward, list_codecs())
        codec_pair(self.tp_codec, self.tp_codec_backward)
        if self.tp_size < 1:
            raise ValueError(f"tp_size must be at least 1, got {self.tp_size}")
        if self.sequence_parallel and self.tp_size == 1:
            raise ValueError(
                "sequence_parallel splits the sequence over tensor-parallel ranks: set tp_size to 2 or more, or leave "
                "sequence_parallel false"
            )
        if self.check_replicas < 0:
            raise ValueError(f"check_replicas must be 0 (never) or a number of steps, got {self.check_replicas}")
        if self.heartbeat_timeout < 0:
            raise ValueError(f"heartbeat_timeout must be 0 (never) or seconds, got {self.heartbeat_timeout}")
        if self.tp_min_bytes != "auto":
            try:
                self.tp_min_bytes = int(self.tp_min_bytes)
            except (TypeError, ValueError):
                raise ValueError(
                    f"tp_min_bytes must be auto or a number of bytes, got {self.tp_min_bytes!r}"
                ) from None
            if self.tp_min_bytes < 0:
                raise ValueError(f"tp_min_bytes must not be negative, got {self.tp_min_bytes}")

    def settings_to_agree(self) -> dict:
        """What every rank must have been started with alike."""
        return {name: getattr(self, name) for name in TacoScapeOptions.names()}

    def _to_numbers(self, kinds: dict[str, type]) -> None:
        """YAML reads 1e-2 as a string, as transformers' own arguments have to expect too."""
        for name, kind in kinds.items():
            value = getattr(self, name)
            try:
                number = kind(value)
            except (TypeError, ValueError):
                raise ValueError(f"{name} must be a number, got {value!r}") from None
            if isinstance(value, bool) or number != float(value):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
            setattr(self, name, number)

    @staticmethod
    def _check_choice(name: str, value: str, valid) -> None:
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
    """transformers.TrainingArguments and the toggles of this package, for the command line, JSON, YAML and Python.

    The toggles below choose the Trainer's optimizer; an own loop builds AdamS or ScapeAdamS itself.
    """

    use_adams: bool = field(default=False, metadata={"help": "Dense AdamS instead of optim: SCAPE's baseline."})
    scape_density: float = field(
        default=0.01, metadata={"help": "Share of each matrix that is sent a step, in (0, 1]: 0.01 is 99 % sparse."}
    )
    scape_second_moment: str = field(
        default="factored",
        metadata={
            "help": "factored (a row's times a column's), row (a row's alone), or adams (the paper: last momentum)."
        },
    )
    scape_mask: str = field(
        default="topk", metadata={"help": "topk (the paper: an owner's largest), cyclic or random (no mask traffic)."}
    )
    scape_clip: str = field(
        default="local", metadata={"help": "local (each rank's gradient by its own norm) or ghat (the paper)."}
    )
    scape_hold_steps: float = field(
        default=0.1, metadata={"help": "Dense start: a number of steps, or a share of max_steps if below 1. Paper: 0."}
    )
    scape_warmup_steps: float = field(
        default=0.4, metadata={"help": "Geometric fall of the density after it: steps, or a share of max_steps."}
    )
    scape_values: str = field(
        default="fp32", metadata={"help": "Payload: fp32, or bf16 with its rounding fed back into the residual."}
    )
    scape_residual_device: str = field(
        default="cuda", metadata={"help": "Where residuals are kept: cuda (beside the parameters) or cpu (offload)."}
    )

    def __post_init__(self) -> None:
        self.validate()
        self._check_scape()
        if not torch.accelerator.is_available():
            self.use_cpu = True
        super().__post_init__()
        check_launch(self.world_size)
        if self.tp_size > 1:
            self._check_tensor_parallel()

    def settings_to_agree(self) -> dict:
        scape = [f.name for f in fields(self) if f.name.startswith("scape_")]
        return super().settings_to_agree() | {name: getattr(self, name) for name in (*scape, *AGREED_ARGUMENTS)}

    def _check_scape(self) -> None:
        self._to_numbers(SCAPE_NUMBERS)
        choices = {f"scape_{name}": valid for name, valid in SCAPE_CHOICES.items()}
        for name, valid in (choices | {"scape_residual_device": RESIDUAL_DEVICES}).items():
            self._check_choice(name, getattr(self, name), valid)
        if not 0 < self.scape_density <= 1:
            raise ValueError(f"scape_density must lie in (0, 1], got {self.scape_density} (0.01 sends 1 %)")
        for name in ("scape_hold_steps", "scape_warmup_steps"):
            value = getattr(self, name)
            if value < 0 or (value >= 1 and value != int(value)):
                raise ValueError(f"{name} must be a share below 1 or a whole number of steps, got {value}")
        shares = [v for v in (self.scape_hold_steps, self.scape_warmup_steps) if v < 1]
        if self.dp_sync == "scape" and sum(shares) > 1:
            raise ValueError(
                f"scape_hold_steps and scape_warmup_steps are shares of max_steps: {sum(shares)} is over 1"
            )
        if self.dp_sync == "scape" and self.use_adams:
            raise ValueError("use_adams is dense AdamS and dp_sync scape a sparse one: choose one of them")
        own_optimizer = [name for name in ("dp_sync scape", "use_adams") if self._wants(name)]
        if own_optimizer and self.optim not in DEFAULT_OPTIMIZERS:
            raise ValueError(
                f"{own_optimizer[0]} brings its own optimizer: leave optim at its default, not {self.optim}"
            )

    def _wants(self, what: str) -> bool:
        return self.use_adams if what == "use_adams" else self.dp_sync == "scape"

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
