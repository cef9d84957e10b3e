"""Files in buckets: those that match a pattern, and their content, by ranges that are read before they are needed."""

import collections
import concurrent.futures
import contextvars
import errno
import fnmatch
import glob
import io
import itertools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from sinklab.data.documents.files import alternatives, reading
from sinklab.files.known import Known, known, listing
from sinklab.files.place import place, storage
from sinklab.record import Refusal

BLOCK = 1 << 22  # bytes of a range
HELD = 8  # ranges of a file in memory: a table is read at several places in turn
AHEAD = 2  # ranges that are under way while one is used
CHANGED = 'has changed since this was begun; let nobody write there, and prepare it to another folder'


@dataclass(frozen=True)
class Object:
    """A file in a bucket as it was listed, with what is asked here of a path."""

    url: str
    size: int
    mark: str  # of its storage, another one as soon as it is written over

    def __str__(self) -> str:
        return self.url

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.url).suffix

    def open(self, _: str = 'rb') -> BinaryIO:
        return io.BufferedReader(Ranges(self.size, self.read), 1 << 17)

    def read(self, start: int, end: int) -> bytes:
        try:
            return storage(self.url).read_range(self.url, start, end, self.mark)
        except OSError as error:
            if error.errno == errno.ESTALE:
                raise Refusal(f'{self.url} {CHANGED}') from error
            raise


class Ranges(io.RawIOBase):
    """A file of BLOCKs; as long as they are read one after another, the next ones are on their way."""

    def __init__(self, size: int, read: Callable[[int, int], bytes]):
        self.size, self.of, self.place = size, read, 0
        self.blocks: collections.OrderedDict[int, concurrent.futures.Future] = collections.OrderedDict()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.place, os.SEEK_END: self.size}[whence]
        return self.place

    def tell(self) -> int:
        return self.place

    def readinto(self, buffer: memoryview) -> int:
        if self.place >= self.size:
            return 0
        number, start = divmod(self.place, BLOCK)
        part = memoryview(self.block(number))[start : start + len(buffer)]
        buffer[: len(part)] = part
        self.place += len(part)
        return len(part)

    def block(self, number: int) -> bytes:
        follows = number - 1 in self.blocks or number == self.place == 0
        for later in range(number, number + 1 + AHEAD * follows):
            if later not in self.blocks and later * BLOCK < self.size:
                self.blocks[later] = started(self.of, later * BLOCK, min((later + 1) * BLOCK, self.size))
        self.blocks.move_to_end(number)
        while len(self.blocks) > HELD:
            self.blocks.popitem(last=False)
        return self.blocks[number].result()


def started(work: Callable, *arguments: Any) -> concurrent.futures.Future:
    """What a thread makes that nobody waits for at an end."""
    future = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True).start()
    return future


def matches(pattern: str) -> list[tuple[str, Object]]:
    """(name, object) of those that match as files of a disk would, sorted by name: relative to the fixed folder."""
    place(pattern)
    found, roots = {}, []
    for plain in [pattern] if one(pattern) else alternatives(pattern):
        parts, alone = plain.split('/'), one(plain)
        if alone or not glob.has_magic(plain):
            roots.append(parts[:-1])
            found |= {plain: alone} if alone else {}
            if not alone:
                below(plain, roots[-1], parts[-1])  # says when there is no such bucket
        else:
            roots.append([*itertools.takewhile(lambda part: not glob.has_magic(part), parts)])
            found |= many(plain, roots[-1])
    common = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*roots, strict=False))
    root = ''.join(f'{names[0]}/' for names in common)
    return sorted(((url.removeprefix(root), known) for url, known in found.items()), key=lambda pair: pair[0])


def one(url: str) -> Object | None:
    """The object of a name, if there is one."""
    bucket = url.split('/')[2]
    if glob.has_magic(bucket):
        raise Refusal(f'{url} leaves open which bucket; name it')
    if '{' in bucket:
        return None
    with reading(url):
        try:
            about = storage(url).info(url)
            return object_of(url, known(about)) if about['type'] == 'file' and not url.endswith('/') else None
        except FileNotFoundError:
            return None


def many(pattern: str, fixed: list[str]) -> dict[str, Object]:
    """The objects that match, by their names."""
    rest = pattern.split('/')[len(fixed) :]
    prefix = '' if rest[0] == '**' else ''.join(itertools.takewhile(lambda letter: letter not in '*?[', rest[0]))
    there = {name: about for name, about in below(pattern, fixed, prefix).items() if fits(name.split('/'), rest)}
    return {f'{"/".join(fixed)}/{name}': object_of(f'{"/".join(fixed)}/{name}', there[name]) for name in there}


def below(pattern: str, folder: list[str], prefix: str) -> dict[str, Known]:
    """What lies below a folder, as far as it begins so; a bucket that is not there is told from one that is empty."""
    with reading(pattern):
        try:
            return listing('/'.join(folder), prefix)
        except FileNotFoundError:  # without a bucket it is ENXIO
            return {}


def object_of(url: str, about: Known) -> Object:
    if about.unpacked:
        raise Refusal(
            f'{url} is unpacked by its storage (Content-Encoding: gzip); put it there as a file that is .gz'
        )
    return Object(url, about.size, about.version)


def fits(parts: list[str], pattern: list[str]) -> bool:
    """Whether a path matches, as glob has it: ** stands for any folders, and no * for a leading dot."""
    if not pattern or not parts:
        return not pattern and not parts
    hidden = parts[0].startswith('.') and not pattern[0].startswith('.')
    if pattern == ['**']:  # what is below, and not what stands before it
        return not any(part.startswith('.') for part in parts)
    if pattern[0] == '**':
        return fits(parts, pattern[1:]) or (not hidden and fits(parts[1:], pattern))
    return not hidden and fnmatch.fnmatchcase(parts[0], pattern[0]) and fits(parts[1:], pattern[1:])
