"""Runs as reports show them: names, metrics, arrays of probes, and the emergence of the sink."""

import dataclasses
import functools
from pathlib import Path

import numpy as np

from sinklab.config.differences import flatten_dict
from sinklab.config.spec import is_changeable
from sinklab.errors import UserError
from sinklab.metrics import registry
from sinklab.metrics.emergence import find_emergence, find_first_heads
from sinklab.metrics.metric import FigureSpec, MetricInfo
from sinklab.metrics.sink import SINK_THRESHOLD
from sinklab.run_dir import RunDir, format_parent, format_run_ref
from sinklab.storage.files import RESTORE_REMEDY, DamagedFileError, read_arrays, warn_once

DELETE_REMEDY = 'delete it to omit it from the report'
MAX_FILES = 1600  # probe files read from all runs together
SEED_FIELDS = ('seed', 'data.seed')


def list_run_metrics() -> list[MetricInfo]:
    """List the columns of the table of runs: numbers of each run."""
    return [
        MetricInfo('step', 'step', 'Last recorded step.', digits=0),
        *(info for info in registry.METRIC_INFOS if info.in_table),
        registry.VALID_LOSS,
        MetricInfo('seconds', 'time', 'Training time, over all attempts.', 's', digits=0),
    ]


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
        notes: The parent of a warm start, and the config changes between attempts.
        row_info: The content of row.json.
        config: {path of the field: value}; empty if the run has no config.
        outcome_record: The content of outcome.json; without that file, the kind is `unfinished`.
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

    @functools.cached_property
    def emergence(self) -> tuple[int | None, int] | None:
        """The steps between which the sink emerges, as `find_emergence` returns them."""
        return find_emergence(*self.get_curve(registry.HEADLINE_METRIC.name))

    def find_first_head(self) -> tuple[int, int] | None:
        """Find (layer, head), from 0, of the first head whose mean alpha_1 stays above the threshold, if any."""
        alpha_NLH = self.probe_values.get(registry.HEADLINE_FIGURE.name, ())
        first_heads = find_first_heads(self.probe_steps, alpha_NLH, SINK_THRESHOLD) if len(alpha_NLH) else ()
        return first_heads[0][1:] if first_heads else None

    def find_strongest_heads(self, num_heads: int) -> list[tuple[int, int]]:
        """Find (layer, head), from 0, of the heads with the largest alpha_1 in the last probe, in that order."""
        alpha_LH = self.probe_values[registry.HEADLINE_FIGURE.name][-1]
        order = np.argsort(-alpha_LH, axis=None)[:num_heads]
        return [(int(layer), int(head)) for layer, head in zip(*np.unravel_index(order, alpha_LH.shape), strict=True)]

    def get_probe_curve(self, figure_spec: FigureSpec) -> tuple[list[int], np.ndarray]:
        """Return the steps of the loaded probes and their values for a figure; no steps if the values are missing."""
        values = self.probe_values.get(figure_spec.name)
        return ([], np.zeros(0)) if values is None else (self.probe_steps, values)

    def load_matrices(self, figure_spec: FigureSpec, index: int = -1) -> np.ndarray | None:
        """Read the attention matrices LHTS of a figure from the probe with an index; None if it has none."""
        path = self.run_dir.get_probe_path(self.probe_steps[index])
        arrays = read_arrays(path, [figure_spec.array_name], DELETE_REMEDY)
        return figure_spec.transform(arrays[figure_spec.array_name]) if arrays else None


def read_runs(paths: list[str]) -> list[RunResult]:
    """Read the runs in the given folders.

    A run is named by its row. Config changes, the seed and the folder are added to the name if it is not unique.
    A run with a damaged file is left out with a warning.

    Args:
        paths: At least one run folder; repeated paths count once.

    Raises:
        UserError: A folder holds no run, or all runs are damaged.
    """
    run_dirs = [RunDir(path) for path in dict.fromkeys(paths)]
    max_probes = max(2, MAX_FILES // len(run_dirs))
    runs = []
    for run_dir in run_dirs:
        try:
            runs.append(load_run(run_dir, max_probes))
        except DamagedFileError as error:
            if run_dir is run_dirs[-1] and not runs:
                raise
            warn_once(f'a run is left out: {error}')
    return name_runs(runs)


def load_run(run_dir: RunDir, max_probes: int) -> RunResult:
    """Load a run under the name of its row; `name_runs` makes the name unique.

    Raises:
        DamagedFileError: A file of the run is damaged.
        UserError: The folder holds no run.
    """
    try:
        row_info = run_dir.read_json('row')
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f'{run_dir} contains no run of `sinklab train`; give folders of runs') from error
    if 'row' not in row_info:
        raise DamagedFileError(f'{run_dir}/row.json is damaged: it has no "row"; {RESTORE_REMEDY}')
    name = row_info['row'] or run_dir.path.absolute().name
    if parent := run_dir.read_parent():
        parent_ref = format_run_ref(parent.get('takes', ''), parent.get('row') or parent['run'], parent['step'])
        name = f'{name} from {parent_ref}'
    try:
        config = flatten_dict(run_dir.read_json('config'))
    except FileNotFoundError:  # the run was stopped before it wrote one
        config = {}
    try:
        outcome_record = run_dir.read_json('outcome')
    except FileNotFoundError:
        outcome_record = dict(kind='unfinished')
    probe_files = run_dir.probe_files
    probe_paths = [probe_files[index] for index in select_evenly(len(probe_files), max_probes)]
    return RunResult(
        name=name,
        group_name=name,
        records=run_dir.read_records(),
        probe_steps=[int(path.stem) for path in probe_paths],
        probe_values=load_probe_values(probe_paths),
        run_dir=run_dir,
        notes=make_notes(run_dir),
        row_info=row_info | dict(published=row_info.get('published', {}), source=str(row_info.get('source') or '')),
        config=config,
        outcome_record=outcome_record,
    )


def select_evenly(length: int, count: int) -> list[int]:
    """Select at most `count` evenly spaced indices below `length`; if `count` is 1, select the last one."""
    if count == 1:
        return [length - 1] if length else []
    return np.unique(np.linspace(0, length - 1, min(count, length)).round()).astype(int).tolist()


def load_probe_values(paths: list[Path]) -> dict[str, np.ndarray]:
    """Load the arrays of the figures of kind `heads` and `ratios` from N probe files of one run.

    Returns:
        {name of the figure: values}, with values_NLH for `heads` and values_NL for `ratios`. A figure is left out if
        one of the probes lacks its array.

    Raises:
        DamagedFileError: A file is damaged.
    """
    figure_specs = [figure_spec for figure_spec in registry.FIGURES if figure_spec.kind != 'matrices']
    names = [figure_spec.array_name for figure_spec in figure_specs]
    probe_arrays = [read_arrays(path, names, DELETE_REMEDY) for path in paths]
    return {
        figure_spec.name: np.stack(
            [figure_spec.transform(file_arrays[figure_spec.array_name]) for file_arrays in probe_arrays]
        )
        for figure_spec in figure_specs
        if probe_arrays and all(figure_spec.array_name in file_arrays for file_arrays in probe_arrays)
    }


def make_notes(run_dir: RunDir) -> list[str]:
    attempts = run_dir.read_environment().get('attempts', [])
    changes = [
        f'since step {attempt["step"]}: {"; ".join(attempt["changes"])}'
        for attempt in attempts
        if 'changes' in attempt
    ]
    return [*filter(None, ['; '.join(format_parent(run_dir.read_parent()))]), *changes]


def name_runs(runs: list[RunResult]) -> list[RunResult]:
    """Name runs by their row, and if that is not unique by changed fields, seed and folder.

    The group name is the row and the fields but seeds that differ within the row. The seed is added if the group has
    several runs, and the folder if the name would still be ambiguous.
    """
    group_names = make_group_names([run.name for run in runs], [drop_seed_fields(run.config) for run in runs])
    labels = [
        name if group_names.count(name) == 1 or run.seed is None else f'{name}, seed {run.seed}'
        for name, run in zip(group_names, runs, strict=True)
    ]
    names = [
        label if labels.count(label) == 1 else f'{label} ({run.run_dir})'
        for label, run in zip(labels, runs, strict=True)
    ]
    return [
        dataclasses.replace(run, name=name, group_name=group_name)
        for run, name, group_name in zip(runs, names, group_names, strict=True)
    ]


def drop_seed_fields(config: dict) -> dict:
    """Return the config without the fields that may differ between runs of one group.

    These are the seeds and the fields that may change between attempts of a run (CHANGEABLE_FIELDS).
    """
    return {name: value for name, value in config.items() if name not in SEED_FIELDS and not is_changeable(name)}


def make_group_names(rows: list[str], configs: list[dict]) -> list[str]:
    group_names = []
    for row, config in zip(rows, configs, strict=True):
        others = [other for name, other in zip(rows, configs, strict=True) if name == row]
        fields = [name for name in config if any(other.get(name) != config[name] for other in others)]
        changes = [f'{name} {format_config_value(config[name])}' for name in fields]
        group_names.append(', '.join([row, *changes]))
    return group_names


def format_config_value(value: object) -> str:
    return 'none' if value is None else f'{value:.4g}' if isinstance(value, float) else str(value)
