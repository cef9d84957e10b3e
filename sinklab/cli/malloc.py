"""Huge pages for malloc on CPUs.

On a CPU, every training step allocates its arrays from the system again and returns them. `train` therefore asks for
pages of 2 MB.
"""

import os
import platform
import sys
from pathlib import Path

from sinklab import startup_signals
from sinklab.cli.hardware_flags import is_cpu_only
from sinklab.escape import is_sinklab_process

TUNABLES = 'GLIBC_TUNABLES'
HUGE = 'glibc.malloc.hugetlb'
BEGUN = 'SINKLAB_BEGUN'  # environment variable: id of the process that has executed itself again
SINCE = 2, 35  # the first version of glibc with this tunable
SYSTEM = Path('/sys/kernel/mm/transparent_hugepage/enabled')


def ask_for_large_pages() -> None:
    """Execute this process again with huge pages of 2 MB for malloc.

    glibc reads this tunable only at the start of a process.

    Do nothing unless all of these hold: the process is the command `sinklab` itself, the user has not set this
    tunable, the system gives huge pages to processes that ask for them, and jax has only the CPU.
    """
    own, more = str(os.getpid()), told()
    if not more or not is_sinklab_process() or os.environ.get(BEGUN) == own:
        return
    more[BEGUN] = own
    startup_signals.block_signals()
    try:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | more)
    except OSError:  # continue with small pages
        startup_signals.unblock_signals()


def told() -> dict[str, str]:
    """Return the environment variables that turn huge pages on; {} if they should not be turned on."""
    said = os.environ.get(TUNABLES, '')
    if HUGE in said or not (is_cpu_only() and is_asked()):
        return {}
    return {TUNABLES: ':'.join(filter(None, [said, f'{HUGE}=1']))}


def is_asked() -> bool:
    """Return whether glibc can ask for huge pages, and the system gives them only on request (madvise)."""
    name, version = platform.libc_ver()
    try:
        able = name == 'glibc' and tuple(map(int, version.split('.'))) >= SINCE
        return able and '[madvise]' in SYSTEM.read_text()
    except (OSError, ValueError):
        return False
