"""Optimizers and schedules of optax.

Weight decay is decoupled and acts on every parameter, as in the released code.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from optax import contrib

from sinklab.config.spec import OptimizerConfig
from sinklab.parallel.sharding import get_logical_axes, map_parameters


def make_constant_schedule(optimizer: OptimizerConfig) -> optax.Schedule:
    warmup = optax.linear_schedule(0.0, optimizer.peak_learning_rate, optimizer.warmup_steps)
    plateau = optax.constant_schedule(optimizer.peak_learning_rate)
    return optax.join_schedules([warmup, plateau], [optimizer.warmup_steps])


def make_cosine_schedule(optimizer: OptimizerConfig) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(
        0.0,
        optimizer.peak_learning_rate,
        optimizer.warmup_steps,
        optimizer.steps,
        optimizer.final_share * optimizer.peak_learning_rate,
    )


def make_adamw(optimizer: OptimizerConfig, dimension_numbers: dict) -> optax.GradientTransformation:
    return optax.adamw(
        make_schedule(optimizer),
        b1=optimizer.beta1,
        b2=optimizer.beta2,
        eps=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
    )


def make_sgd(optimizer: OptimizerConfig, dimension_numbers: dict) -> optax.GradientTransformation:
    return optax.chain(
        optax.trace(optimizer.beta1),
        optax.add_decayed_weights(optimizer.weight_decay),
        optax.scale_by_learning_rate(make_schedule(optimizer)),
    )


def make_muon(optimizer: OptimizerConfig, dimension_numbers: dict) -> optax.GradientTransformation:
    """Make Muon for matrices; embeddings, head, gains and vectors use AdamW with Nesterov momentum."""
    return contrib.muon(
        make_schedule(optimizer),
        beta=optimizer.beta1,
        eps=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
        adam_b1=optimizer.beta1,
        adam_b2=optimizer.beta2,
        adam_weight_decay=optimizer.weight_decay,
        consistent_rms=0.2,  # updates as large as AdamW's (Liu et al., 2025)
        muon_weight_dimension_numbers=dimension_numbers,
    )


def make_orthoadam(optimizer: OptimizerConfig, dimension_numbers: dict) -> optax.GradientTransformation:
    """Make OrthoAdam (Kaul et al., 2410.17174): AdamW whose moments are those of randomly rotated gradients."""
    adam = optax.scale_by_adam(optimizer.beta1, optimizer.beta2, optimizer.epsilon)

    def update(gradients: dict, state: optax.OptState, params: dict | None = None) -> tuple[dict, optax.OptState]:
        rotated_updates, state = adam.update(rotate(gradients, dimension_numbers), state)
        return rotate(rotated_updates, dimension_numbers, inverse=True), state

    return optax.chain(
        optax.GradientTransformation(adam.init, update),
        optax.add_decayed_weights(optimizer.weight_decay),
        optax.scale_by_learning_rate(make_schedule(optimizer)),
    )


def rotate(tree: dict, dimension_numbers: dict, inverse: bool = False) -> dict:
    """Multiply each leaf by an orthogonal matrix of its own, or by its transpose.

    It is a diagonal of random signs, then the discrete cosine transform along all axes of a matrix, or the last axis
    of another leaf: a random orthogonal matrix of all entries, as in the paper, would not fit in memory.
    """
    leaves, structure = jax.tree.flatten(tree)
    numbers = structure.flatten_up_to(dimension_numbers)
    return structure.unflatten(
        rotate_leaf(index, *pair, inverse) for index, pair in enumerate(zip(leaves, numbers, strict=True))
    )


def rotate_leaf(
    index: int, leaf: jax.Array, numbers: contrib.MuonDimensionNumbers | None, inverse: bool
) -> jax.Array:
    sign = jax.random.rademacher(jax.random.key(index), leaf.shape, leaf.dtype)
    leaf = leaf if inverse else leaf * sign
    for axis in (leaf.ndim - 1,) if numbers is None else (*numbers.reduction_axis, *numbers.output_axis):
        cosine = make_cosine_transform(leaf.shape[axis])
        leaf = jnp.tensordot(leaf, cosine, (axis, 0 if inverse else 1), precision='highest')
        leaf = jnp.moveaxis(leaf, -1, axis)
    return leaf * sign if inverse else leaf


def make_cosine_transform(size: int) -> jax.Array:
    """Make the orthogonal matrix of the discrete cosine transform; jax.scipy.fft has none for sharded arrays."""
    frequency, time = jnp.arange(size)[:, None], jnp.arange(size)
    cosine = jnp.cos(jnp.pi / (2 * size) * ((2 * time + 1) * frequency % (4 * size)))
    return cosine * jnp.where(frequency == 0, size**-0.5, (2 / size) ** 0.5)


def make_muon_dimension_numbers(parameters: nnx.State) -> dict:
    """Return the input and output axes of each matrix, without the layer axis; None for other leaves."""

    def get_dimension_numbers(leaf: nnx.Variable) -> contrib.MuonDimensionNumbers | None:
        names = get_logical_axes(leaf)
        num_inputs = leaf.get_metadata()['inputs']
        if num_inputs is None:
            return None
        axes = tuple(range(names.count('layer'), len(names)))
        return contrib.MuonDimensionNumbers(axes[:num_inputs], axes[num_inputs:])

    return map_parameters(get_dimension_numbers, parameters)


SCHEDULES = {'constant': make_constant_schedule, 'cosine': make_cosine_schedule}
OPTIMIZERS = {'adamw': make_adamw, 'sgd': make_sgd, 'muon': make_muon, 'orthoadam': make_orthoadam}


def make_schedule(optimizer: OptimizerConfig) -> optax.Schedule:
    return SCHEDULES[optimizer.schedule](optimizer)


def make_optimizer(optimizer: OptimizerConfig, dimension_numbers: dict) -> optax.GradientTransformation:
    """Make the optimizer; `dimension_numbers` says which parameters are matrices."""
    clip = optax.clip_by_global_norm(optimizer.clip_norm) if optimizer.clip_norm else optax.identity()
    return optax.chain(clip, OPTIMIZERS[optimizer.name](optimizer, dimension_numbers))
