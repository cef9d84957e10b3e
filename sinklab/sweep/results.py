"""Files of the claims command: metrics by row and seed (claims.json), and verdicts (verdicts.json)."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from sinklab.config.differences import flatten_dict
from sinklab.config.spec import Spec
from sinklab.errors import UserError
from sinklab.report.claims import read_claim_metrics
from sinklab.run_dir import RunDir
from sinklab.run_files import ClaimEntry, Claims
from sinklab.storage.files import atomic_write, open_writable_folder, read_json
from sinklab.storage.paths import parse_path
from sinklab.sweep import plan
from sinklab.sweep.plan import SweepRun

CLAIMS_FILE, VERDICTS_FILE = 'claims.json', 'verdicts.json'


def read_or_create(workdir: str, header: dict) -> dict:
    """Read claims.json of a folder, or return new content if it is missing.

    Args:
        workdir: The folder of the claims.
        header: The fields of claims.json that must be equal to those of an existing file.

    Raises:
        UserError: The folder is that of a sweep, claims.json is damaged, or its fields differ from `header`.
    """
    path = parse_path(workdir) / CLAIMS_FILE
    if not path.exists():
        if (path.parent / 'sweep.json').exists():
            raise UserError(f'{workdir} is the folder of a sweep (it contains a sweep.json); give another --workdir')
        return header | dict(configs={}, runs={})
    claims_data = read_results(path, 'restore it, or give another --workdir')
    for name, requested in header.items():
        if claims_data[name] != requested:
            problem = f'{path}: {name} is {claims_data[name]!r}'
            raise UserError(f'{problem}, but {requested!r} is requested; give another --workdir, or the old options')
    return claims_data


def read_results(path: Path, advice: str = f'give a {CLAIMS_FILE} that sinklab claims has written') -> dict:
    """Read claims.json; raise DamagedFileError, which ends with `advice`, if it lacks a field."""
    return read_json(path, Claims, advice)


def get_flat_config(spec: Spec) -> dict:
    """Return the flattened config without the fields on which results do not depend (checkpoint, log)."""
    config = flatten_dict(dataclasses.asdict(spec))
    return {path: value for path, value in config.items() if path.partition('.')[0] not in ('checkpoint', 'log')}


def get_measured_config(claims_data: dict, row: str) -> dict:
    """Return the flattened config of a measured row, with defaults for fields that did not exist then."""
    return get_flat_config(Spec()) | get_base_config(claims_data['configs']) | claims_data['configs'][row]


def find_measured_rows(claims_data: dict, specs: Mapping[str, Spec]) -> dict[str, str]:
    """Return {row of `specs`: the measured row with the same config}, for the rows that have one."""

    def make_key(config: Mapping) -> str:
        return json.dumps(config, sort_keys=True)

    row_of_config = {make_key(get_measured_config(claims_data, row)): row for row in claims_data['runs']}
    keys = {row: make_key(get_flat_config(spec)) for row, spec in specs.items()}
    return {row: row_of_config[key] for row, key in keys.items() if key in row_of_config}


def get_base_config(configs: dict[str, dict]) -> dict:
    """Return the first config, which is stored whole; the others are stored as differences from it."""
    return next(iter(configs.values()), {})


def add_runs(claims_data: dict, specs: Mapping[str, Spec], runs: list[SweepRun], metric_patterns: set[str]) -> dict:
    """Return the content of claims.json with the metrics and configs of the runs that are done or diverged.

    Args:
        claims_data: The content so far; it is not changed.
        specs: {row: config}, with seed 0.
        runs: The runs of the sweep.
        metric_patterns: The metrics to keep, as patterns such as `norm/ratio/*`.
    """
    configs = dict(claims_data['configs'])
    measured_runs = {row: dict(seeds) for row, seeds in claims_data['runs'].items()}
    for run in runs:
        if run.outcome in ('done', 'diverged'):
            measured = read_claim_metrics(run.run_dir, run.outcome, metric_patterns)
            measured_runs.setdefault(run.row, {})[str(run.seed)] = measured
            if run.row not in configs:
                base_config = get_base_config(configs)
                config = get_flat_config(specs[run.row])
                configs[run.row] = {
                    path: value for path, value in config.items() if value != base_config.get(path, ...)
                }
    return claims_data | dict(configs=configs, runs=measured_runs)


def list_run_dirs(workdir: Path) -> list[Path]:
    """List the existing run folders of a folder that `sinklab claims` filled; return [] for any other folder."""
    if not (workdir / CLAIMS_FILE).exists():
        return []
    runs = read_results(workdir / CLAIMS_FILE, 'restore it, or remove it and give the run folders')['runs']
    names = [plan.get_run_dir_name(row, int(seed)) for row, seeds in runs.items() for seed in seeds]
    return [workdir / name for name in names if RunDir(workdir / name).has_run()]


def read_verdicts(workdir: Path) -> list[dict]:
    """Read verdicts.json of a folder; return [] if it is missing."""
    path = workdir / VERDICTS_FILE
    return read_json(path, list[ClaimEntry], 'remove it; sinklab claims writes it again') if path.exists() else []


def write_json(workdir: str, name: str, content: dict | list) -> None:
    """Write a JSON file into a folder, atomically; raise UserError if the folder is not writable."""
    directory = parse_path(workdir)
    with open_writable_folder(directory), atomic_write(directory / name) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1, allow_nan=False) + '\n', encoding='utf-8')
