"""Our ONNX files come back as the model that was written; others' are not taken for one."""

import json
import shutil
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tie.checkpoints import write_onnx as write_theirs
from tests.weights.writers.test_onnx import KINDS, made
from tiedgpt import GPT
from tiedgpt.errors import CorruptInputError, TiedGPTError, UserError
from tiedgpt.weights.load import load
from tiedgpt.weights.writers.onnx import write_onnx

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import onnx
    from onnx import numpy_helper


def alike(model: GPT, other: GPT) -> bool:
    ours, theirs = model.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_comes_back_bit_by_bit(tmp_path, kind):
    model = made(**KINDS[kind], eos_token_id=3)
    write_onnx(model, tmp_path / "a.onnx")
    back = load(tmp_path / "a.onnx")
    assert back.layout == "ONNX, tiedgpt ONNX"
    assert back.model.config == model.config
    assert alike(back.model, model)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_sixteen_bits_come_back_as_they_were_rounded(tmp_path, precision):
    model = made()
    write_onnx(model, tmp_path / "a.onnx", precision=precision)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    assert alike(GPT.from_pretrained(tmp_path / "a.onnx"), model.to(dtype))


def test_a_directory_with_it_and_another_config_beside(tmp_path):
    model = made(norm="post")
    write_onnx(model, tmp_path / "a.onnx")
    assert alike(GPT.from_pretrained(tmp_path), model)
    model.save_pretrained(tmp_path / "m")
    shutil.copy(tmp_path / "m" / "config.json", tmp_path)
    assert GPT.from_pretrained(tmp_path / "a.onnx").config == model.config


def test_what_others_export_is_not_read_as_a_model(tmp_path):
    write_theirs(tmp_path / "a.onnx", "gemm", names=("wte.weight", ""))
    with pytest.raises(UserError, match="tiedgpt did not write: `tie` looks into it"):
        GPT.from_pretrained(tmp_path / "a.onnx")


def changed(tmp_path, change, **values):
    """Write a file, change it with onnx itself, and return its path."""
    write_onnx(made(**values), tmp_path / "a.onnx")
    file = onnx.load(tmp_path / "a.onnx")
    change(file)
    onnx.save(file, tmp_path / "b.onnx")
    return tmp_path / "b.onnx"


def config(**values):
    def change(file):
        entry = file.metadata_props[0]
        kept = json.loads(entry.value) | values
        entry.value = json.dumps({k: v for k, v in kept.items() if v != "REMOVE"})

    return change


def metadata(text):
    def change(file):
        file.metadata_props[0].value = text

    return change


def without(name):
    def change(file):
        at = [tensor.name for tensor in file.graph.initializer].index(name)
        del file.graph.initializer[at]

    return change


def head_of_its_own(file):
    matrix = numpy_helper.from_array(np.ones((97, 32), np.float32), "copy")
    file.graph.initializer.append(matrix)
    (gemm,) = (node for node in file.graph.node if node.op_type == "Gemm")
    gemm.input[1] = "copy"


def transposed(file):
    (matrix,) = (t for t in file.graph.initializer if t.name == "h.1.mlp.c_fc.weight")
    matrix.dims[:] = matrix.dims[::-1]


def twice(file):
    file.metadata_props.append(file.metadata_props[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (config(rotary=True), "says rotary, which this version .* does not know"),
        (config(n_head=5), "n_head=5 does not divide"),
        (config(n_head="REMOVE"), "does not say how many heads"),
        (config(n_layer=4), "n_layer=4, the weights have 3"),
        (config(tie_word_embeddings=3), "does not say whether its head is tied"),
        (config(tie_word_embeddings=False), "head.weight predicts, its graph predicts with wte"),
        (config(activation_function=["relu"]), "activation_function"),
        (config(attention_windows=[1, "two"]), "attention_windows"),
        (metadata("{"), "metadata under 'tiedgpt' are no config"),
        (metadata("[" * 50_000), "metadata under 'tiedgpt' are no config"),
        (metadata("[]"), "metadata under 'tiedgpt' are no config"),
        (twice, "metadata under 'tiedgpt' are no config"),
        (without("h.2.ln_1.bias"), r"h\.2\.ln_1\.bias is missing"),
        (without("wte.weight"), r"graph predicts with"),
        (head_of_its_own, r"its graph predicts with copy: it was changed"),
        (transposed, r"h\.1\.mlp\.c_fc\.weight is \(32, 128\), not \(128, 32\)"),
    ],
)
def test_what_was_changed_is_refused_and_says_why(tmp_path, change, words):
    with pytest.raises((CorruptInputError, UserError), match=words):
        GPT.from_pretrained(changed(tmp_path, change))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A file of a few kilobytes, and its twin with the weights beside."""
    directory = tmp_path_factory.mktemp("onnx")
    model = made(vocab_size=5, n_positions=3, n_embd=4, n_layer=1, n_head=2)
    write_onnx(model, directory / "a.onnx")
    write_onnx(model, directory / "b.onnx", largest_file=10)
    return directory


def sound_or_ours(path) -> None:
    try:
        GPT.from_pretrained(path)
    except TiedGPTError:
        pass


@pytest.mark.parametrize("name", ["a.onnx", "b.onnx"])
def test_every_truncation_is_refused(small, name):
    whole = (small / name).read_bytes()
    path = small / f"cut-{name}"
    for end in [*range(0, len(whole) - 1, 41), len(whole) - 1]:
        path.write_bytes(whole[:end])
        with pytest.raises(TiedGPTError):
            GPT.from_pretrained(path)
    path.write_bytes(whole)
    data = (small / "b.onnx_data").read_bytes()
    if name == "b.onnx":
        for end in (0, 4096, len(data) - 1):
            (small / "b.onnx_data").write_bytes(data[:end])
            with pytest.raises(CorruptInputError, match=r"b\.onnx_data"):
                GPT.from_pretrained(small / "b.onnx")
        (small / "b.onnx_data").write_bytes(data)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_changed_bytes_give_our_error_or_a_model(small, data):
    whole = bytearray((small / "b.onnx").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    (small / "c.onnx").write_bytes(whole)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ids outside the vocabulary are dropped with a warning
        sound_or_ours(small / "c.onnx")
