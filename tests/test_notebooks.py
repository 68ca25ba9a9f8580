"""Every notebook runs from top to bottom, in a fresh kernel of this environment."""

import pathlib
import sys

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((pathlib.Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
# what a run must have printed, for notebooks whose cells could succeed without doing their work
EXPECTED = {"quickstart.ipynb": ["times less", "GPT2LMHeadModel"]}


@pytest.fixture(autouse=True)
def this_environments_kernel(monkeypatch, tmp_path):
    """Kernel specifications of the machine may start another Python."""
    from ipykernel.kernelspec import write_kernel_spec

    write_kernel_spec(tmp_path / "kernels" / "python3", overrides={"argv": [sys.executable, *KERNEL]})
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


KERNEL = ["-m", "ipykernel_launcher", "-f", "{connection_file}"]


def test_there_are_notebooks():
    assert {path.name for path in NOTEBOOKS} >= set(EXPECTED)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_notebook_runs(path):
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    )
    client.execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    printed = "".join(out.get("text", "") for out in outputs)
    for text in EXPECTED.get(path.name, []):
        assert text in printed
    if path.name == "quickstart.ipynb":
        assert any("image/png" in out.get("data", {}) for out in outputs), "the loss was not drawn"
