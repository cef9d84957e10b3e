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
TARGETS = {
    'attention': 'attention weights',
    'query': 'queries',
    'key': 'keys',
    'value': 'values',
    'head': 'head outputs',
    'ffn': 'FFN (MLP) outputs',
    'residual': 'hidden states',
}
MISSING_FIELDS = {'attention': ('dimensions',), 'ffn': ('heads', 'queries'), 'residual': ('heads', 'queries')}

INDEX_FIELDS = 'positions', 'layers', 'heads', 'dimensions', 'queries'
MIN_SUM = 1e-30  # of attention weights that are scaled


@dataclasses.dataclass(frozen=True)
class Edit:
    """A replacement in the forward pass, at some positions of each text.

    Edits of a run that differ in numbers, positions, layers, heads and dimensions, but not in how many these are, use
    the same compiled program. An edit with a function is compiled in each call, because the variables that the
    function reads can have changed.

    Attributes:
        target: What is replaced. `attention`: the weights A_ij, after the normalizer, of the keys j at `positions`,
            for every query i that sees them. `query` and `key`: the vectors, as they are multiplied (rotated).
            `value`: the value vectors, as they are summed. `head`: the outputs of heads, sum_j A_ij v_j. `ffn`: what
            the FFN adds to the hidden states. `residual`: the hidden states after a block.
        positions: The token of the text, from 0, or several tokens; None: all. Keys before the text, such as a
            learned sink token, are not counted. `auto`: all for `head` and `ffn`, and 0 for other targets.
        value: The replacement. A number; `mean`, for vectors: their mean over all other tokens of the same text, or
            over all if all are edited (later ones as well, so that a loss is no longer that of a causal model); an
            array with the axes of `cache(text)[target]`, as of another text, or one that NumPy broadcasts to them;
            or a function of an array (texts, positions in ascending order, heads, X) that returns an array of the
            same shape. X is the queries for `attention`, and the dimensions of the vector for other targets; hidden
            states and FFN outputs have 1 head. The array is of NumPy for an open model, and traced by JAX for a run.
        layers: The layers, from 0, as in `AttentionMatrices.plot`; None: all layers that have the target.
        heads: The heads of the queries, from 0; None: all. Hidden states and FFN outputs have none.
        dimensions: The dimensions of the vectors, from 0; None: all. Attention weights have none.
        renormalize: For `attention`: scale the other weights of the row, so that sum_j |A_ij| is as before; they
            become 0 if the edited weights alone have a larger sum. A row without other weights, such as that of the
            first query, is not edited.
        queries: For `attention`: the queries i, from 0, whose weights are edited; None: all.

    Raises:
        UserError: A field has a value that is not allowed.
    """

    target: str
    positions: int | Sequence[int] | str | None = 'auto'
    value: Any = 0.0
    layers: int | Sequence[int] | None = None
    heads: int | Sequence[int] | None = None
    dimensions: int | Sequence[int] | None = None
    renormalize: bool = False
    queries: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.target, str) or self.target not in TARGETS:
            raise UserError(format_unknown_name(f'target={self.target!r}', str(self.target), TARGETS, 'allowed'))
        if isinstance(self.positions, str) and self.positions == 'auto':
            object.__setattr__(self, 'positions', None if self.target in ('head', 'ffn') else 0)
        for name in INDEX_FIELDS:
            object.__setattr__(self, name, convert_indices(name, getattr(self, name)))
        for name in MISSING_FIELDS.get(self.target, ('queries',)):
            if getattr(self, name) is not None:
                raise UserError(f'{name}={getattr(self, name)} is not allowed: {TARGETS[self.target]} have no {name}')
        if self.renormalize and self.target != 'attention':
            raise UserError(f'renormalize=True is for target="attention", not for {TARGETS[self.target]}; remove it')
        object.__setattr__(self, 'value', self.convert_value())

    def get_indices(self, name: str) -> tuple[int, ...] | None:
        """Return a field of indices with its type after `__post_init__`."""
        indices: tuple[int, ...] | None = getattr(self, name)
        return indices

    def convert_value(self) -> Any:
        value = self.value
        if callable(value) or (isinstance(value, str) and value == 'mean' and self.target != 'attention'):
            return value
        try:
            array = np.asarray(math.nan if isinstance(value, str) else value, float)
        except (TypeError, ValueError):
            array = np.asarray(math.nan)
        if not (abs(array) <= np.finfo(np.float32).max).all():
            mean = '' if self.target == 'attention' else ", 'mean'"
            raise UserError(f'value={value!r:.80} is not allowed; give finite numbers (float32){mean} or a function')
        return array.astype(np.float32) if array.ndim else float(array)

    def applies_to(self, target: str, layer: int) -> bool:
        """Return whether the edit replaces this target in this layer."""
        layers = self.get_indices('layers')
        return self.target == target and (layers is None or layer in layers)

    def select_texts(self, texts: slice) -> 'Edit':
        """Return the edit of some of the texts, whose values `fit_values` has returned."""
        has_texts = isinstance(self.value, np.ndarray) and self.value.shape[1] > 1
        return dataclasses.replace(self, value=self.value[:, texts]) if has_texts else self

    def make_arrays(self) -> 'EditArrays':
        """Return the edit in the form in which it is applied to arrays."""
        indices = {name: self.get_indices(name) for name in INDEX_FIELDS}
        has_function = callable(self.value) or isinstance(self.value, str)
        return EditArrays(
            values=None if has_function else np.asarray(self.value, np.float32),
            function=self.value if has_function else None,
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

    positions: Any  # int (N,), ascending, or None for all
    layers: Any  # int (N,), or None for all
    heads: Any  # int (N,), or None for all
    dimensions: Any  # int (N,), or None for all
    queries: Any  # int (N,), or None for all
    values: Any  # float32, () or as `fit_values` returns it; None if `function` computes the values
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
        index_N = np.arange(num_before, size) if self.positions is None else num_before + self.positions
        is_edited_S11 = find_members(xp, index_N, size)[:, None, None]
        new_BSHX = self.compute_values(array_BSHX, layer, index_N, is_edited_S11, num_before)
        edited_BSHX = xp.where(is_edited_S11 & is_visible_BSHX, new_BSHX, array_BSHX)
        if self.renormalize:
            edited_BSHX = rescale_others(array_BSHX, edited_BSHX, is_edited_S11)
        is_layer = True if self.layers is None else (self.layers == layer).any()
        is_edited_H, is_edited_X = find_members(xp, self.heads, num_heads), find_members(xp, self.dimensions, width)
        if self.queries is not None:  # the first queries are sink tokens
            is_edited_X = find_members(xp, self.queries, width, size - num_before - width)
        is_edited_HX = is_edited_H[:, None] & is_edited_X
        return xp.where(is_layer & is_edited_HX, edited_BSHX, array_BSHX).astype(array_BSHX.dtype)

    def compute_values(self, array_BSHX: Any, layer: Any, index_N: Any, is_edited_S11: Any, num_before: int) -> Any:
        """Return the new values; entries of S that are not in `index_N` are not used. Any axis may be 1."""
        xp = array_BSHX.__array_namespace__()
        if self.function is None:
            if self.values.ndim == 0:
                return self.values
            values_BSHX = align_right(xp, self.values[0 if len(self.values) == 1 else layer], 1, array_BSHX.shape[1])
            if self.target == 'attention':
                return align_right(xp, values_BSHX, 3, array_BSHX.shape[3])
            return values_BSHX[..., : array_BSHX.shape[3]]  # heads of some layers are narrower
        index_S = np.arange(array_BSHX.shape[1])
        if callable(self.function):
            inverse_S = xp.searchsorted(index_N, index_S).clip(0, len(index_N) - 1)
            return call_function(self.function, array_BSHX[:, index_N])[:, inverse_S]
        num_others = len(index_S) - num_before - (0 if self.positions is None else len(index_N))
        if not num_others:
            raise UserError('value="mean" needs another token than those at positions; give a longer text')
        is_other_S11 = (index_S >= num_before)[:, None, None] & ((self.positions is None) | ~is_edited_S11)
        others_BSHX = xp.where(is_other_S11, array_BSHX.astype('float32'), 0)
        return others_BSHX.sum(1, keepdims=True) / np.float32(num_others)


def align_right(xp: Any, array: Any, axis: int, size: int) -> Any:
    """Drop or repeat first entries of an axis, such as learned keys, to give it a size; an axis of 1 is kept."""
    length = array.shape[axis]
    return array if length in (1, size) else xp.take(array, (np.arange(size) + length - size).clip(0), axis)


def convert_indices(name: str, value: Any) -> tuple[int, ...] | None:
    """Return one or more indices as a sorted tuple."""
    if value is None:
        return None
    try:
        indices = {operator.index(index) for index in (value if np.iterable(value) else [value])}
    except TypeError:
        indices = set()
    if not indices or min(indices) < 0:
        raise UserError(f'{name}={value!r} is not allowed; give indices from 0, such as 0 or (0, 2)')
    return tuple(sorted(indices))


def find_members(xp: Any, indices_N: Any, size: int, start: int = 0) -> Any:
    """Return which of the `size` integers from `start` are in `indices_N`; None: all."""
    return np.ones(size, bool) if indices_N is None else xp.isin(start + np.arange(size), indices_N)


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

    def list_indices(self, length: int) -> dict[str, Sequence[int]]:
        """Return the allowed indices of each field of `INDEX_FIELDS` in a text of `length` tokens."""
        tokens = range(length)
        return dict(
            zip(INDEX_FIELDS, (tokens, self.layers, range(self.heads), range(self.dimensions), tokens), strict=True)
        )


def fit_edits(
    edits: Sequence[Edit], editable: Mapping[str, EditableArray], ids_PT: np.ndarray, num_learned_keys: int, name: str
) -> tuple[Edit, ...]:
    """Check that edits fit a model and texts, and return them with arrays of values as `fit_values` returns them.

    Args:
        edits: The edits.
        editable: What can be edited, for each target that can be edited at all.
        ids_PT: The token ids of the texts.
        num_learned_keys: The number of keys before the text in captured arrays.
        name: The name of the model.

    Raises:
        UserError: There is no such layer, head, dimension, position or query, or an array has another shape.
    """
    num_texts, length = ids_PT.shape
    fitted = []
    for edit in edits:
        if edit.target not in editable:
            raise UserError(
                f'the {TARGETS[edit.target]} of {name} cannot be edited, because they are computed within its own '
                f'modules; editable: {", ".join(editable) or "nothing"}'
            )
        array = editable[edit.target]
        for field, indices in array.list_indices(length).items():
            if missing := [index for index in edit.get_indices(field) or () if index not in indices]:
                raise UserError(
                    f'{field}={missing[0]} is not allowed for the {TARGETS[edit.target]} of {name} in a text of '
                    f'{length} tokens; give {format_names([*map(str, indices)])}'
                )
        if isinstance(edit.value, np.ndarray):
            edit = dataclasses.replace(edit, value=fit_values(edit, array, num_texts, length, num_learned_keys))
        fitted.append(edit)
    return tuple(fitted)


def fit_values(edit: Edit, array: EditableArray, num_texts: int, length: int, num_learned_keys: int) -> np.ndarray:
    """Return an array of values with the axes layers of the model, B, S, H and X, each of which may be 1."""
    has_heads = 'heads' not in MISSING_FIELDS.get(edit.target, ())
    value: np.ndarray = edit.value.reshape((1,) * (4 + has_heads - edit.value.ndim) + edit.value.shape)
    if not has_heads:
        value = value[..., None, :]
    elif edit.target == 'attention':  # its cached array has the axes L, P, H, T, S
        value = np.moveaxis(value, -1, 2)
    width = length if edit.target == 'attention' else array.dimensions
    lengths = {1, length, length + num_learned_keys}
    sizes = {1, len(array.layers)}, {1, num_texts}, lengths, {1, array.heads}, {1, width}
    if value.ndim != 5 or any(size not in allowed for size, allowed in zip(value.shape, sizes, strict=True)):
        raise UserError(
            f'value= is an array of the shape {edit.value.shape}, which does not fit the {TARGETS[edit.target]} of '
            f'{num_texts} x {length} tokens; give cache(text)["{edit.target}"] of as many tokens, or a part of it'
        )
    if len(value) == 1 or len(array.layers) == max(array.layers) + 1:
        return value
    all_layers = np.zeros((max(array.layers) + 1, *value.shape[1:]), np.float32)
    all_layers[list(array.layers)] = value
    return all_layers
