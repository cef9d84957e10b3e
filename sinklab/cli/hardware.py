"""The options of a command that say how a run is laid on devices."""

import argparse
import dataclasses
from typing import get_args

from sinklab.record import Refusal
from sinklab.spec import KEPT, Backend, Hardware, names_kept

REMAT = 'none', 'full', 'auto'


def arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument('--data', type=int, metavar='N', help='devices that split the batch (slices, GPU nodes, cores)')
    verb.add_argument('--fsdp', type=int, metavar='N', help='... and the parameters too (all devices of each)')
    verb.add_argument(
        '--tensor', type=int, default=1, metavar='N', help='devices that split heads, FFN and vocabulary'
    )
    verb.add_argument('--micro_batch', type=int, metavar='N', help='sequences at once; gradients are accumulated')
    verb.add_argument(
        '--remat',
        nargs='?',
        const='full',
        default='none',
        metavar='WHAT',
        help=f'compute activations again in the backward pass: full, or all but some of {",".join(KEPT)}; auto, none',
    )
    verb.add_argument(
        '--attention',
        default='auto',
        metavar='BACKEND',
        help='auto, dense, chunked, tpu, gpu or cudnn; sinklab doctor --kernels shows what each does here',
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
