"""What runs have measured for claims, by row and seed (claims.json), and what it says of them (verdicts.json)."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from sinklab.files import regular, run_files
from sinklab.files.place import place
from sinklab.files.regular import Damaged
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
        content = regular.read(path, most=run_files.LARGEST_JSON)
        found = run_files.parse_json(content)
    except (OSError, ValueError) as error:
        raise Refusal(f'{path} cannot be read ({error}); {instead}') from error
    missing = [name for name in FIELDS if not isinstance(found, dict) or name not in found]
    remove = f'{instead}, or remove it where its runs lie beside it'
    if missing:
        raise Refusal(f'{path} holds no {", ".join(missing)}; {remove}')
    return run_files.decode_json(content, 'claims', path, remove)


def config_of(spec: Spec) -> dict:
    """What numbers depend on, flat."""
    config = flat(dataclasses.asdict(spec))
    return {path: value for path, value in config.items() if path.partition('.')[0] not in ('checkpoint', 'log')}


def changed(results: dict, specs: Mapping[str, Spec | None]) -> dict[str, str]:
    """{row: how it differs from what was measured}, of those that do; None is a row that is gone.

    A field that there was not then is none of its.
    """
    base, found = first(results['configs']), {}
    for row, own in results['configs'].items():
        then, now = base | own, specs[row] and config_of(specs[row])
        other = differences(then, {path: now.get(path) for path in then}) if now else ['gone']
        if other:
            found[row] = ', '.join(other)
    return found


def first(configs: dict[str, dict]) -> dict:
    """The one that is kept whole; of the others it is kept what they have otherwise."""
    return next(iter(configs.values()), {})


def add(results: dict, specs: Mapping[str, Spec], same: dict[str, str], runs: list[Run], names: set[str]) -> dict:
    """With what runs say now that have ended."""
    found = {row: dict(seeds) for row, seeds in results['runs'].items()}
    for run in runs:
        if run.outcome in ('done', 'diverged'):
            found.setdefault(run.row, {})[str(run.seed)] = measured(run.folder, run.outcome, names)
    others = {row: one for row, one in (results['same'] | same).items() if row != one}
    configs = dict(results['configs'])
    for row in [row for row in (*found, *others) if row in specs and row not in results['runs']]:
        base = first(configs)
        configs[row] = {path: value for path, value in config_of(specs[row]).items() if value != base.get(path, ...)}
    return results | dict(same=others, configs=configs, runs=found)


def folders(workdir: Path) -> list[Path]:
    """The runs of a folder that `sinklab claims` has filled; none of another one."""
    if not (workdir / NAME).exists():
        return []
    found = read(workdir / NAME)['runs']
    return [workdir / plan.name(row, int(seed)) for row, seeds in found.items() for seed in seeds]


def verdicts(workdir: Path) -> list[dict]:
    """What was said of claims there, if anything was."""
    path = workdir / VERDICTS
    try:
        return run_files.read_json(path, 'verdicts', 'the report does without it; sinklab claims writes it again')
    except Damaged as error:
        run_files.warn(path, str(error))
        return []
    except (FileNotFoundError, NotADirectoryError):
        return []


def write(workdir: str, name: str, content: dict | list) -> None:
    folder = place(workdir)
    with writable(folder), whole(folder / name) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1, allow_nan=False) + '\n', encoding='utf-8')
