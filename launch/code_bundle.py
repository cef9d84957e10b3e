"""The code bundle of a job: wheel, pinned requirements, config file, and install script."""

from pathlib import Path

from launch.job import Job, parse_option
from launch.shell import fill_template, make_command, write_file
from sinklab import __version__
from sinklab.errors import UserError

ROOT = Path(__file__).parents[1]
PYTHON_VERSION = '3.11'
# `make pins` regenerates the requirements in pins/, with a digest of every file that may be installed. uv refuses a
# file with another digest. The wheel of this tree has no digest because it comes from the same folder as the digests.
# Its name has the version, because the folder may still have the wheel of an earlier version.
WHEEL_PATTERN = f'sinklab-{__version__}-*.whl'


def get_local_folder(name: str) -> str:
    """Return the local folder in which a launcher writes the files of a job."""
    return f'runs/launched/{name}'


def make_code_bundle(job: Job, folder: str, pins: str) -> list[str]:
    """Return the statements that write the code bundle of a job into a folder.

    Args:
        job: The job, whose --config names the config file to copy.
        folder: The target folder.
        pins: The pinned requirements, `tpu` or `gpu`.

    Raises:
        UserError: The path of the config file is absolute or leaves the current folder.
    """
    statements = [
        write_file(f'{folder}/install.sh', fill_template('install.sh', python=PYTHON_VERSION, wheel=WHEEL_PATTERN)),
        # uv builds the wheel from a source archive. A wheel built from the tree itself would include files that an
        # earlier build left in build/. With the .gitignore of uv, `gcloud builds submit` would upload none of them.
        make_command('uv', 'build', '--quiet', '--no-create-gitignore', '--out-dir', folder, str(ROOT)),
        make_command('cp', str(ROOT / 'launch' / 'pins' / f'{pins}.txt'), f'{folder}/pins.txt'),
    ]
    config, _ = parse_option(job.arguments, 'config')
    file = (config or '').partition(':')[0]
    if Path(file).is_absolute() or '..' in Path(file).parts:
        raise UserError(
            f'--config={file} must be inside this folder, since hosts use the same relative path; copy it here'
        )
    if file:
        target_path = Path(folder, file)
        statements.append(make_command('mkdir', '-p', str(target_path.parent)))
        statements.append(make_command('cp', file, str(target_path)))
    return statements


def make_row_checks(jobs: list[Job]) -> list[str]:
    """Return the commands that check each row of the jobs, before anything is uploaded or submitted."""
    commands = []
    for job in jobs:
        config, _ = parse_option(job.arguments, 'config')
        size, _ = parse_option(job.arguments, 'size')
        if config and ':' in config:
            commands.append(
                make_command('sinklab', 'rows', f'--config={config}', *([f'--size={size}'] if size else []))
            )
    return list(dict.fromkeys(commands))
