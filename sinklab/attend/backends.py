"""What can compute attention, on which platforms, and what each of them lacks."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Protocol

import jax

from sinklab.attend import chunked, cudnn, dense, epilogue
from sinklab.attend.dense import AttentionOutput
from sinklab.attend.kernels.primitive import Kernels
from sinklab.attend.rule import AttentionProblem, AttentionSpec
from sinklab.attend.similarity import SIMILARITIES

MAX_KERNEL_POWER = 4  # of masses that no maximum scales: those from 3e-10 on are then above float32's least


class AttentionBackend(Protocol):
    """A record below, or a module."""

    platform: str | None  # None: all

    def attend(self, query_BTHK, key_BSGK, value_BSGK, spec: AttentionSpec, needs_mass: bool = False) -> AttentionOutput:
        """As dense.attend; the mass of rows is right only if it is to be `measured`."""

    def explain_unsupported(self, problem: AttentionProblem) -> str | None:
        """None, or what it cannot do."""


@dataclasses.dataclass(frozen=True)
class XLABackend:
    """Plain XLA, which can do everything."""

    function: Callable[..., AttentionOutput]
    platform = None

    def attend(self, query_BTHK, key_BSGK, value_BSGK, spec, needs_mass=False):
        return self.function(query_BTHK, key_BSGK, value_BSGK, spec)

    def explain_unsupported(self, problem):
        return None


@dataclasses.dataclass(frozen=True)
class PallasBackend:
    """The two primitives of a platform's kernels, and what is made of them."""

    platform: str

    @property
    def kernels(self) -> Kernels:
        """Imported where they are used: Pallas takes a second."""
        return importlib.import_module(f'sinklab.attend.kernels.{self.platform}')

    def attend(self, query_BTHK, key_BSGK, value_BSGK, spec, needs_mass=False):
        return epilogue.attend(self.kernels, query_BTHK, key_BSGK, value_BSGK, spec, needs_mass)

    def explain_unsupported(self, problem):
        operation, relative = problem.rule.operation, problem.rule.bias.curve
        if operation.similarity.shifted and operation.similarity is not SIMILARITIES['exp']:
            return f'{operation.name}: of what a maximum shifts, kernels know exp alone'
        if not operation.similarity.shifted and (operation.power or 0) > MAX_KERNEL_POWER:
            return f'powers of masses above {MAX_KERNEL_POWER}, of which whole rows may underflow'
        if relative is not None and not relative.elementwise:
            return 'a learned table of relative positions'
        shape = 1, problem.heads, problem.length
        query, value = (jax.ShapeDtypeStruct((*shape, width), problem.dtype) for width in (problem.width, problem.value_width))
        score_spec = epilogue.make_kernel_spec(problem.rule, problem.width).score_spec
        return self.kernels.explain_unsupported(epilogue.choose_reduction(operation), score_spec, query, query, value)


BACKENDS: dict[str, AttentionBackend] = {
    'dense': XLABackend(dense.attend),
    'chunked': XLABackend(chunked.attend),
    'tpu': PallasBackend('tpu'),
    'gpu': PallasBackend('gpu'),
    'cudnn': cudnn,
}
