"""Object storage as fsspec has it, asked again while it does not answer, never remembered, and told in words."""

import asyncio
import contextvars
import errno
import functools
import importlib
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import fsspec
from fsspec.asyn import sync

from sinklab.record import Refusal

PATIENCE = contextvars.ContextVar('PATIENCE', default=300.0)  # seconds in which a request is tried again
TOLD = 5.0  # seconds after which that is told
PAUSE, LONGEST = 0.5, 15.0  # seconds between two tries, doubled from one to the next
TRANSIENT = {408, 429, 500, 502, 503, 504}  # of HTTP: the same request may be answered later
FORBIDDEN = {401, 403}
GONE = {404, 412, 416}  # of a read that wants an object as it was
ONE = 120.0  # seconds of one request
AT_ONCE = dict(max_pool_connections=64)  # requests of one process; botocore has 10


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
    from gcsfs.core import GCSFileSystem

    class Storage(GCSFileSystem):
        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **dict(use_listings_cache=False, requests_timeout=ONE) | options)

        async def _call(self, *arguments: Any, **options: Any) -> Any:
            return await enduring(functools.partial(super()._call, *arguments, **options), 'gs://')

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
                return None
            return json.loads(answer)['generation']

        def read_range(self, path: str, start: int, end: int, mark: str) -> bytes:
            return sync(self.loop, unchanged, self._read_range, path, start, end, mark)

        async def _read_range(self, path: str, start: int, end: int, mark: str) -> bytes:
            bucket, key, _ = self.split_path(path)
            what = dict(headers={'Range': f'bytes={start}-{end - 1}'}, alt='media', ifGenerationMatch=mark)
            _, content = await self._call('GET', 'b/{}/o/{}', bucket, key, **what)
            return content

    return Storage


def s3() -> type:
    from s3fs import S3FileSystem

    class Storage(S3FileSystem):
        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **dict(use_listings_cache=False, config_kwargs=AT_ONCE) | options)

        async def _call_s3(self, *arguments: Any, **options: Any) -> Any:
            return await enduring(functools.partial(super()._call_s3, *arguments, **options), 's3://')

        def read_marked(self, path: str) -> tuple[bytes, str]:
            while True:
                before, content = self.info(path)['ETag'], self.cat_file(path)
                if self.info(path)['ETag'] == before:
                    return content, before

        def write_marked(self, path: str, content: bytes, mark: str) -> str | None:
            bucket, key, _ = self.split_path(path)
            condition = dict(IfMatch=mark) if mark else dict(IfNoneMatch='*')
            try:
                return self.call_s3('put_object', Bucket=bucket, Key=key, Body=content, **condition)['ETag']
            except OSError as error:
                if status(error) in (404, 409, 412):
                    return None
                raise

        def read_range(self, path: str, start: int, end: int, mark: str) -> bytes:
            read = functools.partial(self._read_range, super()._call_s3)
            return sync(self.loop, unchanged, read, path, start, end, mark)

        async def _read_range(self, call: Callable, path: str, start: int, end: int, mark: str) -> bytes:
            bucket, key, _ = self.split_path(path)

            async def whole() -> bytes:  # a connection may be lost in the body, too
                what = dict(Bucket=bucket, Key=key, Range=f'bytes={start}-{end - 1}', IfMatch=mark)
                answer = await call('get_object', **what)
                return await answer['Body'].read()

            return await enduring(whole, 's3://')

    return Storage


async def unchanged(read: Callable[..., Awaitable[bytes]], path: str, start: int, end: int, mark: str) -> bytes:
    """A range of an object that is still the one that had a mark; of another, or of none, an error with ESTALE."""
    try:
        content = await read(path, start, end, mark)
    except Exception as error:  # gcsfs says 412 by FileExistsError
        if isinstance(error, FileExistsError | FileNotFoundError) or status(error) in GONE:
            raise OSError(errno.ESTALE, f'{path} is not what it was') from error
        raise
    if len(content) != end - start:
        raise OSError(errno.EIO, f'{path} gave {len(content)} bytes of {end - start}')
    return content


async def enduring(request: Callable[[], Awaitable], where: str) -> Any:
    """The answer to a request, as soon as there is one; what cannot be answered is said in words."""
    begun, pause, told = time.monotonic(), PAUSE, False
    while True:
        try:
            return await request()
        except Exception as error:  # of the libraries below, which have no kind in common
            waited, patience = time.monotonic() - begun, PATIENCE.get()
            if not is_transient(error) or waited + pause > patience:
                raise in_words(error, where, waited) from error
            if waited > TOLD and not told:
                told = True
                print(f'{where} does not answer ({line(error)}); trying for {patience:.0f} s', file=sys.stderr)
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, LONGEST)


def status(error: BaseException) -> int:
    """The number of HTTP that an error stands for, or 0."""
    while error:
        code = getattr(error, 'code', None) or getattr(error, 'status', None)
        response = getattr(error, 'response', None)
        if isinstance(response, dict):
            code = response.get('ResponseMetadata', {}).get('HTTPStatusCode')
        if isinstance(code, int | str) and str(code).isdigit():
            return int(code)
        error = error.__cause__
    return 0


def is_transient(error: Exception) -> bool:
    """Whether the same request may be answered later: the storage is busy, or was not reached."""
    if number := status(error):
        return number in TRANSIENT
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    kinds = {(kind.__module__.partition('.')[0], kind.__name__) for kind in type(error).__mro__}
    return bool(kinds & UNREACHED)


def in_words(error: Exception, where: str, waited: float) -> Exception:
    """What an error is for those above: of the system's kinds where it is about access or about time."""
    if is_transient(error):
        return TimeoutError(errno.ETIMEDOUT, f'{where} has not answered for {waited:.0f} s ({line(error)})')
    kinds = {(kind.__module__.partition('.')[0], kind.__name__) for kind in type(error).__mro__}
    if kinds & UNKNOWN:
        return PermissionError(errno.EACCES, f'no credentials for {where} are found ({line(error)})')
    if status(error) in FORBIDDEN or isinstance(error, PermissionError) or str(error).startswith('Forbidden'):
        return PermissionError(errno.EACCES, f'{where} refuses this account ({line(error)})')
    return error


def line(error: BaseException) -> str:
    return ' '.join(str(error).split())[:120] or type(error).__name__


# By (package, class): none of them is imported before a bucket is named.
UNREACHED = {
    ('aiohttp', 'ClientConnectionError'),
    ('aiohttp', 'ClientPayloadError'),
    ('botocore', 'HTTPClientError'),
    ('botocore', 'ConnectionError'),
    ('requests', 'ConnectionError'),
    ('requests', 'ProxyError'),
    ('requests', 'Timeout'),
}
UNKNOWN = {
    ('google', 'GoogleAuthError'),
    ('botocore', 'NoCredentialsError'),
    ('botocore', 'PartialCredentialsError'),
    ('botocore', 'NoAuthTokenError'),
}
KINDS: dict[str, Callable[[], type]] = {'gs': gcs, 's3': s3}
MADE: dict[str, type] = {}
