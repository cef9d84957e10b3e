"""Benchmark of a train step on CPU cores, compared with what users run instead.

    python -m benchmarks.peers [--size=quickstart] [--batch=32] [--length=64] [--rounds=20] [--peers=litgpt,...]

Each peer runs in its own process, with the same model, batch, clipping and optimizer, by default in float32:

- ours, as `sinklab train --data=N --micro_batch=N --remat=WHAT` runs it. By default as many
  cores as divide the batch (or --micro_batch) are devices, and large batches are computed in parts.
- whole batch: ours with --micro_batch=none, which --peers=all leaves out.
- PyTorch eager, with fused AdamW and scaled_dot_product_attention.
- torch.compile: the same, with forward pass, loss and backward pass compiled.
- plain JAX (jax_baseline.py), on one device.
- litgpt, in the environment that `make peers` installs.

In a round, each runs --steps steps while the others wait. GLIBC_TUNABLES=glibc.malloc.hugetlb=1 gives huge pages to
all (docs/results/speed.md).
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import jax_baseline, step_server
from benchmarks.argument_types import parse_count
from benchmarks.machine import describe_machine
from benchmarks.timing import format_spread
from sinklab.cli.layout_flags import parse_remat
from sinklab.config.spec import Layout, Spec
from sinklab.config.validate import parse_config
from sinklab.configs import default
from sinklab.configs.sizes import SIZES
from sinklab.environment import get_package_versions
from sinklab.parallel import device_mesh, sharding
from sinklab.train import device_layout, state, step

ROOT = Path(__file__).resolve().parents[1]
LITGPT_PYTHON = ROOT / 'build' / 'peers' / 'litgpt' / 'bin' / 'python'
MODEL_FIELDS = 'layers', 'heads', 'width', 'head_width', 'ffn_width', 'vocabulary'


def make_spec(shape: dict) -> Spec:
    """Make the spec of a model and a batch; everything else is as in the default config."""
    config = default.get_config()
    for name in (*MODEL_FIELDS, 'dtype'):
        config.model[name] = shape[name]
    config.data.length = config.probe.length = shape['length']
    config.optimizer.batch_size = shape['batch']
    return parse_config(config.to_dict())


def make_sinklab_step(shape: dict) -> Callable[[], float]:
    """Return a function that runs one step and returns its loss."""
    spec = make_spec(shape)
    layout = Layout(data=shape['data'], fsdp=1, micro_batch=shape['micro_batch'] or 'default', remat=shape['remat'])
    device_mesh.split_cpu_devices(layout)
    mesh = device_mesh.make_mesh(layout)
    layout = dataclasses.replace(layout, micro_batch=device_layout.choose_micro_batch(spec, layout, mesh))
    memory_bytes = device_mesh.get_device_memory_bytes()
    policy = device_layout.choose_remat_policy(spec, layout, mesh, 'chunked', memory_bytes)
    layout = dataclasses.replace(layout, remat=policy)
    with jax.set_mesh(mesh):
        train_state, batch = state.create_state(spec, mesh), sharding.put_batch(step_server.make_ids(shape), mesh)
        no_request = sharding.make_per_device_array(0, mesh)
        compiled_step = step.make_train_step(spec, layout, mesh).lower(train_state, batch, no_request).compile()

    def run_step() -> float:
        nonlocal train_state
        train_state, metrics = compiled_step(train_state, batch, no_request)
        return float(metrics['train/loss'])

    return run_step


def make_whole_batch_step(shape: dict) -> Callable[[], float]:
    return make_sinklab_step(shape | dict(micro_batch=shape['batch']))


def make_jax_step(shape: dict) -> Callable[[], float]:
    """Return a function that runs one step and returns its loss."""
    train_state, train_step = jax_baseline.make_train_step(make_spec(shape))
    ids_BT = jnp.asarray(step_server.make_ids(shape))

    def run_step() -> float:
        nonlocal train_state
        train_state, loss = train_step(train_state, ids_BT)
        return float(loss)

    return run_step


def make_pytorch_step(shape: dict, is_compiled: bool) -> Callable[[], float]:
    """Return a function that runs one step and returns its loss."""
    from benchmarks import peer_pytorch

    return peer_pytorch.make_decoder_step(shape, is_compiled)


STEP_MAKERS = {
    'ours': make_sinklab_step,
    'whole batch': make_whole_batch_step,
    'PyTorch eager': functools.partial(make_pytorch_step, is_compiled=False),
    'torch.compile': functools.partial(make_pytorch_step, is_compiled=True),
    'plain JAX': make_jax_step,
}
PEERS = [*STEP_MAKERS, 'litgpt']


class PeerProcess:
    """A separate process that runs the steps of a peer (step_server.py)."""

    def __init__(self, name: str, shape: dict):
        self.name = name
        self.log = tempfile.TemporaryFile('w+')  # noqa: SIM115
        command = [sys.executable, '-m', 'benchmarks.peers', f'--serve={name}']
        if name == 'litgpt':
            command = [str(LITGPT_PYTHON), '-m', 'benchmarks.peer_litgpt']
        pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True)
        self.process = subprocess.Popen([*command, json.dumps(shape)], cwd=ROOT, **pipes)
        print(f'{name}, loss of the first step: {self.read_number():.4f}', flush=True)

    def read_number(self) -> float:
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            self.log.seek(0)
            sys.exit(f'{self.name} ended with exit code {code}:\n{self.log.read()[-2000:]}')
        return float(line)

    def time_steps(self, num_steps: int) -> float:
        """Return the milliseconds of one step, a mean over `num_steps`."""
        print(num_steps, file=self.process.stdin, flush=True)
        return self.read_number()


def choose_peers(names: str) -> list[str]:
    """Return the peers of --peers, without those that are not installed."""
    peers = [name for name in PEERS if name != 'whole batch']
    if names != 'all':
        peers = ['ours', *(name for name in names.split(',') if name != 'ours')]
    if unknown := [name for name in peers if name not in PEERS]:
        sys.exit(f'--peers: {unknown[0]} is unknown; give some of {", ".join(PEERS)}')
    has_torch = importlib.util.find_spec('torch') is not None
    is_installed = {'PyTorch eager': has_torch, 'torch.compile': has_torch, 'litgpt': LITGPT_PYTHON.exists()}
    missing = [name for name in peers if not is_installed.get(name, True)]
    for name in missing:
        print(f'{name} is not installed; run: make .venv/test peers')
    if missing and names != 'all':
        sys.exit(1)
    return [name for name in peers if name not in missing]


def parse_shape() -> tuple[argparse.Namespace, dict]:
    """Parse the arguments; return them, and the model and the batch as JSON values."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--peers', default='all', metavar='NAME,...', help=f'some of {", ".join(PEERS)}')
    parser.add_argument('--size', default='quickstart', choices=SIZES, help='the model')
    for name in MODEL_FIELDS:
        parser.add_argument(f'--{name}', type=parse_count, metavar='N', help='instead of that of --size')
    parser.add_argument('--dtype', default='float32', choices=('float32', 'bfloat16'))
    parser.add_argument('--batch', type=parse_count, default=32)
    parser.add_argument('--length', type=parse_count, default=64)
    parser.add_argument('--data', type=parse_count, metavar='N', help='devices of ours')
    parser.add_argument(
        '--remat', type=parse_remat, default='default', metavar='WHAT', help='of ours, as of sinklab train'
    )
    parser.add_argument('--micro_batch', type=parse_count, metavar='N', help='of ours, PyTorch and litgpt')
    parser.add_argument('--rounds', type=parse_count, default=20)
    parser.add_argument('--steps', type=parse_count, default=4, help='of each in a round')
    args = parser.parse_args()
    part = args.micro_batch or args.batch
    if args.batch % part or part % (args.data or 1):
        parser.error(
            f'--batch={args.batch} must be a multiple of --micro_batch={part}, and that of --data={args.data or 1}'
        )
    model = parse_config(default.get_config(size=args.size).to_dict()).model
    return args, {name: getattr(args, name) or getattr(model, name) for name in MODEL_FIELDS} | dict(
        batch=args.batch,
        length=args.length,
        dtype=args.dtype,
        threads=cores,
        data=args.data or max(count for count in range(1, cores + 1) if part % count == 0),
        micro_batch=args.micro_batch,
        remat=args.remat,
    )


def compare_peers(args: argparse.Namespace, shape: dict) -> None:
    processes = {name: PeerProcess(name, shape) for name in choose_peers(args.peers)}
    rounds = [[process.time_steps(args.steps) for process in processes.values()] for _ in range(args.rounds)]
    columns = dict(zip(processes, zip(*rounds, strict=True), strict=True))
    print(describe_machine())
    print(json.dumps(get_package_versions(('jax', 'jaxlib', 'torch'))), json.dumps(shape))
    for name, column in columns.items():
        ratios = [other_ms / sinklab_ms for other_ms, sinklab_ms in zip(column, columns['ours'], strict=True)]
        print(f'{name}: {format_spread(column, ".1f")} ms a step, {format_spread(ratios)} of ours')


def main() -> None:
    if sys.argv[1:2] and sys.argv[1].startswith('--serve='):
        step_server.serve(STEP_MAKERS[sys.argv[1].removeprefix('--serve=')])
    else:
        compare_peers(*parse_shape())


if __name__ == '__main__':
    main()
