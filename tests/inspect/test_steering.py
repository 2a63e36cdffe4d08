"""Directions are differences of means; steering adds them, to a model, an engine and a command."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.inspect.conftest import TEXT, random_ids, random_model
from tiedgpt.cli.main import main
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.infer import Engine
from tiedgpt.inspect import direction, steer
from tiedgpt.inspect.steering import read_direction

IDS = random_ids(12)[None]
TOWARD, AWAY = ["the cat sat", "the cat", "on the cat"], "the mat\n\nand the mat\n"


def test_a_direction_is_the_difference_of_the_mean_states(model, tokenizer):
    found = direction(model, tokenizer, toward=TOWARD, away=AWAY, layer=0)

    lengths = []

    def mean(texts):
        states = []
        for text in texts:
            with torch.no_grad():
                _, state, *_ = model.states(torch.tensor([tokenizer.encode(text)]))
            states.append(state[0, 1:].mean(0) if state.shape[1] > 1 else state[0, 0])
            lengths.append(float(states[-1].norm()))
        return torch.stack(states).mean(0)

    vector = mean(TOWARD) - mean(["the mat", "and the mat"])
    np.testing.assert_allclose(found.vector, vector, rtol=1e-4, atol=1e-5)
    assert found.norm == pytest.approx(float(vector.norm()), rel=1e-4)
    assert found.toward.mean() == pytest.approx(1, abs=1e-4) and len(found.toward) == 3
    assert found.away.mean() == pytest.approx(-1, abs=1e-4) and len(found.away) == 2
    assert found.state_norm == pytest.approx(np.mean(lengths), rel=1e-4)
    pushes = (model.wte.weight.detach() @ vector).numpy()
    order, pushes = pushes.argsort()[::-1], pushes - pushes.mean()
    assert found.ids.tolist() == [order[:10].tolist(), order[: -10 - 1 : -1].tolist()]
    np.testing.assert_allclose(found.push, pushes[found.ids], rtol=1e-3)
    assert direction(model, tokenizer, toward=TOWARD, away=AWAY).layer == 1  # the middle of two
    assert direction(model, tokenizer, toward=TOWARD, away=AWAY, layer=-2).layer == 0


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_steering_adds_to_the_state_after_a_layer_inside_the_block(norm):
    model = random_model(norm=norm)
    vector = torch.randn(16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain, before = list(model.states(IDS)), model(IDS)
        with steer(model, 0, vector, strength=0.5), steer(model, 0, vector, strength=-2):
            steered = list(model.states(IDS))
            assert not torch.allclose(model(IDS), before)
        assert torch.equal(steered[0], plain[0])
        torch.testing.assert_close(steered[1], plain[1] - 1.5 * vector)
        torch.testing.assert_close(steered[2], model.h[1](steered[1], 1))
        assert torch.equal(model(IDS), before)


def test_the_last_layer_s_direction_moves_the_logits_by_its_rows():
    """After the last layer of a GPT-1 only the head follows: W v is added to the logits."""
    model = random_model(norm="post")
    vector = (model.wte.weight[7] - model.wte.weight[3]).detach()
    with torch.no_grad(), steer(model, -1, vector):
        moved = model(IDS)
    with torch.no_grad():
        torch.testing.assert_close(moved, model(IDS) + model.wte.weight @ vector, **CLOSE)


CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def test_an_engine_is_steered_inside_the_block_only(model, tokenizer):
    with Engine(model, tokenizer=tokenizer, backend="torch") as engine:
        plain = engine.generate(TEXT, max_new_tokens=8, temperature=0)
        with steer(model, 0, torch.full((16,), 3.0)):
            steered = engine.generate(TEXT, max_new_tokens=8, temperature=0)
            with torch.no_grad():
                ids = torch.tensor([tokenizer.encode(TEXT)])
                assert steered.ids[0] == int(model(ids)[0, -1, : len(tokenizer)].argmax())
        assert steered.logprobs != plain.logprobs
        again = engine.generate(TEXT, max_new_tokens=8, temperature=0)
        assert again.ids == plain.ids and again.logprobs == pytest.approx(plain.logprobs, abs=1e-5)


def test_texts_of_a_direction_are_the_lines_that_newlines_end(model, tokenizer):
    lines = ["the\u2028cat", "sat\x85on", "the\rmat"]
    options = {"away": AWAY, "layer": 0}
    of_lines = direction(model, tokenizer, toward=lines, **options)
    of_text = direction(model, tokenizer, toward="\r\n".join(lines) + "\n", **options)
    assert len(of_text.toward) == 3
    np.testing.assert_array_equal(of_text.vector, of_lines.vector)


def test_the_command_finds_a_direction_and_generates_along_it(here, model, tokenizer, capsys):
    texts = ["--toward", "\n".join(TOWARD), "--away", AWAY]
    assert main(["inspect", "direction", "model", *texts]) == 0
    assert "raises" in capsys.readouterr().out
    assert main(["inspect", "direction", "model", *texts, "--format", "json"]) == 0
    told = capsys.readouterr().out
    Path("cat.json").write_text(told)
    layer, vector = read_direction(Path("cat.json"))
    command = ["generate", "model", "--prompt", TEXT, "-n", "8", "-t", "0", "--format", "json"]
    answers = []
    for more in ([], ["--steer", "cat.json", "--strength", "9"]):
        assert main([*command, *more]) == 0
        answers.append(json.loads(capsys.readouterr().out)["ids"])
    with steer(model, layer, vector, strength=9), Engine(model, tokenizer=tokenizer) as engine:
        assert answers[1] == engine.generate(TEXT, max_new_tokens=8, temperature=0).ids
    assert answers[0] != answers[1]


def test_a_file_that_holds_no_direction_is_refused(here, tmp_path, capsys):
    for text in ('{"layer": 0}', '{"layer": 0, "vector": [1, "a"]}', '{"vector": [1.0]}', "[]"):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(CorruptInputError):
            read_direction(tmp_path / "x.json")
    (tmp_path / "x.json").write_text('{"layer": 0, "vector": [1.0]}')
    assert main(["generate", "model", "--steer", "x.json", "-n", "2"]) == 1
    assert "16 finite numbers" in capsys.readouterr().err
    assert main(["generate", "model", "--steer", "x.json", "--backend", "kernels"]) == 1
    assert "computed by torch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((0, [1.0, 2.0]), "must be 16 finite numbers"),
        ((0, [float("nan")] * 16), "must be 16 finite numbers"),
        ((2, [1.0] * 16), "layer must be from 0 to 1"),
    ],
)
def test_directions_of_another_shape_are_refused(arguments, says):
    with pytest.raises(UserError, match=says), steer(random_model(), *arguments):
        pass


def test_only_a_gpt_is_steered():
    with (
        pytest.raises(UserError, match="model as GPT, got Linear"),
        steer(torch.nn.Linear(2, 2), 0, [1]),
    ):
        pass
