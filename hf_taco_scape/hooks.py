"""Private or unpromised hooks of transformers, accelerate and torch that this package relies on, checked at import.

A release that moves one of them fails here with its name, not in the middle of a run.
"""

import inspect

import accelerate
import transformers
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

# class -> method -> its parameters (without self) as we override or call it
SIGNATURES = {
    Trainer: {
        "create_accelerator_and_postprocess": [],
        "call_model_init": ["trial"],
        "get_total_train_batch_size": ["args"],
        "save_model": ["output_dir", "_internal_call"],
        "_save": ["output_dir", "state_dict"],
        "_save_optimizer_and_scheduler": ["output_dir"],
        "_load_optimizer_and_scheduler": ["checkpoint"],
        "log": ["logs", "start_time"],
        "create_optimizer": ["model"],
        "evaluation_loop": [
            "dataloader",
            "description",
            "prediction_loss_only",
            "ignore_keys",
            "metric_key_prefix",
        ],
    },
    Accelerator: {
        "prepare_model": ["model", "device_placement", "evaluation_mode"],
        "prepare_optimizer": ["optimizer", "device_placement"],
        "prepare_scheduler": ["scheduler"],
        "clip_grad_norm_": ["parameters", "max_norm", "norm_type"],
        "clip_grad_value_": ["parameters", "clip_value"],
        "gather": ["tensor"],
        "gather_for_metrics": ["input_data", "use_gather_object"],
        "reduce": ["tensor", "reduction", "scale"],
        "backward": ["loss", "kwargs"],
        "unscale_gradients": ["optimizer"],
        "get_state_dict": ["model", "unwrap"],
        "free_memory": ["objects"],
        "save_state": ["output_dir", "safe_serialization", "save_model_func_kwargs"],
        "load_state": ["input_dir", "load_kwargs", "load_model_func_kwargs"],
        "split_between_processes": ["inputs", "apply_padding"],
        "end_training": [],
    },
    AcceleratedOptimizer: {"step": ["closure"]},
    AcceleratedScheduler: {"step": ["args", "kwargs"]},
    DistributedDataParallel: {"_set_params_and_buffers_to_ignore_for_model": ["params_and_buffers_to_ignore"]},
}
PROPERTIES = {Accelerator: ["num_processes", "process_index", "dispatch_batches"]}
# method -> a piece of its source that shows it still does what we build on
SOURCES = {
    (Accelerator, "prepare_data_loader"): "num_processes=self.num_processes",
    (Accelerator, "gather_for_metrics"): "self.gather(input_data)",
    # attributes that we read or set
    (Accelerator, "__init__"): "self._optimizers",
    (Trainer, "__init__"): "self._train_batch_size",
    (AcceleratedOptimizer, "step"): "self._is_overflow",
    (AcceleratedScheduler, "step"): "self.step_with_optimizer",
    (GradScaler, "unscale_"): '["found_inf_per_device"]',
    (Trainer, "_get_grad_norm"): 'self.accelerator.clip_grad_norm_(model.parameters(), float("inf"))',
    (Trainer, "_get_num_items_in_batch"): "self.accelerator.gather(",
}


def check_hooks() -> None:
    """ImportError that names the first hook which is not as expected."""
    versions = f"transformers {transformers.__version__}, accelerate {accelerate.__version__}"

    def fail(what: str) -> None:
        raise ImportError(
            f"hf_taco_scape does not fit {versions}: {what}. Install a supported version (transformers >= 5.17, "
            "accelerate 1.15) or a newer hf_taco_scape"
        )

    for cls, methods in SIGNATURES.items():
        for name, expected in methods.items():
            found = list(inspect.signature(getattr(cls, name)).parameters)[1:] if hasattr(cls, name) else None
            if found != expected:
                fail(f"{cls.__name__}.{name} takes {found}, expected {expected}")
    for cls, names in PROPERTIES.items():
        for name in names:
            if not isinstance(inspect.getattr_static(cls, name, None), property):
                fail(f"{cls.__name__}.{name} is not a property")
    for (cls, name), piece in SOURCES.items():
        if piece not in inspect.getsource(getattr(cls, name)):
            fail(f"{cls.__name__}.{name} no longer contains `{piece}`")


check_hooks()
