"""Examples for fine-tuning: the trained tokens, and the refusals."""

import json
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiedgpt import Tokenizer
from tiedgpt.data import TEMPLATES, ExampleReader, documents, read_template, write_template
from tiedgpt.data.examples import EncodedExamples
from tiedgpt.errors import CorruptInputError, UserError

LETTERS = "".join(map(chr, range(32, 127))) + "\n\täé€😀"
TOKENIZERS = {
    "bpe": Tokenizer.train(["the user says hello, the assistant says hello\n\nhello"] * 3, 300),
    "characters": Tokenizer.characters([LETTERS]),
}
CONTENTS = st.text(LETTERS, max_size=12) | st.sampled_from(
    ["<|im_end|>", "<|endoftext|>", " hello", "\n\nhello", "hello  ", "<|im_start|>assistant\n"]
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": CONTENTS},
        optional={"train": st.booleans() | st.none()},
    ),
    max_size=5,
)


@pytest.fixture
def reader(write):
    def made(*lines, tokenizer="bpe", **options):
        rows = (line if isinstance(line, str) else json.dumps(line) for line in lines)
        corpus = documents([write("examples.jsonl", "\n".join(rows))])
        return ExampleReader(corpus, TOKENIZERS[tokenizer], **options)

    return made


def trained_text(example, tokenizer):
    return tokenizer.decode(
        [id for id, counted in zip(example.ids, example.counted, strict=True) if counted]
    )


def read(lines, tokenizer, template="chatml"):
    class Lines:
        def records(self, expected, on_bad=None):
            yield from ((f"line {number}", line) for number, line in enumerate(lines))

    return ExampleReader(Lines(), TOKENIZERS[tokenizer], template=TEMPLATES[template])


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(prompt=CONTENTS, completion=CONTENTS)
def test_only_a_completion_and_its_end_are_trained(tokenizer, prompt, completion):
    reader = read([{"prompt": prompt + "a", "completion": completion}], tokenizer)
    (example,) = reader
    assert trained_text(example, reader.tokenizer) == completion + "<|endoftext|>"
    assert reader.tokenizer.decode(example.ids) == prompt + "a" + completion + "<|endoftext|>"
    assert example.ids.count(reader.tokenizer.eos_token_id) == 1
    prefix = reader.tokenizer.encode(prompt + "a")
    assert example.ids[: len(prefix)] == prefix, "a prompt is encoded as generation encodes it"


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(text=CONTENTS)
def test_every_token_of_a_text_is_trained(tokenizer, text):
    reader = read([{"text": text + "a"}], tokenizer)
    (example,) = reader
    assert all(example.counted)
    assert trained_text(example, reader.tokenizer) == text + "a<|endoftext|>"


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("field", ["messages", "conversations"])
@given(messages=MESSAGES)
def test_replies_of_a_conversation_and_their_ends_are_trained(tokenizer, template, field, messages):
    messages = listed = [*messages, {"role": "assistant", "content": "b"}]
    if field == "conversations":
        names = {"user": "human", "assistant": "gpt", "system": "system"}
        listed = [
            {"from": names[m["role"]], "value": m["content"], "train": m.get("train")}
            for m in messages
        ]
    reader = read([{"messages": None, field: listed}], tokenizer, template)
    assert (reader.max_turns, reader.default_system) == (0, None)
    (example,) = reader
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    turns = sum(message["role"] == "assistant" for message in messages)
    assert (reader.max_turns, reader.default_system) == (turns, system)
    mark, end = {"chatml": ("", "<|im_end|>"), "plain": (" ", "<|endoftext|>")}[template]
    replies = [m for m in messages if m["role"] == "assistant" and m.get("train") is not False]
    expected = "".join(mark + m["content"] + end for m in replies)
    assert trained_text(example, reader.tokenizer) == expected
    (end_id,) = reader.tokenizer.encode(end, allow_special=True)
    ends = [i for i, id in enumerate(example.ids) if id == end_id and example.counted[i]]
    assert len(ends) == len(replies)


def test_chatml_has_its_published_form_and_is_for_models_without_a_template(reader, tmp_path):
    conversation = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "you said <|im_end|>"},
    ]
    found = reader({"messages": conversation}, template=partial(read_template, tmp_path))
    (example,) = found
    assert found.kind == "messages"
    assert len(found.tokenizer) == len(TOKENIZERS["bpe"]) + 2
    assert found.tokenizer.decode(example.ids) == (
        "<|endoftext|><|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\nyou said <|im_end|><|im_end|>\n"
    )
    start, end = len(TOKENIZERS["bpe"]), len(TOKENIZERS["bpe"]) + 1
    assert [id for id in example.ids if id >= start] == [start, end, start, end]
    write_template(TEMPLATES["plain"], TOKENIZERS["bpe"], tmp_path)
    stored = partial(read_template, tmp_path)
    assert reader({"messages": conversation}, template=stored).template.name == "plain"


def test_special_tokens_are_added_only_if_needed(reader):
    assert reader({"text": "a b"}).tokenizer is TOKENIZERS["bpe"]
    assert reader({"messages": []}, template=TEMPLATES["plain"]).tokenizer is TOKENIZERS["bpe"]


def test_a_text_file_is_one_text(write):
    corpus = documents([write("a.txt", "some text")])
    (example,) = ExampleReader(corpus, TOKENIZERS["bpe"])
    assert trained_text(example, TOKENIZERS["bpe"]) == "some text<|endoftext|>"


PAIR = {"prompt": "a", "completion": " b"}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
BAD_LINES = [
    ("nonsense", "not a JSON object"),
    ("[1]", "got a JSON list"),
    ({"prompt": "a"}, "of none of the kinds: 'prompt'"),
    ({"text": "a", **PAIR}, "of several of the kinds"),
    ({"prompt": "a", "completion": 4}, "'completion' must be a string or a list .*, got int"),
    ({"prompt": None, "completion": "b"}, "of none of the kinds: 'prompt', 'completion'"),
]
BAD_MESSAGES = [
    ("hello", "must be a list of messages"),
    (["hello"], "must be a list of messages"),
    ([{"role": "user"}], "a message has no 'content'"),
    ([{"content": "a"}], "a message has no 'role'"),
    ([{"role": "robot", "content": "a"}], "no role 'robot': .*user, assistant, .*human"),
    ([{"role": "assistant", "content": "a", "train": 0}], "'train' must be true or false"),
    ([{"role": "user", "content": "a"}], "nothing in it is trained"),
    ([{"role": "assistant", "content": "a", "train": False}], "nothing in it is trained"),
    (None, "of none of the kinds"),
    ([], "nothing in it is trained"),
]


@pytest.mark.parametrize(
    ("good", "line", "says"),
    [
        *((PAIR, line, says) for line, says in BAD_LINES),
        *((CHAT, {"messages": messages}, says) for messages, says in BAD_MESSAGES),
    ],
)
def test_a_bad_line_is_named_or_skipped_and_counted(reader, good, line, says):
    with pytest.raises(CorruptInputError, match=rf"examples\.jsonl:2: .*{says}.*--skip-bad"):
        list(reader(good, line, good))
    found = reader(good, line, good, skip_bad=True)
    for _ in range(2):
        assert len(list(found)) == 2
        assert found.remarks["skipped"].count == 1
        assert "examples.jsonl:2" in found.remarks["skipped"].first
    assert len(list(reader(line, good, skip_bad=True))) == 1


def test_a_character_outside_the_vocabulary_is_named(reader):
    with pytest.raises(CorruptInputError, match=r"examples\.jsonl:2: character '한'"):
        list(reader({"text": "ab"}, {"text": "한"}, tokenizer="characters"))


@pytest.mark.parametrize("skip_bad", [True, False])
def test_lines_of_two_kinds_are_an_error(reader, skip_bad):
    with pytest.raises(
        UserError, match=r":3 is of the kind text, and .*:1 of .* messages"
    ) as error:
        list(reader(CHAT, CHAT, {"text": "a b"}, skip_bad=skip_bad))
    assert error.value.exit_code == 1 and "its own file" in error.value.hint


LONG = {"prompt": "a", "completion": " b" * 30}
NO_ROOM = {"prompt": "a" + " a" * 30, "completion": " b"}


def test_too_long_examples_are_dropped_cut_or_an_error(reader):
    found = reader(PAIR, LONG, NO_ROOM, context=16)
    assert len(list(found)) == 1
    assert found.remarks["dropped"].count == 2
    found = reader(PAIR, LONG, NO_ROOM, context=16, too_long="cut")
    assert [len(example.ids) for example in found][1:] == [16]
    assert {name: remark.count for name, remark in found.remarks.items()} == {
        "cut": 1,
        "dropped": 1,
    }
    with pytest.raises(UserError, match=r":2 has \d+ tokens, and the context 16"):
        list(reader(PAIR, LONG, context=16, too_long="error"))


def test_a_file_without_a_usable_example_is_an_error(reader):
    with pytest.raises(UserError, match=r"no example is left .* longer than the context.*: 2"):
        list(reader(LONG, LONG, context=16))
    with pytest.raises(UserError, match=r"no line is an example .*every file is empty"):
        reader("")
    with pytest.raises(UserError, match=r"no line is an example .*were skipped: 1"):
        reader("nonsense", skip_bad=True)


def test_a_prompt_that_ends_in_a_space_has_a_note(reader):
    found = reader(PAIR, {"prompt": "a ", "completion": "b"})
    list(found)
    assert found.remarks["space"].count == 1
    assert "end in a space" in found.notes()[0] and ":2" in found.notes()[0]


def test_a_tokenizer_without_an_end_gets_one(monkeypatch):
    from tiedgpt.text.characters import tokenizer_of_ids

    tokenizer = Tokenizer(tokenizer_of_ids({"a": 0, "b": 1}))
    assert tokenizer.eos_token_id is None
    monkeypatch.setitem(TOKENIZERS, "endless", tokenizer)
    found = read([{"prompt": "a", "completion": "b"}], "endless")
    assert [example.ids for example in found] == [[0, 1, 2]]
    assert found.tokenizer.eos_token_id == 2


def test_encoded_examples_are_concatenated(reader):
    found = list(reader(PAIR, LONG))
    encoded = EncodedExamples.gather(found)
    assert len(encoded) == 2
    assert encoded.ids.nbytes + encoded.counted.nbytes == 5 * sum(len(e.ids) for e in found)
    for number, example in enumerate(found):
        ids, counted = encoded.example(number)
        assert ids.tolist() == example.ids and counted.tolist() == example.counted


def test_new_special_tokens_get_rows_in_the_model(reader):
    torch = pytest.importorskip("torch")
    from tiedgpt import GPT, GPTConfig
    from tiedgpt.data import PackedBatches
    from tiedgpt.tie import add_tokens

    found = reader(CHAT, CHAT)
    shape = {"n_positions": 32, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = GPT(GPTConfig(vocab_size=len(TOKENIZERS["bpe"]), **shape))
    encoded = EncodedExamples.gather(found)
    packed = PackedBatches(encoded, batch_size=1, n_positions=32, seed=0)
    ids, targets, document_starts = map(torch.from_numpy, packed.batch(0))
    with pytest.raises(UserError, match="ids must be between 0 and"):
        model.loss(ids, targets, document_starts=document_starts)
    add_tokens(model, len(found.tokenizer) - model.config.vocab_size)
    assert model.loss(ids, targets, document_starts=document_starts).isfinite()
