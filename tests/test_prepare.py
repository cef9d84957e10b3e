"""Preparation of token stores, with interruptions, damaged files and full disks."""

import json
import random
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stores import (
    END_TOKEN,
    decode_documents,
    make_recipe,
    make_store,
    make_texts,
    read_document_ids,
    write_chat,
    write_source,
)

from sinklab.cli import prepare
from sinklab.cli.main import main
from sinklab.data.held_out_split import compute_key_threshold, hash_document_name
from sinklab.data.prepare import prepare_store
from sinklab.data.store import PREDICTED_SUFFIX, Store
from sinklab.errors import UserError
from sinklab.storage.folder_lock import lock_file


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.text(st.characters(exclude_categories=['Cs']), max_size=60), min_size=2, max_size=12),
    st.sampled_from(['none', 'documents']),
    st.integers(1, 200),
)
def test_store_contains_each_nonempty_text_once_in_split_of_its_hash(tmp_path_factory, texts, bos, size):
    folder = tmp_path_factory.mktemp('store')
    source, nonempty_texts = write_source(folder / 'a.jsonl', texts), [text for text in texts if text.strip()]
    if len(nonempty_texts) < 2:
        with pytest.raises(UserError, match='files'):
            make_store(folder / 'store', source)
        return
    store = make_store(folder / 'store', source, bos=bos, shard_tokens=size)
    assert sorted(decode_documents(store, 'train') + decode_documents(store, 'held_out')) == sorted(nonempty_texts)
    names = [f'a.jsonl:{number}' for number, text in enumerate(texts, 1) if text.strip()]
    limit = compute_key_threshold([hash_document_name(name) for name in names], 0.2)
    assert decode_documents(store, 'held_out') == [
        text for text, name in zip(nonempty_texts, names, strict=True) if hash_document_name(name) < limit
    ]
    assert store.meta['dropped'] == (
        {'empty': len(texts) - len(nonempty_texts)} if len(nonempty_texts) < len(texts) else {}
    )


def test_loss_mask_covers_assistant_text_and_following_end_token(tmp_path):
    turns = [
        [('user', f'hello {n}'), ('assistant', f'good day {n}'), ('user', 'more'), ('assistant', 'no')]
        for n in range(5)
    ]
    store = make_store(
        tmp_path / 'store', write_chat(tmp_path / 'a.jsonl', [*turns, [('assistant', 'yes'), ('user', 'thanks')]])
    )
    assert all(PREDICTED_SUFFIX in shard.sha256 for shard in store.shards)
    loss_texts = []
    for split in ('train', 'held_out'):
        tokens = store.get_tokens(split, '')
        ids, loss_mask = tokens.read_ids(0, len(tokens)), tokens.read_loss_mask(0, len(tokens)).astype(bool)
        loss_texts.append(store.load_tokenizer().decode(ids[loss_mask].tolist(), skip_special_tokens=False))
        for end in np.flatnonzero(ids == END_TOKEN):
            assert loss_mask[end] == loss_mask[end - 1]
    loss_text = ''.join(loss_texts)
    assert all(f'good day {n}' in loss_text for n in range(5))
    assert not any(word in loss_text for word in ('hello', 'more', 'thanks', 'user'))
    assert loss_text.count('<|endoftext|>') == 5


def make_prepare_command(source, folder):
    arguments = [sys.executable, '-m', 'sinklab', 'prepare', f'--source={source}', f'--out={folder}', '--json']
    return [*arguments, '--vocabulary=300', '--shard_tokens=20000', '--held_out=0.2']


@pytest.mark.slow
@pytest.mark.parametrize(
    ('num_kills', 'num_documents'), [(2, 800), pytest.param(10, 3000, marks=pytest.mark.exhaustive)]
)
def test_killed_prepare_resumes_from_finished_shards_to_identical_store(tmp_path, num_kills, num_documents):
    source, folder = write_source(tmp_path / 'a.jsonl', make_texts(num_documents, max_words=300)), tmp_path / 'killed'
    subprocess.run(make_prepare_command(source, tmp_path / 'whole'), check=True, capture_output=True)
    num_shards, rng = len(Store(tmp_path / 'whole').shards), random.Random(0)
    assert num_shards > 3 * num_kills
    previous_times = {}
    for kill_index in range(num_kills):
        process = subprocess.Popen(
            make_prepare_command(source, folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
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
    last_run = subprocess.run(make_prepare_command(source, folder), check=True, capture_output=True)
    complete_store, resumed_store = Store(tmp_path / 'whole'), Store(folder)
    assert json.loads(last_run.stdout)['digest'] == complete_store.digest == resumed_store.digest
    assert all(
        (folder / f'{name}.ids').stat().st_mtime_ns == write_time for name, write_time in previous_times.items()
    )
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        path.name for path in complete_store.path.iterdir()
    )
    for path in complete_store.path.iterdir():
        assert path.read_bytes() == (folder / path.name).read_bytes(), path


def test_prepare_waits_while_another_process_holds_lock(tmp_path, capsys):
    source, folder, errors = write_source(tmp_path / 'a.jsonl', make_texts(60)), tmp_path / 'store', ''
    folder.mkdir()
    thread = threading.Thread(target=make_store, args=(folder, source))
    with lock_file(folder / '.lock', 0):
        thread.start()
        for _ in range(600):
            errors += capsys.readouterr().err
            if f'another process prepares {folder}' in errors:
                break
            time.sleep(0.05)
        assert f'another process prepares {folder}' in errors
        assert not (folder / 'meta.json').exists()
    thread.join(60)
    assert Store(folder).shards


def test_damaged_store_files_are_rebuilt_or_rejected(tmp_path):
    source, folder = write_source(tmp_path / 'a.jsonl', make_texts(60)), tmp_path / 'store'
    digest = make_store(folder, source).digest
    for name in ('tokenizer.json', 'probe.npz'):
        for damage in (lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-9])):
            damage(folder / name)
            with pytest.raises(UserError, match=name):
                Store(folder)
            assert make_store(folder, source).digest == digest
    for name in ('meta.json', 'recipe.json'):
        (folder / name).write_text('{')
        with pytest.raises(UserError, match=rf'{name}.*delete'):
            make_store(folder, source)


def test_rejected_prepare_leaves_no_files(tmp_path):
    (tmp_path / 'a.jsonl').write_text('{"body": "x"}')
    for source in (f'text:{tmp_path}/a.jsonl', f'text:{tmp_path}/none', 'web:x'):
        with pytest.raises(UserError):
            make_store(tmp_path / 'store', source)
    assert not (tmp_path / 'store').exists()
    assert [path.name for path in tmp_path.iterdir()] == ['a.jsonl']


def test_prepare_keeps_finished_shards_and_rebuilds_damaged_shards(tmp_path):
    source = write_source(tmp_path / 'a.jsonl', make_texts(60))
    complete_store = make_store(tmp_path / 'whole', source, shard_tokens=300)
    prepare_store(make_recipe(source, shard_tokens=300), tmp_path / 'again')
    finished_shard = tmp_path / 'again' / 'train-000-00000.ids'
    modification_time = finished_shard.stat().st_mtime_ns
    damaged_shard = tmp_path / 'again' / 'train-000-00002.ids'
    damaged_shard.write_bytes(damaged_shard.read_bytes()[:-1])
    with pytest.raises(UserError, match=r'train-000-00002\.ids.*bytes'):
        Store(tmp_path / 'again')
    assert make_store(tmp_path / 'again', source, shard_tokens=300).digest == complete_store.digest
    assert finished_shard.stat().st_mtime_ns == modification_time


def test_prepare_rejects_folder_with_other_content(tmp_path):
    source = write_source(tmp_path / 'a.jsonl', make_texts(20))
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine' / 'file').write_text('precious')
    with pytest.raises(UserError, match=r'mine.*\(file\)'):
        make_store(tmp_path / 'mine', source)
    assert [path.name for path in (tmp_path / 'mine').iterdir()] == ['file']
    make_store(tmp_path / 'store', source)
    with pytest.raises(UserError, match=r'held_out 0\.2 -> 0\.3'):
        make_store(tmp_path / 'store', source, held_out=0.3)
    write_source(tmp_path / 'a.jsonl', make_texts(21))
    with pytest.raises(UserError, match='changed'):
        make_store(tmp_path / 'store', source)


def test_damaged_documents_are_rejected_or_counted_with_lenient(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr('sinklab.data.prepare.MAX_DAMAGED_SHOWN', 1)
    lines = [json.dumps({'text': text}).encode() for text in make_texts(9)]
    (tmp_path / 'a.jsonl').write_bytes(
        b'\n'.join([*lines, b'{"text": "caf\xe9"}', b'{"body": "x"}', b'{"text": " "}'])
    )
    with pytest.raises(UserError, match=r'line 10 .*--lenient'):
        make_store(tmp_path / 'store', f'text:{tmp_path}/a.jsonl')
    store = make_store(tmp_path / 'store', f'text:{tmp_path}/a.jsonl', lenient=True)
    assert store.meta['dropped'] == {'damaged': 2, 'empty': 1}
    first_message, second_message = capsys.readouterr().err.splitlines()
    assert f'{tmp_path}/a.jsonl, line 10' in first_message
    assert '1 more' in second_message
    assert len(read_document_ids(store, 'train') + read_document_ids(store, 'held_out')) == 9


@pytest.mark.slow
def test_full_disk_is_reported_in_one_line_and_finished_shards_are_kept(tmp_path, small_disk):
    source, folder = write_source(tmp_path / 'a.jsonl', make_texts(3000, max_words=300)), small_disk / 'store'
    with pytest.raises(UserError, match='No space left') as raised:
        make_store(folder, source, shard_tokens=100_000)
    assert '\n' not in str(raised.value)
    assert not list(folder.glob('*.unfinished'))
    modification_times = {path.name: path.stat().st_mtime_ns for path in folder.glob('*.ids')}
    assert modification_times
    subprocess.run(['mount', '-o', 'remount,size=40m', small_disk], check=True)
    store = make_store(folder, source, shard_tokens=100_000)
    assert modification_times.items() <= {path.name: path.stat().st_mtime_ns for path in folder.glob('*.ids')}.items()
    assert store.digest == make_store(tmp_path / 'whole', source, shard_tokens=100_000).digest


def test_prepare_command_prints_training_flags_and_checks_batches(tmp_path, capsys):
    source = write_source(tmp_path / 'a.jsonl', make_texts(30))
    arguments = ['prepare', f'--source={source}', f'--out={tmp_path}/store', '--vocabulary=300', '--held_out=0.2']
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert 'held_out' in output
    assert f'--config.data.source=store:{tmp_path}/store --config.data.held_out=0.2' in output
    assert (
        main(['prepare', '--check', f'{tmp_path}/store', '--length=16', '--batch_size=4', '--hosts=2', '--json']) == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert report['problems'] == []
    assert report['batches'] == report['windows']['train'][''] // 4
    assert main(['prepare', '--check', f'{tmp_path}/store', '--batch_size=4', '--hosts=3']) == 1
    output = capsys.readouterr()
    assert '3 hosts' in output.err
    assert '3 hosts' not in output.out
    assert main(['prepare', '--check', f'{tmp_path}/store', '--length=16', '--batch_size=999', '--hosts=3']) == 0
    windows = sum(report['windows']['train'].values())
    message = f'batches of 999: 0 per epoch (training windows: {windows}, fewer than a batch; use a smaller batch)'
    assert message in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ('num_documents', 'size', 'length'), [(400, 'small', 256), (200, 'quickstart', 64), (60, 'smoke', 16)]
)
def test_prepare_check_uses_length_of_suggested_training_command(tmp_path, capsys, num_documents, size, length):
    source, out = write_source(tmp_path / 'a.jsonl', make_texts(num_documents, max_words=300)), f'{tmp_path}/store'
    assert main(['prepare', f'--source={source}', f'--out={out}', '--vocabulary=512', '--held_out=0.3']) == 0
    output = capsys.readouterr().out
    assert f'{length} + 1' in output
    assert f'--size={size} ' in output
    assert main(['prepare', '--check', out, '--json']) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report['length'], report['problems']) == (length, [])
    assert main(['prepare', '--check', out, '--length=8', '--json']) == 0
    other_report = json.loads(capsys.readouterr().out)
    assert (other_report['length'], other_report['batch_size']) == (8, report['batch_size'])


SIZES_FROM_LARGEST = ['paper', 'small', 'quickstart', 'smoke']


@pytest.mark.parametrize('size', SIZES_FROM_LARGEST)
def test_choose_size_returns_largest_size_whose_windows_fit(size, monkeypatch):
    fitting_sizes = SIZES_FROM_LARGEST[SIZES_FROM_LARGEST.index(size) :]
    fitting_specs = [prepare.load_size(fitting_size) for fitting_size in fitting_sizes]
    monkeypatch.setattr(prepare, 'has_enough_windows', lambda store, spec: spec in fitting_specs)
    assert prepare.choose_size(SimpleNamespace(meta=dict(vocabulary=50_432))) == size


@pytest.mark.slow
def test_prepare_prints_no_training_command_for_too_few_windows(tmp_path, capsys):
    source = write_source(tmp_path / 'a.jsonl', make_texts(2, max_words=30))
    assert main(['prepare', f'--source={source}', f'--out={tmp_path}/store', '--held_out=0.5']) == 0
    output = capsys.readouterr().out
    assert 'no size fits' in output
    assert 'sinklab train' not in output


@pytest.mark.parametrize(
    'arguments',
    [['--check=x', '--end_token=0'], ['--check=x', '--held_out=0'], ['--source=x', '--out=y', '--hosts=0']],
)
def test_prepare_rejects_option_of_value_0_that_has_no_effect(capsys, arguments):
    assert main(['prepare', *arguments]) == 1
    assert f'{arguments[-1].partition("=")[0]} has no effect' in capsys.readouterr().err


@pytest.mark.parametrize('vocabulary', [257, (1 << 20) + 1, 99999999999, -1])
def test_prepare_rejects_invalid_vocabulary_size(tmp_path, capsys, vocabulary):
    source = write_source(tmp_path / 'a.jsonl', make_texts(3))
    assert main(['prepare', f'--source={source}', f'--out={tmp_path}/store', f'--vocabulary={vocabulary}']) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f'--vocabulary={vocabulary}' in line or f'--vocabulary is {vocabulary}' in line
    assert not (tmp_path / 'store').exists()
