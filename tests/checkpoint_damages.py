"""Damages of checkpoint 2 or 4 of a run folder.

Each function returns the name or names, one of which the error message must contain.
"""

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


def remove_digests(folder, step, rng):
    digests.get_digest_path(folder.checkpoint_dir / str(step), 0).unlink()
    return 'no digests'


def truncate_digests(folder, step, rng):
    file = digests.get_digest_path(folder.checkpoint_dir / str(step), 0)
    file.write_bytes(file.read_bytes()[: int(rng.integers(file.stat().st_size - 1))])
    return 'digests_0.json'


CHECKPOINT_DAMAGES = [flip_bit, truncate_file, remove_file, swap_files, remove_digests, truncate_digests]
