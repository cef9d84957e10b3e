"""Google Cloud Storage through gcsfs, with retries and conditional requests."""

import asyncio
import contextlib
import errno
import functools
import inspect
import json
import logging
import os
import re
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import google.auth
from fsspec.asyn import sync_wrapper
from gcsfs.core import GCSFileSystem

from sinklab.errors import format_error
from sinklab.storage.retry import (
    CONNECT_TIMEOUT_SECONDS,
    REQUEST_TIMEOUT_SECONDS,
    AccessDeniedError,
    find_own_version,
    make_bucket_error,
    read_if_match,
    retry_request,
    retry_upload,
    try_abort_upload,
)

MAX_DELETIONS = 64  # concurrent deletions

for name in ('gcsfs', 'google.auth'):  # this module reports their errors
    logging.getLogger(name).setLevel(logging.CRITICAL)


class Storage(GCSFileSystem):
    """The file system of gs:// URLs."""

    # Private: the decorator of gcsfs makes six attempts, and no option changes their number.
    _request = inspect.unwrap(GCSFileSystem._request)

    def __init__(self, *arguments: Any, **options: Any):
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_TIMEOUT_SECONDS, sock_read=REQUEST_TIMEOUT_SECONDS
        )
        defaults = dict(use_listings_cache=False, requests_timeout=timeout)
        super().__init__(*arguments, **dict(defaults, token=options.get('token') or get_credentials()) | options)

    # Private: each request is one `_call`; retries of the public methods would repeat whole listings and uploads.
    async def _call(self, method: str, path: str, *arguments: Any, **options: Any) -> Any:
        request = functools.partial(super()._call, method, path, *arguments, **options)
        if method == 'DELETE' and path.startswith('http'):
            return await try_abort_upload(request)
        bucket_url = f'gs://{parse_bucket_name(path, *arguments)}'
        if method == 'POST' and 'upload_id=' in path:
            request = functools.partial(require_part_kept, request)
        timeout_seconds = REQUEST_TIMEOUT_SECONDS if options.get('data') is not None else None
        try:
            return await retry_request(request, bucket_url, timeout_seconds)
        except FileNotFoundError as error:
            if method == 'DELETE':
                return {}, b''  # deleted by an earlier attempt, perhaps
            if (method, path) == ('GET', 'b/{}/o') or is_upload_start(method, path):
                raise make_bucket_error(bucket_url) from error
            raise
        except PermissionError as error:
            if self.credentials.credentials is None and self.on_google:
                raise AccessDeniedError(errno.EACCES, f'no credentials found for {bucket_url}') from error
            raise

    call = sync_wrapper(_call)

    async def _put_file(self, local: str, path: str, **options: Any) -> None:
        request = functools.partial(super()._put_file, local, path, **dict(consistency='md5') | options)
        await retry_upload(request)

    async def _rm(
        self, path: str | list[str], recursive: bool = False, maxdepth: int | None = None, **_: Any
    ) -> None:
        """Delete files one by one: a batch reports errors in another form, and emulators support none."""
        slots = asyncio.Semaphore(MAX_DELETIONS)

        async def delete(file: str) -> None:
            async with slots:
                await self._rm_file(file)

        paths = await self._expand_path(path, recursive=recursive, maxdepth=maxdepth)
        results = await asyncio.gather(*map(delete, paths), return_exceptions=True)
        for error in filter(None, results):
            raise error

    rm = sync_wrapper(_rm)

    async def _isdir(self, path: str) -> bool:
        try:
            return (await self._info(path))['type'] == 'directory'
        except FileNotFoundError:  # any other error is raised
            return False

    def read_with_version(self, path: str) -> tuple[bytes, str]:
        bucket, key, _ = self.split_path(path)
        headers, content = self.call('GET', 'b/{}/o/{}', bucket, key, alt='media')
        return content, headers['x-goog-generation']

    def write_if_match(self, path: str, content: bytes, version: str) -> str | None:
        bucket, key, _ = self.split_path(path)
        url = self.base.replace('/storage/v1/', f'/upload/storage/v1/b/{bucket}/o')  # `base` ends with /storage/v1/
        parameters = dict(uploadType='media', name=key, ifGenerationMatch=version or '0')
        try:
            _, response = self.call('POST', url, data=content, **parameters)
        except FileExistsError:
            return find_own_version(self, path, content)
        return json.loads(response)['generation']

    def read_range(self, path: str, start: int, end: int, version: str) -> bytes:
        bucket, key, _ = self.split_path(path)
        parameters = dict(headers={'Range': f'bytes={start}-{end - 1}'}, alt='media', ifGenerationMatch=version)
        return read_if_match(path, end - start, lambda: self.call('GET', 'b/{}/o/{}', bucket, key, **parameters)[1])

    def remove_if_match(self, path: str, version: str) -> None:
        bucket, key, _ = self.split_path(path)
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            self.call('DELETE', 'b/{}/o/{}', bucket, key, ifGenerationMatch=version)


def get_credentials() -> Any:
    return 'anon' if os.environ.get('STORAGE_EMULATOR_HOST') else find_credentials()


@functools.cache
def find_credentials() -> Any:
    """Return the credentials that google.auth finds; `anon` if there are none, for public objects.

    Raises:
        AccessDeniedError: GOOGLE_APPLICATION_CREDENTIALS is set and does not lead to credentials.
    """
    try:
        return google.auth.default(scopes=['https://www.googleapis.com/auth/devstorage.full_control'])[0]
    except google.auth.exceptions.DefaultCredentialsError as error:
        if 'GOOGLE_APPLICATION_CREDENTIALS' not in os.environ:
            return 'anon'
        message = f'the credentials of GOOGLE_APPLICATION_CREDENTIALS are invalid ({format_error(error)})'
        raise AccessDeniedError(errno.EACCES, message) from error


def is_upload_start(method: str, path: str) -> bool:
    return method == 'POST' and '/upload/' in path.partition('?')[0] and 'upload_id=' not in path


async def require_part_kept(request: Callable[[], Awaitable]) -> Any:
    """Send a part of an upload; raise if the storage has kept nothing of it.

    The response to a part that was kept has a range.

    Raises:
        ConnectionResetError: Nothing was kept. The part can be sent again.
    """
    headers, content = await request()
    if not content and 'Range' not in headers:
        raise ConnectionResetError('no byte of a part was stored')
    return headers, content


def parse_bucket_name(path: str, *arguments: str) -> str:
    """Return the bucket name in the path of a request to GCS; '' if there is none."""
    name = re.search(r'(?:^|/)b/([^/?]+)', path)
    return '' if not name else arguments[0] if name[1] == '{}' else name[1]
