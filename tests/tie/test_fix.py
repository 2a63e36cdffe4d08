"""`fix` writes a sound copy in a new place, or nothing; the source is never touched.

`test_table.py` fixes a file of every format, claim and content.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tie.checkpoints import (
    HEAD,
    WTE,
    D,
    V,
    break_disk,
    differs_in_transformers,
    digest,
    flip_a_bit,
    fresh_head,
    matrix,
    rewrite,
    save,
    their_gpt2,
    write_onnx,
)
from tiedgpt import GPT
from tiedgpt.errors import CheckFailedError, CorruptInputError, NoRoomError, UserError
from tiedgpt.tie import audit, fix


def with_head(tmp_path: Path, change, **config) -> Path:
    """A saved model with a second matrix, `change` of the first."""

    def add(state):
        state[HEAD] = change(state[WTE]).clone()

    path = rewrite(save(their_gpt2(), tmp_path / "m"), add, **config)
    (path / "tokenizer.json").write_text("{}")
    return path


def mended(source: Path, dest: Path, **choice):
    """Fix, and check that both libraries load the copy; return the report and the tensors."""
    before = digest(source.parent)
    report = fix(source, dest, **choice)
    assert {name: file for name, file in digest(source.parent).items() if name in before} == before
    assert audit(dest).verdict == report.after.verdict == "tied"
    json.dumps(report.as_dict(), allow_nan=False)
    assert report.after.wasted_bytes == 0
    assert not differs_in_transformers(dest, GPT.from_pretrained(dest).float())
    return report, load_file(dest / "model.safetensors")


def longer(rows: torch.Tensor):
    return lambda w: torch.cat([w, rows])


NAMES = {"input_name": "transformer.wte", "output_name": "lm_head"}
CUT = "31 rows of lm_head.weight, 97 to 127, go"
MENDED = {
    "a transposed padded head": (
        lambda w: torch.cat([w + 1, torch.zeros(31, D)]).T, {}, {"keep": "output"},
        lambda w, head: head.T[:V], f"the last {CUT} (0 of",
    ),
    "fewer rows in the head": (lambda w: w[:90], {}, {}, lambda w, head: w, ""),
    "more rows in the head": (
        longer(torch.ones(3, D)), {"vocab_size": V + 3}, {}, lambda w, head: head, "",
    ),
    "more rows than tokens": (
        longer(torch.ones(31, D)), {"vocab_size": V + 3}, {}, lambda w, head: head[: V + 3],
        "28 rows of lm_head.weight, 100 to 127, go (28 of them not zero)",
    ),
    "more rows, the input kept": (
        longer(torch.ones(31, D)), {"vocab_size": V + 3}, {"keep": "input"}, lambda w, head: w, CUT,
    ),
    "an untied model on request": (
        lambda w: w + 1, {"tie_word_embeddings": False}, {"keep": "input"}, lambda w, head: w, "",
    ),
    "another width": (
        lambda w: torch.randn(V, D + 1), {}, {"keep": "input"}, lambda w, head: w, "is dropped",
    ),
    "classes": (lambda w: torch.randn(9, D), {}, {"keep": "input"}, lambda w, head: w, ""),
    "named matrices": (
        lambda w: w + 1, {}, {"keep": "output", **NAMES}, lambda w, head: head, "",
    ),
}  # fmt: skip
"""Name -> the head of W, the config, the choice, W of the copy, and words of the report."""


@pytest.mark.parametrize("name", MENDED)
def test_one_matrix_of_a_row_for_each_token_is_left(tmp_path, name):
    head, config, choice, expected, says = MENDED[name]
    source = with_head(tmp_path, head, **config)
    report, state = mended(source, tmp_path / "new", **choice)
    original = load_file(source / "model.safetensors")
    assert torch.equal(state[WTE], expected(original[WTE], original[HEAD]))
    assert says in report.explain


def alone(tmp_path: Path, **tensors) -> Path:
    """A file of these tensors without a config."""
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def with_bias(name: str):
    """Return a function that saves a model with a padded head and a bias of its rows."""

    def write(tmp_path: Path) -> Path:
        source = with_head(tmp_path, longer(torch.zeros(31, D)))
        return rewrite(source, lambda state: state.update({name: torch.randn(128)}))

    return write


def with_a_bias_of_the_module_around(tmp_path: Path) -> Path:
    source, w = tmp_path / "m", torch.from_numpy(matrix())
    source.mkdir()
    state = {WTE: w, "cls.decoder.weight": torch.cat([w, w[:3]]), "cls.bias": torch.zeros(V + 3)}
    save_file(state, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"vocab_size": V}))
    return source


def with_linear_layers(tmp_path: Path) -> Path:
    """Linear layers' (out, in) beside transformers' config, which means (in, out)."""

    def transpose(state):
        for name in [name for name in state if "c_" in name and name.endswith("weight")]:
            state[name] = state[name].T

    return rewrite(with_head(tmp_path, torch.clone), transpose)


W = torch.from_numpy(matrix())
REFUSED = [
    (lambda home: with_head(home, lambda w: torch.randn(V, D + 1)), {"keep": "output"},
     r"--keep input drops lm_head"),
    (lambda home: with_head(home, longer(torch.ones(3, D))), {"keep": "both"},
     "both need a row for each token"),
    (lambda home: with_head(home, lambda w: torch.randn(10, D)), {"keep": "output"},
     "scores something other than tokens"),
    (lambda home: save(their_gpt2(), home / "m"), {"keep": "both"}, "none is made up"),
    (lambda home: with_head(home, lambda w: w + 1),
     {"keep": "input", "input_name": "transformer.wpe"},
     r"wpe\.weight is wpe\.weight and cannot be wte\.weight"),
    (lambda home: alone(home, **{"wte.weight": W.T, HEAD: W}), {},
     r"nothing tells which is \(V, D\)"),
    (lambda home: alone(home, **{"wte.weight": W, HEAD: torch.cat([W, W[:3] + 1])}), {},
     r"a row for each token.*--keep input or --keep output"),
    (with_bias("lm_head.bias"), {}, "lm_head.bias 128 belongs to the 128 rows"),
    (with_bias("final_logits_bias"), {}, "final_logits_bias 128 belongs to the 128 rows"),
    (with_a_bias_of_the_module_around, {}, r"cls\.bias 100 belongs to the 100 rows"),
    (lambda home: write_onnx(home / "a.onnx", "copy"), {}, "exported from"),
    (lambda home: home, {"keep": "mean"}, "keep must be one of .*got 'mean'"),
]  # fmt: skip


@pytest.mark.parametrize(("write", "choice", "says"), REFUSED)
def test_what_nothing_decides_is_refused_and_nothing_is_written(tmp_path, write, choice, says):
    source = write(tmp_path)
    with pytest.raises(UserError, match=says):
        fix(source, tmp_path / "new", **choice)
    assert not (tmp_path / "new").exists()


def test_a_gpt_that_does_not_load_is_refused(tmp_path):
    with pytest.raises(CorruptInputError, match="does not fit its config"):
        fix(with_linear_layers(tmp_path), tmp_path / "new", keep="output")
    assert not (tmp_path / "new").exists()


def test_more_rows_without_a_vocabulary_are_kept_on_request(tmp_path):
    file = alone(tmp_path, **{"wte.weight": W, HEAD: torch.cat([W, torch.ones(3, D)])})
    fix(file, tmp_path / "new", keep="output")
    assert load_file(tmp_path / "new" / "model.safetensors")["wte.weight"].shape == (V + 3, D)


def test_rows_that_are_not_finite_are_counted_not_measured(tmp_path):
    def spoil(w):
        w = w.clone()
        w[3, 0] = torch.nan
        return w

    with pytest.raises(CorruptInputError, match=r"1 of 97 rows \(not finite in 1\)"):
        GPT.from_pretrained(with_head(tmp_path, spoil))


def test_what_is_neither_a_matrix_nor_a_claim_is_copied_unchanged(tmp_path):
    source, name = with_head(tmp_path, torch.clone, note="a\ud800"), "transformer.h.0.ln_1.weight"
    rewrite(source, lambda state: state.update({name: torch.full((D,), torch.nan)}))
    fix(source, tmp_path / "new")
    assert load_file(tmp_path / "new" / "model.safetensors")[name].isnan().all()
    assert json.loads((tmp_path / "new" / "config.json").read_text("utf-8"))["note"] == "a\ud800"


def test_shards_become_one_file_outside_their_directory(tmp_path):
    model = their_gpt2()
    model.lm_head = fresh_head()
    model.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    _, state = mended(tmp_path / "m", tmp_path / "new", keep="input")
    assert torch.equal(state[WTE], model.transformer.wte.weight)
    assert not (tmp_path / "new" / "model.safetensors.index.json").exists()
    with pytest.raises(UserError, match="lies inside"):
        fix(tmp_path / "m" / "model.safetensors.index.json", tmp_path / "m" / "new", keep="input")


def test_a_file_without_a_config_gets_one_that_holds_the_claim(tmp_path):
    source = with_head(tmp_path, lambda w: w + 1)
    (source / "config.json").unlink()
    fix(source / "model.safetensors", tmp_path / "new", keep="both")
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config == {"tie_word_embeddings": False}
    assert audit(tmp_path / "new").verdict == "untied as claimed"


def test_a_name_that_is_too_long_is_our_error(tmp_path):
    with pytest.raises(UserError, match="File name too long"):
        fix(with_head(tmp_path, torch.clone), tmp_path / ("a" * 300))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_files_become_a_directory(tmp_path, dtype):
    model = their_gpt2()
    save(model, tmp_path / "m")
    model.lm_head = fresh_head()
    state = {f"_orig_mod.{name}": t.to(dtype) for name, t in model.state_dict().items()}
    (tmp_path / "m" / "model.safetensors").unlink()
    torch.save({"model": state}, tmp_path / "m" / "pytorch_model.bin")
    report, new = mended(tmp_path / "m", tmp_path / "new", keep="output")
    assert report.before.format == "torch"
    assert torch.equal(new[WTE], state["_orig_mod." + HEAD])
    assert all(torch.equal(new[n], state["_orig_mod." + n]) for n in new if n != WTE)
    assert not (tmp_path / "new" / "pytorch_model.bin").exists()


def test_mixed_dtypes_are_upcast_and_never_rounded(tmp_path):
    source = with_head(tmp_path, torch.clone)
    name = "transformer.h.0.ln_1.weight"
    rewrite(
        source, lambda state: state.update({k: v.half() for k, v in state.items() if k != name})
    )
    original = load_file(source / "model.safetensors")
    fix(source, tmp_path / "new")
    state = load_file(tmp_path / "new" / "model.safetensors")
    assert all(torch.equal(state[n], original[n].float()) for n in state)


@pytest.mark.parametrize("model_type", ["gpt2", "other"])
@pytest.mark.parametrize("error", [OSError(28, "full"), KeyboardInterrupt()])
def test_a_copy_that_fails_never_appears(tmp_path, monkeypatch, model_type, error):
    source = with_head(tmp_path, torch.clone, model_type=model_type)

    def replace(*arguments):
        raise error

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(NoRoomError if isinstance(error, OSError) else KeyboardInterrupt):
        fix(source, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


@pytest.mark.parametrize("model_type", ["gpt2", "other"])
def test_a_copy_with_other_weights_never_appears(tmp_path, monkeypatch, model_type):
    source = with_head(tmp_path, torch.clone, model_type=model_type)
    break_disk(monkeypatch, flip_a_bit)
    with pytest.raises(CheckFailedError):
        fix(source, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


@pytest.mark.parametrize("dest", ["exists", "m/inside", "m"])
def test_existing_outputs_are_never_overwritten(tmp_path, dest):
    source = with_head(tmp_path, torch.clone)
    (tmp_path / "exists").mkdir()
    before = digest(tmp_path)
    with pytest.raises(UserError, match=r"exists: a mended copy|lies inside"):
        fix(source, tmp_path / dest)
    assert digest(tmp_path) == before


def test_a_transposed_embedding_is_transposed_back(tmp_path):
    def turn(state):
        state[HEAD], state[WTE] = state[WTE].clone(), state[WTE].T

    source = rewrite(save(their_gpt2(), tmp_path / "m"), turn)
    audited = audit(source)
    assert audited.verdict == "broken" and audited.matrices[0].shape == (V, D)
    assert [f.title.split()[0] for f in audited.findings if f.kind == "transposed"] == [WTE]
    _, state = mended(source, tmp_path / "new")
    original = load_file(source / "model.safetensors")
    assert torch.equal(state[WTE], original[HEAD])
    assert json.loads((tmp_path / "new" / "config.json").read_text())["vocab_size"] == V
    rewrite(source, lambda state: state.pop(HEAD))
    assert audit(source).verdict == "broken"
    _, state = mended(source, tmp_path / "one")
    assert torch.equal(state[WTE], original[HEAD])


def test_only_the_models_files_are_copied(tmp_path):
    source = with_head(tmp_path, torch.clone)
    for name in ("secrets.env", "train.npy", "modeling.py"):
        (source / name).write_text("x")
    fix(source / "model.safetensors", tmp_path / "new")
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {
        "model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "README.md"
    }  # fmt: skip
