"""Rules for failures of requests to object storage, and operations on it."""

import os
import time

import numpy as np

from sinklab.storage import atomic_write, directories
from sinklab.storage.paths import get_file_system

CONTENT = np.random.default_rng(0).bytes(200_000)


def answer_once(answer, method='', path=''):
    """Return a rule that gives an answer to the first request of a kind."""
    remaining = [answer]
    return lambda *request: (
        remaining.pop() if remaining and request[0].startswith(method) and path in request[1] else None
    )


def answer_always(answer, method='', path=''):
    return lambda *request: answer if request[0].startswith(method) and path in request[1] else None


def answer_during(seconds, answer):
    deadline = time.monotonic() + seconds
    return lambda *_: answer if time.monotonic() < deadline else None


def write_file(path, content=CONTENT):
    with atomic_write.open_writable_folder(path.parent), atomic_write.atomic_write(path) as temporary_path:
        temporary_path.write_bytes(content)


def sends_content(method, _path):
    """Return whether a request sends the content of an object."""
    return method in ('POST', 'PUT')


def read_file(path):
    return path.read_bytes()


def read_ranges(path):
    return b''.join(
        get_file_system(path).cat_file(os.fspath(path), start=start, end=start + 100_000) for start in (0, 100_000)
    )


STORAGE_OPERATIONS = {
    'read': lambda path: path.read_bytes(),
    'files': lambda path: directories.get_stored_files(path.parent, [path.name]),
    'exists': lambda path: path.exists(),
    'is_dir': lambda path: path.is_dir(),
    'names': lambda path: directories.list_files(path.parent),
    'entries': lambda path: list(directories.list_entries(path.parent)),
    'finished': lambda path: directories.list_committed(path.parent),
    'read_with_version': lambda path: get_file_system(path).read_with_version(os.fspath(path)),
    'write': write_file,
    'write_if_match': lambda path: get_file_system(path).write_if_match(os.fspath(path), b'x', ''),
    'remove': lambda path: directories.remove_folder(path.parent),
}
