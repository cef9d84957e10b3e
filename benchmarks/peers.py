"""Benchmark of a train step on CPU cores, compared with what users run instead.

    python benchmarks/peers.py [--size=quickstart] [--batch=32] [--length=64] [--rounds=20] [--peers=litgpt,...]

Each peer runs in its own process, with the same model, batch, clipping and optimizer, by default in float32:

- ours, as `sinklab train --data=N --micro_batch=N --remat=WHAT` runs it. By default as many
  cores as divide the batch (or --micro_batch) are devices, and large batches are computed in parts.
- whole batch: ours with --micro_batch=none, which --peers=all leaves out.
- PyTorch eager, with fused AdamW and scaled_dot_product_attention.
- torch.compile: the same, with forward pass, loss and backward pass compiled.
- plain JAX (benchmarks/jax_baseline.py), on one device.
- litgpt and MaxText, in the environments that `make peers` installs.

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

import jax
import jax.numpy as jnp
import jax_baseline
import step_server
from argument_types import parse_count
from timing import format_spread

from sinklab.cli.hardware_flags import parse_remat
from sinklab.config.spec import Hardware, ModelConfig, Spec
from sinklab.config.validate import parse_config
from sinklab.configs import default
from sinklab.configs.sizes import SIZES
from sinklab.environment import get_package_versions
from sinklab.machine import describe_machine
from sinklab.parallel import device_mesh, sharding
from sinklab.train import memory_estimate, state, step

ROOT = Path(__file__).parents[1]


def make_spec(shape: dict) -> Spec:
    """Make the spec of a model and a batch; everything else is as in the default config."""
    config = default.get_config()
    for name in ('layers', 'heads', 'width', 'head_width', 'ffn_width', 'vocabulary', 'dtype'):
        config.model[name] = shape[name]
    config.data.length = config.probe.length = shape['length']
    config.optimizer.batch_size = shape['batch']
    return parse_config(config.to_dict())


def make_sinklab_step(shape: dict) -> Callable[[], float]:
    """Return a function that runs one step, or one forward pass, and returns its loss."""
    spec = make_spec(shape)
    hardware = Hardware(
        data=shape['data'], fsdp=1, micro_batch=shape['micro_batch'] or 'default', remat=shape['remat']
    )
    device_mesh.split_cpu_devices(hardware)
    mesh = device_mesh.make_mesh(hardware)
    hardware = dataclasses.replace(hardware, micro_batch=memory_estimate.choose_micro_batch(spec, hardware, mesh))
    memory_bytes = device_mesh.get_device_memory_bytes()
    policy = memory_estimate.choose_remat_policy(spec, hardware, mesh, 'chunked', memory_bytes)
    hardware = dataclasses.replace(hardware, remat=policy)
    with jax.set_mesh(mesh):
        train_state, batch = state.create_state(spec, mesh), sharding.put_batch(step_server.make_ids(shape), mesh)
        if shape['is_forward']:
            loss = step.make_data_parallel_loss(step.make_loss(spec), spec, mesh)
            compiled_loss = jax.jit(loss).lower(train_state['params'], batch).compile()
            return lambda: float(compiled_loss(train_state['params'], batch))
        no_request = sharding.make_per_device_array(0, mesh)
        compiled_step = step.make_train_step(spec, hardware, mesh).lower(train_state, batch, no_request).compile()

    def run_step() -> float:
        nonlocal train_state
        train_state, metrics = compiled_step(train_state, batch, no_request)
        return float(metrics['train/loss'])

    return run_step


def make_whole_batch_step(shape: dict) -> Callable[[], float]:
    return make_sinklab_step(shape | dict(micro_batch=shape['batch']))


def make_jax_step(shape: dict) -> Callable[[], float]:
    """Return a function that runs one step, or one forward pass, and returns its loss."""
    spec, ids_BT = make_spec(shape), jnp.asarray(step_server.make_ids(shape))
    train_state, train_step = jax_baseline.make_train_step(spec, 'none')
    compute_loss = jax.jit(functools.partial(jax_baseline.compute_loss, spec=spec, remat='none'))

    def run_step() -> float:
        nonlocal train_state
        if shape['is_forward']:
            return float(compute_loss(train_state[0], ids_BT))
        train_state, loss = train_step(train_state, ids_BT)
        return float(loss)

    return run_step


def make_pytorch_step(shape: dict, is_compiled: bool) -> Callable[[], float]:
    """Return a function that runs one step, or one forward pass, and returns its loss."""
    import peer_pytorch

    return peer_pytorch.make_decoder_step(shape, is_compiled)


STEP_MAKERS = {
    'ours': make_sinklab_step,
    'whole batch': make_whole_batch_step,
    'PyTorch eager': functools.partial(make_pytorch_step, is_compiled=False),
    'torch.compile': functools.partial(make_pytorch_step, is_compiled=True),
    'plain JAX': make_jax_step,
}
# Peers with an environment of their own, of `make peers`.
SCRIPTS = {'litgpt': 'peer_litgpt.py', 'MaxText': 'peer_maxtext.py'}
PACKAGES = {'litgpt': ('litgpt', 'torch'), 'MaxText': ('maxtext', 'jax')}
PEERS = [*STEP_MAKERS, *SCRIPTS]


class PeerProcess:
    """A separate process that runs the steps of a peer (benchmarks/step_server.py)."""

    def __init__(self, name: str, shape: dict):
        self.name, self.log = name, tempfile.TemporaryFile('w+')  # noqa: SIM115
        command = [*make_command(name), json.dumps(shape)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self.log, text=True)
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


def make_command(name: str) -> list[str]:
    """Return the command of the process of a peer, without its shape."""
    if name in STEP_MAKERS:
        return [sys.executable, __file__, f'--serve={name}']
    return [str(find_python(name)), str(Path(__file__).with_name(SCRIPTS[name]))]


def find_python(name: str) -> Path:
    """Return the interpreter of the environment of a peer, which need not be there."""
    return ROOT / 'build' / 'peers' / name.lower() / 'bin' / 'python'


def read_versions(name: str) -> str:
    """Return the versions of PACKAGES in the environment of a peer."""
    code = 'import sys; from importlib.metadata import version; print({name: version(name) for name in sys.argv[1:]})'
    return subprocess.check_output([find_python(name), '-c', code, *PACKAGES[name]], text=True).strip()


def choose_peers(names: str) -> list[str]:
    """Return the peers of --peers, without those that are not installed."""
    peers = [name for name in PEERS if name != 'whole batch']
    if names != 'all':
        peers = ['ours', *(name for name in names.split(',') if name != 'ours')]
    if unknown := [name for name in peers if name not in PEERS]:
        sys.exit(f'--peers: {unknown[0]} is unknown; give some of {", ".join(PEERS)}')
    missing = [name for name in peers if not is_installed(name)]
    for name in missing:
        print(f'{name} is not installed; run: make .venv/test peers')
    if missing and names != 'all':
        sys.exit(1)
    return [name for name in peers if name not in missing]


def is_installed(name: str) -> bool:
    if name in SCRIPTS:
        return find_python(name).exists()
    return name in ('ours', 'whole batch', 'plain JAX') or importlib.util.find_spec('torch') is not None


def make_shape(args: argparse.Namespace) -> dict:
    """Return the model and the batch, as JSON values."""
    model: ModelConfig = parse_config(default.get_config(size=args.size).to_dict()).model
    names = 'layers', 'heads', 'width', 'head_width', 'ffn_width', 'vocabulary'
    return {name: getattr(args, name) or getattr(model, name) for name in names} | dict(
        batch=args.batch,
        length=args.length,
        dtype=args.dtype,
        threads=args.cores,
        is_forward=args.forward,
        data=args.data
        or max(count for count in range(1, args.cores + 1) if (args.micro_batch or args.batch) % count == 0),
        micro_batch=args.micro_batch,
        remat=args.remat,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--peers', default='all', metavar='NAME,...', help=f'some of {", ".join(PEERS)}')
    parser.add_argument('--size', default='quickstart', choices=SIZES, help='the model')
    for name in ('layers', 'heads', 'width', 'head_width', 'ffn_width', 'vocabulary'):
        parser.add_argument(f'--{name}', type=parse_count, metavar='N', help='instead of that of --size')
    parser.add_argument('--dtype', default='float32', choices=('float32', 'bfloat16'))
    parser.add_argument('--batch', type=parse_count, default=32)
    parser.add_argument('--length', type=parse_count, default=64)
    parser.add_argument('--forward', action='store_true', help='time the forward pass and the loss alone')
    parser.add_argument(
        '--cores', type=parse_count, default=len(os.sched_getaffinity(0)), help='threads of each peer'
    )
    parser.add_argument(
        '--data',
        type=parse_count,
        metavar='N',
        help='devices of ours and MaxText; by default as many cores as divide batch and micro-batch',
    )
    parser.add_argument(
        '--remat', type=parse_remat, default='default', metavar='WHAT', help='of ours, as of sinklab train'
    )
    parser.add_argument('--micro_batch', type=parse_count, metavar='N', help='of ours, PyTorch and litgpt')
    parser.add_argument('--rounds', type=parse_count, default=20)
    parser.add_argument('--steps', type=parse_count, default=4, help='of each in a round')
    args = parser.parse_args()
    if args.data and args.batch % args.data:
        parser.error(f'--batch={args.batch} is not a multiple of --data={args.data}; change one of them')
    if args.micro_batch and (args.batch % args.micro_batch or args.micro_batch % (args.data or 1)):
        parser.error(
            f'--micro_batch={args.micro_batch} must divide --batch={args.batch} and be a multiple of '
            f'--data={args.data or 1}'
        )
    if args.forward and (args.micro_batch or 'whole batch' in args.peers.split(',')):
        parser.error('--forward computes the whole batch; remove --micro_batch and the peer `whole batch`')
    return args


def compare_peers(args: argparse.Namespace) -> None:
    shape = make_shape(args)
    processes = {name: PeerProcess(name, shape) for name in choose_peers(args.peers)}
    rounds = [[process.time_steps(args.steps) for process in processes.values()] for _ in range(args.rounds)]
    columns = dict(zip(processes, zip(*rounds, strict=True), strict=True))
    print(describe_machine())
    print(json.dumps(get_package_versions(('jax', 'jaxlib', 'torch'))), json.dumps(shape))
    for name in processes:
        if name in SCRIPTS:
            print(name, read_versions(name))
    for name, column in columns.items():
        print(f'{name}, ms a step: {format_spread(column, ".1f")}')
    for name in [*columns][1:]:
        ratios = [other_ms / sinklab_ms for other_ms, sinklab_ms in zip(columns[name], columns['ours'], strict=True)]
        print(f'{name} over ours: {format_spread(ratios)}')


def main() -> None:
    if sys.argv[1:2] and sys.argv[1].startswith('--serve='):
        step_server.serve(STEP_MAKERS[sys.argv[1].removeprefix('--serve=')])
    else:
        compare_peers(parse_arguments())


if __name__ == '__main__':
    main()
