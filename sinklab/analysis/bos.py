"""Modes of --bos: what the texts of a measurement begin with."""

import dataclasses
from typing import Literal, get_args

from sinklab.config.spec import Spec
from sinklab.errors import UserError

BosMode = Literal['auto', 'none', 'force']  # as in training, never BOS, always BOS
# For each mode, (changes of the probe config, changes of the data config) of a run.
BOS_CHANGES: dict[BosMode, tuple[dict, dict]] = {
    'auto': ({}, {}),
    'none': (dict(prepend='none'), dict(fixed_held_out=False)),
    'force': (dict(prepend='bos'), {}),
}


def check_bos(bos: str) -> None:
    """Raise UserError for a mode that does not exist."""
    if bos not in get_args(BosMode):
        raise UserError(f'bos={bos} is not allowed; give {" or ".join(get_args(BosMode))}')


def apply_bos(spec: Spec, bos: BosMode) -> Spec:
    """Return the config of a run with the changes that --bos asks for."""
    if bos != 'auto' and spec.data.task != 'text':
        raise UserError(f'--bos={bos} needs texts, but the run was trained on {spec.data.task}; remove it')
    probe_changes, data_changes = BOS_CHANGES[bos]
    return dataclasses.replace(
        spec,
        probe=dataclasses.replace(spec.probe, **probe_changes),
        data=dataclasses.replace(spec.data, **data_changes),
    )
