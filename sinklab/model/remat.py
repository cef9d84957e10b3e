"""What a layer keeps for its backward pass, and what is computed again there.

By the names that `kept` gives to values on their way through a layer; the stream before each layer is always kept.
"""

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from sinklab.spec import KEPT, names_kept

kept = checkpoint_name


def rematerialized(layer: Callable, remat: str) -> Callable:
    """The layer, keeping everything (none), nothing (full), or what has some of the names, joined by commas."""
    if remat == 'none':
        return layer
    names = names_kept(remat)
    if unknown := names - set(KEPT):
        raise ValueError(f'{", ".join(unknown)} is kept nowhere; names are {", ".join(KEPT)}')
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    return jax.checkpoint(layer, prevent_cse=False, policy=policy)  # a scan is barrier enough
