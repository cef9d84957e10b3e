"""Flags for the layout of a run on devices: parallelism, micro-batches, remat and the attention backend."""

import argparse
import dataclasses
from typing import get_args

from sinklab.config.spec import (
    SAVEABLE_ACTIVATIONS,
    BackendName,
    Hardware,
    parse_saved_activations,
)
from sinklab.schema import UserError

REMAT_MODES = 'none', 'full', 'auto'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--data',
        type=int,
        metavar='N',
        help='devices that split the batch (default: one for each slice, GPU node or core)',
    )
    parser.add_argument(
        '--fsdp',
        type=int,
        metavar='N',
        help='devices that split batch and parameters (default: all devices of a slice or node)',
    )
    parser.add_argument(
        '--tensor', type=int, default=1, metavar='N', help='devices that split heads, FFN and vocabulary (default: 1)'
    )
    parser.add_argument(
        '--micro_batch',
        type=int,
        metavar='N',
        help='sequences of a forward pass; gradients of a batch are accumulated (default: all at once)',
    )
    parser.add_argument(
        '--remat',
        nargs='?',
        const='full',
        default='none',
        metavar='WHAT',
        help='save memory by computing activations again in the backward pass: none, full, auto, or all but those '
        f'named, of {",".join(SAVEABLE_ACTIVATIONS)} (default: none; without WHAT: full)',
    )
    parser.add_argument(
        '--attention',
        default='auto',
        metavar='BACKEND',
        help='implementation of attention: auto, dense, chunked, tpu, gpu or cudnn (default: auto); sinklab doctor '
        '--kernels shows which work here',
    )


def parse_hardware(args: argparse.Namespace) -> Hardware:
    for name in ('data', 'fsdp', 'tensor', 'micro_batch'):
        size = getattr(args, name)
        if size is not None and size < 1:
            raise UserError(f'--{name}={size} must be a whole number of at least 1')
    if args.attention not in get_args(BackendName):
        raise UserError(f'--attention={args.attention} is unknown; it is one of {", ".join(get_args(BackendName))}')
    if args.remat != 'auto' and not parse_saved_activations(args.remat) <= set(SAVEABLE_ACTIVATIONS):
        raise UserError(
            f'--remat={args.remat} is unknown; give {", ".join(REMAT_MODES)}, '
            f'or some of {",".join(SAVEABLE_ACTIVATIONS)}'
        )
    return Hardware(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Hardware)})


def format_hardware_flags(hardware: Hardware) -> list[str]:
    """Format a layout as command-line flags."""
    return [f'--{name}={value}' for name, value in dataclasses.asdict(hardware).items() if value is not None]
