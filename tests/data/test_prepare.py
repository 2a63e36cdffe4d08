"""Texts of any size: the same shards by any number of processes, after any kill, or our error."""

import csv
import errno
import gzip
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.train.trials import Command, Fault
from tiedgpt import Tokenizer
from tiedgpt.cli.main import main
from tiedgpt.data import (
    Preparation,
    Shards,
    documents,
    encode_corpus,
    in_processes,
    open_encoded,
    plan_split,
    preparation,
    prepare_data,
    readers,
    verify_data,
)
from tiedgpt.errors import CheckFailedError, CorruptInputError, NoRoomError, UserError

KILLED = -9
PREPARE = ("data", "prepare")
TEXTS = [
    f"Document {n}.\nIt says {n * n} things" + ", and more" * (n % 9) + "." for n in range(800)
]


def write_folder(folder: Path, times: int = 1) -> Path:
    """Write texts in files of every kind, each text so many times longer."""
    folder.mkdir()
    texts = ["\n".join([text] * times) for text in TEXTS]
    parts = [texts[n::5] for n in range(5)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in parts[0])
    (folder / "a.jsonl").write_text(lines)
    (folder / "b.txt").write_text("\n<|endoftext|>\n".join(parts[1]))
    with (folder / "c.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in parts[2])])
    pq.write_table(pa.table({"text": parts[3]}), folder / "d.parquet", row_group_size=20)
    packed = "".join(json.dumps({"text": text}) + "\n" for text in parts[4]).encode()
    (folder / "e.jsonl.gz").write_bytes(gzip.compress(packed))
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(preparation, "LEAST_UNIT", 4000)
    return write_folder(tmp_path / "texts")


@pytest.fixture
def large(monkeypatch):
    """Everything counts as large."""
    monkeypatch.setattr(preparation, "LARGE", 1)
    monkeypatch.setattr(preparation, "HELD_OUT", 30_000)


def sums(directory: Path) -> dict[str, str]:
    """Return the sha256 of every file, without the lock."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.name != ".lock"
    }


def read(directory: Path) -> dict[str, list[str]]:
    """Return the documents of each side."""
    tokenizer = Tokenizer.from_pretrained(directory / "tokenizer")
    sides = {}
    for side in ("train", "val"):
        shards = Shards.in_directory(directory, side)
        text = tokenizer.decode(shards.read(0, len(shards)).tolist())
        sides[side] = text.split("<|endoftext|>")[:-1]
    return sides


def test_the_bytes_are_the_same_for_any_number_of_processes_and_parts(folder, tmp_path, large):
    calls = []
    encoded = prepare_data(
        Preparation([str(folder)]), tmp_path / "one", "char", progress=lambda *at: calls.append(at)
    )
    assert calls[0][0] == 0 and calls[-1][0] == calls[-1][1]
    assert len(calls) > 8
    assert encoded == open_encoded(tmp_path / "one") == verify_data(tmp_path / "one")
    two = in_processes(2)
    prepare_data(Preparation([str(folder)]), tmp_path / "two", "char", encode=two)
    for index in (2, 3, 1):
        assert not (tmp_path / "parts" / "manifest.json").exists()
        prepare_data(Preparation([str(folder)]), tmp_path / "parts", "char", part=(index, 3))
    assert sums(tmp_path / "one") == sums(tmp_path / "two") == sums(tmp_path / "parts")


def test_a_small_text_has_the_tokens_that_training_on_it_has(folder, tmp_path):
    tokenizer = Tokenizer.train(TEXTS, 400)
    prepare_data(Preparation([str(folder)]), tmp_path / "out", tokenizer)
    encode_corpus(plan_split(documents([str(folder)])), tokenizer, tmp_path / "whole")
    for side in ("train", "val"):
        ours, whole = (Shards.in_directory(tmp_path / name, side) for name in ("out", "whole"))
        assert np.array_equal(ours.read(0, len(ours)), whole.read(0, len(whole)))
    assert len(list((tmp_path / "out").glob("0*"))) > 8


def test_every_document_is_on_one_side_and_a_tenth_validates(folder, tmp_path, large):
    encoded = prepare_data(Preparation([str(folder)]), tmp_path / "out", "char")
    sides = read(tmp_path / "out")
    assert sorted(sides["train"] + sides["val"]) == sorted(TEXTS)
    assert 40 < len(sides["val"]) < 130
    assert encoded.val.documents == len(sides["val"])
    assert encoded.train.utf8_bytes == sum(len(text.encode()) for text in sides["train"])


@pytest.mark.parametrize("size", ["small", "large"])
def test_texts_that_validate_are_not_trained_on(folder, tmp_path, size, request):
    if size == "large":
        request.getfixturevalue("large")
    val = tmp_path / "val.txt"
    val.write_text("<|endoftext|>".join([*TEXTS[:50], "Only here."]))
    prepare_data(Preparation([str(folder)], val=str(val)), tmp_path / "out", "char")
    sides = read(tmp_path / "out")
    assert sides["val"] == [*TEXTS[:50], "Only here."]
    assert sorted(sides["train"]) == sorted(TEXTS[50:])


def test_a_long_text_is_read_in_parts_that_end_with_a_line(tmp_path, large, monkeypatch):
    monkeypatch.setattr(preparation, "LEAST_UNIT", 4000)
    monkeypatch.setattr(readers, "LARGEST_PART", 1000)
    (tmp_path / "a.txt").write_text(text := "".join(f"line {n} é\n" for n in range(5000)))
    prepare_data(Preparation([str(tmp_path / "a.txt")]), tmp_path / "out", "char")
    sides = read(tmp_path / "out")
    parts = sides["train"] + sides["val"]
    assert sorted("\n".join(parts).splitlines()) == sorted(text.splitlines())
    assert all(len(part.encode()) <= 1000 for part in parts)


@given(
    st.lists(st.text("ab é\n", max_size=30), min_size=1, max_size=8),
    st.lists(st.floats(0, 1), max_size=5),
)
def test_sections_of_a_text_hold_its_documents_and_nothing_twice(tmp_path_factory, parts, cuts):
    mark = b"<|endoftext|>"
    path = tmp_path_factory.mktemp("sections") / "a.txt"
    path.write_bytes(data := mark.join(part.encode() for part in parts))
    places = sorted({0, len(data), *(int(cut * len(data)) for cut in cuts)})
    found = []
    for section in itertools.pairwise(places):
        file = readers.open_section(path.open("rb"), section, mark)
        found += readers.cut_text(file, mark)
    assert b"".join(part + mark * is_ended for part, is_ended in found) == data
    assert all(mark not in part and part.decode() is not None for part, _ in found)


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 9))
def test_sections_of_lines_hold_every_line_once(tmp_path_factory, lengths, n):
    path = tmp_path_factory.mktemp("sections") / "a.jsonl"
    path.write_bytes(data := b"".join(b"x" * length + b"\n" for length in lengths))
    cuts = [number * len(data) // n for number in range(n + 1)]
    sections = [readers.open_section(path.open("rb"), s) for s in itertools.pairwise(cuts)]
    assert b"".join(section.read() for section in sections) == data


def test_documents_do_not_depend_on_how_a_large_file_is_divided(tmp_path, large, monkeypatch):
    monkeypatch.setattr(readers, "LARGEST_PART", 500)
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(TEXTS))
    found = []
    for size in (1000, 7001, 10**9):
        monkeypatch.setattr(preparation, "LEAST_UNIT", size)
        prepare_data(Preparation([str(tmp_path / "a.txt")]), tmp_path / f"{size}", "char")
        found.append(read(tmp_path / f"{size}"))
    assert found[0] == found[1] == found[2]
    assert sorted(found[0]["train"] + found[0]["val"]) == sorted(TEXTS)


def begin(folder: Path, out: Path, **options) -> Preparation:
    """Encode the first part of two."""
    preparation = Preparation([str(folder)], **options)
    assert prepare_data(preparation, out, "char", part=(1, 2)) is None
    return preparation


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda f: (f / "b.txt").write_text("other"), r"b\.txt changed since .*out was begun"),
        (lambda f: os.utime(f / "a.jsonl", (1, 1)), r"a\.jsonl changed since"),
        (lambda f: (f / "c.csv").unlink(), r"c\.csv is gone since"),
        (lambda f: (f / "new.txt").write_text("new"), r"new\.txt is new since"),
    ],
)
def test_changed_input_is_refused_by_name(folder, tmp_path, change, problem):
    begin(folder, tmp_path / "out")
    before = sums(tmp_path / "out")
    change(folder)
    with pytest.raises(UserError, match=problem):
        prepare_data(Preparation([str(folder)]), tmp_path / "out", "char")
    assert sums(tmp_path / "out") == before


def test_other_options_and_another_tokenizer_are_refused(folder, tmp_path):
    begin(folder, out := tmp_path / "out")
    with pytest.raises(UserError) as caught:
        prepare_data(Preparation([str(folder)], keep_end_of_text=True), out, "char")
    assert caught.value.options == ("keep_end_of_text",)
    for tokenizer in ("bpe", Tokenizer.characters(["a"])):
        with pytest.raises(UserError) as caught:
            prepare_data(Preparation([str(folder)]), out, tokenizer)
        assert caught.value.options == ("tokenizer",)
    same, third = Tokenizer.train(TEXTS, 300), tmp_path / "third"
    prepare_data(Preparation([str(folder)]), third, same, part=(1, 2))
    with pytest.raises(UserError, match=r"and .*third was begun with"):
        prepare_data(Preparation([str(folder)]), third, Tokenizer.train(TEXTS, 301))
    again = Tokenizer.from_pretrained(third / "tokenizer")
    assert prepare_data(Preparation([str(folder)]), third, again) is not None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda f: (f / "e.jsonl.gz").write_bytes(b""), r"e\.jsonl\.gz changed while"),
        (lambda f: os.utime(f / "a.jsonl", (1, 1)), r"a\.jsonl changed while it was read"),
        (lambda f: (f / "new.txt").write_text("new"), r"new\.txt is new while it was read"),
    ],
)
def test_a_folder_that_changes_while_it_is_read_is_refused(folder, tmp_path, change, problem):
    def progress(done, total):
        if done and not changed:
            changed.append(change(folder))

    changed = []
    with pytest.raises(CorruptInputError, match=problem):
        prepare_data(Preparation([str(folder)]), tmp_path / "out", "char", progress=progress)
    assert not (tmp_path / "out" / "manifest.json").exists()


def cut_file(path: Path, data: bytes) -> None:
    path.write_bytes(data[: int(len(data) * 0.7)])


DAMAGE = {
    "gz": (lambda p: cut_file(p, gzip.compress(os.urandom(3000).hex().encode())), "a.txt.gz"),
    "zst": (
        lambda p: cut_file(p, zstandard.compress(os.urandom(3000).hex().encode())),
        "a.txt.zst",
    ),
    "parquet": (lambda p: cut_file(p, b"PAR1" + bytes(900) + b"PAR1"), "a.parquet"),
    "csv without the field": (lambda p: p.write_text("body\nx\n"), "a.csv"),
    "csv with a long field": (lambda p: p.write_text("text\n" + "x" * 4000), "a.csv"),
    "a long line": (lambda p: p.write_text('{"text": "' + "x" * 4000 + '"}\n'), "a.jsonl"),
    "no text": (lambda p: p.write_bytes(bytes(100)), "a.txt"),
}


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_file_is_refused_by_name_and_nothing_of_its_unit_is_left(
    tmp_path, what, size, monkeypatch, request
):
    if size == "large":
        request.getfixturevalue("large")
    monkeypatch.setattr(preparation, "LEAST_UNIT", 1)
    monkeypatch.setattr(readers, "LARGEST_LINE", 2000)
    damage, name = DAMAGE[what]
    (tmp_path / "0.txt").write_text("\n".join(TEXTS))
    damage(tmp_path / name)
    out, sources = tmp_path / "out", [str(tmp_path / "0.txt"), str(tmp_path / name)]
    with pytest.raises(CorruptInputError, match=name.replace(".", r"\.")):
        prepare_data(Preparation(sources), out, Tokenizer.train(TEXTS, 300))
    assert not (out / "manifest.json").exists()
    units = sorted(path.name for path in out.glob("*") if path.name.isdigit())
    assert all((out / unit / "unit.json").exists() for unit in units)
    assert not list(out.glob(".0*"))


def test_what_cannot_be_read_is_refused_before_anything_is_written(folder, tmp_path):
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    for source, problem in (("a.pdf", r"a\.pdf is not read"), ("none", "no file matches")):
        with pytest.raises(UserError, match=problem):
            Preparation([str(tmp_path / source)])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is no file"):
        Preparation([str(tmp_path / "pipe")])


def test_a_directory_with_other_files_and_one_in_use_are_refused(folder, tmp_path):
    preparation = Preparation([str(folder)])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").write_text("")
    with pytest.raises(UserError, match="mine is not empty"):
        prepare_data(preparation, tmp_path / "mine", "char")

    def progress(done, total):
        with pytest.raises(UserError, match="is in use"):
            prepare_data(preparation, tmp_path / "out", "char")

    assert prepare_data(preparation, tmp_path / "out", "char", progress=progress) is not None


def test_a_process_that_is_killed_is_told_and_the_rest_goes_on(folder, tmp_path):
    def progress(done, total):
        if done:
            multiprocessing.active_children()[0].kill()

    preparation = Preparation([str(folder)])
    with pytest.raises(NoRoomError, match="was killed"):
        prepare_data(
            preparation, tmp_path / "out", "char", encode=in_processes(2), progress=progress
        )
    assert any((tmp_path / "out").glob("0*/unit.json"))
    assert prepare_data(preparation, tmp_path / "out", "char") is not None
    prepare_data(preparation, tmp_path / "whole", "char")
    assert sums(tmp_path / "out") == sums(tmp_path / "whole")


def test_verify_names_what_changed_and_its_hint_repairs_it(folder, tmp_path):
    preparation, out = Preparation([str(folder)]), tmp_path / "out"
    prepare_data(preparation, out, "char")
    before = sums(out)
    shard = out / "000002" / "train_000000.bin"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    (out / "000001" / "train_000000.bin").unlink()
    with pytest.raises(CheckFailedError, match=r"2 of .* 000001/train_000000\.bin, 000002/") as e:
        verify_data(out)
    assert "delete 000001, 000002" in e.value.hint
    shutil.rmtree(out / "000001")
    shutil.rmtree(out / "000002")
    prepare_data(preparation, out, "char")
    assert sums(out) == before
    verify_data(out)


@pytest.fixture
def command(tmp_path) -> tuple:
    """The arguments of a command, and the directory that it makes."""
    folder = write_folder(tmp_path / "texts", 6)
    arguments = (folder, "--tokenizer", "char", "--workers", "1")
    assert Command(tmp_path / "whole", arguments, verb=PREPARE, fault=Fault(None)).wait() == 0
    return arguments, tmp_path / "whole"


def operations(out: Path) -> list[str]:
    return Path(f"{out}.operations").read_text().splitlines()


@pytest.mark.parametrize("moments", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_killed_at_any_moment_it_ends_with_the_same_manifest(command, tmp_path, moments):
    arguments, whole = command
    every = len(operations(whole))
    for number in range(moments % 7, every, every // moments):
        out = tmp_path / f"killed-{number}"
        killed = Command(out, arguments, verb=PREPARE, fault=Fault(number))
        assert killed.wait() == KILLED, killed.output()
        again = Command(out, arguments, verb=PREPARE)
        assert again.wait() == 0, again.output()
        assert sums(out) == sums(whole), f"killed at {operations(out)[-1]}"
        assert not list(out.rglob(".*.tmp-*"))


def test_a_full_disk_is_our_error_and_nothing_half_written_is_trusted(command, tmp_path):
    arguments, whole = command
    every = len(operations(whole))
    codes = set()
    for number in range(3, every, every // 4):
        out = tmp_path / f"full-{number}"
        fault = Fault(number, error=errno.ENOSPC, lasting=True)
        full = Command(out, arguments, verb=PREPARE, fault=fault)
        codes.add(full.wait())
        assert "Traceback" not in full.output()
        assert Command(out, arguments, verb=PREPARE).wait() == 0
        assert sums(out) == sums(whole)
    assert codes <= {0, 4} and 4 in codes


@pytest.mark.slow
def test_killed_with_two_workers_at_twenty_moments(command, tmp_path):
    arguments, whole = command
    arguments, chance, killed = (*arguments[:-1], "2"), random.Random(3), 0
    while killed < 20:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        while True:
            process = Command(tmp_path / "out", arguments, verb=PREPARE)
            code = process.wait(chance.uniform(0, 2.5) if killed < 20 else None)
            if code is not None:
                assert code == 0, process.output()
                break
            process.kill()
            killed += 1
        assert sums(tmp_path / "out") == sums(whole)


def test_the_command_tells_what_it_wrote_and_notes_what_it_found(folder, tmp_path, capsys):
    out = str(tmp_path / "out")
    arguments = ["data", "prepare", str(folder), "--out", out, "--tokenizer", "char"]
    assert main([*arguments, "--workers", "1", "--part", "1/2", "-f", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"directory": out, "complete": False}
    assert main([*arguments, "--workers", "1"]) == 0
    printed, err = capsys.readouterr()
    assert "documents" in printed and f"tiedgpt train {out}" in printed
    assert "b.txt has 160 documents, separated by <|endoftext|>" in " ".join(err.split())
    assert main(["data", "verify", out]) == 0
    assert "every file is as it was written" in capsys.readouterr().out
    (tmp_path / "out" / "000000" / "unit.json").unlink()
    (tmp_path / "out" / "000000" / "train_000000.bin").unlink()
    assert main(["data", "verify", out]) == 6


def test_a_log_has_the_rate_and_the_time_left(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tiedgpt.cli.data.LOG_SECONDS", 0)
    arguments = ["--out", str(tmp_path / "out"), "--tokenizer", "char", "--workers", "1"]
    assert main(["data", "prepare", str(folder), *arguments]) == 0
    lines = " ".join(capsys.readouterr().err.split()).split("note: ")
    told = [line for line in lines if line.startswith("encoding: ")]
    assert len(told) > 8
    assert re.fullmatch(
        r"encoding: [\d,.]+ \w+ of [\d,.]+ \w+, [\d,.]+ \w+/s, \d+ minutes left ?", told[3]
    )


@pytest.mark.parametrize("part", ["0/2", "3/2", "2", "a/b", "1/0"])
def test_a_part_is_one_of_so_many(part, tmp_path, capsys):
    assert main(["data", "prepare", "a.txt", "--out", str(tmp_path), "--part", part]) == 1
    assert f"--part must be I/N with I from 1 to N, got {part}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_ray_cluster_of_two_workers_writes_the_same_bytes(folder, tmp_path, large):
    ray = pytest.importorskip("ray")
    from tiedgpt.data import on_ray

    prepare_data(Preparation([str(folder)]), tmp_path / "here", "char")
    ray.init(num_cpus=2, include_dashboard=False)
    try:
        prepare_data(Preparation([str(folder)]), tmp_path / "ray", "char", encode=on_ray("auto"))
        (tmp_path / "bad.csv").write_text("body\nx\n")
        with pytest.raises(CorruptInputError, match=r"bad\.csv:2: the field 'text' is missing"):
            prepare_data(
                Preparation([str(folder), str(tmp_path / "bad.csv")]),
                tmp_path / "bad",
                Tokenizer.train(TEXTS, 300),
                encode=on_ray("auto"),
            )
    finally:
        ray.shutdown()
    assert sums(tmp_path / "here") == sums(tmp_path / "ray")
