"""Models with tokenizers of other programs, from the command line: every verb, or one sentence."""

import json
from types import SimpleNamespace

import pytest
import tokenizers
import torch

from tests.models import opinionated, save_model
from tiedgpt import Tokenizer
from tiedgpt.cli.main import main
from tiedgpt.data.corpus import documents
from tiedgpt.data.encode import encode_corpus, plan_split
from tiedgpt.data.examples import ExampleReader
from tiedgpt.evaluate.texts import score_text
from tiedgpt.heads import SequenceClassifier, pad
from tiedgpt.heads.predictions import read_outputs
from tiedgpt.infer import Engine
from tiedgpt.infer.prompts import prompt_ids, split_context
from tiedgpt.inspect import positions
from tiedgpt.train.tasks.examples import LabelRows
from tiedgpt.train.tasks.labelled import Classify

POEM = "春眠不觉晓，处处闻啼鸟。夜来风雨声，花落知多少。"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(POEM)]


@pytest.fixture(scope="module")
def chinese(tmp_path_factory):
    """A directory as of the Chinese GPT-2s, whose tokenizer is BERT's."""
    folder = tmp_path_factory.mktemp("chinese") / "model"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
    opinionated(Tokenizer.from_pretrained(folder)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"tokenizer_class": "BertTokenizer"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder.parent / "poem.txt").write_text(f"{POEM}\n" * 50, encoding="utf-8")
    return folder


def test_a_chinese_gpt_generates_the_text_of_transformers(chinese, capsys):
    transformers = pytest.importorskip("transformers")
    peer = transformers.GPT2LMHeadModel.from_pretrained(chinese)
    tokenizer = transformers.AutoTokenizer.from_pretrained(chinese)
    ids = tokenizer("春眠", add_special_tokens=False, return_tensors="pt")["input_ids"]
    mask = torch.ones_like(ids)
    end = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
    expected = tokenizer.decode(peer.generate(ids, attention_mask=mask, **end)[0])
    command = ["generate", str(chinese), "--prompt", "春眠", "-n", "7", "--temperature", "0"]
    assert main([*command, "--precision", "fp32", "--format", "json"]) == 0
    assert "春 眠" + json.loads(capsys.readouterr().out)["text"] == expected


def test_a_chinese_gpt_is_trained_and_keeps_its_tokenizer(chinese, tmp_path, capsys):
    data, out = str(chinese.parent / "poem.txt"), tmp_path / "run"
    command = ["train", data, "--start", str(chinese), "--steps", "2", "--out", str(out)]
    assert main([*command, "--threads", "1"]) == 0
    trained = Tokenizer.from_pretrained(out / "model")
    assert (trained.kind, len(trained)) == ("wordpiece", len(WORDS))
    assert trained.encode(POEM) == Tokenizer.from_pretrained(chinese).encode(POEM)
    assert main(["inspect", "positions", str(chinese), "--text", POEM]) == 0
    assert main(["eval", str(chinese), data]) == 0
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    ["convert {} {out}.gguf", "export {} {out}.html", "generate {} --prompt 春 --regex a"],
)
def test_what_cannot_be_done_with_wordpiece_is_refused_by_name(chinese, tmp_path, capsys, command):
    assert main(command.format(chinese, out=tmp_path / "out").split()) == 1
    err = capsys.readouterr().err
    assert "wordpiece" in err and "Traceback" not in err
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def beginning(directory, tmp_path_factory):
    """A tokenizer with add_bos_token, `<s>`."""
    folder = tmp_path_factory.mktemp("beginning")
    model = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    ids = model["vocab"] | {"<s>": 300, "<|endoftext|>": 299}
    (folder / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")
    merges = [" ".join(merge) for merge in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(merges), encoding="utf-8")
    settings = {"add_bos_token": True, "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer.from_pretrained(folder)


def test_add_bos_token_counts_for_prompts_training_texts_and_inspections(beginning, tmp_path):
    model, cat = opinionated(beginning), beginning.encode("the cat")
    assert prompt_ids("the cat", model.config, beginning) == [300, *cat]
    assert prompt_ids("<s>the cat", model.config, beginning, allow_special=True) == [300, *cat]
    assert prompt_ids(cat, model.config, beginning) == cat
    assert split_context("the cat", [5], model.config, beginning) == ([5, *cat], 1)
    for name, text in (("a.txt", "the dog"), ("b.txt", "the cat")):
        (tmp_path / name).write_text(text)
    split = plan_split(documents([str(tmp_path / "a.txt")]), documents([str(tmp_path / "b.txt")]))
    shards = encode_corpus(split, beginning, tmp_path / "out").open_shards("val")
    assert shards.read(0, len(shards)).tolist() == [300, *cat, 299]
    assert positions(model, beginning, "the cat").ids.tolist() == [300, *cat]


@pytest.mark.parametrize(
    ("record", "ids", "trained"),
    [
        ({"text": "the cat"}, "<s>the cat<|endoftext|>", "the cat<|endoftext|>"),
        ({"prompt": "the", "completion": " cat"}, "<s>the cat<|endoftext|>", " cat<|endoftext|>"),
        (
            {"prompt": "", "completion": "the cat"},
            "<s>the cat<|endoftext|>",
            "the cat<|endoftext|>",
        ),
    ],
)
def test_add_bos_token_begins_an_example(beginning, tmp_path, record, ids, trained):
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    (example,) = ExampleReader(documents([str(tmp_path / "a.jsonl")], only_records=True), beginning)
    assert example.ids == beginning.encode(ids, allow_special=True)
    counted = [
        id for id, is_counted in zip(example.ids, example.counted, strict=True) if is_counted
    ]
    assert counted == beginning.encode(trained, allow_special=True)


def test_add_bos_token_begins_no_chat_since_the_template_is_the_whole_text(beginning, tmp_path):
    messages = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "cat"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}))
    reader = ExampleReader(documents([str(tmp_path / "a.jsonl")], only_records=True), beginning)
    assert next(iter(reader)).ids[0] != 300


def test_add_bos_token_begins_the_texts_of_a_classifier_as_transformers_pipeline(beginning):
    head = SequenceClassifier(opinionated(beginning), labels=["bad", "good"])
    (logits, is_cut), *_ = read_outputs(head, beginning, [{"text": "the cat"}])
    expected = head(*pad([[300, *beginning.encode("the cat")]]))[0]
    assert torch.equal(logits, expected) and not is_cut
    task = Classify()
    rows = LabelRows(SimpleNamespace(task=task, labels=("bad", "good")), beginning)
    row = rows.encode(task.parse({"text": "the cat", "label": "good"}), 13)
    assert row.ids == ([300, *beginning.encode("the cat")],)


@pytest.mark.parametrize("bos", [False, True])
def test_add_bos_token_begins_a_scored_text_once(beginning, bos):
    engine = Engine(opinionated(beginning), tokenizer=beginning)
    cat = beginning.encode("the cat")
    result = score_text(engine, "the cat", bos=bos)
    assert (result.tokens, result.windows.bos) == (len(cat), True)
    assert -engine.score([cat], [[300]])[0].total == pytest.approx(result.nats * len(cat))


def test_add_bos_token_is_written_into_gguf_and_read_again(beginning, tmp_path):
    pytest.importorskip("gguf")
    source = save_model(tmp_path / "model", opinionated(beginning), beginning)
    assert main(["convert", str(source), str(tmp_path / "model.gguf")]) == 0
    again = Tokenizer.from_pretrained(tmp_path / "model.gguf")
    assert (again.begin_ids, again.encode("the cat")) == ([300], beginning.encode("the cat"))


def test_a_token_that_takes_spaces_is_not_written_into_gguf(directory, tmp_path, capsys):
    pytest.importorskip("gguf")
    rust = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    rust.add_tokens([tokenizers.AddedToken("<mask>", lstrip=True, special=True)])
    tokenizer = Tokenizer(rust)
    source = save_model(tmp_path / "model", opinionated(tokenizer), tokenizer)
    assert main(["convert", str(source), str(tmp_path / "model.gguf")]) == 1
    assert "'<mask>'" in capsys.readouterr().err
