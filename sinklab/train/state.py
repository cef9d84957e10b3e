"""The training state: a plain pytree {step, params, opt_state}, and where each leaf lives."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from sinklab import sharding, spec
from sinklab.model.transformer import Transformer
from sinklab.train.optimizer import maps, transformation

# On a CPU, what runs once is made of the same bits in a fifth of the time. Other platforms have options of their own.
ONCE = {'cpu': {'xla_backend_optimization_level': 1}}


# By default XLA leaves out roundings within what it fuses, and what it fuses depends on shapes: then a batch and its
# parts, or two layouts, are rounded in other places.
ROUNDED = {'bfloat16': {'xla_allow_excess_precision': False}}
# Else the compiler for TPUs makes sums of padded parts of the smaller weights, and waits for them.
GATHERED = {'tpu': {'xla_tpu_prefer_async_allgather_to_allreduce': True}}

# Of a run, its fork and a few that are measured beside it; a session that trains many must not keep what each of them
# had, structures and traced functions among it.
cached = functools.lru_cache(maxsize=8)


@cached
def architecture(spec: spec.Spec) -> tuple[nnx.GraphDef, nnx.State]:
    """(structure, abstract parameters): nnx.merge(structure, params) is the model again."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(spec.model, spec.data.length, nnx.Rngs(0))))


@cached
def optimizer(spec: spec.Spec) -> optax.GradientTransformation:
    return transformation(spec.optimizer, maps(architecture(spec)[1]))


def initial(spec: spec.Spec) -> dict:
    model = Transformer(spec.model, spec.data.length, nnx.Rngs(spec.seed))
    params = nnx.to_pure_dict(nnx.state(model))
    return dict(step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer(spec).init(params))


def create(spec: spec.Spec, mesh: jax.sharding.Mesh) -> dict:
    """A fresh state, each leaf made where it lives; its values do not depend on the mesh."""
    return creation(spec, mesh)()


def creation(spec: spec.Spec, mesh: jax.sharding.Mesh) -> Callable:
    options = ONCE.get(mesh.devices.flat[0].platform)
    return jax.jit(lambda: initial(spec), out_shardings=shardings(spec, mesh), compiler_options=options)


def shardings(spec: spec.Spec, mesh: jax.sharding.Mesh) -> dict:
    """A NamedSharding for every leaf; moments live with the parameter that they belong to."""
    params = sharding.of_parameters(mesh, architecture(spec)[1])
    replicas = sharding.of_replicas(mesh)
    places = {names(path): where for path, where in jax.tree_util.tree_leaves_with_path(params)}

    def moment(path: tuple, _: jax.ShapeDtypeStruct) -> jax.sharding.NamedSharding:
        """An optimizer's state holds trees like the parameters', whole or in part, somewhere inside its own."""
        own = names(path)
        return next((places[own[at:]] for at in range(len(own)) if own[at:] in places), replicas)

    opt_state = jax.tree_util.tree_map_with_path(moment, shapes(spec)['opt_state'])
    return dict(step=replicas, params=params, opt_state=opt_state)


@cached
def shapes(spec: spec.Spec) -> dict:
    """Shape and dtype of every leaf."""
    return jax.eval_shape(lambda: initial(spec))


def compiler_options(spec: spec.Spec, mesh: jax.sharding.Mesh) -> dict[str, bool]:
    """By which intermediates are rounded as the program says, and weights are gathered beside what is computed."""
    return ROUNDED.get(spec.model.dtype, {}) | GATHERED.get(mesh.devices.flat[0].platform, {})


def jit_options(spec: spec.Spec, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Of a program whose results every process reads."""
    return dict(out_shardings=sharding.of_replicas(mesh), compiler_options=compiler_options(spec, mesh))


def names(path: tuple) -> tuple[str, ...]:
    return tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))


def abstract(spec: spec.Spec, mesh: jax.sharding.Mesh) -> dict:
    """Shape, dtype and sharding of every leaf, with no memory behind them."""
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        shapes(spec),
        shardings(spec, mesh),
    )


def size(tree: dict) -> int:
    """Bytes of all leaves."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
