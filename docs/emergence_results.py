"""Tables of docs/results/emergence.md, from the runs of docs/results/claims.json.

python -m docs.emergence_results
"""

import numpy as np

from docs import claims_results
from docs.page_parts import replace_part
from docs.reference import format_table
from sinklab.cli import claims as claims_command
from sinklab.cli import config_flags
from sinklab.config.spec import Spec
from sinklab.configs.claims import BASELINE_ROW, NO_FIXED_TOKEN_ROW, SINK_METRIC
from sinklab.configs.hypotheses import HALF_RATE_ROW, NATURAL_ROWS
from sinklab.metrics.emergence import has_sink
from sinklab.report.claims import format_mean_and_interval
from sinklab.report.statistics import compute_difference_interval

PAGE = claims_results.RESULTS_DIR / 'emergence.md'
SIZE = 'quickstart'
# Rows that differ from the baseline in one factor. Steps are compared at half the learning rate as well.
FACTOR_ROWS = (
    BASELINE_ROW,
    NO_FIXED_TOKEN_ROW,
    'optimization:rate_1e-4_20k',
    HALF_RATE_ROW,
    'optimization:rate_8e-4_20k',
    'hypotheses:rate_3',
    'optimization:decay_0',
    'optimization:decay_0.01',
    'hypotheses:decay_0.1',
    'hypotheses:decay_1.0',
    'hypotheses:decay_2.0',
    'optimization:batch_128',
    'hypotheses:batch_tokens',
    'optimization:batch_256',
    'optimization:batch_1024',
    'hypotheses:half_steps',
    'optimization:rate_2e-4_40k',
)


def load_spec(row: str) -> Spec:
    return config_flags.load_spec(claims_command.get_config_path(row), [], SIZE)[0]


def format_setting(spec: Spec) -> list[str]:
    """Format whether the first token is fixed, and the rate, decay, batch size and steps of the optimizer."""
    optimizer = spec.optimizer
    numbers = optimizer.peak_learning_rate, optimizer.weight_decay, optimizer.batch_size, optimizer.steps
    return ['yes' if spec.data.fixed_position else 'no', *(f'{number:g}' for number in numbers)]


def format_emergence(runs: list[dict]) -> list[str]:
    """Format how many runs have a sink, and the median step of emergence of these."""
    sinks = [has_sink(run['end'][SINK_METRIC], run['start'][SINK_METRIC]) for run in runs]
    steps = [run['end']['emergence/step'] for run, sink in zip(runs, sinks, strict=True) if sink]
    return [f'{sum(sinks)} of {len(runs)}', f'{np.median(steps):.0f}' if steps else '']


def format_factors(runs_of_row: dict) -> str:
    """Format Sink_1 and the step of emergence of the rows that differ from the baseline in one factor."""
    baseline = runs_of_row[BASELINE_ROW]
    rows = []
    for row in FACTOR_ROWS:
        runs = {seed: run for seed, run in runs_of_row[row].items() if SINK_METRIC in run['end']}
        sinks = {seed: run['end'][SINK_METRIC] for seed, run in runs.items()}
        difference = ''
        if row != BASELINE_ROW:
            differences = [sinks[seed] - baseline[seed]['end'][SINK_METRIC] for seed in sinks if seed in baseline]
            interval = compute_difference_interval(differences)
            difference = format_mean_and_interval(dict(mean=np.mean(differences), interval=interval), 1)
        mean = f'{np.mean([*sinks.values()]):.1f}'
        rows.append([*format_setting(load_spec(row)), mean, difference, *format_emergence([*runs.values()])])
    headings = ['fixed token', 'rate', 'decay', 'batch size', 'steps', 'Sink_1 (%)', 'difference']
    return format_table([*headings, 'with a sink', 'step'], rows)


def format_values(values: list[float], digits: int, lowest: float = -np.inf) -> str:
    """Format the mean, and its interval from `lowest` on if there are enough values and they differ."""
    interval = compute_difference_interval(values) if np.ptp(values) else None
    limits = f' [{max(interval[0], lowest):.{digits}f}, {interval[1]:.{digits}f}]' if interval else ''
    return f'{np.mean(values):.{digits}f}{limits}'


def list_runs(runs_of_row: dict, name: str) -> list[dict]:
    return [run for run in runs_of_row[f'hypotheses:{name}'].values() if SINK_METRIC in run['end']]


def format_natural(runs_of_row: dict) -> str:
    """Format the settings from the optimizer of the paper to that of the quickstart, and whether a sink emerges."""
    rows = []
    for name, (words, _) in NATURAL_ROWS.items():
        runs = list_runs(runs_of_row, name)
        spec = load_spec(f'hypotheses:{name}')
        tokens = spec.optimizer.steps * spec.optimizer.batch_size * spec.data.length
        minutes = min(run['end']['seconds'] for run in runs if 'seconds' in run['end']) / 60
        sinks = format_values([run['end'][SINK_METRIC] for run in runs], 1, lowest=0)
        rows.append([f'`{name}`: {words}', f'{tokens / 1e6:.0f}', f'{minutes:.0f}', sinks, *format_emergence(runs)])
    headings = ['row', 'million tokens', 'minutes', 'Sink_1 (%)', 'with a sink', 'step']
    return format_table(headings, rows)


def format_trends(runs_of_row: dict) -> str:
    """Format what changes before a sink emerges, at the end of the runs of the same settings."""
    metrics = {
        'alpha_1': ('alpha/1', 3),
        'cosine': ('qk/cos/difference', 2),
        'first value': ('norm/value/ratio', 2),
        'loss': ('valid/loss', 2),
    }
    rows = []
    for name in NATURAL_ROWS:
        ends = [run['end'] for run in list_runs(runs_of_row, name)]
        values = [format_values([end[metric] for end in ends], digits) for metric, digits in metrics.values()]
        rows.append([f'`{name}`', *values])
    return format_table(['row', *metrics], rows)


def update_page(text: str) -> str:
    """Return the page with its generated parts replaced."""
    runs_of_row = claims_results.load_results(SIZE)['runs']
    text = replace_part(text, 'emergence: natural', format_natural(runs_of_row))
    text = replace_part(text, 'emergence: trends', format_trends(runs_of_row))
    return replace_part(text, 'emergence: factors', format_factors(runs_of_row))


def main() -> None:
    PAGE.write_text(update_page(PAGE.read_text(encoding='utf-8')), encoding='utf-8')


if __name__ == '__main__':
    main()
