"""The lists that are kept by hand name each option, field and inspection of the code."""

import re
from dataclasses import fields

import pytest

from tests.docs.conftest import ROOT
from tiedgpt.infer import GenerationConfig
from tiedgpt.infer.generation_config import NEUTRAL
from tiedgpt.inspect.registry import INSPECTIONS
from tiedgpt.serve import foreign_fields
from tiedgpt.serve.responses import ResponsesRequest
from tiedgpt.serve.schemas import ChatRequest, CompletionRequest

PAGE = ROOT / "src" / "tiedgpt" / "serve" / "page"
GUIDES = ROOT / "docs" / "guides"
REQUESTS = (CompletionRequest, ChatRequest, ResponsesRequest)
FIELDS = (
    {name for request in REQUESTS for name in request.model_fields}
    | foreign_fields.LABELS
    | foreign_fields.NEUTRAL.keys()
    | foreign_fields.RESPONSES_LABELS
)


def words_of(path):
    """Return the names in a page's code: in backticks or blocks, with underscores."""
    code = re.findall(r"```.*?```|`[^`]+`", path.read_text(), re.DOTALL)
    return set(re.findall(r"\w+", " ".join(code).replace("-", "_")))


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("generate.md", {field.name for field in fields(GenerationConfig)}),
        ("serve.md", FIELDS),
        ("inspect.md", {*INSPECTIONS}),
    ],
)
def test_a_guide_names_each_option(page, names):
    assert names - words_of(GUIDES / page) == set(), f"name these in docs/guides/{page}"


def test_the_page_computes_each_inspection_and_the_same_neutral_options():
    computed = set()
    for file, table in (("inspections.js", "INSPECTIONS"), ("learning.js", "GRADIENTS")):
        code = (PAGE / "model" / file).read_text()
        computed |= set(re.findall(r"\w+", code.partition(f"export const {table} = ")[2]))
    served = {name for name, inspection in INSPECTIONS.items() if inspection.is_served}
    assert served <= computed, (
        "compute these in serve/page/model/inspections.js, or give their records is_served=False"
    )
    filters = (PAGE / "model" / "filters.js").read_text()
    neutral = dict(
        re.findall(r"(\w+): ([\d.]+)", filters.partition("NEUTRAL = ")[2].partition(";")[0])
    )
    assert {name: float(value) for name, value in neutral.items()}.items() <= NEUTRAL.items()
