"""KerasHub's GPT-2 loads: its own files give its own logits."""

import json
import math

import h5py
import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tests.weights.fixtures.make_keras import SHAPE, TEXT
from tests.weights.keras_saved import unpack
from tiedgpt import GPT, Tokenizer
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.tie import audit
from tiedgpt.weights.load import load

PLACES = ("preset", "preset/model.weights.h5", "sharded", "model.keras", "backbone.keras")
BLOCK = "layers/transformer_decoder_1/"


@pytest.fixture
def saved(tmp_path):
    return unpack(tmp_path)


@pytest.fixture
def expected(saved):
    return np.load(saved / "expected.npz")


@pytest.mark.parametrize("place", PLACES)
def test_logits_and_states_are_keras_hubs(place, saved, expected):
    loaded = load(saved / place)
    model, config = loaded.model, loaded.model.config
    assert loaded.layout == "Keras HDF5, KerasHub GPT-2"
    assert (config.n_head, config.n_layer, config.inner_dim) == (3, 2, 40)
    assert config.tie_word_embeddings and config.activation_function == "gelu_new"
    ids = torch.from_numpy(expected["ids"])
    with torch.no_grad():
        assert_close(model(ids), torch.from_numpy(expected["logits"]), rtol=1e-5, atol=1e-5)
        hidden = torch.from_numpy(expected["hidden"])
        assert_close(hidden @ model.wte.weight.T, model(ids), rtol=1e-5, atol=1e-5)


def test_every_number_is_where_it_belongs(saved, expected):
    state = GPT.from_pretrained(saved / "preset").state_dict()
    for layer in range(2):
        theirs = f"transformer_layer_{layer}/self_attention"
        for kind, ours in (("kernel", "weight"), ("bias", "bias")):
            parts = [expected[f"{theirs}/{part}/{kind}"] for part in ("query", "key", "value")]
            whole = np.concatenate([part.reshape(-1, 12) for part in parts], axis=-1)
            c_attn = state[f"h.{layer}.attn.c_attn.{ours}"].numpy()
            assert np.array_equal(c_attn.T.reshape(-1, 36), whole)
        output = expected[f"{theirs}/attention_output/kernel"].reshape(12, 12)
        assert np.array_equal(state[f"h.{layer}.attn.c_proj.weight"].numpy(), output.T)
    assert np.array_equal(state["wte.weight"].numpy(), expected["token_embedding/embeddings"])


def test_bfloat16_is_read_bit_by_bit(saved):
    model = GPT.from_pretrained(saved / "bfloat16")
    exact = GPT.from_pretrained(saved / "preset").state_dict()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, exact[name].bfloat16()), name


@pytest.mark.parametrize("place", ["preset", "preset/model.weights.h5", "model.keras"])
def test_the_tokenizer_that_comes_with_it(place, saved, expected):
    tokenizer = Tokenizer.from_pretrained(saved / place)
    assert tokenizer.encode(TEXT, allow_special=True) == expected["text_ids"].tolist()


def test_no_archive_of_a_bare_backbone_has_a_tokenizer(saved):
    with pytest.raises(UserError, match="holds no tokenizer"):
        Tokenizer.from_pretrained(saved / "backbone.keras")


@pytest.mark.parametrize("place", ["preset", "sharded", "model.keras"])
def test_the_audit_opens_it(place, saved):
    found = audit(saved / place)
    assert found.verdict == "tied" and found.claim is True
    assert [matrix.shape for matrix in found.matrices] == [(264, 12)]


def test_a_file_alone_says_how_many_heads_there_are(saved):
    (saved / "preset" / "config.json").unlink()
    (saved / "preset" / "task.json").unlink()
    assert GPT.from_pretrained(saved / "preset").config.n_head == SHAPE["num_heads"]
    with pytest.raises(UserError, match="n_head=4 contradicts"):
        GPT.from_pretrained(saved / "preset", n_head=4)


def test_the_names_of_keras_2(saved, expected):
    path = saved / "preset" / "model.weights.h5"
    with h5py.File(path, "a") as file:
        file.move("layers", "_layer_checkpoint_dependencies")
    model = GPT.from_pretrained(path)
    with torch.no_grad():
        logits = model(torch.from_numpy(expected["ids"]))
    assert_close(logits, torch.from_numpy(expected["logits"]), rtol=1e-5, atol=1e-5)


# Bad input.


def replaced(name, change):
    def edit(file):
        array = file[name][()]
        del file[name]
        if (new := change(array)) is not None:
            file[name] = new

    return edit


QUERY = BLOCK + "_self_attention_layer/query_dense/vars/"
VARIABLES = {
    "no query": (replaced(QUERY + "0", lambda a: None), "query_dense is missing in h.1.attn"),
    "a query of two axes": (
        replaced(QUERY + "0", lambda a: a.reshape(12, 12)), r"query_dense/vars/0 is \(12, 12\)",
    ),
    "other heads": (replaced(QUERY + "0", lambda a: a.reshape(12, 4, 3)), "3 and 4 heads"),
    "other heads in a layer's bias": (
        replaced(QUERY + "1", lambda a: a.reshape(6, 2)), "3 and 6 heads",
    ),
    "a wider query": (
        replaced(QUERY + "0", lambda a: np.zeros((12, 3, 5), a.dtype)), "parts that are not alike",
    ),
    "another type": (replaced(QUERY + "0", lambda a: a.astype("f8")), "parts that are not alike"),
    "no output": (
        replaced(BLOCK + "_self_attention_layer/output_dense/vars/0", lambda a: None),
        r"h\.1\.attn\.c_proj\.weight is missing",
    ),
    "a wrong shape": (
        replaced(BLOCK + "_feedforward_output_dense/vars/0", lambda a: a.T.copy()),
        r"h\.1\.mlp\.c_proj\.weight is",
    ),
    "a bias of two axes": (
        replaced("layers/layer_normalization/vars/1", lambda a: a[None]),
        r"ln_f\.bias is",
    ),
    "a layer of another kind": (
        lambda file: file.__setitem__("layers/dense/vars/0", np.zeros(3, np.float32)),
        "layers/dense/vars/0 is not a GPT's",
    ),
    "a matrix for a head": (
        lambda file: file.__setitem__(
            "layers/reversible_embedding/vars/1", np.zeros((12, 264), np.float32)
        ),
        "layers/reversible_embedding/vars/1 is not a GPT's",
    ),
    "a layer left out": (
        lambda file: file.move("layers/transformer_decoder_1", "layers/transformer_decoder_2"),
        "missing",
    ),
    "two of them": (
        lambda file: file.copy("layers/position_embedding", "b/layers/position_embedding"),
        "twice, in two models",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIABLES)
def test_variables_that_do_not_fit_are_refused(name, saved):
    edit, why = VARIABLES[name]
    with h5py.File(saved / "preset" / "model.weights.h5", "a") as file:
        edit(file)
    with pytest.raises(CorruptInputError, match=why):
        GPT.from_pretrained(saved / "preset")


def test_whole_numbers_are_no_weights(saved):
    with h5py.File(saved / "preset" / "model.weights.h5", "a") as file:
        for part in ("query", "key", "value"):
            replaced(f"{BLOCK}_self_attention_layer/{part}_dense/vars/0", np.int8)(file)
    with pytest.raises(UserError, match="int8"):
        GPT.from_pretrained(saved / "preset")


CONFIGS = {
    "another model": ({"class_name": "GemmaBackbone"}, UserError, "holds a GemmaBackbone of Keras"),
    "a task of another": (
        {"class_name": "GPT2CausalLM", "config": {"backbone": {"class_name": "OPTBackbone"}}},
        UserError, "holds a OPTBackbone",
    ),
    "a class that is none": ({"class_name": ["x"]}, UserError, "of Keras; only"),
    "no sizes": ({"config": None}, CorruptInputError, "says nothing of its GPT2Backbone"),
    "a size of text": (
        {"config": {"num_heads": "3"}}, CorruptInputError, "sizes that are none",
    ),
    "other heads": ({"config": {"num_heads": 4}}, CorruptInputError, "where 4 are said"),
    "a dropout of more than all": (
        {"config": {"dropout": 7}}, CorruptInputError, "not a probability",
    ),
    "a dropout of nothing": (
        {"config": {"dropout": math.nan}}, CorruptInputError, "not a probability",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_do_not_fit_are_refused(name, saved):
    change, error, why = CONFIGS[name]
    path = saved / "preset" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(error, match=why):
        GPT.from_pretrained(saved / "preset")


def test_other_models_of_keras_are_refused(tmp_path):
    with h5py.File(tmp_path / "model.weights.h5", "w") as file:
        file["layers/dense/vars/0"] = np.zeros((3, 4), np.float32)
    with pytest.raises(UserError, match="no GPT2Backbone of KerasHub"):
        GPT.from_pretrained(tmp_path)
