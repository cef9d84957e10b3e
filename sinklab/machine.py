"""Descriptions of the machine that a process runs on."""

import os
import platform
from pathlib import Path


def read_cpu_info() -> dict[str, str]:
    """Return the fields of /proc/cpuinfo, of the last processor; {} where there is no such file."""
    try:
        lines = Path('/proc/cpuinfo').read_text(encoding='utf-8').splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(':') for line in lines) if name.strip()}


def get_processor_name() -> str:
    return read_cpu_info().get('model name') or platform.processor() or platform.machine()


def make_processor_key() -> str:
    """Return a text that differs between processors with other instructions."""
    cpu_info = read_cpu_info() or {'model name': platform.processor()}
    return ' '.join([platform.machine(), *(cpu_info.get(name, '') for name in ('model name', 'flags', 'Features'))])


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def describe_machine() -> str:
    """Return the processor, the number of usable cores and the version of Python."""
    return f'{get_processor_name()}, {count_cores()} cores, python {platform.python_version()}'
