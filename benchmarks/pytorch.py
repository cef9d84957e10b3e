"""Benchmark of a sinklab train step against PyTorch and plain JAX on CPU cores.

    python benchmarks/pytorch.py [--size=quickstart] [--batch=32] [--length=64] [--rounds=20]

Each framework runs in a separate process, with the same model, batch, clipping and optimizer, by default in float32:

- ours, as `sinklab train --data=N --remat=NAMES` runs it, by default with one device per core.
- PyTorch eager, with fused AdamW and scaled_dot_product_attention.
- torch.compile: the same, with forward pass, loss and backward pass compiled.
- plain JAX (benchmarks/jax_baseline.py), on one device.

In a round, each runs --steps steps while the others wait. GLIBC_TUNABLES=glibc.malloc.hugetlb=1 gives huge pages to
all three (docs/results/speed.md).
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import jax
import jax_baseline
import numpy as np
import torch
from torch.nn import functional

from sinklab.config.spec import Hardware, ModelConfig, Spec
from sinklab.config.validate import parse_config
from sinklab.configs import default
from sinklab.configs.sizes import SIZES
from sinklab.machine import describe_machine
from sinklab.parallel import device_mesh, sharding
from sinklab.train import state, step
from sinklab.train.setup import get_package_versions

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16}


def make_sinklab_step(spec: Spec, args: argparse.Namespace, ids_BT: np.ndarray) -> Callable[[], float]:
    """Return a function that runs one step and returns its loss."""
    hardware = Hardware(data=args.data or args.cores, fsdp=1, remat=args.remat)
    device_mesh.split_cpu_devices(hardware)
    mesh = device_mesh.make_mesh(hardware)
    with jax.set_mesh(mesh):
        train_state, batch = state.create_state(spec, mesh), sharding.put_batch(ids_BT, mesh)
        no_request = sharding.make_per_device_array(0, mesh)
        compiled_step = step.make_train_step(spec, hardware, mesh).lower(train_state, batch, no_request).compile()

    def run_step() -> float:
        nonlocal train_state
        train_state, metrics = compiled_step(train_state, batch, no_request)
        return float(metrics['train/loss'])

    return run_step


def make_jax_step(spec: Spec, args: argparse.Namespace, ids_BT: np.ndarray) -> Callable[[], float]:
    train_state, train_step = jax_baseline.make_train_step(spec, 'none')

    def run_step() -> float:
        nonlocal train_state
        train_state, loss = train_step(train_state, ids_BT)
        return float(loss)

    return run_step


class Block(torch.nn.Module):
    """Transformer block with one product for queries, keys and values, and one for both FFN inputs."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        inner = model.heads * model.head_width
        self.shape = 3, model.heads, model.head_width
        self.norm_1, self.norm_2 = (torch.nn.RMSNorm(model.width, model.norm_epsilon) for _ in range(2))
        self.qkv = torch.nn.Linear(model.width, 3 * inner, bias=False)
        self.out = torch.nn.Linear(inner, model.width, bias=False)
        self.gate_and_in = torch.nn.Linear(model.width, 2 * model.ffn_width, bias=False)
        self.down = torch.nn.Linear(model.ffn_width, model.width, bias=False)

    def forward(self, x_BTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm_1(x_BTD)).unflatten(-1, self.shape).permute(2, 0, 3, 1, 4)
        query, key = (apply_rotary(array, cos, sin) for array in (query, key))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTD = x_BTD + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_and_in(self.norm_2(x_BTD)).chunk(2, -1)
        return x_BTD + self.down(functional.silu(gate) * up)


class Decoder(torch.nn.Module):
    def __init__(self, model: ModelConfig):
        super().__init__()
        self.half = model.head_width // 2
        self.embedding = torch.nn.Embedding(model.vocabulary, model.width)
        self.blocks = torch.nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm = torch.nn.RMSNorm(model.width, model.norm_epsilon)
        self.head = torch.nn.Linear(model.width, model.vocabulary, bias=False)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embedding(ids_BT)
        frequency = 1e4 ** (-torch.arange(self.half) / self.half)
        angle = torch.arange(ids_BT.shape[1])[:, None] * frequency
        cos, sin = angle.cos().to(x_BTD.dtype), angle.sin().to(x_BTD.dtype)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos, sin)
        return self.head(self.norm(x_BTD))


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def make_pytorch_step(
    spec: Spec, args: argparse.Namespace, ids_BT: np.ndarray, is_compiled: bool = False
) -> Callable[[], float]:
    """Return a function that runs one step and returns its loss; bfloat16 uses autocast."""
    torch.manual_seed(0)
    torch.set_num_threads(args.cores)
    model, ids_BT = Decoder(spec.model), torch.from_numpy(ids_BT).long()
    optimizer = torch.optim.AdamW(model.parameters(), 4e-4, (0.9, 0.95), weight_decay=0.1, fused=True)
    is_mixed = spec.model.dtype != 'float32'

    def compute_loss() -> torch.Tensor:
        with torch.autocast('cpu', DTYPES[spec.model.dtype], enabled=is_mixed):
            logits = model(ids_BT[:, :-1])
        return functional.cross_entropy(logits.float().flatten(0, 1), ids_BT[:, 1:].flatten())

    if is_compiled:
        compute_loss = torch.compile(compute_loss)

    def run_step() -> float:
        loss = compute_loss()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return run_step


STEP_MAKERS = {
    'ours': make_sinklab_step,
    'PyTorch eager': make_pytorch_step,
    'torch.compile': functools.partial(make_pytorch_step, is_compiled=True),
    'plain JAX': make_jax_step,
}


def serve_steps(name: str, args: argparse.Namespace) -> None:
    """Print the loss of a first step; then print milliseconds per step for each number of steps on stdin."""
    config = default.get_config(size=args.size)
    config.model.dtype, config.data.length, config.optimizer.batch_size = args.dtype, args.length, args.batch
    spec = parse_config(config.to_dict())
    ids_BT = np.random.default_rng(0).integers(0, spec.model.vocabulary, (args.batch, args.length + 1), np.int32)
    run_step = STEP_MAKERS[name](spec, args, ids_BT)
    print(run_step(), flush=True)
    for steps in map(int, sys.stdin):
        run_step()
        start = time.perf_counter()
        for _ in range(steps):
            run_step()
        print(1e3 * (time.perf_counter() - start) / steps, flush=True)


class StepProcess:
    """A separate process that runs the steps of one of STEP_MAKERS."""

    def __init__(self, name: str):
        command = [sys.executable, *sys.argv, f'--only={name}']
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        print(f'{name}, loss of the first step: {self.read_number():.4f}')

    def read_number(self) -> float:
        line = self.process.stdout.readline()
        if not line:
            sys.exit(self.process.wait() or 1)
        return float(line)

    def time_steps(self, steps: int) -> float:
        print(steps, file=self.process.stdin, flush=True)
        return self.read_number()


def format_spread(values: list[float], digits: int = 1) -> str:
    return f'{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})'


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--size', default='quickstart', choices=SIZES)
    parser.add_argument('--dtype', default='float32', choices=DTYPES)
    parser.add_argument('--batch', type=int, default=32)
    parser.add_argument('--length', type=int, default=64)
    parser.add_argument('--cores', type=int, default=len(os.sched_getaffinity(0)), help='threads of PyTorch')
    parser.add_argument('--data', type=int, help='devices of ours; as many as cores')
    parser.add_argument('--remat', default='attention,ffn')
    parser.add_argument('--rounds', type=int, default=20)
    parser.add_argument('--steps', type=int, default=4, help='of each in a round')
    parser.add_argument('--only', choices=STEP_MAKERS, help=argparse.SUPPRESS)
    return parser.parse_args()


def compare_frameworks(args: argparse.Namespace) -> None:
    processes = {name: StepProcess(name) for name in STEP_MAKERS}
    rounds = [[process.time_steps(args.steps) for process in processes.values()] for _ in range(args.rounds)]
    columns = dict(zip(processes, zip(*rounds, strict=True), strict=True))
    print(describe_machine())
    print(json.dumps(get_package_versions(('jax', 'jaxlib', 'torch'))), json.dumps(vars(args)))
    for name, column in columns.items():
        print(f'{name}, ms a step: {format_spread(list(column))}')
    for name in [*columns][1:]:
        ratios = [other_ms / sinklab_ms for other_ms, sinklab_ms in zip(columns[name], columns['ours'], strict=True)]
        print(f'{name} over ours: {format_spread(ratios, 2)}')


def main() -> None:
    args = parse_arguments()
    if args.only:
        serve_steps(args.only, args)
    else:
        compare_frameworks(args)


if __name__ == '__main__':
    main()
