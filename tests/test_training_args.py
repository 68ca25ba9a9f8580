"""Every toggle from the command line, JSON and Python, and each wrong value by its message."""

import json
import os
import subprocess
import sys

import pytest
import tiny
import torch
import torch.distributed as dist
import training
import transformers as tf

import hf_taco_scape.accelerator as accelerator_module
import hf_taco_scape.training_args as training_args_module
from hf_taco_scape import TacoScapeAccelerator, TacoScapeArguments, TacoScapeTrainer, parallelize
from hf_taco_scape.training_args import TacoScapeOptions, check_launch


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")


@pytest.mark.parametrize(
    "wrong,message",
    [
        ({"tp_codec": "morse"}, "tp_codec 'morse' is not known; choose one of: .*taco.*hadamard-int6.*int6-int4"),
        ({"tp_codec_backward": "x"}, "tp_codec_backward 'x' is not known; choose one of"),
        ({"tp_codec_backward": "int6-int4"}, "tp_codec_backward 'int6-int4' is not known; choose one of: .*fp8"),
        (
            {"tp_codec": "int8-int4", "tp_codec_backward": "fp8"},
            "'int8-int4' is a preset of hadamard-int8 forward and hadamard-int4 backward, so codec_backward 'fp8'",
        ),
        ({"tp_backend": "mpi"}, "tp_backend 'mpi' is not known; choose one of: auto, c10d, symm_mem"),
        ({"sequence_parallel": True}, "sequence_parallel splits the sequence over .* set tp_size to 2 or more"),
        ({"dp_sync": "lazy"}, "dp_sync 'lazy' is not known; choose one of: dense"),
        ({"tp_size": 0}, "tp_size must be at least 1, got 0"),
        ({"tp_min_bytes": "many"}, "tp_min_bytes must be auto or a number of bytes, got 'many'"),
        ({"tp_min_bytes": -1}, "must not be negative"),
        ({"check_replicas": -2}, "check_replicas must be 0"),
        ({"heartbeat_timeout": -1.0}, "heartbeat_timeout must be 0"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
def test_wrong_toggles_are_refused_with_the_valid_choices(wrong, message):
    with pytest.raises(ValueError, match=message):
        TacoScapeOptions(**wrong).validate()


@pytest.mark.parametrize(
    "wrong,message",
    [
        ({"tp_size": "two"}, "tp_size must be a number, got 'two'"),
        ({"tp_size": 2.5}, "tp_size must be a whole number, got 2.5"),
        ({"scape_density": "x"}, "scape_density must be a number"),
        ({"dp_sync": "scape", "scape_hold_steps": 0.9, "scape_warmup_steps": 0.9}, "is over 1"),
        ({"dp_sync": "scape", "use_adams": True}, "choose one of them"),
        ({"dp_sync": "scape", "optim": "sgd"}, "brings its own optimizer"),
        ({"scape_density": 0.0}, "must lie in"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
def test_wrong_numbers_and_combinations_are_refused(tmp_path, wrong, message):
    with pytest.raises(ValueError, match=message):
        TacoScapeArguments(str(tmp_path), report_to=[], **wrong)


def test_numbers_that_yaml_reads_as_strings_are_numbers(tmp_path):
    args = TacoScapeArguments(str(tmp_path), report_to=[], scape_density="1e-2", check_replicas="3", tp_size="1")
    assert (args.scape_density, args.check_replicas, args.tp_size) == (0.01, 3, 1)


TENSOR_PARALLEL_REFUSALS = [
    (dict(train_sampling_strategy="batch_rebalance"), "batch_rebalance"),
    (dict(auto_find_batch_size=True), "auto_find_batch_size"),
    (dict(accelerator_config={"dispatch_batches": True}), "dispatch_batches"),
    (dict(accelerator_config={"use_seedable_sampler": False}), "use_seedable_sampler"),
    (dict(accelerator_config={"split_batches": True}), "split_batches"),
    (dict(optim="adafactor"), "adafactor.*elementwise"),
]


def _refusals():
    for wrong, message in TENSOR_PARALLEL_REFUSALS:
        with pytest.raises(ValueError, match=f"tp_size 2 does not work with .*{message}"):
            training.arguments(2, "out", **wrong)
        TacoScapeArguments("out", tp_size=1, **wrong)  # fine without tensor parallelism


def test_what_does_not_work_with_tensor_parallelism_is_refused(pool):
    pool.run(2, _refusals)


def _parse(argv):
    (args,) = tf.HfArgumentParser(TacoScapeArguments).parse_args_into_dataclasses(argv)
    return args


def test_command_line_and_json_set_the_same_toggles(tmp_path):
    toggles = dict(
        tp_size=1, tp_codec="hadamard-int6", tp_codec_backward="hadamard-int4", tp_backend="c10d", tp_min_bytes="4096",
        check_replicas=7,
    )  # fmt: skip
    flags = [part for name, value in toggles.items() for part in (f"--{name}", str(value))]
    from_flags = _parse(["--output_dir", str(tmp_path), *flags])
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"output_dir": str(tmp_path), **toggles, "tp_min_bytes": 4096}))
    (from_json,) = tf.HfArgumentParser(TacoScapeArguments).parse_json_file(str(file))
    for args in (from_flags, from_json):
        assert {n: getattr(args, n) for n in toggles} == {**toggles, "tp_min_bytes": 4096}
    assert set(toggles) <= set(from_flags.to_dict())


def _split_by(how, tmp):
    """huggingface/trl #5331: a tp_size that was asked for is applied, however it was given."""
    flags = ["--output_dir", tmp, "--tp_size", "2", "--tp_codec", "fp8", "--report_to", "none"]
    if how == "json":
        file = f"{tmp}/rank{dist.get_rank()}.json"
        with open(file, "w") as out:
            json.dump({"output_dir": tmp, "tp_size": 2, "tp_codec": "fp8", "report_to": "none"}, out)
        (args,) = tf.HfArgumentParser(TacoScapeArguments).parse_json_file(file)
    else:
        args = _parse(flags)
    built = TacoScapeTrainer(model=tiny.build("llama"), args=args)
    return sum(p.numel() for p in built.model.parameters())


@pytest.mark.parametrize("how", ["flags", "json"])
def test_parameters_per_rank_fall(pool, tmp_path, how):
    whole = sum(p.numel() for p in tiny.build("llama").parameters())
    assert all(n < 0.75 * whole for n in pool.run(2, _split_by, how, str(tmp_path)))


def _unsplittable():
    class Custom(tf.PreTrainedModel):
        config_class = tf.PreTrainedConfig

        def __init__(self):
            super().__init__(tf.PreTrainedConfig(num_attention_heads=2, hidden_size=8))
            self.layer = torch.nn.Linear(2, 2)

    with pytest.raises(ValueError, match="no tensor-parallel plan for model type"):
        TacoScapeTrainer(model=Custom(), args=training.arguments(2, "out"))


def test_a_model_without_a_plan_fails_loudly(pool):
    pool.run(2, _unsplittable)


def test_plain_training_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="must be TacoScapeArguments.*got TrainingArguments"):
        TacoScapeTrainer(model=tiny.build("gpt2"), args=tf.TrainingArguments(str(tmp_path), use_cpu=True))


def _backends():
    """tp_backend reaches the split model: symm_mem says why it cannot start on the CPU, auto and a preset train."""
    with pytest.raises(ValueError, match="tp_backend symm_mem cannot start: rank 0: .*CUDA.*Choose auto or c10d"):
        training.trainer("gpt2", training.arguments(2, "out", tp_backend="symm_mem"))
    built, recorder = training.trainer("gpt2", training.arguments(2, "out", tp_codec="int6-int4", max_steps=2))
    built.train()
    comm = built.accelerator._communicators[0]
    return comm.codec_names, comm.workspace, recorder.column("tp_compression")


def test_backend_and_preset_reach_the_model(pool):
    for names, workspace, compression in pool.run(2, _backends):
        assert names == ("hadamard-int6", "hadamard-int4") and workspace is None
        assert all(6 < ratio < 6.5 for ratio in compression), "5.125 bits of 32 on average"


def _wrong_world(tp_size):
    with pytest.raises(ValueError, match=f"tp_size {tp_size} does not divide the {dist.get_world_size()} process"):
        training.trainer("gpt2", training.arguments(tp_size, "out", per_device_train_batch_size=2))


def test_tp_size_that_does_not_divide_the_world(pool):
    pool.run(3, _wrong_world, 2)
    with pytest.raises(ValueError, match="accelerate launch --multi_gpu --num_processes 2"):
        training.trainer("gpt2", TacoScapeArguments("out", tp_size=2, report_to=[]))


def _both_routes_check():
    """Both ways in ask `check_launch` with the size of the world that they see."""
    seen = []
    for module in (training_args_module, accelerator_module):
        module.check_launch = seen.append
    try:
        training.arguments(1, "out")
        TacoScapeAccelerator()
    finally:
        for module in (training_args_module, accelerator_module):
            module.check_launch = check_launch
    return seen


def test_processes_that_would_each_train_alone_are_refused(pool, monkeypatch):
    assert pool.run(2, _both_routes_check) == [[2, 2], [2, 2]]
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match="started 4 processes, but this one sees 1: each would train alone"):
        check_launch(1)


MIXED_UP = [
    ("tp_codec", {"tp_codec": "fp8"}),
    ("tp_size", {"tp_size": 1}),
    ("tp_min_bytes", {"tp_min_bytes": 4096}),
    ("dp_sync", {"dp_sync": "scape"}),
    ("gradient_accumulation_steps", {"gradient_accumulation_steps": 2}),
    ("seed", {"seed": 5}),
]


def _mixed_up():
    """Rank 1 was started with something else: every rank refuses, before any other collective, and names both."""
    for name, other in MIXED_UP:
        changes = other if dist.get_rank() == 1 else {}
        args = training.arguments(
            changes.get("tp_size", 2), "out", **{k: v for k, v in changes.items() if k != "tp_size"}
        )
        with pytest.raises(ValueError, match=f"different settings: {name}: rank 0 has .*rank 1 has "):
            training.trainer("gpt2", args)
    with pytest.raises(ValueError, match="different settings: codec: rank 0 has 'taco', rank 1 has 'fp8'"):
        parallelize(tiny.build("gpt2"), dist.group.WORLD, ["taco", "fp8"][dist.get_rank()])


def test_a_mixed_up_launch_is_refused_by_field(pool):
    pool.run(2, _mixed_up)


LONE = """
import os
os.environ.pop("ACCELERATE_USE_CPU", None)
from hf_taco_scape import TacoScapeArguments
TacoScapeArguments("out", use_cpu=False, report_to=[])
# one write, so that the ranks' lines do not mix
os.write(1, f"WORLD {TacoScapeArguments('out', report_to=[]).world_size}\\n".encode())
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the trap is for machines without a GPU")
def test_launch_without_a_device_flag_starts_one_world(tmp_path):
    """The documented launch, really made: the plain line must give one world of two on a machine without a GPU."""
    script = tmp_path / "lone.py"
    script.write_text(LONE)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", str(script)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE", "WORLD", "RANK", "LOCAL"))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.stdout.count("WORLD 2") == 2, done.stdout + done.stderr
