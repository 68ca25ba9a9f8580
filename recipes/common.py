"""What the recipe scripts share: arguments from a file or the command line, loading a model, logging."""

import difflib
import inspect
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path

import transformers
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "A model on the hub, or a folder written by save_pretrained."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "Default: the model's own tokenizer."})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit on the hub."})
    dtype: str = field(
        default="float32", metadata={"help": "Type of the weights: float32, bfloat16, float16 or auto."}
    )
    attn_implementation: str | None = field(default=None, metadata={"help": "eager, sdpa, flash_attention_2, ..."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run modelling code that comes with the model."})


def parse_arguments(*dataclass_types, argv: list[str] | None = None) -> tuple:
    """Fill the dataclasses from `script.py [settings.yaml | settings.json] [--flag value ...]`; a flag beats the file.

    Raises ValueError for a key or flag that no dataclass has.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = HfArgumentParser(dataclass_types)
    if argv and argv[0].endswith((".yaml", ".yml", ".json")):
        path = Path(argv.pop(0))
        if not path.is_file():
            raise ValueError(f"settings file {path} does not exist")
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
        if not isinstance(settings, dict):
            raise ValueError(f"{path} must hold one mapping of argument names to values")
        known = {action.dest: action for action in parser._actions}
        for key in settings:
            if key not in known:
                close = difflib.get_close_matches(key, known, n=3)
                hint = f"; did you mean {', '.join(close)}?" if close else ""
                raise ValueError(f"{path}: unknown argument {key!r}{hint}")
            known[key].required = False
        parser.set_defaults(**settings)
    return parser.parse_args_into_dataclasses(args=argv, look_for_args_file=False)


def load_tokenizer(name: str, revision: str = "main", trust_remote_code: bool = False):
    """A tokenizer that can pad: models without a padding token (GPT-2, Llama) pad with their end-of-text token."""
    tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model_and_tokenizer(args: ModelArguments):
    """The whole, unsharded causal language model and its tokenizer, on the CPU."""
    tokenizer = load_tokenizer(
        args.tokenizer_name or args.model_name_or_path, args.model_revision, args.trust_remote_code
    )
    model = AutoModelForCausalLM.from_pretrained(
        args.model_name_or_path,
        revision=args.model_revision,
        dtype=args.dtype,
        attn_implementation=args.attn_implementation,
        trust_remote_code=args.trust_remote_code,
    )
    return model, tokenizer


def accepts(function, name: str) -> bool:
    """Whether `function` has a parameter of that name."""
    return name in inspect.signature(function).parameters


def setup_logging(level: int, is_main: bool) -> None:
    """Messages of the main process at `level`, of the others from warnings up."""
    level = level if is_main else logging.WARNING
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("recipes").setLevel(level)
    # a few lines at the start: what is split, what is replicated, how messages travel
    logging.getLogger("hf_taco_scape").setLevel(logging.INFO if is_main else logging.WARNING)
    transformers.utils.logging.set_verbosity(max(level, logging.WARNING))
