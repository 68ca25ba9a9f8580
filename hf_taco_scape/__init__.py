"""Compressed tensor parallelism (TACO) and sparse data-parallel synchronisation (SCAPE) for Hugging Face training.

Names are imported on first use, so `import hf_taco_scape` starts no CUDA context and does not load transformers.
"""

import importlib
import pathlib

__version__ = "0.1.0"

_HERE = pathlib.Path(__file__).parent
# A checkout keeps the Triton kernels beside this folder (see setup.py); an installed package has them inside.
if not (_HERE / "kernels").exists():
    __path__.append(str(_HERE.parent))

_EXPORTS = {
    "TacoScapeArguments": "training_args",
    "TacoScapeTrainer": "trainer",
    "TacoScapeAccelerator": "accelerator",
    "ScapeCallback": "callback",
    "scape_optimizer": "scape",
    "AdamS": "sync",  # not optim, which knows torch only: sync hands it the Triton kernels
    "ScapeAdamS": "sync",
    "parallelize": "parallel",
    "gather_state_dict": "parallel",
    "save_pretrained": "parallel",
    "from_pretrained": "parallel",
    "get_codec": "codecs",
    "list_codecs": "codecs",
    "register_codec": "codecs",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str):
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
