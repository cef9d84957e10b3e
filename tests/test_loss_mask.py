"""Token ids excluded from the loss, in NumPy, in JAX and under jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sinklab.loss_mask import exclude_from_loss, is_in_loss, strip_loss_mask

IDS = np.array([[0, 1, 299], [7, 0, 2**31 - 1]], np.int32)


@pytest.mark.parametrize('make_array', [np.asarray, jnp.asarray])
@pytest.mark.parametrize('transform', [lambda f: f, jax.jit])
def test_strip_loss_mask_restores_ids_excluded_from_loss(make_array, transform):
    partly_excluded_ids = np.where(IDS > 5, np.array(exclude_from_loss(make_array(IDS))), IDS)
    np.testing.assert_array_equal(transform(strip_loss_mask)(make_array(partly_excluded_ids)), IDS)
    np.testing.assert_array_equal(transform(is_in_loss)(make_array(partly_excluded_ids)), IDS <= 5)
    assert transform(strip_loss_mask)(make_array(partly_excluded_ids)).dtype == np.int32
