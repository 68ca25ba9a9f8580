"""A Trainer run in processes of its own (torchrun), on whatever devices there are; writes each rank's result."""

import json
import os
import sys

import torch
import training


def main(settings: str, folder: str) -> None:
    options = json.loads(settings)
    os.environ.setdefault("WORLD_SIZE", "1")
    os.chdir(folder)
    result = training.run(**options)
    result["weights"] = result["weights"].cpu()
    torch.save(result, f"{folder}/rank{os.environ.get('RANK', 0)}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
