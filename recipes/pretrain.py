"""Train a GPT-2 (or any causal architecture) from random weights on plain text, with compressed tensor parallelism.

    python recipes/assets.py gpt2-tokenizer text
    accelerate launch --config_file recipes/accelerate_2.yaml recipes/pretrain.py --tp_size 2 --tp_codec taco \\
        --tokenizer_name data/gpt2-tokenizer --dataset_name data/state-of-the-union --text_column text \\
        --output_dir runs/pretrain --max_steps 100

Documents are joined with the tokenizer's end-of-text token and cut into blocks. Arguments: PretrainArguments below,
DataArguments (task_data.py) and TacoScapeArguments; a YAML or JSON file may hold them all.
"""

import logging
import math
from dataclasses import dataclass, field
from itertools import chain

from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, default_data_collator, set_seed

import report
from common import load_tokenizer, parse_arguments, setup_logging
from finetune import TokensAtStart, bytes_so_far, closing_facts
from hf_taco_scape import TacoScapeArguments, TacoScapeTrainer
from task_data import IGNORED, DataArguments, load_split

logger = logging.getLogger("recipes.pretrain")


@dataclass
class PretrainArguments:
    tokenizer_name: str = field(metadata={"help": "A tokenizer on the hub, or a folder."})
    model_type: str = field(default="gpt2", metadata={"help": "Architecture: gpt2, qwen3, llama, ..."})
    config_overrides: str = field(
        default="n_layer=4,n_head=4,n_embd=256,resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0",
        metadata={"help": "Changes to that architecture's default configuration: name=value,name=value."},
    )
    block_size: int = field(default=128, metadata={"help": "Tokens a training row."})


def random_model(args: PretrainArguments, tokenizer):
    """A model with fresh weights whose vocabulary is the tokenizer's. Seed before calling: ranks must agree."""
    config = AutoConfig.for_model(args.model_type)
    config.update_from_string(args.config_overrides)
    config.vocab_size = len(tokenizer)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    if args.block_size > config.max_position_embeddings:
        raise ValueError(
            f"block_size {args.block_size} is longer than the model's {config.max_position_embeddings} positions: "
            "lower it, or raise n_positions or max_position_embeddings in config_overrides"
        )
    return AutoModelForCausalLM.from_config(config)


def blocks(rows: Dataset, column: str, tokenizer, block_size: int, workers: int | None) -> Dataset:
    """Rows of exactly `block_size` tokens, columns input_ids and labels; the last, shorter block is dropped."""
    if column not in rows.column_names:
        raise ValueError(f"no column {column!r}; give text_column, one of {', '.join(rows.column_names)}")

    def cut(batch: dict) -> dict:
        documents = tokenizer(batch[column]).input_ids
        stream = list(chain.from_iterable([*ids, tokenizer.eos_token_id] for ids in documents))
        whole = len(stream) // block_size * block_size
        ids = [stream[i : i + block_size] for i in range(0, whole, block_size)]
        # a block's first token is never predicted; left in, it would count in the Trainer's mean loss
        return {"input_ids": ids, "labels": [[IGNORED, *block[1:]] for block in ids]}

    return rows.map(cut, batched=True, remove_columns=rows.column_names, num_proc=workers, desc="cutting blocks")


def main(argv: list[str] | None = None) -> None:
    model_args, data_args, args = parse_arguments(PretrainArguments, DataArguments, TacoScapeArguments, argv=argv)
    is_main = args.process_index == 0
    setup_logging(args.get_process_log_level(), is_main)
    if args.include_num_input_tokens_seen == "no":
        args.include_num_input_tokens_seen = "all"
    tokenizer = load_tokenizer(model_args.tokenizer_name)
    set_seed(args.seed)
    model = random_model(model_args, tokenizer)
    logger.info("%s with %.1f million random weights", model_args.model_type, model.num_parameters() / 1e6)

    column, cutting = data_args.text_column or "text", (model_args.block_size, data_args.preprocessing_num_workers)
    with args.main_process_first(desc="cutting blocks"):
        rows = load_split(data_args, data_args.train_split, data_args.train_file, data_args.max_train_samples)
        train_rows = blocks(rows, column, tokenizer, *cutting)
        rows = load_split(data_args, data_args.eval_split, data_args.eval_file, data_args.max_eval_samples)
        eval_rows = blocks(rows, column, tokenizer, *cutting)
    if not len(train_rows) or not len(eval_rows):
        raise ValueError(f"the text is shorter than one block of {model_args.block_size} tokens: lower block_size")

    trainer = TacoScapeTrainer(
        model=model,
        args=args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    before = trainer.evaluate()["eval_loss"]
    start = TokensAtStart()
    trainer.add_callback(start)
    sent_before = bytes_so_far(trainer)
    metrics = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint).metrics
    sent, trained = bytes_so_far(trainer) - sent_before, trainer.state.num_input_tokens_seen - start.tokens
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("all", {**metrics, "eval_loss_before": before, "eval_loss": after})
    if is_main:
        facts = {
            "evaluation loss": f"{before:.4f} before, {after:.4f} after",
            "perplexity": f"{math.exp(before):.1f} before, {math.exp(after):.1f} after",
        }
        report.print_facts("this run", facts | closing_facts(trainer, metrics, trained, sent))


if __name__ == "__main__":
    main()
