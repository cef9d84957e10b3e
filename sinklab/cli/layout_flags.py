"""Flags of the layout on devices, and settings of XLA and of the persistent compilation cache."""

import argparse
import dataclasses
import hashlib
import importlib.util
import os
from typing import Literal, get_args

from sinklab.cli.flag_types import add_options, positive_int
from sinklab.config.spec import SAVEABLE_ACTIVATIONS, BackendName, Layout, parse_saved_activations
from sinklab.errors import UserError

# XLA's fastest compilation: it halves the time of a start, and steps take twice as long or more.
FAST_COMPILE_FLAGS = (
    '--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters'
)
ACCELERATOR_PACKAGES = ('libtpu', 'jax_cuda12_plugin', 'jax_cuda13_plugin', 'jax_rocm7_plugin')
REMAT_MODES = 'default', 'none', 'full', 'auto'


def parse_remat(text: str) -> str:
    """Parse --remat, for argparse."""
    if text not in REMAT_MODES and not parse_saved_activations(text) <= set(SAVEABLE_ACTIVATIONS):
        names = f'{", ".join(REMAT_MODES)}, or some of {",".join(SAVEABLE_ACTIVATIONS)}'
        raise argparse.ArgumentTypeError(f'{text} is unknown; give {names}')
    return text


def parse_micro_batch(text: str) -> int | Literal['default'] | None:
    """Parse --micro_batch, for argparse."""
    if text == 'none':
        return None
    try:
        return 'default' if text == 'default' else positive_int(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f'{error}, none or default') from error


OPTIONS = {
    'data': (positive_int, 'N', 'devices that split the batch (default: one for each slice or GPU node)'),
    'fsdp': (positive_int, 'N', 'devices that split batch and parameters (default: all of a slice or node)'),
    'tensor': (positive_int, 'N', 'devices that split heads, FFN and vocabulary (default: 1)'),
    'micro_batch': (
        parse_micro_batch,
        'N',
        'sequences of a forward pass; gradients of a batch are accumulated: a number, none (all at once) or default '
        '(all at once, but on a CPU without --fsdp parts of a large batch, of about 1024 tokens)',
    ),
    'remat': (
        parse_remat,
        'WHAT',
        'activations of a layer that are saved for the backward pass, which computes the others again: some of '
        f'{",".join(SAVEABLE_ACTIVATIONS)}; none (all are saved but the inside of the FFN), full (only the input is '
        'saved), auto (as many as fit in memory) or default (the fastest on a CPU, none on accelerators)',
    ),
    'attention': (get_args(BackendName), 'BACKEND', 'auto, dense, chunked, tpu, gpu or cudnn (default: auto)'),
}
CACHE_OPTION = str, 'DIR', 'folder for compiled programs (default: the cache of the user); none: keep none'


def set_fast_compile_flags(size: str | None) -> None:
    """Set XLA flags for fast compilation, for --size=smoke on CPU-only installs, unless the user has set such flags.

    Call this before jax initializes its backend: XLA_FLAGS is read then.
    """
    xla_flags = os.environ.get('XLA_FLAGS', '')
    is_cpu_only = not any(map(importlib.util.find_spec, ACCELERATOR_PACKAGES))
    if size == 'smoke' and '--xla_backend' not in xla_flags and is_cpu_only:
        os.environ['XLA_FLAGS'] = f'{xla_flags} {FAST_COMPILE_FLAGS}'.strip()


def set_compilation_cache(folder: str | None) -> None:
    """Set the folder in which jax keeps compiled programs.

    Args:
        folder: The folder, or 'none' for no cache; None: that of jax's configuration, or that of the user, one for
            each kind of processor, because a program may contain instructions that another processor lacks.
    """
    import jax

    from sinklab.environment import make_processor_key
    from sinklab.storage.paths import get_cache_dir

    folder = folder or jax.config.jax_compilation_cache_dir
    if not folder:
        key = hashlib.sha256(make_processor_key().encode()).hexdigest()[:8]
        folder = str(get_cache_dir() / 'programs' / key)
    if os.path.isfile(folder):
        raise UserError(f'--compiled={folder} is a file; give a folder, or none')
    jax.config.update('jax_enable_compilation_cache', folder != 'none')
    if folder != 'none':
        jax.config.update('jax_compilation_cache_dir', folder)
        jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, OPTIONS)
    parser.set_defaults(tensor=1, micro_batch='default', remat='default', attention='auto')


def parse_layout(args: argparse.Namespace) -> Layout:
    return Layout(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Layout)})
