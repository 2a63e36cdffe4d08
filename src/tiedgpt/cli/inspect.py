"""`tiedgpt inspect NAME [MODEL]`: what a model predicts, layer by layer and row by row."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from tiedgpt.cli.console import fact, waiting
from tiedgpt.cli.options import Positional, parse
from tiedgpt.cli.source import ModelOptions, read_text, source_or_newest
from tiedgpt.errors import UserError
from tiedgpt.files import replacing
from tiedgpt.plots.figure import require_figures
from tiedgpt.plots.table import aligned, visible
from tiedgpt.tie.findings import megabytes

if TYPE_CHECKING:
    from tiedgpt.inspect.gradients import GradientSplit
    from tiedgpt.inspect.layers import Ablation, AttentionMaps, Lens
    from tiedgpt.inspect.predictions import Dot, Positions
    from tiedgpt.inspect.rows import Vocabulary

ABOUT = """Look inside a GPT.

positions: the prediction after each token. lens: the prediction of each layer. dot: logits as dot
products. vocabulary: the rows of W. gradient-split: the gradient of W from reading and from
predicting. attention: where the heads of a layer attend. ablate: the loss without each part.

  tiedgpt inspect --html page.html runs/my-1 --text "Once upon a time"

writes all views to a page that needs no server."""
WORD = 12
"""Columns of a token in a table."""
SHOWN = 10
"""Rows of a table of tokens, unless --top asks for more."""

Name = Literal[
    "positions", "lens", "dot", "vocabulary", "gradient-split", "attention", "ablate", "page"
]


@dataclass(frozen=True, kw_only=True)
class Arguments(ModelOptions):
    """Options of `inspect`; some are of one NAME alone."""

    name: Positional[Name]
    """What to show; --html alone means page."""
    source: Positional[str | None] = None
    """A run, a model's directory or file, or a hub name; default: the newest run in runs/."""
    text: str | None = None
    """The text to read; - reads standard input. All but vocabulary need it, or --ids."""
    ids: tuple[int, ...] = ()
    """Token ids instead of the text, such as --ids 464 3280 318."""
    format: Literal["human", "json"] = "human"
    """json: one object, columns as lists."""
    html: Path | None = None
    """Write the page with all views to this file; it opens in a browser, without a server."""
    plot: Path | None = None
    """Also write a figure: .png, .svg or .pdf (pip install 'tiedgpt[plot]')."""
    top: int | None = None
    """positions, lens, dot: tokens to list; vocabulary, gradient-split: rows to show."""
    position: int | None = None
    """lens, dot: the position to show; default: the last."""
    poke: int | None = None
    """positions: change the token at this position, and show which predictions change."""
    poke_with: int | None = None
    """positions: the new id of that token; default: the next id."""
    after_attention: bool = False
    """lens: also show the states between attention and MLP."""
    layer: int | None = None
    """attention: the layer; -1 is the last; default: 0."""
    mode: Literal["zero", "mean"] | None = None
    """ablate: replace a part's output by zero or by its mean over the text; default: zero."""
    counts: str | None = None
    """vocabulary: a run, a folder of token shards or a text in which to count tokens; default:
    MODEL, if it is a run."""
    own_rank_rows: int | None = None
    """vocabulary: number of rows to test as predictions of themselves; default: 1,024."""


SPECIAL = ("top", "position", "poke", "poke_with", "after_attention", "layer", "mode", "counts",
           "own_rank_rows")  # fmt: skip
"""Options of some names alone, which their functions take."""


def run(arguments: list[str]) -> None:
    """Inspect."""
    is_named = arguments and arguments[0].replace("_", "-") in get_args(Name)
    if not is_named and any(one.split("=")[0] == "--html" for one in arguments):
        arguments = ["page", *arguments]
    given = parse(Arguments, "inspect", arguments, ABOUT)
    if given.name == "page":
        _page(given)
        return
    result = _inspect(given)
    if given.plot is not None:
        from tiedgpt.cli.inspect_figures import draw

        draw(given.name, result, given.plot)
    if given.format == "json":
        print(result.to_json())
        return
    SHOW[given.name](result, given.top or SHOWN)
    if given.plot is not None:
        fact("written", str(given.plot))


def _inspect(given: Arguments) -> Any:
    """Call the function of this name with its own options."""
    function = getattr(import_module("tiedgpt.inspect"), given.name.replace("-", "_"))
    options = {name: getattr(given, name) for name in SPECIAL}
    options = {name: x for name, x in options.items() if x is not None and x is not False}
    if given.name in ("vocabulary", "gradient-split"):  # --top is of the table alone
        options.pop("top", None)
    if given.html is not None:
        options["html"] = given.html
    for name in options.keys() - signature(function).parameters.keys():
        raise UserError(
            f"--{name.replace('_', '-')} is not for inspect {given.name}", hint="leave it out"
        )
    if given.top is not None and given.top < 1:
        raise UserError(f"--top must be at least 1, got {given.top}")
    if given.plot is not None:
        require_figures(given.plot)
    if given.name != "vocabulary":
        options["text"] = _text(given)
    elif given.text is not None or given.ids:
        raise UserError("--text and --ids are not for inspect vocabulary", hint="leave them out")
    if given.name == "ablate":
        options["progress"] = _progress
    source = source_or_newest(given.source)
    with waiting(f"computing {given.name} of {source}"):
        model, tokenizer = _model(given, source)
        return function(model, tokenizer, **options)


def _text(given: Arguments) -> Any:
    """Return the text, or the ids; `UserError` unless it is one of them."""
    if (given.text is None) == (not given.ids):
        name = "--html page.html" if given.name == "page" else given.name
        example = f'tiedgpt inspect {name} --text "Once upon a time"'
        raise UserError("the model must read one text", hint=f"give --text, or --ids: {example}")
    return read_text("-", "--text") if given.text == "-" else given.ids or given.text


def _model(given: Arguments, source: str) -> tuple[Any, Any]:
    """Return the model and its tokenizer as the functions of `inspect` take them."""
    from tiedgpt.core.model import GPT

    if not given.loading:
        return source, given.tokenizer
    tokenizer = given.tokenizer or (None if given.ids else source)
    return GPT.from_pretrained(source, **given.loading), tokenizer


def _page(given: Arguments) -> None:
    """Write the page with the answers for the text."""
    from tiedgpt.inspect.opening import open_model
    from tiedgpt.serve.export import export

    if given.html is None:
        raise UserError(
            "the page needs a file", hint="give --html, as tiedgpt inspect --html page.html"
        )
    if given.html.is_dir():
        raise UserError(
            f"--html {given.html} is a directory", hint="name the page first, as page.html"
        )
    if named := [name for name in (*SPECIAL, "plot") if getattr(given, name)]:
        raise UserError(f"--{named[0].replace('_', '-')} is not for --html", hint="leave it out")
    text, source = _text(given), source_or_newest(given.source)
    model, tokenizer = open_model(*_model(given, source), needed=given.text is not None)
    name = Path(source).resolve().name if Path(source).exists() else source
    text = text if isinstance(text, str) else list(text)
    page = export(model, tokenizer, text, name=name, source=source)
    with replacing(given.html) as temporary:
        temporary.write_text(page, encoding="utf-8")
    fact("written", f"{given.html} ({megabytes(len(page.encode()))}): open it in a browser")


def _progress(done: int, of: int) -> None:
    if sys.stderr.isatty():
        text = "" if done == of else f"layer {done} of {of}"
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _cells(column: Iterable[Any]) -> list[str]:
    """Return a column's numbers with as many decimals as its largest leaves room for; "-": none."""
    values = [x if x is None or isinstance(x, str) or x == x else None for x in column]
    sizes = [abs(x) for x in values if not isinstance(x, (str, type(None)))]
    size = max(sizes, default=0)
    whole = not any(isinstance(x, (float, np.floating)) for x in sizes)
    decimals = 0 if whole or size >= 1000 else 3 if size < 10 else 2 if size < 100 else 1
    cells = []
    for value in values:
        if value is None or isinstance(value, str):
            cells.append("-" if value is None else value)
        elif value and abs(value) < 0.5 * 10**-decimals:
            cells.append(f"{value:.0e}")
        else:
            cells.append(f"{value:,.{decimals}f}" if value else "0")
    return cells


def _cell(value: float) -> str:
    return _cells([value])[0]


def _table(*columns: tuple[str, Iterable[Any]]) -> None:
    """Print columns, each a name and its values; numbers stand to the right."""
    values = [list(column) for _, column in columns]
    words = [all(isinstance(value, str) for value in column) for column in values]
    names = [name if word else f">{name}" for (name, _), word in zip(columns, words, strict=True)]
    rows = zip(*map(_cells, values), strict=True)
    print("\n".join(aligned(names, rows)))


def _words(pieces: Iterable[str], width: int = WORD) -> list[str]:
    return [visible(piece, width) for piece in pieces]


def _positions(found: Positions, _: int) -> None:
    changes, words = found.max_abs_change, found.words
    _table(
        ("#", range(len(found.ids))),
        ("token", _words(found.pieces)),
        ("next", [*_words(words[id] for id in found.target[:-1]), "-"]),
        ("prob", np.exp(found.logprob)),
        ("rank", [*found.rank[:-1], None]),
        ("bits", found.surprisal_bits),
        ("entropy", found.entropy_bits),
        ("likeliest", _words(words[id] for id in found.top_ids[:, 0]))
        if changes is None
        else ("logits moved by", changes),
    )
    print(
        f"\nmean loss {_cell(found.loss)} nats, {_cell(found.bits_per_byte)} bits per byte\n"
        f"training learns from {found.next} prediction{'s' * (found.next != 1)}, generation reads "
        f"position {found.next}\n"
        "bits: surprisal of the next token; entropy: of the prediction, in bits"
    )
    if found.poked is not None and changes is not None:
        at, _, new = found.poked
        most = changes[:at].max(initial=0)
        moved = f"moved by at most {most:.0e}: rounding" if most else "stayed the same, bit for bit"
        old = visible(found.pieces[at])
        print(f"Token {at}, {old}, was replaced by id {new}. Before it, logits {moved}.")


def _lens(found: Lens, _: int) -> None:
    at = found.position
    print(f"after token {at}, {visible(found.pieces[at])}: final norm and head on each state")
    columns: list[tuple[str, Iterable[Any]]] = [("state", found.layers)]
    for k in range(min(2, found.top_ids.shape[2])):
        columns.append(
            (("1st", "2nd")[k], _words(found.words[id] for id in found.top_ids[:, at, k]))
        )
        columns.append(("prob", np.exp(found.top_logprob[:, at, k])))
    _table(
        *columns,
        ("rank of next", [rank or None for rank in found.target_rank[:, at]]),
        ("KL bits", found.kl_bits[:, at]),
    )
    print("\nKL: from the model's own prediction\nearly layers were not trained for this head")


def _dot(found: Dot, _: int) -> None:
    print(
        f"after token {found.position}, {visible(found.piece)}: logit = h . e = |h| |e| cos; "
        f"|h| = {_cell(found.h_norm)}\n"
        f"e is a row of {found.matrix}, which {found.does}; c is e minus the mean row"
    )
    _table(
        ("token", _words(found.pieces, 12)),
        ("prob", found.prob),
        ("logit", found.logit),
        ("=bias", found.bias_part + found.head_bias),
        ("+gain", found.gain_part),
        ("|e|", found.row_norm),
        ("cos", found.cos),
        ("#cos", found.rank_cos),
        ("|c|", found.centred_norm),
        ("cos c", found.centred_cos),
    )
    print(
        "\nbias: the same in every context; gain: depends on the context; #cos: rank by cos\n"
        "subtracting the mean row from all rows changes |e| and cos, and no probability"
    )


def _vocabulary(found: Vocabulary, top: int) -> None:
    size = len(found.pieces)
    for matrix in found.matrices:
        print(f"{matrix.name} {matrix.does}: {size:,} rows e; c is e minus the mean row")
        if matrix.spearman:
            _table(
                ("with ln count", matrix.spearman),
                ("spearman", matrix.spearman.values()),
                ("from", [low for low, _ in matrix.interval.values()]),
                ("to", [high for _, high in matrix.interval.values()]),
                ("slope", matrix.slope.values()),
            )
            print("from, to: the 95 % interval of spearman, the rank correlation")
            share = max(0.0, matrix.r2_heldout)
            print(f"one direction explains {share:.0%} of ln count on held-out tokens")
        if len(matrix.own_rank):
            wins, asked = (matrix.own_rank == 1).mean(), len(matrix.own_rank)
            print(f"{wins:.0%} of {asked:,} tokens are the likeliest if h is their own row")
        order = matrix.centred_norm.argsort()[::-1]
        order = order if 2 * top >= size else np.r_[order[:top], order[-top:]]
        print("\nlongest and shortest rows" + ", all of them" * (len(order) == size))
        how = [_reach(found, id) for id in order]
        columns = found.count, matrix.norm, matrix.centred_norm, matrix.prior_logit
        named = zip(("count", "|e|", "|c|", "prior logit"), columns, strict=True)
        _table(
            ("id", map(str, order)),
            ("token", _words((found.pieces[id] for id in order), 20)),
            *((name, column[order]) for name, column in named if column is not None),
            ("reached", how),
        )
    print(
        "\nprior logit: e . b, where b is the final norm's bias: the same in every context\n"
        "reached: whether some text is encoded as this token; as part: of a character"
    )
    if found.unseen is None:
        print("\nno counts: --counts compares the rows with token frequency", end="")
    else:
        print(f"\n{len(found.unseen):,} tokens never occur in {found.counted_in}", end="")
    print("" if found.reachable is not None else "; no tokenizer: reached is not known")


def _reach(found: Vocabulary, id: int) -> str:
    if found.reachable is None or found.fragment is None:
        return "-"
    return "yes" if found.reachable[id] else "as part" if found.fragment[id] else "no"


def _gradient_split(found: GradientSplit, top: int) -> None:
    joined = f"{found.reads} reads and predicts: both gradients are added"
    both = "their sum is the ordinary gradient"
    if found.reads != found.predicts:
        joined = f"{found.reads} reads, {found.predicts} predicts: two matrices, untied"
        both = "each is its matrix's ordinary gradient"
    print(
        f"{joined}\n"
        f"gradient of the loss: {_cell(found.norm_read)} from reading, "
        f"{_cell(found.norm_predict)} from predicting, cosine {_cell(found.cosine)}\n"
        f"{both}; relative difference {_cell(found.residual)}\n"
    )
    order = np.hypot(found.rows_read, found.rows_predict).argsort()[::-1][:top]
    _table(
        ("id", map(str, order)),
        ("token", _words((found.pieces[id] for id in order), 24)),
        ("from reading", found.rows_read[order]),
        ("from predicting", found.rows_predict[order]),
    )


def _attention(found: AttentionMaps, _: int) -> None:
    print(f"heads of layer {found.layer}: means over all positions but the first")
    keys = found.patterns[:, -1].argmax(1)
    _table(
        ("head", range(len(keys))),
        ("entropy, bits", found.entropy[found.layer]),
        ("on the first", found.first_share[found.layer]),
        ("on the previous", found.previous_share[found.layer]),
        ("last attends to", [f"{key} {_words([found.pieces[key]])[0]}" for key in keys]),
        ("weight", found.patterns[:, -1].max(1)),
    )


def _ablate(found: Ablation, _: int) -> None:
    instead = "zero" if found.mode == "zero" else "its mean over the text"
    print(f"loss {_cell(found.loss)} nats, and its change when a part's output is {instead}")
    most = [heads.argsort()[::-1][:4] for heads in found.heads]
    named = zip(most, found.heads, strict=True)
    _table(
        ("layer", range(len(most))),
        ("attention", found.attention),
        ("MLP", found.mlp),
        (
            "heads, the costliest first",
            ["  ".join(f"{h}: {x[h]:+.3f}" for h in hs) for hs, x in named],
        ),
    )


SHOW: dict[str, Callable[[Any, int], None]] = {
    "positions": _positions,
    "lens": _lens,
    "dot": _dot,
    "vocabulary": _vocabulary,
    "gradient-split": _gradient_split,
    "attention": _attention,
    "ablate": _ablate,
}
