"""What the loop and the probe cost over the bare jitted step, on the quickstart's shapes, in one process.

    python benchmarks/loop.py [--steps=120] [--rounds=5] [--size=quickstart]

A round times, in turn, the bare step on one fixed batch, `sinklab train`'s own loop with nothing due but its
metrics (data, transfer, metrics.jsonl, progress), and a probe with its numbers and its file. The first sixth of the
steps is not counted.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax

from configs import quickstart
from configs.sizes import SIZES
from sinklab import devices, sharding
from sinklab.cli.progress import Progress
from sinklab.data.batches import sequences
from sinklab.folder import Folder
from sinklab.parse import parse
from sinklab.spec import Hardware, Spec
from sinklab.train import loop, probe, state, step
from sinklab.train.environment import versions
from sinklab.train.listener import Listener

HARDWARE = Hardware(data=1, fsdp=1, remat='attention,ffn')  # as `make quickstart`
EVERY = 100  # steps between two probes


def undisturbed(steps: int, size: str) -> Spec:
    """The quickstart's row with nothing due between its steps but metrics."""
    config = quickstart.get_config('softmax', size)
    for part in ('valid', 'probe', 'checkpoint'):
        config[part].every_steps = 0
    config.optimizer.steps, config.optimizer.warmup_steps = steps, 0
    return parse(config.to_dict())


def bare(spec: Spec) -> Callable[[int], float]:
    """Seconds a step of the jitted function alone."""
    mesh = devices.mesh(HARDWARE)
    with jax.set_mesh(mesh):
        now = state.create(spec, mesh)
        batch = sharding.put(sequences(spec).batches.rows(0, range(spec.optimizer.batch_size)), mesh)
        nothing = sharding.of_each_device(0, mesh)
        advance = step.train_step(spec, HARDWARE, mesh).lower(now, batch, nothing).compile()

    def timed(count: int) -> float:
        nonlocal now
        now, _ = advance(now, batch, nothing)
        jax.block_until_ready(now)
        start = time.perf_counter()
        for _ in range(count):
            now, _ = advance(now, batch, nothing)
        jax.block_until_ready(now)
        return (time.perf_counter() - start) / count

    return timed


def looped(spec: Spec, warm: int) -> float:
    """Seconds a step of the real loop, between its step `warm` and the one before its last."""
    ticks = {}

    class Clock(Listener):
        def record(self, record: dict, written: bool) -> None:
            ticks[record['step']] = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder, Progress('softmax', spec) as progress:
        loop.train(spec, HARDWARE, Folder(Path(folder) / 'run'), {}, progress, Clock())
    last = spec.optimizer.steps - 1
    return (ticks[last] - ticks[warm]) / (last - warm)


def probed(spec: Spec) -> Callable[[], float]:
    """Seconds of a probe: its computation, its numbers and its file."""
    mesh = devices.mesh(HARDWARE)
    with jax.set_mesh(mesh):
        params = state.create(spec, mesh)['params']
        ids_PT, observe = sequences(spec).probe_PT, probe.observer(spec, mesh)
        observe(params, ids_PT)

    def timed() -> float:
        start = time.perf_counter()
        with jax.set_mesh(mesh):
            observed = observe(params, ids_PT)
        probe.numbers(observed, spec)
        with tempfile.TemporaryDirectory() as folder:
            probe.save(Path(folder) / '1.npz', observed, probe.setting(spec))
        return time.perf_counter() - start

    return timed


def spread(values: list[float]) -> str:
    return f'{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})'


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument('--steps', type=int, default=120, choices=range(6, 100_000), metavar='N', help='from 6 on')
    arguments.add_argument('--rounds', type=int, default=5)
    arguments.add_argument('--size', default='quickstart', choices=SIZES)
    given = arguments.parse_args()
    spec, warm = undisturbed(given.steps, given.size), given.steps // 6
    step_alone, probe_alone = bare(spec), probed(spec)
    step_alone(warm)
    rounds = [(step_alone(given.steps - warm), looped(spec, warm), probe_alone()) for _ in range(given.rounds)]
    alone, whole, one = ([1e3 * value for value in column] for column in zip(*rounds, strict=True))
    print(f'{platform.processor() or platform.machine()}, {os.cpu_count()} cores, python {platform.python_version()}')
    print(json.dumps(versions(('jax', 'jaxlib', 'flax', 'optax', 'grain'))))
    print(f'bare step, ms:              {spread(alone)}')
    print(f'step of the loop, ms:       {spread(whole)}')
    print(f'one probe, ms:              {spread(one)}')
    print(f'loop over step, %:          {spread([100 * (w / a - 1) for a, w in zip(alone, whole, strict=True)])}')
    print(f'a probe every {EVERY} steps, %: {spread([o / a for a, o in zip(alone, one, strict=True)])}')


if __name__ == '__main__':
    main()
