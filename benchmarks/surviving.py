"""What surviving costs: the real command over the bare jitted step, on the quickstart's shapes, in alternation.

    python benchmarks/surviving.py [--steps=240] [--rounds=5] [--every=60]

The command has a supervisor, a lease, signs of life, and checkpoints with digests. Its steps are timed by its own
metrics.jsonl, from the first sixth on; a checkpoint is saved every 60 of them, eight times as often as by
`make quickstart`.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile

from loop import bare, spread, undisturbed

from sinklab.folder import Folder
from sinklab.train.environment import versions


def survived(steps: int, warm: int, every: int) -> float:
    """Seconds a step of a run that is looked after, between its step `warm` and its last."""
    changes = {'optimizer.steps': steps, 'optimizer.warmup_steps': 0, 'checkpoint.every_steps': every}
    changes |= {'log.every_steps': 1, 'valid.every_steps': 0, 'probe.every_steps': 0}
    options = [f'--config.{name}={value}' for name, value in changes.items()]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, '-m', 'sinklab', 'train', '--config=configs/quickstart.py:softmax', '--remat']
        command += ['--supervise', f'--workdir={folder}/run', *options]
        subprocess.run(command, check=True, capture_output=True)
        seconds = {record['step']: record['seconds'] for record in Folder(f'{folder}/run').records()}
    return (seconds[steps - 1] - seconds[warm]) / (steps - 1 - warm)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument('--steps', type=int, default=240)
    arguments.add_argument('--rounds', type=int, default=5)
    arguments.add_argument('--every', type=int, default=60, help='steps between two checkpoints')
    given = arguments.parse_args()
    warm, step = given.steps // 6, bare(undisturbed(given.steps, 'quickstart'))
    step(warm)
    rounds = [(step(given.steps - warm), survived(given.steps, warm, given.every)) for _ in range(given.rounds)]
    alone, whole = ([1e3 * value for value in column] for column in zip(*rounds, strict=True))
    print(f'{platform.processor() or platform.machine()}, {os.cpu_count()} cores, python {platform.python_version()}')
    print(json.dumps(versions(('jax', 'jaxlib', 'orbax-checkpoint'))))
    print(f'bare step, ms:             {spread(alone)}')
    print(f'step of a supervised run:  {spread(whole)}')
    print(f'run over step, %:          {spread([100 * (w / a - 1) for a, w in zip(alone, whole, strict=True)])}')


if __name__ == '__main__':
    main()
