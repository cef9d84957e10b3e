"""The run folder: what a run leaves behind, and who may go on in it.

config.json     the resolved config
row.json        config file, row, diff, published numbers, source
environment.json  versions, devices, layout, commit of the latest attempt; what computed attention in each
metrics.jsonl   {"step", "seconds", name: number} a line; appended, never rewritten
probe/          STEP.npz, the arrays of one probe
checkpoints/    STEP, a checkpoint of Orbax
digests/        STEP/PROCESS.json, sha256 and size of what a process has written of a checkpoint
damaged/        STEP, a checkpoint that was passed over, and its digests
outcome.json    how the latest attempt has ended: kind, step, checkpoint, message, exit_code
"""

import contextlib
import dataclasses
import json
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sinklab.files import UNFINISHED, whole, writable
from sinklab.record import Refusal
from sinklab.spec import Spec


def flat(tree: dict, at: str = '') -> dict[str, Any]:
    """{'a': {'b': 1}} -> {'a.b': 1}."""
    if not isinstance(tree, dict):
        return {at: tree}
    return {key: value for name, part in tree.items() for key, value in flat(part, f'{at}.{name}'.strip('.')).items()}


def differences(old: dict, new: dict) -> list[str]:
    return [f'{key} {old.get(key)} -> {new.get(key)}' for key in new | old if old.get(key) != new.get(key)]


BEGUN = ('probe', 'row.json')  # a claim that was cut short


class Folder:
    def __init__(self, path: str | os.PathLike):
        if '://' in str(path):
            raise Refusal(f'--workdir={path} is not a local folder, and only those can be written')
        self.path = Path(path)

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
        """The probes taken, in the order of their steps."""
        return sorted((self.path / 'probe').glob('*.npz'))

    def probe(self, step: int) -> Path:
        return self.path / 'probe' / f'{step:08}.npz'

    def read(self, name: str) -> dict:
        """config, row or environment."""
        file = self.path / f'{name}.json'
        try:
            return json.loads(file.read_text(encoding='utf-8'))
        except ValueError as error:
            raise Refusal(f'{file} is damaged ({error}); bring it back, or do without this folder') from error

    def environment(self) -> dict:
        """Of the newest attempt, with (step, attention) of all; nothing of what cannot be read."""
        try:
            return self.read('environment')
        except (OSError, ValueError):
            return {}

    def check(self, spec: Spec) -> None:
        """Refuses a folder that holds another run, or something that is none."""
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise Refusal(f'{self} is a file; give a folder as --workdir')
        if not (self.path / 'config.json').exists():
            others = [path for path in self.path.iterdir() if path.name not in BEGUN and path.suffix != UNFINISHED]
            if others:
                raise Refusal(
                    f'{self} holds files and no run ({others[0].name}); give a new folder, e.g. '
                    f'{shlex.quote(f"--workdir={self}/run")}'
                )
            return
        ours, theirs = flat(dataclasses.asdict(spec)), flat(self.read('config'))
        another = f'give a new folder, e.g. {shlex.quote(f"--workdir={self}-2")}'
        if ours.keys() != theirs.keys():
            gone, new = (', '.join(sorted(one.keys() - other)) for one, other in ((theirs, ours), (ours, theirs)))
            differ = filter(None, (gone and f'has {gone}, unknown here', new and f'lacks {new}'))
            raise Refusal(
                f'{self} holds a run of another version, whose config {" and ".join(differ)}; go on with commit '
                f'{self.environment().get("commit")}, or {another}'
            )
        if ours['data.source'].startswith('store:') and theirs['data.source'].startswith('store:'):
            theirs['data.source'] = ours['data.source']  # a checkpoint knows the store by its digest, wherever it is
        if differ := differences(theirs, ours):
            raise Refusal(f'{self} holds another run ({"; ".join(differ)}); {another}')

    def claim(self, spec: Spec, row: dict) -> None:
        """Makes a new folder this run's; one that `check` has let pass is left as it is."""
        if (self.path / 'config.json').exists():
            return
        with writable(self.path / 'probe'):
            self.write('row', row)
            self.write('config', dataclasses.asdict(spec))

    def read_only(self) -> 'Folder':
        """The same folder for a process that leaves the writing to another."""
        return Reading(self.path)

    def metrics(self) -> 'Metrics':
        return Metrics(self)

    def keep(self, step: int, save: Callable[[Path], None]) -> None:
        """Has the arrays of a probe saved."""
        save(self.probe(step))

    def forget(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self.path / f'{name}.json').unlink()

    def write(self, name: str, content: dict) -> None:
        with whole(self.path / f'{name}.json') as unfinished:
            unfinished.write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')

    def records(self) -> list[dict]:
        """metrics.jsonl by step. A resumed run says the steps after its checkpoint again; the last word counts.

        What a stopped run has left to its next attempt to measure stands in a line of its own.
        """
        steps: dict[int, dict] = {}
        for record in self.lines():
            steps.setdefault(record['step'], {}).update(record)
        return [steps[step] for step in sorted(steps)]

    def checkpoint_steps(self) -> list[int]:
        """The steps of the finished checkpoints."""
        return sorted(int(path.name) for path in self.checkpoints.glob('*') if path.name.isdigit())

    def is_done(self, step: int) -> bool:
        """Whether a run of so many steps is finished, and measured at its end."""
        measured = any(record['step'] == step and 'valid/loss' in record for record in self.records())
        return measured and self.checkpoint_steps()[-1:] == [step]

    def seconds(self, step: int) -> float:
        """What the run had taken when it came to a step."""
        return max((record['seconds'] for record in self.records() if record['step'] <= step), default=0.0)

    def lines(self) -> Iterator[dict]:
        """Whole lines of metrics.jsonl as written; one cut off by a crash is passed over."""
        file = self.path / 'metrics.jsonl'
        for line in file.read_text(encoding='utf-8').splitlines() if file.exists() else ():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


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

    def metrics(self) -> Unwritten:
        return Unwritten()

    def claim(self, spec: Spec, row: dict) -> None:
        pass

    def keep(self, step: int, save: Callable[[Path], None]) -> None:
        pass

    def forget(self, name: str) -> None:
        pass

    def write(self, name: str, content: dict) -> None:
        pass


class Metrics:
    """Appends to metrics.jsonl."""

    def __init__(self, folder: Folder):
        path = folder.path / 'metrics.jsonl'
        self.file = path.open('ab')
        if self.file.tell() and not path.read_bytes().endswith(b'\n'):
            self.file.write(b'\n')  # a crash cut the last line off

    def append(self, record: dict) -> None:
        self.file.write(json.dumps(record, allow_nan=False).encode() + b'\n')
        self.file.flush()

    def sync(self) -> None:
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()
