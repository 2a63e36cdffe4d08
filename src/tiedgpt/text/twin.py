"""A byte-level BPE of `tokenizers` -> the tiktoken encoding with the same ids, or None.

tiktoken merges the adjacent pair whose *concatenation* has the lowest id; `tokenizers` merges the
adjacent pair whose *merge* comes first in a list. The ids are the same if

1. the text is cut into the same pieces: by ByteLevel with GPT-2's regex, without a prefix space, a
   normalizer, or an added token that is found in ordinary text; and every byte has a token;
2. only merges decide: no dropout, no look-up of whole pieces (ignore_merges), no affixes;
3. the tokens that merges make have ids that strictly increase in the order of the merges, so that
   "lowest id" is "first merge", and no two merges make the same token;
4. every byte and every token that a merge makes, alone as a piece, is encoded as itself.

Why 4 is enough. Let X and Y be adjacent, in a state that `tokenizers` reaches, and let XY = T be a
token. No merge has crossed the ends of T, and both choose by (rank, leftmost), so what happened
inside T is what happens when T is encoded alone, whose state is now [X, Y] too. That ends as [T],
and from [X, Y] only the merge (X, Y) leads there: it is in the list. So both see the same pairs, in
the same order, at every step. (tiktoken's look-up of a whole piece gives [T] as well.)
"""

import itertools
import json

import tiktoken
import tokenizers

from tiedgpt.text.bpe import BYTE_ALPHABET, ByteLevelBPE, unlike_gpt2

# GPT-2's regex as tiktoken writes it: possessive where that cannot change the match.
_GPT2_PIECES = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


def tiktoken_twin(rust: tokenizers.Tokenizer) -> tiktoken.Encoding | None:
    """Return the tiktoken encoding with the ids of `rust` on every text, or None if unproven.

    Takes about 0.2 s for GPT-2's 50,257 tokens.
    """
    stored = json.loads(rust.to_str())
    if unlike_gpt2(stored) or not all(token["special"] for token in stored["added_tokens"]):
        return None
    vocabulary: dict[str, int] = stored["model"]["vocab"]
    merged = [a + b for a, b in stored["model"]["merges"]]
    in_order = all(vocabulary[a] < vocabulary[b] for a, b in itertools.pairwise(merged))
    if not in_order or not set("".join(merged)) <= set(BYTE_ALPHABET) <= vocabulary.keys():
        return None
    ids = {token: vocabulary[token] for token in [*BYTE_ALPHABET, *merged]}
    if any([piece.id for piece in rust.model.tokenize(token)] != [ids[token]] for token in ids):
        return None
    to_bytes = ByteLevelBPE(rust).token_bytes
    ranks = {to_bytes(token): id for token, id in ids.items()}
    return tiktoken.Encoding(
        "tiedgpt", pat_str=_GPT2_PIECES, mergeable_ranks=ranks, special_tokens={}
    )
