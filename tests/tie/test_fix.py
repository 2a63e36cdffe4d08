"""`fix` writes a sound copy in a new place, or nothing; the source is never touched."""

import io
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
    differs_in_transformers,
    digest,
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


def mended(source: Path, dest: Path, verdict: str = "tied", **choice):
    """Fix, and check that both libraries load the copy; `test_table.py` checks the rest."""
    report = fix(source, dest, **choice)
    assert audit(dest).verdict == report.after.verdict == verdict
    json.dumps(report.as_dict(), allow_nan=False)
    assert report.after.wasted_bytes == 0
    assert not differs_in_transformers(dest, GPT.from_pretrained(dest).float())
    return report, load_file(dest / "model.safetensors")


def test_non_finite_values_are_counted_not_measured(tmp_path):
    def spoil(w):
        w = w.clone()
        w[3, 0] = torch.nan
        return w

    source = with_head(tmp_path, spoil)
    with pytest.raises(CorruptInputError, match=r"1 of 97 rows \(not finite in 1\)"):
        GPT.from_pretrained(source)


def test_the_padding_of_a_transposed_head_is_cut(tmp_path):
    source = with_head(tmp_path, lambda w: torch.cat([w + 1, torch.zeros(31, D)]).T)
    report, state = mended(source, tmp_path / "out", keep="output")
    assert (
        state[WTE].shape == (V, D)
        and "last 31 rows of lm_head.weight, 97 to 127, go (0 of" in report.explain
    )
    original = load_file(source / "model.safetensors")
    assert torch.equal(state[WTE], original[HEAD].T[:V])


def test_tokens_added_on_one_side_are_kept(tmp_path):
    source = with_head(tmp_path, lambda w: w[:90])
    _, state = mended(source, tmp_path / "new")
    assert state[WTE].shape == (V, D)
    source = with_head(tmp_path, lambda w: torch.cat([w, w[:3]]), vocab_size=V + 3)
    _, state = mended(source, tmp_path / "new2")
    assert state[WTE].shape == (V + 3, D)


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


def test_a_gpt_that_does_not_load_is_refused(tmp_path):
    """Linear layers' (out, in) beside transformers' config, which means (in, out)."""

    def transpose(state):
        state[HEAD] = state[WTE].clone()
        for name in [name for name in state if "c_" in name and name.endswith("weight")]:
            state[name] = state[name].T.contiguous()

    source = rewrite(save(their_gpt2(), tmp_path / "m"), transpose)
    with pytest.raises(CorruptInputError, match="does not fit its config"):
        fix(source, tmp_path / "new", keep="output")
    assert not (tmp_path / "new").exists()


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


class WrongDisk(io.BufferedWriter):
    """A file in which a bit of each matrix over the vocabulary is not as it was written."""

    def write(self, block):
        wrong = bytearray(memoryview(block).cast("B"))
        if len(wrong) == V * D * 4:
            wrong[100] ^= 1
        return super().write(wrong)


@pytest.mark.parametrize("model_type", ["gpt2", "other"])
def test_a_copy_with_other_weights_never_appears(tmp_path, monkeypatch, model_type):
    source, path_open = with_head(tmp_path, torch.clone, model_type=model_type), Path.open

    def open_wrong(path, mode="r", *args, **options):
        if mode == "wb" and ".safetensors" in path.name:
            return WrongDisk(io.FileIO(path, "wb"))
        return path_open(path, mode, *args, **options)

    monkeypatch.setattr(Path, "open", open_wrong)
    with pytest.raises(CheckFailedError):
        fix(source, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


def test_shards_become_one_file(tmp_path):
    model = their_gpt2()
    model.lm_head = fresh_head()
    model.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    _, state = mended(tmp_path / "m", tmp_path / "new", keep="input")
    assert torch.equal(state[WTE], model.transformer.wte.weight)
    assert not (tmp_path / "new" / "model.safetensors.index.json").exists()


def test_a_file_without_a_config_gets_one_that_holds_the_claim(tmp_path):
    source = with_head(tmp_path, lambda w: w + 1)
    (source / "config.json").unlink()
    file = source / "model.safetensors"
    fix(file, tmp_path / "new", keep="both")
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config == {"tie_word_embeddings": False}
    assert audit(tmp_path / "new").verdict == "untied as claimed"


def test_an_untied_model_is_tied_only_on_request(tmp_path):
    with pytest.raises(UserError, match="none is made up"):
        fix(save(their_gpt2(), tmp_path / "m"), tmp_path / "new", keep="both")
    source = with_head(tmp_path, lambda w: w + 1, tie_word_embeddings=False)
    mended(source, tmp_path / "tied", keep="input")


def test_unfixable_heads_are_refused(tmp_path):
    source = with_head(tmp_path, lambda w: torch.randn(V, D + 1))
    with pytest.raises(UserError, match=r"--keep input drops lm_head"):
        fix(source, tmp_path / "new", keep="output")
    mended(source, tmp_path / "in", keep="input")
    source = with_head(tmp_path, lambda w: torch.cat([w + 1, w[:3]]))
    with pytest.raises(UserError, match=r"both need a row for each token"):
        fix(source, tmp_path / "new", keep="both")


@pytest.mark.parametrize("dest", ["exists", "m/inside", "m"])
def test_existing_outputs_are_never_overwritten(tmp_path, dest):
    source = with_head(tmp_path, torch.clone)
    (tmp_path / "exists").mkdir()
    before = digest(tmp_path)
    with pytest.raises(UserError, match=r"exists: a mended copy|lies inside"):
        fix(source, tmp_path / dest)
    assert digest(tmp_path) == before


def test_an_onnx_graph_is_refused_with_the_remedy(tmp_path):
    write_onnx(tmp_path / "a.onnx", "copy")
    with pytest.raises(UserError, match="exported from"):
        fix(tmp_path / "a.onnx", tmp_path / "new")


def test_given_names_select_the_matrices_of_a_gpt(tmp_path):
    source = with_head(tmp_path, lambda w: w + 1)
    names = {"input_name": "transformer.wte", "output_name": "lm_head"}
    _, state = mended(source, tmp_path / "new", keep="output", **names)
    assert torch.equal(state[WTE], load_file(source / "model.safetensors")[HEAD])
    with pytest.raises(UserError, match=r"wpe\.weight is wpe\.weight and cannot be wte\.weight"):
        fix(source, tmp_path / "no", keep="input", input_name="transformer.wpe")
    assert not (tmp_path / "no").exists()


def test_an_unknown_choice_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"keep must be one of .*got 'mean'"):
        fix(tmp_path, tmp_path / "new", keep="mean")


# nothing that means a token goes unsaid


def alone(tmp_path: Path, **tensors) -> Path:
    """A file of these tensors without a config."""
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def test_the_longer_side_is_cut_to_the_vocabulary(tmp_path):
    source = with_head(tmp_path, lambda w: torch.cat([w, torch.randn(31, D)]), vocab_size=V + 3)
    report, state = mended(source, tmp_path / "new")
    original = load_file(source / "model.safetensors")
    assert torch.equal(state[WTE], original[HEAD][: V + 3])
    assert "28 rows of lm_head.weight, 100 to 127, go (28 of them not zero)" in report.explain
    report, _ = mended(source, tmp_path / "in", keep="input")
    assert "31 rows of lm_head.weight, 97 to 127, go" in report.explain


def test_more_rows_without_a_vocabulary_are_ambiguous(tmp_path):
    w = torch.randn(V, D)
    file = alone(tmp_path, **{"wte.weight": w, HEAD: torch.cat([w, torch.ones(3, D)])})
    with pytest.raises(UserError, match=r"a row for each token.*--keep input or --keep output"):
        fix(file, tmp_path / "new")
    fix(file, tmp_path / "new", keep="output")
    assert load_file(tmp_path / "new" / "model.safetensors")["wte.weight"].shape == (V + 3, D)


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


def test_a_matrix_of_unknown_orientation_is_refused(tmp_path):
    w = torch.randn(V, D)
    file = alone(tmp_path, **{"wte.weight": w.T, HEAD: w})
    with pytest.raises(UserError, match=r"nothing tells which is \(V, D\)"):
        fix(file, tmp_path / "new")


@pytest.mark.parametrize("name", ["lm_head.bias", "final_logits_bias"])
def test_a_head_with_a_bias_is_not_cut(tmp_path, name):
    source = with_head(tmp_path, lambda w: torch.cat([w, torch.zeros(31, D)]))
    rewrite(source, lambda state: state.update({name: torch.randn(128)}))
    with pytest.raises(UserError, match=f"{name} 128 belongs to the 128 rows"):
        fix(source, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_only_the_models_files_are_copied(tmp_path):
    source = with_head(tmp_path, torch.clone)
    for name in ("secrets.env", "train.npy", "modeling.py"):
        (source / name).write_text("x")
    fix(source / "model.safetensors", tmp_path / "new")
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {
        "model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "README.md"
    }  # fmt: skip


def test_a_copy_inside_the_directory_of_an_index_is_refused(tmp_path):
    model = their_gpt2()
    model.lm_head = fresh_head()
    model.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    with pytest.raises(UserError, match="lies inside"):
        fix(tmp_path / "m" / "model.safetensors.index.json", tmp_path / "m" / "new", keep="input")


def test_a_head_of_other_classes_never_becomes_the_vocabulary_matrix(tmp_path):
    source = with_head(tmp_path, lambda w: torch.randn(10, D))
    with pytest.raises(UserError, match="scores something other than tokens"):
        fix(source, tmp_path / "new", keep="output")
    assert not (tmp_path / "new").exists()
    _, state = mended(source, tmp_path / "new", keep="input")
    assert state[WTE].shape == (V, D)


def test_the_bias_of_the_module_around_a_head_is_not_left_too_long(tmp_path):
    source, w = tmp_path / "m", torch.from_numpy(matrix())
    source.mkdir()
    state = {WTE: w, "cls.decoder.weight": torch.cat([w, w[:3]]), "cls.bias": torch.zeros(V + 3)}
    save_file(state, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"vocab_size": V}))
    with pytest.raises(UserError, match=r"cls\.bias 100 belongs to the 100 rows"):
        fix(source, tmp_path / "new")


def test_non_finite_weights_are_copied_unchanged(tmp_path):
    source, name = with_head(tmp_path, torch.clone), "transformer.h.0.ln_1.weight"
    rewrite(source, lambda state: state.update({name: torch.full((D,), torch.nan)}))
    fix(source, tmp_path / "new")
    assert load_file(tmp_path / "new" / "model.safetensors")[name].isnan().all()


def test_a_config_with_lone_surrogates_is_copied_unchanged(tmp_path):
    source = with_head(tmp_path, torch.clone, note="a\ud800")
    fix(source, tmp_path / "new")
    assert json.loads((tmp_path / "new" / "config.json").read_text("utf-8"))["note"] == "a\ud800"


def test_a_name_that_is_too_long_is_our_error(tmp_path):
    with pytest.raises(UserError, match="File name too long"):
        fix(with_head(tmp_path, torch.clone), tmp_path / ("a" * 300))
