"""S3-compatible object storage through s3fs, with retries and conditional requests."""

import errno
import functools
import io
from collections.abc import AsyncIterator
from typing import Any

from botocore.exceptions import ClientError
from fsspec.asyn import sync_wrapper
from s3fs import S3FileSystem
from s3fs.errors import translate_boto_error

from sinklab.storage.retry import (
    CONNECT_TIMEOUT_SECONDS,
    REQUEST_TIMEOUT_SECONDS,
    find_own_version,
    get_http_status,
    read_if_match,
    retry_request,
    retry_upload,
    try_abort_upload,
)

MAX_CONNECTIONS = 64  # concurrent requests of one process; the default of botocore is 10
MAX_BUFFERED_BYTES = 64 << 20  # up to this size, an object is read as a whole in each attempt


def raise_unless_absent(error: Exception) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


class Storage(S3FileSystem):
    """The file system of s3:// URLs."""

    retries = 1  # attempts by s3fs: `retry_request` retries, and the libraries do not

    def __init__(self, *arguments: Any, **options: Any):
        client_config = dict(
            connect_timeout=CONNECT_TIMEOUT_SECONDS,
            read_timeout=REQUEST_TIMEOUT_SECONDS,
            retries=dict(total_max_attempts=1),
        )
        client_config |= dict(max_pool_connections=MAX_CONNECTIONS)
        super().__init__(*arguments, **dict(use_listings_cache=False, config_kwargs=client_config) | options)

    # Private: each request is one `_call_s3`; the options of s3fs limit the number of attempts, not their time.
    async def _call_s3(self, method: str, *arguments: Any, **options: Any) -> Any:
        send_once = functools.partial(super()._call_s3, method, *arguments, **options)
        if method == 'abort_multipart_upload':
            return await try_abort_upload(send_once)

        async def request() -> Any:
            response = await send_once()
            if method == 'get_object' and (
                'Range' in options or response.get('ContentLength', 0) <= MAX_BUFFERED_BYTES
            ):
                async with response['Body'] as body:
                    response['Body'] = BufferedBody(await body.read())
            if method == 'delete_objects' and (errors := response.get('Errors')):
                raise translate_boto_error(ClientError({'Error': errors[0]}, method))
            return response

        return await retry_request(
            request, f's3://{options.get("Bucket", "")}', REQUEST_TIMEOUT_SECONDS if 'Body' in options else None
        )

    call_s3 = sync_wrapper(_call_s3)

    async def _put_file(self, local: str, path: str, **options: Any) -> None:
        request = functools.partial(super()._put_file, local, path, **options)
        await retry_upload(request)

    async def _walk(self, path: str, *arguments: Any, **options: Any) -> AsyncIterator:
        async for entry in super()._walk(path, *arguments, **dict(on_error=raise_unless_absent) | options):
            yield entry

    def read_with_version(self, path: str) -> tuple[bytes, str]:
        bucket, key, _ = self.split_path(path)
        response = self.call_s3('get_object', Bucket=bucket, Key=key)
        return response['Body'].content, response['ETag']

    def write_if_match(self, path: str, content: bytes, version: str) -> str | None:
        bucket, key, _ = self.split_path(path)
        condition = dict(IfMatch=version) if version else dict(IfNoneMatch='*')
        try:
            return self.call_s3('put_object', Bucket=bucket, Key=key, Body=content, **condition)['ETag']
        except OSError as error:
            if error.errno == errno.ENXIO or get_http_status(error) not in (404, 412):
                raise
            return find_own_version(self, path, content)

    def read_range(self, path: str, start: int, end: int, version: str) -> bytes:
        bucket, key, _ = self.split_path(path)
        parameters = dict(Bucket=bucket, Key=key, Range=f'bytes={start}-{end - 1}', IfMatch=version)
        return read_if_match(path, end - start, lambda: self.call_s3('get_object', **parameters)['Body'].content)

    def remove_if_match(self, path: str, version: str) -> None:
        bucket, key, _ = self.split_path(path)
        try:
            self.call_s3('delete_object', Bucket=bucket, Key=key, IfMatch=version)
        except OSError as error:
            if get_http_status(error) not in (404, 409, 412):
                raise


class BufferedBody:
    """The body of an S3 response, which is already in memory."""

    def __init__(self, content: bytes):
        self.content, self.buffer = content, io.BytesIO(content)

    async def read(self, amount: int = -1) -> bytes:
        return self.buffer.read(amount)

    def close(self) -> None:
        self.buffer = io.BytesIO()
