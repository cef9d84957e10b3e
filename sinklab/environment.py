"""Description of the environment of a process: versions, commit, platform, devices."""

import os
import platform
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
        return run_git('rev-parse', 'HEAD') + (
            '+' if run_git('status', '--porcelain', '--untracked-files=no') else ''
        )
    except (OSError, subprocess.CalledProcessError):
        return None


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
