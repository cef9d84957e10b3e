"""Requests to object storage: asked again while they may be answered yet; of those that are not it is said why."""

import asyncio
import contextlib
import contextvars
import errno
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

USUAL = 300.0  # seconds in which a request is tried again
PATIENCE = contextvars.ContextVar('PATIENCE', default=USUAL)
TOLD = 5.0  # seconds after which that is told
PAUSE, LONGEST = 0.5, 15.0  # seconds between two tries, doubled from one to the next
TRANSIENT = {408, 429, 500, 502, 503, 504}  # of HTTP: the same request may be answered later
FORBIDDEN = {401, 403}
CONNECT, ONE = 20.0, 120.0  # seconds until a connection is there; without a byte, or of a request that sends many
RENEWED = 5  # times that an upload of many parts is begun
LAST: dict[str, float] = {}  # when it was told of a storage that it does not answer


class Unanswered(OSError):
    """No TimeoutError: of those fsspec keeps neither the number nor the words."""


class Denied(PermissionError):
    """What no other start mends: no credentials, or none that are enough."""


class NoBucket(OSError):
    """Nor this."""


async def enduring(request: Callable[[], Awaitable], where: str, seconds: float | None = None) -> Any:
    """The answer to a request, of so many seconds at most, as soon as there is one; or an OSError with an errno.

    Of a try without an answer nobody knows whether the storage has heard it.
    """
    begun, pause = time.monotonic(), PAUSE
    while True:
        try:
            return await asyncio.wait_for(request(), bound(seconds))
        except Exception as error:  # of the libraries below, which have no kind in common
            waited, patience = time.monotonic() - begun, PATIENCE.get()
            if not is_transient(error) or waited + pause > patience:
                said = in_words(error, where, waited)
                if said is error:
                    raise
                raise said from error
            if waited > TOLD:
                tell(f'{where} does not answer ({line(error)}); trying for {patience:.0f} s', where)
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, LONGEST)


def bound(seconds: float | None) -> float | None:
    """Of one request; where nobody should wait for long, also of one whose end is not known."""
    patience = PATIENCE.get()
    return seconds if patience >= USUAL else min(seconds or ONE, max(patience, CONNECT / 10))


async def renewed(request: Callable[[], Awaitable]) -> Any:
    """An upload, begun again if the storage no longer knows of it: it has ended, and the answer was lost."""
    for left in reversed(range(RENEWED)):
        try:
            return await request()
        except Exception as error:
            gone = code(error) == 'NoSuchUpload' or 'upload_id=' in str(error) or status(error) == 410
            broken = kinds(error) & BROKEN
            if not left and broken:
                raise OSError(errno.EIO, 'the storage has kept something else than it was given') from error
            if not left or not (gone or broken):
                raise
    return None


async def abandoned(request: Callable[[], Awaitable]) -> Any:
    """Takes back what was uploaded by halves, if that can be done at once; otherwise the bucket's rules do."""
    token = PATIENCE.set(0.0)
    try:
        with contextlib.suppress(Exception):
            return await enduring(request, '', CONNECT)
    finally:
        PATIENCE.reset(token)


def unless_absent(error: Exception) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def tell(text: str, where: str) -> None:
    """Says once what holds for all the requests that wait for the same."""
    if time.monotonic() - LAST.get(where, -PATIENCE.get()) >= PATIENCE.get():
        LAST[where] = time.monotonic()
        print(text, file=sys.stderr)


def is_transient(error: BaseException) -> bool:
    """Whether the same request may be answered later: the storage is busy, or was not reached."""
    if any(kinds(cause) & UNREACHED or getattr(cause, 'retryable', None) is True for cause in causes(error)):
        return True
    if code(error) in BUSY or status(error) in TRANSIENT:
        return True
    return not status(error) and isinstance(error, TimeoutError | ConnectionError)


def in_words(error: Exception, where: str, waited: float) -> Exception:
    """What an error is for those above: of the system's kinds."""
    if is_transient(error):
        return Unanswered(errno.ETIMEDOUT, f'{where} has not answered for {waited:.0f} s ({line(error)})')
    if kinds(error) & UNKNOWN:
        return Denied(errno.EACCES, f'no credentials for {where} are found ({line(error)})')
    if code(error) == 'NoSuchBucket':
        return no_bucket(where)
    if is_forbidden(error):
        return Denied(errno.EACCES, f'{where} refuses this account ({line(error)})')
    if kinds(error) & FOREIGN or str(error).startswith('Bad Request'):
        return OSError(errno.EINVAL, f'{where} does not take this request ({line(error)})')
    return error


def is_forbidden(error: Exception) -> bool:
    return (
        status(error) in FORBIDDEN
        or code(error) in EXPIRED
        or isinstance(error, PermissionError)
        or str(error).startswith('Forbidden')
    )


def no_bucket(where: str) -> NoBucket:
    return NoBucket(errno.ENXIO, f'the bucket {where} is not there')


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and what it comes from."""
    while error:
        yield error
        error = error.__cause__


def kinds(error: BaseException) -> set[tuple[str, str]]:
    return {(kind.__module__.partition('.')[0], kind.__name__) for kind in type(error).__mro__}


def status(error: BaseException) -> int:
    """The number of HTTP that an error stands for, or 0."""
    for cause in causes(error):
        number = getattr(cause, 'code', None) or getattr(cause, 'status', None)
        if isinstance(response := getattr(cause, 'response', None), dict):
            number = response.get('ResponseMetadata', {}).get('HTTPStatusCode')
        if isinstance(number, int | str) and str(number).isdigit():
            return int(number)
    return 0


def code(error: BaseException) -> str:
    """The word of S3 for an error, or ''."""
    answers = (getattr(cause, 'response', None) for cause in causes(error))
    return next((str(answer.get('Error', {}).get('Code')) for answer in answers if isinstance(answer, dict)), '')


def line(error: BaseException) -> str:
    return ' '.join(str(error).split())[:120] or type(error).__name__


# By (package, class): none of them is imported before a bucket is named.
BROKEN = {('gcsfs', 'ChecksumError')}
UNREACHED = {
    ('aiohttp', 'ClientConnectionError'),
    ('aiohttp', 'ClientPayloadError'),
    ('botocore', 'HTTPClientError'),
    ('botocore', 'ConnectionError'),
    ('botocore', 'ResponseParserError'),  # of an answer that was cut
    ('botocore', 'FlexibleChecksumError'),
    ('botocore', 'CredentialRetrievalError'),  # there are credentials, and whoever renews them does not answer
    ('botocore', 'MetadataRetrievalError'),
    ('google', 'TransportError'),  # as above, of tokens
    ('requests', 'ConnectionError'),
    ('requests', 'ProxyError'),
    ('requests', 'Timeout'),
}
# The last is of two who write the same object at the same time.
BUSY = {'RequestTimeout', 'IncompleteBody', 'InternalError', 'SlowDown', 'OperationAborted'}
BUSY |= {'ServiceUnavailable', 'XAmzContentSHA256Mismatch', 'BadDigest', 'ConditionalRequestConflict'}
EXPIRED = {'ExpiredToken', 'InvalidToken', 'TokenRefreshRequired'}
UNKNOWN = {
    ('google', 'GoogleAuthError'),
    ('botocore', 'NoCredentialsError'),
    ('botocore', 'PartialCredentialsError'),
    ('botocore', 'NoAuthTokenError'),
    ('botocore', 'ProfileNotFound'),
    ('botocore', 'SSOError'),
}
FOREIGN = {
    ('aiohttp', 'ClientError'),
    ('botocore', 'BotoCoreError'),
    ('botocore', 'ClientError'),
    ('gcsfs', 'HttpError'),
    ('requests', 'RequestException'),
}
