"""The training state: a plain pytree {step, params, opt_state}, and where each leaf lives."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from sinklab import sharding, spec
from sinklab.model.transformer import Transformer
from sinklab.train.optimizer import transformation


def architecture(model: spec.Model) -> tuple[nnx.GraphDef, nnx.State]:
    """(structure, abstract parameters): nnx.merge(structure, params) is the model again."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(model, nnx.Rngs(0))))


def initial(spec: spec.Spec) -> dict:
    params = nnx.to_pure_dict(nnx.state(Transformer(spec.model, nnx.Rngs(spec.seed))))
    return dict(step=jnp.zeros((), jnp.int32), params=params, opt_state=transformation(spec.optimizer).init(params))


def create(spec: spec.Spec, mesh: jax.sharding.Mesh) -> dict:
    """A fresh state, each leaf made where it lives; its values do not depend on the mesh."""
    return jax.jit(lambda: initial(spec), out_shardings=shardings(spec, mesh))()


def shardings(spec: spec.Spec, mesh: jax.sharding.Mesh) -> dict:
    """A NamedSharding for every leaf; moments live with the parameter that they belong to."""
    params = sharding.of_parameters(mesh, architecture(spec.model)[1])
    replicated = sharding.replicated(mesh)
    opt_state = optax.tree.map_params(
        transformation(spec.optimizer),
        lambda _, where: where,
        jax.eval_shape(lambda: initial(spec))['opt_state'],
        params,
        transform_non_params=lambda _: replicated,
    )
    return dict(step=replicated, params=params, opt_state=opt_state)


def abstract(spec: spec.Spec, mesh: jax.sharding.Mesh) -> dict:
    """Shape, dtype and sharding of every leaf, with no memory behind them."""
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        jax.eval_shape(lambda: initial(spec)),
        shardings(spec, mesh),
    )


def size(tree: dict) -> int:
    """Bytes of all leaves."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
