"""Object storage that speaks S3, as s3fs has it, asked with patience."""

import contextlib
import errno
import functools
import io
import os
from collections.abc import AsyncIterator
from typing import Any

from botocore.exceptions import ClientError
from fsspec.asyn import sync_wrapper
from s3fs import S3FileSystem
from s3fs.errors import translate_boto_error

from sinklab.files.marked import own, unchanged
from sinklab.files.patience import CONNECT, ONE, abandoned, enduring, renewed, status, unless_absent

AT_ONCE = 64  # requests of one process; botocore has 10
HELD = 64 << 20  # bytes of an object that are read whole before they are given on


class Storage(S3FileSystem):
    retries = 1  # asked again here, and by none of the libraries

    def __init__(self, *arguments: Any, **options: Any):
        waits = dict(connect_timeout=CONNECT, read_timeout=ONE, retries=dict(total_max_attempts=1))
        waits |= dict(max_pool_connections=AT_ONCE)
        super().__init__(*arguments, **dict(use_listings_cache=False, config_kwargs=waits) | options)

    async def _call_s3(self, method: str, *arguments: Any, **options: Any) -> Any:
        once = functools.partial(super()._call_s3, method, *arguments, **options)

        async def request() -> Any:
            answer = await once()
            if method == 'get_object' and ('Range' in options or answer.get('ContentLength', 0) <= HELD):
                async with answer['Body'] as body:
                    answer['Body'] = Body(await body.read())
            if method == 'delete_objects' and (left := answer.get('Errors')):
                raise translate_boto_error(ClientError({'Error': left[0]}, method))
            return answer

        return await enduring(request, f's3://{options.get("Bucket", "")}', ONE if 'Body' in options else None)

    call_s3 = sync_wrapper(_call_s3)

    async def _get_file(self, path: str, local: str, *arguments: Any, **options: Any) -> None:
        try:
            await super()._get_file(path, local, *arguments, **options)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(local)
            raise

    async def _put_file(self, local: str, path: str, **options: Any) -> None:
        request = functools.partial(super()._put_file, local, path, **options)
        await renewed(request)

    async def _abort_mpu(self, *arguments: Any) -> None:
        await abandoned(functools.partial(super()._abort_mpu, *arguments))

    async def _walk(self, path: str, *arguments: Any, **options: Any) -> AsyncIterator:
        async for found in super()._walk(path, *arguments, **dict(on_error=unless_absent) | options):
            yield found

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


class Body:
    """What an answer of S3 holds, which is here already."""

    def __init__(self, content: bytes):
        self.content, self.left = content, io.BytesIO(content)

    async def read(self, amount: int = -1) -> bytes:
        return self.left.read(amount)

    def close(self) -> None:
        self.left = io.BytesIO()
