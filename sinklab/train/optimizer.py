"""Optimizers and schedules, all optax's; weight decay is decoupled and acts on every parameter, as released."""

import optax
from flax import nnx
from optax import contrib

from sinklab import spec
from sinklab.sharding import by_parameter, logical


def constant(optimizer: spec.Optimizer) -> optax.Schedule:
    climb = optax.linear_schedule(0.0, optimizer.peak_learning_rate, optimizer.warmup_steps)
    stay = optax.constant_schedule(optimizer.peak_learning_rate)
    return optax.join_schedules([climb, stay], [optimizer.warmup_steps])


def cosine(optimizer: spec.Optimizer) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(
        0.0,
        optimizer.peak_learning_rate,
        optimizer.warmup_steps,
        optimizer.steps,
        optimizer.final_share * optimizer.peak_learning_rate,
    )


def adamw(optimizer: spec.Optimizer, maps: dict) -> optax.GradientTransformation:
    return optax.adamw(
        schedule(optimizer),
        b1=optimizer.beta1,
        b2=optimizer.beta2,
        eps=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
    )


def sgd(optimizer: spec.Optimizer, maps: dict) -> optax.GradientTransformation:
    return optax.chain(
        optax.trace(optimizer.beta1),
        optax.add_decayed_weights(optimizer.weight_decay),
        optax.scale_by_learning_rate(schedule(optimizer)),
    )


def muon(optimizer: spec.Optimizer, maps: dict) -> optax.GradientTransformation:
    """Muon for the maps; embeddings, head, gains and vectors take AdamW with Nesterov's momentum."""
    return contrib.muon(
        schedule(optimizer),
        beta=optimizer.beta1,
        eps=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
        adam_b1=optimizer.beta1,
        adam_b2=optimizer.beta2,
        adam_weight_decay=optimizer.weight_decay,
        consistent_rms=0.2,  # updates as large as AdamW's (Liu et al., 2025)
        muon_weight_dimension_numbers=maps,
    )


def maps(parameters: nnx.State) -> dict:
    """The axes that each map reads and writes, stacked layers being neither; None for what is no map."""

    def axes(leaf: nnx.Variable) -> contrib.MuonDimensionNumbers | None:
        names, inputs = logical(leaf), leaf.get_metadata()['inputs']
        if inputs is None:
            return None
        first = names.count('layer')
        reads, writes = range(first, first + inputs), range(first + inputs, len(names))
        return contrib.MuonDimensionNumbers(tuple(reads), tuple(writes))

    return by_parameter(axes, parameters)


SCHEDULES = {'constant': constant, 'cosine': cosine}
OPTIMIZERS = {'adamw': adamw, 'sgd': sgd, 'muon': muon}


def schedule(optimizer: spec.Optimizer) -> optax.Schedule:
    return SCHEDULES[optimizer.schedule](optimizer)


def transformation(optimizer: spec.Optimizer, maps: dict) -> optax.GradientTransformation:
    """The rule of an update; `maps` says which parameters are matrices."""
    clip = optax.clip_by_global_norm(optimizer.clip_norm) if optimizer.clip_norm else optax.identity()
    return optax.chain(clip, OPTIMIZERS[optimizer.name](optimizer, maps))
