"""Griffe extension: the default and the help of fields declared by `option` or `argument`."""

import ast
from typing import Any

import griffe


class Options(griffe.Extension):
    """Documentation of `field: type = option(default, help, ...)`: its default and its help."""

    def on_attribute_instance(
        self, *, node: ast.AST | griffe.ObjectNode, attr: griffe.Attribute, **kwargs: Any
    ) -> None:
        """Replace the value of a field by its default, and add its help."""
        match getattr(node, "value", None):
            case ast.Call(func=ast.Name(id="option"), args=positional):
                default, text = [*positional, None, None][:2]
            case ast.Call(func=ast.Name(id="argument"), args=[text, *_], keywords=keywords):
                default = {keyword.arg: keyword.value for keyword in keywords}.get("default")
            case _:
                return
        attr.value = default and griffe.get_expression(default, parent=attr.parent)
        if isinstance(text, ast.Name):  # a constant of the module
            text = ast.parse(str(attr.module[text.id].value), mode="eval").body
        if text:
            attr.docstring = griffe.Docstring(ast.literal_eval(text), parent=attr)
