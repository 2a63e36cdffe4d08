"""Text to token batches: corpora, the split, shards, and the order in which they are read."""

from tiedgpt.data.corpus import Corpus, Document, FileCorpus, documents
from tiedgpt.data.embedded import python_documentation
from tiedgpt.data.encode import Counts, EncodedCorpus, Encoder, encode_corpus, open_encoded
from tiedgpt.data.order import IGNORED, Batch, Batches, Tokens, in_order, permutation
from tiedgpt.data.shards import Shards, ShardWriter
from tiedgpt.data.split import Side, Split, plan_split

__all__ = [
    "IGNORED",
    "Batch",
    "Batches",
    "Corpus",
    "Counts",
    "Document",
    "EncodedCorpus",
    "Encoder",
    "FileCorpus",
    "ShardWriter",
    "Shards",
    "Side",
    "Split",
    "Tokens",
    "documents",
    "encode_corpus",
    "in_order",
    "open_encoded",
    "permutation",
    "plan_split",
    "python_documentation",
]
