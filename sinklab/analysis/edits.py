"""Edits: replacements in the forward pass of a run or of an open model, as `sinklab.Edit` describes them.

Edits are applied to NumPy and to JAX arrays by the same code. Every edited array has the axes B (texts), S (keys, or
tokens), H (heads; 1 for hidden states), and X (the queries of attention weights, or the dimensions of a vector).
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from sinklab.errors import UserError, format_names, format_unknown_name

# {target: what it replaces}
TARGETS = {'attention': 'attention weights', 'key': 'keys', 'value': 'values', 'residual': 'hidden states'}

INDEX_FIELDS = 'positions', 'layers', 'heads', 'dimensions'
MIN_SUM = 1e-30  # of attention weights that are scaled


@dataclasses.dataclass(frozen=True)
class Edit:
    """A replacement in the forward pass, at some positions of each text.

    Edits of a run that differ in numbers, positions, layers, heads and dimensions, but not in how many these are, use
    the same compiled program. An edit with a function is compiled in each call, because the variables that the
    function reads can have changed.

    Attributes:
        target: What is replaced. `attention`: the weights A_ij, after the normalizer, of the keys j at `positions`,
            for every query i that sees them. `key`: the key vectors, as they are multiplied by the queries (rotated).
            `value`: the value vectors, as they are summed. `residual`: the hidden states after a block.
        positions: The token of the text, from 0, or several tokens. Keys before the text, such as a learned sink
            token, are not counted.
        value: The replacement. A number; `mean`, for vectors: their mean over all other tokens of the same text
            (later ones as well, so that a loss is no longer that of a causal model); or a function of an array
            (texts, positions in ascending order, heads, X) that returns an array of the same shape. X is the queries
            for `attention`, and the dimensions of the vector for other targets; hidden states have 1 head. The array
            is of NumPy for an open model, and traced by JAX for a run.
        layers: The layers, from 0, as in `AttentionMatrices.plot`; None: all layers that have the target.
        heads: The heads of the queries, from 0; None: all. Hidden states have none.
        dimensions: The dimensions of the vectors, from 0; None: all. Attention weights have none.
        renormalize: For `attention`: scale the other weights of the row, so that sum_j |A_ij| is as before; they
            become 0 if the edited weights alone have a larger sum. A row without other weights, such as that of the
            first query, is not edited.

    Raises:
        UserError: A field has a value that is not allowed.
    """

    target: str
    positions: int | Sequence[int] = 0
    value: float | str | Callable[[Any], Any] = 0.0
    layers: int | Sequence[int] | None = None
    heads: int | Sequence[int] | None = None
    dimensions: int | Sequence[int] | None = None
    renormalize: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.target, str) or self.target not in TARGETS:
            raise UserError(format_unknown_name(f'target={self.target!r}', str(self.target), TARGETS, 'allowed'))
        for name in INDEX_FIELDS:
            object.__setattr__(self, name, convert_indices(name, getattr(self, name)))
        for name, target in (('heads', 'residual'), ('dimensions', 'attention')):
            if self.target == target and getattr(self, name) is not None:
                raise UserError(f'{name}={getattr(self, name)} is not allowed: {TARGETS[target]} have no {name}')
        if self.renormalize and self.target != 'attention':
            raise UserError(f'renormalize=True is for target="attention", not for {TARGETS[self.target]}; remove it')
        object.__setattr__(self, 'value', self.convert_value())

    def get_indices(self, name: str) -> tuple[int, ...] | None:
        """Return a field of indices with its type after `__post_init__`."""
        indices: tuple[int, ...] | None = getattr(self, name)
        return indices

    def convert_value(self) -> float | str | Callable[[Any], Any]:
        value = self.value
        if callable(value) or (isinstance(value, str) and value == 'mean' and self.target != 'attention'):
            return value
        try:
            number = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not abs(number) <= float(np.finfo(np.float32).max):
            mean = '' if self.target == 'attention' else ", 'mean'"
            raise UserError(f'value={value!r} is not allowed; give a finite number (float32){mean} or a function')
        return number

    def applies_to(self, target: str, layer: int) -> bool:
        """Return whether the edit replaces this target in this layer."""
        layers = self.get_indices('layers')
        return self.target == target and (layers is None or layer in layers)

    def make_arrays(self) -> 'EditArrays':
        """Return the edit in the form in which it is applied to arrays."""
        indices = {name: self.get_indices(name) for name in INDEX_FIELDS}
        number, function = (np.float32(self.value), None) if isinstance(self.value, float) else (None, self.value)
        return EditArrays(
            number=number,
            function=function,
            target=self.target,
            renormalize=self.renormalize,
            **{name: None if value is None else np.array(value) for name, value in indices.items()},
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EditArrays:
    """An `Edit` whose numbers and indices are arrays, of NumPy or traced by JAX.

    A compiled program takes it as an argument. Edits with other numbers, and as many other indices, use the same one.
    """

    positions: Any  # int (N,), ascending
    layers: Any  # int (N,), or None for all
    heads: Any  # int (N,), or None for all
    dimensions: Any  # int (N,), or None for all
    number: Any  # a scalar of float32; None if `function` computes the values
    function: str | Callable[[Any], Any] | None = dataclasses.field(metadata=dict(static=True))  # or 'mean'
    target: str = dataclasses.field(metadata=dict(static=True))
    renormalize: bool = dataclasses.field(metadata=dict(static=True))

    def apply(self, array_BSHX: Any, layer: Any, num_before: int, is_visible_BSHX: Any = True) -> Any:
        """Return the array of the target in one layer with this edit.

        Args:
            array_BSHX: The array.
            layer: The layer, from 0.
            num_before: The number of entries of S before the text.
            is_visible_BSHX: Which attention weights are of keys that the query sees.

        Raises:
            UserError: The function of the edit returns a wrong shape, or there is no other token for a mean.
        """
        xp = array_BSHX.__array_namespace__()
        (size, num_heads, width) = array_BSHX.shape[1:]
        index_N = num_before + self.positions
        is_edited_S11 = find_members(xp, index_N, size)[:, None, None]
        new_BSHX = self.compute_values(array_BSHX, index_N, is_edited_S11, num_before)
        edited_BSHX = xp.where(is_edited_S11 & is_visible_BSHX, new_BSHX, array_BSHX)
        if self.renormalize:
            edited_BSHX = rescale_others(array_BSHX, edited_BSHX, is_edited_S11)
        is_layer = True if self.layers is None else (self.layers == layer).any()
        is_edited_H, is_edited_X = find_members(xp, self.heads, num_heads), find_members(xp, self.dimensions, width)
        is_edited_HX = is_edited_H[:, None] & is_edited_X
        return xp.where(is_layer & is_edited_HX, edited_BSHX, array_BSHX).astype(array_BSHX.dtype)

    def compute_values(self, array_BSHX: Any, index_N: Any, is_edited_S11: Any, num_before: int) -> Any:
        """Return the new values; entries of S that are not in `index_N` are not used. Any axis may be 1."""
        if self.function is None:
            return self.number
        xp = array_BSHX.__array_namespace__()
        index_S = np.arange(array_BSHX.shape[1])
        if callable(self.function):
            inverse_S = xp.searchsorted(index_N, index_S).clip(0, len(index_N) - 1)
            return call_function(self.function, array_BSHX[:, index_N])[:, inverse_S]
        num_others = len(index_S) - num_before - len(index_N)
        if not num_others:
            raise UserError('value="mean" needs another token than those at positions; give a longer text')
        is_other_S11 = (index_S >= num_before)[:, None, None] & ~is_edited_S11
        others_BSHX = xp.where(is_other_S11, array_BSHX.astype('float32'), 0)
        return others_BSHX.sum(1, keepdims=True) / np.float32(num_others)


def convert_indices(name: str, value: Any) -> tuple[int, ...] | None:
    """Return one or more indices as a sorted tuple."""
    if value is None and name != 'positions':
        return None
    try:
        indices = {operator.index(index) for index in (value if np.iterable(value) else [value])}
    except TypeError:
        indices = set()
    if not indices or min(indices) < 0:
        raise UserError(f'{name}={value!r} is not allowed; give indices from 0, such as 0 or (0, 2)')
    return tuple(sorted(indices))


def find_members(xp: Any, indices_N: Any, size: int) -> Any:
    """Return which of 0, 1, ..., size - 1 are in `indices_N`; None: all."""
    return np.ones(size, bool) if indices_N is None else xp.isin(np.arange(size), indices_N)


def call_function(function: Callable[[Any], Any], array_BNHX: Any) -> Any:
    """Call the function of an edit, and check the shape of its result."""
    result = function(array_BNHX)
    if np.shape(result) != array_BNHX.shape:
        raise UserError(f'the function of value= returns the shape {np.shape(result)} for {array_BNHX.shape}')
    return array_BNHX.__array_namespace__().asarray(result)


def rescale_others(array_BSHX: Any, edited_BSHX: Any, is_edited_S11: Any) -> Any:
    """Scale the weights that are not edited, so that the sum over S of |weights| is that of `array_BSHX`.

    They become 0 if the edited weights alone have a larger sum. Rows are not edited if their other weights have a sum
    below MIN_SUM, which cannot be scaled in float32.
    """
    xp = array_BSHX.__array_namespace__()
    other_B1HX = xp.where(is_edited_S11, 0, abs(array_BSHX)).sum(1, keepdims=True)
    missing_B1HX = (abs(array_BSHX) - xp.where(is_edited_S11, abs(edited_BSHX), 0)).sum(1, keepdims=True).clip(0)
    has_others = other_B1HX > MIN_SUM
    scaled_BSHX = array_BSHX * (missing_B1HX / xp.where(has_others, other_B1HX, 1))
    return xp.where(has_others, xp.where(is_edited_S11, edited_BSHX, scaled_BSHX), array_BSHX)


def apply_edits(
    edits: Sequence[EditArrays],
    layer: Any,
    target: str,
    array_BSHX: Any,
    num_before: int,
    is_visible_BSHX: Any = True,
) -> Any:
    """Apply all edits of a target, one after another; see `EditArrays.apply`."""
    for edit in edits:
        if edit.target == target:
            array_BSHX = edit.apply(array_BSHX, layer, num_before, is_visible_BSHX)
    return array_BSHX


def convert_edits(edit: Edit | Sequence[Edit] | None) -> tuple[Edit, ...]:
    """Return one edit, several or None as a tuple."""
    edits = () if edit is None else (edit,) if isinstance(edit, Edit) else edit
    if not isinstance(edits, Sequence) or not all(isinstance(item, Edit) for item in edits):
        raise UserError(f'edit={edit!r} is not allowed; give a sinklab.Edit, or a list of them')
    return tuple(edits)


@dataclasses.dataclass(frozen=True)
class EditableArray:
    """The places of a target that can be edited: layers, from 0, the number of heads, and that of dimensions."""

    layers: Sequence[int]
    heads: int = 1
    dimensions: int = 0


def check_edits(edits: Sequence[Edit], editable: Mapping[str, EditableArray], length: int, name: str) -> None:
    """Check that a model has the layers, heads and dimensions of all edits, and that the texts have their positions.

    Args:
        edits: The edits.
        editable: What can be edited, for each target that can be edited at all.
        length: The number of tokens of a text.
        name: The name of the model.

    Raises:
        UserError: There is no such layer, head, dimension or position.
    """
    for edit in edits:
        if edit.target not in editable:
            raise UserError(
                f'the {TARGETS[edit.target]} of {name} cannot be edited, because they are computed within its own '
                f'modules; editable: {", ".join(editable) or "nothing"}'
            )
        array = editable[edit.target]
        allowed = dict(
            positions=range(length), layers=array.layers, heads=range(array.heads), dimensions=range(array.dimensions)
        )
        for field, indices in allowed.items():
            if missing := [index for index in edit.get_indices(field) or () if index not in indices]:
                raise UserError(
                    f'{field}={missing[0]} is not allowed for the {TARGETS[edit.target]} of {name} in a text of '
                    f'{length} tokens; give {format_names([*map(str, indices)])}'
                )
