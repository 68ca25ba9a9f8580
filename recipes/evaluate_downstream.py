"""Questions with right answers, asked of a plain checkpoint by one process, or by finetune.py of a split model.

    python recipes/evaluate_downstream.py --model_name_or_path runs/quickstart --dataset_name data/movie-sentiment \\
        --prompt_template 'Review: {text}\\nSentiment:' --label_words ' negative' ' positive'
    python recipes/evaluate_downstream.py --model_name_or_path M --downstream_tasks task.json     # BIG-bench files
    python recipes/evaluate_downstream.py --model_name_or_path M --lm_eval_tasks TASK --lm_eval_include_path DIR

An answer is the choice with the highest log-likelihood after the prompt, as in lm_eval's `multiple_choice`.
"""

import json
import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

import metrics
import report
from common import ModelArguments, accepts, load_model_and_tokenizer, parse_arguments, setup_logging
from task_data import (
    DataArguments,
    Question,
    encode_pair,
    left_pad,
    load_split,
    questions_from_dataset,
    questions_from_task_json,
)

logger = logging.getLogger("recipes.evaluate_downstream")


@dataclass
class DownstreamArguments:
    do_eval_downstream: bool = field(
        default=False, metadata={"help": "finetune.py: ask the questions of the evaluation split before and after."}
    )
    downstream_tasks: list[str] | None = field(
        default=None, metadata={"help": "More questions: BIG-bench task.json files (do not train on them)."}
    )
    downstream_batch_size: int = field(default=16, metadata={"help": "Sequences a forward pass and rank."})
    length_normalize: bool = field(
        default=False, metadata={"help": "Divide an answer's log-likelihood by its bytes (lm_eval's acc_norm)."}
    )


@dataclass
class ScriptArguments:
    run_name: str = field(default="1 process, plain from_pretrained", metadata={"help": "Name in the table."})
    output_file: str | None = field(default=None, metadata={"help": "Write scores and answers here, as JSON."})
    compare_to: list[str] | None = field(
        default=None, metadata={"help": "Earlier output files over the same questions, oldest first."}
    )
    max_changed: int | None = field(
        default=None, metadata={"help": "Fail if more answers than this differ from the last file of compare_to."}
    )
    device: str | None = field(default=None, metadata={"help": "Default: the accelerator if there is one, or cpu."})
    lm_eval_tasks: list[str] | None = field(
        default=None, metadata={"help": "Tasks for lm_eval (pip install lm_eval)."}
    )
    lm_eval_include_path: str | None = field(default=None, metadata={"help": "Folder of lm_eval task YAMLs."})


def collect_questions(data: DataArguments, downstream: DownstreamArguments) -> dict[str, list[Question]]:
    """Questions by task name: the evaluation split's, if the arguments say how to ask them, and the task files'."""
    out = {}
    if data.label_words or data.choices_column:
        rows = load_split(data, data.eval_split, data.eval_file, data.max_eval_samples)
        out[Path(data.eval_file or data.dataset_name).stem] = questions_from_dataset(data, rows)
    for path in downstream.downstream_tasks or []:
        name = Path(path).parent.name if Path(path).stem == "task" else Path(path).stem
        out[name] = questions_from_task_json(path, data.max_eval_samples)
    return out


@torch.no_grad()
def log_likelihoods(
    model, tokenizer, questions: list[Question], batch_size: int = 16, max_length: int = 512, accelerator=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the log-probabilities of each answer's tokens, and their number: two float64 [questions, most choices].

    Missing choices are -inf and 0. With an `accelerator`, its data-parallel ranks share the work and all get the
    result; ranks of one tensor-parallel group run the same batches.
    """
    rank, ranks = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    device = next(model.parameters()).device
    max_length = min(max_length, getattr(model.config, "max_position_embeddings", max_length))
    requests: dict[tuple[int, ...], list] = {}
    for q, question in enumerate(questions):
        for c, choice in enumerate(question.choices):
            ids, n_prompt = encode_pair(tokenizer, question.prompt, choice, max_length)
            if n_prompt == 0:
                ids, n_prompt = [tokenizer.bos_token_id or tokenizer.eos_token_id, *ids], 1
            # the last token is only predicted; answers of one token therefore share their forward pass
            requests.setdefault(tuple(ids[:-1]), []).append((q, c, ids[n_prompt:]))
    contexts = sorted(requests, key=len, reverse=True)
    batches = [contexts[i : i + batch_size] for i in range(0, len(contexts), batch_size)]
    shape = (len(questions), max(len(q.choices) for q in questions))
    sums, counts = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    short = accepts(model.forward, "logits_to_keep")
    was_training = model.training
    model.eval()
    quiet = accelerator is not None and not accelerator.is_local_main_process
    for batch in tqdm(batches[rank::ranks], desc="questions", unit="batch", disable=quiet):
        keep = max(len(answer) for context in batch for _, _, answer in requests[context])
        inputs = {name: t.to(device) for name, t in left_pad(batch, tokenizer.pad_token_id).items()}
        logits = model(**inputs, **({"logits_to_keep": keep} if short else {}), use_cache=False).logits[:, -keep:]
        log_probs = logits.float().log_softmax(-1)
        places, values = [], []
        for row, context in enumerate(batch):
            for q, c, answer in requests[context]:
                steps = log_probs[row, keep - len(answer) :]
                values.append(steps.gather(1, torch.tensor(answer, device=device)[:, None]).sum())
                places.append((q, c, len(answer)))
        # one wait for the device a batch
        for (q, c, length), value in zip(places, torch.stack(values).tolist(), strict=True):
            sums[q, c], counts[q, c] = value, length
    model.train(was_training)
    if ranks > 1:
        both = accelerator.gather(torch.stack([sums, counts])[None].to(device)).cpu().sum(0)
        sums, counts = both[0], both[1]
    return sums.masked_fill(counts == 0, -math.inf), counts


def evaluate_questions(
    model,
    tokenizer,
    tasks: dict[str, list[Question]],
    arguments: DownstreamArguments,
    max_length=512,
    accelerator=None,
) -> dict[str, dict]:
    """Scores of each task: loss (mean over the right answers' tokens), accuracy with interval, macro F1, answers."""
    results = {}
    for name, questions in tasks.items():
        start = time.perf_counter()
        sums, counts = log_likelihoods(
            model, tokenizer, questions, arguments.downstream_batch_size, max_length, accelerator
        )
        ranking = sums
        if arguments.length_normalize:
            lengths = torch.ones_like(sums)
            for q, question in enumerate(questions):
                lengths[q, : len(question.choices)] = torch.tensor([len(c.encode()) for c in question.choices])
            ranking = sums / lengths
        gold = torch.tensor([q.gold for q in questions])[:, None]
        predictions, references = ranking.argmax(1).tolist(), gold[:, 0].tolist()
        results[name] = {
            "loss": (-sums.gather(1, gold).sum() / counts.gather(1, gold).sum()).item(),
            **metrics.score(predictions, references),
            "seconds": time.perf_counter() - start,
            "predictions": predictions,
            "references": references,
        }
    return results


def run_lm_eval(model, tokenizer, tasks: list[str], include_path: str | None, batch_size: int) -> None:
    """Hand the loaded model to lm_eval and print its own table."""
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table
    except ImportError as error:
        raise ValueError(f"lm_eval_tasks needs lm_eval ({error}): pip install lm_eval") from error
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device=str(model.device))
    manager = TaskManager(include_path=include_path)
    print(make_table(lm_eval.simple_evaluate(model=wrapped, tasks=tasks, task_manager=manager)))


def check_changed(runs: list[dict], most: int) -> None:
    """SystemExit if the last two runs answer more than `most` questions of a task differently."""
    for task, scores in runs[-1]["tasks"].items():
        changed = report.compare_tasks(scores, runs[-2]["tasks"][task])["changed"]
        if changed > most:
            raise SystemExit(f"{task}: {changed} answers differ from {runs[-2]['name']!r}, more than {most}")


def main(argv: list[str] | None = None) -> list[dict]:
    model_args, data_args, downstream_args, args = parse_arguments(
        ModelArguments, DataArguments, DownstreamArguments, ScriptArguments, argv=argv
    )
    setup_logging(logging.INFO, is_main=True)
    tasks = collect_questions(data_args, downstream_args)
    if not tasks and not args.lm_eval_tasks:
        raise ValueError(
            "nothing to ask: give label_words or choices_column with prompt_template and a dataset, downstream_tasks, "
            "or lm_eval_tasks"
        )
    if args.max_changed is not None and not args.compare_to:
        raise ValueError("max_changed needs compare_to: the output file to hold the answers against")
    if missing := [path for path in args.compare_to or [] if not Path(path).is_file()]:
        raise ValueError(f"compare_to: no such file: {', '.join(missing)}")
    runs = [json.loads(Path(path).read_text(encoding="utf-8")) for path in args.compare_to or []]
    model, tokenizer = load_model_and_tokenizer(model_args)
    accelerator = torch.accelerator.current_accelerator()
    model.to(args.device or accelerator or "cpu")
    if tasks:
        scores = evaluate_questions(model, tokenizer, tasks, downstream_args, data_args.max_length)
        runs.append({"name": args.run_name, "tasks": scores})
        if args.output_file:
            report.write_json(args.output_file, runs[-1])
        report.print_scores(runs)
        if args.max_changed is not None:
            check_changed(runs, args.max_changed)
    if args.lm_eval_tasks:
        include, batch_size = args.lm_eval_include_path, downstream_args.downstream_batch_size
        run_lm_eval(model, tokenizer, args.lm_eval_tasks, include, batch_size)
    return runs


if __name__ == "__main__":
    main()
