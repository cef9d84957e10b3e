"""The persistent compilation cache of jax, in which every entry is verified before it is deserialized.

jax writes an entry without a digest, and XLA trusts what it reads: a flipped bit can end the process, or change what
the program computes. Here an entry is a header with a SHA-256 and the bytes of jax, in one file, so that a digest and
its entry cannot come apart. The digest covers the key as well: an entry under another's name is not accepted. It
guards against damage, not against somebody who may write into the folder.
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

MAGIC = b'sinklab-program-1 '
HEADER = len(MAGIC) + 64 + 1  # the magic, a SHA-256 in hexadecimal digits, and a newline
NAME = '{}-verified'  # of a key; jax itself adds the suffixes
ENTRY, ATIME = '-cache', '-atime'  # suffixes of jax: an entry, and the time of its last use
UNFINISHED = '.unfinished'
ABANDONED = 3600.0  # seconds after which nobody writes an unfinished file any more


def add_digest(key: str, program: bytes) -> bytes:
    """Return what is written of a compiled program: a header with its digest, and the program."""
    return MAGIC + compute_digest(key, program) + b'\n' + program


def remove_digest(key: str, entry: bytes) -> bytes:
    """Return the compiled program of an entry.

    Raises:
        ValueError: the entry has no digest, or another one than its content.
    """
    if not entry.startswith(MAGIC) or entry[HEADER - 1 : HEADER] != b'\n':
        raise ValueError('it has no digest')
    program = entry[HEADER:]
    if entry[len(MAGIC) : HEADER - 1] != compute_digest(key, program):
        raise ValueError('its SHA-256 differs')
    return program


def compute_digest(key: str, program: bytes) -> bytes:
    digest = hashlib.sha256(key.encode() + b'\n')
    digest.update(program)
    return digest.hexdigest().encode()


def install() -> bool:
    """Have jax verify what it reads from its compilation cache, wherever that lies; return whether it does.

    jax has no public way to give it a cache object. `get_file_cache` of its private module makes one of the name
    `LRUCache` when the first program is compiled, so that this name is replaced. Where a version of jax has no such
    name, its cache is switched off: nothing is read that was not verified.
    """
    try:
        module = importlib.import_module('jax._src.compilation_cache')
        public = importlib.import_module('jax.experimental.compilation_cache.compilation_cache')
        found = module.LRUCache
        verified = make_verified_class(found)
        if found is not verified:
            module.LRUCache = verified
            public.reset_cache()  # of a program that was compiled before, there is a cache that does not verify
    except (ImportError, AttributeError, TypeError) as error:
        if jax.config.jax_enable_compilation_cache:
            print(
                f'sinklab: jax {jax.__version__} has no compilation cache that can be verified ({error}); '
                'all programs are compiled again; use jax 0.10.2 to 0.12',
                file=sys.stderr,
            )
            jax.config.update('jax_enable_compilation_cache', False)
        return False
    if found is not verified:
        # On a GPU, XLA keeps what it measured of single kernels in files of its own, which it reads without a digest.
        with contextlib.suppress(AttributeError):
            jax.config.update('jax_persistent_cache_enable_xla_caches', 'none')
    return True


@functools.cache
def make_verified_class(base: type) -> type:
    """Return a subclass of jax's LRUCache that adds a digest to each entry, and verifies it before it returns one."""
    if getattr(base, 'is_verified', False):
        return base

    class VerifiedCache(base):
        is_verified = True

        def get(self, key: str) -> bytes | None:
            entry = super().get(NAME.format(key))
            if entry is None:
                return None
            try:
                return remove_digest(key, entry)
            except ValueError as error:
                self.remove(key, error)
                return None

        def put(self, key: str, value: bytes) -> None:
            """Write an entry in one stroke, so that no other process reads a part of it."""
            name, entry = NAME.format(key), add_digest(key, value)
            path = self.path / f'{name}{ENTRY}'
            if self.eviction_enabled or '://' in os.fspath(path):  # under a lock of jax; an object appears whole
                super().put(name, entry)
            elif not path.exists():
                write_whole(Path(path), entry)

        def remove(self, key: str, why: Exception) -> None:
            """Remove an entry that must not be used, and say so in one line."""
            name, done = NAME.format(key), 'it is removed and compiled again'
            path = self.path / f'{name}{ENTRY}'
            try:
                path.unlink(missing_ok=True)
                (self.path / f'{name}{ATIME}').unlink(missing_ok=True)
            except OSError as error:
                done = f'it cannot be removed ({error.strerror or error}), and is compiled again; delete it'
            print(f'sinklab: the compiled program {path} is damaged ({why}): {done}', file=sys.stderr)

    return VerifiedCache


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that takes its name when it is complete. After a power failure its digest tells damage."""
    unfinished = path.with_name(f'{path.name}.{uuid.uuid4().hex[:8]}{UNFINISHED}')
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def remove_unverified(folder: Path) -> None:
    """Remove the entries of earlier versions, which had no digest and are not read any more, from a local folder."""
    removed = 0
    for suffix in (ENTRY, ATIME):
        for path in folder.glob(f'*{suffix}'):
            if path.name.endswith(NAME.format('') + suffix):
                continue
            with contextlib.suppress(OSError):
                path.unlink()
                removed += suffix == ENTRY
    for path in folder.glob(f'*{ENTRY}.*{UNFINISHED}'):  # of a process that was killed while it wrote
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED:
                path.unlink()
    if removed:
        print(
            f'sinklab: removed {removed} compiled programs without a digest, of an earlier version, from {folder}',
            file=sys.stderr,
        )
