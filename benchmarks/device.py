"""All that is to be known of one accelerator, in one command of at most nine minutes, part after part.

    PYTHONPATH=. python benchmarks/device.py --out=DIR [--parts=steps,memory] [--minutes=9] [--dry]

Each part is a process of its own, which leaves DIR/PART.json, whatever becomes of the others: kernels (against the
definition, cuDNN and plain XLA), tests (of kernels, by pytest), steps (60M and 1B, softmax and sigmoid, in turn
with a plain JAX step of the same shapes), memory (what the compiler said against what was in use), gaps (what the
host takes to dispatch a step, of what the device takes to run it). --dry runs all of it at the size smoke, on
whatever jax finds.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHARES = dict(steps=0.45, kernels=0.2, tests=0.15, memory=0.15, gaps=0.05)  # of the time, the rest of which goes on
ROWS = ('softmax_60m', 'sigmoid_60m', 'softmax_1b', 'sigmoid_1b')
BATCHES = {'60m': 32, '1b': 8}  # sequences of one device
GOALS = {'60m': 0.25, '1b': 0.45}  # of MFU
WARM, STEPS, ROUNDS = 3, 10, 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, required=True)
    parser.add_argument('--parts', default=','.join(SHARES))
    parser.add_argument('--minutes', type=float, default=9.0)
    parser.add_argument('--dry', action='store_true')
    parser.add_argument('--one', choices=SHARES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := set(given.parts.split(',')) - set(SHARES):
        print(f'device: {", ".join(unknown)} is no part; give some of {", ".join(SHARES)}', file=sys.stderr)
        return 1
    given.out.mkdir(parents=True, exist_ok=True)
    if given.one:
        return written(given)
    until = time.monotonic() + 60 * given.minutes
    codes = [launched(part, given, until) for part in SHARES if part in given.parts.split(',')]
    return max(codes)


def launched(part: str, given: argparse.Namespace, until: float) -> int:
    """Runs a part in its time; 1 where it has failed."""
    seconds = max(1.0, min(until - time.monotonic(), 60 * given.minutes * (SHARES[part] + 0.2)))
    command = [sys.executable, __file__, f'--out={given.out}', f'--one={part}', *(['--dry'] if given.dry else [])]
    environment = os.environ | dict(PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')]))
    begun = time.monotonic()
    try:
        code = subprocess.run(command, env=environment, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        code = 1
        print(f'device: {part} took more than {seconds:.0f} s', file=sys.stderr)
    print(f'{part}: {"done" if code == 0 else "failed"} in {time.monotonic() - begun:.0f} s', flush=True)
    return code


def written(given: argparse.Namespace) -> int:
    import jax

    from sinklab.train.environment import versions

    found = dict(
        command=' '.join(sys.argv),
        device=jax.devices()[0].device_kind,
        python=platform.python_version(),
        versions=versions(('jax', 'jaxlib', 'flax', 'optax')),
        dry=given.dry,
    )
    file = given.out / f'{given.one}.json'
    for figures in PARTS[given.one](given):
        found |= figures
        file.write_text(json.dumps(found, indent=2) + '\n')  # what there is by now, if the time is over
    return 1 if found.get('failed') else 0


def kernels(given: argparse.Namespace):
    file = given.out / 'gpu_attention.json'
    options = ['--tokens=8192', '--lengths=2048,4096', '--widths=64,128', '--rounds=10', f'--json={file}']
    done = subprocess.run([sys.executable, ROOT / 'benchmarks' / 'gpu_attention.py', *options], capture_output=True)
    figures = json.loads(file.read_text()) if file.exists() else None
    yield dict(
        figures=figures, said=(done.stdout + done.stderr).decode()[-4000:], failed=done.returncode and not given.dry
    )


def tests(given: argparse.Namespace):
    files = sorted(str(path) for path in (ROOT / 'tests').glob('test_gpu*.py'))
    command = [sys.executable, '-m', 'pytest', '-q', '-x', *(['--collect-only'] if given.dry else []), *files]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    yield dict(failed=done.returncode, said=done.stdout[-4000:] + done.stderr[-1000:])


def steps(given: argparse.Namespace):
    """Tokens a second and MFU of ours and of a plain step, in turn."""
    import jax
    import plain

    from sinklab.train import fit

    found = {}
    for row in ROWS:
        spec, hardware, mesh, backend = run_of(row, given)
        with jax.set_mesh(mesh):
            runs = {'ours': ours(spec, hardware, mesh, backend)}
            if row.startswith('softmax'):
                state, step = plain.training(spec)
                runs['plain'] = repeated(step, state, ids(spec))
            times = {name: [] for name in runs}
            for name in [*runs] * ROUNDS:
                times[name].append(runs[name](STEPS))
        found[row] = {name: told(spec, values, fit.peak(mesh)) for name, values in times.items()}
        found[row] |= dict(attention=backend, remat=hardware.remat, batch=spec.optimizer.batch_size)
        found[row]['goal'] = GOALS[row.split('_')[1]]
        yield dict(steps=found)


def memory(given: argparse.Namespace):
    """Bytes that the compiler plans, those in use at most, and those that are said by shapes."""
    import jax

    from sinklab.train import fit, state, step

    found = {}
    for row in ROWS:
        spec, hardware, mesh, backend = run_of(row, given)
        with jax.set_mesh(mesh):
            lowered = step.train_step(spec, hardware, mesh, backend)
            advance = lowered.lower(state.abstract(spec, mesh), *step.given(spec, mesh)).compile()
            planned = advance.memory_analysis()
            ours(spec, hardware, mesh, backend)(2)
            used = (jax.local_devices()[0].memory_stats() or {}).get('peak_bytes_in_use')
        sizes = (planned.argument_size_in_bytes, planned.temp_size_in_bytes, planned.output_size_in_bytes)
        peak = sum(sizes) - planned.alias_size_in_bytes
        shapes = fit.held(spec, hardware, mesh, backend).total
        found[row] = dict(planned=peak, used_so_far=used, by_shapes=shapes)
        yield dict(memory=found)


def gaps(given: argparse.Namespace):
    """Seconds that the host takes for a step, and the device."""
    import jax

    found = {}
    for row in ROWS[:2]:
        spec, hardware, mesh, backend = run_of(row, given)
        with jax.set_mesh(mesh):
            run = ours(spec, hardware, mesh, backend)
            found[row] = dict(device=run(STEPS), host=run(STEPS, wait=False))
        yield dict(gaps=found)


def run_of(row: str, given: argparse.Namespace) -> tuple:
    """(spec, layout, mesh, backend) of a row, on one device."""
    import dataclasses

    import jax

    from configs import scale
    from sinklab import devices
    from sinklab.parse import parse
    from sinklab.spec import Hardware
    from sinklab.train import fit, start, step

    config = scale.get_config(row, 'smoke' if given.dry else 'paper')
    if not given.dry:
        config.optimizer.batch_size = BATCHES[row.split('_')[1]]
    spec, hardware = parse(config.to_dict()), Hardware(remat='auto')
    backend = step.choice(spec, hardware).backend
    mesh = devices.mesh(hardware, jax.devices()[:1])
    remat = fit.chosen(spec, hardware, mesh, backend, start.memory())
    return spec, dataclasses.replace(hardware, remat=remat), mesh, backend


def ids(spec):
    import numpy as np

    shape = spec.optimizer.batch_size, spec.data.length + 1
    return np.random.default_rng(0).integers(0, spec.model.vocabulary, shape).astype(np.int32)


def ours(spec, hardware, mesh, backend: str) -> Callable:
    from sinklab import sharding
    from sinklab.train import state, step

    nothing = sharding.of_each_device(0, mesh)
    advance = step.train_step(spec, hardware, mesh, backend)
    return repeated(
        lambda now, batch: advance(now, batch, nothing), state.create(spec, mesh), sharding.put(ids(spec), mesh)
    )


def repeated(step: Callable, now, batch) -> Callable:
    """run(count) -> seconds a step, once it is warm; of the host alone, where that does not wait for the device."""
    import jax

    held = [now]
    for _ in range(WARM):
        held[0], _ = step(held[0], batch)
    jax.block_until_ready(held[0])

    def run(count: int, wait: bool = True) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            held[0], _ = step(held[0], batch)
        ended = time.perf_counter()
        jax.block_until_ready(held[0])
        return ((time.perf_counter() if wait else ended) - begun) / count

    return run


def told(spec, seconds: list[float], peak: float | None) -> dict:
    from sinklab.model import flops

    median = statistics.median(seconds)
    tokens = spec.optimizer.batch_size * spec.data.length / median
    mfu = flops.step(spec) / median / peak if peak else None
    return dict(seconds=median, least=min(seconds), most=max(seconds), tokens_per_second=tokens, mfu=mfu)


PARTS = dict(steps=steps, kernels=kernels, tests=tests, memory=memory, gaps=gaps)

if __name__ == '__main__':
    sys.exit(main())
