"""Recipes without a launch: arguments, data, scoring, metrics, assets."""

import hashlib
import json
import math
import subprocess
import sys
import zipfile

import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from recipe_fixtures import TEMPLATE, WORDS, make_model, make_tokenizer, reviews, write_jsonl
from transformers import AutoTokenizer

import assets
import common
import evaluate_downstream
import finetune
import metrics
import report
import task_data

DATA = dict(prompt_template=TEMPLATE, label_words=WORDS)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "qwen2")


@pytest.fixture(scope="module")
def model_and_tokenizer(model_folder):
    arguments = common.ModelArguments(model_name_or_path=str(model_folder))
    return common.load_model_and_tokenizer(arguments)


# ---- arguments


def test_settings_file_fills_arguments_and_flags_win(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text('model_name_or_path: m\nlabel_words: [" a", " b"]\nprompt_template: "{text}"\nmax_length: 7\n')
    model, data = common.parse_arguments(
        common.ModelArguments, task_data.DataArguments, argv=[str(path), "--max_length", "9", "--dtype", "bfloat16"]
    )
    assert (model.model_name_or_path, model.dtype) == ("m", "bfloat16")
    assert (data.label_words, data.max_length) == ([" a", " b"], 9)


def test_json_settings_are_read_and_exponents_are_numbers(tmp_path):
    from hf_taco_scape import TacoScapeArguments

    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"output_dir": str(tmp_path), "learning_rate": "1e-3", "tp_codec": "int8"}))
    (arguments,) = common.parse_arguments(TacoScapeArguments, argv=[str(path)])
    assert (arguments.learning_rate, arguments.tp_codec) == (1e-3, "int8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model_name_or_pth: m", "unknown argument 'model_name_or_pth'; did you mean model_name_or_path"),
        ("- a\n- b", "one mapping of argument names"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, text, message):
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        common.parse_arguments(common.ModelArguments, argv=[str(path)])


def test_missing_settings_file_and_unknown_flag_are_refused():
    with pytest.raises(ValueError, match="does not exist"):
        common.parse_arguments(common.ModelArguments, argv=["nowhere.yaml"])
    with pytest.raises(ValueError, match="--frobnicate"):
        common.parse_arguments(common.ModelArguments, argv=["--model_name_or_path", "m", "--frobnicate", "1"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(label_words=WORDS, text_column="text"), "give one of"),
        (dict(label_words=WORDS), "needs prompt_template"),
    ],
)
def test_contradicting_data_arguments_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        task_data.DataArguments(**fields)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no data: give dataset_name"),
        (["--train_file", "nowhere.jsonl"], "does not exist"),
        (["--do_eval_downstream", "true"], "do_eval_downstream needs"),
        (["--tp_codec", "tacos"], "tp_codec 'tacos' is not known"),
        (["--tp_size", "0"], "tp_size must be at least 1"),
    ],
)
def test_finetune_refuses_before_training(model_folder, tmp_path, argv, message):
    common_flags = ["--model_name_or_path", str(model_folder), "--output_dir", str(tmp_path), "--report_to", "none"]
    with pytest.raises(ValueError, match=message):
        finetune.main([*common_flags, *argv])


# ---- data


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet", "dataset", "dataset_dict"])
def test_sources(kind, tmp_path):
    rows = reviews(10, 0)
    data = Dataset.from_list(rows)
    arguments, file = task_data.DataArguments(**DATA), str(tmp_path / f"rows.{kind}")
    if kind == "jsonl":
        write_jsonl(tmp_path / "rows.jsonl", rows)
    elif kind in ("csv", "tsv"):
        data.to_csv(file, sep="," if kind == "csv" else "\t")
    elif kind == "parquet":
        data.to_parquet(file)
    else:
        (data if kind == "dataset" else DatasetDict(train=data.select(range(2)), test=data)).save_to_disk(file)
        arguments, file = task_data.DataArguments(dataset_name=file, **DATA), None
    loaded = task_data.load_split(arguments, "test", file, limit=7)
    assert loaded["text"][:] == [row["text"] for row in rows[:7]]
    assert [q.gold for q in task_data.questions_from_dataset(arguments, loaded)] == [0, 1] * 3 + [0]


def test_text_file_and_wrong_sources(tmp_path):
    arguments = task_data.DataArguments(text_column="text")
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    assert task_data.load_split(arguments, "train", str(tmp_path / "a.txt"), None)["text"][:] == ["one", "two"]
    (tmp_path / "a.doc").write_text("one")
    with pytest.raises(ValueError, match="its name must end in"):
        task_data.load_split(arguments, "train", str(tmp_path / "a.doc"), None)
    DatasetDict(train=Dataset.from_list(reviews(2, 0))).save_to_disk(tmp_path / "saved")
    arguments = task_data.DataArguments(dataset_name=str(tmp_path / "saved"), text_column="text")
    with pytest.raises(ValueError, match="has no split 'validation', only train"):
        task_data.load_split(arguments, "validation", None, None)


def test_labels_by_name_index_and_class():
    rows = [{"text": "x", "label": "pos"}, {"text": "y", "label": "neg"}]
    arguments = task_data.DataArguments(label_values=["neg", "pos"], **DATA)
    assert [q.gold for q in task_data.questions_from_dataset(arguments, Dataset.from_list(rows))] == [1, 0]
    named = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "pos"])})
    classes = Dataset.from_list([{"text": "x", "label": 1}], features=named)
    assert task_data.questions_from_dataset(task_data.DataArguments(**DATA), classes)[0].gold == 1
    with pytest.raises(ValueError, match="give label_values"):
        task_data.questions_from_dataset(task_data.DataArguments(**DATA), Dataset.from_list(rows))
    with pytest.raises(ValueError, match="label 2 has no answer among the 2"):
        bad = Dataset.from_list([{"text": "x", "label": 2}])
        task_data.questions_from_dataset(task_data.DataArguments(**DATA), bad)
    with pytest.raises(ValueError, match="template .* names 'txt'; the columns are text, label"):
        wrong = task_data.DataArguments(prompt_template="{txt}", label_words=WORDS)
        task_data.questions_from_dataset(wrong, Dataset.from_list([{"text": "x", "label": 1}]))


def test_big_bench_task_json(tmp_path):
    task = {
        "task_prefix": "Choose.",
        "examples": [
            {"input": "2 + 2?", "target_scores": {"4": 1, "5": 0}},
            {"input": "no single best", "target_scores": {"a": 1, "b": 1}},
            {"input": "free text", "target": "x"},
            {"input": "2 + 3?", "target_scores": {"4": 0, "5": 1}},
        ],
    }
    path = tmp_path / "sums" / "task.json"
    path.parent.mkdir()
    path.write_text(json.dumps(task))
    questions = task_data.questions_from_task_json(path)
    assert [(q.prompt, q.choices, q.gold) for q in questions] == [
        ("Choose.\nQ: 2 + 2?\nA:", (" 4", " 5"), 0),
        ("Choose.\nQ: 2 + 3?\nA:", (" 4", " 5"), 1),
    ]
    downstream = evaluate_downstream.DownstreamArguments(downstream_tasks=[str(path)])
    assert list(evaluate_downstream.collect_questions(task_data.DataArguments(), downstream)) == ["sums"]
    path.write_text(json.dumps({"examples": [{"input": "a", "target": "b"}]}))
    with pytest.raises(ValueError, match="not a multiple-choice task.json"):
        task_data.questions_from_task_json(path)


@pytest.mark.parametrize(
    ("fields", "completion"),
    [
        (DATA, " positive"),
        (dict(prompt_template="Q: {text}", choices_column="answers"), " right"),
        (dict(prompt_template="Q: {text}", completion_template=" {note}!"), " fine!<|endoftext|>"),
        (dict(text_column="text"), " film is great"),
    ],
)
def test_loss_is_on_the_completion_only(fields, completion):
    tokenizer = make_tokenizer()
    row = {"text": "the film is great", "label": 1, "answers": [" wrong", " right"], "note": "fine"}
    arguments = task_data.DataArguments(**fields)
    (encoded,) = task_data.training_rows(arguments, Dataset.from_list([row]), tokenizer)
    learned = [label for label in encoded["labels"] if label != task_data.IGNORED]
    assert tokenizer.decode(learned) == completion
    assert tokenizer.decode(encoded["input_ids"]).endswith(completion)
    assert len(encoded["labels"]) == len(encoded["input_ids"])


def test_long_prompts_lose_their_beginning():
    tokenizer = make_tokenizer()
    ids, n_prompt = task_data.encode_pair(tokenizer, "a b c d e f g h", " positive", 6)
    assert len(ids) == 6 and tokenizer.decode(ids[n_prompt:]) == " positive"
    with pytest.raises(ValueError, match="alone is longer than max_length"):
        task_data.encode_pair(tokenizer, "a", " b" * 20, 6)


def test_collator_with_kept_logits_gives_the_same_loss_and_gradients(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    rows = task_data.training_rows(task_data.DataArguments(**DATA), Dataset.from_list(reviews(5, 1)), tokenizer)
    losses, gradients = [], []
    for keep in (False, True):
        batch = task_data.CompletionCollator(tokenizer.pad_token_id, keep)(list(rows))
        model.zero_grad()
        out = model(**batch)
        out.loss.backward()
        losses.append(out.loss.item())
        gradients.append(model.model.layers[0].mlp.up_proj.weight.grad.clone())
        assert out.logits.shape[1] == (2 if keep else batch["input_ids"].shape[1])
    model.zero_grad()
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-7)
    # and padding does not matter: one row at a time gives the same mean
    collate = task_data.CompletionCollator(tokenizer.pad_token_id, True)
    alone = [model(**collate([row])).loss.item() for row in rows]
    assert sum(alone) / len(alone) == pytest.approx(losses[0], rel=1e-5)


# ---- scoring


def reference_log_likelihood(model, tokenizer, prompt: str, answer: str) -> float:
    ids, n = tokenizer(prompt + answer, return_tensors="pt").input_ids, len(tokenizer(prompt).input_ids)
    with torch.no_grad():
        log_probs = model(ids).logits[0].log_softmax(-1)
    return sum(log_probs[i - 1, ids[0, i]].item() for i in range(n, ids.shape[1]))


QUESTIONS = [
    task_data.Question("Review: the film is great\nSentiment:", (" negative", " positive"), 1),
    task_data.Question("the plot", (" is really really dull", " is", " is awful film"), 2),
    task_data.Question("Review: the ending is boring\nSentiment:", (" negative", " positive"), 0),
]


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_log_likelihoods_equal_one_choice_at_a_time(model_and_tokenizer, batch_size):
    model, tokenizer = model_and_tokenizer
    sums, counts = evaluate_downstream.log_likelihoods(model, tokenizer, QUESTIONS, batch_size)
    for q, question in enumerate(QUESTIONS):
        for c, choice in enumerate(question.choices):
            expected = reference_log_likelihood(model, tokenizer, question.prompt, choice)
            assert sums[q, c].item() == pytest.approx(expected, abs=2e-5)
            n = len(tokenizer(question.prompt + choice).input_ids) - len(tokenizer(question.prompt).input_ids)
            assert counts[q, c] == n
    assert sums[0, 2] == -math.inf and counts[0, 2] == 0


class TwoRanks:
    """The data-parallel view of rank `process_index` of two; gather adds what the other rank contributed."""

    num_processes = 2
    is_local_main_process = False

    def __init__(self, process_index, others=None):
        self.process_index, self.others, self.mine = process_index, others, None

    def gather(self, tensor):
        self.mine = tensor
        return tensor if self.others is None else torch.cat([tensor, self.others])


def test_data_parallel_ranks_share_the_questions(model_and_tokenizer):
    whole, _ = evaluate_downstream.log_likelihoods(*model_and_tokenizer, QUESTIONS, 1)
    first = TwoRanks(0)
    partial, _ = evaluate_downstream.log_likelihoods(*model_and_tokenizer, QUESTIONS, 1, accelerator=first)
    assert not torch.allclose(partial, whole), "one rank must not do all the work"
    second = TwoRanks(1, others=first.mine)
    both, _ = evaluate_downstream.log_likelihoods(*model_and_tokenizer, QUESTIONS, 1, accelerator=second)
    torch.testing.assert_close(both, whole)


def test_length_normalisation_changes_the_ranking(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    tasks = {"t": QUESTIONS}
    plain = evaluate_downstream.evaluate_questions(model, tokenizer, tasks, evaluate_downstream.DownstreamArguments())
    sums, _ = evaluate_downstream.log_likelihoods(model, tokenizer, QUESTIONS)
    # an untrained model gives every token about the same probability: the shortest answer wins, until normalised
    assert plain["t"]["predictions"][1] == 1
    normalised = evaluate_downstream.evaluate_questions(
        model, tokenizer, tasks, evaluate_downstream.DownstreamArguments(length_normalize=True)
    )
    per_byte = [s / len(c.encode()) for s, c in zip(sums[1].tolist(), QUESTIONS[1].choices, strict=True)]
    assert normalised["t"]["predictions"][1] == per_byte.index(max(per_byte)) != 1
    gold = [sums[q, question.gold].item() for q, question in enumerate(QUESTIONS)]
    tokens = [len(tokenizer(q.choices[q.gold]).input_ids) for q in QUESTIONS]
    assert plain["t"]["loss"] == pytest.approx(-sum(gold) / sum(tokens), rel=1e-6)


def test_lm_eval_is_asked_for_by_name(model_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ValueError, match="pip install lm_eval"):
        evaluate_downstream.main(["--model_name_or_path", str(model_folder), "--lm_eval_tasks", "x"])


def test_lm_eval_runs_a_local_task(model_folder, tmp_path, capsys, monkeypatch):
    pytest.importorskip("lm_eval")
    rows = [{"query": r["text"], "choices": WORDS, "gold": r["label"]} for r in reviews(6, 0)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    (tmp_path / "task.yaml").write_text(
        f"task: tiny_local\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path / 'rows.jsonl'}}}}}\n"
        'test_split: test\noutput_type: multiple_choice\ndoc_to_text: "{{query}}"\ndoc_to_choice: "{{choices}}"\n'
        'doc_to_target: "{{gold}}"\nmetric_list: [{metric: acc}]\nmetadata: {version: 1.0}\n'
    )
    flags = ["--lm_eval_tasks", "tiny_local", "--lm_eval_include_path", str(tmp_path), "--device", "cpu"]
    evaluate_downstream.main(["--model_name_or_path", str(model_folder), *flags])
    assert "tiny_local" in capsys.readouterr().out


def test_nothing_to_ask_is_refused(model_folder):
    with pytest.raises(ValueError, match="nothing to ask"):
        evaluate_downstream.main(["--model_name_or_path", str(model_folder)])


# ---- metrics and tables


def test_metrics_against_hand_computed_values():
    scores = metrics.score([1] * 8 + [0] * 2, [1] * 10)
    # Wilson's interval for 8 of 10
    assert (scores["accuracy"], scores["n"]) == (0.8, 10)
    assert scores["accuracy_low"] == pytest.approx(0.4902, abs=1e-4)
    assert scores["accuracy_high"] == pytest.approx(0.9433, abs=1e-4)
    # class 1: precision 1, recall 0.8; class 0 is predicted twice and never right
    assert scores["macro_f1"] == pytest.approx((2 * 8 / 18 + 0) / 2)


def test_paired_comparison_against_hand_computed_values():
    truth, before = [1] * 100, [1] * 50 + [0] * 50
    after = [0] * 1 + [1] * 49 + [1] * 9 + [0] * 41
    paired = metrics.compare(after, before, truth)
    assert (paired["gained"], paired["lost"], paired["changed"]) == (9, 1, 10)
    assert paired["difference"] == pytest.approx(0.08)
    assert paired["p_value"] == pytest.approx(2 * (1 + 10) / 2**10)  # P(at most 1 head in 10 throws), two-sided
    # the standard error of a paired difference is sqrt(gained + lost - (gained - lost)^2 / n) / n
    error = math.sqrt(10 - 64 / 100) / 100
    assert paired["difference_low"] == pytest.approx(0.08 - 1.96 * error, abs=0.011)
    assert paired["difference_high"] == pytest.approx(0.08 + 1.96 * error, abs=0.011)
    same = metrics.compare(before, before, truth)
    assert (same["difference_low"], same["difference_high"], same["p_value"], same["changed"]) == (0, 0, 1, 0)


def test_runs_over_different_questions_are_not_compared():
    scores = {"references": [0, 1], "predictions": [0, 1]}
    with pytest.raises(ValueError, match="different questions"):
        report.compare_tasks(scores, {"references": [1, 0], "predictions": [0, 1]})


def test_sizes_read_as_links_are_sold():
    assert [report.size(n) for n in (12, 1500, 2.5e6, 3e15)] == ["12 B", "1.50 kB", "2.50 MB", "3000.00 TB"]


# ---- assets


def tiny_package(content: bytes, sha: str) -> assets.PackagedFile:
    return assets.PackagedFile("tiny-package", "1.0", "tiny/data.bin", sha)


def make_wheel(data_dir, content: bytes) -> None:
    folder = data_dir / "packages" / "tiny-package-1.0"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "tiny_package-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny/data.bin", content)


def test_assets_are_verified_and_kept(tmp_path, monkeypatch):
    make_wheel(tmp_path, b"right")
    # an archive that is there already is used: pip is not asked
    monkeypatch.setattr(assets.subprocess, "run", lambda *a, **k: pytest.fail("pip was called"))
    path = assets.extract(tiny_package(b"right", hashlib.sha256(b"right").hexdigest()), tmp_path)
    assert path.read_bytes() == b"right"
    with pytest.raises(RuntimeError, match="not the file this recipe was written for"):
        assets.extract(tiny_package(b"right", hashlib.sha256(b"other").hexdigest()), tmp_path)


def test_failed_download_says_what_to_do(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: no route to index")
    monkeypatch.setattr(assets.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(RuntimeError, match=r"pip download tiny-package==1.0.*no route to index[\s\S]*by hand"):
        assets.download(tiny_package(b"", ""), tmp_path)


def test_interrupted_asset_is_built_again(tmp_path, monkeypatch):
    calls = []

    def build(data_dir, out):
        calls.append(out)
        out.mkdir(parents=True)
        (out / "half").write_text("x")
        if len(calls) == 1:
            raise KeyboardInterrupt
        (out / "whole").write_text("x")

    monkeypatch.setitem(assets.ASSETS, "tiny", ("tiny-folder", build))
    with pytest.raises(KeyboardInterrupt):
        assets.get_asset("tiny", tmp_path)
    assert not (tmp_path / "tiny-folder").exists()
    assert (assets.get_asset("tiny", tmp_path) / "whole").exists()
    assets.get_asset("tiny", tmp_path)
    assert len(calls) == 2
    with pytest.raises(ValueError, match="unknown asset 'tinny'; known: model"):
        assets.get_asset("tinny", tmp_path)


def test_tokenizer_without_padding_pads_with_its_end_token(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token is None
    assert common.load_tokenizer(str(tmp_path)).pad_token == "<|endoftext|>"
