import json
import os
import pydoc_data.topics
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from tiedgpt.text import Tokenizer


def rust_of(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Return the same tokenizer as one of the tokenizers library."""
    return tokenizers.Tokenizer.from_str(tokenizer.to_json())


def write_pair(
    rust: tokenizers.Tokenizer, folder: Path, names: tuple[str, str] = ("vocab.json", "merges.txt")
) -> Path:
    """Write the vocabulary and the merges of a BPE in two files of a folder."""
    model = json.loads(rust.to_str())["model"]
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in model["merges"]), ""]
    folder.mkdir(exist_ok=True)
    (folder / names[0]).write_text(json.dumps(rust.get_vocab()), encoding="utf-8")
    (folder / names[1]).write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def corpus() -> str:
    """A few hundred kilobytes of English that every Python has."""
    return "\n".join(pydoc_data.topics.topics.values())


@pytest.fixture(scope="session")
def bpe(corpus: str) -> Tokenizer:
    return Tokenizer.train([corpus], vocab_size=1000)


@pytest.fixture(scope="session")
def char(corpus: str) -> Tokenizer:
    return Tokenizer.characters([corpus, "naïve 日本 👍\r\n\t"])


@pytest.fixture(scope="session")
def gpt2_folder() -> Path:
    """OpenAI's encoder.json and vocab.bpe."""
    folder = os.environ.get("TIEDGPT_GPT2_BPE")
    if not folder:
        pytest.skip("TIEDGPT_GPT2_BPE names no folder with GPT-2's encoder.json and vocab.bpe")
    return Path(folder)


@pytest.fixture(scope="session")
def gpt1_folder(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small vocab.json and merges.txt of GPT-1's kind, as the tokenizers library trains them."""
    rust = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    rust.normalizer = normalizers.BertNormalizer(lowercase=True)
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=["<unk>"],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    rust.train_from_iterator([corpus[:100_000]], trainer)
    return write_pair(rust, tmp_path_factory.mktemp("gpt1"))


@pytest.fixture(scope="session")
def gpt1(gpt1_folder: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(gpt1_folder)
