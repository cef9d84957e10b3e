"""Google's object storage as gcsfs has it, asked with patience."""

import contextlib
import errno
import functools
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import google.auth
from fsspec.asyn import _run_coros_in_chunks, sync_wrapper
from gcsfs.core import GCSFileSystem

from sinklab.files.marked import own, unchanged
from sinklab.files.patience import CONNECT, ONE, Denied, abandoned, enduring, line, no_bucket, renewed, unless_absent

AT_ONCE = 64  # deletions

for name in ('gcsfs', 'google.auth'):  # what they have to say is said here
    logging.getLogger(name).setLevel(logging.CRITICAL)


def alone(method: Callable) -> Callable:
    """A method without what decorates it."""
    return getattr(method, '__wrapped__', method)


class Storage(GCSFileSystem):
    # Without their own tries, six at each request.
    _request = alone(GCSFileSystem._request)
    _get_file_concurrent = alone(GCSFileSystem._get_file_concurrent)

    def __init__(self, *arguments: Any, **options: Any):
        waits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT, sock_read=ONE)
        given = dict(use_listings_cache=False, requests_timeout=waits)
        super().__init__(*arguments, **dict(given, token=options.get('token') or credentials()) | options)

    async def _call(self, method: str, path: str, *arguments: Any, **options: Any) -> Any:
        request = functools.partial(super()._call, method, path, *arguments, **options)
        if method == 'DELETE' and path.startswith('http'):
            return await abandoned(request)
        where = f'gs://{bucket_of(path, *arguments)}'
        part = functools.partial(kept, request) if method == 'POST' and 'upload_id=' in path else request
        try:
            return await enduring(part, where, ONE if options.get('data') is not None else None)
        except FileNotFoundError as error:
            if method == 'DELETE':
                return {}, b''  # by an earlier try, perhaps, whose answer was lost; S3 does not tell either
            if (method, path) == ('GET', 'b/{}/o') or begins_upload(method, path):
                raise no_bucket(where) from error
            raise
        except PermissionError as error:
            if self.credentials.credentials is None and self.on_google:
                raise Denied(errno.EACCES, f'no credentials for {where} are found') from error
            raise

    call = sync_wrapper(_call)

    async def _get_file_request(self, path: str, *arguments: Any, **options: Any) -> Any:
        request = functools.partial(alone(GCSFileSystem._get_file_request), self, path, *arguments, **options)
        return await enduring(request, f'gs://{self.split_path(path)[0]}')

    async def _put_file(self, local: str, path: str, **options: Any) -> None:
        request = functools.partial(super()._put_file, local, path, **dict(consistency='md5') | options)
        await renewed(request)

    async def _delete_files(self, paths: list[str], _: int) -> list:
        """One by one: of a batch, errors of single objects come in other words, and emulators know none."""
        return await _run_coros_in_chunks(
            [self._rm_file(path) for path in paths], batch_size=AT_ONCE, return_exceptions=True
        )

    async def _isdir(self, path: str) -> bool:
        try:
            return (await self._info(path))['type'] == 'directory'
        except FileNotFoundError:  # and nothing else
            return False

    async def _walk(self, path: str, *arguments: Any, **options: Any) -> AsyncIterator:
        async for inner in super()._walk(path, *arguments, **dict(on_error=unless_absent) | options):
            yield inner

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


def credentials() -> Any:
    return 'anon' if os.environ.get('STORAGE_EMULATOR_HOST') else found()


@functools.cache
def found() -> Any:
    """The credentials that Google's library finds, or none: what is public can be read without."""
    try:
        return google.auth.default(scopes=['https://www.googleapis.com/auth/devstorage.full_control'])[0]
    except google.auth.exceptions.DefaultCredentialsError as error:
        if 'GOOGLE_APPLICATION_CREDENTIALS' not in os.environ:
            return 'anon'
        said = f'the credentials of GOOGLE_APPLICATION_CREDENTIALS are none ({line(error)})'
        raise Denied(errno.EACCES, said) from error


def begins_upload(method: str, path: str) -> bool:
    return method == 'POST' and '/upload/' in path.partition('?')[0] and 'upload_id=' not in path


async def kept(request: Callable[[], Awaitable]) -> Any:
    """The answer to a part of an upload; one without a range says that nothing of it was kept."""
    headers, content = await request()
    if not content and 'Range' not in headers:
        raise ConnectionResetError('nothing of a part was kept')
    return headers, content


def bucket_of(path: str, *arguments: str) -> str:
    """Whose bucket a request of GCS is about."""
    name = re.search(r'(?:^|/)b/([^/?]+)', path)
    return '' if not name else arguments[0] if name[1] == '{}' else name[1]
