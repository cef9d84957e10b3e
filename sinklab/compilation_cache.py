"""The persistent compilation cache of jax, with a digest for each entry.

jax writes an entry without a digest, and XLA trusts what it reads: a flipped bit can end the process, or change what
the program computes. Here an entry is one file with a header, which has a SHA-256, and the bytes of jax, so that a
digest cannot be separated from its entry. The digest also covers the key: an entry under the name of another key is
not accepted. It protects against damage, not against somebody who can write to the directory.
"""

import contextlib
import functools
import hashlib
import importlib
import os
import sys
import time
import uuid
from pathlib import Path

import jax

from sinklab.errors import format_error

MAGIC = b'sinklab-program-1 '
HEADER_BYTES = len(MAGIC) + 64 + 1  # the magic, a SHA-256 in hexadecimal digits, and a newline
NAME_FORMAT = '{}-verified'  # name of a key; jax adds the suffixes
ENTRY_SUFFIX, ATIME_SUFFIX = '-cache', '-atime'  # suffixes of jax: an entry, and the time of its last use
TEMPORARY_SUFFIX = '.unfinished'
STALE_FILE_SECONDS = 3600.0  # age in seconds from which an unfinished file is abandoned


def add_digest(key: str, program: bytes) -> bytes:
    """Return the cache entry of a compiled program: a header with its digest, then the program."""
    return MAGIC + compute_digest(key, program) + b'\n' + program


def remove_digest(key: str, entry: bytes) -> bytes:
    """Return the compiled program of an entry.

    Raises:
        ValueError: The entry has no digest, or a digest that differs from that of its content.
    """
    if not entry.startswith(MAGIC) or entry[HEADER_BYTES - 1 : HEADER_BYTES] != b'\n':
        raise ValueError('it has no digest')
    program = entry[HEADER_BYTES:]
    if entry[len(MAGIC) : HEADER_BYTES - 1] != compute_digest(key, program):
        raise ValueError('its SHA-256 differs')
    return program


def compute_digest(key: str, program: bytes) -> bytes:
    hasher = hashlib.sha256(key.encode() + b'\n')
    hasher.update(program)
    return hasher.hexdigest().encode()


def install_verified_cache() -> bool:
    """Make jax verify the entries of its compilation cache, wherever it is; return whether it does.

    jax has no public way to set a cache object. `get_file_cache` of its private module creates an `LRUCache` when the
    first program is compiled, so this name is replaced. If a version of jax has no such name, its cache is switched
    off, so that no unverified entry is read.
    """
    try:
        private_module = importlib.import_module('jax._src.compilation_cache')
        public_module = importlib.import_module('jax.experimental.compilation_cache.compilation_cache')
        cache_class = private_module.LRUCache
        verified_class = make_verified_class(cache_class)
        if cache_class is not verified_class:
            private_module.LRUCache = verified_class
            # A program that was compiled earlier has created a cache that does not verify.
            public_module.reset_cache()
    except (ImportError, AttributeError, TypeError) as error:
        if jax.config.jax_enable_compilation_cache:
            print(
                f'sinklab: jax {jax.__version__} has no compilation cache that can be verified '
                f'({format_error(error)}); all programs are compiled again; use jax 0.10.2 to 0.12',
                file=sys.stderr,
            )
            jax.config.update('jax_enable_compilation_cache', False)
        return False
    if cache_class is not verified_class:
        # On a GPU, XLA stores autotuning results of kernels in files of its own, which it reads without a digest.
        with contextlib.suppress(AttributeError):
            jax.config.update('jax_persistent_cache_enable_xla_caches', 'none')
    return True


@functools.cache
def make_verified_class(base: type) -> type:
    """Make a subclass of jax's LRUCache that adds a digest to each entry, and verifies it on read."""
    if getattr(base, 'is_verified', False):
        return base

    class VerifiedCache(base):
        is_verified = True

        def get(self, key: str) -> bytes | None:
            entry = super().get(NAME_FORMAT.format(key))
            if entry is None:
                return None
            try:
                return remove_digest(key, entry)
            except ValueError as error:
                self.remove(key, error)
                return None

        def put(self, key: str, value: bytes) -> None:
            """Write an entry atomically, so that no other process reads a part of it."""
            name, entry = NAME_FORMAT.format(key), add_digest(key, value)
            path = self.path / f'{name}{ENTRY_SUFFIX}'
            if self.eviction_enabled or '://' in os.fspath(path):  # jax holds a lock; objects are written atomically
                super().put(name, entry)
            elif not path.exists():
                write_atomically(Path(path), entry)

        def remove(self, key: str, reason: Exception) -> None:
            """Remove an entry that must not be used, and print one line about it."""
            name, action = NAME_FORMAT.format(key), 'it is removed and compiled again'
            path = self.path / f'{name}{ENTRY_SUFFIX}'
            try:
                path.unlink(missing_ok=True)
                (self.path / f'{name}{ATIME_SUFFIX}').unlink(missing_ok=True)
            except OSError as error:
                action = f'it cannot be removed ({error.strerror}), and is compiled again; delete it'
            print(f'sinklab: the compiled program {path} is damaged ({reason}): {action}', file=sys.stderr)

    return VerifiedCache


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically: it gets its name when it is complete.

    After a power failure, the digest of the entry reveals damage.
    """
    temporary_path = path.with_name(f'{path.name}.{uuid.uuid4().hex[:8]}{TEMPORARY_SUFFIX}')
    try:
        temporary_path.write_bytes(content)
        temporary_path.replace(path)
    finally:
        temporary_path.unlink(missing_ok=True)


def remove_unverified(folder: Path) -> None:
    """Remove entries of earlier versions, which have no digest and are not read, from a local directory."""
    num_removed = 0
    for suffix in (ENTRY_SUFFIX, ATIME_SUFFIX):
        for path in folder.glob(f'*{suffix}'):
            if path.name.endswith(NAME_FORMAT.format('') + suffix):
                continue
            with contextlib.suppress(OSError):
                path.unlink()
                num_removed += suffix == ENTRY_SUFFIX
    for path in folder.glob(f'*{ENTRY_SUFFIX}.*{TEMPORARY_SUFFIX}'):  # of a process that was killed while writing
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_FILE_SECONDS:
                path.unlink()
    if num_removed:
        print(
            f'sinklab: removed {num_removed} compiled programs of an earlier version without a digest from {folder}',
            file=sys.stderr,
        )
