"""Benchmark of how costs grow with the model, the batch, the data, the processes and the number of runs.

    python benchmarks/scaling.py [--axes=width,layers,...] [--repeat=5] [--out=FILE] [--check]

Along each axis one number grows and all others stay. Each value is measured in its own process. The slope of a cost
is the exponent of the power law that fits best: 1 means that twice the value costs twice as much. The expected slope
is that of the theoretical cost over the same values, such as FLOPs for the time of a step. A fixed cost makes a
measured slope smaller.

All axes are written to --out; by default the table and the picture of docs/results/scaling.md are made of them. With
--check nothing is written. The results are compared with docs/results/scaling.json, and the exit code is 1 if a slope
exceeds the recorded one by more than 0.25, or if the last value costs 1.5 times as much as recorded, relative to the
one before it.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.argument_types import parse_count  # noqa: E402
from benchmarks.timing import time_call  # noqa: E402
from sinklab.machine import count_cores, describe_machine  # noqa: E402

MODEL = dict(layers=4, width=128, length=128, vocabulary=2048, batch=8)
HEAD_WIDTH = 32
REMAT = 'attention,ffn'  # the default for models of this width on a CPU
SEQUENCES = 16  # of a probe
ROWS_FILE = """
from sinklab.configs.table import table

ROWS = {f'rate_{i}': dict(diff={'optimizer.peak_learning_rate': 1e-3 * (1 + i / 10000)}) for i in range(NUM_ROWS)}
get_config = table(ROWS, default_size='smoke')
"""
SEEDS_OF_A_ROW = 10
SHARD_TOKENS = 10_000_000


@dataclasses.dataclass(frozen=True)
class Axis:
    """A number that grows, and the function that measures all costs of one value.

    Attributes:
        values: The values, from the smallest.
        measure: Function of a value, the number of repetitions and an empty folder, which returns
            {name of a cost: (measured, theoretical in any unit)}.
    """

    values: tuple[int, ...]
    measure: Callable[[int, int, Path], dict[str, tuple[float, float]]]


def measure_median_seconds(function: Callable[[], object], repeat: int) -> float:
    """Return the median seconds of several calls."""
    return statistics.median(time_call(function) for _ in range(repeat))


def compute_probe_cost(spec: Any) -> float:
    """Return the theoretical cost of a probe: its FLOPs and its attention weights, each relative to MODEL."""
    from sinklab.model import flops

    def count(model: Any, length: int) -> tuple[float, int]:
        forward_flops = flops.count_forward_flops(model, length)
        return (forward_flops.total - forward_flops.head) * length, model.layers * model.heads * length**2

    base = dataclasses.replace(
        spec.model,
        layers=MODEL['layers'],
        width=MODEL['width'],
        heads=MODEL['width'] // HEAD_WIDTH,
        ffn_width=3 * MODEL['width'],
    )
    counts, base_counts = count(spec.model, spec.data.length), count(base, MODEL['length'])
    return sum(number / base_number for number, base_number in zip(counts, base_counts, strict=True))


def measure_model(name: str, value: int, repeat: int, folder: Path) -> dict[str, tuple[float, float]]:
    """Measure a train step, a probe and a checkpoint of a model."""
    import jax

    from sinklab.checkpoint.checkpointer import Checkpointer
    from sinklab.config.spec import Hardware
    from sinklab.config.validate import parse_config
    from sinklab.configs import default
    from sinklab.model import flops
    from sinklab.parallel import device_mesh, sharding
    from sinklab.run_dir import RunDir
    from sinklab.train import memory_estimate, sink_probe, state, step

    shape, config = MODEL | {name: value}, default.get_config()
    config.model.layers, config.model.width, config.model.vocabulary = (
        shape[part] for part in ('layers', 'width', 'vocabulary')
    )
    config.model.heads, config.model.head_width = shape['width'] // HEAD_WIDTH, HEAD_WIDTH
    config.model.ffn_width, config.model.dtype = 3 * shape['width'], 'float32'
    config.data.length = config.probe.length = shape['length']
    config.optimizer.batch_size, config.probe.sequences = shape['batch'], SEQUENCES
    spec = parse_config(config.to_dict())
    hardware = Hardware(data=1, fsdp=1, remat=REMAT)
    mesh, rng = device_mesh.make_mesh(hardware), np.random.default_rng(0)
    jax.config.update('jax_enable_compilation_cache', False)
    with jax.set_mesh(mesh):
        train_state = state.create_state(spec, mesh)
        ids_BT = rng.integers(0, shape['vocabulary'], (shape['batch'], shape['length'] + 1), np.int32)
        batch, no_request = sharding.put_batch(ids_BT, mesh), sharding.make_per_device_array(0, mesh)
        start = time.perf_counter()
        compiled_step = step.make_train_step(spec, hardware, mesh).lower(train_state, batch, no_request).compile()
        compile_seconds = time.perf_counter() - start

        def run_step() -> None:
            nonlocal train_state
            train_state, _ = compiled_step(train_state, batch, no_request)
            jax.block_until_ready(train_state)

        run_step()
        step_seconds = measure_median_seconds(run_step, repeat)
        run_probe = sink_probe.make_probe(spec, mesh)
        probe_PT = rng.integers(0, shape['vocabulary'], (SEQUENCES, shape['length']), np.int32)

        def measure_probe() -> None:
            sink_probe.compute_probe_metrics(run_probe(train_state['params'], probe_PT), spec)

        measure_probe()
        probe_seconds = measure_median_seconds(measure_probe, repeat)
    checkpointer = Checkpointer(RunDir(str(folder)), spec.checkpoint, dict(store='benchmark'))
    steps = iter(range(1, 100))

    def save() -> None:
        checkpointer.save(next(steps), train_state)
        checkpointer.wait_until_finished()

    save()
    save_seconds = measure_median_seconds(save, repeat)
    checkpointer.close()
    num_tokens, forward_flops = (
        shape['batch'] * shape['length'],
        flops.count_forward_flops(spec.model, shape['length']),
    )
    memory, estimate = (
        compiled_step.memory_analysis(),
        memory_estimate.estimate_memory(spec, hardware, mesh, 'chunked'),
    )
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(train_state['params']))
    return {
        'step, ms': (1e3 * step_seconds, flops.TRAINING_FLOPS_FACTOR * forward_flops.total * num_tokens),
        'step, MB': ((memory.temp_size_in_bytes + memory.argument_size_in_bytes) / 1e6, estimate.total),
        'compilation, s': (compile_seconds, 1.0),
        'probe, ms': (1e3 * probe_seconds, compute_probe_cost(spec)),
        'checkpoint, ms': (1e3 * save_seconds, num_parameters),
    }


def run_sinklab(*arguments: str, repeat: int = 1, cwd: Path | None = None) -> tuple[float, float]:
    """Run a command, and return its median seconds and the peak of its resident memory in thousands of KiB.

    A thousand KiB is 1.024 MB. The labels of costs say MB, and the recorded results have this unit.
    """
    seconds, peak_kib = [], 0
    for _ in range(repeat):
        start = time.perf_counter()
        process = subprocess.Popen([sys.executable, '-m', 'sinklab', *arguments], stdout=subprocess.DEVNULL, cwd=cwd)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise RuntimeError(f'sinklab {arguments[0]} ended with status {status}')
        seconds.append(time.perf_counter() - start)
        peak_kib = max(peak_kib, usage.ru_maxrss)
    return statistics.median(seconds), peak_kib / 1e3


def write_rows(folder: Path, num_rows: int) -> str:
    (folder / 'many.py').write_text(ROWS_FILE.replace('NUM_ROWS', str(num_rows)))
    return '--config=many.py'


def measure_rows(num_rows: int, repeat: int, folder: Path) -> dict[str, tuple[float, float]]:
    """Measure the commands that read a table of rows."""
    seconds, _ = run_sinklab('rows', write_rows(folder, num_rows), repeat=repeat, cwd=folder)
    return {'rows, s': (seconds, num_rows)}


def train_smoke_run(folder: Path, *options: str) -> Path:
    """Train one run of the first row in a folder; return the folder of the run."""
    run_sinklab('sweep', '--config=many.py', '--rows=rate_0', '--workdir=sweep', *options, cwd=folder)
    return folder / 'sweep' / 'rate_0-0'


def measure_runs(num_runs: int, repeat: int, folder: Path) -> dict[str, tuple[float, float]]:
    """Measure a sweep that is given again, and its report, on copies of a run under other rows and seeds."""
    num_rows, seeds = max(num_runs // SEEDS_OF_A_ROW, 1), min(num_runs, SEEDS_OF_A_ROW)
    config, options = write_rows(folder, num_rows), ['--config.probe.every_steps=2', '--config.valid.every_steps=2']
    first_run = train_smoke_run(folder, *options)
    run_config, row = (json.loads((first_run / f'{name}.json').read_text()) for name in ('config', 'row'))
    overrides = row['overrides']
    for index in range(num_rows):
        for seed in range(seeds):
            run = first_run.with_name(f'rate_{index}-{seed}')
            if run != first_run:
                shutil.copytree(first_run, run)
            run_config['optimizer']['peak_learning_rate'] = rate = 1e-3 * (1 + index / 10000)
            run_config['seed'] = run_config['data']['seed'] = seed
            seeds_of_run = {'seed': str(seed), 'data.seed': str(seed)} if seed else {}
            row |= dict(
                row=f'rate_{index}',
                diff={'optimizer.peak_learning_rate': rate},
                overrides=overrides | seeds_of_run,
            )
            (run / 'config.json').write_text(json.dumps(run_config))
            (run / 'row.json').write_text(json.dumps(row))
    sweep_seconds, sweep_mb = run_sinklab(
        *('sweep', config, f'--seeds={seeds}', '--workdir=sweep', *options), repeat=repeat, cwd=folder
    )
    report_seconds, report_mb = run_sinklab('report', 'sweep', repeat=repeat, cwd=folder)
    return {
        'finished sweep again, s': (sweep_seconds, num_runs),
        'finished sweep again, MB': (sweep_mb, num_runs),
        'report, s': (report_seconds, num_runs),
        'report, MB': (report_mb, num_runs),
        'report.html, MB': ((folder / 'sweep' / 'report.html').stat().st_size / 1e6, num_runs),
    }


def measure_records(num_records: int, repeat: int, folder: Path) -> dict[str, tuple[float, float]]:
    """Measure the commands that read the metrics of one long run."""
    write_rows(folder, 1)
    run = train_smoke_run(folder)
    config = json.loads((run / 'config.json').read_text())
    config['optimizer']['steps'] = num_records
    (run / 'config.json').write_text(json.dumps(config))
    outcome = json.loads((run / 'outcome.json').read_text())
    (run / 'outcome.json').write_text(json.dumps(outcome | dict(step=num_records)))
    (last_probe := max((run / 'probe').iterdir())).rename(last_probe.with_name(f'{num_records:08}.npz'))
    lines = (run / 'metrics.jsonl').read_text().splitlines()
    records = [json.loads(line) for line in lines]
    with (run / 'metrics.jsonl').open('w') as file:
        file.write(lines[0] + '\n')
        for step in range(1, num_records):
            file.write(json.dumps(records[1] | dict(step=step, seconds=step / 10)) + '\n')
        file.write(json.dumps(records[-1] | dict(step=num_records, seconds=num_records / 10)) + '\n')
    seconds, report_mb = run_sinklab('report', str(run), repeat=repeat)
    return {
        'report of a run, s': (seconds, num_records),
        'report of a run, MB': (report_mb, num_records),
        'report.html of a run, MB': ((run / 'report.html').stat().st_size / 1e6, 1.0),
    }


def write_store(folder: Path, num_tokens: int) -> None:
    """Write a token store of shards that are links to one file."""
    from sinklab.data.documents import Source
    from sinklab.data.prepare import Recipe, prepare_store, write_meta
    from sinklab.data.store import DOCUMENT_DTYPE, Store
    from sinklab.storage.files import hash_file

    numbers = np.random.default_rng(2).integers(1000, size=(200, 2000))
    for index, row in enumerate(numbers):
        (folder / f'{index}.txt').write_text(' '.join(map(str, row)))
    recipe = Recipe(f'text:{folder}/*.txt', 'train', 300, 0.15, 'none', 0, 1)
    prepare_store(recipe, folder / 'store')
    small = Store(folder / 'store')
    held_out = [shard for shard in small.shards if shard.split == 'held_out']
    train = next(shard for shard in small.shards if shard.split == 'train')
    shard_tokens, shards = min(num_tokens, SHARD_TOKENS), []
    ids = np.random.default_rng(0).integers(2, small.meta['vocabulary'], shard_tokens).astype(small.dtype)
    documents = np.zeros(shard_tokens // 1000, DOCUMENT_DTYPE)
    documents['start'] = np.arange(len(documents)) * 1000
    documents['key'] = np.random.default_rng(1).integers(0, 1 << 62, len(documents))
    for number in range(num_tokens // shard_tokens):
        name = f'train-900-{number:05}'
        for suffix, array in (('ids', ids), ('documents', documents)):
            file = folder / 'store' / f'{name}.{suffix}'
            if number:
                os.link(folder / 'store' / f'train-900-00000.{suffix}', file)
            else:
                array.tofile(file)
        digests = (
            shards[0].sha256
            if shards
            else {suffix: hash_file(folder / 'store' / f'{name}.{suffix}') for suffix in ('ids', 'documents')}
        )
        shards.append(
            msgspec.structs.replace(
                train, name=name, tokens=shard_tokens, documents=len(documents), sha256=digests, bytes=shard_tokens
            )
        )
    write_meta(folder / 'store', recipe, Source(pieces=(), identity=()), [*shards, *held_out], {})


def measure_tokens(num_tokens: int, repeat: int, folder: Path) -> dict[str, tuple[float, float]]:
    """Measure the start of a run on a token store, and reading of batches."""
    from sinklab.config.validate import parse_config
    from sinklab.configs import default
    from sinklab.data.run_data import load_run_data

    write_store(folder, num_tokens)
    config = default.get_config(size='smoke')
    config.data.source, config.data.length, config.optimizer.batch_size = f'store:{folder}/store', 1024, 16
    spec = parse_config(config.to_dict())
    open_seconds, batches, steps = (
        measure_median_seconds(lambda: load_run_data(spec), repeat),
        load_run_data(spec).batches,
        iter(range(10**6)),
    )
    batch_seconds = measure_median_seconds(lambda: batches.read_rows(next(steps), range(16)), 100)
    return {'opening a store, s': (open_seconds, num_tokens), 'a batch of 16 x 1024, ms': (1e3 * batch_seconds, 1.0)}


def measure_processes(num_processes: int, repeat: int, folder: Path) -> dict[str, tuple[float, float]]:
    """Measure the start and the steps of a run of several processes on this machine, each with one device."""
    options = [
        *('train', f'--config={ROOT}/configs/quickstart.py:softmax', '--config.log.every_steps=1'),
        *('--config.optimizer.steps=60', '--config.optimizer.warmup_steps=0'),
        *(f'--config.{part}.every_steps=0' for part in ('probe', 'valid', 'checkpoint')),
    ]
    starts, steps = [], []
    for index in range(repeat):
        with socket.socket() as probe:
            probe.bind(('127.0.0.1', 0))
            port = probe.getsockname()[1]
        group = [f'--coordinator=127.0.0.1:{port}', f'--processes={num_processes}'] if num_processes > 1 else []
        commands = [
            [*options, f'--workdir={folder}/{index}', *group, *([f'--process={process}'] if group else [])]
            for process in range(num_processes)
        ]
        environment = os.environ | dict(JAX_NUM_CPU_DEVICES='1')
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
        start = time.time()
        processes = [subprocess.Popen([sys.executable, '-m', 'sinklab', *command], **quiet) for command in commands]
        exit_codes = [process.wait() for process in processes]
        if any(exit_codes):
            raise RuntimeError(f'{num_processes} processes have failed')
        total_seconds = time.time() - start
        lines = (folder / str(index) / 'metrics.jsonl').read_text().splitlines()
        times = [record['seconds'] for record in map(json.loads, lines) if 'train/loss' in record]
        starts.append(total_seconds - (times[-1] - times[0]))
        steps.append(1e3 * (times[-1] - times[10]) / (len(times) - 11))
    processes_per_core = num_processes / min(num_processes, count_cores())  # each starts and compiles by itself
    return {
        'start and end, s': (statistics.median(starts), processes_per_core),
        'step of the same batch, ms': (statistics.median(steps), 1.0),
    }


def make_model_axis(name: str, *values: int) -> Axis:
    return Axis(values, lambda value, repeat, folder: measure_model(name, value, repeat, folder))


AXES = {
    'width': make_model_axis('width', 64, 128, 256, 512),
    'layers': make_model_axis('layers', 2, 4, 8, 16),
    'length': make_model_axis('length', 64, 128, 256, 512, 1024),
    'vocabulary': make_model_axis('vocabulary', 512, 2048, 8192, 32768),
    'batch': make_model_axis('batch', 2, 8, 32, 128),
    'processes': Axis((1, 2, 4), measure_processes),
    'tokens': Axis((10**6, 10**7, 10**8, 10**9), measure_tokens),
    'rows': Axis((10, 100, 1000), measure_rows),
    'runs': Axis((10, 100, 500, 2000), measure_runs),
    'records': Axis((10**3, 10**4, 10**5, 10**6), measure_records),
}


def measure_value(axis: str, value: int, repeat: int) -> dict[str, list[float]]:
    """Measure one value of an axis in a process of its own, with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | dict(SINKLAB_CACHE=f'{folder}/cache', JAX_PLATFORMS='cpu')
        command = [sys.executable, __file__, f'--child={axis}', f'--value={value}', f'--repeat={repeat}']
        (Path(folder) / 'work').mkdir()
        process = subprocess.run(
            [*command, f'--folder={folder}/work'], env=environment, stdout=subprocess.PIPE, text=True
        )
    if process.returncode:
        sys.exit(f'{axis} = {value} cannot be measured (exit code {process.returncode})')
    return json.loads(process.stdout.splitlines()[-1])


def measure_axis(name: str, repeat: int) -> dict:
    """Return the values of an axis, and the measured and theoretical cost of each."""
    from docs.scaling_results import fit_slope

    values, results = AXES[name].values, []
    for value in values:
        results.append(measure_value(name, value, repeat))
        print(f'{name} = {value:,}', {cost: round(pair[0], 3) for cost, pair in results[-1].items()}, flush=True)
    costs = {}
    for cost in results[0]:
        measured, theoretical = ([result[cost][index] for result in results] for index in (0, 1))
        costs[cost] = dict(
            measured=[float(f'{number:.4g}') for number in measured],
            slope=round(fit_slope(values, measured), 2) + 0.0,  # never -0.0
            expected=round(fit_slope(values, theoretical), 2) + 0.0,
        )
    return dict(values=list(values), costs=costs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--axes', default=','.join(AXES), metavar='AXIS,...')
    parser.add_argument(
        '--repeat', type=parse_count, default=5, help='of each measurement, of which the median counts'
    )
    parser.add_argument('--out', type=Path, default=ROOT / 'docs' / 'results' / 'scaling.json', metavar='FILE')
    parser.add_argument(
        '--check', action='store_true', help='compare with the recorded results; exit with 1 if a cost grows more'
    )
    parser.add_argument('--child', help=argparse.SUPPRESS)
    parser.add_argument('--value', type=int, help=argparse.SUPPRESS)
    parser.add_argument('--folder', type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(AXES[args.child].measure(args.value, args.repeat, args.folder)))
        return
    # Not imported in the process of a value, whose memory would count for the commands that it starts.
    from docs import scaling_results

    names = args.axes.split(',')
    if unknown := [name for name in names if name not in AXES]:
        sys.exit(f'--axes: {unknown[0]} is unknown; give some of {", ".join(AXES)}')
    if names != [*AXES] and not args.check and args.out == scaling_results.RESULTS_FILE:
        sys.exit('--axes: some axes alone would replace the results of all; add --check, or --out=FILE')
    axes = {name: measure_axis(name, args.repeat) for name in names}
    if args.check:
        problems = scaling_results.find_regressions(axes, scaling_results.read_results()['axes'])
        sys.exit('\n'.join(problems) or 0)
    packages = 'jax', 'numpy', 'orbax-checkpoint'
    results = dict(
        date=time.strftime('%Y-%m-%d'),
        machine=describe_machine(),
        versions=', '.join(f'{name} {importlib.metadata.version(name)}' for name in packages),
        repeat=args.repeat,
        axes=axes,
    )
    scaling_results.write_results(results, args.out)


if __name__ == '__main__':
    main()
