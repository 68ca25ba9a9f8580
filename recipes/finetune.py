"""Fine-tune a causal language model with compressed tensor parallelism, and measure what it learned.

    accelerate launch --config_file recipes/accelerate_2.yaml recipes/finetune.py recipes/quickstart.yaml
    accelerate launch --config_file recipes/accelerate_2.yaml recipes/finetune.py \\
        --model_name_or_path Qwen/Qwen3-0.6B --dataset_name OWNER/DATA \\
        --prompt_template '{question}' --completion_template ' {answer}' \\
        --tp_size 2 --tp_codec taco --output_dir runs/mine

Arguments: ModelArguments (common.py), DataArguments (task_data.py), DownstreamArguments (evaluate_downstream.py) and
TacoScapeArguments, which are transformers' TrainingArguments and more; a YAML or JSON file may hold them all.
"""

import logging
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

from transformers import TrainerCallback, set_seed

import report
from common import ModelArguments, accepts, load_model_and_tokenizer, parse_arguments, setup_logging
from evaluate_downstream import DownstreamArguments, collect_questions, evaluate_questions
from hf_taco_scape import TacoScapeArguments, TacoScapeTrainer
from hf_taco_scape.parallel import split_state
from task_data import CompletionCollator, DataArguments, load_split, training_rows

logger = logging.getLogger("recipes.finetune")


def bytes_so_far(trainer) -> Counter:
    """What this rank has sent: {axis}_dense and {axis}_sent in bytes, for axis tp and dp."""
    state, sent = split_state(trainer.model), Counter()
    for axis, meter in (("tp", state.comm.meter if state else None), ("dp", trainer.accelerator.gradients.meter)):
        if meter:
            sent |= Counter({f"{axis}_dense": meter.dense_bytes, f"{axis}_sent": meter.sent_bytes})
    return sent


class TokensAtStart(TrainerCallback):
    """Remembers `num_input_tokens_seen` of a resumed run, so that tokens/s counts this run's only."""

    tokens = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.tokens = state.num_input_tokens_seen


def closing_facts(trainer, metrics: dict, tokens: int, sent: Counter) -> dict[str, str]:
    """What the training cost, for the table at its end; `sent` is the difference of two `bytes_so_far`."""
    args, seconds = trainer.args, metrics["train_runtime"]
    codecs = args.tp_codec if args.tp_codec_backward is None else f"{args.tp_codec} / {args.tp_codec_backward}"
    facts = {
        "processes": f"{args.world_size} = tp {args.tp_size} x dp {args.world_size // args.tp_size}",
        "optimizer steps": f"{trainer.state.global_step} in {seconds:.0f} s",
        "training loss": f"{metrics['train_loss']:.4f}",
        "tokens/s": f"{tokens / seconds:.0f} ({tokens} tokens)",
    }
    for axis, name in (("tp", f"tensor parallel, codec {codecs}"), ("dp", "data parallel")):
        if dense := sent[f"{axis}_dense"]:
            wire = sent[f"{axis}_sent"]
            saved = f"{report.size(wire)} sent a rank, {report.size(dense)} if dense: {dense / wire:.2f} times less"
            facts[name] = saved
    return facts | {"checkpoint": f"{args.output_dir} (plain Hugging Face format)"}


def main(argv: list[str] | None = None) -> None:
    model_args, data_args, downstream_args, args = parse_arguments(
        ModelArguments, DataArguments, DownstreamArguments, TacoScapeArguments, argv=argv
    )
    is_main = args.process_index == 0
    setup_logging(args.get_process_log_level(), is_main)
    set_seed(args.seed)
    if args.include_num_input_tokens_seen == "no":
        args.include_num_input_tokens_seen = "non_padding"

    tasks = collect_questions(data_args, downstream_args) if downstream_args.do_eval_downstream else {}
    if downstream_args.do_eval_downstream and not tasks:
        raise ValueError("do_eval_downstream needs label_words or choices_column, or downstream_tasks")
    model, tokenizer = load_model_and_tokenizer(model_args)
    with args.main_process_first(desc="tokenising"):
        rows = load_split(data_args, data_args.train_split, data_args.train_file, data_args.max_train_samples)
        train_rows = training_rows(data_args, rows, tokenizer)
        eval_rows = None
        if args.do_eval or args.eval_strategy != "no":
            rows = load_split(data_args, data_args.eval_split, data_args.eval_file, data_args.max_eval_samples)
            eval_rows = training_rows(data_args, rows, tokenizer)

    trainer = TacoScapeTrainer(
        model=model,
        args=args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        data_collator=CompletionCollator(tokenizer.pad_token_id, accepts(model.forward, "logits_to_keep")),
    )

    codec = args.tp_codec if args.tp_size > 1 else "none"

    def ask(name: str, codec: str) -> dict:
        logger.info("asking %d questions: %s, codec %s", sum(map(len, tasks.values())), name, codec)
        split = split_state(trainer.model)
        plain = split.comm.uncompressed() if split and codec == "none" else nullcontext()
        with trainer.accelerator.autocast(), plain:
            scores = evaluate_questions(
                trainer.model, tokenizer, tasks, downstream_args, data_args.max_length, trainer.accelerator
            )
        run = {"name": f"{name}: tp {args.tp_size}, codec {codec}", "tasks": scores}
        if is_main:
            report.write_json(Path(args.output_dir) / f"downstream_{name}_{codec}.json", run)
        return run

    runs = [ask("before", codec)] if tasks else []
    start = TokensAtStart()
    trainer.add_callback(start)
    sent_before = bytes_so_far(trainer)
    metrics = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint).metrics
    sent, trained = bytes_so_far(trainer) - sent_before, trainer.state.num_input_tokens_seen - start.tokens
    if eval_rows is not None:
        metrics |= trainer.evaluate()
    if tasks:
        # once as trained and, so that a reload in one process can be held against it, without the codec's noise
        runs += [ask("after", used) for used in dict.fromkeys([codec, "none"])]
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("all", metrics)
    if is_main:
        if runs:
            report.print_scores(runs)
        report.print_facts("this run", closing_facts(trainer, metrics, trained, sent))


if __name__ == "__main__":
    main()
