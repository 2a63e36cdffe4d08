"""Lines of .jsonl as examples, and their ids and answers."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.train.conftest import write_lines
from tiedgpt import GPT, GPTConfig
from tiedgpt.cli.main import main
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.text import Tokenizer
from tiedgpt.train.tasks.examples import LabelRows, LabelSources
from tiedgpt.train.tasks.registry import TASKS
from tiedgpt.train.tasks.task import load_task

LABELLED = {name: load_task(TASKS[name].home) for name in ("classify", "choose")}
CHAR = Tokenizer.characters(["abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ?!.,\né日本"])


def encode(kind, record, *, context=99, labels=()):
    """Return the row of an example."""
    task = LABELLED[kind]()
    rows = LabelRows(SimpleNamespace(task=task, labels=tuple(labels)), CHAR)
    return rows.encode(task.parse(record), context)


def test_a_long_text_to_classify_is_truncated_at_its_end():
    row = encode("classify", {"text": "abcdef", "label": 1}, context=4, labels=["0", "1"])
    assert CHAR.decode(row.ids[0]) == "abcd" and row.cut and row.answer == 1


def test_choices_follow_their_text_and_only_the_right_one_has_a_language_loss():
    row = encode("choose", {"text": "ab", "choices": ["c", " dd"], "answer": 1})
    assert [CHAR.decode(ids) for ids in row.ids] == ["ab c", "ab dd"]
    other = encode("choose", {"text": "a", "choices": ["b", "c", "d"], "answer": 0})
    ids, lengths, targets, answers = LABELLED["choose"]().collate([row, other])
    assert ids.shape == targets.shape == (2, 3, 5)
    assert lengths.tolist() == [[4, 5, 0], [3, 3, 3]] and answers.tolist() == [1, 0]
    assert (targets[0, 0] == -100).all() and (targets[1, 1:] == -100).all()
    np.testing.assert_array_equal(targets[0, 1, :4], ids[0, 1, 1:])
    assert targets[0, 1, 4] == -100


@pytest.mark.parametrize(
    ("task", "record", "says"),
    [
        ("classify", {"txt": "a", "label": "x"}, "the field 'text'; the record has 'txt'"),
        ("classify", {"text": " ", "label": "x"}, "'text' is empty"),
        ("classify", {"text": "a"}, "no value in the field 'label'"),
        ("classify", {"text": "a", "label": True}, "label True"),
        ("classify", {"text": "a\ud800", "label": "x"}, "surrogates not allowed"),
        ("choose", {"text": "a", "choices": ["b"], "answer": 0}, "nothing to choose"),
        ("choose", {"text": "a", "choices": ["b", "c"], "answer": 2}, "the answer 2"),
        ("choose", {"text": "a", "choices": ["b", ""], "answer": 0}, "'' in 'choices'"),
        ("choose", {"text": "a", "choices": [], "answer": 0}, "no list in the field 'choices'"),
    ],
)
def test_a_wrong_line_is_refused_with_file_line_and_reason(tmp_path, task, record, says):
    good = {
        "classify": {"text": "a", "label": "x"},
        "choose": {"text": "a", "choices": ["b", "c"], "answer": 0},
    }[task]
    file = tmp_path / "lines.jsonl"
    file.write_text(f"{json.dumps(good)}\n\n{json.dumps(record)}\n")
    with pytest.raises(CorruptInputError, match=r"lines\.jsonl:3: ") as error:
        LabelSources(LABELLED[task](), [str(file)])
    assert says in str(error.value) and LABELLED[task].fields in str(error.value)


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("{", CorruptInputError, "x.jsonl:1: not a JSON object"),
        ("[1]", CorruptInputError, "x.jsonl:1: not a JSON object (got a JSON list)"),
        ("[" * 100_000, CorruptInputError, "x.jsonl:1"),
        (b"\xff\xff", CorruptInputError, "x.jsonl:1: no text in UTF-8"),
        ("\n \n", UserError, "has no lines"),
        ('{"text": "a", "label": "x"}\n' * 9, UserError, "none is left to train on"),
        (
            "".join(f'{{"text": "{n}", "label": "x"}}\n' for n in range(30)),
            UserError,
            "1 different labels",
        ),
    ],
)
def test_files_without_enough_labels_are_refused(tmp_path, text, kind, says):
    file = tmp_path / "x.jsonl"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(kind) as error:
        LabelSources(LABELLED["classify"](), [str(file)])
    assert says in str(error.value)
    with pytest.raises(UserError, match=r"missing\.jsonl"):
        LabelSources(LABELLED["classify"](), [str(tmp_path / "missing.jsonl")])


ROWS = [{"text": f"t{n}é", "label": str(n % 2), "id": str(n), "note": ""} for n in range(20)]


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.csv", "a.tsv", "a.parquet", "a.jsonl.gz", "a.lines"]
)
@pytest.mark.parametrize("encoding", ["auto", "cp1252"])
def test_labelled_records_of_any_file_are_the_same_and_unread_fields_named(
    tmp_path, name, encoding
):
    file = tmp_path / name
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
    delimiter = "\t" if name == "a.tsv" else ","
    if name in ("a.csv", "a.tsv"):
        lines = "".join(delimiter.join(row) + "\n" for row in [ROWS[0], *map(dict.values, ROWS)])
    data = lines.encode("utf-8" if encoding == "auto" else encoding)
    file.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    if name == "a.parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), file)
    sources = LabelSources(LABELLED["classify"](), [str(file)], encoding=encoding)
    examples = sorted((*sources.train, *sources.held_out), key=lambda e: int(e.texts[0][1:-1]))
    assert [(*e.texts, *e.labels) for e in examples] == [(r["text"], r["label"]) for r in ROWS]
    assert sources.notes == ["1 field was not read: id (20 lines)"]


def test_a_tenth_is_held_out_by_content_and_equal_lines_stay_together(tmp_path):
    records = [{"text": f"text {n % 50}", "label": n % 2} for n in range(200)]
    whole = LabelSources(LABELLED["classify"](), [write_lines(tmp_path / "a.jsonl", records)])
    assert len(whole.held_out) == 20 and len(whole.train) == 180
    texts = [{example.texts for example in side} for side in (whole.train, whole.held_out)]
    assert not texts[0] & texts[1]
    turned = write_lines(tmp_path / "b.jsonl", records[::-1])
    again = LabelSources(LABELLED["classify"](), [turned])
    assert {example.texts for example in again.held_out} == texts[1]
    assert again.digest() != whole.digest()


def test_a_validation_file_is_used_whole_and_never_trained_on(tmp_path):
    train = write_lines(tmp_path / "a.jsonl", [{"text": f"t{n}", "label": n % 2} for n in range(9)])
    val = write_lines(tmp_path / "b.jsonl", [{"text": "t3", "label": 1}, {"text": "v", "label": 0}])
    found = LabelSources(LABELLED["classify"](), [train], val)
    assert len(found.train) == 8 and len(found.held_out) == 2
    odd = write_lines(tmp_path / "c.jsonl", [{"text": "v", "label": "new"}])
    with pytest.raises(UserError, match=r"c\.jsonl:1: no example to train on has the label 'new'"):
        LabelSources(LABELLED["classify"](), [train], odd)


def test_numeric_labels_are_ordered_by_value(tmp_path):
    records = [{"text": f"t{n}", "label": n % 12} for n in range(240)]
    found = LabelSources(LABELLED["classify"](), [write_lines(tmp_path / "a.jsonl", records)])
    assert found.labels == tuple(str(n) for n in range(12))


TAIL = "ab" * 99
"""The last tenth of a document validates, and has no special token."""
SPELLED = f"<|startoftext|>{TAIL}<|endoftext|><|startoftext|>{TAIL}"
TEXT = SPELLED * 9


@pytest.mark.parametrize(
    ("command", "text", "counted"),
    [
        ("train data.txt --start gpt --context 8", TEXT, {"<|startoftext|>": 18}),
        ("train data.txt --start gpt --context 8 --keep-end-of-text", TEXT,
         {"<|startoftext|>": 18, "<|endoftext|>": 9}),
        ("train data.jsonl --start gpt --context 8", {"text": TEXT},
         {"<|startoftext|>": 162, "<|endoftext|>": 81}),
        ("tune data.jsonl --from gpt", {"text": SPELLED},
         {"<|startoftext|>": 18, "<|endoftext|>": 9}),
        ("tune data.jsonl --from gpt", {"prompt": "<|startoftext|>", "completion": "a"},
         {"<|startoftext|>": 9}),
        ("tune data.jsonl --from gpt",
         {"messages": [{"role": "assistant", "content": "<|im_end|>a"}]}, {"<|im_end|>": 9}),
        ("train data.jsonl --task classify --start gpt", {"text": SPELLED},
         {"<|startoftext|>": 38, "<|endoftext|>": 19}),
        ("data prepare data.txt --tokenizer gpt", TEXT, {"<|startoftext|>": 18}),
    ],
)  # fmt: skip
def test_special_tokens_that_a_text_spells_are_counted_in_a_note(
    tmp_path, monkeypatch, capsys, command, text, counted
):
    monkeypatch.chdir(tmp_path)
    tokenizer = Tokenizer.characters([SPELLED + "user\nmti_ "])
    tokenizer = tokenizer.with_special_tokens(["<|startoftext|>"])
    shape = {"n_positions": 512, "n_embd": 8, "n_layer": 1, "n_head": 2}
    GPT(GPTConfig(vocab_size=len(tokenizer), **shape)).save_pretrained("gpt")
    tokenizer.save_pretrained("gpt")
    if isinstance(text, str):
        Path("data.txt").write_text(text)
    else:
        records = [text] * 9
        if "--task" in command:
            records = [{"text": SPELLED + "a" * n, "label": n % 2} for n in range(19)]
        write_lines(tmp_path / "data.jsonl", records)
    more = ["--out", "run"] if "prepare" in command else ["--out", "run", "--steps", "1"]
    assert main([*command.split(), *more]) == 0
    err = " ".join(capsys.readouterr().err.split())
    named = ", ".join(f"{token} ({count})" for token, count in counted.items())
    assert f"special tokens that the texts spell are read as ordinary text: {named}" in err
