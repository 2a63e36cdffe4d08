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
        hint = hints[option_name]
        assert kinds_of(option.type) <= kinds_of(hint)
        default = about.rpartition("default: ")[2] if "default: " in about else ""
        if isinstance(parameter.default, (int, str)) and default.isdecimal():
            assert str(parameter.default) == default


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
