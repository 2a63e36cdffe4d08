import io
import json
import os
import threading
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tiedgpt.cli.main import main
from tiedgpt.data import documents, plan_preparation, prepare_data
from tiedgpt.errors import CorruptInputError, UserError


def texts(*sources, **options):
    return [document.text for document in documents(sources, **options)]


def test_a_text_file_is_one_document_without_its_byte_order_mark(write):
    path = write("a.txt", b"\xef\xbb\xbfOne.\r\nTwo.\n")
    assert [(d.name, d.text) for d in documents([path])] == [(path, "One.\nTwo.\n")]


def test_a_long_text_in_utf16_is_refused_where_files_are_read_in_parts(write, monkeypatch):
    monkeypatch.setattr("tiedgpt.data.corpus.LARGEST_LINE", 2000)
    fits, exceeds = (write(f"{n}.txt", ("x" * n).encode("utf-16")) for n in (999, 1000))
    assert [d.text for d in replace(documents([fits]), in_parts=True)] == ["x" * 999]
    assert texts(exceeds) == ["x" * 1000]
    with pytest.raises(CorruptInputError, match=r"1000\.txt is too large for UTF-16.*UTF-8"):
        list(replace(documents([exceeds]), in_parts=True))


def test_a_folder_is_read_in_sorted_order_and_counts_skipped_files(write, tmp_path):
    write("f/b/z.txt", "third")
    write("f/b.md", "second")
    write("f/a.txt", "first")
    write("f/.hidden", "no")
    write("f/.git/config", "no")
    write("f/__pycache__/a.txt", "no")
    write("f/cache/CACHEDIR.TAG", "Signature: 8a477f597d28d172789f06886806bc55")
    write("f/cache/a.txt", "no")
    write("f/image.png", b"\x89PNG\0\0")
    write("f/late.bin", b"x" * 70_000 + b"\0")
    write("f/latin.txt", b"caf\xe9")
    write("f/runs/one/run.toml", "[options]")
    write("f/runs/one/metrics.jsonl", '{"step": 1}')
    (tmp_path / "f" / "dangling").symlink_to("nowhere")
    corpus = documents([str(tmp_path / "f")])
    assert [d.text for d in corpus] == ["first", "second", "third"]
    assert {os.path.basename(p) for p in corpus.remarks.skipped} == {"dangling", "latin.txt"}
    with pytest.raises(CorruptInputError, match=r"late\.bin contains a NUL byte"):
        texts(str(tmp_path / "f"), str(tmp_path / "f" / "late.bin"))


def test_a_glob_finds_files_and_folders(write, tmp_path):
    write("x1.txt", "one")
    write("x2/deep.txt", "two")
    write("y.txt", "no")
    assert texts(f"{tmp_path}/x*") == ["one", "two"]
    assert texts(f"{tmp_path}/**/*.txt") == ["one", "two", "no"]


def test_an_existing_file_with_a_star_in_its_name_is_that_file(write):
    write("ab.txt", "other")
    assert texts(write("a*.txt", "starred")) == ["starred"]


def test_a_file_reached_twice_is_read_once(write, tmp_path):
    path = write("a.txt", "once")
    (tmp_path / "link.txt").symlink_to(path)
    assert texts(path, str(tmp_path), f"{tmp_path}/*.txt", path) == ["once"]


def test_stdin_is_read_once_and_kept(monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO("héllo".encode())))
    corpus = documents(["-", "-"])
    assert [d.text for d in corpus] == [d.text for d in corpus] == ["héllo"]
    assert [d.name for d in corpus] == ["<stdin>"]


@pytest.mark.parametrize(
    ("name", "content"), [("pipe", "through a pipe"), ("a.jsonl", '{"text": "through a pipe"}\n')]
)
def test_a_named_pipe_is_read_once_and_kept(tmp_path, name, content):
    pipe = tmp_path / name
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text(content))
    writer.start()
    corpus = documents([str(pipe)])
    assert [d.text for d in corpus] == [d.text for d in corpus] == ["through a pipe"]
    writer.join()


def test_only_a_newline_ends_a_line_of_jsonl(write):
    text = "one\u2028two\u2029three\u0085four\x0bfive\x0csix\x1cseven"
    lines = [json.dumps({"text": text}, ensure_ascii=False)] * 2
    assert texts(write("a.jsonl", "\r\n".join(lines))) == [text, text]


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson"])
def test_a_line_of_jsonl_is_a_document_named_after_its_line(write, name):
    path = write(name, '{"body": "one\\u2028two", "id": 1}\n\n{"body": "three"}')
    found = list(documents([path], text_field="body"))
    assert [(d.name, d.text) for d in found] == [
        (f"{path}:1", "one\u2028two"),
        (f"{path}:3", "three"),
    ]


@pytest.mark.parametrize("text_field", ["text", "body"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_fields_of_a_text_record_that_are_not_read_are_counted_in_one_note(
    write, tmp_path, name, text_field
):
    fields = {text_field: "some text", "id": "4", "url": None, "tags": "", "messages": "[]"}
    rows = [fields, fields | {"id": None, "more": "x"}]
    columns = dict.fromkeys(key for row in rows for key in row)
    if name == "a.jsonl":
        path = write(name, "".join(json.dumps(row) + "\n" for row in rows))
    elif name == "a.csv":
        lines = [columns, *([row.get(key) or "" for key in columns] for row in rows)]
        path = write(name, "".join(",".join(line) + "\n" for line in lines))
    else:
        path = str(tmp_path / name)
        pq.write_table(
            pa.Table.from_pylist(rows, pa.schema([(c, pa.string()) for c in columns])), path
        )
    corpus = documents([path], text_field=text_field)
    note = "3 fields were not read: id (1 line), messages (2), more (1)"
    for _ in range(2):
        assert len(list(corpus)) == 2
        assert corpus.remarks.notes() == [note]


def test_blank_documents_are_dropped(write):
    assert texts(write("a.txt", " \n"), write("b.txt", "b"), write("c.jsonl", '{"text": ""}')) == [
        "b"
    ]


@pytest.mark.parametrize(
    "content",
    [b"\xef\xbb\xbfcaf\xe9", bytes(range(1, 256)) * 9],
)
def test_bytes_that_are_not_utf8_are_refused_with_the_remedy(write, content):
    with pytest.raises(CorruptInputError, match=r"a\.txt is not text.*--encoding") as caught:
        texts(write("a.txt", content))
    assert "\n" not in str(caught.value)


def test_nul_byte_is_named_and_its_remedy_works(write):
    path = write("a.txt", "text\0möre")
    with pytest.raises(CorruptInputError, match=r"a\.txt contains a NUL byte") as caught:
        texts(path)
    assert "--encoding (utf-8" in caught.value.hint
    assert [document.text for document in documents([path], encoding="utf-8")] == ["text\0möre"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{broken", "not a JSON object"),
        (b"[" * 100_000, "not a JSON object"),
        (b'"text"', "not a JSON object .*str"),
        (b'{"body": "x"}', "the field 'text' is missing; there are 'body'"),
        (b'{"text": 3}', "the field 'text' must be a string, got 3"),
        (b'{"text": "\\ud800"}', "not a JSON object .*surrogates not allowed"),
        (b'{"text": "\xff"}', "no text in UTF-8: give its --encoding"),
    ],
)
def test_a_bad_jsonl_line_is_refused_with_its_number(write, line, message):
    path = write("a.jsonl", b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(CorruptInputError, match=r"a\.jsonl:2: " + message):
        texts(path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.txt", r"no file matches .*missing\.txt"),
        ("no*.txt", r"no file matches .*no\*\.txt"),
        ("empty", "the folder .*empty' has no text files"),
        ("blank.txt", r"no text in .*blank\.txt: every document is empty"),
        ("file.txt/below", "no file matches"),
        ("nul\0byte", "no file matches"),
    ],
)
def test_a_source_without_text_is_a_one_line_error_that_names_it(write, tmp_path, source, message):
    write("empty/.hidden", "text")
    write("blank.txt", "\n")
    write("file.txt", "text")
    with pytest.raises(UserError, match=message) as caught:
        texts(f"{tmp_path}/{source}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("link.csv", ["link.csv", "a link to gone.csv", "missing"]),
        ("*.csv", ["link.csv", "a link to gone.csv", "missing"]),
        ("links", ["links/link.txt", "a link to", "missing"]),
        ("pipes*", ["pipes", "no regular file"]),
        ("https://a.org/b/texts.txt?x=1&y=2", ["download it first", "'https://a.org/b/texts.txt?x=1&y=2'"]),
        ("HTTP://a.org/b.jsonl", ["download it first"]),
        ("s3://bucket/b.jsonl", ["download it first"]),
        ("https://huggingface.co/datasets/me/texts", ["hf:me/texts"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("task", ["lm", "classify"])
def test_a_source_that_is_no_file_is_named_as_what_it_is(
    tmp_path, monkeypatch, capsys, source, words, task
):
    monkeypatch.chdir(tmp_path)
    os.symlink("gone.csv", "link.csv")
    os.mkdir("links")
    os.symlink("../gone.txt", "links/link.txt")
    os.mkfifo("pipes")
    assert main(["train", source, "--task", task]) == 1
    err = " ".join(capsys.readouterr().err.split())
    for word in words:
        assert word in err


CHATS = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
JSON_TEXTS = {
    "array": (json.dumps(CHATS * 3), "a JSON array of conversations", "jq -c '.[]'"),
    "indented array": (json.dumps(CHATS, indent=2), "a JSON array of conversations", "jq"),
    "array with a mark": ("\ufeff" + json.dumps(CHATS * 3), "a JSON array of conver", "jq"),
    "array of Alpaca": (
        json.dumps([{"instruction": "a", "output": "b"}]), "a JSON array of conversations", "jq",
    ),
    "array of texts": (json.dumps([{"text": "a"}] * 2), "a JSON array of texts", "jq"),
    "array of others": (json.dumps([{"a": 1}] * 2), "a JSON array of records", "jq"),
    "long array": (
        json.dumps([{"prompt": "a", "completion": "b"}] * 5000), "a JSON array of pairs", "jq",
    ),
    "lines": ("".join(json.dumps(chat) + "\n" for chat in CHATS * 2),
              "conversations in lines of JSON", "mv"),
}  # fmt: skip


@pytest.mark.parametrize("case", JSON_TEXTS)
def test_a_text_of_json_records_is_named_as_what_it_is(write, tmp_path, case):
    content, description, remedy = JSON_TEXTS[case]
    for source in (write("f/a.txt", content), str(tmp_path / "f")):
        corpus = documents([source])
        assert len(list(corpus)) == 1
        (note,) = corpus.remarks.notes()
        assert description in note and remedy in note and "a.jsonl" in note
    with pytest.raises(UserError, match=description) as error:
        documents([write("a.json", content)]).is_text(write("a.json", content))
    assert remedy in error.value.hint
    if remedy == "jq":
        with pytest.raises(CorruptInputError, match=r"b\.jsonl:1: .*jq -c"):
            texts(write("b.jsonl", content))


@pytest.mark.parametrize("case", JSON_TEXTS)
def test_records_of_standard_input_have_a_remedy_without_a_name(case, monkeypatch):
    data = SimpleNamespace(buffer=io.BytesIO(JSON_TEXTS[case][0].encode()))
    monkeypatch.setattr("sys.stdin", data)
    corpus = documents(["-"])
    assert len(list(corpus)) == 1
    (note,) = corpus.remarks.notes()
    assert "in a .jsonl file" in note and "<stdin>.jsonl" not in note


def test_no_source_is_an_error_and_a_missing_one_is_answered_with_a_similar_name(write, tmp_path):
    with pytest.raises(UserError, match="no data was named"):
        documents([])
    write("test.jsonl", "{}")
    with pytest.raises(UserError) as error:
        documents([str(tmp_path / "tset.jsonl")])
    assert error.value.hint == f"did you mean {tmp_path / 'test.jsonl'}?"


@pytest.mark.parametrize(
    "content", ["[1] is a footnote.\n", "{a} is a set\n", "[[1, 2]]", "{}", "[]"]
)
def test_other_texts_are_not_taken_for_records(write, content):
    corpus = documents([write("a.txt", content)])
    assert [document.text for document in corpus] == [content]
    assert corpus.remarks.notes() == []


def test_every_remark_on_files_is_a_note_of_their_corpus_and_of_their_preparation(write, tmp_path):
    write("f/a.txt", "text<|endoftext|>more")
    write("f/b.bin", b"\0\1")
    write("f/c.o", b"ELF\0")
    write("f/d.txt", b"\xff\xfd")
    write("f/e.zip", "packed")
    write("f/g.txt", '{"text": "x"}\n')
    write("f/h.csv", 'text,n\n"one\ntwo",1\n')
    sources = [str(tmp_path / "f"), write("i.txt", "Un café.".encode("cp1252"))]
    corpus = documents(sources)
    assert [document.text[:4] for document in corpus] == ["text", "more", '{"te', "one\n", "Un c"]
    plan = plan_preparation([*sources, write("j.jsonl", '{"text": "<|endoftext|>"}\n')])
    prepared = prepare_data(plan, tmp_path / "out", "char", workers=1)
    assert any("ordinary text: <|endoftext|> (1)" in note for note in prepared.notes)
    for notes, n_notes in ((corpus.remarks.notes(), 8), (prepared.notes, 9)):
        for remark, names in {
            "left out 2 files, binary: ": ["b.bin", "c.o"], "not text in UTF-8: ": ["d.txt"],
            "as .zip is not read: ": ["e.zip"], "2 documents, separated by": ["a.txt"],
            "is read as text; ": ["g.txt"], "1 row of several lines": ["h.csv", "line 2)"],
            "is read as cp1252": ["i.txt"], "1 field was not read: n (1 line)": [],
        }.items():  # fmt: skip
            (note,) = [note for note in notes if remark in note]
            assert all(name in note for name in names)
        assert len(notes) == n_notes


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_file_that_vanished_before_it_was_read_is_named(write, name):
    path = write(name, "text")
    corpus = documents([path])
    os.remove(path)
    with pytest.raises(UserError, match=f"cannot read .*{name}: No such file"):
        list(corpus)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_named(write):
    path = write("a.txt", "text")
    os.chmod(path, 0)
    with pytest.raises(UserError, match=r"cannot read .*a\.txt: Permission denied"):
        texts(path)


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("Le café était fermé, déjà vu.\n", "cp1252"),
        ("café", "cp1252"),
        ("Привет мир, как дела сегодня?\n" * 4, "cp1251"),
        ("日本語のテキストです。今日はいい天気ですね。\n" * 3, "shift_jis"),
        ("text", "utf-16"),
        ("text", "utf-32"),
    ],
)
def test_the_encoding_of_a_named_file_is_guessed_and_reported(write, text, encoding):
    path = write("a.txt", text.encode(encoding))
    corpus = documents([path])
    assert [document.text for document in corpus] == [text]
    assert list(corpus.remarks.guessed.values()) == [encoding]


def test_utf_32_and_utf_16_are_distinguished_by_their_mark(write):
    for mark, order in ((b"\xff\xfe\0\0", "le"), (b"\0\0\xfe\xff", "be")):
        assert texts(write("a.txt", mark + "wide".encode(f"utf-32-{order}"))) == ["wide"]


def test_an_encoded_surrogate_is_named_with_its_byte_and_no_encoding_is_guessed(write, tmp_path):
    path = write("f/a.txt", "Привет ".encode() * 9 + "\ud83d".encode(errors="surrogatepass"))
    with pytest.raises(CorruptInputError, match=r"a\.txt .*byte 117 .*surrogate"):
        texts(path)
    write("f/b.txt", "text")
    assert texts(str(tmp_path / "f")) == ["text"]


@pytest.mark.parametrize("suffix", [".json", ".xlsx", ".npy", ".zip", ".json.gz"])
def test_non_text_files_are_refused_by_name(write, suffix):
    with pytest.raises(UserError, match=rf"a{suffix} .*\.jsonl"):
        texts(write(f"a{suffix}", '{"text": "a, b"}\n'))


def test_an_encoding_can_be_named(write, tmp_path):
    path = write("f/a.txt", "Grüße".encode("latin-1"))
    for source in (path, str(tmp_path / "f")):
        corpus = documents([source], encoding="latin-1")
        assert [document.text for document in corpus] == ["Grüße"] and not corpus.remarks.guessed
    write("f/b.txt", "auch UTF-8: ü")
    assert len(list(documents([str(tmp_path / "f")], encoding="latin-1"))) == 2
    wide = write("c.txt", "wide".encode("utf-16-le"))
    assert [document.text for document in documents([wide], encoding="utf-16-le")] == ["wide"]
    for unknown in ("klingon", "hex", "a\0b"):
        for name in (path, "a.csv", "a.jsonl"):
            with pytest.raises(UserError, match=r"--encoding .*no such encoding"):
                documents([name], encoding=unknown)
    for encoding, says in (("ascii", "UTF-8, nor in ascii"), ("utf-8", "UTF-8")):
        with pytest.raises(CorruptInputError) as error:
            list(documents([path], encoding=encoding))
        assert error.value.message.endswith(says)


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ('{"text": "a", "text": "b"}', "text"),
        ('{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "content"),
        ('{"text": "a", "meta": {"weight": 0, "weight": 1}}', "weight"),
    ],
)
def test_a_field_that_is_given_twice_is_refused_with_its_line(write, line, field):
    path = write("a.jsonl", '{"text": "x"}\n' + line)
    with pytest.raises(CorruptInputError, match=f"a.jsonl:2: .*'{field}'.*twice") as refused:
        list(documents([path], only_records=True).records("a record"))
    assert "keep one" in refused.value.hint
