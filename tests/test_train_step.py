"""Train step: equal results on every mesh, with any number of micro-batches, with and without remat."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec
from model_options import GEMMA3
from tiny_specs import COVERING_OPERATIONS, OPERATIONS, make_tiny_spec, replace_operation

from sinklab.config.spec import Layout
from sinklab.errors import UserError
from sinklab.model.learned_kv import count_learned_kv
from sinklab.parallel import device_mesh, sharding
from sinklab.parallel.device_mesh import MESH_AXES
from sinklab.train import device_layout, state, step, validation_loss

IDS = np.random.default_rng(0).integers(0, 300, (4, 17)).astype(np.int32)


@functools.cache
def make_fresh_state(spec):
    """Return the initial state on one device. A test below checks that it is equal on every mesh."""
    mesh = device_mesh.make_mesh(Layout())
    with jax.set_mesh(mesh):
        return jax.device_get(state.create_state(spec, mesh))


def run_update(spec, layout, num_steps=2):
    """Return (metrics, state) after a few steps on one batch."""
    mesh = device_mesh.make_mesh(layout)
    with jax.set_mesh(mesh):
        train_state = jax.device_put(make_fresh_state(spec), state.get_state_shardings(spec, mesh))
        train_step = step.make_train_step(spec, layout, mesh)
        for _ in range(num_steps):
            train_state, metrics = train_step(
                train_state, sharding.put_batch(IDS, mesh), sharding.make_per_device_array(0, mesh)
            )
        return jax.device_get(metrics), train_state


LAYOUTS = [
    Layout(data=4),
    Layout(fsdp=4),
    Layout(tensor=4),
    Layout(data=2, tensor=2),
    Layout(fsdp=2, tensor=2),
    Layout(data=2, fsdp=2),
    Layout(micro_batch=1),
    Layout(micro_batch=2, data=2),
    Layout(remat='full'),
    Layout(remat='attention,ffn'),
    Layout(fsdp=4, remat='qkv,middle'),
]


OTHER_MODELS = [
    dict(model__learned_kv__kind='kv', model__position='relative_t5'),
    dict(model__learned_kv__kind='sink_token', model__position='learned', model__norm='sandwich'),
    dict(model__learned_kv__kind='logit', model__position='alibi', model__ffn='gelu', model__norm='post'),
    dict(model__combination='add_wide', model__gate='value', model__head_norm=True, optimizer__name='orthoadam'),
    dict(model__gate='value_state', model__qk_norm=True, model__mask__document=True),
    dict(model__position='learned', data__positions='reset'),
    dict(model__kv_heads=2, model__tied=True, model__qkv_bias=True, model__forget_gate=True, optimizer__name='muon'),
    dict(model__attention__feature_map='mlp', model__mask__prefix=3, optimizer__name='muon'),
    dict(
        optimizer__name='sgd',
        optimizer__beta2=None,
        optimizer__epsilon=None,
        model__learned_kv__shared=True,
        model__learned_kv__kind='v',
    ),
    GEMMA3 | dict(model__norm='res_post'),
]


SHARDED_LAYOUT = Layout(fsdp=2, tensor=2)
PLAIN_SPEC = make_tiny_spec()
SELECTED_LAYOUTS = [SHARDED_LAYOUT, Layout(micro_batch=2, data=2), Layout(fsdp=4, remat='qkv,middle')]
CASES = [
    pytest.param(PLAIN_SPEC, layout, marks=() if layout in SELECTED_LAYOUTS else pytest.mark.exhaustive)
    for layout in LAYOUTS
]
CASES += [
    pytest.param(replace_operation(PLAIN_SPEC, *pair), SHARDED_LAYOUT, marks=pytest.mark.exhaustive)
    for pair in OPERATIONS[1:]
]
# Other models with operations that cover every similarity and normalizer: PLAIN has exp with sum.
OTHER_MODEL_OPERATIONS = [('sigmoid', 'none'), ('softpick', 'sum'), ('exp', 'plus_one'), ('elu1', 'p_norm')]
OTHER_MODEL_OPERATIONS += [('relu', 'count'), ('identity', 'clamped')]
assert {*OTHER_MODEL_OPERATIONS, ('exp', 'sum')} == {*COVERING_OPERATIONS}
OTHER_SPECS = [
    replace_operation(make_tiny_spec(**changes), *pair) if pair else make_tiny_spec(**changes)
    for changes, pair in itertools.zip_longest(OTHER_MODELS, OTHER_MODEL_OPERATIONS)
]
CASES += [
    pytest.param(spec, SHARDED_LAYOUT, marks=() if index % 3 == 0 else pytest.mark.exhaustive)
    for index, spec in enumerate(OTHER_SPECS)
]
CASES += [
    pytest.param(make_tiny_spec(**changes), SHARDED_LAYOUT, marks=pytest.mark.exhaustive) for changes in OTHER_MODELS
]


@functools.cache
def run_on_one_device(spec):
    """Return the result of a few steps on one device."""
    return run_update(spec, Layout())


@pytest.mark.slow
@pytest.mark.parametrize(('spec', 'layout'), CASES)
def test_train_step_gives_equal_loss_and_parameters_for_every_layout(spec, layout):
    expected_metrics, expected_state = run_on_one_device(spec)
    metrics, train_state = run_update(spec, layout)
    for name in expected_metrics:
        np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=1e-5)
    actual, reference = (jax.tree.leaves(jax.device_get(tree['params'])) for tree in (train_state, expected_state))
    for leaf, expected_leaf in zip(actual, reference, strict=True):
        np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-4, atol=1e-4)  # a hundredth of one step of Adam


@pytest.mark.slow
@pytest.mark.parametrize('layout', [Layout(data=4), Layout(fsdp=2, tensor=2)], ids=str)
def test_create_state_is_equal_on_every_mesh(layout):
    states = [state.create_state(make_tiny_spec(), device_mesh.make_mesh(setup)) for setup in (Layout(), layout)]
    for leaf, other_leaf in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(leaf, other_leaf)


@pytest.mark.slow
def test_train_step_keeps_moments_sharded_like_parameters():
    spec, layout = make_tiny_spec(), Layout(fsdp=2, tensor=2)
    shardings = state.get_state_shardings(spec, device_mesh.make_mesh(layout))
    moments = shardings['opt_state'][1][0]
    assert moments.mu == moments.nu == shardings['params']
    assert shardings['params']['blocks']['ffn']['out_FD'].spec == PartitionSpec(None, 'tensor', 'fsdp')
    _, train_state = run_update(spec, layout, num_steps=1)
    for leaf, leaf_sharding in zip(jax.tree.leaves(train_state), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(leaf_sharding, leaf.ndim)
    shard = train_state['params']['blocks']['ffn']['out_FD'].addressable_shards[0].data
    assert shard.shape == (2, 12, 8), 'a quarter of it on each device'


@pytest.mark.slow
def test_train_loss_excludes_prefix_and_validation_loss_includes_it():
    spec = make_tiny_spec(model__mask__prefix=4, probe__keys=4)
    params = make_fresh_state(spec)['params']
    loss_BT, _ = validation_loss.make_token_loss(spec, device_mesh.make_mesh(Layout()))(params, IDS)
    np.testing.assert_allclose(step.make_loss(spec, first_target=4)(params, IDS), loss_BT[:, 3:].mean(), rtol=1e-5)
    with jax.set_mesh(mesh := device_mesh.make_mesh(Layout())):
        valid_loss = validation_loss.make_validation_fn(spec, Layout(), mesh)(params, IDS)['valid/loss']
        inputs = make_fresh_state(spec), sharding.put_batch(IDS, mesh), sharding.make_per_device_array(0, mesh)
        _, metrics = step.make_train_step(spec, Layout(), mesh)(*inputs)
    np.testing.assert_allclose(valid_loss, loss_BT.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics['train/loss'], loss_BT[:, 3:].mean(), rtol=1e-5)


@pytest.mark.slow
def test_create_state_depends_on_seed():
    first, other = (make_fresh_state(make_tiny_spec(seed=seed))['params']['embedding_VD'] for seed in (0, 1))
    assert not np.allclose(first, other)


@pytest.mark.slow
def test_evaluate_averages_over_windows_for_any_batch_size():
    spec, layout = make_tiny_spec(), Layout(data=2)
    mesh = device_mesh.make_mesh(layout)
    ids_NT = np.random.default_rng(1).integers(0, 300, (7, 17)).astype(np.int32)
    with jax.set_mesh(mesh):
        params = jax.device_put(make_fresh_state(spec)['params'], state.get_state_shardings(spec, mesh)['params'])
        result = validation_loss.make_validation_fn(spec, layout, mesh)(params, ids_NT)
    loss = jax.jit(step.make_loss(spec))
    window_losses = [float(loss(make_fresh_state(spec)['params'], ids_NT[i : i + 1])) for i in range(7)]
    np.testing.assert_allclose(result['valid/loss'], np.mean(window_losses), rtol=1e-5)


@pytest.mark.parametrize(
    ('layout', 'kv_heads', 'values'),
    [
        (Layout(micro_batch=3), None, ['--micro_batch=3', 'config.optimizer.batch_size', '4']),
        (Layout(data=3, fsdp=1), None, ['config.optimizer.batch_size', '--data=3']),
        (Layout(data=2, micro_batch=1), None, ['--micro_batch=1', 'multiple of 2']),
        (Layout(tensor=3), None, ['config.model.heads', '4', '--tensor=3']),
        (Layout(tensor=4), 2, ['config.model.kv_heads', '2', '--tensor=4']),
    ],
    ids=str,
)
def test_check_layout_names_what_it_cannot_divide(layout, kv_heads, values):
    mesh = AbstractMesh((layout.data or 1, layout.fsdp or 1, layout.tensor), MESH_AXES)
    with pytest.raises(UserError) as error:
        device_layout.check_layout(make_tiny_spec(model__kv_heads=kv_heads), layout, mesh)
    assert all(value in str(error.value) for value in values)


@pytest.mark.parametrize('changes', [{}, *OTHER_MODELS], ids=str)
def test_check_layout_accepts_exactly_layouts_that_divide_all_parameters(changes):
    spec = make_tiny_spec(**changes)
    abstract_params = nnx.to_pure_dict(state.make_abstract_model(spec)[1])
    for fsdp, tensor in itertools.product((1, 2, 3, 4, 8), repeat=2):
        mesh = AbstractMesh((1, fsdp, tensor), MESH_AXES)
        try:
            jax.tree.map(
                lambda leaf, leaf_sharding: leaf_sharding.shard_shape(leaf.shape),
                abstract_params,
                sharding.make_parameter_shardings(mesh, state.make_abstract_model(spec)[1]),
            )
            is_divisible = 4 % fsdp == 0
        except ValueError:
            is_divisible = False
        try:
            device_layout.check_layout(spec, Layout(), mesh)
            is_accepted = True
        except UserError:
            is_accepted = False
        assert is_accepted == is_divisible, (fsdp, tensor)


def test_logical_to_mesh_axes_rejects_two_axes_on_one_mesh_axis():
    with pytest.raises(ValueError):
        sharding.logical_to_mesh_axes('batch', 'embed')


@pytest.mark.slow
@pytest.mark.parametrize(
    ('columns', 'pair'),
    [
        ('kv', ('sigmoid', 'none')),
        pytest.param('none', ('exp', 'sum'), marks=pytest.mark.exhaustive),
        pytest.param('sink_token', ('exp', 'sum'), marks=pytest.mark.exhaustive),
    ],
)
def test_train_step_sink_metrics_match_attention_matrices(columns, pair):
    """Use micro-batches, and check that the state equals that of a step without these metrics."""
    spec = replace_operation(
        make_tiny_spec(model__learned_kv__kind=columns, model__position='alibi', log__sinks=True), *pair
    )
    metrics, state_with_metrics = run_update(spec, Layout(micro_batch=2), num_steps=1)
    spec_without_metrics = dataclasses.replace(spec, log=dataclasses.replace(spec.log, sinks=False))
    _, state_without_metrics = run_update(spec_without_metrics, Layout(), num_steps=1)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), state_with_metrics, state_without_metrics
    )
    _, _, captured = jax.jit(step.make_hidden_states_fn(spec, capture=True))(
        make_fresh_state(spec)['params'], IDS[:, :-1]
    )
    attention_LBHTS = np.float64(captured.attention_BHTS)
    share_LBHTS = attention_LBHTS / attention_LBHTS.sum(-1, keepdims=True)
    for k in range(spec.probe.keys):
        alpha_LBH = share_LBHTS[..., count_learned_kv(spec.model) + k].sum(-1) / (16 - k)
        np.testing.assert_allclose(metrics[f'alpha/{k + 1}/context'], alpha_LBH.mean(), rtol=1e-4)
        np.testing.assert_allclose(metrics[f'sink/{k + 1}/context'], 100 * (alpha_LBH > 0.3).mean(), rtol=1e-4)
    uniform = sum(1 / (i + count_learned_kv(spec.model)) for i in range(1, 17)) / 16
    np.testing.assert_allclose(metrics['alpha/floor/context'], uniform, rtol=1e-4)
    np.testing.assert_allclose(metrics['mass/row/context'], attention_LBHTS.sum(-1).mean(), rtol=1e-4)
    if columns != 'none':
        star_LBH = share_LBHTS[..., 0].mean(-1)
        np.testing.assert_allclose(metrics['alpha/star/clean/context'], star_LBH.mean(), rtol=1e-4)
