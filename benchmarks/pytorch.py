"""A training step of ours beside one of PyTorch, on this machine's cores, in turn, each in a process of its own.

    python benchmarks/pytorch.py [--size=quickstart] [--batch=32] [--length=64] [--rounds=20]

The same model, batch, clipping and optimizer, float32: ours as `sinklab train --data=N --remat=NAMES` runs it, with a
device for each core unless told otherwise; PyTorch eager, with its fused AdamW and scaled_dot_product_attention; and
plain JAX, as one writes it first (benchmarks/plain.py), on one device. A round takes so many steps of each, while the
others wait. Of malloc, PyTorch and plain JAX have what the system has, ours what `sinklab train` has, large pages
(sinklab/cli/malloc.py); with GLIBC_TUNABLES=glibc.malloc.hugetlb=1, or =0, all three have the same.
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

import jax
import numpy as np
import plain
import torch
from torch.nn import functional

from configs import default
from configs.sizes import SIZES
from sinklab import devices, sharding
from sinklab.cli import malloc
from sinklab.parse import parse
from sinklab.spec import Hardware, Model, Spec
from sinklab.train import state, step
from sinklab.train.environment import versions

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16}


def ours(spec: Spec, given: argparse.Namespace, ids_BT: np.ndarray) -> Callable[[], float]:
    """A step, which returns its loss."""
    hardware = Hardware(data=given.data or given.cores, fsdp=1, remat=given.remat)
    devices.divide_cpu(hardware)
    mesh = devices.mesh(hardware)
    with jax.set_mesh(mesh):
        now, batch = state.create(spec, mesh), sharding.put(ids_BT, mesh)
        nothing = sharding.of_each_device(0, mesh)
        advance = step.train_step(spec, hardware, mesh).lower(now, batch, nothing).compile()

    def one() -> float:
        nonlocal now
        now, numbers = advance(now, batch, nothing)
        return float(numbers['train/loss'])

    return one


def plainly(spec: Spec, given: argparse.Namespace, ids_BT: np.ndarray) -> Callable[[], float]:
    now, advance = plain.training(spec, 'none')

    def one() -> float:
        nonlocal now
        now, loss = advance(now, ids_BT)
        return float(loss)

    return one


class Block(torch.nn.Module):
    """As it is usually written: one product for queries, keys and values, one for gate and input of the FFN."""

    def __init__(self, model: Model):
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
        query, key = (rotated(array, cos, sin) for array in (query, key))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTD = x_BTD + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_and_in(self.norm_2(x_BTD)).chunk(2, -1)
        return x_BTD + self.down(functional.silu(gate) * up)


class Decoder(torch.nn.Module):
    def __init__(self, model: Model):
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


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def eager(spec: Spec, given: argparse.Namespace, ids_BT: np.ndarray) -> Callable[[], float]:
    """bfloat16 is autocast, as PyTorch mixes precisions."""
    torch.manual_seed(0)
    torch.set_num_threads(given.cores)
    net, ids_BT = Decoder(spec.model), torch.from_numpy(ids_BT).long()
    optimizer = torch.optim.AdamW(net.parameters(), 4e-4, (0.9, 0.95), weight_decay=0.1, fused=True)
    mixed = spec.model.dtype != 'float32'

    def one() -> float:
        with torch.autocast('cpu', DTYPES[spec.model.dtype], enabled=mixed):
            logits = net(ids_BT[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), ids_BT[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return one


CONTESTANTS = {'ours': ours, 'PyTorch eager': eager, 'plain JAX': plainly}


def take_turns(name: str, given: argparse.Namespace) -> None:
    """Says the loss of a first step and, whenever it is told a number of steps, how many milliseconds one took."""
    config = default.get_config(size=given.size)
    config.model.dtype, config.data.length, config.optimizer.batch_size = given.dtype, given.length, given.batch
    spec = parse(config.to_dict())
    ids_BT = np.random.default_rng(0).integers(0, spec.model.vocabulary, (given.batch, given.length + 1), np.int32)
    one = CONTESTANTS[name](spec, given, ids_BT)
    print(one(), flush=True)
    for steps in map(int, sys.stdin):
        one()
        start = time.perf_counter()
        for _ in range(steps):
            one()
        print(1e3 * (time.perf_counter() - start) / steps, flush=True)


class Contestant:
    """One of CONTESTANTS in a process of its own."""

    def __init__(self, name: str):
        command = [sys.executable, *sys.argv, f'--only={name}']
        told = malloc.told() if name == 'ours' else {}
        self.process = subprocess.Popen(
            command, env=os.environ | told, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        print(f'{name}, loss of the first step: {self.told():.4f}')

    def told(self) -> float:
        line = self.process.stdout.readline()
        if not line:
            sys.exit(self.process.wait() or 1)
        return float(line)

    def timed(self, steps: int) -> float:
        print(steps, file=self.process.stdin, flush=True)
        return self.told()


def spread(values: list[float], digits: int = 1) -> str:
    return f'{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})'


def arguments() -> argparse.Namespace:
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
    parser.add_argument('--only', choices=CONTESTANTS, help=argparse.SUPPRESS)
    return parser.parse_args()


def compare(given: argparse.Namespace) -> None:
    contestants = {name: Contestant(name) for name in CONTESTANTS}
    rounds = [[one.timed(given.steps) for one in contestants.values()] for _ in range(given.rounds)]
    columns = dict(zip(contestants, zip(*rounds, strict=True), strict=True))
    print(f'{platform.processor() or platform.machine()}, {given.cores} cores, python {platform.python_version()}')
    print(json.dumps(versions(('jax', 'jaxlib', 'torch'))), json.dumps(vars(given)))
    for name, column in columns.items():
        print(f'{name}, ms a step: {spread(list(column))}')
    for name in ('PyTorch eager', 'plain JAX'):
        ratios = [theirs / own for theirs, own in zip(columns[name], columns['ours'], strict=True)]
        print(f'{name} over ours: {spread(ratios, 2)}')


def main() -> None:
    given = arguments()
    if given.only:
        take_turns(given.only, given)
    else:
        compare(given)


if __name__ == '__main__':
    main()
