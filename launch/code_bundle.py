"""The code bundle of a job: wheel, pinned requirements, config file, and install script."""

from pathlib import Path

from launch.job import Job, find_option
from launch.plan import (
    Command,
    File,
    Plan,
    make_command,
)
from sinklab.errors import UserError

ROOT = Path(__file__).parents[1]
PYTHON_VERSION = '3.11'
# `make pins` regenerates the requirements in pins/, with a digest of every file that may be installed. uv refuses a
# file with another digest. The wheel of this tree has no digest because it comes from the same folder as the digests.
INSTALL_SCRIPT = f"""#!/bin/bash
# Creates the environment of this code once. Environments of other code are not changed.
set -eu
cd "$(dirname "$0")"
env=env-$(cat pins.txt sinklab-*.whl | sha256sum | cut -c1-12)
if ! [[ -e "$env/made" ]]; then
  uv venv --quiet --clear --python {PYTHON_VERSION} "$env"
  uv pip install --quiet --python "$env/bin/python" --no-deps --require-hashes --requirements pins.txt
  uv pip install --quiet --python "$env/bin/python" --no-deps sinklab-*.whl
  touch "$env/made"
fi
ln -sfn "$env" env
"""


def get_local_folder(name: str) -> str:
    """Return the local folder in which a launcher writes the files of a job."""
    return f'runs/launched/{name}'


def plan_code_bundle(job: Job, folder: str, pins: str, *files: File) -> Plan:
    """Plan to check the row of a job and to write its code bundle into a folder.

    Args:
        job: the job, whose --config names the row and the config file to copy.
        folder: the target folder.
        pins: the pinned requirements, `tpu` or `gpu`.
        *files: further files to write.
    """
    file, _, row = (find_option(job.arguments, 'config') or '').partition(':')
    check_commands = [make_command('sinklab', 'rows', f'--config={file}')] if row else []
    # uv builds the wheel from a source archive. A wheel built from the tree itself would include files that an
    # earlier build left in build/.
    build_wheel = make_command('uv', 'build', '--quiet', '--out-dir', folder, str(ROOT))
    copy_pins = make_command('cp', str(ROOT / 'launch' / 'pins' / f'{pins}.txt'), f'{folder}/pins.txt')
    return Plan(
        (File(f'{folder}/install.sh', INSTALL_SCRIPT), *files),
        (*check_commands, build_wheel, copy_pins, *make_copy_commands(file, folder)),
    )


def make_copy_commands(file: str, folder: str) -> list[Command]:
    """Return the commands that copy a config file into a folder, at the same relative path as here.

    Raises:
        UserError: the path is absolute or leaves the current folder.
    """
    if not file:
        return []
    if Path(file).is_absolute() or '..' in Path(file).parts:
        raise UserError(
            f'--config={file} must be inside this folder, since hosts use the same relative path; copy it here'
        )
    target_path = Path(folder, file)
    return [make_command('mkdir', '-p', str(target_path.parent)), make_command('cp', file, str(target_path))]
