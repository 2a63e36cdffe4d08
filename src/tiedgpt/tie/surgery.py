"""Tie, untie and replace what predicts, in place; each returns a report of what it did.

    untie(model)                  a head of its own, a copy of W: the same logits, V D more numbers
    tie(model, keep="input")      W predicts again; of any other module: one Parameter, two names
    replace_head(model, module)   any module (..., D) -> (..., V) predicts; with None, W does

Values are copied, compared and reported, never made up. The Parameter `wte.weight` stays the same
object throughout.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from tiedgpt.core.model import GPT, plain_matrix
from tiedgpt.errors import UserError
from tiedgpt.tie.heads import (
    Unembed,
    aliases,
    describe,
    is_tied,
    matrices,
    n_scored,
    put,
    require_gpt,
    unembeds,
)
from tiedgpt.tie.reports import REMAKE_OPTIMIZER, Change, HeadReport, TieReport
from tiedgpt.tie.sharing import Keep, merge, require_keep, share
from tiedgpt.tie.storages import named
from tiedgpt.tie.vocabulary import add_tokens, prune, resize_vocab

__all__ = ["add_tokens", "prune", "replace_head", "resize_vocab", "tie", "untie"]


def untie(model: GPT) -> HeadReport:
    """Give the model a head of its own, a copy of W (V, D): the same logits, V D more numbers.

    `model.head` becomes a Linear without bias; inside a larger head W is replaced by its copy
    there. Raises `UserError` if the head has its own matrix already, or the model is not ours.
    """
    model = require_gpt(model)
    if not is_tied(model):
        raise UserError("the model is untied already: its head predicts with a matrix of its own")
    if model.head is not None and not unembeds(model):
        raise UserError(
            f"{aliases(model.head, model)[0]} is wte.weight under a second name in a head that is "
            "no linear layer; give that module a parameter of its own"
        )
    before = named(model)
    for name in unembeds(model) or ["head"]:
        face = model.head if model.head is None else model.get_submodule(name)
        bias = face.bias if isinstance(face, Unembed) else None
        put(model, name, _linear(model.wte.weight.detach().clone(), model.wte.weight, bias))
    _set_tied(model, False)
    return _head_report(model, Change.since(before, model))


def tie(
    model: nn.Module,
    keep: Keep = "input",
    *,
    input_name: str | None = None,
    output_name: str | None = None,
) -> TieReport:
    """Make one matrix of the two that read and predict, in place.

    Of our GPT: `head` becomes None, or, where the (V, D) matrix is one layer of a larger head,
    that layer predicts with W from then on. Of any other module (a transformers GPT-2 whose
    `lm_head` was replaced by a Linear, or by a Sequential that holds one): the input's Parameter
    takes the place of the output's, so that both names hold one object; a bias stays.

    `keep` says whose values are left: the "input"'s, the "output"'s, or their "mean". `input_name`
    and `output_name` name a module or a parameter where the module does not tell. Raises
    `UserError` where there is nothing to tie, where there are several candidates (it lists them),
    or where shapes, dtypes or devices differ.
    """
    require_keep(keep)
    if not isinstance(model, GPT):
        return share(model, keep, input_name=input_name, output_name=output_name)
    if input_name not in (None, "wte", "wte.weight"):
        raise UserError(f"input_name={input_name!r}: in a tiedgpt.GPT, wte reads")
    model = require_gpt(model)
    if model.head is None or unembeds(model):
        raise UserError("the model is tied already: wte.weight reads and predicts")
    name, layer = _own_matrix(model, model.head, output_name)
    before = named(model)
    apart = merge(model.wte.weight, layer.weight, keep, names=("wte.weight", f"{name}.weight"))
    if plain_matrix(model.head) is not None:
        model.head = None
    else:
        put(model, name, Unembed(model.wte, layer.bias))
    _set_tied(model, True)
    notes = [REMAKE_OPTIMIZER]
    if model.head is not None:
        notes.append(
            f"{name} keeps its place in the head and predicts with W; transformers' files have no "
            "place for such a head"
        )
    return TieReport(
        input="wte.weight",
        outputs=(f"{name}.weight",),
        shape=tuple(model.wte.weight.shape),
        keep=keep,
        apart=apart,
        change=Change.since(before, model),
        notes=tuple(notes),
    )


def replace_head(model: GPT, module: nn.Module | None) -> HeadReport:
    """Let any module (..., D) -> (..., V) predict, or with None W; say what that does to the tie.

    The module is tried on one row first; what cannot score the vocabulary raises `UserError` and
    changes nothing. A module whose linear layer holds `wte.weight` itself is tied: alone it
    becomes `model.head = None`; within a larger head that layer is replaced by one without a
    matrix of its own. The report says which parameters came in, and how to tie.
    """
    model = require_gpt(model)
    if module is not None:
        _require_module(module)
        if module is model or module is model.wte:
            raise UserError("the model's own parts are no head; with None instead, wte predicts")
        size, scored = model.wte.weight.shape[0], n_scored(model, module)
        if scored != size:
            raise UserError(
                f"{describe(module)} scores {scored:,} tokens and the vocabulary has {size:,}: "
                f"use a head of {size:,}, or resize_vocab(model, {scored}) first"
            )
    before = named(model)
    model.head = module
    for name, layer in matrices(module, model).items():
        if f"{name}.weight" in aliases(module, model):
            if module is not None and plain_matrix(module) is not None:
                model.head = None
            else:
                put(model, name, Unembed(model.wte, layer.bias))
    _set_tied(model, is_tied(model))
    return _head_report(model, Change.since(before, model))


def _own_matrix(model: GPT, head: nn.Module, output: str | None) -> tuple[str, nn.Linear]:
    """Return the one layer D -> V of the head, or the one that was asked for, by name."""
    found = matrices(head, model)
    if output is not None:
        name = output.removesuffix(".weight")
        if name not in found:
            raise UserError(
                f"output_name={output!r} is no linear layer D -> V of the head; "
                f"there {_there_are(list(found))}"
            )
        return name, found[name]
    if len(found) == 1:
        return next(iter(found.items()))
    size = tuple(model.wte.weight.shape)
    if found:
        raise UserError(
            f"{len(found)} layers of the head have a matrix {size}: choose with "
            f"output_name={' or '.join(map(repr, found))}"
        )
    raise UserError(
        f"the head ({describe(head)}) has no linear layer with a matrix {size}, which alone can "
        "be wte.weight; set model.head = None to let wte predict instead"
    )


def _there_are(names: list[str]) -> str:
    return f"are {', '.join(names)}" if names else "is none"


def _require_module(head: object) -> None:
    if not isinstance(head, nn.Module):
        raise UserError(
            f"a head is a torch.nn.Module, or None for wte to predict, not {type(head).__name__}"
        )


def _linear(matrix: Tensor, like: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    """Return a Linear over a matrix (V, D) that already exists."""
    size, width = matrix.shape
    with torch.device("meta"):
        linear = nn.Linear(width, size, bias=False)
    linear.weight = nn.Parameter(matrix, requires_grad=like.requires_grad)
    if bias is not None:
        linear.bias = bias
    return linear


def _set_tied(model: GPT, tied: bool) -> None:
    model.config = dataclasses.replace(model.config, tie_word_embeddings=tied)


def _head_report(model: GPT, change: Change) -> HeadReport:
    notes = [REMAKE_OPTIMIZER]
    if model.head is not None and (second := aliases(model.head, model)):
        notes.append(
            f"{second[0]} is wte.weight under a second name: what replaces one of them "
            "(to_empty, load_state_dict(assign=True)) unties them; guard(model) notices"
        )
    return HeadReport(
        head="none: wte predicts" if model.head is None else describe(model.head),
        n_outputs=model.wte.weight.shape[0],
        tied=is_tied(model),
        change=change,
        how_to_tie="" if is_tied(model) else _how_to_tie(model),
        notes=tuple(notes),
    )


def _how_to_tie(model: GPT) -> str:
    """Say which call lets W predict again, for the head that the model has."""
    found = matrices(model.head, model)
    if model.head is None or not found:
        return (
            f"no layer of this head has a matrix {tuple(model.wte.weight.shape)}, so nothing in it "
            "can be wte.weight; replace_head(model, None) lets wte predict instead"
        )
    name = next(iter(found))
    call = "tie(model)" if len(found) == 1 else f'tie(model, output_name="{name}")'
    rest = "" if plain_matrix(model.head) is not None else ", the rest of the head stays"
    return (
        f"to tie it: {call} lets wte.weight take the place of {name}.weight{rest}; "
        'keep="output" keeps the values of the head'
    )
