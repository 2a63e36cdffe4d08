import copy
import dataclasses
import pickle

import pytest

from tiedgpt import GPT, GPTConfig
from tiedgpt.core.config import PRESETS
from tiedgpt.errors import UserError
from tiedgpt.train.plan.sizes import SIZES

SHAPES = {
    "nano": (2, 64, 2, 128, 512), "tiny": (2, 128, 4, 128, 1024), "little": (2, 192, 6, 128, 1024),
    "slim": (4, 192, 3, 128, 1024), "mini": (4, 256, 4, 128, 4096), "small": (6, 384, 6, 256, 4096),
    "medium": (8, 512, 8, 512, 8192), "gpt1": (12, 768, 12, 512, 40478),
    "gpt2": (12, 768, 12, 1024, 50257), "gpt2-medium": (24, 1024, 16, 1024, 50257),
    "gpt2-large": (36, 1280, 20, 1024, 50257), "gpt2-xl": (48, 1600, 25, 1024, 50257),
    "gpt3-small": (12, 768, 12, 2048, 50257), "gpt3-medium": (24, 1024, 16, 2048, 50257),
    "gpt3-large": (24, 1536, 16, 2048, 50257), "gpt3-xl": (24, 2048, 16, 2048, 50257),
    "gpt3-2.7b": (32, 2560, 32, 2048, 50257), "gpt3-6.7b": (32, 4096, 32, 2048, 50257),
    "gpt3-13b": (40, 5120, 40, 2048, 50257), "gpt3-175b": (96, 12288, 96, 2048, 50257),
}  # fmt: skip
"""Layers, width, heads, context and vocabulary; GPT-3's XL and 13B are misprinted in the paper."""
COUNTS = {
    "medium": 29_676_544, "gpt1": 116_534_784, "gpt2": 124_439_808, "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200, "gpt3-175b": 174_604_259_328,
}  # fmt: skip
"""Parameters by hand: (V + C) D + L (12 D^2 + 13 D) + 2 D, without the 2 D for GPT-1."""


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_sizes_are_counted_by_formula(name, count):
    assert GPTConfig.preset(name).parameter_count() == count


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("n_inner", [None, 40])
def test_formula_counts_what_the_model_has(norm, tied, n_inner):
    config = GPTConfig(
        vocab_size=11, n_positions=7, n_embd=12, n_layer=2, n_head=3, norm=norm, n_inner=n_inner,
        tie_word_embeddings=tied,
    )  # fmt: skip
    assert sum(p.numel() for p in GPT(config).parameters()) == config.parameter_count()


def test_presets_take_overrides_and_drop_ids_of_another_vocabulary():
    config = GPTConfig.preset("gpt2", vocab_size=300, n_positions=64)
    assert (config.vocab_size, config.n_positions, config.eos_token_id) == (300, 64, None)
    assert GPTConfig.preset("gpt2", n_positions=64).eos_token_id == 50256
    assert GPTConfig.preset("gpt2", vocab_size=300, eos_token_id=299).eos_token_id == 299


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"n_head": 3}, "n_embd must be a multiple of n_head=3, got 32"),
        ({"n_layer": 0}, "n_layer must be .* got 0"),
        ({"n_embd": -32}, "n_embd must be .* got -32"),
        ({"vocab_size": True}, "vocab_size must be .* got True"),
        ({"n_positions": 1.5}, "n_positions must be .* got 1.5"),
        ({"n_inner": 0}, "n_inner must be .* got 0"),
        ({"n_ctx": 24}, "n_positions"),
        ({"n_heads": 4}, "'n_heads'"),
        ({"embd_pdrop": 1.0}, "embd_pdrop must be .* got 1.0"),
        ({"attn_pdrop": float("nan")}, "attn_pdrop must be .* got nan"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon must be .* got 0"),
        ({"activation_function": "swoosh"}, "swoosh"),
        ({"norm": "rms"}, "rms"),
        ({"eos_token_id": 97}, "eos_token_id must be .* got 97"),
        ({"bos_token_id": -1}, "bos_token_id must be .* got -1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_impossible_values_are_refused_by_name(tiny_config, wrong, named):
    values = dataclasses.asdict(tiny_config) | wrong
    with pytest.raises(UserError, match=named.replace("(", r"\(")):
        GPTConfig(**values)


@pytest.mark.parametrize("name", ["gpt5", "auto", None, ["nano"], GPTConfig])
def test_unknown_preset_names_those_that_exist(name):
    with pytest.raises(UserError, match=r"nano.*gpt2-xl"):
        GPTConfig.preset(name)


def test_the_sizes_of_train_are_presets_of_the_published_shapes():
    assert SIZES.keys() == PRESETS.keys() == SHAPES.keys()
    for name, shape in SHAPES.items():
        for size in (GPTConfig.preset(name), SIZES[name]):
            its = size.n_layer, size.n_embd, size.n_head, size.n_positions, size.vocab_size
            assert its == shape, name
        assert GPTConfig.preset(name).embd_pdrop == SIZES[name].dropout


def test_a_config_is_frozen_and_survives_copies(tiny_config):
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny_config.n_layer = 5
    assert pickle.loads(pickle.dumps(tiny_config)) == tiny_config
    assert copy.deepcopy(tiny_config) == tiny_config
    assert dataclasses.replace(tiny_config, n_layer=5).n_layer == 5
