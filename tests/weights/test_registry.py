"""A format that is registered from outside is known everywhere; all formats keep their promises."""

import json
import runpy
import zipfile
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from tests.docs.conftest import ROOT
from tests.tie.checkpoints import converted_cells
from tests.tie.test_table import disagreements
from tiedgpt import GPT, GPTConfig
from tiedgpt.cli.main import main
from tiedgpt.errors import UserError
from tiedgpt.tie import audit, ledger
from tiedgpt.weights.checkpoint import Checkpoint, Format, GPTCheckpoint, Program, Writer, claim_in
from tiedgpt.weights.parameters import parameters_for
from tiedgpt.weights.registry import formats, register, unregister
from tiedgpt.weights.tensors import tensor_in_file
from tiedgpt.weights.torch_file import stored_tensor

MAGIC = b"TOY1"


FIELDS = ("norm", "attention_windows", "tie_word_embeddings")

# A line of JSON after the magic: the config, and names with shapes; then the numbers in fp32.


def open_toy(file):
    path, stream = file.path, file.stream()
    header, at, tensors = json.loads(stream.readline()[len(MAGIC) :]), stream.tell(), {}
    for name, shape in header["shapes"].items():
        tensors[name] = tensor_in_file(file, name, tuple(shape), "float32", at)
        at = tensors[name].storage.stop
    claim = claim_in(header["config"], path)
    return Checkpoint(path, "toy", tensors, header["config"], claim, files=(path,))


def toy_to_gpt(checkpoint):
    return GPTCheckpoint("toy", dict(checkpoint.config), dict(checkpoint.tensors))


def write_toy(model, path, *, precision, **_):
    parameters = parameters_for(WRITER.program, model)
    shapes = {name: list(parameter.shape) for name, parameter in parameters.items()}
    header = json.dumps({"config": asdict(model.config), "shapes": shapes}).encode()
    numbers = [np.float32(p.detach().numpy()).tobytes() for p in parameters.values()]
    path.write_bytes(MAGIC + header + b"\n" + b"".join(numbers))


WRITER = Writer(
    write=write_toy, program=Program("toy", FIELDS), precisions=("fp32",), suffix=".toy"
)
TOY = Format(
    name="toy", title="Toy", about="a line of JSON", detect=lambda file: file.head[:4] == MAGIC,
    open=open_toy, to_gpt=toy_to_gpt, suffixes=(".toy",), hub_patterns=(("*.toy",),),
    writer=WRITER, packages=("a_package_that_nobody_has",),
)  # fmt: skip

# The same in the members of a zip file, which begins as torch's do.


def open_zipped(file):
    with zipfile.ZipFile(file.stream()) as members:
        header = json.loads(members.read("toy.json"))
        numbers = {n: np.frombuffer(members.read(n), np.float32) for n in header["shapes"]}
    tensors = {
        name: stored_tensor(name, torch.tensor(numbers[name]).view(shape))
        for name, shape in header["shapes"].items()
    }
    claim = claim_in(header["config"], file.path)
    return Checkpoint(file.path, "zip", tensors, header["config"], claim, files=(file.path,))


def write_zipped(model, path, *, precision, **_):
    parameters = parameters_for(WRITER.program, model)
    shapes = {name: list(parameter.shape) for name, parameter in parameters.items()}
    with zipfile.ZipFile(path, "w") as members:
        header = {"config": asdict(model.config), "shapes": shapes}
        members.writestr("toy.json", json.dumps(header))
        for name, parameter in parameters.items():
            members.writestr(name, np.float32(parameter.detach().numpy()).tobytes())


ZIPPED = replace(
    TOY, name="zipped", title="Zipped", detect=lambda file: "toy.json" in file.members,
    open=open_zipped, writer=replace(WRITER, write=write_zipped),
)  # fmt: skip


@pytest.fixture
def toy():
    register(TOY)
    yield TOY
    unregister("toy")


@pytest.fixture(params=[TOY, ZIPPED], ids=lambda format: format.name)
def added(request):
    register(request.param)
    yield request.param
    unregister(request.param.name)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request):
    sizes = {"vocab_size": 97, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return GPT(GPTConfig(**sizes, tie_word_embeddings=request.param)).eval()


def test_a_new_format_loads_and_saves_and_keeps_the_tie(added, model, tmp_path, capsys):
    model.save_pretrained(tmp_path / "hf")
    toy_file, back = tmp_path / "model.toy", tmp_path / "back.onnx"
    main(["convert", str(tmp_path / "hf"), str(toy_file)])
    loaded = GPT.from_pretrained(toy_file)
    parameters = dict(loaded.named_parameters())
    for name, parameter in model.named_parameters():
        assert (parameters.pop(name) == parameter).all()
    assert not parameters and loaded.config == model.config
    is_tied = model.config.tie_word_embeddings
    report = audit(toy_file)
    container = "toy" if added is TOY else "zip"
    assert (report.format, report.verdict) == (
        container,
        "tied" if is_tied else "untied as claimed",
    )
    assert ledger(toy_file).total == ledger(model).total
    main(["tie", "audit", str(toy_file)])
    assert str(toy_file) in capsys.readouterr().out
    if is_tied:
        main(["convert", str(toy_file), str(back)])
        assert (GPT.from_pretrained(back).wte.weight == model.wte.weight).all()
    (tmp_path / "folder").mkdir()
    toy_file.rename(tmp_path / "folder" / "any.toy")
    assert (GPT.from_pretrained(tmp_path / "folder").wte.weight == model.wte.weight).all()


def test_all_commands_agree_on_a_new_format(added, tmp_path, capsys):
    for number, cell in enumerate(converted_cells(added.name)):
        (tmp_path / str(number)).mkdir()
        assert list(disagreements(tmp_path / str(number), cell, capsys)) == []


def test_doctor_help_and_the_page_show_a_new_format(toy, capsys):
    main(["doctor", "--format", "json"])
    use = json.loads(capsys.readouterr().out)["formats"]["Toy"]
    assert use.startswith("read and written") and "a_package_that_nobody_has" in use
    with pytest.raises(SystemExit):
        main(["convert", "--help"])
    assert "|toy" in capsys.readouterr().out
    page = runpy.run_path(str(ROOT / "docs" / "generate.py"))["PAGES"]["formats.md"]()
    assert "| Toy | a line of JSON |" in page and "| toy | fp32 | yes | yes | yes | no |" in page


def test_format_names_are_unique():
    with pytest.raises(UserError, match="'gguf'"):
        register(Format(**vars(TOY) | {"name": "gguf"}))
    assert [format.name for format in formats()].count("gguf") == 1


@pytest.mark.parametrize("name", ["out.ggfu", "out.gguff", "out.onx", "out.ptt", "out.txt"])
def test_an_unknown_suffix_is_refused_with_the_known_ones(name, saved, tmp_path, capsys):
    assert main(["convert", str(saved), str(tmp_path / name)]) == 1
    message = " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / name).exists()
    assert all(suffix in message for suffix in (".gguf", ".onnx", ".pt", "--to"))
    suggestions = {"out.ggfu": "out.gguf", "out.gguff": "out.gguf", "out.onx": "out.onnx"}
    assert f"did you mean {suggestions.get(name, 'out.pt')}?" in message or name == "out.txt"


def test_a_directory_may_have_a_dot_in_its_name(saved, tmp_path):
    main(["convert", str(saved), str(tmp_path / "model-v1.5")])
    main(["convert", str(saved), str(tmp_path / "model.small"), "--to", "transformers"])
    for name in ("model-v1.5", "model.small"):
        assert (tmp_path / name / "model.safetensors").is_file()


def test_only_a_formats_own_file_names_it():
    """Outside `weights/formats/` and the registry's order nothing is compared with a format."""
    names = [format.name for format in formats()] + [format.title for format in formats()]
    source = ROOT / "src" / "tiedgpt"
    comparisons = []
    for path in source.rglob("*.py"):
        relative = path.relative_to(source).as_posix()
        if relative.startswith("weights/formats/") or relative == "weights/registry.py":
            continue
        for line in path.read_text().splitlines():
            compared = any(f'{sign} "{name}"' in line for sign in ("==", "!=") for name in names)
            if compared or ".format in (" in line or ".container in (" in line:
                comparisons.append(f"{relative}: {line.strip()}")
    assert not comparisons
