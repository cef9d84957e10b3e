"""Every row of every table trains and is probed, and none but those with a prefix looks ahead."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import covering, drawn
from flax import nnx
from rows import ROWS
from stores import chat

from sinklab import devices, sharding
from sinklab.data.batches import sequences
from sinklab.parse import parse
from sinklab.spec import Hardware
from sinklab.train import probe, state, step
from sinklab.train.optimizer import transformation

SPECS = {f'{module.__name__}:{row}': parse(module.get_config(row, 'smoke').to_dict()) for module, row in ROWS}


def distinct(part):
    """{name: spec} of the first row of each value of a part of its spec."""
    return {name: SPECS[name] for name in {part(spec): name for name, spec in reversed(SPECS.items())}.values()}


def choices(value, path=()):
    """Yield (path of a field, its value) of a record; of a number only its type."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from choices(getattr(value, field.name), (*path, field.name))
    else:
        yield path, type(value) if type(value) in (int, float) else value


def names_of_attention(name):
    """Yield the optimizer of a row, and the names that it chooses for attention, its mask, its columns and its probe.

    Other parts of a model are trained in test_step.py and compared with a reference in test_model.py.
    """
    spec = SPECS[name]
    yield 'optimizer', spec.optimizer.name
    for part in (spec.model.attention, spec.model.mask, spec.model.columns, spec.probe):
        yield from ((type(part), *choice) for choice in choices(part) if isinstance(choice[1], str))


def attending(name):
    """Yield the choices of a row that say what sees what."""
    model = SPECS[name].model
    for part in ('attention', 'mask', 'columns', 'position', 'combination', 'gate', 'norm', 'qk_norm', 'head_norm'):
        yield from choices(getattr(model, part), (part,))


MODELS = distinct(lambda spec: spec.model)


def sampled(names, parts):
    """Return parameters for rows; those in which no choice occurs that others lack are exhaustive."""
    chosen, marks = covering(names, parts), {True: pytest.mark.slow, False: pytest.mark.exhaustive}
    return [pytest.param(name, marks=marks[name in chosen]) for name in names]


@pytest.fixture(scope='module')
def sources(corpus, tmp_path_factory):
    """Of a loss on all words, and on those of the assistant."""
    talks = [[('user', f'what is {n}?' * 5), ('assistant', f'it is {2 * n}, I think')] for n in range(100)]
    return {'all': corpus, 'assistant': chat(tmp_path_factory.mktemp('chat') / 'a.jsonl', talks)}


def reading(spec, sources):
    return dataclasses.replace(spec, data=dataclasses.replace(spec.data, source=sources[spec.data.loss]))


@pytest.mark.parametrize('name', sampled(SPECS, names_of_attention))
def test_a_row_takes_steps_and_a_probe(name, sources):
    spec = reading(SPECS[name], sources)
    undecayed = dataclasses.replace(spec.optimizer, weight_decay=0.0)  # it would move what has no gradient
    spec = dataclasses.replace(spec, optimizer=undecayed)
    data, mesh = sequences(spec), devices.mesh(Hardware())
    one, other = (data.batches.rows(step, range(spec.optimizer.batch_size)) for step in range(2))
    with jax.set_mesh(mesh):
        now = state.create(spec, mesh)
        before = jax.device_get(now['params'])
        advance = step.train_step(spec, Hardware(), mesh)
        nothing = sharding.of_each_device(0, mesh)
        now, _ = advance(now, one, nothing)  # where there is a warm-up, its rate is 0
        now, numbers = advance(now, other, nothing)
        observed = probe.observer(spec, mesh)(now['params'], data.probe_PT)
    found = jax.device_get(numbers) | probe.numbers(observed, spec, data.is_trigger(data.probe_PT))
    assert all(np.isfinite(value) for value in found.values())
    column = spec.model.columns.kind in ('sink_token', 'k', 'kv', 'logit')
    assert ('sink/star' in found) == (column or spec.model.attention.normalizer == 'plus_one')
    assert {'train/loss', 'sink/1', 'alpha/1', 'mass/row', 'norm/ratio/01'} <= set(found)
    moved = jax.tree.map(lambda one, other: bool((one != other).any()), before, jax.device_get(now['params']))
    assert all(jax.tree.leaves(moved)), moved


@pytest.mark.parametrize('name', distinct(lambda spec: spec.data))
def test_the_data_of_a_row_are_batches_and_a_probe_of_its_ids(name, sources):
    spec = reading(SPECS[name], sources)
    data, size = sequences(spec), spec.optimizer.batch_size
    ids_BT = data.batches.rows(0, range(size))
    assert ids_BT.shape == (size, spec.data.length + 1)
    assert data.probe_PT.shape == (spec.probe.sequences, spec.probe.length)
    for ids in (np.where(ids_BT < 0, ~ids_BT, ids_BT), data.probe_PT):
        assert 0 <= ids.min() < ids.max() < spec.model.vocabulary


@pytest.mark.slow
@pytest.mark.parametrize('name', distinct(lambda spec: spec.optimizer))
def test_the_optimizer_of_a_row_takes_steps_downhill(name):
    """Within its warm-up and after it, from where decay alone would move nothing."""
    optimizer = SPECS[name].optimizer
    transform, params = transformation(optimizer, dict(weight=None)), dict(weight=jnp.zeros((2, 3)))
    gradient, now = dict(weight=jnp.ones((2, 3))), transform.init(params)
    for _ in range(optimizer.warmup_steps + 1):
        updates, now = transform.update(gradient, now, params)
        params = optax.apply_updates(params, updates)
    assert (params['weight'] < 0).all()
    assert np.isfinite(params['weight']).all()


@pytest.mark.parametrize('name', sampled(MODELS, attending))
def test_a_row_is_causal_but_for_its_prefix(name):
    """What another id at one place changes, bit for bit: that place, later ones, and from a prefix all of it."""
    spec = dataclasses.replace(SPECS[name], data=dataclasses.replace(SPECS[name].data, length=16))
    graph, params = state.architecture(spec)[0], drawn(spec)
    where = dict(start_BT=jnp.array([[0] * 6 + [6] * 10])) if spec.model.mask.document else {}
    run = jax.jit(lambda params, ids_T: nnx.merge(graph, params)(ids_T[None], **where)[0][0])
    logits = functools.partial(run, params)
    ids_T, places, prefix = np.arange(16), np.arange(16), spec.model.mask.prefix or 0
    plain_TV = logits(ids_T)
    changed_TT = np.array([(logits(np.where(places == at, 99, ids_T)) != plain_TV).any(-1) for at in places])
    seen_TT = (places[:, None] <= places) | (places[:, None] < prefix) & (places < prefix)
    assert np.isfinite(plain_TV).all()
    assert not changed_TT[~seen_TT].any()
    assert changed_TT.diagonal().all()
    assert changed_TT[:prefix, : max(prefix, 1)].all()
    assert changed_TT[:prefix, 11].all()
