"""The arrays of a run's probes, each file opened once."""

import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from sinklab.measure import table as measures
from sinklab.record import Refusal

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
    return {
        picture.name: np.stack([picture.of(found[picture.array]) for found in read])
        for picture in pictures
        if read and all(picture.array in found for found in read)
    }


def arrays(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Those of a probe's file that it has."""
    try:
        with path.open('rb') as file, np.load(file) as found:
            return {name: found[name] for name in names if name in found.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise Refusal(f'{path} is damaged ({error}); delete it, and the report does without it') from error


def check(path: Path, found: dict[str, np.ndarray]) -> None:
    needed = measures.HEADLINE_MAP.array
    if needed not in found:
        raise Refusal(
            f'{path} has no {needed}, for an earlier sinklab has written it; delete it, and the report does without '
            'it, or train the run anew'
        )
