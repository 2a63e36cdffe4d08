"""An inspection is declared once: Python, the command line, the server and the docs know it."""

import json
import runpy
import types
import typing
from dataclasses import MISSING
from inspect import Parameter, signature

import pytest

from tests.inspect.toy_inspection import LETTERS
from tests.models import save_model
from tiedgpt import inspect
from tiedgpt.cli.main import main
from tiedgpt.inspect.registry import INSPECTIONS


def kinds_of(hint):
    """Return the types of a union, or the one type."""
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return set(typing.get_args(hint)) if is_union else {hint}


@pytest.mark.parametrize("name", INSPECTIONS)
def test_a_record_names_keywords_of_its_function(name):
    inspection = INSPECTIONS[name]
    assert getattr(inspect, name) is inspection.function, "name it in inspect/__init__.pyi"
    parameters = signature(inspection.function).parameters
    assert ("text" in parameters) == inspection.reads_text
    hints = typing.get_type_hints(inspection.function)
    for option_name, option in inspection.options.items():
        if option.metadata["is_of_table"]:
            assert option_name not in parameters
            assert option_name in signature(hints["return"].table).parameters
            continue
        parameter, about = parameters[option_name], option.metadata["help"]
        assert option.default is MISSING or parameter.kind is Parameter.KEYWORD_ONLY
        assert option.default is MISSING or parameter.default is not Parameter.empty
        hint = hints[option_name]
        assert kinds_of(option.type) <= kinds_of(hint)
        default = about.rpartition("default: ")[2] if "default: " in about else ""
        if isinstance(parameter.default, (int, str)) and default.isdecimal():
            assert str(parameter.default) == default


MOST = 2**31 - 1
LIMITS = {
    "positions": {"top": (1, 100), "replace_with": (0, MOST)}, "lens": {"top": (1, 50)},
    "dot": {"top": (1, 1000)}, "vocabulary": {"top": (1, MOST)},
    "neighbours": {"token": (0, MOST), "top": (1, 100)},
    "gradient_split": {"top": (1, MOST)}, "learn": {"steps": (0, 100), "top": (0, 100)},
    "patch": {"answer": (0, MOST), "wrong": (0, MOST)}, "direction": {"top": (1, 100)},
    "random_head": {"top": (1, 50), "seed": (0, MOST)},
}  # fmt: skip
"""Least and greatest numbers that the server takes, where they are not those of 32 bits."""


def test_one_request_is_bounded_in_numbers_texts_and_time():
    for name, inspection in INSPECTIONS.items():
        for option_name, option in inspection.options.items():
            served, bounds = option.metadata["served"], LIMITS.get(name, {}).get(option_name)
            assert (served["least"], served["most"]) == (bounds or (-(2**31), MOST)), option_name
    lengths = {name: each.max_tokens for name, each in INSPECTIONS.items() if each.max_tokens}
    assert lengths == dict.fromkeys(("lens", "learn", "attention", "ablate"), 256) | {"patch": 64}
    assert INSPECTIONS["learn"].served_with == {"max_seconds": 20}
    assert [name for name, each in INSPECTIONS.items() if not each.is_served] == ["direction"]
    assert not INSPECTIONS["vocabulary"].options["counts"].metadata["is_served"]


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(INSPECTIONS, "letters", LETTERS)


def test_a_new_inspection_needs_only_a_record(registered, model, tokenizer, tmp_path, capfd):
    save_model(tmp_path, model, tokenizer)
    assert LETTERS.function(model, tokenizer, "aab").letters == {"a": 2, "b": 1}
    arguments = ["inspect", "letters", str(tmp_path), "--text", "aabc", "--top", "2"]
    figure = tmp_path / "letters.svg"
    assert main([*arguments, "--plot", str(figure)]) == 0 and figure.exists()
    assert "times" in capfd.readouterr().out
    assert main([*arguments, "--format", "json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"letters": {"a": 2, "b": 1}}
    assert main(["inspect", "letters", str(tmp_path), "--text", "a", "--top", "0"]) == 1
    assert "--top must be an integer >= 1" in capfd.readouterr().err
    pages = runpy.run_path("docs/generate.py")
    assert "how often each letter occurs" in pages["command_line"]()
    assert "letters" in pages["MODULES"]["tiedgpt.inspect"]


def test_the_server_takes_a_new_record(registered, model, tokenizer):
    pytest.importorskip("fastapi")
    from starlette.testclient import TestClient

    from tiedgpt.infer import Engine
    from tiedgpt.serve.app import create_app

    with Engine(model, tokenizer=tokenizer) as engine:
        client = TestClient(create_app(engine), base_url="http://localhost")
        answer = client.post("/inspect/letters", json={"text": "the cat", "top": 1})
        assert answer.json() == {"letters": {"t": 2}}
        assert client.get("/inspect/model").json()["most_tokens"]["letters"] == 8
        for body in ({"text": "the", "top": 27}, {"text": "q w e r t y u i o"}, {"top": 1}):
            assert client.post("/inspect/letters", json=body).status_code == 400
