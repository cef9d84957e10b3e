"""Token ids excluded from the loss, in NumPy, in JAX and under jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sinklab.loss_mask import exclude_from_loss, is_in_loss, strip_loss_mask

IDS = np.array([[0, 1, 299], [7, 0, 2**31 - 1]], np.int32)


@pytest.mark.parametrize('array', [np.asarray, jnp.asarray])
@pytest.mark.parametrize('compiled', [lambda f: f, jax.jit])
def test_strip_loss_mask_restores_ids_excluded_from_loss(array, compiled):
    mixed = np.where(IDS > 5, np.array(exclude_from_loss(array(IDS))), IDS)
    np.testing.assert_array_equal(compiled(strip_loss_mask)(array(mixed)), IDS)
    np.testing.assert_array_equal(compiled(is_in_loss)(array(mixed)), IDS <= 5)
    assert compiled(strip_loss_mask)(array(mixed)).dtype == np.int32
