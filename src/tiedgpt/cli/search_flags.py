"""The flags of `tiedgpt generate` that say how a text is searched for, and in what form."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tiedgpt.errors import CorruptInputError, UserError

EARLY_STOPPING: dict[str, bool | str] = {"no": False, "yes": True, "never": "never"}


@dataclass(frozen=True, kw_only=True)
class SearchFlags:
    """How the text is searched for, and what form it has."""

    num_beams: int = 1
    """Above 1: beam search with that many prefixes, for the likeliest text."""
    length_penalty: float = 1.0
    """Of beam search: above 0 longer texts gain, below 0 shorter ones."""
    early_stopping: Literal["no", "yes", "never"] = "no"
    """Of beam search: end when there are enough texts (yes), or when no better is likely (no), or
    possible (never)."""
    best_of: int = 1
    """Above 1: draw that many texts, and show the likeliest."""
    guidance_scale: float = 1.0
    """Above 1: away from how the negative prompt would go on."""
    negative_prompt: str | None = None
    """What to be guided away from; default: the prompt's last token alone."""
    regex: str | None = None
    """The text matches this regular expression as a whole."""
    json_schema: str | None = None
    """The text is JSON that this schema allows: a file, or the schema itself in braces."""
    grammar: Path | None = None
    """The text follows the grammar in this file, written in Lark's syntax."""

    @property
    def shown_at_its_end(self) -> bool:
        """Whether the text is known only when all of it is."""
        return self.num_beams > 1 or self.best_of > 1

    @property
    def draws(self) -> bool:
        """Whether there is chance in it."""
        return self.num_beams <= 1

    @property
    def may_slide(self) -> bool:
        """Whether --context-end slide goes with it."""
        return self.draws and self.guidance_scale == 1

    @property
    def has_form(self) -> bool:
        """Whether a form was asked for."""
        return any(form is not None for form in (self.regex, self.json_schema, self.grammar))

    def keywords(self) -> dict[str, Any]:
        """Return the flags as `Engine.generate` takes them, files read."""
        schema = self.json_schema
        if schema is not None and not schema.lstrip().startswith("{"):
            schema = _text_of(Path(schema), "--json-schema")
        grammar = None if self.grammar is None else _text_of(self.grammar, "--grammar")
        return dataclasses.asdict(self) | {
            "early_stopping": EARLY_STOPPING[self.early_stopping],
            "json_schema": schema,
            "grammar": grammar,
        }


def _text_of(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CorruptInputError(f"{flag} {path} is not UTF-8: {error}") from None
