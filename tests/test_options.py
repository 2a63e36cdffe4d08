"""The type, the bounds and the choices of an option stand with its field, and hold everywhere."""

import math
from dataclasses import fields
from functools import partial
from types import UnionType
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch

from tiedgpt import GPTConfig
from tiedgpt.data import documents
from tiedgpt.data.examples import ExampleReader
from tiedgpt.errors import UserError
from tiedgpt.infer import GenerationConfig
from tiedgpt.inspect import attention, lens, neighbours, positions, random_head
from tiedgpt.tie import add_tokens, resize_vocab
from tiedgpt.train import TrainOptions
from tiedgpt.tune import lora


def types_of(hint):
    """Return the types of a union, or the one type."""
    return set(get_args(hint)) if isinstance(hint, UnionType) else {hint}


SHAPE = {"vocab_size": 11, "n_positions": 7, "n_embd": 6, "n_layer": 2, "n_head": 3}
CLASSES = {
    GPTConfig: lambda **options: GPTConfig(**SHAPE | options),
    GenerationConfig: GenerationConfig,
    TrainOptions: partial(TrainOptions, data=("my.txt",)),
}
NUMBERS = [
    (cls, field.name, types, field.metadata.get("bounds", {}))
    for cls in CLASSES
    for field in fields(cls)
    if {int, float} & (types := types_of(get_type_hints(cls)[field.name]))
]


def outside(bounds):
    """Yield a number beyond each bound."""
    for key, bound in bounds.items():
        sign = -1 if key in ("least", "above") else 1
        yield bound + sign * (key in ("least", "most")) * max(1, abs(bound))


@pytest.mark.parametrize(
    ("cls", "name", "types", "bounds"), NUMBERS, ids=[f"{x[0].__name__}.{x[1]}" for x in NUMBERS]
)
def test_a_number_has_its_type_and_its_bounds(cls, name, types, bounds):
    wrong = ["5", math.nan, math.inf, 10**400, [1], np.array([1, 2]), *outside(bounds)]
    wrong += [] if bool in types else [True, np.True_, torch.tensor(True)]
    wrong += [] if float in types else [1.5, np.float32(1), 2**63]
    for value in wrong:
        with pytest.raises(UserError) as refused:
            CLASSES[cls](**{name: value})
        assert refused.value.options == (name,), value


@pytest.mark.parametrize("number", [np.int64, np.uint8, torch.tensor])
def test_numbers_of_numpy_and_torch_become_pythons(number):
    config = GPTConfig(**{name: number(size) for name, size in SHAPE.items()})
    assert config == GPTConfig(**SHAPE) and type(config.n_embd) is int
    options = TrainOptions(steps=number(7), warmup=number(1))
    assert (options.steps, type(options.steps), type(options.warmup)) == (7, int, float)


@pytest.mark.parametrize(
    ("cls", "options", "choices"),
    [
        (GPTConfig, {"norm": "rms"}, "pre, post"),
        (GPTConfig, {"activation_function": "swoosh"}, "gelu_new, gelu, relu, silu"),
        (GenerationConfig, {"context_end": "wrap"}, "stop, slide"),
        (GenerationConfig, {"early_stopping": "soon"}, "never, True, False"),
        (TrainOptions, {"schedule": "step"}, "linear, wsd, cosine"),
        (TrainOptions, {"dtype": "fp16"}, "auto, fp32, bf16"),
        (TrainOptions, {"optimizer": "sgd"}, "auto, adamw, muon"),
    ],
)
def test_another_choice_is_refused_with_the_choices(cls, options, choices):
    with pytest.raises(UserError, match=f"one of {choices}, got") as refused:
        CLASSES[cls](**options)
    assert refused.value.options == tuple(options)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda model, n: positions(model, None, [1, 2], top=n), "top"),
        (lambda model, n: positions(model, None, [1, 2], replace_at=n), "replace_at"),
        (lambda model, n: lens(model, None, [1, 2], position=n), "position"),
        (lambda model, n: attention(model, None, [1, 2], layer=n), "layer"),
        (lambda model, n: neighbours(model, None, token=1, top=n), "top"),
        (lambda model, n: random_head(model, None, [1, 2], seed=n), "seed"),
        (lambda model, n: resize_vocab(model, n), "n"),
        (lambda model, n: add_tokens(model, n), "n_new"),
        (lambda model, n: ExampleReader(documents(["README.md"]), None, context=n), "context"),
    ],
)
@pytest.mark.parametrize("wrong", [True, 1.5, "1", 2**70, torch.ones(2)], ids=str)
def test_a_function_names_an_argument_that_is_no_integer(tiny, call, name, wrong):
    with pytest.raises(UserError) as refused:
        call(tiny, wrong)
    assert refused.value.options == (name,)


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan, math.inf, True, "1"])
def test_a_function_names_an_argument_that_is_no_number(tiny, wrong):
    with pytest.raises(UserError) as refused:
        lora(tiny, rank=2, alpha=wrong)
    assert refused.value.options == ("alpha",)
