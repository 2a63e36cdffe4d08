"""Tie, untie and replace the head, in place. Each function returns a report.

    untie(model)                  a head with a copy of W: the same logits, V D more parameters
    tie(model, keep="input")      W predicts again; in any other module: one Parameter, two names
    replace_head(model, module)   any module (..., D) -> (..., V) predicts; with None, W does

Values are copied, compared and reported, never made up. The Parameter `wte.weight` stays the same
object throughout.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn

from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.signatures import checked
from tiedgpt.tie.heads import (
    Unembed,
    find_head_layers,
    find_second_names,
    find_unembeds,
    format_module,
    is_tied,
    predicts_through_wte,
    require_gpt,
    require_logits,
    require_no_gpt_inside,
)
from tiedgpt.tie.ledgers import Ledger, LedgerDifference, ledger
from tiedgpt.tie.modules import open_module, unwrap
from tiedgpt.weights.comparison import Comparison, compare
from tiedgpt.weights.parameters import head_matrix
from tiedgpt.weights.roles import find_roles

Keep = Literal["input", "output", "mean"]
NEW_OPTIMIZER = (
    "an optimizer made before this holds the old parameters: make a new one before the next step"
)


@dataclass(frozen=True, repr=False)
class Report:
    """The state of the head after surgery, and the change."""

    tied: bool
    """Whether W predicts."""
    change: LedgerDifference
    """The parameters before and after."""
    text: str
    """All of it in words, with the call that ties an untied head."""
    input: str = "wte.weight"
    """Name of the matrix that reads."""
    outputs: tuple[str, ...] = ()
    """After `tie`: names of the matrix that predicted."""
    apart: Comparison | None = None
    """After `tie`: the difference of the two matrices; None on the meta device."""

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


@checked
def tie(
    model: nn.Module,
    keep: Keep = "input",
    *,
    input_name: str | None = None,
    output_name: str | None = None,
) -> Report:
    """Make one matrix of the two that read and predict, in place.

    In a `tiedgpt.GPT`, `head` becomes None; if the matrix (V, D) is one layer of a larger head,
    that layer predicts with W from then on. In any other module (a transformers GPT-2 whose
    `lm_head` was replaced) the input's Parameter replaces the output's, so that both names hold
    one object; a bias stays.

    `keep` says whose values stay: the "input"'s, the "output"'s, or their "mean". `input_name`
    and `output_name` name a module or a parameter if the module does not tell. Raises `UserError`
    if there is nothing to tie, if there are several candidates (it lists them), or if shapes,
    dtypes or devices differ.
    """
    if keep not in get_args(Keep):
        raise UserError(
            f"must be one of {', '.join(map(repr, get_args(Keep)))}, got {keep!r}", option="keep"
        )
    require_no_gpt_inside(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    reads, predicts, apart = _find_matrices(model, parameters, input_name, output_name)
    before, matrix, other = ledger(model), parameters[reads], parameters[predicts]
    outputs = tuple(name for name, parameter in parameters.items() if parameter is other)
    with torch.no_grad():  # whether W trains goes with the values
        if keep == "output":
            matrix.copy_(other)
            matrix.requires_grad_(other.requires_grad)
        elif keep == "mean":
            matrix.lerp_(other, 0.5)
            matrix.requires_grad_(matrix.requires_grad or other.requires_grad)
    for name in outputs:
        owner, _, last = name.rpartition(".")
        if isinstance(model, GPT):
            _predict_with_wte(model, owner)
        else:
            setattr(model.get_submodule(owner), last, matrix)
    lines = _report_tie(tuple(matrix.shape), keep, reads, ", ".join(outputs), apart)
    config = getattr(unwrap(model), "config", None)
    if isinstance(model, GPT):
        model.config = dataclasses.replace(model.config, tie_word_embeddings=True)
    elif getattr(config, "tie_word_embeddings", True) is not True:
        config.tie_word_embeddings = True  # type: ignore[union-attr]
        lines.append("config.tie_word_embeddings was False and is True now")
    change = before.difference(ledger(model))
    text = "\n".join([*lines, str(change), NEW_OPTIMIZER])
    return Report(True, change, text, reads, outputs, apart)


def untie(model: GPT) -> Report:
    """Add a head with a copy of W (V, D): the same logits, V D more parameters.

    `model.head` becomes a Linear without bias; inside a larger head the copy replaces W there.
    Raises `UserError` if the head is untied already, or the model is not a `tiedgpt.GPT`.
    """
    model = require_gpt(model)
    if not is_tied(model):
        raise UserError("the model is untied already: its head predicts with a matrix of its own")
    if not predicts_through_wte(model):
        raise UserError(
            f"{find_second_names(model)[0]} is wte.weight under a second name in a head that is no "
            "linear layer",
            hint="give that module a parameter of its own",
        )
    before, parameters = ledger(model), dict(model.named_parameters())
    for name, unembed in find_unembeds(model).items():
        model.set_submodule(name, _copy_matrix(model.wte.weight, unembed.bias))
    if model.head is None:
        model.head = _copy_matrix(model.wte.weight)
    return _report_head(model, before, parameters)


def replace_head(model: GPT, module: nn.Module | None) -> Report:
    """Replace the head by any module (..., D) -> (..., V), or without a module by W.

    The module is called once first; if it does not return V logits, `UserError` is raised and
    nothing changes. A linear layer that holds `wte.weight` itself is tied: alone it becomes
    `model.head = None`; in a larger head it becomes a layer without a separate matrix. The
    report says which parameters came in, and how to tie.
    """
    model = require_gpt(model)
    if module is not None:
        if not isinstance(module, nn.Module) or module in (model, model.wte):
            raise UserError(
                "a head must be a torch.nn.Module of its own, or None to let wte predict; got "
                f"{type(module).__name__}"
            )
        require_logits(model, module)
    before, parameters = ledger(model), dict(model.named_parameters())
    model.head = module
    shared = find_second_names(model)
    for name in find_head_layers(model):
        if f"{name}.weight" in shared:
            _predict_with_wte(model, name)
    return _report_head(model, before, parameters)


# tie, step by step


def _find_matrices(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    input_name: str | None,
    output_name: str | None,
) -> tuple[str, str, Comparison | None]:
    """Return the names of the two matrices to tie, and how far apart they are."""
    gpt = require_gpt(model) if isinstance(model, GPT) else None
    if gpt is not None and predicts_through_wte(gpt):
        raise UserError("tied already: wte.weight reads and predicts")
    roles = find_roles(open_module(model), input_name=input_name, output_name=output_name)
    reads, predicts = roles.input, roles.output or next(iter(roles.aliases), None)
    if gpt is not None and gpt.head is not None:
        named = [tensor and tensor.name.removesuffix(".weight") for tensor in (reads, predicts)]
        if named[0] != "wte" or named[1] not in find_head_layers(gpt):
            raise UserError(
                f"the head ({format_module(gpt.head)}) has no linear layer of that name with a "
                f"matrix {tuple(gpt.wte.weight.shape)}, which wte could be tied to; model.head = "
                "None lets wte predict instead"
            )
    if reads is None or predicts is None:
        raise UserError(
            f"{type(model).__name__} has one matrix over the vocabulary, {roles.matrix.name} "
            f"{roles.matrix.shape}, and no second one",
            hint="there is nothing to tie",
        )
    a, b = parameters[reads.name], parameters[predicts.name]
    if a is b:
        raise UserError(f"tied already: {predicts.name} is the same Parameter as {reads.name}")
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        raise UserError(
            f"{reads.name} {reads.shape} ({reads.dtype}, {a.device}) and {predicts.name} "
            f"{predicts.shape} ({predicts.dtype}, {b.device}) must have the same shape, dtype and "
            "device: resize, convert or replace one of them, then tie"
        )
    return reads.name, predicts.name, compare(reads, predicts)


def _report_tie(
    shape: tuple[int, ...], keep: Keep, reads: str, outputs: str, apart: Comparison | None
) -> list[str]:
    """Return which matrix was removed, and its difference from the remaining one."""
    tied = f"tied: {reads} {shape} reads and predicts; it replaces {outputs}"
    if apart is None:
        return [tied, "the two were not compared: on the meta device they have no values"]
    sources = {"input": f"those of {reads}", "output": f"those of {outputs}", "mean": "the means"}
    return [tied, f"the two {apart}" + ("" if apart.equal else f"; kept are {sources[keep]}")]


def _predict_with_wte(model: GPT, name: str) -> None:
    """Replace a linear layer of the head by an `Unembed` of W."""
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    if head_matrix(layer) is not None and layer is model.head:
        model.head = None
    else:
        model.set_submodule(name, Unembed(model.wte, layer.bias))


def _copy_matrix(matrix: nn.Parameter, bias: nn.Parameter | None = None) -> nn.Linear:
    """Return a Linear with a copy of a matrix (V, D)."""
    linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(matrix.detach().clone(), matrix.requires_grad)
    linear.bias = bias  # type: ignore[assignment]
    return linear


def _report_head(model: GPT, before: Ledger, parameters: dict[str, nn.Parameter]) -> Report:
    """Update the config's claim, and return a report on the head now and before."""
    tied, change = is_tied(model), before.difference(ledger(model))
    model.config = dataclasses.replace(model.config, tie_word_embeddings=tied)
    head = "none: wte predicts" if model.head is None else format_module(model.head)
    lines = [f"head: {head}, scores {model.config.vocab_size:,} tokens", str(change)]
    layers, now = list(find_head_layers(model)), dict(model.named_parameters())
    for name, old in parameters.items():
        if name in now and now[name] is not old:
            lines.append(f"{name} {tuple(now[name].shape)} is another parameter now")
    if tied:
        lines.append("tied: wte.weight reads and predicts")
    else:
        lines.append("NOT tied: wte.weight only reads, the head predicts with its own parameters")
        call = "replace_head(model, None) lets wte predict instead"
        if layers:
            call = "tie(model)" if len(layers) == 1 else f'tie(model, output_name="{layers[0]}")'
            call += f" lets wte.weight take the place of {layers[0]}.weight"
        lines.append(f"to tie it: {call}")
    for name in find_second_names(model)[:1]:
        lines.append(f"{name} is wte.weight under a second name: guard(model) notices a split")
    if {*map(id, now.values())} != {*map(id, parameters.values())}:
        lines.append(NEW_OPTIMIZER)
    return Report(tied, change, "\n".join(lines))
