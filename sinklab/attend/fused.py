"""Attention without its matrix, by a backend that is chosen once, on the host, and never replaced unsaid."""

import dataclasses
import functools
import importlib
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from sinklab import spec
from sinklab.attend import chunked, cudnn, dense, epilogue
from sinklab.attend import mask as masks
from sinklab.attend.bias import Bias, Curve
from sinklab.attend.mask import Mask
from sinklab.attend.normalizer import NORMALIZERS
from sinklab.attend.primitive import Scores
from sinklab.attend.similarity import SIMILARITIES
from sinklab.record import Refusal

ACCURACY = 2e-2  # of the largest entry, in bfloat16, for a kernel to be trusted
POWER = 4  # of masses that no maximum scales: those from 3e-10 on are then above float32's least
SHOWN = 4096  # a length at which every kernel has several blocks, interior ones too


@dataclasses.dataclass(frozen=True)
class Case:
    """What a backend is asked for: everything that decides whether it can."""

    attention: spec.Attention
    length: int
    heads: int
    width: int
    value_width: int
    dtype: str
    columns: int = 0
    curve: bool = False  # whether positions add to scores
    elementwise: bool = True  # and a kernel can compute that
    mask: str = 'causal'  # names of MASKS, joined by ' and '


def whole(query_BTHK, key_BSGK, value_BSGK, attention, mask, columns, bias, measured):
    bias_BHTS = bias.matrix(bias.query_BT, columns, 0, key_BSGK.shape[1] - columns)
    visible_BTS = mask.visible(key_BSGK.shape[1] - columns)
    output, _, rows = dense.attended(query_BTHK, key_BSGK, value_BSGK, attention, visible_BTS, columns, bias_BHTS)
    return output, jax.lax.stop_gradient(rows)


def in_chunks(query_BTHK, key_BSGK, value_BSGK, attention, mask, columns, bias, measured):
    return chunked.attend(query_BTHK, key_BSGK, value_BSGK, attention, mask, columns, bias)


def kernels(name: str):
    """The module of a platform's kernels, imported where it is used: Pallas takes a second."""
    return importlib.import_module(f'sinklab.attend.{name}')


def by_kernels(name: str) -> Callable:
    return lambda *given: epilogue.attend(kernels(name), *given)


def anything(case: Case) -> None:
    return None


def by_kernels_if(name: str, case: Case) -> str | None:
    """None, or what the kernels of a platform cannot do."""
    similarity = SIMILARITIES[case.attention.similarity]
    if similarity.shifted and similarity is not SIMILARITIES['exp']:
        return f'{case.attention.similarity}: of what a maximum shifts, kernels know exp alone'
    if not similarity.shifted and (case.attention.power or 0) > POWER:
        return f'powers of masses above {POWER}, of which whole rows may underflow'
    if not case.elementwise:
        return 'a learned table of relative positions'
    array = lambda width: jax.ShapeDtypeStruct((1, case.heads, case.length, width), case.dtype)  # noqa: E731
    scores = Scores(case.width**-0.5, 0.0, (lambda parameters, distance: distance) if case.curve else None)
    normalizer = NORMALIZERS[case.attention.normalizer]
    weigh = None
    if not similarity.shifted:
        weigh = epilogue.weigher(similarity, case.attention.power, normalizer.uses_total, False)
    return kernels(name).covers(scores, weigh, array(case.width), array(case.width), array(case.value_width))


@dataclasses.dataclass(frozen=True)
class Backend:
    """attend(query, key, value, attention, mask, columns, bias, measured) -> (output, Rows), on some platforms."""

    attend: Callable
    lacks: Callable[[Case], str | None]
    platform: str | None = None  # None: all


BACKENDS = {
    'dense': Backend(whole, anything),
    'chunked': Backend(in_chunks, anything),
    'tpu': Backend(by_kernels('tpu'), functools.partial(by_kernels_if, 'tpu'), 'tpu'),
    'gpu': Backend(by_kernels('gpu'), functools.partial(by_kernels_if, 'gpu'), 'gpu'),
    'cudnn': Backend(cudnn.attend, cudnn.lacks, 'gpu'),
}
PREFERRED = {'tpu': ('tpu', 'chunked'), 'gpu': ('cudnn', 'gpu', 'chunked')}  # by platform; elsewhere chunked


def attend(
    backend: str,
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    value_BSGK: jax.Array,
    attention: spec.Attention,
    mask: Mask,
    columns: int = 0,
    bias: Bias = Bias(),  # noqa: B008
    measured: bool = False,
) -> tuple[jax.Array, dense.Rows]:
    """(output_BTHK, Rows) as dense.attend has it; the mass of rows is right only if it is to be `measured`."""
    run = BACKENDS[backend].attend
    return run(query_BTHK, key_BSGK, value_BSGK, attention, mask, columns, bias, measured)


@dataclasses.dataclass(frozen=True)
class Choice:
    """A backend, and why those that would have come first were not taken."""

    backend: str
    passed: dict[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return self.backend + ''.join(f' (not {name}: {reason})' for name, reason in self.passed.items())


def choose(wanted: str, platform: str, case: Case) -> Choice:
    """`wanted` or, for auto, the first of the platform's backends that can and is right; raises Refusal."""
    passed = {}
    for name in PREFERRED.get(platform, ('chunked',)) if wanted == 'auto' else (wanted,):
        reason = lacks(name, platform, case)
        if reason is None:
            return Choice(name, passed)
        passed[name] = reason
    others = ', '.join(name for name in BACKENDS if name not in passed and cannot(name, platform, case) is None)
    raise Refusal(f'--attention={wanted} is not to be had: {passed[wanted]}; here are auto, {others}')


def lacks(name: str, platform: str, case: Case) -> str | None:
    """None, or why a backend is not to be used; what is for one platform alone shows there that it is right."""
    reason = cannot(name, platform, case)
    if reason or BACKENDS[name].platform is None:
        return reason
    try:
        found = error(name, dataclasses.replace(case, length=min(case.length, SHOWN), heads=2))
    except Exception as failure:  # a compiler that gives up is a reason as good as any
        return f'it fails on these devices ({type(failure).__name__}: {str(failure).splitlines()[0]})'
    return None if found <= ACCURACY else f'wrong on these devices by {found:.1e} of the largest entry'


def cannot(name: str, platform: str, case: Case) -> str | None:
    """None, or why a backend is not for a platform or a case."""
    backend = BACKENDS[name]
    if backend.platform not in (None, platform):
        return f'it is for {backend.platform}, and the devices here are {platform}'
    return backend.lacks(case)


def error(name: str, case: Case) -> float:
    """How far a backend is from the definition in float32, forward and backward, in units of the largest entry."""
    rng = np.random.default_rng(0)
    keys, heads = case.columns + case.length, case.heads
    shapes = (case.length, case.width), (keys, case.width), (keys, case.value_width)
    drawn = (rng.uniform(size=(1, n, heads, width)) - (at == 2) / 2 for at, (n, width) in enumerate(shapes))
    arrays = [jnp.asarray(array, case.dtype) for array in drawn]
    cotangent = jnp.asarray(rng.normal(size=(1, case.length, heads, case.value_width)), jnp.float32)
    mask, bias = (
        functools.reduce(operator.and_, [MASKS[part](case.length) for part in case.mask.split(' and ')]),
        Bias(),
    )
    if case.curve:
        place_BT = np.arange(case.length)[None]
        curve = Curve(lambda _, distance: -distance / 64, np.zeros((1, 0)))
        bias = Bias(curve, place_BT, np.pad(place_BT, ((0, 0), (case.columns, 0))))

    def total(arrays, backend):
        output, rows = attend(backend, *arrays, case.attention, mask, case.columns, bias, measured=True)
        return jnp.sum(cotangent * output.astype(jnp.float32)), (output, rows.mass_BHT)

    run = jax.jit(jax.grad(total, has_aux=True), static_argnums=1)
    with jax.default_matmul_precision('highest'):
        right = run([array.astype(jnp.float32) for array in arrays], 'dense')
    far = jax.tree.map(
        lambda x, y: float(jnp.abs(x - y).max() / jnp.maximum(jnp.abs(x).max(), 1e-9)), right, run(arrays, name)
    )
    worst = max(jax.tree.leaves(far))
    return worst if np.isfinite(worst) else float('inf')


def documents(length: int) -> Mask:
    starts_T = np.maximum.accumulate(np.where(np.arange(length) % (length // 3 + 1) == 0, np.arange(length), 0))
    return masks.causal(length) & masks.document(jnp.asarray(starts_T[None]))


MASKS = {  # examples, by the names that a Case has for them
    'causal': masks.causal,
    'prefix': lambda length: masks.prefix(length, length // 3),
    'window': lambda length: masks.causal(length) & masks.window(length, -(-length // 3)),
    'block': lambda length: masks.causal(length) & masks.block(length, -(-length // 3)),
    'document': documents,
}
