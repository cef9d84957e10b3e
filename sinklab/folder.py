"""The run folder: what a run leaves behind, and who may go on in it.

config.json     the resolved config
run.json        {"id"}, random, given to the run when it began; its checkpoints carry it
tokenizer.json  of a run on text
row.json        config file, row, diff, published numbers, source; of a fork, what it comes from
environment.json  versions, devices, layout, commit of the latest attempt; of each, its attention and what it changed
metrics.jsonl   {"step", "seconds", name: number} a line; appended, never rewritten; in a bucket metrics/NUMBER.jsonl
probe/          STEP.npz, the arrays of one probe
checkpoints/    STEP, a checkpoint of Orbax
digests/        STEP/PROCESS.json, sha256 and size of what a process has written of a checkpoint
damaged/        STEP, a checkpoint that was passed over, and its digests
processes/      PROCESS.log, what has gone wrong on a process, and where its threads were
outcome.json    how the latest attempt has ended: kind, step, checkpoint, message, exit_code
lease.json      the job that is at work here
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

from sinklab.escape import join_shell, quote_shell
from sinklab.files import lines, regular, run_files
from sinklab.files.place import check_checkpoint_path, is_remote, place
from sinklab.files.regular import Damaged
from sinklab.files.tree import entries, finished
from sinklab.files.whole import UNFINISHED, whole, writable
from sinklab.record import Refusal
from sinklab.spec import CHANGEABLE, OPEN_ENDED, Spec, completed


def flat(tree: dict, at: str = '') -> dict[str, Any]:
    """{'a': {'b': 1}} -> {'a.b': 1}."""
    if not isinstance(tree, dict):
        return {at: tree}
    return {key: value for name, part in tree.items() for key, value in flat(part, f'{at}.{name}'.strip('.')).items()}


def differences(old: dict, new: dict) -> list[str]:
    return [f'{key} {old.get(key)} -> {new.get(key)}' for key in new | old if old.get(key) != new.get(key)]


def named(takes: str, run: object, step: int | str) -> str:
    """A checkpoint, and what is taken of it where that is not all, as --from has it."""
    return f'{takes and f"{takes}:"}{run}@{step}'


def ancestry(lineage: dict) -> list[str]:
    """What a fork comes from and has otherwise, as a person reads it; nothing of a run that is none."""
    if not lineage:
        return []
    lists = {'new': 'new', 'dropped': 'dropped', 'reads other data': 'data'}
    told = [f'{words}: {", ".join(found)}' for words, name in lists.items() if (found := lineage.get(name))]
    origin = named(lineage.get('takes', ''), lineage['run'], lineage['step'])
    return [f'from {origin}', *lineage.get('config', []), *told]


# What may lie in a folder before its config does: of the job that is at work, and of a claim that was cut short.
BEGUN = (
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
METRICS = 'metrics.jsonl'
FILES = 'config.json', 'row.json', 'run.json', 'environment.json', 'outcome.json', METRICS, 'tokenizer.json'
STEPS, FREE = 'optimizer.steps', tuple(f'{name}.' for name in CHANGEABLE)


class Folder:
    def __init__(self, path: str | os.PathLike):
        if not str(path):
            raise Refusal('--workdir= is empty; give a folder')
        if any(unicodedata.category(letter) == 'Cc' for letter in str(path)):
            raise Refusal(f'{str(path)!r} has a control character in its name; give a folder without')
        if is_remote(path) and glob.has_magic(str(path)):
            raise Refusal(f'{path} has *, ? or [ in its name, which is a pattern in a bucket; give a folder without')
        self.path = place(path)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def checkpoints(self) -> Path:
        return self.path / 'checkpoints'

    @property
    def digests(self) -> Path:
        return self.path / 'digests'

    @property
    def damaged(self) -> Path:
        return self.path / 'damaged'

    @property
    def probes(self) -> list[Path]:
        """Return the probes taken, by step; a file whose name is no step is named and passed over."""
        found = sorted((self.path / 'probe').glob('*.npz'))
        for file in found:
            if run_files.step_of(file) is None:
                run_files.warn(
                    file,
                    f'{file} is passed over: its name is no step, as 00000500.npz is; rename it, or move it away',
                )
        return sorted((file for file in found if run_files.step_of(file) is not None), key=run_files.step_of)

    def probe(self, step: int) -> Path:
        return self.path / 'probe' / f'{step:08}.npz'

    def read(self, name: str) -> dict:
        """Read config, row, environment or outcome, or the table of a sweep.

        Raises:
            Damaged: it is not as its schema in files/run_files.py says.
            FileNotFoundError: it is not there.
        """
        found = run_files.read_json(self.path / f'{name}.json', name)
        return completed(found) if name == 'config' else found

    def limits(self) -> tuple[int | None, int | None]:
        """Return the last step of the run and its vocabulary, each None where config.json does not say it."""
        config = self.read('config')
        return config.get('optimizer', {}).get('steps'), config.get('model', {}).get('vocabulary')

    def run_id(self) -> str | None:
        """Return the id in run.json.

        Returns:
            None where it is missing: of a run that is older than these ids, in a folder that holds no run, or lost;
            checkpoint/digests.py:find_run_id then finds it in the checkpoints.

        Raises:
            Refusal: run.json is damaged.
        """
        remedy = 'bring it back, or delete it, and the id that all checkpoints of this run carry is taken for it'
        try:
            return run_files.read_json(self.path / 'run.json', 'run', remedy)['id']
        except FileNotFoundError:
            return None

    def environment(self) -> dict:
        """Of the newest attempt, with (step, attention) of all; nothing of what cannot be read."""
        file = self.path / 'environment.json'
        try:
            found = run_files.read_json(file, 'environment', 'it is done without: what it says of attempts is lost')
            if not found.get('attempts'):
                run_files.warn(file, f'{file} is damaged (it has no attempts); what it said of them is lost')
            return found
        except Damaged as error:
            run_files.warn(file, str(error))
            return {}
        except OSError:
            return {}

    def check(self, spec: Spec, instead: str | None = None) -> None:
        """Refuses a folder that holds another run, or something that is none, or where no checkpoint can be saved.

        Args:
            instead: what to do where it holds another run; otherwise, to give a new folder.
        """
        check_checkpoint_path(self.path)
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise Refusal(f'{self} is a file; give a folder as --workdir')
        if not self.is_claimed():
            others = [path for path in entries(self.path) if path.name not in BEGUN and path.suffix != UNFINISHED]
            if others:
                raise Refusal(
                    f'{self} holds files and no run ({others[0].name}); give a new folder, e.g. '
                    f'{quote_shell(f"--workdir={self}/run")}'
                )
            return
        self.check_files()
        theirs, ours = self.configs(spec)
        another = instead or f'give a new folder, e.g. {quote_shell(f"--workdir={self}-2")}'
        if ours.keys() != theirs.keys():
            gone, new = (', '.join(sorted(one.keys() - other)) for one, other in ((theirs, ours), (ours, theirs)))
            differ = filter(None, (gone and f'has {gone}, unknown here', new and f'lacks {new}'))
            raise Refusal(
                f'{self} holds a run of another version, whose config {" and ".join(differ)}; go on with commit '
                f'{self.environment().get("commit")}, or {another}'
            )
        differ = [key for key in ours if ours[key] != theirs[key] and not f'{key}.'.startswith(FREE)]
        if differ == [STEPS]:
            self.check_steps(spec, theirs[STEPS], instead)
        elif differ:
            scaled = self.explain_scaling(differ, theirs)
            raise Refusal(f'{self} holds another run ({"; ".join(differences(theirs, ours))}{scaled}); {another}')

    def check_files(self) -> None:
        """Refuse what stands in the place of a file that is to be read or written. Raises Damaged."""
        if is_remote(self.path):
            return
        probes = self.path / 'probe'
        if probes.exists() and not probes.is_dir():
            raise Damaged(f'{probes} is a file where a folder has to be; move it away')
        for file in (*(self.path / name for name in (*FILES, 'lease.lock')), *probes.glob('*.npz')):
            regular.check(file)

    def configs(self, spec: Spec) -> tuple[dict, dict]:
        """(the run's, this one), flat."""
        theirs, ours = flat(self.read('config')), flat(dataclasses.asdict(spec))
        if all(config.get('data.source', '').startswith('store:') for config in (theirs, ours)):
            theirs['data.source'] = ours['data.source']  # a checkpoint knows the store by its digest, wherever it is
        return theirs, ours

    def changes(self, spec: Spec) -> list[str]:
        """What is no longer as in the run's latest attempt."""
        return differences(*self.configs(spec))

    def explain_scaling(self, differ: list[str], config: dict) -> str:
        """Name the fields that differ because an older version multiplied a row's numbers by what a size has.

        That is seen where row.json has another number than config.json. Returns '' where there is none.
        """
        try:
            row = self.read('row')
        except (OSError, ValueError):
            return ''
        written = {path: row.get('diff', {}).get(path) for path in differ if path not in row.get('overrides', {})}
        scaled = [
            f'{path!r}: {value!r}'
            for path, value in written.items()
            if type(value) in (int, float) and value != config[path]
        ]
        if not scaled:
            return ''
        return f'; that run was scaled with its size, as scale_with_size({{{", ".join(scaled)}}}) in the row does'

    def check_steps(self, spec: Spec, before: int, instead: str | None = None) -> None:
        """Refuses another number of steps where it would change those that are done."""
        steps, schedule, saved = spec.optimizer.steps, spec.optimizer.schedule, self.checkpoint_steps()
        reached = max([*saved, *(record['step'] for record in self.records(before, strict=True))], default=0)
        if schedule in OPEN_ENDED and steps < reached:
            raise Refusal(f'{self} is at step {reached}, and config.{STEPS} is {steps}; give at least {reached}')
        if schedule not in OPEN_ENDED:
            fork = [f'--from={self}@{saved[-1]}', f'--config.{STEPS}={steps}'] if saved else []
            advice = f'{"fork it" if saved else "give a new folder"}: {join_shell([*fork, f"--workdir={self}-2"])}'
            raise Refusal(
                f'{self} holds a run of {before} steps, and {steps} change every step of a {schedule} schedule; '
                f'{instead or advice}'
            )

    def is_claimed(self) -> bool:
        return (self.path / 'config.json').exists()

    def lineage(self) -> dict:
        """Of a fork: the run and the step that it comes from, and what it changed there."""
        try:
            return self.read('row').get('from') or {}
        except FileNotFoundError:
            if not self.is_claimed():
                return {}
            file = self.path / 'row.json'
            raise Damaged(f'{file} is missing, which says what a fork comes from; {run_files.REMEDY}') from None

    def beginning(self, attempts: list[dict]) -> tuple[int, str, list[str]]:
        """Of the newest attempt: (step, what computes attention, and did before, what has changed there)."""
        step, changes = attempts[-1]['step'], attempts[-1].get('changes', [])
        said = dict.fromkeys(attempt['attention'] for attempt in reversed(attempts))
        try:
            begun = ancestry(self.lineage()) if step == self.start() else []
        except Damaged as error:
            run_files.warn(self.path / 'row.json', str(error))
            begun = []
        return step, ', earlier '.join(said), [*begun, *changes]

    def start(self) -> int:
        """The step that the run begins after; a fork says it where that is not the one of its checkpoint."""
        lineage = self.lineage()
        return lineage.get('start', lineage.get('step', 0))

    def claim(self, spec: Spec, row: dict, tokenizer: str | None = None, run_id: str | None = None) -> None:
        """Makes a new folder this run's; one that `check` has let pass is left as it is.

        Args:
            run_id: the id of the run, if it has been made already; otherwise it gets a new one.
        """
        if self.is_claimed():
            return
        with writable(self.path / 'probe'):
            if tokenizer:
                self.write_text('tokenizer.json', tokenizer)
            self.write('row', row)
            self.write('run', dict(id=run_id or new_run_id()))
            self.write('config', dataclasses.asdict(spec))

    def read_only(self) -> 'Folder':
        """The same folder for a process that leaves the writing to another."""
        return Reading(self.path)

    def metrics(self, check: Callable[[], None]) -> 'Metrics':
        """What numbers are written to; `check` is asked before that is done in the background."""
        return Metrics(self, check)

    def keep(self, step: int, save: Callable[[Path], None]) -> None:
        """Has the arrays of a probe saved."""
        save(self.probe(step))

    def forget(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self.path / f'{name}.json').unlink()

    def write(self, name: str, content: dict) -> None:
        self.write_text(f'{name}.json', json.dumps(content, indent=2) + '\n')

    def write_text(self, name: str, content: str) -> None:
        with whole(self.path / name) as unfinished:
            unfinished.write_text(content, encoding='utf-8')

    def records(self, last: int | None = None, strict: bool = False) -> list[dict]:
        """metrics.jsonl by step. A resumed run says the steps after its checkpoint again; the last word counts.

        What a stopped run has left to its next attempt to measure stands in a line of its own.

        Args:
            last: the run has no step after this one; a line that has is damaged. None: that is not known.
            strict: raise Damaged for a damaged line, instead of saying on stderr that it is passed over.
        """
        steps: dict[int, dict] = {}
        beyond = None
        for record in self.lines(strict):
            if last is not None and record['step'] > last:
                beyond = record['step'] if beyond is None else beyond
                continue
            steps.setdefault(record['step'], {}).update(record)
        if beyond is not None:
            file = self.path / METRICS
            words = f'{file} is damaged (a line has step {beyond}, and the run has {last} steps)'
            if strict:
                raise Damaged(f'{words}; {run_files.REMOVE}')
            run_files.warn(file, f'{words} and passed over there; {run_files.REMOVE}')
        return [steps[step] for step in sorted(steps)]

    def checkpoint_steps(self) -> list[int]:
        """The steps of the finished checkpoints."""
        return sorted(int(name) for name in finished(self.checkpoints) if name.isascii() and name.isdigit())

    def warn_of_lost_lines(self, record: dict, last: int, *names: str) -> None:
        """Say on stderr that metrics.jsonl has lost its end, of a run that is done with step `last`.

        Args:
            record: the newest record that there is.
            last: the last step of the run.
            names: numbers that its last record has.
        """
        file, step = self.path / METRICS, record.get('step', 0)
        lacking = [name for name in names if name not in record]
        if step != last:
            run_files.warn(file, f'{file} ends at step {step}, and the run is done with {last}; bring its lines back')
        elif lacking:
            run_files.warn(file, f'{file} has no {lacking[0]} of its last step, {last}; bring its lines back')

    def gaps(self, records: list[dict], every: int, until: int | None = None) -> list[tuple[int, int]]:
        """Return pairs of steps between which metrics.jsonl has lost lines of training.

        Args:
            records: of metrics.jsonl, by step.
            every: steps from one line to the next, by the config. Earlier attempts may have had others (the changes
                in environment.json): the largest counts, so that no line is missed that was never written.
            until: lines are to reach as far as this step, from which training goes on. None: as far as they go.
        """
        changes = [one for attempt in self.environment().get('attempts', []) for one in attempt.get('changes', [])]
        numbers = [re.findall(r'\d+', change) for change in changes if 'log.every_steps' in change]
        every = max([every, *(int(number) for found in numbers for number in found)])
        steps = [self.start(), *(record['step'] for record in records if 'train/loss' in record)]
        found = [(before, after) for before, after in itertools.pairwise(steps) if after - before > every]
        if until is not None and until - steps[-1] >= every:
            found.append((steps[-1], until))
        return found

    def describe_gap(self, gap: tuple[int, int]) -> str:
        """Return what is to be said of one of `gaps`."""
        before, after = gap
        return (
            f'{self.path / METRICS} has lost its lines of training between steps {before} and {after}; curves go '
            'on without them, unless you bring them back from a copy'
        )

    def is_measured(self, step: int) -> bool:
        """Whether a run was measured after a step, as it is at its end."""
        return any(record['step'] == step and 'valid/loss' in record for record in self.records())

    def seconds(self, step: int) -> float:
        """What the run had taken when it came to a step."""
        return max((record.get('seconds', 0.0) for record in self.records() if record['step'] <= step), default=0.0)

    def lines(self, strict: bool = False) -> list[dict]:
        """Return the lines of metrics.jsonl as written; one cut off by a crash is passed over.

        A damaged one is passed over, too, and named on stderr, or raises Damaged if that is asked for.
        """
        file = self.path / METRICS
        found, faults = run_files.decode_metrics(lines.read(file))
        if faults and strict:
            raise Damaged(run_files.say_faults(file, faults, passed_over=False))
        if faults:
            run_files.warn(file, run_files.say_faults(file, faults))
        return found

    def lines_from(self, start: int) -> tuple[list[dict], int]:
        """The lines of metrics.jsonl that are finished by now, from a byte on, and the byte after them."""
        file = self.path / METRICS
        added = b''.join(lines.read(file, start).rpartition(b'\n')[:2])
        found, faults = run_files.decode_metrics(added)
        if faults:
            before = lines.read(file)[:start].count(b'\n') if start else 0  # of a whole file, read for this alone
            _, faults = run_files.decode_metrics(added, before + 1)
            run_files.warn(file, run_files.say_faults(file, faults))
        return found, start + len(added)


def new_run_id() -> str:
    """Return a random id, which no other run has."""
    return secrets.token_hex(8)


class Unwritten:
    """Metrics that another process writes."""

    def append(self, record: dict) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class Reading(Folder):
    """The folder of a run as a process sees it that leaves the writing to another."""

    def metrics(self, check: Callable[[], None]) -> Unwritten:
        return Unwritten()

    def claim(self, spec: Spec, row: dict, tokenizer: str | None = None, run_id: str | None = None) -> None:
        pass

    def keep(self, step: int, save: Callable[[Path], None]) -> None:
        pass

    def forget(self, name: str) -> None:
        pass

    def write(self, name: str, content: dict) -> None:
        pass


class Metrics:
    """Adds to metrics.jsonl."""

    def __init__(self, folder: Folder, check: Callable[[], None]):
        self.lines = lines.adding(folder.path / METRICS, check)
        self.sync, self.close = self.lines.sync, self.lines.close

    def append(self, record: dict) -> None:
        self.lines.append(json.dumps(record, allow_nan=False).encode())
