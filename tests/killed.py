"""A Trainer run that one rank's sudden death ends at a given step; started by torchrun (test_checkpoint.py)."""

import json
import os
import signal
import sys

import torch
import training
import transformers as tf

MODEL = dict(attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1)


class KillAt(tf.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main(settings: str, folder: str, name: str, kill_at: str, resume: str) -> None:
    args = training.arguments(
        2, f"{folder}/{name}", max_steps=6, save_strategy="steps", save_steps=2, **json.loads(settings)
    )
    built, recorder = training.trainer("gpt2", args, MODEL)
    if int(kill_at):
        built.add_callback(KillAt(int(kill_at)))
    built.train(resume_from_checkpoint=resume or None)
    bits = {n: p.detach() for n, p in built.model.named_parameters()}
    torch.save((recorder.column("loss"), bits), f"{folder}/{name}-rank{args.process_index}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
