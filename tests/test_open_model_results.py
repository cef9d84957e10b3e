"""Experiments on open models: their definitions, a run on a tiny model, and the results page."""

import json
import re
import sys

import pytest

from docs import open_model_results, page_parts
from sinklab.configs.open_models import EXPERIMENTS, MODELS, PUBLISHED_SINK_RATES
from sinklab.metrics.registry import find_metric_info

MEASURE_OPTIONS = {
    'inputs',
    'sequences',
    'bos',
    'length',
    'lengths',
    'thresholds',
    'positions',
    'loss',
    'domain',
    'bos_first',
}
OTHER_OPTIONS = {'measure': MEASURE_OPTIONS, 'stream': {'cache', 'characters'}, 'attention': {'text'}}
OTHER_METRICS = {'loss', 'perplexity', 'predicted'}


@pytest.mark.parametrize('name', EXPERIMENTS)
def test_experiment_is_well_defined(name):
    experiment = EXPERIMENTS[name]
    assert experiment['source']
    assert {option for options in experiment['variants'].values() for option in options} <= OTHER_OPTIONS[
        experiment.get('verb', 'measure')
    ]
    for metric in experiment['metrics']:
        assert metric in OTHER_METRICS or find_metric_info(metric.replace('*', '01')), metric
    for values in experiment.get('published', {}).values():
        assert {*values} <= {*experiment['variants']}
    for statement in experiment.get('statements', ()):
        assert statement['relation'] in ('>', '<', '=')
        for reading in (statement['left'], statement['right']):
            if isinstance(reading, tuple):
                variant, metric = reading
                assert variant in experiment['variants']
                assert metric in experiment['metrics']


@pytest.mark.parametrize(
    ('relation', 'left', 'right', 'min_difference', 'verdict'),
    [
        ('>', 10.0, 2.0, 5.0, 'holds (+8)'),
        ('>', 6.0, 2.0, 5.0, 'does not hold (+4)'),
        ('<', 2.0, 10.0, 5.0, 'holds (-8)'),
        ('=', 2.0, 6.0, 5.0, 'holds (-4)'),
        ('=', 2.0, 7.0, 5.0, 'does not hold (-5)'),
        ('=', None, 9.0, 5.0, 'not measured'),
    ],
)
def test_statement_holds_if_difference_is_large_enough(relation, left, right, min_difference, verdict):
    values = {} if left is None else {'sink/1': left}
    statement = dict(
        statement='A.', left=('natural', 'sink/1'), relation=relation, right=right, min_difference=min_difference
    )
    assert open_model_results.judge_statement(statement, {'found': {'natural': {'values': values}}}) == verdict


def test_reading_of_layers_is_the_largest_value():
    statement = dict(statement='A.', left=('natural', 'norm/ratio/*'), relation='>', right=1.0, min_difference=1.0)
    entry = {'found': {'natural': {'values': {'norm/ratio/*': [1.0, 160.0, None, 3.0]}}}}
    assert open_model_results.judge_statement(statement, entry) == 'holds (+159)'
    assert open_model_results.format_value('norm/ratio/*', [1.0, 160.0, None, 3.0]) == '160 (2)'


def test_results_page_matches_json():
    page = open_model_results.PAGE.read_text(encoding='utf-8')
    generated = open_model_results.format_results(open_model_results.load_results())
    assert page_parts.replace_part(page, open_model_results.PAGE_PART, generated) == page
    for picture in re.findall(r'\]\((.*?\.png)\)', generated):
        assert (open_model_results.RESULTS_DIR / picture).is_file()


def test_results_contain_no_path_of_a_machine():
    text = open_model_results.RESULTS_FILE.read_text(encoding='utf-8')
    assert not re.search(r'(hf|gguf):|/tmp/|/home/|/root/', text)
    assert {*json.loads(text)['models']} == {*MODELS}


@pytest.fixture
def tiny_model(tmp_path):
    """Return a folder with a tiny LLaMA and a folder with texts of two domains."""
    pytest.importorskip('torch', reason='open models need torch, which has no wheel here')
    open_families = pytest.importorskip('benchmarks.open_families')
    model_dir, corpora = tmp_path / 'tiny', tmp_path / 'corpora'
    model_dir.mkdir()
    config = open_families.make_config('llama')
    config.bos_token_id = config.eos_token_id = 0  # <|end|> of the tokenizer
    open_families.save_model(config, model_dir, open_families.make_tokenizer_json())
    (corpora / 'prose').mkdir(parents=True)
    for number in range(3):
        (corpora / 'prose' / f'{number}.txt').write_text(f'{number}. {open_families.SAMPLE_TEXT * 3}')
    (corpora / 'long.txt').write_text(open_families.SAMPLE_TEXT * 4)
    return model_dir, corpora


@pytest.mark.slow
def test_experiments_run_on_tiny_model(tiny_model, monkeypatch, tmp_path):
    from benchmarks import open_models

    model_dir, corpora = tiny_model
    monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path / 'cache'))
    caches = {cache: dict(cache=cache, characters=300) for cache in ('0+8', '1+7')}
    monkeypatch.setitem(EXPERIMENTS['streaming'], 'variants', caches)
    out = tmp_path / 'results.json'
    argv = [
        'open_models',
        f'--models=tiny=hf:{model_dir}',
        f'--corpora={corpora}',
        '--experiments=inputs,lengths,norms,bos,positions,streaming,attention',
        '--sequences=2',
        f'--out={out}',
    ]
    monkeypatch.setattr(sys, 'argv', argv)
    open_models.main()
    results, text = json.loads(out.read_text()), out.read_text()
    assert str(tmp_path) not in text
    entries = {name: models['tiny'] for name, models in results['experiments'].items() if models}
    assert 'positions' not in entries, 'the model has rotary positions'
    assert 'reads 128 tokens' in entries['lengths']['refused']['natural']
    assert entries['inputs']['found'].keys() == {'natural', 'random', 'repeated'}
    sink_rates = [entries['bos']['found'][name]['values']['sink/1'] for name in ('force', 'random, BOS first')]
    assert all(0 <= value <= 100 for value in sink_rates)
    assert len(entries['norms']['found']['natural']['layers']['cos_LH2']['first']) == 3
    assert entries['streaming']['found']['0+8']['values']['perplexity'] > 1
    assert len(entries['attention']['found']['prose']['heads']['median']['matrix']) > 10

    monkeypatch.setattr(open_model_results, 'RESULTS_DIR', tmp_path)
    open_model_results.draw_pictures(results)
    assert {path.name for path in tmp_path.glob('*.png')} == {
        f'open_models_{picture}.png' for picture in ('norms', 'angles', 'attention')
    }
    assert 'tiny refuses natural' in open_model_results.format_results(results)


def test_published_values_are_those_of_the_tables():
    published = EXPERIMENTS['inputs']['published']
    assert published['Meta-Llama-3-8B'] == PUBLISHED_SINK_RATES['Meta-Llama-3-8B']
    assert published.keys() == {'gpt2-xl', 'Mistral-7B-v0.1', 'Llama-2-7b-hf', 'Meta-Llama-3-8B'}
    assert EXPERIMENTS['bos']['published'] == {
        'causal mask, no BOS in training': {'none': 65.15, 'force': 65.10},
        'causal mask, BOS always first': {'none': 0.05, 'force': 90.84},
        'mask of documents, no BOS in training': {'none': 28.23},
        'mask of documents, BOS before each': {'none': 50.24, 'force': 83.33},
        'mask of documents, BOS always first': {'none': 0.00, 'force': 90.56},
    }
    (perplexities,) = EXPERIMENTS['streaming']['published'].values()
    assert perplexities == {'0+256': 27.87, '1+255': 18.49, '2+254': 18.05, '4+252': 18.05}
