"""What can happen to one of the checkpoints 2 and 4 of a folder; each says which names it must be told by."""

import pickle
import shutil

import pytest

from sinklab.checkpoint import digests


def any_file(checkpoint, rng):
    """One of those with something in it."""
    return rng.choice([path for path in sorted(checkpoint.rglob('*')) if path.is_file() and path.stat().st_size])


def any_other(checkpoint, file, rng):
    others = [path for path in sorted(checkpoint.rglob('*')) if path.is_file()]
    return rng.choice([path for path in others if path.read_bytes() != file.read_bytes()])


def flip(folder, step, rng):
    file = any_file(folder.checkpoint_dir / str(step), rng)
    content = bytearray(file.read_bytes())
    content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
    file.write_bytes(content)
    return file.name


def truncate(folder, step, rng):
    file = any_file(folder.checkpoint_dir / str(step), rng)
    file.write_bytes(file.read_bytes()[: int(rng.integers(file.stat().st_size))])
    return file.name


def extend(folder, step, rng):
    file = any_file(folder.checkpoint_dir / str(step), rng)
    file.write_bytes(file.read_bytes() + b'\0')
    return file.name


def lose(folder, step, rng):
    file = any_file(folder.checkpoint_dir / str(step), rng)
    file.unlink()
    return file.name


def swap(folder, step, rng):
    one = any_file(folder.checkpoint_dir / str(step), rng)
    other = any_other(folder.checkpoint_dir / str(step), one, rng)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    return one.name, other.name


def poison(folder, step, rng):
    file = any_file(folder.checkpoint_dir / str(step), rng)
    file.write_bytes(pickle.dumps(Poison()))
    return file.name


class Poison:
    """What is called as soon as somebody loads it."""

    def __reduce__(self):
        return pytest.fail, ('a pickle was loaded',)


def empty_folder(folder, step, rng):
    checkpoint = folder.checkpoint_dir / str(step)
    emptied = rng.choice([checkpoint, *(path for path in sorted(checkpoint.rglob('*')) if path.is_dir())])
    names = [path.name for path in emptied.rglob('*') if path.is_file()]
    shutil.rmtree(emptied)
    emptied.mkdir()
    return names


def add(folder, step, rng):
    (folder.checkpoint_dir / str(step) / 'state' / 'more').write_bytes(b'of it')
    return 'more'


def other_digests(folder, step, rng):
    shutil.rmtree(folder.digest_dir / str(step))
    shutil.copytree(folder.digest_dir / str(6 - step), folder.digest_dir / str(step))
    return 'another step'


def other_checkpoint(folder, step, rng):
    shutil.rmtree(folder.checkpoint_dir / str(step))
    shutil.copytree(folder.checkpoint_dir / str(6 - step), folder.checkpoint_dir / str(step))
    return [path.name for path in (folder.checkpoint_dir / str(step)).rglob('*') if path.is_file()]


def no_digests(folder, step, rng):
    shutil.rmtree(folder.digest_dir / str(step))
    return 'no digests'


def damaged_digests(folder, step, rng):
    file = digests.get_digest_path(folder, step, 0)
    file.write_bytes(file.read_bytes()[: int(rng.integers(file.stat().st_size - 1))])
    return '0.json'


WAYS = [
    *(flip, truncate, extend, lose, swap, poison, empty_folder, add),
    *(other_digests, other_checkpoint, no_digests, damaged_digests),
]
