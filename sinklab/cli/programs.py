"""Compiled programs: kept from one run to the next, and told."""

import argparse
import hashlib
import importlib.util
import os
import platform
from pathlib import Path

from sinklab.files.place import check_utf8, is_remote, place
from sinklab.record import Refusal

NONE = 'none'
# XLA's quickest: half the time of a start, and steps of twice or more.
HASTE = '--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters'
ACCELERATORS = ('libtpu', 'jax_cuda12_plugin', 'jax_cuda13_plugin', 'jax_rocm7_plugin')
HASTY = ('smoke',)  # sizes whose programs run for less time than they take to compile


def argument(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        '--compiled',
        metavar='DIR',
        help='folder for compiled programs, which later runs reuse (default: the cache of the user); none: keep none',
    )


def hasten(size: str | None) -> None:
    """What learns nothing is compiled in haste, where jax knows the CPU alone; to be said before it is at work."""
    given = os.environ.get('XLA_FLAGS', '')
    if size in HASTY and '--xla_backend' not in given and knows_the_cpu_alone():
        os.environ['XLA_FLAGS'] = f'{given} {HASTE}'.strip()


def knows_the_cpu_alone() -> bool:
    return not any(map(importlib.util.find_spec, ACCELERATORS))


class Programs:
    """Keeps what this process compiles in a folder, finds what others have, and counts both."""

    def __init__(self, folder: str | None):
        import jax

        from sinklab import program_cache

        program_cache.install()
        self.asked = self.found = 0
        self.folder = folder or jax.config.jax_compilation_cache_dir or str(usual())
        jax.monitoring.register_event_listener(self.hear)
        if folder:
            check_utf8(place(folder), 'jax could not keep compiled programs there')
        elif not writable(self.folder) or not is_utf8(self.folder):
            self.folder = NONE
        if self.folder == NONE:
            jax.config.update('jax_enable_compilation_cache', False)
            return
        if self.folder == str(usual()):
            program_cache.remove_unverified(Path(self.folder))
        if not writable(self.folder):
            raise Refusal(f'--compiled={folder} cannot be written; give another folder, or none')
        jax.config.update('jax_compilation_cache_dir', self.folder)
        jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)

    def hear(self, event: str, **_) -> None:
        self.asked += event == '/jax/compilation_cache/compile_requests_use_cache'
        self.found += event == '/jax/compilation_cache/cache_hits'

    def __str__(self) -> str:
        if self.folder == NONE:
            return 'programs: all compiled, none kept'
        return f'programs: {self.asked - self.found} compiled, {self.found} found in {self.folder}'


def is_utf8(folder: str) -> bool:
    try:
        check_utf8(place(folder), '')
    except Refusal:
        return False
    return True


def writable(folder: str) -> bool:
    if is_remote(folder):
        return bool(place(folder))  # jax says what it cannot keep there, and goes on without
    try:
        Path(folder).mkdir(0o700, parents=True, exist_ok=True)  # who can write there can run code as this user
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def usual() -> Path:
    """In the user's cache, by the kind of processor: a program for a CPU holds instructions that others may lack."""
    from sinklab.cache import cache

    return cache() / 'programs' / hashlib.sha256(processor().encode()).hexdigest()[:8]


def processor() -> str:
    try:
        lines = Path('/proc/cpuinfo').read_text(encoding='utf-8').splitlines()
    except OSError:
        lines = [platform.processor()]
    told = {line.partition(':')[0].strip(): line for line in lines}
    return ' '.join([platform.machine(), *(told.get(name, '') for name in ('model name', 'flags', 'Features'))])
