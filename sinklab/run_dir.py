"""The run directory: config, metrics, probes, checkpoints, and checks before a run resumes.

config.json     the resolved config
run.json        {"id"}: a random id, made when the run is initialized; its checkpoints store the same id
tokenizer.json  the tokenizer of a run on text
row.json        config file, row, diff, published numbers, source; for a fork, its lineage
environment.json  versions, devices, layout, commit of the latest attempt; attention, remat, changes of each attempt
metrics.jsonl   one line a record: {"step", "seconds", name: number}; append-only; in a bucket metrics/NUMBER.jsonl
probe/          STEP.npz, the arrays of one probe
checkpoints/    STEP, an Orbax checkpoint
digests/        STEP/PROCESS.json, sha256 and size of the files of a checkpoint that a process has written
damaged/        STEP, a quarantined checkpoint and its digests
processes/      PROCESS.log, the errors of a process, with the stacks of its threads
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
from typing import Any

from sinklab.config.spec import (
    CHANGEABLE_FIELDS,
    EXTENDABLE_SCHEDULES,
    Spec,
    fill_missing_fields,
)
from sinklab.config.validate import parse_config
from sinklab.errors import UserError
from sinklab.escape import join_shell, quote_shell
from sinklab.storage import append_log, run_file_schemas, untrusted_files
from sinklab.storage.atomic_write import TEMPORARY_SUFFIX, atomic_write, open_writable_folder
from sinklab.storage.directories import list_committed, list_entries
from sinklab.storage.paths import check_path_readable_by_orbax, is_remote, parse_path
from sinklab.storage.untrusted_files import DamagedFileError


def flatten_dict(tree: dict, prefix: str = '') -> dict[str, Any]:
    """Flatten a nested dict to dotted keys: {'a': {'b': 1}} becomes {'a.b': 1}."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {
        key: value
        for name, subtree in tree.items()
        for key, value in flatten_dict(subtree, f'{prefix}.{name}'.strip('.')).items()
    }


def format_differences(old: dict, new: dict) -> list[str]:
    return [f'{key} {old.get(key)} -> {new.get(key)}' for key in new | old if old.get(key) != new.get(key)]


def format_run_ref(takes: str, run_path: object, step: int | str) -> str:
    """Format a checkpoint as a value of --from: [TAKES:]RUN@STEP.

    Args:
        takes: What a warm start takes from the checkpoint, such as 'params'; '': all of it.
        run_path: The run folder.
        step: The step of the checkpoint, or a placeholder.
    """
    return f'{takes and f"{takes}:"}{run_path}@{step}'


def format_fork(lineage: dict) -> list[str]:
    """Format the origin of a fork, and what the fork changes, as a list of short texts.

    Args:
        lineage: The entry `from` of row.json; empty for a run that is no fork, which gives [].
    """
    if not lineage:
        return []
    labels = {'new': 'new', 'dropped': 'dropped', 'reads other data': 'data'}
    details = [f'{label}: {", ".join(entries)}' for label, name in labels.items() if (entries := lineage.get(name))]
    origin = format_run_ref(lineage.get('takes', ''), lineage['run'], lineage['step'])
    return [f'from {origin}', *lineage.get('config', []), *details]


# Files that a folder may contain before config.json exists: those of the job that works there, and those that an
# interrupted `initialize` has left.
FILES_BEFORE_CONFIG = (
    'lease.json',
    'lease.lock',
    'processes',
    'digests',
    'damaged',
    'probe',
    'row.json',
    'run.json',
    'tokenizer.json',
)
METRICS_FILE = 'metrics.jsonl'
RUN_FILES = 'config.json', 'row.json', 'run.json', 'environment.json', 'outcome.json', METRICS_FILE, 'tokenizer.json'
STEPS_FIELD, CHANGEABLE_PREFIXES = 'optimizer.steps', tuple(f'{name}.' for name in CHANGEABLE_FIELDS)


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
        content = run_file_schemas.read_run_file(self.path / f'{name}.json', name)
        return fill_missing_fields(content) if name == 'config' else content

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

    def check_spec(self, spec: Spec, remedy: str | None = None) -> None:
        """Raise UserError if the folder holds another run or other files, or cannot hold checkpoints.

        Args:
            spec: The spec of the run that is to train in this folder.
            remedy: Advice for the case that the folder holds another run; None: give a new folder.
        """
        check_path_readable_by_orbax(self.path)
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise UserError(f'{self} is a file; give a folder as --workdir')
        if not self.has_run():
            foreign_entries = [
                path
                for path in list_entries(self.path)
                if path.name not in FILES_BEFORE_CONFIG and path.suffix != TEMPORARY_SUFFIX
            ]
            if foreign_entries:
                raise UserError(
                    f'{self} contains files but no run ({foreign_entries[0].name}); give a new folder, e.g. '
                    f'{quote_shell(f"--workdir={self}/run")}'
                )
            return
        self.check_files()
        saved_config, new_config = self.load_flat_configs(spec)
        advice = remedy or f'give a new folder, e.g. {quote_shell(f"--workdir={self}-2")}'
        if new_config.keys() != saved_config.keys():
            removed_fields, missing_fields = (
                ', '.join(sorted(config.keys() - other_config))
                for config, other_config in ((saved_config, new_config), (new_config, saved_config))
            )
            mismatches = filter(
                None,
                (
                    removed_fields and f'has the unknown fields {removed_fields}',
                    missing_fields and f'lacks {missing_fields}',
                ),
            )
            raise UserError(
                f'{self} contains a run of another version, whose config {" and ".join(mismatches)}; use commit '
                f'{self.read_environment().get("commit")}, or {advice}'
            )
        mismatches = [
            key
            for key in new_config
            if new_config[key] != saved_config[key] and not f'{key}.'.startswith(CHANGEABLE_PREFIXES)
        ]
        if mismatches == [STEPS_FIELD]:
            self.check_step_change(spec, saved_config[STEPS_FIELD], remedy)
        elif mismatches:
            scaling_note = self.explain_scaling(mismatches, saved_config)
            raise UserError(
                f'{self} contains another run '
                f'({"; ".join(format_differences(saved_config, new_config))}{scaling_note}); {advice}'
            )

    def check_files(self) -> None:
        """Raise DamagedFileError if a file of the run is no regular file, such as a folder or a FIFO."""
        if is_remote(self.path):
            return
        probes = self.path / 'probe'
        if probes.exists() and not probes.is_dir():
            raise DamagedFileError(f'{probes} is a file instead of a folder; move it away')
        for file in (*(self.path / name for name in (*RUN_FILES, 'lease.lock')), *probes.glob('*.npz')):
            untrusted_files.check_regular_file(file)

    def load_flat_configs(self, spec: Spec) -> tuple[dict, dict]:
        """Return the saved config of the run and the config of `spec`, both flattened to dotted keys.

        If both read a token store, the saved config gets the new path of the store, so that the paths do not differ.
        """
        saved_config, new_config = flatten_dict(self.read_json('config')), flatten_dict(dataclasses.asdict(spec))
        if all(config.get('data.source', '').startswith('store:') for config in (saved_config, new_config)):
            saved_config['data.source'] = new_config[
                'data.source'
            ]  # a checkpoint identifies the store by its digest, not by its path
        return saved_config, new_config

    def list_changes(self, spec: Spec) -> list[str]:
        """Return the config fields that differ from the saved config of the run."""
        return format_differences(*self.load_flat_configs(spec))

    def explain_scaling(self, mismatches: list[str], saved_config: dict) -> str:
        """Describe mismatches that exist because an older version scaled the numbers of a row with the size.

        Such a field has different numbers in row.json and in config.json.

        Returns:
            The note for the error message; '' if no field was scaled.
        """
        try:
            row = self.read_json('row')
        except (OSError, ValueError):
            return ''
        row_values = {
            path: row.get('diff', {}).get(path) for path in mismatches if path not in row.get('overrides', {})
        }
        scaled_values = [
            f'{path!r}: {value!r}'
            for path, value in row_values.items()
            if type(value) in (int, float) and value != saved_config[path]
        ]
        if not scaled_values:
            return ''
        return (
            f'; that run was scaled with its size, as scale_with_size({{{", ".join(scaled_values)}}}) in the row does'
        )

    def check_step_change(self, spec: Spec, saved_steps: int, remedy: str | None = None) -> None:
        """Raise UserError if a new number of steps would change steps that are already done.

        Args:
            spec: The spec with the new number of steps.
            saved_steps: The number of steps in the saved config.
            remedy: Advice for the case that the schedule cannot be extended; None: fork the run or give a new folder.
        """
        steps, schedule, checkpoint_steps = (
            spec.optimizer.steps,
            spec.optimizer.schedule,
            self.list_checkpoint_steps(),
        )
        reached_step = max(
            [*checkpoint_steps, *(record['step'] for record in self.read_records(saved_steps, strict=True))],
            default=0,
        )
        if schedule in EXTENDABLE_SCHEDULES and steps < reached_step:
            raise UserError(
                f'{self} is at step {reached_step}, but config.{STEPS_FIELD} is {steps}; give at least {reached_step}'
            )
        if schedule not in EXTENDABLE_SCHEDULES:
            fork_flags = (
                [f'--from={self}@{checkpoint_steps[-1]}', f'--config.{STEPS_FIELD}={steps}']
                if checkpoint_steps
                else []
            )
            remedy_text = 'fork it' if checkpoint_steps else 'give a new folder'
            advice = f'{remedy_text}: {join_shell([*fork_flags, f"--workdir={self}-2"])}'
            raise UserError(
                f'{self}: the learning rates of a {schedule} schedule depend on the number of steps, so '
                f'config.{STEPS_FIELD} cannot change from {saved_steps} to {steps}; {remedy or advice}'
            )

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

    def summarize_newest_attempt(self, attempts: list[dict]) -> tuple[int, str, list[str]]:
        """Summarize the newest attempt for the log.

        Args:
            attempts: The attempts in environment.json, the newest one last.

        Returns:
            The step at which the newest attempt started; the attention backends of all attempts as text, the newest
            first; and the lines about changes, with the lineage if a fork starts with this attempt.
        """
        step, changes = attempts[-1]['step'], attempts[-1].get('changes', [])
        attention_backends = dict.fromkeys(attempt['attention'] for attempt in reversed(attempts))
        try:
            lineage_lines = format_fork(self.read_lineage()) if step == self.read_start_step() else []
        except DamagedFileError as error:
            run_file_schemas.warn_once(self.path / 'row.json', str(error))
            lineage_lines = []
        return step, ', earlier '.join(attention_backends), [*lineage_lines, *changes]

    def read_start_step(self) -> int:
        """Read the step after which the run starts: 0, or for a fork the step of its parent checkpoint.

        A fork that counts from another step records that step as `start`.
        """
        lineage = self.read_lineage()
        return lineage.get('start', lineage.get('step', 0))

    def initialize(self, spec: Spec, row: dict, tokenizer: str | None = None, run_id: str | None = None) -> None:
        """Write the config and the other initial files of a run; do nothing if the folder holds a run already.

        Call `check_spec` first: it raises if the folder holds another run.

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


# Prefixes of open models: hf:FOLDER, hf:ID on the Hugging Face Hub, or gguf:FILE.
HF_PREFIX, GGUF_PREFIX = MODEL_PREFIXES = 'hf:', 'gguf:'


def parse_run_ref(run_ref: str) -> tuple[RunDir, int | None]:
    """Parse RUN[@STEP] into a run directory and a step.

    The name of a run folder may contain @: if `run_ref` as a whole is a run folder, no step is split off.

    Returns:
        The run directory, and the step; None if no step is given.
    """
    path, _, step = run_ref.rpartition('@')
    run_dir = RunDir(run_ref)
    if not path or not step.isdecimal() or run_dir.has_run() or run_dir.list_checkpoint_steps():
        return run_dir, None
    return RunDir(path), int(step)


def select_steps(run_dir: RunDir, step: int | None) -> list[int]:
    """Return the given step if it has a checkpoint, or all steps with a checkpoint if `step` is None.

    Raises:
        UserError: The folder is no run, it has no checkpoints, or it has none of this step.
    """
    saved_steps = run_dir.list_checkpoint_steps()
    if not saved_steps:
        if str(run_dir).startswith(MODEL_PREFIXES) or is_hf_model(run_dir):
            raise make_missing_run_error(str(run_dir))
        raise UserError(f'{run_dir} has no checkpoints; give the folder of a run that has saved some')
    if step is None:
        return saved_steps
    if step not in saved_steps:
        raise UserError(f'{run_dir} has no checkpoint {step}; it has: {", ".join(map(str, saved_steps))}')
    return [step]


def read_spec(run_dir: RunDir) -> Spec:
    """Read the spec of a run from its config.json.

    Raises:
        DamagedFileError: config.json is damaged.
        UserError: The folder is no run, or the config is one of another version of sinklab.
    """
    try:
        return parse_config(run_dir.read_json('config'))
    except FileNotFoundError as error:
        raise make_missing_run_error(str(run_dir)) from error
    except DamagedFileError:
        raise
    except UserError as refusal:
        if is_hf_model(run_dir):
            raise make_missing_run_error(str(run_dir)) from refusal
        commit = run_dir.read_environment().get('commit')
        raise UserError(
            f'{run_dir} contains a run of another version ({refusal}); use commit {commit} for it'
        ) from refusal


def make_missing_run_error(run_ref: str, accepts_hf_models: bool = False) -> UserError:
    """Make the UserError for a reference that is no run folder; it says what to do for an open model.

    Args:
        run_ref: What the user gave: a path, hf:PATH_OR_ID or gguf:PATH.
        accepts_hf_models: Whether the command also takes hf:PATH_OR_ID and gguf:PATH.
    """
    has_prefix, run_dir = run_ref.startswith(MODEL_PREFIXES), RunDir(run_ref)
    is_gguf_file = not has_prefix and run_ref.endswith('.gguf') and run_dir.path.is_file()
    if has_prefix or is_gguf_file or is_hf_model(run_dir):
        problem = 'is an open model' if has_prefix or is_gguf_file else 'contains an open model'
        model_ref = run_ref if has_prefix else f'{GGUF_PREFIX if is_gguf_file else HF_PREFIX}{run_ref}'
        if accepts_hf_models:
            return UserError(f'{run_ref} {problem}; give {join_shell([model_ref])}')
        import_command = join_shell(['sinklab', 'checkpoint', 'import', model_ref, '--out=runs/imported'])
        return UserError(
            f'{run_ref} {problem}, but a run is needed; make a run of it with {import_command}, '
            'and give runs/imported'
        )
    problem = 'contains no run' if run_dir.path.exists() else 'does not exist'
    if not accepts_hf_models:
        return UserError(f'{run_ref} {problem}; give the folder of a run')
    is_hub_id = re.fullmatch(r'[\w-]+/[\w.-]+', run_ref)
    hf_ref = join_shell([f'{HF_PREFIX}{run_ref}']) if is_hub_id else f'{HF_PREFIX}PATH_OR_ID'
    return UserError(f'{run_ref} {problem}; give the folder of a run, or {hf_ref} for an open model')


def is_hf_model(run_dir: RunDir) -> bool:
    """Return whether a folder has the config.json of a transformers model."""
    try:
        return 'model_type' in untrusted_files.read_json(run_dir.path / 'config.json')
    except (OSError, UserError):
        return False
