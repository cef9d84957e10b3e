"""All that is to be known of one accelerator, in one command of at most nine minutes, part after part.

    PYTHONPATH=. python benchmarks/device.py --out=DIR [--parts=steps,memory] [--minutes=9] [--dry]

Each part is a process of its own, which leaves DIR/PART.json, whatever becomes of the others, and no process when its
time is over: kernels (against the definition, cuDNN and plain XLA), tests (of kernels, by pytest), steps (60M and 1B,
softmax and sigmoid, in turn with a plain JAX step of the same shapes), memory (what the compiler said against what
was in use, a process for each row), gaps (what the host takes to dispatch a step, of what the device takes to run
it). --dry runs all of it at the size smoke, on whatever jax finds.
"""

import argparse
import contextlib
import itertools
import json
import os
import platform
import signal
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
WITHIN = 0.9, 1.1  # of what was planned, what is used is to be
WARM, STEPS, ROUNDS = 3, 10, 3
LEAVE = 5.0  # seconds for processes that are told to end


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, required=True)
    parser.add_argument('--parts', default=','.join(SHARES))
    parser.add_argument('--minutes', type=float, default=9.0)
    parser.add_argument('--dry', action='store_true')
    parser.add_argument('--one', choices=SHARES, help=argparse.SUPPRESS)
    parser.add_argument('--row', choices=ROWS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    parts = given.parts.split(',')
    if unknown := set(parts) - set(SHARES):
        print(f'device: {", ".join(unknown)} is no part; give some of {", ".join(SHARES)}', file=sys.stderr)
        return 1
    given.out.mkdir(parents=True, exist_ok=True)
    return written(given) if given.one else max(launched(parts, given))


def launched(parts: list[str], given: argparse.Namespace) -> list[int]:
    """Runs parts in their time, of what is used in memory each row by itself; 1 where one has failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without what has been started
    until, codes = time.monotonic() + 60 * given.minutes, []
    for part in (part for part in SHARES if part in parts):
        (given.out / f'{part}.json').unlink(missing_ok=True)
        for row in ROWS if part == 'memory' else [None]:
            begun = time.monotonic()
            seconds = max(1.0, min(until - begun, 60 * given.minutes * (SHARES[part] + 0.2)))
            code = bounded(command(part, row, given), seconds)
            name = f'{part} of {row}' if row else part
            if code is None:
                print(f'device: {name} took more than {seconds:.0f} s', file=sys.stderr)
            print(f'{name}: {"failed" if code != 0 else "done"} in {time.monotonic() - begun:.0f} s', flush=True)
            codes.append(0 if code == 0 else 1)
    return codes


def command(part: str, row: str | None, given: argparse.Namespace) -> list[str]:
    more = [*([f'--row={row}'] if row else []), *(['--dry'] if given.dry else [])]
    return [sys.executable, __file__, f'--out={given.out}', f'--one={part}', *more]


def bounded(command: list[str], seconds: float) -> int | None:
    """The exit code of a command, None where its time is over; nothing is left of what it has started."""
    environment = os.environ | dict(PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')]))
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(process)


def end(process: subprocess.Popen) -> None:
    """Tells a process and its group to end, and kills those that are there seconds later."""
    for told in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, told)
            until = time.monotonic() + LEAVE
            while time.monotonic() < until:
                process.poll()
                os.killpg(process.pid, 0)  # raises when none is left
                time.sleep(0.05)


def written(given: argparse.Namespace) -> int:
    import jax

    from sinklab.train.environment import versions

    file, name = given.out / f'{given.one}.json', given.row or given.one
    found = (json.loads(file.read_text()) if file.exists() else {}) | dict(
        command=' '.join(sys.argv),
        device=jax.devices()[0].device_kind,
        python=platform.python_version(),
        versions=versions(('jax', 'jaxlib', 'flax', 'optax')),
        dry=given.dry,
    )
    before = found.get('unended', [])
    for figures in itertools.chain([dict(unended=[*before, name])], PARTS[given.one](given), [dict(unended=before)]):
        for key, value in figures.items():
            found[key] = found.get(key, {}) | value if isinstance(value, dict) else value
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

    from sinklab.train import fit, step

    for row in ROWS:
        spec, hardware, mesh, backend = run_of(row, given)
        remats = dict(ours=hardware.remat)
        with jax.set_mesh(mesh):
            runs = {'ours': ours(spec, mesh, step.train_step(spec, hardware, mesh, backend))}
            if row.startswith('softmax'):
                remats['plain'], runs['plain'] = plainly(spec)
            times = {name: [] for name in runs}
            for name in [*runs] * ROUNDS:
                times[name].append(runs[name](STEPS))
        runs.clear()  # of their states, before others are made
        peak = fit.peak(mesh)
        found = {name: told(spec, seconds, peak) | dict(remat=remats[name]) for name, seconds in times.items()}
        found |= dict(attention=backend, batch=spec.optimizer.batch_size, goal=GOALS[row.split('_')[1]])
        yield dict(steps={row: found})


def plainly(spec) -> tuple[str, Callable]:
    """What a plain step computes again, and its run: nothing, as one writes it, where that fits beside ours."""
    import jax
    import plain

    from sinklab import devices
    from sinklab.train import fit

    room = fit.USABLE * devices.device_memory() - stats().get('bytes_in_use', 0)
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # of a compiler that knows the room, or in it
        state, step = plain.training(spec, 'none')
        compiled = step.lower(state, ids(spec)).compile()
        if planned(compiled) <= room:
            return 'none', repeated(compiled, state, ids(spec))
    state, step = plain.training(spec, 'full')
    return 'full', repeated(step, state, ids(spec))


def memory(given: argparse.Namespace):
    """Bytes that the compiler plans, those that this process has used at most, and those that are said by shapes."""
    import jax

    from sinklab.train import fit, state, step

    spec, hardware, mesh, backend = run_of(given.row, given)
    with jax.set_mesh(mesh):
        lowered = step.train_step(spec, hardware, mesh, backend).lower(
            state.abstract(spec, mesh), *step.given(spec, mesh)
        )
        compiled = lowered.compile()
        ours(spec, mesh, compiled)(2)
    plan, used = planned(compiled), stats().get('peak_bytes_in_use')
    found = dict(planned=plan, used=used, by_shapes=fit.held(spec, hardware, mesh, backend).total)
    ratio = used / plan if used else None
    yield dict(memory={given.row: found | dict(used_of_planned=ratio, goal=WITHIN, remat=hardware.remat)})


def planned(compiled) -> int:
    """Bytes of a program and its arguments, as the compiler has planned them."""
    of = compiled.memory_analysis()
    return of.argument_size_in_bytes + of.temp_size_in_bytes + of.output_size_in_bytes - of.alias_size_in_bytes


def stats() -> dict:
    """What a device says of its memory; of a CPU nothing."""
    import jax

    return jax.local_devices()[0].memory_stats() or {}


def gaps(given: argparse.Namespace):
    """Seconds that the host takes for a step, and the device."""
    import jax

    from sinklab.train import step

    for row in ROWS[:2]:
        spec, hardware, mesh, backend = run_of(row, given)
        with jax.set_mesh(mesh):
            run = ours(spec, mesh, step.train_step(spec, hardware, mesh, backend))
            yield dict(gaps={row: dict(device=run(STEPS), host=run(STEPS, wait=False))})


def run_of(row: str, given: argparse.Namespace) -> tuple:
    """(spec, layout, mesh, backend) of a row, on one device."""
    import dataclasses

    import jax

    from configs import scale
    from sinklab import devices
    from sinklab.parse import parse
    from sinklab.spec import Hardware
    from sinklab.train import fit, step

    config = scale.get_config(row, 'smoke' if given.dry else 'paper')
    if not given.dry:
        config.optimizer.batch_size = BATCHES[row.split('_')[1]]
    spec, hardware = parse(config.to_dict()), Hardware(remat='auto')
    backend = step.choice(spec, hardware).backend
    mesh = devices.mesh(hardware, jax.devices()[:1])
    remat = fit.chosen(spec, hardware, mesh, backend, devices.device_memory())
    return spec, dataclasses.replace(hardware, remat=remat), mesh, backend


def ids(spec):
    import numpy as np

    shape = spec.optimizer.batch_size, spec.data.length + 1
    return np.random.default_rng(0).integers(0, spec.model.vocabulary, shape).astype(np.int32)


def ours(spec, mesh, advance: Callable) -> Callable:
    from sinklab import sharding
    from sinklab.train import state

    nothing = sharding.of_each_device(0, mesh)
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
