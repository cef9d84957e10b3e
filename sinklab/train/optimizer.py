"""Optimizers and schedules of optax.

Weight decay is decoupled and acts on every parameter, as in the released code.
"""

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
OPTIMIZERS = {'adamw': make_adamw, 'sgd': make_sgd, 'muon': make_muon}


def make_schedule(optimizer: OptimizerConfig) -> optax.Schedule:
    return SCHEDULES[optimizer.schedule](optimizer)


def make_optimizer(optimizer: OptimizerConfig, dimension_numbers: dict) -> optax.GradientTransformation:
    """Make the optimizer; `dimension_numbers` says which parameters are matrices."""
    clip = optax.clip_by_global_norm(optimizer.clip_norm) if optimizer.clip_norm else optax.identity()
    return optax.chain(clip, OPTIMIZERS[optimizer.name](optimizer, dimension_numbers))
