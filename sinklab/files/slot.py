"""A small text that one at a time may put in the place of another's, on a disk or in a bucket."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from sinklab.files import regular
from sinklab.files.lock import locked
from sinklab.files.place import is_remote, storage
from sinklab.files.whole import whole

LARGEST = 1 << 20  # bytes of the text
LOCK = '.lock'  # in the place of its suffix: who changes hands
Expected = Callable[[str | None], bool]  # of what stands there; None where nothing does


class FileSlot:
    """A file that stays open: once another has been put in its place, what is written reaches nobody."""

    def __init__(self, path: Path, is_ours: Expected):
        self.path, self.is_ours, self.file = path, is_ours, None

    def read(self) -> str | None:
        try:
            return regular.read(self.path, most=LARGEST).decode(errors='replace')
        except FileNotFoundError:
            return None

    def swap(self, expected: Expected, text: str) -> bool:
        """Puts a text in the place of what is there, if that is as expected."""
        with locked(self.path.with_suffix(LOCK)):
            if not expected(self.read()):
                return False
            with whole(self.path) as unfinished:
                self.file = os.open(unfinished, os.O_RDWR | os.O_CREAT, 0o644)
                self.write(text)
        return True

    def write(self, text: str) -> None:
        """Says something else of the same length: it can be read at any time, and is kept on a full disk."""
        os.pwrite(self.file, text.encode(), 0)
        os.fsync(self.file)

    def leave(self) -> None:
        """Takes our text away."""
        with contextlib.suppress(OSError, regular.Damaged), locked(self.path.with_suffix(LOCK)):
            if self.is_ours(self.read()):
                self.path.unlink()
        os.close(self.file)


class ObjectSlot:
    """An object, written and taken away on the condition that it is the one that we have put there."""

    def __init__(self, path: Path, is_ours: Expected):
        self.path, self.is_ours, self.at, self.mark = path, is_ours, storage(path), ''

    def read(self) -> str | None:
        try:
            return self.at.cat_file(os.fspath(self.path)).decode(errors='replace')
        except FileNotFoundError:
            return None

    def swap(self, expected: Expected, text: str) -> bool:
        there, self.mark = self.look()
        return expected(there) and self.put(text)

    def write(self, text: str) -> None:
        """Says something else, also where the answer to an earlier time was lost, and what lies there is ours."""
        if not self.put(text):
            there, mark = self.look()
            if self.is_ours(there):
                self.mark = mark
                self.put(text)

    def put(self, text: str) -> bool:
        """Whether this has come into the place of what was seen there last."""
        mark = self.at.write_marked(os.fspath(self.path), text.encode(), self.mark)
        self.mark = mark or self.mark
        return bool(mark)

    def look(self) -> tuple[str | None, str]:
        """(what lies there, its mark)."""
        try:
            content, mark = self.at.read_marked(os.fspath(self.path))
        except FileNotFoundError:
            return None, ''
        return content.decode(errors='replace'), mark

    def leave(self) -> None:
        with contextlib.suppress(OSError):
            there, mark = self.look()
            if self.is_ours(there):
                self.at.remove_marked(os.fspath(self.path), mark)


def slot(path: Path, is_ours: Expected = lambda text: False) -> FileSlot | ObjectSlot:
    return (ObjectSlot if is_remote(path) else FileSlot)(path, is_ours)
