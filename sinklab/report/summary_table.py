"""The table of runs, the table of one finished run, and the legend of their columns."""

from collections.abc import Mapping, Sequence

from sinklab.metrics import registry
from sinklab.metrics.emergence import MIN_FINAL_RATE_PERCENT, merge_emergence
from sinklab.metrics.metric import MetricInfo
from sinklab.metrics.registry import HEADLINE_METRIC
from sinklab.report.runs import RunResult, list_run_metrics
from sinklab.report.sweep_table import compute_run_metrics, get_emergence_steps

EXTRA_COLUMN_SENTENCES = {
    'runs': 'Number of finished runs, each with another seed.',
    'emerges': 'Steps between which Sink_1 passes half of its last value (at start: before training; none: its last '
    f'value is at most {MIN_FINAL_RATE_PERCENT:.0f} %, or at most the one before training; 3 of 8: 3 of 8 runs end '
    'with a sink).',
    'first head': 'First head whose mean alpha_1 stays above 0.3; layers and heads count from 0.',
}


def list_run_headings() -> list[str]:
    return ['run', *(info.label for info in list_run_metrics()), 'emerges (step)', 'first head', 'end']


def format_legend(headings: Sequence[str], metric_infos: Sequence[MetricInfo] = ()) -> str:
    """Format the legend of a table as one paragraph that explains its columns.

    Args:
        headings: The headings of the columns, each with its unit in parentheses if there is one. Unknown headings are
            skipped.
        metric_infos: Metrics in addition to those of the metric registry.
    """
    all_infos = *registry.METRIC_INFOS, *list_run_metrics(), *metric_infos
    sentences = {metric_info.label: metric_info.description for metric_info in all_infos} | EXTRA_COLUMN_SENTENCES
    labels = [heading.partition(' (')[0] for heading in headings]
    if HEADLINE_METRIC.label in labels and 'alpha_1' not in labels:
        labels.insert(labels.index(HEADLINE_METRIC.label) + 1, 'alpha_1')
    return '; '.join(f'{name}: {sentences[name].rstrip(".")}' for name in labels if name in sentences)


def make_run_row(run: RunResult) -> dict:
    """Make the row of a run, with its metrics, emergence and outcome.

    A metric that was never recorded is None, and `emergence` is None if the run has no sink.
    """
    emergence = None
    if run.emergence:
        start_step, end_step = run.emergence
        emergence = dict(after=start_step, at=end_step, head=run.find_first_head())
    return dict(
        run=run.name,
        notes=run.notes,
        **{info.name: run.get_last(info.name) for info in list_run_metrics()},
        seed=run.seed,
        row=run.group_name,
        outcome=run.outcome,
        message=run.outcome_record.get('message', ''),
        probes=len(run.run_dir.probe_files),
        emergence=emergence,
    )


def format_run_cells(row: dict) -> list[str]:
    """Format a row of `make_run_row` as cells under the headings of `list_run_headings`."""
    emergence = row['emergence']
    span = merge_emergence([emergence and (emergence['after'], emergence['at'])])
    return [
        row['run'],
        *('-' if row[info.name] is None else info.format_value(row[info.name]) for info in list_run_metrics()),
        '-' if row[HEADLINE_METRIC.name] is None else span.format_cell(),
        'layer {} head {}'.format(*emergence['head']) if emergence and emergence['head'] else '-',
        row['outcome'] + ('' if row['probes'] else ', no probe'),
    ]


def make_metric_table(records: list[dict], published: Mapping[str, object]) -> tuple[list[str], list[list[str]]]:
    """Make a table with a line for each metric of one run.

    Args:
        records: The records of metrics.jsonl.
        published: {metric: published value} of the row of the run.

    Returns:
        The headings and the lines. The column of published values is left out if it is empty.
    """
    last_values = {name: value for record in records for name, value in record.items()}
    headings = ['number', 'value', 'published', 'what it is']
    rows = []
    for info in list_run_metrics():
        if info.name in last_values and info.name not in ('step', 'seconds'):
            value = published.get(info.name)
            published_text = f'{value:.2f} {info.unit}'.rstrip() if isinstance(value, int | float) else ''
            rows.append([info.label, info.format_value(last_values[info.name]), published_text, info.description])
    if not any(row[2] for row in rows):
        headings, *rows = ([*cells[:2], cells[3]] for cells in (headings, *rows))
    return headings, rows


def describe_published(row: Mapping, headings: Sequence[str]) -> str:
    """Describe the source of the published values of a row, and whether the row is published as failing.

    Args:
        row: The content of row.json.
        headings: The headings of the table, as `make_metric_table` returns them.

    Returns:
        A line, or an empty string if the table shows no published value and the row is not published as failing.
    """
    source = f'{row["source"]}, of another model' if row.get('source') else ''
    if (row.get('published') or {}).get('fails'):
        return f'published: fails ({source})' if source else 'published: fails'
    return f'published: {source}' if source and 'published' in headings else ''


def describe_emergence(records: list[dict]) -> str:
    """Describe when the sink of a run emerges, in a few words."""
    metrics = compute_run_metrics(records, None)
    if HEADLINE_METRIC.name not in metrics:
        return 'no probe'
    return merge_emergence([get_emergence_steps(metrics)]).format_sentence()
