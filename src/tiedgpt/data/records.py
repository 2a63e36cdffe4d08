"""The fields of a record: its kind, its texts or messages, and the fields that are not read.

    {"text": ...}                                           text
    {"prompt": ..., "completion": ...}                      completion
    {"messages": [{"role": ..., "content": ...}, ...]}      messages
    {"conversations": [{"from": ..., "value": ...}, ...]}   messages, as ShareGPT has them
    {"instruction": ..., "input": ..., "output": ...}       messages, as Alpaca has them
    {"prompt": [MESSAGE, ...], "completion": [...]}         messages, as TRL has them

A field that is null counts as absent. What changes the trained tokens is read (`system`, `history`,
a message's `weight` or `train`) or refused (`rejected`, `tool_calls`, and names that are almost one
of these, such as `Weight`); others are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from reprlib import repr as short
from typing import Any, Literal

from tiedgpt.errors import UserError

ExampleType = Literal["text", "completion", "messages"]
Record = Mapping[str, Any]
FIELDS: dict[tuple[str, ...], ExampleType] = {
    ("text",): "text",
    ("prompt", "completion"): "completion",
    ("messages",): "messages",
    ("conversations",): "messages",
}
ALPACA = ("instruction", "output")
"""Fields of a conversation; a record with one of `FIELDS` is of that kind."""
EXPECTED = '{"text": ...}, {"prompt": ..., "completion": ...} or {"messages": [...]}'
MESSAGE = '{"role": "user", "content": ...}'
SYSTEM = ("system", "system_prompt", "system_message")
"""Fields with the system message of a conversation."""
ROLES = {
    "human": "user", "prompter": "user", "gpt": "assistant", "chatgpt": "assistant",
    "bard": "assistant", "bing": "assistant", "bot": "assistant", "model": "assistant",
    "developer": "system", "function": "tool", "observation": "tool",
}  # fmt: skip
"""Other programs' names of roles."""
MARKS = ("train", "trainable", "training", "loss")
"""Fields of a message, true or false: whether it is trained."""
PREFERENCES = ("chosen", "rejected")
REFUSED_IN_MESSAGES = {
    "tool_calls": "write the call as the message's content",
    "function_call": "write the call as the message's content",
    "train_detail": "divide the message in two",
}
"""Unsupported fields of a message that change its trained tokens, and remedies."""
QUESTIONS = ("instruction", "question", "query", "input", "problem", "user", "prompt")
ANSWERS = ("output", "answer", "response", "reply", "solution", "assistant", "completion", "chosen")
"""Common names of a question and of its answer, for hints."""
MAX_NAMED_FIELDS = 12


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    content: str
    train: bool | None = None
    """Whether it is trained; None: as its role is."""


@dataclass(frozen=True, slots=True)
class ParsedRecord:
    """The content of a record."""

    example_type: ExampleType
    texts: tuple[str, ...] = ()
    """The text, or the prompt and the completion."""
    messages: tuple[Message, ...] = ()
    unread: tuple[str, ...] = ()
    """Fields that were not read; one of a message is `messages.NAME`."""


class UnreadFields(Counter[str]):
    """Number of records with each field that was not read."""

    def count(self, record: Record, read: Collection[str]) -> None:
        """Count the other fields of a record that hold something."""
        for name in unread_fields(record, read):
            self[name] += 1

    def notes(self) -> list[str]:
        """Return the fields in words."""
        if not self:
            return []
        first, *others = self.items()
        lines = "1 line" if first[1] == 1 else f"{first[1]:,} lines"
        named = [f"{first[0]} ({lines})", *(f"{name} ({count:,})" for name, count in others)]
        if len(named) > MAX_NAMED_FIELDS:
            named[MAX_NAMED_FIELDS:] = ["..."]
        subject = "1 field was" if len(self) == 1 else f"{len(self):,} fields were"
        return [f"{subject} not read: {', '.join(named)}"]


def unread_fields(record: Record, read: Collection[str]) -> Iterator[str]:
    """Return the names of a record's other fields that hold something."""
    return (
        str(name) or "(no name)" for name in record if name not in read and _holds(record, name)
    )


def find_type(record: Record) -> ExampleType:
    """Return the kind of a record; raise `UserError`, with the fields to rename, for no example."""
    present = {name for name, value in record.items() if value is not None}
    kinds = [FIELDS[names] for names in FIELDS if present.issuperset(names)]
    if not kinds and present.issuperset(ALPACA):
        kinds = ["messages"]
    if len(kinds) != 1:
        named = "several" if kinds else "none"
        raise UserError(
            f"its fields are of {named} of the kinds: {', '.join(map(repr, record))}; a line is "
            f"{EXPECTED}",
            hint="leave the fields of one kind" if kinds else _suggest(record),
        )
    is_pair = kinds[0] == "completion"
    if is_pair and any(isinstance(record[name], list) for name in ("prompt", "completion")):
        return "messages"
    return kinds[0]


def is_example(record: Record) -> bool:
    """Return whether a record is an example with a reply."""
    try:
        return find_type(record) != "text"
    except UserError:
        return False


def describe_kind(record: Record) -> str:
    """Return the kind of a record as a plural: texts, pairs, conversations or records."""
    try:
        example_type = find_type(record)
    except UserError:
        return "records"
    return {"text": "texts", "completion": "pairs", "messages": "conversations"}[example_type]


def parse_record(record: Record, roles: Collection[str]) -> ParsedRecord:
    """Return the content of a record, given the roles of the chat template.

    Raises `UserError` for an unsupported field, and where the fields make no example.
    """
    example_type = find_type(record)
    if example_type != "text":
        _require_no_preference(record)
    if example_type != "messages":
        names = ("text",) if example_type == "text" else ("prompt", "completion")
        expected = "a string" if example_type == "text" else "a string or a list of messages"
        texts = tuple(_string(record, name, expected) for name in names)
        _require_no_near_miss(record, names, PREFERENCES if example_type != "text" else ())
        return ParsedRecord(example_type, texts, unread=tuple(unread_fields(record, names)))
    read = {*SYSTEM}
    expected_names = {*SYSTEM, *PREFERENCES}
    unread = list[str]()
    messages = list[Message]()

    def read_messages(name: str) -> list[Message]:
        read.add(name)
        listed = record[name]
        if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
            raise UserError(f"its {name} must be a list of messages, such as {MESSAGE}")
        parsed = [_parse_message(message, roles) for message in listed]
        unread.extend(f"{name}.{other}" for _, others in parsed for other in others)
        return [message for message, _ in parsed]

    if record.get("messages") is not None or record.get("conversations") is not None:
        messages += read_messages("conversations" if record.get("messages") is None else "messages")
    elif isinstance(record.get("prompt"), list) or isinstance(record.get("completion"), list):
        for name, role in (("prompt", "user"), ("completion", "assistant")):
            read.add(name)
            is_text = isinstance(record[name], str)
            side = [Message(role, record[name])] if is_text else read_messages(name)
            if name == "prompt":  # its replies are not trained
                side = [replace(m, train=False) if m.train is None else m for m in side]
            messages += side
    else:
        read |= {*ALPACA, "input", "history"}
        expected_names |= {"input", "history"}
        messages += _parse_alpaca(record)
    if system := _find_system(record):
        if not messages or messages[0].role != "system":
            messages.insert(0, Message("system", system))
        elif messages[0].content != system:
            fields = " and ".join(repr(name) for name in SYSTEM if _holds(record, name))
            raise UserError(
                f"its field {fields} and its first message, of the role 'system', differ",
                hint="leave one of them out",
            )
    _require_no_near_miss(record, read, expected_names)
    unread += unread_fields(record, read)
    return ParsedRecord(example_type, messages=tuple(messages), unread=tuple(dict.fromkeys(unread)))


def _parse_message(message: Record, roles: Collection[str]) -> tuple[Message, list[str]]:
    """Return a message, and the names of its fields that were not read."""
    for name, remedy in REFUSED_IN_MESSAGES.items():
        if _holds(message, name):
            raise UserError(f"{name!r} in a message is not supported", hint=remedy)
    names = []
    for pair in (("role", "from"), ("content", "value")):
        present = [name for name in pair if message.get(name) is not None]
        if not present:
            fields = ", ".join(map(repr, message)) or "none"
            raise UserError(f"a message has no {pair[0]!r} (or {pair[1]!r}), its fields: {fields}")
        names.append(present[0])
    role, content = names
    read = {role, content, "weight", *MARKS}
    _require_no_near_miss(message, read, ("weight", *MARKS, *REFUSED_IN_MESSAGES))
    unread = unread_fields(message, read)
    parsed = Message(
        _find_role(_string(message, role), roles), _join(message, content), _is_trained(message)
    )
    return parsed, [*unread]


def _find_role(name: str, roles: Collection[str]) -> str:
    """Return the template's role for a program's name of it."""
    role = name if name in roles else ROLES.get(name.lower(), name.lower())
    if role not in roles:
        others = (other for other in ROLES if ROLES[other] in roles)
        raise UserError(f"no role {short(name)}: the roles are {', '.join([*roles, *others])}")
    return role


def _join(message: Record, name: str) -> str:
    """Return the content of a message, a text or a list of parts that are texts."""
    content = message[name]
    if not isinstance(content, list):
        return _string(message, name)
    texts = []
    for item in content:
        if not isinstance(item, dict) or item.get("type") != "text":
            got = item.get("type") if isinstance(item, dict) else type(item).__name__
            raise UserError(
                f"a part of {name!r} is of the type {short(got)}, and only text is read"
            )
        texts.append(_string(item, "text"))
    return "".join(texts)


def _is_trained(message: Record) -> bool | None:
    """Return whether a message is trained by its own fields; None: as its role is."""
    marks = dict[str, bool]()
    for name in MARKS:
        if (value := message.get(name)) is not None:
            if not isinstance(value, bool):
                raise UserError(f"{name!r} must be true or false, got {short(value)}")
            marks[name] = value
    if (weight := message.get("weight")) is not None:
        if weight not in (0, 1):
            raise UserError(
                f"'weight' must be 0 or 1, got {short(weight)}: a message is trained or it is not"
            )
        marks["weight"] = bool(weight)
    if len({*marks.values()}) > 1:
        raise UserError(f"{' and '.join(map(repr, marks))} of a message disagree: leave one")
    return next(iter(marks.values()), None)


def _parse_alpaca(record: Record) -> Iterator[Message]:
    """Yield the messages of an instruction, as LLaMA-Factory reads them."""
    history = record["history"] if _holds(record, "history") else []
    is_list = isinstance(history, list) and all(isinstance(pair, list) for pair in history)
    if not is_list or not all(
        len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in history
    ):
        raise UserError("'history' must be a list of pairs, a question and its answer each")
    for question, answer in history:
        yield from (Message("user", question), Message("assistant", answer))
    names = [name for name in ("instruction", "input") if _holds(record, name)]
    yield Message("user", "\n".join(_string(record, name) for name in names))
    yield Message("assistant", _string(record, "output"))


def _find_system(record: Record) -> str:
    """Return the text of the fields in `SYSTEM`, or ""."""
    systems = {name: _string(record, name) for name in SYSTEM if _holds(record, name)}
    if len({*systems.values()}) > 1:
        raise UserError(f"{' and '.join(map(repr, systems))} differ: leave one")
    return next(iter(systems.values()), "")


def _require_no_preference(record: Record) -> None:
    """Raise `UserError` for an answer that is marked as worse than another, or as bad."""
    names = [name for name in PREFERENCES if _holds(record, name)]
    if names:
        raise UserError(
            f"{' and '.join(map(repr, names))} beside an example is a preference",
            hint="examples/dpo.py trains on preferences; to train on the example, leave them out",
        )
    if marks := [name for name in ("label", "kto_tag") if record.get(name) is False]:
        raise UserError(
            f"{marks[0]!r} false marks a bad answer, which would be learned like a good one",
            hint="leave such lines out, or rename the field",
        )


def _require_no_near_miss(record: Record, read: Collection[str], expected: Collection[str]) -> None:
    """Raise `UserError` for an unread field that spells almost a known one, such as "Weight"."""
    bare = {name.replace("_", ""): name for name in expected}
    for name in unread_fields(record, {*read, *expected}):
        word = name.lower().replace("-", "_")
        near = [bare[word.replace("_", "")]] if word.replace("_", "") in bare else []
        near = near or [
            other
            for other in get_close_matches(word, expected, n=1, cutoff=0.8)
            if other.count("_") == word.count("_")  # "history_id" is another word
        ]
        if near:
            raise UserError(
                f"there is no field {name!r}",
                hint=f"did you mean {near[0]!r}? If not, rename the field or leave it out",
            )


def _suggest(record: Record) -> str | None:
    """Return a hint that renames fields so that a record becomes an example, or None."""
    names = [str(name) for name, value in record.items() if value is not None]
    lists = [name for name in names if _holds_messages(record[name])]
    if {*PREFERENCES} <= {*names}:
        target = "output" if "instruction" in names else "completion"
        target = target if {"instruction", "prompt"} & {*names} else "messages"
        return (
            "examples/dpo.py trains on preferences; to train on the better answers, rename "
            f"'chosen' to {target!r} and leave out 'rejected'"
        )
    if lists:
        return f"rename {lists[0]!r} to 'messages'"
    question, answer = (
        next((name for word in words for name in names if name.lower() == word), None)
        for words in (QUESTIONS, ANSWERS)
    )
    if question and answer and question != answer:
        chat = _rename((question, answer), ALPACA)
        pair = _rename((question, answer), ("prompt", "completion"))
        return f"for a chat, rename {chat}; to continue the prompt as it is, rename {pair}"
    texts = [name for name in names if isinstance(record[name], str)]
    if len(texts) == 1:
        return (
            f"rename {texts[0]!r} to 'text' (`tiedgpt train` and `tune` take "
            f"--text-field {texts[0]})"
        )
    return "rename its fields" if texts else None


def _rename(old: Iterable[str], new: Iterable[str]) -> str:
    pairs = zip(old, new, strict=True)
    return " and ".join(f"{name!r} to {other!r}" for name, other in pairs if name != other)


def _holds_messages(value: Any) -> bool:
    """Return whether a value is a list of objects with a role and a content."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, dict) for one in value)
        and not {"role", "from"}.isdisjoint(value[0])
    )


def _holds(record: Record, name: str) -> bool:
    """Return whether a field is there and neither null nor empty."""
    value = record.get(name)
    return value is not None and not (isinstance(value, (str, list, dict)) and not value)


def _string(record: Record, name: str, expected: str = "a string") -> str:
    value = record.get(name)
    if not isinstance(value, str):
        raise UserError(f"{name!r} must be {expected}, got {type(value).__name__}")
    return value
