"""What reads the files of a run folder: records, or one kind of error in one line, of whatever stands there."""

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
from conftest import tiny
from made_up import made_up, probe

from sinklab.cli.main import main
from sinklab.metrics.registry import FIGURES
from sinklab.report import runs
from sinklab.report import runs as runs_module
from sinklab.run_dir import RunDir
from sinklab.storage import run_files, untrusted_files
from sinklab.storage.lease import LeaseLostError, hold_lease
from sinklab.storage.untrusted_files import DamagedFileError

SECONDS = 2.0  # that a reader may take of a small file
LINEAGE = dict(run='../a', step=4, seal='0', row='a', commit=None, config=['x 1 -> 2'], new=[], dropped=[], data=[])
SOUND = {
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
    'verdicts': [dict(claim='a', words='b')],
    'lease': dict(token='t', host='h', pid=1, machine='m', born='1', job='', attempt=0, beat=1.5, state='running'),
}
SOUND['row'] |= {'from': LINEAGE}
RECORDS = [{'step': step, 'seconds': step / 2, 'train/loss': 5.0 - step / 10} for step in range(9)]
LINES = b''.join(json.dumps(record).encode() + b'\n' for record in RECORDS)
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**40), 10**40),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from([[], {}, [[[]]], {'a': {'b': 1}}, 10**5, -1, 2**31, 2**53, 1e300, '../..', '\0', '\ud800']),
)
HARD = hypothesis.settings(
    max_examples=200,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)


@st.composite
def changed_value(draw, found):
    """A JSON value with one part of it taken away, or replaced by something else."""
    if isinstance(found, dict | list) and found and draw(st.booleans()):
        copy = found.copy()
        key = draw(st.sampled_from(sorted(found) if isinstance(found, dict) else range(len(found))))
        if draw(st.integers(0, 5)):
            copy[key] = draw(changed_value(found[key]))
        else:
            del copy[key]
        return copy
    return draw(ODD)


@st.composite
def changed_bytes(draw, content):
    """Bytes of which some are flipped, cut off, or put in, among them deep nesting and NaN."""
    content = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        kind = draw(st.sampled_from(['flip', 'cut', 'insert', 'drop']))
        if kind == 'flip' and content:
            content[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == 'cut':
            del content[at:]
        elif kind == 'drop':
            del content[at : at + draw(st.integers(1, 20))]
        else:
            odd = [
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
            content[at:at] = draw(st.sampled_from(odd))
    return bytes(content)


def quickly(read, *given):
    """What a reader returns, or None of Damaged, whose message is one line."""
    begun = time.monotonic()
    try:
        return read(*given)
    except DamagedFileError as error:
        if len(str(error).splitlines()) != 1:
            raise
        return None
    finally:
        assert time.monotonic() - begun < SECONDS


@pytest.mark.parametrize('kind', SOUND)
def test_a_sound_file_is_read_as_it_was_written(kind):
    assert run_files.decode_run_file(json.dumps(SOUND[kind]), kind, 'file') == SOUND[kind]


@pytest.mark.parametrize('kind', SOUND)
@HARD
@hypothesis.given(data=st.data())
@pytest.mark.slow
def test_a_damaged_json_file_is_as_its_schema_says_or_is_refused(kind, data):
    content = data.draw(
        st.one_of(
            changed_value(SOUND[kind]).map(lambda found: json.dumps(found).encode()),
            changed_bytes(json.dumps(SOUND[kind]).encode()),
        )
    )
    found = quickly(run_files.decode_run_file, content, kind, 'file')
    if found is not None:
        run_files.msgspec.convert(found, run_files.SCHEMAS[kind])
        json.dumps(found, allow_nan=False)


@HARD
@hypothesis.given(data=st.data())
@pytest.mark.slow
def test_damaged_lines_of_metrics_are_records_or_faults(data):
    number = data.draw(st.integers(0, len(RECORDS) - 1))
    lines = LINES.splitlines(keepends=True)
    lines[number] = data.draw(changed_value(RECORDS[number]).map(lambda one: json.dumps(one).encode() + b'\n'))
    content = data.draw(st.one_of(changed_bytes(LINES), st.just(b''.join(lines))))
    found, faults = quickly(run_files.decode_metrics, content)
    for record in found:
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
    probe(file, np.random.default_rng(0))
    arrays = dict(np.load(file))
    with file.open('wb') as opened:
        np.savez_compressed(opened, **arrays)
    return file


@HARD
@hypothesis.given(data=st.data())
@pytest.mark.slow
def test_a_damaged_probe_is_as_it_was_or_is_refused(probe_file, data):
    """Every array has its own checksum: what is read of a damaged file is what was written."""
    file = probe_file.with_name('damaged.npz')
    file.write_bytes(data.draw(changed_bytes(probe_file.read_bytes())))
    found = quickly(run_files.read_arrays, file)
    if found is not None:
        with np.load(probe_file) as sound:
            for name in found.keys() & {*sound.files}:
                np.testing.assert_array_equal(found[name], sound[name])
        quickly(run_files.check_dimensions, file, found)


def test_arrays_are_read_as_numpy_reads_them(tmp_path):
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
        found = run_files.read_arrays(tmp_path / 'a.npz')
        with np.load(tmp_path / 'a.npz') as expected:
            assert found.keys() == {*expected.files}
            for name in found:
                assert (found[name].dtype, found[name].shape) == (expected[name].dtype, expected[name].shape)
                np.testing.assert_array_equal(found[name], expected[name])


def test_a_header_of_more_numbers_than_there_are_bytes_allocates_nothing(tmp_path):
    import tracemalloc

    from faults.file_damages import huge_header

    huge_header(tmp_path / 'a.npz')
    tracemalloc.start()
    with pytest.raises(DamagedFileError, match='has another size than its shape'):
        run_files.read_arrays(tmp_path / 'a.npz')
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def lines_of(*steps):
    """Lines of metrics.jsonl; one whose step is negative is cut off."""
    whole = [b'{"step": %d, "seconds": 0.5}\n' % abs(step) for step in steps]
    return b''.join(line if step >= 0 else line[:20] + b'\n' for step, line in zip(steps, whole, strict=True))


CRASHES = {
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
DAMAGES = {
    'a line between two others': ([1, 2, -3, 4, 5], 3),
    'the first line': ([-1, 2, 3], 1),
    'the line before the last': ([1, 2, 3, -4, 5], 4),
    'two lines in a row': ([1, 2, -3, -4, 5], 3),
    'a line of a run that has gone on from a checkpoint later': ([1, -2, 3, 4, 5, 4, 5, 6], 2),
    'a line of a run that has gone on from a checkpoint before': ([1, 2, 3, -4, 3, 4, 5, -6, 7], 8),
}


@pytest.mark.parametrize('name', CRASHES)
def test_a_line_that_a_crash_cut_off_is_no_fault(name):
    content = lines_of(*CRASHES[name])
    records, faults = run_files.decode_metrics(content)
    assert faults == []
    assert [record['step'] for record in records] == [step for step in CRASHES[name] if step >= 0]
    assert run_files.decode_metrics(content.removesuffix(b'\n'))[1] == []


@pytest.mark.parametrize('name', DAMAGES)
def test_a_line_cut_off_in_the_middle_is_a_fault_where_no_crash_explains_it(name):
    steps, line = DAMAGES[name]
    faults = run_files.decode_metrics(lines_of(*steps))[1]
    assert faults[0].line == line
    assert len(faults) == 1 + (name == 'two lines in a row')


def crash(folder, *steps, cut):
    """An attempt that records steps and is killed while it records one more."""
    attempt(folder, *steps)
    with (folder.path / 'metrics.jsonl').open('ab') as file:
        file.write(lines_of(-cut)[:-1])


def attempt(folder, *steps):
    metrics = folder.open_metrics_writer(lambda: None)
    for step in steps:
        metrics.append(dict(step=step, seconds=step / 2))
    metrics.close()


def test_a_sweep_reads_a_run_that_was_killed_in_a_line_and_then_again(tmp_path, capsys):
    folder = RunDir(tmp_path)
    crash(folder, 1, 2, 3, cut=4)
    crash(folder, 3, cut=4)
    attempt(folder)
    attempt(folder, 3)
    assert [record['step'] for record in folder.read_records(8, strict=True)] == [1, 2, 3]
    assert folder.read_metric_lines_from(0)[0] == folder.read_metric_lines()
    assert capsys.readouterr().err == ''


def test_a_sweep_reads_a_run_that_was_killed_in_a_line_and_then_records_other_steps(tmp_path, capsys):
    """The checkpoint is of step 3, so that no line shows that another attempt has begun."""
    folder = RunDir(tmp_path)
    crash(folder, 1, 2, 3, cut=4)
    attempt(folder, 5, 10)
    assert [record['step'] for record in folder.read_records(10, strict=True)] == [1, 2, 3, 5, 10]
    assert folder.read_metric_lines_from(0)[0] == folder.read_metric_lines()
    assert capsys.readouterr().err == ''


def test_a_run_that_is_followed_while_it_crashes_and_goes_on_has_no_damaged_line(tmp_path, capsys):
    folder = RunDir(tmp_path)
    crash(folder, 1, 2, 3, cut=4)
    records, byte = folder.read_metric_lines_from(0)
    attempt(folder, 2, 3)
    more, byte = folder.read_metric_lines_from(byte)
    attempt(folder, 4, 5)
    last, _ = folder.read_metric_lines_from(byte)
    assert [record['step'] for record in records + more + last] == [1, 2, 3, 2, 3, 4, 5]
    assert capsys.readouterr().err == ''


@pytest.mark.parametrize('left', [b'{', b'{"st', b'{"step": 4', b'{"step": 4, "seconds": 2.0'])
def test_what_a_crash_left_of_a_line_is_removed_before_others_are_added(tmp_path, left):
    (tmp_path / 'metrics.jsonl').write_bytes(lines_of(1, 2) + left)
    attempt(RunDir(tmp_path), 2)
    assert (tmp_path / 'metrics.jsonl').read_bytes() == lines_of(1, 2) + b'{"step": 2, "seconds": 1.0}\n'


@pytest.mark.parametrize('left', [b'{"step": 3, "seconds": 1.5}', b'null', bytes(9), b'{"a": 1'])
def test_a_last_line_that_is_whole_or_damaged_is_kept(tmp_path, left):
    (tmp_path / 'metrics.jsonl').write_bytes(lines_of(1, 2) + left)
    attempt(RunDir(tmp_path), 4)
    assert (tmp_path / 'metrics.jsonl').read_bytes() == lines_of(1, 2) + left + b'\n{"step": 4, "seconds": 2.0}\n'


def test_a_job_that_has_lost_its_folder_removes_nothing(tmp_path):
    (tmp_path / 'metrics.jsonl').write_bytes(lines_of(1) + b'{"st')

    def check():
        raise LeaseLostError('taken over')

    with pytest.raises(LeaseLostError):
        RunDir(tmp_path).open_metrics_writer(check)
    assert (tmp_path / 'metrics.jsonl').read_bytes() == lines_of(1) + b'{"st'


SHAPES = {
    'a folder': lambda path: path.mkdir(),
    'a FIFO': os.mkfifo,
    'a socket': lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
    'a device': lambda path: path.symlink_to('/dev/zero'),
}


@pytest.mark.parametrize('kind', SHAPES)
def test_only_regular_files_are_opened(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)  # the name of a socket has at most 107 bytes
    SHAPES[kind](untrusted_files.Path('file'))
    with pytest.raises(DamagedFileError, match=f'file is {kind} instead of a regular file'):
        untrusted_files.read_regular_file(untrusted_files.Path('file'))


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    with (tmp_path / 'row.json').open('wb') as file:
        file.truncate(1 << 40)
    with pytest.raises(DamagedFileError, match='1,099,511,627,776 bytes'):
        run_files.read_run_file(tmp_path / 'row.json', 'row')


def test_the_lease_is_readable_by_all_and_executable_by_nobody(tmp_path):
    before = os.umask(0)
    try:
        with hold_lease(tmp_path):
            assert stat.S_IMODE((tmp_path / 'lease.json').stat().st_mode) == 0o644
    finally:
        os.umask(before)


def test_a_damaged_line_is_named_once_with_its_number(tmp_path, capsys):
    folder = RunDir(made_up(tmp_path / 'a', 'softmax'))
    file = folder.path / 'metrics.jsonl'
    lines = file.read_text().splitlines()
    file.write_text('\n'.join([lines[0], 'null', *lines[1:], '{"step": "x"}']) + '\n')
    assert [record['step'] for record in folder.read_records()] == [0, 10, 20]
    folder.read_records()
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f'sinklab: {file}, line 2, is damaged (Expected object, got null) and is skipped (and ')
    with pytest.raises(DamagedFileError, match='line 2, is damaged'):
        folder.read_records(strict=True)


def test_a_second_fault_of_a_file_is_named_while_the_run_is_followed(tmp_path, capsys):
    folder = RunDir(tmp_path)
    file = tmp_path / 'metrics.jsonl'
    file.write_bytes(lines_of(1) + b'null\n')
    _, byte = folder.read_metric_lines_from(0)
    for _ in range(2):
        folder.read_metric_lines_from(0)
    assert f'{file}, line 2, is damaged (Expected object, got null)' in capsys.readouterr().err
    with file.open('ab') as opened:
        opened.write(lines_of(2) + b'\n5\n' + lines_of(3) + b'{"st')
    records, after = folder.read_metric_lines_from(byte)
    assert [record['step'] for record in records] == [2, 3]
    assert after == file.stat().st_size - len(b'{"st')
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f'sinklab: {file}, line 4, is damaged (it is empty) and is skipped (and one line more)')
    assert folder.read_metric_lines_from(after) == ([], after)


def test_many_lines_of_steps_that_the_run_has_not_are_named_in_one_line(tmp_path, capsys):
    folder = RunDir(tmp_path)
    attempt(folder, *range(1, 30))
    folder.read_records(20)
    (said,) = capsys.readouterr().err.splitlines()
    assert 'a line has step 21, but the run has 20 steps' in said


def test_a_line_of_a_step_that_the_run_has_not_is_no_record(tmp_path, capsys):
    folder = RunDir(made_up(tmp_path / 'a', 'softmax'))
    with (folder.path / 'metrics.jsonl').open('a') as file:
        file.write('{"step": 1000000, "seconds": 1}\n')
    assert folder.read_records(20)[-1]['step'] == 20
    assert 'a line has step 1000000, but the run has 20 steps' in capsys.readouterr().err
    with pytest.raises(DamagedFileError, match='step 1000000'):
        folder.read_records(20, strict=True)


def test_of_several_runs_a_damaged_one_is_left_out_and_a_single_one_refused(tmp_path, capsys):
    paths = [made_up(tmp_path / name, name) for name in ('a', 'b')]
    (tmp_path / 'a' / 'row.json').write_text('{"row": 5}')
    assert [run.name for run in runs.read_runs(paths)] == ['b']
    assert 'row.json is damaged (Expected str | null, got int - at $.row)' in capsys.readouterr().err
    assert main(['report', paths[0]]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith('sinklab report: ')


def test_a_probe_of_another_model_is_named(tmp_path):
    folder = RunDir(made_up(tmp_path / 'a', 'softmax'))
    arrays = dict(np.load(folder.get_probe_path(10)))
    np.savez(folder.get_probe_path(10), **{name: array[:1] for name, array in arrays.items()})
    with pytest.raises(DamagedFileError, match=r'00000010\.npz has 1 layers, but .* has 3'):
        runs_module.load_probe_values(folder.probe_files)
    assert FIGURES


@pytest.mark.slow
def test_a_damaged_lease_is_waited_for_as_long_as_a_silent_owner(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr('sinklab.storage.lease.OWNER_TIMEOUT_SECONDS', 0.3)
    monkeypatch.setattr('sinklab.storage.lease.HEARTBEAT_SECONDS', 0.1)
    for number, content in enumerate([b'\xff\xfe', b'[]', b'{"pid": "../../x"}', b'{"beat": "x"}', b'']):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / 'lease.json').write_bytes(content)
        with hold_lease(folder):
            assert 'lease.json is damaged' in capsys.readouterr().err


def test_a_finished_run_whose_row_is_gone_is_no_run_that_begins_anew(tmp_path):
    folder = RunDir(tmp_path / 'run')
    folder.initialize(tiny(), dict(row='tiny'))
    (folder.path / 'row.json').unlink()
    with pytest.raises(DamagedFileError, match=r'row\.json is missing, which records the parent of a fork'):
        folder.read_start_step()
