"""Error messages for buckets, credentials and missing libraries."""

import errno
import itertools
import os
import subprocess
import sys
import time

import aiohttp
import gcsfs.retry
import google.auth.exceptions
import pytest
import requests
from emulators import Answer
from storage_failures import STORAGE_OPERATIONS, answer_always, read_file, write_file

from sinklab.errors import UserError, format_extra_command
from sinklab.storage import retry
from sinklab.storage.paths import parse_path

pytestmark = pytest.mark.usefixtures('short_retries')


@pytest.mark.parametrize('operation', STORAGE_OPERATIONS)
def test_permission_error_is_raised_without_long_retry(bucket, operation):
    path = parse_path(f'{bucket.url}/folder/x')
    write_file(path)
    start_time, previous_count = time.monotonic(), len(bucket.proxy.requests)
    with bucket.proxy.apply_rule(answer_always(Answer(status=403))), pytest.raises((OSError, UserError)) as raised:
        STORAGE_OPERATIONS[operation](path)
    assert time.monotonic() - start_time < 2.0
    assert len(bucket.proxy.requests) - previous_count <= 3
    error = raised.value.__cause__ if isinstance(raised.value, UserError) else raised.value
    assert error.errno == errno.EACCES
    assert bucket.url in str(raised.value)


def test_missing_bucket_is_reported_by_every_operation(bucket):
    path = parse_path(f'{bucket.url}-not/folder/x')
    for operation in ('exists', 'names', 'entries', 'finished', 'write_if_match'):
        with pytest.raises(OSError, match=f'{bucket.url}-not') as raised:
            STORAGE_OPERATIONS[operation](path)
        assert raised.value.errno == errno.ENXIO


def test_missing_object_raises_file_not_found_without_delay(bucket):
    path = parse_path(f'{bucket.url}/x')
    start_time = time.monotonic()
    with pytest.raises(FileNotFoundError):
        read_file(path)
    assert not path.exists()
    assert time.monotonic() - start_time < 2.0


def run_script(code, **variables):
    """Return (output, seconds) of a process without user credentials."""
    environment = {name: os.environ[name] for name in ('PATH', 'PYTHONPATH', 'LD_LIBRARY_PATH') if name in os.environ}
    start_time = time.monotonic()
    process = subprocess.run(
        [sys.executable, '-c', code],
        env=environment | dict(HOME='/nonexistent') | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return process.stdout + process.stderr, time.monotonic() - start_time


LIST_SCRIPT = """
from sinklab.storage.paths import get_file_system, parse_path
try:
    print(get_file_system(parse_path('%s')).find('%s'))
except OSError as error:
    print(error.errno, error.strerror)
"""


def test_missing_credentials_are_reported_with_bucket(bucket):
    with bucket.proxy.apply_rule(answer_always(Answer(status=401))):
        output, seconds = run_script(
            LIST_SCRIPT.replace(
                'get_file_system, parse_path', 'get_file_system, parse_path\nimport gcsfs.core\n'
            ).replace(
                'try:',
                f'gcsfs.core._location = lambda *_: "{bucket.proxy.url}/storage.googleapis.com"\ntry:',
            )
            % ('gs://b/x', 'gs://b/x')
        )
    assert output.startswith(f'{errno.EACCES} ')
    assert 'credentials' in output
    assert 'gs://b' in output
    assert seconds < 30.0


@pytest.mark.slow
def test_unreadable_credentials_file_is_reported():
    output, _ = run_script(LIST_SCRIPT % ('gs://b/x', 'gs://b/x'), GOOGLE_APPLICATION_CREDENTIALS='/nonexistent.json')
    assert output.startswith(f'{errno.EACCES} ')
    assert 'GOOGLE_APPLICATION_CREDENTIALS' in output
    assert '/nonexistent.json' in output


def test_missing_bucket_library_is_reported_with_extra():
    prelude = 'import sys; sys.modules["gcsfs"] = None\n'
    output, _ = run_script(f'{prelude}from sinklab.storage.paths import parse_path\nparse_path("gs://b/x")')
    line = output.splitlines()[-1]
    assert 'gs://' in line
    assert 'gcsfs' in line
    assert line.endswith(format_extra_command('gcs'))


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
    assert run_script(code)[0].split() == ['False', 'True']


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
    output, _ = run_script(code, PYTHONPATH=paths, **bucket.variables)
    assert output.strip() == "there ['x']"


def chain_errors(*errors):
    """Chain errors by __cause__ and return the first."""
    for error, cause in itertools.pairwise(errors):
        error.__cause__ = cause
    return errors[0]


@pytest.mark.parametrize(
    ('error', 'error_number'),
    [
        (aiohttp.ServerDisconnectedError(), errno.ETIMEDOUT),
        (aiohttp.ClientPayloadError('half'), errno.ETIMEDOUT),
        (aiohttp.ClientOSError(errno.ECONNRESET, 'reset'), errno.ETIMEDOUT),
        (aiohttp.SocketTimeoutError(), errno.ETIMEDOUT),
        (TimeoutError(), errno.ETIMEDOUT),
        (requests.exceptions.ProxyError(), errno.ETIMEDOUT),
        (gcsfs.retry.HttpError({'code': 503, 'message': ''}), errno.ETIMEDOUT),
        (
            chain_errors(
                gcsfs.retry.HttpError({'code': 401, 'message': 'Invalid Credentials'}),
                google.auth.exceptions.RefreshError('x'),
                google.auth.exceptions.TransportError('nobody renews the token'),
            ),
            errno.ETIMEDOUT,
        ),
        (gcsfs.retry.HttpError({'code': 401, 'message': 'Invalid Credentials'}), errno.EACCES),
        (OSError('Forbidden: https://x'), errno.EACCES),
        (google.auth.exceptions.DefaultCredentialsError('x'), errno.EACCES),
        (gcsfs.retry.HttpError({'code': 400, 'message': 'x'}), errno.EINVAL),
        (ValueError('Bad Request: https://x'), errno.EINVAL),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else errno.errorcode[value],
)
def test_translate_error_maps_library_error_to_errno(error, error_number):
    translated = retry.translate_error(error, 'gs://b', 0.0)
    assert isinstance(translated, OSError)
    assert translated.errno == error_number
    assert retry.is_transient(error) == (error_number == errno.ETIMEDOUT)


@pytest.mark.parametrize('error', [FileNotFoundError('x'), FileExistsError('x'), KeyError('x')])
def test_translate_error_returns_other_errors_unchanged(error):
    assert retry.translate_error(error, 'gs://b', 0.0) is error
