"""Optimizers and schedules, all optax's; weight decay is decoupled and acts on every parameter, as released."""

import optax

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
        optimizer.final_learning_rate,
    )


def adamw(optimizer: spec.Optimizer) -> optax.GradientTransformation:
    return optax.adamw(
        schedule(optimizer),
        b1=optimizer.beta1,
        b2=optimizer.beta2,
        eps=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
    )


SCHEDULES = {'constant': constant, 'cosine': cosine}
OPTIMIZERS = {'adamw': adamw}


def schedule(optimizer: spec.Optimizer) -> optax.Schedule:
    return SCHEDULES[optimizer.schedule](optimizer)


def transformation(optimizer: spec.Optimizer) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(optimizer.clip_norm), OPTIMIZERS[optimizer.name](optimizer))
