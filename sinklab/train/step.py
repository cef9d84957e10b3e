"""One update, a jitted function on plain trees, and what computes attention in it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from sinklab import sharding
from sinklab.attend.choice import Choice, choose
from sinklab.measure import table
from sinklab.measure.setting import setting_of
from sinklab.model.columns import count
from sinklab.model.rule import case
from sinklab.spec import Hardware, Spec
from sinklab.train import state
from sinklab.train.objective import loss_and_capture, predicted_share, value_and_gradient
from sinklab.train.optimizer import schedule


def choice(spec: Spec, hardware: Hardware) -> Choice:
    """What will compute attention here, chosen once; raises Refusal."""
    return choose(hardware.attention, jax.default_backend(), case(spec.model, spec.data.length))


def choice_for(spec: Spec, hardware: Hardware, platform: str) -> Choice:
    """What would, on devices that are not here."""
    return choose(hardware.attention, platform, case(spec.model, spec.data.length), here=False)


def given(spec: Spec, mesh: jax.sharding.Mesh) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """What a step is given beside the state: a batch, and a wish of each device."""
    shape = spec.optimizer.batch_size, spec.data.length + 1
    batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding.of_batch(mesh, shape))
    return batch, jax.ShapeDtypeStruct((mesh.size,), jnp.int32, sharding=sharding.of_devices(mesh))


def train_step(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, backend: str = 'chunked') -> Callable:
    """step(state, ids_BT, wish_D) -> (state, {train/loss, train/grad_norm, ..., wish}); the state is donated.

    The wish is the largest of those of all devices, so that every process learns of each other's.
    """
    first = spec.model.mask.prefix or 1  # a prefix is seen, not predicted
    setting = setting_of(spec, spec.data.length, count(spec.model))
    wanted = dict(keys=spec.probe.keys if spec.log.sinks else 0, rows=table.rows(setting) if spec.log.rows else {})
    seeing = loss_and_capture(spec, first, remat=hardware.remat, backend=backend, **wanted)
    optimizer, rate = state.optimizer(spec), schedule(spec.optimizer)
    batch = spec.optimizer.batch_size
    parts = batch // hardware.sequences(batch)

    def loss(params: dict, ids_BT: jax.Array) -> tuple[jax.Array, dict]:
        value, captured = seeing(params, ids_BT)
        return value, table.context(captured, setting)

    take = value_and_gradient(loss, spec, mesh, parts)

    def step(state: dict, ids_BT: jax.Array, wish_D: jax.Array) -> tuple[dict, dict]:
        (value, measured), gradient = take(state['params'], ids_BT)
        if spec.data.loss != 'all':
            value, gradient = jax.tree.map(lambda x: x / predicted_share(ids_BT, first), (value, gradient))
        updates, opt_state = optimizer.update(gradient, state['opt_state'], state['params'])
        params = optax.apply_updates(state['params'], updates)
        numbers = {
            'train/loss': value,
            'train/grad_norm': optax.tree.norm(gradient),
            'train/learning_rate': rate(state['step']),
            **measured,
        }
        # No wish where numbers are wrong; and so its collective waits for theirs. Of two collectives, one in a loop,
        # of which neither waits for the other, devices of a CPU begin with different ones, and wait for ever.
        settled = jax.lax.optimization_barrier(numbers)['train/grad_norm']
        numbers['wish'] = jnp.where(settled >= 0, wish_D, 0).max()
        return dict(step=state['step'] + 1, params=params, opt_state=opt_state), numbers

    places, options = (state.shardings(spec, mesh), sharding.of_replicas(mesh)), state.compiler_options(spec, mesh)
    return jax.jit(step, donate_argnums=0, out_shardings=places, compiler_options=options)
