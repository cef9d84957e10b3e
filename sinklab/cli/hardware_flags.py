"""Flags of the layout on devices, of XLA, and of the persistent compilation cache."""

import argparse
import dataclasses
import hashlib
import importlib.util
import os
from pathlib import Path
from typing import Literal, get_args

from sinklab.config.spec import (
    SAVEABLE_ACTIVATIONS,
    BackendName,
    Hardware,
    parse_saved_activations,
)
from sinklab.errors import UserError
from sinklab.storage.paths import check_utf8, is_remote, parse_path

NO_CACHE = 'none'
# XLA's fastest compilation: it halves the time of a start, and steps take twice as long or more.
FAST_COMPILE_FLAGS = (
    '--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters'
)
ACCELERATOR_PACKAGES = ('libtpu', 'jax_cuda12_plugin', 'jax_cuda13_plugin', 'jax_rocm7_plugin')
FAST_COMPILE_SIZES = ('smoke',)  # sizes whose programs take longer to compile than to run


def add_cache_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--compiled',
        metavar='DIR',
        help='folder for compiled programs, which later runs reuse (default: the cache of the user); none: keep none',
    )


def set_fast_compile_flags(size: str | None) -> None:
    """Set XLA flags for fast compilation, for --size=smoke on CPU-only installs.

    Call this before jax initializes its backend: XLA_FLAGS is read then. Flags that the user has set are kept.

    Args:
        size: The size of the run; None: the config file has no sizes.
    """
    xla_flags = os.environ.get('XLA_FLAGS', '')
    if size in FAST_COMPILE_SIZES and '--xla_backend' not in xla_flags and is_cpu_only():
        os.environ['XLA_FLAGS'] = f'{xla_flags} {FAST_COMPILE_FLAGS}'.strip()


def is_cpu_only() -> bool:
    return not any(map(importlib.util.find_spec, ACCELERATOR_PACKAGES))


class CompilationCache:
    """Persistent compilation cache of jax, which counts compiled programs and cache hits.

    Args:
        cache_dir: Folder, or 'none' for no cache; None: the folder of jax's configuration, or that of the user.

    Raises:
        UserError: The given folder cannot be written. If a default folder cannot be written, the cache is turned off.
    """

    def __init__(self, cache_dir: str | None):
        import jax

        self.num_requests = self.num_hits = 0
        self.cache_dir = cache_dir or jax.config.jax_compilation_cache_dir or str(get_default_cache_dir())
        jax.monitoring.register_event_listener(self.count_event)
        if cache_dir:
            check_utf8(parse_path(cache_dir), 'jax could not keep compiled programs there')
        elif not ensure_writable(self.cache_dir) or not is_utf8_path(self.cache_dir):
            self.cache_dir = NO_CACHE
        if self.cache_dir == NO_CACHE:
            jax.config.update('jax_enable_compilation_cache', False)
            return
        if not ensure_writable(self.cache_dir):
            raise UserError(f'--compiled={cache_dir} cannot be written; give another folder, or none')
        jax.config.update('jax_compilation_cache_dir', self.cache_dir)
        jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)

    def count_event(self, event: str, **_) -> None:
        self.num_requests += event == '/jax/compilation_cache/compile_requests_use_cache'
        self.num_hits += event == '/jax/compilation_cache/cache_hits'

    def __str__(self) -> str:
        if self.cache_dir == NO_CACHE:
            return 'programs: all compiled, none kept'
        return f'programs: {self.num_requests - self.num_hits} compiled, {self.num_hits} found in {self.cache_dir}'


def is_utf8_path(path: str) -> bool:
    try:
        check_utf8(parse_path(path), '')
    except UserError:
        return False
    return True


def ensure_writable(path: str) -> bool:
    if is_remote(path):
        return bool(parse_path(path))  # if writing there fails, jax warns and continues without
    try:
        Path(path).mkdir(0o700, parents=True, exist_ok=True)  # who can write there can run code as this user
    except OSError:
        return False
    return os.access(path, os.W_OK)


def get_default_cache_dir() -> Path:
    """Return the default folder of the compilation cache, one for each kind of processor.

    A program compiled for one CPU may contain instructions that another CPU lacks.
    """
    from sinklab.machine import make_processor_key
    from sinklab.storage.cache_dir import get_cache_dir

    return get_cache_dir() / 'programs' / hashlib.sha256(make_processor_key().encode()).hexdigest()[:8]


REMAT_MODES = 'default', 'none', 'full', 'auto'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--data',
        type=int,
        metavar='N',
        help='devices that split the batch (default: one for each slice or GPU node; 1 on a CPU)',
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
        default='default',
        metavar='N',
        help='sequences of a forward pass; gradients of a batch are accumulated: a number, none (all at once) or '
        'default (all at once, but on a CPU without --fsdp parts of about 1024 tokens, or 512 per device if that is '
        'more, of batches with more than twice as many)',
    )
    parser.add_argument(
        '--remat',
        nargs='?',
        const='full',
        default='default',
        metavar='WHAT',
        help='activations of a layer that are saved for the backward pass, which computes the others again: some of '
        f'{",".join(SAVEABLE_ACTIVATIONS)}; none (all are saved but the inside of the FFN), full (only the input is '
        'saved), auto (as many as fit in memory) or default (the fastest on a CPU, none on accelerators); without '
        'WHAT: full',
    )
    parser.add_argument(
        '--attention',
        default='auto',
        metavar='BACKEND',
        help='implementation of attention: auto, dense, chunked, tpu, gpu or cudnn (default: auto); sinklab doctor '
        '--kernels shows which work here',
    )


def check_remat(remat: str) -> None:
    if remat not in REMAT_MODES and not parse_saved_activations(remat) <= set(SAVEABLE_ACTIVATIONS):
        raise UserError(
            f'--remat={remat} is unknown; give {", ".join(REMAT_MODES)}, or some of {",".join(SAVEABLE_ACTIVATIONS)}'
        )


def parse_micro_batch(text: str) -> int | Literal['default'] | None:
    if text == 'default':
        return 'default'
    if text == 'none':
        return None
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise UserError(f'--micro_batch={text} must be a whole number of at least 1, none or default')
    return int(text)


def parse_hardware(args: argparse.Namespace) -> Hardware:
    for name in ('data', 'fsdp', 'tensor'):
        size = getattr(args, name)
        if size is not None and size < 1:
            raise UserError(f'--{name}={size} must be a whole number of at least 1')
    if args.attention not in get_args(BackendName):
        raise UserError(f'--attention={args.attention} is unknown; it is one of {", ".join(get_args(BackendName))}')
    check_remat(args.remat)
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(Hardware)}
    return Hardware(**values | dict(micro_batch=parse_micro_batch(args.micro_batch)))


def format_hardware_flags(hardware: Hardware) -> list[str]:
    """Format a layout as command-line flags."""
    values = dataclasses.asdict(hardware)
    if hardware.micro_batch is None:
        values['micro_batch'] = 'none'
    elif hardware.micro_batch == 'default':
        del values['micro_batch']
    return [f'--{name}={value}' for name, value in values.items() if value is not None]
