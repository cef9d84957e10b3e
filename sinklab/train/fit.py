"""What a device has to hold, by shapes and without compiling, and what it can keep for the backward pass."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from sinklab import chips, devices, sharding
from sinklab.record import Refusal
from sinklab.spec import Hardware, Spec
from sinklab.train import loss, state
from sinklab.train.evaluation import most_sequences
from sinklab.train.forward import forward

# From what computes nothing again to what computes everything again.
CHOICES = ('none', 'attention,qkv,middle,ffn', 'attention,qkv,middle', 'attention,qkv', 'attention', 'full')
USABLE = 0.9  # of a device's memory: the rest is for what the compiler does not share
GIB = 2**30
MISSING = (
    r'Used \S+ of \S+ hbm\. Exceeded hbm capacity by \S*\w',
    r'memory required for HLO temporaries \(\S+\) exceeds available HBM \(\S+\)',
    r'allocat\w+ [\d.]+ ?\w*',
)


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes on a device."""

    parameters: int
    moments: int
    activations: int  # of a micro-batch, between its forward and backward pass
    tables: int  # embedding and head where they are whole, their gradients, and logits

    @property
    def total(self) -> int:
        """With a gradient of the parameters' size."""
        return 2 * self.parameters + self.moments + self.activations + self.tables


def held(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, backend: str) -> Held:
    abstract = state.abstract(spec, mesh)
    return Held(
        parameters=parts(abstract['params']),
        moments=parts(abstract['opt_state']),
        activations=kept(spec, hardware, mesh, backend),
        tables=tables(spec, mesh),
    )


def parts(tree: dict) -> int:
    """Bytes of what one device has of a tree."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def kept(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, backend: str) -> int:
    """What the layers keep of their sequences, by what two on each device make more than one."""
    ways = sharding.ways(mesh)
    one, two = (state.size(backward(spec, hardware.remat, backend, rows)) for rows in (ways, 2 * ways))
    return most_sequences(spec, hardware) // ways * (two - one) // ways // mesh.shape['tensor']


def backward(spec: Spec, remat: str, backend: str, rows: int) -> Any:
    """The backward pass of so many sequences through the layers, with all that it reads, as shapes."""
    run, params = forward(spec, remat=remat, backend=backend), state.shapes(spec)['params']
    ids = jax.ShapeDtypeStruct((rows, spec.data.length), jnp.int32)
    return jax.eval_shape(lambda params, ids: jax.vjp(lambda params: run(params, ids)[0], params)[1], params, ids)


def tables(spec: Spec, mesh: jax.sharding.Mesh) -> int:
    model, item = spec.model, jnp.dtype(spec.model.dtype).itemsize
    rows = loss.chunk_rows(model.width) * mesh.shape['tensor']
    return model.vocabulary * ((item + 8) * model.width + (item + 8) * rows) // mesh.shape['tensor']


def chosen(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, backend: str, memory: float) -> str:
    """What is computed again; where that is auto, as few products as fit. Raises Refusal where nothing does.

    What lies between products is always made again: compilers estimate that to be quicker than to write and read it.
    """
    if hardware.remat != 'auto':
        return hardware.remat
    for remat in CHOICES[1:]:
        needed = held(spec, dataclasses.replace(hardware, remat=remat), mesh, backend).total
        if needed <= USABLE * memory:
            return remat
    raise Refusal(
        f'{needed / GIB:.1f} GiB of {memory / GIB:.1f} are needed on a device even if everything is computed again; '
        'give --micro_batch, or more devices'
    )


@contextlib.contextmanager
def fitting(program: str, where: tuple) -> Iterator[None]:
    """Says in words, of (spec, hardware, mesh, backend), that a program does not fit on a device; nothing is lost."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        raise Refusal(f'{program} does not fit on a device ({missing(str(error))}); {mend(*where)}') from error


def missing(said: str) -> str:
    """How many bytes, as compilers and allocators say it."""
    found = next(filter(None, (re.search(pattern, said) for pattern in MISSING)), None)
    return found[0] if found else ' '.join(said.split())[:120]


def mend(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, backend: str) -> str:
    """What would need less."""
    on, given = held(spec, hardware, mesh, backend), CHOICES
    less = given[given.index(hardware.remat) + 1 :] if hardware.remat in given else ()
    micro = most_sequences(spec, hardware) // 2
    ways = [f'--remat={less[0]}'] if less else []
    ways += [f'--micro_batch={micro}'] if micro and micro % sharding.ways(mesh) == 0 else []
    bytes = ', '.join(f'{name} {getattr(on, name) / GIB:.2f}' for name in ('parameters', 'moments', 'activations'))
    mends = ' or '.join([*ways, 'more devices'])
    return f'by shapes it has GiB of {bytes}, tables {on.tables / GIB:.2f}; give {mends}'


def peak(mesh: jax.sharding.Mesh) -> float | None:
    """Operations a second of all devices together, where that is published."""
    one = chips.peak_of(mesh.devices.flat[0].device_kind)
    return one and one * mesh.size


def told(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, backend: str) -> list[str]:
    """How a run lies on its devices, in a line for people; of a single one of a kind that is not known, nothing."""
    if mesh.size == 1 and not peak(mesh):
        return []
    crossing = devices.crossings(mesh)
    axes = ', '.join(f'{axis} {size} across {crossing[axis]}' for axis, size in mesh.shape.items() if size > 1)
    on = held(spec, hardware, mesh, backend)
    bytes = (f'{getattr(on, name) / 1e9:.3g} GB of {name}' for name in ('parameters', 'moments', 'activations'))
    return [f'{mesh.size} devices ({axes or "one alone"}), each with {", ".join(bytes)}; remat {hardware.remat}']
