"""Record numbers of today's code, and compare later code with them.

    python tests/frozen/record.py --check        # compare all sections; exit code 1 if a value differs
    python tests/frozen/record.py --check --only=configs,batches
    python tests/frozen/record.py --write        # record anew, after a change that is meant to change numbers
    python tests/frozen/record.py --write-run    # train tests/frozen/run anew (rarely needed)

Sections:
    configs    default of each --config.PATH, digest of the config of each row at each size
    published  published numbers of each row
    batches    digests of token ids of steps 0, 1 and 1000, of validation windows and of probe sequences
    stores     digests of the files of token stores, and of a trained tokenizer
    training   losses and parameters after 20 steps of two rows of configs/quickstart.py
    rows       numbers of metrics.jsonl after 3 steps at --size=smoke, of rows in which each choice of a config occurs
    run        the run folder tests/frozen/run, resumed for 2 steps, measured and reported

Numbers of training are compared bit by bit where the versions of jax, jaxlib and NumPy and the vector instructions of
the processor are the recorded ones, elsewhere within TOLERANCE. The other sections are always compared exactly.

Sections run in processes of their own, with the default flags of XLA, on one core: the number of cores decides in how
many parts a matrix product is summed. All text is generated here. Compiled programs are kept in SINKLAB_CACHE/frozen.
"""

import argparse
import contextlib
import copy
import functools
import hashlib
import importlib
import importlib.metadata
import io
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VALUES = Path(__file__).with_name('values.json')
# The default level of XLA, given so that --size=smoke does not choose the flags that compile fast.
DEFAULT_FLAGS = '--xla_backend_optimization_level=3'
RUN = Path(__file__).with_name('run')


# On another processor, sums are rounded in another order. With code for AVX2 in place of AVX-512
# (--xla_cpu_max_isa=AVX2) numbers differed by a relative 3.5e-6 at most. Other makers may differ more, since the
# first steps of Adam divide each gradient by its own size, however small it is.
TOLERANCE = 1e-4
NEAR_ZERO = 1e-6  # absolute difference that is allowed, for cosines and differences that are about 0

# {name: (FILE:ROW, changes of its config)} of the batches.
BATCH_CASES = {
    'text': ('attention:softmax', {}),
    'other_seed': ('attention:softmax', {'data.seed': 7}),
    'fixed_token': ('data:fixed_2', {}),
    'fixed_in_training_only': ('data:fixed_2', {'data.fixed_held_out': False}),
    'random_tokens': ('data:random_1_3', {}),
    'share': ('data:amount_500m', {}),
    'packing': ('packing:document_fixed', {}),
    'packing_text': ('packing:document_fixed_text', {}),
    'prepended_eos': ('packing:causal_eos', {}),
    'backcopy': ('bigram_backcopy:softmax', {}),
    'mixture': ('attention:softmax', {'data.source': 'mixture:weighted.json'}),
    'mixture_domain': (
        'attention:softmax',
        {'data.source': 'mixture:weighted.json', 'valid.domain': 'b', 'probe.domain': 'a'},
    ),
    'mixture_without_weights': ('attention:softmax', {'data.source': 'mixture:unweighted.json'}),
    'chat': ('fine_tuning:softmax_1b', {}),
    'random_probe': ('attention:softmax', {'probe.inputs': 'random'}),
    'repeated_probe': ('attention:softmax', {'probe.inputs': 'repeated'}),
}
STORES = {
    'text': ['--source=text:corpus.jsonl'],
    'text_bos': ['--source=text:corpus.jsonl', '--bos=documents', '--held_out=0.3', '--shard_tokens=16000'],
    'mixture': ['--source=mixture:weighted.json'],
    'chat': ['--source=chat:chat.jsonl'],
}

# The fixture: a small model that has as many kinds of parameters as one model can have.
FIXTURE_MODEL = {
    'width': 8,
    'heads': 2,
    'ffn_width': 8,
    'position': 'relative_t5',
    'norm': 'sandwich',
    'qkv_bias': True,
    'qk_norm': True,
    'head_norm': True,
    'gate': 'elementwise',
}
FIXTURE = [
    '--config=configs/learned_kv.py:kv',
    '--size=smoke',
    '--workdir=run',
    '--config.data.source=text:corpus.jsonl',
    *(f'--config.model.{name}={value}' for name, value in FIXTURE_MODEL.items()),
    '--config.probe.every_steps=2',
    '--config.valid.every_steps=2',
    '--config.log.sinks=True',
]
FIXTURE_STEPS = 4

WORDS = [
    *('the', 'sink', 'of', 'first', 'token', 'and', 'attention', 'softmax', 'is', 'a', 'normalizer', 'query', 'key'),
    *('value', 'head', 'layer', 'in', 'probe', 'loss', 'step', 'to', 'weights', 'row', 'sum', 'bias', 'mask', 'with'),
    *('naïve', 'λ', '中文', '42', 'x_1', '(T)', 'decay', 'gradient', 'norm', 'model', 'trains', 'from', 'batch'),
]
SEPARATORS = [' ', ' ', ' ', ' ', ' ', ', ', '. ', '\n', ': ', ' - ']


def make_text(seed: int, count: int) -> str:
    """Return `count` words, drawn by a linear congruential generator."""
    state, parts = seed * 7919 + 1, []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        draw = state >> 33
        parts += [WORDS[min(draw % len(WORDS), draw // 64 % len(WORDS))], SEPARATORS[draw // 4096 % len(SEPARATORS)]]
    return ''.join(parts)


def write_corpora() -> None:
    """Write the sources of all sections into the working directory."""

    def write_lines(name: str, records: list[dict]) -> None:
        text = ''.join(json.dumps(record, ensure_ascii=False) + '\n' for record in records)
        Path(name).write_text(text, encoding='utf-8')

    def make_conversation(number: int) -> list[dict]:
        turns = ('user', 'assistant') * 2
        return [
            dict(role=role, content=make_text(1000 + 4 * number + turn, 12 + 5 * turn))
            for turn, role in enumerate(turns)
        ]

    write_lines('corpus.jsonl', [dict(text=make_text(number, 20 + number % 90)) for number in range(400)])
    for name, first_seed in (('a', 2000), ('b', 3000)):
        write_lines(
            f'{name}.jsonl', [dict(text=make_text(first_seed + number, 40 + number % 50)) for number in range(90)]
        )
    write_lines('chat.jsonl', [dict(messages=make_conversation(number)) for number in range(120)])
    parts = {name: dict(source=f'text:{name}.jsonl') for name in 'ab'}
    Path('unweighted.json').write_text(json.dumps(parts))
    weighted = {name: part | dict(weight=weight) for (name, part), weight in zip(parts.items(), (3, 1), strict=True)}
    Path('weighted.json').write_text(json.dumps(weighted))
    for path in Path().glob('*.json*'):
        os.utime(path, (1e9, 1e9))  # the time of a source is a part of its identity


def flatten(nested: dict, path: str = '') -> Iterator[tuple[str, object]]:
    """Yield (path with dots, leaf) of nested dicts."""
    for name, value in nested.items():
        if isinstance(value, dict):
            yield from flatten(value, f'{path}{name}.')
        else:
            yield f'{path}{name}', value


def digest(*parts: bytes) -> str:
    """Return 32 hexadecimal digits of the SHA-256 of the parts, each with its length."""
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(len(part).to_bytes(8, 'little') + part)
    return hasher.hexdigest()[:32]


def digest_array(array: object) -> str:
    """Return the digest of an array's dtype, shape and bytes."""
    import numpy as np

    array = np.ascontiguousarray(array)
    return digest(str(array.dtype).encode(), str(array.shape).encode(), array.tobytes())


# Fields that were added after digests of configs were recorded. Digests leave them out if they have their defaults.
ADDED_FIELDS = (
    'model.global_layers',
    'model.scaled_embedding',
    'checkpoint.schedule',
    'model.forget_gate',
    'data.packing',
)


def drop_added_fields(config: dict) -> dict:
    """Return a config without those of ADDED_FIELDS that have their defaults."""
    from sinklab.configs import default

    defaults, config = default.get_config().to_dict(), copy.deepcopy(config)
    for path in ADDED_FIELDS:
        *sections, name = path.split('.')
        section, default_section = (
            functools.reduce(dict.__getitem__, sections, nested_config) for nested_config in (config, defaults)
        )
        if section[name] == default_section[name]:
            del section[name]
    return config


def import_table(file: str) -> object:
    return importlib.import_module(f'sinklab.configs.{file}')


def make_config(row: str, changes: dict) -> dict:
    """Return the config of FILE:ROW at the size smoke, as a dict, with a source of this script."""
    file, _, name = row.partition(':')
    config = import_table(file).get_config(name, 'smoke')
    source = 'chat:chat.jsonl' if config.data.loss == 'assistant' else 'text:corpus.jsonl'
    config.update_from_flattened_dict({'data.source': source, **changes})
    return config.to_dict()


def run_command(*arguments: str) -> str:
    """Run a command of sinklab in this process; return what it printed on standard output."""
    from sinklab.cli.main import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(arguments)
    if code:
        raise RuntimeError(f'sinklab {" ".join(arguments)} ended with exit code {code}')
    return out.getvalue()


def list_tables() -> dict[str, dict]:
    """Return {file: ROWS} of configs/."""
    tables = {path.stem: import_table(path.stem) for path in sorted((ROOT / 'configs').glob('*.py'))}
    return {file: table.ROWS for file, table in tables.items() if hasattr(table, 'ROWS')}


def record_configs() -> dict:
    """Return the default of each field of the config, and a digest of the config of each row at each size."""
    from sinklab.configs import default

    configs = {}
    for file, rows in list_tables().items():
        get_config = import_table(file).get_config
        for name in rows:
            config_by_size = {size: drop_added_fields(get_config(name, size).to_dict()) for size in get_config.sizes}
            configs[f'{file}:{name}'] = {
                size: digest(json.dumps(config, sort_keys=True).encode()) for size, config in config_by_size.items()
            }
    fields = flatten(default.get_config().to_dict())
    return dict(fields={name: write_value(value) for name, value in fields}, configs=configs)


def record_published() -> dict:
    """Return {FILE:ROW: {name: published number}}."""
    return {
        f'{file}:{name}': row['published']
        for file, rows in list_tables().items()
        for name, row in rows.items()
        if row['published']
    }


def write_value(value: object) -> object:
    """Return a value for JSON; a float as its hexadecimal digits."""
    return write_float(value) if isinstance(value, float) else value


def write_float(value: float) -> str:
    """Return the hexadecimal digits of a float, as float.hex does, without zeros at the end."""
    return re.sub(r'\.?0*p', 'p', value.hex())


def record_batches() -> dict:
    """Return {case: digests of what a run reads}, by case of BATCH_CASES."""
    from sinklab.config.validate import parse_config
    from sinklab.data.run_data import load_run_data

    digests = {}
    for name, case in BATCH_CASES.items():
        spec = parse_config(make_config(*case))
        data, rows = load_run_data(spec), range(spec.optimizer.batch_size)
        digests[name] = {f'step {step}': digest_array(data.batches.read_rows(step, rows)) for step in (0, 1, 1000)}
        digests[name] |= dict(
            part=digest_array(data.batches.read_rows(1, range(1, 3))),
            valid=digest_array(data.valid_NT),
            probe=digest_array(data.probe_PT),
            fingerprint={part: str(value) for part, value in data.fingerprint.items()},
        )
    return digests


def record_stores() -> dict:
    """Return {store: digest of each of its files}."""
    digests = {}
    for name, options in STORES.items():
        vocabulary_options = [] if any('vocabulary' in option for option in options) else ['--vocabulary=300']
        run_command('prepare', *options, *vocabulary_options, f'--out=stores/{name}')
        files = [path for path in sorted(Path('stores', name).rglob('*')) if path.is_file()]
        digests[name] = {path.name: digest(path.read_bytes()) for path in files if not path.name.startswith('.')}
    return digests


def read_metrics(folder: Path) -> dict[str, str]:
    """Return {name@step: number} of the last record of each step, without times."""
    metrics = {}
    for line in (folder / 'metrics.jsonl').read_text().splitlines():
        record = json.loads(line)
        for name, value in record.items():
            if name not in ('step', 'seconds') and not name.startswith('speed/'):
                metrics[f'{name}@{record["step"]}'] = write_float(float(value))
    return metrics


def record_training() -> dict:
    """Return numbers and parameters of 20 steps of two rows of the quickstart."""
    import jax
    import numpy as np
    from orbax.checkpoint import v1 as ocp

    results = {}
    for row in ('softmax', 'sigmoid_minus_log_t'):
        changes = {
            'data.source': 'text:corpus.jsonl',
            'optimizer.steps': 20,
            'optimizer.warmup_steps': 4,
            'valid.windows': 32,
            'probe.sequences': 20,
            'log.every_steps': 1,
        }
        overrides = [f'--config.{name}={value}' for name, value in changes.items()]
        run_command('train', f'--config=configs/quickstart.py:{row}', f'--workdir=training/{row}', *overrides)
        state = ocp.load(Path('training', row, 'checkpoints', '20').absolute(), checkpointable_name='state')
        leaves = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            leaves[jax.tree_util.keystr(path, simple=True, separator='/')] = np.asarray(leaf)
        results[row] = dict(
            metrics=read_metrics(Path('training', row)),
            digests={path: digest_array(leaf) for path, leaf in leaves.items()},
            norms={path: write_float(float(np.sqrt(np.sum(np.float64(leaf) ** 2)))) for path, leaf in leaves.items()},
        )
    return results


def record_rows() -> dict:
    """Return {FILE:ROW: numbers of metrics.jsonl} after 3 steps at the size smoke, of the rows in values.json.

    Among their configs, each value of each field occurs; of numbers, each sign.
    """
    import jax

    metrics = {}
    for number, row in enumerate(read_values()['rows']['values']):
        file, _, name = row.partition(':')
        source = make_config(row, {})['data']['source']
        folder = Path('rows', str(number))
        run_command(
            'train',
            f'--config=configs/{file}.py:{name}',
            '--size=smoke',
            f'--workdir={folder}',
            f'--config.data.source={source}',
            '--config.optimizer.steps=3',
        )
        metrics[row] = read_metrics(folder)
        if number % 10 == 9:
            jax.clear_caches()
    return metrics


def record_run() -> dict:
    """Return what comes of the fixture: resumed for 2 steps, measured and reported."""
    import numpy as np

    shutil.copytree(RUN, 'run')
    recorded = read_metrics(Path('run'))
    steps = FIXTURE_STEPS + 2
    run_command('train', *FIXTURE, f'--config.optimizer.steps={steps}')
    resumed = read_metrics(Path('run'))
    changed = [name for name, value in recorded.items() if resumed.get(name) != value]
    if changed:
        raise RuntimeError(f'metrics.jsonl of the resumed run has other numbers of earlier steps: {changed[:5]}')
    with np.load(f'run/probe/{steps:08}.npz') as probe:
        arrays = {name: f'{probe[name].dtype} {probe[name].shape}' for name in sorted(probe.files)}
    measured = [json.loads(run_command('measure', f'run@{step}', '--json')) for step in (FIXTURE_STEPS, steps)]
    reported = json.loads(run_command('report', 'run', '--json'))
    return dict(
        metrics={name: value for name, value in resumed.items() if name not in recorded},
        probe=arrays,
        measured={
            str(step): extract_numbers(result) for step, result in zip((FIXTURE_STEPS, steps), measured, strict=True)
        },
        reported=extract_numbers(reported),
        files=sorted(str(path.relative_to('run')) for path in Path('run').glob('*') if path.is_file()),
    )


def extract_numbers(nested: object, path: str = '') -> dict[str, str]:
    """Return {path: float} of nested lists and dicts, without text and times."""
    if isinstance(nested, dict | list):
        parts = nested.items() if isinstance(nested, dict) else enumerate(nested)
        return {
            name: number
            for key, value in parts
            if not re.search('second', str(key))
            for name, number in extract_numbers(value, f'{path}/{key}').items()
        }
    is_number = isinstance(nested, int | float) and not isinstance(nested, bool)
    return {path: write_float(float(nested))} if is_number else {}


def record_fixture() -> dict:
    """Train the fixture anew, remove from its files what they say of the machine, and copy it to RUN."""
    run_command('train', *FIXTURE, f'--config.optimizer.steps={FIXTURE_STEPS}')
    environment = json.loads(Path('run/environment.json').read_text())
    environment |= dict(commit=None, platform='Linux', malloc=None)
    Path('run/environment.json').write_text(json.dumps(environment, indent=2) + '\n')
    run_command('checkpoint', 'verify', 'run')
    shutil.rmtree(RUN, ignore_errors=True)
    shutil.copytree('run', RUN, ignore=shutil.ignore_patterns('run.lock', 'owner.json', '.*'))
    return {}


SECTIONS: dict[str, Callable[[], dict]] = {
    'configs': record_configs,
    'published': record_published,
    'batches': record_batches,
    'stores': record_stores,
    'training': record_training,
    'rows': record_rows,
    'run': record_run,
}
NUMERIC_SECTIONS = 'training', 'rows', 'run'  # sections whose values depend on the processor


def describe_environment() -> dict[str, str]:
    """Return what numbers depend on: versions, and the maker and the vector instructions of the processor."""
    try:
        lines = Path('/proc/cpuinfo').read_text().splitlines()
    except OSError:
        lines = []
    cpu_fields = {line.partition(':')[0].strip(): line.partition(':')[2].strip() for line in lines}
    flags = [flag for flag in cpu_fields.get('flags', '').split() if re.match('avx|fma|amx', flag)]
    processor = ' '.join([cpu_fields.get('vendor_id') or platform.processor() or platform.machine(), *sorted(flags)])
    versions = {name: importlib.metadata.version(name) for name in ('jax', 'jaxlib', 'numpy')}
    return versions | dict(processor=processor)


def pin_to_one_core() -> None:
    """Restrict this process to one core, before XLA counts the cores."""
    if hasattr(os, 'sched_setaffinity'):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})


def run_child(section: str, xla_flags: str = DEFAULT_FLAGS) -> dict:
    """Record a section, or `fixture`, in a new process with a working directory of its own."""
    cache_dir = Path(os.environ.get('SINKLAB_CACHE', Path.home() / '.cache' / 'sinklab')) / 'frozen'
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / 'cache').mkdir()
        (Path(folder) / 'cache' / 'programs').symlink_to(cache_dir.absolute())
        changes = dict(
            PYTHONHASHSEED='0',  # the order of a set of names decides the order of two operations of a probe
            JAX_PLATFORMS='cpu',
            JAX_NUM_CPU_DEVICES='1',
            XLA_FLAGS=xla_flags,
            SINKLAB_CACHE=str(Path(folder) / 'cache'),
            PYTHONPATH=str(ROOT),
        )
        prefixes = ('JAX_', 'XLA_', 'SINKLAB_', 'COLUMNS')
        environment = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)} | changes
        out = Path(folder) / 'out.json'
        # Standard error goes to a file: commands print their progress there.
        with (Path(folder) / 'log').open('w+') as log:
            result = subprocess.run(
                [sys.executable, str(Path(__file__).resolve()), '--section', section, '--out', str(out)],
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            log.seek(0)
            if result.returncode:
                raise SystemExit(f'section {section} failed:\n{log.read()[-4000:]}')
        return json.loads(out.read_text())


def check_section(section: str) -> list[str]:
    """Record a section with this code, and return one line for each value that differs from values.json."""
    from sinklab.cli.layout_flags import FAST_COMPILE_FLAGS

    recorded = read_values()[section]
    exact = section not in NUMERIC_SECTIONS or recorded['environment'] == describe_environment()
    # Rows take three steps and long to compile. Over more steps, other rounding grows beyond the tolerance.
    xla_flags = FAST_COMPILE_FLAGS if section == 'rows' and not exact else DEFAULT_FLAGS
    before, now = dict(flatten(recorded['values'])), dict(flatten(run_child(section, xla_flags)))
    values = {path: (before.get(path, 'missing'), now.get(path, 'missing')) for path in [*before, *now]}
    return [
        f'{path} was {old} and is {new}'
        for path, (old, new) in values.items()
        if old != new and (exact or not is_near(path, old, new))
    ]


def is_near(path: str, before: object, now: object) -> bool:
    """Return whether two values agree as far as they have to on another processor."""
    if '.digests.' in path:  # of arrays of floats
        return True
    try:
        before, now = float.fromhex(before), float.fromhex(now)
    except (TypeError, ValueError):
        return False
    return math.isclose(before, now, rel_tol=TOLERANCE, abs_tol=NEAR_ZERO)


def read_values() -> dict:
    """Return the content of values.json: {section: {environment, values}}."""
    return json.loads(VALUES.read_text(encoding='utf-8')) if VALUES.exists() else {}


def write_values(content: dict) -> None:
    """Write values.json, with one line for each case of a section."""
    sections = []
    for section in filter(content.__contains__, SECTIONS):
        environment, values = (content[section][part] for part in ('environment', 'values'))
        cases = ',\n'.join(f'   {json.dumps(name)}: {json.dumps(value)}' for name, value in values.items())
        head = f' "{section}": {{\n  "environment": {json.dumps(environment)},\n  "values": {{\n'
        sections.append(f'{head}{cases}\n  }}\n }}')
    VALUES.write_text('{\n' + ',\n'.join(sections) + '\n}\n', encoding='utf-8')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--check', action='store_true', help='compare with values.json')
    parser.add_argument('--write', action='store_true', help='write values.json')
    parser.add_argument('--write-run', action='store_true', help='train tests/frozen/run anew')
    parser.add_argument('--only', metavar='SECTION,...', default=','.join(SECTIONS), help='sections (default: all)')
    parser.add_argument('--section', help=argparse.SUPPRESS)  # of a process that this script starts
    parser.add_argument('--out', type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.section:
        pin_to_one_core()
        write_corpora()
        args.out.write_text(json.dumps((SECTIONS | dict(fixture=record_fixture))[args.section]()))
        return 0
    if args.write_run:
        run_child('fixture')
    if args.write:
        for section in args.only.split(','):
            values = run_child(section)
            write_values(read_values() | {section: dict(environment=describe_environment(), values=values)})
    num_differences = 0
    for section in args.only.split(',') if args.check else ():
        start_time = time.monotonic()
        lines = check_section(section)
        print(f'{section}: {len(lines)} differences ({time.monotonic() - start_time:.0f} s)', *lines, sep='\n  ')
        num_differences += len(lines)
    return 1 if num_differences else 0


if __name__ == '__main__':
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
