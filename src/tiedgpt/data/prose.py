"""From documentation markup to plain prose: text in, the same text with less noise out.

A tiny GPT learns what it sees most. Markup, tables, licences and rare characters cost it capacity
and say nothing about Python, so they go; sentences, signatures and examples stay as they are.
"""

import re
import textwrap

PUNCTUATION = str.maketrans(
    {
        "“": '"',
        "”": '"',
        "‘": "'",
        "’": "'",
        "–": "-",
        "—": "--",
        "…": "...",
        "\xa0": " ",
        "→": "->",
    }
)
MARKUP = [
    (re.compile(r"``([^`]+)``"), r'"\1"'),
    (re.compile(r":(?:\w+:)?\w+:`[~!]?([^`<\n]+?)(?: <[^>\n]*>)?`"), r'"\1"'),
    (re.compile(r"^( *)\.\. versionadded:: *(.+)$", re.M), r"\1New in version \2."),
    (re.compile(r"^( *)\.\. versionchanged:: *(.+)$", re.M), r"\1Changed in version \2:"),
    (re.compile(r"^( *)\.\. deprecated:: *(.+)$", re.M), r"\1Deprecated since version \2."),
    (re.compile(r"^( *)\.\. (note|warning|seealso|example)::", re.M), r"\1Note:"),
    (re.compile(r"^ *\.\. [\w-]+::.*$", re.M), ""),
    (re.compile(r"^.*\$(?:Id|Revision|Date)\b.*$", re.M), ""),
    (re.compile(r"[ \t]+$", re.M), ""),
]
LEGAL = re.compile(
    r"copyright|licen[cs]e|all rights reserved|warrant(?:y|ies)|"
    r"^\W*(?:\w+ )?(?:written|contributed|maintained|implemented|created) by\b|^\W*authors?\b|"
    r"[\w.]+@[\w.]+\.(?:com|org|net|de|uk)>?\)?[.,]?$",
    re.I | re.M,
)
RULER = re.compile(r"^\s*([^\w\s])\1{3,}\s*$")


def clean(text: str) -> str:
    """Return the text's paragraphs that are prose or code, in ASCII, one blank line between them.

    Dropped are paragraphs that cannot be written in ASCII, tables, rulers, licences and credits.
    """
    text = text.translate(PUNCTUATION).expandtabs()
    for pattern, replacement in MARKUP:
        text = pattern.sub(replacement, text)
    paragraphs = (_without_ruler(p) for p in re.split(r"\n[ \n]*\n", text.strip("\n")))
    return "\n\n".join(paragraph for paragraph in paragraphs if _is_worth_reading(paragraph))


def indent(text: str) -> str:
    """Return the text moved four columns to the right, blank lines left empty."""
    return textwrap.indent(text, "    ")


def _without_ruler(paragraph: str) -> str:
    """Keep the underline of a heading, drop a line that only separates."""
    lines = paragraph.strip("\n").split("\n")
    return "\n".join(
        line
        for i, line in enumerate(lines)
        if not RULER.match(line) or (i == 1 and len(lines) == 2)
    )


def _is_worth_reading(paragraph: str) -> bool:
    """Return whether a paragraph is ASCII prose or code rather than a table or a legal notice."""
    if not paragraph.strip() or not paragraph.isascii() or LEGAL.search(paragraph):
        return False
    lines = paragraph.split("\n")
    if any(len(line) > 120 or line.lstrip().startswith(("+--", "+==", "|  ")) for line in lines):
        return False
    if not paragraph.replace("\n", "").isprintable():
        return False
    if ">>>" in paragraph:
        return True
    shown = "".join("".join(line.split()) for line in lines if not RULER.match(line))
    letters = sum(map(str.isalpha, shown))
    return letters >= 0.5 * len(shown)
