"""Runs as a report reads them: records, probe arrays, config, outcome, and display names."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sinklab.config.validate import parse_config
from sinklab.escape import quote_shell
from sinklab.metrics import registry as measures
from sinklab.metrics.metric import FigureSpec, MetricInfo
from sinklab.report import probe_files
from sinklab.run_dir import (
    CHANGEABLE_PREFIXES,
    METRICS_FILE,
    RunDir,
    flatten_dict,
    format_lineage,
    format_run_ref,
)
from sinklab.schema import UserError
from sinklab.storage import run_files
from sinklab.storage.paths import find_common_folder, join_path, make_absolute, make_relative, resolve_path
from sinklab.storage.untrusted_files import DamagedFileError


@dataclasses.dataclass(frozen=True)
class RunResult:
    name: str  # its arm, and its seed where the arm has others
    group_name: str
    records: list[dict]
    probe_steps: list[int]  # of the probes that are drawn
    probe_values: dict[
        str, np.ndarray
    ]  # of those N probes, by names of pictures: values_NLH for heads, values_NL for ratios
    run_dir: RunDir
    notes: list[str]  # what it comes from, and what has changed on its way
    row_info: dict  # row.json
    config: dict  # flat
    outcome_record: dict  # outcome.json; of kind `unfinished` where it has said nothing yet

    @property
    def seed(self) -> int | None:
        return self.config.get('seed')

    @property
    def outcome(self) -> str:
        return self.outcome_record['kind']

    def get_curve(self, metric_name: str) -> tuple[list[int], list[float]]:
        """(steps, values) where a number was recorded."""
        points = [(record['step'], record[metric_name]) for record in self.records if metric_name in record]
        return [step for step, _ in points], [value for _, value in points]

    def get_last(self, metric_name: str) -> float | None:
        """The newest value of a number."""
        return next((record[metric_name] for record in reversed(self.records) if metric_name in record), None)

    def interpolate(self, metric_name: str, step: int) -> float | None:
        """Where the curve of a number is drawn at a step."""
        steps, values = self.get_curve(metric_name)
        return float(np.interp(step, steps, values)) if steps else None

    def find_strongest_heads(self, num_heads: int) -> list[tuple[int, int]]:
        """(layer, head) of the heads that give most to the first token, in the last probe."""
        if not self.probe_steps:
            return []
        alpha_LH = self.probe_values[measures.HEADLINE_FIGURE.name][-1]
        order = np.argsort(-alpha_LH, axis=None)[:num_heads]
        return [(int(layer), int(head)) for layer, head in zip(*np.unravel_index(order, alpha_LH.shape), strict=True)]

    def has_figure(self, figure_spec: FigureSpec) -> bool:
        if figure_spec.kind != 'matrices':
            return figure_spec.name in self.probe_values
        return bool(self.probe_steps) and self.load_matrices(figure_spec) is not None

    def load_matrices(self, figure_spec: FigureSpec, index: int = -1) -> np.ndarray | None:
        """Of all layers and heads in one of its probes, read when they are asked for."""
        arrays = probe_files.read_probe_arrays(
            self.run_dir.get_probe_path(self.probe_steps[index]), [figure_spec.array_name]
        )
        return figure_spec.transform(arrays[figure_spec.array_name]) if arrays else None


def read_runs(paths: list[str]) -> list[RunResult]:
    """The runs in these folders, each named by its row, and by its changes, its seed or its folder where it must."""
    run_dirs = [RunDir(path) for path in dict.fromkeys(paths)]
    run_dirs = select_readable(run_dirs)
    rows, configs = [get_row_name(run_dir) for run_dir in run_dirs], [read_config(run_dir) for run_dir in run_dirs]
    group_names = make_group_names(rows, configs)
    names = make_run_names(
        group_names, [run_config.get('seed') for run_config in configs], [run_dir.path for run_dir in run_dirs]
    )
    max_probes = max(2, probe_files.MAX_FILES // len(run_dirs))
    loaded = []
    for arguments in zip(run_dirs, names, group_names, configs, strict=True):
        try:
            loaded.append(load_run(*arguments, max_probes))
        except DamagedFileError as error:  # such as a probe
            if len(run_dirs) == 1:
                raise
            run_files.warn_once(arguments[0].path, f'{error}; the report goes on without this run')
    if not loaded:
        raise UserError('each of these runs has a file that is damaged, as said above; mend one of them')
    return loaded


def select_readable(run_dirs: list[RunDir]) -> list[RunDir]:
    """Return the folders whose row and config can be read; of several, the others are named and left out."""
    readable_dirs, damaged = [], []
    for run_dir in run_dirs:
        try:
            get_row_name(run_dir)
            read_config(run_dir)
            readable_dirs.append(run_dir)
        except DamagedFileError as error:
            damaged.append((run_dir, error))
    if not readable_dirs and damaged:
        raise damaged[0][1]
    for run_dir, error in damaged:
        run_files.warn_once(run_dir.path, f'{error}; the report goes on without this run')
    return readable_dirs


def find_branches(runs: list[RunResult], metric_name: str) -> list[tuple[int, list[int], list[float]]]:
    """(place of a fork, steps, values): from its parent's curve to its own, where both are among the runs.

    One that counts its steps anew stands beside its parent and is no branch of it.
    """
    forks, index_of_path = [], {resolve_path(run.run_dir.path): run for run in runs}
    for index, run in enumerate(runs):
        lineage = run.row_info.get('from') or {}
        start_step = lineage.get('start', lineage.get('step'))
        continues = lineage and lineage['step'] == start_step
        parent = index_of_path.get(join_path(run.run_dir.path, lineage['run'])) if continues else None
        if parent and (parent_value := parent.interpolate(metric_name, start_step)) is not None:
            steps, values = run.get_curve(metric_name)
            forks.append((index, [start_step, *steps[:1]], [parent_value, *values[:1]]))
    return forks


def make_notes(run_dir: RunDir) -> list[str]:
    attempts = run_dir.read_environment().get('attempts', [])
    changes = [
        f'since step {attempt["step"]}: {"; ".join(attempt["changes"])}'
        for attempt in attempts
        if 'changes' in attempt
    ]
    return [*filter(None, ['; '.join(format_lineage(run_dir.read_lineage()))]), *changes]


def get_row_name(run_dir: RunDir) -> str:
    """The name of its row, or its folder's where it has none; of a fork, with what it comes from."""
    try:
        row, lineage = run_dir.read_json('row')['row'], run_dir.read_lineage()
        row = run_dir.path.absolute().name if row in (None, '') else str(row)
        if not lineage:
            return row
        origin = lineage.get('row') or lineage['run']
        return f'{row} from {format_run_ref(lineage.get("takes", ""), origin, lineage["step"])}'
    except (FileNotFoundError, NotADirectoryError, KeyError) as error:
        runs = (
            f'the runs of this sweep: {quote_shell(str(run_dir))}/*/'
            if (run_dir.path / 'sweep.json').exists()
            else 'folders of runs'
        )
        raise UserError(f'{run_dir} holds no run that `sinklab train` has written; give {runs}') from error


def read_config(run_dir: RunDir) -> dict:
    """Flat; empty of a run that was stopped before it had one."""
    try:
        fields = run_dir.read_json('config')
    except FileNotFoundError:
        if (run_dir.path / METRICS_FILE).exists():
            path = run_dir.path / 'config.json'
            run_files.warn_once(path, f'{path} is missing; the report does without it, and without a seed')
        return {}
    try:
        parse_config(fields)
    except UserError as error:
        path = run_dir.path / 'config.json'
        run_files.warn_once(path, f'{path} is damaged, or of another version, and is shown as it is ({error})')
    return flatten_dict(fields)


def load_run(run_dir: RunDir, name: str, group_name: str, config: dict, max_probes: int) -> RunResult:
    last_step = config.get('optimizer.steps')
    probe_paths, records = probe_files.select_probes(run_dir.probe_files, max_probes), run_dir.read_records(last_step)
    steps = [run_files.parse_probe_step(path) for path in probe_paths]
    outcome_record = read_outcome(run_dir, records, last_step)
    warn_of_lost_probes(run_dir, records)
    if outcome_record['kind'] == 'done' and last_step is not None:
        run_dir.warn_about_lost_lines(records[-1] if records else {}, last_step, 'train/loss', 'valid/loss')
    warn_of_gaps(run_dir, records, config.get('log.every_steps'))
    return RunResult(
        name,
        group_name,
        records,
        steps,
        probe_files.load_probe_values(probe_paths),
        run_dir,
        make_notes(run_dir),
        read_row_info(run_dir),
        config,
        outcome_record,
    )


def warn_of_gaps(run_dir: RunDir, records: list[dict], every_steps: int | None) -> None:
    """Say on stderr where lines are missing within metrics.jsonl."""
    if not isinstance(every_steps, int):
        return  # of an older run, or damaged
    try:
        gaps = run_dir.find_gaps(records, every_steps, records[-1]['step'] if records else None)
    except DamagedFileError as error:
        run_files.warn_once(run_dir.path / 'row.json', str(error))
        return
    for gap in gaps:
        run_files.warn_once(run_dir.path / METRICS_FILE, run_dir.format_gap(gap))


def warn_of_lost_probes(run_dir: RunDir, records: list[dict]) -> None:
    """Say on stderr which probes are in metrics.jsonl and have no file."""
    saved_steps = {run_files.parse_probe_step(path) for path in run_dir.probe_files}
    lost_steps = [
        record['step']
        for record in records
        if measures.HEADLINE_METRIC.name in record and record['step'] not in saved_steps
    ]
    if lost_steps and saved_steps:
        probe_path = run_dir.get_probe_path(lost_steps[0])
        rest_text = f' (and {len(lost_steps) - 1} more)' if lost_steps[1:] else ''
        run_files.warn_once(probe_path, f'{probe_path} is missing{rest_text}; maps are drawn without it')


def read_row_info(run_dir: RunDir) -> dict:
    """Read row.json; published values that are no numbers are named and left out."""
    row_info, path = run_dir.read_json('row'), run_dir.path / 'row.json'
    published = row_info.get('published', {})
    numbers = {name: value for name, value in published.items() if isinstance(value, int | float)}
    if invalid := [name for name in published if name not in numbers]:
        run_files.warn_once(
            path, f'{path} has {published[invalid[0]]!r} as published {invalid[0]}, which is no number; left out'
        )
    return row_info | dict(published=numbers, source=str(row_info.get('source') or ''))


def read_outcome(run_dir: RunDir, records: list[dict], last_step: int | None) -> dict:
    """How the latest attempt has ended; a run that says nothing is done if it has measured its last step."""
    path = run_dir.path / 'outcome.json'
    try:
        return dict(step=0, message='') | run_files.read_run_file(path, 'outcome', 'the report judges by its numbers')
    except (OSError, DamagedFileError) as error:
        if isinstance(error, DamagedFileError):
            run_files.warn_once(path, str(error))
        last_record = records[-1] if records else {}
        is_done = last_record.get('step') == last_step is not None and 'valid/loss' in last_record
        return dict(kind='done' if is_done else 'unfinished', step=last_record.get('step', 0), message='')


def select_drawn_figures(runs: list[RunResult]) -> list[FigureSpec]:
    """Those that some run has the array of; one is older than a measure whose array its probes lack."""
    return [figure_spec for figure_spec in measures.FIGURES if any(run.has_figure(figure_spec) for run in runs)]


RUN_METRIC_INFOS = (
    MetricInfo('step', 'step', 'Last step that was recorded.', digits=0),
    *(number for number in measures.METRIC_INFOS if number.in_table),
    measures.VALID_LOSS,
    MetricInfo('seconds', 'time', 'Time of training, over all attempts.', 's', digits=0),
)


SEED_FIELDS = ('seed', 'data.seed')


def drop_seed_fields(config: dict) -> dict:
    """What two seeds of one arm have alike."""
    return {
        name: value
        for name, value in config.items()
        if name not in SEED_FIELDS and not f'{name}.'.startswith(CHANGEABLE_PREFIXES)
    }


def make_group_names(rows: list[str], configs: list[dict]) -> list[str]:
    """Of each run: its row, and where another run of the row differs by more than a seed, what it has there."""
    comparable_configs = [drop_seed_fields(config) for config in configs]
    group_names = []
    for row, config in zip(rows, comparable_configs, strict=True):
        others = [other for name, other in zip(rows, comparable_configs, strict=True) if name == row]
        fields = [name for name in config if any(other.get(name) != config[name] for other in others)]
        group_names.append(
            ', '.join(
                [row, *(f'{shorten_field_name(name, fields)} {format_config_value(config[name])}' for name in fields)]
            )
        )
    return group_names


def shorten_field_name(name: str, names: list[str]) -> str:
    """The last part of a field's name, where no other one ends in it."""
    last_part = name.rpartition('.')[2]
    return last_part if [other.rpartition('.')[2] for other in names].count(last_part) == 1 else name


def format_config_value(value: object) -> str:
    return 'none' if value is None else f'{value:.4g}' if isinstance(value, float) else str(value)


def make_run_names(group_names: list[str], seeds: list[int | None], paths: list[Path]) -> list[str]:
    """Of each run: its arm, its seed where the arm has several runs, its folder where that is not enough."""
    labels = [
        group_name if group_names.count(group_name) == 1 or seed is None else f'{group_name}, seed {seed}'
        for group_name, seed in zip(group_names, seeds, strict=True)
    ]
    return [
        name if labels.count(name) == 1 else f'{name} ({format_relative_path(path, paths)})'
        for name, path in zip(labels, paths, strict=True)
    ]


def format_relative_path(path: Path, paths: Sequence[Path]) -> str:
    """A folder as seen from the one that all lie in."""
    try:
        return make_relative(
            make_absolute(path), find_common_folder([make_absolute(other).parent for other in paths])
        )
    except (UserError, ValueError):  # they lie in different buckets, or on different disks
        return str(path)
