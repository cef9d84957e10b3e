"""Damages of the small files of a finished run, and the answers of the commands to them.

python tests/faults/file_damages.py --out=now.json [--only=PATTERN] [--sample=N]
python tests/faults/file_damages.py --table before.json now.json

A tiny run is trained once. Each damage is applied to a copy of its folder. Each command runs on the copy in a worker
process, which is killed if it takes too long. An answer is one of:

unaffected   exit 0, and the same result as for the sound folder; the damage is not mentioned
named        exit 0, and stderr names the file; the readable rest is used
refused      exit 1, in one line that names the file or the folder
retry        exit 42, "start the same command again", which cannot help
unnamed      exit 1 in more than one line, or without the file's name
silent       exit 0, another result, and no message about the file
traceback    a traceback, or an exit code of a crash
hang         no exit within the time limit
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

COMMANDS = 'train', 'tail', 'report', 'measure', 'verify'
BAD_KINDS = 'silent', 'traceback', 'hang', 'retry', 'unnamed'
TIMEOUT_SECONDS = 20.0  # time limit of a command; each takes a tenth of it
MEMORY_LIMIT = 24 << 30  # bytes of address space of a worker, so that reading /dev/zero cannot exhaust memory
NO_ANSWER = ''  # answer for a file that older runs do not have
CLOCK_METRICS = 'seconds', 'speed/tokens_per_second', 'speed/mfu'
LAST_STEP = 8
Change = Callable[[Path], None]


# Damages of any file.


def write_content(content: bytes | str) -> Change:
    """Return a damage that replaces the content."""
    return lambda file: file.write_bytes(content.encode() if isinstance(content, str) else content) and None


def cut_in_half(file: Path) -> None:
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
    previous_folder = Path.cwd()
    os.chdir(file.parent)  # the name of a socket has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(file.name)
    finally:
        os.chdir(previous_folder)


def replace_by_link(target: str) -> Change:
    def change(file: Path) -> None:
        file.unlink(missing_ok=True)
        file.symlink_to(target)

    return change


SHAPES: dict[str, Change] = {
    'a folder': make_folder,
    'a FIFO': make_fifo,
    'a socket': make_socket,
    'a link to /dev/zero': replace_by_link('/dev/zero'),
    'a link to itself': lambda file: replace_by_link(file.name)(file),
    'missing': lambda file: file.unlink(),
}
NESTED = '[' * 5000 + ']' * 5000
CONTENTS: dict[str, Change] = {
    'empty': write_content(b''),
    'cut in half': cut_in_half,
    'not UTF-8': write_content(b'\xff\xfe{}'),
    'NUL bytes': write_content(bytes(64)),
    '5,000 nested brackets': write_content(NESTED),
    '5,000 nested objects': write_content('{"a":' * 5000 + '1' + '}' * 5000),
    'a list': write_content('[]'),
    'a number': write_content('5'),
    'null': write_content('null'),
    'a text': write_content('"x"'),
    '{}': write_content('{}'),
}


def change_json(**changes: Any) -> Change:
    """Return a damage that changes keys of a JSON object.

    Args:
        **changes: new values by key; ... removes the key, and __ descends into an object.
    """

    def change(file: Path) -> None:
        content = json.loads(file.read_text())
        for name, value in changes.items():
            *path, last = name.split('__')
            node = content
            for part in path:
                node = node[part]
            if value is ...:
                del node[last]
            else:
                node[last] = value
        file.write_text(json.dumps(content))

    return change


def replace_line(number: int, text: bytes | str | Callable[[dict], dict]) -> Change:
    """Return a damage that replaces one line of metrics.jsonl, counted from 0."""

    def change(file: Path) -> None:
        lines = file.read_bytes().splitlines()
        new_line = json.dumps(text(json.loads(lines[number]))) if callable(text) else text
        lines[number] = new_line.encode() if isinstance(new_line, str) else new_line
        file.write_bytes(b'\n'.join(lines) + b'\n')

    return change


def replace_all_lines(text: Callable[[dict], str]) -> Change:
    def change(file: Path) -> None:
        file.write_text(''.join(text(json.loads(line)) + '\n' for line in file.read_text().splitlines()))

    return change


def crash_and_resume(file: Path) -> None:
    """Write the lines of an attempt killed in the line of step 5, and of one that resumes from step 4."""
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
    'all lines null': replace_all_lines(lambda line: 'null'),
    'all lines NaN': replace_all_lines(lambda line: json.dumps({name: float('nan') for name in line})),
    'all losses NaN': replace_all_lines(
        lambda line: json.dumps(line | {'valid/loss': float('nan'), LOSS: float('nan')})
    ),
    'all lines without step': replace_all_lines(
        lambda line: json.dumps({k: v for k, v in line.items() if k != 'step'})
    ),
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
LEASE_OWNER = dict(token='t', host='h', pid=1, machine='', born='', job='', attempt=0, beat=1.0, state='running')


def read_machine_id() -> str:
    boot_id = Path('/proc/sys/kernel/random/boot_id').read_text().strip()
    return f'{boot_id} {os.readlink("/proc/self/ns/pid")}'


def write_lease(**changes: Any) -> Change:
    return lambda file: file.write_text(json.dumps(LEASE_OWNER | changes)) and None


LEASE: dict[str, Change] = {
    'pid a text': write_lease(pid='x', machine=read_machine_id()),
    'pid a path': write_lease(pid='../../../../etc', machine=read_machine_id()),
    'pid with a NUL': write_lease(pid='\0', machine=read_machine_id()),
    'pid -1': write_lease(pid=-1, machine=read_machine_id()),
    'pid 10^30': write_lease(pid=10**30, machine=read_machine_id()),
    'beat a text': write_lease(beat='x', machine=read_machine_id(), pid=os.getpid()),
    'attempt a text': write_lease(attempt='x', job='j'),
    'state a number': write_lease(state=5),
    'token a number': write_lease(token=5),
    'host a list': write_lease(host=[1]),
    'machine a number': write_lease(machine=5),
    '16 MB of text': write_content('x' * (16 << 20)),
}


def change_arrays(change: Callable[[dict], dict]) -> Change:
    def apply_change(file: Path) -> None:
        with np.load(file) as archive:
            content = change(dict(archive))
        with file.open('wb') as output:
            np.savez_compressed(output, **content)

    return apply_change


def write_plain_array(file: Path) -> None:
    with file.open('wb') as output:
        np.save(output, np.zeros(3))


def write_pickle(file: Path) -> None:
    with file.open('wb') as output:
        np.savez(output, alpha_LPHJ=np.array([{'a': 1}], dtype=object))


def write_huge_header(file: Path) -> None:
    """Write an array of ten bytes whose header declares 10^12 numbers."""
    import zipfile

    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }"
    header += b' ' * (118 - len(header) - 1) + b'\n'
    with zipfile.ZipFile(file, 'w', zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(
            'alpha_LPHJ.npy', b'\x93NUMPY\x01\x00' + len(header).to_bytes(2, 'little') + header + bytes(10)
        )


def rename_file(name: str) -> Change:
    return lambda file: file.rename(file.with_name(name)) and None


def add_file(name: str, content: bytes | None = None) -> Change:
    def change(file: Path) -> None:
        file.with_name(name).write_bytes(file.read_bytes() if content is None else content)

    return change


ALPHA = 'alpha_LPHJ'
PROBE: dict[str, Change] = {
    'empty': write_content(b''),
    'cut in half': cut_in_half,
    'a byte flipped': flip_byte,
    'not a zip': write_content(b'PK nothing'),
    'a plain array': write_plain_array,
    'a pickle': write_pickle,
    'a header of 10^12 numbers': write_huge_header,
    'no arrays': change_arrays(lambda content: {}),
    'an array lacking': change_arrays(lambda content: {k: v for k, v in content.items() if k != ALPHA}),
    'other layers': change_arrays(lambda content: content | {ALPHA: content[ALPHA][:1]}),
    'other heads': change_arrays(
        lambda content: {k: v[:, :1] if k.endswith('_LH') else v for k, v in content.items()}
    ),
    'one dimension less': change_arrays(lambda content: content | {ALPHA: content[ALPHA][0]}),
    'one dimension more': change_arrays(lambda content: content | {ALPHA: content[ALPHA][None]}),
    'no layers': change_arrays(lambda content: {name: value[:0] for name, value in content.items()}),
    'no keys': change_arrays(lambda content: content | {ALPHA: content[ALPHA][..., :0]}),
    'texts for numbers': change_arrays(lambda content: content | {ALPHA: np.full(content[ALPHA].shape, 'x')}),
    'complex numbers': change_arrays(lambda content: content | {ALPHA: content[ALPHA] * 1j}),
    'all NaN': change_arrays(lambda content: {name: np.full_like(value, np.nan) for name, value in content.items()}),
    'a name that is no number': rename_file('last.npz'),
    'another file whose name is no number': add_file('x.npz'),
    'another file of a negative step': add_file('-0000004.npz'),
    'another file of step 10^30': add_file(f'{10**30}.npz'),
    'another file of digits that are no ASCII': add_file('٣.npz'),
}
CACHED_RESULTS: dict[str, Change] = {
    **{name: PROBE[name] for name in ('empty', 'cut in half', 'a byte flipped', 'not a zip', 'a plain array')},
    'a pickle': write_pickle,
    'no arrays': change_arrays(lambda content: {}),
    'no numbers': change_arrays(lambda content: {k: v for k, v in content.items() if k != 'numbers'}),
    'numbers a list': change_arrays(lambda content: content | dict(numbers='[1]')),
    'numbers cut': change_arrays(lambda content: content | dict(numbers=str(content['numbers'])[:20])),
    'a number a text': change_arrays(lambda content: content | dict(numbers='{"sink/1": "x"}')),
    'a number lacking': change_arrays(lambda content: content | dict(numbers='{}')),
    'numbers an array': change_arrays(lambda content: content | dict(numbers=np.zeros(3))),
    'numbers nested': change_arrays(lambda content: content | dict(numbers=NESTED)),
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


LOCK: dict[str, Change] = {'a link to nothing': replace_by_link('nothing')}
RUN: dict[str, Change] = {
    'id a number': change_json(id=5),
    'id empty': change_json(id=''),
    'id null': change_json(id=None),
    'id of 1 MB': change_json(id='x' * (1 << 20)),
    'id of another run': change_json(id='another'),
}


def change_digest(value: Any) -> Change:
    """Return a damage that changes the digest of the first file."""

    def change(file: Path) -> None:
        content = json.loads(file.read_text())
        content['files'][min(content['files'])] = value
        file.write_text(json.dumps(content))

    return change


DIGESTS: dict[str, Change] = {
    '100,000 nested brackets': write_content('[' * 100_000 + ']' * 100_000),
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


def leave_out(names: dict[str, Change], *left_out: str) -> dict[str, Change]:
    return {name: change for name, change in names.items() if name not in left_out}


# (part, file in the run folder or in the cache, {name: damage})
PARTS: list[tuple[str, str, dict[str, Change]]] = [
    ('metrics', 'metrics.jsonl', METRICS | SHAPES | {k: CONTENTS[k] for k in ('empty', 'cut in half', 'NUL bytes')}),
    ('row', 'row.json', CONTENTS | ROW | SHAPES),
    ('lineage', 'row.json', LINEAGE | {'missing': SHAPES['missing']}),
    # A run that has not ended has no outcome.json, and one that has not begun has no environment.json.
    # It is no damage if these files are missing.
    ('outcome', 'outcome.json', CONTENTS | OUTCOME | leave_out(SHAPES, 'missing')),
    ('environment', 'environment.json', CONTENTS | ENVIRONMENT | leave_out(SHAPES, 'missing')),
    ('config', 'config.json', CONTENTS | CONFIG | SHAPES),
    ('lease', 'lease.json', leave_out(CONTENTS | SHAPES, 'cut in half', 'missing') | LEASE),
    ('lock', 'lease.lock', leave_out(CONTENTS | SHAPES, 'cut in half', 'missing') | LOCK),
    ('run', 'run.json', CONTENTS | RUN | SHAPES),
    ('digests', 'digests/STEP/0.json', CONTENTS | DIGESTS | SHAPES),
    ('probe', f'probe/{LAST_STEP:08}.npz', PROBE | SHAPES),
    ('kept', 'measured', CACHED_RESULTS | leave_out(SHAPES, 'missing')),
]
CASES = [(part, name) for part, _, damages in PARTS for name in damages]


def apply_damage(part: str, name: str, run: Path, cache: Path) -> Path:
    """Apply one damage to a copy of a run, and return the damaged file."""
    file, change = next((file, damages[name]) for other_part, file, damages in PARTS if other_part == part)
    step = max(int(path.name) for path in (run / 'digests').iterdir())  # step of the newest checkpoint
    path = next((cache / file).glob('*.npz')) if part == 'kept' else run / file.replace('STEP', str(step))
    before = {*path.parent.iterdir()} if path.parent.exists() else set()
    change(path)
    return next(iter({*path.parent.iterdir()} - before), path)


class Worker:
    """Process that runs commands one after another, and is killed when one takes too long."""

    def __init__(self, variables: dict[str, str]):
        self.variables, self.process = variables, None

    def run(
        self, arguments: list[str], scratch: Path, seconds: float = TIMEOUT_SECONDS
    ) -> tuple[int | None, str, str]:
        """Run a command, and return (exit code or None for a hang, standard output, standard error)."""
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [sys.executable, __file__, '--worker'],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | self.variables,
            )
            self.process.stdout.readline()  # imports take seconds
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


def run_worker() -> None:
    """Run the commands that standard input requests."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    channel = os.fdopen(os.dup(1), 'w')
    import jax  # noqa: F401

    from sinklab.analysis import measure  # noqa: F401
    from sinklab.cli import tail
    from sinklab.cli.main import main
    from sinklab.storage import atomic_write, lease
    from sinklab.train import loop  # noqa: F401

    # Shorten the waits for absent processes, and for files that appear late on a shared disk.
    (
        tail.RESTART_SECONDS,
        lease.OWNER_TIMEOUT_SECONDS,
        atomic_write.SHARED_DISK_SECONDS,
    ) = 0.5, 3.0, 0.0
    channel.write('ready\n')
    channel.flush()
    printed_warnings = getattr(sys.modules.get('sinklab.storage.run_file_schemas'), 'PRINTED_WARNINGS', set())
    for line in sys.stdin:
        printed_warnings.clear()  # warnings that appear once per process must appear for each command
        request = json.loads(line)
        for descriptor, name in ((1, 'out'), (2, 'err')):
            file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, descriptor)
            os.close(file)
        try:
            code = main(request['arguments'])
        except SystemExit as error:
            code = error.code
        except BaseException:
            traceback.print_exc()
            code = -2
        sys.stdout.flush()
        sys.stderr.flush()
        channel.write(json.dumps(code) + '\n')
        channel.flush()


class DamageTester:
    """Sound runs, damaged copies of them, and the answers of commands to the copies."""

    def __init__(self, scratch: Path):
        self.scratch, self.cache = scratch, scratch / 'cache'
        # One set of compiler flags for all commands. Otherwise the first command of a worker would choose them.
        self.worker = Worker(dict(JAX_PLATFORMS='cpu', SINKLAB_CACHE=str(self.cache), XLA_FLAGS=FAST_COMPILE_FLAGS))
        corpus = scratch / 'corpus'
        corpus.mkdir()
        rng = random.Random(0)
        words = [''.join(rng.choices('abcdefghijklmnop', k=rng.randint(2, 6))) for _ in range(80)]
        for number in range(40):
            (corpus / f'{number:02}.txt').write_text(' '.join(rng.choices(words, k=120)))
        options = dict(optimizer__steps=LAST_STEP, checkpoint__every_steps=4, probe__every_steps=4)
        options |= dict(data__source=f'text:{corpus}/*.txt')
        self.options = [f'--config.{name.replace("__", ".")}={value}' for name, value in options.items()]
        config = ['--config=configs/quickstart.py:softmax', '--size=smoke', '--processes=1']
        self.commands = {
            'run': ['train', *config, *self.options],
            'fork': ['train', f'--from={scratch}/run@4', '--processes=1', '--config.optimizer.weight_decay=0.2'],
        }
        self.sound_results: dict[tuple[str, str], Any] = {}
        for name in self.commands:
            self.get_sound_result('train', name, scratch / name, seconds=300.0)
            os.mkdir(scratch / f'{name}-sound')
            for verb in COMMANDS:
                copy = self.copy(name, scratch / f'{name}-sound' / verb, verb)
                self.sound_results[name, verb] = self.get_sound_result(verb, name, copy, seconds=300.0)
            if name == 'run':
                self.get_sound_result('measure', name, scratch / name, seconds=300.0)
                shutil.copytree(self.cache / 'measured', scratch / 'measured')

    def get_sound_result(self, verb: str, run: str, folder: Path, seconds: float) -> Any:
        code, out, err = self.worker.run(self.make_command(verb, run, folder), self.scratch, seconds)
        assert code == 0, f'{verb} of a sound run: exit {code}, {out}, {err}'
        return parse_result(verb, folder, out, err)

    def copy(self, run: str, destination: Path, verb: str) -> Path:
        """Copy a finished run. For `train`, remove the second half of its steps from the copy."""
        shutil.copytree(self.scratch / run, destination, symlinks=True)
        if verb == 'train':
            shutil.rmtree(destination / 'checkpoints' / str(LAST_STEP))
            shutil.rmtree(destination / 'digests' / str(LAST_STEP))
        return destination

    def make_command(self, verb: str, run: str, folder: Path) -> list[str]:
        return {
            'train': [*self.commands[run], f'--workdir={folder}', '--grace=1'],
            'tail': ['tail', str(folder)],
            'report': ['report', str(folder), '--json', '--png', f'--out={folder}-report'],
            'measure': ['measure', f'{folder}@{LAST_STEP}', '--json'],
            'verify': ['checkpoint', 'verify', str(folder)],
        }[verb]

    def run_on_damaged_copy(self, part: str, name: str, verb: str) -> dict[str, Any]:
        """Run a command on a damaged copy, and return its answer."""
        run = 'fork' if part == 'lineage' else 'run'
        with tempfile.TemporaryDirectory(dir=self.scratch) as scratch:
            folder = self.copy(run, Path(scratch, 'copy'), verb)
            self.restore_cache(part == 'kept')
            target = self.scratch / run if part == 'kept' and verb == 'measure' else folder
            file = apply_damage(part, name, folder, self.cache)
            start = time.monotonic()
            code, out, err = self.worker.run(self.make_command(verb, run, target), self.scratch)
            answer = None
            if code == 0:
                with contextlib.suppress(Exception):
                    answer = parse_result(verb, target, out, err)
            self.restore_cache(False)
            kind = classify(code, out + err, answer == self.sound_results[run, verb], [file.name, str(folder)])
            message = (
                (err.strip().splitlines() or [''])[-1].replace(str(folder), 'RUN').replace(str(self.scratch), '')
            )
            seconds = round(time.monotonic() - start, 1)
            return dict(part=part, damage=name, verb=verb, kind=kind, code=code, seconds=seconds, words=message[:300])

    def restore_cache(self, with_results: bool) -> None:
        """Restore the cached results of the sound run, or remove them."""
        path = self.cache / 'measured'
        shutil.rmtree(path, ignore_errors=True)
        if with_results:
            shutil.copytree(self.scratch / 'measured', path)

    def close(self) -> None:
        self.worker.close()


def parse_result(verb: str, folder: Path, out: str, err: str) -> Any:
    """Return the comparable part of an answer: numbers, without times and folder names."""
    if verb == 'train':
        lines = (folder / 'metrics.jsonl').read_bytes().splitlines()
        last = json.loads(lines[-1])
        return {name: value for name, value in last.items() if name not in CLOCK_METRICS}
    if verb == 'tail':
        return [re.sub(r'[\d.,-]+ tokens/s', '', line) for line in err.splitlines()]
    if verb == 'verify':
        return re.findall(r': (.*)', out)
    results = json.loads(out)
    if verb == 'report':
        return [{name: value for name, value in row.items() if name != 'seconds'} for row in results]
    return {name: value for name, value in results.items() if name != 'model'}


def is_unsound(line: str, folder: str) -> bool:
    """Return whether a line of `verify` reports a checkpoint that is not sound."""
    return line.startswith(f'{folder}/checkpoints/') and not line.endswith(': sound')


def classify(code: int | None, output: str, is_same: bool, names: list[str]) -> str:
    names_file = any(name in output for name in names)
    if code is None:
        return 'hang'
    if 'Traceback (most recent call last)' in output or code not in (0, 1, 42):
        return 'traceback'
    if code == 42:
        return 'retry'
    if code == 1:
        lines = [line for line in output.splitlines() if line.startswith('sinklab')]
        # `verify` prints a line on standard output for each checkpoint that is not sound.
        has_unsound_line = any(is_unsound(line, names[1]) for line in output.splitlines())
        return 'refused' if names_file and len(lines) + has_unsound_line == 1 else 'unnamed'
    if names[0] in output:
        return 'named'
    return 'unaffected' if is_same else 'silent'


def choose_cases(only: str, sample: int | None) -> Iterator[tuple[str, str, str]]:
    selected = [
        (part, name, verb) for part, name in CASES for verb in COMMANDS if re.search(only, f'{part} {name} {verb}')
    ]
    yield from selected if sample is None else random.Random(0).sample(selected, min(sample, len(selected)))


def tabulate(before: list[dict], after: list[dict]) -> str:
    """Format two sets of answers as Markdown: totals, and for each file the damages with equal answers."""
    old, new = (
        {(record['part'], record['damage'], record['verb']): record['kind'] for record in records}
        for records in (before, after)
    )
    kinds = ['unaffected', 'named', 'refused', *BAD_KINDS]
    lines = ['| answer | before | now |', '|---|---|---|']
    lines += [f'| {kind} | {list(old.values()).count(kind)} | {list(new.values()).count(kind)} |' for kind in kinds]
    for part, file, damages in PARTS:
        lines += [
            '',
            f'**{part}** (`{file}`)',
            '',
            f'| damage | {" | ".join(COMMANDS)} |',
            '|---' * (len(COMMANDS) + 1) + '|',
        ]
        names_by_cells: dict[tuple[str, ...], list[str]] = {}
        for name in damages:
            cells = []
            for verb in COMMANDS:
                old_kind, new_kind = old.get((part, name, verb), NO_ANSWER), new[part, name, verb]
                cells.append(new_kind if old_kind in (new_kind, NO_ANSWER) else f'{old_kind} → {new_kind}')
            names_by_cells.setdefault(tuple(cells), []).append(name)
        lines += [f'| {"; ".join(names)} | {" | ".join(cells)} |' for cells, names in names_by_cells.items()]
    return '\n'.join(lines) + '\n'


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--worker', action='store_true')
    parser.add_argument('--out')
    parser.add_argument('--only', default='')
    parser.add_argument('--sample', type=int)
    parser.add_argument('--table', nargs=2, metavar='FILE', help='print two sets of answers, before and now')
    arguments = parser.parse_args()
    if arguments.worker:
        run_worker()
        return
    if arguments.table:
        print(tabulate(*(json.loads(Path(file).read_text()) for file in arguments.table)), end='')
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as scratch:
        tester, records = DamageTester(Path(scratch)), []
        try:
            for case in choose_cases(arguments.only, arguments.sample):
                records.append(tester.run_on_damaged_copy(*case))
                print(
                    '{part} | {damage} | {verb} | {kind} {code} | {seconds} | {words}'.format(**records[-1]),
                    flush=True,
                )
        finally:
            tester.close()
        if arguments.out:
            Path(arguments.out).write_text(json.dumps(records, indent=1) + '\n')
    kinds = [record['kind'] for record in records]
    print({kind: kinds.count(kind) for kind in dict.fromkeys(kinds)})


if __name__ == '__main__':
    main()
