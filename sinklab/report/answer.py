"""What a report says first: one sentence, made of the table by rule."""

from sinklab.measure.emergence import LEAST
from sinklab.measure.table import HEADLINE
from sinklab.report.arms import Arm
from sinklab.report.emergence import span as emergence_span
from sinklab.report.runs import Run

FEW = 6  # arms that are named each


def answer(arms: list[Arm]) -> str:
    if len(arms) > FEW:
        return of_many(arms)
    return '; '.join(f'{arm.name}: {", ".join(of_arm(arm))}' for arm in arms) + '.'


def of_arm(arm: Arm) -> list[str]:
    """What is to be said of it: its sink, and what of its runs has gone otherwise."""
    measured = [run for run in arm.counted if run.last(HEADLINE.name) is not None]
    without = [run for run in arm.counted if run not in measured]
    others = [run for run in arm.runs if run not in arm.counted]
    told = [sink(arm, measured)] if measured else []
    return [*told, *(f'{seed_of(arm, run)}no probe yet' for run in without), *(failed(arm, run) for run in others)]


def sink(arm: Arm, runs: list[Run]) -> str:
    rates = [run.last(HEADLINE.name) for run in runs]
    if max(rates) < LEAST:
        return f'none after {steps(runs)} ({seeds(runs)})'
    share = f'{rates[0]:.0f} %' if len(runs) == 1 else f'{sum(rates) / len(rates):.0f} % ({span(rates)})'
    begun = emergence_span(runs).sentence('emerging')
    return f'{share} of (text, layer, head) have a sink after {steps(runs)} ({seeds(runs)}), {begun}'


def span(rates: list[float]) -> str:
    return f'{min(rates):.0f} to {max(rates):.0f}'


def steps(runs: list[Run]) -> str:
    last = sorted({run.records[-1]['step'] for run in runs})
    return f'{last[0]} steps' if len(last) == 1 else f'{last[0]} to {last[-1]} steps'


def seeds(runs: list[Run]) -> str:
    known = [run.seed for run in runs if run.seed is not None]
    told = f'{len(runs)} seeds' if len(runs) > 1 else f'seed {known[0]}' if known else 'one run'
    return ', '.join([told, *dict.fromkeys(run.kind for run in runs if run.kind != 'done')])


def seed_of(arm: Arm, run: Run) -> str:
    return f'seed {run.seed} ' if len(arm.runs) > 1 and run.seed is not None else ''


def failed(arm: Arm, run: Run) -> str:
    return f'{seed_of(arm, run)}{run.kind} at step {run.ending.get("step", 0)}'


def of_many(arms: list[Arm]) -> str:
    """The ends of the order by the mean rate, and how many are neither."""
    rates = {}
    for arm in arms:
        if found := [rate for run in arm.counted if (rate := run.last(HEADLINE.name)) is not None]:
            rates[arm.name] = sum(found) / len(found)
    runs = [run for arm in arms for run in arm.runs]
    told = [f'{len(runs)} runs of {len(arms)} rows']
    if rates:
        low, high = min(rates, key=rates.get), max(rates, key=rates.get)
        told[0] += (
            f': from {rates[low]:.0f} % of (text, layer, head) with a sink ({low}) to {rates[high]:.0f} % ({high})'
        )
        none = sum(rate < LEAST for rate in rates.values())
        told.append(f'{none} of {len(rates)} rows have none')
    kinds = [run.kind for run in runs]
    told += [f'{kinds.count(kind)} {kind}' for kind in dict.fromkeys(kinds) if kind != 'done']
    silent = sum(run.last(HEADLINE.name) is None for run in runs)
    return '; '.join(told + ([f'{silent} without a probe'] if silent else [])) + '.'
