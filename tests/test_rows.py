"""Every row of every table trains and is probed, and none but those with a prefix looks ahead."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_tables import ROWS

from sinklab import sharding
from sinklab.data.batches import sequences
from sinklab.model.transformer import Transformer
from sinklab.parse import parse
from sinklab.spec import Hardware
from sinklab.train import probe, state, step

SPECS = {f'{module.__name__}:{row}': parse(module.get_config(row, 'smoke').to_dict()) for module, row in ROWS}
MODELS = {spec.model: name for name, spec in reversed(SPECS.items())}
DOCUMENT = dict(start_BT=jnp.array([[0] * 6 + [6] * 10]))


@pytest.mark.slow
@pytest.mark.parametrize('name', SPECS)
def test_a_row_takes_steps_and_a_probe(name, corpus):
    spec = SPECS[name]
    spec = dataclasses.replace(
        spec,
        data=dataclasses.replace(spec.data, source=corpus),
        optimizer=dataclasses.replace(spec.optimizer, weight_decay=0.0),  # it would move what has no gradient
    )
    data, mesh = sequences(spec), sharding.mesh(Hardware())
    one, other = (data.batches.rows(step, range(spec.optimizer.batch_size)) for step in range(2))
    with jax.set_mesh(mesh):
        first = state.create(spec, mesh)
        before = jax.device_get(first)
        advance = step.train_step(spec, Hardware(), mesh)
        after, _ = advance(first, one)  # where there is a warm-up, its rate is 0
        after, numbers = advance(after, other)
        observed = probe.observer(spec, mesh)(after['params'], data.probe_PT)
    found = numbers | probe.numbers(observed, spec, data.triggered(data.probe_PT))
    assert all(np.isfinite(value) for value in found.values())
    column = spec.model.columns in ('sink_token', 'k', 'kv', 'logit')
    assert ('sink/star' in found) == (column or spec.model.attention.normalizer == 'plus_one')
    assert {'train/loss', 'sink/1', 'alpha/1', 'mass/row', 'norm/ratio/01'} <= set(found)
    moved = jax.tree.map(lambda one, other: bool((one != other).any()), before['params'], after['params'])
    assert all(jax.tree.leaves(moved)), moved


@pytest.mark.slow
@pytest.mark.parametrize('model', MODELS, ids=MODELS.get)
def test_a_row_is_causal_but_for_its_prefix(model):
    graph, params = nnx.split(Transformer(model, 16, nnx.Rngs(0)))
    params = nnx.to_pure_dict(params)
    where = DOCUMENT if model.mask.document else {}

    def logit(embedding_VD, at):
        built = nnx.merge(graph, params | {'embedding_VD': embedding_VD})
        return built(jnp.arange(16)[None], **where)[0][0, at].sum()

    with jax.disable_jit():
        for at in ((model.mask.prefix or 1) - 1, 11):
            moved = np.abs(jax.grad(logit)(params['embedding_VD'], at)[:16]).max(-1)
            assert moved[at] > 0
            assert (moved[max(at + 1, model.mask.prefix or 0) :] == 0).all()
            assert (moved[: model.mask.prefix or 0] > 0).all()
