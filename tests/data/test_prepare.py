"""Texts of any size: the same shards for any number of processes and after any kill."""

import contextlib
import csv
import errno
import gzip
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.train.trials import KILLED, Command, Fault, operations
from tiedgpt import Tokenizer
from tiedgpt.cli.main import main
from tiedgpt.data import (
    Shards,
    documents,
    encode_corpus,
    open_encoded,
    plan_preparation,
    plan_split,
    prepare_data,
    readers,
    verify_data,
)
from tiedgpt.data import prepare as preparation
from tiedgpt.errors import CheckFailedError, CorruptInputError, NoRoomError, UserError
from tiedgpt.files import remove

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
    monkeypatch.setattr(preparation, "MIN_PART_BYTES", 4000)
    return write_folder(tmp_path / "texts")


@pytest.fixture
def large(monkeypatch):
    """Everything counts as large."""
    monkeypatch.setattr(preparation, "LARGE_BYTES", 1)
    monkeypatch.setattr(preparation, "HELD_OUT_BYTES", 30_000)


@pytest.fixture(params=["small", "large"])
def either_size(request):
    """Prepare as usual, and with everything large."""
    if request.param == "large":
        request.getfixturevalue("large")


def prepare(sources, out: Path, tokenizer="char", *, val=None, **options):
    """Prepare sources in a directory."""
    names = [str(source) for source in (sources if isinstance(sources, list) else [sources])]
    plan = plan_preparation(names, val=None if val is None else str(val))
    return prepare_data(plan, out, tokenizer, **options)


def sums(directory: Path) -> dict[str, str]:
    """Return the sha256 of every file."""
    files = {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}
    return {str(p.relative_to(directory)): hashlib.sha256(x).hexdigest() for p, x in files.items()}


def read(directory: Path) -> dict[str, list[str]]:
    """Return the documents of each side."""
    tokenizer = Tokenizer.from_pretrained(directory / "tokenizer")
    encoded, sides = open_encoded(directory), {}
    for side in ("train", "val"):
        shards = encoded.open_shards(side)
        text = tokenizer.decode(shards.read(0, len(shards)).tolist())
        sides[side] = text.split("<|endoftext|>")[:-1]
    return sides


def test_bytes_are_the_same_for_any_number_of_processes_and_tasks(folder, tmp_path, large):
    calls = []
    one = tmp_path / "one"
    encoded = prepare(folder, one, progress=lambda *at: calls.append(at))
    assert {stage for stage, *_ in calls} == {"encoding"}
    assert calls[0][1] == 0 and calls[-1][1] == calls[-1][2]
    assert len(calls) > 8
    assert encoded == open_encoded(one) == verify_data(one)
    prepare(folder, tmp_path / "two", workers=2)
    for index in (2, 3, 1):
        assert not (tmp_path / "tasks" / "manifest.json").exists()
        prepare(folder, tmp_path / "tasks", task=(index, 3))
    assert sums(one) == sums(tmp_path / "two") == sums(tmp_path / "tasks")


def test_small_text_is_split_and_encoded_as_in_training(folder, tmp_path):
    sizes = {path.suffix: path.stat().st_size for path in folder.iterdir()}
    n_bytes = sum(size * (4 if kind in (".gz", ".parquet") else 1) for kind, size in sizes.items())
    assert plan_preparation([str(folder)]).n_bytes == n_bytes
    tokenizer = Tokenizer.train(TEXTS, 400)
    prepare(folder, tmp_path / "out", tokenizer)
    encode_corpus(plan_split(documents([str(folder)])), tokenizer, tmp_path / "all")
    for side in ("train", "val"):
        ours = open_encoded(tmp_path / "out").open_shards(side)
        expected = Shards.in_directory(tmp_path / "all", side)
        assert np.array_equal(ours.read(0, len(ours)), expected.read(0, len(expected)))
    assert len(list((tmp_path / "out").glob("0*"))) > 8


def test_every_document_is_on_one_side_and_a_tenth_validates(folder, tmp_path, large):
    encoded = prepare(folder, tmp_path / "out")
    sides = read(tmp_path / "out")
    assert sorted(sides["train"] + sides["val"]) == sorted(TEXTS)
    assert 40 < len(sides["val"]) < 130
    assert encoded.val.documents == len(sides["val"])
    assert encoded.train.utf8_bytes == sum(len(text.encode()) for text in sides["train"])


def test_from_64_mb_on_texts_are_not_read_to_split_them_and_at_most_64_mb_validate(tmp_path):
    (path := tmp_path / "a.jsonl").write_text('{"text": "ab"}\n')
    for size, share in ((64_000_000, 0.1), (1_280_000_000, 0.05)):
        os.truncate(path, size)  # the rest is no JSON
        assert plan_preparation([str(path)]).parts[0].rules.held_out.share == share
    os.truncate(path, 63_999_999)
    with pytest.raises(CorruptInputError, match=r"a\.jsonl:2"):
        plan_preparation([str(path)])


def test_validation_text_is_not_trained_on(folder, tmp_path, either_size):
    val = tmp_path / "val.txt"
    val.write_text("<|endoftext|>".join([*TEXTS[:50], "Only here."]))
    prepare(folder, tmp_path / "out", val=val)
    sides = read(tmp_path / "out")
    assert sides["val"] == [*TEXTS[:50], "Only here."]
    assert sorted(sides["train"]) == sorted(TEXTS[50:])


def test_a_training_file_that_is_also_validation_text_has_a_note(tmp_path, either_size, capsys):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"Text of {name}.")
    a, b = str(tmp_path / "a.txt"), str(tmp_path / "b.txt")
    command = ["data", "prepare", a, b, "--val", a, "--tokenizer", "char", "--workers", "1"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    err = " ".join(capsys.readouterr().err.split())
    assert f"1 document is also in --val and not trained on: {a}" in err
    assert read(tmp_path / "out") == {"train": ["Text of b."], "val": ["Text of a."]}


def test_long_text_is_divided_at_line_ends(tmp_path, large, monkeypatch):
    cut = readers.cut_text(io.BytesIO(b"a\n" * (1 << 19) + b"bc"), b"")
    assert [len(part) for part, _ in cut] == [1 << 20, 2]
    monkeypatch.setattr(preparation, "MIN_PART_BYTES", 4000)
    monkeypatch.setattr(readers, "LARGEST_PART", 1000)
    (tmp_path / "a.txt").write_text(text := "".join(f"line {n} é\n" for n in range(5000)))
    prepare(tmp_path / "a.txt", tmp_path / "out")
    sides = read(tmp_path / "out")
    parts = sides["train"] + sides["val"]
    assert sorted("\n".join(parts).splitlines()) == sorted(text.splitlines())
    assert all(len(part.encode()) <= 1000 for part in parts)


@given(
    st.lists(st.text("ab é\n", max_size=30), min_size=1, max_size=8),
    st.lists(st.floats(0, 1), max_size=5),
)
def test_sections_of_a_text_hold_each_document_once(tmp_path_factory, parts, cuts):
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


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16"])
def test_lines_in_another_encoding_are_prepared_whole(tmp_path, encoding):
    texts = [f"größer {n} " * 97 for n in range(211)]
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_bytes(lines.encode(encoding))
    plan = plan_preparation([str(tmp_path / "a.jsonl")], encoding=encoding)
    assert len(plan.parts) == {"cp1252": 4, "utf-16": 1}[encoding]
    assert [document.text for piece in plan.parts for document in piece.open()[0]] == texts


def test_documents_do_not_depend_on_the_size_of_parts(tmp_path, large, monkeypatch):
    monkeypatch.setattr(readers, "LARGEST_PART", 500)
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(TEXTS))
    results = []
    for size in (1000, 7001, 10**9):
        monkeypatch.setattr(preparation, "MIN_PART_BYTES", size)
        prepare(tmp_path / "a.txt", tmp_path / f"{size}")
        results.append(read(tmp_path / f"{size}"))
    assert results[0] == results[1] == results[2]
    assert sorted(results[0]["train"] + results[0]["val"]) == sorted(TEXTS)


CHANGES = {
    "b.txt changed": lambda f: (f / "b.txt").write_text("other"),
    "a.jsonl changed": lambda f: os.utime(f / "a.jsonl", (1, 1)),
    "c.csv is gone": lambda f: (f / "c.csv").unlink(),
    "new.txt is new": lambda f: (f / "new.txt").write_text("new"),
}


@pytest.mark.parametrize("problem", CHANGES)
def test_changed_input_is_refused_by_name(folder, tmp_path, problem):
    out = tmp_path / "out"
    assert prepare(folder, out, task=(1, 2)) is None
    before = sums(out)
    CHANGES[problem](folder)
    with pytest.raises(UserError, match=f"{problem} since .*out was begun"):
        prepare(folder, out)
    assert sums(out) == before


@pytest.mark.parametrize("problem", [name for name in CHANGES if name != "c.csv is gone"])
def test_input_that_changes_while_it_is_read_is_refused(folder, tmp_path, problem):
    def progress(stage, done, total):
        if done == total:
            CHANGES[problem](folder)

    with pytest.raises(CorruptInputError, match=f"{problem} while it was read"):
        prepare(folder, tmp_path / "out", progress=progress)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_other_options_and_another_tokenizer_are_refused(folder, tmp_path):
    prepare(folder, out := tmp_path / "out", task=(1, 2))
    with pytest.raises(UserError) as caught:
        prepare_data(plan_preparation([str(folder)], keep_end_of_text=True), out, "char")
    assert caught.value.options == ("keep_end_of_text",)
    for tokenizer in ("bpe", Tokenizer.characters(["a"])):
        with pytest.raises(UserError) as caught:
            prepare(folder, out, tokenizer)
        assert caught.value.options == ("tokenizer",)
    third = tmp_path / "third"
    prepare(folder, third, Tokenizer.train(TEXTS, 300), task=(1, 2))
    with pytest.raises(UserError, match=r"and .*third was begun with"):
        prepare(folder, third, Tokenizer.train(TEXTS, 301))
    same = Tokenizer.from_pretrained(third / "tokenizer")
    assert prepare(folder, third, same) is not None


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


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_file_is_refused_by_name_and_leaves_no_part(
    tmp_path, name, either_size, monkeypatch
):
    monkeypatch.setattr(preparation, "MIN_PART_BYTES", 1)
    monkeypatch.setattr(readers, "LARGEST_LINE", 2000)
    damage, file = DAMAGE[name]
    (tmp_path / "0.txt").write_text("\n".join(TEXTS))
    damage(tmp_path / file)
    out = tmp_path / "out"
    with pytest.raises(CorruptInputError, match=file.replace(".", r"\.")):
        prepare([tmp_path / "0.txt", tmp_path / file], out, Tokenizer.train(TEXTS, 300))
    assert not (out / "manifest.json").exists()
    assert all((part / "part.json").exists() for part in out.glob("0*"))
    assert not list(out.glob(".0*"))


def test_unreadable_sources_are_refused_before_anything_is_written(folder, tmp_path):
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    for source, problem in (("a.pdf", r"a\.pdf is not read"), ("none", "no file matches")):
        with pytest.raises(UserError, match=problem):
            plan_preparation([str(tmp_path / source)])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is no file"):
        plan_preparation([str(tmp_path / "pipe")])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").write_text("")
    with pytest.raises(UserError, match="mine is not empty"):
        prepare(folder, tmp_path / "mine")
    assert os.listdir(tmp_path / "mine") == ["precious"]


def test_two_processes_may_encode_the_same_parts(folder, tmp_path):
    def progress(stage, done, total):
        if len(calls) < 3:
            calls.append(done)
            prepare(folder, tmp_path / "out", task=(len(calls), 3))

    calls = []
    prepare(folder, tmp_path / "out", progress=progress)
    prepare(folder, tmp_path / "expected")
    assert sums(tmp_path / "out") == sums(tmp_path / "expected")


def test_killed_worker_is_reported_and_the_same_call_continues(folder, tmp_path):
    def progress(stage, done, total):
        if done:
            with contextlib.suppress(ProcessLookupError):  # killed already
                os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)

    with pytest.raises(NoRoomError, match="was killed"):
        prepare(folder, tmp_path / "out", workers=2, progress=progress)
    assert any((tmp_path / "out").glob("0*/part.json"))
    prepare(folder, tmp_path / "out")
    prepare(folder, tmp_path / "expected")
    assert sums(tmp_path / "out") == sums(tmp_path / "expected")


def flip_bit(path: Path) -> None:
    """Flip a bit in the middle of a file, and keep its size."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_verify_finds_a_flipped_bit_in_any_file_and_its_hint_repairs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "MIN_PART_BYTES", 30_000)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    out = tmp_path / "out"
    prepare(tmp_path / "a.jsonl", out)
    before = sums(out)
    assert len(before) >= 8
    for name in before:
        flip_bit(out / name)
        with pytest.raises(CheckFailedError, match=name.replace(".", r"\.")) as caught:
            verify_data(out)
        top = name.partition("/")[0]
        assert "delete" in caught.value.hint
        remove(out / top)
        prepare(tmp_path / "a.jsonl", out)
        assert sums(out) == before, name
    verify_data(out)


def test_changed_count_does_not_enter_the_next_manifest(folder, tmp_path):
    prepare(folder, tmp_path / "out", task=(1, 2))
    record = tmp_path / "out" / "000000" / "part.json"
    facts = json.loads(record.read_text())
    facts["counts"]["train"]["tokens"] += 1
    record.write_text(json.dumps(facts))
    prepare(folder, tmp_path / "out")
    prepare(folder, tmp_path / "expected")
    assert sums(tmp_path / "out") == sums(tmp_path / "expected")


@pytest.fixture
def command(tmp_path) -> tuple:
    """The arguments of a command, and the directory that it makes."""
    folder = write_folder(tmp_path / "texts", 6)
    arguments = (folder, "--tokenizer", "char", "--workers", "1")
    assert Command(tmp_path / "whole", arguments, verb=PREPARE, fault=Fault(None)).wait() == 0
    return arguments, tmp_path / "whole"


@pytest.mark.parametrize("moments", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_a_preparation_killed_at_any_moment_ends_with_the_same_manifest(command, tmp_path, moments):
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


def test_a_full_disk_is_our_error_and_partial_files_are_not_trusted(command, tmp_path):
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
def test_killed_commands_with_two_workers_resume_to_the_same_bytes(command, tmp_path):
    arguments, expected = command
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
        assert sums(tmp_path / "out") == sums(expected)


def test_command_shows_the_result_and_the_next_command(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tiedgpt.cli.data.LOG_SECONDS", 0)
    out = str(tmp_path / "out")
    arguments = ["data", "prepare", str(folder), "--out", out, "--tokenizer", "bpe"]
    arguments += ["--vocab-size", "300", "--workers", "1"]
    assert main([*arguments, "--part", "1/2", "-f", "json"]) == 0
    printed, err = capsys.readouterr()
    assert json.loads(printed) == {"directory": out, "complete": False}
    lines = " ".join(err.split()).split("note: ")
    assert lines[1] == f"preparing {folder} in {out} "
    assert lines[2].startswith("reading text for the tokenizer: ")
    assert any(line.startswith("merging pairs for the tokenizer") for line in lines)
    progress = [line for line in lines if line.startswith("encoding: ")]
    assert len(progress) > 4
    pattern = r"encoding: [\d,.]+ \w+ of [\d,.]+ \w+, [\d,.]+ \w+/s, \d+ s left ?"
    assert re.fullmatch(pattern, progress[2])
    assert main(arguments) == 0
    printed, err = capsys.readouterr()
    labels = [line.split()[0] for line in printed.splitlines() if not line.startswith(" ")]
    assert labels == ["train", "validate", "next"] and f"tiedgpt train {out}" in printed
    assert "b.txt has 160 documents, separated by <|endoftext|>" in " ".join(err.split())
    assert main(["data", "verify", out]) == 0
    *sides, verified = capsys.readouterr().out.splitlines()
    assert sides == printed.splitlines()[:2] and "every file is as it was written" in verified
    (tmp_path / "out" / "000000" / "train_000000.bin").unlink()
    assert main(["data", "verify", out]) == 6


@pytest.mark.parametrize("part", ["0/2", "3/2", "2", "a/b", "1/0"])
def test_part_must_be_one_of_n(part, tmp_path, capsys):
    assert main(["data", "prepare", "a.txt", "--out", str(tmp_path), "--part", part]) == 1
    assert f"--part must be I/N with I from 1 to N, got {part}" in capsys.readouterr().err


@pytest.mark.slow
def test_ray_cluster_of_two_workers_writes_the_same_bytes(folder, tmp_path, large):
    ray = pytest.importorskip("ray")

    prepare(folder, tmp_path / "here")
    ray.init(num_cpus=2, include_dashboard=False)
    try:
        prepare(folder, tmp_path / "ray", ray="auto")
        (tmp_path / "bad.csv").write_text("body\nx\n")
        with pytest.raises(CorruptInputError, match=r"bad\.csv:2: the field 'text' is missing"):
            bad = [folder, tmp_path / "bad.csv"]
            prepare(bad, tmp_path / "bad", Tokenizer.train(TEXTS, 300), ray="auto")
    finally:
        ray.shutdown()
    assert sums(tmp_path / "here") == sums(tmp_path / "ray")
