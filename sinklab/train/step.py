"""The train step: forward pass, loss, gradient over micro-batches, optimizer update, and metrics."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from sinklab.attn.backends import BackendChoice, select_backend
from sinklab.config.spec import Layout, Spec
from sinklab.loss_mask import is_in_loss, strip_loss_mask
from sinklab.metrics import registry
from sinklab.metrics.metric import Arrays, make_context
from sinklab.model.attention import Intermediates, make_attention_problem
from sinklab.model.learned_kv import count_learned_kv
from sinklab.parallel import collectives, sharding
from sinklab.train import state
from sinklab.train.loss import cross_entropy
from sinklab.train.optimizer import make_schedule


def find_document_starts(ids_BT: jax.Array, end_token: int) -> jax.Array:
    """Return start_BT: the position in the window at which the document of each token starts."""
    position_T = jnp.arange(ids_BT.shape[1])
    is_first_BT = jnp.pad(ids_BT[:, :-1] == end_token, ((0, 0), (1, 0)), constant_values=True)
    return jax.lax.cummax(jnp.where(is_first_BT, position_T, 0), axis=1)


def make_document_inputs(ids_BT: jax.Array, spec: Spec) -> dict[str, jax.Array]:
    """Make the keyword arguments of the model that depend on document boundaries; usually none."""
    inputs = {}
    if spec.model.mask.document:
        inputs['start_BT'] = find_document_starts(ids_BT, spec.data.end_token)
    if spec.data.positions == 'reset':
        inputs['position_BT'] = jnp.arange(ids_BT.shape[1]) - find_document_starts(ids_BT, spec.data.end_token)
    return inputs


def make_hidden_states_fn(spec: Spec, bits: int | None = None, **model_options) -> Callable:
    """Make a function (params, ids_BT) -> (hidden_BTD, head_VD, Intermediates).

    With `bits`, quantization of the linear maps of the blocks and of their inputs is simulated (`param_einsum`).
    """
    graphdef, _ = state.make_abstract_model(spec)

    def apply_model(params: dict, ids_BT: jax.Array) -> tuple:
        model = nnx.merge(graphdef, params)
        for _, node in nnx.iter_graph(model) if bits else ():
            if isinstance(node, nnx.Param):
                node.set_metadata(bits=bits)
        hidden_BTD, intermediates = model.compute_hidden(ids_BT, **make_document_inputs(ids_BT, spec) | model_options)
        return hidden_BTD, model.head[...], intermediates

    return apply_model


def make_loss(spec: Spec, first_target: int = 1, **model_options) -> Callable:
    """Make a function (params, ids_BT of T + 1) -> mean cross-entropy of targets first_target..T."""
    loss = make_loss_with_intermediates(spec, first_target, **model_options)
    return lambda params, ids_BT: loss(params, ids_BT)[0]


def make_loss_with_intermediates(spec: Spec, first_target: int = 1, **model_options) -> Callable:
    """Make a function (params, ids_BT of T + 1) -> (mean cross-entropy, Intermediates).

    Targets that are not predicted count in the mean, with a loss of 0.
    """
    apply_model = make_hidden_states_fn(spec, **model_options)

    def loss(params: dict, ids_BT: jax.Array) -> tuple[jax.Array, Intermediates]:
        hidden_BTD, head_VD, intermediates = apply_model(params, strip_loss_mask(ids_BT)[:, :-1])
        return cross_entropy(hidden_BTD[:, first_target - 1 :], head_VD, ids_BT[:, first_target:]), intermediates

    return loss


def compute_predicted_fraction(ids_BT: jax.Array, first_target: int = 1) -> jax.Array:
    """Compute the fraction of targets that are predicted; 1 if there are none, for divisions."""
    xp = ids_BT.__array_namespace__()
    fraction = xp.mean(is_in_loss(ids_BT[:, first_target:]).astype('float32'))
    return xp.where(fraction > 0, fraction, 1.0)


def make_value_and_grad(loss: Callable, spec: Spec, mesh: jax.sharding.Mesh, num_micro_batches: int) -> Callable:
    """Make a function (params, ids_BT) -> ((loss, metrics), gradient) that accumulates over micro-batches.

    Each device computes with its own sequences, and keeps its own shards of the gradient. Along mesh axes that shard
    a parameter, gradients are reduce-scattered in every micro-batch; along other axes they are summed once, at the
    end.
    """
    value_and_grad = functools.partial(
        accumulate_gradients, jax.value_and_grad(loss, has_aux=True), num_micro_batches
    )
    param_shardings = state.get_state_shardings(spec, mesh)['params']

    def reduce_gradient(gradient: jax.Array, leaf_sharding: jax.sharding.NamedSharding) -> jax.Array:
        reduce_axes = tuple(
            axis
            for axis in sharding.BATCH_AXES
            if axis not in sharding.list_mesh_axes(leaf_sharding.spec) and mesh.shape[axis] > 1
        )
        return jax.lax.psum(gradient, reduce_axes) / sharding.count_batch_shards(mesh)

    def local_value_and_grad(params: dict, ids_BT: jax.Array) -> tuple[tuple, dict]:
        value_and_aux, gradient = value_and_grad(params, ids_BT)
        return jax.lax.pmean(value_and_aux, sharding.BATCH_AXES), jax.tree.map(
            reduce_gradient, gradient, param_shardings
        )

    return (
        collectives.shard_map_over_batch(local_value_and_grad, mesh, param_shardings, returns_gradient=True)
        if sharding.count_batch_shards(mesh) > 1
        else value_and_grad
    )


def accumulate_gradients(
    value_and_grad: Callable, num_micro_batches: int, params: dict, ids_BT: jax.Array
) -> tuple[tuple, dict]:
    """Return the mean of loss and gradient over micro-batches."""
    if num_micro_batches == 1:
        return value_and_grad(params, ids_BT)

    micro_batches = ids_BT.reshape(num_micro_batches, -1, ids_BT.shape[-1])
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(value_and_grad, params, micro_batches[0])
    )
    total, _ = jax.lax.scan(
        lambda total, ids_BT: (jax.tree.map(jnp.add, total, value_and_grad(params, ids_BT)), None),
        zeros,
        micro_batches,
    )
    return jax.tree.map(lambda x: x / num_micro_batches, total)


def choose_backend(spec: Spec, layout: Layout, absent_platform: str | None = None) -> BackendChoice:
    """Choose the attention backend, and verify it on the devices of this process; raises UserError.

    With `absent_platform`, choose it for devices that are not attached, so that it cannot be verified.
    """
    problems = [make_attention_problem(layer_type, spec.data.length) for layer_type in spec.model.layer_types]
    platform = absent_platform or jax.default_backend()
    return select_backend(layout.attention, platform, *problems, verify=absent_platform is None)


def make_abstract_inputs(spec: Spec, mesh: jax.sharding.Mesh) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Return the inputs of a step other than the state: a batch, and the request of each device."""
    shape = spec.optimizer.batch_size, spec.data.length + 1
    batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding.make_batch_sharding(mesh, shape))
    return batch, jax.ShapeDtypeStruct((mesh.size,), jnp.int32, sharding=sharding.make_per_device_sharding(mesh))


def make_train_step(spec: Spec, layout: Layout, mesh: jax.sharding.Mesh, backend: str = 'chunked') -> Callable:
    """Make the train step: step(state, ids_BT, request_per_device) -> (state, metrics); the state is donated.

    Of the metrics of attention, a step has only those of its own batch, whose names end with `/context`; all others
    come from the sink probe. The metric `request` is the largest request of all devices, so that every process
    receives the requests of others.
    """
    first_target = spec.model.mask.prefix or 1  # all queries see the prefix, so that it is not predicted
    context = make_context(spec, spec.data.length, count_learned_kv(spec.model))
    num_first_keys = spec.probe.keys if spec.log.sinks else 0
    loss_fn = make_loss_with_intermediates(
        spec, first_target, remat=layout.remat, backend=backend, num_first_keys=num_first_keys
    )
    optimizer = state.get_optimizer(spec)
    learning_rate = make_schedule(spec.optimizer)
    batch_size = spec.optimizer.batch_size
    num_micro_batches = batch_size // layout.get_micro_batch_size(batch_size)

    def loss(params: dict, ids_BT: jax.Array) -> tuple[jax.Array, Arrays]:
        value, intermediates = loss_fn(params, ids_BT)
        return value, registry.compute_batch_metrics(intermediates, context)

    value_and_grad = make_value_and_grad(loss, spec, mesh, num_micro_batches)

    def step(train_state: dict, ids_BT: jax.Array, request_per_device: jax.Array) -> tuple[dict, dict]:
        (value, sink_metrics), gradient = value_and_grad(train_state['params'], ids_BT)
        if spec.data.loss != 'all':
            value, gradient = jax.tree.map(
                lambda x: x / compute_predicted_fraction(ids_BT, first_target), (value, gradient)
            )
        updates, opt_state = optimizer.update(gradient, train_state['opt_state'], train_state['params'])
        params = optax.apply_updates(train_state['params'], updates)
        metrics = {
            'train/loss': value,
            'train/grad_norm': optax.tree.norm(gradient),
            'train/learning_rate': learning_rate(train_state['step']),
            **sink_metrics,
        }
        # Make the reduction of requests depend on the metrics. If two collectives, one of them in a loop, do not
        # depend on each other, devices of XLA:CPU may start them in different orders, and deadlock. No request is
        # passed on if the gradient norm is NaN.
        grad_norm = jax.lax.optimization_barrier(metrics)['train/grad_norm']
        metrics['request'] = jnp.where(grad_norm >= 0, request_per_device, 0).max()
        return dict(step=train_state['step'] + 1, params=params, opt_state=opt_state), metrics

    return jax.jit(
        step,
        donate_argnums=0,
        out_shardings=(state.get_state_shardings(spec, mesh), sharding.make_replicated_sharding(mesh)),
        compiler_options=state.get_compiler_options(spec, mesh),
    )


def compile_train_step(
    spec: Spec, layout: Layout, mesh: jax.sharding.Mesh, backend: str, compiler_options: dict | None = None
) -> jax.stages.Compiled:
    """Compile the train step, which needs no state for that; call this under the mesh."""
    inputs = state.make_abstract_state(spec, mesh), *make_abstract_inputs(spec, mesh)
    return make_train_step(spec, layout, mesh, backend).lower(*inputs).compile(compiler_options)
