"""Workaround and check for versions of jaxlib that compute wrong on CPUs."""

import functools
import os
from importlib.metadata import version

# jaxlib 0.10.2 gives rows the sums of other rows (jax issue 39103); both crash on some reductions of rank 7 and more
# (39257, 40412).
FAULTY_VERSIONS = '0.10.2', '0.11.0'
FUSION_FLAG = '--xla_cpu_experimental_ynn_fusion_type'  # which operations YNNPACK computes; empty: none
CHECKED_ROWS = 2**15 + 1  # the smallest number of rows for which the last sum is wrong in float32


def disable_faulty_fusions() -> None:
    """Set the XLA flag that avoids the faults, if the installed jaxlib has them and the user has not set it.

    Call this before jax initializes its backend: XLA_FLAGS is read then.
    """
    xla_flags = os.environ.get('XLA_FLAGS', '')
    if FUSION_FLAG not in xla_flags and version('jaxlib') in FAULTY_VERSIONS:
        os.environ['XLA_FLAGS'] = f'{xla_flags} {FUSION_FLAG}='.strip()


@functools.cache
def check_cpu_sums() -> None:
    """Raise UserError if a sum is wrong that jaxlib 0.10.2 computes wrong on CPUs without the flag."""
    import jax
    import jax.numpy as jnp
    import jaxlib
    import numpy as np

    from sinklab.errors import UserError

    rows = np.zeros((CHECKED_ROWS, 3), np.float32)
    rows[:, 0] = np.arange(CHECKED_ROWS)
    squared_norms = jax.jit(jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2)))(rows)
    if float(squared_norms[-1]) != float(CHECKED_ROWS - 1) ** 2:
        raise UserError(
            f'jaxlib {jaxlib.__version__} computes sums wrong on CPUs (jax issue 39103) without the XLA flag that '
            f'sinklab sets; import sinklab before jax computes, and remove {FUSION_FLAG} from XLA_FLAGS'
        )
