"""Write one GPT with random weights in every format that the inference benchmarks read.

    files = Files(Path("models"), "gpt2", vocabulary=None)
    files.packed("int8"), files.gguf("q8_0"), files.ctranslate2("int8"), files.onnx, files.hf

Each file is written at its first use, from the same weights, in a separate process, and stays in
the directory. This module imports nothing heavy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_lowercase

LIVELY = 1.5
"""Times GPT-2's initial ones: the blocks' matrices. At 1, greedy text is one token for ever."""
CTRANSLATE2 = """
import sys
from ctranslate2.converters import TransformersConverter
TransformersConverter(sys.argv[1]).convert(sys.argv[2], quantization=sys.argv[3])
"""
Q4_0 = """
import sys, llama_cpp
asked = llama_cpp.llama_model_quantize_default_params()
asked.ftype, asked.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, 2
source, to = (name.encode() for name in sys.argv[1:])
sys.exit(llama_cpp.llama_model_quantize(source, to, asked))
"""


@dataclass(frozen=True)
class Files:
    """The formats of one model, in a directory."""

    directory: Path
    size: str
    vocabulary: str | None
    """Directory of GPT-2's tokenizer; None: train a small one."""

    @property
    def hf(self) -> Path:
        """A Hugging Face directory, fp32."""
        vocabulary = [self.vocabulary] if self.vocabulary else []
        return self._made("hf", [__file__, self.size], vocabulary)

    def packed(self, precision: str) -> Path:
        """Ours for the CPU kernels: fp32, bf16, int8 or int4."""
        return self._converted(f"packed-{precision}", "packed", precision)

    def gguf(self, precision: str) -> Path:
        """llama.cpp's: fp32, bf16, q8_0, or q4_0, which llama.cpp makes of fp32."""
        if precision == "q4_0":
            made = self.directory / self.size / "q4_0.gguf"
            return made if made.exists() else self._made(made.name, self._quantizing())
        return self._converted(f"{precision}.gguf", "gguf", precision)

    def _quantizing(self) -> list[str]:
        return ["-c", Q4_0, str(self.gguf("fp32"))]

    def ctranslate2(self, precision: str) -> Path:
        """float32 or int8."""
        return self._made(f"ct2-{precision}", ["-c", CTRANSLATE2, str(self.hf)], [precision])

    @property
    def onnx(self) -> Path:
        """A graph with keys and values in and out, fp32; its directory, for it may be two files."""
        return self._converted("onnx", "onnx", "fp32") / "model.onnx"

    def _converted(self, name: str, to: str, precision: str) -> Path:
        begin = ["-m", "tiedgpt", "convert", str(self.hf)]
        return self._made(name, begin, ["--to", to, "--precision", precision])

    def _made(self, name: str, begin: list[str], end: list[str] | None = None) -> Path:
        """Return the path of `name`; if missing, write it by Python on begin + [path] + end."""
        path = self.directory / self.size / name
        if not path.exists():
            print(f"making {path}", file=sys.stderr)
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f"unfinished-{name}")
            if unfinished.is_dir():
                shutil.rmtree(unfinished)
            unfinished.unlink(missing_ok=True)
            command = [sys.executable, *begin, str(unfinished), *(end or [])]
            ran = subprocess.run(command, capture_output=True, text=True)
            if ran.returncode:
                raise SystemExit(f"{name} could not be made:\n{ran.stdout}{ran.stderr}")
            unfinished.rename(path)
        return path


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what says which model, and where."""
    parser.add_argument("--size", default="gpt2", help="a preset of GPTConfig, such as gpt2-xl")
    parser.add_argument("--models", type=Path, help="keep the models here for the next run")
    parser.add_argument("--vocabulary", help="GPT-2's encoder.json and vocab.bpe")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one short round, nothing kept")


@contextlib.contextmanager
def files_of(args: argparse.Namespace) -> Iterator[Files]:
    """Yield the files that the options ask for; without --models they go in the end."""
    if args.models:
        yield Files(args.models, args.size, args.vocabulary)
        return
    with tempfile.TemporaryDirectory() as directory:
        yield Files(Path(directory), args.size, args.vocabulary)


def invented(n_words: int) -> str:
    """Return words of random letters: text from which a vocabulary of any size can be learned."""
    draw = random.Random(0)
    return " ".join("".join(draw.choices(ascii_lowercase, k=6)) for _ in range(n_words))


def create(size: str, directory: str, vocabulary: str | None = None) -> None:
    """Save a GPT of that shape with random weights, lively enough to say different things."""
    import torch

    from tiedgpt import GPT, GPTConfig, Tokenizer

    config = GPTConfig.preset(size)
    if vocabulary:
        tokenizer = Tokenizer.from_pretrained(vocabulary)
    else:
        tokenizer = Tokenizer.train([invented(60_000)] * 2, config.vocab_size)
    end = tokenizer.eos_token_id
    torch.manual_seed(0)
    model = GPT(replace(config, bos_token_id=end, eos_token_id=end))
    with torch.no_grad():
        for block in model.h:
            for matrix in (p for p in block.parameters() if p.dim() == 2):
                matrix *= LIVELY
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    settings = Path(directory) / "tokenizer_config.json"  # CTranslate2 wants GPT-2's unk_token, too
    stored = json.loads(settings.read_text())
    settings.write_text(json.dumps(stored | {"unk_token": stored["eos_token"]}))


if __name__ == "__main__":
    create(*sys.argv[1:])
