"""Benchmark of the training loop and the sink probe against the bare jitted step.

    python benchmarks/train_loop.py [--steps=120] [--rounds=5] [--size=quickstart]

A round times three things in turn: the bare step on one fixed batch; the loop of `sinklab train` with only its
metrics due (data, transfer, metrics.jsonl, progress); and a probe with its metrics and its file. The first sixth of
the steps is warm-up and not counted.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
from argument_types import parse_count
from timing import format_spread

from sinklab.cli import terminal
from sinklab.cli.progress import ProgressCallback, ProgressDisplay
from sinklab.config.spec import Hardware, Spec
from sinklab.config.validate import parse_config
from sinklab.configs import quickstart
from sinklab.configs.sizes import SIZES
from sinklab.data.run_data import load_run_data
from sinklab.environment import get_package_versions
from sinklab.machine import describe_machine
from sinklab.parallel import device_mesh, sharding
from sinklab.run_dir import RunDir
from sinklab.train import (
    loop,
    sink_probe,
    state,
    step,
)
from sinklab.train.callbacks import Callback

HARDWARE = Hardware(data=1, fsdp=1, remat='attention,ffn')  # as `make quickstart`
PROBE_INTERVAL = 100  # steps between two probes


def make_uninterrupted_spec(steps: int, size: str) -> Spec:
    """Return the quickstart's softmax row with nothing due between its steps except metrics."""
    config = quickstart.get_config('softmax', size)
    for part in ('valid', 'probe', 'checkpoint'):
        config[part].every_steps = 0
    config.optimizer.steps, config.optimizer.warmup_steps = steps, 0
    return parse_config(config.to_dict())


def make_step_timer(spec: Spec) -> Callable[[int], float]:
    """Return a function that times a number of steps of the jitted train step, in seconds per step."""
    mesh = device_mesh.make_mesh(HARDWARE)
    with jax.set_mesh(mesh):
        train_state = state.create_state(spec, mesh)
        batch = sharding.put_batch(load_run_data(spec).batches.read_rows(0, range(spec.optimizer.batch_size)), mesh)
        no_request = sharding.make_per_device_array(0, mesh)
        compiled_step = step.make_train_step(spec, HARDWARE, mesh).lower(train_state, batch, no_request).compile()

    def time_steps(count: int) -> float:
        nonlocal train_state
        train_state, _ = compiled_step(train_state, batch, no_request)
        jax.block_until_ready(train_state)
        start = time.perf_counter()
        for _ in range(count):
            train_state, _ = compiled_step(train_state, batch, no_request)
        jax.block_until_ready(train_state)
        return (time.perf_counter() - start) / count

    return time_steps


def time_loop(spec: Spec, warmup_steps: int) -> float:
    """Return seconds per step of the training loop, from step `warmup_steps` to the one before the last."""
    times_by_step = {}

    class Clock(Callback):
        def on_record(self, record: dict, written: bool) -> None:
            times_by_step[record['step']] = time.perf_counter()

    display = ProgressDisplay(terminal.make_console(stderr=True))
    with tempfile.TemporaryDirectory() as folder, display:
        progress = ProgressCallback(display, 'softmax', spec)
        loop.train(spec, HARDWARE, RunDir(Path(folder) / 'run'), {}, progress, Clock())
    last_step = spec.optimizer.steps - 1
    return (times_by_step[last_step] - times_by_step[warmup_steps]) / (last_step - warmup_steps)


def make_probe_timer(spec: Spec) -> Callable[[], float]:
    """Return a function that times a probe in seconds: its computation, its metrics and its file."""
    mesh = device_mesh.make_mesh(HARDWARE)
    with jax.set_mesh(mesh):
        params = state.create_state(spec, mesh)['params']
        ids_PT, run_probe = load_run_data(spec).probe_PT, sink_probe.make_probe(spec, mesh)
        run_probe(params, ids_PT)

    def time_probe() -> float:
        start = time.perf_counter()
        with jax.set_mesh(mesh):
            observations = run_probe(params, ids_PT)
        sink_probe.compute_probe_metrics(observations, spec)
        with tempfile.TemporaryDirectory() as folder:
            sink_probe.save_probe(Path(folder) / '1.npz', observations, sink_probe.get_probe_setting(spec))
        return time.perf_counter() - start

    return time_probe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--steps', type=parse_count, default=120, metavar='N', help='from 6 on')
    parser.add_argument('--rounds', type=parse_count, default=5)
    parser.add_argument('--size', default='quickstart', choices=SIZES)
    args = parser.parse_args()
    if args.steps < 6:
        parser.error(f'--steps={args.steps} leaves no step for warm-up; give 6 or more')
    spec, warmup_steps = make_uninterrupted_spec(args.steps, args.size), args.steps // 6
    time_step, time_probe = make_step_timer(spec), make_probe_timer(spec)
    time_step(warmup_steps)
    rounds = [
        (time_step(args.steps - warmup_steps), time_loop(spec, warmup_steps), time_probe())
        for _ in range(args.rounds)
    ]
    bare_ms, loop_ms, probe_ms = ([1e3 * value for value in column] for column in zip(*rounds, strict=True))
    print(describe_machine())
    print(json.dumps(get_package_versions(('jax', 'jaxlib', 'flax', 'optax', 'grain'))))
    print(f'bare step, ms:              {format_spread(bare_ms)}')
    print(f'step of the loop, ms:       {format_spread(loop_ms)}')
    print(f'one probe, ms:              {format_spread(probe_ms)}')
    print(
        'loop over step, %:          '
        f'{format_spread(100 * (looped / bare - 1) for bare, looped in zip(bare_ms, loop_ms, strict=True))}'
    )
    probe_percent = [100 * probe / (PROBE_INTERVAL * bare) for bare, probe in zip(bare_ms, probe_ms, strict=True)]
    print(f'a probe every {PROBE_INTERVAL} steps, %: {format_spread(probe_percent)}')


if __name__ == '__main__':
    main()
