"""What runs have measured for claims, by row and seed (claims.json), and what it says of them (verdicts.json)."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from sinklab.files.place import place
from sinklab.files.whole import whole, writable
from sinklab.folder import differences, flat
from sinklab.record import Refusal
from sinklab.report.claims import measured
from sinklab.spec import Spec
from sinklab.sweep import plan
from sinklab.sweep.plan import Run

NAME, VERDICTS = 'claims.json', 'verdicts.json'
FIELDS = 'size', 'overrides', 'same', 'configs', 'runs'


def by_row(results: dict) -> dict[str, dict]:
    """{row: {seed: measured}}, of rows that are the same run, too."""
    return results['runs'] | {row: results['runs'].get(first, {}) for row, first in results['same'].items()}


def kept(workdir: str, about: dict) -> dict:
    """What a folder's file has; refused where that is of other runs."""
    path = place(workdir) / NAME
    if not path.exists():
        if (path.parent / 'sweep.json').exists():
            raise Refusal(f'{workdir} is the folder of a sweep (it has a sweep.json); give another --workdir')
        return about | dict(same={}, configs={}, runs={})
    found = read(path)
    for name, asked in about.items():
        if found[name] != asked:
            at = f'{path}: {name} is {found[name]!r}'
            raise Refusal(f'{at}, and {asked!r} is asked for; give another --workdir, or ask as before')
    return found


def read(path: Path) -> dict:
    instead = f'give a {NAME} that sinklab claims has written'
    try:
        found = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError) as error:
        raise Refusal(f'{path} cannot be read ({error}); {instead}') from error
    if not isinstance(found, dict) or not {*FIELDS} <= found.keys():
        raise Refusal(f'{path} holds no {", ".join(FIELDS)}; {instead}')
    return found


def configs(specs: Mapping[str, Spec]) -> dict[str, dict]:
    """{row: its config}, flat; of all but the first what is otherwise in theirs."""
    found = {row: flat(dataclasses.asdict(spec)) for row, spec in specs.items()}
    first = next(iter(found.values()), {})
    return {
        row: {path: value for path, value in config.items() if config is first or value != first[path]}
        for row, config in found.items()
    }


def changed(results: dict, specs: Mapping[str, Spec]) -> list[str]:
    """Rows that are others now than when they were measured; fields that there were not yet are none of theirs."""
    now = configs({row: specs[row] for row in results['configs']})
    first = next(iter(now), None)
    base, found = results['configs'].get(first), []
    for row, then in results['configs'].items():
        fields = {path: value for path, value in now[row].items() if row != first or path in then}
        if other := differences(base | then, base | fields):
            found.append(f'{row} ({", ".join(other)})')
    return found


def add(results: dict, specs: Mapping[str, Spec], same: dict[str, str], runs: list[Run], names: set[str]) -> dict:
    """With what runs say now that have ended."""
    found = {row: dict(seeds) for row, seeds in results['runs'].items()}
    for run in runs:
        if run.outcome in ('done', 'diverged'):
            found.setdefault(run.row, {})[str(run.seed)] = measured(run.folder, run.outcome, names)
    others = {row: first for row, first in (results['same'] | same).items() if row != first}
    return results | dict(same=others, configs=configs({row: specs[row] for row in found}), runs=found)


def folders(workdir: Path) -> list[Path]:
    """The runs of a folder that `sinklab claims` has filled; none of another one."""
    if not (workdir / NAME).exists():
        return []
    found = read(workdir / NAME)['runs']
    return [workdir / plan.name(row, int(seed)) for row, seeds in found.items() for seed in seeds]


def verdicts(workdir: Path) -> list[dict]:
    """What was said of claims there, if anything was."""
    path = workdir / VERDICTS
    return json.loads(path.read_text(encoding='utf-8')) if path.exists() else []


def write(workdir: str, name: str, content: dict | list) -> None:
    folder = place(workdir)
    with writable(folder), whole(folder / name) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1, allow_nan=False) + '\n', encoding='utf-8')
