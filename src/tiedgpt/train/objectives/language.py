"""Language modelling: texts in, a GPT out that generates; trained whole or by adapters."""

from __future__ import annotations

import copy
import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.data import (
    Batches,
    Corpus,
    Counts,
    Document,
    FileCorpus,
    Shards,
    Split,
    Template,
    documents,
    encode_corpus,
    in_order,
    open_encoded,
    plan_split,
    python_documentation,
    write_template,
)
from tiedgpt.data.encode import COUNTS, note_split_characters
from tiedgpt.errors import UserError
from tiedgpt.evaluate.perplexity import Score, score
from tiedgpt.files import remove
from tiedgpt.infer import Engine
from tiedgpt.text import Tokenizer
from tiedgpt.train.objective import (
    Arrays,
    Basis,
    Data,
    Model,
    Objective,
    Pair,
    Progress,
    Sources,
    describe_tokens,
)
from tiedgpt.train.options import AUTO, TrainOptions, format_count
from tiedgpt.train.planning import choose_vocabulary_size
from tiedgpt.train.storage import RunDirectory
from tiedgpt.tune import freeze, lora, merge, save_adapter
from tiedgpt.tune.adapters import BLOCKS

SAMPLE_TOKENS = 48
CACHED_CHARACTERS = 100_000_000
"""Text of more characters is read again wherever it is needed."""


class CachedCorpus:
    """A corpus that is read once: its documents are kept, where they are few enough for that."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self._held: list[Document] | None = None

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents."""
        if self._held is not None:
            yield from self._held
            return
        held: list[Document] = []
        room = CACHED_CHARACTERS
        for document in self.corpus:
            room -= len(document.text)
            if room >= 0:
                held.append(document)
            else:
                held.clear()
            yield document
        self._held = held if room >= 0 else None


class TextSources(Sources):
    """The texts that options name, or Python's documentation."""

    def __init__(self, options: TrainOptions) -> None:
        how, data = options.reading, options.data
        self.corpus = CachedCorpus(documents(data, **how) if data else python_documentation())
        validation = None if options.val is None else documents([options.val], **how)
        self.validation = None if validation is None else CachedCorpus(validation)

    def digest(self) -> str:
        """Return a sha256 of everything that is read, to know a changed text by."""
        whole = hashlib.sha256()
        for document in chain(self.corpus, [Document("", "")], self.validation or ()):
            whole.update(hashlib.sha256(document.text.encode()).digest())
        return whole.hexdigest()

    @functools.cached_property
    def split(self) -> Split:
        """Which documents are trained on and which are validated on."""
        return plan_split(self.corpus, self.validation)

    def texts(self) -> tuple[Iterable[str], Iterable[str]]:
        """Return the texts that are trained on, and all of them."""
        train = (document.text for side, document in self.split if side == "train")
        return train, (document.text for _, document in self.split)

    def count_characters(self) -> int:
        """Return how long the texts are, about."""
        return self.split.characters

    def vocabulary_size(self, options: TrainOptions) -> int:
        """Return how many tokens a vocabulary has that is trained on the texts."""
        if options.size == AUTO and options.vocab_size is None:
            return choose_vocabulary_size(self.count_characters())
        return super().vocabulary_size(options)

    def shards(self, run: RunDirectory) -> Path:
        """Return the directory of the shards of tokens."""
        return run.data

    def is_encoded(self, run: RunDirectory) -> bool:
        """Whether an earlier call encoded the texts."""
        return (run.data / COUNTS).exists()

    def encode(self, tokenizer: Tokenizer, run: RunDirectory, progress: Progress | None) -> None:
        """Write the texts as shards of tokens."""
        remove(run.data)  # of a larger text, for which this directory was begun
        encode_corpus(self.split, tokenizer, run.data, progress=progress)

    def notes(self, run: RunDirectory) -> list[str]:
        """Return what is worth telling of the texts."""
        corpora = (each.corpus for each in (self.corpus, self.validation) if each is not None)
        files = [corpus for corpus in corpora if isinstance(corpus, FileCorpus)]
        return [*self.split.notes(), *(note for part in files for note in part.remarks.notes())]

    def make(self, run: RunDirectory, options: TrainOptions, basis: Basis) -> Pair:
        """Return a language model, and the shards to train it on."""
        context = options.context or basis.config.n_positions
        notes = self.notes(run)
        if options.start is None:
            notes += note_split_characters(open_encoded(self.shards(run)), basis.tokenizer)
        data = open_text(self.shards(run), basis.tokenizer, context, notes)
        if not options.chooses:  # which looks for a context that is short enough
            data.require_enough()
        prompt = options.sample_prompt or ""
        adapters = Adapters.from_options(options)
        objective = LanguageModelling(*basis, adapters=adapters, sample_prompt=prompt)
        return objective, data


@dataclass(frozen=True, kw_only=True)
class TextData(Data):
    """A text in shards, cut into rows of a context."""

    train: Shards
    held: Shards
    recut: Callable[[int], TextData]

    def with_context(self, context: int) -> TextData:
        """Return the same text in other rows; `UserError` where it is too short for them."""
        data = self.recut(context)
        data.require_enough()
        return data

    def require_enough(self) -> None:
        """Raise `UserError` for text shorter than the context."""
        tokens, context = len(self.train), self.row_tokens
        if tokens < context + 1:
            raise UserError(
                f"the training text has {tokens:,} tokens and the context is {context}",
                hint=f"use --context below {tokens} or more text",
            )
        if len(self.held) < 2:
            raise UserError(
                f"the validation text has {len(self.held)} tokens, too few to predict one",
                hint="use more text, or give --val",
            )

    def find_words(self, tokenizer: Tokenizer) -> str:
        """Return three words that follow each other in the validation text, or its beginning."""
        text = tokenizer.decode(self.held.read(0, min(2000, len(self.held))).tolist())
        words = re.search(r"(?<=\s)[^\W\d_]+( [^\W\d_]+){2}(?=\s)", text)
        return words[0] if words else " ".join(text.split())[:12]


def open_text(
    directory: Path, tokenizer: Tokenizer, context: int, notes: Iterable[str] = ()
) -> TextData:
    """Return the shards in a directory as data: rows of ids and targets, each (B, T).

    An evaluation of some batches takes windows spread evenly over the validation text.
    """
    encoded = open_encoded(directory)
    train, held = encoded.open_shards("train"), encoded.open_shards("val")
    description = {
        "text": _describe_text(encoded.train, encoded.val),
        "tokens": f"{describe_tokens(tokenizer)}, "
        f"{encoded.train.utf8_bytes / max(1, len(train)):.2f} bytes a token",
    }

    def cut(context: int) -> TextData:
        def batches(batch_size: int, seed: int) -> Callable[[int], Arrays]:
            return Batches(train, batch_size=batch_size, n_positions=context, seed=seed).batch

        def held_out(batch_size: int, n_batches: int | None) -> Iterable[Arrays]:
            at_most = None if n_batches is None else n_batches * batch_size
            return in_order(held, batch_size=batch_size, n_positions=context, at_most=at_most)

        return TextData(
            batches=batches,
            held_out=held_out,
            unit="tokens",
            row_units=context,
            row_tokens=context,
            epoch_rows=max(1, -(-(len(train) - 1) // context)),
            held_out_rows=len(held) / context,
            text_tokens=len(train),
            counts={"train_text": asdict(encoded.train), "val_text": asdict(encoded.val)},
            description=description,
            notes=[*notes],
            train=train,
            held=held,
            recut=cut,
        )

    return cut(context)


def _describe_text(train: Counts, val: Counts) -> str:
    of = f"{format_count(val.documents, 'document')}, " if train.documents > 1 else ""
    return (
        f"{format_count(train.documents, 'document')}, {train.utf8_bytes / 1e6:.2f} MB, "
        f"{train.tokens:,} tokens; to validate on: {of}{val.tokens:,} tokens"
    )


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters: all that is trained of the model that they are put on."""

    rank: int
    targets: tuple[str, ...]
    new_ids: tuple[int, ...] = ()
    """Tokens that the model did not have; their rows are trained whole."""

    @classmethod
    def from_options(cls, options: TrainOptions, new_ids: tuple[int, ...] = ()) -> Adapters | None:
        """Return the adapters that options ask for; None for none."""
        if options.lora is None:
            return None
        targets = (options.lora_targets or ",".join(BLOCKS)).split(",")
        return cls(options.lora, tuple(targets), new_ids)

    @property
    def has_peft_format(self) -> bool:
        """Whether PEFT's file format can hold them: not W's together with whole rows."""
        return not (self.new_ids and {"wte", "head"} & {*self.targets})


@dataclass(eq=False)
class LanguageModelling(Objective):
    """Predict each next token of a text.

    With adapters a checkpoint holds them alone, and the model under them is read again from
    `start`; the merged model is published.
    """

    tokenizer: Tokenizer
    adapters: Adapters | None = None
    template: Template | None = None
    """How messages become text."""
    sample_prompt: str = ""
    """What samples begin with."""

    def build(self) -> GPT:
        """Return a GPT with fresh weights; under adapters with those of `start`."""
        model = GPT(self.config)
        if self.adapters is None:
            freeze(model, self.frozen)
            return model
        assert self.start is not None
        if not model.wte.weight.is_meta:
            self.start.put_into(model)
        lora(model, self.adapters.rank, self.adapters.targets, tokens=self.adapters.new_ids)
        return model

    def begin(self, model: Model) -> None:
        """Before the first step: put the weights of `start` into the model, if `build` has not."""
        if self.adapters is None:
            super().begin(model)

    def state_to_save(self, model: Model) -> Mapping[str, Tensor]:
        """Return all parameters, or the adapters alone."""
        tensors = super().state_to_save(model)
        if self.adapters is None:
            return tensors
        return {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}

    @functools.cached_property
    def byte_lengths(self) -> NDArray[np.int64]:
        """The bytes of each token; a model may have more rows than there are tokens."""
        lengths = self.tokenizer.byte_lengths()
        return np.pad(lengths, (0, max(0, self.config.vocab_size - len(lengths))))

    def score(self, model: GPT, batches: Iterable[Any], autocast: torch.dtype | None) -> Any:
        """Score text, in nats a token and bits per byte."""
        return score(model, batches, self.byte_lengths, autocast=autocast)

    def metrics(self, score: Score) -> dict[str, float]:
        """Return nats a token and bits per byte."""
        return {"val_loss": score.nats, "val_bits_per_byte": score.bits_per_byte}

    def sample(self, model: GPT, data: Any, step: int, seed: int) -> str:
        """Return how the model begins a text."""
        engine = Engine(self.merge(model), tokenizer=self.tokenizer, slots=1)
        room = max(1, self.config.n_positions - SAMPLE_TOKENS)
        prompt = self.tokenizer.encode(self.sample_prompt)[-room:]
        completion = engine.generate(
            prompt or [self.config.bos_token_id or 0],
            max_new_tokens=SAMPLE_TOKENS,
            temperature=0.8,
            top_k=50,
            seed=seed,
        )
        return self.sample_prompt + completion.text

    def merge(self, model: GPT) -> GPT:
        """Return the model without adapters: merged, in a copy."""
        if self.adapters is None:
            return model
        merged = copy.deepcopy(model)
        merge(merged)
        return merged

    def describe(self, config: GPTConfig) -> str:
        """Return in words which matrix predicts."""
        shape = f"{config.vocab_size:,} x {config.n_embd}"
        if config.tie_word_embeddings:
            return f"one matrix of {shape} counted once: it reads and predicts"
        return f"a matrix of {shape} reads and another predicts"

    def publish(self, model: GPT, directory: Path) -> None:
        """Write the merged model, its tokenizer and its template; and beside it the adapter."""
        super().publish(self.merge(model), directory)
        if self.template is not None:
            write_template(self.template, self.tokenizer, directory)
        if self.adapters is not None and self.adapters.has_peft_format:
            assert self.start is not None
            save_adapter(model, directory.parent / "adapter", base=self.start.source)
