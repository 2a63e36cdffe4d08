"""Loading, `tie audit`, `tie show`, `tie fix` and surgery agree on every file: a table of formats,
claims and contents, through public functions alone.

A cell is a format, a claim in the file, a claim in the config.json beside it, and what the file
holds: one matrix, two equal ones, two that differ, two views of one storage, one transposed, or
rows that only one side has.
"""

import itertools
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tie.checkpoints import SHAPE, D, V, matrix
from tests.weights.llmc_files import write_checkpoint
from tiedgpt import GPT, GPTConfig
from tiedgpt.cli.main import main
from tiedgpt.errors import CorruptInputError, TiedGPTError
from tiedgpt.tie import audit, fix, ledger, tie, untie
from tiedgpt.weights.decision import RESOLUTION_OF

HEAD_BIAS = "lm_head.bias"
SOUND = {"tied": "tied", "tied, stored twice": "tied", "untied as claimed": "untied"}
"""Verdict -> the loaded form; files of other verdicts need a choice."""
CONTENTS = ("one", "equal", "different", "views", "transposed", "longer head", "longer embedding")
CONFIG = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": V, "n_embd": D,
    "n_positions": SHAPE["n_positions"], "n_layer": SHAPE["n_layer"], "n_head": SHAPE["n_head"],
}  # fmt: skip
GGUF_NAMES = {
    "wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "head": "output",
    "h.": "blk.", "ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
N_HEAD = {"n_head": SHAPE["n_head"], "activation_function": "gelu_new"}
"""Facts missing in nanoGPT's, minGPT's and bare files."""


def state_of(content: str) -> dict[str, Tensor]:
    """Return every weight of a GPT by our names, as (out, in), with W as `content` says."""
    torch.manual_seed(0)
    state = {
        name: t + torch.randn_like(t) / 9
        for name, t in GPT(GPTConfig(**SHAPE)).state_dict().items()
    }
    longer = torch.from_numpy(matrix(7, V + 4))
    w = longer[:V].clone()
    both = {
        "one": (w, None),
        "equal": (w, w.clone()),
        "different": (w, torch.from_numpy(matrix(8))),
        "views": (w, w),
        "transposed": (w, w.T.contiguous()),
        "longer head": (w, longer),
        "longer embedding": (longer, w),
    }[content]
    state["wte.weight"] = both[0]
    return state if both[1] is None else state | {"head.weight": both[1]}


def peer_state(state: dict[str, Tensor], *, turn: bool) -> dict[str, Tensor]:
    """The names of transformers and nanoGPT; transformers' matrices in blocks lie as (in, out)."""
    named = {
        "lm_head.weight" if n == "head.weight" else f"transformer.{n}": t for n, t in state.items()
    }
    turned = re.compile(r".*\.c_\w+\.weight")
    return {n: t.T.contiguous() if turn and turned.fullmatch(n) else t for n, t in named.items()}


def write_gguf(path: Path, state: dict[str, Tensor], claim: bool | None) -> None:
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(SHAPE["n_positions"])
    writer.add_embedding_length(D)
    writer.add_block_count(SHAPE["n_layer"])
    writer.add_head_count(SHAPE["n_head"])
    if claim is not None:
        writer.add_bool("tiedgpt.tie_word_embeddings", claim)
    for name, tensor in state.items():
        for ours, their in GGUF_NAMES.items():
            name = re.sub(rf"(^|(?<=\.)){re.escape(ours)}", their, name)
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(home: Path, layout: str, inside, beside, content: str) -> Path:
    """Write a cell's file and its config.json; return the path a user would type."""
    state = state_of(content)
    config = {} if beside in (None, "none") else {"tie_word_embeddings": beside}
    path = home
    match layout:
        case "safetensors":
            save_file(peer_state(state, turn=True), home / "model.safetensors", {"format": "pt"})
            config |= CONFIG
        case "torch":
            torch.save(peer_state(state, turn=True), home / "pytorch_model.bin")
            config |= CONFIG
        case "nanoGPT":
            args = {k: SHAPE[k] for k in ("n_layer", "n_head", "n_embd", "vocab_size")}
            args |= {"block_size": SHAPE["n_positions"], "bias": True, "dropout": 0.0}
            path = home / "ckpt.pt"
            torch.save({"model": peer_state(state, turn=False), "model_args": args}, path)
        case "minGPT":
            n = SHAPE["n_positions"]
            mask = {f"h.{i}.attn.bias": torch.ones(n, n).tril()[None, None] for i in range(2)}
            path = home / "model.pt"
            torch.save(peer_state(state | mask, turn=False), path)
        case "tiedgpt":
            path = home / "state.pt"
            torch.save(state, path)
        case "GGUF":
            path = home / "model.gguf"
            write_gguf(path, state, inside)
        case "llm.c":
            sizes = {"T": SHAPE["n_positions"], "V": V, "L": 2, "H": 4, "C": D, "Vp": 128}
            path = home / "model.bin"
            write_checkpoint(path, 3, state, **sizes)
            config |= CONFIG
        case "ONNX" | "packed":
            directory = home / "plain"
            directory.mkdir()
            untied = {"tie_word_embeddings": inside}
            (directory / "config.json").write_text(json.dumps(CONFIG | untied))
            save_file(
                peer_state(state, turn=True), directory / "model.safetensors", {"format": "pt"}
            )
            path = home / ("model.onnx" if layout == "ONNX" else "packed")
            options = ["--to", layout.lower(), "--precision", "fp32"]
            assert main(["convert", str(directory), str(path), *options]) == 0
    if beside != "none":
        (home / "config.json").write_text(json.dumps(config))
    return path


def cells() -> list[tuple]:
    """format, claim in the file, claim beside it ("none": no config.json), content."""
    two = [content for content in CONTENTS if content != "views"]
    table = [("safetensors", None, claim, c) for claim in (None, True, False) for c in two]
    table += [("torch", None, claim, c) for claim in (None, True, False) for c in CONTENTS]
    for layout in ("nanoGPT", "minGPT", "tiedgpt"):
        table += [(layout, None, claim, c) for claim in ("none", True, False) for c in CONTENTS]
    claims = itertools.product((None, True, False), ("none", True, False))
    table += [("GGUF", *pair, content) for pair in claims for content in two]
    table += [("llm.c", None, claim, "one") for claim in ("none", None, True, False)]
    written = ((True, "one"), (False, "equal"), (False, "different"))
    table += [
        ("ONNX", c, beside, content) for c, content in written for beside in ("none", True, False)
    ]
    table += [("packed", c, "none", content) for c, content in written]
    return table


def expected(layout: str, inside: bool | None, beside: bool | str | None, content: str) -> str:
    """The verdict: the file's claim, else the config's, else the format's."""
    claim = beside if inside is None and beside != "none" else inside
    if layout in ("minGPT", "tiedgpt") and content in ("equal", "different") and claim is None:
        claim = False  # two matrices are meant to be two
    if content in ("transposed", "longer head", "longer embedding"):
        return "broken"
    if claim is False:
        return "contradicts the claim" if content == "one" else "untied as claimed"
    if content == "different":
        return "untied as claimed" if layout == "GGUF" and claim is None else "broken"
    return "tied, stored twice" if content == "equal" else "tied"


def attempt(function, *arguments, **options):
    """Return the function's result, or the error of ours that it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return function(*arguments, **options)
        except TiedGPTError as error:
            return error


def kind(loaded) -> str:
    """Return the result of loading: "tied", "untied" or "error"."""
    if isinstance(loaded, TiedGPTError):
        return "error"
    return "tied" if loaded.head is None else "untied"


def disagreements(home: Path, cell: tuple, capsys) -> Iterator[str]:
    """Yield each disagreement of the commands about a cell's file."""
    layout, _, _, content = cell
    (home / "in").mkdir()
    path = write(home / "in", *cell)
    fill_in = N_HEAD if layout in ("minGPT", "tiedgpt") else {}
    found, counted, loaded = (
        audit(path),
        ledger(path),
        attempt(GPT.from_pretrained, path, **fill_in),
    )
    if found.verdict != expected(*cell):
        yield f"audit: {found.verdict}, expected: {expected(*cell)}"
    if kind(loaded) != SOUND.get(found.verdict, "error"):
        yield f"load: {kind(loaded)}, audit: {found.verdict}"
    if content == "different" and found.verdict == "broken":
        if str(found.comparison) not in str(loaded):  # rows, largest difference, cosine
            yield f"load: {loaded}, audit: {found.comparison}"
    if found.verdict == "contradicts the claim":
        resolved = attempt(GPT.from_pretrained, path, resolve="tie", **fill_in)
        if kind(resolved) != "tied" or not torch.equal(
            resolved.wte.weight, state_of(content)["wte.weight"]
        ):
            yield f"load(resolve='tie'): {resolved}"
    does_both = found.verdict == "tied" and content == "one"
    if (counted.reads_and_predicts is not None) != does_both:
        yield f"ledger: {counted.reads_and_predicts}, audit: {found.verdict}"
    if kind(loaded) != "error" and found.verdict != "tied, stored twice":
        once_in_the_file = V * D if (content, kind(loaded)) == ("views", "untied") else 0
        if counted.total + once_in_the_file != sum(p.numel() for p in loaded.parameters()):
            yield f"ledger: {counted.total} parameters, not those that are loaded"
    if kind(loaded) != "error":
        operation, verdict = (untie, "untied as claimed") if loaded.head is None else (tie, "tied")
        operation(loaded)
        if audit(loaded).verdict != verdict:
            yield f"{operation.__name__}: {audit(loaded).verdict}, expected: {verdict}"
    capsys.readouterr()
    main(["tie", "show", str(path), "--format", "json"])
    if json.loads(capsys.readouterr().out) != json.loads(json.dumps(counted.as_dict())):
        yield "tie show prints something other than the ledger"
    if found.exit_code == 0 and found.verdict != "tied, stored twice":
        if "nothing to mend" not in str(attempt(fix, path, home / "no")):
            yield "fix does not refuse what is sound"
        return
    for keep in choices(found, loaded):
        yield from wrongs(home, path, keep, fill_in, content)
    if None not in choices(found, loaded) and "keep" not in str(attempt(fix, path, home / "no")):
        yield "fix chose by itself"


def choices(found, loaded) -> list[str | None]:
    """The values of --keep that the audit names; the error of loading names the same."""
    command = found.explain.splitlines()[-1]
    if found.exit_code:
        assert command.startswith("tiedgpt tie fix ")
        assert command in str(loaded) or 'resolve="tie"' in str(loaded)
    return re.findall(r"(?:with|or) --keep (\w+)", found.explain) or [None]


def wrongs(home: Path, path: Path, keep: str | None, fill_in: dict, content: str) -> Iterator[str]:
    """Yield each defect of the copy written by `fix`: it must load with its weights."""
    copy, repair = home / f"fixed {keep}", attempt(fix, path, home / f"fixed {keep}", keep=keep)
    if isinstance(repair, TiedGPTError):
        yield f"fix --keep {keep}: {repair}"
        return
    mended = attempt(GPT.from_pretrained, copy, **fill_in)
    verdict = audit(copy).verdict
    if verdict != repair.after.verdict or kind(mended) != SOUND.get(verdict):
        yield f"fix --keep {keep}: {repair.after.verdict}, {verdict}, loads as {kind(mended)}"
        return
    state = state_of(content)
    reads, head = state["wte.weight"], state.pop("head.weight", state["wte.weight"])
    head = head.T if content == "transposed" else head
    state["wte.weight"] = head if keep == "output" else reads
    if kind(mended) == "untied":
        state["head.weight"] = head
    models = {f"fix --keep {keep}": mended}
    if keep is not None:
        resolve = RESOLUTION_OF[keep]
        resolved = attempt(GPT.from_pretrained, path, resolve=resolve, **fill_in)
        models[f"load(resolve={resolve!r})"] = resolved
    for name, model in models.items():
        if kind(model) != kind(mended) or len(model.wte.weight) < V:
            yield f"{name}: {model}"
        elif not all(torch.equal(x, state[n][: len(x)]) for n, x in model.state_dict().items()):
            yield f"{name}: other weights"


@pytest.mark.parametrize("cell", cells(), ids=lambda cell: "-".join(map(str, cell)))
def test_all_commands_agree_on_a_file(tmp_path, cell, capsys):
    assert list(disagreements(tmp_path, cell, capsys)) == []


REFUSED = {
    "a bias of the head": (lambda state: state.update({HEAD_BIAS: torch.zeros(V)}), {}),
    "a missing layer": (lambda state: state.pop("transformer.h.1.ln_1.weight"), {}),
    "an unknown tensor": (lambda state: state.update({"transformer.x": torch.zeros(2)}), {}),
    "positions of another width": (
        lambda state: state.update({"transformer.wpe.weight": torch.zeros(24, D + 1)}), {}
    ),
    "more layers in the config": (lambda state: None, {"n_layer": 3}),
    "another width in the config": (lambda state: None, {"n_embd": 2 * D}),
}  # fmt: skip
"""Changes of a tied, stored twice GPT-2 to its tensors, and to its config."""


@pytest.mark.parametrize("name", REFUSED)
def test_audit_reports_a_gpt_that_loading_refuses(tmp_path, name, capsys):
    change, values = REFUSED[name]
    write(tmp_path, "safetensors", None, None, "equal")
    state = load_file(tmp_path / "model.safetensors")
    change(state)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | values))
    with pytest.raises(CorruptInputError) as refused:
        GPT.from_pretrained(tmp_path)
    report = audit(tmp_path)
    assert (report.verdict, report.exit_code) == ("tied, stored twice", 6)
    assert report.load_error == str(refused.value)
    assert main(["tie", "audit", str(tmp_path)]) == 6
    assert "does not load" in capsys.readouterr().out


def test_the_table_has_its_size():
    assert len(cells()) >= 120
