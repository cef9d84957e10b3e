"""Error messages for buckets, credentials and missing libraries."""

import errno
import itertools
import os
import subprocess
import sys
import time

import aiohttp
import botocore.exceptions
import botocore.parsers
import gcsfs.retry
import google.auth.exceptions
import pytest
import requests
from emulators import Answer
from storage_failures import ASKED, always, read, write

from sinklab.errors import UserError
from sinklab.install_commands import format_extra_command
from sinklab.storage import retry
from sinklab.storage.paths import parse_path

pytestmark = pytest.mark.usefixtures('impatient')


@pytest.mark.parametrize('asked', ASKED)
def test_permission_error_is_raised_without_long_retry(bucket, asked):
    path = parse_path(f'{bucket.url}/folder/x')
    write(path)
    begun, known = time.monotonic(), len(bucket.proxy.requests)
    with bucket.proxy.treating(always(Answer(status=403))), pytest.raises((OSError, UserError)) as refused:
        ASKED[asked](path)
    assert time.monotonic() - begun < 2.0
    assert len(bucket.proxy.requests) - known <= 3
    error = refused.value.__cause__ if isinstance(refused.value, UserError) else refused.value
    assert error.errno == errno.EACCES
    assert bucket.url in str(refused.value)


def test_missing_bucket_is_reported_by_every_operation(bucket):
    path = parse_path(f'{bucket.url}-not/folder/x')
    for asked in ('exists', 'names', 'entries', 'finished', 'write_if_match'):
        with pytest.raises(OSError, match=f'{bucket.url}-not') as refused:
            ASKED[asked](path)
        assert refused.value.errno == errno.ENXIO


def test_missing_object_raises_file_not_found_without_delay(bucket):
    path = parse_path(f'{bucket.url}/x')
    begun = time.monotonic()
    with pytest.raises(FileNotFoundError):
        read(path)
    assert not path.exists()
    assert time.monotonic() - begun < 2.0


def run(code, **variables):
    """Return (output, seconds) of a process without user credentials."""
    known = {name: os.environ[name] for name in ('PATH', 'PYTHONPATH', 'LD_LIBRARY_PATH') if name in os.environ}
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, '-c', code],
        env=known | dict(HOME='/nonexistent') | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout + done.stderr, time.monotonic() - begun


SEEK = """
from sinklab.storage.paths import get_file_system, parse_path
try:
    print(get_file_system(parse_path('%s')).find('%s'))
except OSError as error:
    print(error.errno, error.strerror)
"""


def test_missing_credentials_are_reported_with_bucket(emulators):
    made = emulators.bucket('s3')
    said, seconds = run(SEEK % (made.url + '/x', made.url + '/x'), AWS_ENDPOINT_URL=made.proxy.url)
    assert said.startswith(f'{errno.EACCES} ')
    assert 'credentials' in said
    assert made.url in said
    assert seconds < 30.0
    with made.proxy.treating(always(Answer(status=401))):
        said, seconds = run(
            SEEK.replace('get_file_system, parse_path', 'get_file_system, parse_path\nimport gcsfs.core\n').replace(
                'try:',
                f'gcsfs.core._location = lambda *_: "{made.proxy.url}/storage.googleapis.com"\ntry:',
            )
            % ('gs://b/x', 'gs://b/x')
        )
    assert said.startswith(f'{errno.EACCES} ')
    assert 'credentials' in said
    assert 'gs://b' in said
    assert seconds < 30.0


@pytest.mark.slow
def test_unreadable_credentials_file_is_reported():
    said, _ = run(SEEK % ('gs://b/x', 'gs://b/x'), GOOGLE_APPLICATION_CREDENTIALS='/nonexistent.json')
    assert said.startswith(f'{errno.EACCES} ')
    assert 'GOOGLE_APPLICATION_CREDENTIALS' in said
    assert '/nonexistent.json' in said


@pytest.mark.parametrize(('scheme', 'library', 'extra'), [('gs', 'gcsfs', 'gcs'), ('s3', 's3fs', 's3')])
def test_missing_bucket_library_is_reported_with_extra(scheme, library, extra):
    block = f'import sys; sys.modules["{library}"] = None\n'
    said, _ = run(f'{block}from sinklab.storage.paths import parse_path\nparse_path("{scheme}://b/x")')
    line = said.splitlines()[-1]
    assert f'{scheme}://' in line
    assert library in line
    assert line.endswith(format_extra_command(extra))


@pytest.mark.slow
def test_parse_path_replaces_file_system_cached_by_etils():
    code = """
from etils.epath import backend
before = type(backend.fsspec_backend.fs('gs://b/x'))
from sinklab.storage import gcs
from sinklab.storage.paths import parse_path
parse_path('gs://b/x')
print(before is gcs.Storage, type(backend.fsspec_backend.fs('gs://b/x')) is gcs.Storage)
"""
    assert run(code)[0].split() == ['False', 'True']


def test_bucket_access_does_not_import_tensorflow(bucket, tmp_path):
    (tmp_path / 'tensorflow').mkdir()
    (tmp_path / 'tensorflow' / '__init__.py').write_text('raise SystemExit("tensorflow was imported")')
    paths = os.pathsep.join([str(tmp_path), os.environ.get('PYTHONPATH', '')])
    code = f"""
import importlib.util
assert importlib.util.find_spec('tensorflow')
from sinklab.storage.paths import parse_path
from sinklab.storage import directories
path = parse_path('{bucket.url}/x')
path.write_text('there')
print(path.read_text(), directories.list_files(path.parent))
"""
    said, _ = run(code, PYTHONPATH=paths, **bucket.variables)
    assert said.strip() == "there ['x']"


def answered(code, status):
    """Return the error that botocore raises for a response."""
    return botocore.exceptions.ClientError(
        {'Error': {'Code': code}, 'ResponseMetadata': {'HTTPStatusCode': status}}, ''
    )


def caused(*errors):
    """Chain errors by __cause__ and return the first."""
    for error, cause in itertools.pairwise(errors):
        error.__cause__ = cause
    return errors[0]


@pytest.mark.parametrize(
    ('error', 'number'),
    [
        (aiohttp.ServerDisconnectedError(), errno.ETIMEDOUT),
        (aiohttp.ClientPayloadError('half'), errno.ETIMEDOUT),
        (aiohttp.ClientOSError(errno.ECONNRESET, 'reset'), errno.ETIMEDOUT),
        (aiohttp.SocketTimeoutError(), errno.ETIMEDOUT),
        (TimeoutError(), errno.ETIMEDOUT),
        (requests.exceptions.ProxyError(), errno.ETIMEDOUT),
        (gcsfs.retry.HttpError({'code': 503, 'message': ''}), errno.ETIMEDOUT),
        (botocore.exceptions.EndpointConnectionError(endpoint_url='x'), errno.ETIMEDOUT),
        (botocore.exceptions.ReadTimeoutError(endpoint_url='x'), errno.ETIMEDOUT),
        (botocore.exceptions.CredentialRetrievalError(provider='x', error_msg=''), errno.ETIMEDOUT),
        (botocore.parsers.ResponseParserError('half'), errno.ETIMEDOUT),
        (answered('SlowDown', 503), errno.ETIMEDOUT),
        (answered('RequestTimeout', 400), errno.ETIMEDOUT),
        (answered('ConditionalRequestConflict', 409), errno.ETIMEDOUT),
        (
            caused(
                gcsfs.retry.HttpError({'code': 401, 'message': 'Invalid Credentials'}),
                google.auth.exceptions.RefreshError('x'),
                google.auth.exceptions.TransportError('nobody renews the token'),
            ),
            errno.ETIMEDOUT,
        ),
        (gcsfs.retry.HttpError({'code': 401, 'message': 'Invalid Credentials'}), errno.EACCES),
        (OSError('Forbidden: https://x'), errno.EACCES),
        (answered('AccessDenied', 403), errno.EACCES),
        (answered('ExpiredToken', 400), errno.EACCES),
        (botocore.exceptions.NoCredentialsError(), errno.EACCES),
        (botocore.exceptions.ProfileNotFound(profile='x'), errno.EACCES),
        (google.auth.exceptions.DefaultCredentialsError('x'), errno.EACCES),
        (answered('NoSuchBucket', 404), errno.ENXIO),
        (gcsfs.retry.HttpError({'code': 400, 'message': 'x'}), errno.EINVAL),
        (ValueError('Bad Request: https://x'), errno.EINVAL),
        (botocore.exceptions.ParamValidationError(report='x'), errno.EINVAL),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else errno.errorcode[value],
)
def test_translate_error_maps_library_error_to_errno(error, number):
    said = retry.translate_error(error, 'gs://b', 0.0)
    assert isinstance(said, OSError)
    assert said.errno == number
    assert retry.is_transient(error) == (number == errno.ETIMEDOUT)


@pytest.mark.parametrize('error', [FileNotFoundError('x'), FileExistsError('x'), KeyError('x')])
def test_translate_error_returns_other_errors_unchanged(error):
    assert retry.translate_error(error, 'gs://b', 0.0) is error
