"""Rooms import only rooms below them, nothing imports recipes, and importing the package stays light."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = "hf_taco_scape"
HUGGING_FACE = {"transformers", "accelerate", "datasets", "evaluate", "peft", "huggingface_hub"}

# room -> the rooms it may import besides itself; "" is the package root, which may import all of them
ALLOWED = {
    "kernels": set(),
    "codecs": {"kernels"},
    "collectives": {"kernels", "codecs"},
    "plans": set(),
    "optim": set(),
    "layers": {"kernels", "codecs", "collectives"},
    "sync": {"kernels", "codecs", "collectives", "plans", "optim"},
    "parallel": {"kernels", "codecs", "collectives", "layers", "plans"},
}
ALLOWED[""] = set(ALLOWED)

# room -> modules that it must not import, whatever else it does
FORBIDDEN = {room: set() for room in ALLOWED} | {
    room: HUGGING_FACE for room in ("kernels", "codecs", "collectives", "optim", "sync")
}
FORBIDDEN["plans"] = {"torch.distributed", "triton"}
FORBIDDEN["optim"] = FORBIDDEN["optim"] | {"torch.distributed", "triton"}


def imported_modules(source: str, module: str) -> set[str]:
    """Absolute dotted names of everything that `source`, the text of `module`, imports, wherever in it.

    `module` names a package as `name.__init__`. `from a import b` counts as a.b as well: b may be a module.
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def room_of(module: str) -> str:
    """The room of a dotted name inside the package; "" for the root's own modules and names."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ALLOWED else ""


def violations(source: str, module: str) -> list[str]:
    """What `module` imports against the table."""
    room, found = room_of(module), []
    for name in sorted(imported_modules(source, module)):
        top = name.partition(".")[0]
        if top == "recipes":
            found.append(f"{module} imports {name}: nothing imports recipes")
        elif top == PACKAGE and room_of(name) not in {room, *ALLOWED[room]}:
            found.append(f"{module} imports {name}: {room or 'the root'} may import {sorted(ALLOWED[room])} only")
        elif any(name == f or name.startswith(f"{f}.") for f in FORBIDDEN[room]):
            found.append(f"{module} imports {name}: not from {room}")
    return found


def package_modules() -> dict[str, pathlib.Path]:
    """Dotted name -> file; kernels/ at the top of the checkout is the room hf_taco_scape.kernels."""
    out = {}
    for folder, prefix in ((ROOT / PACKAGE, PACKAGE), (ROOT / "kernels", f"{PACKAGE}.kernels")):
        for path in sorted(folder.rglob("*.py")):
            out[".".join([prefix, *path.relative_to(folder).with_suffix("").parts])] = path
    return out


def test_rooms_import_downwards_only():
    modules = package_modules()
    assert len(modules) > 10
    found = [v for module, path in modules.items() for v in violations(path.read_text(encoding="utf-8"), module)]
    assert not found, "\n".join(found)


def test_table_has_every_room():
    rooms = {p.parent.name for p in (ROOT / PACKAGE).glob("*/__init__.py")} | {"kernels"}
    assert rooms == set(ALLOWED) - {""}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("codecs.taco", "from hf_taco_scape.collectives import all_reduce"),
        ("codecs.taco", "from hf_taco_scape import collectives"),
        ("codecs.taco", "from hf_taco_scape import get_codec"),
        ("codecs.__init__", "from ..collectives.meter import ByteMeter"),
        ("codecs.taco", "def f():\n    from .. import layers"),
        ("collectives.dispatch", "import hf_taco_scape.layers.linear"),
        ("collectives.dispatch", "from ..trainer import TacoScapeTrainer"),
        ("layers.linear", "from hf_taco_scape.parallel import parallelize"),
        ("plans.llama", "from ..layers import linear"),
        ("plans.llama", "import torch.distributed as dist"),
        ("optim.adams", "from torch import distributed"),
        ("sync.mask", "from transformers import Trainer"),
        ("parallel.parallelize", "from hf_taco_scape.sync import mask"),
        ("trainer", "from recipes.finetune import main"),
        ("kernels.taco", "from hf_taco_scape.codecs import get_codec"),
    ],
)
def test_forbidden_import_is_caught(module, source):
    assert violations(source, f"{PACKAGE}.{module}")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("codecs.taco", "from .codec import Codec\nfrom hf_taco_scape.kernels import hadamard"),
        ("collectives.dispatch", "from ..codecs import get_codec\nimport torch.distributed as dist"),
        ("parallel.__init__", "from .parallelize import parallelize\nfrom ..plans import plan"),
        ("optim.adams", "import torch\nfrom torch.optim import Optimizer"),
        ("trainer", "from transformers import Trainer\nfrom .parallel import ParallelDims"),
    ],
)
def test_allowed_import_passes(module, source):
    assert violations(source, f"{PACKAGE}.{module}") == []


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_loads_neither_torch_nor_transformers():
    heavy = "{'torch', 'transformers', 'triton', 'accelerate', 'datasets', 'numpy'}"
    assert run_python(f"import sys, hf_taco_scape; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_no_module_starts_cuda_or_compiles_at_import():
    names = [m.removesuffix(".__init__") for m in package_modules() if ".kernels" not in m]
    code = f"""
import importlib, os, sys
import torch
torch.cuda.init = torch.cuda._lazy_init = lambda *a: sys.exit("an import initialised CUDA")
for name in {names}:
    importlib.import_module(name)
print(torch.cuda.is_initialized())
"""
    assert run_python(code).splitlines()[-1] == "False"


def test_every_exported_name_exists():
    code = "import hf_taco_scape as h; print([n for n in h.__all__ if getattr(h, n) is None])"
    assert run_python(code).splitlines()[-1] == "[]"
