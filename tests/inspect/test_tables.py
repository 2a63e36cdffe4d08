"""What tables and figures show are the numbers of the results, each in its place."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from tests.inspect.conftest import random_ids, random_model
from tiedgpt import inspect
from tiedgpt.plots.panel import Grid, Line, Panel
from tiedgpt.plots.table import number_cell, number_cells, visible

IDS = random_ids(7)
MODEL, UNTIED = random_model(), random_model(tied=False)
LAYERS = ("wte + wpe", "h.0", "h.1")


def tables(text):
    """Return the columns of each table of a text: the head, then the cells."""
    rows, found = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()], []
    for head, rule, *body in (rows[at:] for at in range(len(rows) - 1)):
        if set(rule[0]) == {"-"}:
            size = next((n for n, row in enumerate(body) if len(row) != len(head)), len(body))
            found.append([*map(list, zip(head, *body[:size], strict=True))])
    return found


def check(result, *expected, said=(), figure=None, **options):
    """Compare a table with columns, a dictionary for each part, and a figure with its panels."""
    text = result.table(**options)
    assert repr(result) == str(result) == result.table()
    columns = [[[n.strip(), *number_cells(x)] for n, x in part.items()] for part in expected]
    assert tables(text) == columns
    assert [part for part in said if part not in text] == []
    assert figure is None or repr(result.figure()) == repr((figure[0], [*figure[1:]]))


def ids(numbers):
    return [f"id:{number}" for number in numbers]


def curves(columns, joined=True):
    return tuple(
        Line(name, range(len(ys)), np.asarray(ys).tolist(), color, True, joined)
        for color, (name, ys) in enumerate(columns.items())
    )


TOKENS = {
    "x_label": "token, and its position",
    "x_names": [f"id:{id} {at}" for at, id in enumerate(IDS)],
}


def test_positions_lists_each_prediction_and_what_a_replacement_moved():
    found = inspect.positions(MODEL, None, IDS, top=2)
    columns = {
        "#": range(7), "token": ids(IDS), "next": [*ids(IDS[1:]), "-"],
        "prob": np.exp(found.logprob), "rank": [*found.rank[:-1], None],
        "bits": -found.logprob / math.log(2), "entropy": found.entropy_bits,
    }  # fmt: skip
    said = [
        f"mean loss {found.loss:.3f} nats, - bits per byte",
        "learns from 6 predictions, generation reads position 6",
    ]
    title = f"7 tokens, loss {found.loss:.3f} nats"
    bits = {"surprisal of the next token": found.surprisal_bits}
    lines = curves(bits | {"entropy of the prediction": found.entropy_bits})
    panel = Panel("the prediction after each token", lines=lines, y_label="bits", **TOKENS)
    likeliest = {"likeliest": ids(found.top_ids[:, 0])}
    check(found, columns | likeliest, said=said, figure=(title, panel))
    moved = np.float32([0, 2e-7, 2, 3, 4, 5, 6])
    found = inspect.positions(MODEL, None, IDS, top=2, replace_at=2, replace_with=5)
    said = [f"Token 2, id:{IDS[2]}, was replaced by id:5 (id 5)", "moved by at most 2e-07"]
    change = Panel(
        "change of the logits when token 2 is changed",
        lines=curves({"largest": moved}), y_label="largest change of a logit", **TOKENS,
    )  # fmt: skip
    found = replace(found, max_abs_change=moved)
    check(found, columns | {"logits moved by": moved}, said=said, figure=(title, panel, change))


def test_lens_shows_one_position_in_its_table_and_words_in_a_narrow_grid():
    found = inspect.lens(MODEL, None, IDS, position=3, top=3)
    first, second, _ = found.top_ids[:, 3].T
    probs = np.exp(found.top_logprob)
    grid = Grid(
        "the likeliest next token, by state", y_label="state after", unit="its probability",
        values=probs[..., 0].tolist(), texts=[ids(row) for row in found.top_ids[..., 0]],
        y_names=LAYERS, **TOKENS,
    )  # fmt: skip
    watched = dict(zip(ids(found.watch[:5]), np.exp(found.watch_logprob.T), strict=False))
    names = {"y_label": "probability", "x_names": LAYERS}
    panel = Panel(f"after token 3, id:{IDS[3]}", "state after", curves(watched), **names)
    check(found, {
        "state": LAYERS, "1st": ids(first), "prob": probs[:, 3, 0], "2nd": ids(second),
        "prob ": probs[:, 3, 1], "rank of next": found.target_rank[:, 3],
        "KL bits": found.kl_bits[:, 3],
    }, said=[f"after token 3, id:{IDS[3]}:"], figure=("logit lens", grid, panel))  # fmt: skip
    last = inspect.lens(MODEL, None, IDS, top=1).table()
    assert tables(last)[0][3] == ["rank of next", "-", "-", "-"]
    grids = [inspect.lens(MODEL, None, random_ids(n)).figure()[1][0] for n in (16, 17)]
    assert [bool(grid.texts) for grid in grids] == [True, False]


def test_one_prediction_is_shown_as_products_and_drawn_among_all_rows():
    found = inspect.dot(MODEL, None, IDS, position=2, top=7)
    check(found, {
        "token": ids(found.ids), "prob": found.prob, "logit": found.logit,
        "=bias": found.bias_part + found.head_bias, "+gain": found.gain_part,
        "|e|": found.row_norm, "cos": found.cos, "#cos": found.rank_cos,
        "|c|": found.centred_norm, "cos c": found.centred_cos,
    }, said=[f"token 2, id:{IDS[2]}: logit", f"|h| = {number_cell(found.h_norm)}\n"])  # fmt: skip
    sides = (found.all_norm, found.all_cos), (found.all_centred_norm, found.all_centred_cos)
    for panel, (norm, cos), sign in zip(found.figure()[1], sides, "ec", strict=True):
        every, likeliest, *levels = panel.lines
        assert every == Line("all tokens", norm.tolist(), cos.tolist(), joined=False)
        x, y = norm[found.ids], cos[found.ids]
        assert likeliest == Line("the likeliest", x.tolist(), y.tolist(), 1, True, False)
        assert panel.notes == [*zip(x[:5], y[:5], ids(found.ids[:5]), strict=True)]
        assert [line.color for line in levels] == [2, 3, 4]
        for line, share in zip(levels, (1, 0.75, 0.5), strict=True):
            product, places = share * (x * y).max(), np.arange(4, 201) * norm.max() / 200
            np.testing.assert_allclose(np.multiply(line.xs, line.ys), product, rtol=1e-6)
            assert line.name == f"h . {sign} = {found.h_norm * product:.1f}"
            assert len(line.xs) == pytest.approx(sum(product / places < cos.max()), abs=5)


def test_attention_shows_the_heads_of_a_layer_and_the_means_of_all():
    found = inspect.attention(MODEL, None, IDS, layer=1)
    names = {"x_label": "key", "y_label": "query", "x_names": ids(IDS), "y_names": ids(IDS)}
    maps = [
        Grid(f"layer 1, head {n}", unit="weight", values=found.patterns[n].tolist(), **names)
        for n in range(2)
    ]
    means = [
        Grid(title, "head", "layer", unit, values.tolist()) for title, unit, values in (
            ("entropy of the weights", "bits", found.entropy),
            ("on the first token", "weight", found.first_share),
            ("on the token before", "weight", found.previous_share),
        )
    ]  # fmt: skip
    last = found.patterns[:, -1]
    check(found, {
        "head": range(2), "entropy, bits": found.entropy[1], "on the first": found.first_share[1],
        "on the previous": found.previous_share[1],
        "last attends to": [f"{key} id:{IDS[key]}" for key in last.argmax(1)],
        "weight": last.max(1),
    }, figure=("attention: a layer's maps, and means of every head", *maps, *means))  # fmt: skip


@pytest.mark.parametrize(("mode", "instead"), [("zero", "zero"), ("mean", "its mean")])
def test_ablation_lists_the_costliest_heads_first(mode, instead):
    found = inspect.ablate(MODEL, None, IDS, mode=mode)
    heads = np.array([[0.1, 3, -2, 0.5, 0.25], [-1, 2, 1, 3, 0]])
    found = replace(found, loss=2.5, heads=heads)
    rows = [row.split() for row in found.table().splitlines()[-2:]]
    assert [" ".join(row[3:]) for row in rows] == [
        "1: +3.000 3: +0.500 4: +0.250 0: +0.100", "3: +3.000 1: +2.000 2: +1.000 4: +0.000",
    ]  # fmt: skip
    parts = ["0", "1"], number_cells(found.attention), number_cells(found.mlp)
    assert [row[:3] for row in rows] == [*map(list, zip(*parts, strict=True))]
    assert f"loss 2.500 nats, and its change when a part's output is {instead}" in found.table()
    unit = "change of the loss, nats"
    texts = [[f"{x:+.2f}" for x in row] for row in heads]
    grid = Grid("without a head", "head", "layer", unit, heads.tolist(), texts, signed=True)
    lines, names = curves({"attention": found.attention, "MLP": found.mlp}), ["0", "1"]
    panel = Panel(
        "without a layer's attention, or MLP", "layer", lines, y_label=unit, x_names=names
    )
    title = f"loss 2.500 nats; a part's output is replaced by {instead}"
    assert found.figure() == (title, [grid, panel]) and repr(found) == found.table()
    grids = [replace(found, heads=np.ones((2, n))).figure()[1][0] for n in (16, 17)]
    assert [bool(grid.texts) for grid in grids] == [True, False]


def test_patching_names_the_best_place_of_each_layer_and_its_share():
    found = inspect.patch(MODEL, None, IDS, corrupted=random_ids(7, 1), answer=5, wrong=0)
    found = replace(found, clean=3.0, corrupted=1.0)
    columns, grids = {"layer": range(2)}, []
    look = {"y_label": "layer", "signed": True, "unit": "share that comes back"}
    for part in ("residual", "attention", "mlp", "heads"):
        shares = (getattr(found, part) - 1) / 2
        best = shares.argmax(1)
        columns[part] = [f"{at} id:{IDS[at]}" for at in best] if part == "residual" else best
        columns["share" + " " * len(grids)] = shares.max(1)
        axis = {"x_label": "head"} if part == "heads" else TOKENS
        grids.append(Grid(part, values=shares.tolist(), **axis, **look))
    n, answers = int((IDS != random_ids(7, 1)).sum()), "log P(id:5) - log P(id:0)"
    said = [f"{answers}: 3.000 nats, 1.000 corrupted ({n} of 7 tokens differ)"]
    check(found, columns, said=said, figure=(f"activation patching: {answers}", *grids))
    assert replace(found, wrong=-1).table().startswith("log P(id:5): 3.000")
    equal = replace(found, corrupted=3.0)
    assert np.isnan(equal.share(equal.mlp)).all()
    assert tables(equal.table())[0][2] == ["share", "0", "0"]


def test_a_direction_shows_its_texts_and_the_tokens_that_it_pushes(model, tokenizer):
    sides = {"toward": ["the cat", "cat sat"], "away": ["mat", "on"]}
    found = inspect.direction(model, tokenizer, **sides, top=3)
    raised, lowered = ([visible(found.words[id], 12) for id in row[:2]] for row in found.ids)
    both = found.toward, found.away
    lines = curves({"toward": np.sort(found.toward), "away": np.sort(found.away)})
    panel = Panel("each text", "text, in order", lines, y_label="place along the direction")
    lengths = f"length {number_cell(found.norm)}, of the states {number_cell(found.state_norm)}"
    check(found, {
        "texts": ["toward", "away"], "number": [2, 2],
        "least": [x.min() for x in both], "greatest": [x.max() for x in both],
    }, {
        "raises": raised, "by": found.push[0, :2], "lowers": lowered, "by ": found.push[1, :2],
    }, said=[f"after layer 1: {lengths}\n"], figure=("a direction after layer 1", panel), top=2,
    )  # fmt: skip


@pytest.mark.parametrize("model", [MODEL, UNTIED])
def test_neighbours_are_listed_by_each_measure_for_each_matrix(model):
    found = inspect.neighbours(model, None, 5, top=4)
    parts, panels, label = [], [], "neighbour, by the cosine of the centred rows"
    for near in found.matrices:
        parts.append({
            "by dot product": ids(near.dot_ids), "e . e": near.dot, "by cos": ids(near.cos_ids),
            "cos": near.cos, "by cos c": ids(near.centred_cos_ids), "cos c": near.centred_cos,
        })  # fmt: skip
        lines = curves({"cos": near.cos, "cos of the centred rows": near.centred_cos})
        names = {"y_label": "cosine", "x_names": ids(near.centred_cos_ids)}
        panels.append(Panel(near.name, label, lines, **names))
    said = [f"{near.name} {near.does}" for near in found.matrices]
    check(found, *parts, said=said, figure=("rows nearest to token 5, id:5", *panels))


@pytest.mark.parametrize("model", [MODEL, UNTIED])
def test_the_rows_with_the_largest_gradient_come_first(model):
    found = inspect.gradient_split(model, None, IDS)
    parts = {"from reading": found.rows_read, "from predicting": found.rows_predict}
    order = np.hypot(*parts.values()).argsort()[::-1]
    read, predict, cosine = found.norm_read, found.norm_predict, f"cosine {found.cosine:.3f}"
    lines = curves({name: part[order[:40]] for name, part in parts.items()}, joined=False)
    names = {"y_label": "norm of the row's gradient", "x_names": ids(order[:40])}
    title = f"reading {read:.3g}, predicting {predict:.3g}, {cosine}"
    panel = Panel(title, "token", lines, **names)
    for top, options in ((3, {"top": 3}), (10, {})):
        rows = {name: part[order[:top]] for name, part in parts.items()}
        check(
            found, {"id": map(str, order[:top]), "token": ids(order[:top])} | rows, **options,
            said=[f"{read:.3f} from reading, {predict:.3f} from predicting, {cosine}"],
            figure=("gradient of W: the rows with the largest gradient", panel),
        )  # fmt: skip


def test_a_random_head_is_compared_in_loss_parameters_and_words():
    found = inspect.random_head(MODEL, None, IDS, top=3)
    own, random = np.exp(found.top_logprob), np.exp(found.random_top_logprob)
    lines = curves({"own head": own, "random head": random})
    names = {"y_label": "probability", "x_names": ["1", "2", "3"]}
    title = f"loss {found.loss:.3f} nats, with a random head {found.random_loss:.3f}"
    panel = Panel("after the text", "rank", lines, **names)
    check(found, {
        "head": ["the model's own", "random", "a guess"],
        "loss": [found.loss, found.random_loss, math.log(97)],
        "parameters": [found.parameters, found.random_parameters, None],
    }, {
        "own": ids(found.top_ids), "prob": own,
        "random": ids(found.random_top_ids), "prob ": random,
    }, said=["random: of std 0.020"], figure=(title, panel))  # fmt: skip


@pytest.mark.parametrize("counts", [None, np.arange(97) * np.array([2, 3] * 48 + [5])])
def test_the_vocabulary_lists_the_longest_and_the_shortest_rows_of_each_matrix(counts):
    found = inspect.vocabulary(UNTIED, None, counts=counts)
    parts = found.table(3).split("wte.weight reads")[1].split("head.weight predicts")
    panels = []
    for matrix, part in zip(found.matrices, parts, strict=True):
        order = matrix.centred_norm.argsort()[::-1]
        order = [*order[:3], *order[-3:]]
        columns = {"count": counts, "|e|": matrix.norm, "|c|": matrix.centred_norm}
        columns["prior logit"] = matrix.prior_logit
        columns = {name: x[order] for name, x in columns.items() if x is not None}
        columns = {"id": map(str, order), "token": ids(order)} | columns | {"reached": ["-"] * 6}
        trends = [{
            "with ln count": matrix.spearman, "spearman": matrix.spearman.values(),
            "from": [low for low, _ in matrix.interval.values()],
            "to": [high for _, high in matrix.interval.values()], "slope": matrix.slope.values(),
        }]  # fmt: skip
        expected = [*trends * (counts is not None), columns]
        cells = [[[name, *number_cells(x)] for name, x in one.items()] for one in expected]
        assert tables(part) == cells
        assert f"{(matrix.own_rank == 1).mean():.0%} of 97 tokens" in part
        axes = [
            f"component {n + 1}, {x:.0%} of the variance" for n, x in enumerate(matrix.pca_share)
        ]
        drawn = {"norm of the row": matrix.norm, "norm of the centred row": matrix.centred_norm}
        drawn |= {} if matrix.prior_logit is None else {"prior logit, nats": matrix.prior_logit}
        for name, values in drawn.items() if counts is not None else ():
            cloud = Line(name, counts[1:].tolist(), values[1:].tolist(), joined=False)
            names = {"log_x": True, "y_label": name}
            panels.append(Panel(f"{matrix.name}: {name}", "count of the token", (cloud,), **names))
        cloud = Line("tokens", *matrix.pca.T.tolist(), joined=False)
        panels.append(Panel(f"{matrix.name}: main directions", axes[0], (cloud,), y_label=axes[1]))
    assert found.figure() == ("97 tokens", panels) and repr(found) == found.table()
    end = "no counts:" if counts is None else "not in the counts given: 1 token;"
    assert end in found.table(48) and "all of them" not in found.table(48)
    assert len(tables(found.table(49))[-1][0]) == 98 and "all of them" in found.table(49)
    if counts is None:
        assert found.count is None and math.isnan(found.matrices[0].r2_heldout)
    else:
        explained = [replace(matrix, r2_heldout=x).trends() for x in (0.256, -0.5)]
        assert "explains 26% of" in explained[0] and "explains 0% of" in explained[1]


def test_the_vocabulary_says_which_tokens_a_text_reaches(model, tokenizer):
    found = inspect.vocabulary(model, tokenizer, counts=[1] * len(tokenizer))
    reached = np.where(found.reachable, "yes", np.where(found.fragment, "as part", "no"))
    order = found.matrices[0].centred_norm.argsort()[::-1]
    *_, (head, *words) = tables(found.table(10_000))[-1]
    assert (head, words) == ("reached", reached[order].tolist()) and len({*words}) == 3
    assert found.table().endswith("\nnot in the counts given: 0 tokens")


@pytest.mark.parametrize("untied", [False, True])
def test_learning_shows_losses_by_step_rows_that_moved_and_the_prediction(untied):
    options = {"steps": 2, "untied": untied, "other": [3, 1, 4], "position": 4, "top": 3}
    found = inspect.learn(MODEL, None, IDS, predict="last" if untied else "all", **options)
    far = np.hypot(found.all_reading, found.all_predicting)
    assert {*found.rows} == {*IDS.tolist(), *far.argsort()[:-4:-1]}
    assert (np.diff(far[found.rows]) <= 0).all()
    text, other = {"this text": found.loss}, {"the other text": found.other_loss}
    last = {"its last prediction": found.learned_loss} if untied else {}
    changes = {"reading": found.reading, "predicting": found.predicting}
    changes |= {"apart": found.twin_distance} if untied else {"together": found.together}
    changes |= {"cosine": found.cosine, "pull": found.pull}
    order = found.likely_prob[2].argsort()[::-1][:10]
    said, which, matrices = "one matrix: the row of id:59 that predicts is also read", "", ""
    if untied:
        cosine = found.twin_cosine[2, found.rows.tolist().index(IDS[-1])]
        angle = np.degrees(np.arccos(cosine))
        said = f"two matrices: the two rows of id:59 are {angle:.2g} degrees apart"
        matrices = ", head.weight"
    which = "the last position alone" if untied else "every position"
    sgd = f"2 steps of SGD (learning rate 0.1) on all parameters, from {which}"
    length = f"length of the change of rows, in wte.weight{matrices}\n"
    parts = {"by reading": found.reading[2], "by predicting": found.predicting[2]}
    names = {"y_label": "length", "x_names": ids(found.rows)}
    check(
        found,
        {"step": range(3)} | text | last | other,
        {"id": map(str, found.rows), "token": ids(found.rows)}
        | {name: values[2] for name, values in changes.items()}
        | {"before": found.prob[0], "after": found.prob[2]},
        {"next token": ids(found.likely[order]), "prob before": found.likely_prob[0, order],
         "after": found.likely_prob[2, order]},
        said=[f"{sgd}\n{said}\n\nmean loss", length, "probability at position 4\n"],
        figure=(sgd, Panel("mean loss", "step", curves(text | other), y_label="nats"),
                Panel("change of the rows", "token", curves(parts, False), **names)),
    )  # fmt: skip


def test_learning_describes_what_was_trained_and_where_it_diverged():
    assert inspect.learn(MODEL, None, IDS, train="head", lr=0.25).describe().startswith(
        "1 step of SGD (learning rate 0.25) on wte.weight alone, from every position\none matrix"
    )  # fmt: skip
    still = inspect.learn(MODEL, None, IDS, train="blocks", steps=0).table()
    assert still.startswith("0 steps of SGD (learning rate 0.1) on the blocks")
    assert "length" not in still
    blocks = inspect.learn(MODEL, None, IDS, train="blocks").describe()
    assert blocks.endswith("\nno row of W moved")
    found = inspect.learn(MODEL, None, IDS, lr=1e30, steps=3)
    said = "\nstep 1 diverged: the loss is not finite; try 0.1"
    assert found.describe().endswith(said) and found.try_lr == 0.1 and len(found.loss) == 1
    assert inspect.learn(MODEL, None, IDS, lr=0.5).try_lr is None
