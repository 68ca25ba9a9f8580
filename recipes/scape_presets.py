"""The configurations of the SCAPE study: defaults, methods, and the grids that a call runs in order."""

import itertools

BASE = {
    "model": "gpt2",
    "size": "7M",
    "text": "all",
    "method": "scape",  # adamw, adams, naive, scape
    "lr": 1e-3,
    "seed": 0,
    "steps": 1200,
    "ranks": 4,
    "batch": 16,  # sequences a rank
    "context": 256,
    "density": 1.0,
    "hold": 0.1,  # shares of all steps
    "fall": 0.4,
    "flush": 0.0,  # the share of last steps that send at least flush_density
    "flush_density": 0.1,
    "second_moment": "adams",
    "mask": "topk",
    "clip": "ghat",
    "momentum": "sparse",
    "score": "c",
    "share": 1.0,
    "bound": 0.0,
    "local_beta": 0.9,
    "dense": "",  # names of the matrices that are sent whole
    "low_rank": 0.0,  # share of the density that goes to low-rank projections
    "max_norm": 1.0,
    "weight_decay": 0.1,
    "betas": [0.9, 0.95],
    "lr_warmup": 0.05,
    "lr_floor": 0.1,
    "lr_power": 0.0,
    "evals": 4,
    "eval_windows": 1024,
    "start": 0,  # steps of dense AdamW on start_text before the study's first step
    "start_text": "prose",
    "start_lr": 2e-3,
}
ROW = {"method": "scape", "second_moment": "row", "clip": "local"}
FACTORED = {**ROW, "second_moment": "factored"}
KEPT = {**FACTORED, "momentum": "kept"}
METHODS = {
    "adamw": {"method": "adamw"},
    "adams": {"method": "adams"},
    "row": ROW,
    "factored": FACTORED,
    "naive": {"method": "naive"},
    "paper": {"method": "scape", "hold": 0.0, "fall": 0.25},
    "adams-local": {"method": "scape", "clip": "local"},
    "row-topk": ROW,
    "row-random": {**ROW, "mask": "random"},
    "row-cyclic": {**ROW, "mask": "cyclic"},
    "row-half": {**ROW, "mask": "half"},
    "factored-topk": FACTORED,
    "factored-random": {**FACTORED, "mask": "random"},
    "factored-half": {**FACTORED, "mask": "half"},
    "factored-mean": {**FACTORED, "mask": "topk_mean"},
    "factored-score": {**FACTORED, "score": "update"},
    "full-topk": {**FACTORED, "second_moment": "full"},
    "factored-b1-0.5": {**FACTORED, "betas": [0.5, 0.95]},
    "adamw-b1-0.7": {"method": "adamw", "betas": [0.7, 0.95]},
    "kept-topk": KEPT,
    "kept-random": {**KEPT, "mask": "random"},
    "kept-half": {**KEPT, "mask": "half"},
    "kept-row-topk": {**KEPT, "second_moment": "row"},
    "kept-share": {**KEPT, "share": 0.3},
    "sparse-lowrank": {**FACTORED, "low_rank": 0.5},
    "sparse-lowrank-most": {**FACTORED, "low_rank": 0.8},
    "lowrank-topk": {**KEPT, "low_rank": 0.5},
    "lowrank-score": {**KEPT, "low_rank": 0.5, "score": "update"},
    "lowrank-share": {**KEPT, "low_rank": 0.5, "share": 0.3},
    "lowrank-most": {**KEPT, "low_rank": 0.8},
    "embedding-dense": {**FACTORED, "dense": "wte|wpe|embed"},
    "predict-topk": {**KEPT, "momentum": "predict"},
    "track-topk": {**KEPT, "momentum": "track", "local_beta": 0.95},
    "arrived-topk": {**KEPT, "second_moment": "arrived"},
    "arrived-random": {**KEPT, "second_moment": "arrived", "mask": "random"},
    "arrived-half": {**KEPT, "second_moment": "arrived", "mask": "half"},
    "arrived-sparse": {**FACTORED, "second_moment": "arrived"},
    "bound-topk": {**FACTORED, "bound": 1.0},
    "bound-random": {**FACTORED, "bound": 1.0, "mask": "random"},
    "bound-kept-topk": {**KEPT, "bound": 1.0},
    "bound-kept-random": {**KEPT, "bound": 1.0, "mask": "random"},
    "bound-kept-tight": {**KEPT, "bound": 0.3},
    "bound-tight": {**FACTORED, "bound": 0.3},
    "momentum-0.95": {**FACTORED, "betas": [0.95, 0.95]},
    # the last tenth dense again, at the smallest learning rates; what has waited arrives bounded
    "dense-end-topk": {**FACTORED, "bound": 1.0, "flush": 0.1, "flush_density": 1.0},
    "dense-end-random": {**FACTORED, "bound": 1.0, "flush": 0.1, "flush_density": 1.0, "mask": "random"},
    "dense-end-row": {**ROW, "bound": 1.0, "flush": 0.1, "flush_density": 1.0},
    "dense-end-paper": {"method": "scape", "flush": 0.1, "flush_density": 1.0},
    # schedules of factored-topk
    "fall-longer": {**FACTORED, "hold": 0.1, "fall": 0.7},
    "fall-longer-random": {**FACTORED, "mask": "random", "hold": 0.1, "fall": 0.7},
    "hold-longer": {**FACTORED, "hold": 0.2, "fall": 0.3},
    "flushed": {**FACTORED, "flush": 0.05},
    "lr-follows": {**FACTORED, "lr_power": 0.15},
}
DENSE = ("adamw", "adamw-b1-0.7", "adams", "row", "factored")


def grid(methods, lrs, densities=(0.1, 0.01), seeds=(0,), **common) -> list[dict]:
    """Every combination, dense methods once a learning rate; what is common overrides a method's own."""
    configs = []
    for seed, name, lr in itertools.product(seeds, methods, lrs):
        for density in (1.0,) if name in DENSE else densities:
            configs.append({**METHODS[name], "label": name, "density": density, "lr": lr, "seed": seed, **common})
    return configs


# from a trained start the densities are reached at once: fine-tuning is short
TRAINED = {"start": 1200, "steps": 600, "hold": 0.0, "fall": 0.1, "text": "manuals"}
TINY = {"size": "tiny", "steps": 12, "batch": 2, "context": 32, "evals": 2, "eval_windows": 64}
LOW, HIGH = (0.01,), (0.1,)
# one seed; in the order of what a call that is cut short must not miss
SCREEN = [
    *grid(("adamw",), (2e-3, 1e-3, 4e-3)),
    *grid(("factored-topk", "sparse-lowrank", "lowrank-topk", "kept-topk"), (2e-3,), LOW),
    *grid(("lowrank-topk", "factored-topk", "kept-topk"), (1e-3,), LOW),
    *grid(("sparse-lowrank", "factored-topk"), (4e-3,), LOW),
    *grid(
        ("lr-follows", "sparse-lowrank-most", "embedding-dense", "predict-topk", "factored-random", "row-topk"),
        (2e-3,),
        LOW,
    ),
    *grid(("factored",), (2e-3, 4e-3)),
    *grid(("factored-topk", "sparse-lowrank", "lowrank-topk", "row-topk"), (2e-3,), HIGH),
    *grid(("paper", "naive"), (1e-3,)),
    *grid(("adamw",), (1e-3, 5e-4, 2e-3), **TRAINED),
    *grid(("factored-topk", "sparse-lowrank", "lowrank-topk", "row-topk", "paper", "naive"), (1e-3,), **TRAINED),
    *grid(("track-topk", "kept-share", "lowrank-share", "factored-score", "factored-mean"), (2e-3,), LOW),
    *grid(("fall-longer", "hold-longer", "flushed"), (2e-3,), LOW),
    *grid(("factored-topk", "sparse-lowrank"), (2e-3, 5e-4), **TRAINED),
    *grid(("adams", "factored"), (1e-3,), **TRAINED),
    *grid(("factored-topk", "sparse-lowrank"), (4e-3, 1e-3), HIGH),
    *grid(("sparse-lowrank",), (1e-3,), LOW),
    *grid(("adams", "row"), (2e-3, 1e-3)),
    *grid(("paper", "naive"), (2e-3, 5e-4)),
    *grid(("lowrank-score", "kept-random", "full-topk"), (2e-3,), LOW),
    *grid(("paper", "naive"), (5e-4, 2e-3), **TRAINED),
    *grid(("predict-topk", "track-topk", "kept-topk", "embedding-dense"), (2e-3,), HIGH),
    *grid(("row-random", "row-half", "factored-half", "kept-half", "kept-row-topk", "adams-local"), (2e-3,), LOW),
]
# what a base model that has seen all of the text gains from more of one part of it
FINETUNE = {"start": 2400, "start_text": "all", "steps": 1000, "hold": 0.0, "fall": 0.1, "text": "manuals"}
SECOND = [
    *grid(("adamw",), (2e-3,)),
    *grid(("arrived-topk",), (1e-3, 2e-3), LOW),
    *grid(("bound-topk", "bound-random", "bound-kept-topk", "bound-kept-random", "bound-kept-tight"), (2e-3,), LOW),
    *grid(("arrived-topk",), (1e-3, 2e-3), HIGH),
    *grid(("bound-topk", "bound-kept-topk", "bound-kept-tight"), (2e-3,), HIGH),
    *grid(("arrived-random", "arrived-half"), (1e-3,)),
    *grid(("adamw",), (3e-4, 1e-4, 1e-3), **FINETUNE),
    *grid(("paper", "naive", "arrived-topk", "factored-topk", "bound-kept-topk"), (3e-4,), **FINETUNE),
    *grid(("factored-topk", "factored-random", "bound-tight", "arrived-sparse", "bound-random"), (1e-3,), LOW),
    *grid(("factored-topk", "factored-random"), (1e-3,), HIGH),
    *grid(("factored", "adams"), (2e-3, 1e-3)),
    *grid(("paper", "naive", "arrived-topk", "factored-topk"), (1e-4,), **FINETUNE),
]
THIRD = [
    *grid(("factored-topk", "dense-end-topk", "dense-end-random", "factored-random"), (4e-3,)),
    *grid(("factored",), (4e-3,)),
    *grid(("adamw",), (3e-4, 1e-3, 2e-3), **FINETUNE),
    *grid(("factored-topk", "dense-end-topk", "paper", "naive"), (1e-3,), **FINETUNE),
    *grid(("naive", "dense-end-paper"), (2e-3,)),
    *grid(("factored-topk", "dense-end-topk"), (2e-3,), **FINETUNE),
    *grid(("fall-longer", "momentum-0.95", "dense-end-row"), (4e-3,)),
    *grid(("dense-end-random", "factored-random"), (1e-3,), **FINETUNE),
    *grid(("factored-topk", "dense-end-topk"), (8e-3,)),
    *grid(("dense-end-topk",), (2e-3,)),
    *grid(("adams",), (2e-3, 1e-3)),
    *grid(("paper",), (2e-3, 5e-4), LOW),
]
FOURTH = [
    *grid(("adamw",), (1e-3,), **FINETUNE),
    *grid(("factored-random",), (2e-3,), **FINETUNE),
    *grid(("factored-topk",), (4e-3,), **FINETUNE),
    *grid(("adamw",), (2e-3,), seeds=(1, 2)),
    *grid(("factored-random",), (4e-3,), seeds=(1, 2)),
    *grid(("adamw",), (2e-3,), steps=4800),
    *grid(("factored-random",), (4e-3,), steps=4800),
    *grid(("adamw",), (2e-3,), model="qwen"),
    *grid(("factored-random",), (4e-3,), model="qwen"),
    *grid(("fall-longer-random",), (4e-3,)),
    *grid(("paper",), (1e-3,), HIGH, model="qwen"),
    *grid(("adamw",), (1e-3,), seeds=(1, 2), **FINETUNE),
    *grid(("factored-topk",), (2e-3,), seeds=(1, 2), **FINETUNE),
    *grid(("factored-topk",), (2e-3,), seeds=(1, 2)),
]
# the step as shipped: seeds, longer runs, runs to dense's loss, the rivals' other learning rates
FIFTH = [
    *grid(("adamw",), (2e-3,), seeds=(0, 1, 2)),
    *grid(("factored-topk", "factored-random"), (2e-3, 4e-3), seeds=(0,)),
    *grid(("adamw",), (1e-3,), seeds=(0, 1, 2), **FINETUNE),
    *grid(("factored-topk",), (2e-3,), seeds=(0, 1, 2), **FINETUNE),
    *grid(("factored-random",), (4e-3,), HIGH, steps=1800),
    *grid(("factored-random",), (4e-3,), LOW, steps=2400),
    *grid(("paper",), (2e-3, 5e-4)),
    *grid(("adams",), (1e-3, 2e-3, 4e-3)),
    *grid(("adams-local", "row-random", "row-cyclic", "row-half"), (2e-3,)),
    *grid(("factored-topk", "paper"), (2e-3,), model="qwen"),
    *grid(("adamw",), (2e-3,), steps=4800, seeds=(1,)),
    *grid(("factored-random",), (4e-3,), steps=4800, seeds=(1,)),
    *grid(("factored-topk",), (2e-3,), steps=4800),
    *grid(("naive",), (4e-3,)),
    *grid(("factored-random",), (4e-3,), seeds=(1, 2)),
    *grid(("factored-topk",), (2e-3,), seeds=(1, 2)),
    *grid(("adamw",), (1e-3,), model="qwen", **FINETUNE),
    *grid(("factored-topk",), (2e-3,), model="qwen", **FINETUNE),
]
PRESETS = {
    "fifth": FIFTH,
    "fourth": FOURTH,
    "third": THIRD,
    "second": SECOND,
    "rehearsal": grid(METHODS, (1e-3,), ranks=2, **TINY)
    + grid(("adamw", "row-topk"), (1e-3,), (0.1,), model="qwen", **TINY | {"start": 6, "start_text": "all"}),
    "screen": SCREEN,
}
