"""The PEFT package loads our adapters, and its adapters load here."""

import json

import pytest
import torch

from tests.models import random_gpt
from tests.tune.test_adapters import drawn
from tiedgpt import GPT
from tiedgpt.errors import UserError
from tiedgpt.heads import SequenceClassifier
from tiedgpt.infer import Engine
from tiedgpt.tie import add_tokens, untie
from tiedgpt.tune import load_adapter, lora, merge, save_adapter
from tiedgpt.tune.adapters import BLOCKS
from tiedgpt.weights.load import CheckpointWarning

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of peft


@pytest.fixture
def load_peer(tiny, tmp_path):
    """Make transformers' GPT-2 of the same weights."""

    def made(model=tiny, cls="AutoModelForCausalLM"):
        transformers = pytest.importorskip("transformers")
        model.save_pretrained(tmp_path / "base")
        return getattr(transformers, cls).from_pretrained(tmp_path / "base").eval()

    return made


def close(ours, expected):
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("case", ["blocks", "some", "rows", "untied"])
def test_our_adapter_is_the_same_in_peft_loaded_and_merged(tiny, load_peer, ids, case, tmp_path):
    peft = pytest.importorskip("peft")
    if case == "rows":
        add_tokens(tiny, 2)
    if case == "untied":
        untie(tiny)
    base = load_peer()
    targets = {"some": ["h.1.mlp.c_fc", "h.0.attn.c_attn"], "untied": [*BLOCKS, "wte", "head"]}
    tokens = [97, 98] if case == "rows" else []
    lora(tiny, rank=3, targets=targets.get(case, BLOCKS), tokens=tokens)
    drawn(tiny)
    save_adapter(tiny, tmp_path / "a")
    ids[:, 3:5] = torch.tensor(tokens or [5, 6])
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "a").eval()
    close(adapted(ids).logits, tiny(ids))
    merged = adapted.merge_and_unload()
    assert merge(tiny) < 1e-5
    close(merged(ids).logits, tiny(ids))


def test_an_adapter_of_w_loads_in_peft_and_must_be_merged_here(tiny, load_peer, ids, tmp_path):
    peft = pytest.importorskip("peft")
    base = load_peer()
    lora(tiny, targets=["wte", "attn.c_attn"])
    drawn(tiny)
    (note,) = save_adapter(tiny, tmp_path / "a")
    assert "its own merge adds them twice" in note
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "a").eval()
    close(adapted(ids).logits, tiny(ids))
    merged = adapted.merge_and_unload()(ids).logits
    assert (merged - tiny(ids)).abs().max() > 1e-2, "the note is no longer true of this PEFT"


CASES = {
    "blocks": {"target_modules": ["c_attn", "c_fc", "c_proj"]},
    "default": {},
    "patterns": {
        "target_modules": ["c_attn", "mlp.c_proj"],
        "rank_pattern": {"h.0.attn.c_attn": 3, r"h\.[12].mlp.c_proj": 5},
        "alpha_pattern": {"c_attn": 32},
    },
    "rslora": {"target_modules": ["c_fc"], "use_rslora": True, "rank_pattern": {"h.1.mlp.c_fc": 2}},
    "regex": {"target_modules": r".*h\.[02]\.mlp\.c_fc"},
    "some layers": {"target_modules": ["c_fc"], "layers_to_transform": [1]},
    "rows": {"target_modules": ["c_attn"], "trainable_token_indices": [9, 3]},
    "both sides": {"target_modules": ["lm_head"], "ensure_weight_tying": True},
    "reads": {"target_modules": ["wte"]},
    "predicts": {"target_modules": ["lm_head"]},
    "two": {"target_modules": ["wte", "lm_head"]},
}


@pytest.mark.parametrize("case", CASES)
def test_pefts_adapter_is_the_same_here_loaded_and_merged(tiny, load_peer, ids, case, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, fan_in_fan_out=True, **CASES[case])
    adapted = drawn(peft.get_peft_model(load_peer(), config)).eval()
    ids[:, 2:4] = torch.tensor([9, 3])
    logits = adapted(ids).logits
    adapted.save_pretrained(tmp_path / "a")
    if case in ("reads", "predicts", "two"):
        with pytest.raises(UserError, match="untie the model first"):
            load_adapter(tiny, tmp_path / "a")
        untie(tiny)
    load_adapter(tiny, tmp_path / "a")
    close(tiny(ids), logits)
    assert merge(tiny) < 1e-5
    close(tiny(ids), logits)


def test_a_classifiers_adapter_loads_in_peft(tiny, load_peer, ids, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = SequenceClassifier(tiny, labels=["a", "b", "c"]).eval()
    base = load_peer(model, "AutoModelForSequenceClassification")
    lora(model)
    drawn(model)
    save_adapter(model, tmp_path / "a")
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "a").eval()
    close(adapted(ids[:1]).logits, model(ids[:1], torch.tensor([ids.shape[1]])))


def test_pefts_classifier_adapter_loads_here(tiny, load_peer, ids, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = SequenceClassifier(tiny, labels=["a", "b", "c"]).eval()
    base = load_peer(model, "AutoModelForSequenceClassification")
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["c_attn", "c_proj"])
    adapted = drawn(peft.get_peft_model(base, config)).eval()
    adapted.save_pretrained(tmp_path / "a")
    load_adapter(model, tmp_path / "a")
    close(model(ids[:1], torch.tensor([ids.shape[1]])), adapted(ids[:1]).logits)


def test_peft_trains_the_saved_model_in_transformers_and_the_adapter_loads_here(
    tiny, load_peer, ids, tmp_path
):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(load_peer(), peft.LoraConfig(task_type="CAUSAL_LM", r=4))
    moving = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(moving, lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    logits = model.eval()(ids).logits
    model.save_pretrained(tmp_path / "a")
    with pytest.raises(UserError, match=r"merge_and_unload\(\)\.save_pretrained"):
        Engine(model)
    load_adapter(tiny, tmp_path / "a")
    close(tiny(ids), logits)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    close(GPT.from_pretrained(tmp_path / "merged")(ids), logits)


def peer_with(tiny, tmp_path, **config):
    """Save a base and return transformers' model of it with other entries of config.json."""
    transformers = pytest.importorskip("transformers")
    tiny.save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()


@pytest.mark.parametrize("std", [0.1, 0.5, 1.0, 2.0, 5.0])
def test_a_large_adapter_merges_as_in_peft(tiny, load_peer, ids, std, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn", "c_fc"])
    adapted = drawn(peft.get_peft_model(load_peer(), config), std).eval()
    adapted.save_pretrained(tmp_path / "a")
    load_adapter(tiny, tmp_path / "a")
    merge(tiny)
    expected = adapted.merge_and_unload()(ids).logits
    assert (tiny(ids) - expected).norm() <= 1e-4 * expected.norm()


def test_an_adapter_in_a_bin_file_is_read(tiny, load_peer, ids, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn", "c_proj"])
    adapted = drawn(peft.get_peft_model(load_peer(), config)).eval()
    adapted.save_pretrained(tmp_path / "a", safe_serialization=False)
    assert not (tmp_path / "a" / "adapter_model.safetensors").exists()
    load_adapter(tiny, tmp_path / "a")
    close(tiny(ids), adapted(ids).logits)


@pytest.mark.parametrize("module", ["ln_f", "h.1.ln_2", "mlp.c_fc", "wpe", "wte", "lm_head"])
def test_a_module_that_peft_saved_whole_is_refused_by_name(tiny, load_peer, module, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["c_attn"], modules_to_save=[module]
    )
    peft.get_peft_model(load_peer(), config).save_pretrained(tmp_path / "a")
    with pytest.raises(
        UserError, match=rf"{module}\.\S+ whole \(modules_to_save.*[Mm]erge"
    ) as error:
        load_adapter(tiny, tmp_path / "a")
    assert ("unties" in str(error.value)) == (module in ("wte", "lm_head"))


def test_pefts_adapter_of_a_scaled_attention_is_refused(tiny, ids, tmp_path):
    peft = pytest.importorskip("peft")
    base = peer_with(tiny, tmp_path, scale_attn_by_inverse_layer_idx=True)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"])
    adapted = drawn(peft.get_peft_model(base, config)).eval()
    adapted.save_pretrained(tmp_path / "a")
    with pytest.warns(CheckpointWarning, match="scale_attn_by_inverse_layer_idx"):
        model = GPT.from_pretrained(tmp_path / "base")
    with pytest.raises(UserError, match="scale_attn_by_inverse_layer_idx"):
        load_adapter(model, tmp_path / "a")
    logits = adapted(ids).logits
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    with pytest.warns(CheckpointWarning):
        close(GPT.from_pretrained(tmp_path / "merged")(ids), logits)
    lora(model)
    drawn(model)
    save_adapter(model, tmp_path / "ours", base=str(tmp_path / "base"))
    written = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] is None  # PEFT would compute something else
    with pytest.warns(CheckpointWarning):
        again = GPT.from_pretrained(tmp_path / "base")
    load_adapter(again, tmp_path / "ours")
    assert torch.equal(again(ids), model(ids))


@pytest.mark.parametrize("source", ["run", "run/model", "plain"])
def test_peft_opens_a_saved_adapter_by_the_base_that_it_names(tiny, ids, source, tmp_path):
    peft = pytest.importorskip("peft")
    tiny.save_pretrained(tmp_path / ("plain" if source == "plain" else "run/model"))
    lora(tiny, rank=3)
    drawn(tiny)
    save_adapter(tiny, tmp_path / "a", base=str(tmp_path / source))
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "a").eval()
    close(adapted(ids).logits, tiny(ids))


@pytest.mark.parametrize("base", ["file", "tiedgpt"])
def test_a_base_that_peft_cannot_open_is_not_named(base, tmp_path):
    model = random_gpt(attention_windows=(0, 5)) if base == "tiedgpt" else random_gpt()
    model.save_pretrained(tmp_path / "base")
    source = tmp_path / "base" / ("model.safetensors" if base == "file" else "")
    lora(model, rank=3)
    save_adapter(model, tmp_path / "a", base=str(source))
    written = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] is None
