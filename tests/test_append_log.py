"""Append logs in buckets: lines are read as written, in order and once."""

import threading
import time

import pytest

from sinklab.storage import run_files
from sinklab.storage.directories import list_files
from sinklab.storage.lease import LeaseLostError
from sinklab.storage.paths import parse_path


@pytest.fixture
def path(bucket):
    return parse_path(f'{bucket.url}/run/metrics.jsonl')


def written(path, *texts, check=lambda: None):
    adding = run_files.open_append_log(path, check)
    for text in texts:
        adding.append(text)
        adding.sync()
    return adding


def test_read_log_returns_lines_in_order_from_any_byte(path, monkeypatch):
    monkeypatch.setattr(run_files, 'SEGMENT_BYTES', 10)
    told = [f'line {number}'.encode() for number in range(9)]
    for attempt in range(3):
        written(path, *told[3 * attempt : 3 * attempt + 3]).close()
    whole = b''.join(line + b'\n' for line in told)
    assert run_files.read_log(path) == whole
    assert len(run_files.list_segments(path)) == 6  # two lines exceed ten bytes, and each attempt starts a segment
    for start in (0, 1, 7, 14, len(whole) - 1, len(whole), len(whole) + 1):
        assert run_files.read_log(path, start) == whole[start:]


def test_appended_line_is_flushed_in_time(path, monkeypatch):
    monkeypatch.setattr(run_files, 'FLUSH_SECONDS', 0.1)
    adding = run_files.open_append_log(path)
    for line in (b'one', b'two'):
        adding.append(line)
        until = time.monotonic() + 5
        while not run_files.read_log(path).endswith(line + b'\n') and time.monotonic() < until:
            time.sleep(0.02)
    assert run_files.read_log(path) == b'one\ntwo\n'
    assert len(run_files.list_segments(path)) == 1
    adding.close()


def test_idle_log_sends_no_requests(bucket, path, monkeypatch):
    monkeypatch.setattr(run_files, 'FLUSH_SECONDS', 0.01)
    adding = written(path, b'one')
    before = len(bucket.proxy.requests)
    time.sleep(0.2)
    assert len(bucket.proxy.requests) == before
    adding.close()
    assert len(bucket.proxy.requests) == before


def test_killed_writer_loses_only_unsynced_lines(path):
    killed = written(path, b'one', b'two')
    killed.append(b'lost')
    killed.stop_event.set()  # no close
    again = written(path, b'three')
    again.close()
    assert run_files.read_log(path) == b'one\ntwo\nthree\n'


def test_append_fails_after_lease_is_lost(path, monkeypatch):
    monkeypatch.setattr(run_files, 'FLUSH_SECONDS', 0.05)
    taken = threading.Event()

    def check():
        if taken.is_set():
            raise LeaseLostError('taken')

    adding = written(path, b'one', check=check)
    taken.set()
    adding.append(b'two')
    adding.thread.join(5)
    with pytest.raises(LeaseLostError):
        adding.append(b'three')
    with pytest.raises(LeaseLostError):
        adding.close()
    assert run_files.read_log(path) == b'one\n'


def test_lines_appended_during_upload_follow_in_order(bucket, path, monkeypatch):
    monkeypatch.setattr(run_files, 'SEGMENT_BYTES', 64)
    monkeypatch.setattr(run_files, 'FLUSH_SECONDS', 0.001)
    adding = run_files.open_append_log(path)
    told = [f'line {number}'.encode() for number in range(200)]
    for line in told:
        adding.append(line)
        time.sleep(0.001)
    adding.close()
    assert run_files.read_log(path) == b''.join(line + b'\n' for line in told)
    assert len(run_files.list_segments(path)) == len(list_files(path.parent / 'metrics')) > 1
