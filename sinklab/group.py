"""What the processes of a run say to each other beside their collectives: decisions, which all of them take alike."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from sinklab.record import Refusal

T = TypeVar('T')


class Group(Protocol):
    """All processes of a run, as one of them knows them. Values are what JSON has."""

    index: int
    count: int

    def gather(self, name: str, value: Any) -> list[Any]:
        """The values of all processes, by their numbers; waits until all have come to this name."""
        ...

    def at(self, place: str, step: int = 0, usual: float | None = None) -> None:
        """Tells who waits where this process is, and how many seconds that usually takes; None: nobody knows."""
        ...


class Alone:
    """The group of a single process."""

    index, count = 0, 1

    def gather(self, name: str, value: Any) -> list[Any]:
        return [value]

    def at(self, place: str, step: int = 0, usual: float | None = None) -> None:
        pass


def together(group: Group, name: str, function: Callable[[], Any]) -> list[Any]:
    """What a function returns on each process, as JSON has it; what one of them refuses, all refuse."""
    try:
        mine = dict(value=function(), refused=None)
    except Refusal as refusal:
        mine = dict(value=None, refused=str(refusal))
    answers = group.gather(name, mine)
    pass_on([answer['refused'] for answer in answers])
    return [answer['value'] for answer in answers]


def unanimous(group: Group, name: str, function: Callable[[], T]) -> T:
    """What a function returns on this process, be it what it may; what one of them refuses, all refuse."""
    kept = []
    together(group, name, lambda: kept.append(function()))
    return kept[0]


def once(group: Group, name: str, function: Callable[[], Any]) -> Any:
    """What a function returns on process 0, which alone calls it."""
    return together(group, name, function if group.index == 0 else lambda: None)[0]


def pass_on(refusals: list[str | None]) -> None:
    """Refuses what any process has refused, in its words; of one that is not alone with it, the first's."""
    index, words = next(((index, words) for index, words in enumerate(refusals) if words), (0, None))
    if words:
        raise Refusal(words if set(refusals) == {words} else f'process {index}: {words}')


def same(group: Group, name: str, values: dict[str, Any]) -> None:
    """Refuses what differs from process to process."""
    if differ := difference(group.gather(name, values)):
        raise Refusal(f'{differ}; start all of them alike')


def difference(values: list[dict[str, Any]]) -> str | None:
    """Where the first process that differs from process 0 does."""
    first = values[0]
    for index, other in enumerate(values):
        for key in first | other:
            if (ours := first.get(key)) != (theirs := other.get(key)):
                return f'process {index} differs from process 0 in {key}: {theirs} there, {ours} on process 0'
    return None
