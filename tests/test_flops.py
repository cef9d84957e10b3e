"""Tests of the FLOP formulas against the matrix products of the traced model."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from tiny_specs import make_tiny_spec

from sinklab.model import flops
from sinklab.model.transformer import Transformer

MLP_MAP = dict(
    model__attention__feature_map='mlp', model__attention__similarity='identity', model__attention__normalizer='none'
)
CASES = [
    {},
    dict(model__ffn='gelu', model__position='alibi'),
    dict(model__learned_kv__kind='kv'),
    dict(model__combination='add'),
    dict(model__combination='add_wide'),
    dict(model__kv_heads=2, model__tied=True),
    dict(model__kv_heads=1, model__combination='add_wide', model__qkv_bias=True),
    dict(model__gate='elementwise'),
    dict(model__gate='headwise'),
    dict(model__gate='shared'),
    dict(model__gate='value'),
    dict(model__gate='value_state'),
    dict(MLP_MAP),
    dict(MLP_MAP, model__kv_heads=2),
    dict(model__qk_norm=True),
    dict(model__forget_gate=True),
    dict(model__norm='sandwich'),
]


def iterate_product_flops(jaxpr, factor=1):
    """Yield the FLOPs of all matrix products of a jaxpr; multiply those of a scan by its length.

    If code has a branch for each platform, only the default branch counts; it is the last one.
    """
    for equation in jaxpr.eqns:
        if equation.primitive.name == 'dot_general':
            (contracted_axes, _), _ = equation.params['dimension_numbers']
            contracted_size = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted_axes)
            yield 2 * factor * contracted_size * math.prod(equation.outvars[0].aval.shape)
        length = equation.params['length'] if equation.primitive.name == 'scan' else 1
        params = list(equation.params.values())
        if equation.params.get('branches_platforms'):
            params = [equation.params['branches'][-1]]
        for inner in jax.tree.leaves(params, is_leaf=lambda x: hasattr(x, 'eqns')):
            inner = getattr(inner, 'jaxpr', inner)
            if hasattr(inner, 'eqns'):
                yield from iterate_product_flops(inner, factor * length)


LENGTH = make_tiny_spec().data.length


def make_model_config(**changes):
    """Return a model config whose queries see every key, as in the products of the `dense` backend."""
    model = make_tiny_spec(**changes).model
    return dataclasses.replace(model, mask=dataclasses.replace(model.mask, prefix=LENGTH))


def count_product_flops(model):
    """Count the FLOPs of the matrix products of the traced model, for each token of a window."""
    ids = jnp.zeros((1, LENGTH), jnp.int32)
    graph, params = nnx.split(nnx.eval_shape(lambda: Transformer(model, LENGTH, nnx.Rngs(0))))

    def sum_logits(params):
        return nnx.merge(graph, params)(ids, backend='dense')[0].sum()

    return sum(iterate_product_flops(jax.make_jaxpr(sum_logits)(params).jaxpr)) / LENGTH


@pytest.mark.parametrize('changes', CASES, ids=str)
def test_forward_flops_equal_matrix_products_of_traced_model(changes):
    model = make_model_config(**changes)
    assert count_product_flops(model) == flops.count_forward_flops(model, LENGTH).total


def test_forward_flops_account_for_causal_mask_and_window():
    full, causal, window = (
        flops.count_forward_flops(model, LENGTH).attention
        for model in (make_model_config(), make_tiny_spec().model, make_tiny_spec(model__mask__window=2).model)
    )
    assert causal / full == pytest.approx((LENGTH + 1) / 2 / LENGTH)
    assert window / full == pytest.approx((2 - 1 / LENGTH) / LENGTH)


def test_step_flops_of_1b_model_match_standard_formula():
    """Test 6 N for the parameters of matrix products and 6 L T D for causal attention."""
    from sinklab.config.validate import parse_config
    from sinklab.configs import scale

    spec = parse_config(scale.get_config('softmax_1b').to_dict())
    tokens, model = spec.optimizer.batch_size * spec.data.length, spec.model
    block_parameters = model.layers * model.width * (4 * model.width + 3 * model.ffn_width)
    product_flops = 6 * (block_parameters + model.width * model.vocabulary)
    attention_flops = 6 * model.layers * model.width * (spec.data.length + 1)
    assert flops.count_step_flops(spec) == pytest.approx(tokens * (product_flops + attention_flops))
