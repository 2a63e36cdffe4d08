"""GPT-1 as OpenAI released it: transformers computes the same from the same numbers."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

from tests.weights.gpt1_release import block_shapes, names, write_release
from tests.weights.test_openai_gpt2 import assert_same_logits, theirs
from tiedgpt import GPT
from tiedgpt.errors import UserError
from tiedgpt.weights.checkpoint import to_gpt
from tiedgpt.weights.formats.openai_gpt1 import SHAPES as SHAPES_FILE
from tiedgpt.weights.load import load
from tiedgpt.weights.sources import open_checkpoint

WIDTH, TOKENS, POSITIONS, LAYERS, HEADS = 12, 23, 9, 3, 3


def random(shapes):
    rng = np.random.default_rng(2018)
    return [(rng.standard_normal(shape) * 0.3).astype(np.float32) for shape in shapes]


@pytest.fixture
def release(tmp_path):
    """(the directory, its arrays by the names of the running model)."""
    shapes = [(POSITIONS, WIDTH), (TOKENS, WIDTH), *LAYERS * block_shapes(WIDTH)]
    arrays = random(shapes)
    keys = ["model/wpe", "model/wte", *(name.removesuffix(":0") for name in names(LAYERS)[1:-2])]
    return write_release(tmp_path / "model", arrays), dict(zip(keys, arrays, strict=True))


def gpt1(arrays):
    config = OpenAIGPTConfig(
        vocab_size=len(arrays["model/wte"]), n_positions=len(arrays["model/wpe"]), n_embd=WIDTH,
        n_head=HEADS, n_layer=LAYERS,
    )  # fmt: skip
    embeddings = {"model/wte": "tokens_embed", "model/wpe": "positions_embed"}
    return theirs(OpenAIGPTLMHeadModel(config), arrays, embeddings)


def test_gpt1s_release_computes_what_transformers_does(release):
    directory, arrays = release
    loaded = load(directory, n_head=HEADS)
    assert loaded.layout == "numpy, OpenAI GPT-1"
    assert (loaded.model.config.norm, loaded.model.head, loaded.notes) == ("post", None, ())
    assert_same_logits(loaded.model, gpt1(arrays), POSITIONS)
    assert torch.equal(
        GPT.from_pretrained(directory / "params_shapes.json", n_head=HEADS).wte.weight,
        loaded.model.wte.weight,
    )


def test_the_heads_are_assumed_for_the_releases_shape_alone(release):
    with pytest.raises(UserError, match="give n_head"):
        GPT.from_pretrained(release[0])
    checkpoint = open_checkpoint(release[0] / SHAPES_FILE)
    assert "n_head" not in to_gpt(checkpoint).assumed
    any_tensor = checkpoint.tensors["model/h0/ln_2/g"]
    shapes = {"model/wpe": (512, 768), "model/wte": (40478, 768)}
    shapes |= {f"model/h{layer}/ln_2/g": (768,) for layer in range(12)}
    full = {
        n: type(any_tensor)(n, s, "float32", 0, any_tensor.storage, None) for n, s in shapes.items()
    }
    assert to_gpt(replace(checkpoint, tensors=full)).assumed["n_head"] == 12


def one_matrix(release, n_special):
    """The release after fine-tuning, in the layout of the running model."""
    directory, arrays = release
    arrays = dict(arrays)
    (special,) = random([(n_special, WIDTH)])
    positions, tokens = arrays.pop("model/wpe"), arrays.pop("model/wte")
    classifier = random([(WIDTH, 1), (1,)])
    whole = np.concatenate([tokens, special, positions])
    write_release(directory, [whole, *arrays.values(), *classifier])
    expected = {"model/wte": whole[: TOKENS + n_special], "model/wpe": positions, **arrays}
    return directory, expected


def test_one_matrix_is_parted_where_n_ctx_says(release):
    directory, arrays = one_matrix(release, 3)
    with pytest.raises(UserError, match=r'does not say how many: write .* \{"n_ctx"'):
        GPT.from_pretrained(directory, n_head=HEADS)
    (directory / "hparams.json").write_text(json.dumps({"n_ctx": POSITIONS, "n_head": HEADS}))
    loaded = load(directory)
    assert_same_logits(loaded.model, gpt1(arrays), POSITIONS)
    assert "left out 2 tensors" in loaded.notes[0] and "model/clf/w" in loaded.notes[0]
    assert "26 tokens, then 9 positions" in loaded.notes[1]


@pytest.mark.parametrize("n_positions", [0, -1, 13, 1000, 2.5, True])
def test_positions_that_do_not_fit_are_refused(n_positions, release):
    directory, _ = one_matrix(release, 3)
    (directory / "hparams.json").write_text(json.dumps({"n_ctx": n_positions, "n_head": HEADS}))
    (directory / "encoder_bpe_40000.json").write_text(
        json.dumps({str(at): at for at in range(TOKENS)})
    )
    with pytest.raises(UserError, match=r"the 35 rows of model/we .* does not say how many"):
        GPT.from_pretrained(directory)


@pytest.mark.parametrize(("n_special", "known"), [(0, True), (3, True), (1, False), (40, False)])
def test_the_releases_512_positions_are_taken_where_the_encoder_leaves_them(
    n_special, known, tmp_path
):
    arrays = random([(TOKENS + n_special + 512, WIDTH), *block_shapes(WIDTH)])
    directory = write_release(tmp_path / "m", arrays)
    encoder = {str(at): at for at in range(TOKENS)}
    (directory / "encoder_bpe_40000.json").write_text(json.dumps(encoder))
    if not known:
        with pytest.raises(UserError, match="does not say how many"):
            load(directory, n_head=HEADS)
        return
    loaded = load(directory, n_head=HEADS)
    assert (loaded.model.config.vocab_size, loaded.model.config.n_positions) == (
        TOKENS + n_special,
        512,
    )
    assert loaded.notes[0].endswith("then 512 positions")
