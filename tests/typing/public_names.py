"""Types of the public names as an editor sees them; mypy checks this file, nothing runs it."""

from collections.abc import Iterator
from typing import Any, assert_type

import torch
from torch import Tensor, nn

import tiedgpt
from tiedgpt import GPT, Engine, GPTConfig, KVCache, Tokenizer, explain
from tiedgpt.evaluate import TextScore, score_text
from tiedgpt.heads import SequenceClassifier
from tiedgpt.infer import Generation, GenerationConfig, Token
from tiedgpt.inspect import dot, lens, positions, vocabulary
from tiedgpt.inspect.predictions import Positions
from tiedgpt.tie import audit, guard, ledger, tie, untie
from tiedgpt.tie.audits import Audit
from tiedgpt.tie.ledgers import Ledger, LedgerDifference
from tiedgpt.tie.surgery import Report
from tiedgpt.train import TrainOptions, fast_training, train
from tiedgpt.tune import freeze, lora, merge


def use_the_core(ids: Tensor) -> None:
    config = GPTConfig.preset("gpt2", n_layer=2)
    assert_type(config, GPTConfig)
    assert_type(config.parameter_count(), int)
    model = GPT.from_pretrained("gpt2", dtype=torch.float32)
    assert_type(model, GPT)
    h = model.body(ids)
    assert_type(model.logits(h), Tensor)
    assert_type(model.loss(ids, ids), Tensor)
    assert_type(model.states(ids), Iterator[Tensor])
    assert_type(model.head, nn.Module | None)
    assert_type(untie(model), Report)
    GPT(config, device="cpu")  # type: ignore[call-arg]
    GPTConfig.preset(2)  # type: ignore[arg-type]
    assert_type(KVCache, type[KVCache])


def use_the_text() -> None:
    tokenizer = Tokenizer.from_pretrained("gpt2")
    assert_type(tokenizer, Tokenizer)
    assert_type(tokenizer.encode("a"), list[int])
    assert_type(tokenizer.encode_batch(["a"]), list[list[int]])
    assert_type(tokenizer.decode([1]), str)
    assert_type(len(tokenizer), int)
    tokenizer.encode(1)  # type: ignore[arg-type]


def use_the_engine() -> None:
    with Engine("gpt2", precision="int8") as engine:
        assert_type(engine, Engine)
        for token in engine.stream("a", GenerationConfig(temperature=0)):
            assert_type(token, Token)
            assert_type(token.text, str)
            assert_type(token.logprob, float)
        assert_type(engine.submit("a"), Generation)
        assert_type(engine.generate("a"), Any)  # a Completion, or lists: n and the prompts decide
        assert_type(engine.stats(), dict[str, float])
        assert_type(score_text(engine, "a"), TextScore)
    GenerationConfig(temprature=0.5)  # type: ignore[call-arg]


def use_the_tie(model: nn.Module) -> None:
    assert_type(ledger(model), Ledger)
    assert_type(ledger(model).difference(ledger(model)), LedgerDifference)
    assert_type(audit(model), Audit)
    if audit("model.safetensors").verdict == "tied":
        pass
    assert_type(tie(model), Report)
    with guard(model):
        pass


def use_the_other_packages(model: GPT, tokenizer: Tokenizer, ids: Tensor) -> None:
    assert_type(positions("runs/my-1", text="a"), Positions)
    assert_type(positions("runs/my-1", text="a").loss, float)
    assert_type(lens(model, tokenizer, "a").to_json(), str)
    assert_type(dot(model, tokenizer, "a").to_json(), str)
    assert_type(vocabulary(model).to_json(), str)
    for event in train(TrainOptions(data=("my.txt",))):
        print(type(event))
    with fast_training(model):
        model.loss(ids, ids).backward()
    print(lora(model, rank=8), merge(model), freeze(model, "body"))
    SequenceClassifier(model, labels=["a", "b"])
    print(explain("tie", model))
    assert_type(tiedgpt.__version__, str)
    assert_type(tiedgpt.tie.audit("x"), Audit)
