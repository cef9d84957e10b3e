"""The train state, a pytree {step, params, opt_state}: its initialization, shapes and shardings."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from sinklab.config.spec import Spec
from sinklab.model.transformer import Transformer
from sinklab.parallel import sharding
from sinklab.train.optimizer import make_muon_dimension_numbers, make_optimizer

# Initialization runs only once. On CPU this option gives the same bits in a fifth of the time. Other platforms have
# other options.
INIT_COMPILER_OPTIONS = {'cpu': {'xla_backend_optimization_level': 1}}


# By default XLA omits roundings inside fusions, and fusions depend on shapes. Then a batch and its micro-batches, or
# two layouts, would be rounded in different places.
ROUNDING_COMPILER_OPTIONS = {'bfloat16': {'xla_allow_excess_precision': False}}
# Otherwise the compiler for TPUs gathers smaller weights as sums of padded shards, and waits for them.
ALL_GATHER_COMPILER_OPTIONS = {'tpu': {'xla_tpu_prefer_async_allgather_to_allreduce': True}}

# Enough for a run, its parent and a few runs that are measured with them. A process that trains many runs must not
# keep the model structures and traced functions of all of them.
cache_by_spec = functools.lru_cache(maxsize=8)


@cache_by_spec
def make_abstract_model(spec: Spec) -> tuple[nnx.GraphDef, nnx.State]:
    """Return (graphdef, abstract parameters); nnx.merge(graphdef, params) is the model."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(spec.model, spec.data.length, nnx.Rngs(0))))


@cache_by_spec
def get_optimizer(spec: Spec) -> optax.GradientTransformation:
    return make_optimizer(spec.optimizer, make_muon_dimension_numbers(make_abstract_model(spec)[1]))


def init_state(spec: Spec) -> dict:
    model = Transformer(spec.model, spec.data.length, nnx.Rngs(spec.seed))
    params = nnx.to_pure_dict(nnx.state(model))
    return dict(step=jnp.zeros((), jnp.int32), params=params, opt_state=get_optimizer(spec).init(params))


def create_state(spec: Spec, mesh: jax.sharding.Mesh) -> dict:
    """Create a new sharded state; its values do not depend on the mesh."""
    options = INIT_COMPILER_OPTIONS.get(mesh.devices.flat[0].platform)
    shardings = get_state_shardings(spec, mesh)
    return jax.jit(lambda: init_state(spec), out_shardings=shardings, compiler_options=options)()


def get_state_shardings(spec: Spec, mesh: jax.sharding.Mesh) -> dict:
    """Return a NamedSharding for each leaf; moments are sharded like their parameters."""
    params = sharding.make_parameter_shardings(mesh, make_abstract_model(spec)[1])
    replicated = sharding.make_replicated_sharding(mesh)
    param_shardings = flatten_by_name(params)

    def find_moment_sharding(path: tuple, _: jax.ShapeDtypeStruct) -> jax.sharding.NamedSharding:
        """Return the sharding of the parameter whose name ends the name of a moment; else replicate.

        The state of an optimizer contains trees like that of the parameters, complete or in part, at any depth.
        """
        moment_name = format_path(path)
        names = [name for name in param_shardings if moment_name.endswith(f'.{name}')]
        return param_shardings[max(names, key=len)] if names else replicated

    opt_state = jax.tree_util.tree_map_with_path(find_moment_sharding, get_state_shapes(spec)['opt_state'])
    return dict(step=replicated, params=params, opt_state=opt_state)


@cache_by_spec
def get_state_shapes(spec: Spec) -> dict:
    """Return the shape and dtype of each leaf."""
    return jax.eval_shape(lambda: init_state(spec))


def get_compiler_options(spec: Spec, mesh: jax.sharding.Mesh) -> dict[str, bool]:
    """Return compiler options that keep roundings of the program and make all-gathers asynchronous."""
    return ROUNDING_COMPILER_OPTIONS.get(spec.model.dtype, {}) | ALL_GATHER_COMPILER_OPTIONS.get(
        mesh.devices.flat[0].platform, {}
    )


def get_replicated_jit_options(spec: Spec, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Return options of jax.jit for a program whose results every process reads."""
    return dict(
        out_shardings=sharding.make_replicated_sharding(mesh), compiler_options=get_compiler_options(spec, mesh)
    )


def format_path(path: tuple) -> str:
    """Return the name of a leaf, such as blocks.ffn.in_DF."""
    return jax.tree_util.keystr(path, simple=True, separator='.')


def flatten_by_name(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by name."""
    return {format_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def make_abstract_state(spec: Spec, mesh: jax.sharding.Mesh) -> dict:
    """Return the shape, dtype and sharding of each leaf, without memory."""
    return jax.tree.map(
        lambda leaf, leaf_sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf_sharding),
        get_state_shapes(spec),
        get_state_shardings(spec, mesh),
    )
