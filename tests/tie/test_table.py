"""Loading, `tie audit`, `tie show`, `tie fix` and surgery agree on every file.

The table has formats, claims and contents; only public functions are called.

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

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.tie.checkpoints import (
    LAYOUTS,
    N_HEAD,
    D,
    V,
    converted_cells,
    differs_in_transformers,
    digest,
    gpt_state,
    write_layout,
)
from tiedgpt import GPT
from tiedgpt.cli.main import main
from tiedgpt.errors import TiedGPTError
from tiedgpt.tie import audit, fix, ledger, tie, untie
from tiedgpt.weights.decision import RESOLUTION_OF
from tiedgpt.weights.registry import formats, writers

SOUND = {"tied": "tied", "tied, stored twice": "tied", "untied as claimed": "untied"}
"""Verdict -> the loaded form; files of other verdicts need a choice."""
CONTENTS = ("one", "equal", "different", "views", "transposed", "longer head", "longer embedding")
ONE = ("one", "only a head")


def cells() -> list[tuple]:
    """Return the cells: format, claim in the file, claim in config.json, content."""
    two = [content for content in CONTENTS if content != "views"]
    table = [
        (layout, None, claim, content)
        for layout, contents in (("safetensors", two), ("torch", CONTENTS))
        for claim in (None, True, False)
        for content in (*contents, "only a head")
    ]
    for layout in ("nanoGPT", "minGPT", "tiedgpt"):
        table += [(layout, None, claim, c) for claim in ("none", True, False) for c in CONTENTS]
    claims = itertools.product((None, True, False), ("none", True, False))
    table += [("GGUF", *pair, content) for pair in claims for content in two]
    table += [("llm.c", None, claim, "one") for claim in ("none", None, True, False)]
    for name in writers().keys() - LAYOUTS.values():
        table += converted_cells(name)
    return sorted(table, key=str)


def expected(layout: str, inside: bool | None, beside: bool | str | None, content: str) -> str:
    """The verdict: the file's claim, else the config's, else the format's."""
    claim = beside if inside is None and beside != "none" else inside
    if layout in ("minGPT", "tiedgpt") and content in ("equal", "different") and claim is None:
        claim = False  # two matrices are meant to be two
    if content in ("transposed", "longer head", "longer embedding"):
        return "broken"
    if claim is False:
        return "contradicts the claim" if content in ONE else "untied as claimed"
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
    path = write_layout(home / "in", layout, gpt_state(content), *cell[1:3])
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
            resolved.wte.weight, matrices_of(gpt_state(content))[0]
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
    is_wasteful = found.verdict == "tied, stored twice" or content == "only a head"
    if found.exit_code == 0 and not is_wasteful:
        refusal, has_two = str(attempt(fix, path, home / "no")), found.verdict != "tied"
        if "nothing to mend" not in refusal or has_two != ("--keep input" in refusal):
            yield f"fix of what is sound: {refusal}"
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


def matrices_of(state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the matrix that reads and the matrix that predicts; they may be the same."""
    reads, head = state.get("wte.weight"), state.get("head.weight")
    return head if reads is None else reads, reads if head is None else head


def wrongs(home: Path, path: Path, keep: str | None, fill_in: dict, content: str) -> Iterator[str]:
    """Yield each defect of the copy written by `fix`: it must load with its weights."""
    copy, before = home / f"fixed {keep}", digest(home / "in")
    repair = attempt(fix, path, copy, keep=keep)
    if isinstance(repair, TiedGPTError):
        yield f"fix --keep {keep}: {repair}"
        return
    claim = json.loads((copy / "config.json").read_text())["tie_word_embeddings"]
    says = f"config.json now says tie_word_embeddings: {str(claim).lower()}"
    if (says in repair.actions) != (claim == (repair.before.claim is False)):
        yield f"fix says {repair.actions}, and the claim was {repair.before.claim}"
    if str(repair) != repair.explain or not all(text in str(repair) for text in repair.actions):
        yield f"fix says {repair}"
    if digest(home / "in") != before or list(home.glob(".*")):
        yield "fix changed its source or left files behind"
    mended = attempt(GPT.from_pretrained, copy, **fill_in)
    verdict = audit(copy).verdict
    if verdict != repair.after.verdict or kind(mended) != SOUND.get(verdict):
        yield f"fix --keep {keep}: {repair.after.verdict}, {verdict}, loads as {kind(mended)}"
        return
    heads = {"lm_head.weight", "head.weight"} & load_file(copy / "model.safetensors").keys()
    if bool(heads) == (kind(mended) == "tied"):
        yield "the copy of a tied model holds a head, or that of an untied one none"
    if differs_in_transformers(copy, mended):
        yield "transformers computes other logits"
    state = gpt_state(content)
    reads, head = matrices_of(state)
    state.pop("head.weight", None)
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


def test_every_format_is_in_the_table():
    names = {LAYOUTS.get(layout, layout) for layout, *_ in cells()}
    assert {format.name for format in formats()} - names == {"openai_gpt2"}  # one file, in fixtures


@pytest.mark.parametrize("cell", cells(), ids=lambda cell: "-".join(map(str, cell)))
def test_all_commands_agree_on_a_file(tmp_path, cell, capsys):
    assert list(disagreements(tmp_path, cell, capsys)) == []
