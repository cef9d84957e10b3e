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
from sinklab.analysis import measure as measure_module
from sinklab.analysis.hf_model import HFModel
from sinklab.cli.main import main
from sinklab.errors import UserError
from sinklab.metrics import angles

pytestmark = pytest.mark.slow  # transformers takes seconds to import

REFUSED_FAMILIES = 'mamba', 'rwkv', 'xlnet', 'bloom', 'falcon', 'gptj', 'granite_swa', 'laguna', 'longcat_flash'
MEASURED_FAMILIES = [name for name in open_families.FAMILIES if name not in REFUSED_FAMILIES]
# Attention layers of hybrid models, counted from 1.
ATTENTION_LAYERS = {'jamba': (1, 3), 'lfm2': (1, 3), 'minimax': (1, 3), 'qwen3_next': (3,)}
SAMPLED_FAMILIES = 'falcon_h1', 'minimax', 'deepseek_v32', 'gemma3n_text', 'gemma4_text', *REFUSED_FAMILIES[3:]
IDS_PT = np.random.default_rng(0).integers(2, 100, (2, 16))


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
            pytest.skip(f'the installed transformers has no model type {family}')
        folder = tmp_path_factory.mktemp(family)
        return folder, open_families.save_model(
            open_families.make_config(family), folder, open_families.make_tokenizer_json()
        )

    return make


@pytest.fixture(scope='module')
def open_hf_model(make_model):
    return functools.cache(lambda family: HFModel(make_model(family)[0]))


@pytest.fixture
def run_measure(tmp_path, capsys):
    """Return run(folder, *options) -> (exit code, standard output, lines of standard error)."""

    def run(folder, *options):
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
    all_layers = tuple(range(len(subject.recorder.layers)))
    assert subject.array_layers['attention_LPHTS'] == ATTENTION_LAYERS.get(family, all_layers)


def test_layers_are_those_of_text_if_vision_tower_has_same_depth(tmp_path):
    vision = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48)
    config = transformers.AutoConfig.for_model(
        'gemma3',
        text_config=open_families.FAMILIES['gemma3_text'] | dict(model_type='gemma3_text'),
        vision_config=vision | dict(model_type='siglip_vision_model', image_size=28, patch_size=14),
        mm_tokens_per_image=4,
    )
    model = open_families.save_model(config, tmp_path)
    assert open_families.compare_attention(HFModel(tmp_path), model, IDS_PT) == 0


def test_attention_that_does_not_give_outputs_is_refused_on_the_measured_texts(make_model, monkeypatch):
    subject = HFModel(make_model('llama')[0])
    module = sys.modules[type(subject.model).__module__]
    eager = module.eager_attention_forward

    def halve_later_outputs(*arguments, **options):
        output, attention = eager(*arguments, **options)
        output[:, 8:] /= 2  # after the tokens of the trial pass
        return output, attention

    monkeypatch.setattr(module, 'eager_attention_forward', halve_later_outputs)
    with pytest.raises(UserError):
        measure_module.measure_model(subject, IDS_PT)


@pytest.mark.parametrize('family', make_family_params(REFUSED_FAMILIES))
def test_measure_rejects_unsupported_family_with_one_line(make_model, run_measure, family):
    code, _, err = run_measure(make_model(family)[0])
    assert (code, len(err)) == (1, 1)


@pytest.mark.parametrize('method', ['__init__', 'forward'])
def test_measure_reports_transformers_exception_in_one_line(make_model, run_measure, monkeypatch, method):
    def raise_error(*_, **__):
        raise RuntimeError('a tensor of the wrong shape,\nin two lines')

    folder, model = make_model('llama')
    monkeypatch.setattr(type(model.base_model), method, raise_error)
    code, _, err = run_measure(folder)
    assert (code, len(err)) == (1, 1)
    assert transformers.__version__ in err[0]


def test_hybrid_model_keeps_layer_numbers(make_model, open_hf_model, run_measure):
    folder, _ = make_model('minimax')
    attention = sinklab.open(f'hf:{folder}').attention(open_families.SAMPLE_TEXT[:30])
    assert attention.layers == (1, 3)
    assert len(attention.matrix_LHTS) == 2
    assert attention.strongest()[0] in (1, 3)
    attention.plot(3, 0)
    with pytest.raises(UserError):
        attention.plot(0, 0)
    assert '2 of 4 layers' in run_measure(folder)[1]
    measured = measure_module.measure_model(open_hf_model('minimax'), IDS_PT)
    np.testing.assert_array_equal(measured.arrays['attention_layer_L'], [1, 3])


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


def test_measure_skips_hidden_states_without_one_vector_per_token(make_model, run_measure):
    code, out, _ = run_measure(make_model('gemma3n_text')[0], '--json')
    results = json.loads(out)
    assert (code, [*results['inputs']['natural']].count('norm/ratio/01')) == (0, 0)
    assert any('hidden state' in remark for remark in results['remarks'])
