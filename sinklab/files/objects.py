"""Object storage as fsspec has it: asked with patience, never remembered, and told in words."""

import contextlib
import errno
import importlib
import json
from collections.abc import Callable
from typing import Any

import fsspec

from sinklab.files.patience import status
from sinklab.record import Refusal

GONE = {404, 412, 416}  # of a read that wants an object as it was


def register(scheme: str, library: str, extra: str) -> None:
    """Has fsspec, and with it etils and Orbax, reach the buckets of a scheme as is said here."""
    if scheme in MADE:
        return
    try:
        importlib.import_module(library)
    except ImportError as error:
        raise Refusal(f'{scheme}:// needs {library}; pip install "sinklab[{extra}]"') from error
    MADE[scheme] = KINDS[scheme]()
    for name in MADE[scheme].protocol:
        fsspec.register_implementation(name, MADE[scheme], clobber=True)


def gcs() -> type:
    from sinklab.files.gcs import Patient

    class Storage(Patient):
        def read_marked(self, path: str) -> tuple[bytes, str]:
            bucket, key, _ = self.split_path(path)
            headers, content = self.call('GET', 'b/{}/o/{}', bucket, key, alt='media')
            return content, headers['x-goog-generation']

        def write_marked(self, path: str, content: bytes, mark: str) -> str | None:
            bucket, key, _ = self.split_path(path)
            url = f'{self._location}/upload/storage/v1/b/{bucket}/o'
            where = dict(uploadType='media', name=key, ifGenerationMatch=mark or '0')
            try:
                _, answer = self.call('POST', url, data=content, **where)
            except FileExistsError:
                return own(self, path, content)
            return json.loads(answer)['generation']

        def read_range(self, path: str, start: int, end: int, mark: str) -> bytes:
            bucket, key, _ = self.split_path(path)
            what = dict(headers={'Range': f'bytes={start}-{end - 1}'}, alt='media', ifGenerationMatch=mark)
            return unchanged(path, end - start, lambda: self.call('GET', 'b/{}/o/{}', bucket, key, **what)[1])

        def remove_marked(self, path: str, mark: str) -> None:
            bucket, key, _ = self.split_path(path)
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                self.call('DELETE', 'b/{}/o/{}', bucket, key, ifGenerationMatch=mark)

    return Storage


def s3() -> type:
    from sinklab.files.s3 import Patient

    class Storage(Patient):
        def read_marked(self, path: str) -> tuple[bytes, str]:
            bucket, key, _ = self.split_path(path)
            answer = self.call_s3('get_object', Bucket=bucket, Key=key)
            return answer['Body'].content, answer['ETag']

        def write_marked(self, path: str, content: bytes, mark: str) -> str | None:
            bucket, key, _ = self.split_path(path)
            condition = dict(IfMatch=mark) if mark else dict(IfNoneMatch='*')
            try:
                return self.call_s3('put_object', Bucket=bucket, Key=key, Body=content, **condition)['ETag']
            except OSError as error:
                if error.errno == errno.ENXIO or status(error) not in (404, 412):
                    raise
                return own(self, path, content)

        def read_range(self, path: str, start: int, end: int, mark: str) -> bytes:
            bucket, key, _ = self.split_path(path)
            what = dict(Bucket=bucket, Key=key, Range=f'bytes={start}-{end - 1}', IfMatch=mark)
            return unchanged(path, end - start, lambda: self.call_s3('get_object', **what)['Body'].content)

        def remove_marked(self, path: str, mark: str) -> None:
            bucket, key, _ = self.split_path(path)
            try:
                self.call_s3('delete_object', Bucket=bucket, Key=key, IfMatch=mark)
            except OSError as error:
                if status(error) not in (404, 409, 412):
                    raise

    return Storage


def unchanged(path: str, size: int, read: Callable[[], bytes]) -> bytes:
    """A range of an object that is still the one that had a mark; of another, or of none, an error with ESTALE."""
    try:
        content = read()
    except OSError as error:  # gcsfs says 412 by FileExistsError
        if isinstance(error, FileExistsError | FileNotFoundError) or status(error) in GONE:
            raise OSError(errno.ESTALE, f'{path} is not what it was') from error
        raise
    if len(content) != size:
        raise OSError(errno.EIO, f'{path} gave {len(content)} bytes of {size}')
    return content


def own(at: Any, path: str, content: bytes) -> str | None:
    """The mark of what lies there if this process wrote it, in a try whose answer was lost; contents are unique."""
    try:
        found, mark = at.read_marked(path)
    except FileNotFoundError:
        return None
    return mark if found == content else None


KINDS: dict[str, Callable[[], type]] = {'gs': gcs, 's3': s3}
MADE: dict[str, type] = {}
