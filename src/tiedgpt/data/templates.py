"""Chat templates: messages -> pieces of text, marked as trained or not.

A template is data: for each role, the text around its messages, and whether they are trained.
It is rendered here without Jinja. `write_template` writes it as `chat_template.jinja`, from which
transformers makes the same ids and the same mask, unless content spells a special token (ordinary
text here), or a reply begins with several blanks (a token may reach across the seam there).
Templates of other programs are refused, never executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tiedgpt.errors import UserError
from tiedgpt.files import model_directory, read_json, reading, replacing, write_json
from tiedgpt.signatures import checked
from tiedgpt.text.bpe import END_OF_TEXT

if TYPE_CHECKING:
    from tiedgpt.text import Tokenizer

FILE = "chat_template.jinja"
OURS = re.compile(r"\{#- tiedgpt template (.*) -#\}\n")
"""How the templates begin that we write; the comment holds the template's data."""


class Piece(NamedTuple):
    """A stretch of text, or one special token."""

    text: str
    counted: bool
    """Whether its tokens are trained."""
    special: bool = False


@dataclass(frozen=True)
class Role:
    """The text around the messages of a role: `prefix before CONTENT after suffix`."""

    prefix: str = ""
    before: str = ""
    """With `after`, it belongs to the content: a space before its first word stands here."""
    after: str = ""
    suffix: str = ""
    counted: bool = False
    """Whether `before`, content and `after` are trained; `after` then ends on an end token."""


@dataclass(frozen=True)
class Template:
    """The text of a conversation. `<|endoftext|>` stands for the tokenizer's end of text.

    Raises `UserError` if no role is trained, or a trained one has no end token.
    """

    name: str
    roles: Mapping[str, Role]
    begin: str = ""
    """Text at the beginning of a conversation."""
    tokens: tuple[str, ...] = ()
    """The special tokens in it, beside `<|endoftext|>`; a tokenizer may lack them."""
    max_turns: int | None = None
    """Largest number of replies in a conversation that the model was tuned on; None: unknown.

    A model with `max_turns == 1` has never seen an earlier turn in its prompt.
    """
    default_system: str | None = None
    """The system message of a conversation that does not begin with one."""

    def __post_init__(self) -> None:
        ends, replies = (END_OF_TEXT, *self.tokens), [r for r in self.roles.values() if r.counted]
        if not replies or not all(role.after.endswith(ends) for role in replies):
            raise UserError(
                f"template {self.name!r} must train a role, and its `after` must end on one of "
                f"{', '.join(ends)}: without an end token the model would never stop"
            )
        if self.default_system is not None and "system" not in self.roles:
            raise UserError(f"template {self.name!r} has no role 'system' for its default_system")

    def pieces(self, messages: Iterable[Mapping[str, Any]]) -> Iterator[Piece]:
        """Yield the pieces of a conversation of {"role": ..., "content": ...}.

        `default_system` begins a conversation that has no system message at its beginning. With
        `"train": False` a message is not trained. Raises `UserError` for other roles.
        """
        messages = list(messages)
        has_system = bool(messages) and messages[0]["role"] == "system"
        if self.default_system is not None and not has_system:
            messages.insert(0, {"role": "system", "content": self.default_system})
        yield from self._split(self.begin)
        for message in messages:
            role = self.roles.get(message["role"])
            if role is None:
                roles = ", ".join(self.roles)
                raise UserError(f"template {self.name!r} has no role {message['role']!r}: {roles}")
            counted = role.counted and message.get("train") is not False
            yield from self._split(role.prefix)
            yield from self._split(role.before, counted)
            yield Piece(message["content"], counted)
            yield from self._split(role.after, counted)
            yield from self._split(role.suffix)

    def prompt(self, messages: Iterable[Mapping[str, Any]]) -> Iterator[Piece]:
        """Yield the pieces of a conversation that the model is to continue with its reply."""
        yield from self.pieces(messages)
        yield from self._split(self._reply().prefix)

    def continuation(self, messages: Iterable[Mapping[str, Any]]) -> Iterator[Piece]:
        """Yield the pieces of a conversation whose last message the model is to continue."""
        messages = list(messages)
        role = self.roles[messages[-1]["role"]]
        n_after = len([*self._split(role.after), *self._split(role.suffix)])
        yield from list(self.pieces(messages))[: -n_after or None]

    def count_turns(self, messages: Iterable[Mapping[str, Any]]) -> int:
        """Return the number of messages that the model writes in a conversation."""
        return sum(self.roles[message["role"]].counted for message in messages)

    def end_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Return the ids that end a reply: the tokenizer's end of text, and the template's."""
        *_, end = self._split(self._reply().after)
        return list(
            dict.fromkeys(encode_pieces([Piece(END_OF_TEXT, True, True), end], tokenizer)[0])
        )

    def last_question(self, text: str) -> str:
        """Return the content of the user's last message in a conversation's text."""
        around = self.roles.get("user", Role())
        begin, end = around.prefix + around.before, around.after + around.suffix
        message = text.rpartition(begin)[2] if begin else text
        return (message.partition(end)[0] if end else message).strip()

    def jinja(self) -> str:
        """Return the template as transformers executes it, its data in the first line."""
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        data = json.dumps(fields).replace("#", "\\u0023")  # no `#}` ends the comment early
        lines = ["{#- tiedgpt template " + data + " -#}", self._visible(self.begin)]
        if self.default_system is not None:
            content = json.dumps(self.default_system, ensure_ascii=False)
            lines.append('{%- if not (messages and messages[0].role == "system") -%}')
            default = '[{"role": "system", "content": ' + content + "}]"
            lines.append("{%- set messages = " + default + " + messages -%}{%- endif -%}")
        lines += ["{%- for message in messages -%}", "{%- if false -%}"]
        for name, role in self.roles.items():
            content = (
                self._visible(role.before) + "{{- message.content -}}" + self._visible(role.after)
            )
            if role.counted:
                trained = "{%- generation -%}" + content + "{%- endgeneration -%}{%- endif -%}"
                content = "{%- if message.train is false -%}" + content + "{%- else -%}" + trained
            lines.append("{%- elif message.role == " + json.dumps(name) + " -%}")
            lines.append(self._visible(role.prefix) + content + self._visible(role.suffix))
        lines.append("{%- else -%}{{- raise_exception('no such role: ' + message.role) -}}")
        lines += ["{%- endif -%}", "{%- endfor -%}", "{%- if add_generation_prompt -%}"]
        lines += [self._visible(self._reply().prefix), "{%- endif -%}", ""]
        return "\n".join(lines)

    def plain_jinja(self, end: str) -> str:
        """Return the template for any Jinja: `end` is the end of text, replies are not marked."""
        text = re.sub(r"\{%- (end)?generation -%\}", "", self.jinja())
        return "{%- set eos_token = " + json.dumps(end) + " -%}" + text

    def ollama(self, tokenizer: Tokenizer) -> str:
        """Return the template as Ollama executes it, in Go's language."""

        def visible(text: str) -> str:
            eos = tokenizer.eos_token_id
            end = END_OF_TEXT if eos is None else tokenizer.decode([eos])
            text = text.replace(END_OF_TEXT, end)
            return "{{ " + json.dumps(text, ensure_ascii=False) + " }}" if text else ""

        roles = "{{ else ".join(
            f"if eq .Role {json.dumps(name)} }}}}{visible(role.prefix + role.before)}"
            f"{{{{ .Content }}}}{visible(role.after + role.suffix)}"
            for name, role in self.roles.items()
        )
        messages = "{{ range .Messages }}{{ " + roles + "{{ end }}{{ end }}"
        return visible(self.begin) + messages + visible(self._reply().prefix)

    def _visible(self, text: str) -> str:
        """Return Jinja that prints a text."""
        pieces = [
            "eos_token" if piece.text == END_OF_TEXT else json.dumps(piece.text, ensure_ascii=False)
            for piece in self._split(text)
        ]
        return "{{- " + (" + ".join(pieces) or "''") + " -}}"

    def _reply(self) -> Role:
        return next(role for role in self.roles.values() if role.counted)

    def _split(self, text: str, counted: bool = False) -> Iterator[Piece]:
        special = "|".join(map(re.escape, (END_OF_TEXT, *self.tokens)))
        for number, piece in enumerate(re.split(f"({special})", text)):
            if piece:
                yield Piece(piece, counted, number % 2 == 1)


CHATML = Template(
    "chatml",
    {
        role: Role(f"<|im_start|>{role}\n", "", "<|im_end|>", "\n", counted=role == "assistant")
        for role in ("system", "user", "assistant", "tool")
    },
    begin=END_OF_TEXT,
    tokens=("<|im_start|>", "<|im_end|>"),
)
PLAIN = Template(
    "plain",
    {
        "system": Role(suffix="\n\n"),
        "user": Role("User:", " ", suffix="\n\n"),
        "assistant": Role("Assistant:", " ", END_OF_TEXT, counted=True),
    },
)
TEMPLATES = {template.name: template for template in (CHATML, PLAIN)}


def encode_pieces(pieces: Iterable[Piece], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Return the ids (N,) of pieces, and whether each is trained (N,).

    Neighbouring text that is trained, or that is not, is encoded as one: a prompt is encoded as
    generation encodes it, and no token reaches across the seam. Special tokens in content are
    ordinary text. Raises `UserError` for a special token that the tokenizer lacks.
    """
    ids: list[int] = []
    counted: list[bool] = []
    present = (piece for piece in pieces if piece.text)
    for (is_counted, is_special), run in groupby(present, key=lambda piece: piece[1:]):
        texts = [piece.text for piece in run]
        new = (
            [_special_id(text, tokenizer) for text in texts]
            if is_special
            else tokenizer.encode("".join(texts))
        )
        ids += new
        counted += [is_counted] * len(new)
    return ids, counted


def _special_id(token: str, tokenizer: Tokenizer) -> int:
    if token == END_OF_TEXT and tokenizer.eos_token_id is not None:
        return tokenizer.eos_token_id
    ids = tokenizer.encode(token, allow_special=True)
    if len(ids) != 1:
        raise UserError(
            f"the tokenizer has no special token {token}",
            hint="use Tokenizer.with_special_tokens, and tie.add_tokens for the model",
        )
    return ids[0]


@checked
def write_template(template: Template, tokenizer: Tokenizer, directory: str | Path) -> None:
    """Write a template beside a saved model and tokenizer, so that transformers chats with them.

    Writes `chat_template.jinja` and, in `generation_config.json`, the ids that end a reply. Raises
    `UserError`, before anything is written, where the tokenizer lacks a token of the template.
    """
    new = {"eos_token_id": template.end_ids(tokenizer)}
    encode_pieces([Piece(token, False, True) for token in template.tokens], tokenizer)
    directory = Path(directory)
    with replacing(directory / FILE) as temporary:
        temporary.write_text(template.jinja(), encoding="utf-8")
    path = directory / "generation_config.json"
    old: dict[str, Any] = read_json(path) if path.exists() else {}
    old.pop("_from_model_config", None)  # the model's config has one id alone
    write_json(path, old | new)


@checked
def read_template(
    path: str | Path, read: Callable[[Path], bytes] = Path.read_bytes
) -> Template | None:
    """Return the template of a run, a model's directory or a file's; None without one.

    `read` reads a file. Raises `UserError` for a template of another program, which would have to
    be executed.
    """
    path, text = model_directory(Path(path)), None
    path = (path if path.is_dir() else path.parent) / FILE
    if path.is_file():
        with reading(path, "chat template"):
            text = read(path).decode().replace("\r\n", "\n")
    elif (path := path.with_name("tokenizer_config.json")).is_file():
        text = read_json(path, read).get("chat_template")
    if text is None:
        return None
    try:
        data = json.loads(OURS.match(text)[1])  # type: ignore[index]
        data["roles"] = {name: Role(**role) for name, role in data["roles"].items()}
        template = Template(**data | {"tokens": tuple(data["tokens"])})
        if template.jinja() == text:
            return template
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise UserError(
        f"{path} holds a chat template that tiedgpt did not write, and foreign templates are not "
        "executed",
        hint=f"name one of ours, {' or '.join(TEMPLATES)}",
    )
