"""What fits on a device: what a run can keep for its backward pass, and what is said where nothing does."""

import contextlib
import dataclasses
import re
from collections.abc import Iterator

import jax

from sinklab import chips, devices, sharding
from sinklab.record import Refusal
from sinklab.spec import Hardware, Spec, names_kept
from sinklab.train.memory import Held, held

# From what computes nothing again to what computes everything again.
CHOICES = ('none', 'attention,qkv,middle,ffn', 'attention,qkv,middle', 'attention,qkv', 'attention', 'full')
USABLE = 0.9  # of a device's memory: the rest is for what the compiler does not share
GIB = 2**30
MISSING = (
    r'Used \S+ of \S+ hbm\. Exceeded hbm capacity by \S*\w',
    r'memory required for HLO temporaries \(\S+\) exceeds available HBM \(\S+\)',
    r'allocat\w+ [\d.]+ ?\w*',
)
MEMORY = r'memory|alloc|reserve|\bhbm\b'  # in what XLA says when it is memory that is exhausted


def chosen(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, backend: str, memory: float) -> str:
    """What is computed again; where that is auto, as few products as fit. Raises Refusal where nothing does.

    What lies between products is always made again: compilers estimate that to be quicker than to write and read it.
    """
    if hardware.remat != 'auto':
        return hardware.remat
    for remat in CHOICES[1:]:
        needed = held(spec, dataclasses.replace(hardware, remat=remat), mesh, backend)
        if needed.total <= USABLE * memory:
            return remat
    raise Refusal(
        f'{needed.total / GIB:.1f} GiB of {memory / GIB:.1f} are needed on a device even if everything is computed '
        f'again ({gibibytes(needed)}); {mends([*enough(spec, hardware, mesh, backend, memory), "more devices"])}'
    )


def enough(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, backend: str, memory: float) -> list[str]:
    """The most sequences at once that fit if everything is computed again."""
    while given := smaller(spec, hardware, mesh):
        hardware = dataclasses.replace(hardware, remat='full', micro_batch=int(given[0].partition('=')[2]))
        if held(spec, hardware, mesh, backend).total <= USABLE * memory:
            return given
    return []


@contextlib.contextmanager
def fitting(program: str, where: tuple) -> Iterator[None]:
    """Says in words, of (spec, hardware, mesh, backend), that a program does not fit on a device; nothing is lost."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        raise refusal(program, where, error) from error


@contextlib.contextmanager
def refusing_out_of_memory(where: tuple) -> Iterator[None]:
    """Refuse, wherever a run notices it, that a device has no memory left.

    Programs are dispatched asynchronously: what fails on a device is raised by what waits for its results first, such
    as `jax.device_get` or a save, and not by the call of the program, which `fitting` covers. Starting the same
    command again would not help. RESOURCE_EXHAUSTED alone is not enough here: messages between processes can fail
    with it too, and there another start can help.

    Args:
        where: (spec, hardware, mesh, backend), to say what would need less.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error) or not re.search(MEMORY, str(error), re.IGNORECASE):
            raise
        raise refusal('the run', where, error) from error


def refusal(program: str, where: tuple, error: Exception) -> Refusal:
    return Refusal(f'{program} does not fit on a device ({missing(str(error))}); {mend(*where)}')


def missing(said: str) -> str:
    """How many bytes, as compilers and allocators say it."""
    found = next(filter(None, (re.search(pattern, said) for pattern in MISSING)), None)
    return found[0] if found else ' '.join(said.split())[:120]


def mend(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, backend: str) -> str:
    """What would need less."""
    all_kept = hardware.remat == 'none'
    less = (one for one in CHOICES[1:] if all_kept or names_kept(one) < names_kept(hardware.remat))
    ways = [f'--remat={remat}' for remat in [*less][:1]]
    said = mends([*ways, *smaller(spec, hardware, mesh), 'more devices'])
    return f'by shapes it has GiB of {gibibytes(held(spec, hardware, mesh, backend))}; {said}'


def smaller(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh) -> list[str]:
    """Half of the sequences at once, where that can be."""
    batch = spec.optimizer.batch_size
    micro = hardware.sequences(batch) // 2
    return [f'--micro_batch={micro}'] if micro and batch % micro == 0 == micro % sharding.ways(mesh) else []


def mends(ways: list[str]) -> str:
    return 'give ' + ' or '.join(ways)


def gibibytes(on: Held) -> str:
    return ', '.join(f'{name} {size / GIB:.2f}' for name, size in dataclasses.asdict(on).items())


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
