"""Chat templates: messages -> pieces of text, and which of them are trained.

A template is data: for each role, what stands before and after its messages, and whether they are
trained. It is rendered here without Jinja. `write_template` writes it as `chat_template.jinja`,
with which transformers makes the same ids and the same mask. Templates of other programs are
refused, never executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tiedgpt.errors import UserError
from tiedgpt.files import read_json, reading, replacing, write_json
from tiedgpt.text.codec import END_OF_TEXT

if TYPE_CHECKING:
    from tiedgpt.text import Tokenizer

FILE, GENERATION, CONFIG = "chat_template.jinja", "generation_config.json", "tokenizer_config.json"
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
    """What stands around the messages of a role.

    Blanks that end `prefix` belong to the content, as words bring the blank before them. A trained
    message is trained up to the last special token of `suffix`.
    """

    prefix: str
    suffix: str
    counted: bool = False


@dataclass(frozen=True)
class Template:
    """How a conversation becomes text. `<|endoftext|>` is the tokenizer's end of text.

    Raises `UserError` where no role is trained, or a trained one has no end token: a model tuned
    with it would never stop.
    """

    name: str
    roles: Mapping[str, Role]
    begin: str = ""
    """What begins a conversation."""
    tokens: tuple[str, ...] = ()
    """The special tokens in it, beside `<|endoftext|>`; a tokenizer may lack them."""

    def __post_init__(self) -> None:
        counted = [role for role in self.roles.values() if role.counted]
        if not counted or not all(self._ends(role)[0] for role in counted):
            raise UserError(
                f"template {self.name!r} must train a role, whose suffix has an end token: put "
                f"{END_OF_TEXT} or one of `tokens` there, or the model would never stop"
            )

    def pieces(self, messages: Iterable[Mapping[str, Any]]) -> Iterator[Piece]:
        """Yield the pieces of a conversation of {"role": ..., "content": ...}.

        With `"train": False` a message is not trained. Raises `UserError` for other roles.
        """
        yield from self._split(self.begin)
        for message in messages:
            role = self.roles.get(message["role"])
            if role is None:
                known = ", ".join(self.roles)
                raise UserError(f"template {self.name!r} has no role {message['role']!r}: {known}")
            counted = role.counted and message.get("train", True)
            opening = role.prefix.rstrip(" ")
            end, rest = self._ends(role)
            yield from self._split(opening)
            yield Piece(role.prefix[len(opening) :] + message["content"], counted)
            yield from self._split(end, counted)
            yield from self._split(rest)

    def prompt(self, messages: Iterable[Mapping[str, Any]]) -> Iterator[Piece]:
        """Yield the pieces of a conversation that the model is to continue with its reply."""
        yield from self.pieces(messages)
        yield from self._split(self._reply().prefix.rstrip(" "))

    def end_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Return the ids that end a reply: the tokenizer's end of text, and the template's."""
        ends = [piece for piece in self._split(self._ends(self._reply())[0]) if piece.special]
        ids, _ = encode_pieces([Piece(END_OF_TEXT, True, True), ends[-1]], tokenizer)
        return list(dict.fromkeys(ids))

    def _reply(self) -> Role:
        return next(role for role in self.roles.values() if role.counted)

    def _ends(self, role: Role) -> tuple[str, str]:
        """Return a suffix up to its last special token, and what follows."""
        pieces = list(self._split(role.suffix))
        rest = pieces.pop().text if pieces and not pieces[-1].special else ""
        return "".join(piece.text for piece in pieces), rest

    def _split(self, text: str, counted: bool = False) -> Iterator[Piece]:
        special = "|".join(map(re.escape, (END_OF_TEXT, *self.tokens)))
        for number, part in enumerate(re.split(f"({special})", text)):
            if part:
                yield Piece(part, counted, number % 2 == 1)

    def jinja(self) -> str:
        """Return the template as transformers executes it, its data in the first line."""
        data = json.dumps(asdict(self)).replace("#", "\\u0023")  # no `#}` ends the comment early
        lines = [f"{{#- tiedgpt template {data} -#}}", self._show(self.begin)]
        lines.append("{%- for message in messages -%}")
        for number, (name, role) in enumerate(self.roles.items()):
            opening = role.prefix.rstrip(" ")
            end, rest = self._ends(role)
            blanks, end = json.dumps(role.prefix[len(opening) :]), self._literal(end)
            body = f"{{{{- {blanks} + message['content'] + {end} -}}}}"
            if role.counted:
                trained = f"{{%- generation -%}}{body}{{%- endgeneration -%}}"
                body = f"{{%- if message.train is false -%}}{body}{{%- else -%}}{trained}"
                body += "{%- endif -%}"
            lines += [
                f"{{%- {'elif' if number else 'if'} message['role'] == {json.dumps(name)} -%}}",
                self._show(opening) + body + self._show(rest),
            ]
        lines += [
            "{%- else -%}{{- raise_exception('no such role: ' + message['role']) -}}{%- endif -%}",
            "{%- endfor -%}",
            "{%- if add_generation_prompt -%}",
            self._show(self._reply().prefix.rstrip(" ")),
            "{%- endif -%}",
        ]
        return "\n".join(lines) + "\n"

    def _show(self, text: str) -> str:
        return f"{{{{- {self._literal(text)} -}}}}"

    def _literal(self, text: str) -> str:
        parts = [
            "eos_token" if p.text == END_OF_TEXT else json.dumps(p.text, ensure_ascii=False)
            for p in self._split(text)
        ]
        return " + ".join(parts) or "''"


def _chatml(role: str, counted: bool = False) -> Role:
    return Role(f"<|im_start|>{role}\n", "<|im_end|>\n", counted)


CHATML = Template(
    "chatml",
    {
        "system": _chatml("system"),
        "user": _chatml("user"),
        "assistant": _chatml("assistant", counted=True),
        "tool": _chatml("tool"),
    },
    begin=END_OF_TEXT,
    tokens=("<|im_start|>", "<|im_end|>"),
)
PLAIN = Template(
    "plain",
    {
        "system": Role("", "\n\n"),
        "user": Role("User: ", "\n\n"),
        "assistant": Role("Assistant: ", END_OF_TEXT, counted=True),
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
            f"the tokenizer has no special token {token}: use Tokenizer.with_special_tokens, and "
            "tie.add_tokens for the model"
        )
    return ids[0]


def write_template(template: Template, tokenizer: Tokenizer, directory: str | Path) -> None:
    """Write a template beside a saved model and tokenizer, so that transformers chats with them.

    Writes `chat_template.jinja` and, in `generation_config.json`, the ids that end a reply. Raises
    `UserError`, before anything is written, where the tokenizer lacks a token of the template.
    """
    ends = template.end_ids(tokenizer)
    encode_pieces([Piece(token, False, True) for token in template.tokens], tokenizer)
    directory = Path(directory)
    with replacing(directory / FILE) as temporary:
        temporary.write_text(template.jinja(), encoding="utf-8")
    for name, new in ((GENERATION, {"eos_token_id": ends}), (CONFIG, {})):
        path = directory / name
        old: dict[str, Any] = read_json(path) if path.exists() else {}
        # Either would win over what is written here.
        kept = {k: v for k, v in old.items() if k not in ("_from_model_config", "chat_template")}
        if kept | new != old:
            write_json(path, kept | new)


def read_template(directory: str | Path) -> Template | None:
    """Return the template that `write_template` wrote into a directory; None where there is none.

    Raises `UserError` for a template of another program: it would have to be executed.
    """
    path = Path(directory) / FILE
    if path.is_file():
        with reading(path, "chat template"):
            text: Any = path.read_text(encoding="utf-8")
    else:
        path = Path(directory) / CONFIG
        text = read_json(path).get("chat_template") if path.is_file() else None
    if text is None:
        return None
    template = _ours(text) if isinstance(text, str) else None
    if template is None:
        raise UserError(
            f"{path} holds a chat template that tiedgpt did not write, and foreign templates are "
            f"not executed: name one of ours, {' or '.join(TEMPLATES)}"
        )
    return template


def _ours(text: str) -> Template | None:
    """Return the template of a text that we wrote, letter for letter; else None."""
    try:
        data = json.loads(OURS.match(text)[1])  # type: ignore[index]
        roles = {name: Role(**role) for name, role in data.pop("roles").items()}
        template = Template(roles=roles, **data | {"tokens": tuple(data["tokens"])})
        return template if template.jinja() == text else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
