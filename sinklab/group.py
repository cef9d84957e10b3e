"""What the processes of a run say to each other beside their collectives: decisions, which all of them take alike."""

from collections.abc import Callable
from typing import Any, Protocol

from sinklab.record import Refusal


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
    """What a function returns on each process; what one of them refuses, all refuse."""
    try:
        mine = dict(value=function())
    except Refusal as refusal:
        mine = dict(refused=str(refusal))
    answers = group.gather(name, mine)
    refused = {answer['refused']: index for index, answer in reversed([*enumerate(answers)]) if 'refused' in answer}
    if refused:
        words, index = list(refused.items())[-1]
        alike = sum(answer.get('refused') == words for answer in answers) == group.count
        raise Refusal(words if alike else f'process {index}: {words}')
    return [answer['value'] for answer in answers]


def once(group: Group, name: str, function: Callable[[], Any]) -> Any:
    """What a function returns on process 0, which alone calls it."""
    return together(group, name, function if group.index == 0 else lambda: None)[0]


def same(group: Group, name: str, values: dict[str, Any]) -> None:
    """Refuses what differs from process to process, by its name."""
    first, *others = group.gather(name, values)
    for index, other in enumerate(others, 1):
        for key in first | other:
            if (ours := first.get(key)) != (theirs := other.get(key)):
                raise Refusal(
                    f'process {index} differs from process 0 in {key}: {theirs} there, {ours} on process 0; '
                    'start all of them alike'
                )
