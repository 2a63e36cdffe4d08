"""`tiedgpt generate` with searches and forms."""

import json
import re
from dataclasses import fields

import pytest

from tests.infer.option_values import BAD_VALUES
from tiedgpt.cli.main import main
from tiedgpt.infer import Engine, GenerationConfig
from tiedgpt.options import flag

FLAGS = {each.name: flag(each) for each in fields(GenerationConfig) if "help" in each.metadata}
"""The flag of each option of generation that the command line has."""
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}}
SCHEMA |= {"required": ["age"], "additionalProperties": False}


def shown(capsys, directory, *flags):
    arguments = ["generate", str(directory), "--prompt", "the", "--max-new-tokens", "30", *flags]
    assert main(arguments) == 0
    return capsys.readouterr()


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (["--num-beams", "3"], {"num_beams": 3}),
        (["--seed", "1", "--stop", "t", "--stop", "e"], {"seed": 1, "stop": ["t", "e"]}),
    ],
    ids=str,
)
def test_flags_mean_what_the_keywords_mean(directory, capsys, flags, options):
    expected = Engine(directory).generate("the", max_new_tokens=30, **options)
    printed = json.loads(shown(capsys, directory, *flags, "--format", "json").out)
    assert printed["ids"] == expected.ids
    assert shown(capsys, directory, *flags).out == f"the{expected.text}\n"


def test_several_texts_are_separated_and_in_json_they_are_a_list(directory, capsys):
    flags = ["--n", "2", "--seed", "1"]
    expected = Engine(directory).generate("the", max_new_tokens=30, n=2, seed=1)
    texts = [f"the{completion.text}" for completion in expected]
    assert shown(capsys, directory, *flags).out == f"\n{'-' * 40}\n".join(texts) + "\n"
    answers = json.loads(shown(capsys, directory, *flags, "--format", "json").out)
    assert [answer["ids"] for answer in answers] == [completion.ids for completion in expected]
    assert [answer["prompt"] for answer in answers] == ["the", "the"]


def test_a_text_ended_by_the_timeout_has_a_note(directory, capsys):
    assert "cut off by --timeout" in shown(capsys, directory, "--timeout", "0").err


def test_constraints_are_followed(directory, capsys, tmp_path):
    out, _ = shown(capsys, directory, "--regex", "(cat|dog){2}")
    assert re.fullmatch("the(cat|dog){2}\n", out)
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    for schema in (json.dumps(SCHEMA), str(tmp_path / "schema.json")):
        out, _ = shown(capsys, directory, "--json-schema", schema, "--num-beams", "2")
        assert json.loads(out.removeprefix("the"))["age"] <= 99
    (tmp_path / "ab.lark").write_text('start: "a" start "b" | "."')
    out, _ = shown(capsys, directory, "--grammar", str(tmp_path / "ab.lark"), "--seed", "1")
    a, b = out.removeprefix("the").strip().split(".")
    assert (set(a) | {"a"}, set(b) | {"b"}, len(a)) == ({"a"}, {"b"}, len(b))


def test_a_truncated_constrained_text_has_a_note(directory, capsys):
    out, err = shown(capsys, directory, "--regex", "(cat){40}")
    assert out.startswith("thecatcat")
    assert "cut off" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--num-beams", "3", "--temperature", "0.5"],
            "--num-beams and --temperature exclude each other",
        ),
        (["--n", "2", "--temperature", "0"], "--n and --temperature 0"),
        (["--n", "2", "--num-beams", "2"], "--num-beams and --n exclude each other"),
        (["--regex", "a", "--json-schema", "{}"], "--regex and --json-schema exclude each other"),
        (["--threads", "0"], "--threads must be an integer from 1"),
        (["--prompt", "the " * 99], "let the context slide"),
        (["--json-schema", "nowhere.json"], "--json-schema nowhere.json"),
        (["--grammar", "nowhere.lark"], "--grammar nowhere.lark"),
        (["--strength", "2"], "--strength needs --steer"),
        (["--regex", "("], "--regex cannot be met: unclosed group"),
    ],
)
def test_impossible_combinations_are_refused(directory, capsys, flags, message):
    assert main(["generate", str(directory), "--prompt", "the", *flags]) == 1
    assert message in capsys.readouterr().err


def as_text(name, value):
    """Return a bad value as typed; None if it is valid on the command line."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if name in ("stop", "regex", "json_schema", "context_end", "early_stopping"):
        return value if isinstance(value, str) else None
    return str(value) if is_number or value == "a" else None


@pytest.mark.parametrize("name", [name for name in FLAGS if name != "grammar"])  # a file
def test_a_bad_value_is_refused_with_its_option(directory, capsys, name):
    texts = [text for value in BAD_VALUES[name] if (text := as_text(name, value)) is not None]
    assert texts
    for text in texts:
        assert main(["generate", str(directory), f"{FLAGS[name]}={text}"]) in (1, 2)
        assert FLAGS[name] in capsys.readouterr().err, text


@pytest.mark.parametrize(
    ("flags", "advice"),
    [(["--temperature", "0"], "; --context-end slide continues"), (["--num-beams", "2"], "")],
    ids=str,
)
def test_a_full_context_slides_on_only_where_it_can(directory, capsys, flags, advice):
    told = shown(capsys, directory, *flags, "--max-new-tokens", "100").err
    assert told == f"note: the context is full{advice}\n"
    code = main(
        ["generate", str(directory), *flags, "--context-end", "slide", "--max-new-tokens", "3"]
    )
    assert code == (0 if advice else 1)
