"""The run directory: its files, references to it, and the checks before a run starts or resumes in it.

config.json     the resolved config
tokenizer.json  the tokenizer of a run on text
row.json        config file, row, diff, published numbers, source; for a warm start, its parent
environment.json  versions, devices, layout, commit of the latest attempt; attention, remat, changes of each attempt
metrics.jsonl   one line a record: {"step", "seconds", name: number}
probe/          STEP.npz, the arrays of one probe
checkpoints/    STEP, an Orbax checkpoint, and in it digests_PROCESS.json: sizes and digests of its files
damaged/        STEP, a damaged checkpoint that was passed over
outcome.json    how the latest attempt ended: kind, step, checkpoint, message, exit_code
owner.json      the job that uses this folder, or used it last; run.lock is its lock on a disk
"""

import contextlib
import dataclasses
import json
import os
import shlex
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from sinklab.config.differences import flatten_dict, format_differences
from sinklab.config.spec import EXTENDABLE_SCHEDULES, FFN_NAMES, Spec, WarmStartTakes, is_changeable
from sinklab.config.validate import parse_config
from sinklab.errors import UserError, format_names
from sinklab.storage.files import (
    RESTORE_REMEDY,
    TEMPORARY_SUFFIX,
    DamagedFileError,
    list_entries,
    open_writable_folder,
    read_json,
    warn_once,
    write_text,
)
from sinklab.storage.folder_lock import LOCK_FILE, OWNER_FILE
from sinklab.storage.paths import check_checkpoint_path, get_file_system, is_remote, parse_path

METRICS_FILE = 'metrics.jsonl'
COMMIT_FILE = 'commit_success.txt'  # the last file of a checkpoint that Orbax writes
UPLOAD_SECONDS = 60.0  # seconds between two uploads of metrics.jsonl into a bucket, unless a save needs one
RECORD_DECODER = msgspec.json.Decoder(dict[str, int | float])
# Entries of a folder in which a run has not yet written its config.json.
ENTRIES_BEFORE_CONFIG = LOCK_FILE, OWNER_FILE, 'probe', 'row.json', 'tokenizer.json', 'outcome.json'
STEPS_FIELD = 'optimizer.steps'
# Prefixes of open models: hf:FOLDER, hf:ID on the Hugging Face Hub, or gguf:FILE.
HF_PREFIX, GGUF_PREFIX = MODEL_PREFIXES = 'hf:', 'gguf:'

Step = Annotated[int, Meta(ge=0, lt=2**31)]  # steps in arrays are int32
SeedText = Annotated[str, Meta(pattern=r'\A[0-9]{1,10}\Z')]


class Parent(Struct):
    """The parent of a warm start, in row.json."""

    run: str
    step: Step
    row: str = ''
    config: list[str] = []
    new: list[str] = []
    dropped: list[str] = []
    data: list[str] = []
    commit: str | None = None
    takes: WarmStartTakes = ''
    start: Step = 0


class Row(Struct):
    """row.json; a row of a user's config file may have other fields, too."""

    row: str | None = None
    config: str = ''
    diff: dict[str, Any] = {}
    published: dict[str, bool | int | float] = {}
    source: Any = None
    size: str | None = None
    overrides: dict[str, str] = {}
    remarks: list[str] = []  # on the parameters of an imported model
    parent: Parent | None = field(name='from', default=None)


class Outcome(Struct):
    """outcome.json."""

    kind: Literal['done', 'refused', 'diverged', 'stopped', 'lost', 'crashed']
    step: Step = 0
    checkpoint: Step | None = None
    message: str = ''
    exit_code: Annotated[int, Meta(ge=0, le=255)] = 0


class Attempt(Struct):
    """A start of a run, or of its continuation."""

    step: Step
    attention: str
    changes: list[str] = []


class Environment(Struct):
    """environment.json."""

    attempts: list[Attempt]
    commit: str | None = None
    devices: list[str] = []
    versions: dict[str, str | None] = {}


class SweepRow(Struct):
    """An entry of sweep.json: a row, and the outcome of each seed."""

    row: str
    seeds: dict[SeedText, str]
    config: str = ''
    steps: Step = 0


SCHEMAS: dict[str, Any] = {
    'config': dict,  # `parse_config` checks it
    'row': Row,
    'outcome': Outcome,
    'environment': Environment,
    'sweep': list[SweepRow],
}


class RunDir:
    """A run directory, on a disk or in a bucket.

    Args:
        path: A path or a URL of gs://.
        is_writable: False for a process that writes nothing, because another process of the run does.
    """

    def __init__(self, path: str | os.PathLike, is_writable: bool = True):
        if not str(path):
            raise UserError('the path of the run folder is empty; give a folder')
        self.path = parse_path(path)
        self.is_writable = is_writable

    def __str__(self) -> str:
        return str(self.path)

    @property
    def checkpoint_dir(self) -> Path:
        return self.path / 'checkpoints'

    @property
    def probe_files(self) -> list[Path]:
        """Probe files, sorted by step."""
        files = [path for path in list_entries(self.path / 'probe') if path.suffix == '.npz']
        return sorted((path for path in files if path.stem.isdecimal()), key=lambda path: int(path.stem))

    def get_probe_path(self, step: int) -> Path:
        return self.path / 'probe' / f'{step:08}.npz'

    def has_run(self) -> bool:
        return (self.path / 'config.json').exists()

    def list_checkpoint_steps(self) -> list[int]:
        """List the steps of the committed checkpoints, in ascending order; a save may still write their digests."""
        names = [path.name for path in list_entries(self.checkpoint_dir) if path.name.isdecimal()]
        if is_remote(self.path):  # nothing is renamed in a bucket
            names = [name for name in names if (self.checkpoint_dir / name / COMMIT_FILE).exists()]
        return sorted(map(int, names))

    def read_json(self, name: str, missing: dict | None = None) -> dict:
        """Read NAME.json: config, row, environment, outcome, or sweep; return `missing` if there is no such file.

        Raises:
            DamagedFileError: The file does not have its schema in SCHEMAS.
            FileNotFoundError: There is no such file, and `missing` is None.
        """
        path = self.path / f'{name}.json'
        if missing is not None and not path.exists():
            return missing
        return read_json(path, SCHEMAS[name])

    def read_remarks(self) -> list[str]:
        """Return sentences about the parameters that the import of an open model has put into row.json."""
        return self.read_json('row', missing={}).get('remarks', [])

    def read_environment(self) -> dict:
        return self.read_json('environment', missing={})

    def read_parent(self) -> dict:
        """Read the parent of a warm start from row.json; {} for any other run, and for a folder without a run.

        Raises:
            DamagedFileError: The folder holds a run without row.json.
        """
        if self.has_run() and not (self.path / 'row.json').exists():
            raise DamagedFileError(f'{self.path}/row.json is missing; {RESTORE_REMEDY}')
        return self.read_json('row', missing={}).get('from') or {}

    def read_start_step(self) -> int:
        """Read the step after which the run starts: 0, or that of the parent if the run takes its whole state."""
        parent = self.read_parent()
        return parent.get('start', parent.get('step', 0))

    def initialize(self, spec: Spec, row: dict, tokenizer: str | None = None) -> None:
        """Write the config and the other initial files of a run; do nothing if the folder holds a run already.

        Call `check_run_dir` first: it raises if the folder holds another run.

        Args:
            spec: The config of the run.
            row: The content of row.json.
            tokenizer: The content of tokenizer.json; None: the run has none.
        """
        if self.has_run() or not self.is_writable:
            return
        with open_writable_folder(self.path / 'probe'):
            if tokenizer:
                write_text(self.path / 'tokenizer.json', tokenizer)
            self.write_json('row', row)
            self.write_json('config', dataclasses.asdict(spec))

    def write_json(self, name: str, content: dict) -> None:
        if self.is_writable:
            write_text(self.path / f'{name}.json', json.dumps(content, indent=2) + '\n')

    def delete_json(self, name: str) -> None:
        if self.is_writable:
            with contextlib.suppress(OSError):
                (self.path / f'{name}.json').unlink()

    def read_metric_lines(self) -> list[dict]:
        """Read the lines of metrics.jsonl in the order in which they were written.

        A damaged line is skipped with a warning, and the last line without one: a run may be writing it.
        """
        path = self.path / METRICS_FILE
        records = []
        lines = path.read_bytes().split(b'\n') if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                record = RECORD_DECODER.decode(line)
                records.append(record | dict(step=int(record['step'])))
            except (msgspec.DecodeError, UnicodeError, KeyError):
                if number < len(lines):  # after the last line break is nothing, or a line that is being written
                    warn_once(f'{path}, line {number}, is damaged and is skipped; {RESTORE_REMEDY}')
        return records

    def read_records(self) -> list[dict]:
        """Read metrics.jsonl with one record for each step, in ascending order of steps.

        Several lines of a step are merged: a run that was stopped leaves the evaluations of its last step to the
        next attempt, which writes them on a line of their own.
        """
        records: dict[int, dict] = {}
        for record in self.read_metric_lines():
            records.setdefault(record['step'], {}).update(record)
        return [records[step] for step in sorted(records)]


class MetricsWriter:
    """Writer of metrics.jsonl: appends to the file on a disk, and for a bucket to a local copy that it uploads.

    The copy is uploaded at saves, every UPLOAD_SECONDS, and at the end. Nothing is written if this process may not
    write to the run directory.

    Args:
        run_dir: The run directory.
        resume_step: The step after which training resumes; lines of later steps are dropped.
        check_owner: Called before each upload; raises if another job has taken over the folder.
    """

    def __init__(self, run_dir: RunDir, resume_step: int, check_owner: Callable[[], None] = lambda: None):
        self.path = self.target = run_dir.path / METRICS_FILE
        self.check_owner = check_owner
        self.upload_time = time.monotonic()
        self.file = self.temporary_dir = None
        if not run_dir.is_writable:
            return
        if is_remote(self.target):
            self.temporary_dir = tempfile.TemporaryDirectory()
            self.path = Path(self.temporary_dir.name, METRICS_FILE)
        records = [record for record in run_dir.read_metric_lines() if record['step'] <= resume_step]
        write_text(self.path, ''.join(f'{json.dumps(record)}\n' for record in records))
        self.file = self.path.open('a', encoding='utf-8')

    def append(self, record: dict) -> None:
        if self.file:
            self.file.write(json.dumps(record, allow_nan=False) + '\n')
            self.file.flush()
            if time.monotonic() - self.upload_time > UPLOAD_SECONDS:
                self.upload()

    def upload(self) -> None:
        """Upload the copy, if the run is in a bucket."""
        if self.temporary_dir:
            self.check_owner()
            get_file_system().put_file(os.fspath(self.path), os.fspath(self.target))
            self.upload_time = time.monotonic()

    def close(self) -> None:
        if self.file:
            self.file.close()
        self.upload()
        if self.temporary_dir:
            self.temporary_dir.cleanup()


def format_run_ref(takes: str, run_path: object, step: int | str) -> str:
    """Format a checkpoint as a value of --from: [TAKES:]RUN@STEP; `takes` is '' if a warm start takes all of it."""
    return f'{takes and f"{takes}:"}{run_path}@{step}'


def format_parent(parent: dict) -> list[str]:
    """Format what `read_parent` returns, and what the warm start changes, as a list of short texts."""
    if not parent:
        return []
    labels = {'new': 'new', 'dropped': 'dropped', 'data': 'reads other data'}
    details = [f'{label}: {", ".join(entries)}' for name, label in labels.items() if (entries := parent.get(name))]
    parent_ref = format_run_ref(parent.get('takes', ''), parent['run'], parent['step'])
    return [f'from {parent_ref}', *parent.get('config', []), *details]


def parse_run_ref(run_ref: str) -> tuple[RunDir, int | None]:
    """Parse RUN[@STEP] into a run directory and a step; None if no step is given.

    The name of a run folder may contain @: if `run_ref` as a whole is a run folder, no step is split off.
    """
    path, _, step = run_ref.rpartition('@')
    if not path or not step.isdecimal() or RunDir(run_ref).has_run():
        return RunDir(run_ref), None
    return RunDir(path), int(step)


def select_steps(run_dir: RunDir, step: int | None) -> list[int]:
    """Return the given step if it has a checkpoint, or all steps with a checkpoint if `step` is None.

    Raises:
        UserError: The folder is no run, it has no checkpoints, or it has none of this step.
    """
    saved_steps = run_dir.list_checkpoint_steps()
    if not saved_steps:
        check_has_run(run_dir)
        raise UserError(f'{run_dir} has no checkpoints; give the folder of a run that has saved some')
    if step not in (None, *saved_steps):
        raise UserError(f'{run_dir} has no checkpoint {step}; it has: {", ".join(map(str, saved_steps))}')
    return saved_steps if step is None else [step]


def read_spec(run_dir: RunDir) -> Spec:
    """Read the spec of a run from its config.json.

    Raises:
        DamagedFileError: config.json is damaged.
        UserError: The folder is no run, or the config is one of another version of sinklab.
    """
    check_has_run(run_dir)
    config = run_dir.read_json('config')
    try:
        return parse_config(config)
    except UserError as error:
        if flatten_dict(config).get('model.ffn') not in FFN_NAMES:
            raise UserError(f'{run_dir}: {error}') from error
        commit = run_dir.read_environment().get('commit')
        raise UserError(f'{run_dir} contains a run of another version ({error}); use commit {commit}') from error


def check_has_run(run_dir: RunDir) -> None:
    """Raise UserError if a folder contains no run, or the config.json of a transformers model."""
    path = str(run_dir)
    is_model = path.startswith(MODEL_PREFIXES)
    if run_dir.has_run():
        is_model = 'model_type' in run_dir.read_json('config')
        if not is_model:
            return
        path = HF_PREFIX + path
    if is_model:
        command = shlex.join(['sinklab', 'checkpoint', 'import', path, '--out=runs/imported'])
        raise UserError(
            f'{run_dir} is an open model and no run; give {path} to a command that takes open models, '
            f'or make a run of it: {command}'
        )
    if runs := list_contained_runs(run_dir.path):
        raise UserError(f'{run_dir} is no run, but contains runs; give one of {format_names(list(map(str, runs)))}')
    problem = 'contains no run' if run_dir.path.exists() else 'does not exist'
    raise UserError(f'{run_dir} {problem}; give the folder of a run')


def list_contained_runs(folder: Path) -> list[Path]:
    """List the run folders in a folder and in its subfolders."""
    return sorted(file.parent for depth in ('*', '*/*') for file in folder.glob(f'{depth}/row.json'))


def check_run_dir(run_dir: RunDir, spec: Spec, remedy: str | None = None) -> None:
    """Raise UserError if a folder holds another run or other files, or cannot hold checkpoints.

    Args:
        run_dir: The folder.
        spec: The spec of the run that is to train in it.
        remedy: Advice for the case that the folder holds another run; None: give a new folder.
    """
    check_checkpoint_path(run_dir.path)
    if not run_dir.has_run():
        paths = [path for path in list_entries(run_dir.path) if path.suffix != TEMPORARY_SUFFIX]
        if names := [path.name for path in paths if path.name not in ENTRIES_BEFORE_CONFIG]:
            new_dir = shlex.quote(f'--workdir={run_dir}/run')
            raise UserError(f'{run_dir} contains files but no run ({names[0]}); give a new folder, e.g. {new_dir}')
        return
    saved_config, new_config = load_flat_configs(run_dir, spec)
    changed = [name for name in new_config if new_config[name] != saved_config[name] and not is_changeable(name)]
    if changed == [STEPS_FIELD] and spec.optimizer.schedule in EXTENDABLE_SCHEDULES:
        reached_steps = [*run_dir.list_checkpoint_steps(), *(record['step'] for record in run_dir.read_records())]
        if spec.optimizer.steps < (reached_step := max(reached_steps, default=0)):
            raise UserError(
                f'{run_dir} is at step {reached_step}, but config.{STEPS_FIELD} is {spec.optimizer.steps}; '
                f'give at least {reached_step}'
            )
    elif changed:
        differences = '; '.join(format_differences(saved_config, new_config))
        advice = remedy or f'give a new folder, e.g. {shlex.quote(f"--workdir={run_dir}-2")}'
        if changed == [STEPS_FIELD]:
            differences += f', on which the learning rates of a {spec.optimizer.schedule} schedule depend'
            advice += f', or start another run with {shlex.quote(f"--from={run_dir}")}'
        raise UserError(f'{run_dir} contains another run ({differences}); {advice}')


def load_flat_configs(run_dir: RunDir, spec: Spec) -> tuple[dict, dict]:
    """Return the saved config of the run and the config of `spec`, both flattened to dotted keys.

    A token store may have moved: a checkpoint identifies it by its digest, not by its path.
    """
    saved_config, new_config = (flatten_dict(dataclasses.asdict(config)) for config in (read_spec(run_dir), spec))
    if all(config['data.source'].startswith('store:') for config in (saved_config, new_config)):
        saved_config['data.source'] = new_config['data.source']
    return saved_config, new_config


def list_changes(run_dir: RunDir, spec: Spec) -> list[str]:
    """Return the config fields that differ from the saved config of the run."""
    return format_differences(*load_flat_configs(run_dir, spec))
