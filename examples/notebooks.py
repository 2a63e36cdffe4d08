"""Run the notebooks in this folder, cell by cell, and store their outputs.

    python examples/notebooks.py [NOTEBOOK ...]

Jupyter is not needed. A cell is executed as Python. Its outputs are its printed text, the value of
its last expression unless that ends in a semicolon, and the open figures of matplotlib.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def execute(cells: list[dict[str, Any]], name: str) -> None:
    """Run the code cells in turn, in one namespace, and put their outputs into them."""
    import matplotlib

    matplotlib.use("Agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, start=1):
        source = "".join(cell["source"])
        tree, shown = ast.parse(source), not source.rstrip().endswith(";")
        is_value = shown and isinstance(tree.body[-1], ast.Expr)
        last = tree.body.pop() if is_value else None
        out, value = io.StringIO(), None
        where = f"{name}, cell {number}"
        with contextlib.redirect_stdout(out):
            exec(compile(tree, where, "exec"), names)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), where, "eval"), names)
        cell["execution_count"] = number
        cell["outputs"] = [*_text(out.getvalue()), *_value(value, number), *_figures()]


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _text(text: str) -> list[dict[str, Any]]:
    stream = {"output_type": "stream", "name": "stdout", "text": _lines(text)}
    return [stream] if text else []


def _value(value: Any, number: int) -> list[dict[str, Any]]:
    if value is None:
        return []
    data = {"text/plain": _lines(repr(value))}
    result = {"output_type": "execute_result", "execution_count": number, "data": data}
    return [result | {"metadata": {}}]


def _figures() -> list[dict[str, Any]]:
    """Return the open figures as PNG, and close them."""
    from matplotlib import pyplot

    outputs = []
    for number in pyplot.get_fignums():
        png = io.BytesIO()
        pyplot.figure(number).savefig(png, dpi=72, bbox_inches="tight")
        data = {"image/png": base64.b64encode(png.getvalue()).decode()}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    pyplot.close("all")
    return outputs


def main(paths: list[Path]) -> None:
    """Run notebooks in the current directory and store their outputs in them."""
    sys.path.insert(0, str(HERE))
    for path in paths:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        execute(notebook["cells"], path.name)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"ran {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "notebooks", nargs="*", type=Path, help="notebooks to run; default: all of this directory"
    )
    paths = parser.parse_args().notebooks
    if missing := [str(path) for path in paths if not path.is_file()]:
        parser.error(f"there is no notebook {', '.join(missing)}")
    main([path.resolve() for path in paths] or sorted(HERE.glob("*.ipynb")))
