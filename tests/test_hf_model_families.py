"""Tests of open model families: measured attention against transformers, and rejected families."""

import functools
import json
import sys

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

FAMILIES_WITHOUT_ATTENTION = 'falcon_mamba', 'mamba', 'mamba2', 'rwkv', 'xlstm'
REJECTION_MESSAGES = {'hrm_text': 'has no list of', 'xlnet': 'attends to later tokens'}
REJECTION_MESSAGES |= dict.fromkeys(('granite_swa', 'granitemoe_swa'), 'are not the sums of values')
MEASURED_FAMILIES = [
    name for name in open_families.FAMILIES if name not in (*FAMILIES_WITHOUT_ATTENTION, *REJECTION_MESSAGES)
]
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
SAMPLED_FAMILIES = 'gptj', 'falcon', 'bamba', 'doge', 'minimax', 'mamba', 'deepseek_v32', 'granite_swa'
SAMPLED_FAMILIES += 'dots3_note_text', 'inkling2_text'
VISION = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48)
MULTIMODAL_CONFIGS = {
    'gemma3': dict(
        text_config=open_families.FAMILIES['gemma3_text'] | dict(model_type='gemma3_text'),
        vision_config=VISION | dict(model_type='siglip_vision_model', image_size=28, patch_size=14),
        mm_tokens_per_image=4,
    ),
    'git': open_families.ENCODER
    | dict(vision_config=VISION | dict(model_type='git_vision_model', image_size=28, patch_size=14)),
}
IDS_PT = np.random.default_rng(0).integers(2, 100, (2, 16))
P, T = IDS_PT.shape
UNKNOWN_TYPE_REASON = 'the installed transformers has no model type {}'


def make_family_params(families):
    """Return the families as parameters; mark those outside the sample as exhaustive."""
    marks = {True: (), False: pytest.mark.exhaustive}
    return [pytest.param(family, marks=marks[family in SAMPLED_FAMILIES]) for family in families]


@pytest.fixture(scope='module')
def make_model(tmp_path_factory):
    """Return make(family) -> (folder, transformers model); it makes each model only once."""

    @functools.cache
    def make(family):
        if family not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
            pytest.skip(UNKNOWN_TYPE_REASON.format(family))
        folder = tmp_path_factory.mktemp(family)
        return folder, open_families.save_model(
            open_families.make_config(family), folder, open_families.make_tokenizer_json()
        )

    return make


@pytest.fixture(scope='module')
def open_hf_model(make_model):
    return functools.cache(lambda family: HFModel(str(make_model(family)[0])))


@pytest.fixture
def run_measure(tmp_path, capsys, monkeypatch):
    """Return run(folder, *options) -> (exit code, standard output, lines of standard error)."""

    def run(folder, *options):
        monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path / 'cache'))
        (tmp_path / 'text.txt').write_text(open_families.SAMPLE_TEXT)
        capsys.readouterr()
        texts = f'--source=text:{tmp_path}/text.txt', '--sequences=1', '--length=16'
        code = main(['measure', f'hf:{folder}', *texts, *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err.strip().splitlines()

    return run


@pytest.mark.parametrize('family', make_family_params(MEASURED_FAMILIES))
def test_attention_matches_transformers_output(make_model, open_hf_model, family):
    subject = open_hf_model(family)
    assert open_families.compare_attention(subject, make_model(family)[1], IDS_PT) <= 1e-6
    all_layers = tuple(range(1, len(subject.recorder.layers) + 1))
    assert subject.array_layers['attention_LPHTS'] == ATTENTION_LAYERS.get(family, all_layers)


@pytest.mark.parametrize('family', MULTIMODAL_CONFIGS)
def test_layers_are_those_of_text_if_vision_tower_has_same_depth(tmp_path, family):
    config = transformers.AutoConfig.for_model(family, **MULTIMODAL_CONFIGS[family])
    model = open_families.save_model(config, tmp_path)
    assert open_families.compare_attention(HFModel(tmp_path), model, IDS_PT) == 0


def test_attention_that_does_not_give_outputs_is_refused_on_the_measured_texts(make_model, monkeypatch):
    subject = HFModel(str(make_model('llama')[0]))
    module = sys.modules[type(subject.model).__module__]
    eager = module.eager_attention_forward

    def halve_later_outputs(*arguments, **options):
        output, attention = eager(*arguments, **options)
        output[:, 8:] /= 2  # after the tokens of the trial pass
        return output, attention

    monkeypatch.setattr(module, 'eager_attention_forward', halve_later_outputs)
    with pytest.raises(hf_model.AttentionMismatchError):
        measure_module.measure_model(subject, IDS_PT)


@pytest.mark.parametrize('family', ['bart', 'bloom', 'mpt', 'falcon'])
def test_positions_are_refused_if_model_ignores_them(run_measure, tmp_path, family):
    config = open_families.make_config(family)
    if family == 'falcon':
        config.alibi = True
    open_families.save_model(config, tmp_path / family, open_families.make_tokenizer_json())
    code, _, err = run_measure(tmp_path / family, '--positions=swap:3')
    assert (code, len(err)) == (1, 1)
    assert '--positions' in err[0]


def test_measurement_records_positions_and_seed(make_model, run_measure):
    options = '--inputs=random', '--seed=3', '--positions=swap:3'
    report = json.loads(run_measure(make_model('llama')[0], *options, '--json')[1])
    assert (report['seed'], report['positions']) == (3, 'swap:3')


@pytest.mark.parametrize('family', make_family_params(MEASURED_FAMILIES))
def test_measure_supports_family_on_command_line_and_in_python(make_model, run_measure, family):
    folder, _ = make_model(family)
    code, out, err = run_measure(folder, '--inputs=natural,random,repeated', '--loss', '--json')
    assert code == 0, err
    results = json.loads(out)['inputs']
    assert all('sink/1' in numbers and 'loss' in numbers for numbers in results.values())
    matrix_LHTS = sinklab.open(f'hf:{folder}').attention(open_families.SAMPLE_TEXT[:30]).matrix_LHTS
    assert matrix_LHTS.ndim == 4


@pytest.mark.parametrize('family', make_family_params(FAMILIES_WITHOUT_ATTENTION))
def test_measure_rejects_model_without_attention_before_loading_weights(make_model, run_measure, monkeypatch, family):
    folder, _ = make_model(family)
    monkeypatch.setattr(hf_model, 'load_model', lambda *_: pytest.fail('its weights were read'))
    code, _, err = run_measure(folder)
    assert (code, len(err)) == (1, 1)
    assert f'model type {family}' in err[0]


@pytest.mark.parametrize('family', make_family_params(REJECTION_MESSAGES))
def test_measure_rejects_unsupported_family_with_one_line(make_model, run_measure, family):
    code, _, err = run_measure(make_model(family)[0])
    assert (code, len(err)) == (1, 1)
    assert REJECTION_MESSAGES[family] in err[0]


def raise_error(*_, **__):
    raise RuntimeError('a tensor of the wrong shape,\nin two lines')


@pytest.mark.parametrize('method', ['__init__', 'forward'])
def test_measure_reports_transformers_exception_in_one_line(make_model, run_measure, monkeypatch, method):
    folder, model = make_model('falcon')
    monkeypatch.setattr(type(model.base_model), method, raise_error)
    code, _, err = run_measure(folder)
    assert (code, len(err)) == (1, 1)
    for part in ('falcon', transformers.__version__, 'RuntimeError: a tensor of the wrong shape, in two lines'):
        assert part in err[0]


def test_capture_propagates_exception_of_sinklab(make_model):
    subject = HFModel(str(make_model('gptj')[0]))
    with pytest.raises(ZeroDivisionError):
        subject.capture(IDS_PT, lambda layer: 1 // 0)


def test_hybrid_model_attention_keeps_layer_numbers(make_model, run_measure):
    folder, _ = make_model('minimax')
    attention = sinklab.open(f'hf:{folder}').attention(open_families.SAMPLE_TEXT[:30])
    assert attention.layers == (1, 3)
    assert len(attention.matrix_LHTS) == 2
    assert attention.strongest()[0] in (1, 3)
    attention.plot(3, 0)
    with pytest.raises(UserError, match=r'1, 3.*0 to 3'):
        attention.plot(0, 0)
    code, out, _ = run_measure(folder)
    assert code == 0
    assert '2 of 4 layers' in out
    assert '1, 3: linear_attention' in out


def test_plot_shows_both_attention_matrices_of_layer(make_model):
    attention = sinklab.open(f'hf:{make_model("longcat_flash")[0]}').attention(open_families.SAMPLE_TEXT[:30])
    assert attention.layers == (0, 0, 1, 1)
    for index, layer in enumerate(attention.layers):
        (axes, *_) = attention.plot(place=index, head=1).axes
        np.testing.assert_array_equal(axes.images[0].get_array(), attention.matrix_LHTS[index, 1])
        assert axes.get_title() == f'layer {layer + 1}, matrix {index % 2 + 1} of 2, head 2'


def test_layer_metrics_of_hybrid_model_keep_layer_numbers(open_hf_model):
    subject = open_hf_model('bamba')
    arrays = subject.capture(IDS_PT, lambda layer: {'n_LPTD': layer['normed_LPTD']} if 'normed_LPTD' in layer else {})
    norm_LT = np.linalg.norm(arrays['n_LPTD'], axis=-1).mean(1)
    measured = measure_module.measure_model(subject, IDS_PT)
    numbers = {name: value for name, value in measured.numbers.items() if name.startswith('norm/normed/')}
    assert [*numbers] == ['norm/normed/02', 'norm/normed/04']
    np.testing.assert_allclose([*numbers.values()], norm_LT[:, 0] / norm_LT[:, 1:].mean(-1), rtol=1e-5)
    np.testing.assert_array_equal(measured.arrays['attention_layer_L'], [2, 4])


def test_hybrid_model_has_no_propositions(open_hf_model):
    result = measure_module.make_job(
        open_hf_model('bamba'), measure_module.MeasureRequest(inputs=('repeated',), sequences=2, length=T)
    ).run()
    assert result.propositions == []


def test_each_head_has_equal_weight_with_different_heads_per_layer(make_model, open_hf_model):
    subject, (folder, model) = open_hf_model('laguna'), make_model('laguna')
    assert subject.heads_per_layer == (4, 8, 4)
    attention = [np.float64(layer) for layer in open_families.get_hf_attention(model, IDS_PT)]
    alpha = np.concatenate([layer[..., 0].mean(-1).ravel() for layer in attention])
    measured = measure_module.measure_model(subject, IDS_PT)
    np.testing.assert_allclose(measured.numbers['alpha/1'], alpha.mean(), rtol=1e-5)
    np.testing.assert_allclose(measured.numbers['sink/1'], 100 * (alpha > 0.3).mean())
    assert measured.arrays['alpha_LPHJ'].shape[:3] == (1, P, 16)
    np.testing.assert_array_equal(measured.arrays['attention_layer_H'], [1] * 4 + [2] * 8 + [3] * 4)
    matrix_LHTS = sinklab.open(f'hf:{folder}').attention(open_families.SAMPLE_TEXT[:30]).matrix_LHTS
    assert matrix_LHTS.shape[:2] == (3, 8)
    np.testing.assert_array_equal(np.isnan(matrix_LHTS).all((2, 3)).sum(-1), [4, 0, 4])


def test_key_rank_supports_different_head_widths(open_hf_model):
    subject, ranks, widths = open_hf_model('gemma4_text'), [], set()

    def record_keys(layer):
        widths.add(layer['key_LPSHK'].shape[-1])
        ranks.append(angles.compute_effective_rank(layer['key_LPSHK'][:, :, 0]))
        return {}

    subject.capture(IDS_PT, record_keys)
    assert len(widths) == 2
    np.testing.assert_allclose(
        measure_module.measure_model(subject, IDS_PT).numbers['key/rank/1'], np.mean(ranks), rtol=1e-6
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize('family', ['gemma3n_text', 'cpmant'])
def test_measure_skips_hidden_states_without_one_vector_per_token(make_model, run_measure, family):
    code, out, _ = run_measure(make_model(family)[0], '--json')
    results = json.loads(out)
    assert (code, [*results['inputs']['natural']].count('norm/ratio/01')) == (0, 0)
    assert any('hidden state' in remark for remark in results['remarks'])
    code, _, err = run_measure(make_model(family)[0], '--perturb=3')
    assert (code, len(err)) == (1, 1)
