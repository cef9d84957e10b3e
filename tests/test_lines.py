"""Lines that are added one by one are read as they were written, from a disk and from the segments of a bucket."""

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


def test_what_was_written_is_read_once_and_in_order_from_any_byte_on(path, monkeypatch):
    monkeypatch.setattr(run_files, 'SEGMENT_BYTES', 10)
    told = [f'line {number}'.encode() for number in range(9)]
    for attempt in range(3):
        written(path, *told[3 * attempt : 3 * attempt + 3]).close()
    whole = b''.join(line + b'\n' for line in told)
    assert run_files.read_log(path) == whole
    assert (
        len(run_files.list_segments(path)) == 6
    )  # two lines are more than ten bytes, and each attempt begins a segment
    for start in (0, 1, 7, 14, len(whole) - 1, len(whole), len(whole) + 1):
        assert run_files.read_log(path, start) == whole[start:]


def test_what_was_added_is_there_in_time(path, monkeypatch):
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


def test_without_lines_nothing_is_asked_of_the_storage(bucket, path, monkeypatch):
    monkeypatch.setattr(run_files, 'FLUSH_SECONDS', 0.01)
    adding = written(path, b'one')
    before = len(bucket.proxy.requests)
    time.sleep(0.2)
    assert len(bucket.proxy.requests) == before
    adding.close()
    assert len(bucket.proxy.requests) == before


def test_who_is_killed_loses_what_has_come_since_the_last_segment_and_doubles_nothing(path):
    killed = written(path, b'one', b'two')
    killed.append(b'lost')
    killed.stop_event.set()  # without what a close does
    again = written(path, b'three')
    again.close()
    assert run_files.read_log(path) == b'one\ntwo\nthree\n'


def test_a_folder_that_another_job_has_taken_gets_no_line_more(path, monkeypatch):
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


def test_lines_that_come_while_a_segment_is_written_come_after_it(bucket, path, monkeypatch):
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
