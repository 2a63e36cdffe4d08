"""Other programs' records: their trained tokens, their unread fields, and refusals.

The expected texts are ChatML written by hand.
"""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tiedgpt import Tokenizer
from tiedgpt.cli.main import main

USER, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
HUMAN, GPT = {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}
SYSTEM = {"role": "system", "content": "S"}
PAIR = {"prompt": "hi", "completion": " yo"}
ALPACA = {"instruction": "hi", "input": "you", "output": "yo"}


def chatml(*messages):
    """Return a conversation of "role: content", where * marks a trained message."""
    text, trained = "<|endoftext|>", ""
    for message in messages:
        role, content = message.split(": ", 1)
        text += f"<|im_start|>{role.strip('*')}\n{content}<|im_end|>\n"
        trained += f"{content}<|im_end|>" if "*" in role else ""
    return text, trained


def completion(prompt, trained):
    return f"{prompt}{trained}<|endoftext|>", f"{trained}<|endoftext|>"


CHAT = chatml("user: hi", "*assistant: yo")
WITH_SYSTEM = chatml("system: S", "user: hi", "*assistant: yo")
TWO_TURNS = [USER, REPLY, {"role": "user", "content": "so"}, {"role": "assistant", "content": "no"}]


def marked(**mark):
    """Return two exchanges, the first reply with a mark."""
    return {"messages": [USER, REPLY | mark, *TWO_TURNS[2:]]}


SECOND_ONLY = chatml("user: hi", "assistant: yo", "user: so", "*assistant: no")
BOTH = chatml("user: hi", "*assistant: yo", "user: so", "*assistant: no")

READ = {
    "text": ({"text": "hi"}, completion("", "hi"), {}),
    "text with other fields": (
        {"text": "hi", "id": 7, "meta": {"url": "x"}, "label": 0, "weight": 0.5, "tags": []},
        completion("", "hi"),
        {"id", "meta", "label", "weight"},
    ),
    "text of Alpaca's own table": (ALPACA | {"text": "hi"}, completion("", "hi"), {*ALPACA}),
    "text with preferences": (
        {"text": "hi", "chosen": "a", "rejected": "b"},
        completion("", "hi"),
        {"chosen", "rejected"},
    ),
    "pair": (PAIR, completion("hi", " yo"), {}),
    "pair with a system message": (PAIR | {"system": "S"}, completion("hi", " yo"), {"system"}),
    "pair that is marked as good": (PAIR | {"label": True}, completion("hi", " yo"), {"label"}),
    "messages": ({"messages": [USER, REPLY]}, CHAT, {}),
    "null fields": (
        {"messages": [USER | {"name": None}, REPLY | {"tool_calls": None, "weight": None}],
         "tools": None, "conversations": None, "system": None},
        CHAT,
        {},
    ),
    "empty fields": (
        {"messages": [USER, REPLY | {"tool_calls": []}], "tools": [], "system": "", "id": ""},
        CHAT,
        {},
    ),
    "ShareGPT": ({"conversations": [HUMAN, GPT], "id": "a"}, CHAT, {"id"}),
    "ShareGPT in OpenAI's names": ({"conversations": [USER, REPLY]}, CHAT, {}),
    "messages in ShareGPT's names": ({"messages": [HUMAN, GPT]}, CHAT, {}),
    **{
        f"role {name}": ({"conversations": [HUMAN, GPT | {"from": name}]}, CHAT, {})
        for name in ("assistant", "chatgpt", "bard", "bing", "bot", "model", "GPT", "Assistant")
    },
    **{
        f"role {name}": ({"conversations": [HUMAN | {"from": name}, GPT]}, CHAT, {})
        for name in ("user", "prompter", "Human")
    },
    **{
        f"role {name}": ({"messages": [SYSTEM | {"role": name}, USER, REPLY]}, WITH_SYSTEM, {})
        for name in ("system", "developer")
    },
    **{
        f"role {name}": (
            {"messages": [USER, {"role": name, "content": "4"}, REPLY]},
            chatml("user: hi", "tool: 4", "*assistant: yo"),
            {},
        )
        for name in ("tool", "function", "observation")
    },
    **{
        f"{name} {value}": (marked(**{name: value}), expected, {})
        for name, value, expected in [
            ("weight", 0, SECOND_ONLY), ("weight", 0.0, SECOND_ONLY), ("weight", 1, BOTH),
            ("train", False, SECOND_ONLY), ("train", True, BOTH), ("trainable", False, SECOND_ONLY),
            ("training", False, SECOND_ONLY), ("loss", False, SECOND_ONLY), ("loss", True, BOTH),
        ]
    },
    "weight in ShareGPT": (
        {"conversations": [HUMAN, GPT | {"weight": 0}, HUMAN, GPT]},
        chatml("user: hi", "assistant: yo", "user: hi", "*assistant: yo"),
        {},
    ),
    "two marks that agree": (marked(weight=0, train=False), SECOND_ONLY, {}),
    **{
        f"{name} beside {next(iter(record))}": (record | {name: "S"}, WITH_SYSTEM, {})
        for name in ("system", "system_prompt", "system_message")
        for record in ({"messages": [USER, REPLY]}, {"conversations": [HUMAN, GPT]})
    },
    "system twice, equal": ({"system": "S", "messages": [SYSTEM, USER, REPLY]}, WITH_SYSTEM, {}),
    "system beside Alpaca": (
        ALPACA | {"system": "S"},
        chatml("system: S", "user: hi\nyou", "*assistant: yo"),
        {},
    ),
    "Alpaca": (ALPACA, chatml("user: hi\nyou", "*assistant: yo"), {}),
    "Alpaca without input": (ALPACA | {"input": ""}, CHAT, {}),
    "Alpaca with other fields": (
        {**ALPACA, "input": None, "category": "x"}, CHAT, {"category"},
    ),
    "Alpaca with history": (
        {"instruction": "so", "output": "no", "history": [["hi", "yo"]]},
        BOTH,
        {},
    ),
    "Alpaca with an empty history": (ALPACA | {"history": [], "input": ""}, CHAT, {}),
    "history, tools and id": (
        {"messages": [USER, REPLY], "history": [["a", "b"]], "tools": [{"name": "f"}], "id": 1},
        CHAT,
        {"history", "tools", "id"},
    ),
    "functions": ({"messages": [USER, REPLY], "functions": [1]}, CHAT, {"functions"}),
    "fields of a message": (
        {"messages": [USER | {"name": "A"}, REPLY | {"reasoning_content": "h", "thinking": "x"}]},
        CHAT,
        {"messages.name", "messages.reasoning_content", "messages.thinking"},
    ),
    "prompt beside messages": ({"prompt": "hi", "messages": [USER, REPLY]}, CHAT, {"prompt"}),
    "TRL": ({"prompt": [USER], "completion": [REPLY]}, CHAT, {}),
    "TRL with an earlier reply": (
        {"prompt": TWO_TURNS[:3], "completion": TWO_TURNS[3:]}, SECOND_ONLY, {},
    ),
    "TRL with a text for the completion": ({"prompt": [USER], "completion": "yo"}, CHAT, {}),
    "parts": (
        {"messages": [
            message | {"content": [{"type": "text", "text": text} for text in texts]}
            for message, texts in ((USER, ["hi"]), (REPLY, ["y", "o"]))
        ]},
        CHAT,
        {},
    ),
}  # fmt: skip

REFUSED = {
    "weight 0.5": (marked(weight=0.5), ["weight", "0.5", "0 or 1"]),
    "weight 2": (marked(weight=2), ["weight", "2", "0 or 1"]),
    "weight of text": (marked(weight="0"), ["weight", "'0'", "0 or 1"]),
    "weight of 400 digits": (marked(weight=10**400), ["weight", "1000", "0 or 1"]),
    "role of 9,000 letters": ({"messages": [USER | {"role": "r" * 9000}]}, ["rrr", "user"]),
    "train 0": (marked(train=0), ["'train'", "true or false"]),
    "marks that disagree": (marked(weight=0, train=True), ["'weight'", "'train'"]),
    "train_detail": (marked(train_detail=[{"begin_offset": 0}]), ["train_detail"]),
    "system twice": (
        {"system_prompt": "T", "messages": [SYSTEM, USER, REPLY]},
        ["'system_prompt'", "'system'", "leave one"],
    ),
    **{
        f"near miss {name}": (marked(**{name: 0}), [f"'{name}'", f"did you mean '{near}'?"])
        for name, near in {
            "Weight": "weight", "weights": "weight", "wieght": "weight", "TRAIN": "train",
            "trained": "train", "Loss": "loss", "losses": "loss", "trainDetail": "train_detail",
            "tool-calls": "tool_calls",
        }.items()
    },
    "near miss in ShareGPT": (
        {"conversations": [HUMAN, GPT | {"Weight": 0}]}, ["did you mean 'weight'?"],
    ),
    "near miss of system": (
        {"System": "S", "messages": [USER, REPLY]}, ["'System'", "did you mean 'system'?"],
    ),
    "near miss of a system prompt": (
        {"systemPrompt": "S", "conversations": [HUMAN, GPT]}, ["did you mean 'system_prompt'?"],
    ),
    "near miss of history": (ALPACA | {"History": [["a", "b"]]}, ["did you mean 'history'?"]),
    "near miss of input": (ALPACA | {"inputs": "a"}, ["did you mean 'input'?"]),
    "near miss of a preference": (PAIR | {"Rejected": "a"}, ["did you mean 'rejected'?"]),
    "a prompt that is an object": (
        {"prompt": USER, "completion": REPLY}, ["'prompt'", "a string or a list of messages"],
    ),
    "a completion that is an object": (
        {"prompt": [USER], "completion": REPLY}, ["completion", "a list of messages"],
    ),
    "two systems": (
        {"system": "S", "system_prompt": "T", "messages": [USER, REPLY]},
        ["'system'", "'system_prompt'"],
    ),
    "system of another type": ({"system": 4, "messages": [USER, REPLY]}, ["'system'", "int"]),
    "history of texts": (ALPACA | {"history": ["a", "b"]}, ["'history'", "pairs"]),
    "unknown role": (
        {"messages": [{"role": "robot", "content": "a"}, REPLY]},
        ["'robot'", "system", "user", "assistant", "tool", "human", "gpt", "developer"],
    ),
    "role function_call": (
        {"conversations": [HUMAN, {"from": "function_call", "value": "{}"}, GPT]},
        ["'function_call'", "human", "gpt"],
    ),
    "tool calls": (marked(tool_calls=[{"id": "a"}]), ["tool_calls", "content"]),
    "tool calls without content": (
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [1]}]},
        ["tool_calls", "content"],
    ),
    "function call": (marked(function_call={"name": "f"}), ["function_call", "content"]),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, REPLY]},
        ["'image_url'", "text"],
    ),
    "preferences of messages": (
        {"messages": [USER, REPLY], "chosen": "a", "rejected": "b"}, ["'chosen'", "dpo.py"],
    ),
    "a bad answer": (PAIR | {"label": False}, ["'label'", "bad"]),
    "a bad answer in messages": ({"messages": [USER, REPLY], "kto_tag": False}, ["'kto_tag'"]),
    "nothing to train": ({"messages": [USER, REPLY | {"weight": 0}]}, ["nothing", "trained"]),
    "messages and conversations": (
        {"messages": [USER, REPLY], "conversations": [HUMAN, GPT]}, ["several of the kinds"],
    ),
    "question and answer": (
        {"question": "a", "answer": "b"},
        ["'question' to 'prompt' and 'answer' to 'completion'", "'question' to 'instruction'"],
    ),
    "prompt and response": (
        {"prompt": "a", "response": "b"},
        ["'response' to 'completion'", "'prompt' to 'instruction' and 'response' to 'output'"],
    ),
    "instruction and response": (
        {"instruction": "a", "response": "b"}, ["'response' to 'output'"],
    ),
    "capitals": (
        {"Prompt": "a", "Completion": "b"}, ["'Prompt' to 'prompt' and 'Completion' to"],
    ),
    "dialog": ({"dialog": [HUMAN, GPT]}, ["'dialog' to 'messages'"]),
    "preferences": (
        {"prompt": "a", "chosen": "b", "rejected": "c"}, ["dpo.py", "'chosen' to 'completion'"],
    ),
    "preferences of Alpaca": (
        {"instruction": "a", "rejected": "b", "chosen": "c"}, ["dpo.py", "'chosen' to 'output'"],
    ),
    "preferences of conversations": (
        {"rejected": [USER, REPLY], "chosen": [USER, REPLY]}, ["dpo.py", "'chosen' to 'messages'"],
    ),
    "another name of text": ({"id": 4, "body": "a"}, ["'body' to 'text'", "--text-field body"]),
}  # fmt: skip


@pytest.fixture
def show(tmp_path, monkeypatch, capsys):
    """Return a function that runs `tiedgpt data show` on records: (exit code, JSON, errors)."""
    monkeypatch.chdir(tmp_path)
    Tokenizer.train(["hi you, so no yo"] * 2, 300).save_pretrained("tok")

    def run(*records, name="a.jsonl"):
        if name.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist(list(records)), name)
        else:
            (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        code = main(["data", "show", name, "--tokenizer", "tok", "-f", "json"])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else {}, " ".join(err.split())

    return run


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize("case", READ)
def test_a_record_trains_what_its_program_means(show, case, name):
    record, (text, trained), unread = READ[case]
    if name == "a.parquet" and case == "empty fields":
        pytest.skip("Parquet has no type for a list without any element")
    code, facts, err = show(record, name=name)
    assert code == 0, err
    (example,) = facts["shown"]
    assert "".join(example["tokens"]) == text
    pairs = zip(example["tokens"], example["trained"], strict=True)
    untrained_first = completion("", "hi")[1] == trained  # the first token of a text has no target
    expected = trained[len(example["tokens"][0]) :] if untrained_first else trained
    assert "".join(token for token, is_trained in pairs if is_trained) == expected
    assert facts["unread"] == dict.fromkeys(unread, 1)


@pytest.mark.parametrize("case", REFUSED)
def test_a_record_that_cannot_be_honoured_is_refused_with_a_remedy(show, case):
    record, words = REFUSED[case]
    code, _, err = show(record)
    assert code == 3 and "a.jsonl:1" in err and len(err) < 700
    for word in words:
        assert word in err
    assert ("--skip-bad" in err) == ("of the kinds" not in err)


def test_a_field_without_a_name_is_counted(show):
    code, facts, _ = show({"text": "hi", "": 7})
    assert code == 0 and facts["unread"] == {"(no name)": 1}


def test_other_fields_are_no_near_misses(show):
    names = ["id", "name", "history_id", "system_id", "weight_kg", "tool_call_id", "label", "score"]
    record = {"messages": [USER, REPLY | dict.fromkeys(names, 1)], **dict.fromkeys(names, 1)}
    code, facts, err = show(record)
    assert code == 0, err
    assert set(facts["unread"]) == {*names, *(f"messages.{name}" for name in names)}


def test_unread_fields_are_counted_in_one_note(show, capsys):
    records = [{"messages": [USER, REPLY], "id": n} for n in range(7)]
    records[2]["tools"], records[3]["history"] = ["f"], [["a", "b"]]
    assert show(*records)[1]["unread"] == {"id": 7, "tools": 1, "history": 1}
    assert main(["data", "show", "a.jsonl", "--tokenizer", "tok"]) == 0
    err = " ".join(capsys.readouterr().err.split())
    assert "3 fields were not read: id (7 lines), tools (1), history (1)" in err


def test_many_unread_fields_are_counted_and_a_dozen_named(show, capsys):
    show({"text": "hi", **{f"f{n}": n for n in range(19)}})
    assert main(["data", "show", "a.jsonl", "--tokenizer", "tok"]) == 0
    err = " ".join(capsys.readouterr().err.split())
    assert "19 fields were not read: f0 (1 line), f1 (1)," in err and "f11 (1), ..." in err
    assert "f12" not in err


def test_a_message_that_is_no_reply_is_not_trained_and_counted(show):
    code, facts, _ = show({"messages": [USER | {"train": True}, REPLY]})
    assert code == 0 and facts["remarks"]["no reply"]["count"] == 1
    (example,) = facts["shown"]
    pairs = zip(example["tokens"], example["trained"], strict=True)
    assert "".join(token for token, is_trained in pairs if is_trained) == CHAT[1]
