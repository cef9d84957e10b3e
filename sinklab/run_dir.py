"""The run directory: config, metrics, probes and checkpoints.

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
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from sinklab.config.spec import Spec
from sinklab.errors import UserError
from sinklab.run_files import SCHEMAS
from sinklab.storage.files import (
    RESTORE_REMEDY,
    DamagedFileError,
    list_entries,
    open_writable_folder,
    read_json,
    warn_once,
    write_text,
)
from sinklab.storage.paths import get_file_system, is_remote, parse_path

METRICS_FILE = 'metrics.jsonl'
COMMIT_FILE = 'commit_success.txt'  # the last file of a checkpoint that Orbax writes
UPLOAD_SECONDS = 60.0  # seconds between two uploads of metrics.jsonl into a bucket, unless a save needs one
RECORD_DECODER = msgspec.json.Decoder(dict[str, int | float])


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
        return sorted(
            (path for path in list_entries(self.path / 'probe') if path.suffix == '.npz' and path.stem.isdecimal()),
            key=lambda path: int(path.stem),
        )

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

    def read_json(self, name: str) -> dict:
        """Read NAME.json: config, row, environment, outcome, or sweep.

        Raises:
            DamagedFileError: The file does not have its schema in sinklab/run_files.py.
            FileNotFoundError: There is no such file.
        """
        return read_json(self.path / f'{name}.json', SCHEMAS[name])

    def read_remarks(self) -> list[str]:
        """Return sentences about the parameters that the import of an open model has put into row.json."""
        try:
            return self.read_json('row').get('remarks', [])
        except FileNotFoundError:
            return []

    def read_environment(self) -> dict:
        """Read environment.json; {} with a warning if it is damaged, and {} if it is missing."""
        try:
            return self.read_json('environment')
        except FileNotFoundError:
            return {}
        except DamagedFileError as error:
            warn_once(str(error))
            return {}

    def read_parent(self) -> dict:
        """Read the parent of a warm start from row.json: its parent run and step, and its changes.

        Returns:
            The parent; {} for a run that is no warm start, and for a folder without a run.

        Raises:
            DamagedFileError: The folder holds a run without row.json.
        """
        try:
            return self.read_json('row').get('from') or {}
        except FileNotFoundError:
            if not self.has_run():
                return {}
            raise DamagedFileError(f'{self.path / "row.json"} is missing; {RESTORE_REMEDY}') from None

    def read_start_step(self) -> int:
        """Read the step after which the run starts: 0, or that of the parent if the run takes its whole state."""
        parent = self.read_parent()
        return parent.get('start', parent.get('step', 0))

    def initialize(self, spec: Spec, row: dict, tokenizer: str | None = None) -> None:
        """Write the config and the other initial files of a run; do nothing if the folder holds a run already.

        Call `resume_checks.check_run_dir` first: it raises if the folder holds another run.

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
            except (msgspec.DecodeError, KeyError):
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

    def has_evaluation(self, step: int) -> bool:
        """Return whether metrics.jsonl has a validation loss at a step; a finished run has one at its last step."""
        return any(record['step'] == step and 'valid/loss' in record for record in self.read_records())


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
        self.target = run_dir.path / METRICS_FILE
        self.check_owner = check_owner
        self.upload_time = time.monotonic()
        self.file = self.temporary_dir = None
        if not run_dir.is_writable:
            return
        self.path = self.target
        if is_remote(self.target):
            self.temporary_dir = tempfile.TemporaryDirectory()
            self.path = Path(self.temporary_dir.name, METRICS_FILE)
        records = [record for record in run_dir.read_metric_lines() if record['step'] <= resume_step]
        write_text(self.path, ''.join(f'{json.dumps(record)}\n' for record in records))
        self.file = self.path.open('a', encoding='utf-8')

    def append(self, record: dict) -> None:
        if not self.file:
            return
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
