"""What a resumed run repeats of the run it resumes, beside weights, optimizer and random states: one small file."""

import json
from collections.abc import Sequence
from pathlib import Path

from .collectives.dispatch import Communicator
from .parallel import ParallelDims
from .training_args import TacoScapeOptions

OPTIONS_NAME = "hf_taco_scape.json"


def save_options(
    folder: Path, options: TacoScapeOptions, dims: ParallelDims, communicators: Sequence[Communicator]
) -> None:
    """Write sizes, toggles and the measured routes of each split model; one process calls it."""
    toggles = {name: getattr(options, name) for name in TacoScapeOptions.names()}
    routes = [comm.choice_to_repeat() for comm in communicators]
    content = {**toggles, "tp_size": dims.tp_size, "dp_size": dims.dp_size, "routes": routes}
    (folder / OPTIONS_NAME).write_text(json.dumps(content, indent=1))


def repeat_options(folder: Path, dims: ParallelDims, communicators: Sequence[Communicator]) -> None:
    """Let each split model send its messages as the checkpoint's run did; collective over the world.

    Only what was measured is repeated: toggles are for this run to say.
    """
    file = folder / OPTIONS_NAME
    routes = json.loads(file.read_text())["routes"] if file.is_file() else []
    for place, comm in enumerate(communicators):
        comm.repeat_choice(routes[place] if place < len(routes) else None, dims.wide_groups())
