"""Who sees whom in a model, and by what operation: the same for all its layers, but for the scores of columns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sinklab import spec
from sinklab.attend import examples
from sinklab.attend.bias import Bias, Curve
from sinklab.attend.mask import Mask, mask_of
from sinklab.attend.operation import operation
from sinklab.attend.rule import Case, Rule
from sinklab.model.attention import COMBINATIONS
from sinklab.model.columns import COLUMNS
from sinklab.model.positions import POSITIONS


def rule(model: spec.Model, length: int, curve: Curve | None, position_BT: jax.Array, mask: Mask) -> Rule:
    """Of a model that is trained on windows of `length`; positions and mask are those of the text."""
    columns = COLUMNS[model.columns.kind]
    query_BT = columns.token.positions(position_BT)
    module = np if isinstance(query_BT, np.ndarray) else jnp
    key_BS = module.pad(query_BT, ((0, 0), (columns.count - columns.token.count, 0)))
    mask = mask.pad(before=columns.token.count)
    return Rule(operation(model.attention, length), mask, columns.count, Bias(curve, query_BT, key_BS))


def case(model: spec.Model, length: int) -> Case:
    """What a model over so many tokens asks of a backend; its documents, which differ, are three."""
    columns, document_BT = COLUMNS[model.columns.kind], None
    if model.mask.document:
        document_BT = jnp.asarray(examples.document_starts(length))
    curve = POSITIONS[model.position](model, 1, nnx.Rngs(0)).curve()
    asked = rule(model, length, curve, np.arange(length)[None], mask_of(model.mask, length, document_BT))
    if columns.count > columns.token.count:
        asked = dataclasses.replace(asked, bias=dataclasses.replace(asked.bias, column_HC=jnp.zeros((1, 1))))
    value_width = model.width if COMBINATIONS[model.combination].wide else model.head_width
    return Case(asked, model.heads, model.head_width, value_width, model.dtype)
