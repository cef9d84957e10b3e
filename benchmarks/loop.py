"""What the loop and the probe cost over the bare jitted step, on the quickstart's shapes, in one process.

    python benchmarks/loop.py [--steps=200] [--rounds=5]

Each round runs, one after another, the bare step on one batch and the loop of `sinklab train` without anything due
(data, metrics every 10 steps, progress), then a probe. Prints medians and the spread over rounds.
"""

import argparse
import platform
import statistics
import tempfile
import time

import jax

from configs import quickstart
from sinklab import sharding
from sinklab.data.batches import sequences
from sinklab.folder import Folder, Metrics
from sinklab.spec import Hardware, parse
from sinklab.train import loop, state, step
from sinklab.train.checkpoint import Checkpoints
from sinklab.train.environment import versions


def never_due(steps: int) -> dict:
    """The quickstart with nothing between its steps but metrics."""
    config = quickstart.get_config('softmax')
    for part in ('valid', 'probe', 'checkpoint'):
        config[part].every_steps = 0
    config.optimizer.steps = steps + 10**6
    return config.to_dict()
