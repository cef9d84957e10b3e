"""Damages of checkpoint 2 or 4 of a run folder.

Each function returns the name or names, one of which the error message must contain.
"""

import pickle
import shutil

import pytest

from sinklab.checkpoint import digests


def list_saved_files(checkpoint):
    return [checkpoint / name for name in digests.list_saved_files(checkpoint)]


def choose_file(checkpoint, rng):
    """Choose a file that is not empty."""
    return rng.choice([path for path in list_saved_files(checkpoint) if path.read_bytes()])


def choose_other_file(checkpoint, file, rng):
    return rng.choice([path for path in list_saved_files(checkpoint) if path.read_bytes() != file.read_bytes()])


def flip_bit(folder, step, rng):
    file = choose_file(folder.checkpoint_dir / str(step), rng)
    content = bytearray(file.read_bytes())
    content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
    file.write_bytes(content)
    return file.name


def truncate_file(folder, step, rng):
    file = choose_file(folder.checkpoint_dir / str(step), rng)
    file.write_bytes(file.read_bytes()[: int(rng.integers(file.stat().st_size))])
    return file.name


def append_byte(folder, step, rng):
    file = choose_file(folder.checkpoint_dir / str(step), rng)
    file.write_bytes(file.read_bytes() + b'\0')
    return file.name


def remove_file(folder, step, rng):
    file = choose_file(folder.checkpoint_dir / str(step), rng)
    file.unlink()
    return file.name


def swap_files(folder, step, rng):
    first = choose_file(folder.checkpoint_dir / str(step), rng)
    second = choose_other_file(folder.checkpoint_dir / str(step), first, rng)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    return first.name, second.name


def replace_by_pickle(folder, step, rng):
    file = choose_file(folder.checkpoint_dir / str(step), rng)
    file.write_bytes(pickle.dumps(FailingPickle()))
    return file.name


class FailingPickle:
    """Object whose pickle fails the test when it is loaded."""

    def __reduce__(self):
        return pytest.fail, ('a pickle was loaded',)


def clear_folder(folder, step, rng):
    checkpoint = folder.checkpoint_dir / str(step)
    cleared = rng.choice([path for path in sorted(checkpoint.rglob('*')) if path.is_dir()])
    names = [path.name for path in cleared.rglob('*') if path.is_file()]
    shutil.rmtree(cleared)
    cleared.mkdir()
    return names


def replace_digests(folder, step, rng):
    checkpoint, other = folder.checkpoint_dir / str(step), folder.checkpoint_dir / str(6 - step)
    (checkpoint / 'digests_0.json').write_bytes((other / 'digests_0.json').read_bytes())
    return [path.name for path in (*checkpoint.rglob('*'), *other.rglob('*')) if path.is_file()]


def replace_checkpoint(folder, step, rng):
    checkpoint, other = folder.checkpoint_dir / str(step), folder.checkpoint_dir / str(6 - step)
    names = [path.name for path in checkpoint.rglob('*') if path.is_file()]
    own_digests = (checkpoint / 'digests_0.json').read_bytes()
    shutil.rmtree(checkpoint)
    shutil.copytree(other, checkpoint)
    (checkpoint / 'digests_0.json').write_bytes(own_digests)
    return names


def remove_digests(folder, step, rng):
    digests.get_digest_path(folder.checkpoint_dir / str(step), 0).unlink()
    return 'no digests'


def truncate_digests(folder, step, rng):
    file = digests.get_digest_path(folder.checkpoint_dir / str(step), 0)
    file.write_bytes(file.read_bytes()[: int(rng.integers(file.stat().st_size - 1))])
    return 'digests_0.json'


CHECKPOINT_DAMAGES = [
    *(flip_bit, truncate_file, append_byte, remove_file, swap_files, replace_by_pickle, clear_folder),
    *(replace_digests, replace_checkpoint, remove_digests, truncate_digests),
]
