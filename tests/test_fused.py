"""Attention without its matrix against its definition: outputs, gradients, row statistics, by every backend here."""

import dataclasses
import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from attending import KERNELS, LENGTH, MASKS, SLOPES, alibi, close, compared, drawn, every, interpreted, rule
from conftest import COVERING, OPERATIONS, attention, in_turn, some

from sinklab.attend import dense
from sinklab.attend import mask as masks
from sinklab.attend.backends import BACKENDS
from sinklab.attend.received import of_first_keys

pytestmark = pytest.mark.usefixtures('small_blocks')
beside_a_column = functools.partial(alibi, columns=1)


@pytest.mark.slow
@pytest.mark.parametrize('operation', some(OPERATIONS, COVERING), ids='-'.join)
def test_chunks_are_the_definition_under_every_mask_with_columns_and_alibi(operation):
    arrays = drawn(16, columns=1, batch=len(MASKS))
    compared(
        'chunked', attention(*operation), every(LENGTH), arrays, beside_a_column, 1, (jnp.asarray(SLOPES),), 5e-5
    )


PRECISIONS = {'float32': (jnp.float32, 5e-5), 'bfloat16': (jnp.bfloat16, 1.5e-2)}
WIDTHS = 64, 96, 128


def cases():
    """Yield each similarity and normalizer in float32 and some in bfloat16; the rest of the product is exhaustive."""
    for operation in KERNELS:
        for shift, precision in enumerate(PRECISIONS):
            for width in WIDTHS:
                turn = COVERING.index(operation) if operation in COVERING else None
                often = turn is not None and width == WIDTHS[(turn + shift) % 3]
                often = often and (precision == 'float32' or turn % 2 == 0)
                mark = pytest.mark.slow if often else pytest.mark.exhaustive
                yield pytest.param(
                    operation, width, precision, id=f'{"-".join(operation)}-{width}-{precision}', marks=mark
                )


@pytest.mark.parametrize(('operation', 'width', 'precision'), list(cases()))
def test_kernels_are_the_definition_under_every_mask_with_columns_and_alibi(operation, width, precision):
    dtype, atol = PRECISIONS[precision]
    arrays = drawn(width, columns=1, dtype=dtype, batch=len(MASKS))
    compared('tpu', attention(*operation), every(LENGTH), arrays, beside_a_column, 1, (jnp.asarray(SLOPES),), atol)


@pytest.mark.slow
@pytest.mark.parametrize(('mask', 'backend'), in_turn(itertools.product(MASKS, ('chunked', 'tpu'))))
def test_a_mask_known_before_tracing_is_the_definition(mask, backend):
    operation = ('exp', 'plus_one') if mask in ('full', 'window', 'documents') else ('sigmoid', 'none')
    compared(backend, attention(*operation), MASKS[mask](LENGTH), drawn())


@pytest.mark.slow
@pytest.mark.parametrize(
    ('operation', 'backend'), in_turn(itertools.product([('exp', 'plus_one'), ('elu1', 'sum')], ('chunked', 'tpu')))
)
def test_key_heads_may_serve_several_query_heads_and_values_be_wider(operation, backend):
    arrays = drawn(64, heads=4, groups=2, value_width=96)
    compared(backend, attention(*operation), masks.causal(LENGTH), arrays)


@pytest.mark.slow
@pytest.mark.parametrize('backend', ['chunked', 'tpu'])
@pytest.mark.parametrize(
    ('length', 'operation'), in_turn(itertools.product([1, 100, 257], (('exp', 'sum'), ('sigmoid', 'sum'))))
)
def test_a_length_that_blocks_do_not_divide_is_padded_and_cut(backend, length, operation):
    compared(backend, attention(*operation), masks.causal(length), drawn(64, length=length))


@pytest.mark.slow
@pytest.mark.parametrize(
    ('operation', 'backend'),
    in_turn(
        itertools.product(
            [('exp', 'sum'), ('exp', 'p_norm'), ('exp', 'plus_one'), ('elu1', 'sum')], ('chunked', 'tpu')
        )
    ),
)
def test_queries_that_see_nothing_get_zeros_and_finite_gradients(operation, backend):
    end_T = np.where(np.arange(LENGTH) % 3 == 1, 0, np.arange(LENGTH) + 1)
    end_T[128:] = 0
    mask, arrays = masks.static(np.zeros(LENGTH, np.int32), end_T.astype(np.int32)), drawn(64)
    output, gradients = compared(backend, attention(*operation), mask, arrays)
    assert (np.asarray(output)[:, end_T == 0] == 0).all()
    assert all(np.isfinite(gradient).all() for gradient in gradients)


READ = ('exp', 'sum'), ('exp', 'p_norm'), ('sigmoid', 'none'), ('identity', 'clamped')


@pytest.mark.slow
@pytest.mark.parametrize('scale', [0.3, -0.2])
def test_kernels_and_chunks_use_the_scale_of_the_operation(scale):
    arrays = drawn(16, columns=1)
    for pair in (('exp', 'p_norm'), ('sigmoid', 'none')):
        asked = rule(attention(*pair), masks.causal(LENGTH), 1)
        asked = dataclasses.replace(asked, operation=dataclasses.replace(asked.operation, scale=scale))
        query, key, value = arrays
        plain = rule(attention(*pair), masks.causal(LENGTH), 1)
        scaled = dense.attend(scale * np.sqrt(16) * query, key, value, plain)  # the definition, by other means
        with interpreted():
            for backend in ('dense', 'chunked', 'tpu'):
                found = BACKENDS[backend].attend(*arrays, asked, measured=True)
                close((found.output_BTHK, found.rows.mass_BHT), (scaled.output_BTHK, scaled.rows.mass_BHT), 5e-5)
                received = of_first_keys(query, key, found.rows, asked, 3)
                close(received.raw_BHS, scaled.attention_BHTS[..., :4].sum(2), 5e-5)


@pytest.mark.parametrize(
    'case',
    some(
        itertools.product(('dense', 'chunked', 'tpu'), READ),
        [*zip(('chunked', 'tpu', 'chunked', 'tpu'), READ, strict=True), ('dense', READ[0])],
    ),
)
@pytest.mark.slow
def test_the_mass_on_first_keys_is_that_of_the_whole_matrix_under_every_mask(case):
    backend, operation = case
    arrays, keys = drawn(64, columns=1, batch=len(MASKS)), 5
    asked = rule(dataclasses.replace(attention(*operation), gain=0.5), every(LENGTH), 1, alibi(columns=1))
    with interpreted():
        _, rows, _ = BACKENDS[backend].attend(*arrays, asked, measured=True)
    found = of_first_keys(*arrays[:2], rows, asked, keys, first=2)
    attention_BHTS = np.float64(dense.attend(*arrays, asked).attention_BHTS)[:, :, 2:]
    mass = np.abs(attention_BHTS).sum(-1, keepdims=True)
    close(found.raw_BHS, attention_BHTS[..., : 1 + keys].sum(2), 2e-5)
    close(found.share_BHS, (np.abs(attention_BHTS) / (mass + 1e-8))[..., : 1 + keys].sum(2), 2e-5)
    close(found.mass_BH, mass[..., 0].mean(-1), 2e-5)
