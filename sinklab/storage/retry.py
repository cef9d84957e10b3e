"""Requests to object storage: retries, translation of errors, and conditional reads."""

import asyncio
import contextlib
import contextvars
import errno
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    stop_before_delay,
    wait_exponential,
    wait_random_exponential,
)

from sinklab.errors import format_error

DEFAULT_RETRY_SECONDS = 300.0  # seconds for which a request is retried
RETRY_SECONDS = contextvars.ContextVar('RETRY_SECONDS', default=DEFAULT_RETRY_SECONDS)
WARN_AFTER_SECONDS = 5.0  # seconds of retries until a warning is printed
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 15.0  # seconds between two attempts, doubled each time
TRANSIENT_STATUSES = {408, 429, 500, 502, 503, 504}  # HTTP statuses after which the same request may succeed later
FORBIDDEN_STATUSES = {401, 403}
CONNECT_TIMEOUT_SECONDS = 20.0  # to connect
REQUEST_TIMEOUT_SECONDS = 120.0  # without a received byte, or of an attempt that sends data
MIN_REQUEST_TIMEOUT_SECONDS = 2.0  # of an attempt within `limit_retry_seconds`, and of an attempt to abort an upload
MAX_UPLOAD_ATTEMPTS = 5  # attempts of a multipart upload
LAST_WARNING_TIMES: dict[str, float] = {}  # time of the last warning for each bucket


class StorageTimeoutError(OSError):
    """Storage did not respond in time.

    This is not a TimeoutError, because fsspec drops the errno and the message of those.
    """


class AccessDeniedError(PermissionError):
    """Credentials are missing or insufficient; a restart does not help."""


class BucketNotFoundError(OSError):
    """The bucket does not exist; a restart does not help."""


async def retry_request(
    request: Callable[[], Awaitable], bucket_url: str, timeout_seconds: float | None = None
) -> Any:
    """Send a request, and retry it as long as its errors are transient.

    The storage may have executed an attempt that got no response.

    Args:
        request: Starts an attempt.
        bucket_url: The bucket, for messages.
        timeout_seconds: The timeout of each attempt; None: no limit besides the timeouts of the connection.

    Raises:
        OSError: An error of the request that `translate_error` has translated, or a StorageTimeoutError when the time
            for retries is over.
    """
    start_time, retry_seconds = time.monotonic(), RETRY_SECONDS.get()

    async def attempt() -> Any:
        return await asyncio.wait_for(request(), get_request_timeout(timeout_seconds))

    def warn(state: RetryCallState) -> None:
        if state.seconds_since_start > WARN_AFTER_SECONDS:
            reason = format_error(state.outcome.exception())
            warn_of_retry(f'{bucket_url} does not answer ({reason}); retrying for {retry_seconds:.0f} s', bucket_url)

    # A pause is its fixed half and a random part of the other half, so that processes do not retry at the same time.
    half_pause = dict(multiplier=FIRST_PAUSE_SECONDS / 2, max=MAX_PAUSE_SECONDS / 2)
    try:
        return await AsyncRetrying(
            retry=retry_if_exception(is_transient),
            stop=stop_before_delay(retry_seconds),
            wait=wait_exponential(**half_pause) + wait_random_exponential(**half_pause),
            before_sleep=warn,
            reraise=True,
        )(attempt)
    except Exception as error:  # client libraries have no common base class
        translated = translate_error(error, bucket_url, time.monotonic() - start_time)
        if translated is error:
            raise
        raise translated from error


def get_request_timeout(timeout_seconds: float | None) -> float | None:
    """Return the timeout of one attempt; within `limit_retry_seconds`, each attempt has one."""
    retry_seconds = RETRY_SECONDS.get()
    return (
        timeout_seconds
        if retry_seconds >= DEFAULT_RETRY_SECONDS
        else min(timeout_seconds or REQUEST_TIMEOUT_SECONDS, max(retry_seconds, MIN_REQUEST_TIMEOUT_SECONDS))
    )


async def retry_upload(upload: Callable[[], Awaitable]) -> Any:
    """Upload; start again if the storage does not know the upload or has kept other data.

    The storage does not know an upload that has ended. The response to its end was then lost.

    Raises:
        OSError: The storage has kept other data in the last attempt.
    """
    try:
        return await AsyncRetrying(
            retry=retry_if_exception(is_upload_lost) | retry_if_exception(is_upload_corrupted),
            stop=stop_after_attempt(MAX_UPLOAD_ATTEMPTS),
            reraise=True,
        )(upload)
    except Exception as error:
        if is_upload_corrupted(error):
            raise OSError(errno.EIO, 'the stored object differs from what was uploaded') from error
        raise


def is_upload_lost(error: BaseException) -> bool:
    return 'upload_id=' in str(error) or get_http_status(error) == 410


def is_upload_corrupted(error: BaseException) -> bool:
    return bool(get_class_names(error) & CHECKSUM_ERRORS)


async def try_abort_upload(request: Callable[[], Awaitable]) -> Any:
    """Abort an incomplete upload, without retries; otherwise the bucket's rules delete it."""
    with contextlib.suppress(Exception):
        return await asyncio.wait_for(request(), MIN_REQUEST_TIMEOUT_SECONDS)


def warn_of_retry(text: str, bucket_url: str) -> None:
    """Print a warning once for all requests that wait for the same bucket."""
    if time.monotonic() - LAST_WARNING_TIMES.get(bucket_url, -RETRY_SECONDS.get()) >= RETRY_SECONDS.get():
        LAST_WARNING_TIMES[bucket_url] = time.monotonic()
        print(text, file=sys.stderr)


def is_transient(error: BaseException) -> bool:
    """Return whether the same request may succeed later: the storage is busy, or was not reached."""
    if any(
        get_class_names(cause) & CONNECTION_ERRORS or getattr(cause, 'retryable', None) is True
        for cause in iterate_causes(error)
    ):
        return True
    if get_http_status(error) in TRANSIENT_STATUSES:
        return True
    return not get_http_status(error) and isinstance(error, TimeoutError | ConnectionError)


def translate_error(error: Exception, bucket_url: str, waited_seconds: float) -> Exception:
    """Translate an error of a client library into an OSError; return an unknown error as it is."""
    if is_transient(error):
        return StorageTimeoutError(
            errno.ETIMEDOUT, f'{bucket_url} has not answered for {waited_seconds:.0f} s ({format_error(error)})'
        )
    if get_class_names(error) & CREDENTIAL_ERRORS:
        return AccessDeniedError(errno.EACCES, f'no credentials found for {bucket_url} ({format_error(error)})')
    if is_forbidden(error):
        return AccessDeniedError(errno.EACCES, f'{bucket_url} refuses this account ({format_error(error)})')
    if get_class_names(error) & LIBRARY_ERRORS or str(error).startswith('Bad Request'):
        return OSError(errno.EINVAL, f'{bucket_url} rejects this request ({format_error(error)})')
    return error


def is_forbidden(error: Exception) -> bool:
    return (
        get_http_status(error) in FORBIDDEN_STATUSES
        or isinstance(error, PermissionError)
        or str(error).startswith('Forbidden')
    )


def make_bucket_error(bucket_url: str) -> BucketNotFoundError:
    return BucketNotFoundError(errno.ENXIO, f'the bucket {bucket_url} does not exist')


def iterate_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    while error:
        yield error
        error = error.__cause__


def get_class_names(error: BaseException) -> set[tuple[str, str]]:
    return {(base.__module__.partition('.')[0], base.__name__) for base in type(error).__mro__}


def get_http_status(error: BaseException) -> int:
    """Return the HTTP status of an error or of its causes; 0 if there is none."""
    for cause in iterate_causes(error):
        http_status = getattr(cause, 'code', None) or getattr(cause, 'status', None)
        if isinstance(http_status, int | str) and str(http_status).isdigit():
            return int(http_status)
    return 0


# Classes as (package, name), so that no client library is imported unless a bucket is used.
CHECKSUM_ERRORS = {('gcsfs', 'ChecksumError')}
CONNECTION_ERRORS = {
    ('aiohttp', 'ClientConnectionError'),
    ('aiohttp', 'ClientPayloadError'),
    ('google', 'TransportError'),  # the service that renews tokens does not respond
    ('requests', 'ConnectionError'),
    ('requests', 'ProxyError'),
    ('requests', 'Timeout'),
}
CREDENTIAL_ERRORS = {('google', 'GoogleAuthError')}
LIBRARY_ERRORS = {
    ('aiohttp', 'ClientError'),
    ('gcsfs', 'HttpError'),
    ('requests', 'RequestException'),
}


CHANGED_STATUSES = {404, 412, 416}  # HTTP statuses of a conditional read of an object that has changed


def read_if_match(path: str, size: int, read: Callable[[], bytes]) -> bytes:
    """Read a range of an object if the object has the expected version.

    Args:
        path: The path, for messages.
        size: The number of bytes that the range has.
        read: Sends the conditional request.

    Raises:
        OSError: With the errno ESTALE if the object has another version, with EIO if the response has another size.
    """
    try:
        content = read()
    except OSError as error:  # gcsfs raises FileExistsError for status 412
        if isinstance(error, FileExistsError | FileNotFoundError) or get_http_status(error) in CHANGED_STATUSES:
            raise OSError(errno.ESTALE, f'{path} has changed') from error
        raise
    if len(content) != size:
        raise OSError(errno.EIO, f'{path} returned {len(content)} of {size} bytes')
    return content


def find_own_version(file_system: Any, path: str, content: bytes) -> str | None:
    """Return the version of an object that this process wrote in an attempt whose response was lost.

    The version is None if the object does not exist or has another content.
    """
    try:
        stored, version = file_system.read_with_version(path)
    except FileNotFoundError:
        return None
    return version if stored == content else None
