"""Token store preparation from and to buckets: same store as on disk, and no repeated work."""

import gzip
import itertools
import json
import signal
import subprocess
import sys
import time

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from conftest import alternate_pairs
from emulators import Answer
from sinklab.storage.atomic_write import upload_file
from stores import encode_lines, make_recipe, make_store, make_texts, save_foreign_tokenizer, write_chat, write_source

from sinklab.cli.main import main
from sinklab.data.prepare import prepare_store
from sinklab.data.remote_store import ETAGS_FILE
from sinklab.errors import UserError
from sinklab.storage import directories
from sinklab.storage.paths import get_file_system, parse_path

TEXTS = make_texts(60)


def upload_folder(folder, url):
    """Upload the files of a folder to a bucket."""
    for name in directories.list_files(folder):
        upload_file(folder / name, parse_path(f'{url}/{name}'))
    return url


@pytest.fixture
def corpus(tmp_path):
    """Return a folder with files of every format."""
    folder = tmp_path / 'corpus'
    (folder / 'deep').mkdir(parents=True)
    (folder / 'a.jsonl').write_bytes(encode_lines(TEXTS[:20]))
    (folder / 'b.jsonl.gz').write_bytes(gzip.compress(encode_lines(TEXTS[20:30])))
    (folder / 'deep' / 'c.jsonl.zst').write_bytes(zstandard.compress(encode_lines(TEXTS[30:40])))
    (folder / 'd.txt').write_text(TEXTS[40])
    pyarrow.parquet.write_table(pyarrow.table({'text': TEXTS[41:]}), folder / 'e.parquet', row_group_size=5)
    return folder


ALL_FILES_GLOB = '**/*.{txt,jsonl,jsonl.gz,jsonl.zst,parquet}'


def assert_same_store(local_folder, remote_folder):
    """Check that a store in a bucket equals a local one byte for byte, except for ETAGS_FILE."""
    names = [name for name in directories.list_files(local_folder) if name != '.lock']
    assert directories.list_files(remote_folder) == sorted([*names, ETAGS_FILE])
    for name in names:
        local_content, remote_content = ((folder / name).read_bytes() for folder in (local_folder, remote_folder))
        if name in ('meta.json', 'recipe.json'):
            local_content, remote_content = (
                {**json.loads(text), 'source': '', 'identity': ''} for text in (local_content, remote_content)
            )
        assert local_content == remote_content, name


@pytest.mark.slow
def test_prepare_in_bucket_makes_same_store_as_on_disk(corpus, tmp_path, bucket):
    url = upload_folder(corpus, f'{bucket.url}/corpus')
    local_store = make_store(tmp_path / 'store', f'text:{corpus}/{ALL_FILES_GLOB}', shard_tokens=300)
    for number, (source, folder) in enumerate(
        [
            (f'text:{url}/{ALL_FILES_GLOB}', tmp_path / 'other'),
            (f'text:{corpus}/{ALL_FILES_GLOB}', parse_path(f'{bucket.url}/one')),
            (f'text:{url}/{ALL_FILES_GLOB}', parse_path(f'{bucket.url}/two')),
        ]
    ):
        store = make_store(folder, source, shard_tokens=300, processes=1 + number % 2)
        assert store.digest == local_store.digest
        assert len(store.shards) > 5
    assert_same_store(local_store.path, parse_path(f'{bucket.url}/one'))
    assert_same_store(local_store.path, parse_path(f'{bucket.url}/two'))
    assert (parse_path(f'{bucket.url}/one') / 'meta.json').read_text() == (local_store.path / 'meta.json').read_text()


@pytest.mark.slow
def test_prepare_uploads_masks_of_masked_shards(tmp_path, bucket):
    source = write_chat(
        tmp_path / 'a.jsonl', [[('user', f'hello {n}'), ('assistant', f'good day {n}')] for n in range(9)]
    )
    assert_same_store(
        make_store(tmp_path / 'store', source).path, make_store(parse_path(f'{bucket.url}/store'), source).path
    )


def test_prepare_reads_tokenizer_from_bucket(tmp_path, bucket):
    source = write_source(tmp_path / 'a.jsonl', TEXTS)
    end_token = save_foreign_tokenizer(tmp_path / 'tokenizer.json') - 2
    upload_file(tmp_path / 'tokenizer.json', parse_path(f'{bucket.url}/tokenizer.json'))
    options = dict(vocabulary=None, end_token=end_token, fixed_token=end_token + 1)
    digests = [
        make_store(tmp_path / str(number), source, tokenizer=file, **options).digest
        for number, file in enumerate((str(tmp_path / 'tokenizer.json'), f'{bucket.url}/tokenizer.json'))
    ]
    assert digests[0] == digests[1]
    with pytest.raises(UserError, match=f'{bucket.url}/none.json'):
        make_store(tmp_path / 'store', source, tokenizer=f'{bucket.url}/none.json', **options)


def stop_preparation(folder, source, num_shards, **changes):
    """Stop a preparation once `num_shards` shards are finished."""

    class StopPreparation(BaseException):
        pass

    def stop_if_finished(_):
        if len(list(folder.glob('*-*-*.json'))) >= num_shards:
            raise StopPreparation

    with pytest.raises(StopPreparation):
        prepare_store(make_recipe(source, **changes), folder, 1, stop_if_finished)


def list_upload_requests(bucket):
    """Return the requests that upload a file of a store. Requests to GCS name it in their bodies."""
    return [
        request
        for request in bucket.proxy.requests
        if (request.method == 'PUT' or '/upload/' in request.path) and 'lease.json' not in request.path
    ]


def list_shard_reads(bucket):
    """Return the requests that read a file of a shard."""
    return [request for name in ('.ids', '.documents') for request in bucket.proxy.find_requests(name, method='GET')]


@pytest.mark.slow
def test_prepare_skips_finished_shards(tmp_path, bucket, monkeypatch):
    monkeypatch.setattr('sinklab.data.prepare.TASK_CHARS', 2000)
    source = write_source(tmp_path / 'a.jsonl', make_texts(150))
    local_store = make_store(tmp_path / 'whole', source, shard_tokens=1000)
    folder = parse_path(f'{bucket.url}/store')
    stop_preparation(folder, source, 4, shard_tokens=1000)
    finished_count = len(list(folder.glob('*-*-*.json')))
    assert 4 <= finished_count < len(local_store.shards)
    bucket.proxy.requests.clear()
    prepare_store(make_recipe(source, shard_tokens=1000), folder, 1)
    new_count = len(local_store.shards) - finished_count
    assert len(list_upload_requests(bucket)) == 3 * new_count + len(('probe.npz', ETAGS_FILE, 'meta.json'))
    assert not list_shard_reads(bucket)
    assert_same_store(local_store.path, folder)
    bucket.proxy.requests.clear()
    prepare_store(make_recipe(source, shard_tokens=1000), folder, 1)
    assert not list_upload_requests(bucket)
    assert not list_shard_reads(bucket)


def flip_last_bit(folder, name):
    path = folder / name
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def remove_file(folder, name):
    (folder / name).unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ('damage', 'is_complete'), alternate_pairs(itertools.product([flip_last_bit, remove_file], [False, True]))
)
def test_prepare_remakes_damaged_or_missing_shard(tmp_path, bucket, monkeypatch, damage, is_complete):
    monkeypatch.setattr('sinklab.data.prepare.TASK_CHARS', 2000)
    source = write_source(tmp_path / 'a.jsonl', make_texts(150))
    local_store, folder = make_store(tmp_path / 'whole', source, shard_tokens=1000), parse_path(f'{bucket.url}/store')
    if is_complete:
        make_store(folder, source, shard_tokens=1000)
    else:
        stop_preparation(folder, source, 4, shard_tokens=1000)
    damage(folder, 'train-000-00001.ids')
    make_store(folder, source, shard_tokens=1000)
    assert_same_store(local_store.path, folder)


def test_prepare_accepts_store_copied_into_bucket(tmp_path, bucket):
    source = write_source(tmp_path / 'a.jsonl', TEXTS)
    local_store = make_store(tmp_path / 'store', source)
    folder = parse_path(upload_folder(local_store.path, f'{bucket.url}/store'))
    bucket.proxy.requests.clear()
    prepare_store(make_recipe(source), folder, 1)
    assert not list_upload_requests(bucket)
    flip_last_bit(folder, local_store.shards[0].file_names[0])
    prepare_store(make_recipe(source), folder, 1)
    assert (folder / local_store.shards[0].file_names[0]).read_bytes() == (
        local_store.path / local_store.shards[0].file_names[0]
    ).read_bytes()


def make_failing_rule(bucket, times, **answer_options):
    """Return a rule that fails the first `times` uploads of shards, and a list of the failures left.

    A request to GCS names the file only in its body. There, uploads after that of the recipe are those of shards.
    """
    failures_left = [times]

    def fail_request(method, path):
        is_after_recipe = any('store/recipe.json' in request.object_names for request in bucket.proxy.requests)
        is_shard = 'train-000' in path or ('uploadType=multipart' in path and is_after_recipe)
        if method not in ('PUT', 'POST') or not is_shard or not failures_left[0]:
            return None
        failures_left[0] -= 1
        return Answer(**answer_options)

    return fail_request, failures_left


@pytest.mark.slow
@pytest.mark.parametrize(
    'answer_options',
    [dict(status=503), pytest.param(dict(max_sent_bytes=0), marks=pytest.mark.exhaustive)],
    ids=['503', 'lost answer'],
)
def test_prepare_retries_transient_storage_failures(tmp_path, bucket, answer_options):
    source = write_source(tmp_path / 'a.jsonl', TEXTS)
    local_store = make_store(tmp_path / 'store', source, shard_tokens=1000)
    bucket.proxy.requests.clear()
    rule, failures_left = make_failing_rule(bucket, 4, **answer_options)
    with bucket.proxy.apply_rule(rule):
        make_store(parse_path(f'{bucket.url}/store'), source, shard_tokens=1000)
    assert failures_left == [0]
    assert_same_store(local_store.path, parse_path(f'{bucket.url}/store'))


def get_error_line(capsys, *arguments):
    assert main(['prepare', *arguments]) == 1
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    return line


def test_prepare_reports_unwritable_destination_in_one_line(tmp_path, bucket, capsys):
    source = write_source(tmp_path / 'a.jsonl', TEXTS)
    options = f'--source={source}', '--vocabulary=300'
    missing_bucket_line = get_error_line(capsys, *options, f'--out={bucket.url}-not/store')
    assert f'{bucket.url}-not/store' in missing_bucket_line
    parse_path(f'{bucket.url}/mine/file').write_text('precious')
    assert '(file)' in get_error_line(capsys, *options, f'--out={bucket.url}/mine')
    assert directories.list_files(parse_path(f'{bucket.url}/mine')) == ['file']
    assert 'az://bucket/store' in get_error_line(capsys, *options, '--out=az://bucket/store')
    with bucket.proxy.apply_rule(lambda method, _: Answer(status=403) if method in ('PUT', 'POST') else None):
        assert 'account' in get_error_line(capsys, *options, f'--out={bucket.url}/store')
    assert not directories.list_files(parse_path(f'{bucket.url}/store'))
    upload_folder(tmp_path, f'{bucket.url}/same')
    same_folder_line = get_error_line(capsys, f'--source=text:{bucket.url}/same/*.jsonl', f'--out={bucket.url}/same')
    assert '(a.jsonl)' in same_folder_line


def test_prepare_prints_train_flags_for_store_in_bucket(tmp_path, bucket, capsys):
    source = upload_texts(tmp_path, bucket)
    out = f'{bucket.url}/stores/pile'
    assert main(['prepare', f'--source={source}', f'--out={out}', '--vocabulary=300', '--held_out=0.2']) == 0
    assert f'--config.data.source=store:{out} --config.data.held_out=0.2' in capsys.readouterr().out
    assert main(['prepare', f'--check={out}', '--length=16', '--batch_size=4', '--json']) == 0
    assert json.loads(capsys.readouterr().out)['problems'] == []
    changed_option_line = get_error_line(
        capsys, f'--source={source}', f'--out={out}', '--vocabulary=300', '--held_out=0.3'
    )
    assert 'held_out 0.2 -> 0.3' in changed_option_line


def upload_texts(tmp_path, bucket):
    write_source(tmp_path / 'a.jsonl', TEXTS)
    upload_file(tmp_path / 'a.jsonl', parse_path(f'{bucket.url}/a.jsonl'))
    return f'text:{bucket.url}/a.jsonl'


def make_prepare_command(source, out):
    arguments = [sys.executable, '-m', 'sinklab', 'prepare', f'--source={source}', f'--out={out}', '--json']
    return [*arguments, '--vocabulary=300', '--shard_tokens=10000', '--processes=2', '--held_out=0.2']


@pytest.mark.slow
@pytest.mark.exhaustive
def test_prepare_resumes_after_kill_and_refuses_concurrent_run(tmp_path, bucket):
    write_source(tmp_path / 'a.jsonl', make_texts(800, max_words=300))
    source = f'text:{upload_folder(tmp_path, f"{bucket.url}/pile")}/*.jsonl'
    folder = parse_path(f'{bucket.url}/store')
    local_result = json.loads(
        subprocess.run(make_prepare_command(source, tmp_path / 'whole'), check=True, capture_output=True).stdout
    )
    no_output = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with bucket.proxy.apply_rule(lambda method, _: Answer(delay_seconds=0.3) if method in ('PUT', 'POST') else None):
        process = subprocess.Popen(make_prepare_command(source, folder), **no_output)
        while len(list(folder.glob('train-*.json'))) < 3:
            assert process.poll() is None
            time.sleep(0.05)
        second_run = subprocess.run(make_prepare_command(source, folder), capture_output=True, text=True)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert second_run.returncode == 1
    (line,) = second_run.stderr.splitlines()
    assert f'{folder} ' in line
    write_times = read_write_times(folder, [path.stem for path in folder.glob('*-*-*.json')])
    result = json.loads(subprocess.run(make_prepare_command(source, folder), check=True, capture_output=True).stdout)
    assert result['digest'] == local_result['digest']
    assert read_write_times(folder, write_times) == write_times
    assert_same_store(tmp_path / 'whole', folder)


def read_write_times(folder, shards):
    """Return when the ids of these shards were written."""
    file_properties = {name: get_file_system(folder).info(f'{folder}/{name}.ids') for name in shards}
    return {
        name: properties.get('generation') or properties['LastModified']
        for name, properties in file_properties.items()
    }
