"""Modes of --bos: what the texts of a measurement begin with."""

import dataclasses
from typing import Literal, get_args

from sinklab.config.spec import Spec
from sinklab.errors import UserError

BosMode = Literal['auto', 'none', 'force']  # as in training, never BOS, always BOS


def check_bos(bos: str) -> None:
    """Raise UserError for a mode that does not exist."""
    if bos not in get_args(BosMode):
        raise UserError(f'bos={bos} is not allowed; give {" or ".join(get_args(BosMode))}')


def apply_bos(spec: Spec, bos: BosMode) -> Spec:
    """Return the config of a run with the changes that --bos asks for."""
    if bos == 'auto':
        return spec
    if spec.data.task != 'text':
        raise UserError(f'--bos={bos} needs texts, but the run was trained on {spec.data.task}; remove it')
    if bos == 'force':
        return dataclasses.replace(spec, probe=dataclasses.replace(spec.probe, prepend='bos'))
    probe = dataclasses.replace(spec.probe, prepend='none')
    return dataclasses.replace(spec, probe=probe, data=dataclasses.replace(spec.data, fixed_held_out=False))
