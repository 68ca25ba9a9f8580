"""A Trainer run on tiny data, for tests that compare a tp x dp world with one process."""

import os

import numpy as np
import tiny
import torch
import transformers as tf

from hf_taco_scape import TacoScapeArguments, TacoScapeTrainer
from hf_taco_scape.parallel import gather_state_dict

GLOBAL_BATCH = 8


class Recorder(tf.TrainerCallback):
    def __init__(self) -> None:
        self.logs: list[dict] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))

    def column(self, name: str) -> list[float]:
        return [float(entry[name]) for entry in self.logs if name in entry and "loss" in entry]


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, items) -> None:
        self.items = items

    def __iter__(self):
        return iter(self.items)


def count_labels(prediction):
    """Order-sensitive checksum: evaluation must see every row once, in order."""
    labels = prediction.label_ids
    return {"n": len(labels), "check": int((labels * np.arange(1, len(labels) + 1)[:, None]).sum())}


def arguments(tp_size: int, output_dir: str, **changes) -> TacoScapeArguments:
    world = int(os.environ["WORLD_SIZE"])
    accumulation = changes.get("gradient_accumulation_steps", 1)
    per_rank = GLOBAL_BATCH // (world // tp_size)
    settings = dict(
        output_dir=output_dir, tp_size=tp_size, tp_codec="none", tp_min_bytes=0, max_steps=8, learning_rate=1e-3,
        per_device_train_batch_size=per_rank // accumulation, per_device_eval_batch_size=per_rank, max_grad_norm=0.5,
        logging_steps=1, logging_nan_inf_filter=False, report_to=[], disable_tqdm=True, seed=11, save_strategy="no",
        include_num_input_tokens_seen="all", remove_unused_columns=False,
    )  # fmt: skip
    return TacoScapeArguments(**{**settings, **changes})


def trainer(family: str, args: TacoScapeArguments, model_changes=None, train=None, evaluation=None, **kwargs):
    recorder = Recorder()
    built = TacoScapeTrainer(
        model=tiny.build(family, **(model_changes or {})), args=args,
        train_dataset=tiny.rows(96, 0) if train is None else train,
        eval_dataset=tiny.rows(40, 5) if evaluation is None else evaluation,
        callbacks=[recorder], compute_metrics=count_labels, **kwargs,
    )  # fmt: skip
    built.pop_callback(tf.PrinterCallback)
    return built, recorder


def run(family: str, tp_size: int, streaming: bool = False, model_changes=None, **changes) -> dict:
    """Train, evaluate and predict; everything that must not depend on how many processes did it."""
    args = arguments(tp_size, "out", **changes)
    items = tiny.rows(96, 0)
    built, recorder = trainer(family, args, model_changes, train=Stream(items) if streaming else items)
    built.train()
    evaluation, prediction = built.evaluate(), built.predict(built.eval_dataset)
    weights = gather_state_dict(built.model)
    return {
        "loss": recorder.column("loss"),
        "grad_norm": recorder.column("grad_norm"),
        "weights": torch.cat([w.flatten() for w in weights.values()]).clone(),
        "eval_loss": evaluation["eval_loss"],
        "counts": [
            evaluation["eval_n"], evaluation["eval_check"], prediction.predictions.shape,
            built.state.num_input_tokens_seen, built.get_total_train_batch_size(args), built.state.global_step,
            sorted(weights),
        ],
        "parameters_here": sum(p.numel() for p in built.model.parameters()),
    }  # fmt: skip


def assert_equal_runs(reference: dict, got: dict, loss=1e-6, grad_norm=1e-5, weights=2e-4) -> None:
    def relative(name):
        pairs = zip(reference[name], got[name], strict=True)
        return max(abs(a - b) / max(abs(a), 1e-9) for a, b in pairs)

    assert len(reference["loss"]) > 0
    assert relative("loss") <= loss, f"loss {relative('loss'):.1e}"
    assert relative("grad_norm") <= grad_norm, f"gradient norm {relative('grad_norm'):.1e}"
    difference = (reference["weights"] - got["weights"]).abs().max().item()
    assert difference <= weights, f"weights {difference:.1e}"
    assert abs(reference["eval_loss"] - got["eval_loss"]) / reference["eval_loss"] <= loss
    assert reference["counts"] == got["counts"]
