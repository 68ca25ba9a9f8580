"""finetune.py without a Trainer: an own Accelerate loop, with TacoScapeAccelerator in the place of Accelerator.

    accelerate launch --config_file recipes/accelerate_2.yaml recipes/accelerate_loop.py \\
        --model_name_or_path data/SmolLM2-135M-Instruct-qwen2 --dataset_name data/movie-sentiment \\
        --prompt_template 'Review: {text}\\nSentiment:' --label_words ' negative' ' positive' \\
        --tp_size 2 --tp_codec taco --max_steps 20 --output_dir runs/loop

The loop is the one of Accelerate's own examples; what differs is marked with (1), (2), (3).
"""

import logging
import time
from dataclasses import dataclass, field

import torch
from tqdm import tqdm
from transformers import get_linear_schedule_with_warmup, set_seed

import report
from common import ModelArguments, accepts, load_model_and_tokenizer, parse_arguments, setup_logging
from evaluate_downstream import DownstreamArguments, collect_questions, evaluate_questions
from hf_taco_scape import ScapeAdamS, TacoScapeAccelerator, save_pretrained
from hf_taco_scape.training_args import TacoScapeOptions
from task_data import CompletionCollator, DataArguments, load_split, training_rows

logger = logging.getLogger("recipes.accelerate_loop")


@dataclass
class LoopArguments:
    output_dir: str = field(metadata={"help": "Where the checkpoint goes."})
    max_steps: int = field(default=100, metadata={"help": "Optimizer steps."})
    per_device_train_batch_size: int = field(
        default=8, metadata={"help": "Rows a data-parallel rank and micro-batch."}
    )
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Micro-batches an optimizer step."})
    learning_rate: float = field(default=2e-5, metadata={"help": "Peak; linear to zero after a tenth of the steps."})
    weight_decay: float = field(default=0.0, metadata={"help": "The optimizer's."})
    scape_density: float = field(
        default=0.01,
        metadata={"help": "With dp_sync scape: share of each matrix that is sent a step in the end."},
    )
    max_grad_norm: float = field(default=1.0, metadata={"help": "Gradients are clipped to this norm."})
    mixed_precision: str = field(default="no", metadata={"help": "no, bf16 or fp16."})
    seed: int = field(default=0, metadata={"help": "Of the order of the rows, and of dropout."})


def main(argv: list[str] | None = None) -> None:
    model_args, data_args, downstream_args, args, options = parse_arguments(
        ModelArguments, DataArguments, DownstreamArguments, LoopArguments, TacoScapeOptions, argv=argv
    )
    # (1) the toggles go to the accelerator; its num_processes counts data-parallel ranks
    accelerator = TacoScapeAccelerator(
        options,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
    )
    setup_logging(logging.INFO, accelerator.is_main_process)
    set_seed(args.seed)
    model, tokenizer = load_model_and_tokenizer(model_args)
    tasks = collect_questions(data_args, downstream_args) if downstream_args.do_eval_downstream else {}
    with accelerator.main_process_first():
        rows = load_split(data_args, data_args.train_split, data_args.train_file, data_args.max_train_samples)
        rows = training_rows(data_args, rows, tokenizer)
    loader = torch.utils.data.DataLoader(
        rows,
        batch_size=args.per_device_train_batch_size,
        shuffle=True,
        collate_fn=CompletionCollator(tokenizer.pad_token_id, accepts(model.forward, "logits_to_keep")),
    )
    settings = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    if options.dp_sync == "scape":  # its optimizer does the exchange; the accelerator tells it the groups
        settings |= {"density": args.scape_density, "hold_steps": args.max_steps // 10}
        optimizer = ScapeAdamS(model.parameters(), warmup_steps=args.max_steps // 2, **settings)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
    # AcceleratedScheduler steps once a data-parallel rank
    ticks = args.max_steps * accelerator.num_processes
    scheduler = get_linear_schedule_with_warmup(optimizer, ticks // 10, ticks)
    # (2) prepare splits the model over its tensor-parallel group, in place
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    def ask(name: str) -> dict:
        with accelerator.autocast():
            scores = evaluate_questions(model, tokenizer, tasks, downstream_args, data_args.max_length, accelerator)
        return {"name": name, "tasks": scores}

    runs = [ask("before")] if tasks else []
    model.train()
    progress = tqdm(total=args.max_steps, desc="steps", disable=not accelerator.is_main_process)
    start, step = time.perf_counter(), 0
    while step < args.max_steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                mean_loss = accelerator.gather(loss.detach()).mean().item()
                progress.set_postfix(loss=f"{mean_loss:.4f}", grad_norm=f"{norm:.2f}")
                progress.update()
                if step == args.max_steps:
                    break
    progress.close()
    seconds = time.perf_counter() - start
    if tasks:
        runs.append(ask("after"))
    # (3) collective: all ranks call it, one plain Hugging Face checkpoint is written
    save_pretrained(accelerator.unwrap_model(model), args.output_dir)
    if accelerator.is_main_process:
        tokenizer.save_pretrained(args.output_dir)
        if runs:
            report.print_scores(runs)
        facts = {"optimizer steps": f"{step} in {seconds:.0f} s", "last loss": f"{mean_loss:.4f}"}
        report.print_facts("this run", facts | {"checkpoint": args.output_dir})
    accelerator.end_training()


if __name__ == "__main__":
    main()
