"""Prompts from a file: in order, as each alone, resumed, and none of them in another's way."""

import json

import pytest

from tiedgpt.cli.main import main
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.infer import GenerationConfig
from tiedgpt.infer.batches import PromptLine, complete, read_prompts

CONFIG = GenerationConfig(max_new_tokens=6, seed=3)
PROMPTS = [f"the cat {word}" for word in ("sat", "ate", "saw", "ran", "sat", "hid", "was")] * 3


@pytest.fixture
def lines():
    return [PromptLine(n, prompt, CONFIG) for n, prompt in enumerate(PROMPTS, start=1)]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def results(capsys):
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [{**each, "logprobs": len(each["logprobs"])} for each in found]  # torch rounds alike


def texts(results):
    return [(each.line, each.text, each.ids) for each in results]


def test_results_are_in_order_and_equal_those_of_generate(engine, lines):
    found = list(complete(engine, lines))
    assert [each.line for each in found] == list(range(1, len(PROMPTS) + 1))
    wanted = engine.generate(PROMPTS, CONFIG)
    assert [each.text for each in found] == [each.text for each in wanted]
    assert [each.ids for each in found] == [each.ids for each in wanted]
    assert len({each.text for each in found}) > 5


@pytest.mark.parametrize("skip", [1, 4, 6, 11, 21])
def test_existing_results_are_not_written_again(engine, lines, skip):
    several = [PromptLine(n, "the dog", GenerationConfig(max_new_tokens=4, seed=1, n=3))
               for n in range(22, 24)]  # fmt: skip
    whole = list(complete(engine, [*lines, *several]))
    assert len(whole) == len(PROMPTS) + 6
    before = engine.stats()["requests"]
    assert texts(complete(engine, [*lines, *several], skip=skip)) == texts(whole[skip:])
    assert engine.stats()["requests"] - before == len(PROMPTS) - skip + 6
    assert texts(complete(engine, [*lines, *several], skip=22)) == texts(whole[22:])


def test_a_failing_prompt_has_an_error_and_the_others_continue(engine, lines):
    lines[2] = PromptLine(3, "the cat " * 99, CONFIG)
    found = list(complete(engine, lines))
    assert found[2].finish_reason == "error" and "context" in found[2].error
    assert all(each.error is None and each.ids for each in found if each.line != 3)


def test_beams_and_several_texts_are_allowed(engine):
    beams = GenerationConfig(max_new_tokens=6, num_beams=3)
    (found,) = complete(engine, [PromptLine(1, "the cat", beams)])
    assert found.text == engine.generate("the cat", beams).text
    several = GenerationConfig(max_new_tokens=6, n=2, seed=5)
    found = list(complete(engine, [PromptLine(1, "the cat", several)]))
    assert [each.text for each in found] == [c.text for c in engine.generate("the cat", several)]


def test_a_line_may_have_its_own_options(tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, [
        {"question": "who", "id": 7}, {"question": [1, 2], "options": {"logit_bias": {"5": -1}}},
        {"question": "", "options": {"temperature": 0}},
    ])  # fmt: skip
    first, second, third = read_prompts(path, CONFIG, "question")
    assert first == PromptLine(1, "who", CONFIG)
    assert second.prompt == [1, 2] and second.config.logit_bias == {5: -1}
    assert third.prompt == "" and third.config.greedy and third.config.max_new_tokens == 6


def test_a_text_file_has_one_prompt_per_nonempty_line(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\n\n  two \u2028x".encode())
    found = read_prompts(tmp_path / "a.txt", CONFIG)
    assert [(each.line, each.prompt) for each in found] == [(1, "one"), (3, "  two \u2028x")]


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"text": "a"}, r"a\.jsonl:2: no text and no ids in the field 'prompt'"),
        ({"prompt": "a", "options": {"temprature": 1}}, "did you mean temperature"),
        ({"prompt": "a", "options": {"top_k": -2}}, "top_k must be an integer >= -1"),
        ({"prompt": "a", "seed": 1}, "seed must be in `options`"),
        ({"prompt": "a", "options": [1]}, "must be an object"),
    ],
)
def test_a_wrong_line_is_named_before_anything_is_generated(tmp_path, record, says):
    write(tmp_path / "a.jsonl", [{"prompt": "ok"}, record])
    with pytest.raises(CorruptInputError, match=says):
        read_prompts(tmp_path / "a.jsonl", CONFIG)


def test_a_missing_file_and_missing_prompts_are_refused(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(UserError, match="holds no prompt"):
        read_prompts(tmp_path / "empty.txt", CONFIG)
    with pytest.raises(UserError, match="cannot be read"):
        read_prompts(tmp_path / "none.txt", CONFIG)


def test_the_command_prints_a_line_for_each_and_resumes(directory, tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", [{"prompt": prompt} for prompt in PROMPTS[:5]])
    save = tmp_path / "saved.jsonl"
    command = ["generate", str(directory), "--prompts", path, "-n", "5", "--seed", "1"]
    assert main(command) == 0
    whole = results(capsys)
    assert [each["prompt"] for each in whole] == PROMPTS[:5]
    assert main([*command, "--save", str(save)]) == 0
    assert results(capsys) == whole
    lines = save.read_text().splitlines(keepends=True)
    save.write_text("".join(lines[:3]) + lines[3][:20])  # killed while it wrote the third
    assert main([*command, "--save", str(save)]) == 0
    assert results(capsys) == whole
    assert save.read_text().startswith("".join(lines[:3]))
    assert len(save.read_text().splitlines()) == 6
    save.write_text(lines[0][:20])  # killed while it wrote the conditions
    assert main([*command, "--save", str(save)]) == 0
    assert save.read_text().startswith(lines[0]) and len(save.read_text().splitlines()) == 6
    other = tmp_path / "other"
    for text in ("no results\n", "no results", "[1]\n"):
        other.write_text(text)
        assert main([*command, "--save", str(other)]) == 3
        assert other.read_text() == text
    capsys.readouterr()
    assert main([*command[:-1], "2", "--save", str(save)]) == 1
    assert "another" in capsys.readouterr().err


def test_a_prompt_that_failed_makes_the_exit_code_1(directory, tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", [{"prompt": "the cat"}, {"prompt": "the cat " * 99}])
    assert main(["generate", str(directory), "--prompts", path, "-n", "3"]) == 1
    out, err = capsys.readouterr()
    assert [json.loads(line)["error"] is None for line in out.splitlines()] == [True, False]
    assert "1 of 2 texts failed" in err
    assert main(["generate", str(directory), "--prompts", path, "--prompt", "a"]) == 1
    assert main(["generate", str(directory), "--save", path]) == 1
