"""Models of transformers in memory become ours: same logits, memory of their own, the tie kept."""

import pytest
import torch
from transformers import (
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
)

from tests.weights.test_transformers import SHAPES, assert_same_logits, their_gpt2
from tiedgpt import GPT
from tiedgpt.errors import UserError

IDS = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", SHAPES)
def test_their_gpt2_gives_its_logits(shape):
    theirs = their_gpt2(**SHAPES[shape])
    ours = GPT.from_pretrained(theirs)
    assert ours.head is None and not ours.training
    assert_same_logits(ours, theirs, IDS)


def test_weights_are_copied():
    theirs = their_gpt2(**SHAPES["tiny"])
    ours = GPT.from_pretrained(theirs)
    before = ours.wte.weight.clone()
    with torch.no_grad():
        theirs.transformer.wte.weight.zero_()
    assert torch.equal(ours.wte.weight, before)


def test_their_gpt1_gives_its_logits():
    sizes = {key: SHAPES["tiny"][key] for key in ("vocab_size", "n_embd", "n_layer", "n_head")}
    theirs = OpenAIGPTLMHeadModel(OpenAIGPTConfig(**sizes, n_positions=24)).eval()
    ours = GPT.from_pretrained(theirs)
    assert ours.config.norm == "post"
    assert_same_logits(ours, theirs, IDS)


def test_an_untied_head_stays_untied_and_an_undeclared_one_is_asked_about():
    theirs = their_gpt2(**SHAPES["tiny"], tie_word_embeddings=False)
    ours = GPT.from_pretrained(theirs)
    assert ours.head is not None and not ours.config.tie_word_embeddings
    assert_same_logits(ours, theirs, IDS)
    theirs = their_gpt2(**SHAPES["tiny"])
    theirs.lm_head.weight = torch.nn.Parameter(2 * theirs.lm_head.weight.detach())
    with pytest.raises(UserError, match='resolve="untie"'):
        GPT.from_pretrained(theirs)
    assert_same_logits(GPT.from_pretrained(theirs, resolve="untie"), theirs, IDS)


def test_a_head_that_is_the_embedding_contradicts_a_config_that_says_untied():
    theirs = their_gpt2(**SHAPES["tiny"])
    theirs.config.tie_word_embeddings = False
    with pytest.raises(UserError, match=r'tie_word_embeddings: false.*one matrix.*resolve="tie"'):
        GPT.from_pretrained(theirs)
    assert GPT.from_pretrained(theirs, resolve="tie").head is None


def test_a_body_predicts_with_its_embedding():
    body = their_gpt2(**SHAPES["tiny"]).transformer
    assert isinstance(body, GPT2Model)
    ours = GPT.from_pretrained(body)
    with torch.no_grad():
        torch.testing.assert_close(ours.body(IDS), body(IDS).last_hidden_state)


def test_dtype_and_a_compiled_model():
    theirs = their_gpt2(**SHAPES["tiny"])
    ours = GPT.from_pretrained(torch.compile(theirs, backend="eager"), dtype=torch.bfloat16)
    assert ours.wte.weight.dtype == torch.bfloat16
    assert torch.equal(ours.wte.weight, theirs.transformer.wte.weight.bfloat16())


def test_other_modules_are_refused_by_name(tiny):
    config = LlamaConfig(
        vocab_size=61, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    with pytest.raises(UserError, match="'llama' model"):
        GPT.from_pretrained(LlamaForCausalLM(config))
    with pytest.raises(UserError, match="GPT is no model of transformers"):
        GPT.from_pretrained(tiny)
    theirs = their_gpt2(**SHAPES["tiny"])
    theirs.config.pad_token_id = 0
    with pytest.raises(UserError, match=r"classifier.*tiedgpt\.heads"):
        GPT.from_pretrained(GPT2ForSequenceClassification(theirs.config))
    del theirs.transformer.h[0].ln_1.bias
    with pytest.raises(UserError, match=r"h\.0\.ln_1\.bias is missing"):
        GPT.from_pretrained(theirs)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_unmerged_adapter_is_refused():
    peft = pytest.importorskip("peft")
    theirs = GPT2LMHeadModel(their_gpt2(**SHAPES["tiny"]).config)
    adapted = peft.get_peft_model(
        theirs, peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
    )
    with pytest.raises(UserError, match="adapter"):
        GPT.from_pretrained(adapted)
    assert_same_logits(GPT.from_pretrained(adapted.merge_and_unload()), theirs.eval(), IDS)
