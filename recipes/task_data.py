"""From any `datasets` source to training rows and to questions with right answers.

A row of a dataset becomes a prompt (`prompt_template`) and a completion, which is one of
- the word that stands for its label (`label_words`, for classification);
- one of the row's own answers (`choices_column`, for multiple choice);
- a filled-in template (`completion_template`, for instructions);
or it is plain text to model (`text_column`). Loss is on the completion only; on every token of plain text.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import ClassLabel, Dataset, DatasetDict, load_dataset, load_from_disk

IGNORED = -100
# loader of `datasets` by file name ending
LOADERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".txt": "text"}


@dataclass
class DataArguments:
    dataset_name: str | None = field(
        default=None, metadata={"help": "A dataset on the hub, or a folder written by Dataset(Dict).save_to_disk."}
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of a hub dataset."})
    train_split: str = field(default="train", metadata={"help": "Split to train on; slices work: train[:10%]."})
    eval_split: str = field(default="test", metadata={"help": "Split to evaluate on."})
    train_file: str | None = field(default=None, metadata={"help": f"Local file instead: {', '.join(LOADERS)}."})
    eval_file: str | None = field(default=None, metadata={"help": "Local file instead, as for training."})
    prompt_template: str | None = field(default=None, metadata={"help": "Such as 'Review: {text}\\nSentiment:'."})
    label_column: str = field(default="label", metadata={"help": "Index, or class name, of the right answer."})
    label_words: list[str] | None = field(
        default=None, metadata={"help": "What the model should write for label 0, 1, ...; mind the leading blank."}
    )
    label_values: list[str] | None = field(
        default=None, metadata={"help": "Values of label_column in the order of label_words, if it holds text."}
    )
    choices_column: str | None = field(default=None, metadata={"help": "Column with a row's list of answers."})
    completion_template: str | None = field(default=None, metadata={"help": "Such as ' {answer}'."})
    text_column: str | None = field(default=None, metadata={"help": "Train on this column as plain text."})
    max_length: int = field(default=512, metadata={"help": "Tokens a row; longer prompts lose their beginning."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Use the first N training rows."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Use the first N evaluation rows."})
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes for tokenising."})

    def __post_init__(self):
        kinds = ("label_words", "choices_column", "completion_template", "text_column")
        given = [name for name in kinds if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"give one of {', '.join(kinds)}, not {' and '.join(given)} together")
        if given and given != ["text_column"] and not self.prompt_template:
            raise ValueError(f"{given[0]} needs prompt_template, such as 'Review: {{text}}\\nSentiment:'")
        # a shell passes \n as two characters
        for name in ("prompt_template", "completion_template"):
            if value := getattr(self, name):
                setattr(self, name, value.replace("\\n", "\n"))


@dataclass(frozen=True)
class Question:
    """A prompt, its possible continuations and the index of the right one."""

    prompt: str
    choices: tuple[str, ...]
    gold: int


def load_split(args: DataArguments, split: str, file: str | None, limit: int | None) -> Dataset:
    """One split as a Dataset, of a file, a saved folder or the hub; at most `limit` rows."""
    if file:
        if not Path(file).is_file():
            raise ValueError(f"data file {file} does not exist")
        if (ending := Path(file).suffix) not in LOADERS:
            raise ValueError(f"cannot tell how to read {file}: its name must end in {', '.join(LOADERS)}")
        options = {"delimiter": "\t"} if ending == ".tsv" else {}
        rows = load_dataset(LOADERS[ending], data_files={"rows": file}, split="rows", **options)
    elif not args.dataset_name:
        raise ValueError("no data: give dataset_name, or train_file / eval_file")
    elif any((Path(args.dataset_name) / name).is_file() for name in ("dataset_dict.json", "state.json")):
        rows = load_from_disk(args.dataset_name)
        if isinstance(rows, DatasetDict):
            if split not in rows:
                raise ValueError(f"{args.dataset_name} has no split {split!r}, only {', '.join(rows)}")
            rows = rows[split]
    else:
        rows = load_dataset(args.dataset_name, args.dataset_config_name, split=split)
    return rows if limit is None else rows.select(range(min(limit, len(rows))))


def _fill(template: str, row: dict, columns: list[str]) -> str:
    try:
        return template.format_map(row)
    except KeyError as error:
        raise ValueError(f"template {template!r} names {error}; the columns are {', '.join(columns)}") from None


def _label_index(args: DataArguments, rows: Dataset):
    """A function from a row to the index of its right answer."""
    if args.label_column not in rows.column_names:
        raise ValueError(f"no column {args.label_column!r}; give label_column, one of {', '.join(rows.column_names)}")
    if args.label_values:
        return lambda row: args.label_values.index(str(row[args.label_column]))
    feature = rows.features[args.label_column]
    if not isinstance(feature, ClassLabel) and feature.dtype == "string":
        raise ValueError(f"column {args.label_column!r} holds text: give label_values in the order of label_words")
    return lambda row: int(row[args.label_column])


def questions_from_dataset(args: DataArguments, rows: Dataset) -> list[Question]:
    """Rows as questions; needs `label_words` or `choices_column`."""
    if not (args.label_words or args.choices_column):
        raise ValueError("a downstream evaluation needs label_words or choices_column (and prompt_template)")
    gold, out = _label_index(args, rows), []
    for row in rows:
        choices = tuple(args.label_words or row[args.choices_column])
        index = gold(row)
        if not 0 <= index < len(choices):
            raise ValueError(f"label {index} has no answer among the {len(choices)} given ({', '.join(choices)})")
        out.append(Question(_fill(args.prompt_template, row, rows.column_names), choices, index))
    return out


def questions_from_task_json(path: str | Path, limit: int | None = None) -> list[Question]:
    """Multiple-choice questions of a BIG-bench `task.json` (examples with `input` and `target_scores`).

    Prefixes are the file's, or BIG-bench's defaults "Q: " and "A: ". Examples without one best answer are left out.
    """
    task = json.loads(Path(path).read_text(encoding="utf-8"))
    before, after = task.get("example_input_prefix", "\nQ: "), task.get("example_output_prefix", "\nA: ")
    out = []
    for example in task.get("examples", []):
        scores = example.get("target_scores")
        if not scores or list(scores.values()).count(max(scores.values())) != 1:
            continue
        prompt = f"{task.get('task_prefix', '')}{before}{example['input']}{after}".strip()
        choices = tuple(scores)
        out.append(Question(prompt, tuple(f" {c}" for c in choices), choices.index(max(scores, key=scores.get))))
        if len(out) == limit:
            break
    if not out:
        raise ValueError(
            f"{path} has no example with target_scores and one best answer: not a multiple-choice task.json"
        )
    return out


def encode_pair(tokenizer, prompt: str, completion: str, max_length: int) -> tuple[list[int], int]:
    """Token ids of prompt + completion, and how many of them belong to the prompt.

    Both are tokenised as one string, as the model would meet them. Too long: the prompt loses its beginning.
    """
    ids = tokenizer(prompt + completion).input_ids
    alone = tokenizer(prompt).input_ids
    # a merge across the boundary belongs to the completion
    n_prompt = next((i for i, (a, b) in enumerate(zip(ids, alone, strict=False)) if a != b), min(len(ids), len(alone)))
    n_prompt = min(n_prompt, len(ids) - 1)
    if len(ids) > max_length:
        cut = len(ids) - max_length
        if cut >= n_prompt:
            raise ValueError(f"completion {completion[:60]!r} alone is longer than max_length {max_length}")
        ids, n_prompt = ids[cut:], n_prompt - cut
    return ids, n_prompt


def training_rows(args: DataArguments, rows: Dataset, tokenizer) -> Dataset:
    """Columns input_ids and labels; labels of prompt tokens are -100, so the loss is on the completion only."""
    columns = rows.column_names
    gold = _label_index(args, rows) if args.label_words or args.choices_column else None
    if not gold and not args.completion_template and args.text_column not in columns:
        raise ValueError(
            "say what to learn: label_words, choices_column or completion_template with prompt_template, or "
            f"text_column; the columns are {', '.join(columns)}"
        )

    def encode(row: dict) -> dict:
        if args.text_column:
            ids = tokenizer(row[args.text_column], truncation=True, max_length=args.max_length).input_ids
            # the first token is never predicted; left in, it would count in the Trainer's mean loss
            return {"input_ids": ids, "labels": [IGNORED, *ids[1:]]}
        if args.completion_template:
            completion = _fill(args.completion_template, row, columns) + (tokenizer.eos_token or "")
        else:
            completion = (args.label_words or row[args.choices_column])[gold(row)]
        ids, n_prompt = encode_pair(tokenizer, _fill(args.prompt_template, row, columns), completion, args.max_length)
        return {"input_ids": ids, "labels": [IGNORED] * n_prompt + ids[n_prompt:]}

    return rows.map(encode, remove_columns=columns, num_proc=args.preprocessing_num_workers, desc="tokenising")


def left_pad(sequences: list, pad_id: int) -> dict[str, torch.Tensor]:
    """int64 [rows, longest] input_ids, attention_mask and position_ids; every row ends in the last column."""
    longest = max(map(len, sequences))
    mask = torch.tensor([[0] * (longest - len(s)) + [1] * len(s) for s in sequences])
    ids = torch.tensor([[pad_id] * (longest - len(s)) + list(s) for s in sequences])
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


@dataclass
class CompletionCollator:
    """Batches of `training_rows`, padded on the left, labels [rows, kept].

    A model that takes `logits_to_keep` computes the vocabulary-wide logits only of the columns with a label and of the
    one before them, which predicts the first; logits of all columns are a third of a small model's work.
    """

    pad_id: int
    logits_to_keep: bool

    def __call__(self, rows: list[dict]) -> dict:
        batch = left_pad([row["input_ids"] for row in rows], self.pad_id)
        longest = batch["input_ids"].shape[1]
        labels = torch.tensor([[IGNORED] * (longest - len(row["labels"])) + row["labels"] for row in rows])
        if not self.logits_to_keep:
            return batch | {"labels": labels}
        first = int((labels != IGNORED).any(0).nonzero()[0]) if (labels != IGNORED).any() else longest - 1
        kept = min(longest - first + 1, longest)
        return batch | {"labels": labels[:, -kept:], "logits_to_keep": kept}
