"""The kernels' logic without a GPU: their tests in Triton's interpreter, in a process of its own."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton")
@pytest.mark.parametrize("file", ["test_kernels.py", "test_scape_kernels.py"])
def test_kernels_in_the_interpreter(file):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{file}"]
    root = pathlib.Path(__file__).parent.parent
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, timeout=550)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
