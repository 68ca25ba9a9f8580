"""Loading a checkpoint straight into slices: each rank reads its own part of every split tensor and nothing else."""

import json
from pathlib import Path

import torch
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .parallelize import parallelize
from .sharding import Shard


def from_pretrained(
    name: str,
    tp_group,
    *,
    model_class=AutoModelForCausalLM,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    revision: str | None = None,
    config=None,
    **parallelize_arguments,
) -> nn.Module:
    """Load a safetensors checkpoint (hub name or folder) as a split model; collective over `tp_group`.

    No rank ever holds a whole split tensor. `model_class` is any class with from_config; `dtype` "auto" keeps the
    checkpoint's; further arguments go to `parallelize` (codec, plan, codec_backward, min_bytes). The model is returned
    in evaluation mode, as transformers does. A group of one (or None) loads everything.

    Raises ValueError where the folder has no safetensors file or lacks a tensor of the model (a freshly initialised
    task head must be equal on all ranks: load the whole model with transformers and use `parallelize`).
    """
    folder = Path(name)
    if not folder.is_dir():
        patterns = ["*.safetensors", "*.safetensors.index.json", "*config.json"]
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    config = AutoConfig.from_pretrained(folder) if config is None else config
    if isinstance(dtype, str):
        dtype = (config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    # buffers (rotary frequencies) are computed by the constructors and are not in the file: they must be real
    with init_empty_weights(include_buffers=False):
        model = model_class.from_config(config, dtype=dtype)
    parallelize(model, tp_group, **parallelize_arguments)
    with _Checkpoint(folder) as checkpoint:
        _fill(model, checkpoint, dtype, torch.device(device))
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.to(device).eval()


class _Checkpoint:
    """Names to open safetensors files, one file or an index of several."""

    def __init__(self, folder: Path) -> None:
        index, single = folder / SAFE_WEIGHTS_INDEX_NAME, folder / SAFE_WEIGHTS_NAME
        if index.is_file():
            files = sorted({folder / file for file in json.loads(index.read_text())["weight_map"].values()})
        elif single.is_file():
            files = [single]
        else:
            raise ValueError(f"{folder} has no {SAFE_WEIGHTS_NAME} and no {SAFE_WEIGHTS_INDEX_NAME}")
        self._files = [safe_open(file, framework="pt") for file in files]
        self._by_name = {key: file for file in self._files for key in file.keys()}

    def __enter__(self) -> "_Checkpoint":
        return self

    def __exit__(self, *exc) -> None:
        for file in self._files:
            file.__exit__(*exc)

    def find(self, name: str, prefix: str) -> str | None:
        """The tensor's name in the file: base models are saved without the prefix that task models put before it."""
        for candidate in (name, name.removeprefix(prefix), prefix + name):
            if candidate in self._by_name:
                return candidate
        return None

    def read(self, key: str, shard: Shard | None, rank: int) -> torch.Tensor:
        if shard is None:
            return self._by_name[key].get_tensor(key)
        whole = self._by_name[key].get_slice(key)
        before = (slice(None),) * shard.dim
        parts = [whole[(*before, slice(start, stop))] for start, stop in shard.ranges[rank]]
        return torch.cat(parts, shard.dim) if len(parts) > 1 else parts[0].contiguous()


@torch.no_grad()
def _fill(model: nn.Module, checkpoint: _Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
    prefix = model.base_model_prefix + "."
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    missing = []
    for module_name, module in model.named_modules():
        shards = getattr(module, "tp_shards", {})
        persistent = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, old in [*module._parameters.items(), *persistent.items()]:
            if old is None:
                continue
            full_name = f"{module_name}.{name}" if module_name else name
            key = checkpoint.find(full_name, prefix)
            if key is None:
                if full_name not in tied:
                    missing.append(full_name)
                continue
            tensor = checkpoint.read(key, shards.get(name), getattr(module, "tp_rank", 0))
            tensor = tensor.to(device, dtype if tensor.is_floating_point() else None)
            if name in module._parameters:
                module._parameters[name] = nn.Parameter(tensor, requires_grad=old.requires_grad)
            else:
                module._buffers[name] = tensor
    if missing:
        raise ValueError(
            f"the checkpoint lacks {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}: load the whole model "
            "with transformers, which initialises what is missing, and split it with parallelize(model, tp_group)"
        )
    model.tie_weights()
