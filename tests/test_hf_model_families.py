"""Tests of open model families: measured attention against transformers, and rejected families."""

import functools
import json

import numpy as np
import pytest

pytest.importorskip('torch', reason='open models need torch, which has no wheel here')
pytest.importorskip('transformers', reason='open models need transformers')

import transformers

import sinklab
from benchmarks import open_families
from sinklab.analysis import hf_model
from sinklab.analysis import measure as measure_module
from sinklab.analysis.hf_model import HFModel
from sinklab.cli.main import main
from sinklab.errors import UserError
from sinklab.metrics import angles

pytestmark = pytest.mark.slow  # transformers takes seconds to import

WITHOUT_ATTENTION = 'falcon_mamba', 'mamba', 'mamba2', 'rwkv', 'xlstm'
REFUSED = {'hrm_text': 'has no list of', 'xlnet': 'attends to later tokens'}
MEASURED = [name for name in open_families.FAMILIES if name not in (*WITHOUT_ATTENTION, *REFUSED)]
# Attention layers of hybrid models, counted from 1.
ATTENTION_LAYERS = {
    'bailing_hybrid': (2, 4),
    'bamba': (2, 4),
    'granitemoehybrid': (2,),
    'jamba': (2, 4),
    'kimi_linear': (2, 4),
    'lfm2': (2, 4),
    'lfm2_moe': (2, 4),
    'longcat_flash': (1, 1, 2, 2),
    'minimax': (2, 4),
    'nemotron_h': (2,),
    'olmo_hybrid': (2, 4),
    'qwen3_5_text': (4,),
    'qwen3_next': (4,),
    'recurrent_gemma': (3,),
    'zamba': (3, 6),
    'zamba2': (2, 4),
}
SAMPLE = 'gptj', 'falcon', 'bamba', 'doge', 'minimax', 'mamba'
IDS_PT = np.random.default_rng(0).integers(2, 100, (2, 16))
P, T = IDS_PT.shape
NOT_KNOWN = 'the installed transformers has no model type {}'


def sampled(families):
    """Return the families as parameters; mark those outside the sample as exhaustive."""
    marks = {True: (), False: pytest.mark.exhaustive}
    return [pytest.param(family, marks=marks[family in SAMPLE]) for family in families]


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    """Return make(family) -> (folder, transformers model), which makes each model once."""

    @functools.cache
    def make(family):
        if family not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
            pytest.skip(NOT_KNOWN.format(family))
        folder = tmp_path_factory.mktemp(family)
        return folder, open_families.save_model(
            open_families.make_config(family), folder, open_families.make_tokenizer_json()
        )

    return make


@pytest.fixture(scope='module')
def opened(made):
    return functools.cache(lambda family: HFModel(str(made(family)[0])))


@pytest.fixture
def measure(tmp_path, capsys, monkeypatch):
    """Return measure(folder, *options) -> (exit code, standard output, lines of standard error)."""

    def run(folder, *options):
        monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path / 'cache'))
        (tmp_path / 'text.txt').write_text(open_families.SAMPLE_TEXT)
        capsys.readouterr()
        texts = f'--source=text:{tmp_path}/text.txt', '--sequences=1', '--length=16'
        code = main(['measure', f'hf:{folder}', *texts, *options])
        found = capsys.readouterr()
        return code, found.out, found.err.strip().splitlines()

    return run


@pytest.mark.parametrize('family', sampled(MEASURED))
def test_attention_matches_transformers_output(made, opened, family):
    subject = opened(family)
    assert open_families.compare_attention(subject, made(family)[1], IDS_PT) <= 1e-6
    every = tuple(range(1, len(subject.recorder.layers) + 1))
    assert subject.array_layers['attention_LPHTS'] == ATTENTION_LAYERS.get(family, every)


@pytest.mark.parametrize('family', sampled(MEASURED))
def test_measure_supports_family_on_command_line_and_in_python(made, measure, family):
    folder, _ = made(family)
    code, out, err = measure(folder, '--inputs=natural,random,repeated', '--loss', '--json')
    assert code == 0, err
    found = json.loads(out)['inputs']
    assert all('sink/1' in numbers and 'loss' in numbers for numbers in found.values())
    matrix_LHTS = sinklab.open(f'hf:{folder}').attention(open_families.SAMPLE_TEXT[:30]).matrix_LHTS
    assert matrix_LHTS.ndim == 4


@pytest.mark.parametrize('family', sampled(WITHOUT_ATTENTION))
def test_measure_rejects_model_without_attention_before_loading_weights(made, measure, monkeypatch, family):
    folder, _ = made(family)
    monkeypatch.setattr(hf_model, 'load_model', lambda *_: pytest.fail('its weights were read'))
    code, _, err = measure(folder)
    assert (code, len(err)) == (1, 1)
    assert f'model type {family}' in err[0]


@pytest.mark.parametrize('family', sampled(REFUSED))
def test_measure_rejects_unsupported_family_with_one_line(made, measure, family):
    code, _, err = measure(made(family)[0])
    assert (code, len(err)) == (1, 1)
    assert REFUSED[family] in err[0]


def fail(*_, **__):
    raise RuntimeError('a tensor of the wrong shape,\nin two lines')


@pytest.mark.parametrize('method', ['__init__', 'forward'])
def test_measure_reports_transformers_exception_in_one_line(made, measure, monkeypatch, method):
    folder, model = made('falcon')
    monkeypatch.setattr(type(model.base_model), method, fail)
    code, _, err = measure(folder)
    assert (code, len(err)) == (1, 1)
    for word in ('falcon', transformers.__version__, 'RuntimeError: a tensor of the wrong shape, in two lines'):
        assert word in err[0]


def test_capture_propagates_exception_of_sinklab(made):
    subject = HFModel(str(made('gptj')[0]))
    with pytest.raises(ZeroDivisionError):
        subject.capture(IDS_PT, lambda layer: 1 // 0)


def test_hybrid_model_attention_keeps_layer_numbers(made, measure):
    folder, _ = made('minimax')
    found = sinklab.open(f'hf:{folder}').attention(open_families.SAMPLE_TEXT[:30])
    assert found.layers == (1, 3)
    assert len(found.matrix_LHTS) == 2
    assert found.strongest()[0] in (1, 3)
    found.plot(3, 0)
    with pytest.raises(UserError, match=r'1, 3.*0 to 3'):
        found.plot(0, 0)
    code, out, _ = measure(folder)
    assert code == 0
    assert '2 of 4 layers' in out
    assert '1, 3: linear_attention' in out


def test_plot_shows_both_attention_matrices_of_layer(made):
    found = sinklab.open(f'hf:{made("longcat_flash")[0]}').attention(open_families.SAMPLE_TEXT[:30])
    assert found.layers == (0, 0, 1, 1)
    for place, layer in enumerate(found.layers):
        (axes, *_) = found.plot(place=place, head=1).axes
        np.testing.assert_array_equal(axes.images[0].get_array(), found.matrix_LHTS[place, 1])
        assert axes.get_title() == f'layer {layer + 1}, matrix {place % 2 + 1} of 2, head 2'


def test_layer_metrics_of_hybrid_model_keep_layer_numbers(opened):
    subject = opened('bamba')
    kept = subject.capture(IDS_PT, lambda layer: {'n_LPTD': layer['normed_LPTD']} if 'normed_LPTD' in layer else {})
    norm_LT = np.linalg.norm(kept['n_LPTD'], axis=-1).mean(1)
    found = measure_module.measure_model(subject, IDS_PT)
    numbers = {name: value for name, value in found.numbers.items() if name.startswith('norm/normed/')}
    assert [*numbers] == ['norm/normed/02', 'norm/normed/04']
    np.testing.assert_allclose([*numbers.values()], norm_LT[:, 0] / norm_LT[:, 1:].mean(-1), rtol=1e-5)
    np.testing.assert_array_equal(found.arrays['attention_layer_L'], [2, 4])


def test_hybrid_model_has_no_propositions(opened):
    told = measure_module.make_job(
        opened('bamba'), measure_module.MeasureRequest(inputs=('repeated',), sequences=2, length=T)
    ).run()
    assert told.propositions == []


def test_each_head_has_equal_weight_with_different_heads_per_layer(made, opened):
    subject, (folder, model) = opened('laguna'), made('laguna')
    assert subject.heads_per_layer == (4, 8, 4)
    attention = [np.float64(layer) for layer in open_families.get_hf_attention(model, IDS_PT)]
    alpha = np.concatenate([layer[..., 0].mean(-1).ravel() for layer in attention])
    found = measure_module.measure_model(subject, IDS_PT)
    np.testing.assert_allclose(found.numbers['alpha/1'], alpha.mean(), rtol=1e-5)
    np.testing.assert_allclose(found.numbers['sink/1'], 100 * (alpha > 0.3).mean())
    assert found.arrays['alpha_LPHJ'].shape[:3] == (1, P, 16)
    np.testing.assert_array_equal(found.arrays['attention_layer_H'], [1] * 4 + [2] * 8 + [3] * 4)
    matrix_LHTS = sinklab.open(f'hf:{folder}').attention(open_families.SAMPLE_TEXT[:30]).matrix_LHTS
    assert matrix_LHTS.shape[:2] == (3, 8)
    np.testing.assert_array_equal(np.isnan(matrix_LHTS).all((2, 3)).sum(-1), [4, 0, 4])


def test_key_rank_supports_different_head_widths(opened):
    subject, ranks, widths = opened('gemma4_text'), [], set()

    def keep(layer):
        widths.add(layer['key_LPSHK'].shape[-1])
        ranks.append(angles.compute_effective_rank(layer['key_LPSHK'][:, :, 0]))
        return {}

    subject.capture(IDS_PT, keep)
    assert len(widths) == 2
    np.testing.assert_allclose(
        measure_module.measure_model(subject, IDS_PT).numbers['key/rank/1'], np.mean(ranks), rtol=1e-6
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize('family', ['gemma3n_text', 'cpmant'])
def test_measure_skips_hidden_states_without_one_vector_per_token(made, measure, family):
    code, out, _ = measure(made(family)[0], '--json')
    found = json.loads(out)
    assert (code, [*found['inputs']['natural']].count('norm/ratio/01')) == (0, 0)
    assert any('hidden state' in remark for remark in found['remarks'])
    code, _, err = measure(made(family)[0], '--perturb=3')
    assert (code, len(err)) == (1, 1)
