"""Tests of `sinklab.open` and `sinklab measure` on a training run."""

import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path

import formulas
import numpy as np
import pytest
import reference
import tiny_runs as runs

import sinklab
from sinklab import opened_models, standard_streams
from sinklab.analysis import measure
from sinklab.cli.main import main
from sinklab.data.run_data import load_run_data
from sinklab.errors import UserError
from sinklab.metrics import sink
from sinklab.run_dir import RunDir
from sinklab.train.forward import make_forward

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope='module')
def trained(tmp_path_factory, corpus):
    """Train a run of a few steps whose sequences begin with a fixed token."""
    here = tmp_path_factory.mktemp('corpus')
    shutil.copytree(corpus.removeprefix('text:').rpartition('/')[0], here / 'texts')
    source = f'text:{here}/texts/{corpus.rpartition("/")[2]}'
    spec = runs.make_spec(source, data__fixed_position=1, data__length=96)
    path = tmp_path_factory.mktemp('runs') / 'run'
    records = runs.train_run(spec, path)
    return path, spec, records


def read_modification_times(path):
    return {one.relative_to(path): one.stat().st_mtime_ns for one in path.rglob('*')}


def test_open_reads_run_without_corpus_and_writes_nothing(trained, monkeypatch):
    path, *_ = trained
    monkeypatch.setattr('sinklab.analysis.run_model.open_corpus', lambda *_: pytest.fail('the corpus is read'))
    before = read_modification_times(path)
    run = sinklab.open(path)
    result = run.attention('import os')
    alpha = run.measure('sink', text='import os')
    assert read_modification_times(path) == before
    assert result.keys == result.queries == ['(fixed token)', *result.queries[1:]]
    assert ''.join(result.queries[1:]) == 'import os'
    assert (
        repr(result) == f'<Attention: 2 matrices x 4 heads, {len(result.queries)} queries x {len(result.keys)} keys>'
    )
    assert repr(run) == f"sinklab.open('{path}@8')"
    _, captured = run.model(run.ids('import os'), capture=True)
    np.testing.assert_allclose(result.matrix_LHTS, captured.attention_BHTS[:, 0], atol=1e-6)
    assert alpha['sink/1'] == sink.compute_sink_rate(sink.compute_importance(result.matrix_LHTS, 1))


def test_open_rejects_unknown_bos(trained):
    for model_ref in (trained[0], 'hf:openai-community/gpt2'):
        with pytest.raises(UserError, match='bos=forced'):
            sinklab.open(model_ref, bos='forced')


def test_curve_of_run_without_records_is_rejected(trained, tmp_path):
    pytest.importorskip('pandas')
    path = shutil.copytree(trained[0], tmp_path / 'run')
    (path / 'metrics.jsonl').unlink()
    with pytest.raises(UserError, match=f'{path}.*train it'):
        sinklab.open(path).curve('loss')


def test_plot_labels_every_token(trained):
    result = sinklab.open(trained[0]).attention('x = $1\n')
    figure = result.plot()
    axes = figure.axes[0]
    assert len(axes.get_xticklabels()) == len(result.keys)
    layer, head = result.strongest()
    assert axes.get_title() == f'layer {layer + 1}, head {head + 1}', 'from 1, as in reports'
    figure.draw_without_rendering()


def read_shown_matrix(figure):
    """Return (title, matrix) of a plot of attention."""
    return figure.axes[0].get_title(), figure.axes[0].images[0].get_array()


def test_plot_selects_strongest_matrix_of_selection():
    """Test with the layout of LongCat, which has two attention matrices in a layer.

    `first_LH` is the mean attention to the first token.
    """
    pytest.importorskip('matplotlib')
    first_LH = np.array([[0.1, 0.2], [0.9, 0.3], [0.4, 0.5], [0.6, np.nan]])
    matrix_LHTS = np.broadcast_to(first_LH[..., None, None], (4, 2, 3, 3))
    result = opened_models.AttentionMatrices(matrix_LHTS, ['a', 'b', 'c'], ['a', 'b', 'c'], (0, 0, 2, 2))
    assert result.strongest() == (0, 0)
    for given, at, head, title in [
        ({}, 1, 0, 'layer 1, matrix 2 of 2, head 1'),
        (dict(layer=0), 1, 0, 'layer 1, matrix 2 of 2, head 1'),
        (dict(layer=0, head=0), 1, 0, 'layer 1, matrix 2 of 2, head 1'),
        (dict(layer=0, head=1), 1, 1, 'layer 1, matrix 2 of 2, head 2'),
        (dict(place=0), 0, 1, 'layer 1, matrix 1 of 2, head 2'),
        (dict(place=0, head=0), 0, 0, 'layer 1, matrix 1 of 2, head 1'),
        (dict(layer=2), 3, 0, 'layer 3, matrix 2 of 2, head 1'),
        (dict(layer=2, head=1), 2, 1, 'layer 3, matrix 1 of 2, head 2'),
        (dict(head=1), 2, 1, 'layer 3, matrix 1 of 2, head 2'),
    ]:
        name, matrix = read_shown_matrix(result.plot(**given))
        assert name == title, given
        np.testing.assert_array_equal(matrix, matrix_LHTS[at, head])
    for given in (dict(layer=1), dict(layer=0, head=2), dict(head=-1), dict(place=4), dict(place=0, layer=0)):
        with pytest.raises(UserError):
            result.plot(**given)


def test_plot_escapes_special_characters_in_labels():
    pytest.importorskip('matplotlib')
    words = ['a\x1b[31m', 'x\u202ey', '$\\frac$', '$', ' \n\t', '', '\ud800']
    result = opened_models.AttentionMatrices(np.ones((1, 1, 7, 7)), words, words, (0,))
    axes = result.plot().axes[0]
    wanted = [r'a\x1b[31m', r'x\u202ey', r'$\frac$', '$', '·⏎⇥', '∅', r'\ud800']
    axes.figure.canvas.draw()  # raises if $\frac$ is parsed as a formula
    for axis in (axes.get_xticklabels(), axes.get_yticklabels()):
        assert [one.get_text() for one in axis] == wanted
        assert not any(one.get_parse_math() for one in axis)


def test_run_returns_parameters_of_steps_and_curves_as_frames(trained):
    path, _, records = trained
    run = sinklab.open(path)
    assert run.steps == [4, 8]
    for step in run.steps:
        for actual, theirs in zip(
            *map(list_leaves, (run.params(step), runs.load_parameters(path, step))), strict=True
        ):
            np.testing.assert_array_equal(actual, theirs)
    pytest.importorskip('pandas')
    frame = run.curve('sink/1')
    assert frame['sink/1'].to_dict() == {one['step']: one['sink/1'] for one in records if 'sink/1' in one}
    assert 'norm/ratio/01' in run.curve('norm')


def list_leaves(tree):
    import jax

    return jax.tree.leaves(tree)


def test_measure_reproduces_metrics_of_training_probe(trained, capsys, monkeypatch, tmp_path):
    path, _spec, records = trained
    monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path / 'cache'))
    assert main(['measure', str(path), '--json', '--out', str(tmp_path / 'out')]) == 0
    result = json.loads(capsys.readouterr().out)
    numbers = result['inputs']['natural']
    recorded = {name: value for name, value in records[-1].items() if name in numbers}
    assert 'sink/1' in recorded
    assert 'contribution/1' in recorded
    assert 'qk/cos/difference' in recorded
    for name, value in recorded.items():
        np.testing.assert_allclose(numbers[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    with np.load(tmp_path / 'out' / 'natural.npz') as arrays, np.load(RunDir(path).probe_files[-1]) as probe:
        np.testing.assert_allclose(arrays['alpha_LPHJ'], probe['alpha_LPHJ'], atol=1e-6)
        np.testing.assert_allclose(arrays['cos_LH2'], probe['cos_LH2'], atol=1e-6)


@pytest.mark.parametrize('how', [[], ['--json'], ['--all']], ids=str)
def test_measure_writes_results_despite_broken_pipe(trained, monkeypatch, tmp_path, how):
    """Test the effect of `sinklab measure RUN --out=DIR | head -1`."""
    monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path / 'cache'))
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, 'w') as pipe:
        monkeypatch.setattr(sys, 'stdout', standard_streams.SafeStream(pipe, is_result=True))
        assert main(['measure', str(trained[0]), '--sequences=2', f'--out={tmp_path}/out', *how]) == 0
    result = json.loads((tmp_path / 'out' / 'measured.json').read_text())
    assert 'sink/1' in (result['steps'][-1] if '--all' in how else result)['inputs']['natural']
    assert [*(tmp_path / 'out').rglob('natural.npz')]


@pytest.mark.parametrize(('bos', 'begins'), [('auto', True), ('force', True), ('none', False)])
def test_bos_option_sets_first_token_and_loss_matches_reference(trained, bos, begins):
    path, spec, _ = trained
    subject = sinklab.open(path, bos=bos).subject
    wanted = measure.InputSpec(sequences=2, length=8, seed=0, source=None)
    ids_PT = measure.make_inputs(subject, ('natural',), wanted)['natural']
    assert ((ids_PT[:, 0] == spec.data.fixed_token) == begins).all()
    words = subject.decode_tokens(subject.encode('import os'))
    assert ''.join(words[1:] if begins else words) == 'import os'
    params = sinklab.open(path).params()
    logits_PTV = [reference.run_forward(params, ids_T[:-1], spec)[0] for ids_T in ids_PT]
    expected = [
        [formulas.logsumexp(row) - row[target] for row, target in zip(logits_TV, ids_T[1:], strict=True)]
        for logits_TV, ids_T in zip(logits_PTV, ids_PT, strict=True)
    ]
    np.testing.assert_allclose(subject.compute_token_losses(ids_PT), expected, rtol=1e-4)


@pytest.mark.parametrize('bos', ['auto', 'force', 'none'])
@pytest.mark.parametrize('position', [None, 1, 3, 9])
def test_windows_of_text_begin_as_texts_do(trained, bos, position):
    subject, length = sinklab.open(trained[0], bos=bos).subject, 8
    data = dataclasses.replace(subject.spec.data, fixed_position=position)
    subject.spec = dataclasses.replace(subject.spec, data=data)
    text = ' '.join(map(str, range(100)))
    text_ids = subject.tokenizer.encode(text, add_special_tokens=False).ids
    windows = subject.encode_windows(text, length)
    assert windows[0] == subject.encode(text)[:length]
    assert {len(window) for window in windows} == {length}
    own_ids = [token_id for window in windows for token_id in window if token_id != data.fixed_token]
    assert own_ids == text_ids[: len(own_ids)], 'no token is left out or given twice'
    assert len(text_ids) - len(own_ids) < length
    places = {tuple(np.flatnonzero(np.array(window) == data.fixed_token)) for window in windows}
    assert len(places) == 1, 'every window begins as the first does'


def test_measure_says_how_many_documents_have_several_windows(trained, capsys, tmp_path):
    for number in range(3):
        (tmp_path / f'{number}.log').write_text(' '.join(map(str, range(100 + 100 * number))))
    given = [str(trained[0]), f'--source=text:{tmp_path}/*', '--length=16', '--sequences']
    assert main(['measure', *given, '10']) == 0
    assert 'the 10 texts of natural are windows of fewer documents (3)' in capsys.readouterr().out
    assert main(['measure', *given, '3', '--json']) == 0
    assert 'remarks' not in json.loads(capsys.readouterr().out)


def test_dtype_of_run_changes_numbers_as_rounding_does(trained, capsys):
    """Compare with float32. Each operation in bfloat16 rounds by at most 2^-9 of a value.

    The shares of attention are at most 1, and some ten operations lie between the embedding and the scores.
    """
    numbers = {}
    for dtype in ('float32', 'bfloat16'):
        assert main(['measure', str(trained[0]), '--sequences=4', '--json', f'--dtype={dtype}']) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report['dtype'], report['bos']) == (dtype, 'auto')
        numbers[dtype] = report['inputs']['natural']['alpha/1']
    assert 0 < abs(numbers['bfloat16'] - numbers['float32']) < 10 * 2**-9
    assert main(['measure', str(trained[0]), '--sequences=4']) == 0
    assert '\ncomputed in float32, --bos=auto\n' in capsys.readouterr().out
    run = sinklab.open(trained[0], dtype='bfloat16')
    assert (run.at(4).spec.model.dtype, run.subject.dtype) == ('bfloat16', 'bfloat16')
    with pytest.raises(UserError, match='give bfloat16 or float32'):
        sinklab.open(trained[0], dtype='float16')


def test_measure_accepts_text_shorter_than_probe_keys(trained):
    run = sinklab.open(trained[0])
    text = 'a'
    assert len(run.ids(text)[0]) < run.spec.probe.keys
    assert {*run.measure('alpha', text=text)} >= {'alpha/1', 'alpha/2'}


def test_measure_uses_domain_of_probe(trained):
    subject = sinklab.open(trained[0]).subject
    subject.spec = dataclasses.replace(
        subject.spec, probe=dataclasses.replace(subject.spec.probe, domain='none such')
    )
    wanted = measure.InputSpec(sequences=2, length=8, seed=0, source=None)
    with pytest.raises(UserError, match='none such'):
        measure.make_inputs(subject, ('natural',), wanted)


def test_cache_key_depends_on_all_inputs(trained):
    subject = sinklab.open(trained[0]).subject
    ids_PT, position_T = np.arange(16).reshape(2, 8), np.arange(8)
    other = sinklab.open(trained[0]).at(4).subject
    wider = sinklab.open(trained[0]).subject
    wider.spec = dataclasses.replace(wider.spec, model=dataclasses.replace(wider.spec.model, norm_epsilon=1e-3))
    requested = [
        (subject, ids_PT, None, {}),
        (subject, ids_PT.reshape(4, 4), None, {}),
        (subject, ids_PT + 1, None, {}),
        (subject, ids_PT, position_T, {}),
        (subject, ids_PT, position_T[::-1], {}),
        (subject, ids_PT, None, dict(keys=subject.spec.probe.keys - 1)),
        (subject, ids_PT, None, dict(lengths=(4,), thresholds=(0.3,))),
        (other, ids_PT, None, {}),
        (wider, ids_PT, None, {}),
        (sinklab.open(trained[0], dtype='bfloat16').subject, ids_PT, None, {}),
    ]
    assert len({measure.compute_cache_key(*one) for one in requested}) == len(requested)
    assert measure.compute_cache_key(*requested[0]) == measure.compute_cache_key(
        sinklab.open(trained[0], dtype='float32').subject, *requested[0][1:]
    ), 'the dtype of the config'


def test_perturbation_depends_on_positions(trained):
    subject = sinklab.open(trained[0]).subject
    ids_PT = np.random.default_rng(0).integers(2, subject.vocabulary, (2, 8))
    plain, swapped = (
        measure.measure_perturbation(subject, ids_PT, 1, 0, position_T)
        for position_T in (None, measure.parse_positions('swap:5', 8))
    )
    assert plain.keys() == swapped.keys()
    assert any(abs(plain[name] - swapped[name]) > 1e-4 for name in plain)


def test_selection_equals_loss_increase_with_zero_queries(trained):
    subject = sinklab.open(trained[0]).subject
    ids_PT = np.random.default_rng(0).integers(2, subject.vocabulary, (4, 8))
    result = measure.measure_selection(subject, ids_PT)
    assert [*result] == ['selection/01', 'selection/02']
    own, loss = subject.params, subject.compute_token_losses(ids_PT).mean()
    for layer in range(2):
        query_LDHK = np.array(own['blocks']['attention']['query_DHK'])
        query_LDHK[layer] = 0.0
        silent = subject.copy_with_zero_queries(layer)
        attention = dict(own['blocks']['attention'], query_DHK=query_LDHK)
        np.testing.assert_array_equal(silent.params['blocks']['attention']['query_DHK'], query_LDHK)
        program = make_forward(subject.spec, capture=True)
        _, _, captured = program(own | dict(blocks=own['blocks'] | dict(attention=attention)), ids_PT)
        flat_TS = np.tril(np.ones((8, 8))) / np.arange(1, 9)[:, None]
        shown_BHTS = np.asarray(captured.attention_BHTS[layer])
        np.testing.assert_allclose(shown_BHTS, np.broadcast_to(flat_TS, shown_BHTS.shape), atol=1e-6)
        assert result[f'selection/0{layer + 1}'] == pytest.approx(
            silent.compute_token_losses(ids_PT).mean() - loss, abs=1e-6
        )
    np.testing.assert_array_equal(
        subject.params['blocks']['attention']['query_DHK'], own['blocks']['attention']['query_DHK']
    )


def test_measure_writes_printed_results_with_optional_metrics(trained, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path / 'cache'))
    given = [
        str(trained[0]),
        '--json',
        '--all',
        '--sequences=2',
        '--loss',
        '--selection',
        '--perturb=3',
        f'--out={tmp_path}/out',
    ]
    assert main(['measure', *given]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / 'out' / 'measured.json').read_text()) == summary
    assert {*summary['series']} == {'natural'}
    for step, one in zip(('00000004', '00000008'), summary['steps'], strict=True):
        assert {'loss', 'selection/02', 'perturbation/01'} <= {*one['inputs']['natural']}
        assert (tmp_path / 'out' / step / 'natural.npz').exists()


def test_measure_all_reports_every_checkpoint_and_emergence(trained, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path / 'cache'))
    assert main(['measure', str(trained[0]), '--all', '--inputs=repeated', '--sequences=3']) == 0
    said = capsys.readouterr().out
    assert '@4' in said
    assert '@8' in said
    assert said.count('hidden states are equal after every block') == said.count('holds') / 2 == 2
    assert 'FAILS' not in said
    ends = 'no sink has emerged', 'Sink_1 emerges', 'Sink_1 as before training'
    assert any(f'\nrepeated: {end}' in said for end in ends)


def test_make_inputs_returns_natural_random_and_repeated_tokens(trained):
    path, spec, _ = trained
    subject = sinklab.open(path).subject
    wanted = measure.InputSpec(sequences=4, length=8, seed=0, source=None)
    result = measure.make_inputs(subject, ('natural', 'random', 'repeated'), wanted)
    np.testing.assert_array_equal(result['natural'][:, :8], load_run_data(spec).probe_PT[:4, :8])
    for name, ids_PT in result.items():
        assert ids_PT.shape == (4, 8), name
        assert (ids_PT[:, 0] == spec.data.fixed_token).all() == (name != 'repeated'), name
    assert (result['repeated'] == result['repeated'][:, :1]).all()
    assert len({*result['random'].ravel()}) > 15
    assert (result['random'] < subject.vocabulary).all()


@pytest.mark.parametrize(
    ('arguments', 'said'),
    [
        (['{run}@5'], 'has no checkpoint 5'),
        (['{run}/probe'], 'contains no run'),
        (['org/none'], 'give the folder of a run, or hf:org/none for an open model'),
        (['{run}', '--inputs=naturl'], 'did you mean natural'),
        (['{run}', '--inputs=domains'], 'one domain'),
        (['{run}', '--length=1000'], 'reads 96 tokens'),
        (['{run}', '--lengths=4,400'], '--lengths has 400'),
        (['{run}', '--eps=0.3'], 'needs --lengths'),
        (['{run}', '--lengths=x'], 'not a list of int'),
        (['{run}', '--positions=swap:1'], 'give replace:K or swap:K'),
        (['{run}', '--length=1'], 'is too small'),
        (['{run}', '--sequences=0'], 'is too small'),
        (['{run}', '--lengths=8', '--eps=1.5'], '--eps has 1.5'),
        (['{run}', '--lengths=8', '--eps=0.3,0.30000001'], 'equal in six digits'),
        (['{run}', '--perturb=0'], 'is too small'),
        (['{run}', '--perturb=999'], 'is beyond the text'),
        (['{run}', '--keys=999'], 'is beyond the text'),
        (['{run}', '--seed=-1'], 'give at least 0'),
        (['{run}', '--inputs='], '--inputs is empty'),
        (['hf:{run}'], 'contains a run of sinklab'),
        (['hf:{run}', '--all'], 'is an open model'),
        (['{run}@4', '--all'], 'is one step; give'),
        (['{run}', '--out=/proc/none/out'], 'cannot be made'),
        (['{run}', '--out={run}'], 'already exists'),
    ],
)
def test_measure_rejects_invalid_arguments_with_one_line(trained, capsys, arguments, said):
    given = [one.format(run=trained[0]) for one in arguments]
    assert main(['measure', *given]) == 1
    *before, line = capsys.readouterr().err.strip().splitlines()
    assert said in line
    assert all(one.startswith('preparing') for one in before)


def test_measure_creates_output_folder_before_measuring(trained, tmp_path, monkeypatch):
    out = tmp_path / 'out'

    def check_folder_and_fail(*_):
        assert out.is_dir()
        raise UserError('measuring fails')

    with monkeypatch.context() as patch:
        patch.setattr('sinklab.cli.measure.run_job', check_folder_and_fail)
        assert main(['measure', str(trained[0]), f'--out={out}']) == 1
    assert main(['measure', str(trained[0]), '--sequences=2', f'--out={out}']) == 0


@pytest.fixture
def model(tmp_path):
    """Make a model folder with the config.json that transformers writes."""
    (tmp_path / 'gpt').mkdir()
    (tmp_path / 'gpt' / 'config.json').write_text('{"model_type": "gpt2", "n_layer": 2}')
    return tmp_path / 'gpt'


@pytest.mark.parametrize(
    'verb', [['measure'], ['evaluate', '--tasks=mine'], ['sample', '--prompt=a'], ['stream', '--text=a.txt']]
)
def test_open_model_folder_without_hf_prefix_is_rejected(model, capsys, verb):
    if verb[0] == 'evaluate':
        pytest.importorskip('lm_eval')
    assert main([verb[0], str(model), *verb[1:]]) == 1
    assert f'hf:{model}' in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize('given', ['{model}', 'hf:{model}', 'hf:org/name'])
@pytest.mark.parametrize(
    'command',
    [
        ['measure', '--all'],
        ['checkpoint', 'ls'],
        ['checkpoint', 'verify'],
        ['checkpoint', 'restore-params', '--out=new'],
    ],
    ids=' '.join,
)
def test_open_model_is_rejected_with_import_command(model, capsys, given, command):
    given = given.format(model=model)
    verb = command[: 1 + (command[0] == 'checkpoint')]
    assert main([*verb, given, *command[len(verb) :]]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f'sinklab checkpoint import hf:{given.removeprefix("hf:")} --out=' in line


def test_run_rejects_empty_text_unknown_measure_and_unknown_layer(trained):
    run = sinklab.open(trained[0])
    with pytest.raises(UserError, match="'sinks'"):
        run.measure('sinks', text='import os')
    with pytest.raises(UserError, match='empty'):
        run.attention('')
    with pytest.raises(UserError, match='99'):
        run.attention('import os').plot(99, 0)


def test_notebook_executes_all_cells(trained, tmp_path, monkeypatch):
    pytest.importorskip('pandas')
    (tmp_path / 'runs' / 'quickstart').mkdir(parents=True)
    (tmp_path / 'runs' / 'quickstart' / 'softmax-0').symlink_to(trained[0])
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / 'docs' / 'notebook.ipynb').read_text(encoding='utf-8'))
    names = {}
    for cell in notebook['cells']:
        if cell['cell_type'] == 'code':
            exec(''.join(cell['source']), names)
    assert names['attention'].keys == names['attention'].queries
    assert len(names['curve']) == 4
