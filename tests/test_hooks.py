"""Private hooks of transformers and accelerate are checked at import, by name."""

import os
import subprocess
import sys

import pytest
from accelerate import Accelerator
from transformers import Trainer

from hf_taco_scape import hooks


def test_hooks_fit_the_installed_versions():
    hooks.check_hooks()


@pytest.mark.parametrize(
    "owner,name,replacement,message",
    [
        (Trainer, "_save", lambda self, folder: None, "Trainer._save takes .*'folder'"),
        (Accelerator, "gather", None, "Accelerator.gather takes None"),
        (Accelerator, "num_processes", 3, "Accelerator.num_processes is not a property"),
        (Accelerator, "prepare_data_loader", lambda self: None, "prepare_data_loader no longer contains"),
    ],
    ids=lambda v: v if isinstance(v, str) and " " not in v else "",
)
def test_a_moved_hook_is_named(monkeypatch, owner, name, replacement, message):
    if replacement is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, replacement)
    with pytest.raises(ImportError, match=message):
        hooks.check_hooks()


def test_importing_the_trainer_checks_the_hooks():
    code = (
        "from accelerate import Accelerator; del Accelerator.gather\n"
        "try:\n    import hf_taco_scape.trainer\n"
        "except ImportError as error:\n    print('REFUSED', error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert "REFUSED hf_taco_scape does not fit transformers" in done.stdout, done.stderr
