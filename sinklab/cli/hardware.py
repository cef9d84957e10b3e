"""The options of a command that say how a run is laid on devices."""

import argparse
import dataclasses
from typing import get_args

from sinklab.record import Refusal
from sinklab.spec import KEPT, Backend, Hardware, names_kept

REMAT = 'none', 'full', 'auto'


def arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        '--data',
        type=int,
        metavar='N',
        help='devices that split the batch (default: one for each slice, GPU node or core)',
    )
    verb.add_argument(
        '--fsdp',
        type=int,
        metavar='N',
        help='devices that split batch and parameters (default: all devices of a slice or node)',
    )
    verb.add_argument(
        '--tensor', type=int, default=1, metavar='N', help='devices that split heads, FFN and vocabulary (default: 1)'
    )
    verb.add_argument(
        '--micro_batch',
        type=int,
        metavar='N',
        help='sequences of a forward pass; gradients of a batch are accumulated (default: all at once)',
    )
    verb.add_argument(
        '--remat',
        nargs='?',
        const='full',
        default='none',
        metavar='WHAT',
        help='save memory by computing activations again in the backward pass: none, full, auto, or all but those '
        f'named, of {",".join(KEPT)} (default: none; without WHAT: full)',
    )
    verb.add_argument(
        '--attention',
        default='auto',
        metavar='BACKEND',
        help='implementation of attention: auto, dense, chunked, tpu, gpu or cudnn (default: auto); sinklab doctor '
        '--kernels shows which work here',
    )


def hardware(given: argparse.Namespace) -> Hardware:
    for name in ('data', 'fsdp', 'tensor', 'micro_batch'):
        size = getattr(given, name)
        if size is not None and size < 1:
            raise Refusal(f'--{name}={size} must be a whole number of at least 1')
    if given.attention not in get_args(Backend):
        raise Refusal(f'--attention={given.attention} is unknown; it is one of {", ".join(get_args(Backend))}')
    if given.remat != 'auto' and not names_kept(given.remat) <= set(KEPT):
        raise Refusal(f'--remat={given.remat} is unknown; give {", ".join(REMAT)}, or some of {",".join(KEPT)}')
    return Hardware(**{field.name: getattr(given, field.name) for field in dataclasses.fields(Hardware)})


def options(hardware: Hardware) -> list[str]:
    """What gives this hardware to a command."""
    return [f'--{name}={value}' for name, value in dataclasses.asdict(hardware).items() if value is not None]
