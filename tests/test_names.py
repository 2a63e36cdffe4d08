"""Public names are where people look for them, and other libraries' names are answered."""

import copy
import importlib
import os
import pickle
import pkgutil
import pydoc
import re
import rlcompleter
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.func import functional_call

import tiedgpt
from tiedgpt import GPT, GPTConfig, Tokenizer, tie
from tiedgpt.errors import UserError
from tiedgpt.infer import GenerationConfig
from tiedgpt.infer.runners import ENGINE_OPTIONS
from tiedgpt.names import OTHER_NAMES
from tiedgpt.train import TrainOptions
from tiedgpt.tune import lora

PACKAGES = ["tiedgpt"] + [
    f"tiedgpt.{package.name}"
    for package in pkgutil.iter_modules(tiedgpt.__path__)
    if package.ispkg and package.name != "cli"
]
MODULES_ONLY = {"tiedgpt.serve"}
"""Packages whose names need an extra; their modules are imported by name."""


def test_packages_follow_from_import_tiedgpt_alone():
    program = (
        "import sys, tiedgpt\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "print(tiedgpt.Engine.__name__, tiedgpt.train.train.__name__, tiedgpt.infer.Token.__name__,"
        " tiedgpt.tie.tie.__name__, tiedgpt.inspect.lens.__name__, tiedgpt.tune.lora.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["Engine", "train", "Token", "tie", "lens", "lora"], done.stderr


def test_names_are_found_in_a_zip_of_compiled_modules(tmp_path):
    source = Path(tiedgpt.__file__).parent
    with zipfile.PyZipFile(str(tmp_path / "all.zip"), "w") as archive:
        archive.writepy(str(source))
        for stub in source.rglob("*.pyi"):
            archive.write(stub, stub.relative_to(source.parent))
    program = "import tiedgpt; print(tiedgpt.__file__, tiedgpt.GPTConfig.__name__, tiedgpt.train)"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "all.zip")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert re.match(r"\S+\.zip/tiedgpt/__init__\.pyc GPTConfig <module", done.stdout), done.stderr


@pytest.mark.parametrize("name", PACKAGES)
def test_importing_modules_hides_no_public_name(name):
    package = importlib.import_module(name)
    for module in pkgutil.iter_modules(package.__path__, f"{name}."):
        if module.name not in ("tiedgpt.__main__", "tiedgpt.evaluate.harness"):
            pytest.importorskip(module.name)
    for public in getattr(package, "__all__", []):
        first, second = getattr(package, public), getattr(package, public)
        assert first is second and isinstance(first, ModuleType) == (f"{name}.{public}" in PACKAGES)


def test_a_module_may_have_the_name_of_its_function(tmp_path, monkeypatch):
    files = {
        "__init__.py": "from tiedgpt.names import lazy_names\n__getattr__, __dir__ = "
        "lazy_names(__name__)",
        "__init__.pyi": "from toys.entropy import entropy as entropy",
        "entropy.py": "def entropy():\n    return 7\n",
    }
    (tmp_path / "toys").mkdir()
    for file, text in files.items():
        (tmp_path / "toys" / file).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    import toys.entropy
    from toys.entropy import entropy

    assert toys.entropy() == toys.entropy() == entropy() == 7


@pytest.mark.parametrize("name", PACKAGES)
def test_dir_and_help_show_the_public_names_and_an_example(name):
    package = importlib.import_module(name)
    names = [public for public in getattr(package, "__all__", []) if public != "__version__"]
    assert names or name in MODULES_ONLY
    assert set(names) <= set(dir(package))
    assert all(hasattr(package, public) for public in names)
    text = pydoc.plain(pydoc.render_doc(package))
    assert all(re.search(rf"\b{public}\b", text) for public in names)
    example = re.search(r"\n\n((?:    .*\n|\n)+)", package.__doc__)[1]
    assert len(example.strip().splitlines()) >= 5
    compile(pydoc.inspect.cleandoc(f"\n{example}"), name, "exec")
    for line in re.findall(r"^    ((?:from|import) .*tiedgpt.*)$", example, re.MULTILINE):
        exec(line, {})


@pytest.mark.parametrize(
    ("typed", "completions"),
    [
        ("tiedgpt.En", {"tiedgpt.Engine("}),
        ("tiedgpt.tr", {"tiedgpt.train"}),
        ("tiedgpt.train.fa", {"tiedgpt.train.fast_training("}),
        ("tiedgpt.tie.t", {"tiedgpt.tie.tie("}),
        ("tiedgpt.inspect.pos", {"tiedgpt.inspect.positions("}),
    ],
)
def test_tab_completes_public_names(typed, completions):
    matches = rlcompleter.Completer({"tiedgpt": tiedgpt}).attr_matches(typed)
    assert {match.partition("(")[0] + "(" * ("(" in match) for match in matches} >= completions


@pytest.mark.parametrize(
    ("owner", "name", "answer"),
    [
        ("model", "lm_head", r"model\.head is None and model\.wte\.unembed\(h\) predicts"),
        ("model", "generate", r"Engine\(model\)\.generate"),
        ("model", "tie_weights", r"tie\.tie\(model\)"),
        ("model", "num_parameters", r"parameter_count\(\)"),
        ("tokenizer", "tokenize", r"tokenizer\.encode\(text\)"),
        ("inspect", "logit_lens", r"inspect\.lens"),
        ("tie", "is_tied", r'audit\(model\)\.verdict == "tied"'),
        ("tiedgpt", "GPT2LMHeadModel", r"tiedgpt\.GPT"),
    ],
)
def test_another_librarys_attribute_names_ours(tiny, owner, name, answer):
    tokenizer = Tokenizer.characters(["abc"])
    owners = {"model": tiny, "tokenizer": tokenizer, "tiedgpt": tiedgpt}
    value = owners[owner] if owner in owners else getattr(tiedgpt, owner)
    assert not hasattr(value, name)
    with pytest.raises(AttributeError, match=f"no attribute '{name}': .*{answer}"):
        getattr(value, name)


def test_another_librarys_argument_names_ours(tiny):
    with pytest.raises(UserError, match="GPTConfig has no 'n_layers': use n_layer"):
        GPTConfig(n_layers=2)
    with pytest.raises(TypeError, match=r"argument 'learning_rate': use lr="):
        TrainOptions(data=("my.txt",), learning_rate=1e-3)
    with pytest.raises(TypeError, match=r"lora\(\) has no argument 'r': use rank="):
        lora(tiny, r=8)
    with pytest.raises(TypeError, match=r"not callable: use tokenizer\.encode\(text\)"):
        Tokenizer.characters(["abc"])("text")
    assert lora(tiny, rank=2) and TrainOptions(lr=1e-3).lr == 1e-3


@pytest.mark.parametrize("package", [name for name in OTHER_NAMES if name.startswith("tiedgpt")])
def test_suggested_names_exist(package, tiny):
    assert not set(OTHER_NAMES[package]) & set(dir(importlib.import_module(package)))
    tables = [*OTHER_NAMES[package].values(), *OTHER_NAMES["GPT"].values()]
    for name in re.findall(r"tiedgpt((?:\.\w+)+)", " ".join(tables)):
        value = tiedgpt
        for part in name[1:].split("."):
            value = getattr(value, part)
    for name in re.findall(r"model\.(\w+)", " ".join(OTHER_NAMES["GPT"].values())):
        assert hasattr(tiny, name)
    for name in re.findall(r"tokenizer\.(\w+)", " ".join(OTHER_NAMES["Tokenizer"].values())):
        assert hasattr(Tokenizer.characters(["abc"]), name)


@pytest.mark.parametrize("called", [GPTConfig, TrainOptions, GenerationConfig, lora])
def test_suggested_arguments_exist(called):
    fields = getattr(called, "__dataclass_fields__", None)
    known = {*(fields or pydoc.inspect.signature(called).parameters)}
    known |= {*ENGINE_OPTIONS} if called is GenerationConfig else set()
    for other, names in OTHER_NAMES[called.__name__].items():
        assert other not in known
        assert set(re.split(r", | and ", names)) <= known, f"change {other!r} in OTHER_NAMES"


def test_an_unknown_attribute_is_the_usual_error(tiny):
    for value in (tiny, Tokenizer.characters(["abc"])):
        with pytest.raises(AttributeError, match=rf"'{type(value).__name__}' .* 'wtf'$") as raised:
            value.wtf  # noqa: B018
        assert (raised.value.name, raised.value.obj) == ("wtf", value)


def test_copies_pickles_and_functional_calls_are_as_usual(tiny, ids):
    logits = tiny(ids)
    for model in (copy.deepcopy(tiny), pickle.loads(pickle.dumps(tiny))):
        assert torch.equal(model(ids), logits) and tie.audit(model).verdict == "tied"
    assert torch.equal(functional_call(tiny, dict(tiny.named_parameters()), (ids,)), logits)
    tokenizer = Tokenizer.characters(["abc"])
    assert copy.deepcopy(tokenizer).encode("cab") == tokenizer.encode("cab")
    tiny.lm_head = torch.nn.Identity()  # a name of another library may be set
    assert isinstance(tiny.lm_head, torch.nn.Identity)


def test_subclasses_of_gpt_suggest_names_too():
    class Mine(GPT):
        pass

    config = GPTConfig(vocab_size=5, n_positions=4, n_embd=8, n_layer=1, n_head=2)
    with pytest.raises(AttributeError, match=r"'Mine' object .*model\.wte\.unembed"):
        Mine(config).lm_head  # noqa: B018
