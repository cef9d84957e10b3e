"""Optimizers and schedules, all optax's; weight decay is decoupled and acts on every parameter, as released."""

import jax
import optax
from optax import contrib

from sinklab import spec


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


def adamw(optimizer: spec.Optimizer) -> optax.GradientTransformation:
    return optax.adamw(
        schedule(optimizer),
        b1=optimizer.beta1,
        b2=optimizer.beta2,
        eps=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
    )


def sgd(optimizer: spec.Optimizer) -> optax.GradientTransformation:
    return optax.chain(
        optax.trace(optimizer.beta1),
        optax.add_decayed_weights(optimizer.weight_decay),
        optax.scale_by_learning_rate(schedule(optimizer)),
    )


def muon(optimizer: spec.Optimizer) -> optax.GradientTransformation:
    """Muon for the maps inside blocks; embeddings, head, gains and vectors take AdamW with Nesterov's momentum."""
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


INTO_HEADS, OUT_OF_HEADS, PLAIN = ((1,), (2, 3)), ((1, 2), (3,)), ((1,), (2,))  # axes read, axes written
MAPS = {
    **dict.fromkeys(('query_DHK', 'key_DHK', 'value_DHK', 'weight_DHK'), INTO_HEADS),
    'output_HKD': OUT_OF_HEADS,
    **dict.fromkeys(('gate_DF', 'in_DF', 'out_FD', 'in_KK', 'out_KK'), PLAIN),
}


def maps(params: dict) -> dict:
    """The axes that the maps inside blocks read and write, layers being their axis 0; None is for Adam."""

    def of(path: tuple, _: jax.Array) -> contrib.MuonDimensionNumbers | None:
        keys = [entry.key for entry in path]
        return contrib.MuonDimensionNumbers(*MAPS[keys[-1]]) if keys[0] == 'blocks' and keys[-1] in MAPS else None

    return jax.tree_util.tree_map_with_path(of, params)


SCHEDULES = {'constant': constant, 'cosine': cosine}
OPTIMIZERS = {'adamw': adamw, 'sgd': sgd, 'muon': muon}


def schedule(optimizer: spec.Optimizer) -> optax.Schedule:
    return SCHEDULES[optimizer.schedule](optimizer)


def transformation(optimizer: spec.Optimizer) -> optax.GradientTransformation:
    clip = optax.clip_by_global_norm(optimizer.clip_norm) if optimizer.clip_norm else optax.identity()
    return optax.chain(clip, OPTIMIZERS[optimizer.name](optimizer))
