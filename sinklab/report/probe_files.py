"""Arrays of the probe files of a run, checked, and subsampled to a limit on the number of files."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from sinklab.metrics import registry
from sinklab.schema import UserError
from sinklab.storage import run_files
from sinklab.storage.untrusted_files import DamagedFileError

DELETE_REMEDY = 'delete it, and the report does without it'
MAX_FILES = 1600  # probe files read from all runs together


def select_probes(paths: list[Path], count: int) -> list[Path]:
    """Select at most `count` evenly spaced probe files; if `count` is 1, select the last one."""
    return [paths[index] for index in select_evenly(len(paths), count)]


def select_evenly(length: int, count: int) -> list[int]:
    """Select at most `count` evenly spaced indices below `length`; if `count` is 1, select the last one."""
    if count == 1:
        return [length - 1] if length else []
    return (
        [int(index) for index in np.unique(np.linspace(0, length - 1, min(count, length)).round())] if length else []
    )


def load_probe_values(paths: list[Path]) -> dict[str, np.ndarray]:
    """Load the arrays of the figures of kind `heads` and `ratios` from N probe files of one run.

    Returns:
        {name of the figure: values}, with values_NLH for `heads` and values_NL for `ratios`. A figure is left out if
        one of the probes lacks its array.

    Raises:
        DamagedFileError: A file is damaged, or its number of layers or heads differs from that of the first file.
        UserError: A file lacks the array of the headline figure.
    """
    figure_specs = [figure_spec for figure_spec in registry.FIGURES if figure_spec.kind != 'matrices']
    probe_arrays = [
        read_probe_arrays(path, [figure_spec.array_name for figure_spec in figure_specs]) for path in paths
    ]
    for path, file_arrays in zip(paths, probe_arrays, strict=True):
        require_headline_array(path, file_arrays)
        check_same_shape(path, file_arrays, paths[0], probe_arrays[0])
    return {
        figure_spec.name: np.stack(
            [figure_spec.transform(file_arrays[figure_spec.array_name]) for file_arrays in probe_arrays]
        )
        for figure_spec in figure_specs
        if probe_arrays and all(figure_spec.array_name in file_arrays for file_arrays in probe_arrays)
    }


def read_probe_arrays(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Read those of the named arrays that a probe file contains, and check their dimensions.

    Raises:
        DamagedFileError: The file is damaged, or the dimensions of its arrays are inconsistent.
    """
    file_arrays = run_files.read_arrays(path, [*names], DELETE_REMEDY)
    run_files.check_dimensions(path, file_arrays, DELETE_REMEDY)
    return file_arrays


def check_same_shape(
    path: Path, file_arrays: dict[str, np.ndarray], first_path: Path, first_arrays: dict[str, np.ndarray]
) -> None:
    """Raise DamagedFileError if two probes of a run have different numbers of layers or heads."""
    dimensions, first_dimensions = (
        run_files.check_dimensions(*pair, DELETE_REMEDY) for pair in ((path, file_arrays), (first_path, first_arrays))
    )
    for letter, kind in (('L', 'layers'), ('H', 'heads')):
        if dimensions.get(letter) != first_dimensions.get(letter):
            raise DamagedFileError(
                f'{path} has {dimensions.get(letter)} {kind}, and {first_path} has {first_dimensions.get(letter)}; '
                'delete the one that is of another run, and the report does without it'
            )


def require_headline_array(path: Path, file_arrays: dict[str, np.ndarray]) -> None:
    array_name = registry.HEADLINE_FIGURE.array_name
    if array_name not in file_arrays:
        raise UserError(
            f'{path} has no {array_name}, for an earlier sinklab has written it; delete it, and the report does '
            'without it, or train the run anew'
        )
