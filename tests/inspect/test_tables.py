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


def tables(text):
    """Return the columns of each table of a text: the head, then the cells."""
    rows, found = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()], []
    for head, rule, *body in (rows[at:] for at in range(len(rows) - 1)):
        if set(rule[0]) == {"-"}:
            size = next((n for n, row in enumerate(body) if len(row) != len(head)), len(body))
            found.append([*map(list, zip(head, *body[:size], strict=True))])
    return found


def expected(*columns):
    return [[name, *number_cells(values)] for name, values in columns]


def ids(numbers):
    return [f"id:{number}" for number in numbers]


def curves(columns, joined=True):
    return tuple(
        Line(name, range(len(ys)), np.asarray(ys).tolist(), color, True, joined)
        for color, (name, ys) in enumerate(columns.items())
    )


def tokens(numbers):
    names = [f"id:{number} {at}" for at, number in enumerate(numbers)]
    return {"x_label": "token, and its position", "x_names": names}


def test_positions_lists_each_prediction_and_what_a_replacement_moved():
    found = inspect.positions(MODEL, None, IDS, top=2)
    columns = [
        ("#", range(7)), ("token", ids(IDS)), ("next", [*ids(IDS[1:]), "-"]),
        ("prob", np.exp(found.logprob)), ("rank", [*found.rank[:-1], None]),
        ("bits", -found.logprob / math.log(2)), ("entropy", found.entropy_bits),
    ]  # fmt: skip
    likeliest = ("likeliest", ids(found.top_ids[:, 0]))
    assert tables(found.table()) == [expected(*columns, likeliest)]
    assert f"mean loss {found.loss:.3f} nats, - bits per byte" in found.table()
    assert "learns from 6 predictions, generation reads position 6" in found.table()
    moved = inspect.positions(MODEL, None, IDS, top=2, replace_at=2, replace_with=5)
    moved = replace(moved, max_abs_change=np.float32([0, 2e-7, 2, 3, 4, 5, 6]))
    assert tables(moved.table()) == [expected(*columns, ("logits moved by", moved.max_abs_change))]
    said = f"Token 2, id:{IDS[2]}, was replaced by id:5 (id 5). Before it, logits moved by at most"
    assert f"{said} 2e-07" in moved.table()
    title, panels = moved.figure()
    bits = {"surprisal of the next token": found.surprisal_bits}
    lines = curves(bits | {"entropy of the prediction": found.entropy_bits})
    first = Panel("the prediction after each token", lines=lines, y_label="bits", **tokens(IDS))
    lines, change = curves({"largest": moved.max_abs_change}), "largest change of a logit"
    second = "change of the logits when token 2 is changed"
    second = Panel(second, lines=lines, y_label=change, **tokens(IDS))
    assert title == f"7 tokens, loss {found.loss:.3f} nats"
    assert repr(panels) == repr([first, second]) and repr(found.figure()[1]) == repr([first])


def test_lens_shows_one_position_in_its_table_and_words_in_a_narrow_grid():
    found = inspect.lens(MODEL, None, IDS, position=3, top=3)
    likeliest = [
        pair for k, name in enumerate(("1st", "2nd")) for pair in (
            (name, ids(found.top_ids[:, 3, k])), ("prob", np.exp(found.top_logprob[:, 3, k])))
    ]  # fmt: skip
    rank, kl = ("rank of next", found.target_rank[:, 3]), ("KL bits", found.kl_bits[:, 3])
    layers = ("wte + wpe", "h.0", "h.1")
    assert tables(found.table()) == [expected(("state", layers), *likeliest, rank, kl)]
    assert f"after token 3, id:{IDS[3]}:" in found.table()
    last = inspect.lens(MODEL, None, IDS, top=1).table()
    assert tables(last)[0][3] == ["rank of next", "-", "-", "-"]
    probs = np.exp(found.top_logprob[..., 0]).tolist()
    words = [ids(row) for row in found.top_ids[..., 0]]
    grid = Grid("the likeliest next token, by state", y_label="state after", values=probs,
        unit="its probability", texts=words, y_names=layers, **tokens(IDS))  # fmt: skip
    watched = dict(zip(ids(found.watch[:5]), np.exp(found.watch_logprob.T), strict=False))
    panel = Panel(f"after token 3, id:{IDS[3]}", "state after", curves(watched),
        y_label="probability", x_names=layers)  # fmt: skip
    assert found.figure() == ("logit lens", [grid, panel])
    widths = [bool(inspect.lens(MODEL, None, random_ids(n)).figure()[1][0].texts) for n in (16, 17)]
    assert widths == [True, False]


def test_one_prediction_is_shown_as_products_and_drawn_among_all_rows():
    found = inspect.dot(MODEL, None, IDS, position=2, top=7)
    assert tables(found.table()) == [expected(
        ("token", ids(found.ids)), ("prob", found.prob), ("logit", found.logit),
        ("=bias", found.bias_part + found.head_bias), ("+gain", found.gain_part),
        ("|e|", found.row_norm), ("cos", found.cos), ("#cos", found.rank_cos),
        ("|c|", found.centred_norm), ("cos c", found.centred_cos),
    )]  # fmt: skip
    assert f"after token 2, id:{IDS[2]}: logit" in found.table()
    assert f"|h| = {number_cell(found.h_norm)}\n" in found.table()
    _, panels = found.figure()
    sides = (found.all_norm, found.all_cos), (found.all_centred_norm, found.all_centred_cos)
    for panel, (norm, cos), sign in zip(panels, sides, "ec", strict=True):
        every, likeliest, *levels = panel.lines
        assert every == Line("all tokens", norm.tolist(), cos.tolist(), joined=False)
        x, y = norm[found.ids], cos[found.ids]
        assert likeliest == Line("the likeliest", x.tolist(), y.tolist(), 1, True, False)
        assert panel.notes == [*zip(x[:5], y[:5], ids(found.ids[:5]), strict=True)]
        assert [line.color for line in levels] == [2, 3, 4]
        for line, share in zip(levels, (1, 0.75, 0.5), strict=True):
            product = share * (x * y).max()
            np.testing.assert_allclose(np.multiply(line.xs, line.ys), product, rtol=1e-6)
            assert line.name == f"h . {sign} = {found.h_norm * product:.1f}"
            places = np.arange(1, 201) * norm.max() / 200  # roughly: from a fiftieth on
            near = [p for p in places if product / cos.max() < p and p > norm.max() / 50]
            assert len(line.xs) == pytest.approx(len(near), abs=5)


def test_attention_shows_the_heads_of_a_layer_and_the_means_of_all():
    title, grids = inspect.attention(MODEL, None, IDS, layer=1).figure()
    found = inspect.attention(MODEL, None, IDS, layer=1)
    heads = {"x_label": "head", "y_label": "layer"}
    names = {"x_label": "key", "y_label": "query", "x_names": ids(IDS), "y_names": ids(IDS)}
    maps = [Grid(f"layer 1, head {n}", unit="weight", values=found.patterns[n].tolist(), **names)
            for n in range(2)]  # fmt: skip
    means = [
        Grid("entropy of the weights", unit="bits", values=found.entropy.tolist(), **heads),
        Grid("on the first token", unit="weight", values=found.first_share.tolist(), **heads),
        Grid("on the token before", unit="weight", values=found.previous_share.tolist(), **heads),
    ]
    assert grids == [*maps, *means] and "attention" in title


@pytest.mark.parametrize(("mode", "instead"), [("zero", "zero"), ("mean", "its mean")])
def test_ablation_lists_the_costliest_heads_first(mode, instead):
    found = inspect.ablate(MODEL, None, IDS, mode=mode)
    heads = np.array([[0.1, 3, -2, 0.5, 0.25], [-1, 2, 1, 3, 0]])
    found = replace(found, loss=2.5, heads=heads)
    costliest = ["1: +3.000  3: +0.500  4: +0.250  0: +0.100"]
    costliest += ["3: +3.000  1: +2.000  2: +1.000  4: +0.000"]
    rows = [row.split() for row in found.table().splitlines()[-2:]]
    assert [" ".join(row[3:]) for row in rows] == [" ".join(row.split()) for row in costliest]
    parts = [[str(n) for n in range(2)], number_cells(found.attention), number_cells(found.mlp)]
    assert [row[:3] for row in rows] == [*map(list, zip(*parts, strict=True))]
    assert f"loss 2.500 nats, and its change when a part's output is {instead}" in found.table()
    unit = "change of the loss, nats"
    texts = [["+0.10", "+3.00", "-2.00", "+0.50", "+0.25"]]
    texts += [["-1.00", "+2.00", "+1.00", "+3.00", "+0.00"]]
    grid = Grid("without a head", "head", "layer", unit, heads.tolist(), texts, signed=True)
    lines = curves({"attention": found.attention, "MLP": found.mlp})
    panel = Panel("without a layer's attention, or MLP", "layer", lines, y_label=unit,
        x_names=["0", "1"])  # fmt: skip
    title = f"loss 2.500 nats; a part's output is replaced by {instead}"
    assert found.figure() == (title, [grid, panel])
    grids = [replace(found, heads=np.ones((2, n))).figure()[1][0] for n in (16, 17)]
    assert [bool(grid.texts) for grid in grids] == [True, False]


def test_patching_names_the_best_place_of_each_layer_and_its_share():
    found = inspect.patch(MODEL, None, IDS, corrupted=random_ids(7, 1), answer=5, wrong=60)
    found = replace(found, clean=3.0, corrupted=1.0)
    columns = [("layer", range(2))]
    grids = []
    for part in ("residual", "attention", "mlp", "heads"):
        shares = (getattr(found, part) - 1) / 2
        best = shares.argmax(1)
        named = [f"{at} id:{IDS[at]}" for at in best] if part == "residual" else best
        columns += [(part, named), ("share", shares.max(1))]
        axis = {"x_label": "head"} if part == "heads" else tokens(IDS)
        grids.append(Grid(part, y_label="layer", unit="share that comes back", signed=True,
            values=shares.tolist(), **axis))  # fmt: skip
    assert tables(found.table()) == [expected(*columns)]
    n = int((IDS != random_ids(7, 1)).sum())
    head = f"log P(id:5) - log P(id:60): 3.000 nats, 1.000 corrupted ({n} of 7 tokens differ)"
    assert found.table().startswith(head)
    assert found.figure() == ("activation patching: log P(id:5) - log P(id:60)", grids)
    assert replace(found, wrong=-1).table().startswith("log P(id:5): 3.000")
    equal = replace(found, corrupted=3.0)
    assert np.isnan(equal.share(equal.mlp)).all()
    assert tables(equal.table())[0][2] == ["share", "0", "0"]


def test_a_direction_shows_its_texts_and_the_tokens_that_it_pushes(model, tokenizer):
    found = inspect.direction(
        model, tokenizer, toward=["the cat", "cat sat"], away=["mat", "on"], top=3
    )
    texts, words = tables(found.table(2))
    ends = [(side.min(), side.max()) for side in (found.toward, found.away)]
    least, greatest = zip(*ends, strict=True)
    assert texts == expected(
        ("texts", ["toward", "away"]), ("number", [2, 2]), ("least", least), ("greatest", greatest)
    )
    assert words == expected(*[
        pair for k, name in enumerate(("raises", "lowers")) for pair in (
            (name, [visible(found.words[id], 12) for id in found.ids[k, :2]]),
            ("by", found.push[k, :2]))
    ])  # fmt: skip
    lengths = f"length {number_cell(found.norm)}, of the states {number_cell(found.state_norm)}"
    assert found.table().startswith(f"after layer 1: {lengths}")
    lines = curves({"toward": np.sort(found.toward), "away": np.sort(found.away)})
    panel = Panel("each text", "text, in order", lines, y_label="place along the direction")
    assert found.figure() == ("a direction after layer 1", [panel])


@pytest.mark.parametrize("model", [MODEL, UNTIED])
def test_neighbours_are_listed_by_each_measure_for_each_matrix(model):
    found = inspect.neighbours(model, None, 5, top=4)
    assert tables(found.table()) == [
        expected(
            ("by dot product", ids(near.dot_ids)), ("e . e", near.dot),
            ("by cos", ids(near.cos_ids)), ("cos", near.cos),
            ("by cos c", ids(near.centred_cos_ids)), ("cos c", near.centred_cos),
        ) for near in found.matrices
    ]  # fmt: skip
    assert all(f"{near.name} {near.does}" in found.table() for near in found.matrices)
    label = "neighbour, by the cosine of the centred rows"
    title, panels = found.figure()
    assert title == "rows nearest to token 5, id:5"
    for near, panel in zip(found.matrices, panels, strict=True):
        lines = curves({"cos": near.cos, "cos of the centred rows": near.centred_cos})
        names = ids(near.centred_cos_ids)
        assert panel == Panel(near.name, label, lines, y_label="cosine", x_names=names)


@pytest.mark.parametrize("model", [MODEL, UNTIED])
def test_the_rows_with_the_largest_gradient_come_first(model):
    found = inspect.gradient_split(model, None, IDS)
    order = np.hypot(found.rows_read, found.rows_predict).argsort()[::-1]
    assert tables(found.table(3)) == [expected(
        ("id", map(str, order[:3])), ("token", ids(order[:3])),
        ("from reading", found.rows_read[order[:3]]),
        ("from predicting", found.rows_predict[order[:3]]),
    )]  # fmt: skip
    assert (
        f"{found.norm_read:.3f} from reading, {found.norm_predict:.3f} from predicting, "
        f"cosine {found.cosine:.3f}"
    ) in found.table()
    parts = {"from reading": found.rows_read, "from predicting": found.rows_predict}
    lines = curves({name: part[order[:40]] for name, part in parts.items()}, joined=False)
    _, (panel,) = found.figure()
    assert panel.lines == lines and panel.x_names == ids(order[:40])
    assert panel.title == (
        f"reading {found.norm_read:.3g}, predicting {found.norm_predict:.3g}, "
        f"cosine {found.cosine:.3f}"
    )


def test_a_random_head_is_compared_in_loss_parameters_and_words():
    found = inspect.random_head(MODEL, None, IDS, top=3)
    losses, words = tables(found.table())
    assert losses == expected(
        ("head", ["the model's own", "random", "a guess"]),
        ("loss", [found.loss, found.random_loss, math.log(97)]),
        ("parameters", [found.parameters, found.random_parameters, None]),
    )
    probs = {"own head": np.exp(found.top_logprob), "random head": np.exp(found.random_top_logprob)}
    own, random = probs.values()
    assert words == expected(
        ("own", ids(found.top_ids)), ("prob", own),
        ("random", ids(found.random_top_ids)), ("prob", random),
    )  # fmt: skip
    assert "random: of std 0.020" in found.table()
    title, (panel,) = found.figure()
    assert title == f"loss {found.loss:.3f} nats, with a random head {found.random_loss:.3f}"
    assert panel == Panel("after the text", "rank", curves(probs), y_label="probability",
        x_names=["1", "2", "3"])  # fmt: skip


COUNTS = np.arange(97) * np.array([2, 3] * 48 + [5])


@pytest.mark.parametrize("counts", [None, COUNTS])
def test_the_vocabulary_lists_the_longest_and_the_shortest_rows_of_each_matrix(counts):
    found = inspect.vocabulary(UNTIED, None, counts=counts)
    parts = found.table(3).split("wte.weight reads")[1].split("head.weight predicts")
    for matrix, part in zip(found.matrices, parts, strict=True):
        order = matrix.centred_norm.argsort()[::-1]
        order = [*order[:3], *order[-3:]]
        columns = {"count": counts, "|e|": matrix.norm, "|c|": matrix.centred_norm}
        columns["prior logit"] = matrix.prior_logit
        assert tables(part)[-1] == expected(
            ("id", map(str, order)), ("token", ids(order)),
            *((name, values[order]) for name, values in columns.items() if values is not None),
            ("reached", ["-"] * 6),
        )  # fmt: skip
        assert f"{(matrix.own_rank == 1).mean():.0%} of 97 tokens" in part
        assert (counts is None) == (len(tables(part)) == 1)
        if counts is not None:
            low, high = zip(*matrix.interval.values(), strict=True)
            assert tables(part)[0] == expected(
                ("with ln count", matrix.spearman), ("spearman", matrix.spearman.values()),
                ("from", low), ("to", high), ("slope", matrix.slope.values()),
            )  # fmt: skip
            explained = replace(matrix, r2_heldout=0.256).trends()
            assert "explains 26% of" in explained and "explains 0%" in matrix.trends()
    end = "no counts:" if counts is None else "1 tokens never occur in the counts given"
    assert end in found.table(48) and "all of them" not in found.table(48)
    assert [len(part[0]) for part in tables(found.table(49))][-1] == 98
    assert "all of them" in found.table(49)
    panels = found.figure()[1]
    names = ["norm of the row", "norm of the centred row", "prior logit, nats"]
    shown = [] if counts is None else [f"wte.weight: {name}" for name in names[:2]]
    shown += ["wte.weight: main directions"]
    shown += [] if counts is None else [f"head.weight: {name}" for name in names]
    assert [panel.title for panel in panels] == [*shown, "head.weight: main directions"]
    head, share = found.matrices[1], found.matrices[1].pca_share
    labels = [f"component {n}, {x:.0%} of the variance" for n, x in zip((1, 2), share, strict=True)]
    (cloud,) = panels[-1].lines
    assert cloud == Line("tokens", *head.pca.T.tolist(), joined=False)
    assert [panels[-1].x_label, panels[-1].y_label] == labels
    if counts is not None:
        (cloud,) = panels[-2].lines
        occur = counts > 0
        values = counts[occur].tolist(), head.prior_logit[occur].tolist()
        assert cloud == Line("prior logit, nats", *values, joined=False) and panels[-2].log_x


def test_the_vocabulary_says_which_tokens_a_text_reaches(model, tokenizer):
    found = inspect.vocabulary(model, tokenizer, counts=[1] * len(tokenizer))
    reached = np.where(found.reachable, "yes", np.where(found.fragment, "as part", "no"))
    order = found.matrices[0].centred_norm.argsort()[::-1]
    (*_, (head, *words)) = tables(found.table(10_000))[-1]
    assert (head, words) == ("reached", reached[order].tolist()) and len({*words}) == 3
    assert found.table().endswith("0 tokens never occur in the counts given")


@pytest.mark.parametrize("untied", [False, True])
def test_learning_shows_losses_by_step_rows_that_moved_and_the_prediction(untied):
    options = {"steps": 2, "untied": untied, "other": [3, 1, 4], "position": 4, "top": 3}
    found = inspect.learn(MODEL, None, IDS, predict="last" if untied else "all", **options)
    losses, rows, likely = tables(found.table())
    last = [("its last prediction", found.learned_loss)] if untied else []
    others = {"this text": found.loss, "the other text": found.other_loss}
    by_step = [("step", range(3)), ("this text", found.loss), *last, [*others.items()][1]]
    assert losses == expected(*by_step)
    apart = ("apart", found.twin_distance) if untied else ("together", found.together)
    changes = [("reading", found.reading), ("predicting", found.predicting), apart]
    changes += [("cosine", found.cosine), ("pull", found.pull)]
    assert rows == expected(
        ("id", map(str, found.rows)), ("token", ids(found.rows)),
        *((name, values[2]) for name, values in changes),
        ("before", found.prob[0]), ("after", found.prob[2]),
    )  # fmt: skip
    order = found.likely_prob[2].argsort()[::-1][:10]
    assert likely == expected(
        ("next token", ids(found.likely[order])), ("prob before", found.likely_prob[0, order]),
        ("after", found.likely_prob[2, order]),
    )  # fmt: skip
    at = found.rows.tolist().index(IDS[-1])
    matrix = "one matrix: the row of id:59 that predicts is also read"
    if untied:
        angle = np.degrees(np.arccos(found.twin_cosine[2, at]))
        matrix = f"two matrices: the two rows of id:59 are {angle:.2g} degrees apart"
    which = "the last position alone" if untied else "every position"
    sgd = f"2 steps of SGD (learning rate 0.1) on all parameters, from {which}"
    matrices = "wte.weight, head.weight" if untied else "wte.weight"
    assert found.table().startswith(f"{sgd}\n{matrix}\n\nmean loss")
    assert f"length of the change of rows, in {matrices}\n" in found.table()
    assert found.table().count("at position 4\n") == 2
    names = ids(found.rows)
    parts = {"by reading": found.reading[2], "by predicting": found.predicting[2]}
    assert found.figure() == (sgd, [
        Panel("mean loss", "step", curves(others), y_label="nats"),
        Panel("change of the rows", "token", curves(parts, False), y_label="length", x_names=names),
    ])  # fmt: skip


def test_learning_describes_what_was_trained_and_where_it_diverged():
    found = inspect.learn(MODEL, None, IDS, train="head", lr=0.25)
    assert found.describe().startswith(
        "1 step of SGD (learning rate 0.25) on wte.weight alone, from every position\none matrix"
    )
    still = inspect.learn(MODEL, None, IDS, train="blocks", steps=0).table()
    assert still.startswith("0 steps of SGD (learning rate 0.1) on the blocks")
    assert "length" not in still
    assert (
        inspect.learn(MODEL, None, IDS, train="blocks").describe().endswith("\nno row of W moved")
    )
    found = inspect.learn(MODEL, None, IDS, lr=1e30, steps=3)
    said = "\nstep 1 diverged: the loss is not finite; try 0.1"
    assert found.describe().endswith(said) and found.try_lr == 0.1 and len(found.loss) == 1
    assert inspect.learn(MODEL, None, IDS, lr=0.5).try_lr is None
