"""Memory in pages of 2 MB: a step on a CPU takes its arrays from the system anew, and gives them back."""

import importlib.util
import os
import platform
import sys
from pathlib import Path

from sinklab.cli.programs import ACCELERATORS

TUNABLES = 'GLIBC_TUNABLES'
HUGE = 'glibc.malloc.hugetlb'
SINCE = 2, 35  # of glibc
ENABLED = Path('/sys/kernel/mm/transparent_hugepage/enabled')


def large() -> None:
    """Begins this process once more with a malloc that asks for large pages: it can be told at a start alone.

    On Linux, where the system gives them to those who ask, and jax knows the CPU alone.
    """
    told = os.environ.get(TUNABLES, '')
    if HUGE in told or not given_to_those_who_ask() or any(map(importlib.util.find_spec, ACCELERATORS)):
        return
    os.environ[TUNABLES] = ':'.join(filter(None, [told, f'{HUGE}=1']))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def given_to_those_who_ask() -> bool:
    name, version = platform.libc_ver()
    try:
        return name == 'glibc' and numbers(version) >= SINCE and '[madvise]' in ENABLED.read_text()
    except (OSError, ValueError):
        return False


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split('.')))
