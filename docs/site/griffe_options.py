"""Griffe extension: the default and the help of fields that are declared by `option(...)`."""

import ast
from typing import Any

import griffe


class Options(griffe.Extension):
    """Documentation of `field: type = option(default, help, ...)`: its default and its help."""

    def on_attribute_instance(
        self, *, node: ast.AST | griffe.ObjectNode, attr: griffe.Attribute, **kwargs: Any
    ) -> None:
        """Replace the value of a field by its default, and add its help."""
        value = getattr(node, "value", None)
        match value:
            case ast.Call(func=ast.Name(id="option"), args=[default, text, *_]):
                attr.value = griffe.get_expression(default, parent=attr.parent)
                attr.docstring = griffe.Docstring(ast.literal_eval(text), parent=attr)
