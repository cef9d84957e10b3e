"""Tests of `sinklab.open` and `sinklab measure` on a training run."""

import dataclasses
import io
import json
import shutil
import sys
from pathlib import Path

import formulas
import jax
import numpy as np
import pytest
import reference
import tiny_runs as runs
from commands import get_error_line

import sinklab
from sinklab import api
from sinklab.analysis import measure
from sinklab.cli.main import main
from sinklab.data.run_data import load_run_data
from sinklab.errors import UserError
from sinklab.metrics import sink
from sinklab.run_dir import RunDir

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope='module')
def trained_run(tmp_path_factory, corpus):
    """Train a run of a few steps whose sequences begin with a fixed token."""
    folder = tmp_path_factory.mktemp('corpus')
    shutil.copytree(corpus.removeprefix('text:').rpartition('/')[0], folder / 'texts')
    source = f'text:{folder}/texts/{corpus.rpartition("/")[2]}'
    spec = runs.make_spec(source, data__fixed_position=1, data__length=96)
    path = tmp_path_factory.mktemp('runs') / 'run'
    records = runs.train_run(spec, path)
    return path, spec, records


def read_modification_times(path):
    return {child.relative_to(path): child.stat().st_mtime_ns for child in path.rglob('*')}


def test_open_reads_run_without_corpus_and_writes_nothing(trained_run, monkeypatch):
    path, *_ = trained_run
    monkeypatch.setattr('sinklab.data.run_data.open_corpus', lambda *_: pytest.fail('the corpus is read'))
    times_before = read_modification_times(path)
    run = sinklab.open(path)
    result = run.attention('import os')
    numbers = run.measure('sink', text='import os')
    assert read_modification_times(path) == times_before
    assert result.keys == result.queries == ['(fixed token)', *result.queries[1:]]
    assert ''.join(result.queries[1:]) == 'import os'
    assert (
        repr(result) == f'<Attention: 2 matrices x 4 heads, {len(result.queries)} queries x {len(result.keys)} keys>'
    )
    assert repr(run) == f"sinklab.open('{path}@8')"
    ids_PT = run.ids('import os')
    assert run.loss(ids_PT) == run.loss(ids_PT[0].tolist()) == run.loss('import os')
    assert run.measure('sink/1', ids_PT, threshold=0.4) == run.measure('sink/1@0.4', 'import os')
    assert run.measure('sink/1', ids_PT, threshold=1 / 3) == run.measure('sink/1', ids_PT, threshold=0.333333)
    logits_BTV, captured = run.model(ids_PT, capture=True)
    np.testing.assert_allclose(run.logits('import os'), logits_BTV, atol=1e-5)
    np.testing.assert_allclose(result.matrix_LHTS, captured.attention_BHTS[:, 0], atol=1e-6)
    assert numbers['sink/1'] == sink.compute_sink_rate(sink.compute_importance(result.matrix_LHTS, 1))


def test_plot_selects_strongest_matrix_of_selection():
    """Test with the layout of a hybrid model; `first_LH` is the mean attention to the first token."""
    pytest.importorskip('matplotlib')
    first_LH = np.array([[0.9, 0.3], [0.4, 0.5]])
    matrix_LHTS = np.broadcast_to(first_LH[..., None, None], (2, 2, 3, 3))
    result = api.AttentionMatrices(matrix_LHTS, ['a', 'b', 'c'], ['a', 'b', 'c'], (1, 3))
    assert result.strongest() == (1, 0)
    for selection, layer, head in [
        ({}, 1, 0),
        (dict(layer=1, head=1), 1, 1),
        (dict(layer=3), 3, 1),
        (dict(head=1), 3, 1),
    ]:
        axes = result.plot(**selection).axes[0]
        assert axes.get_title() == f'layer {layer}, head {head}', selection
        np.testing.assert_array_equal(axes.images[0].get_array(), matrix_LHTS[layer // 2, head])
    for selection in (dict(layer=0), dict(layer=1, head=2), dict(head=-1)):
        with pytest.raises(UserError):
            result.plot(**selection)


def test_plot_escapes_special_characters_in_labels():
    pytest.importorskip('matplotlib')
    tokens = ['$\\frac$', '$', ' \n\t', '']
    result = api.AttentionMatrices(np.ones((1, 1, 4, 4)), tokens, tokens, (0,))
    axes = result.plot().axes[0]
    expected_labels = [r'$\frac$', '$', '·⏎⇥', '∅']
    axes.figure.canvas.draw()  # raises if $\frac$ is parsed as a formula
    for axis in (axes.get_xticklabels(), axes.get_yticklabels()):
        assert [label.get_text() for label in axis] == expected_labels
        assert not any(label.get_parse_math() for label in axis)


def test_run_returns_parameters_of_steps_and_curves_as_frames(trained_run):
    path, _, records = trained_run
    run = sinklab.open(path)
    assert run.steps == [4, 8]
    for step in run.steps:
        for actual, expected in zip(
            *map(jax.tree.leaves, (run.params(step), runs.load_parameters(path, step))), strict=True
        ):
            np.testing.assert_array_equal(actual, expected)
    pytest.importorskip('pandas')
    frame = run.curve('sink/1')
    assert frame['sink/1'].to_dict() == {record['step']: record['sink/1'] for record in records if 'sink/1' in record}
    assert 'norm/ratio/01' in run.curve('norm')


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda run: run.attention(['one text', 'another']), 'one text'),
        (lambda run: run.attention(123), '123'),
        (lambda run: run.top_tokens(['one text', 'another']), 'one text'),
        (lambda run: run.sweep_edit('some words', [sinklab.Edit('ffn')]), 'one Edit'),
        (lambda run: run.loss(123), '123'),
        (lambda run: run.curve('loss'), 'did you mean valid/loss'),
        (lambda run: run.measure('sink1', 'some words'), 'did you mean sink/1'),
        (lambda run: run.measure('Sink_1', 'some words'), 'did you mean sink/1'),
        (lambda run: run.measure('alpha/1', 'some words', threshold=0.2), 'alpha/1'),
        (lambda run: run.loss([[3, 99999]]), '99999'),
        (lambda run: run.loss([[3], [4, 5]]), '4, 5'),
        (lambda run: run.attribute_logits('some words', 'some words'), 'some words'),
        (lambda run: run.sweep_edit('some words', sinklab.Edit('ffn'), over=('layer',)), 'did you mean layers'),
        (lambda run: run.measure('sink/1', 'some words', treshold=0.2), 'did you mean thresholds'),
    ],
)
def test_call_with_wrong_text_or_name_is_refused(trained_run, call, message):
    with pytest.raises(UserError, match=message):
        call(sinklab.open(trained_run[0]))


def test_measure_reproduces_metrics_of_training_probe(trained_run, capsys, monkeypatch, tmp_path):
    path, _spec, records = trained_run
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


@pytest.mark.parametrize('options', [['--json'], ['--all']], ids=str)
def test_measure_writes_results_despite_broken_pipe(trained_run, monkeypatch, tmp_path, options):
    """Test the effect of `sinklab measure RUN --out=DIR | head -1`."""

    class ClosedPipe(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, 'stdout', ClosedPipe())
    assert main(['measure', str(trained_run[0]), '--sequences=2', f'--out={tmp_path}/out', *options]) == 0
    result = json.loads((tmp_path / 'out' / 'measured.json').read_text())
    assert 'sink/1' in (result['steps'][-1] if '--all' in options else result)['inputs']['natural']
    assert [*(tmp_path / 'out').rglob('natural.npz')]


@pytest.mark.parametrize(('bos', 'begins_with_fixed_token'), [('auto', True), ('force', True), ('none', False)])
def test_bos_option_sets_first_token_and_loss_matches_reference(trained_run, bos, begins_with_fixed_token):
    path, spec, _ = trained_run
    subject = sinklab.open(path, bos=bos).subject
    request = measure.MeasureRequest(sequences=2, length=8)
    ids_PT = measure.make_inputs(subject, request)['natural']
    assert ((ids_PT[:, 0] == spec.data.fixed_token) == begins_with_fixed_token).all()
    tokens = subject.decode_tokens(subject.encode('import os'))
    assert ''.join(tokens[1:] if begins_with_fixed_token else tokens) == 'import os'
    params = sinklab.open(path).params()
    logits_PTV = [reference.run_forward(params, ids_T[:-1], spec)[0] for ids_T in ids_PT]
    expected = [
        [formulas.logsumexp(row) - row[target] for row, target in zip(logits_TV, ids_T[1:], strict=True)]
        for logits_TV, ids_T in zip(logits_PTV, ids_PT, strict=True)
    ]
    np.testing.assert_allclose(subject.compute_token_losses(ids_PT), expected, rtol=1e-4)


@pytest.mark.parametrize('bos', ['auto', 'force', 'none'])
@pytest.mark.parametrize('position', [None, 1, 3])
def test_encode_windows_splits_text_and_repeats_fixed_token(trained_run, bos, position):
    subject, length = sinklab.open(trained_run[0], bos=bos).subject, 8
    data = dataclasses.replace(subject.spec.data, fixed_position=position)
    subject.spec = dataclasses.replace(subject.spec, data=data)
    text = ' '.join(map(str, range(100)))
    text_ids = subject.tokenizer.encode(text, add_special_tokens=False).ids
    windows = subject.encode_windows(text, length)
    assert windows[0] == subject.encode(text)[:length]
    assert {len(window) for window in windows} == {length}
    window_ids = [token_id for window in windows for token_id in window if token_id != data.fixed_token]
    assert window_ids == text_ids[: len(window_ids)], 'no token is left out or given twice'
    assert len(text_ids) - len(window_ids) < length
    fixed_positions = {tuple(np.flatnonzero(np.array(window) == data.fixed_token)) for window in windows}
    assert len(fixed_positions) == 1, 'every window begins as the first does'


def test_measure_says_how_many_documents_have_several_windows(trained_run, capsys, tmp_path):
    for number in range(3):
        (tmp_path / f'{number}.log').write_text(' '.join(map(str, range(100 + 100 * number))))
    arguments = [str(trained_run[0]), f'--source=text:{tmp_path}/*', '--length=16', '--sequences']
    assert main(['measure', *arguments, '10']) == 0
    assert 'the 10 texts are windows of fewer documents (3)' in capsys.readouterr().out
    assert main(['measure', *arguments, '3', '--json']) == 0
    assert 'remarks' not in json.loads(capsys.readouterr().out)


def test_dtype_of_run_changes_numbers_as_rounding_does(trained_run, capsys):
    """Compare with float32. Each operation in bfloat16 rounds by at most 2^-9 of a value.

    The shares of attention are at most 1, and some ten operations lie between the embedding and the scores.
    """
    numbers = {}
    for dtype in ('float32', 'bfloat16'):
        assert main(['measure', str(trained_run[0]), '--sequences=4', '--json', f'--dtype={dtype}']) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report['dtype'], report['bos']) == (dtype, 'auto')
        numbers[dtype] = report['inputs']['natural']['alpha/1']
    assert 0 < abs(numbers['bfloat16'] - numbers['float32']) < 10 * 2**-9
    assert main(['measure', str(trained_run[0]), '--sequences=4']) == 0
    assert '\ncomputed in float32, --bos=auto\n' in capsys.readouterr().out
    run = sinklab.open(trained_run[0], dtype='bfloat16')
    assert (run.at(4).spec.model.dtype, run.subject.dtype) == ('bfloat16', 'bfloat16')
    with pytest.raises(UserError, match='give bfloat16 or float32'):
        sinklab.open(trained_run[0], dtype='float16')


def test_measure_writes_printed_results_with_optional_metrics(trained_run, capsys, monkeypatch, tmp_path):
    arguments = [str(trained_run[0]), '--json', '--all', '--sequences=2', '--loss', f'--out={tmp_path}/out']
    assert main(['measure', *arguments]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / 'out' / 'measured.json').read_text()) == summary
    assert {*summary['series']} == {'natural'}
    for step, result in zip(('00000004', '00000008'), summary['steps'], strict=True):
        assert 'loss' in result['inputs']['natural']
        assert (tmp_path / 'out' / step / 'natural.npz').exists()


def test_measure_all_reports_every_checkpoint_and_emergence(trained_run, capsys, monkeypatch, tmp_path):
    assert main(['measure', str(trained_run[0]), '--all', '--inputs=repeated', '--sequences=3']) == 0
    output = capsys.readouterr().out
    assert '@4' in output
    assert '@8' in output
    messages = 'no sink has emerged', 'Sink_1 emerges', 'Sink_1 as before training'
    assert any(f'\nrepeated: {message}' in output for message in messages)


def test_make_inputs_returns_natural_random_and_repeated_tokens(trained_run):
    path, spec, _ = trained_run
    subject = sinklab.open(path).subject
    request = measure.MeasureRequest(inputs=('natural', 'random', 'repeated'), sequences=4, length=8)
    result = measure.make_inputs(subject, request)
    np.testing.assert_array_equal(result['natural'][:, :8], load_run_data(spec).probe_PT[:4, :8])
    for name, ids_PT in result.items():
        assert ids_PT.shape == (4, 8), name
        assert (ids_PT[:, 0] == spec.data.fixed_token).all() == (name != 'repeated'), name
    assert (result['repeated'] == result['repeated'][:, :1]).all()
    assert len({*result['random'].ravel()}) > 15
    assert (result['random'] < subject.vocabulary).all()


@pytest.mark.parametrize(
    'arguments',
    [
        ['{run}@5'],
        ['{run}/probe'],
        ['{run}', '--inputs=naturl'],
        ['{run}', '--length=1000'],
        ['{run}', '--lengths=4,400'],
        ['{run}', '--eps=0.3'],
        ['{run}', '--positions=swap:1'],
        ['{run}', '--sequences=0'],
        ['{run}', '--lengths=8', '--eps=1.5'],
        ['{run}', '--keys=999'],
        ['hf:{run}'],
        ['{run}@4', '--all'],
        ['{run}', '--out=/proc/none/out'],
        ['{run}', '--out={run}'],
    ],
)
def test_measure_rejects_invalid_arguments_with_one_line(trained_run, capsys, arguments):
    formatted_arguments = [text.format(run=trained_run[0]) for text in arguments]
    assert main(['measure', *formatted_arguments]) == 1
    *earlier_lines, line = capsys.readouterr().err.strip().splitlines()
    assert line.startswith('sinklab measure: ')
    assert all(text.startswith('preparing') for text in earlier_lines)


def test_measure_refuses_unwritable_folder_before_it_measures(trained_run, capsys, monkeypatch):
    monkeypatch.setattr('sinklab.cli.measure.run_job', lambda *args: pytest.fail('the model was measured'))
    assert main(['measure', str(trained_run[0]), '--out=/proc/none/out']) == 1
    assert '/proc/none/out cannot be written' in capsys.readouterr().err


@pytest.fixture
def model_dir(tmp_path):
    """Make a model folder with the config.json that transformers writes."""
    (tmp_path / 'gpt').mkdir()
    (tmp_path / 'gpt' / 'config.json').write_text('{"model_type": "gpt2", "n_layer": 2}')
    return tmp_path / 'gpt'


@pytest.mark.parametrize('arguments', [['measure'], ['sample', '--prompt=a'], ['stream', '--text=a.txt']])
def test_open_model_folder_without_hf_prefix_is_rejected(model_dir, capsys, arguments):
    assert main([arguments[0], str(model_dir), *arguments[1:]]) == 1
    assert f'hf:{model_dir}' in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize('model_ref', ['{model}', 'hf:{model}', 'hf:org/name'])
@pytest.mark.parametrize(
    'command', [['measure', '--all'], ['checkpoint', 'ls'], ['checkpoint', 'verify']], ids=' '.join
)
def test_open_model_is_rejected_with_import_command(model_dir, capsys, model_ref, command):
    model_ref = model_ref.format(model=model_dir)
    verb = command[: 1 + (command[0] == 'checkpoint')]
    line = get_error_line(capsys, *verb, model_ref, *command[len(verb) :])
    assert f'sinklab checkpoint import hf:{model_ref.removeprefix("hf:")} --out=' in line


def test_notebook_executes_all_cells(trained_run, tmp_path, monkeypatch):
    pytest.importorskip('pandas')
    (tmp_path / 'runs' / 'quickstart').mkdir(parents=True)
    (tmp_path / 'runs' / 'quickstart' / 'softmax-0').symlink_to(trained_run[0])
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / 'docs' / 'notebook.ipynb').read_text(encoding='utf-8'))
    namespace = {}
    for cell in notebook['cells']:
        if cell['cell_type'] == 'code':
            exec(''.join(cell['source']), namespace)
    assert namespace['attention'].keys == namespace['attention'].queries
    assert len(namespace['curve']) == 4
