"""Tests of every row of every table: training, probe, data, optimizer and causality."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rows import ROWS
from stores import write_chat
from tiny_specs import choose_covering_cases, draw_params

from sinklab.config.spec import Layout
from sinklab.config.validate import parse_config
from sinklab.data.run_data import load_run_data
from sinklab.parallel import device_mesh, sharding
from sinklab.train import sink_probe, state, step

SPECS = {f'{module.__name__}:{row}': parse_config(module.get_config(row, 'smoke').to_dict()) for module, row in ROWS}


def select_distinct(part):
    """Return {name: spec} of the first row for each value of a part of the spec."""
    return {name: SPECS[name] for name in {part(spec): name for name, spec in reversed(SPECS.items())}.values()}


def list_choices(value, path=()):
    """Yield (path of a field, its value) of a record; for a number, its type instead of its value."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from list_choices(getattr(value, field.name), (*path, field.name))
    else:
        yield path, type(value) if type(value) in (int, float) else value


def list_attention_choices(name):
    """Yield the optimizer of a row, its similarity, its normalizer and its learned keys.

    Other parts of a model are trained in test_train_step.py and compared with a reference in test_model.py.
    """
    spec = SPECS[name]
    yield 'optimizer', spec.optimizer.name
    yield 'similarity', spec.model.attention.similarity
    yield 'normalizer', spec.model.attention.normalizer
    yield 'learned_kv', spec.model.learned_kv.kind


def list_causality_choices(name):
    """Yield the choices of a row that affect which tokens influence which."""
    model = SPECS[name].model
    for part in (
        'attention',
        'mask',
        'learned_kv',
        'position',
        'combination',
        'gate',
        'norm',
        'qk_norm',
        'head_norm',
    ):
        yield from list_choices(getattr(model, part), (part,))


MODELS = select_distinct(lambda spec: spec.model)


def make_row_parameters(names, parts):
    """Return parameters for rows: slow for a set that covers all choices, exhaustive for the others."""
    chosen, marks = choose_covering_cases(names, parts), {True: pytest.mark.slow, False: pytest.mark.exhaustive}
    return [pytest.param(name, marks=marks[name in chosen]) for name in names]


@pytest.fixture(scope='module')
def sources(corpus, tmp_path_factory):
    """Return {loss: source} for a loss on all tokens and on those of the assistant."""
    chats = [[('user', f'what is {n}?' * 5), ('assistant', f'it is {2 * n}, I think')] for n in range(100)]
    return {'all': corpus, 'assistant': write_chat(tmp_path_factory.mktemp('chat') / 'a.jsonl', chats)}


def set_source(spec, sources):
    return dataclasses.replace(spec, data=dataclasses.replace(spec.data, source=sources[spec.data.loss]))


@pytest.mark.parametrize('name', make_row_parameters(SPECS, list_attention_choices))
def test_row_trains_all_parameters_and_probe_metrics_are_finite(name, sources):
    spec = set_source(SPECS[name], sources)
    # Weight decay would also change parameters without a gradient.
    optimizer = dataclasses.replace(spec.optimizer, weight_decay=0.0)
    spec = dataclasses.replace(spec, optimizer=optimizer)
    data, mesh = load_run_data(spec), device_mesh.make_mesh(Layout())
    first, second = (data.batches.read_rows(step, range(spec.optimizer.batch_size)) for step in range(2))
    with jax.set_mesh(mesh):
        train_state = state.create_state(spec, mesh)
        initial_params = jax.device_get(train_state['params'])
        train_step = step.make_train_step(spec, Layout(), mesh)
        zero = sharding.make_per_device_array(0, mesh)
        train_state, _ = train_step(train_state, first, zero)  # with a warm-up, the learning rate of this step is 0
        train_state, metrics = train_step(train_state, second, zero)
        probe_values = sink_probe.make_probe(spec, mesh)(train_state['params'], data.probe_PT)
    all_metrics = jax.device_get(metrics) | sink_probe.compute_probe_metrics(
        probe_values, spec, data.is_trigger(data.probe_PT)
    )
    assert all(np.isfinite(value) for value in all_metrics.values())
    has_sink_column = spec.model.learned_kv.kind in ('sink_token', 'k', 'kv', 'logit')
    assert ('sink/star' in all_metrics) == (has_sink_column or spec.model.attention.normalizer == 'plus_one')
    assert {'train/loss', 'sink/1', 'alpha/1', 'mass/row', 'norm/ratio/01'} <= set(all_metrics)
    changed = jax.tree.map(
        lambda first, second: bool((first != second).any()), initial_params, jax.device_get(train_state['params'])
    )
    assert all(jax.tree.leaves(changed)), changed


@pytest.mark.parametrize('name', select_distinct(lambda spec: spec.data))
def test_row_data_has_configured_shapes_and_valid_ids(name, sources):
    spec = set_source(SPECS[name], sources)
    data, size = load_run_data(spec), spec.optimizer.batch_size
    ids_BT = data.batches.read_rows(0, range(size))
    assert ids_BT.shape == (size, spec.data.length + 1)
    assert data.probe_PT.shape == (spec.probe.sequences, spec.probe.length)
    for ids in (np.where(ids_BT < 0, ~ids_BT, ids_BT), data.probe_PT):
        assert 0 <= ids.min() < ids.max() < spec.model.vocabulary


@pytest.mark.parametrize('name', make_row_parameters(MODELS, list_causality_choices))
def test_row_is_causal_outside_its_prefix(name):
    """Change the id at one position and compare the logits bit for bit.

    Only that position and later ones change, or the whole prefix if the position is in it.
    """
    spec = dataclasses.replace(SPECS[name], data=dataclasses.replace(SPECS[name].data, length=16))
    graph, params = state.make_abstract_model(spec)[0], draw_params(spec)
    inputs = dict(start_BT=jnp.array([[0] * 6 + [6] * 10])) if spec.model.mask.document else {}
    run = jax.jit(lambda params, ids_T: nnx.merge(graph, params)(ids_T[None], **inputs)[0][0])
    compute_logits = functools.partial(run, params)
    ids_T, positions, prefix = np.arange(16), np.arange(16), spec.model.mask.prefix or 0
    plain_TV = compute_logits(ids_T)
    changed_TT = np.array(
        [(compute_logits(np.where(positions == position, 99, ids_T)) != plain_TV).any(-1) for position in positions]
    )
    visible_TT = (positions[:, None] <= positions) | (positions[:, None] < prefix) & (positions < prefix)
    assert np.isfinite(plain_TV).all()
    assert not changed_TT[~visible_TT].any()
    assert changed_TT.diagonal().all()
    assert changed_TT[:prefix, : max(prefix, 1)].all()
    assert changed_TT[:prefix, 11].all()
