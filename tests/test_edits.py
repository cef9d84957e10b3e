"""Tests of edits of the forward pass: runs against NumPy in float64, open models against runs and themselves."""

import dataclasses
import importlib.util
import math

import jax.numpy as jnp
import numpy as np
import open_models
import pytest
import reference
import tiny_runs
from model_options import COMBINATIONS, LENGTH, OPTIONS, TOKENS
from tiny_specs import draw_params, make_case_params, make_tiny_spec

import sinklab
from sinklab import Edit, UserError
from sinklab.analysis import run_model
from sinklab.analysis.edits import apply_edits
from sinklab.analysis.run_model import find_run_tokenizer
from sinklab.errors import format_extra_command
from sinklab.hf import convert

pytestmark = pytest.mark.slow
HAS_TORCH = all(map(importlib.util.find_spec, ('torch', 'transformers')))
NEEDS_TORCH = pytest.mark.skipif(
    not HAS_TORCH, reason=f'open models need torch and transformers: {format_extra_command("hf")}'
)
TEXTS = ['import os\nimport sys', 'def f(x):\n    return x']
TARGETS = 'attention', 'query', 'key', 'value', 'head', 'ffn', 'residual'
ARRAYS = 'attention_LPHTS', 'key_LPSHK', 'value_LPSHK', 'head_LPTHK', 'residual_LPTD'


def double(array):
    return 2 * array


def keep(array):
    return array


def keep_arrays(arrays):
    return {name: arrays[name] for name in ARRAYS if name in arrays}


def capture(model, ids_PT, *edits):
    return model.subject.copy_with_edits(edits).capture(ids_PT, keep_arrays)


def compute_losses(model, ids_PT, *edits):
    return model.subject.copy_with_edits(edits).compute_token_losses(ids_PT)


@pytest.fixture(scope='module')
def run_path(tmp_path_factory, corpus):
    """Train a run of a few steps, which can be exported."""
    path = tmp_path_factory.mktemp('runs') / 'run'
    spec = make_tiny_spec(data__source=corpus, data__length=32, model__layers=3, model__kv_heads=2, model__tied=True)
    tiny_runs.train_run(spec, path)
    return path


@pytest.fixture(scope='module')
def run(run_path):
    """Open the run with random parameters, with which scores are far from 0."""
    model = sinklab.open(run_path)
    model.subject.params = draw_params(model.spec)
    return model


@pytest.fixture(scope='module')
def exported_model(run, tmp_path_factory):
    """Open the same model in the format of transformers."""
    folder, data = tmp_path_factory.mktemp('exported'), run.spec.data
    config = convert.make_hf_config(run.spec.model, data.length)
    tokenizer = find_run_tokenizer(run.subject.run_dir, run.subject.step, run.spec)
    convert.write_model_files(run.spec, run.subject.params, config, tokenizer, folder, 'float32')
    return sinklab.open(f'hf:{folder}')


@pytest.fixture
def models(run, exported_model):
    return {'run': run, 'open': exported_model}


BOTH_KINDS = pytest.mark.parametrize('kind', ['run', pytest.param('open', marks=NEEDS_TORCH)])


# Runs, against the whole model in NumPy and float64


class EditedReference:
    """tests/reference.py with one edit, which is applied to one head of one sequence at a time.

    The value of the edit is a number, 'mean' or `double`. `num_sink_tokens` counts the tokens before the text.
    """

    def __init__(self, monkeypatch, edit, spec):
        self.edit, self.heads, self.calls = edit, spec.model.heads, 0
        self.num_sink_tokens = int(spec.model.learned_kv.kind == 'sink_token')
        self.columns = int(spec.model.learned_kv.kind in reference.COLUMN_KINDS)
        self.is_key, self.original = True, {}
        for name in ('compute_weights', 'apply_feature_map', 'project', 'compute_block'):
            module = reference.formulas if name == 'compute_weights' else reference
            self.original[name] = getattr(module, name)
            monkeypatch.setattr(module, name, getattr(self, name))

    def is_selected(self, layer, head=0):
        layers, heads = self.edit.layers, self.edit.heads
        return (layers is None or layer in layers) and (heads is None or head in heads)

    def replace(self, vector_SK, num_before):
        """Edit vectors of tokens."""
        vector_SK, indices = vector_SK.copy(), [num_before + position for position in self.edit.positions]
        others = [s for s in range(num_before, len(vector_SK)) if s not in indices]
        dimensions = range(vector_SK.shape[1]) if self.edit.dimensions is None else self.edit.dimensions
        mean_K = vector_SK[others].mean(0)
        for s in indices:
            for k in dimensions:
                values = {'mean': mean_K[k], double: 2 * vector_SK[s, k]}
                vector_SK[s, k] = values.get(self.edit.value, self.edit.value)
        return vector_SK

    def compute_weights(self, score_TS, visible_TS, attention, columns=0):
        attention_TS = self.original['compute_weights'](score_TS, visible_TS, attention, columns)
        layer, head = divmod(self.calls, self.heads)
        self.calls += 1
        if self.edit.target != 'attention' or not self.is_selected(layer, head):
            return attention_TS
        edited_indices = [self.columns + position for position in self.edit.positions]
        for row, visible in zip(attention_TS, visible_TS, strict=True):
            mass, others = np.abs(row).sum(), [s for s in range(len(row)) if s not in edited_indices]
            if self.edit.renormalize and not np.abs(row[others]).sum():
                continue
            for s in edited_indices:
                if visible[s]:
                    row[s] = {double: 2 * row[s]}.get(self.edit.value, self.edit.value)
            if self.edit.renormalize:
                row[others] *= max(mass - np.abs(row[edited_indices]).sum(), 0) / np.abs(row[others]).sum()
        return attention_TS

    def apply_feature_map(self, y, weights, feature_map):
        mapped = self.original['apply_feature_map'](y, weights, feature_map)
        layer, head = divmod(self.calls, self.heads)
        self.is_key = not self.is_key  # queries come first
        if self.edit.target == 'key' and self.is_key and self.is_selected(layer, head):
            return self.replace(mapped, self.columns)
        return mapped

    def project(self, name, h, weights, x):
        projected = self.original['project'](name, h, weights, x)
        layer, head = divmod(self.calls, self.heads)
        if self.edit.target == name == 'value' and self.is_selected(layer, head):
            return self.replace(projected, self.num_sink_tokens)
        return projected

    def compute_block(self, weights, x, position_info, spec):
        x, attention_HTS, total = self.original['compute_block'](weights, x, position_info, spec)
        if self.edit.target == 'residual' and self.is_selected(self.calls // self.heads - 1):
            x = total = self.replace(total, self.num_sink_tokens)
        return x, attention_HTS, total


EDITS = {
    'attention 0': Edit('attention'),
    'attention 0, renormalized': Edit('attention', renormalize=True),
    'attention of tokens 0 and 2 to 0.25, two heads of layer 1': Edit(
        'attention', positions=(0, 2), value=0.25, layers=1, heads=(0, 3), renormalize=True
    ),
    'attention doubled': Edit('attention', positions=1, value=double),
    'key 0': Edit('key'),
    'key mean, one head of a group': Edit('key', value='mean', heads=(1,)),
    'value 0': Edit('value'),
    'value doubled in one dimension': Edit('value', positions=(0, 3), value=double, layers=(0,), dimensions=(3,)),
    'residual 0': Edit('residual'),
    'residual mean in layer 0': Edit('residual', value='mean', layers=(0,)),
    'residual -3 in two dimensions': Edit('residual', value=-3, layers=(1,), dimensions=(1, 7)),
}
# Those of open models are also compared with hooks in test_interventions.py.
PATCHES = {
    'head of layer 1': Edit('head', layers=1, heads=2),
    'head mean': Edit('head', value='mean', heads=(1, 3)),
    'ffn': Edit('ffn', layers=(0, 2), value=0.5),
    'query doubled': Edit('query', positions=(2, 3), value=double),
    'rows of two queries': Edit('attention', positions=(0, 1), queries=(1, 4), renormalize=True),
    'key of each layer': Edit('key', None, np.arange(3).reshape(3, 1, 1, 1, 1)),
}
OPTION_NAMES = (
    'kv heads',
    'sink token',
    'kv',
    'sigmoid-none',
    'relu-count',
    'exp-plus_one',
    'window',
    'prefix, window',
    'global layers without positions',
)
SAMPLED_CASES = {(name, 'kv heads') for name in EDITS} | {
    ('attention 0, renormalized', name) for name in OPTION_NAMES[::3]
}
SAMPLED_CASES |= {('key 0', 'kv'), ('value 0', 'sink token'), ('residual -3 in two dimensions', 'sink token')}


@pytest.mark.parametrize(
    ('name', 'option'),
    [
        pytest.param(name, option, marks=() if (name, option) in SAMPLED_CASES else pytest.mark.exhaustive)
        for name in EDITS
        for option in OPTION_NAMES
    ],
)
def test_edited_run_matches_numpy_in_float64(run_path, monkeypatch, name, option):
    edit, model = EDITS[name], sinklab.open(run_path)
    spec = make_tiny_spec(data__length=LENGTH, **(OPTIONS | COMBINATIONS)[option])
    model.subject.spec, model.subject.params = spec, draw_params(spec)
    ids_PT = TOKENS % spec.model.vocabulary
    actual, losses = capture(model, ids_PT, edit), compute_losses(model, ids_PT, edit)
    for index, ids_T in enumerate(ids_PT):
        with monkeypatch.context() as patch:
            EditedReference(patch, edit, spec)
            logits_TV, attention_LHTS, residual_LTD = reference.run_forward(model.subject.params, ids_T, spec)
        implicit = int(spec.model.attention.normalizer == 'plus_one')
        np.testing.assert_allclose(actual['attention_LPHTS'][:, index, ..., implicit:], attention_LHTS, atol=2e-5)
        np.testing.assert_allclose(
            actual['residual_LPTD'][:, index], residual_LTD, atol=1e-5 * np.abs(residual_LTD).max()
        )
        expected = [
            reference.formulas.logsumexp(row) - row[target]
            for row, target in zip(logits_TV[:-1], ids_T[1:], strict=True)
        ]
        np.testing.assert_allclose(losses[index], expected, atol=1e-4, rtol=1e-4)


# Runs and open models alike


@NEEDS_TORCH
@pytest.mark.parametrize('name', make_case_params(EDITS | PATCHES, [*EDITS, *PATCHES][::3]))
def test_run_and_open_model_of_equal_weights_give_equal_numbers(models, name):
    edit = (EDITS | PATCHES)[name]
    run, exported_model = models.values()
    ids_PT = run.ids(TEXTS)
    np.testing.assert_array_equal(exported_model.ids(TEXTS), ids_PT)
    expected, actual = (capture(model, ids_PT, edit) for model in (run, exported_model))
    for array_name in ARRAYS:
        np.testing.assert_allclose(
            actual[array_name],
            expected[array_name],
            rtol=1e-5,
            atol=1e-5 * max(1, np.abs(expected[array_name]).max()),
            err_msg=array_name,
        )
    assert exported_model.loss(TEXTS, edit) == pytest.approx(run.loss(TEXTS, edit), rel=1e-5)
    assert exported_model.loss(TEXTS, edit) != pytest.approx(run.loss(TEXTS), rel=1e-4)


@BOTH_KINDS
@pytest.mark.parametrize('target', TARGETS)
def test_edit_without_effect_gives_equal_numbers(models, kind, target):
    model, ids_PT = models[kind], models['run'].ids(TEXTS)
    expected, losses = capture(model, ids_PT), model.subject.compute_token_losses(ids_PT)
    edit = Edit(target, value=keep)
    actual, edited_losses = capture(model, ids_PT, edit), compute_losses(model, ids_PT, edit)
    for name in ARRAYS:
        if kind == 'open':
            np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)
        atol = 1e-6 * max(1, np.abs(expected[name]).max())
        np.testing.assert_allclose(actual[name], expected[name], atol=atol, err_msg=name)
    if kind == 'open':
        np.testing.assert_array_equal(edited_losses, losses)
    np.testing.assert_allclose(edited_losses, losses, atol=1e-6 * losses.max())


@BOTH_KINDS
def test_attention_and_measure_show_the_edited_pass(models, kind):
    model = models[kind]
    edit = Edit('attention', layers=(0, 2), heads=(1,))
    matrix_LHTS = model.attention(TEXTS[0], edit=edit).matrix_LHTS
    first_LH = matrix_LHTS[..., 0].max(-1)
    assert (first_LH == 0).tolist() == [[False, True, False, False], [False] * 4, [False, True, False, False]]
    alpha = model.measure('alpha/1', TEXTS[0], edit)
    normalized_LHTS = matrix_LHTS / np.maximum(matrix_LHTS.sum(-1, keepdims=True), 1e-8)
    assert alpha == pytest.approx(normalized_LHTS[..., 0].mean(), rel=1e-5)
    renormalized_LHTS = model.attention(TEXTS[0], edit=dataclasses.replace(edit, renormalize=True)).matrix_LHTS
    np.testing.assert_allclose(renormalized_LHTS.sum(-1), 1, atol=1e-5)
    assert not renormalized_LHTS[0, 1, 1:, 0].any()
    assert renormalized_LHTS[0, 1, 0, 0] == 1, 'the first query sees no other key'


@BOTH_KINDS
@pytest.mark.parametrize('target', TARGETS)
def test_arrays_of_a_text_of_several_batches_give_its_logits(models, kind, target, monkeypatch):
    model = models[kind]
    monkeypatch.setattr(f'{type(model.subject).__module__}.MAX_BATCH_BYTES', 1)
    own_PT, other_PT = (model.ids(TEXTS)[rows] for rows in ([0, 1], [1, 0]))
    own, other = model.cache(own_PT), model.cache(other_PT)
    expected = model.logits(own_PT)
    np.testing.assert_allclose(model.logits(own_PT, Edit(target, None, own[target])), expected, atol=1e-5)
    patched = model.logits(own_PT, Edit(target, None, other[target]))
    assert np.abs(patched - expected).max() > 1e-2
    if target == 'residual':
        np.testing.assert_allclose(patched, model.logits(other_PT), atol=1e-5)


@BOTH_KINDS
def test_query_that_sees_only_itself_or_has_no_direction(models, kind):
    model, position = models[kind], 3
    alone = Edit('attention', positions=range(position), queries=position, renormalize=True)
    matrix_LHTS, plain_LHTS = (model.attention(TEXTS[0], edit).matrix_LHTS for edit in (alone, None))
    expected_S = np.eye(matrix_LHTS.shape[-1])[position]
    np.testing.assert_allclose(matrix_LHTS[:, :, position], expected_S * np.ones((3, 4, 1)), atol=1e-6)
    np.testing.assert_allclose(matrix_LHTS[0, :, position + 1 :], plain_LHTS[0, :, position + 1 :], atol=1e-6)
    uniform_LHTS = model.attention(TEXTS[0], Edit('query', position)).matrix_LHTS
    np.testing.assert_allclose(uniform_LHTS[:, :, position, : position + 1], 1 / (position + 1), atol=1e-6)


@BOTH_KINDS
def test_cache_flags_sinks_and_attribution_sums_to_the_logit(models, kind):
    model, ids_PT = models[kind], models['run'].ids(TEXTS)
    cache = model.cache(ids_PT)
    alpha_LPHT = np.array(
        [cache['attention'][..., k].sum(-1) / (ids_PT.shape[1] - k) for k in range(ids_PT.shape[1])]
    )
    is_sink_LPHT = np.moveaxis(alpha_LPHT > 0.3, 0, -1)
    is_sink_LPHT[..., ids_PT.shape[1] // 2 :] = False
    np.testing.assert_array_equal(cache['is_sink'], is_sink_LPHT)
    parts = model.attribute_logits(ids_PT, 5)
    total = parts['head'].sum((0, 3)) + parts['ffn'].sum(0) + parts['rest']
    np.testing.assert_allclose(total, model.logits(ids_PT)[..., 5], atol=1e-4)


@BOTH_KINDS
def test_edits_are_applied_in_their_order(models, kind):
    model = models[kind]
    first, second = Edit('value', value=3.0), Edit('value', value=double)
    text = TEXTS[0]
    assert model.loss(text, [first, second]) == pytest.approx(model.loss(text, Edit('value', value=6.0)), abs=1e-6)
    assert model.loss(text, [second, first]) == pytest.approx(model.loss(text, first), abs=1e-6)
    assert model.loss(text, []) == model.loss(text)


@BOTH_KINDS
def test_loss_is_mean_over_tokens_and_compare_shows_it_with_metrics(models, kind):
    model, edits = models[kind], {'cut': Edit('attention'), 'both': [Edit('key'), Edit('value')]}
    losses = model.subject.compute_token_losses(model.ids(TEXTS))
    assert model.loss(TEXTS) == pytest.approx(losses.mean())
    table = model.compare(TEXTS, edits, names=('sink/1', 'entropy'))
    assert [*table] == ['without', 'cut', 'both']
    assert table['without']['loss'] == pytest.approx(model.loss(TEXTS), rel=1e-6)
    for label in edits:
        assert table[label]['loss'] == model.loss(TEXTS, edits[label])
    assert all('sink/1' in numbers for numbers in table.values())
    assert table['both'].items() >= model.measure('entropy', TEXTS, edits['both']).items()
    assert model.compare(TEXTS[0], edits['cut']).keys() == {'without', 'with'}
    with pytest.raises(UserError, match='without'):
        model.compare(TEXTS, {'without': Edit('key')})


def test_compare_in_bfloat16_shows_differences_of_edits_alone(run_path, monkeypatch):
    """By causality, edits at the last token of a text change no loss."""
    monkeypatch.setattr(run_model, 'jit_token_scores', None)  # the program of other losses can round differently
    model = sinklab.open(run_path, dtype='bfloat16')
    model.subject.params = draw_params(model.spec)
    last_position = model.ids(TEXTS).shape[1] - 1
    edits = {target: Edit(target, last_position, renormalize=target == 'attention') for target in TARGETS}
    edits |= {f'keep {target}': Edit(target, value=keep) for target in TARGETS}
    table = model.compare(TEXTS, edits | {'key': Edit('key')}, names=())
    assert {numbers['loss'] for label, numbers in table.items() if label != 'key'} == {table['without']['loss']}
    assert table['key']['loss'] != table['without']['loss']


@BOTH_KINDS
def test_function_reads_its_variables_anew_in_each_call(models, kind):
    model, factor = models[kind], 1.0

    def scale(array):
        return factor * array

    results = []
    for factor in (1.0, 3.0):  # noqa: B007  # `scale` reads it
        edit = Edit('value', value=scale)
        results.append((model.loss(TEXTS, edit), model.measure('norm/ratio/03', TEXTS, edit)))
    other_edit = Edit('value', value=lambda array: 3 * array)
    assert results[1] == (model.loss(TEXTS, other_edit), model.measure('norm/ratio/03', TEXTS, other_edit))
    assert results[0][0] != results[1][0]
    assert results[0][1] != results[1][1]


def test_generation_takes_the_most_likely_token_of_each_longer_text(run):
    steer = Edit('residual', None, lambda hidden: hidden + 0.5, layers=1)
    for edit in (None, steer):
        ids = run.ids(TEXTS)[:1, :8]
        for _ in range(3):
            ids = np.append(ids, run.logits(ids, edit)[:, -1].argmax(-1, keepdims=True), 1)
        np.testing.assert_array_equal(run.generate(ids[0, :8], 3, edit), ids)
    too_many = run.spec.data.length - 7
    for call in (dict(num_tokens=-1), dict(num_tokens=too_many), dict(edit=Edit('value', value='mean'))):
        with pytest.raises(UserError):
            run.generate(ids[0, :8], **call)


def test_edits_with_as_many_other_indices_share_a_compiled_program(run, monkeypatch):
    num_traces, apply_edits = 0, run_model.apply_edits

    def count_traces(edits, layer, target, *args):
        nonlocal num_traces
        num_traces += target == 'residual'
        return apply_edits(edits, layer, target, *args)

    monkeypatch.setattr(run_model, 'apply_edits', count_traces)
    run_model.jit_forward.cache_clear()
    traces = []
    for n in range(3):
        value = Edit('value', positions=n, value=n / 2, layers=n % 2, heads=(0, 3 - n), dimensions=n)
        residual = Edit('residual', positions=(n, 5), value='mean', layers=1 - n % 2, dimensions=(n, 7))
        run.loss(TEXTS, [value, residual])
        traces.append(num_traces)
    assert traces[0] > 0
    assert traces == traces[:1] * 3
    run.loss(TEXTS, [value, dataclasses.replace(residual, positions=1)])
    assert num_traces == 2 * traces[0]


@pytest.mark.parametrize('convert_array', [np.asarray, jnp.asarray])
def test_weights_too_small_to_be_scaled_are_not_edited(convert_array):
    """The smallest are denormal numbers, which XLA sets to 0."""
    for smallest in (0.0, 5.5e-42, 1e-31):
        row = np.array([1.0, smallest], np.float32).reshape(1, 2, 1, 1)
        edited = apply_edits(
            [Edit('attention', renormalize=True).make_arrays()], 0, 'attention', convert_array(row), 0
        )
        np.testing.assert_array_equal(edited, row)
    row = np.array([1.0, 1e-29], np.float32).reshape(1, 2, 1, 1)
    edited = apply_edits([Edit('attention', renormalize=True).make_arrays()], 0, 'attention', convert_array(row), 0)
    np.testing.assert_allclose(np.ravel(edited), [0, 1], rtol=1e-6)


@pytest.mark.parametrize(
    'fields',
    [
        dict(target='atention'),
        dict(positions=-1),
        dict(positions=0.5),
        dict(positions='all'),
        dict(value=[0, math.inf]),
        dict(queries=0),
        dict(layers=()),
        dict(value=math.nan),
        dict(value=1e39),
        dict(value='zero'),
        dict(value=None),
        dict(target='attention', value='mean'),
        dict(renormalize=True),
        dict(target='residual', heads=(0,)),
        dict(target='ffn', heads=(0,)),
        dict(target='attention', dimensions=(0,)),
    ],
    ids=str,
)
def test_invalid_edit_is_rejected(fields):
    with pytest.raises(UserError):
        Edit(**dict(target='key') | fields)


@BOTH_KINDS
@pytest.mark.parametrize(
    'edit',
    [
        Edit('key', layers=(0, 3)),
        Edit('residual', layers=9),
        Edit('value', heads=4),
        Edit('value', dimensions=(0, 99)),
        Edit('attention', positions=500),
        Edit('attention', queries=500),
        Edit('value', value=np.ones((3, 1, 2, 4, 8))),
        Edit('residual', value=np.ones((1, 1, 1, 1, 1))),
        Edit('attention', value=lambda weights: weights[..., :1]),
        Edit('attention', value=lambda weights: None),
        'key',
        [Edit('key'), None],
    ],
)
def test_edit_that_does_not_fit_the_model_is_rejected(models, kind, edit):
    model = models[kind]
    for method in (model.attention, model.loss, lambda text, edit: model.measure('sink', text, edit), model.compare):
        with pytest.raises(UserError):
            method(TEXTS[0], edit)


# Open models


@pytest.fixture(scope='module', params=open_models.make_configs() if HAS_TORCH else ())
def family(request, tmp_path_factory):
    """Return (family, opened model) of each family of tests/open_models.py."""
    folder = tmp_path_factory.mktemp(request.param)
    open_models.save_model(open_models.make_configs()[request.param], folder, open_models.make_tokenizer_json())
    return request.param, sinklab.open(f'hf:{folder}')


IDS_PT = np.random.default_rng(0).integers(2, open_models.VOCABULARY, (3, 16))


@NEEDS_TORCH
def test_edits_of_every_family_have_their_effect(family):
    """Check edits of the second layer with attention."""
    _, model = family
    index, layer = 1, model.subject.editable_arrays['attention'].layers[1]
    columns = model.subject.make_context(16).learned_keys
    unedited, unchanged = capture(model, IDS_PT), capture(model, IDS_PT, *(Edit(t, value=keep) for t in TARGETS))
    for array_name, values in unedited.items():
        np.testing.assert_array_equal(unchanged[array_name], values, err_msg=array_name)
    for target, array_name in (('key', 'key_LPSHK'), ('value', 'value_LPSHK')):
        edited = capture(model, IDS_PT, Edit(target, layers=layer, heads=2, value=0.5))
        np.testing.assert_array_equal(edited[array_name][index, :, columns, 2], 0.5)
        np.testing.assert_array_equal(edited['head_LPTHK'][index, :, :, :2], unedited['head_LPTHK'][index, :, :, :2])
        assert np.abs(edited['head_LPTHK'] - unedited['head_LPTHK'])[index, :, :, 2].max() > 1e-6
    edited = capture(model, IDS_PT, Edit('attention', positions=(0, 3), layers=layer, heads=(0, 2), value=double))
    expected = np.float64(unedited['attention_LPHTS'][index])
    for position in (0, 3):
        expected[:, [0, 2], :, columns + position] *= 2
    np.testing.assert_allclose(edited['attention_LPHTS'][index][..., columns:], expected[..., columns:], rtol=1e-6)
    expected_head = np.einsum('phts,pshk->pthk', expected[..., columns:], unedited['value_LPSHK'][index][:, columns:])
    np.testing.assert_allclose(edited['head_LPTHK'][index], expected_head, rtol=1e-4, atol=1e-6)
    edited, unedited = capture(model, IDS_PT, Edit('residual', layers=1)), capture(model, IDS_PT)
    assert not edited['residual_LPTD'][1, :, 0].any()
    np.testing.assert_array_equal(edited['residual_LPTD'][1, :, 1:], unedited['residual_LPTD'][1, :, 1:])
    assert (edited['residual_LPTD'][2, :, 0] != unedited['residual_LPTD'][2, :, 0]).any()


@NEEDS_TORCH
@pytest.mark.parametrize('family', ['mistral', 'gpt_oss'], indirect=True)
def test_visible_weights_that_are_rounded_to_zero_are_edited(family, monkeypatch):
    _, model = family
    columns, window = model.subject.make_context(16).learned_keys, model.subject.config.sliding_window
    weight = model.subject.recorder.layers[0].self_attn.q_proj.weight
    monkeypatch.setattr(weight, 'data', weight.data * 1e6)
    unedited, edited = (
        capture(model, IDS_PT, *edits)['attention_LPHTS'][0, ..., columns + 2]
        for edits in ((), (Edit('attention', positions=2, value=0.25, layers=0),))
    )
    is_visible_T = (np.arange(16) >= 2) & (np.arange(16) < 2 + window)
    assert (unedited[..., is_visible_T] == 0).any()
    np.testing.assert_array_equal(edited, np.broadcast_to(np.where(is_visible_T, 0.25, 0), edited.shape))


@NEEDS_TORCH
@pytest.mark.parametrize('family', ['jamba'], indirect=True)
def test_layers_without_attention_have_no_keys_to_edit(family):
    _, model = family
    with pytest.raises(UserError):
        model.loss('import os', Edit('key', layers=0))


@NEEDS_TORCH
@pytest.mark.parametrize('target', TARGETS)
def test_no_hook_and_no_edit_is_left_behind(exported_model, target):
    def fail(array):
        raise RuntimeError('of the user')

    expected = exported_model.loss(TEXTS)
    exported_model.loss(TEXTS, Edit(target))
    assert exported_model.loss(TEXTS) == expected
    with pytest.raises(RuntimeError, match='of the user'):
        exported_model.loss(TEXTS, Edit(target, value=fail))
    assert exported_model.loss(TEXTS) == expected
    modules = exported_model.subject.model.modules()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def test_opened_models_refuse_what_they_refuse_without_edits(run):
    with pytest.raises(UserError, match='text='):
        run.loss('', Edit('key'))
    with pytest.raises(UserError, match="'sinks'"):
        run.compare(TEXTS, Edit('key'), names=('sinks',))
