"""Damages of the small files of a finished run, and what each verb of the command line answers to them.

python tests/faults/file_damages.py --out=now.json [--only=PATTERN] [--sample=N]
python tests/faults/file_damages.py --table before.json now.json

A tiny run is trained once. Each damage is done to a copy of its folder, and each verb meets it in a worker process,
which is killed where it takes too long. An answer is one of:

unaffected   exit 0, and the same result as of the sound folder; the damage is not mentioned
named        exit 0, and the file is named on stderr; what can be used is used
refused      exit 1, in one line that names the file or the folder
retry        exit 42, "start the same command again", which cannot help
unnamed      exit 1 in more than one line, or without the file's name
silent       exit 0, another result, and no word about the file
traceback    a traceback, or an exit code of a crash
hang         no end within the time
"""

import argparse
import contextlib
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sinklab.cli.hardware_flags import FAST_COMPILE_FLAGS

VERBS = 'train', 'tail', 'report', 'measure', 'verify'
BAD = 'silent', 'traceback', 'hang', 'retry', 'unnamed'
SECONDS = 20.0  # until a verb is taken to hang; each of them takes a tenth of that
MEMORY = 24 << 30  # bytes of address space of a worker, so that /dev/zero cannot fill the machine
NONE = ''  # of a file that runs did not have before
CLOCK = 'seconds', 'speed/tokens_per_second', 'speed/mfu'
STEP = 8
Change = Callable[[Path], None]


# What can happen to any file.


def put(content: bytes | str) -> Change:
    """Return a damage that writes other content."""
    return lambda file: file.write_bytes(content.encode() if isinstance(content, str) else content) and None


def cut(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def flip_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x80
    file.write_bytes(content)


def make_folder(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.mkdir()


def make_fifo(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def make_socket(file: Path) -> None:
    file.unlink(missing_ok=True)
    here = Path.cwd()
    os.chdir(file.parent)  # the name of a socket has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(file.name)
    finally:
        os.chdir(here)


def link_to(target: str) -> Change:
    def change(file: Path) -> None:
        file.unlink(missing_ok=True)
        file.symlink_to(target)

    return change


SHAPES: dict[str, Change] = {
    'a folder': make_folder,
    'a FIFO': make_fifo,
    'a socket': make_socket,
    'a link to /dev/zero': link_to('/dev/zero'),
    'a link to itself': lambda file: link_to(file.name)(file),
    'missing': lambda file: file.unlink(),
}
NESTED = '[' * 5000 + ']' * 5000
CONTENTS: dict[str, Change] = {
    'empty': put(b''),
    'cut in half': cut,
    'not UTF-8': put(b'\xff\xfe{}'),
    'NUL bytes': put(bytes(64)),
    '5,000 nested brackets': put(NESTED),
    '5,000 nested objects': put('{"a":' * 5000 + '1' + '}' * 5000),
    'a list': put('[]'),
    'a number': put('5'),
    'null': put('null'),
    'a text': put('"x"'),
    '{}': put('{}'),
}


def change_json(**changes: Any) -> Change:
    """Return a damage of some keys of a JSON object; ... takes a key away, __ goes into an object."""

    def change(file: Path) -> None:
        content = json.loads(file.read_text())
        for name, value in changes.items():
            *path, last = name.split('__')
            at = content
            for part in path:
                at = at[part]
            if value is ...:
                del at[last]
            else:
                at[last] = value
        file.write_text(json.dumps(content))

    return change


def replace_line(number: int, text: bytes | str | Callable[[dict], dict]) -> Change:
    """Return a damage of one line of metrics.jsonl, counted from 0."""

    def change(file: Path) -> None:
        lines = file.read_bytes().splitlines()
        new = json.dumps(text(json.loads(lines[number]))) if callable(text) else text
        lines[number] = new.encode() if isinstance(new, str) else new
        file.write_bytes(b'\n'.join(lines) + b'\n')

    return change


def every_line(text: Callable[[dict], str]) -> Change:
    def change(file: Path) -> None:
        file.write_text(''.join(text(json.loads(line)) + '\n' for line in file.read_text().splitlines()))

    return change


def crash_and_resume(file: Path) -> None:
    """Leave what an attempt leaves that is killed in the line of step 5, and one that goes on from step 4."""
    lines = file.read_bytes().splitlines(keepends=True)
    number = next(number for number, line in enumerate(lines) if json.loads(line)['step'] == 5)
    file.write_bytes(b''.join([*lines[:number], lines[number][:30] + b'\n', *lines[number:]]))


LOSS = 'train/loss'
METRICS: dict[str, Change] = {
    'line null': replace_line(3, 'null'),
    'line 5': replace_line(3, '5'),
    'line []': replace_line(3, '[]'),
    'line {}': replace_line(3, '{}'),
    'line of text': replace_line(3, '"x"'),
    'line empty': replace_line(3, ''),
    'line not UTF-8': replace_line(3, b'{"step": 3, "a\xff": 1}'),
    'line of NUL bytes': replace_line(3, bytes(40)),
    'line cut in half': replace_line(3, b'{"step": 3, "seconds": 0.4, "train/lo'),
    'line of 5,000 nested brackets': replace_line(3, NESTED),
    'line with a nested value': replace_line(3, lambda line: line | {LOSS: json.loads('[' * 50 + ']' * 50)}),
    'line of 2 MB': replace_line(3, '{"step": 3, "seconds": 1, "' + 'x' * (2 << 20) + '": 1}'),
    'first line null': replace_line(0, 'null'),
    'last line null': replace_line(-1, 'null'),
    'last line without loss': replace_line(-1, lambda line: {name: line[name] for name in ('step', 'seconds')}),
    'line without step': replace_line(3, lambda line: {k: v for k, v in line.items() if k != 'step'}),
    'line without seconds': replace_line(3, lambda line: {k: v for k, v in line.items() if k != 'seconds'}),
    'step a text': replace_line(3, lambda line: line | dict(step='3')),
    'step null': replace_line(3, lambda line: line | dict(step=None)),
    'step true': replace_line(3, lambda line: line | dict(step=True)),
    'step 3.5': replace_line(3, lambda line: line | dict(step=3.5)),
    'step -3': replace_line(3, lambda line: line | dict(step=-3)),
    'step 10^30': replace_line(3, lambda line: line | dict(step=10**30)),
    'step 10^9': replace_line(3, lambda line: line | dict(step=10**9)),
    'step of 5,000 digits': replace_line(3, '{"step": ' + '1' * 5000 + ', "seconds": 1}'),
    'loss a text': replace_line(3, lambda line: line | {LOSS: 'x'}),
    'loss null': replace_line(3, lambda line: line | {LOSS: None}),
    'loss NaN': replace_line(3, lambda line: line | {LOSS: float('nan')}),
    'loss 10^300': replace_line(3, lambda line: line | {LOSS: 1e300}),
    'loss 1e999': replace_line(3, '{"step": 3, "seconds": 0.1, "train/loss": 1e999}'),
    'loss 10^30 as an integer': replace_line(3, lambda line: line | {LOSS: 10**30}),
    'seconds a text': replace_line(3, lambda line: line | dict(seconds='x')),
    'last sink a text': replace_line(-1, lambda line: line | {'sink/1': 'x'}),
    'all lines null': every_line(lambda line: 'null'),
    'all lines NaN': every_line(lambda line: json.dumps({name: float('nan') for name in line})),
    'all losses NaN': every_line(lambda line: json.dumps(line | {'valid/loss': float('nan'), LOSS: float('nan')})),
    'all lines without step': every_line(lambda line: json.dumps({k: v for k, v in line.items() if k != 'step'})),
    'last line cut in half': replace_line(-1, b'{"step": 8, "seconds": 0.4, "train/lo'),
    'a crash in a line, and a new attempt': crash_and_resume,
}
ROW: dict[str, Change] = {
    'row a number': change_json(row=5),
    'row a list': change_json(row=['a']),
    'row lacking': change_json(row=...),
    'published a list': change_json(published=[1]),
    'published a text': change_json(published={'sink/1': 'x'}),
    'published NaN': change_json(published={'sink/1': float('nan')}),
    'diff a number': change_json(diff=3),
    'source a number': change_json(source=3),
    'overrides a list': change_json(overrides=[1]),
    'from a number': change_json(**{'from': 3}),
    'from {}': change_json(**{'from': {}}),
}
OUTCOME: dict[str, Change] = {
    'kind lacking': change_json(kind=...),
    'kind a number': change_json(kind=5),
    'kind unknown': change_json(kind='dome'),
    'message a number': change_json(message=5),
    'message lacking': change_json(message=...),
    'step a text': change_json(step='x'),
    'step 10^30': change_json(step=10**30),
    'checkpoint a text': change_json(checkpoint='x'),
    'exit_code a text': change_json(exit_code='x'),
}
ENVIRONMENT: dict[str, Change] = {
    'attempts lacking': change_json(attempts=...),
    'attempts a number': change_json(attempts=5),
    'attempts of numbers': change_json(attempts=[1, 2]),
    'attempts of {}': change_json(attempts=[{}]),
    'step of an attempt a text': change_json(attempts=[dict(step='x', attention='dense')]),
    'attention a number': change_json(attempts=[dict(step=0, attention=5)]),
    'changes a number': change_json(attempts=[dict(step=0, attention='dense', changes=5)]),
    'commit a number': change_json(commit=5),
}
CONFIG: dict[str, Change] = {
    'model lacking': change_json(model=...),
    'model a number': change_json(model=5),
    'width a text': change_json(model__width='x'),
    'vocabulary a text': change_json(model__vocabulary='x'),
    'steps a text': change_json(optimizer__steps='x'),
    'steps 10^30': change_json(optimizer__steps=10**30),
    'steps lacking': change_json(optimizer__steps=...),
    'seed a list': change_json(seed=[1]),
    'seed lacking': change_json(seed=...),
    'length NaN': change_json(data__length=float('nan')),
}
OWNER = dict(token='t', host='h', pid=1, machine='', born='', job='', attempt=0, beat=1.0, state='running')


def machine() -> str:
    names = Path('/proc/sys/kernel/random/boot_id').read_text().strip()
    return f'{names} {os.readlink("/proc/self/ns/pid")}'


def owner(**changes: Any) -> Change:
    return lambda file: file.write_text(json.dumps(OWNER | changes)) and None


LEASE: dict[str, Change] = {
    'pid a text': owner(pid='x', machine=machine()),
    'pid a path': owner(pid='../../../../etc', machine=machine()),
    'pid with a NUL': owner(pid='\0', machine=machine()),
    'pid -1': owner(pid=-1, machine=machine()),
    'pid 10^30': owner(pid=10**30, machine=machine()),
    'beat a text': owner(beat='x', machine=machine(), pid=os.getpid()),
    'attempt a text': owner(attempt='x', job='j'),
    'state a number': owner(state=5),
    'token a number': owner(token=5),
    'host a list': owner(host=[1]),
    'machine a number': owner(machine=5),
    '16 MB of text': put('x' * (16 << 20)),
}


def arrays(change: Callable[[dict], dict]) -> Change:
    def damage(file: Path) -> None:
        with np.load(file) as found:
            content = change(dict(found))
        with file.open('wb') as opened:
            np.savez_compressed(opened, **content)

    return damage


def plain_array(file: Path) -> None:
    with file.open('wb') as opened:
        np.save(opened, np.zeros(3))


def pickled(file: Path) -> None:
    with file.open('wb') as opened:
        np.savez(opened, alpha_LPHJ=np.array([{'a': 1}], dtype=object))


def huge_header(file: Path) -> None:
    """Writes an array of ten bytes whose header says that there are 10^12 numbers."""
    import zipfile

    head = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }"
    head += b' ' * (118 - len(head) - 1) + b'\n'
    with zipfile.ZipFile(file, 'w', zipfile.ZIP_DEFLATED) as made:
        made.writestr('alpha_LPHJ.npy', b'\x93NUMPY\x01\x00' + len(head).to_bytes(2, 'little') + head + bytes(10))


def renamed(name: str) -> Change:
    return lambda file: file.rename(file.with_name(name)) and None


def added(name: str, content: bytes | None = None) -> Change:
    def change(file: Path) -> None:
        file.with_name(name).write_bytes(file.read_bytes() if content is None else content)

    return change


ALPHA = 'alpha_LPHJ'
PROBE: dict[str, Change] = {
    'empty': put(b''),
    'cut in half': cut,
    'a byte flipped': flip_byte,
    'not a zip': put(b'PK nothing'),
    'a plain array': plain_array,
    'a pickle': pickled,
    'a header of 10^12 numbers': huge_header,
    'no arrays': arrays(lambda found: {}),
    'an array lacking': arrays(lambda found: {k: v for k, v in found.items() if k != ALPHA}),
    'other layers': arrays(lambda found: found | {ALPHA: found[ALPHA][:1]}),
    'other heads': arrays(lambda found: {k: v[:, :1] if k.endswith('_LH') else v for k, v in found.items()}),
    'one dimension less': arrays(lambda found: found | {ALPHA: found[ALPHA][0]}),
    'one dimension more': arrays(lambda found: found | {ALPHA: found[ALPHA][None]}),
    'no layers': arrays(lambda found: {name: value[:0] for name, value in found.items()}),
    'no keys': arrays(lambda found: found | {ALPHA: found[ALPHA][..., :0]}),
    'texts for numbers': arrays(lambda found: found | {ALPHA: np.full(found[ALPHA].shape, 'x')}),
    'complex numbers': arrays(lambda found: found | {ALPHA: found[ALPHA] * 1j}),
    'all NaN': arrays(lambda found: {name: np.full_like(value, np.nan) for name, value in found.items()}),
    'a name that is no number': renamed('last.npz'),
    'another file whose name is no number': added('x.npz'),
    'another file of a negative step': added('-0000004.npz'),
    'another file of step 10^30': added(f'{10**30}.npz'),
    'another file of digits that are no ASCII': added('٣.npz'),
}
KEPT: dict[str, Change] = {
    **{name: PROBE[name] for name in ('empty', 'cut in half', 'a byte flipped', 'not a zip', 'a plain array')},
    'a pickle': pickled,
    'no arrays': arrays(lambda found: {}),
    'no numbers': arrays(lambda found: {k: v for k, v in found.items() if k != 'numbers'}),
    'numbers a list': arrays(lambda found: found | dict(numbers='[1]')),
    'numbers cut': arrays(lambda found: found | dict(numbers=str(found['numbers'])[:20])),
    'a number a text': arrays(lambda found: found | dict(numbers='{"sink/1": "x"}')),
    'a number lacking': arrays(lambda found: found | dict(numbers='{}')),
    'numbers an array': arrays(lambda found: found | dict(numbers=np.zeros(3))),
    'numbers nested': arrays(lambda found: found | dict(numbers=NESTED)),
}
LINEAGE: dict[str, Change] = {
    'run lacking': change_json(from__run=...),
    'step a text': change_json(from__step='x'),
    'step lacking': change_json(from__step=...),
    'config a number': change_json(from__config=3),
    'new of numbers': change_json(from__new=[1]),
    'takes unknown': change_json(from__takes='x'),
    'row a number': change_json(from__row=5),
    'start a text': change_json(from__start='x'),
}


LOCK: dict[str, Change] = {'a link to nothing': link_to('nothing')}
RUN: dict[str, Change] = {
    'id a number': change_json(id=5),
    'id empty': change_json(id=''),
    'id null': change_json(id=None),
    'id of 1 MB': change_json(id='x' * (1 << 20)),
    'id of another run': change_json(id='another'),
}


def change_digest(value: Any) -> Change:
    """Return a damage of what digests say of the first file."""

    def change(file: Path) -> None:
        content = json.loads(file.read_text())
        content['files'][min(content['files'])] = value
        file.write_text(json.dumps(content))

    return change


DIGESTS: dict[str, Change] = {
    '100,000 nested brackets': put('[' * 100_000 + ']' * 100_000),
    'step a text': change_json(step='x'),
    'step of another checkpoint': change_json(step=6),
    'process 1': change_json(process=1),
    'processes 2': change_json(processes=2),
    'processes 10^30': change_json(processes=10**30),
    'processes a text': change_json(processes='x'),
    'written a number': change_json(written=5),
    'seconds a text': change_json(seconds='x'),
    'seconds NaN': change_json(seconds=float('nan')),
    'files lacking': change_json(files=...),
    'files a list': change_json(files=[['a', 1, '00']]),
    'no files': change_json(files={}),
    'a file a text': change_digest('xy'),
    'a file an object': change_digest({'a': 1, 'b': 2}),
    'a file null': change_digest(None),
    'size a text': change_digest(['x', '00']),
    'size 10^30': change_digest([10**30, '00']),
    'digest a number': change_digest([1, 5]),
    'digest of another file': change_digest([1, '00']),
    'a file outside': change_json(**{'files__../../secret': [1, '00']}),
    'id a number': change_json(run_id=5),
    'id of another run': change_json(run_id='another'),
}


def without(names: dict[str, Change], *left_out: str) -> dict[str, Change]:
    return {name: change for name, change in names.items() if name not in left_out}


# (part, file in the run folder or of the cache, {what happens to it: damage})
PARTS: list[tuple[str, str, dict[str, Change]]] = [
    ('metrics', 'metrics.jsonl', METRICS | SHAPES | {k: CONTENTS[k] for k in ('empty', 'cut in half', 'NUL bytes')}),
    ('row', 'row.json', CONTENTS | ROW | SHAPES),
    ('lineage', 'row.json', LINEAGE | {'missing': SHAPES['missing']}),
    # A run without outcome.json has not said how it ended, and one without environment.json has not begun: no damage.
    ('outcome', 'outcome.json', CONTENTS | OUTCOME | without(SHAPES, 'missing')),
    ('environment', 'environment.json', CONTENTS | ENVIRONMENT | without(SHAPES, 'missing')),
    ('config', 'config.json', CONTENTS | CONFIG | SHAPES),
    ('lease', 'lease.json', without(CONTENTS | SHAPES, 'cut in half', 'missing') | LEASE),
    ('lock', 'lease.lock', without(CONTENTS | SHAPES, 'cut in half', 'missing') | LOCK),
    ('run', 'run.json', CONTENTS | RUN | SHAPES),
    ('digests', 'digests/STEP/0.json', CONTENTS | DIGESTS | SHAPES),
    ('probe', f'probe/{STEP:08}.npz', PROBE | SHAPES),
    ('kept', 'measured', KEPT | without(SHAPES, 'missing')),
]
CASES = [(part, name) for part, _, damages in PARTS for name in damages]


def damage(part: str, name: str, run: Path, cache: Path) -> Path:
    """Do one damage to a copy of a run, and return the file that is damaged."""
    file, change = next((file, damages[name]) for one, file, damages in PARTS if one == part)
    step = max(int(path.name) for path in (run / 'digests').iterdir())  # of the newest checkpoint
    path = next((cache / file).glob('*.npz')) if part == 'kept' else run / file.replace('STEP', str(step))
    before = {*path.parent.iterdir()} if path.parent.exists() else set()
    change(path)
    return next(iter({*path.parent.iterdir()} - before), path)


class Worker:
    """A process that runs verbs one after another, and is killed where one takes too long."""

    def __init__(self, variables: dict[str, str]):
        self.variables, self.process = variables, None

    def run(self, arguments: list[str], scratch: Path, seconds: float = SECONDS) -> tuple[int | None, str, str]:
        """Return (exit code or None where it hung, standard output, standard error)."""
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [sys.executable, __file__, '--worker'],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | self.variables,
            )
            self.process.stdout.readline()  # what is imported takes seconds
        out, err = scratch / 'out', scratch / 'err'
        self.process.stdin.write(json.dumps(dict(arguments=arguments, out=str(out), err=str(err))) + '\n')
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        answer = self.process.stdout.readline() if ready else ''
        if not answer:
            self.close()
        code = json.loads(answer) if answer else None if not ready else -1
        return code, *(path.read_text(errors='replace') for path in (out, err))

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def work() -> None:
    """Runs the verbs that standard input asks for."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    channel = os.fdopen(os.dup(1), 'w')
    import jax  # noqa: F401

    from sinklab.analysis import measure  # noqa: F401
    from sinklab.cli import tail
    from sinklab.cli.main import main
    from sinklab.storage import atomic_write, compare_and_swap, lease
    from sinklab.train import loop  # noqa: F401

    # Seconds that are waited for somebody who is not there, and for files that a network's disk may show late.
    (
        tail.RESTART_SECONDS,
        compare_and_swap.STALE_LOCK_SECONDS,
        lease.OWNER_TIMEOUT_SECONDS,
        atomic_write.SHARED_DISK_SECONDS,
    ) = 0.5, 0.5, 3.0, 0.0
    channel.write('ready\n')
    channel.flush()
    warned = getattr(sys.modules.get('sinklab.storage.run_files'), 'PRINTED_WARNINGS', set())
    for line in sys.stdin:
        warned.clear()  # what a process says once it says to each verb
        asked = json.loads(line)
        for number, name in ((1, 'out'), (2, 'err')):
            file = os.open(asked[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, number)
            os.close(file)
        try:
            code = main(asked['arguments'])
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
            code = -2
        sys.stdout.flush()
        sys.stderr.flush()
        channel.write(json.dumps(code) + '\n')
        channel.flush()


class Answers:
    """Runs, sound ones and damaged copies of them, and what verbs answer."""

    def __init__(self, scratch: Path):
        self.scratch, self.cache = scratch, scratch / 'cache'
        # One way of compiling for all verbs: whichever of them a worker runs first would choose it otherwise.
        self.worker = Worker(dict(JAX_PLATFORMS='cpu', SINKLAB_CACHE=str(self.cache), XLA_FLAGS=FAST_COMPILE_FLAGS))
        corpus = scratch / 'corpus'
        corpus.mkdir()
        rng = random.Random(0)
        words = [''.join(rng.choices('abcdefghijklmnop', k=rng.randint(2, 6))) for _ in range(80)]
        for number in range(40):
            (corpus / f'{number:02}.txt').write_text(' '.join(rng.choices(words, k=120)))
        options = dict(optimizer__steps=STEP, checkpoint__every_steps=4, probe__every_steps=4)
        options |= dict(data__source=f'text:{corpus}/*.txt')
        self.options = [f'--config.{name.replace("__", ".")}={value}' for name, value in options.items()]
        config = ['--config=configs/quickstart.py:softmax', '--size=smoke', '--processes=1']
        self.commands = {
            'run': ['train', *config, *self.options],
            'fork': ['train', f'--from={scratch}/run@4', '--processes=1', '--config.optimizer.weight_decay=0.2'],
        }
        self.sound: dict[tuple[str, str], Any] = {}
        for name in self.commands:
            self.ask_sound('train', name, scratch / name, seconds=300.0)
            os.mkdir(scratch / f'{name}-sound')
            for verb in VERBS:
                copy = self.copy(name, scratch / f'{name}-sound' / verb, verb)
                self.sound[name, verb] = self.ask_sound(verb, name, copy, seconds=300.0)
            if name == 'run':
                self.ask_sound('measure', name, scratch / name, seconds=300.0)
                shutil.copytree(self.cache / 'measured', scratch / 'measured')

    def ask_sound(self, verb: str, run: str, folder: Path, seconds: float) -> Any:
        code, out, err = self.worker.run(self.command(verb, run, folder), self.scratch, seconds)
        assert code == 0, f'{verb} of a sound run: exit {code}, {out}, {err}'
        return result(verb, folder, out, err)

    def copy(self, run: str, to: Path, verb: str) -> Path:
        """A copy of a finished run; for `train` one that has half of its steps to do again."""
        shutil.copytree(self.scratch / run, to, symlinks=True)
        if verb == 'train':
            shutil.rmtree(to / 'checkpoints' / str(STEP))
            shutil.rmtree(to / 'digests' / str(STEP))
        return to

    def command(self, verb: str, run: str, folder: Path) -> list[str]:
        return {
            'train': [*self.commands[run], f'--workdir={folder}', '--grace=1'],
            'tail': ['tail', str(folder)],
            'report': ['report', str(folder), '--json', '--png', f'--out={folder}-report'],
            'measure': ['measure', f'{folder}@{STEP}', '--json'],
            'verify': ['checkpoint', 'verify', str(folder)],
        }[verb]

    def ask(self, part: str, name: str, verb: str) -> dict[str, Any]:
        """What a verb answers to a damage."""
        run = 'fork' if part == 'lineage' else 'run'
        with tempfile.TemporaryDirectory(dir=self.scratch) as scratch:
            folder = self.copy(run, Path(scratch, 'copy'), verb)
            self.restore_cache(part == 'kept')
            asked = self.scratch / run if part == 'kept' and verb == 'measure' else folder
            file = damage(part, name, folder, self.cache)
            begun = time.monotonic()
            code, out, err = self.worker.run(self.command(verb, run, asked), self.scratch)
            found = None
            if code == 0:
                with contextlib.suppress(Exception):
                    found = result(verb, asked, out, err)
            self.restore_cache(False)
            kind = classify(code, out + err, found == self.sound[run, verb], [file.name, str(folder)])
            words = (err.strip().splitlines() or [''])[-1].replace(str(folder), 'RUN').replace(str(self.scratch), '')
            seconds = round(time.monotonic() - begun, 1)
            return dict(part=part, damage=name, verb=verb, kind=kind, code=code, seconds=seconds, words=words[:300])

    def restore_cache(self, kept: bool) -> None:
        """Leaves the kept results as they were of the sound run, or none of them."""
        path = self.cache / 'measured'
        shutil.rmtree(path, ignore_errors=True)
        if kept:
            shutil.copytree(self.scratch / 'measured', path)

    def close(self) -> None:
        self.worker.close()


def result(verb: str, folder: Path, out: str, err: str) -> Any:
    """What is compared of an answer: numbers, without times and names of folders."""
    if verb == 'train':
        lines = (folder / 'metrics.jsonl').read_bytes().splitlines()
        last = json.loads(lines[-1])
        return {name: value for name, value in last.items() if name not in CLOCK}
    if verb == 'tail':
        return [re.sub(r'[\d.,-]+ tokens/s', '', line) for line in err.splitlines()]
    if verb == 'verify':
        return re.findall(r': (.*)', out)
    found = json.loads(out)
    if verb == 'report':
        return [{name: value for name, value in row.items() if name != 'seconds'} for row in found]
    return {name: value for name, value in found.items() if name != 'model'}


def is_unsound(line: str, folder: str) -> bool:
    """Whether `verify` says in a line that a checkpoint is not sound."""
    return line.startswith(f'{folder}/checkpoints/') and not line.endswith(': sound')


def classify(code: int | None, said: str, is_same: bool, names: list[str]) -> str:
    named = any(name in said for name in names)
    if code is None:
        return 'hang'
    if 'Traceback (most recent call last)' in said or code not in (0, 1, 42):
        return 'traceback'
    if code == 42:
        return 'retry'
    if code == 1:
        lines = [line for line in said.splitlines() if line.startswith('sinklab')]
        # `verify` says on standard output which checkpoints are not sound, in a line for each.
        unsound = any(is_unsound(line, names[1]) for line in said.splitlines())
        return 'refused' if named and len(lines) + unsound == 1 else 'unnamed'
    if names[0] in said:
        return 'named'
    return 'unaffected' if is_same else 'silent'


def cases(only: str, sample: int | None) -> Iterator[tuple[str, str, str]]:
    chosen = [
        (part, name, verb) for part, name in CASES for verb in VERBS if re.search(only, f'{part} {name} {verb}')
    ]
    yield from chosen if sample is None else random.Random(0).sample(chosen, min(sample, len(chosen)))


def tabulate(before: list[dict], after: list[dict]) -> str:
    """Two sets of answers as Markdown: totals, and for each file the damages that were answered alike."""
    old, new = ({(one['part'], one['damage'], one['verb']): one['kind'] for one in each} for each in (before, after))
    kinds = ['unaffected', 'named', 'refused', *BAD]
    lines = ['| answer | before | now |', '|---|---|---|']
    lines += [f'| {kind} | {list(old.values()).count(kind)} | {list(new.values()).count(kind)} |' for kind in kinds]
    for part, file, damages in PARTS:
        lines += [
            '',
            f'**{part}** (`{file}`)',
            '',
            f'| damage | {" | ".join(VERBS)} |',
            '|---' * (len(VERBS) + 1) + '|',
        ]
        alike: dict[tuple[str, ...], list[str]] = {}
        for name in damages:
            cells = []
            for verb in VERBS:
                was, now = old.get((part, name, verb), NONE), new[part, name, verb]
                cells.append(now if was in (now, NONE) else f'{was} → {now}')
            alike.setdefault(tuple(cells), []).append(name)
        lines += [f'| {"; ".join(names)} | {" | ".join(cells)} |' for cells, names in alike.items()]
    return '\n'.join(lines) + '\n'


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument('--worker', action='store_true')
    options.add_argument('--out')
    options.add_argument('--only', default='')
    options.add_argument('--sample', type=int)
    options.add_argument('--table', nargs=2, metavar='FILE', help='print two sets of answers, before and now')
    given = options.parse_args()
    if given.worker:
        work()
        return
    if given.table:
        print(tabulate(*(json.loads(Path(file).read_text()) for file in given.table)), end='')
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as scratch:
        answers, found = Answers(Path(scratch)), []
        try:
            for case in cases(given.only, given.sample):
                found.append(answers.ask(*case))
                print(
                    '{part} | {damage} | {verb} | {kind} {code} | {seconds} | {words}'.format(**found[-1]), flush=True
                )
        finally:
            answers.close()
        if given.out:
            Path(given.out).write_text(json.dumps(found, indent=1) + '\n')
    kinds = [one['kind'] for one in found]
    print({kind: kinds.count(kind) for kind in dict.fromkeys(kinds)})


if __name__ == '__main__':
    main()
