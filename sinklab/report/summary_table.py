"""The summary table of runs, its legend, and the headline sentence of a report."""

from collections.abc import Mapping, Sequence

from sinklab.metrics import registry
from sinklab.metrics.emergence import MIN_FINAL_RATE_PERCENT, EmergenceSpan, find_emergence, merge_emergence
from sinklab.metrics.metric import MetricInfo, format_fixed
from sinklab.metrics.registry import HEADLINE_METRIC
from sinklab.report.run_groups import RunGroup
from sinklab.report.runs import RUN_METRIC_INFOS, RunResult, compute_span

MAX_NAMED_GROUPS = 6  # with more run groups, the headline only summarizes them


def format_headline(run_groups: list[RunGroup]) -> str:
    """Format the headline sentence of a report: the sink of each group, or a summary of many groups."""
    if len(run_groups) > MAX_NAMED_GROUPS:
        return format_many_groups(run_groups)
    return '; '.join(f'{run_group.name}: {", ".join(format_group(run_group))}' for run_group in run_groups) + '.'


def format_group(run_group: RunGroup) -> list[str]:
    """Return phrases about a group: its sink rate, its runs without a probe, and its excluded runs."""
    counted_runs = run_group.counted_runs
    measured_runs = [run for run in counted_runs if run.get_last(HEADLINE_METRIC.name) is not None]
    texts = [format_sink_rate(measured_runs)] if measured_runs else []
    for run in run_group.runs:
        prefix = f'seed {run.seed} ' if len(run_group.runs) > 1 and run.seed is not None else ''
        if run not in counted_runs:
            texts.append(f'{prefix}{run.outcome} at step {run.outcome_record.get("step", 0)}')
        elif run not in measured_runs:
            texts.append(f'{prefix}no probe yet')
    return texts


def format_sink_rate(runs: list[RunResult]) -> str:
    """Format the mean Sink_1 of runs that have a probe, their steps, seeds and the emergence of their sinks."""
    rates = [run.get_last(HEADLINE_METRIC.name) for run in runs]
    last_steps = sorted({run.records[-1]['step'] for run in runs})
    steps_text = ' to '.join(str(step) for step in dict.fromkeys([last_steps[0], last_steps[-1]]))
    when = f'after {steps_text} steps ({format_seeds(runs)})'
    if max(rates) < MIN_FINAL_RATE_PERCENT:
        return f'none {when}'
    range_text = f' ({min(rates):.0f} to {max(rates):.0f})' if len(runs) > 1 else ''
    emergence_text = compute_span(runs).format_sentence('emerging')
    mean = sum(rates) / len(rates)
    return f'{mean:.0f} %{range_text} of (text, layer, head) have a sink {when}, {emergence_text}'


def format_seeds(runs: list[RunResult]) -> str:
    seed = runs[0].seed
    text = f'{len(runs)} seeds' if len(runs) > 1 else 'one run' if seed is None else f'seed {seed}'
    return ', '.join([text, *dict.fromkeys(run.outcome for run in runs if run.outcome != 'done')])


def format_many_groups(run_groups: list[RunGroup]) -> str:
    """Summarize many groups: the lowest and the highest mean sink rate, and counts of exceptions."""
    rates = {}
    for run_group in run_groups:
        group_rates = [run.get_last(HEADLINE_METRIC.name) for run in run_group.counted_runs]
        if group_rates := [rate for rate in group_rates if rate is not None]:
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
    last_steps = {info.name: steps[-1] for info in RUN_METRIC_INFOS if (steps := run.get_curve(info.name)[0])}
    emergence = None
    if run.emergence:
        start_step, end_step = run.emergence
        emergence = dict(after=start_step, at=end_step, head=run.find_first_head())
    return dict(
        run=run.name,
        notes=run.notes,
        **{info.name: run.get_last(info.name) for info in RUN_METRIC_INFOS},
        earlier_steps={name: step for name, step in last_steps.items() if step < run.records[-1]['step']},
        seed=run.seed,
        row=run.group_name,
        outcome=run.outcome,
        message=run.outcome_record.get('message', ''),
        probes=len(run.run_dir.probe_files),
        emergence=emergence,
    )


def format_run_cells(row: dict) -> list[str]:
    """Format a row of `make_run_table` as cells under RUN_HEADINGS."""
    emergence, head_text = row['emergence'], '-'
    span_text = '-' if row[HEADLINE_METRIC.name] is None else merge_emergence([None]).format_cell()
    if emergence:
        span_text = merge_emergence([(emergence['after'], emergence['at'])]).format_cell()
        head_text = 'layer {} head {}'.format(*emergence['head']) if emergence['head'] else '-'
    return [
        row['run'],
        *(format_metric_cell(row, info) for info in RUN_METRIC_INFOS),
        span_text,
        head_text,
        row['outcome'] + ('' if row['probes'] else ', no probe'),
    ]


def format_metric_cell(row: dict, metric_info: MetricInfo) -> str:
    """Format the last value of a metric, with its step if it is earlier than the last step of the run."""
    value, earlier_step = row[metric_info.name], row['earlier_steps'].get(metric_info.name)
    if value is None:
        return '-'
    return metric_info.format_value(value) + ('' if earlier_step is None else f' (step {earlier_step})')


def make_metric_table(records: list[dict], published: Mapping[str, object]) -> tuple[list[str], list[list[str]]]:
    """Make a table with a line for each metric of one run.

    Args:
        records: The records of metrics.jsonl.
        published: {metric: published value} of the row of the run.

    Returns:
        The headings and the lines. The column of published values is left out if it is empty.
    """
    last_values = {name: value for record in records for name, value in record.items()}
    headings, rows = ['number', 'value', 'published', 'what it is'], []
    for info in RUN_METRIC_INFOS:
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


def format_steps_and_seconds(record: dict) -> str:
    return f'{record["step"]} steps in {record["seconds"]:.0f} s'


def summarize_sink(records: list[dict]) -> tuple[float | None, str]:
    """Return the final Sink_1 of a run, in percent, and a phrase about its emergence.

    Without a probe, Sink_1 is None.
    """
    steps_and_rates = [
        (record['step'], record[HEADLINE_METRIC.name]) for record in records if HEADLINE_METRIC.name in record
    ]
    if not steps_and_rates:
        return None, 'no probe'
    steps, rates = zip(*steps_and_rates, strict=True)
    return rates[-1], merge_emergence([find_emergence(steps, rates)]).format_sentence()


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
