"""Object storage fails, and says so: what is asked for comes, or an error in words does, in a time with a bound."""

import errno
import os
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import pytest
from emulators import Answer
from etils.epath import backend

from sinklab.files import objects, patience, tree, whole
from sinklab.files.place import hasty, place, reached, storage
from sinklab.record import Refusal

CONTENT = np.random.default_rng(0).bytes(200_000)
MINUTE = 60.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Seconds for minutes."""
    monkeypatch.setattr(patience, 'PAUSE', 0.05)
    patience.LAST.clear()
    with hasty(20.0):
        yield


@pytest.fixture
def brief(monkeypatch, bucket):
    """A request ends after a second without an answer, in both libraries."""
    for scheme in patience_modules():
        monkeypatch.setattr(scheme, 'ONE', 1.0)
    forget()
    yield bucket
    forget()


def patience_modules():
    from sinklab.files import gcs, s3

    return gcs, s3


def forget():
    """The file systems that were made with other waits."""
    place('gs://b'), place('s3://b')
    backend.fsspec_backend._get_filesystem.cache_clear()
    for kind in objects.MADE.values():
        kind.clear_instance_cache()


def once(answer, method='', path=''):
    """A rule that treats the first request of a kind."""
    left = [answer]
    return lambda *request: left.pop() if left and request[0].startswith(method) and path in request[1] else None


def always(answer, method='', path=''):
    return lambda *request: answer if request[0].startswith(method) and path in request[1] else None


def during(seconds, answer):
    until = time.monotonic() + seconds
    return lambda *_: answer if time.monotonic() < until else None


def write(path, content=CONTENT):
    with whole.writable(path.parent), whole.whole(path) as unfinished:
        unfinished.write_bytes(content)


def sends(method, path):
    """Whether a request brings the content of an object."""
    return method in ('POST', 'PUT') and 'uploads' not in path and 'delete' not in path


def read(path):
    return path.read_bytes()


def fetched(path):
    with tempfile.TemporaryDirectory() as folder:
        local = os.path.join(folder, 'x')
        storage(path).get_file(os.fspath(path), local)
        with open(local, 'rb') as file:
            return file.read()


def ranged(path):
    return b''.join(
        storage(path).cat_file(os.fspath(path), start=first, end=first + 100_000) for first in (0, 100_000)
    )


WAYS = [read, fetched, ranged]
ASKED = {
    'read': lambda path: path.read_bytes(),
    'length': tree.length,
    'exists': lambda path: path.exists(),
    'is_dir': lambda path: path.is_dir(),
    'names': lambda path: tree.names(path.parent),
    'entries': lambda path: list(tree.entries(path.parent)),
    'finished': lambda path: tree.finished(path.parent),
    'read_marked': lambda path: storage(path).read_marked(os.fspath(path)),
    'write': write,
    'write_marked': lambda path: storage(path).write_marked(os.fspath(path), b'x', ''),
    'remove': lambda path: tree.remove(path.parent),
    'look': lambda path: storage(path).look(os.fspath(path)),
}


@pytest.mark.parametrize('status', [408, 429, 500, 502, 503, 504])
def test_a_storage_that_is_busy_for_a_while_is_waited_for(bucket, status):
    path = place(f'{bucket.url}/x')
    with bucket.proxy.treating(during(1.0, Answer(status=status))):
        write(path)
    with bucket.proxy.treating(during(1.0, Answer(status=status))):
        assert read(path) == CONTENT


@pytest.mark.parametrize('asked', ASKED)
def test_one_that_is_busy_for_longer_is_refused_in_words_and_in_time(bucket, asked, capsys):
    path = place(f'{bucket.url}/folder/x')
    write(path)
    begun = time.monotonic()
    with hasty(1.0), bucket.proxy.treating(always(Answer(status=503))), pytest.raises((OSError, Refusal)) as refused:
        ASKED[asked](path)
    assert time.monotonic() - begun < 4.0
    error = refused.value.__cause__ if isinstance(refused.value, Refusal) else refused.value
    assert error.errno == errno.ETIMEDOUT
    assert f'{bucket.url} has not answered for' in str(refused.value)
    assert 'Traceback' not in capsys.readouterr().err


@pytest.mark.parametrize('asked', ASKED)
def test_what_is_not_allowed_is_said_at_once(bucket, asked):
    path = place(f'{bucket.url}/folder/x')
    write(path)
    begun, known = time.monotonic(), len(bucket.proxy.requests)
    with bucket.proxy.treating(always(Answer(status=403))), pytest.raises((OSError, Refusal)) as refused:
        ASKED[asked](path)
    assert time.monotonic() - begun < 2.0
    assert len(bucket.proxy.requests) - known <= 3
    error = refused.value.__cause__ if isinstance(refused.value, Refusal) else refused.value
    assert error.errno == errno.EACCES
    assert f'{bucket.url} refuses this account' in str(refused.value)


def test_a_storage_that_does_not_answer_is_told_of_once(bucket, monkeypatch, capsys):
    monkeypatch.setattr(patience, 'TOLD', 0.3)
    path = place(f'{bucket.url}/x')
    write(path)
    with bucket.proxy.treating(during(2.0, Answer(status=503))):
        threads = [threading.Thread(target=read, args=(path,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f'{bucket.url} does not answer')


@pytest.mark.parametrize('way', WAYS)
def test_a_connection_that_is_lost_in_the_middle_of_a_file_loses_nothing(bucket, way):
    path = place(f'{bucket.url}/x')
    write(path)
    left = [0, 1, 50_000, 99_999]
    with bucket.proxy.treating(
        lambda method, name: Answer(bytes=left.pop()) if left and method == 'GET' and '/x' in name else None
    ):
        assert way(path) == CONTENT
    assert not left


@pytest.mark.parametrize('way', WAYS)
def test_a_file_whose_second_half_never_comes_is_asked_for_again(brief, way):
    path = place(f'{brief.url}/x')
    write(path)
    begun = time.monotonic()
    with brief.proxy.treating(once(Answer(bytes=50_000, stalls=30.0), 'GET', '/x')):
        assert way(path) == CONTENT
    assert time.monotonic() - begun < 10.0


def test_a_slow_answer_is_waited_for(bucket):
    path = place(f'{bucket.url}/x')
    with bucket.proxy.treating(always(Answer(seconds=1.0))):
        write(path)
        assert read(path) == CONTENT


def test_an_answer_that_never_comes_is_waited_for_in_vain_for_a_time_with_a_bound(brief):
    path = place(f'{brief.url}/x')
    begun = time.monotonic()
    with hasty(2.0), brief.proxy.treating(always(Answer(seconds=8.0))), pytest.raises(Refusal, match='not answered'):
        write(path)
    assert time.monotonic() - begun < 6.0


@pytest.mark.parametrize('stalls', [0.0, 30.0])
def test_a_connection_that_is_lost_while_a_file_is_sent_loses_nothing(brief, stalls):
    path, content = place(f'{brief.url}/x'), CONTENT * 60  # more than a connection takes that nobody reads
    rule, left = sends, [Answer(taken=100_000, stalls=stalls)]
    with brief.proxy.treating(lambda *request: left.pop() if left and rule(*request) else None):
        write(path, content)
    assert not left
    assert read(path) == content


@pytest.fixture
def in_parts(monkeypatch):
    monkeypatch.setattr(whole, 'PART', 5 << 20)
    return np.random.default_rng(1).bytes((12 << 20) + 7)


FAULTS = [Answer(status=503), Answer(lost=True), Answer(taken=1 << 20), Answer(bytes=0)]


@pytest.mark.parametrize('fault', FAULTS, ids=['busy', 'lost', 'cut', 'unread'])
def test_a_large_file_is_whole_whatever_happens_to_each_of_its_requests(bucket, in_parts, fault):
    path = place(f'{bucket.url}/x')
    write(path, in_parts)
    asked = len(bucket.proxy.requests)
    assert asked > 3
    for number in range(asked):
        place(path).unlink()
        seen = []

        def rule(*request, seen=seen, number=number):
            seen.append(request)
            return fault if len(seen) == number + 1 and request[0] in ('POST', 'PUT') else None

        with bucket.proxy.treating(rule):
            write(path, in_parts)
        assert read(path) == in_parts


def test_half_an_upload_is_no_object(bucket, in_parts):
    path = place(f'{bucket.url}/x')
    seen = []

    def rule(method, name):
        if sends(method, name):
            seen.append(name)
        return Answer(status=503) if len(seen) > 1 else None

    with hasty(0.5), bucket.proxy.treating(rule), pytest.raises(Refusal, match='has not answered'):
        write(path, in_parts)
    assert not path.exists()
    assert tree.names(path.parent) == []
    write(path, b'before')
    seen.clear()
    with hasty(0.5), bucket.proxy.treating(rule), pytest.raises(Refusal, match='has not answered'):
        write(path, in_parts)
    assert read(path) == b'before'


def test_nothing_is_left_on_the_disk_of_what_fails(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    path = place(f'{bucket.url}/x')
    write(path)
    with hasty(0.3), bucket.proxy.treating(always(Answer(status=503))):
        with pytest.raises(Refusal):
            write(path, CONTENT * 40)
        with pytest.raises(OSError, match='not answered'):
            storage(path).get_file(os.fspath(path), os.fspath(tmp_path / 'fetched'))
    with (
        hasty(0.3),
        bucket.proxy.treating(always(Answer(bytes=1000), 'GET')),
        pytest.raises(OSError, match='answered'),
    ):
        storage(path).get_file(os.fspath(path), os.fspath(tmp_path / 'fetched'))
    assert list(tmp_path.iterdir()) == []


def test_a_write_whose_answer_was_lost_knows_itself(bucket):
    path = f'{bucket.url}/lease'
    at = storage(place(path))
    mark = ''
    for number in range(3):
        with bucket.proxy.treating(once(Answer(lost=True), path='lease')):
            content = f'token {number}'.encode()
            mark = at.write_marked(path, content, mark)
        assert mark
        assert at.read_marked(path) == (content, mark)
    with bucket.proxy.treating(once(Answer(lost=True), path='lease')):
        assert at.write_marked(path, b'of another', '') is None
    assert at.read_marked(path) == (content, mark)


def test_a_write_that_another_has_overtaken_since_is_not_taken_for_its_own(bucket):
    path = f'{bucket.url}/lease'
    at = storage(place(path))
    first = at.write_marked(path, b'before', '')

    def overtaken(method, name):
        if 'lease' in name and not heard:
            heard.append(True)
            at.write_marked(path, b'of another', first)
            return Answer(status=503)
        return None

    heard = []
    with bucket.proxy.treating(overtaken):
        assert at.write_marked(path, b'late', first) is None
    assert at.read_marked(path)[0] == b'of another'


def test_two_who_write_at_the_same_time_are_asked_to_again(bucket):
    if bucket.url.startswith('gs'):
        pytest.skip('S3 has an answer for that')
    path = f'{bucket.url}/lease'
    text = '<Error><Code>ConditionalRequestConflict</Code><Message>conflict</Message></Error>'
    with bucket.proxy.treating(once(Answer(status=409, text=text), 'PUT')):
        assert storage(place(path)).write_marked(path, b'x', '')


def test_of_two_who_write_at_the_same_time_exactly_one_does(bucket):
    at = storage(place(bucket.url + '/x'))
    for number in range(50):
        path, won = f'{bucket.url}/lease-{number}', []
        gate = threading.Barrier(2)

        def race(name, path=path, won=won, gate=gate):
            gate.wait()
            if mark := at.write_marked(path, name, ''):
                won.append((name, mark))

        threads = [threading.Thread(target=race, args=(f'{number} {name}'.encode(),)) for name in 'ab']
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [at.read_marked(path)] == won


def test_what_was_deleted_with_an_answer_lost_is_deleted(bucket):
    path = place(f'{bucket.url}/x')
    write(path)
    with bucket.proxy.treating(lambda method, name: deleted(method, name) and gone.pop() if gone else None):
        gone = [Answer(lost=True)]
        path.unlink()
    assert not gone
    assert not path.exists()


def deleted(method, path):
    return method == 'DELETE' or (method == 'POST' and 'delete' in path)


def test_many_objects_go_by_few_requests(bucket, monkeypatch):
    folder = place(f'{bucket.url}/folder')
    for number in range(150):
        storage(folder).pipe_file(f'{folder}/{number // 10}/{number}', b'x')
    write(folder / tree.COMMIT, b'')
    bucket.proxy.requests.clear()
    tree.move(folder, place(f'{bucket.url}/other'))
    assert tree.names(folder) == []
    assert len(tree.names(place(f'{bucket.url}/other'))) == 151
    asked = len(bucket.proxy.requests)
    assert asked <= (2 * 151 + 10), 'a copy is one request of GCS, and two of S3; a deletion one of GCS, none of S3'


def test_a_name_that_looks_like_a_pattern_is_a_name(bucket):
    folder = place(f'{bucket.url}/folder')
    for name in ('a[1]', 'a1', 'b*'):
        write(folder / 'old' / name, name.encode())
    write(folder / 'b2', b'')
    tree.move(folder / 'old', folder / 'new')
    assert tree.names(folder) == ['b2', 'new/a1', 'new/a[1]', 'new/b*']


def test_a_bucket_that_is_not_there_is_said_by_all_who_ask(bucket):
    path = place(f'{bucket.url}-not/folder/x')
    for asked in ('exists', 'names', 'entries', 'finished', 'look', 'write_marked'):
        with pytest.raises(OSError, match=f'the bucket {bucket.url}-not is not there') as refused:
            ASKED[asked](path)
        assert refused.value.errno == errno.ENXIO


def test_a_first_look_is_one_request_and_says_what_is_wrong(bucket):
    write(place(f'{bucket.url}/run/x'))
    bucket.proxy.requests.clear()
    assert reached(f'{bucket.url}/run') == place(f'{bucket.url}/run')
    assert reached(f'{bucket.url}/none') == place(f'{bucket.url}/none')
    assert len(bucket.proxy.requests) == 2
    with pytest.raises(Refusal, match=f'the bucket {bucket.url}-not is not there'):
        reached(f'{bucket.url}-not/run')
    with bucket.proxy.treating(always(Answer(status=403))), pytest.raises(Refusal, match='refuses this account'):
        reached(f'{bucket.url}/run')
    with hasty(0.3), bucket.proxy.treating(always(Answer(status=503))), pytest.raises(Refusal, match='not answered'):
        reached(f'{bucket.url}/run')


def test_what_is_not_there_is_neither_refused_nor_waited_for(bucket):
    path = place(f'{bucket.url}/x')
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
import sys
from sinklab.files.place import place, storage
try:
    print(storage(place('%s')).look('%s'))
except OSError as error:
    print(error.errno, error.strerror)
"""


def test_who_has_no_credentials_is_told_so(emulators):
    made = emulators.bucket('s3')
    said, seconds = run(SEEK % (made.url + '/x', made.url + '/x'), AWS_ENDPOINT_URL=made.proxy.url)
    assert said.startswith(f'{errno.EACCES} no credentials for {made.url} are found')
    assert seconds < 30.0
    with made.proxy.treating(always(Answer(status=401))):
        said, seconds = run(
            SEEK.replace('place, storage', 'place, storage\nimport gcsfs.core\n').replace(
                'try:',
                f'gcsfs.core._location = lambda *_: "{made.proxy.url}/storage.googleapis.com"\ntry:',
            )
            % ('gs://b/x', 'gs://b/x')
        )
    assert said.startswith(f'{errno.EACCES} no credentials for gs://b are found')
    assert seconds < 30.0


def test_credentials_that_cannot_be_read_are_said():
    said, _ = run(SEEK % ('gs://b/x', 'gs://b/x'), GOOGLE_APPLICATION_CREDENTIALS='/nonexistent.json')
    assert said.startswith(f'{errno.EACCES} the credentials of GOOGLE_APPLICATION_CREDENTIALS')
    assert '/nonexistent.json' in said


@pytest.mark.parametrize(('scheme', 'library', 'extra'), [('gs', 'gcsfs', 'gcs'), ('s3', 's3fs', 's3')])
def test_a_bucket_without_its_library_is_refused_with_the_extra_that_brings_it(scheme, library, extra):
    block = f'import sys; sys.modules["{library}"] = None\n'
    said, _ = run(f'{block}from sinklab.files.place import place\nplace("{scheme}://b/x")')
    assert said.splitlines()[-1].endswith(f'{scheme}:// needs {library}; pip install "sinklab[{extra}]"')


def test_buckets_are_reached_as_is_said_here_where_tensorflow_is_installed(bucket, tmp_path):
    (tmp_path / 'tensorflow').mkdir()
    (tmp_path / 'tensorflow' / '__init__.py').write_text('raise SystemExit("tensorflow was imported")')
    paths = os.pathsep.join([str(tmp_path), os.environ.get('PYTHONPATH', '')])
    code = f"""
import importlib.util
assert importlib.util.find_spec('tensorflow')
from sinklab.files.place import place
from sinklab.files import tree
path = place('{bucket.url}/x')
path.write_text('there')
print(path.read_text(), tree.names(path.parent))
"""
    said, _ = run(code, PYTHONPATH=paths, **bucket.variables)
    assert said.strip() == "there ['x']"


@pytest.mark.exhaustive
def test_a_minute_in_which_the_storage_is_busy_is_survived_by_those_who_wait_as_long_as_usual(bucket, monkeypatch):
    monkeypatch.setattr(patience, 'PAUSE', 0.5)
    path = place(f'{bucket.url}/x')
    with hasty(patience.USUAL):
        with bucket.proxy.treating(during(MINUTE, Answer(status=503))):
            write(path)
        with bucket.proxy.treating(during(MINUTE, Answer(status=503))):
            assert read(path) == CONTENT
