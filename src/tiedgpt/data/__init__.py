"""Text to token batches: corpora, splits, token shards and the order of batches."""

from tiedgpt.data.corpus import Corpus, Document, FileCorpus, documents, json_lines
from tiedgpt.data.encode import Counts, EncodedCorpus, encode_corpus, open_encoded
from tiedgpt.data.order import IGNORED, Batches, in_order, permutation
from tiedgpt.data.python_docs import python_documentation
from tiedgpt.data.shards import Shards, ShardWriter
from tiedgpt.data.split import Split, plan_split

__all__ = [
    "IGNORED",
    "Batches",
    "Corpus",
    "Counts",
    "Document",
    "EncodedCorpus",
    "FileCorpus",
    "ShardWriter",
    "Shards",
    "Split",
    "documents",
    "encode_corpus",
    "in_order",
    "json_lines",
    "open_encoded",
    "permutation",
    "plan_split",
    "python_documentation",
]
