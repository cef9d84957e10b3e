"""Tables of docs/results/emergence.md, from docs/results/claims.json and claims_natural.json.

    python -m docs.emergence_results

claims.json has runs of the size quickstart, claims_natural.json the runs of configs/natural.py at its size 0.2m.
"""

from pathlib import Path

import numpy as np

from docs import claims_results
from docs.page_parts import replace_part
from docs.reference import format_table
from sinklab.cli import config_flags
from sinklab.configs import natural
from sinklab.configs.claims import BASELINE_ROW, NO_FIXED_TOKEN_ROW, SINK_METRIC
from sinklab.metrics.emergence import has_sink
from sinklab.report import claims as report
from sinklab.report.statistics import compute_difference_interval
from sinklab.sweep import results

PAGE = claims_results.RESULTS_DIR / 'emergence.md'
NATURAL_FILE, NATURAL_SIZE = claims_results.RESULTS_DIR / 'claims_natural.json', '0.2m'
STEP_METRIC = 'emergence/step'
# {factor: {value: row}}; the baseline stands in each factor.
FACTORS = {
    'first token': {'not fixed': NO_FIXED_TOKEN_ROW, 'fixed': BASELINE_ROW},
    'learning rate': {
        '0.0025': 'optimization:rate_1e-4_20k',
        '0.005': 'optimization:rate_2e-4_20k',
        '0.01': BASELINE_ROW,
        '0.02': 'optimization:rate_8e-4_20k',
        '0.03': 'hypotheses:rate_3',
    },
    'weight decay': {
        '0': 'optimization:decay_0',
        '0.05': 'optimization:decay_0.01',
        '0.1': 'hypotheses:decay_0.1',
        '0.5': BASELINE_ROW,
        '1': 'hypotheses:decay_1.0',
        '2': 'hypotheses:decay_2.0',
    },
    'batch size': {
        '8': 'optimization:batch_128',
        '8, 6000 steps': 'hypotheses:batch_tokens',
        '16': 'optimization:batch_256',
        '32': BASELINE_ROW,
        '64': 'optimization:batch_1024',
    },
    'steps': {
        '750': 'hypotheses:half_steps',
        '1500': BASELINE_ROW,
        '1500 at a rate of 0.005': 'optimization:rate_2e-4_20k',
        '3000 at a rate of 0.005': 'optimization:rate_2e-4_40k',
    },
}


def format_emergence(runs: list[dict]) -> list[str]:
    """Format how many runs have a sink, and their median step of emergence."""
    sinks = [has_sink(run['end'][SINK_METRIC], run['start'][SINK_METRIC]) for run in runs]
    steps = [run['end'][STEP_METRIC] for run in runs if run['end'].get(STEP_METRIC) is not None]
    return [f'{sum(sinks)} of {len(runs)}', f'{np.median(steps):.0f}' if steps else '']


def format_factors(runs_of_row: dict) -> str:
    """Format Sink_1 and the step of emergence of each value of each factor."""
    rows = []
    baseline = runs_of_row[BASELINE_ROW]
    for factor, values in FACTORS.items():
        for value, row in values.items():
            runs = runs_of_row[row]
            sinks = {seed: run['end'][SINK_METRIC] for seed, run in runs.items() if SINK_METRIC in run['end']}
            difference = ''
            if row != BASELINE_ROW:
                differences = [sinks[seed] - baseline[seed]['end'][SINK_METRIC] for seed in sinks if seed in baseline]
                entry = dict(mean=np.mean(differences), interval=compute_difference_interval(differences))
                difference = report.format_mean_and_interval(entry, 1)
            cells = [
                f'{np.mean([*sinks.values()]):.1f}',
                difference,
                *format_emergence([runs[seed] for seed in sinks]),
            ]
            rows.append([factor, value, *cells])
    headings = [
        'factor',
        'value',
        'Sink_1 (%)',
        'difference from the baseline',
        'with a sink',
        'median step of emergence',
    ]
    return format_table(headings, rows)


def format_natural(claims_data: dict) -> str:
    """Format the settings of configs/natural.py that were trained, and what was measured of them."""
    rows = []
    for name in natural.ROWS:
        runs = [*claims_data['runs'].get(f'natural:{name}', {}).values()]
        if not runs:
            continue
        spec, _ = config_flags.load_spec(f'configs/natural.py:{name}', [], NATURAL_SIZE)
        ends = [run['end'] for run in runs]
        means = {metric: np.mean([end[metric] for end in ends]) for metric in ('alpha/1', 'valid/loss')}
        angles = [run['end']['qk/cos/difference'] for run in runs]
        rows.append(
            [
                f'`{name}`',
                'yes' if spec.data.fixed_position else 'no',
                f'{spec.optimizer.peak_learning_rate:g}',
                f'{spec.optimizer.weight_decay:g}',
                ', '.join(f'{end[SINK_METRIC]:.1f}' for end in ends),
                *format_emergence(runs),
                f'{means["alpha/1"]:.3f}',
                f'{np.mean(angles):+.2f}',
                f'{means["valid/loss"]:.2f}',
            ]
        )
    headings = ['row', 'fixed token', 'rate', 'decay', 'Sink_1 of each seed (%)', 'with a sink', 'median step']
    headings += ['alpha_1', 'cosine', 'loss']
    return format_table(headings, rows)


def update_page(text: str) -> str:
    """Return the page with its generated parts replaced."""
    text = replace_part(
        text, 'emergence: factors', format_factors(claims_results.load_results('quickstart')['runs']).strip()
    )
    return replace_part(text, 'emergence: natural', format_natural(results.read_results(NATURAL_FILE)).strip())


def main() -> None:
    PAGE.write_text(update_page(PAGE.read_text(encoding='utf-8')), encoding='utf-8')


if __name__ == '__main__':
    main()
