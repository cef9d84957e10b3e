"""What malloc is told: a step on a CPU takes its arrays from the system anew, and gives them back."""

import os
import platform
import sys
from pathlib import Path

from sinklab import startup_signals
from sinklab.cli.command_line import is_sinklab_process
from sinklab.cli.compilation_flags import is_cpu_only

TUNABLES = 'GLIBC_TUNABLES'
HUGE = 'glibc.malloc.hugetlb'
BEGUN = 'SINKLAB_BEGUN'  # the process that has begun once more
SINCE = 2, 35  # of glibc
SYSTEM = Path('/sys/kernel/mm/transparent_hugepage/enabled')


def ask_for_large_pages() -> None:
    """Begins this process once more, its malloc asking for pages of 2 MB: it can be told at a start alone.

    Only where the process is the command's own, the user has not said a word of it, the system gives large pages to
    those who ask, and jax knows the CPU alone.
    """
    own, more = str(os.getpid()), told()
    if not more or not is_sinklab_process() or os.environ.get(BEGUN) == own:
        return
    more[BEGUN] = own
    startup_signals.block_signals()
    try:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | more)
    except OSError:  # it goes on with small ones
        startup_signals.unblock_signals()


def told() -> dict[str, str]:
    """What an environment has more for that; nothing where it is not wanted."""
    said = os.environ.get(TUNABLES, '')
    if HUGE in said or not (is_cpu_only() and is_asked()):
        return {}
    return {TUNABLES: ':'.join(filter(None, [said, f'{HUGE}=1']))}


def is_asked() -> bool:
    """Whether malloc can ask for large pages, and the system gives them to nobody else."""
    name, version = platform.libc_ver()
    try:
        able = name == 'glibc' and tuple(map(int, version.split('.'))) >= SINCE
        return able and '[madvise]' in SYSTEM.read_text()
    except (OSError, ValueError):
        return False
