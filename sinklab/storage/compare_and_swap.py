"""Compare-and-swap files: a small text is replaced only if the current text is as expected.

They are local files or objects in a bucket.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from sinklab.storage import untrusted_files
from sinklab.storage.atomic_write import atomic_write
from sinklab.storage.file_lock import acquire_lock
from sinklab.storage.paths import get_file_system, is_remote

MAX_TEXT_BYTES = 1 << 20  # maximum bytes of the text
LOCK_SUFFIX = '.lock'  # replaces the suffix of the path, for the lock that is held while the file is replaced
TextPredicate = Callable[[str | None], bool]  # gets the current text; None if there is no file


class LocalCasFile:
    """A local file that stays open for `overwrite`.

    Once another process has replaced the file, `overwrite` writes to the old file, which nobody can read any more.
    """

    def __init__(self, path: Path, is_ours: TextPredicate):
        self.path, self.is_ours, self.descriptor = path, is_ours, None

    def read(self) -> str | None:
        try:
            return untrusted_files.read_regular_file(self.path, max_bytes=MAX_TEXT_BYTES).decode(errors='replace')
        except FileNotFoundError:
            return None

    def compare_and_swap(self, is_expected: TextPredicate, text: str) -> bool:
        """Replace the text if the current one is as expected; return whether it was."""
        with acquire_lock(self.path.with_suffix(LOCK_SUFFIX)):
            if not is_expected(self.read()):
                return False
            with atomic_write(self.path) as temporary_path:
                self.descriptor = os.open(temporary_path, os.O_RDWR | os.O_CREAT, 0o644)
                self.overwrite(text)
        return True

    def overwrite(self, text: str) -> None:
        """Overwrite the text by one of the same length.

        Readers can read the file at any time. The write also succeeds on a full disk.
        """
        os.pwrite(self.descriptor, text.encode(), 0)
        os.fsync(self.descriptor)

    def release(self) -> None:
        """Delete the file if it still has the text of this process, and close it."""
        with (
            contextlib.suppress(OSError, untrusted_files.DamagedFileError),
            acquire_lock(self.path.with_suffix(LOCK_SUFFIX)),
        ):
            if self.is_ours(self.read()):
                self.path.unlink()
        os.close(self.descriptor)


class RemoteCasFile:
    """An object that is replaced or deleted only if it still has the version that was seen last."""

    def __init__(self, path: Path, is_ours: TextPredicate):
        self.path, self.is_ours, self.file_system, self.version = path, is_ours, get_file_system(path), ''

    def read(self) -> str | None:
        try:
            return self.file_system.cat_file(os.fspath(self.path)).decode(errors='replace')
        except FileNotFoundError:
            return None

    def compare_and_swap(self, is_expected: TextPredicate, text: str) -> bool:
        current_text, self.version = self.read_with_version()
        return is_expected(current_text) and self.write_if_unchanged(text)

    def overwrite(self, text: str) -> None:
        """Overwrite the object, even if the response to an earlier write was lost."""
        if not self.write_if_unchanged(text):
            current_text, version = self.read_with_version()
            if self.is_ours(current_text):
                self.version = version
                self.write_if_unchanged(text)

    def write_if_unchanged(self, text: str) -> bool:
        """Write the object if it has the version that was seen last; return whether it had."""
        version = self.file_system.write_if_match(os.fspath(self.path), text.encode(), self.version)
        self.version = version or self.version
        return bool(version)

    def read_with_version(self) -> tuple[str | None, str]:
        """Return the text of the object and its version."""
        try:
            content, version = self.file_system.read_with_version(os.fspath(self.path))
        except FileNotFoundError:
            return None, ''
        return content.decode(errors='replace'), version

    def release(self) -> None:
        with contextlib.suppress(OSError):
            current_text, version = self.read_with_version()
            if self.is_ours(current_text):
                self.file_system.remove_if_match(os.fspath(self.path), version)


def open_cas_file(path: Path, is_ours: TextPredicate = lambda text: False) -> LocalCasFile | RemoteCasFile:
    return (RemoteCasFile if is_remote(path) else LocalCasFile)(path, is_ours)
