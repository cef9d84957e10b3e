"""Tests of training on chats: the loss covers only words of the assistant."""

import jax
import numpy as np
import optax
import pytest
from stores import write_chat
from tiny_specs import draw_params, make_tiny_spec

from sinklab.config.spec import Layout
from sinklab.data.run_data import load_run_data
from sinklab.errors import UserError
from sinklab.model.transformer import compute_logits
from sinklab.parallel import device_mesh, sharding
from sinklab.train import state, step, validation_loss
from sinklab.train import step as step_module
from sinklab.train.step import make_hidden_states_fn


@pytest.fixture(scope='module')
def source(tmp_path_factory):
    chats = [
        [
            ('user', f'what is {n} and {n}?' * (1 + n % 3)),
            ('assistant', f'it is {2 * n}, I think'),
            ('user', 'thanks'),
        ]
        for n in range(200)
    ]
    return write_chat(tmp_path_factory.mktemp('chat') / 'a.jsonl', chats)


def make_spec(source, **changes):
    return make_tiny_spec(data__source=source, data__loss='assistant', optimizer__batch_size=8, **changes)


def compute_expected_loss(spec, params, ids_BT):
    """Compute the mean of a plain cross-entropy over the targets that are not masked."""
    plain_BT = np.where(ids_BT < 0, ~ids_BT, ids_BT)
    hidden_BTD, head_VD, _ = make_hidden_states_fn(spec)(params, plain_BT[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(compute_logits(hidden_BTD, head_VD), plain_BT[:, 1:])
    return float(np.asarray(losses)[ids_BT[:, 1:] >= 0].mean())


@pytest.mark.slow
@pytest.mark.parametrize('micro_batch', [None, 2])
def test_loss_is_mean_over_assistant_tokens(source, micro_batch):
    spec, layout = make_spec(source), Layout(micro_batch=micro_batch)
    data, mesh, params = load_run_data(spec), device_mesh.make_mesh(Layout()), draw_params(make_spec(source))
    batch = data.batches.read_rows(0, range(8))
    counts = (batch[:, 1:] >= 0).sum(1)
    assert len(set(counts.tolist())) > 1  # it differs between micro-batches
    with jax.set_mesh(mesh):
        train_state = state.init_state(spec) | dict(params=jax.tree.map(jax.numpy.array, params))
        _, metrics = step.make_train_step(spec, layout, mesh)(
            train_state, batch, sharding.make_per_device_array(0, mesh)
        )
        np.testing.assert_allclose(
            float(metrics['train/loss']), compute_expected_loss(spec, params, batch), rtol=1e-5
        )
        valid_loss = validation_loss.make_validation_fn(spec, layout, mesh)(params, data.valid_NT)['valid/loss']
        np.testing.assert_allclose(valid_loss, compute_expected_loss(spec, params, data.valid_NT), rtol=1e-5)


@pytest.mark.slow
def test_loss_excludes_user_tokens_but_model_reads_them(source):
    spec = make_spec(source)
    batch, params = load_run_data(spec).batches.read_rows(0, range(8)), draw_params(make_spec(source))
    is_user_token = batch[:, 1:] < 0
    gradient = jax.grad(lambda p: step_module.make_loss(spec)(p, batch))(params)['head_VD']
    changed_batch = batch.copy()
    row, position = np.argwhere(is_user_token & (np.arange(16) > 0))[0]
    changed_batch[row, position + 1] = ~((~changed_batch[row, position + 1] + 1) % 300)
    changed_gradient = jax.grad(lambda p: step_module.make_loss(spec)(p, changed_batch))(params)['head_VD']
    assert np.isfinite(gradient).all()
    assert (gradient != changed_gradient).any()  # later tokens depend on the changed one
    masked_batch = np.where(batch < 0, batch, ~batch)
    assert float(step_module.make_loss(spec)(params, masked_batch)) == 0


def test_loss_on_all_tokens_uses_same_rows(source):
    full = load_run_data(make_tiny_spec(data__source=source, optimizer__batch_size=8)).batches.read_rows(0, range(8))
    masked = load_run_data(make_spec(source)).batches.read_rows(0, range(8))
    assert (full >= 0).all()
    np.testing.assert_array_equal(np.where(masked < 0, ~masked, masked), full)


def test_loss_on_assistant_is_rejected_for_plain_text(corpus):
    with pytest.raises(UserError, match=r'config\.data\.loss.*assistant'):
        make_tiny_spec(data__source=corpus, data__loss='assistant')
