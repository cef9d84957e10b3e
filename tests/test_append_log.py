"""Append logs in buckets: lines are read as written, in order and once."""

import threading
import time

import pytest

from sinklab.storage import append_log
from sinklab.storage.directories import list_files
from sinklab.storage.lease import LeaseLostError
from sinklab.storage.paths import parse_path


@pytest.fixture
def path(bucket):
    return parse_path(f'{bucket.url}/run/metrics.jsonl')


def write_log(path, *texts, check=lambda: None):
    log = append_log.open_append_log(path, check)
    for text in texts:
        log.append(text)
        log.sync()
    return log


def test_read_log_returns_lines_in_order_from_any_byte(path, monkeypatch):
    monkeypatch.setattr(append_log, 'SEGMENT_BYTES', 10)
    lines = [f'line {number}'.encode() for number in range(9)]
    for attempt in range(3):
        write_log(path, *lines[3 * attempt : 3 * attempt + 3]).close()
    content = b''.join(line + b'\n' for line in lines)
    assert append_log.read_log(path) == content
    assert len(append_log.list_segments(path)) == 6  # two lines exceed ten bytes, and each attempt starts a segment
    for start in (0, 1, 7, 14, len(content) - 1, len(content), len(content) + 1):
        assert append_log.read_log(path, start) == content[start:]


def test_appended_line_is_flushed_in_time(path, monkeypatch):
    monkeypatch.setattr(append_log, 'FLUSH_SECONDS', 0.1)
    log = append_log.open_append_log(path)
    for line in (b'one', b'two'):
        log.append(line)
        deadline = time.monotonic() + 5
        while not append_log.read_log(path).endswith(line + b'\n') and time.monotonic() < deadline:
            time.sleep(0.02)
    assert append_log.read_log(path) == b'one\ntwo\n'
    assert len(append_log.list_segments(path)) == 1
    log.close()


def test_idle_log_sends_no_requests(bucket, path, monkeypatch):
    monkeypatch.setattr(append_log, 'FLUSH_SECONDS', 0.01)
    log = write_log(path, b'one')
    num_requests = len(bucket.proxy.requests)
    time.sleep(0.2)
    assert len(bucket.proxy.requests) == num_requests
    log.close()
    assert len(bucket.proxy.requests) == num_requests


def test_killed_writer_loses_only_unsynced_lines(path):
    killed_log = write_log(path, b'one', b'two')
    killed_log.append(b'lost')
    killed_log.stop_event.set()  # no close
    next_log = write_log(path, b'three')
    next_log.close()
    assert append_log.read_log(path) == b'one\ntwo\nthree\n'


def test_append_fails_after_lease_is_lost(path, monkeypatch):
    monkeypatch.setattr(append_log, 'FLUSH_SECONDS', 0.05)
    lost_event = threading.Event()

    def check():
        if lost_event.is_set():
            raise LeaseLostError('taken')

    log = write_log(path, b'one', check=check)
    lost_event.set()
    log.append(b'two')
    log.thread.join(5)
    with pytest.raises(LeaseLostError):
        log.append(b'three')
    with pytest.raises(LeaseLostError):
        log.close()
    assert append_log.read_log(path) == b'one\n'


def test_lines_appended_during_upload_follow_in_order(bucket, path, monkeypatch):
    monkeypatch.setattr(append_log, 'SEGMENT_BYTES', 64)
    monkeypatch.setattr(append_log, 'FLUSH_SECONDS', 0.001)
    log = append_log.open_append_log(path)
    lines = [f'line {number}'.encode() for number in range(200)]
    for line in lines:
        log.append(line)
        time.sleep(0.001)
    log.close()
    assert append_log.read_log(path) == b''.join(line + b'\n' for line in lines)
    assert len(append_log.list_segments(path)) == len(list_files(path.parent / 'metrics')) > 1
