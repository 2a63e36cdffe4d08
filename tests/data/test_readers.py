"""Compressed files, tables and Parquet give the documents that plain files give, or our error."""

import bz2
import gzip
import json
import lzma
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tiedgpt.data import ExampleReader, documents, readers
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.text import Tokenizer

COMPRESSORS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
TEXTS = ["One.\nTwo lines.", 'quoted "this", and a comma', "drei – größer"]


def texts(*sources, **options):
    return [document.text for document in documents(sources, **options)]


def table(delimiter: str) -> str:
    rows = ('"' + text.replace('"', '""') + '"' for text in TEXTS)
    return f"id{delimiter}text\n" + "".join(f"{n}{delimiter}{row}\n" for n, row in enumerate(rows))


def parquet(tmp_path, name="a.parquet", **columns):
    path = tmp_path / name
    pq.write_table(pa.table(columns or {"id": [1, 2, 3], "text": TEXTS}), path)
    return str(path)


@pytest.mark.parametrize(
    "between",
    [
        "<|endoftext|>", "\n<|endoftext|>\n", "<|endoftext|>\n",
        "\n\n<|endoftext|>\n\n<|endoftext|>\n", "\n", "\n\n", "<|startoftext|>",
    ],
)  # fmt: skip
@pytest.mark.parametrize("end", ["", "\n", "<|endoftext|>", "<|endoftext|>\n"])
def test_the_end_of_text_separates_documents_of_a_text_file(write, between, end):
    parts = ["One.\n\nStill one.", "  Two", "Three"]
    corpus = documents([write("a.txt", between.join(parts) + end)])
    whole = between.join(parts) + end.partition("<|endoftext|>")[0]
    expected = parts if "<|endoftext|>" in between else [whole]
    assert [document.text for document in corpus] == expected
    notes = [note for note in corpus.remarks.notes() if "--keep-end-of-text" in note]
    assert len(notes) == ("<|endoftext|>" in between + end)
    assert all(f"{len(expected)} document" in note for note in notes)


def test_the_end_of_text_is_ordinary_text_on_request_and_in_records(write):
    text = "a<|endoftext|>b"
    assert texts(write("a.txt", text), keep_end_of_text=True) == [text]
    assert texts(write("a.jsonl", f'{{"text": "{text}"}}\n')) == [text]


def test_a_file_of_separators_only_has_no_text(write):
    with pytest.raises(UserError, match=r"no text in .*a\.txt"):
        texts(write("a.txt", "<|endoftext|>\n<|endoftext|>"))


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.tsv", "a.parquet"])
def test_a_compressed_file_reads_like_the_plain_one(write, tmp_path, name, suffix):
    made = {
        "a.txt": "<|endoftext|>".join(TEXTS).encode(),
        "a.jsonl": "".join(f'{{"text": {json.dumps(t)}}}\n' for t in TEXTS).encode(),
        "a.csv": table(",").encode(),
        "a.tsv": table("\t").encode(),
    }
    data = made[name] if name in made else Path(parquet(tmp_path)).read_bytes()
    compressed = COMPRESSORS[suffix](data)
    assert texts(write(name, data)) == TEXTS
    assert texts(write(name + suffix, compressed)) == TEXTS
    if name == "a.txt":  # several members or frames, as `cat a.gz b.gz` makes
        assert texts(write("b.txt" + suffix, compressed + COMPRESSORS[suffix](b" more"))) == [
            *TEXTS[:2], TEXTS[2] + " more",
        ]  # fmt: skip


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("cut", [0.5, 0.98])
@pytest.mark.parametrize("name", ["a.txt", "a.csv"])
def test_a_truncated_or_damaged_compressed_file_is_refused_by_name(write, suffix, cut, name):
    whole = COMPRESSORS[suffix](table(",").encode() * 50)
    for data in (whole[: int(len(whole) * cut)], whole[:20] + b"damaged!" + whole[28:], b"no such"):
        with pytest.raises(CorruptInputError, match=name.replace(".", r"\.") + "\\" + suffix):
            texts(write(name + suffix, data))


def test_a_truncated_parquet_file_is_refused_by_name(tmp_path):
    path = Path(parquet(tmp_path))
    data = path.read_bytes()
    for broken in (data[: len(data) // 2], b"PAR1", b""):
        path.write_bytes(broken)
        with pytest.raises(CorruptInputError, match=r"a\.parquet .*no Parquet file: .*fetch"):
            texts(str(path))


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.parquet"])
def test_the_text_field_can_be_named_and_is_required_if_ambiguous(write, tmp_path, name):
    if name == "a.parquet":
        path = parquet(tmp_path, body=TEXTS, id=["1", "2", "3"])
    else:
        delimiter = "," if name == "a.csv" else "\t"
        path = write(name, table(delimiter).replace("text", "body", 1))
    assert texts(path, text_field="body") == TEXTS
    with pytest.raises(
        CorruptInputError, match=r"'text' is missing; there are .*'body'.*--text-field"
    ):
        texts(path)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("text,n\nfine,1\nonly one\n", ":3: the line does not have the 2 fields"),
        ("text\nfine\none,two\n", ":3: the line does not have the 1 fields"),
        ('text,n\n"of\nthree\nlines",1\n\nbad\n', ":6: the line does not have the 2 fields"),
        ('text,n\nfine,1\n"of\ntwo lines"\nfine,2\n', ":3: the line does not have the 2 fields"),
        ('text\nfine\n"never\nclosed\n', ":3: .*quote|unexpected end"),
        ('text\nfine\n"closed" and more\n', ":3: .*expected after"),
        ('"text\nfine\n', ":1: .*unexpected end"),
        (b"text\n\xff\xfe\xfd", ":2: no text in UTF-8: .*--encoding"),
        (b"t\xffxt\nfine\n", ":1: no text in UTF-8: .*--encoding"),
    ],
)
def test_a_bad_row_is_refused_with_the_line_in_which_it_begins(write, content, problem, end):
    data = content if isinstance(content, bytes) else content.encode()
    with pytest.raises(CorruptInputError, match=problem):
        texts(write("a.csv", data.replace(b"\n", end.encode())))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_row_is_placed_in_the_line_in_which_it_begins(write, end):
    table = 'text,n\n"one\ntwo",1\n\nthree,2\n'
    path = write("reviews.csv", table.replace("\n", end).encode())
    documents_of_table = [*documents([path])]
    assert [document.name for document in documents_of_table] == [f"{path}:2", f"{path}:5"]
    assert [document.text for document in documents_of_table] == [f"one{end}two", "three"]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.tsv.gz"])
def test_rows_joined_by_a_quote_have_a_note_and_are_apart_without_quoting(write, name):
    delimiter = "," if name == "a.csv" else "\t"
    lines = ["n,text", '1,"tis one', "2,two", '3,three"', '4,say "four"', "5,five"]
    table = "\n".join(lines).replace(",", delimiter) + "\n"
    path = write(name, gzip.compress(table.encode()) if name.endswith(".gz") else table)
    corpus = documents([path])
    joined = f"tis one\n2{delimiter}two\n3{delimiter}three"
    for _ in range(2):
        assert [document.text for document in corpus] == [joined, 'say "four"', "five"]
        (note,) = [note for note in corpus.remarks.notes() if "--no-quoting" in note]
        assert f"{name} has 1 row of several lines" in note and "line 2)" in note
    apart = documents([path], quoting=False)
    assert [d.text for d in apart] == ['"tis one', "two", 'three"', 'say "four"', "five"]
    assert apart.remarks.notes() == ["1 field was not read: n (5 lines)"]


def test_line_ends_in_a_text_file_are_newlines_and_strings_of_records_are_kept(write, tmp_path):
    text = "one\r\ntwo\u2028\x85three\rfour"
    assert texts(write("a.txt", text)) == [text.replace("\r\n", "\n")]
    assert texts(write("a.jsonl", json.dumps({"text": text}) + "\r\n")) == [text]
    assert texts(write("a.csv", f'text\r\n"{text}"\r\n')) == [text]
    assert texts(parquet(tmp_path, text=[text])) == [text]


LINES = {".jsonl": '{{"text": "{}"}}\n', ".csv": "{}\n", ".tsv": "{}\n"}


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("suffix", LINES)
@pytest.mark.parametrize(
    ("encoding", "written", "text"),
    [
        ("cp1252", "cp1252", "größer €"),
        ("utf-16", "utf-16", "größer €"),
        ("utf-16-le", "utf-16-le", "größer 語"),
        ("utf-32", "utf-32", "größer 語"),
        ("shift_jis", "shift_jis", "日本語"),
        ("gb18030", "gb18030", "größer 語"),
        ("cp1252", "utf-8", "größer €"),
        ("utf-8", "utf-8-sig", "größer €"),
        ("auto", "utf-8-sig", "größer €"),
        ("auto", "utf-16", "größer €"),
        ("auto", "utf-32", "größer €"),
    ],
)
def test_lines_are_utf_8_or_in_the_encoding_that_is_named_or_marked(
    write, suffix, encoding, written, text, compress
):
    lines = LINES[suffix].format(text) * 2
    data = (lines if suffix == ".jsonl" else "text\n" + lines).encode(written)
    name = f"a{suffix}.gz" if compress else f"a{suffix}"
    path = write(name, gzip.compress(data) if compress else data)
    assert texts(path, encoding=encoding) == [text] * 2
    tokenizer = Tokenizer.characters([text])
    examples = [*ExampleReader(documents([path], encoding=encoding), tokenizer)]
    assert [tokenizer.decode(example.ids[:-1]) for example in examples] == [text] * 2


@pytest.mark.parametrize("suffix", LINES)
@pytest.mark.parametrize(
    ("encoding", "remedy"),
    [("auto", "--encoding (often cp1252"), ("ascii", "another"), ("utf-16", "another")],
)
def test_an_encoding_that_cannot_help_is_not_proposed(write, suffix, encoding, remedy):
    lines = "text\n" + LINES[suffix].format("größer")
    path = write(f"a{suffix}", lines.removeprefix("text\n" * (suffix == ".jsonl")).encode("cp1252"))
    with pytest.raises(CorruptInputError, match=f"a{suffix}") as error:
        texts(path, encoding=encoding)
    assert remedy in error.value.hint
    assert encoding not in error.value.hint


def test_tables_hold_examples(write, tmp_path):
    tokenizer = Tokenizer.characters(["abcdefgh"])
    csv = write("a.csv", "prompt,completion\nab,cd\nef,gh\n")
    parquet_path = parquet(tmp_path, prompt=["ab", "ef"], completion=["cd", "gh"])
    of_csv, of_parquet = (
        [list(example.ids) for example in ExampleReader(documents([path]), tokenizer)]
        for path in (csv, parquet_path)
    )
    assert of_csv == of_parquet
    assert len(of_csv) == 2


def test_a_line_without_end_is_refused(write, monkeypatch):
    monkeypatch.setattr(readers, "LARGEST_LINE", 1000)
    with pytest.raises(CorruptInputError, match=r"a\.jsonl:2: a line of more than 1,000 bytes"):
        texts(write("a.jsonl", '{"text": "short"}\n{"text": "' + "x" * 2000 + '"}\n'))


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    path = parquet(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match="need the package pyarrow") as caught:
        texts(path)
    assert "tiedgpt[data]" in caught.value.hint


def test_two_columns_of_one_name_are_refused_and_columns_without_a_name_are_not(write, tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text"] * 2), path)
    for twice in (str(path), write("a.csv", "text,text\na,b\n"), write("a.tsv", "n\tn\ttext\n")):
        with pytest.raises(CorruptInputError, match=r"columns with the name '(text|n)': rename"):
            texts(twice)
    assert texts(write("b.csv", "text,,\na,,\n")) == ["a"]


def test_parquet_values_that_python_cannot_hold_are_refused_by_name(tmp_path):
    offsets, data = (pa.py_buffer(part) for part in (b"\0\0\0\0\3\0\0\0", b"\xff\xfe\xfd"))
    not_utf8 = pa.Array.from_buffers(pa.string(), 1, [None, offsets, data])
    nowhere = pa.array([1], pa.timestamp("s", tz="Nowhere/There"))
    for columns in ({"text": not_utf8}, {"text": ["a"], "at": nowhere}):
        with pytest.raises(CorruptInputError, match=r"a\.parquet .*no Parquet file: .*fetch"):
            texts(parquet(tmp_path, **columns))
