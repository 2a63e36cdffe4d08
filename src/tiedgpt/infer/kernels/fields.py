"""Named tuples of arrays that stay in memory: a kernel reads an item when it asks for it.

A tuple by value is many arguments of each function, which LLVM takes long to compile.
"""

from __future__ import annotations

import zlib
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, lower_getattr_generic, models, register_model

i32, i64, f32 = ir.IntType(32), ir.IntType(64), ir.FloatType()


class Fields(types.Type):
    """A named tuple as the words that `arguments.flatten` writes."""

    def __init__(self, tuple_type: Any) -> None:
        self.instance_class = tuple_type.instance_class
        self.types = tuple(map(in_memory, tuple_type.types))
        self.fields = tuple_type.fields
        digest = zlib.crc32(str(tuple_type).encode())
        super().__init__(name=f"{self.instance_class.__name__}:{digest:08x}")


@register_model(Fields)
class _FieldsModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, i64.as_pointer())


@infer_getattr
class _FieldsTemplate(AttributeTemplate):
    key = Fields

    def generic_resolve(self, fields, name):
        return dict(zip(fields.fields, fields.types, strict=True)).get(name)


@lower_getattr_generic(Fields)
def read_field(context: Any, builder: Any, fields: Fields, words: Any, name: str) -> Any:
    """Return an item of a tuple whose words are at an address."""
    n = fields.fields.index(name)
    offset = sum(map(n_words, fields.types[:n]))
    return value_at(context, builder, fields.types[n], builder.gep(words, [i64(offset)]))


def in_memory(numba_type: Any) -> Any:
    """Return the type of an argument as a kernel receives it: a named tuple's fields."""
    return Fields(numba_type) if isinstance(numba_type, types.BaseNamedTuple) else numba_type


def n_words(numba_type: Any) -> int:
    """Return the number of words of a value."""
    if isinstance(numba_type, Fields):
        return sum(map(n_words, numba_type.types))
    return 1 + (numba_type.ndim if isinstance(numba_type, types.Array) else 0)


def value_at(context: Any, builder: Any, numba_type: Any, words: Any) -> Any:
    """Return the value of a type whose words are at an address."""
    if isinstance(numba_type, Fields):
        return words
    word = builder.load(words)
    if not isinstance(numba_type, types.Array):
        if numba_type == types.float32:
            return builder.bitcast(builder.trunc(word, i32), f32)
        return context.cast(builder, word, types.int64, numba_type)
    element = context.get_data_type(numba_type.dtype)
    size = step = i64(context.get_abi_sizeof(element))
    axes = range(1, 1 + numba_type.ndim)
    shape = [builder.load(builder.gep(words, [i64(axis)])) for axis in axes]
    strides: list[Any] = []
    for n in reversed(shape):
        strides.insert(0, step)
        step = builder.mul(step, n)
    array = cgutils.create_struct_proxy(numba_type)(context, builder)
    array.data = builder.inttoptr(word, element.as_pointer())
    array.shape = cgutils.pack_array(builder, shape)
    array.strides = cgutils.pack_array(builder, strides)
    array.itemsize, array.nitems = size, builder.sdiv(step, size)
    return array._getvalue()
