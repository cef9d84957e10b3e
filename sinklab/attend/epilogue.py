"""From what kernels sum over the text to attention: columns, normalizer and gain."""

from types import ModuleType

import jax
import jax.numpy as jnp

from sinklab import spec
from sinklab.attend import dense
from sinklab.attend.bias import Bias
from sinklab.attend.mask import Mask
from sinklab.attend.normalizer import NORMALIZERS, Row, raised
from sinklab.attend.primitive import NOTHING, Scores, Weigh, primitive
from sinklab.attend.similarity import SIMILARITIES, Similarity


def attend(
    kernels: ModuleType,
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    value_BSGK: jax.Array,
    attention: spec.Attention,
    mask: Mask,
    columns: int,
    bias: Bias,
    measured: bool,
) -> tuple[jax.Array, dense.Rows]:
    """(output_BTHK, Rows) by the kernels of a module; the mass of rows is summed only if `measured`."""
    similarity, normalizer = SIMILARITIES[attention.similarity], NORMALIZERS[attention.normalizer]
    text = query_BTHK, key_BSGK[:, columns:], value_BSGK[:, columns:], mask, bias
    curve = (None,) if bias.curve is None else (bias.curve.function, bias.curve.learned)
    scores = Scores(query_BTHK.shape[-1] ** -0.5, bias.offset, *curve)
    column_BHTC = column_scores(query_BTHK, key_BSGK[:, :columns], columns, bias)
    summed = exponentials if similarity.shifted else weights
    numerator, total, mass, shift = summed(kernels, scores, text, attention, column_BHTC, measured)

    unit = jnp.exp(-shift)
    weight_BHTC, mass_BHTC = similarity.weigh(column_BHTC - shift, unit)
    value_BCHK = dense.grouped(value_BSGK[:, :columns], query_BTHK.shape[2])
    numerator += jnp.einsum('BHTC,BCHK->BTHK', weight_BHTC, value_BCHK.astype(jnp.float32))
    total += raised(mass_BHTC, attention.power).sum(-1, keepdims=True)
    mass += jnp.abs(weight_BHTC).sum(-1, keepdims=True)

    row = Row(total, count(mask, key_BSGK.shape[1] - columns), unit, attention.power)
    z_BHT1 = normalizer.close(row) / attention.gain
    output_BTHK = (numerator / jnp.swapaxes(z_BHT1, 1, 2)).astype(value_BSGK.dtype)
    rows = (jnp.broadcast_to(x, mass.shape)[..., 0] for x in (shift, z_BHT1, mass / jnp.abs(z_BHT1)))
    return output_BTHK, jax.lax.stop_gradient(dense.Rows(*rows))


def exponentials(kernels, scores, text, attention, column_BHTC, _):
    """(numerator_BTHK, total_BHT1, mass_BHT1, shift_BHT1) of the text, from softmax: o and lse less the shift."""
    output_BTHK, (lse_BHT,) = primitive(kernels, scores, None, *text)
    power, lse = attention.power or 1.0, lse_BHT[..., None]
    powers = lse
    if attention.power is not None:
        _, (raised_BHT,) = primitive(kernels, scores * power, None, *text)
        powers = raised_BHT[..., None]
    # The total is then between 1 and the number of columns + 1, whatever the power.
    shift = jnp.max(jnp.concatenate([powers / power, column_BHTC], -1), -1, keepdims=True)
    shift = jnp.where((lse > NOTHING / 2) | (column_BHTC.shape[-1] > 0), shift, 0.0)
    shift = jax.lax.stop_gradient(jnp.maximum(shift, 0.0) if NORMALIZERS[attention.normalizer].uses_unit else shift)
    mass, total = jnp.exp(lse - shift), jnp.exp(powers - power * shift)
    return output_BTHK.astype(jnp.float32) * jnp.swapaxes(mass, 1, 2), total, mass, shift


def weights(kernels, scores, text, attention, column_BHTC, measured):
    """The same from the linear primitive, which sums no more masses than somebody reads."""
    similarity, normalizer = SIMILARITIES[attention.similarity], NORMALIZERS[attention.normalizer]
    weigh = weigher(similarity, attention.power, normalizer.uses_total, measured)
    output_BTHK, sums = primitive(kernels, scores, weigh, *text)
    nothing = jnp.zeros((*column_BHTC.shape[:-1], 1))
    sums = [row_BHT[..., None] for row_BHT in sums]
    total = sums[0] if normalizer.uses_total else nothing
    return output_BTHK.astype(jnp.float32), total, sums[-1] if measured else nothing, nothing


def weigher(similarity: Similarity, power: float | None, total: bool, measured: bool) -> Weigh:
    """score -> (weight, what the normalizer sums, |weight|), the last two where they are wanted."""
    chosen = similarity.weigh if total or similarity.rounded is None else similarity.rounded

    def weigh(score):
        weight, mass = chosen(score, 1.0)
        return weight, (raised(mass, power),) * total + (jnp.abs(weight),) * measured

    return weigh


def column_scores(query_BTHK: jax.Array, key_BCGK: jax.Array, columns: int, bias: Bias) -> jax.Array:
    batch, queries, heads, _ = query_BTHK.shape
    if not columns:
        return jnp.zeros((batch, heads, queries, 0))
    key_BCHK = dense.grouped(key_BCGK, heads)
    return dense.scores(query_BTHK, key_BCHK) + bias.column(bias.query_BT, columns)


def count(mask: Mask, keys: int) -> jax.Array:
    """How many keys of the text each query sees, as BHT1."""
    seen_BT = jnp.minimum(mask.end_BT, keys) - jnp.maximum(mask.start_BT, 0)
    return jnp.maximum(seen_BT, 0)[:, None, :, None]
