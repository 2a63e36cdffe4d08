"""Text to token batches: corpora, examples, splits, token shards and the order of batches.

For example:

    from tiedgpt.data import documents, encode_corpus, plan_split

    corpus = documents(["my.txt"])  # or folders, globs, .jsonl, .csv, .parquet, hf:OWNER/NAME
    split = plan_split(corpus)  # a tenth of the text validates
    encoded = encode_corpus(split, tokenizer, "shards")  # token shards in llm.c's format
    print(encoded)
"""

from tiedgpt.data.corpus import Corpus, Document, FileCorpus, documents
from tiedgpt.data.encode import (
    Counts,
    EncodedCorpus,
    Split,
    encode_corpus,
    open_encoded,
    plan_split,
)
from tiedgpt.data.examples import EncodedExamples, Example, ExampleReader
from tiedgpt.data.order import IGNORED, Batches, in_order, permutation
from tiedgpt.data.packing import PackedBatches
from tiedgpt.data.prepare import plan_preparation, prepare_data, verify_data
from tiedgpt.data.python_docs import python_documentation
from tiedgpt.data.shards import Shards, ShardWriter
from tiedgpt.data.templates import TEMPLATES, Template, read_template, write_template

__all__ = [
    "IGNORED",
    "TEMPLATES",
    "Batches",
    "Corpus",
    "Counts",
    "Document",
    "EncodedCorpus",
    "EncodedExamples",
    "Example",
    "ExampleReader",
    "FileCorpus",
    "PackedBatches",
    "ShardWriter",
    "Shards",
    "Split",
    "Template",
    "documents",
    "encode_corpus",
    "in_order",
    "open_encoded",
    "permutation",
    "plan_preparation",
    "plan_split",
    "prepare_data",
    "python_documentation",
    "read_template",
    "verify_data",
    "write_template",
]


def __dir__() -> list[str]:
    return __all__
