"""GPT-1's BPE: text -> lower-case words -> pieces of words -> ids.

Text is cleaned (no control characters, no accents, lower case), split at blanks and around every
punctuation mark, and each word is merged from its characters (Radford et al. 2018, "Improving
Language Understanding by Generative Pre-Training", section 4.1). A token that ends a word is
written with `</w>`, which is decoded to a blank. So what was blank, upper case or accented cannot
be told from the ids: the text that they stand for is the text that they decode to.

Characters outside the vocabulary are `<unk>`, each by itself.
"""

import re

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, normalizers, pre_tokenizers

from tiedgpt.errors import UserError

END_OF_WORD = "</w>"
UNKNOWN = "<unk>"

CHUNK = 1 << 16  # characters encoded at a time
# Both characters are blanks to the splitter, and none of the cleaning looks across a blank: what
# comes before one and what begins with it are encoded alike together and apart.
_BLANK = re.compile("[ \n]")


def lower_case_tokenizer(model: models.BPE) -> tokenizers.Tokenizer:
    """`model`, a BPE over characters with END_OF_WORD, between GPT-1's splitter and joiner."""
    rust = tokenizers.Tokenizer(model)
    rust.normalizer = normalizers.BertNormalizer(lowercase=True)
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.BPEDecoder(suffix=END_OF_WORD)
    return rust


class LowerCaseBPE:
    """Encodes with GPT-1's BPE; special tokens in the text are ordinary text here."""

    kind = "gpt1"

    def __init__(self, rust: tokenizers.Tokenizer) -> None:
        unknown = rust.model.unk_token
        if unknown is None or rust.token_to_id(unknown) is None:
            raise UserError(
                f"this BPE with {END_OF_WORD} has no token for unknown characters, which would be "
                f"lost without a word; use a vocabulary with {UNKNOWN}, as GPT-1's"
            )
        self._rust = rust
        added = rust.get_added_tokens_decoder().values()
        self._found_in_text = any(not token.special for token in added)

    @staticmethod
    def reads(rust: tokenizers.Tokenizer) -> bool:
        """Whether `rust` cleans, splits, merges and joins as GPT-1's tokenizer does."""
        return (
            isinstance(rust.model, models.BPE)
            and isinstance(rust.normalizer, normalizers.BertNormalizer)
            and isinstance(rust.pre_tokenizer, pre_tokenizers.BertPreTokenizer)
            and isinstance(rust.decoder, decoders.BPEDecoder)
            and rust.decoder.suffix == rust.model.end_of_word_suffix == END_OF_WORD
            and not rust.model.continuing_subword_prefix
        )

    def token_bytes(self, token: str) -> bytes:
        """The UTF-8 bytes that a token of the vocabulary stands for where another follows."""
        return token.replace(END_OF_WORD, " ").encode()

    def last_bytes(self) -> dict[int, bytes]:
        """What the ids that end a word stand for at the end of a text: no blank follows there."""
        vocabulary = self._rust.get_vocab(with_added_tokens=False)
        return {
            id: token.replace(END_OF_WORD, "").encode()
            for token, id in vocabulary.items()
            if END_OF_WORD in token
        }

    def encode_array(self, text: str, at: int = 0) -> NDArray[np.uint32]:
        """`text` -> (N,) ids; takes any text, so that `at` is not needed."""
        parts = [self._encode(part) for part in self._chunks(text)]
        return np.concatenate([np.array(part, dtype=np.uint32) for part in parts])

    def encode(self, text: str, at: int = 0) -> list[int]:
        """`text` -> ids; as `encode_array`."""
        return [id for part in self._chunks(text) for id in self._encode(part)]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._rust.encode(text, add_special_tokens=False).ids
        return ids

    def _chunks(self, text: str) -> list[str]:
        """`text`, cut before blanks, where no added token could reach across."""
        if self._found_in_text:
            return [text]
        cuts = [0]
        while cut := _BLANK.search(text, cuts[-1] + CHUNK):
            cuts.append(cut.start())
        return [text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]
