"""What a layer keeps for its backward pass, and what is computed again there.

By the names that `kept` gives to values on their way through a layer; the stream before each layer is always kept.
"""

from collections.abc import Callable

import jax

from sinklab.spec import SAVEABLE_ACTIVATIONS, parse_saved_activations


def apply_remat(layer: Callable, remat: str) -> Callable:
    """The layer, keeping everything (none), nothing (full), or what has some of the names, joined by commas."""
    if remat == 'none':
        return layer
    names = parse_saved_activations(remat)
    if unknown := names - set(SAVEABLE_ACTIVATIONS):
        raise ValueError(f'{", ".join(unknown)} is kept nowhere; names are {", ".join(SAVEABLE_ACTIVATIONS)}')
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    return jax.checkpoint(layer, prevent_cse=False, policy=policy)  # a scan is barrier enough
