"""GPT-1's BPE: text -> lower-case words -> pieces of words -> ids.

Control characters, accents and upper case are removed; the text is split at spaces and around every
punctuation mark, and each word is merged from its characters (Radford et al. 2018, "Improving
Language Understanding by Generative Pre-Training", section 4.1). A token that ends a word is
written with `</w>` and decodes to the word and a space. The ids do not record the removed parts.

Each character outside the vocabulary becomes `<unk>`.
"""

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers
from typing_extensions import override

from tiedgpt.text.bpe import Codec, Ids, chunks

END_OF_WORD = "</w>"
UNKNOWN = "<unk>"


def lower_case_tokenizer(model: models.BPE) -> tokenizers.Tokenizer:
    """Return a tokenizer of a BPE with END_OF_WORD that splits as GPT-1's."""
    rust = tokenizers.Tokenizer(model)
    rust.normalizer = normalizers.BertNormalizer(lowercase=True)
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.BPEDecoder(suffix=END_OF_WORD)
    return rust


class LowerCaseBPE(Codec):
    """Encodes with GPT-1's BPE; special tokens in the text are ordinary text."""

    def __init__(self, rust: tokenizers.Tokenizer) -> None:
        super().__init__(rust)
        added = rust.get_added_tokens_decoder().values()
        self._finds_tokens_in_text = any(not token.special for token in added)

    @staticmethod
    @override
    def reads(rust: tokenizers.Tokenizer) -> bool:
        """Whether `rust` works as GPT-1's tokenizer, and loses no unknown character silently."""
        return (
            isinstance(rust.model, models.BPE)
            and isinstance(rust.normalizer, normalizers.BertNormalizer)
            and isinstance(rust.pre_tokenizer, pre_tokenizers.BertPreTokenizer)
            and isinstance(rust.decoder, decoders.BPEDecoder)
            and rust.decoder.suffix == rust.model.end_of_word_suffix == END_OF_WORD
            and not rust.model.continuing_subword_prefix
            and rust.token_to_id(rust.model.unk_token or "") is not None
        )

    @override
    def token_bytes(self, token: str) -> bytes:
        return token.replace(END_OF_WORD, " ").encode()

    @override
    def word_ends(self) -> set[int]:
        vocabulary = self._rust.get_vocab(with_added_tokens=False)
        return {id for token, id in vocabulary.items() if token.endswith(END_OF_WORD)}

    @override
    def encode(self, text: str, at: int = 0) -> Ids:
        """`text` -> ids, of any text.

        Long text is encoded in chunks cut before spaces, since no merge crosses a space, unless an
        added token may.
        """
        ids: list[int] = []
        for chunk in [text] if self._finds_tokens_in_text else chunks(text):
            ids += self.encode_by_library(chunk)
        return ids
