"""Process group of a run: gathering of JSON values, broadcasts and errors raised on all processes."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from sinklab.schema import UserError

T = TypeVar('T')


class ProcessGroup(Protocol):
    """All processes of a run, as one of them knows them. Values are what JSON has."""

    index: int
    count: int

    def gather(self, name: str, value: Any) -> list[Any]:
        """The values of all processes, by their numbers; waits until all have come to this name."""
        ...

    def report_progress(self, activity: str, step: int = 0, usual_seconds: float | None = None) -> None:
        """Tells who waits where this process is, and how many seconds that usually takes; None: nobody knows."""
        ...


class SingleProcessGroup:
    """The group of a single process."""

    index, count = 0, 1

    def gather(self, name: str, value: Any) -> list[Any]:
        return [value]

    def report_progress(self, activity: str, step: int = 0, usual_seconds: float | None = None) -> None:
        pass


def gather_or_raise(group: ProcessGroup, name: str, function: Callable[[], Any]) -> list[Any]:
    """What a function returns on each process, as JSON has it; what one of them refuses, all refuse."""
    try:
        own_answer = dict(value=function(), refused=None)
    except UserError as error:
        own_answer = dict(value=None, refused=str(error))
    answers = group.gather(name, own_answer)
    raise_first_error([answer['refused'] for answer in answers])
    return [answer['value'] for answer in answers]


def run_on_all_or_raise(group: ProcessGroup, name: str, function: Callable[[], T]) -> T:
    """What a function returns on this process, be it what it may; what one of them refuses, all refuse."""
    results = []
    gather_or_raise(group, name, lambda: results.append(function()))
    return results[0]


def broadcast_from_primary(group: ProcessGroup, name: str, function: Callable[[], Any]) -> Any:
    """What a function returns on process 0, which alone calls it."""
    return gather_or_raise(group, name, function if group.index == 0 else lambda: None)[0]


def raise_first_error(errors: list[str | None]) -> None:
    """Refuses what any process has refused, in its words; of one that is not alone with it, the first's."""
    index, message = next(((index, message) for index, message in enumerate(errors) if message), (0, None))
    if message:
        raise UserError(message if set(errors) == {message} else f'process {index}: {message}')


def check_equal_on_all(group: ProcessGroup, name: str, values: dict[str, Any]) -> None:
    """Refuses what differs from process to process."""
    if mismatch := describe_difference(group.gather(name, values)):
        raise UserError(f'{mismatch}; start all of them alike')


def describe_difference(values: list[dict[str, Any]]) -> str | None:
    """Where the first process that differs from process 0 does."""
    first = values[0]
    for index, other in enumerate(values):
        for key in first | other:
            if (first_value := first.get(key)) != (other_value := other.get(key)):
                difference = f'{other_value} there, {first_value} on process 0'
                return f'process {index} differs from process 0 in {key}: {difference}'
    return None
