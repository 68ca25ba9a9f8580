"""A tiny random model, a tokenizer and a two-word classification task, as folders and files that recipes read."""

import json
import pathlib
import random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

GOOD = ["great", "lovely", "superb"]
BAD = ["awful", "dull", "boring"]
TEMPLATE = "{text} means"
WORDS = [" negative", " positive"]


def reviews(n: int, seed: int) -> list[dict]:
    """Rows whose label follows from one word; labels alternate."""
    shuffler = random.Random(seed)
    rows = []
    for i in range(n):
        word = shuffler.choice(GOOD if i % 2 else BAD)
        subject = shuffler.choice(["film", "plot", "cast", "score", "ending"])
        rows.append(
            {"text": " ".join(["the", subject, "is"] + ["really"] * shuffler.randrange(3) + [word]), "label": i % 2}
        )
    return rows


def write_jsonl(path: pathlib.Path, rows: list[dict]) -> pathlib.Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE without a padding token, like GPT-2's; " negative" and " positive" are one token each."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [TEMPLATE.format(text=row["text"]) + WORDS[row["label"]] for row in reviews(200, 3)]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>", model_max_length=512
    )


def make_model(folder: pathlib.Path) -> pathlib.Path:
    """A random Qwen2 and its tokenizer; three heads, so that two ranks get uneven shares."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
