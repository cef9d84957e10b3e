"""One update, a jitted function on plain trees, and what computes attention in it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from sinklab import sharding
from sinklab.attend.choice import BackendChoice, select_backend
from sinklab.measure import table
from sinklab.measure.setting import make_setting
from sinklab.model.columns import count_learned_kv
from sinklab.model.rule import make_attention_problem
from sinklab.spec import Hardware, Spec
from sinklab.train import state
from sinklab.train.objective import make_loss_with_intermediates, compute_predicted_fraction, make_value_and_grad
from sinklab.train.optimizer import make_schedule


def choose_step_backend(spec: Spec, hardware: Hardware) -> BackendChoice:
    """What will compute attention here, chosen once; raises Refusal."""
    return select_backend(hardware.attention, jax.default_backend(), make_attention_problem(spec.model, spec.data.length))


def choose_step_backend_for(spec: Spec, hardware: Hardware, platform: str) -> BackendChoice:
    """What would, on devices that are not here."""
    return select_backend(hardware.attention, platform, make_attention_problem(spec.model, spec.data.length), verify=False)


def make_abstract_inputs(spec: Spec, mesh: jax.sharding.Mesh) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """What a step is given beside the state: a batch, and a wish of each device."""
    shape = spec.optimizer.batch_size, spec.data.length + 1
    batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding.make_batch_sharding(mesh, shape))
    return batch, jax.ShapeDtypeStruct((mesh.size,), jnp.int32, sharding=sharding.make_per_device_sharding(mesh))


def make_train_step(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, backend: str = 'chunked') -> Callable:
    """step(state, ids_BT, wish_D) -> (state, {train/loss, train/grad_norm, ..., wish}); the state is donated.

    The wish is the largest of those of all devices, so that every process learns of each other's.
    """
    first_target = spec.model.mask.prefix or 1  # a prefix is seen, not predicted
    setting = make_setting(spec, spec.data.length, count_learned_kv(spec.model))
    capture_options = dict(keys=spec.probe.keys if spec.log.sinks else 0, rows=table.get_row_functions(setting) if spec.log.rows else {})
    loss_fn = make_loss_with_intermediates(spec, first_target, remat=hardware.remat, backend=backend, **capture_options)
    optimizer, learning_rate = state.get_optimizer(spec), make_schedule(spec.optimizer)
    batch_size = spec.optimizer.batch_size
    num_micro_batches = batch_size // hardware.get_micro_batch_size(batch_size)

    def loss(params: dict, ids_BT: jax.Array) -> tuple[jax.Array, dict]:
        value, intermediates = loss_fn(params, ids_BT)
        return value, table.compute_context_numbers(intermediates, setting)

    value_and_grad = make_value_and_grad(loss, spec, mesh, num_micro_batches)

    def step(state: dict, ids_BT: jax.Array, request_D: jax.Array) -> tuple[dict, dict]:
        (value, sink_metrics), gradient = value_and_grad(state['params'], ids_BT)
        if spec.data.loss != 'all':
            value, gradient = jax.tree.map(lambda x: x / compute_predicted_fraction(ids_BT, first_target), (value, gradient))
        updates, opt_state = optimizer.update(gradient, state['opt_state'], state['params'])
        params = optax.apply_updates(state['params'], updates)
        metrics = {
            'train/loss': value,
            'train/grad_norm': optax.tree.norm(gradient),
            'train/learning_rate': learning_rate(state['step']),
            **sink_metrics,
        }
        # No wish where numbers are wrong; and so its collective waits for theirs. Of two collectives, one in a loop,
        # of which neither waits for the other, devices of a CPU begin with different ones, and wait for ever.
        grad_norm = jax.lax.optimization_barrier(metrics)['train/grad_norm']
        metrics['wish'] = jnp.where(grad_norm >= 0, request_D, 0).max()
        return dict(step=state['step'] + 1, params=params, opt_state=opt_state), metrics

    out_shardings, options = (state.get_state_shardings(spec, mesh), sharding.make_replicated_sharding(mesh)), state.get_compiler_options(spec, mesh)
    return jax.jit(step, donate_argnums=0, out_shardings=out_shardings, compiler_options=options)
