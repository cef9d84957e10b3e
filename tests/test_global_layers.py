"""Global layers: backends, remat, metrics, FLOPs and selection of a backend treat both kinds of layers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import interpret_pallas
from flax import nnx
from model_options import GEMMA3, TOKENS, make_model_changes
from tiny_specs import draw_params, make_tiny_spec

from sinklab.attn.backends import select_backend
from sinklab.errors import UserError
from sinklab.metrics.metric import make_context
from sinklab.model import flops
from sinklab.model.attention import make_attention_problem
from sinklab.train import state

NO_POSITIONS = make_model_changes(layers=4, global_layers__every=2, global_layers__position='none', kv_heads=2)


def compute_loss(spec, params, **options):
    graph, _ = state.make_abstract_model(spec)
    logits_BTV, intermediates = nnx.merge(graph, params)(TOKENS, **options)
    return jnp.mean(jax.nn.log_softmax(logits_BTV)[..., 0]), intermediates


@pytest.mark.slow
@pytest.mark.usefixtures('small_blocks')
@pytest.mark.parametrize(
    ('changes', 'backend', 'remat', 'tolerances'),
    [
        (GEMMA3, 'chunked', 'attention,ffn', (1e-5, 1e-3, 1e-5)),
        (NO_POSITIONS, 'chunked', 'full', (1e-5, 1e-3, 1e-5)),
        (GEMMA3, 'tpu', 'none', (1e-4, 1e-2, 1e-3)),
    ],
    ids=['Gemma 3', 'NoPE', 'TPU kernels'],
)
def test_backend_gives_loss_and_gradient_of_dense_backend(changes, backend, remat, tolerances):
    spec = make_tiny_spec(**changes)
    params = draw_params(spec)
    with interpret_pallas():
        ((dense_loss, _), dense_gradient), ((loss, intermediates), gradient) = (
            jax.jit(jax.value_and_grad(functools.partial(compute_loss, spec, **options), has_aux=True))(params)
            for options in (dict(backend='dense'), dict(backend=backend, remat=remat, num_first_keys=3))
        )
    loss_rtol, rtol, atol = tolerances
    np.testing.assert_allclose(loss, dense_loss, rtol=loss_rtol)
    for actual, expected in zip(jax.tree.leaves(gradient), jax.tree.leaves(dense_gradient), strict=True):
        assert np.isfinite(actual).all()
        np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol * np.abs(expected).max())
    assert intermediates.key_attention_sums.raw_BHS.shape[0] == spec.model.layers


@pytest.mark.slow
def test_global_layers_keep_residuals_of_backward_pass_once():
    """Compare with a model whose layers are all alike: only residuals of attention may be kept twice."""

    def measure_bytes(**changes):
        spec = make_tiny_spec(**make_model_changes(layers=8, width=64, ffn_width=512, mask__window=4, **changes))
        gradient = jax.jit(jax.grad(lambda params: compute_loss(spec, params)[0]))
        params = nnx.to_pure_dict(state.make_abstract_model(spec)[1])
        return gradient.lower(params).compile().memory_analysis().temp_size_in_bytes

    assert measure_bytes(global_layers__every=4) < 1.25 * measure_bytes()


def test_metrics_of_windows_do_not_exist_with_global_layers():
    context = make_context(make_tiny_spec(**GEMMA3), 12, 0)
    assert (context.window, context.reach) == (None, 12)
    no_global_layers = {name: value for name, value in GEMMA3.items() if 'global_layers' not in name}
    context = make_context(make_tiny_spec(**no_global_layers), 12, 0)
    assert (context.window, context.reach) == (3, 3)


def test_forward_flops_count_window_in_local_layers_only():
    local, full = (make_tiny_spec(**make_model_changes(layers=3, mask__window=window)) for window in (3, None))
    mixed = make_tiny_spec(**make_model_changes(layers=3, mask__window=3, global_layers__every=3))
    local_flops, full_flops, mixed_flops = (
        flops.count_forward_flops(spec.model, spec.data.length) for spec in (local, full, mixed)
    )
    assert mixed_flops.attention == pytest.approx((2 * local_flops.attention + full_flops.attention) / 3)
    assert mixed_flops.projections == full_flops.projections


def test_selected_backend_supports_every_kind_of_layer():
    spec = make_tiny_spec(**make_model_changes(layers=2, mask__window=3, global_layers__every=2))
    local, global_layer = (make_attention_problem(kind, spec.data.length) for kind in spec.model.layer_types)
    assert select_backend('auto', 'cpu', local, global_layer).backend == 'chunked'
    wide = dataclasses.replace(global_layer, width=512, value_width=512)
    for problems in ((local, wide), (wide, local)):
        with pytest.raises(UserError, match='512'):
            select_backend('tpu', 'tpu', *problems, verify=False)
        assert select_backend('auto', 'tpu', *problems, verify=False).backend == 'chunked'
    assert select_backend('auto', 'tpu', local, global_layer, verify=False).backend == 'tpu'
