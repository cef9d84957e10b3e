"""Runs that differ in their seed alone, together: means with their spread, and ours against published."""

import dataclasses

import numpy as np

from sinklab.report import sweep
from sinklab.report.runs import Run

LEFT_OUT = ('diverged', 'refused')  # kinds of ends whose numbers are no result


@dataclasses.dataclass(frozen=True)
class Arm:
    name: str
    runs: list[Run]

    @property
    def about(self) -> dict:
        """row.json, by the name that the arm has here."""
        about = self.runs[0].about
        return {'source': '', **about, 'row': self.name, 'published': about.get('published') or {}}

    @property
    def counted(self) -> list[Run]:
        """Those that are done; where none is, those under way."""
        done = [run for run in self.runs if run.kind == 'done']
        return done or [run for run in self.runs if run.kind not in LEFT_OUT]


def arms(runs: list[Run]) -> list[Arm]:
    """The baseline first, which changes nothing of its table's default, if it is there; the others as given."""
    found = [Arm(name, [run for run in runs if run.arm == name]) for name in dict.fromkeys(run.arm for run in runs)]
    return sorted(found, key=lambda arm: arm is not baseline(found))


def baseline(arms: list[Arm]) -> Arm:
    plain = [arm for arm in arms if arm.about.get('diff') == {} and not arm.about.get('from')]
    return (plain or arms)[0]


def table(arms: list[Arm]) -> list[dict]:
    """As of a sweep, and whether a row lies on the published side of the first."""
    rows = sweep.table([in_sweep(arm) for arm in arms])
    return [row | dict(direction=sweep.direction(row, rows[0])) for row in rows]


def in_sweep(arm: Arm) -> sweep.Arm:
    keys = {run.name: run.seed if one_of_its_seed(arm, run) else run.name for run in arm.runs}
    return sweep.Arm(
        arm.about,
        outcomes={keys[run.name]: run.kind for run in arm.runs},
        reasons={keys[run.name]: message for run in arm.runs if (message := run.ending.get('message'))},
        numbers={
            keys[run.name]: sweep.judged(run.records, run.config.get('model.vocabulary')) for run in arm.counted
        },
    )


def one_of_its_seed(arm: Arm, run: Run) -> bool:
    return run.seed is not None and [one.seed for one in arm.runs].count(run.seed) == 1


def mean(runs: list[Run], name: str) -> tuple[list[int], np.ndarray, np.ndarray] | None:
    """(steps, mean, sample standard deviation) of a number at the steps that all of several runs recorded it at."""
    curves = [dict(zip(*run.curve(name), strict=True)) for run in runs]
    steps = sorted(set.intersection(*map(set, curves))) if len(curves) > 1 else []
    if not steps:
        return None
    values = np.array([[curve[step] for step in steps] for curve in curves])
    return steps, values.mean(0), values.std(0, ddof=1)
