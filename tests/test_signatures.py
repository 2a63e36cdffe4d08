"""Public functions and classes refuse arguments of the wrong kind in one sentence of ours."""

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import torch

import tiedgpt
from tests.models import TEXT, opinionated, random_gpt, save_model
from tiedgpt import GPT, Engine, KVCache, Tokenizer, explain
from tiedgpt.data import documents, encode_corpus, plan_preparation, prepare_data
from tiedgpt.errors import TiedGPTError, UserError
from tiedgpt.evaluate import score_examples, score_text
from tiedgpt.heads import FeatureExtractor, MultipleChoice, SequenceClassifier, pad, predict
from tiedgpt.inspect import positions, steer
from tiedgpt.signatures import checked
from tiedgpt.tie import add_tokens, audit, fix, guard, ledger, prune, resize_vocab, tie, untie
from tiedgpt.train import TrainOptions, fast_training, train
from tiedgpt.tune import freeze, load_adapter, lora, merge, save_adapter

PACKAGES = [
    f"tiedgpt.{package.name}"
    for package in pkgutil.iter_modules(tiedgpt.__path__)
    if package.ispkg and package.name not in ("cli", "serve")
]
MADE_HERE = ("Generation", "StreamDecoder", "TiedEmbedding")
"""Classes that the library makes, and torch's own constructor."""


def is_door(value) -> bool:
    """Whether a public name is a function or a class that users call, and not a record."""
    if inspect.isclass(value):
        is_record = dataclasses.is_dataclass(value) or issubclass(value, (tuple, BaseException))
        return (
            not is_record and not inspect.isabstract(value) and not hasattr(value, "_is_protocol")
        )
    return inspect.isfunction(value)


def doors() -> Iterator[pytest.param]:
    """Yield every public function and class of the packages, and the methods of classes."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in dir(module):
            value = getattr(module, name)
            if name.startswith("_") or name in MADE_HERE or not is_door(value):
                continue
            yield pytest.param(value, id=f"{package}.{name}")


def call(function, **arguments):
    """Call a function; begin to iterate an iterator and enter a context manager."""
    result = function(**arguments)
    if isinstance(result, AbstractContextManager):
        result.__enter__()
    if isinstance(result, Iterator):
        next(result)


@pytest.mark.parametrize("value", [object(), 3.5, {"a": 1}], ids=["object", "float", "dict"])
@pytest.mark.parametrize("door", list(doors()))
def test_every_public_name_explains_wrong_arguments(door, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    needed = [
        name
        for name, parameter in inspect.signature(door).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    if not needed:
        return
    with pytest.raises(TiedGPTError) as caught:
        call(door, **dict.fromkeys(needed, value))
    assert str(caught.value) and "\n" not in str(caught.value)
    assert [*tmp_path.iterdir()] == []


@pytest.fixture(scope="module")
def things(tmp_path_factory):
    """Values of the right kind by name."""
    path = tmp_path_factory.mktemp("things")
    tokenizer = Tokenizer.train([TEXT], 300)
    model = opinionated(tokenizer)
    save_model(path / "model", model, tokenizer)
    (path / "text.txt").write_text(TEXT)
    head = SequenceClassifier(random_gpt(), labels=["bad", "good"])
    with Engine(model, tokenizer=tokenizer) as engine:
        yield {
            "path": path, "source": str(path / "model"), "text": str(path / "text.txt"),
            "model": model, "tokenizer": tokenizer, "head": head, "engine": engine,
            "ids": torch.tensor([[2, 3, 5]]), "lengths": torch.tensor([3]),
        }  # fmt: skip


STRING, PATH, STRINGS = "hello", Path("runs/x"), ["hello", "you"]
CASES = [
    # a string, a path or a list where another thing belongs, the name of the argument, the remedy
    (lambda t: GPT("runs/x"), "config", "GPT.from_pretrained"),
    (lambda t: GPT(PATH), "config", "GPT.from_pretrained"),
    (lambda t: GPT(t["model"].config.n_embd), "config", "preset"),
    (lambda t: t["model"](STRING), "ids", "tokenizer.encode"),
    (lambda t: t["model"](STRINGS), "ids", "tokenizer.encode"),
    (lambda t: t["model"]([2, 3]), "ids", "torch.tensor"),
    (lambda t: t["model"](np.ones((1, 2), np.int64)), "ids", "torch.tensor"),
    (lambda t: t["model"].body(STRING), "ids", "tokenizer.encode"),
    (lambda t: next(t["model"].states(STRING)), "ids", "tokenizer.encode"),
    (lambda t: t["model"](t["ids"], STRING), "cache", "KVCache"),
    (lambda t: t["model"].loss(STRING, t["ids"]), "ids", "torch.tensor"),
    (lambda t: t["model"].loss(t["ids"], STRING), "targets", "torch.tensor"),
    (lambda t: t["model"].loss(t["ids"], t["ids"], document_starts=[0]), "document_starts", ""),
    (lambda t: t["model"].save_pretrained(t["model"]), "directory", "give a path"),
    (lambda t: GPT.from_pretrained(STRINGS), "checkpoint", "path"),
    (lambda t: KVCache.allocate(STRING, batch_size=1), "config", "preset"),
    (lambda t: Tokenizer.from_pretrained(STRINGS), "source", "give a path"),
    (lambda t: Tokenizer.train(STRING, 300), "texts", "write a list"),
    (lambda t: Tokenizer.train(STRINGS, STRING), "vocab_size", "int"),
    (lambda t: Tokenizer.characters(STRING), "texts", "write a list"),
    (lambda t: t["tokenizer"].encode(STRINGS), "text", "encode_batch"),
    (lambda t: t["tokenizer"].encode(PATH), "text", "str"),
    (lambda t: t["tokenizer"].encode_batch(STRING), "texts", "write a list"),
    (lambda t: t["tokenizer"].decode(STRING), "ids", "integers"),
    (lambda t: t["tokenizer"].token_bytes(STRING), "id", "int"),
    (lambda t: t["tokenizer"].with_special_tokens(STRING), "tokens", "write a list"),
    (lambda t: explain(STRINGS), "topic", "tie"),
    (lambda t: t["engine"].generate(t["tokenizer"]), "Tokenizer", "text"),
    (lambda t: t["engine"].stream(PATH), "prompt", "text"),
    (lambda t: Engine(STRINGS), "", "path"),
    (lambda t: ledger(STRINGS), "", "path"),
    (lambda t: audit(STRINGS), "", "path"),
    (lambda t: fix(t["source"], t["model"]), "dest", "give a path"),
    (lambda t: tie(STRING), "model", ""),
    (lambda t: untie(PATH), "model", "GPT.from_pretrained"),
    (lambda t: resize_vocab(STRING, 300), "model", "GPT.from_pretrained"),
    (lambda t: resize_vocab(t["model"], STRING), "n", "integer"),
    (lambda t: add_tokens(t["model"], STRINGS), "n_new", "integer"),
    (lambda t: prune(t["model"], STRING), "keep_ids", "integers"),
    (lambda t: guard(STRING).__enter__(), "Module", ""),
    (lambda t: positions(t["model"], t["tokenizer"], PATH), "text", ""),
    (lambda t: steer(STRING, 0, torch.ones(32)).__enter__(), "model", "GPT.from_pretrained"),
    (lambda t: steer(t["model"], STRING, torch.ones(32)).__enter__(), "layer", "int"),
    (lambda t: lora(STRING), "model", "GPT.from_pretrained"),
    (lambda t: lora(t["model"], rank=STRING), "rank", "1 to the width"),
    (lambda t: merge(PATH), "model", "GPT.from_pretrained"),
    (lambda t: freeze(STRING, "body"), "model", "GPT.from_pretrained"),
    (lambda t: freeze(t["model"], 3), "patterns", "str"),
    (lambda t: save_adapter(STRING, "adapter"), "model", "GPT.from_pretrained"),
    (lambda t: load_adapter(t["model"], STRINGS), "directory", "give a path"),
    (lambda t: train("my.txt", "runs/x"), "options", 'TrainOptions(data=("my.txt",)'),
    (lambda t: train(PATH), "options", "TrainOptions(data="),
    (lambda t: train({"data": "my.txt"}), "options", "TrainOptions(data="),
    (lambda t: train(TrainOptions(data=t["text"]), STRINGS), "out", "path"),
    (lambda t: TrainOptions(data=3), "data", "list of str"),
    (lambda t: TrainOptions(steps="many"), "steps", "int"),
    (lambda t: TrainOptions(lr="small"), "lr", "number"),
    (lambda t: fast_training(STRING).__enter__(), "GPT", ""),
    (lambda t: SequenceClassifier(PATH, ["a", "b"]), "GPT", "fresh"),
    (lambda t: MultipleChoice(STRING), "GPT", "fresh"),
    (lambda t: FeatureExtractor(STRING), "GPT", "fresh"),
    (lambda t: SequenceClassifier.from_pretrained(STRINGS), "source", "give a path"),
    (lambda t: t["head"](STRING), "ids", "tokenizer.encode"),
    (lambda t: t["head"](t["ids"], STRING), "lengths", "torch.tensor"),
    (lambda t: t["head"].loss(t["ids"]), "labels", "ids, lengths, labels"),
    (lambda t: t["head"].loss(t["ids"], t["lengths"], STRINGS), "labels", "torch.tensor"),
    (lambda t: pad(STRINGS), "sequences", "write a list"),
    (lambda t: predict(STRING, t["tokenizer"], []), "head", "open_head"),
    (lambda t: predict(t["head"], STRING, []), "tokenizer", "Tokenizer.from_pretrained"),
    (lambda t: predict(t["head"], t["tokenizer"], STRINGS), "records", "write a list"),
    (lambda t: documents(PATH), "sources", "write a list"),
    (lambda t: encode_corpus(STRINGS, t["tokenizer"], "out"), "split", "plan_split"),
    (lambda t: plan_preparation(PATH), "data", "write a list"),
    (lambda t: prepare_data(STRINGS, "out", "char"), "plan", "plan_preparation"),
    (lambda t: score_text(STRING, STRING), "engine", "Engine(source)"),
    (lambda t: score_text(t["engine"], STRINGS), "text", "str"),
    (lambda t: next(score_examples(t["engine"], STRINGS)), "examples", "write a list"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "name", "remedy"), CASES)
def test_a_wrong_kind_of_thing_is_named_with_what_to_do(things, wrong, name, remedy):
    with pytest.raises(UserError) as caught:
        wrong(things)
    text = str(caught.value)
    assert name in text and remedy in text and "\n" not in text


def test_things_of_other_libraries_are_taken(things):
    """numpy's numbers and arrays, torch's tensors, paths and any iterable are right kinds."""
    tokenizer, text = things["tokenizer"], Path(things["text"])
    assert tokenizer.token_bytes(np.int64(70)) == tokenizer.token_bytes(70)
    assert len(tokenizer.decode(torch.tensor([70, 71]))) == len(tokenizer.decode([70, 71]))
    assert len(Tokenizer.train(iter([TEXT]), np.int64(290))) == 290
    assert TrainOptions(data=text) == TrainOptions(data=str(text)) == TrainOptions(data=[text])
    assert TrainOptions(data=text, start=Path("model")).start == "model"
    ids, lengths = pad([torch.tensor([2, 3]), np.array([5])])
    assert ids.tolist() == [[2, 3], [5, 0]] and lengths.tolist() == [2, 1]


def test_a_function_keeps_its_signature_and_refuses_elements():
    @checked
    def join(parts: list[str], *, times: int = 1, by: tuple[int, str] = (1, "a")) -> str:
        """Return the parts."""
        return "".join(parts) * times

    assert join(["a", "b"], times=2) == "abab" and join.__doc__ == "Return the parts."
    assert list(inspect.signature(join).parameters) == ["parts", "times", "by"]
    for arguments in ({"parts": ["a", 3]}, {"parts": "ab"}, {"parts": [], "times": "2"}):
        with pytest.raises(UserError, match=r"join\(\) takes"):
            join(**arguments)
    with pytest.raises(TypeError, match="missing"):
        join()
