"""What can compute attention, on which platforms, and what each of them lacks."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Protocol

import jax

from sinklab.attend import chunked, cudnn, dense, epilogue
from sinklab.attend.dense import Attended
from sinklab.attend.kernels.primitive import Kernels
from sinklab.attend.rule import Case, Rule
from sinklab.attend.similarity import SIMILARITIES

POWER = 4  # of masses that no maximum scales: those from 3e-10 on are then above float32's least


class Backend(Protocol):
    """A record below, or a module."""

    platform: str | None  # None: all

    def attend(self, query_BTHK, key_BSGK, value_BSGK, rule: Rule, measured: bool = False) -> Attended:
        """As dense.attend; the mass of rows is right only if it is to be `measured`."""

    def lacks(self, case: Case) -> str | None:
        """None, or what it cannot do."""


@dataclasses.dataclass(frozen=True)
class Everywhere:
    """Plain XLA, which can do everything."""

    of: Callable[..., Attended]
    platform = None

    def attend(self, query_BTHK, key_BSGK, value_BSGK, rule, measured=False):
        return self.of(query_BTHK, key_BSGK, value_BSGK, rule)

    def lacks(self, case):
        return None


@dataclasses.dataclass(frozen=True)
class ByKernels:
    """The two primitives of a platform's kernels, and what is made of them."""

    platform: str

    @property
    def kernels(self) -> Kernels:
        """Imported where they are used: Pallas takes a second."""
        return importlib.import_module(f'sinklab.attend.kernels.{self.platform}')

    def attend(self, query_BTHK, key_BSGK, value_BSGK, rule, measured=False):
        return epilogue.attend(self.kernels, query_BTHK, key_BSGK, value_BSGK, rule, measured)

    def lacks(self, case):
        operation, curve = case.rule.operation, case.rule.bias.curve
        if operation.similarity.shifted and operation.similarity is not SIMILARITIES['exp']:
            return f'{operation.name}: of what a maximum shifts, kernels know exp alone'
        if not operation.similarity.shifted and (operation.power or 0) > POWER:
            return f'powers of masses above {POWER}, of which whole rows may underflow'
        if curve is not None and not curve.elementwise:
            return 'a learned table of relative positions'
        shape = 1, case.heads, case.length
        query, value = (jax.ShapeDtypeStruct((*shape, width), case.dtype) for width in (case.width, case.value_width))
        scores = epilogue.problem(case.rule, case.width).scores
        return self.kernels.covers(epilogue.sums(operation), scores, query, query, value)


BACKENDS: dict[str, Backend] = {
    'dense': Everywhere(dense.attend),
    'chunked': Everywhere(chunked.attend),
    'tpu': ByKernels('tpu'),
    'gpu': ByKernels('gpu'),
    'cudnn': cudnn,
}
