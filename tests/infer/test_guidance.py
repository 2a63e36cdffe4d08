import numpy as np
import pytest
import torch
import transformers

from tests.infer.conftest import run
from tiedgpt import GPT, GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.infer.beam import beam_search
from tiedgpt.infer.guidance import Guidance, GuidedSlots
from tiedgpt.infer.slots import Read, SlotPool
from tiedgpt.infer.torch_session import TorchRunner

PROMPT = [5, 9, 60, 31]


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """A GPT, and the same in transformers."""
    torch.manual_seed(3)
    model = GPT(
        GPTConfig(vocab_size=61, n_positions=32, n_embd=32, n_layer=2, n_head=2, eos_token_id=0)
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "ln_" in name and "weight" in name else 0.0, 0.2)
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    return model, transformers.GPT2LMHeadModel.from_pretrained(directory).eval()


class Guided:
    """Slots that are guided, read without others beside."""

    def __init__(self, model, *, negative, scale, slots=3):
        self.session = TorchRunner(model).session(slots=2 * slots, capacity=26)
        inner, _ = SlotPool(self.session).take(2 * slots, [])
        self.slots = GuidedSlots(inner, Guidance(len(PROMPT), negative, scale))

    def read(self, slots, ids, **how):
        reads = [Read(slot, new, **how) for slot, new in zip(slots, ids, strict=True)]
        return run(self.session, self.slots.read(reads))


def greedy(guided, prompt, n):
    scores = guided.read([0], [prompt])[0]
    ids = []
    for _ in range(n):
        ids.append(int(scores[-1].argmax()))
        if ids[-1] == guided.slots.config.eos_token_id:
            break
        scores = guided.read([0], [ids[-1:]])[0]
    return ids


@pytest.mark.parametrize("scale", [0.0, 1.5, 3.0])
@pytest.mark.parametrize("negative", [None, [7], [8, 2, 44, 20, 21, 22]], ids=str)
def test_guided_text_is_that_of_transformers(twins, scale, negative):
    model, theirs = twins
    with torch.no_grad():
        expected = theirs.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            negative_prompt_ids=None if negative is None else torch.tensor([negative]),
            guidance_scale=scale,
            max_new_tokens=16,
            do_sample=False,
            pad_token_id=60,
        )
    ours = Guided(model, negative=negative or PROMPT[-1:], scale=scale)
    assert PROMPT + greedy(ours, PROMPT, 16) == expected[0].tolist()


def both_ways(model, new):
    """log P' after each new token, by the equation, without a session."""
    negative = [8, 2, 44, 20, 21, 22]
    with torch.no_grad():
        own = model(torch.tensor([PROMPT + new]))[0].log_softmax(-1)
        away = model(torch.tensor([negative + new]))[0].log_softmax(-1)
    n = len(new) + 1
    return (away[-n:] + 2.0 * (own[-n:] - away[-n:])).log_softmax(-1).numpy()


def log_p(logits):
    return torch.from_numpy(logits).log_softmax(-1).numpy()


def guided(model):
    return Guided(model, negative=[8, 2, 44, 20, 21, 22], scale=2.0)


def test_a_prompt_read_in_parts_is_guided_as_one_read_at_once(twins):
    model, _ = twins
    new = [11, 12, 13]
    expected = both_ways(model, new)
    at_once = guided(model)
    (scores,) = at_once.read([1], [PROMPT + new], every=[1])
    np.testing.assert_allclose(log_p(scores[3:]), expected, atol=1e-4)
    assert scores.shape == (7, 61)
    in_parts = guided(model)
    in_parts.read([1], [PROMPT[:2]])
    in_parts.read([1], [PROMPT[2:3]])
    (scores,) = in_parts.read([1], [[PROMPT[3], *new[:1]]])
    np.testing.assert_allclose(log_p(scores[0]), expected[1], atol=1e-4)
    (scores,) = in_parts.read([1], [new[1:]], every=[1])
    np.testing.assert_allclose(log_p(scores), expected[2:], atol=1e-4)


def test_guided_slots_can_be_truncated_and_copied(twins):
    model, _ = twins
    session = guided(model)
    session.read([0], [[*PROMPT, 11, 50]])
    session.slots.copy(0, 2)
    session.slots.truncate(2, 5)
    assert [session.slots.length(slot) for slot in range(3)] == [6, 0, 5]
    a, b = session.read([0, 2], [[13], [12]])
    np.testing.assert_allclose(log_p(a[-1]), both_ways(model, [11, 50, 13])[-1], atol=1e-4)
    np.testing.assert_allclose(log_p(b[-1]), both_ways(model, [11, 12])[-1], atol=1e-4)
    session.slots.truncate(2, 2)
    (scores,) = session.read([2], [PROMPT[2:]])
    np.testing.assert_allclose(log_p(scores[-1]), both_ways(model, [])[-1], atol=1e-4)


def test_beams_can_be_guided(twins):
    model, _ = twins
    ours = guided(model)
    steps = beam_search(ours.slots, PROMPT, num_beams=3, max_new_tokens=8)
    best = run(ours.session, steps)[0]
    rows = both_ways(model, best.ids)
    expected = [float(rows[at, token]) for at, token in enumerate(best.ids)]
    assert best.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_longer_negative_prompt_shortens_the_context(twins):
    model, _ = twins
    assert Guided(model, negative=[1], scale=2).slots.capacity == 26
    longer = Guided(model, negative=[1] * 10, scale=2)
    assert longer.slots.capacity == 20
    longer.read([0], [[1] * 20])
    for negative in ([], [1] * 33):
        with pytest.raises(UserError, match="negative_prompt"):
            Guidance(4, negative, 2.0).require_room(model.config)
