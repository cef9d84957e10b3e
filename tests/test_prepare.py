"""Preparation of token stores, with interruptions and damaged documents."""

import json
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from commands import get_error_line
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stores import END_TOKEN, decode_documents, make_store, make_texts, write_chat, write_mixture, write_source

from sinklab.cli.main import main
from sinklab.data import prepare
from sinklab.data.held_out_split import compute_key_threshold, hash_document_name
from sinklab.data.store import LOCK_FILE, PREDICTED_SUFFIX, Store
from sinklab.errors import UserError


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.text(st.characters(exclude_categories=['Cs']), max_size=60), min_size=2, max_size=12),
    st.sampled_from(['none', 'documents']),
    st.integers(1, 200),
)
def test_store_contains_each_nonempty_text_once_in_split_of_its_hash(tmp_path_factory, texts, bos, size):
    folder = tmp_path_factory.mktemp('store')
    source = write_source(folder / 'a.jsonl', texts)
    texts_by_name = {f'a.jsonl:{number}': text for number, text in enumerate(texts, 1) if text.strip()}
    if len(texts_by_name) < 2:
        with pytest.raises(UserError):
            make_store(folder / 'store', source)
        return
    store = make_store(folder / 'store', source, bos=bos, shard_tokens=size)
    limit = compute_key_threshold([hash_document_name(name) for name in texts_by_name], 0.2)
    for split in ('train', 'held_out'):
        is_held_out = split == 'held_out'
        assert decode_documents(store, split) == [
            text for name, text in texts_by_name.items() if (hash_document_name(name) < limit) == is_held_out
        ]
    num_blank = len(texts) - len(texts_by_name)
    assert store.meta['dropped'] == ({'empty': num_blank} if num_blank else {})


def test_loss_mask_covers_assistant_text_and_following_end_token(tmp_path):
    turns = [
        [('user', f'hello {n}'), ('assistant', f'good day {n}'), ('user', 'more'), ('assistant', 'no')]
        for n in range(5)
    ]
    source = write_chat(tmp_path / 'a.jsonl', [*turns, [('assistant', 'yes'), ('user', 'thanks')]])
    store = make_store(tmp_path / 'store', source)
    assert all(PREDICTED_SUFFIX in shard.sha256 for shard in store.shards)
    loss_text = ''
    for split in ('train', 'held_out'):
        tokens = store.get_tokens(split, '')
        ids, loss_mask = tokens.read_ids(0, len(tokens)), tokens.read_loss_mask(0, len(tokens)).astype(bool)
        loss_text += store.load_tokenizer().decode(ids[loss_mask].tolist(), skip_special_tokens=False)
        for end in np.flatnonzero(ids == END_TOKEN):
            assert loss_mask[end] == loss_mask[end - 1]
    assert all(f'good day {n}' in loss_text for n in range(5))
    assert not any(word in loss_text for word in ('hello', 'more', 'thanks', 'user'))
    assert loss_text.count('<|endoftext|>') == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ('num_kills', 'num_documents'), [(2, 800), pytest.param(10, 3000, marks=pytest.mark.exhaustive)]
)
def test_killed_prepare_resumes_from_finished_shards_to_identical_store(tmp_path, num_kills, num_documents):
    source = write_source(tmp_path / 'a.jsonl', make_texts(num_documents, max_words=300))
    whole, folder, rng = tmp_path / 'whole', tmp_path / 'killed', random.Random(0)

    def make_command(folder):
        options = ['--vocabulary=300', '--shard_tokens=20000', '--held_out=0.2']
        return [sys.executable, '-m', 'sinklab', 'prepare', f'--source={source}', f'--out={folder}', *options]

    subprocess.run(make_command(whole), check=True, capture_output=True)
    num_shards = len(Store(whole).shards)
    assert num_shards > 3 * num_kills
    previous_times = {}
    for kill_index in range(num_kills):
        process = subprocess.Popen(make_command(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        expected_count = (kill_index + 1) * num_shards // (2 * num_kills)  # finished shards of all attempts
        while len(list(folder.glob('*-*.json'))) < expected_count:
            assert process.poll() is None
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.03))
        process.send_signal(signal.SIGKILL)
        process.wait()
        current_times = {path.stem: path.with_suffix('.ids').stat().st_mtime_ns for path in folder.glob('*-*.json')}
        assert previous_times.items() <= current_times.items()  # no shard was written twice
        previous_times = current_times
    subprocess.run(make_command(folder), check=True, capture_output=True)
    assert all((folder / f'{name}.ids').stat().st_mtime_ns == when for name, when in previous_times.items())
    contents = [{path.name: path.read_bytes() for path in store.iterdir()} for store in (whole, folder)]
    assert contents[0] == contents[1]


def test_domains_whose_shards_may_not_fit_into_memory_are_refused_in_one_line(tmp_path, monkeypatch):
    domains = {name: dict(source=write_source(tmp_path / name, make_texts(20))) for name in ('a', 'b', 'c')}
    source = write_mixture(tmp_path, domains)
    monkeypatch.setattr(prepare, 'MAX_OPEN_BYTES', 4000)
    with pytest.raises(UserError, match=r'over 2 domains .*1000 tokens.*--shard_tokens') as error_info:
        make_store(tmp_path / 'large', source, shard_tokens=1000)
    assert '\n' not in str(error_info.value)
    assert len(make_store(tmp_path / 'small', source, shard_tokens=500).meta['domains']) == 3


def test_rejected_source_leaves_no_files(tmp_path):
    for source in (f'text:{tmp_path}/none', 'web:x'):
        with pytest.raises(UserError):
            make_store(tmp_path / 'store', source)
    with pytest.raises(UserError, match='none'):
        make_store(tmp_path / 'store', 'stdlib', tokenizer=f'{tmp_path}/none')
    assert list(tmp_path.iterdir()) == []


def test_prepare_prints_a_line_before_it_waits_for_another_process(tmp_path, capsys):
    source = write_source(tmp_path / 'a.jsonl', make_texts(20))
    (tmp_path / 'store').mkdir()
    thread = threading.Thread(target=make_store, args=(tmp_path / 'store', source))
    output = ''
    with FileLock(tmp_path / 'store' / LOCK_FILE):
        thread.start()
        while 'waiting' not in output:
            assert thread.is_alive()
            time.sleep(0.01)
            output += capsys.readouterr().err
    thread.join()
    [line] = output.splitlines()
    assert f'{tmp_path}/store' in line
    assert Store(tmp_path / 'store').meta['domains']


def test_folder_with_other_content_is_refused(tmp_path):
    source = write_source(tmp_path / 'a.jsonl', make_texts(20))
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine' / 'file').write_text('precious')
    with pytest.raises(UserError, match='file'):
        make_store(tmp_path / 'mine', source)
    assert [path.read_text() for path in (tmp_path / 'mine').iterdir()] == ['precious']
    digest = make_store(tmp_path / 'store', source).digest
    assert make_store(tmp_path / 'store', source).digest == digest
    with pytest.raises(UserError, match='held_out'):
        make_store(tmp_path / 'store', source, held_out=0.3)
    write_source(tmp_path / 'a.jsonl', make_texts(21))
    with pytest.raises(UserError, match='source'):
        make_store(tmp_path / 'store', source)
    (tmp_path / 'store' / 'recipe.json').write_text('{')
    with pytest.raises(UserError, match=r'recipe\.json'):
        make_store(tmp_path / 'store', source)


@pytest.mark.slow
def test_prepare_prints_overrides_of_training_and_windows_of_given_length(tmp_path, capsys):
    source, out = write_source(tmp_path / 'a.jsonl', make_texts(200, max_words=300)), f'{tmp_path}/store'
    assert main(['prepare', f'--source={source}', f'--out={out}', '--vocabulary=512', '--held_out=0.3']) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    for option in (f'data.source=store:{out}', 'data.held_out=0.3', 'model.vocabulary=512'):
        assert f' --config.{option}' in line
    assert main(['prepare', '--check', out, '--json', '--length=8', '--batch_size=4']) == 0
    report = json.loads(capsys.readouterr().out)
    num_windows = len(Store(out).get_tokens('train', '')) // (8 + 1)
    assert (report['length'], report['windows']['train']['']) == (8, num_windows)
    assert report['batches'] == num_windows // 4


@pytest.mark.parametrize(
    ('arguments', 'option'),
    [
        (['--check=x', '--end_token=0'], '--end_token'),
        (['--source=x', '--out=y', '--length=0'], '--length'),
        (['--source=x'], '--out'),
        *((['--source=stdlib', '--out=y', f'--vocabulary={size}'], '--vocabulary') for size in (257, 1 << 40, -1)),
    ],
)
def test_prepare_refuses_options_in_one_line(capsys, arguments, option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert option in get_error_line(capsys, 'prepare', *arguments)
    assert list(tmp_path.iterdir()) == []
