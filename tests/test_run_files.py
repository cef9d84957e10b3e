"""Readers of run folder files: valid values, or one-line errors for damaged content."""

import json
import math
import os
import socket
import stat
import time

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from conftest import make_tiny_spec
from synthetic_runs import write_probe, write_run

from sinklab.cli.main import main
from sinklab.report import claims, runs
from sinklab.report import runs as runs_module
from sinklab.run_dir import RunDir
from sinklab.storage import run_file_schemas, untrusted_files
from sinklab.storage.lease import LeaseLostError, hold_lease
from sinklab.storage.untrusted_files import DamagedFileError

MAX_READ_SECONDS = 2.0  # time limit for reading one small file
LINEAGE = dict(run='../a', step=4, seal='0', row='a', commit=None, config=['x 1 -> 2'], new=[], dropped=[], data=[])
VALID_CONTENTS = {
    'row': dict(config='c.py', row='a', diff={'x': 1}, published={'sink/1': 18.2, 'fails': True}, source='p. 3'),
    'outcome': dict(kind='done', step=8, checkpoint=8, message='', exit_code=0),
    'environment': dict(commit='ab', attempts=[dict(step=0, attention='dense', changes=['x 1 -> 2'])]),
    'config': dict(seed=0, model=dict(vocabulary=300), optimizer=dict(steps=8), data=dict(length=16)),
    'sweep': [dict(row='a', seeds={'0': 'done'})],
    'claims': dict(
        size=None,
        overrides={},
        same={},
        configs={'a': {'seed': 0}},
        runs={'a': {'0': dict(outcome='done', start={'sink/1': 0.5}, end={})}},
    ),
    'verdicts': [claims.make_claim_entry('a', claims.Claim('A.', 'source', untestable_reason='reason'), {}, {})],
    'lease': dict(token='t', host='h', pid=1, machine='m', born='1', job='', attempt=0, beat=1.5, state='running'),
}
VALID_CONTENTS['row'] |= {'from': LINEAGE}
RECORDS = [{'step': step, 'seconds': step / 2, 'train/loss': 5.0 - step / 10} for step in range(9)]
LINES = b''.join(json.dumps(record).encode() + b'\n' for record in RECORDS)
ODD_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**40), 10**40),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from([[], {}, [[[]]], {'a': {'b': 1}}, 10**5, -1, 2**31, 2**53, 1e300, '../..', '\0', '\ud800']),
)
THOROUGH_SETTINGS = hypothesis.settings(
    max_examples=200,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)


@st.composite
def change_value(draw, value):
    """Return a JSON value with one part removed or replaced."""
    if isinstance(value, dict | list) and value and draw(st.booleans()):
        copy = value.copy()
        key = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
        if draw(st.integers(0, 5)):
            copy[key] = draw(change_value(value[key]))
        else:
            del copy[key]
        return copy
    return draw(ODD_VALUES)


@st.composite
def change_bytes(draw, content):
    """Return bytes with some flipped, cut off or inserted, including deep nesting and NaN."""
    content = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        position = draw(st.integers(0, max(0, len(content) - 1)))
        kind = draw(st.sampled_from(['flip', 'cut', 'insert', 'drop']))
        if kind == 'flip' and content:
            content[position] ^= 1 << draw(st.integers(0, 7))
        elif kind == 'cut':
            del content[position:]
        elif kind == 'drop':
            del content[position : position + draw(st.integers(1, 20))]
        else:
            insertions = [
                b'NaN',
                b'null',
                b'[' * 5000,
                b'{"a":' * 5000,
                b'1' * 5000,
                b'1e999',
                b'\0' * 8,
                b'\xff',
                b'\n',
                b'""',
            ]
            content[position:position] = draw(st.sampled_from(insertions))
    return bytes(content)


def read_or_none(read_function, *arguments):
    """Return the result of a reader, or None if it raises DamagedFileError with a one-line message."""
    start_time = time.monotonic()
    try:
        return read_function(*arguments)
    except DamagedFileError as error:
        if len(str(error).splitlines()) != 1:
            raise
        return None
    finally:
        assert time.monotonic() - start_time < MAX_READ_SECONDS


@pytest.mark.parametrize('kind', VALID_CONTENTS)
def test_decode_run_file_returns_written_value(kind):
    assert run_file_schemas.decode_run_file(json.dumps(VALID_CONTENTS[kind]), kind, 'file') == VALID_CONTENTS[kind]


@pytest.mark.parametrize('kind', VALID_CONTENTS)
@THOROUGH_SETTINGS
@hypothesis.given(data=st.data())
@pytest.mark.slow
def test_decode_run_file_matches_schema_or_raises_for_damaged_json(kind, data):
    content = data.draw(
        st.one_of(
            change_value(VALID_CONTENTS[kind]).map(lambda value: json.dumps(value).encode()),
            change_bytes(json.dumps(VALID_CONTENTS[kind]).encode()),
        )
    )
    value = read_or_none(run_file_schemas.decode_run_file, content, kind, 'file')
    if value is not None:
        run_file_schemas.msgspec.convert(value, run_file_schemas.SCHEMAS[kind])
        json.dumps(value, allow_nan=False)


@THOROUGH_SETTINGS
@hypothesis.given(data=st.data())
@pytest.mark.slow
def test_decode_metrics_returns_records_or_faults_for_damaged_lines(data):
    index = data.draw(st.integers(0, len(RECORDS) - 1))
    lines = LINES.splitlines(keepends=True)
    lines[index] = data.draw(change_value(RECORDS[index]).map(lambda changed: json.dumps(changed).encode() + b'\n'))
    content = data.draw(st.one_of(change_bytes(LINES), st.just(b''.join(lines))))
    records, faults = read_or_none(run_file_schemas.decode_metrics, content)
    for record in records:
        assert type(record['step']) is int
        assert 0 <= record['step'] < 2**31
        for name, value in record.items():
            assert type(name) is str
            assert type(value) in (int, float)
            assert math.isfinite(value)
            assert abs(value) < 1e39
    assert all(1 <= fault.line <= content.count(b'\n') + 1 for fault in faults)
    assert all(len(fault.reason.splitlines()) == 1 for fault in faults)


@pytest.fixture(scope='module')
def probe_file(tmp_path_factory):
    file = tmp_path_factory.mktemp('probe') / '00000008.npz'
    write_probe(file, np.random.default_rng(0))
    arrays = dict(np.load(file))
    with file.open('wb') as stream:
        np.savez_compressed(stream, **arrays)
    return file


@THOROUGH_SETTINGS
@hypothesis.given(data=st.data())
@pytest.mark.slow
def test_read_arrays_returns_written_values_or_raises_for_damaged_probe(probe_file, data):
    """Rely on the checksum of each array: arrays read from a damaged file equal the written ones."""
    file = probe_file.with_name('damaged.npz')
    file.write_bytes(data.draw(change_bytes(probe_file.read_bytes())))
    actual = read_or_none(run_file_schemas.read_arrays, file)
    if actual is not None:
        with np.load(probe_file) as expected:
            for name in actual.keys() & {*expected.files}:
                np.testing.assert_array_equal(actual[name], expected[name])
        read_or_none(run_file_schemas.check_dimensions, file, actual)


def test_read_arrays_matches_numpy_load(tmp_path):
    arrays = dict(
        a_LH=np.arange(6.0).reshape(2, 3),
        b_LH=np.asfortranarray(np.arange(6, dtype=np.float16).reshape(2, 3)),
        c_L=np.zeros(2, np.int32),
        none=np.zeros((0, 3)),
        scalar=np.float32(3),
        text=np.array('Größe'),
    )
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / 'a.npz', **arrays)
        actual = run_file_schemas.read_arrays(tmp_path / 'a.npz')
        with np.load(tmp_path / 'a.npz') as expected:
            assert actual.keys() == {*expected.files}
            for name in actual:
                assert (actual[name].dtype, actual[name].shape) == (expected[name].dtype, expected[name].shape)
                np.testing.assert_array_equal(actual[name], expected[name])


def test_read_arrays_rejects_oversized_header_without_allocation(tmp_path):
    import tracemalloc

    from faults.file_damages import write_huge_header

    write_huge_header(tmp_path / 'a.npz')
    tracemalloc.start()
    with pytest.raises(DamagedFileError, match='shape'):
        run_file_schemas.read_arrays(tmp_path / 'a.npz')
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def make_lines(*steps):
    """Return lines of metrics.jsonl; a negative step gives a truncated line."""
    complete_lines = [b'{"step": %d, "seconds": 0.5}\n' % abs(step) for step in steps]
    return b''.join(
        line if step >= 0 else line[:20] + b'\n' for step, line in zip(steps, complete_lines, strict=True)
    )


STEPS_BY_CRASH = {
    'one kill': [1, 2, 3, -4, 3, 4, 5],
    'one kill, and the next attempt begins with the step of the line': [1, 2, -3, 3, 4],
    'one kill at the very first line': [-1, 1, 2],
    'two kills, the second before the step is recorded again': [1, 2, 3, -4, 3],
    'two kills, the second in the middle of a line': [1, 2, 3, 4, -5, 3, -4],
    'two kills, and then a third attempt': [1, 2, 3, 4, -5, 3, -4, 3, 4, 5, 6],
    'a kill, and a stop before anything is recorded': [1, 2, -3],
    'two kills in a row in the same line': [1, 2, -3, -3],
    'a kill, and the next attempt records every fourth step': [1, 2, 3, 4, 5, 6, -7, 4, 8, 12],
    'two kills, and the last attempt records every fourth step': [1, 2, 3, 4, 5, 6, -7, 4, -5, 4, 8, 12],
}
STEPS_BY_DAMAGE = {
    'a line between two others': ([1, 2, -3, 4, 5], 3),
    'the first line': ([-1, 2, 3], 1),
    'the line before the last': ([1, 2, 3, -4, 5], 4),
    'two lines in a row': ([1, 2, -3, -4, 5], 3),
    'a line of a run that has gone on from a checkpoint later': ([1, -2, 3, 4, 5, 4, 5, 6], 2),
    'a line of a run that has gone on from a checkpoint before': ([1, 2, 3, -4, 3, 4, 5, -6, 7], 8),
}


@pytest.mark.parametrize('name', STEPS_BY_CRASH)
def test_decode_metrics_ignores_line_truncated_by_crash(name):
    content = make_lines(*STEPS_BY_CRASH[name])
    records, faults = run_file_schemas.decode_metrics(content)
    assert faults == []
    assert [record['step'] for record in records] == [step for step in STEPS_BY_CRASH[name] if step >= 0]
    assert run_file_schemas.decode_metrics(content.removesuffix(b'\n'))[1] == []


@pytest.mark.parametrize('name', STEPS_BY_DAMAGE)
def test_decode_metrics_reports_truncated_line_not_explained_by_crash(name):
    steps, line = STEPS_BY_DAMAGE[name]
    faults = run_file_schemas.decode_metrics(make_lines(*steps))[1]
    assert faults[0].line == line
    assert len(faults) == 1 + (name == 'two lines in a row')


def record_crashed_attempt(folder, *steps, truncated_step):
    """Record steps, and truncate the line of one more step as a killed attempt does."""
    record_attempt(folder, *steps)
    with (folder.path / 'metrics.jsonl').open('ab') as file:
        file.write(make_lines(-truncated_step)[:-1])


def record_attempt(folder, *steps):
    metrics = folder.open_metrics_writer(lambda: None)
    for step in steps:
        metrics.append(dict(step=step, seconds=step / 2))
    metrics.close()


def test_read_records_skips_lines_truncated_by_two_crashes(tmp_path, capsys):
    folder = RunDir(tmp_path)
    record_crashed_attempt(folder, 1, 2, 3, truncated_step=4)
    record_crashed_attempt(folder, 3, truncated_step=4)
    record_attempt(folder)
    record_attempt(folder, 3)
    assert [record['step'] for record in folder.read_records(8, strict=True)] == [1, 2, 3]
    assert folder.read_metric_lines_from(0)[0] == folder.read_metric_lines()
    assert capsys.readouterr().err == ''


def test_read_records_accepts_other_steps_after_truncated_line(tmp_path, capsys):
    """Resume from a checkpoint of step 3, so that no repeated step marks the new attempt."""
    folder = RunDir(tmp_path)
    record_crashed_attempt(folder, 1, 2, 3, truncated_step=4)
    record_attempt(folder, 5, 10)
    assert [record['step'] for record in folder.read_records(10, strict=True)] == [1, 2, 3, 5, 10]
    assert folder.read_metric_lines_from(0)[0] == folder.read_metric_lines()
    assert capsys.readouterr().err == ''


def test_read_metric_lines_from_reports_no_damage_across_crash_and_resume(tmp_path, capsys):
    folder = RunDir(tmp_path)
    record_crashed_attempt(folder, 1, 2, 3, truncated_step=4)
    records, offset = folder.read_metric_lines_from(0)
    record_attempt(folder, 2, 3)
    next_records, offset = folder.read_metric_lines_from(offset)
    record_attempt(folder, 4, 5)
    last_records, _ = folder.read_metric_lines_from(offset)
    assert [record['step'] for record in records + next_records + last_records] == [1, 2, 3, 2, 3, 4, 5]
    assert capsys.readouterr().err == ''


@pytest.mark.parametrize('tail', [b'{', b'{"st', b'{"step": 4', b'{"step": 4, "seconds": 2.0'])
def test_metrics_writer_removes_truncated_last_line(tmp_path, tail):
    (tmp_path / 'metrics.jsonl').write_bytes(make_lines(1, 2) + tail)
    record_attempt(RunDir(tmp_path), 2)
    assert (tmp_path / 'metrics.jsonl').read_bytes() == make_lines(1, 2) + b'{"step": 2, "seconds": 1.0}\n'


@pytest.mark.parametrize('tail', [b'{"step": 3, "seconds": 1.5}', b'null', bytes(9), b'{"a": 1'])
def test_metrics_writer_keeps_complete_or_damaged_last_line(tmp_path, tail):
    (tmp_path / 'metrics.jsonl').write_bytes(make_lines(1, 2) + tail)
    record_attempt(RunDir(tmp_path), 4)
    assert (tmp_path / 'metrics.jsonl').read_bytes() == make_lines(1, 2) + tail + b'\n{"step": 4, "seconds": 2.0}\n'


def test_metrics_writer_removes_nothing_after_lease_is_lost(tmp_path):
    (tmp_path / 'metrics.jsonl').write_bytes(make_lines(1) + b'{"st')

    def raise_lease_lost():
        raise LeaseLostError('taken over')

    with pytest.raises(LeaseLostError):
        RunDir(tmp_path).open_metrics_writer(raise_lease_lost)
    assert (tmp_path / 'metrics.jsonl').read_bytes() == make_lines(1) + b'{"st'


FILE_MAKERS = {
    'a folder': lambda path: path.mkdir(),
    'a FIFO': os.mkfifo,
    'a socket': lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
    'a device': lambda path: path.symlink_to('/dev/zero'),
}


@pytest.mark.parametrize('kind', FILE_MAKERS)
def test_read_regular_file_rejects_other_file_types(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)  # a socket path has at most 107 bytes
    FILE_MAKERS[kind](untrusted_files.Path('file'))
    with pytest.raises(DamagedFileError, match=f'file.*{kind}'):
        untrusted_files.read_regular_file(untrusted_files.Path('file'))


def test_read_run_file_rejects_too_large_file(tmp_path):
    with (tmp_path / 'row.json').open('wb') as file:
        file.truncate(1 << 40)
    with pytest.raises(DamagedFileError, match='1,099,511,627,776'):
        run_file_schemas.read_run_file(tmp_path / 'row.json', 'row')


def test_lease_file_has_mode_644(tmp_path):
    old_umask = os.umask(0)
    try:
        with hold_lease(tmp_path):
            assert stat.S_IMODE((tmp_path / 'lease.json').stat().st_mode) == 0o644
    finally:
        os.umask(old_umask)


def test_read_records_names_damaged_line_once(tmp_path, capsys):
    folder = RunDir(write_run(tmp_path / 'a', 'softmax'))
    file = folder.path / 'metrics.jsonl'
    lines = file.read_text().splitlines()
    file.write_text('\n'.join([lines[0], 'null', *lines[1:], '{"step": "x"}']) + '\n')
    assert [record['step'] for record in folder.read_records()] == [0, 10, 20]
    folder.read_records()
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith('sinklab: ')
    assert all(part in message for part in (str(file), 'line 2', 'Expected object, got null'))
    with pytest.raises(DamagedFileError, match='line 2'):
        folder.read_records(strict=True)


def test_read_metric_lines_from_names_later_fault(tmp_path, capsys):
    folder = RunDir(tmp_path)
    file = tmp_path / 'metrics.jsonl'
    file.write_bytes(make_lines(1) + b'null\n')
    _, offset = folder.read_metric_lines_from(0)
    for _ in range(2):
        folder.read_metric_lines_from(0)
    assert all(
        part in err
        for err in [capsys.readouterr().err]
        for part in (str(file), 'line 2', 'Expected object, got null')
    )
    with file.open('ab') as stream:
        stream.write(make_lines(2) + b'\n5\n' + make_lines(3) + b'{"st')
    records, end_offset = folder.read_metric_lines_from(offset)
    assert [record['step'] for record in records] == [2, 3]
    assert end_offset == file.stat().st_size - len(b'{"st')
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith('sinklab: ')
    assert all(part in message for part in (str(file), 'line 4', 'empty'))
    assert folder.read_metric_lines_from(end_offset) == ([], end_offset)


def test_read_records_summarizes_steps_beyond_end_in_one_line(tmp_path, capsys):
    folder = RunDir(tmp_path)
    record_attempt(folder, *range(1, 30))
    folder.read_records(20)
    (message,) = capsys.readouterr().err.splitlines()
    assert 'step 21' in message
    assert '20 steps' in message


def test_read_records_ignores_step_beyond_end(tmp_path, capsys):
    folder = RunDir(write_run(tmp_path / 'a', 'softmax'))
    with (folder.path / 'metrics.jsonl').open('a') as file:
        file.write('{"step": 1000000, "seconds": 1}\n')
    assert folder.read_records(20)[-1]['step'] == 20
    assert all(part in err for err in [capsys.readouterr().err] for part in ('step 1000000', '20 steps'))
    with pytest.raises(DamagedFileError, match='step 1000000'):
        folder.read_records(20, strict=True)


def test_read_runs_skips_damaged_run_and_report_rejects_it(tmp_path, capsys):
    paths = [write_run(tmp_path / name, name) for name in ('a', 'b')]
    (tmp_path / 'a' / 'row.json').write_text('{"row": 5}')
    assert [run.name for run in runs.read_runs(paths)] == ['b']
    assert all(part in err for err in [capsys.readouterr().err] for part in ('row.json', 'got int', '$.row'))
    assert main(['report', paths[0]]) == 1
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith('sinklab report: ')


def test_load_probe_values_rejects_probe_of_other_model(tmp_path):
    folder = RunDir(write_run(tmp_path / 'a', 'softmax'))
    arrays = dict(np.load(folder.get_probe_path(10)))
    np.savez(folder.get_probe_path(10), **{name: array[:1] for name, array in arrays.items()})
    with pytest.raises(DamagedFileError, match=r'00000010\.npz.*\b1\b.*\b3\b'):
        runs_module.load_probe_values(folder.probe_files)


@pytest.mark.slow
def test_hold_lease_replaces_damaged_lease_after_owner_timeout(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr('sinklab.storage.lease.OWNER_TIMEOUT_SECONDS', 0.3)
    monkeypatch.setattr('sinklab.storage.lease.HEARTBEAT_SECONDS', 0.1)
    for number, content in enumerate([b'\xff\xfe', b'[]', b'{"pid": "../../x"}', b'{"beat": "x"}', b'']):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / 'lease.json').write_bytes(content)
        with hold_lease(folder):
            assert 'lease.json' in capsys.readouterr().err


def test_read_start_step_rejects_missing_row_file(tmp_path):
    folder = RunDir(tmp_path / 'run')
    folder.initialize(make_tiny_spec(), dict(row='tiny'))
    (folder.path / 'row.json').unlink()
    with pytest.raises(DamagedFileError, match=r'row\.json'):
        folder.read_start_step()
