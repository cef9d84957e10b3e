"""Commands that install missing packages, for the running environment and copy of sinklab.

sinklab is not on the Python Package Index: `pip install "sinklab[hf]"` fails, or installs somebody else's package.
"""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

from sinklab.escape import join_shell, quote_shell

ROOT = Path(__file__).resolve().parents[1]  # root of a clone, or site-packages


def format_extra_command(extra: str) -> str:
    """Return the command that installs an optional extra of sinklab, such as `hf`.

    From a clone it is an editable install with the extra. Otherwise the command names what the extra requires,
    because the wheel that sinklab came from may be gone.
    """
    if (ROOT / 'setup.py').is_file():
        return f'{format_installer()} -e {quote_shell(f"{format_path(ROOT)}[{extra}]")}'
    return format_package_command(*list_requirements(extra))


def format_package_command(*packages: str) -> str:
    """Return the command that installs packages from the index, such as `lm-eval[hf]`."""
    return f'{format_installer()} {join_shell(packages)}'


def format_installer() -> str:
    """Return the start of an install command: the available uv or pip, for the running Python."""
    python = Path(sys.executable)
    if (uv := python.with_name('uv')).is_file():
        parts = [format_path(uv), 'pip', 'install', '--python', format_path(python)]
    elif importlib.util.find_spec('pip') is None and shutil.which('uv'):
        parts = ['uv', 'pip', 'install', '--python', format_path(python)]
    else:
        parts = [format_path(python), '-m', 'pip', 'install']
    return join_shell(parts)


def format_path(path: Path) -> str:
    """Return a path relative to the working directory if it is inside it, else the absolute path."""
    path = Path(os.path.abspath(path))  # not resolved: the Python of an environment is a link to another one
    try:
        working_dir = Path.cwd()
    except FileNotFoundError:
        return str(path)
    return str(path.relative_to(working_dir)) if path.is_relative_to(working_dir) else str(path)


def list_requirements(extra: str) -> list[str]:
    """List the requirements of an extra, such as `pandas>=2.2`, from metadata of the installed sinklab."""
    split_lines = [line.partition(';') for line in importlib.metadata.requires('sinklab') or ()]
    return [
        name.strip()
        for name, _, marker in split_lines
        if re.search(rf'extra == ["\']{re.escape(extra)}["\']', marker)
    ]
