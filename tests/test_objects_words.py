"""What is wrong with a bucket, or with who asks for it, is said in words."""

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
from failing import ASKED, always, read, write

from sinklab.install_commands import format_extra_command
from sinklab.schema import UserError
from sinklab.storage import retry
from sinklab.storage.paths import parse_path

pytestmark = pytest.mark.usefixtures('impatient')


@pytest.mark.parametrize('asked', ASKED)
def test_what_is_not_allowed_is_said_at_once(bucket, asked):
    path = parse_path(f'{bucket.url}/folder/x')
    write(path)
    begun, known = time.monotonic(), len(bucket.proxy.requests)
    with bucket.proxy.treating(always(Answer(status=403))), pytest.raises((OSError, UserError)) as refused:
        ASKED[asked](path)
    assert time.monotonic() - begun < 2.0
    assert len(bucket.proxy.requests) - known <= 3
    error = refused.value.__cause__ if isinstance(refused.value, UserError) else refused.value
    assert error.errno == errno.EACCES
    assert f'{bucket.url} refuses this account' in str(refused.value)


def test_a_bucket_that_is_not_there_is_said_by_all_who_ask(bucket):
    path = parse_path(f'{bucket.url}-not/folder/x')
    for asked in ('exists', 'names', 'entries', 'finished', 'write_if_match'):
        with pytest.raises(OSError, match=f'the bucket {bucket.url}-not does not exist') as refused:
            ASKED[asked](path)
        assert refused.value.errno == errno.ENXIO


def test_what_is_not_there_is_neither_refused_nor_waited_for(bucket):
    path = parse_path(f'{bucket.url}/x')
    begun = time.monotonic()
    with pytest.raises(FileNotFoundError):
        read(path)
    assert not path.exists()
    assert time.monotonic() - begun < 2.0


def run(code, **variables):
    """(what it says, seconds) of a process that knows of no user."""
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


def test_who_has_no_credentials_is_told_so(emulators):
    made = emulators.bucket('s3')
    said, seconds = run(SEEK % (made.url + '/x', made.url + '/x'), AWS_ENDPOINT_URL=made.proxy.url)
    assert said.startswith(f'{errno.EACCES} no credentials found for {made.url}')
    assert seconds < 30.0
    with made.proxy.treating(always(Answer(status=401))):
        said, seconds = run(
            SEEK.replace('get_file_system, parse_path', 'get_file_system, parse_path\nimport gcsfs.core\n').replace(
                'try:',
                f'gcsfs.core._location = lambda *_: "{made.proxy.url}/storage.googleapis.com"\ntry:',
            )
            % ('gs://b/x', 'gs://b/x')
        )
    assert said.startswith(f'{errno.EACCES} no credentials found for gs://b')
    assert seconds < 30.0


@pytest.mark.slow
def test_credentials_that_cannot_be_read_are_said():
    said, _ = run(SEEK % ('gs://b/x', 'gs://b/x'), GOOGLE_APPLICATION_CREDENTIALS='/nonexistent.json')
    assert said.startswith(f'{errno.EACCES} the credentials of GOOGLE_APPLICATION_CREDENTIALS')
    assert '/nonexistent.json' in said


@pytest.mark.parametrize(('scheme', 'library', 'extra'), [('gs', 'gcsfs', 'gcs'), ('s3', 's3fs', 's3')])
def test_a_bucket_without_its_library_is_refused_with_the_extra_that_brings_it(scheme, library, extra):
    block = f'import sys; sys.modules["{library}"] = None\n'
    said, _ = run(f'{block}from sinklab.storage.paths import parse_path\nparse_path("{scheme}://b/x")')
    line = said.splitlines()[-1]
    assert f'{scheme}:// needs {library}; ' in line
    assert line.endswith(format_extra_command(extra))


@pytest.mark.slow
def test_a_bucket_is_reached_by_our_file_system_where_etils_has_used_another_before():
    code = """
from etils.epath import backend
before = type(backend.fsspec_backend.fs('gs://b/x'))
from sinklab.storage import gcs
from sinklab.storage.paths import parse_path
parse_path('gs://b/x')
print(before is gcs.Storage, type(backend.fsspec_backend.fs('gs://b/x')) is gcs.Storage)
"""
    assert run(code)[0].split() == ['False', 'True']


def test_buckets_are_reached_as_is_said_here_where_tensorflow_is_installed(bucket, tmp_path):
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
    """What botocore makes of an answer."""
    return botocore.exceptions.ClientError(
        {'Error': {'Code': code}, 'ResponseMetadata': {'HTTPStatusCode': status}}, ''
    )


def caused(*errors):
    """The first of some errors, of which each comes from the next."""
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
def test_an_error_of_the_libraries_is_one_of_the_system(error, number):
    said = retry.translate_error(error, 'gs://b', 0.0)
    assert isinstance(said, OSError)
    assert said.errno == number
    assert retry.is_transient(error) == (number == errno.ETIMEDOUT)


@pytest.mark.parametrize('error', [FileNotFoundError('x'), FileExistsError('x'), KeyError('x')])
def test_what_is_not_about_the_storage_is_left_as_it_is(error):
    assert retry.translate_error(error, 'gs://b', 0.0) is error
