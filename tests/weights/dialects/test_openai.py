"""OpenAI's own releases become the models that transformers computes from the same numbers."""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, OpenAIGPTConfig, OpenAIGPTLMHeadModel

from tests.weights.fixtures.make_tensorflow import DIRECTORY, HPARAMS, values
from tests.weights.gpt1_release import block_shapes, names, write_release
from tiedgpt import GPT
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.checkpoint import as_gpt
from tiedgpt.weights.dialects.openai import recognizes
from tiedgpt.weights.formats.npy_shards import open_npy_shards
from tiedgpt.weights.formats.tensorflow_bundle import open_bundle
from tiedgpt.weights.load import load

WIDTH, TOKENS, POSITIONS, LAYERS, HEADS = 12, 23, 9, 3, 3


def theirs(model, arrays, embeddings):
    """Fill a model of transformers with the arrays of OpenAI's names, as its converter does."""
    state = {f"transformer.{to}.weight": arrays[name] for name, to in embeddings.items()}
    last = {"g": "weight", "w": "weight", "b": "bias"}
    for name, array in arrays.items():
        if name not in embeddings:
            scope, kind = name.removeprefix("model/").rsplit("/", 1)
            scope = scope.replace("/", ".")
            if scope.startswith("h"):
                scope = f"h.{scope[1:]}"
            state[f"transformer.{scope}.{last[kind]}"] = array.squeeze()
    tensors = {name: torch.from_numpy(array) for name, array in state.items()}
    missing, unknown = model.load_state_dict(tensors, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


def assert_same_logits(ours: GPT, their_model, n_positions: int) -> None:
    tokens = ours.config.vocab_size
    ids = torch.randint(tokens, (2, n_positions), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected, logits = their_model(ids).logits, ours(ids)
    assert expected.std() > 0.1
    assert torch.allclose(logits, expected, atol=2e-5), (logits - expected).abs().max()


# GPT-2: model.ckpt.


def test_gpt2s_release_computes_what_transformers_does():
    loaded = load(DIRECTORY / "gpt2")
    model = loaded.model
    assert loaded.layout == "TensorFlow, OpenAI GPT-2"
    assert (model.head, model.config.norm, model.config.n_head) == (None, "pre", 3)
    assert (model.config.vocab_size, model.config.n_positions) == (61, 16)
    config = GPT2Config(
        vocab_size=61, n_positions=16, n_embd=12, n_head=3, n_layer=2,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    gpt2 = theirs(GPT2LMHeadModel(config), values(), {"model/wte": "wte", "model/wpe": "wpe"})
    assert_same_logits(model, gpt2, 16)


def test_the_index_alone_may_be_named():
    model = GPT.from_pretrained(DIRECTORY / "gpt2" / "model.ckpt.index")
    assert torch.equal(model.wte.weight, torch.from_numpy(values()["model/wte"]))


def test_an_optimizers_slots_and_counters_are_left_out_and_told():
    loaded = load(DIRECTORY / "tuned", n_head=3)
    assert torch.equal(loaded.model.wpe.weight, torch.from_numpy(values()["model/wpe"]))
    assert loaded.notes == ("left out 59 tensors that only training needs, such as beta1_power",)


def test_without_hparams_the_heads_are_asked_for():
    with pytest.raises(UserError, match="give n_head"):
        GPT.from_pretrained(DIRECTORY / "tuned")


def test_the_end_of_text_is_known_for_the_releases_vocabulary_alone():
    checkpoint = open_bundle(DIRECTORY / "gpt2" / "model.ckpt.index")
    assert "eos_token_id" not in as_gpt(checkpoint).assumed
    wte = checkpoint.tensors["model/wte"]
    full = type(wte)("model/wte", (50257, 12), "float32", 0, wte.storage, None)
    checkpoint = type(checkpoint)(checkpoint.source, "TensorFlow", {"model/wte": full})
    assert as_gpt(checkpoint).assumed["eos_token_id"] == 50256


def test_other_checkpoints_of_tensorflow_are_not_taken_for_a_gpt():
    assert not recognizes(open_bundle(DIRECTORY / "types" / "model.ckpt.index"))
    with pytest.raises(CorruptInputError, match="no GPT"):
        GPT.from_pretrained(DIRECTORY / "types")


@pytest.fixture
def gpt2_copy(tmp_path):
    return shutil.copytree(DIRECTORY / "gpt2", tmp_path / "gpt2")


@pytest.mark.parametrize(
    ("hparams", "why"),
    [
        ({**HPARAMS, "n_head": 5}, "n_head=5"),
        ({**HPARAMS, "n_head": "three"}, "n_head='three'"),
        ({**HPARAMS, "n_layer": 3}, "n_layer=3"),
    ],
)
def test_hparams_that_lie_are_refused(hparams, why, gpt2_copy):
    (gpt2_copy / "hparams.json").write_text(json.dumps(hparams))
    with pytest.raises(CorruptInputError, match=why):
        GPT.from_pretrained(gpt2_copy)


def test_what_hparams_says_beside_the_sizes_is_told(gpt2_copy):
    (gpt2_copy / "hparams.json").write_text(json.dumps({**HPARAMS, "res_dropout": 0.5}))
    assert load(gpt2_copy).notes == ("hparams.json says more than is used: res_dropout",)


def test_extra_tensors_are_kept_so_that_an_error_can_name_them(gpt2_copy):
    checkpoint = open_bundle(gpt2_copy / "model.ckpt.index")
    tensor = checkpoint.tensors["model/ln_f/g"]
    extra = {name: tensor for name in ("lm_head/w", "model/h0/gate/w", "model/nothing/Adam")}
    checkpoint = type(checkpoint)(
        checkpoint.source, checkpoint.format, {**checkpoint.tensors, **extra}, checkpoint.config
    )
    assert extra.keys() <= as_gpt(checkpoint).tensors.keys()


# GPT-1: params_*.npy.


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


@pytest.mark.parametrize("with_names", [False, True])
def test_gpt1s_release_computes_what_transformers_does(with_names, release):
    directory, arrays = release
    if with_names:
        (directory / "parameters_names.json").write_text(json.dumps(names(LAYERS)))
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
    checkpoint = open_npy_shards(release[0])
    assert "n_head" not in as_gpt(checkpoint).assumed
    any_tensor = checkpoint.tensors["model/h0/ln_2/g"]
    shapes = {"model/wpe": (512, 768), "model/wte": (40478, 768)}
    shapes |= {f"model/h{layer}/ln_2/g": (768,) for layer in range(12)}
    full = {
        n: type(any_tensor)(n, s, "float32", 0, any_tensor.storage, None) for n, s in shapes.items()
    }
    assert as_gpt(type(checkpoint)("", "numpy", full)).assumed["n_head"] == 12


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
    with pytest.raises(UserError, match=r'nothing says how many: write \{"n_ctx"'):
        GPT.from_pretrained(directory, n_head=HEADS)
    (directory / "hparams.json").write_text(json.dumps({"n_ctx": POSITIONS, "n_head": HEADS}))
    loaded = load(directory)
    assert_same_logits(loaded.model, gpt1(arrays), POSITIONS)
    assert loaded.notes[0] == "left out the classifier on top of it: model/clf/w, model/clf/b"
    assert "26 tokens, then 9 positions, as it is said beside" in loaded.notes[1]
    (directory / "encoder_bpe_40000.json").write_text(
        json.dumps({str(at): at for at in range(TOKENS)})
    )
    assert "26 tokens, 3 of them special, then 9" in load(directory).notes[1]


@pytest.mark.parametrize("n_positions", [0, -1, 13, 1000, 2.5, True])
def test_positions_that_do_not_fit_are_refused(n_positions, release):
    directory, _ = one_matrix(release, 3)
    (directory / "hparams.json").write_text(json.dumps({"n_ctx": n_positions, "n_head": HEADS}))
    (directory / "encoder_bpe_40000.json").write_text(
        json.dumps({str(at): at for at in range(TOKENS)})
    )
    with pytest.raises(
        CorruptInputError, match="positions do not fit into the 35 rows of model/we"
    ):
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
        with pytest.raises(UserError, match="nothing says how many"):
            load(directory, n_head=HEADS)
        return
    loaded = load(directory, n_head=HEADS)
    assert (loaded.model.config.vocab_size, loaded.model.config.n_positions) == (
        TOKENS + n_special,
        512,
    )
    assert loaded.notes[0].endswith("512 positions, as in the release")


def test_missing_layers_are_an_error(release):
    directory, arrays = release
    names_in_file = [name for name in arrays if "/h1/" not in name]
    write_release(directory, [arrays[name] for name in names_in_file])
    kept = ["model/we:0", *(f"{name}:0" for name in names_in_file[2:])]
    (directory / "parameters_names.json").write_text(json.dumps(kept))
    with pytest.raises(CorruptInputError, match="layers are missing"):
        GPT.from_pretrained(directory, n_head=HEADS)
