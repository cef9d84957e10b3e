"""The table of a sweep: mean and spread over seeds, published values, and paired differences."""

import dataclasses
import math
from typing import Any

import numpy as np

from sinklab.configs.publications import NOT_MEASURED
from sinklab.metrics.emergence import estimate_step, find_emergence, merge_emergence
from sinklab.metrics.metric import MetricInfo, format_fixed
from sinklab.metrics.registry import HEADLINE_METRIC, METRIC_INFOS, VALID_LOSS, find_metric_info
from sinklab.report.statistics import MIN_SAMPLES, compute_mean_interval
from sinklab.run_dir import RunDir

LOSS_METRIC = VALID_LOSS.name
MAX_NAMED_ROWS = 6
FEW_SEEDS_SENTENCE = f' Fewer than {MIN_SAMPLES} seeds (n) say little.'
EMERGENCE_METRIC = 'emergence/step'  # the midpoint between the two probes between which the sink of a run emerges
# The steps of these two probes. The start is missing if the sink is there at the first probe.
EMERGENCE_START_METRIC, EMERGENCE_END_METRIC = 'emergence/after', 'emergence/at'
EMERGENCE_INFO = MetricInfo(EMERGENCE_METRIC, 'emerges', 'Step at which the sink emerges.', 'step', digits=0)
# A run fails if its loss is above this fraction of log V. The highest published loss of a run that trains is
# 0.50 log V, with a vocabulary of 50,432 ids.
FAILING_LOSS_FRACTION = 0.6


@dataclasses.dataclass(frozen=True)
class RowResult:
    """The results of one row of a sweep over all its seeds."""

    row_info: dict  # config, row, diff, published, source
    outcomes: dict[int | str, str]  # {seed, or the name of a run: done, diverged, refused, crashed or to do}
    reasons: dict[int | str, str]  # {seed: reason of the outcome}, for outcomes that have a reason
    # {seed: metrics}, of the runs that are done. A report without such runs uses unfinished ones.
    metrics_by_seed: dict[int | str, dict[str, float]]


def read_last_metrics(run_dir: RunDir) -> dict[str, float]:
    """Read the last value of every metric of a run, and compute its emergence and whether it fails.

    Raises:
        DamagedFileError: config.json is damaged.
    """
    return compute_run_metrics(run_dir.read_records(), run_dir.read_json('config')['model']['vocabulary'])


def compute_run_metrics(records: list[dict], vocabulary: int | None) -> dict[str, float]:
    """Collect the last value of every metric, and add the steps of emergence and the metric `fails`.

    Args:
        records: The records of metrics.jsonl, by step.
        vocabulary: The size of the vocabulary. None: unknown, and the result has no `fails`.

    Returns:
        {metric: value}. The steps of emergence are present only if the run ends with a sink. `fails` is 1 for a run
        that failed and 0 otherwise.
    """
    metrics = {name: value for record in records for name, value in record.items()}
    steps_and_rates = [
        (record['step'], record[HEADLINE_METRIC.name]) for record in records if HEADLINE_METRIC.name in record
    ]
    if emergence_steps := steps_and_rates and find_emergence(*zip(*steps_and_rates, strict=True)):
        start_step, end_step = emergence_steps
        metrics |= {EMERGENCE_METRIC: estimate_step(start_step, end_step), EMERGENCE_END_METRIC: end_step}
        if start_step is not None:
            metrics[EMERGENCE_START_METRIC] = start_step
    if LOSS_METRIC in metrics and vocabulary:
        metrics['fails'] = float(has_failed(metrics[LOSS_METRIC], vocabulary))
    return metrics


def has_failed(loss: float, vocabulary: int) -> bool:
    """Return whether the final validation loss means failure: it is not finite, or above 0.6 log V."""
    return not loss <= FAILING_LOSS_FRACTION * math.log(vocabulary)


def make_sweep_table(results: list[RowResult]) -> list[dict]:
    """Make the entries of the table of a sweep.

    Args:
        results: The results of each row. The first one is the baseline.

    Returns:
        An entry for each row: the fields of `row_info`, `outcome` as text, `seeds` (the outcomes by seed), `reasons`,
        `ours` ({metric: mean, sd and n}), `difference` from the baseline (None for the baseline) and `span`, the
        EmergenceSpan of all seeds (None without a probe).
    """
    baseline, *others = results
    return [make_row(baseline, None), *(make_row(result, baseline) for result in others)]


def make_row(result: RowResult, baseline: RowResult | None) -> dict:
    probed_runs = [metrics for metrics in result.metrics_by_seed.values() if HEADLINE_METRIC.name in metrics]
    return dict(
        result.row_info,
        outcome=format_outcome(list_outcomes(result), bool(result.row_info['published'].get('fails'))),
        seeds=result.outcomes,
        reasons=result.reasons,
        ours={
            name: summarize_values(list(values.values()))
            for name in list_compared_metrics(result)
            if (values := get_values(result, name))
        },
        difference=baseline and dict({'from': baseline.row_info['row']}, **compute_differences(result, baseline)),
        span=merge_emergence(list(map(get_emergence_steps, probed_runs))) if probed_runs else None,
    )


def list_standard_metrics() -> list[str]:
    return [info.name for info in METRIC_INFOS if info.in_sweep]


def list_compared_metrics(result: RowResult) -> list[str]:
    """List the metrics to compare: standard ones, other published ones of the row, emergence and loss."""
    published = [name for name in result.row_info['published'] if name != 'fails']  # part of the outcome column
    return list(dict.fromkeys([*list_standard_metrics(), *published, EMERGENCE_METRIC, LOSS_METRIC]))


def get_values(result: RowResult, metric_name: str) -> dict[int | str, float]:
    return {seed: metrics[metric_name] for seed, metrics in result.metrics_by_seed.items() if metric_name in metrics}


def compute_differences(result: RowResult, baseline: RowResult) -> dict[str, dict]:
    """Compute the paired differences between a row and the baseline for Sink_1 and the loss.

    Returns:
        {metric: mean, sd, n, and the 95 % confidence interval of the mean}, over the seeds that both rows have.
    """
    stats = {}
    for name in (HEADLINE_METRIC.name, LOSS_METRIC):
        row_values, baseline_values = get_values(result, name), get_values(baseline, name)
        if paired := [row_values[seed] - baseline_values[seed] for seed in row_values if seed in baseline_values]:
            stats[name] = summarize_values(paired) | dict(interval=compute_mean_interval(paired))
    return stats


def summarize_values(values: list[float]) -> dict[str, Any]:
    """Compute the mean, the sample standard deviation (None for one value) and the number of values."""
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return dict(mean=float(np.mean(values)), sd=sd, n=len(values))


def list_outcomes(result: RowResult) -> list[str]:
    """List the outcome of each seed.

    In a row that is published as failing, a run that is done counts as `failed` if its metric `fails` is 1.
    """
    fails_of_seed = get_values(result, 'fails') if result.row_info['published'].get('fails') else {}
    return ['failed' if fails_of_seed.get(seed) else run_outcome for seed, run_outcome in result.outcomes.items()]


def format_outcome(outcomes: list[str], is_published_failure: bool) -> str:
    """Format the count of each outcome, and whether the row is published as failing."""
    counts = [f'{outcome} {outcomes.count(outcome)}/{len(outcomes)}' for outcome in dict.fromkeys(outcomes)]
    return ', '.join([*counts, 'published: fails'] if is_published_failure else counts)


def find_column_info(name: str) -> MetricInfo | None:
    """Return the label, unit and digits of a metric, or None if the metric is unknown."""
    return {LOSS_METRIC: VALID_LOSS, EMERGENCE_METRIC: EMERGENCE_INFO}.get(name) or find_metric_info(name)


def get_short_label(name: str) -> str:
    """Return the short label of a metric, for lists of metrics and for comparisons of claims."""
    metric_info = find_column_info(name)
    return 'loss' if name == LOSS_METRIC else metric_info.label if metric_info else name


def get_heading(name: str) -> str:
    """Return the label of a metric with its unit."""
    metric_info = find_column_info(name)
    return metric_info.axis_label if metric_info else name


def get_emergence_steps(metrics: dict[str, Any]) -> tuple[int | None, int] | None:
    if EMERGENCE_END_METRIC not in metrics:
        return None
    return metrics.get(EMERGENCE_START_METRIC), metrics[EMERGENCE_END_METRIC]


def format_published(published: dict) -> str:
    """Format published values as one line of text, which says what is not measured here."""
    texts = []
    for name, value in published.items():
        number = '' if value is True else f' {format_number(value)}'
        texts.append(f'{get_short_label(name)}{number}{" (not measured here)" if name in NOT_MEASURED else ""}')
    return '  '.join(texts)


def format_number(value: object) -> str:
    return format_fixed(value, 2) if isinstance(value, float) else str(value)


def format_table_cells(rows: list[dict]) -> tuple[list[str], list[list[str]]]:
    """Format the entries of `make_sweep_table` as headings and cells, without empty columns."""
    columns = {
        'row': [row['row'] for row in rows],
        'runs': [str(list(row['seeds'].values()).count('done')) for row in rows],
    }
    for name in list_shown_metrics(rows):
        if name == EMERGENCE_METRIC:
            cells = [row['span'].format_cell() if row['span'] else '' for row in rows]
        else:
            cells = [format_cell(row['ours'].get(name), row['published'].get(name)) for row in rows]
        columns[get_heading(name)] = cells
        if name == HEADLINE_METRIC.name:
            heading = f'{HEADLINE_METRIC.label} - {rows[0]["row"]} ({HEADLINE_METRIC.unit})'
            columns[heading] = [format_cell((row['difference'] or {}).get(name)) for row in rows]
    columns['end'] = [format_brief_outcome(row) for row in rows]
    nonempty_columns = {heading: cells for heading, cells in columns.items() if any(cells)}
    return list(nonempty_columns), [list(cells) for cells in zip(*nonempty_columns.values(), strict=True)]


def format_headline(rows: list[dict]) -> str:
    """Format the Sink_1 of each row as one sentence; of many rows, that of the lowest and of the highest."""
    rates = {row['row']: row['ours'][HEADLINE_METRIC.name] for row in rows if HEADLINE_METRIC.name in row['ours']}
    if not rates:
        return 'No run has a probe.'
    names = list(rates)
    if len(rates) > MAX_NAMED_ROWS:
        by_rate = sorted(rates, key=lambda name: rates[name]['mean'])
        names = [by_rate[0], by_rate[-1]]
    texts = [f'{rates[name]["mean"]:.1f} % for {name} (n = {rates[name]["n"]})' for name in names]
    rates_text = f'from {" to ".join(texts)}' if len(names) < len(rates) else ', '.join(texts)
    has_few_seeds = min(rates[name]['n'] for name in names) < MIN_SAMPLES
    return f'{HEADLINE_METRIC.label} is {rates_text}.{FEW_SEEDS_SENTENCE if has_few_seeds else ""}'


def format_brief_outcome(row: dict) -> str:
    """Return the outcome of a row, shortened to `done` if all of its runs are done."""
    return 'done' if row['outcome'] == f'done {len(row["seeds"])}/{len(row["seeds"])}' else row['outcome']


def list_shown_metrics(rows: list[dict]) -> list[str]:
    """List the metrics to show: the compared ones, other metrics of some row, emergence and loss."""
    last = EMERGENCE_METRIC, LOSS_METRIC
    names = dict.fromkeys([*list_standard_metrics(), *(name for row in rows for name in row['ours'])])
    return [*(name for name in names if name not in last), *last]


def format_cell(stats: dict | None, published: object = None) -> str:
    """Format a cell as `mean ± standard deviation (published value)`."""
    spread_text = f' ± {stats["sd"]:.2f}' if stats and stats['sd'] is not None else ''
    own_text = f'{format_fixed(stats["mean"], 2)}{spread_text}' if stats else ''
    return f'{own_text or "-"} ({format_number(published)})' if published is not None else own_text
