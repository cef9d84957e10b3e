"""What a report says first: one sentence, made of the table by rule."""

from sinklab.measure.emergence import MIN_FINAL_RATE_PERCENT
from sinklab.measure.table import HEADLINE_METRIC
from sinklab.report.arms import RunGroup
from sinklab.report.emergence import compute_span as emergence_span
from sinklab.report.runs import RunResult

MAX_NAMED_GROUPS = 6  # arms that are named each


def format_headline(run_groups: list[RunGroup]) -> str:
    if len(run_groups) > MAX_NAMED_GROUPS:
        return format_many_groups(run_groups)
    return '; '.join(f'{run_group.name}: {", ".join(format_group(run_group))}' for run_group in run_groups) + '.'


def format_group(run_group: RunGroup) -> list[str]:
    """What is to be said of it: its sink, and what of its runs has gone otherwise."""
    measured_runs = [run for run in run_group.counted_runs if run.get_last(HEADLINE_METRIC.name) is not None]
    unmeasured_runs = [run for run in run_group.counted_runs if run not in measured_runs]
    excluded_runs = [run for run in run_group.runs if run not in run_group.counted_runs]
    texts = [format_sink_rate(run_group, measured_runs)] if measured_runs else []
    return [*texts, *(f'{format_seed_prefix(run_group, run)}no probe yet' for run in unmeasured_runs), *(format_failure(run_group, run) for run in excluded_runs)]


def format_sink_rate(run_group: RunGroup, runs: list[RunResult]) -> str:
    rates = [run.get_last(HEADLINE_METRIC.name) for run in runs]
    if max(rates) < MIN_FINAL_RATE_PERCENT:
        return f'none after {format_steps(runs)} ({format_seeds(runs)})'
    rate_text = f'{rates[0]:.0f} %' if len(runs) == 1 else f'{sum(rates) / len(rates):.0f} % ({format_range(rates)})'
    emergence_text = emergence_span(runs).format_sentence('emerging')
    return f'{rate_text} of (text, layer, head) have a sink after {format_steps(runs)} ({format_seeds(runs)}), {emergence_text}'


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
    """The ends of the order by the mean rate, and how many are neither."""
    rates = {}
    for run_group in run_groups:
        if group_rates := [rate for run in run_group.counted_runs if (rate := run.get_last(HEADLINE_METRIC.name)) is not None]:
            rates[run_group.name] = sum(group_rates) / len(group_rates)
    runs = [run for run_group in run_groups for run in run_group.runs]
    texts = [f'{len(runs)} runs of {len(run_groups)} rows']
    if rates:
        lowest, highest = min(rates, key=rates.get), max(rates, key=rates.get)
        texts[0] += (
            f': from {rates[lowest]:.0f} % of (text, layer, head) with a sink ({lowest}) to {rates[highest]:.0f} % ({highest})'
        )
        num_without_sink = sum(rate < MIN_FINAL_RATE_PERCENT for rate in rates.values())
        texts.append(f'{num_without_sink} of {len(rates)} rows have none')
    outcomes = [run.outcome for run in runs]
    texts += [f'{outcomes.count(outcome)} {outcome}' for outcome in dict.fromkeys(outcomes) if outcome != 'done']
    num_without_probe = sum(run.get_last(HEADLINE_METRIC.name) is None for run in runs)
    return '; '.join(texts + ([f'{num_without_probe} without a probe'] if num_without_probe else [])) + '.'
