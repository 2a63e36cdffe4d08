"""What save_pretrained writes for models that transformers has no exact class for."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tiedgpt import GPT
from tiedgpt.errors import UserError

OURS = [
    {"attention_windows": (0, 5)},
    {"attention_windows": (0, 5), "bias": False, "tie_word_embeddings": False},
    {"norm": "post", "activation_function": "gelu"},
    {"norm": "post", "n_inner": 40},
    {"norm": "post", "n_inner": 40, "bias": False},
]


def fresh(tiny: GPT, **changes) -> GPT:
    torch.manual_seed(5)
    return GPT(replace(tiny.config, **changes)).eval()


@pytest.mark.parametrize("changes", OURS)
def test_what_transformers_would_compute_wrongly_it_refuses(tiny, tmp_path, changes):
    fresh(tiny, **changes).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "tiedgpt"
    assert "transformers has no class" in (tmp_path / "README.md").read_text()
    with pytest.raises((ValueError, KeyError), match="tiedgpt"):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_transformers_reads_zeros_where_there_are_no_biases(tiny, ids, tmp_path, norm):
    model = fresh(tiny, bias=False, norm=norm)
    model.save_pretrained(tmp_path)
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(ids).logits, model(ids), rtol=0, atol=2e-5)


def test_biases_that_were_trained_elsewhere_are_kept_and_told(tiny, ids, tmp_path):
    from tiedgpt.weights.load import load

    fresh(tiny, bias=False).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["transformer.ln_f.bias"] += 1
    save_file(state, tmp_path / "model.safetensors")
    loaded = load(tmp_path)
    assert loaded.model.config.bias
    assert (loaded.model.ln_f.bias == 1).all()
    assert "they are kept" in loaded.notes[0]


def test_a_key_that_utf8_cannot_hold_is_saved_as_it_was(saved, tmp_path):
    path = saved / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"note": "a\ud800é"}))
    GPT.from_pretrained(saved).save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text("utf-8"))["note"] == "a\ud800é"


def test_a_card_that_cannot_be_read_is_told_before_anything_is_written(tiny, tmp_path):
    (tmp_path / "README.md").mkdir()
    with pytest.raises(UserError, match=r"README\.md: Is a directory"):
        tiny.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_a_name_that_is_too_long_is_our_error(tiny, tmp_path):
    with pytest.raises(UserError, match="File name too long"):
        tiny.save_pretrained(tmp_path / ("a" * 300))
