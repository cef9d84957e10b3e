"""The arrays of a run's probes, each file opened once."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from sinklab.files import run_files
from sinklab.files.regular import Damaged
from sinklab.measure import table as measures
from sinklab.record import Refusal

REMEDY = 'delete it, and the report does without it'
FILES = 1600  # read of all runs together


def kept(paths: list[Path], count: int) -> list[Path]:
    """At most so many, from the first to the last at even distances."""
    return [paths[at] for at in spaced(len(paths), count)]


def spaced(length: int, count: int) -> list[int]:
    """At most `count` places of `length`, from the first to the last at even distances; of one, the last."""
    if count == 1:
        return [length - 1] if length else []
    return [int(at) for at in np.unique(np.linspace(0, length - 1, min(count, length)).round())] if length else []


def values(paths: list[Path]) -> dict[str, np.ndarray]:
    """Of N probes, by names of pictures: values_NLH for heads, values_NL for ratios; none where a probe lacks it."""
    pictures = [picture for picture in measures.PICTURES if picture.kind != 'matrices']
    read = [arrays(path, [picture.array for picture in pictures]) for path in paths]
    for path, found in zip(paths, read, strict=True):
        check(path, found)
        check_model(path, found, paths[0], read[0])
    return {
        picture.name: np.stack([picture.of(found[picture.array]) for found in read])
        for picture in pictures
        if read and all(picture.array in found for found in read)
    }


def arrays(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Those of a probe's file that it has."""
    found = run_files.read_arrays(path, [*names], REMEDY)
    run_files.check_dimensions(path, found, REMEDY)
    return found


def check_model(path: Path, found: dict[str, np.ndarray], first: Path, others: dict[str, np.ndarray]) -> None:
    """Refuse a probe whose layers or heads are not those of another one of its run."""
    ours, theirs = (run_files.check_dimensions(*one, REMEDY) for one in ((path, found), (first, others)))
    for letter, kind in (('L', 'layers'), ('H', 'heads')):
        if ours.get(letter) != theirs.get(letter):
            raise Damaged(
                f'{path} has {ours.get(letter)} {kind}, and {first} has {theirs.get(letter)}; delete the one that is '
                'of another run, and the report does without it'
            )


def check(path: Path, found: dict[str, np.ndarray]) -> None:
    needed = measures.HEADLINE_MAP.array
    if needed not in found:
        raise Refusal(
            f'{path} has no {needed}, for an earlier sinklab has written it; delete it, and the report does without '
            'it, or train the run anew'
        )
