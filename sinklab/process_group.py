"""Process group of a run: all-gather and broadcast of JSON values, and errors raised on all processes."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from sinklab.errors import UserError

T = TypeVar('T')


class ProcessGroup(Protocol):
    """Protocol for one process to communicate with all processes of its run. Values are JSON values."""

    process_index: int
    process_count: int

    def all_gather(self, name: str, value: Any) -> list[Any]:
        """All-gather a value: wait until all processes have called `all_gather` with this name.

        Returns:
            The values of all processes, in the order of their process indices.
        """
        ...

    def report_progress(self, activity: str, step: int = 0, usual_seconds: float | None = None) -> None:
        """Report the current activity to the watchdog of this process, which applies timeouts.

        Args:
            activity: What the process does now.
            step: The training step.
            usual_seconds: How many seconds this activity usually takes; None: unknown.
        """
        ...


class SingleProcessGroup:
    """Process group of a single process."""

    process_index, process_count = 0, 1

    def all_gather(self, name: str, value: Any) -> list[Any]:
        return [value]

    def report_progress(self, activity: str, step: int = 0, usual_seconds: float | None = None) -> None:
        pass


def all_gather_or_raise(group: ProcessGroup, name: str, function: Callable[[], Any]) -> list[Any]:
    """Call a function on each process, and all-gather its results, in the order of process indices.

    Args:
        group: The process group.
        name: The same name on all processes.
        function: Returns a JSON value, or raises UserError.

    Raises:
        UserError: The function raised it on any process; then all processes raise it.
    """
    try:
        own_answer = dict(value=function(), refused=None)
    except UserError as error:
        own_answer = dict(value=None, refused=str(error))
    answers = group.all_gather(name, own_answer)
    raise_first_error([answer['refused'] for answer in answers])
    return [answer['value'] for answer in answers]


def run_on_all_or_raise(group: ProcessGroup, name: str, function: Callable[[], T]) -> T:
    """Call a function on each process, and return its local result, which may be of any type.

    Args:
        group: The process group.
        name: The same name on all processes.
        function: Returns any value, or raises UserError.

    Raises:
        UserError: The function raised it on any process; then all processes raise it.
    """
    results = []
    all_gather_or_raise(group, name, lambda: results.append(function()))
    return results[0]


def broadcast_from_primary(group: ProcessGroup, name: str, function: Callable[[], Any]) -> Any:
    """Call a function on process 0 only, and broadcast its result, a JSON value, to all processes.

    Raises:
        UserError: The function raised it; then all processes raise it.
    """
    return all_gather_or_raise(group, name, function if group.process_index == 0 else lambda: None)[0]


def raise_first_error(errors: list[str | None]) -> None:
    """Raise UserError with the first error message of any process, if there is one.

    Args:
        errors: One message for each process; None: no error. If all processes have the same message, it is raised
            as it is; otherwise it begins with the index of the process.
    """
    index, message = next(((index, message) for index, message in enumerate(errors) if message), (0, None))
    if message:
        raise UserError(message if set(errors) == {message} else f'process {index}: {message}')


def check_equal_on_all(group: ProcessGroup, name: str, values: dict[str, Any]) -> None:
    """Raise UserError if the values differ between processes.

    Args:
        group: The process group.
        name: The same name on all processes, used for the all-gather.
        values: {what the user reads in the message: its JSON value}.
    """
    if mismatch := describe_difference(group.all_gather(name, values)):
        raise UserError(f'{mismatch}; start all of them with the same options')


def describe_difference(values: list[dict[str, Any]]) -> str | None:
    """Describe the first difference between process 0 and any other process.

    Args:
        values: One dict for each process.

    Returns:
        The text of the message; None if all are equal.
    """
    first = values[0]
    for index, other in enumerate(values):
        for key in first | other:
            if (first_value := first.get(key)) != (other_value := other.get(key)):
                difference = f'{other_value} instead of {first_value}'
                return f'process {index} differs from process 0 in {key}: {difference}'
    return None
