"""Parity with transformers, both ways: logits, gradients, generated tokens, files."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tie.checkpoints import their_gpt2
from tests.weights.conftest import assert_same_logits
from tiedgpt import GPT, GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.infer import Engine

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        GPT2Config,
        GPT2ForSequenceClassification,
        GPT2LMHeadModel,
        GPT2Model,
        LlamaConfig,
        LlamaForCausalLM,
        OpenAIGPTConfig,
        OpenAIGPTLMHeadModel,
    )

transformers.logging.disable_progress_bar()

IDS = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(0))
SHAPES = {
    "tiny": {"vocab_size": 97, "n_positions": 24, "n_embd": 32, "n_layer": 3, "n_head": 4},
    "gelu, inner width": {
        "vocab_size": 61, "n_positions": 30, "n_embd": 24, "n_layer": 2, "n_head": 2,
        "activation_function": "gelu", "n_inner": 40, "layer_norm_epsilon": 1e-3,
    },
}  # fmt: skip


def sharded(peer, path):
    peer.save_pretrained(path, max_shard_size="20KB")
    assert len(list(path.glob("model-*.safetensors"))) > 2
    return path


def pickled(peer, path):
    peer.config.save_pretrained(path)
    torch.save(peer.state_dict(), path / "pytorch_model.bin")
    return path


SOURCES = {
    "a directory": lambda peer, path: peer.save_pretrained(path) or path,
    "shards": sharded,
    "a file of torch.save": pickled,
    "a module": lambda peer, path: peer,
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_gpt2_gives_its_logits_and_gradients(shape, source, tmp_path):
    peer = their_gpt2(**SHAPES[shape])
    ours = GPT.from_pretrained(SOURCES[source](peer, tmp_path))
    assert ours.head is None and not ours.training
    ids = torch.randint(SHAPES[shape]["vocab_size"], (3, SHAPES[shape]["n_positions"]))
    assert_same_logits(ours, peer, ids)
    assert_same_gradients(ours, peer, ids)


@pytest.mark.parametrize("source", ["a directory", "a module"])
def test_transformers_gpt1_gives_its_logits(source, tmp_path):
    sizes = {key: SHAPES["tiny"][key] for key in ("vocab_size", "n_embd", "n_layer", "n_head")}
    peer = OpenAIGPTLMHeadModel(OpenAIGPTConfig(**sizes, n_positions=24)).eval()
    ours = GPT.from_pretrained(SOURCES[source](peer, tmp_path))
    assert ours.config.norm == "post"
    assert_same_logits(ours, peer, IDS)


def assert_same_gradients(ours: GPT, peer, ids: torch.Tensor) -> None:
    peer(ids, labels=ids).loss.backward()
    ours.loss(ids[:, :-1], ids[:, 1:]).backward()
    expected = {name: p.grad for name, p in peer.named_parameters()}
    assert len(expected) == len(list(ours.parameters()))
    for name, parameter in ours.named_parameters():
        grad = expected["transformer." + name]
        grad = grad.T if ".c_" in name and grad.ndim == 2 else grad
        assert (parameter.grad - grad).norm() <= 1e-4 * grad.norm(), name


def test_64_greedy_tokens_equal_transformers_with_and_without_a_cache(tmp_path):
    peer = their_gpt2(**{**SHAPES["tiny"], "n_positions": 96})
    peer.save_pretrained(tmp_path)
    ours = GPT.from_pretrained(tmp_path)
    ours.config = GPTConfig(**{**vars(ours.config), "eos_token_id": None})
    prompt = [5, 17, 80, 3]
    expected = peer.generate(
        torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )[0, 4:].tolist()  # fmt: skip
    assert Engine(ours).generate(prompt, max_new_tokens=64, temperature=0).ids == expected
    ids = list(prompt)
    for _ in range(64):
        ids.append(int(ours(torch.tensor([ids]))[0, -1].argmax()))
    assert ids[4:] == expected


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_saved_models_without_missing_or_unexpected_keys(norm, tied, tmp_path):
    torch.manual_seed(1)
    ours = GPT(GPTConfig(**SHAPES["tiny"], norm=norm, tie_word_embeddings=tied)).eval()
    ours.save_pretrained(tmp_path)
    peer, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in info)
    assert_same_logits(ours, peer, torch.randint(97, (2, 24)))
    assert sum(p.numel() for p in peer.parameters()) == ours.config.parameter_count()
    peer.save_pretrained(tmp_path / "again")
    back = GPT.from_pretrained(tmp_path / "again")
    assert back.config == ours.config
    for name, parameter in ours.state_dict().items():
        assert torch.equal(parameter, back.state_dict()[name]), name


def test_saving_twice_writes_the_same_bytes(tiny, tmp_path):
    tiny.save_pretrained(tmp_path / "a")
    GPT.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_files_dtype_is_kept_unless_dtype_is_given(dtype, tmp_path):
    peer = their_gpt2(**SHAPES["tiny"]).to(dtype)
    peer.save_pretrained(tmp_path)
    ours = GPT.from_pretrained(tmp_path)
    assert {p.dtype for p in ours.parameters()} == {dtype}
    assert torch.equal(ours.wte.weight, peer.transformer.wte.weight)
    full = GPT.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same_logits(full, peer.float(), torch.randint(97, (2, 24)))
    ours.save_pretrained(tmp_path / "again")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto").dtype == dtype


@pytest.mark.slow
def test_gpt2_124m_agrees_in_logits_gradients_and_greedy_tokens(tmp_path):
    torch.manual_seed(0)
    peer = GPT2LMHeadModel(GPT2Config()).eval()
    peer.save_pretrained(tmp_path)
    ours = GPT.from_pretrained(tmp_path)
    assert sum(p.numel() for p in ours.parameters()) == 124_439_808
    ids = torch.randint(50257, (2, 128))
    assert_same_logits(ours, peer, ids)
    assert_same_gradients(ours, peer, ids)
    expected = peer.generate(
        ids[:1, :16], max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, 16:].tolist()
    ours.config = GPTConfig(**{**vars(ours.config), "eos_token_id": None})
    got = Engine(ours).generate(ids[0, :16].tolist(), max_new_tokens=64, temperature=0).ids
    assert got == expected


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
def test_transformers_refuses_models_it_would_compute_wrongly(tiny, tmp_path, changes):
    fresh(tiny, **changes).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "tiedgpt"
    card, is_tied = (tmp_path / "README.md").read_text(), "tie_word_embeddings" not in changes
    assert "transformers has no class" in card
    assert ("97 x 32 reads and predicts" in card) == is_tied != ("matrix of its own" in card)
    with pytest.raises((ValueError, KeyError), match="tiedgpt"):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_absent_biases_are_zeros_in_transformers(tiny, ids, tmp_path, norm):
    model = fresh(tiny, bias=False, norm=norm)
    model.save_pretrained(tmp_path)
    peer, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    with torch.no_grad():
        torch.testing.assert_close(peer.eval()(ids).logits, model(ids), rtol=0, atol=2e-5)


def test_nonzero_biases_are_kept_and_reported(tiny, ids, tmp_path):
    from tiedgpt.weights.load import load

    fresh(tiny, bias=False).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["transformer.ln_f.bias"] += 1
    save_file(state, tmp_path / "model.safetensors")
    loaded = load(tmp_path)
    assert loaded.model.config.bias
    assert (loaded.model.ln_f.bias == 1).all()
    assert "they are kept" in loaded.notes[0]


def test_a_key_with_a_lone_surrogate_is_saved_unchanged(saved, tmp_path):
    path = saved / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"note": "a\ud800é"}))
    GPT.from_pretrained(saved).save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text("utf-8"))["note"] == "a\ud800é"


def test_an_unreadable_card_is_refused_before_writing(tiny, tmp_path):
    (tmp_path / "README.md").mkdir()
    with pytest.raises(UserError, match=r"README\.md: Is a directory"):
        tiny.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_a_name_that_is_too_long_is_our_error(tiny, tmp_path):
    with pytest.raises(UserError, match="File name too long"):
        tiny.save_pretrained(tmp_path / ("a" * 300))


def test_weights_of_a_module_are_copied():
    peer = their_gpt2(**SHAPES["tiny"])
    ours = GPT.from_pretrained(peer)
    before = ours.wte.weight.clone()
    with torch.no_grad():
        peer.transformer.wte.weight.zero_()
    assert torch.equal(ours.wte.weight, before)


def test_an_untied_head_stays_untied_and_an_undeclared_one_needs_a_choice():
    peer = their_gpt2(**SHAPES["tiny"], tie_word_embeddings=False)
    ours = GPT.from_pretrained(peer)
    assert ours.head is not None and not ours.config.tie_word_embeddings
    assert_same_logits(ours, peer, IDS)
    peer = their_gpt2(**SHAPES["tiny"])
    peer.lm_head.weight = torch.nn.Parameter(2 * peer.lm_head.weight.detach())
    with pytest.raises(UserError, match='resolve="untie"'):
        GPT.from_pretrained(peer)
    assert_same_logits(GPT.from_pretrained(peer, resolve="untie"), peer, IDS)


def test_a_head_that_is_the_embedding_contradicts_a_config_that_says_untied():
    peer = their_gpt2(**SHAPES["tiny"])
    peer.config.tie_word_embeddings = False
    with pytest.raises(UserError, match=r'tie_word_embeddings: false.*one matrix.*resolve="tie"'):
        GPT.from_pretrained(peer)
    assert GPT.from_pretrained(peer, resolve="tie").head is None


@pytest.mark.parametrize("source", ["a directory", "a module"])
def test_a_body_predicts_with_its_embedding(source, tmp_path):
    body = their_gpt2(**SHAPES["tiny"]).transformer
    assert isinstance(body, GPT2Model)
    ours = GPT.from_pretrained(SOURCES[source](body, tmp_path))
    assert ours.head is None
    with torch.no_grad():
        torch.testing.assert_close(ours.body(IDS), body(IDS).last_hidden_state)


def test_dtype_is_applied_to_compiled_models():
    peer = their_gpt2(**SHAPES["tiny"])
    ours = GPT.from_pretrained(torch.compile(peer, backend="eager"), dtype=torch.bfloat16)
    assert ours.wte.weight.dtype == torch.bfloat16
    assert torch.equal(ours.wte.weight, peer.transformer.wte.weight.bfloat16())


def test_other_modules_are_refused_by_name(tiny):
    config = LlamaConfig(
        vocab_size=61, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    with pytest.raises(UserError, match="'llama' model"):
        GPT.from_pretrained(LlamaForCausalLM(config))
    with pytest.raises(UserError, match="GPT is no model of transformers"):
        GPT.from_pretrained(tiny)
    peer = their_gpt2(**SHAPES["tiny"])
    peer.config.pad_token_id = 0
    with pytest.raises(UserError, match=r"classifier.*tiedgpt\.heads"):
        GPT.from_pretrained(GPT2ForSequenceClassification(peer.config))
    del peer.transformer.h[0].ln_1.bias
    with pytest.raises(UserError, match=r"h\.0\.ln_1\.bias is missing"):
        GPT.from_pretrained(peer)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_unmerged_adapter_is_refused():
    peft = pytest.importorskip("peft")
    peer = GPT2LMHeadModel(their_gpt2(**SHAPES["tiny"]).config)
    adapted = peft.get_peft_model(
        peer, peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
    )
    with pytest.raises(UserError, match="adapter"):
        GPT.from_pretrained(adapted)
    assert_same_logits(GPT.from_pretrained(adapted.merge_and_unload()), peer.eval(), IDS)
