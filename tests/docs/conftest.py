"""A directory as the pages assume it: texts, examples, a trained run, and a GPT-2 by its name."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.cli.main import main

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
MADE = "<!-- Made by docs/generate.py"


def story(n: int, seed: int = 0) -> str:
    """Return n sentences that are alike, and not the same."""
    draw = random.Random(seed)
    who, where = ("a cat", "a dog", "the queen", "an old man"), ("a house", "the wood", "Rome")
    return "".join(
        f"Once upon a time there was {draw.choice(who)} in {draw.choice(where)}. "
        f"It was {draw.randrange(1900, 2000)} and the day was {draw.choice(('cold', 'warm'))}.\n\n"
        for _ in range(n)
    )


def write_lines(path: Path, lines: list[dict]) -> None:
    """Write `.jsonl`."""
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def small_gpt2(directory: Path, tokenizer: Tokenizer) -> None:
    """Write a Hugging Face directory, of a GPT-2 that is small."""
    torch.manual_seed(0)
    config = GPTConfig.preset(
        "gpt2", vocab_size=len(tokenizer), n_positions=96, n_embd=32, n_layer=2, n_head=2
    )
    GPT(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    """The directory that `workplace` copies."""
    place = tmp_path_factory.mktemp("pages")
    (place / "my.txt").write_text(story(300))
    (place / "text.txt").write_text(story(20, seed=1))
    says = [("Where is the cat?", "In a house."), ("Who was cold?", "The queen was.")] * 12
    chats = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
        for a, b in says
    ]
    write_lines(place / "chats.jsonl", chats)
    labelled = [(f"{n} cats were {label}", label) for n in range(40) for label in ("cold", "warm")]
    write_lines(place / "names.jsonl", [{"text": text, "label": label} for text, label in labelled])
    question = {"context": "Once upon a", "choices": [" time", " queen"], "answer": 0}
    write_lines(place / "questions.jsonl", [question] * 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        options = "--size nano --steps 20 --context 64 --batch-size 8 --vocab-size 400"
        assert main(["train", "my.txt", *options.split(), "--out", "runs/my-1"]) == 0
        shutil.copytree("runs/my-1", "runs/python-docs-1")  # what `make demo` leaves
    small_gpt2(place / "gpt2", Tokenizer.from_pretrained(place / "runs" / "my-1"))
    return place
