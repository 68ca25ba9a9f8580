"""kernels/ is hf_taco_scape.kernels however the package is installed, and never shadows the hub's `kernels`."""

import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent
SOURCES = ["hf_taco_scape", "kernels", "setup.py", "pyproject.toml", "README.md"]
PROBE = "packaging_probe"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> pathlib.Path:
    """A copy of the sources: builds write beside them. One more file in kernels/ shows which folder is imported."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    (copy / "kernels" / f"{PROBE}.py").write_text("OWNER = 'hf_taco_scape'\n")
    return copy


def make_environment(folder: pathlib.Path, hub_kernels: bool) -> pathlib.Path:
    """An empty environment that borrows this one's packages through a path file, so nothing is downloaded.

    Path files of a borrowed folder are not read: this environment's own editable install does not leak in.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    if hub_kernels:
        (site / "kernels").mkdir()
        (site / "kernels" / "__init__.py").write_text("OWNER = 'hugging face'\nclass LayerRepository: ...\n")
    return folder / "bin" / "python"


def install(python: pathlib.Path, *what: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-build-isolation"]
    run([*pip, "--no-index", "--ignore-installed", "--quiet", *what])


def run(command: list[str], cwd: pathlib.Path | None = None, **environment: str) -> str:
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=inherited | environment)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def check_imports(python: pathlib.Path, cwd: pathlib.Path, hub_kernels: bool, **environment: str) -> str:
    """Run the imports that must work; returns the folder that hf_taco_scape came from."""
    code = f"""
import hf_taco_scape, hf_taco_scape.kernels
from hf_taco_scape.kernels import {PROBE}
assert {PROBE}.OWNER == "hf_taco_scape"
assert getattr(hf_taco_scape.kernels, "__file__", None) is None, "kernels must stay a namespace package"
hf_taco_scape.get_codec
try:
    import kernels
    owner = getattr(kernels, "OWNER", "nobody")
except ImportError:
    owner = "nobody"
assert owner == {"hugging face" if hub_kernels else "nobody"!r}, f"`import kernels` gives the package of {{owner}}"
if {hub_kernels}:
    from kernels import LayerRepository
print(hf_taco_scape.__path__[0])
"""
    return run([str(python), "-c", code], cwd=cwd, **environment)


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> pathlib.Path:
    out, copy = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("build") / "checkout"
    shutil.copytree(checkout, copy)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", str(out)]
    run([*command, str(copy)])
    return next(out.glob("*.whl"))


def test_wheel_holds_every_source_file_and_no_kernels_init(checkout, wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.endswith(".py")}
    expected = {p.relative_to(checkout).as_posix() for p in (checkout / "hf_taco_scape").rglob("*.py")}
    expected |= {f"hf_taco_scape/{p.relative_to(checkout).as_posix()}" for p in (checkout / "kernels").rglob("*.py")}
    assert packed == expected
    assert not (ROOT / "kernels" / "__init__.py").exists()


# the checkout as working directory puts its kernels/ folder first on sys.path
@pytest.mark.parametrize("hub_kernels", [True, False], ids=["with_hub_kernels", "without"])
@pytest.mark.parametrize("inside_checkout", [True, False], ids=["in_checkout", "elsewhere"])
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_installed(kind, inside_checkout, hub_kernels, checkout, wheel, tmp_path):
    python = make_environment(tmp_path / "env", hub_kernels)
    install(python, *(["-e", str(checkout)] if kind == "editable" else [str(wheel)]))
    source = check_imports(python, checkout if inside_checkout else tmp_path, hub_kernels)
    if kind == "editable" or inside_checkout:
        assert pathlib.Path(source) == checkout / "hf_taco_scape"
    else:
        assert str(tmp_path / "env") in source


@pytest.mark.parametrize("hub_kernels", [True, False], ids=["with_hub_kernels", "without"])
def test_not_installed(hub_kernels, checkout, tmp_path):
    python = make_environment(tmp_path / "env", hub_kernels)
    check_imports(python, tmp_path, hub_kernels, PYTHONPATH=str(checkout))


def test_an_init_file_in_kernels_is_caught(checkout, tmp_path):
    mutant = tmp_path / "mutant"
    shutil.copytree(checkout, mutant)
    (mutant / "kernels" / "__init__.py").write_text("OWNER = 'hf_taco_scape'\n")
    python = make_environment(tmp_path / "env", hub_kernels=True)
    with pytest.raises(AssertionError, match=r"must stay a namespace package|gives the package of hf_taco_scape"):
        check_imports(python, mutant, hub_kernels=True)


def test_a_package_list_without_kernels_is_caught(checkout, tmp_path):
    mutant = tmp_path / "mutant"
    shutil.copytree(checkout, mutant, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    setup = (mutant / "setup.py").read_text()
    assert ', "hf_taco_scape.kernels"]' in setup
    (mutant / "setup.py").write_text(setup.replace(', "hf_taco_scape.kernels"]', "]"))
    python = make_environment(tmp_path / "env", hub_kernels=False)
    install(python, str(mutant))
    with pytest.raises(AssertionError, match="No module named 'hf_taco_scape.kernels'"):
        check_imports(python, tmp_path, hub_kernels=False)


def test_readme_lists_every_toggle_and_nothing_else():
    from transformers import TrainingArguments

    from hf_taco_scape import TacoScapeArguments

    own, theirs = ({f.name for f in dataclasses.fields(c)} for c in (TacoScapeArguments, TrainingArguments))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE))
    assert rows == own - theirs


def test_readme_tree_is_there():
    block = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What is where")[2].split("```")[1]
    # a line that starts with a folder's name; others go on with the text above
    folders = re.findall(r"^( *)(\w+)/ ", block, flags=re.MULTILINE)
    assert all((ROOT / name).is_dir() for indent, name in folders if not indent), folders
    rooms = {name for indent, name in folders if indent}
    assert rooms == {p.parent.name for p in (ROOT / "hf_taco_scape").glob("*/__init__.py")}
