"""The options of generation beyond length and temperature."""

import dataclasses
import json
from functools import partial

import numpy as np
import pytest
import torch
import transformers

from tests.infer.option_values import BAD_PAIRS, BAD_VALUES, SAMPLING
from tests.models import save_model
from tiedgpt.errors import UserError
from tiedgpt.infer import Engine, GenerationConfig
from tiedgpt.infer.generation_config import NEUTRAL


@pytest.fixture(scope="module")
def twin(engine, tmp_path_factory):
    """The engine's model in transformers."""
    directory = tmp_path_factory.mktemp("twin")
    engine.model.save_pretrained(directory)
    return transformers.GPT2LMHeadModel.from_pretrained(directory).eval()


@pytest.mark.parametrize("n_ends", [1, 2])
@pytest.mark.parametrize("least", [0, 1, 5, 12])
def test_min_new_tokens_and_stop_ids_choose_as_transformers(engine, twin, least, n_ends):
    free = engine.generate([5, 6], max_new_tokens=20, temperature=0).ids
    ends = free[2 : 2 + n_ends]
    peer_ids = twin.generate(
        torch.tensor([[5, 6]]), attention_mask=torch.ones(1, 2), min_new_tokens=least,
        max_new_tokens=20, do_sample=False, eos_token_id=ends, pad_token_id=0,
    )[0, 2:].tolist()  # fmt: skip
    options = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
    ours = engine.generate([5, 6], stop_ids=ends, min_new_tokens=least, **options)
    assert ours.ids == peer_ids
    assert ours.stop_reason == (peer_ids[-1] if peer_ids[-1] in ends else None)
    log_p = engine.model(torch.tensor([[5, 6, *peer_ids]])).log_softmax(-1)[0, 1:-1]
    expected = log_p.gather(1, torch.tensor(peer_ids)[:, None])[:, 0].tolist()
    assert ours.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_stop_ids_text_is_shown_if_asked(engine):
    options = {"max_new_tokens": 20, "temperature": 0, "include_stop": True}
    stop = engine.generate([5, 6], **options).ids[3]
    done = engine.generate([5, 6], stop_ids=[stop], **options)
    assert done.text == engine.tokenizer.decode(done.ids) and done.ids[-1] == stop
    cut = engine.generate([5, 6], stop_ids=[stop], **options | {"include_stop": False})
    assert (cut.ids, cut.finish_reason) == (done.ids, "stop")
    assert cut.text == engine.tokenizer.decode(done.ids[:-1])
    streamed = engine.stream([5, 6], stop_ids=[stop], **options)
    assert "".join(token.text for token in streamed) == done.text
    eos = engine.tokenizer.eos_token_id
    ended = engine.generate([5, 6], logit_bias={eos: 100}, stop_ids=[eos], **options)
    assert (ended.ids, ended.text) == ([eos], "")


@pytest.mark.parametrize(("least", "n_tokens"), [(0, 1), (1, 2), (3, 4), (8, 8)])
def test_a_stop_string_in_the_first_min_new_tokens_is_text(engine, least, n_tokens):
    (letter,) = engine.tokenizer.encode("a")
    options = {"logit_bias": {letter: 100}, "temperature": 0, "stop": "a", "max_new_tokens": 8}
    done = engine.generate([5, 6], min_new_tokens=least, **options)
    assert (len(done.ids), done.text) == (n_tokens, "a" * least)
    assert done.finish_reason == ("stop" if least < 8 else "length")


def test_ignored_ends_are_ids_without_text(engine):
    eos, other = engine.tokenizer.eos_token_id, 7
    bias = {"logit_bias": {eos: 100.0}, "max_new_tokens": 3, "temperature": 0}
    ended = engine.generate([5, 6], **bias)
    assert (ended.ids, ended.finish_reason, ended.stop_reason) == ([eos], "stop", None)
    ignored = engine.generate([5, 6], **bias, ignore_eos=True)
    assert (ignored.ids, ignored.text, ignored.finish_reason) == ([eos] * 3, "", "length")
    bias["logit_bias"] = {eos: 100.0, other: 90.0}
    at_least_two = engine.generate([5, 6], **bias, min_new_tokens=2)
    assert at_least_two.ids == [other, other, eos]
    assert at_least_two.text == engine.tokenizer.decode([other, other])


def test_an_end_beyond_the_vocabulary_ends_no_text(engine, tmp_path):
    save_model(tmp_path, engine.model, engine.tokenizer)
    ends = [engine.model.config.vocab_size, 10**8]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    options = {"min_new_tokens": 2, "max_new_tokens": 5, "temperature": 0}
    expected = engine.generate([5, 6], **options)
    assert Engine(tmp_path, backend="torch").generate([5, 6], **options).ids == expected.ids


def test_include_stop_shows_the_stop_string_and_stop_reason_names_it(engine):
    options = {"max_new_tokens": 30, "seed": 4}
    text = engine.generate([5, 6], **options).text
    stops = [text[4:7], text[5:9]]
    begin = text.index(stops[0])
    assert begin <= text.index(stops[1])
    for include, end in ((False, begin), (True, begin + 3)):
        cut = engine.generate([5, 6], stop=stops, include_stop=include, **options)
        assert (cut.text, cut.stop_reason) == (text[:end], stops[0])
        *_, last = stream = list(engine.stream([5, 6], stop=stops, include_stop=include, **options))
        assert "".join(token.text for token in stream) == cut.text
        assert (last.finish_reason, last.stop_reason) == ("stop", stops[0])
    cut = engine.generate([5, 6], stop=[f"{text[-7:]}~", text[-4:]], **options)
    assert len(cut.ids) == 30  # till the end, the longer one may begin before the other
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (text[:-4], "stop", text[-4:])


@pytest.mark.parametrize("off", [0, -1])
def test_top_k_of_0_or_less_is_off(engine, off):
    options = {"seed": 3, "max_new_tokens": 12}
    free = engine.generate("the cat", **options)
    assert engine.generate("the cat", top_k=off, **options).ids == free.ids
    assert GenerationConfig(num_beams=2, top_k=off).top_k is None


def test_top_p_of_0_is_greedy(engine):
    greedy = engine.generate("the cat", temperature=0, max_new_tokens=12)
    assert engine.generate("the cat", top_p=0, seed=3, max_new_tokens=12).ids == greedy.ids


def test_cached_tokens_count_the_prompt_that_a_slot_held(directory):
    with Engine(directory) as engine:
        prompt = list(range(5, 42))
        counts = [engine.generate(prompt, max_new_tokens=2).cached_tokens for _ in range(2)]
        assert counts == [0, len(prompt) - 1]


def test_top_logprobs_are_sorted_and_equal_the_models(engine):
    completion = engine.generate([5, 6], max_new_tokens=5, seed=1, top_logprobs=4)
    log_p = engine.model(torch.tensor([[5, 6, *completion.ids]])).log_softmax(-1)[0, 1:-1]
    best = log_p.topk(4)
    assert [[id for id, _ in top] for top in completion.top_logprobs] == best.indices.tolist()
    values = torch.tensor([[logprob for _, logprob in top] for top in completion.top_logprobs])
    torch.testing.assert_close(values, best.values, atol=1e-4, rtol=1e-4)


def test_prompt_logprobs_equal_the_models(engine):
    prompt = [5, 6, 7, 8, 9]
    log_p = engine.model(torch.tensor([prompt])).log_softmax(-1)[0, :-1]
    completion = engine.generate(prompt, max_new_tokens=3, temperature=0, prompt_logprobs=2)
    expected = log_p.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    assert completion.prompt_logprobs == pytest.approx(expected, abs=1e-4)
    best = log_p.topk(2).indices.tolist()
    assert [[id for id, _ in top] for top in completion.prompt_top_logprobs] == best
    both = engine.generate([prompt, [3]], max_new_tokens=3, temperature=0, prompt_logprobs=True)
    assert both[0].prompt_logprobs == pytest.approx(completion.prompt_logprobs, abs=1e-5)
    assert both[0].prompt_top_logprobs == [] and both[1].prompt_logprobs == []
    assert both[0].ids == completion.ids


def test_a_sliding_window_scores_the_prompt_once(engine):
    completion = engine.generate(
        [7] * 40, max_new_tokens=30, temperature=0, context_end="slide", prompt_logprobs=True
    )
    assert completion.dropped and len(completion.prompt_logprobs) == 39


def test_the_tables_of_option_values_cover_every_option():
    options = {field.name for field in dataclasses.fields(GenerationConfig)}
    assert BAD_VALUES.keys() == options, "give rejected values in tests/infer/option_values.py"
    assert {name for values in SAMPLING for name in values} == NEUTRAL.keys(), (
        "give values that change a text to SAMPLING in tests/infer/option_values.py"
    )


@pytest.mark.parametrize("options", SAMPLING, ids=" ".join)
def test_a_sampling_option_changes_a_text_which_a_seed_repeats(backend, options):
    plain, changed, again = (
        backend.generate("the cat sat", seed=5, max_new_tokens=40, **values)
        for values in ({}, options, options)
    )
    assert changed == again and changed.ids != plain.ids


@pytest.mark.parametrize("name", BAD_VALUES)
def test_a_bad_value_is_refused_with_the_options_name(engine, name):
    for value in BAD_VALUES[name]:
        for generate in (engine.generate, engine.submit):
            with pytest.raises(UserError) as refused:
                generate("the cat", **{name: value})
            assert refused.value.options == (name,), value


@pytest.mark.parametrize("options", BAD_PAIRS, ids=str)
def test_options_that_exclude_each_other_are_both_named(engine, options):
    for generate in (engine.generate, engine.stream):
        with pytest.raises(UserError) as refused:
            generate("the cat", **options)
        assert set(refused.value.options) == set(options)


def test_an_error_states_the_bounds():
    for options, bounds in (
        ({"temperature": -1}, "temperature must be a finite number >= 0, got -1"),
        ({"num_beams": 2, "length_penalty": 51}, "from -50 to 50, got 51"),
        ({"seed": 2**63}, r"< 2\*\*63"),
    ):
        with pytest.raises(UserError, match=bounds):
            GenerationConfig(**options)


def test_options_of_beam_search_need_beams():
    for options in ({"length_penalty": 2.0}, {"early_stopping": True}):
        with pytest.raises(UserError, match="beam search") as refused:
            GenerationConfig(**options)
        assert refused.value.options == tuple(options)
    for penalty in (50, -50):
        GenerationConfig(num_beams=2, length_penalty=penalty)
    GenerationConfig(num_beams=2, stop=[], stop_ids=np.array([], int), top_k=None, temperature=0)


def test_none_means_the_default():
    names = GenerationConfig.__dataclass_fields__
    assert GenerationConfig(**dict.fromkeys(names)) == GenerationConfig()
    assert GenerationConfig().temperature == 1.0


def test_numbers_may_come_from_numpy_and_torch():
    config = GenerationConfig(
        seed=np.int64(3), top_k=torch.tensor(5), temperature=np.float32(0.5),
        stop_ids=np.array([3, 4]), prompt_logprobs=np.int32(2), logit_bias={np.int64(3): 1},
    )  # fmt: skip
    assert (config.seed, config.top_k, config.temperature) == (3, 5, 0.5)
    assert config.stop_ids == (3, 4) and config.prompt_logprobs == 2
    assert type(config.seed) is type(config.top_k) is int
    for true in (True, 1, np.True_):
        assert GenerationConfig(num_beams=2, early_stopping=true).early_stopping is True


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("max_tokens", "did you mean max_new_tokens"),
        ("max_length", "did you mean max_new_tokens"),
        ("do_sample", "did you mean temperature"),
        ("temprature", "did you mean temperature"),
        ("max_num_seqs", "did you mean slots.*option of Engine"),
        ("qqq", "known are max_new"),
        ("best_of", "use n with a seed"),
        ("typical_p", "use top_p or min_p"),
        ("bad_words_ids", "use logit_bias"),
        ("assistant_model", "without drafts"),
    ],
)
def test_an_unknown_option_names_the_nearest_one(engine, name, remedy):
    config = GenerationConfig()
    for generate in (
        partial(engine.generate, "the"), partial(engine.stream, "the", config),
        partial(engine.submit, "the"), GenerationConfig,
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"{name} is no .*{remedy}"):
            generate(**{name: 3})


def test_repr_of_a_generation_states_its_status_in_one_line(engine):
    generation = engine.submit("the", max_new_tokens=3, temperature=0)
    text = generation.result().text
    assert repr(generation) == f"<Generation: length after 3 tokens, {' '.join(text.split())!r}>"
    failed = engine.submit("the", processors=[lambda ids, n, logits: logits[:1]])
    with pytest.raises(UserError):
        failed.result()
    assert repr(failed).startswith("<Generation: failed, ") and "\n" not in repr(failed)
