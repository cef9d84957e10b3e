"""Description of the environment of a process: versions, commit, platform, processor, devices."""

import os
import platform
import re
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

import sinklab
from sinklab.parallel.device_mesh import get_devices

PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain', 'ml-collections', 'tokenizers', 'numpy')


def get_package_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str | None]:
    """Return the installed versions of packages; None for a package that is not installed."""

    def find_version(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    return {package: find_version(package) for package in packages}


def get_commit() -> str | None:
    """Return the commit of the source tree, with + if it has changes; None for an installed copy."""

    def run_git(*arguments: str) -> str:
        command = ['git', '-C', str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        run_git('ls-files', '--error-unmatch', __file__)
        has_changes = run_git('status', '--porcelain', '--untracked-files=no')
        return run_git('rev-parse', 'HEAD') + ('+' if has_changes else '')
    except (OSError, subprocess.CalledProcessError):
        return None


def make_processor_key() -> str:
    """Return a text that differs between processors with other instructions."""
    path = Path('/proc/cpuinfo')
    cpu_info = path.read_text(encoding='utf-8') if path.exists() else ''
    fields = re.findall(r'^(?:model name|flags|Features)\s*:.*', cpu_info, re.MULTILINE)
    return ' '.join([platform.machine(), platform.processor(), *sorted({*fields})])


def describe_code() -> dict[str, str | None]:
    """Return the versions of sinklab, Python and the packages, and the commit of sinklab."""
    own_versions = dict(sinklab=sinklab.__version__, commit=get_commit(), python=platform.python_version())
    return own_versions | get_package_versions()


def describe_environment(layout: dict, attention: str, attempts: list[dict]) -> dict:
    """Describe the environment of the newest attempt, and the attention backend of each attempt."""
    return dict(
        sinklab=sinklab.__version__,
        commit=get_commit(),
        python=platform.python_version(),
        platform=platform.platform(),
        malloc=os.environ.get('GLIBC_TUNABLES'),
        versions=get_package_versions(),
        devices=[device.device_kind for device in get_devices()],
        processes=jax.process_count(),
        layout=layout,
        attention=attention,
        attempts=attempts,
    )
