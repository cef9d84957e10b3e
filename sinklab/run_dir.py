"""The run directory: config, metrics, probes and checkpoints.

config.json     the resolved config
run.json        {"id"}: a random id, made when the run is initialized; its checkpoints store the same id
tokenizer.json  the tokenizer of a run on text
token_ids.json  bos_token_id and eos_token_id of an imported model
row.json        config file, row, diff, published numbers, source; for a fork, its lineage
environment.json  versions, devices, layout, commit of the latest attempt; attention, remat, changes of each attempt
metrics.jsonl   one line a record: {"step", "seconds", name: number}; append-only; in a bucket metrics/NUMBER.jsonl
probe/          STEP.npz, the arrays of one probe
checkpoints/    STEP, an Orbax checkpoint
digests/        STEP/PROCESS.json, sha256 and size of the files of a checkpoint that a process has written
damaged/        STEP, a quarantined checkpoint and its digests
outcome.json    how the latest attempt ended: kind, step, checkpoint, message, exit_code
lease.json      the lease of the job that works in this folder
"""

import contextlib
import dataclasses
import glob
import itertools
import json
import os
import re
import secrets
import unicodedata
from collections.abc import Callable
from pathlib import Path

from sinklab.config.spec import Spec
from sinklab.errors import UserError
from sinklab.storage import append_log, run_file_schemas
from sinklab.storage.atomic_write import atomic_write, open_writable_folder
from sinklab.storage.directories import list_committed
from sinklab.storage.paths import is_remote, parse_path
from sinklab.storage.untrusted_files import DamagedFileError

METRICS_FILE = 'metrics.jsonl'
RUN_FILES = 'config.json', 'row.json', 'run.json', 'environment.json', 'outcome.json', METRICS_FILE, 'tokenizer.json'


class RunDir:
    """A run directory, on a file system or in a bucket."""

    def __init__(self, path: str | os.PathLike):
        if not str(path):
            raise UserError('the path of the run folder is empty; give a folder')
        if any(unicodedata.category(char) == 'Cc' for char in str(path)):
            raise UserError(f'{str(path)!r} has a control character in its name; give another folder')
        if is_remote(path) and glob.has_magic(str(path)):
            raise UserError(f'{path} has *, ? or [ in its name, which is a pattern in a bucket; give another folder')
        self.path = parse_path(path)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def checkpoint_dir(self) -> Path:
        return self.path / 'checkpoints'

    @property
    def digest_dir(self) -> Path:
        return self.path / 'digests'

    @property
    def quarantine_dir(self) -> Path:
        return self.path / 'damaged'

    @property
    def probe_files(self) -> list[Path]:
        """Probe files, sorted by step; a file whose name is no step is skipped, with a warning."""
        files = sorted((self.path / 'probe').glob('*.npz'))
        for file in files:
            if run_file_schemas.parse_probe_step(file) is None:
                run_file_schemas.warn_once(
                    file,
                    f'{file} is skipped: its name is not a step, such as 00000500.npz; rename it, or move it away',
                )
        return sorted(
            (file for file in files if run_file_schemas.parse_probe_step(file) is not None),
            key=run_file_schemas.parse_probe_step,
        )

    def get_probe_path(self, step: int) -> Path:
        return self.path / 'probe' / f'{step:08}.npz'

    def read_remarks(self) -> list[str]:
        """Return sentences about the parameters that the import of an open model has put into row.json."""
        try:
            return self.read_json('row').get('remarks', [])
        except FileNotFoundError:
            return []

    def read_json(self, name: str) -> dict:
        """Read NAME.json: config, row, environment, outcome, or sweep (the table of a sweep).

        Raises:
            DamagedFileError: The file does not have its schema in sinklab/storage/run_file_schemas.py.
            FileNotFoundError: There is no such file.
        """
        return run_file_schemas.read_run_file(self.path / f'{name}.json', name)

    def read_steps_and_vocabulary(self) -> tuple[int | None, int | None]:
        """Read the number of steps and the vocabulary size from config.json; each is None if missing there."""
        config = self.read_json('config')
        return config.get('optimizer', {}).get('steps'), config.get('model', {}).get('vocabulary')

    def read_run_id(self) -> str | None:
        """Read the run id from run.json.

        Returns:
            The id; None if run.json is missing: the run is older than run ids, the folder holds no run, or the file
            was lost. sinklab.checkpoint.digests.find_run_id then finds the id in the checkpoints.

        Raises:
            UserError: run.json is damaged.
        """
        remedy = 'restore it from a copy, or delete it to use the id of all checkpoints of this run'
        try:
            return run_file_schemas.read_run_file(self.path / 'run.json', 'run', remedy)['id']
        except FileNotFoundError:
            return None

    def read_environment(self) -> dict:
        """Read environment.json: the environment of the newest attempt, and a list of all attempts.

        Returns:
            Its content; {} if the file is missing or damaged. A damaged file gives a warning.
        """
        file = self.path / 'environment.json'
        try:
            environment = run_file_schemas.read_run_file(
                file, 'environment', 'it is not used: its records of attempts are lost'
            )
            if not environment.get('attempts'):
                run_file_schemas.warn_once(file, f'{file} is damaged (it has no attempts); their records are lost')
            return environment
        except DamagedFileError as error:
            run_file_schemas.warn_once(file, str(error))
            return {}
        except OSError:
            return {}

    def has_run(self) -> bool:
        return (self.path / 'config.json').exists()

    def read_lineage(self) -> dict:
        """Read the lineage of a fork from row.json: its parent run and step, and its changes.

        Returns:
            The lineage; {} for a run that is no fork, and for a folder without a run.

        Raises:
            DamagedFileError: The folder holds a run without row.json.
        """
        try:
            return self.read_json('row').get('from') or {}
        except FileNotFoundError:
            if not self.has_run():
                return {}
            file = self.path / 'row.json'
            raise DamagedFileError(
                f'{file} is missing, which records the parent of a fork; {run_file_schemas.RESTORE_REMEDY}'
            ) from None

    def read_start_step(self) -> int:
        """Read the step after which the run starts: 0, or for a fork the step of its parent checkpoint.

        A fork that counts from another step records that step as `start`.
        """
        lineage = self.read_lineage()
        return lineage.get('start', lineage.get('step', 0))

    def initialize(self, spec: Spec, row: dict, tokenizer: str | None = None, run_id: str | None = None) -> None:
        """Write the config and the other initial files of a run; do nothing if the folder holds a run already.

        Call `resume_checks.check_run_dir` first: it raises if the folder holds another run.

        Args:
            spec: The config of the run.
            row: The content of row.json.
            tokenizer: The content of tokenizer.json; None: the run has none.
            run_id: The id of the run, if it has been made already; None: make a new id.
        """
        if self.has_run():
            return
        with open_writable_folder(self.path / 'probe'):
            if tokenizer:
                self.write_text('tokenizer.json', tokenizer)
            self.write_json('row', row)
            self.write_json('run', dict(id=run_id or make_run_id()))
            self.write_json('config', dataclasses.asdict(spec))

    def as_non_primary(self) -> 'RunDir':
        """Return the same run directory for a process that writes nothing, because another process does."""
        return NonPrimaryRunDir(self.path)

    def open_metrics_writer(self, check_lease: Callable[[], None]) -> 'MetricsWriter':
        """Open the writer of metrics.jsonl; it calls `check_lease` before it writes in the background."""
        return MetricsWriter(self, check_lease)

    def save_probe(self, step: int, save: Callable[[Path], None]) -> None:
        """Save the arrays of the probe at a step, by calling `save` with the path."""
        save(self.get_probe_path(step))

    def delete_json(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self.path / f'{name}.json').unlink()

    def write_json(self, name: str, content: dict) -> None:
        self.write_text(f'{name}.json', json.dumps(content, indent=2) + '\n')

    def write_text(self, name: str, content: str) -> None:
        with atomic_write(self.path / name) as temporary_path:
            temporary_path.write_text(content, encoding='utf-8')

    def read_records(self, last_step: int | None = None, strict: bool = False) -> list[dict]:
        """Read metrics.jsonl, with one merged record for each step, in ascending order of steps.

        A resumed run logs the steps after its checkpoint again; the last value of a metric counts. Evaluations that a
        stopped run left to its next attempt are on a line of their own, which is merged into the record of the step.

        Args:
            last_step: The last step of the run; a line with a later step is damaged. None: unknown.
            strict: Raise for a damaged line; False: skip the line with a warning on stderr.

        Raises:
            DamagedFileError: A line is damaged, and `strict` is True.
        """
        steps: dict[int, dict] = {}
        extra_step = None
        for record in self.read_metric_lines(strict):
            if last_step is not None and record['step'] > last_step:
                extra_step = record['step'] if extra_step is None else extra_step
                continue
            steps.setdefault(record['step'], {}).update(record)
        if extra_step is not None:
            file = self.path / METRICS_FILE
            problem = f'{file} is damaged (a line has step {extra_step}, but the run has {last_step} steps)'
            if strict:
                raise DamagedFileError(f'{problem}; {run_file_schemas.LINE_REMEDY}')
            run_file_schemas.warn_once(file, f'{problem} and is skipped there; {run_file_schemas.LINE_REMEDY}')
        return [steps[step] for step in sorted(steps)]

    def list_checkpoint_steps(self) -> list[int]:
        """List the steps of the complete checkpoints, in ascending order."""
        return sorted(int(name) for name in list_committed(self.checkpoint_dir) if name.isascii() and name.isdigit())

    def warn_about_lost_lines(self, record: dict, last_step: int, *required_names: str) -> None:
        """Warn on stderr if metrics.jsonl of a finished run has lost its last lines.

        Args:
            record: The newest record in metrics.jsonl.
            last_step: The last step of the run.
            *required_names: Metrics that the record of the last step must have.
        """
        file, step = self.path / METRICS_FILE, record.get('step', 0)
        missing_names = [name for name in required_names if name not in record]
        if step != last_step:
            run_file_schemas.warn_once(
                file, f'{file} ends at step {step}, but the run is done with {last_step}; restore its lines'
            )
        elif missing_names:
            run_file_schemas.warn_once(
                file, f'{file} has no {missing_names[0]} of its last step, {last_step}; restore its lines'
            )

    def find_gaps(self, records: list[dict], interval: int, end_step: int | None = None) -> list[tuple[int, int]]:
        """Find pairs of steps between which metrics.jsonl has lost training records.

        Args:
            records: The records of metrics.jsonl, in ascending order of steps.
            interval: Steps between two training records, from the config. Earlier attempts may have used other
                intervals (the changes in environment.json). The largest one counts, so that lines which were never
                written are not reported as lost.
            end_step: The step from which training resumes, which the records should reach. None: the newest record.
        """
        changes = [
            entry for attempt in self.read_environment().get('attempts', []) for entry in attempt.get('changes', [])
        ]
        intervals = [re.findall(r'\d+', change) for change in changes if 'log.every_steps' in change]
        interval = max([interval, *(int(old_interval) for gaps in intervals for old_interval in gaps)])
        steps = [self.read_start_step(), *(record['step'] for record in records if 'train/loss' in record)]
        gaps = [(before, after) for before, after in itertools.pairwise(steps) if after - before > interval]
        if end_step is not None and end_step - steps[-1] >= interval:
            gaps.append((steps[-1], end_step))
        return gaps

    def format_gap(self, gap: tuple[int, int]) -> str:
        """Format the warning about one pair of steps from `find_gaps`."""
        before, after = gap
        return (
            f'{self.path / METRICS_FILE} has lost its training records between steps {before} and {after}; curves '
            'omit them unless you restore them from a copy'
        )

    def has_evaluation(self, step: int) -> bool:
        """Return whether metrics.jsonl has a validation loss at a step; a finished run has one at its last step."""
        return any(record['step'] == step and 'valid/loss' in record for record in self.read_records())

    def read_elapsed_seconds(self, step: int) -> float:
        """Read how many seconds the run had taken when it reached a step; 0.0 if there is no record."""
        return max(
            (record.get('seconds', 0.0) for record in self.read_records() if record['step'] <= step), default=0.0
        )

    def read_metric_lines(self, strict: bool = False) -> list[dict]:
        """Read the lines of metrics.jsonl in the order in which they were written.

        A line that a crash has cut off is skipped.

        Args:
            strict: Raise for a damaged line; False: skip the line with a warning on stderr.

        Raises:
            DamagedFileError: A line is damaged, and `strict` is True.
        """
        file = self.path / METRICS_FILE
        records, faults = run_file_schemas.decode_metrics(append_log.read_log(file))
        if faults and strict:
            raise DamagedFileError(run_file_schemas.format_faults(file, faults, is_skipped=False))
        if faults:
            run_file_schemas.warn_once(file, run_file_schemas.format_faults(file, faults))
        return records

    def read_metric_lines_from(self, start_byte: int) -> tuple[list[dict], int]:
        """Read the complete lines of metrics.jsonl that begin at or after a byte offset.

        Returns:
            The records, and the byte offset after the last complete line, for the next call.
        """
        file = self.path / METRICS_FILE
        new_bytes = b''.join(append_log.read_log(file, start_byte).rpartition(b'\n')[:2])
        records, faults = run_file_schemas.decode_metrics(new_bytes)
        if faults:
            num_lines_before = (
                append_log.read_log(file)[:start_byte].count(b'\n') if start_byte else 0
            )  # reads the whole file, only to number the damaged lines
            _, faults = run_file_schemas.decode_metrics(new_bytes, num_lines_before + 1)
            run_file_schemas.warn_once(file, run_file_schemas.format_faults(file, faults))
        return records, start_byte + len(new_bytes)


def make_run_id() -> str:
    """Make a random id, so that no two runs have the same one."""
    return secrets.token_hex(8)


class NullMetricsWriter:
    """Metrics writer that writes nothing, because another process does."""

    def append(self, record: dict) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class NonPrimaryRunDir(RunDir):
    """Run directory of a process that writes nothing, because another process does."""

    def open_metrics_writer(self, check_lease: Callable[[], None]) -> NullMetricsWriter:
        return NullMetricsWriter()

    def initialize(self, spec: Spec, row: dict, tokenizer: str | None = None, run_id: str | None = None) -> None:
        pass

    def save_probe(self, step: int, save: Callable[[Path], None]) -> None:
        pass

    def delete_json(self, name: str) -> None:
        pass

    def write_json(self, name: str, content: dict) -> None:
        pass


class MetricsWriter:
    """Metrics writer that appends records to metrics.jsonl."""

    def __init__(self, run_dir: RunDir, check_lease: Callable[[], None]):
        self.log = append_log.open_append_log(run_dir.path / METRICS_FILE, check_lease)
        self.sync, self.close = self.log.sync, self.log.close

    def append(self, record: dict) -> None:
        self.log.append(json.dumps(record, allow_nan=False).encode())
