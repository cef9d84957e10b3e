"""Benchmark of one accelerator in several parts, by default in at most nine minutes.

    PYTHONPATH=. python benchmarks/device.py --out=DIR [--parts=steps,memory] [--minutes=9] [--smoke]

Each part runs in a separate process and writes DIR/PART.json, independently of the other parts. When its time is
over, the process and its children are ended. The parts are:

- kernels: attention kernels against cuDNN and plain XLA (benchmarks/gpu_attention.py).
- tests: tests of the kernels, by pytest.
- steps: 60M and 1B, softmax and sigmoid, in turn with a plain JAX step of the same shapes. The remat policy of the
  plain JAX step is chosen for the memory that the state of the sinklab step leaves free.
- memory: planned bytes of the compiler against used bytes, in one process per row.
- gaps: the time in which the host dispatches a step, against the time in which the device runs it.

--smoke runs all parts at the size smoke, on any device that jax finds.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from argument_types import parse_positive_number

ROOT = Path(__file__).parents[1]
TIME_SHARES = dict(
    steps=0.45, kernels=0.2, tests=0.15, memory=0.15, gaps=0.05
)  # shares of the total time; unused time passes to later parts
ROWS = ('softmax_60m', 'sigmoid_60m', 'softmax_1b', 'sigmoid_1b')
BATCH_SIZES = {'60m': 32, '1b': 8}  # sequences of one device
MFU_GOALS = {'60m': 0.25, '1b': 0.45}
MEMORY_RATIO_RANGE = 0.9, 1.1  # goal for used bytes / planned bytes
WARMUP_STEPS, NUM_STEPS, NUM_ROUNDS = 3, 10, 3
TERMINATION_SECONDS = 5.0  # from SIGTERM to SIGKILL


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, required=True)
    parser.add_argument('--parts', default=','.join(TIME_SHARES))
    parser.add_argument('--minutes', type=parse_positive_number, default=9.0, help='of all parts together')
    parser.add_argument('--smoke', action='store_true', help='run tiny models, on any device')
    parser.add_argument('--one', choices=TIME_SHARES, help=argparse.SUPPRESS)
    parser.add_argument('--row', choices=ROWS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    parts = args.parts.split(',')
    if unknown := set(parts) - set(TIME_SHARES):
        print(f'device: {", ".join(unknown)} is no part; give some of {", ".join(TIME_SHARES)}', file=sys.stderr)
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    return write_part(args) if args.one else max(run_parts(parts, args))


def run_parts(parts: list[str], args: argparse.Namespace) -> list[int]:
    """Run parts, each in its time; return one code per process, 1 for a failure.

    The part memory runs each row in a separate process, because the peak of used bytes is one of the whole process.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit through the `finally` that ends child processes
    deadline, codes = time.monotonic() + 60 * args.minutes, []
    for part in (part for part in TIME_SHARES if part in parts):
        (args.out / f'{part}.json').unlink(missing_ok=True)
        for row in ROWS if part == 'memory' else [None]:
            start = time.monotonic()
            seconds = max(1.0, min(deadline - start, 60 * args.minutes * (TIME_SHARES[part] + 0.2)))
            exit_code = run_with_timeout(make_part_command(part, row, args), seconds)
            name = f'{part} of {row}' if row else part
            if exit_code is None:
                print(f'device: {name} took more than {seconds:.0f} s', file=sys.stderr)
            print(f'{name}: {"failed" if exit_code != 0 else "done"} in {time.monotonic() - start:.0f} s', flush=True)
            codes.append(0 if exit_code == 0 else 1)
    return codes


def make_part_command(part: str, row: str | None, args: argparse.Namespace) -> list[str]:
    flags = [*([f'--row={row}'] if row else []), *(['--smoke'] if args.smoke else [])]
    return [sys.executable, __file__, f'--out={args.out}', f'--one={part}', *flags]


def run_with_timeout(command: list[str], seconds: float) -> int | None:
    """Run a command and end its process group; return its exit code, or None after a timeout."""
    environment = os.environ | dict(PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')]))
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        terminate_process_group(process)


def terminate_process_group(process: subprocess.Popen) -> None:
    """Send SIGTERM to a process group, and SIGKILL to what is left after TERMINATION_SECONDS."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal_number)
            deadline = time.monotonic() + TERMINATION_SECONDS
            while time.monotonic() < deadline:
                process.poll()
                os.killpg(process.pid, 0)  # raises ProcessLookupError when no process is left
                time.sleep(0.05)


def write_part(args: argparse.Namespace) -> int:
    import jax

    from sinklab.environment import describe_code

    file, name = args.out / f'{args.one}.json', args.row or args.one
    result = (json.loads(file.read_text()) if file.exists() else {}) | dict(
        command=' '.join(sys.argv),
        device=jax.devices()[0].device_kind,
        date=time.strftime('%Y-%m-%d'),
        code=describe_code(),
        smoke=args.smoke,
    )
    unfinished_parts = result.get('unfinished', [])
    for figures in itertools.chain(
        [dict(unfinished=[*unfinished_parts, name])], PARTS[args.one](args), [dict(unfinished=unfinished_parts)]
    ):
        for key, value in figures.items():
            result[key] = result.get(key, {}) | value if isinstance(value, dict) else value
        file.write_text(json.dumps(result, indent=2) + '\n')  # keeps the figures so far if the time ends
    return 1 if result.get('failed') else 0


def run_kernel_benchmark(args: argparse.Namespace):
    file = args.out / 'gpu_attention.json'
    file.unlink(missing_ok=True)  # figures of an earlier run
    options = ['--tokens=8192', '--lengths=2048,4096', '--widths=64,128', '--rounds=10', f'--json={file}']
    process = subprocess.run(
        [sys.executable, ROOT / 'benchmarks' / 'gpu_attention.py', *options], capture_output=True
    )
    figures = json.loads(file.read_text()) if file.exists() else None
    yield dict(
        figures=figures,
        output_tail=(process.stdout + process.stderr).decode()[-4000:],
        failed=bool(process.returncode) and not args.smoke,
    )


def run_kernel_tests(args: argparse.Namespace):
    files = sorted(str(path) for path in (ROOT / 'tests').glob('test_gpu*.py'))
    command = [sys.executable, '-m', 'pytest', '-q', '-x', *(['--collect-only'] if args.smoke else []), *files]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    yield dict(failed=bool(process.returncode), output_tail=process.stdout[-4000:] + process.stderr[-1000:])


def time_train_steps(args: argparse.Namespace):
    """Measure tokens per second and MFU of the sinklab step and of a plain JAX step, in turns."""
    import jax

    from sinklab.train import memory_estimate, step

    for row in ROWS:
        spec, hardware, mesh, backend = load_run(row, args)
        remats = dict(ours=hardware.remat)
        with jax.set_mesh(mesh):
            runs = {'ours': make_sinklab_run(spec, mesh, step.make_train_step(spec, hardware, mesh, backend))}
            if row.startswith('softmax'):
                remats['plain'], runs['plain'] = make_baseline_run(spec)
            times = {name: [] for name in runs}
            for name in [*runs] * NUM_ROUNDS:
                times[name].append(runs[name](NUM_STEPS))
        runs.clear()  # free their states before the next ones are created
        peak_flops = memory_estimate.compute_mesh_peak_flops(mesh)
        result = {
            name: summarize_times(spec, seconds, peak_flops) | dict(remat=remats[name])
            for name, seconds in times.items()
        }
        result |= dict(attention=backend, batch=spec.optimizer.batch_size, goal=MFU_GOALS[row.split('_')[1]])
        yield dict(steps={row: result})


def make_baseline_run(spec) -> tuple[str, Callable]:
    """Return the remat policy of a plain JAX step and its timed run.

    The policy is `none` if the step then fits into the memory that the sinklab step leaves free, else `full`.
    """
    import jax
    import jax_baseline

    from sinklab.parallel import device_mesh
    from sinklab.train import memory_estimate

    free_bytes = (
        memory_estimate.USABLE_MEMORY_FRACTION * device_mesh.get_device_memory_bytes()
        - get_memory_stats().get('bytes_in_use', 0)
    )
    ids_BT = jax.device_put(make_ids(spec))
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # out of memory, in the compiler or in the warm-up steps
        state, step = jax_baseline.make_train_step(spec, 'none')
        compiled = step.lower(state, ids_BT).compile()
        if get_planned_bytes(compiled) <= free_bytes:
            return 'none', make_timed_run(compiled, state, ids_BT)
    state = step = compiled = None  # free the first state before the second one is created
    state, step = jax_baseline.make_train_step(spec, 'full')
    return 'full', make_timed_run(step, state, ids_BT)


def measure_memory(args: argparse.Namespace):
    """Measure planned bytes of the compiler, peak bytes of this process, and the estimate from shapes."""
    import jax

    from sinklab.train import memory_estimate, state, step

    spec, hardware, mesh, backend = load_run(args.row, args)
    with jax.set_mesh(mesh):
        lowered = step.make_train_step(spec, hardware, mesh, backend).lower(
            state.make_abstract_state(spec, mesh), *step.make_abstract_inputs(spec, mesh)
        )
        compiled = lowered.compile()
        make_sinklab_run(spec, mesh, compiled)(2)
    planned_bytes, used_bytes = get_planned_bytes(compiled), get_memory_stats().get('peak_bytes_in_use')
    result = dict(
        planned=planned_bytes,
        used=used_bytes,
        by_shapes=memory_estimate.estimate_memory(spec, hardware, mesh, backend).total,
    )
    ratio = used_bytes / planned_bytes if used_bytes else None
    yield dict(memory={args.row: result | dict(used_of_planned=ratio, goal=MEMORY_RATIO_RANGE, remat=hardware.remat)})


def get_planned_bytes(compiled) -> int:
    """Return the bytes of a program and its arguments, as planned by the compiler."""
    analysis = compiled.memory_analysis()
    return (
        analysis.argument_size_in_bytes
        + analysis.temp_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
    )


def get_memory_stats() -> dict:
    """Return the memory statistics of the first device; {} on a CPU."""
    import jax

    return jax.local_devices()[0].memory_stats() or {}


def measure_dispatch(args: argparse.Namespace):
    """Measure the seconds per step of the device and of the host, which dispatches without waiting."""
    import jax

    from sinklab.train import step

    for row in ROWS[:2]:
        spec, hardware, mesh, backend = load_run(row, args)
        with jax.set_mesh(mesh):
            run = make_sinklab_run(spec, mesh, step.make_train_step(spec, hardware, mesh, backend))
            yield dict(gaps={row: dict(device=run(NUM_STEPS), host=run(NUM_STEPS, wait=False))})


def load_run(row: str, args: argparse.Namespace) -> tuple:
    """Return the spec, hardware, mesh and attention backend of a row on one device."""
    import dataclasses

    import jax

    from sinklab.config.spec import Hardware
    from sinklab.config.validate import parse_config
    from sinklab.configs import scale
    from sinklab.parallel import device_mesh
    from sinklab.train import memory_estimate, step

    config = scale.get_config(row, 'smoke' if args.smoke else 'paper')
    if not args.smoke:
        config.optimizer.batch_size = BATCH_SIZES[row.split('_')[1]]
    spec, hardware = parse_config(config.to_dict()), Hardware(remat='auto')
    backend = step.choose_verified_backend(spec, hardware).backend
    mesh = device_mesh.make_mesh(hardware, jax.devices()[:1])
    remat = memory_estimate.choose_remat_policy(spec, hardware, mesh, backend, device_mesh.get_device_memory_bytes())
    return spec, dataclasses.replace(hardware, remat=remat), mesh, backend


def make_ids(spec):
    import numpy as np

    shape = spec.optimizer.batch_size, spec.data.length + 1
    return np.random.default_rng(0).integers(0, spec.model.vocabulary, shape).astype(np.int32)


def make_sinklab_run(spec, mesh, train_step: Callable) -> Callable:
    from sinklab.parallel import sharding
    from sinklab.train import state

    no_request = sharding.make_per_device_array(0, mesh)
    return make_timed_run(
        lambda train_state, batch: train_step(train_state, batch, no_request),
        state.create_state(spec, mesh),
        sharding.put_batch(make_ids(spec), mesh),
    )


def make_timed_run(step: Callable, train_state, batch) -> Callable:
    """Run warm-up steps and return run(count, wait), which returns seconds per step.

    Without `wait`, the time is that of the host only, which does not wait for the device.
    """
    import jax

    state_cell = [train_state]
    for _ in range(WARMUP_STEPS):
        state_cell[0], _ = step(state_cell[0], batch)
    jax.block_until_ready(state_cell[0])

    def run(count: int, wait: bool = True) -> float:
        start = time.perf_counter()
        for _ in range(count):
            state_cell[0], _ = step(state_cell[0], batch)
        end_time = time.perf_counter()
        jax.block_until_ready(state_cell[0])
        return ((time.perf_counter() if wait else end_time) - start) / count

    return run


def summarize_times(spec, seconds: list[float], peak_flops: float | None) -> dict:
    from sinklab.model import flops

    median = statistics.median(seconds)
    tokens = spec.optimizer.batch_size * spec.data.length / median
    mfu = flops.count_step_flops(spec) / median / peak_flops if peak_flops else None
    return dict(seconds=median, least=min(seconds), most=max(seconds), tokens_per_second=tokens, mfu=mfu)


PARTS = dict(
    steps=time_train_steps,
    kernels=run_kernel_benchmark,
    tests=run_kernel_tests,
    memory=measure_memory,
    gaps=measure_dispatch,
)

if __name__ == '__main__':
    sys.exit(main())
