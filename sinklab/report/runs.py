"""Reading of runs for reports: records, and arrays of probe files."""

import dataclasses
import functools
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sinklab.config.differences import flatten_dict
from sinklab.config.spec import is_changeable
from sinklab.config.validate import parse_config
from sinklab.errors import UserError
from sinklab.metrics import registry
from sinklab.metrics.metric import FigureSpec, MetricInfo
from sinklab.run_dir import RunDir
from sinklab.run_ref import format_fork, format_run_ref
from sinklab.storage.files import DamagedFileError, read_arrays, warn_once
from sinklab.storage.paths import find_common_folder, join_path, make_absolute, make_relative, resolve_path

DELETE_REMEDY = 'delete it to omit it from the report'
MAX_FILES = 1600  # probe files read from all runs together


def select_probes(paths: list[Path], count: int) -> list[Path]:
    """Select at most `count` evenly spaced probe files; if `count` is 1, select the last one."""
    return [paths[index] for index in select_evenly(len(paths), count)]


def select_evenly(length: int, count: int) -> list[int]:
    """Select at most `count` evenly spaced indices below `length`; if `count` is 1, select the last one."""
    if count == 1:
        return [length - 1] if length else []
    return (
        [int(index) for index in np.unique(np.linspace(0, length - 1, min(count, length)).round())] if length else []
    )


def load_probe_values(paths: list[Path]) -> dict[str, np.ndarray]:
    """Load the arrays of the figures of kind `heads` and `ratios` from N probe files of one run.

    Returns:
        {name of the figure: values}, with values_NLH for `heads` and values_NL for `ratios`. A figure is left out if
        one of the probes lacks its array.

    Raises:
        DamagedFileError: A file is damaged, or its headline array has another shape than that of the first file.
    """
    figure_specs = [figure_spec for figure_spec in registry.FIGURES if figure_spec.kind != 'matrices']
    names = [figure_spec.array_name for figure_spec in figure_specs]
    probe_arrays = [read_arrays(path, names, DELETE_REMEDY) for path in paths]
    for path, file_arrays in zip(paths, probe_arrays, strict=True):
        name = registry.HEADLINE_FIGURE.array_name
        if name not in file_arrays:
            raise DamagedFileError(f'{path} has no {name}; {DELETE_REMEDY}')
        if file_arrays[name].shape != probe_arrays[0][name].shape:
            raise DamagedFileError(f'{path} belongs to another run than {paths[0]}; {DELETE_REMEDY}')
    return {
        figure_spec.name: np.stack(
            [figure_spec.transform(file_arrays[figure_spec.array_name]) for file_arrays in probe_arrays]
        )
        for figure_spec in figure_specs
        if probe_arrays and all(figure_spec.array_name in file_arrays for file_arrays in probe_arrays)
    }


@dataclasses.dataclass(frozen=True)
class RunResult:
    """A run as a report shows it.

    Attributes:
        name: The display name: the group name, with the seed or the folder if the group has several runs.
        group_name: The name of the group of runs that differ only by seed.
        records: The records of metrics.jsonl, by step.
        probe_steps: The steps of the N loaded probes.
        probe_values: {name of the figure: values of the loaded probes}, with values_NLH for figures of kind `heads`
            and values_NL for `ratios`.
        run_dir: The folder of the run.
        notes: The origin of a fork, and the config changes between attempts.
        row_info: The content of row.json.
        config: {path of the field: value}; empty if the run has no config.
        outcome_record: The content of outcome.json. If that file is missing or damaged, the kind is `done` or
            `unfinished`, depending on the records.
    """

    name: str
    group_name: str
    records: list[dict]
    probe_steps: list[int]
    probe_values: dict[str, np.ndarray]
    run_dir: RunDir
    notes: list[str]
    row_info: dict
    config: dict
    outcome_record: dict

    @property
    def seed(self) -> int | None:
        return self.config.get('seed')

    @property
    def outcome(self) -> str:
        return self.outcome_record['kind']

    @functools.cached_property
    def curves(self) -> dict[str, tuple[list[int], list[float]]]:
        """Steps and values of each metric; a run may have a million records, which are read once for all metrics."""
        curves: dict[str, tuple[list[int], list[float]]] = {}
        for record in self.records:
            step = record['step']
            for name, value in record.items():
                steps, values = curves.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
        return curves

    def get_curve(self, metric_name: str) -> tuple[list[int], list[float]]:
        """Return the steps at which a metric was recorded, and its values there."""
        return self.curves.get(metric_name, ([], []))

    def get_last(self, metric_name: str) -> float | None:
        """Return the last recorded value of a metric, or None if it was never recorded."""
        return next((record[metric_name] for record in reversed(self.records) if metric_name in record), None)

    def interpolate(self, metric_name: str, step: int) -> float | None:
        """Interpolate the curve of a metric linearly at a step; return None if it was never recorded."""
        steps, values = self.get_curve(metric_name)
        return float(np.interp(step, steps, values)) if steps else None

    def find_strongest_heads(self, num_heads: int) -> list[tuple[int, int]]:
        """Find the heads with the largest attention to the first token in the last probe.

        Returns:
            (layer, head) of each head, counted from 0, the strongest first; [] without a probe.
        """
        if not self.probe_steps:
            return []
        alpha_LH = self.probe_values[registry.HEADLINE_FIGURE.name][-1]
        order = np.argsort(-alpha_LH, axis=None)[:num_heads]
        return [(int(layer), int(head)) for layer, head in zip(*np.unravel_index(order, alpha_LH.shape), strict=True)]

    def has_figure(self, figure_spec: FigureSpec) -> bool:
        """Return whether the probes of the run have the array of a figure."""
        if figure_spec.kind != 'matrices':
            return figure_spec.name in self.probe_values
        return figure_spec.array_name in self.last_probe_array_names

    @functools.cached_property
    def last_probe_array_names(self) -> list[str]:
        """The names of the arrays in the file of the last loaded probe; [] without a probe."""
        if not self.probe_steps:
            return []
        path = self.run_dir.get_probe_path(self.probe_steps[-1])
        with path.open('rb') as file, np.load(file, allow_pickle=False) as archive:
            return archive.files

    def load_matrices(self, figure_spec: FigureSpec, index: int = -1) -> np.ndarray | None:
        """Read the attention matrices of all layers and heads from the file of one loaded probe.

        Args:
            figure_spec: A figure of kind `matrices`.
            index: The index of the probe in `probe_steps`.

        Returns:
            Matrices LHTS, or None if the file lacks the array.
        """
        path = self.run_dir.get_probe_path(self.probe_steps[index])
        arrays = read_arrays(path, [figure_spec.array_name], DELETE_REMEDY)
        return figure_spec.transform(arrays[figure_spec.array_name]) if arrays else None


def read_runs(paths: list[str]) -> list[RunResult]:
    """Read the runs in the given folders.

    A run is named by its row. Config changes, the seed and the folder are added to the name if it is not unique.
    If one of several runs has a damaged file, it is left out with a warning on stderr.

    Args:
        paths: At least one run folder; repeated paths count once.

    Raises:
        DamagedFileError: No run has a readable row.json and config.json, or the only readable run has another damaged
            file.
        UserError: A folder holds no run, each run has a damaged file, or a probe file lacks the headline array.
    """
    run_dirs, rows, configs = read_rows_and_configs([RunDir(path) for path in dict.fromkeys(paths)])
    group_names = make_group_names(rows, configs)
    names = make_run_names(
        group_names, [run_config.get('seed') for run_config in configs], [run_dir.path for run_dir in run_dirs]
    )
    max_probes = max(2, MAX_FILES // len(run_dirs))
    loaded = []
    for arguments in zip(run_dirs, names, group_names, configs, strict=True):
        try:
            loaded.append(load_run(*arguments, max_probes))
        except DamagedFileError as error:  # for example in a probe file
            if len(run_dirs) == 1:
                raise
            warn_once(f'{error}; the report omits this run')
    if not loaded:
        raise UserError('each of these runs has a damaged file, see above; repair one of them')
    return loaded


def read_rows_and_configs(run_dirs: list[RunDir]) -> tuple[list[RunDir], list[str], list[dict]]:
    """Read row names and configs of runs, and warn on stderr about folders whose row.json or config.json is damaged.

    Returns:
        The other folders, their row names and their configs.

    Raises:
        DamagedFileError: No folder is readable.
        UserError: A folder holds no run.
    """
    readable, damaged = [], []
    for run_dir in run_dirs:
        try:
            readable.append((run_dir, get_row_name(run_dir), read_config(run_dir)))
        except DamagedFileError as error:
            damaged.append((run_dir, error))
    if not readable and damaged:
        raise damaged[0][1]
    for _, error in damaged:
        warn_once(f'{error}; the report omits this run')
    return tuple(map(list, zip(*readable, strict=True)))


def find_fork_segments(runs: list[RunResult], metric_name: str) -> list[tuple[int, list[int], list[float]]]:
    """Find the line segments that connect the curve of a parent run with the curve of its fork.

    A fork that restarts its step count is no branch of its parent and has no segment.

    Args:
        runs: The runs of the report. A fork has a segment only if its parent is among them.
        metric_name: The metric of the curves.

    Returns:
        (index of the fork in `runs`, steps, values) of each segment.
    """
    forks, run_of_path = [], {resolve_path(run.run_dir.path): run for run in runs}
    for index, run in enumerate(runs):
        lineage = run.row_info.get('from') or {}
        start_step = lineage.get('start', lineage.get('step'))
        continues = lineage and lineage['step'] == start_step
        parent = run_of_path.get(join_path(run.run_dir.path, lineage['run'])) if continues else None
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
    return [*filter(None, ['; '.join(format_fork(run_dir.read_lineage()))]), *changes]


def get_row_name(run_dir: RunDir) -> str:
    """Return the row name of a run, or the name of its folder without one; add the origin of a fork.

    Raises:
        UserError: The folder holds no run.
    """
    try:
        row, lineage = run_dir.read_json('row')['row'], run_dir.read_lineage()
        row = run_dir.path.absolute().name if row in (None, '') else str(row)
        if not lineage:
            return row
        origin = lineage.get('row') or lineage['run']
        return f'{row} from {format_run_ref(lineage.get("takes", ""), origin, lineage["step"])}'
    except (FileNotFoundError, NotADirectoryError, KeyError) as error:
        runs = (
            f'the runs of this sweep: {shlex.quote(str(run_dir))}/*/'
            if (run_dir.path / 'sweep.json').exists()
            else 'folders of runs'
        )
        raise UserError(f'{run_dir} contains no run that `sinklab train` has written; give {runs}') from error


def read_config(run_dir: RunDir) -> dict:
    """Read the flattened config of a run; {} for a run that was stopped before it wrote one.

    A config of another version of sinklab is returned as it is, with a warning on stderr.

    Raises:
        DamagedFileError: config.json is no JSON.
    """
    try:
        fields = run_dir.read_json('config')
    except FileNotFoundError:
        return {}
    try:
        parse_config(fields)
    except UserError as error:
        warn_once(f'{run_dir.path / "config.json"} has another version; it is shown unchanged ({error})')
    return flatten_dict(fields)


def load_run(run_dir: RunDir, name: str, group_name: str, config: dict, max_probes: int) -> RunResult:
    probe_paths, records = select_probes(run_dir.probe_files, max_probes), run_dir.read_records()
    row_info = run_dir.read_json('row')
    return RunResult(
        name=name,
        group_name=group_name,
        records=records,
        probe_steps=[int(path.stem) for path in probe_paths],
        probe_values=load_probe_values(probe_paths),
        run_dir=run_dir,
        notes=make_notes(run_dir),
        row_info=row_info | dict(published=row_info.get('published', {}), source=str(row_info.get('source') or '')),
        config=config,
        outcome_record=read_outcome(run_dir, records, config.get('optimizer.steps')),
    )


def read_outcome(run_dir: RunDir, records: list[dict], last_step: int | None) -> dict:
    """Read how the latest attempt ended.

    If outcome.json is missing or damaged, the run counts as `done` if its last step has a validation loss, and as
    `unfinished` otherwise.
    """
    try:
        return dict(step=0, message='') | run_dir.read_json('outcome')
    except (FileNotFoundError, DamagedFileError) as error:
        if isinstance(error, DamagedFileError):
            warn_once(f'{error}; the report uses the metrics')
        last_record = records[-1] if records else {}
        is_done = last_record.get('step') == last_step is not None and 'valid/loss' in last_record
        return dict(kind='done' if is_done else 'unfinished', step=last_record.get('step', 0), message='')


def select_drawn_figures(runs: list[RunResult]) -> list[FigureSpec]:
    """Select the figures whose array exists in some run; old runs lack the arrays of newer metrics."""
    return [figure_spec for figure_spec in registry.FIGURES if any(run.has_figure(figure_spec) for run in runs)]


RUN_METRIC_INFOS = (
    MetricInfo('step', 'step', 'Last recorded step.', digits=0),
    *(number for number in registry.METRIC_INFOS if number.in_table),
    registry.VALID_LOSS,
    MetricInfo('seconds', 'time', 'Training time, over all attempts.', 's', digits=0),
)


SEED_FIELDS = ('seed', 'data.seed')


def drop_seed_fields(config: dict) -> dict:
    """Return the config without the fields that may differ between runs of one group.

    These are the seeds and the fields that may change between attempts of a run (CHANGEABLE_FIELDS).
    """
    return {name: value for name, value in config.items() if name not in SEED_FIELDS and not is_changeable(name)}


def make_group_names(rows: list[str], configs: list[dict]) -> list[str]:
    """Return the group name of each run: its row, and the fields but seeds that differ within the row."""
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
    """Return the last part of a field name, or the whole name if another name has the same last part."""
    last_part = name.rpartition('.')[2]
    return last_part if [other.rpartition('.')[2] for other in names].count(last_part) == 1 else name


def format_config_value(value: object) -> str:
    return 'none' if value is None else f'{value:.4g}' if isinstance(value, float) else str(value)


def make_run_names(group_names: list[str], seeds: list[int | None], paths: list[Path]) -> list[str]:
    """Return the display name of each run.

    The name is that of the group. The seed is added if the group has several runs, and the folder if the name would
    still be ambiguous.
    """
    labels = [
        group_name if group_names.count(group_name) == 1 or seed is None else f'{group_name}, seed {seed}'
        for group_name, seed in zip(group_names, seeds, strict=True)
    ]
    return [
        name if labels.count(name) == 1 else f'{name} ({format_relative_path(path, paths)})'
        for name, path in zip(labels, paths, strict=True)
    ]


def format_relative_path(path: Path, paths: Sequence[Path]) -> str:
    """Format a folder relative to the common parent of all folders."""
    try:
        return make_relative(
            make_absolute(path), find_common_folder([make_absolute(other).parent for other in paths])
        )
    except (UserError, ValueError):  # the folders are in different buckets or on different drives
        return str(path)
