"""The summary table of runs, its legend, and the headline sentence of a report."""

from collections.abc import Mapping, Sequence

from sinklab.metrics import registry
from sinklab.metrics.emergence import (
    MIN_FINAL_RATE_PERCENT,
    EmergenceSpan,
    find_emergence,
    merge_emergence,
)
from sinklab.metrics.metric import MetricInfo, format_fixed
from sinklab.metrics.registry import HEADLINE_METRIC
from sinklab.report.emergence import compute_span, find_run_emergence
from sinklab.report.run_groups import RunGroup
from sinklab.report.runs import RUN_METRIC_INFOS, RunResult

MAX_NAMED_GROUPS = 6  # with more run groups, the headline only summarizes them


def format_headline(run_groups: list[RunGroup]) -> str:
    """Format the headline sentence of a report: the sink of each group, or a summary of many groups."""
    if len(run_groups) > MAX_NAMED_GROUPS:
        return format_many_groups(run_groups)
    return '; '.join(f'{run_group.name}: {", ".join(format_group(run_group))}' for run_group in run_groups) + '.'


def format_group(run_group: RunGroup) -> list[str]:
    """Return phrases about a group: its sink rate, its runs without a probe, and its excluded runs."""
    measured_runs = [run for run in run_group.counted_runs if run.get_last(HEADLINE_METRIC.name) is not None]
    unmeasured_runs = [run for run in run_group.counted_runs if run not in measured_runs]
    excluded_runs = [run for run in run_group.runs if run not in run_group.counted_runs]
    texts = [format_sink_rate(run_group, measured_runs)] if measured_runs else []
    return [
        *texts,
        *(f'{format_seed_prefix(run_group, run)}no probe yet' for run in unmeasured_runs),
        *(format_failure(run_group, run) for run in excluded_runs),
    ]


def format_sink_rate(run_group: RunGroup, runs: list[RunResult]) -> str:
    rates = [run.get_last(HEADLINE_METRIC.name) for run in runs]
    if max(rates) < MIN_FINAL_RATE_PERCENT:
        return f'none after {format_steps(runs)} ({format_seeds(runs)})'
    rate_text = f'{rates[0]:.0f} %' if len(runs) == 1 else f'{sum(rates) / len(rates):.0f} % ({format_range(rates)})'
    emergence_text = compute_span(runs).format_sentence('emerging')
    when = f'after {format_steps(runs)} ({format_seeds(runs)}), {emergence_text}'
    return f'{rate_text} of (text, layer, head) have a sink {when}'


def format_range(rates: list[float]) -> str:
    return f'{min(rates):.0f} to {max(rates):.0f}'


def format_steps(runs: list[RunResult]) -> str:
    last_steps = sorted({run.records[-1]['step'] for run in runs})
    return f'{last_steps[0]} steps' if len(last_steps) == 1 else f'{last_steps[0]} to {last_steps[-1]} steps'


def format_seeds(runs: list[RunResult]) -> str:
    seed_numbers = [run.seed for run in runs if run.seed is not None]
    text = f'{len(runs)} seeds' if len(runs) > 1 else f'seed {seed_numbers[0]}' if seed_numbers else 'one run'
    return ', '.join([text, *dict.fromkeys(run.outcome for run in runs if run.outcome != 'done')])


def format_seed_prefix(run_group: RunGroup, run: RunResult) -> str:
    return f'seed {run.seed} ' if len(run_group.runs) > 1 and run.seed is not None else ''


def format_failure(run_group: RunGroup, run: RunResult) -> str:
    return f'{format_seed_prefix(run_group, run)}{run.outcome} at step {run.outcome_record.get("step", 0)}'


def format_many_groups(run_groups: list[RunGroup]) -> str:
    """Summarize many groups: the lowest and the highest mean sink rate, and counts of exceptions."""
    rates = {}
    for run_group in run_groups:
        if group_rates := [
            rate for run in run_group.counted_runs if (rate := run.get_last(HEADLINE_METRIC.name)) is not None
        ]:
            rates[run_group.name] = sum(group_rates) / len(group_rates)
    runs = [run for run_group in run_groups for run in run_group.runs]
    texts = [f'{len(runs)} runs of {len(run_groups)} rows']
    if rates:
        lowest, highest = min(rates, key=rates.get), max(rates, key=rates.get)
        texts[0] += (
            f': from {rates[lowest]:.0f} % of (text, layer, head) with a sink ({lowest}) '
            f'to {rates[highest]:.0f} % ({highest})'
        )
        num_without_sink = sum(rate < MIN_FINAL_RATE_PERCENT for rate in rates.values())
        texts.append(f'{num_without_sink} of {len(rates)} rows have none')
    outcomes = [run.outcome for run in runs]
    texts += [f'{outcomes.count(outcome)} {outcome}' for outcome in dict.fromkeys(outcomes) if outcome != 'done']
    num_without_probe = sum(run.get_last(HEADLINE_METRIC.name) is None for run in runs)
    return '; '.join(texts + ([f'{num_without_probe} without a probe'] if num_without_probe else [])) + '.'


RUN_HEADINGS = ('run', *(number.label for number in RUN_METRIC_INFOS), 'emerges (step)', 'first head', 'end')
MAX_NAMED_ROWS = 6  # with more rows, the sentence leaves out their values
EXTRA_COLUMN_SENTENCES = {
    'runs': 'Number of finished runs, each with another seed.',
    'emerges': 'Steps between which Sink_1 passes half of its last value (at start: before '
    f'training; none: its last value is below {MIN_FINAL_RATE_PERCENT:.0f} %; 3 of 8: 3 of 8 runs end with a sink).',
    'first head': 'First head whose mean alpha_1 stays above 0.3.',
}


def format_legend(headings: Sequence[str], metric_infos: Sequence[MetricInfo] = ()) -> str:
    """Format the legend of a table as one paragraph that explains its columns.

    Args:
        headings: The headings of the columns, each with its unit in parentheses if there is one. Unknown headings are
            skipped.
        metric_infos: Metrics in addition to those of the metric registry.
    """
    all_infos = *registry.METRIC_INFOS, *RUN_METRIC_INFOS, *metric_infos
    sentences = {metric_info.label: metric_info.description for metric_info in all_infos} | EXTRA_COLUMN_SENTENCES
    labels = [heading.partition(' (')[0] for heading in headings]
    if HEADLINE_METRIC.label in labels and 'alpha_1' not in labels:
        labels.insert(labels.index(HEADLINE_METRIC.label) + 1, 'alpha_1')
    return '; '.join(f'{name}: {lowercase_first_letter(sentences[name])}' for name in labels if name in sentences)


def lowercase_first_letter(sentence: str) -> str:
    """Return a sentence without its period and with a lowercase first letter, to follow a colon.

    The first letter stays as it is if no lowercase letter follows, as in an abbreviation.
    """
    first, rest = sentence.rstrip('.')[:1], sentence.rstrip('.')[1:]
    return (first.lower() if rest[:1].islower() else first) + rest


def make_run_table(runs: list[RunResult]) -> list[dict]:
    """Make a row for each run, with its metrics, emergence and outcome.

    A metric that was never recorded is None, and `emergence` is None if the run has no sink. `earlier_steps` has the
    step of each metric that was not recorded at the last step, as in a run that has not finished.
    """
    return [make_run_row(run) for run in runs]


def make_run_row(run: RunResult) -> dict:
    run_emergence = find_run_emergence(run)
    emergence_fields = run_emergence and dict(
        after=run_emergence.start_step, at=run_emergence.end_step, head=run_emergence.first_head
    )
    return dict(
        run=run.name,
        notes=run.notes,
        **{metric_info.name: run.get_last(metric_info.name) for metric_info in RUN_METRIC_INFOS},
        earlier_steps=find_earlier_steps(run),
        seed=run.seed,
        row=run.group_name,
        outcome=run.outcome,
        message=run.outcome_record.get('message', ''),
        probes=len(run.run_dir.probe_files),
        emergence=emergence_fields,
    )


def find_earlier_steps(run: RunResult) -> dict[str, int]:
    """Return {metric: step at which it was last recorded} for metrics not recorded at the last step."""
    last_step, last_steps = run.get_last('step'), {}
    for metric_info in RUN_METRIC_INFOS:
        steps, _ = run.get_curve(metric_info.name)
        if steps and steps[-1] < last_step:
            last_steps[metric_info.name] = steps[-1]
    return last_steps


def format_run_cells(row: dict) -> list[str]:
    """Format a row of `make_run_table` as cells under RUN_HEADINGS."""
    return [
        row['run'],
        *(format_metric_cell(row, metric_info) for metric_info in RUN_METRIC_INFOS),
        *format_end_cells(row),
    ]


def format_metric_cell(row: dict, metric_info: MetricInfo) -> str:
    """Format the last value of a metric, with its step if it is earlier than the last step of the run."""
    value, earlier_step = row[metric_info.name], row['earlier_steps'].get(metric_info.name)
    if value is None:
        return '-'
    return metric_info.format_value(value) + ('' if earlier_step is None else f' (step {earlier_step})')


def format_end_cells(row: dict) -> list[str]:
    """Format the last cells of a run: the steps of emergence, the first head, and the outcome."""
    emergence_fields, outcome_text = row['emergence'], row['outcome'] + ('' if row['probes'] else ', no probe')
    if not emergence_fields:
        return [
            '-' if row[HEADLINE_METRIC.name] is None else merge_emergence([None]).format_cell(),
            '-',
            outcome_text,
        ]
    head_text = 'layer {} head {}'.format(*emergence_fields['head']) if emergence_fields['head'] else '-'
    return [
        merge_emergence([(emergence_fields['after'], emergence_fields['at'])]).format_cell(),
        head_text,
        outcome_text,
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
    metric_infos = [
        metric_info
        for metric_info in RUN_METRIC_INFOS
        if metric_info.name in last_values and metric_info.name not in ('step', 'seconds')
    ]
    rows = []
    for metric_info in metric_infos:
        published_value = published.get(metric_info.name)
        published_text = (
            f'{published_value:.2f} {metric_info.unit}'.rstrip() if isinstance(published_value, int | float) else ''
        )
        rows.append(
            [
                metric_info.label,
                metric_info.format_value(last_values[metric_info.name]),
                published_text,
                metric_info.description,
            ]
        )
    headings = ['number', 'value', 'published', 'what it is']
    if any(published_text for _, _, published_text, _ in rows):
        return headings, rows
    return [*headings[:2], headings[3]], [[label, value, sentence] for label, value, _, sentence in rows]


def describe_published(row: Mapping, headings: Sequence[str]) -> str:
    """Describe the source of the published values of a row, and whether the row is published as failing.

    Args:
        row: The content of row.json.
        headings: The headings of the table, as `make_metric_table` returns them.

    Returns:
        A line, or an empty string if the table shows no published value and the row is not published as failing.
    """
    is_published_failure = bool((row.get('published') or {}).get('fails'))
    sources = [f'{row["source"]}, of another model'] if row.get('source') else []
    if is_published_failure:
        return f'published: fails{"".join(f" ({source_text})" for source_text in sources)}'
    return ''.join(f'published: {source_text}' for source_text in sources) if 'published' in headings else ''


def format_steps_and_seconds(record: dict) -> str:
    return f'{record["step"]} steps in {record["seconds"]:.0f} s'


def summarize_sink(records: list[dict]) -> tuple[float | None, str]:
    """Return the final Sink_1 of a run, in percent, and a phrase about its emergence.

    Without a probe, Sink_1 is None.
    """
    probe_records = [record for record in records if HEADLINE_METRIC.name in record]
    if not probe_records:
        return None, 'no probe'
    rates = [record[HEADLINE_METRIC.name] for record in probe_records]
    emergence_steps = find_emergence([record['step'] for record in probe_records], rates)
    return rates[-1], merge_emergence([emergence_steps]).format_sentence()


def summarize_sink_of_rows(
    rows: Sequence[Mapping], spans: Mapping[str, EmergenceSpan]
) -> dict[str, tuple[float | None, str]]:
    """Return the mean final Sink_1 and a phrase about its emergence for each row of a sweep.

    Args:
        rows: The entries of `sweep_table.make_sweep_table`.
        spans: The result of `sweep_table.compute_spans`.

    Returns:
        {row: (mean Sink_1 in percent, phrase)}. Without a probe, Sink_1 is None and the phrase is the outcome.
    """
    summaries = {}
    for row in rows:
        name, rate = row['row'], row['ours'].get(HEADLINE_METRIC.name)
        summaries[name] = (None, row['outcome']) if rate is None else (rate['mean'], spans[name].format_sentence())
    return summaries


def format_observations(observed: Mapping[str, tuple[float | None, str]], page: object = None) -> str:
    """Format one sentence with the observed Sink_1 of rows, and the path of the HTML report.

    Args:
        observed: {row: (Sink_1 in percent or None, phrase about its emergence)}.
        page: The path of the HTML report; None if there is none.
    """
    texts = []
    if len(observed) <= MAX_NAMED_ROWS:
        row_texts = [
            f'{"unknown" if rate is None else f"{format_fixed(rate, 1)} %"} for {name} ({words})'
            for name, (rate, words) in observed.items()
        ]
        texts.append(f'Seen: {HEADLINE_METRIC.label} is {join_with_and(row_texts)}')
    return '; '.join([*texts, *([f'page: {page}'] if page else [])])


def join_with_and(words: Sequence[str]) -> str:
    return ' and '.join(filter(None, [', '.join(words[:-1]), words[-1]]))
