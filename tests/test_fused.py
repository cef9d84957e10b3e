"""Attention without its matrix against its definition: outputs, gradients, row statistics, by every backend here."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from attending import KERNELS, LENGTH, MASKS, SLOPES, alibi, close, compared, drawn, every, interpreted, rule
from conftest import COVERING, OPERATIONS, attention

from sinklab.attend import dense
from sinklab.attend import mask as masks
from sinklab.attend.backends import BACKENDS
from sinklab.attend.received import of_first_keys

pytestmark = pytest.mark.usefixtures('small_blocks')
every_mask = pytest.mark.parametrize('mask', MASKS)
beside_a_column = functools.partial(alibi, columns=1)


@pytest.mark.slow
@pytest.mark.parametrize('operation', OPERATIONS, ids='-'.join)
def test_chunks_are_the_definition_under_every_mask_with_columns_and_alibi(operation):
    arrays = drawn(16, columns=1, batch=len(MASKS))
    compared(
        'chunked', attention(*operation), every(LENGTH), arrays, beside_a_column, 1, (jnp.asarray(SLOPES),), 5e-5
    )


PRECISIONS = {'float32': (jnp.float32, 5e-5), 'bfloat16': (jnp.bfloat16, 1.5e-2)}
WIDTHS = 64, 96, 128


def cases():
    """Every operation in float32, every similarity and normalizer in bfloat16, at widths that take turns; the rest is
    exhaustive."""
    for number, operation in enumerate(KERNELS):
        for shift, precision in enumerate(PRECISIONS):
            for width in WIDTHS:
                often = width == WIDTHS[(number + shift) % 3] and (precision == 'float32' or operation in COVERING)
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
@every_mask
@pytest.mark.parametrize('backend', ['chunked', 'tpu'])
def test_a_mask_known_before_tracing_is_the_definition(backend, mask):
    operation = ('exp', 'plus_one') if mask in ('full', 'window', 'documents') else ('sigmoid', 'none')
    compared(backend, attention(*operation), MASKS[mask](LENGTH), drawn())


@pytest.mark.slow
@pytest.mark.parametrize('backend', ['chunked', 'tpu'])
@pytest.mark.parametrize('operation', [('exp', 'plus_one'), ('elu1', 'sum')], ids='-'.join)
def test_key_heads_may_serve_several_query_heads_and_values_be_wider(backend, operation):
    arrays = drawn(64, heads=4, groups=2, value_width=96)
    compared(backend, attention(*operation), masks.causal(LENGTH), arrays)


@pytest.mark.slow
@pytest.mark.parametrize('backend', ['chunked', 'tpu'])
@pytest.mark.parametrize('length', [1, 100, 257])
def test_a_length_that_blocks_do_not_divide_is_padded_and_cut(backend, length):
    for operation in (('exp', 'sum'), ('sigmoid', 'sum')):
        compared(backend, attention(*operation), masks.causal(length), drawn(64, length=length))


@pytest.mark.slow
@pytest.mark.parametrize('backend', ['chunked', 'tpu'])
@pytest.mark.parametrize(
    'operation', [('exp', 'sum'), ('exp', 'p_norm'), ('exp', 'plus_one'), ('elu1', 'sum')], ids='-'.join
)
def test_queries_that_see_nothing_get_zeros_and_finite_gradients(backend, operation):
    end_T = np.where(np.arange(LENGTH) % 3 == 1, 0, np.arange(LENGTH) + 1)
    end_T[128:] = 0
    mask, arrays = masks.static(np.zeros(LENGTH, np.int32), end_T.astype(np.int32)), drawn(64)
    output, gradients = compared(backend, attention(*operation), mask, arrays)
    assert (np.asarray(output)[:, end_T == 0] == 0).all()
    assert all(np.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize('backend', ['dense', 'chunked', 'tpu'])
@pytest.mark.parametrize(
    'operation', [('exp', 'sum'), ('exp', 'p_norm'), ('sigmoid', 'none'), ('identity', 'clamped')], ids='-'.join
)
@pytest.mark.slow
def test_the_mass_on_first_keys_is_that_of_the_whole_matrix_under_every_mask(backend, operation):
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
