"""Description of the machine that a benchmark runs on."""

import os
import platform
import re
from pathlib import Path


def get_processor_name() -> str:
    path = Path('/proc/cpuinfo')
    cpu_info = path.read_text(encoding='utf-8') if path.exists() else ''
    match = re.search(r'^model name\s*: (.*)', cpu_info, re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def describe_machine() -> str:
    """Return the processor, the number of usable cores and the version of Python."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    return f'{get_processor_name()}, {num_cores} cores, python {platform.python_version()}'
